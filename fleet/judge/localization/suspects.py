"""find_suspects(pairs) -> the parts that explain what is slow, surest first. A pure function."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from fleet.judge.localization.matrix import (
    BANDWIDTH,
    FABRIC,
    HOST,
    LATENCY,
    LINK,
    End,
    Pair,
    Suspect,
    Tolerance,
    rule_of_succession,
    upper_median,
)
from fleet.judge.localization.slow import LEAST_HOSTS, LOST, Edge, find_slow, usual_speeds
from fleet.judge.localization.suspect_builder import SuspectBuilder, rails_name, times


def find_suspects(
    pairs: Sequence[Pair],
    *,
    failed_alone: Collection[End] = (),
    collective_slow: bool = False,
    tolerance: Tolerance | None = None,
) -> list[Suspect]:
    """Return the fewest parts that explain the slow and failed pairs; empty if no pair is slow or failed.

    Args:
        pairs: every pair of hosts that was tried, once a rail.
        failed_alone: GPUs (host, rail) that failed what each host measures by itself.
        collective_slow: an operation of all hosts together was too slow; if no pair is slow, the fabric is named.
        tolerance: how slow is slow; the default is for GPU hosts.
    """
    tolerance = tolerance or Tolerance()
    if len({host for pair in pairs for host in (pair.a, pair.b)}) < LEAST_HOSTS:
        return list(_between_two(pairs, tolerance, collective_slow))
    result: list[Suspect] = []
    for quantity, share in ((BANDWIDTH, tolerance.bandwidth), (LATENCY, tolerance.latency)):
        edges = _edges(pairs, quantity)
        if edges:
            result = _joined(
                result,
                SuspectBuilder(quantity, edges, find_slow(edges, share, tolerance.sigmas), failed_alone).suspects(),
            )
    if not result and collective_slow and pairs:
        result = [_fabric(pairs)]
    return sorted(result, key=lambda suspect: (-suspect.confidence, suspect.where))


def comparable(pairs: Sequence[Pair], quantity: str) -> list[Pair]:
    """Return the pairs whose speed can be compared with others."""
    usual, least = usual_speeds(_edges(pairs, quantity))
    return [pair for pair in pairs if pair.kind in usual or pair.kind in least]


def _edges(pairs: Iterable[Pair], quantity: str) -> list[Edge]:
    def speed(pair: Pair) -> float | None:
        if pair.failed:
            return 0.0 if quantity == BANDWIDTH else None
        if quantity == BANDWIDTH:
            return pair.bandwidth
        return 1 / pair.latency if pair.latency else None

    return [
        Edge(a=pair.a, b=pair.b, rail=pair.rail, speed=value, kind=pair.kind, failed=pair.failed)
        for pair in pairs
        if (value := speed(pair)) is not None
    ]


def _joined(first: Sequence[Suspect], second: Iterable[Suspect]) -> list[Suspect]:
    """What two quantities say together: the same part once, and no part of a host that is suspected as a whole."""
    result = {suspect.where: suspect for suspect in first}
    for suspect in second:
        same = result.get(suspect.where)
        surer = same if same and same.confidence >= suspect.confidence else suspect
        evidence = f"{same.evidence}; {suspect.evidence}" if same else suspect.evidence
        result[suspect.where] = replace(surer, evidence=evidence)
    whole = {suspect.where for suspect in result.values() if suspect.kind == HOST}
    return [item for item in result.values() if item.kind == HOST or not whole.intersection(item.hosts)]


def _fabric(pairs: Sequence[Pair]) -> Suspect:
    """Nothing is slow in pairs, and yet all together are."""
    hosts = {host for pair in pairs for host in (pair.a, pair.b)}
    met = {(pair.a, pair.b) for pair in comparable(pairs, BANDWIDTH)}
    share = len(met) / (len(hosts) * (len(hosts) - 1) / 2)
    return Suspect(
        kind=FABRIC,
        where="",
        confidence=rule_of_succession(len(hosts), len(hosts)),
        evidence=f"all {len(hosts)} hosts are well in pairs ({len(met)} pairs compared, {share:.0%} of those there are), and "
        "all together are slow",
    )


def _between_two(pairs: Sequence[Pair], tolerance: Tolerance, collective_slow: bool) -> Iterator[Suspect]:
    """Return both hosts: with two, neither end nor the link can be singled out."""
    if not pairs:
        return
    a, b = pairs[0].a, pairs[0].b
    either = f"{a}, {b}, or what is between them: two hosts cannot tell"
    slow: dict[int, str] = {pair.rail: f"failed ({pair.failed})" for pair in pairs if pair.failed}
    for quantity, share in ((BANDWIDTH, tolerance.bandwidth), (LATENCY, tolerance.latency)):
        speeds = {edge.rail: edge.speed for edge in _edges(pairs, quantity) if edge.speed > 0}
        usual = upper_median(speeds.values()) if speeds else LOST
        for rail, speed in speeds.items():
            if speed < usual * (1 - share):
                slow.setdefault(rail, f"{quantity} is {times(quantity, math.log(speed / usual))} the other rails'")
    if collective_slow and not slow:
        slow = {pair.rail: "all together are slow" for pair in pairs}
    if slow:
        whole = len(slow) == len({pair.rail for pair in pairs})
        rails = tuple(sorted(slow))
        yield Suspect(
            kind=LINK,
            where=f"{a} - {b}" if whole else f"{a} - {b} {rails_name(rails)}",
            confidence=rule_of_succession(0, 0),
            evidence="; ".join(dict.fromkeys(slow.values())) + f": {either}",
            hosts=(a, b),
            rails=() if whole else rails,
        )
