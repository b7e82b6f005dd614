"""Mounted file systems, from /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs"})
"""Types of file systems on local disks. Other types are not read, because a network file system may block its readers."""

OVERLAY = "overlay"
"""Type of the root file system of a container."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of mountinfo."""

    target: str
    """Mount point."""
    kind: str
    """Type of the file system."""
    source: str
    """Path of the device, or a name such as `overlay`."""
    device: str
    """Device number as the kernel writes it, `259:3`."""
    subdirectory: str
    """The directory of the file system that is mounted here; `/` if the whole file system is mounted."""
    read_only: bool
    """Whether the file system itself is read-only."""
    mounted_read_only: bool
    """Whether this mount of the file system is read-only, which is a setting and not a fault: systemd sets it in the mount
    namespace of a service with `ProtectSystem`, such as the exporter."""


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts, in mount order. Lines with too few fields are left out if they are of a network or virtual file system.

    Raises ValueError if another line has too few fields.
    """
    mounts = []
    for line in filter(
        None, text.split("\n")
    ):  # a path may contain other characters that `splitlines` takes for ends of lines
        try:
            mounts.append(_mount(line))
        except ValueError:
            kind = line.partition(" - ")[2].partition(" ")[0]
            if not kind or kind in (*LOCAL, OVERLAY):
                raise
    return mounts


def local_mounts(mounts: Iterable[Mount]) -> list[Mount]:
    """Return one mount of each local file system, and the overlay of a container's root.

    If a file system has several mounts, a mount of the whole file system is preferred to one of a subdirectory.
    """
    best: dict[str, Mount] = {}
    for mount in mounts:
        if mount.kind not in LOCAL and not (mount.target == "/" and mount.kind == OVERLAY):
            continue
        other = best.get(mount.source)
        if other is None or _rank(mount) < _rank(other):
            best[mount.source] = mount
    return sorted(best.values(), key=lambda mount: mount.target)


def mount_of(mounts: Iterable[Mount], directory: str) -> Mount:
    """Return the mount that contains `directory`. Raises ValueError if no mount does."""
    above = [
        mount for mount in mounts if directory == mount.target or directory.startswith(mount.target.rstrip("/") + "/")
    ]
    if not above:
        raise ValueError(f"no mount contains {directory}")
    # The later of two mounts with the same target hides the earlier one.
    return max(enumerate(above), key=lambda item: (len(item[1].target), item[0]))[1]


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    # The kernel separates fields by one space each. A field, such as the source of a tmpfs, may be empty.
    fields, rest = before.split(" "), after.split(" ")
    if len(fields) < 6 or len(rest) < 3:
        raise ValueError(f"not a line of mountinfo: {line!r}")
    return Mount(
        target=_unescape(fields[4]),
        device=fields[2],
        subdirectory=_unescape(fields[3]),
        mounted_read_only="ro" in fields[5].split(","),
        kind=rest[0],
        source=_unescape(rest[1]),
        read_only="ro" in rest[2].split(","),
    )


def _rank(mount: Mount) -> tuple[bool, int]:
    return mount.subdirectory != "/", len(mount.target)


def _unescape(text: str) -> str:
    """Decode white space and backslashes, which the kernel writes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
