"""Plot power, temperature and clocks of a host's GPUs during its launches: a sparkline per GPU, figure and stage."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, number, scale
from fleet.report.charts.spark import HEIGHT, THROTTLED, Axes, Spark, SparkColumn, bounds, range_text, spark
from fleet.report.tables.figure import detailed_hosts, serial_of
from fleet.report.titles import benchmark_title
from schemas.records import Launch
from schemas.reports import FleetReport, HostReport
from schemas.scopes import Scope
from schemas.timeline import Series, Timeline
from schemas.times import format_span
from schemas.trace import Trace

CLOCK = "gpu.clock.sm"
COLUMNS = (("gpu.power", "Power"), ("gpu.temperature", "Temperature"), (CLOCK, "SM clock"))
MAX_STAGES, MAX_GPUS = 4, 16
"""Maximum number of stages that are shown of a host, and maximum number of GPUs that are shown of each stage."""
MAX_LAUNCH_S = 1e7
"""Maximum duration of a launch on the time axis, in seconds (about four months). A record may contain an implausible duration."""
MIN_RANGE = 0.1
"""The value axis covers at least this share of the highest value. So a steady figure is drawn as a flat line."""


@dataclass(frozen=True, kw_only=True)
class GpuTrace:
    """The sparklines of one GPU."""

    head: str
    serial: str
    lost: str
    """Reason why samples are missing; empty if none is missing."""
    sparks: tuple[Spark | None, ...]
    """One sparkline per column; None if the GPU has no data for the column."""
    figures: tuple[str, ...]
    """Mean, range and anomalies of each sparkline in words (`_describe`)."""


@dataclass(frozen=True, kw_only=True)
class LaunchTrace:
    """Plots of the GPUs of one host with a common time axis.

    The axis is the time since the launch began. In the plots of `power_waves.py`, it is one period of the pulsed load.
    """

    stage: str
    ends: str
    """Duration that the horizontal axis shows, in words."""
    benchmark_lines: str
    """SVG path of a vertical line at each time at which a benchmark began."""
    benchmarks: tuple[tuple[str, str], ...]
    """Start time and name of each benchmark."""
    columns: tuple[SparkColumn, ...]
    gpus: tuple[GpuTrace, ...]
    left_out: int
    """Number of GPUs that are not shown."""


def has_traces(host: HostReport) -> bool:
    """Return whether a launch of the host has telemetry over time."""
    return any(launch.timeline for launch in host.launches)


def hosts_with_traces(report: FleetReport) -> list[HostReport]:
    """Return the hosts whose pages show sparklines; in a large fleet, only the first hosts that are not accepted."""
    return [host for host in detailed_hosts(report) if has_traces(host)]


def launch_traces(host: HostReport) -> list[LaunchTrace]:
    """Return the plots of the first MAX_STAGES stages: of each stage, those of the last launch that has telemetry over time."""
    last = {launch.stage: launch for launch in host.launches if launch.timeline}
    return [_launch_trace(host, launch, launch.timeline) for launch in last.values() if launch.timeline][:MAX_STAGES]


def _launch_trace(host: HostReport, launch: Launch, trace: Trace) -> LaunchTrace:
    timeline = trace.timeline()
    ends_s = max(min(launch.duration_s, MAX_LAUNCH_S), _bucket_count(timeline) * timeline.bucket_s, 1.0)
    indexes = sorted({*trace.gpus, *trace.lost}, key=int)
    by_name = {name: [series for series in timeline.series if series.name == name] for name, _ in COLUMNS}
    columns = [(name, head) for name, head in COLUMNS if by_name[name]]
    axes = {name: _axes(timeline, ends_s, by_name[name]) for name, _ in columns}
    began = sorted(trace.began_s.items(), key=lambda item: item[1])
    time_axis = Axes(bucket_s=timeline.bucket_s, ends_s=ends_s, low=0.0, high=0.0)
    return LaunchTrace(
        stage=launch.stage,
        ends=format_span(ends_s),
        benchmark_lines="".join(f"M{x} 0v{HEIGHT}" for x in sorted({time_axis.x(at) for _, at in began})),
        benchmarks=tuple((format_span(at), benchmark_title(name)) for name, at in began),
        columns=tuple(SparkColumn(name=head, range=range_text(by_name[name])) for name, head in columns),
        gpus=tuple(_gpu_trace(host, trace, timeline, index, axes) for index in indexes[:MAX_GPUS]),
        left_out=max(0, len(indexes) - MAX_GPUS),
    )


def _bucket_count(timeline: Timeline) -> int:
    return max((series.at[-1] + 1 for series in timeline.series), default=0)


def _axes(timeline: Timeline, ends_s: float, series: Sequence[Series]) -> Axes:
    low, high = bounds(series)
    return Axes(bucket_s=timeline.bucket_s, ends_s=ends_s, low=min(low, (1 - MIN_RANGE) * high), high=high)


def _gpu_trace(host: HostReport, trace: Trace, timeline: Timeline, index: str, axes: Mapping[str, Axes]) -> GpuTrace:
    scope = f"gpu={index}"
    by_name = {series.name: series for series in timeline.series if Scope.parse(series.scope).device == scope}
    throttled = by_name.get(THROTTLED)
    drawn = [(by_name.get(name), axis) for name, axis in axes.items()]
    return GpuTrace(
        head=f"GPU {int(index)}",
        serial=serial_of(host, f"gpu={int(index)}"),
        lost=trace.lost.get(index, ""),
        sparks=tuple(spark("", series, axis, throttled) if series else None for series, axis in drawn),
        figures=tuple(_describe(series, axis, throttled) if series else NONE for series, axis in drawn),
    )


def _describe(series: Series, axes: Axes, throttled: Series | None) -> str:
    """Return the mean, the range and the anomalies of a series: `655 W (71 to 702), no data for 12 s`."""
    factor, unit = scale(max(series.high), series.unit)
    low, high = bounds([series])
    mean = number(statistics.fmean(series.mean) / factor, 3)
    text = f"{mean} {unit} ({number(low / factor, 3)} to {number(high / factor, 3)})"
    return ", ".join([text, *_anomalies(series, axes, throttled)])


def _anomalies(series: Series, axes: Axes, throttled: Series | None) -> Iterator[str]:
    if missing := max(0, int(axes.ends_s / axes.bucket_s) - len(series.at)):
        yield f"no data for {format_span(missing * axes.bucket_s)}"
    if throttled and series.name == CLOCK and (seconds := sum(throttled.mean) * axes.bucket_s) >= 1:
        yield f"throttled for {format_span(seconds)}"
