"""One run at a time on a host: the lease, `lease.json` in the host's state directory.

It names the run and who carries it out, is renewed by everything that the run does here, and is given back at the end. A run
whose control node is gone does not keep the host for ever: docs/resume.md says when another may have it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from agent.sampling.snapshot import now
from schemas import documents
from schemas.errors import HeldError
from schemas.locks import Claim, boot_id, born, claim, claim_from_json, exclusive, read_line, write_line
from schemas.plans import Plan

LEASE, RUNS = "lease.json", "runs"
MODE = 0o600
"""The nonce of the run is in it."""
HELD = HeldError.exit_code
"""Exit code where another run has the host."""
IDLE_S = 900.0
"""For which a lease lasts past the time that the run's longest stage may take: the others may be slower than this host."""
END_S = 30.0
"""Within which a supervisor that is asked to end must have ended its ranks."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who has the host."""

    run_id: str
    nonce: str
    by: Claim
    since: str
    renewed: str
    lasts_s: float
    stage: str = ""
    """What its supervisor carries out on this host, or did last."""
    pid: int = 0
    born: str = ""
    boot_id: str = ""

    def supervisor(self) -> int:
        """The process that measures here for this run; 0 where none does."""
        return self.pid if self.pid and self.boot_id == boot_id() and born(self.pid) == self.born != "" else 0

    def stale(self) -> bool:
        """Whether nothing was heard of the run for longer than its longest stage may take."""
        return not -IDLE_S <= _age(self.renewed) <= self.lasts_s

    def over(self, mine: Claim) -> bool:
        """Whether who asks has the same directory of runs, and knows that this run is not carried out any more."""
        same = (self.by.machine, self.by.runs) == (mine.machine, mine.runs)
        return same and self.by.since < mine.since and self.run_id not in mine.running

    def who(self) -> str:
        """For people."""
        at = f", its stage {self.stage} as process {pid}" if (pid := self.supervisor()) else ""
        return f"run {self.run_id} of {self.by.user} on {self.by.host} since {self.since}{at} (last heard of at {self.renewed})"


def state_of(run_dir: Path) -> Path:
    """The state directory that a run directory of this host lies in."""
    return run_dir.parent.parent if run_dir.parent.name == RUNS else run_dir.parent


def given(text: str | None, run_id: str, run_dir: Path) -> Claim:
    """The claim that the control node gave (JSON), or one of who runs this by hand.

    Raises:
        documents.DocumentError: it is not one.
    """
    if not text:
        return claim(run_id, run_dir.parent, os.getpid(), now())
    document = documents.parse(text, source="--claim")
    documents.validate(document, "lock", source="--claim")
    return claim_from_json(document)


def take(run_dir: Path, plan: Plan, by: Claim, *, take_over: bool = False) -> str:
    """Makes the host this run's.

    Args:
        run_dir: of the run on this host.
        plan: of the run.
        by: who carries it out.
        take_over: also where another run has the host; what measures there for it is ended.

    Returns:
        A line for people where another run had the host; else nothing.

    Raises:
        HeldError: another run has it.
    """
    note = ""
    with exclusive(state_of(run_dir) / LEASE, MODE) as file:
        there = _lease(read_line(file, "lease"))
        mine = there if there and (there.run_id, there.nonce) == (plan.run_id, plan.nonce) else None
        if there and not mine:
            note = _dispossess(there, by, take_over)
        at = now()
        fresh = mine or Lease(run_id=plan.run_id, nonce=plan.nonce, by=by, since=at, renewed=at, lasts_s=0.0)
        _write(file, replace(fresh, by=by, renewed=at, lasts_s=_lasts(plan)))
    return note


