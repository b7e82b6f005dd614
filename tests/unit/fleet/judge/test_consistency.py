"""Evidence that is incomplete or contradicts itself is not accepted, and the contradiction is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fleet.judge.consistency import contradictions
from fleet.judge.credibility import impossible_readings, problem_of_figure
from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.judge.figure_consistency import figure_problems, figure_structure
from fleet.judge.judge import host_views, judge
from fleet.records.load import load
from fleet.report.hosts import decide
from fleet.report.merge import merge
from rackproof.main import main
from schemas.benchmarks import Output
from schemas.catalogue import BENCHMARKS, parameters, settings
from schemas.plans import Plan
from schemas.records import MEASURED, Launch, Metric, Observation, Record, Snapshot, Value
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, REJECTED, VerdictKind
from tests import ROOT, builders

PACKS = read_packs([])
PLAN = builders.plan("h1", "h2", "h3", profile="smoke", gpu_count=2)
PAIR = builders.plan("h1", "h2", profile="smoke", gpu_count=2)
Change = Callable[[Record], Record]


def change_launch(**fields: object) -> Change:
    return lambda record: replace(record, launches=tuple(replace(item, **fields) for item in record.launches))  # type: ignore[arg-type]


def change_launches(change: Callable[[tuple[Launch, ...]], tuple[Launch, ...]]) -> Change:
    return lambda record: replace(record, launches=change(record.launches))


def keep_snapshots(condition: Callable[[Snapshot], bool]) -> Change:
    return lambda record: replace(record, snapshots=tuple(filter(condition, record.snapshots)))


def change_last_snapshot(change: Callable[[Metric], Metric | None]) -> Change:
    def changed(record: Record) -> Record:
        *others, last = record.snapshots
        metrics = tuple(metric for item in last.metrics if (metric := change(item)) is not None)
        return replace(record, snapshots=(*others, replace(last, metrics=metrics)))

    return changed


def with_params(item: Observation, **params: Value) -> Observation:
    """Return the figure with these parameters. A parameter with the value None is removed."""
    return replace(item, params={key: value for key, value in {**item.params, **params}.items() if value is not None})


def shifted_by(record: Record, time: timedelta) -> Record:
    """Return the record with `time` added to every time."""

    def moved(moment: str) -> str:
        return (datetime.fromisoformat(moment) + time).strftime("%Y-%m-%dT%H:%M:%SZ")

    return replace(
        record,
        began=moved(record.began),
        ended=moved(record.ended),
        snapshots=tuple(replace(item, at=moved(item.at)) for item in record.snapshots),
        launches=tuple(replace(item, began=moved(item.began)) for item in record.launches),
    )


def change_figures(change: Callable[[Observation], Observation], name: str = "collective.") -> Change:
    return lambda record: replace(
        record,
        observations=tuple(change(item) if item.name.startswith(name) else item for item in record.observations),
    )


def change_gpu(number: int, **fields: object) -> Change:
    return lambda record: replace(
        record,
        gpus=tuple(
            replace(gpu, **fields) if gpu.index == number else gpu  # type: ignore[arg-type]
            for gpu in record.gpus
        ),
    )


def without_width_of_gpu_1(metric: Metric) -> Metric:
    values = {scope: value for scope, value in metric.values.items() if scope != "gpu=1"}
    return replace(metric, values=values) if metric.name == "gpu.pcie.width" else metric


def failed_ranks(record: Record) -> Record:
    launches = tuple(
        replace(item, ranks=tuple(replace(rank, exit_code=139) for rank in item.ranks)) for item in record.launches
    )
    return replace(record, launches=launches)


CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "failed ranks of a finished launch": (
        failed_ranks,
        "the launch finished, but 2 of its ranks failed: rank 0 with exit code 139",
    ),
    "finished launch without ranks": (
        change_launch(ranks=()),
        "the launch finished with 0 ranks, but the plan has 2 devices",
    ),
    "launch longer than its deadline": (
        change_launch(duration_s=1e9),
        "the launch took 1000000000 s, but its deadline was 60 s",
    ),
    "launch of another host": (change_launch(members=("h9",)), "the launch had the members h9, but not this host"),
    "the same launch twice": (change_launches(lambda items: (*items, *items)), "the record has a launch twice"),
    "launch outside the time of the record": (change_launch(began="2026-12-24T00:00:00Z"), "is outside"),
    "first of two launches is outside the time of the record": (
        change_launches(lambda items: (replace(items[0], began="2026-12-24T00:00:00Z"), *items)),
        "is outside",
    ),
    "no snapshot before preflight": (
        keep_snapshots(lambda item: item.stage != "preflight"),
        "no snapshot of the beginning of the run",
    ),
    "no snapshot before the launch": (
        keep_snapshots(lambda item: (item.stage, item.phase) != ("benchmark", "before")),
        "the record has no snapshot before the launch",
    ),
    "reading gone from the last snapshot": (
        change_last_snapshot(lambda metric: None if metric.name == "gpu.pcie.replays" else metric),
        "missing in the snapshot after benchmark, but other snapshots of the record have it",
    ),
    "GPU gone from a reading": (
        change_last_snapshot(without_width_of_gpu_1),
        "missing in the snapshot after benchmark, but other snapshots of the record have it",
    ),
    "GPU whose serial differs from that in the gang record": (
        change_gpu(1, serial="h2-0"),
        "changed during the run: h2-0, then h2-1",
    ),
    "two GPUs at one PCI address": (
        change_gpu(1, pci_bus_id="0000:00:00.0"),
        "2 GPUs of this host have pci_bus_id 0000:00:00.0",
    ),
    "figure of fewer ranks than were launched": (
        change_figures(lambda item: replace(item, params={**item.params, "world_size": 1})),
        "measured by 1 rank, but the launch had 2",
    ),
    "the same figure twice": (
        lambda record: replace(record, observations=(*record.observations, record.observations[0])),
        "the record has this figure 2 times",
    ),
    "rate of one GPU 100 times the rate of the other GPU": (
        change_figures(lambda item: replace(item, value=item.value * 100) if item.scope == "gpu=1" else item, "gemm."),  # type: ignore[operator]
        "of two devices cannot both be right",
    ),
    "figure with a wrong unit": (
        change_figures(lambda item: replace(item, unit=f"G{item.unit}"), "memory."),
        "has the unit GB/s, but this figure is in B/s",
    ),
    "reading with a wrong unit": (
        change_last_snapshot(lambda metric: replace(metric, unit="%")),
        "has the unit %, but this reading is in",
    ),
    "bandwidth that gives another message size when multiplied by the time": (
        change_figures(lambda item: replace(item, value=item.value / 1e3), "collective.all_reduce.algbw"),  # type: ignore[operator]
        "is 0.008 B, but the settings give 8 B",
    ),
    "bus bandwidth in another unit": (
        change_figures(lambda item: replace(item, value=item.value / 1e3), "collective.all_reduce.busbw"),  # type: ignore[operator]
        "times the 2.4e+11 B/s of collective.all_reduce.algbw",
    ),
    "clock in another unit": (
        change_figures(lambda item: replace(item, value=item.value / 1e3), "stress.clock"),  # type: ignore[operator]
        "467000 FLOP/cycle times 1.5e+06 Hz is not the 7e+14 FLOP/s of stress.throughput",
    ),
    "transport without the number of ranks": (
        change_figures(lambda item: replace(item, params={}), "collective.transport"),
        "it does not state how many ranks measured it",
    ),
    "peer access True, although the copies state that it is False": (
        change_figures(lambda item: replace(item, params={**item.params, "access": False}), "peer_copy.bandwidth"),
        "it is True, but other figures of the benchmark state False",
    ),
    "negative figure": (
        change_figures(lambda item: replace(item, value=-1.0), "stress.wrong_products"),
        "-1 is not credible: it cannot be negative",
    ),
    "share above 1": (
        change_figures(lambda item: replace(item, value=970.0), "integrity.tested_share"),
        "970 is not credible: the highest possible value is 1",
    ),
    "rates of all GPUs far above the datasheet": (
        change_figures(lambda item: replace(item, value=item.value * 100), "gemm."),  # type: ignore[operator]
        "is not credible: it is more than 3 times the rate in the datasheet of the part",
    ),
    "the same reading twice": (
        lambda record: replace(
            record,
            snapshots=tuple(replace(item, metrics=(*item.metrics, item.metrics[0])) for item in record.snapshots),
        ),
        "read 2 times in the snapshot",
    ),
    "no version of torch": (lambda record: replace(record, software={}), "the ranks reported no version of torch"),
    "record that begins a day before its first snapshot": (
        lambda record: replace(record, began="2026-11-20T04:00:00Z"),
        "more than an hour before its first snapshot",
    ),
    "record of an earlier run with the nonce of this run": (
        lambda record: shifted_by(record, timedelta(days=-1)),
        "24.0 h before the run was planned at 2026-11-21T04:00:00Z: it is of an earlier run, "
        "or the clock of the host is behind that of the control node",
    ),
    "record that ends a day after its last snapshot": (
        lambda record: replace(record, ended="2026-11-22T04:00:00Z"),
        "more than an hour after its last snapshot and launch",
    ),
    "longer deadline than in the plan": (
        change_launch(deadline_s=1e6),
        "the launch had a deadline of 1e+06 s, but the plan has 180 s",
    ),
    "negative size": (
        change_figures(lambda item: replace(item, params={**item.params, "size": -8192}), "gemm."),
        "its parameter size is -8192, but must not be negative",
    ),
    "size that the plan does not have": (
        change_figures(lambda item: replace(item, params={**item.params, "size": 64}), "gemm."),
        "size is 64, but the plan has 8192",
    ),
    "latency in another unit": (
        change_figures(lambda item: replace(item, value=2e-9), "peer_copy.latency"),
        "no message takes so little time",
    ),
    "copies without the NUMA node of the memory": (
        change_figures(lambda item: with_params(item, numa=None), "host_copy.bandwidth"),
        "its parameter `numa` is None, expected `local`, `remote` or `unknown`",
    ),
    "no copies with memory of the GPU's own NUMA node": (
        change_figures(lambda item: with_params(item, numa="remote"), "host_copy.bandwidth"),
        "but the record has no copy of the same GPU, stage, direction and size that uses memory of the GPU's own node",
    ),
    "record that ends before it begins": (
        lambda record: replace(record, began="2026-11-22T04:00:00Z"),
        "the record ends before it begins",
    ),
}
"""Case -> a change of the healthy host record of h2, and a part of the reason that must be reported for it."""


def evidence(change: Change = lambda record: record, plan: Plan = PLAN) -> dict[str, Evidence]:
    """Return healthy evidence in which `change` is applied to the host record of h2."""
    values = builders.evidence(plan)
    first, *others = values["h2"].records
    return {**values, "h2": replace(values["h2"], records=(change(first), *others))}


def replaced_volume(record: Record) -> Record:
    """Return the record of a host on which a volume was replaced by another volume with the same device name."""
    metrics = [Metric(name="storage.disk.serial", unit="1", values={"disk=nvme1n1": serial}) for serial in ("a", "b")]
    first, *others = record.snapshots
    changed = [replace(item, metrics=(*item.metrics, metrics[1])) for item in others]
    return replace(record, snapshots=(replace(first, metrics=(*first.metrics, metrics[0])), *changed))


HARMLESS: dict[str, Change] = {
    "volume replaced by another volume": replaced_volume,
}
"""Case -> a change of the healthy host record of h2 that is no contradiction."""


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_change_is_no_contradiction(kind: str) -> None:
    verdicts = judge(PLAN, evidence(HARMLESS[kind]), PACKS)
    assert [item.reason for item in verdicts if item.kind == VerdictKind.CONTRADICTORY] == []


def test_memory_bandwidth_may_exceed_the_datasheet_if_the_data_fits_into_the_cache() -> None:
    small = 1 << 26
    planned = PLAN.stage("benchmark").benchmarks
    plan = builders.with_benchmarks(PLAN, benchmark={**planned, "memory": {**planned["memory"], "size_bytes": small}})

    def faster(item: Observation) -> Observation:
        return replace(item, value=item.value * 6, params={**item.params, "size_bytes": small})  # type: ignore[operator]

    verdicts = judge(plan, evidence(change_figures(faster, "memory.")), PACKS)
    assert [
        (item.host, item.reason) for item in verdicts if item.kind == VerdictKind.CONTRADICTORY and item.host == "h2"
    ] == []


STATED_SETTINGS = [
    (name, key)
    for name, benchmark in BENCHMARKS.items()
    if name != "scaling"  # a study, which is not judged
    for key in sorted({each for output in benchmark.outputs for each in parameters(output, benchmark)})
    if key in benchmark.settings
]
"""Name of a benchmark, and a setting that the figures of this benchmark state as a parameter."""


@pytest.mark.parametrize(("name", "key"), STATED_SETTINGS)
def test_figure_states_the_setting_of_the_plan_unless_the_benchmark_adapts_it(name: str, key: str) -> None:
    """An example of adaptation: a benchmark reduces the number of layers on a small GPU."""
    named = {"rackproof_local_storage": ["/data"], "rackproof_shared_storage": ["/shared"]}
    plans = (builders.plan("h1", "h2", profile=profile, **named) for profile in ("standard", "extended"))
    plan = next(plan for plan in plans if any(name in stage.benchmarks for stage in plan.stages))
    view = host_views(plan, builders.evidence(plan), PACKS)[0]
    stage = next(stage.name for stage in plan.stages if name in stage.benchmarks)
    output = next(output.name for output in BENCHMARKS[name].outputs if "{" not in output.name)
    planned = settings(name, plan.stage(stage).benchmarks[name])[key]
    stated = planned[-1] if isinstance(planned, list) else planned

    def contradiction(value: float) -> list[str]:
        figure = builders.observation(output, 1.0, stage=stage, **{key: value})
        return [reason for _, reason in figure_structure(view, [figure]).problems if reason.startswith(f"{key} is")]

    assert contradiction(stated) == []
    assert bool(contradiction(stated * 3)) is (key not in BENCHMARKS[name].adapted)


CONSTANTS = [
    (benchmark, output, key)
    for benchmark, entry in BENCHMARKS.items()
    for output in entry.outputs
    for key in output.constants
]


@pytest.mark.parametrize(("benchmark", "output", "key"), CONSTANTS, ids=lambda value: getattr(value, "name", value))
def test_parameter_that_does_not_depend_on_the_settings_has_its_constant_value(
    benchmark: str, output: Output, key: str
) -> None:
    plan = builders.plan("h1", "h2", profile="extended")
    view = host_views(plan, builders.evidence(plan), PACKS)[0]
    stage = next(stage.name for stage in plan.stages if benchmark in stage.benchmarks)
    for value in (output.constants[key], output.constants[key] + 1):
        figure = builders.observation(output.name, 1.0, stage=stage, **{key: value})
        reasons = [reason for _, reason in figure_structure(view, [figure]).problems if reason.startswith(f"{key} is")]
        assert bool(reasons) is (value != output.constants[key])


@pytest.mark.parametrize(("parameter", "contradictory"), [("size_bytes", False), ("size", True)])
def test_only_the_message_size_may_differ_between_pairs(parameter: str, contradictory: bool) -> None:
    """Slow pairs of hosts are measured with smaller messages (`size_bytes`)."""

    def resized(item: Observation) -> Observation:
        return replace(item, params={**item.params, parameter: 1 << (21 + item.scope.startswith("gpu=0"))})

    values = builders.evidence(PLAN)
    alone, *gangs = values["h2"].records
    changed = [change_figures(resized, "pairs.bandwidth")(record) for record in gangs]
    evidence = {**values, "h2": replace(values["h2"], records=(alone, *changed))}
    reasons = [item.reason for item in judge(PLAN, evidence, PACKS) if item.kind == VerdictKind.CONTRADICTORY]
    assert any(f"{parameter} is" in reason for reason in reasons) is contradictory


def test_rate_of_fp64_products_is_credible_up_to_three_times_the_rate_in_the_datasheet() -> None:
    """The datasheet of the H200 states 6.7e13 FLOP/s."""

    def evidence_of_fp64(value: float) -> dict[str, Evidence]:
        figure = builders.observation("gemm.throughput", value, scope="gpu=0", dtype="fp64", size=8192)
        return evidence(lambda record: replace(record, observations=(*record.observations, figure)))

    def incredible(value: float) -> list[str]:
        verdicts = judge(PLAN, evidence_of_fp64(value), PACKS)
        return [item.reason for item in verdicts if item.name == "gemm.throughput" and "not credible" in item.reason]

    assert incredible(1.9e14) == []
    assert len(incredible(2.1e14)) == 1


def without_ranks(item: Observation) -> Observation:
    return replace(item, params={key: value for key, value in item.params.items() if key != "world_size"})


def times(factor: float) -> Callable[[Observation], Observation]:
    """Return a function that multiplies a figure by `factor` if its scope is the first GPU or the host."""
    return lambda item: replace(item, value=item.value * factor) if item.scope in ("gpu=0", "host") else item  # type: ignore[operator]


FIGURES_OF_TWO_GPUS: dict[str, tuple[str, Callable[[Observation], Observation], str]] = {
    "1000 replicas on 2 ranks": (
        "model_parallel.step_time",
        lambda item: replace(item, params={**item.params, "replicas": 1000}),
        "world_size is 2, replicas is 1000, left_out is 0: world_size must be 2 * replicas + left_out",
    ),
    "two ranks of one host without a replica": (
        "model_parallel.step_time",
        lambda item: replace(item, params={**item.params, "replicas": 0, "left_out": 2}),
        "left_out at most the number of hosts",
    ),
    "step time that does not state `left_out` (the number of ranks that have no replica)": (
        "model_parallel.step_time",
        lambda item: replace(item, params={key: value for key, value in item.params.items() if key != "left_out"}),
        "must all be integers",
    ),
    "figure of one GPU without its number of ranks": (
        "transformer.memory_peak",
        without_ranks,
        "it does not state how many ranks measured it",
    ),
    "sufficiency of the data loader 1000 times too high": (
        "dataloader.sufficiency",
        times(1000),
        "the measured rates give about",
    ),
    "slowdown below 0.5": (
        "overlap.slowdown",
        times(1 / 1000),
        "both operations together took less than half the time of the longer one",
    ),
    "sufficiency of the data loader 1000 times too low: a fault, no contradiction": (
        "dataloader.sufficiency",
        times(1 / 1000),
        "",
    ),
}
"""Case -> the name of a figure, a change of this figure, and a part of the reason; empty if the change is no contradiction.

