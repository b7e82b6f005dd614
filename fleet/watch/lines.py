"""Render a run as log lines: changes from one view to the next, and heartbeat lines while a stage runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fleet.watch.progress import FAILED, LEFT, NONE, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from fleet.watch.screen import state_of
from fleet.watch.text import clock, duration, fit, names, percent
from fleet.watch.view import HostView, View

LONGEST = 600
NAMED = 8
SETTLE_S = 2.0
"""Time within which all hosts have started a task."""
SILENT_S = 300.0
"""Interval of heartbeat lines without progress: some CI systems stop jobs that print nothing."""


def changes(old: View | None, new: View) -> list[str]:
    """Return a line per failed host, per group of hosts with the same change, per finding, and for the decision."""
    lines = [*_begun(old, new), *_moves(old, new), *_findings(old, new), *_ends(old, new)]
    return [fit(f"{clock(new.at)} {line}", LONGEST) for line in lines]


def _begun(old: View | None, new: View) -> Iterator[str]:
    if old is None:
        mark = f", {new.mark}" if new.mark else ""
        yield f"run {new.run_id}: {len(new.hosts)} hosts of {names(new.racks)}, profile {new.profile}{mark}"
    if new.by and (old is None or old.by != new.by):
        yield f"running: {new.by}"
    for note in new.notes if old is None else [note for note in new.notes if note not in old.notes]:
        yield f"note: {note}"


def _moves(old: View | None, new: View) -> Iterator[str]:
    """Yield state changes, grouped, since hundreds of hosts change at the same time."""
    before = {host.name: host for host in old.hosts} if old else {}
    same: dict[tuple[str, str], list[str]] = defaultdict(list)
    for host in new.hosts:
        for stage, cell in host.cells.items():
            was = before[host.name].cells[stage].state if host.name in before else WAITING
            if cell.state == was or cell.state in (WAITING, LEFT, NONE):
                continue
            if cell.state in (FAILED, UNREACHABLE) and host.trouble:
                yield f"{host.name} {stage}: {cell.state}: {host.trouble}"
            else:
                same[stage, cell.state].append(host.name)
        if host.trouble and host.name in before and not before[host.name].trouble and not _moved(before, host):
            yield f"{host.name}: {host.trouble}"
    for (stage, state), hosts in same.items():
        yield f"{names(hosts, NAMED)} {stage}: {state}"


def _moved(before: dict[str, HostView], host: HostView) -> bool:
    old = before[host.name].cells
    return any(
        cell.state in (FAILED, UNREACHABLE) and cell.state != old[stage].state for stage, cell in host.cells.items()
    )


def _findings(old: View | None, new: View) -> Iterator[str]:
    known = {line for host in old.hosts for line in host.failed} if old else set()
    yield from (line for host in new.hosts for line in host.failed if line not in known)


def _ends(old: View | None, new: View) -> Iterator[str]:
    if new.decision and (old is None or old.decision != new.decision):
        yield f"decision: {new.decision}"
        yield from new.summary
    elif new.over and not new.decision and (old is None or not old.over):
        yield "the run is not running"


def begins(view: View) -> str:
    """Return the hosts being measured and how long it may take; empty if no stage is running."""
    stage = view.waiting_for
    if not stage or not view.pending:
        return ""
    most = f", for at most {duration(view.deadlines[stage])} each" if stage in view.deadlines else ""
    return f"{stage}: {names(view.pending, NAMED)} are measuring{most}"


def beat(view: View) -> tuple[str, str]:
    """Return `benchmark: 3 of 4 hosts done, r12-h07 61 %` and `, at most 2 min 10 s left`; two empty texts if no host is
    waited for.
    """
    if not view.pending:
        return "", ""
    through = f"{view.answered} of {view.answered + len(view.pending)} hosts done"
    hosts = {host.name: host for host in view.hosts}
    pending = [hosts[name] for name in view.pending if name in hosts]
    if not view.waiting_for:
        since = f" for {duration(view.at - view.task_since)}" if view.task_since else ""
        return f"{view.task}: {through}, {names(view.pending)} still running", since
    left = [host.remaining_s for host in pending if host.remaining_s is not None]
    until = f", at most {duration(max(left))} left" if left else ""
    return f"{view.waiting_for}: {through}, {_progress(pending, view.waiting_for)}", until


def _progress(pending: list[HostView], stage: str) -> str:
    """Return the progress of each host, or the range from slowest to fastest for many hosts."""
    if len(pending) <= NAMED // 2:
        return ", ".join(f"{host.name} {_far(host, stage)}" for host in pending)
    known = [(cell.progress, host) for host in pending if (cell := host.cells[stage]).progress is not None]
    if not known:
        return f"{len(pending)} hosts, progress unknown"
    low, high = (
        min(share for share, _ in known if share is not None),
        max(share for share, _ in known if share is not None),
    )
    slowest = next(host.name for share, host in known if share == low)
    unknown = f", {len(pending) - len(known)} unknown" if len(known) < len(pending) else ""
    return f"{len(known)} hosts at {percent(low)} ({slowest}) to {percent(high)}{unknown}"


def _far(host: HostView, stage: str) -> str:
    cell = host.cells[stage]
    if cell.state == RUNNING and cell.progress is None:
        return UNKNOWN
    return state_of(cell)


class HeartbeatLines:
    """Heartbeat lines for the playbook's terminal: few, and none twice."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._task: tuple[str, float | None] = ("", None)
        self._said, self._said_at = "", 0.0

    def hear(self, view: View) -> list[str]:
        """Return the lines that are due."""
        task = (view.waiting_for, view.task_since)
        begun = view.at - (view.task_since or view.at)
        if task != self._task and (line := begins(view)) and begun >= min(SETTLE_S, self._every_s):
            self._task, self._said, self._said_at = task, "", view.at
            return [fit(f"{clock(view.at)} {line}", LONGEST)]
        (line, remaining), since = beat(view), view.at - max(self._said_at, view.task_since or 0.0)
        if not line or since < (SILENT_S if line == self._said else self._every_s):
            return []
        self._said, self._said_at = line, view.at
        return [fit(f"{clock(view.at)} {line}{remaining}", LONGEST)]
