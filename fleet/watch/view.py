"""Everything that is known of a run at one moment: what the screen, the lines and the JSON show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fleet.watch.progress import FAILED, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from schemas.reports import mark

SCHEMA = "rackproof.watch/1"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A host in a stage."""

    state: str
    progress: float | None = None
    """Share of what is to be observed; None: unknown."""
    since: float | None = None


@dataclass(frozen=True, kw_only=True)
class HostView:
    """A line of the table."""

    name: str
    rack: str
    cells: Mapping[str, Cell]
    heard: float | None
    """When something last came from it."""
    left_s: float | None
    """Until the deadline of the stage that runs on it, at most; None: none does, or it is unknown."""
    doing: str
    """The benchmark it is at."""
    trouble: str
    """Why it failed, left, or is looked at first."""
    failed: tuple[str, ...]
    """Criteria that it fails, a line each."""
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
    carried: bool | None
    """Whether a playbook carries it out now; None: it cannot be told from here."""
    by: str
    """Who does, or did when it was cut off."""
    since: float | None
    attempts: int
    playbook: str
    play: str
    task: str
    task_since: float | None
    waiting_for: str
    pending: tuple[str, ...]
    """The hosts that the task is still at."""
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
    """What could not be told, and why."""
    simulated: bool = False
    schema: str = SCHEMA

    @property
    def mark(self) -> str:
        """`SIMULATED` or `REHEARSAL`; empty where hardware is looked at."""
        return mark(simulated=self.simulated, rehearsal=self.rehearsal)

    @property
    def over(self) -> bool:
        """Whether nobody carries it out."""
        return self.carried is False

    def json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def attention(host: HostView) -> int:
    """How soon somebody should look at a host: 0 first."""
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
