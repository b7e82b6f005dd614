"""Internal disks and built-in NVMe controllers, from /sys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from collectors.base import Absent, Family, Value, add_parts, host_family
from collectors.files import Files, nonempty
from collectors.sysfs import pci_address

T = TypeVar("T", bound=Value)
_BLOCK, CONTROLLERS, _SUBSYSTEMS = "sys/block", "sys/class/nvme", "sys/class/nvme-subsystem"
_NAMESPACE = r"nvme\d+(c\d+)?n\d+"
"""A namespace (`nvme0n1`) or, if the kernel uses multipath, a path to a namespace (`nvme0c1n1`)."""
LEAVING = ("new", "deleting", "deleting (no IO)")
"""States of an NVMe controller that is being added or removed."""
_NO_DISK = "no disk"
_DISK_NAME = r"(?!loop|ram|zram|dm-|md|sr|fd|nbd|rbd|nvme\d+c\d+n).+"
_IDENTITY = (
    ("storage.disk.model", "Model of the disk", ("device/model",)),
    ("storage.disk.serial", "Serial number of the disk", ("device/serial", "serial")),
    ("storage.disk.firmware", "Firmware of the disk", ("device/firmware_rev", "device/rev")),
)
"""Name of the family, its help, and files below /sys/block/DISK in order of preference."""
_DETACHABLE = re.compile(
    r"/(session[0-9]+|rport-[^/]+|usb[0-9]+|virtio[0-9]+|vbd-[^/]+|(VMBUS|MSFT1000):[^/]+|nvme-fabrics)/"
)
"""Matches a directory in the sysfs path of a disk that may be attached and detached by design: iSCSI, Fibre Channel, USB, NVMe
over a network, and the disks of hypervisors (virtio, Xen, Hyper-V)."""
_VOLUMES = (
    "Amazon Elastic Block Store",
    "Alibaba Cloud Elastic Block Storage",
    "MSFT NVMe Accelerator",
    "nvme_card-pd",
    "Mellanox BlueField NVMe SNAP",
    "BlueField NVMe SNAP",
    "NVIDIA NVMe SNAP",
    "QEMU ",
    "VMware Virtual ",
    "VBOX ",
    "ORCL-VBOX-NVME",
)
"""Prefixes of model names of volumes that are attached like disks: Amazon EBS, Alibaba Cloud disks, Azure managed disks, Google
Persistent Disk, volumes that a BlueField DPU emulates (NVIDIA SNAP), and NVMe and SATA disks that QEMU, VMware or VirtualBox
emulates. A disk that is passed through to a virtual machine keeps the model name of its manufacturer."""
_HYPERVISORS = ("QEMU", "VMware", "VBOX", "NUTANIX", "Msft")
"""Vendors of SCSI disks that a hypervisor emulates. VMware's model name is only `Virtual disk`, that of Nutanix `VDISK`."""


def internal_disks(files: Files) -> list[str] | Absent:
    """Return the names of the internal disks, or why there are none.

    Loop devices, RAM disks, arrays, and removable, network and hypervisor disks are left out. In a virtual machine, only disks
    that are passed through remain.
    """
    names = files.matching(_BLOCK, _DISK_NAME, _NO_DISK)
    if isinstance(names, Absent):
        return names
    internal = [
        disk
        for disk in names
        if files.exists(f"{_BLOCK}/{disk}/device")
        and files.read(f"{_BLOCK}/{disk}/removable", str) != "1"
        and not _is_detachable(files, disk)
    ]
    return internal or Absent.unsupported(_NO_DISK)


def _is_detachable(files: Files, disk: str) -> bool:
    """Return whether the disk may be detached by design.

    With NVMe multipath, `device` of the disk is an NVMe subsystem, which contains the controllers.
    """
    device = f"{_BLOCK}/{disk}/device"
    controllers = (device, *sorted(files.glob(f"{device}/nvme*")))
    transports = {files.read(f"{controller}/transport", str) for controller in controllers}
    return (
        not transports.isdisjoint(("tcp", "rdma", "fc", "loop"))
        or is_volume(files, device)
        or files.read(f"{device}/vendor", str) in _HYPERVISORS
        or any(_DETACHABLE.search(f"{files.path(path).resolve()}/") for path in (f"{_BLOCK}/{disk}", device))
    )


def is_volume(files: Files, device: str) -> bool:
    """Return whether the disk or NVMe controller with this directory in sysfs is a volume of a cloud, DPU or hypervisor."""
    model = files.read(f"{device}/model", str)
    return isinstance(model, str) and model.startswith(_VOLUMES)


