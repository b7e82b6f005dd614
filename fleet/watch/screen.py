"""Render a view of a run for a terminal with rich.

Text from hosts is sanitized, which removes control characters, and passed to rich as `Text`, in which markup has no effect.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fleet.quantities import counted
from fleet.report.formatting import clean, join_names
from fleet.watch.progress import DONE, FAILED, LEFT, NONE, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from fleet.watch.text import clock, duration
from fleet.watch.view import HostStatus, View, attention_rank, state_text

STATE_ORDER = (FAILED, UNREACHABLE, UNKNOWN, RUNNING, WAITING, DONE, LEFT)
STYLES = {
    FAILED: "bold red",
    UNREACHABLE: "bold red",
    UNKNOWN: "yellow",
    RUNNING: "cyan",
    DONE: "green",
    WAITING: "dim",
    LEFT: "dim",
    NONE: "dim",
    "rejected": "bold red",
    "incomplete": "bold yellow",
    "accepted": "bold green",
}
COLUMN_GAP = 2
MIN_HOST_COLUMNS, MAX_STATE_COLUMNS, MIN_NOTE_COLUMNS = 12, 14, 14
FINDING_LIMIT = 1000
"""Maximum number of characters of a finding."""
FINDINGS_SHARE = 3
"""The window has a head (the state of the run and its stages), a table of hosts, and findings. Below the head, 1/FINDINGS_SHARE
of the lines are reserved for findings, but at least two. Lines that the table of hosts does not need are for findings too."""


@contextlib.contextmanager
def full_screen() -> Iterator[Live]:
    """Use the terminal's alternate screen. Leave it on exit (Ctrl-C, SIGTERM, a lost connection) and while suspended (Ctrl-Z).

    Only the refresh thread of `Live` draws. The caller must not draw: signal handlers run in the main thread, and could interrupt
    the draw.
    """
    console = Console(file=sys.stdout, force_terminal=True)
    live = Live(console=console, screen=True, refresh_per_second=2, redirect_stdout=False, redirect_stderr=False)

    def exit_on_signal(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    def suspend(number: int, frame: FrameType | None) -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        live.start()

    handlers = {signal.SIGTERM: exit_on_signal, signal.SIGHUP: exit_on_signal, signal.SIGTSTP: suspend}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        live.start()
        yield live
    finally:
        with contextlib.suppress(OSError, ValueError):  # the terminal may be closed
            live.stop()
        for number, handler in previous.items():
            signal.signal(number, handler)


def plain_text(view: View, columns: int | None) -> str:
    """Return the whole view as text without colours, with lines of `columns` characters (None: the width of the terminal)."""
    console = Console(file=sys.stdout, width=columns, color_system=None)
    with console.capture() as capture:
        console.print(RunScreen(view, fit_height=False))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


class RunScreen:
    """A rich renderable of a view.

    With `fit_height` it is at most as high as the window. If not all hosts fit, it shows those that most need attention.
    """

    def __init__(self, view: View, *, fit_height: bool) -> None:
        self._view, self._fit_height = view, fit_height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the head, the hosts and the findings."""
        head, findings = Group(*_head(self._view)), list(_findings(self._view))
        hosts, columns, height = self._view.hosts, options.max_width, options.max_height
        if not self._fit_height:
            yield from (head, _host_table(self._view, hosts, columns), *findings)
            return
        options = options.update(height=None)
        findings, not_rendered = findings[:height], findings[height:]  # wrapping thousands of findings would be slow
        below_head = max(0, height - len(console.render_lines(head, options)))
        finding_lines = len(console.render_lines(Group(*findings), options)) if findings else 0
        reserved = max(min(finding_lines, 2), min(finding_lines, below_head // FINDINGS_SHARE))
        table = _host_table(self._view, hosts, columns, max(below_head - reserved, 2))
        lines = console.render_lines(Group(head, table, *findings), options, pad=False)
        if len(lines) > height:
            more = _one_line(f"… {len(lines) - height + 1 + len(not_rendered)} more lines", "bold")
            lines = [*lines[: height - 1], *console.render_lines(more, options, pad=False)]
        for line in lines:
            yield from line
            yield Segment.line()


def _one_line(text: str, style: str = "") -> Text:
    """Return sanitized text, which is cut instead of wrapped if it is wider than the window or its table column."""
    return Text(clean(text), style, no_wrap=True, overflow="ellipsis")


# --- head


def _head(view: View) -> Iterator[RenderableType]:
    title = [view.run_id, join_names(view.racks, 3), view.profile, *([view.mark] if view.mark else [])]
    yield _one_line(" · ".join(title), "bold").append(f"   {clock(view.at)} UTC", "not bold")
    yield _one_line(_run_state(view))
    if view.decision:
        status = f" ({clean(view.status)})" if view.status else ""
        yield _one_line("decision:").append(f" {clean(view.decision)}", STYLES.get(view.decision)).append(status)
    elif view.task:
        since = f", for {duration(view.at - view.task_since)}" if view.task_since else ""
        pending = f", waiting for: {join_names(view.pending)}" if view.pending else ""
        yield _one_line(f"now: {view.task}{since}{pending}")
    counts = Table.grid(padding=(0, COLUMN_GAP, 0, 0))
    for stage in view.stages:
        counts.add_row(_one_line(stage, "bold"), _state_counts(view, stage))
    yield counts
    yield Text()


def _run_state(view: View) -> str:
    """Return the state of the run in words: who runs the playbook and since when, or that it is not running."""
    age = duration((view.ended or view.at) - view.began)
    attempt = f", attempt {view.attempts}" if view.attempts > 1 else ""
    if view.is_running is False:
        if view.ended:
            return f"reported at {clock(view.ended)}, {age} after its start{attempt}"
        if view.decision:
            return f"reported; started {age} ago{attempt}"
        exited = f": {view.by} held the lock and has exited" if view.by else ""
        return f"not running{exited}; started {age} ago{attempt}"
    unknown = " (cannot be verified from this machine)" if view.is_running is None else ""
    left = f", about {duration(view.expected_s)} left" if view.expected_s is not None else ""
    if attempt and view.since:
        attempt += f" since {clock(view.since)}"
    return f"running: {view.by}{unknown}, started {age} ago{attempt}{left}"


def _state_counts(view: View, stage: str) -> Text:
    counts = Counter(host.cells[stage].state for host in view.hosts)
    parts = [Text(f"{counts[state]} {state}", STYLES[state]) for state in STATE_ORDER if counts[state]]
    text = Text("  ").join(parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


# --- hosts


def _host_table(view: View, hosts: Sequence[HostStatus], columns: int, rows: int | None = None) -> RenderableType:
    """Return the table of hosts. If it needs more than `rows` lines, its last line is the number of hosts that are not shown."""
    hidden: Sequence[HostStatus] = ()
    if rows is not None and len(hosts) > rows - 1:
        by_attention = sorted(hosts, key=attention_rank)  # stable: ties keep the order of the inventory
        hosts, hidden = by_attention[: max(rows - 2, 0)], by_attention[max(rows - 2, 0) :]
    titles = _fitting_titles(view, hosts, columns)
    table = Table(box=None, padding=(0, COLUMN_GAP, 0, 0), pad_edge=False, header_style="bold")
    for title in titles:
        # If the table is too wide, rich narrows only columns that may wrap.
        table.add_column(Text(title), no_wrap=title != "what", max_width=_max_width(title, columns))
    for host in hosts:
        table.add_row(*(_one_line(*_cell_text(view, host, title)) for title in titles))
    if not hidden:
        return table
    return Group(table, _one_line(f"… and {counted(len(hidden), 'more host')}: {_count_by_stage(hidden)}", "bold"))


def _fitting_titles(view: View, hosts: Iterable[HostStatus], columns: int) -> list[str]:
    """Return the titles of the columns that fit in the width of the window.

    `last seen`, `time left` and the stages are left out in this order until the others fit. `what` is added if there is room.
    """
    titles = ["host", *view.stages, "last seen", "time left"]
    widths = {title: cell_len(title) for title in titles}
    for host in hosts:
        for title in titles:
            widths[title] = max(widths[title], cell_len(clean(_cell_text(view, host, title)[0])))
    used = {title: min(width, _max_width(title, columns) or width) + COLUMN_GAP for title, width in widths.items()}
    for title in ("last seen", "time left", *view.stages):
        if sum(used.values()) <= columns:
            break
        del used[title]
    return [*used, *(["what"] if sum(used.values()) + MIN_NOTE_COLUMNS <= columns else [])]


def _max_width(title: str, columns: int) -> int | None:
    if title == "what":
        return None
    return max(MIN_HOST_COLUMNS, columns // 4) if title == "host" else MAX_STATE_COLUMNS


def _cell_text(view: View, host: HostStatus, title: str) -> tuple[str, str]:
    """Return the text of a host in the column `title`, and the style of the text."""
    if title in host.cells:
        cell = host.cells[title]
        return state_text(cell), STYLES.get(cell.state, "")
    if title == "host":
        return host.name, STYLES.get(host.decision, "")
    if title == "last seen":
        return duration(view.at - host.last_seen) if host.last_seen else "-", ""
    return _time_left(host) if title == "time left" else _note(host), ""


def _time_left(host: HostStatus) -> str:
    """Return the time until the running stage is expected to end; if the expected end is unknown, the time until the deadline."""
    if host.expected_s is not None:
        return duration(host.expected_s)
    if host.remaining_s is None:
        return "unknown" if any(cell.state == RUNNING for cell in host.cells.values()) and host.benchmark else ""
    return f"at most {duration(host.remaining_s)}" if host.remaining_s > 0 else "overdue"


def _note(host: HostStatus) -> str:
    """Return why a host needs attention; if it needs none, return its current benchmark."""
    if host.trouble:
        return host.trouble
    if host.failed:
        return f"{len(host.failed)} causes of failure" if len(host.failed) > 1 else "1 cause of failure"
    return host.decision if host.decision not in ("", "accepted") else host.benchmark


def _count_by_stage(hosts: Iterable[HostStatus]) -> str:
    """Return how many hosts are in which state of which stage, such as `9 benchmark running, 390 benchmark done`.

    The stage of a host is the last one that has begun on it. Only the four most common combinations of stage and state
    are returned.
    """
    counts: Counter[str] = Counter()
    for host in hosts:
        started = [(stage, cell.state) for stage, cell in host.cells.items() if cell.state not in (WAITING, LEFT, NONE)]
        counts[" ".join(started[-1]) if started else WAITING] += 1
    return ", ".join(f"{count} {state}" for state, count in counts.most_common(4))


# --- findings


def _findings(view: View) -> Iterator[Text]:
    """Yield an empty line, then the findings. Lines wider than the window are wrapped, because the operator needs all text."""
    findings = [_finding(f"note: {note}", STYLES[UNKNOWN]) for note in view.notes]
    findings += [_finding(f"{host.name}: {host.trouble}", STYLES[FAILED]) for host in view.hosts if host.trouble]
    if view.summary:
        findings += [_finding(f"- {line}") for line in view.summary]
    elif view.judged is not None:
        failed = [line for host in view.hosts for line in host.failed]
        records = f"{view.records} of {view.records_expected} records, judged {duration(view.at - view.judged)} ago"
        findings.append(_one_line(f"causes of failure so far: {len(failed) or 'none'} ({records})", "bold"))
        findings += [_finding(line, STYLES[FAILED]) for line in failed]
    if findings:
        yield Text()
        yield from findings


def _finding(text: str, style: str = "") -> Text:
    return Text(clean(text, FINDING_LIMIT), style, overflow="fold")
