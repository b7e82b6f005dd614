"""A rack that drifts is found even if each rack is measured in separate runs. A change in only one run is no drift."""

from __future__ import annotations

import random

import pytest

from fleet.history.trends import drifts
from tests.unit.fleet.history.memory import Level, memory_history

MONTHS = 16
FAR = 900.0
"""Days since the first run. The regular runs end about 450 days earlier."""


def racks(count: int, *, per_year: float = 0.0, odd: float = 0.0, reference: str = "") -> list[Level]:
    """Return racks, each measured in a separate run every month.

    Args:
        per_year: drift of rack 0: change of the logarithm of its figure in a year.
        odd: change of the logarithm in one additional run of rack 0, on day FAR; 0: there is no such run.
        reference: `run`: as if each figure had been divided by the median of other racks in its run; "": not divided.
    """
    generator = random.Random(7)  # noqa: S311
    rows: list[Level] = []
    for rack in range(count):
        for month in range(MONTHS):
            log = generator.gauss(0, 0.003) + per_year * month / 12 * (rack == 0)
            rows.append(("rack", f"r{rack}", 30.0 * month + rack, "570", log, reference))
        rows += [("rack", "r0", FAR, "570", odd, reference)] if rack == 0 and odd else []
    return rows


@pytest.mark.parametrize(("count", "reference"), [(2, ""), (3, ""), (6, ""), (1, "run"), (6, "run")])
def test_rack_that_drifts_is_found(count: int, reference: str) -> None:
    (item,) = drifts(memory_history(racks(count, per_year=-0.05, reference=reference)))
    assert item.id == "r0"
    assert item.per_year
    assert item.error
    assert abs(item.per_year + 0.05) < 2 * item.error


@pytest.mark.parametrize("reference", ["", "run"])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_one_run_with_a_wrong_date_is_no_drift(count: int, reference: str) -> None:
    """One run, more than a year after the others, is 5 % slower. A wrong date or the state of the rack may explain that."""
    assert drifts(memory_history(racks(count, odd=-0.05, reference=reference))) == []
