"""Progress of a run: the file `live.json`, which the agent writes, and the metrics that the exporter derives from it."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from agent.exporter import live, run_metrics
from agent.exporter.exporter import Exporter
from agent.exporter.figures import MAX_FIGURES, RankFiles, newest_figures
from agent.exporter.metric_names import EVERY, label_name
from agent.exporter.run_metrics import RunSource
from agent.run.record import HostRun
from schemas import documents
from schemas.durations import START_S, remaining_s, stage_s
from schemas.records import Launch, to_json
from tests import ROOT, builders
from tests.launches import launch_program

Json = dict[str, Any]
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def run(tmp_path: Path) -> HostRun:
    plan = builders.plan(profile="rehearsal")
    return HostRun.begin(tmp_path / "runs" / "r1", "h1", json.dumps(to_json(plan)))


def read_live(run: HostRun) -> Json:
    exported: Json = documents.read(run.directory.parent / "live.json", "live")
    return exported


def series(document: Json, later_s: float = 0.0) -> Series:
    """Return the samples of a scrape `later_s` seconds after `live.json` was written. `document`: the content of this file.

    The sample names are without `rackproof_`.
    """
    exported = run_metrics.families(document, document["written"] + later_s)
    return {
        (sample.name.removeprefix("rackproof_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in exported
        for sample in family.samples
    }


def state(exported: Series, stage: str) -> list[str]:
    """Return the states whose series `stage_state` is not 0 for this stage. The tests expect exactly one."""
    return [
        dict(labels)["state"]
        for (name, labels), value in exported.items()
        if name == "stage_state" and value and dict(labels)["stage"] == stage
    ]


# ---- before, during and after a stage ----

RANK = """
import json, os, pathlib, sys, time
sys.path.insert(0, os.environ["CHECKOUT"])
from agent.gang.heartbeat import rank_heartbeat
work = pathlib.Path(os.environ["WORK"])
rank_heartbeat().phase = "gemm bf16"
observation = {"name": "gemm.throughput", "scope": "cpu=0", "stage": "benchmark", "unit": "FLOP/s", "status": "measured",
        "value": 2e9, "params": {"dtype": "bf16"}}
(work / "rank0.json").write_text(json.dumps({"rank": 0, "observations": [observation], "software": {}}))
now = {"name": "training.loss", "scope": "host", "unit": "1", "status": "measured", "value": 1.5,
       "params": {"network": "convnet"}}
(work / "rank0.now.json").write_text(json.dumps({"observations": [now]}))
while not (work / "go").exists():
    time.sleep(0.05)
for rank in (0, 1):
    (work / f"rank{rank}.state.json").write_text(json.dumps({"phase": "end", "exit_code": 0}))
"""


@pytest.fixture
def end_stage(run: HostRun, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Start a stage with two ranks, of which only rank 0 sends heartbeats; yield a function that ends the stage."""
    monkeypatch.setattr(live, "PERIOD_S", 0.1)
    work = run.directory / "work"
    work.mkdir()
    environment = {**os.environ, "WORK": str(work), "CHECKOUT": str(ROOT), "RANK": "0"}
    thread = threading.Thread(
        target=launch_program,
        args=(run, [sys.executable, "-c", textwrap.dedent(RANK)]),
        kwargs={"environment": environment, "ranks": {0: 0, 1: 1}, "deadline_s": 60.0},
    )
    thread.start()

    def end() -> None:
        (work / "go").touch()
        thread.join(30)

    yield end
    end()


def wait_for(run: HostRun, is_awaited: Callable[[Json], object]) -> Json:
    """Return the content of `live.json` as soon as `is_awaited` returns true for it. Fail after 30 s."""
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        if (run.directory.parent / "live.json").exists() and is_awaited(exported := read_live(run)):
            return exported
        time.sleep(0.05)
    raise AssertionError(read_live(run))


