"""Every figure that was judged, and every figure of single devices, as a strip: where its values lie, and the limits."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.report.render.figure import Key, key_of
from fleet.report.render.format import clean, finite, is_change, params_text, percent, quantity
from fleet.report.render.gpus import ELSEWHERE
from fleet.report.render.hosts import anchor_of
from fleet.report.render.places import scope_name
from fleet.report.titles import TITLES, title
from schemas.records import MEASURED, Value
from schemas.reports import ALL, FAIL, INCONCLUSIVE, PASS, FleetReport, Judged

MANY_DOTS = 48
_COLUMNS, _LINES = 56, 3
_MIDDLE, _STEP = 14.0, 6.0
_OUTLIERS = 3
HEALTH = "Health"
_SEVERE = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2}
_WORDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "eq": "="}
_ORDERED = ("ge", "gt", "le", "lt")


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A part: where it lies (x in percent of the width, y in pixels), and how it was judged."""

    x: float
    y: float
    css: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Far:
    """The part that is farthest beyond the limit, or nearest to it."""

    host: str
    anchor: str
    part: str
    value: str
    margin: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """One figure over the fleet."""

    label: str
    settings: str
    count: int
    failed: int
    open: int
    """Parts of which the figure is not known."""
    median: str
    lowest: str
    highest: str
    wanted: tuple[str, ...]
    criteria: tuple[str, ...]
    limits: tuple[float, ...]
    """Where they lie, in percent."""
    below: bool
    """The wrong side is left of the first limit."""
    axis: tuple[str, str]
    dots: tuple[Dot, ...]
    bars: str
    """Path of the bars where parts are many, in a field of 1000 × 26."""
    far: tuple[Far, ...]

    @property
    def spoken(self) -> str:
        """The picture in words."""
        wanted = f", wanted {' and '.join(self.wanted)}" if self.wanted else ", judged by no criterion"
        return (
            f"{self.label} {self.settings}: {self.count} values from {self.lowest} to {self.highest}, "
            f"median {self.median}{wanted}, {self.failed} failing"
        )


@dataclass(frozen=True, kw_only=True)
class Same:
    """A figure that has one value wherever it was looked at."""

    label: str
    settings: str
    value: str
    wanted: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Group:
    """The figures of one benchmark, or of the health readings."""

    title: str
    strips: tuple[Strip, ...]
    others: tuple[Strip, ...]
    """Those that no criterion speaks of."""
    same: tuple[Same, ...]

    @property
    def failed(self) -> int:
        """Strips with a failure."""
        return sum(bool(strip.failed) for strip in self.strips)


@dataclass
class _Value:
    host: str
    scope: str
    value: float
    state: str


@dataclass
class _Figure:
    """What is gathered of one figure."""

    unit: str
    changes: bool = False
    values: dict[tuple[str, str], _Value] = field(default_factory=dict)
    limits: dict[tuple[str, float], None] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)
    """Operators whose limit differs from host to host."""
    criteria: dict[str, None] = field(default_factory=dict)
    open: int = 0


def groups(report: FleetReport) -> list[Group]:
    """Health first, then the benchmarks in their order; within each those that fail first."""
    found: dict[str, tuple[list[Strip], list[Same]]] = {}
    if report.detail == ALL:
        drawn = [(key[0], _of_values(key, figure)) for key, figure in _figures(report).items() if figure.values]
    else:
        drawn = [(rows[0].name, made) for rows in _rows(report.judged) if (made := _of_rows(rows))]
    for name, made in drawn:
        strips, same = found.setdefault(_title(name), ([], []))
        if isinstance(made, Strip):
            strips.append(made)
        else:
            same.append(made)
    return [
        Group(
            title=name,
            strips=tuple(sorted((strip for strip in strips if strip.criteria), key=lambda strip: not strip.failed)),
            others=tuple(strip for strip in strips if not strip.criteria),
            same=tuple(same),
        )
        for name, (strips, same) in sorted(found.items(), key=lambda item: _place(item[0]))
    ]


def _title(name: str) -> str:
    first = name.removeprefix("drift.").partition(".")[0]
    return title(first) if first in TITLES else HEALTH


def _place(name: str) -> int:
    return [HEALTH, *TITLES.values()].index(name)


def _figures(report: FleetReport) -> dict[Key, _Figure]:
    """By what they are: values from the verdicts, and those of single devices that nobody judged."""
    found: dict[Key, _Figure] = {}
    for verdict in report.verdicts:
        key, value, limit = key_of(verdict), finite(verdict.value), finite(verdict.limit)
        if value is None or not verdict.operator:
            if verdict.verdict == INCONCLUSIVE and key in found:
                found[key].open += 1
            continue
        figure = found.setdefault(key, _Figure(unit=verdict.unit, changes=is_change(verdict)))
        figure.criteria[verdict.criterion] = None
        if limit is not None:
            figure.limits[verdict.operator, limit] = None
        place = (verdict.host, verdict.scope)
        before = figure.values.get(place)
        if before is None or _SEVERE[verdict.verdict] < _SEVERE.get(before.state, 3):
            figure.values[place] = _Value(*place, value, verdict.verdict)
    for host in report.hosts:
        for seen in host.measurements:
            number = finite(seen.value)
            if seen.status != MEASURED or number is None or seen.name in ELSEWHERE or not _of_device(seen.scope):
                continue
            figure = found.setdefault(key_of(seen), _Figure(unit=seen.unit))
            figure.values.setdefault((host.name, seen.scope), _Value(host.name, seen.scope, number, "unjudged"))
    return found


