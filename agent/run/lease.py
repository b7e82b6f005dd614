"""Allow only one run of a playbook at a time on a host, with a lease: the file `lease.json` in the host's state directory.

The lease names the run and its operator. It is renewed when the run, a stage or a soak round starts on this host, and
released when the run ends. If nothing renews it, for example because the control node is lost, it expires. docs/resume.md says
when another run may take the host.

`rackproof run` uses a separate state directory for each run. So its lease does not keep other runs off the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from schemas import documents
from schemas.errors import HeldError
from schemas.locks import (
    Claim,
    boot_id,
    claim,
    claim_from_json,
    claim_to_json,
    exclusive,
    process_start_time,
    read_line,
    write_line,
)
from schemas.plans import Plan
from schemas.times import utc_now

STATE = Path("/var/lib/rackproof")
"""Default state directory of a host."""
LEASE, RUNS = "lease.json", "runs"
MODE = 0o600
"""File mode of the lease: only its owner may read it, because it contains the nonce, a secret of the run."""
HELD = HeldError.exit_code
"""Exit code if another run holds the host."""
IDLE_S = 900.0
"""A lease is valid for the longest deadline of the run's stages plus this time, because this host may wait for slower hosts."""
END_S = 30.0
"""Time for a supervisor to end its ranks after SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The run that holds the host."""

    run_id: str
    nonce: str
    by: Claim
    """The run's claim: its operator and control node, and the other runs that were running when the claim was made."""
    since: str
    """When this run acquired the host."""
    renewed: str
    lasts_s: float
    """Seconds after `renewed` for which the lease is valid."""
    stage: str = ""
    """Stage that the run's supervisor on this host is running, or the last one that it ran."""
    pid: int = 0
    start_time: str = ""
    boot_id: str = ""
    """The supervisor of `stage`: its process id and start time, and the ID of the boot during which it started."""

    def supervisor(self) -> int:
        """Return the process id of this run's supervisor on this host; 0 if none is running."""
        is_same_boot = bool(self.pid) and self.boot_id == boot_id()
        return self.pid if is_same_boot and process_start_time(self.pid) == self.start_time != "" else 0

    def is_stale(self) -> bool:
        """Return whether the last renewal is more than `lasts_s` ago, or more than IDLE_S in the future (a clock was changed)."""
        return not -IDLE_S <= _age_s(self.renewed) <= self.lasts_s

    def is_superseded(self, claim: Claim) -> bool:
        """Return whether `claim`, which another run has made, shows that the run of this lease is no longer running.

        This is so if `claim` is newer than the claim of this lease, and does not list the run of this lease as running.

        Return False if the two claims are from different machines or different directories of runs: a claim lists only runs in
        its own directory. Also return False if the process of the lease's claim is running, or if that is unknown although the
        process of `claim` is visible here: a claim that was made without a control node lists no runs.
        """
        same_directory = self.by.is_on(claim.machine, claim.host, claim.boot_id) and self.by.runs == claim.runs
        is_newer = self.by.since < claim.since and self.run_id not in claim.running
        is_running = self.by.is_running()
        may_have_ended = is_running is False or (is_running is None and claim.is_running() is None)
        return same_directory and is_newer and may_have_ended

    def describe(self) -> str:
        """Return the run that holds the host, its operator and its running stage, in words."""
        stage = f", running stage {self.stage} as process {pid}" if (pid := self.supervisor()) else ""
        return f"run {self.run_id} of {self.by.user} on {self.by.host} since {self.since}{stage} (last renewed at {self.renewed})"


def state_directory(run_dir: Path) -> Path:
    """Return the state directory that contains `run_dir`, a run directory on this host."""
    return run_dir.parent.parent if run_dir.parent.name == RUNS else run_dir.parent


def load_claim(text: str | None, run_id: str, run_dir: Path) -> Claim:
    """Return the claim in `text` (JSON), which the control node or `rackproof run-host` made.

    Without text, make a claim for this process and its user.

    Raises:
        documents.DocumentError: the text is not a claim.
    """
    if not text:
        return claim(run_id, run_dir.parent, os.getpid(), utc_now())
    document = documents.parse(text, source="--claim")
    documents.validate(document, "lock", source="--claim")
    return claim_from_json(document)


def acquire(run_dir: Path, plan: Plan, by: Claim, *, take_over: bool = False) -> str:
    """Acquire the host for this run.

    Args:
        run_dir: run directory on this host.
        plan: the run's plan.
        by: the claim of the run's operator.
        take_over: acquire the host even if another run holds it, and end the supervisor of that run.

    Returns:
        A message for the operator if the host was taken from another run; else an empty string.

    Raises:
        HeldError: another run holds the host. Either the host must not be taken from that run, or the supervisor of that run
            does not end.
    """
    note = ""
    with exclusive(state_directory(run_dir) / LEASE, MODE) as file:
        lease = _parse(read_line(file, "lease"))
        if lease and not _belongs_to(lease, plan):
            note, lease = _preempt(lease, by, take_over), None
        now = utc_now()
        lease = lease or _new_lease(plan, by, now)
        _write(file, replace(lease, by=by, renewed=now, lasts_s=_lease_duration_s(plan)))
    return note


