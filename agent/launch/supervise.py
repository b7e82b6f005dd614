"""Runs the ranks of one stage under a deadline, and writes a record whatever becomes of them.

torchrun itself can hang (seen for 330 s behind a cut link), and its ranks outlive it: so the whole process tree is found
and ended; and every rank has left what it measured so far in a file of its own. Meanwhile the ranks' heartbeats are watched,
here and, in a gang, with the other supervisors: who stops the others is named and the gang is ended, long before torch gives up.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.exporter.live import Live, Span
from agent.gang.culprit import rank_unable
from agent.gang.flight_recorder import dump_flight_records, flight_recorder_env
from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, LAUNCHED, SUPERVISOR
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.monitor import GangMonitor
from agent.gang.peer_channel import PeerChannel
from agent.gang.processes import process_identity
from agent.launch.process_tree import GRACE_S, ProcessTree
from agent.run.record import HostRun
from agent.run.work_directory import begun, cap_logs, end_of, last_line, results, tail, unable
from agent.sampling.snapshot import now, take
from agent.sampling.snapshot_sampler import Sampler
from agent.sampling.telemetry import Telemetry
from collectors.base import Collector
from schemas.records import Culprit, Launch, Rank, Record
from schemas.stages import CELL, PROBE, SOAK

CULPRIT_GRACE_S = 1.0
"""Between SIGTERM and SIGKILL where somebody was named: torchrun may wait for a lost host where no SIGTERM reaches it."""
LOOK_S = 0.2
FAMILY_S = 0.4
"""Between two looks at which processes there are."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What a launcher made of a stage: a program that starts this host's ranks."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    ranks: Mapping[int, int]
    """rank -> local_rank of the ranks that run on this host."""


def supervise(
    run: HostRun,
    collectors: Sequence[Collector],
    command: Command,
    *,
    stage: str,
    gang: str,
    members: Sequence[str],
    work: Path,
    deadline_s: float,
    report: Callable[[str], None],
    meanwhile: Sequence[Collector] | None = None,
    exchange: PeerChannel | None = None,
    patience_s: float = 60.0,
    number: int = 0,
    span: Span | None = None,
) -> Record:
    """Runs the command and returns the record, to which the outcome, the results and three snapshots were added.

    Of a probe, or a cell of a study, no snapshot is kept, and its launch has what it measured.

    Args:
        run: the host's run.
        collectors: asked before and after.
        meanwhile: asked while the ranks run, which slow readings would disturb; None: the same.
        command: what to run.
        stage, gang, members: which stage this is, and who takes part, in rank order.
        work: directory, empty and private, in which the ranks leave results and logs.
        deadline_s: seconds after which the process tree is killed.
        report: told one line at a time what goes on.
        exchange: how the other supervisors of the gang are heard of; None: there are none.
        patience_s: the process group's time-out.
        number: which launch of the gang, or which round of a soak, this is.
        span: of the soak that it is a round of.
    """
    probes = stage in (PROBE, CELL)
    with contextlib.ExitStack() as ending:  # what was begun, whatever goes wrong; who asked for it may wait 5 s
        if exchange:
            ending.callback(exchange.close)
        before, gpus = take(collectors, stage=stage, phase="before")
        run.add(gang, snapshots=[] if probes else [before], gpus=gpus)
        began, start = now(), time.monotonic()
        telemetry = Telemetry(run.host.devices) if run.host.device == "gpu" else None
        if telemetry:
            ending.callback(telemetry.stop)
        sampler = Sampler(collectors if meanwhile is None else meanwhile, stage)
        ending.callback(sampler.end)
        receiver = HeartbeatReceiver(work, {rank: run.host.scopes[local] for rank, local in command.ranks.items()})
        ending.callback(receiver.close)
        live = Live(
            run, stage=stage, deadline_s=deadline_s, work=work, ranks=command.ranks, states=receiver.states, span=span
        )
        ending.callback(live.end)
        monitor = GangMonitor(run.host.name, receiver, exchange, patience_s)
        try:
            exit_code, culprit = _run(command, monitor, stage, work, deadline_s, report)
            states, killed = monitor.states(), monitor.out_of_memory_reason()
        finally:
            monitor.announce_exit()
        duration = time.monotonic() - start
        during = sampler.stop()
        if telemetry:
            telemetry.stop()
        after, gpus = take(collectors, stage=stage, phase="after")
        ranks = [end_of(work, rank, local, states[rank]) for rank, local in sorted(command.ranks.items())]
        outcome, reason = _outcome(exit_code, deadline_s, ranks, killed)
        observations, windows, software, problems = results(work, command.ranks)
        if culprit:  # the same words on every host
            outcome, reason, problems = "failed", culprit.text, []
        elif outcome == "finished" and len(members) > 1 and (why := unable(work, command.ranks)):
            rank = next(iter(why))
            culprit = rank_unable(run.host.name, states[rank], why[rank], len(why) - 1)
            outcome, reason = "failed", culprit.text
            report(f"stage {stage}: {reason}")
        if culprit and culprit.kind == "rank_ended" and culprit.hosts == (run.host.name,) and not monitor.has_started():
            ranks = []  # it could not start any: no part of it is to blame
        if telemetry:
            observations += telemetry.observations(windows, observations, stage)
        cap_logs(work)
        launch = Launch(
            stage=stage,
            outcome=outcome,
            reason="; ".join([reason, *problems] if reason else problems)[:4096],
            members=tuple(members),
            began=began,
            duration_s=round(duration, 3),
            deadline_s=deadline_s,
            ranks=tuple(ranks),
            log_tail=tail(work / "launcher.log"),
            culprit=culprit,
            number=number,
            observations=tuple(observations) if probes else (),
            timeline=telemetry.trace(begun(work, command.ranks))
            if telemetry and not probes and stage != SOAK
            else None,
        )
        record = run.add(
            gang,
            snapshots=[] if probes else [*during, after],
            gpus=gpus,
            observations=[] if probes else observations,
            launches=[launch],
            software=software,
        )
        live.stop(record)
        return record


