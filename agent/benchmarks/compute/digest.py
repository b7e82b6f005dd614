"""Seeded computations whose results must be equal to the bit: every time, on every GPU of a model, on every host.

A GPU that computes wrongly without an error (silent data corruption) is found by nothing else. The computations run over and
over with all GPUs busy, as such parts fail when hot; every result is compared on the device with the first, and the first
with those of the other GPUs, by the judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from agent.benchmarks.runtime.context import Context, failed

SEED = 20261121
STEPS = 3


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `digest.value` (16 hexadecimal digits) and `digest.mismatches` (repetitions that differ from the first)."""
    size, workloads = int(settings["size"]), settings["workloads"]
    for workload in workloads:
        context.phase(f"digest {workload}")
        common: dict[str, Any] = {"unit": "1", "scope": context.device_scope, "workload": workload, "size": size}
        context.meet(workload)
        try:
            first, mismatches, count = _repeat(
                context, WORKLOADS[workload](size, context.device), float(settings["seconds"]) / len(workloads)
            )
        except (RuntimeError, ValueError) as error:
            status, reason = failed(error)
            for name in ("value", "mismatches"):
                context.absent(f"digest.{name}", status=status, reason=reason, **common)
            continue
        context.measured("digest.value", f"{first & (1 << 64) - 1:016x}", **common)
        context.measured("digest.mismatches", mismatches, repetitions=count, **common)


def _repeat(context: Context, compute: Callable[[], torch.Tensor], seconds: float) -> tuple[int, int, int]:
    """The first digest, how many of the following differ from it, and how many there were."""
    factors = weights(compute())
    first = digest(compute(), factors)
    mismatches = torch.zeros((), dtype=torch.int64, device=context.device)
    ends, count = time.monotonic() + seconds, 0
    while count == 0 or time.monotonic() < ends:
        for _ in range(4):
            mismatches += digest(compute(), factors) != first
        count += 4
        context.synchronize()
    return int(first), int(mismatches), count


def digest(result: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """64 bits of a tensor, on its device: its words, each times an odd number of its own, summed modulo 2⁶⁴.

    An odd factor loses no bit, so one flipped bit changes the sum; integers add up alike in any order.
    """
    return (_words(result) * factors).sum()


def weights(result: torch.Tensor) -> torch.Tensor:
    """The odd factors for the words of results like this one."""
    return torch.arange(_words(result).numel(), device=result.device) * 0x1E3779B97F4A7C15 % (1 << 62) * 2 + 1


def _words(result: torch.Tensor) -> torch.Tensor:
    return result.contiguous().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()])


def _random(size: int, device: torch.device, number: int) -> torch.Tensor:
    """A random matrix, made on the CPU so that it is the same everywhere."""
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randn(size, size, generator=generator).to(device)


def _gemm(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    left, right = (_random(size, device, number).bfloat16() for number in range(2))
    return lambda: left @ right


def _reduction(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    numbers = _random(size, device, 2)
    return lambda: torch.cat([numbers.sum(0), numbers.sum(1), torch.cumsum(numbers[0], 0)])


def _training_step(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """A few steps of a small network by hand: forward, backward, update; the weights are the result."""
    width = max(16, size // 4)
    begin = [_random(width, device, number) / width**0.5 for number in (3, 4)]
    inputs, wanted = _random(width, device, 5), _random(width, device, 6)

    def compute() -> torch.Tensor:
        weights = [weight.clone().requires_grad_() for weight in begin]
        for _ in range(STEPS):
            loss = nn.functional.mse_loss(torch.relu(inputs @ weights[0]) @ weights[1], wanted)
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
