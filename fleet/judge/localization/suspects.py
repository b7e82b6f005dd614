"""Find the parts that explain slow and failed pairs of hosts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge.localization.matrix import (
    BANDWIDTH,
    FABRIC,
    HOST,
    LATENCY,
    LINK,
    SWITCH,
    End,
    Pair,
    PairKind,
    Suspect,
    Tolerance,
    rule_of_succession,
    upper_median,
)
from fleet.judge.localization.slow import FAILED_SHARE, MIN_HOSTS, Edge, find_slow_parts, typical_speeds
from fleet.judge.localization.suspect_builder import SuspectBuilder, rails_name, ratio_text
from fleet.quantities import counted


def find_suspects(
    pairs: Sequence[Pair],
    *,
    failed_alone: Collection[End] = (),
    collective_slow: bool = False,
    tolerance: Tolerance | None = None,
    switches: Mapping[End, str] | None = None,
    least: Mapping[PairKind, float] | None = None,
) -> list[Suspect]:
    """Return the parts that explain the slow and failed pairs, highest confidence first; empty if nothing is slow or failed.

    Args:
        pairs: every pair of hosts that was attempted, once for each rail.
        failed_alone: ends of pairs, as (host, rail), whose GPU failed a test that involves no other host.
        collective_slow: whether a collective over all hosts was too slow. If it was, and no pair is slow, the suspect is the
            fabric, or with two hosts the link between them.
        tolerance: limits beyond which a part is slow; the default is for GPU hosts.
        switches: end -> the switch to which its cable leads, for the ends whose switch is known.
        least: kind of pair -> the lowest bandwidth of a healthy pair in B/s, if it is known; not used for two hosts.
    """
    tolerance = tolerance or Tolerance()
    if len({host for pair in pairs for host in (pair.a, pair.b)}) < MIN_HOSTS:
        return list(_suspects_of_two_hosts(pairs, tolerance, collective_slow))
    suspects: list[Suspect] = []
    for quantity, share in ((BANDWIDTH, tolerance.bandwidth), (LATENCY, tolerance.latency)):
        if edges := _edges(pairs, quantity):
            known = least if quantity == BANDWIDTH else None
            slow_parts = find_slow_parts(edges, share, tolerance.sigmas, switches, known)
            builder = SuspectBuilder(quantity, edges, slow_parts, failed_alone)
            suspects = _merge_suspects(suspects, builder.suspects())
    if not suspects and collective_slow and pairs:
        suspects = [_slow_fabric(pairs)]
    return sorted(suspects, key=lambda suspect: (-suspect.confidence, suspect.where))


def comparable_pairs(pairs: Sequence[Pair], quantity: str) -> list[Pair]:
    """Return the pairs whose kind has a typical or minimum speed to compare with."""
    typical, minimum = typical_speeds(_edges(pairs, quantity))
    return [pair for pair in pairs if pair.kind in typical or pair.kind in minimum]


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


def _merge_suspects(first: Sequence[Suspect], second: Iterable[Suspect]) -> list[Suspect]:
    """Merge the suspects found by bandwidth and those found by latency, so that each part is listed once.

    Leave out the parts of a suspected host, and the links to it.
    """
    merged = {suspect.where: suspect for suspect in first}
    for suspect in second:
        same = merged.get(suspect.where)
        more_confident = same if same and same.confidence >= suspect.confidence else suspect
        evidence = f"{same.evidence}; {suspect.evidence}" if same else suspect.evidence
        merged[suspect.where] = replace(more_confident, evidence=evidence)
    hosts = {suspect.where for suspect in merged.values() if suspect.kind == HOST}
    return [item for item in merged.values() if item.kind in (HOST, SWITCH) or not hosts.intersection(item.hosts)]


def _slow_fabric(pairs: Sequence[Pair]) -> Suspect:
    """Return the fabric as suspect: no pair is slow, but the collective over all hosts is slow."""
    hosts = {host for pair in pairs for host in (pair.a, pair.b)}
    compared = {(pair.a, pair.b) for pair in comparable_pairs(pairs, BANDWIDTH)}
    if not compared:
        evidence = f"the collective over all {len(hosts)} hosts is slow, and no pair of hosts could be compared"
        return Suspect(kind=FABRIC, where="", confidence=rule_of_succession(0, 0), evidence=evidence)
    share = 100 * len(compared) / (len(hosts) * (len(hosts) - 1) / 2)
    of_all = f"{counted(len(compared), 'pair')} compared, {share:.0f} % of all"
    return Suspect(
        kind=FABRIC,
        where="",
        confidence=rule_of_succession(len(hosts), len(hosts)),
        evidence=f"all {len(hosts)} hosts reach normal speed in pairs ({of_all}), "
        "but the collective over all of them is slow",
    )


def _suspects_of_two_hosts(pairs: Sequence[Pair], tolerance: Tolerance, collective_slow: bool) -> Iterator[Suspect]:
    """Yield the link between the two hosts of `pairs` if it is slow or failed, or if the collective over both hosts is slow.

    Two hosts do not suffice to decide whether the link or one of the hosts is at fault.
    """
    if not pairs:
        return
    a, b = pairs[0].a, pairs[0].b
    slow_rails: dict[int, str] = {pair.rail: f"failed ({pair.failed})" for pair in pairs if pair.failed}
    for quantity, share in ((BANDWIDTH, tolerance.bandwidth), (LATENCY, tolerance.latency)):
        speeds = {edge.rail: edge.speed for edge in _edges(pairs, quantity) if edge.speed > 0}
        typical = upper_median(speeds.values()) if speeds else FAILED_SHARE
        for rail, speed in speeds.items():
            if speed < typical * (1 - share):
                ratio = ratio_text(quantity, math.log(speed / typical))
                slow_rails.setdefault(rail, f"{quantity} is {ratio} that of the other rails")
    if collective_slow and not slow_rails:
        slow_rails = {pair.rail: "the collective is slow" for pair in pairs}
    if slow_rails:
        all_rails = len(slow_rails) == len({pair.rail for pair in pairs})
        rails = tuple(sorted(slow_rails))
        findings = "; ".join(dict.fromkeys(slow_rails.values()))
        yield Suspect(
            kind=LINK,
            where=f"{a} - {b}" if all_rails else f"{a} - {b} {rails_name(rails)}",
            confidence=rule_of_succession(0, 0),
            evidence=f"{findings}: with two hosts, the cause may be {a}, {b} or the link between them",
            hosts=(a, b),
            rails=() if all_rails else rails,
        )
