"""The PCIe path between each GPU and its nearest network adapter, named as by `nvidia-smi topo -m`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collectors.base import Absent, Family, Value, add_parts
from collectors.files import Files
from collectors.pcie.device import GPU, NETWORK, Device
from collectors.sysfs import PCI_DEVICES, parse_numa_node

PATHS = ("PIX", "PXB", "NODE", "SYS")
"""The shortest first: one PCIe switch; several PCIe bridges; the host bridges of one NUMA node; the link between processors."""
NO_ADAPTER = Absent.unsupported("no NVIDIA network adapter is on the PCI bus")


def affinity_family(files: Files, devices: Sequence[Device], *, absent: Absent | None = None) -> Family:
    """Return the path of each GPU; with `absent`, that is the reason why no path is known."""
    family = Family(
        name="pcie.nic_path",
        unit="1",
        help="PCIe path between the GPU and its nearest network adapter: PIX, PXB, NODE or SYS, as in nvidia-smi topo -m",
    )
    gpus = {device.address: device for device in devices if device.kind == GPU}
    adapters = [device for device in devices if device.kind == NETWORK]
    return add_parts(family, "pci", list(gpus), lambda address: absent or nearest_path(files, gpus[address], adapters))


def nearest_path(files: Files, gpu: Device, adapters: Iterable[Device]) -> Value | Absent:
    """Return the shortest path between a GPU and any of the adapters."""
    paths = [_path(files, gpu, adapter) for adapter in adapters]
    return min(paths, key=PATHS.index) if paths else NO_ADAPTER


def _path(files: Files, gpu: Device, adapter: Device) -> str:
    common = next((bridge for bridge in gpu.bridges if bridge in adapter.bridges), None)
    if common:
        # Below the upstream port of a switch, each device has one downstream port of its own.
        depth = max(gpu.bridges.index(common), adapter.bridges.index(common))
        return "PIX" if depth <= 1 else "PXB"
    nodes = {_numa_node(files, device) for device in (gpu, adapter)}
    return "NODE" if len(nodes) == 1 else "SYS"


def _numa_node(files: Files, device: Device) -> object:
    """Return the NUMA node; a text if the firmware or the kernel reports none."""
    node = files.read(f"{PCI_DEVICES}/{device.address}/numa_node", parse_numa_node, missing="none")
    return "unknown" if isinstance(node, Absent) else node
