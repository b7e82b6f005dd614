"""If the inventory has a floor (a minimum) for shared storage, check that the total bandwidth of all clients was measured.

The clients are the hosts that measure the shared directory. The plan does not list the total as an expected figure, so no other
check requires it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fleet.judge.host_view import HostView
from schemas.records import MEASURED
from schemas.reports import Verdict
from schemas.scopes import Scope

BANDWIDTH, TOGETHER = "shared_storage.bandwidth", "shared_storage.aggregate_bandwidth"


def silent_totals(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each directory and operation (read or write) without a total of all clients.

    Operations without a floor in the inventory are skipped. If the bandwidth of this client was not measured, the operation is
    skipped too, because another check reports that.
    """
    totals = {
        (item.stage, Scope.parse(item.scope).get("directory"), item.params.get("op"))
        for item in view.observations[TOGETHER]
    }
    for item in view.observations[BANDWIDTH]:
        directory, op = Scope.parse(item.scope).get("directory"), item.params.get("op")
        if (
            f"shared_{op}" in view.host.storage_floors
            and item.status == MEASURED
            and (item.stage, directory, op) not in totals
        ):
            reason = "the bandwidth of this client was measured, but the record has no total of all clients"
            yield view.inconclusive(TOGETHER, item.scope, reason, item.stage, {"op": op})
