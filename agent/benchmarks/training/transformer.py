"""Training of a transformer sharded by FSDP2: step time, tokens per second, model FLOP utilization, memory.

Pre-norm blocks with causal attention and an MLP of four times the width; parameters in fp32, computation in bf16, AdamW.

Model FLOPs per token, forward and backward: 6·N for the N weights in matrix products (12·width² per layer, and the head; the
embedding is only a look-up), plus 6·layers·width·sequence for attention (half of 12, because attention is causal). Utilization is
relative to the bf16 matrix product rate of the same ranks, measured just before the training. So no data sheet is needed, and low
clocks of the GPUs do not look like bad sharding.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from agent.benchmarks.runtime.agreement import CannotMeasureError, attempt_on_all_ranks, log
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.training_loop import report_losses, train_step
from agent.sampling.statistics import summarize
from schemas.records import ERROR, UNSUPPORTED, Samples

VOCABULARY = 1024
GEMM_SIZE, GEMM_CALLS = 8192, 100
WARM_UP = 3
ACTIVATION_BYTES = 34
"""Bytes kept for the backward pass per token, layer and unit of width, in bf16 (Korthikanti et al. 2022, equation 2)."""
STATE_BYTES = 16
"""Bytes per parameter: 4 each for its value, its gradient and AdamW's two moments, all in fp32."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the network and of a batch."""

    layers: int
    width: int
    heads: int
    sequence: int
    batch_size: int

    @classmethod
    def from_settings(cls: type[AnyShape], settings: Mapping[str, Any]) -> AnyShape:
        """Return the shape that a benchmark's settings describe."""
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__})

    @property
    def weights(self) -> int:
        """Number of weights in matrix products."""
        return 12 * self.layers * self.width**2 + self.width * VOCABULARY

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token, forward and backward."""
        return 6.0 * self.weights + 6.0 * self.layers * self.width * self.sequence

    def required_bytes(self, world_size: int) -> float:
        """Return an estimate of the device memory that the training needs, in bytes."""
        activations = ACTIVATION_BYTES * self.layers * self.width * self.batch_size * self.sequence
        # Each device first has all weights, because the model is created before it is sharded.
        return activations + 4 * self.weights * (1 + STATE_BYTES / 4 / world_size)


AnyShape = TypeVar("AnyShape", bound=Shape)


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Transform states (N, sequence, width)."""
        attended = nn.functional.scaled_dot_product_attention(*self.project(states), is_causal=True)
        return self.finish(states, attended)

    def project(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, each (N, heads, sequence, width / heads)."""
        batch, sequence, _ = states.shape
        queries, keys, values = (
            part.view(batch, sequence, self._heads, -1).transpose(1, 2)
            for part in self.inward(self.norms[0](states)).chunk(3, dim=-1)
        )
        return queries, keys, values

    def finish(self, states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the block's result from its input and from the attended values (N, heads, sequence, width / heads)."""
        states = states + self.outward(attended.transpose(1, 2).reshape(states.shape))
        result: torch.Tensor = states + self.mlp(self.norms[1](states))
        return result


class Transformer(nn.Module):
    """A network that predicts the next token of a sequence."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss on tokens (N, sequence + 1)."""
        states = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            states = block(states)
        scores = self.head(self.norm(states)).flatten(0, 1).float()
        return nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report step time, tokens per second, FLOPs per second and loss ratio; on GPUs also utilization and peak memory.

    If losses are not finite, report their number (`transformer.wrong_losses`) instead of the ratio.
    """
    peak = mean_gemm_rate(context)
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    shape = fit_to_memory(context, Shape.from_settings(settings))
    step_times, losses = train(context, shape, lambda: Transformer(shape), settings["steps"])
    params = asdict(shape) | {"world_size": context.world_size, "dtype": "bf16", "data": "synthetic"}
    if context.device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(context.device)
        context.report("transformer.memory_peak", allocated, unit="B", scope=context.device_scope, **params)
    tokens = shape.batch_size * shape.sequence * context.world_size / step_times.p50
    flops = tokens * shape.flops_per_token
    context.report_world(
        {
            "transformer.step_time": (step_times, "s"),
            "transformer.throughput": (tokens, "tokens/s"),
            "transformer.flops": (flops, "FLOP/s"),
        },
        **params,
    )
    report_losses(context, "transformer", losses, **params)
    if peak:
        utilization = flops / context.world_size / peak
        context.report_world({"transformer.mfu": (utilization, "1")}, peak="measured_gemm", **params)


def train(context: Context, shape: Shape, build: Callable[[], Transformer], steps: int) -> tuple[Samples, list[float]]:
    """Train the model that `build` makes, sharded over all ranks.

    Returns:
        The seconds of a step on the slowest rank, without the steps of the warm-up, and this rank's loss in each step.
    """
    model = attempt_on_all_ranks(context, lambda: _shard(context, build))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True if context.device.type == "cuda" else None)
    rows = make_tokens(context, shape)
    losses: list[torch.Tensor] = []

    def step() -> None:
        losses.append(train_step(context, optimizer, lambda: model(rows), collective=False))

    context.set_phase(f"{context.benchmark} steps")
    try:  # without attempt_on_all_ranks, which does not allow collectives; a step contains some
        with context.heartbeat.in_collective():
            times = context.time(step, steps, warm_up=WARM_UP)
    except torch.cuda.OutOfMemoryError:
        log(torch.cuda.memory_summary(context.device, abbreviated=True))
        raise
    return summarize(context.max_over_ranks(times)), [float(loss) for loss in losses]


def _shard(context: Context, build: Callable[[], Transformer]) -> nn.Module:
    """Make a model with `build`, and return it sharded over all ranks. Uses no collective."""
    fsdp = _import_fsdp2()
    torch.manual_seed(1)
    with context.device:  # created on the device: creating it on one CPU core takes seconds
        model = build()
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
    return model


def _import_fsdp2() -> Any:
    """Return the module that has `fully_shard`, which moved in PyTorch 2.6. Raises CannotMeasureError if no module has it."""
    for name in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "fully_shard"):
            return module
    raise CannotMeasureError(UNSUPPORTED, f"torch {torch.__version__} has no FSDP2")


def fit_to_memory(context: Context, wanted: AnyShape) -> AnyShape:
    """Return `wanted`, with fewer layers if not all fit on the device with the least free memory. On CPUs, all layers are kept.

    The layers must fit, because the other ranks would hang if one rank ran out of memory in a step. Raises CannotMeasureError on
    all ranks if a device has too little free memory for one layer.
    """
    if context.device.type != "cuda":
        return wanted
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(context.device)
    shapes = [replace(wanted, layers=layers) for layers in range(wanted.layers, 0, -1)]
    fitting = next((shape.layers for shape in shapes if shape.required_bytes(context.world_size) < free), 0)
    layers = context.min_max_over_ranks(fitting)[0]
    if not layers:
        required = replace(wanted, layers=1).required_bytes(context.world_size)
        raise CannotMeasureError(
            ERROR,
            f"one layer needs about {required / 1e9:.1f} GB, for which at least one device has too little free memory; "
            f"{free / 1e9:.1f} of {total / 1e9:.1f} GB are free on this device",
        )
    return replace(wanted, layers=layers)


def mean_gemm_rate(context: Context) -> float:
    """Return the mean FLOP/s of a device in bf16 matrix products, which all ranks measure at about the same time; 0 on CPUs."""
    if context.kind != "gpu":
        return 0.0
    factor = torch.randn(GEMM_SIZE, GEMM_SIZE, device=context.device, dtype=torch.bfloat16)
    times = context.time(lambda: torch.mm(factor, factor), GEMM_CALLS, warm_up=10)
    return context.sum_over_ranks(2 * GEMM_SIZE**3 / statistics.median(times)) / context.world_size


def make_tokens(context: Context, shape: Shape) -> torch.Tensor:
    """Return rows of tokens (batch, sequence + 1). A row starts with a random token; (5·t + 3) mod VOCABULARY follows token t."""
    generator = torch.Generator().manual_seed(context.rank)
    rows = [torch.randint(VOCABULARY, (shape.batch_size,), generator=generator)]
    for _ in range(shape.sequence):
        rows.append((5 * rows[-1] + 3) % VOCABULARY)
    return torch.stack(rows, dim=1).to(context.device)
