"""Images that the host's CPUs prepare for each rank, against images that its device could train on.

All ranks of the host load at once: they share its CPUs, and one rank alone would look far better than training ever is. Images
lie in memory, so that the figure is the CPUs' and not the disk's; each is shifted, rotated and normalized on its own, as
examples do it. No process group is used: ranks of different hosts have nothing to do with one another here.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from agent.benchmarks.runtime.context import Context, failed
from agent.benchmarks.runtime.datasets import load
from agent.benchmarks.training.training import CannotMeasureError, network, normalize
from schemas.records import ERROR

DEGREES, SHIFT = 10.0, 0.1
"""Most rotation, and most shift as a share of the edge (the example's RandomRotation and RandomAffine)."""
PREFETCH = 2
"""Batches that each worker keeps ready."""
TRAINING_STEPS = 10

Item = tuple[torch.Tensor, int]


class Pictures(Dataset[Item]):
    """Images (N, channels, height, width) in uint8 and classes (N,); an item is transformed when it is fetched."""

    def __init__(self, images: torch.Tensor, classes: torch.Tensor) -> None:
        self._images, self._classes = images, classes

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Item:
        image = self._images[index].float().div_(255)
        angle, across, down = ((torch.rand(3) * 2 - 1) * torch.tensor([math.radians(DEGREES), SHIFT, SHIFT])).tolist()
        turn = [[math.cos(angle), -math.sin(angle), 2 * across], [math.sin(angle), math.cos(angle), 2 * down]]
        grid = nn.functional.affine_grid(torch.tensor([turn]), [1, *image.shape], align_corners=False)
        moved = nn.functional.grid_sample(image[None], grid, align_corners=False)[0]
        return (moved - 0.5) / 0.5, int(self._classes[index])


class Endless(Sampler[list[int]]):
    """Batches of random indices that never end, so that no epoch's end falls into the measurement."""

    def __init__(self, images: int, batch: int) -> None:
        self._images, self._batch = images, batch

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(self._images, (self._batch,)).tolist()


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports images a second of each number of workers, and the best of them over what the device trains on."""
    batch = int(settings["batch_size"])
    name, model = _network()
    params: dict[str, Any] = {
        "scope": context.device_scope,
        "batch_size": batch,
        "network": name,
        "cpus_per_rank": len(os.sched_getaffinity(0)) / context.local_world_size,
    }
    best, reason = 0.0, "no number of workers could be measured"
    for workers in settings["workers"]:
        context.phase(f"dataloader, {workers} workers")
        try:
            rate = _loaded(context, name, int(workers), batch, float(settings["seconds"]))
        except (RuntimeError, OSError, AssertionError) as error:  # no room in /dev/shm, a worker killed
            reason = failed(error)[1]
            where = params | {"unit": "images/s", "status": ERROR, "workers": workers}
            context.absent("dataloader.throughput", reason=reason, **where)
        else:
            best = max(best, rate)
            context.measured("dataloader.throughput", rate, unit="images/s", workers=workers, **params)
        context.save()
    if not best:
        context.absent("dataloader.sufficiency", unit="1", status=ERROR, reason=reason, **params)
        return
    context.phase("dataloader, training")
    context.measured("dataloader.sufficiency", best / _trained(context, name, model, batch), unit="1", **params)


def _network() -> tuple[str, nn.Module]:
    """The network that shall be fed, and its name."""
    try:
        return "resnet18", network("resnet18")
    except CannotMeasureError:
        return "convnet", network("convnet")


def _loaded(context: Context, name: str, workers: int, batch: int, seconds: float) -> float:
    """Images a second that arrive on this rank's device while all ranks of the host load."""
    images, pinned = load(name, []), context.device.type == "cuda"
    loader = DataLoader(
        Pictures(images.train, images.train_classes),
        batch_sampler=Endless(len(images.train), batch),
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=pinned,
        # Never fork: this process has used CUDA, and has threads. The server imports torch once for all workers.
        multiprocessing_context=forkserver(__name__) if workers else None,
        timeout=context.timeout_s if workers else 0,
    )
    count = 0
    try:
        batches = iter(loader)
        next(batches)  # the workers have started
    finally:
        context.meet(f"dataloader {workers}")  # whatever happened: the other ranks wait here
    for _ in range(PREFETCH * workers):
        next(batches)  # what was ready says nothing about how fast it comes
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or not count:
        pictures, classes = next(batches)
        pictures.to(context.device, non_blocking=pinned)
        classes.to(context.device, non_blocking=pinned)
        count += len(pictures)
    context.synchronize()
    spent = time.perf_counter() - began
    return count / spent


def forkserver(module: str) -> Any:
    """The server of worker processes, which has imported that module once for all of them."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module])
    return server


def _trained(context: Context, name: str, model: nn.Module, batch: int) -> float:
    """Images a second on which this rank's device trains, eagerly, from its own memory, all ranks of the host at once."""
    images, device = load(name, []), context.device
    model = model.to(device)
    pictures, classes = images.train.to(device), images.train_classes.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        chosen = torch.randint(len(pictures), (batch,), device=device)
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(normalize(pictures[chosen])), classes[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    context.meet("dataloader training")
    times = sorted(context.time(step, TRAINING_STEPS if device.type == "cuda" else 2))
    return batch / times[len(times) // 2]
