"""A network split over two devices a replica, the replicas trained data-parallel: PyTorch's "DDP with model parallelism".

The even local ranks drive two devices each, their own and the next; the odd ones wait. The last GPU of an odd number stays out.
On a CPU both halves lie on the one device there is.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.training import CannotMeasureError, attempt, tell_absent
from agent.sampling.statistics import summarize
from schemas.records import UNSUPPORTED

CLASSES = 10


class Halves(nn.Module):
    """Four linear layers, two on each device; the activations cross between them."""

    def __init__(self, width: int, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self._second = second
        with torch.device(first):  # made where it lies: on one CPU core it takes seconds
            self.front = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        with torch.device(second):
            self.back = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Class scores (N, 10), on the second device, of inputs (N, width) on the first."""
        scores: torch.Tensor = self.back(self.front(inputs).to(self._second))
        return scores


class Replica:
    """One network on two devices, and its training."""

    def __init__(self, context: Context, width: int, batch: int) -> None:
        self.devices = [context.device, context.device]
        if context.device.type == "cuda":
            self.devices[1] = torch.device("cuda", context.local_rank + 1)
        torch.manual_seed(1)
        self.module: nn.Module = Halves(width, *self.devices)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(2 + context.rank)  # each replica has a batch of its own, and learns it by heart
        self._inputs = torch.randn(batch, width).to(self.devices[0])
        self._classes = torch.randint(CLASSES, (batch,)).to(self.devices[1])

    def backward(self) -> torch.Tensor:
        """The loss, whose gradients are there."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.module(self._inputs), self._classes)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> tuple[float, float]:
        """Trains one step; its loss and its seconds, both devices done."""
        began = time.perf_counter()
        loss = self.backward()
        self._optimizer.step()
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return float(loss), time.perf_counter() - began


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports the step time of the slowest replica, and the last loss over the first, of all replicas."""
    try:
        _measure(context, int(settings["steps"]), int(settings["batch_size"]), int(settings["width"]))
    except CannotMeasureError as problem:
        tell_absent(context, "model_parallel", problem)


def _measure(context: Context, steps: int, batch: int, width: int) -> None:
    leads = drives_a_replica(context.local_rank, context.local_world_size)
    leaders = _leaders(context, leads)
    if not leaders:
        raise CannotMeasureError(UNSUPPORTED, "no host has two devices for a replica")
    group = _group(leaders) if len(leaders) > 1 else None
    replica = _build(context, leads, width, batch)
    found = [(0.0, 0.0)] * steps
    context.phase(f"model_parallel, {len(leaders)} replicas")
    try:
        with context.heart.together():  # those without a replica too: every rank counts the same operations
            if replica:
                if group:
                    replica.module = DistributedDataParallel(replica.module, process_group=group)
                replica.step()
                found = [replica.step() for _ in range(steps)]
    finally:
        _wait(context, "trained")
    if group:
        dist.destroy_process_group(group)  # and with it NCCL's memory on the neighbour's device
    seconds = summarize(context.slowest([spent for _, spent in found]))
    first, last = context.total(found[0][0]), context.total(found[-1][0])
    if not context.speaks_for_world:
        return
    params: dict[str, Any] = {"scope": context.world_scope, "width": width, "batch_size": batch, "steps": steps}
    params |= {"world_size": context.world_size, "replicas": len(leaders)}
    params |= {"left_out": context.world_size - 2 * len(leaders)}
    context.measured("model_parallel.step_time", seconds.p50, unit="s", samples=seconds, **params)
    context.measured("model_parallel.loss_ratio", last / first, unit="1", **params)


def drives_a_replica(local_rank: int, local_world_size: int) -> bool:
    """Whether this rank has a device beside its own to drive."""
    return local_rank % 2 == 0 and local_rank + 1 < local_world_size


def _leaders(context: Context, leads: bool) -> list[int]:
    """The ranks that drive a replica."""
    marks = torch.zeros(context.world_size, device=context.device)
    marks[context.rank] = float(leads)
    with context.heart.together():
        dist.all_reduce(marks)
        return [rank for rank, mark in enumerate(marks.tolist()) if mark]


def _group(leaders: list[int]) -> dist.ProcessGroup | None:
    """A process group of the leaders, which all ranks have to make; None for the others.

    join() ties the default group, and whatever descends from it, to one device a rank; a replica reduces on two.
    """
    default = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None  # type: ignore[union-attr]
    try:
        group = dist.new_group(leaders)
    finally:
        default.bound_device_id = bound  # type: ignore[union-attr]
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else group


def _build(context: Context, leads: bool, width: int, batch: int) -> Replica | None:
    """The replica that this rank drives, tried out alone; None for a rank that drives none."""

    def own() -> Replica | None:
        try:
            if not leads:
                return None
            replica = Replica(context, width, batch)
            replica.backward()
            return replica
        finally:
            _wait(context, "built")

    return attempt(context, own)


def _wait(context: Context, what: str) -> None:
    """Waits for the other ranks of the host, on the CPU: one that waited in NCCL would keep the replica's device busy."""
    context.meet(f"model_parallel {what}")
