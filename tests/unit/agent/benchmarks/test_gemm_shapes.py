"""Test the benchmark `gemm_shapes`, which multiplies matrices in the shapes of language models and counts wrong products.

Also test that a criteria pack lists the same missing data types for `gemm` and `gemm_shapes`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.compute import gemm_shapes
from agent.sampling.statistics import SampleSeries
from fleet.judge.criteria import read_pack
from schemas.benchmarks.hardware import HARDWARE
from tests.unit.agent.benchmarks.test_measuring import context

SETTINGS: dict[str, Any] = {"shapes": ["32x128x64"], "precision": 0.1, "seconds": 0.01}
PACKS = Path(gemm_shapes.__file__).parents[3] / "fleet/judge/packs"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_products_are_counted_and_correct_products_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, is_wrong: bool
) -> None:
    def make_wrong(name: str) -> None:
        multiply = getattr(torch, name)

        def multiply_wrong(*factors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            multiply(*factors, out=out)
            out[3, 5] += 64
            return out

        monkeypatch.setattr(torch, name, multiply_wrong)

    if is_wrong:
        make_wrong("_int_mm" if dtype == "int8" else "matmul")
    rank = context(tmp_path)
    gemm_shapes.run(rank, {**SETTINGS, "dtypes": [dtype]})
    reported = {item.name: item for item in rank.observations}
    assert {item.status for item in reported.values()} == {"measured"}
    assert reported["gemm_shapes.wrong_products"].value == (10 if is_wrong else 0)
    assert reported["gemm_shapes.wrong_products"].params["checked"] == 10


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("shape", [(32, 8192, 256), (17, 48, 4096), (256, 7, 64)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_correct_product_of_any_shape_is_not_counted(dtype: str, shape: tuple[int, int, int], seed: int) -> None:
    multiply, count_wrong = gemm_shapes.build(dtype, *shape, torch.device("cpu"), seed)
    multiply()
    assert count_wrong() == 0


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("change", ["sign", "zero", "double", "NaN"])
def test_a_single_wrong_element_of_a_long_row_is_found(dtype: str, change: str) -> None:
    """With one checksum for the whole row (8192 elements), an element that is 0 or doubled would be tolerated in bf16."""
    multiply, count_wrong = gemm_shapes.build(dtype, 32, 8192, 256, torch.device("cpu"), seed=3)
    product = multiply()
    root_mean_square = product.double().square().mean().sqrt()
    rows = [*range(0, 32, 3)]
    for row in rows:
        column = int((product[row].double().abs() > root_mean_square).nonzero()[row * 50])
        if change == "NaN" and dtype != "int8":
            product[row, column] = float("nan")
        else:
            product[row, column] *= {"sign": -1, "zero": 0, "double": 2, "NaN": 3}[change]
    assert count_wrong() == len(rows)


@pytest.mark.parametrize("wrong_at", [0, 1, 12])
def test_last_bits_of_products_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_at: int) -> None:
    """Product `wrong_at` has a wrong last bit. Product 0 is the first, products 1 to 5 are timed, products 6 to 13 follow."""
    build = gemm_shapes.build

    def build_wrong(*arguments: Any, **options: Any) -> Any:
        multiply, count_wrong = build(*arguments, **options)
        calls = iter(range(1 << 30))

        def multiply_wrongly() -> torch.Tensor:
            product = multiply()
            if next(calls) == wrong_at:
                product.view(torch.int32)[3, 5] ^= 1
            return product

        return multiply_wrongly, count_wrong

    monkeypatch.setattr(gemm_shapes, "build", build_wrong)
    rank = context(tmp_path)
    times = [1e-3] * 6
    monkeypatch.setattr(
        rank, "sample", lambda multiply, **_: [multiply() for _ in range(5)] and SampleSeries(seconds=times)
    )
    gemm_shapes.run(rank, {**SETTINGS, "dtypes": ["fp32"]})
    (count,) = (item.value for item in rank.observations if item.name == "gemm_shapes.wrong_products")
    # The last timed product (5) and products 6 to 13 are compared with product 0. If product 0 is wrong, all 9 differ from it and
    # count as wrong. Product 1 is not compared.
    assert count == {0: 9, 1: 0, 12: 1}[wrong_at]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_product_is_reported_even_if_the_device_fails_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """If no product was wrong before the failure, the number of wrong products is unknown: its status is `error`."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    build = gemm_shapes.build
    monkeypatch.setattr(
        gemm_shapes, "build", lambda *arguments, **options: (build(*arguments, **options)[0], lambda: int(is_wrong))
    )
    rank = context(tmp_path)
    monkeypatch.setattr(rank, "sample", fail)
    gemm_shapes.run(rank, {**SETTINGS, "dtypes": ["fp32"]})
    reported = {item.name: item.value if item.value is not None else item.status for item in rank.observations}
    assert reported == {
        "gemm_shapes.wrong_products": 1 if is_wrong else "error",
        "gemm_shapes.throughput": "error",
    }


def test_packs_list_the_same_lacking_data_types_for_gemm_and_gemm_shapes() -> None:
    measured = {*HARDWARE["gemm_shapes"].settings["dtypes"]}
    packs = [read_pack(path.stem) for path in PACKS.glob("*.yml")]
    lacking = [pack for pack in packs if measured & {*pack.lacks.get("gemm.throughput", {}).get("dtype", ())}]
    assert lacking
    for pack in lacking:
        expected = measured & {*pack.lacks["gemm.throughput"]["dtype"]}
        for name in ("throughput", "wrong_products"):
            assert {*pack.lacks[f"gemm_shapes.{name}"]["dtype"]} == expected, pack
