"""Sample each GPU many times per second, because a scrape every 15 s would miss short dips of power or SM clock.

By default power, SM clock and throttling are read ten times per second. Temperature and memory clock are read only in every fifth
sample, twice per second.

The results do not depend on how often a client scrapes: they are minimum, mean and maximum over the last seconds (the window),
and histograms and counters since sampling began.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import Histogram, Metric

from agent.exporter.defaults import SAMPLE_HZ, WINDOW_S
from agent.exporter.metric_names import SAMPLED
from agent.sampling.sample_log import GpuSamples
from agent.sampling.telemetry import MAX_GAP_S, NvmlPoller
from collectors.base import Absent
from collectors.nvml import THROTTLE_REASONS, FastReader, GpuLimits, GpuSample, gpu_indices

BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Upper bounds of the buckets of both histograms: power divided by its limit, and SM clock divided by its maximum."""
SLOW_INTERVAL = 5
"""Temperature and memory clock are read in every fifth sample."""
RETRY_S = 15.0
"""Time after which a failed GPU is sampled again, limits are read again, and new GPUs are looked for."""
MAX_FAILURES = 50
"""Number of failed samples in a row after which a GPU is not sampled for RETRY_S."""
CHECK_S = 1.0
"""Interval at which the watchdog thread checks the sampling thread."""
STUCK_S = 2.0
"""If the sampling thread has not completed a round over its GPUs for this long, the NVML call in progress counts as hanging."""
QUANTITIES: tuple[tuple[str, str, Callable[[GpuSample], float]], ...] = (
    ("gpu_power", "watts", lambda sample: sample.power),
    ("gpu_clock_sm", "hertz", lambda sample: sample.clock),
    ("gpu_clock_memory", "hertz", lambda sample: sample.memory_clock),
    ("gpu_temperature", "celsius", lambda sample: sample.temperature),
)


class GpuHistory:
    """Aggregates the samples of one GPU."""

    def __init__(self, index: int, window_s: float) -> None:
        self.index = index
        self.failed_in_a_row = 0
        self.limits_read_at = float("-inf")
        self._window_s = window_s
        self._lock = threading.Lock()
        self._limits: GpuLimits | None = None
        self._failures = self._samples = 0
        self._sampled_unix_s = self._sampled_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self._window: deque[tuple[float, GpuSample]] = deque()
        self._power_of_limit, self._clock_of_max = (
            Histogram(name, name, buckets=BUCKETS, registry=None) for name in ("power", "clock")
        )
        self._throttled_s = dict.fromkeys(THROTTLE_REASONS, 0.0)

    def set_limits(self, at: float, limits: GpuLimits | Absent) -> None:
        """Set the GPU's UUID and limits, which were read at the time `at`. If they are absent, keep the earlier ones.

        If another GPU now has this index, clear window, histograms and throttled times.
        """
        self.limits_read_at = at
        if isinstance(limits, Absent):
            return
        with self._lock:
            if self._limits and self._limits.uuid != limits.uuid:
                self._reset()
            self._limits = limits

    def add(self, at: float, sample: GpuSample | Absent) -> None:
        """Add a sample that was taken at the time `at` (`time.monotonic()`). If it is absent, count a failed sample."""
        with self._lock:
            if isinstance(sample, Absent):
                self._failures += 1
                self.failed_in_a_row += 1
                return
            self.failed_in_a_row = 0
            self._samples += 1
            elapsed = min(at - self._sampled_at, MAX_GAP_S) if self._sampled_at else 0.0
            self._sampled_unix_s, self._sampled_at = time.time(), at
            self._window.append((at, sample))
            while self._window[0][0] < at - self._window_s:
                self._window.popleft()
            if self._limits and self._limits.power_limit:
                self._power_of_limit.observe(sample.power / self._limits.power_limit)
            if self._limits and self._limits.clock_max:
                self._clock_of_max.observe(sample.clock / self._limits.clock_max)
            for reason, mask in THROTTLE_REASONS.items() if sample.reasons else ():
                if sample.reasons & mask:
                    self._throttled_s[reason] += elapsed

    def export(self, add: Callable[..., None]) -> None:
        """Call `add` for every series of this GPU."""
        with self._lock:
            labels = {"gpu": str(self.index)} | ({"uuid": self._limits.uuid} if self._limits else {})
            begin = time.monotonic() - self._window_s
            window = [sample for at, sample in self._window if at >= begin]
            add("rackproof_gpu_samples_total", self._samples, **labels)
            add("rackproof_gpu_sample_failures_total", self._failures, **labels)
            add("rackproof_gpu_window_samples", len(window), **labels)
            if not self._samples:
                return
            add("rackproof_gpu_sampled_timestamp_seconds", self._sampled_unix_s, **labels)
            for reason, seconds in self._throttled_s.items():
                add("rackproof_gpu_throttle_sampled_seconds_total", seconds, **labels, reason=reason)
            for name, histogram in (("power_of_limit", self._power_of_limit), ("clock_sm_of_max", self._clock_of_max)):
                for sample in next(iter(histogram.collect())).samples:
                    suffix = sample.name[sample.name.rindex("_") :]
                    if suffix != "_created":
                        add(f"rackproof_gpu_{name}_ratio", sample.value, suffix, **labels, **sample.labels)
        for quantity, unit, value_of in QUANTITIES if window else ():
            values = [value_of(sample) for sample in window]
            for kind, value in (("min", min(values)), ("mean", sum(values) / len(values)), ("max", max(values))):
                add(f"rackproof_{quantity}_window_{kind}_{unit}", value, **labels)


