"""Training of a transformer with a mixture of experts, sharded by FSDP2: step time, tokens per second, model FLOP utilization.

Each block has attention as in `transformer`, and eight experts instead of its MLP. A router chooses two experts for each token.
Each expert has room for `CAPACITY` times the tokens that it gets if the router loads all experts equally. Tokens for which an
expert has no room skip it, as in Switch Transformer (Fedus et al. 2021). So all shapes are fixed: the tokens are gathered by
expert, all experts compute one batched product, and the results are gathered back by token. Experts are sharded like the other
weights; ranks exchange no tokens.

The model FLOPs of a token include both of its experts, even if it skips one of them. Unused room of the experts is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from agent.benchmarks.runtime.context import Context
from agent.benchmarks.training.transformer import (
    ACTIVATION_BYTES,
    STATE_BYTES,
    VOCABULARY,
    Block,
    Shape,
    Transformer,
    fit_to_memory,
    mean_gemm_rate,
    train,
)

EXPERTS, USED = 8, 2
"""Number of experts of a block, and how many of them a token uses."""
CAPACITY = 1.25
"""Room of an expert, relative to the number of its tokens if the router loads all experts equally."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape(Shape):
    """Sizes of the network and of a batch."""

    @property
    def weights(self) -> int:
        """Number of weights in the matrix products that one token takes part in."""
        of_block = (4 + 8 * USED) * self.width**2 + self.width * EXPERTS
        return self.layers * of_block + self.width * VOCABULARY

    def required_bytes(self, world_size: int) -> float:
        """Return an estimate of the device memory that the training needs, in bytes.

        The activations are estimated as three times those of `transformer`.
        """
        activations = 3 * ACTIVATION_BYTES * self.layers * self.width * self.batch_size * self.sequence
        weights = self.layers * (4 + 8 * EXPERTS) * self.width**2
        # Each device first has all weights, because the model is created before it is sharded.
        return activations + 4 * weights * (1 + STATE_BYTES / 4 / world_size)


class Experts(nn.Module):
    """The router and the experts of one block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, 4 * width) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * width, width) / math.sqrt(4 * width))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Transform states (N, sequence, width)."""
        tokens = states.flatten(0, 1)
        count = len(tokens)
        room = math.ceil(CAPACITY * USED * count / EXPERTS)
        shares = self.router(tokens).float().softmax(dim=-1)
        gates, chosen = shares.topk(USED, dim=-1)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        flat = chosen.flatten()  # (count · USED,): the expert of each use; a use is one token with one of its experts
        uses = nn.functional.one_hot(flat, EXPERTS)
        position = (uses.cumsum(0) * uses).sum(-1) - 1  # number of the use among all uses of its expert
        kept = position < room
        # Each expert has `room` slots. All uses without room share one further slot: no expert computes it, the result is zero.
        slot = torch.where(kept, flat * room + position, EXPERTS * room)
        source = torch.full((EXPERTS * room + 1,), count, dtype=torch.int64, device=tokens.device)
        source[slot] = torch.arange(count * USED, device=tokens.device) // USED
        padded = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        gathered = padded.index_select(0, source[:-1]).view(EXPERTS, room, -1)
        computed = nn.functional.gelu(gathered @ self.up) @ self.down
        results = torch.cat([computed.flatten(0, 1), tokens.new_zeros(1, tokens.shape[1])]).index_select(0, slot)
        weighted = results.view(count, USED, -1) * gates.to(results.dtype)[:, :, None]
        result: torch.Tensor = weighted.sum(dim=1).view_as(states)
        return result


class ExpertTransformer(Transformer):
    """The network of `transformer` with experts in place of each MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        for block in self.blocks:
            if isinstance(block, Block):
                block.mlp = nn.Sequential(Experts(shape.width))


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report step time, tokens/s, whether all losses are finite, last loss / first loss, and on GPUs model FLOP utilization."""
    peak = mean_gemm_rate(context)
    shape = fit_to_memory(context, ExpertShape.from_settings(settings))
    times, losses = train(context, shape, lambda: ExpertTransformer(shape), settings["steps"])
    finite = context.sum_over_ranks(float(not all(map(math.isfinite, losses)))) == 0
    first, last = context.sum_over_ranks(losses[0]), context.sum_over_ranks(losses[-1])
    tokens = shape.batch_size * shape.sequence * context.world_size / times.p50
    params = asdict(shape) | {"world_size": context.world_size, "dtype": "bf16"}
    context.report_world(
        {
            "mixture_of_experts.step_time": (times, "s"),
            "mixture_of_experts.throughput": (tokens, "tokens/s"),
            "mixture_of_experts.loss_finite": (finite, "1"),
            "mixture_of_experts.loss_ratio": (last / first, "1"),
        },
        **params,
    )
    if peak:
        utilization = tokens * shape.flops_per_token / context.world_size / peak
        context.report_world({"mixture_of_experts.mfu": (utilization, "1")}, peak="measured_gemm", **params)
