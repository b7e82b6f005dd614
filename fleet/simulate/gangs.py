"""Make the records of a gang (the hosts of one multi-node launch) with a host that is slow or makes a launch fail.

After each launch the planner of real runs (`planning/next_launch.py`) decides which hosts launch again and which are excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence
from fleet.planning.next_launch import LaunchPlan, decide
from fleet.simulate.cabling import adapter_scope
from fleet.simulate.faults import HOST, PATH, PORT_SPEEDS, RAIL, Effect, no_device_message, scale_observation
from fleet.simulate.figures import LARGE_BYTES
from fleet.simulate.ports import update_best
from fleet.simulate.timelines import end_early
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.scopes import Scope
from schemas.stages import GANG

Doc = dict[str, Any]
MakeRecords = Callable[[Sequence[str], int], dict[str, Doc]]
"""Function that takes the hosts of a launch in rank order and the number of the launch. It returns the record of each host, as if
all hosts were healthy."""
HostEffect = tuple[str, int, Effect]
"""A host, the number of its faulty GPU, and the effect of one fault of this host on launches. A host may have several faults."""
MAX_LAUNCHES = 8
STOPPED_LAUNCH_S = 31.0
"""Duration in seconds of a launch that a rank made fail."""
UNABLE = "rank_unable"
_REASONS = {
    "rank_ended": "killed by SIGABRT",
    "rank_silent": "silent for 8 s: its process is frozen, or gets no CPU time",
}


@cache
def _packs() -> tuple[Pack, ...]:
    return read_packs([])


def gang_records(
    plan: Plan,
    gang: str,
    present: Collection[str],
    effects: Sequence[HostEffect],
    make_records: MakeRecords,
) -> dict[str, Doc]:
    """Return the gang record of each host after the last launch.

    Args:
        plan: plan of the run.
        gang: name of the gang.
        present: names of the reachable hosts, which can take part in launches.
        effects: the effects of all faults.
        make_records: makes the records of one launch of healthy hosts.
    """
    gang_plan = replace(plan, hosts=tuple(host for host in plan.hosts if host.gang == gang))
    records: dict[str, Doc] = {}
    for _ in range(MAX_LAUNCHES):
        evidence = {host: Evidence(records=(record_from_json(record),)) for host, record in records.items()}
        launches = decide(gang_plan, evidence, _packs(), present=present).launches
        if not launches:
            break
        for launch_plan in launches:
            for host, record in _launch_records(gang_plan, launch_plan, effects, make_records).items():
                records[host] = _append_launch(records[host], record) if host in records else record
    return records


def _launch_records(
    plan: Plan, launch_plan: LaunchPlan, effects: Sequence[HostEffect], make_records: MakeRecords
) -> dict[str, Doc]:
    """Return the record of each host for one launch."""
    records = make_records(launch_plan.members, launch_plan.number)
    of_launch = [item for item in effects if item[0] in launch_plan.members]
    ending = [item for item in of_launch if item[2].ended_by]
    if ending:
        # A rank without a device fails in the readiness check, before any other rank can fail.
        first = min(ending, key=lambda item: item[2].ended_by != UNABLE)
        return _end_launch(plan, records, launch_plan, *first)
    if slow := [(host, effect) for host, _, effect in of_launch if effect.speed < 1]:
        _slow_down(plan, records, slow)
    return records


def _end_launch(
    plan: Plan, records: dict[str, Doc], launch_plan: LaunchPlan, host: str, gpu: int, effect: Effect
) -> dict[str, Doc]:
    """Change the records of a launch as if a rank of `host` had made it fail before anything was measured.

    If the rank was unable to take part, only its host reports the failure. Otherwise, every host of the launch reports it.
    """
    benchmarks = list(plan.stage(GANG).benchmarks)
    devices = plan.host(host).devices
    is_unable = effect.ended_by == UNABLE
    gpu = devices[-1] if is_unable else gpu  # the driver numbers the remaining GPUs from 0: the last number is missing
    rank = launch_plan.members.index(host) * len(devices) + devices.index(gpu)
    phase = "readiness check" if is_unable else benchmarks[0]
    text = f'host {host} gpu={gpu} rank {rank} in phase "{phase}": '
    text += f"cannot take part: {no_device_message(gpu)}" if is_unable else _REASONS[effect.ended_by]
    culprit = {
        "kind": effect.ended_by,
        "hosts": [host],
        "text": text,
        "scope": f"gpu={gpu}",
        "rank": rank,
        "phase": phase,
    }
    for name, record in records.items():
        record["observations"] = []
        for launch in record["launches"]:
            launch["duration_s"] = STOPPED_LAUNCH_S
            if "timeline" in launch:
                end_early(launch["timeline"], STOPPED_LAUNCH_S)
            if is_unable and name != host:
                continue  # the ranks of the other hosts exited normally, without a measurement
            for exit_report in launch["ranks"]:
                exit_report |= {"exit_code": 0, "phase": "end"} if is_unable else {"exit_code": None, "phase": phase}
            launch |= {"outcome": "failed", "reason": text, "culprit": culprit}
    return records


def _slow_down(plan: Plan, records: Mapping[str, Doc], effects: Sequence[tuple[str, Effect]]) -> None:
    """Slow down the pairs of hosts that the effects select, and the large collectives on all hosts.

    A pair or collective that several effects slow down has the lowest of their speeds: it is as fast as its slowest part.

    Args:
        plan: plan of the gang.
        records: the record of each host.
        effects: for each fault, its host and its effect.
    """
    slow = []
    for host, effect in effects:
        scopes = {scope for rail in effect.rails for scope in (f"gpu={rail}", f"hca=mlx5_{rail}")}
        slow.append((effect.speed, _slow_pairs(plan, records, host, effect.reach), scopes))
    slowest = min(speed for speed, _, _ in slow)
    for name, record in records.items():
        for item in record["observations"]:
            scope = Scope.parse(item["scope"])
            first, _, kind = item["name"].rpartition(".")
            if item["name"] in ("pairs.bandwidth", *PORT_SPEEDS):
                of_pair = [
                    speed
                    for speed, is_slow, scopes in slow
                    if is_slow(name, scope.get("partner")) and (not scopes or scope.device in scopes)
                ]
                if of_pair:
                    scale_observation(item, min(of_pair))
                continue
            is_large = first.startswith("collective.") and item["params"].get("size_bytes", 0) >= LARGE_BYTES
            if is_large and kind in ("busbw", "algbw", "latency"):
                scale_observation(item, 1 / slowest if kind == "latency" else slowest)
        update_best(record)


def _slow_pairs(plan: Plan, records: Mapping[str, Doc], host: str, reach: str) -> Callable[[str, str], bool]:
    """Return a function that takes a host and its partner, and returns whether `reach` selects their pair.

    `host` is the host with the fault.
    """
    if reach == RAIL:
        return lambda _name, _partner: True
    if reach == PATH:
        names = [planned.name for planned in plan.hosts]
        ends = {host, names[(names.index(host) + 1) % len(names)]}
        return lambda name, partner: {name, partner} == ends
    at_switch = {host} if reach == HOST else {name for name in records if _leaf(records[name]) == _leaf(records[host])}
    return lambda name, partner: bool(at_switch & {name, partner})


def _leaf(record: Doc) -> Any:
    """Return the ID of the leaf switch of a host on rail 0. Hosts that share it share a leaf switch on every other rail too."""
    metrics = (metric for snapshot in record["snapshots"] for metric in snapshot["metrics"])
    return next(metric["values"][adapter_scope(0)] for metric in metrics if metric["name"] == "infiniband.switch_id")


def _append_launch(before: Doc, after: Doc) -> Doc:
    """Return the records `before` and `after` of a host as one record. `after` is the record of the next launch.

    The new record has the start time of `before`, the end time of `after`, and the snapshots and launches of both. It has the
    observations of `after`; those of `before` move into the last launch of `before`.
    """
    *earlier, last = before["launches"]
    if before["observations"]:
        last = {**last, "observations": before["observations"]}
    return {
        **after,
        "began": before["began"],
        "snapshots": [*before["snapshots"], *after["snapshots"]],
        "launches": [*earlier, last, *after["launches"]],
    }
