"""Data-parallel training of two small networks: whether ranks learn together, how accurately, and how fast.

`resnet18` on CIFAR-10 and the two-convolution `convnet` on Fashion-MNIST, in the form of PyTorch's own examples: DDP,
DistributedSampler, SGD with momentum, cosine annealing. The images lie on the device, so that the figure is the device's,
not the disk's. The trained model and what is to be known of it stay in the work directory, as examples leave them.

What the other training benchmarks share is here too: the networks, their data, and how ranks agree that one cannot go on.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from agent.benchmarks.runtime.context import Context, cuda_stream, failed
from agent.benchmarks.runtime.datasets import LABELS, Images, load
from agent.sampling.statistics import summarize
from schemas import documents
from schemas.catalogue import outputs
from schemas.records import ERROR, UNSUPPORTED

Result = TypeVar("Result")

EDGE_SHARE = 10
"""The first and the last tenth of the steps give the loss at the beginning and at the end."""


class ConvNet(nn.Module):
    """Two convolutions and two linear layers, as in Kubeflow's PyTorchJob example (mnist.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 4 * 50, 500), nn.ReLU(), nn.Linear(500, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Class scores (N, 10) of images (N, 1, 28, 28)."""
        scores: torch.Tensor = self.head(self.features(images))
        return scores


class CannotMeasureError(Exception):
    """This network cannot be trained here; `status` and the message say why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports throughput, step time, loss and accuracy of each network; one that cannot run leaves the other alone."""
    for name in settings["networks"]:
        context.phase(f"training {name}")
        try:
            _train(context, name, settings)
        except CannotMeasureError as problem:
            tell_absent(context, "training", problem, network=name)
        context.save()


def _train(context: Context, name: str, settings: dict[str, Any]) -> None:
    model, images = prepare(context, name, settings["data_directories"])
    ddp = DistributedDataParallel(model, device_ids=[context.device] if context.device.type == "cuda" else None)
    sampler: DistributedSampler[int] = DistributedSampler(
        range(len(images.train)),  # type: ignore[arg-type]
        num_replicas=context.world_size,
        rank=context.rank,
        drop_last=True,
    )
    batch, epochs = int(settings["batch_size"]), int(settings["epochs"])
    steps = min(len(sampler) // batch, int(settings["max_steps"]) or sys.maxsize)
    if steps * epochs < 2:
        raise CannotMeasureError(
            ERROR, f"{steps} steps of {batch} images on each of {context.world_size} ranks: too few"
        )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=float(settings["learning_rate"]), momentum=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps * epochs)
    losses, seconds = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler), device=context.device)
        for chosen in order.split(batch)[:steps]:  # type: ignore[no-untyped-call]
            began = time.perf_counter()
            loss = _loss(ddp, optimizer, images.train[chosen], images.train_classes[chosen])
            with context.heart.together():  # the gradients are exchanged in the backward pass
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                context.synchronize()
            losses.append(loss.detach())
            seconds.append(time.perf_counter() - began)
            schedule.step()
            if context.is_asked:
                told = {"training.step_time": (seconds[-1], "s"), "training.loss": (float(losses[-1]), "1")}
                context.under_way(told, network=name)
        context.phase(f"training {name} epoch {epoch + 1} of {epochs}")
    right = accuracy(context, ddp, images)
    if context.rank == 0:
        _save(context, model, name, settings, data=images.label, loss=float(losses[-1]), accuracy=right)
    _report(context, name, images, losses, seconds, batch, right)


def attempt(context: Context, work: Callable[[], Result]) -> Result:
    """What `work` returns, or CannotMeasureError on all ranks alike where it fails on any of them.

    `work` is what a rank does by itself: one that failed in the middle of a collective would leave the others in it.
    """
    problem: CannotMeasureError | None = None
    try:
        result = work()
    except CannotMeasureError as caught:
        problem = caught
    except Exception as caught:  # noqa: BLE001 - a compiler may raise anything, and the other ranks must hear of it
        problem = CannotMeasureError(*failed(caught))
    lowest, _ = context.agree(-1 - context.rank if problem else 0)
    if problem:
        log(f"rank {context.rank}: {problem}")
        raise problem
    if lowest < 0:
        raise CannotMeasureError(ERROR, f"rank {-1 - lowest} could not, as its log says")
    return result


