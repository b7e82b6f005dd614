"""Test the estimate of how long a run takes, and the duration of the profile `extended`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.planning.begin import begin
from fleet.planning.duration import earlier_durations, estimate_duration
from fleet.planning.plan import make_plan, read_profile
from fleet.planning.stage_times import duration_s
from fleet.planning.test_selection import PastRun
from schemas.durations import END_S, START_S, expected_durations, stage_s
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.records import to_json
from tests import builders

PLAN = builders.plan("h1", "h2", profile="smoke")
PAST = PastRun(
    run_id="r0",
    began="2026-11-01T00:00:00Z",
    profile="smoke",
    cost_s={(stage.name, name): 2.0 for stage in PLAN.stages for name in stage.benchmarks},
    settings={(stage.name, name): chosen for stage in PLAN.stages for name, chosen in stage.benchmarks.items()},
    devices=2,
)
LAUNCH_S = START_S + END_S


def test_times_of_the_catalogue_are_used_without_an_earlier_run() -> None:
    estimate = estimate_duration(PLAN, None)
    assert estimate.stages_s == {
        stage.name: stage_s(expected_durations(PLAN, PLAN.hosts[0], stage)) for stage in PLAN.stages
    }
    assert estimate.longest_s == sum(stage.deadline_s for stage in PLAN.stages)
    assert "estimated from the benchmark catalogue" in str(estimate)


def test_times_of_an_earlier_run_replace_the_catalogue() -> None:
    plan = replace(PLAN, durations_s=earlier_durations(PLAN, PAST))
    estimate = estimate_duration(plan, PAST)
    for stage in plan.stages:
        assert estimate.stages_s[stage.name] == LAUNCH_S + 2.0 * len(stage.benchmarks)
    assert str(estimate).endswith("; estimated from the times of run r0")


def test_earlier_times_are_used_only_for_the_same_settings_and_number_of_devices() -> None:
    assert earlier_durations(PLAN, None) == {}
    assert earlier_durations(PLAN, replace(PAST, devices=8)) == {}
    other = {**PAST.settings, ("benchmark", "stress"): {"seconds": 600.0}}
    durations = earlier_durations(PLAN, replace(PAST, settings=other))
    assert "stress" not in durations["benchmark"]
    assert durations["benchmark"]["gemm"] == 2.0


def test_soak_is_estimated_by_its_duration_and_a_rehearsal_by_its_deadlines() -> None:
    soak = replace(PLAN.stages[0], duration_s=3600.0)
    assert estimate_duration(replace(PLAN, stages=(soak,)), None).stages_s == {soak.name: LAUNCH_S + 3600.0}
    rehearsal = estimate_duration(replace(PLAN, rehearsal=True), None)
    assert rehearsal.stages_s == {}
    assert str(rehearsal).startswith("at most ")


def test_resumed_run_keeps_its_expected_times(tmp_path: Any) -> None:
    first = to_json(replace(PLAN, durations_s={"benchmark": {"gemm": 3.0}}))
    assert begin(tmp_path / "r1", first)["durations_s"] == {"benchmark": {"gemm": 3.0}}
    (tmp_path / "r1" / "lock.json").unlink()
    assert begin(tmp_path / "r1", to_json(PLAN))["durations_s"] == {"benchmark": {"gemm": 3.0}}


def test_playbook_resumes_a_run_that_rackproof_plan_began(tmp_path: Any) -> None:
    begin(tmp_path / "r1", to_json(PLAN))
    assert "begun_by" not in begin(tmp_path / "r1", to_json(replace(PLAN, begun_by="acceptance")))


def test_resume_with_another_duration_is_refused(tmp_path: Any) -> None:
    begin(tmp_path / "r1", to_json(extended(8, "20m")))
    (tmp_path / "r1" / "lock.json").unlink()
    assert begin(tmp_path / "r1", to_json(extended(8, "20m")))["stages"]
    (tmp_path / "r1" / "lock.json").unlink()
    with pytest.raises(UsageError, match="was begun with other values of stages"):
        begin(tmp_path / "r1", to_json(extended(8, "30m")))


# --- rackproof_extended_duration


def extended(gpu_count: int, duration: str | None, gang: str = "none") -> Plan:
    """Return a plan of the profile `extended`. `duration`: rackproof_extended_duration; None: not set."""
    variables = {"rackproof_extended_duration": duration} if duration else {}
    return builders.plan("h1", "h2", profile="extended", gpu_count=gpu_count, rackproof_gang=gang, **variables)


def expected_total_s(plan: Plan) -> float:
    """Return how many seconds all stages of the plan are expected to take."""
    return sum(stage_s(expected_durations(plan, plan.hosts[0], stage)) for stage in plan.stages)


@pytest.mark.parametrize("gang", ["none", "rack"])
@pytest.mark.parametrize("gpu_count", [1, 2, 8])
@pytest.mark.parametrize(("duration", "seconds"), [(None, 3600), ("20m", 1200), ("8h", 28800)])
def test_profile_extended_takes_the_duration_of_the_inventory_or_else_an_hour(
    gpu_count: int, duration: str | None, seconds: float, gang: str
) -> None:
    plan = extended(gpu_count, duration, gang)
    assert expected_total_s(plan) == pytest.approx(seconds, rel=0.01)
    stage, usual = plan.stage("benchmark"), extended(gpu_count, None, gang).stage("benchmark")
    slack = stage.deadline_s - stage_s(expected_durations(plan, plan.hosts[0], stage))
    assert slack == pytest.approx(usual.deadline_s - 3600, rel=0.4), (
        "the deadline must change by about as much as the duration"
    )
    assert slack > 900, "the deadline must be more than 15 minutes after the expected end"


def test_time_budgets_keep_their_ratio_and_other_settings_their_value() -> None:
    short, long = (extended(8, duration).stage("benchmark").benchmarks for duration in ("20m", "8h"))
    for name, key in (("stress", "seconds"), ("digest", "seconds"), ("host_compute", "seconds")):
        assert long[name][key] / short[name][key] == pytest.approx(
            long["stress"]["seconds"] / short["stress"]["seconds"], rel=0.01
        )
    assert short["stress"]["settle_seconds"] == long["stress"]["settle_seconds"]
    assert short["gemm"] == long["gemm"]


def test_too_short_duration_is_refused_and_the_shortest_possible_duration_is_named() -> None:
    with pytest.raises(
        UsageError, match=r"rackproof_extended_duration 1 min 00 s: .* give at least ([0-9]+)m"
    ) as error:
        extended(8, "1m")
    shortest = str(error.value).rpartition(" ")[2]
    assert expected_total_s(extended(8, shortest)) == pytest.approx(int(shortest[:-1]) * 60, rel=0.01)


@pytest.mark.parametrize("duration", ["0s", "32d"])
def test_duration_out_of_range_is_refused(duration: str) -> None:
    with pytest.raises(UsageError, match=f"rackproof_extended_duration {duration}: give more than 0 and at most 31 d"):
        extended(8, duration)


def test_profile_with_a_duration_out_of_range_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^duration_s 0 of the profile: give more than 0 and at most 31 d"):
        duration_s({}, "rackproof_extended_duration", 0.0)


def test_extended_duration_does_not_change_other_profiles() -> None:
    assert builders.plan(rackproof_extended_duration="8h").stages == builders.plan().stages


@pytest.mark.parametrize("scaled", [{"gemm": ["seconds"]}, {"stress": ["size"]}, {"no_such": ["seconds"]}])
def test_profile_may_scale_only_a_time_budget_that_the_stage_sets(scaled: Any, tmp_path: Any) -> None:
    file = tmp_path / "mine.yml"
    file.write_text(
        "---\nschema: rackproof.profile/1\nsummary: mine\ndevice: gpu\nduration_s: 600\nstages:\n  benchmark:\n"
        "    deadline_s: 900\n    collective_timeout_s: 60\n    benchmarks: {stress: {size: 64}, gemm: {}}\n"
        f"    scaled: {scaled}\n"
    )
    with pytest.raises(UsageError, match="not a time budget that the stage sets"):
        read_profile(str(file))


def test_profile_with_a_duration_must_have_a_setting_that_scales_with_it() -> None:
    profile = read_profile("standard") | {"duration_s": 600}
    with pytest.raises(UsageError, match="scales no setting"):
        make_plan(
            profile, builders.inventory(rackproof_gpu_count=1), run_id="r1", nonce="0" * 32, created=builders.WHEN
        )


def test_time_budget_of_verbs_is_scaled_to_whole_seconds() -> None:
    """perftest, which `verbs` runs, refuses fractions of a second."""
    stage = {
        "deadline_s": 900,
        "collective_timeout_s": 60,
        "benchmarks": {"verbs": {"seconds": 1}, "stress": {"seconds": 10.0}},
        "scaled": {"verbs": ["seconds"], "stress": ["seconds"]},
    }
    profile = read_profile("standard") | {"duration_s": 333, "stages": {"benchmark": stage}}
    hosts = builders.inventory(rackproof_gpu_count=1, rackproof_infiniband_ports=1)
    plan = make_plan(profile, hosts, run_id="r1", nonce="0" * 32, created=builders.WHEN)
    seconds = plan.stage("benchmark").benchmarks["verbs"]["seconds"]
    assert type(seconds) is int
    assert seconds > 1
