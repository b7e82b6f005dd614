"""Data-parallel training of two small networks: whether ranks learn together, how accurately, and how fast.

`resnet18` on CIFAR-10 and the two-convolution `convnet` on Fashion-MNIST, in the form of PyTorch's own examples: DDP,
DistributedSampler, SGD with momentum. The images lie on the device, so that the figure is the device's, not the disk's.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from agent.benchmarks.context import Context, failed, summarize
from agent.benchmarks.datasets import LABELS, Images, load
from schemas.records import ERROR, UNSUPPORTED

UNITS = {
    "throughput": "images/s",
    "step_time": "s",
    "loss": "1",
    "loss_ratio": "1",
    "loss_finite": "1",
    "accuracy": "1",
}
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
    for network in settings["networks"]:
        context.phase(f"training {network}")
        try:
            _train(context, network, settings)
        except CannotMeasureError as problem:
            if context.speaks_for_world:
                for kind, unit in UNITS.items():
                    context.absent(
                        f"training.{kind}",
                        unit=unit,
                        scope=context.world_scope,
                        status=problem.status,
                        reason=str(problem),
                        network=network,
                    )
        context.save()


def _train(context: Context, network: str, settings: dict[str, Any]) -> None:
    model, images = _prepare(context, network, settings)
    ddp = DistributedDataParallel(model, device_ids=[context.device] if context.device.type == "cuda" else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=float(settings["learning_rate"]), momentum=0.5)
    sampler: DistributedSampler[int] = DistributedSampler(
        range(len(images.train)),  # type: ignore[arg-type]
        num_replicas=context.world_size,
        rank=context.rank,
        drop_last=True,
    )
    batch, losses, seconds = int(settings["batch_size"]), [], []
    limit = int(settings["max_steps"]) or math.inf
    for epoch in range(int(settings["epochs"])):
        sampler.set_epoch(epoch)
        order = torch.tensor(list(sampler), device=context.device)
        for number, chosen in enumerate(order.split(batch)):  # type: ignore[no-untyped-call]
            if number >= limit or len(chosen) < batch:
                break
            began = time.perf_counter()
            losses.append(_step(ddp, optimizer, images.train[chosen], images.train_classes[chosen]))
            context.synchronize()
            seconds.append(time.perf_counter() - began)
        context.phase(f"training {network} epoch {epoch + 1} of {settings['epochs']}")
    if len(losses) < 2:
        raise CannotMeasureError(ERROR, f"{len(losses)} step of {batch} images on {context.world_size} ranks: too few")
    _report(context, network, images, losses, seconds, batch, _accuracy(context, ddp, images))


def _prepare(context: Context, network: str, settings: dict[str, Any]) -> tuple[nn.Module, Images]:
    """Model and images on the device, or CannotMeasureError on every rank alike where any rank lacks one of them."""
    problem: CannotMeasureError | None = None
    try:
        torch.manual_seed(1)
        model = _network(network).to(context.device)
        images = load(network, settings["data_directories"])
        images = Images(
            label=images.label,
            **{key: value.to(context.device) for key, value in vars(images).items() if key != "label"},
        )
        code = LABELS.index(images.label)
    except CannotMeasureError as caught:
        problem, code = caught, -1
    except (RuntimeError, ValueError, OSError) as caught:
        problem, code = CannotMeasureError(*failed(caught)), -1
    lowest, highest = context.agree(code)
    if problem:
        raise problem
    if lowest < 0:
        raise CannotMeasureError(ERROR, "another rank could not load the network or its data")
    if lowest != highest:
        raise CannotMeasureError(
            ERROR, f"the hosts have different data: {images.label} here, {LABELS[lowest]} and {LABELS[highest]} in all"
        )
    return model, images


def _network(name: str) -> nn.Module:
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


def _step(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(ddp(normalize(images)), classes)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Bytes to floats around zero."""
    return images.float() / 127.5 - 1.0


def _accuracy(context: Context, ddp: nn.Module, images: Images) -> float:
    """Share of test images classified right; each rank looks at its own part."""
    mine = slice(context.rank, None, context.world_size)
    tests, classes = images.test[mine], images.test_classes[mine]
    right = torch.zeros((), device=context.device)
    ddp.eval()
    with torch.no_grad():
        for some, wanted in zip(tests.split(1000), classes.split(1000), strict=True):  # type: ignore[no-untyped-call]
            right += (ddp(normalize(some)).argmax(1) == wanted).sum()
    return context.total(float(right)) / len(images.test)


def _report(
    context: Context,
    network: str,
    images: Images,
    losses: list[torch.Tensor],
    seconds: list[float],
    batch: int,
    accuracy: float,
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
        "network": network,
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
    context.measured("training.accuracy", accuracy, unit="1", **common)
