"""Sample power, clocks, temperature and throttling of each GPU many times per second while the ranks run."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.sampling.power_wave import (
    FAST_TELEMETRY,
    PowerLog,
    PowerValue,
    UnresolvedError,
    power_wave,
)
from agent.sampling.sample_log import GpuSamples, SampleLog, Selection
from agent.sampling.statistics import summarize
from agent.sampling.timeline import Recorder
from collectors.base import Absent
from collectors.nvml import THROTTLE_REASONS, FastReader, GpuSample, PowerSample
from schemas.catalogue import BENCHMARKS
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation
from schemas.scopes import Scope
from schemas.trace import UNREAD, Trace, make_trace

PERIOD_S = 0.05
FAST_PERIOD_S = 0.005
"""Period at which power alone is read while a benchmark requests it (`FAST_TELEMETRY`). NVML has new values less often."""
RUNNING_S = 1.0
"""The supervisor checks every RUNNING_S seconds which benchmarks are running."""
RECENT_S = 10.0
"""When such a check shows that a benchmark has begun, the samples of the last RECENT_S seconds are added to its log."""
SAMPLED = frozenset(name for name, item in BENCHMARKS.items() if any(output.sampled for output in item.outputs))
"""The benchmarks that request samples."""
PULSE = "pulse"
"""The benchmark that switches its load on and off during a window."""
MIN_HZ = 10.0
MAX_GAP_S = 1.0
"""A window with fewer than MIN_HZ samples per second, or with more than MAX_GAP_S seconds between two samples, is not used. A
slowdown could fall between its samples."""


class NvmlPoller(threading.Thread):
    """Thread that reads GPUs until it is stopped, with a pause of `period_s` before each reading.

    It is a daemon thread that is never joined, so a driver that blocks does not keep the process alive.
    """

    def __init__(self, open_reader: Callable[[], FastReader], period_s: float) -> None:
        super().__init__(daemon=True)
        self._open_reader, self._period_s = open_reader, period_s
        self._stopped = threading.Event()
        self._error = ""

    def run(self) -> None:
        try:
            self.poll(self._open_reader())
        except Exception as error:  # noqa: BLE001 - NVML's errors differ between versions; only the samples are lost
            self._error = f"{type(error).__name__}: {error}"

    def poll(self, reader: FastReader) -> None:
        """Read until the poller is stopped."""
        while not self._stopped.wait(self._period_s):
            self.handle(time.monotonic(), reader.read())

    def handle(self, at: float, samples: GpuSamples) -> None:
        """Process the samples of one moment. `at` is that moment by `time.monotonic()`."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop reading."""
        self._stopped.set()


