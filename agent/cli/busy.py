"""The verb `busy`: who uses this host now. Such a host is looked at and not measured: its record says so, by each observation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import collectors
from agent.exporter.live import publish_idle
from agent.run import lease
from agent.run.record import HostRun
from agent.sampling.snapshot import take_snapshot
from collectors.nvml import gpu_conflicts
from schemas.catalogue import BENCHMARKS, Expectation
from schemas.records import SKIPPED, Observation
from schemas.skips import BUSY

FREE, IN_USE, USAGE = 0, 1, 64
MOST = 3
"""Reasons that are told."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds busy to the command."""
    busy = verbs.add_parser(
        "busy",
        help="tell who uses this host now; with a plan, record that it is skipped for that. Exits 0 free, 1 in use",
        epilog="example: rackproof busy --plan plan.json --run-dir /var/lib/rackproof/runs/r1 --host r12-h01. In use: a "
        "process on a planned GPU, another run, or what --because says. What cannot be told counts as in use.",
    )
    busy.add_argument("--plan", required=True, help="plan of the run; - reads it from standard input")
    busy.add_argument("--run-dir", type=Path, required=True, help="directory of the run on this host")
    busy.add_argument("--host", required=True, help="this host's name in the plan")
    busy.add_argument("--claim", help="lock.json of the run on the control node: who carries it out")
    busy.add_argument("--because", action="append", default=[], help="what others know: a job of the scheduler's")
    busy.add_argument("--take-over", action="store_true", help="another run that has this host is no reason")
    busy.add_argument("--json", action="store_true", help="print the reasons as JSON")
    busy.set_defaults(call=_busy)


def _busy(options: argparse.Namespace) -> int:
    text = sys.stdin.read() if options.plan == "-" else Path(options.plan).read_text(encoding="utf-8")
    run = HostRun.begin(options.run_dir, options.host, text)
    found = [*filter(None, options.because), *_users(run)]
    by = lease.load_claim(options.claim, run.plan.run_id, options.run_dir)
    if not options.take_over and (
        other := lease.held_by_other(lease.state_directory(options.run_dir), run.plan.run_id, by)
    ):
        found.append(f"held by {other.describe()}")
    if found:
        skip(run, "; ".join(found[:MOST]) + (f"; {len(found) - MOST} more" if len(found) > MOST else ""))
    print(json.dumps({"busy": found}) if options.json else "; ".join(found) or "free")
    return IN_USE if found else FREE


def _users(run: HostRun) -> list[str]:
    """Processes of others on the planned GPUs; MIG is nobody's use, and the benchmarks tell of it."""
    if run.host.device != "gpu" or run.host.share_gpus:
        return []
    divided = gpu_conflicts(run.host.devices, share=True)
    return [text for text in gpu_conflicts(run.host.devices) if text not in divided]


def skip(run: HostRun, why: str) -> None:
    """Records a snapshot, which disturbs nobody, and for each planned observation that was not made that the host was in use."""
    record = run.record()
    made = {seen.stage for seen in record.observations}
    if run.host.gang:
        made |= {seen.stage for seen in run.record(run.host.gang).observations}
    skipped = [
        Observation(
            name=item.name,
            scope=scope,
            stage=item.stage,
            unit=_unit(item.name),
            status=SKIPPED,
            reason=f"{BUSY}{why}"[:1000],
            params=item.params,
        )
        for item, scope in _planned(run)
        if item.stage not in made
    ]
    begun = any((seen.stage, seen.phase) == ("preflight", "before") for seen in record.snapshots)
    devices = run.host.devices if run.host.device == "gpu" else None
    taken = (
        []
        if begun
        else [
            take_snapshot(collectors.build_collectors(devices, full_snapshot=True), stage="preflight", phase="before")
        ]
    )
    run.append(
        snapshots=[snapshot for snapshot, _ in taken],
        gpus=[gpu for _, gpus in taken for gpu in gpus],
        observations=skipped,
    )
    publish_idle(run)


def _planned(run: HostRun) -> Iterable[tuple[Expectation, str]]:
    for item in run.plan.expected_of(run.host):
        for scope in run.plan.scopes_of(run.host, item):
            yield item, scope


def _unit(name: str) -> str:
    entry = BENCHMARKS.get(name.split(".")[0])
    made: Iterator[str] = (output.unit for output in entry.outputs if output.makes(name)) if entry else iter(())
    return next(made, "s")
