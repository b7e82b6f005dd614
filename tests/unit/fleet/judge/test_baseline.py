"""Test limits from baselines: robust levels, noise, the figures and parts that are compared, limits, and missing baselines.

A baseline has the accepted records of hosts and GPUs. An accepted record has a level for each figure: its robust median over the
accepted runs.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.baseline import (
    AcceptedRecord,
    comparison_key,
    direction,
    is_baseline_figure,
    level_of,
    limit,
    noise,
    part_of_scope,
    precision,
    robust_level,
    settings,
    small_sample_sigma,
    too_noisy_reason,
)
from fleet.judge.criteria import Criterion, VsBaseline
from fleet.judge.gpu_identity import identities
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.presence import judge_presence
from schemas.baselines import Accepted as Run
from schemas.baselines import HostBaseline, Level, PartBaseline, PlannedBaseline
from schemas.records import ERROR, MEASURED, Observation, Samples
from schemas.reports import INCONCLUSIVE
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan, pack, reading

PLAN = replace(one_figure_plan(), baseline=PlannedBaseline(directory="/srv/baseline", digest="0" * 64))
RUN = Run(run_id="r0", nonce="f" * 32, report="0" * 64, status="PASS", at=builders.WHEN, by="me")
WIDTH = "gpu.pcie.width"


def level(value: float = 100.0, *, runs: int = 1, unit: str = "B/s", **over: Any) -> Level:
    """Return an accepted level that each of `runs` runs reached; `over` replaces fields."""
    fields = {
        "name": "memory.bandwidth",
        "unit": unit,
        "value": value,
        "values": {f"r{at}": value for at in range(runs)},
    }
    return Level(**{**fields, **over})


def baseline_criterion(operator: str = "ge", name: str = "memory.bandwidth", **limits: float) -> Criterion:
    return Criterion(
        id="c", name=name, operator=operator, unit="B/s", action="rma", source="a test", baseline=VsBaseline(**limits)
    )


# Robust level and noise


@pytest.mark.parametrize(
    ("values", "value", "n"),
    [
        # With fewer than five values, there are no outliers.
        ([3.0], 3.0, 1), ([1.0, 3.0], 2.0, 2), ([1.0, 2.0, 900.0], 2.0, 3), ([1.0, 2.0, 3.0, 900.0], 2.5, 4),
        ([100.0, 100.0, 100.0, 100.0, 900.0], 100.0, 4),
        # More than half of the values are equal: only values that differ from them by more than 1 % are outliers.
        ([100.0] * 5 + [101.0], 100.0, 6), ([100.0] * 5 + [99.0], 100.0, 6), ([100.0] * 5 + [101.1], 100.0, 5),
        ([-100.0] * 5 + [-101.0], -100.0, 6),
        # Outliers are far from the narrowest interval with more than half of the values. If the values form two clusters, this
        # interval is in the larger one.
        ([1.0, 1.0, 1.0, 5.0, 5.0], 1.0, 3), ([1.0, 1.0, 5.0, 5.0, 5.0], 5.0, 3), ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 5),
        # The narrowest interval is 100 to 102. Its width, 2, counts as 1.349 sigmas, so 5 sigmas are 5 * 2 / 1.349 = 7.41. Values
        # farther from its middle, 101, are outliers.
        ([100.0, 101.0, 102.0, 108.4, 93.6], 101.0, 5), ([100.0, 101.0, 102.0, 108.5, 93.5], 101.0, 3),
    ],
)  # fmt: skip
def test_robust_level_leaves_out_outliers(values: list[float], value: float, n: int) -> None:
    for ordered in (values, values[::-1]):
        result = robust_level(ordered)
        assert (result.value, result.n, result.left_out) == (value, n, len(values) - n)
        kept = sorted(values, key=lambda item: abs(item - value))[:n]
        assert result.sigma == pytest.approx(small_sample_sigma(kept))


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf], [1.0, 2.0, 3.0, 4.0, -math.inf]])
def test_empty_or_infinite_or_nan_values_have_no_level(values: list[float]) -> None:
    with pytest.raises(ValueError, match="no level: the values are empty or not finite"):
        robust_level(values)


def test_sigma_of_few_values_is_corrected_for_sample_size() -> None:
    assert small_sample_sigma([]) == small_sample_sigma([3.0]) == 0.0
    for count, bias in ((2, 0.7979), (3, 0.8862), (4, 0.9213), (5, 0.94), (6, 1.0), (20, 1.0)):
        values = [float(at % 2) + at / 100 for at in range(count)]
        assert small_sample_sigma(values) == pytest.approx(statistics.stdev(values) / bias)


def sample_statistics(n: int, cv: float = 0.1, recorded: float | None = None) -> Samples:
    """Return the statistics of `n` samples. `recorded`: `Samples.precision`, or None if the record has none."""
    return Samples(n=n, min=1.0, p50=1.0, max=1.0, cv=cv, precision=recorded)


def test_precision_of_a_median_is_derived_from_its_samples() -> None:
    assert precision(None) is None
    assert precision(sample_statistics(1)) is None
    assert precision(sample_statistics(1, recorded=0.1)) is None
    assert precision(sample_statistics(2)) == pytest.approx(1.2533 * 0.1 / math.sqrt(2))
    assert precision(sample_statistics(9, recorded=0.0)) == 0.0
    assert precision(sample_statistics(9, recorded=0.196)) == pytest.approx(0.1)


def level_of_runs(*values: float) -> Level:
    return level_of("a.b", "W", "gang", "link=1", {"op": "x"}, {f"r{at}": value for at, value in enumerate(values)})


def test_sigma_of_a_level_needs_three_runs_and_a_level_other_than_0() -> None:
    assert level_of_runs(10.0, 12.0).sigma is None
    result = level_of_runs(10.0, 11.0, 12.0)
    assert result.sigma == pytest.approx(1 / 0.8862 / 11)
    assert level_of_runs(-10.0, -11.0, -12.0).sigma == pytest.approx(1 / 0.8862 / 11)
    assert level_of_runs(0.0, 0.0, 0.0).sigma is None
    assert level_of_runs(0.0, 0.0, 9.0).sigma is None
    assert (result.name, result.unit, result.stage, result.within, result.params) == (
        "a.b",
        "W",
        "gang",
        "link=1",
        {"op": "x"},
    )
    assert (result.value, result.left_out, result.values) == (11.0, 0, {"r0": 10.0, "r1": 11.0, "r2": 12.0})
    assert level_of_runs(10.0, 10.0, 10.0, 10.0, 90.0).left_out == 1


def test_noise_is_the_relative_standard_deviation_of_a_new_measurement_around_the_level() -> None:
    assert noise(level()) == 0.0
    assert noise(level(runs=4, sigma=0.02)) == pytest.approx(0.02 * math.sqrt(1.25))
    assert noise(level(runs=6, left_out=2, sigma=0.02)) == pytest.approx(0.02 * math.sqrt(1.25))
    assert noise(level(runs=0, sigma=0.02)) == pytest.approx(0.02 * math.sqrt(2))
    assert noise(level(precision=0.03)) == 0.03
    assert noise(level(runs=1, sigma=0.03, precision=0.04)) == pytest.approx(math.hypot(0.03 * math.sqrt(2), 0.04))


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [
        (WIDTH, "1", 1), ("gpu.retired_pages.count", "1", -1), ("memory.bandwidth", "B/s", 1),
        ("training.accuracy", "1", 1), ("transformer.mfu", "1", 1), ("collective.all_reduce.latency", "s", -1),
        ("integrity.wrong_words", "1", -1), ("stress.temperature", "Cel", 0), ("stress.power", "W", 0),
        ("collective.all_reduce.algbw", "B/s", 1), ("x.temperature", "1", -1),
    ],
)  # fmt: skip
def test_direction_of_improvement_follows_from_name_and_unit(name: str, unit: str, expected: int) -> None:
    """1: more is better; -1: less is better; 0: neither."""
    assert direction(name, unit) == expected


def measure(name: str = "memory.bandwidth", value: Any = 1.0, **over: Any) -> Observation:
    values = {"name": name, "scope": "gpu=0", "stage": "benchmark", "unit": "B/s", "status": MEASURED, "value": value}
    return Observation(**{**values, **over})


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (measure(), True), (measure(value=3), True), (measure(value=True), False), (measure(value="x"), False),
        (measure(value=float("nan")), False), (measure(value=float("inf")), False),
        (measure(value=None, status=ERROR, reason="lost"), False),
        (measure("collective.x.algbw"), False), (measure("digest.value", unit="1"), False),
        (measure("a.latency", unit="s"), True),
        (measure("transformer.mfu", unit="1"), True), (measure("benchmark.duration", unit="s"), False),
        (measure("stress.power", unit="W"), True), (measure("stress.temperature", unit="Cel"), True),
        (measure(WIDTH, unit="1", params={"phase": "before"}), True), (measure(params={"phase": "before"}), False),
        (measure("gpu.power.draw", unit="W", params={"phase": "before"}), False), (measure(WIDTH, unit="1"), False),
    ],
)  # fmt: skip
def test_baseline_includes_only_finite_measured_numbers_of_certain_names_and_units(
    observation: Observation, expected: bool
) -> None:
    assert is_baseline_figure(observation) is expected


GPUS = [builders.gpu("h1", index) for index in range(2)]
UNIDENTIFIED = replace(GPUS[1], serial=" ", uuid=" ")


@pytest.mark.parametrize(
    ("scope", "part", "within"),
    [
        ("gpu=0", "h1-0", ""), ("gpu=0,link=3", "h1-0", "link=3"), ("gpu=0,peer=1", "h1-0", "peer=h1-1"),
        ("gpu=0,peer=7", "h1-0", "peer=7"), ("gpu=0,link=1", "h1-0", "link=1"), ("host", "", ""),
        ("nic=eth0", "", "nic=eth0"), ("gpu=7", "", "gpu=7"), ("gang=r1", "", "gang=r1"),
    ],
)  # fmt: skip
def test_scope_is_split_into_identity_of_the_gpu_and_rest(scope: str, part: str, within: str) -> None:
    assert part_of_scope(identities(GPUS), scope) == (part, within)


def test_scope_of_a_gpu_without_serial_and_uuid_names_no_part() -> None:
    gpus = identities([GPUS[0], UNIDENTIFIED])
    assert part_of_scope(gpus, "gpu=1") == ("", "gpu=1")
    assert part_of_scope(gpus, "gpu=0,peer=1") == ("h1-0", "peer=")


def test_comparison_key_has_name_and_stage_and_rest_of_the_scope_and_settings() -> None:
    reported = measure(params={"op": "copy", "dtype": "x", "transport": "P2P", "size_bytes": 8})
    assert comparison_key(reported, "link=1") == (
        "memory.bandwidth", "benchmark", "link=1", (("dtype", "x"), ("op", "copy"), ("size_bytes", 8))
    )  # fmt: skip
    assert comparison_key(measure(params={"phase": "after", "b": 2, "a": 1}), "")[1:] == ("", "", (("a", 1), ("b", 2)))
    assert settings(measure("pairs.bandwidth", params={"size_bytes": 8, "op": "x"})) == {"op": "x"}


# Limits


@pytest.mark.parametrize(
    ("limits", "accepted", "expected"),
    [
        ({"fraction": 0.9}, level(), 90.0), ({"fraction": 1.0}, level(precision=0.01, runs=1), 96.0),
        ({"fraction": 0.95, "sigmas": 2}, level(precision=0.03), 94.0),
        ({"fraction": 0.95, "sigmas": 1}, level(precision=0.03), 95.0),
        # The noise is too large for a limit if `sigmas` times the noise is more than 0.25, and more than 1 - `fraction`.
        ({"fraction": 0.9, "sigmas": 1}, level(precision=0.25), 75.0),
        ({"fraction": 0.9, "sigmas": 1}, level(precision=0.251), None),
        ({"fraction": 0.5, "sigmas": 1}, level(precision=0.5), 50.0),
        ({"fraction": 0.5, "sigmas": 1}, level(precision=0.51), None),
        # The fraction 1 needs the noise, which is unknown here: there is no limit. But with the unit 1, the level is the limit.
        ({"fraction": 1.0}, level(), None), ({"fraction": 1.0}, level(unit="1"), 100.0), ({"fraction": 0.99}, level(), 99.0),
        ({"change": -3.0}, level(), 97.0), ({"change": 0.0}, level(precision=9.0), 100.0),
    ],
)  # fmt: skip
def test_limit_is_derived_from_an_accepted_figure(limits: Any, accepted: Level, expected: float | None) -> None:
    result = limit(baseline_criterion(**limits), accepted)
    assert (result and result[0]) == (expected and pytest.approx(expected))
    if "change" not in limits and expected:  # an upper limit is as far above the level as a lower limit is below it
        upper = limit(baseline_criterion("le", **{**limits, "fraction": 2 - limits["fraction"]}), accepted)
        assert upper
        assert upper[0] == pytest.approx(200 - expected)


def test_limit_of_a_criterion_without_a_baseline_is_an_error() -> None:
    with pytest.raises(ValueError, match="criterion c compares with no baseline"):
        limit(replace(baseline_criterion(), baseline=None), level())


@pytest.mark.parametrize(
    ("limits", "accepted", "expected_text"),
    [
        ({"fraction": 0.9}, level(), "90 % of the accepted level; this level is 0.1 kB/s (one accepted run)"),
        ({"fraction": 0.9}, level(unit="1", runs=3), "90 % of the accepted level; this level is 100 (median of 3 accepted runs)"),
        ({"fraction": 0.9}, level(runs=4, left_out=1),
         "90 % of the accepted level; this level is 0.1 kB/s (median of 4 accepted runs without 1 outlier)"),
        ({"change": 2.0}, level(), "the accepted level plus 2 B/s; this level is 0.1 kB/s (one accepted run)"),
        ({"fraction": 0.98, "sigmas": 2}, level(precision=0.02),
         "96 % of the accepted level, because 2 sigma of its noise are 4 %; this level is 0.1 kB/s (one accepted run)"),
    ],
)  # fmt: skip
def test_limit_states_its_source(limits: Any, accepted: Level, expected_text: str) -> None:
    result = limit(baseline_criterion(**limits), accepted)
    assert result
    assert result[1] == expected_text


def test_reason_for_a_missing_limit_is_that_the_noise_is_unknown_or_too_large() -> None:
    assert too_noisy_reason(level()).startswith("the limit needs the noise of the accepted figure")
    assert too_noisy_reason(level(precision=0.3)).startswith("the accepted figure has a noise (sigma) of 30 %")


# Parts with an accepted record


def part_baseline(part: str, name: str, *figures: Level, **over: Any) -> PartBaseline:
    return PartBaseline(
        **{"kind": "gpu", "part": part, "id": name, "host": "h1", "runs": (RUN,), "figures": figures, **over}
    )


COPY = level(4.2e12, stage="benchmark", params={"op": "copy", "world_size": 1})
HOST, GPU = part_baseline("host", "h1"), part_baseline("gpu", "h1-0", COPY)
COMPARED = baseline_criterion(fraction=0.9)


def test_accepted_figure_is_found_by_part_and_settings() -> None:
    known = AcceptedRecord(HostBaseline(host=HOST, gpus={"h1-0": GPU}), GPUS)
    figure = builders.results(PLAN, "h1", "benchmark")[0]
    assert known.level(figure) == COPY
    assert known.level(replace(figure, params={"op": "other"})) is None
    assert known.level(replace(figure, scope="gpu=1")) is None
    assert [known.has(scope) for scope in ("gpu=0,link=1", "gpu=1", "host")] == [True, False, True]
    assert [known.part(scope) for scope in ("gpu=0,link=1", "gpu=1", "host")] == ["h1-0", "h1-1", ""]
    no_host = AcceptedRecord(None, GPUS)
    assert not no_host.has("host")
    assert no_host.level(figure) is None
    assert not AcceptedRecord(HostBaseline(), []).has("host")


def missing_baselines(
    baseline: HostBaseline | None, *criteria: Criterion, plan: Any = PLAN, **changes: Any
) -> list[tuple[str, str]]:
    """Return scope and reason (without the remedy) of each verdict on a missing accepted record.

    `changes` replaces fields of the record that this run made on h1.
    """
    view = HostView(plan, plan.hosts[0], replace(host_evidence(plan, **changes), baseline=baseline), [pack(*criteria)])
    reported = list(judge_presence(view))
    assert all(item.verdict == INCONCLUSIVE and item.criterion == item.name == "baseline" for item in reported)
    assert all(item.source == "the record on which the part was accepted" for item in reported)
    remedy = "; measure the part in a full run without rackproof_baseline, then run `rackproof baseline accept`"
    assert all(item.reason.endswith(remedy) for item in reported)
    return [(item.scope, item.reason.removesuffix(remedy)) for item in reported]


def test_parts_without_an_accepted_record_are_listed() -> None:
    whole = HostBaseline(host=HOST, gpus={"h1-0": GPU})
    assert missing_baselines(whole, COMPARED) == []
    assert missing_baselines(None, plan=replace(PLAN, baseline=None)) == []
    assert missing_baselines(None) == [("host", "the baseline was not read")]
    assert missing_baselines(replace(whole, problem="cut off")) == [("host", "cut off")]
    assert missing_baselines(replace(whole, host=None), COMPARED) == [
        ("host", "no accepted record of host h1 in /srv/baseline")
    ]
    no_host = [
        ("host", "no accepted record of host h1 in /srv/baseline"),
        ("gpu=0", "no accepted record of serial h1-0"),
    ]
    assert missing_baselines(HostBaseline()) == no_host


def test_previous_gpu_of_the_slot_is_named() -> None:
    old = replace(builders.gpu("h1", 0), serial="S-OLD")
    for gpus, expected_text in (((old,), ": this GPU replaces S-OLD"), ((replace(old, pci_bus_id="else"),), ""),
                       ((builders.gpu("h1", 0),), "")):  # fmt: skip
        result = missing_baselines(HostBaseline(host=replace(HOST, gpus=gpus)))
        assert result == [("gpu=0", f"no accepted record of serial h1-0{expected_text}")]
    without_address = missing_baselines(
        HostBaseline(host=replace(HOST, gpus=(replace(old, pci_bus_id=""),))),
        gpus=(replace(builders.gpu("h1", 0), pci_bus_id=""),),
    )
    assert without_address == [("gpu=0", "no accepted record of serial h1-0")], (
        "two GPUs without a PCI address must not count as GPUs of the same slot"
    )
    unidentified = replace(builders.gpu("h1", 0), serial="", uuid="")
    assert missing_baselines(HostBaseline(host=HOST), gpus=(unidentified,)) == [
        ("gpu=0", "no accepted record of an unknown serial")
    ]
    without_serial = replace(unidentified, uuid="GPU-1")
    assert missing_baselines(HostBaseline(host=HOST), gpus=(without_serial,)) == [
        ("gpu=0", "no accepted record of UUID GPU-1")
    ]
    assert missing_baselines(HostBaseline(host=HOST), gpus=()) == []
    more = (builders.gpu("h1", 0), builders.gpu("h1", 5))  # another check reports a GPU that is not in the plan
    assert missing_baselines(HostBaseline(host=HOST, gpus={"h1-0": GPU}), gpus=more) == []
    cpus = replace(PLAN, hosts=(replace(PLAN.hosts[0], device="cpu"),))
    assert missing_baselines(HostBaseline(host=HOST), plan=cpus) == []


def test_accepted_record_without_a_comparable_figure_is_reported() -> None:
    without_figures = HostBaseline(host=HOST, gpus={"h1-0": part_baseline("gpu", "h1-0")})
    text = "has none of the figures that are compared in this run"
    assert missing_baselines(without_figures, COMPARED) == [("gpu=0", f"the accepted record of serial h1-0 {text}")]
    # Nothing is missing if this run measured no figure that a criterion compares with the baseline. Otherwise the accepted record
    # needs at least one of these figures.
    assert missing_baselines(without_figures) == []
    assert missing_baselines(without_figures, replace(COMPARED, baseline=None, value=1)) == []
    assert missing_baselines(without_figures, replace(COMPARED, scope="host")) == []
    lost = tuple(
        replace(item, status=ERROR, value=None, reason="lost") for item in builders.results(PLAN, "h1", "benchmark")
    )
    assert missing_baselines(without_figures, COMPARED, observations=lost) == []
    figure = builders.results(PLAN, "h1", "benchmark")[0]
    other = replace(figure, params={"op": "read"})
    for order in ((figure, other), (other, figure)):
        assert missing_baselines(HostBaseline(host=HOST, gpus={"h1-0": GPU}), COMPARED, observations=order) == []
    of_host = baseline_criterion(name="memory.bandwidth", fraction=0.9)
    assert missing_baselines(without_figures, of_host, observations=(replace(figure, scope="host"),)) == [
        ("host", f"the accepted record of host h1 {text}")
    ]


def test_judge_reports_missing_baselines() -> None:
    verdicts = judge(PLAN, {"h1": replace(host_evidence(PLAN, "h1", reading(1)), baseline=HostBaseline())}, [pack()])
    assert [(item.scope, item.criterion) for item in verdicts] == [("host", "baseline"), ("gpu=0", "baseline")]
