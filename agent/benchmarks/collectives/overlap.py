"""An all_reduce at the same time as matrix products: the hidden share and the slowdown.

As in the backward pass of data-parallel training, NCCL's kernels take some of the multiprocessors and of the memory
bandwidth. The number of products is chosen so that they take about as long as the all_reduce. The hidden share is the time
saved by running both at once instead of one after the other, divided by the time of the shorter operation alone. The slowdown is
the time of both at once divided by the time of the longer operation alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks.runtime.agreement import CannotMeasureError, attempt_on_all_ranks
from agent.benchmarks.runtime.context import Context
from schemas.records import SKIPPED


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report the hidden share and the slowdown. Both figures are 1 if the overlap costs no time beyond the longer operation."""
    if context.world_size == 1:
        raise CannotMeasureError(SKIPPED, "a collective needs two ranks")
    size, size_bytes = settings["size"], settings["size_bytes"]
    dtype = torch.bfloat16 if context.device.type == "cuda" else torch.float32

    def allocate() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        factor = torch.randn(size, size, device=context.device).to(dtype)
        message = torch.zeros(size_bytes // dtype.itemsize, dtype=dtype, device=context.device)
        return factor, torch.empty_like(factor), message

    factor, product, message = attempt_on_all_ranks(context, allocate)
    products = 1

    def compute() -> None:
        for _ in range(products):
            torch.mm(factor, factor, out=product)

    def communicate() -> None:
        dist.all_reduce(message)

    def overlap() -> None:
        handle = dist.all_reduce(message, async_op=True)  # first, while multiprocessors are free
        compute()
        handle.wait()

    def median(work: Callable[[], None]) -> float:
        return statistics.median(context.max_over_ranks(context.time(work, settings["repetitions"])))

    communication = median(communicate)
    products = max(1, round(communication / median(compute)))
    hidden_share, slowdown = overlap_figures(median(compute), communication, median(overlap))
    context.report_world(
        {"overlap.hidden_share": (hidden_share, "1"), "overlap.slowdown": (slowdown, "1")},
        size=size,
        size_bytes=size_bytes,
        dtype=str(dtype).removeprefix("torch."),
        world_size=context.world_size,
    )


def overlap_figures(computation: float, communication: float, both: float) -> tuple[float, float]:
    """Return the hidden share and the slowdown, from the seconds of each operation alone and of both at once.

    A share below 0 (both at once take longer than one after the other) is reported as 0, a share above 1 (noise) as 1. The
    slowdown is not limited.
    """
    shorter, longer = sorted((computation, communication))
    return min(1.0, max(0.0, (computation + communication - both) / shorter)), both / longer
