"""Render the report's summary for a terminal."""

from __future__ import annotations

from fleet.report.formatting import clean, status
from fleet.report.tables import timing
from schemas.reports import FleetReport

RULE = "=" * 50
LINE_LIMIT = 600


def render_summary(report: FleetReport) -> str:
    """Return the final acceptance in a few lines, without control characters or line breaks from hosts."""
    lines = [f"- {clean(line, LINE_LIMIT)}" for line in report.acceptance.summary]
    time = timing.summary_line(report)
    lines += [f"- Time: {clean(time, LINE_LIMIT)}"] if time else []
    return "\n".join([RULE, f"FINAL ACCEPTANCE: {clean(status(report))}", *lines, RULE])
