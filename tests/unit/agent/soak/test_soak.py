"""A soak: round after round into one bounded record, over whoever is killed; early ends; drift against its own first hour."""

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
from pathlib import Path
from typing import Any

import pytest

from agent.exporter.live import Span, build_document, publish_record
from agent.run.record import HostRun
from agent.sampling.timeline import MAX_BUCKETS, MAX_EVENTS, Recorder
from agent.soak import soak
from agent.soak.aggregate import aggregate_rounds, select_launches, select_snapshots
from agent.soak.soak import run_soak
from agent.soak.soak_run import CHECKPOINT, SoakRun
from collectors.base import Absent
from collectors.nvml import GpuSample
from fleet.judge.criteria import read_packs
from fleet.judge.drift import rate_course
from fleet.judge.judge import judge
from fleet.planning.plan import parse_duration
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from schemas import documents
from schemas.decode import record_from_json
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.records import ERROR, Launch, Metric, Observation, Record, Snapshot, to_json
from schemas.reports import FAIL, INCONCLUSIVE, Verdict
from schemas.stages import SOAK
from schemas.timeline import Soak, Timeline, soak_from_json, thinned
from tests import ROOT, builders
from tests.fakes import nvml

HOUR = 3600.0
STRESS = {"dtype": "fp32"}


# ---- the timeline


def test_full_buckets_become_one_of_two_and_lose_neither_extreme_nor_mean() -> None:
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


def test_series_keep_the_same_buckets_when_one_of_them_is_new() -> None:
    recorder = Recorder()
    recorder.add_value(5000, "gpu.power", "gpu=0", "W", 1.0)
    recorder.add_value(10, "gpu.power", "gpu=1", "W", 2.0)
    result = recorder.timeline()
    assert [(one.scope, one.at[0] * result.bucket_s) for one in result.series] == [("gpu=0", 4992), ("gpu=1", 0)]


def test_recorder_goes_on_where_another_process_was_cut_off() -> None:
    whole, first = Recorder(), Recorder()
    for at in range(300):
        whole.add_value(at, "gpu.power", "gpu=0", "W", at)
        first.add_value(at, "gpu.power", "gpu=0", "W", at)
    second = Recorder(soak_from_json({**to_json(state(first.timeline()))}).timeline)
    for at in range(300, 700):
        whole.add_value(at, "gpu.power", "gpu=0", "W", at)
        second.add_value(at, "gpu.power", "gpu=0", "W", at)
    one, other = whole.timeline(), second.timeline()
    assert (one.bucket_s, one.series[0].at, one.series[0].n) == (other.bucket_s, other.series[0].at, other.series[0].n)
    assert one.series[0].mean == pytest.approx(other.series[0].mean, rel=1e-3)


def state(timeline: Timeline, **more: Any) -> Soak:
    return Soak(**{"began": builders.WHEN, "planned_s": 10 * HOUR, "soaked_s": 10 * HOUR, "timeline": timeline, **more})


def counters(**values: float) -> Snapshot:
    metrics = [
        Metric(name=name.replace("__", "."), unit="1", values={"gpu=0": value}) for name, value in values.items()
    ]
    return Snapshot(stage=SOAK, phase="during", at=builders.WHEN, duration_s=0.1, metrics=tuple(metrics))


def test_counter_that_rises_is_an_event_and_one_that_stands_is_none() -> None:
    recorder = Recorder()
    for at, replays in ((0, 7), (10, 7), (20, 9), (30, 9), (40, 10), (5000, 11)):
        recorder.add_counters(at, counters(gpu__pcie__replays=replays, gpu__energy=at, gpu__power=at))
    events = recorder.timeline().events
    assert [(one.at_s, one.until_s, one.name, one.scope, one.count) for one in events] == [
        (20, 40, "gpu.pcie.replays", "gpu=0", 3),
        (5000, 5000, "gpu.pcie.replays", "gpu=0", 1),
    ]
    assert events[0].text == "rose from 7 to 9"


def test_new_xid_is_an_event_and_an_old_one_is_not() -> None:
    def xids(**seen: int) -> Snapshot:
        values = {f"pci=0000:1b:00.0,xid={number[1:]}": count for number, count in seen.items()}
        metric = Metric(name="xid.count", unit="1", values=values)
        return Snapshot(stage=SOAK, phase="during", at=builders.WHEN, duration_s=0.1, metrics=(metric,))

    recorder = Recorder()
    recorder.add_counters(0, xids(x31=2))
    recorder.add_counters(10, xids(x31=2, x79=1))
    assert [(one.scope, one.count) for one in recorder.timeline().events] == [("pci=0000:1b:00.0,xid=79", 1)]


