"""The state of a run at one moment, as the screen, the log lines and the JSON show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fleet.watch.progress import FAILED, NONE, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from fleet.watch.text import percent
from schemas.reports import mark

SCHEMA = "rackproof.watch/2"


@dataclass(frozen=True, kw_only=True)
class StageCell:
    """The state of a host in a stage."""

    state: str
    progress: float | None = None
    """Share of the expected time that has passed, or of the expected observations that were made; None: unknown."""
    since: float | None = None
    """When the host entered that state, in seconds since 1970; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """One host of the table."""

    name: str
    rack: str
    cells: Mapping[str, StageCell]
    last_seen: float | None
    """When the host last answered."""
    remaining_s: float | None
    """Seconds until the deadline of its running stage; None: no stage runs, or unknown."""
    expected_s: float | None
    """Seconds until its running stage is expected to end, at least 0; None: no stage runs, or unknown."""
    benchmark: str
    """The benchmark that is running."""
    trouble: str
    """Why the host failed or left the run, or why it needs attention."""
    failed: tuple[str, ...]
    """The causes of its failures in the records fetched so far, one line each."""
    decision: str
    """Decision about the host in the report; empty: no report was read."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The run at the moment `at`."""

    at: float
    run_id: str
    profile: str
    rehearsal: bool
    racks: tuple[str, ...]
    began: float
    """When the plan was made, in seconds since 1970, like every time in this class."""
    is_running: bool | None
    """Whether a playbook is running; None: this cannot be determined on this machine."""
    by: str
    """User, host and process of the playbook that is running, or that was interrupted."""
    since: float | None
    """When that playbook started."""
    attempts: int
    playbook: str
    play: str
    task: str
    task_since: float | None
    waiting_for: str
    """The stage that the task waits for; empty: none."""
    pending: tuple[str, ...]
    """Hosts on which the task is still running."""
    answered: int
    """Number of hosts on which the task has ended, with or without a failure."""
    stages: tuple[str, ...]
    deadlines: Mapping[str, float]
    """Stage -> its deadline in seconds after its start."""
    hosts: tuple[HostStatus, ...]
    expected_s: float | None
    """Seconds until the last stage is expected to end, without installation and report; None: unknown, or nothing runs."""
    decision: str
    """Decision about the run, from the report or the journal; empty: not reported, or a playbook is running."""
    status: str
    """Status of the acceptance in the report; empty: no report was read."""
    ended: float | None
    """When the run was reported; None: not yet."""
    summary: tuple[str, ...]
    """Summary of the report, one line each; empty like `status`."""
    records: int
    """Number of records that have been fetched and are valid."""
    records_expected: int
    judged: float | None
    """When the records were last judged; None: not yet."""
    notes: tuple[str, ...]
    """What failed, is unknown or was rejected, and why; one line each."""
    simulated: bool = False
    schema: str = SCHEMA

    @property
    def mark(self) -> str:
        """Return `SIMULATED` or `REHEARSAL`; empty for a run on GPUs."""
        return mark(simulated=self.simulated, rehearsal=self.rehearsal)

    @property
    def is_over(self) -> bool:
        """Return whether it is certain that no playbook is running."""
        return self.is_running is False

    def json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def state_text(cell: StageCell) -> str:
    """Return the progress of a running stage as `43 %`, otherwise the state, or `-` if there is none."""
    if cell.state == NONE:
        return "-"
    return percent(cell.progress) if cell.state == RUNNING and cell.progress is not None else cell.state


def expected_s(hosts: Sequence[HostStatus], stages_s: Mapping[str, float]) -> float | None:
    """Return the seconds until all stages are expected to have ended.

    None if no stage is running or waiting, or if a running stage does not report when it ends.

    Args:
        hosts: all hosts of the run. Hosts that left the run do not count.
        stages_s: stage -> its expected seconds, in order; empty if they are unknown.
    """
    current = [host for host in hosts if any(host.cells[stage].state == RUNNING for stage in stages_s)]
    waiting = [
        seconds for stage, seconds in stages_s.items() if any(host.cells[stage].state == WAITING for host in hosts)
    ]
    running_s = [host.expected_s for host in current]
    if not (running_s or waiting) or any(seconds is None for seconds in running_s):
        return None
    return max((seconds for seconds in running_s if seconds is not None), default=0.0) + sum(waiting)


def attention_rank(host: HostStatus) -> int:
    """Return a rank from 0 to 5. The lower it is, the more urgently the host needs attention."""
    states = {cell.state for cell in host.cells.values()}
    if states & {FAILED, UNREACHABLE} or host.trouble or host.decision == "rejected":
        return 0
    if host.failed or host.decision == "incomplete":
        return 1
    if UNKNOWN in states:
        return 2
    if RUNNING in states:
        return 3
    return 4 if WAITING in states else 5