def test_new_run_publishes_its_identity_and_its_planned_stages(run: HostRun) -> None:
    live.publish_idle(run)
    exported = series(read_live(run))
    ((_, labels),) = [key for key in exported if key[0] == "run_info"]
    assert dict(labels).items() >= {"run_id": "r1", "rack": "r1", "profile": "rehearsal", "rehearsal": "true"}.items()
    assert state(exported, "benchmark") == state(exported, "gang") == ["planned"]
    assert {name for name, _ in exported} == {
        "run_info",
        "run_started_timestamp_seconds",
        "run_updated_timestamp_seconds",
        "stage_state",
    }


def test_stage_is_published_while_it_runs_and_after_its_end(run: HostRun, end_stage: Callable[[], None]) -> None:
    def figures(document: Json) -> list[Json]:
        return [figure for stage in document["stages"] for figure in stage.get("figures", [])]

    document = wait_for(run, lambda exported: len(figures(exported)) == 2 and '"at": "gemm"' in json.dumps(exported))
    exported, stage = series(document, later_s=3.0), (("stage", "benchmark"),)
    assert state(exported, "benchmark") == ["running"]
    assert state(exported, "gang") == ["planned"]
    began = exported[("stage_started_timestamp_seconds", stage)]
    assert 0 <= document["written"] - began < 30
    assert exported[("stage_deadline_timestamp_seconds", stage)] == pytest.approx(began + 60)
    assert 0 < exported[("stage_progress_ratio", stage)] < 0.1
    at = (("benchmark", "gemm"), *stage)
    assert exported[("stage_ranks", at)] == 1
    assert (
        exported[("benchmark_flop_per_second", (("benchmark", "gemm"), ("cpu", "0"), ("dtype", "bf16"), *stage))] == 2e9
    )
    assert exported[("benchmark_loss", (("benchmark", "training"), ("network", "convnet"), *stage))] == 1.5
    assert 3.0 <= exported[("rank_silent_seconds", (("cpu", "0"), ("rank", "0")))] < 10
    end_stage()
    ended = read_live(run)
    after = series(ended)
    assert state(after, "benchmark") == ["finished"]
    assert after[("stage_finished", (("outcome", "finished"), *stage))] == 1
    assert after[("stage_ended_timestamp_seconds", stage)] > began
    assert ("rank_silent_seconds", (("cpu", "0"), ("rank", "0"))) not in after
    assert any(name == "benchmark_flop_per_second" for name, _ in after), (
        "the last figures must still be exported after the end of the stage, so that they are scraped"
    )
    # A figure is a series with the value of an observation. It is exported for 300 s after the end of the stage (LINGER_S).
    # Counts of wrong results are exported for longer: until another run starts.
    assert not any(name.startswith("benchmark_") for name, _ in series(ended, later_s=400))
    wrong = {"metric": "rackproof_benchmark_wrong_results", "value": 7.0, "labels": {"benchmark": "gemm", "gpu": "0"}}
    next(item for item in ended["stages"] if item.get("figures"))["figures"].append(wrong)
    assert [value for (name, _), value in series(ended, later_s=4000).items() if name.startswith("benchmark_")] == [7.0]


def test_published_file_contains_no_secret(run: HostRun, end_stage: Callable[[], None]) -> None:
    wait_for(run, lambda exported: exported["stages"][0].get("ranks"))
    path = run.directory.parent / "live.json"
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    assert run.directory.stat().st_mode & 0o077 == 0
    for secret in (run.plan.nonce, run.host.address, str(run.directory)):
        assert secret not in text


def test_publish_idle_keeps_the_state_of_a_running_stage(run: HostRun, end_stage: Callable[[], None]) -> None:
    wait_for(run, lambda exported: exported["stages"][0]["state"] == "running")
    live.publish_idle(run)
    assert read_live(run)["stages"][0]["state"] == "running"


def test_running_stage_is_exported_as_silent_30_s_after_the_last_write(run: HostRun) -> None:
    document = live.build_document(run) | {"written": time.time()}
    document["stages"][0] |= {"state": "running", "began": document["written"], "deadline": document["written"] + 60}
    document["stages"][0]["ranks"] = [{"rank": 0, "scope": "cpu=0", "at": "gemm", "silent_s": 0.1, "waiting_s": 0.0}]
    documents.validate(document, "live", source="document of the test")
    assert state(series(document, later_s=29.0), "benchmark") == ["running"]
    late = series(document, later_s=31.0)
    assert state(late, "benchmark") == ["silent"]
    assert not any(name.startswith(("rank_", "stage_ranks")) for name, _ in late)


