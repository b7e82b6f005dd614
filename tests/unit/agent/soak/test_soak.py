"""Test soaks, which repeat rounds of the same benchmarks for hours or days.

The tests cover the timeline, the aggregation of all rounds into a record of bounded size, the resumption of a killed soak, its
early end, and drift (a rate falls below its level at the start).
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.exporter.live import Span, build_document, publish_record
from agent.run.record import HostRun
from agent.sampling import timeline
from agent.sampling.timeline import MAX_BUCKETS, MAX_EVENTS_OF_NAME, Recorder
from agent.soak import soak
from agent.soak.aggregate import aggregate_rounds, select_launches, select_snapshots
from agent.soak.soak import run_soak
from agent.soak.soak_run import CHECKPOINT, SoakRun
from agent.soak.stop_on import is_fatal
from collectors.base import Absent
from collectors.nvml import GpuSample
from fleet.judge.criteria import read_packs
from fleet.judge.drift import judge_soak, rate_course
from fleet.judge.evidence import Evidence, identifying_params
from fleet.judge.figure_consistency import _sample_problem
from fleet.judge.judge import host_views, judge
from fleet.judge.soak_consistency import soak_problems
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from rackproof import main as rackproof
from schemas import documents
from schemas.decode import record_from_json
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.readings import READINGS
from schemas.records import ERROR, MEASURED, Launch, Metric, Observation, Record, Samples, Snapshot, to_json
from schemas.reports import ACTIONS, FAIL, INCONCLUSIVE, Verdict
from schemas.stages import SOAK
from schemas.timeline import RATES, Soak, Timeline, downsample, soak_from_json
from schemas.times import epoch_seconds
from tests import ROOT, builders
from tests.fakes import nvml

HOUR = 3600.0
STRESS = {"dtype": "fp32"}


# ---- the timeline


def test_merged_buckets_keep_extremes_and_mean() -> None:
    recorder, values = Recorder(), [random.Random(at).uniform(1, 2) for at in range(1000)]  # noqa: S311
    for at, value in enumerate(values):
        recorder.add_value(at, "gpu.power", "gpu=0", "W", value)
    result = recorder.timeline()
    series = result.series[0]
    assert result.bucket_s == 8
    assert len(series.at) == 125 <= MAX_BUCKETS
    assert sum(series.n) == 1000
    assert (min(series.low), max(series.high)) == pytest.approx((min(values), max(values)), rel=1e-4)
    assert statistics.fmean(series.mean) == pytest.approx(statistics.fmean(values), rel=1e-4)


def test_new_series_uses_the_bucket_size_of_the_others() -> None:
    recorder = Recorder()
    recorder.add_value(5000, "gpu.power", "gpu=0", "W", 1.0)
    recorder.add_value(10, "gpu.power", "gpu=1", "W", 2.0)
    result = recorder.timeline()
    assert [(one.scope, one.at[0] * result.bucket_s) for one in result.series] == [("gpu=0", 4992), ("gpu=1", 0)]


def test_recorder_continues_the_timeline_of_a_killed_process() -> None:
    uninterrupted, first = Recorder(), Recorder()
    for at in range(300):
        uninterrupted.add_value(at, "gpu.power", "gpu=0", "W", at)
        first.add_value(at, "gpu.power", "gpu=0", "W", at)
    second = Recorder(soak_from_json({**to_json(soak_state(first.timeline()))}).timeline)
    for at in range(300, 700):
        uninterrupted.add_value(at, "gpu.power", "gpu=0", "W", at)
        second.add_value(at, "gpu.power", "gpu=0", "W", at)
    expected, resumed = uninterrupted.timeline(), second.timeline()
    expected_series, resumed_series = expected.series[0], resumed.series[0]
    assert (resumed.bucket_s, resumed_series.at, resumed_series.n) == (
        expected.bucket_s,
        expected_series.at,
        expected_series.n,
    )
    assert resumed_series.mean == pytest.approx(expected_series.mean, rel=1e-3)


def soak_state(timeline: Timeline, **more: Any) -> Soak:
    """Return a `Soak` with this timeline that has run for all of its 10 planned hours. `more`: fields to add or replace."""
    return Soak(**{"began": builders.WHEN, "planned_s": 10 * HOUR, "soaked_s": 10 * HOUR, "timeline": timeline, **more})


def counter_snapshot(**values: float) -> Snapshot:
    """Return a snapshot with these readings of GPU 0: `gpu__energy=5` sets the reading `gpu.energy` to 5."""
    metrics = [
        Metric(name=name.replace("__", "."), unit="1", values={"gpu=0": value}) for name, value in values.items()
    ]
    return Snapshot(stage=SOAK, phase="during", at=builders.WHEN, duration_s=0.1, metrics=tuple(metrics))


def test_only_increases_of_error_counters_are_events() -> None:
    recorder = Recorder()
    for at, replays in ((0, 7), (10, 7), (20, 9), (30, 9), (40, 10), (5000, 11)):
        recorder.add_counters(at, counter_snapshot(gpu__pcie__replays=replays, gpu__energy=at, gpu__power=at))
    events = recorder.timeline().events
    assert [(one.at_s, one.until_s, one.name, one.scope, one.count) for one in events] == [
        (20, 40, "gpu.pcie.replays", "gpu=0", 3),
        (5000, 5000, "gpu.pcie.replays", "gpu=0", 1),
    ]
    assert events[0].text == "rose from 7 to 9"


def test_only_an_xid_after_the_first_snapshot_is_an_event() -> None:
    def xids(**counts: int) -> Snapshot:
        """Return a snapshot with these counts of XIDs: `x31=2` means that XID 31 was logged twice."""
        values = {f"pci=0000:1b:00.0,xid={number[1:]}": count for number, count in counts.items()}
        metric = Metric(name="xid.count", unit="1", values=values)
        return Snapshot(stage=SOAK, phase="during", at=builders.WHEN, duration_s=0.1, metrics=(metric,))

    recorder = Recorder()
    recorder.add_counters(0, xids(x31=2))
    recorder.add_counters(10, xids(x31=2, x79=1))
    assert [(one.scope, one.count) for one in recorder.timeline().events] == [("pci=0000:1b:00.0,xid=79", 1)]


RETRANSMISSIONS = {f"infiniband.{name}" for name in ("packet_seq_err", "local_ack_timeout_err", "roce_adp_retrans")}
"""A healthy RoCE fabric may have these all the time, so their increase is no event."""
RECORDED_OTHERWISE = {
    "gpu.throttle.time",  # throttling is an event of `gpu.throttle.active`
    "xid.last_seen",  # a new XID is an event of `xid.count`
    "xid.log_complete",  # true or false, so not a counter
    "kernel.event.last_seen",  # a new kernel event is an event of `kernel.event.count`
    "sxid.last_seen",  # a new SXid is an event of `sxid.count`
}
"""Readings that the judge compares with a limit, but whose increase is no event."""


def test_increase_of_each_counter_that_a_criterion_judges_is_an_event() -> None:
    judged = {criterion.name for one in read_packs(()) for criterion in one.criteria}
    judged -= RECORDED_OTHERWISE | RETRANSMISSIONS
    counters = {name for name, reading in READINGS.items() if reading.counter or name.startswith(timeline.LOGGED)}
    recorder = Recorder()
    for value in (1.0, 2.0):
        recorder.add_counters(value, counter_snapshot(**{name.replace(".", "__"): value for name in counters}))
    events = {event.name for event in recorder.timeline().events}
    assert counters & judged <= events
    assert not events & RETRANSMISSIONS


def test_thermal_throttling_is_an_event_and_power_capping_is_not() -> None:
    recorder = Recorder()
    for at in range(100):
        thermal = 0x40 if 50 <= at < 60 else 0
        recorder.add_samples(at, {0: GpuSample(690.0, 1.5e9, 60.0, 0x4 | thermal, 2.6e9)})
    recorder.add_samples(100, {0: Absent(status="error", reason="GPU is lost")})
    values = {(one.name, one.scope): one for one in recorder.timeline().series}
    assert sum(values["gpu.throttle.active", "gpu=0,reason=other"].mean) == 10
    assert sum(values["gpu.throttle.active", "gpu=0,reason=power_cap"].mean) == 100
    assert [(one.at_s, one.name, one.scope, one.count, one.text) for one in recorder.timeline().events] == [
        (50, "gpu.throttle.active", "gpu=0,reason=hw_thermal", 10, "its clocks were throttled"),
        (100, "gpu.power", "gpu=0", 1, "error: GPU is lost"),
    ]


def test_events_beyond_the_maximum_number_are_only_counted() -> None:
    recorder = Recorder()
    for number in range(MAX_EVENTS_OF_NAME + 50):
        recorder.add_event(number * 1000.0, "gpu.pcie.replays", "gpu=0")
    recorder.add_event(200_000.0, "xid.fatal", "gpu=0")
    names = [event.name for event in recorder.timeline().events]
    assert names == ["gpu.pcie.replays"] * MAX_EVENTS_OF_NAME + ["xid.fatal"]
    assert recorder.timeline().left_out == 50


# ---- aggregation of rounds


def measurement(value: float, name: str = "stress.throughput", **params: Any) -> Observation:
    """Return one observation of one round of the soak."""
    return builders.observation(name, value, scope="cpu=0", unit="FLOP/s", stage=SOAK, **(params or STRESS))


def aggregated(*observations: Observation) -> Observation:
    """Return the aggregate of these observations. All are of one figure, each from another round."""
    recorder, aggregates = Recorder(), []
    for number, observation in enumerate(observations, 1):
        aggregates = aggregate_rounds(aggregates, [observation], recorder, at_s=number * 300.0, number=number)
    assert len(aggregates) == 1
    return aggregates[0]


def test_rates_are_aggregated_to_median_count_and_extremes() -> None:
    result = aggregated(*(measurement(value) for value in (10.0, 12.0, 5.0, 11.0, 11.0)))
    assert result.value == 11.0
    assert result.samples
    assert (result.samples.n, result.samples.min, result.samples.max) == (5, 5.0, 12.0)


@pytest.mark.parametrize("profile", ["smoke", "standard", "extended", "soak"])
def test_no_two_figures_of_a_round_are_combined(profile: str) -> None:
    """For example, the durations of two benchmarks have the same name and must not be combined."""
    plan = builders.plan("h1", "h2", profile=profile, gpu_count=2)
    for stage in plan.stages:
        results = builders.results(plan, "h1", stage.name)
        assert len(aggregate_rounds([], results, Recorder(), at_s=300.0, number=1)) == len(results)


@pytest.mark.parametrize("name", ["stress.throughput", "integrity.tested_share"])
@pytest.mark.parametrize("first", [0.4, 0.9])
def test_extremes_include_a_round_that_the_recorder_does_not_have(name: str, first: float) -> None:
    """A process was killed after it recorded round 1. The next process starts from a checkpoint written before that round."""
    aggregates = aggregate_rounds([], [measurement(first, name)], Recorder(), at_s=300.0, number=1)
    recorder = Recorder()
    for number, value in enumerate((0.5, 0.51, 0.52), 2):
        aggregates = aggregate_rounds(
            aggregates, [measurement(value, name)], recorder, at_s=number * 300.0, number=number
        )
        samples = aggregates[0].samples
        assert samples
        assert samples.min <= float(aggregates[0].value or 0) <= samples.max
    assert samples.n >= 3
    assert samples.cv > 0


def test_coefficient_of_variation_is_plausible_even_if_a_bucket_has_many_rounds() -> None:
    """The buckets are so long that one of them has all rounds but the last one.

    The mean of that bucket hides how its rounds vary. So the coefficient of variation is at least the one that follows from the
    extremes.
    """
    recorder, result = Recorder(), []
    for number, value in enumerate([0.9, 1.1] * 10 + [1.0], 1):
        new = [builders.observation("gemm.throughput", value, scope="gpu=0", dtype="bf16")]
        result = aggregate_rounds(
            result, new, recorder, at_s=432_000.0 if number == 21 else 60.0 * number, number=number
        )
    samples = result[0].samples
    assert samples
    assert (samples.n, samples.min, samples.max) == (21, 0.9, 1.1)
    assert _sample_problem(samples, float(result[0].value or 0), has_rounds=True) == ""


def test_observations_that_differ_only_in_their_sizes_are_aggregated_to_one() -> None:
    observed = [
        measurement(0, "integrity.wrong_words", pattern="random", bytes=size, free_bytes=size)
        for size in (100, 200, 300)
    ]
    assert aggregated(*observed).params["bytes"] == 300


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("integrity.wrong_words", (0, 3, 0, 1), 4),
        ("collective.all_reduce.wrong_elements", (0, 3, 0, 1), 4),
        ("local_storage.wrong_blocks", (0, 3, 0, 1), 4),
        ("shared_storage.wrong_bytes", (0, 3, 0, 1), 4),
        ("shared_storage.misread_bytes", (0, 3, 0, 1), 4),
        ("stress.throttled_share", (0.0, 0.2, 0.0), 0.2),
        ("stress.temperature", (61.0, 88.0, 62.0), 88.0),
        ("integrity.tested_share", (0.98, 0.5, 0.98), 0.5),
        ("training.loss_finite", (True, False, True), False),
        ("digest.value", ("aa", "bb", "aa"), "aa, then bb"),
        ("digest.value", ("aa", "aa", "aa"), "aa"),  # no bad round
    ],
)
def test_good_rounds_do_not_hide_a_bad_round(name: str, values: Sequence[Any], expected: Any) -> None:
    result = aggregated(*(measurement(value, name, pattern="random") for value in values))
    assert result.value == expected
    assert type(result.value) is type(expected)


def test_position_of_the_first_wrong_block_is_kept() -> None:
    name = "local_storage.wrong_blocks"
    first, second = (measurement(3, name, sharing="together", first_wrong=f"offset {at}") for at in (4096, 8192))
    result = aggregated(
        measurement(0, name, sharing="together"), first, measurement(0, name, sharing="together"), second
    )
    assert (result.value, result.params["first_wrong"]) == (6, "offset 4096")


def test_first_of_several_memory_errors_with_the_same_number_is_kept() -> None:
    """The wrong memory words of each round are numbered from 1 (parameter `number`)."""
    name = "integrity.error"
    rounds = [
        [measurement("0x1", name, pattern="random", number=1, address="0x10", bits="0")],
        [
            measurement(f"0x{number}", name, pattern="random", number=number, address="0x20", bits="1")
            for number in (1, 2)
        ],
    ]
    result: list[Observation] = []
    for number, observations in enumerate(rounds):
        result = aggregate_rounds(result, observations, Recorder(), at_s=float(number), number=number)
    assert [(item.value, item.params["number"], item.params["address"]) for item in result] == [
        ("0x1", 1, "0x10"),
        ("0x2", 2, "0x20"),
    ]


def test_rate_without_a_series_is_aggregated_to_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder has reached MAX_SERIES, so it keeps no values of this rate. A median would need them."""
    monkeypatch.setattr(timeline, "MAX_SERIES", 0)
    result = aggregated(*(measurement(value) for value in (10.0, 12.0, 5.0)))
    assert result.value == 9.0
    assert result.samples
    assert (result.samples.n, result.samples.min, result.samples.max) == (3, 5.0, 12.0)


