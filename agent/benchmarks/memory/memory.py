"""Bandwidth of each device's memory in copy, read, write and triad; bytes are counted as in STREAM (McCalpin)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR

FACTOR = 3.0
LARGEST = 1 << 20
"""The random elements are whole numbers below LARGEST. So all results are whole numbers below 2²², which are exact in fp32."""
CHECKED = 1 << 26
"""Number of elements that are compared at once. This limits the temporary memory of the comparison."""
SPAN_S = 0.02
"""Length of a timed span, in seconds. The result of a span is the mean time of its passes, so one slow pass makes it longer. If
single passes were timed, their median would ignore a slow pass."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `memory.bandwidth` in B/s for each operation on buffers of `size_bytes`; bytes read and bytes written both count.

    If the last pass of an operation left wrong values, report their number as `memory.wrong_elements`, and an error instead of
    the bandwidth.
    """
    size = settings["size_bytes"]
    for op in settings["ops"]:
        context.set_phase(f"memory {op}")
        common: dict[str, Any] = {"scope": context.device_scope, "op": op, "size_bytes": size}
        try:
            work, count_wrong, moved = OPERATIONS[op](size // 4, context.device)
            series = context.sample(work, precision=settings["precision"], seconds=settings["seconds"], span_s=SPAN_S)
            wrong = count_wrong()
        except (RuntimeError, ValueError) as error:
            context.report_absent("memory.bandwidth", unit="B/s", status=ERROR, reason=describe_error(error), **common)
            continue
        if wrong:
            context.report_wrong_data("memory.wrong_elements", wrong, invalid={"memory.bandwidth": "B/s"}, **common)
        else:
            context.report_rate("memory.bandwidth", moved, series, unit="B/s", **common)
        del work, count_wrong  # frees their buffers: the next operation needs the memory


Operation = tuple[Callable[[], object], Callable[[], int], int]
"""A function that runs one pass, a function that counts the wrong elements of the last pass, and the bytes read and written."""


def _copy(count: int, device: torch.device) -> Operation:
    source = _random(count, device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), lambda: _count_wrong(target, lambda part: source[part]), 8 * count


def _read(count: int, device: torch.device) -> Operation:
    """Return an operation that finds the largest element: it reads every byte and writes only the result."""
    source = _random(count, device)
    position = int(source.argmax())
    largest = torch.empty((), dtype=source.dtype, device=device)

    def work() -> object:
        return torch.amax(source, 0, out=largest)

    return work, lambda: int(float(largest) != float(source[position])), 4 * count


def _write(count: int, device: torch.device) -> Operation:
    target = torch.zeros(count, device=device)
    return lambda: target.fill_(FACTOR), lambda: _count_wrong(target, lambda part: FACTOR), 4 * count


def _triad(count: int, device: torch.device) -> Operation:
    left, right = _random(count, device), _random(count, device)
    target = torch.empty_like(left)

    def count_wrong() -> int:
        return _count_wrong(target, lambda part: left[part] + FACTOR * right[part])

    return lambda: torch.add(left, right, alpha=FACTOR, out=target), count_wrong, 12 * count


def _random(count: int, device: torch.device) -> torch.Tensor:
    return torch.rand(count, device=device).mul_(LARGEST).floor_()


def _count_wrong(target: torch.Tensor, expected: Callable[[slice], torch.Tensor | float]) -> int:
    """Return how many elements of `target` are wrong. `expected` returns the right values of a slice (up to CHECKED elements)."""
    parts = (slice(start, start + CHECKED) for start in range(0, target.numel(), CHECKED))
    return sum(int((target[part] != expected(part)).sum()) for part in parts)


OPERATIONS: dict[str, Callable[[int, torch.device], Operation]] = {
    "copy": _copy,
    "read": _read,
    "write": _write,
    "triad": _triad,
}
