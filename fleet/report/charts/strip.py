"""Compute the geometry of a strip plot: values as dots, or as bars of a histogram, along one horizontal axis.

Positions along the axis are in percent of its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.reports import FAIL

MAX_DOTS = 48
_COLUMNS, _ROWS = 56, 3
"""The axis is divided into _COLUMNS columns, the bins of a histogram. The dots of one column are spread over _ROWS rows."""
_MIDDLE_Y, _ROW_HEIGHT = 14.0, 6.0
"""Position of the middle row and distance between rows, in pixels."""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One value as a dot: x in percent of the axis, y in pixels from the top; `css` is `Mark.state`."""

    x: float
    y: float
    css: str
    title: str


class Mark(NamedTuple):
    """A value to draw, its state (the verdict on it, or `unjudged`) and its tooltip (`title`)."""

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

        The axis covers a range of at least 2 % of the highest value, so that noise does not look like a fault. If no value is
        negative, the axis does not begin below zero.
        """
        low, high = min(values), max(values)
        padding = max((high - low) * 0.08, abs(high) * 0.01) or 1.0
        return cls(max(0.0, low - padding) if low >= 0 else low - padding, high + padding)

    def percent(self, value: float) -> float:
        """Return the distance of a value from the low end of the axis, in percent of the axis."""
        return round((value - self.low) / (self.high - self.low) * 100, 2)

    def histogram(self, values: Iterable[float]) -> list[Bin]:
        """Divide the axis into _COLUMNS equal bins, and return those that contain a value."""
        columns = Counter(min(int(self.percent(value) / 100 * _COLUMNS), _COLUMNS - 1) for value in values)
        width = (self.high - self.low) / _COLUMNS
        return [Bin(self.low + column * width, width, count) for column, count in sorted(columns.items())]


def place_dots(marks: Iterable[Mark], axis: Axis) -> tuple[Dot, ...]:
    """Return a dot for each value.

    So that neighbours do not overlap, the dots of one column are placed in the middle, above, below, in the middle again, and so
    on.
    """
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
    """Return the SVG path of a histogram for a `viewBox` of 1000 × 26.

    The tallest bar has a height of 22. The heights of the others are in proportion to their counts, but at least 2.
    """
    tallest = max((bin_.n for bin_ in bins), default=1)
    bars = []
    for bin_ in bins:
        height = max(2, round(22 * bin_.n / tallest))
        width = 100 * bin_.width / (axis.high - axis.low)
        bars.append(f"M{10 * axis.percent(bin_.low):.0f} 26v-{height}h{8.6 * width:.0f}v{height}z")
    return "".join(bars)


def draw_strip(marks: Sequence[Mark], bins: Sequence[Bin], axis: Axis) -> tuple[tuple[Dot, ...], str]:
    """Return the dots and the SVG path of the bars (empty if there are only dots).

    Without `bins`, up to MAX_DOTS values are drawn as dots. If there are more values, the first MAX_DOTS failures are dots, and
    bars show all other values.

    With `bins` (the histogram of all values), the bars show this histogram. The first MAX_DOTS failures in `marks` are dots.
    """
    failures = [mark for mark in marks if mark.state == FAIL]
    failing, more_failures = failures[:MAX_DOTS], failures[MAX_DOTS:]
    if bins:
        return place_dots(failing, axis), bars_path(bins, axis)
    if len(marks) <= MAX_DOTS:
        return place_dots(marks, axis), ""
    others = axis.histogram(mark.value for mark in (*more_failures, *(m for m in marks if m.state != FAIL)))
    return place_dots(failing, axis), bars_path(others, axis)
