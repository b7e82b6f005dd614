"""Matrix product rate of each device, in each precision: C = A·B with square random matrices."""

from __future__ import annotations

from typing import Any

import torch

from agent.benchmarks.context import Context, failed, summarize
from schemas.records import UNSUPPORTED

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `gemm.throughput` in FLOP/s for each dtype; 2·size³ operations a product (McCalpin's and cuBLAS' count)."""
    size, repetitions = int(settings["size"]), int(settings["repetitions"])
    for dtype in settings["dtypes"]:
        context.phase(f"gemm {dtype}")
        common: dict[str, Any] = {"unit": "FLOP/s", "scope": context.device_scope, "dtype": dtype, "size": size}
        if dtype == "tf32" and not _has_tf32(context.device):
            context.absent("gemm.throughput", status=UNSUPPORTED, reason="no TF32 on this device", **common)
            continue
        try:
            seconds = _measure(context, dtype, size, repetitions)
        except (RuntimeError, ValueError) as error:
            status, reason = failed(error)
            context.absent("gemm.throughput", status=status, reason=reason, **common)
            continue
        rates = summarize([2 * size**3 / second for second in seconds])
        context.measured("gemm.throughput", rates.p50, samples=rates, **common)


def _measure(context: Context, dtype: str, size: int, repetitions: int) -> list[float]:
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    generator = torch.Generator(context.device).manual_seed(context.rank)
    left, right = (
        # Random, not zeros: zeros draw less power and run faster than any real work.
        torch.randn(size, size, device=context.device, generator=generator).to(DTYPES[dtype])
        for _ in range(2)
    )
    product = torch.empty_like(left)
    seconds = context.time(lambda: torch.matmul(left, right, out=product), repetitions, warm_up=3)
    if not torch.isfinite(product).all():
        raise ValueError("the product of finite matrices holds NaN or an infinity")
    return seconds


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
