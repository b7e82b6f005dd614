"""Matrix products on all devices of the host at once, until power and temperature are steady, and for some time after.

In a short run healthy GPUs differ by 5 %, because chips vary. At the power limit they differ by only 0.4 % (measured, 4 H200),
so a slow GPU stands out only there. The supervisor samples power and throttle reasons at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from agent.benchmarks.compute.gemm import build_product, unsupported_reason
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.timing import cuda_event, elapsed_s
from agent.gang.heartbeat import describe_error
from agent.sampling.statistics import SampleSeries
from schemas.records import ERROR, UNSUPPORTED

BLOCK_S = 0.5
"""Length of a timed block: at the power limit the clock oscillates several times a second, and a block averages that."""

Moment = torch.cuda.Event | float


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `stress.throughput` in FLOP/s after the settling time, and `stress.wrong_products`, for each dtype.

    The last product of each block must be bit-identical to the very first product, because the factors are the same. Otherwise
    the block counts as one wrong product, also during the settling time.
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
        for name, unit in (("throughput", "FLOP/s"), ("wrong_products", "1")):
            context.report_absent(f"stress.{name}", unit=unit, status=status, reason=reason, **common)


def _run_products(context: Context, settings: Mapping[str, Any], dtype: str, common: Mapping[str, Any]) -> None:
    size, duration = settings["size"], settings["seconds"]
    multiply, check = build_product(dtype, size, context.device, seed=1)
    expected = multiply().clone()
    check()
    count = max(1, int(min(BLOCK_S, duration / 10) / min(context.time(multiply, 3))))
    wrong = torch.zeros((), dtype=torch.int64, device=context.device)
    context.host_barrier(dtype)  # all at once: the GPUs share power supply and cooling
    devices = len(context.present_ranks())  # counted now, because other ranks may finish earlier
    settled = time.monotonic() + settings["settle_seconds"]
    deadline = settled + duration
    begin = 0.0
    seconds: list[float] = []
    moments = [_record_moment(context)]
    while time.monotonic() < deadline or not seconds:  # on a busy host a single block may take longer than the duration
        for _ in range(count):
            product = multiply()
        wrong += (product != expected).any()
        moments.append(_record_moment(context))
        if len(moments) > 2:  # the GPU already has the next block in its queue while the host waits for this one
            block_seconds = _seconds_between(moments[0], moments[1])
            moments.pop(0)
            if time.monotonic() > settled:
                begin = begin or time.monotonic()
                seconds.append(block_seconds / count)
    context.request_telemetry(begin, time.monotonic(), dtype=dtype)
    context.synchronize()
    check()
    series = SampleSeries(seconds=seconds)
    context.report_rate("stress.throughput", 2 * size**3, series, unit="FLOP/s", devices=devices, **common)
    context.report("stress.wrong_products", int(wrong), unit="1", **common)


def _record_moment(context: Context) -> Moment:
    if context.device.type == "cpu":
        return time.perf_counter()
    event = cuda_event()
    event.record()
    return event


def _seconds_between(first: Moment, last: Moment) -> float:
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    return elapsed_s(first, last)
