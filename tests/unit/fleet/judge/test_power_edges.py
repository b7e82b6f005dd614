"""Boundary cases of detection power: which values, groups and floors are included.

A floor is a lower limit. Its detection power is the smallest slowdown that it detects with a probability of 99 %. A gate is a
floor that a criterion sets for one figure, together with the detection power of this floor.

In these tests a run has one or two figures; `test_power.py` tests full plans and the command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import Evidence
from fleet.judge.power import LARGE_MESSAGE, Power, power, robust_sigma
from schemas.records import Metric, Observation
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading

PLAN = one_figure_plan("h1", "h2")
NAMES = ("h1", "h2")
FLOOR = criterion("memory.bandwidth", operator="ge", value=90.0, unit="B/s")


def figure(
    value: Any, name: str = "memory.bandwidth", scope: str = "gpu=0", stage: str = "benchmark", **params: Any
) -> Observation:
    return builders.observation(name, value, scope=scope, stage=stage, **params)


def power_of_runs(
    observe: Callable[[int, str], Sequence[Observation]],
    *criteria: Criterion,
    metrics: Sequence[Metric] = (),
    **over: Any,
) -> Power:
    """Return the detection power of three runs.

    Args:
        observe: (number of the run, host) -> observations of the host in this run.
        criteria: the criteria of the only pack; without criteria, it has FLOOR.
        metrics: readings of every host.
        over: other fields of every record.
    """
    runs = []
    for number in range(3):
        plan = replace(PLAN, run_id=f"r{number}", nonce=f"{number:032x}", expected=())
        evidence = {
            name: host_evidence(plan, name, *metrics, observations=tuple(observe(number, name)), **over)
            for name in NAMES
        }
        runs.append((plan, evidence))
    return power(runs, [pack(*(criteria or (FLOOR,)))])


def test_gate_is_described_in_full() -> None:
    detection = power_of_runs(lambda number, host: [figure((99.0, 100.0, 101.0)[number], op="copy")])
    (gate,) = detection.gates
    assert (gate.criterion, gate.name, gate.stage, gate.params, gate.unit) == (
        "c",
        "memory.bandwidth",
        "benchmark",
        {"op": "copy"},
        "B/s",
    )
    assert (gate.n, gate.parts, gate.mean, gate.part_sigma, gate.limit) == (6, 2, 100.0, 0.0, 90.0)
    assert gate.run_sigma == pytest.approx(1.4826 * 1.495)
    (repeat,) = detection.repeats
    assert (repeat.name, repeat.stage, repeat.params, repeat.group) == (
        "memory.bandwidth",
        "benchmark",
        {"op": "copy"},
        "HBM",
    )
    assert (repeat.parts, repeat.worst) == (2, pytest.approx(0.02))
    assert repeat.where in ("h1 gpu=0 h1-0", "h2 gpu=0 h2-0")
    assert (detection.runs, detection.left_out) == (("r0", "r1", "r2"), ())
    assert detection.worst == {"HBM": repeat}


def test_least_repeatable_part_and_figure_are_named() -> None:
    def observations(number: int, host: str) -> list[Observation]:
        drift = number * (2.0 if host == "h2" else 1.0)
        return [figure(100.0 + drift, op="copy"), figure(100.0 + 3 * drift, op="read")]

    detection = power_of_runs(observations)
    assert [(item.params["op"], item.where) for item in detection.repeats] == [
        ("copy", "h2 gpu=0 h2-0"),
        ("read", "h2 gpu=0 h2-0"),
    ]
    assert detection.worst["HBM"].params == {"op": "read"}


@pytest.mark.parametrize(
    ("name", "params", "group"),
    [
        ("stress.throughput", {}, "sustained GEMM"), ("memory.bandwidth", {}, "HBM"), ("peer_copy.bandwidth", {}, "copies"),
        ("host_copy.bandwidth", {"sharing": "alone"}, "copies"), ("host_copy.bandwidth", {"sharing": "all_gpus"}, ""),
        ("host_copy.bandwidth", {"sharing": "alone", "numa": "local"}, "copies"), ("gemm.throughput", {}, ""),
        ("host_copy.bandwidth", {"sharing": "alone", "numa": "remote"}, ""), ("host_copy.bandwidth", {}, ""),
        ("collective.all_reduce.busbw", {"size_bytes": LARGE_MESSAGE}, "collectives of 64 MiB and more"),
        ("collective.all_reduce.busbw", {"size_bytes": LARGE_MESSAGE - 1}, ""), ("collective.all_reduce.busbw", {}, ""),
        ("collective.all_reduce.algbw", {"size_bytes": LARGE_MESSAGE}, ""), ("overlap.busbw", {"size_bytes": LARGE_MESSAGE}, ""),
    ],
)  # fmt: skip
def test_figure_belongs_to_a_group_by_its_name_and_settings(name: str, params: Any, group: str) -> None:
    (repeat,) = power_of_runs(lambda number, host: [figure(100.0 + number, name, **params)]).repeats
    assert repeat.group == group


@pytest.mark.parametrize("value", [0.0, -1.0, True, "x", float("nan")])
def test_value_that_is_not_a_positive_number_is_ignored(value: Any) -> None:
    detection = power_of_runs(lambda number, host: [figure(100.0 if host == "h1" else value)])
    assert [item.parts for item in detection.repeats] == [1]
    assert [item.parts for item in power_of_runs(lambda number, host: [figure(0.5)]).repeats] == [2]


@pytest.mark.parametrize(
    ("over", "gates"),
    [
        ({}, 1), ({"operator": "gt"}, 1), ({"operator": "le"}, 0), ({"operator": "eq"}, 0),
        ({"value": True, "operator": "eq"}, 0),
        ({"value": 200.0}, 1), ({"value": None, "fleet_fraction": 0.9}, 0),  # two GPUs are too few for a fleet median
    ],
)  # fmt: skip
def test_only_floors_of_benchmarks_are_gates(over: Any, gates: int) -> None:
    assert len(power_of_runs(lambda number, host: [figure(100.0)], replace(FLOOR, **over)).gates) == gates


def test_floor_of_a_reading_is_not_a_gate() -> None:
    floor = criterion("gpu.thing", operator="ge", value=1)
    detection = power_of_runs(lambda number, host: [figure(100.0)], floor, metrics=[reading(5)])
    assert (detection.gates, detection.left_out) == ((), ())


def test_figure_with_too_few_runs_is_left_out() -> None:
    detection = power_of_runs(lambda number, host: [figure(100.0)] if number else [])
    assert (detection.gates, detection.repeats, detection.worst) == ((), (), {})
    assert detection.left_out == ("memory.bandwidth (c)",)
    without_h2_in_one_run = power_of_runs(lambda number, host: [figure(100.0)] if number or host == "h1" else [])
    assert [(gate.parts, gate.n) for gate in without_h2_in_one_run.gates] == [(1, 3)]


def test_gang_is_one_part_and_a_gpu_may_have_no_serial() -> None:
    shared = power_of_runs(lambda number, host: [figure(100.0, scope="gang=g")], replace(FLOOR, scope="gang"))
    assert [(gate.parts, gate.n) for gate in shared.gates] == [(1, 3)], "both hosts report the same figure"
    assert shared.repeats[0].where == "gang=g"
    without_serial = power_of_runs(lambda number, host: [figure(100.0)], gpus=())
    assert without_serial.repeats[0].where == "h1 gpu=0"


def test_robust_sigma_is_corrected_for_the_number_of_values() -> None:
    assert robust_sigma([]) == robust_sigma([5.0]) == 0.0
    assert robust_sigma([1.0, 3.0]) == pytest.approx(1.4826 * 1.196)
    assert robust_sigma([1.0] * 4 + [3.0] * 6) == pytest.approx(0.0)
    assert robust_sigma([float(number) for number in range(10)]) == pytest.approx(1.4826 * 10 / 9.2 * 2.5)


def test_host_without_evidence_is_not_counted() -> None:
    runs = []
    for number in range(3):
        plan = replace(PLAN, run_id=f"r{number}", nonce=f"{number:032x}", expected=())
        runs.append((plan, {"h1": host_evidence(plan, "h1", observations=(figure(100.0),)), "h2": Evidence()}))
    assert [gate.parts for gate in power(runs, [pack(FLOOR)]).gates] == [1]