def test_sum_of_wrong_results_without_a_series_has_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_SERIES", 0)
    result = aggregated(*(measurement(value, "stress.wrong_products") for value in (3, 2)))
    assert (result.value, result.samples) == (5, None)


@pytest.mark.parametrize(
    "name", ["stress.throughput", "stress.temperature", "training.loss_ratio", "integrity.tested_share"]
)
@given(
    precision=st.sampled_from([None, 0.01]),
    values=st.lists(st.floats(1.0, 1e15), min_size=2, max_size=40),
    repetitions=st.integers(1, 30),
)
def test_figure_without_a_series_has_one_sample_per_round(
    name: str, precision: float | None, values: list[float], repetitions: int
) -> None:
    """The samples that were taken within the first round (`first`), and their `precision`, are dropped."""
    first = Samples(n=repetitions, min=0.5, p50=values[0], max=2e15, cv=0.1, precision=precision)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "MAX_SERIES", 0)
        result = aggregated(
            replace(measurement(values[0], name), samples=first), *(measurement(value, name) for value in values[1:])
        )
    assert result.samples
    assert (result.samples.n, result.samples.min, result.samples.max) == (len(values), min(values), max(values))
    assert result.samples.p50 == pytest.approx(statistics.fmean(values))
    assert result.samples.cv == pytest.approx(statistics.pstdev(values) / statistics.fmean(values), rel=1e-6, abs=1e-6)
    worst = {"temperature": max, "loss_ratio": max, "tested_share": min}.get(name.partition(".")[2], statistics.fmean)
    assert result.value == pytest.approx(worst(values))
    assert _sample_problem(result.samples, float(result.value or 0), has_rounds=True) == ""


