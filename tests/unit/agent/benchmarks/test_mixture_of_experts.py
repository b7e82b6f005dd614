"""Test the mixture of experts: batched results equal those of each token alone, and a full expert takes no more tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agent.benchmarks.training import mixture_of_experts
from agent.benchmarks.training.mixture_of_experts import EXPERTS, Experts, ExpertShape, ExpertTransformer

SHAPE = ExpertShape(layers=2, width=16, heads=2, sequence=8, batch_size=2)


def by_token(experts: Experts, states: torch.Tensor) -> torch.Tensor:
    """Return the same as `experts(states)`, but compute one token after another with the two experts that the router chooses.

    `states` and the result have the shape (N, sequence, width).
    """
    results = []
    for token in states.flatten(0, 1):
        shares, chosen = experts.router(token).softmax(dim=-1).topk(2)
        outputs = [nn.functional.gelu(token @ experts.up[expert]) @ experts.down[expert] for expert in chosen]
        results.append(sum(share * output for share, output in zip(shares / shares.sum(), outputs, strict=True)))
    return torch.stack(results).view_as(states)  # type: ignore[arg-type]


def test_each_token_gets_the_results_of_its_two_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_of_experts, "CAPACITY", float(EXPERTS))  # each expert has room for all tokens
    torch.manual_seed(1)
    experts, states = Experts(16), torch.randn(2, 24, 16, requires_grad=True)
    ours, expected = experts(states), by_token(experts, states)
    torch.testing.assert_close(ours, expected)
    for gradient, right in zip(
        torch.autograd.grad(ours.square().sum(), [states, experts.up, experts.router.weight]),
        torch.autograd.grad(expected.square().sum(), [states, experts.up, experts.router.weight]),
        strict=True,
    ):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-4)


def test_tokens_for_which_an_expert_has_no_room_skip_the_expert() -> None:
    """All 64 tokens are equal, so the router chooses the same 2 of the 8 experts for all of them.

    Each expert has room for 1.25 times an even share of the tokens (`CAPACITY`): 1.25 x 2 x 64 / 8 = 20 tokens. The other 44
    tokens skip both experts, so their results are zero.
    """
    torch.manual_seed(1)
    results = Experts(16)(torch.randn(16).expand(1, 64, 16))[0]
    assert int((results.abs().sum(dim=1) > 0).sum()) == 20
    assert not results[20:].any()


def test_shape_counts_only_the_weights_that_one_token_uses() -> None:
    """Each block has `EXPERTS` experts. A token uses two of them."""
    model = ExpertTransformer(SHAPE)
    of_experts = sum(part.up.numel() + part.down.numel() for part in model.modules() if isinstance(part, Experts))
    others = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    assert SHAPE.weights == others + of_experts * 2 / EXPERTS
