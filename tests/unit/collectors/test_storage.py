"""The storage collector reads disks, arrays, file systems and NVMe health logs from a tree of /proc and /sys."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from collectors.base import Absent, Value, scope
from collectors.storage import StorageCollector
from collectors.storage.mounts import local_mounts, parse_mounts
from collectors.storage.nvme import UnsupportedLogError, health_families, parse_log, read_smart_log
from tests.fakes import host

Readings = dict[str, Value | Absent]
NVME = "storage.nvme."


def log(**fields: int) -> bytes:
    """Return the health log of a Samsung PM9A3 after a year of use. `fields` replace its values.

    Without `fields`, its values are, among others: 35 °C (308 K), 3 % of the endurance used, 12 unsafe shutdowns.
    """
    page = bytearray(512)
    # Field -> its first byte, its number of bytes, its value.
    values = {"warning": (0, 1, 0), "temperature": (1, 2, 308), "spare": (3, 1, 100), "threshold": (4, 1, 10),
              "used": (5, 1, 3), "read": (32, 16, 81_203_441), "written": (48, 16, 63_000_000), "cycles": (112, 16, 40),
              "hours": (128, 16, 8760), "shutdowns": (144, 16, 12), "media": (160, 16, 0), "entries": (176, 16, 5)}  # fmt: skip
    for name, (first, count, value) in values.items():
        page[first : first + count] = fields.get(name, value).to_bytes(count, "little")
    return bytes(page)


def space(path: Path) -> os.statvfs_result:
    """Return what statvfs reports: 100 blocks of 4 KiB (40 free, 30 available to users) and 10 inodes (6 free, 5 available)."""
    observed = SimpleNamespace(
        f_frsize=4096, f_bsize=1 << 20, f_blocks=100, f_bfree=40, f_bavail=30, f_files=10, f_ffree=6, f_favail=5
    )
    return cast("os.statvfs_result", observed)


def readings(
    root: Path,
    *,
    read_log: Callable[[Path], bytes] = lambda _: log(),
    statvfs: Callable[[Path], os.statvfs_result] = space,
) -> Readings:
    """Return `NAME SCOPE` (such as `storage.disk.online disk=nvme0n1`) -> value of the reading."""
    collector = StorageCollector(root, full_snapshot=True, read_log=read_log, statvfs=statvfs)
    return {
        f"{family.name} {scope(labels)}": value for family in collector.collect() for labels, value in family.readings
    }


def changed(before: Readings, after: Readings) -> Readings:
    """Return the readings in `after` that are missing in `before` or have another value there."""
    return {name: value for name, value in after.items() if before.get(name) != value}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Readings:
    return readings(host.build_tree(tmp_path_factory.mktemp("host")))


def test_healthy_host_reports_all_readings(healthy: Readings) -> None:
    host_readings = {name: value for name, value in healthy.items() if "disk=" not in name}
    assert host_readings == {
        "storage.disk.count host": 2,
        "storage.array.missing array=md0": 0,
        "storage.array.works array=md0": True,
        "storage.state.read_only host": False,
        "storage.mount.size mount=_": 409600,
        "storage.mount.size mount=_scratch_data": 409600,
        "storage.mount.available mount=_": 122880,
        "storage.mount.available mount=_scratch_data": 122880,
        "storage.mount.inodes_available mount=_": 5,
        "storage.mount.inodes_available mount=_scratch_data": 5,
        "storage.mount.read_only mount=_": False,
        "storage.mount.read_only mount=_scratch_data": False,
        "storage.mount.errors mount=_": 0,
        "storage.mount.errors mount=_scratch_data": Absent(status="unsupported", reason="xfs has no error count"),
    }
    assert {name.removesuffix(" disk=nvme0n1"): value for name, value in healthy.items() if name.endswith("nvme0n1")} == {
        "storage.disk.online": True,
        "storage.disk.io_errors": Absent(status="unsupported", reason="no /sys/block/nvme0n1/device/ioerr_cnt"),
        "storage.disk.size": 1920383410176,
        "storage.disk.rotational": False,
        "storage.disk.model": "SAMSUNG MZQL21T9HCJR-00A07",
        "storage.disk.serial": "S64GNE0T500000",
        "storage.disk.firmware": "GDC5602Q",
        "storage.disk.pci_address": "0000:80:00.0",
        "storage.nvme.critical_warning": 0,
        "storage.nvme.temperature": 35,
        "storage.nvme.spare": 1.0,
        "storage.nvme.spare_threshold": 0.1,
        "storage.nvme.endurance_used": 0.03,
        "storage.nvme.data_written": 32_256_000_000_000,
        "storage.nvme.power_on_time": 31_536_000,
        "storage.nvme.unsafe_shutdowns": 12,
        "storage.nvme.media_errors": 0,
    }  # fmt: skip


def test_scrape_reads_no_health_log(tmp_path: Path) -> None:
    def fail(path: Path) -> bytes:
        raise AssertionError(path)

    names = {
        family.name for family in StorageCollector(host.build_tree(tmp_path), read_log=fail, statvfs=space).collect()
    }
    assert not [name for name in names if name.startswith(NVME)]
    assert {"storage.disk.online", "storage.array.missing", "storage.mount.errors", "storage.state.read_only"} < names


@pytest.mark.parametrize(
    ("files", "change"),
    [
        ({"sys/block/nvme1n1/device/state": "dead\n"}, {"storage.disk.online disk=nvme1n1": False}),
        ({"sys/block/md0/md/degraded": "1\n"}, {"storage.array.missing array=md0": 1}),
        ({"sys/fs/ext4/md0/errors_count": "4\n"}, {"storage.mount.errors mount=_": 4}),
        ({"proc/self/mountinfo": host.FILES["proc/self/mountinfo"].replace("ext4 /dev/md0 rw", "ext4 /dev/md0 ro")},
         {"storage.mount.read_only mount=_": True, "storage.state.read_only host": True}),
        ({"sys/block/nvme2n1/device/transport": "tcp\n"}, {}),
        ({"sys/block/nvme0c1n1/device/state": "live\n"}, {}),
    ],
    ids=["dead disk", "degraded array", "file system errors", "read-only root", "added network disk", "added path to a disk"],
)  # fmt: skip
def test_changed_file_affects_only_its_readings(
    tmp_path: Path, healthy: Readings, files: Mapping[str, str], change: Readings
) -> None:
    assert changed(healthy, readings(host.build_tree(tmp_path, files=files))) == change


CONTROLLER = "sys/class/nvme/nvme5"
SCSI_DEVICE = "pci0000:00/0000:00:10.0/host2/target2:0:1/2:0:1:0"
SUBSYSTEM = "sys/class/nvme-subsystem/nvme-subsys5"
VOLUMES = (
    "Amazon Elastic Block Store              ",
    "Alibaba Cloud Elastic Block Storage     ",
    "MSFT NVMe Accelerator v1.0",
    "nvme_card-pd",
    "Mellanox BlueField NVMe SNAP Controller",
    "BlueField NVMe SNAP Controller",
    "NVIDIA NVMe SNAP Controller",
    "QEMU NVMe Ctrl                          ",
    "VMware Virtual NVMe Disk                ",
    "ORCL-VBOX-NVME-VER12                    ",
)
"""Models of volumes. Sources: kubernetes-sigs/alibaba-cloud-csi-driver, the default model of NVIDIA's SNAP 3 and examples of its
documentation, QEMU's hw/nvme/ctrl.c, logs of virtual machines."""
SCSI = {
    "VMware PVSCSI": ("VMware  ", "Virtual disk    "),
    "VMware SATA": ("ATA     ", "VMware Virtual S"),
    "QEMU SCSI": ("QEMU    ", "QEMU HARDDISK   "),
    "QEMU SATA": ("ATA     ", "QEMU HARDDISK   "),
    "VirtualBox SCSI": ("VBOX    ", "HARDDISK        "),
    "VirtualBox SATA": ("ATA     ", "VBOX HARDDISK   "),
    "Nutanix": ("NUTANIX ", "VDISK           "),
    "Hyper-V": ("Msft    ", "Virtual Disk    "),
}
"""Hypervisor and bus -> vendor and model of its emulated disks, padded as in /sys."""
DRIVE = {f"{CONTROLLER}/transport": "pcie\n", f"{CONTROLLER}/state": "live\n", f"{CONTROLLER}/model": "INTEL P4608\n"}


