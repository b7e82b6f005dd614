"""One figure as a strip: where its values lie, the limits, and the same in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import quantity
from fleet.report.format import clean, params_text, percent
from fleet.report.tables.figure import Key
from fleet.report.tables.hosts import anchor_of
from fleet.report.tables.places import scope_name
from fleet.report.titles import TITLES, title
from schemas.records import Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS
from schemas.stages import BENCHMARK

MANY_DOTS = 48
_COLUMNS, _LINES = 56, 3
_MIDDLE, _STEP = 14.0, 6.0
_OUTLIERS = 3
SEVERE = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2}
_WORDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "eq": "="}
ORDERED = ("ge", "gt", "le", "lt")


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


@dataclass
class Seen:
    host: str
    scope: str
    value: float
    state: str


def whole(value: float) -> Value:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def label_of(key: Key, changes: bool) -> str:
    family, _, rest = key[0].partition(".")
    text = (rest if family in TITLES else key[0]).replace("_", " ")
    return f"{text or title(family)}{', change' if changes else ''}"


def settings_of(params: Mapping[str, Value], stage: str) -> str:
    return ", ".join(text for text in (params_text(params), stage if stage != BENCHMARK else "") if text)


def wanted_text(operator: str, limit: float, unit: str) -> str:
    return f"{_WORDS.get(operator, '')} {quantity(whole(limit), unit)}".strip()


def wants(limits: Sequence[tuple[str, float]], unit: str) -> tuple[str, ...]:
    """Each limit; where a fleet's medians make many of them, from the lowest to the highest."""
    if len(limits) <= 2:
        return tuple(wanted_text(*limit, unit) for limit in limits)
    found = []
    for operator in dict.fromkeys(operator for operator, _ in limits):
        own = sorted(limit for other, limit in limits if other == operator)
        last = f" … {quantity(own[-1], unit)}" if len(own) > 1 else ""
        found.append(f"{wanted_text(operator, own[0], unit)}{last}")
    return tuple(found)


def badness(value: float, limits: Sequence[tuple[str, float]]) -> float:
    """How far within its limits a value is, as a share; below zero it is beyond one."""
    return min((share for limit in limits if (share := _margin(value, *limit)) is not None), default=0.0)


def _margin(value: float, operator: str, limit: float) -> float | None:
    if operator not in ORDERED or not limit:
        return None
    return (value - limit if operator in ("ge", "gt") else limit - value) / abs(limit)


def far_of(value: Seen, limits: Sequence[tuple[str, float]], unit: str) -> Far:
    shares = [share for limit in limits if (share := _margin(value.value, *limit)) is not None]
    return Far(
        host=clean(value.host),
        anchor=anchor_of(value.host),
        part=scope_name(value.scope) if value.scope != "host" else "",
        value=quantity(value.value, unit),
        margin=percent(min(shares)) if shares else "",
        verdict=value.state,
    )


def first_of(ordered: Sequence[Seen]) -> Sequence[Seen]:
    """Of those that fail the worst; where none does, the one that comes nearest to it."""
    return [value for value in ordered[:_OUTLIERS] if value.state == FAIL] or ordered[:1]


def domain(values: Sequence[float]) -> tuple[float, float]:
    """Ends of the axis: the values with a little room, and never so near together that noise looks like a fault."""
    low, high = min(values), max(values)
    room = max((high - low) * 0.08, abs(high) * 0.01) or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def percent_at(value: float, low: float, high: float) -> float:
    return round((value - low) / (high - low) * 100, 2)


def marks(values: Sequence[Seen], unit: str, low: float, high: float) -> tuple[list[Dot], str]:
    """A dot a part; where there are many, bars for those that pass and dots for those that do not."""
    if len(values) <= MANY_DOTS:
        return dots_of(values, unit, low, high), ""
    failing = [value for value in values if value.state == FAIL]
    columns = Counter(
        min(int(percent_at(value.value, low, high) / 100 * _COLUMNS), _COLUMNS - 1)
        for value in values
        if value.state != FAIL
    )
    width = 100 / _COLUMNS
    return dots_of(failing[:MANY_DOTS], unit, low, high), bars_of(
        [(column * width, width, count) for column, count in sorted(columns.items())]
    )


def bars_of(spans: Sequence[tuple[float, float, int]]) -> str:
    """Bars from where they begin and how wide they are in percent, as high as there are parts."""
    tallest = max((count for *_, count in spans), default=1)
    drawn = []
    for x, width, count in spans:
        height = max(2, round(22 * count / tallest))
        drawn.append(f"M{10 * x:.0f} 26v-{height}h{8.6 * width:.0f}v{height}z")
    return "".join(drawn)


def dots_of(values: Iterable[Seen], unit: str, low: float, high: float) -> list[Dot]:
    """Dots that would cover each other are stacked about the middle."""
    stacked: Counter[int] = Counter()
    dots = []
    for value in sorted(values, key=lambda value: value.value):
        x = percent_at(value.value, low, high)
        column = round(x / 100 * _COLUMNS)
        place = stacked[column] % _LINES
        stacked[column] += 1
        y = _MIDDLE + (place + 1) // 2 * _STEP * (-1 if place % 2 else 1)
        judged = {FAIL: ", fails", "unjudged": ", not judged"}.get(value.state, "")
        told = f"{clean(value.host)} {scope_name(value.scope)}: {quantity(value.value, unit)}{judged}"
        dots.append(Dot(x=x, y=y, css=value.state, title=told))
    return dots
