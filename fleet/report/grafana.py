"""Link from the report to the Grafana dashboard of the run (deploy/grafana/dashboards/rackproof-run.json)."""

from __future__ import annotations

from urllib.parse import urlencode

from schemas.reports import FleetReport
from schemas.times import epoch_seconds

DASHBOARD = "rackproof-run"
MARGIN_S = 60
"""Number of seconds that the dashboard shows before the beginning and after the end of the run."""


def run_dashboard(report: FleetReport, grafana_url: str) -> str:
    """Return the URL of the dashboard, with the run and its time range selected; empty if `grafana_url` is empty.

    If the beginning or the end of the run is not a valid time, the URL has no time range.
    """
    if not grafana_url:
        return ""
    query = {"var-run_id": report.run_id}
    began, ended = _seconds(report.began), _seconds(report.ended)
    if began is not None and ended is not None:
        query |= {"from": str(1000 * (began - MARGIN_S)), "to": str(1000 * (ended + MARGIN_S))}
    return f"{grafana_url.rstrip('/')}/d/{DASHBOARD}?{urlencode(query)}"


def _seconds(when: str) -> int | None:
    try:
        return int(epoch_seconds(when))
    except ValueError:
        return None