@pytest.mark.parametrize(
    ("files", "namespaces"),
    [
        # The kernel refused the namespace of the drive because of a duplicate ID: AlmaLinux/almalinux-deploy issue 199.
        (DRIVE, 0),
        (DRIVE | {f"{CONTROLLER}/state": "dead\n"}, 0),
        (DRIVE | {f"{CONTROLLER}/nvme5n1/nsid": "1\n", f"{CONTROLLER}/nvme5n2/nsid": "2\n"}, 2),
        (DRIVE | {f"{CONTROLLER}/nvme5c5n1/nsid": "1\n"}, 1),
        (DRIVE | {f"{CONTROLLER}/ng5n1/dev": "1\n", f"{CONTROLLER}/hwmon5/name": "nvme\n"}, 0),
        (DRIVE | {f"{SUBSYSTEM}/nvme5/x": "", f"{SUBSYSTEM}/nvme5n1/x": ""}, 1),
        (DRIVE | {f"{CONTROLLER}/transport": "tcp\n"}, None),
        (DRIVE | {f"{CONTROLLER}/state": "deleting\n"}, None),
        (DRIVE | {f"{CONTROLLER}/cntrltype": "admin\n"}, None),
        *((DRIVE | {f"{CONTROLLER}/model": f"{model}\n"}, None) for model in VOLUMES),
    ],
    ids=[
        "no namespace",
        "dead controller",
        "two namespaces",
        "namespace with one path",
        "only devices that are not namespaces",
        "namespace in the subsystem",
        "NVMe over TCP",
        "controller being removed",
        "administrative controller",
        *VOLUMES,
    ],
)
def test_namespaces_of_each_built_in_controller_are_counted(
    tmp_path: Path, healthy: Readings, files: Mapping[str, str], namespaces: int | None
) -> None:
    # None: the controller has no reading.
    expected = {} if namespaces is None else {"storage.controller.namespaces disk=nvme5": namespaces}
    assert {name: healthy[f"storage.controller.namespaces disk={name}"] for name in ("nvme0", "nvme1")} == {
        "nvme0": 1,
        "nvme1": 1,
    }
    assert changed(healthy, readings(host.build_tree(tmp_path, files=files))) == expected