def test_repeated_changes_between_two_digests_are_one_mismatch() -> None:
    recorder, aggregates = Recorder(), []
    for number, digest in enumerate(("aa", "aa", "bb", "aa", "bb"), 1):
        observed = [
            measurement(0.0, "digest.value", workload="gemm"),
            measurement(0, "digest.mismatches", workload="gemm"),
        ]
        observed[0] = replace(observed[0], value=digest, params={"workload": "gemm", "repetitions": number})
        aggregates = aggregate_rounds(aggregates, observed, recorder, at_s=number, number=number)
    assert [(one.name, one.value) for one in aggregates] == [("digest.value", "aa, then bb"), ("digest.mismatches", 1)]


def test_error_in_one_round_is_an_error_of_the_soak() -> None:
    lost = replace(measurement(0.0), status=ERROR, value=None, reason="CUDA error: unspecified launch failure")
    result = aggregated(measurement(1.0), lost, measurement(1.0))
    assert (result.status, result.reason) == (ERROR, "in round 2: CUDA error: unspecified launch failure")


@pytest.mark.parametrize("name", ["integrity.wrong_words", "digest.mismatches", "pairs.wrong_elements"])
@pytest.mark.parametrize(("values", "expected"), [((3, None, 0), 3), ((None, 3, None), 3), ((0, None, 0), None)])
def test_error_in_one_round_does_not_hide_wrong_results_of_another(
    name: str, values: tuple[int | None, ...], expected: int | None
) -> None:
    """`values`: count in each round, None if the round had an error; `expected`: aggregate, None if it is an error."""
    lost = replace(measurement(0, name), status=ERROR, value=None, reason="CUDA error: unspecified launch failure")
    result = aggregated(*(lost if value is None else measurement(value, name) for value in values))
    assert (result.status, result.value) == (ERROR if expected is None else MEASURED, expected)


def test_first_last_and_failed_launches_are_kept() -> None:
    kept: tuple[Launch, ...] = ()
    for number in range(1, 400):
        outcome = "failed" if number in (50, 60) else "finished"
        kept = select_launches(
            [*kept, replace(builders.launch(SOAK, ("h1",), outcome, devices=2), number=number, log_tail="x" * 4000)]
        )
    assert [launch.number for launch in kept] == [1, 50, 60, 397, 398, 399]
    assert [bool(launch.log_tail) for launch in kept] == [False, True, True, False, False, False]


def test_first_launch_during_which_another_process_used_each_gpu_is_kept() -> None:
    """The process may have slowed the GPU for hours, which is a drift, but not a fault of the GPU."""
    kept: tuple[Launch, ...] = ()
    for number in range(1, 400):
        used = {f"gpu={gpu}": "process 4711 (train)" for gpu, rounds in USED_ROUNDS.items() if number in rounds}
        launch = replace(builders.launch(SOAK, ("h1",), devices=2), number=number, other_processes=used)
        kept = select_launches([*kept, launch])
    assert [launch.number for launch in kept] == [1, 100, 150, 397, 398, 399]


USED_ROUNDS = {0: range(100, 200), 1: range(150, 160)}
"""GPU -> rounds during which another process used it."""


def soak_snapshot(phase: str, second: int, **changes: Any) -> Snapshot:
    """Return a snapshot of the soak, taken `second` s after 04:00. `changes`: readings to replace, as in builders.snapshot."""
    snapshot = builders.snapshot(range(1), stage=SOAK, phase=phase, **changes)
    return replace(snapshot, at=f"2026-11-21T04:{second // 60:02}:{second % 60:02}Z")


