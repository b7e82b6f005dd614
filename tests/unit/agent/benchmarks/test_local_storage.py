"""Test the benchmark of local storage with the real fio, and with replacements of it that hang, print nonsense or flip a bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.benchmarks.storage import directory, local_storage, target
from agent.benchmarks.storage.directory import disks_of, mount_of
from schemas.catalogue import expand, settings
from tests.rank_context import Recorder

CHOSEN = {"size_bytes": 8 << 20, "jobs": 2}
FLIP = f"""#!{sys.executable}
import os, sys
options = dict(item.lstrip("-").split("=", 1) for item in sys.argv[1:] if "=" in item)
if options.get("name") == "comparison":
    with open(options["filename"], "r+b") as file:
        file.seek(1234567); byte = file.read(1)
        file.seek(1234567); file.write(bytes([byte[0] ^ 1])); file.flush(); os.fsync(file.fileno())
os.execv({shutil.which("fio")!r}, ["fio", *sys.argv[1:]])
"""
"""Wrapper around fio. Before the pass (run of fio) `comparison`, which compares all blocks, it flips one bit of the file."""


def measure(work: Path, *paths: Path | str, kind: str = "cpu", **chosen: Any) -> list[dict[str, Any]]:
    """Run the benchmark for the directories `paths`; return the observations of the host's reporting rank.

    With the kind `gpu`, directories in memory are refused. `tmp_path` may be one.
    """
    work.mkdir(exist_ok=True)
    (work / "request.json").write_text(json.dumps({"local_storage": [str(path) for path in paths]}))
    context = Recorder(
        work=work, stage="benchmark", is_reporting_rank=True, kind=kind, observations=[],
        heartbeat=SimpleNamespace(record_progress=lambda: None),
    )  # fmt: skip
    values = {**settings("local_storage", {**CHOSEN, **chosen}), "seconds": 0.2}
    local_storage.run(context, values)  # type: ignore[arg-type]
    for path in paths:
        planned = [item for item in expand("benchmark", "local_storage", values) if item.scope == "directory"]
        scope = f"directory={str(path).strip('/').replace('/', ':')}"
        reported = [item for item in context.observations if item["scope"] == scope]
        assert len(reported) == len(planned), "every planned figure must be reported once, even if it is not measured"
    return context.observations


def replace_fio(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    programs = directory / "programs"
    programs.mkdir()
    (programs / "fio").write_text(script)
    (programs / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def reasons(observations: list[dict[str, Any]]) -> set[str]:
    assert {item["status"] for item in observations} == {"error"}
    return {item["reason"] for item in observations}


def test_every_figure_is_measured_and_nothing_is_left_behind(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    observations = measure(tmp_path / "work", disk, percentiles=["p50", "p99", "p99_9"])
    assert {item["status"] for item in observations} == {"measured"}
    values = {(item["name"], *sorted(map(str, item["params"].items()))): item["value"] for item in observations}
    assert all(value > 0 for key, value in values.items() if key[0] != "local_storage.wrong_blocks")
    (wrong,) = (item for item in observations if item["name"] == "local_storage.wrong_blocks")
    assert (wrong["value"], wrong["params"]["moved_bytes"] > 0) == (0, True)
    assert list(disk.iterdir()) == []


def test_one_flipped_bit_is_found_and_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_fio(tmp_path, monkeypatch, FLIP)
    (wrong,) = (item for item in measure(tmp_path / "work", tmp_path) if item["name"] == "local_storage.wrong_blocks")
    assert (wrong["status"], wrong["value"], wrong["params"]["first_wrong"]) == ("measured", 1, "offset 1232896")


def test_each_directory_that_cannot_be_measured_has_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_fio(tmp_path, monkeypatch, f"#!{sys.executable}\nprint('not JSON')\n")
    file = tmp_path / "file"
    file.touch()
    reported = {
        item["reason"] for item in measure(tmp_path / "work", tmp_path, file, "/dev/null", tmp_path / "none", "/proc")
    }
    assert reported == {
        f"{tmp_path}: sequential write: fio: exit code 0: not JSON",
        f"{file}: it is a file, not a directory: name a directory of a mounted file system",
        "/dev/null: it is a device, not a directory: name a directory of a mounted file system",
        f"{tmp_path / 'none'}: No such file or directory",
        "/proc: No such file or directory",
    }


def test_full_file_system_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "LEAST_BYTES", 1 << 62)
    (reason,) = reasons(measure(tmp_path / "work", tmp_path))
    assert reason.startswith(f"{tmp_path}: ")
    assert reason.endswith("are needed: free up space")


def test_size_bytes_too_small_for_the_number_of_jobs_is_an_error(tmp_path: Path) -> None:
    (reason,) = reasons(measure(tmp_path / "work", tmp_path, size_bytes=1 << 20))
    assert (
        reason == f"{tmp_path}: size_bytes is 1048576, less than 1 MiB for each of 2 jobs: increase it in the profile"
    )


def test_free_space_too_small_for_the_number_of_jobs_is_an_error(tmp_path: Path) -> None:
    (reason,) = reasons(measure(tmp_path / "work", tmp_path, size_bytes=1 << 60, jobs=1 << 39))
    assert reason.endswith(f"too little for {1 << 39} jobs: free up space")


def test_file_system_that_hangs_is_an_error_after_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "directory.py"
    program.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(directory, "__file__", str(program))
    monkeypatch.setattr(target, "ACCESS_S", 0.5)
    (reason,) = reasons(measure(tmp_path / "work", tmp_path))
    assert "no answer within 0.5 s: the file system hangs" in reason


def test_fio_that_hangs_is_an_error_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_fio(tmp_path, monkeypatch, f"#!{sys.executable}\nimport sys, time\ntime.sleep(600 * (len(sys.argv) > 2))\n")
    monkeypatch.setattr(local_storage, "MARGIN_S", 0.5)
    (reason,) = reasons(measure(tmp_path / "work", tmp_path))
    assert reason.startswith(f"{tmp_path}: sequential write: no answer within 0.7 s")


def test_missing_fio_is_an_error_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (reason,) = reasons(measure(tmp_path / "work", tmp_path))
    assert "set rackproof_install_fio" in reason


def test_error_of_the_benchmark_is_not_reported_as_a_problem_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark raises the error. In the agent, `run_benchmark` catches the error and reports it for all missing figures."""
    monkeypatch.setattr(local_storage.FioRunner, "run", lambda *_: 1 / 0)
    (tmp_path / "request.json").write_text(json.dumps({"local_storage": [str(tmp_path), str(tmp_path / "none")]}))
    context = Recorder(
        work=tmp_path, stage="benchmark", is_reporting_rank=True, kind="gpu", observations=[],
        heartbeat=SimpleNamespace(record_progress=lambda: None),
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        local_storage.run(context, settings("local_storage", CHOSEN))  # type: ignore[arg-type]
    assert reasons(context.observations) == {f"{tmp_path / 'none'}: No such file or directory"}


def test_host_without_directories_measures_nothing(tmp_path: Path) -> None:
    assert measure(tmp_path / "work") == []


def test_failed_preparation_of_a_directory_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "disks_of", lambda number, source: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        directory.prepare(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_host_whose_clock_is_ahead_keeps_the_directories_of_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rackproof-storage-other").mkdir()
    monkeypatch.setattr("time.time", lambda: 4e9)
    directory.prepare(str(tmp_path))
    assert (tmp_path / "rackproof-storage-other").is_dir()


def test_only_leftovers_of_killed_measurements_are_removed(tmp_path: Path) -> None:
    names = {"rackproof-storage-old": 2, "rackproof-storage-new": 0, "other": 2}
    for name, days in names.items():
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, (tmp_path / name).stat().st_mtime - days * 86400))
    (tmp_path / "rackproof-storage-link").symlink_to(tmp_path / "other")
    work = Path(directory.prepare(str(tmp_path))["work"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "rackproof-storage-new", "other", "rackproof-storage-link", work.name
    }  # fmt: skip


MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
80 22 0:45 / /mnt/shared\\040data rw,relatime shared:9 master:2 - nfs4 10.0.0.1:/export rw,vers=4.2
81 22 9:0 / /data rw shared:3 - xfs /dev/md0 rw
82 81 0:50 / /data rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/mnt/shared data/x", ("/mnt/shared data", "nfs4", "10.0.0.1:/export")),
        ("/data", ("/data", "tmpfs", "tmpfs")),
        ("/database", ("/", "ext4", "/dev/nvme0n1p2")),
        ("/", ("/", "ext4", "/dev/nvme0n1p2")),
    ],
)  # fmt: skip
def test_mount_of_a_path_is_the_last_mount_with_the_longest_prefix(path: str, expected: tuple[str, str, str]) -> None:
    assert mount_of(f"{MOUNTS}garbage\n", path) == expected


