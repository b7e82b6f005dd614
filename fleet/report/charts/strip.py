"""Geometry of a strip plot: dots or bars along one axis. Coordinates along the axis are percent of its width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.reports import FAIL

MAX_DOTS = 48
_COLUMNS, _ROWS = 56, 3
_MIDDLE_Y, _ROW_HEIGHT = 14.0, 6.0


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One value: x in percent of the width, y in pixels, and its state as the CSS class."""

    x: float
    y: float
    css: str
    title: str


class Mark(NamedTuple):
    """A value to draw, with its state (the verdict on it, or `unjudged`) and its tooltip."""

    value: float
    state: str
    title: str


class Bin(NamedTuple):
    """An interval of the axis, and the number of values in it."""

    low: float
    width: float
    n: int


@dataclass(frozen=True)
class Axis:
    """A linear axis."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> Axis:
        """Return an axis around the values.

        Its width is at least 2 % of the highest value, so that noise does not look like a fault. Without a negative value, the
        axis does not begin below zero.
        """
        low, high = min(values), max(values)
        padding = max((high - low) * 0.08, abs(high) * 0.01) or 1.0
        return cls(max(0.0, low - padding) if low >= 0 else low - padding, high + padding)

    def percent(self, value: float) -> float:
        """Return the position of a value, in percent of the axis."""
        return round((value - self.low) / (self.high - self.low) * 100, 2)

    def histogram(self, values: Iterable[float]) -> list[Bin]:
        """Return a bin for each of the plot's _COLUMNS columns that contains a value."""
        columns = Counter(min(int(self.percent(value) / 100 * _COLUMNS), _COLUMNS - 1) for value in values)
        width = (self.high - self.low) / _COLUMNS
        return [Bin(self.low + column * width, width, count) for column, count in sorted(columns.items())]


def place_dots(marks: Iterable[Mark], axis: Axis) -> tuple[Dot, ...]:
    """Return a dot for each value; dots that would overlap are placed in three rows around the middle."""
    stacked: Counter[int] = Counter()
    dots = []
    for mark in sorted(marks, key=lambda mark: mark.value):
        x = axis.percent(mark.value)
        column = round(x / 100 * _COLUMNS)
        row = stacked[column] % _ROWS
        stacked[column] += 1
        y = _MIDDLE_Y + (row + 1) // 2 * _ROW_HEIGHT * (-1 if row % 2 else 1)
        dots.append(Dot(x=x, y=y, css=mark.state, title=mark.title))
    return tuple(dots)


def bars_path(bins: Sequence[Bin], axis: Axis) -> str:
    """Return the SVG path of a histogram in a field of 1000 × 26.

    The tallest bar has a height of 22, the others a height in proportion to their counts, but at least 2.
    """
    tallest = max((bin_.n for bin_ in bins), default=1)
    bars = []
    for bin_ in bins:
        height = max(2, round(22 * bin_.n / tallest))
        width = 100 * bin_.width / (axis.high - axis.low)
        bars.append(f"M{10 * axis.percent(bin_.low):.0f} 26v-{height}h{8.6 * width:.0f}v{height}z")
    return "".join(bars)


def draw_strip(marks: Sequence[Mark], bins: Sequence[Bin], axis: Axis) -> tuple[tuple[Dot, ...], str]:
    """Return dots and the path of the bars.

    Up to MAX_DOTS values are drawn as dots. With more values, only the first MAX_DOTS failures are dots, and bars show all other
    values. If `bins` are given, they count all values: the bars show `bins`, and the first MAX_DOTS failures are dots too.
    """
    failures = [mark for mark in marks if mark.state == FAIL]
    failing, more_failures = failures[:MAX_DOTS], failures[MAX_DOTS:]
    if bins:
        return place_dots(failing, axis), bars_path(bins, axis)
    if len(marks) <= MAX_DOTS:
        return place_dots(marks, axis), ""
    others = axis.histogram(mark.value for mark in (*more_failures, *(m for m in marks if m.state != FAIL)))
    return place_dots(failing, axis), bars_path(others, axis)