def test_thermal_throttling_differs_from_the_power_limit() -> None:
    recorder = Recorder()
    for at in range(100):
        hot = 0x40 if 50 <= at < 60 else 0
        recorder.add_samples(at, {0: GpuSample(690.0, 1.5e9, 60.0, 0x4 | hot, 2.6e9)})
    recorder.add_samples(100, {0: Absent(status="error", reason="GPU is lost")})
    values = {(one.name, one.scope): one for one in recorder.timeline().series}
    assert sum(values["gpu.throttle.active", "gpu=0,reason=other"].mean) == 10
    assert sum(values["gpu.throttle.active", "gpu=0,reason=power_cap"].mean) == 100
    assert [(one.at_s, one.name, one.scope, one.count, one.text) for one in recorder.timeline().events] == [
        (50, "gpu.throttle.active", "gpu=0,reason=hw_thermal", 10, "its clocks were throttled"),
        (100, "gpu.power", "gpu=0", 1, "error: GPU is lost"),
    ]


def test_events_without_end_are_counted_and_not_kept() -> None:
    recorder = Recorder()
    for number in range(MAX_EVENTS + 50):
        recorder.add_event(number * 1000.0, "gpu.pcie.replays", "gpu=0")
    assert (len(recorder.timeline().events), recorder.timeline().left_out) == (MAX_EVENTS, 50)


# ---- many rounds, one observation


def rate(value: float, name: str = "stress.throughput", **params: Any) -> Observation:
    return builders.observation(name, value, scope="cpu=0", unit="FLOP/s", stage=SOAK, **(params or STRESS))


def rounds(*seen: Observation) -> Observation:
    recorder, result = Recorder(), []
    for number, item in enumerate(seen, 1):
        result = aggregate_rounds(result, [item], recorder, at_s=number * 300.0, number=number)
    assert len(result) == 1
    return result[0]


def test_rate_of_all_rounds_is_their_median_with_count_and_extremes() -> None:
    result = rounds(*(rate(value) for value in (10.0, 12.0, 5.0, 11.0, 11.0)))
    assert result.value == 11.0
    assert result.samples
    assert (result.samples.n, result.samples.min, result.samples.max) == (5, 5.0, 12.0)


def test_parameter_that_only_says_how_it_went_makes_no_other_figure() -> None:
    observed = [
        rate(0, "integrity.wrong_words", pattern="random", bytes=size, free_bytes=size) for size in (100, 200, 300)
    ]
    assert rounds(*observed).params["bytes"] == 300


@pytest.mark.parametrize(
    ("name", "values", "reported"),
    [
        ("integrity.wrong_words", (0, 3, 0, 1), 4),
        ("stress.throttled_share", (0.0, 0.2, 0.0), 0.2),
        ("stress.temperature", (61.0, 88.0, 62.0), 88.0),
        ("integrity.tested_share", (0.98, 0.5, 0.98), 0.5),
        ("training.loss_finite", (True, False, True), False),
        ("digest.value", ("aa", "bb", "aa"), "aa, then bb"),
        ("digest.value", ("aa", "aa", "aa"), "aa"),
    ],
)
def test_what_must_never_be_is_not_outweighed_by_good_rounds(name: str, values: Sequence[Any], reported: Any) -> None:
    result = rounds(*(rate(value, name, pattern="random") for value in values))
    assert result.value == reported
    assert type(result.value) is type(reported)


def test_gpu_that_computes_another_digest_in_another_round_does_not_repeat_itself() -> None:
    recorder, result = Recorder(), []
    for number, digest in enumerate(("aa", "aa", "bb", "aa", "bb"), 1):
        observed = [rate(0.0, "digest.value", workload="gemm"), rate(0, "digest.mismatches", workload="gemm")]
        observed[0] = replace(observed[0], value=digest, params={"workload": "gemm", "repetitions": number})
        result = aggregate_rounds(result, observed, recorder, at_s=number, number=number)
    assert [(one.name, one.value) for one in result] == [("digest.value", "aa, then bb"), ("digest.mismatches", 1)]


def test_figure_that_could_not_be_had_in_one_round_stays_an_error() -> None:
    lost = replace(rate(0.0), status=ERROR, value=None, reason="CUDA error: unspecified launch failure")
    result = rounds(rate(1.0), lost, rate(1.0))
    assert (result.status, result.reason) == (ERROR, "in round 2: CUDA error: unspecified launch failure")


