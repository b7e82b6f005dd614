"""Plots of figures by month: median over all hosts, band from the 5 % to the 95 % quantile, and a line for each drifting rack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.history.database import History
from fleet.history.driver_effects import DriverEffect
from fleet.history.tables import within_kind
from fleet.history.trends import Drift
from fleet.quantities import quantity
from fleet.report.charts.line import Frame, Tick
from fleet.report.formatting import clean

FRAME = Frame(width=480.0, height=220.0, left=78.0, right=14.0, top=16.0, bottom=26.0)
MAX_PLOTS = 12
MARGIN = 0.08
"""Free space above the highest and below the lowest value, each as a share of the range of the values."""
MIN_RANGE = 0.02
"""Smallest range of the vertical axis, as a share of the median of the monthly medians: noise must not look like a trend."""
X_TICKS = 6
Figure = tuple[str, str, str, str, str]
"""Name, settings, stage, `within`, model. `within` says what was measured (`within_kind`): `link=*` for the links of a part,
`peer=*` for copies between a part and others, empty for the part itself."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The curve of a rack that drifts: its SVG path and its tooltip."""

    path: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The mark of a month in which a driver was new: its position in pixels and its tooltip."""

    x: float
    title: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """The plot of one figure."""

    title: str
    note: str
    description: str
    """Text for screen readers."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    band: str
    median: str
    racks: tuple[Line, ...]
    drivers: tuple[Mark, ...]


def plots(
    history: History, months: Sequence[str], drivers: Mapping[str, tuple[str, ...]], drifting: Sequence[Drift],
    effects: Sequence[DriverEffect],
) -> tuple[Plot, ...]:  # fmt: skip
    """Return the plots of at most MAX_PLOTS figures.

    Figures that drift or changed with a driver come first, then those measured most often. A figure that was measured in fewer
    than two of the months gets no plot.
    """
    chosen = _chosen(history, drifting, effects)
    spreads = _spreads(history, chosen, months)
    racks = {item.id: item for item in drifting if item.level == "rack"}
    result = []
    for figure in chosen:
        points = spreads.get(figure, {})
        drifting_racks = {
            rack: _rack_values(history, figure, rack, months)
            for rack, item in racks.items()
            if _of_drift(item) == figure
        }
        if len(points) > 1:
            result.append(_plot(figure, points, drifting_racks, months, drivers))
    return tuple(result)


def _of_drift(item: Drift | DriverEffect) -> Figure:
    """Return the figure to plot. If `item` is about one link or peer, all links or peers are plotted together."""
    return item.name, item.settings, item.stage, within_kind(item.within), item.model


def _chosen(history: History, drifting: Sequence[Drift], effects: Sequence[DriverEffect]) -> list[Figure]:
    most = history.rows(
        "select name, settings, stage, within, model from series where level = 'host' group by all "
        "order by sum(n) desc, count(distinct id) desc, name, settings desc limit $limit",
        {"limit": MAX_PLOTS},
    )
    noted = [*map(_of_drift, drifting), *map(_of_drift, effects)]
    measured: list[Figure] = [(name, settings, stage, within, model) for name, settings, stage, within, model in most]
    return list(dict.fromkeys([*noted, *measured]))[:MAX_PLOTS]


def _spreads(
    history: History, figures: Sequence[Figure], months: Sequence[str]
) -> dict[Figure, dict[int, tuple[Any, ...]]]:
    """Return figure -> index in `months` -> 5 % quantile, median, 95 % quantile and unit.

    They are computed from the values of all hosts in all runs of the month. Runs with a wrong date are left out
    (`fleet/history/clocks.py`).
    """
    columns = {
        key: [figure[at] for figure in figures]
        for at, key in enumerate(("name", "settings", "stage", "within", "model"))
    }
    rows = history.rows(
        """with chosen as (select unnest($name) as name, unnest($settings) as settings, unnest($stage) as stage,
          unnest($within) as within, unnest($model) as model)
        select name, settings, stage, within, model, strftime("began", '%Y-%m') as month, quantile_cont(value, 0.05),
          median(value), quantile_cont(value, 0.95), any_value(unit)
        from levels semi join chosen using (name, settings, stage, within, model) where level = 'host'
          and nonce in (select nonce from runs where clock = '')
        group by 1, 2, 3, 4, 5, 6""",
        columns,
    ) if figures else []  # fmt: skip
    number = {month: at for at, month in enumerate(months)}
    result: dict[Figure, dict[int, tuple[Any, ...]]] = {}
    for name, settings, stage, within, model, month, *values in rows:
        if month in number:
            result.setdefault((name, settings, stage, within, model), {})[number[month]] = tuple(values)
    return result


