"""Set the kind of a verdict on an observation that was not measured."""

from __future__ import annotations

from dataclasses import replace

from schemas.records import SKIPPED, Observation
from schemas.reports import Verdict, VerdictKind
from schemas.skips import user_of


def with_absence(verdict: Verdict, observation: Observation) -> Verdict:
    """Return the inconclusive verdict with the status of the observation as its kind.

    If the observation was skipped because the host is in use, the kind is `in_use`, and `user` states what uses the host.
    """
    user = user_of(observation.reason) if observation.status == SKIPPED else ""
    return replace(verdict, kind=VerdictKind.IN_USE if user else observation.status, user=user)
