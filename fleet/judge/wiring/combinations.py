"""Find hosts whose cables are at switches of two groups of hosts, such as one of two cables in another pod.

Half of the switches of such a host are those of either group, so the hosts of both groups are its peers. Its ports are mixed if
nearly all other hosts at the switch of a port of either half have one other switch in the slot of each port of the other half.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from fleet.judge.wiring.exchanges import Order
from fleet.judge.wiring.links import PortLink

MIN_PEERS = 3
"""Smallest number of other hosts at a switch that show which switch belongs to it in another slot."""


class Combinations:
    """The switches that hosts have together."""

    def __init__(self, orders: Mapping[str, Order]) -> None:
        """`orders`: host -> its switches."""
        self._switch_of: dict[str, dict[str, str]] = defaultdict(dict)
        """Slot -> host -> ID of its switch."""
        self._hosts_at: dict[tuple[str, str], list[str]] = defaultdict(list)
        """Slot and ID of a switch -> the hosts at this switch."""
        self._usual: dict[tuple[str, str, str], str] = {}
        """Results of `_usual_switch`."""
        for host, order in orders.items():
            for slot, switch in order:
                self._switch_of[slot][host] = switch
                self._hosts_at[slot, switch].append(host)

    def mixed_ports(self, ports: Sequence[PortLink]) -> list[PortLink]:
        """Return the ports of a host if half of them are at switches that nearly no other host has with those of the other half.

        Some of the cables are at switches of another group of hosts. Nothing shows which of them.
        """
        # The ports of a bond may be exchanged, so the slot of one of them does not show which switch it should have.
        read = [port for port in ports if not port.bond and port.switch_id]
        other_half = [port for port in read if self._are_apart(read[0], port)]
        half = [port for port in read if port not in other_half]
        is_mixed = len(half) == len(other_half) and all(self._are_apart(a, b) for a in half for b in other_half)
        return read if is_mixed else []

    def _are_apart(self, port: PortLink, other: PortLink) -> bool:
        """Return whether nearly no other host has the switches of two ports of a host together."""
        return port is not other and self._is_rare(port, other) and self._is_rare(other, port)

    def _is_rare(self, port: PortLink, other: PortLink) -> bool:
        """Return whether nearly all hosts at the switch of `port` have one switch in the slot of `other`, which has another."""
        usual = self._usual_switch(port.slot, port.switch_id, other.slot)
        if usual in ("", other.switch_id):
            return False
        # At its usual switch, the slot of `other` must not be used with several switches in the slot of `port`, as in a fabric
        # without groups.
        return self._usual_switch(other.slot, usual, port.slot) == port.switch_id

    def _usual_switch(self, slot: str, switch: str, other: str) -> str:
        """Return the switch that nearly all hosts at `switch` in `slot` have in the slot `other`; empty if there is none."""
        key = slot, switch, other
        if key not in self._usual:
            switch_of = self._switch_of[other]
            at = Counter(switch_of[host] for host in self._hosts_at[slot, switch] if host in switch_of)
            total, most = at.total(), max(at, key=lambda known: (at[known], known), default="")
            exceptions = max(1, total // 8) if total > MIN_PEERS else 0
            is_clear = total >= MIN_PEERS and total - at[most] <= exceptions
            self._usual[key] = most if is_clear else ""
        return self._usual[key]
