"""Compare a figure of one part with that of its peers over many runs. Peers may join or leave between runs.

Model: the logarithm of a value is the level of its part plus the effect of its run. The levels of the peers and the effects of
the runs are fitted alternately by medians (median polish, Tukey 1977), from the values of the peers only. The course of the part
is the logarithms of its values minus the effects of the runs.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fleet.history.database import History
from fleet.history.regression import Point, fit_line, weakest_z
from fleet.history.tables import DAYS, MIN_PEERS, WITHIN_KIND, within_kind

ITERATIONS = 10
MIN_FITTED_PEERS = 2
STEP_RATIO = 0.5
"""A change is a step if two constant levels fit much better than a line: the ratio of their sums of squared residuals is below
this."""
MIN_AT_EDGE = 2
"""Minimum number of points on each side of a step."""
DAY_S = 86400.0
_TABLES = {"gpu": ("figures", "serial", "not duplicate"), "host": ("levels", "id", "level = 'host'"),
           "rack": ("levels", "id", "level = 'rack'")}  # fmt: skip
_PEERS = {("gpu", "host"): "a.host = b.host", ("host", "rack"): "a.rack = b.rack"}
"""Level and reference (columns of a series, see `tables`) -> SQL condition under which part b of a run is a peer of part a. For
other pairs of level and reference, all parts of the run are peers."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """The change of a figure of a part over time, relative to the peers of the part."""

    slope: float
    """Change of the logarithm per day."""
    error: float
    """Standard error of the slope."""
    z: float
    """Absolute slope divided by its error, converted to a normal deviate."""
    freedom: float
    """Degrees of freedom of `error`."""
    weakest_z: float
    """Smallest `z` of the fits that leave out one point each. A fit whose slope has another sign than `slope` has a
    negative `z`."""
    change: float
    """Change of the logarithm: slope times the observed time or, for a step, the difference of the two levels."""
    step_at: str
    """Date of a step; empty if the change is not a step."""


def course(history: History, series: Mapping[str, Any]) -> Course | None:
    """Return the course of a series (a row from `trends._candidates`); None if it has too few peers or points."""
    points: dict[str, tuple[datetime, float]] = {}
    others: dict[str, dict[str, float]] = defaultdict(dict)
    for nonce, began, part, value in _rows(history, series):
        if part == series["id"]:
            points[nonce] = (began, value)
        else:
            others[part][nonce] = value
    effects = _run_effects(others)
    own = sorted((began, value - effects[nonce]) for nonce, (began, value) in points.items() if nonce in effects)
    if len(others) < MIN_FITTED_PEERS or len(own) < 2 * MIN_AT_EDGE + 1:
        return None
    days = [moment.replace(tzinfo=UTC).timestamp() / DAY_S for moment, _ in own]
    values = [value for _, value in own]
    slope, error, z = fit_line(days, values)
    step_at, step = _step(days, values)
    return Course(
        slope=slope,
        error=error,
        z=z,
        freedom=len(days) - 2,
        weakest_z=weakest_z([("", day, value) for day, value in zip(days, values, strict=True)], slope),
        change=step if step_at else slope * (days[-1] - days[0]),
        step_at=step_at,
    )


def alone_points(history: History, series: Mapping[str, Any]) -> list[Point]:
    """Return (group, day, value) for each point of a series that has no Course.

    The value is the logarithm of the figure minus what the part has in common with its peers:

    - reference `month`: the median of the peers in the same month and under the same driver;
    - no reference: a common slope (`shared_slope`) times the day. Each driver is a group with its own level;
    - other references: the median of the peers in the run, which is already subtracted in the column `relative`.
    """
    table, part, condition = _TABLES[series["level"]]
    figure = "name = $name and settings = $settings and stage = $stage and within = $within and model = $model"
    reference = "" if series["reference"] == "month" else series["reference"]
    chosen = f"(from {table} where {condition} and {figure} and reference = '{reference}' and relative is not null and value > 0)"
    rows = history.rows(
        f"""with chosen as (
          select {part} as id, driver, date_trunc('month', "began") as month, {DAYS} as day,
            ln(value) as y, relative from {chosen}
        ), middles as (select driver, month, median(y) as middle, count(distinct id) as parts from chosen group by all)
        select driver, day, y, middle, parts, relative from chosen join middles using (driver, month) where id = $id""",
        {key: series[key] for key in ("id", "name", "settings", "stage", "within", "model")},
    )
    if series["reference"] == "month":
        return [("", day, y - middle) for _, day, y, middle, parts, _ in rows if parts >= MIN_PEERS]
    if reference:
        return [("", day, relative) for _, day, *_, relative in rows]
    return [(driver, day, y - series["shared_slope"] * day) for driver, day, y, *_ in rows]


def _rows(history: History, series: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return (nonce, time, label, logarithm of the value) of the part and of its peers, in the runs that measured the part.

    The label of the part is its id. The label of a peer is its id and `within`.
    """
    table, part, condition = _TABLES[series["level"]]
    peers = _PEERS.get((series["level"], series["reference"]), "true")
    figure = "name = $name and settings = $settings and stage = $stage and model = $model and value > 0 and relative is not null"
    within = "within = $within" if series["level"] != "gpu" else f"{WITHIN_KIND} = $kind"
    chosen = f"(select * from {table} where {condition} and {figure} and {within})"
    keys = ("id", "name", "settings", "stage", "model", "within")
    values = {key: series[key] for key in keys}
    if series["level"] == "gpu":
        values["kind"] = within_kind(series["within"])
    label = f"case when b.{part} = $id then $id else b.{part} || ' ' || b.within end"
    return history.rows(
        f"""select b.nonce, b."began", {label}, ln(b.value) from {chosen} a join {chosen} b
        on a.nonce = b.nonce and a.driver = b.driver and {peers} and (b.{part} <> $id or b.within = $within)
        where a.{part} = $id and a.within = $within""",
        values,
    )


def _run_effects(others: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return nonce -> effect of the run, fitted to the peers that were measured in at least half of the runs."""
    runs = {nonce for values in others.values() for nonce in values}
    kept = {part: values for part, values in others.items() if 2 * len(values) >= len(runs)}
    effects = dict.fromkeys({nonce for values in kept.values() for nonce in values}, 0.0)
    for _ in range(ITERATIONS):
        levels = {
            part: statistics.median(value - effects[nonce] for nonce, value in values.items())
            for part, values in kept.items()
        }
        residuals: dict[str, list[float]] = defaultdict(list)
        for part, values in kept.items():
            for nonce, value in values.items():
                residuals[nonce].append(value - levels[part])
        effects = {nonce: statistics.median(values) for nonce, values in residuals.items()}
    return effects


def _step(days: Sequence[float], values: Sequence[float]) -> tuple[str, float]:
    """Return date and size of a step if two levels fit the values much better than a line (STEP_RATIO); else ('', 0.0)."""
    slope, intercept = statistics.linear_regression(days, values)
    line = sum((value - intercept - slope * day) ** 2 for day, value in zip(days, values, strict=True))
    cuts = range(MIN_AT_EDGE, len(values) - MIN_AT_EDGE + 1)
    best, cut = min((_squares(values[:cut]) + _squares(values[cut:]), cut) for cut in cuts)
    if best >= STEP_RATIO * line:
        return "", 0.0
    size = statistics.fmean(values[cut:]) - statistics.fmean(values[:cut])
    return f"{datetime.fromtimestamp(days[cut] * DAY_S, UTC):%Y-%m-%d}", size


def _squares(values: Sequence[float]) -> float:
    middle = statistics.fmean(values)
    return sum((value - middle) ** 2 for value in values)