FSTAB = """\
# /etc/fstab: static file system information.
UUID=0a3407de-014b-458b-b5c1-848e92a327a3 / ext4 errors=remount-ro 0 1
/dev/md0\t/data\txfs\tdefaults,nofail\t0\t2
LABEL=scratch /scratch xfs nofail,x-systemd.device-timeout=5 0 2
LABEL=extra /scratch/extra xfs noauto 0 2
10.0.0.1:/home /home/shared\\040files nfs4
/swap.img none swap sw 0 0
garbage
"""


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("/data/x", ""), ("/scratch/x", "/scratch"), ("/scratch", "/scratch"), ("/scratch/extra", "/scratch"),
        ("/scratch2", ""), ("/home/shared files/x", "/home/shared files"), ("/home", ""), ("/mnt/shared data/x", ""), ("/", ""),
    ],
)  # fmt: skip
def test_file_system_of_fstab_that_is_not_mounted_is_found(path: str, missing: str) -> None:
    assert directory.missing_mount(FSTAB, MOUNTS, path) == missing
    assert directory.missing_mount("", MOUNTS, path) == ""


def test_root_of_a_chroot_environment_is_not_missing_although_no_mount_is_listed() -> None:
    assert directory.missing_mount(FSTAB, "", "/srv") == ""


