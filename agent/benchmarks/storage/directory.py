"""Run as a program, in a child process: prepare a directory for a measurement, check for subdirectories, or remove one.

    python directory.py prepare DIRECTORY      prints a JSON object about the directory and its file system
    python directory.py see DIRECTORY NAME …   prints a JSON object with each NAME that is a subdirectory
    python directory.py remove DIRECTORY WORK  removes the subdirectory WORK

It imports the standard library only, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import re
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

PREFIX = "rackproof-storage-"
LEFTOVER_S = 86400.0
"""A subdirectory of Rackproof that was last changed more than this many seconds ago is left over from a killed measurement."""
FSTAB = "/etc/fstab"
BLOCK = 4096
MAX_DEVICES = 256
"""Maximum number of block devices that are visited on the way from a file system down to its disks."""


def prepare(directory: str) -> dict[str, Any]:
    """Create a subdirectory for test files, and return a description of the directory.

    Keys: `work` (path of the subdirectory), `free` (bytes), `direct` (whether files can be written with O_DIRECT, which bypasses
    the page cache), `filesystem` (type), `pool` (equal for directories that may share their free space), `device` (the block
    device; if there is none, the source of the mount), `model` (description of the disks) and `disks` (see `disks_of`).

    Raises:
        ValueError: `directory` is a file or a device, or a file system of /etc/fstab that belongs there is not mounted.
        OSError: `directory` does not exist, or nothing can be written to it.
    """
    status = Path(directory).stat()
    if not stat.S_ISDIR(status.st_mode):
        kind = "a device" if stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode) else "a file"
        raise ValueError(f"it is {kind}, not a directory: name a directory of a mounted file system")
    status = os.stat(f"{directory}/")  # noqa: PTH116 - the slash makes autofs mount the file system, and Path removes it
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    if missing := missing_mount(_fstab(), mounts, directory):
        raise ValueError(f"{FSTAB} has a file system for {missing}, which is not mounted: mount it, or remove its line")
    work = tempfile.mkdtemp(prefix=PREFIX, dir=directory)
    try:
        _remove_leftovers(directory, Path(work).stat().st_mtime)
        direct = _supports_direct(work)
        usage = os.statvfs(directory)
        _, kind, source = mount_of(mounts, os.path.realpath(directory))
        device, models, disks = disks_of(status.st_dev, source)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return {
        "work": work,
        "free": usage.f_bavail * usage.f_frsize,
        "direct": direct,
        "filesystem": kind,
        "pool": device or kind,
        "device": device or source,
        "model": models,
        "disks": disks,
    }


def _supports_direct(work: str) -> bool:
    """Return whether files can be written with O_DIRECT. Raises OSError if they cannot be written at all."""
    with mmap.mmap(-1, BLOCK) as buffer:
        for flag in (os.O_DIRECT, 0):
            descriptor = -1
            try:
                descriptor = os.open(f"{work}/probe{flag}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)
                os.write(descriptor, buffer)
                os.fsync(descriptor)
                return bool(flag)
            except OSError as error:
                if not flag or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # both mean: no O_DIRECT
                    raise
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
    return False


def _remove_leftovers(directory: str, now: float) -> None:
    """Remove the subdirectories that killed measurements of this user left behind. Links are not followed.

    Args:
        directory: the directory.
        now: the time by the file system's clock. By the clock of a host that is ahead, directories in use would look old.
    """
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if not entry.name.startswith(PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == os.geteuid() and now - status.st_mtime > LEFTOVER_S:
                shutil.rmtree(entry.path, ignore_errors=True)


def missing_mount(fstab: str, mountinfo: str, directory: str) -> str:
    """Return the mount point in `fstab` that contains the directory and has no file system mounted; empty if there is none.

    With the option `nofail`, a host starts without the file system of a failed disk. The directory is then on another disk.
    Lines with the option `noauto` are skipped.

    Args:
        fstab: content of `/etc/fstab`, see fstab(5).
        mountinfo: content of `/proc/self/mountinfo`.
        directory: path.
    """
    real = os.path.realpath(directory)
    mounted, _, _ = mount_of(mountinfo, real)
    for line in fstab.splitlines():
        fields = line.split()
        if len(fields) < 3 or fields[0].startswith("#") or "noauto" in "".join(fields[3:4]).split(","):
            continue
        target = _unescape(fields[1])
        if not any(_contains(target, path) for path in (os.path.normpath(directory), real)):
            continue
        point = os.path.realpath(target)  # a mount point may be a symbolic link
        if _contains(point, real) and len(point) > len(mounted or "/"):
            return target
    return ""


def _fstab() -> str:
    with contextlib.suppress(OSError):
        return Path(FSTAB).read_text(encoding="utf-8", errors="surrogateescape")
    return ""


def _contains(target: str, path: str) -> bool:
    return target.startswith("/") and f"{path}/".startswith(f"{target.rstrip('/')}/")


def mount_of(mountinfo: str, directory: str) -> tuple[str, str, str]:
    """Return mount point, type and source of the mount that contains the directory.

    If several mounts are on one path, the last one is used.

    Args:
        mountinfo: content of `/proc/self/mountinfo`, see proc(5).
        directory: path without symbolic links.
    """
    best = ("", "", "")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(rest) < 2:
            continue
        target = _unescape(fields[4])
        if _contains(target, directory) and len(target) >= len(best[0]):
            best = (target, rest[0], _unescape(rest[1]))
    return best


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def disks_of(number: int, source: str, root: Path = Path("/")) -> tuple[str, str, list[str]]:
    """Return the block device of a file system, a description of the disks below it, and the names of these disks.

    For example `md0`, `raid0 of 2x SAMSUNG MZWLR 3841 GB`, `[nvme0n1, nvme1n1]`. File systems with the same description can be
    compared: they have equally many disks of the same models and sizes, in arrays of the same levels, with the same encryption.
    The description is empty if no disk has a model.

    All are empty if the file system has no block device in `/sys`. For an array, a volume or a partition, the disks are
    those that contain it.

    Args:
        number: `st_dev` of the directory.
        source: source of the mount, for file systems with an anonymous `st_dev` (btrfs).
        root: directory that contains `sys`.
    """
    device = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not device.exists() and source.startswith("/dev/"):
        device = root / "sys/class/block" / Path(os.path.realpath(source)).name
    if not device.exists():
        return "", "", []
    name, kinds = device.resolve().name, dict[str, set[str]]()
    level, pending = _of_btrfs(device.resolve(), root)
    levels, disks = [level], set[str]()
    for _ in range(MAX_DEVICES):
        if not pending:
            break
        path = pending.pop()
        if members := [member.resolve() for member in sorted((path / "slaves").glob("*"))]:
            levels.append(_level(path, members))
            pending += members
            continue
        disk = path.parent if (path / "partition").exists() else path
        disks.add(disk.name)
        if model := _text(disk / "device/model"):
            levels.append(_text(disk / "device/raid_level").replace("N/A", ""))  # of a RAID controller's volume
            kinds.setdefault(f"{model}{_size(disk)}", set()).add(disk.name)
    counts = {kind: len(names) for kind, names in sorted(kinds.items())}
    text = ", ".join(kind if count == 1 else f"{count}x {kind}" for kind, count in counts.items())
    arrays = " over ".join(dict.fromkeys(filter(None, levels)))
    return name, f"{arrays} of {text}" if arrays and text else text, sorted(disks)


def _of_btrfs(device: Path, root: Path) -> tuple[str, list[Path]]:
    """Return level and devices of a btrfs file system on several devices; for another file system, no level and `device`."""
    for found in (root / "sys/fs/btrfs").glob(f"*/devices/{device.name}"):
        members, data = sorted(found.parent.glob("*")), found.parent.parent / "allocation/data"
        if len(members) > 1:
            levels = sorted(path.name for path in data.glob("*") if path.is_dir())  # several while they are converted
            return f"btrfs {'+'.join(levels)}", [member.resolve() for member in members]
    return "", [device]


def _level(path: Path, members: list[Path]) -> str:
    """Return how a device stores its data on its members: the level of an array, such as `raid0`, or the format of an encrypted
    device, such as `LUKS2`. Empty for a volume on one member.

    The kernel lists no level of an LVM volume. Instead, its kind and its optimal size of a transfer are returned: the size of one
    stripe over all members that hold data.
    """
    level = _text(path / "md/level")
    encrypted = re.match(r"CRYPT-(\w+)", _text(path / "dm/uuid"))
    if encrypted:
        return encrypted[1]
    if level or len(members) < 2:
        return level
    images = any(re.search(r"_[rm]image_\d+$", _text(member / "dm/name")) for member in members)
    stripe = _text(path / "queue/optimal_io_size").lstrip("0")
    return ("RAID" if images else "volume") + (f" with stripes of {stripe} B" if stripe else "")


def _size(disk: Path) -> str:
    sectors = _text(disk / "size")  # in units of 512 bytes, whatever the size of the disk's blocks
    return f" {int(sectors) * 512 / 1e9:.0f} GB" if sectors.isdecimal() else ""


def _text(path: Path) -> str:
    """Return the content of a file in one line; empty if the file cannot be read."""
    with contextlib.suppress(OSError):
        return " ".join(path.read_text(encoding="utf-8", errors="replace").split())
    return ""


def main(action: str, directory: str, *names: str) -> None:
    """Run the action and print its answer as JSON; `{"problem": …}` after an error.

    The answer of `prepare` is what that function returns; of `see`, `{"seen": [NAME, …]}`; of `remove`, `{}`.
    """
    try:
        if action == "remove":
            shutil.rmtree(names[0])
            answer: dict[str, Any] = {}
        elif action == "see":
            answer = {"seen": [name for name in names if Path(directory, name).is_dir()]}
        else:
            answer = prepare(directory)
    except ValueError as error:
        answer = {"problem": str(error)}
    except OSError as error:
        answer = {"problem": error.strerror or str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
