"""The seeded computations of `digest`: each exercises a different part of a GPU and gives the same bits every time.

Inputs are generated on the CPU, so that all GPUs get the same ones; only `rng` generates numbers on the device. The kernels are
deterministic: one stream (as cuBLAS requires), cuDNN restricted to deterministic algorithms, a stable sort, prefix
sums of whole numbers only (torch's prefix sums add floating-point numbers in varying order), and no backward pass of attention
(its fast kernels also add in varying order). Different GPU models and software versions may choose other kernels, so
results are compared only between GPUs of the same model with the same software.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.grad import conv2d_weight

from agent.benchmarks.compute.gemm import unsupported_reason

SEED = 20261121
STEPS = 3
HEAD = 128
"""Size of an attention head, as in most large language models."""
FP4_BLOCK = 16
"""Number of elements that share one scale in NVIDIA's fp4 format (NVFP4)."""


@dataclass(frozen=True)
class Computation:
    """A repeatable computation, and its correct result if that is known without the device."""

    compute: Callable[[], torch.Tensor]
    expected: torch.Tensor | None = None
    """The correct result, on the CPU. None if only a comparison with other results can show an error."""


Prepare = Callable[[int, torch.device], Computation]


def unsupported_workload(workload: str, device: torch.device) -> str:
    """Return why the device or this torch cannot run the workload, or an empty string."""
    dtype = workload.removeprefix("gemm_").partition("_")[0] if workload.startswith("gemm_") else ""
    if reason := unsupported_reason(dtype, device):
        return reason
    if dtype == "fp4" and not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no fp4"
    return ""


def _random(size: int, device: torch.device, number: int) -> torch.Tensor:
    """Return a matrix (size, size) of standard normal numbers. Each `number` gives a different matrix."""
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randn(size, size, generator=generator).to(device)


def _random_words(rows: int, columns: int, number: int) -> torch.Tensor:
    """Return a matrix (rows, columns) of int32 words of random bits, on the CPU. Each `number` gives a different matrix."""
    generator = torch.Generator().manual_seed(SEED + number)
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns), generator=generator, dtype=torch.int64).to(torch.int32)


def _gemm(dtype: torch.dtype) -> Prepare:
    def prepare(size: int, device: torch.device) -> Computation:
        left, right = (_random(size, device, number).to(dtype) for number in range(2))
        return Computation(lambda: left @ right)

    return prepare


def _gemm_fp8(left_dtype: torch.dtype) -> Prepare:
    """Return a function that prepares the product of a matrix of `left_dtype` and a matrix of e4m3.

    The right matrix is always e4m3, because cuBLAS does not multiply e5m2 by e5m2.
    """

    def prepare(size: int, device: torch.device) -> Computation:
        left = _random(size, device, 0).to(left_dtype)
        right = _random(size, device, 1).to(torch.float8_e4m3fn).t()  # the second factor must be column-major
        scale = torch.ones((), device=device)
        return Computation(
            lambda: torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        )

    return prepare


