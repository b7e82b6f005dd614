"""Collective operations between all ranks: bandwidth, latency, and whether every element arrived right.

Sizes, algbw and busbw are those of nccl-tests (doc/PERFORMANCE.md): the size is the larger of the send and the receive
buffer of a rank, algbw = size / time, busbw = algbw × a factor that makes it comparable with a link's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks.context import Context, failed, summarize
from schemas.records import SKIPPED

CHUNK = 1 << 24
"""Elements that are filled or checked at once, so that the check of a large buffer does not need one as large."""
PERIOD = 251


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective: how its buffers are made, run and checked. `n` is the world size, `r` the rank."""

    factor: Callable[[int], float]
    """busbw / algbw."""
    sends_chunks: bool
    """The send buffer holds a chunk for each rank."""
    receives_chunks: bool
    """The receive buffer holds a chunk from each rank."""
    sent: Callable[[int, int, int], int]
    """(r, chunk, n) -> what is added to the pattern in that chunk of rank r's send buffer."""
    received: Callable[[int, int, int], tuple[int, int]]
    """(r, chunk, n) -> (factor, addend) of the pattern expected in that chunk of rank r's receive buffer."""
    run: Callable[[torch.Tensor, torch.Tensor], object]


IN_PLACE = frozenset({"all_reduce", "broadcast"})


