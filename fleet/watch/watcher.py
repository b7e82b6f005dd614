"""Read a run directory and build the view of the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.records import run_lock
from fleet.records.load import PLAN_BYTES, without_plan
from fleet.watch.exporters import Exporters, StageReport
from fleet.watch.findings import Judge, Judged, Reported, read_report
from fleet.watch.progress import (
    DONE,
    FAILED,
    INSPECT,
    LEFT,
    NONE,
    PREPARE,
    RUNNING,
    UNKNOWN,
    UNREACHABLE,
    WAITING,
    HostProgress,
    RunProgress,
)
from fleet.watch.tail import Tail, moment
from fleet.watch.view import Cell, HostView, View
from schemas import documents
from schemas.errors import RunError
from schemas.plans import Plan, PlannedHost, plan_from_json
from schemas.run_directory import PROGRESS, RunDirectory
from schemas.stages import GANG

STALE_S = 60.0
"""Age at which a report of an exporter is no longer shown."""


class Watcher:
    """Reads a run directory repeatedly, at low cost whatever its size."""

    def __init__(self, run_dir: Path, *, judging: bool = True, asking: bool = True) -> None:
        """Read the plan.

        Args:
            run_dir: run directory on the control node.
            judging: read and judge records.
            asking: scrape exporters for progress.

        Raises:
            RunError: there is no plan.
        """
        try:
            self._plan: Plan = plan_from_json(documents.read(RunDirectory(run_dir).plan, "plan", max_bytes=PLAN_BYTES))
        except documents.DocumentError as error:
            raise RunError(f"{error}: {without_plan(run_dir, error)}") from None
        self._run_dir = run_dir.absolute()
        self._progress_of_run = RunProgress(
            [stage.name for stage in self._plan.stages], (host.name for host in self._plan.hosts)
        )
        self._progress, self._events = Tail(RunDirectory(run_dir).progress), Tail(RunDirectory(run_dir).events)
        self._journal = Tail(RunDirectory(run_dir).journal)
        self._events_by_host: dict[str, str] = {}
        self._last: dict[str, Any] = {}
        self._judge = Judge(self._run_dir, self._plan) if judging and not self._plan.study else None
        self._exporters = Exporters(self._run_dir, self._plan.run_id) if asking else None
        self._reported: tuple[object, Reported | None] = (None, None)

    def look(self, *, background: bool = True) -> View:
        """Return the current view; without `background`, judge and scrape first, which may take a while."""
        self._progress_of_run.feed(self._progress.read())
        self._hear()
        is_running, by, since = self._holder()
        report = self._report() if is_running is False else None
        ended = moment(self._last.get("at")) if self._last.get("what") == "reported" else 0.0
        decision = (
            report.decision if report else str(self._last.get("note", "")) if ended and is_running is False else ""
        )
        if not decision:
            self._judge_and_ask(background)
        now = time.time()
        judged = self._judge.now if self._judge else Judged()
        return View(
            at=now,
            run_id=self._plan.run_id,
            profile=self._plan.profile,
            rehearsal=self._plan.rehearsal,
            simulated=self._plan.simulated,
            racks=tuple(dict.fromkeys(host.rack for host in self._plan.hosts)),
            began=moment(self._plan.created),
            is_running=is_running,
            by=by,
            since=since,
            attempts=self._progress_of_run.attempts,
            **self._playing(is_running),
            stages=self._progress_of_run.stages,
            deadlines={stage.name: stage.deadline_s for stage in self._plan.stages},
            hosts=tuple(self._host(host, is_running, judged, report, now) for host in self._plan.hosts),
            decision=decision,
            status=report.status if report else "",
            ended=ended or None,
            summary=report.summary if report else (),
            records=judged.records,
            records_expected=judged.expected,
            judged=judged.at or None,
            notes=self._notes(judged, decision if not report else ""),
        )

    def _playing(self, is_running: bool | None) -> dict[str, Any]:
        """Return the current play and task; empty if no playbook runs."""
        story, here = self._progress_of_run, is_running is not False
        return {
            "playbook": story.playbook,
            "play": story.play if here else "",
            "task": story.task if here else "",
            "task_since": story.task_since or None if here else None,
            "waiting_for": story.waiting_for if here else "",
            "pending": tuple(story.pending) if here else (),
            "answered": len(story.answered),
        }

    def _hear(self) -> None:
        for event in self._events.read():
            host = event.get("host")
            if isinstance(host, str) and event["what"] in (FAILED, UNREACHABLE):
                self._events_by_host[host] = f"{event.get('message', '')} (at {event.get('task', '')})"
        for event in self._journal.read():
            self._last = event

    def _holder(self) -> tuple[bool | None, str, float | None]:
        """Return whether a playbook runs the run, who started it, and since when."""
        try:
            lock = run_lock.holder(self._run_dir)
        except OSError:
            lock = None
        if lock is None:
            return False, "", None
        lives = lock.lives()
        # If processes of other users are hidden, one that is not visible may still run.
        hidden = lives is False and lock.since and not _readable("/proc/1/stat")
        return (None if hidden else lives), lock.who(), moment(lock.since) or None

    def _report(self) -> Reported | None:
        with contextlib.suppress(OSError):
            status = RunDirectory(self._run_dir).report.stat()
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._reported[0] != mark:
                self._reported = (mark, read_report(self._run_dir))
            return self._reported[1]
        return None

    def _judge_and_ask(self, background: bool) -> None:
        if self._judge and background:
            self._judge.start()
        elif self._judge:
            self._judge.update()
        if self._exporters:
            hosts = self._progress_of_run.hosts.items()
            asked = [name for name, host in hosts if host.waits or UNKNOWN in host.states.values()]
            self._exporters.want(asked, self._progress_of_run.targets, background=background)

    def _notes(self, judged: Judged, decided: str) -> tuple[str, ...]:
        page = "scaling.html" if self._plan.study else "report.html"
        parsed = [f"the report is not shown here: see {self._run_dir}/{page}"] if decided else []
        parsed += [tail.problem for tail in (self._progress, self._events, self._journal) if tail.problem]
        if not self._progress_of_run.known and not self._progress.problem:
            parsed.append(f"there is no {PROGRESS}: the progress of hosts is known only from their records")
        if self._progress_of_run.stopped:
            parsed.append(f"the playbook failed at {self._progress_of_run.stopped}")
        silent = self._exporters.problems() if self._exporters else {}
        if silent:
            host, why = next(iter(silent.items()))
            more = f" (and {len(silent) - 1} more hosts)" if len(silent) > 1 else ""
            parsed.append(f"progress unknown: {host}: {why}{more}")
        return (*parsed, *judged.problems)

    # --- one host

    def _host(
        self, host: PlannedHost, is_running: bool | None, judged: Judged, report: Reported | None, now: float
    ) -> HostView:
        story = self._progress_of_run.hosts[host.name]
        stage_report = self._exporters.told(host.name) if self._exporters else {}
        fresh = {stage: item for stage, item in stage_report.items() if now - item.at <= STALE_S}
        outcomes = (report or judged).outcomes.get(host.name, {})
        cells = {
            stage: self._cell(host, story, stage, fresh.get(stage), outcomes) for stage in self._progress_of_run.stages
        }
        if is_running is False:  # only an exporter still reports its progress
            for stage, cell in cells.items():
                if cell.state == RUNNING and stage not in fresh:
                    cells[stage] = Cell(state=UNKNOWN, since=cell.since)
        running = next((stage for stage, cell in cells.items() if cell.state == RUNNING), "")
        current_report = fresh.get(running)
        last_seen = max(story.last_seen, current_report.at if current_report else 0.0)
        return HostView(
            name=host.name,
            rack=host.rack,
            cells=cells,
            last_seen=last_seen or None,
            remaining_s=self._time_left(story, running, current_report, now),
            benchmark=current_report.benchmark if current_report else "",
            trouble=self._trouble(host.name, story, current_report),
            failed=judged.failed.get(host.name, ()),
            decision=report.hosts.get(host.name, "") if report else "",
        )

    def _cell(
        self,
        host: PlannedHost,
        story: HostProgress,
        stage: str,
        stage_report: StageReport | None,
        outcomes: Mapping[str, str],
    ) -> Cell:
        if stage == GANG and not host.gang:
            return Cell(state=NONE)
        state, since = story.states.get(stage, WAITING), story.since.get(stage)
        if story.left and state == WAITING and self._after(stage, story.left_in):
            return Cell(state=LEFT)
        if state in (WAITING, UNKNOWN):
            state = self._otherwise(host, stage, state, stage_report, outcomes)
        progress = (
            stage_report.progress if stage_report and state == RUNNING and stage_report.state == "running" else None
        )
        return Cell(state=state, progress=progress, since=since)

    def _otherwise(
        self, host: PlannedHost, stage: str, state: str, stage_report: StageReport | None, outcomes: Mapping[str, str]
    ) -> str:
        """Return the state if the playbook reports none: from the host's exporter, else from its record."""
        if stage_report and stage_report.state == "running":
            return RUNNING
        if stage in outcomes:
            return DONE if outcomes[stage] == "finished" else FAILED
        if stage in (PREPARE, INSPECT) and RunDirectory(self._run_dir).record(host.name).exists():
            return DONE
        return state if self._progress_of_run.known else UNKNOWN

    def _after(self, stage: str, left_in: str) -> bool:
        order = self._progress_of_run.stages
        return left_in not in order or order.index(stage) > order.index(left_in)

    def _time_left(self, story: HostProgress, stage: str, stage_report: StageReport | None, now: float) -> float | None:
        if stage_report and stage_report.remaining_s is not None:
            return stage_report.remaining_s - (now - stage_report.at)
        deadlines = {item.name: item.deadline_s for item in self._plan.stages}
        return story.waits + deadlines[stage] - now if story.waits and stage in deadlines else None

    def _trouble(self, name: str, story: HostProgress, stage_report: StageReport | None) -> str:
        if story.left:
            return self._events_by_host.get(name) or f"left at {story.left}"
        if FAILED in story.states.values() or UNREACHABLE in story.states.values():
            return self._events_by_host.get(name, "")
        if not self._progress_of_run.known:
            return self._events_by_host.get(name, "")
        return "its supervisor is silent" if stage_report and stage_report.state == "silent" else ""


def _readable(path: str) -> bool:
    try:
        return bool(Path(path).read_bytes())
    except OSError:
        return False