def test_launches_of_a_stage_are_counted_by_outcome(run: HostRun) -> None:
    def launch(outcome: str) -> Launch:
        return builders.launch("benchmark", ("h1",), outcome)

    record = replace(run.record(), launches=(launch("deadline"), launch("failed"), launch("finished")))
    exported = series(live.build_document(run, record) | {"written": 0.0})
    assert state(exported, "benchmark") == ["finished"]
    for outcome in ("deadline", "failed", "finished"):
        assert exported[("stage_finished", (("outcome", outcome), ("stage", "benchmark")))] == 1


def publisher(
    tmp_path: Path, begun: dict[str, float], profile: str, span: live.Span | None = None
) -> live.LivePublisher:
    """Return the publisher of a launch that began a minute ago.

    `begun`: benchmark -> seconds from the start of the launch to the start of the benchmark. `span`: times of the soak, if the
    launch is a round of a soak.
    """
    plan = builders.plan("h1", profile=profile, gpu_count=2, rackproof_gang="none")
    stage = plan.stages[0]
    host_run = HostRun.begin(tmp_path / "runs" / "r1", "h1", json.dumps(to_json(plan)))
    work = tmp_path / "work"
    work.mkdir()
    thread = live.LivePublisher(
        host_run, list, stage=stage.name, deadline_s=stage.deadline_s, work=work, ranks=[0], span=span
    )
    thread._progress.start -= 60.0
    state = {
        "phase": "stress",
        "exit_code": None,
        "begun": {name: thread._progress.start + at for name, at in begun.items()},
    }
    (work / "rank0.state.json").write_text(json.dumps(state))
    return thread


def test_progress_is_the_elapsed_share_of_the_expected_duration(tmp_path: Path) -> None:
    """Without observations, the remaining time depends only on when each benchmark began and on its expected duration."""
    thread = publisher(tmp_path, {"gemm": 10.0, "memory": 14.0, "stress": 30.0}, "standard")
    fields = thread._running_fields()
    left_s = remaining_s(thread._progress.durations, {"gemm": 10.0, "memory": 14.0, "stress": 30.0}, 60.0)
    assert left_s > 60
    assert fields["progress"] == pytest.approx(60 / (60 + left_s), abs=0.01)
    assert fields["expected_end"] == pytest.approx(time.time() + left_s, abs=2)


def test_end_of_a_slow_benchmark_is_estimated_from_its_observations(tmp_path: Path) -> None:
    """The launch began 60 s ago, and `gemm` began 20 s after the launch. So `gemm` has run for 40 s.

    `gemm` was expected to take a few seconds. With the profile `standard` and two GPUs it makes 12 observations, one for each GPU
    and each of six data types. In 40 s it has made 3, so it needs 120 s more.
    """
    thread = publisher(tmp_path, {"gemm": 20.0}, "standard")
    made = [observation("gemm.throughput", 1.0, "FLOP/s", "gpu=0", dtype=dtype) for dtype in ("fp64", "fp32", "bf16")]
    (tmp_path / "work" / "rank0.json").write_text(json.dumps({"observations": made}))
    later = stage_s(thread._progress.durations) - thread._progress.durations["gemm"] - START_S
    fields = thread._running_fields()
    assert fields["expected_end"] == pytest.approx(time.time() + 40 * 3 + later, abs=3)


def test_soak_is_expected_to_end_after_the_last_round_that_begins_in_its_time(tmp_path: Path) -> None:
    now = time.time()
    span = live.Span(began=now - 60, ends=now + 300, deadline=now + 1200, progress=0.0)
    thread = publisher(tmp_path, {"stress": 30.0}, "soak", span)
    round_s, left_s = (
        stage_s(thread._progress.durations),
        remaining_s(thread._progress.durations, {"stress": 30.0}, 60.0),
    )
    rounds = 3 if left_s + 2 * round_s < 300 else 2
    fields = thread._running_fields()
    assert left_s + (rounds - 1) * round_s < 300 <= left_s + rounds * round_s
    assert fields["expected_end"] == pytest.approx(now + left_s + rounds * round_s, abs=3)


