"""A lost member of redundant storage is named if /proc/mdstat, /sys or the device mapper reports the loss."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from collectors.base import Absent, Value, scope
from collectors.files import Files
from collectors.storage import StorageCollector, mapper, redundancy
from tests.fakes import links

Readings = dict[str, Value | Absent]
MD = "sys/block/md0/md"


def readings(root: Path) -> Readings:
    """Return `NAME SCOPE` (such as `storage.array.works array=md0`) -> value of the reading."""
    (root / "sys/block").mkdir(parents=True, exist_ok=True)
    files = Files(root, cached=True)
    parts = (redundancy.arrays, redundancy.pools, redundancy.paths)
    families = [family for part in parts for family in part(files)]
    return {f"{family.name} {scope(labels)}": value for family in families for labels, value in family.readings}


def write(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        links.write(root, path, text)
    return root


def lost(observed: Readings) -> set[str]:
    """Return the scopes, such as `array=md0,member=sdb1`, of readings that are False, and of pools that are not ONLINE."""
    return {
        key.split()[1]
        for key, value in observed.items()
        if value is False or (key.startswith("storage.pool") and value != "ONLINE")
    }


def mdstat(head: str, body: str) -> str:
    """Return the text of /proc/mdstat with one array, md0. `head` follows `md0 :`, and `body` follows the number of blocks."""
    personalities = "Personalities : [raid1] [raid6] [raid5] [raid4] [raid10] [raid0]"
    return f"{personalities}\nmd0 : {head}\n      937160704 {body}\n      \nunused devices: <none>\n"


HEALTHY_MDSTAT = {
    "raid1": ("active raid1 sdb1[1] sda1[0]", "blocks super 1.2 [2/2] [UU]\n      bitmap: 4/7 pages [16KB], 65536KB chunk"),
    "read-only until the first write": ("active (auto-read-only) raid1 sdb1[1] sda1[0]",
                                        "blocks super 1.2 [2/2] [UU]\n        resync=PENDING"),
    "read-only": ("active (read-only) raid1 sdb1[1] sda1[0]", "blocks super 1.2 [2/2] [UU]"),
    "with a spare": ("active raid1 sdc1[2](S) sdb1[1] sda1[0]", "blocks super 1.2 [2/2] [UU]"),
    "write-mostly": ("active raid1 sdb1[1](W) sda1[0]", "blocks super 1.2 [2/2] [UU]"),
    "being checked": ("active raid5 sdc1[3] sdb1[1] sda1[0]",
                      "blocks super 1.2 level 5, 512k chunk, algorithm 2 [3/3] [UUU]\n      [==>..]  check = 12.6% (1/8)"),
    "raid0": ("active raid0 sdb1[1] sda1[0]", "blocks super 1.2 512k chunks"),
    "container of a firmware raid": ("inactive sdb[1](S) sda[0](S)", "blocks super external:imsm"),
}  # fmt: skip
LOST_MDSTAT = {
    "raid1, second member failed": ("active raid1 sdb1[1](F) sda1[0]", "blocks super 1.2 [2/1] [U_]", 1, {"sdb1"}),
    "raid1, first member failed": ("active raid1 sdb1[1] sda1[0](F)", "blocks super 1.2 [2/1] [_U]", 1, {"sda1"}),
    "raid1, second member removed": ("active raid1 sda1[0]", "blocks super 1.2 [2/1] [U_]", 1, {"slot1"}),
    "raid1, first member removed": ("active raid1 sdb1[1]", "blocks super 1.2 [2/1] [_U]", 1, {"slot0"}),
    "raid1, being rebuilt": ("active raid1 sdc1[2] sda1[0]", "blocks super 1.2 [2/1] [U_]\n      [=>..]  recovery =  7.4% (1/9)",
                             1, set()),
    "raid6, one member removed and another being rebuilt": (
        "active raid6 sde1[4] sdb1[1] sda1[0]", "blocks super 1.2 level 6, 512k chunk, algorithm 2 [4/2] [UU__]", 2, {"empty1"}),
    "raid1, member removed, another being replaced": (
        "active raid1 sdd1[3](R) sdb1[1] sda1[0]", "blocks super 1.2 [3/2] [UU_]", 1, {"slot2"}),
    "raid1, member removed, read-only until the first write": (
        "active (auto-read-only) raid1 sda1[0]", "blocks super 1.2 [2/1] [U_]", 1, {"slot1"}),
    "raid5, member failed": ("active raid5 sdc1[3] sdb1[1](F) sda1[0]",
                             "blocks super 1.2 level 5, 512k chunk, algorithm 2 [3/2] [U_U]", 1, {"sdb1"}),
    "raid6, one member removed and another failed": (
        "active raid6 sdd1[3](F) sdb1[1] sda1[0]", "blocks super 1.2 level 6, 512k chunk, algorithm 2 [4/2] [UU__]", 2,
        {"sdd1", "empty1"}),
    "raid10, one member removed and another failed": (
        "active raid10 sdd1[3] sdc1[2](F) sdb1[1]", "blocks super 1.2 512K chunks 2 near-copies [4/2] [_U_U]", 2,
        {"sdc1", "empty1"}),
    "raid1, member removed, with a spare": ("active raid1 sdc1[2](S) sda1[0]", "blocks super 1.2 [2/1] [U_]", 1, {"slot1"}),
    "inactive volume of a firmware raid": (
        "inactive raid1 sdb[1] sda[0]", "blocks super external:/md127/0", None, {"array=md0"}),
    "inactive read-only volume of a firmware raid": (
        "inactive raid1 sdb[1] sda[0]", "blocks super external:-md127/0", None, {"array=md0"}),
    "raid10, member failed": ("active raid10 sdd1[3] sdc1[2](F) sdb1[1] sda1[0]",
                              "blocks super 1.2 512K chunks 2 near-copies [4/3] [UU_U]", 1, {"sdc1"}),
    "raid0, broken": ("broken raid0 sda1[0]", "blocks super 1.2 512k chunks", None, {"array=md0"}),
    "inactive array of unknown level": ("inactive sdb1[1](S) sda1[0](S)", "blocks super 1.2", None, {"array=md0"}),
}  # fmt: skip
"""Case -> head and body for `mdstat`, number of missing members (None: not checked), and members that are reported as lost.