def _gemm_fp4(size: int, device: torch.device) -> Computation:
    """Prepare the product of two NVFP4 matrices: e2m1, two elements in a byte, with a scale in e4m3 for each FP4_BLOCK elements.

    `size` must be a multiple of 128. Every byte is a pair of finite numbers. The scales are 0.5 to 1.875.
    """
    dtype = torch.float4_e2m1fn_x2
    factors, scales = [], []
    for number in range(2):
        words = _random_words(size, size // 8, number).to(device)
        factors.append(words.view(torch.uint8).view(dtype))
        blocks = _random_words(1, size * size // FP4_BLOCK // 4, 2 + number).to(device).view(torch.uint8).view(-1)
        scales.append((blocks % 16 + 0x30).view(torch.float8_e4m3fn))  # 0x30 is 0.5, 0x3f is 1.875
    return Computation(
        lambda: torch._scaled_mm(
            factors[0], factors[1].t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
        )
    )


def _gemm_int8(size: int, device: torch.device) -> Computation:
    left, right = ((_random(size, device, number) * 32).round().clamp(-127, 127).to(torch.int8) for number in range(2))
    right = right.t()
    return Computation(lambda: torch._int_mm(left, right))


def _attention(size: int, device: torch.device) -> Computation:
    """Prepare causal attention in fp16 over `size` tokens with size // HEAD heads (one smaller head if `size` is below HEAD).

    Attention exercises the GPU's units for exponentials, and its shared memory.
    """
    head = min(HEAD, size)
    heads = size // head
    query, key, value = (
        _random(size, device, number).half()[:, : heads * head].view(1, size, heads, head).transpose(1, 2).contiguous()
        for number in (7, 8, 9)
    )
    return Computation(lambda: nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True))


def _convolution(size: int, device: torch.device) -> Computation:
    """Prepare a 3×3 convolution in fp16 and the gradient of its weights."""
    channels, side = max(4, size // 16), max(4, size // 128)
    batch = size * size // (channels * side * side)
    images = _random(size, device, 10).half().view(-1)[: batch * channels * side * side]
    images = images.view(batch, channels, side, side)
    weights = _random(size, device, 11).view(-1)[: channels * channels * 9].view(channels, channels, 3, 3)
    weights = (weights / (9 * channels) ** 0.5).half()

    def compute() -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
            output = nn.functional.conv2d(images, weights, padding=1)
            gradient = conv2d_weight(images, weights.shape, output, padding=1)  # type: ignore[no-untyped-call]
        return torch.cat([output.view(-1), gradient.reshape(-1)])

    return Computation(compute)


def _softmax(size: int, device: torch.device) -> Computation:
    numbers = _random(size, device, 12)
    return Computation(lambda: numbers.softmax(1))


def _sort(size: int, device: torch.device) -> Computation:
    """Prepare a stable sort of size² numbers. The result has the sorted numbers and the original position of each."""
    numbers = _random(size, device, 13).view(-1)

    def compute() -> torch.Tensor:
        values, positions = numbers.sort(stable=True)
        return torch.cat([values.view(torch.int32), positions.to(torch.int32)])

    return Computation(compute)


def _rng(size: int, device: torch.device) -> Computation:
    """Prepare the generation of normal numbers and random words by the device's own generator (Philox on GPUs)."""
    generator = torch.Generator(device)

    def compute() -> torch.Tensor:
        generator.manual_seed(SEED)
        numbers = torch.randn(size, size, device=device, generator=generator)
        words = torch.randint(
            -(1 << 31), (1 << 31) - 1, (size, size), dtype=torch.int32, device=device, generator=generator
        )
        return torch.stack([numbers.view(torch.int32), words])

    return Computation(compute)


def _reduction(size: int, device: torch.device) -> Computation:
    """Prepare the sums of rows and columns, and the prefix sums of whole numbers. The result has their bits as int32."""
    numbers = _random(size, device, 2)
    whole = (1000 * numbers[0]).to(torch.int32)

    def compute() -> torch.Tensor:
        sums = torch.cat([numbers.sum(0), numbers.sum(1)])
        return torch.cat([sums.view(torch.int32), torch.cumsum(whole, 0, dtype=torch.int32)])

    return Computation(compute)


def _training_step(size: int, device: torch.device) -> Computation:
    """Prepare STEPS training steps of a small network. The result is its weights."""
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

    return Computation(compute)


def _copy(size: int, device: torch.device) -> Computation:
    """Prepare copies to pinned memory of the host, back to the device, and within the device."""
    return _round_trip(size, device, torch.empty(size, size, dtype=torch.int32, pin_memory=device.type == "cuda"))


def peer_copy(size: int, device: torch.device, peer: torch.device) -> Computation:
    """Prepare copies to another GPU, back, and within the device."""
    return _round_trip(size, device, torch.empty(size, size, dtype=torch.int32, device=peer))


def _round_trip(size: int, device: torch.device, buffer: torch.Tensor) -> Computation:
    """Prepare copies of random words to `buffer` and back. The result has the words that were read back.

    The inverted words are copied first, then the words themselves. So each bit is copied once as 0 and once as 1. If a copy
    is silently left out, the buffer still has the words of the previous copy, every bit of which differs.
    """
    words = _random_words(size, size, 14)
    expected = torch.stack([~words, words])
    source = expected.to(device)
    back, result = torch.empty_like(source[0]), torch.empty_like(source)

    def compute() -> torch.Tensor:
        for words, target in zip(source, result, strict=True):
            buffer.copy_(words, non_blocking=True)
            back.copy_(buffer, non_blocking=True)
            target.copy_(back)
        return result

    return Computation(compute, expected)


WORKLOADS: dict[str, Prepare] = {
    "gemm": _gemm(torch.bfloat16),
    "reduction": _reduction,
    "training_step": _training_step,
    "gemm_fp64": _gemm(torch.float64),
    "gemm_tf32": _gemm(torch.float32),
    "gemm_fp16": _gemm(torch.float16),
    "gemm_fp8_e4m3": _gemm_fp8(torch.float8_e4m3fn),
    "gemm_fp8_e5m2": _gemm_fp8(torch.float8_e5m2),
    "gemm_int8": _gemm_int8,
    "gemm_fp4": _gemm_fp4,
    "attention": _attention,
    "convolution": _convolution,
    "softmax": _softmax,
    "sort": _sort,
    "rng": _rng,
    "copy": _copy,
}
