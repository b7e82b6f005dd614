"""Links within the report page."""

from __future__ import annotations

from urllib.parse import quote

from fleet.report.formatting import clean
from schemas.reports import FleetReport


def host_anchor(host: str) -> str:
    """Return the URL fragment of a host's page: `host=NAME`, percent-encoded."""
    return f"host={quote(clean(host), safe='')}"


def host_anchors(report: FleetReport) -> dict[str, str]:
    """Return the URL fragment of every host's page, by host name."""
    return {host.name: host_anchor(host.name) for host in report.hosts}
