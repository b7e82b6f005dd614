"""The training of the GKE experiment (Fashion-MNIST, two convolutions, 20 epochs), as fast as the GPUs can.

A plain loop spends its time launching kernels: a step of this network is some forty of them, each of a few microseconds. So
everything a step needs lies on the device (images, order, learning rates, its own number), gradients meet in one
all_reduce, and the step is one CUDA graph, which the host only starts. On a CPU the same step runs eagerly.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import Images
from agent.benchmarks.training.training import CannotMeasureError, accuracy, captured, normalize, prepare, tell_absent
from schemas.records import ERROR

MOMENTUM = 0.9
WARM_UP_SHARE = 0.1
"""Share of the steps over which the rate rises: at 16 times the rate of one rank the first steps would diverge."""
MOST_RATE = 0.16
"""The linear scaling rule ends at 16 ranks' worth; beyond, the rate stays and there are only fewer steps."""
GRAPH_WARM_UP = 3


class Averaged:
    """Gradients of all ranks, averaged by one all_reduce of one buffer.

    The buffer's layout never changes, unlike that of DDP's buckets, so that the sums can be repeated to the bit.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self._parameters, self._world_size = list(model.parameters()), world_size
        sizes = [parameter.numel() for parameter in self._parameters]
        self._flat = torch.zeros(sum(sizes), device=self._parameters[0].device)
        for parameter, part in zip(self._parameters, self._flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            parameter.grad = part.view_as(parameter)

    def backward(self, loss: torch.Tensor) -> None:
        """Leaves the mean gradient of all ranks in the parameters' `grad`."""
        gradients = torch.autograd.grad(loss / self._world_size, self._parameters)
        torch.cat([gradient.flatten() for gradient in gradients], out=self._flat)
        dist.all_reduce(self._flat)


class Loop:
    """The training; `step` takes nothing from the host."""

    def __init__(self, context: Context, model: nn.Module, images: Images, settings: dict[str, Any]) -> None:
        batch, epochs, device = int(settings["batch_size"]), int(settings["epochs"]), context.device
        whole = batch * context.world_size
        each = len(images.train) // whole
        if not each:
            raise CannotMeasureError(ERROR, f"{len(images.train)} images make no batch of {whole}")
        self.steps = min(each * epochs, int(settings["max_steps"]) or each * epochs)
        self._model, self._pictures, self._classes = model, normalize(images.train), images.train_classes
        generator = torch.Generator().manual_seed(2)  # of all ranks: one shuffle, of which each takes its part
        orders = [torch.randperm(len(images.train), generator=generator) for _ in range(epochs)]
        shares = [order[: each * whole].view(-1, context.world_size, batch) for order in orders]
        self._order = torch.cat(shares)[:, context.rank].to(device)  # (steps, batch)
        self.highest_rate = min(float(settings["learning_rate"]) * context.world_size, MOST_RATE)
        self._rates = rates(self.steps, self.highest_rate).to(device)
        self._rate, self._number = torch.zeros((), device=device), torch.zeros(1, dtype=torch.int64, device=device)
        self._gradients = Averaged(model, context.world_size)
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=self._rate, momentum=MOMENTUM, nesterov=True, fused=True
        )
        self._first = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self) -> None:
        """One batch of this rank, and the update by the batches of all."""
        chosen = self._order.index_select(0, self._number)[0]
        self._rate.copy_(self._rates.index_select(0, self._number)[0])
        pictures, classes = self._pictures.index_select(0, chosen), self._classes.index_select(0, chosen)
        self._gradients.backward(nn.functional.cross_entropy(self._model(pictures), classes))
        self._optimizer.step()
        self._number += 1

    def reset(self) -> None:
        """Back to before the first step, in the same memory, which a graph has learnt by heart."""
        with torch.no_grad():
            for parameter, first in zip(self._model.parameters(), self._first, strict=True):
                parameter.copy_(first)
        for state in self._optimizer.state.values():
            state["momentum_buffer"].zero_()
        self._number.zero_()


def rates(steps: int, highest: float) -> torch.Tensor:
    """Learning rate of each step (steps,): a linear rise, then half a cosine down to zero."""
    number, rise = torch.arange(steps), max(1, round(WARM_UP_SHARE * steps))
    falling = 0.5 * (1 + torch.cos(torch.pi * (number - rise).clamp(min=0) / max(1, steps - rise)))
    return highest * ((number + 1) / rise).clamp(max=1.0) * falling


def differing(context: Context, model: nn.Module) -> int:
    """Parameters that are not equal to the bit on all ranks."""
    bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int((lowest != highest).sum())


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports accuracy on the test images, images a second in training, and the seconds from reading the files to the end."""
    try:
        _measure(context, settings)
    except CannotMeasureError as problem:
        tell_absent(context, "fashion_mnist", problem)


def _measure(context: Context, settings: dict[str, Any]) -> None:
    context.agree(0)  # all begin together
    began = time.perf_counter()
    model, images = prepare(context, "convnet", settings["data_directories"])
    loop = Loop(context, model, images, settings)
    graph = captured(context, loop.step, GRAPH_WARM_UP if loop.steps > GRAPH_WARM_UP else 1)
    loop.reset()
    context.phase(f"fashion_mnist, {loop.steps} steps")
    context.agree(0)
    training_began = time.perf_counter()
    for _ in range(loop.steps):
        if graph:
            graph.replay()
        else:
            loop.step()
    context.synchronize()
    trained = time.perf_counter() - training_began
    right = accuracy(context, model, images)
    duration = time.perf_counter() - began
    if unlike := differing(context, model):
        raise CannotMeasureError(ERROR, f"{unlike} parameters differ between the ranks after the training")
    trained, duration = context.slowest([trained, duration])
    if not context.speaks_for_world:
        return
    params: dict[str, Any] = {
        "data": images.label,
        "epochs": int(settings["epochs"]),
        "batch_size": int(settings["batch_size"]),
        "world_size": context.world_size,
        "learning_rate": loop.highest_rate,
        "graphed": graph is not None,
    }
    trained_images = loop.steps * int(settings["batch_size"]) * context.world_size
    context.measured("fashion_mnist.accuracy", right, unit="1", scope=context.world_scope, **params)
    context.measured("fashion_mnist.duration", duration, unit="s", scope=context.world_scope, **params)
    context.measured(
        "fashion_mnist.throughput", trained_images / trained, unit="images/s", scope=context.world_scope, **params
    )
