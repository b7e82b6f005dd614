"""Measure square waves of known amplitude with a fake power meter: its values are noisy, updated rarely and averaged."""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sampling import power_wave as power_wave_module
from agent.sampling.power_wave import (
    FAST_TELEMETRY,
    GAP,
    WAVE_POINTS,
    PowerLog,
    PowerValue,
    UnresolvedError,
    power_wave,
)
from agent.sampling.telemetry import Telemetry
from collectors.base import Absent
from collectors.nvml import GpuSample, PowerSample
from schemas.records import ERROR, MEASURED, UNSUPPORTED

BEGIN = 1000.0
"""Time of the first reading, in seconds."""


def meter(
    period_s: float,
    *,
    low: float = 90.0,
    high: float = 690.0,
    noise: float = 2.0,
    update_s: float = 0.02,
    window_s: float = 0.01,
    lag_s: float = 0.0,
    periods: int = 20,
    poll_s: float = 0.005,
    averaged_s: float = 0.0,
    seed: int = 1,
) -> list[PowerValue]:
    """Return the readings of a power meter, one every `poll_s`, while the power is a square wave with a period of `period_s`.

    The power is `high` in the first half of each period, and `low` in the second half. The meter has a new value every
    `update_s`: the mean power over `window_s` seconds that ended `lag_s` seconds earlier, plus Gaussian noise whose standard
    deviation is `noise` (W). `averaged_s` is the averaging time that the meter reports, which may differ from `window_s`.
    """
    numbers = random.Random(seed)  # noqa: S311 - noise of a meter
    readings, shown, updated = [], low, float("-inf")
    for number in range(int(periods * period_s / poll_s)):
        at = BEGIN + number * poll_s
        if at - updated >= update_s:
            loaded = [((at - lag_s - window_s * part / 8 - BEGIN) % period_s) < period_s / 2 for part in range(8)]
            shown, updated = low + (high - low) * sum(loaded) / 8 + numbers.gauss(0, noise), at
        readings.append(PowerValue(at=at, power=shown, averaged_s=averaged_s))
    return readings


@given(
    period_s=st.sampled_from([0.1, 0.5, 2.0]),
    low=st.floats(30, 200),
    rise=st.floats(50, 900),
    noise=st.floats(0.1, 5),
    lag=st.floats(0, 0.2),
    seed=st.integers(0, 99),
)
def test_amplitude_of_a_noisy_wave_is_measured(
    period_s: float, low: float, rise: float, noise: float, lag: float, seed: int
) -> None:
    readings = meter(period_s, low=low, high=low + rise, noise=noise, lag_s=lag * period_s, seed=seed)
    wave = power_wave(readings, BEGIN, period_s)
    assert wave.amplitude == pytest.approx(rise, abs=4 * noise)
    assert wave.low == pytest.approx(low, abs=3 * noise)
    assert wave.update_s == pytest.approx(0.02, abs=0.006)


@given(period_s=st.sampled_from([0.005, 0.02, 0.06]), update_s=st.sampled_from([0.02, 0.05, 0.1]))
def test_period_shorter_than_four_updates_of_the_meter_is_unresolved(period_s: float, update_s: float) -> None:
    readings = meter(period_s, update_s=update_s, periods=round(12 / period_s))
    with pytest.raises(UnresolvedError, match="the shortest period that they resolve is"):
        power_wave(readings, BEGIN, period_s)


def test_values_averaged_over_a_second_resolve_only_long_periods() -> None:
    with pytest.raises(UnresolvedError, match="averaged over 1 s; the shortest period that they resolve is 4 s"):
        power_wave(meter(2.0, update_s=0.1, window_s=1.0, averaged_s=1.0), BEGIN, 2.0)
    wave = power_wave(meter(10.0, update_s=0.1, window_s=1.0, averaged_s=1.0, periods=3), BEGIN, 10.0)
    assert wave.amplitude == pytest.approx(600, abs=10)