def test_of_many_launches_the_first_the_last_and_the_failed_are_kept() -> None:
    kept: tuple[Launch, ...] = ()
    for number in range(1, 400):
        outcome = "failed" if number in (50, 60) else "finished"
        kept = select_launches(
            [*kept, replace(builders.launch(SOAK, ("h1",), outcome), number=number, log_tail="x" * 4000)]
        )
    assert [launch.number for launch in kept] == [1, 50, 60, 397, 398, 399]
    assert [bool(launch.log_tail) for launch in kept] == [False, True, True, False, False, False]


def taken(phase: str, second: int, **over: Any) -> Snapshot:
    made = builders.snapshot(range(1), stage=SOAK, phase=phase, **over)
    return replace(made, at=f"2026-11-21T04:{second // 60:02}:{second % 60:02}Z")


def test_of_many_snapshots_the_edges_and_those_with_a_change_are_kept() -> None:
    kept: tuple[Snapshot, ...] = ()
    for number in range(300):
        replays = number if number < 200 else number - 200  # the driver was loaded again
        pending = number == 100
        kept = select_snapshots(
            [*kept, taken("after", number, gpu__pcie__replays=replays, gpu__remapped_rows__pending=pending)]
        )
    read = [{metric.name: metric.values.get("gpu=0") for metric in one.metrics} for one in kept]
    reported = [(one["gpu.pcie.replays"], one["gpu.remapped_rows.pending"]) for one in read]
    assert reported == [(0, False), (100, True), (101, False), (0, False), (99, False)]


def test_both_sides_of_a_reboot_are_kept() -> None:
    kept: tuple[Snapshot, ...] = ()
    for number in range(300):
        up = 50_000.0 + number if number < 100 else 300_000.0 + number if number > 200 else number - 90.0
        observed = replace(
            taken("before", number), metrics=(Metric(name="host.uptime", unit="s", values={"host": up}),)
        )
        kept = select_snapshots([*kept, observed])
    assert [one.metrics[0].values["host"] for one in kept] == [50_000.0, 50_099.0, 10.0, 300_299.0]


# ---- round after round

Round = Callable[[SoakRun, int], Sequence[Observation]]


def begin(tmp_path: Path, duration: str = "100s", **variables: Any) -> SoakRun:
    chosen = {"rackproof_gang": "none", "rackproof_soak_duration": duration, **variables}
    plan = builders.plan("h1", profile="soak-rehearsal", gpu_count=1, **chosen)
    HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))
    return SoakRun(tmp_path / "run", "h1")


def go(run: SoakRun, measure: Round, outcome: str = "finished", step_s: float = 25.0) -> Record:
    """Soaks with rounds that take no torchrun: the clock is turned on by `step_s` for each."""
    turned = [0.0]

    def launch(number: int, span: Span) -> Record:
        assert span.began < span.ends
        observations = measure(run, number)
        turned[0] += step_s
        run._base_s += step_s
        made = replace(builders.launch(SOAK, ("h1",), outcome, "" if outcome == "finished" else "why"), number=number)
        return run.append(observations=observations, launches=[made])

    return run_soak(run, launch, [], lambda line: None, sleep=lambda wait: None)


def good(run: SoakRun, number: int) -> list[Observation]:
    wrong = replace(rate(0, "stress.wrong_products", dtype="fp32"), unit="1")
    return [rate(100.0 + number), wrong]


def test_rounds_go_on_until_the_time_is_over_and_are_one_record(tmp_path: Path) -> None:
    run = begin(tmp_path)
    record = go(run, good)
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
    """As SIGKILL: nothing is tidied up."""


def test_who_was_killed_goes_on_and_what_the_lost_round_had_measured_counts(tmp_path: Path) -> None:
    run = begin(tmp_path)

    def measure(run: SoakRun, number: int) -> list[Observation]:
        if number == 3:
            work = run.directory / "work" / SOAK
            work.mkdir(parents=True)
            observation = [to_json(rate(7.0)), to_json(replace(rate(0.0), status=ERROR, value=None, reason="SIGTERM"))]
            result = {"rank": 0, "observations": observation, "software": {}}
            (work / "rank0.json").write_text(json.dumps(result))
            raise Killed
        return good(run, number)

    with pytest.raises(Killed):
        go(run, measure)
    again = SoakRun(run.directory, "h1")
    assert (again.state.finished, again.state.ended) == (2, "")
    began, soaked = again.state.began, again.state.soaked_s
    assert soaked >= 50.0
    record = go(again, good)
    assert record.soak
    assert (record.soak.began, record.soak.ended_by) == (began, "time")
    assert (record.soak.finished, record.soak.cut) == (4, 1)
    assert record.soak.soaked_s < soaked + 100.0  # the time before counts
    series = record.soak.timeline.series[0]
    assert (sum(series.n), min(series.low)) == (5, 7.0)
    assert [event.name for event in record.soak.timeline.events] == ["soak.cut"]
    assert [launch.number for launch in record.launches] == [1, 2, 4, 5]
    assert all(observation.status == "measured" for observation in record.observations)


