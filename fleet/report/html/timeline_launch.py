"""How power, temperature and clocks of a host's GPUs went while its benchmarks ran: a small picture a GPU, figure and stage."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.drift import span
from fleet.quantities import NONE, number, scale
from fleet.report.tables.figure import shown
from fleet.report.tables.timeline_spark import HEIGHT, THROTTLED, Axes, Column, Spark, bounds, span_of, spark
from fleet.report.titles import title
from schemas.records import Launch
from schemas.reports import FleetReport, HostReport
from schemas.scopes import Scope
from schemas.timeline import Series, Timeline
from schemas.trace import Trace

COLUMNS = (("gpu.power", "Power"), ("gpu.temperature", "Temperature"), ("gpu.clock.sm", "SM clock"))
MOST_STAGES, MOST_GPUS = 4, 16
"""Of one host."""
MOST_S = 1e7
"""A launch lasts no longer than some months, whatever a record says."""
LEAST_SPAN = 0.1
"""Of the highest value: what is steadier than that is drawn level, and not as large as there is room."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A GPU of the host."""

    head: str
    serial: str
    lost: str
    """Why some samples of it, or all, could not be had; empty where none was lost."""
    sparks: tuple[Spark | None, ...]
    """One a column; None where nothing is known."""
    figures: tuple[str, ...]
    """The same in words."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """One launch on one host."""

    stage: str
    ends: str
    begun: str
    """Path of lines where benchmarks began."""
    benchmarks: tuple[tuple[str, str], ...]
    """When each began, and its name."""
    columns: tuple[Column, ...]
    parts: tuple[Part, ...]
    left_out: int
    """GPUs beyond those that are shown."""


def has_courses(host: HostReport) -> bool:
    """Whether there is anything to draw of it."""
    return any(launch.timeline for launch in host.launches)


def hosts_with_courses(report: FleetReport) -> list[HostReport]:
    """The hosts whose pages have pictures: of many hosts the first that have findings."""
    return [host for host in shown(report) if has_courses(host)]


def courses(host: HostReport) -> list[Course]:
    """Of each stage the last launch that has any."""
    last = {launch.stage: launch for launch in host.launches if launch.timeline}
    return [_course(host, launch, launch.timeline) for launch in last.values() if launch.timeline][:MOST_STAGES]


def _course(host: HostReport, launch: Launch, trace: Trace) -> Course:
    timeline = trace.timeline()
    ends_s = max(min(launch.duration_s, MOST_S), _last(timeline) * timeline.bucket_s, 1.0)
    drawn = sorted({*trace.gpus, *trace.lost}, key=int)
    by_name = {name: [one for one in timeline.series if one.name == name] for name, _ in COLUMNS}
    columns = [(name, head) for name, head in COLUMNS if by_name[name]]
    axes = {name: _axes(timeline, ends_s, by_name[name]) for name, _ in columns}
    began = sorted(trace.began_s.items(), key=lambda item: item[1])
    across = Axes(bucket_s=timeline.bucket_s, ends_s=ends_s, low=0.0, high=0.0)
    return Course(
        stage=launch.stage,
        ends=span(ends_s),
        begun="".join(f"M{x} 0v{HEIGHT}" for x in sorted({across.x(at) for _, at in began})),
        benchmarks=tuple((span(at), title(name)) for name, at in began),
        columns=tuple(Column(name=head, range=span_of(by_name[name])) for name, head in columns),
        parts=tuple(_part(host, trace, timeline, index, columns, axes) for index in drawn[:MOST_GPUS]),
        left_out=max(0, len(drawn) - MOST_GPUS),
    )


def _last(timeline: Timeline) -> int:
    """How many buckets there are."""
    return max((one.at[-1] + 1 for one in timeline.series), default=0)


def _axes(timeline: Timeline, ends_s: float, series: Sequence[Series]) -> Axes:
    low, high = bounds(series)
    low = min(low, (1 - LEAST_SPAN) * high)
    return Axes(bucket_s=timeline.bucket_s, ends_s=ends_s, low=low, high=high)


def _part(
    host: HostReport,
    trace: Trace,
    timeline: Timeline,
    index: str,
    columns: Sequence[tuple[str, str]],
    axes: Mapping[str, Axes],
) -> Part:
    scope = f"gpu={index}"
    of = {one.name: one for one in timeline.series if Scope.parse(one.scope).device == scope}
    found = [(name, of.get(name)) for name, _ in columns]
    held = of.get(THROTTLED)
    return Part(
        head=f"GPU {int(index)}",
        serial=next((gpu.serial for gpu in host.gpus if gpu.index == int(index)), ""),
        lost=trace.lost.get(index, ""),
        sparks=tuple(spark("", own, axes[name], held) if own else None for name, own in found),
        figures=tuple(_words(own, axes[name], held) if own else NONE for name, own in found),
    )


def _words(series: Series, axes: Axes, held: Series | None) -> str:
    """`655 W (71 to 702), none for 12 s`."""
    factor, unit = scale(max(series.high), series.unit)
    low, high = bounds([series])
    middle = number(statistics.fmean(series.mean) / factor, 3)
    text = f"{middle} {unit} ({number(low / factor, 3)} to {number(high / factor, 3)})"
    return ", ".join([text, *_odd(series, axes, held)])


def _odd(series: Series, axes: Axes, held: Series | None) -> Iterator[str]:
    if missing := max(0, int(axes.ends_s / axes.bucket_s) - len(series.at)):
        yield f"not known for {span(missing * axes.bucket_s)}"
    if held and (for_s := sum(held.mean) * axes.bucket_s) >= 1 and series.name == COLUMNS[-1][0]:
        yield f"held down for {span(for_s)}"
