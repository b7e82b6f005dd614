"""Small pictures of how one figure of one part went, of a soak or of a launch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fleet.quantities import number, scale
from schemas.timeline import Event, Series

WIDTH, HEIGHT = 160, 40
THROTTLED = "gpu.throttle.active"
SAMPLED = "gpu."
"""How names of figures begin that are read all the time: where nothing came of one, nothing is known, and no line goes on."""

Point = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Spark:
    """One small picture."""

    title: str
    band: str
    """Path from the lowest to the highest of each bucket."""
    line: str
    """Path of the means."""
    held: str
    """Path over the times in which the clocks were held down for more than the power limit."""
    marks: tuple[int, ...]
    """Where a counter of this part rose."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """What the pictures under one head share."""

    name: str
    range: str


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What places a picture: how wide a bucket is, where the time ends, and the lowest and the highest that is shown."""

    bucket_s: float
    ends_s: float
    low: float
    high: float

    def x(self, seconds: float) -> int:
        """From the left."""
        return round(WIDTH * min(1.0, seconds / self.ends_s))

    def y(self, value: float) -> int:
        """From the top."""
        margin = 0.05 * (self.high - self.low) or abs(self.high) * 0.05 or 1.0
        return round(HEIGHT * (1 - (value - self.low + margin) / (self.high - self.low + 2 * margin)))


def spark(
    label: str, series: Series, axes: Axes, held: Series | None = None, marks: Sequence[Event] = (), note: str = ""
) -> Spark:
    """The picture, its height that of the bounds. `note` goes into its title."""
    spells = [at for at, mean in zip(held.at, held.mean, strict=True) if mean > 0] if held else []
    bar = max(1, axes.x(axes.bucket_s))
    drawn = [_stretch(rows, axes) for rows in _stretches(series)]
    return Spark(
        title=f"{label}: {span_of([series])}{note}",
        band="".join(path([*upper, *reversed(lower)]) + "z" for upper, _, lower in drawn),
        line="".join(path(middle) for _, middle, _ in drawn),
        held="".join(f"M{axes.x(at * axes.bucket_s)} 0h{bar}v{HEIGHT}h-{bar}z" for at in spells),
        marks=tuple(sorted({axes.x(event.at_s) for event in marks})),
    )


Row = tuple[int, float, float, float]
"""Number of the bucket, lowest, mean, highest."""


def _stretches(series: Series) -> list[list[Row]]:
    """The buckets, in as many pieces as there are gaps and one more."""
    found: list[list[Row]] = []
    for row in zip(series.at, series.low, series.mean, series.high, strict=True):
        if found and (row[0] == found[-1][-1][0] + 1 or not series.name.startswith(SAMPLED)):
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _stretch(rows: Sequence[Row], axes: Axes) -> tuple[list[Point], list[Point], list[Point]]:
    """Its upper edge, means and lower edge; a bucket that stands alone is as wide as it lasted."""
    places = [(axes.x((at + 0.5) * axes.bucket_s), low, mean, high) for at, low, mean, high in rows]
    if len(rows) == 1:
        at, low, mean, high = rows[0]
        begin = axes.x(at * axes.bucket_s)
        places = [(x, low, mean, high) for x in (begin, max(begin + 1, axes.x((at + 1) * axes.bucket_s)))]
    lows, means, highs = ([(row[0], axes.y(row[column])) for row in places] for column in (1, 2, 3))
    return highs, means, lows


def path(points: Sequence[Point]) -> str:
    """A line through the points, in steps from each to the next; those amid a level stretch say nothing."""
    last = len(points) - 1
    kept = [
        point
        for place, point in enumerate(points)
        if place in (0, last) or not points[place - 1][1] == point[1] == points[place + 1][1]
    ]
    steps = [(x - before[0], y - before[1]) for before, (x, y) in itertools.pairwise(kept)]
    return f"M{kept[0][0]} {kept[0][1]}" + (f"l{' '.join(f'{x} {y}' for x, y in steps)}" if steps else "")


def bounds(series: Sequence[Series]) -> tuple[float, float]:
    """The lowest and the highest of them."""
    return min(min(one.low) for one in series if one.low), max(max(one.high) for one in series if one.high)


def span_of(series: Sequence[Series]) -> str:
    """`71 to 702 W`."""
    low, high = bounds(series)
    factor, unit = scale(high, series[0].unit)
    return f"{number(low / factor, 3)} to {number(high / factor, 3)} {unit}".strip()
