"""Test which faults a criterion detects.

For a figure that varies, the result is the smallest fault that is found with a probability of 99 %. A criterion on a count or a
state finds any value beyond the limit, whatever the spread of the healthy values: "found by logic" (LOGIC).
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import Criterion, read_packs
from fleet.judge.detection import (
    ABSOLUTE,
    LOGIC,
    MIN_PARTS,
    RELATIVE,
    Detection,
    GateKey,
    Run,
    _fault,
    detection,
    settings_text,
)
from fleet.judge.student import t_cdf, t_quantile
from fleet.report.detection import fault_text, render_detection, rows
from fleet.report.detection_logic import logic_false_alarms, logic_groups, not_judged, unmeasured
from rackproof.main import main
from schemas import documents
from schemas.records import MEASURED, Observation, to_json
from tests import builders

PACKS = read_packs([])
Change = Callable[[int, Observation], Observation]


def runs(change: Change = lambda number, item: item, count: int = 3, gpus: int = 4, prefix: str = "h") -> list[Run]:
    """Return `count` runs of one healthy host each: the host of run 1 is h1 (`prefix` and number).

    `change(number, figure)` returns the figure to use in the run with this number.
    """
    result: list[Run] = []
    for number in range(count):
        plan = builders.plan(f"{prefix}{number}", gpu_count=gpus, profile="standard", rackproof_gang="none")
        plan = replace(plan, run_id=f"r{number}", nonce=f"{number:032x}")
        evidence = builders.evidence(plan)
        for host in evidence:
            evidence[host] = builders.with_observations(
                evidence[host], lambda item, number=number: change(number, item)
            )
        result.append((plan, evidence))
    return result


def of(detections: Sequence[Detection], criterion: str, **params: Any) -> Detection:
    """Return the only detection of this criterion with these parameters."""
    (item,) = [
        item
        for item in detections
        if item.key.criterion == criterion and params.items() <= dict(item.key.params).items()
    ]
    return item


def spread(name: str, base: float, sigma: float, **params: Any) -> Change:
    """Return a change that draws the values of a figure from a normal distribution with mean `base` and deviation `sigma`."""
    draw = random.Random(7)  # noqa: S311 - not used for security

    def change(number: int, item: Observation) -> Observation:
        hit = item.name == name and item.status == MEASURED and params.items() <= item.params.items()
        return replace(item, value=draw.gauss(base, sigma)) if hit else item

    return change


@pytest.fixture(scope="module")
def healthy() -> list[Detection]:
    """Return the detections from healthy runs."""
    return detection(runs(), PACKS)


# --- Student's t


@pytest.mark.parametrize(
    ("probability", "freedom", "t"),
    [
        (0.99, 1, 31.821),
        (0.99, 4, 3.747),
        (0.999, 2, 22.327),
        (0.999, 10, 4.144),
        (0.975, 30, 2.042),
        (0.99, 1e5, 2.326),
        (0.5, 3, 0.0),
    ],
)
def test_quantiles_are_those_of_published_tables_of_students_t(probability: float, freedom: float, t: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(t, rel=3e-4, abs=1e-6)
    assert t_cdf(t, freedom) == pytest.approx(probability, abs=2e-5)
    assert t_cdf(-t, freedom) == pytest.approx(1 - probability, abs=2e-5)


@pytest.mark.parametrize("freedom", [2, 2.5, 10, 200])
def test_probability_stays_between_0_and_1(freedom: float) -> None:
    """Simpson's rule alone gives slightly more than 1 for these degrees of freedom."""
    assert (t_cdf(1e9, freedom), t_cdf(-1e9, freedom)) == (1.0, 0.0)


# --- figures that vary


@pytest.mark.parametrize(("parts", "repeats"), [(3, 1), (5, 1), (8, 1), (6, 3)])
@pytest.mark.parametrize("operator", ["ge", "le"])
def test_stated_fault_is_found_and_false_alarms_are_not_more_frequent_than_stated(
    parts: int, repeats: int, operator: str
) -> None:
    """The limit is 1. The mean of healthy values is 1.05 for a floor (`ge`) and 0.95 for a ceiling (`le`).

    The standard deviation is 0.01 between parts, and 0.005 between the runs of a part. The fault is
    stated so that 99 % of many parts with exactly this fault fail.
    """
    draw = random.Random(parts)  # noqa: S311 - not used for security
    sign = 1 if operator == "ge" else -1
    missed, failed, alarms = [], [], []

    def values(mean: float) -> list[float]:
        part = draw.gauss(mean, 0.01)
        return [part + draw.gauss(0, 0.005) for _ in range(repeats)]

    for _ in range(1500 if repeats == 1 else 500):
        healthy = [values(1 + sign * 0.05) for _ in range(parts)]
        fault, alarm, _ = _fault(healthy, operator, RELATIVE)
        observed = statistics.fmean(map(statistics.fmean, healthy))
        faulty = values(1 + sign * 0.05)[0] - sign * fault * observed
        further = values(1 + sign * 0.05)[0]
        missed.append(faulty >= 1 if operator == "ge" else faulty <= 1)
        failed.append(further < 1 if operator == "ge" else further > 1)
        alarms.append(alarm)
    assert statistics.fmean(missed) == pytest.approx(0.01, abs=0.009)
    assert statistics.fmean(failed) <= statistics.fmean(alarms) < 0.05