`dataloader.sufficiency` is the rate at which the loader prepares images, divided by the rate at which the GPU trains on them.
"""


@pytest.mark.parametrize("kind", FIGURES_OF_TWO_GPUS)
def test_figure_that_contradicts_itself_or_other_figures_is_named(kind: str) -> None:
    name, change, reason = FIGURES_OF_TWO_GPUS[kind]
    run = load(ROOT / "docs" / "measurements" / "h200x2")
    (host,) = run.evidence
    changed = builders.with_observations(run.evidence[host], lambda item: change(item) if item.name == name else item)
    verdicts = judge(run.plan, {host: changed}, PACKS)
    reasons = {item.reason for item in verdicts if item.kind == VerdictKind.CONTRADICTORY}
    assert bool(reasons) is bool(reason)
    assert all(reason in each for each in reasons)


@pytest.mark.parametrize(
    ("moved", "is_possible"), [(16, True), (8, True), (16000, False), (0.016, False), ("16", False), (True, False)]
)
def test_moved_bytes_may_differ_from_the_size_by_less_than_one_element_per_rank(
    moved: object, is_possible: bool
) -> None:
    """An element has 4 bytes, so the difference must be below 16 bytes for 4 ranks."""
    plan = builders.plan("h1", "h2", gpu_count=4)
    view = host_views(plan, builders.evidence(plan), PACKS)[0]
    figure = builders.observation(
        "collective.all_gather.algbw", 1e9, stage="gang", size_bytes=8, moved_bytes=moved, world_size=4
    )
    reasons = [reason for _, reason in figure_structure(view, [figure]).problems if reason.startswith("moved_bytes is")]
    assert bool(reasons) is not is_possible


def test_one_gpu_may_compute_far_slower_but_not_far_faster_than_the_others() -> None:
    """A GPU cannot be more than 20 times as fast as the other GPUs of its host, but it can be far slower."""
    plan = builders.plan("h1", "h2", gpu_count=4)
    view = host_views(plan, builders.evidence(plan), PACKS)[0]

    def contradicted(first: float) -> list[str]:
        items = [
            builders.observation("straggler.compute", first if gpu == 0 else 0.014, stage="gang", scope=f"gpu={gpu}")
            for gpu in range(4)
        ]
        return [scope for _, scope, reason, _ in figure_problems(view, items) if "not credible" in reason]

    assert contradicted(0.014 * 100) == []
    assert contradicted(0.014 / 100) == ["gpu=0"]
    assert contradicted(0.0) == ["gpu=0", "gpu=0"]  # the second problem: 0 is below 1e-6 s, the lowest credible value


def test_fastest_gpu_is_credible_only_if_another_gpu_is_nearly_as_fast() -> None:
    plan = builders.plan("h1", "h2", gpu_count=4)
    view = host_views(plan, builders.evidence(plan), PACKS)[0]
    items = [
        builders.observation("straggler.compute", value, stage="gang", scope=f"gpu={gpu}")
        for gpu, value in enumerate((0.014, 0.014, 0.5, 0.5))
    ]
    assert [*figure_problems(view, items)] == []
    ((_, scope, reason, _),) = figure_problems(view, items[1:3])
    assert scope == "host"
    assert "0.014 and 0.5 s of two devices cannot both be right" in reason


@pytest.mark.parametrize(
    ("max_steps", "epochs", "is_possible"),
    [(0, 20, True), (0, 0.2, False), (10, 0.2, True), (10, 200, False), (10, "0.2", False), (10, 0, False)],
)
def test_training_with_a_limit_on_its_steps_may_have_fewer_epochs_than_planned(
    max_steps: int, epochs: float | str, is_possible: bool
) -> None:
    """The plan has 20 epochs. If `max_steps` is 0, the number of steps has no limit."""
    plan = builders.plan("h1", "h2")
    planned = plan.stage("benchmark").benchmarks
    plan = builders.with_benchmarks(plan, benchmark={**planned, "fashion_mnist": {"max_steps": max_steps}})
    view = host_views(plan, builders.evidence(plan), PACKS)[0]
    figure = builders.observation("fashion_mnist.accuracy", 0.9, epochs=epochs)
    reasons = [reason for _, reason in figure_structure(view, [figure]).problems if reason.startswith("epochs is")]
    assert bool(reasons) is not is_possible


def test_sufficiency_of_the_loader_is_compared_only_with_a_training_of_equally_large_batches() -> None:
    """The sufficiency is the rate of the loader divided by the rate of a training with batches of the same size."""
    plan = builders.plan("h1", "h2", gpu_count=1)
    view = host_views(plan, builders.evidence(plan), PACKS)[0]

    def contradictions(batch: int) -> int:
        items = [
            builders.observation("dataloader.sufficiency", 0.94, scope="gpu=0", network="resnet18", batch_size=batch),
            builders.observation("dataloader.throughput", 1500.0, scope="gpu=0", network="resnet18", batch_size=batch),
            builders.observation("training.throughput", 34e3, network="resnet18", batch_size=2048, world_size=1),
        ]
        return sum("the measured rates give about" in reason for _, _, reason, _ in figure_problems(view, items))

    assert contradictions(8) == 0
    assert contradictions(2048) == 1


INCREDIBLE: dict[str, tuple[Metric, str]] = {
    "duration of a collector in milliseconds": (
        Metric(name="collector.nvml", unit="ms", values={"host": 1.0}),
        "has the unit ms, but this reading is in s",
    ),
    "GPU in kilodegrees": (
        Metric(name="gpu.temperature", unit="Cel", values={"gpu=0": 0.051}),
        "0.051 Cel is not credible: the lowest possible value is 2",
    ),
    "MTU in kilobytes": (
        Metric(name="network.mtu", unit="B", values={"nic=eth0": 1.5}),
        "1.5 B is not credible: the lowest possible value is 68",
    ),
    "temperature 0 of a part without a sensor": (
        Metric(name="gpu.memory.temperature", unit="Cel", values={"gpu=0": 0}),
        "",
    ),
    "negative margin of a GPU above its limit": (
        Metric(name="gpu.temperature_margin", unit="Cel", values={"gpu=0": -3}),
        "",
    ),
}
"""Case -> a reading, and the reason why it is impossible; empty if it is possible."""


@pytest.mark.parametrize("kind", INCREDIBLE)
def test_impossible_unit_or_value_of_a_reading_is_named(kind: str) -> None:
    metric, reason = INCREDIBLE[kind]
    taken = Snapshot(stage="benchmark", phase="during", at=builders.WHEN, duration_s=0.1, metrics=(metric,))
    assert [problem[2] for problem in impossible_readings(taken)] == ([reason] if reason else [])


def test_wrong_reading_that_two_hosts_have_in_common_is_reported_on_both() -> None:
    shared = Metric(name="gpu.temperature", unit="Cel", values={"gpu=0": 0.051})

    def changed(record: Record) -> Record:
        snapshots = (
            replace(taken, metrics=tuple(shared if item.name == shared.name else item for item in taken.metrics))
            for taken in record.snapshots
        )
        return replace(record, snapshots=tuple(snapshots))

    evidence = builders.evidence(PLAN)
    for host in ("h1", "h3"):
        evidence[host] = replace(evidence[host], records=tuple(map(changed, evidence[host].records)))
    result = [item.host for item in judge(PLAN, evidence, PACKS) if "0.051 Cel is not credible" in item.reason]
    assert list(dict.fromkeys(result)) == ["h1", "h3"]


SOAK_FIGURES: dict[str, tuple[Callable[[Observation], Observation], str]] = {
    "wrong unit": (lambda item: replace(item, unit="TFLOP/s"), "has the unit TFLOP/s, but this figure is in FLOP/s"),
    "negative sample of a round": (lambda item: with_samples(item, min=-1.0), "a sample is negative: -1"),
    "greatest sample in another unit": (
        lambda item: with_samples(item, max=item.value * 1e3),  # type: ignore[operator]
        "the coefficient of variation",
    ),
    "median sample in another unit": (lambda item: with_samples(item, p50=item.value / 1e3), "is not between"),  # type: ignore[operator]
    "value outside the samples of all rounds": (lambda item: replace(item, value=item.value * 1e3), "is not between"),  # type: ignore[operator]
}
"""Case -> a change of each `stress.throughput` of a soak, and a part of the reason that must be reported for it."""


def with_samples(item: Observation, **fields: float) -> Observation:
    assert item.samples
    return replace(item, samples=replace(item.samples, **fields))


@pytest.mark.parametrize("kind", SOAK_FIGURES)
def test_wrong_or_duplicate_figure_of_a_soak_is_named(kind: str) -> None:
    change, reason = SOAK_FIGURES[kind]
    run = load(MEASURED_RUNS / "h200x4-burnin")
    measured = run.evidence["h200x4"]
    changed = change_figures(change, "stress.throughput")(measured.records[0])
    (view,) = host_views(run.plan, {"h200x4": replace(measured, records=(changed,))}, PACKS)
    problems = [item for item in contradictions(view) if reason in item.reason]
    assert {(item.name, item.scope) for item in problems} == {
        ("stress.throughput", f"gpu={index}") for index in range(4)
    }
    twice = replace(
        measured.records[0], observations=(*measured.records[0].observations, measured.records[0].observations[0])
    )
    (view,) = host_views(run.plan, {"h200x4": replace(measured, records=(twice,))}, PACKS)
    reasons = [item.reason for item in contradictions(view) if item.name not in CONTRADICTORY_READINGS[run.plan.run_id]]
    assert reasons == ["the record has this figure 2 times"]


def test_consistent_evidence_is_accepted() -> None:
    assert merge(PLAN, evidence(), PACKS).decision == ACCEPTED


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradiction_is_named_and_never_accepted(kind: str) -> None:
    change, reason = CONTRADICTIONS[kind]
    verdicts = judge(PAIR, evidence(change, PAIR), PACKS)
    assert decide(verdicts) != ACCEPTED
    reasons = [item.reason for item in verdicts if item.host == "h2"]
    assert any(reason in item for item in reasons), reasons


MEASURED_RUNS = ROOT / "docs" / "measurements"
ROW = re.compile(r"^\| \[`(\S+)`\]\(\S+\) \|.*\| (\w+) \| (.*)\|$", re.MULTILINE)
"""A row of the table of runs in docs/measurements/README.md. Groups: the run, its decision, and its failures."""
KEPT_RUNS = {
    run: (decision, failures) for run, decision, failures in ROW.findall((MEASURED_RUNS / "README.md").read_text())
}
"""Run -> its decision and failures according to the table."""
HEADLINES = {ACCEPTED: "PASS", REJECTED: "FAIL", INCOMPLETE: "INCOMPLETE"}
"""Decision -> how the headline of the report states it."""
CONTRADICTORY_READINGS = {
    "h200x4-burnin": {f"gpu.nvlink.{counter}" for counter in ("crc_errors", "recoveries")},
}
"""Run -> readings with a contradiction: some snapshots lack them, because NVML reported them as not supported for a moment."""


def test_table_lists_every_run_of_real_hardware() -> None:
    # Runs with a `scaling.md` are studies, which are not judged.
    runs = {path.parent.name for path in MEASURED_RUNS.glob("*/plan.json") if not (path.parent / "scaling.md").exists()}
    assert set(KEPT_RUNS) == runs


@pytest.mark.parametrize("name", KEPT_RUNS)
def test_run_of_real_hardware_is_judged_as_the_table_states(name: str) -> None:
    decision, failures = KEPT_RUNS[name]
    run = load(MEASURED_RUNS / name)
    report = merge(run.plan, run.evidence, PACKS, events=run.events, quarantined=run.quarantined)
    failed = {f"{item.scope} {item.name}" for item in report.verdicts if item.verdict == FAIL}
    assert (report.decision, failed) == (decision, set(re.findall("`(.+?)`", failures)))
    contradictory = {item.name for item in report.verdicts if item.kind == VerdictKind.CONTRADICTORY}
    assert contradictory == CONTRADICTORY_READINGS.get(name, set())
    headline = (MEASURED_RUNS / name / "report.md").read_text(encoding="utf-8").splitlines()[0]
    assert headline == f"# FINAL ACCEPTANCE: {HEADLINES[decision]}"


@pytest.mark.parametrize("profile", ["smoke", "standard"])
def test_simulated_fleet_has_no_contradiction(tmp_path: Path, profile: str) -> None:
    assert main(["simulate", str(tmp_path / "r"), "--hosts", "2", "--gpus", "2", "--profile", profile]) == 0
    run = load(tmp_path / "r")
    verdicts = judge(run.plan, run.evidence, PACKS)
    assert [
        item.reason for item in verdicts if item.verdict == INCONCLUSIVE and item.kind == VerdictKind.CONTRADICTORY
    ] == []


@pytest.mark.parametrize("size", [8, 1 << 20, 1 << 26, (1 << 27) - 1, 1 << 27, 1 << 30, 1 << 32, 1 << 34])
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "send_recv", "all_to_all"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_bandwidth_over_nvlink_is_credible_at_every_message_size(size: int, op: str, world_size: int) -> None:
    """A rate is credible up to three times the rate in the datasheet, here that of NVLink.

    At some message sizes, only the criterion for PCIe applies. Its lower datasheet rate must not be used instead.
    """
    plan = builders.plan("h1", gpu_count=world_size, rackproof_gang="none")
    (view,) = host_views(plan, builders.evidence(plan), read_packs([]))
    params = {"size_bytes": size, "world_size": world_size, "dtype": "fp32"}
    item = Observation(
        name=f"collective.{op}.busbw",
        scope="host",
        unit="B/s",
        stage="benchmark",
        status=MEASURED,
        value=3.6e11,
        params=params,
    )
    assert problem_of_figure(view.criteria(), item) == ""
    assert "more than 3 times the rate in the datasheet" in problem_of_figure(
        view.criteria(), replace(item, value=3.6e12)
    )


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        (
            {"host.numa.count": {"host": 1}},
            "the NUMA node of the memory is unknown, but the host has only one NUMA node",
        ),
        ({"host.numa.count": {"host": 2}}, ""),
        (
            {"host.numa.count": {"host": 2}, "pcie.numa_node": {"pci=0000:00:00.0": 1, "pci=0000:01:00.0": 1}},
            "the NUMA node of the memory is unknown, but the host reports node 1 for the GPU",
        ),
    ],
)
def test_numa_node_of_a_copy_must_not_be_unknown_if_it_follows_from_the_readings_of_the_host(
    readings: dict[str, dict[str, Value]], reason: str
) -> None:
    def change(record: Record) -> Record:
        added = tuple(Metric(name=name, unit="1", values=values) for name, values in readings.items())
        snapshots = tuple(replace(taken, metrics=(*taken.metrics, *added)) for taken in record.snapshots)
        record = replace(record, snapshots=snapshots)
        return change_figures(lambda item: with_params(item, numa="unknown"), "host_copy.bandwidth")(record)

    verdicts = judge(PLAN, evidence(change), PACKS)
    result = {item.reason for item in verdicts if item.name == "host_copy.bandwidth" and item.host == "h2"}
    contradictions_found = {item for item in result if "NUMA" in item}
    assert contradictions_found == ({reason} if reason else set())
