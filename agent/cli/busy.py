"""The verb `busy`: check whether this host is in use.

A host in use is inspected but not measured. Its record gets a snapshot. For each stage without observations, every planned
observation is recorded as skipped, with the reason why the host is in use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from agent.exporter.live import publish_idle
from agent.run import lease
from agent.run.record import HostRun, read_plan_text
from agent.sampling.snapshot import take_snapshot
from collectors.nvml import MAX_CONFLICTS, gpu_conflicts, shortened
from collectors.table import build_collectors
from schemas.catalogue import BENCHMARKS
from schemas.records import SKIPPED, Observation
from schemas.skips import skipped_for
from schemas.stages import PREFLIGHT

FREE, IN_USE = 0, 1
MAX_REASONS = 3
"""Maximum number of reasons in the record. Further reasons are only counted (`2 more`)."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add busy to the command."""
    parser = verbs.add_parser(
        "busy",
        help="check whether this host is in use; if so, record its measurements as skipped. Exits 0 if it is free, 1 if in use",
        epilog="example: rackproof busy --plan plan.json --run-dir /var/lib/rackproof/runs/r1 --host r12-h01. A host is in use "
        "if a process uses a planned GPU, another run holds the host, or --because is given. A GPU whose processes cannot "
        "be listed counts as in use. If the plan allows other processes on the GPUs, the GPUs are not checked.",
    )
    parser.add_argument("--plan", required=True, help="plan of the run; - reads it from standard input")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run on this host")
    parser.add_argument("--host", required=True, help="this host's name in the plan")
    parser.add_argument(
        "--claim", help="content of lock.json in the run directory on the control node; it identifies the operator"
    )
    parser.add_argument(
        "--because",
        action="append",
        default=[],
        help="count the host as in use for this reason, such as a scheduler's job; may be repeated",
    )
    parser.add_argument(
        "--take-over", action="store_true", help="do not count the host as in use if another run holds it"
    )
    parser.add_argument("--json", action="store_true", help="print the reasons as JSON")
    parser.set_defaults(call=_busy)


def _busy(options: argparse.Namespace) -> int:
    run = HostRun.begin(options.run_dir, options.host, read_plan_text(options.plan))
    reasons = [*filter(None, options.because), *_gpu_users(run)]
    claim = lease.load_claim(options.claim, run.plan.run_id, options.run_dir)
    other = lease.held_by_other(lease.state_directory(options.run_dir), run.plan.run_id, run.plan.nonce, claim)
    if other and not options.take_over:
        reasons.append(f"held by {other.describe()}")
    if reasons:
        record_skipped(run, "; ".join(shortened(reasons, MAX_REASONS)))
    reasons = shortened(reasons, MAX_CONFLICTS)
    print(json.dumps({"busy": reasons}) if options.json else "; ".join(reasons) or "free")
    return IN_USE if reasons else FREE


def _gpu_users(run: HostRun) -> list[str]:
    """Return a text for each process on a planned GPU, and for each planned GPU whose processes cannot be listed.

    GPUs in MIG mode are left out, because MIG mode does not mean that a GPU is in use. `gpu_conflicts` with `share=True` returns
    only the conflicts by MIG mode.
    """
    if run.host.device != "gpu" or run.host.share_gpus:
        return []
    mig_conflicts = gpu_conflicts(run.host.devices, share=True, limit=None)
    return [reason for reason in gpu_conflicts(run.host.devices, limit=None) if reason not in mig_conflicts]


def record_skipped(run: HostRun, reason: str) -> None:
    """Record every planned observation as skipped for `reason`, except those of stages that already have an observation.

    Also take the first snapshot if there is none. A snapshot does not disturb the processes that use the host. The record
    does not change if there is nothing to add.
    """
    record = run.record()
    recorded_stages = {observation.stage for observation in record.observations}
    if run.host.gang:
        recorded_stages |= {observation.stage for observation in run.record(run.host.gang).observations}
    has_snapshot = any((snapshot.stage, snapshot.phase) == (PREFLIGHT, "before") for snapshot in record.snapshots)
    devices = run.host.devices if run.host.device == "gpu" else None
    taken = []
    if not has_snapshot:
        sources = build_collectors(devices, full_snapshot=True)
        taken = [take_snapshot(sources, stage=PREFLIGHT, phase="before")]
    skipped = [item for item in _skipped_observations(run, reason) if item.stage not in recorded_stages]
    if taken or skipped:
        run.append(
            snapshots=[snapshot for snapshot, _ in taken],
            gpus=[gpu for _, gpus in taken for gpu in gpus],
            observations=skipped,
            # The end moves only with a new snapshot: the judge requires a snapshot or a launch in the last hour of a record.
            keep_end=not taken,
        )
    publish_idle(run)


def _skipped_observations(run: HostRun, reason: str) -> Iterator[Observation]:
    for expected in run.plan.expected_of(run.host):
        for scope in run.plan.scopes_of(run.host, expected):
            yield Observation(
                name=expected.name,
                scope=scope,
                stage=expected.stage,
                unit=_unit(expected.name),
                status=SKIPPED,
                reason=skipped_for(reason)[:1000],
                params=expected.params,
            )


def _unit(name: str) -> str:
    """Return the unit of a planned observation. No benchmark lists `benchmark.duration` as an output; its unit is seconds."""
    benchmark = BENCHMARKS.get(name.split(".")[0])
    outputs = benchmark.outputs if benchmark else ()
    return next((output.unit for output in outputs if output.makes(name)), "s")
