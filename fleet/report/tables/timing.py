"""Where the time went: each benchmark's share of each stage, for the fleet and for each host."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import finite
from fleet.report.formatting import duration
from fleet.report.tables.figure import MANY_HOSTS
from fleet.report.titles import TITLES, title
from schemas.catalogue import DURATION
from schemas.records import MEASURED
from schemas.reports import FleetReport, HostReport

COLOURS = 16
_SHOWN = 5
_LEAST_S = 0.05
"""What is shorter shows up nowhere."""
REST = "start and end"

Stint = tuple[str, str]
"""Stage and benchmark."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A benchmark in a bar: where it begins and how wide it is, in percent."""

    x: str
    width: str
    colour: int
    title: str


@dataclass(frozen=True, kw_only=True)
class Bar:
    """The time of one host, or the medians of all."""

    label: str
    total: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One benchmark in one stage."""

    stage: str
    name: str
    colour: int
    median: str
    share: str
    longest: str
    where: str
    """The host on which it took longest, where there are several."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Everything that is told of time."""

    total: str
    """Median over the hosts."""
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()


def times(report: FleetReport) -> Times:
    """Where the time went; without lines where no host told."""
    of_host = {host.name: found for host in report.hosts if (found := _of(host))}
    if not of_host:
        return Times(total="")
    medians = {
        stint: statistics.median([found[stint] for found in of_host.values() if stint in found])
        for stint in sorted({stint for found in of_host.values() for stint in found}, key=_order)
    }
    total = sum(medians.values())
    slowest = sorted(of_host, key=lambda host: -sum(of_host[host].values()))
    longest = sum(of_host[slowest[0]].values())
    chosen = list(of_host) if len(of_host) <= MANY_HOSTS else slowest[:_SHOWN]
    fleet = [_bar(f"median of {len(of_host)} hosts", medians, longest)] if len(of_host) > 1 else []
    return Times(
        total=duration(total),
        lines=tuple(_line(stint, seconds, total, of_host) for stint, seconds in medians.items()),
        bars=(*fleet, *(_bar(host, of_host[host], longest) for host in chosen)),
    )


def line(report: FleetReport) -> str:
    """`3 min 20 s a host: Collectives 62 s, Stress 21 s …`; empty where no host told."""
    found = times(report)
    if not found.lines:
        return ""
    seconds: dict[str, float] = {}
    for host in report.hosts:
        for (_, name), took in _of(host).items():
            seconds[name] = seconds.get(name, 0.0) + took / len(report.hosts)
    longest = sorted(seconds, key=lambda name: -seconds[name])[:_SHOWN]
    return f"{found.total} a host: " + ", ".join(f"{title(name)} {duration(seconds[name])}" for name in longest)


def _of(host: HostReport) -> dict[Stint, float]:
    """Seconds of each benchmark, and what the launches took beyond them."""
    found: dict[Stint, float] = {}
    for seen in host.measurements:
        value = finite(seen.value)
        if seen.name == DURATION.name and seen.status == MEASURED and value is not None and value >= 0:
            found[(seen.stage, str(seen.params.get("benchmark", "")))] = value
    for launch in host.launches:
        rest = launch.duration_s - sum(seconds for (stage, _), seconds in found.items() if stage == launch.stage)
        if any(stage == launch.stage for stage, _ in found) and rest > _LEAST_S:
            found[(launch.stage, REST)] = rest
    return found


def _order(stint: Stint) -> tuple[str, int, str]:
    stage, name = stint
    return stage, list(TITLES).index(name) if name in TITLES else len(TITLES), name


def _colour(name: str) -> int:
    return list(TITLES).index(name) % COLOURS if name in TITLES else COLOURS


def _bar(label: str, found: Mapping[Stint, float], longest: float) -> Bar:
    segments, begin = [], 0.0
    for stint in sorted(found, key=_order):
        width = 100 * found[stint] / longest if longest else 0.0
        segments.append(
            Segment(
                x=f"{begin:.1f}",
                width=f"{width:.1f}",
                colour=_colour(stint[1]),
                title=f"{title(stint[1])}, {stint[0]}: {duration(found[stint])}",
            )
        )
        begin += width
    return Bar(label=label, total=duration(sum(found.values())), segments=tuple(segments))


def _line(stint: Stint, median: float, total: float, of_host: Mapping[str, Mapping[Stint, float]]) -> Line:
    told: Sequence[str] = [host for host, found in of_host.items() if stint in found]
    slowest = max(told, key=lambda host: of_host[host][stint])
    return Line(
        stage=stint[0],
        name=title(stint[1]),
        colour=_colour(stint[1]),
        median=duration(median),
        share=f"{100 * median / total:.0f} %" if total else "",
        longest=duration(of_host[slowest][stint]),
        where=slowest if len(told) > 1 else "",
    )