def _of_device(scope: str) -> bool:
    kind, _, index = scope.partition("=")
    return kind in ("gpu", "cpu") and index.isdigit()


def _of_values(key: Key, figure: _Figure) -> Strip | Same:
    values = list(figure.values.values())
    numbers = [value.value for value in values]
    limits = list(figure.limits)
    label, settings = _label(key, figure.changes), _settings(dict(key[2]), key[1])
    failed = sum(value.state == FAIL for value in values)
    if min(numbers) == max(numbers) and not failed:
        wanted = " and ".join(_wanted(*limit, figure.unit) for limit in limits[:2])
        same = quantity(_whole(numbers[0]), figure.unit)
        return Same(label=label, settings=settings, value=same, wanted=wanted, count=len(values))
    drawn = [limit for _, limit in limits][:2] if len(limits) <= 4 else [min(limit for _, limit in limits)]
    low, high = _domain([*numbers, *drawn])
    dots, bars = _marks(values, figure.unit, low, high)
    operators = {operator for operator, _ in limits}
    far = sorted(
        (value for value in values if value.state != "unjudged"),
        key=lambda value: (_SEVERE[value.state], _badness(value.value, limits)),
    )
    return Strip(
        label=label,
        settings=settings,
        count=len(values),
        failed=failed,
        open=figure.open,
        median=quantity(statistics.median(numbers), figure.unit),
        lowest=quantity(min(numbers), figure.unit),
        highest=quantity(max(numbers), figure.unit),
        wanted=_wants(limits, figure.unit),
        criteria=tuple(figure.criteria),
        limits=tuple(_percent(limit, low, high) for limit in drawn),
        below=bool(operators & {"ge", "gt"}),
        axis=(quantity(low, figure.unit, 3), quantity(high, figure.unit, 3)),
        dots=tuple(dots),
        bars=bars,
        far=tuple(_far(value, limits, figure.unit) for value in _first(far) if failed or operators & {*_ORDERED}),
    )


def _whole(value: float) -> Value:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _label(key: Key, changes: bool) -> str:
    family, _, rest = key[0].partition(".")
    text = (rest if family in TITLES else key[0]).replace("_", " ")
    return f"{text or title(family)}{', change' if changes else ''}"


def _settings(params: Mapping[str, Value], stage: str) -> str:
    return ", ".join(text for text in (params_text(params), stage if stage != "benchmark" else "") if text)


def _wanted(operator: str, limit: float, unit: str) -> str:
    return f"{_WORDS.get(operator, '')} {quantity(_whole(limit), unit)}".strip()


def _wants(limits: Sequence[tuple[str, float]], unit: str) -> tuple[str, ...]:
    """Each limit; where a fleet's medians make many of them, from the lowest to the highest."""
    if len(limits) <= 2:
        return tuple(_wanted(*limit, unit) for limit in limits)
    found = []
    for operator in dict.fromkeys(operator for operator, _ in limits):
        own = sorted(limit for other, limit in limits if other == operator)
        last = f" … {quantity(own[-1], unit)}" if len(own) > 1 else ""
        found.append(f"{_wanted(operator, own[0], unit)}{last}")
    return tuple(found)


def _badness(value: float, limits: Sequence[tuple[str, float]]) -> float:
    """How far within its limits a value is, as a share; below zero it is beyond one."""
    return min((share for limit in limits if (share := _margin(value, *limit)) is not None), default=0.0)


def _margin(value: float, operator: str, limit: float) -> float | None:
    if operator not in _ORDERED or not limit:
        return None
    return (value - limit if operator in ("ge", "gt") else limit - value) / abs(limit)


def _far(value: _Value, limits: Sequence[tuple[str, float]], unit: str) -> Far:
    shares = [share for limit in limits if (share := _margin(value.value, *limit)) is not None]
    return Far(
        host=clean(value.host),
        anchor=anchor_of(value.host),
        part=scope_name(value.scope) if value.scope != "host" else "",
        value=quantity(value.value, unit),
        margin=percent(min(shares)) if shares else "",
        verdict=value.state,
    )


def _first(ordered: Sequence[_Value]) -> Sequence[_Value]:
    """Of those that fail the worst; where none does, the one that comes nearest to it."""
    return [value for value in ordered[:_OUTLIERS] if value.state == FAIL] or ordered[:1]


