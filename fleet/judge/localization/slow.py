"""Find the slow ends, rails and links of the pair matrix, in one quantity.

An end is a host's GPU of one index with its NIC. A pair is as fast as its slowest part. Therefore a slow end is slow with every
partner, and a good end is fast with at least one: an end is judged by its best pair, not by its average. If a pair of two good
ends is slow, the link is slow. All sums are of logarithms, so that a ratio is a difference.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.judge.localization.matrix import End, Kind, spread, upper_median

LEAST_HOSTS = 3
"""With two hosts, neither is known to be the slow one."""
MANY = 8
"""With so many partners the second best counts: the best of many may be a mistake of the clock."""
LOST = 1e-9
"""Speed of a pair that failed, as a share of the others'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """One pair in one quantity: `speed` is a rate, or one over a time; 0 where the pair failed."""

    a: str
    b: str
    rail: int
    speed: float
    kind: Kind = field(default_factory=Kind)
    failed: str = ""

    def ends(self) -> tuple[End, End]:
        """The two GPUs."""
        return (self.a, self.rail), (self.b, self.rail)


@dataclass(kw_only=True)
class Slow:
    """What is slow, and by how much it would have to be otherwise."""

    shares: dict[int, float] = field(default_factory=dict)
    """Place in the list of edges -> its speed as a share of what is usual for its kind, as a logarithm."""
    of_end: dict[End, list[int]] = field(default_factory=dict)
    """The edges at each end."""
    rails: dict[int, float] = field(default_factory=dict)
    """Slow rail -> share of speed that is left, as a logarithm."""
    ends: dict[End, float] = field(default_factory=dict)
    """Slow end -> share of speed that is left."""
    partial: set[End] = field(default_factory=set)
    """Those among the slow ends that are fast with some."""
    links: list[int] = field(default_factory=list)
    """Slow edges between two ends that are well."""
    limit: float = 0.0
    """Share of speed that an edge may lack, as a logarithm."""
    end_limit: float = 0.0
    """The same of the best that an end does, which scatters less."""


def find_slow(edges: Sequence[Edge], tolerance: float, sigmas: float) -> Slow:
    """What is slow among the pairs of three hosts or more.

    Args:
        edges: every pair of every rail once.
        tolerance: the share of speed that may be missing where noise does not explain more.
        sigmas: standard deviations of what they scatter by that are noise.
    """
    least = -math.log(1 - tolerance)
    slow_parts = Slow(shares=_shares(edges), limit=least, end_limit=least)
    for index in slow_parts.shares:
        for end in edges[index].ends():
            slow_parts.of_end.setdefault(end, []).append(index)
    levels = {
        end: _level([slow_parts.shares[index] for index in indexes]) for end, indexes in slow_parts.of_end.items()
    }
    levels = {end: level for end, level in levels.items() if len(slow_parts.of_end[end]) > 1}
    if levels:
        _judge_ends(slow_parts, levels, least, sigmas)
    _judge_links(slow_parts, edges, least, sigmas)
    return slow_parts


def usual_speeds(edges: Iterable[Edge]) -> tuple[dict[Kind, float], dict[Kind, float]]:
    """Kind -> the speed of a pair of it: the median over rails and hosts of the best that each does.

    Not the median of all pairs: of eight hosts, three slow ones slow down most of the pairs. Second the kinds of which fewer
    than three hosts have pairs: they have the speed of the fastest that is to be no faster as their least, if there is one.
    """
    best: dict[Kind, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for edge in edges:
        of_host = best[edge.kind][edge.rail]
        for host in (edge.a, edge.b):
            of_host[host] = max(of_host.get(host, 0.0), edge.speed)
    usual = {
        kind: speed
        for kind, rails in best.items()
        if len({host for of_host in rails.values() for host in of_host}) >= LEAST_HOSTS
        and (speed := upper_median(upper_median(of_host.values()) for of_host in rails.values())) > 0
    }
    slower = {
        kind: [usual[other] for other in usual if kind.no_slower_than(other)] for kind in best.keys() - usual.keys()
    }
    return usual, {kind: max(speeds) for kind, speeds in slower.items() if speeds}


def _shares(edges: Sequence[Edge]) -> dict[int, float]:
    """Return each speed over the usual one of its kind; over a minimum it shows only that the minimum is met."""
    usual, least = usual_speeds(edges)
    slow_parts = {}
    for index, edge in enumerate(edges):
        if edge.kind in usual:
            slow_parts[index] = math.log(max(edge.speed / usual[edge.kind], LOST))
        elif edge.kind in least:
            slow_parts[index] = math.log(min(max(edge.speed / least[edge.kind], LOST), 1.0))
    return slow_parts


def _level(shares: Sequence[float]) -> float:
    """The best that an end does."""
    return sorted(shares)[-2 if len(shares) >= MANY else -1]


def _judge_ends(slow_parts: Slow, levels: Mapping[End, float], least: float, sigmas: float) -> None:
    of_rail: dict[int, dict[str, float]] = defaultdict(dict)
    for (host, rail), level in levels.items():
        of_rail[rail][host] = level
    usual = {rail: upper_median(of_host.values()) for rail, of_host in of_rail.items()}
    centre = upper_median(usual.values())
    limit = max(least, sigmas * spread([level - usual[rail] for (_, rail), level in levels.items()], 0.0))
    slow_parts.end_limit = limit
    for rail, level in usual.items():
        if level < centre - limit and len(of_rail[rail]) >= LEAST_HOSTS:
            slow_parts.rails[rail] = level - centre
    for (host, rail), level in levels.items():
        base = centre + slow_parts.rails.get(rail, 0.0)
        if level < base - limit:
            slow_parts.ends[(host, rail)] = level - base


def _judge_links(slow_parts: Slow, edges: Sequence[Edge], least: float, sigmas: float) -> None:
    """The edges between ends that are well; where most of them meet in one end, it is that end after all."""
    left = {
        index: share - slow_parts.rails.get(edges[index].rail, 0.0)
        for index, share in slow_parts.shares.items()
        if not any(end in slow_parts.ends for end in edges[index].ends())
    }
    if not left:
        return
    centre = upper_median(left.values())
    slow_parts.limit = max(least, sigmas * spread([*left.values()], centre))
    slow = {index for index, share in left.items() if share < centre - slow_parts.limit}
    while slow:
        end, indexes = _most(slow, edges)
        touching = [index for index in slow_parts.of_end[end] if index in left]
        if len(indexes) < LEAST_HOSTS or 2 * len(indexes) < len(touching):
            break
        slow_parts.ends[end] = upper_median(left[index] for index in indexes) - centre
        slow_parts.partial.add(end)
        slow -= set(indexes)
    slow_parts.links = sorted(slow)


def _most(slow: Iterable[int], edges: Sequence[Edge]) -> tuple[End, list[int]]:
    """The end with most slow edges, and these."""
    at: dict[End, list[int]] = defaultdict(list)
    for index in slow:
        for end in edges[index].ends():
            at[end].append(index)
    return max(at.items(), key=lambda item: (len(item[1]), item[0]))
