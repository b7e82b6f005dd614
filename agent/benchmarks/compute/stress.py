"""Matrix products on all devices of the host at once, until power and temperature have settled and for a while then.

A short run of healthy GPUs spreads by 5 %, as the silicon differs; at the power limit they differ by 0.4 % (measured, 4 H200):
only so a slow part stands out. What the GPU drew and why its clocks were held down is read beside it by the supervisor.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from agent.benchmarks.compute.gemm import product, unsupported
from agent.benchmarks.runtime.context import Context, failed
from agent.benchmarks.runtime.timing import cuda_event, elapsed
from agent.sampling.statistics import Series
from schemas.records import UNSUPPORTED

BLOCK_S = 0.5
"""Products between two events: at the power limit the clock swings several times a second, and a block is to hold them all."""


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `stress.throughput` in FLOP/s and `stress.wrong_products` of each dtype, over the time after settling.

    Each block's last product is compared with the first to the bit: the same factors must give the same product.
    """
    for dtype in settings["dtypes"]:
        context.phase(f"stress {dtype}")
        common: dict[str, Any] = {"scope": context.device_scope, "dtype": dtype, "size": int(settings["size"])}
        reason, status = unsupported(dtype, context.device), UNSUPPORTED
        if not reason:
            try:
                _stress(context, settings, dtype, common)
                continue
            except (RuntimeError, ValueError) as error:
                status, reason = failed(error)
        for name, unit in (("throughput", "FLOP/s"), ("wrong_products", "1")):
            context.absent(f"stress.{name}", unit=unit, status=status, reason=reason, **common)


def _stress(context: Context, settings: dict[str, Any], dtype: str, common: dict[str, Any]) -> None:
    size = int(settings["size"])
    multiply, check = product(dtype, size, context.device, seed=1)
    right = multiply().clone()
    check()
    block_s = min(BLOCK_S, float(settings["seconds"]) / 10)
    count = max(1, int(block_s / min(context.time(multiply, 3))))
    wrong = torch.zeros((), dtype=torch.int64, device=context.device)
    context.meet(dtype)  # all at once: they share the power supply and the air
    devices = len(context.present())  # now: at the end some have left already
    settled = time.monotonic() + float(settings["settle_seconds"])
    ends = settled + float(settings["seconds"])
    begin = 0.0
    seconds: list[float] = []
    marks = [_mark(context)]
    while time.monotonic() < ends or not seconds:  # on a busy host a block may take longer than the whole time
        for _ in range(count):
            last = multiply()
        wrong += (last != right).any()
        marks.append(_mark(context))
        if len(marks) > 2:  # one block runs, one waits
            took = _between(marks[0], marks[1])
            marks.pop(0)
            if time.monotonic() > settled:
                begin = begin or time.monotonic()
                seconds.append(took / count)
    context.window(begin, time.monotonic(), dtype=dtype)
    context.synchronize()
    check()
    context.rate("stress.throughput", 2 * size**3, Series(seconds=seconds), unit="FLOP/s", devices=devices, **common)
    context.measured("stress.wrong_products", int(wrong), unit="1", **common)


Mark = torch.cuda.Event | float


def _mark(context: Context) -> Mark:
    if context.device.type == "cpu":
        return time.perf_counter()
    event = cuda_event()
    event.record()
    return event


def _between(first: Mark, last: Mark) -> float:
    if isinstance(first, float) or isinstance(last, float):
        return float(last) - float(first)  # type: ignore[arg-type]
    last.synchronize()
    return elapsed(first, last)