@pytest.mark.parametrize("step_s", [7200, -7200])
@pytest.mark.parametrize("profile", ["standard", "soak"])
def test_setting_the_clock_changes_neither_times_left_nor_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: str, step_s: float
) -> None:
    def relative_to_now_s() -> list[float]:
        fields = thread._running_fields()
        return [fields[key] - time.time() for key in ("began", "deadline", "expected_end")]

    now, clock = time.time(), time.time
    span = live.Span(began=now - 60, ends=now + 300, deadline=now + 1200, progress=0.25)
    thread = publisher(tmp_path, {"stress": 30.0}, profile, span if profile == "soak" else None)
    before, progress = relative_to_now_s(), thread._running_fields()["progress"]
    monkeypatch.setattr(time, "time", lambda: clock() + step_s)
    assert relative_to_now_s() == pytest.approx(before, abs=60)
    assert thread._running_fields()["progress"] == pytest.approx(progress, abs=0.1)


def test_run_outside_a_directory_named_runs_publishes_nothing(tmp_path: Path) -> None:
    plan = builders.plan(profile="rehearsal")
    live.publish_idle(HostRun.begin(tmp_path / "elsewhere", "h1", json.dumps(to_json(plan))))
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


# ---- figures: series with the values of a stage's observations ----


def observation(name: str, value: object, unit: str = "1", scope: str = "host", **params: object) -> Json:
    return {"name": name, "scope": scope, "unit": unit, "status": "measured", "value": value, "params": params}


def exported_figures(*observations: Json, training: tuple[Json, ...] = ()) -> dict[tuple[str, ...], float]:
    """Return (metric, label values …) -> value, for the figures of these observations.

    `training`: observations that ranks write during a training. The metrics are without `rackproof_benchmark_`.
    """
    figures, left_out = newest_figures(observations, training)
    assert left_out == 0
    return {
        (figure["metric"].removeprefix("rackproof_benchmark_"), *figure["labels"].values()): figure["value"]
        for figure in figures
    }


def test_only_the_largest_message_size_of_each_operation_and_placement_is_exported() -> None:
    def busbw(op: str, size: int, value: float, placement: str = "in_place") -> Json:
        return observation(f"collective.{op}.busbw", value, "B/s", size_bytes=size, placement=placement, world_size=8)

    exported = exported_figures(
        busbw("all_reduce", 8, 1.0),
        busbw("all_reduce", 8192, 2.0),
        busbw("all_reduce", 64, 3.0, "out_of_place"),
        busbw("all_gather", 8, 4.0),
        busbw("all_reduce", 8192, 5.0),
        busbw("all_reduce", 8, 6.0),
    )
    name = "bus_bandwidth_bytes_per_second"
    assert exported == {
        (name, "collective", "all_reduce", "8192", "in_place"): 5.0,
        (name, "collective", "all_reduce", "64", "out_of_place"): 3.0,
        (name, "collective", "all_gather", "8", "in_place"): 4.0,
    }


def test_message_sizes_of_different_benchmarks_and_transports_do_not_replace_each_other() -> None:
    def busbw(name: str, size: int, value: float, **params: Any) -> Json:
        return observation(name, value, "B/s", size_bytes=size, world_size=8, **params)

    exported = exported_figures(
        busbw("collective.all_reduce.busbw", 64, 1.0, placement="in_place"),
        busbw("mnnvl.busbw", 128, 2.0, op="all_reduce", mnnvl=True),
        busbw("mnnvl.busbw", 128, 3.0, op="all_reduce", mnnvl=False),
        busbw("collective.all_gather.busbw", 8, 4.0, placement="in_place"),
        busbw("mnnvl.busbw", 4, 5.0, op="all_gather", mnnvl=True),
    )
    name = "bus_bandwidth_bytes_per_second"
    assert exported == {
        (name, "collective", "all_reduce", "64", "in_place"): 1.0,
        (name, "mnnvl", "all_reduce", "128", "True"): 2.0,
        (name, "mnnvl", "all_reduce", "128", "False"): 3.0,
        (name, "collective", "all_gather", "8", "in_place"): 4.0,
        (name, "mnnvl", "all_gather", "4", "True"): 5.0,
    }


