"""Test access to the evidence of a host: observations, snapshots, launches, serials and packs."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence, Planned, from_benchmark
from fleet.judge.host_view import HostView
from fleet.judge.observation_index import ObservationIndex, ObservationLookup
from fleet.judge.pack_selection import criteria_by_id, select_packs
from fleet.judge.reading_index import ReadingIndex
from schemas.catalogue import Expectation
from schemas.plans import Plan
from schemas.readings import BMC
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Metric, Observation, Snapshot
from schemas.reports import INCONCLUSIVE
from tests import builders
from tests.unit.fleet.judge.small_fleet import (
    benchmark_launch,
    criterion,
    host_evidence,
    one_figure_plan,
    pack,
    reading,
)

PLAN = one_figure_plan(gpu_count=2)
RECORD = host_evidence(PLAN).records[0]


def measure(name: str = "memory.bandwidth", status: str = MEASURED, **over: Any) -> Observation:
    """Return an observation with the value 1, or with another status and a reason; `over` replaces fields."""
    known = {"value": 1} if status == MEASURED else {"reason": "lost"}
    return Observation(
        **{"name": name, "scope": "gpu=0", "stage": "benchmark", "unit": "1", "status": status, **known, **over}
    )


def snapshot(at: int, *metrics: Metric, stage: str = "benchmark", phase: str = "before") -> Snapshot:
    return Snapshot(stage=stage, phase=phase, at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=metrics)


def evidence_with(*snapshots: Snapshot, observations: tuple[Observation, ...] = (), **over: Any) -> Evidence:
    return Evidence(records=(replace(RECORD, snapshots=snapshots, observations=observations, **over),))


def host_view(evidence: Evidence, *packs: Pack, plan: Plan = PLAN) -> HostView:
    return HostView(plan, plan.hosts[0], evidence, packs or [pack()])


def test_observation_by_pci_address_is_attributed_to_the_gpu_at_that_address() -> None:
    readings = [reading(1, scope=scope) for scope in ("pci=0000:01:00.0,link=2", "pci=0000:99:00.0", "hca=mlx5_0")]
    evidence = evidence_with(snapshot(0, *readings), observations=(measure(scope="pci=0000:00:00.0"),))
    scopes = ["gpu=1,link=2", "pci=0000:99:00.0", "hca=mlx5_0", "gpu=0"]
    assert [item.scope for item in evidence.observations()] == scopes
    named = ObservationIndex(evidence)
    assert [item.scope for item in (*named["gpu.thing"], *named["memory.bandwidth"])] == scopes
    nameless = evidence_with(gpus=tuple(replace(gpu, pci_bus_id="") for gpu in RECORD.gpus))
    assert nameless.gpu_scopes() == {}


def test_last_value_of_a_scope_comes_from_the_last_snapshot_that_has_a_value_of_it() -> None:
    """A reading whose scope is a PCI address counts for the GPU at that address."""
    first = [reading(1, scope="pci=0000:01:00.0"), reading(4, name="gpu.other", scope="gpu=0")]
    last = [reading(2, scope="pci=0000:01:00.0"), reading(name="gpu.other", scope="gpu=0", absent="error: no")]
    index = ObservationIndex(evidence_with(snapshot(0, *first), snapshot(1, *last)))
    assert index.last_values("gpu.thing") == {"gpu=1": 2}
    assert index.last_values("gpu.other") == {"gpu=0": 4}


def test_scope_has_a_reading_if_any_snapshot_has_a_value_of_it() -> None:
    both = Metric(name="gpu.other", unit="1", values={"gpu=1": 1, "gpu=2": 1})
    lost = reading(name="gpu.lost", scope="gpu=3", absent="error: no")
    index = ObservationIndex(evidence_with(snapshot(0, reading(1), lost), snapshot(1, reading(1), both)))
    assert index.with_reading(["gpu=0", "gpu=2", "gpu=3", "gpu=4"]) == {"gpu=0", "gpu=2"}
    assert index.with_reading(["gpu=0", "gpu=1"]) == {"gpu=0", "gpu=1"}
    assert index.with_reading([]) == set()
    assert len(index.metrics) == 3


def test_snapshots_of_all_records_are_ordered_by_time() -> None:
    first = evidence_with(snapshot(1), snapshot(4)).records[0]
    other = replace(first, gang="r1", snapshots=(snapshot(0, stage="gang"), snapshot(3, stage="gang")))
    evidence = Evidence(records=(first, other))
    assert [taken.at[-2] for taken in evidence.snapshots()] == ["0", "1", "3", "4"]
    view = host_view(evidence)
    assert (view.first_snapshot, view.last_snapshot) == (("gang", "before"), ("benchmark", "before"))
    nothing = host_view(Evidence())
    assert (nothing.first_snapshot, nothing.last_snapshot) == (("", ""), ("", ""))


def test_gpus_launches_and_versions_are_merged_from_all_records() -> None:
    first, second = (replace(builders.gpu("h1", index), serial=serial) for index, serial in ((1, "B"), (0, "A")))
    replaced = replace(first, serial="C")
    records = (
        replace(
            RECORD, gpus=(first, second), launches=(benchmark_launch("finished"),), software={"torch": "2", "nccl": "1"}
        ),
        replace(RECORD, gang="r1", gpus=(replaced,), launches=(benchmark_launch("failed"),), software={"nccl": "3"}),
    )
    evidence = Evidence(records=records)
    assert [gpu.serial for gpu in evidence.gpus()] == ["A", "C"]
    assert [launch.outcome for launch in evidence.launches()] == ["finished", "failed"]
    assert evidence.software() == {"torch": "2", "nccl": "3"}


def test_software_versions_become_observations_of_the_host() -> None:
    evidence = evidence_with(software={"Torch CUDA-arch": "x", "nccl": "2"})
    reported = [(item.name, item.scope, item.stage, item.unit, item.status, item.value) for item in evidence.versions()]
    assert reported == [
        ("launch.torch_cuda_arch", "host", "", "1", MEASURED, "x"),
        ("launch.nccl", "host", "", "1", MEASURED, "2"),
    ]


def test_observation_index_finds_observations_by_name() -> None:
    evidence = evidence_with(
        snapshot(0, reading(1)), snapshot(1, reading(2), reading(3, name="gpu.other")),
        observations=(measure(), measure("gpu.thing", value=9)), software={"nccl": "2"},
    )  # fmt: skip
    named = ObservationIndex(evidence)
    assert list(named) == ["gpu.thing", "gpu.other", "memory.bandwidth", "launch.nccl"]
    assert len(named) == 4
    assert [item.value for item in named["gpu.thing"]] == [1, 2, 9]
    assert named["gpu.thing"] is named["gpu.thing"]
    assert all(name in named for name in named)
    assert "gpu.nothing" not in named
    assert named["gpu.nothing"] == []


def test_gpu_without_a_measured_value_is_unmeasured() -> None:
    lost = measure(status=ERROR, scope="gpu=1")
    evidence = evidence_with(snapshot(0, reading(1), reading(absent="error: x", scope="gpu=2")), observations=(lost,))
    view = host_view(evidence)
    assert [view.measured_at(f"gpu={index}") for index in range(3)] == [True, False, False]
    assert view.unmeasured_gpus == ["gpu=1"]
    assert host_view(evidence_with(observations=(measure(scope="gpu=1"),))).unmeasured_gpus == ["gpu=0"]
    processes = replace(PLAN, hosts=(replace(PLAN.hosts[0], device="cpu"),))
    assert host_view(evidence, plan=processes).unmeasured_gpus == []


def test_stage_with_a_value_or_an_error_counts_as_observed() -> None:
    evidence = evidence_with(
        snapshot(0, reading(1), stage="preflight"), snapshot(1, reading(absent="error: x"), stage="soak"),
        snapshot(2, Metric(name="gpu.thing", unit="1", values={}), stage="gang"), snapshot(3, stage="later"),
        observations=(measure(stage="benchmark"),), software={"nccl": "2"},
    )  # fmt: skip
    assert host_view(evidence).observed_stages == {"preflight", "soak", "benchmark"}


EXPECTED = Expectation(name="memory.bandwidth", stage="benchmark", scope="device", params={"op": "copy"})


@pytest.mark.parametrize(
    ("observations", "result"),
    [
        ([], None),
        ([measure(params={"op": "copy"})], 0),
        ([measure(params={"op": "copy"}), measure(params={"op": "copy", "size": 1}, value=2)], 1),
        ([measure(params={"op": "read"})], None),
        ([measure()], None),
        ([measure(params={"op": "copy"}, stage="gang")], None),
        ([measure(params={"op": "copy"}, scope="gpu=1")], None),
        # If figures have different values of `numa`, the one with an error is found; without errors, the last one is found.
        ([measure(params={"op": "copy", "numa": "local"}), measure(params={"op": "copy", "numa": "remote"})], 1),
        ([measure(status=ERROR, params={"op": "copy", "numa": "local"}), measure(params={"op": "copy", "numa": "remote"})], 0),
        ([measure(params={"op": "copy", "numa": "local"}), measure(status=ERROR, params={"op": "copy", "numa": "remote"})], 1),
        ([measure(status=ERROR, params={"op": "copy", "numa": "local"}), measure(params={"op": "copy", "numa": "local"})], 1),
        # A later observation without `numa` replaces an earlier one with `numa`, and vice versa.
        ([measure(status=ERROR, params={"op": "copy", "numa": "local"}), measure(params={"op": "copy"})], 1),
        ([measure(status=ERROR, params={"op": "copy"}), measure(params={"op": "copy", "numa": "local"})], 1),
    ],
)  # fmt: skip
def test_observation_of_an_expectation_is_found(observations: list[Observation], result: int | None) -> None:
    wanted = None if result is None else observations[result]
    assert ObservationLookup(observations).find(EXPECTED, "gpu=0") is wanted
    named = ObservationLookup(ObservationIndex(evidence_with(observations=tuple(observations))))
    assert [named.find(EXPECTED, "gpu=0") for _ in range(2)] == [wanted, wanted]


def test_settings_of_a_planned_figure_are_its_planned_parameters_and_numa_and_the_number_of_ranks() -> None:
    planned = Planned(PLAN)
    values = {"op": "copy", "size_bytes": 1, "numa": "local", "world_size": 2}
    assert planned.params(measure(params=values)) == {"numa": "local", "op": "copy", "world_size": 2}
    assert list(planned.params(measure(params=values))) == ["numa", "op", "world_size"]
    # PLAN does not expect the next two figures: it has `memory.bandwidth` only in the stage `benchmark`. The catalogue does not
    # state their settings either. So all of their parameters count as settings.
    assert planned.params(measure("memory.other", params=values)) == values
    assert planned.params(measure(params=values, stage="gang")) == values


def test_settings_of_an_unplanned_figure_are_those_of_the_catalogue() -> None:
    # No plan expects the first two figures, because some healthy hosts lack them. So the catalogue states their settings.
    # `numa` and `number` always count as settings.
    values = {"dtype": "bf16", "numa": "local", "n": 4096, "number": 3}
    assert Planned(PLAN).params(measure("gemm.wrong_products", params=values)) == {
        "dtype": "bf16",
        "numa": "local",
        "number": 3,
    }
    assert Planned(PLAN).params(measure("peer_copy.wrong_bytes", params=values)) == {"numa": "local", "number": 3}
    # The catalogue states no settings of `gemm.throughput`, because a plan that expects this figure states them. PLAN does not
    # expect it. So all of its parameters count as settings.
    assert Planned(PLAN).params(measure("gemm.throughput", params=values)) == values


def test_members_of_a_stage_are_those_of_its_last_launch() -> None:
    launches = [
        builders.launch(stage, members)
        for stage, members in (("gang", ("h1", "h2", "h3")), ("gang", ("h1", "h2")), ("benchmark", ("h1",)))
    ]
    view = host_view(Evidence(records=(replace(RECORD, launches=tuple(launches)),)))
    assert [view.members(stage) for stage in ("gang", "benchmark", "soak")] == [("h1", "h2"), ("h1",), ()]


def test_host_record_is_the_record_without_a_gang() -> None:
    assert host_view(Evidence(records=(RECORD,))).has_record
    assert not host_view(Evidence(records=(replace(RECORD, gang="r1"),))).has_record
    assert not host_view(Evidence()).has_record


def test_scope_without_a_known_gpu_has_an_empty_serial() -> None:
    view = host_view(host_evidence(PLAN))
    assert [view.serial(scope) for scope in ("gpu=1", "gpu=1,link=0", "host", "gpu=7")] == ["h1-1", "h1-1", "", ""]


def test_operator_packs_are_the_packs_that_the_operator_wrote() -> None:
    """`mine` has a criterion from `base`. `common` is no operator pack, because a shipped pack has this name."""
    own = pack(criterion(origin="mine"), criterion(id="d", origin="base"), name="mine", chosen=True)
    named = pack(criterion(origin="common"), name="common", chosen=True)
    packs = [pack(), pack(name="common"), named, own]
    assert host_view(host_evidence(PLAN), *packs).operator_packs == {"mine", "base"}


def test_gpu_model_lacks_a_figure_if_a_parameter_has_a_value_that_the_pack_lists() -> None:
    view = host_view(host_evidence(PLAN), pack(lacks={"memory.bandwidth": {"op": ("copy", "read"), "size": (8,)}}))
    for params, lacks in (({"op": "copy"}, True), ({"op": "triad"}, False), ({}, False), ({"size": 8}, True)):
        assert view.lacks(replace(EXPECTED, params=params)) is lacks
    assert not view.lacks(replace(EXPECTED, name="memory.latency"))


def test_criterion_of_a_later_pack_replaces_that_of_an_earlier_pack() -> None:
    one, two = pack(criterion(value=1), criterion(id="d")), pack(criterion(value=2))
    packs = [one, two]
    assert {key: item.value for key, item in criteria_by_id(packs).items()} == {"c": 2, "d": 1}
    assert criteria_by_id(packs) is criteria_by_id(list(packs))
    assert criteria_by_id([two, one])["c"].value == 1


def test_inconclusive_verdict_names_the_part_and_the_reason_and_the_criterion() -> None:
    view = host_view(host_evidence(PLAN))
    reported = view.inconclusive("x.y", "gpu=1", "why", "gang", {"a": 1}, criterion(source="ours"))
    assert (reported.host, reported.scope, reported.serial, reported.name, reported.stage) == (
        "h1",
        "gpu=1",
        "h1-1",
        "x.y",
        "gang",
    )
    assert (reported.verdict, reported.criterion, reported.reason, reported.action) == (
        INCONCLUSIVE,
        "c",
        "why",
        "none",
    )
    assert (reported.params, reported.source) == ({"a": 1}, "ours")
    plain = view.inconclusive("x.y", "host", "why")
    assert (plain.criterion, plain.source, plain.stage, plain.params, plain.serial) == ("plan", "plan", "", {}, "")


@pytest.mark.parametrize(
    ("model", "gpus", "names", "why"),
    [
        ("", "NVIDIA H200", ["h200-sxm", "mine"], ""),
        ("h200-sxm", "", ["h200-sxm", "mine"], ""),
        ("h200-sxm", "NVIDIA X", ["h200-sxm", "mine"], ""),
        ("", "NVIDIA X", ["common", "mine"], "no criteria pack for NVIDIA X"),
        ("", "NVIDIA H200,NVIDIA X", ["common", "mine"], "no criteria pack for NVIDIA H200, NVIDIA X"),
        ("", "NVIDIA H200,NVIDIA H200", ["h200-sxm", "mine"], ""),
        ("x100", "NVIDIA H200", ["common", "mine"], "no criteria pack for x100"),
        ("", "", ["common", "mine"], "no criteria pack for an unknown GPU"),
        # Two packs are for this GPU model, so neither is selected.
        ("", "NVIDIA H100", ["common", "mine"], "no criteria pack for NVIDIA H100"),
    ],
)
def test_packs_are_selected_by_the_gpu_model_of_inventory_or_record(
    model: str, gpus: str, names: list[str], why: str
) -> None:
    shipped = [
        pack(), pack(name="common", gpu_names=()), pack(name="rehearsal", gpu_names=()), pack(name="mine", chosen=True),
        pack(name="twin-a", gpu_names=("NVIDIA H100",)), pack(name="twin-b", gpu_names=("NVIDIA H100",)),
    ]  # fmt: skip
    result = [replace(builders.gpu("h1", at), name=name) for at, name in enumerate(gpus.split(",")) if name]
    host = replace(PLAN.hosts[0], gpu_model=model)
    packs, reason = select_packs(PLAN, host, result, shipped)
    assert ([item.name for item in packs], reason) == (names, why)
    rehearsed, nothing = select_packs(replace(PLAN, rehearsal=True), host, result, shipped)
    assert ([item.name for item in rehearsed], nothing) == (["rehearsal", "mine"], "")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("memory.bandwidth", True), ("benchmark.duration", True), ("drift.stress.throughput", True), ("gpu.count", False),
        ("launch.torch", False),
    ],
)  # fmt: skip
def test_benchmark_figures_are_distinguished_from_readings(name: str, expected: bool) -> None:
    assert from_benchmark(name) is expected


def test_full_bounded_cache_is_emptied_before_an_entry_is_added() -> None:
    cache: BoundedCache[int, int] = BoundedCache(3)
    for number in range(3):
        cache[number] = number
    assert dict(cache) == {0: 0, 1: 1, 2: 2}
    cache[3] = 3
    assert dict(cache) == {3: 3}


def test_bounded_cache_is_sent_to_another_process_without_its_entries() -> None:
    cache: BoundedCache[int, int] = BoundedCache(1)
    cache[1] = 1
    sent = copy.copy(cache)  # uses `__reduce__`, as pickle does
    sent[2], sent[3] = 2, 3
    assert dict(sent) == {3: 3}


def test_readings_are_found_by_name_in_each_snapshot_that_has_them() -> None:
    power, clock, of_bmc = (
        Metric(name=name, unit="1", values={"host": 1}) for name in ("a.power", "a.clock", f"{BMC}x")
    )
    first, second, last = (
        Snapshot(stage="benchmark", phase="before", at=at, duration_s=0.1, metrics=metrics)
        for at, metrics in (("1", (power, of_bmc)), ("2", (clock, power)), ("3", (of_bmc, clock)))
    )
    index = ReadingIndex([first, second], [last])
    assert dict(index) == {
        "a.power": [(first, power), (second, power)],
        "a.clock": [(second, clock)],
        of_bmc.name: [(last, of_bmc)],
    }
    assert "a.other" not in index
    assert index.get("a.other") is None


def test_unsupported_observation_is_not_a_measurement() -> None:
    unsupported_reading = reading(absent="unsupported: x", scope="gpu=1")
    evidence = evidence_with(snapshot(0, unsupported_reading), observations=(measure(status=UNSUPPORTED),))
    assert host_view(evidence).unmeasured_gpus == ["gpu=0", "gpu=1"]
