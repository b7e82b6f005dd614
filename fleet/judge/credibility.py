"""Whether the names, units, signs and amounts in a record can be right.

A wrong unit or a corrupted digit passes a limit as easily as a good figure does. What cannot be right is inconclusive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

from fleet.judge.evaluate import series
from fleet.judge.host_view import HostView
from schemas.catalogue import output_of
from schemas.readings import READINGS
from schemas.records import MEASURED, Metric, Observation, Record, Value

Problem = tuple[str, str, str, str]
"""Name, scope, reason, stage."""

SIGNED_READINGS = frozenset(
    {"clock.offset", "gpu.numa_node", "gpu.temperature_margin_slowdown", "gpu.temperature_margin_shutdown"}
)
"""Readings that may be negative. No figure of a benchmark is."""
MOST = {"ratio": 2.55, "Cel": 150.0, "W": 20_000.0, "Hz": 1e11, "B/s": 1e14, "FLOP/s": 1e18}
"""Unit -> what no part of a host exceeds. The wear that an NVMe drive counts may be 2.55."""
SHARES = ("accuracy", "mfu", "hidden_share", "last_share", "tested_share", "throttled_share")
"""Last parts of the names of figures that are at most 1."""
ROUNDING = 1e-6
DATASHEET_MULTIPLE = 3.0
"""A rate above this multiple of the datasheet's is a wrong unit or a wrong count, which is off by 8 or more. Copies both ways at
once reach 2, as the datasheet's link rates are those of one direction."""


def incredible(record: Record) -> Iterator[Problem]:
    """Yield every name, unit, sign or amount in a record that cannot be right."""
    for snapshot in record.snapshots:
        names = Counter(metric.name for metric in snapshot.metrics)
        for metric in snapshot.metrics:
            if names[metric.name] > 1:
                reason = f"read {names[metric.name]} times in the snapshot {snapshot.phase} {snapshot.stage}"
                yield metric.name, "host", reason, snapshot.stage
            for scope, reason in _metric_problems(metric):
                yield metric.name, scope, reason, snapshot.stage
    for item in record.observations:
        if item.status != MEASURED:
            continue
        if reason := _name_problem(item.name, item.unit) or _figure_problem(item):
            yield item.name, item.scope, reason, item.stage


def above_datasheet(view: HostView) -> Iterator[Problem]:
    """Yield every rate that is far above what the part can do by its datasheet."""
    peaks: dict[int, tuple[Observation, float]] = {}
    for criterion in view.criteria().values():
        if not criterion.datasheet or not criterion.expected:
            continue
        for item in (item for group in series(view, criterion) for item in group):
            # A pair of GPUs has a limit by NVLink or one by PCIe, and the criteria of both match it.
            peaks[id(item)] = item, max(criterion.expected, peaks.get(id(item), (item, 0.0))[1])
    for item, peak in peaks.values():
        if isinstance(item.value, int | float) and item.value > DATASHEET_MULTIPLE * peak:
            reason = f"{item.value:g} {item.unit} is not credible: the datasheet of the part has {peak:g}"
            yield item.name, item.scope, reason, item.stage


def _metric_problems(metric: Metric) -> Iterator[tuple[str, str]]:
    if reason := _reading_problem(metric.name, metric.unit):
        yield "host", reason
        return
    most = MOST.get(metric.unit, float("inf"))
    least = float("-inf") if metric.name in SIGNED_READINGS else 0.0
    for scope, value in metric.values.items():
        if reason := _amount_problem(value, least, most, metric.unit):
            yield scope, reason


@cache
def _reading_problem(name: str, unit: str) -> str:
    reading = READINGS.get(name)
    if reading is None:  # a reading of another version, which is not judged either
        return ""
    return "" if unit == reading.unit else f"has the unit {unit}, and this reading is in {reading.unit}"


@cache
def _name_problem(name: str, unit: str) -> str:
    output = output_of(name)
    if output is None:  # a figure of an older version, which is not judged either
        return ""
    return "" if unit == output.unit else f"has the unit {unit}, and this figure is in {output.unit}"


def _amount_problem(value: Value, least: float, most: float, unit: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if value < least:
        return f"{value:g} {unit} is not credible: it cannot be negative"
    return f"{value:g} {unit} is not credible: it is at most {most:g}" if value > most + ROUNDING else ""


def _figure_problem(item: Observation) -> str:
    share = item.name.rpartition(".")[2] in SHARES
    return _amount_problem(item.value, 0.0, 1.0 if share else MOST.get(item.unit, float("inf")), item.unit)
