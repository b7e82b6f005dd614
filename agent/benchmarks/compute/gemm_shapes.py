"""Rate of matrix products in the shapes of language models: few rows, as in token generation, and many rows, as in training.

`gemm` multiplies large square matrices, which needs little memory bandwidth. A product with few rows still reads its whole second
factor, so its rate depends on memory bandwidth, caches and the choice of kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from agent.benchmarks.compute.gemm import DTYPES, TOLERANCE, unsupported_reason
from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR, UNSUPPORTED

GROUP = 16
"""Columns that one checksum covers. One element contributes about 25 % of a checksum of 16 elements (1/√16). It would contribute
only 0.6 % of a checksum of a whole row of 28672 elements. That is less than the tolerated error for bf16 and fp8 (4 %), so one
wrong element in such a row could remain undetected."""
TOLERANCE_FACTOR = 2
"""Tolerated error of a checksum, as a multiple of `gemm.TOLERANCE`. It is above 1, because the largest of many errors grows with
their number. A product here has up to 15 million checksums (8192 rows × 28672 columns / GROUP); a product in `gemm` has 33 000
(8192 rows × 4). The largest of 33 000 normally distributed errors is typically 4.3 standard deviations. The largest of 15 million
is 5.5.

For bf16 the tolerated error is 4 % of the root mean square of the checksums. That is far more than rounding can cause: each
element is rounded by at most 2⁻⁸ of its value. Even if the rounding errors of all 16 elements add up, a typical checksum changes
by only 1.1 % of that root mean square."""
REPEATED = 8
"""Number of further products, after the timed ones, that are compared with the first product."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `gemm_shapes.throughput` and `.wrong_products` for each dtype and shape.

    The first product is checked against its factors. The last timed product and REPEATED further ones must be bit-identical to
    the first, as cuBLAS guarantees for one stream (NVIDIA, cuBLAS documentation, "Results reproducibility").

    The shape `MxNxK` is the product of a matrix (M, K) and a matrix (K, N). A product counts as 2·M·N·K operations (for int8:
    integer operations).
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
            for name, unit in (("gemm_shapes.throughput", "FLOP/s"), ("gemm_shapes.wrong_products", "1")):
                if not context.has_reported(name, context.device_scope, {"dtype": dtype, "shape": shape}):
                    context.report_absent(name, unit=unit, status=status, reason=why, **common)
        context.release_memory()


def _measure(context: Context, settings: Mapping[str, Any], dtype: str, shape: str, common: Mapping[str, Any]) -> None:
    rows, columns, inner = map(int, shape.split("x"))
    wrong, checked = 0, 0
    try:
        multiply, count_wrong_rows = build(dtype, rows, columns, inner, context.device, seed=context.rank)
        product = multiply()
        first = product.clone()
        wrong, checked = int(count_wrong_rows() > 0), 1
        series = context.sample(multiply, precision=settings["precision"], seconds=settings["seconds"])
        differing = torch.zeros((), dtype=torch.int64, device=context.device)
        for number in range(1 + REPEATED):
            product = multiply() if number else product
            differing += (product != first).any()
        context.synchronize()  # has a time-out, unlike reading the count
        checked += 1 + REPEATED
        # If the first product is wrong, so are the products that are equal to it.
        wrong = checked - int(differing) if wrong else int(differing)
    finally:  # a wrong product counts even if the device fails later
        if wrong or checked > 1:
            context.report("gemm_shapes.wrong_products", wrong, unit="1", checked=checked, **common)
    context.report_rate("gemm_shapes.throughput", 2 * rows * columns * inner, series, unit="FLOP/s", **common)


def build(
    dtype: str, rows: int, columns: int, inner: int, device: torch.device, seed: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], int]]:
    """Return two functions: one multiplies two random matrices, the other counts the wrong rows of the last product.

    Freivalds' algorithm checks GROUP columns of a row at a time: (A·B)·x must equal A·(B·x), computed in fp64. For int8 the two
    are equal exactly, because all sums are below 2⁵³; for other types they differ by rounding (see TOLERANCE_FACTOR). On a GPU
    torch._int_mm needs at least 17 rows.
    """
    group = math.gcd(columns, GROUP)
    generator = torch.Generator(device).manual_seed(seed)
    sizes, signs = (torch.randint(low, 9, (columns, 1), device=device, generator=generator) for low in (1, 0))
    # No factor is 0, because a factor 0 would hide errors in its column.
    vector = torch.where(signs > 4, sizes, -sizes).double()
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

    def count_wrong_rows() -> int:
        factors = right.t().double().view(-1, group, inner)
        sums = torch.bmm(vector.view(-1, 1, group), factors).view(-1, inner)
        del factors  # up to 2 GB
        expected = left.double() @ sums.t()
        errors = (result.double().view(rows, -1, group).mul_(vector.view(-1, group)).sum(2) - expected).abs()
        tolerance = 0.0 if dtype == "int8" else TOLERANCE_FACTOR * TOLERANCE[dtype]
        limit = tolerance * float(expected.square().mean().sqrt())
        return int((~(errors <= limit)).any(1).sum())  # unlike `errors > limit`, this counts NaN as wrong

    return multiply, count_wrong_rows