@pytest.mark.parametrize(
    ("device", "files"),
    [
        ("pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block/sdx", {}),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/host0/port-0:0/end_device-0:0/target0:0:0/0:0:0:0/block/sdx", {}),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme7/nvmexn1", {"model": "Amazon EC2 NVMe Instance Storage"}),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme7/nvmexn1", {"model": "nvme_card", "transport": "pcie"}),
        ("LNXSYSTM:00/LNXSYBUS:00/pci/nvme/nvme7/nvmexn1", {"model": "Microsoft NVMe Direct Disk v2           "}),
        ("virtual/nvme-subsystem/nvme-subsys7/nvmexn1", {"nvme7/transport": "pcie"}),
        (f"{SCSI_DEVICE}/block/sdx", {"vendor": "ATA     ", "model": "SAMSUNG MZ7L3480"}),
        (f"{SCSI_DEVICE}/block/sdx", {"vendor": "SEAGATE ", "model": "ST12000NM002G   "}),
        ("pci0000:00/0000:00:01.0/0000:01:00.0/nvme/nvme7/nvmexn1", {"model": "SAMSUNG MZWLR3T8HBLS-00007"}),
    ],
    ids=[
        "SATA",
        "SAS",
        "local SSD of AWS",
        "local SSD of Google Cloud",
        "local SSD of Azure",
        "NVMe with native multipath",
        "SATA disk that is passed through to a virtual machine",
        "SAS disk that is passed through to a virtual machine",
        "NVMe disk that is passed through to a virtual machine",
    ],
)
def test_built_in_disk_is_counted(tmp_path: Path, healthy: Readings, device: str, files: Mapping[str, str]) -> None:
    observed = readings(with_disk(tmp_path, device, files))
    assert observed["storage.disk.count host"] == healthy["storage.disk.count host"] + 1


