"""Code shared by the training benchmarks: networks, data, training step, gradients, CUDA graphs, evaluation."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agent.benchmarks.runtime.agreement import CannotMeasureError, attempt_on_all_ranks
from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.datasets import LABELS, Images, load
from schemas.records import ERROR, UNSUPPORTED


class ConvNet(nn.Module):
    """Two convolutions and two linear layers, as in Kubeflow's PyTorchJob example (mnist.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(4 * 4 * 50, 500), nn.ReLU(), nn.Linear(500, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return class scores (N, 10) of images (N, 1, 28, 28)."""
        scores: torch.Tensor = self.head(self.features(images))
        return scores


def build_network(name: str) -> nn.Module:
    """Return the network `convnet` or `resnet18`.

    Raises:
        CannotMeasureError: for `resnet18`, if no torchvision fits this torch.
    """
    if name == "convnet":
        return ConvNet()
    try:
        from torchvision.models import resnet18
    except (ImportError, RuntimeError, AttributeError) as error:
        # A torchvision that was built for another version of torch raises one of these errors.
        reason = f"no torchvision that fits torch {torch.__version__}: {' '.join(str(error).split())[:300]}"
        raise CannotMeasureError(UNSUPPORTED, reason) from None
    model: nn.Module = resnet18(num_classes=10)
    return model


def load_model_and_images(context: Context, name: str, directories: Sequence[str]) -> tuple[nn.Module, Images]:
    """Return the network `name` and its images, both on this rank's device.

    If any rank cannot load them, or the hosts have different data sets, all ranks raise CannotMeasureError.
    """

    def load_here() -> tuple[nn.Module, Images]:
        torch.manual_seed(1)
        model, images = build_network(name).to(context.device), load(name, directories)
        on_device = {key: value.to(context.device) for key, value in vars(images).items() if key != "label"}
        return model, Images(label=images.label, **on_device)

    model, images = attempt_on_all_ranks(context, load_here)
    lowest, highest = context.min_max_over_ranks(LABELS.index(images.label))
    if lowest != highest:
        raise CannotMeasureError(
            ERROR,
            f"the hosts have different data, such as {LABELS[lowest]} and {LABELS[highest]}; this host has {images.label}",
        )
    return model, images


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Convert bytes to floats from -1 to 1."""
    return images.float() / 127.5 - 1.0


def data_parallel(context: Context, model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wrap the model in DDP on this rank's device."""
    device_ids = [context.device] if context.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, **options)


def train_step(
    context: Context,
    optimizer: torch.optim.Optimizer,
    forward: Callable[[], torch.Tensor],
    *,
    collective: bool = True,
    synchronize: bool = False,
) -> torch.Tensor:
    """Run forward pass, backward pass and update; return the loss that `forward` computed, detached.

    Args:
        collective: whether the heartbeat counts backward pass and update as a collective. False if the caller already counts
            them, or if they contain no collective.
        synchronize: wait until the device has finished the step.
    """
    optimizer.zero_grad(set_to_none=True)
    loss = forward()
    with context.heartbeat.in_collective() if collective else contextlib.nullcontext():
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if synchronize:
            context.synchronize()
    return loss.detach()


class FlatGradients:
    """Gradients of a model in one buffer; one all_reduce averages them over all ranks.

    Unlike DDP's buckets, the buffer always has the same layout, so the sums are reproducible to the bit.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], world_size: int) -> None:
        self._parameters, self._world_size = list(parameters), world_size
        sizes = [parameter.numel() for parameter in self._parameters]
        self._flat = torch.zeros(sum(sizes), device=self._parameters[0].device)
        for parameter, part in zip(self._parameters, self._flat.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            parameter.grad = part.view_as(parameter)

    def compute(self, loss: torch.Tensor) -> None:
        """Fill the buffer with this rank's gradients, divided by the number of ranks."""
        gradients = torch.autograd.grad(loss / self._world_size, self._parameters)
        torch.cat([gradient.flatten() for gradient in gradients], out=self._flat)

    def all_reduce(self) -> None:
        """Sum the buffers of all ranks. The parameters' `grad` is then the mean gradient of all ranks."""
        dist.all_reduce(self._flat)

    def backward(self, loss: torch.Tensor) -> None:
        """Set the parameters' `grad` to the mean gradient of all ranks."""
        self.compute(loss)
        self.all_reduce()


def capture_graph(context: Context, step: Callable[[], object], warm_up: int) -> torch.cuda.CUDAGraph | None:
    """Capture `step`, collectives included, as a CUDA graph; None on a CPU, or if the capture fails on any rank.

    On a GPU `step` first runs `warm_up` times, on a side stream as PyTorch's notes on CUDA graphs require.
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
        # NCCL's watchdog, a thread of this process, calls CUDA. `thread_local` keeps these calls from ending the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        return graph

    try:
        return attempt_on_all_ranks(context, capture)
    except CannotMeasureError:
        return None  # reported as `graphed=False`; the log has the reason


def evaluate(
    context: Context,
    model: nn.Module,
    images: Images,
    preprocess: Callable[[torch.Tensor], torch.Tensor] = normalize,
) -> tuple[float, float]:
    """Return the accuracy and the mean loss on the test images; each rank evaluates its own share."""
    own = slice(context.rank, None, context.world_size)
    # On a CPU, batches of 100 images fit into its caches, which saves a third of the time.
    batch = 1000 if context.device.type == "cuda" else 100
    correct, loss = torch.zeros((), device=context.device), torch.zeros((), device=context.device)
    model.eval()
    with torch.no_grad():
        batches = (tensor[own].split(batch) for tensor in (images.test, images.test_classes))  # type: ignore[no-untyped-call]
        for pictures, classes in zip(*batches, strict=True):
            scores = model(preprocess(pictures))
            correct += (scores.argmax(1) == classes).sum()
            loss += nn.functional.cross_entropy(scores, classes, reduction="sum")
    count = len(images.test)
    return context.sum_over_ranks(float(correct)) / count, context.sum_over_ranks(float(loss)) / count


def report_losses(context: Context, benchmark: str, losses: Sequence[float], **params: Any) -> None:
    """Report `BENCHMARK.loss_ratio`: the sum of the last loss of every rank, divided by the sum of the first loss of every rank.

    If any loss is not finite, report `BENCHMARK.wrong_losses` instead: the number of such losses on all ranks. Every rank must
    call this function.
    """
    wrong = int(context.sum_over_ranks(sum(not math.isfinite(loss) for loss in losses)))
    first, last = context.sum_over_ranks(losses[0]), context.sum_over_ranks(losses[-1])
    ratio = f"{benchmark}.loss_ratio"
    if not wrong:
        context.report_world({ratio: (last / first, "1")}, **params)
    elif context.is_reporting_rank:
        name = f"{benchmark}.wrong_losses"
        context.report_wrong_data(name, wrong, invalid={ratio: "1"}, scope=context.world_scope, **params)
