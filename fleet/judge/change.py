"""By how much a counter rose over the run, and in which stage.

A counter that is lower than before was reset (the driver was reloaded, or the part was reset). The new value is added to the old
one; increments between the last reading and the reset are lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.quantities import quantity
from schemas.records import Observation, Value

NEWEST = ".last_seen"
"""Last part of the names of timestamps of the newest event: they fall when the log is truncated, which is no reset."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one counter from the first snapshot to the last."""

    total: Value
    """What it rose by; what was read in place of a number, with which no limit agrees."""
    seen: Observation
    """The reading by which most of that had come, or by which the newest event had."""
    stage: str
    """The stage in which it came; empty where that was before a stage began, or never."""
    where: str
    """`3 in stage gang, 0 in stage benchmark`; `the newest at an uptime of 5000 s, in stage gang`."""
    fell: str
    """Where it was found lower than before, and by how much; empty where it was not."""


def change(observation: Sequence[Observation]) -> Change:
    """The change over readings of one counter, at least two, in the order in which they were made."""
    if none := _no_number(observation):
        return Change(total=none.value, seen=none, stage=none.stage, where=f"no number {_place(none)}", fell="")
    if observation[0].name.endswith(NEWEST):
        observation = _remembered(observation)
    steps = [(_rise(earlier, later), earlier, later) for earlier, later in itertools.pairwise(observation)]
    rises: dict[str, float] = {}
    for rise, _, later in steps:
        rises[_place(later)] = rises.get(_place(later), 0) + rise
    newer = [step for step in steps if step[0] > 0]
    if observation[0].name.endswith(NEWEST) and newer:
        _, earlier, chosen = newer[-1]
        most = _place(chosen)
    else:
        most = max(rises, key=lambda scope_key: rises[scope_key])
        _, earlier, chosen = max((step for step in steps if _place(step[2]) == most), key=lambda step: step[0])
    total = sum(rise for rise, _, _ in steps)
    return Change(
        total=total,
        seen=chosen,
        stage="" if _is_before(chosen) or not total else chosen.stage,
        where=_where(rises, most, earlier, chosen),
        fell=next((_fell(earlier, later) for _, earlier, later in steps if _began_anew(earlier, later)), ""),
    )


def _remembered(observation: Sequence[Observation]) -> list[Observation]:
    """An event that one look no longer finds, and the next finds in another log, did not happen again."""
    latest = itertools.accumulate((number(item.value) for item in observation), max)
    return [replace(item, value=value) for item, value in zip(observation, latest, strict=True)]


def net_change(observation: Sequence[Observation]) -> Value:
    """The last reading less the first; what was read in place of a number."""
    if none := _no_number(observation):
        return none.value
    return number(observation[-1].value) - number(observation[0].value)


def _no_number(observation: Sequence[Observation]) -> Observation | None:
    return next((item for item in observation if math.isnan(number(item.value))), None)


def number(value: Value) -> float:
    """The value as a float; NaN, against which nothing holds, where it is none."""
    return float(value) if isinstance(value, int | float) else math.nan


def _rise(earlier: Observation, later: Observation) -> float:
    before, after = number(earlier.value), number(later.value)
    if after >= before:
        return after - before
    return max(after, 0.0) if _began_anew(earlier, later) else 0.0


def _began_anew(earlier: Observation, later: Observation) -> bool:
    return number(later.value) < number(earlier.value) and not later.name.endswith(NEWEST)


def _is_before(later: Observation) -> bool:
    """What came by a stage's first snapshot came before the stage."""
    return later.params.get("phase") == "before"


def _place(later: Observation) -> str:
    return f"{'before' if _is_before(later) else 'in'} stage {later.stage}"


def _where(rises: Mapping[str, float], most: str, earlier: Observation, chosen: Observation) -> str:
    phases = earlier.params.get("phase"), chosen.params.get("phase")
    within = earlier.stage == chosen.stage and phases not in (("before", "after"), ("after", "before"))
    between = f" between its snapshots {phases[0]} and {phases[1]}" if within else ""
    if chosen.name.endswith(NEWEST):
        return f"the newest at an uptime of {quantity(chosen.value, chosen.unit)}, {most}{between}"
    others = [
        f"{rise:g} {scope_key}"
        for scope_key, rise in rises.items()
        if scope_key != most and (rise or scope_key.startswith("in"))
    ]
    return ", ".join([f"{rises[most]:g} {most}{between}", *others])


def _fell(earlier: Observation, later: Observation) -> str:
    return f"fell from {number(earlier.value):g} to {number(later.value):g} {_place(later)}"
