"""What lies between two GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pynvml as nvml

from collectors.base import Absent
from collectors.nvml.calls import UnreadError, call, read
from collectors.nvml.gpu import Gpu
from collectors.nvml.links import all_known

# Where there is no NVLink, as `nvidia-smi topo -m` spells it.
_PATHS = {
    nvml.NVML_TOPOLOGY_INTERNAL: "X",
    nvml.NVML_TOPOLOGY_SINGLE: "PIX",
    nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    nvml.NVML_TOPOLOGY_NODE: "NODE",
    nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}

Address = tuple[int, int, int]
"""PCI domain, bus and device: in a virtual machine all GPUs may be on one bus."""


def peers(here: int, gpus: Mapping[int, Gpu]) -> Iterator[tuple[int, str | Absent]]:
    """How this GPU reaches each other one: `NV18` for 18 NVLinks, or what of PCIe lies between."""
    gpu = gpus[here]
    ends = read(lambda: _ends(gpu))
    for there, peer in gpus.items():
        if there != here:
            yield there, read(lambda: _between(gpu, peer, ends))  # noqa: B023


def _address(gpu: Gpu) -> Address:
    pci = gpu.ask("PciInfo")
    return pci.domain, pci.bus, pci.device


def _ends(gpu: Gpu) -> list[Address | None]:
    """Where each link that is up ends: at that GPU, or (None) at a switch, behind which are all the others."""
    found: list[Address | None] = []
    for link in (link for link, up in all_known(gpu).items() if up):
        direct = read(lambda: gpu.ask("NvLinkRemoteDeviceType", link)) == nvml.NVML_NVLINK_DEVICE_TYPE_GPU  # noqa: B023
        pci = gpu.ask("NvLinkRemotePciInfo", link) if direct else None
        found.append((pci.domain, pci.bus, pci.device) if pci else None)
    return found


def _between(gpu: Gpu, peer: Gpu, ends: list[Address | None] | Absent) -> str:
    status = call("nvmlDeviceGetP2PStatus", gpu.handle, peer.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status != nvml.NVML_P2P_STATUS_OK:
        return _PATHS.get(call("nvmlDeviceGetTopologyCommonAncestor", gpu.handle, peer.handle), "unknown")
    if isinstance(ends, Absent):
        raise UnreadError(ends)
    address = _address(peer) if any(ends) else None
    return f"NV{sum(end in (None, address) for end in ends)}"
