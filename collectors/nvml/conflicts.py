"""Conflicts that prevent a measurement (MIG mode, and other processes on the GPUs), and the processes that use the GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import decode, try_read

MAX_CONFLICTS, MAX_NAME = 16, 64
"""Maximum number of conflicts that are listed, and of characters of a process name, which may be a path."""


def gpu_conflicts(devices: Iterable[int], *, share: bool = False, limit: int | None = MAX_CONFLICTS) -> list[str]:
    """Return a text for each conflict that would distort measurements of these GPUs.

    A GPU in MIG mode is a conflict. Without `share`, two more things are conflicts: a compute process on a GPU, and an error when
    NVML lists a GPU's processes. It is no conflict if NVML cannot be opened or has no handle for a GPU, because the collectors
    report that.

    If there are more than `limit` conflicts, a last text such as `3 more` counts the others. If `limit` is None, all are listed.
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


def compute_processes(devices: Iterable[int]) -> dict[int, dict[int, str]]:
    """Return index -> id -> name of each compute process on these GPUs. The name is empty if NVML does not return it.

    A GPU whose processes NVML cannot list is left out.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        listed = {index: try_read(lambda: _compute_processes(index)) for index in devices}  # noqa: B023 - called at once
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return {index: processes for index, processes in listed.items() if not isinstance(processes, Absent)}


def _compute_processes(index: int) -> dict[int, str]:
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index))
    return {process.pid: _name(process.pid) for process in processes}


def shortened(texts: Sequence[str], limit: int) -> list[str]:
    """Return the first `limit` texts and, if there are others, a last text with the number of the others (`3 more`)."""
    more = len(texts) - limit
    return [*texts[:limit], *([f"{more} more"] if more > 0 else [])]


def _conflicts(index: int, share: bool) -> Iterator[str]:
    gpu = try_read(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if isinstance(gpu, Absent):
        return
    if try_read(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0]) == nvml.NVML_DEVICE_MIG_ENABLE:
        yield f"gpu={index} is in MIG mode: disable MIG with `nvidia-smi -i {index} -mig 0`"
    processes = [] if share else try_read(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    if isinstance(processes, Absent) and processes.status == "error":
        yield f"gpu={index}: its processes cannot be listed ({processes.reason})"
    for process in [] if isinstance(processes, Absent) else processes:
        name = _name(process.pid)
        yield f"gpu={index} is in use by process {process.pid}{f' ({name})' if name else ''}"


def _name(pid: int) -> str:
    name: Any = try_read(lambda: decode(nvml.nvmlSystemGetProcessName(pid)))
    return "" if isinstance(name, Absent) else str(name)[:MAX_NAME]
