"""If an observation was not measured, the kind of its verdict is the status of the observation.

There is one exception. If the observation was skipped because another job uses the host, the kind is `in_use`.
"""

from __future__ import annotations

import pytest

from fleet.judge.absence import with_absence
from schemas.records import ERROR, SKIPPED, UNSUPPORTED, Observation
from schemas.reports import INCONCLUSIVE, Verdict
from schemas.skips import skipped_for


@pytest.mark.parametrize(
    ("status", "reason", "kind", "user"),
    [
        (SKIPPED, skipped_for("job 7"), "in_use", "job 7"),
        (SKIPPED, "no such port", SKIPPED, ""),
        (ERROR, skipped_for("job 7"), ERROR, ""),
        (UNSUPPORTED, "no such type", UNSUPPORTED, ""),
    ],
)
def test_only_a_skipped_observation_shows_that_another_job_uses_the_host(
    status: str, reason: str, kind: str, user: str
) -> None:
    verdict = Verdict(host="h1", scope="host", name="a.b", verdict=INCONCLUSIVE, criterion="plan", reason="why")
    absent = Observation(name="a.b", scope="host", stage="benchmark", unit="1", status=status, reason=reason)
    changed = with_absence(verdict, absent)
    assert (changed.kind, changed.user, changed.reason) == (kind, user, "why")
