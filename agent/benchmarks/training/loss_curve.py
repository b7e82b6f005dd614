"""The loss curve of a short training on each device, compared with the same training in fp64 on a CPU.

A small dense transformer (pre-norm blocks, causal attention, no bias) is trained by SGD with momentum. Weights and data are
generated on the CPU from a seed, so the two trainings begin with equal values and differ only by rounding. The reference needs no
recorded file and no assumption about a GPU: each rank computes it on the CPU. fp32 means IEEE single precision, without TF32.
With bf16, the weights and their updates are in fp32, as in mixed-precision training.

The order of atomic additions varies from run to run, so no operation has them: the embedding is a product with one-hot rows, and
the attention consists of matrix products and a softmax.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR

SEED = 20261128
VOCABULARY = 64
BATCHES = 4
"""Number of different batches, which the steps use in turn."""
RATE, MOMENTUM = 0.05, 0.9
TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report for each dtype the largest relative deviation of a loss from the reference, and how many losses are not finite."""
    context.set_phase("loss_curve reference")
    reference = train(settings, "fp64", torch.device("cpu"))
    context.host_barrier("start")
    for dtype in settings["dtypes"]:
        context.set_phase(f"loss_curve {dtype}")
        common: dict[str, Any] = {
            "unit": "1",
            "scope": context.device_scope,
            "dtype": dtype,
            "steps": settings["steps"],
        }
        try:
            losses = train(settings, dtype, context.device)
        except RuntimeError as error:
            for name in ("deviation", "wrong_losses"):
                context.report_absent(f"loss_curve.{name}", status=ERROR, reason=describe_error(error), **common)
            continue
        wrong = sum(not math.isfinite(loss) for loss in losses)
        context.report("loss_curve.wrong_losses", wrong, **common)
        if wrong:
            reason = f"{wrong} losses are not finite"
            context.report_absent("loss_curve.deviation", status=ERROR, reason=reason, **common)
        else:
            context.report("loss_curve.deviation", largest_deviation(losses, reference), **common)


def largest_deviation(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest |loss - reference| / reference over all steps."""
    return max(abs(loss - expected) / expected for loss, expected in zip(losses, reference, strict=True))


def train(settings: Mapping[str, Any], dtype: str, device: torch.device) -> list[float]:
    """Return the loss of each step. Products are computed in `dtype`. Weights are in fp64 if `dtype` is fp64, else in fp32."""
    generator = torch.Generator().manual_seed(SEED)
    weight_dtype = torch.float64 if dtype == "fp64" else torch.float32
    weights = [
        weight.to(device, weight_dtype).requires_grad_()
        for weight in _initial_weights(settings["layers"], settings["width"], generator)
    ]
    batches = [_make_batch(settings, generator).to(device) for _ in range(BATCHES)]
    velocities = [torch.zeros_like(weight) for weight in weights]
    losses = []
    with _ieee_products():
        for step in range(settings["steps"]):
            loss = compute_loss(weights, batches[step % BATCHES], settings["heads"], TYPES[dtype])
            gradients = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                    velocity.mul_(MOMENTUM).add_(gradient)
                    weight.sub_(velocity, alpha=RATE)
            losses.append(loss.detach())
        return [float(loss) for loss in losses]


def compute_loss(weights: Sequence[torch.Tensor], tokens: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean cross-entropy of predicting each next token. `tokens` has the shape (N, sequence + 1)."""
    embedding, *blocks, head = (weight.to(dtype) for weight in weights)
    states = nn.functional.one_hot(tokens[:, :-1], VOCABULARY).to(dtype) @ embedding
    batch, sequence, width = states.shape
    later = torch.ones(sequence, sequence, dtype=torch.bool, device=states.device).triu(1)
    for inward, outward, up, down in zip(*(blocks[number::4] for number in range(4)), strict=True):
        queries, keys, values = (
            part.view(batch, sequence, heads, -1).transpose(1, 2)
            for part in (_normalized(states) @ inward).chunk(3, dim=-1)
        )
        scores = (queries @ keys.transpose(2, 3) / math.sqrt(width // heads)).masked_fill(later, -math.inf)
        attended = scores.softmax(dim=-1) @ values
        states = states + attended.transpose(1, 2).reshape(states.shape) @ outward
        states = states + nn.functional.gelu(_normalized(states) @ up) @ down
    scores = _normalized(states) @ head
    loss_dtype = torch.promote_types(dtype, torch.float32)
    return nn.functional.cross_entropy(scores.flatten(0, 1).to(loss_dtype), tokens[:, 1:].flatten())


def _normalized(states: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(states, states.shape[-1:])


def _initial_weights(layers: int, width: int, generator: torch.Generator) -> list[torch.Tensor]:
    block = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    shapes = [(VOCABULARY, width), *block * layers, (width, VOCABULARY)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[0]) for shape in shapes]


def _make_batch(settings: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    """Return rows of tokens (batch, sequence + 1). A row starts at a random token; (5·t + 3) mod VOCABULARY follows token t."""
    rows = [torch.randint(VOCABULARY, (settings["batch_size"],), generator=generator)]
    for _ in range(settings["sequence"]):
        rows.append((5 * rows[-1] + 3) % VOCABULARY)
    return torch.stack(rows, dim=1)


@contextlib.contextmanager
def _ieee_products() -> Iterator[None]:
    """Compute fp32 matrix products without TF32, and accumulate bf16 matrix products in fp32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
            before
        )
