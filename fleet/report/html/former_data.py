"""Add to the pages of the hosts how their figures compare with those of former runs."""

from __future__ import annotations

from typing import Any

from fleet.report.html.text_table import TextTable, as_json
from fleet.report.tables.former_runs import rows_by_host
from schemas.reports import ACCEPTED, FleetReport


def add_former_runs(report: FleetReport, table: TextTable, pages: dict[str, Any], budget: int) -> None:
    """Add the comparisons with former runs to `pages`, in at most `budget` bytes. Hosts that are not accepted come first."""
    by_host = rows_by_host(report)
    for number, host in sorted(enumerate(report.hosts), key=lambda item: item[1].decision == ACCEPTED):
        page = pages.get(str(number))
        if page is None or host.name not in by_host:
            continue
        mark = table.mark()
        rows = [
            [*table.numbers((row.name, row.settings, row.part, row.place, row.trend)), row.line]
            for row in by_host[host.name]
        ]
        size = len(as_json(rows).encode()) + table.size - mark[1] + len(',"former":')
        if size > budget:
            table.restore(mark)
            rows, size = [], len(',"former":[]')
        page["former"] = rows  # if empty, the page names the command that adds the comparisons
        budget -= size
