"""Matrix product rate in the shapes of language models: few rows as when tokens are generated, many as in training.

`gemm` multiplies one large square, which needs little memory bandwidth. A product with few rows reads its whole second factor for
them, so it depends on memory bandwidth, caches and the choice of kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from agent.benchmarks.compute.gemm import DTYPES, TOLERANCE, unsupported_reason
from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR, UNSUPPORTED


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `gemm_shapes.throughput` and `.wrong_products` for each dtype and shape.

    A shape is `MxNxK`: (M, K) by (K, N). A product counts as 2·M·N·K operations, for int8 operations on integers.
    """
    for dtype in settings["dtypes"]:
        reason = unsupported_reason(dtype, context.device)
        for shape in settings["shapes"]:
            context.set_phase(f"gemm_shapes {dtype} {shape}")
            common: dict[str, Any] = {"scope": context.device_scope, "dtype": dtype, "shape": shape}
            try:
                if not reason:
                    _measure(context, settings, dtype, shape, common)
                    continue
                status, why = UNSUPPORTED, reason
            except RuntimeError as error:
                status, why = ERROR, describe_error(error)
            for name, unit in (("throughput", "FLOP/s"), ("wrong_products", "1")):
                context.report_absent(f"gemm_shapes.{name}", unit=unit, status=status, reason=why, **common)
        context.release_memory()


def _measure(context: Context, settings: Mapping[str, Any], dtype: str, shape: str, common: Mapping[str, Any]) -> None:
    rows, columns, inner = map(int, shape.split("x"))
    multiply, count_wrong = build(dtype, rows, columns, inner, context.device, seed=context.rank)
    multiply()
    wrong = int(count_wrong() > 0)
    series = context.sample(multiply, precision=settings["precision"], seconds=settings["seconds"])
    wrong += int(count_wrong() > 0)
    context.report_rate("gemm_shapes.throughput", 2 * rows * columns * inner, series, unit="FLOP/s", **common)
    context.report("gemm_shapes.wrong_products", wrong, unit="1", checked=2, **common)


def build(
    dtype: str, rows: int, columns: int, inner: int, device: torch.device, seed: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], int]]:
    """Return a function that multiplies two random matrices, and one that counts the wrong rows of the last product.

    Freivalds' algorithm checks each row: (A·B)·x must equal A·(B·x), computed in fp64. For int8 the two are equal exactly,
    because all sums are below 2⁵³; for other types they differ by rounding (`gemm.TOLERANCE`). On a GPU torch._int_mm needs at
    least 17 rows.
    """
    generator = torch.Generator(device).manual_seed(seed)
    sizes, signs = (torch.randint(low, 9, (columns, 1), device=device, generator=generator) for low in (1, 0))
    vector = torch.where(signs > 4, sizes, -sizes).double()  # no factor is 0, which would hide its column
    if dtype == "int8":
        left, right = (
            torch.randint(-127, 128, size, device=device, generator=generator, dtype=torch.int8)
            for size in ((rows, inner), (columns, inner))
        )
        right = right.t()  # column-major, as the tensor cores need it
        result = torch.empty(rows, columns, dtype=torch.int32, device=device)

        def multiply() -> torch.Tensor:
            return torch._int_mm(left, right, out=result)
    else:
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
        left, right = (
            torch.randn(size, device=device, generator=generator).to(DTYPES[dtype])
            for size in ((rows, inner), (columns, inner))
        )
        right = right.t()
        scale = torch.ones((), device=device)
        kind = torch.bfloat16 if dtype == "fp8" else DTYPES[dtype]
        result = torch.empty(rows, columns, dtype=kind, device=device)

        def multiply() -> torch.Tensor:
            if dtype == "fp8":
                return torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=kind, out=result)
            return torch.matmul(left, right, out=result)

    def count_wrong() -> int:
        expected = left.double() @ (right.double() @ vector)
        errors = (result.double() @ vector - expected).abs()
        limit = 0.0 if dtype == "int8" else TOLERANCE[dtype] * float(expected.square().mean().sqrt())
        return int((~(errors <= limit)).sum())  # written so that NaN is wrong

    return multiply, count_wrong
