"""The sample log in launches of any length: each time window has figures, and the log uses bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.run.work_directory import benchmarks_since
from agent.sampling import sample_log
from agent.sampling.sample_log import SampleLog
from agent.sampling.telemetry import PERIOD_S, Telemetry
from collectors.base import Absent
from collectors.nvml import GpuSample
from schemas.records import ERROR, MEASURED, Observation

LOST = Absent(status="error", reason="NVML: GPU is lost")
HOT = 0x40
"""Bit of the throttle reason `hw_thermal` in NVML."""


def sample(power: float = 600.0, temperature: float = 60.0, reasons: int = 0) -> GpuSample:
    return GpuSample(power, 1.5e9, temperature, reasons, 2.6e9)


def window(benchmark: str, begin: float, end: float) -> dict[str, Any]:
    return {"benchmark": benchmark, "scope": "gpu=0", "begin": begin, "end": end, "params": {}}


def figures(telemetry: Telemetry, *args: Any) -> dict[str, Observation]:
    """Return the sampled figures of `window(*args)`. Of the throttle reasons, only `hw_thermal` is included."""
    observed = telemetry.observations([window(*args)], [], "benchmark")
    return {item.name: item for item in observed if item.params.get("reason", "sw_thermal") == "hw_thermal"} | {
        item.name: item for item in observed if "reason" not in item.params
    }


@pytest.fixture(autouse=True)
def _small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the logs so that they are full after 20 s of samples."""
    monkeypatch.setattr(sample_log, "MAX_SAMPLES", 400)


def run_launch(begun: dict[str, float], seconds: float, read: Any) -> Telemetry:
    """Return the telemetry of a launch that lasts `seconds`.

    `begun`: benchmark -> second at which it begins; `read`: function that returns the sample at a given second.
    """
    names = [*begun]

    def running(since: float) -> list[str]:
        ends = [*[begun[name] for name in names[1:]], float("inf")]
        return [name for name, end in zip(names, ends, strict=True) if begun[name] <= now and end >= since]

    telemetry = Telemetry([0], running=running)
    for tick in range(round(seconds / PERIOD_S)):
        now = tick * PERIOD_S
        telemetry.handle(now, {0: read(now)})
    return telemetry


def test_long_benchmark_that_ended_long_ago_and_short_benchmark_at_the_end_have_figures() -> None:
    """The samples after the end of `stress` would fill a log ten times. `straggler` lasts for less than a second."""
    begun = {"stress": 0.0, "digest": 60.0, "straggler": 260.2, "collective": 261.0}
    telemetry = run_launch(
        begun,
        270.0,
        lambda at: sample(600 if at < 60 else 100 if at < 260 else 300, 50 + min(at, 40), HOT if 30 <= at < 60 else 0),
    )
    stress = figures(telemetry, "stress", 10.0, 60.0)
    assert {item.status for item in stress.values() if item.name != "stress.efficiency"} == {MEASURED}
    assert stress["stress.power"].value == pytest.approx(600, rel=0.02)
    assert stress["stress.temperature"].value == 90.0
    assert stress["stress.throttled_share"].value == pytest.approx(0.6, abs=0.05)
    assert float(str(stress["stress.power"].params["samples_per_second"])) == pytest.approx(20, abs=0.5)
    straggler = figures(telemetry, "straggler", 260.3, 260.9)
    assert straggler["straggler.power"].value == 300.0
    assert straggler["straggler.power"].samples
    assert straggler["straggler.power"].samples.n >= 11  # no sample was merged with another one
    assert sum(len(log._groups) for log in telemetry._logs.values()) <= 2 * sample_log.MAX_SAMPLES
    assert set(telemetry._logs) == {"stress", "straggler"}


def test_window_longer_than_a_log_is_covered_from_begin_to_end() -> None:
    telemetry = run_launch({"stress": 0.0}, 400.0, lambda at: sample(500 + at, 40 + 30 * (at > 399), HOT * (at < 40)))
    stress = figures(telemetry, "stress", 0.0, 399.9)
    assert stress["stress.power"].value == pytest.approx(700, rel=0.01)
    assert stress["stress.power"].samples
    assert stress["stress.power"].samples.min < 501
    assert stress["stress.power"].samples.max > 898
    assert stress["stress.temperature"].value == 70.0
    assert stress["stress.throttled_share"].value == pytest.approx(0.1, abs=0.02)


def test_merging_keeps_samples_from_both_phases_of_a_pulsed_load() -> None:
    telemetry = run_launch({"stress": 0.0}, 200.0, lambda at: sample(690.0 if round(at / PERIOD_S) % 2 else 90.0))
    assert figures(telemetry, "stress", 0.0, 199.9)["stress.power"].value == pytest.approx(390, abs=60)


@pytest.mark.parametrize("gap", [(5.0, 6.5), (385.0, 386.5)])
def test_longest_gap_between_samples_is_known_after_the_samples_are_merged(gap: tuple[float, float]) -> None:
    log = SampleLog()
    for tick in range(8000):
        if not gap[0] < (at := tick * PERIOD_S) < gap[1]:
            log.add(at, {0: sample()})
    whole = log.select(0, 0.0, 399.9)
    assert whole.gap_s == pytest.approx(1.5, abs=0.1)
    assert whole.reads == pytest.approx(8000 - 30, abs=2)
    other = log.select(0, 100.0, 200.0)
    assert other.gap_s == pytest.approx(PERIOD_S)
    assert other.reads == pytest.approx(2000, abs=40)


def test_failed_sample_is_not_lost_when_samples_are_merged() -> None:
    telemetry = run_launch({"stress": 0.0}, 400.0, lambda at: LOST if 200.0 <= at < 200.04 else sample())
    for item in figures(telemetry, "stress", 0.0, 399.9).values():
        assert item.status == ERROR
        assert "samples failed: NVML: GPU is lost" in item.reason
    later = figures(telemetry, "stress", 210.0, 399.9)
    assert later["stress.power"].status == MEASURED


def test_figure_of_a_benchmark_that_never_ran_has_a_reason() -> None:
    telemetry = run_launch({"gemm": 0.0}, 10.0, lambda _: sample())
    assert "0 samples in 5.0 s, longest gap 5.0 s" in figures(telemetry, "stress", 0.0, 5.0)["stress.power"].reason


def test_benchmarks_that_ran_since_a_given_time_are_listed(tmp_path: Path) -> None:
    for rank, begun in enumerate(({"gemm": 1.0, "stress": 5.0, "pulse": 9.0}, {"gemm": 1.5, "stress": 6.0})):
        (tmp_path / f"rank{rank}.state.json").write_text(json.dumps({"phase": "x", "begun": begun}))
    (tmp_path / "rank2.state.json").write_text('{"begun": {"digest": "soon", "gemm": 1}}')
    (tmp_path / "rank3.state.json").write_text('{"begun": {}}')
    ranks = range(5)
    assert benchmarks_since(tmp_path, ranks, float("-inf")) == {"gemm", "stress", "pulse"}
    assert benchmarks_since(tmp_path, ranks, 5.5) == {"gemm", "stress", "pulse"}
    assert benchmarks_since(tmp_path, ranks, 7.0) == {"stress", "pulse"}
    assert benchmarks_since(tmp_path, [0], 9.5) == {"pulse"}
