"""Power, clocks, temperature and what holds the clocks down, ten times a second, so that a scrape every 15 s hides no dip.

What is told is the same for everybody who scrapes, however often: figures of a window that ends now, and histograms and counters
that only grow.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import Metric

from agent.exporter.metric_names import SAMPLED
from agent.sampling.telemetry import LONGEST_GAP_S, Beating
from collectors.base import Absent
from collectors.nvml import THROTTLE_REASONS, FastReader, GpuLimits, GpuSample, gpu_indices

SAMPLE_HZ, MOST_HZ = 10.0, 50.0
WINDOW_S = 30.0
"""Twice the time for which a page is given again, and more: whoever scrapes every 10 or 15 s sees all of the time."""
LONGEST_WINDOW_S = 600.0
BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Of both histograms: shares of the power limit, and of the highest clock."""
SLOW = 5
"""Temperature and memory clock are read at every fifth sample."""
RETRY_S = 15.0
"""Between two attempts at a GPU, or a driver, that does not answer."""
MOST_FAILURES = 50
LOOK_S, STUCK_S = 1.0, 2.0
QUANTITIES: tuple[tuple[str, str, Callable[[GpuSample], float]], ...] = (
    ("gpu_power", "watts", lambda beat: beat.power),
    ("gpu_clock_sm", "hertz", lambda beat: beat.clock),
    ("gpu_clock_memory", "hertz", lambda beat: beat.memory_clock),
    ("gpu_temperature", "celsius", lambda beat: beat.temperature),
)


class Histogram:
    """Samples by size, as Prometheus counts them."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, share: float) -> None:
        """One sample."""
        self._counts[bisect_left(BUCKETS, share)] += 1
        self._sum += share

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Suffix, label and value of each of its series."""
        total = 0
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self._counts, strict=True):
            total += count
            yield "_bucket", {"le": bound}, total
        yield "_count", {}, total
        yield "_sum", {}, self._sum


class Samples:
    """What one GPU has shown."""

    def __init__(self, index: int, window_s: float) -> None:
        self.index = index
        self.failed_in_a_row = 0
        self.asked_at = float("-inf")
        """When it was last asked which GPU it is."""
        self._window_s = window_s
        self._lock = threading.Lock()
        self._bounds: GpuLimits | None = None
        self._failures = self._taken = 0
        self._last = self._last_at = 0.0
        self._forget()

    def _forget(self) -> None:
        self._window: deque[tuple[float, GpuSample]] = deque()
        self._power, self._clock = Histogram(), Histogram()
        self._held = dict.fromkeys(THROTTLE_REASONS, 0.0)

    def know(self, at: float, bounds: GpuLimits | Absent) -> None:
        """Which GPU it is, and what its limit is by now."""
        self.asked_at = at
        if isinstance(bounds, Absent):
            return
        with self._lock:
            if self._bounds and self._bounds.uuid != bounds.uuid:
                self._forget()
            self._bounds = bounds

    def take(self, at: float, beat: GpuSample | Absent) -> None:
        """One sample."""
        with self._lock:
            if isinstance(beat, Absent):
                self._failures += 1
                self.failed_in_a_row += 1
                return
            self.failed_in_a_row = 0
            self._taken += 1
            since = min(at - self._last_at, LONGEST_GAP_S) if self._last_at else 0.0
            self._last, self._last_at = time.time(), at
            self._window.append((at, beat))
            while self._window[0][0] < at - self._window_s:
                self._window.popleft()
            if self._bounds and self._bounds.power_limit:
                self._power.add(beat.power / self._bounds.power_limit)
            if self._bounds and self._bounds.clock_max:
                self._clock.add(beat.clock / self._bounds.clock_max)
            for reason, mask in THROTTLE_REASONS.items() if beat.reasons else ():
                if beat.reasons & mask:
                    self._held[reason] += since

    def tell(self, add: Callable[..., None]) -> None:
        """Adds every series of this GPU."""
        with self._lock:
            labels = {"gpu": str(self.index)} | ({"uuid": self._bounds.uuid} if self._bounds else {})
            begins = time.monotonic() - self._window_s
            window = [beat for at, beat in self._window if at >= begins]
            add("rackproof_gpu_samples_total", self._taken, **labels)
            add("rackproof_gpu_sample_failures_total", self._failures, **labels)
            add("rackproof_gpu_window_samples", len(window), **labels)
            if not self._taken:
                return
            add("rackproof_gpu_sampled_timestamp_seconds", self._last, **labels)
            for reason, seconds in self._held.items():
                add("rackproof_gpu_throttle_sampled_seconds_total", seconds, **labels, reason=reason)
            for name, histogram in (("power_of_limit", self._power), ("clock_sm_of_max", self._clock)):
                for suffix, more, count in histogram.samples():
                    add(f"rackproof_gpu_{name}_ratio", count, suffix, **labels, **more)
        for what, unit, of in QUANTITIES if window else ():
            values = [of(beat) for beat in window]
            for kind, value in (("min", min(values)), ("mean", sum(values) / len(values)), ("max", max(values))):
                add(f"rackproof_{what}_window_{kind}_{unit}", value, **labels)


