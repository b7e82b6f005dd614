"""The table of the collectors. Only processes that read the hardware import it, because it imports every collector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from collectors.base import Collector
from collectors.clock import ClockCollector
from collectors.container import ContainerCollector
from collectors.fabric import FabricCollector
from collectors.host import HostCollector
from collectors.infiniband import InfinibandCollector
from collectors.network import NetworkCollector
from collectors.nvml import NvmlCollector
from collectors.optics import OpticsCollector
from collectors.pcie import PcieCollector
from collectors.software import SoftwareCollector
from collectors.storage import StorageCollector
from collectors.wiring import WiringCollector
from collectors.xid import XidCollector


@dataclass(frozen=True, kw_only=True)
class CollectorOptions:
    """What the collectors read, and where."""

    root: Path = Path("/")
    """Directory in which /proc, /sys, /dev, /etc and programs are looked up. NVML does not depend on it."""
    full_snapshot: bool = False
    """Also read what takes too long for a scrape by Prometheus. The snapshots before and after a stage do so."""
    identity: bool = False
    """Also read what identifies NICs and disks, as a full snapshot always does. Exporters set this."""
    gpu_indices: Collection[int] | None = None
    """NVML indices to read; None: all GPUs."""
    keep_nvml_open: bool = False
    """Keep NVML open between collections; GPM counters need it."""


COLLECTORS: Mapping[str, Callable[[CollectorOptions], Collector]] = {
    "host": lambda options: HostCollector(options.root, options.full_snapshot),
    "nvml": lambda options: NvmlCollector(options.gpu_indices, options.full_snapshot, keep_open=options.keep_nvml_open),
    "pcie": lambda options: PcieCollector(options.root, options.full_snapshot),
    "infiniband": lambda options: InfinibandCollector(options.root, options.full_snapshot),
    "network": lambda options: NetworkCollector(options.root, options.full_snapshot, options.identity),
    "wiring": lambda options: WiringCollector(options.root, options.full_snapshot),
    "optics": lambda options: OpticsCollector(options.root, options.full_snapshot),
    "fabric": lambda options: FabricCollector(options.root, options.full_snapshot),
    "xid": lambda options: XidCollector(options.root / "dev/kmsg", options.full_snapshot, root=options.root),
    "storage": lambda options: StorageCollector(options.root, options.full_snapshot, options.identity),
    "clock": lambda options: ClockCollector(options.root),
    "container": lambda options: ContainerCollector(options.root, options.full_snapshot),
    "software": lambda options: SoftwareCollector(options.root, options.full_snapshot),
}
"""Name -> constructor. Snapshots and the exporter start the collectors in this order."""


def build_collectors(
    gpu_indices: Iterable[int] | None = None,
    *,
    full_snapshot: bool = False,
    identity: bool = False,
    root: Path = Path("/"),
    keep_nvml_open: bool = False,
) -> list[Collector]:
    """Return every collector of COLLECTORS, with these CollectorOptions."""
    options = CollectorOptions(
        root=root,
        full_snapshot=full_snapshot,
        identity=identity,
        gpu_indices=None if gpu_indices is None else tuple(gpu_indices),
        keep_nvml_open=keep_nvml_open,
    )
    return [build(options) for build in COLLECTORS.values()]
