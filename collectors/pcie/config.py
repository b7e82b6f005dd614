"""What the configuration space and the IOMMU say of PCI devices: it does not change while a host is up."""

from __future__ import annotations

import os
from collections.abc import Sequence

from collectors.base import HOST, Absent, Family, Value
from collectors.pcie.device import GPU, Device
from collectors.sysfs import PCI_DEVICES, Tree, families

_PCIE = 0x10
_SHORT = "the configuration space cannot be read so far: none there, or the reader is not root"
_MEMORY, _UNSET = 0x200, 0x20000000

KINDS = {
    "pcie.max_payload": ("B", "Payload of a packet that the device may send"),
    "pcie.max_payload_supported": ("B", "Payload of a packet that the device could send"),
    "pcie.max_read_request": ("B", "Size of a read that the device may ask for"),
    "pcie.relaxed_ordering.enabled": ("1", "The device may let its writes overtake each other"),
    "pcie.bar1.size": ("B", "Window through which others reach the GPU's memory"),
    "pcie.iommu.group": ("1", "IOMMU group of the device"),
    "pcie.iommu.type": ("1", "What the IOMMU does for the device; identity: it passes addresses through"),
    "pcie.iommu.enabled": ("1", "An IOMMU is at work"),
}


def settings(tree: Tree, devices: Sequence[Device]) -> list[Family]:
    """Everything of KINDS that these devices may have."""
    found = families(KINDS)
    found["pcie.iommu.enabled"].add(HOST, _iommu(tree))
    for device in devices:
        readings = {**_control(tree, device.address), **_group(tree, device.address)}
        if device.kind == GPU:
            readings["pcie.bar1.size"] = tree.reading(f"{PCI_DEVICES}/{device.address}/resource", largest_bar)
        for name, value in readings.items():
            found[name].add({"pci": device.address}, value)
    return [family for family in found.values() if family.readings]


class UnreadableError(Exception):
    """A register that cannot be read, and why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.absent = Absent(status=status, reason=reason)


class ConfigSpace:
    """The registers of one device. Only those asked for are read: each is a trip over the bus."""

    def __init__(self, tree: Tree, address: str) -> None:
        try:
            self._descriptor = tree.open(f"{PCI_DEVICES}/{address}/config")
        except OSError as error:
            raise UnreadableError("error", f"/{PCI_DEVICES}/{address}/config: {error.strerror}") from error

    def __enter__(self) -> ConfigSpace:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def number(self, offset: int, size: int) -> int:
        """`size` bytes, little-endian. Raises UnreadableError."""
        try:
            found = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise UnreadableError("error", f"configuration space at {offset:#x}: {error.strerror}") from error
        if len(found) < size:
            raise UnreadableError("unsupported", _SHORT)
        return int.from_bytes(found, "little")

    def capability(self, wanted: int) -> int:
        """Where a capability begins. Raises UnreadableError."""
        if self.number(0, 2) == 0xFFFF:
            raise UnreadableError("error", "its registers read as all ones: the device does not answer")
        place = self.number(0x34, 1) & 0xFC
        for _ in range(48):
            if not place:
                break
            if self.number(place, 1) == wanted:
                return place
            place = self.number(place + 1, 1) & 0xFC
        raise UnreadableError("unsupported", f"no capability {wanted:#x}")

    def extended(self, wanted: int) -> int:
        """Where an extended capability begins. Raises UnreadableError."""
        if self.number(0, 2) == 0xFFFF:
            raise UnreadableError("error", "its registers read as all ones: the device does not answer")
        place = 0x100
        for _ in range(96):
            header = self.number(place, 4)
            if header & 0xFFFF == wanted:
                return place
            place = header >> 20
            if place < 0x100:
                break
        raise UnreadableError("unsupported", f"no extended capability {wanted:#x}")


def _control(tree: Tree, address: str) -> dict[str, Value | Absent]:
    """Device Capabilities and Device Control of the PCI Express capability."""
    names = ("pcie.max_payload_supported", "pcie.max_payload", "pcie.max_read_request", "pcie.relaxed_ordering.enabled")
    try:
        with ConfigSpace(tree, address) as space:
            place = space.capability(_PCIE)
            able, control = space.number(place + 4, 4), space.number(place + 8, 2)
    except UnreadableError as error:
        return dict.fromkeys(names, error.absent)
    values = (128 << (able & 7), 128 << (control >> 5 & 7), 128 << (control >> 12 & 7), bool(control & 0x10))
    return dict(zip(names, values, strict=True))


def _iommu(tree: Tree) -> bool:
    try:
        return bool(tree.names("sys/class/iommu"))
    except OSError:
        return False


def _group(tree: Tree, address: str) -> dict[str, Value | Absent]:
    try:
        group = int(tree.target(f"{PCI_DEVICES}/{address}/iommu_group").rpartition("/")[2])
    except (OSError, ValueError):
        none = Absent(status="unsupported", reason="no IOMMU looks after the device")
        return {"pcie.iommu.group": none, "pcie.iommu.type": none}
    kind = tree.reading(f"sys/kernel/iommu_groups/{group}/type", missing="this kernel does not tell the type")
    return {"pcie.iommu.group": group, "pcie.iommu.type": kind}


def largest_bar(text: str) -> int:
    """Size of the largest memory BAR, which on NVIDIA GPUs is BAR1. Raises ValueError where none has an address."""
    sizes = [0]
    for line in text.splitlines()[:6]:
        start, end, flags = (int(part, 16) for part in line.split())
        if flags & _MEMORY and not flags & _UNSET:
            sizes.append(end - start + 1)
    if not max(sizes):
        raise ValueError("no memory BAR has an address: did the firmware leave room above 4 GiB?")
    return max(sizes)
