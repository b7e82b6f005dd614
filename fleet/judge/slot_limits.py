"""Explain a PCIe link of a GPU that is slower than the GPU's model allows, although its contacts are good.

The link may be as fast as GPU and slot support. In a virtual machine, all GPUs of the model may have the same number of lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fleet.judge.host_view import HostView
from fleet.judge.reading_relations import WHOLES
from schemas.records import Value
from schemas.reports import FAIL, Verdict

WIDTH = "gpu.pcie.width"
LINK = (WIDTH, "gpu.pcie.generation")
"""Readings of the link. WHOLES has the readings of the highest values that GPU and slot support together."""
REMEDY = "GPU and slot support no more: move the GPU to another slot, or correct the setting of the slot in the BIOS"


class LaneCounts:
    """The numbers of PCIe lanes that the GPUs of virtual machines use. Objects for different hosts can be merged (`update`)."""

    def __init__(self) -> None:
        self._widths: defaultdict[str, set[Value]] = defaultdict(set)
        """Model of GPU -> the numbers of lanes in all snapshots of virtual machines."""

    def add(self, view: HostView) -> None:
        """Add the GPUs of a host if it is a virtual machine."""
        for _, metric in view.observations.metrics.get(WIDTH, ()) if view.is_virtual else ():
            for scope, width in metric.values.items():
                self._widths[view.names.get(scope, "")].add(width)

    def update(self, other: LaneCounts) -> None:
        """Add the GPUs in the counts of other hosts."""
        for model, widths in other._widths.items():
            self._widths[model] |= widths

    def are_equal(self, model: str) -> bool:
        """Return whether all GPUs of this model had the same number of lanes at all times."""
        return bool(model) and len(self._widths.get(model, ())) == 1


def with_slot_limit(view: HostView, verdict: Verdict, of_host: Sequence[Verdict], lanes: LaneCounts) -> Verdict:
    """Return the verdict. If the link of a GPU fails only because of its slot or instance type, the action becomes `configure`.

    `of_host` are the verdicts on the host. A link with a bad contact is below the supported value, or has fewer lanes than other
    GPUs or than in the accepted record, so its action does not change.
    """
    if verdict.verdict != FAIL or verdict.name not in LINK:
        return verdict
    model = view.names.get(verdict.scope, "")
    is_of_type = view.is_virtual and lanes.are_equal(model) and not _had_more(view, verdict.scope, of_host)
    if is_of_type and verdict.name == WIDTH:
        remedy = (
            f"every {model} in a virtual machine of this run has this number of lanes: the instance type may have no more. "
            "Compare the number with the description of the type: if it is the same, waive the criterion; otherwise, reseat the "
            "GPU"
        )
    elif view.observations.last_values(WHOLES[verdict.name]).get(verdict.scope) == verdict.value:
        remedy = REMEDY
    else:
        return verdict
    detail = "; ".join(filter(None, (verdict.detail, remedy)))
    return replace(verdict, reason=f"{verdict.reason}; {remedy}", detail=detail, action="configure", severity="")


def _had_more(view: HostView, gpu: str, of_host: Sequence[Verdict]) -> bool:
    """Return whether a GPU has fewer lanes than in its accepted record."""
    criteria = view.criteria()
    failed = (item for item in of_host if item.verdict == FAIL and (item.name, item.scope) == (WIDTH, gpu))
    return any(criteria[item.criterion].baseline for item in failed if item.criterion in criteria)
