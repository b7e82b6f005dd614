"""The storage collector: disks, arrays, file systems, NVMe health."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from collectors.base import HOST_LABELS, Absent, Family, Value, empty_families, host_family, mark_varying
from collectors.files import Files
from collectors.storage import disks, mapper, nvme, redundancy
from collectors.storage.mounts import Mount, local_mounts, mount_of, parse_mounts

STATE = "/var"
"""Directory that must be writable, even on a host whose root file system is read-only by design."""
MOUNT_KINDS = {
    "storage.mount.size": ("B", "Size of the file system"),
    "storage.mount.available": ("B", "Space available to unprivileged users"),
    "storage.mount.inodes_available": ("1", "Inodes available to unprivileged users"),
    "storage.mount.read_only": ("1", "The file system is read-only"),
    "storage.mount.errors": ("1", "Errors of the file system since its last check; ext4 only"),
}


class StorageCollector:
    """Reads the disks under `root`. With `identity` it also reads model, serial number, firmware and PCI address of each disk.

    A full snapshot reads all of these, and also the size and type of each disk, the health log of NVMe disks and the status of
    the device mapper.
    """

    name = "storage"

    def __init__(
        self,
        root: Path = Path("/"),
        full_snapshot: bool = False,
        identity: bool = False,
        *,
        read_log: Callable[[Path], bytes] = nvme.read_smart_log,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
        read_targets: Callable[[Path, str], mapper.Targets] = mapper.read_targets,
    ) -> None:
        self._root = root
        self._full_snapshot = full_snapshot
        self._identity = identity or full_snapshot
        self._read_log = read_log
        self._statvfs = statvfs
        self._read_targets = read_targets

    def collect(self) -> Iterable[Family]:
        return mark_varying(self._families())

    def _families(self) -> Iterable[Family]:
        files = Files(self._root, cached=True)
        disk_names = disks.internal_disks(files)
        yield from disks.states(files, disk_names)
        yield from disks.controllers(files)
        # The device mapper reports its status only to root, and the exporter normally does not run as root.
        mapped = list(mapper.redundant_devices(files, self._read_targets)) if self._full_snapshot else []
        yield from redundancy.arrays(files, mapped)
        yield from redundancy.pools(files)
        yield from redundancy.paths(files, mapped)
        yield from self._file_systems(files)
        if self._identity:
            yield from disks.identities(files, disk_names)
        if self._full_snapshot:
            yield from disks.types(files, disk_names)
            names = [] if isinstance(disk_names, Absent) else disk_names
            nvme_disks = [name for name in names if name.startswith("nvme")]
            yield from nvme.health_families(self._root, nvme_disks, self._read_log)

    def _file_systems(self, files: Files) -> Iterable[Family]:
        mounts = files.read("proc/self/mountinfo", parse_mounts)
        state = mounts if isinstance(mounts, Absent) else _is_state_read_only(mounts)
        yield host_family("storage.state.read_only", "1", f"The file system of {STATE} is read-only", state)
        families = empty_families(MOUNT_KINDS)
        local: list[Mount] = []
        if not isinstance(mounts, Absent):
            # In a container, a single file of the host may be mounted, for example at /etc/hosts. Such a mount is left out.
            local = [mount for mount in local_mounts(mounts) if _is_directory(self._path(mount))]
        for mount in local:
            for name, value in self._readings(files, mount).items():
                families[f"storage.mount.{name}"].add({"mount": mount.target}, value)
        if not local:
            none = Absent.unsupported("no local file system is mounted")
            for family in families.values():
                family.add(HOST_LABELS, mounts if isinstance(mounts, Absent) else none)
        yield from families.values()

    def _path(self, mount: Mount) -> Path:
        return self._root / mount.target.lstrip("/")

    def _readings(self, files: Files, mount: Mount) -> dict[str, Value | Absent]:
        readings: dict[str, Value | Absent] = {"read_only": mount.read_only, "errors": _error_count(files, mount)}
        try:
            usage = self._statvfs(self._path(mount))
        except OSError as error:
            absent = Absent.error(f"{mount.target}: {error.strerror}")
            return readings | dict.fromkeys(("size", "available", "inodes_available"), absent)
        no_limit = Absent.unsupported(f"{mount.kind} has no fixed number of inodes")
        return readings | {
            "size": usage.f_blocks * usage.f_frsize,
            "available": usage.f_bavail * usage.f_frsize,
            "inodes_available": usage.f_favail if usage.f_files else no_limit,
        }


def _error_count(files: Files, mount: Mount) -> int | Absent:
    if mount.kind != "ext4":
        return Absent.unsupported(f"{mount.kind} has no error count")
    device = files.path(f"sys/dev/block/{mount.device}").resolve().name
    return files.read(f"sys/fs/ext4/{device}/errors_count", int)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return True  # the disk has failed; statvfs will report the error


def _is_state_read_only(mounts: list[Mount]) -> bool | Absent:
    try:
        mount = mount_of(mounts, STATE)
        if mount.target == "/" and mount.kind == "overlay" and (mount.read_only or mount.mounted_read_only):
            return Absent.unsupported("the root of this container is read-only by design")
        return mount.read_only
    except ValueError as error:
        return Absent.error(f"/proc/self/mountinfo: {error}")
