"""Check that the units, signs and sizes of the values in a record are possible.

A value with a wrong unit or a corrupted digit may still be within its limit. So an impossible value is inconclusive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache

from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.criteria import Criterion
from fleet.judge.matching import matches
from schemas.catalogue import output_of
from schemas.readings import BMC, READINGS
from schemas.records import MEASURED, Metric, Observation, Snapshot
from schemas.semantic_validation import COLLECTOR
from schemas.stages import SOAK
from schemas.timeline import Series

Problem = tuple[str, str, str, str]
"""Name, scope, reason, stage."""

LEAST = {"Cel": 2.0, "W": 1.0}
"""Unit -> lowest possible value of an unsigned reading of a running host; 0 for the other units. Coolant has at least 2 °C
(ASHRAE W17). A reading of 0 is accepted, because a part without a sensor reports it."""
MOST = {"ratio": 2.55, "Cel": 150.0, "W": 20_000.0, "Hz": 1e11, "B/s": 1e14, "FLOP/s": 1e18}
"""Unit -> highest possible value. The ratio 2.55: an NVMe drive counts its wear up to 255 %."""
SHARES = (
    "accuracy",
    "mfu",
    "hidden_share",
    "last_share",
    "tested_share",
    "throttled_share",
    "kept_share",
    "cache_share",
)
"""Last part of the name of each figure whose value cannot exceed 1."""
ROUNDING = 1e-6
"""A value may exceed the highest possible value by this much, because of rounding."""
_WRONG_SOURCE = {
    False: "the record of the host has this reading, but only the control node reads the BMC",
    True: "the record of the BMC has this reading, which is not one of a BMC",
}
DATASHEET_MULTIPLE = 3.0
"""A rate above this multiple of the rate in the datasheet counts as wrong. Copies in both directions at once may correctly reach
twice the rate in the datasheet, which states the rate of a link in one direction. A wrong unit or a wrong count multiplies a rate
by 8 or more."""
CACHED_BYTES = 1 << 28
"""Memory bandwidths over fewer bytes than this are not compared with the datasheet: a large part of the bytes may be in the GPU's
L2 cache (at most 128 MB), which is several times as fast as the GPU's memory."""
EMULATED_BY = {"fp64": "fp32"}
"""Data type of a matrix product -> data type that may emulate it. The product may then reach the datasheet rate of the emulating
data type. For example, B300 has hardly any fp64 units."""

_COMPARED: BoundedCache[int, tuple[Mapping[str, Criterion], dict[str, list[Criterion]]]] = BoundedCache(64)
"""Cache: `id` of a mapping of criteria -> the mapping, and for each observation name the criteria with a datasheet figure.
Keeping the mapping ensures that no other object gets its `id`."""


def impossible_readings(
    snapshot: Snapshot, *, is_bmc: bool = False, doubtful: Collection[int] | None = None
) -> Iterator[Problem]:
    """Yield a problem for each reading with an impossible unit, sign or amount, or the wrong source, and for each duplicate.

    `doubtful` has the `id` of each metric for which `is_doubtful` is true, and only these metrics are checked; None: check all.
    Snapshots with equal readings share the object of the metric, so they share its `id` too.
    """
    if len({metric.name for metric in snapshot.metrics}) < len(snapshot.metrics):
        counts = Counter(metric.name for metric in snapshot.metrics)
        for name in (name for name, count in counts.items() if count > 1):
            reason = f"read {counts[name]} times in the snapshot {snapshot.phase} {snapshot.stage}"
            yield name, "host", reason, snapshot.stage
    for metric in snapshot.metrics if doubtful is None or doubtful else ():
        if doubtful is not None and id(metric) not in doubtful:
            continue
        of_bmc, is_count, reason, least, most = _rules_of_reading(metric.name, metric.unit)
        if of_bmc is not is_bmc:
            yield metric.name, "host", _WRONG_SOURCE[is_bmc], snapshot.stage
        if reason:
            yield metric.name, "host", reason, snapshot.stage
        elif is_count and not metric.is_whole:
            for scope, value in metric.values.items():
                if isinstance(value, float) and not value.is_integer():
                    yield metric.name, scope, f"{value:g} is not credible: it must be a whole number", snapshot.stage
        elif metric.least < least or metric.greatest > most:
            for scope, value in metric.values.items():
                is_number = type(value) in (int, float) and bool(value)
                if is_number and (problem := _amount_problem(value, least, most, metric.unit)):  # type: ignore[arg-type]
                    yield metric.name, scope, problem, snapshot.stage


def is_doubtful(metric: Metric, *, is_bmc: bool = False) -> bool:
    """Return whether `impossible_readings` may yield a problem for this metric, apart from duplicates."""
    of_bmc, is_count, reason, least, most = _rules_of_reading(metric.name, metric.unit)
    is_possible = least <= metric.least and metric.greatest <= most and (metric.is_whole or not is_count)
    return of_bmc is not is_bmc or bool(reason) or not is_possible


def problem_of(criteria: Mapping[str, Criterion], item: Observation) -> str:
    """Return why unit, sign or amount of a measured reading or figure is impossible; empty if all are possible."""
    if type(item.value) not in (int, float):
        return ""
    if item.name not in READINGS:
        return unit_problem(item.name, item.unit) or problem_of_figure(criteria, item)
    problem, least, most = _bounds_of_reading(item.name, item.unit)
    return problem or (_amount_problem(item.value, least, most, item.unit) if item.value else "")  # type: ignore[arg-type]


def unit_problem(name: str, unit: str) -> str:
    """Return why the unit of a figure is wrong; empty if it is right."""
    return _bounds_of_figure(name, unit)[0]


