"""How the figures of a soak went: small pictures, one a GPU and figure, with what happened marked in them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.drift import DRIFT, clock, first_name, is_rate, span
from fleet.judge.evidence import pci_address
from fleet.quantities import NONE, finite, number, scale
from fleet.report.format import params_text
from fleet.report.tables.figure import shown
from fleet.report.tables.hosts import anchors_of
from fleet.report.tables.places import scope_name
from fleet.report.tables.timeline_spark import THROTTLED, Axes, Column, Spark, bounds, span_of, spark
from fleet.report.titles import title
from schemas.records import Value
from schemas.reports import FleetReport, HostReport
from schemas.scopes import Scope
from schemas.timeline import Event, Series, Soak

SHOWN_EVENTS = 12
COLUMNS = (
    ("gpu.power", "Power"),
    ("gpu.temperature", "Temperature"),
    ("gpu.clock.sm", "SM clock"),
    ("stress.throughput", "Stress"),
)
"""What is shown of each GPU, or of each process of a rehearsal, and what people call it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One part."""

    head: str
    note: str
    sparks: tuple[Spark | None, ...]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A figure of the host as a whole."""

    name: str
    range: str
    drift: str
    spark: Spark


@dataclass(frozen=True, kw_only=True)
class Happening:
    """An event, for people."""

    when: str
    where: str
    what: str


@dataclass(frozen=True, kw_only=True)
class HostTimeline:
    """The soak of one host."""

    host: str
    anchor: str
    summary: str
    whole: bool
    """It lasted as long as it was to, and every round came to its end."""
    ends: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    rates: tuple[Rate, ...]
    happenings: tuple[Happening, ...]
    left_out: int


def timelines(report: FleetReport) -> list[HostTimeline]:
    """One of each host that the report shows one by one, and that soaked."""
    anchors = anchors_of(report)
    drifts = drifts_of(report)
    return [_host(host, host.soak, anchors.get(host.name, "hosts"), drifts) for host in shown(report) if host.soak]


def _host(host: HostReport, soak: Soak, anchor: str, drifts: Drifts) -> HostTimeline:
    ends_s = _end(soak)
    by_name: dict[str, list[Series]] = {}
    for series in soak.timeline.series:
        by_name.setdefault(series.name, []).append(series)
    columns = [(name, head) for name, head in COLUMNS if name in by_name]
    parts = sorted({one.scope for name, _ in columns for one in by_name[name]}, key=_part_order)
    events = _placed(host, soak.timeline.events)
    return HostTimeline(
        host=host.name,
        anchor=anchor,
        summary=summary(soak),
        whole=bool(soak.ended) and not soak.reason and not soak.failed,
        ends=clock(ends_s),
        columns=tuple(Column(name=head, range=span_of(by_name[name])) for name, head in columns),
        rows=tuple(_row(host, part, columns, by_name, events, soak) for part in parts),
        rates=tuple(_rates(host.name, soak, drifts)),
        happenings=tuple(map(_happening, events[:SHOWN_EVENTS])),
        left_out=max(0, len(events) - SHOWN_EVENTS) + soak.timeline.left_out,
    )


def summary(soak: Soak) -> str:
    """`24 h 00 min of 24 h 00 min in 281 rounds`."""
    odd = [f"{soak.failed} did not come to their end"] if soak.failed else []
    odd += [f"{soak.cut} cut off and made good"] if soak.cut else []
    text = f"{span(soak.soaked_s)} of {span(soak.planned_s)} in {soak.rounds} rounds{f' ({chr(44).join(odd)})' if odd else ''}"
    if not soak.ended:
        return f"{text}, then cut off"
    return f"{text}, then ended: {soak.reason}" if soak.reason else text


def _end(soak: Soak) -> float:
    """Seconds from its beginning to its end, with the time in which it was cut off."""
    last = max((one.at[-1] for one in soak.timeline.series if one.at), default=0)
    return max(soak.soaked_s, last * soak.timeline.bucket_s, 1.0)


def _axes(soak: Soak, series: Sequence[Series]) -> Axes:
    low, high = bounds(series)
    return Axes(bucket_s=soak.timeline.bucket_s, ends_s=_end(soak), low=low, high=high)


def _part_order(scope: str) -> tuple[str, int]:
    parsed = Scope.parse(scope)
    return parsed.device_kind, parsed.index or 0


def _placed(host: HostReport, events: Sequence[Event]) -> list[tuple[str, Event]]:
    """Each event with the part that it is of: what the bus says by its address is told of the GPU there."""
    places = {f"pci={pci_address(gpu.pci_bus_id)}": f"gpu={gpu.index}" for gpu in host.gpus if gpu.pci_bus_id}
    found = []
    for event in events:
        scope = Scope.parse(event.scope)
        found.append((scope.on(places.get(scope.device, scope.device)), event))
    return found


