"""Chart bus bandwidth against message size, one chart per collective operation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fleet.quantities import NONE, finite, number, quantity, scale, size
from fleet.report.charts.line import Curve, Frame, LineAxes, Tick
from fleet.report.tables.figure import RankGroup, rank_group
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport, Verdict

FRAME = Frame(width=360.0, height=224.0, left=40.0, right=10.0, top=24.0, bottom=26.0)
MANY_LINES = 12
"""Maximum number of curves that a chart shows one by one. If there are more, it shows their median, their range and each failed
curve."""
_LOW, _FEWEST_TO_COMPARE = 0.8, 3
"""A curve that did not fail is marked as low if its value at its largest size is below _LOW times the median of these values of
all curves. There must be at least _FEWEST_TO_COMPARE curves."""
_LOW_LINE = "line low"
"""CSS classes of a marked curve."""
_LIMIT_HALF_WIDTH = 34
"""Half the length of the horizontal line that marks a limit, in pixels."""
_MAX_SIZE = 1 << 60


Operation = tuple[str, str]
"""Name of a collective operation, and its placement: `in_place`, `out_of_place`, or empty if the record does not state it."""


@dataclass(frozen=True, kw_only=True)
class BandwidthSeries:
    """The bus bandwidth of one group of ranks."""

    label: str
    kind: str
    failed: bool
    values: Mapping[int, float]
    """Message size in bytes -> bandwidth. The unit is B/s; after `_scaled`, it is the unit of the chart."""


class Limit(NamedTuple):
    """The bus bandwidth in B/s that a criterion requires at one message size in bytes."""

    size: int
    value: float
    criterion: str


@dataclass(frozen=True, kw_only=True)
class LimitLine:
    """A limit in the chart's coordinates."""

    x1: float
    x2: float
    y: float
    text: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """The chart of one operation, and its table."""

    op: str
    """Operation with its placement: `all gather, in place`."""
    kind: str
    """`host`: within each host; `gang`: between hosts."""
    unit: str
    peak: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    limits: tuple[LimitLine, ...]
    columns: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    """A row per message size."""
    lines: int
    failed: bool
    has_low_line: bool
    """Whether a curve that does not fail is marked as far below the others."""


def charts(report: FleetReport) -> list[Chart]:
    """Return a chart per operation within hosts, then a chart per operation between hosts.

    The two kinds have separate charts, because the network between hosts is much slower than the links within a host.
    """
    by_operation = _series(report)
    verdicts = [verdict for verdict in report.verdicts if _operation(verdict)[0]]
    order = [str(op) for op in BENCHMARKS["collective"].settings["ops"]]
    operations = sorted(by_operation, key=lambda op: (order.index(op[0]) if op[0] in order else len(order), op))
    return [
        _chart(op, kind, lines, _limits(verdicts, op, kind))
        for kind in ("host", "gang")
        for op in operations
        if (lines := [line for line in by_operation[op] if line.kind == kind])
    ]


def _series(report: FleetReport) -> dict[Operation, list[BandwidthSeries]]:
    values: dict[Operation, dict[RankGroup, dict[int, float]]] = {}
    members: dict[RankGroup, set[str]] = {}
    for host in report.hosts:
        for observation in host.measurements:
            op, message, value = _operation(observation), _message_size(observation), finite(observation.value)
            if op[0] and message and value is not None and observation.status == MEASURED:
                group = rank_group(host.name, observation)
                values.setdefault(op, {}).setdefault(group, {}).setdefault(message, value)
                members.setdefault(group, set()).add(host.name)
    failed = {
        (_operation(verdict), rank_group(verdict.host, verdict))
        for verdict in report.verdicts
        if verdict.verdict == FAIL and _operation(verdict)[0]
    }
    return {
        op: [
            BandwidthSeries(
                label=group.label(len(members[group])),
                kind=group.kind,
                failed=(op, group) in failed,
                values=dict(sorted(by_size.items())),
            )
            for group, by_size in groups.items()
        ]
        for op, groups in values.items()
    }


def _operation(item: Observation | Verdict) -> Operation:
    """Return operation and placement if `item` is a bus bandwidth; two empty strings for any other figure."""
    family, _, rest = item.name.partition(".")
    op, _, kind = rest.partition(".")
    return (op, str(item.params.get("placement", ""))) if family == "collective" and kind == "busbw" else ("", "")


def _message_size(item: Observation | Verdict) -> int:
    """Return the message size in bytes; 0 if it is missing or implausible."""
    value = finite(item.params.get("size_bytes"))
    return int(value) if value and 1 <= value <= _MAX_SIZE else 0


def _limits(verdicts: Iterable[Verdict], op: Operation, kind: str) -> list[Limit]:
    """Return the distinct limits on the bandwidth of this operation, within hosts or between hosts (`kind`)."""
    criteria: dict[tuple[int, float], str] = {}
    for verdict in verdicts:
        if _operation(verdict) == op and rank_group(verdict.host, verdict).kind == kind:
            message, limit = _message_size(verdict), finite(verdict.limit)
            if message and limit and limit > 0:
                criteria[message, limit] = verdict.criterion
    return [Limit(message, limit, criterion) for (message, limit), criterion in criteria.items()]


