"""One launch of a stage on this host: what is seen to before, who may measure, and what of it gets into the record."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import collectors
from agent.exporter.live import Span, publish
from agent.gang.peer_channel import PeerChannel
from agent.gang.protocol import Gang, GangError
from agent.launch.supervise import supervise
from agent.launch.torchrun import LaunchError, torchrun
from agent.run import background, lease
from agent.run.record import HostRun, private_directory
from agent.run.work_directory import set_aside
from agent.sampling.snapshot import now, take
from collectors.base import Absent
from collectors.nvml import gpu_conflicts, gpu_indices
from schemas import documents
from schemas.plans import Stage
from schemas.records import Launch, Record
from schemas.stages import CELL, GANG, PROBE

TRIES, MOST_TRIES = "tries.json", 3
"""How often each cell of a study was begun, in the run's directory. One that came to an end is in the record, however it ended;
one that never is has its supervisor killed, and would be launched for ever, at a cost that nobody counts."""


def take_up(run_dir: Path, host: str, plan: str, *, claim: str | None = None, take_over: bool = False) -> HostRun:
    """Begins the run of this plan (JSON) on this host, or goes on with it.

    Raises:
        documents.DocumentError: the plan or what lies there cannot be believed.
        HeldError: another run has this host.
    """
    run = HostRun.begin(run_dir, host, plan)
    by = lease.given(claim, run.plan.run_id, run_dir)
    if note := lease.take(run_dir, run.plan, by, take_over=take_over):
        _progress(note)
    return run


def look(run: HostRun, stage: str, *, once: bool) -> Record:
    """Adds a snapshot to the record; `once`: unless the stage has one, with which its counters are compared."""
    with background.alone(run.directory, "inspect"):
        record = run.record()
        if not (once and any((seen.stage, seen.phase) == (stage, "before") for seen in record.snapshots)):
            snapshot, gpus = take(readers(run), stage=stage, phase="before")
            record = run.add(snapshots=[snapshot], gpus=gpus)
    publish(run)
    return record


def measure(
    run: HostRun,
    planned: Stage,
    members: list[str],
    number: int = 0,
    *,
    port: int = 0,
    closed: bool = False,
    interface: str = "",
    span: Span | None = None,
    exported: Mapping[str, str] | None = None,
) -> Record:
    """One launch of a stage on this host; the record with it, whatever became of it.

    Args:
        members: who starts together, in rank order.
        number: which launch of the gang, or which round of a soak, this is.
        port: the rendezvous on the first member, after which the heartbeats' ports come.
        closed: only from the members' addresses can anybody connect.
        interface: network interface for NCCL and gloo; empty: they choose.
        span: of the soak that it is a round of.
        exported: variables that the operator gives the ranks.
    """
    stage, gang = planned.name, run.host.gang if planned.name in (GANG, PROBE, CELL) else ""
    if stage == CELL and (why := worn_out(run, number)):
        return left_out(run, gang, not_started(stage, members, number, planned.deadline_s, why))
    if none := _no_gpu(run):
        return left_out(run, gang, not_started(stage, members, number, planned.deadline_s, none))
    if run.host.device == "gpu" and (found := gpu_conflicts(run.host.devices, share=run.host.share_gpus)):
        reason = f"{'; '.join(found)}: end it, or set rackproof_share_gpus to measure beside it"
        return left_out(run, gang, not_started(stage, members, number, planned.deadline_s, reason))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are ended and not left behind
    work = run.directory / "work" / stage
    set_aside(work, run.directory / "logs")
    shutil.rmtree(work, ignore_errors=True)
    private_directory(work)
    meeting = Gang.from_plan(run.plan, run.host, f"{stage} {number}", members, port, members_only=closed)
    try:
        command = torchrun(
            run.plan,
            run.host,
            planned,
            gang=meeting,
            work=work,
            data=lease.state_of(run.directory) / "data",
            port=port,
            interface=interface,
            uuids={gpu.index: gpu.uuid for gpu in run.record().gpus},
            exported=exported or {},
        )
        exchange = PeerChannel(meeting) if len(members) > 1 else None
    except (LaunchError, GangError) as error:
        return left_out(run, gang, not_started(stage, members, number, planned.deadline_s, str(error)))
    return supervise(
        run,
        readers(run),
        command,
        stage=stage,
        gang=gang,
        members=members,
        work=work,
        deadline_s=planned.deadline_s,
        report=_progress,
        meanwhile=readers(run, full_snapshot=False),
        exchange=exchange,
        patience_s=planned.collective_timeout_s,
        number=number,
        span=span,
    )


def worn_out(run: HostRun, number: int) -> str:
    """Why that cell is not begun once more; empty where it is, which is noted."""
    path = run.directory / TRIES
    try:
        known = documents.parse(path.read_bytes(), source=str(path))
    except (OSError, documents.DocumentError):
        known = None
    tries = {str(key): times for key, times in (known if isinstance(known, dict) else {}).items() if type(times) is int}
    if (begun := tries.get(str(number), 0)) >= MOST_TRIES:
        return (
            f"it was begun {begun} times on host {run.host.name}, and each time its supervisor ended without a word: "
            f"see {run.directory / 'logs'} and the kernel's log for what killed it"
        )
    documents.write(path, {**tries, str(number): begun + 1})
    return ""


def _no_gpu(run: HostRun) -> str:
    """Why ranks on GPUs would find none; empty where there are some, of which each rank tells whether its own is there."""
    there = gpu_indices() if run.host.device == "gpu" else [0]
    if there and not isinstance(there, Absent):
        return ""
    reason = there.reason if isinstance(there, Absent) else "it counts 0"
    return (
        f"the plan has {len(run.host.devices)} GPUs on host {run.host.name}, and the driver answers for none ({reason}): "
        "nvidia-smi must list them; in a container, start it with --gpus all"
    )


def left_out(run: HostRun, gang: str, launch: Launch) -> Record:
    """The record with a launch that could not be started."""
    record = run.add(gang, launches=[launch])
    publish(run)
    return record


def not_started(stage: str, members: list[str], number: int, deadline_s: float, reason: str) -> Launch:
    """A launch that had no ranks."""
    return Launch(
        stage=stage,
        outcome="failed",
        reason=reason[:4096],
        members=tuple(members),
        began=now(),
        duration_s=0.0,
        deadline_s=deadline_s,
        ranks=(),
        log_tail="",
        number=number,
    )


def made(launch: Launch, stage: str, members: list[str], number: int) -> bool:
    """Whether this is the launch that is asked for: by its number, however it ended; without one, it finished."""
    if (launch.stage, launch.members) != (stage, tuple(members)):
        return False
    return launch.number == number if number else launch.outcome == "finished"


def readers(run: HostRun, *, full_snapshot: bool = True) -> list[collectors.base.Collector]:
    """The collectors, for the GPUs that are under test."""
    return collectors.build_collectors(
        run.host.devices if run.host.device == "gpu" else None, full_snapshot=full_snapshot
    )


def _progress(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
