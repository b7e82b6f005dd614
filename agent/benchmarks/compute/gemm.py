"""Matrix product rate of each device, in each precision: C = A·B with square random matrices, in a short run.

A short run shows what the part can do before its power limit bites; `stress` shows what it keeps up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context, failed
from schemas.records import UNSUPPORTED

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-4, "tf32": 5e-3, "fp16": 5e-3, "bf16": 2e-2, "fp8": 2e-2}
"""Largest error of a row's checksum, over the checksums' root mean square: a few times the rounding of the output."""
CHECKSUMS = 4
REST_S = 0.3
"""Between two precisions, so that the one before leaves the next neither hot nor at its power limit."""
BREATH_S = 0.05
"""Between the blocks of one: a GPU that came to its power limit within the run had the median of two states (measured, H200,
bf16, fp16 and tf32: 10 to 12 % from run to run without, at most 0.23 % with)."""


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `gemm.throughput` in FLOP/s for each dtype; 2·size³ operations a product (McCalpin's and cuBLAS' count)."""
    size = int(settings["size"])
    for dtype in settings["dtypes"]:
        context.phase(f"gemm {dtype}")
        common: dict[str, Any] = {"unit": "FLOP/s", "scope": context.device_scope, "dtype": dtype, "size": size}
        if reason := unsupported(dtype, context.device):
            context.absent("gemm.throughput", status=UNSUPPORTED, reason=reason, **common)
            continue
        try:
            multiply, check = product(dtype, size, context.device, seed=context.rank)
            multiply()
            check()
            rest, breath = (REST_S, BREATH_S) if context.kind == "gpu" else (0.0, 0.0)
            time.sleep(rest)
            series = context.sample(
                multiply,
                precision=float(settings["precision"]),
                seconds=float(settings["seconds"]),
                rest_s=breath,
            )
            check()
        except (RuntimeError, ValueError) as error:
            status, reason = failed(error)
            context.absent("gemm.throughput", status=status, reason=reason, **common)
            continue
        context.rate("gemm.throughput", 2 * size**3, series, **common)


def product(
    dtype: str, size: int, device: torch.device, seed: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """A product of two random matrices (size, size): what computes it, and what raises ValueError where it is wrong.

    Random, not zeros: zeros draw less power and run faster than any real work.
    """
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    generator = torch.Generator(device).manual_seed(seed)
    left, right = (torch.randn(size, size, device=device, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    if dtype == "fp8":
        right = right.t()  # the second factor of an fp8 product lies column by column
        one = torch.ones((), device=device)
        last = torch.empty(size, size, dtype=torch.bfloat16, device=device)

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, out=last)
    else:
        last = torch.empty_like(left)

        def multiply() -> torch.Tensor:
            return torch.matmul(left, right, out=last)

    vectors = torch.randn(size, CHECKSUMS, device=device, dtype=torch.float64, generator=generator)

    def check() -> None:
        """Every row, by Freivalds' algorithm: (A·B)·x must be A·(B·x), in fp64, which costs next to nothing."""
        right_sums = left.double() @ (right.double() @ vectors)
        errors = (last.double() @ vectors - right_sums).abs() / right_sums.square().mean().sqrt()
        row, error = int(errors.amax(1).argmax()), float(errors.max())
        if not error <= TOLERANCE[dtype]:  # NaN is no less wrong
            raise ValueError(
                f"the product is wrong: row {row} by {error:.2e}, at most {TOLERANCE[dtype]:.0e} is rounding"
            )

    return multiply, check


def unsupported(dtype: str, device: torch.device) -> str:
    """Why the device has no such product, or an empty string."""
    needs = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}.get(dtype)
    if device.type == "cpu":
        return f"no {dtype} on a CPU" if dtype in ("tf32", "fp8") else ""
    if needs and torch.cuda.get_device_capability(device) < needs:
        return f"no {dtype} before compute capability {needs[0]}.{needs[1]}"
    return ""
