"""A drift is one that no single run makes, also of racks that are alone in their runs."""

from __future__ import annotations

import random

import pytest

from fleet.history.trends import drifts
from tests.unit.fleet.history.memory import Level, memory_history

MONTHS, FAR = 16, 900.0


def racks(count: int, *, per_year: float = 0.0, odd: float = 0.0) -> list[Level]:
    """Return racks with a run of their own each month; rack 0 drifts, or has one more run with another date."""
    generator = random.Random(7)  # noqa: S311
    rows: list[Level] = []
    for rack in range(count):
        for month in range(MONTHS):
            log = generator.gauss(0, 0.003) + per_year * month / 12 * (rack == 0)
            rows.append(("rack", f"r{rack}", 30.0 * month + rack, "570", log, ""))
        rows += [("rack", "r0", FAR, "570", odd, "")] if rack == 0 and odd else []
    return rows


@pytest.mark.parametrize("count", [2, 3, 6])
def test_rack_that_drifts_is_found(count: int) -> None:
    (item,) = drifts(memory_history(racks(count, per_year=-0.05)))
    assert item.id == "r0"
    assert abs(item.per_year + 0.05) < 2 * item.error


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_one_run_with_a_wrong_date_is_no_drift(count: int) -> None:
    """Two years after the others, and 5 % slower: the rack was cold, or waited for parts."""
    assert drifts(memory_history(racks(count, odd=-0.05))) == []