def renew(run_dir: Path, plan: Plan, stage: str = "", *, only_if_held: bool = False) -> None:
    """Renew the lease of this run, or acquire the host if no other run holds it.

    With `stage`, record this process as the supervisor of that stage.

    Args:
        run_dir: run directory on this host.
        plan: the run's plan.
        stage: stage that this process supervises; empty: none.
        only_if_held: only renew a lease that this run holds; do not acquire the host.

    Raises:
        HeldError: another run holds the host, or with `only_if_held` this run does not hold it.
    """
    with exclusive(state_directory(run_dir) / LEASE, MODE) as file:
        lease = _parse(read_line(file, "lease"))
        by = load_claim(None, plan.run_id, run_dir)
        is_other = lease is not None and not _belongs_to(lease, plan)
        if lease and is_other:
            _preempt(lease, by, take_over=False)
        if only_if_held and (lease is None or is_other):
            if lease is None:
                (state_directory(run_dir) / LEASE).unlink()  # `exclusive` has created the file
            raise HeldError(f"run {plan.run_id} was stopped on this host: resume it to continue")
        at = utc_now()
        lease = _new_lease(plan, by, at) if lease is None or is_other else lease
        if stage:
            lease = replace(
                lease, stage=stage, pid=os.getpid(), start_time=process_start_time(os.getpid()), boot_id=boot_id()
            )
        _write(file, replace(lease, renewed=at, lasts_s=_lease_duration_s(plan)))


def release(state: Path, run_id: str, nonce: str = "", *, any_run: bool = False, end: bool = False) -> str:
    """Release the host if this run holds it, or with `any_run` if any run holds it.

    Without `end`, the host is not released while the holder's supervisor is running, except if that is this process.

    Args:
        state: state directory of this host.
        run_id: id of this run.
        nonce: nonce of this run, which distinguishes runs of the same id by different operators; empty: compare only the id.
        any_run: release the host whichever run holds it.
        end: end that supervisor first.

    Returns:
        A message for the operator if that supervisor was ended or is still running; else an empty string.

    Raises:
        HeldError: that supervisor does not end, even after SIGKILL.
    """
    if not (state / LEASE).exists():
        return ""
    with exclusive(state / LEASE, MODE) as file:
        lease = _parse(read_line(file, "lease"))
        if lease and not any_run and not _is_of(lease, run_id, nonce):
            return ""
        pid = lease.supervisor() if lease else 0
        running = lease if pid not in (0, os.getpid()) else None
        if running and not end:
            return f"stage {running.stage} of run {running.run_id} is still running (process {pid}): playbooks/stop.yml ends it"
        if running:
            _end_supervisor(running)
        (state / LEASE).unlink()
    return f"ended stage {running.stage} of run {running.run_id} (process {pid})" if running else ""


def held_by_other(state: Path, run_id: str, nonce: str = "", by: Claim | None = None) -> Lease | None:
    """Return the lease of another run that holds the host now; None if this run may use the host.

    Args:
        state: state directory of this host.
        run_id: id of this run.
        nonce: nonce of this run, which distinguishes runs of the same id by different operators; empty: compare only the id.
        by: claim of this run; None: unknown.
    """
    if not (state / LEASE).exists():
        return None
    with exclusive(state / LEASE, MODE) as file:
        lease = _parse(read_line(file, "lease"))
    if lease is None or _is_of(lease, run_id, nonce):
        return None
    is_free = not lease.supervisor() and (lease.is_stale() or (by is not None and lease.is_superseded(by)))
    return None if is_free else lease


def _is_of(lease: Lease, run_id: str, nonce: str) -> bool:
    return lease.run_id == run_id and nonce in ("", lease.nonce)


def _belongs_to(lease: Lease, plan: Plan) -> bool:
    return _is_of(lease, plan.run_id, plan.nonce)


def _new_lease(plan: Plan, by: Claim, at: str) -> Lease:
    return Lease(run_id=plan.run_id, nonce=plan.nonce, by=by, since=at, renewed=at, lasts_s=0.0)


def _preempt(lease: Lease, by: Claim, take_over: bool) -> str:
    """Return a message that says why the host may be taken from the run in `lease`; raise HeldError if this is not allowed.

    With `take_over`, end the supervisor of that run if it is running.
    """
    pid = lease.supervisor()
    if not pid and lease.is_superseded(by):
        return f"taken over from {lease.describe()}: that run is no longer running"
    if not pid and lease.is_stale():
        if _age_s(lease.renewed) < 0:
            return f"taken over from {lease.describe()}: that last renewal is in the future, so a clock was changed"
        return f"taken over from {lease.describe()}: that run did not renew its lease for more than {lease.lasts_s:g} s"
    if not take_over:
        raise HeldError(
            f"this host is held by {lease.describe()}: wait until that run ends, or resume it; "
            "rackproof_take_over (-e rackproof_take_over=true) ends that run on this host"
        )
    if pid:
        _end_supervisor(lease)
    return f"taken over by force from {lease.describe()}"


def _end_supervisor(lease: Lease) -> None:
    """End the supervisor, which ends its ranks. If it has to be killed, its ranks are killed with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pid := lease.supervisor():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)
        deadline = time.monotonic() + END_S
        while lease.supervisor() and time.monotonic() < deadline:
            time.sleep(0.05)
    if lease.supervisor():
        raise HeldError(
            f"this host is held by {lease.describe()}: that process hangs in the kernel and no signal ends it; reboot the host"
        )


def _lease_duration_s(plan: Plan) -> float:
    return max((stage.deadline_s for stage in plan.stages), default=0.0) + IDLE_S


def _parse(document: Mapping[str, Any] | None) -> Lease | None:
    return Lease(**{**document, "by": claim_from_json(document["by"])}) if document else None


def _write(file: int, lease: Lease) -> None:
    write_line(file, {**vars(lease), "by": claim_to_json(lease.by)})


def _age_s(timestamp: str) -> float:
    """Return the seconds from `timestamp`, a UTC time of this host's clock, until now."""
    form = "%Y-%m-%dT%H:%M:%S.%fZ" if "." in timestamp else "%Y-%m-%dT%H:%M:%SZ"
    return time.time() - datetime.strptime(timestamp, form).replace(tzinfo=timezone.utc).timestamp()
