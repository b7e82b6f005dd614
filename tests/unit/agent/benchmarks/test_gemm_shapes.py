"""Products in the shapes of language models: a wrong one is counted in every type, and GPUs without a type are still accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.compute import gemm_shapes
from fleet.judge.criteria import read_pack
from schemas.benchmarks.hardware import HARDWARE
from tests.unit.agent.benchmarks.test_measuring import context

SETTINGS: dict[str, Any] = {"shapes": ["32x128x64"], "precision": 0.1, "seconds": 0.01}
PACKS = Path(gemm_shapes.__file__).parents[3] / "fleet/judge/packs"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("error", [False, True])
def test_a_wrong_product_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, error: bool) -> None:
    def spoil(name: str) -> None:
        multiply = getattr(torch, name)

        def multiply_wrong(*factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            multiply(*factors, out=out)
            out[3, 5] += 64
            return out

        monkeypatch.setattr(torch, name, multiply_wrong)

    if error:
        spoil("_int_mm" if dtype == "int8" else "matmul")
    rank = context(tmp_path)
    gemm_shapes.run(rank, {**SETTINGS, "dtypes": [dtype]})
    found = {item.name: item for item in rank.observations}
    assert {item.status for item in found.values()} == {"measured"}
    assert found["gemm_shapes.wrong_products"].value == (2 if error else 0)


def test_a_pack_whose_gpu_lacks_a_type_says_so_for_every_shape() -> None:
    measured = {*HARDWARE["gemm_shapes"].settings["dtypes"]}
    packs = [read_pack(path.stem) for path in PACKS.glob("*.yml")]
    lacking = [pack for pack in packs if measured & {*pack.lacks.get("gemm.throughput", {}).get("dtype", ())}]
    assert lacking
    for pack in lacking:
        expected = measured & {*pack.lacks["gemm.throughput"]["dtype"]}
        for name in ("throughput", "wrong_products"):
            assert {*pack.lacks[f"gemm_shapes.{name}"]["dtype"]} == expected, pack
