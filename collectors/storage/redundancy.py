"""The members of redundant storage, which stays usable when a member fails: md arrays, btrfs, ZFS pools, multipath.

Sources: /proc/mdstat and /sys/block/*/md (Linux, admin-guide/md.rst), /sys/fs/btrfs/*/devinfo, /proc/spl/kstat/zfs, the paths of
device-mapper multipath (/sys/block/dm-*/slaves) and of NVMe (/sys/class/nvme-subsystem), and the status of the device mapper.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from collectors.base import HOST_LABELS, Absent, Family
from collectors.files import Files, nonempty
from collectors.storage.disks import LEAVING

_BLOCK, _SUBSYSTEMS, _BTRFS, _POOLS = "sys/block", "sys/class/nvme-subsystem", "sys/fs/btrfs", "proc/spl/kstat/zfs"
_STOPPED = ("inactive", "broken", "clear", "suspended")
"""Values of `array_state` with which an md array cannot be used. With all other values it can at least be read."""
_CONTAINER = re.compile(r"external:(?![/-])")
"""Metadata of a firmware RAID container (a term of mdadm), such as `external:imsm`. The container is always inactive. An array
in it is listed separately, with metadata such as `external:/md127/0`, or `external:-md127/0` if it is read-only."""
_HEAD = re.compile(r"(\S+) : (active|inactive|broken)\b(.*)")
_MEMBER = re.compile(r"(\S+)\[\d+\]((?:\([A-Z]\))*)")
_FLAG = re.compile(r"\([A-Z]\)")
_COUNTS = re.compile(r"\[(\d+)/(\d+)\] \[([U_]+)\]")

_REBUILDING = Absent.error("members are being rebuilt, and /proc/mdstat does not show which ones")

MappedDevice = tuple[str, str, Mapping[str, bool | Absent]]
"""Name, kind (`raid`, `mirror` or `multipath`) and members of a device-mapper device. Members: name -> whether it works."""


@dataclass(kw_only=True)
class Array:
    """An md array."""

    works: bool = True
    missing: int | None = None
    """Number of missing members; None if the array has no redundancy, or the source does not report it."""
    members: dict[str, bool | Absent] = field(default_factory=dict)
    """Disk, or `slotN` or `emptyN` for an empty slot -> whether it is in sync.

    /proc/mdstat shows which disks have failed, but only the number of disks in sync. If this number is lower than the number of
    working disks, some of these disks are being rebuilt. Each working disk then has the value _REBUILDING.
    """

    def add_empty(self, slots: list[int], failed: int) -> None:
        """Add the empty slots as members that are not in sync.

        Args:
            slots: numbers of the slots that seem empty. Each becomes the member `slotN`.
            failed: number of these slots that failed or rebuilding members use. If there are any, it is unknown which slots are
                empty. The empty slots then become the members `empty1`, `empty2` … instead.
        """
        if failed:
            self.members |= {f"empty{number}": False for number in range(1, len(slots) - failed + 1)}
        else:
            self.members |= {f"slot{slot}": False for slot in slots}


def parse_mdstat(text: str) -> dict[str, Array]:
    """Return the arrays in /proc/mdstat by name."""
    arrays: dict[str, Array] = {}
    current: Array | None = None
    replacements: set[str] = set()
    for line in text.splitlines():
        if head := _HEAD.match(line):
            disks = _MEMBER.findall(head[3])
            replacements = {disk for disk, flags in disks if "(R)" in flags}
            members: dict[str, bool | Absent] = {
                disk: "(F)" not in flags for disk, flags in disks if not {"(S)", "(J)"} & {*_FLAG.findall(flags)}
            }
            current = arrays[head[1]] = Array(works=head[2] == "active", members=members)
        elif current and line[:1].isspace():
            current.works = current.works or _CONTAINER.search(line) is not None
            if counts := _COUNTS.search(line):
                current.missing = int(counts[1]) - int(counts[2])
                empty = [slot for slot, state in enumerate(counts[3]) if state == "_"]
                # The replacement of a disk (R) has no slot of its own.
                working = [disk for disk, in_sync in current.members.items() if in_sync and disk not in replacements]
                failed = sum(not in_sync for in_sync in current.members.values())
                rebuilding = max(0, len(working) - int(counts[2]))
                current.members |= dict.fromkeys(working, _REBUILDING) if rebuilding else {}
                current.add_empty(empty, failed + rebuilding)
    return arrays


def _read_array(files: Files, name: str) -> Array:
    """Return the state of an array from /sys."""
    path = f"{_BLOCK}/{name}/md"
    state, metadata = files.read(f"{path}/array_state", str), files.read(f"{path}/metadata_version", str)
    is_container = isinstance(metadata, str) and _CONTAINER.match(metadata) is not None
    missing = files.read(f"{path}/degraded", int)
    array = Array(works=state not in _STOPPED or is_container, missing=missing if isinstance(missing, int) else None)
    filled: list[int] = []
    failed = 0
    devices = files.matching(path, r"dev-.+", "no members")
    for device in [] if isinstance(devices, Absent) else devices:
        flags = files.read(f"{path}/{device}/state", lambda text: text.split(","))
        slot = files.read(f"{path}/{device}/slot", int)
        if isinstance(flags, Absent) or (not isinstance(slot, int) and {"spare", "journal"} & {*flags}):
            continue  # a spare or a journal is not a member
        array.members[device.removeprefix("dev-")] = "in_sync" in flags and "faulty" not in flags
        if isinstance(slot, int):
            filled.append(slot)
        else:
            failed += "faulty" in flags
    slots = files.read(f"{path}/raid_disks", lambda text: int(text.split()[0]))
    if array.missing and filled and isinstance(slots, int):  # if no slot could be read, all slots would count as empty
        array.add_empty([slot for slot in range(slots) if slot not in filled], failed)
    return array


def arrays(files: Files, mapped: Iterable[MappedDevice] = ()) -> Iterable[Family]:
    """Yield how many disks are missing from each md array, and whether the array can be used.

    Also yield whether each member of md arrays, of btrfs, and of LVM RAID and mirrors (from `mapped`) is in sync.
    """
    missing = Family(name="storage.array.missing", unit="1", help="Disks missing from the array", labels=("array",))
    works = Family(name="storage.array.works", unit="1", help="The array can be used", labels=("array",))
    members = Family(
        name="storage.array.member_in_sync",
        unit="1",
        help="The member of the array is in sync (btrfs: is present; LVM RAID: is in sync or in its first synchronization)",
        labels=("array", "member"),
    )
    listed = files.read("proc/mdstat", parse_mdstat)
    known = {} if isinstance(listed, Absent) else listed
    names = files.matching(_BLOCK, r"md\w+", "no disk array")
    for name in sorted({*known, *([] if isinstance(names, Absent) else names)}):
        array, listed_array = _read_array(files, name), known.get(name, Array())
        counts = [count for count in (array.missing, listed_array.missing) if count is not None]
        unknown = files.read(f"{_BLOCK}/{name}/md/degraded", int)
        missing.add({"array": name}, max(counts) if counts else unknown)
        works.add({"array": name}, array.works and listed_array.works)
        for member, in_sync in (array.members or listed_array.members).items():
            members.add({"array": name, "member": member}, in_sync)
    for path in files.glob(f"{_BTRFS}/*/devinfo/*/missing"):
        _, _, _, system, _, device, _ = path.split("/")
        is_present = files.read(path, lambda text: text != "1")
        members.add({"array": system, "member": f"device{device}"}, is_present)
    for device, kind, legs in mapped:
        if kind != "multipath":
            for leg, works_or_absent in legs.items():
                members.add({"array": device, "member": leg}, works_or_absent)
    if not missing.readings:
        missing.add(HOST_LABELS, names if isinstance(names, Absent) else Absent.unsupported("no disk array"))
    yield from (missing, works, members)


def pools(files: Files) -> Iterable[Family]:
    """Yield the state of each ZFS pool. The kernel does not report which member failed; `zpool status` does."""
    family = Family(name="storage.pool.state", unit="1", help="State of the ZFS pool", labels=("pool",))
    for path in files.glob(f"{_POOLS}/*/state"):
        family.add({"pool": path.split("/")[-2]}, files.read(path, nonempty))
    yield family


def paths(files: Files, mapped: Iterable[MappedDevice] = ()) -> Iterable[Family]:
    """Yield whether each path works, for disks with several paths."""
    family = Family(name="storage.path.live", unit="1", help="The path to the disk works", labels=("disk", "path"))
    failed = {
        disk: {files.target_name(f"sys/dev/block/{number}") for number, works in members.items() if works is False}
        for disk, kind, members in mapped
        if kind == "multipath"
    }
    for disk, states in sorted({**_nvme_paths(files), **dict(_mapped_paths(files))}.items()):
        lost = failed.get(disk, set())
        is_live = {
            path: path not in lost and (state if isinstance(state, Absent) else state in ("live", "running"))
            for path, state in states.items()
            if state not in LEAVING
        }
        # A disk whose paths are all known not to work is left out: it may be a network volume, detached by design.
        if len(is_live) > 1 and any(live is not False for live in is_live.values()):
            for path, live in sorted(is_live.items()):
                family.add({"disk": disk, "path": path}, live)
    yield family


def _state(files: Files, path: str) -> str | Absent | None:
    """Return the text of a state file of /sys; None if it is missing, for example because the device was removed meanwhile."""
    state = files.read(path, str)
    return None if isinstance(state, Absent) and state.status == "unsupported" else state


def _nvme_paths(files: Files) -> dict[str, dict[str, str | Absent]]:
    """Return subsystem -> controller -> state, or why the state cannot be read.

    Each controller of an NVMe subsystem is a path to its disks.
    """
    controllers: dict[str, set[str]] = {}
    for path in files.glob(f"{_SUBSYSTEMS}/*/nvme*"):
        subsystem, name = path.split("/")[-2:]
        if re.fullmatch(r"nvme\d+", name):
            controllers.setdefault(subsystem, set()).add(name)
    names = files.matching(_BLOCK, r"nvme\d+c\d+n\d+", "no path")
    for name in [] if isinstance(names, Absent) else names:
        subsystem, controller, _ = re.findall(r"\d+", name)
        controllers.setdefault(f"nvme-subsys{subsystem}", set()).add(f"nvme{controller}")
    return {
        subsystem: {
            name: state for name in names if (state := _state(files, f"sys/class/nvme/{name}/state")) is not None
        }
        for subsystem, names in controllers.items()
    }


def _mapped_paths(files: Files) -> Iterator[tuple[str, dict[str, str | Absent]]]:
    """Yield the name and the paths of each multipath device of the device mapper.

    Each path is a disk. The paths are a mapping: disk -> state, or why the state cannot be read.
    """
    for path in files.glob(f"{_BLOCK}/dm-*/dm/uuid"):
        device = path.split("/")[-3]
        uuid, name = files.read(path, str), files.read(f"{_BLOCK}/{device}/dm/name", nonempty)
        if isinstance(uuid, str) and uuid.startswith("mpath-"):
            slaves = files.matching(f"{_BLOCK}/{device}/slaves", r".+", "no path")
            states = {
                disk: state
                for disk in ([] if isinstance(slaves, Absent) else slaves)
                if (state := _state(files, f"{_BLOCK}/{disk}/device/state")) is not None
            }
            yield name if isinstance(name, str) else device, states
