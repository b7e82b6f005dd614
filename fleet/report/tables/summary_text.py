"""The report's summary for a terminal."""

from __future__ import annotations

from fleet.report.formatting import clean, status
from fleet.report.tables import timing
from schemas.reports import FleetReport

RULE = "=" * 50
LINE_LIMIT = 600


def render_summary(report: FleetReport) -> str:
    """The final acceptance in a few lines. What hosts say in it can neither steer the terminal nor begin a line."""
    lines = [f"- {clean(line, LINE_LIMIT)}" for line in report.acceptance.summary]
    time = timing.line(report)
    lines += [f"- Time: {clean(time, LINE_LIMIT)}"] if time else []
    return "\n".join([RULE, f"FINAL ACCEPTANCE: {clean(status(report))}", *lines, RULE])
