"""If a figure passes in every pair that a host forms with other hosts, these passes are counted without creating verdicts.

This is done only if the figures of the pairs are alike, so that one limit applies to all of them (`are_alike`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.layout import HostValues
from fleet.judge.partner_checks import PartnerCheck, are_alike
from fleet.judge.row import TallyRow
from schemas.records import Observation
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1")


def pair(value: Any = 5.0, partner: str = "h2", name: str = "pairs.bandwidth", **params: Any) -> Observation:
    return builders.observation(name, value, scope=f"gpu=0,partner={partner}", unit="B/s", **params)


def values_of(*pairs: Observation) -> HostValues:
    return HostValues(host_view(PLAN, observations=pairs))


def row() -> TallyRow:
    return TallyRow(
        criterion="c", name="pairs.bandwidth", stage="", params={}, unit="B/s", operator="ge", source="s", basis="b"
    )


@pytest.mark.parametrize(
    ("pairs", "count"),
    [
        ([pair(5.0), pair(6, "h3")], 2),
        ([pair(4.9), pair(6, "h3")], None),
        ([pair(True), pair(6, "h3")], None),
        ([pair("fast"), pair(6, "h3")], None),
        ([pair(5.0), pair(6)], None),
        ([pair(5.0), pair(1.0, name="pairs.latency")], 1),
        ([], 0),
    ],
    ids=[
        "all pass",
        "one pair below the limit",
        "a boolean instead of a number",
        "a text instead of a number",
        "two figures of one pair",
        "a figure of another name is ignored",
        "no pair",
    ],
)
def test_passes_are_counted_only_if_each_pair_has_one_number_that_passes(
    pairs: Sequence[Observation], count: int | None
) -> None:
    counted = row()
    check = PartnerCheck(name="pairs.bandwidth", operator="ge", limit=5.0, row=counted)
    assert check.count_passes(values_of(*pairs), 0) == count
    assert counted.total == (count or 0)


def test_row_keeps_value_host_and_pair_of_a_counted_pass() -> None:
    counted = row()
    PartnerCheck(name="pairs.bandwidth", operator="ge", limit=5.0, row=counted).count_passes(values_of(pair(7.0)), 3)
    ((_, quality, position, scope, value, host, serial, _),) = counted.farthest
    assert (quality, position, scope, value, host, serial) == (7.0, 3, "gpu=0,partner=h2", 7.0, "h1", "")


@pytest.mark.parametrize(
    ("judged", "others", "expected"),
    [
        ([pair(), pair(6.0, "h3")], [], True),
        ([pair(size=2), pair(6.0, "h3", size=2)], [], True),
        ([pair(size=2, op="write"), pair(6.0, "h3", op="write", size=2)], [], True),
        ([pair(size=1), pair(6.0, "h3", size=2)], [], False),
        ([pair(), replace(pair(6.0, "h3"), stage="gang")], [], False),
        ([pair(), replace(pair(6.0, "h3"), unit="1")], [], False),
        ([pair()], [pair(6.0, "h3")], False),
        ([pair()], [pair(1.0, name="pairs.latency")], True),
        ([pair(), pair(1.0, name="pairs.latency")], [], False),
    ],
    ids=[
        "alike",
        "same params",
        "same params in another order",
        "different params",
        "different stages",
        "different units",
        "a figure of this name is not judged",
        "a figure of another name is not judged",
        "figures of two names",
    ],
)
def test_condition_for_one_limit_on_the_figures_of_all_pairs(
    judged: list[Observation], others: list[Observation], expected: bool
) -> None:
    """The judged figures must differ only in pair and value. No other figure of a pair may have their name."""
    values = values_of(*judged, *others)
    by_name = {(item.name, item.scope): item for item in values.pair_observations}
    series = [[by_name[(item.name, item.scope)]] for item in judged]
    assert are_alike(values, series) is expected
