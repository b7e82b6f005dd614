"""Test the detection power of floors: noise, false alarms and the command `power`.

A floor is a lower limit. Its detection power is the smallest slowdown that it detects with a probability of 99 %.

`test_power_edges.py` tests which values, groups and floors are included.
"""

from __future__ import annotations

import json
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import pytest

from fleet.judge.criteria import Criterion, Pack, read_packs
from fleet.judge.power import Gate, Power, Run, mad_sigma, power, robust_sigma
from fleet.report.power import render_power
from rackproof.main import main
from schemas import documents
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.records import Observation, Samples, to_json
from tests import builders

PACKS = read_packs([])
FLOOR = 7.0e14
FLOOR_PACK = Pack(
    name="mine",
    gpu_names=(),
    chosen=True,
    criteria=(
        Criterion(
            id="floor",
            name="gemm.throughput",
            operator="ge",
            unit="FLOP/s",
            action="rma",
            source="a test's own",
            scope="gpu",
            where={"dtype": "bf16"},
            value=FLOOR,
        ),
    ),
)

Rate = Callable[[int, str, str], float]
"""(run, host, scope) -> FLOP/s."""


def runs(rate: Rate, count: int = 3, hosts: Sequence[str] = ("h1",), gpu_count: int = 4) -> list[Run]:
    """Return `count` runs of a healthy fleet whose bf16 GEMM rates come from `rate`."""
    result = []
    for number in range(count):
        plan = builders.plan(*hosts, gpu_count=gpu_count, profile="smoke", rackproof_gang="none")
        plan = replace(plan, run_id=f"r{number}", nonce=f"{number:032x}")
        evidence = builders.evidence(plan)
        for host in evidence:
            evidence[host] = builders.with_observations(evidence[host], with_rates(rate, number, host))
        result.append((plan, evidence))
    return result


def with_rates(rate: Rate, number: int, host: str) -> Callable[[Observation], Observation]:
    """Return a change that takes the bf16 GEMM rates of one host in one run from `rate`."""

    def change(observation: Observation) -> Observation:
        hit = observation.name == "gemm.throughput" and observation.params["dtype"] == "bf16"
        return replace(observation, value=rate(number, host, observation.scope)) if hit else observation

    return change


def gate_of(detection: Power, criterion: str = "floor") -> Gate:
    return next(item for item in detection.gates if item.criterion == criterion)


def test_without_noise_every_slowdown_to_below_the_floor_is_detected() -> None:
    gate = gate_of(power(runs(lambda number, host, scope: 8e14), [*PACKS, FLOOR_PACK]))
    assert (gate.n, gate.parts, gate.mean, gate.sigma, gate.limit) == (12, 4, 8e14, 0.0, FLOOR)
    assert gate.false_alarm == 0.0
    assert gate.finds == pytest.approx(1 / 8)
    assert gate.could_find == 0.0


def test_run_to_run_noise_causes_false_alarms_and_hides_slowdowns() -> None:
    """Runs at 790, 800 and 810 TFLOP/s: the median absolute deviation is 10 TFLOP/s.

    Sigma is 10 TFLOP/s x 1.4826 x 1.495. The first factor converts the median absolute deviation of a normal distribution to its
    standard deviation. The second one corrects the bias of an estimate from three values.
    """
    detection = power(runs(lambda number, host, scope: (7.9e14, 8.0e14, 8.1e14)[number]), [*PACKS, FLOOR_PACK])
    gate, sigma = gate_of(detection), 1e13 * 1.4826 * 1.495
    assert (gate.run_sigma, gate.part_sigma) == (pytest.approx(sigma), 0.0)
    assert gate.false_alarm == pytest.approx(NormalDist(8e14, sigma).cdf(FLOOR))
    # Quantiles of the standard normal distribution: 2.3263 for 99 %, and 3.0902 for 99.9 %.
    assert gate.finds == pytest.approx(1 - (FLOOR - 2.3263 * sigma) / 8e14, rel=1e-4)
    assert gate.could_find == pytest.approx((3.0902 + 2.3263) * sigma / 8e14, rel=1e-4)


def test_smallest_detectable_slowdown_is_detected_with_a_probability_of_99_percent() -> None:
    gate = gate_of(power(runs(lambda number, host, scope: (7.9e14, 8.0e14, 8.1e14)[number]), [*PACKS, FLOOR_PACK]))
    assert gate.finds is not None
    assert NormalDist(gate.mean * (1 - gate.finds), gate.sigma).cdf(gate.limit) == pytest.approx(0.99)
    best_floor = gate.mean - NormalDist().inv_cdf(0.999) * gate.sigma
    assert NormalDist(gate.mean * (1 - gate.could_find), gate.sigma).cdf(best_floor) == pytest.approx(0.99)