def log(line: str) -> None:
    """A line in this rank's log."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def tell_absent(context: Context, benchmark: str, problem: CannotMeasureError, **params: Any) -> None:
    """Says why, for every output of the benchmark with these parameters."""
    for item in {output.name: output for output in outputs(benchmark, context.kind)}.values():
        if item.scope == "device" or context.speaks_for_world:
            scope = context.device_scope if item.scope == "device" else context.world_scope
            context.absent(item.name, unit=item.unit, scope=scope, status=problem.status, reason=str(problem), **params)


def prepare(context: Context, name: str, directories: Sequence[str]) -> tuple[nn.Module, Images]:
    """Model and images on the device, or CannotMeasureError on every rank alike where any rank lacks one of them."""

    def own() -> tuple[nn.Module, Images]:
        torch.manual_seed(1)
        model, images = network(name).to(context.device), load(name, directories)
        on_device = {key: value.to(context.device) for key, value in vars(images).items() if key != "label"}
        return model, Images(label=images.label, **on_device)

    model, images = attempt(context, own)
    lowest, highest = context.agree(LABELS.index(images.label))
    if lowest != highest:
        raise CannotMeasureError(
            ERROR, f"the hosts have different data: {images.label} here, {LABELS[lowest]} and {LABELS[highest]} in all"
        )
    return model, images


def network(name: str) -> nn.Module:
    """`convnet`, or `resnet18` where there is a torchvision that fits. Raises CannotMeasureError."""
    if name == "convnet":
        return ConvNet()
    try:
        from torchvision.models import resnet18
    except (ImportError, RuntimeError, AttributeError) as error:
        # A torchvision built for another torch fails in one of these ways, and it happens on real clusters.
        reason = f"torchvision does not fit torch {torch.__version__}: {' '.join(str(error).split())[:300]}"
        raise CannotMeasureError(UNSUPPORTED, reason) from None
    model: nn.Module = resnet18(num_classes=10)
    return model


def captured(context: Context, step: Callable[[], object], warm_up: int) -> torch.cuda.CUDAGraph | None:
    """`step`, collectives and all, as one CUDA graph; None where it cannot be had: on a CPU, or if any rank fails.

    `step` runs `warm_up` times, on a side stream as PyTorch's notes on CUDA graphs want it.
    """
    if context.device.type != "cuda":
        return None
    side, current = cuda_stream(context.device), torch.cuda.current_stream(context.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    current.wait_stream(side)
    context.synchronize()

    def capture() -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Calls of NCCL's watchdog, a thread of this process, must not spoil the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return graph

    try:
        return attempt(context, capture)
    except CannotMeasureError:
        return None  # `graphed=False` tells it, the log says why


def _save(context: Context, model: nn.Module, name: str, settings: dict[str, Any], **found: Any) -> None:
    """The model's parameters, and a JSON beside them that says where they come from."""
    metadata = {
        "network": name,
        "world_size": context.world_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch": str(torch.__version__),
        **{key: settings[key] for key in ("epochs", "batch_size", "learning_rate", "max_steps")},
        **{key: value for key, value in found.items() if not isinstance(value, float) or math.isfinite(value)},
    }
    try:
        torch.save(model.state_dict(), context.work / f"{name}.pt")
        documents.write_text(context.work / f"{name}.json", json.dumps(metadata, allow_nan=False), durable=False)
    except (OSError, RuntimeError) as error:  # the figures stand, and the other ranks go on
        log(f"{name} could not be saved: {error}")


def _loss(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    return nn.functional.cross_entropy(ddp(normalize(images)), classes)


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Bytes to floats around zero."""
    return images.float() / 127.5 - 1.0


def accuracy(context: Context, model: nn.Module, images: Images) -> float:
    """Share of test images classified right; each rank looks at its own part."""
    mine = slice(context.rank, None, context.world_size)
    tests, classes = images.test[mine], images.test_classes[mine]
    right, many = torch.zeros((), device=context.device), pieces(context)
    model.eval()
    with torch.no_grad():
        for some, wanted in zip(tests.split(many), classes.split(many), strict=True):  # type: ignore[no-untyped-call]
            right += (model(normalize(some)).argmax(1) == wanted).sum()
    return context.total(float(right)) / len(images.test)


def pieces(context: Context) -> int:
    """How many images are classified at once: on a processor as many as its caches hold, which takes two thirds of the time."""
    return 1000 if context.device.type == "cuda" else 100


def _report(
    context: Context,
    name: str,
    images: Images,
    losses: list[torch.Tensor],
    seconds: list[float],
    batch: int,
    right: float,
) -> None:
    edge = max(1, len(losses) // EDGE_SHARE)
    every = torch.stack(losses).double()
    first, last = (context.total(float(part.mean())) / context.world_size for part in (every[:edge], every[-edge:]))
    finite = context.total(float((~every.isfinite()).sum())) == 0
    steps = summarize(context.slowest(seconds[1:]))  # the first step builds kernels and buckets
    if not context.speaks_for_world:
        return
    common: dict[str, Any] = {
        "scope": context.world_scope,
        "network": name,
        "data": images.label,
        "world_size": context.world_size,
        "batch_size": batch,
        "backend": dist.get_backend(),
    }
    context.measured("training.throughput", batch * context.world_size / steps.p50, unit="images/s", **common)
    context.measured("training.step_time", steps.p50, unit="s", samples=steps, **common)
    context.measured("training.loss_finite", finite, unit="1", **common)
    for kind, value in (("loss", last), ("loss_ratio", last / first)):
        if finite:
            context.measured(f"training.{kind}", value, unit="1", **common)
        else:
            reason = f"the loss is not a number: {first} at the beginning, {last} at the end"
            context.absent(f"training.{kind}", unit="1", status=ERROR, reason=reason, **common)
    context.measured("training.accuracy", right, unit="1", **common)