def test_killed_host_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    run = begin(tmp_path, "10m")
    run.start()
    run._base_s = 100.0
    run.append(launches=[builders.launch(SOAK, ("h1",))])
    run._base_s = 160.0
    run.recorder.add_value(160, "gpu.power", "gpu=0", "W", 690.0)
    run.write_checkpoint()
    again = SoakRun(run.directory, "h1")
    assert again.state.soaked_s >= 160.0
    assert [one.name for one in again.state.timeline.series] == ["gpu.power"]
    (run.directory / CHECKPOINT).write_text('{"began": ')  # a disk that lost it
    assert 100.0 <= SoakRun(run.directory, "h1").state.soaked_s < 160.0


WRONG = ("integrity.wrong_words", 3)
SLOW = ("drift.stress.throughput", 0.5)


@pytest.mark.parametrize(
    ("policy", "bad", "ended_by"),
    [
        ("fatal", WRONG, "finding"),
        ("fatal", ("stress.throughput", 0.0), "time"),
        ("any", ("stress.throughput", 0.0), "finding"),
        ("never", WRONG, "time"),
    ],
)
def test_policy_decides_which_finding_ends_a_hosts_soak(tmp_path: Path, policy: str, bad: Any, ended_by: str) -> None:
    """Speed waits for the report; what says that the part is unfit does not."""
    run = begin(tmp_path, rackproof_soak_stop_on=policy)
    record = go(run, lambda run, number: [rate(bad[1], bad[0], pattern="random", dtype="fp32")])
    assert record.soak
    assert record.soak.ended_by == ended_by
    assert record.soak.finished == (1 if ended_by == "finding" else 4)
    assert record.soak.reason.startswith(f"cpu=0 {bad[0]}: found ") is (ended_by == "finding")


def test_rounds_that_come_to_no_end_end_the_soak_and_a_resumed_run_tries_again(tmp_path: Path) -> None:
    run = begin(tmp_path, "1h")
    record = go(run, lambda run, number: [], outcome="failed")
    assert record.soak
    assert (record.soak.ended_by, record.soak.failed) == ("failure", soak.MAX_FAILED)
    assert record.soak.reason == "3 rounds in a row failed: why"
    again = SoakRun(run.directory, "h1")
    again.reopen()
    assert not SoakRun(run.directory, "h1").state.ended
    record = go(again, good, step_s=1800.0)
    assert record.soak
    assert (record.soak.ended_by, record.soak.failed) == ("time", soak.MAX_FAILED)  # not forgotten
    assert [launch.number for launch in record.launches] == [1, 2, 3, 4, 5]


def test_round_that_finished_and_cannot_be_believed_is_a_failed_one(tmp_path: Path) -> None:
    run = begin(tmp_path, "1h")
    run.start()
    bad = builders.launch(SOAK, ("h1",), "finished", "no result of rank 0: not JSON")
    run.append(launches=[replace(bad, number=1)])
    assert (run.state.finished, run.state.failed) == (0, 1)


def leave(run: SoakRun, *seen: Observation) -> Path:
    """What a rank of the round under way has written."""
    work = run.directory / "work" / SOAK
    work.mkdir(parents=True, exist_ok=True)
    result = {"rank": 0, "observations": [to_json(one) for one in seen], "software": {}}
    (work / "rank0.json").write_text(json.dumps(result))
    return work


def test_error_of_a_round_that_was_cut_off_counts_and_our_own_doing_does_not(tmp_path: Path) -> None:
    run = begin(tmp_path, "1h")
    lost = replace(rate(0.0), status=ERROR, value=None, reason="CUDA error: an illegal memory access")
    ended = replace(rate(0.0, "memory.bandwidth"), status=ERROR, value=None, reason="RuntimeError: got SIGTERM")
    run.start()
    run.begin_round()
    assert run.salvage_round(leave(run, lost, ended))
    assert [
        (observation.name, observation.status, observation.reason) for observation in run.record().observations
    ] == [("stress.throughput", ERROR, "in round 1: CUDA error: an illegal memory access")]


