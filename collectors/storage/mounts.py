"""File systems that are mounted, out of /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs"})
"""Types that live on a disk of this host. One of a network may block whoever asks it."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of mountinfo."""

    place: str
    """Where it is mounted."""
    kind: str
    """Type of the file system."""
    source: str
    """What is mounted: a device, or a word."""
    device: str
    """Its number as the kernel writes it, `259:3`."""
    part: str
    """Which directory of the file system is mounted there; `/` is the whole of it."""
    read_only: bool
    """The file system itself, not only this mount of it."""
    mounted_read_only: bool


def mounts(text: str) -> list[Mount]:
    """Every mount, in the order in which they were made. Raises ValueError for text that is not mountinfo."""
    return [_mount(line) for line in text.splitlines()]


def local(found: Iterable[Mount]) -> list[Mount]:
    """Each local file system once, at the place that shows most of it; and the root, whatever it is."""
    best: dict[str, Mount] = {}
    for mount in found:
        if mount.kind not in LOCAL and not (mount.place == "/" and mount.kind == "overlay"):
            continue
        other = best.get(mount.source)
        if other is None or _rank(mount) < _rank(other):
            best[mount.source] = mount
    return sorted(best.values(), key=lambda mount: mount.place)


def read_only_under(found: Iterable[Mount], directory: str) -> bool:
    """Whether the file system on which `directory` lies takes no writes. Raises ValueError where nothing is mounted there."""
    above = [
        mount for mount in found if directory == mount.place or directory.startswith(mount.place.rstrip("/") + "/")
    ]
    if not above:
        raise ValueError(f"nothing is mounted at {directory}")
    # Of two at the same place the later one hides the other.
    nearest = max(enumerate(above), key=lambda item: (len(item[1].place), item[0]))[1]
    return nearest.read_only or nearest.mounted_read_only


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, rest = before.split(), after.split()
    if len(fields) < 6 or len(rest) < 3:
        raise ValueError(f"not a mount: {line!r}")
    return Mount(
        place=_plain(fields[4]),
        device=fields[2],
        part=_plain(fields[3]),
        mounted_read_only="ro" in fields[5].split(","),
        kind=rest[0],
        source=_plain(rest[1]),
        read_only="ro" in rest[2].split(","),
    )


def _rank(mount: Mount) -> tuple[bool, int]:
    return mount.part != "/", len(mount.place)


def _plain(text: str) -> str:
    """The kernel writes white space and backslashes as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)