`slot1` is the empty slot 1 (slots count from 0). `empty1` is one empty slot of unknown number: the 1 is only a count. The number
is unknown because a failed or rebuilding member has one of the slots that seem empty. `array=md0` is the whole array. A member
that is being rebuilt is unknown, not lost.
"""


@pytest.mark.parametrize(("head", "body"), HEALTHY_MDSTAT.values(), ids=HEALTHY_MDSTAT)
def test_healthy_array_in_mdstat_has_no_lost_member(tmp_path: Path, head: str, body: str) -> None:
    observed = readings(write(tmp_path, {"proc/mdstat": mdstat(head, body)}))
    assert lost(observed) == set()
    assert observed["storage.array.works array=md0"] is True
    # For RAID 0 and containers, /proc/mdstat has no counts such as [2/2]. The collector then looks in /sys, which is empty here.
    assert observed["storage.array.missing array=md0"] in (0, Absent.error(f"/{MD}/degraded: /sys is not mounted"))


@pytest.mark.parametrize(("head", "body", "missing", "names"), LOST_MDSTAT.values(), ids=LOST_MDSTAT)
def test_lost_member_in_mdstat_is_named(
    tmp_path: Path, head: str, body: str, missing: int | None, names: set[str]
) -> None:
    observed = readings(write(tmp_path, {"proc/mdstat": mdstat(head, body)}))
    assert lost(observed) == {name if "=" in name else f"array=md0,member={name}" for name in names}
    if missing is not None:
        assert observed["storage.array.missing array=md0"] == missing


def test_member_that_is_being_rebuilt_is_unknown_in_mdstat_and_not_in_sync_in_sysfs(tmp_path: Path) -> None:
    head, body, *_ = LOST_MDSTAT["raid1, being rebuilt"]
    files = {"proc/mdstat": mdstat(head, body)}
    observed = readings(write(tmp_path / "mdstat", files))
    names = [f"storage.array.member_in_sync array=md0,member={name}" for name in ("sda1", "sdc1")]
    unknown = Absent.error("members are being rebuilt, and /proc/mdstat does not show which ones")
    assert {name: value for name, value in observed.items() if "member" in name} == dict.fromkeys(names, unknown)
    files |= array("raid1", {"sda1": "in_sync 0", "sdc1": "spare 1"}, slots=2, degraded=1)
    assert lost(readings(write(tmp_path / "sysfs", files))) == {"array=md0,member=sdc1"}


def array(
    level: str, members: Mapping[str, str], *, slots: int, degraded: int | None = 0, state: str = "clean"
) -> dict[str, str]:
    """Return the files in /sys that describe the array md0: path -> content.

    Args:
        level: RAID level
        members: disk -> `STATE SLOT`
        slots: number of slots (`raid_disks`)
        degraded: number of missing members; None: the file `degraded` does not exist, as with RAID 0
        state: state of the array (`array_state`)
    """
    files = {
        f"{MD}/array_state": state,
        f"{MD}/level": level,
        f"{MD}/raid_disks": str(slots),
        f"{MD}/metadata_version": "1.2",
    }
    if degraded is not None:
        files[f"{MD}/degraded"] = str(degraded)
    for name, words in members.items():
        flags, slot = words.split()
        files |= {f"{MD}/dev-{name}/state": flags, f"{MD}/dev-{name}/slot": slot}
    return files


TWO_IN_SYNC = {"sda1": "in_sync 0", "sdb1": "in_sync 1"}
HEALTHY_SYSFS = {
    **{f"state {state}": array("raid1", TWO_IN_SYNC, slots=2, state=state)
       for state in ("clean", "active", "active-idle", "write-pending", "read-auto", "readonly")},
    "with a spare": array("raid1", TWO_IN_SYNC | {"sdc1": "spare none"}, slots=2),
    "write-mostly": array("raid1", TWO_IN_SYNC | {"sdb1": "in_sync,write_mostly 1"}, slots=2),
    "with a journal": array("raid5", TWO_IN_SYNC | {"sdc1": "in_sync 2", "sdj1": "journal none"}, slots=3),
    "being reshaped": {**array("raid5", TWO_IN_SYNC | {"sdc1": "in_sync 2"}, slots=3), f"{MD}/raid_disks": "3 (2)"},
    "raid0": array("raid0", TWO_IN_SYNC, slots=2, degraded=None),
    "volume of a firmware raid": {**array("raid1", TWO_IN_SYNC, slots=2), f"{MD}/metadata_version": "external:/md127/0"},
    "container of a firmware raid": {**array("container", {"sda": "spare none"}, slots=0, degraded=None, state="inactive"),
                                     f"{MD}/metadata_version": "external:imsm"},
}  # fmt: skip
LOST_SYSFS = {
    "raid1, member failed": (array("raid1", {"sda1": "in_sync 0", "sdb1": "faulty none"}, slots=2, degraded=1), {"sdb1"}),
    "raid1, failed member still in its slot": (
        array("raid1", {"sda1": "in_sync 0", "sdb1": "faulty 1"}, slots=2, degraded=1), {"sdb1"}),
    "raid1, member removed": (array("raid1", {"sda1": "in_sync 0"}, slots=2, degraded=1), {"slot1"}),
    "raid1, being rebuilt": (array("raid1", {"sda1": "in_sync 0", "sdc1": "spare 1"}, slots=2, degraded=1), {"sdc1"}),
    "raid1, member failed, being rebuilt on another": (
        array("raid1", {"sda1": "in_sync 0", "sdb1": "faulty none", "sdc1": "spare 1"}, slots=2, degraded=1), {"sdb1", "sdc1"}),
    "raid6, one member removed and another failed": (
        array("raid6", {"sda1": "in_sync 0", "sdb1": "in_sync 1", "sdd1": "faulty none"}, slots=4, degraded=2),
        {"sdd1", "empty1"}),
    "raid10, one member removed, failed member still in its slot": (
        array("raid10", {"sdb1": "in_sync 1", "sdc1": "faulty 2", "sdd1": "in_sync 3"}, slots=4, degraded=2), {"sdc1", "slot0"}),
    "inactive volume of a firmware raid": (
        {**array("raid1", TWO_IN_SYNC, slots=2, state="inactive"), f"{MD}/metadata_version": "external:/md127/0"}, {"array=md0"}),
    "raid10, active-idle, member failed": (
        array("raid10", TWO_IN_SYNC | {"sdc1": "faulty none", "sdd1": "in_sync 3"}, slots=4, degraded=1, state="active-idle"),
        {"sdc1"}),
    "raid0, member failed": (array("raid0", {"sda1": "in_sync 0", "sdb1": "faulty 1"}, slots=2, degraded=None, state="broken"),
                             {"sdb1", "array=md0"}),
    "raid5, inactive": (array("raid5", {"sda1": "spare none"}, slots=0, degraded=None, state="inactive"), {"array=md0"}),
    "no file with the slot of a member": (
        {f"{MD}/array_state": "active-idle", f"{MD}/degraded": "1", f"{MD}/dev-nvme1n1p2/state": "faulty"}, {"nvme1n1p2"}),
}  # fmt: skip
"""Case -> files in /sys, and members that are reported as lost (names as in LOST_MDSTAT)."""


@pytest.mark.parametrize("files", HEALTHY_SYSFS.values(), ids=HEALTHY_SYSFS)
def test_healthy_array_in_sysfs_has_no_lost_member(tmp_path: Path, files: Mapping[str, str]) -> None:
    assert lost(readings(write(tmp_path, files))) == set()


@pytest.mark.parametrize(("files", "names"), LOST_SYSFS.values(), ids=LOST_SYSFS)
def test_lost_member_in_sysfs_is_named(tmp_path: Path, files: Mapping[str, str], names: set[str]) -> None:
    observed = readings(write(tmp_path, files))
    assert lost(observed) == {name if "=" in name else f"array=md0,member={name}" for name in names}
    if f"{MD}/degraded" in files:
        assert observed["storage.array.missing array=md0"] == int(files[f"{MD}/degraded"])


def test_loss_that_only_mdstat_reports_is_reported(tmp_path: Path) -> None:
    files = {
        "proc/mdstat": mdstat("active raid1 sdb1[1](F) sda1[0]", "blocks super 1.2 [2/1] [U_]"),
        f"{MD}/array_state": "clean",
    }
    observed = readings(write(tmp_path, files))
    assert (observed["storage.array.missing array=md0"], lost(observed)) == (1, {"array=md0,member=sdb1"})


@pytest.mark.parametrize(("missing", "members"), [("0", set()), ("1", {"array=c0ffee,member=device2"})])
def test_missing_btrfs_device_is_named(tmp_path: Path, missing: str, members: set[str]) -> None:
    files = {"sys/fs/btrfs/c0ffee/devinfo/1/missing": "0\n", "sys/fs/btrfs/c0ffee/devinfo/2/missing": f"{missing}\n"}
    assert lost(readings(write(tmp_path, files))) == members


@pytest.mark.parametrize("state", ["ONLINE", "DEGRADED", "FAULTED", "SUSPENDED", "UNAVAIL"])
def test_state_of_a_zfs_pool_is_reported(tmp_path: Path, state: str) -> None:
    observed = readings(write(tmp_path, {"proc/spl/kstat/zfs/tank/state": f"{state}\n"}))
    assert observed["storage.pool.state pool=tank"] == state


def nvme(states: Mapping[str, str]) -> dict[str, str]:
    """Return the files in /sys of the multipath disk `nvme-subsys3`. `states`: controller (a path to the disk) -> state."""
    files = {f"sys/class/nvme/{name}/state": state for name, state in states.items()}
    return files | {f"sys/block/nvme3c{name[4:]}n1/ana_state": "optimized" for name in states}


@pytest.mark.parametrize(
    ("states", "paths"),
    [
        ({"nvme3": "live", "nvme4": "live"}, set()),
        ({"nvme3": "live", "nvme4": "connecting"}, {"nvme4"}),
        ({"nvme3": "dead", "nvme4": "live"}, {"nvme3"}),
        ({"nvme3": "live", "nvme4": "live", "nvme5": "resetting"}, {"nvme5"}),
        ({"nvme3": "live"}, set()),
        # A volume without a working path is not reported, because it may be detached by design.
        ({"nvme3": "connecting", "nvme4": "connecting"}, set()),
        ({"nvme3": "live", "nvme4": "deleting"}, set()),
        ({"nvme3": "live", "nvme4": "deleting (no IO)"}, set()),
    ],
    ids=[
        "both live",
        "one connecting",
        "one dead",
        "one of three resetting",
        "single path",
        "both connecting",
        "one being deleted",
        "one being deleted without I/O",
    ],
)
def test_lost_nvme_path_is_named(tmp_path: Path, states: Mapping[str, str], paths: set[str]) -> None:
    assert lost(readings(write(tmp_path, nvme(states)))) == {f"disk=nvme-subsys3,path={path}" for path in paths}


def test_path_whose_state_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """If the path were left out, the disk would look like one with a single path, which has no redundancy to lose."""
    files = nvme({"nvme3": "live"}) | {"sys/block/nvme3c4n1/ana_state": "optimized"}
    files |= {"sys/block/dm-0/dm/uuid": "mpath-3600508b400105e21", "sys/block/dm-0/dm/name": "mpatha"}
    files |= {f"sys/block/dm-0/slaves/{disk}/x": "" for disk in ("sdb", "sdc")} | {
        "sys/block/sdb/device/state": "running"
    }
    root = write(tmp_path, files)
    for path in ("sys/class/nvme/nvme4/state", "sys/block/sdc/device/state"):
        (root / path).mkdir(parents=True)  # in place of a file, so that reading fails
    observed = readings(root)
    for disk, works, fails in (("nvme-subsys3", "nvme3", "nvme4"), ("mpatha", "sdb", "sdc")):
        assert observed[f"storage.path.live disk={disk},path={works}"] is True
        value = observed[f"storage.path.live disk={disk},path={fails}"]
        assert isinstance(value, Absent)
        assert value.status == "error"


def test_lost_path_in_a_subsystem_directory_is_named(tmp_path: Path) -> None:
    files = {f"sys/class/nvme/nvme{number}/state": state for number, state in ((0, "live"), (1, "dead"))}
    files |= {f"sys/class/nvme-subsystem/nvme-subsys0/nvme{number}/x": "" for number in (0, 1)}
    files["sys/class/nvme-subsystem/nvme-subsys0/nvme0n1/size"] = "1"
    assert lost(readings(write(tmp_path, files))) == {"disk=nvme-subsys0,path=nvme1"}


@pytest.mark.parametrize("state", ["running", "offline", "transport-offline", "blocked", "quiesce"])
def test_lost_path_of_the_device_mapper_is_named(tmp_path: Path, state: str) -> None:
    files = {"sys/block/dm-0/dm/uuid": "mpath-3600508b400105e21", "sys/block/dm-0/dm/name": "mpatha"}
    files |= {
        "sys/block/dm-1/dm/uuid": "LVM-abc",  # not multipath, so its disk sdz is not a path
        "sys/block/dm-1/slaves/sdz/x": "",
        "sys/block/sdz/device/state": "offline",
    }
    for disk, path_state in (("sdb", "running"), ("sdc", state)):
        files |= {f"sys/block/dm-0/slaves/{disk}/x": "", f"sys/block/{disk}/device/state": path_state}
    assert lost(readings(write(tmp_path, files))) == (set() if state == "running" else {"disk=mpatha,path=sdc"})


# ---- the device mapper ----

MEMBERS = {
    "raid1": ("raid", "raid1 2 AA 4423680/4423680 idle 0 0 -", set()),
    "raid1, second leg dead": ("raid", "raid1 2 AD 4423680/4423680 idle 0 0 -", {"leg1"}),
    "raid1, first leg dead": ("raid", "raid1 2 DA 4423680/4423680 idle 0 0 -", {"leg0"}),
    "raid1, device of the second leg missing": ("raid", "raid1 2 A- 4423680/4423680 idle 0 0 -", {"leg1"}),
    "raid1, second leg being rebuilt": ("raid", "raid1 2 Aa 33792/65536 recover 0 0 -", {"leg1"}),
    "raid1, first synchronization": ("raid", "raid1 2 aa 21120/65536 resync 0 0 -", set()),
    "raid5": ("raid", "raid5_ls 3 AAA 65536/65536 idle 0 0 -", set()),
    "raid6, two legs dead": ("raid", "raid6_zr 5 AADAD 65536/65536 idle 0 0 -", {"leg2", "leg4"}),
    "mirror": ("mirror", "2 253:1 253:2 400/400 1 AA 3 disk 253:0 A", set()),
    "mirror, second leg dead": ("mirror", "2 253:1 253:2 400/400 1 AD 3 disk 253:0 A", {"leg1"}),
    "mirror, flush of the second leg failed": ("mirror", "2 253:1 253:2 400/400 1 AF 1 core", {"leg1"}),
    "multipath": (
        "multipath",
        "2 0 0 0 2 1 A 0 2 0 8:48 A 0 8:128 A 0 E 0 4 0 8:0 A 0 8:64 A 0 8:192 A 0 8:208 A 0 ",
        set(),
    ),
    "multipath, one path failed": (
        "multipath",
        "2 0 1 0 3 2 E 0 1 1 67:16 F 4 0 E 0 1 1 65:240 A 84 0 E 0 1 1 66:64 A 39 0",
        {"67:16"},
    ),
    "linear, has no members": ("linear", "", set()),
    "raid without a status": ("raid", "", set()),
}
"""Case -> type and status line of a device-mapper device, and its members that do not work.