def test_spread_between_parts_raises_the_probability_of_false_alarms() -> None:
    """Each GPU has the same rate in every run, but the rates of the four GPUs differ."""
    rates = {"gpu=0": 7.6e14, "gpu=1": 7.8e14, "gpu=2": 8.2e14, "gpu=3": 8.4e14}
    gate = gate_of(power(runs(lambda number, host, scope: rates[scope]), [*PACKS, FLOOR_PACK]))
    assert gate.run_sigma == 0.0
    assert gate.part_sigma == pytest.approx(3e13 * 1.4826 * 1.363)
    assert gate.sigma == gate.part_sigma
    assert 0.01 < gate.false_alarm < 0.1


def test_floor_above_the_rates_of_all_healthy_parts_fails_them_all() -> None:
    gate = gate_of(power(runs(lambda number, host, scope: 6e14), [*PACKS, FLOOR_PACK]))
    assert (gate.false_alarm, gate.finds) == (1.0, 0.0)


def test_floor_detects_no_slowdown_if_healthy_rates_scatter_too_much() -> None:
    noisy = runs(lambda number, host, scope: (2e14, 8e14, 14e14)[number])
    low = replace(FLOOR_PACK, criteria=(replace(FLOOR_PACK.criteria[0], value=1e14),))
    gate = gate_of(power(noisy, [*PACKS, low]))
    assert gate.finds is None
    assert "nothing" in render_power(power(noisy, [*PACKS, low]))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 20])
def test_robust_sigma_is_unbiased_and_ignores_one_outlier_among_eight_or_more_values(count: int) -> None:
    draw = random.Random(count)  # noqa: S311 - not used for security
    samples = [[draw.gauss(100, 2) for _ in range(count)] for _ in range(4000)]
    assert statistics.fmean(map(robust_sigma, samples)) == pytest.approx(2.0, rel=0.06)
    if count >= 8:
        assert robust_sigma([*samples[0][1:], 1e9]) < 10


def test_noise_is_computed_from_judged_values_and_not_from_medians_of_samples() -> None:
    """The judged value of a figure may differ from the median of its samples: for example, `stress.power` is a mean."""
    repeated_runs = runs(lambda number, host, scope: 8e14)
    for number, (_, evidence) in enumerate(repeated_runs):

        def change(observation: Observation, number: int = number) -> Observation:
            samples = Samples(n=9, min=5e11, p50=5e11 * (1 + number), max=9e12, cv=0.0)
            hit = observation.name == "memory.bandwidth" and observation.scope == "gpu=1"
            return replace(observation, samples=samples, value=(9e11, 1e12, 1.1e12)[number]) if hit else observation

        evidence["h1"] = builders.with_observations(evidence["h1"], change)
    worst = power(repeated_runs, PACKS).worst["HBM"]
    assert (worst.worst, worst.where, worst.parts) == (pytest.approx(0.2), "h1 gpu=1 h1-1", 4)


@pytest.mark.parametrize(
    ("values", "sigma"),
    [
        (
            [100.0, 100.1, 80.0],
            13.0,
        ),  # the standard deviation: one slow run of three hardly changes the median absolute deviation
        ([100.0, 100.0, 100.0, 90.0], 5.4),
        ([79.0, 80.0, 81.0], 2.2),  # the median absolute deviation, which gives a larger sigma here
        ([100.0, 100.0], 0.0),
        ([100.0], 0.0),
    ],
)
def test_sigma_of_few_values_is_not_underestimated(values: list[float], sigma: float) -> None:
    assert mad_sigma(values) == pytest.approx(sigma, rel=0.02)
    assert mad_sigma(values) >= robust_sigma(values)


def test_one_slow_run_of_three_raises_the_probability_of_false_alarms() -> None:
    detection = power(runs(lambda number, host, scope: (8.0e14, 8.01e14, 6.4e14)[number]), [*PACKS, FLOOR_PACK])
    gate = gate_of(detection)
    assert gate.run_sigma > 9e13
    assert gate.false_alarm > 0.05
    assert "the standard deviation replaces this estimate if it is larger" in render_power(detection)


def test_one_outlier_of_many_does_not_change_sigma() -> None:
    values = [100.0, 100.1, 99.9, 100.2, 99.8, 50.0]
    assert mad_sigma(values) == robust_sigma(values) < 1


