"""Links within the report page."""

from __future__ import annotations

from urllib.parse import quote

from fleet.report.formatting import clean
from schemas.reports import FleetReport
from schemas.scopes import Scope


def host_anchor(host: str) -> str:
    """Return the URL fragment of a host's page: `host=NAME`, without the leading `#`. NAME is percent-encoded."""
    return f"host={quote(clean(host), safe='')}"


def host_anchors(report: FleetReport) -> dict[str, str]:
    """Return host name -> URL fragment of the host's page, for every host."""
    return {host.name: host_anchor(host.name) for host in report.hosts}


def adapter_anchor(host: str, scope: str) -> str:
    """Return the URL fragment of a network adapter's page: `hca=HOST/NAME`; empty if the scope is that of another part.

    If the report has no page for the adapter, the fragment opens the page of the host.
    """
    parsed = Scope.parse(scope)
    name = parsed.get(parsed.device_kind)
    return f"hca={quote(clean(f'{host}/{name}'), safe='')}" if parsed.device_kind in ("hca", "nic") else ""
