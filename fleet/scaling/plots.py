"""What became of a scaling study, as pictures: figures against the number of ranks, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet.quantities import number
from fleet.report.formatting import duration
from fleet.report.tables.collectives import Curve, Tick, nice
from fleet.report.tables.timing import Bar, Segment
from fleet.scaling.outcome import Outcome, Row

WIDTH, HEIGHT = 480.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 24.0, 26.0
COLOURS = 8


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A figure of each series against the number of ranks."""

    title: str
    unit: str
    note: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    dots: tuple[tuple[float, float, str, str], ...]
    """Across, down, class and title of each cell."""


def styles(found: Outcome) -> Mapping[tuple[int, int, int, str], tuple[str, str]]:
    """Series that was measured -> its name and its class."""
    series = dict.fromkeys(row.cell.series for row in found.rows if row.throughput is not None)
    several = len({key[1] for key in series}) > 1
    return {
        key: (series_name(key, with_epochs=several), f"c{place % COLOURS}{' dashed' if place // COLOURS % 2 else ''}")
        for place, key in enumerate(series)
    }


def series_name(series: tuple[int, int, int, str], *, with_epochs: bool) -> str:
    batch, epochs, cpus, precision = series
    few = f", {cpus} CPU{'s' if cpus > 1 else ''} a GPU" if cpus else ""
    passes = f", {epochs} epoch{'s' if epochs > 1 else ''}" if with_epochs else ""
    return f"batch {batch}, {precision}{few}{passes}"


def plots(found: Outcome) -> list[Plot]:
    """Throughput and efficiency against ranks; nothing where no cell was measured."""
    if not any(row.throughput for row in found.rows):
        return []
    return [
        _plot(found, "Throughput", "images/s", "of all ranks", lambda row: row.throughput),
        _plot(
            found,
            "Efficiency",
            "%",
            "100 % is the smallest cell of the series",
            lambda row: (row.efficiency or 0) * 100,
        ),
        _plot(found, "Hookup", "s", "from the launch to the end of the first step", lambda row: row.hookup_s),
    ]


def _plot(found: Outcome, title: str, unit: str, note: str, figure: Callable[[Row], float | None]) -> Plot:
    named = styles(found)
    values: dict[tuple[int, int, int, str], dict[int, tuple[float, Row]]] = {}
    for row in found.rows:
        value = figure(row)
        if row.throughput is not None and value is not None:
            kept = values.setdefault(row.cell.series, {})
            if row.cell.ranks not in kept or value > kept[row.cell.ranks][0]:  # as many ranks on other numbers of hosts
                kept[row.cell.ranks] = value, row
    ranks = sorted({rank for kept in values.values() for rank in kept})
    step, ceiling = nice(max(value for kept in values.values() for value, _ in kept.values()))

    def across(rank: int) -> float:
        span = math.log2(ranks[-1] / ranks[0])
        share = math.log2(rank / ranks[0]) / span if span else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def down(value: float) -> float:
        return round(HEIGHT - BOTTOM - value / ceiling * (HEIGHT - TOP - BOTTOM), 1)

    curves, dots = [], []
    for key, kept in values.items():
        name, css = named[key]
        points = [(across(rank), down(kept[rank][0])) for rank in sorted(kept)]
        path = "M" + "L".join(f"{x:g},{y:g}" for x, y in points)
        curves.append(Curve(path=path, css=f"line series {css}", title=name))
        for rank in sorted(kept):
            value, row = kept[rank]
            told = f"{name}, {row.cell.hosts} × {row.cell.gpus}: {number(value)} {unit}"
            dots.append((across(rank), down(value), f"series {css}", told))
    return Plot(
        title=title,
        unit=unit,
        note=note,
        x_ticks=tuple(Tick(at=across(rank), text=str(rank)) for rank in ranks),
        y_ticks=tuple(
            Tick(at=down(step * place), text=number(step * place)) for place in range(round(ceiling / step) + 1)
        ),
        curves=tuple(curves),
        dots=tuple(dots),
    )


def bars(found: Outcome) -> list[Bar]:
    """Where the time of each measured cell went."""
    timed = [row for row in found.rows if row.wall_s and row.hookup_s is not None and row.train_s is not None]
    longest = max((row.wall_s or 0.0 for row in timed), default=0.0)
    epochs = {row.cell.epochs for row in timed}
    drawn = []
    for row in timed:
        begin, segments = 0.0, []
        rest = max(0.0, (row.wall_s or 0.0) - (row.hookup_s or 0.0) - (row.train_s or 0.0))
        for colour, name, spent in (
            (0, "hookup", row.hookup_s),
            (2, "training", row.train_s),
            (16, "test and end", rest),
        ):
            width, title = 100 * (spent or 0.0) / longest, f"{name}: {duration(spent or 0.0)}"
            segments.append(Segment(x=f"{begin:.2f}", width=f"{width:.2f}", colour=colour, title=title))
            begin += width
        label = f"{row.cell.hosts} × {row.cell.gpus}, {series_name(row.cell.series, with_epochs=len(epochs) > 1)}"
        drawn.append(Bar(label=label, total=duration(row.wall_s or 0.0), segments=tuple(segments)))
    return drawn