def test_each_group_has_only_its_own_figures() -> None:
    detection = power(runs(lambda number, host, scope: 8e14), PACKS)
    assert {item.name for item in detection.repeats if item.group == "sustained GEMM"} == {"stress.throughput"}
    assert {item.name for item in detection.repeats if item.group == "HBM"} == {"memory.bandwidth"}
    copies = [item for item in detection.repeats if item.group == "copies"]
    assert {item.name for item in copies} == {"host_copy.bandwidth", "peer_copy.bandwidth"}
    assert {item.params.get("sharing", "alone") for item in copies} == {"alone"}
    large = [item for item in detection.repeats if item.group.startswith("collectives")]
    assert large
    assert all(item.params["size_bytes"] >= 64 << 20 for item in large)  # type: ignore[operator]


def test_all_hosts_of_a_gang_are_one_part() -> None:
    """A gang is the hosts of one multi-node launch. All of them report the same figures, those of the whole gang."""
    repeated_runs = []
    for number in range(3):
        plan = replace(builders.plan(profile="smoke", rackproof_fabric_gbps=400), nonce=f"{number:032x}")
        repeated_runs.append((plan, builders.evidence(plan)))
    gang = [
        item for item in power(repeated_runs, PACKS).repeats if item.stage == "gang" and item.name.endswith("busbw")
    ]
    assert {item.parts for item in gang} == {1}


def test_gpu_that_replaced_another_is_a_part_of_its_own() -> None:
    repeated_runs = runs(lambda number, host, scope: 8e14)
    plan, evidence = repeated_runs[2]
    swapped = tuple(
        replace(record, gpus=(replace(record.gpus[0], serial="new"), *record.gpus[1:]))
        for record in evidence["h1"].records
    )
    repeated_runs[2] = (plan, {"h1": replace(evidence["h1"], records=swapped)})
    assert gate_of(power(repeated_runs, [*PACKS, FLOOR_PACK])).parts == 3, (
        "neither the old nor the new GPU has three runs"
    )


def test_fewer_than_three_runs_are_refused() -> None:
    with pytest.raises(UsageError, match="2 runs: noise cannot be estimated from fewer than 3 runs"):
        power(runs(lambda number, host, scope: 8e14, count=2), PACKS)


def test_run_that_is_given_twice_is_refused() -> None:
    repeated_runs = runs(lambda number, host, scope: 8e14)
    with pytest.raises(UsageError, match="run r0 is given twice"):
        power([repeated_runs[0], repeated_runs[0], repeated_runs[1]], PACKS)


def test_runs_of_different_hosts_are_refused() -> None:
    repeated_runs = runs(lambda number, host, scope: 8e14)
    other = runs(lambda number, host, scope: 8e14, hosts=("h2",))
    with pytest.raises(UsageError, match="runs r0 and r2 have different hosts"):
        power([*repeated_runs[:2], other[2]], PACKS)
    with pytest.raises(UsageError, match="runs r0 and r1 have different hosts"):
        power([other[0], *repeated_runs[1:]], PACKS)


def write_run(directory: Path, run: Run) -> Path:
    """Write a run directory. Return its path."""
    plan: Plan = run[0]
    documents.write(directory / "plan.json", to_json(plan))
    for host, evidence in run[1].items():
        documents.write(directory / "hosts" / f"{host}.json", to_json(evidence.records[0]))
    return directory


def run_command(*arguments: str | Path) -> int:
    return main(["power", *map(str, arguments)])


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    """Write three runs of a healthy fleet. Return their directories."""
    draw = random.Random(1)  # noqa: S311 - not used for security
    paths = []
    for number, (plan, evidence) in enumerate(runs(lambda number, host, scope: 8e14 + draw.gauss(0, 5e12))):
        named = {
            host: replace(
                host_evidence,
                records=tuple(replace(item, run_id=plan.run_id, nonce=plan.nonce) for item in host_evidence.records),
            )
            for host, host_evidence in evidence.items()
        }
        paths.append(write_run(tmp_path / f"r{number}", (plan, named)))
    return paths


def test_command_prints_tables_by_default(directories: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*directories) == 0
    output = capsys.readouterr().out
    assert "3 runs: r0, r1, r2" in output
    lines = [line for line in output.splitlines() if "gemm-bf16 " in line and line.startswith("gemm.throughput")]
    assert len(lines) == 1
    assert re.match(r"gemm.throughput +bf16", lines[0])
    assert "TFLOP/s" in lines[0]
    assert "A normal distribution is assumed" in output
    assert "sustained GEMM" in output


def test_command_prints_json(directories: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*directories, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    gate = next(item for item in document["gates"] if item["criterion"] == "gemm-bf16")
    assert gate["n"] == 12
    assert 0 < gate["could_find"] < gate["finds"] < 0.2
    assert set(document["worst"]) == {"sustained GEMM", "copies", "HBM", "collectives of 64 MiB and more"}


def test_command_exits_64_with_too_few_runs(directories: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*directories[:2]) == 64
    assert "too few run directories (2): noise cannot be estimated from fewer than 3 runs" in capsys.readouterr().err
