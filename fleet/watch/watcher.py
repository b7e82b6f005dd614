"""Build the view of a run (its state at one moment) from its run directory and from the exporters of its hosts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.planning.duration import estimate_duration
from fleet.quantities import counted
from fleet.records import run_lock
from fleet.records.load import plan_advice
from fleet.watch.exporters import Exporters, StageReport
from fleet.watch.findings import LiveFindings, LiveJudge, ReportSummary, read_report
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
from fleet.watch.tail import Tail, parse_time
from fleet.watch.view import HostStatus, StageCell, View, expected_s
from schemas import documents
from schemas.errors import RunError
from schemas.plans import Plan, PlannedHost
from schemas.run_directory import PROGRESS, RunDirectory
from schemas.stages import GANG

MAX_REPORT_AGE_S = 60.0
"""Maximum age of a report of an exporter. Older reports are not shown."""


class Watcher:
    """Reads the state of a run repeatedly. Only files that have changed are read again."""

    def __init__(self, run_dir: Path, *, judge_records: bool = True, scrape_exporters: bool = True) -> None:
        """Read the plan.

        Args:
            run_dir: run directory on the control node.
            judge_records: read and judge the records that have been fetched.
            scrape_exporters: get the progress of stages from the exporters.

        Raises:
            RunError: the directory has no valid plan.
        """
        try:
            self._plan: Plan = RunDirectory(run_dir).read_plan()
        except documents.DocumentError as error:
            raise RunError(f"{error}: {plan_advice(run_dir, error)}") from None
        self._run_dir = run_dir.absolute()
        self._run_progress = RunProgress(
            [stage.name for stage in self._plan.stages], (host.name for host in self._plan.hosts)
        )
        self._progress, self._events = Tail(RunDirectory(run_dir).progress), Tail(RunDirectory(run_dir).events)
        self._journal = Tail(RunDirectory(run_dir).journal)
        self._events_by_host: dict[str, str] = {}
        self._last_journal_entry: dict[str, Any] = {}
        self._judge = LiveJudge(self._run_dir, self._plan) if judge_records and not self._plan.study else None
        self._exporters = Exporters(self._run_dir, self._plan.run_id) if scrape_exporters else None
        self._stages_s = {} if self._plan.study else estimate_duration(self._plan, None).stages_s
        self._summary_read: tuple[object, ReportSummary | None] = (None, None)

    def read_view(self, *, background: bool = True) -> View:
        """Return the current view.

        If `background` is false, first judge the records and scrape the exporters, which may take minutes.
        """
        self._run_progress.apply(self._progress.read())
        self._read_events()
        is_running, by, since = self._lock_state()
        report = self._report() if is_running is False else None
        is_reported = self._last_journal_entry.get("what") == "reported"
        ended = parse_time(self._last_journal_entry.get("at")) if is_reported else 0.0
        decision = report.decision if report else ""
        if not report and ended and is_running is False:
            decision = str(self._last_journal_entry.get("note", ""))
        if not decision:
            self._judge_and_scrape(background)
        now = time.time()
        findings = self._judge.findings if self._judge else LiveFindings()
        hosts = tuple(self._host(host, is_running, findings, report, now) for host in self._plan.hosts)
        return View(
            at=now,
            run_id=self._plan.run_id,
            profile=self._plan.profile,
            rehearsal=self._plan.rehearsal,
            simulated=self._plan.simulated,
            racks=tuple(dict.fromkeys(host.rack for host in self._plan.hosts)),
            began=parse_time(self._plan.created),
            is_running=is_running,
            by=by,
            since=since,
            attempts=self._run_progress.attempts,
            **self._current_task(is_running),
            stages=self._run_progress.stages,
            deadlines={stage.name: stage.deadline_s for stage in self._plan.stages},
            hosts=hosts,
            expected_s=expected_s(hosts, self._stages_s) if is_running is not False else None,
            decision=decision,
            status=report.status if report else "",
            ended=ended or None,
            summary=report.summary if report else (),
            records=findings.records,
            records_expected=findings.expected,
            judged=findings.at or None,
            notes=self._notes(findings, without_report=bool(decision) and not report),
        )

    def _current_task(self, is_running: bool | None) -> dict[str, Any]:
        """Return the fields of `View` about the playbook, its current play and its current task."""
        progress, may_run = self._run_progress, is_running is not False
        return {
            "playbook": progress.playbook,
            "play": progress.play if may_run else "",
            "task": progress.task if may_run else "",
            "task_since": progress.task_since or None if may_run else None,
            "waiting_for": progress.waiting_for if may_run else "",
            "pending": tuple(progress.pending) if may_run else (),
            "answered": len(progress.answered),
        }

    def _read_events(self) -> None:
        for event in self._events.read():
            host = event.get("host")
            if isinstance(host, str) and event["what"] in (FAILED, UNREACHABLE):
                self._events_by_host[host] = f"{event.get('message', '')} (at {event.get('task', '')})"
        for event in self._journal.read():
            self._last_journal_entry = event

    def _lock_state(self) -> tuple[bool | None, str, float | None]:
        """Return whether the playbook that locked the run is running (None: unknown), who started it, and when.

        If the run is not locked, return (False, "", None).
        """
        try:
            lock = run_lock.holder(self._run_dir)
        except OSError:
            lock = None
        if lock is None:
            return False, "", None
        is_alive = lock.is_running()
        # If /proc is mounted with `hidepid`, the process of another user may be running although it is not visible.
        may_be_hidden = is_alive is False and lock.since and not _is_readable("/proc/1/stat")
        return (None if may_be_hidden else is_alive), lock.who(), parse_time(lock.since) or None

    def _report(self) -> ReportSummary | None:
        with contextlib.suppress(OSError):
            status = RunDirectory(self._run_dir).report.stat()
            identity = (status.st_mtime_ns, status.st_size, status.st_ino)
            if self._summary_read[0] != identity:
                self._summary_read = (identity, read_report(self._run_dir))
            return self._summary_read[1]
        return None

    def _judge_and_scrape(self, background: bool) -> None:
        if self._judge and background:
            self._judge.start()
        elif self._judge:
            self._judge.update()
        if self._exporters:
            hosts = self._run_progress.hosts.items()
            running = [name for name, host in hosts if host.waiting_since or UNKNOWN in host.states.values()]
            self._exporters.set_hosts(running, self._run_progress.targets, background=background)

    def _notes(self, findings: LiveFindings, *, without_report: bool) -> tuple[str, ...]:
        page = "scaling.html" if self._plan.study else "report.html"
        notes = [f"the report is not shown here: see {self._run_dir}/{page}"] if without_report else []
        notes += [tail.problem for tail in (self._progress, self._events, self._journal) if tail.problem]
        if not self._run_progress.has_events and not self._progress.problem:
            notes.append(
                f"there is no {PROGRESS}, or it has no events: the progress of hosts is taken from their records only"
            )
        if self._run_progress.stopped:
            notes.append(f"the playbook failed at the task {self._run_progress.stopped}")
        scrape_problems = self._exporters.problems() if self._exporters else {}
        if scrape_problems:
            host, problem = next(iter(scrape_problems.items()))
            more = f" (and {counted(len(scrape_problems) - 1, 'more host')})" if len(scrape_problems) > 1 else ""
            notes.append(f"progress unknown: {host}: {problem}{more}")
        return (*notes, *findings.problems)

    # --- one host

    def _host(
        self,
        host: PlannedHost,
        is_running: bool | None,
        findings: LiveFindings,
        report: ReportSummary | None,
        now: float,
    ) -> HostStatus:
        progress = self._run_progress.hosts[host.name]
        all_reports = self._exporters.stage_reports(host.name) if self._exporters else {}
        reports = {stage: item for stage, item in all_reports.items() if now - item.at <= MAX_REPORT_AGE_S}
        outcomes = (report or findings).outcomes.get(host.name, {})
        cells = {
            stage: self._cell(host, progress, stage, reports.get(stage), outcomes)
            for stage in self._run_progress.stages
        }
        if is_running is False:  # the playbook has exited, so only the exporter can report that a stage is running
            for stage, cell in cells.items():
                if cell.state == RUNNING and stage not in reports:
                    cells[stage] = StageCell(state=UNKNOWN, since=cell.since)
        running = next((stage for stage, cell in cells.items() if cell.state == RUNNING), "")
        running_report = reports.get(running)
        last_seen = max(progress.last_seen, running_report.at if running_report else 0.0)
        return HostStatus(
            name=host.name,
            rack=host.rack,
            cells=cells,
            last_seen=last_seen or None,
            remaining_s=self._remaining_s(progress, running, running_report, now),
            expected_s=_expected_s(running_report, now),
            benchmark=running_report.benchmark if running_report else "",
            trouble=self._trouble(host.name, progress, running_report),
            failed=findings.failed.get(host.name, ()),
            decision=report.hosts.get(host.name, "") if report else "",
        )

    def _cell(
        self,
        host: PlannedHost,
        progress: HostProgress,
        stage: str,
        stage_report: StageReport | None,
        outcomes: Mapping[str, str],
    ) -> StageCell:
        if stage == GANG and not host.gang:
            return StageCell(state=NONE)
        state, since = progress.states.get(stage, WAITING), progress.since.get(stage)
        if progress.left_task and state == WAITING and self._is_later_stage(stage, progress.left_stage):
            return StageCell(state=LEFT)
        if state in (WAITING, UNKNOWN):
            state = self._state_without_event(host, stage, state, stage_report, outcomes)
        has_progress = stage_report and state == RUNNING and stage_report.state == "running"
        return StageCell(
            state=state, progress=stage_report.progress if stage_report and has_progress else None, since=since
        )

    def _state_without_event(
        self, host: PlannedHost, stage: str, state: str, stage_report: StageReport | None, outcomes: Mapping[str, str]
    ) -> str:
        """Return the state of a stage for which the playbook reports none: from the exporter, or else from the record."""
        if stage_report and stage_report.state == "running":
            return RUNNING
        if stage in outcomes:
            return DONE if outcomes[stage] == "finished" else FAILED
        if stage in (PREPARE, INSPECT) and RunDirectory(self._run_dir).record(host.name).exists():
            return DONE
        return state if self._run_progress.has_events else UNKNOWN

    def _is_later_stage(self, stage: str, left_stage: str) -> bool:
        stages = self._run_progress.stages
        return left_stage not in stages or stages.index(stage) > stages.index(left_stage)

    def _remaining_s(
        self, progress: HostProgress, stage: str, stage_report: StageReport | None, now: float
    ) -> float | None:
        """Return the seconds until the deadline of the running stage; None if no stage is running or its deadline is unknown."""
        if stage_report and stage_report.remaining_s is not None:
            return stage_report.remaining_s - (now - stage_report.at)
        deadlines = {item.name: item.deadline_s for item in self._plan.stages}
        if not progress.waiting_since or stage not in deadlines:
            return None
        return progress.waiting_since + deadlines[stage] - now

    def _trouble(self, name: str, progress: HostProgress, stage_report: StageReport | None) -> str:
        event = self._events_by_host.get(name, "")
        if progress.left_task:
            return event or f"left the run at the task {progress.left_task}"
        has_failed = FAILED in progress.states.values() or UNREACHABLE in progress.states.values()
        if has_failed or not self._run_progress.has_events:
            return event
        return "its supervisor is silent" if stage_report and stage_report.state == "silent" else ""


def _expected_s(stage_report: StageReport | None, now: float) -> float | None:
    """Return the seconds until the expected end of the running stage; None if the exporter does not report the expected end."""
    if stage_report is None or stage_report.expected_s is None:
        return None
    return max(0.0, stage_report.expected_s - (now - stage_report.at))


def _is_readable(path: str) -> bool:
    try:
        return bool(Path(path).read_bytes())
    except OSError:
        return False
