"""Geometry of a stacked horizontal bar."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A segment of a bar. `x` and `width` are percentages of the plot's width; `colour` is a number of a color in report.css."""

    x: str
    width: str
    colour: int
    title: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A stacked bar with its label and total."""

    label: str
    total: str
    segments: tuple[Segment, ...]


def stacked_bar(label: str, total: str, parts: Iterable[tuple[int, str, float]], longest: float) -> Bar:
    """Return a bar with a segment for each of `parts` (number of the color, title, value).

    A bar whose values add up to `longest` fills the width of the plot. `total` is the text of the total.
    """
    segments, begin = [], 0.0
    for colour, title, value in parts:
        width = 100 * value / longest if longest else 0.0
        segments.append(Segment(x=f"{begin:.1f}", width=f"{width:.1f}", colour=colour, title=title))
        begin += width
    return Bar(label=label, total=total, segments=tuple(segments))
