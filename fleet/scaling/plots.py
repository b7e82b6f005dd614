"""Draw the results of a scaling study: plots of figures by number of ranks, and a bar with the time of each cell.

A cell is one combination of hosts, GPUs and settings, measured in a launch of its own. A series is the cells that differ only in
hosts and GPUs. Hookup is the time from the launch to the end of the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fleet.quantities import number
from fleet.report.charts.bar import Bar, stacked_bar
from fleet.report.charts.line import Curve, Frame, LineAxes, Tick
from fleet.report.formatting import duration
from fleet.scaling.results import CellResult, StudyResults

FRAME = Frame(width=480.0, height=260.0, left=52.0, right=14.0, top=24.0, bottom=26.0)
COLOUR_COUNT = 8
"""Number of colours in scaling.css. If there are more series, the next COLOUR_COUNT series have dashed lines in these colours."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot of one figure by number of ranks, with a curve for each series."""

    title: str
    unit: str
    note: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    dots: tuple[tuple[float, float, str, str], ...]
    """X, y, CSS class and tooltip of each dot. A dot is a cell that a curve goes through."""


def styles(results: StudyResults) -> Mapping[tuple[int, int, int, str], tuple[str, str]]:
    """Return key of a series (`Cell.series`) -> its name and CSS class, for each series with a measured cell."""
    series = dict.fromkeys(row.cell.series for row in results.rows if row.throughput is not None)
    has_several_epochs = len({key[1] for key in series}) > 1
    return {
        key: (
            series_name(key, with_epochs=has_several_epochs),
            f"c{index % COLOUR_COUNT}{' dashed' if index // COLOUR_COUNT % 2 else ''}",
        )
        for index, key in enumerate(series)
    }


def series_name(series: tuple[int, int, int, str], *, with_epochs: bool) -> str:
    """Return the settings that the cells of a series share, in words: `batch 128, fp32, 2 CPUs per GPU`."""
    batch, epochs, cpus, precision = series
    cpus_text = f", {cpus} CPU{'s' if cpus > 1 else ''} per GPU" if cpus else ""
    epochs_text = f", {epochs} epoch{'s' if epochs > 1 else ''}" if with_epochs else ""
    return f"batch {batch}, {precision}{cpus_text}{epochs_text}"


def plots(results: StudyResults) -> list[Plot]:
    """Return the plots of throughput, efficiency and hookup; none if no cell was measured."""
    if not any(row.throughput for row in results.rows):
        return []
    return [
        _plot(results, "Throughput", "images/s", "of all ranks", lambda row: row.throughput),
        _plot(
            results,
            "Efficiency",
            "%",
            "100 %: the images/s per rank of the measured cell with the fewest ranks in the series",
            lambda row: (row.efficiency or 0) * 100,
        ),
        _plot(results, "Hookup", "s", "from the launch to the end of the first step", lambda row: row.hookup_s),
    ]


def _plot(
    results: StudyResults, title: str, unit: str, note: str, figure: Callable[[CellResult], float | None]
) -> Plot:
    style_by_series = styles(results)
    values: dict[tuple[int, int, int, str], dict[int, tuple[float, CellResult]]] = {}
    for row in results.rows:
        value = figure(row)
        if row.throughput is not None and value is not None:
            points = values.setdefault(row.cell.series, {})
            # Cells on different numbers of hosts can have equally many ranks. Only the highest value is drawn, as the page says.
            if row.cell.ranks not in points or value > points[row.cell.ranks][0]:
                points[row.cell.ranks] = value, row
    rank_counts = sorted({count for points in values.values() for count in points})
    axes = LineAxes(
        FRAME, rank_counts[0], rank_counts[-1], max(value for points in values.values() for value, _ in points.values())
    )
    curves, dots = [], []
    for key, points in values.items():
        name, css = style_by_series[key]
        series = {count: points[count][0] for count in sorted(points)}
        curves.append(Curve(path=axes.path(series), css=f"line series {css}", title=name))
        for count, value in series.items():
            cell = points[count][1].cell
            tooltip = f"{name}, {cell.hosts} × {cell.gpus}: {number(value)} {unit}"
            dots.append((axes.x(count), axes.y(value), f"series {css}", tooltip))
    return Plot(
        title=title,
        unit=unit,
        note=note,
        x_ticks=axes.x_ticks(rank_counts, str),
        y_ticks=axes.y_ticks(),
        curves=tuple(curves),
        dots=tuple(dots),
    )


def bars(results: StudyResults) -> list[Bar]:
    """Return a bar for each measured cell, divided into hookup, training, and the rest of the launch."""
    timed = [row for row in results.rows if row.wall_s and row.hookup_s is not None and row.train_s is not None]
    longest = max((row.wall_s or 0.0 for row in timed), default=0.0)
    several_epochs = len({row.cell.epochs for row in timed}) > 1
    stacked_bars = []
    for row in timed:
        wall, hookup, train = row.wall_s or 0.0, row.hookup_s or 0.0, row.train_s or 0.0
        times = (
            (0, "hookup", hookup),
            (2, "training", train),
            (16, "evaluation and shutdown", max(0.0, wall - hookup - train)),
        )
        parts = ((colour, f"{name}: {duration(seconds)}", seconds) for colour, name, seconds in times)
        label = f"{row.cell.hosts} × {row.cell.gpus}, {series_name(row.cell.series, with_epochs=several_epochs)}"
        stacked_bars.append(stacked_bar(label, duration(wall), parts, longest))
    return stacked_bars
