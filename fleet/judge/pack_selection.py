"""Which packs judge a host, and which criteria they come to."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.judge.bounded_cache import Bounded
from fleet.judge.criteria import Criterion, Pack
from schemas.plans import Plan, PlannedHost
from schemas.records import Gpu

_CRITERIA: Bounded[tuple[int, ...], tuple[list[Pack], dict[str, Criterion]]] = Bounded(64)
"""By the packs themselves, which are kept so that no other is mistaken for one of them."""


def criteria_of(packs: list[Pack]) -> dict[str, Criterion]:
    """The criteria of these packs by their ids, the last of each."""
    key = tuple(map(id, packs))
    if key not in _CRITERIA:
        _CRITERIA[key] = packs, {item.id: item for pack in packs for item in pack.criteria}
    return _CRITERIA[key][1]


def packs_for(plan: Plan, host: PlannedHost, gpus: Sequence[Gpu], packs: Sequence[Pack]) -> tuple[list[Pack], str]:
    """The packs that judge `host`, and why none of them is for its GPU model (empty where one is)."""
    named = [pack for pack in packs if pack.chosen]
    packs = [pack for pack in packs if not pack.chosen]
    if plan.rehearsal:
        return [*(pack for pack in packs if pack.name == "rehearsal"), *named], ""
    found = sorted({gpu.name for gpu in gpus})
    if host.gpu_model:
        model = [pack for pack in packs if pack.name == host.gpu_model]
    else:
        model = [pack for pack in packs if found and set(found) <= set(pack.gpu_names)]
    common = [pack for pack in packs if pack.name == "common"]
    if len(model) == 1:
        return [*model, *named], ""
    what = host.gpu_model or ", ".join(found) or "a GPU that nobody saw"
    return [*common, *named], f"no criteria pack for {what}"
