"""Figures of single devices, a row a kind of figure: how they lie, and what was wanted; `gpus` has them a column a device."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.quantities import finite, quantity
from fleet.report.tables.figure import Key, key_of, label
from fleet.report.tables.gpus import ELSEWHERE
from fleet.report.titles import TITLES
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, PASS, FleetReport, Verdict, VerdictKind
from schemas.scopes import Scope


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of figure over all devices."""

    name: str
    label: str
    lowest: str
    median: str
    highest: str
    limit_text: str
    count: int
    failed: int
    absent: int
    """Devices that should have this figure and have none."""


@dataclass(frozen=True, kw_only=True)
class _Figure:
    value: float
    unit: str
    failed: bool


def table(report: FleetReport) -> list[Row]:
    """A row for each kind of figure that was made of single devices, benchmark by benchmark."""
    figures, absent = _figures(report)
    limits = _limits(report.verdicts)
    rows = [_row(key, figures[key], limits.get(key, {}), absent[key]) for key in figures]
    return sorted(rows, key=lambda row: _place(row.name))


def _place(name: str) -> tuple[int, str]:
    benchmarks = list(TITLES)
    first = name.partition(".")[0]
    return benchmarks.index(first) if first in benchmarks else len(benchmarks), name


def _of_device(item: Observation | Verdict) -> bool:
    return Scope.parse(item.scope).is_one_device


def _figures(report: FleetReport) -> tuple[dict[Key, list[_Figure]], Counter[Key]]:
    failing = {
        (verdict.host, verdict.scope, key_of(verdict))
        for verdict in report.verdicts
        if verdict.verdict == FAIL and _of_device(verdict)
    }
    figures: dict[Key, list[_Figure]] = {}
    absent: Counter[Key] = Counter()
    for host in report.hosts:
        for seen in host.measurements:
            if not _of_device(seen) or seen.name in ELSEWHERE or isinstance(seen.value, str):
                continue
            key, value = key_of(seen), finite(seen.value)
            if seen.status == MEASURED and value is not None:
                failed = (host.name, seen.scope, key) in failing
                figures.setdefault(key, []).append(_Figure(value=value, unit=seen.unit, failed=failed))
            elif seen.status != MEASURED:
                absent[key] += 1
    return figures, _with_missing(absent, figures, report.verdicts)


def _with_missing(absent: Counter[Key], figures: Iterable[Key], verdicts: Iterable[Verdict]) -> Counter[Key]:
    """Adds what the plan expects and nobody saw: such a verdict knows only the parameters that the plan states."""
    for verdict in verdicts:
        if verdict.kind == VerdictKind.MISSING and _of_device(verdict):
            for key in figures:
                if key[:2] == (verdict.name, verdict.stage) and verdict.params.items() <= dict(key[2]).items():
                    absent[key] += 1
    return absent


def _limits(verdicts: Iterable[Verdict]) -> dict[Key, dict[float, str]]:
    found: dict[Key, dict[float, str]] = {}
    for verdict in verdicts:
        limit = finite(verdict.limit)
        if limit is not None and verdict.verdict in (PASS, FAIL) and _of_device(verdict):
            found.setdefault(key_of(verdict), {})[limit] = verdict.operator
    return found


def _row(key: Key, figures: Sequence[_Figure], limits: dict[float, str], absent: int) -> Row:
    values = [figure.value for figure in figures]
    unit = figures[0].unit
    return Row(
        name=key[0],
        label=label(key),
        lowest=quantity(min(values), unit),
        median=quantity(statistics.median(values), unit),
        highest=quantity(max(values), unit),
        limit_text=", ".join(_limit_text(limits[limit], limit, unit) for limit in sorted(limits)[:3]),
        count=len(figures),
        failed=sum(figure.failed for figure in figures),
        absent=absent,
    )


_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "eq": "exactly"}


def _limit_text(operator: str, limit: float, unit: str) -> str:
    return f"{_WORDS.get(operator, '')} {quantity(limit, unit)}".strip()
