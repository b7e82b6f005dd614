"""Images per second that the host's CPUs prepare for each rank, compared with the rate at which the rank's device trains.

All ranks of the host load images at once, because they share its CPUs: a single rank would load far faster than in real training.
The images are in memory, so the rate depends on the CPUs and not on the disk. Each image is shifted, rotated and normalized
individually, as in PyTorch's examples. No process group is used, because ranks on different hosts do not affect each other here.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.util
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from agent.benchmarks.runtime.agreement import CannotMeasureError
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.datasets import load
from agent.benchmarks.training.training_loop import build_network, normalize, train_step
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR

DEGREES, SHIFT = 10.0, 0.1
"""Largest rotation in degrees, and largest shift as a share of the edge (like RandomRotation and RandomAffine)."""
PREFETCH = 2
"""Batches that each worker keeps ready."""
MAX_TEMPORARY = 107 - len("/pymp-12345678/listener-12345678")
"""Maximum length of the path of the directory for temporary files, in bytes. The path of a Unix socket may have 107 bytes, and
multiprocessing adds these names to the directory."""
SHM = "/dev/shm"  # noqa: S108 - the directory for the sockets is created in it, for this user only
"""A directory with a short path, in which multiprocessing creates its semaphores."""
TRAINING_STEPS, CPU_TRAINING_STEPS = 10, 2

Item = tuple[torch.Tensor, int]


class AugmentedImages(Dataset[Item]):
    """Images (N, channels, height, width) in uint8 and classes (N,); each item is transformed when it is fetched."""

    def __init__(self, images: torch.Tensor, classes: torch.Tensor) -> None:
        self._images, self._classes = images, classes

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Item:
        image = self._images[index].float().div_(255)
        angle, across, down = ((torch.rand(3) * 2 - 1) * torch.tensor([math.radians(DEGREES), SHIFT, SHIFT])).tolist()
        rotation = [[math.cos(angle), -math.sin(angle), 2 * across], [math.sin(angle), math.cos(angle), 2 * down]]
        grid = nn.functional.affine_grid(torch.tensor([rotation]), [1, *image.shape], align_corners=False)
        moved = nn.functional.grid_sample(image[None], grid, align_corners=False)[0]
        return (moved - 0.5) / 0.5, int(self._classes[index])


class EndlessBatches(Sampler[list[int]]):
    """An endless series of batches of random indices, so that no epoch ends during the measurement."""

    def __init__(self, images: int, batch: int) -> None:
        self._images, self._batch = images, batch

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(self._images, (self._batch,)).tolist()


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report images per second for each number of workers, and the best of these rates divided by the device's training rate."""
    batch = settings["batch_size"]
    name, model = _choose_network()
    params: dict[str, Any] = {
        "scope": context.device_scope,
        "batch_size": batch,
        "network": name,
        "cpus_per_rank": len(os.sched_getaffinity(0)) / context.local_world_size,
    }
    best, reason = 0.0, "`workers` is empty, so no rate of loading was measured"
    for workers in settings["workers"]:
        context.set_phase(f"dataloader, {workers} workers")
        try:
            rate = _loading_rate(context, name, workers, batch, settings["seconds"])
        except (RuntimeError, OSError, AssertionError) as error:  # /dev/shm is full, or a worker was killed
            reason = describe_error(error)
            context.report_absent(
                "dataloader.throughput", unit="images/s", status=ERROR, reason=reason, workers=workers, **params
            )
        else:
            best = max(best, rate)
            context.report("dataloader.throughput", rate, unit="images/s", workers=workers, **params)
        context.save()
    if not best:
        context.report_absent("dataloader.sufficiency", unit="1", status=ERROR, reason=reason, **params)
        return
    context.set_phase("dataloader, training")
    sufficiency = best / _training_rate(context, name, model, batch)
    context.report("dataloader.sufficiency", sufficiency, unit="1", **params)


def _choose_network() -> tuple[str, nn.Module]:
    """Return name and network: ResNet-18, or the small `convnet` if torchvision is missing or does not fit torch."""
    try:
        return "resnet18", build_network("resnet18")
    except CannotMeasureError:
        return "convnet", build_network("convnet")


def _loading_rate(context: Context, name: str, workers: int, batch: int, seconds: float) -> float:
    """Return the images per second that reach this rank's device while all ranks of the host load images."""
    images, pinned = load(name, []), context.device.type == "cuda"
    loader = DataLoader(
        AugmentedImages(images.train, images.train_classes),
        batch_sampler=EndlessBatches(len(images.train), batch),
        num_workers=workers,
        prefetch_factor=PREFETCH if workers else None,
        pin_memory=pinned,
        # Workers are not forked from this process, because it has used CUDA and has threads.
        multiprocessing_context=forkserver(__name__) if workers else None,
        timeout=context.timeout_s if workers else 0,
    )
    count = 0
    try:
        batches = iter(loader)
        next(batches)  # returns only after the workers have started
    finally:
        # After an error too, because the other ranks wait at this barrier.
        context.host_barrier(f"dataloader {workers}")
    for _ in range(PREFETCH * workers):
        next(batches)  # not timed: batches that are already prepared would make the rate too high
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or not count:
        pictures, classes = next(batches)
        pictures.to(context.device, non_blocking=pinned)
        classes.to(context.device, non_blocking=pinned)
        count += len(pictures)
    context.synchronize()
    return count / (time.perf_counter() - began)


def forkserver(module: str) -> Any:
    """Return a multiprocessing context that forks workers from a server process, which imports `module` once for all workers."""
    if len(os.fsencode(tempfile.gettempdir())) > MAX_TEMPORARY:
        # multiprocessing keeps its directory for sockets, so only the first call in a process creates one.
        before, tempfile.tempdir = tempfile.tempdir, SHM
        try:
            multiprocessing.util.get_temp_dir()
        finally:
            tempfile.tempdir = before
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([module])
    return server


def _training_rate(context: Context, name: str, model: nn.Module, batch: int) -> float:
    """Return this rank's images per second in training, while all ranks of the host train. The images are on the device."""
    images, device = load(name, []), context.device
    model = model.to(device)
    pictures, classes = images.train.to(device), images.train_classes.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss() -> torch.Tensor:
        indices = torch.randint(len(pictures), (batch,), device=device)
        return nn.functional.cross_entropy(model(normalize(pictures[indices])), classes[indices])

    context.host_barrier("dataloader training")
    steps = TRAINING_STEPS if device.type == "cuda" else CPU_TRAINING_STEPS
    times = context.time(lambda: train_step(context, optimizer, loss, collective=False), steps)
    return batch / statistics.median_high(times)