@pytest.mark.parametrize(
    ("device", "files"),
    [
        ("virtual/nvme-subsystem/nvme-subsys7/nvmexn1", {"nvme7/transport": "tcp", "nvme8/transport": "tcp"}),
        ("virtual/nvme-fabrics/ctl/nvme7/nvmexn1", {}),
        ("virtual/nvme-subsystem/nvme-subsys7/nvmexn1", {"nvme7/transport": "fc"}),
        ("platform/host3/session1/target3:0:0/3:0:0:1/block/sdx", {}),
        ("pci0000:00/0000:00:03.0/host4/session2/target4:0:0/4:0:0:0/block/sdx", {}),
        ("pci0000:00/0000:00:03.0/host5/rport-5:0-2/target5:0:0/5:0:0:7/block/sdx", {}),
        ("pci0000:00/0000:00:14.0/usb2/2-1/2-1:1.0/host6/target6:0:0/6:0:0:0/block/sdx", {}),
        *(("pci0000:00/0000:00:04.0/nvme/nvme7/nvmexn1", {"model": model}) for model in VOLUMES),
        *(
            ("virtual/nvme-subsystem/nvme-subsys7/nvmexn1", {"model": model, "nvme7/transport": "pcie"})
            for model in VOLUMES
        ),
        *((f"{SCSI_DEVICE}/block/sdx", {"vendor": vendor, "model": model}) for vendor, model in SCSI.values()),
        ("pci0000:00/0000:00:03.0/virtio0/host0/target0:0:1/0:0:1:0/block/sdx", {"model": "PersistentDisk"}),
        ("pci0000:00/0000:00:05.0/virtio2/block/vdx", {}),
        ("vbd-51712/block/xvdx", {}),
        ("LNXSYSTM:00/MSFT1000:00/f8b3781b-1e82/host1/target1:0:0/1:0:0:5/block/sdx", {}),
        (
            "LNXSYSTM:00/ACPI0004:00/VMBUS:00/f8b3781b-1e82/host1/target1:0:0/1:0:0:5/block/sdx",
            {"model": "Virtual Disk"},
        ),
    ],
    ids=[
        "NVMe over TCP with native multipath",
        "NVMe over TCP without multipath",
        "NVMe over Fibre Channel",
        "iSCSI by the kernel",
        "iSCSI by an adapter",
        "SCSI over Fibre Channel",
        "USB",
        *VOLUMES,
        *(f"{model}, with native multipath" for model in VOLUMES),
        *SCSI,
        "SCSI volume of Google Cloud",
        "virtio disk",
        "Xen disk",
        "Hyper-V disk",
        "Hyper-V disk with a model name",
    ],
)
def test_network_usb_or_virtual_disk_is_not_read(
    tmp_path: Path, healthy: Readings, device: str, files: Mapping[str, str]
) -> None:
    assert readings(with_disk(tmp_path, device, files)) == healthy


def with_disk(tmp_path: Path, device: str, files: Mapping[str, str]) -> Path:
    """Return the root of a healthy host that has one more disk.

    Args:
        tmp_path: the root
        device: path of the disk below /sys/devices; the function also creates the symbolic links that the kernel would create
        files: path below /sys/block/NAME/device -> content; NAME is the name of the disk. The file `state` has the content
            `live` by default
    """
    root = host.build_tree(tmp_path)
    disk = root / "sys/devices" / device
    parent = disk.parent if disk.parent.name != "block" else disk.parent.parent
    for name, text in {"state": "live", **files}.items():
        (parent / name).parent.mkdir(parents=True, exist_ok=True)
        (parent / name).write_text(f"{text}\n")
    disk.mkdir(parents=True)
    (disk / "removable").write_text("0\n")
    (disk / "device").symlink_to(os.path.relpath(parent, disk))
    (root / "sys/block" / disk.name).symlink_to(os.path.relpath(disk, root / "sys/block"))
    return root