def test_round_that_is_in_the_record_is_not_counted_again_after_a_kill(tmp_path: Path) -> None:
    run = begin(tmp_path, "1h")
    run.start()
    number = run.begin_round()
    wrong_words = rate(3, "integrity.wrong_words", pattern="random")
    work = leave(run, wrong_words)
    run.append(observations=[wrong_words], launches=[replace(builders.launch(SOAK, ("h1",)), number=number)])
    again = SoakRun(run.directory, "h1")  # killed before the work was cleared
    assert again.salvage_round(work) == ""
    assert not work.exists()
    assert (again.state.finished, again.state.cut) == (1, 0)
    assert [observation.value for observation in again.record().observations] == [3]
    again.begin_round()
    assert again.salvage_round(leave(again, wrong_words))
    assert (again.state.finished, again.state.cut) == (1, 1)
    assert [observation.value for observation in again.record().observations] == [6]


def test_record_of_a_week_is_no_larger_than_that_of_a_day(tmp_path: Path) -> None:
    sizes = []
    for number, hours in enumerate((24, 168)):
        run = begin(tmp_path / str(number), f"{hours}h")
        run.start()
        for at in range(0, hours * 3600, 300):
            for gpu in range(8):
                run.recorder.add_value(at, "gpu.power", f"gpu={gpu}", "W", 690.0 + at % 7)
        sizes.append(len(json.dumps(to_json(run.append()))))
    assert sizes[1] < 1.5 * sizes[0]


def test_exporter_gets_the_progress_of_the_soak(tmp_path: Path) -> None:
    run = begin(tmp_path / "runs", "10m")
    run.start()
    run._base_s = 150.0
    run.append(observations=good(run, 1), launches=[builders.launch(SOAK, ("h1",))])
    reported = build_document(run)
    documents.validate({**reported, "written": 0}, "live", source="live.json")
    stage = next(one for one in reported["stages"] if one["name"] == SOAK)
    assert (stage["state"], stage["progress"]) == ("running", pytest.approx(0.25, abs=0.01))
    assert stage["deadline"] == pytest.approx(time.time() + 450 + 120, abs=5)  # a round that has begun comes to its end
    span = run.span()
    halfway = span.fields(time.time() + span.ends / 2 - time.time() / 2, time.time())
    assert halfway["progress"] == pytest.approx(0.625, abs=0.01)
    run.finish("finding", "gpu=1: bad")
    publish_record(run)
    path = documents.read(tmp_path / "runs" / "live.json", "live")
    assert [one["state"] for one in path["stages"] if one["name"] == SOAK] == ["failed"]


def test_old_record_without_a_soak_is_still_one() -> None:
    plan = builders.plan("h1", rackproof_gang="none")
    document = json.loads(json.dumps(to_json(builders.records(plan, "h1")[0])))
    documents.validate(document, "record", source="an old record")
    assert record_from_json(document).soak is None


@pytest.mark.parametrize(
    ("text", "reported"), [("24h", 86400), ("45m", 2700), ("1h30m", 5400), ("2d", 172800), ("90s", 90)]
)
def test_duration_as_people_write_it(text: str, reported: float) -> None:
    assert parse_duration(text) == reported


@pytest.mark.parametrize("text", ["", "24", "h", "1.5h", "-1h", "24 h", "0s", "40d"])
def test_duration_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="rackproof_soak_duration"):
        builders.plan(profile="soak-rehearsal", rackproof_soak_duration=text)


# ---- a GPU, by the stub of NVML

GPU = """
import json, sys, time
from pathlib import Path
from agent.run.record import HostRun
from agent.soak.soak import run_soak
from agent.soak.soak_run import SoakRun
from schemas.records import to_json
from schemas.stages import SOAK
from tests import builders
import collectors

plan = builders.plan("h1", profile="soak", gpu_count=4, rackproof_gang="none", rackproof_soak_duration="2s")
directory = Path(sys.argv[1])
HostRun.begin(directory, "h1", json.dumps(to_json(plan)))
run = SoakRun(directory, "h1")

def launch(number, span):
    time.sleep(1.2)
    return run.append(launches=[builders.launch(SOAK, ("h1",))])

record = run_soak(run, launch, collectors.build_collectors([0, 1, 2, 3], root=directory), lambda line: None)
print(json.dumps(to_json(record)["soak"]))
"""


