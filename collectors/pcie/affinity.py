"""The PCIe path between each GPU and its nearest network adapter, in the terms of `nvidia-smi topo -m`."""

from __future__ import annotations

from collections.abc import Sequence

from collectors.base import Absent, Family, Value, add_parts
from collectors.files import Files
from collectors.pcie.device import GPU, Device, fabric_adapters
from collectors.sysfs import PCI_DEVICES, parse_numa_node

PATHS = ("PIX", "PXB", "NODE", "SYS")
"""Kinds of path, the shortest first.

* PIX crosses at most one PCIe switch.
* PXB crosses several PCIe switches.
* NODE crosses the processor within one NUMA node. `nvidia-smi` calls some of these paths PHB.
* SYS crosses the link between NUMA nodes.
"""
NO_ADAPTER = Absent.unsupported("no network adapter of the fabric is on the PCI bus")


def affinity_families(files: Files, devices: Sequence[Device], *, absent: Absent | None) -> list[Family]:
    """Return the families `pcie.nic_path` and `pcie.nearest_nics` of the GPUs. If `absent` is given, each reading is `absent`."""
    path = Family(
        name="pcie.nic_path",
        unit="1",
        help="PCIe path between the GPU and its nearest network adapter, as in nvidia-smi topo -m: PIX, PXB, NODE (or PHB), SYS",
        varies=True,
    )
    # Both readings vary, because an adapter may be lost while the host runs.
    help_of_nearest = "PCI addresses of the network adapters that are nearest to the GPU"
    nearest = Family(name="pcie.nearest_nics", unit="1", help=help_of_nearest, varies=True)
    gpus = {device.address: device for device in devices if device.kind == GPU}
    adapters = fabric_adapters(devices)
    of_gpu = {address: nearest_adapters(files, gpu, adapters) for address, gpu in gpus.items()}
    add_parts(path, "pci", list(gpus), lambda address: absent or of_gpu[address][0])
    add_parts(nearest, "pci", list(gpus), lambda address: absent or of_gpu[address][1])
    return [path, nearest]


def nearest_adapters(
    files: Files, gpu: Device, adapters: Sequence[Device]
) -> tuple[Value, Value] | tuple[Absent, Absent]:
    """Return the shortest path from a GPU to any of the adapters, and the addresses of all adapters with this path."""
    if not adapters:
        return NO_ADAPTER, NO_ADAPTER
    paths = {adapter.address: _path(files, gpu, adapter) for adapter in adapters}
    shortest = min(paths.values(), key=PATHS.index)
    return shortest, " ".join(sorted(address for address, path in paths.items() if path == shortest))


def _path(files: Files, gpu: Device, adapter: Device) -> str:
    common = next((bridge for bridge in gpu.bridges if bridge in adapter.bridges), None)
    if common:
        # Each device on a switch has its own downstream port (index 0). They share the upstream port of the switch (index 1).
        depth = max(gpu.bridges.index(common), adapter.bridges.index(common))
        return "PIX" if depth <= 1 else "PXB"
    nodes = {_numa_node(files, device) for device in (gpu, adapter)}
    return "NODE" if len(nodes) == 1 else "SYS"


def _numa_node(files: Files, device: Device) -> object:
    """Return the NUMA node; the text `unknown` if the firmware or the kernel reports no node, or the node cannot be read."""
    node = files.read(f"{PCI_DEVICES}/{device.address}/numa_node", parse_numa_node, missing="none")
    return "unknown" if isinstance(node, Absent) else node
