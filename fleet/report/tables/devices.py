"""Summarize figures of single devices in a table with a row per figure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.quantities import finite, quantity
from fleet.report.formatting import join_names
from fleet.report.tables.figure import FigureKey, failing_figures, figure_key
from fleet.report.tables.gpus import IN_OTHER_TABLES
from fleet.report.titles import TITLES
from schemas.records import MEASURED
from schemas.reports import FAIL, PASS, FleetReport, Verdict, VerdictKind
from schemas.scopes import Scope

_MAX_LIMITS = 3

Limit = tuple[float, str]
"""Value and operator of a limit."""


@dataclass(frozen=True, kw_only=True)
class DeviceFigure:
    """One figure, summarized over all devices of the report."""

    name: str
    label: str
    lowest: str
    median: str
    highest: str
    limit_text: str
    count: int
    failed: int
    absent: int
    """Number of devices that should have a value of this figure but do not."""


@dataclass(frozen=True, kw_only=True)
class _Value:
    value: float
    unit: str
    failed: bool


def device_figures(report: FleetReport) -> list[DeviceFigure]:
    """Return the numeric figures of single devices in the order of the benchmarks, except those in IN_OTHER_TABLES."""
    values, absent = _values(report)
    limits = _limits(report.verdicts)
    rows = [_row(key, values[key], limits.get(key, set()), absent[key]) for key in values]
    return sorted(rows, key=lambda row: _order(row.name))


def _order(name: str) -> tuple[int, str]:
    benchmarks = list(TITLES)
    first = name.partition(".")[0]
    return benchmarks.index(first) if first in benchmarks else len(benchmarks), name


def _values(report: FleetReport) -> tuple[dict[FigureKey, list[_Value]], Counter[FigureKey]]:
    """Return the values of each figure, and the number of devices that should have a value of the figure but do not."""
    failing = failing_figures(verdict for verdict in report.verdicts if Scope.parse(verdict.scope).is_one_device)
    values: dict[FigureKey, list[_Value]] = {}
    absent: Counter[FigureKey] = Counter()
    for host in report.hosts:
        for item in host.measurements:
            if not Scope.parse(item.scope).is_one_device or item.name in IN_OTHER_TABLES or isinstance(item.value, str):
                continue
            key, value = figure_key(item), finite(item.value)
            if item.status != MEASURED:
                absent[key] += 1
            elif value is not None:
                failed = (host.name, item.scope, key) in failing
                values.setdefault(key, []).append(_Value(value=value, unit=item.unit, failed=failed))
    for verdict in report.verdicts:
        if verdict.kind == VerdictKind.MISSING and Scope.parse(verdict.scope).is_one_device:
            absent.update(key for key in values if _is_missing(key, verdict))
    return values, absent


def _is_missing(key: FigureKey, verdict: Verdict) -> bool:
    """Return whether `verdict`, which has the kind MISSING, is about the figure `key`.

    If a planned figure was not measured, `verdict.params` has only the parameters that the plan states. `key.params` is from a
    measurement on another device, and may have further ones.
    """
    same = (key.name, key.stage) == (verdict.name, verdict.stage)
    return same and verdict.params.items() <= key.params.items()


def _limits(verdicts: Iterable[Verdict]) -> dict[FigureKey, set[Limit]]:
    """Return the distinct limits that judged each figure of single devices."""
    limits: dict[FigureKey, set[Limit]] = {}
    for verdict in verdicts:
        limit = finite(verdict.limit)
        if limit is not None and verdict.verdict in (PASS, FAIL) and Scope.parse(verdict.scope).is_one_device:
            limits.setdefault(figure_key(verdict), set()).add((limit, verdict.operator))
    return limits


def _row(key: FigureKey, items: Sequence[_Value], limits: set[Limit], absent: int) -> DeviceFigure:
    values = [item.value for item in items]
    unit = items[0].unit
    return DeviceFigure(
        name=key.name,
        label=key.label,
        lowest=quantity(min(values), unit),
        median=quantity(statistics.median(values), unit),
        highest=quantity(max(values), unit),
        limit_text=join_names([_limit_text(operator, limit, unit) for limit, operator in sorted(limits)], _MAX_LIMITS),
        count=len(items),
        failed=sum(item.failed for item in items),
        absent=absent,
    )


_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "eq": "exactly"}


def _limit_text(operator: str, limit: float, unit: str) -> str:
    return f"{_WORDS.get(operator, '')} {quantity(limit, unit)}".strip()