def _rack_values(history: History, figure: Figure, rack: str, months: Sequence[str]) -> dict[int, float]:
    rows = history.rows(
        """select strftime("began", '%Y-%m'), median(value) from levels where level = 'rack' and id = $rack and name = $name
        and nonce in (select nonce from runs where clock = '') and settings = $settings
        and stage = $stage and within = $within and model = $model group by 1""",
        {"rack": rack, **dict(zip(("name", "settings", "stage", "within", "model"), figure, strict=True))},
    )
    number = {month: at for at, month in enumerate(months)}
    return {number[month]: value for month, value in sorted(rows) if month in number}


def _plot(
    figure: Figure, points: Mapping[int, tuple[Any, ...]], racks: Mapping[str, Mapping[int, float]], months: Sequence[str],
    drivers: Mapping[str, tuple[str, ...]],
) -> Plot:  # fmt: skip
    name, settings, stage, within, model = figure
    unit, middle = (
        str(next(iter(points.values()))[3]),
        sorted(values[1] for values in points.values())[len(points) // 2],
    )
    all_values = [value for values in points.values() for value in values[:3]] + [
        value for of_rack in racks.values() for value in of_rack.values()
    ]
    low, high = min(all_values), max(all_values)
    space = max((high - low) * (1 + 2 * MARGIN), abs(middle) * MIN_RANGE) or 1.0
    bottom = (low + high - space) / 2
    width, height = FRAME.width - FRAME.left - FRAME.right, FRAME.height - FRAME.top - FRAME.bottom

    def x(month: int) -> float:
        return round(FRAME.left + width * month / max(1, len(months) - 1), 1)

    def y(value: float) -> float:
        return float(round(FRAME.top + height * (1 - (value - bottom) / space), 1))

    order = sorted(points)
    step = -(-len(months) // X_TICKS)
    upper_edge = [f"{x(at):g},{y(points[at][2]):g}" for at in order]
    lower_edge = [f"{x(at):g},{y(points[at][0]):g}" for at in reversed(order)]
    first, last = (quantity(points[at][1], unit, 4) for at in (order[0], order[-1]))
    return Plot(
        title=clean(f"{name} {settings}".strip()),
        note=clean(", ".join(filter(None, (model, stage, within)))),
        description=f"median {first} in {months[order[0]]}, {last} in {months[order[-1]]}",
        x_ticks=tuple(Tick(at=x(at), text=months[at]) for at in range(0, len(months), step)),
        y_ticks=tuple(Tick(at=y(bottom + space * at / 4), text=quantity(bottom + space * at / 4, unit, 4)) for at in (0, 2, 4)),
        band=f"M{'L'.join([*upper_edge, *lower_edge])}Z",
        median=_path({at: values[1] for at, values in points.items()}, x, y),
        racks=tuple(
            Line(path=_path(values, x, y), title=f"rack {clean(rack)}") for rack, values in racks.items() if len(values) > 1
        ),
        drivers=tuple(
            Mark(x=x(at), title=f"{month}: driver {', '.join(map(clean, drivers[month]))}")
            for at, month in enumerate(months) if month in drivers
        ),
    )  # fmt: skip


def _path(values: Mapping[int, float], x: Any, y: Any) -> str:
    return "M" + "L".join(f"{x(at):g},{y(values[at]):g}" for at in sorted(values))
