"""Render a run as log lines: one for each change since the previous view, and heartbeat lines while a task runs.

A view is the state of a run at one moment (`fleet/watch/view.py`). A heartbeat line shows the progress of the current task.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fleet.quantities import counted
from fleet.report.formatting import clean, join_names
from fleet.watch.progress import FAILED, LEFT, NONE, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from fleet.watch.text import clock, duration, percent
from fleet.watch.view import HostStatus, View, state_text

LINE_LIMIT = 600
"""Maximum number of characters of a line."""
NAMED_HOSTS = 8
"""Maximum number of hosts that a line names."""
TASK_START_S = 2.0
"""Delay from the start of a task to the line that names its hosts. By then, all of them should have started the task."""
SILENT_S = 300.0
"""Interval at which an unchanged heartbeat line is printed again, because some CI systems stop jobs that print nothing."""


def changes(old: View | None, new: View) -> list[str]:
    """Return a line for each difference between two views. If `old` is None, return lines for the current state of the run."""
    lines = [*_run_changes(old, new), *_state_changes(old, new), *_new_findings(old, new), *_end(old, new)]
    return [_log_line(new.at, line) for line in lines]


def _log_line(at: float, text: str) -> str:
    """Return time and text, sanitized, on one line of at most LINE_LIMIT characters; a cut line ends in `…`."""
    line = clean(f"{clock(at)} {text}", 4000)
    return line if len(line) <= LINE_LIMIT else f"{line[: LINE_LIMIT - 1]}…"


def _run_changes(old: View | None, new: View) -> Iterator[str]:
    if old is None:
        mark = f", {new.mark}" if new.mark else ""
        yield f"run {new.run_id}: {counted(len(new.hosts), 'host')} of {join_names(new.racks)}, profile {new.profile}{mark}"
    if new.by and (old is None or old.by != new.by):
        yield f"running: {new.by}"
    for note in new.notes if old is None else [note for note in new.notes if note not in old.notes]:
        yield f"note: {note}"


def _state_changes(old: View | None, new: View) -> Iterator[str]:
    """Yield the lines about hosts. `HostStatus.trouble` states what is wrong with a host.

    - A host with `trouble` failed or became unreachable: a line with the `trouble`.
    - Other hosts entered a new state of a stage: one line for all of them, because hundreds can change at once.
    - A host has new `trouble`, but did not just fail: a line with the `trouble`.
    """
    before = {host.name: host for host in old.hosts} if old else {}
    hosts_by_change: dict[tuple[str, str], list[str]] = defaultdict(list)
    for host in new.hosts:
        for stage, cell in host.cells.items():
            old_state = before[host.name].cells[stage].state if host.name in before else WAITING
            if cell.state == old_state or cell.state in (WAITING, LEFT, NONE):
                continue
            if cell.state in (FAILED, UNREACHABLE) and host.trouble:
                yield f"{host.name} {stage}: {cell.state}: {host.trouble}"
            else:
                hosts_by_change[stage, cell.state].append(host.name)
        if (
            host.trouble
            and host.name in before
            and not before[host.name].trouble
            and not _has_just_failed(before, host)
        ):
            yield f"{host.name}: {host.trouble}"
    for (stage, state), hosts in hosts_by_change.items():
        yield f"{join_names(hosts, NAMED_HOSTS)} {stage}: {state}"


def _has_just_failed(before: dict[str, HostStatus], host: HostStatus) -> bool:
    old_cells = before[host.name].cells
    return any(
        cell.state in (FAILED, UNREACHABLE) and cell.state != old_cells[stage].state
        for stage, cell in host.cells.items()
    )


def _new_findings(old: View | None, new: View) -> Iterator[str]:
    known = {line for host in old.hosts for line in host.failed} if old else set()
    yield from (line for host in new.hosts for line in host.failed if line not in known)


def _end(old: View | None, new: View) -> Iterator[str]:
    if new.decision and (old is None or old.decision != new.decision):
        yield f"decision: {new.decision}"
        yield from new.summary
    elif new.is_over and not new.decision and (old is None or not old.is_over):
        yield "no playbook is running, and the run has no decision"


def _stage_start(view: View) -> str:
    """Return a line with the hosts that the current task measures and how long that may take; empty if it measures none."""
    stage = view.waiting_for
    if not stage or not view.pending:
        return ""
    is_one = len(view.pending) == 1
    each = "" if is_one else " each"
    limit = f", for at most {duration(view.deadlines[stage])}{each}" if stage in view.deadlines else ""
    return f"{stage}: {join_names(view.pending, NAMED_HOSTS)} {'is measuring' if is_one else 'are measuring'}{limit}"


def _heartbeat(view: View) -> tuple[str, str]:
    """Return a line such as `benchmark: 3 of 4 hosts done, r12-h07 61 %`, and its ending, such as `, about 1 min 10 s left`.

    The ending is `, at most … left` if the expected end is unknown for a host, but a deadline is known. If the task does not wait
    for a stage, the ending is the time since the start of the task, such as ` for 20 s`. If the task is running on no host, line
    and ending are empty.
    """
    if not view.pending:
        return "", ""
    done = f"{view.answered} of {view.answered + len(view.pending)} hosts done"
    hosts = {host.name: host for host in view.hosts}
    pending = [hosts[name] for name in view.pending if name in hosts]
    if not view.waiting_for:
        since = f" for {duration(view.at - view.task_since)}" if view.task_since else ""
        return f"{view.task}: {done}, {join_names(view.pending)} still running", since
    return f"{view.waiting_for}: {done}, {_progress(pending, view.waiting_for)}", _time_left(pending)


def _time_left(pending: list[HostStatus]) -> str:
    """Return the time until the last host is expected to finish.

    If the expected end is unknown for any host, return the time until the last known deadline; empty if none is known.
    """
    expected_s = [host.expected_s for host in pending if host.expected_s is not None]
    if expected_s and len(expected_s) == len(pending):
        return f", about {duration(max(expected_s))} left"
    remaining_s = [host.remaining_s for host in pending if host.remaining_s is not None]
    return f", at most {duration(max(remaining_s))} left" if remaining_s else ""


def _progress(pending: list[HostStatus], stage: str) -> str:
    """Return the progress of each host; for more than NAMED_HOSTS / 2 hosts, only the lowest (with its host) and the highest."""
    if len(pending) <= NAMED_HOSTS // 2:
        return ", ".join(f"{host.name} {_host_progress(host, stage)}" for host in pending)
    shares = {host.name: share for host in pending if (share := host.cells[stage].progress) is not None}
    if not shares:
        return f"{len(pending)} hosts, progress unknown"
    slowest = min(shares, key=lambda name: shares[name])
    unknown = f", {len(pending) - len(shares)} unknown" if len(shares) < len(pending) else ""
    return f"{counted(len(shares), 'host')} at {percent(shares[slowest])} ({slowest}) to {percent(max(shares.values()))}{unknown}"


def _host_progress(host: HostStatus, stage: str) -> str:
    cell = host.cells[stage]
    if cell.state == RUNNING and cell.progress is None:
        return UNKNOWN
    return state_text(cell)


class HeartbeatLines:
    """Select the heartbeat lines to print: at most one per interval, and a repeated line only every `SILENT_S`."""

    def __init__(self, every_s: float) -> None:
        """Set the minimum interval between two heartbeat lines, in seconds."""
        self._every_s = every_s
        self._task: tuple[str, float | None] = ("", None)
        self._last_line, self._last_line_at = "", 0.0

    def due(self, view: View) -> list[str]:
        """Return a list of the line to print now, or an empty list."""
        task = (view.waiting_for, view.task_since)
        task_age = view.at - (view.task_since or view.at)
        if task != self._task and (line := _stage_start(view)) and task_age >= min(TASK_START_S, self._every_s):
            self._task, self._last_line, self._last_line_at = task, "", view.at
            return [_log_line(view.at, line)]
        (line, time_left), silent_s = _heartbeat(view), view.at - max(self._last_line_at, view.task_since or 0.0)
        if not line or silent_s < (SILENT_S if line == self._last_line else self._every_s):
            return []
        self._last_line, self._last_line_at = line, view.at
        return [_log_line(view.at, line + time_left)]
