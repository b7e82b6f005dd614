"""Test the rows of a fleet report: counts, spread, worst values, and merging of rows.

A row summarizes the verdicts of one criterion on one figure. A tally has all rows.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from fleet.judge.evidence import Planned
from fleet.judge.row import MAX_BINS, MAX_EXACT, MAX_FARTHEST, MAX_VALUES, TallyRow, more_severe
from fleet.judge.tally import Tally
from schemas.reports import FAIL, INCONCLUSIVE, PASS, FarthestPart, Judged, Verdict
from tests import builders

PLANNED = Planned(builders.plan())


def new_row(**changes: Any) -> TallyRow:
    fields = {
        "criterion": "c", "name": "gemm.throughput", "stage": "benchmark", "params": {"dtype": "bf16"}, "unit": "FLOP/s",
        "operator": "ge", "source": "ours", "basis": "policy",
    }  # fmt: skip
    return TallyRow(**{**fields, **changes})


def add_value(
    to: TallyRow, position: int, value: Any, verdict: str = PASS, limit: Any = 5.0, scope: str = "gpu=0"
) -> None:
    """Add to the row `to` a verdict on the host `h<position>`. `position` is also the position of the host in the plan."""
    to.add(verdict, value, limit, position, f"h{position}", scope, f"S{position}")


def verdict(host: str = "h1", value: Any = 9.0, **over: Any) -> Verdict:
    fields = {
        "host": host, "scope": "gpu=0", "name": "gemm.throughput", "stage": "benchmark", "verdict": PASS, "criterion": "c",
        "reason": "", "value": value, "limit": 5.0, "operator": "ge", "unit": "1", "source": "ours",
    }  # fmt: skip
    return Verdict(**{**fields, **over})


def worst_hosts(judged: Judged) -> list[str]:
    """Return the hosts of the listed parts, in the order of the list."""
    return [far.host for far in judged.farthest]


def test_row_reports_counts_spread_and_worst_values_of_its_verdicts() -> None:
    row = new_row()
    for position, (value, state) in enumerate(((9.0, PASS), (3.0, FAIL), (None, INCONCLUSIVE), (7.0, PASS))):
        add_value(row, position, value, state)
    judged = row.judged({})
    assert (judged.criterion, judged.name, judged.stage, judged.unit) == (
        "c",
        "gemm.throughput",
        "benchmark",
        "FLOP/s",
    )
    assert (judged.operator, judged.limit, judged.source, judged.basis) == ("ge", 5.0, "ours", "policy")
    assert (judged.params, judged.action) == ({"dtype": "bf16"}, "none")
    assert (judged.passed, judged.failed, judged.inconclusive, judged.values) == (2, 1, 1, {})
    assert judged.spread is not None
    assert (judged.spread.n, judged.spread.min, judged.spread.p50, judged.spread.max) == (3, 3, 7, 9)
    assert judged.farthest == (
        FarthestPart(host="h1", scope="gpu=0", value=3.0, serial="S1", verdict=FAIL),
        FarthestPart(host="h3", scope="gpu=0", value=7.0, serial="S3", verdict=PASS),
        FarthestPart(host="h0", scope="gpu=0", value=9.0, serial="S0", verdict=PASS),
    )


@pytest.mark.parametrize(
    ("operator", "values", "order"),
    [
        ("ge", (3.0, 1.0, 2.0), ["h1", "h2", "h0"]), ("gt", (3.0, 1.0, 2.0), ["h1", "h2", "h0"]),
        ("le", (3.0, 1.0, 2.0), ["h0", "h2", "h1"]), ("lt", (3.0, 1.0, 2.0), ["h0", "h2", "h1"]),
        ("eq", (5.0, 1.0, 5.0), ["h1", "h0", "h2"]),
        # Hosts with equal values are in the order of the plan.
        ("ge", (1.0, 1.0, 1.5), ["h0", "h1", "h2"]),
    ],
)  # fmt: skip
def test_worst_values_come_first(operator: str, values: Any, order: list[str]) -> None:
    for step in (1, -1):
        row = new_row(operator=operator)
        for position, value in [*enumerate(values)][::step]:
            add_value(row, position, value)
        assert worst_hosts(row.judged({})) == order


def test_failures_are_listed_first_then_inconclusive_verdicts_then_passes() -> None:
    row = new_row()
    for position, (value, state) in enumerate(((1.0, PASS), (9.0, FAIL), (2.0, INCONCLUSIVE), (8.0, FAIL))):
        add_value(row, position, value, state)
    assert worst_hosts(row.judged({})) == ["h3", "h1", "h2", "h0"]


@pytest.mark.parametrize("parts", [1, 3])
def test_only_the_worst_values_are_listed(parts: int) -> None:
    count = 3 * MAX_FARTHEST
    rows = [new_row() for _ in range(parts)]
    for position in range(count):
        add_value(rows[position % parts], position, float(count - position))
    for other in rows[1:]:
        rows[0].update(other)
    assert worst_hosts(rows[0].judged({})) == [f"h{count - 1 - at}" for at in range(MAX_FARTHEST)]


@pytest.mark.parametrize("operator", ["ge", "le"])
def test_add_pass_gives_the_same_row_as_add(operator: str) -> None:
    values = [float(number * 7 % 50) for number in range(45)]
    plain, short = new_row(operator=operator), new_row(operator=operator)
    short.add_limit(5.0)
    short.higher_is_better = operator == "ge"
    for position, value in enumerate(values):
        plain.add(PASS, value, 5.0, position, f"h{position}", "gpu=0", "")
        if position % 3:
            short.add_pass(value, position, f"h{position}", "gpu=0")
        else:
            short.add(PASS, value, 5.0, position, f"h{position}", "gpu=0", "")
    assert short.judged({}) == plain.judged({})


def test_failure_is_listed_first_even_if_added_after_many_passes() -> None:
    row = new_row()
    for position in range(2 * MAX_FARTHEST):
        row.add_pass(1.0, position, f"h{position}", "gpu=0")
    add_value(row, 99, 0.5, FAIL)
    for position in range(30, 40):
        row.add_pass(0.1 * position, position, f"h{position}", "gpu=0")
    assert worst_hosts(row.judged({}))[:3] == ["h99", "h0", "h1"]
    only_failures = new_row()
    for position in range(MAX_FARTHEST + 1):
        add_value(only_failures, position, 1.0, FAIL)
    only_failures.add_pass(0.1, 50, "h50", "gpu=0")
    assert worst_hosts(only_failures.judged({})) == [f"h{at}" for at in range(MAX_FARTHEST)]


@pytest.mark.parametrize(
    ("value", "has_spread"), [(7.0, True), (True, False), ("on", False), (None, False), (float("nan"), False)]
)
def test_add_repeated_gives_the_same_row_as_add(value: Any, has_spread: bool) -> None:
    plain, short = new_row(operator="eq"), new_row(operator="eq")
    for position in range(14):
        plain.add(PASS, value, value, position, f"h{position}", "host", "")
    short.add_repeated(value, value, [(position, f"h{position}") for position in range(MAX_FARTHEST)], 14, "host")
    judged = short.judged({})
    if not (isinstance(value, float) and math.isnan(value)):  # NaN differs from itself
        assert judged == plain.judged({})
    assert judged.passed == 14
    assert (judged.spread and judged.spread.n) == (14 if has_spread else None)
    assert judged.values == ({str(value): 14} if isinstance(value, str | bool) else {})


def test_add_repeated_counts_the_given_number_of_passes() -> None:
    row = new_row()
    row.add_repeated(7.0, 7.0, [(0, "h0"), (1, "h1")], 2, "host")
    judged = row.judged({})
    assert judged.passed == 2
    assert judged.spread
    assert judged.spread.n == 2


def test_row_names_parts_only_if_their_values_differ_or_one_fails() -> None:
    for values, named in (
        ((1.0, 1.0), False),
        ((1.0, 2.0), True),
        (("a", "a"), False),
        (("a", "b"), True),
        (("a", 1.0), True),
    ):
        row = new_row(operator="eq")
        for position, value in enumerate(values):
            add_value(row, position, value, limit=value)
        assert bool(row.judged({}).farthest) is named
    failing = new_row()
    add_value(failing, 0, 1.0, FAIL)
    assert worst_hosts(failing.judged({})) == ["h0"]


def test_missing_serial_is_taken_from_the_gpu_of_the_scope() -> None:
    row = new_row()
    row.add(FAIL, 1.0, 5.0, 0, "h0", "gpu=1,link=2", "")
    row.add(FAIL, 2.0, 5.0, 0, "h0", "gpu=2", "own")
    judged = row.judged({("h0", "gpu=1"): "S", ("h0", "gpu=2"): "T"})
    assert [far.serial for far in judged.farthest] == ["S", "own"]
    assert [far.serial for far in row.judged({}).farthest] == ["", "own"]


def test_limit_is_shown_if_all_verdicts_with_a_limit_have_the_same_limit() -> None:
    for limits, expected in (
        ((5.0, 5.0), 5.0),
        ((5.0, 6.0), None),
        ((None, None), None),
        ((None, 5.0), 5.0),
        ((1, True), None),
    ):
        row = new_row()
        for position, limit in enumerate(limits):
            add_value(row, position, 9.0, limit=limit)
        judged = row.judged({}).limit
        assert (judged, type(judged)) == (expected, type(expected))
        halves = [new_row(), new_row()]
        for half, limit in zip(halves, limits, strict=True):
            add_value(half, 0, 9.0, limit=limit)
        halves[0].update(halves[1])
        assert halves[0].judged({}).limit == expected


def test_only_the_most_frequent_texts_are_listed_sorted_by_frequency() -> None:
    row = new_row(operator="eq")
    for at in range(MAX_VALUES + 2):
        for position in range(at + 1):
            add_value(row, position, f"v{at}", limit="v0")
    add_value(row, 0, "w", limit="v0")
    assert [*row.judged({}).values.items()] == [(f"v{at}", at + 1) for at in range(MAX_VALUES + 1, 1, -1)]
    tie = new_row(operator="eq")
    for position, value in enumerate(("b", "a", True)):
        add_value(tie, position, value)
    assert [*tie.judged({}).values] == ["True", "a", "b"]


def test_spread_has_quantiles_and_bins_of_its_values() -> None:
    row = new_row()
    for position in range(101):
        add_value(row, position, float(position + 200))
    spread = row.judged({}).spread
    assert spread
    assert (spread.n, spread.min, spread.p05, spread.p50, spread.p95, spread.max) == (101, 200, 205, 250, 295, 300)
    assert len(spread.bins) == MAX_BINS
    width = 100 / MAX_BINS
    assert list(spread.bins) == [
        sum(at * width <= value < (at + 1) * width or (value == 100 and at == MAX_BINS - 1) for value in range(101))
        for at in range(MAX_BINS)
    ]
    assert all(isinstance(value, int) for value in (spread.min, spread.p50, spread.max))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((2.5, 2.5), (2, 2.5, 2.5, 2.5, ())), ((1e300, -1e300), (2, -1e300, -1e300, 1e300, None)),
        ((float("nan"), 3.0), (1, 3, 3, 3, ())), ((float("inf"), 3.0), (1, 3, 3, 3, ())),
        ((float(1 << 53), 0.5), (2, 0.5, 0.5, float(1 << 53), None)),
    ],
)  # fmt: skip
def test_spread_of_extreme_values_is_finite(values: tuple[float, ...], expected: tuple[Any, ...]) -> None:
    """`expected`: number of finite values, minimum, median, maximum, and bins (None: not compared)."""
    row = new_row()
    for position, value in enumerate(values):
        add_value(row, position, value)
    spread = row.judged({}).spread
    assert spread
    assert (spread.n, spread.min, spread.p50, spread.max) == expected[:4]
    if expected[4] is not None:
        assert spread.bins == expected[4]
    # The difference of these two values overflows to infinity, so no bin counts them.
    wide = new_row()
    for position, value in enumerate((-1.7e308, 1.7e308)):
        add_value(wide, position, value)
    spread = wide.judged({}).spread
    assert spread
    assert sum(spread.bins) == 0


@pytest.mark.parametrize("more", [0, 1])
def test_row_with_too_many_different_numbers_rounds_them(more: int) -> None:
    values = [100 + at / 1000 for at in range(MAX_EXACT + more)]
    row, halves = new_row(), [new_row(), new_row()]
    for position, value in enumerate(values):
        add_value(row, position, value)
        add_value(halves[position % 2], position, value)
    halves[0].update(halves[1])
    assert halves[0].judged({}) == row.judged({})
    exact = set(row.numbers) == set(values)
    assert exact is (more == 0)
    assert row.rounded is (more == 1)
    assert all(min(abs(value - kept) for kept in row.numbers) <= value * 2**-14 for value in values[::97])


def test_rounded_row_merged_with_an_exact_row_equals_one_row_of_all_values() -> None:
    def filled(count: int, first: float) -> TallyRow:
        row = new_row()
        for position in range(count):
            add_value(row, position, first + position / 1000)
        row.flush()
        return row

    whole = filled(MAX_EXACT + 5, 100.0)
    for at in range(3):
        add_value(whole, 9000 + at, 100.0001 * (at + 1))
    for turned in (False, True):
        many, few = filled(MAX_EXACT + 5, 100.0), new_row()
        for at in range(3):
            add_value(few, 9000 + at, 100.0001 * (at + 1))
        first, other = (few, many) if turned else (many, few)
        first.update(other)
        assert first.judged({}) == whole.judged({})
    many = filled(MAX_EXACT + 5, 100.0)
    many.add_repeated(100.12345, 5.0, [(0, "h0")], 9, "gpu=0")
    assert many.rounded
    assert 100.12345 not in many.numbers


def test_buffered_values_are_counted_when_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.judge.row.MAX_BUFFERED", 4)
    row = new_row()
    row.add_limit(0.0)
    for position in range(4):
        row.add_pass(1.0, position, f"h{position}", "gpu=0")
    assert (row.passing, row.counts[PASS], row.numbers) == ([], 4, {1.0: 4})
    for position in range(4):
        add_value(row, position, 2.0)
    assert (row.buffer, row.numbers[2.0]) == ([], 4)
    row.add_pass(3.0, 0, "h0", "gpu=0")
    assert row.judged({}).passed == 9


@pytest.mark.parametrize("use_add_pass", [False, True])
def test_value_that_is_worse_than_the_last_listed_value_replaces_it(use_add_pass: bool) -> None:
    def add_passing(value: float, position: int) -> None:
        if use_add_pass:
            row.add_pass(value, position, f"h{position}", "gpu=0")
        else:
            add_value(row, position, value)

    row = new_row()
    for position in range(MAX_FARTHEST):
        add_passing(float(position), position)
    add_passing(9.5, 10)
    assert worst_hosts(row.judged({}))[-1] == "h9"
    add_passing(8.5, 11)
    assert worst_hosts(row.judged({}))[-2:] == ["h8", "h11"]
    # Among hosts with equal values, those that come first in the plan are listed, also after merging.
    other = new_row()
    for position in range(60, 40, -1):
        other.add_pass(3.0, position, f"h{position}", "gpu=0")
    row = new_row()
    for position in range(80, 60, -1):
        add_passing(3.0, position)
    row.update(other)
    assert [far[5] for far in row.farthest] == [f"h{position}" for position in range(41, 51)]
    add_passing(3.0, 7)
    assert row.farthest[0][5] == "h7"
    add_passing(2.0, 99)
    assert [far[5] for far in row.farthest][:2] == ["h99", "h7"]


def test_row_can_have_texts_and_numbers() -> None:
    """The number equals the limit, so neither value is worse. The order of the plan decides which one is listed first.

    `values` counts only texts, also after a merge.
    """
    for values in (("a", 5.0), (5.0, "a")):
        row = new_row(operator="eq")
        for position, value in enumerate(values):
            add_value(row, position, value)
        assert worst_hosts(row.judged({})) == ["h0", "h1"]
        other = new_row()
        other.update(row)
        assert other.judged({}).values == {"a": 1}


def test_repeated_passes_are_listed_with_their_serials() -> None:
    row = new_row()
    row.add_repeated(7.0, 5.0, [(0, "h0")], 1, "gpu=0")
    add_value(row, 1, 8.0)
    assert [far.serial for far in row.judged({("h0", "gpu=0"): "S"}).farthest] == ["S", "S1"]


def test_whole_numbers_below_2_to_the_53_have_no_decimal_point() -> None:
    for value, expected in ((2.0**53, "9007199254740992.0"), (2.0**53 - 1, "9007199254740991"),
        (-(2.0**53), "-9007199254740992.0"),
                        (1.5, "1.5"), (-3.0, "-3")):  # fmt: skip
        row = new_row()
        add_value(row, 0, value)
        spread = row.judged({}).spread
        assert spread
        assert str(spread.min) == expected


def test_source_basis_unit_and_operator_of_a_merged_row_do_not_depend_on_the_order_of_merging() -> None:
    expected = [("b", "policy", "W", "ge"), ("a", "measured", "B/s", "gt"), ("c", "policy", "1", "eq")]
    for order in (expected, expected[::-1]):
        row = new_row(source=order[0][0], basis=order[0][1], unit=order[0][2], operator=order[0][3])
        for description in order[1:]:
            other = new_row(**dict(zip(("source", "basis", "unit", "operator"), description, strict=True)))
            row.update(other)
        assert (row.source, row.basis, row.unit, row.operator) == ("a", "measured", "W", "gt")


def test_more_severe_action_is_selected() -> None:
    assert more_severe("none", "rma") == more_severe("rma", "none") == "rma"
    assert more_severe("reboot", "inspect_hardware") == "inspect_hardware"
    assert more_severe("unknown", "none") == more_severe("none", "unknown") == "none"
    row, other = new_row(), new_row(action="rma")
    row.update(other)
    assert row.action == "rma"


# Tallies


def tally_of(*verdicts: Verdict) -> Tally:
    tally = Tally(PLANNED, {f"h{at}": at for at in range(9)})
    for item in verdicts:
        tally.add(item)
    return tally


def test_verdicts_of_one_criterion_on_one_figure_are_one_row() -> None:
    same = [verdict("h1"), verdict("h2", 7.0, verdict=FAIL, action="rma"), verdict("h3", scope="gpu=1")]
    (judged,) = tally_of(*same).judged()
    assert (judged.passed, judged.failed, judged.action) == (2, 1, "rma")
    assert worst_hosts(judged) == ["h2", "h1", "h3"]
    others = [
        verdict(criterion="d"), verdict(name="gemm.other"), verdict(stage="gang"), verdict(params={"dtype": "fp8"}),
    ]  # fmt: skip
    assert len(tally_of(verdict(), *others).judged()) == 5
    readings = [verdict(name="gpu.thing", stage=stage, params={"phase": stage}) for stage in ("preflight", "gang")]
    (reading,) = tally_of(*readings).judged()
    assert (reading.stage, reading.params) == ("", {})
    pairs = [verdict(name="pairs.bandwidth", params={"partner": name}) for name in ("h2", "h3")]
    assert len(tally_of(*pairs).judged()) == 1


def test_passing_row_has_no_action() -> None:
    (judged,) = tally_of(verdict(action="rma")).judged()
    assert judged.action == "none"


def test_rows_are_sorted_by_criterion_then_name_then_settings() -> None:
    mixed = [
        verdict(criterion="b"), verdict(criterion="a", name="z.x", params={"size": 2}),
        verdict(criterion="a", name="z.x", params={"size": 10}), verdict(criterion="a"),
    ]  # fmt: skip
    for order in (mixed, mixed[::-1]):
        judged = [(item.criterion, item.name, dict(item.params)) for item in tally_of(*order).judged()]
        assert judged == [
            ("a", "gemm.throughput", {}), ("a", "z.x", {"size": 10}), ("a", "z.x", {"size": 2}), ("b", "gemm.throughput", {}),
        ]  # fmt: skip


def test_source_and_operator_of_a_row_do_not_depend_on_the_order_of_its_verdicts() -> None:
    for source, operator in (("a", "gt"), ("a", "ge"), ("b", "gt")):
        verdicts = [
            verdict(source="b", operator="ge"),
            verdict("h2", source=source, operator=operator),
            verdict("h3", source="b"),
        ]
        for order in (verdicts, verdicts[::-1]):
            (judged,) = tally_of(*order).judged()
            assert (judged.source, judged.operator) == (source, operator)


def test_merged_tallies_equal_one_tally_of_all_verdicts() -> None:
    row, other = tally_of(verdict("h1")), tally_of(verdict("h2", 3.0, verdict=FAIL), verdict(criterion="d"))
    row.update(other)
    merged = tally_of(verdict("h1"), verdict("h2", 3.0, verdict=FAIL), verdict(criterion="d"))
    assert row.judged() == merged.judged()
    assert worst_hosts(tally_of(verdict("unknown-host"), verdict("h1", 1.0)).judged()[0]) == ["h1", "unknown-host"]


@pytest.mark.parametrize(("part", "serial"), [("", "S1"), ("rail=1", "")])
def test_serial_of_a_gpu_is_left_out_if_another_part_is_at_fault(part: str, serial: str) -> None:
    (judged,) = tally_of(verdict(verdict=FAIL, value=1.0, serial="S1", part=part)).judged()
    (worst,) = judged.farthest
    assert worst.serial == serial


def test_host_that_is_not_planned_precedes_planned_hosts_with_the_same_value() -> None:
    (judged,) = tally_of(verdict("h0"), verdict("new"), verdict("h2", 8.0)).judged()
    assert worst_hosts(judged) == ["h2", "new", "h0"]


@pytest.mark.parametrize(("operator", "lowest_first"), [("ge", True), ("gt", True), ("le", False), ("lt", False)])
def test_lowest_or_highest_number_is_the_worst_depending_on_the_operator(operator: str, lowest_first: bool) -> None:
    tally = Tally(PLANNED, {"h1": 0})
    row = tally.row(verdict(operator=operator))
    for position in range(2 * MAX_FARTHEST):
        row.add_pass(float(position), position, f"h{position}", "gpu=0")
    (judged,) = tally.judged()
    assert judged.farthest[0].value == (0.0 if lowest_first else 2 * MAX_FARTHEST - 1)


def test_row_without_a_verdict_is_not_reported() -> None:
    tally = Tally(PLANNED, {})
    tally.row(verdict())
    assert tally.judged() == ()