def test_first_last_and_changed_snapshots_are_kept() -> None:
    kept: tuple[Snapshot, ...] = ()
    for number in range(300):
        replays = number if number < 200 else number - 200  # a reload of the driver resets the counter
        pending = number == 100
        kept = select_snapshots(
            [*kept, soak_snapshot("after", number, gpu__pcie__replays=replays, gpu__remapped_rows__pending=pending)]
        )
    readings = [{metric.name: metric.values.get("gpu=0") for metric in snapshot.metrics} for snapshot in kept]
    assert [(values["gpu.pcie.replays"], values["gpu.remapped_rows.pending"]) for values in readings] == [
        (0, False),
        (100, True),
        (101, False),
        (0, False),
        (99, False),
    ]


def test_snapshots_before_and_after_a_reboot_are_kept() -> None:
    kept: tuple[Snapshot, ...] = ()
    for number in range(300):
        # The uptime falls only once, at snapshot 100. Its increase after snapshot 200 is not a reboot.
        uptime_s = 50_000.0 + number if number < 100 else 300_000.0 + number if number > 200 else number - 90.0
        snapshot = replace(
            soak_snapshot("before", number), metrics=(Metric(name="host.uptime", unit="s", values={"host": uptime_s}),)
        )
        kept = select_snapshots([*kept, snapshot])
    assert [one.metrics[0].values["host"] for one in kept] == [50_000.0, 50_099.0, 10.0, 300_299.0]


# ---- running a soak

MeasureRound = Callable[[SoakRun, int], Sequence[Observation]]
"""Function that returns the observations of a round. Arguments: the soak, the number of the round."""


def begin_soak(tmp_path: Path, duration: str = "100s", **variables: Any) -> SoakRun:
    """Begin a run with a soak on host h1. `variables`: other inventory variables."""
    inventory = {"rackproof_gang": "none", "rackproof_soak_duration": duration, **variables}
    plan = builders.plan("h1", profile="soak-rehearsal", gpu_count=1, **inventory)
    HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))
    return SoakRun(tmp_path / "run", "h1")


def run_rounds(run: SoakRun, measure: MeasureRound, outcome: str = "finished", step_s: float = 25.0) -> Record:
    """Run the soak without torchrun. `measure` returns the observations of a round. Each round counts as `step_s` seconds."""

    def launch(number: int, span: Span) -> Record:
        assert span.began < span.ends
        observations = measure(run, number)
        run._base_s += step_s
        launched = replace(
            builders.launch(SOAK, ("h1",), outcome, "" if outcome == "finished" else "why", devices=2), number=number
        )
        return run.append(observations=observations, launches=[launched])

    return run_soak(run, launch, [], lambda line: None, sleep=lambda wait: None)


def measure_good(run: SoakRun, number: int) -> list[Observation]:
    """Return what a round without a fault measures."""
    wrong_products = replace(measurement(0, "stress.wrong_products", dtype="fp32"), unit="1")
    return [measurement(100.0 + number), wrong_products]


def test_rounds_repeat_for_the_planned_duration_and_give_one_record(tmp_path: Path) -> None:
    run = begin_soak(tmp_path)
    record = run_rounds(run, measure_good)
    assert record.soak
    assert (record.soak.finished, record.soak.failed, record.soak.cut, record.soak.ended_by) == (4, 0, 0, "time")
    assert record.soak.soaked_s >= 100.0
    assert [(observation.name, observation.value) for observation in record.observations] == [
        ("stress.throughput", pytest.approx(102.5)),
        ("stress.wrong_products", 0),
    ]
    assert [(one.name, sum(one.n)) for one in record.soak.timeline.series] == [("stress.throughput", 4)]
    assert documents.read(run.path(), "record")["soak"]["finished"] == 4
    assert SoakRun(run.directory, "h1").state.ended


class Killed(BaseException):
    """Raised in place of SIGKILL. No `except Exception` catches it."""


def test_killed_soak_resumes_and_keeps_measurements_of_the_interrupted_round(tmp_path: Path) -> None:
    run = begin_soak(tmp_path)

    def measure(run: SoakRun, number: int) -> list[Observation]:
        if number == 3:
            work = run.directory / "work" / SOAK
            work.mkdir(parents=True)
            measured = [
                to_json(measurement(7.0)),
                to_json(replace(measurement(0.0), status=ERROR, value=None, reason="SIGTERM")),
            ]
            result = {"rank": 0, "observations": measured, "software": {}}
            (work / "rank0.json").write_text(json.dumps(result))
            raise Killed
        return measure_good(run, number)

    with pytest.raises(Killed):
        run_rounds(run, measure)
    resumed = SoakRun(run.directory, "h1")
    assert (resumed.state.finished, resumed.state.ended) == (2, "")
    began, soaked_s = resumed.state.began, resumed.state.soaked_s
    assert soaked_s >= 50.0
    record = run_rounds(resumed, measure_good)
    assert record.soak
    assert (record.soak.began, record.soak.ended_by) == (began, "time")
    assert (record.soak.finished, record.soak.cut) == (4, 1)
    assert record.soak.soaked_s < soaked_s + 100.0  # the planned 100 s include the 50 s before the kill
    series = record.soak.timeline.series[0]
    assert (sum(series.n), min(series.low)) == (5, 7.0)
    assert [event.name for event in record.soak.timeline.events] == ["soak.cut"]
    assert [launch.number for launch in record.launches] == [1, 2, 4, 5]
    assert all(observation.status == "measured" for observation in record.observations)


def test_soak_resumes_from_its_record_if_its_checkpoint_is_damaged(tmp_path: Path) -> None:
    run = begin_soak(tmp_path, "10m")
    run.start()
    run._base_s = 100.0
    run.append(launches=[builders.launch(SOAK, ("h1",), devices=2)])
    run._base_s = 160.0
    run.recorder.add_value(160, "gpu.power", "gpu=0", "W", 690.0)
    run.write_checkpoint()
    resumed = SoakRun(run.directory, "h1")
    assert resumed.state.soaked_s >= 160.0
    assert [one.name for one in resumed.state.timeline.series] == ["gpu.power"]
    document = json.loads((run.directory / CHECKPOINT).read_text())
    document["timeline"]["series"][0]["mean"] = []
    for damaged in ('{"began": ', json.dumps(document)):
        (run.directory / CHECKPOINT).write_text(damaged)
        assert 100.0 <= SoakRun(run.directory, "h1").state.soaked_s < 160.0


WRONG_WORDS = ("integrity.wrong_words", 3)


