"""The collective operations of nccl-tests: their buffers, the values to send, the values to expect, and the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from agent.benchmarks.runtime.nccl import Communicator

CHUNK = 1 << 24
"""Maximum number of elements that are filled or checked at once, to limit the memory for the expected values. (Elsewhere in this
file, a chunk is the part of a buffer that belongs to one rank.)"""
PERIOD = 251
"""The pattern (see `pattern`) repeats the integers 0 to 250."""
EXACT = 1 << 24
"""fp32 represents all integers below this one exactly, so a sum below it does not depend on the order in which NCCL adds."""

Call = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective. `n` is the world size, `r` the rank."""

    sends_chunks: bool = False
    """The send buffer has one chunk for each rank."""
    receives_chunks: bool = False
    """The receive buffer has one chunk from each rank."""
    root_only: bool = False
    """Only rank 0 receives."""
    sent: Callable[[int, int, int], int]
    """(r, chunk, n) -> addend: that chunk of rank r's send buffer contains pattern + addend."""
    received: Callable[[int, int, int], tuple[int, int]]
    """(r, chunk, n) -> (factor, addend): that chunk of rank r's receive buffer must contain pattern · factor + addend."""
    run: Call
    """The call in torch.distributed, used in a rehearsal on CPUs. On GPUs NCCL is called directly."""


# torch 2.13 renamed both functions and warns at every call of the old names.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _term(rank: int, n: int) -> int:
    """Return what a rank adds to the pattern in a reduction of `n` ranks: its number, modulo `_terms(n)`."""
    return rank % _terms(n)


