"""Training of a network that is split over two devices, with data-parallel replicas (PyTorch's "DDP with model parallelism").

Each even local rank uses two devices, its own and the next one, while the odd ranks wait. If a host has an odd number of GPUs,
its last GPU is not used. On CPUs both halves are on the same device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agent.benchmarks.runtime.agreement import CannotMeasureError, attempt_on_all_ranks
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.training_loop import report_losses, train_step
from agent.sampling.statistics import summarize
from schemas.records import UNSUPPORTED

CLASSES = 10


class SplitNetwork(nn.Module):
    """Four linear layers, two on each device; the activations are copied from the first device to the second."""

    def __init__(self, width: int, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self._second = second
        with torch.device(first):  # created on the device: creating it on one CPU core takes seconds
            self.front = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        with torch.device(second):
            self.back = nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return class scores (N, 10), on the second device, of inputs (N, width) on the first."""
        scores: torch.Tensor = self.back(self.front(inputs).to(self._second))
        return scores


class SplitReplica:
    """One data-parallel replica of the network, on two devices, and its training."""

    def __init__(self, context: Context, width: int, batch: int) -> None:
        self._context = context
        self.devices = [context.device, context.device]
        if context.device.type == "cuda":
            self.devices[1] = torch.device("cuda", context.local_rank + 1)
        torch.manual_seed(1)
        self.module: nn.Module = SplitNetwork(width, *self.devices)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(2 + context.rank)  # each replica trains on its own single batch
        self._inputs = torch.randn(batch, width).to(self.devices[0])
        self._classes = torch.randint(CLASSES, (batch,)).to(self.devices[1])

    def loss(self) -> torch.Tensor:
        """Return the loss on the replica's batch."""
        return nn.functional.cross_entropy(self.module(self._inputs), self._classes)

    def step(self) -> tuple[float, float]:
        """Train one step and wait for both devices; return the loss and the seconds."""
        began = time.perf_counter()
        loss = train_step(self._context, self._optimizer, self.loss, collective=False)
        self._context.synchronize_devices(self.devices)
        return float(loss), time.perf_counter() - began


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report the step time of the slowest replica in each step, and the loss ratio.

    The ratio is the sum of the replicas' last losses divided by the sum of their first losses.

    If losses are not finite, report their number (`model_parallel.wrong_losses`) instead of the ratio.
    """
    steps, batch, width = settings["steps"], settings["batch_size"], settings["width"]
    leads = drives_replica(context.local_rank, context.local_world_size)
    leaders = _replica_leaders(context, leads)
    if not leaders:
        raise CannotMeasureError(UNSUPPORTED, "a replica needs two devices of one host, but no host has two")
    group = _create_group(leaders) if len(leaders) > 1 else None
    replica = _build_replica(context, leads, width, batch)
    results = [(0.0, 0.0)] * steps
    context.set_phase(f"model_parallel, {len(leaders)} replicas")
    try:
        # Ranks without a replica enter this block too: the supervisor compares how many collectives each rank has entered.
        with context.heartbeat.in_collective():
            if replica:
                if group:
                    replica.module = DistributedDataParallel(replica.module, process_group=group)
                replica.step()
                results = [replica.step() for _ in range(steps)]
    finally:
        _wait_for_host(context, "trained")
    if group:
        dist.destroy_process_group(group)  # frees NCCL's memory on the replica's second device
    step_times = summarize(context.max_over_ranks([seconds for _, seconds in results]))
    params = {
        "width": width,
        "batch_size": batch,
        "steps": steps,
        "world_size": context.world_size,
        "replicas": len(leaders),
        "left_out": context.world_size - 2 * len(leaders),
    }
    context.report_world({"model_parallel.step_time": (step_times, "s")}, **params)
    report_losses(context, "model_parallel", [loss for loss, _ in results], **params)


def drives_replica(local_rank: int, local_world_size: int) -> bool:
    """Return whether this rank runs a replica, on its own device and the next one."""
    return local_rank % 2 == 0 and local_rank + 1 < local_world_size


def _replica_leaders(context: Context, leads: bool) -> list[int]:
    """Return the ranks that run a replica."""
    flags = torch.zeros(context.world_size, device=context.device)
    flags[context.rank] = float(leads)
    with context.heartbeat.in_collective():
        dist.all_reduce(flags)
        return [rank for rank, flag in enumerate(flags.tolist()) if flag]


def _create_group(leaders: list[int]) -> dist.ProcessGroup | None:
    """Return a process group of the leaders (the ranks that run a replica); None on the other ranks, which must call this too.

    join_process_group() binds the default group, and every group that is created from it, to one device per rank. The gradients
    of a replica are on two devices, so the group of the leaders must not be bound to one device.
    """
    default = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None  # type: ignore[union-attr]
    try:
        group = dist.new_group(leaders)
    finally:
        default.bound_device_id = bound  # type: ignore[union-attr]
    return None if group is dist.GroupMember.NON_GROUP_MEMBER else group


def _build_replica(context: Context, leads: bool, width: int, batch: int) -> SplitReplica | None:
    """Return the replica that this rank runs, tested with one backward pass; None if the rank runs no replica."""

    def build() -> SplitReplica | None:
        try:
            if not leads:
                return None
            replica = SplitReplica(context, width, batch)
            replica.loss().backward()  # type: ignore[no-untyped-call]
            return replica
        finally:
            _wait_for_host(context, "built")

    return attempt_on_all_ranks(context, build)


def _wait_for_host(context: Context, what: str) -> None:
    """Wait for the other ranks of the host, without NCCL, whose kernels would occupy a device that a replica uses."""
    context.host_barrier(f"model_parallel {what}")
