"""Compare the cables of hosts with each other, for ports that no manifest (the operator's list of parts and cables) lists.

A rail is the ports in one slot of all hosts. A slot has a rail only if, on most hosts with this slot, its port is one of the
fastest of the host. The peers of a host are the hosts that use at least half of its switches, the host itself included. Among
peers, a switch belongs to a rail under three conditions:
- At least two peers use the switch in this rail.
- Their number is at least a quarter of the number of peers that use the most used switch of the rail.
- Their number is more than half of the number of peers that use the switch in any other rail.

A rail has a clear majority if the switch in its slot was read on at least three peers, and at least two thirds of these use a
switch that belongs to the rail. A port of such a rail fails if it is at a switch that does not belong to the rail. Two failing
ports of a host are swapped if each is at a switch that belongs to the rail of the other. The ports of one bond may be exchanged:
each may be at a switch of the rail of another.

Peers may use the same switches in different orders (`exchanges`). These switches may then belong to several rails. A port with
such a switch does not pass, unless at least two thirds of these peers have the same order as its host. It is inconclusive if the
switches of at least half of the host's ports belong to one rail each, or if this is so on a clear majority of the hosts with the
same slots (of other pods). Otherwise the fabric may have no rails, and no port at a switch of several rails is judged.

The ports of a host may be at the switches of two groups of hosts, half of them in each. Then all these hosts are peers, and each
switch belongs to its rail (`combinations`, which compares all hosts of the fleet).

A host with fewer than three peers is compared with the whole fleet. Two of its ports at the same switch fail if the switches of
both slots were read on at least three hosts, and at least two thirds of these have different switches in the two slots.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from fleet.judge.wiring.combinations import Combinations
from fleet.judge.wiring.exchanges import Exchange, Order, Orders
from fleet.judge.wiring.links import SWITCH_ID, HostLinks, PortLink
from fleet.scope_text import describe_scope
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind

CRITERION = "rail-switch"
SOURCE = (
    "NVIDIA DGX SuperPOD reference architecture, rail-optimized: the NICs in one slot of all hosts share leaf switches"
)
MIN_HOSTS = 3
"""Smallest number of hosts among which there can be a clear majority."""
MAJORITY = 2 / 3
"""Smallest share of hosts that counts as a clear majority."""
MAX_NAMES = 4
"""Maximum number of switches or ports that a reason lists."""


@dataclass(frozen=True, kw_only=True)
class Rails:
    """The switches that belong to each rail, among the peers of a host."""

    hosts: int
    """Number of peers."""
    switches: Mapping[str, AbstractSet[str]] = field(default_factory=dict)
    """Slot of a rail -> IDs of its switches; a rail without a clear majority is missing."""
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Slot of a rail -> number of peers that use its switches, and number of peers whose switch in this slot was read."""
    apart: AbstractSet[str] = frozenset()
    """Slots of the rails whose switches belong to no other rail."""
    orders: Orders = field(default_factory=lambda: Orders({}))
    """The switches of the peers."""

    def has_rails(self, ports: Iterable[PortLink]) -> bool:
        """Return whether the switches of at least half of a host's ports belong to one rail each."""
        read = [port for port in ports if port.switch_id]
        return 2 * sum(port.slot in self.apart for port in read) >= len(read)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing the cables of a fleet."""

    verdicts: tuple[Verdict, ...] = ()
    shared: int = 0
    """Number of ports that fail because another port of their host is at the same switch. Only ports of hosts with fewer than
    MIN_HOSTS peers fail for this reason."""
    unjudged: int = 0
    """Number of ports without a verdict although their switch was read."""
    hosts: int = 0
    """Number of hosts on which the switch of at least one port was read."""


def compare_rails(hosts: Iterable[HostLinks], excluded: AbstractSet[tuple[str, str]] = frozenset()) -> Comparison:
    """Return the verdicts on all ports that can be judged.

    These are ports in rails with a clear majority, ports at switches that other hosts use in another order, ports at the same
    switch as another port of their host, and ports whose switch changed during the run or was not read.

    Args:
        hosts: the ports of each host.
        excluded: host and scope of the ports that the manifest lists. They are judged by the manifest instead.
    """
    listed = list(hosts)
    fleet = _Fleet(listed)
    changed = (link for host in listed for link in host.links if link.has_changed)
    verdicts = [
        _verdict(link, INCONCLUSIVE, link.reason) for link in changed if (link.host, link.scope) not in excluded
    ]
    for unread in (host for host in listed if host.host not in fleet.ports):
        ports = [port for port in unread.links if (port.host, port.scope) not in excluded]
        verdicts += fleet.unread_ports(ports, len(listed))
    shared = unjudged = 0
    for host in fleet.hosts:
        rails = fleet.rails_of(host)
        ports = [port for port in fleet.ports[host] if (host, port.scope) not in excluded]
        if rails.hosts < MIN_HOSTS:
            of_host = fleet.shared_switches(ports)
            shared += len(of_host)
        else:
            has_rails = rails.has_rails(ports) or fleet.has_rails(host)
            of_host = _judge_ports(ports, rails, fleet.exchanges_of(host), fleet.names, has_rails=has_rails)
            if all(verdict.verdict != FAIL for verdict in of_host):
                mixed = _mixed_verdicts(fleet.combinations.mixed_ports(ports))
                scopes = {verdict.scope for verdict in mixed}
                of_host = [*(verdict for verdict in of_host if verdict.scope not in scopes), *mixed]
        verdicts += of_host
        unjudged += len({port.scope for port in ports if port.switch_id} - {verdict.scope for verdict in of_host})
    return Comparison(verdicts=tuple(verdicts), shared=shared, unjudged=unjudged, hosts=len(fleet.hosts))


class _Fleet:
    """The hosts on which a switch was read, with their ports in the slots of rails."""

    def __init__(self, hosts: Iterable[HostLinks]) -> None:
        read = [host for host in hosts if any(link.switch_id for link in host.links)]
        self.hosts = sorted(host.host for host in read)
        votes: dict[str, Counter[bool]] = defaultdict(Counter)
        for link in (link for host in read for link in host.links):
            votes[link.slot][link.is_fastest] += 1
        slots = {slot for slot, vote in votes.items() if vote[True] > vote[False]}
        self.ports = {host.host: [link for link in host.links if link.slot in slots] for host in read}
        self.names = {link.switch_id: link.switch_name for host in read for link in host.links if link.switch_id}
        self._switches = {
            host: frozenset(port.switch_id for port in ports if port.switch_id) for host, ports in self.ports.items()
        }
        self._hosts_at: dict[str, list[str]] = defaultdict(list)
        for host in self.hosts:
            for switch in self._switches[host]:
                self._hosts_at[switch].append(host)
        self._switch_of: dict[str, dict[str, str]] = defaultdict(dict)
        """Slot -> host -> ID of the switch that this host reports in the slot."""
        for host, ports in self.ports.items():
            for port in (port for port in ports if port.switch_id):
                self._switch_of[port.slot][host] = port.switch_id
        self._readings_at = Counter(port.slot for ports in self.ports.values() for port in ports if port.switch_id)
        self._rails: dict[frozenset[str], Rails] = {}
        self._orders = {host: _order(ports) for host, ports in self.ports.items()}
        self.combinations = Combinations(self._orders)
        self._exchanges: dict[Order, list[Exchange]] = {}
        self._apart: dict[tuple[str, str], bool] = {}
        self._with_rails: dict[frozenset[str], list[bool]] = defaultdict(list)
        """Slots of a host -> for each host with these slots that read a switch in one of them, whether the order of its switches
        matters among its peers."""

    def rails_of(self, host: str) -> Rails:
        """Return the rails among the peers of a host, itself included. Hosts with the same switches have the same peers."""
        switches = self._switches[host]
        if switches not in self._rails:
            self._rails[switches] = self._find_rails(switches)
        return self._rails[switches]

    def has_rails(self, host: str) -> bool:
        """Return whether the order of the switches matters on a clear majority of the hosts with the slots of this host."""
        if not self._with_rails:
            for other, ports in self.ports.items():
                if any(port.switch_id for port in ports):
                    self._with_rails[_slots(ports)].append(self.rails_of(other).has_rails(ports))
        votes = self._with_rails[_slots(self.ports[host])]
        return _is_clear(sum(votes), len(votes))

    def exchanges_of(self, host: str) -> list[Exchange]:
        """Return the exchanges in which no clear majority of the peers has the order of this host."""
        order = self._orders[host]
        if order not in self._exchanges:
            found = self.rails_of(host).orders.exchanges(order)
            self._exchanges[order] = [item for item in found if not _is_clear(len(item.orders[item.own]), item.hosts)]
        return self._exchanges[order]

    def _find_rails(self, switches: frozenset[str]) -> Rails:
        """Return the rails among the hosts that use at least half of these switches; none if fewer than MIN_HOSTS hosts do."""
        shared = Counter(host for switch in switches for host in self._hosts_at[switch])
        peers = sorted(host for host, count in shared.items() if 2 * count >= len(switches))
        if len(peers) < MIN_HOSTS:
            return Rails(hosts=len(peers))
        uses: dict[str, Counter[str]] = defaultdict(Counter)
        for slot, switch in (pair for host in peers for pair in self._orders[host]):
            uses[slot][switch] += 1
        most_in_a_rail: Counter[str] = Counter()
        for counts in uses.values():
            most_in_a_rail |= counts
        groups = {
            slot: frozenset(
                switch
                for switch, count in counts.items()
                if count > 1 and 4 * count >= max(counts.values()) and 2 * count > most_in_a_rail[switch]
            )
            for slot, counts in uses.items()
        }
        orders: dict[Order, list[str]] = defaultdict(list)
        for host in peers:
            orders[self._orders[host]].append(host)
        return replace(_clear_rails(groups, uses, len(peers)), orders=Orders(orders))

    def shared_switches(self, ports: Sequence[PortLink]) -> list[Verdict]:
        """Return a failure for each port that is at the same switch as another. `ports` are the ports of one host.

        A port fails only if a clear majority of the hosts has different switches in the slots of the two ports.
        """
        verdicts = []
        # A slot whose switch was read on fewer hosts has no clear majority. A host may report thousands of such slots.
        comparable = [port for port in ports if len(self._switch_of.get(port.slot, ())) >= MIN_HOSTS]
        for port in (port for port in comparable if port.switch_id):
            others = [other for other in comparable if other is not port and other.switch_id == port.switch_id]
            apart = [other for other in others if self._are_apart(port.slot, other.slot)]
            if apart:
                names = _names(describe_scope(other.scope) for other in apart)
                detail = f"at the same switch as {names}; most hosts have different switches in these slots"
                verdicts.append(_verdict(port, FAIL, detail, kind=VerdictKind.PEERS))
        return verdicts

    def unread_ports(self, ports: Iterable[PortLink], hosts: int) -> list[Verdict]:
        """Return inconclusive verdicts on ports whose switch was not read.

        A port gets one if its switch should have been read, and a clear majority of all hosts report a switch in its slot.

        Args:
            ports: the ports of a host that read no switch.
            hosts: number of hosts of the fleet.
        """
        verdicts = []
        for port in ports:
            count = self._readings_at[port.slot]
            is_asked = port.is_expected and port.has_link and not port.has_changed
            if is_asked and hosts >= MIN_HOSTS and count >= MAJORITY * hosts:
                of_others = f"{count} of {hosts} hosts report a switch in this slot"
                detail = f"{of_others}; on this host the switch was not read: {port.reason}"
                verdicts.append(_verdict(port, INCONCLUSIVE, detail))
        return verdicts

    def _are_apart(self, slot: str, other: str) -> bool:
        """Return whether a clear majority of the hosts has different switches in two slots.

        Hosts that did not read the switches of both slots are ignored.
        """
        if (slot, other) not in self._apart:
            switches, other_switches = self._switch_of[slot], self._switch_of[other]
            votes = [switches[host] != other_switches[host] for host in switches.keys() & other_switches]
            self._apart[slot, other] = _is_clear(sum(votes), len(votes))
        return self._apart[slot, other]


def _slots(ports: Iterable[PortLink]) -> frozenset[str]:
    return frozenset(port.slot for port in ports)


def _order(ports: Iterable[PortLink]) -> Order:
    """Return the switches of a host. Those of a bond are sorted, because the ports of a bond may be exchanged."""
    bonds: dict[str, list[PortLink]] = defaultdict(list)
    for port in (port for port in ports if port.switch_id):
        bonds[port.bond or port.slot].append(port)
    pairs = (
        zip(sorted(port.slot for port in of_bond), sorted(port.switch_id for port in of_bond), strict=True)
        for of_bond in bonds.values()
    )
    return tuple(sorted(pair for bond in pairs for pair in bond))


def _is_clear(count: int, total: int) -> bool:
    """Return whether `count` of `total` hosts are a clear majority."""
    return total >= MIN_HOSTS and count >= MAJORITY * total


def _clear_rails(groups: Mapping[str, frozenset[str]], uses: Mapping[str, Counter[str]], peers: int) -> Rails:
    """Return the rails that have a clear majority.

    Args:
        groups: slot -> IDs of the switches that belong to its rail.
        uses: slot -> ID of a switch -> number of peers at this switch.
        peers: number of peers.
    """
    counts = {slot: (sum(uses[slot][switch] for switch in groups[slot]), uses[slot].total()) for slot in groups}
    clear = {slot for slot, (used, total) in counts.items() if _is_clear(used, total)}
    rails_at = Counter(switch for group in groups.values() for switch in group)
    return Rails(
        hosts=peers,
        switches={slot: groups[slot] for slot in clear},
        counts={slot: counts[slot] for slot in clear},
        apart={slot for slot in clear if all(rails_at[switch] == 1 for switch in groups[slot])},
    )


def _judge_ports(
    ports: Sequence[PortLink],
    rails: Rails,
    exchanges: Sequence[Exchange],
    names: Mapping[str, str],
    *,
    has_rails: bool,
) -> list[Verdict]:
    """Return the verdicts on the ports of one host: ports in rails with a clear majority, and ports in exchanges.

    Args:
        ports: the ports.
        rails: the rails among the peers of the host.
        exchanges: the exchanges between the host and its peers.
        names: ID of a switch -> its name.
        has_rails: whether the order of the switches matters in this fabric.
    """
    in_rails = [port for port in ports if port.slot in rails.switches]
    places = _places(in_rails, rails)
    moved = [port for port in in_rails if port.switch_id and port.switch_id not in rails.switches[places[port.scope]]]
    partners = _partners(moved, rails)
    moved_slots = {port.slot for port in moved}
    scopes = {port.slot: port.scope for port in ports}
    # A port that fails explains the exchange: the other ports of the exchange may be right.
    unexplained = [item for item in exchanges if moved_slots.isdisjoint(item.slots)]
    exchange_of = {slot: item for item in reversed(unexplained) for slot in item.slots}
    verdicts = []
    for port in ports:
        if has_rails and port.slot in exchange_of:
            detail = _exchange_text(exchange_of[port.slot], scopes, names)
            verdicts.append(_verdict(port, INCONCLUSIVE, detail, kind=VerdictKind.SWAPPED))
            continue
        if exchange_of and not has_rails and port not in moved and port.slot not in rails.apart:
            continue
        if port.slot not in rails.switches:
            continue
        place = places[port.scope]
        wanted = _names((names[switch] for switch in sorted(rails.switches[place])), " or ")
        used, total = rails.counts[place]
        where = "this slot" if place == port.slot else f"another slot of {port.bond}"
        most = f"{used} of {total} hosts have {wanted} in {where}"
        if not port.switch_id:
            if port.is_expected and port.has_link and not port.has_changed:  # `compare_rails` judges a changed switch
                verdicts.append(
                    _verdict(port, INCONCLUSIVE, f"{most}; on this host the switch was not read: {port.reason}", wanted)
                )
        elif port not in moved:
            verdicts.append(_verdict(port, PASS, most, wanted))
        elif partner := partners.get(port.scope):
            pair = sorted((port, partner), key=lambda item: item.scope)
            text = " and ".join(f"{item.own_end} at {item.end}" for item in pair)
            detail = f"{text}: on most hosts it is the other way around; swap the two cables"
            verdicts.append(_verdict(port, FAIL, detail, wanted, kind=VerdictKind.SWAPPED))
        else:
            verdicts.append(_verdict(port, FAIL, most, wanted, kind=VerdictKind.PEERS))
    return verdicts


def _places(ports: Sequence[PortLink], rails: Rails) -> dict[str, str]:
    """Return scope of each port -> the slot in whose rail the port is judged.

    It is the port's own slot, except that the ports of one bond may be exchanged. `ports` are the ports of one host in rails.
    """
    slots = {port.scope: port.slot for port in ports}
    misfits = [port for port in ports if port.bond and port.switch_id not in rails.switches[port.slot]]
    free = {port.slot: port.bond for port in misfits}
    for port in misfits:
        fitting = [slot for slot, bond in free.items() if bond == port.bond and port.switch_id in rails.switches[slot]]
        if fitting:
            slots[port.scope] = fitting[0]
            del free[fitting[0]]
    for port in (port for port in misfits if port.switch_id not in rails.switches[slots[port.scope]]):
        slots[port.scope] = next(slot for slot, bond in free.items() if bond == port.bond)
        del free[slots[port.scope]]
    return slots


def _mixed_verdicts(ports: Sequence[PortLink]) -> list[Verdict]:
    """Return inconclusive verdicts on ports of one host at switches that nearly no similar host has together."""
    ends = _names((f"{describe_scope(port.scope)} at {port.end}" for port in ports), " and ")
    detail = (
        f"{ends}: nearly all hosts at one of these switches have another switch in the other slot. Some of these cables may "
        "belong to another group of hosts"
    )
    return [_verdict(port, INCONCLUSIVE, detail, kind=VerdictKind.SWAPPED) for port in ports]


def _exchange_text(exchange: Exchange, scopes: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Return how many hosts have the switches in which order.

    Args:
        exchange: an exchange without a clear majority.
        scopes: slot -> scope of a port.
        names: ID of a switch -> its name.
    """
    ports = " and ".join(describe_scope(scopes.get(slot, slot)) for slot in exchange.slots)
    orders = sorted(exchange.orders.items(), key=lambda item: (-len(item[1]), item[0]))
    found = (
        f"{len(hosts)} have {' and '.join(names[switch] for switch in order)} ({_names(sorted(hosts))})"
        for order, hosts in orders
    )
    text = f"{exchange.hosts} hosts have the same switches at {ports}, but in different orders: {_names(found, '; ')}"
    return f"{text}. No clear majority of hosts shows which order is right"


