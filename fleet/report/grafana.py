"""Link from the report to the dashboard of the run (deploy/grafana/dashboards/rackproof-run.json)."""

from __future__ import annotations

from urllib.parse import urlencode

from schemas.reports import FleetReport
from schemas.times import epoch_seconds

DASHBOARD = "rackproof-run"
MARGIN_S = 60
"""Time shown before the beginning and after the end of the run."""


def run_dashboard(report: FleetReport, grafana_url: str) -> str:
    """Return the URL of the dashboard at the time of the run; empty if no Grafana is configured.

    If the report lacks a valid time, the URL names the run but no time.
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
