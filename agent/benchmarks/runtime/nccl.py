"""NCCL called directly, as nccl-tests does: every operation in and out of place, and no more than a call's cost on the host.

torch.distributed offers several operations in place alone, and takes longer for a call than NCCL for a small message.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

FLOAT32, SUM = 7, 0
"""ncclFloat32 and ncclSum of nccl.h."""
IN_PROGRESS = 7
ID_BYTES = 128


Call = Callable[[], None]


class NcclError(RuntimeError):
    """NCCL refused a call, or did not end one in time."""


def library() -> ctypes.CDLL:
    """NCCL, as torch has loaded it.

    Raises:
        OSError: there is no libnccl.so.2; some builds of torch hold NCCL within themselves.
    """
    found = ctypes.CDLL("libnccl.so.2")
    found.ncclGetErrorString.restype = ctypes.c_char_p
    return found


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class Communicator:
    """One rank's NCCL communicator over all ranks of the launch.

    Raises:
        NcclError: it cannot be formed.
    """

    def __init__(self, library: ctypes.CDLL, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._library = library
        self.rank, self.world_size = rank, world_size
        key = "nccl/id"
        unique = _UniqueId()
        if rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(unique))
            store.set(key, bytes(unique).hex())
        store.wait([key], timedelta(seconds=timeout_s))
        ctypes.memmove(ctypes.byref(unique), bytes.fromhex(store.get(key).decode()), ID_BYTES)
        self._handle = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(self._handle), world_size, unique, rank)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (0, IN_PROGRESS):
            raise NcclError(f"{name}: {self._library.ncclGetErrorString(code).decode()}")

    def close(self) -> None:
        """Gives the communicator's memory back."""
        self._call("ncclCommDestroy", self._handle)

    def abort(self) -> str:
        """Ends the communicator where an operation does not end by itself, so that its kernels leave the GPU.

        Returns what NCCL itself says went wrong, or an empty string.
        """
        code = ctypes.c_int()
        self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(code))
        self._library.ncclCommAbort(self._handle)
        if code.value in (0, IN_PROGRESS):
            return ""
        return f"NCCL: {self._library.ncclGetErrorString(code.value).decode()}"

    def operation(self, op: str, send: torch.Tensor, receive: torch.Tensor) -> Call:
        """What starts the operation between these buffers (fp32) on the stream that is current now; the root is rank 0.

        All that a call needs is made beforehand: a small message takes NCCL 8 µs, and Python as long to make five arguments.
        """
        here, there, n = Buffer(send), Buffer(receive), self.world_size
        everyone, root = range(n), range(1)
        mine = everyone if self.rank == 0 else range(0)
        make: dict[str, Callable[[], Call]] = {
            "all_reduce": lambda: self._collective("ncclAllReduce", here, there, here.count, SUM),
            "all_gather": lambda: self._collective("ncclAllGather", here, there, here.count),
            "reduce_scatter": lambda: self._collective("ncclReduceScatter", here, there, there.count, SUM),
            "broadcast": lambda: self._collective("ncclBroadcast", here, there, here.count, 0),
            "reduce": lambda: self._collective("ncclReduce", here, there, here.count, SUM, 0),
            "all_to_all": lambda: self._exchange("ncclAlltoAll", here, there, here.count // n, everyone, everyone),
            "gather": lambda: self._exchange("ncclGather", here, there, here.count, root, mine, 0),
            "scatter": lambda: self._exchange("ncclScatter", here, there, there.count, mine, root, 0),
            "send_recv": lambda: self._swap(here, there, here.count, (self.rank + 1) % n, (self.rank - 1) % n),
            "hypercube": lambda: self._hypercube(here, there),
        }
        return make[op]()

    def _bound(self, name: str, *arguments: object) -> Call:
        """A call whose arguments are ready."""
        function, good = getattr(self._library, name), (0, IN_PROGRESS)

        def call() -> None:
            code = function(*arguments)
            if code not in good:
                raise NcclError(f"{name}: {self._library.ncclGetErrorString(code).decode()}")

        return call

    def _group(self, calls: Sequence[Call]) -> Call:
        """Calls that NCCL starts at once."""
        start, end = self._bound("ncclGroupStart"), self._bound("ncclGroupEnd")

        def run() -> None:
            start()
            for call in calls:
                call()
            end()

        return run

    def _collective(self, name: str, here: Buffer, there: Buffer, count: int, *last: int) -> Call:
        numbers = (ctypes.c_size_t(count), FLOAT32, *last)
        return self._bound(name, here.at(0), there.at(0), *numbers, self._handle, _stream())

    def _exchange(
        self, name: str, here: Buffer, there: Buffer, count: int, targets: range, sources: range, *last: int
    ) -> Call:
        """NCCL's own operation, which 2.28 brought; before, a chunk is sent to each target and one received from each source."""
        if hasattr(self._library, name):
            return self._collective(name, here, there, count, *last)
        return self._group(
            [self._send(here, number * count, count, peer) for number, peer in enumerate(targets)]
            + [self._receive(there, number * count, count, peer) for number, peer in enumerate(sources)]
        )

    def _send(self, buffer: Buffer, start: int, count: int, peer: int) -> Call:
        return self._message("ncclSend", buffer, start, count, peer)

    def _receive(self, buffer: Buffer, start: int, count: int, peer: int) -> Call:
        return self._message("ncclRecv", buffer, start, count, peer)

    def _message(self, name: str, buffer: Buffer, start: int, count: int, peer: int) -> Call:
        return self._bound(name, buffer.at(start), ctypes.c_size_t(count), FLOAT32, peer, self._handle, _stream())

    def _swap(self, here: Buffer, there: Buffer, count: int, target: int, source: int) -> Call:
        return self._group([self._send(here, 0, count, target), self._receive(there, 0, count, source)])

    def _hypercube(self, here: Buffer, there: Buffer) -> Call:
        """An all_gather in log2(n) steps: in each a rank swaps all it has with its neighbour in one more dimension."""
        own = there.tensor[self.rank * here.count : (self.rank + 1) * here.count]
        steps = []
        mask = 1
        while mask < self.world_size:
            mine, count, neighbour = self.rank & ~(mask - 1), mask * here.count, self.rank ^ mask
            sent, received = mine * here.count, (mine ^ mask) * here.count
            steps.append(
                self._group(
                    [self._send(there, sent, count, neighbour), self._receive(there, received, count, neighbour)]
                )
            )
            mask <<= 1

        def run() -> None:
            own.copy_(here.tensor)
            for step in steps:
                step()

        return run


class Buffer:
    """A tensor as NCCL wants it: an address and a number of elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.count = tensor.numel()
        self._address = tensor.data_ptr()

    def at(self, element: int) -> ctypes.c_void_p:
        """Address of an element (4 bytes each)."""
        return ctypes.c_void_p(self._address + 4 * element)


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
