"""Geometry of sparklines: small plots of one figure of one part over a soak, a launch, or a period of the pulsed load."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleet.quantities import number, scale
from schemas.timeline import Event, Series

WIDTH, HEIGHT = 160, 40
_LEAST_SPAN = 0.1
"""Smallest range of the vertical axis as a share of the highest value, so that noise does not fill the plot."""
THROTTLED = "gpu.throttle.active"
SAMPLED = "gpu."
"""Prefix of the names of figures that are sampled continuously. A gap in such a series is missing data, and breaks the line."""

Point = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Spark:
    """One sparkline."""

    title: str
    band: str
    """SVG path around the area between the lowest and the highest values of the buckets (intervals of equal length)."""
    line: str
    """SVG path through the means of the buckets."""
    throttled: str
    """SVG path around the buckets in which clocks were throttled for a reason other than the power limit."""
    marks: tuple[int, ...]
    """Horizontal positions, in pixels, of the events of this part, such as an increase of an error counter."""


@dataclass(frozen=True, kw_only=True)
class SparkColumn:
    """The name and the range of values of a column of sparklines."""

    name: str
    range: str


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The scales of a sparkline: length of a bucket and end of the time axis in seconds, lowest and highest value."""

    bucket_s: float
    ends_s: float
    low: float
    high: float

    def x(self, seconds: float) -> int:
        """Return the distance from the left, in pixels. A time after the end of the axis is at its end."""
        return round(WIDTH * min(1.0, seconds / self.ends_s))

    def y(self, value: float) -> int:
        """Return the distance from the top, in pixels."""
        span = max(1.1 * (self.high - self.low), _LEAST_SPAN * abs(self.high)) or 1.0
        low = (self.low + self.high - span) / 2
        return round(HEIGHT * (1 - (value - low) / span))


class Bucket(NamedTuple):
    """One bucket of a series: its number, and the lowest, mean and highest value in it."""

    number: int
    low: float
    mean: float
    high: float


def spark(
    label: str, series: Series, axes: Axes, throttled: Series | None = None, marks: Sequence[Event] = ()
) -> Spark:
    """Return the sparkline of a series, with the times of throttling and a mark for each event of `marks`."""
    times = [at for at, mean in zip(throttled.at, throttled.mean, strict=True) if mean > 0] if throttled else []
    width = max(1, axes.x(axes.bucket_s))
    segments = [_segment(buckets, axes) for buckets in _contiguous(series)]
    return Spark(
        title=f"{label}: {range_text([series])}",
        band="".join(path([*upper, *reversed(lower)]) + "z" for upper, _, lower in segments),
        line="".join(path(middle) for _, middle, _ in segments),
        throttled="".join(f"M{axes.x(at * axes.bucket_s)} 0h{width}v{HEIGHT}h-{width}z" for at in times),
        marks=tuple(sorted({axes.x(event.at_s) for event in marks})),
    )


def _contiguous(series: Series) -> list[list[Bucket]]:
    """Return the buckets of a series in groups: a sampled series is split at its gaps; any other series is one group."""
    runs: list[list[Bucket]] = []
    for bucket in itertools.starmap(Bucket, zip(series.at, series.low, series.mean, series.high, strict=True)):
        if runs and (bucket.number == runs[-1][-1].number + 1 or not series.name.startswith(SAMPLED)):
            runs[-1].append(bucket)
        else:
            runs.append([bucket])
    return runs


def _segment(buckets: Sequence[Bucket], axes: Axes) -> tuple[list[Point], list[Point], list[Point]]:
    """Return the points of upper edge, means and lower edge. A single bucket is drawn over its whole duration."""
    columns = [(axes.x((bucket.number + 0.5) * axes.bucket_s), bucket) for bucket in buckets]
    if len(buckets) == 1:
        begin = axes.x(buckets[0].number * axes.bucket_s)
        end = max(begin + 1, axes.x((buckets[0].number + 1) * axes.bucket_s))
        columns = [(x, buckets[0]) for x in (begin, end)]
    return (
        [(x, axes.y(bucket.high)) for x, bucket in columns],
        [(x, axes.y(bucket.mean)) for x, bucket in columns],
        [(x, axes.y(bucket.low)) for x, bucket in columns],
    )


def path(points: Sequence[Point]) -> str:
    """Return the SVG path of a line through the points, in relative steps. Points inside a horizontal stretch are left out."""
    last = len(points) - 1
    kept = [
        point
        for index, point in enumerate(points)
        if index in (0, last) or not points[index - 1][1] == point[1] == points[index + 1][1]
    ]
    steps = [(x - before[0], y - before[1]) for before, (x, y) in itertools.pairwise(kept)]
    return f"M{kept[0][0]} {kept[0][1]}" + (f"l{' '.join(f'{x} {y}' for x, y in steps)}" if steps else "")


def bounds(series: Sequence[Series]) -> tuple[float, float]:
    """Return the lowest and the highest value of several series."""
    return min(min(item.low) for item in series if item.low), max(max(item.high) for item in series if item.high)


def range_text(series: Sequence[Series]) -> str:
    """Return the lowest and the highest value with the unit: `71 to 702 W`."""
    low, high = bounds(series)
    factor, unit = scale(high, series[0].unit)
    return f"{number(low / factor, 3)} to {number(high / factor, 3)} {unit}".strip()
