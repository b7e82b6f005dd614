"""Render the report's summary: a list for Markdown, and tables of checks and causes for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from rich.table import Table
from rich.text import Text

from fleet.report.formatting import clean, status
from fleet.report.summary import describe_cause, pci_slots, select_causes
from fleet.report.tables import timing
from fleet.report.terminal import plain_table, render_blocks
from schemas.reports import FAIL, INCONCLUSIVE, PASS, FleetReport, LineKind, SummaryLine

RULE = "=" * 50
LINE_LIMIT = 600
_STYLES = {PASS: "green", FAIL: "bold red", INCONCLUSIVE: "yellow"}
_NOT_FACTS = (LineKind.CHECK, LineKind.REASON, LineKind.MORE)
"""Kinds of lines that are not in the table of facts: checks have a table, the table of causes replaces the reasons, and MORE is
text below the tables."""


def render_summary(report: FleetReport) -> str:
    """Return status and summary as a list, for Markdown. Control characters and line breaks in texts from hosts are removed."""
    lines = [f"- {clean(line, LINE_LIMIT)}" for line in report.acceptance.summary]
    time = timing.summary_line(report)
    lines += [f"- Time: {clean(time, LINE_LIMIT)}"] if time else []
    return "\n".join([RULE, f"FINAL ACCEPTANCE: {clean(status(report))}", *lines, RULE])


def render_screen(report: FleetReport, *, width: int | None = None, colour: bool = False) -> str:
    """Return status and summary as tables for a terminal, cleaned like `render_summary`.

    Args:
        report: the report.
        width: columns of the terminal, at which text is wrapped; None: one row is one line of any length.
        colour: whether to colour the results.
    """
    state = {"accepted": PASS, "rejected": FAIL}.get(report.decision, INCONCLUSIVE)
    head = Text.assemble("FINAL ACCEPTANCE: ", (clean(status(report)), _STYLES[state]))
    blocks = [Text(RULE), head, *summary_blocks(report), Text(RULE)]
    return render_blocks(blocks, width=width, colour=colour)


def summary_blocks(report: FleetReport, *, without: Collection[str] = ()) -> list[Table | Text]:
    """Return the blocks under the status: facts, checks, causes. `without`: kinds of lines to leave out."""
    lines = [line for line in report.acceptance.lines if line.kind not in without]
    facts = [line for line in lines if line.kind not in _NOT_FACTS]
    tables = [
        _facts(facts, timing.summary_line(report)),
        _checks(line for line in lines if line.kind == LineKind.CHECK),
        _causes(report),
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
    for line in lines:
        table.add_row(clean(line.title), Text(clean(line.text), style=_STYLES.get(line.verdict, "")), _affected(line))
    return table


def _affected(line: SummaryLine) -> str:
    """Return `1/504 GPUs, 2/64 hosts`."""
    counts = (
        (line.values.get(key), line.values.get(f"{key}_total"), name)
        for key, name in (("gpus", "GPUs"), ("hosts", "hosts"))
    )
    return ", ".join(f"{count}/{total} {name}" for count, total, name in counts if count)


def _causes(report: FleetReport) -> Table:
    slots = pci_slots((host.name, gpu) for host in report.hosts for gpu in host.gpus)
    table = plain_table("RESULT", "ACTION", "CAUSE")
    for cause in select_causes(report.causes)[0]:
        text = describe_cause(cause, report.verdicts[cause.verdicts[0]], slots)
        what = Text.assemble(clean(text.what, LINE_LIMIT), (f" [{clean(text.checks)}]", "dim"))
        table.add_row(Text(text.result, style=_STYLES[cause.verdict]), text.action, what)
    return table