The members are paths, or legs: a leg holds one copy or stripe of an LVM RAID or mirror. During a `resync`, such as the first
synchronization, a leg that is not yet in sync (`a`) counts as working.
"""


@pytest.mark.parametrize(("kind", "status", "expected"), MEMBERS.values(), ids=MEMBERS)
def test_status_of_the_device_mapper_names_lost_members(kind: str, status: str, expected: set[str]) -> None:
    assert {member for member, works in mapper.parse_members(kind, status).items() if not works} == expected


def answer(*targets: tuple[str, str], flags: int = 0) -> bytes:
    """Return what the kernel answers to the ioctl DM_TABLE_STATUS: struct dm_ioctl, then the targets.

    A target is a segment of a device-mapper device. `targets` has the type and the status line of each.
    """
    body = b""
    for kind, status in targets:
        text = status.encode() + b"\0"
        text += b"\0" * (-len(text) % 8)
        body += struct.pack("=QQiI16s", 0, 8, 0, len(body) + 40 + len(text), kind.encode()) + text
    sizes = (312 + len(body), 312, len(targets), 1, flags, 0, 0, 0xFD00)
    return struct.pack("=3I3Ii3IQ128s129s7s", 4, 48, 0, *sizes, b"vg-lv", b"LVM-abc", b"") + body


def test_answer_of_the_device_mapper_is_parsed_if_it_is_complete() -> None:
    targets = [("raid", "raid1 2 AD 8/8 idle 0 0 -"), ("linear", "")]
    assert mapper.parse_targets(answer(*targets)) == targets
    with pytest.raises(OSError, match="longer"):
        mapper.parse_targets(answer(flags=0x100))  # DM_BUFFER_FULL_FLAG


def test_full_snapshot_names_lost_member_of_lvm_raid_and_lost_path(tmp_path: Path) -> None:
    files = {
        "sys/block/dm-0/dm/name": "too-long",
        "sys/block/dm-1/dm/uuid": "mpath-36",
        "sys/block/dm-1/dm/name": "mpatha",
        "sys/block/dm-2/dm/name": "vg-lv",
    }
    for disk, number in (("sdb", "8:16"), ("sdc", "8:32")):
        files |= {f"sys/block/dm-1/slaves/{disk}/x": "", f"sys/block/{disk}/device/state": "running"}
        links.write(tmp_path, f"sys/block/{disk}/dev", number)
        (tmp_path / "sys/dev/block").mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/dev/block" / number).symlink_to(f"../../block/{disk}")
    control = tmp_path / "dev/mapper/control"
    answers = {
        (control, "too-long"): answer(flags=0x100),  # DM_BUFFER_FULL_FLAG
        (control, "mpatha"): answer(("multipath", "2 0 0 0 1 1 A 0 2 0 8:16 A 0 8:32 F 1")),
        (control, "vg-lv"): answer(("raid", "raid1 2 AD 8/8 idle 0 0 -")),
    }
    collector = StorageCollector(
        write(tmp_path, files),
        full_snapshot=True,
        read_targets=lambda control, name: mapper.parse_targets(answers[control, name]),
    )
    families = [family for family in collector.collect() if family.name.startswith(("storage.array", "storage.path"))]
    observed = {f"{family.name} {scope(labels)}": value for family in families for labels, value in family.readings}
    assert lost(observed) == {"disk=mpatha,path=sdc", "array=vg-lv,member=leg1"}


@pytest.mark.parametrize("kind", ["rimage", "mimage"])
def test_legs_of_lvm_raid_and_mirrors_are_unknown_without_permission(tmp_path: Path, kind: str) -> None:
    names = ("vg-root", f"vg-data_{kind}_0", f"vg-data_{kind}_1", "vg-data_rmeta_0", "vg-data")
    files = {f"sys/block/dm-{number}/dm/name": name for number, name in enumerate(names)}

    def refuse(control: Path, name: str) -> mapper.Targets:
        raise PermissionError(13, "Permission denied")

    collector = StorageCollector(write(tmp_path, files), full_snapshot=True, read_targets=refuse)
    legs = next(family for family in collector.collect() if family.name == "storage.array.member_in_sync").readings
    expected = Absent.error("/dev/mapper/control: Permission denied")
    assert {scope(labels): value for labels, value in legs} == {
        "array=vg-data,member=leg0": expected,
        "array=vg-data,member=leg1": expected,
    }


def test_host_without_redundancy_has_no_array(tmp_path: Path) -> None:
    (tmp_path / "sys/devices").mkdir(parents=True)
    assert readings(tmp_path) == {"storage.array.missing host": Absent.unsupported("no disk array")}