def renew(run_dir: Path, plan: Plan, stage: str = "", *, taken: bool = False) -> None:
    """Notes that the run goes on; with `stage`, that this process is the supervisor that carries it out.

    Args:
        taken: only where the run has taken the host and has not given it back since.

    Raises:
        HeldError: another run has the host by now, or with `taken` none.
    """
    with exclusive(state_of(run_dir) / LEASE, MODE) as file:
        there = _lease(read_line(file, "lease"))
        by = given(None, plan.run_id, run_dir)
        if there and (there.run_id, there.nonce) != (plan.run_id, plan.nonce):
            _dispossess(there, by, take_over=False)
            there = None
        if taken and there is None:
            (state_of(run_dir) / LEASE).unlink()  # which opening it made
            raise HeldError(f"run {plan.run_id} was stopped on this host: resume it to go on")
        at = now()
        fresh = there or Lease(run_id=plan.run_id, nonce=plan.nonce, by=by, since=at, renewed=at, lasts_s=0.0)
        if stage:
            fresh = replace(fresh, stage=stage, pid=os.getpid(), born=born(os.getpid()), boot_id=boot_id())
        _write(file, replace(fresh, renewed=at, lasts_s=_lasts(plan)))


def release(state: Path, run_id: str, *, anyones: bool = False, end: bool = False) -> str:
    """Gives the host back where it is this run's, or `anyones`. What measures there keeps it for its run, or is to `end`.

    Returns:
        A line for people where something was ended, or goes on; else nothing.

    Raises:
        HeldError: what measures there does not end.
    """
    if not (state / LEASE).exists():
        return ""
    with exclusive(state / LEASE, MODE) as file:
        there = _lease(read_line(file, "lease"))
        if there and there.run_id != run_id and not anyones:
            return ""
        pid = there.supervisor() if there else 0
        at_work = there if pid not in (0, os.getpid()) else None
        if at_work and not end:
            return f"stage {at_work.stage} of run {at_work.run_id} goes on (process {pid}): playbooks/stop.yml ends it"
        if at_work:
            _end(at_work)
        (state / LEASE).unlink()
    return f"ended stage {at_work.stage} of run {at_work.run_id} (process {pid})" if at_work else ""


def another(state: Path, run_id: str, by: Claim | None = None) -> Lease | None:
    """The lease of another run that has the host now; None where this run may use it."""
    if not (state / LEASE).exists():
        return None
    with exclusive(state / LEASE, MODE) as file:
        there = _lease(read_line(file, "lease"))
    if there is None or there.run_id == run_id:
        return None
    free = not there.supervisor() and (there.stale() or (by is not None and there.over(by)))
    return None if free else there


def _dispossess(there: Lease, by: Claim, take_over: bool) -> str:
    """Why the host may be taken from the run that has it. Raises HeldError where it may not."""
    pid = there.supervisor()
    if not pid and there.over(by):
        return f"taken over from {there.who()}, which is not carried out any more"
    if not pid and there.stale():
        return f"taken over from {there.who()}, of which nothing was heard for more than {there.lasts_s:g} s"
    if not take_over:
        raise HeldError(
            f"this host is held by {there.who()}: wait for its end, or resume it; "
            "rackproof_take_over (-e rackproof_take_over=true) ends what it does here"
        )
    if pid:
        _end(there)
    return f"taken over by force from {there.who()}"


def _end(there: Lease) -> None:
    """Ends the supervisor, which ends its ranks. Killed, it takes them with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pid := there.supervisor():
            os.kill(pid, number)
        ends = time.monotonic() + END_S
        while there.supervisor() and time.monotonic() < ends:
            time.sleep(0.05)
    if there.supervisor():
        raise HeldError(
            f"this host is held by {there.who()}, which no signal ends: it waits in the kernel; reboot the host"
        )


def _lasts(plan: Plan) -> float:
    return max((stage.deadline_s for stage in plan.stages), default=0.0) + IDLE_S


def _lease(document: Mapping[str, Any] | None) -> Lease | None:
    return Lease(**{**document, "by": claim_from_json(document["by"])}) if document else None


def _write(file: int, lease: Lease) -> None:
    by = {**vars(lease.by), "running": list(lease.by.running)}
    write_line(file, {**vars(lease), "by": by})


def _age(at: str) -> float:
    """Seconds since a time of this host's clock."""
    form = "%Y-%m-%dT%H:%M:%S.%fZ" if "." in at else "%Y-%m-%dT%H:%M:%SZ"
    return time.time() - datetime.strptime(at, form).replace(tzinfo=timezone.utc).timestamp()
