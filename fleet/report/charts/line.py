"""Geometry of a line chart: a logarithmic horizontal axis and a linear vertical axis from zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fleet.quantities import number


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Size of the chart and its margins, in pixels."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on an axis: its position in pixels, and its text."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve: its SVG path in pixels of the chart, its CSS classes and its tooltip."""

    path: str
    css: str
    title: str
    end: tuple[float, float] | None = None
    """Position of the dot that marks the end of the curve."""
    label: str = ""
    """Text at the end of the curve, if a value of the curve fails or the curve is far below the others."""


class LineAxes:
    """The axes of one chart: horizontally from the value `first` to `last`, vertically from zero to at least `top`."""

    def __init__(self, frame: Frame, first: float, last: float, top: float) -> None:
        self.frame = frame
        self._first = math.log2(first)
        self._range = math.log2(last) - self._first
        self._step, self._ceiling = axis_steps(top)

    def x(self, value: float) -> float:
        """Return the horizontal position of a value, in pixels; the middle of the axis if `first` equals `last`."""
        share = (math.log2(value) - self._first) / self._range if self._range else 0.5
        return round(self.frame.left + share * (self.frame.width - self.frame.left - self.frame.right), 1)

    def y(self, value: float) -> float:
        """Return the vertical position of a value, in pixels; for a value beyond the axis, the position of the nearest end."""
        share = min(max(value / self._ceiling, 0.0), 1.0)
        return round(
            self.frame.height - self.frame.bottom - share * (self.frame.height - self.frame.top - self.frame.bottom), 1
        )

    def path(self, values: Mapping[int, float], start: str = "M") -> str:
        """Return the SVG path through `values` (horizontal -> vertical). `start` is the SVG command before the first point."""
        return start + "L".join(f"{self.x(at):g},{self.y(value):g}" for at, value in values.items())

    def x_ticks(self, values: Iterable[int], text: Callable[[int], str]) -> tuple[Tick, ...]:
        """Return a tick for each of the values."""
        return tuple(Tick(at=self.x(value), text=text(value)) for value in values)

    def y_ticks(self) -> tuple[Tick, ...]:
        """Return the ticks of the vertical axis."""
        steps = round(self._ceiling / self._step)
        return tuple(Tick(at=self.y(self._step * i), text=number(self._step * i)) for i in range(steps + 1))


def axis_steps(top: float) -> tuple[float, float]:
    """Return the distance between ticks, and the end of an axis that begins at zero and reaches at least `top`.

    The distance is 1, 2, 2.5 or 5 times a power of ten, chosen so that the axis has three to five intervals. If `top` is not
    positive, distance and end are 1.
    """
    if top <= 0:
        return 1.0, 1.0
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return step, step * math.ceil(top / step * 0.9999)
