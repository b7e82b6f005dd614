"""How long work takes on a device, by a clock that fits it, over and over until the median is sure."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from agent.gang.heartbeat import Heart
from agent.sampling.statistics import Series, interval

SPAN_S = 1e-3
"""Long beside the resolution of a GPU's events, half a microsecond."""
MOST_CALLS = 50
"""Calls in one timed span."""
BLOCK = 6
"""Spans between two looks at how sure the median is; fewer give no 95 % interval."""
HEAD_START_S = 50e-6
"""For each call, where the host is to be ahead of the GPU: launching one takes it 8 to 27 µs (measured, 4 H200)."""
SHORT_S = 1e-4
"""Calls under this may take the host longer to launch than the GPU to run."""
CYCLES_PER_S = 2e9
"""At least what the SM clock of any GPU counts: the head start may be longer, not shorter."""


@dataclass(kw_only=True)
class Timing:
    """Times what one rank does, alone or together with all others."""

    device: torch.device
    timeout_s: float = 60.0
    """Patience with another rank."""
    heart: Heart = field(default_factory=Heart)
    """Tells the supervisor how far this rank is."""

    def sample(
        self,
        work: Callable[[], object] | Sequence[Callable[[], object]],
        *,
        precision: float,
        seconds: float,
        warm_up: int = 3,
        span_s: float = SPAN_S,
        rest_s: float = 0.0,
        together: bool = False,
    ) -> Series:
        """Times `work` until half the 95 % interval of the median is under `precision` of it, or `seconds` are spent.

        On a GPU calls shorter than the host takes to launch them are timed from behind a kernel that only waits, so that
        all of them stand in the queue before the first begins (nvbandwidth does likewise).

        Args:
            work: what is timed; of several, each span takes the next.
            span_s: time between two looks at the clock; what is shorter is timed several calls at once.
            rest_s: for which the device does nothing before each block of times; not of the `seconds`.
            together: all ranks do it at once; each time is the slowest rank's, and all ranks stop after as many.
        """
        works = [work] if callable(work) else list(work)

        def spans(
            repetitions: int, calls: int, *, first: int = 0, warm_up: int = 0, head_start_s: float = 0.0
        ) -> list[float]:
            turn = [works[(first + place) % len(works)] for place in range(repetitions)]
            with self.heart.together() if together else contextlib.nullcontext():
                times = self._time(turn, calls, warm_up, head_start_s)
            return self.slowest(times) if together else times

        for other in works[1:]:
            other()
        one = spans(1, 1, warm_up=warm_up)[0]
        if one < 3 * SPAN_S:  # the first of a short one has waited for another rank's host
            one = min(spans(BLOCK, 1))
        calls = max(1, min(MOST_CALLS, int(span_s / one)))
        head_start_s = BLOCK * calls * HEAD_START_S if one < SHORT_S and self.device.type == "cuda" else 0.0
        found: list[float] = []
        spent = 0.0
        while True:
            time.sleep(rest_s)
            block = spans(BLOCK, calls, first=len(found), head_start_s=head_start_s)
            found += block
            spent += sum(block) * calls + head_start_s
            sure = interval(found)
            if sure is not None and sure <= precision and len(found) >= len(works):
                return Series(seconds=found, stopped="precision")
            if spent >= seconds and len(found) >= len(works):
                return Series(seconds=found, stopped="time")

    def synchronize(self) -> None:
        """Waits until the current stream of the device has done what it was told.

        Raises:
            TimeoutError: it has not in `timeout_s`: a kernel hangs, most of the time in waiting for another rank.
        """
        self.heart.step()
        if self.device.type != "cuda":
            return
        done = cuda_event()
        done.record()
        ends = time.monotonic() + self.timeout_s
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > ends:
                raise TimeoutError(
                    f"the device did not end within {self.timeout_s:g} s: it, or a rank it waits for, hangs"
                )
            time.sleep(0.0001)

    def time(self, work: Callable[[], object], repetitions: int, iterations: int = 1, warm_up: int = 2) -> list[float]:
        """Seconds for one call of `work`, `repetitions` times over, each the mean of `iterations` calls.

        On a GPU the device's own events are read, so that the cost of launching is in the figure only where the host is
        slower than the device.
        """
        return self._time([work] * repetitions, iterations, warm_up)

    def _time(
        self, turn: Sequence[Callable[[], object]], iterations: int, warm_up: int, head_start_s: float = 0.0
    ) -> list[float]:
        for _ in range(warm_up):
            turn[0]()
        self.synchronize()
        if self.device.type == "cuda":
            return self._events(turn, iterations, head_start_s)
        seconds = []
        for work in turn:
            began = time.perf_counter()
            for _ in range(iterations):
                work()
            seconds.append((time.perf_counter() - began) / iterations)
        return seconds

    def _events(self, turn: Sequence[Callable[[], object]], iterations: int, head_start_s: float) -> list[float]:
        marks = [cuda_event() for _ in range(len(turn) + 1)]
        if head_start_s:
            torch.cuda._sleep(int(head_start_s * CYCLES_PER_S))  # type: ignore[no-untyped-call]
            turn[0]()  # in which ranks that do it together meet
        marks[0].record()
        for work, mark in zip(turn, marks[1:], strict=True):
            for _ in range(iterations):
                work()
            mark.record()
        self.synchronize()
        return [elapsed(earlier, later) / iterations for earlier, later in itertools.pairwise(marks)]

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Of each repetition the time of the slowest rank."""
        times = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        with self.heart.together():
            dist.all_reduce(times, dist.ReduceOp.MAX)
            return [float(value) for value in times]


def cuda_event() -> torch.cuda.Event:
    """An event of the device's own clock."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def elapsed(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    """Seconds between two events that have happened."""
    return float(first.elapsed_time(last)) / 1000
