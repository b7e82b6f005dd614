"""The training of a scaling study: what the GKE experiment ran (Kubeflow's mnist.py), timed from the launch of the ranks on.

Two convolutions, Fashion-MNIST, DDP, SGD at 0.01 with momentum 0.5, the batch that of a rank. Images come to the device as they
do in most training: by way of the host's CPUs, each converted by itself, by worker processes of each rank. So a host with too
few CPUs for its GPUs is as slow here as it would be there; `fashion_mnist` shows what the GPUs alone can do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import Images
from agent.benchmarks.runtime.host_cpu import processors
from agent.benchmarks.training.dataloader import forkserver
from agent.benchmarks.training.training import CannotMeasureError, attempt, pieces, prepare, tell_absent
from schemas.records import ERROR

MOMENTUM = 0.5
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
"""Of autocast; `fp32` is PyTorch's default: on a GPU convolutions in TF32."""
LEAST_STEPS = 2
"""The first one builds kernels and buckets, and is no part of the throughput."""

Item = tuple[torch.Tensor, int]


class Pictures(Dataset[Item]):
    """Images (N, 1, 28, 28) in uint8 and classes (N,); an item is converted when it is fetched."""

    def __init__(self, images: torch.Tensor, classes: torch.Tensor) -> None:
        self._images, self._classes = images, classes

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Item:
        return scaled(self._images[index]), int(self._classes[index])


def scaled(images: torch.Tensor) -> torch.Tensor:
    """Bytes to floats from 0 to 1, as the experiment had them."""
    return images.float() / 255


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports the time from the launch to the first step, images a second after it, and accuracy and loss on the test images."""
    try:
        _measure(context, settings)
    except CannotMeasureError as problem:
        tell_absent(context, "scaling", problem)


def _measure(context: Context, settings: dict[str, Any]) -> None:
    batch, epochs, most = int(settings["batch_size"]), int(settings["epochs"]), int(settings["max_steps"])
    model, images = prepare(context, "convnet", settings["data_directories"])
    each = len(images.train) // context.world_size // batch
    steps = min(each * epochs, most or each * epochs)
    if steps < LEAST_STEPS:
        raise CannotMeasureError(
            ERROR, f"{len(images.train)} images make {steps} steps of {batch} on {context.world_size} ranks: too few"
        )
    ddp = DistributedDataParallel(model, device_ids=[context.device] if context.device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=float(settings["learning_rate"]), momentum=MOMENTUM)
    batches = _Batches(context, images, batch, int(settings["workers"]))
    hooked_up, began = 0.0, 0.0
    for number, (pictures, classes) in enumerate(batches.of(steps)):
        _step(context, ddp, optimizer, pictures, classes, PRECISIONS[settings["precision"]])
        if number == 0:
            context.synchronize()
            hooked_up, began = time.monotonic() - context.launched, time.perf_counter()
    with context.heart.together():
        context.synchronize()
    trained = time.perf_counter() - began
    accuracy, loss = _tested(context, model, images)
    hooked_up, trained = context.slowest([hooked_up, trained])
    if not context.speaks_for_world:
        return
    common: dict[str, Any] = {
        "scope": context.world_scope,
        "data": images.label,
        "world_size": context.world_size,
        "backend": dist.get_backend(),
        "cpus": processors(),
        "max_steps": steps if steps < each * epochs else 0,  # 0 where they ended nothing
        **{key: settings[key] for key in ("batch_size", "epochs", "precision", "workers")},
    }
    context.measured("scaling.hookup", hooked_up, unit="s", **common)
    context.measured("scaling.duration", trained, unit="s", **common)
    rate = (steps - 1) * batch * context.world_size / trained
    context.measured("scaling.throughput", rate, unit="images/s", **common)
    context.measured("scaling.accuracy", accuracy, unit="1", **common)
    context.measured("scaling.loss", loss, unit="1", **common)


class _Batches:
    """Batches of this rank's share of the training images, epoch after epoch, on its device."""

    def __init__(self, context: Context, images: Images, batch: int, workers: int) -> None:
        self._context, self._pinned = context, context.device.type == "cuda"
        pictures = Pictures(images.train.cpu(), images.train_classes.cpu())
        self._sampler: DistributedSampler[int] = DistributedSampler(
            pictures, num_replicas=context.world_size, rank=context.rank, drop_last=True
        )
        self._loader = DataLoader(
            pictures,
            batch_size=batch,
            sampler=self._sampler,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self._pinned,
            multiprocessing_context=forkserver(__name__) if workers else None,
            timeout=context.timeout_s if workers else 0,
        )

    def of(self, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """So many of them."""
        epoch, left = 0, steps
        while left:
            self._sampler.set_epoch(epoch)
            # Workers that cannot be started, on this rank or another, are told before the ranks wait for each other.
            batches = attempt(self._context, lambda: iter(self._loader)) if epoch == 0 else iter(self._loader)
            for pictures, classes in batches:
                if not left:
                    return
                left -= 1
                yield self._on_device(pictures), self._on_device(classes)
            epoch += 1
            self._context.phase(f"scaling, {epoch} epochs")

    def _on_device(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._context.device, non_blocking=self._pinned)


def _step(
    context: Context,
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    pictures: torch.Tensor,
    classes: torch.Tensor,
    precision: torch.dtype | None,
) -> None:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(context.device.type, dtype=precision, enabled=precision is not None):
        loss = nn.functional.cross_entropy(ddp(pictures), classes)
    with context.heart.together():  # the gradients are exchanged in the backward pass
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _tested(context: Context, model: nn.Module, images: Images) -> tuple[float, float]:
    """Share of the test images classified right, and the mean loss on them; each rank looks at its own part."""
    mine = slice(context.rank, None, context.world_size)
    right, loss = torch.zeros((), device=context.device), torch.zeros((), device=context.device)
    model.eval()
    with torch.no_grad():
        tests, classes = (every[mine].split(pieces(context)) for every in (images.test, images.test_classes))  # type: ignore[no-untyped-call]
        for some, wanted in zip(tests, classes, strict=True):
            scores = model(scaled(some))
            right += (scores.argmax(1) == wanted).sum()
            loss += nn.functional.cross_entropy(scores, wanted, reduction="sum")
    whole = len(images.test)
    return context.total(float(right)) / whole, context.total(float(loss)) / whole
