"""GPU telemetry of a launch: aggregated into buckets, stored in the record, and drawn on the host's page."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.run.work_directory import benchmark_start_times
from agent.sampling.telemetry import PERIOD_S, Telemetry
from collectors.base import Absent
from collectors.nvml import GpuSample
from fleet.judge.criteria import read_packs
from fleet.report.hosts import without_measurements
from fleet.report.html import host_data
from fleet.report.html.launch_traces import launch_traces
from fleet.report.html.page import render_html
from fleet.report.merge import merge
from schemas import documents, quick
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import Launch, Record, to_json
from schemas.reports import FleetReport
from schemas.trace import FIGURES, MOST_BUCKETS, Trace
from tests import builders
from tests.fakes import nvml
from tests.unit.agent.benchmarks.test_measuring import context
from tests.unit.fleet.report.test_render import rehearsal

ALONE = builders.plan("h1", rackproof_gang="none")
"""A plan of h1 without a gang."""
LOST = Absent(status="error", reason="NVML: GPU is lost")


class ManualTelemetry(Telemetry):
    """Telemetry without a thread: the test adds the samples."""

    def __init__(self, devices: Iterable[int]) -> None:
        super().__init__(devices)
        self._began = 0.0


def gpu_sample(at: float, index: int = 0) -> GpuSample:
    """Return a sample of a GPU that is under load in the middle third of each minute, and otherwise idles at 345 MHz and 75 W."""
    is_loaded = 20 <= at % 60 < 40
    return GpuSample(
        690.0 + 7 * (at % 1) + index if is_loaded else 75.0, 1.755e9 if is_loaded else 3.45e8, 30 + at % 60, 0, 2.6e9
    )


def launch_trace(seconds: float, gpus: int = 1, *, hz: float = 1 / PERIOD_S, **over: Any) -> Trace:
    """Return the trace of a launch of this duration, with `hz` samples per second.

    `over`: `gpuN` -> function that replaces `gpu_sample` for GPU N. Its argument is the time.
    """
    telemetry = ManualTelemetry(range(gpus))
    for tick in range(int(seconds * hz)):
        at = tick / hz
        telemetry.handle(
            at, {index: over.get(f"gpu{index}", lambda at, i=index: gpu_sample(at, i))(at) for index in range(gpus)}
        )
    result = telemetry.trace({})
    assert result
    return result


def test_gpu_that_draws_no_power_has_a_reason_in_place_of_its_efficiency() -> None:
    telemetry = ManualTelemetry([0])
    for tick in range(100):
        telemetry.handle(tick * PERIOD_S, {0: GpuSample(0.0, 0.0, 30.0, 0, 2.6e9)})
    window = {"benchmark": "stress", "scope": "gpu=0", "begin": 0.0, "end": 4.9, "params": {"dtype": "bf16"}}
    rate = builders.observation("stress.throughput", 6e14, scope="gpu=0", unit="FLOP/s", dtype="bf16")
    observed = {item.name: item for item in telemetry.observations([window], [rate], rate.stage)}
    assert observed["stress.efficiency"].reason == "NVML reports a power of 0 in the whole window"
    assert observed["stress.flop_per_cycle"].reason == "NVML reports a clock of 0 in the whole window"
    assert observed["stress.power"].value == 0.0


def with_trace(plan: Plan, trace: Trace | None, host: str = "h1", duration_s: float = 60.0) -> FleetReport:
    """Return the report on the plan's hosts, which are healthy. The first launch of `host` has this trace and duration."""
    evidence = builders.evidence(plan)
    alone, *rest = evidence[host].records
    launch = replace(alone.launches[0], duration_s=duration_s, timeline=trace)
    evidence[host] = replace(evidence[host], records=(replace(alone, launches=(launch,)), *rest))
    return merge(plan, evidence, read_packs([]))


def embedded_data(report: FleetReport) -> dict[str, Any]:
    """Return the JSON data that is embedded in the HTML page of the report."""
    result = re.search(r'<script type="application/json" id="data">(.*?)</script>', render_html(report), re.DOTALL)
    assert result
    return dict(json.loads(result[1]))


def record_with_trace(trace: Trace) -> Record:
    """Return a host's record with this trace."""
    alone = builders.records(ALONE, "h1")[0]
    return replace(alone, launches=(replace(alone.launches[0], timeline=trace),))


# ---- aggregated into buckets