def _partners(moved: Sequence[PortLink], rails: Rails) -> dict[str, PortLink]:
    """Return scope of each swapped port -> the port with which it is swapped.

    `moved` has the failing ports of one host.
    """
    partners: dict[str, PortLink] = {}
    for number, port in enumerate(moved):
        for other in moved[number + 1 :]:
            is_free = port.scope not in partners and other.scope not in partners
            crossed = port.switch_id in rails.switches[other.slot] and other.switch_id in rails.switches[port.slot]
            if is_free and crossed:
                partners |= {port.scope: other, other.scope: port}
    return partners


def _names(names: Iterable[str], separator: str = ", ") -> str:
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMES} more" if len(listed) > MAX_NAMES else ""
    return f"{separator.join(listed[:MAX_NAMES])}{more}"


def _verdict(
    port: PortLink, verdict: str, detail: str, wanted: str | None = None, *, kind: str = VerdictKind.PEERS
) -> Verdict:
    is_read = bool(port.switch_id)
    if not is_read:
        kind = VerdictKind.CONTRADICTORY if port.has_changed else VerdictKind.MISSING
    return Verdict(
        host=port.host,
        scope=port.scope,
        name=f"{port.kind}.{SWITCH_ID}",
        verdict=verdict,
        criterion=CRITERION,
        kind=kind,
        value=(port.end if verdict == FAIL else port.switch_name) if is_read else None,
        limit=wanted if is_read else None,
        operator="eq" if is_read and wanted else "",
        unit="1",
        reason=f"at {port.end}: {detail}" if is_read else detail,
        detail=detail if is_read else "",
        action="recable" if verdict == FAIL else "none",
        source=SOURCE,
        basis="policy",
    )
