"""Test fleet-relative limits: fraction of the median, robust deviations, and comparison by position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.criteria_lint.lint import lint
from fleet.judge.criteria import Criterion, Pack, read_pack
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.judge import judge
from fleet.judge.outliers import FleetFigures
from schemas.errors import UsageError
from schemas.records import Record
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.accepted import small_plan

NORMAL = (1.0, 1.001, 0.999, 1.002, 0.998, 1.0005, 0.9995, 1.0015, 0.9985, 1.0)
"""Factors of the usual rate, with a robust standard deviation of about 0.15 %."""


def criterion(**fields: object) -> Criterion:
    default = {"id": "relative", "name": "stress.throughput", "scope": "gpu", "operator": "ge", "unit": "FLOP/s"}
    return Criterion(**{**default, "action": "inspect_hardware", "source": "a test", **fields})  # type: ignore[arg-type]


def relative_verdicts(criterion: Criterion, shares: dict[str, tuple[float, float]]) -> dict[tuple[str, str], Verdict]:
    """Return (host, scope) -> verdict; `shares` has the factors of the stress rates of both GPUs of each host."""
    plan = small_plan(*shares)
    evidence = {}
    for host in shares:

        def share(record: Record, host: str = host) -> Record:
            observed = tuple(
                replace(item, value=float(item.value) * shares[host][int(item.scope[-1])])
                if item.name == "stress.throughput" and isinstance(item.value, float)
                else item
                for item in record.observations
            )
            return replace(record, observations=observed)

        evidence[host] = Evidence(records=tuple(map(share, builders.records(plan, host))))
    packs = (Pack(name="h200-sxm", gpu_names=("NVIDIA H200",), criteria=(criterion,)),)
    return {(item.host, item.scope): item for item in judge(plan, evidence, packs) if item.criterion == "relative"}


def normal_factors(count: int, **odd: tuple[float, float]) -> dict[str, tuple[float, float]]:
    usual = {f"h{number}": (NORMAL[number % 10], NORMAL[(number + 3) % 10]) for number in range(count)}
    return {**usual, **odd}


def test_only_the_outlier_fails_and_its_verdict_states_the_spread() -> None:
    verdicts = relative_verdicts(criterion(fleet_deviations=6.0), normal_factors(6, h2=(0.98, 1.0)))
    assert [position for position, item in verdicts.items() if item.verdict == FAIL] == [("h2", "gpu=0")]
    assert "6 robust deviations" in verdicts[("h2", "gpu=0")].detail
    assert "over 12 GPUs" in verdicts[("h2", "gpu=0")].detail


def test_deviation_limit_needs_eight_parts() -> None:
    verdicts = relative_verdicts(criterion(fleet_deviations=6.0), normal_factors(3, h2=(0.5, 1.0)))
    assert {item.verdict for item in verdicts.values()} == {INCONCLUSIVE}
    assert "a deviation needs at least 8" in next(iter(verdicts.values())).reason
    assert relative_verdicts(criterion(fleet_deviations=6.0, optional=True), normal_factors(3)) == {}


def test_gang_added_after_a_comparison_is_included_in_later_ones() -> None:
    figures = FleetFigures(Planned(small_plan("h1", "h2")))
    key = ("NVIDIA H200", "collective.all_reduce.busbw", "gang", "gang", ())
    for number in (1, 2):
        figures.add_figures(key, f"gang=r{number}", [float(number)])
        assert len(figures.peers_at(key, "gang=r1").values) == number


def test_looser_of_fraction_and_deviations_is_the_limit() -> None:
    """1.2 % below the median is many deviations, but within the allowed 2 %."""
    slow = normal_factors(6, h2=(0.988, 1.0))
    assert relative_verdicts(criterion(fleet_deviations=4.0), slow)[("h2", "gpu=0")].verdict == FAIL
    assert (
        relative_verdicts(criterion(fleet_deviations=4.0, fleet_fraction=0.98), slow)[("h2", "gpu=0")].verdict == PASS
    )
    # a fleet too small for deviations uses the fraction
    few = relative_verdicts(criterion(fleet_deviations=4.0, fleet_fraction=0.98), normal_factors(3, h2=(0.95, 1.0)))
    assert [position for position, item in few.items() if item.verdict == FAIL] == [("h2", "gpu=0")]


def test_parts_are_compared_by_position_if_there_are_enough() -> None:
    """The second GPU of every host is 4 % slower; a slow first GPU is found only by position."""
    warm = {host: (first, second * 0.96) for host, (first, second) in normal_factors(10).items()}
    warm["h3"] = (0.97, 0.96)
    by_model = relative_verdicts(criterion(fleet_fraction=0.985), warm)
    assert {item.verdict for item in by_model.values()} == {PASS}
    verdicts = relative_verdicts(criterion(fleet_fraction=0.985, by_position=True), warm)
    assert [position for position, item in verdicts.items() if item.verdict == FAIL] == [("h3", "gpu=0")]
    assert "over 10 GPUs at gpu=0" in verdicts[("h3", "gpu=0")].detail
    few = {host: warm[host] for host in ("h0", "h1", "h2", "h4")}
    assert (
        "over 8 GPUs"
        in next(iter(relative_verdicts(criterion(fleet_fraction=0.5, by_position=True), few).values())).detail
    )


PACK = """\
schema: rackproof.criteria/1
summary: ours
criteria:
  - {{id: a, name: stress.throughput, scope: gpu, operator: {operator}, {limit}, unit: FLOP/s, action: rma, source: "ours alone"}}
"""


@pytest.mark.parametrize(
    ("operator", "limit", "finding"),
    [
        ("ge", "vs_fleet: {deviations: 5}", ""),
        ("ge", "vs_fleet: {fraction: 0.95, deviations: 5, by: position}", ""),
        ("ge", "vs_baseline: {fraction: 0.95}", ""),
        ("ge", "vs_baseline: {fraction: 1.05}", "half of the healthy parts would fail"),
        ("eq", "vs_baseline: {fraction: 0.95}", "no two measurements"),
        ("eq", "vs_fleet: {deviations: 5}", "no two measurements"),
    ],
)
def test_lint_checks_fleet_and_baseline_limits(operator: str, limit: str, finding: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.yml"
    path.write_text(PACK.format(operator=operator, limit=limit))
    result = [str(item) for item in lint(read_pack(str(path)))]
    assert any(finding in text for text in result) if finding else result == []


@pytest.mark.parametrize(
    "limit",
    [
        "vs_fleet: {by: position}",
        "vs_fleet: {deviations: 1}",
        "vs_baseline: {sigmas: 4}",
        "vs_baseline: {fraction: 0.9, change: 1}",
        "vs_baseline: {fraction: 0.9}, value: 1.0",
    ],
)
def test_empty_or_ambiguous_limit_is_refused(limit: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.yml"
    path.write_text(PACK.format(operator="ge", limit=limit))
    with pytest.raises(UsageError):
        read_pack(str(path))
