"""Report the parts that have no accepted record, if the plan compares the run with a baseline.

A baseline is a set of accepted records of hosts and GPUs. `rackproof baseline accept` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fleet.judge.baseline import CRITERION, SOURCE
from fleet.judge.gpu_identity import identity, identity_text
from fleet.judge.host_view import HostView
from fleet.judge.matching import matches
from schemas.baselines import PartBaseline
from schemas.records import MEASURED, Gpu
from schemas.reports import Verdict, VerdictKind

NO_FIGURES = "none of the figures that are compared in this run"


def judge_presence(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each part without an accepted record. The parts are the host and its GPUs under test.

    A part also gets a verdict if its record has none of the figures that are compared in this run.

    If the baseline cannot be used, the host gets one verdict that states why, and the GPUs get none.
    """
    if view.plan.baseline is None:
        return
    accepted = view.evidence.baseline
    problem = accepted.problem if accepted else "the baseline was not read"
    if problem or accepted is None:
        yield _absent(view, "host", problem)
        return
    if accepted.host is None:
        yield _absent(view, "host", f"no accepted record of host {view.host.name} in {view.plan.baseline.directory}")
    without_figures = _without_figures(view)
    if accepted.host is not None and "" in without_figures:
        yield _absent(view, "host", f"the accepted record of host {view.host.name} has {NO_FIGURES}")
    for gpu in view.gpus if view.host.device == "gpu" else ():
        scope = f"gpu={gpu.index}"
        part, name = view.accepted.part(scope), identity_text(gpu, view.accepted.shared)
        if scope in view.host.scopes and part not in accepted.gpus:
            yield _absent(view, scope, f"no accepted record of {name}{_replaced(view, gpu, accepted.host)}")
        elif scope in view.host.scopes and part in without_figures:
            yield _absent(view, scope, f"the accepted record of {name} has {NO_FIGURES}")


def _without_figures(view: HostView) -> set[str]:
    """Return the parts that have figures to compare, none of which is in an accepted record.

    A part is the `identity` of a GPU, or empty for the host.
    """
    has_figure: dict[str, bool] = {}
    for criterion in view.criteria().values():
        if criterion.baseline is None:
            continue
        for name in criterion.matched(view.observations):
            for observation in view.observations[name]:
                part = view.accepted.part(observation.scope)
                measured = observation.status == MEASURED and matches(criterion, observation)
                if measured and not has_figure.get(part):
                    has_figure[part] = view.accepted.level(observation) is not None
    return {part for part, has_accepted in has_figure.items() if not has_accepted}


def _replaced(view: HostView, gpu: Gpu, host: PartBaseline | None) -> str:
    """Return which GPU was accepted in the slot of this GPU, as the end of a sentence; empty if it is this GPU or unknown."""
    of_slot = [other for other in host.gpus if gpu.pci_bus_id and other.pci_bus_id == gpu.pci_bus_id] if host else []
    before, now = (identity(item, view.accepted.shared) for item in (of_slot[0] if of_slot else gpu, gpu))
    return f": this GPU replaces {before}" if before and before != now else ""


def _absent(view: HostView, scope: str, why: str) -> Verdict:
    remedy = "measure the part in a full run without rackproof_baseline, then run `rackproof baseline accept`"
    verdict = view.inconclusive(CRITERION, scope, f"{why}; {remedy}")
    return replace(verdict, kind=VerdictKind.NO_BASELINE, criterion=CRITERION, source=SOURCE)
