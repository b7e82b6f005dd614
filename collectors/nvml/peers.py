"""The path between two GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pynvml as nvml

from collectors.base import Absent, ReadingError
from collectors.nvml.calls import call, try_read
from collectors.nvml.gpu import NvmlGpu
from collectors.nvml.links import known_link_states

# NVML's common ancestor of two GPUs -> the path over PCIe, as `nvidia-smi topo -m` abbreviates it.
_PATHS = {
    nvml.NVML_TOPOLOGY_INTERNAL: "X",
    nvml.NVML_TOPOLOGY_SINGLE: "PIX",
    nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    nvml.NVML_TOPOLOGY_NODE: "NODE",
    nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}

Address = tuple[int, int, int]
"""PCI domain, bus and device. The bus alone is not enough, because GPUs of a virtual machine may be on the same bus."""


def peer_paths(index: int, gpus: Mapping[int, NvmlGpu]) -> Iterator[tuple[int, str | Absent]]:
    """Yield the index of each other GPU and the path to it: `NV18` for 18 NVLinks, or the PCIe path."""
    gpu = gpus[index]
    ends = try_read(lambda: _link_ends(gpu))
    for peer_index, peer in gpus.items():
        if peer_index != index:
            yield peer_index, try_read(lambda: _path(gpu, peer, ends))  # noqa: B023


def _address(gpu: NvmlGpu) -> Address:
    pci = gpu.query("PciInfo")
    return pci.domain, pci.bus, pci.device


def _link_ends(gpu: NvmlGpu) -> list[Address | None]:
    """Return the remote end of each link that is up: the address of a GPU, or None for any other device.

    Any other device counts as a switch that reaches all GPUs.
    """
    ends: list[Address | None] = []
    for link in (link for link, is_up in known_link_states(gpu).items() if is_up):
        is_direct = try_read(lambda: gpu.query("NvLinkRemoteDeviceType", link)) == nvml.NVML_NVLINK_DEVICE_TYPE_GPU  # noqa: B023
        pci = gpu.query("NvLinkRemotePciInfo", link) if is_direct else None
        ends.append((pci.domain, pci.bus, pci.device) if pci else None)
    return ends


def _path(gpu: NvmlGpu, peer: NvmlGpu, ends: list[Address | None] | Absent) -> str:
    status = call("nvmlDeviceGetP2PStatus", gpu.handle, peer.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status != nvml.NVML_P2P_STATUS_OK:
        return _PATHS.get(call("nvmlDeviceGetTopologyCommonAncestor", gpu.handle, peer.handle), "unknown")
    if isinstance(ends, Absent):
        raise ReadingError(ends)
    address = _address(peer) if any(ends) else None
    return f"NV{sum(end in (None, address) for end in ends)}"