class Telemetry(NvmlPoller):
    """Samples the GPUs during a launch, for the time windows that ranks request and for a timeline of the whole launch.

    A launch may last for days. So samples are kept only while a benchmark runs that may request them (SAMPLED), and each such
    benchmark has a log of bounded size.
    """

    def __init__(
        self,
        devices: Iterable[int],
        work: Path | None = None,
        running: Callable[[float], Collection[str]] = lambda _: SAMPLED,
    ) -> None:
        """Prepare to sample the GPUs of a launch.

        Args:
            devices: NVML indices.
            work: work directory of the launch.
            running: returns the benchmarks that ranks were running at or after the given time of `time.monotonic()`.
        """
        devices = list(devices)
        self._work = work
        self._power = {index: PowerLog() for index in devices}
        super().__init__(lambda: FastReader(devices), PERIOD_S)
        self._devices = devices
        self._running, self._running_names, self._running_at = running, frozenset[str](), float("-inf")
        self._logs: dict[str, SampleLog] = {}
        self._recent: deque[tuple[float, GpuSamples]] = deque(maxlen=round(RECENT_S / PERIOD_S))
        self._lock = threading.Lock()
        self._recorder = Recorder()
        self._lost: dict[int, str] = {}
        self._sampled: set[int] = set()
        self._began = time.monotonic()

    def __enter__(self) -> Telemetry:
        self._began = time.monotonic()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def poll(self, reader: FastReader) -> None:
        """Read until the poller is stopped; between two samples, read the power alone if a benchmark requests it."""
        due = time.monotonic() + PERIOD_S
        while not self._stopped.wait(FAST_PERIOD_S if self._is_fast() else max(0.0, due - time.monotonic())):
            if self._is_fast():
                at = time.monotonic()
                for index, power in reader.read_power().items():
                    self._add_power(index, at, power)
            if (now := time.monotonic()) >= due:
                self.handle(now, reader.read())
                due = time.monotonic() + PERIOD_S

    def _is_fast(self) -> bool:
        return self._work is not None and any(self._work.glob(f"{FAST_TELEMETRY}.*"))

    def _add_power(self, index: int, at: float, power: PowerSample | Absent) -> None:
        if isinstance(power, Absent):
            self._power[index].add_failure(at, power.reason or power.status)
        else:
            self._power[index].add(PowerValue(at=at, power=power.power, averaged_s=power.averaged_s))

    def handle(self, at: float, samples: GpuSamples) -> None:
        with self._lock:
            self._keep(at, samples)
        self._recorder.add_samples(at - self._began, samples)
        self._sampled |= samples.keys()
        for index, sample in samples.items():
            if isinstance(sample, Absent):
                self._recorder.add_value(at - self._began, UNREAD, f"gpu={index}", "1", 1.0)
                self._lost.setdefault(index, sample.reason or sample.status)

    def _keep(self, at: float, samples: GpuSamples) -> None:
        """Add the samples to the logs of the running benchmarks. If one has just begun, also add recent samples (RECENT_S)."""
        self._recent.append((at, samples))
        if at - self._running_at >= RUNNING_S:
            self._running_names, self._running_at = SAMPLED.intersection(self._running(self._running_at)), at
        for name in self._running_names:
            log = self._logs.setdefault(name, SampleLog())
            for moment, recent in self._recent if at - log.last > RUNNING_S else [(at, samples)]:
                if moment > log.last:
                    log.add(moment, recent)

    def trace(self, start_times: Mapping[str, float]) -> Trace | None:
        """Return a short timeline of every GPU over the launch; None if a very short launch ended before the first sample.

        Args:
            start_times: benchmark -> when it began, by the clock of `time.monotonic()`.
        """
        now = time.monotonic()
        began_s = {name: max(0.0, at - self._began) for name, at in start_times.items() if at <= now}
        silent = self._error or ("the driver gave no sample" if now - self._began > 1 else "")
        unsampled = {index: silent for index in self._devices if silent and index not in self._sampled}
        lost = {str(index): reason[:512] for index, reason in sorted({**unsampled, **self._lost}.items())}
        return make_trace(self._recorder.timeline(), began_s, lost)

    def observations(
        self, windows: Sequence[Mapping[str, Any]], measured: Sequence[Observation], stage: str
    ) -> list[Observation]:
        """Return the figures that are computed from NVML samples, for the benchmark and the GPU of each time window.

        Args:
            windows: the time windows that ranks requested.
            measured: observations of the ranks. From a throughput among them, the throughput per W and per Hz is computed.
            stage: stage of the launch.
        """
        with self._lock:
            return [
                observation for window in windows for observation in self._window_observations(window, measured, stage)
            ]

    def _window_observations(
        self, window: Mapping[str, Any], measured: Sequence[Observation], stage: str
    ) -> Iterator[Observation]:
        index = int(Scope.parse(window["scope"]).get("gpu"))
        log = self._logs.get(window["benchmark"]) or SampleLog()
        selection = log.select(index, window["begin"], window["end"])
        reason = self._error or _why_unusable(window, selection)
        if window["benchmark"] == PULSE:
            powers = self._power[index].select(window["begin"], window["end"])
            if failure := self._power[index].failure_between(window["begin"], window["end"]):
                reason = reason or f"a reading of the power failed: {failure}"
            elif not powers:
                reason = reason or "no new power value was read during the load"
            period_s = window["params"]["period_ms"] / 1000
            reason = reason or self._power[index].why_stuck(window["begin"], window["end"], period_s)
            yield from _wave_figures(window, stage, reason, powers, selection.samples)
            return
        if reason:
            yield from _errors(window, stage, reason)
            return
        values = [sample for _, sample in selection.samples if isinstance(sample, GpuSample)]
        rate = round(selection.reads / (window["end"] - window["begin"]), 1)
        common: dict[str, Any] = {"scope": window["scope"], "stage": stage, "status": MEASURED}
        params = {**window["params"], "samples_per_second": rate}
        yield from _levels(window["benchmark"], values, params, common)
        yield from _throttled_shares(window["benchmark"], values, params, common)
        yield from _efficiencies(window, values, measured, params, common)


def _errors(window: Mapping[str, Any], stage: str, reason: str) -> Iterator[Observation]:
    for output in BENCHMARKS[window["benchmark"]].outputs:
        if output.sampled:
            yield Observation(
                name=output.name,
                scope=window["scope"],
                stage=stage,
                unit=output.unit,
                status=ERROR,
                reason=reason,
                params=window["params"],
            )