def _domain(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis: the values with a little room, and never so near together that noise looks like a fault."""
    low, high = min(values), max(values)
    room = max((high - low) * 0.08, abs(high) * 0.01) or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _percent(value: float, low: float, high: float) -> float:
    return round((value - low) / (high - low) * 100, 2)


def _marks(values: Sequence[_Value], unit: str, low: float, high: float) -> tuple[list[Dot], str]:
    """A dot a part; where there are many, bars for those that pass and dots for those that do not."""
    if len(values) <= MANY_DOTS:
        return _dots(values, unit, low, high), ""
    failing = [value for value in values if value.state == FAIL]
    columns = Counter(
        min(int(_percent(value.value, low, high) / 100 * _COLUMNS), _COLUMNS - 1)
        for value in values
        if value.state != FAIL
    )
    width = 100 / _COLUMNS
    return _dots(failing[:MANY_DOTS], unit, low, high), _bars(
        [(column * width, width, count) for column, count in sorted(columns.items())]
    )


def _bars(spans: Sequence[tuple[float, float, int]]) -> str:
    """Bars from where they begin and how wide they are in percent, as high as there are parts."""
    tallest = max((count for *_, count in spans), default=1)
    drawn = []
    for x, width, count in spans:
        height = max(2, round(22 * count / tallest))
        drawn.append(f"M{10 * x:.0f} 26v-{height}h{8.6 * width:.0f}v{height}z")
    return "".join(drawn)


def _dots(values: Iterable[_Value], unit: str, low: float, high: float) -> list[Dot]:
    """Dots that would cover each other are stacked about the middle."""
    stacked: Counter[int] = Counter()
    dots = []
    for value in sorted(values, key=lambda value: value.value):
        x = _percent(value.value, low, high)
        column = round(x / 100 * _COLUMNS)
        place = stacked[column] % _LINES
        stacked[column] += 1
        y = _MIDDLE + (place + 1) // 2 * _STEP * (-1 if place % 2 else 1)
        judged = {FAIL: ", fails", "unjudged": ", not judged"}.get(value.state, "")
        told = f"{clean(value.host)} {scope_name(value.scope)}: {quantity(value.value, unit)}{judged}"
        dots.append(Dot(x=x, y=y, css=value.state, title=told))
    return dots


def _rows(judged: Iterable[Judged]) -> list[list[Judged]]:
    """The rows of one figure, one of each criterion."""
    found: dict[tuple[object, ...], list[Judged]] = {}
    for row in judged:
        found.setdefault((row.name, row.stage, tuple(row.params.items()), row.unit), []).append(row)
    return list(found.values())


def _of_rows(rows: Sequence[Judged]) -> Strip | Same | None:
    """A strip of a large fleet, from how its values are spread."""
    spreads = [(row, row.spread) for row in rows if row.spread and row.operator]
    if not spreads:
        return None
    first, spread = max(spreads, key=lambda pair: pair[1].n)
    key: Key = (first.name, first.stage, tuple(first.params.items()))
    limits = [(row.operator, limit) for row, _ in spreads if (limit := finite(row.limit)) is not None]
    failed = max(row.failed for row in rows)
    label, settings = _label(key, changes=False), _settings(first.params, first.stage)
    wanted = _wants(limits, first.unit)
    if spread.min == spread.max and not failed:
        same = quantity(_whole(float(spread.p50)), first.unit)
        return Same(label=label, settings=settings, value=same, wanted=" and ".join(wanted), count=spread.n)
    drawn = [limit for _, limit in limits][:2]
    low, high = _domain([spread.min, spread.max, *drawn])
    step = (spread.max - spread.min) / max(len(spread.bins), 1)
    spans = [
        (_percent(spread.min + number * step, low, high), 100 * step / (high - low), count)
        for number, count in enumerate(spread.bins)
        if count
    ]
    beyond = [
        _Value(far.host, far.scope, value, far.verdict)
        for row in rows
        for far in row.farthest
        if (value := finite(far.value)) is not None
    ]
    unlike = list({(one.host, one.scope): one for one in beyond}.values())
    failing = [one for one in unlike if one.state == FAIL]
    unlike.sort(key=lambda one: (_SEVERE.get(one.state, 3), _badness(one.value, limits)))
    return Strip(
        label=label,
        settings=settings,
        count=spread.n,
        failed=failed,
        open=max(row.inconclusive for row in rows),
        median=quantity(spread.p50, first.unit),
        lowest=quantity(spread.min, first.unit),
        highest=quantity(spread.max, first.unit),
        wanted=wanted,
        criteria=tuple(row.criterion for row in rows),
        limits=tuple(_percent(limit, low, high) for limit in drawn),
        below=any(operator in ("ge", "gt") for operator, _ in limits),
        axis=(quantity(low, first.unit, 3), quantity(high, first.unit, 3)),
        dots=tuple(_dots(failing, first.unit, low, high)),
        bars=_bars(spans),
        far=tuple(_far(one, limits, first.unit) for one in _first(unlike)),
    )