def test_directory_without_the_disk_that_belongs_there_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One directory is in memory. The file system of the other one is not mounted, so its files are on another disk."""
    monkeypatch.setattr(directory, "FSTAB", str(tmp_path / "fstab"))
    (tmp_path / "fstab").write_text(f"LABEL=scratch {tmp_path} xfs nofail 0 2\n")
    with pytest.raises(ValueError, match=f"fstab has a file system for {tmp_path}, which is not mounted: mount it"):
        directory.prepare(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["fstab"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as in_memory:
        assert reasons(measure(tmp_path / "work", in_memory, kind="gpu")) == {
            f"{in_memory}: it is on tmpfs, in memory and not on a disk: mount the file system of the disk there"
        }
        assert list(Path(in_memory).iterdir()) == []


AUTOMOUNTER = """
import ctypes, fcntl, os, signal, struct, sys
MOUNT_NAMESPACE, PRIVATE, READY = 0x20000, 0x44000, 0x9360  # of unshare(2), mount(2), and the ioctls of autofs
libc, point = ctypes.CDLL(None), sys.argv[1].encode()
signal.alarm(30)
requests, end = os.pipe()
os.setpgid(0, 0)  # autofs does not answer the accesses of this process group
options = f"fd={end},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct".encode()
failed = libc.unshare(MOUNT_NAMESPACE) or libc.mount(None, b"/", None, PRIVATE, None)
assert not failed and not libc.mount(b"systemd-1", point, b"autofs", 0, options)
root = os.open(point, os.O_RDONLY)
if os.fork() == 0:
    os.setpgid(0, 0)
    os.execv(sys.executable, [sys.executable, sys.argv[2], "prepare", point])
