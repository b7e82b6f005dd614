"""Explain a PCIe link of a GPU that is as fast as GPU and slot support, but slower than the GPU's model allows."""

from __future__ import annotations

from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.reading_relations import WHOLES
from schemas.reports import FAIL, Verdict

LINK = ("gpu.pcie.width", "gpu.pcie.generation")
"""Readings of the link. WHOLES has the readings of the highest values that GPU and slot support together."""
REMEDY = "GPU and slot support no more: move the GPU to another slot, or correct the setting of the slot in the BIOS"


def with_slot_limit(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If the link of a GPU fails only because of its slot, the action becomes `configure`.

    A link with a bad contact is below the supported value, so its action does not change.
    """
    if verdict.verdict != FAIL or verdict.name not in LINK:
        return verdict
    if view.observations.last_values(WHOLES[verdict.name]).get(verdict.scope) != verdict.value:
        return verdict
    detail = "; ".join(filter(None, (verdict.detail, REMEDY)))
    return replace(verdict, reason=f"{verdict.reason}; {REMEDY}", detail=detail, action="configure", severity="")
