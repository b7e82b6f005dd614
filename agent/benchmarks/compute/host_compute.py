"""Matrix products in fp64 on all cores of the host at once: rate, wrong elements, and the clock frequency of the processors.

The factors are whole numbers so small that every partial sum is exact in fp64. So the right result of a product does not depend
on the order of the additions. Every element of every product is compared with that result, except in the first product of each
thread, which only warms up.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.host_rank import wait_for_reporting_rank
from agent.benchmarks.runtime.numa import run_on_cpus, usable_nodes
from schemas.records import UNSUPPORTED

LARGEST = 1 << 20
"""The elements of the factors are whole numbers below this. So a sum of up to 4096 products of two elements is below
2^52, and exact in fp64."""
NO_CLOCK = "no cpufreq driver: the firmware or a hypervisor sets the clocks"


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `host_compute.throughput` in FLOP/s and `.wrong_elements`, both summed over all cores, and `.clock` in Hz.

    `.clock` is the median of the processors' clocks, read once, about half-way through the run.
    """
    if not context.is_reporting_rank:
        wait_for_reporting_rank(context)
        return
    cpus = [cpu for node in usable_nodes() for cpu in node.cpus]
    size, seconds = int(settings["size"]), float(settings["seconds"])
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randint(LARGEST, (size, size), generator=generator) for _ in range(2))
    expected = (left @ right).double()
    factors = left.double(), right.double()
    clocks: list[float] = []
    sampler = threading.Timer(seconds / 2, lambda: clocks.extend(read_clocks(cpus)))

    def work(_number: int, barrier: threading.Barrier) -> tuple[float, int]:
        first, second = (factor.clone() for factor in factors)
        result = torch.empty_like(first)
        torch.matmul(first, second, out=result)
        barrier.wait()
        began, products, wrong = time.perf_counter(), 0, 0
        while not products or time.perf_counter() - began < seconds:
            torch.matmul(first, second, out=result)
            wrong += int((result != expected).sum())
            products += 1
        return 2 * size**3 * products / (time.perf_counter() - began), wrong

    context.set_phase("host_compute")
    sampler.start()
    results = run_on_cpus(cpus, work, context.timeout_s)
    sampler.join(context.timeout_s)
    common: dict[str, Any] = {"scope": "host", "size": size, "threads": len(cpus)}
    context.report("host_compute.throughput", sum(rate for rate, _ in results), unit="FLOP/s", **common)
    context.report("host_compute.wrong_elements", sum(wrong for _, wrong in results), unit="1", **common)
    if clocks:
        context.report("host_compute.clock", statistics.median(clocks), unit="Hz", **common)
    else:
        context.report_absent("host_compute.clock", unit="Hz", status=UNSUPPORTED, reason=NO_CLOCK, **common)


def read_clocks(cpus: Sequence[int], root: Path = Path("/")) -> list[float]:
    """Return the current clocks in Hz of those processors whose clock can be read; empty without a cpufreq driver."""
    clocks = []
    for cpu in cpus:
        try:
            text = (root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq").read_text()
            clocks.append(float(text) * 1000)
        except (OSError, ValueError):
            continue
    return clocks