def _wave_figures(
    window: Mapping[str, Any],
    stage: str,
    reason: str,
    powers: Sequence[PowerValue],
    samples: Sequence[tuple[float, GpuSample | Absent]],
) -> Iterator[Observation]:
    """Yield amplitude, slew rate and shape of the power under a pulsed load, and the SM clock, or why these were not measured.

    If only one GPU at a time has a load (`sharing` is `alone`), yield only the amplitude.

    Args:
        window: time window that a rank requested.
        stage: stage of the launch.
        reason: why the readings cannot be used; empty if they can.
        powers: new power values of the GPU in the window (`PowerLog`).
        samples: samples of the GPU in the window.
    """
    params = {key: value for key, value in window["params"].items() if key != "sharing"}
    alone = window["params"]["sharing"] == "alone"
    units = {"alone_amplitude": "W"} if alone else {"amplitude": "W", "slew": "W/s", "clock": "Hz", "wave": "1"}
    figures: dict[str, Any] = {}
    status, period_s = ERROR, params["period_ms"] / 1000
    if not reason:
        try:
            wave = power_wave(powers, window["begin"], period_s)
        except UnresolvedError as error:
            status, reason = UNSUPPORTED, str(error)
        else:
            figures = {"amplitude": wave.amplitude, "slew": wave.slew, "wave": wave.wave}
            figures |= {"alone_amplitude": wave.amplitude, "clock": _loaded_clock(window["begin"], period_s, samples)}
            rate = round(len(powers) / (window["end"] - window["begin"]), 1)
            params |= {"samples_per_second": rate, "update_s": round(wave.update_s, 3)}
    for name, unit in units.items():
        value = figures.get(name)
        why = reason or "no sample of the SM clock in the second half of a phase with load"
        result: dict[str, Any] = {"status": MEASURED, "value": value}
        if value is None:
            result = {"status": status, "reason": why}
        yield Observation(
            **result,
            name=f"{PULSE}.{name}",
            scope=window["scope"],
            stage=stage,
            unit=unit,
            params=params,
        )


def _loaded_clock(begin: float, period_s: float, samples: Sequence[tuple[float, GpuSample | Absent]]) -> float | None:
    """Return the mean SM clock in the second half of the phases with load; None if no sample was taken then."""
    clocks = [
        sample.clock
        for at, sample in samples
        if isinstance(sample, GpuSample) and 0.25 <= (at - begin) % period_s / period_s < 0.5
    ]
    return statistics.fmean(clocks) if clocks else None


def _levels(
    benchmark: str, samples: Sequence[GpuSample], params: dict[str, Any], common: dict[str, Any]
) -> Iterator[Observation]:
    """Yield mean power, mean clock and highest temperature.

    Power and clock are means, because both oscillate at the power limit, and NVML reports the clock in steps of 1 %.
    """
    for name, unit, values in (
        ("power", "W", [sample.power for sample in samples]),
        ("clock", "Hz", [sample.clock for sample in samples]),
        ("temperature", "Cel", [sample.temperature for sample in samples]),
    ):
        summary = summarize(values)
        value = summary.max if name == "temperature" else statistics.fmean(values)
        yield Observation(name=f"{benchmark}.{name}", unit=unit, value=value, samples=summary, params=params, **common)


def _throttled_shares(
    benchmark: str, samples: Sequence[GpuSample], params: dict[str, Any], common: dict[str, Any]
) -> Iterator[Observation]:
    for reason, mask in THROTTLE_REASONS.items():
        share = sum(bool(sample.reasons & mask) for sample in samples) / len(samples)
        yield Observation(
            name=f"{benchmark}.throttled_share", unit="1", value=share, params={**params, "reason": reason}, **common
        )


def _efficiencies(
    window: Mapping[str, Any],
    samples: Sequence[GpuSample],
    measured: Sequence[Observation],
    params: dict[str, Any],
    common: dict[str, Any],
) -> Iterator[Observation]:
    """Yield the throughput that the rank measured in the window, per W of the GPU's mean power and per Hz of its mean SM clock.

    The first is in FLOP/J, the second in FLOP/cycle.
    """
    benchmark = window["benchmark"]
    power, clock = (statistics.fmean(values) for values in zip(*((s.power, s.clock) for s in samples), strict=True))
    for rate in measured:
        is_throughput = (rate.name, rate.scope, rate.status) == (f"{benchmark}.throughput", window["scope"], MEASURED)
        if is_throughput and window["params"].items() <= rate.params.items():
            for name, unit, mean, what in (
                ("efficiency", "FLOP/J", power, "power"),
                ("flop_per_cycle", "FLOP/cycle", clock, "clock"),
            ):
                result: dict[str, Any] = {"value": float(rate.value or 0) / mean} if mean else {}
                if not mean:
                    result = {"status": ERROR, "reason": f"NVML reports a {what} of 0 in the whole window"}
                yield Observation(**{**common, **result}, name=f"{benchmark}.{name}", unit=unit, params=params)


def _why_unusable(window: Mapping[str, Any], selection: Selection) -> str:
    """Return why these samples cannot be used for the window; empty if they can."""
    samples = selection.samples
    failed = [sample.reason for _, sample in samples if isinstance(sample, Absent)]
    if failed:
        return f"{len(failed)} of {len(samples)} samples failed: {failed[-1]}"
    span = window["end"] - window["begin"]
    if selection.reads < MIN_HZ * span or selection.gap_s > MAX_GAP_S or not samples:
        return (
            f"{selection.reads} samples in {span:.1f} s, longest gap {selection.gap_s:.1f} s: at least {MIN_HZ:g} per second are "
            f"needed, without a gap of more than {MAX_GAP_S:g} s"
        )
    return ""