@pytest.mark.parametrize(
    ("seconds", "hz", "least"), [(5, 20, 5), (47, 20, 47), (200, 20, 40), (1000, 1, 30), (36_000, 0.1, 30)]
)
def test_number_of_buckets_is_limited_for_launches_of_any_length(seconds: int, hz: float, least: int) -> None:
    result = launch_trace(seconds, hz=hz)
    counts = {len(words.split()) for words in result.gpus["0"].values()}
    assert len(counts) == 1
    assert least <= counts.pop() <= MOST_BUCKETS <= 60


def test_eight_gpus_add_little_to_a_record() -> None:
    """The load changes with each sample, so each bucket has the longest text: mean, minimum and maximum."""

    def varying_sample(at: float) -> GpuSample:
        return GpuSample(500 + 190 * (at * 20 % 2), 1.4e9 + 5.8e8 * (at * 20 % 2), 55 + at * 20 % 2, 0, 2.6e9)

    trace = launch_trace(47, gpus=8, **{f"gpu{index}": varying_sample for index in range(8)})
    assert all(len(words.split()) == 47 for gpu in trace.gpus.values() for words in gpu.values())
    added = len(documents.text(to_json(record_with_trace(trace)))) - len(
        documents.text(to_json(record_with_trace(launch_trace(1))))
    )
    assert added < 15_000


def test_figures_are_read_from_the_texts_of_a_trace() -> None:
    values = {(series.name, series.scope): series for series in launch_trace(60, gpus=2).timeline().series}
    power, clock = values["gpu.power", "gpu=1"], values["gpu.clock.sm", "gpu=1"]
    assert (power.unit, clock.unit, values["gpu.temperature", "gpu=0"].unit) == ("W", "Hz", "Cel")
    assert (min(power.low), max(power.high)) == (75, 698)
    assert (min(clock.low), max(clock.high)) == (3.45e8, 1.755e9)
    assert all(low <= mean <= high for low, mean, high in zip(power.low, power.mean, power.high, strict=True))
    assert len(values) == 6  # three of each GPU: a GPU that was never throttled has no series for throttling


def test_failed_samples_are_a_gap_with_the_reason() -> None:
    result = launch_trace(40, gpus=2, gpu1=lambda at: LOST if 10.3 <= at < 12.1 else gpu_sample(at))
    assert [at for at, word in enumerate(result.gpus["1"]["power_w"].split()) if word == "."] == [10, 11, 12]
    assert "." not in result.gpus["0"]["power_w"]
    assert result.lost == {"1": "NVML: GPU is lost"}


def test_unsampled_time_is_a_gap() -> None:
    """While the driver hangs, no samples are taken, so there are no failed samples either."""
    telemetry = ManualTelemetry([0])
    for at in (*range(10), *range(20, 30)):
        telemetry.handle(float(at), {0: gpu_sample(at)})
    result = telemetry.trace({})
    assert result
    assert result.gpus["0"]["clock_mhz"].split()[8:22] == ["345"] * 2 + ["."] * 10 + ["1755"] * 2


def test_gpu_that_never_answered_has_a_reason_and_no_figures() -> None:
    result = launch_trace(5, gpus=2, gpu1=lambda _: LOST)
    assert (set(result.gpus), result.lost) == ({"0"}, {"1": "NVML: GPU is lost"})


def test_thermal_throttling_is_kept_and_power_capping_is_not() -> None:
    # 0x40: hw_thermal; 0x4: the power limit
    hot = launch_trace(30, gpus=2, gpu1=lambda at: gpu_sample(at)._replace(reasons=0x44 if 10 <= at < 20 else 0x4))
    assert hot.gpus["1"]["held_percent"].split()[9:21] == ["0", *["100"] * 10, "0"]
    assert "held_percent" not in hot.gpus["0"]


def test_driver_that_gave_no_sample_is_reported() -> None:
    silent = ManualTelemetry([0]).trace({"gemm": 1.0})
    assert silent
    assert (silent.gpus, silent.lost) == ({}, {"0": "the driver gave no sample"})


def test_launch_that_has_just_begun_has_no_timeline() -> None:
    telemetry = ManualTelemetry([0])
    telemetry._began = time.monotonic()
    assert telemetry.trace({"gemm": 1.0}) is None


# ---- stored in the record


