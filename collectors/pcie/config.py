"""PCI configuration space and IOMMU of devices. The settings read here are constant while a host is up."""

from __future__ import annotations

import os
from collections.abc import Sequence

from collectors.base import HOST_LABELS, Absent, Family, ReadingError, Value, empty_families
from collectors.files import Files
from collectors.pcie.device import GPU, Device
from collectors.sysfs import PCI_DEVICES

_PCIE = 0x10
_SHORT = Absent.unsupported(
    "the configuration space ends before this register; without root only its first 64 bytes can be read"
)
_NO_ANSWER = Absent.error("the device does not answer: its registers read as all ones")
_MEMORY, _UNSET = 0x200, 0x20000000  # IORESOURCE_MEM and IORESOURCE_UNSET of linux/ioport.h

KINDS = {
    "pcie.max_payload": ("B", "Maximum payload size in use"),
    "pcie.max_payload_supported": ("B", "Maximum payload size that the device supports"),
    "pcie.max_read_request": ("B", "Maximum read request size"),
    "pcie.relaxed_ordering.enabled": ("1", "Relaxed ordering is enabled"),
    "pcie.bar1.size": ("B", "Size of BAR1, the window to the GPU's memory"),
    "pcie.iommu.group": ("1", "IOMMU group of the device"),
    "pcie.iommu.type": ("1", "IOMMU domain type of the device; identity: DMA addresses are not translated"),
    "pcie.iommu.enabled": ("1", "An IOMMU is enabled"),
}


def configuration_families(files: Files, devices: Sequence[Device]) -> list[Family]:
    """Return the families of KINDS that have at least one reading."""
    families = empty_families(KINDS)
    families["pcie.iommu.enabled"].add(HOST_LABELS, _is_iommu_enabled(files))
    for device in devices:
        readings = {**_device_control(files, device.address), **_iommu_group(files, device.address)}
        if device.kind == GPU:
            readings["pcie.bar1.size"] = files.required(f"{PCI_DEVICES}/{device.address}/resource", largest_bar)
        for name, value in readings.items():
            families[name].add({"pci": device.address}, value)
    return [family for family in families.values() if family.readings]


class ConfigSpace:
    """The PCI configuration space of one device. Each read is a transaction on the bus, so only the requested bytes are read."""

    def __init__(self, files: Files, address: str) -> None:
        """Open the configuration space. Raises ReadingError."""
        path = f"{PCI_DEVICES}/{address}/config"
        try:
            self._descriptor = files.open(path)
        except OSError as error:
            raise ReadingError(Absent.error(f"/{path}: {error.strerror}")) from error

    def __enter__(self) -> ConfigSpace:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, size: int) -> int:
        """Return the `size` bytes at `offset` as a little-endian number. Raises ReadingError."""
        try:
            content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise ReadingError(Absent.error(f"configuration space at {offset:#x}: {error.strerror}")) from error
        if len(content) < size:
            raise ReadingError(_SHORT)
        return int.from_bytes(content, "little")

    def capability(self, number: int) -> int:
        """Return the offset of the capability with this ID. Raises ReadingError if the device lacks it or does not answer."""
        if self.read(0, 2) == 0xFFFF:
            raise ReadingError(_NO_ANSWER)
        offset = self.read(0x34, 1) & 0xFC
        for _ in range(48):
            if not offset:
                break
            if self.read(offset, 1) == number:
                return offset
            offset = self.read(offset + 1, 1) & 0xFC
        raise ReadingError(Absent.unsupported(f"no capability {number:#x}"))

    def extended_capability(self, number: int) -> int:
        """Return the offset of the extended capability with this ID. Raises ReadingError as `capability` does."""
        if self.read(0, 2) == 0xFFFF:
            raise ReadingError(_NO_ANSWER)
        offset = 0x100
        for _ in range(96):
            header = self.read(offset, 4)
            if header & 0xFFFF == number:
                return offset
            offset = header >> 20
            if offset < 0x100:
                break
        raise ReadingError(Absent.unsupported(f"no extended capability {number:#x}"))


def _device_control(files: Files, address: str) -> dict[str, Value | Absent]:
    """Read Device Capabilities and Device Control of the PCI Express capability."""
    names = ("pcie.max_payload_supported", "pcie.max_payload", "pcie.max_read_request", "pcie.relaxed_ordering.enabled")
    try:
        with ConfigSpace(files, address) as space:
            offset = space.capability(_PCIE)
            capabilities, control = space.read(offset + 4, 4), space.read(offset + 8, 2)
    except ReadingError as error:
        return dict.fromkeys(names, error.absent)
    values = (128 << (capabilities & 7), 128 << (control >> 5 & 7), 128 << (control >> 12 & 7), bool(control & 0x10))
    return dict(zip(names, values, strict=True))


def _is_iommu_enabled(files: Files) -> bool:
    try:
        return bool(files.names("sys/class/iommu"))
    except OSError:
        return False


def _iommu_group(files: Files, address: str) -> dict[str, Value | Absent]:
    try:
        group = int(files.target(f"{PCI_DEVICES}/{address}/iommu_group").rpartition("/")[2])
    except (OSError, ValueError):
        none = Absent.unsupported("the device is in no IOMMU group")
        return {"pcie.iommu.group": none, "pcie.iommu.type": none}
    kind = files.read(
        f"sys/kernel/iommu_groups/{group}/type", str, missing="the kernel does not report the domain type"
    )
    return {"pcie.iommu.group": group, "pcie.iommu.type": kind}


def largest_bar(text: str) -> int:
    """Return the size in bytes of the largest memory BAR in a `resource` file of /sys. On NVIDIA GPUs this is BAR1.

    Raises ValueError if no memory BAR has an address.
    """
    sizes = [0]
    for line in text.splitlines()[:6]:
        start, end, flags = (int(part, 16) for part in line.split())
        if flags & _MEMORY and not flags & _UNSET:
            sizes.append(end - start + 1)
    if not max(sizes):
        raise ValueError("no memory BAR has an address; enable Above 4G Decoding in the firmware")
    return max(sizes)
