"""Training steps of ResNet-18 in several precisions, memory layouts and batch sizes, eager and compiled.

DDP, CIFAR-sized images on the device, no word between device and host in the loop. The compiled variant is the best loop we
know how to write: bf16, channels last, torch.compile, and on a GPU the whole step in one CUDA graph.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.datasets import SYNTHETIC, load
from agent.benchmarks.training.training import CannotMeasureError, attempt, captured, network, normalize, tell_absent
from agent.sampling.statistics import Series
from schemas.records import ERROR, UNSUPPORTED

BUCKET_MB = 10
"""Of the 45 MB of gradients: the first bucket's all_reduce begins early in the backward pass, and the last one is short."""
WARM_UP = 11
"""Steps before the capture: DDP looks at its own times in the first ten, which a graph must not hold."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the steps are computed. `float32` means PyTorch's defaults: on a GPU convolutions in TF32."""

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
    """Bytes in, loss out: in one module, so that a compiler can fuse the edges too."""

    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self._channels_last = variant.channels_last
        self.network = network("resnet18")
        if variant.channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Loss of images (N, 3, 32, 32), or (N, 32, 32, 3) where channels are last."""
        pictures = normalize(images.permute(0, 3, 1, 2) if self._channels_last else images)
        return nn.functional.cross_entropy(self.network(pictures), classes)


class Loop:
    """Steps of one variant at one batch size."""

    def __init__(self, context: Context, variant: Variant, batch: int) -> None:
        device = context.device
        torch.manual_seed(1)
        images = load("resnet18", [])
        train = images.train.permute(0, 2, 3, 1).contiguous() if variant.channels_last else images.train
        self._images, self._classes = train.to(device), images.train_classes.to(device)
        self._variant, self._batch, self._device = variant, batch, device
        self.module: nn.Module = Classifier(variant).to(device)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9, fused=True)
        self._scaler = torch.amp.GradScaler(device.type, enabled=variant.dtype == torch.float16)
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def loss(self) -> torch.Tensor:
        """Loss of a batch drawn on the device."""
        chosen = torch.randint(len(self._images), (self._batch,), device=self._device)
        mixed = self._variant.dtype != torch.float32
        with torch.autocast(self._device.type, dtype=self._variant.dtype if mixed else None, enabled=mixed):
            loss: torch.Tensor = self.module(self._images[chosen], self._classes[chosen])
        return loss

    def step(self) -> None:
        """Forward, backward, update; whether the loss is a number stays on the device."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.finite.logical_and_(loss.detach().isfinite())

    def alone(self) -> None:
        """A step that meets no other rank: what memory or the precision does not allow comes out here."""
        self._scaler.scale(self.loss()).backward()  # type: ignore[no-untyped-call]
        self._optimizer.zero_grad(set_to_none=True)

    def join(self) -> None:
        """From here on the ranks train together."""
        # A graph cannot hold work of the default stream, and DDP's gradients belong to the stream in which it was made.
        beside = self._variant.compiled and self._device.type == "cuda"
        with torch.cuda.stream(cuda_stream(self._device)) if beside else contextlib.nullcontext():
            self.module = self._data_parallel()
        if beside:
            torch.cuda.synchronize(self._device)

    def _data_parallel(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            self.module,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            broadcast_buffers=False,
            bucket_cap_mb=BUCKET_MB,
            gradient_as_bucket_view=True,
            static_graph=not self._variant.compiled,  # the compiler cuts the graph at DDP's buckets itself
        )

    def compile(self) -> None:
        """Compiles forward and backward. Raises CannotMeasureError."""
        torch._dynamo.reset()
        self.module = torch.compile(self.module, dynamic=False)  # type: ignore[assignment]
        try:
            self.loss()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - no C compiler, no Triton, a GPU too new: each raises its own
            reason = f"torch.compile does not work here: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
            raise CannotMeasureError(UNSUPPORTED, reason) from None


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports images a second of all ranks, and whether the loss stayed a number, of each variant at each batch size."""
    cases = [(name, batch) for name in settings["variants"] for batch in settings["batch_sizes"]]
    cases += [(name, batch) for name in settings["compiled_variants"] for batch in settings["compiled_batch_sizes"]]
    for name, batch in cases:
        context.phase(f"variants {name} {batch}")
        try:
            with _searching_for_kernels(name in settings["compiled_variants"]):
                _measure(context, name, int(batch), int(settings["steps"]))
        except CannotMeasureError as problem:
            tell_absent(context, "variants", problem, variant=name, batch_size=batch)
        gc.collect()
        if context.kind == "gpu":
            torch.cuda.empty_cache()
        context.save()


def _measure(context: Context, name: str, batch: int, steps: int) -> None:
    if name not in VARIANTS:
        raise CannotMeasureError(ERROR, f"no such variant; there are {', '.join(VARIANTS)}")
    variant = VARIANTS[name]
    loop = _ready(context, variant, batch)
    graph = captured(context, loop.step, WARM_UP) if variant.compiled else None
    if variant.compiled and context.device.type == "cuda" and graph is None:
        loop = _ready(context, variant, batch)  # DDP was left in the middle of a step
    times = context.time(graph.replay if graph else loop.step, steps, warm_up=3 if context.kind == "gpu" else 1)
    slowest = context.slowest(times)
    finite = context.total(float(~loop.finite)) == 0
    if not context.speaks_for_world:
        return
    params: dict[str, Any] = {
        "variant": name,
        "batch_size": batch,
        "world_size": context.world_size,
        "data": SYNTHETIC,
        "graphed": graph is not None,
    }
    context.rate(
        "variants.throughput",
        batch * context.world_size,
        Series(seconds=slowest),
        unit="images/s",
        scope=context.world_scope,
        **params,
    )
    context.measured("variants.loss_finite", finite, unit="1", scope=context.world_scope, **params)


def _ready(context: Context, variant: Variant, batch: int) -> Loop:
    """The loop, tried out by each rank alone before the ranks rely on one another."""

    def own() -> Loop:
        loop = Loop(context, variant, batch)
        loop.alone()
        return loop

    loop = attempt(context, own)
    loop.join()
    if variant.compiled:
        attempt(context, loop.compile)
    return loop


@contextlib.contextmanager
def _searching_for_kernels(wanted: bool) -> Iterator[None]:
    """Lets cuDNN try its convolutions in the warm-up and keep the fastest, which takes it seconds."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