def test_record_with_a_timeline_is_valid_and_both_decoders_return_the_timeline_unchanged() -> None:
    trace = replace(
        launch_trace(100, gpus=8, gpu3=lambda at: LOST if at > 50 else gpu_sample(at)), began_s={"gemm": 3.2}
    )
    text = documents.text(to_json(record_with_trace(trace))).encode()
    document = documents.checked(text, "record", source="a record")
    assert record_from_json(document).launches[0].timeline == trace
    fast = quick.Reader().record(text)
    assert fast
    assert fast.launches[0].timeline == trace


def test_record_without_a_timeline_is_valid() -> None:
    document = to_json(builders.records(ALONE, "h1")[0])
    assert "timeline" not in document["launches"][0]
    assert record_from_json(document).launches[0].timeline is None


@pytest.mark.parametrize(
    "broken",
    [
        {"bucket_s": 0},
        {"bucket_s": 1e-310},
        {"bucket_s": 1, "gpus": {"00": {"power_w": "1"}}},
        {"bucket_s": 1e300},
        {"bucket_s": 1, "gpus": {"0": {"power_w": "690,691"}}},
        {"bucket_s": 1, "gpus": {"0": {"power_w": " ".join(["1"] * 61)}}},
        {"bucket_s": 1, "gpus": {"0": {"power_w": "9999999"}}},
        {"bucket_s": 1, "gpus": {"<b>": {"power_w": "1"}}},
        {"bucket_s": 1, "gpus": {"0": {"volume": "1"}}},
        {"bucket_s": 1, "began_s": {"gemm": -1}},
    ],
)
def test_invalid_timeline_is_refused(broken: dict[str, Any]) -> None:
    document = to_json(builders.records(ALONE, "h1")[0])
    launch = {**document["launches"][0], "timeline": broken}
    with pytest.raises(documents.DocumentError):
        documents.validate({**document, "launches": [launch]}, "record", source="a record")


LAUNCH_AND_SOAK_ROUND = """
import json, os, sys, time
from pathlib import Path
from tests.launches import launch_program
from agent.run.record import HostRun
from schemas.records import to_json
from tests import builders
folder, scenario = Path(sys.argv[1]), os.environ["RACKPROOF_NVML_SCENARIO"]
rank = f'''
import json, sys, time
from pathlib import Path
from tests.fakes import nvml
begun = {{"gemm": time.monotonic(), "readiness check": time.monotonic()}}
time.sleep(3)
nvml.write(Path({scenario!r}), "healthy-h200x4", "gpu.1.*=!15")
begun["stress"] = time.monotonic()
Path("rank0.state.json").write_text(json.dumps({{"phase": "stress", "exit_code": None, "begun": begun}}))
time.sleep(2.5)
window = {{"benchmark": "stress", "scope": "gpu=0", "begin": begun["stress"], "end": time.monotonic(), "params": {{}}}}
Path("rank0.state.json").write_text(json.dumps({{"phase": "end", "exit_code": 0, "begun": begun}}))
Path("rank0.json").write_text(json.dumps({{"rank": 0, "observations": [], "software": {{}}, "windows": [window]}}))
'''
for stage, profile in (("benchmark", "standard"), ("soak", "soak")):
    plan = builders.plan("h1", profile=profile, gpu_count=2, rackproof_gang="none")
    run = HostRun.begin(folder / stage, "h1", json.dumps(to_json(plan)))
    work = run.directory / "work"
    work.mkdir()
    record = launch_program(
        run,
        [sys.executable, "-c", rank if stage == "benchmark" else "import time; time.sleep(0.5)"],
        environment={**os.environ, "PYTHONPATH": os.getcwd()},
        ranks={0: 0},
        stage=stage,
        deadline_s=30.0,
        report=print,
    )
    assert record.launches[0].succeeded or stage == "soak", record.launches[0]
    print(json.dumps(to_json(record.launches[0]).get("timeline")))
    print(json.dumps([to_json(item) for item in record.observations]))
"""


