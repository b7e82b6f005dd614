"""Which observations a criterion is for."""

from __future__ import annotations

from fleet.judge.criteria import Criterion
from schemas.records import Observation
from schemas.scopes import Scope


def concerns(criterion: Criterion, seen: Observation) -> bool:
    """Whether the criterion is for an observation of that scope, stage and parameters."""
    scope = Scope.parse(seen.scope)
    if criterion.scope and criterion.scope != scope.kind:
        return False
    if criterion.stage and criterion.stage != seen.stage:
        return False
    return all(seen.params.get(key, scope.labels.get(key)) == value for key, value in criterion.where.items())
