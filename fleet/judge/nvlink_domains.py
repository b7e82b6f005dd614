"""NVLink domains of several hosts (GB200 NVL72): what each host reports, and which host breaks the connections of IMEX.

IMEX is the daemon by which the hosts of a domain share GPU memory. Each daemon reports the state of its connection to every other
daemon of the domain. So if one host is faulty, each of the other hosts reports a broken connection to it. The failure is
attributed to the host that has the most broken connections.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fleet.judge.host_view import HostView
from schemas.records import MEASURED, Observation, Value

NO_DOMAIN = "00000000-0000-0000-0000-000000000000"
"""Cluster UUID of a GPU that is in no NVLink domain of several hosts, as on every HGX host."""
CLUSTER, CLIQUE = "gpu.fabric.cluster_uuid", "gpu.fabric.clique_id"
STATE, CONNECTION = "fabric.imex.state", "fabric.imex.connection"
READY, CONNECTED, NOT_REPORTED, UP = "ready", "connected", "not_reported", "up"

Edge = tuple[str, str]
"""The addresses of two hosts in the IMEX domain, sorted."""


@dataclass(frozen=True, kw_only=True)
class DomainMember:
    """What a host reports about its NVLink domain."""

    address: str
    """Address of the host in the IMEX domain; empty if not reported."""
    is_ready: bool | None
    """Whether the IMEX daemon of the host works; None if not reported."""
    broken: Mapping[str, str]
    """Address of another host -> state of the connection to it, if this state is neither `connected` nor `not_reported`."""
    peers: int
    """Number of other hosts for which this host has a reading of the connection."""
    unreported: int
    """Number of peers for which the state of the connection is `not_reported`; 0 if IMEX reports that the domain is up."""
    cliques: frozenset[tuple[Value, Value]]
    """Pairs of cluster UUID and clique ID that the GPUs of the host report."""


class NvlinkDomains:
    """The members of each NVLink domain. The objects of several hosts can be merged (`update`) in any order."""

    def __init__(self) -> None:
        self._members: dict[str, dict[str, DomainMember]] = {}
        self._culprits: dict[str, dict[str, dict[str, str]]] = {}
        """Domain -> address of the host at fault -> address of the other end -> state of the broken connection."""

    def add(self, view: HostView) -> None:
        """Add a host, if it is in a domain and has a record."""
        if view.nvlink_domain and view.has_record:
            self._members.setdefault(view.nvlink_domain, {})[view.host.name] = _member(view)
            self._culprits.clear()

    def update(self, other: NvlinkDomains) -> None:
        """Add the members that `other` contains: further hosts of the same run, with their domains."""
        for name, members in other._members.items():
            self._members.setdefault(name, {}).update(members)
        self._culprits.clear()

    def member(self, view: HostView) -> DomainMember:
        return self._members[view.nvlink_domain][view.host.name]

    def has_imex(self, domain: str) -> bool:
        """Return whether the IMEX daemon of any host of the domain works."""
        return any(member.is_ready for member in self._members.get(domain, {}).values())

    def is_reported(self, domain: str) -> bool:
        """Return whether any GPU of the domain's hosts reports that it is in an NVLink domain of several hosts."""
        return any(uuid != NO_DOMAIN for member in self._members.get(domain, {}).values() for uuid, _ in member.cliques)

    def cliques(self, domain: str, hosts: Iterable[str]) -> set[tuple[Value, Value]]:
        """Return the pairs of cluster UUID and clique ID of these hosts.

        If a host has no such pair, the result contains the pair `(NO_DOMAIN, None)` for it.
        """
        members = self._members.get(domain, {})
        nothing = frozenset({(NO_DOMAIN, None)})
        return {pair for host in hosts for pair in (members[host].cliques if host in members else nothing) or nothing}

    def broken(self, view: HostView) -> dict[str, str]:
        """Return the broken connections that are attributed to this host: name or address of the other end -> state."""
        members = self._members[view.nvlink_domain]
        names = {member.address: host for host, member in members.items() if member.address}
        broken = self._attributed(view.nvlink_domain).get(self.member(view).address, {})
        return {names.get(address, address): state for address, state in broken.items()}

    def host_at_fault(self, domain: str, hosts: Collection[str]) -> str:
        """Return the one of `hosts` to which the most broken connections are attributed; empty if none of them is at fault.

        A host whose daemon does not work is at fault even without broken connections.
        """
        counts = {address: len(broken) for address, broken in self._attributed(domain).items()}
        faulty = {
            host: counts.get(member.address, 0)
            for host, member in sorted(self._members[domain].items())
            if host in hosts and (member.is_ready is False or member.address in counts)
        }
        return max(faulty, key=lambda host: faulty[host], default="")

    def _attributed(self, domain: str) -> dict[str, dict[str, str]]:
        if domain not in self._culprits:
            self._culprits[domain] = _attribute(self._members[domain].values())
        return self._culprits[domain]


