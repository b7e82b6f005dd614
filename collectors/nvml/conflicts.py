"""Conflicts that prevent a measurement: MIG mode, and other processes on the GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import decode, try_read

MAX_CONFLICTS, MAX_NAME = 16, 64
"""Maximum number of conflicts in a report, and of characters of a process name, which may be a path."""


def gpu_conflicts(devices: Iterable[int], *, share: bool = False, limit: int | None = MAX_CONFLICTS) -> list[str]:
    """Return what would distort figures of these GPUs: MIG and, unless `share` is set, compute processes.

    Unless `share` is set, a GPU whose processes cannot be listed is a conflict too. A GPU or a driver that does not answer is no
    conflict here, because the collectors report it. Conflicts beyond `limit` are only counted, in one more text; without a limit,
    all are listed.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        conflicts = [conflict for index in devices for conflict in _conflicts(index, share)]
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return conflicts if limit is None else shortened(conflicts, limit)


def shortened(texts: Sequence[str], limit: int) -> list[str]:
    """Return the first `limit` texts, and if there are more, a text with their number."""
    more = len(texts) - limit
    return [*texts[:limit], *([f"{more} more"] if more > 0 else [])]


def _conflicts(index: int, share: bool) -> Iterator[str]:
    gpu = try_read(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if isinstance(gpu, Absent):
        return
    if try_read(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0]) == nvml.NVML_DEVICE_MIG_ENABLE:
        yield f"gpu={index} is in MIG mode: switch it off with `nvidia-smi -i {index} -mig 0`"
    processes = [] if share else try_read(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    if isinstance(processes, Absent) and processes.status == "error":
        yield f"gpu={index}: its processes cannot be listed ({processes.reason})"
    for process in [] if isinstance(processes, Absent) else processes:
        yield f"gpu={index} is in use by process {process.pid}{_name(process.pid)}"


def _name(pid: int) -> str:
    name: Any = try_read(lambda: decode(nvml.nvmlSystemGetProcessName(pid)))
    return "" if isinstance(name, Absent) or not name else f" ({name[:MAX_NAME]})"
