"""Events of NVMe controllers that a virtual machine had in no snapshot.

The kernel log keeps the events of a controller that is gone. In a virtual machine, such a controller may have been a volume that
was detached, or that could not be attached, and the log does not show whether it was one. So the events show no lost disk.
"""

from __future__ import annotations

from fleet.judge.host_view import HostView
from schemas.reports import FAIL, Verdict
from schemas.scopes import Scope

EVENTS, CONTROLLERS = "kernel.event.count", "storage.controller.namespaces"
OF_CONTROLLER = "nvme_"
"""Prefix of the names of events of NVMe controllers, except volumes."""
REASON = (
    "no snapshot lists this NVMe controller: it may be a volume that was detached or could not be attached, or a disk that was "
    "lost before the run: compare the disks with those of the instance type, reboot to clear the kernel log, and measure again"
)


def without_detached_volume(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict; inconclusive if it is about a controller that no snapshot of a virtual machine lists."""
    if verdict.verdict != FAIL or verdict.name != EVENTS or not view.is_virtual:
        return verdict
    labels = Scope.parse(verdict.scope).labels
    if "disk" not in labels or not labels.get("event", "").startswith(OF_CONTROLLER):
        return verdict
    controller = f"disk={labels['disk']}"
    metrics = (metric for _, metric in view.observations.metrics.get(CONTROLLERS, ()))
    if any(controller in metric.values or controller in metric.absent for metric in metrics):
        return verdict
    reason = f"{verdict.reason}; {REASON}"
    return view.inconclusive(
        verdict.name, verdict.scope, reason, verdict.stage, verdict.params, view.criteria()[verdict.criterion]
    )
