"""Find the slow ends, rails, switches and links of the pair matrix, by one quantity: bandwidth or latency.

The pair matrix has the measurements between every two hosts, on each rail. On rail 0, the first GPU under test of one host (with
its NIC) exchanges data with the first GPU of the other host. RDMA ports of the same rail are measured in the same way.

An end is one rail of a host: a GPU with its NIC, or an RDMA port. A pair is as fast as its slowest part, and a good end is fast
with at least one partner. Therefore an end is judged by its best pair, not by its average. If a pair of two good ends is slow,
the link is slow. But if an end is slow with at least MIN_HOSTS of its good partners, and with at least half of them, the end
counts as partly slow, and these links do not count as slow. Speeds are compared as logarithms: the ratio of two speeds becomes a
difference.

A congested network makes some pairs slow at random, and then some good ends have many slow pairs by chance. Therefore an end is
slow or partly slow only if its number of slow pairs is improbable (CHANCE), given the share of slow pairs between the other ends.
If so many other links are slow that the fabric is suspected, a partly slow end is also compared with the other rails of its host.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.judge.localization.matrix import End, PairKind, spread, upper_median

MIN_HOSTS = 3
"""Minimum number of hosts for a comparison: of two hosts, either may be the slow one. Also the minimum number of slow edges of a
partly slow end."""
MANY_PARTNERS = 8
"""With this many partners or more, an end is judged by its second best pair: the speed of the best pair may be a timing error."""
CHANCE = 0.05
"""Highest probability with which chance may give any end of the gang as many slow edges as an end that is called slow."""
MAX_LINKS = 5
MAX_LINKS_SHARE = 0.02
"""If the slow links are more than MAX_LINKS and more than this share of all pairs of hosts, the fabric is suspected instead."""
FAILED_SHARE = 1e-9
"""Speed of a failed pair, as a share of the typical speed. It stands in for 0, which has no logarithm."""
FAILED_LOG_SHARE = math.log(FAILED_SHARE) / 2
"""A share (logarithm of a ratio) below this value occurs only for pairs that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """One pair of ends, with its speed by one quantity."""

    a: str
    b: str
    rail: int
    speed: float
    """Bandwidth in B/s, or 1 / latency in 1/s; 0 if the pair failed."""
    kind: PairKind = field(default_factory=PairKind)
    failed: str = ""
    """Reason of the failure, or empty."""

    def ends(self) -> tuple[End, End]:
        return (self.a, self.rail), (self.b, self.rail)


@dataclass(kw_only=True)
class SlowParts:
    """The slow rails, ends, switches and links. Every share, limit and center is the natural logarithm of a ratio of speeds."""

    shares: dict[int, float] = field(default_factory=dict)
    """Index of an edge -> its speed as a share of the typical or minimum speed of its kind (`typical_speeds`)."""
    edges_of_end: dict[End, list[int]] = field(default_factory=dict)
    """End -> indexes of its edges."""
    rails: dict[int, float] = field(default_factory=dict)
    """Slow rail -> its speed (median of the best edges of its ends) as a share of the speed of a typical rail."""
    ends: dict[End, float] = field(default_factory=dict)
    """Slow end -> speed of its best edge (`_level_of_end`) as a share of the speed of a typical end.

    For a partly slow end: median speed of its slow edges as a share of the speed of a typical edge. On a slow rail, ends and
    edges are compared with those of this rail.
    """
    partly_slow_ends: set[End] = field(default_factory=set)
    """Slow ends that are fast with some partners."""
    switches: dict[str, frozenset[End]] = field(default_factory=dict)
    """Slow switch -> its ends, all of which are slow."""
    links: list[int] = field(default_factory=list)
    """Indexes of slow edges between two good ends."""
    limit: float = 0.0
    """An edge between good ends is slow if its share is below `center` by more than this."""
    end_limit: float = 0.0
    """An end is slow if the share of its best edge is below `end_center` by more than this. It may be smaller than `limit`:
    the best edges of the ends scatter less than all edges."""
    center: float = 0.0
    """Share of a typical edge between good ends."""
    end_center: float = 0.0
    """Share of the best edge of a typical end."""

    def of_rails(self) -> tuple[float, float]:
        """Return the share of the best edge of a typical end, and the share below which a rail is slow."""
        return self.end_center, self.end_center - self.end_limit

    def of_ends(self, ends: Collection[End]) -> tuple[float, float]:
        """Return the share of a typical end on the rails of these ends, and the share below which an end is slow there.

        If all of these ends are partly slow, both shares are those of edges (`of_edges`).
        """
        if all(end in self.partly_slow_ends for end in ends):
            return self.of_edges({rail for _, rail in ends})
        rail_share = statistics.median(self.rails.get(rail, 0.0) for _, rail in ends)
        return self.end_center + rail_share, self.end_center + rail_share - self.end_limit

    def of_edges(self, rails: Collection[int]) -> tuple[float, float]:
        """Return the share of a typical edge on these rails, and the share below which an edge is slow there."""
        rail_share = statistics.median(self.rails.get(rail, 0.0) for rail in rails)
        return self.center + rail_share, self.center + rail_share - self.limit