@pytest.mark.parametrize(
    ("policy", "figure", "ended_by"),
    [
        ("fatal", WRONG_WORDS, "finding"),
        ("fatal", ("stress.throughput", 0.0), "time"),
        ("any", ("stress.throughput", 0.0), "finding"),
        ("never", WRONG_WORDS, "time"),
    ],
)
def test_stop_policy_decides_which_finding_ends_the_soak(
    tmp_path: Path, policy: str, figure: tuple[str, float], ended_by: str
) -> None:
    """With `fatal`, a low speed does not end the soak; a hardware fault does."""
    run = begin_soak(tmp_path, rackproof_soak_stop_on=policy)
    name, value = figure
    result = measurement(value, name, pattern="random", dtype="fp32")
    result = replace(result, unit="1") if name == WRONG_WORDS[0] else result
    record = run_rounds(run, lambda run, number: [result])
    assert record.soak
    assert record.soak.ended_by == ended_by
    assert record.soak.finished == (1 if ended_by == "finding" else 4)
    assert record.soak.reason.startswith(f"cpu=0 {name}: found ") is (ended_by == "finding")


@pytest.mark.parametrize("action", ACTIONS)
def test_burn_in_page_lists_the_actions_of_fatal_findings(action: str) -> None:
    """The action `configure` is not fatal: a wrong setting does not end a burn-in of days, because it can be corrected later."""
    page = (ROOT / "docs" / "burnin.md").read_text()
    (sentence,) = (line for line in page.splitlines() if line.startswith("- `fatal` (default)"))
    verdict = Verdict(
        host="h1", scope="host", name="driver.version", verdict=FAIL, criterion="x", reason="", action=action
    )
    assert is_fatal(verdict) is (f"`{action}`" in sentence)


def test_failed_rounds_in_a_row_end_the_soak_until_it_is_reopened(tmp_path: Path) -> None:
    run = begin_soak(tmp_path, "1h")
    record = run_rounds(run, lambda run, number: [], outcome="failed")
    assert record.soak
    assert (record.soak.ended_by, record.soak.failed) == ("failure", soak.MAX_FAILED)
    assert record.soak.reason == "3 rounds in a row failed: why"
    resumed = SoakRun(run.directory, "h1")
    resumed.reopen()
    assert not SoakRun(run.directory, "h1").state.ended
    record = run_rounds(resumed, measure_good, step_s=1800.0)
    assert record.soak
    assert (record.soak.ended_by, record.soak.failed) == ("time", soak.MAX_FAILED)  # the earlier failures still count
    assert [launch.number for launch in record.launches] == [1, 2, 3, 4, 5]


def test_finished_round_with_an_invalid_result_counts_as_failed(tmp_path: Path) -> None:
    run = begin_soak(tmp_path, "1h")
    run.start()
    launch = builders.launch(SOAK, ("h1",), "finished", "no result of rank 0: not JSON", devices=2)
    run.append(launches=[replace(launch, number=1)])
    assert (run.state.finished, run.state.failed) == (0, 1)


def write_rank_results(run: SoakRun, *observations: Observation) -> Path:
    """Write the result file of rank 0 of the running round; return its directory."""
    work = run.directory / "work" / SOAK
    work.mkdir(parents=True, exist_ok=True)
    result = {"rank": 0, "observations": [to_json(observation) for observation in observations], "software": {}}
    (work / "rank0.json").write_text(json.dumps(result))
    return work


def test_errors_that_an_interruption_of_the_round_caused_are_ignored(tmp_path: Path) -> None:
    run = begin_soak(tmp_path, "1h")
    cuda_error = replace(measurement(0.0), status=ERROR, value=None, reason="CUDA error: an illegal memory access")
    sigterm = replace(
        measurement(0.0, "memory.bandwidth"), status=ERROR, value=None, reason="RuntimeError: got SIGTERM"
    )
    run.start()
    run.begin_round()
    assert run.salvage_round(write_rank_results(run, cuda_error, sigterm))
    assert [
        (observation.name, observation.status, observation.reason) for observation in run.record().observations
    ] == [("stress.throughput", ERROR, "in round 1: CUDA error: an illegal memory access")]


def test_recorded_round_is_counted_once_after_a_kill(tmp_path: Path) -> None:
    run = begin_soak(tmp_path, "1h")
    run.start()
    number = run.begin_round()
    wrong_words = measurement(3, "integrity.wrong_words", pattern="random")
    work = write_rank_results(run, wrong_words)
    run.append(observations=[wrong_words], launches=[replace(builders.launch(SOAK, ("h1",), devices=2), number=number)])
    resumed = SoakRun(run.directory, "h1")  # the previous process was killed before it cleared the work directory
    assert resumed.salvage_round(work) == ""
    assert not work.exists()
    assert (resumed.state.finished, resumed.state.cut) == (1, 0)
    assert [observation.value for observation in resumed.record().observations] == [3]
    resumed.begin_round()
    assert resumed.salvage_round(write_rank_results(resumed, wrong_words))
    assert (resumed.state.finished, resumed.state.cut) == (1, 1)
    assert [observation.value for observation in resumed.record().observations] == [6]


def test_record_of_a_week_is_about_as_large_as_that_of_a_day(tmp_path: Path) -> None:
    sizes = []
    for number, hours in enumerate((24, 168)):
        run = begin_soak(tmp_path / str(number), f"{hours}h")
        run.start()
        for at in range(0, hours * 3600, 300):
            for gpu in range(8):
                run.recorder.add_value(at, "gpu.power", f"gpu={gpu}", "W", 690.0 + at % 7)
        sizes.append(len(json.dumps(to_json(run.append()))))
    assert sizes[1] < 1.5 * sizes[0]


def test_live_document_has_the_progress_of_the_soak(tmp_path: Path) -> None:
    run = begin_soak(tmp_path / "runs", "10m")
    run.start()
    run._base_s = 150.0
    run.append(observations=measure_good(run, 1), launches=[builders.launch(SOAK, ("h1",), devices=2)])
    document = build_document(run)
    documents.validate({**document, "written": 0}, "live", source="live.json")
    stage = next(one for one in document["stages"] if one["name"] == SOAK)
    assert (stage["state"], stage["progress"]) == ("running", pytest.approx(0.25, abs=0.01))
    # 450 s of the soak remain. In the profile soak-rehearsal, a round has a deadline of 120 s.
    assert stage["deadline"] == pytest.approx(time.time() + 450 + 120, abs=5)
    span = run.span()
    halfway = span.fields(time.time() + span.ends / 2 - time.time() / 2, time.time())
    assert halfway["progress"] == pytest.approx(0.625, abs=0.01)
    run.finish("finding", "gpu=1: bad")
    publish_record(run)
    published = documents.read(tmp_path / "runs" / "live.json", "live")
    assert [one["state"] for one in published["stages"] if one["name"] == SOAK] == ["failed"]


def test_record_without_a_soak_is_valid() -> None:
    plan = builders.plan("h1", rackproof_gang="none")
    document = json.loads(json.dumps(to_json(builders.records(plan, "h1")[0])))
    documents.validate(document, "record", source="a record without a soak")
    assert record_from_json(document).soak is None


