"""The training of the GKE experiment (docs/scaling.md), as fast as the GPUs can run it.

It trains the small `convnet` on Fashion-MNIST, or on synthetic images if the host does not have that data set. A plain loop
would spend most of its time on kernel launches: a step of this network has about forty kernels of a few microseconds. So all
inputs of a step are on the device (images, order, learning rates, step number), one all_reduce averages the gradients, and the
whole step is one CUDA graph. On a CPU, or if a step cannot be captured as a graph, the steps run without one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from agent.benchmarks.runtime.agreement import CannotMeasureError
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import Images
from agent.benchmarks.runtime.rank_context import Value
from agent.benchmarks.training.training_loop import (
    FlatGradients,
    capture_graph,
    evaluate,
    load_model_and_images,
    normalize,
)
from schemas.records import ERROR

MOMENTUM = 0.9
WARM_UP_SHARE = 0.1
"""Share of the steps, at the beginning, in which the learning rate rises. With 16 ranks, a training that begins at the highest
learning rate diverges."""
MAX_RATE = 0.16
"""The highest learning rate is the setting `learning_rate` (default: 0.01) times the number of ranks, but at most MAX_RATE."""
GRAPH_WARM_UP = 3
"""Number of steps that run before the graph is captured. If the training has at most this many steps, only one step runs before
the capture, because each step uses up one batch."""


class GraphedTraining:
    """The training. `step` reads nothing from the host's memory, so that it can be captured as a CUDA graph."""

    def __init__(self, context: Context, model: nn.Module, images: Images, settings: Mapping[str, Any]) -> None:
        batch, epochs, device = settings["batch_size"], settings["epochs"], context.device
        global_batch = batch * context.world_size
        steps_per_epoch = len(images.train) // global_batch
        if not steps_per_epoch:
            raise CannotMeasureError(
                ERROR, f"{len(images.train)} images are fewer than one batch of {global_batch} (all ranks together)"
            )
        self.steps = min(steps_per_epoch * epochs, settings["max_steps"] or steps_per_epoch * epochs)
        self.epochs = epochs if self.steps == steps_per_epoch * epochs else epochs_of(self.steps, steps_per_epoch)
        self._model, self._pictures, self._classes = model, normalize(images.train), images.train_classes
        generator = torch.Generator().manual_seed(2)  # the same shuffle on all ranks; each rank takes its share
        orders = [torch.randperm(len(images.train), generator=generator) for _ in range(epochs)]
        shares = [order[: steps_per_epoch * global_batch].view(-1, context.world_size, batch) for order in orders]
        self._order = torch.cat(shares)[:, context.rank].to(device)  # (steps, batch)
        self.highest_rate = min(settings["learning_rate"] * context.world_size, MAX_RATE)
        self._rates = learning_rates(self.steps, self.highest_rate).to(device)
        self._rate, self._number = torch.zeros((), device=device), torch.zeros(1, dtype=torch.int64, device=device)
        self._gradients = FlatGradients(model.parameters(), context.world_size)
        self._optimizer = torch.optim.SGD(
            model.parameters(), lr=self._rate, momentum=MOMENTUM, nesterov=True, fused=True
        )
        self._initial = [parameter.detach().clone() for parameter in model.parameters()]

    def step(self) -> None:
        """Train on one batch of this rank, and update the weights with the mean gradients of all ranks."""
        indices = self._order.index_select(0, self._number)[0]
        self._rate.copy_(self._rates.index_select(0, self._number)[0])
        pictures, classes = self._pictures.index_select(0, indices), self._classes.index_select(0, indices)
        self._gradients.backward(nn.functional.cross_entropy(self._model(pictures), classes))
        self._optimizer.step()
        self._number += 1

    def reset(self) -> None:
        """Restore the initial state in place, because the graph contains the addresses of the tensors."""
        with torch.no_grad():
            for parameter, initial in zip(self._model.parameters(), self._initial, strict=True):
                parameter.copy_(initial)
        for state in self._optimizer.state.values():
            state["momentum_buffer"].zero_()
        self._number.zero_()


def epochs_of(steps: int, steps_per_epoch: int) -> float:
    """Return the number of epochs with four significant digits. It is above 0, however short the training."""
    return float(f"{steps / steps_per_epoch:.4g}")


def learning_rates(steps: int, highest: float) -> torch.Tensor:
    """Return the learning rate of each step (steps,): a linear rise, then half a cosine towards zero."""
    number, rise = torch.arange(steps), max(1, round(WARM_UP_SHARE * steps))
    falling = 0.5 * (1 + torch.cos(torch.pi * (number - rise).clamp(min=0) / max(1, steps - rise)))
    return highest * ((number + 1) / rise).clamp(max=1.0) * falling


def count_differing_parameters(model: nn.Module) -> int:
    """Return how many single parameters (elements of the tensors) are not bit-identical on all ranks."""
    bits = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).view(torch.int32)
    lowest, highest = bits.clone(), bits.clone()
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    return int((lowest != highest).sum())


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report accuracy on the test images, images per second in training, and the total time of loading, training and testing.

    If parameters differ between the ranks after the training, report how many (`fashion_mnist.wrong_parameters`) instead.
    """
    context.min_max_over_ranks(0)  # a barrier: all ranks start together
    began = time.perf_counter()
    model, images = load_model_and_images(context, "convnet", settings["data_directories"])
    training = GraphedTraining(context, model, images, settings)
    graph = capture_graph(context, training.step, GRAPH_WARM_UP if training.steps > GRAPH_WARM_UP else 1)
    training.reset()
    context.set_phase(f"fashion_mnist, {training.steps} steps")
    context.min_max_over_ranks(0)
    training_began = time.perf_counter()
    step = graph.replay if graph else training.step
    for _ in range(training.steps):
        step()
    context.synchronize()
    trained = time.perf_counter() - training_began
    accuracy, _ = evaluate(context, model, images)
    duration = time.perf_counter() - began
    differing = count_differing_parameters(model)
    trained, duration = context.max_over_ranks([trained, duration])
    trained_images = training.steps * settings["batch_size"] * context.world_size
    figures: dict[str, tuple[Value, str]] = {
        "fashion_mnist.accuracy": (accuracy, "1"),
        "fashion_mnist.duration": (duration, "s"),
        "fashion_mnist.throughput": (trained_images / trained, "images/s"),
    }
    params: dict[str, Any] = {
        "data": images.label,
        "epochs": training.epochs,
        "batch_size": settings["batch_size"],
        "world_size": context.world_size,
        "learning_rate": training.highest_rate,
        "graphed": graph is not None,
    }
    if not differing:
        context.report_world(figures, **params)
    elif context.is_reporting_rank:
        invalid = {name: unit for name, (_, unit) in figures.items()}
        name = "fashion_mnist.wrong_parameters"
        context.report_wrong_data(name, differing, invalid=invalid, scope=context.world_scope, **params)
