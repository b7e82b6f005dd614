"""Why an observation has no value, as the kind of the verdict on it."""

from __future__ import annotations

from dataclasses import replace

from schemas.records import SKIPPED, Observation
from schemas.reports import Verdict, VerdictKind
from schemas.skips import user_of


def with_absence(verdict: Verdict, observation: Observation) -> Verdict:
    """Return the inconclusive verdict on an observation that was not measured with its kind: the status, or that others use
    the host.
    """
    user = user_of(observation.reason) if observation.status == SKIPPED else ""
    return replace(verdict, kind=VerdictKind.IN_USE if user else observation.status, user=user)