def test_power_clock_temperature_and_throttling_of_every_gpu_are_in_the_record(tmp_path: Path) -> None:
    library = nvml.build(tmp_path / "library")
    scenario = nvml.write(tmp_path / "now", "healthy-h200x4", "gpu.2.CurrentClocksEventReasons=0x40")
    said = nvml.python(["-c", textwrap.dedent(GPU), tmp_path / "run"], library, scenario)
    document = json.loads(said.splitlines()[-1])
    names = {"gpu.power", "gpu.clock.sm", "gpu.temperature", "gpu.throttle.active"}
    series = {(one["name"], one["scope"]): one for one in document["timeline"]["series"]}
    assert {name for name, _ in series} == names
    for gpu in range(4):
        assert sum(series["gpu.power", f"gpu={gpu}"]["n"]) >= 3
        holder = max(series["gpu.throttle.active", f"gpu={gpu},reason=other"]["mean"])
        assert holder == (1.0 if gpu == 2 else 0.0)
    assert {event["scope"] for event in document["timeline"]["events"]} == {"gpu=2,reason=hw_thermal"}


# ---- the judge: against its own first hour, and the fleet

DAY = 24 * HOUR


def soaked(plan: Plan, **changes: Callable[[float], float]) -> dict[str, Any]:
    """What a fleet leaves that soaked a day; `changes`: host and GPU (`h1_3`) -> share of its rate at a time."""
    left = builders.evidence(plan)
    for number, host in enumerate(plan.hosts):
        noise = random.Random(number)  # noqa: S311 - to be repeated
        recorder = Recorder()
        for at in range(270, int(DAY), 300):
            for gpu in host.devices:
                share = changes.get(f"{host.name}_{gpu}", lambda at: 1.0)(at) * noise.gauss(1.0, 0.003)
                recorder.add_value(at, "stress.throughput", f"gpu={gpu}", "FLOP/s", 6.5e14 * share, {"dtype": "bf16"})
        alone, *rest = left[host.name].records
        alone = replace(
            alone,
            observations=tuple(builders.results(plan, host.name, SOAK)),
            launches=(builders.launch(SOAK, (host.name,)),),
            soak=Soak(
                began=builders.WHEN, planned_s=DAY, soaked_s=DAY, finished=288, ended="2026-11-22T04:00:00Z",
                ended_by="time", timeline=recorder.timeline(),
            ),
        )  # fmt: skip
        left[host.name] = replace(left[host.name], records=(alone, *rest))
    return left


@pytest.fixture(scope="module")
def plan() -> Plan:
    return builders.plan("h1", "h2", profile="soak", gpu_count=2, rackproof_soak_duration="24h")


def wrong(plan: Plan, left: Any) -> list[Verdict]:
    return [verdict for verdict in judge(plan, left, read_packs([])) if verdict.verdict != "pass"]


def test_fleet_that_goes_as_it_began_is_accepted(plan: Plan) -> None:
    assert wrong(plan, soaked(plan)) == []
    dip = soaked(plan, h1_0=lambda at: 0.5 if 40000 < at < 40400 else 1.0)  # one slow round
    assert [item for item in wrong(plan, dip) if item.name.startswith("drift.")] == []


def test_gpu_that_slows_down_fails_with_the_time_from_which_on_it_did(plan: Plan) -> None:
    left = soaked(plan, h1_1=lambda at: 1.0 if at < 4.2 * HOUR else 0.95)
    result = [item for item in wrong(plan, left) if item.criterion == "drift-stress"]
    assert [(item.host, item.scope, item.serial, item.verdict) for item in result] == [("h1", "gpu=1", "h1-1", FAIL)]
    assert result[0].reason.startswith("found 0.94")
    since = result[0].reason.split("; from ")[1].split(" on, ")[0]
    assert "04:03" <= since <= "04:21"  # a bucket of a day is eight minutes and a half
    assert result[0].reason.endswith(" % under its first hour")
    assert float(result[0].reason.split(" on, ")[1].split(" %")[0]) == pytest.approx(5.0, abs=0.6)
    assert {(item.host, item.scope) for item in wrong(plan, left)} == {("h1", "gpu=1")}


def test_finished_episode_is_reported_with_its_end(plan: Plan) -> None:
    left = soaked(plan, h2_0=lambda at: 0.9 if 8 * HOUR <= at < 11 * HOUR else 1.0)
    reason = next(item.reason for item in wrong(plan, left) if item.criterion == "drift-stress")
    begins, ends = reason.split("from ")[1].split(",")[0].split(" to ")
    assert begins[:2] in ("07", "08")
    assert ends[:2] in ("10", "11")


