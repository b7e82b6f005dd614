"""Timing of work on a device: with CUDA events or the CPU's clock, repeated until the median is precise enough."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from agent.gang.heartbeat import RankHeartbeat
from agent.sampling.statistics import SampleSeries, interval

Work = Callable[[], object]

SPAN_S = 1e-3
"""Default length in seconds of a timed span: 2000 times the resolution of CUDA events (0.5 µs). A span is one call, or several
calls in sequence."""
MAX_CALLS = 50
"""Maximum number of calls in one timed span."""
BLOCK = 6
"""Number of spans between two checks of the median's precision. Fewer than six values give no 95 % confidence interval."""
HEAD_START_S = 50e-6
"""Seconds of head start that the host gets over the GPU for each call. The host needs 8 to 27 µs to launch a call (measured, 4
H200)."""
SHORT_S = 1e-4
"""If the GPU runs a call in less than this many seconds, the host may need longer to launch the call than the GPU to run it."""
CYCLES_PER_S = 2e9
"""GPU cycles in a second of head start, for an SM clock of 2 GHz. At a slower clock the head start is longer."""


@dataclass(kw_only=True)
class Timing:
    """Measures how long work takes on one rank, alone or at the same time on all ranks."""

    device: torch.device
    timeout_s: float = 60.0
    """Seconds to wait for another rank."""
    heartbeat: RankHeartbeat = field(default_factory=RankHeartbeat)
    """Reports this rank's progress to the supervisor."""

    def sample(
        self,
        work: Work | Sequence[Work],
        *,
        precision: float,
        seconds: float,
        warm_up: int = 3,
        span_s: float = SPAN_S,
        rest_s: float = 0.0,
        together: bool = False,
    ) -> SampleSeries:
        """Time `work` until the median is precise or `seconds` are spent.

        The median is precise if half its 95 % confidence interval is at most `precision` times the median.

        A GPU may run short calls faster than the host launches them. So short calls are queued behind a kernel that only waits:
        all calls of a block of spans are in the queue before the first of them starts. (nvbandwidth does the same.)

        Args:
            work: one callable, or several that the spans use in turn.
            precision: largest accepted half of the interval, as a share of the median.
            seconds: total time of the spans after which the timing stops.
            warm_up: number of untimed calls of the first callable before the first span.
            span_s: length of a timed span in seconds; shorter work is called several times in a span.
            rest_s: idle seconds before each block of spans; does not count towards `seconds`.
            together: all ranks run the work at the same time. Each time is then that of the slowest rank, and all ranks stop
                after the same number of spans.
        """
        works = [work] if callable(work) else list(work)
        for other in works[1:]:
            other()
        calls, head_start_s = self._calls_per_span(works, warm_up, span_s, together)
        times: list[float] = []
        spent = 0.0
        while True:
            time.sleep(rest_s)
            block = self._spans(_next_block(works, len(times)), calls, together, head_start_s=head_start_s)
            times += block
            spent += sum(block) * calls + head_start_s
            if len(times) < len(works):
                continue
            half_interval = interval(times)
            if half_interval is not None and half_interval <= precision:
                return SampleSeries(seconds=times, stopped="precision")
            if spent >= seconds:
                return SampleSeries(seconds=times, stopped="time")

    def _calls_per_span(self, works: Sequence[Work], warm_up: int, span_s: float, together: bool) -> tuple[int, float]:
        """Return how many calls fill a span, and the host's head start over the GPU in seconds."""
        first = self._spans(works[:1], 1, together, warm_up=warm_up)[0]
        if first < 3 * SPAN_S:  # a short span may be mostly a wait for a late rank; now the ranks are aligned
            first = min(self._spans(_next_block(works, 0), 1, together))
        calls = max(1, min(MAX_CALLS, int(span_s / first)))
        needs_head_start = first < SHORT_S and self.device.type == "cuda"
        return calls, BLOCK * calls * HEAD_START_S if needs_head_start else 0.0

    def _spans(
        self, works: Sequence[Work], calls: int, together: bool, *, warm_up: int = 0, head_start_s: float = 0.0
    ) -> list[float]:
        """Return the mean seconds of one call in each span; with `together`, those of the slowest rank."""
        with self.heartbeat.in_collective() if together else contextlib.nullcontext():
            times = self._time(works, calls, warm_up, head_start_s)
        return self.max_over_ranks(times) if together else times

    def synchronize(self) -> None:
        """Wait until the device has finished the work of its current stream.

        Raises:
            TimeoutError: the work did not finish within `timeout_s`. Usually a kernel hangs because it waits for another rank.
        """
        self.heartbeat.record_progress()
        if self.device.type != "cuda":
            return
        done = cuda_event()
        done.record()
        self.wait_for(done)

    def synchronize_devices(self, devices: Iterable[torch.device]) -> None:
        """Wait until each of these GPUs has finished the work of its current stream.

        `torch.cuda.synchronize` would wait without end for a device that hangs.

        Raises:
            TimeoutError: a device did not finish within `timeout_s`.
        """
        for device in (device for device in devices if device.type == "cuda"):
            with torch.cuda.device(device):
                done = cuda_event()
                done.record()
            self.wait_for(done)

    def wait_for(self, event: torch.cuda.Event, pause_s: float = 0.0001) -> None:
        """Wait until the device has reached an event. Check this every `pause_s` seconds (0: as often as possible).

        `Event.synchronize` would wait without end for a device that hangs.

        Raises:
            TimeoutError: the device did not reach the event within `timeout_s`.
        """
        deadline = time.monotonic() + self.timeout_s
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the device did not finish within {self.timeout_s:g} s: the device, or a rank it waits for, hangs"
                )
            time.sleep(pause_s)

    def time(self, work: Work, repetitions: int, iterations: int = 1, warm_up: int = 2) -> list[float]:
        """Measure `repetitions` times how many seconds one call of `work` takes; each result is the mean of `iterations` calls.

        On a GPU the times come from CUDA events. They include the host's launches only if launches take longer than kernels.
        """
        return self._time([work] * repetitions, iterations, warm_up)

    def _time(self, works: Sequence[Work], iterations: int, warm_up: int, head_start_s: float = 0.0) -> list[float]:
        for _ in range(warm_up):
            works[0]()
        self.synchronize()
        if self.device.type == "cuda":
            return self._time_with_events(works, iterations, head_start_s)
        seconds = []
        for work in works:
            began = time.perf_counter()
            for _ in range(iterations):
                work()
            seconds.append((time.perf_counter() - began) / iterations)
        return seconds

    def _time_with_events(self, works: Sequence[Work], iterations: int, head_start_s: float) -> list[float]:
        events = [cuda_event() for _ in range(len(works) + 1)]
        if head_start_s:
            torch.cuda._sleep(int(head_start_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
            works[0]()  # an untimed call, which aligns the ranks if they run the work together
        events[0].record()
        for work, event in zip(works, events[1:], strict=True):
            for _ in range(iterations):
                work()
            event.record()
        self.synchronize()
        return [elapsed_s(earlier, later) / iterations for earlier, later in itertools.pairwise(events)]

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return each value's maximum over all ranks; for times, that is the time of the slowest rank."""
        maxima = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self.heartbeat.in_collective():
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
            return [float(value) for value in maxima]

    def replay_times(self, graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
        """Return the seconds of each replay of a graph, except a first one, which includes the upload of the graph to the GPU."""
        seconds = []
        for _ in range(1 + replays):
            first, last = cuda_event(), cuda_event()
            first.record()
            graph.replay()
            last.record()
            self.wait_for(last)
            seconds.append(elapsed_s(first, last))
        return seconds[1:]


def _next_block(works: Sequence[Work], start: int) -> list[Work]:
    """Return the callable of each span in one block.

    The spans of all blocks are numbered in sequence, from 0. Span i calls `works[i % len(works)]`.

    Args:
        start: number of the first span in the block.
    """
    return [works[(start + number) % len(works)] for number in range(BLOCK)]


def cuda_event() -> torch.cuda.Event:
    """Return an event that records the time on the device's clock."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def elapsed_s(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    """Return the seconds between two events that have completed."""
    return float(first.elapsed_time(last)) / 1000
