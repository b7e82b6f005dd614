"""Status of device-mapper devices: LVM RAID, mirrors and multipath. The kernel reports this status only through an ioctl.

A leg is a device that holds one of the copies or stripes of an LVM RAID or mirror. The members of a device are its legs or paths.

Structures and numbers are those of linux/dm-ioctl.h. Status lines: Linux, admin-guide/device-mapper/dm-raid.rst, and the sources
dm-raid1.c and dm-mpath.c.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from collectors.base import Absent
from collectors.files import Files, nonempty

Targets = list[tuple[str, str]]
"""Type and status line of each target (a segment of a device-mapper device)."""
Members = Mapping[str, bool]
"""Member -> whether it works."""
KnownMembers = Mapping[str, bool | Absent]
"""Member -> whether it works, or why that cannot be read."""

_TABLE_STATUS = 0xC138FD0C
_HEADER = struct.Struct("=3I3Ii3IQ128s129s7s")
_TARGET = struct.Struct("=QQiI16s")
_VERSION = (4, 0, 0)
_NO_FLUSH, _BUFFER_FULL = 0x800, 0x100
_BUFFER_BYTES = 1 << 16
_REDUNDANT = ("raid", "mirror", "multipath")
_PATH = re.compile(r"\b(\d+:\d+) ([AF]) \d+")
_LVM_LEG = re.compile(r"(.+)_[rm]image_(\d+)")
"""Matches the name of a device that is a leg of an LVM RAID or mirror: lvmraid(7), "Data LV"."""


def read_targets(control: Path, name: str) -> Targets:
    """Return the targets of a device with their status. Raises OSError, for example if the status is too long."""
    size = _HEADER.size
    buffer = bytearray(_BUFFER_BYTES)
    _HEADER.pack_into(buffer, 0, *_VERSION, len(buffer), size, 0, 0, _NO_FLUSH, 0, 0, 0, name.encode(), b"", b"")
    descriptor = os.open(control, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _TABLE_STATUS, buffer, True)
    finally:
        os.close(descriptor)
    return parse_targets(bytes(buffer))


def parse_targets(buffer: bytes) -> Targets:
    """Return the targets in the answer of the ioctl. Raises OSError if the answer is cut short."""
    header = _HEADER.unpack_from(buffer)
    start, count, flags = header[4], header[5], header[7]
    if flags & _BUFFER_FULL:
        raise OSError(0, "the status is longer than the buffer")
    targets: Targets = []
    at = start
    for _ in range(count):
        _, _, _, following, kind = _TARGET.unpack_from(buffer, at)
        text = buffer[at + _TARGET.size :].partition(b"\0")[0]
        targets.append((kind.partition(b"\0")[0].decode(), text.decode(errors="replace")))
        at = start + following
    return targets


def parse_members(kind: str, status: str) -> Members:
    """Return the legs of a RAID or mirror (`leg0`), or the paths of a multipath device (`8:16`), and whether each works.

    While a RAID is in `resync`, as in its first synchronization, legs that are not yet in sync count as working. The result is
    empty for a status line in another format.
    """
    words = status.split()
    if kind == "multipath":
        return {path: state == "A" for path, state in _PATH.findall(status)}
    if kind == "raid" and len(words) > 4:
        works = "Aa" if words[4] == "resync" else "A"
        return {f"leg{number}": state in works for number, state in enumerate(words[2])}
    if kind == "mirror" and words and words[0].isdigit() and len(words) > int(words[0]) + 3:
        return {f"leg{number}": state == "A" for number, state in enumerate(words[int(words[0]) + 3])}
    return {}


def redundant_devices(
    files: Files, read: Callable[[Path, str], Targets] = read_targets
) -> Iterator[tuple[str, str, KnownMembers]]:
    """Yield name, kind and members of each device with redundancy.

    If this process has no permission to read the status, only legs of LVM RAID and mirrors are yielded: they are recognized by
    the names of their devices, and their state is an `error`. In a container without the device mapper the result is empty.
    Devices that are removed during the call, or whose status is too long, are left out.
    """
    control = files.path("dev/mapper/control")
    paths = files.glob("sys/block/dm-*/dm/name")
    names = [name for path in paths if isinstance(name := files.read(path, nonempty), str)]
    for number, name in enumerate(names):
        try:
            targets = read(control, name)
        except FileNotFoundError:
            return  # no device mapper in this container
        except PermissionError as error:
            yield from _unread_legs(names[number:], Absent.error(f"/dev/mapper/control: {error.strerror}"))
            return
        except OSError:
            continue  # the device was removed in the meantime, or its status is too long
        for kind, status in targets:
            if kind in _REDUNDANT and (members := parse_members(kind, status)):
                yield name, kind, members


def _unread_legs(names: Iterable[str], absent: Absent) -> Iterator[tuple[str, str, KnownMembers]]:
    """For each name of a leg, yield the RAID or mirror that contains the leg, the kind `raid`, and leg -> `absent`."""
    for name in names:
        if leg := _LVM_LEG.fullmatch(name):
            yield leg[1], "raid", {f"leg{leg[2]}": absent}
