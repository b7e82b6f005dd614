"""Bandwidth against message size: one chart an operation, drawn from what was measured and nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, finite, number, quantity, scale, size
from fleet.report.tables.places import scope_name
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport, Verdict
from schemas.scopes import Scope

WIDTH, HEIGHT = 360.0, 224.0
LEFT, RIGHT, TOP, BOTTOM = 40.0, 10.0, 24.0, 26.0
MANY_LINES = 12

Key = tuple[str, str, str, str]
"""Host, stage, scope and, of a gang, number of ranks: who measured. A gang's figure is the same on every host, so there the host
is empty; one that was formed anew without a host has fewer ranks."""
Op = tuple[str, str]
"""Operation and placement (`in_place`, `out_of_place`; empty where the record tells none)."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One group of ranks and its figure at each message size."""

    label: str
    kind: str
    """`host`: the ranks of one host; `gang`: those of several."""
    failed: bool
    values: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A path in the chart's coordinates; its class says what it stands for."""

    path: str
    css: str
    title: str
    end: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a criterion wants at one size."""

    x1: float
    x2: float
    y: float
    text: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Everything that the template needs to draw one operation."""

    op: str
    """With its placement: `all gather, in place`."""
    kind: str
    """`host`: within each host; `gang`: between hosts."""
    unit: str
    peak: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    limits: tuple[Limit, ...]
    columns: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    """Rows of the size and a figure a column."""
    lines: int
    failed: bool = False
    """Some line fails its criterion."""


def charts(report: FleetReport) -> list[Chart]:
    """A chart for each operation of which any bandwidth was measured, first within each host, then between hosts.

    The two have an axis each: a fabric is slower than the links within a host, and would lie flat on the floor beside them.
    """
    by_op = _series(report)
    verdicts = [verdict for verdict in report.verdicts if _op(verdict)[0]]
    order = [str(op) for op in BENCHMARKS["collective"].settings["ops"]]
    named = sorted(by_op, key=lambda op: (order.index(op[0]) if op[0] in order else len(order), op))
    return [
        _chart(", ".join(text.replace("_", " ") for text in op if text), kind, lines, _limits_of(verdicts, op, kind))
        for kind in ("host", "gang")
        for op in named
        if (lines := [line for line in by_op[op] if line.kind == kind])
    ]


def _series(report: FleetReport) -> dict[Op, list[Series]]:
    values: dict[Op, dict[Key, dict[int, float]]] = {}
    members: dict[Key, int] = {}
    for host in report.hosts:
        seen_here = set()
        for seen in host.measurements:
            op, message, figure = _op(seen), _message(seen), finite(seen.value)
            if not op[0] or not message or figure is None or seen.status != MEASURED:
                continue
            key = _key(host.name, seen)
            values.setdefault(op, {}).setdefault(key, {}).setdefault(message, figure)
            seen_here.add(key)
        for key in seen_here:
            members[key] = members.get(key, 0) + 1
    failed = _failed(report.verdicts)
    return {
        op: [
            Series(
                label=_label(key, members[key]),
                kind=_kind(key),
                failed=(op, key) in failed,
                values=dict(sorted(found.items())),
            )
            for key, found in keys.items()
        ]
        for op, keys in values.items()
    }


def _key(host: str, item: Observation | Verdict) -> Key:
    if Scope.parse(item.scope).is_gang:
        return "", item.stage, item.scope, str(item.params.get("world_size", ""))
    return host, item.stage, item.scope, ""


def _op(item: Observation | Verdict) -> Op:
    """The operation whose bus bandwidth this is, with its placement; or empty."""
    family, _, rest = item.name.partition(".")
    op, _, kind = rest.partition(".")
    return (op, str(item.params.get("placement", ""))) if family == "collective" and kind == "busbw" else ("", "")


def _message(seen: Observation | Verdict) -> int:
    """The message size that a figure is for, or 0."""
    found = finite(seen.params.get("size_bytes"))
    return int(found) if found and 1 <= found <= 1 << 60 else 0


def _kind(key: Key) -> str:
    return "host" if key[0] else "gang"


def _label(key: Key, members: int) -> str:
    host, stage, scope, _ = key
    if host:
        return host if scope == "host" and stage == "benchmark" else f"{host}, {scope_name(scope)}, {stage}"
    return f"{scope_name(scope)} ({members} host{'s' if members != 1 else ''})"


def _failed(verdicts: Iterable[Verdict]) -> set[tuple[Op, Key]]:
    found = set()
    for verdict in verdicts:
        op = _op(verdict)
        if verdict.verdict == FAIL and op[0]:
            found.add((op, _key(verdict.host, verdict)))
    return found


def _limits_of(verdicts: Iterable[Verdict], op: Op, kind: str) -> list[tuple[int, float, str]]:
    """Size, limit and source of every criterion that judged this operation's bandwidth, once each."""
    found = {}
    for verdict in verdicts:
        if _op(verdict) != op or Scope.parse(verdict.scope).is_gang != (kind == "gang"):
            continue
        message, limit = _message(verdict), finite(verdict.limit)
        if message and limit and limit > 0:
            found[(message, limit)] = verdict.criterion
    return [(message, limit, criterion) for (message, limit), criterion in found.items()]


