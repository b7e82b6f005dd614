"""The collectors: one file, or folder, a source."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from collectors.base import Collector
from collectors.clock import ClockCollector
from collectors.container import ContainerCollector
from collectors.fabric import FabricCollector
from collectors.host import HostCollector
from collectors.infiniband import InfinibandCollector
from collectors.network import NetworkCollector
from collectors.nvml import NvmlCollector
from collectors.pcie import PcieCollector
from collectors.software import SoftwareCollector
from collectors.storage import StorageCollector
from collectors.xid import XidCollector


def start(
    gpu_devices: Iterable[int] | None = None, *, thorough: bool = False, root: Path = Path("/"), hold: bool = False
) -> list[Collector]:
    """Every collector.

    Args:
        gpu_devices: NVML looks only at these indices, where any are given.
        thorough: for a snapshot, what is too slow for a scrape is read too.
        root: where /proc, /sys and /dev lie.
        hold: GPU libraries may stay open from one collection to the next, which some readings need.
    """
    devices = None if gpu_devices is None else tuple(gpu_devices)
    return [
        HostCollector(root, thorough),
        NvmlCollector(devices, thorough, hold=hold),
        PcieCollector(root, thorough),
        InfinibandCollector(root, thorough),
        NetworkCollector(root, thorough),
        FabricCollector(root, thorough),
        XidCollector(root / "dev/kmsg", thorough),
        StorageCollector(root, thorough),
        ClockCollector(root),
        ContainerCollector(root, thorough),
        SoftwareCollector(root, thorough),
    ]