def _terms(n: int) -> int:
    """Return the number of different terms.

    Every sum over `n` ranks must stay below EXACT. Each rank contributes the pattern and up to two terms (in reduce_scatter).
    With up to 2 800 ranks, each rank has a different term.
    """
    return max(1, (EXACT // n - PERIOD) // 2)


def _sum_of_terms(n: int) -> int:
    """Return the sum of the terms of the ranks 0 to n - 1."""
    rounds, rest = divmod(n, _terms(n))
    return rounds * (_terms(n) * (_terms(n) - 1) // 2) + rest * (rest - 1) // 2


def _ring(send: torch.Tensor, receive: torch.Tensor) -> None:
    n, r = dist.get_world_size(), dist.get_rank()
    _run_p2p(dist.P2POp(dist.isend, send, (r + 1) % n), dist.P2POp(dist.irecv, receive, (r - 1) % n))


def _run_p2p(*operations: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv(list(operations)):
        work.wait()


def _gather(send: torch.Tensor, receive: torch.Tensor) -> None:
    n = dist.get_world_size()
    dist.gather(send, list(receive.chunk(n)) if dist.get_rank() == 0 else None, dst=0)


def _scatter(send: torch.Tensor, receive: torch.Tensor) -> None:
    n = dist.get_world_size()
    dist.scatter(receive, list(send.chunk(n)) if dist.get_rank() == 0 else None, src=0)


def _hypercube(send: torch.Tensor, receive: torch.Tensor) -> None:
    """Run an all_gather in log2(n) steps. In step k each rank r and rank r XOR 2^k exchange all chunks that they have."""
    n, r = dist.get_world_size(), dist.get_rank()
    count, mask = send.numel(), 1
    receive[r * count : (r + 1) * count].copy_(send)
    while mask < n:
        own = r & ~(mask - 1)
        other = own ^ mask
        _run_p2p(
            dist.P2POp(dist.isend, receive[own * count : (own + mask) * count], r ^ mask),
            dist.P2POp(dist.irecv, receive[other * count : (other + mask) * count], r ^ mask),
        )
        mask <<= 1


OPERATIONS = {
    "all_reduce": Operation(
        sent=lambda r, chunk, n: _term(r, n),
        received=lambda r, chunk, n: (n, _sum_of_terms(n)),
        run=lambda send, receive: dist.all_reduce(receive),
    ),
    "all_gather": Operation(
        receives_chunks=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, chunk),
        run=lambda send, receive: _all_gather(receive, send),
    ),
    "reduce_scatter": Operation(
        sends_chunks=True,
        sent=lambda r, chunk, n: _term(r, n) + _term(chunk, n),
        received=lambda r, chunk, n: (n, _sum_of_terms(n) + n * _term(r, n)),
        run=lambda send, receive: _reduce_scatter(receive, send),
    ),
    "broadcast": Operation(
        sent=lambda r, chunk, n: r + 7,
        received=lambda r, chunk, n: (1, 7),
        run=lambda send, receive: dist.broadcast(receive, src=0),
    ),
    "reduce": Operation(
        root_only=True,
        sent=lambda r, chunk, n: _term(r, n),
        received=lambda r, chunk, n: (n, _sum_of_terms(n)),
        run=lambda send, receive: dist.reduce(receive, dst=0),
    ),
    "all_to_all": Operation(
        sends_chunks=True,
        receives_chunks=True,
        sent=lambda r, chunk, n: r * n + chunk,
        received=lambda r, chunk, n: (1, chunk * n + r),
        run=lambda send, receive: dist.all_to_all_single(receive, send),
    ),
    "send_recv": Operation(
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, (r - 1) % n),
        run=_ring,
    ),
    "gather": Operation(
        receives_chunks=True,
        root_only=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, chunk),
        run=_gather,
    ),
    "scatter": Operation(
        sends_chunks=True,
        sent=lambda r, chunk, n: r * n + chunk,
        received=lambda r, chunk, n: (1, r),
        run=_scatter,
    ),
    "hypercube": Operation(
        receives_chunks=True,
        sent=lambda r, chunk, n: r,
        received=lambda r, chunk, n: (1, chunk),
        run=_hypercube,
    ),
}


class CollectiveBuffers:
    """Send and receive buffer (fp32) of one rank for one operation. The larger one has `size` bytes, rounded to whole elements.

    `run` starts one operation; on GPUs, on the stream that was current when the buffers were created.

    For an in-place operation, the buffers overlap as NCCL requires: they are the same buffer, or one of them is the rank's chunk
    of the other buffer.

    Raises:
        RuntimeError: out of memory.
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
        """Size in bytes of the larger buffer as allocated."""
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

    def run_and_check(self) -> torch.Tensor:
        """Fill the send buffer, run once, and return the number of wrong elements in this rank's receive buffer.

        The number is 0 on a rank that receives nothing. It is returned as a tensor on the device, because reading it waits for
        the operation, which may hang.
        """
        self.receive.fill_(float("nan"))  # so that the result of an earlier run does not count as correct
        for index, chunk in enumerate(self.send.chunk(self._n if self._operation.sends_chunks else 1)):
            for start in range(0, chunk.numel(), CHUNK):
                part = chunk[start : start + CHUNK]
                part.copy_(pattern(start, part.numel(), part.device) + self._operation.sent(self._rank, index, self._n))
        self.run()
        if self._operation.root_only and self._rank != 0:
            return torch.zeros((), dtype=torch.int64, device=self.receive.device)
        return count_wrong_elements(self.receive, self._operation, self._rank, self._n)


def pattern(start: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` elements of the pattern that all buffers are filled with, from element `start` on."""
    return (torch.arange(start, start + count, device=device, dtype=torch.int64) % PERIOD).to(torch.float32)


def count_wrong_elements(receive: torch.Tensor, operation: Operation, rank: int, n: int) -> torch.Tensor:
    """Return how many elements of a rank's receive buffer differ from the expected values."""
    wrong = torch.zeros((), dtype=torch.int64, device=receive.device)
    for index, chunk in enumerate(receive.chunk(n if operation.receives_chunks else 1)):
        factor, addend = operation.received(rank, index, n)
        for start in range(0, chunk.numel(), CHUNK):
            part = chunk[start : start + CHUNK]
            wrong += (part != pattern(start, part.numel(), part.device) * factor + addend).sum()
    return wrong
