"""Test `ReadingCheck`, which counts the passes of a reading without creating verdicts.

Only a criterion that is one comparison with a limit has a check. A check counts the passes of a host only if all judged values
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import VsBaseline
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import Planned
from fleet.judge.host_view import HostView
from fleet.judge.outliers import FleetFigures
from fleet.judge.reading_checks import ReadingCheck, reading_check
from fleet.judge.row import TallyRow
from schemas.records import Metric, Snapshot
from schemas.reports import PASS, Verdict
from tests.unit.fleet.judge.small_fleet import SNAPSHOTS, criterion, host_view, one_figure_plan

PLAN = one_figure_plan("h1", gpu_count=2)
NAME = "gpu.thing"


def row(operator: str = "le") -> TallyRow:
    return TallyRow(criterion="c", name=NAME, stage="", params={}, unit="1", operator=operator, source="s", basis="b")


def metric(first: Any = 1, second: Any = 2, **absent: str) -> Metric:
    """Return the reading of two GPUs. `absent`: `gpu2` -> reason why gpu=2 has no value."""
    values = {f"gpu={at}": value for at, value in enumerate((first, second)) if value is not None}
    return Metric(name=NAME, unit="1", values=values, absent={f"gpu={key[3:]}": why for key, why in absent.items()})


def view(*metrics: Metric, phases: Sequence[tuple[str, str]] = SNAPSHOTS) -> HostView:
    """Return the view of a host with one snapshot for each of the metrics."""
    shots = tuple(
        Snapshot(stage=stage, phase=phase, at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=(item,))
        for at, ((stage, phase), item) in enumerate(zip(phases, metrics, strict=False))
    )
    return host_view(PLAN, snapshots=shots)


def passes(limit: Any = 5, scopes: Sequence[str] = ("gpu=0", "gpu=1")) -> list[Verdict]:
    """Return a passing verdict for each scope."""
    return [
        Verdict(host="h1", scope=scope, name=NAME, verdict=PASS, criterion="c", reason="", limit=limit)
        for scope in scopes
    ]


def check_of(
    host: HostView, verdicts: Sequence[Verdict] = (), rows: Sequence[TallyRow] | None = None,
    names: Sequence[str] = (NAME,), **fields: Any,
) -> ReadingCheck | None:  # fmt: skip
    verdicts = list(verdicts) or passes()
    counted = row()
    rule = criterion(NAME, **{"operator": "le", "value": 5, **fields})
    return reading_check(host, rule, names, verdicts, [counted] * len(verdicts) if rows is None else rows)


THREE = (metric(), metric(), metric())


def test_check_has_the_readings_and_the_limit() -> None:
    check = check_of(view(*[metric(1, 2, gpu2="unsupported: no")] * 3))
    assert check is not None
    assert (check.name, check.operator, check.limit, check.is_increase) == (NAME, "le", 5, False)
    assert (check.scopes, check.absent, check.judged) == (
        ("gpu=0", "gpu=1"), {"gpu=2": "unsupported: no"}, ("gpu=0", "gpu=1"),
    )  # fmt: skip
    assert check.snapshots == list(SNAPSHOTS)


@pytest.mark.parametrize(
    "fields",
    [
        {"stage": "benchmark"}, {"where": {"phase": "before"}}, {"best_of_run": True}, {"operator": "eq"},
        {"per_hour": True, "delta": True}, {"value": None, "same_as_fleet": True}, {"delta": True, "operator": "ge"},
        {"value": None, "baseline": VsBaseline(fraction=0.9)}, {"name": "gpu.*"}, {"names": (NAME, "gpu.other")},
    ],
    ids=[
        "stage", "phase", "best of the run", "equality", "rate", "compared with the fleet", "increase with a floor",
        "compared with a baseline", "pattern", "several readings",
    ],
)  # fmt: skip
def test_criterion_that_is_not_simple_has_no_check(fields: dict[str, Any]) -> None:
    """A simple criterion compares every value of one reading with a floor or a ceiling.

    It may instead compare the increase of the reading with a ceiling. Each id names what makes the criterion not simple.
    """
    host = view(*THREE)
    names = fields.pop("names", (NAME,))
    rule = criterion(**{"name": NAME, "operator": "le", **fields})
    assert reading_check(host, rule, names, passes(), [row(rule.operator)] * 2) is None


@pytest.mark.parametrize("fields", [{}, {"where": {"reason": "x"}}, {"delta": True}, {"operator": "ge"}])
def test_simple_criterion_has_a_check(fields: dict[str, Any]) -> None:
    counted = row(fields.get("operator", "le"))
    check = check_of(view(*THREE), rows=[counted] * 2, **fields)
    assert check is not None
    assert check.is_increase is bool(fields.get("delta"))


@pytest.mark.parametrize(
    "metrics",
    [(metric(), metric(1, None), metric()), (metric(), metric(1, 2, gpu2="error: no"), metric())],
    ids=["one snapshot lacks a value", "one snapshot has one more absent value"],
)
def test_readings_must_have_the_same_scopes_in_all_snapshots(metrics: Sequence[Metric]) -> None:
    assert check_of(view(*metrics)) is None


@pytest.mark.parametrize(
    ("scope", "has_check"),
    [("gpu=1", False), ("gpu=2", True), ("pci=0000:01:00.0", False)],
    ids=["judged", "not judged", "PCI address"],
)
def test_scope_without_a_value_must_be_neither_judged_nor_a_pci_address(scope: str, has_check: bool) -> None:
    absent = replace(metric(), absent={scope: "unsupported: no"})
    assert (check_of(view(*[absent] * 3)) is not None) is has_check


@pytest.mark.parametrize("scope", ["pci=0000:01:00.0", "gpu=0"])
def test_reading_with_a_value_at_a_pci_address_has_no_check(scope: str) -> None:
    values = replace(metric(), values={scope: 1, "gpu=1": 2})
    assert (check_of(view(*[values] * 3)) is None) is scope.startswith("pci")


def test_all_verdicts_must_have_the_same_limit_and_the_same_row() -> None:
    """The limit must be a number, and the row must have the operator of the criterion."""
    host, one, two = view(*THREE), row(), row()
    assert check_of(host, passes(5.0)) is not None
    assert check_of(host, passes(True)) is None
    assert check_of(host, passes(None)) is None
    assert check_of(host, [*passes(5, ["gpu=0"]), *passes(6, ["gpu=1"])]) is None
    assert check_of(host, rows=[one, two]) is None
    assert check_of(host, rows=[row("lt")] * 2) is None


def test_host_with_one_snapshot_has_a_check() -> None:
    check = check_of(view(metric(gpu2="error: no")))
    assert check is not None
    assert (check.snapshots, check.scopes, check.absent) == (
        [SNAPSHOTS[0]],
        ("gpu=0", "gpu=1"),
        {"gpu=2": "error: no"},
    )


def test_criterion_without_a_verdict_has_a_check_that_counts_nothing() -> None:
    check = reading_check(view(*THREE), criterion(NAME, operator="le"), (NAME,), [], [])
    assert check is not None
    assert (check.row, check.judged, check.limit) == (None, (), 0.0)
    assert check.count_passes(view(*THREE), 0) == 0


def check(operator: str = "le", limit: float = 5, *, increase: bool = False) -> tuple[ReadingCheck, TallyRow]:
    counted = row(operator)
    first = metric()
    return ReadingCheck(
        name=NAME, snapshots=list(SNAPSHOTS), scopes=tuple(first.values), absent={}, judged=("gpu=0", "gpu=1"),
        is_increase=increase, operator=operator, limit=limit, row=counted,
    ), counted  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "third", "count"),
    [
        (metric(1, 2), metric(1, 2), metric(5, 5.0), 2),
        (metric(1, 2), metric(6, 2), metric(1, 2), None),
        (metric(1, 2), metric(1, 2), metric(1, 5.1), None),
        (metric(1, 2), metric(1, True), metric(1, 2), None),
        (metric(1, 2), metric(1, "low"), metric(1, 2), None),
        (metric(1, 2), metric(1, None), metric(1, 2), None),
        (metric(1, 2), metric(1, 2, gpu2="error: no"), metric(1, 2), None),
    ],
)
def test_every_number_in_every_snapshot_must_pass(
    first: Metric, second: Metric, third: Metric, count: int | None
) -> None:
    checked, counted = check()
    assert checked.count_passes(view(first, second, third), 0) == count
    assert counted.total == (count or 0)


def test_passes_of_a_host_with_other_snapshots_are_not_counted() -> None:
    checked, _ = check()
    assert checked.count_passes(view(*THREE, phases=(*SNAPSHOTS[:2], ("benchmark", "during"))), 0) is None
    assert checked.count_passes(view(*THREE[:2]), 0) is None


@pytest.mark.parametrize(
    ("numbers", "limit", "count"),
    [
        ((10, 12, 15), 5, 2), ((10, 12, 16), 5, None), ((10, 10, 10), 0, 2), ((10, 10, 11), 0, None),
        ((10, 9, 12), 5, None), ((10, 12, 11), 5, None), ((10, 10, 10.5), 0.5, 2),
    ],
)  # fmt: skip
def test_increase_over_the_run_must_pass_and_the_counter_must_not_be_reset(
    numbers: Sequence[float], limit: float, count: int | None
) -> None:
    checked, counted = check(limit=limit, increase=True)
    assert checked.count_passes(view(*[metric(0, number) for number in numbers]), 0) == count
    if count:
        assert counted.judged({}).spread is not None
        assert max(entry[4] for entry in counted.farthest) == numbers[-1] - numbers[0]  # type: ignore[type-var]


def test_counted_pass_keeps_its_host_and_scope_and_its_value_in_the_last_snapshot() -> None:
    checked, counted = check("ge", 1)
    assert checked.count_passes(view(metric(7, 8), metric(7, 8), metric(3, 4)), 5) == 2
    assert [(entry[2], entry[3], entry[4], entry[5]) for entry in counted.farthest] == [
        (5, "gpu=0", 3, "h1"), (5, "gpu=1", 4, "h1"),
    ]  # fmt: skip


def test_check_agrees_with_the_verdicts() -> None:
    figures = FleetFigures(Planned(PLAN))
    for numbers in ((1, 2), (5, 5), (6, 1)):
        host = view(*[metric(*numbers)] * 3)
        rule = criterion(NAME, operator="le", value=5)
        verdicts = [item for item in evaluate(host, rule, figures) if item.name == NAME]
        all_pass = all(item.verdict == PASS for item in verdicts)
        checked, _ = check()
        assert (checked.count_passes(host, 0) is not None) is all_pass, numbers
