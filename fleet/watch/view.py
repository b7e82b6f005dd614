"""The state of a run at one moment, as the screen, the log lines and the JSON show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fleet.watch.progress import FAILED, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from schemas.reports import mark

SCHEMA = "rackproof.watch/2"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The state of a host in a stage."""

    state: str
    progress: float | None = None
    """Share of the expected observations; None: unknown."""
    since: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostView:
    """One host of the table."""

    name: str
    rack: str
    cells: Mapping[str, Cell]
    last_seen: float | None
    """When the host last answered."""
    remaining_s: float | None
    """Seconds until the deadline of its running stage; None: no stage runs, or unknown."""
    benchmark: str
    """The benchmark that is running."""
    trouble: str
    """Why it failed or left the run, or why it needs attention."""
    failed: tuple[str, ...]
    """Failed criteria, one line each."""
    decision: str


@dataclass(frozen=True, kw_only=True)
class View:
    """The run at the moment `at`."""

    at: float
    run_id: str
    profile: str
    rehearsal: bool
    racks: tuple[str, ...]
    began: float
    """When the plan was made."""
    is_running: bool | None
    """Whether a playbook is running the run; None: unknown from here."""
    by: str
    """The operator who runs it, or ran it when it was interrupted."""
    since: float | None
    attempts: int
    playbook: str
    play: str
    task: str
    task_since: float | None
    waiting_for: str
    pending: tuple[str, ...]
    """Hosts on which the task is still running."""
    answered: int
    stages: tuple[str, ...]
    deadlines: Mapping[str, float]
    hosts: tuple[HostView, ...]
    decision: str
    status: str
    ended: float | None
    summary: tuple[str, ...]
    records: int
    records_expected: int
    judged: float | None
    """When the records were last judged; None: not yet."""
    notes: tuple[str, ...]
    """What is unknown, and why."""
    simulated: bool = False
    schema: str = SCHEMA

    @property
    def mark(self) -> str:
        """Return `SIMULATED` or `REHEARSAL`; empty for a run on GPUs."""
        return mark(simulated=self.simulated, rehearsal=self.rehearsal)

    @property
    def over(self) -> bool:
        """Return whether no playbook runs it."""
        return self.is_running is False

    def json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def attention(host: HostView) -> int:
    """Return how urgently a host needs attention: 0 first."""
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