def test_supervisor_records_the_telemetry_of_a_launch(tmp_path: Path) -> None:
    """A thread samples the NVML stub, which loses GPU 1 during the launch. The second launch, a soak round, has no timeline."""
    scenario = nvml.write(tmp_path / "scenario", "healthy-h200x4")
    lines = nvml.python(["-c", LAUNCH_AND_SOAK_ROUND, tmp_path], nvml.build(tmp_path / "nvml"), scenario).splitlines()
    trace, observed, soak_trace, _ = (json.loads(line) for line in lines)
    assert soak_trace is None
    powers = [item for item in observed if item["name"] == "stress.power"]
    assert [item["scope"] for item in powers] == ["gpu=0"]
    assert powers[0]["status"] == "measured" or re.match("[1-9][0-9]* samples in", powers[0]["reason"]), powers
    assert trace["bucket_s"] == 1.0
    whole, lost = (trace["gpus"][index] for index in ("0", "1"))
    assert set(whole) == set(FIGURES) - {"held_percent"}
    # On a busy machine the thread may take no sample for a second.
    assert set(whole["clock_mhz"].split()) - {"."} == {"345"}
    assert 1 <= len(lost["power_w"].split()) <= len(whole["power_w"].split()) - 2
    assert trace["lost"] == {"1": "NVML: GPU is lost"}
    assert list(trace["began_s"]) == ["gemm", "stress"]
    assert 2.9 <= trace["began_s"]["stress"] - trace["began_s"]["gemm"] < 10


def test_ranks_report_the_start_of_each_benchmark(tmp_path: Path) -> None:
    before = time.monotonic()
    for number in (1, 0):
        rank = context(tmp_path, rank=number)
        for name in ("gemm", "readiness check", "collective"):
            rank.begin(name)
            time.sleep(0.01)
        rank.set_phase("end", 0)
    (tmp_path / "rank2.state.json").write_text('{"begun": {"stress": "soon", "gemm": 1e300}}')
    (tmp_path / "rank3.state.json").write_text('{"begun": ["stress"]}')
    result = benchmark_start_times(tmp_path, range(5))
    assert list(result) == ["gemm", "collective"]
    assert before <= result["gemm"] < result["collective"] < before + 5


def test_benchmark_that_begins_after_the_end_of_the_trace_has_no_start_time() -> None:
    telemetry = ManualTelemetry([0])
    telemetry.handle(0.5, {0: gpu_sample(0.5)})
    result = telemetry.trace({"gemm": 0.25, "stress": 1e300})
    assert result
    assert result.began_s == {"gemm": 0.2}


# ---- drawn on the host's page


@pytest.fixture
def plan() -> Plan:
    return builders.plan("h1", "h2", profile="smoke")


def test_line_is_interrupted_at_a_gap(plan: Plan) -> None:
    trace = launch_trace(40, gpus=2, gpu1=lambda at: LOST if 10 <= at < 20 else gpu_sample(at))
    [drawn] = launch_traces(with_trace(plan, trace, duration_s=40).hosts[0])
    whole, broken = drawn.gpus
    # In an SVG path, each uninterrupted part of a line begins with "M".
    assert [spark.line.count("M") for spark in whole.sparks if spark] == [1, 1, 1]
    assert [spark.line.count("M") for spark in broken.sparks if spark] == [2, 2, 2]
    for spark in broken.sparks:
        assert spark
        # The plot is 160 units wide. The gap is the second quarter of the plot.
        assert not [x for x in xs(spark.line) + xs(spark.band) if 40 < x < 80]
    assert (whole.lost, broken.lost) == ("", "NVML: GPU is lost")
    assert "no data for 10 s" in broken.figures[0]
    assert "no data" not in whole.figures[0]


def xs(path: str) -> list[int]:
    """Return the horizontal positions of the points of an SVG path."""
    positions = []
    for segment in re.findall(r"M([^M]*)", path):
        numbers = [int(number) for number in re.findall(r"-?\d+", segment)]
        at = 0
        for step in numbers[::2]:
            positions.append(at := at + step)
    return positions


def test_bucket_between_two_gaps_is_visible(plan: Plan) -> None:
    trace = Trace(bucket_s=10.0, gpus={"0": {"power_w": "100 . 690-5+5 . 100"}})
    [drawn] = launch_traces(with_trace(plan, trace, duration_s=50).hosts[0])
    [spark] = [item for item in drawn.gpus[0].sparks if item]
    assert spark.line.count("M") == 3
    assert {64, 96} <= set(xs(spark.line))  # the middle one of five buckets in a plot that is 160 units wide


