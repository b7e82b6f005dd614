"""Rate of matrix products (C = A·B, square random matrices) on each device for each data type, in a short run.

A short run shows what the GPU can do before it reaches its power limit; `stress` shows what it sustains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR, UNSUPPORTED

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-4, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2, "fp8": 2e-2}
"""Largest tolerated error of a row's checksum, relative to the root mean square of all checksums. Rounding errors are smaller."""
CHECKSUMS = 4
"""Number of checksums of each row. A checksum is the product of the row and a random vector."""
DTYPE_REST_S = 0.3
"""Seconds of rest before each data type, so that the GPU is not still hot, or at its power limit, from the previous data type."""
BLOCK_REST_S = 0.05
"""Seconds of rest before each block of timed products of one data type. Without this pause a GPU reaches its power limit during
the run, and the median mixes times from before and from after that moment. Measured on H200: the rates in bf16, fp16 and tf32
varied from run to run by 10 to 12 % without the pause, and by at most 0.23 % with it."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `gemm.throughput` in FLOP/s for each dtype. A product counts as 2·size³ operations, as usual for GEMM.

    The first and the last product are checked. If one or both are wrong, report the number of wrong products as
    `gemm.wrong_products`, and the throughput as an error.
    """
    size = settings["size"]
    for dtype in settings["dtypes"]:
        context.set_phase(f"gemm {dtype}")
        common: dict[str, Any] = {"scope": context.device_scope, "dtype": dtype, "size": size}
        reason, status = unsupported_reason(dtype, context.device), UNSUPPORTED
        if not reason:
            try:
                _measure(context, settings, dtype, common)
                continue
            except (RuntimeError, ValueError) as error:
                reason, status = describe_error(error), ERROR
        if not context.has_reported("gemm.throughput", context.device_scope, {"dtype": dtype}):
            context.report_absent("gemm.throughput", unit="FLOP/s", status=status, reason=reason, **common)


def _measure(context: Context, settings: Mapping[str, Any], dtype: str, common: Mapping[str, Any]) -> None:
    size, on_gpu, wrong = settings["size"], context.kind == "gpu", 0
    try:
        multiply, count_wrong_rows = build_product(dtype, size, context.device, seed=context.rank)
        multiply()
        wrong = int(count_wrong_rows() > 0)
        time.sleep(DTYPE_REST_S if on_gpu else 0.0)
        series = context.sample(
            multiply,
            precision=settings["precision"],
            seconds=settings["seconds"],
            rest_s=BLOCK_REST_S if on_gpu else 0.0,
        )
        wrong += int(count_wrong_rows() > 0)
    finally:  # a wrong product is reported even if the GPU fails later
        if wrong:
            context.report_wrong_data("gemm.wrong_products", wrong, invalid={"gemm.throughput": "FLOP/s"}, **common)
    if not wrong:
        context.report_rate("gemm.throughput", 2 * size**3, series, unit="FLOP/s", **common)


def build_product(
    dtype: str, size: int, device: torch.device, seed: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], int]]:
    """Return two functions: one multiplies two random matrices (size, size), the other counts the wrong rows of the last product.

    The matrices are random, because products of zeros draw less power and run faster than real work.
    """
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    generator = torch.Generator(device).manual_seed(seed)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    if dtype == "fp8":
        right = right.t()  # the second factor of an fp8 product must be column-major
        scale = torch.ones((), device=device)
        result = torch.empty(size, size, dtype=torch.bfloat16, device=device)

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, out=result)
    else:
        result = torch.empty_like(left)

        def multiply() -> torch.Tensor:
            return torch.matmul(left, right, out=result)

    vectors = torch.randn(size, CHECKSUMS, device=device, dtype=torch.float64, generator=generator)

    def count_wrong_rows() -> int:
        """Check every row with Freivalds' algorithm, which costs little: (A·B)·x must equal A·(B·x), in fp64."""
        expected = left.double() @ (right.double() @ vectors)
        errors = (result.double() @ vectors - expected).abs() / expected.square().mean().sqrt()
        return int((~(errors <= TOLERANCE[dtype])).any(1).sum())  # `not <=` instead of `>`, so that NaN counts as wrong

    return multiply, count_wrong_rows


def unsupported_reason(dtype: str, device: torch.device) -> str:
    """Return why the device cannot multiply this type, or an empty string."""
    required = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}.get(dtype)
    if device.type == "cpu":
        return f"no {dtype} on a CPU" if dtype in ("tf32", "fp8", "fp4") else ""
    if required and torch.cuda.get_device_capability(device) < required:
        return f"no {dtype} before compute capability {required[0]}.{required[1]}"
    return ""