@pytest.mark.parametrize("text", ["", "24", "h", "1.5h", "-1h", "24 h", "0s", "40d"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="rackproof_soak_duration"):
        builders.plan(profile="soak-rehearsal", rackproof_soak_duration=text)


# ---- sampling through the NVML stub

SOAK_WITH_NVML = """
import json, sys, time
from pathlib import Path
from agent.run.record import HostRun
from agent.soak.soak import run_soak
from agent.soak.soak_run import SoakRun
from schemas.records import to_json
from schemas.stages import SOAK
from tests import builders
from collectors.table import build_collectors

plan = builders.plan("h1", profile="soak", gpu_count=4, rackproof_gang="none", rackproof_soak_duration="2s")
directory = Path(sys.argv[1])
HostRun.begin(directory, "h1", json.dumps(to_json(plan)))
run = SoakRun(directory, "h1")

def launch(number, span):
    time.sleep(1.2)
    return run.append(launches=[builders.launch(SOAK, ("h1",), devices=2)])

record = run_soak(run, launch, build_collectors([0, 1, 2, 3], root=directory), lambda line: None)
print(json.dumps(to_json(record)["soak"]))
"""


def test_record_has_power_clock_temperature_and_throttling_of_every_gpu(tmp_path: Path) -> None:
    library = nvml.build(tmp_path / "library")
    scenario = nvml.write(tmp_path / "now", "healthy-h200x4", "gpu.2.CurrentClocksEventReasons=0x40")
    output = nvml.python(["-c", textwrap.dedent(SOAK_WITH_NVML), tmp_path / "run"], library, scenario)
    document = json.loads(output.splitlines()[-1])
    names = {"gpu.power", "gpu.clock.sm", "gpu.temperature", "gpu.throttle.active"}
    series = {(one["name"], one["scope"]): one for one in document["timeline"]["series"]}
    assert {name for name, _ in series} == names
    for gpu in range(4):
        assert sum(series["gpu.power", f"gpu={gpu}"]["n"]) >= 3
        throttled = max(series["gpu.throttle.active", f"gpu={gpu},reason=other"]["mean"])
        assert throttled == (1.0 if gpu == 2 else 0.0)
    assert {event["scope"] for event in document["timeline"]["events"]} == {"gpu=2,reason=hw_thermal"}


# ---- verdicts: drift relative to the start, and relative to the fleet

DAY = 24 * HOUR


ROUND_S = 300


def evidence_of_soak(plan: Plan, *, rounds: int = 288, **changes: Callable[[float], float]) -> dict[str, Any]:
    """Return the evidence of a soak with rounds of 5 minutes. `h1_3=f` multiplies the rate of GPU 3 of h1 by f(seconds).

    The seconds are counted from the start of the soak. The rates other than `stress.throughput` are constant.
    """
    evidence, duration_s = builders.evidence(plan), float(rounds * ROUND_S)
    for number, host in enumerate(plan.hosts):
        noise = random.Random(number)  # noqa: S311 - reproducible
        recorder = Recorder()
        results = tuple(builders.results(plan, host.name, SOAK))
        for at in range(270, int(duration_s), ROUND_S):
            for item in results:
                if item.unit not in RATES:
                    continue
                value = float(item.value or 0)
                if item.name == "stress.throughput":
                    gpu = item.scope.removeprefix("gpu=")
                    value *= changes.get(f"{host.name}_{gpu}", lambda at: 1.0)(at) * noise.gauss(1.0, 0.003)
                recorder.add_value(at, item.name, item.scope, item.unit, value, identifying_params(item))
        record, *rest = evidence[host.name].records
        ended = after_start(duration_s)
        record = replace(
            record,
            ended=ended,
            snapshots=tuple(replace(item, stage=SOAK if item.stage == "benchmark" else item.stage) for item in record.snapshots),
            observations=results,
            launches=tuple(
                replace(builders.launch(SOAK, (host.name,), devices=2), number=number, began=after_start((number - 1) * ROUND_S))
                for number in sorted({1, *range(max(1, rounds - 2), rounds + 1)})
            ),
            soak=Soak(
                began=builders.WHEN, planned_s=duration_s, soaked_s=duration_s, finished=rounds, ended=ended,
                ended_by="time", timeline=recorder.timeline(whole=False),
            ),
        )  # fmt: skip
        *earlier, last = record.snapshots
        record = replace(record, snapshots=(*earlier, replace(last, at=ended)))
        evidence[host.name] = replace(evidence[host.name], records=(record, *rest))
    return evidence


def after_start(seconds: float) -> str:
    """Return the time that many seconds after builders.WHEN."""
    return datetime.fromtimestamp(epoch_seconds(builders.WHEN) + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return builders.plan("h1", "h2", profile="soak", gpu_count=2, rackproof_soak_duration="24h")


def not_passed(plan: Plan, evidence: Any) -> list[Verdict]:
    """Return all verdicts on the evidence except `pass`."""
    return [verdict for verdict in judge(plan, evidence, read_packs([])) if verdict.verdict != "pass"]


def test_constant_rates_pass_and_one_slow_round_is_no_drift(plan: Plan) -> None:
    assert not_passed(plan, evidence_of_soak(plan)) == []
    dip = evidence_of_soak(plan, h1_0=lambda at: 0.5 if 40000 < at < 40400 else 1.0)  # one slow round
    assert [item for item in not_passed(plan, dip) if item.name.startswith("drift.")] == []


def test_slowing_gpu_fails_with_the_time_of_its_slowdown(plan: Plan) -> None:
    evidence = evidence_of_soak(plan, h1_1=lambda at: 1.0 if at < 4.2 * HOUR else 0.95)
    result = [item for item in not_passed(plan, evidence) if item.criterion == "drift-stress"]
    assert [(item.host, item.scope, item.serial, item.verdict) for item in result] == [("h1", "gpu=1", "h1-1", FAIL)]
    assert result[0].reason.startswith("found 0.95")
    since = result[0].reason.split("; from ")[1].split(" on, ")[0]
    assert "04:03" <= since <= "04:21"  # 4.2 h are 04:12; each time bucket is 8.5 minutes long
    assert result[0].reason.endswith(" % below its level at the start of the soak")
    assert float(result[0].reason.split(" on, at least ")[1].split(" %")[0]) == pytest.approx(5.0, abs=0.6)
    assert {(item.host, item.scope) for item in not_passed(plan, evidence)} == {("h1", "gpu=1")}


def test_temporary_slowdown_is_reported_with_its_end(plan: Plan) -> None:
    evidence = evidence_of_soak(plan, h2_0=lambda at: 0.9 if 8 * HOUR <= at < 11 * HOUR else 1.0)
    reason = next(item.reason for item in not_passed(plan, evidence) if item.criterion == "drift-stress")
    begins, ends = reason.split("from ")[1].split(",")[0].split(" to ")
    assert begins[:2] in ("07", "08")
    assert ends[:2] in ("10", "11")


def test_small_slowdown_of_a_gpu_fails_only_if_the_fleet_slows_down_less(plan: Plan) -> None:
    """A slowdown of more than 3 % always fails (`drift-stress`)."""

    def slower_after_12_hours(at: float) -> float:
        return 1.0 if at < 12 * HOUR else 0.985

    all_gpus = dict.fromkeys(("h1_0", "h1_1", "h2_0", "h2_1"), slower_after_12_hours)
    assert not_passed(plan, evidence_of_soak(plan, **all_gpus)) == []
    one_gpu = {**dict.fromkeys(all_gpus, lambda at: 1.0), "h2_1": lambda at: 1.0 if at < 12 * HOUR else 0.975}
    result = not_passed(plan, evidence_of_soak(plan, **one_gpu))
    assert [(item.host, item.scope, item.criterion) for item in result] == [("h2", "gpu=1", "drift-stress-vs-fleet")]
    assert "of the fleet's median" in result[0].reason
    assert "below its level at the start of the soak" in result[0].reason


def test_short_soak_or_one_with_failed_or_interrupted_rounds_is_inconclusive(plan: Plan) -> None:
    evidence = evidence_of_soak(plan)

    def reasons_with(**changes: Any) -> list[str]:
        """Return the reasons of the verdicts if `changes` replace fields of h1's soak, which has 288 finished rounds."""
        record = evidence["h1"].records[0]
        soak = replace(record.soak, **changes)
        result = not_passed(plan, with_h1(evidence, soak=soak, launches=record.launches[: soak.finished]))
        assert {(item.host, item.name, item.verdict) for item in result} <= {("h1", "stage.soak", INCONCLUSIVE)}
        return [item.reason for item in result]

    assert reasons_with(ended="", ended_by="", soaked_s=7200.0) == [
        "cut off after 2 h 00 min of 24 h 00 min: resume the run"
    ]
    assert reasons_with(reason="gpu=1 gpu.ecc: bad; rma", soaked_s=7200.0) == [
        "ended after 2 h 00 min of 24 h 00 min: gpu=1 gpu.ecc: bad; rma"
    ]
    assert reasons_with(failed=2) == ["2 of 290 rounds did not finish"]
    few = replace(evidence["h1"].records[0].soak.timeline, bucket_s=DAY)
    few = replace(
        few, series=tuple(replace(one, at=(0,), n=(1,), low=(1.0,), mean=(1.0,), high=(1.0,)) for one in few.series)
    )
    (reason,) = reasons_with(timeline=few, finished=1)
    assert reason.startswith("too few rounds to evaluate the drift of collective.all_reduce.busbw, ")
    assert reason.endswith("transformer.throughput: 1 in 24 h 00 min")
    (reason,) = reasons_with(timeline=replace(few, series=()))
    assert reason.startswith("the timeline has no series of collective.all_reduce.busbw, ")
    assert reasons_with(cut=3) == []  # three interrupted rounds are tolerated
    reason = "4 of 292 rounds were interrupted because their supervisor process ended, for an unknown reason"
    assert reasons_with(cut=4) == [reason]
    assert reasons_with(soaked_s=DAY - 60) == ["ended after 23 h 59 min of 24 h 00 min, without a reason"]
    assert reasons_with(planned_s=60.0, soaked_s=60.0) == [
        "the host planned to soak 1 min 00 s, but the plan has 24 h 00 min",
        "ended after 1 min 00 s of 24 h 00 min, without a reason",
    ]


def with_h1(evidence: Any, **changes: Any) -> Any:
    """Return the evidence with these changed fields in the first record of host h1."""
    record, *rest = evidence["h1"].records
    return {**evidence, "h1": replace(evidence["h1"], records=(replace(record, **changes), *rest))}


@pytest.mark.parametrize(("outcome", "reason"), [("failed", "rank 1 crashed"), ("finished", "no result of rank 1")])
def test_failed_launch_is_inconclusive_even_if_the_soak_counts_no_failed_round(
    plan: Plan, outcome: str, reason: str
) -> None:
    evidence = evidence_of_soak(plan)
    failed = replace(builders.launch(SOAK, ("h1",), outcome, reason, devices=2), number=7)
    first, *others = evidence["h1"].records[0].launches
    result = not_passed(plan, with_h1(evidence, launches=(first, failed, *others)))
    assert [(item.host, item.name, item.verdict, item.reason) for item in result] == [
        ("h1", "stage.soak", INCONCLUSIVE, f"1 of 288 rounds did not finish: round 7: {reason}")
    ]


def test_gpu_whose_rate_is_missing_in_many_rounds_is_inconclusive(plan: Plan) -> None:
    evidence = evidence_of_soak(plan)
    soak = evidence["h1"].records[0].soak

    def reasons_if_kept(keep: Callable[[int], bool]) -> list[tuple[str, str, str]]:
        """Return scope, name and reason of the verdicts if the rate of h1's GPU 1 has only the buckets that `keep` accepts."""
        thinned = ("stress.throughput", "gpu=1")
        series = tuple(
            keep_buckets(one, keep) if (one.name, one.scope) == thinned else one for one in soak.timeline.series
        )
        timeline = replace(soak.timeline, series=series)
        result = not_passed(plan, with_h1(evidence, soak=replace(soak, timeline=timeline)))
        return [(item.scope, item.name, item.reason) for item in result if item.name == "stage.soak"]

    def keep_buckets(series: Any, keep: Callable[[int], bool]) -> Any:
        positions = [position for position, at in enumerate(series.at) if keep(at)]
        names = ("at", "n", "low", "mean", "high")
        return replace(
            series, **{name: tuple(getattr(series, name)[position] for position in positions) for name in names}
        )

    last = soak.timeline.series[0].at[-1]
    assert reasons_if_kept(lambda at: at != last) == []  # one missing bucket is tolerated
    scope, name, reason = reasons_if_kept(lambda at: at < last // 2)[0]
    assert (scope, name) == ("gpu=1", "stage.soak")
    assert reason.startswith("stress.throughput[dtype=bf16,world_size=2] was last measured at 11:5")
    ((scope, _, reason),) = reasons_if_kept(lambda at: at % 2 == 0)
    assert scope == "gpu=1"
    assert reason.endswith(" of 288 rounds")


def test_drift_of_a_short_soak_is_not_judged(plan: Plan) -> None:
    short = builders.plan("h1", "h2", profile="soak", gpu_count=2, rackproof_soak_duration="10m")
    evidence = evidence_of_soak(short, rounds=2)
    report = merge(short, evidence, read_packs([]))
    assert report.decision == "accepted"
    (drift,) = (line for line in report.acceptance.summary if line.startswith("Drift: "))
    assert drift.startswith("Drift: NOT JUDGED for collective.all_reduce.busbw, ")
    assert drift.endswith(" (too few values: plan a soak of at least one hour)")


def test_host_without_the_planned_soak_is_inconclusive(plan: Plan) -> None:
    evidence = evidence_of_soak(plan)
    record, *rest = evidence["h1"].records
    without_soak = replace(
        record, ended=record.began, soak=None, snapshots=record.snapshots[:1], observations=(), launches=()
    )
    evidence["h1"] = replace(evidence["h1"], records=(without_soak, *rest))
    result = not_passed(plan, evidence)
    assert {(item.host, item.name, item.verdict) for item in result} == {("h1", "stage.soak", INCONCLUSIVE)}
    assert "the plan has a soak, but no record of the host has one" in [item.reason for item in result]


def test_drift_of_a_long_soak_needs_data_after_the_first_hour() -> None:
    recorder = Recorder()
    for at in range(0, 3000, 300):
        recorder.add_value(at, "stress.throughput", "gpu=0", "FLOP/s", 1.0)
    timeline = recorder.timeline()
    assert rate_course(timeline.series[0], soak_state(timeline)) is None  # no data after the first hour
    # If 3000 s were planned, the drift is relative to the first tenth of that time.
    assert rate_course(timeline.series[0], soak_state(timeline, planned_s=3000.0)) is not None


class Clock:
    """A clock in place of the module `time`. `now` replaces `utc_now`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def time(self) -> float:
        return epoch_seconds(builders.WHEN) + self.seconds

    def now(self) -> str:
        return after_start(self.seconds)


class KilledError(Exception):
    """The supervisor was killed."""


@pytest.mark.parametrize("pause_s", [5.0, 4000.0, 400_000.0, 1e9])
@pytest.mark.parametrize(
    "when",
    [
        "before the round", "in the round", "before the record", "before the record, after a checkpoint by the watching thread",
        "after the record", "after the record and the checkpoint",
    ],
)  # fmt: skip
def test_killed_supervisor_causes_no_contradiction_in_the_record_of_a_soak(
    when: str, pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds take 5 minutes. The supervisor is killed three times at the point `when`, and started again `pause_s` later."""
    clock = Clock()
    monkeypatch.setattr("agent.soak.soak_run.time", clock)
    monkeypatch.setattr("agent.soak.soak_run.utc_now", clock.now)
    monkeypatch.setattr("agent.run.record.utc_now", clock.now)
    plan = builders.plan("h1", profile="soak", gpu_count=1, rackproof_gang="none", rackproof_soak_duration="1h")
    run = HostRun.begin(tmp_path, "h1", json.dumps(to_json(plan)))
    run.append(snapshots=[replace(builders.snapshot(range(1)), at=clock.now())])
    results = builders.results(plan, "h1", SOAK)

    def attempt(run: SoakRun, kill: str) -> None:
        def die_if(point: str) -> None:
            if kill == point:
                raise KilledError

        die_if("before the round")
        began, number = clock.now(), run.begin_round()
        work = write_rank_results(run, *results)
        clock.seconds += 300.0
        run.write_checkpoint()
        die_if("in the round")
        launch = replace(builders.launch(SOAK, ("h1",)), number=number, began=began, duration_s=299.0)
        with monkeypatch.context() as patched:
            if kill.startswith("before the record"):

                def write(*_: object) -> None:
                    if "watching thread" in kill:
                        run.write_checkpoint()
                    die_if(kill)

                patched.setattr("agent.run.record.documents.write", write)
            run.append(observations=results, launches=[launch])
        die_if("after the record")
        run.clear_work(work)
        run.write_checkpoint()
        die_if("after the record and the checkpoint")

    kills = [when] * 3
    run = SoakRun(tmp_path, "h1")
    run.start()
    while run.left_s > 0:
        try:
            attempt(run, kills.pop() if kills and run.state.rounds == 3 - len(kills) else "")
        except KilledError:
            clock.seconds += pause_s
            run = SoakRun(tmp_path, "h1")
            run.start()
            run.salvage_round(tmp_path / "work" / SOAK)
    record = run.finish("time", "")
    assert record.soak
    assert not kills
    assert record.soak.rounds >= 12
    (view,) = host_views(plan, {"h1": Evidence(records=(record,))}, read_packs([]))
    assert [*soak_problems(view, record)] == []
    assert [item.reason for item in judge_soak(view)] == []


# ---- the report


def test_report_of_a_rehearsal_has_a_sparkline_of_each_process(tmp_path: Path) -> None:
    run = begin_soak(tmp_path)
    record = run_rounds(run, measure_good)
    report = merge(run.plan, {"h1": Evidence(records=(record,))}, read_packs([]))
    assert render_html(report).count('<svg class="spark"') == 1
    assert "| `h1` | `process 0` |" in render_markdown(report)


def test_report_has_a_small_section_with_sparklines(plan: Plan) -> None:
    evidence = evidence_of_soak(plan, h1_1=lambda at: 1.0 if at < 4 * HOUR else 0.95)
    report = merge(plan, evidence, read_packs([]))
    page, text = render_html(report), render_markdown(report)
    documents.validate(json.loads(json.dumps(to_json(report))), "report", source="generated report")
    assert page.count('<svg class="spark"') == 16  # two hosts, each with two GPUs and six rates of the whole host
    begins = page.index('<section id="soak"')
    assert len(page[begins : page.index("</section>\n\n", begins)]) < 24_000
    assert "Soak: 2 of 2 hosts soaked 24 h 00 min (576 rounds in all)" in "\n".join(report.acceptance.summary)
    assert "fell by 4." in text
    assert "| `h1` | `GPU 1` |" in text
    assert all(len(one.at) <= 40 for host in report.hosts if host.soak for one in host.soak.timeline.series)


def test_report_without_a_soak_has_no_soak_section() -> None:
    plan = builders.plan()
    report = merge(plan, builders.evidence(plan), read_packs([]))
    assert "soak" not in render_html(report).lower()
    assert "## Soak" not in render_markdown(report)


def test_downsampled_timeline_keeps_the_extremes() -> None:
    recorder = Recorder()
    for at in range(0, 86400, 300):
        recorder.add_value(at, "gpu.power", "gpu=0", "W", 1000.0 if at == 43200 else 690.0)
    result = downsample(recorder.timeline(), 40)
    assert len(result.series[0].at) <= 40
    assert max(result.series[0].high) == 1000.0
    assert sum(result.series[0].n) == 288


def test_soak_command_is_refused_if_the_plan_has_no_soak(tmp_path: Path) -> None:
    plan = builders.plan("h1", profile="rehearsal", rackproof_gang="none")
    HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))
    command = [sys.executable, ROOT / "rackproof", "soak", "--run-dir", tmp_path / "run", "--host", "h1"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 64
    assert "the plan of this run has no soak" in completed.stderr


def test_ended_soak_is_printed_as_one_json_object_and_invalid_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin_soak(tmp_path)
    run_rounds(run, measure_good)
    arguments = ["soak", f"--run-dir={run.directory}", "--host=h1"]
    assert rackproof.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == 4
    assert rackproof.main([*arguments, "--looks=-1"]) == 64
    assert "--looks -1: give 1 or more" in capsys.readouterr().err
    assert rackproof.main([*arguments, "--detach", "--wait"]) == 64
    assert (
        "--wait does not apply to a soak. Give --looks 1, which waits until the soak has ended"
        in capsys.readouterr().err
    )
