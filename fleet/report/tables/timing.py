"""Show the time spent on each benchmark in each stage, for the fleet and for each host."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fleet.quantities import finite
from fleet.report.charts.bar import Bar, stacked_bar
from fleet.report.formatting import duration
from fleet.report.tables.figure import MANY_HOSTS
from fleet.report.titles import TITLES, benchmark_title
from schemas.catalogue import DURATION
from schemas.records import MEASURED
from schemas.reports import FleetReport, HostReport
from schemas.stages import SOAK

COLOURS = 16
REST = "start and end"
"""Stands in place of a benchmark's name for the time that the launches of a stage spend outside all benchmarks."""
_MAX_SLOWEST = 5
_MIN_REST_S = 0.05
"""The time REST of a stage is shown only if it is longer than this many seconds."""


class StageTime(NamedTuple):
    """Key of a duration: a benchmark, or REST, within a stage."""

    stage: str
    benchmark: str

    @property
    def order(self) -> tuple[str, int, str]:
        """Return the sort key: by name of the stage, then in the order of TITLES; names that are not in TITLES are last."""
        return (
            self.stage,
            list(TITLES).index(self.benchmark) if self.benchmark in TITLES else len(TITLES),
            self.benchmark,
        )

    @property
    def colour(self) -> int:
        """Return the number of the benchmark's color; COLOURS if `benchmark` is not in TITLES, as for REST."""
        return list(TITLES).index(self.benchmark) % COLOURS if self.benchmark in TITLES else COLOURS


Seconds = Mapping[StageTime, float]


@dataclass(frozen=True, kw_only=True)
class TimeRow:
    """One benchmark in one stage."""

    stage: str
    name: str
    colour: int
    median: str
    """Median over the hosts."""
    share: str
    """The median as a percentage of the sum of the medians of all rows."""
    longest: str
    """Time on the slowest host."""
    slowest_host: str
    """Empty if only one host ran the benchmark."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times of the fleet and of its hosts."""

    total: str
    """Sum of the medians of all rows; empty without rows."""
    rows: tuple[TimeRow, ...] = ()
    bars: tuple[Bar, ...] = ()
    """A bar of the medians if there are several hosts, then one for each host; in a large fleet only for the slowest hosts."""


def times(report: FleetReport) -> Times:
    """Return the time of each benchmark in each stage. There are no rows if no host reported durations."""
    hosts = _seconds_of_hosts(report)
    if not hosts:
        return Times(total="")
    medians = _medians(hosts)
    slowest = sorted(hosts, key=lambda host: -sum(hosts[host].values()))
    longest = sum(hosts[slowest[0]].values())
    listed = list(hosts) if len(hosts) <= MANY_HOSTS else slowest[:_MAX_SLOWEST]
    fleet = [_bar(f"median of {len(hosts)} hosts", medians, longest)] if len(hosts) > 1 else []
    return Times(
        total=duration(sum(medians.values())),
        rows=tuple(_row(key, medians, hosts) for key in medians),
        bars=(*fleet, *(_bar(host, hosts[host], longest) for host in listed)),
    )


def summary_line(report: FleetReport) -> str:
    """Return `3 min 20 s per host: Collectives 62 s, Stress 21 s`; empty if no host reported durations.

    Each benchmark in each stage has a median over the hosts, and so has REST. `3 min 20 s` is the sum of all these medians.
    Then the five longest benchmarks follow, each with the sum over its stages. REST counts as a benchmark here.
    """
    medians = _medians(_seconds_of_hosts(report))
    if not medians:
        return ""
    by_benchmark: dict[str, float] = {}
    for key, seconds in medians.items():
        by_benchmark[key.benchmark] = by_benchmark.get(key.benchmark, 0.0) + seconds
    longest = sorted(by_benchmark, key=lambda name: -by_benchmark[name])[:_MAX_SLOWEST]
    texts = (f"{benchmark_title(name)} {duration(by_benchmark[name])}" for name in longest)
    return f"{duration(sum(medians.values()))} per host: {', '.join(texts)}"


def _seconds_of_hosts(report: FleetReport) -> dict[str, Seconds]:
    """Return the times of each host whose durations are in the report. For a large fleet, these are only some hosts."""
    return {host.name: seconds for host in report.hosts if (seconds := _seconds(host))}


def _medians(hosts: Mapping[str, Seconds]) -> dict[StageTime, float]:
    """Return, for each benchmark in each stage, the median of its time over the hosts, sorted by `StageTime.order`."""
    keys = sorted({key for seconds in hosts.values() for key in seconds}, key=lambda key: key.order)
    return {key: statistics.median([seconds[key] for seconds in hosts.values() if key in seconds]) for key in keys}


def _seconds(host: HostReport) -> dict[StageTime, float]:
    """Return the seconds of each benchmark in each stage, and as REST the remaining time of the launches of the stage.

    The record of a soak has the median duration of each benchmark over the rounds, and only some launches. So for the stage
    `soak` the median is multiplied by the number of finished rounds, and the duration of the soak replaces that of the launches.
    """
    seconds: dict[StageTime, float] = {}
    for item in host.measurements:
        value = finite(item.value)
        if item.name == DURATION.name and item.status == MEASURED and value is not None and value >= 0:
            seconds[StageTime(item.stage, str(item.params.get("benchmark", "")))] = value
    launched: dict[str, float] = {}
    for launch in host.launches:
        launched[launch.stage] = launched.get(launch.stage, 0.0) + launch.duration_s
    if host.soak:
        launched[SOAK] = host.soak.soaked_s
        rounds = finite(host.soak.finished) or 0.0
        seconds = {key: value * rounds if key.stage == SOAK else value for key, value in seconds.items()}
    for stage, duration_s in launched.items():
        of_stage = [value for key, value in seconds.items() if key.stage == stage]
        rest = duration_s - sum(of_stage)
        if of_stage and rest > _MIN_REST_S:
            seconds[StageTime(stage, REST)] = rest
    return seconds


def _bar(label: str, seconds: Seconds, longest: float) -> Bar:
    parts = (
        (key.colour, f"{benchmark_title(key.benchmark)}, {key.stage}: {duration(seconds[key])}", seconds[key])
        for key in sorted(seconds, key=lambda key: key.order)
    )
    return stacked_bar(label, duration(sum(seconds.values())), parts, longest)


def _row(key: StageTime, medians: Seconds, hosts: Mapping[str, Seconds]) -> TimeRow:
    total, of_hosts = sum(medians.values()), {host: seconds[key] for host, seconds in hosts.items() if key in seconds}
    slowest = max(of_hosts, key=lambda host: of_hosts[host])
    return TimeRow(
        stage=key.stage,
        name=benchmark_title(key.benchmark),
        colour=key.colour,
        median=duration(medians[key]),
        share=f"{100 * medians[key] / total:.0f} %" if total else "",
        longest=duration(of_hosts[slowest]),
        slowest_host=slowest if len(of_hosts) > 1 else "",
    )
