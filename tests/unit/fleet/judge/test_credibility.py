"""Impossible readings and figures are reported: a wrong unit, sign or source, or a value outside the bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fleet.judge.credibility import (
    impossible_readings,
    is_doubtful,
    most_of_figure,
    problem_of,
    problem_of_figure,
    unit_problem,
)
from fleet.judge.criteria import Criterion
from schemas.readings import READINGS
from schemas.records import Metric, Observation, Snapshot
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion


def problems(*metrics: Metric, is_bmc: bool = False) -> list[tuple[str, str, str, str]]:
    shot = Snapshot(stage="benchmark", phase="after", at="2026-11-21T04:00:00Z", duration_s=0.1, metrics=metrics)
    return list(impossible_readings(shot, is_bmc=is_bmc))


def reading(name: str, unit: str, value: Any, scope: str = "gpu=0") -> Metric:
    """Return a reading that has this value in `scope`, and the value None for GPU 9."""
    return Metric(name=name, unit=unit, values={scope: value, "gpu=9": None})


HIGH = "{:g} {} is not credible: the highest possible value is {:g}"
BOUNDS: list[tuple[str, str, Any, str]] = [
    ("gpu.temperature", "Cel", 150, ""),
    ("gpu.temperature", "Cel", 150.5, HIGH.format(150.5, "Cel", 150)),
    ("gpu.temperature", "Cel", 2, ""),
    ("gpu.temperature", "Cel", 1.9, "1.9 Cel is not credible: the lowest possible value is 2"),
    ("gpu.temperature", "Cel", 0, ""),  # a part without a sensor reports 0
    ("gpu.temperature", "Cel", False, ""),
    ("gpu.temperature_margin", "Cel", -150, ""),
    ("gpu.temperature_margin", "Cel", -151, "-151 Cel is not credible: the lowest possible value is -150"),
    ("gpu.power", "W", 20_000, ""),
    ("gpu.power", "W", 20_001, HIGH.format(20_001, "W", 20_000)),
    ("gpu.power", "W", 0.5, "0.5 W is not credible: the lowest possible value is 1"),
    ("gpu.utilization", "ratio", 2.55, ""),
    ("gpu.utilization", "ratio", 2.6, HIGH.format(2.6, "ratio", 2.55)),
    ("gpu.utilization", "ratio", -0.1, "-0.1 ratio is not credible: it cannot be negative"),
    ("gpu.pcie.replays", "1", 7, ""),
    ("gpu.pcie.replays", "1", 7.0, ""),
    ("gpu.pcie.replays", "1", -1, "-1 is not credible: it cannot be negative"),
    ("gpu.pcie.replays", "1", 7.5, "7.5 is not credible: it must be a whole number"),
    ("host.load", "1", 7.5, ""),
    ("network.mtu", "B", 68, ""),
    ("network.mtu", "B", 65536, ""),
    ("network.mtu", "B", 67, "67 B is not credible: the lowest possible value is 68"),
    ("network.mtu", "B", 65537, HIGH.format(65537, "B", 65536)),
    ("collector.duration", "s", 1.5, ""),
    ("collector.duration", "s", -1, "-1 s is not credible: it cannot be negative"),
    ("site.altitude", "m", -1, ""),  # a reading that is not in READINGS
]


@pytest.mark.parametrize(("name", "unit", "value", "reason"), BOUNDS)
def test_reading_must_be_within_its_own_bounds_or_those_of_its_unit(
    name: str, unit: str, value: Any, reason: str
) -> None:
    assert problems(reading(name, unit, value)) == ([(name, "gpu=0", reason, "benchmark")] if reason else [])
    # `problem_of` does not check for whole numbers, and takes a name that is not in READINGS for the name of a figure.
    if name in READINGS and "whole" not in reason and type(value) is not bool:
        item = Observation(name=name, scope="gpu=0", stage="benchmark", unit=unit, status="measured", value=value)
        assert problem_of({}, item) == reason


@pytest.mark.parametrize(
    ("name", "unit", "values", "expected"),
    [
        # Values at the bounds are possible. 0 °C is below the lower bound and therefore doubtful, but `impossible_readings`
        # accepts it: a part without a sensor reports 0.
        ("network.mtu", "B", [68, 65536], False), ("network.mtu", "B", [67], True), ("network.mtu", "B", [65537], True),
        ("network.mtu", "B", [67, 65537], True), ("gpu.temperature", "Cel", [0], True), ("gpu.temperature", "Cel", ["x"], False),
        ("gpu.pcie.replays", "1", [7, 7.0], False), ("gpu.pcie.replays", "1", [7, 7.5], True),
        ("gpu.utilization", "ratio", [0.5, 1], False), ("host.load", "1", [7.5], False),
        ("gpu.temperature", "K", [300], True), ("bmc.outlet.temperature", "Cel", [40], True),
    ],
)  # fmt: skip
def test_reading_is_doubtful_if_it_has_a_wrong_unit_or_a_wrong_source_or_an_impossible_value(
    name: str, unit: str, values: list[Any], expected: bool
) -> None:
    metric = Metric(name=name, unit=unit, values={f"gpu={at}": value for at, value in enumerate(values)})
    assert is_doubtful(metric) is expected


def test_bmc_reading_is_doubtful_in_a_host_record_and_host_reading_is_doubtful_in_a_bmc_record() -> None:
    of_bmc, of_host = reading("bmc.outlet.temperature", "Cel", 40), reading("gpu.power", "W", 300)
    assert [is_doubtful(metric, is_bmc=True) for metric in (of_bmc, of_host)] == [False, True]
    assert [is_doubtful(metric) for metric in (of_bmc, of_host)] == [True, False]


def test_only_the_given_doubtful_readings_are_checked() -> None:
    power, temperature = reading("gpu.power", "W", -1), reading("gpu.temperature", "Cel", -1)
    shot = Snapshot(stage="gang", phase="after", at="", duration_s=0.1, metrics=(power, temperature, power))
    # The snapshot has `gpu.power` twice. This duplicate is the first problem. It is reported whatever `doubtful` contains.
    twice = "gpu.power"
    for doubtful, names in (
        (None, [twice, "gpu.power", "gpu.temperature", "gpu.power"]),
        ({id(power)}, [twice, "gpu.power", "gpu.power"]),
        ({id(temperature)}, [twice, "gpu.temperature"]),
        (set[int](), [twice]),
    ):
        assert [name for name, *_ in impossible_readings(shot, doubtful=doubtful)] == names


def test_only_the_scopes_with_an_impossible_value_are_named() -> None:
    counts = {"gpu=0": 1.5, "gpu=1": 2.0, "gpu=2": 3, "gpu=3": "none", "gpu=4": 0.5}
    assert [scope for _, scope, *_ in problems(Metric(name="gpu.pcie.replays", unit="1", values=counts))] == [
        "gpu=0",
        "gpu=4",
    ]
    watts = {"gpu=0": 1e9, "gpu=1": 300, "gpu=2": 0, "gpu=3": True, "gpu=4": 0.1}
    assert [scope for _, scope, *_ in problems(Metric(name="gpu.power", unit="W", values=watts))] == ["gpu=0", "gpu=4"]


@pytest.mark.parametrize(
    ("name", "unit", "right"),
    [("gpu.power", "mW", "W"), ("collector.duration", "ms", "s")],
)
def test_wrong_unit_is_reported_once_for_all_values_of_a_reading(name: str, unit: str, right: str) -> None:
    reason = f"has the unit {unit}, but this reading is in {right}"
    assert problems(reading(name, unit, -1.5)) == [(name, "host", reason, "benchmark")]


def test_reading_that_a_snapshot_has_twice_is_named() -> None:
    once, twice = reading("gpu.power", "W", 300), reading("gpu.utilization", "ratio", 0.5)
    assert problems(once, twice, twice) == [
        ("gpu.utilization", "host", "read 2 times in the snapshot after benchmark", "benchmark")
    ]
    assert problems(once, twice) == []


def test_reading_in_the_record_of_the_wrong_source_is_reported() -> None:
    of_bmc, of_host = reading("bmc.outlet.temperature", "Cel", 40), reading("gpu.power", "W", 300)
    host, bmc = problems(of_bmc, of_host), problems(of_bmc, of_host, is_bmc=True)
    only = "the record of the host has this reading, but only the control node reads the BMC"
    assert host == [("bmc.outlet.temperature", "host", only, "benchmark")]
    assert bmc == [
        ("gpu.power", "host", "the record of the BMC has this reading, which is not one of a BMC", "benchmark")
    ]


def compared(id: str, name: str, unit: str, expected: float, datasheet: str = "", **fields: Any) -> Criterion:
    """Return a criterion whose floor is 0.5 times `expected`.

    `datasheet`: the figure of the datasheet that gives `expected`; empty: `expected` is not from the datasheet.
    """
    return criterion(
        name, id=id, unit=unit, operator="ge", expected=expected, fraction=0.5, datasheet=datasheet, **fields
    )


COMPARED = (
    compared("gemm", "gemm.throughput", "FLOP/s", 1e15, "flops", where={"dtype": "bf16"}),
    compared("fp32", "gemm.throughput", "FLOP/s", 5e13, "flops", where={"dtype": "fp32"}),
    compared("nvlink", "peer_copy.bandwidth", "B/s", 4e11, "nvlink", scope="peer"),
    compared("pcie", "peer_copy.bandwidth", "B/s", 6e10, "pcie", scope="peer"),
    compared("memory", "memory.bandwidth", "B/s", 4e12, "memory_bandwidth", where={"size_bytes": 1 << 30}),
    compared("measured", "variants.throughput", "1/s", 1.0),
)
CRITERIA: Mapping[str, Criterion] = {item.id: item for item in COMPARED}


def figure(name: str, value: Any, scope: str = "gpu=0", unit: str = "", **params: Any) -> Observation:
    return builders.observation(name, value, scope=scope, unit=unit, **params)


def over(value: float, unit: str, peak: float) -> str:
    """Return the reason why a value far above the datasheet is not credible."""
    return f"{value:g} {unit} is not credible: it is more than 3 times the rate in the datasheet of the part ({peak:g} {unit})"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (figure("gemm.throughput", 3e15, dtype="bf16"), ""),
        (figure("gemm.throughput", 3.1e15, dtype="bf16"), over(3.1e15, "FLOP/s", 1e15)),
        (figure("gemm.throughput", 3.1e15, dtype="fp8"), ""),  # COMPARED has no datasheet figure for fp8
        (figure("gemm.throughput", 2e14, dtype="fp32"), over(2e14, "FLOP/s", 5e13)),
        # fp64 may be emulated with fp32, so it may be as fast as fp32. COMPARED has no datasheet figure for fp64.
        (figure("gemm.throughput", 1.4e14, dtype="fp64"), ""),
        (figure("gemm.throughput", 2e14, dtype="fp64"), over(2e14, "FLOP/s", 5e13)),
        (figure("gemm.throughput", 2e18, dtype="fp8"), HIGH.format(2e18, "FLOP/s", 1e18)),
        (figure("gemm.throughput", 2e18, dtype="fp8", world_size=4096), HIGH.format(2e18, "FLOP/s", 1e18)),
        # `transformer.flops` is the sum over all ranks, so its highest possible value is world_size * 1e18 FLOP/s.
        (figure("transformer.flops", 1.8e18, "gang=all", world_size=4096), ""),
        (figure("transformer.flops", 3e18, "gang=all", world_size=2), HIGH.format(3e18, "FLOP/s", 2e18)),
        (figure("gemm.throughput", -1.0, dtype="fp8"), "-1 FLOP/s is not credible: it cannot be negative"),
        (figure("peer_copy.bandwidth", 1.2e12, "gpu=0,peer=1"), ""),
        (figure("peer_copy.bandwidth", 1.3e12, "gpu=0,peer=1"), over(1.3e12, "B/s", 4e11)),
        (figure("memory.bandwidth", 1.3e13, size_bytes=1 << 28), over(1.3e13, "B/s", 4e12)),
        (figure("memory.bandwidth", 1.3e13, size_bytes=(1 << 28) - 1), ""),  # so few bytes may be in the cache
        (figure("memory.bandwidth", 1.3e13), over(1.3e13, "B/s", 4e12)),
        (figure("variants.throughput", 1e6), ""),
        (figure("integrity.tested_share", 1.0), ""),
        (figure("integrity.tested_share", 1.1), "1.1 is not credible: the highest possible value is 1"),
        (figure("stress.power", 20_001.0), HIGH.format(20_001, "W", 20_000)),
        (figure("stress.temperature", 1.0), ""),
    ],
)
def test_figure_must_be_within_its_bounds_and_at_most_three_times_its_datasheet_rate(
    item: Observation, reason: str
) -> None:
    assert problem_of_figure(CRITERIA, item) == reason
    assert problem_of(CRITERIA, item) == reason
    assert (isinstance(item.value, float) and 0 <= item.value <= most_of_figure(CRITERIA, item)) is not bool(reason)


@pytest.mark.parametrize("value", ["fast", True])
def test_unit_and_amount_of_a_value_that_is_not_a_number_are_not_checked(value: Any) -> None:
    assert problem_of(CRITERIA, figure("gemm.throughput", value, unit="GFLOP/s")) == ""


def test_wrong_unit_of_a_figure_is_named() -> None:
    reason = "has the unit GB/s, but this figure is in B/s"
    assert unit_problem("memory.bandwidth", "GB/s") == reason
    assert unit_problem("memory.bandwidth", "B/s") == ""
    assert unit_problem("site.figure", "furlong") == ""
    assert problem_of(CRITERIA, figure("memory.bandwidth", 4e3, unit="GB/s")) == reason
    assert problem_of(CRITERIA, figure("memory.bandwidth", 4e12)) == ""