def test_wrong_results_and_observations_without_a_value_are_counted() -> None:
    lost = {"name": "gemm.throughput", "scope": "gpu=1", "unit": "FLOP/s", "status": "error", "reason": "lost"}
    assert exported_figures(
        observation("integrity.wrong_words", 0, scope="gpu=0", pattern="ones"),
        observation("integrity.wrong_words", 3, scope="gpu=1", pattern="ones"),
        observation("integrity.wrong_words", 4, scope="gpu=1", pattern="zeros"),
        lost,
        lost | {"scope": "gpu=2"},
    ) == {
        ("wrong_results", "integrity", "0"): 0,
        ("wrong_results", "integrity", "1"): 7,
        ("unmeasured", "gemm", "error"): 2,
    }


def test_figures_of_file_systems_have_the_label_directory() -> None:
    disk = {"op": "read", "sharing": "together", "device": "nvme1n1"}
    assert exported_figures(
        observation("local_storage.bandwidth", 6e9, "B/s", scope="directory=data:1", **disk),
        observation("local_storage.wrong_blocks", 1, scope="directory=data:1", sharing="together"),
        observation("shared_storage.misread_bytes", 2, scope="directory=mnt:shared"),
        observation("shared_storage.aggregate_bandwidth", 9e9, "B/s", scope="gang=all,directory=mnt:shared", op="read"),
    ) == {
        ("bandwidth_bytes_per_second", "local_storage", "data:1", "read", "together"): 6e9,
        ("wrong_results", "local_storage", "data:1"): 1,
        ("wrong_results", "shared_storage", "mnt:shared"): 2,
    }


def test_figures_of_numa_nodes_have_a_series_for_each_node_and_placement() -> None:
    def copy(node: int, placement: str, memory_node: int, value: float) -> Json:
        where = {"placement": placement, "memory_node": memory_node}
        return observation("host_memory.bandwidth", value, "B/s", scope=f"numa={node}", **where)

    assert exported_figures(
        copy(0, "local", 0, 3e11),
        copy(0, "remote", 1, 1e11),
        copy(1, "local", 1, 2e11),
        observation("host_memory.wrong_elements", 1, scope="numa=1"),
    ) == {
        ("bandwidth_bytes_per_second", "host_memory", "0", "local", "0"): 3e11,
        ("bandwidth_bytes_per_second", "host_memory", "0", "remote", "1"): 1e11,
        ("bandwidth_bytes_per_second", "host_memory", "1", "local", "1"): 2e11,
        ("wrong_results", "host_memory", "1"): 1,
    }


def test_result_of_a_training_replaces_the_intermediate_value() -> None:
    step = observation("training.step_time", 0.02, "s", network="convnet")
    assert exported_figures(training=(step,)) == {("step_time_seconds", "training", "convnet"): 0.02}
    assert exported_figures(step | {"value": 0.01}, training=(step,)) == {
        ("step_time_seconds", "training", "convnet"): 0.01
    }


@pytest.mark.parametrize("run", ["h100x2", "h200x2-extended", "h200x4-compared"])
def test_figures_with_different_settings_have_different_labels(run: str) -> None:
    """No two observations of a run give a series with the same metric and labels.

    The test leaves out counts of wrong results and of observations without a value, because these are sums over several
    observations.
    """
    (path,) = (ROOT / "docs" / "measurements" / run / "hosts").glob("*.json")
    document = documents.parse(path.read_bytes(), source=run)
    exported = [newest_figures([item])[0] for item in document["observations"]]
    series = [(item["metric"], *item["labels"].items()) for figures in exported for item in figures]
    series = [item for item in series if not ("status" in dict(item[1:]) or "wrong" in item[0])]
    assert series
    assert [item for item, times in Counter(series).items() if times > 1] == []