def find_slow_parts(
    edges: Sequence[Edge],
    tolerance: float,
    sigmas: float,
    switches: Mapping[End, str] | None = None,
    least: Mapping[PairKind, float] | None = None,
) -> SlowParts:
    """Return the slow parts. They are found only if pairs of at least MIN_HOSTS hosts were measured.

    Args:
        edges: every pair of ends once, on every rail.
        tolerance: share of the typical speed that may be missing: with 0.12, only a part below 0.88 of that speed is slow.
        sigmas: a slow part must also be below the typical speed by more than this many standard deviations of the measurements.
        switches: end -> its switch, for the ends whose switch is known.
        least: kind of pair -> the lowest speed of a healthy pair, for the kinds for which it is known. For other kinds, the
            typical speed of the measured pairs is taken to be healthy.
    """
    min_limit = -math.log(1 - tolerance)
    shares, min_center = _log_shares(edges, least or {})
    slow_parts = SlowParts(shares=shares, limit=min_limit, end_limit=min_limit)
    for index in slow_parts.shares:
        for end in edges[index].ends():
            slow_parts.edges_of_end.setdefault(end, []).append(index)
    levels = {
        end: _level_of_end([slow_parts.shares[index] for index in indexes])
        for end, indexes in slow_parts.edges_of_end.items()
        if len(indexes) > 1
    }
    by_chance: set[int] = set()
    if levels:
        ends_of_switch = _ends_of_switches(levels, switches or {})
        _find_slow_ends(slow_parts, levels, min_limit, sigmas, ends_of_switch.values(), min_center)
        by_chance = _drop_ends_slow_by_chance(slow_parts, edges)
        _find_slow_switches(slow_parts, levels, ends_of_switch)
    _find_slow_links(slow_parts, edges, min_limit, sigmas, by_chance)
    return slow_parts