def test_values_in_one_part_of_the_period_are_unresolved() -> None:
    """Case 1: one reading per period, always at the same phase. Case 2: nine readings in the first tenth of each period."""
    readings = [PowerValue(at=BEGIN + number * 0.5, power=100.0 + number % 7) for number in range(40)]
    with pytest.raises(UnresolvedError):
        power_wave(readings, BEGIN, 0.5)
    crowded = [PowerValue(at=BEGIN + turn + step / 100, power=100.0 + step) for turn in range(9) for step in range(9)]
    with pytest.raises(UnresolvedError, match="at least 3 of each are needed"):
        power_wave(crowded, BEGIN, 1.0)


def log_of(readings: list[PowerValue]) -> PowerLog:
    """Return a log with these readings."""
    log = PowerLog()
    for value in readings:
        log.add(value)
    return log


def frozen(readings: list[PowerValue], first: float, last: float) -> list[PowerValue]:
    """Return the readings, but with the same power in all readings from `first` to `last` (seconds after BEGIN)."""
    held = next(value.power for value in readings if value.at >= BEGIN + first)
    return [replace(value, power=held) if first <= value.at - BEGIN < last else value for value in readings]


@pytest.mark.parametrize(
    ("period_s", "first", "last", "seconds"),
    [(0.5, 0.0, 10.0, 10.0), (0.5, 1.0, 10.0, 9.0), (0.5, 4.0, 8.0, 4.0), (0.5, 4.0, 6.5, 0), (2.0, 1.0, 5.0, 4.0)],
)
def test_meter_that_shows_one_value_while_the_load_is_switched_is_stuck(
    period_s: float, first: float, last: float, seconds: float
) -> None:
    """`seconds`: reported time during which the power stayed the same; 0: the time is too short to be reported."""
    log = log_of(frozen(meter(period_s, periods=round(10 / period_s)), first, last))
    reason = log.why_stuck(BEGIN, BEGIN + 10, period_s)
    match = re.fullmatch(r"the power stayed at \d+(\.\d+)? W for (.*) s of pulsed load", reason)
    assert bool(match) == bool(seconds), reason
    assert not match or float(match[2]) == pytest.approx(seconds, abs=0.1)
    assert log.why_stuck(BEGIN + 8.5, BEGIN + 10, period_s) == "", (
        "the time before the window must not count, and 1.5 s in the window are too short to report"
    )


@pytest.mark.parametrize("noise", [0.0, 2.0])
@pytest.mark.parametrize("period_s", [0.005, 0.02, 0.1, 0.5, 2.0, 10.0])
def test_meter_that_works_is_not_stuck(period_s: float, noise: float) -> None:
    """A working meter may show a single value on each plateau, or only the mean power if it cannot resolve the period."""
    readings = meter(period_s, noise=noise, update_s=0.1, window_s=0.1, periods=max(2, round(20 / period_s)))
    assert log_of(readings).why_stuck(BEGIN, BEGIN + 20, period_s) == ""


def test_time_without_readings_does_not_count_as_unchanged() -> None:
    log = log_of([PowerValue(at=BEGIN, power=90.0), PowerValue(at=BEGIN + 9, power=90.0)])
    assert log.why_stuck(BEGIN, BEGIN + 10, 0.5) == ""


def test_stuck_meter_is_an_error_and_not_unsupported() -> None:
    """The meter gets stuck after a single new value, or after one second of the measurement."""
    for first in (0.02, 1.0):
        telemetry = Telemetry([0])
        for tick in range(220):
            telemetry.handle(BEGIN + tick * 0.05, {0: GpuSample(600.0, 1.5e9, 60.0, 0, 2.6e9)})
        for value in frozen(meter(0.5), first, 10.0):
            telemetry._add_power(0, value.at, PowerSample(value.power, 0.0))
        observed = telemetry.observations([window(BEGIN, BEGIN + 9.9, "all_gpus", period_ms=500)], [], "benchmark")
        assert {item.status for item in observed} == {ERROR}
        assert all("the power stayed at" in item.reason for item in observed)


