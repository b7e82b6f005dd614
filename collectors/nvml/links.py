"""NVLinks, and what lies between two GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pynvml as nvml

from collectors.base import Absent, Family, Labels
from collectors.nvml.calls import read

# What lies between two GPUs that have no NVLink, as `nvidia-smi topo -m` spells it.
_PATHS = {
    nvml.NVML_TOPOLOGY_INTERNAL: "X",
    nvml.NVML_TOPOLOGY_SINGLE: "PIX",
    nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    nvml.NVML_TOPOLOGY_NODE: "NODE",
    nvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
_NO_NVLINK = Absent(status="unsupported", reason="the part has no NVLink")

Address = tuple[int, int, int]
"""PCI domain, bus and device: in a virtual machine all GPUs may be on one bus."""
States = dict[int, bool | Absent]
"""NVLink -> is it up?"""


def links(devices: dict[int, Any], labels: dict[int, Labels]) -> Iterator[Family]:
    """The families of NVLinks and of pairs of GPUs. Each link is read once, however many pairs there are."""
    whole = {index: gpu for index, gpu in devices.items() if not isinstance(gpu, Absent)}
    states = {index: _states(gpu) for index, gpu in whole.items()}
    state = Family(name="gpu.nvlink.active", unit="1", help="The NVLink is up")
    active = Family(name="gpu.nvlink.active_links", unit="1", help="NVLinks that are up")
    for index, gpu in devices.items():
        if isinstance(gpu, Absent):
            active.add(labels[index], gpu)
            continue
        for link, up in states[index].items():
            state.add({**labels[index], "link": str(link)}, up)
        active.add(labels[index], _unknown(states[index]) or sum(up is True for up in states[index].values()))
    yield from (state, active, _peers(whole, states, labels))


def _states(gpu: Any) -> States:
    found: States = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        up = read(lambda: bool(nvml.nvmlDeviceGetNvLinkState(gpu, link)))  # noqa: B023
        if isinstance(up, Absent) and up.status == "unsupported":
            break  # links are numbered from 0; the first that the part does not have ends the list
        found[link] = up
    return found


def _unknown(states: States) -> Absent | None:
    """Why the links that are up cannot be counted, where they cannot."""
    return next((up for up in states.values() if isinstance(up, Absent)), None) if states else _NO_NVLINK


def _peers(whole: dict[int, Any], states: dict[int, States], labels: dict[int, Labels]) -> Family:
    """How each GPU reaches each other one: `NV18` for 18 NVLinks, or what of PCIe lies between."""
    family = Family(name="gpu.peer.link", unit="1", help="What lies between two GPUs")
    addresses = {index: read(lambda: _address(nvml.nvmlDeviceGetPciInfo(gpu))) for index, gpu in whole.items()}  # noqa: B023
    ends = {index: read(lambda: _ends(gpu, states[index])) for index, gpu in whole.items()}  # noqa: B023
    for (here, gpu), (there, peer) in itertools.permutations(whole.items(), 2):
        between = read(lambda: _between(gpu, peer, ends[here], addresses[there]))  # noqa: B023
        family.add({**labels[here], "peer": str(there)}, between)
    return family


def _address(pci: Any) -> Address:
    return pci.domain, pci.bus, pci.device


def _ends(gpu: Any, states: States) -> list[Address | None] | Absent:
    """Where each link that is up ends: at that GPU, or (None) at a switch, behind which are all the others."""
    if unknown := _unknown(states):
        return unknown
    found: list[Address | None] = []
    for link in (link for link, up in states.items() if up):
        direct = read(lambda: nvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link)) == nvml.NVML_NVLINK_DEVICE_TYPE_GPU  # noqa: B023
        found.append(_address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link)) if direct else None)
    return found


def _between(gpu: Any, peer: Any, ends: list[Address | None] | Absent, address: Address | Absent) -> str | Absent:
    if nvml.nvmlDeviceGetP2PStatus(gpu, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK) != nvml.NVML_P2P_STATUS_OK:
        return _PATHS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(gpu, peer), "unknown")
    if isinstance(ends, Absent):
        return ends
    if isinstance(address, Absent) and any(ends):
        return address
    return f"NV{sum(end in (None, address) for end in ends)}"
