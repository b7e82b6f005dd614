"""What became of a scaling study, as pictures: figures against the number of ranks, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet.quantities import number
from fleet.report.charts.bar import Bar, stacked_bar
from fleet.report.charts.line import Curve, Frame, LineAxes, Tick
from fleet.report.formatting import duration
from fleet.scaling.outcome import Outcome, Row

FRAME = Frame(width=480.0, height=260.0, left=52.0, right=14.0, top=24.0, bottom=26.0)
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


def styles(study_outcome: Outcome) -> Mapping[tuple[int, int, int, str], tuple[str, str]]:
    """Series that was measured -> its name and its class."""
    series = dict.fromkeys(row.cell.series for row in study_outcome.rows if row.throughput is not None)
    several = len({key[1] for key in series}) > 1
    return {
        key: (series_name(key, with_epochs=several), f"c{index % COLOURS}{' dashed' if index // COLOURS % 2 else ''}")
        for index, key in enumerate(series)
    }


def series_name(series: tuple[int, int, int, str], *, with_epochs: bool) -> str:
    batch, epochs, cpus, precision = series
    few = f", {cpus} CPU{'s' if cpus > 1 else ''} a GPU" if cpus else ""
    passes = f", {epochs} epoch{'s' if epochs > 1 else ''}" if with_epochs else ""
    return f"batch {batch}, {precision}{few}{passes}"


def plots(study_outcome: Outcome) -> list[Plot]:
    """Throughput and efficiency against ranks; nothing where no cell was measured."""
    if not any(row.throughput for row in study_outcome.rows):
        return []
    return [
        _plot(study_outcome, "Throughput", "images/s", "of all ranks", lambda row: row.throughput),
        _plot(
            study_outcome,
            "Efficiency",
            "%",
            "100 % is the smallest cell of the series",
            lambda row: (row.efficiency or 0) * 100,
        ),
        _plot(study_outcome, "Hookup", "s", "from the launch to the end of the first step", lambda row: row.hookup_s),
    ]


def _plot(study_outcome: Outcome, title: str, unit: str, note: str, figure: Callable[[Row], float | None]) -> Plot:
    named = styles(study_outcome)
    values: dict[tuple[int, int, int, str], dict[int, tuple[float, Row]]] = {}
    for row in study_outcome.rows:
        value = figure(row)
        if row.throughput is not None and value is not None:
            kept = values.setdefault(row.cell.series, {})
            if row.cell.ranks not in kept or value > kept[row.cell.ranks][0]:  # as many ranks on other numbers of hosts
                kept[row.cell.ranks] = value, row
    ranks = sorted({rank for kept in values.values() for rank in kept})
    axes = LineAxes(FRAME, ranks[0], ranks[-1], max(value for kept in values.values() for value, _ in kept.values()))
    curves, dots = [], []
    for key, kept in values.items():
        name, css = named[key]
        series = {rank: kept[rank][0] for rank in sorted(kept)}
        curves.append(Curve(path=axes.path(series), css=f"line series {css}", title=name))
        for rank, value in series.items():
            cell = kept[rank][1].cell
            tooltip = f"{name}, {cell.hosts} × {cell.gpus}: {number(value)} {unit}"
            dots.append((axes.x(rank), axes.y(value), f"series {css}", tooltip))
    return Plot(
        title=title,
        unit=unit,
        note=note,
        x_ticks=axes.x_ticks(ranks, str),
        y_ticks=axes.y_ticks(),
        curves=tuple(curves),
        dots=tuple(dots),
    )


def bars(study_outcome: Outcome) -> list[Bar]:
    """Return where the time of each measured cell went."""
    timed = [row for row in study_outcome.rows if row.wall_s and row.hookup_s is not None and row.train_s is not None]
    longest = max((row.wall_s or 0.0 for row in timed), default=0.0)
    several_epochs = len({row.cell.epochs for row in timed}) > 1
    drawn = []
    for row in timed:
        wall, hookup, train = row.wall_s or 0.0, row.hookup_s or 0.0, row.train_s or 0.0
        times = ((0, "hookup", hookup), (2, "training", train), (16, "test and end", max(0.0, wall - hookup - train)))
        parts = ((colour, f"{name}: {duration(seconds)}", seconds) for colour, name, seconds in times)
        label = f"{row.cell.hosts} × {row.cell.gpus}, {series_name(row.cell.series, with_epochs=several_epochs)}"
        drawn.append(stacked_bar(label, duration(wall), parts, longest))
    return drawn