@pytest.mark.parametrize("options", ["ro - overlay overlay rw", "ro - overlay overlay ro", "rw - overlay overlay ro"])
def test_state_of_var_is_unsupported_in_a_container_with_a_read_only_root(tmp_path: Path, options: str) -> None:
    """`storage.state.read_only` is whether /var is read-only. Here /var is on the root file system.

    The pods of Rackproof's DaemonSet have a read-only root file system by design (`readOnlyRootFilesystem`).
    """
    files = {"proc/self/mountinfo": f"1 0 0:50 / / {options}\n2 1 259:2 /tmp /tmp rw - xfs /dev/nvme0n1p2 rw\n"}
    state = readings(host.build_tree(tmp_path / "pod", files=files))["storage.state.read_only host"]
    assert isinstance(state, Absent)
    assert state.status == "unsupported"
    writable = {"proc/self/mountinfo": "1 0 0:50 / / rw - overlay overlay rw\n"}
    assert readings(host.build_tree(tmp_path / "host", files=writable))["storage.state.read_only host"] is False


def test_missing_disk_is_not_counted(tmp_path: Path) -> None:
    root = host.build_tree(tmp_path)
    shutil.rmtree(root / "sys/block/nvme1n1")
    assert readings(root)["storage.disk.count host"] == 1


def test_sata_disk_has_state_errors_firmware_and_rotation(tmp_path: Path) -> None:
    disk = "sys/block/sdb"
    files = {
        f"{disk}/device/state": "running",
        f"{disk}/device/ioerr_cnt": "0x1f",
        f"{disk}/device/model": "MICRON 5400",
        f"{disk}/device/rev": "D4CM",
        f"{disk}/removable": "0",
        f"{disk}/queue/rotational": "1",
    }
    observed = readings(host.build_tree(tmp_path, files=files))
    assert observed["storage.disk.online disk=sdb"] is True
    assert observed["storage.disk.io_errors disk=sdb"] == 31
    assert observed["storage.disk.firmware disk=sdb"] == "D4CM"
    assert observed["storage.disk.rotational disk=sdb"] is True
    assert f"{NVME}spare disk=sdb" not in observed


def test_minimal_host_has_no_errors(tmp_path: Path) -> None:
    observed = readings(host.build_minimal_tree(tmp_path))
    assert [name for name, value in observed.items() if isinstance(value, Absent) and value.status == "error"] == []
    assert observed["storage.disk.count host"] == 0
    assert observed["storage.mount.available mount=_"] == 122880
    for name in ("storage.disk.online host", f"{NVME}critical_warning host", "storage.array.missing host"):
        assert isinstance(observed[name], Absent)


def test_host_without_sys_and_proc_reports_errors(tmp_path: Path) -> None:
    observed = readings(tmp_path)
    assert all(isinstance(value, Absent) for value in observed.values())
    for name in ("storage.disk.count host", "storage.state.read_only host", "storage.mount.size host"):
        assert cast("Absent", observed[name]).status == "error", name


def test_failed_statvfs_affects_only_its_mount(tmp_path: Path, healthy: Readings) -> None:
    def broken(path: Path) -> os.statvfs_result:
        if path.name == "scratch data":
            raise OSError(5, "Input/output error")
        return space(path)

    wrong = Absent(status="error", reason="/scratch data: Input/output error")
    names = ("size", "available", "inodes_available")
    expected = {f"storage.mount.{name} mount=_scratch_data": wrong for name in names}
    assert changed(healthy, readings(host.build_tree(tmp_path), statvfs=broken)) == expected


def test_local_machine_has_no_errors() -> None:
    collector = StorageCollector(full_snapshot=not os.geteuid())
    reported = [value for family in collector.collect() for _, value in family.readings]
    assert [value for value in reported if isinstance(value, Absent) and value.status == "error"] == []