def test_slew_is_the_median_of_the_fastest_rise_in_each_period() -> None:
    """A rise is measured between two successive values."""
    wave = power_wave(meter(2.0, noise=0.5, window_s=0.001, update_s=0.1), BEGIN, 2.0)
    assert wave.slew == pytest.approx(600 / 0.1, rel=0.06)
    slow = power_wave(meter(2.0, noise=0.5, window_s=0.4, update_s=0.1), BEGIN, 2.0)
    assert slow.slew == pytest.approx(600 / 0.4, rel=0.15)


def test_wave_has_the_shape_of_one_period() -> None:
    wave = power_wave(meter(2.0, noise=0.5), BEGIN, 2.0)
    points = wave.wave.split(" ")
    assert len(points) == WAVE_POINTS
    assert len(wave.wave) <= 1024  # maximum length of a text in a record
    numbers = [int(point) for point in points if point != GAP]
    assert numbers[4:28] == pytest.approx([690] * 24, abs=3)
    assert numbers[36:60] == pytest.approx([90] * 24, abs=3)


def test_log_has_the_new_values_of_a_window() -> None:
    log = PowerLog()
    for number in range(20):
        log.add(PowerValue(at=float(number), power=float(number // 2), averaged_s=0.5))
    assert [(value.at, value.power) for value in log.select(3.5, 8.0)] == [(4.0, 2.0), (6.0, 3.0), (8.0, 4.0)]
    assert {value.averaged_s for value in log.select(0, 99)} == {0.5}


def test_full_log_keeps_blocks_of_values_from_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pulsed load must have figures even at the end of a launch of several days."""
    monkeypatch.setattr(power_wave_module, "MAX_VALUES", 80)
    monkeypatch.setattr(power_wave_module, "BLOCK", 10)
    log = PowerLog()
    for number in range(1000):
        log.add(PowerValue(at=float(number), power=float(number)))
    kept = [int(value.at) for value in log.select(0, 999)]
    assert kept == [block + step for block in range(0, 1000, 160) for step in range(10)]


def test_pulses_have_the_same_amplitude_after_the_log_has_become_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_wave_module, "MAX_VALUES", 800)
    monkeypatch.setattr(power_wave_module, "BLOCK", 100)
    log = PowerLog()
    readings = meter(0.5, periods=200)
    for value in readings:
        log.add(value)
    assert len(log.select(BEGIN, BEGIN + 100)) <= 800
    for begin in (BEGIN, BEGIN + 80):
        wave = power_wave(log.select(begin, begin + 20), begin, 0.5)
        assert wave.amplitude == pytest.approx(600, abs=10)
        assert wave.update_s == pytest.approx(0.02, abs=0.006)
        assert wave.slew == pytest.approx(power_wave(readings, BEGIN, 0.5).slew, rel=0.1)


PERIOD_MS = 200


class PulsedReader:
    """GPUs 0 and 1, whose power is a square wave with a new value every 20 ms. `read_power` fails for GPU 1."""

    def __init__(self, began: float) -> None:
        self._began = began

    def _watts(self) -> float:
        step = int((time.monotonic() - self._began) / 0.02)
        return (690.0 if step * 0.02 % (PERIOD_MS / 1000) < PERIOD_MS / 2000 else 90.0) + step % 7 / 10

    def read(self) -> dict[int, GpuSample | Absent]:
        return {index: GpuSample(self._watts(), 1.5e9, 60.0, 0, 2.6e9) for index in (0, 1)}

    def read_power(self) -> dict[int, PowerSample | Absent]:
        return {0: PowerSample(self._watts(), 0.0), 1: Absent.error("NVML: GPU is lost")}


def window(began: float, end: float, sharing: str, gpu: int = 0, period_ms: int = PERIOD_MS) -> dict[str, object]:
    """Return the time window of a pulsed load, as in the results of a rank. `sharing`: "all_gpus" or "alone"."""
    params = {"period_ms": period_ms, "sharing": sharing, "size": 4096}
    return {"benchmark": "pulse", "scope": f"gpu={gpu}", "begin": began, "end": end, "params": params}


def test_supervisor_reads_power_fast_while_it_is_requested(tmp_path: Path) -> None:
    began = time.monotonic()
    telemetry = Telemetry([0, 1], tmp_path)
    (tmp_path / f"{FAST_TELEMETRY}.0").touch()
    thread = threading.Thread(target=telemetry.poll, args=(PulsedReader(began),))
    thread.start()
    time.sleep(2.2)
    end = time.monotonic()
    (tmp_path / f"{FAST_TELEMETRY}.0").unlink()
    time.sleep(0.5)
    telemetry.stop()
    thread.join()
    windows = [
        window(began, end - 0.1, "all_gpus"),
        window(began, end - 0.1, "alone"),
        window(began, end - 0.1, "all_gpus", period_ms=20),
        window(began, end - 0.1, "all_gpus", gpu=1),
        window(end + 0.1, end + 0.4, "all_gpus"),
    ]
    together, alone, short, lost, later = (telemetry.observations([item], [], "benchmark") for item in windows)
    figures = {item.name: item for item in together}
    assert set(figures) == {"pulse.amplitude", "pulse.slew", "pulse.clock", "pulse.wave"}
    assert {item.status for item in together} == {MEASURED}
    assert figures["pulse.amplitude"].value == pytest.approx(600, abs=10)
    assert float(figures["pulse.slew"].value or 0) > 600 / 0.1
    assert figures["pulse.clock"].value == 1.5e9
    assert re.fullmatch(r"(\d+|\.)( (\d+|\.)){63}", str(figures["pulse.wave"].value))
    assert set(figures["pulse.wave"].params) == {"period_ms", "size", "samples_per_second", "update_s"}
    assert [(item.name, item.unit) for item in alone] == [("pulse.alone_amplitude", "W")]
    assert alone[0].value == figures["pulse.amplitude"].value
    assert {item.status for item in short} == {UNSUPPORTED}
    assert "do not resolve this period" in short[0].reason
    assert {item.status for item in lost} == {ERROR}
    assert "GPU is lost" in lost[0].reason
    assert {(item.status, item.reason) for item in later} == {(ERROR, "no new power value was read during the load")}


def test_failed_power_reading_counts_only_in_the_load_in_which_it_failed() -> None:
    """Readings fail before the first load, between the first and the second load, and in the third load."""
    telemetry = Telemetry([0])
    for tick in range(700):
        telemetry.handle(BEGIN + tick * 0.05, {0: GpuSample(600.0, 1.5e9, 60.0, 0, 2.6e9)})
    for value in meter(0.5, periods=70):
        failed = any(abs(value.at - BEGIN - at) < 0.004 for at in (1.0, 12.0, 25.0))
        telemetry._add_power(0, value.at, Absent.error("NVML: busy") if failed else PowerSample(value.power, 0.0))
    spans = {(1.5, 11.5): MEASURED, (13.0, 23.0): MEASURED, (24.0, 34.0): ERROR}
    for (begin, end), status in spans.items():
        item = window(BEGIN + begin, BEGIN + end, "all_gpus", period_ms=500)
        observed = {item.name: item for item in telemetry.observations([item], [], "benchmark")}
        assert observed["pulse.amplitude"].status == status, observed["pulse.amplitude"].reason
    assert "a reading of the power failed: NVML: busy" in observed["pulse.amplitude"].reason


def test_number_of_recorded_time_spans_with_failures_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_wave_module, "MAX_STRETCHES", 3)
    log = PowerLog()
    for number in range(10):
        log.add_failure(BEGIN + 10 * number, f"failure {number}")
    assert log.failure_between(BEGIN + 5, BEGIN + 9) == ""
    assert log.failure_between(BEGIN + 10, BEGIN + 11) == "failure 1"
    assert log.failure_between(BEGIN + 85, BEGIN + 95) == "failure 9", (
        "the third and last time span must extend to the newest failure"
    )
