"""Transformer blocks sharded by FSDP2: step time, tokens a second, model FLOP utilization, memory.

Pre-norm blocks with causal attention and an MLP of four widths, parameters in fp32, computed in bf16, AdamW. Model FLOPs of a
token, forward and backward: 6·N for the N weights that multiply (12·width² a layer, and the head; the embedding only looks
up), and 6·layers·width·sequence for the attention, the causal half of 12. Utilization is against the ranks' own bf16 matrix
product, measured right before: no data sheet is needed, and a slow GPU does not look like bad sharding.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from typing import Any

import torch
from torch import nn

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.training import CannotMeasureError, attempt, log, tell_absent
from agent.sampling.statistics import summarize
from schemas.records import ERROR, UNSUPPORTED

VOCABULARY = 1024
GEMM_SIZE, GEMM_CALLS = 8192, 100
WARM_UP = 3
ACTIVATION_BYTES = 34
"""Kept for the backward pass, of a token, a layer and a unit of width, in bf16 (Korthikanti et al. 2022, equation 2)."""
STATE_BYTES = 16
"""Of a parameter: fp32 itself, its gradient, and AdamW's two moments."""


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States (N, sequence, width)."""
        batch, sequence, width = states.shape
        queries, keys, values = (
            part.view(batch, sequence, self._heads, -1).transpose(1, 2)
            for part in self.inward(self.norms[0](states)).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.outward(seen.transpose(1, 2).reshape(batch, sequence, width))
        result: torch.Tensor = states + self.mlp(self.norms[1](states))
        return result


class Transformer(nn.Module):
    """Predicts the next token."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss on tokens (N, sequence + 1)."""
        states = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            states = block(states)
        scores = self.head(self.norm(states)).flatten(0, 1).float()
        return nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports step time, tokens and FLOPs a second, how the loss fell; on a GPU utilization and each device's memory."""
    try:
        _measure(context, settings)
    except CannotMeasureError as problem:
        tell_absent(context, "transformer", problem)
    finally:
        gc.collect()


def _measure(context: Context, settings: dict[str, Any]) -> None:
    peak = context.total(_gemm_rate(context)) / context.world_size if context.kind == "gpu" else 0.0
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)
    settings = {**settings, "layers": _layers(context, settings)}
    model, flops = attempt(context, lambda: _sharded(context, settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True if context.device.type == "cuda" else None)
    rows = tokens(context, int(settings["batch_size"]), int(settings["sequence"]))
    losses: list[torch.Tensor] = []

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = model(rows)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    context.phase("transformer steps")
    try:  # what goes wrong in here goes wrong between ranks: they cannot agree on it any more
        with context.heart.together():
            times = context.time(step, int(settings["steps"]), warm_up=WARM_UP)
    except torch.cuda.OutOfMemoryError:
        log(torch.cuda.memory_summary(context.device, abbreviated=True))
        raise
    _report(context, settings, times, flops, peak)
    first, last = context.total(float(losses[0])), context.total(float(losses[-1]))
    if context.speaks_for_world:
        params = _params(context, settings)
        context.measured("transformer.loss_ratio", last / first, unit="1", scope=context.world_scope, **params)


def _report(context: Context, settings: dict[str, Any], times: list[float], flops: float, peak: float) -> None:
    """`flops` a token; `peak` FLOP/s of a device."""
    params = _params(context, settings)
    seconds = summarize(context.slowest(times))
    if context.device.type == "cuda":
        most = torch.cuda.max_memory_allocated(context.device)
        context.measured("transformer.memory_peak", most, unit="B", scope=context.device_scope, **params)
    if not context.speaks_for_world:
        return
    tokens = int(settings["batch_size"]) * int(settings["sequence"]) * context.world_size / seconds.p50
    params["scope"] = context.world_scope
    context.measured("transformer.step_time", seconds.p50, unit="s", samples=seconds, **params)
    context.measured("transformer.throughput", tokens, unit="tokens/s", **params)
    context.measured("transformer.flops", tokens * flops, unit="FLOP/s", **params)
    if peak:
        share = tokens * flops / context.world_size / peak
        context.measured("transformer.mfu", share, unit="1", peak="measured_gemm", **params)


def _params(context: Context, settings: dict[str, Any]) -> dict[str, Any]:
    sizes = {key: int(settings[key]) for key in ("layers", "width", "heads", "sequence", "batch_size")}
    return {**sizes, "world_size": context.world_size, "dtype": "bf16", "data": "synthetic"}


def _sharded(context: Context, settings: dict[str, Any]) -> tuple[nn.Module, float]:
    """The model, and its FLOPs a token. Nothing in here meets another rank."""
    fsdp = _fsdp()
    layers, width, sequence = (int(settings[key]) for key in ("layers", "width", "sequence"))
    multiplying = 12 * layers * width**2 + width * VOCABULARY
    torch.manual_seed(1)
    with context.device:  # made where it lies: on one CPU core it takes seconds
        model = Transformer(layers, width, int(settings["heads"]))
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fsdp.fully_shard(block, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
    return model, 6.0 * multiplying + 6.0 * layers * width * sequence


def _fsdp() -> Any:
    """The module that has `fully_shard`, which moved in PyTorch 2.6."""
    for name in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "fully_shard"):
            return module
    raise CannotMeasureError(UNSUPPORTED, f"torch {torch.__version__} has no FSDP2")


def _layers(context: Context, settings: dict[str, Any]) -> int:
    """As many layers as were asked for, or as fit into the smallest of the devices: in the middle of a step it is too late.

    Raises CannotMeasureError, on all ranks alike, where not one layer fits.
    """
    wanted = int(settings["layers"])
    if context.device.type != "cuda":
        return wanted
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(context.device)
    fitting = next((layers for layers in range(wanted, 0, -1) if _needed(context, settings, layers) < free), 0)
    layers = context.agree(fitting)[0]
    if not layers:
        needed = _needed(context, settings, 1)
        raise CannotMeasureError(
            ERROR,
            f"one layer needs about {needed / 1e9:.1f} GB; {free / 1e9:.1f} of {total / 1e9:.1f} GB are free here",
        )
    return layers


def _needed(context: Context, settings: dict[str, Any], layers: int) -> float:
    """About how many bytes of a device the training takes."""
    width = int(settings["width"])
    parameters = 12 * layers * width**2 + width * VOCABULARY
    kept = ACTIVATION_BYTES * layers * width * int(settings["batch_size"]) * int(settings["sequence"])
    return kept + 4 * parameters * (1 + STATE_BYTES / 4 / context.world_size)  # it is made whole, then sharded


def _gemm_rate(context: Context) -> float:
    """FLOP/s of this device in a bf16 matrix product, all devices at it at once."""
    factor = torch.randn(GEMM_SIZE, GEMM_SIZE, device=context.device, dtype=torch.bfloat16)
    times = context.time(lambda: torch.mm(factor, factor), GEMM_CALLS, warm_up=10)
    return 2 * GEMM_SIZE**3 / statistics.median(times)


def tokens(context: Context, batch: int, sequence: int) -> torch.Tensor:
    """Rows (batch, sequence + 1) that begin anywhere and follow one rule, 5·t + 3, which can be learnt."""
    generator = torch.Generator().manual_seed(context.rank)
    rows = [torch.randint(VOCABULARY, (batch,), generator=generator)]
    for _ in range(sequence):
        rows.append((5 * rows[-1] + 3) % VOCABULARY)
    return torch.stack(rows, dim=1).to(context.device)
