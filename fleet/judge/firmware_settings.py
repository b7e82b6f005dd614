"""Attribute failures to a setting of the firmware (BIOS) that differs from the other hosts: SMT, or the number of NUMA nodes.

With another setting, a host has other numbers of processors or NUMA nodes, although it has the same hardware.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleet.judge.host_view import HostView
from fleet.judge.uniformity import ValueGroups, uniform
from schemas.reports import FAIL, PASS, Verdict, VerdictKind


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of the firmware."""

    reading: str
    """Reading that shows the setting."""
    hardware: tuple[str, ...]
    """Readings that are the same with either value of the setting if the hardware is the same."""
    effects: tuple[str, ...]
    """Readings and figures that the setting changes."""
    remedy: str


SMT = Setting(
    reading="host.cpu.smt",
    hardware=("host.cpu.cores",),
    effects=("host.cpu.count", "host.cpu.threads"),
    remedy=(
        "the host has as many cores as the others, but another setting of SMT (hyper-threading): correct it in the BIOS or on "
        "the kernel command line, and measure again"
    ),
)
NUMA = Setting(
    reading="host.numa.count",
    hardware=("host.cpu.sockets", "host.memory.total"),
    effects=("host.numa.count", "host.numa.memory_total", "host_memory.nodes", "host_memory.bandwidth"),
    remedy=(
        "the host has as many sockets and as much memory as the others, but another number of NUMA nodes: correct the setting in "
        "the BIOS (NPS of AMD, SNC of Intel) or, for a virtual machine, in its hypervisor, and measure again"
    ),
)


def with_firmware_settings(view: HostView, verdicts: Sequence[Verdict], groups: ValueGroups) -> list[Verdict]:
    """Return the verdicts on one host. Failures that follow from a setting of the firmware get the action `configure`."""
    annotated = list(verdicts)
    for setting in (SMT, NUMA):
        if _differs(setting, verdicts) and all(_is_same(view, name, groups) for name in setting.hardware):
            annotated = [_annotate(verdict, setting) for verdict in annotated]
    return annotated


def _differs(setting: Setting, verdicts: Sequence[Verdict]) -> bool:
    return any(
        item.verdict == FAIL and item.name == setting.reading and item.kind == VerdictKind.PEERS for item in verdicts
    )


def _is_same(view: HostView, name: str, groups: ValueGroups) -> bool:
    """Return whether a criterion compares this reading with the other hosts, and the host has neither less nor more than they."""
    compared = [
        (criterion.within, verdict)
        for criterion in view.criteria().values()
        if criterion.same_as_fleet and criterion.name == name
        for verdict in uniform(view, criterion, groups)
    ]
    return bool(compared) and all(
        verdict.verdict == PASS and _is_near(verdict, tolerance) for tolerance, verdict in compared
    )


def _is_near(verdict: Verdict, tolerance: float) -> bool:
    value, limit = verdict.value, verdict.limit
    return (
        isinstance(value, int | float)
        and isinstance(limit, int | float)
        and math.isclose(value, limit, rel_tol=tolerance)
    )


def _annotate(verdict: Verdict, setting: Setting) -> Verdict:
    if verdict.verdict != FAIL or verdict.name not in setting.effects:
        return verdict
    detail = "; ".join(filter(None, (verdict.detail, setting.remedy)))
    reason = f"{verdict.reason}; {setting.remedy}"
    return replace(verdict, reason=reason, detail=detail, action="configure", severity="")