# ---- the health log ----


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"warning": 4}, "critical_warning", 4),
        ({"used": 255}, "endurance_used", 2.55),
        ({"media": 1 << 70}, "media_errors", 1 << 70),
        ({"temperature": 263}, "temperature", -10),
        ({"temperature": 0}, "temperature", Absent.unsupported("the disk reports no temperature")),
        ({"spare": 9}, "spare", 0.09),
    ],
)
def test_health_log_field_affects_only_its_reading(fields: dict[str, int], name: str, value: Value | Absent) -> None:
    before, after = parse_log(log()), parse_log(log(**fields))
    assert {key: observed for key, observed in after.items() if before[key] != observed} == {name: value}


@pytest.mark.parametrize("page", [b"", log()[:511], bytes(512)], ids=["empty", "one byte too short", "only zeros"])
def test_invalid_health_log_is_refused(page: bytes) -> None:
    with pytest.raises(ValueError, match="the health log is cut short or has only zeros"):
        parse_log(page)


@pytest.mark.parametrize(
    ("raised", "status", "reason"),
    [
        (PermissionError(13, "Permission denied"), "error", "/dev/nvme0n1: Permission denied"),
        (OSError(0, "NVMe status 0x6"), "error", "/dev/nvme0n1: NVMe status 0x6"),
        (UnsupportedLogError(0, "no such log"), "unsupported", "nvme0n1: no such log"),
        (
            FileNotFoundError(2, "No such file"),
            "unsupported",
            "no /dev/nvme0n1: the container does not have it, or the disk was removed",
        ),
    ],
)
def test_missing_health_log_affects_only_its_disk(
    tmp_path: Path, healthy: Readings, raised: OSError, status: str, reason: str
) -> None:
    def read(path: Path) -> bytes:
        if path == tmp_path / "dev/nvme0n1":
            raise raised
        return log()

    observed = changed(healthy, readings(host.build_tree(tmp_path), read_log=read))
    assert set(observed) == {name for name in healthy if name.startswith(NVME) and name.endswith("nvme0n1")}
    assert set(observed.values()) == {Absent(status=status, reason=reason)}


def test_disks_that_do_not_answer_do_not_delay_the_health_log_of_another_disk(tmp_path: Path) -> None:
    gate = threading.Event()

    def read(path: Path) -> bytes:
        if path.name != "nvme2n1":
            gate.wait(60)
        return log()

    began = time.monotonic()
    reported = list(health_families(tmp_path, ["nvme0n1", "nvme1n1", "nvme2n1"], read, deadline_s=0.2))
    assert time.monotonic() - began < 30
    gate.set()
    no_answer = Absent(status="error", reason="no answer within 0.2 s")
    assert [value for _, value in reported[0].readings] == [no_answer, no_answer, 0]


def test_file_that_is_not_an_nvme_disk_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nvme0n1").write_bytes(log())
    with pytest.raises(OSError, match="Inappropriate ioctl"):
        read_smart_log(tmp_path / "nvme0n1")


@pytest.mark.parametrize(
    ("status", "error"),
    [(0, None), (0x4001, UnsupportedLogError), (0x4109, UnsupportedLogError), (0x0006, OSError), (0x4006, OSError)],
)
def test_status_of_the_controller_decides_whether_there_is_a_health_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[OSError] | None
) -> None:
    """0x4000 is the bit "do not retry"; 1 and 0x109: the controller has no health log; 6: internal error of the controller."""
    (tmp_path / "nvme0n1").touch()
    monkeypatch.setattr("fcntl.ioctl", lambda *_: status)
    if error is None:
        assert len(read_smart_log(tmp_path / "nvme0n1")) == 512
    else:
        with pytest.raises(OSError, match=f"NVMe status 0x{status:x}") as raised:
            read_smart_log(tmp_path / "nvme0n1")
        assert type(raised.value) is error


# ---- mounts ----


def test_each_local_file_system_is_listed_once() -> None:
    result = local_mounts(parse_mounts(host.FILES["proc/self/mountinfo"]))
    assert [(mount.target, mount.kind, mount.source) for mount in result] == [
        ("/", "ext4", "/dev/md0"),
        ("/scratch data", "xfs", "/dev/nvme2n1"),
    ]


