"""Compute the distribution of each figure over the fleet, with the limits of the criteria that judged it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from fleet.quantities import finite
from fleet.report.charts.strip import Bin
from fleet.report.formatting import is_change
from fleet.report.tables.figure import FigureKey, figure_key
from fleet.report.tables.gpus import IN_OTHER_TABLES
from schemas.records import MEASURED
from schemas.reports import ALL, FAIL, INCONCLUSIVE, PASS, FleetReport, Judged
from schemas.scopes import Scope

UNJUDGED = "unjudged"
SEVERITY = {FAIL: 0, INCONCLUSIVE: 1, PASS: 2, UNJUDGED: 3}

Limit = tuple[str, float]
"""Operator and limit of a criterion."""


@dataclass(frozen=True)
class Point:
    """The value of one part, and its state: the most severe verdict on the value, or UNJUDGED."""

    host: str
    scope: str
    value: float
    state: str


@dataclass(kw_only=True)
class Distribution:
    """The values of one figure over the fleet, and the criteria that judged them."""

    key: FigureKey
    unit: str
    change: bool = False
    """Whether the values are changes of counters during the run, not readings."""
    points: dict[tuple[str, str], Point] = field(default_factory=dict)
    """Host and scope -> point; in a large fleet only the worst points."""
    bins: list[Bin] = field(default_factory=list)
    """Histogram of all values in a large fleet; otherwise empty, because `points` has every value."""
    range: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Lowest, median, highest."""
    count: int = 0
    """Number of values."""
    failed: int = 0
    """Number of parts that fail. In a large fleet, the number of failures of the criterion with the most failures."""
    inconclusive: int = 0
    """Number of inconclusive points, plus number of inconclusive verdicts without a value. In a large fleet, the number of
    inconclusive verdicts of the criterion with the most of them."""
    limits: dict[Limit, None] = field(default_factory=dict)
    criteria: dict[str, None] = field(default_factory=dict)

    def add(self, point: Point) -> None:
        """Add a point. Of several points of the same part, keep the one with the most severe state."""
        known = self.points.get((point.host, point.scope))
        if known is None or SEVERITY[point.state] < SEVERITY[known.state]:
            self.points[point.host, point.scope] = point

    def summarize(self) -> None:
        """Compute range and counts from the points.

        `inconclusive` must already be the number of inconclusive verdicts without a value.
        """
        values = [point.value for point in self.points.values()]
        self.range = (min(values), statistics.median(values), max(values))
        self.count = len(values)
        self.failed = sum(point.state == FAIL for point in self.points.values())
        self.inconclusive += sum(point.state == INCONCLUSIVE for point in self.points.values())


def distributions(report: FleetReport) -> list[Distribution]:
    """Return the distribution of each figure with numeric values.

    It is computed from the verdicts and measurements, or in a large fleet from `FleetReport.judged`.
    """
    return _of_verdicts(report) if report.detail == ALL else _of_spreads(report.judged)


def _of_verdicts(report: FleetReport) -> list[Distribution]:
    """Return the distributions from all verdicts and measurements that are numbers.

    Measurements of more than one device and the figures in IN_OTHER_TABLES are left out.
    """
    figures: dict[FigureKey, Distribution] = {}
    without_value: Counter[FigureKey] = Counter()
    for verdict in report.verdicts:
        key, value, limit = figure_key(verdict), finite(verdict.value), finite(verdict.limit)
        if value is None or not verdict.operator:
            without_value[key] += verdict.verdict == INCONCLUSIVE
            continue
        figure = figures.setdefault(key, Distribution(key=key, unit=verdict.unit, change=is_change(verdict)))
        figure.criteria[verdict.criterion] = None
        if limit is not None:
            figure.limits[verdict.operator, limit] = None
        figure.add(Point(verdict.host, verdict.scope, value, verdict.verdict))
    for host in report.hosts:
        for observation in host.measurements:
            value = finite(observation.value)
            is_listed = observation.status == MEASURED and observation.name not in IN_OTHER_TABLES
            if value is None or not is_listed or not Scope.parse(observation.scope).is_one_device:
                continue
            key = figure_key(observation)
            figure = figures.setdefault(key, Distribution(key=key, unit=observation.unit))
            figure.add(Point(host.name, observation.scope, value, UNJUDGED))
    for key, figure in figures.items():
        figure.inconclusive = without_value[key]
        figure.summarize()
    return list(figures.values())


def _of_spreads(judged: Iterable[Judged]) -> list[Distribution]:
    """Return the figures of a large fleet.

    Several criteria may judge a figure. The histogram is that of the criterion with the most values. The worst parts are those of
    all criteria.
    """
    by_figure: dict[tuple[object, ...], list[Judged]] = {}
    for row in judged:
        by_figure.setdefault((row.name, row.stage, tuple(row.params.items()), row.unit), []).append(row)
    figures = []
    for rows in by_figure.values():
        spreads = [(row, row.spread) for row in rows if row.spread and row.operator]
        if not spreads:
            continue
        first, spread = max(spreads, key=lambda pair: pair[1].n)
        width = (spread.max - spread.min) / max(len(spread.bins), 1)
        figure = Distribution(
            key=FigureKey(first.name, first.stage, tuple(first.params.items())),
            unit=first.unit,
            bins=[Bin(spread.min + number * width, width, count) for number, count in enumerate(spread.bins) if count],
            range=(spread.min, spread.p50, spread.max),
            count=spread.n,
            failed=max(row.failed for row in rows),
            inconclusive=max(row.inconclusive for row in rows),
            limits={(row.operator, limit): None for row, _ in spreads if (limit := finite(row.limit)) is not None},
            criteria={row.criterion: None for row in rows},
        )
        for part in (part for row in rows for part in row.farthest):
            if (value := finite(part.value)) is not None:
                figure.add(Point(part.host, part.scope, value, part.verdict))
        figures.append(figure)
    return figures
