"""What launches of a gang leave behind where a host of it is slow or stops them.

The real planner (`planning/next_launch.py`) decides who launches together and who leaves; it runs again after each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence
from fleet.planning.next_launch import LaunchPlan, decide
from fleet.simulate.faults import Effect, none_left, scale
from fleet.simulate.figures import LARGE
from fleet.simulate.traces import cut
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.scopes import Scope
from schemas.stages import GANG

Doc = dict[str, Any]
Fill = Callable[[Sequence[str], int], dict[str, Doc]]
"""The hosts of a launch, in rank order, and its number -> the record that each would leave of it, were nothing wrong."""
MOST_LAUNCHES = 8
STOPPED_S = 31.0
"""What a launch takes that a rank ends."""
_HOW = {
    "rank_ended": "killed by SIGABRT",
    "rank_silent": "silent for 8 s: its process is frozen, or gets no CPU time",
}


@cache
def _packs() -> tuple[Pack, ...]:
    return read_packs([])


def gang_records(
    plan: Plan, gang: str, present: Collection[str], effects: Mapping[str, tuple[int, Effect]], fill: Fill
) -> dict[str, Doc]:
    """Host -> its gang record, after all launches.

    Args:
        effects: host -> GPU and what it does to the others.
    """
    theirs = replace(plan, hosts=tuple(host for host in plan.hosts if host.gang == gang))
    records: dict[str, Doc] = {}
    for _ in range(MOST_LAUNCHES):
        evidence = {host: Evidence(records=(record_from_json(record),)) for host, record in records.items()}
        starts = decide(theirs, evidence, _packs(), present=present).launches
        if not starts:
            break
        for start in starts:
            for host, record in _launched(theirs, start, effects, fill).items():
                records[host] = _grown(records[host], record) if host in records else record
    return records


def _launched(plan: Plan, start: LaunchPlan, effects: Mapping[str, tuple[int, Effect]], fill: Fill) -> dict[str, Doc]:
    """What each host records of one launch."""
    records = fill(start.members, start.number)
    stops = [host for host in start.members if host in effects and effects[host][1].stops]
    if stops:
        return _stopped(plan, records, start, stops[0], *effects[stops[0]])
    for host, (_, effect) in effects.items():
        if host in start.members and effect.speed < 1:
            _slowed(records, host, effect)
    return records


def _stopped(
    plan: Plan, records: dict[str, Doc], start: LaunchPlan, host: str, gpu: int, effect: Effect
) -> dict[str, Doc]:
    """A launch that a rank of `host` ended: nothing was measured, and all of them say who it was."""
    benchmarks = list(plan.stage(GANG).benchmarks)
    devices = plan.host(host).devices
    unable = effect.stops == "rank_unable"
    gpu = devices[-1] if unable else gpu
    rank = start.members.index(host) * len(devices) + devices.index(gpu)
    phase = "readiness check" if unable else benchmarks[0]
    text = f'host {host} gpu={gpu} rank {rank} in phase "{phase}": '
    text += f"cannot take part: {none_left(gpu)}" if unable else _HOW[effect.stops]
    culprit = {
        "kind": effect.stops,
        "hosts": [host],
        "text": text,
        "scope": f"gpu={gpu}",
        "rank": rank,
        "phase": phase,
    }
    for name, record in records.items():
        record["observations"] = []
        for launch in record["launches"]:
            launch["duration_s"] = STOPPED_S
            if "timeline" in launch:
                cut(launch["timeline"], STOPPED_S)
            if unable and name != host:
                continue  # its ranks came to their end, and had nothing to measure with
            for item in launch["ranks"]:
                item |= {"exit_code": 0, "phase": "end"} if unable else {"exit_code": None, "phase": phase}
            launch |= {"outcome": "failed", "reason": text, "culprit": culprit}
    return records


def _slowed(records: Mapping[str, Doc], host: str, effect: Effect) -> None:
    """The pairs of a slow host on the rails that are slow, and what all hosts do together."""
    slow = {f"gpu={rail}" for rail in effect.rails}
    for name, record in records.items():
        for item in record["observations"]:
            scope = Scope.parse(item["scope"])
            first, _, kind = item["name"].rpartition(".")
            if (
                item["name"] == "pairs.bandwidth"
                and host in (name, scope.get("partner"))
                and (not slow or scope.device in slow)
            ):
                scale(item, effect.speed)
                continue
            large = first.startswith("collective.") and item["params"].get("size_bytes", 0) >= LARGE
            if large and kind in ("busbw", "algbw", "latency"):
                scale(item, 1 / effect.speed if kind == "latency" else effect.speed)


def _grown(before: Doc, after: Doc) -> Doc:
    """A host's record with one more launch in it: what an earlier one measured stays with it."""
    *earlier, last = before["launches"]
    if before["observations"]:
        last = {**last, "observations": before["observations"]}
    return {
        **after,
        "began": before["began"],
        "snapshots": [*before["snapshots"], *after["snapshots"]],
        "launches": [*earlier, last, *after["launches"]],
    }
