"""The loss curve: rounding changes losses by less than the limits, faults change them by more; NaN losses are counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.training import loss_curve
from agent.benchmarks.training.loss_curve import compute_loss, largest_deviation, train
from fleet.judge.criteria import read_pack
from schemas.catalogue import settings
from schemas.records import Observation
from tests.unit.agent.benchmarks.test_measuring import context

CHOSEN = settings("loss_curve", {"width": 32, "heads": 2, "sequence": 16, "steps": 12})
LIMITS = {
    item.where["dtype"]: float(item.value)  # type: ignore[arg-type]
    for item in read_pack("correctness").criteria
    if item.name == "loss_curve.deviation"
}
"""Data type -> largest deviation that the criteria allow."""


def measure(work: Path, monkeypatch: pytest.MonkeyPatch, fault: Any = None) -> dict[tuple[str, str], Observation]:
    """Return (figure, data type) -> observation. `fault` changes the weights on the device, but not those of the reference."""
    if fault:

        def with_fault(weights: Any, tokens: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
            changed = weights if dtype == torch.float64 else fault(weights)
            return compute_loss(changed, tokens, heads, dtype)

        monkeypatch.setattr(loss_curve, "compute_loss", with_fault)
    measuring = context(work)
    loss_curve.run(measuring, CHOSEN)
    return {(item.name.partition(".")[2], str(item.params["dtype"])): item for item in measuring.observations}


def test_deviation_by_rounding_is_not_zero_and_below_a_third_of_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observations = measure(tmp_path, monkeypatch)
    for dtype in ("fp32", "bf16"):
        deviation = observations["deviation", dtype].value
        assert isinstance(deviation, float)
        assert 0 < deviation < LIMITS[dtype] / 3
        assert observations["wrong_losses", dtype].value == 0


def test_deviation_by_one_lost_row_of_a_weight_is_above_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_row(weights: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = torch.ones(len(weights[-1]), 1)
        kept[5] = 0
        return [*weights[:-1], weights[-1] * kept]

    observations = measure(tmp_path, monkeypatch, lose_row)
    for dtype in ("fp32", "bf16"):
        deviation = observations["deviation", dtype].value
        assert isinstance(deviation, float)
        assert deviation > LIMITS[dtype]


def test_deviation_by_tf32_precision_is_above_the_limit_of_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are rounded to fp16, whose fraction has 10 bits like that of TF32."""
    deviation = measure(tmp_path, monkeypatch, lambda weights: [weight.half().float() for weight in weights])
    assert deviation["deviation", "fp32"].value > LIMITS["fp32"]  # type: ignore[operator]


def test_losses_that_are_not_finite_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observations = measure(tmp_path, monkeypatch, lambda weights: [weights[0] * math.nan, *weights[1:]])
    assert observations["wrong_losses", "bf16"].value == CHOSEN["steps"]
    assert observations["deviation", "bf16"].status == "error"


def test_reference_learns_and_is_the_same_each_time() -> None:
    first, second = (train(CHOSEN, "fp64", torch.device("cpu")) for _ in range(2))
    assert largest_deviation(first, second) == 0
    assert first[-1] < 0.7 * first[0]
