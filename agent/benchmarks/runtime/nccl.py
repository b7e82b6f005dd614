"""Direct calls of NCCL, as in nccl-tests.

torch.distributed offers some operations only in place or only out of place. Each of its calls takes the host longer than NCCL
takes for a small message. Here each operation runs out of place and, if nccl-tests measures it in place too, also in place. Most
operations need only one C call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from agent.benchmarks.runtime.context import Context

FLOAT32, SUM = 7, 0
"""ncclFloat32 and ncclSum of nccl.h."""
SUCCESS, IN_PROGRESS = 0, 7
ID_BYTES = 128
LONGEST_MESSAGE = 400

Call = Callable[[], None]


class NcclError(RuntimeError):
    """A call of NCCL failed or did not finish in time."""


def error_text(library: ctypes.CDLL, code: int) -> str:
    """Return NCCL's text for an error code and, if NCCL has one, its last error message, which names the cause.

    An example: `MNNVL (cliqueSize 72) is available but not working on this system. Check the IMEX configuration`.
    """
    text: str = library.ncclGetErrorString(code).decode(errors="replace")
    last = library.ncclGetLastError(None) if hasattr(library, "ncclGetLastError") else None
    message = " ".join((last or b"").decode(errors="replace").split())[:LONGEST_MESSAGE]
    printable = "".join(character for character in message if character.isprintable())
    return f"{text}: {printable}" if printable else text


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


def load_library() -> ctypes.CDLL:
    """Return libnccl.so.2; torch uses it too, unless torch links NCCL statically. Raises OSError if it cannot be loaded."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    if hasattr(library, "ncclGetLastError"):  # 2.13 and later
        library.ncclGetLastError.restype = ctypes.c_char_p
    return library


