"""The collectors: one file a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from collectors.base import Collector
from collectors.host import HostCollector
from collectors.nvml import NvmlCollector
from collectors.xid import XidCollector

ALL: tuple[Callable[[], Collector], ...] = (
    HostCollector,
    NvmlCollector,
    XidCollector,
)


def start(gpu_devices: Iterable[int] | None = None, *, thorough: bool = False) -> list[Collector]:
    """Every collector.

    Args:
        gpu_devices: those that look at GPUs look only at these NVML indices, where any are given.
        thorough: for a snapshot, what is too slow for a scrape is read too.
    """
    devices = None if gpu_devices is None else tuple(gpu_devices)
    return [NvmlCollector(devices, thorough) if kind is NvmlCollector else kind() for kind in ALL]
