"""Attribute failures on pairs of hosts, and on RDMA ports, to the slow part of the gang (the hosts of one multi-node launch).

A pair of GPUs on two hosts is as fast as the slowest of many parts: two GPUs, two NICs, cables and switches. So a failure in the
scope `gpu=0,partner=h2` does not show that GPU 0 is faulty. Without this module, a slow cable would look like a faulty GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.localization.port_pairs import FABRIC_PARTS
from fleet.judge.paths import with_transport_of_gang
from fleet.judge.port_coverage import BEST
from schemas.catalogue import counts_wrong_results
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import HOST, Scope

PAIRS = "pairs."


def attribute_pair_failures(
    verdicts: Iterable[Verdict], pair_verdicts: Sequence[Verdict], views: Iterable[HostView]
) -> list[Verdict]:
    """Return the verdicts. In those that failed on a pair of hosts, or on a port, `part` is the part at fault.

    - For a slow pair of GPUs, it is a suspect: the GPU of this host, its NIC, its rail or the host. Without a suspect, it is
      the gang, or the host if the host has no gang. A slow transport of NCCL may then explain the slow pair. Verdicts on wrong
      data do not change, because a slow part does not explain wrong data.
    - For a port that is slow with every partner, it is the rail or switch of the port, if that rail or switch fails as a suspect.

    Args:
        verdicts: the verdicts of all criteria on all hosts.
        pair_verdicts: the verdicts of `judge_gangs`, which name the suspects.
        views: the hosts of `verdicts`.
    """
    suspects: dict[str, list[Verdict]] = defaultdict(list)
    for item in pair_verdicts:
        if item.verdict != PASS and item.name.startswith(PAIRS):
            suspects[item.host].append(item)
    shared_parts = {
        (item.host, item.scope): item.part
        for item in pair_verdicts
        if Scope.parse(item.part).device_kind in FABRIC_PARTS and item.verdict == FAIL
    }
    view_of = {view.host.name: view for view in views}
    return [
        verdict if verdict.verdict != FAIL else _attributed(verdict, suspects[verdict.host], shared_parts, view_of)
        for verdict in verdicts
    ]


def _attributed(
    verdict: Verdict,
    suspects: Iterable[Verdict],
    shared_parts: Mapping[tuple[str, str], str],
    view_of: Mapping[str, HostView],
) -> Verdict:
    if verdict.name == BEST:
        return replace(verdict, part=shared_parts.get((verdict.host, verdict.scope), verdict.part))
    scope = Scope.parse(verdict.scope)
    if counts_wrong_results(verdict.name):
        return verdict
    if not verdict.name.startswith(PAIRS) or not scope.get("partner") or verdict.part:
        return verdict
    view = view_of[verdict.host]
    host = view.host
    suspect = next((item for item in suspects if _includes(item, scope.device, host.scopes)), None)
    if suspect is None:
        of_gang = with_transport_of_gang(view, verdict)
        return replace(of_gang, part=f"gang={host.gang}" if host.gang else HOST, serial="")
    return replace(verdict, part=suspect.part_scope, serial=suspect.serial)


def _includes(suspect: Verdict, device: str, devices: Sequence[str]) -> bool:
    """Return whether a suspect of the host is this GPU, its NIC (with the scope of the GPU), its rail, or the whole host."""
    if suspect.scope in (device, HOST):
        return True
    rail = Scope.parse(suspect.part)
    return rail.device_kind == "rail" and device in devices and rail.index == devices.index(device)
