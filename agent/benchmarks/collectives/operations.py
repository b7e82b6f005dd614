"""The collective operations, as nccl-tests defines them: their buffers, what is sent, what must arrive, and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from agent.benchmarks.runtime.nccl import Communicator

CHUNK = 1 << 24
"""Elements that are filled or checked at once, so that the check of a large buffer does not need one as large."""
PERIOD = 251

Call = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective. `n` is the world size, `r` the rank."""

    factor: Callable[[int], float]
    """busbw / algbw."""
    sends_chunks: bool = False
    """The send buffer holds a chunk for each rank."""
    receives_chunks: bool = False
    """The receive buffer holds a chunk from each rank."""
    root_only: bool = False
    """Only rank 0 receives."""
    sent: Callable[[int, int, int], int]
    """(r, chunk, n) -> what is added to the pattern in that chunk of rank r's send buffer."""
    received: Callable[[int, int, int], tuple[int, int]]
    """(r, chunk, n) -> (factor, addend) of the pattern expected in that chunk of rank r's receive buffer."""
    run: Call
    """Through torch.distributed, for the CPUs of a rehearsal; GPUs call NCCL itself."""


# torch 2.13 renamed both and warns at every call of the old names.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _ring(send: torch.Tensor, receive: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    _at_once(dist.P2POp(dist.isend, send, (r + 1) % n), dist.P2POp(dist.irecv, receive, (r - 1) % n))


def _at_once(*operations: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv(list(operations)):
        work.wait()


def _gather(send: torch.Tensor, receive: torch.Tensor) -> None:
    n = dist.get_world_size()
    dist.gather(send, list(receive.chunk(n)) if dist.get_rank() == 0 else None, dst=0)


def _scatter(send: torch.Tensor, receive: torch.Tensor) -> None:
    n = dist.get_world_size()
    dist.scatter(receive, list(send.chunk(n)) if dist.get_rank() == 0 else None, src=0)


def _hypercube(send: torch.Tensor, receive: torch.Tensor) -> None:
    """An all_gather in log2(n) steps: with each, a rank swaps all it has with the neighbour in one more dimension."""
    n, r = dist.get_world_size(), dist.get_rank()
    count, mask = send.numel(), 1
    receive[r * count : (r + 1) * count].copy_(send)
    while mask < n:
        mine = r & ~(mask - 1)
        theirs = mine ^ mask
        _at_once(
            dist.P2POp(dist.isend, receive[mine * count : (mine + mask) * count], r ^ mask),
            dist.P2POp(dist.irecv, receive[theirs * count : (theirs + mask) * count], r ^ mask),
        )
        mask <<= 1


def _each(n: int) -> float:
    return (n - 1) / n


def _one(n: int) -> float:
    return 1.0


OPERATIONS = {
    "all_reduce": Operation(
        factor=lambda n: 2 * (n - 1) / n,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (n, n * (n - 1) // 2),
        run=lambda send, receive: dist.all_reduce(receive),
    ),
    "all_gather": Operation(
        factor=_each,
        receives_chunks=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, chunk),
        run=lambda send, receive: _all_gather(receive, send),
    ),
    "reduce_scatter": Operation(
        factor=_each,
        sends_chunks=True,
        sent=lambda r, chunk, n: r + chunk,
        received=lambda r, chunk, n: (n, n * (n - 1) // 2 + n * r),
        run=lambda send, receive: _reduce_scatter(receive, send),
    ),
    "broadcast": Operation(
        factor=_one,
        sent=lambda r, chunk, n: r + 7,
        received=lambda r, chunk, n: (1, 7),
        run=lambda send, receive: dist.broadcast(receive, src=0),
    ),
    "reduce": Operation(
        factor=_one,
        root_only=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (n, n * (n - 1) // 2),
        run=lambda send, receive: dist.reduce(receive, dst=0),
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
        factor=_one,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, (r - 1) % n),
        run=_ring,
    ),
    "gather": Operation(
        factor=_each,
        receives_chunks=True,
        root_only=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, chunk),
        run=_gather,
    ),
    "scatter": Operation(
        factor=_each,
        sends_chunks=True,
        sent=lambda r, chunk, n: r * n + chunk,
        received=lambda r, chunk, n: (1, r),
        run=_scatter,
    ),
    "hypercube": Operation(
        factor=_each,
        receives_chunks=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, chunk),
        run=_hypercube,
    ),
}


class Buffers:
    """Send and receive buffer of one rank for one operation, of `size` bytes the larger one; fp32.

    `run` starts one operation, which is done when the current stream is. In place they overlap as NCCL defines it: the same
    buffer, or the rank's own chunk of the larger one.

    Raises:
        RuntimeError: there is no memory for them.
    """

    def __init__(
        self,
        op: str,
        placement: str,
        size: int,
        rank: int,
        n: int,
        device: torch.device,
        communicator: Communicator | None,
    ) -> None:
        self._operation, self._rank, self._n = OPERATIONS[op], rank, n
        sends, receives = self._operation.sends_chunks, self._operation.receives_chunks
        count = max(1, size // 4 // (n if sends or receives else 1))
        self.moved = 4 * count * (n if sends or receives else 1)
        self.send = torch.empty(count * (n if sends else 1), device=device)
        own = slice(rank * count, (rank + 1) * count)
        if placement == "out_of_place":
            self.receive = torch.full((count * (n if receives else 1),), float("nan"), device=device)
        elif receives:
            self.receive = torch.full((count * n,), float("nan"), device=device)
            self.send = self.receive[own]
        else:
            self.receive = self.send[own] if sends else self.send

        self.run: Callable[[], object]
        if communicator:
            self.run = communicator.operation(op, self.send, self.receive)
        else:
            self.run = lambda: self._operation.run(self.send, self.receive)

    def check(self) -> torch.Tensor:
        """Fills the send buffer, runs once, and counts the elements of this rank that are not what arithmetic says.

        The count stays on the device: who reads it waits for the operation, which may hang.
        """
        self.receive.fill_(float("nan"))  # so that what an earlier run left cannot pass for what this one brings
        for index, chunk in enumerate(self.send.chunk(self._n if self._operation.sends_chunks else 1)):
            for start in range(0, chunk.numel(), CHUNK):
                part = chunk[start : start + CHUNK]
                part.copy_(pattern(start, part.numel(), part.device) + self._operation.sent(self._rank, index, self._n))
        self.run()
        if self._operation.root_only and self._rank != 0:
            return torch.zeros((), dtype=torch.int64, device=self.receive.device)
        return wrong_elements(self.receive, self._operation, self._rank, self._n)


def pattern(start: int, count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(start, start + count, device=device, dtype=torch.int64) % PERIOD).to(torch.float32)


def wrong_elements(receive: torch.Tensor, operation: Operation, rank: int, n: int) -> torch.Tensor:
    """How many elements are not what arithmetic says. The values are small integers, so fp32 has them exactly."""
    wrong = torch.zeros((), dtype=torch.int64, device=receive.device)
    for index, chunk in enumerate(receive.chunk(n if operation.receives_chunks else 1)):
        factor, addend = operation.received(rank, index, n)
        for start in range(0, chunk.numel(), CHUNK):
            part = chunk[start : start + CHUNK]
            wrong += (part != pattern(start, part.numel(), part.device) * factor + addend).sum()
    return wrong