def _chart(op: Operation, kind: str, series: Sequence[BandwidthSeries], limits: Sequence[Limit]) -> Chart:
    sizes = sorted({message for line in series for message in line.values})
    limits = [limit for limit in limits if limit.size in sizes]
    peak_line = max(series, key=lambda line: max(line.values.values()))
    peak_size = max(peak_line.values, key=lambda message: peak_line.values[message])
    peak = peak_line.values[peak_size]
    factor, unit = scale(max([peak, *(limit.value for limit in limits)]), "B/s")
    axes = LineAxes(FRAME, sizes[0], sizes[-1], max([peak, *(limit.value for limit in limits)]) / factor)
    scaled = [_scaled(line, factor) for line in series]
    columns = _columns(scaled)
    curves = tuple(_curves(scaled, axes, factor))
    return Chart(
        op=", ".join(text.replace("_", " ") for text in op if text),
        kind=kind,
        unit=unit,
        peak=f"highest {quantity(peak, 'B/s')} at {size(peak_size)}",
        x_ticks=axes.x_ticks(_tick_sizes(sizes), size),
        y_ticks=axes.y_ticks(),
        curves=curves,
        limits=tuple(_limit_line(axes, limit, factor) for limit in limits),
        columns=tuple(name for name, _ in columns),
        table=tuple(
            (size(message), *(number(values[message]) if message in values else NONE for _, values in columns))
            for message in sizes
        ),
        lines=len(series),
        failed=any(line.failed for line in series),
        has_low_line=any(curve.css == _LOW_LINE for curve in curves),
    )


def _scaled(line: BandwidthSeries, factor: float) -> BandwidthSeries:
    values = {message: value / factor for message, value in line.values.items()}
    return BandwidthSeries(label=line.label, kind=line.kind, failed=line.failed, values=values)


def _curves(series: Sequence[BandwidthSeries], axes: LineAxes, factor: float) -> Iterable[Curve]:
    if len(series) > MANY_LINES:
        low, median, high = _statistics(series)
        outline = f"{axes.path(high)}{axes.path(dict(reversed(low.items())), 'L')}Z"
        yield Curve(path=outline, css="spread", title=f"lowest to highest of {len(series)}")
        yield Curve(path=axes.path(median), css="line", title=f"median of {len(series)}")
    usual = statistics.median([line.values[max(line.values)] for line in series])
    for line in series:
        is_low = len(series) >= _FEWEST_TO_COMPARE and line.values[max(line.values)] < _LOW * usual
        if len(series) <= MANY_LINES or line.failed:
            yield _curve(line, axes, factor, is_low=is_low)


def _curve(line: BandwidthSeries, axes: LineAxes, factor: float, *, is_low: bool) -> Curve:
    last = max(line.values)
    value = quantity(line.values[last] * factor, "B/s")
    return Curve(
        path=axes.path(line.values),
        css="line failed" if line.failed else _LOW_LINE if is_low else "line",
        label=line.label if line.failed or is_low else "",
        title=f"{line.label}: {value} at {size(last)}{', fails' if line.failed else ''}",
        end=(axes.x(last), axes.y(line.values[last])),
    )


def _statistics(series: Sequence[BandwidthSeries]) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Return message size -> lowest value, size -> median, and size -> highest value of the curves."""
    sizes = sorted({message for line in series for message in line.values})
    values = {message: [line.values[message] for line in series if message in line.values] for message in sizes}
    return (
        {message: min(numbers) for message, numbers in values.items()},
        {message: statistics.median(numbers) for message, numbers in values.items()},
        {message: max(numbers) for message, numbers in values.items()},
    )


def _limit_line(axes: LineAxes, limit: Limit, factor: float) -> LimitLine:
    x = axes.x(limit.size)
    return LimitLine(
        x1=max(FRAME.left, x - _LIMIT_HALF_WIDTH),
        x2=min(FRAME.width - FRAME.right + 8, x + _LIMIT_HALF_WIDTH),
        y=axes.y(limit.value / factor),
        text=f"wanted {quantity(limit.value, 'B/s', 3)}",
        title=f"{limit.criterion}: {quantity(limit.value, 'B/s')} wanted at {size(limit.size)}",
    )


def _columns(series: Sequence[BandwidthSeries]) -> list[tuple[str, Mapping[int, float]]]:
    """Return the table's columns: one per curve. For more than MANY_LINES curves: lowest, median, highest, each failed curve."""
    if len(series) <= MANY_LINES:
        return [(line.label, line.values) for line in series]
    names = [f"{name} of {len(series)}" for name in ("lowest", "median", "highest")]
    failed = [(line.label, line.values) for line in series if line.failed]
    return [*zip(names, _statistics(series), strict=True), *failed]


def _tick_sizes(sizes: Sequence[int]) -> list[int]:
    """Return at most four of the sizes: the first, the last, and others about evenly spaced on the logarithmic axis."""
    if len(sizes) <= 4:
        return list(sizes)
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    goals = [first + (last - first) * index / 3 for index in range(4)]
    return sorted({min(sizes, key=lambda message: abs(math.log2(message) - goal)) for goal in goals})