def most_of_figure(criteria: Mapping[str, Criterion], item: Observation) -> float:
    """Return the highest possible value of a figure whose unit is right."""
    most, peak = _most(item), _peak(criteria, item)
    return min(most, DATASHEET_MULTIPLE * peak) if peak else most


def problem_of_figure(criteria: Mapping[str, Criterion], item: Observation) -> str:
    """Return why the value of a figure with the right unit is impossible; empty if it is possible."""
    most = _most(item)
    return _amount_problem(item.value, 0.0, most, item.unit) or _datasheet_problem(criteria, item)  # type: ignore[arg-type]


def series_problem(criteria: Mapping[str, Criterion], series: Series, figure: Observation | None) -> str:
    """Return why the unit or a value of a series is impossible; empty if all are possible.

    A series has only some parameters of its figure; `figure`, if it is known, has all.
    """
    for value in (min(series.low, default=0.0), max(series.high, default=0.0)):
        item = Observation(
            name=series.name,
            scope=series.scope,
            stage=SOAK,
            unit=series.unit,
            status=MEASURED,
            value=value,
            params=figure.params if figure else series.params,
        )
        if problem := problem_of(criteria, item):
            return problem
    return ""


@cache
def _rules_of_reading(name: str, unit: str) -> tuple[bool, bool, str, float, float]:
    """Return whether a reading is of a BMC, whether its values must be whole numbers, and what `_bounds_of_reading` returns."""
    reading = READINGS.get(name)
    is_count = unit == "1" and reading is not None and not reading.fractional
    return name.startswith(BMC), is_count, *_bounds_of_reading(name, unit)


@cache
def _bounds_of_reading(name: str, unit: str) -> tuple[str, float, float]:
    """Return why the unit is wrong (empty: it is right), and the lowest and highest possible value.

    A reading that is not in READINGS may be negative, except those of the collectors themselves (`collector.…`).
    """
    reading = READINGS.get(name)
    right = "s" if name.startswith(COLLECTOR) else reading.unit if reading else unit
    if unit != right:
        return f"has the unit {unit}, but this reading is in {right}", 0.0, 0.0
    if reading and reading.bounds:
        return "", *reading.bounds
    may_be_negative = reading.signed if reading else not name.startswith(COLLECTOR)
    most = MOST.get(unit, float("inf")) + ROUNDING
    return "", -most if may_be_negative else LEAST.get(unit, 0.0), most


@cache
def _bounds_of_figure(name: str, unit: str) -> tuple[str, float]:
    """Return why the unit is wrong (empty: it is right), and the highest possible value."""
    output = output_of(name)
    if output and unit != output.unit:
        return f"has the unit {unit}, but this figure is in {output.unit}", 0.0
    most = 1.0 if name.rpartition(".")[2] in SHARES else MOST.get(unit, float("inf"))
    return "", most + ROUNDING


def _most(item: Observation) -> float:
    """Return the highest possible value of a figure. FLOP/s of a launch are the sum over its ranks."""
    most, ranks = _bounds_of_figure(item.name, item.unit)[1], item.params.get("world_size")
    output = output_of(item.name)
    is_sum = item.unit == "FLOP/s" and output is not None and output.scope == "world"
    return most * ranks if is_sum and isinstance(ranks, int) and ranks > 0 else most


def _amount_problem(value: float, least: float, most: float, unit: str) -> str:
    shown = f"{value:g}" if unit == "1" else f"{value:g} {unit}"
    if value < least:
        why = "it cannot be negative" if least == 0 else f"the lowest possible value is {least:g}"
        return f"{shown} is not credible: {why}"
    return f"{shown} is not credible: the highest possible value is {most:g}" if value > most else ""


def _datasheet_problem(criteria: Mapping[str, Criterion], item: Observation) -> str:
    """Return a problem if a rate is far above the datasheet of the part; empty otherwise."""
    peak, value = _peak(criteria, item), item.value
    if not peak or not isinstance(value, int | float) or value <= DATASHEET_MULTIPLE * peak:
        return ""
    return (
        f"{value:g} {item.unit} is not credible: it is more than {DATASHEET_MULTIPLE:g} times the rate in the datasheet "
        f"of the part ({peak:g} {item.unit})"
    )


def _peak(criteria: Mapping[str, Criterion], item: Observation) -> float:
    """Return the rate that the datasheet of the part states for this figure; 0 if it states none."""
    compared, size_bytes = _compared(criteria, item.name), item.params.get("size_bytes")
    if not compared:
        return 0.0
    if item.name.startswith("memory.") and isinstance(size_bytes, int) and size_bytes < CACHED_BYTES:
        return 0.0
    items = [item]
    if emulated := EMULATED_BY.get(str(item.params.get("dtype"))):
        items.append(replace(item, params={**item.params, "dtype": emulated}))
    # For a pair of GPUs, both the criteria for NVLink and those for PCIe match, whichever of the two links the pair has. So the
    # higher rate is returned.
    return max((one.expected or 0.0 for one in compared if any(matches(one, each) for each in items)), default=0.0)


def _compared(criteria: Mapping[str, Criterion], name: str) -> list[Criterion]:
    """Return the criteria that compare figures of this name with the datasheet, for messages of any size.

    The criteria apply only to message sizes at which a link reaches its rate, but no message of any size can exceed this rate. So
    `size_bytes` is ignored.
    """
    if id(criteria) not in _COMPARED:
        _COMPARED[id(criteria)] = criteria, {}
    known = _COMPARED[id(criteria)][1]
    if name not in known:
        known[name] = [
            replace(item, where={key: value for key, value in item.where.items() if key != "size_bytes"})
            for item in criteria.values()
            if item.datasheet and item.expected and item.matches_name(name)
        ]
    return known[name]
