"""Test the plots of power over one period of a pulsed load, on the page of a host."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.quantities import NONE
from fleet.report.html.host_data import embedded_data
from fleet.report.html.page import render_html
from fleet.report.html.power_waves import ENDS, LOAD_OFF, has_waves, power_waves
from fleet.report.merge import merge
from schemas.reports import FleetReport
from tests import builders

SQUARE = " ".join(["690"] * 32 + ["90"] * 32)
"""Value of `pulse.wave`: the power in W at 64 steps of a period. The load is on in the first half and off in the second."""


def report(*waves: tuple[str, float, Any], stage: str = "benchmark") -> FleetReport:
    """Return the report of a host with these observations of `pulse.wave`, each given as scope, period in ms, and value."""
    plan = builders.with_benchmarks(
        builders.plan("h1", profile="extended", gpu_count=2, rackproof_gang="none"),
        benchmark={"pulse": {"periods_ms": [500, 2000]}},
    )
    more = tuple(
        builders.observation("pulse.wave", text, scope=scope, unit="1", stage=stage, period_ms=period)
        for scope, period, text in waves
    )
    records = builders.records(plan, "h1")
    evidence = Evidence(records=(replace(records[0], observations=(*records[0].observations, *more)), *records[1:]))
    return merge(plan, {"h1": evidence}, read_packs([]))


def test_gpu_has_a_plot_for_each_period_with_a_measurement() -> None:
    (host,) = report(("gpu=0", 2000, SQUARE), ("gpu=1", 2000, SQUARE), ("gpu=0", 500, SQUARE)).hosts
    assert has_waves(host)
    (plot,) = power_waves(host)
    assert (plot.stage, plot.ends, plot.benchmark_lines) == ("benchmark", ENDS, LOAD_OFF)
    assert [(column.name, column.range) for column in plot.columns] == [
        ("500 ms", "90 to 690 W"),
        ("2 s", "90 to 690 W"),
    ]
    assert [(gpu.head, gpu.serial) for gpu in plot.gpus] == [("GPU 0", "h1-0"), ("GPU 1", "h1-1")]
    assert plot.gpus[0].figures[0] == "90 to 690 W, mean 390"
    assert plot.gpus[1].sparks[0] is None
    first = plot.gpus[0].sparks[1]
    assert first is not None
    points = re.findall(r"-?[0-9]+ -?[0-9]+", first.line)
    assert len(points) == 4, (
        "the line must have four points: start and end of the high level, then start and end of the low level"
    )
    high = int(points[0].split()[1])
    assert high < 10, "the line must start at high power (a small y): the load is on in the first half of the period"
    assert int(points[2].split()[1]) > 20, (
        "the line must continue at low power: the load is off in the second half of the period"
    )


def test_amplitude_and_slew_are_written_below_the_plot_of_their_gpu_and_period() -> None:
    waves = [("gpu=0", 500, SQUARE), ("gpu=0", 2000, SQUARE), ("gpu=1", 2000, SQUARE)]
    with_waves = report(*waves)
    more = [
        builders.observation(name, value, scope=scope, unit=unit, stage="benchmark", period_ms=2000)
        for name, value, scope, unit in (
            ("pulse.amplitude", 587.3, "gpu=0", "W"),
            ("pulse.slew", 5413.0, "gpu=0", "W/s"),
            ("pulse.amplitude", 602.0, "gpu=1", "W"),
        )
    ]
    kept = [item for item in with_waves.hosts[0].measurements if item.name not in ("pulse.amplitude", "pulse.slew")]
    host = replace(with_waves.hosts[0], measurements=(*kept, *more))
    assert [gpu.figures for gpu in power_waves(host)[0].gpus] == [
        ("90 to 690 W, mean 390", "90 to 690 W, mean 390, amplitude 587 W, slew 5413 W/s"),
        (NONE, "90 to 690 W, mean 390, amplitude 602 W"),
    ]


def test_missing_points_do_not_interrupt_the_line() -> None:
    words = SQUARE.split()
    words[5:9] = ["."] * 4
    (host,) = report(("gpu=0", 2000, " ".join(words))).hosts
    spark = power_waves(host)[0].gpus[0].sparks[0]
    assert spark is not None
    assert spark.line.count("M") == 1


@pytest.mark.parametrize("text", ["", "<script>", "690", "1 2 -3", "690  90", 690.0, True, " ".join(["1"] * 500)])
def test_value_that_is_not_a_wave_is_not_drawn(text: Any) -> None:
    (host,) = report(("gpu=0", 2000, text)).hosts
    assert not has_waves(host)


def test_page_of_the_host_has_the_plots() -> None:
    waves = report(("gpu=0", 2000, SQUARE))
    data = json.loads(embedded_data(waves, 1 << 20))
    ((stage, ends, line, benchmarks, columns, gpus, left_out),) = data["pages"]["0"]["waves"]
    assert (data["texts"][stage], data["texts"][ends], line) == ("benchmark", ENDS, LOAD_OFF)
    assert (benchmarks, left_out, len(columns), len(gpus)) == ([], 0, 1, 1)
    assert "waves" not in json.loads(embedded_data(report(), 1 << 20))["pages"]["0"]
    assert ".trace" in render_html(waves)
