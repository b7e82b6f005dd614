"""Plot the figures of a soak over time: a sparkline per GPU and figure, with events marked."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.drift import DRIFT, format_clock, is_rate
from fleet.quantities import NONE, counted, finite, number, scale
from fleet.report.charts.spark import THROTTLED, Axes, Spark, SparkColumn, bounds, range_text, spark
from fleet.report.formatting import params_text
from fleet.report.links import host_anchor
from fleet.report.tables.figure import detailed_hosts, serial_of
from fleet.report.titles import benchmark_title
from fleet.scope_text import describe_scope
from schemas.records import Value
from schemas.reports import FleetReport, HostReport
from schemas.scopes import Scope, pci_address
from schemas.timeline import Event, Series, Soak
from schemas.times import format_span

MAX_EVENTS = 6
"""Maximum number of events of one name that the report shows. So frequent events do not hide rare ones."""
STRESS = "stress.throughput"
COLUMNS = (
    ("gpu.power", "Power"),
    ("gpu.temperature", "Temperature"),
    ("gpu.clock.sm", "SM clock"),
    (STRESS, "Stress"),
)
"""Name of each figure that has a column, and the heading. A row is one GPU; in a rehearsal, one process."""

Drifts = Mapping[tuple[str, str, str], float]
"""Drift of each rate (`fleet/judge/drift.py`): its lowest level in the soak plus a margin, as a share of its mean at the start.

The key is the host, the scope, and a text of name and parameters of the rate (`_figure`).
"""


@dataclass(frozen=True, kw_only=True)
class PartRow:
    """The sparklines of one part."""

    head: str
    note: str
    sparks: tuple[Spark | None, ...]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A benchmark rate of the whole host."""

    name: str
    range: str
    drift: str
    spark: Spark


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """An event as text."""

    when: str
    part: str
    text: str


@dataclass(frozen=True, kw_only=True)
class HostTimeline:
    """The soak of one host."""

    host: str
    anchor: str
    summary: str
    complete: bool
    """Whether the soak has ended, did not end early, and has no failed round. Interrupted rounds are not failed rounds."""
    ends: str
    """Time since the beginning of the soak at the right end of each sparkline: `24:00`."""
    columns: tuple[SparkColumn, ...]
    rows: tuple[PartRow, ...]
    rates: tuple[Rate, ...]
    events: tuple[EventLine, ...]
    left_out: int
    """Number of events that are not shown, plus the number of events and values that the agent dropped (`Timeline.left_out`)."""


def timelines(report: FleetReport) -> list[HostTimeline]:
    """Return the soak of each host that the report shows in detail."""
    drifts = judged_drifts(report)
    return [_host_timeline(host, host.soak, drifts) for host in detailed_hosts(report) if host.soak]


def _host_timeline(host: HostReport, soak: Soak, drifts: Drifts) -> HostTimeline:
    by_name: dict[str, list[Series]] = {}
    for series in soak.timeline.series:
        by_name.setdefault(series.name, []).append(series)
    columns = [(name, head) for name, head in COLUMNS if name in by_name]
    parts = sorted({series.scope for name, _ in columns for series in by_name[name]}, key=_part_order)
    events = _events_by_gpu(host, soak.timeline.events)
    shown = _first_of_each_name(events)
    return HostTimeline(
        host=host.name,
        anchor=host_anchor(host.name),
        summary=summary(soak),
        complete=bool(soak.ended) and not soak.reason and not soak.failed,
        ends=format_clock(_end_s(soak)),
        columns=tuple(SparkColumn(name=head, range=range_text(by_name[name])) for name, head in columns),
        rows=tuple(_part_row(host, part, columns, by_name, events, soak) for part in parts),
        rates=tuple(_rates(host.name, soak, drifts)),
        events=tuple(_event_line(scope, event) for scope, event in shown),
        left_out=len(events) - len(shown) + soak.timeline.left_out,
    )


def summary(soak: Soak) -> str:
    """Return actual and planned duration and the rounds: `23 h 10 min of 24 h 00 min in 270 rounds (1 did not finish)`.

    The number of rounds includes those that did not finish and those that were interrupted. If the soak ended early, the reason
    follows.
    """
    remarks = [f"{soak.failed} did not finish"] if soak.failed else []
    remarks += [f"{soak.cut} interrupted"] if soak.cut else []
    remark = f" ({', '.join(remarks)})" if remarks else ""
    text = f"{format_span(soak.soaked_s)} of {format_span(soak.planned_s)} in {counted(soak.rounds, 'round')}{remark}"
    if not soak.ended:
        return f"{text}, end not recorded"
    return f"{text}, then ended: {soak.reason}" if soak.reason else text


def _end_s(soak: Soak) -> float:
    """Return the end of the time axis, in seconds since the beginning of the soak.

    The timelines of earlier versions include the interruptions of the soak.
    """
    last = max((series.at[-1] for series in soak.timeline.series if series.at), default=0)
    return max(soak.soaked_s, last * soak.timeline.bucket_s, 1.0)


def _axes(soak: Soak, series: Sequence[Series]) -> Axes:
    low, high = bounds(series)
    return Axes(bucket_s=soak.timeline.bucket_s, ends_s=_end_s(soak), low=low, high=high)


def _part_order(scope: str) -> tuple[str, int]:
    parsed = Scope.parse(scope)
    return parsed.device_kind, parsed.index or 0


