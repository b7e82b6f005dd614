"""Differences between virtual machines that the hypervisor chose.

A hypervisor chooses the processors, the memory and the adapters that a virtual machine has. Virtual machines of one instance type
may run on machines of different kinds. Such a difference remains a failure, but no part is to be inspected.
"""

from __future__ import annotations

from dataclasses import replace

from fleet.judge.host_view import HostView
from schemas.reports import FAIL, Verdict, VerdictKind

CHOSEN = ("host.cpu.", "host.memory.total", "host.numa.", "infiniband.", "network.", "pcie.")
"""Prefixes of the names of readings of the hardware that a hypervisor chooses. GPUs are passed through, so they must be alike.
Memory modules are not in the list: in a virtual machine they are not read."""
REMEDY = (
    "a hypervisor chooses this hardware: use one instance type and the same network settings. If virtual machines of one type "
    "still differ, replace one that has less than the others, because its machine may be faulty, and waive a difference in kind"
)


def with_virtual_hardware(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If the hypervisor chose hardware that differs from that of other hosts, the action is `configure`."""
    is_compared = verdict.kind == VerdictKind.PEERS and verdict.action == "inspect_hardware"
    if verdict.verdict != FAIL or not is_compared or not verdict.name.startswith(CHOSEN) or not view.is_virtual:
        return verdict
    detail = "; ".join(filter(None, (verdict.detail, REMEDY)))
    return replace(verdict, reason=f"{verdict.reason}; {REMEDY}", detail=detail, action="configure", severity="")
