"""Disks and arrays of disks, as the kernel lists them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from collectors.base import Absent, Family
from collectors.host.files import Files, one, over

_BLOCK = "sys/block"
_NO_DISK = "no disk"
_NOT_A_DISK = r"(?!loop|ram|zram|dm-|md|sr|fd|nbd|rbd|nvme\d+c\d+n).+"
_ABOUT = (
    ("storage.disk.model", "1", "Model of the disk", ("device/model",)),
    ("storage.disk.serial", "1", "Serial number of the disk", ("device/serial", "serial")),
    ("storage.disk.firmware", "1", "Firmware of the disk", ("device/firmware_rev", "device/rev")),
)


def built_in(files: Files) -> list[str] | Absent:
    """Disks that are built in: no image, no array, nothing removable, nothing beyond a network."""
    found = files.names(_BLOCK, _NOT_A_DISK, _NO_DISK)
    if isinstance(found, Absent):
        return found
    own = [
        disk
        for disk in found
        if files.exists(f"{_BLOCK}/{disk}/device")
        and files.text(f"{_BLOCK}/{disk}/removable") != "1"
        and files.text(f"{_BLOCK}/{disk}/device/transport") not in ("tcp", "rdma", "fc", "loop")
    ]
    return own or Absent(status="unsupported", reason=_NO_DISK)


def states(files: Files, disks: list[str] | Absent) -> Iterable[Family]:
    """How many there are, and whether they work."""
    none = isinstance(disks, Absent) and disks.status == "unsupported"
    count = 0 if none else disks if isinstance(disks, Absent) else len(disks)
    yield one("storage.disk.count", "1", "Disks that are built in", count)
    family = Family(name="storage.disk.online", unit="1", help="The disk takes commands")
    yield over(family, "disk", disks, lambda disk: files.read(f"{_BLOCK}/{disk}/device/state", _online))
    family = Family(
        name="storage.disk.io_errors", unit="1", help="Commands that failed; SCSI and SATA only", counter=True
    )
    yield over(family, "disk", disks, lambda disk: files.read(f"{_BLOCK}/{disk}/device/ioerr_cnt", _hexadecimal))


def identities(files: Files, disks: list[str] | Absent) -> Iterable[Family]:
    """What each disk is."""
    family = Family(name="storage.disk.size", unit="B", help="Size of the disk")
    yield over(family, "disk", disks, lambda disk: files.read(f"{_BLOCK}/{disk}/size", lambda text: int(text) * 512))
    family = Family(name="storage.disk.rotational", unit="1", help="The disk turns")
    yield over(
        family,
        "disk",
        disks,
        lambda disk: files.read(f"{_BLOCK}/{disk}/queue/rotational", lambda text: bool(int(text))),
    )
    for name, unit, text, spellings in _ABOUT:
        yield over(Family(name=name, unit=unit, help=text), "disk", disks, partial(_first, files, spellings=spellings))


def _first(files: Files, disk: str, spellings: tuple[str, ...]) -> str | Absent:
    """The first of the files that says something, or why the last does not."""
    found: str | Absent = Absent(status="unsupported", reason="not told")
    for path in spellings:
        found = files.text(f"{_BLOCK}/{disk}/{path}")
        if isinstance(found, str):
            break
    return found


def arrays(files: Files) -> Iterable[Family]:
    """Arrays that the kernel makes of disks (md)."""
    found = files.names(_BLOCK, r"md\w+", "no array of disks")
    family = Family(name="storage.array.missing", unit="1", help="Disks that the array should have and has not")
    yield over(family, "array", found, lambda array: files.read(f"{_BLOCK}/{array}/md/degraded", int))


def _online(text: str) -> bool:
    return text.strip() in ("live", "running")


def _hexadecimal(text: str) -> int:
    return int(text, 16)