class SamplingLoop(NvmlPoller):
    """Thread that samples all GPUs in turn. With eight GPUs, a thread for each GPU would use three times as much CPU time."""

    def __init__(self, gpus: Mapping[int, GpuHistory], hz: float) -> None:
        super().__init__(lambda: FastReader(gpus, SLOW_INTERVAL), 1 / hz)
        self.gpus = dict(gpus)
        self.cpu_s = 0.0
        self._last_round = time.monotonic()
        self._reader: FastReader | None = None

    @property
    def stuck_gpu(self) -> int | None:
        """NVML index of the GPU on which a call hangs (STUCK_S); None if no call hangs."""
        if self._reader and self.is_alive() and time.monotonic() - self._last_round > STUCK_S:
            return self._reader.current
        return None

    def poll(self, reader: FastReader) -> None:
        """Read all GPUs at even intervals until the loop is stopped."""
        self._reader, due = reader, time.monotonic()
        try:
            while True:
                due = max(due + self._period_s, time.monotonic())
                if self._stopped.wait(due - time.monotonic()):
                    return
                for gpu in self.gpus.values():
                    if due - gpu.limits_read_at > RETRY_S:
                        gpu.set_limits(due, reader.limits(gpu.index))
                self.handle(time.monotonic(), reader.read())
        finally:
            reader.close()

    def handle(self, at: float, samples: GpuSamples) -> None:
        for index, sample in samples.items():
            self.gpus[index].add(at, sample)
        self._last_round, self.cpu_s = time.monotonic(), time.thread_time()


