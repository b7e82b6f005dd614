"""Supervise the ranks of one launch under a deadline, and return its outcome, no matter how the ranks end.

torchrun itself can hang (observed for 330 s after a link was cut), and its ranks can outlive it. So the supervisor tracks and
ends the whole process tree, and each rank writes its results so far to a file of its own. The supervisor also monitors the
heartbeats of the ranks. In a gang (the hosts of one multi-node launch) it exchanges statuses with the other supervisors. If a
host or a rank blocks the gang, the supervisors identify it and end the gang, long before torch's own time-out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agent.gang.flight_recorder import dump_flight_records, flight_recorder_env
from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, LAUNCHED, SUPERVISOR
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.monitor import GangMonitor
from agent.gang.peer_channel import PeerChannel
from agent.gang.processes import process_identity
from agent.gang.rank_state import RankState
from agent.launch.other_processes import OtherProcessWatch
from agent.launch.outcome import LaunchOutcome, RanksEnd, conclude
from agent.launch.process_tree import GRACE_S, ProcessTree
from agent.run import work_directory
from agent.sampling.snapshot import take_snapshot
from agent.sampling.snapshot_sampler import SnapshotSampler
from agent.sampling.telemetry import Telemetry
from collectors.base import Collector
from schemas.plans import PlannedHost
from schemas.records import RAISED, Culprit, Gpu, Launch, Snapshot
from schemas.stages import CELL, PROBE, SOAK
from schemas.times import utc_now

CULPRIT_GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL if a culprit is known. torchrun may wait for a lost host and never handle SIGTERM."""
POLL_S = 0.2
PROCESS_SCAN_S = 0.4
"""Time between two scans of the process table."""

StatesReader = Callable[[], Sequence[RankState]]
"""Returns the current state of each rank."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that starts the ranks of this host."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    ranks: Mapping[int, int]
    """rank -> local_rank of the ranks on this host."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One launch of a stage on this host."""

    stage: str
    host: PlannedHost
    members: tuple[str, ...]
    """Hosts that start together, in rank order."""
    command: Command
    work: Path
    """Private directory for the ranks' request file (`--request`), results and logs."""
    deadline_s: float
    """Time after which all processes of the launch are ended."""
    collective_timeout_s: float = 60.0
    """Time-out of the process group."""
    number: int = 0
    """Number of the gang launch, the soak round, or the cell (one measurement) of a scaling study; 0: none."""
    collectors: Sequence[Collector] = ()
    """Read before and after the launch."""
    fast_collectors: Sequence[Collector] = ()
    """Read while the ranks run. They leave out slow readings, which would disturb the ranks."""

    @property
    def has_separate_results(self) -> bool:
        """Whether the observations are stored in the launch itself, and no snapshots are kept.

        This applies to a probe (a short test launch) and to a cell of a scaling study.
        """
        return self.stage in (PROBE, CELL)


def supervise(
    spec: LaunchSpec,
    *,
    record_start: Callable[[Sequence[Snapshot], Sequence[Gpu]], object],
    report: Callable[[str], None],
    channel: PeerChannel | None = None,
    live: Callable[[StatesReader], contextlib.AbstractContextManager[object]] | None = None,
) -> LaunchOutcome:
    """Run the launch and return its outcome.

    Args:
        spec: the launch.
        record_start: called before the ranks start, with the snapshot (none if `has_separate_results`) and the GPUs, so that
            these are recorded even if the supervisor is killed.
        report: called with each line of progress.
        channel: connects the supervisors of the gang, and is closed at the end; None for a launch on one host.
        live: takes a function that returns the states of the ranks; returns a context manager that publishes them.
    """
    with contextlib.ExitStack() as cleanup:
        if channel:
            cleanup.callback(channel.close)
        before, gpus = take_snapshot(spec.collectors, stage=spec.stage, phase="before")
        record_start(() if spec.has_separate_results else (before,), gpus)
        began, start = utc_now(), time.monotonic()
        scopes = {rank: spec.host.scopes[local_rank] for rank, local_rank in spec.command.ranks.items()}
        receiver = cleanup.enter_context(contextlib.closing(HeartbeatReceiver(spec.work, scopes)))
        if live:
            cleanup.enter_context(live(receiver.states))
        with _telemetry(spec) as telemetry, SnapshotSampler(spec.fast_collectors, spec.stage) as sampler:
            end = _monitor_ranks(spec, receiver, channel, report)
            duration_s = time.monotonic() - start
        after, gpus = take_snapshot(spec.collectors, stage=spec.stage, phase="after")
        outcome = _collect_results(spec, end, telemetry, report, began=began, duration_s=duration_s)
        snapshots = () if spec.has_separate_results else (*sampler.selected(), after)
        return replace(outcome, snapshots=snapshots, gpus=gpus)


def _telemetry(spec: LaunchSpec) -> contextlib.AbstractContextManager[Telemetry | None]:
    if spec.host.device != "gpu":
        return contextlib.nullcontext()
    return Telemetry(
        spec.host.devices,
        spec.work,
        lambda since: work_directory.benchmarks_since(spec.work, spec.command.ranks, since),
    )


