"""Decide which observations a criterion applies to."""

from __future__ import annotations

from fleet.judge.criteria import Criterion
from schemas.records import Observation
from schemas.scopes import Scope


def matches(criterion: Criterion, observation: Observation, *, any_stage: bool = False) -> bool:
    """Return whether the criterion is for the scope, stage and parameters of this observation.

    The caller must already have matched the name (`Criterion.matches_name`).
    """
    scope = Scope.parse(observation.scope)
    if criterion.scope and criterion.scope != scope.kind:
        return False
    if criterion.stage and not any_stage and criterion.stage != observation.stage:
        return False
    if not criterion.where:
        return True
    return all(observation.params.get(key, scope.labels.get(key)) == value for key, value in criterion.where.items())
