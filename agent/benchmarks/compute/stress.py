"""Matrix products on all devices of the host at once: untimed while power and temperature settle, and then timed.

The bf16 rates of healthy GPUs differ by up to 3 % in short runs, but only by up to 1.4 % at the power limit (4 H200,
docs/measurements/h200x4-*). So a slightly slow GPU stands out only in a long run at the power limit. During the timed products,
the supervisor (the agent's process that launches the ranks) samples power and throttle reasons.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from agent.benchmarks.compute.gemm import build_product, unsupported_reason
from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.timing import cuda_event, elapsed_s
from agent.gang.heartbeat import describe_error
from agent.sampling.statistics import SampleSeries
from schemas.records import ERROR, UNSUPPORTED

BLOCK_S = 0.5
"""Seconds of a timed block, unless a tenth of the duration is shorter. At the power limit the GPU's clock oscillates several
times a second. A block is long enough to average these oscillations."""

Moment = torch.cuda.Event | float


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `stress.throughput` in FLOP/s after the settling time, and `stress.wrong_products`, for each dtype.

    The last product of each block must be bit-identical to the very first product, because the factors are the same. Otherwise
    the block counts as one wrong product, also during the settling time. The very first and the very last product are also
    checked against the factors. Each of these two products adds one to the count if it is wrong.
    """
    for dtype in settings["dtypes"]:
        context.set_phase(f"stress {dtype}")
        common: dict[str, Any] = {"scope": context.device_scope, "dtype": dtype, "size": settings["size"]}
        reason, status = unsupported_reason(dtype, context.device), UNSUPPORTED
        if not reason:
            try:
                _run_products(context, settings, dtype, common)
                continue
            except (RuntimeError, ValueError) as error:
                status, reason = ERROR, describe_error(error)
        for name, unit in (("stress.throughput", "FLOP/s"), ("stress.wrong_products", "1")):
            if not context.has_reported(name, context.device_scope, {"dtype": dtype}):
                context.report_absent(name, unit=unit, status=status, reason=reason, **common)


def _run_products(context: Context, settings: Mapping[str, Any], dtype: str, common: Mapping[str, Any]) -> None:
    wrong = WrongProducts(context)
    try:
        series, devices = _time_products(context, settings, dtype, wrong)
    except BaseException:  # wrong products count even if the GPU fails later
        if wrong.known:
            context.report("stress.wrong_products", wrong.known, unit="1", **common)
        raise
    operations = 2 * settings["size"] ** 3
    context.report_rate("stress.throughput", operations, series, unit="FLOP/s", devices=devices, **common)
    context.report("stress.wrong_products", wrong.known, unit="1", **common)


class WrongProducts:
    """Counts wrong products. Each block adds one flag, which the host reads while later blocks are in the GPU's queue."""

    def __init__(self, context: Context) -> None:
        self.known = 0
        self._pending: deque[torch.Tensor] = deque()
        # Flags are read on a separate stream, so that reading a flag does not wait for the later blocks.
        self._stream = cuda_stream(context.device) if context.device.type == "cuda" else None

    def add(self, is_wrong: torch.Tensor) -> None:
        """Add a flag that is on the device, and that the GPU may not have computed yet."""
        self._pending.append(is_wrong)

    def read(self) -> None:
        """Count the oldest flag. The GPU must have computed it."""
        with torch.cuda.stream(self._stream):  # does nothing on a CPU
            self.known += int(self._pending.popleft())

    def read_all(self) -> None:
        """Count all flags. The GPU must have computed them."""
        while self._pending:
            self.read()


def _time_products(
    context: Context, settings: Mapping[str, Any], dtype: str, wrong: WrongProducts
) -> tuple[SampleSeries, int]:
    """Return the seconds per product of each block after the settling time, and how many devices of the host were under load."""
    size, duration = settings["size"], settings["seconds"]
    multiply, count_wrong_rows = build_product(dtype, size, context.device, seed=1)
    expected = multiply().clone()
    wrong.known += int(count_wrong_rows() > 0)
    count = max(1, int(min(BLOCK_S, duration / 10) / min(context.time(multiply, 3))))
    context.host_barrier(dtype)  # all at once: the GPUs share power supply and cooling
    devices = len(context.present_ranks())  # counted at the start: at the end, some may have left
    settled = time.monotonic() + settings["settle_seconds"]
    deadline = settled + duration
    begin = 0.0
    seconds: list[float] = []
    moments = [_record_moment(context)]
    while time.monotonic() < deadline or not seconds:  # on a busy host a single block may take longer than the duration
        for _ in range(count):
            product = multiply()
        wrong.add((product != expected).any())
        moments.append(_record_moment(context))
        # The GPU already has the next block in its queue while the host waits for the previous one.
        if len(moments) > 2:
            block_seconds = _seconds_between(context, moments[0], moments[1])
            wrong.read()
            moments.pop(0)
            if time.monotonic() > settled:
                begin = begin or time.monotonic()
                seconds.append(block_seconds / count)
    context.request_telemetry(begin, time.monotonic(), dtype=dtype)
    context.synchronize()
    wrong.read_all()
    wrong.known += int(count_wrong_rows() > 0)
    return SampleSeries(seconds=seconds), devices


def _record_moment(context: Context) -> Moment:
    if context.device.type == "cpu":
        return time.perf_counter()
    event = cuda_event()
    event.record()
    return event


def _seconds_between(context: Context, first: Moment, last: Moment) -> float:
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    context.wait_for(last)
    return elapsed_s(first, last)
