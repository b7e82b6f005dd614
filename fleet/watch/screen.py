"""Render a view of a run as a screen of lines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.watch.progress import DONE, FAILED, LEFT, NONE, RUNNING, UNKNOWN, UNREACHABLE, WAITING
from fleet.watch.text import clean, clock, duration, fit, names, pad, percent, width
from fleet.watch.view import Cell, HostView, View, attention

ORDER = (FAILED, UNREACHABLE, UNKNOWN, RUNNING, WAITING, DONE, LEFT)
COLOURS = {
    FAILED: "31;1",
    UNREACHABLE: "31;1",
    UNKNOWN: "33",
    RUNNING: "36",
    DONE: "32",
    WAITING: "2",
    LEFT: "2",
    NONE: "2",
    "rejected": "31;1",
    "incomplete": "33;1",
    "accepted": "32;1",
    "head": "1",
}
LEAST_TEXT, LONGEST = 14, 1000
NO_END = 1_000_000
FINDINGS_SHARE = 3
"""Share of the lines below the head that findings may take, unless the hosts need fewer."""


@dataclass(frozen=True)
class Part:
    """A piece of a line, and its colour."""

    text: str
    style: str = ""


Line = list[Part]


def render(view: View, columns: int, rows: int = NO_END, *, colour: bool = False) -> list[str]:
    """Return at most `rows` lines of at most `columns` columns. If not all hosts fit, those that need attention come first."""
    head = _head(view)
    rest = max(0, rows - len(head))
    tail = _findings(view, columns)
    table = _table(view, columns, max(rest - max(len(tail) and 2, min(len(tail), rest // FINDINGS_SHARE)), 2))
    lines = [*head, *table, *tail]
    if len(lines) > rows:
        lines = [*lines[: rows - 1], [Part(f"… {len(lines) - rows + 1} more lines", "head")]]
    return [_drawn(line, columns, colour) for line in lines[:rows]]


def _drawn(line: Line, columns: int, colour: bool) -> str:
    parsed, room = "", columns
    for part in line:
        core = part.text.rstrip(" ")  # text from hosts is sanitized here; padding is kept
        text = fit(core, room)
        text += " " * min(len(part.text) - len(core), room - width(text))
        room -= width(text)
        style = COLOURS.get(part.style, "") if colour else ""
        parsed += f"\x1b[{style}m{text}\x1b[0m" if style and text else text
    return parsed if colour else parsed.rstrip()


# --- head


def _head(view: View) -> list[Line]:
    what = [view.run_id, names(view.racks, 3), view.profile, *([view.mark] if view.mark else [])]
    lines = [[Part(" · ".join(what), "head"), Part(f"   {clock(view.at)} UTC")], [Part(_who(view))]]
    if view.decision:
        said = f" ({clean(view.status)})" if view.status else ""
        lines.append([Part("decision: "), Part(view.decision, view.decision), Part(said)])
    elif view.task:
        since = f", for {duration(view.at - view.task_since)}" if view.task_since else ""
        lines.append([Part(f"now: {view.task}{since}{_still(view)}")])
    lines += [_counts(view, stage) for stage in view.stages]
    return [*lines, []]


def _who(view: View) -> str:
    so_far = duration((view.ended or view.at) - view.began)
    again = f", attempt {view.attempts}" if view.attempts > 1 else ""
    if view.is_running is False:
        if view.decision and not view.ended:
            return f"reported; begun {so_far} ago{again}"
        if view.ended:
            return f"reported at {clock(view.ended)}, {so_far} after its start{again}"
        gone = f": {view.by} held the lock and has exited" if view.by else ""
        return f"not running{gone}; begun {so_far} ago{again}"
    unsure = " (its state is unknown from here)" if view.is_running is None else ""
    since = f" since {clock(view.since)}" if view.since else ""
    return f"running: {view.by}{since}{unsure}, begun {so_far} ago{again}"


def _still(view: View) -> str:
    return f", waiting for: {names(view.pending)}" if view.pending else ""


def _counts(view: View, stage: str) -> Line:
    counts = Counter(host.cells[stage].state for host in view.hosts)
    line = [Part(pad(stage, max(map(width, view.stages)) + 2), "head")]
    for state in ORDER:
        if counts[state]:
            line += [Part(f"{counts[state]} {state}", state), Part("  ")]
    return line


# --- hosts


@dataclass(frozen=True)
class _Column:
    title: str
    width: int
    need: int
    """Columns with the highest number are dropped first if not all fit."""


def _table(view: View, columns: int, rows: int) -> list[Line]:
    """Return title, hosts, and a count of the hosts that are not shown, in at most `rows` rows."""
    hosts, hidden = list(view.hosts), []
    if len(hosts) > rows - 1:
        ordered = sorted(hosts, key=attention)  # stable: ties keep the inventory's order
        hosts, hidden = ordered[: max(rows - 2, 0)], ordered[max(rows - 2, 0) :]
    layout = _layout(view, hosts, columns)
    title = [Part(pad(column.title, column.width) + "  ", "head") for column in layout]
    lines = [title, *(_row(view, host, layout) for host in hosts)]
    if hidden:
        lines.append([Part(f"… and {len(hidden)} more hosts: {_summary(hidden)}", "head")])
    return lines


def _layout(view: View, hosts: Sequence[HostView], columns: int) -> list[_Column]:
    """Return columns as wide as their content. If not all fit, the least needed are dropped, then the first stages."""
    most = {"host": max(12, columns // 4), "what": columns}
    need = {"host": 0, **dict.fromkeys(view.stages, 1), "time left": 2, "last seen": 3}
    wanted = []
    for title in ("host", *view.stages, "last seen", "time left"):
        widest = max([width(_text(view, host, title)[0]) for host in hosts] + [width(title)])
        wanted.append(_Column(title, min(widest, most.get(title, 14)), need[title]))
    while len(wanted) > 1 and sum(column.width + 2 for column in wanted) > columns:
        wanted.remove(max(wanted, key=lambda column: column.need))
    room = columns - sum(column.width + 2 for column in wanted)
    return [*wanted, _Column("what", room, 4)] if room >= LEAST_TEXT else wanted


def _text(view: View, host: HostView, title: str) -> tuple[str, str]:
    """Return the text of a column, and its colour."""
    if title in host.cells:
        return state_of(host.cells[title]), host.cells[title].state
    if title == "host":
        return host.name, host.decision
    if title == "last seen":
        return duration(view.at - host.last_seen) if host.last_seen else "-", ""
    return time_left(host) if title == "time left" else _what(host), ""


def _row(view: View, host: HostView, layout: Sequence[_Column]) -> Line:
    line: Line = []
    for column in layout:
        text, style = _text(view, host, column.title)
        line += [Part(pad(text, column.width), style), Part("  ")]
    return line[:-1]


def state_of(cell: Cell) -> str:
    """Return the progress of a running stage as `43 %`, else the state."""
    if cell.state == NONE:
        return "-"
    return percent(cell.progress) if cell.state == RUNNING and cell.progress is not None else cell.state


def time_left(host: HostView) -> str:
    """Return the time until the deadline."""
    if host.remaining_s is None:
        return "unknown" if any(cell.state == RUNNING for cell in host.cells.values()) and host.benchmark else ""
    return duration(host.remaining_s) if host.remaining_s > 0 else "over"


def _what(host: HostView) -> str:
    if host.trouble:
        return host.trouble
    if host.failed:
        return f"{len(host.failed)} criteria failed" if len(host.failed) > 1 else "1 criterion failed"
    return host.decision if host.decision not in ("", "accepted") else host.benchmark


def _summary(hosts: Sequence[HostView]) -> str:
    """Count hosts by their current or last stage."""
    counts: Counter[str] = Counter()
    for host in hosts:
        started = [(stage, cell.state) for stage, cell in host.cells.items() if cell.state not in (WAITING, LEFT, NONE)]
        counts[" ".join(started[-1]) if started else WAITING] += 1
    return ", ".join(f"{count} {what}" for what, count in counts.most_common(4))


# --- findings


def _findings(view: View, columns: int) -> list[Line]:
    lines = [line for note in view.notes for line in _wrapped(f"note: {note}", UNKNOWN, columns)]
    for host in view.hosts:
        lines += _wrapped(f"{host.name}: {host.trouble}", FAILED, columns) if host.trouble else []
    if view.summary:
        lines += [line for said in view.summary for line in _wrapped(f"- {said}", "", columns)]
    elif view.judged is not None:
        failed = [line for host in view.hosts for line in host.failed]
        records = f"{view.records} of {view.records_expected} records, judged {duration(view.at - view.judged)} ago"
        lines.append([Part(f"failed so far: {len(failed) or 'nothing'} ({records})", "head")])
        lines += [line for said in failed for line in _wrapped(said, FAILED, columns)]
    return [[], *lines] if lines else []


def _wrapped(text: str, style: str, columns: int) -> list[Line]:
    """Wrap a finding over as many lines as needed, since the operator must act on it."""
    rows = textwrap.wrap(clean(text, LONGEST), max(columns, 4), subsequent_indent="  ", break_on_hyphens=False)
    return [[Part(row, style)] for row in rows]