def _row(
    host: HostReport,
    part: str,
    columns: Sequence[tuple[str, str]],
    by_name: Mapping[str, Sequence[Series]],
    events: Sequence[tuple[str, Event]],
    soak: Soak,
) -> Row:
    serial = next((gpu.serial for gpu in host.gpus if f"gpu={gpu.index}" == part), "")
    held = next((one for one in by_name.get(THROTTLED, ()) if one.scope == f"{part},reason=other"), None)
    marks = [event for scope, event in events if Scope.parse(scope).device == part and event.name != THROTTLED]
    sparks = []
    for name, head in columns:
        own = next((one for one in by_name[name] if one.scope == part), None)
        label = f"{head} of {scope_name(part)}"
        sparks.append(spark(label, own, _axes(soak, by_name[name]), held, marks) if own else None)
    return Row(head=scope_name(part), note=serial, sparks=tuple(sparks))


def _rates(host: str, soak: Soak, drifts: Drifts) -> Iterator[Rate]:
    """Of what a host does as a whole; of messages of several sizes the largest, as small ones have no bandwidth."""
    rates = [one for one in soak.timeline.series if one.scope == "host" and is_rate(one)]
    largest: dict[str, int] = {}
    for one in rates:
        largest[one.name] = max(largest.get(one.name, 0), int(one.params.get("size_bytes", 0)))
    for one in rates:
        if int(one.params.get("size_bytes", 0)) < largest[one.name]:
            continue
        benchmark, _, what = one.name.partition(".")
        label = " ".join([title(benchmark), what.replace("_", " ").replace(".", " "), params_text(one.params)]).strip()
        yield Rate(
            name=label,
            range=span_of([one]),
            drift=drift_text(host, one, soak, drifts),
            spark=spark(label, one, _axes(soak, [one])),
        )


Drifts = Mapping[tuple[str, str, str], float]
"""Host, scope and name with parameters -> the lowest level of a rate as a share of its first hour, as it was judged."""


def drifts_of(report: FleetReport) -> Drifts:
    """Every drift that the judge speaks of; it knows more of it than is kept for the pictures."""
    return {
        (item.host, item.scope, _name(item.name.removeprefix(f"{DRIFT}."), item.params)): value
        for item in report.verdicts
        if item.name.startswith(f"{DRIFT}.") and (value := finite(item.value)) is not None
    }


def _name(name: str, params: Mapping[str, Value]) -> str:
    return f"{name} {sorted(params.items())}"


def drift_text(host: str, series: Series, soak: Soak, drifts: Drifts) -> str:
    """`−0.4 % at worst against its first hour`; empty where nobody judged it."""
    found = drifts.get((host, series.scope, _name(series.name, series.params)))
    if found is None:
        return ""
    return f"{100 * (found - 1):+.1f} % at worst against its {first_name(soak)}".replace("-", "−")


def _happening(found: tuple[str, Event]) -> Happening:
    scope, event = found
    until = f" to {clock(event.until_s)}" if event.until_s > event.at_s else ""
    count = f" ({number(event.count)} in all)" if event.count > 1 else ""
    return Happening(
        when=f"{clock(event.at_s)}{until}",
        where=scope_name(scope) if scope != "host" else "host",
        what=f"{event.name}: {event.text}{count}",
    )


def table_rows(report: FleetReport) -> Iterator[tuple[str, ...]]:
    """Host, part, and how power, temperature, clock and rates went, for a table."""
    drifts = drifts_of(report)
    for host in shown(report):
        soak = host.soak
        if not soak:
            continue
        of = {(one.name, one.scope): one for one in soak.timeline.series}
        parts = sorted({one.scope for one in soak.timeline.series if one.name == "stress.throughput"}, key=_part_order)
        for part in parts:
            held = of.get((THROTTLED, f"{part},reason=other"))
            yield (
                host.name,
                scope_name(part),
                *(_mean(of.get((name, part))) for name, _ in COLUMNS),
                drift_text(host.name, of["stress.throughput", part], soak, drifts) or NONE,
                _held_s(held, soak),
            )


def _mean(series: Series | None) -> str:
    if series is None or not series.mean:
        return NONE
    factor, unit = scale(max(series.high), series.unit)
    mean = statistics.fmean(series.mean, weights=series.n) / factor
    return f"{number(mean, 3)} {unit} ({number(min(series.low) / factor, 3)} to {number(max(series.high) / factor, 3)})"


def _held_s(held: Series | None, soak: Soak) -> str:
    return NONE if held is None else f"{number(sum(held.mean) * soak.timeline.bucket_s, 3)} s"
