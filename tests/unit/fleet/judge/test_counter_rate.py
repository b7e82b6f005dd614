"""Test the hourly rates of counters: the readings that decide a rate, and the hours over which a counter counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from fleet.judge.counter_rate import (
    COUNTER_AGE,
    UPTIME,
    deciding_readings,
    describe_age,
    hours_before,
    hours_of_run,
    least_rate,
)
from fleet.judge.host_view import HostView
from schemas.records import Metric, Snapshot, Value
from tests.unit.fleet.judge.small_fleet import criterion, host_view, one_figure_plan

PORT = "hca=mlx5_0,port=1"
ERRORS, CARRIER_CHANGES = "port.symbol_errors", "network.carrier_changes"
PLAN = one_figure_plan("h1")
HOUR = 3600.0
Readings = Mapping[str, Value]
"""Name of a reading -> its value, or a text such as `error: lost` (status and reason) if it has no value."""


def metric(name: str, value: Value) -> Metric:
    """Return a reading with one scope: the host for the uptime, PORT for every other reading."""
    scope = "host" if name == UPTIME else PORT
    is_absent = isinstance(value, str) and ": " in value
    return Metric(
        name=name,
        unit="1",
        values={} if is_absent else {scope: value},
        absent={scope: str(value)} if is_absent else {},
    )


def view_of(*snapshots: tuple[str, str, Readings]) -> HostView:
    """Return a host with a snapshot every hour, each given by its stage, phase and readings."""
    taken = tuple(
        Snapshot(
            stage=stage,
            phase=phase,
            at=f"2026-11-21T{hour:02d}:00:00Z",
            duration_s=0.1,
            metrics=tuple(metric(name, value) for name, value in readings.items()),
        )
        for hour, (stage, phase, readings) in enumerate(snapshots)
    )
    return host_view(PLAN, snapshots=taken)


@pytest.mark.parametrize(
    ("counts", "bases", "per_hour", "expected"),
    [
        ((5, 5), (UPTIME, COUNTER_AGE), True, (ERRORS, UPTIME, COUNTER_AGE)),
        ((5, 5), (UPTIME,), True, (ERRORS, UPTIME)),
        ((5, 5), (), True, (ERRORS,)),
        ((0, 5), (UPTIME,), True, (ERRORS, UPTIME)),
        ((0, 0), (UPTIME,), True, (ERRORS,)),
        (("error: lost", "error: lost"), (UPTIME,), True, (ERRORS,)),
        ((5, 5), (UPTIME,), False, (ERRORS,)),
    ],
)
def test_uptime_and_counter_age_decide_only_hourly_rates_of_counters_above_0(
    counts: tuple[Value, Value], bases: tuple[str, ...], per_hour: bool, expected: tuple[str, ...]
) -> None:
    ages = dict.fromkeys(bases, 1.0)
    phases = zip(("before", "after"), counts, strict=True)
    view = view_of(*(("benchmark", phase, {ERRORS: count, **ages}) for phase, count in phases))
    rule = criterion(ERRORS, operator="le", value=120, per_hour=per_hour, scope="port")
    assert deciding_readings(view, rule, (ERRORS,)) == expected


@pytest.mark.parametrize(
    ("name", "ages", "hours"),
    [
        (ERRORS, {COUNTER_AGE: 48 * HOUR, UPTIME: 100 * HOUR}, 48.0),
        (ERRORS, {UPTIME: 100 * HOUR}, 100.0),
        (ERRORS, {COUNTER_AGE: 0.0, UPTIME: 100 * HOUR}, 24.0),  # the result is never below 24 hours
        (ERRORS, {COUNTER_AGE: "unsupported: no such counter", UPTIME: 100 * HOUR}, 100.0),
        (ERRORS, {COUNTER_AGE: "long", UPTIME: 100 * HOUR}, 100.0),
        (ERRORS, {UPTIME: 60}, 24.0),
        (ERRORS, {}, None),
        # The counter age of a port applies only to counters whose names begin with `port.`.
        (CARRIER_CHANGES, {COUNTER_AGE: 48 * HOUR, UPTIME: 100 * HOUR}, 100.0),
    ],
)
def test_counter_is_assumed_to_count_since_it_was_cleared_or_else_since_the_host_started(
    name: str, ages: Readings, hours: float | None
) -> None:
    view = view_of(("benchmark", "before", {name: 5, **ages}))
    assert hours_before(view, view.observations[name][0]) == hours


def test_hours_before_a_reading_come_from_the_snapshot_of_the_reading() -> None:
    snapshots = [("preflight", "before", 30), ("benchmark", "before", 40), ("benchmark", "after", 50)]
    view = view_of(*((stage, phase, {ERRORS: 5, UPTIME: hours * HOUR}) for stage, phase, hours in snapshots))
    assert [hours_before(view, reading) for reading in view.observations[ERRORS]] == [30.0, 40.0, 50.0]


@pytest.mark.parametrize(
    ("uptimes", "hours"),
    [
        ([1, 4], 3.0),
        ([90, 90.0001], 1 / 12),  # the result is never below five minutes
        ([None, 1], None),
        ([1, None], None),
        ([1, None, 4], 3.0),
        ([0, 1], 1.0),
        # The host rebooted between the second and the third snapshot. Only the half hour after the reboot is added.
        ([90, 92, 0.5, 3], 5.0),
        # After a reboot, the third uptime would be at most an hour. So the host did not reboot: its clock was set back, and the
        # second and the third snapshot are in the wrong order. For this step, the hour between their dates is added.
        ([90, 92, 91.9, 93], 4.1),
        ([90, 92, 93, 95], 5.0),
    ],
)
def test_hours_of_a_run_are_the_time_during_which_the_host_was_up(
    uptimes: list[float | None], hours: float | None
) -> None:
    """The snapshots are an hour apart. All but the first have the same stage and phase, as in a soak that was interrupted.

    `uptimes`: the uptime in each snapshot, in hours; None: the snapshot lacks it.
    """
    phases = ["before", *["after"] * (len(uptimes) - 1)]
    view = view_of(*(
        ("soak", phase, {ERRORS: 5} if uptime is None else {ERRORS: 5, UPTIME: uptime * HOUR})
        for phase, uptime in zip(phases, uptimes, strict=True)
    ))  # fmt: skip
    assert hours_of_run(view) == (None if hours is None else pytest.approx(hours))


@pytest.mark.parametrize(
    ("uptimes", "position", "hours"),
    [
        *(([90.0, 91.0, 92.0], position, 2.0) for position in range(3)),
        ([90.0, 1.0, 2.0], 0, None),
        ([90.0, 1.0, 2.0], 1, None),
        ([90.0, 1.0, 2.0], 2, 2.0),
    ],
)
def test_invalid_date_of_a_snapshot_matters_only_next_to_a_reboot(
    uptimes: list[float], position: int, hours: float | None
) -> None:
    """`position`: which of the three snapshots has a date that does not exist. A fall of the uptime shows a reboot."""
    readings: list[tuple[str, str, Readings]] = [
        ("soak", phase, {ERRORS: 5, UPTIME: uptime * HOUR})
        for phase, uptime in zip(("before", "during", "after"), uptimes, strict=True)
    ]
    view = view_of(*readings)
    snapshots = list(view.evidence.snapshots())
    snapshots[position] = replace(snapshots[position], at="2026-02-30T00:00:00Z")
    damaged = host_view(PLAN, snapshots=tuple(snapshots))
    assert [item.at for item in damaged.evidence.snapshots()].count("2026-02-30T00:00:00Z") == 1
    assert hours_of_run(damaged) == hours


@pytest.mark.parametrize(
    ("count", "hours", "rate"),
    [(-1, 1.0, 0.0), (0, 1.0, 0.0), (1, 1.0, 0.0), (2, 1.0, 0.026738), (100, 1.0, 72.626), (100, 4.0, 18.1565)],
)
def test_least_rate_is_a_lower_confidence_limit(count: float, hours: float, rate: float) -> None:
    """The true rate per hour is at least `rate`, with a confidence of 99.87 %. A single event shows no rate above 0."""
    assert least_rate(count, hours) == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize(
    ("hours", "increase", "text"),
    [
        (24.0, 0, "7 counted in at most 24 h before the run, unchanged during the run"),
        (25.0, 0, "7 counted in 25 h before the run, unchanged during the run"),
        (47.94, 0, "7 counted in 47.9 h before the run, unchanged during the run"),
        (48.0, 1, "7 counted in 2 days before the run, 1 more during the run"),
        (100.0, 1, "7 counted in 4.17 days before the run, 1 more during the run"),
    ],
)
def test_age_is_in_hours_below_two_days_and_otherwise_in_days(hours: float, increase: float, text: str) -> None:
    assert describe_age(hours, 7, increase) == text
