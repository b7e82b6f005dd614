"""Render the report's summary for a terminal."""

from __future__ import annotations

from fleet.report.formatting import clean, status
from fleet.report.tables import timing
from schemas.reports import FleetReport

RULE = "=" * 50
LINE_LIMIT = 600


def render_summary(report: FleetReport) -> str:
    """Return status and summary lines. Control characters and line breaks in texts from hosts are removed."""
    lines = [f"- {clean(line, LINE_LIMIT)}" for line in report.acceptance.summary]
    time = timing.summary_line(report)
    lines += [f"- Time: {clean(time, LINE_LIMIT)}"] if time else []
    return "\n".join([RULE, f"FINAL ACCEPTANCE: {clean(status(report))}", *lines, RULE])
