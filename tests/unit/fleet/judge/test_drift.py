"""Test verdicts on soaks: the drift of rates, its start and end, and incomplete soaks.

A soak is a stage that repeats benchmarks in rounds for a planned time. A bucket is a time interval of a soak: the record has one
mean of each figure for it. The soaks of these tests have only a few buckets.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from fleet.criteria_lint.checked_packs import checked_packs
from fleet.judge.drift import (
    RateCourse,
    ended_early,
    format_clock,
    is_rate,
    judge_soak,
    rate_course,
    rates_without_drift,
    with_drift_observations,
    with_drift_time,
)
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from schemas.plans import Plan
from schemas.records import Launch
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from schemas.stages import SOAK
from schemas.timeline import Series, Soak, Timeline
from schemas.times import format_span
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack
from tests.unit.fleet.judge.test_stated import pack_of

RATE = "stress.throughput"
HOUR = 3600.0


def series(
    *means: float, name: str = RATE, scope: str = "gpu=0", unit: str = "FLOP/s", n: Any = 1, **params: Any
) -> Series:
    """Return a series with a bucket for each of `means`. `n`: samples in each bucket; a tuple has a number for each bucket."""
    counts = n if isinstance(n, tuple) else (n,) * len(means)
    return Series(
        name=name, scope=scope, unit=unit, params=params, at=tuple(range(len(means))), n=counts, low=means, mean=means, high=means
    )  # fmt: skip


def soak(*all_series: Series, width: float = 60.0, planned: float = 600.0, **over: Any) -> Soak:
    fields = {
        "began": builders.WHEN, "planned_s": planned, "soaked_s": planned, "finished": 10, "ended": builders.WHEN,
        "timeline": Timeline(bucket_s=width, series=all_series),
    }  # fmt: skip
    return Soak(**{**fields, **over})


def rate_levels(one: Series, **over: Any) -> list[float] | None:
    """Return the levels of a rate as shares of its mean in the reference period, or None if its drift cannot be evaluated."""
    course = rate_course(one, soak(one, **over))
    return None if course is None else [round(level, 3) for level in course.levels(3)]


def test_level_is_the_median_of_three_buckets_relative_to_the_start() -> None:
    """The start of a rate is its mean in the reference period, which is the first bucket here."""
    assert rate_levels(series(100, 90, 80, 70, 60, 50, 40, 30, 20, n=3)) == [0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    assert rate_levels(series(100, 100, 10, *(100,) * 6, n=3)) == [1.0] * 6
    course = rate_course(series(200, 90, 80, 70, 60, 50, 40, 30, 20, n=3), soak(width=60.0))
    assert course is not None
    assert (course.start, course.shares[0]) == (200, (60.0, 120.0, 0.45))


@pytest.mark.parametrize(
    ("means", "n", "expected"),
    [
        ((100,) * 8, 1, False), ((100,) * 9, 1, True), ((100,) * 6, 2, True), ((100,) * 5, 9, False),
        ((0,) * 9, 1, False), ((-1,) * 9, 1, False), ((), 1, False),
    ],
)  # fmt: skip
def test_drift_needs_nine_values_in_six_buckets_and_a_positive_start(
    means: tuple[float, ...], n: int, expected: bool
) -> None:
    assert (rate_course(series(*means, n=n), soak()) is not None) is expected


@pytest.mark.parametrize(
    ("planned", "width", "start"),
    [
        (600.0, 60.0, 10.0), (600.0, 30.0, 15.0), (1200.0, 60.0, 15.0), (600.0, 120.0, 10.0), (1210.0, 60.0, 20.0),
        (10 * HOUR, HOUR / 2, 15.0), (100 * HOUR, HOUR / 2, 15.0), (100 * HOUR, HOUR, 10.0),
    ],
)  # fmt: skip
def test_start_of_a_rate_is_its_mean_over_the_first_hour_or_the_first_tenth(
    planned: float, width: float, start: float
) -> None:
    """The shorter of the two periods is used, with every bucket that begins in it.

    `planned`: duration of the soak, and `width`: duration of a bucket, in seconds.
    """
    course = rate_course(series(10, 20, 30, 40, 50, 60, 70, 80, 90, n=3), soak(planned=planned, width=width))
    assert course is not None
    assert course.start == start


@pytest.mark.parametrize(("n", "start"), [(1, 20.0), (2, 15.0), (3, 10.0), ((1, 5, *(1,) * 7), 110 / 6)])
def test_start_of_a_rate_is_the_mean_of_at_least_three_values(n: Any, start: float) -> None:
    """The first tenth of the soak is one bucket. `n`: values in each bucket."""
    course = rate_course(series(10, 20, 30, 40, 50, 60, 70, 80, 90, n=n), soak())
    assert course is not None
    assert course.start == pytest.approx(start)


def simulated(seed: int, buckets: int, deviation: float, fall: float = 0.0) -> float:
    """Return the drift of a rate with normally distributed values, which falls by the share `fall` in the middle of the soak."""
    noise = random.Random(seed)  # noqa: S311 - reproducible
    means = [(1 - fall * (at >= buckets / 2)) * noise.gauss(100.0, deviation * 100) for at in range(buckets)]
    course = rate_course(series(*means), soak(planned=buckets * 60.0))
    assert course is not None
    return course.lowest


@pytest.mark.parametrize("buckets", [9, 24, 37, 120, 240])
def test_random_variation_of_a_rate_is_no_drift(buckets: int) -> None:
    """On healthy H200, the rate of the training varies by 7 % from round to round."""
    drifts = [simulated(seed, buckets, 0.07) for seed in range(40)]
    assert min(drifts) > 0.9


@pytest.mark.parametrize(
    ("buckets", "deviation", "fall", "limit"),
    [(240, 0.07, 0.22, 0.9), (240, 0.003, 0.05, 0.96), (37, 0.003, 0.05, 0.97), (9, 0.003, 0.06, 0.97), (120, 0.04, 0.2, 0.9)],
)  # fmt: skip
def test_fall_that_is_larger_than_the_variation_is_a_drift(
    buckets: int, deviation: float, fall: float, limit: float
) -> None:
    drifts = [simulated(seed, buckets, deviation, fall) for seed in range(40)]
    assert max(drifts) < limit
    assert statistics.median(drifts) > 1 - 1.1 * fall


MEASURED_ROUNDS = (1.0, 0.84, 0.988, 0.818, 0.956, 0.615, 0.762, 0.84, 0.753, 0.955, 0.719, 0.687, 0.803)
"""Rates of `training` in the rounds of a soak of a healthy H200 (docs/measurements/h200x1-burnin-long), relative to the first."""
ROUNDS_PER_HOUR = 24


def training_drift(seed: int, hours: int, fall: float = 0.0) -> float:
    """Return the drift of `training` on a healthy GPU: its rate keeps a level of 0.71 to 1.30 for one, two or four hours.

    It falls by the share `fall` in the middle of the soak.
    """
    draw, count, rates = random.Random(seed), hours * ROUNDS_PER_HOUR, list[float]()  # noqa: S311 - reproducible
    while len(rates) < count:
        level = draw.choice([0.71, 0.85, 1.0, 1.15, 1.30])
        rates += [level * draw.choice(MEASURED_ROUNDS) for _ in range(draw.choice([1, 2, 4]) * ROUNDS_PER_HOUR)]
    rates = [rate * (1 - fall * (at >= count / 2)) for at, rate in enumerate(rates[:count])]
    rounds_per_bucket = max(1, count // 240)
    means = [statistics.fmean(rates[at : at + rounds_per_bucket]) for at in range(0, count, rounds_per_bucket)]
    width = rounds_per_bucket * HOUR / ROUNDS_PER_HOUR
    course = rate_course(series(*means, n=rounds_per_bucket), soak(planned=hours * HOUR, width=width))
    assert course is not None
    return course.lowest


@pytest.fixture(scope="module")
def training_limit() -> float:
    (value,) = {rule.value for pack in checked_packs([]) for rule in pack.criteria if rule.id == "drift-training"}
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("hours", [1, 3, 6, 12, 24])
def test_training_of_a_healthy_host_whose_level_changes_for_hours_is_within_its_limit(
    hours: int, training_limit: float
) -> None:
    assert min(training_drift(seed, hours) for seed in range(60)) >= training_limit


@pytest.mark.parametrize("hours", [6, 12, 24])
def test_training_that_falls_by_90_percent_is_found(hours: int, training_limit: float) -> None:
    assert sum(training_drift(seed, hours, 0.9) < training_limit for seed in range(60)) >= 57


def erratic(slow: float) -> Series:
    """Return a steady rate. From its 24th value on, every second value is multiplied by `slow`."""
    noise = random.Random(1)  # noqa: S311 - reproducible
    return series(*(noise.gauss(100.0, 0.3) * (slow if at > 22 and at % 2 else 1.0) for at in range(192)))


@pytest.mark.parametrize("slow", [0.3, 0.6, 0.9])
def test_part_that_becomes_erratic_does_not_hide_its_fall(slow: float) -> None:
    course = rate_course(erratic(slow), soak(planned=16 * HOUR, width=300.0))
    assert course is not None
    assert course.lowest < 0.97


def test_rate_that_varies_slowly_has_no_drift() -> None:
    """The differences between neighbors are small, but not those between values that are far apart."""
    lows = []
    for seed in range(20):
        noise, wave = random.Random(seed), 0.0  # noqa: S311 - reproducible
        means = []
        for _ in range(240):
            wave = 0.8 * wave + 0.6 * noise.gauss(0.0, 0.05)
            means.append(100 * (1 + wave))
        course = rate_course(series(*means), soak(planned=20 * HOUR, width=300.0))
        assert course is not None
        lows.append(course.lowest)
    assert min(lows) > 0.88


@pytest.mark.parametrize("seed", range(5))
def test_drop_of_a_rate_that_varies_begins_near_the_fall(seed: int) -> None:
    """The rate falls by 20 % after 90 of 150 buckets of 60 s, and does not recover."""
    noise = random.Random(seed)  # noqa: S311 - reproducible
    means = [noise.gauss(100.0, 5.0) * (0.8 if at >= 90 else 1.0) for at in range(150)]
    course = rate_course(series(*means), soak(planned=9000.0))
    assert course is not None
    assert course.lowest < 0.95
    drop = course.first_drop(0.95)
    assert drop is not None
    start_s, end_s = drop
    assert 85 * 60 <= start_s <= 95 * 60
    assert end_s is None


def test_drop_below_a_limit_above_1_has_a_time_only_if_it_exceeds_the_noise() -> None:
    """A criterion may require that a rate rises.

    The first rate is noisy and gets no time. The last rate is steady and gets a time.
    """
    noise = random.Random(1)  # noqa: S311 - reproducible
    rate = series(*(noise.gauss(100.0 if at < 20 else 104.0, 2.0) for at in range(240)), dtype="x")
    course = rate_course(rate, soak(planned=20 * HOUR, width=300.0))
    assert course is not None
    assert course.lowest > 1.012
    assert course.first_drop(1.012) is None
    host = soaked_host(soak(rate, planned=20 * HOUR, width=300.0))
    assert with_drift_time(host, drift_failure(limit=1.012)) == drift_failure(limit=1.012)
    risen = with_drift_time(soaked_host(soak(series(*(100,) * 9, *(101,) * 9, dtype="x"))), drift_failure(limit=1.05))
    assert risen.reason == "found 0.9; from 3 min 00 s on"


def test_trend_and_step_of_a_rate_do_not_count_as_variation() -> None:
    for means in ((100, 99, 98, 97, 96, 95, 94, 93, 92), (100, 100, 100, 100, 100, 80, 80, 80, 80)):
        course = rate_course(series(*means), soak())
        assert course is not None
        assert course.deviation == pytest.approx(0.0)
        assert course.lowest == pytest.approx(min(course.levels(3)))


def test_lowest_level_of_a_rate_that_rises_is_above_1() -> None:
    course = rate_course(series(100, 100, 100, *(110,) * 6), soak())
    assert course is not None
    assert course.lowest == pytest.approx(1.1)


def test_start_is_weighted_by_sample_count() -> None:
    one = series(10, 20, 30, 40, 50, 60, 70, 80, 90, n=(3, *(1,) * 8))
    course = rate_course(one, soak(one, planned=1200.0))
    assert course is not None
    assert course.start == 12.5
    # If a figure has no bucket in the first tenth of the soak, its start is the first bucket here, which has three values.
    late = replace(one, at=tuple(position + 5 for position in one.at))
    course = rate_course(late, soak(late))
    assert course is not None
    assert course.start == 10
    # No drift is evaluated if fewer than three buckets follow the start.
    assert rate_course(one, soak(one, planned=3600.0)) is not None
    assert rate_course(one, soak(one, planned=4200.0)) is None


@pytest.mark.parametrize(
    ("shares", "fell"),
    [
        ((0.9, 0.9, 0.9, 0.9, 0.9), (0, None)), ((1, 1, 1, 0.9, 0.9, 0.9), (3, None)),
        ((1, 0.9, 0.9, 0.9, 1, 1, 1), (1, 4)), ((1, 0.9, 0.9, 1, 1, 0.9, 1, 1), (1, 3)),
        ((1, 0.96, 0.9, 0.9, 1, 1, 1), (2, 4)), ((1, 1, 0.9, 0.9), (2, None)), ((1, 1, 0.9, 0.9, 1), (2, None)),
    ],
)  # fmt: skip
def test_drop_lasts_while_the_median_of_three_buckets_is_low(
    shares: tuple[float, ...], fell: tuple[int, int | None]
) -> None:
    """`shares`: one value for each bucket of 1 s. A value below 0.95 is low.

    `fell`: the first drop in seconds, from the start of its first low bucket to the end of its last low bucket. The end is None
    if the median of the last three buckets is low.
    """
    course = RateCourse(start=1.0, shares=tuple((float(at), at + 1.0, share) for at, share in enumerate(shares)))
    assert course.first_drop(0.95) == fell


def test_drift_is_recorded_only_for_rates_of_benchmarks() -> None:
    assert is_rate(series(1))
    assert not is_rate(series(1, unit="W"))
    assert not is_rate(series(1, name="gpu.power", unit="B/s"))
    soak_record = soak(
        series(*(100,) * 6, *(90,) * 6, dtype="x"), series(*range(1, 9), unit="W"), series(1, 2, scope="gpu=1")
    )
    record = host_evidence(one_figure_plan()).records[0]
    kept, grown = with_drift_observations(Evidence(records=(record, replace(record, soak=soak_record)))).records
    assert kept == record
    (drift,) = grown.observations[len(record.observations) :]
    assert (drift.name, drift.scope, drift.stage, drift.unit) == (f"drift.{RATE}", "gpu=0", SOAK, "1")
    assert (drift.value, drift.params, drift.status) == (0.9, {"dtype": "x"}, "measured")
    assert rates_without_drift(soak_record) == [RATE]
    assert rates_without_drift(soak(series(1, name="memory.bandwidth"), series(1, unit="W"), series(1))) == [
        "memory.bandwidth",
        RATE,
    ]


# Drift in verdicts

PLAN = one_figure_plan()
SOAKING = replace(PLAN, stages=(*PLAN.stages, replace(PLAN.stages[0], name=SOAK, duration_s=600.0)), expected=())
FALLING = soak(series(*(100,) * 3, *(90,) * 6, n=3, dtype="x"), series(*(100,) * 9, scope="gpu=1"))


def soaked_host(*soaks: Soak | None, plan: Plan = SOAKING, launches: tuple[Launch, ...] = ()) -> HostView:
    """Return a host with a record for each of `soaks` (None: a record without a soak). The first record has the launches."""
    record = host_evidence(plan, launches=launches).records[0]
    evidence = Evidence(
        records=tuple(replace(record, soak=one, launches=launches if not at else ()) for at, one in enumerate(soaks))
    )
    return HostView(plan, plan.hosts[0], evidence, [pack()])


def drift_failure(**over: Any) -> Verdict:
    fields = {
        "host": "h1", "scope": "gpu=0", "name": f"drift.{RATE}", "stage": SOAK, "verdict": FAIL, "criterion": "c",
        "reason": "found 0.9", "value": 0.9, "limit": 0.95, "params": {"dtype": "x"},
    }  # fmt: skip
    return Verdict(**{**fields, **over})


def test_failing_drift_states_when_it_began() -> None:
    result = with_drift_time(soaked_host(None, FALLING), drift_failure(detail="5 %"))
    assert result.detail == "from 3 min 00 s on, at least 10.0 % below its level at the start of the soak; 5 %"
    assert result.reason == "found 0.9; from 3 min 00 s on, at least 10.0 % below its level at the start of the soak"
    assert (
        with_drift_time(soaked_host(FALLING), drift_failure()).detail
        == "from 3 min 00 s on, at least 10.0 % below its level at the start of the soak"
    )
    assert with_drift_time(soaked_host(FALLING), drift_failure(limit=1)).detail.startswith(
        "from 3 min 00 s on, at least 10.0 %"
    )
    again = soak(series(*(100, 100, 90, 90, 90), *(100,) * 15, n=3, dtype="x"))
    assert (
        with_drift_time(soaked_host(again), drift_failure()).detail
        == "from 2 min 00 s to 5 min 00 s, at least 10.0 % below its level at the start of the soak"
    )


@pytest.mark.parametrize(
    "over",
    [
        {"verdict": PASS}, {"name": RATE}, {"limit": 0.90}, {"scope": "gpu=1", "params": {}}, {"params": {}},
        {"name": "drift.memory.bandwidth"}, {"scope": "gpu=7"},
    ],
)  # fmt: skip
def test_verdict_without_a_matching_drop_is_unchanged(over: dict[str, Any]) -> None:
    assert with_drift_time(soaked_host(FALLING), drift_failure(**over)) == drift_failure(**over)


def test_times_and_durations_are_readable() -> None:
    assert [format_clock(seconds) for seconds in (0, 45.4, 3599, 3600, 15_120)] == [
        "0 min 00 s", "0 min 45 s", "59 min 59 s", "01:00", "04:12"
    ]  # fmt: skip
    assert [format_span(seconds) for seconds in (0, 59, 60, 2710, 3600, 83_520)] == [
        "0 s", "59 s", "1 min 00 s", "45 min 10 s", "1 h 00 min", "23 h 12 min"
    ]  # fmt: skip


# Incomplete soaks


def soak_findings(*soaks: Soak | None, **over: Any) -> list[tuple[str, str]]:
    """Return scope and reason of each verdict on the soaks of a host; None is a record without a soak."""
    result = list(judge_soak(soaked_host(*soaks, **over)))
    assert all(item.verdict == INCONCLUSIVE and (item.name, item.stage) == (f"stage.{SOAK}", SOAK) for item in result)
    return [(item.scope, item.reason) for item in result]


def launch(outcome: str = "finished", reason: str = "", number: int = 1, stage: str = SOAK) -> Launch:
    return replace(builders.launch(stage, ("h1",), outcome, reason), number=number)


COMPLETE = soak()


def test_only_a_planned_soak_must_be_in_the_record_and_complete() -> None:
    assert soak_findings(COMPLETE) == []
    assert soak_findings(soak(), None) == []
    assert soak_findings(None, plan=PLAN) == []
    assert soak_findings(replace(COMPLETE, soaked_s=1.0), plan=PLAN) == []
    assert soak_findings(None) == [("host", "the plan has a soak, but no record of the host has one")]


@pytest.mark.parametrize(
    ("over", "reasons"),
    [
        # The plan has 600 s. A soak of 599.9 s is long enough. A duration of 599.8 s is too short, but is shown as 10 min 00 s.
        ({"soaked_s": 599.9}, []), ({"soaked_s": 599.8}, ["ended after 10 min 00 s of 10 min 00 s, without a reason"]),
        ({"ended": "", "soaked_s": 60.0}, ["cut off after 1 min 00 s of 10 min 00 s: resume the run"]),
        ({"reason": "a finding", "soaked_s": 60.0}, ["ended after 1 min 00 s of 10 min 00 s: a finding"]),
        ({"planned_s": 60.0}, ["the host planned to soak 1 min 00 s, but the plan has 10 min 00 s"]),
        ({"failed": 1}, ["1 of 11 rounds did not finish"]), ({"cut": 3}, []),
        ({"cut": 4}, ["4 of 14 rounds were interrupted because their supervisor process ended, for an unknown reason"]),
    ],
)  # fmt: skip
def test_incomplete_soak_is_reported(over: dict[str, Any], reasons: list[str]) -> None:
    assert soak_findings(replace(COMPLETE, **over)) == [("host", reason) for reason in reasons]


def test_reason_names_the_first_failed_round() -> None:
    bad = (launch(), launch("failed", "why", 2), launch("failed", "", 3), launch("failed", "x", 4, "benchmark"))
    failing = replace(COMPLETE, finished=8, failed=2)
    assert soak_findings(failing, launches=bad) == [("host", "2 of 10 rounds did not finish: round 2: why")]
    assert soak_findings(replace(COMPLETE, failed=5), launches=bad[2:3]) == [
        ("host", "5 of 15 rounds did not finish: round 3: failed")
    ]
    # The soak counts no failed round, but the record has two failed launches of the soak.
    assert soak_findings(replace(COMPLETE, finished=0), launches=bad) == [
        ("host", "2 of 2 rounds did not finish: round 2: why")
    ]


@pytest.mark.parametrize(
    ("planned", "over", "is_reported"),
    [
        (HOUR, {}, True), (HOUR - 1, {}, False), (HOUR, {"reason": "x"}, False), (HOUR, {"ended": ""}, False),
        (HOUR, {"timeline": Timeline(bucket_s=60.0, series=(series(*(100,) * 20),))}, False),
    ],
)  # fmt: skip
def test_long_soak_without_drift_data_is_inconclusive(planned: float, over: dict[str, Any], is_reported: bool) -> None:
    stages = (*PLAN.stages, replace(PLAN.stages[0], name=SOAK, duration_s=planned))
    plan = replace(SOAKING, stages=stages)
    soak_record = soak(series(1.0), planned=planned, finished=1, **over)
    why = f"too few rounds to evaluate the drift of {RATE}: 1 in {format_span(planned)}"
    assert (("host", why) in soak_findings(soak_record, plan=plan)) is is_reported
    assert ("host", why) not in soak_findings(soak_record, plan=replace(plan, rehearsal=True))


@pytest.mark.parametrize(
    ("params", "is_reported"), [({"dtype": "bf16"}, False), ({"dtype": "fp8"}, True), ({}, True), (None, True)]
)
def test_soak_without_the_series_of_a_measured_rate_is_inconclusive(
    params: dict[str, Any] | None, is_reported: bool
) -> None:
    """`params`: parameters of the series of the rate; None if there is no series."""
    stages = (*PLAN.stages, replace(PLAN.stages[0], name=SOAK, duration_s=HOUR))
    plan = replace(SOAKING, stages=stages)
    timeline = Timeline(bucket_s=60.0, series=() if params is None else (series(*(100,) * 20, **params),))
    figure = builders.observation(RATE, 1.0, stage=SOAK, scope="gpu=0", unit="FLOP/s", dtype="bf16", size=8192)
    host = soaked_host(soak(planned=HOUR, timeline=timeline), plan=plan)
    records = tuple(replace(record, observations=(figure,)) for record in host.evidence.records)
    for packs, expected in (([pack(criterion(f"drift.{RATE}"))], is_reported), ([pack()], False)):
        judged = judge_soak(HostView(plan, plan.hosts[0], Evidence(records=records), packs))
        why = f"the timeline has no series of {RATE}, so the drift is unknown"
        assert (why in [item.reason for item in judged]) is expected


@pytest.mark.parametrize(("planned", "left_out", "is_reported"), [(600.0, 0, True), (600.0, 1, False), (HOUR, 1, True)])
def test_soak_of_less_than_an_hour_may_lack_a_series_if_its_timeline_is_full(
    planned: float, left_out: int, is_reported: bool
) -> None:
    """`left_out`: number of values that were left out because the timeline was full."""
    stages = (*PLAN.stages, replace(PLAN.stages[0], name=SOAK, duration_s=planned))
    plan = replace(SOAKING, stages=stages)
    host = soaked_host(soak(planned=planned, timeline=Timeline(bucket_s=60.0, left_out=left_out)), plan=plan)
    figure = builders.observation(RATE, 1.0, stage=SOAK, scope="gpu=0", unit="FLOP/s")
    records = tuple(replace(record, observations=(figure,)) for record in host.evidence.records)
    judged = judge_soak(HostView(plan, plan.hosts[0], Evidence(records=records), [pack(criterion(f"drift.{RATE}"))]))
    assert any("the timeline has no series" in item.reason for item in judged) is is_reported


def figures(*lengths: int, n: int = 1, name: str = RATE, unit: str = "FLOP/s") -> tuple[Series, ...]:
    """Return a series of each GPU; `lengths`: the number of buckets of each series."""
    return tuple(
        series(*(100,) * length, scope=f"gpu={at}", n=n, name=name, unit=unit) for at, length in enumerate(lengths)
    )


@pytest.mark.parametrize(
    ("all_series", "fields", "scopes"),
    [
        (figures(10, 10), {}, []), (figures(10, 7, n=9), {}, []),
        (figures(10, 6), {}, ["gpu=1"]), (figures(6, 10), {}, ["gpu=0"]),
        # A figure may end earlier than the same figure of other parts: by two rounds or three buckets, whichever is longer.
        # The soak takes 600 s and has 10 rounds, or `finished` rounds. A bucket takes 60 s.
        (figures(10, 6, n=9), {"finished": 2}, []), (figures(10, 6, n=9), {"finished": 5}, []),
        (figures(10, 5, n=9), {"finished": 5}, ["gpu=1"]),
        (figures(20, 1, n=9), {"finished": 1}, []), (figures(20, 1, n=9), {"finished": 2}, ["gpu=1"]),
        # A rate must be measured at least 0.9 * rounds - 1 times: 8 times in the 10 rounds here.
        (figures(8, 8), {}, []), (figures(7, 7), {}, ["gpu=0", "gpu=1"]), (figures(7, 7, unit="W"), {}, []),
        (figures(4, 4, n=2), {}, []), (figures(10, 0), {}, ["gpu=1"]), ((), {}, []),
        # The series without samples ends at 0 s, the other series at 240 s. Two rounds take 239.5 s in the first case,
        # and 240 s in the second.
        (figures(4, 0, n=9), {"finished": 1, "soaked_s": 119.75}, ["gpu=1"]),
        (figures(4, 0, n=9), {"finished": 1, "soaked_s": 120.0}, []),
        ((*figures(10), *figures(5, name="memory.bandwidth", n=9)), {}, []),
        (figures(10, 10, n=9), {"finished": 0, "failed": 0}, []),
    ],
)  # fmt: skip
def test_figures_that_stop_early_or_are_rare_are_detected(
    all_series: tuple[Series, ...], fields: dict[str, Any], scopes: list[str]
) -> None:
    assert [*ended_early(soak(*all_series, **fields))] == scopes


def test_stopped_measurement_is_reported_once_per_part() -> None:
    one = series(*(100,) * 6, scope="gpu=1", dtype="x", op="y")
    soak_record = soak(series(*(100,) * 10), one, replace(one, params={"dtype": "z"}), width=HOUR)
    soak_record = replace(soak_record, finished=1)
    expected_text = (
        f"{RATE}[dtype=x,op=y] was last measured at 06:00 of the soak, but this host measured another {RATE} at 10:00"
    )
    assert soak_findings(soak_record) == [("gpu=1", f"{expected_text} (and 1 more)")]
    few = soak(series(*(100,) * 7))
    assert soak_findings(few) == [("gpu=0", f"{RATE} was measured in 7 of 10 rounds")]


def test_judge_reports_an_incomplete_soak() -> None:
    verdicts = judge(SOAKING, {"h1": soaked_host(None).evidence}, [pack()])
    assert (f"stage.{SOAK}", INCONCLUSIVE) in [(item.name, item.verdict) for item in verdicts]
    with_lost_rounds = judge(SOAKING, {"h1": soaked_host(replace(COMPLETE, cut=9)).evidence}, [pack()])
    expected_text = "9 of 19 rounds were interrupted because their supervisor process ended, for an unknown reason"
    assert expected_text in [item.reason for item in with_lost_rounds]


def slower_than_the_fleet(*drifts: float) -> list[int]:
    """Return the indices of the GPUs, one for each of `drifts`, that fail the comparison of their drift with the fleet."""
    plan = one_figure_plan(gpu_count=len(drifts), rackproof_gpu_model="h200-sxm")
    observations = [
        builders.observation(f"drift.{RATE}", drift, scope=f"gpu={at}", stage=SOAK) for at, drift in enumerate(drifts)
    ]
    rule = pack_of("h200-sxm", "drift-stress-vs-fleet")
    verdicts = judge(plan, {"h1": host_evidence(plan, observations=tuple(observations))}, (rule,))
    judged = [item for item in verdicts if item.criterion == "drift-stress-vs-fleet"]
    assert len(judged) == len(drifts)
    return [int(item.scope.partition("=")[2]) for item in judged if item.verdict == FAIL]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("buckets", "noisy", "steady"), [(9, 0.03, 0.0025), (13, 0.03, 0.002), (24, 0.03, 0.004)])
def test_gpu_whose_rate_did_not_fall_passes_beside_gpus_whose_rates_vary_more(
    buckets: int, noisy: float, steady: float, seed: int
) -> None:
    drifts = [simulated(10 * seed + at, buckets, noisy if at < 5 else steady) for at in range(8)]
    assert slower_than_the_fleet(*drifts) == []


@pytest.mark.parametrize("others", [(1.0,) * 7, (1.2,) * 7, (1.0, 1.1, 1.2, 1.3, 1.0, 0.99, 1.0), (0.97,) * 7])
@pytest.mark.parametrize("fall", [0.03, 0.2])
def test_gpu_whose_rate_fell_further_than_those_of_the_others_fails(fall: float, others: tuple[float, ...]) -> None:
    expected = min(1.0, statistics.median(others)) - fall
    assert slower_than_the_fleet(*others, expected) == [7]
    assert slower_than_the_fleet(*others, min(1.0, statistics.median(others)) - 0.015) == []
