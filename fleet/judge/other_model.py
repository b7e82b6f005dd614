"""Find failures whose limits are for the GPU model that the inventory names, although the GPU is of another model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from fleet.judge.criteria import Criterion
from fleet.judge.host_view import HostView
from fleet.judge.pack_selection import criteria_by_id
from schemas.reports import FAIL, Verdict, VerdictKind
from schemas.scopes import Scope


def with_other_model(view: HostView, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on one host. A failure by a limit that is not valid for the GPU gets the kind `model`.

    A limit is not valid if it is for the model in the inventory, but a GPU of the verdict is of another model. The failure keeps
    its own kind if all packs of the found models have the same limit: then the GPU fails for its own model, too.

    If all GPUs of the host are of another model, the action becomes `configure`, because no part is at fault.
    """
    others = view.other_models
    if not others:
        return list(verdicts)

    @cache
    def depends_on_model(criterion_id: str, models: frozenset[str]) -> bool:
        criterion = view.criteria().get(criterion_id)
        if criterion is None or criterion.origin in view.operator_packs:
            return False
        found = [criteria_by_id([pack]).get(criterion_id) for pack in view.packs_of(models)]
        return any(item is None or _limit(item) != _limit(criterion) for item in found)

    def judged(verdict: Verdict) -> Verdict:
        scope = Scope.parse(verdict.scope)
        gpus = [verdict.part_scope, scope.device, f"gpu={scope.get('peer')}"]
        models = {others[gpu] for gpu in gpus if gpu in others} if scope.device_kind == "gpu" else {*others.values()}
        if verdict.verdict == FAIL and models and depends_on_model(verdict.criterion, frozenset(models)):
            of_other_model = replace(verdict, kind=VerdictKind.MODEL)
            return (
                replace(of_other_model, action="configure", severity="")
                if view.has_only_other_models
                else of_other_model
            )
        return verdict

    return [judged(verdict) for verdict in verdicts]


def _limit(criterion: Criterion) -> tuple[object, ...]:
    return criterion.operator, criterion.value, criterion.expected, criterion.fraction, criterion.links
