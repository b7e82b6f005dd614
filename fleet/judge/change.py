"""Compute by how much a counter rose over the run, and in which stage.

A counter that is lower than before was reset (the driver was reloaded, or the part was reset). Its new value then counts as an
increase; what it counted between the last reading and the reset is lost. The timestamp of the newest event (`NEWEST`) is an
exception: a lower value does not mean a reset.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.quantities import quantity
from schemas.records import Observation, Value

NEWEST = ".last_seen"
"""Suffix of the names of readings whose value is the timestamp of the newest event in a log. Such a value falls if the log is
truncated; that is not a reset."""


@dataclass(frozen=True, kw_only=True)
class CounterChange:
    """How one counter changed from the first snapshot to the last."""

    total: Value
    """The increase; if the value of a reading is not a number, that value, which no numeric limit accepts."""
    reading: Observation
    """First the stage is chosen in which the counter rose most, then the reading of this stage after the largest increase. For
    the timestamp of the newest event, the reading that first showed the newest event. If the value of a reading is not a number,
    that reading."""
    stage: str
    """The stage of `reading`; empty if the increase was before the stage began, or if the counter did not rise."""
    where: str
    """The increase in each stage, in words: `3 in stage gang, 0 in stage benchmark`. For the timestamp of the newest event:
    `the newest at an uptime of 5000 s, in stage gang`."""
    drop: str
    """The first reset, in words: `fell from 9 to 2 in stage gang`; empty if there was none."""


def change(readings: Sequence[Observation]) -> CounterChange:
    """Return the change of a counter over its readings: at least two, in the order of time."""
    if bad := _non_numeric(readings):
        return CounterChange(total=bad.value, reading=bad, stage=bad.stage, where=f"not a number {_when(bad)}", drop="")
    if readings[0].name.endswith(NEWEST):
        readings = _running_maximum(readings)
    steps = [(_rise(earlier, later), earlier, later) for earlier, later in itertools.pairwise(readings)]
    rises: dict[str, float] = {}
    for rise, _, later in steps:
        rises[_when(later)] = rises.get(_when(later), 0) + rise
    newer = [step for step in steps if step[0] > 0]
    if readings[0].name.endswith(NEWEST) and newer:
        _, earlier, chosen = newer[-1]
        most = _when(chosen)
    else:
        most = max(rises, key=lambda when: rises[when])
        _, earlier, chosen = max((step for step in steps if _when(step[2]) == most), key=lambda step: step[0])
    total = sum(rise for rise, _, _ in steps)
    return CounterChange(
        total=total,
        reading=chosen,
        stage="" if _is_before(chosen) or not total else chosen.stage,
        where=_where(rises, most, earlier, chosen),
        drop=next((_drop(earlier, later) for _, earlier, later in steps if _was_reset(earlier, later)), ""),
    )


def _running_maximum(readings: Sequence[Observation]) -> list[Observation]:
    """Return the readings, each with the largest value so far.

    A reading may miss an event that the reading before it found. If the next reading finds it again, the event is not a new one.
    """
    latest = itertools.accumulate((number(item.value) for item in readings), max)
    return [replace(item, value=value) for item, value in zip(readings, latest, strict=True)]


def net_change(readings: Sequence[Observation]) -> Value:
    """Return the last value minus the first; if the value of a reading is not a number, that value."""
    if bad := _non_numeric(readings):
        return bad.value
    return number(readings[-1].value) - number(readings[0].value)


def _non_numeric(readings: Sequence[Observation]) -> Observation | None:
    return next((item for item in readings if math.isnan(number(item.value))), None)


def number(value: Value) -> float:
    """Return the value as a float. If it is not a number, return NaN, which satisfies no limit."""
    return float(value) if isinstance(value, int | float) else math.nan


def _rise(earlier: Observation, later: Observation) -> float:
    before, after = number(earlier.value), number(later.value)
    return max(after if _was_reset(earlier, later) else after - before, 0.0)


def _was_reset(earlier: Observation, later: Observation) -> bool:
    return number(later.value) < number(earlier.value) and not later.name.endswith(NEWEST)


def _is_before(later: Observation) -> bool:
    """Return whether the reading is from the first snapshot of a stage: its increase happened before the stage."""
    return later.params.get("phase") == "before"


def _when(later: Observation) -> str:
    return f"{'before' if _is_before(later) else 'in'} stage {later.stage}"


def _where(rises: Mapping[str, float], most: str, earlier: Observation, chosen: Observation) -> str:
    phases = earlier.params.get("phase"), chosen.params.get("phase")
    within = earlier.stage == chosen.stage and phases not in (("before", "after"), ("after", "before"))
    between = f" between its snapshots {phases[0]} and {phases[1]}" if within else ""
    if chosen.name.endswith(NEWEST):
        return f"the newest at an uptime of {quantity(chosen.value, chosen.unit)}, {most}{between}"
    others = [f"{rise:g} {when}" for when, rise in rises.items() if when != most and (rise or when.startswith("in"))]
    return ", ".join([f"{rises[most]:g} {most}{between}", *others])


def _drop(earlier: Observation, later: Observation) -> str:
    return f"fell from {number(earlier.value):g} to {number(later.value):g} {_when(later)}"