def test_few_parts_cause_more_false_alarms_than_many_parts_with_the_same_spread() -> None:
    few = [[1.04], [1.05], [1.06]]
    many = few * 5
    assert _fault(few, "ge", RELATIVE)[1] > 10 * _fault(many, "ge", RELATIVE)[1]
    assert _fault(few, "ge", RELATIVE)[0] > _fault(many, "ge", RELATIVE)[0]


def test_repeated_runs_of_a_part_count_as_one_part() -> None:
    once, five_times = [[1.04], [1.05], [1.06]], [[1.04] * 5, [1.05] * 5, [1.06] * 5]
    assert _fault(five_times, "ge", RELATIVE) == pytest.approx(_fault(once, "ge", RELATIVE))


def test_smallest_fault_that_a_criterion_finds_follows_from_the_spread_of_its_figure() -> None:
    result = detection(runs(spread("memory.bandwidth", 4.4e12, 2e10, op="copy")), PACKS)
    item = of(result, "hbm-copy", op="copy")
    assert (item.kind, item.parts, item.values, item.failed, item.key.model) == (RELATIVE, 12, 12, 0, "h200-sxm")
    floor = float(item.limit)  # type: ignore[arg-type]
    # 2.72 is the 0.99 quantile of Student's t distribution with 11 degrees of freedom, for 12 parts.
    assert item.fault == pytest.approx((4.4e12 - floor + 2.72 * 2e10) / 4.4e12, rel=0.2)
    assert item.is_reliable
    assert json.loads(item.key.settings)["ops"] == ["copy", "read", "write", "triad"]


def test_fault_that_an_upper_limit_finds_is_an_increase() -> None:
    latency = of(detection(runs(spread("peer_copy.latency", 1.2e-5, 1e-7)), PACKS), "peer-latency")
    assert latency.kind == RELATIVE
    assert fault_text(latency).endswith("times as much")
    assert latency.fault == pytest.approx(6e-5 / 1.2e-5 - 1, rel=0.05)
    heat = of(detection(runs(spread("stress.temperature", 70.0, 1.0, dtype="bf16")), PACKS), "stress-temperature")
    assert heat.kind == ABSOLUTE
    assert heat.fault == pytest.approx(20, abs=5)
    assert fault_text(heat).endswith("°C more")


def test_same_gpu_in_two_runs_is_one_part() -> None:
    first, _, third = runs(spread("memory.bandwidth", 4.4e12, 2e10))
    again = (replace(first[0], run_id="again", nonce="f" * 32), first[1])
    item = of(detection([first, again, third], PACKS), "hbm-copy", op="copy")
    assert (item.parts, item.values) == (8, 12)


def test_detectable_fault_is_not_stated_for_too_few_parts() -> None:
    result = detection(runs(spread("memory.bandwidth", 4.4e12, 2e10), count=1, gpus=2), PACKS)
    item = of(result, "hbm-copy", op="copy")
    assert MIN_PARTS > item.parts == 2
    assert (item.is_stated, item.is_reliable, item.fault) == (False, False, None)
    (row,) = [row for row in rows(result, {}) if row.criterion == "hbm-copy"]
    assert row.cells == {"h200-sxm": "too few: 2"}


def test_high_false_alarm_rate_is_stated_in_the_cell_of_the_table() -> None:
    result = detection(runs(spread("stress.temperature", 80.0, 4.0, dtype="bf16")), PACKS)
    (row,) = [row for row in rows(result, {}) if row.criterion == "stress-temperature"]
    assert "; false alarms " in row.cells["h200-sxm"]


# --- found by logic


@pytest.mark.parametrize(
    ("criterion", "title", "limit"),
    [
        ("integrity-wrong-words", "any value other", "0"),
        ("digest-mismatches", "any value other", "0"),
        ("checkpoint-identical", "any value other", "yes"),
        ("pcie-replay", "any change during the run that is beyond the limit", "≤ 31"),
        ("row-remap-uncorrectable", "any value beyond", "< 512"),
    ],
)
def test_any_wrong_count_or_state_is_found_by_logic(
    criterion: str, title: str, limit: str, healthy: list[Detection]
) -> None:
    result = healthy
    assert all(item.kind == LOGIC for item in result if item.key.criterion == criterion)
    (group,) = [limits for name, limits in logic_groups(result).items() if name.startswith(title)]
    assert group[criterion] == limit


