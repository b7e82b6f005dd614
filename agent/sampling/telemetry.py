"""What each GPU drew, and what held its clocks down, while the ranks were at it: sampled many times a second."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agent.sampling.statistics import summarize
from agent.sampling.timeline import Recorder
from collectors.base import Absent
from collectors.nvml import THROTTLE_REASONS, FastReader, GpuSample
from schemas.catalogue import BENCHMARKS
from schemas.records import ERROR, MEASURED, Observation
from schemas.scopes import Scope
from schemas.trace import UNREAD, Trace, traced

PERIOD_S = 0.05
KEPT = 72_000
"""Samples kept, an hour of them."""
LEAST_HZ = 10.0
LONGEST_GAP_S = 1.0
"""What was sampled more thinly proves nothing: a slowdown would fall between the samples."""

Sample = tuple[float, Mapping[int, GpuSample | Absent]]


class Beating(threading.Thread):
    """Reads power, clocks, temperature and clock event reasons of these GPUs until it is told to stop.

    A daemon: a driver that blocks must not keep the process.
    """

    def __init__(self, pulse: Callable[[], FastReader], period_s: float) -> None:
        super().__init__(daemon=True)
        self._pulse, self._period_s = pulse, period_s
        self._ended = threading.Event()
        self._error = ""

    def run(self) -> None:
        try:
            self.beat(self._pulse())
        except Exception as error:  # noqa: BLE001 - NVML's own errors are as many as its versions; each costs the samples only
            self._error = f"{type(error).__name__}: {error}"

    def beat(self, pulse: FastReader) -> None:
        """Reads until the end."""
        while not self._ended.wait(self._period_s):
            self.take(time.monotonic(), pulse.read())

    def take(self, at: float, beats: Mapping[int, GpuSample | Absent]) -> None:
        """One sample."""
        raise NotImplementedError

    def stop(self) -> None:
        """No more samples."""
        self._ended.set()


class Telemetry(Beating):
    """Keeps what it reads, for the times that the ranks ask for, and how it went all along, for who looks at it later."""

    def __init__(self, devices: Iterable[int]) -> None:
        devices = list(devices)
        super().__init__(lambda: FastReader(devices), PERIOD_S)
        self._devices = devices
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._recorder = Recorder()
        self._lost: dict[int, str] = {}
        self._heard: set[int] = set()
        self._began = time.monotonic()
        self.start()

    def take(self, at: float, beats: Mapping[int, GpuSample | Absent]) -> None:
        self._samples.append((at, beats))
        self._recorder.beats(at - self._began, beats)
        self._heard |= beats.keys()
        for index, beat in beats.items():
            if isinstance(beat, Absent):
                self._recorder.add(at - self._began, UNREAD, f"gpu={index}", "1", 1.0)
                self._lost.setdefault(index, beat.reason or beat.status)

    def trace(self, begun: Mapping[str, float]) -> Trace | None:
        """What every GPU showed from the beginning on, in few buckets; None where there was no time to look.

        Args:
            begun: benchmark -> when it began, by the clock of `time.monotonic()`.
        """
        now = time.monotonic()
        began_s = {name: max(0.0, at - self._began) for name, at in begun.items() if at <= now}
        silent = self._error or ("the driver gave no sample" if now - self._began > 1 else "")
        reasons = {**{index: silent for index in self._devices if silent and index not in self._heard}, **self._lost}
        lost = {str(index): reason[:512] for index, reason in sorted(reasons.items())}
        return traced(self._recorder.timeline(), began_s, lost)

    def observations(
        self, windows: Sequence[Mapping[str, Any]], measured: Sequence[Observation], stage: str
    ) -> list[Observation]:
        """For each window that a rank asked for, the catalogue's sampled outputs of its benchmark on that device."""
        samples = list(self._samples)
        return [found for window in windows for found in self._of(window, samples, measured, stage)]

    def _of(
        self, window: Mapping[str, Any], samples: Sequence[Sample], measured: Sequence[Observation], stage: str
    ) -> Iterable[Observation]:
        benchmark, scope, params = window["benchmark"], window["scope"], window["params"]
        index = int(Scope.parse(scope).get("gpu"))
        span = window["end"] - window["begin"]
        read = [(at, beats[index]) for at, beats in samples if window["begin"] <= at <= window["end"]]
        seen = [beat for _, beat in read if not isinstance(beat, Absent)]
        reason = self._error or _too_thin(window, read)
        if reason:
            for output in BENCHMARKS[benchmark].outputs:
                if output.sampled:
                    yield Observation(
                        name=output.name,
                        scope=scope,
                        stage=stage,
                        unit=output.unit,
                        status=ERROR,
                        reason=reason,
                        params=params,
                    )
            return
        power, clock, temperature, reasons, *_ = zip(*seen, strict=True)
        common: dict[str, Any] = {"scope": scope, "stage": stage, "status": MEASURED}
        told = {**params, "samples_per_second": round(len(seen) / span, 1)}
        for name, unit, values in (("power", "W", power), ("clock", "Hz", clock), ("temperature", "Cel", temperature)):
            figures = summarize(values)
            # At its limit power and clock swing, and NVML gives the clock in steps of 1 %: their means; the highest temperature.
            value = figures.max if name == "temperature" else statistics.fmean(values)
            yield Observation(
                name=f"{benchmark}.{name}", unit=unit, value=value, samples=figures, params=told, **common
            )
        for reason, mask in THROTTLE_REASONS.items():
            share = sum(bool(seen & mask) for seen in reasons) / len(reasons)
            yield Observation(
                name=f"{benchmark}.throttled_share", unit="1", value=share, params={**told, "reason": reason}, **common
            )
        for rate in measured:
            if (rate.name, rate.scope, rate.status) == (f"{benchmark}.throughput", scope, MEASURED) and (
                params.items() <= rate.params.items()
            ):
                for name, unit, values in (("efficiency", "FLOP/J", power), ("flop_per_cycle", "FLOP/cycle", clock)):
                    value = float(rate.value or 0) / statistics.fmean(values)
                    yield Observation(name=f"{benchmark}.{name}", unit=unit, value=value, params=told, **common)


def _too_thin(window: Mapping[str, Any], read: Sequence[tuple[float, GpuSample | Absent]]) -> str:
    """Why the samples do not tell what went on in the window, or an empty string."""
    lost = [beat.reason for _, beat in read if isinstance(beat, Absent)]
    if lost:
        return f"{len(lost)} of {len(read)} samples could not be had: {lost[-1]}"
    times = [window["begin"], *(at for at, _ in read), window["end"]]
    gap = max(later - earlier for earlier, later in itertools.pairwise(times))
    span = window["end"] - window["begin"]
    if len(read) < LEAST_HZ * span or gap > LONGEST_GAP_S:
        return f"{len(read)} samples in {span:.1f} s, {gap:.1f} s without one: fewer than {LEAST_HZ:g} a second"
    return ""
