"""Find the parts that explain slow and failed pairs of hosts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fleet.judge.localization.matrix import (
    BANDWIDTH,
    FABRIC,
    HOST,
    LATENCY,
    LINK,
    NIC,
    SWITCH,
    End,
    Pair,
    PairKind,
    Suspect,
    Tolerance,
    rule_of_succession,
    upper_median,
)
from fleet.judge.localization.slow import MIN_HOSTS, Edge, find_slow_parts, typical_speeds
from fleet.judge.localization.suspect_builder import SuspectBuilder, failed_alone_text, rails_name, ratio_text
from fleet.quantities import counted


def find_suspects(
    pairs: Sequence[Pair],
    *,
    failed_alone: Mapping[End, str] | None = None,
    normal_alone: Collection[End] = (),
    collective_slow: bool = False,
    tolerance: Tolerance | None = None,
    switches: Mapping[End, str] | None = None,
    least: Mapping[PairKind, float] | None = None,
) -> list[Suspect]:
    """Return the parts that explain the slow and failed pairs, highest confidence first; empty if nothing is slow or failed.

    Args:
        pairs: every pair of hosts that was attempted, once for each rail.
        failed_alone: end of a pair -> which of its parts (GPU or NIC) fails a check without other hosts that explains slow
            pairs.
        normal_alone: ends that are RDMA ports, and are normal in loopback. If such an end is slow, it is because of its port or
            cable, and not because of another part of its host.
        collective_slow: whether a collective over all hosts was too slow. If it was, and no pair is slow, the suspect is the
            fabric, or with two hosts the link between them.
        tolerance: limits beyond which a part is slow; the default is for GPU hosts.
        switches: end -> the switch to which its cable leads, for the ends whose switch is known.
        least: kind of pair -> the lowest bandwidth of a healthy pair in B/s, if it is known.
    """
    tolerance, failed_alone, least = tolerance or Tolerance(), failed_alone or {}, least or {}
    if len({host for pair in pairs for host in (pair.a, pair.b)}) < MIN_HOSTS:
        return list(_suspects_of_two_hosts(pairs, tolerance, collective_slow, failed_alone, least))
    suspects: list[Suspect] = []
    for quantity, share in ((BANDWIDTH, tolerance.bandwidth), (LATENCY, tolerance.latency)):
        if edges := _edges(pairs, quantity):
            known = least if quantity == BANDWIDTH else None
            slow_parts = find_slow_parts(edges, share, tolerance.sigmas, switches, known)
            builder = SuspectBuilder(quantity, edges, slow_parts, failed_alone, normal_alone)
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


def _suspects_of_two_hosts(
    pairs: Sequence[Pair],
    tolerance: Tolerance,
    collective_slow: bool,
    failed_alone: Mapping[End, str],
    least: Mapping[PairKind, float],
) -> Iterator[Suspect]:
    """Yield the suspects of a gang of two hosts, if a rail is slow or failed, or the collective over both hosts is slow.

    The pairs of two hosts do not show which of them is at fault, or whether the path between them is. So an end is the suspect
    only if it also fails without the other host. Otherwise it is the link between the two hosts.
    """
    if not pairs:
        return
    a, b = pairs[0].a, pairs[0].b
    slow_rails: dict[int, str] = {pair.rail: f"failed ({pair.failed})" for pair in pairs if pair.failed}
    figures: dict[int, dict[str, Any]] = {}
    shares: dict[int, float] = {}
    """Slow rail -> its speed as a share of the limit."""
    for quantity, share in ((BANDWIDTH, tolerance.bandwidth), (LATENCY, tolerance.latency)):
        edges = [edge for edge in _edges(pairs, quantity) if edge.speed > 0]
        typical = upper_median(edge.speed for edge in edges) if edges else 0.0
        for edge in edges:
            least_speed = least.get(edge.kind, 0.0) if quantity == BANDWIDTH else 0.0
            limit = max(typical * (1 - share), least_speed)
            if edge.speed >= limit or edge.rail in slow_rails:
                continue
            if edge.speed < typical * (1 - share):
                comparison = f"{ratio_text(quantity, math.log(edge.speed / typical))} that of the other rails"
            else:
                comparison = f"{ratio_text(quantity, math.log(edge.speed / limit))} the lowest rate of healthy ports"
            slow_rails[edge.rail] = f"{quantity} is {comparison}"
            shares[edge.rail] = edge.speed / limit
            speeds = {"measured": edge.speed, "limit": limit} | ({"typical": typical} if typical > limit else {})
            values = speeds if quantity == BANDWIDTH else {name: 1 / speed for name, speed in speeds.items()}
            figures[edge.rail] = {"quantity": quantity, **values}
    if collective_slow and not slow_rails:
        if len(pairs) > 1:  # no rail is slower than the others, so the exchange of each GPU is normal
            failed_alone = {end: kind for end, kind in failed_alone.items() if kind == NIC}
        of_all = {pair.rail: "the collective is slow" for pair in pairs}
        slow_rails = {rail: of_all[rail] for _, rail in failed_alone if rail in of_all} or of_all
    for host, rail in sorted(failed_alone):
        kind = failed_alone[host, rail]
        # A slow port explains the slow rail, so the GPU at the other end, or at the same one, is no suspect.
        has_slow_port = NIC in (failed_alone.get((a, rail)), failed_alone.get((b, rail)))
        if host in (a, b) and rail in slow_rails and (kind == NIC or not has_slow_port):
            yield Suspect(
                kind=kind,
                where=f"{host} rail {rail}",
                confidence=rule_of_succession(1, 1),
                evidence=f"on rail {rail}: {slow_rails[rail]}; {failed_alone_text(kind)}",
                hosts=(host,),
                rails=(rail,),
                **figures.get(rail, {}),
            )
    rails = tuple(sorted(rail for rail in slow_rails if not failed_alone.keys() & {(a, rail), (b, rail)}))
    if rails:
        all_rails = len(rails) == len({pair.rail for pair in pairs})
        findings = "; ".join(dict.fromkeys(slow_rails[rail] for rail in rails))
        slowest = min((rail for rail in rails if rail in shares), key=lambda rail: shares[rail], default=-1)
        yield Suspect(
            kind=LINK,
            where=f"{a} - {b}" if all_rails else f"{a} - {b} {rails_name(rails)}",
            confidence=rule_of_succession(0, 0),
            evidence=f"{findings}: with two hosts, the cause may be {a}, {b} or the link between them",
            hosts=(a, b),
            rails=() if all_rails else rails,
            **figures.get(slowest, {}),
        )
