"""The training of a scaling study.

It is the training of Kubeflow's mnist.py, as in the GKE experiment (docs/scaling.md): two convolutions, Fashion-MNIST (synthetic
images if the host does not have it), DDP, SGD with a momentum of 0.5 and by default a learning rate of 0.01. The batch size is
per rank. As in most trainings, the host's CPUs prepare the images, one by one, in each rank or in its worker processes (setting
`workers`). So a host with too few CPUs for its GPUs is as slow here as in real training. In the benchmark `fashion_mnist`, the
images are on the GPU from the start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from agent.benchmarks.runtime.agreement import CannotMeasureError, attempt_on_all_ranks
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import Images
from agent.benchmarks.runtime.host_cpu import available_cpus
from agent.benchmarks.training.dataloader import forkserver
from agent.benchmarks.training.training_loop import data_parallel, evaluate, load_model_and_images, train_step
from schemas.records import ERROR

MOMENTUM = 0.5
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16}
"""Setting `precision` -> dtype of autocast. `fp32` means PyTorch's defaults without autocast.

On a GPU, PyTorch then uses TF32 in convolutions."""
MIN_STEPS = 2
"""Minimum number of steps. The throughput leaves out the first step, in which torch also builds kernels and DDP's buckets."""

Item = tuple[torch.Tensor, int]


class ScaledImages(Dataset[Item]):
    """Images (N, 1, 28, 28) in uint8 and classes (N,); each item is converted when it is fetched."""

    def __init__(self, images: torch.Tensor, classes: torch.Tensor) -> None:
        self._images, self._classes = images, classes

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Item:
        return scale(self._images[index]), int(self._classes[index])


def scale(images: torch.Tensor) -> torch.Tensor:
    """Convert bytes to floats from 0 to 1, as in the GKE experiment."""
    return images.float() / 255


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report the time from launch to the end of the first step, time and images/s of the later steps, test accuracy and loss."""
    batch, epochs = settings["batch_size"], settings["epochs"]
    model, images = load_model_and_images(context, "convnet", settings["data_directories"])
    steps_per_epoch = len(images.train) // context.world_size // batch
    all_steps = steps_per_epoch * epochs
    steps = min(all_steps, settings["max_steps"] or all_steps)
    if steps < MIN_STEPS:
        raise CannotMeasureError(
            ERROR,
            f"too few steps: {steps}, needed: {MIN_STEPS} ({len(images.train)} images, {epochs} epochs, batches of {batch} on "
            f"each of {context.world_size} ranks, max_steps {settings['max_steps'] or 'not set'})",
        )
    ddp = data_parallel(context, model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=settings["learning_rate"], momentum=MOMENTUM)
    batches = _Batches(context, images, batch, settings["workers"])
    first_step_done, began = 0.0, 0.0
    for number, (pictures, classes) in enumerate(batches.take(steps)):
        train_step(context, optimizer, partial(_loss, ddp, pictures, classes, AUTOCAST[settings["precision"]]))
        if number == 0:
            context.synchronize()
            first_step_done, began = time.monotonic() - context.launched, time.perf_counter()
    with context.heartbeat.in_collective():
        context.synchronize()
    trained = time.perf_counter() - began
    accuracy, loss = evaluate(context, model, images, scale)
    first_step_done, trained = context.max_over_ranks([first_step_done, trained])
    context.report_world(
        {
            "scaling.hookup": (first_step_done, "s"),
            "scaling.duration": (trained, "s"),
            "scaling.throughput": ((steps - 1) * batch * context.world_size / trained, "images/s"),
            "scaling.accuracy": (accuracy, "1"),
            "scaling.loss": (loss, "1"),
        },
        data=images.label,
        world_size=context.world_size,
        backend=dist.get_backend(),
        cpus=available_cpus(),
        max_steps=steps if steps < all_steps else 0,  # 0: `max_steps` did not shorten the training
        **{key: settings[key] for key in ("batch_size", "epochs", "precision", "workers")},
    )


class _Batches:
    """Batches on this rank's device, from this rank's share of the training images, epoch after epoch."""

    def __init__(self, context: Context, images: Images, batch: int, workers: int) -> None:
        self._context, self._pinned = context, context.device.type == "cuda"
        dataset = ScaledImages(images.train.cpu(), images.train_classes.cpu())
        self._sampler: DistributedSampler[int] = DistributedSampler(
            dataset, num_replicas=context.world_size, rank=context.rank, drop_last=True
        )
        self._loader = DataLoader(
            dataset,
            batch_size=batch,
            sampler=self._sampler,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self._pinned,
            multiprocessing_context=forkserver(__name__) if workers else None,
            timeout=context.timeout_s if workers else 0,
        )

    def take(self, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield images and classes of `steps` batches."""
        epoch, remaining = 0, steps
        while remaining:
            self._sampler.set_epoch(epoch)
            # If a rank cannot start its workers, all ranks must stop before they wait for each other.
            batches = attempt_on_all_ranks(self._context, lambda: iter(self._loader)) if epoch == 0 else self._loader
            for pictures, classes in batches:
                if not remaining:
                    return
                remaining -= 1
                yield self._to_device(pictures), self._to_device(classes)
            epoch += 1
            self._context.set_phase(f"scaling, finished epochs: {epoch}")

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._context.device, non_blocking=self._pinned)


def _loss(ddp: nn.Module, pictures: torch.Tensor, classes: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    with torch.autocast(pictures.device.type, dtype=dtype, enabled=dtype is not None):
        return nn.functional.cross_entropy(ddp(pictures), classes)
