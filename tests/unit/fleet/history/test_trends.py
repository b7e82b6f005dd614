"""A rack that drifts is found even if each rack is measured in separate runs. A change in only one run is no drift."""

from __future__ import annotations

import random

import pytest

from fleet.history.trends import drifts
from tests.unit.fleet.history.memory import Level, memory_history

MONTHS = 16
FAR = 900.0
"""Days since the first run. The regular runs end about 450 days earlier."""


def racks(
    count: int, *, per_year: float = 0.0, odd: float = 0.0, reference: str = "", noise: float = 0.003
) -> list[Level]:
    """Return racks, each measured in a separate run every month.

    Args:
        count: number of racks.
        per_year: drift of rack 0: change of the logarithm of its figure in a year.
        odd: change of the logarithm in one additional run of rack 0, on day FAR; 0: there is no such run.
        reference: `run`: as if each figure had been divided by the median of other racks in its run; "": not divided.
        noise: standard deviation of the logarithm of a figure.
    """
    generator = random.Random(7)  # noqa: S311
    rows: list[Level] = []
    for rack in range(count):
        for month in range(MONTHS):
            log = generator.gauss(0, noise) + per_year * month / 12 * (rack == 0)
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


def test_drift_of_one_of_two_racks_needs_a_lower_z_than_one_of_many() -> None:
    """Its z is 3.47. The limit is 2.81 for two tested series, and more than 3.5 only if more than 22 series are tested."""
    (item,) = drifts(memory_history(racks(2, per_year=-0.015, noise=0.006)))
    assert item.id == "r0"
    assert 3.3 < item.z < 3.5


@pytest.mark.parametrize("reference", ["", "run"])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_one_run_with_a_wrong_date_is_no_drift(count: int, reference: str) -> None:
    """One run, more than a year after the others, is 5 % slower. A wrong date or the state of the rack may explain that."""
    assert drifts(memory_history(racks(count, odd=-0.05, reference=reference))) == []
