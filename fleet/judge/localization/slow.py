"""Find the slow ends, rails, switches and links of the pair matrix, by one quantity: bandwidth or latency.

The pair matrix has the measurements between every two hosts, on each rail. On rail 0, the first GPU under test of one host (with
its NIC) exchanges data with the first GPU of the other host. RDMA ports of the same rail are measured in the same way.

An end is one rail of a host: a GPU with its NIC, or an RDMA port. A pair is as fast as its slowest part, and a good end is fast
with at least one partner. Therefore an end is judged by its best pair, not by its average. If a pair of two good ends is slow,
the link is slow. But if an end is slow with at least MIN_HOSTS of its good partners, and with at least half of them, the end
counts as partly slow, and these links do not count as slow. Speeds are compared as logarithms: the ratio of two speeds becomes a
difference.
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
FAILED_SHARE = 1e-9
"""Speed of a failed pair, as a share of the typical speed. It stands in for 0, which has no logarithm."""


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
    if levels:
        ends_of_switch = _ends_of_switches(levels, switches or {})
        _find_slow_ends(slow_parts, levels, min_limit, sigmas, ends_of_switch.values(), min_center)
        _find_slow_switches(slow_parts, levels, ends_of_switch)
    _find_slow_links(slow_parts, edges, min_limit, sigmas)
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


def _find_slow_links(slow_parts: SlowParts, edges: Sequence[Edge], min_limit: float, sigmas: float) -> None:
    """Find the slow edges between good ends.

    If an end has at least MIN_HOSTS slow edges, and these are at least half of its edges to good ends, the end counts as partly
    slow. These edges then do not count as slow.
    """
    shares = {
        index: share - slow_parts.rails.get(edges[index].rail, 0.0)
        for index, share in slow_parts.shares.items()
        if not any(end in slow_parts.ends for end in edges[index].ends())
    }
    if not shares:
        return
    center = upper_median(shares.values())
    slow_parts.limit, slow_parts.center = max(min_limit, sigmas * spread([*shares.values()], center)), center
    slow_edges = {index for index, share in shares.items() if share < center - slow_parts.limit}
    while slow_edges:
        end, indexes = _end_with_most(slow_edges, edges)
        edges_of_end = [index for index in slow_parts.edges_of_end[end] if index in shares]
        if len(indexes) < MIN_HOSTS or 2 * len(indexes) < len(edges_of_end):
            break
        slow_parts.ends[end] = upper_median(shares[index] for index in indexes) - center
        slow_parts.partly_slow_ends.add(end)
        slow_edges -= set(indexes)
    slow_parts.links = sorted(slow_edges)


def _end_with_most(slow_edges: Iterable[int], edges: Sequence[Edge]) -> tuple[End, list[int]]:
    """Return the end with the most slow edges, and these edges."""
    edges_of_end: dict[End, list[int]] = defaultdict(list)
    for index in slow_edges:
        for end in edges[index].ends():
            edges_of_end[end].append(index)
    return max(edges_of_end.items(), key=lambda item: (len(item[1]), item[0]))
