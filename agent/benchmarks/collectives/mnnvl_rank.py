"""Measure collectives as one rank in a separate process, because a process reads NCCL_MNNVL_ENABLE only once.

This program reads a request as one line of JSON from standard input, and writes lines of JSON to standard output. Rank 0 first
writes the ID of the communicator (`id`); the other ranks read that ID from their standard input. The last line has `results` or
`error`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from agent.benchmarks.collectives.operations import CollectiveBuffers
from agent.benchmarks.runtime.nccl import Communicator, load_library

WARM_UP, REPEATS = 3, 10


class PipeStore:
    """A substitute for torch's store, with which the ranks exchange the communicator's ID over standard input and output."""

    def __init__(self) -> None:
        self._value = ""

    def set(self, key: str, value: str) -> None:
        """Write the ID."""
        self._value = value
        _write({"id": value})

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Read the ID, unless this rank has written it. The parent process kills a rank that waits too long."""
        self._value = self._value or str(json.loads(sys.stdin.readline())["id"])

    def get(self, key: str) -> bytes:
        """Return the ID."""
        return self._value.encode()


def measure(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for each operation and size: median time in seconds, bytes of the larger buffer, and number of wrong elements.

    This rank's receive buffer is checked in one run before the timed runs, and in one run after them. The wrong elements of both
    checks are added up.
    """
    device = torch.device("cuda", request["device"])
    torch.cuda.set_device(device)
    rank, world_size = request["rank"], request["world_size"]
    store = cast(Store, PipeStore())
    communicator = Communicator(load_library(), store, rank, world_size, request["timeout_s"])
    results = []
    for op in request["ops"]:
        for size in request["sizes_bytes"]:
            buffers = CollectiveBuffers(op, "out_of_place", size, rank, world_size, device, communicator)
            wrong = int(buffers.run_and_check())
            seconds = statistics.median([_time(buffers) for _ in range(WARM_UP + REPEATS)][WARM_UP:])
            wrong += int(buffers.run_and_check())
            results.append({"op": op, "size_bytes": size, "moved": buffers.moved, "seconds": seconds, "wrong": wrong})
            del buffers
    communicator.close()
    return results


def _time(buffers: CollectiveBuffers) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    buffers.run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _write(message: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(message)}\n")
    sys.stdout.flush()


def main() -> None:
    """Answer one request."""
    try:
        answer: dict[str, Any] = {"results": measure(json.loads(sys.stdin.readline()))}
    except (RuntimeError, OSError, ValueError) as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    _write(answer)


if __name__ == "__main__":
    main()