def _events_by_gpu(host: HostReport, events: Sequence[Event]) -> list[tuple[str, Event]]:
    """Return (scope, event) for each event. A scope with the PCI address of a GPU is replaced by a scope with its index."""
    gpus = {f"pci={pci_address(gpu.pci_bus_id)}": f"gpu={gpu.index}" for gpu in host.gpus if gpu.pci_bus_id}
    scoped = []
    for event in events:
        scope = Scope.parse(event.scope)
        scoped.append((scope.on(gpus.get(scope.device, scope.device)), event))
    return scoped


def _first_of_each_name(events: Sequence[tuple[str, Event]]) -> list[tuple[str, Event]]:
    """Return the first MAX_EVENTS events of each name, in their order in `events`."""
    numbers = Counter[str]()
    shown = []
    for scope, event in events:
        numbers[event.name] += 1
        if numbers[event.name] <= MAX_EVENTS:
            shown.append((scope, event))
    return shown


def _part_row(
    host: HostReport,
    part: str,
    columns: Sequence[tuple[str, str]],
    by_name: Mapping[str, Sequence[Series]],
    events: Sequence[tuple[str, Event]],
    soak: Soak,
) -> PartRow:
    throttled = next((item for item in by_name.get(THROTTLED, ()) if item.scope == f"{part},reason=other"), None)
    marks = [event for scope, event in events if Scope.parse(scope).device == part and event.name != THROTTLED]
    sparks = []
    for name, head in columns:
        series = next((item for item in by_name[name] if item.scope == part), None)
        label = f"{head} of {describe_scope(part)}"
        sparks.append(spark(label, series, _axes(soak, by_name[name]), throttled, marks) if series else None)
    return PartRow(head=describe_scope(part), note=serial_of(host, part), sparks=tuple(sparks))


def _rates(host: str, soak: Soak, drifts: Drifts) -> Iterator[Rate]:
    """Yield the rates of the whole host. Of a rate that depends on the message size, only the largest size is included.

    With smaller messages, latency limits the rate.
    """
    rates = [item for item in soak.timeline.series if item.scope == "host" and is_rate(item)]
    largest: dict[str, int] = {}
    for series in rates:
        largest[series.name] = max(largest.get(series.name, 0), _size(series))
    for series in rates:
        if _size(series) < largest[series.name]:
            continue
        benchmark, _, rest = series.name.partition(".")
        words = [benchmark_title(benchmark), rest.replace("_", " ").replace(".", " "), params_text(series.params)]
        label = " ".join(words).strip()
        yield Rate(
            name=label,
            range=range_text([series]),
            drift=drift_text(host, series, drifts),
            spark=spark(label, series, _axes(soak, [series])),
        )


def _size(series: Series) -> int:
    """Return the message size in bytes; 0 if the series has none."""
    return int(finite(series.params.get("size_bytes")) or 0)


def judged_drifts(report: FleetReport) -> Drifts:
    """Return the drifts from the drift verdicts in the report.

    Drift cannot be computed from the timeline in the report, which has fewer buckets than the record.
    """
    return {
        (verdict.host, verdict.scope, _figure(verdict.name.removeprefix(f"{DRIFT}."), verdict.params)): value
        for verdict in report.verdicts
        if verdict.name.startswith(f"{DRIFT}.") and (value := finite(verdict.value)) is not None
    }


def _figure(name: str, params: Mapping[str, Value]) -> str:
    return f"{name} {sorted(params.items())}"


def drift_text(host: str, series: Series, drifts: Drifts) -> str:
    """Return by how much a rate fell below its level at the start of the soak: `fell by 0.4 %`, or `did not fall`.

    Empty if the report has no verdict on the drift of this rate.
    """
    share = drifts.get((host, series.scope, _figure(series.name, series.params)))
    if share is None:
        return ""
    return "did not fall" if share >= 1 else f"fell by {100 * (1 - share):.1f} %"


def _event_line(scope: str, event: Event) -> EventLine:
    until = f" to {format_clock(event.until_s)}" if event.until_s > event.at_s else ""
    count = f" ({number(event.count)} in total)" if event.count > 1 else ""
    return EventLine(
        when=f"{format_clock(event.at_s)}{until}",
        part=describe_scope(scope) if scope != "host" else "host",
        text=f"{event.name}: {event.text}{count}",
    )


def table_rows(report: FleetReport) -> Iterator[tuple[str, ...]]:
    """Yield a row for each GPU (in a rehearsal, each process).

    The cells are host, part, mean and range of each figure in COLUMNS, drift, and throttled time.
    The drift is that of the stress rate. The throttled time excludes throttling by the power limit.
    """
    drifts = judged_drifts(report)
    for host in detailed_hosts(report):
        soak = host.soak
        if not soak:
            continue
        series = {(item.name, item.scope): item for item in soak.timeline.series}
        for part in sorted((scope for name, scope in series if name == STRESS), key=_part_order):
            throttled = series.get((THROTTLED, f"{part},reason=other"))
            yield (
                host.name,
                describe_scope(part),
                *(_mean(series.get((name, part))) for name, _ in COLUMNS),
                drift_text(host.name, series[STRESS, part], drifts) or NONE,
                NONE if throttled is None else f"{number(sum(throttled.mean) * soak.timeline.bucket_s, 3)} s",
            )


def _mean(series: Series | None) -> str:
    if series is None or not series.mean:
        return NONE
    factor, unit = scale(max(series.high), series.unit)
    mean = statistics.fmean(series.mean, weights=series.n) / factor
    return f"{number(mean, 3)} {unit} ({number(min(series.low) / factor, 3)} to {number(max(series.high) / factor, 3)})"