def _chart(op: str, kind: str, series: Sequence[Series], limits: Sequence[tuple[int, float, str]]) -> Chart:
    sizes = sorted({message for line in series for message in line.values})
    top = max(max(line.values.values()) for line in series)
    top = max([top, *(limit for message, limit, _ in limits if message in sizes)])
    factor, unit = scale(top, "B/s")
    step, ceiling = nice(top / factor)
    plot = _Plot(sizes[0], sizes[-1], ceiling * factor)
    columns, table = _table(series, sizes, factor)
    peak = max(series, key=lambda line: max(line.values.values()))
    at = max(peak.values, key=lambda message: peak.values[message])
    return Chart(
        op=op,
        kind=kind,
        unit=unit,
        peak=f"highest {quantity(peak.values[at], 'B/s')} at {size(at)}",
        x_ticks=tuple(Tick(at=plot.x(message), text=size(message)) for message in _few(sizes)),
        y_ticks=tuple(
            Tick(at=plot.y(step * index * factor), text=number(step * index))
            for index in range(round(ceiling / step) + 1)
        ),
        curves=tuple(_curves(series, plot)),
        limits=tuple(_limit(plot, *limit) for limit in limits if limit[0] in sizes),
        columns=columns,
        table=table,
        lines=len(series),
        failed=any(line.failed for line in series),
    )


class _Plot:
    """Where a size and a bandwidth lie: the size on a logarithmic, the bandwidth on a linear axis from zero."""

    def __init__(self, smallest: int, largest: int, top: float) -> None:
        self._first = math.log2(smallest)
        self._span = math.log2(largest) - self._first
        self._top = top or 1.0

    def x(self, message: int) -> float:
        share = (math.log2(message) - self._first) / self._span if self._span else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = min(max(value / self._top, 0.0), 1.0)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def path(self, values: Mapping[int, float], start: str = "M") -> str:
        points = [f"{self.x(message):g},{self.y(value):g}" for message, value in values.items()]
        return start + "L".join(points)


def _curves(series: Sequence[Series], plot: _Plot) -> Iterable[Curve]:
    if len(series) <= MANY_LINES:
        yield from (_line(line, plot) for line in series)
        return
    spread = _spread(series)
    low, middle, high = ({message: three[index] for message, three in spread.items()} for index in range(3))
    back = dict(reversed(low.items()))
    yield Curve(
        path=f"{plot.path(high)}{plot.path(back, 'L')}Z", css="spread", title=f"lowest to highest of {len(series)}"
    )
    yield Curve(path=plot.path(middle), css="line", title=f"median of {len(series)}")
    yield from (_line(line, plot) for line in series if line.failed)


def _line(line: Series, plot: _Plot) -> Curve:
    last = max(line.values)
    css = f"line{' failed' if line.failed else ''}"
    title = f"{line.label}: {quantity(line.values[last], 'B/s')} at {size(last)}{', fails' if line.failed else ''}"
    return Curve(path=plot.path(line.values), css=css, title=title, end=(plot.x(last), plot.y(line.values[last])))


def _spread(lines: Sequence[Series]) -> dict[int, tuple[float, float, float]]:
    """Size -> lowest, median and highest figure."""
    sizes = sorted({message for line in lines for message in line.values})
    found = {message: [line.values[message] for line in lines if message in line.values] for message in sizes}
    return {message: (min(all_), statistics.median(all_), max(all_)) for message, all_ in found.items()}


def _limit(plot: _Plot, message: int, limit: float, criterion: str) -> Limit:
    x = plot.x(message)
    title = f"{criterion}: {quantity(limit, 'B/s')} wanted at {size(message)}"
    text = f"wanted {quantity(limit, 'B/s', 3)}"
    return Limit(x1=max(LEFT, x - 34), x2=min(WIDTH - RIGHT + 8, x + 34), y=plot.y(limit), text=text, title=title)


def _table(
    series: Sequence[Series], sizes: Sequence[int], factor: float
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Columns and rows: a column a line; lowest, median, highest and what failed where there are many lines."""
    columns = [(line.label, line.values) for line in series]
    if len(series) > MANY_LINES:
        spread = _spread(series)
        columns = [(line.label, line.values) for line in series if line.failed]
        for index, name in enumerate(("lowest", "median", "highest")):
            columns.insert(
                index, (f"{name} of {len(series)}", {message: three[index] for message, three in spread.items()})
            )
    rows = tuple(
        (size(message), *(number(values[message] / factor) if message in values else NONE for _, values in columns))
        for message in sizes
    )
    return tuple(name for name, _ in columns), rows


def _few(sizes: Sequence[int]) -> list[int]:
    """At most four of the sizes, the first and the last among them, evenly apart on the axis."""
    if len(sizes) <= 4:
        return list(sizes)
    return sorted({min(sizes, key=lambda message: abs(math.log2(message) - goal)) for goal in _goals(sizes)})


def _goals(sizes: Sequence[int]) -> list[float]:
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    return [first + (last - first) * index / 3 for index in range(4)]


def nice(top: float) -> tuple[float, float]:
    """Step and end of an axis from zero that holds `top` in three to five steps of 1, 2, 2.5 or 5 times a power of ten."""
    if top <= 0:
        return 1.0, 1.0
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return step, step * math.ceil(top / step * 0.9999)
