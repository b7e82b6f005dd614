"""Find hosts that use the same switches in another order, such as A and B in two slots on one host, and B and A on another.

Some of these hosts have wrong cables, unless the order does not matter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

Order = tuple[tuple[str, str], ...]
"""Slot and ID of its switch, for each slot of a host whose switch was read, in the order of the slots."""
_Groups = dict[tuple[str, ...], dict[tuple[str, ...], list[str]]]
"""Sorted IDs of switches -> the same IDs in the order of some slots -> hosts with this order."""
MAX_ORDERS = 16
"""Maximum number of orders with which the order of a host is compared: the most frequent ones.

Hosts with rails have few orders. The limit bounds the time if the hosts are cabled at random.
"""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Slots in which a host and some of its peers use the same switches in different orders."""

    slots: tuple[str, ...]
    orders: Mapping[tuple[str, ...], Sequence[str]]
    """IDs of the switches in these slots -> peers that have them in this order. Peers with other switches are left out."""
    own: tuple[str, ...]
    """The order of the host. Its peers in `orders` include the host itself."""

    @property
    def hosts(self) -> int:
        """Return the number of peers that use these switches in these slots, in any order."""
        return sum(map(len, self.orders.values()))


class Orders:
    """The switches of hosts that are peers of each other."""

    def __init__(self, peers: Mapping[Order, Sequence[str]]) -> None:
        """`peers`: order -> the hosts with this order."""
        self._peers = [(dict(order), hosts) for order, hosts in peers.items()]
        slots_of: dict[str, set[str]] = defaultdict(set)
        for slot, switch in (pair for order in peers for pair in order):
            slots_of[switch].add(slot)
        self._shared = {switch for switch, slots in slots_of.items() if len(slots) > 1}
        counts: Counter[Order] = Counter()
        for order, hosts in peers.items():
            counts[self._shared_part(order)] += len(hosts)
        frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_ORDERS]
        self._frequent = [dict(order) for order, _ in frequent]
        self._groups: dict[tuple[str, ...], _Groups] = {}

    def exchanges(self, order: Order) -> list[Exchange]:
        """Return the exchanges between a host with this order and its peers."""
        shared = dict(self._shared_part(order))
        found = dict.fromkeys(
            tuple(sorted(slots)) for other in self._frequent for slots in _exchanged_slots(shared, other)
        )
        return [self._exchange(shared, slots) for slots in found]

    def _shared_part(self, order: Order) -> Order:
        """Return the slots at switches that peers use in several slots. Only these can be exchanged."""
        return tuple(pair for pair in order if pair[1] in self._shared)

    def _exchange(self, order: Mapping[str, str], slots: tuple[str, ...]) -> Exchange:
        if slots not in self._groups:
            groups: _Groups = {}
            for peer, hosts in self._peers:
                of_peer = tuple(peer.get(slot, "") for slot in slots)
                groups.setdefault(tuple(sorted(of_peer)), {}).setdefault(of_peer, []).extend(hosts)
            self._groups[slots] = groups
        own = tuple(order[slot] for slot in slots)
        return Exchange(slots=slots, orders=self._groups[slots][tuple(sorted(own))], own=own)


def _exchanged_slots(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield groups of slots in which two hosts use the same switches in different orders.

    For each slot in such a group, one of the smallest groups with this slot is yielded.
    """
    differing = [slot for slot, switch in first.items() if second.get(slot, switch) != switch]
    if {first[slot] for slot in differing}.isdisjoint(second[slot] for slot in differing):
        return
    for start in differing:
        reached = {start}
        paths: list[tuple[str, ...]] = [(start,)]
        while paths:
            complete = [path for path in paths if first[path[-1]] == second[start]]
            if complete:
                yield complete[0]
                break
            longer = []
            for path in paths:
                following = [slot for slot in differing if second[slot] == first[path[-1]] and slot not in reached]
                reached.update(following)
                longer += [(*path, slot) for slot in following]
            paths = longer