def test_part_that_falls_further_than_the_fleet_fails_and_a_warm_hall_does_not(plan: Plan) -> None:
    def warm(at: float) -> float:
        return 1.0 if at < 12 * HOUR else 0.985

    hall = dict.fromkeys(("h1_0", "h1_1", "h2_0", "h2_1"), warm)
    assert wrong(plan, soaked(plan, **hall)) == []
    one = {**dict.fromkeys(hall, lambda at: 1.0), "h2_1": lambda at: 1.0 if at < 12 * HOUR else 0.975}
    result = wrong(plan, soaked(plan, **one))
    assert [(item.host, item.scope, item.criterion) for item in result] == [("h2", "gpu=1", "drift-stress-vs-fleet")]
    assert "of the fleet's median" in result[0].reason
    assert "under its first hour" in result[0].reason


def test_soak_that_was_cut_off_or_too_short_is_no_pass(plan: Plan) -> None:
    left = soaked(plan)

    def changed(**more: Any) -> list[str]:
        alone, *rest = left["h1"].records
        other = {**left, "h1": replace(left["h1"], records=(replace(alone, soak=replace(alone.soak, **more)), *rest))}
        result = wrong(plan, other)
        assert {(item.host, item.name, item.verdict) for item in result} <= {("h1", "stage.soak", INCONCLUSIVE)}
        return [item.reason for item in result]

    assert changed(ended="", ended_by="", soaked_s=7200.0) == [
        "cut off after 2 h 00 min of 24 h 00 min: resume the run"
    ]
    assert changed(reason="gpu=1 gpu.ecc: bad; rma", soaked_s=7200.0) == [
        "ended after 2 h 00 min of 24 h 00 min: gpu=1 gpu.ecc: bad; rma"
    ]
    assert changed(failed=2) == ["2 of 290 rounds did not finish"]
    few = replace(left["h1"].records[0].soak.timeline, bucket_s=DAY)
    few = replace(
        few, series=tuple(replace(one, at=(0,), n=(1,), low=(1.0,), mean=(1.0,), high=(1.0,)) for one in few.series)
    )
    assert changed(timeline=few, finished=1) == [
        "too few rounds to evaluate the drift of stress.throughput: 1 in 24 h 00 min"
    ]
    assert changed(cut=3) == []
    assert changed(cut=4) == ["4 of 292 rounds were cut off with their supervisor, for an unknown reason"]
    assert changed(soaked_s=DAY - 60) == ["ended after 23 h 59 min of 24 h 00 min, without a reason"]
    assert changed(planned_s=60.0, soaked_s=60.0) == [
        "the host planned to soak 1 min 00 s, the plan says 24 h 00 min",
        "ended after 1 min 00 s of 24 h 00 min, without a reason",
    ]


def with_h1(left: Any, **more: Any) -> Any:
    """The same with another record of host h1."""
    alone, *rest = left["h1"].records
    return {**left, "h1": replace(left["h1"], records=(replace(alone, **more), *rest))}


@pytest.mark.parametrize(("outcome", "reason"), [("failed", "rank 1 crashed"), ("finished", "no result of rank 1")])
def test_round_that_failed_or_cannot_be_believed_is_no_pass_however_it_was_counted(
    plan: Plan, outcome: str, reason: str
) -> None:
    left = soaked(plan)
    bad = replace(builders.launch(SOAK, ("h1",), outcome, reason), number=7)
    result = wrong(plan, with_h1(left, launches=(bad, *left["h1"].records[0].launches)))
    assert [(item.host, item.name, item.verdict, item.reason) for item in result] == [
        ("h1", "stage.soak", INCONCLUSIVE, f"1 of 288 rounds did not finish: round 7: {reason}")
    ]