def test_limit_that_depends_on_the_host_is_not_printed() -> None:
    pooled = [*runs(count=1, gpus=2), *runs(count=1, gpus=4, prefix="other")]
    pooled[1] = (replace(pooled[1][0], nonce="e" * 32), pooled[1][1])
    (group,) = [limits for limits in logic_groups(detection(pooled, PACKS)).values() if "gpu-count" in limits]
    assert group["gpu-count"] == ""


def test_false_alarm_rate_of_counts_and_states_has_an_upper_limit(healthy: list[Detection]) -> None:
    result = healthy
    values, failed, upper_limit = logic_false_alarms(result)
    assert (values, failed) == (sum(item.values for item in result if item.kind == LOGIC), 0)
    # If the share of healthy values that fail were at the upper limit, all `values` would pass with a probability of only 5 %.
    assert (1 - upper_limit) ** values == pytest.approx(0.05)
    assert logic_false_alarms([replace(item, failed=1) for item in result])[2] == 1.0
    assert f"0 of {values} healthy values failed" in render_detection(result)


# --- what cannot be stated


def criterion(**over: Any) -> Criterion:
    defaults = {"id": "mine", "name": "gemm.throughput", "operator": "ge", "unit": "FLOP/s", "action": "none"}
    return Criterion(**{**defaults, "source": "a test's own", **over})


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"value": 1.0}, "no host has the part"),
        ({"fleet_fraction": 0.95}, "no run has enough comparable parts"),
        ({"variable": "fabric_bytes_per_second"}, "no inventory sets the variable"),
        ({"name": "drift.stress.throughput", "value": 0.97, "unit": "1"}, "no soak gave a drift"),
    ],
)
def test_reason_why_a_criterion_judged_no_value_is_stated(over: Any, why: str) -> None:
    ((reason, ids),) = not_judged([criterion(**over)], []).items()
    assert reason.startswith(why)
    assert ids == ["mine"]


@pytest.mark.parametrize(
    "over",
    [
        {"name": "xid.79", "operator": "eq", "value": 0, "unit": "1"},
        {"name": "nic.errors", "operator": "le", "value": 0, "unit": "1", "delta": True},
        {"name": "a.version", "operator": "eq", "same_as_fleet": True, "unit": "1"},
        {"name": "a.count", "operator": "le", "value": 8, "unit": "1"},
    ],
)
def test_criterion_on_a_count_or_version_has_a_logic_group_even_without_values(over: Any) -> None:
    assert not_judged([criterion(**over)], []) == {}
    ((_, limits),) = logic_groups([], [criterion(**over)]).items()
    assert list(limits) == ["mine"]


def test_benchmark_that_ran_only_with_other_settings_is_unmeasured(healthy: list[Detection]) -> None:
    """A profile may run a benchmark with one of several settings. `profiles` maps the profile to them."""
    key = GateKey(
        model="m",
        stage="benchmark",
        name="gemm.throughput",
        criterion="c",
        params=(),
        settings=settings_text("gemm", {}),
    )
    item = of(healthy, "integrity-wrong-words", pattern="ones")
    profiles: dict[str, list[Any]] = {
        "same": [{"benchmark": {"gemm": {}}}],
        "other": [{"benchmark": {"gemm": {"seconds": 9.0}}}],
        "scaled": [{"benchmark": {"gemm": {"seconds": 9.0}}}, {"benchmark": {"gemm": {}}}],
    }
    assert unmeasured([replace(item, key=key)], profiles) == {"other": ["gemm"]}


# --- the command


def write(directory: Path, run: Run) -> str:
    """Write the plan and the host records of a run, and return the directory."""
    documents.write(directory / "plan.json", to_json(run[0]))
    for host, evidence in run[1].items():
        record = replace(evidence.records[0], run_id=run[0].run_id, nonce=run[0].nonce)
        documents.write(directory / "hosts" / f"{host}.json", to_json(record))
    return str(directory)


def test_pooled_runs_of_different_hosts_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pooled = runs(spread("memory.bandwidth", 4.4e12, 2e10))
    paths = [write(tmp_path / run[0].run_id, run) for run in pooled]
    assert main(["power", "--pool", *paths]) == 0
    text = capsys.readouterr().out
    assert "hbm-copy memory.bandwidth h200-sxm: " in text
    assert "Found by logic" in text
    assert main(["power", "--pool", "--json", *paths[:1]]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {item["kind"] for item in document["detection"]} >= {LOGIC, RELATIVE}
    assert main(["power", "--pool", paths[0], paths[0]]) == 64
    assert "is given twice" in capsys.readouterr().err
    assert main(["power", "--markdown", *paths]) == 64
    assert "give --pool too" in capsys.readouterr().err
