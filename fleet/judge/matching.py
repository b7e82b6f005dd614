"""Which observations a criterion is for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fleet.judge.criteria import Criterion
from schemas.records import Observation


def concerns(criterion: Criterion, seen: Observation) -> bool:
    """Whether the criterion is for an observation of that scope, stage and parameters."""
    kind, labels = _parsed(seen.scope)
    if criterion.scope and criterion.scope != kind:
        return False
    if criterion.stage and criterion.stage != seen.stage:
        return False
    return all(seen.params.get(key, labels.get(key)) == value for key, value in criterion.where.items())


@lru_cache(maxsize=16384)
def _parsed(scope: str) -> tuple[str, Mapping[str, str]]:
    """Its kind and its labels."""
    labels = dict(part.split("=", 1) for part in scope.split(",") if "=" in part)
    return scope.rsplit(",", 1)[-1].split("=")[0], labels