class GpuSampler:
    """Samples every GPU of the host, or those with the given NVML indices. Sampling starts with the first scrape.

    A watchdog thread checks the sampling thread. If a call hangs, the watchdog abandons that thread and starts a new one for the
    other GPUs.
    """

    name = "sampler"

    def __init__(self, devices: Iterable[int] | None = None, hz: float = SAMPLE_HZ, window_s: float = WINDOW_S) -> None:
        self._chosen = None if devices is None else frozenset(devices)
        self._hz, self._window_s = hz, window_s
        self._gpus: dict[int, GpuHistory] = {}
        self._loop: SamplingLoop | None = None
        self._replaced_loops: list[SamplingLoop] = []
        """Loops that were replaced and have not ended yet. A call in one of them may hang."""
        self._failed_at: dict[int, float] = {}
        """GPU index -> when the watchdog last counted the GPU as failed: MAX_FAILURES samples in a row had failed, or the
        sampling thread had ended."""
        self._ended_cpu_s = 0.0
        self._indices: list[int] | Absent = []
        self._searched_at = float("-inf")
        self._checked_at = time.monotonic()
        self._ended = threading.Event()
        self._watchdog: threading.Thread | None = None

    def collect(self) -> Sequence[Metric]:
        """Return every family that has a series. The first call starts sampling.

        Raises:
            OSError: NVML reports an error or does not answer.
        """
        if self._watchdog is None:
            self._watchdog = threading.Thread(target=self._watch, daemon=True)
            self._checked_at = time.monotonic()
            self._watchdog.start()
        if isinstance(self._indices, Absent) and self._indices.status == "error":
            raise OSError(self._indices.reason)
        if time.monotonic() - self._checked_at > CHECK_S + STUCK_S:
            raise OSError("NVML does not answer")
        metrics = {spec.name: Metric(spec.name.removesuffix("_total"), spec.help, spec.kind) for spec in SAMPLED}

        def add(name: str, value: float, suffix: str = "", **labels: str) -> None:
            metrics[name].add_sample(name + suffix, labels, float(value))

        for gpu in list(self._gpus.values()):
            gpu.export(add)
        if self._gpus:
            add("rackproof_sampler_window_seconds", self._window_s)
            cpu_s = self._ended_cpu_s + sum(loop.cpu_s for loop in self._loops())
            add("rackproof_sampler_cpu_seconds_total", cpu_s)
        return [metric for metric in metrics.values() if metric.samples]

    def stop(self) -> None:
        """Stop sampling."""
        self._ended.set()

    def _loops(self) -> list[SamplingLoop]:
        return [*self._replaced_loops, *([self._loop] if self._loop else [])]

    def _watch(self) -> None:
        while not self._ended.wait(0.0 if not self._gpus and self._searched_at < 0 else CHECK_S):
            self._find_new_gpus()
            self._check_loop()
            self._checked_at = time.monotonic()
        if self._loop:
            self._loop.stop()

    def _find_new_gpus(self) -> None:
        """Add the GPUs that NVML did not list before, because the driver may be loaded after the exporter starts."""
        if time.monotonic() - self._searched_at < RETRY_S:
            return
        self._searched_at, self._indices = time.monotonic(), gpu_indices()
        for index in [] if isinstance(self._indices, Absent) else self._indices:
            if index not in self._gpus and (self._chosen is None or index in self._chosen):
                self._gpus[index] = GpuHistory(index, self._window_s)

    def _check_loop(self) -> None:
        """Replace the sampling thread if it has ended or the GPUs that can be sampled have changed."""
        wanted, loop = self._answering_gpus(), self._loop
        if loop and loop.is_alive() and loop.gpus.keys() == wanted.keys():
            return
        if loop:
            loop.stop()
            self._replaced_loops.append(loop)
        self._loop = SamplingLoop(wanted, self._hz) if wanted else None
        if self._loop:
            self._loop.start()
        for ended in [each for each in self._replaced_loops if not each.is_alive()]:
            self._ended_cpu_s += ended.cpu_s
            self._replaced_loops.remove(ended)

    def _answering_gpus(self) -> dict[int, GpuHistory]:
        """Return NVML index -> GPU, for the GPUs that can be sampled.

        Leave out a GPU if a call that reads it hangs, or if its time in `_failed_at` is less than RETRY_S ago.
        """
        now = time.monotonic()
        for index, gpu in self._gpus.items():
            if gpu.failed_in_a_row >= MAX_FAILURES:
                self._failed_at[index], gpu.failed_in_a_row = now, 0
        if self._loop and not self._loop.is_alive():  # NVML could not be opened, or another exception ended the thread
            self._failed_at |= dict.fromkeys(self._loop.gpus, now)
        failed = {index for index, at in self._failed_at.items() if now - at < RETRY_S}
        stuck = {loop.stuck_gpu for loop in self._loops()}
        return {index: gpu for index, gpu in self._gpus.items() if index not in failed | stuck}
