"""Data-parallel training of two small networks: whether the loss falls, how accurate the network becomes, and how fast it trains.

The networks are `resnet18` on CIFAR-10 and the two-convolution `convnet` on Fashion-MNIST, or on synthetic images if the host
does not have the data set. The training is like PyTorch's own examples: DDP, DistributedSampler, SGD with momentum, cosine
annealing. The images are in device memory, so the figures measure the device and not the disk. Rank 0 saves the trained model
and its metadata in the work directory of the launch.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from agent.benchmarks.runtime.agreement import CannotMeasureError, log, report_absent_outputs
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import Images
from agent.benchmarks.training.training_loop import (
    data_parallel,
    evaluate,
    load_model_and_images,
    normalize,
    train_step,
)
from agent.sampling.statistics import summarize
from schemas import documents
from schemas.records import ERROR

MIN_STEPS = 60
"""Minimum number of steps of a training, in all epochs together. `max_steps`, the limit for one epoch, takes precedence. A rank
with too few images for its steps repeats images within an epoch."""
EDGE_DIVISOR = 10
"""The first loss is the mean over the first 1/EDGE_DIVISOR of the steps, the last loss the mean over the last 1/EDGE_DIVISOR."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report throughput, step time, loss and accuracy of each network."""
    for name in settings["networks"]:
        context.set_phase(f"training {name}")
        try:
            _train(context, name, settings)
        except CannotMeasureError as problem:
            report_absent_outputs(context, "training", problem, network=name)
        context.save()


def _train(context: Context, name: str, settings: Mapping[str, Any]) -> None:
    model, images = load_model_and_images(context, name, settings["data_directories"])
    ddp = data_parallel(context, model)
    sampler: DistributedSampler[int] = DistributedSampler(
        range(len(images.train)),  # type: ignore[arg-type]
        num_replicas=context.world_size,
        rank=context.rank,
        drop_last=True,
    )
    batch, epochs = settings["batch_size"], settings["epochs"]
    steps = steps_per_epoch(len(sampler), settings)
    if batch > len(images.train) or not len(sampler) or steps * epochs < 2:
        raise CannotMeasureError(
            ERROR,
            f"too few steps or images: {epochs} epochs of {steps} steps, {len(images.train)} images, batches of {batch} on "
            f"each of {context.world_size} ranks",
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=settings["learning_rate"], momentum=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps * epochs)
    losses, seconds = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for indices in batches(torch.tensor(list(sampler), device=context.device), batch, steps):
            began = time.perf_counter()
            forward = partial(_loss, ddp, images.train[indices], images.train_classes[indices])
            losses.append(train_step(context, optimizer, forward, synchronize=True))
            seconds.append(time.perf_counter() - began)
            schedule.step()
            if context.progress_due:
                figures = {"training.step_time": (seconds[-1], "s"), "training.loss": (float(losses[-1]), "1")}
                context.report_progress(figures, network=name)
        context.set_phase(f"training {name}, finished epochs: {epoch + 1} of {epochs}")
    accuracy, _ = evaluate(context, ddp, images)
    if context.rank == 0:
        _save(context, model, name, settings, data=images.label, loss=float(losses[-1]), accuracy=accuracy)
    _report(context, name, images, losses, seconds, batch, accuracy)


def steps_per_epoch(images: int, settings: Mapping[str, Any]) -> int:
    """Return the number of steps per epoch for a rank with `images` images. `max_steps` is the limit; 0 means no limit."""
    epochs, batch, most = int(settings["epochs"]), int(settings["batch_size"]), int(settings["max_steps"])
    return min(max(images // batch, -(-MIN_STEPS // epochs)), most or sys.maxsize)


def batches(order: torch.Tensor, size: int, count: int) -> Sequence[torch.Tensor]:
    """Return `count` batches (size,) of the image numbers in `order` (images,). If there are too few numbers, repeat them."""
    repetitions = -(-size * count // len(order))
    split: Sequence[torch.Tensor] = order.repeat(repetitions).split(size)  # type: ignore[no-untyped-call]
    return split[:count]


def _loss(ddp: nn.Module, pictures: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(ddp(normalize(pictures)), classes)


def _save(context: Context, model: nn.Module, name: str, settings: Mapping[str, Any], **results: Any) -> None:
    """Save the network's parameters, and a JSON file that describes the training."""
    metadata = {
        "network": name,
        "world_size": context.world_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch": str(torch.__version__),
        **{key: settings[key] for key in ("epochs", "batch_size", "learning_rate", "max_steps")},
        **{key: value for key, value in results.items() if not isinstance(value, float) or math.isfinite(value)},
    }
    try:
        torch.save(model.state_dict(), context.work / f"{name}.pt")
        documents.write_text(context.work / f"{name}.json", json.dumps(metadata, allow_nan=False), durable=False)
    except (OSError, RuntimeError) as error:  # the figures are valid even if the network is not saved
        log(f"{name} could not be saved: {error}")


def _report(
    context: Context,
    name: str,
    images: Images,
    losses: Sequence[torch.Tensor],
    seconds: Sequence[float],
    batch: int,
    accuracy: float,
) -> None:
    edge = max(1, len(losses) // EDGE_DIVISOR)
    all_losses = torch.stack(list(losses)).double()
    first, last = (
        context.sum_over_ranks(float(part.mean())) / context.world_size
        for part in (all_losses[:edge], all_losses[-edge:])
    )
    finite = context.sum_over_ranks(float((~all_losses.isfinite()).sum())) == 0
    # Without the first step, in which torch also builds kernels and DDP's buckets.
    step_times = summarize(context.max_over_ranks(seconds[1:]))
    params: dict[str, Any] = {
        "network": name,
        "data": images.label,
        "world_size": context.world_size,
        "batch_size": batch,
        "backend": dist.get_backend(),
    }
    throughput = batch * context.world_size / step_times.p50
    context.report_world(
        {
            "training.throughput": (throughput, "images/s"),
            "training.step_time": (step_times, "s"),
            "training.loss_finite": (finite, "1"),
            "training.accuracy": (accuracy, "1"),
        },
        **params,
    )
    if finite:
        context.report_world({"training.loss": (last, "1"), "training.loss_ratio": (last / first, "1")}, **params)
        return
    reason = (
        f"the loss is not finite in at least one step; mean loss of the first steps: {first}, of the last steps: {last}"
    )
    for kind in ("loss", "loss_ratio") if context.is_reporting_rank else ():
        context.report_absent(
            f"training.{kind}", unit="1", scope=context.world_scope, status=ERROR, reason=reason, **params
        )
