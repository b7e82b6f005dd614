"""Decide which observations a criterion applies to."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fleet.judge.criteria import Criterion
from schemas.records import Observation


def matches(criterion: Criterion, observation: Observation, *, any_stage: bool = False) -> bool:
    """Return whether the criterion is for the scope, stage and parameters of this observation.

    The caller has compared the name (`Criterion.matches_name`).
    """
    kind, labels = _parse(observation.scope)
    if criterion.scope and criterion.scope != kind:
        return False
    if criterion.stage and not any_stage and criterion.stage != observation.stage:
        return False
    if not criterion.where:
        return True
    return all(observation.params.get(key, labels.get(key)) == value for key, value in criterion.where.items())


@lru_cache(maxsize=16384)
def _parse(scope: str) -> tuple[str, Mapping[str, str]]:
    """Return the kind and the labels of a scope."""
    labels = dict(part.split("=", 1) for part in scope.split(",") if "=" in part)
    return scope.rsplit(",", 1)[-1].split("=")[0], labels