def typical_speeds(edges: Iterable[Edge]) -> tuple[dict[PairKind, float], dict[PairKind, float]]:
    """Return two mappings: kind of pair -> typical speed, and kind of pair -> minimum speed.

    For each rail, take the best speed of each host, and the median of these speeds. The typical speed is the median of the rails'
    medians. The median of all pairs is unsuitable: three slow hosts out of eight slow down most of the pairs.

    A kind has a typical speed only if three or more hosts have pairs of that kind. Otherwise it may have a minimum speed: the
    highest typical speed of the kinds that it must not be slower than (`must_match_speed_of`).
    """
    best: dict[PairKind, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for edge in edges:
        best_by_host = best[edge.kind][edge.rail]
        for host in (edge.a, edge.b):
            best_by_host[host] = max(best_by_host.get(host, 0.0), edge.speed)
    typical = {
        kind: speed
        for kind, rails in best.items()
        if len({host for best_by_host in rails.values() for host in best_by_host}) >= MIN_HOSTS
        and (speed := upper_median(upper_median(best_by_host.values()) for best_by_host in rails.values())) > 0
    }
    bounds = {
        kind: [typical[other] for other in typical if kind.must_match_speed_of(other)]
        for kind in best.keys() - typical.keys()
    }
    return typical, {kind: max(speeds) for kind, speeds in bounds.items() if speeds}


def _log_shares(edges: Sequence[Edge], least: Mapping[PairKind, float]) -> tuple[dict[int, float], float]:
    """Return the share of each edge by index, and a lower bound for `SlowParts.end_center` (minus infinity: no bound).

    The share is the natural logarithm of the speed divided by a reference: the typical speed of the kind, or the lowest speed of
    a healthy pair (`least`) if that is higher. If `least` is higher for any kind, the bound is 0: most ends may be slow.

    If the kind has a minimum speed instead of a typical one, the speed is divided by the minimum, and the ratio is capped at 1.
    An edge whose kind has neither is left out.
    """
    typical, minimum = typical_speeds(edges)
    is_replaced = any(least.get(kind, 0.0) > speed for kind, speed in typical.items())
    typical = {kind: max(speed, least.get(kind, 0.0)) for kind, speed in typical.items()}
    shares = {}
    for index, edge in enumerate(edges):
        if edge.kind in typical:
            shares[index] = math.log(max(edge.speed / typical[edge.kind], FAILED_SHARE))
        elif edge.kind in minimum:
            shares[index] = math.log(min(max(edge.speed / minimum[edge.kind], FAILED_SHARE), 1.0))
    return shares, 0.0 if is_replaced else -math.inf


def _level_of_end(shares: Sequence[float]) -> float:
    """Return the level of an end: its best share, or the second best if it has many partners."""
    return sorted(shares)[-2 if len(shares) >= MANY_PARTNERS else -1]


def _ends_of_switches(levels: Iterable[End], switches: Mapping[End, str]) -> dict[str, frozenset[End]]:
    ends: dict[str, set[End]] = defaultdict(set)
    for end in levels:
        if end in switches:
            ends[switches[end]].add(end)
    return {switch: frozenset(of_switch) for switch, of_switch in ends.items()}


def _find_slow_switches(
    slow_parts: SlowParts, levels: Iterable[End], ends_of_switch: Mapping[str, frozenset[End]]
) -> None:
    """Find the slow switches: switches of which all ends are slow, although most of their hosts are normal elsewhere.

    A host is normal elsewhere if at least half of its ends that are not at the switch are good. Ends on slow rails
    (`SlowParts.rails`) are not counted. Most hosts of the switch, at least MIN_HOSTS, must be normal elsewhere.
    """
    rails: dict[str, set[int]] = defaultdict(set)
    for host, rail in levels:
        if rail not in slow_parts.rails:
            rails[host].add(rail)
    for switch, ends in ends_of_switch.items():
        if not ends <= slow_parts.ends.keys():
            continue
        supporting = {host for host, _ in ends if not _is_slow_elsewhere(host, slow_parts, rails[host], ends)}
        if len(supporting) >= MIN_HOSTS and 2 * len(supporting) > len({host for host, _ in ends}):
            slow_parts.switches[switch] = ends


def _is_slow_elsewhere(host: str, slow_parts: SlowParts, rails: set[int], ends: frozenset[End]) -> bool:
    """Return whether a host is slow on more than half of `rails`. Rails whose end is in `ends` (at one switch) do not count."""
    others = [(host, rail) for rail in rails if (host, rail) not in ends]
    return 2 * sum(end in slow_parts.ends for end in others) > len(others)


def _find_slow_ends(
    slow_parts: SlowParts,
    levels: Mapping[End, float],
    min_limit: float,
    sigmas: float,
    ends_of_switches: Collection[frozenset[End]],
    min_center: float,
) -> None:
    """Find the slow rails and the slow ends. On a slow rail, an end is compared with that rail.

    A rail is not slow if most of its ends at one of its switches are normal.

    `min_center`: lower bound for `SlowParts.end_center`, which is otherwise the median over the rails.
    """
    levels_by_rail: dict[int, dict[str, float]] = defaultdict(dict)
    for (host, rail), level in levels.items():
        levels_by_rail[rail][host] = level
    rail_medians = {rail: upper_median(host_levels.values()) for rail, host_levels in levels_by_rail.items()}
    center = max(upper_median(rail_medians.values()), min_center)
    deviations = [level - rail_medians[rail] for (_, rail), level in levels.items()]
    limit = max(min_limit, sigmas * spread(deviations, 0.0))
    slow_parts.end_limit, slow_parts.end_center = limit, center
    for rail, level in rail_medians.items():
        normal = {(host, rail) for host, level in levels_by_rail[rail].items() if level >= center - limit}
        has_normal_switch = any(
            2 * len(of_rail & normal) > len(of_rail)
            for of_rail in ({end for end in ends if end[1] == rail} for ends in ends_of_switches)
        )
        if level < center - limit and len(levels_by_rail[rail]) >= MIN_HOSTS and not has_normal_switch:
            slow_parts.rails[rail] = level - center
    for (host, rail), level in levels.items():
        base = center + slow_parts.rails.get(rail, 0.0)
        if level < base - limit:
            slow_parts.ends[(host, rail)] = level - base


def _drop_ends_slow_by_chance(slow_parts: SlowParts, edges: Sequence[Edge]) -> set[int]:
    """Remove the slow ends that may have their slow edges by chance, and return these edges.

    The chance is the share of slow edges between good ends. If most ends of a host are slow, all edges of the host count together
    too.

    An edge is slow here if its share is below that of a slow end. A congested network fails no exchange. So an end that exchanged
    no data is compared only with the failed edges.
    """
    base = slow_parts.end_center - slow_parts.end_limit
    shares = {index: share - slow_parts.rails.get(edges[index].rail, 0.0) for index, share in slow_parts.shares.items()}
    slow = {index for index, share in shares.items() if share < base}
    failed = {index for index in slow if slow_parts.shares[index] <= FAILED_LOG_SHARE}
    good = [index for index in shares if not any(end in slow_parts.ends for end in edges[index].ends())]
    chance, chance_to_fail = (_share_of_slow(each, good, edges) for each in (slow, failed))
    ends_of_host: dict[str, list[End]] = defaultdict(list)
    for end in slow_parts.edges_of_end:
        ends_of_host[end[0]].append(end)

    def may_be_chance(ends: Collection[End]) -> bool:
        indexes = {index for end in ends for index in slow_parts.edges_of_end[end]}
        with_good = {
            index
            for index in indexes
            if all(other in ends or other not in slow_parts.ends for other in edges[index].ends())
        }
        probability = chance_to_fail if indexes <= failed else chance
        count = len(slow & with_good)
        return bool(with_good) and not is_improbable(count, len(with_good), probability, len(slow_parts.edges_of_end))

    by_chance = set()
    for end in slow_parts.ends:
        of_host = ends_of_host[end[0]]
        is_host_slow = 2 * sum(each in slow_parts.ends for each in of_host) > len(of_host)
        if may_be_chance([end]) and not (is_host_slow and not may_be_chance(of_host)):
            by_chance.add(end)
    for end in by_chance:
        del slow_parts.ends[end]
    return {index for end in by_chance for index in slow.intersection(slow_parts.edges_of_end[end])}


def _find_slow_links(
    slow_parts: SlowParts, edges: Sequence[Edge], min_limit: float, sigmas: float, by_chance: Collection[int]
) -> None:
    """Find the slow edges between good ends, and the partly slow ends.

    An end is partly slow if it has at least MIN_HOSTS slow edges, these are at least half of its edges to good ends, and chance
    does not explain their number. These edges then do not count as slow. If the slow edges that remain are so many that the
    fabric is suspected, the other rails of the host must also be better than this end: the network may be congested only at some
    hosts.

    `by_chance`: slow edges of the ends that `_drop_ends_slow_by_chance` removed. They are slow, so they do not widen the limit.
    """
    shares = {
        index: share - slow_parts.rails.get(edges[index].rail, 0.0)
        for index, share in slow_parts.shares.items()
        if not any(end in slow_parts.ends for end in edges[index].ends())
    }
    if not shares:
        return
    normal = [share for index, share in shares.items() if index not in by_chance]
    center = upper_median(normal or shares.values())
    slow_parts.limit, slow_parts.center = max(min_limit, sigmas * spread(normal, center)), center
    slow = {index for index, share in shares.items() if index in by_chance or share < center - slow_parts.limit}
    edges_of_end = {
        end: [index for index in indexes if index in shares] for end, indexes in slow_parts.edges_of_end.items()
    }

    def has_many(end: End, count: int) -> bool:
        return count >= MIN_HOSTS and 2 * count >= len(edges_of_end[end])

    candidates = {end for end, indexes in edges_of_end.items() if has_many(end, len(slow.intersection(indexes)))}
    others = [index for index in shares if not candidates.intersection(edges[index].ends())]
    chance = _share_of_slow(slow, others, edges) if others else 1.0
    partly: dict[End, list[int]] = {}
    left = set(slow)
    while left:
        end, indexes = _end_with_most(left, edges)
        if not has_many(end, len(indexes)) or not is_improbable(
            len(indexes), len(edges_of_end[end]), chance, len(edges_of_end)
        ):
            break
        partly[end] = indexes
        left -= set(indexes)
    if are_of_fabric(left, edges):
        for end, indexes in [*partly.items()]:
            host, rail = end
            of_host = [
                index for other, of_other in edges_of_end.items() if other[0] == host and other[1] != rail
                for index in of_other
            ]  # fmt: skip
            chance = _share_of_slow(slow, of_host, edges) if of_host else 1.0
            if not is_improbable(len(indexes), len(edges_of_end[end]), chance, len(edges_of_end)):
                del partly[end]
                left |= set(indexes)
    for end, indexes in partly.items():
        slow_parts.ends[end] = upper_median(shares[index] for index in indexes) - center
        slow_parts.partly_slow_ends.add(end)
    slow_parts.links = sorted(left)


def are_of_fabric(links: Iterable[int], edges: Sequence[Edge]) -> bool:
    """Return whether the slow links, given as indexes of edges, are so many that the fabric is suspected."""
    pairs = {(edge.a, edge.b) for edge in edges}
    return len({(edges[index].a, edges[index].b) for index in links}) > max(MAX_LINKS, MAX_LINKS_SHARE * len(pairs))


def _share_of_slow(slow: Collection[int], indexes: Iterable[int], edges: Sequence[Edge]) -> float:
    """Return the share of these edges that are slow.

    Two hosts with several rails that are slow with each other on all of them are left out: that is one slow link, not chance.
    """
    of_pair: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for index in indexes:
        of_pair[edges[index].a, edges[index].b].append(index in slow)
    counted = [is_slow for pair in of_pair.values() if len(pair) == 1 or not all(pair) for is_slow in pair]
    return sum(counted) / len(counted) if counted else 0.0


def is_improbable(count: int, edge_count: int, chance: float, end_count: int) -> bool:
    """Return whether chance hardly gives any of `end_count` ends `count` or more slow edges of `edge_count`.

    `chance` is the probability that an edge is slow.
    """
    if chance in (0.0, 1.0):
        return chance == 0.0 and count > 0
    fast = edge_count - count
    terms = (
        math.lgamma(edge_count + 1) - math.lgamma(edge_count - left + 1) - math.lgamma(left + 1)
        + (edge_count - left) * math.log(chance) + left * math.log1p(-chance)
        for left in range(fast + 1)
    )  # fmt: skip
    return end_count * sum(map(math.exp, terms)) <= CHANCE


def _end_with_most(slow_edges: Iterable[int], edges: Sequence[Edge]) -> tuple[End, list[int]]:
    """Return the end with the most slow edges, and these edges."""
    edges_of_end: dict[End, list[int]] = defaultdict(list)
    for index in slow_edges:
        for end in edges[index].ends():
            edges_of_end[end].append(index)
    return max(edges_of_end.items(), key=lambda item: (len(item[1]), item[0]))
