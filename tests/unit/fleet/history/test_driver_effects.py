"""A change is attributed to a driver only if it exceeds the scatter between runs.

The scatter between hosts is no suitable measure: a peculiarity of one run changes the figures of all hosts of the run alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from fleet.history.database import History
from fleet.history.driver_effects import CLEAR, CONFOUNDED, DriverEffect, driver_effects, fit_step
from fleet.history.regression import normal_deviate, weakest_z
from fleet.judge.student import t_quantile
from tests.unit.fleet.history.memory import memory_history

HOSTS, OLD, NEW = 40, "560", "570"
Effect = Callable[[float, bool], float]
"""(Day, whether the driver is new) -> change of the logarithm of the figure, the same on all hosts."""


def history_of(days: list[float], changed_on: float, shared: Effect, *, run_sigma: float, seed: int) -> History:
    """Return a history of runs of all hosts. Each host has its own level and little noise.

    Args:
        days: when the runs began.
        changed_on: the day from which all hosts have the new driver.
        shared: effect that all hosts have in common.
        run_sigma: standard deviation of the noise in ln(figure) that all hosts of a run share.
        seed: seed of the random numbers.
    """
    generator = random.Random(seed)  # noqa: S311
    levels = [generator.gauss(0, 0.02) for _ in range(HOSTS)]
    rows = []
    for day in days:
        is_new = day >= changed_on
        run = shared(day, is_new) + generator.gauss(0, run_sigma)
        for host, level in enumerate(levels):
            rows.append(
                ("host", f"h{host}", day, NEW if is_new else OLD, level + run + generator.gauss(0, 0.001), "run")
            )
    return memory_history(rows)


def effects_of(
    days: list[float], changed_on: float, shared: Effect, *, run_sigma: float = 0.003, seed: int = 0
) -> list[DriverEffect]:
    return driver_effects(history_of(days, changed_on, shared, run_sigma=run_sigma, seed=seed))


WEEKS = [7.0 * number for number in range(20)]


def step(_: float, is_new: bool) -> float:
    return 0.02 * is_new


@pytest.mark.parametrize("seed", range(4))
def test_step_of_a_driver_is_found_with_its_interval(seed: int) -> None:
    (effect,) = effects_of(WEEKS, 70, step, seed=seed)
    assert effect.error
    assert (effect.finding, effect.hosts, effect.weeks_old, effect.weeks_new) == (CLEAR, HOSTS, 10, 10)
    assert 0.002 < effect.error < 0.012
    assert abs(effect.change - math.expm1(0.02)) < 2 * effect.error


@pytest.mark.parametrize("seed", range(6))
def test_scatter_between_runs_is_not_attributed_to_a_driver(seed: int) -> None:
    """The 40 hosts are not 40 independent samples: all change together from run to run."""
    assert effects_of(WEEKS, 70, lambda *_: 0.0, run_sigma=0.02, seed=seed) == []


def test_slow_drift_of_the_fleet_is_not_attributed_to_a_driver() -> None:
    assert effects_of(WEEKS, 70, lambda day, _: -0.05 * day / 140, run_sigma=0.001) == []


YEAR = [7.0 * number for number in range(60)]


def season(size: float, phase: float, change: float = 0.0) -> Effect:
    """Return the effect of a season: `size` is the highest value minus the lowest. The driver adds `change`."""
    return lambda day, is_new: size / 2 * math.sin(2 * math.pi * (day / 365.25 + phase)) + change * is_new


@pytest.mark.parametrize("size", [0.005, 0.02])
@pytest.mark.parametrize("changed_on", [28.0, 133.0, 210.0, 350.0])
@pytest.mark.parametrize("phase", [0.0, 0.25, 0.4])
def test_season_is_not_attributed_to_the_driver(size: float, changed_on: float, phase: float) -> None:
    assert effects_of(YEAR, changed_on, season(size, phase), run_sigma=0.0008) == []


@pytest.mark.parametrize("phase", [0.0, 0.25, 0.5, 0.75])
def test_step_of_a_driver_is_found_in_a_season(phase: float) -> None:
    (effect,) = effects_of(YEAR, 210, season(0.01, phase, 0.02), run_sigma=0.0008)
    assert (effect.finding, effect.weeks_old, effect.weeks_new) == (CLEAR, 14, 15)
    assert effect.change == pytest.approx(math.expm1(0.02), abs=0.003)


def test_runs_long_before_and_after_the_change_of_the_driver_do_not_count() -> None:
    days = [0, 7, 14, 21, 28, *(200.0 + 7 * number for number in range(5))]
    (effect,) = effects_of(days, 200, step)
    assert (effect.finding, effect.weeks_old, effect.weeks_new) == (CONFOUNDED, 0, 0)


@pytest.mark.parametrize(
    "days",
    [
        [0, 7, 70, 77],
        [0, 7, 14, 70, 77],
        # 40 runs on day 0 and, after the change of the driver, 40 on day 70. The runs of a week count as one value.
        [0.01 * number for number in range(40)] + [70 + 0.01 * number for number in range(40)],
    ],
    ids=["two weeks of each driver", "three weeks of the old and two of the new driver", "one day of each driver"],
)
def test_effect_in_few_weeks_cannot_be_separated_from_the_date(days: list[float]) -> None:
    (effect,) = effects_of(days, 70, step)
    assert (effect.finding, effect.error) == (CONFOUNDED, None)
    assert effect.change == pytest.approx(0.02, abs=0.01)


def test_interval_contains_the_true_step_in_95_percent_of_the_fits() -> None:
    """With three weeks for each driver, the fit has three degrees of freedom: ±1.96 standard errors would be too narrow."""
    generator = random.Random(5)  # noqa: S311
    inside = false_alarms = 0
    for _ in range(2000):
        values = [(float(week), week > 2, 0.01 * (week > 2) + generator.gauss(0, 0.003)) for week in range(6)]
        fitted = fit_step(values)
        assert fitted
        change, error, freedom = fitted
        inside += abs(change - 0.01) < t_quantile(0.975, freedom) * error
        false_alarms += normal_deviate((change - 0.01) / error, freedom) > 3
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)
    assert false_alarms / 2000 < 0.006  # 0.0027 is expected for 3 standard deviations


def test_one_outlier_does_not_make_a_drift_significant() -> None:
    generator = random.Random(3)  # noqa: S311
    noise = [generator.gauss(0, 0.003) for _ in range(20)]
    months = [("", 30.0 * number, value) for number, value in enumerate(noise)]
    odd = [("", -20_000.0, 0.05), *months]
    drift = [(group, day, value - 0.0003 * day / 10) for group, day, value in months]
    assert weakest_z(odd, slope=-1.0) < 3
    assert weakest_z(drift, slope=-1.0) > 5
    eras = [("old" if day < 300 else "new", day, value + 0.5 * (day >= 300)) for _, day, value in drift]
    assert weakest_z(eras, slope=-1.0) > 3, "a change of the level between two drivers must not hide the drift"
    assert weakest_z(months[:3], slope=1.0) == 0, "three points are too few"
