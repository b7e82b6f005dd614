"""The storage collector: which readings it has, and the file systems."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from collectors.base import HOST, Absent, Family, Value
from collectors.host.files import Files, one
from collectors.storage import disks, nvme
from collectors.storage.mounts import Mount, local, mounts, read_only_under

STATE = "/var"
"""Where a host keeps what changes, also one whose root is read-only by design."""


class StorageCollector:
    """Reads the disks under `root`, `/` but in tests."""

    name = "storage"

    def __init__(
        self,
        root: Path = Path("/"),
        thorough: bool = False,
        *,
        read_log: Callable[[Path], bytes] = nvme.smart_log,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
    ) -> None:
        """`thorough`: also what each disk is, and the health log of NVMe disks."""
        self._root = root
        self._thorough = thorough
        self._read_log = read_log
        self._statvfs = statvfs

    def collect(self) -> Iterable[Family]:
        files = Files(self._root)
        own = disks.built_in(files)
        yield from disks.states(files, own)
        yield from disks.arrays(files)
        yield from self._file_systems(files)
        if self._thorough:
            yield from disks.identities(files, own)
            found = [] if isinstance(own, Absent) else own
            yield from nvme.families(self._root, [disk for disk in found if disk.startswith("nvme")], self._read_log)

    def _file_systems(self, files: Files) -> Iterable[Family]:
        found = files.read("proc/self/mountinfo", mounts)
        state = found if isinstance(found, Absent) else _state(found)
        yield one("storage.state.read_only", "1", f"The file system of {STATE} takes no writes", state)
        families = {
            name: Family(name=f"storage.mount.{name}", unit=unit, help=text)
            for name, unit, text in (
                ("size", "B", "Size of the file system"),
                ("available", "B", "What an ordinary user may still write"),
                ("inodes_available", "1", "Files that an ordinary user may still make"),
                ("read_only", "1", "The file system takes no writes"),
                ("errors", "1", "Errors that the file system noted since it was last checked; ext4 only"),
            )
        }
        if isinstance(found, Absent):
            places: list[Mount] = []
            none = found
        else:
            # Containers mount single files of the host's disk; they are nobody's file system.
            places = [mount for mount in local(found) if _is_directory(self._root / mount.place.lstrip("/"))]
            none = Absent(status="unsupported", reason="no local file system is mounted")
        for mount in places:
            for name, value in self._told(files, mount).items():
                families[name].add({"mount": mount.place}, value)
        for family in families.values():
            if not places:
                family.add(HOST, none)
            yield family

    def _told(self, files: Files, mount: Mount) -> dict[str, Value | Absent]:
        about: dict[str, Value | Absent] = {"read_only": mount.read_only, "errors": _errors(files, mount)}
        try:
            seen = self._statvfs(self._root / mount.place.lstrip("/"))
        except OSError as error:
            absent = Absent(status="error", reason=f"{mount.place}: {error.strerror}")
            return about | dict.fromkeys(("size", "available", "inodes_available"), absent)
        endless = Absent(status="unsupported", reason=f"{mount.kind} has no fixed number of files")
        return about | {
            "size": seen.f_blocks * seen.f_frsize,
            "available": seen.f_bavail * seen.f_frsize,
            "inodes_available": seen.f_favail if seen.f_files else endless,
        }


def _errors(files: Files, mount: Mount) -> int | Absent:
    if mount.kind != "ext4":
        return Absent(status="unsupported", reason=f"{mount.kind} keeps no such count")
    device = (files.root / "sys/dev/block" / mount.device).resolve().name
    return files.read(f"sys/fs/ext4/{device}/errors_count", int)


def _is_directory(place: Path) -> bool:
    try:
        return place.is_dir()
    except OSError:
        return True  # a disk that fails: statvfs will say so


def _state(found: list[Mount]) -> bool | Absent:
    try:
        return read_only_under(found, STATE)
    except ValueError as error:
        return Absent(status="error", reason=f"/proc/self/mountinfo: {error}")