def test_host_page_has_a_sparkline_per_gpu_and_figure(plan: Plan) -> None:
    trace = replace(launch_trace(60, gpus=2), began_s={"gemm": 3.0, "stress": 30.0})
    page_data = embedded_data(with_trace(plan, trace))
    numbers = {name: str(number) for number, name in enumerate(page_data["names"])}
    assert "traces" not in page_data["pages"][numbers["h2"]]
    [[stage, ends, begun, benchmarks, columns, parts, more]] = page_data["pages"][numbers["h1"]]["traces"]
    text = page_data["texts"].__getitem__
    assert (text(stage), text(ends), more) == ("benchmark", "1 min 00 s", 0)
    assert begun == "M8 0v40M80 0v40"
    assert [(text(at), text(name)) for at, name in benchmarks] == [("3 s", "GEMM"), ("30 s", "Stress")]
    assert [text(name) for name, _ in columns] == ["Power", "Temperature", "SM clock"]
    assert [(text(head), text(serial), text(lost), len(sparklines)) for head, serial, lost, sparklines in parts] == [
        ("GPU 0", "h1-0", "", 3),
        ("GPU 1", "h1-1", "", 3),
    ]
    assert re.fullmatch(r"\d+ W \(75 to 697\)", text(parts[0][3][0][0]))


@pytest.mark.parametrize(("bucket_s", "duration_s"), [(0.001, 1.7e308), (1e6, 0.0)])
def test_impossible_times_do_not_break_the_report(bucket_s: float, duration_s: float, plan: Plan) -> None:
    report = with_trace(plan, Trace(bucket_s=bucket_s, gpus={"0": {"power_w": "5-9+3 . 700"}}), duration_s=duration_s)
    assert embedded_data(report)
    [drawn] = launch_traces(report.hosts[0])
    assert "(0 to 700)" in drawn.gpus[0].figures[0]


def test_last_launch_with_a_trace_is_drawn(plan: Plan) -> None:
    host = with_trace(plan, launch_trace(60)).hosts[0]
    again = replace(host.launches[0], duration_s=20.0, timeline=launch_trace(20))
    later: Launch = replace(host.launches[0], duration_s=0.0, timeline=None)
    [drawn] = launch_traces(replace(host, launches=(*host.launches, again, later)))
    assert drawn.ends == "20 s"


def test_host_without_trace_has_no_plots(plan: Plan) -> None:
    for report in (rehearsal(), with_trace(plan, None)):
        assert not any("traces" in page for page in embedded_data(report)["pages"].values())


def test_only_hosts_with_findings_have_plots_if_there_are_many_hosts() -> None:
    many = builders.plan(*(f"h{number}" for number in range(1, 15)), profile="smoke")
    evidence = builders.evidence(many)
    trace = launch_trace(60, gpus=2)
    for host, of_host in evidence.items():
        first, *rest = of_host.records
        launches = (replace(first.launches[0], timeline=trace),)
        evidence[host] = replace(of_host, records=(replace(first, launches=launches), *rest))
    evidence["h3"] = builders.with_observations(
        evidence["h3"], lambda item: None if item.name == "gemm.throughput" else item
    )
    page_data = embedded_data(merge(many, evidence, read_packs([])))
    with_plots = {page_data["names"][int(number)]: bool(page["traces"]) for number, page in page_data["pages"].items()}
    assert with_plots == {name: name == "h3" for name in page_data["names"]}


def test_plots_are_left_out_if_they_would_displace_host_pages(plan: Plan) -> None:
    without_plots = with_trace(plan, None)
    room = 400 + len(host_data.embedded_data(without_plots, 10_000_000).encode())
    page_data = json.loads(host_data.embedded_data(with_trace(plan, launch_trace(60, gpus=2)), room))
    assert len(page_data["pages"]) == 2
    assert page_data["pages"]["0"]["traces"] == []
    assert len(json.dumps(page_data, separators=(",", ":"), ensure_ascii=False).encode()) <= room


def test_host_report_without_measurements_has_no_timeline(plan: Plan) -> None:
    host = replace(with_trace(plan, launch_trace(60)).hosts[0], decision="rejected")
    assert host.launches[0].timeline
    assert all(launch.timeline is None for launch in without_measurements(host).launches)


def test_report_with_timelines_fits_its_schema(plan: Plan) -> None:
    report = with_trace(plan, replace(launch_trace(60, gpus=2, gpu1=lambda _: LOST), began_s={"gemm": 1.5}))
    documents.validate(json.loads(json.dumps(to_json(report))), "report", source="generated report")
