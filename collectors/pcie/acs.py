"""Access Control Services (ACS) of the PCIe bridges above GPUs, and above network adapters on the PCIe switch of a GPU.

ACS can redirect traffic between a GPU and its network adapter through the processor, which makes the traffic slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from collectors.base import Absent, Family, ReadingError, Value, empty_families
from collectors.files import Files
from collectors.pcie.config import ConfigSpace
from collectors.pcie.device import GPU, Device, fabric_adapters

_ACS = 0x0D
_REDIRECT = 0b1100
"""Bits of the ACS control register: P2P Request Redirect, P2P Completion Redirect."""
_DIRECT_TRANSLATED = 0b1000000
"""Bit of the ACS control register: Direct Translated P2P. If it is set, requests with addresses that ATS
has translated are not redirected."""

KINDS = {
    "pcie.acs.enabled": ("1", "ACS of the bridge above a GPU or its network adapter redirects peer traffic"),
    "pcie.acs.redirected": (
        "1",
        "ACS sends traffic between the GPU and a network adapter on the same PCIe switch through the processor",
    ),
}


def acs_families(files: Files, devices: Sequence[Device], *, is_virtual: bool) -> list[Family]:
    """Return the families of KINDS.

    For each bridge above a GPU, or above an adapter on the GPU's switch: whether its ACS redirects traffic. For each GPU: whether
    a bridge between the GPU and such an adapter redirects traffic.
    """
    families = empty_families(KINDS)
    for name, address, value in _readings(files, devices, is_virtual=is_virtual):
        families[name].add({"pci": address}, value)
    return [family for family in families.values() if family.readings]


def _readings(
    files: Files, devices: Sequence[Device], *, is_virtual: bool
) -> Iterator[tuple[str, str, Value | Absent]]:
    gpus = [device for device in devices if device.kind == GPU]
    adapters = fabric_adapters(devices)
    paths = {gpu.address: list(_peer_paths(gpu, adapters)) for gpu in gpus}
    relevant = dict.fromkeys(
        bridge for gpu in gpus for bridge in (*gpu.bridges, *(port for path in paths[gpu.address] for port in path))
    )
    bridges = {bridge: _redirects(files, bridge, is_virtual=is_virtual) for bridge in relevant}
    for bridge, value in bridges.items():
        yield "pcie.acs.enabled", bridge, value
    for gpu in gpus:
        yield "pcie.acs.redirected", gpu.address, _is_redirected(paths[gpu.address], bridges)


def _peer_paths(gpu: Device, adapters: Iterable[Device]) -> Iterator[tuple[str, ...]]:
    """For each adapter on the same PCIe switch as the GPU, yield the ports between the GPU and the adapter."""
    for adapter in adapters:
        common = next((bridge for bridge in gpu.bridges if bridge in adapter.bridges), None)
        if common:
            below = gpu.bridges[: gpu.bridges.index(common)]
            yield (*below, *adapter.bridges[: adapter.bridges.index(common)])


def _redirects(files: Files, bridge: str, *, is_virtual: bool) -> Value | Absent:
    if is_virtual:
        return Absent.unsupported("in a virtual machine, the bridges are not those of the host")
    try:
        with ConfigSpace(files, bridge) as space:
            control = space.read(space.extended_capability(_ACS) + 6, 2)
    except ReadingError as error:
        return error.absent
    return bool(control & _REDIRECT) and not control & _DIRECT_TRANSLATED


def _is_redirected(paths: Sequence[tuple[str, ...]], bridges: Mapping[str, Value | Absent]) -> Value | Absent:
    if not paths:
        return Absent.unsupported("no network adapter shares a switch with the GPU")
    values = [bridges[bridge] for path in paths for bridge in path]
    if not values:
        return Absent.unsupported("the GPU and the network adapter are directly below the same bridge")
    if any(value is True for value in values):
        return True
    absent = [value for value in values if isinstance(value, Absent)]
    # No port that was read redirects traffic. If any port could not be read, the result is its `error`. A port without ACS is
    # `unsupported` and redirects nothing. Only if all ports are `unsupported`, the result is `unsupported` too.
    failed = [value for value in absent if value.status == "error"]
    return (failed or absent)[0] if failed or len(absent) == len(values) else False
