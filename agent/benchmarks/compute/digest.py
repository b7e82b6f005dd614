"""Seeded computations whose results must be bit-identical: in every repetition and on all GPUs of the same model.

The computations find a GPU that computes wrongly without an error (silent data corruption), which no other check finds. Such GPUs
fail when hot, so the computations are repeated with all GPUs busy. Each result is compared on the device with the first one.
The control node compares the first results of all GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR

SEED = 20261121
STEPS = 3


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `digest.value` (16 hexadecimal digits) and `digest.mismatches` (repetitions that differ from the first)."""
    size, workloads = settings["size"], settings["workloads"]
    for workload in workloads:
        context.set_phase(f"digest {workload}")
        common: dict[str, Any] = {"unit": "1", "scope": context.device_scope, "workload": workload, "size": size}
        context.host_barrier(workload)
        try:
            first, mismatches, count = _repeat(
                context, WORKLOADS[workload](size, context.device), settings["seconds"] / len(workloads)
            )
        except (RuntimeError, ValueError) as error:
            for name in ("value", "mismatches"):
                context.report_absent(f"digest.{name}", status=ERROR, reason=describe_error(error), **common)
            continue
        context.report("digest.value", f"{first & (1 << 64) - 1:016x}", **common)
        context.report("digest.mismatches", mismatches, repetitions=count, **common)


def _repeat(context: Context, compute: Callable[[], torch.Tensor], seconds: float) -> tuple[int, int, int]:
    """Return the first digest, how many later digests differ from it, and how many later digests there are."""
    factors = digest_factors(compute())
    first = compute_digest(compute(), factors)
    mismatches = torch.zeros((), dtype=torch.int64, device=context.device)
    deadline, count = time.monotonic() + seconds, 0
    while count == 0 or time.monotonic() < deadline:
        for _ in range(4):
            mismatches += compute_digest(compute(), factors) != first
        count += 4
        context.synchronize()
    return int(first), int(mismatches), count


def compute_digest(result: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit digest, on the tensor's device: the sum modulo 2⁶⁴ of the words, each multiplied by its own odd factor.

    Multiplication by an odd factor loses no bit, so one flipped bit changes the sum. The order of the additions does not.
    """
    return (_words(result) * factors).sum()


def digest_factors(result: torch.Tensor) -> torch.Tensor:
    """Return the odd factors for the words of results of this size."""
    return torch.arange(_words(result).numel(), device=result.device) * 0x1E3779B97F4A7C15 % (1 << 62) * 2 + 1


def _words(result: torch.Tensor) -> torch.Tensor:
    return result.contiguous().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()])


def _random(size: int, device: torch.device, number: int) -> torch.Tensor:
    """Return a random matrix, generated on the CPU so that all GPUs get the same one."""
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randn(size, size, generator=generator).to(device)


def _gemm(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    left, right = (_random(size, device, number).bfloat16() for number in range(2))
    return lambda: left @ right


def _reduction(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    numbers = _random(size, device, 2)
    return lambda: torch.cat([numbers.sum(0), numbers.sum(1), torch.cumsum(numbers[0], 0)])


def _training_step(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a function that trains a small network for a few steps and returns its weights."""
    width = max(16, size // 4)
    initial = [_random(width, device, number) / width**0.5 for number in (3, 4)]
    inputs, target = _random(width, device, 5), _random(width, device, 6)

    def compute() -> torch.Tensor:
        weights = [weight.clone().requires_grad_() for weight in initial]
        for _ in range(STEPS):
            loss = nn.functional.mse_loss(torch.relu(inputs @ weights[0]) @ weights[1], target)
            gradients = torch.autograd.grad(loss, weights)
            weights = [
                (weight - 0.1 * gradient).detach().requires_grad_()
                for weight, gradient in zip(weights, gradients, strict=True)
            ]
        return torch.cat([weight.detach().view(-1) for weight in weights])

    return compute


WORKLOADS: dict[str, Callable[[int, torch.device], Callable[[], torch.Tensor]]] = {
    "gemm": _gemm,
    "reduction": _reduction,
    "training_step": _training_step,
}