def _member(view: HostView) -> DomainMember:
    addresses = {item.scope: str(item.value) for item in measured(view, "fabric.imex.node_address")}
    connections = measured(view, CONNECTION)
    own_addresses = [str(item.value) for item in measured(view, "fabric.imex.address")]
    states = [item.value for item in measured(view, STATE)]
    domain_states = [item.value for item in measured(view, "fabric.imex.domain_state")]
    is_up = bool(domain_states) and all(state == UP for state in domain_states)
    uuids, cliques = (last_values(view, name) for name in (CLUSTER, CLIQUE))
    return DomainMember(
        address=own_addresses[-1] if own_addresses else "",
        is_ready=all(state == READY for state in states) if states else None,
        broken={
            addresses.get(item.scope, item.scope): str(item.value)
            for item in connections
            if item.value not in (CONNECTED, NOT_REPORTED)
        },
        peers=len({item.scope for item in connections}),
        unreported=0 if is_up else len({item.scope for item in connections if item.value == NOT_REPORTED}),
        cliques=frozenset((uuid, cliques.get(scope)) for scope, uuid in uuids.items()),
    )


def measured(view: HostView, name: str) -> list[Observation]:
    return [item for item in view.observations[name] if item.status == MEASURED]


def last_values(view: HostView, name: str) -> dict[str, Value]:
    """Return scope -> the last measured value."""
    return {item.scope: item.value for item in measured(view, name)}


def _attribute(members: Collection[DomainMember]) -> dict[str, dict[str, str]]:
    """Return address of the host at fault -> address of the other end -> state of the broken connection.

    First, all broken connections of a host whose daemon does not work are attributed to that host. Then the connections that
    remain are attributed to the host with the most of them, and so on until none remains.

    If that host has only one connection, either end may be at fault, so the connection is attributed to both ends. But if the
    address of one end is not that of any of `members`, the connection is attributed only to that end.
    """
    states: dict[Edge, str] = {}
    not_ready = []
    known = {member.address for member in members}
    for member in members:
        for peer, state in member.broken.items() if member.address else ():
            first, second = sorted((member.address, peer))
            # `invalid` means that this end could not read the state: then the state that the other end reports is used.
            if states.get((first, second), "invalid") == "invalid":
                states[first, second] = state
        if member.is_ready is False and member.address:
            not_ready.append(member.address)
    attributed: dict[str, dict[str, str]] = defaultdict(dict)
    while states:
        counts = Counter(address for edge in states for address in edge)
        culprit = next((address for address in not_ready if counts[address]), "")
        culprit = culprit or max(sorted(counts), key=lambda address: (counts[address], address not in known))
        for edge in [edge for edge in states if culprit in edge]:
            other = edge[edge[0] == culprit]
            attributed[culprit][other] = state = states.pop(edge)
            if counts[culprit] == 1 and culprit in known and culprit not in not_ready:
                attributed[other][culprit] = state
    return attributed
