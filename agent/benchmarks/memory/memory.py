"""Bandwidth of each device's own memory: copy, read, write and triad, as STREAM (McCalpin) counts the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context, failed

FACTOR = 3.0
SPAN_S = 0.02
"""Several passes at once, so that what disturbs one now and then is in the figure and not beside it."""


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `memory.bandwidth` in B/s for each operation on buffers of `size_bytes`; bytes read and written both count."""
    size = int(settings["size_bytes"])
    for op in settings["ops"]:
        context.phase(f"memory {op}")
        common: dict[str, Any] = {"unit": "B/s", "scope": context.device_scope, "op": op, "size_bytes": size}
        try:
            work, check, moved = OPERATIONS[op](size // 4, context.device)
            series = context.sample(
                work, precision=float(settings["precision"]), seconds=float(settings["seconds"]), span_s=SPAN_S
            )
            if not check():
                raise ValueError(f"{op} left wrong values in memory")
        except (RuntimeError, ValueError) as error:
            status, reason = failed(error)
            context.absent("memory.bandwidth", status=status, reason=reason, **common)
            continue
        context.rate("memory.bandwidth", moved, series, **common)
        del work, check  # and with them their buffers: the next operation needs the room


Operation = tuple[Callable[[], object], Callable[[], bool], int]


def _copy(count: int, device: torch.device) -> Operation:
    source = _numbers(count, device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), lambda: torch.equal(source, target), 8 * count


def _read(count: int, device: torch.device) -> Operation:
    """The largest of all: every byte is read, next to nothing written."""
    source = _numbers(count, device)
    where = int(source.argmax())
    largest = torch.empty((), dtype=source.dtype, device=device)

    def work() -> object:
        return torch.amax(source, 0, out=largest)

    return work, lambda: float(largest) == float(source[where]), 4 * count


def _write(count: int, device: torch.device) -> Operation:
    target = torch.zeros(count, device=device)
    return lambda: target.fill_(FACTOR), lambda: bool((target == FACTOR).all()), 4 * count


def _triad(count: int, device: torch.device) -> Operation:
    left, right = _numbers(count, device), _numbers(count, device)
    target = torch.empty_like(left)

    def check() -> bool:
        step = max(1, count // 1000)
        return torch.allclose(target[::step], left[::step] + FACTOR * right[::step])

    return lambda: torch.add(left, right, alpha=FACTOR, out=target), check, 12 * count


def _numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.rand(count, device=device)


OPERATIONS: dict[str, Callable[[int, torch.device], Operation]] = {
    "copy": _copy,
    "read": _read,
    "write": _write,
    "triad": _triad,
}