_, _, request = struct.unpack_from("iiI", os.read(requests, 1024))
assert not libc.mount(b"memory", point, b"tmpfs", 0, b"size=1m")
fcntl.ioctl(root, READY, request)
os.wait()
"""
"""Mounts a tmpfs on a directory as soon as another process uses the directory, as systemd does for `x-systemd.automount`. That
process is a program that prepares the directory. Arguments: directory, program."""


def can_mount_on_demand() -> bool:
    """Return whether this process may mount autofs, and the kernel has it."""
    return os.geteuid() == 0 and "autofs" in Path("/proc/filesystems").read_text().split()


@pytest.mark.skipif(not can_mount_on_demand(), reason="needs root and autofs")
def test_file_system_that_is_mounted_on_demand_is_described(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AUTOMOUNTER, str(tmp_path), directory.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    about = json.loads(done.stdout)
    assert (about["filesystem"], about["device"]) == ("tmpfs", "memory")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class BlockDevices:
    """A `/sys` with disks, and devices on them."""

    def __init__(self, root: Path) -> None:
        self.root, self._block = root, root / "sys/devices/block"
        (root / "sys/class/block").mkdir(parents=True)

    def disks(
        self, count: int, model: str = "SAMSUNG MZWLR3T8   \n", size: int = 7_501_476_528, **files: str
    ) -> list[str]:
        """Add disks with one partition each, and return the names of the partitions. `files`: file in `device` -> text."""
        first = len(list(self._block.glob("nvme*")))
        names = [f"nvme{number}n1" for number in range(first, first + count)]
        for name in names:
            write(self._block / name / f"{name}p1/partition", "1\n")
            write(self._block / name / "size", f"{size}\n")
            for file, text in {"model": model, **files}.items():
                write(self._block / name / "device" / file, text)
            self._link(f"{name}p1", self._block / name / f"{name}p1")
        return [f"{name}p1" for name in names]

    def device(self, name: str, members: list[str], files: dict[str, str]) -> str:
        """Add a device on other devices, and return its name."""
        for member in members:
            slave = self._block / name / "slaves" / member
            slave.parent.mkdir(parents=True, exist_ok=True)
            slave.symlink_to((self.root / "sys/class/block" / member).resolve())
        for file, text in files.items():
            write(self._block / name / file, text)
        self._link(name, self._block / name)
        return name

    def description(self, name: str) -> str:
        found, text, _ = disks_of(os.makedev(0, 45), f"/dev/{name}", self.root)
        assert found == name
        return text

    def _link(self, name: str, path: Path) -> None:
        (self.root / "sys/class/block" / name).symlink_to(path)


def array(root: Path, level: str, count: int, **disk: Any) -> str:
    devices = BlockDevices(root)
    return devices.description(devices.device("md0", devices.disks(count, **disk), {"md/level": f"{level}\n"}))


def striped(root: Path, count: int, optimal: int) -> str:
    devices = BlockDevices(root)
    files = {"dm/name": "vg-scratch\n", "queue/optimal_io_size": f"{optimal}\n"}
    return devices.description(devices.device("dm-0", devices.disks(count), files))


def lvm_raid(root: Path, count: int, optimal: int) -> str:
    devices = BlockDevices(root)
    legs = [
        devices.device(f"dm-{number}", [part], {"dm/name": f"vg-scratch_rimage_{number}\n"})
        for number, part in enumerate(devices.disks(count))
    ]
    return devices.description(devices.device("dm-9", legs, {"queue/optimal_io_size": f"{optimal}\n"}))


def encrypted(root: Path, uuid: str, count: int) -> str:
    devices = BlockDevices(root)
    disks = devices.disks(count)
    below = disks if count == 1 else [devices.device("md0", disks, {"md/level": "raid0\n"})]
    return devices.description(devices.device("dm-0", below, {"dm/uuid": f"{uuid}\n"}))


def btrfs(root: Path, level: str, count: int) -> str:
    devices = BlockDevices(root)
    names = devices.disks(count)
    for name in names:
        link = root / "sys/fs/btrfs/c0ffee/devices" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((root / "sys/class/block" / name).resolve())
    write(root / f"sys/fs/btrfs/c0ffee/allocation/data/{level}/used_bytes", "0\n")
    write(root / "sys/fs/btrfs/c0ffee/allocation/data/flags", "1\n")
    return devices.description(names[0])


def controller(root: Path, level: str, **disk: Any) -> str:
    devices = BlockDevices(root)
    return devices.description(*devices.disks(1, model="LOGICAL VOLUME\n", raid_level=f"{level}\n", **disk))


SIZE = 7_501_476_528
DESCRIPTIONS: dict[str, Callable[[Path], str]] = {
    "SAMSUNG MZWLR3T8 3841 GB": lambda root: one_disk(root),
    "raid0 of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: array(root, "raid0", 2),
    "raid1 of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: array(root, "raid1", 2),
    "raid10 of 4x SAMSUNG MZWLR3T8 3841 GB": lambda root: array(root, "raid10", 4),
    "raid5 of 4x SAMSUNG MZWLR3T8 3841 GB": lambda root: array(root, "raid5", 4),
    "raid5 of 3x SAMSUNG MZWLR3T8 3841 GB": lambda root: array(root, "raid5", 3),
    "raid5 of 3x SAMSUNG MZWLR3T8 1920 GB": lambda root: array(root, "raid5", 3, size=SIZE // 2),
    "volume with stripes of 131072 B of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: striped(root, 2, 131072),
    "volume of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: striped(root, 2, 0),
    "RAID of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: lvm_raid(root, 2, 0),
    "RAID with stripes of 131072 B of 4x SAMSUNG MZWLR3T8 3841 GB": lambda root: lvm_raid(root, 4, 131072),
    "RAID with stripes of 196608 B of 4x SAMSUNG MZWLR3T8 3841 GB": lambda root: lvm_raid(root, 4, 196608),
    "btrfs raid0 of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: btrfs(root, "raid0", 2),
    "btrfs raid1 of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: btrfs(root, "raid1", 2),
    "LUKS2 of SAMSUNG MZWLR3T8 3841 GB": lambda root: encrypted(root, "CRYPT-LUKS2-5f0c8e1ad0f34b6f-scratch", 1),
    "PLAIN of SAMSUNG MZWLR3T8 3841 GB": lambda root: encrypted(root, "CRYPT-PLAIN-scratch", 1),
    "LUKS2 over raid0 of 2x SAMSUNG MZWLR3T8 3841 GB": lambda root: encrypted(root, "CRYPT-LUKS2-5f0c8e1a-scratch", 2),
    "RAID 5 of LOGICAL VOLUME 3841 GB": lambda root: controller(root, "RAID 5"),
    "RAID 1(+0) of LOGICAL VOLUME 3841 GB": lambda root: controller(root, "RAID 1(+0)"),
    "LOGICAL VOLUME 3841 GB": lambda root: controller(root, "N/A"),
    "": lambda root: array(root, "raid0", 2, model=""),
}
"""Description of the disks -> a function that builds them in a directory, and returns what `disks_of` found."""


def one_disk(root: Path) -> str:
    devices = BlockDevices(root)
    return devices.description(*devices.disks(1))


@pytest.mark.parametrize("expected", DESCRIPTIONS)
def test_different_arrays_and_encrypted_disks_have_different_descriptions(tmp_path: Path, expected: str) -> None:
    assert DESCRIPTIONS[expected](tmp_path) == expected


def test_disks_of_an_array_are_found_by_its_device_number(tmp_path: Path) -> None:
    array(tmp_path, "raid0", 2)
    link = tmp_path / "sys/dev/block/9:0"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "sys/devices/block/md0")
    assert disks_of(os.makedev(9, 0), "", tmp_path) == (
        "md0", "raid0 of 2x SAMSUNG MZWLR3T8 3841 GB", ["nvme0n1", "nvme1n1"]
    )  # fmt: skip
    assert disks_of(os.makedev(0, 45), "10.0.0.1:/export", tmp_path) == ("", "", [])
