"""Figures of single devices as strips of dots, the limit drawn in; `gpus` has the same figures as a table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.report.render.figure import Key, key_of, label
from fleet.report.render.format import finite, quantity
from fleet.report.render.gpus import ELSEWHERE
from fleet.report.render.places import scope_name
from fleet.report.titles import TITLES, title
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, INCONCLUSIVE, PASS, FleetReport, Verdict

MANY_DOTS = 96
_COLUMNS = 64
_ROWS = 7
_MIDDLE, _STEP = 24.0, 5.0
_UNJUDGED = "unjudged"


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A device: where it lies (x in percent of the width, y in pixels), and how it was judged."""

    x: float
    y: float
    css: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Many devices that lie close together."""

    x: float
    width: float
    y: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A limit on the strip."""

    x: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One kind of figure over all devices."""

    label: str
    lowest: str
    median: str
    highest: str
    limits: tuple[Mark, ...]
    limit_text: str
    dots: tuple[Dot, ...]
    bars: tuple[Bar, ...]
    axis: tuple[str, str]
    count: int
    failed: int
    absent: int
    """Devices that should have this figure and have none."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """All strips of one observation."""

    name: str
    title: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True, kw_only=True)
class _Figure:
    host: str
    scope: str
    value: float
    unit: str
    state: str


def panels(report: FleetReport) -> list[Panel]:
    """A panel for each observation that was made of single devices."""
    figures, absent = _figures(report)
    limits = _limits(report.verdicts)
    found: dict[str, list[Strip]] = {}
    for key in figures:
        found.setdefault(key[0], []).append(_strip(key, figures[key], limits.get(key, {}), absent[key]))
    return [
        Panel(name=name, title=title(name.partition(".")[0]), strips=tuple(strips))
        for name, strips in sorted(found.items(), key=lambda item: _place(item[0]))
    ]


def _place(name: str) -> tuple[int, str]:
    benchmarks = list(TITLES)
    first = name.partition(".")[0]
    return benchmarks.index(first) if first in benchmarks else len(benchmarks), name


def _of_device(item: Observation | Verdict) -> bool:
    kind, _, index = item.scope.partition("=")
    return kind in ("gpu", "cpu") and index.isdigit()


def _figures(report: FleetReport) -> tuple[dict[Key, list[_Figure]], Counter[Key]]:
    states = {
        (verdict.host, verdict.scope, key_of(verdict)): verdict.verdict
        for verdict in report.verdicts
        if _of_device(verdict)
    }
    figures: dict[Key, list[_Figure]] = {}
    absent: Counter[Key] = Counter()
    for host in report.hosts:
        for seen in host.measurements:
            if not _of_device(seen) or seen.name in ELSEWHERE or isinstance(seen.value, str):
                continue
            key, value = key_of(seen), finite(seen.value)
            if seen.status == MEASURED and value is not None:
                state = states.get((host.name, seen.scope, key), _UNJUDGED)
                figures.setdefault(key, []).append(
                    _Figure(host=host.name, scope=seen.scope, value=value, unit=seen.unit, state=state)
                )
            elif seen.status != MEASURED:
                absent[key] += 1
    return figures, _with_missing(absent, figures, report.verdicts)


def _with_missing(absent: Counter[Key], figures: Iterable[Key], verdicts: Iterable[Verdict]) -> Counter[Key]:
    """Adds what the plan expects and nobody saw: such a verdict knows only the parameters that the plan states."""
    for verdict in verdicts:
        if verdict.verdict == INCONCLUSIVE and verdict.reason.startswith("not observed") and _of_device(verdict):
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


def _strip(key: Key, figures: Sequence[_Figure], limits: dict[float, str], absent: int) -> Strip:
    values = [figure.value for figure in figures]
    unit = figures[0].unit
    drawn = [limit for limit in sorted(limits) if limit > 0][:3]
    low, high = _domain([*values, *drawn])
    dots, bars = _marks(figures, low, high)
    return Strip(
        label=label(key),
        lowest=quantity(min(values), unit),
        median=quantity(statistics.median(values), unit),
        highest=quantity(max(values), unit),
        limits=tuple(_limit(limit, limits[limit], unit, low, high) for limit in drawn),
        limit_text=", ".join(_limit_text(limits[limit], limit, unit) for limit in sorted(limits)[:3]),
        dots=tuple(dots),
        bars=tuple(bars),
        axis=(quantity(low, unit, 3), quantity(high, unit, 3)),
        count=len(figures),
        failed=sum(figure.state == FAIL for figure in figures),
        absent=absent,
    )


_WORDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "eq": "exactly"}


def _limit_text(operator: str, limit: float, unit: str) -> str:
    return f"{_WORDS.get(operator, '')} {quantity(limit, unit)}".strip()


def _limit(limit: float, operator: str, unit: str, low: float, high: float) -> Mark:
    return Mark(x=_percent(limit, low, high), text=_limit_text(operator, limit, unit))


def _domain(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis: the values with a little room, and never so near together that noise looks like a fault."""
    low, high = min(values), max(values)
    room = max((high - low) * 0.12, abs(high) * 0.02) or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _percent(value: float, low: float, high: float) -> float:
    return round((value - low) / (high - low) * 100, 2)


def _marks(figures: Sequence[_Figure], low: float, high: float) -> tuple[list[Dot], list[Bar]]:
    """A dot a device; where there are many, bars for those that pass and dots for those that do not."""
    if len(figures) <= MANY_DOTS:
        return _dots(figures, low, high), []
    failing = [figure for figure in figures if figure.state == FAIL]
    common = [figure for figure in figures if figure.state != FAIL]
    return _dots(failing[:MANY_DOTS], low, high), _bars(common, low, high)


def _dots(figures: Sequence[_Figure], low: float, high: float) -> list[Dot]:
    """Dots that would cover each other are stacked about the middle."""
    stacked: Counter[int] = Counter()
    dots = []
    for figure in sorted(figures, key=lambda figure: figure.value):
        x = _percent(figure.value, low, high)
        column = round(x / 100 * _COLUMNS)
        place = stacked[column] % _ROWS
        stacked[column] += 1
        y = _MIDDLE + (place + 1) // 2 * _STEP * (-1 if place % 2 else 1)
        judged = "" if figure.state == PASS else f", {'fails' if figure.state == FAIL else 'not judged'}"
        title = f"{figure.host} {scope_name(figure.scope)}: {quantity(figure.value, figure.unit)}{judged}"
        dots.append(Dot(x=x, y=y, css=figure.state, title=title))
    return dots


def _bars(figures: Sequence[_Figure], low: float, high: float) -> list[Bar]:
    columns = Counter(min(int(_percent(figure.value, low, high) / 100 * _COLUMNS), _COLUMNS - 1) for figure in figures)
    tallest = max(columns.values(), default=1)
    width = 100 / _COLUMNS
    bars = []
    for column, count in sorted(columns.items()):
        height = round(max(2.0, 36 * count / tallest), 1)
        bars.append(
            Bar(x=round(column * width, 2), width=round(width * 0.86, 2), y=round(42 - height, 1), height=height)
        )
    return bars
