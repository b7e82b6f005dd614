"""ACS of the bridges above GPUs: whether traffic between a GPU and its adapter takes the way over the processor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from collectors.base import Absent, Family, Value
from collectors.pcie.config import ConfigSpace, UnreadableError
from collectors.pcie.device import GPU, NETWORK, Device
from collectors.sysfs import Tree, families

_ACS = 0x0D
_REDIRECT = 0b1100
"""ACS control: requests, or completions, between two ports of a switch go up to the processor."""
_DIRECT_TRANSLATED = 0b1000000
"""ACS control: addresses that the adapter has had translated (ATS) go straight across all the same."""

KINDS = {
    "pcie.acs.enabled": ("1", "ACS of a bridge above a GPU, or above an adapter beside it, sends peer traffic up"),
    "pcie.acs.redirected": ("1", "ACS sends traffic between the GPU and an adapter on its switch up to the processor"),
}


def redirection(tree: Tree, devices: Sequence[Device], *, virtual: bool) -> list[Family]:
    """ACS of each bridge above a GPU, and whether it parts the GPU from the network adapters of its switch."""
    found = families(KINDS)
    for name, address, value in _readings(tree, devices, virtual=virtual):
        found[name].add({"pci": address}, value)
    return [family for family in found.values() if family.readings]


def _readings(tree: Tree, devices: Sequence[Device], *, virtual: bool) -> Iterator[tuple[str, str, Value | Absent]]:
    """ACS of each bridge above a GPU, and whether it parts the GPU from the network adapters of its switch."""
    gpus = [device for device in devices if device.kind == GPU]
    adapters = [device for device in devices if device.kind == NETWORK]
    ways = {gpu.address: list(_ways(gpu, adapters)) for gpu in gpus}
    wanted = {
        bridge: None for gpu in gpus for bridge in (*gpu.bridges, *(part for way in ways[gpu.address] for part in way))
    }
    bridges = {bridge: _redirects(tree, bridge, virtual=virtual) for bridge in wanted}
    for bridge, value in bridges.items():
        yield "pcie.acs.enabled", bridge, value
    for gpu in gpus:
        yield "pcie.acs.redirected", gpu.address, _parted(ways[gpu.address], bridges)


def _ways(gpu: Device, adapters: Iterable[Device]) -> Iterator[tuple[str, ...]]:
    """The ports between the GPU and each adapter that shares a switch with it."""
    for adapter in adapters:
        common = next((bridge for bridge in gpu.bridges if bridge in adapter.bridges), None)
        if common:
            own = gpu.bridges[: gpu.bridges.index(common)]
            yield (*own, *adapter.bridges[: adapter.bridges.index(common)])


def _redirects(tree: Tree, bridge: str, *, virtual: bool) -> Value | Absent:
    if virtual:
        return Absent(status="unsupported", reason="a virtual machine's bridges are not the machine's")
    try:
        with ConfigSpace(tree, bridge) as space:
            control = space.number(space.extended(_ACS) + 6, 2)
    except UnreadableError as error:
        return error.absent
    return bool(control & _REDIRECT) and not control & _DIRECT_TRANSLATED


def _parted(ways: Sequence[tuple[str, ...]], bridges: Mapping[str, Value | Absent]) -> Value | Absent:
    if not ways:
        return Absent(status="unsupported", reason="no network adapter shares a switch with the GPU")
    values = [bridges[bridge] for way in ways for bridge in way]
    if any(value is True for value in values):
        return True
    absent = [value for value in values if isinstance(value, Absent)]
    # A port without ACS passes everything straight across; where no port could be asked, nothing is known.
    failed = [value for value in absent if value.status == "error"]
    return (failed or absent)[0] if failed or len(absent) == len(values) else False