def test_gpu_whose_figures_stop_or_are_few_is_no_pass(plan: Plan) -> None:
    left = soaked(plan)
    reported = left["h1"].records[0].soak

    def without(keep: Callable[[int], bool]) -> list[tuple[str, str, str]]:
        series = tuple(one if one.scope != "gpu=1" else some(one, keep) for one in reported.timeline.series)
        result = wrong(plan, with_h1(left, soak=replace(reported, timeline=replace(reported.timeline, series=series))))
        return [(item.scope, item.name, item.reason) for item in result if item.name == "stage.soak"]

    def some(series: Any, keep: Callable[[int], bool]) -> Any:
        positions = [position for position, at in enumerate(series.at) if keep(at)]
        names = ("at", "n", "low", "mean", "high")
        return replace(
            series, **{name: tuple(getattr(series, name)[position] for position in positions) for name in names}
        )

    last = reported.timeline.series[0].at[-1]
    assert without(lambda at: at != last) == []  # half a round earlier or later is nothing
    scope, name, reason = without(lambda at: at < last // 2)[0]
    assert (scope, name) == ("gpu=1", "stage.soak")
    assert reason.startswith("stress.throughput[dtype=bf16] was last measured at 11:5")
    ((scope, _, reason),) = without(lambda at: at % 2 == 0)
    assert scope == "gpu=1"
    assert reason.endswith(" of 288 rounds")


def test_drift_of_a_short_soak_is_not_judged(plan: Plan) -> None:
    short = builders.plan("h1", "h2", profile="soak", gpu_count=2, rackproof_soak_duration="5m")
    left = soaked(short)
    for name, result in left.items():
        alone, *rest = result.records
        few = Recorder()
        few.add_value(200, "stress.throughput", "gpu=0", "FLOP/s", 6.5e14, {"dtype": "bf16"})
        soak = replace(alone.soak, planned_s=300.0, soaked_s=310.0, finished=2, timeline=few.timeline())
        left[name] = replace(result, records=(replace(alone, soak=soak), *rest))
    report = merge(short, left, read_packs([]))
    assert report.decision == "accepted"
    assert (
        "Drift: NOT JUDGED for stress.throughput (the soak is too short: drift needs an hour or more)"
        in report.acceptance.summary
    )


def test_host_that_never_soaked_is_no_pass(plan: Plan) -> None:
    left = soaked(plan)
    alone, *rest = left["h1"].records
    bare = replace(alone, soak=None, observations=(), launches=())
    left["h1"] = replace(left["h1"], records=(bare, *rest))
    result = wrong(plan, left)
    assert {(item.host, item.name, item.verdict) for item in result} == {("h1", "stage.soak", INCONCLUSIVE)}
    assert "the plan has a soak, and no record of the host has one" in [item.reason for item in result]


def test_course_needs_more_than_the_start() -> None:
    recorder = Recorder()
    for at in range(0, 3000, 300):
        recorder.add_value(at, "stress.throughput", "gpu=0", "FLOP/s", 1.0)
    timeline = recorder.timeline()
    assert rate_course(timeline.series[0], state(timeline)) is None  # all of it in the first hour
    assert rate_course(timeline.series[0], state(timeline, planned_s=3000.0)) is not None


# ---- the report


def test_report_shows_the_course_and_stays_small(plan: Plan) -> None:
    left = soaked(plan, h1_1=lambda at: 1.0 if at < 4 * HOUR else 0.95)
    report = merge(plan, left, read_packs([]))
    page, text = render_html(report), render_markdown(report)
    documents.validate(json.loads(json.dumps(to_json(report))), "report", source="generated report")
    assert page.count('<svg class="spark"') == 4
    begins = page.index('<section id="soak"')
    assert len(page[begins : page.index("</section>\n\n", begins)]) < 12_000
    assert "Soak: 2 of 2 hosts soaked 24 h 00 min (576 rounds in all)" in "\n".join(report.acceptance.summary)
    assert "at worst against its first hour" in text
    assert "| `h1` | `GPU 1` |" in text
    assert all(len(one.at) <= 40 for host in report.hosts if host.soak for one in host.soak.timeline.series)


def test_report_without_a_soak_has_nothing_of_it() -> None:
    plan = builders.plan()
    report = merge(plan, builders.evidence(plan), read_packs([]))
    assert "soak" not in render_html(report).lower()
    assert "## Soak" not in render_markdown(report)


def test_thinner_timeline_keeps_the_extremes() -> None:
    recorder = Recorder()
    for at in range(0, 86400, 300):
        recorder.add_value(at, "gpu.power", "gpu=0", "W", 1000.0 if at == 43200 else 690.0)
    result = thinned(recorder.timeline(), 40)
    assert len(result.series[0].at) <= 40
    assert max(result.series[0].high) == 1000.0
    assert sum(result.series[0].n) == 288


def test_command_without_a_soak_in_its_plan_says_so(tmp_path: Path) -> None:
    plan = builders.plan("h1", profile="rehearsal", rackproof_gang="none")
    HostRun.begin(tmp_path / "run", "h1", json.dumps(to_json(plan)))
    root = ROOT
    command = [sys.executable, root / "rackproof", "soak", "--run-dir", tmp_path / "run", "--host", "h1"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 64
    assert "the plan of this run has no soak" in said.stderr
