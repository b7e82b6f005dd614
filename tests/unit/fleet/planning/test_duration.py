"""Test the estimate of how long a run takes."""

from __future__ import annotations

from dataclasses import replace

from fleet.planning.duration import estimate_duration
from fleet.planning.test_selection import START_S, PastRun
from schemas.catalogue import BENCHMARKS
from tests import builders

PLAN = builders.plan("h1", "h2", profile="smoke")


def test_without_earlier_runs_the_catalogue_gives_the_times() -> None:
    estimate = estimate_duration(PLAN, None)
    assert estimate.stages_s == {
        stage.name: START_S + sum(BENCHMARKS[name].cost_s for name in stage.benchmarks) for stage in PLAN.stages
    }
    assert estimate.longest_s == sum(stage.deadline_s for stage in PLAN.stages)
    assert "times of profile standard on four GPUs; the tests of this profile may take a different time" in str(
        estimate
    )


def test_times_of_an_earlier_run_replace_the_catalogue() -> None:
    stage = PLAN.stages[0]
    past = PastRun(
        run_id="r0",
        began="2026-11-01T00:00:00Z",
        profile="smoke",
        cost_s={(stage.name, name): 2.0 for name in stage.benchmarks},
    )
    estimate = estimate_duration(PLAN, past)
    assert estimate.stages_s[stage.name] == START_S + 2.0 * len(stage.benchmarks)
    assert str(estimate).endswith("; times of run r0")


def test_soak_takes_its_duration_and_a_rehearsal_has_only_deadlines() -> None:
    soak = replace(PLAN.stages[0], duration_s=3600.0)
    assert estimate_duration(replace(PLAN, stages=(soak,)), None).stages_s == {soak.name: START_S + 3600.0}
    rehearsal = estimate_duration(replace(PLAN, rehearsal=True), None)
    assert rehearsal.stages_s == {}
    assert str(rehearsal).startswith("at most ")
