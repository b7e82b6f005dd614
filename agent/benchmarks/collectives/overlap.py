"""How much of an all_reduce hides behind matrix products, and how much the two slow each other down.

As in the backward pass of data-parallel training: NCCL's kernels take some of the multiprocessors and of the memory's
bandwidth. There are as many products as take about as long as the all_reduce, so that in theory one of the two is free.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.training import CannotMeasureError, attempt, tell_absent
from schemas.records import SKIPPED


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports the hidden share, 1 where the shorter costs nothing beside the longer, and the slowdown, then 1."""
    try:
        if context.world_size == 1:
            raise CannotMeasureError(SKIPPED, "one rank has nobody to talk to")
        _measure(context, int(settings["size"]), int(settings["size_bytes"]), int(settings["repetitions"]))
    except CannotMeasureError as problem:
        tell_absent(context, "overlap", problem)


def _measure(context: Context, size: int, size_bytes: int, repetitions: int) -> None:
    dtype = torch.bfloat16 if context.device.type == "cuda" else torch.float32

    def buffers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        factor = torch.randn(size, size, device=context.device).to(dtype)
        return (
            factor,
            torch.empty_like(factor),
            torch.zeros(size_bytes // dtype.itemsize, dtype=dtype, device=context.device),
        )

    factor, product, message = attempt(context, buffers)
    products = 1

    def compute() -> None:
        for _ in range(products):
            torch.mm(factor, factor, out=product)

    def communicate() -> None:
        dist.all_reduce(message)

    def both() -> None:
        under_way = dist.all_reduce(message, async_op=True)  # first, so that it finds free multiprocessors
        compute()
        under_way.wait()

    def median(work: Callable[[], None]) -> float:
        return statistics.median(context.slowest(context.time(work, repetitions)))

    communication = median(communicate)
    products = max(1, round(communication / median(compute)))
    hidden_share, slowdown = figures(median(compute), communication, median(both))
    if context.speaks_for_world:
        params: dict[str, Any] = {"size": size, "size_bytes": size_bytes, "dtype": str(dtype).removeprefix("torch.")}
        params |= {"world_size": context.world_size, "scope": context.world_scope}
        context.measured("overlap.hidden_share", hidden_share, unit="1", **params)
        context.measured("overlap.slowdown", slowdown, unit="1", **params)


def figures(computation: float, communication: float, both: float) -> tuple[float, float]:
    """Hidden share and slowdown from the seconds of each alone and of both at once.

    A share below 0 (worse than one after the other) is told as 0, one above 1 (noise) as 1; the slowdown has the rest.
    """
    shorter, longer = sorted((computation, communication))
    return min(1.0, max(0.0, (computation + communication - both) / shorter)), both / longer
