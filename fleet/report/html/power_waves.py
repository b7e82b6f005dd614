"""Plot the power of each GPU of a host over one period of the pulsed load: a plot per GPU and period length.

The benchmark `pulse` switches the load of the GPUs on for the first half of each period, and off for the second half. The text
under a plot has the amplitude (power under load minus power without load) and the slew (fastest rise of the power, in W/s).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fleet.quantities import NONE, number, quantity
from fleet.report.charts.spark import HEIGHT, WIDTH, Axes, Spark, SparkColumn, bounds, range_text, spark
from fleet.report.html.launch_traces import MAX_GPUS, MAX_STAGES, MIN_RANGE, GpuTrace, LaunchTrace
from fleet.report.tables.figure import detailed_hosts, serial_of
from schemas.records import MEASURED, Observation, is_number
from schemas.reports import FleetReport, HostReport
from schemas.scopes import Scope
from schemas.timeline import Series
from schemas.times import format_span

WAVE, AMPLITUDE, SLEW = "pulse.wave", "pulse.amplitude", "pulse.slew"
ENDS = "one period"
LOAD_OFF = f"M{WIDTH // 2} 0v{HEIGHT}"
"""SVG path of a vertical line in the middle of the period, where the load is switched off."""
MAX_PERIODS = 6
"""Maximum number of period lengths that are shown for a stage. If there are more, the longest ones are shown."""
_WORDS = re.compile(r"([0-9]{1,6}|\.)( ([0-9]{1,6}|\.)){1,127}")
"""Pattern of the value of `pulse.wave`: the mean power in W at equal steps of the period. A dot is a step without a sample."""


@dataclass(frozen=True)
class Wave:
    """The power of one GPU over one period."""

    series: Series
    text: str
    """The text under the plot."""


def has_waves(host: HostReport) -> bool:
    """Return whether a GPU of the host has a `pulse.wave` that can be drawn."""
    return any(True for _ in _waves(host))


def hosts_with_waves(report: FleetReport) -> list[HostReport]:
    """Return the hosts with plots on their pages. Only hosts that `detailed_hosts` returns have plots."""
    return [host for host in detailed_hosts(report) if has_waves(host)]


def power_waves(host: HostReport) -> list[LaunchTrace]:
    """Return the plots of the first MAX_STAGES stages. The plots of a stage have a column for each period length."""
    stages: dict[str, dict[str, dict[float, Wave]]] = {}
    figures = {
        (item.name, *_key_of(item)): item
        for item in host.measurements
        if item.name in (AMPLITUDE, SLEW) and item.status == MEASURED
    }
    for item, series in _waves(host):
        text = _describe(series, *(figures.get((name, *_key_of(item))) for name in (AMPLITUDE, SLEW)))
        stages.setdefault(item.stage, {}).setdefault(item.scope, {})[_period_ms(item)] = Wave(series, text)
    return [_stage_waves(host, stage, by_gpu) for stage, by_gpu in stages.items()][:MAX_STAGES]


def _waves(host: HostReport) -> Iterator[tuple[Observation, Series]]:
    for item in host.measurements:
        if item.name == WAVE and item.status == MEASURED and Scope.parse(item.scope).device_kind == "gpu":
            words = item.value if isinstance(item.value, str) and _WORDS.fullmatch(item.value) else ""
            points = [(at, float(word)) for at, word in enumerate(words.split(" ")) if word not in (".", "")]
            if points and _period_ms(item) > 0:
                at, power = zip(*points, strict=True)
                yield (
                    item,
                    Series(
                        name=WAVE,
                        scope=item.scope,
                        unit="W",
                        at=at,
                        n=(1,) * len(at),
                        low=power,
                        mean=power,
                        high=power,
                    ),
                )


def _key_of(item: Observation) -> tuple[str, str, float]:
    return item.stage, item.scope, _period_ms(item)


def _period_ms(item: Observation) -> float:
    period = item.params.get("period_ms")
    return period if is_number(period) else 0.0


def _stage_waves(host: HostReport, stage: str, by_gpu: Mapping[str, Mapping[float, Wave]]) -> LaunchTrace:
    periods = sorted({period for of_gpu in by_gpu.values() for period in of_gpu})[-MAX_PERIODS:]
    columns = [[of_gpu[period].series for of_gpu in by_gpu.values() if period in of_gpu] for period in periods]
    axes = [_axes(series) for series in columns]
    scopes = sorted(by_gpu, key=lambda scope: int(Scope.parse(scope).get("gpu")))
    return LaunchTrace(
        stage=stage,
        ends=ENDS,
        benchmark_lines=LOAD_OFF,
        benchmarks=(),
        columns=tuple(
            SparkColumn(name=_span(period), range=range_text(series))
            for period, series in zip(periods, columns, strict=True)
        ),
        gpus=tuple(
            GpuTrace(
                head=f"GPU {int(Scope.parse(scope).get('gpu'))}",
                serial=serial_of(host, scope),
                lost="",
                sparks=tuple(
                    _spark(by_gpu[scope].get(period), axis) for period, axis in zip(periods, axes, strict=True)
                ),
                figures=tuple(wave.text if (wave := by_gpu[scope].get(period)) else NONE for period in periods),
            )
            for scope in scopes[:MAX_GPUS]
        ),
        left_out=max(0, len(scopes) - MAX_GPUS),
    )


def _span(period_ms: float) -> str:
    return format_span(period_ms / 1000) if period_ms >= 1000 else f"{number(period_ms, 3)} ms"


def _axes(series: Sequence[Series]) -> Axes:
    low, high = bounds(series)
    points = max(item.at[-1] for item in series) + 1
    return Axes(bucket_s=1.0, ends_s=float(points), low=min(low, (1 - MIN_RANGE) * high), high=high)


def _spark(wave: Wave | None, axes: Axes) -> Spark | None:
    return spark("", wave.series, axes) if wave else None


def _describe(series: Series, *figures: Observation | None) -> str:
    """Return `102 to 690 W, mean 396, amplitude 587 W, slew 5413 W/s`; amplitude and slew only if they were measured."""
    words = [range_text([series]), f"mean {number(statistics.fmean(series.mean), 3)}"]
    words += [f"{item.name.partition('.')[2]} {quantity(item.value, item.unit, 3)}" for item in figures if item]
    return ", ".join(words)