def test_prefill_and_decode_of_inference_are_two_series() -> None:
    assert exported_figures(
        observation("inference.prefill_throughput", 2e5, "tokens/s", scope="gpu=0"),
        observation("inference.decode_throughput", 9e3, "tokens/s", scope="gpu=0"),
    ) == {
        ("items_per_second", "inference", "0", "tokens", "prefill"): 2e5,
        ("items_per_second", "inference", "0", "tokens", "decode"): 9e3,
    }


def test_figures_beyond_the_limit_are_counted() -> None:
    many = [observation("gemm.throughput", 1.0, "FLOP/s", f"gpu={index}", dtype="bf16") for index in range(600)]
    figures, left_out = newest_figures(many)
    assert (len(figures), left_out) == (MAX_FIGURES, 600 - MAX_FIGURES)


def test_figures_of_a_healthy_host_have_only_declared_metrics_and_labels() -> None:
    plan = builders.plan("h1", "h2", gpu_count=8)
    for stage in ("benchmark", "gang"):
        document = [to_json(item) for item in builders.results(plan, "h1", stage)]
        figures, left_out = newest_figures(document)
        assert left_out == 0
        assert len(figures) > 20
        for figure in figures:
            allowed = {label_name(label) for label in EVERY[figure["metric"]].labels} - {"stage"}
            # A label in parentheses is optional.
            required = {label for label in EVERY[figure["metric"]].labels if label == label_name(label)} - {"stage"}
            assert required <= set(figure["labels"]) <= allowed, figure


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"observations": [1]}', '{"observations": [{"name": "a.b"}]}', '{"observations": [{}], "a": NaN}'],
)
def test_invalid_result_file_has_no_observations(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank0.json").write_text(text)
    results = RankFiles(tmp_path, 0)
    assert (results.observations(), results.training_progress()) == ([], [])
    (tmp_path / "rank0.json").write_text(json.dumps({"observations": [observation("gemm.throughput", 1.0, "FLOP/s")]}))
    assert len(results.observations()) == 1


@pytest.mark.parametrize(
    ("phase", "at"),
    [
        ("", "start"),
        ("stress bf16", "stress"),
        ("model_parallel, 2 replicas", "model_parallel"),
        ("readiness check", "readiness check"),
        ("failed: RuntimeError: x", "failed"),
        ("training resnet18, finished epochs: 1 of 2", "training"),
    ],
)
def test_phase_label_is_a_benchmark_or_a_known_phase(phase: str, at: str) -> None:
    assert live.phase_label(phase) == at


# ---- the exporter ----


def scrape(directory: Path) -> Series:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exporter([], sources=[RunSource(directory)]))  # type: ignore[arg-type]
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name.removeprefix("rackproof_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


SUCCESS = ("collector_success", (("collector", "run"),))


def test_host_without_a_run_exports_only_the_state_of_the_collector(tmp_path: Path) -> None:
    exported = scrape(tmp_path)
    assert exported[SUCCESS] == 1
    assert {name for name, _ in exported} == {
        "collector_success",
        "collector_duration_seconds",
        "collector_last_success_timestamp_seconds",
        "collector_stuck_seconds",
    }


@pytest.mark.parametrize("broken", ["", "{}", '{"schema": "rackproof.live/2"}', "link"])
def test_invalid_live_file_makes_the_collector_fail(run: HostRun, broken: str) -> None:
    live.publish_idle(run)
    path = run.directory.parent / "live.json"
    assert scrape(run.directory.parents[1])[SUCCESS] == 1
    if broken == "link":
        path.rename(path.with_name("other.json"))
        path.symlink_to("other.json")
    else:
        path.write_text(broken)
    exported = scrape(run.directory.parents[1])
    assert exported[SUCCESS] == 0
    assert not any(name.startswith("run_") for name, _ in exported)


def test_hostile_rack_name_stays_inside_its_label(run: HostRun) -> None:
    host = dataclasses.replace(run.host, rack='r"1\\\n# HELP evil x')
    run.host = host
    live.publish_idle(run)
    exported = scrape(run.directory.parents[1])
    ((_, labels),) = [key for key in exported if key[0] == "run_info"]
    assert dict(labels)["rack"] == host.rack
