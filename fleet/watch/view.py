"""The state of a run at one moment, which the screen, the log lines and the JSON output show."""

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
    """The state of one stage on one host."""

    state: str
    progress: float | None = None
    """Share of the expected duration that has passed, from 0 to 1. If no duration is known, the share of the expected
    observations that have been made. None: unknown."""
    since: float | None = None
    """When the stage entered this state, in seconds since 1970; None: unknown."""


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """The state of one host, which is a row of the table."""

    name: str
    rack: str
    cells: Mapping[str, StageCell]
    """Stage -> its state on this host."""
    last_seen: float | None
    """When a task last finished or failed on the host, or when its exporter last reported a running stage; in seconds since 1970.
    None: never."""
    remaining_s: float | None
    """Seconds until the deadline of the running stage, negative after it; None: no stage is running, or no deadline is known."""
    expected_s: float | None
    """Seconds until the expected end of the running stage, at least 0; None: no stage is running, or its end is unknown."""
    benchmark: str
    """The benchmark that is running; empty: none, or unknown."""
    trouble: str
    """What is wrong with the host: a task failed on it or could not reach it, or its supervisor (the agent process that runs the
    launch) is silent. Empty: none of these."""
    failed: tuple[str, ...]
    """Why criteria failed for the host, judged from the records fetched so far; one line for each cause."""
    decision: str
    """Decision about the host in report.json; empty: no report was read."""


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of a run at one moment. All times are in seconds since 1970."""

    at: float
    """The moment."""
    run_id: str
    profile: str
    rehearsal: bool
    racks: tuple[str, ...]
    began: float
    """When the plan was made."""
    is_running: bool | None
    """Whether a playbook is running; None: this cannot be determined on this machine."""
    by: str
    """User, host and process of the playbook that holds the lock of the run: it is running or was interrupted. Empty: no lock."""
    since: float | None
    """When that playbook started."""
    attempts: int
    """Number of times that ansible-playbook was started for this run."""
    playbook: str
    play: str
    task: str
    task_since: float | None
    waiting_for: str
    """The stage that the task waits for; empty: none."""
    pending: tuple[str, ...]
    """Hosts on which the task is still running."""
    answered: int
    """Number of hosts on which the task finished or failed, or which were unreachable. Hosts that skipped it do not count."""
    stages: tuple[str, ...]
    deadlines: Mapping[str, float]
    """Stage -> its maximum duration in seconds."""
    hosts: tuple[HostStatus, ...]
    expected_s: float | None
    """Seconds until the last stage is expected to end. The time for installation is not included. None: unknown, all stages have
    ended, or no playbook is running."""
    decision: str
    """Decision about the run, such as `accepted`, from report.json or journal.jsonl; for a scaling study, its result in words.
    Empty: there is none yet, or a playbook is or may be running."""
    status: str
    """The decision with its caveats, as at the top of the report, such as PASS WITH WAIVERS; empty: no report was read."""
    ended: float | None
    """When the report of the run was written; None: not yet."""
    summary: tuple[str, ...]
    """The lines of the summary at the top of the report; empty: no report was read."""
    records: int
    """Number of valid records that have been fetched."""
    records_expected: int
    """Number of records that the plan expects."""
    judged: float | None
    """When the records were last judged; None: not yet."""
    notes: tuple[str, ...]
    """Problems of the run and of `rackproof watch` itself, one line for each, such as a file that cannot be read."""
    simulated: bool = False
    schema: str = SCHEMA

    @property
    def mark(self) -> str:
        """Return the word for a simulated run or a rehearsal; empty for a run on GPUs."""
        return mark(simulated=self.simulated, rehearsal=self.rehearsal)

    @property
    def is_over(self) -> bool:
        """Return whether it is certain that no playbook is running."""
        return self.is_running is False

    def json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def state_text(cell: StageCell) -> str:
    """Return the progress of a running stage such as `43 %`; without progress, the state; `-` if the stage is not planned."""
    if cell.state == NONE:
        return "-"
    return percent(cell.progress) if cell.state == RUNNING and cell.progress is not None else cell.state


def expected_s(hosts: Sequence[HostStatus], stages_s: Mapping[str, float]) -> float | None:
    """Return the seconds until all stages are expected to have ended.

    This is the longest time that a running stage still needs, plus the expected durations of the stages for which a host is
    waiting. None if no stage is running or waiting, or if the expected end of a running stage is unknown on any host.

    Args:
        hosts: all hosts of the run. The stages that a host will not reach because it left the run (`left`) do not count.
        stages_s: stage -> its expected duration in seconds; empty if the durations are unknown.
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
    """Return how urgently the host needs attention: from 0, the most urgent, to 5."""
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
