"""A rack that drifts is found even if each rack is measured in separate runs. A change in only one run is no drift."""

from __future__ import annotations

import random

import pytest

from fleet.history.trends import drifts
from tests.unit.fleet.history.memory import Level, memory_history

MONTHS = 16
FAR = 900.0
"""Day of the additional run of rack 0, counted from the first run. The regular runs end about 450 days earlier."""


def racks(
    count: int, *, per_year: float = 0.0, odd: float = 0.0, reference: str = "", noise: float = 0.003
) -> list[Level]:
    """Return racks, each measured in a separate run every month.

    Args:
        count: number of racks.
        per_year: change of ln(figure) of rack 0 in a year.
        odd: change of ln(figure) in one additional run of rack 0, on day FAR; 0: there is no such run.
        reference: `run` or empty: the last item of each row, see `memory.Level`.
        noise: standard deviation of ln(figure).
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


def test_drift_needs_a_lower_z_if_fewer_racks_are_tested() -> None:
    """The z of this drift is 3.47. The limit for z is 2.81 if two racks are tested, and 3.48 if 20 racks are tested."""
    (item,) = drifts(memory_history(racks(2, per_year=-0.015, noise=0.006)))
    assert item.id == "r0"
    assert 3.3 < item.z < 3.5


@pytest.mark.parametrize("reference", ["", "run"])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_change_in_only_one_run_is_no_drift(count: int, reference: str) -> None:
    """One run of rack 0 is 5 % slower, and its date is more than a year after the others. Such a date may be wrong."""
    assert drifts(memory_history(racks(count, odd=-0.05, reference=reference))) == []