# torch 2.13 renamed both and warns at every call of the old names.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _ring(send: torch.Tensor, receive: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    operations = [dist.P2POp(dist.isend, send, (r + 1) % n), dist.P2POp(dist.irecv, receive, (r - 1) % n)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _each(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    "all_reduce": Operation(
        factor=lambda n: 2 * (n - 1) / n,
        sends_chunks=False,
        receives_chunks=False,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (n, n * (n - 1) // 2),
        run=lambda send, receive: dist.all_reduce(receive),
    ),
    "all_gather": Operation(
        factor=_each,
        sends_chunks=False,
        receives_chunks=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, chunk),
        run=lambda send, receive: _all_gather(receive, send),
    ),
    "reduce_scatter": Operation(
        factor=_each,
        sends_chunks=True,
        receives_chunks=False,
        sent=lambda r, chunk, n: r + chunk,
        received=lambda r, chunk, n: (n, n * (n - 1) // 2 + n * r),
        run=lambda send, receive: _reduce_scatter(receive, send),
    ),
    "broadcast": Operation(
        factor=lambda n: 1.0,
        sends_chunks=False,
        receives_chunks=False,
        sent=lambda r, chunk, n: r + 7,
        received=lambda r, chunk, n: (1, 7),
        run=lambda send, receive: dist.broadcast(receive, src=0),
    ),
    "all_to_all": Operation(
        factor=_each,
        sends_chunks=True,
        receives_chunks=True,
        sent=lambda r, chunk, n: r * n + chunk,
        received=lambda r, chunk, n: (1, chunk * n + r),
        run=lambda send, receive: dist.all_to_all_single(receive, send),
    ),
    "send_recv": Operation(
        factor=lambda n: 1.0,
        sends_chunks=False,
        receives_chunks=False,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, (r - 1) % n),
        run=_ring,
    ),
}


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports algbw and busbw in B/s, latency in s, and the number of wrong elements, for each operation and size."""
    for op in settings["ops"]:
        for size in settings["sizes_bytes"]:
            context.phase(f"collective {op} {size} B")
            if context.world_size == 1:
                _absent(context, op, size, SKIPPED, "one rank has nobody to talk to")
            else:
                _measure(context, op, int(size), settings)
            context.save()


def _measure(context: Context, op: str, size: int, settings: dict[str, Any]) -> None:
    operation, n = OPERATIONS[op], context.world_size
    chunks = n if operation.sends_chunks or operation.receives_chunks else 1
    count = max(1, size // 4 // chunks)
    error: Exception | None = None
    send = receive = torch.empty(0)
    try:
        send, receive = _buffers(op, count, n, context.device)
    except RuntimeError as caught:  # out of memory, most of the time
        error = caught
    if context.agree(0 if error else 1)[0] == 0:
        # A rank that went on alone would wait for the others until the group's time-out.
        status, reason = failed(error or RuntimeError("another rank could not make its buffers"))
        if error or context.speaks_for_world:
            _absent(context, op, size, status, reason)
        return
    _fill(send, operation, context.rank, n)
    operation.run(send, receive)
    wrong = context.total(float(_wrong(receive, operation, context.rank, n)))
    repetitions, iterations = int(settings["repetitions"]), int(settings["iterations"])
    # How many fit into the time is agreed on: ranks that ran a different number would hang.
    probe = context.slowest(context.time(lambda: operation.run(send, receive), 1, warm_up=1))[0]
    iterations = max(1, min(iterations, int(float(settings["seconds"]) / repetitions / probe)))
    seconds = context.slowest(
        context.time(lambda: operation.run(send, receive), repetitions, iterations, warm_up=min(2, iterations))
    )
    if context.speaks_for_world:
        _report(context, op, size, 4 * count * chunks, seconds, int(wrong))


def _report(context: Context, op: str, size: int, moved: int, seconds: list[float], wrong: int) -> None:
    times = summarize(seconds)
    algbw = moved / times.p50
    common: dict[str, Any] = {
        "scope": context.world_scope,
        "size_bytes": size,
        "world_size": context.world_size,
        "dtype": "fp32",
        "backend": dist.get_backend(),
        "placement": "in_place" if op in IN_PLACE else "out_of_place",
    }
    context.measured(f"collective.{op}.algbw", algbw, unit="B/s", **common)
    context.measured(f"collective.{op}.busbw", algbw * OPERATIONS[op].factor(context.world_size), unit="B/s", **common)
    context.measured(f"collective.{op}.latency", times.p50, unit="s", samples=times, **common)
    context.measured(f"collective.{op}.wrong_elements", wrong, unit="1", **common)


def _absent(context: Context, op: str, size: int, status: str, reason: str) -> None:
    for kind, unit in (("algbw", "B/s"), ("busbw", "B/s"), ("latency", "s"), ("wrong_elements", "1")):
        context.absent(
            f"collective.{op}.{kind}",
            unit=unit,
            scope=context.world_scope,
            status=status,
            reason=reason,
            size_bytes=size,
        )


def _buffers(op: str, count: int, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Send and receive buffer; one and the same where the operation works in place."""
    operation = OPERATIONS[op]
    send = torch.empty(count * (n if operation.sends_chunks else 1), dtype=torch.float32, device=device)
    if op in IN_PLACE:
        return send, send
    return send, torch.full((count * (n if operation.receives_chunks else 1),), float("nan"), device=device)


def _pattern(start: int, count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(start, start + count, device=device, dtype=torch.int64) % PERIOD).to(torch.float32)


def _fill(send: torch.Tensor, operation: Operation, rank: int, n: int) -> None:
    for index, chunk in enumerate(send.chunk(n if operation.sends_chunks else 1)):
        for start in range(0, chunk.numel(), CHUNK):
            part = chunk[start : start + CHUNK]
            part.copy_(_pattern(start, part.numel(), part.device) + operation.sent(rank, index, n))


def _wrong(receive: torch.Tensor, operation: Operation, rank: int, n: int) -> int:
    """How many elements are not what arithmetic says. The values are small integers, so fp32 has them exactly."""
    wrong = torch.zeros((), dtype=torch.int64, device=receive.device)
    for index, chunk in enumerate(receive.chunk(n if operation.receives_chunks else 1)):
        factor, addend = operation.received(rank, index, n)
        for start in range(0, chunk.numel(), CHUNK):
            part = chunk[start : start + CHUNK]
            wrong += (part != _pattern(start, part.numel(), part.device) * factor + addend).sum()
    return int(wrong)
