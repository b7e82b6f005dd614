"""Find hosts whose cables are at switches of two groups of hosts, such as one of two cables in another pod.

Half of the switches of such a host are those of either group, so the hosts of both groups are its peers. Two of its ports are
mixed if nearly all other peers at the switch of either port have one other switch in the slot of the other port.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from fleet.judge.wiring.exchanges import Order
from fleet.judge.wiring.links import PortLink

MIN_PEERS = 3
"""Smallest number of other peers at a switch that show which switch belongs to it in another slot."""


class Combinations:
    """The switches that peers have together."""

    def __init__(self, peers: Mapping[str, Order]) -> None:
        """`peers`: host -> its switches."""
        self._uses: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        """Slot -> ID of a switch -> the peers at this switch."""
        self._usual: dict[tuple[str, str, str], str] = {}
        """Results of `_usual_switch`."""
        for host, order in peers.items():
            for slot, switch in order:
                self._uses[slot][switch].add(host)

    def mixed_ports(self, ports: Sequence[PortLink]) -> list[PortLink]:
        """Return the ports of a host at switches that nearly no other peer has together.

        Some of the cables are at switches of another group of hosts. Nothing shows which of them.
        """
        # The ports of a bond may be exchanged, so the slot of one of them does not show which switch it should have.
        read = [port for port in ports if not port.bond and port.switch_id in self._uses.get(port.slot, ())]
        pairs = (pair for pair in combinations(read, 2) if self._is_rare(*pair) and self._is_rare(*reversed(pair)))
        scopes = {port.scope for pair in pairs for port in pair}
        return [port for port in read if port.scope in scopes]

    def _is_rare(self, port: PortLink, other: PortLink) -> bool:
        """Return whether nearly all peers at the switch of `port` have one switch in the slot of `other`, which has another."""
        usual = self._usual_switch(port.slot, port.switch_id, other.slot)
        if usual in ("", other.switch_id):
            return False
        # At its usual switch, the slot of `other` must not be used with several switches in the slot of `port`, as in a fabric
        # without groups.
        return self._usual_switch(other.slot, usual, port.slot) == port.switch_id

    def _usual_switch(self, slot: str, switch: str, other: str) -> str:
        """Return the switch that nearly all peers at `switch` in `slot` have in the slot `other`; empty if there is none."""
        key = slot, switch, other
        if key not in self._usual:
            peers = self._uses[slot][switch]
            at = {known: len(peers & hosts) for known, hosts in self._uses[other].items()}
            total, most = sum(at.values()), max(at, key=lambda known: (at[known], known))
            exceptions = max(1, total // 8) if total > MIN_PEERS else 0
            is_clear = total >= MIN_PEERS and total - at[most] <= exceptions
            self._usual[key] = most if is_clear else ""
        return self._usual[key]