def states(files: Files, disks: list[str] | Absent) -> Iterable[Family]:
    """Yield the number of disks, whether each disk works, and the number of its failed commands."""
    count = disks if isinstance(disks, Absent) else len(disks)
    if isinstance(count, Absent) and count.status == "unsupported":
        count = 0
    yield host_family("storage.disk.count", "1", "Internal disks", count)
    family = Family(name="storage.disk.online", unit="1", help="The disk accepts commands")
    yield add_parts(family, "disk", disks, partial(_read, files, "device/state", _is_online))
    family = Family(name="storage.disk.io_errors", unit="1", help="Failed commands; SCSI and SATA only", counter=True)
    yield add_parts(family, "disk", disks, partial(_read, files, "device/ioerr_cnt", partial(int, base=16)))


def controllers(files: Files) -> Iterable[Family]:
    """Yield, for each built-in NVMe controller, how many of its namespaces the kernel uses as disks.

    The kernel creates no disk for a namespace that has the ID of another namespace, cannot be identified, or was deleted.

    Controllers in one NVMe subsystem count together: each gets the number of the whole subsystem. A drive with two ports has two
    controllers in one subsystem, and may show its namespaces at only one of them. With NVMe multipath, each path to a namespace
    counts too.
    """
    text = "Namespaces of the NVMe controller that the kernel uses as disks"
    family = Family(name="storage.controller.namespaces", unit="1", help=text)
    subsystems: dict[str, set[str]] = {}
    for path in files.glob(f"{_SUBSYSTEMS}/*/nvme*"):
        subsystems.setdefault(path.split("/")[-2], set()).add(path.rpartition("/")[2])
    for path in files.glob(f"{CONTROLLERS}/nvme*"):
        name = path.rpartition("/")[2]
        if not _is_built_in(files, path):
            continue
        shared = (names for names in subsystems.values() if name in names)
        siblings = {name, *(other for names in shared for other in names)}
        entries = {
            *siblings,
            *(entry.rpartition("/")[2] for other in siblings for entry in files.glob(f"{CONTROLLERS}/{other}/*")),
        }
        family.add({"disk": name}, sum(bool(re.fullmatch(_NAMESPACE, entry)) for entry in entries))
    yield family


def _is_built_in(files: Files, controller: str) -> bool:
    """Return whether an NVMe controller is on the PCI bus and must have disks.

    False for controllers that are only for administration or discovery, for controllers that are being added or removed, and
    for volumes of clouds and hypervisors.
    """
    kind, state = files.read(f"{controller}/cntrltype", str), files.read(f"{controller}/state", str)
    return (
        files.read(f"{controller}/transport", str) == "pcie"
        and kind not in ("admin", "discovery")
        and state not in LEAVING
        and not is_volume(files, controller)
    )


def identities(files: Files, disks: list[str] | Absent) -> Iterable[Family]:
    """Yield model, serial number, firmware and PCI address of each disk."""
    for name, text, paths in _IDENTITY:
        yield add_parts(Family(name=name, unit="1", help=text), "disk", disks, partial(_first_text, files, paths))
    family = Family(name="storage.disk.pci_address", unit="1", help="PCI address of the disk, or of its controller")
    yield add_parts(family, "disk", disks, partial(_pci_address, files))


def types(files: Files, disks: list[str] | Absent) -> Iterable[Family]:
    """Yield size and type of each disk."""
    family = Family(name="storage.disk.size", unit="B", help="Size of the disk")
    yield add_parts(family, "disk", disks, partial(_read, files, "size", lambda text: int(text) * 512))
    family = Family(name="storage.disk.rotational", unit="1", help="The disk is rotational")
    yield add_parts(family, "disk", disks, partial(_read, files, "queue/rotational", lambda text: bool(int(text))))


def _pci_address(files: Files, disk: str) -> Value | Absent:
    """Return the PCI address of a disk.

    With NVMe multipath, the sysfs path of a disk contains no PCI device. The result is then the first PCI address among the
    controllers of the disk.
    """
    address = pci_address(files, f"{_BLOCK}/{disk}")
    if isinstance(address, Absent):
        controllers = (pci_address(files, path) for path in files.glob(f"{_BLOCK}/{disk}/device/nvme*"))
        return next((other for other in controllers if not isinstance(other, Absent)), address)
    return address


def _read(files: Files, path: str, parse: Callable[[str], T], disk: str) -> T | Absent:
    return files.read(f"{_BLOCK}/{disk}/{path}", parse)


def _first_text(files: Files, paths: tuple[str, ...], disk: str) -> str | Absent:
    """Return the content of the first of these files that is not empty; if there is none, the Absent of the last file."""
    text: str | Absent = Absent.unsupported("not reported")
    for path in paths:
        text = _read(files, path, nonempty, disk)
        if isinstance(text, str):
            break
    return text


def _is_online(text: str) -> bool:
    return text in ("live", "running")