def test_bind_mounted_files_are_not_file_systems(tmp_path: Path) -> None:
    files = {
        "etc/hosts": "127.0.0.1 localhost\n",
        "proc/self/mountinfo": "1 0 0:50 / / rw - overlay overlay rw\n"
        "2 1 259:2 /docker/hosts /etc/hosts rw - ext4 /dev/nvme0n1p2 rw\n",
    }
    observed = readings(host.build_tree(tmp_path, files=files))
    assert [name for name in observed if name.startswith("storage.mount.size")] == ["storage.mount.size mount=_"]


@pytest.mark.parametrize(
    ("lines", "read_only"),
    [
        ("1 0 8:1 / / ro - ext4 /dev/sda1 ro\n", True),
        ("1 0 8:1 / / ro,nosuid - ext4 /dev/sda1 rw\n", False),
        ("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /var ro,nosuid - xfs /dev/sda2 rw\n", False),
        ("1 0 8:1 / / ro - ext4 /dev/sda1 ro\n2 1 8:2 / /var rw - xfs /dev/sda2 rw\n", False),
        ("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /var/lib ro - xfs /dev/sda2 ro\n", False),
        ("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /vary ro - xfs /dev/sda2 ro\n", False),
        ("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:1 / / rw - ext4 /dev/sda1 ro\n", True),
    ],
    ids=[
        "root is read-only",
        "systemd protects the root of the service",
        "systemd protects /var of the service",
        "/var has a writable mount",
        "mount below /var is read-only",
        "/vary, which only begins like /var, is read-only",
        "later mount of the root is read-only",
    ],
)
def test_state_directory_is_read_only_if_its_file_system_is(tmp_path: Path, lines: str, read_only: bool) -> None:
    observed = readings(host.build_tree(tmp_path, files={"proc/self/mountinfo": lines}))
    assert observed["storage.state.read_only host"] is read_only


LOCAL_MOUNTS = "1 0 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n{}3 1 8:2 / /scratch rw - xfs /dev/sda2 rw\n"


@pytest.mark.parametrize(
    "line",
    [
        "74 25 0:59 / /mnt/tmpfs rw,relatime shared:38 - tmpfs  rw",
        "74 25 0:59 / /mnt/cifs rw - cifs \\\\server\\share rw,username=",
        "74 25 0:59 / /mnt/nfs rw - nfs4 server:/with rw",
        "74 25 0:59 / /mnt/\\040two\\011words rw - fuse.sshfs user@server:/a\\040b rw",
        "74 25 0:59 / /mnt/other\u2028line rw - tmpfs tmpfs rw",
        "74 25 0:59 / /mnt/too-few rw - fuse.custom x",
        "74 25 0:59 / rw - autofs systemd-1 rw",
    ],
)
def test_mount_of_another_file_system_does_not_hide_the_local_ones(line: str) -> None:
    mounts = local_mounts(parse_mounts(LOCAL_MOUNTS.format(f"{line}\n")))
    assert [(mount.target, mount.source) for mount in mounts] == [("/", "/dev/sda1"), ("/scratch", "/dev/sda2")]


def test_empty_source_of_a_mount_is_a_field() -> None:
    (mount,) = parse_mounts("74 25 0:59 / /mnt/tmpfs rw,relatime shared:38 - tmpfs  ro,size=4k\n")
    assert (mount.target, mount.kind, mount.source, mount.read_only) == ("/mnt/tmpfs", "tmpfs", "", True)


@pytest.mark.parametrize(
    "text",
    [
        "nonsense\n",
        "1 0 8:1 / / rw ext4 /dev/sda1 rw\n",
        "1 0 8:1 / / rw - xfs /dev/sda1\n",
        "1 0 0:50 / / rw - overlay overlay\n",
        "1 0 8:1 / rw - ext4 /dev/sda1 rw\n",
    ],
)
def test_invalid_mountinfo_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a line of mountinfo"):
        parse_mounts(text)
