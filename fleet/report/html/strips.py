"""Build the strip plots of the report page.

A figure is one quantity, measured with the same settings on all parts. Its strip plot shows the values of all parts along one
axis. A figure that has the same value on every part, and fails on none, is listed as text instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fleet.diagnosis.words import label
from fleet.quantities import SIGNS, counted, finite, quantity
from fleet.report.charts.strip import Axis, Dot, Mark, bars_path, draw_strip
from fleet.report.formatting import clean, margin_of, margin_text, params_text, value_and_limit
from fleet.report.links import host_anchor
from fleet.report.tables.distributions import SEVERITY, UNJUDGED, Distribution, Limit, Point, distributions
from fleet.report.tables.figure import figure_key
from fleet.report.tables.reasons import Reason
from fleet.report.titles import TITLES, benchmark_title
from fleet.scope_text import describe_scope
from schemas.records import Value
from schemas.reports import FAIL, FleetReport, Verdict
from schemas.stages import BENCHMARK

HEALTH = "Health"
_MAX_WORST = 3
_EQUAL = 1.0
"""Percent of the axis. `wrong_sides` leaves this much free on both sides of a limit that values must equal."""

_ORDERED = ("ge", "gt", "le", "lt")


@dataclass(frozen=True, kw_only=True)
class WorstPart:
    """A part that is listed beside a strip plot; `_worst` selects these parts."""

    host: str
    anchor: str
    part: str
    value: str
    margin: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Strip:
    """The strip plot of one figure."""

    label: str
    settings: str
    count: int
    failed: int
    inconclusive: int
    median: str
    lowest: str
    highest: str
    wanted: tuple[str, ...]
    criteria: tuple[str, ...]
    limits: tuple[float, ...]
    """Positions of the limits that are drawn, in percent of the axis."""
    wrong: tuple[tuple[float, float], ...]
    """Begin and width of each region in which values fail, in percent of the axis."""
    axis: tuple[str, str]
    """Labels of the two ends of the axis."""
    dots: tuple[Dot, ...]
    bars: str
    worst: tuple[WorstPart, ...]

    @property
    def description(self) -> str:
        """Return the plot in words, for screen readers."""
        wanted = f", wanted {' and '.join(self.wanted)}" if self.wanted else ", no criterion"
        return (
            f"{self.label} {self.settings}: {counted(self.count, 'value')} from {self.lowest} to {self.highest}, "
            f"median {self.median}{wanted}, {self.failed} failing"
        )


@dataclass(frozen=True, kw_only=True)
class ConstantFigure:
    """A figure that has the same value on every part, and fails on none."""

    label: str
    settings: str
    value: str
    wanted: str
    count: int
    inconclusive: int


@dataclass(frozen=True, kw_only=True)
class StripGroup:
    """The figures of one benchmark, or of the health readings."""

    title: str
    strips: tuple[Strip, ...]
    """Figures that a criterion judged, and that vary or fail."""
    unjudged: tuple[Strip, ...]
    """Figures that vary, and that no criterion judged."""
    constant: tuple[ConstantFigure, ...]

    @property
    def failed(self) -> int:
        """Return the number of figures that fail on some part."""
        return sum(bool(strip.failed) for strip in self.strips)


def groups(report: FleetReport) -> list[StripGroup]:
    """Return the groups: health first, then the benchmarks in the order of `TITLES`. In a group, figures that fail come first."""
    by_title: dict[str, tuple[list[Strip], list[ConstantFigure]]] = {}
    for distribution in distributions(report):
        strips, constants = by_title.setdefault(_group_title(distribution.key.name), ([], []))
        low, _, high = distribution.range
        if low == high and not distribution.failed:
            constants.append(_constant(distribution))
        else:
            strips.append(_strip(distribution))
    order = [HEALTH, *TITLES.values()]
    return [
        StripGroup(
            title=name,
            strips=tuple(sorted((strip for strip in strips if strip.criteria), key=lambda strip: not strip.failed)),
            unjudged=tuple(strip for strip in strips if not strip.criteria),
            constant=tuple(constants),
        )
        for name, (strips, constants) in sorted(by_title.items(), key=lambda item: order.index(item[0]))
    ]


def _group_title(name: str) -> str:
    benchmark = name.removeprefix("drift.").partition(".")[0]
    return benchmark_title(benchmark) if benchmark in TITLES else HEALTH


def _constant(figure: Distribution) -> ConstantFigure:
    return ConstantFigure(
        label=_label(figure),
        settings=_settings(figure),
        value=quantity(_as_integer(figure.range[0]), figure.unit),
        wanted=" and ".join(_limits_text(figure)),
        count=figure.count,
        inconclusive=figure.inconclusive,
    )


def _strip(figure: Distribution) -> Strip:
    limits, unit = list(figure.limits), figure.unit
    drawn = drawn_limits(limits)
    low, median, high = figure.range
    axis = Axis.around([low, high, *drawn])
    dots, bars = draw_strip([_mark(point, unit) for point in figure.points.values()], figure.bins, axis)
    operators = {operator for operator, _ in limits}
    return Strip(
        label=_label(figure),
        settings=_settings(figure),
        count=figure.count,
        failed=figure.failed,
        inconclusive=figure.inconclusive,
        median=quantity(median, unit),
        lowest=quantity(low, unit),
        highest=quantity(high, unit),
        wanted=_limits_text(figure),
        criteria=tuple(figure.criteria),
        limits=tuple(axis.percent(limit) for limit in drawn),
        wrong=wrong_sides([(operator, axis.percent(limit)) for operator, limit in limits]),
        axis=_ends(axis, unit),
        dots=dots,
        bars=bars,
        worst=_worst(figure.points.values(), limits, unit) if figure.failed or operators & {*_ORDERED} else (),
    )


def drawn_limits(limits: Sequence[Limit]) -> list[float]:
    """Return the limits to draw as lines: all, or if there are more than two, only the loosest."""
    if len(limits) <= 2:
        return [limit for _, limit in limits]
    by_operator: dict[str, list[float]] = {}
    for operator, limit in limits:
        by_operator.setdefault(operator[0], []).append(limit)
    edges = {"g": [min], "l": [max], "e": [min, max]}
    return sorted({edge(values) for first, values in by_operator.items() for edge in edges[first]})


def wrong_sides(limits: Iterable[Limit]) -> tuple[tuple[float, float], ...]:
    """Return begin and width of each region in which values fail, in percent of the axis.

    Values may have different limits. Only the loosest are used: the lowest minimum, the highest maximum, and the lowest and the
    highest of the limits that values must equal.

    Args:
        limits: operator and position of each limit, the position in percent of the axis.
    """
    by_operator: dict[str, list[float]] = {}
    for operator, x in limits:
        by_operator.setdefault(operator[0], []).append(min(max(x, 0.0), 100.0))
    regions: list[tuple[float, float]] = []
    for first, positions in by_operator.items():
        low, high = min(positions), max(positions)
        if first in ("g", "e"):
            regions.append((0.0, low - (_EQUAL if first == "e" else 0.0)))
        if first in ("l", "e"):
            begin = high + (_EQUAL if first == "e" else 0.0)
            regions.append((begin, 100.0 - begin))
    return tuple((round(begin, 2), round(width, 2)) for begin, width in regions if width > 0)


@dataclass(frozen=True, kw_only=True)
class EvidencePlot:
    """The value of one part, with the limit that it was compared with, and a histogram of the figure on all parts."""

    name: str
    value: str
    wanted: str
    margin: str
    x: float
    """Position of the value, in percent of the axis."""
    limit: float
    """Position of the limit, in percent of the axis."""
    wrong: tuple[tuple[float, float], ...]
    """Begin and width of each region in which values fail, in percent of the axis."""
    bars: str
    """SVG path of the histogram."""
    ends: tuple[str, str]
    """Labels of the two ends of the axis."""
    parts: int
    """Number of values in the histogram."""


def evidence(report: FleetReport, reasons: Iterable[Reason]) -> dict[int, EvidencePlot]:
    """Return `id(reason)` -> plot.

    The plot shows the first verdict of `Reason.candidates` that compares a number with a limit, and whose figure has several
    values. A reason without such a verdict has no plot.
    """
    wanted = [
        (reason, [item for item in reason.candidates if item.operator in (*_ORDERED, "eq")]) for reason in reasons
    ]
    if not any(candidates for _, candidates in wanted):
        return {}
    figures = {figure.key: figure for figure in distributions(report) if figure.count > 1}
    pictures = {}
    for reason, candidates in wanted:
        drawn = (_evidence(verdict, figures.get(figure_key(verdict))) for verdict in candidates)
        if picture := next((item for item in drawn if item), None):
            pictures[id(reason)] = picture
    return pictures


def _evidence(verdict: Verdict, figure: Distribution | None) -> EvidencePlot | None:
    value, limit = finite(verdict.value), finite(verdict.limit)
    if figure is None or value is None or limit is None or figure.unit != verdict.unit:
        return None
    axis = Axis.around([figure.range[0], figure.range[2], value, limit])
    x = axis.percent(limit)
    value_text, limit_text = value_and_limit(verdict)
    margin = margin_of(value, verdict.operator, limit)
    settings = params_text(verdict.params)
    return EvidencePlot(
        name=f"{label(verdict.name)} ({settings})" if settings else label(verdict.name),
        value=value_text,
        wanted=limit_text,
        margin=margin_text(margin) if margin is not None else "",
        x=axis.percent(value),
        limit=x,
        wrong=wrong_sides([(verdict.operator, x)]),
        bars=bars_path(figure.bins or axis.histogram(point.value for point in figure.points.values()), axis),
        ends=_ends(axis, verdict.unit),
        parts=figure.count,
    )


def _ends(axis: Axis, unit: str) -> tuple[str, str]:
    return ("0" if axis.low == 0 else quantity(axis.low, unit, 3), quantity(axis.high, unit, 3))


def _label(figure: Distribution) -> str:
    rest = figure.key.name.partition(".")[2]
    text = rest.replace("_", " ") if figure.key.benchmark in TITLES else label(figure.key.name)
    return f"{text or benchmark_title(figure.key.benchmark)}{', change' if figure.change else ''}"


def _settings(figure: Distribution) -> str:
    stage = figure.key.stage if figure.key.stage != BENCHMARK else ""
    return ", ".join(text for text in (params_text(figure.key.params), stage) if text)


def _as_integer(value: float) -> Value:
    """Return a whole number below 1e15 as an `int`, and any other value unchanged."""
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else value


def _limit_text(operator: str, limit: float, unit: str) -> str:
    return f"{SIGNS.get(operator, '')} {quantity(_as_integer(limit), unit)}".strip()


def _limits_text(figure: Distribution) -> tuple[str, ...]:
    """Return each limit as text: `≥ 697 TFLOP/s`.

    If there are more than two limits, for example one for each GPU model, return one text per operator, with the lowest and the
    highest limit: `≥ 600 TFLOP/s … 697 TFLOP/s`.
    """
    limits = list(figure.limits)
    if len(limits) <= 2:
        return tuple(_limit_text(*limit, figure.unit) for limit in limits)
    by_operator: dict[str, list[float]] = {}
    for operator, limit in limits:
        by_operator.setdefault(operator, []).append(limit)
    return tuple(
        _limit_text(operator, min(values), figure.unit)
        + (f" … {quantity(max(values), figure.unit)}" if len(values) > 1 else "")
        for operator, values in by_operator.items()
    )


def _mark(point: Point, unit: str) -> Mark:
    state = {FAIL: ", fails", UNJUDGED: ", not judged"}.get(point.state, "")
    text = f"{clean(point.host)} {describe_scope(point.scope)}: {quantity(point.value, unit)}{state}"
    return Mark(point.value, point.state, text)


def _worst(points: Iterable[Point], limits: Sequence[Limit], unit: str) -> tuple[WorstPart, ...]:
    """Return up to _MAX_WORST failing parts, furthest beyond the limit first.

    If no part fails, return the inconclusive part with the smallest margin. If no part is inconclusive either, return the passing
    part with the smallest margin.
    """
    ordered = sorted(
        (point for point in points if point.state != UNJUDGED),
        key=lambda point: (SEVERITY[point.state], _margin(point.value, limits) or 0.0),
    )
    shown = [point for point in ordered[:_MAX_WORST] if point.state == FAIL] or ordered[:1]
    return tuple(_worst_part(point, _margin(point.value, limits), unit) for point in shown)


def _margin(value: float, limits: Iterable[Limit]) -> float | None:
    """Return the smallest of the margins (`margin_of`) between a value and its limits; None if no limit has a margin."""
    margins = (margin_of(value, operator, limit) for operator, limit in limits)
    return min((margin for margin in margins if margin is not None), default=None)


def _worst_part(point: Point, margin: float | None, unit: str) -> WorstPart:
    return WorstPart(
        host=clean(point.host),
        anchor=host_anchor(point.host),
        part=describe_scope(point.scope) if point.scope != "host" else "",
        value=quantity(point.value, unit),
        margin=margin_text(margin) if margin is not None else "",
        verdict=point.state,
    )
