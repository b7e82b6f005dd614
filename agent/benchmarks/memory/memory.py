"""Bandwidth of each device's memory in copy, read, write and triad; bytes are counted as in STREAM (McCalpin)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR

FACTOR = 3.0
SPAN_S = 0.02
"""Length of a timed span. It covers several passes, so that the figure includes occasional disturbances."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `memory.bandwidth` in B/s for each operation on buffers of `size_bytes`; bytes read and written both count."""
    size = settings["size_bytes"]
    for op in settings["ops"]:
        context.set_phase(f"memory {op}")
        common: dict[str, Any] = {"unit": "B/s", "scope": context.device_scope, "op": op, "size_bytes": size}
        try:
            work, check, moved = OPERATIONS[op](size // 4, context.device)
            series = context.sample(work, precision=settings["precision"], seconds=settings["seconds"], span_s=SPAN_S)
            if not check():
                raise ValueError(f"{op} left wrong values in memory")
        except (RuntimeError, ValueError) as error:
            context.report_absent("memory.bandwidth", status=ERROR, reason=describe_error(error), **common)
            continue
        context.report_rate("memory.bandwidth", moved, series, **common)
        del work, check  # frees their buffers: the next operation needs the memory


Operation = tuple[Callable[[], object], Callable[[], bool], int]
"""A function that runs one pass, one that checks its result, and the bytes read and written."""


def _copy(count: int, device: torch.device) -> Operation:
    source = _random(count, device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), lambda: torch.equal(source, target), 8 * count


def _read(count: int, device: torch.device) -> Operation:
    """Return an operation that finds the largest element: it reads every byte and writes only the result."""
    source = _random(count, device)
    position = int(source.argmax())
    largest = torch.empty((), dtype=source.dtype, device=device)

    def work() -> object:
        return torch.amax(source, 0, out=largest)

    return work, lambda: float(largest) == float(source[position]), 4 * count


def _write(count: int, device: torch.device) -> Operation:
    target = torch.zeros(count, device=device)
    return lambda: target.fill_(FACTOR), lambda: bool((target == FACTOR).all()), 4 * count


def _triad(count: int, device: torch.device) -> Operation:
    left, right = _random(count, device), _random(count, device)
    target = torch.empty_like(left)

    def check() -> bool:
        step = max(1, count // 1000)
        return torch.allclose(target[::step], left[::step] + FACTOR * right[::step])

    return lambda: torch.add(left, right, alpha=FACTOR, out=target), check, 12 * count


def _random(count: int, device: torch.device) -> torch.Tensor:
    return torch.rand(count, device=device)


OPERATIONS: dict[str, Callable[[int, torch.device], Operation]] = {
    "copy": _copy,
    "read": _read,
    "write": _write,
    "triad": _triad,
}
