"""The PCI devices that collectors read, and the bridges above them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from collectors.base import Absent, Value
from collectors.files import Files
from collectors.sysfs import PCI_DEVICES, pci_addresses

GPU, NVSWITCH, NETWORK, NVME = "gpu", "nvswitch", "network", "nvme"
NVIDIA, MELLANOX = "0x10de", "0x15b3"
FABRIC_LANES = 16
"""A network adapter of another vendor than NVIDIA is read only if it has this number of PCIe lanes. Adapters on the mainboard,
which may be wired with fewer lanes than both ends support, have fewer."""


@dataclass(kw_only=True)
class Device:
    """One device, and the bridges between it and the processor, beginning with the bridge nearest to the device."""

    address: str
    kind: str
    bridges: tuple[str, ...]
    own_bridges: int = 0
    """Number of bridges that are inside the device. ConnectX-7 and ConnectX-8 can contain a PCIe switch (in DGX H100 and HGX B300
    they do), and adapters of AMD Pensando do. The links within this switch have no lanes that can fail."""
    is_nvidia: bool = True
    """Whether NVIDIA is the vendor of the network adapter."""
    is_coherent: bool = False
    """Whether the GPU is attached to its Grace CPU by NVLink-C2C, so that its PCIe link carries no data."""
    limits: dict[str, Value | Absent] = field(default_factory=dict)
    """Name of a reading (`pcie.width_max`) -> highest PCIe generation or width that the device, or the port above it, supports.

    Empty until PcieCollector has read all of these limits without an `error`.
    """

    @property
    def link_end(self) -> str:
        """Return the PCI address of the lower end of the device's link: the device, or the upper end of the switch inside it."""
        return (self.address, *self.bridges)[self.own_bridges]

    @property
    def port(self) -> str:
        """Return the PCI address of the upper end of the device's link; empty if none is visible."""
        return next(iter(self.bridges[self.own_bridges :]), "")


class PciBus:
    """The PCI devices that collectors read. Each address is identified only once, because a host has hundreds of devices."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._devices: dict[str, Device | None] = {}

    def devices(self) -> list[Device]:
        """Return the current devices. Raises OSError if there is no PCI bus, or if a device on it cannot be read."""
        known, current = self._devices, dict[str, Device | None]()
        for address in self._files.names(PCI_DEVICES):
            try:
                current[address] = known[address] if address in known else identify(self._files, address)
            except OSError:
                if self._files.exists(f"{PCI_DEVICES}/{address}"):
                    raise
                # Otherwise the device was removed in the meantime, which is no error.
        self._devices = current
        return [device for device in current.values() if device]

    def count(self, kind: str) -> int | Absent:
        """Return the current number of devices of a kind, or an `error` if they cannot be read."""
        try:
            return sum(device.kind == kind for device in self.devices())
        except OSError as error:
            return Absent.error(f"/{PCI_DEVICES}: {error.strerror}")


def identify(files: Files, address: str) -> Device | None:
    """Return the device at a PCI address, or None if no collector reads this device. Raises OSError."""
    path = f"{PCI_DEVICES}/{address}"
    vendor = files.text(f"{path}/vendor")
    kind = device_kind(files.text(f"{path}/class"), vendor)
    if not kind or files.exists(f"{path}/physfn"):
        return None  # a virtual function shares the link of its physical function
    bridges = tuple(reversed(pci_addresses(files.target(path))[:-1]))
    vendors = (files.text(f"{PCI_DEVICES}/{bridge}/vendor") for bridge in bridges)
    # The last bridge is the root port of the processor, which may have the vendor of the adapter (Intel).
    inner = zip(bridges[:-1], vendors, strict=False) if kind == NETWORK else ()
    device = Device(
        address=address,
        kind=kind,
        bridges=bridges,
        own_bridges=sum(1 for _ in takewhile(lambda bridge: bridge[1] == vendor, inner)),
        is_nvidia=kind != NETWORK or vendor == MELLANOX,
        is_coherent=kind == GPU and next(vendors, "") == NVIDIA,
    )
    lanes = f"{PCI_DEVICES}/{device.link_end}/max_link_width"
    return device if device.is_nvidia or files.read(lanes, int) == FABRIC_LANES else None


def fabric_adapters(devices: Iterable[Device]) -> list[Device]:
    """Return the adapters of NVIDIA if there are any, otherwise all: those of other vendors are then not for management."""
    adapters = [device for device in devices if device.kind == NETWORK]
    return [device for device in adapters if device.is_nvidia] or adapters


def device_kind(device_class: str, vendor: str) -> str:
    """Return the kind of a device from its PCI class (`0x030200`) and vendor ID; empty if no collector reads its kind."""
    if vendor == NVIDIA and device_class.startswith(("0x0300", "0x0302")):
        return GPU
    if vendor == NVIDIA and device_class.startswith("0x0680"):
        return NVSWITCH
    if device_class.startswith(("0x0200", "0x0207")):
        return NETWORK
    return NVME if device_class.startswith("0x0108") else ""
