"""Who else is on the GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import read, text

MOST, NAME = 16, 64
"""Obstacles told, and characters of a process's name told: a busy host has hundreds of processes, and a name may be a path."""


def obstacles(devices: Iterable[int], *, share: bool = False) -> list[str]:
    """What would spoil figures of these GPUs: MIG, which slices them, and the processes of others unless they may `share`.

    A GPU that does not answer is no obstacle: the collector tells of it.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        found = [obstacle for index in devices for obstacle in _of(index, share)]
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return found if len(found) <= MOST else [*found[:MOST], f"{len(found) - MOST} more"]


def _of(index: int, share: bool) -> Iterator[str]:
    gpu = read(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if isinstance(gpu, Absent):
        return
    if read(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0]) == nvml.NVML_DEVICE_MIG_ENABLE:
        yield f"gpu={index} is divided by MIG: `nvidia-smi -i {index} -mig 0` makes it whole"
    running = [] if share else read(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
    if isinstance(running, Absent) and running.status == "error":
        yield f"gpu={index} does not tell who uses it ({running.reason})"
    for process in [] if isinstance(running, Absent) else running:
        yield f"gpu={index} is in use by process {process.pid}{_name(process.pid)}"


def _name(pid: int) -> str:
    name: Any = read(lambda: text(nvml.nvmlSystemGetProcessName(pid)))
    return "" if isinstance(name, Absent) or not name else f" ({name[:NAME]})"
