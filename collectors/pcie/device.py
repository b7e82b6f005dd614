"""Which devices of the PCI bus are looked at, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from collectors.base import Absent, Value
from collectors.sysfs import PCI_DEVICES, Tree, pci_parts

GPU, NVSWITCH, NETWORK, NVME = "gpu", "nvswitch", "network", "nvme"
NVIDIA, MELLANOX = "0x10de", "0x15b3"


@dataclass(kw_only=True)
class Device:
    """One device, and the bridges between it and the processor, the nearest first."""

    address: str
    kind: str
    bridges: tuple[str, ...]
    coherent: bool = False
    """A GPU that hangs on its Grace CPU by NVLink-C2C: what PCIe shows of it is no link that carries data."""
    limits: dict[str, Value | Absent] = field(default_factory=dict)
    """What the device and its port can do. It cannot change, so it is read until it has once been had."""


class Bus:
    """The devices of interest. What stands at an address is looked at once, for a bus has hundreds of them."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._known: dict[str, Device | None] = {}

    def devices(self) -> list[Device]:
        """Those that are there now. Raises OSError where there is no bus, or a device on it cannot be read."""
        before, found = self._known, dict[str, Device | None]()
        for address in self._tree.names(PCI_DEVICES):
            try:
                found[address] = before[address] if address in before else identify(self._tree, address)
            except OSError:
                if self._tree.has(f"{PCI_DEVICES}/{address}"):
                    raise  # else it has gone since
        self._known = found
        return [device for device in found.values() if device]

    def count(self, kind: str) -> int | Absent:
        """How many of a kind there are now."""
        try:
            return sum(device.kind == kind for device in self.devices())
        except OSError as error:
            return Absent(status="error", reason=f"/{PCI_DEVICES}: {error.strerror}")


def identify(tree: Tree, address: str) -> Device | None:
    """What stands at an address; None where it is of no interest. Raises OSError."""
    path = f"{PCI_DEVICES}/{address}"
    kind = kind_of(tree.text(f"{path}/class"), tree.text(f"{path}/vendor"))
    if not kind or tree.has(f"{path}/physfn"):
        return None  # a virtual function has no link of its own
    above = pci_parts(tree.target(path))[:-1]
    port_vendor = tree.text(f"{PCI_DEVICES}/{above[-1]}/vendor") if above else ""
    coherent = kind == GPU and port_vendor == NVIDIA
    return Device(address=address, kind=kind, bridges=tuple(reversed(above)), coherent=coherent)


def kind_of(device_class: str, vendor: str) -> str:
    """What of interest a device is; empty: nothing."""
    if vendor == NVIDIA and device_class.startswith(("0x0300", "0x0302")):
        return GPU
    if vendor == NVIDIA and device_class.startswith("0x0680"):
        return NVSWITCH
    if vendor == MELLANOX and device_class.startswith(("0x0200", "0x0207")):
        return NETWORK
    return NVME if device_class.startswith("0x0108") else ""