class Buffer:
    """A tensor in NCCL's form: an address and a number of elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.count = tensor.numel()
        self._address = tensor.data_ptr()

    def address(self, element: int) -> ctypes.c_void_p:
        """Return the address of the element with that index. Each element has 4 bytes."""
        return ctypes.c_void_p(self._address + 4 * element)


class Communicator:
    """One rank's NCCL communicator over all ranks of the launch.

    Raises:
        NcclError: the communicator cannot be created.
    """

    def __init__(self, library: ctypes.CDLL, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._library = library
        self.rank, self.world_size = rank, world_size
        key = "nccl/id"
        unique_id = _UniqueId()
        if rank == 0:
            self._call("ncclGetUniqueId", ctypes.byref(unique_id))
            store.set(key, bytes(unique_id).hex())
        store.wait([key], timedelta(seconds=timeout_s))
        ctypes.memmove(ctypes.byref(unique_id), bytes.fromhex(store.get(key).decode()), ID_BYTES)
        self._handle = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(self._handle), world_size, unique_id, rank)

    @classmethod
    def connect(cls, context: Context, name: str) -> Communicator:
        """Create a communicator on all ranks. If any rank has no libnccl.so.2, all ranks raise NcclError.

        Some builds of torch link NCCL statically and come without that file. All ranks raise the error, so that no rank waits for
        a rank that has no library.

        Args:
            context: the context of this rank.
            name: prefix of the keys in the store, different for each communicator.
        """
        library, problem = None, "another rank has no libnccl.so.2"
        try:
            library = load_library()
        except OSError as error:
            problem = (
                f"{error}: this torch may link NCCL statically; install libnccl2, or a torch that loads libnccl.so.2"
            )
        if not context.min_max_over_ranks(int(library is not None))[0] or library is None:
            raise NcclError(problem)
        store = PrefixStore(name, context.store)
        return cls(library, store, context.rank, context.world_size, context.timeout_s)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"{name}: {error_text(self._library, code)}")

    def close(self) -> None:
        """Free the communicator."""
        self._call("ncclCommDestroy", self._handle)

    def abort(self) -> str:
        """Abort the communicator, which stops kernels that hang. Return the error that NCCL reports, or an empty string."""
        code = ctypes.c_int()
        self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(code))
        self._library.ncclCommAbort(self._handle)
        if code.value in (SUCCESS, IN_PROGRESS):
            return ""
        return f"NCCL: {error_text(self._library, code.value)}"

    def operation(self, op: str, send_tensor: torch.Tensor, receive_tensor: torch.Tensor) -> Call:
        """Return a function that starts the operation on these fp32 tensors; the root is rank 0.

        The function uses the CUDA stream that is current when `operation` is called.

        All C arguments are created in advance: creating five of them takes 8 µs, as long as NCCL needs for a small message.
        """
        send, receive, n = Buffer(send_tensor), Buffer(receive_tensor), self.world_size
        all_ranks, root = range(n), range(1)
        root_only = all_ranks if self.rank == 0 else range(0)
        make: dict[str, Callable[[], Call]] = {
            "all_reduce": lambda: self._collective("ncclAllReduce", send, receive, send.count, SUM),
            "all_gather": lambda: self._collective("ncclAllGather", send, receive, send.count),
            "reduce_scatter": lambda: self._collective("ncclReduceScatter", send, receive, receive.count, SUM),
            "broadcast": lambda: self._collective("ncclBroadcast", send, receive, send.count, 0),
            "reduce": lambda: self._collective("ncclReduce", send, receive, send.count, SUM, 0),
            "all_to_all": lambda: self._chunks("ncclAlltoAll", send, receive, send.count // n, all_ranks, all_ranks),
            "gather": lambda: self._chunks("ncclGather", send, receive, send.count, root, root_only, 0),
            "scatter": lambda: self._chunks("ncclScatter", send, receive, receive.count, root_only, root, 0),
            "send_recv": lambda: self._ring(send, receive),
            "hypercube": lambda: self._hypercube(send, receive),
        }
        return make[op]()

    def exchange(self, send: torch.Tensor, receive: torch.Tensor, peer: int) -> Call:
        """Return a function that sends `send` to rank `peer` and receives `receive` from it at the same time."""
        count = send.numel()
        return self._group([self._send(Buffer(send), 0, count, peer), self._receive(Buffer(receive), 0, count, peer)])

    def _bound(self, name: str, *arguments: object) -> Call:
        """Return a function that calls NCCL's function `name` with these arguments."""
        function, good = getattr(self._library, name), (SUCCESS, IN_PROGRESS)

        def call() -> None:
            code = function(*arguments)
            if code not in good:
                raise NcclError(f"{name}: {error_text(self._library, code)}")

        return call

    def _group(self, calls: Sequence[Call]) -> Call:
        """Return a function that makes all the calls as one NCCL group, so that they run at the same time."""
        start, end = self._bound("ncclGroupStart"), self._bound("ncclGroupEnd")

        def run() -> None:
            start()
            for call in calls:
                call()
            end()

        return run

    def _collective(self, name: str, send: Buffer, receive: Buffer, count: int, *more: int) -> Call:
        numbers = (ctypes.c_size_t(count), FLOAT32, *more)
        return self._bound(name, send.address(0), receive.address(0), *numbers, self._handle, _stream())

    def _chunks(
        self, name: str, send: Buffer, receive: Buffer, count: int, targets: range, sources: range, *more: int
    ) -> Call:
        """Return a function that calls NCCL's function `name`.

        If the library lacks that function (NCCL before 2.28), the returned function sends `count` elements to each target and
        receives `count` elements from each source.
        """
        if hasattr(self._library, name):
            return self._collective(name, send, receive, count, *more)
        return self._group(
            [self._send(send, number * count, count, peer) for number, peer in enumerate(targets)]
            + [self._receive(receive, number * count, count, peer) for number, peer in enumerate(sources)]
        )

    def _send(self, buffer: Buffer, start: int, count: int, peer: int) -> Call:
        return self._message("ncclSend", buffer, start, count, peer)

    def _receive(self, buffer: Buffer, start: int, count: int, peer: int) -> Call:
        return self._message("ncclRecv", buffer, start, count, peer)

    def _message(self, name: str, buffer: Buffer, start: int, count: int, peer: int) -> Call:
        return self._bound(name, buffer.address(start), ctypes.c_size_t(count), FLOAT32, peer, self._handle, _stream())

    def _ring(self, send: Buffer, receive: Buffer) -> Call:
        """Return a function that sends to the next rank and receives from the previous one."""
        target, source = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        return self._group([self._send(send, 0, send.count, target), self._receive(receive, 0, send.count, source)])

    def _hypercube(self, send: Buffer, receive: Buffer) -> Call:
        """Return a function that runs an all_gather in log2(n) steps.

        In step k (from 0) each rank r and rank r XOR 2^k exchange all chunks that they have.
        """
        own_chunk = receive.tensor[self.rank * send.count : (self.rank + 1) * send.count]
        steps = []
        mask = 1
        while mask < self.world_size:
            first, count, neighbour = self.rank & ~(mask - 1), mask * send.count, self.rank ^ mask
            sent, received = first * send.count, (first ^ mask) * send.count
            steps.append(
                self._group(
                    [self._send(receive, sent, count, neighbour), self._receive(receive, received, count, neighbour)]
                )
            )
            mask <<= 1

        def run() -> None:
            own_chunk.copy_(send.tensor)
            for step in steps:
                step()

        return run


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