def _run(
    command: Command, monitor: GangMonitor, stage: str, work: Path, deadline_s: float, report: Callable[[str], None]
) -> tuple[int | None, Culprit | None]:
    """The launcher's exit code, None where we ended it, and for whom it was ended."""
    ends = time.monotonic() + deadline_s
    with (work / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "agent.launch.guard", "--leash", str(os.getpid()), *command.arguments],
            env={
                **flight_recorder_env(work),
                **command.environment,
                HEARTBEAT_DIRECTORY: str(work),
                SUPERVISOR: process_identity(os.getpid()),
                LAUNCHED: repr(time.monotonic()),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=work,
            start_new_session=True,
        )
        family = ProcessTree(process.pid)
        monitor.pids = family.pids
        look_at, culprit = 0.0, None
        try:
            while process.poll() is None:
                if time.monotonic() > ends:
                    report(f"stage {stage}: deadline of {deadline_s:g} s passed, ending every process of it")
                    return None, None
                if time.monotonic() > look_at:
                    family.look()
                    look_at = time.monotonic() + FAMILY_S
                if culprit := monitor.poll(LOOK_S):
                    return _give_up(culprit, stage, work, sorted(command.ranks), report)
            culprit = monitor.await_verdict(process.returncode, last_line(work / "launcher.log"))
            return process.returncode, culprit
        finally:
            if process.poll() is None and not culprit:
                monitor.announce_abort()
            family.end(CULPRIT_GRACE_S if culprit else None)
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel cannot be waited for
                process.wait(timeout=GRACE_S)


def _give_up(
    culprit: Culprit, stage: str, work: Path, ranks: Sequence[int], report: Callable[[str], None]
) -> tuple[None, Culprit]:
    report(f"stage {stage}: {culprit.text}; ending every process of it")
    if culprit.kind != "rank_ended":  # the others know nothing that its end does not tell
        dump_flight_records(work, ranks)
    return None, culprit


def _outcome(exit_code: int | None, deadline_s: float, ranks: Sequence[Rank], killed: str) -> tuple[str, str]:
    """`killed`: what is known of a process that the kernel killed: the launcher itself, or one that the ranks waited for."""
    more = f"; a process of it was {killed}" if killed else ""
    if exit_code is None:
        silent = ", ".join(f"rank {rank.rank} in {rank.phase or 'start'}" for rank in ranks if rank.exit_code is None)
        return "deadline", f"not finished after {deadline_s:g} s ({silent or 'every rank had ended'}){more}"
    failed = [rank for rank in ranks if rank.exit_code != 0]
    if exit_code or failed:
        who = ", ".join(f"rank {rank.rank} in {rank.phase or 'start'} ({_how(rank.exit_code)})" for rank in failed)
        return "failed", f"the launcher ended with {exit_code}: {who or 'every rank had ended well'}{more}"
    return "finished", ""


def _how(exit_code: int | None) -> str:
    return "no exit of its own" if exit_code is None else f"exit code {exit_code}"
