"""Training steps of ResNet-18 in several precisions, memory layouts and batch sizes, eager and compiled.

The training uses DDP. Its CIFAR-sized images are in device memory, and the host does not wait for the device inside the loop. The
compiled variant uses bf16, channels last and torch.compile. On a GPU its whole step is one CUDA graph, unless the capture fails.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from agent.benchmarks.runtime.agreement import CannotMeasureError, attempt_on_all_ranks, report_absent_outputs
from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.datasets import SYNTHETIC, load
from agent.benchmarks.runtime.timing import cuda_event
from agent.benchmarks.training.training_loop import build_network, capture_graph, data_parallel, normalize
from agent.sampling.statistics import summarize
from schemas.records import ERROR, UNSUPPORTED

BUCKET_MB = 10
"""DDP's bucket size; ResNet-18 has 45 MB of gradients. Small buckets let the first all_reduce start early and make the last one
short."""
WARM_UP = 11
"""Number of steps before the graph is captured: DDP times its first ten steps, and a graph must not contain this timing."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the steps are computed. `float32` means PyTorch's defaults: on a GPU convolutions use TF32."""

    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    compiled: bool = False


VARIANTS = {
    "fp32": Variant(),
    "bf16": Variant(dtype=torch.bfloat16),
    "fp16": Variant(dtype=torch.float16),
    "bf16_channels_last": Variant(dtype=torch.bfloat16, channels_last=True),
    "bf16_channels_last_compiled": Variant(dtype=torch.bfloat16, channels_last=True, compiled=True),
}


class Classifier(nn.Module):
    """Network, normalization and loss in one module, so that a compiler can fuse the first and last operations too."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self._channels_last = variant.channels_last
        self.network = build_network("resnet18")
        if variant.channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Return the loss of images (N, 3, 32, 32), or (N, 32, 32, 3) if channels are last."""
        pictures = normalize(images.permute(0, 3, 1, 2) if self._channels_last else images)
        return nn.functional.cross_entropy(self.network(pictures), classes)


class VariantTraining:
    """Training steps of one variant at one batch size."""

    def __init__(self, context: Context, variant: Variant, batch: int) -> None:
        device = context.device
        torch.manual_seed(1)
        images = load("resnet18", [])
        train = images.train.permute(0, 2, 3, 1).contiguous() if variant.channels_last else images.train
        self._context = context
        self._images, self._classes = train.to(device), images.train_classes.to(device)
        self._variant, self._batch, self._device = variant, batch, device
        self.module: nn.Module = Classifier(variant).to(device)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9, fused=True)
        self._scaler = torch.amp.GradScaler(device.type, enabled=variant.dtype == torch.float16)
        self.finite = torch.ones((), dtype=torch.bool, device=device)
        """Whether all losses so far are finite; stays on the device."""

    def loss(self) -> torch.Tensor:
        """Return the loss of a batch drawn on the device."""
        indices = torch.randint(len(self._images), (self._batch,), device=self._device)
        mixed = self._variant.dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._variant.dtype if mixed else None, enabled=mixed):
            loss: torch.Tensor = self.module(self._images[indices], self._classes[indices])
        return loss

    def step(self) -> None:
        """Run forward pass, backward pass and update."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.finite.logical_and_(loss.detach().isfinite())

    def step_alone(self) -> None:
        """Run forward and backward pass without other ranks. Fails if the device lacks memory or the variant's dtype."""
        self._scaler.scale(self.loss()).backward()  # type: ignore[no-untyped-call]
        self._optimizer.zero_grad(set_to_none=True)

    def join(self) -> None:
        """Wrap the module in DDP, so that from here on the ranks train together."""
        # A CUDA graph must not contain work of the default stream, and DDP uses the stream in which it was created.
        side_stream = cuda_stream(self._device) if self._variant.compiled and self._device.type == "cuda" else None
        with torch.cuda.stream(side_stream) if side_stream else contextlib.nullcontext():
            self.module = data_parallel(
                self._context,
                self.module,
                broadcast_buffers=False,
                bucket_cap_mb=BUCKET_MB,
                gradient_as_bucket_view=True,
                static_graph=not self._variant.compiled,  # not with torch.compile, which itself splits its graph at DDP's buckets
            )
        if side_stream:
            done = cuda_event()
            done.record(side_stream)
            self._context.wait_for(done)

    def compile(self) -> None:
        """Compile the module and run its forward pass.

        Raises:
            CannotMeasureError: torch.compile does not work on this host.
            torch.cuda.OutOfMemoryError: the memory of the device is too small.
        """
        torch._dynamo.reset()
        self.module = torch.compile(self.module, dynamic=False)  # type: ignore[assignment]
        try:
            self.loss()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the type varies: no C compiler, no Triton, a new GPU
            reason = f"torch.compile does not work here: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            raise CannotMeasureError(UNSUPPORTED, reason) from None


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report images per second of all ranks, and whether the loss stayed finite, for each variant and batch size."""
    cases = [(name, batch) for name in settings["variants"] for batch in settings["batch_sizes"]]
    cases += [(name, batch) for name in settings["compiled_variants"] for batch in settings["compiled_batch_sizes"]]
    for name, batch in cases:
        context.set_phase(f"variants {name} {batch}")
        try:
            with _cudnn_autotuning(name in settings["compiled_variants"]):
                _measure(context, name, batch, settings["steps"])
        except CannotMeasureError as problem:
            report_absent_outputs(context, "variants", problem, variant=name, batch_size=batch)
        gc.collect()
        if context.kind == "gpu":
            torch.cuda.empty_cache()
        context.save()


def _measure(context: Context, name: str, batch: int, steps: int) -> None:
    if name not in VARIANTS:
        raise CannotMeasureError(ERROR, f"unknown variant {name}; known: {', '.join(VARIANTS)}")
    variant = VARIANTS[name]
    training = _prepare(context, variant, batch)
    graph = capture_graph(context, training.step, WARM_UP) if variant.compiled else None
    if variant.compiled and context.device.type == "cuda" and graph is None:
        training = _prepare(context, variant, batch)  # the failed capture left DDP in the middle of a step
    step = graph.replay if graph else training.step
    times = context.max_over_ranks(context.time(step, steps, warm_up=3 if context.kind == "gpu" else 1))
    finite = context.sum_over_ranks(float(~training.finite)) == 0
    images = batch * context.world_size
    context.report_world(
        {
            "variants.throughput": (summarize([images / seconds for seconds in times]), "images/s"),
            "variants.loss_finite": (finite, "1"),
        },
        variant=name,
        batch_size=batch,
        world_size=context.world_size,
        data=SYNTHETIC,
        graphed=graph is not None,
    )


def _prepare(context: Context, variant: Variant, batch: int) -> VariantTraining:
    """Return the training. Each rank first runs a step alone: an error in a step with collectives would block the other ranks."""

    def build() -> VariantTraining:
        training = VariantTraining(context, variant, batch)
        training.step_alone()
        return training

    training = attempt_on_all_ranks(context, build)
    training.join()
    if variant.compiled:
        attempt_on_all_ranks(context, training.compile)
    return training


@contextlib.contextmanager
def _cudnn_autotuning(enabled: bool) -> Iterator[None]:
    """Enable or disable cuDNN's search for the fastest convolution algorithm. The search takes seconds."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