def _collect_results(
    spec: LaunchSpec,
    end: RanksEnd,
    telemetry: Telemetry | None,
    report: Callable[[str], None],
    *,
    began: str,
    duration_s: float,
) -> LaunchOutcome:
    """Return the outcome of the launch, with the results that its ranks wrote to the work directory."""
    local_ranks = spec.command.ranks
    ranks = [
        work_directory.read_rank_end(spec.work, rank, local_rank, end.states[rank])
        for rank, local_rank in sorted(local_ranks.items())
    ]
    results = work_directory.read_results(spec.work, local_ranks)
    conclusion = conclude(
        end,
        host=spec.host.name,
        ranks=ranks,
        excluded=work_directory.read_excluded_ranks(spec.work, local_ranks) if len(spec.members) > 1 else {},
        software_unfit=work_directory.read_software_unfit_ranks(spec.work, local_ranks),
        problems=results.problems,
        deadline_s=spec.deadline_s,
    )
    culprit = conclusion.culprit
    if culprit and culprit is not end.culprit:
        report(f"stage {spec.stage}: {culprit.text}")
    if (
        culprit
        and culprit.kind in ("rank_ended", RAISED)
        and spec.host.name in culprit.hosts
        and not end.any_rank_started
    ):
        ranks = []  # the launcher failed before any rank started, so no device is at fault
    observations, timeline = results.observations, None
    if telemetry:
        observations = (*observations, *telemetry.observations(results.windows, observations, spec.stage))
        if not spec.has_separate_results and spec.stage != SOAK:
            timeline = telemetry.trace(work_directory.benchmark_start_times(spec.work, local_ranks))
    work_directory.truncate_logs(spec.work)
    return LaunchOutcome(
        launch=Launch(
            stage=spec.stage,
            outcome=conclusion.outcome,
            reason=conclusion.reason,
            members=spec.members,
            began=began,
            duration_s=round(duration_s, 3),
            deadline_s=spec.deadline_s,
            ranks=tuple(ranks),
            log_tail=work_directory.read_tail(spec.work / work_directory.LAUNCHER_LOG),
            culprit=culprit,
            number=spec.number,
            observations=observations if spec.has_separate_results else (),
            timeline=timeline,
            other_processes=end.other_processes,
        ),
        observations=() if spec.has_separate_results else observations,
        software=results.software,
    )


def _monitor_ranks(
    spec: LaunchSpec, receiver: HeartbeatReceiver, channel: PeerChannel | None, report: Callable[[str], None]
) -> RanksEnd:
    """Run the command and monitor the gang; announce the end to the other hosts."""
    monitor = GangMonitor(spec.host.name, receiver, channel, spec.collective_timeout_s)
    devices = spec.host.devices if spec.host.device == "gpu" else ()
    try:
        with OtherProcessWatch(devices) as watch:
            exit_code, culprit = _run(spec, monitor, report)
        return RanksEnd(
            exit_code=exit_code,
            culprit=culprit,
            states=monitor.states(),
            oom_kill=monitor.out_of_memory_reason(),
            thread_limit=monitor.thread_limit_reason(),
            any_rank_started=monitor.has_started(),
            last_line=work_directory.last_error_line(spec.work / work_directory.LAUNCHER_LOG),
            other_processes=watch.others(),
        )
    finally:
        monitor.announce_exit()


def _run(spec: LaunchSpec, monitor: GangMonitor, report: Callable[[str], None]) -> tuple[int | None, Culprit | None]:
    """Return the launcher's exit code (None if the supervisor ended it) and the culprit (None if there is none)."""
    end = time.monotonic() + spec.deadline_s
    log_path = spec.work / work_directory.LAUNCHER_LOG
    process = _start(spec, log_path)
    tree = ProcessTree(process.pid)
    monitor.pids = tree.pids
    monitor.read_output = lambda rank: "".join(
        work_directory.read_tail(path) for path in (log_path, spec.work / f"rank{rank}.log")
    )
    next_scan, culprit = 0.0, None
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                report(
                    f"stage {spec.stage}: not finished after {spec.deadline_s:g} s; ending all processes of the launch"
                )
                return None, None
            if time.monotonic() > next_scan:
                tree.scan()
                next_scan = time.monotonic() + PROCESS_SCAN_S
            if culprit := monitor.poll(POLL_S):
                report(f"stage {spec.stage}: {culprit.text}; ending all processes of the launch")
                # If a rank ended, the cause is known, and dumps of the other ranks add nothing.
                if culprit.kind not in ("rank_ended", RAISED):
                    dump_flight_records(spec.work, sorted(spec.command.ranks))
                return None, culprit
        culprit = monitor.await_verdict(process.returncode, work_directory.last_error_line(log_path))
        return process.returncode, culprit
    finally:
        if process.poll() is None and not culprit:
            monitor.announce_abort()
        tree.end(CULPRIT_GRACE_S if culprit else None)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process may hang in the kernel
            process.wait(timeout=GRACE_S)


def _start(spec: LaunchSpec, log_path: Path) -> subprocess.Popen[bytes]:
    """Start the launcher through the guard, so that the kernel kills it when this process ends."""
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "agent.launch.guard", "--supervisor", str(os.getpid()), *spec.command.arguments],
            env={
                **flight_recorder_env(spec.work),
                **spec.command.environment,
                HEARTBEAT_DIRECTORY: str(spec.work),
                SUPERVISOR: process_identity(os.getpid()),
                LAUNCHED: repr(time.monotonic()),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=spec.work,
            start_new_session=True,
        )
