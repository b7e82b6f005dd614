"""Render the report's summary: a list for Markdown, and tables of checks and causes for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.table import Table
from rich.text import Text

from fleet.diagnosis.handling import Handling, handling
from fleet.report.formatting import cause_action, clean, status
from fleet.report.summary import describe_cause, pci_slots, select_causes
from fleet.report.tables import timing
from fleet.report.terminal import plain_table, render_blocks
from fleet.scope_text import describe_scope
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Cause, CausePart, FleetReport, LineKind, SummaryLine
from schemas.scopes import HOST

RULE = "=" * 50
LINE_LIMIT = 600
_MAX_PARTS = 3
_STYLES = {PASS: "green", FAIL: "bold red", INCONCLUSIVE: "yellow"}
_NOT_FACTS = (LineKind.CHECK, LineKind.REASON, LineKind.MORE)
"""Kinds of summary lines that the table of facts leaves out: CHECK lines have their own table, the table of causes replaces the
REASON lines, and MORE lines are text below the tables."""


def render_summary(report: FleetReport) -> str:
    """Return status and summary as a list, for Markdown. Control characters and line breaks in texts from hosts are removed."""
    lines = [f"- {clean(line, LINE_LIMIT)}" for line in report.acceptance.summary]
    time = timing.summary_line(report)
    lines += [f"- Time: {clean(time, LINE_LIMIT)}"] if time else []
    return "\n".join([RULE, f"FINAL ACCEPTANCE: {clean(status(report))}", *lines, RULE])


def render_screen(report: FleetReport, *, width: int | None = None, colour: bool = False) -> str:
    """Return status and summary as tables for a terminal. Texts from hosts are cleaned as in `render_summary`.

    Args:
        report: the report.
        width: maximum length of a line in characters; None: each row is one line of any length.
        colour: whether to colour the results.
    """
    state = {"accepted": PASS, "rejected": FAIL}.get(report.decision, INCONCLUSIVE)
    head = Text.assemble("FINAL ACCEPTANCE: ", (clean(status(report)), _STYLES[state]))
    blocks = [Text(RULE), head, *summary_blocks(report), Text(RULE)]
    return render_blocks(blocks, width=width, colour=colour)


def summary_blocks(report: FleetReport, *, without: Collection[str] = ()) -> list[Table | Text]:
    """Return the blocks below the status: tables of facts, checks, causes, and how to act on the causes; then the MORE lines.

    Args:
        report: the report.
        without: kinds of summary lines (`LineKind`) to leave out.
    """
    lines = [line for line in report.acceptance.lines if line.kind not in without]
    facts = [line for line in lines if line.kind not in _NOT_FACTS]
    tables = [
        _facts(facts, timing.summary_line(report)),
        _checks(line for line in lines if line.kind == LineKind.CHECK),
        _causes(report),
        handling_table(select_causes(report.causes)[0]),
    ]
    blocks: list[Table | Text] = []
    for table in tables:
        if table.row_count:
            blocks += [Text(""), table] if blocks else [table]
    return [*blocks, *(Text(clean(str(line), LINE_LIMIT)) for line in lines if line.kind == LineKind.MORE)]


def _facts(lines: Iterable[SummaryLine], time: str) -> Table:
    table = plain_table("", "")
    for line in lines:
        table.add_row(clean(line.title), clean(line.text, LINE_LIMIT))
    if time:
        table.add_row("Time", clean(time, LINE_LIMIT))
    return table


def _checks(lines: Iterable[SummaryLine]) -> Table:
    table = plain_table("CHECK", "RESULT", "AFFECTED")
    _set_result_width(table)
    for line in lines:
        result, note = clean(line.text), ""
        if not line.verdict:  # `NOT JUDGED (why)` or `NOT COMPARED (why)`: the reason moves to the column AFFECTED
            result, _, note = result.partition(" (")
        affected = ", ".join(filter(None, (_affected(line), note.removesuffix(")"))))
        table.add_row(clean(line.title), Text(result, style=_STYLES.get(line.verdict, "")), affected)
    return table


def _affected(line: SummaryLine) -> str:
    """Return how many GPUs and hosts are affected, of how many: `1/504 GPUs, 2/64 hosts`."""
    counts = (
        (line.values.get(key), line.values.get(f"{key}_total"), name)
        for key, name in (("gpus", "GPUs"), ("hosts", "hosts"))
    )
    return ", ".join(f"{count}/{total} {name}" for count, total, name in counts if count)


def _causes(report: FleetReport) -> Table:
    slots = pci_slots((host.name, gpu) for host in report.hosts for gpu in host.gpus)
    table = plain_table("RESULT", "ACTION", "CAUSE")
    _set_result_width(table)
    for cause in select_causes(report.causes)[0]:
        text = describe_cause(cause, report.verdicts[cause.verdicts[0]], slots)
        what = Text.assemble(clean(text.what, LINE_LIMIT), (f" [{clean(text.checks)}]", "dim"))
        table.add_row(Text(text.result, style=_STYLES[cause.verdict]), text.action, what)
    return table


def handling_table(causes: Iterable[Cause]) -> Table:
    """Return a table of how to act on the causes. The parts of causes with the same action and `Handling` share a row."""
    parts: dict[tuple[str, Handling], dict[str, None]] = {}
    for cause in causes:
        way = handling(cause)
        if way.now:
            parts.setdefault((cause_action(cause.verdict, cause.action, cause.problem), way), {}).update(
                dict.fromkeys(map(_part_name, cause.parts))
            )
    table = plain_table("ACTION", "PART", "HOW")
    for (action, way), of_way in parts.items():
        names = [*of_way]
        more = f" and {len(names) - _MAX_PARTS} more" if len(names) > _MAX_PARTS else ""
        how = f"{way.now} If it comes back: {way.if_it_returns}" if way.if_it_returns else way.now
        table.add_row(action, clean(", ".join(names[:_MAX_PARTS])) + more, how)
    return table


def _part_name(part: CausePart) -> str:
    return part.host if part.scope == HOST else f"{describe_scope(part.scope)} of {part.host}"


def _set_result_width(table: Table) -> None:
    """Make the column RESULT of a table at least as wide as `INCOMPLETE`, so that the tables are normally aligned."""
    next(column for column in table.columns if column.header == "RESULT").min_width = len("INCOMPLETE")