class Loop(Beating):
    """Samples some GPUs by turns. One thread for all: eight of them, each with a GPU, cost three times as much."""

    def __init__(self, gpus: Mapping[int, Samples], hz: float) -> None:
        super().__init__(lambda: FastReader(gpus, SLOW), 1 / hz)
        self.gpus = dict(gpus)
        self.cpu_s = 0.0
        self.turned = time.monotonic()
        self._asks: FastReader | None = None
        self.start()

    @property
    def hangs_on(self) -> int | None:
        """The GPU whose answer is out for too long."""
        late = self.is_alive() and self._asks is not None and time.monotonic() - self.turned > STUCK_S
        return self._asks.current if late and self._asks else None

    def beat(self, pulse: FastReader) -> None:
        """Reads at even times until the end."""
        self._asks, due = pulse, time.monotonic()
        try:
            while True:
                due = max(due + self._period_s, time.monotonic())
                if self._ended.wait(due - time.monotonic()):
                    return
                for gpu in self.gpus.values():
                    if due - gpu.asked_at > RETRY_S:
                        gpu.know(due, pulse.limits(gpu.index))
                self.take(time.monotonic(), pulse.read())
        finally:
            pulse.close()

    def take(self, at: float, beats: Mapping[int, GpuSample | Absent]) -> None:
        """One round."""
        for index, beat in beats.items():
            self.gpus[index].take(at, beat)
        self.turned, self.cpu_s = time.monotonic(), time.thread_time()


class Sampler:
    """Every GPU of the host, or those of the given NVML indices. Nothing is asked of NVML before it is first collected.

    A second thread looks after the first: where a call hangs, it is left behind, and the other GPUs are sampled by a new one.
    """

    name = "sampler"

    def __init__(self, devices: Iterable[int] | None = None, hz: float = SAMPLE_HZ, window_s: float = WINDOW_S) -> None:
        self._chosen = None if devices is None else frozenset(devices)
        self._hz, self._window_s = hz, window_s
        self._gpus: dict[int, Samples] = {}
        self._loop: Loop | None = None
        self._left: list[Loop] = []
        self._resting: dict[int, float] = {}
        self._spent = 0.0
        self._found: list[int] | Absent = []
        self._searched = float("-inf")
        self._seen = time.monotonic()
        self._ended = threading.Event()
        self._watch: threading.Thread | None = None

    def collect(self) -> Sequence[Metric]:
        """Every family.

        Raises:
            OSError: NVML does not answer.
        """
        if self._watch is None:
            self._watch, self._seen = threading.Thread(target=self._look_after, daemon=True), time.monotonic()
            self._watch.start()
        if isinstance(self._found, Absent) and self._found.status == "error":
            raise OSError(self._found.reason)
        if time.monotonic() - self._seen > LOOK_S + STUCK_S:
            raise OSError("NVML does not answer")
        told = {own.name: Metric(own.name.removesuffix("_total"), own.help, own.kind) for own in SAMPLED}

        def add(name: str, value: float, suffix: str = "", **labels: str) -> None:
            told[name].add_sample(name + suffix, labels, float(value))

        for gpu in list(self._gpus.values()):
            gpu.tell(add)
        if self._gpus:
            add("rackproof_sampler_window_seconds", self._window_s)
            loops = [*self._left, *([self._loop] if self._loop else [])]
            add("rackproof_sampler_cpu_seconds_total", self._spent + sum(loop.cpu_s for loop in loops))
        return [metric for metric in told.values() if metric.samples]

    def stop(self) -> None:
        """No more samples."""
        self._ended.set()

    def _look_after(self) -> None:
        while not self._ended.wait(0.0 if not self._gpus and self._searched < 0 else LOOK_S):
            self._search()
            self._follow()
            self._seen = time.monotonic()
        if self._loop:
            self._loop.stop()

    def _search(self) -> None:
        """GPUs that are new: the driver may be loaded later."""
        if time.monotonic() - self._searched < RETRY_S:
            return
        self._searched, self._found = time.monotonic(), gpu_indices()
        for index in [] if isinstance(self._found, Absent) else self._found:
            if index not in self._gpus and (self._chosen is None or index in self._chosen):
                self._gpus[index] = Samples(index, self._window_s)

    def _follow(self) -> None:
        """Sees to it that whoever can be sampled is, and that whoever cannot is asked again after a while only."""
        now, loop = time.monotonic(), self._loop
        for index, gpu in self._gpus.items():
            if gpu.failed_in_a_row >= MOST_FAILURES:
                self._resting[index], gpu.failed_in_a_row = now, 0
        if loop and not loop.is_alive():  # NVML could not be opened
            self._resting |= dict.fromkeys(loop.gpus, now)
        resting = {index for index, since in self._resting.items() if now - since < RETRY_S}
        stuck = {hung for each in [*self._left, *([loop] if loop else [])] if (hung := each.hangs_on) is not None}
        wanted = {index: gpu for index, gpu in self._gpus.items() if index not in resting | stuck}
        if loop and loop.is_alive() and loop.gpus.keys() == wanted.keys():
            return
        if loop:
            loop.stop()
            self._left.append(loop)
        self._loop = Loop(wanted, self._hz) if wanted else None
        for ended in [each for each in self._left if not each.is_alive()]:
            self._spent += ended.cpu_s
            self._left.remove(ended)
