"""Configure torch's flight recorder, which keeps the last operations of each process group, and request dumps from it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

FILE_PREFIX = "flight.rank"
DUMP_S = 2.0


def flight_recorder_env(work: Path) -> dict[str, str]:
    """Return the variables that make torch record its last operations and dump them into `work`.

    Torch 2.9 renamed some variables, so the old and the new names are set. Rackproof keeps the dumps but never loads
    them, because they are pickles.
    """
    files, entries = str(work / FILE_PREFIX), "1000"
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": entries,
        "TORCH_FR_BUFFER_SIZE": entries,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": files,
        "TORCH_FR_DUMP_TEMP_FILE": files,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": files,
    }


def dump_flight_records(work: Path, ranks: Sequence[int]) -> None:
    """Ask torch's watchdog in each rank for a dump, and wait up to DUMP_S for the files."""
    dumping = [rank for rank in ranks if _request_dump(work / f"{FILE_PREFIX}{rank}.pipe")]
    end = time.monotonic() + DUMP_S
    while time.monotonic() < end and not all((work / f"{FILE_PREFIX}{rank}").exists() for rank in dumping):
        time.sleep(0.05)


def _request_dump(pipe: Path) -> bool:
    """Ask for a dump through the pipe. Return False if no process reads the pipe: no dump will follow."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            return os.write(descriptor, b"1") == 1
        finally:
            os.close(descriptor)
    return False
