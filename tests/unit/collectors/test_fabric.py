"""Test the fabric collector, which reads the NVSwitches, the fabric manager and IMEX of a host.

Also test the criterion that fails a host with NVSwitches if its fabric manager does not run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from collectors.base import Absent, Value, scope
from collectors.fabric import FabricCollector
from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence, judge
from schemas.records import Metric, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS
from tests import builders
from tests.fakes.host import add_pci_device

NVIDIA, MELLANOX = "0x10de", "0x15b3"
GPU, BRIDGE, INFINIBAND = "0x030200", "0x068000", "0x020700"
NO_SWITCH = Absent(status="unsupported", reason="no NVSwitch on the PCI bus")
INFORMATION = "BIOS Version: 96.10.57.00.01\nUUID: SWX-5D21\nPhysical location ID: 0005\n"


def host(root: Path, *, switches: int = 4, probed: int | None = None, processes: tuple[str, ...] = ()) -> Path:
    """Build a host with eight GPUs, a NIC and NVSwitches under `root`; return `root`.

    Args:
        root: directory of the host's files.
        switches: number of NVSwitches on the PCI bus.
        probed: number of NVSwitches that the driver has probed; None: all.
        processes: names of processes 2, 3 and so on, cut to 15 characters as in /proc/PID/comm. Process 1 is systemd.
    """
    bus = [(NVIDIA, GPU)] * 8 + [(MELLANOX, INFINIBAND), (MELLANOX, BRIDGE)] + [(NVIDIA, BRIDGE)] * switches
    for number, (vendor, kind) in enumerate(bus):
        add_pci_device(root, f"0000:{number:02x}:00.0", vendor, kind)
    for number in range(switches if probed is None else probed):
        write(root / f"proc/driver/nvidia-nvswitch/devices/0000:0{number + 1}:00.0/information", INFORMATION)
    for pid, name in enumerate(("systemd", *processes), 1):
        write(root / f"proc/{pid}/comm", f"{name}\n")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def read(root: Path, *, full_snapshot: bool = False) -> dict[str, Value | Absent]:
    """Return name (without `fabric.`) -> reading, for the readings of the whole host."""
    return {
        family.name.removeprefix("fabric."): value
        for family in FabricCollector(root, full_snapshot).collect()
        for labels, value in family.readings
        if scope(labels) == "host"
    }


def test_running_manager_is_reported(tmp_path: Path) -> None:
    assert read(host(tmp_path, processes=("nv-fabricmanage", "python3"))) == {
        "nvswitch.count": 4,
        "nvswitch.probed": 4,
        "manager.running": True,
        "manager.missing": False,
    }


def test_missing_manager_is_reported(tmp_path: Path) -> None:
    result = read(host(tmp_path, processes=("nvidia-persiste",)))
    assert (result["manager.running"], result["manager.missing"]) == (False, True)


def test_host_without_switches_is_unsupported(tmp_path: Path) -> None:
    assert read(host(tmp_path, switches=0)) == {
        "nvswitch.count": 0,
        "nvswitch.probed": NO_SWITCH,
        "manager.running": NO_SWITCH,
        "manager.missing": NO_SWITCH,
    }


def test_manager_is_recognized_by_its_pid_file(tmp_path: Path) -> None:
    """On a host without an NVSwitch on its PCI bus, such as an HGX B200, only the process in the PID file is checked."""
    root = host(tmp_path, switches=0, processes=("nv-fabricmanage",))
    write(root / "run/nvidia-fabricmanager/nv-fabricmanager.pid", "2\n")
    result = read(root)
    assert (result["manager.running"], result["manager.missing"]) == (True, NO_SWITCH)


@pytest.mark.parametrize("pid", ["1\n", "4711\n", "nonsense\n"])
def test_stale_or_invalid_pid_file_is_ignored(tmp_path: Path, pid: str) -> None:
    root = host(tmp_path)
    write(root / "run/nvidia-fabricmanager/nv-fabricmanager.pid", pid)
    assert read(root)["manager.missing"] is True


def test_hidden_processes_are_an_error_and_not_a_missing_manager(tmp_path: Path) -> None:
    hidden = host(tmp_path / "hidden", processes=("python3",))
    (hidden / "proc/1/comm").unlink()
    (hidden / "proc/1").rmdir()
    in_container = host(tmp_path / "container")
    (in_container / "proc/self/ns").mkdir(parents=True)
    (in_container / "proc/self/ns/pid").symlink_to("pid:[4026532201]")
    for root in (hidden, in_container):
        missing = read(root)["manager.missing"]
        assert isinstance(missing, Absent)
        assert missing.status == "error"
        assert "run as root on the host" in missing.reason


def test_all_processes_are_visible_in_the_initial_pid_namespace(tmp_path: Path) -> None:
    root = host(tmp_path)
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    assert read(root)["manager.missing"] is True


def test_process_that_exits_during_the_scan_is_skipped(tmp_path: Path) -> None:
    root = host(tmp_path, processes=("nv-fabricmanage",))
    (root / "proc/999").mkdir()
    assert read(root)["manager.running"] is True


def test_missing_pci_bus_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "proc/1/comm", "systemd\n")
    assert {value.status for value in read(tmp_path).values() if isinstance(value, Absent)} == {"error"}
    assert len(read(tmp_path)) == 4


def test_switches_that_the_driver_probed_are_counted_and_an_unloaded_driver_is_an_error(tmp_path: Path) -> None:
    root = host(tmp_path / "one", probed=3, processes=("nv-fabricmanage",))
    assert (read(root)["nvswitch.count"], read(root)["nvswitch.probed"]) == (4, 3)
    unloaded = read(host(tmp_path / "none", probed=0))["nvswitch.probed"]
    assert isinstance(unloaded, Absent)
    assert unloaded.status == "error"


def test_firmware_version_is_read_for_each_switch(tmp_path: Path) -> None:
    root = host(tmp_path, probed=2)
    information = "proc/driver/nvidia-nvswitch/devices/0000:02:00.0/information"
    write(root / information, "BIOS Version: N/A\n")
    (family,) = (item for item in FabricCollector(root).collect() if item.name == "fabric.nvswitch.bios_version")
    assert [(scope(labels), value) for labels, value in family.readings] == [
        ("pci=0000:01:00.0", "96.10.57.00.01"),
        ("pci=0000:02:00.0", Absent(status="error", reason=f"/{information}: the driver reports no BIOS version")),
    ]


def test_imex_is_read_in_full_snapshots_only(tmp_path: Path) -> None:
    root = host(tmp_path, processes=("nv-fabricmanage",))
    absent = Absent(status="unsupported", reason="/usr/bin/nvidia-imex is not installed")
    assert "imex.running" not in read(root)
    assert read(root, full_snapshot=True)["imex.running"] == absent
    write(root / "usr/bin/nvidia-imex", "")
    assert read(root, full_snapshot=True)["imex.running"] is False
    write(root / "proc/77/comm", "nvidia-imex\n")
    assert read(root, full_snapshot=True)["imex.running"] is True


# ---- the judge ----

PACKS = read_packs(())


def judged(value: Value | Absent | None) -> list[tuple[str, str]]:
    """Return verdict and action of the criterion `fabric-manager-missing` for host h1.

    `value` is the reading `fabric.manager.missing` in all snapshots of h1; None: they do not have this reading.
    """
    plan = builders.plan(profile="smoke")
    evidence = builders.evidence(plan)
    metric = Metric(name="fabric.manager.missing", unit="1", values={"host": value})
    if isinstance(value, Absent):
        metric = replace(metric, values={}, absent={"host": f"{value.status}: {value.reason}"})

    def with_reading(snapshot: Snapshot) -> Snapshot:
        others = (item for item in snapshot.metrics if item.name != metric.name)
        return replace(snapshot, metrics=(*others, *([] if value is None else [metric])))

    records = tuple(
        replace(record, snapshots=tuple(with_reading(snapshot) for snapshot in record.snapshots))
        for record in evidence["h1"].records
    )
    verdicts = judge(plan, evidence | {"h1": Evidence(records=records)}, PACKS)
    return [
        (item.verdict, item.action)
        for item in verdicts
        if (item.host, item.criterion) == ("h1", "fabric-manager-missing")
    ]


def test_host_fails_only_if_it_has_switches_and_no_fabric_manager() -> None:
    assert judged(True) == [(FAIL, "reboot")]
    assert judged(False) == [(PASS, "none")]
    assert judged(NO_SWITCH) == []


def test_failed_or_missing_reading_of_the_fabric_manager_is_inconclusive() -> None:
    assert judged(Absent(status="error", reason="hidden")) == [(INCONCLUSIVE, "none")]
    assert judged(None) == [(INCONCLUSIVE, "none")]


def test_unreadable_device_is_an_error_and_not_a_missing_device(tmp_path: Path) -> None:
    vendor = host(tmp_path, switches=1) / "sys/bus/pci/devices/0000:0a:00.0/vendor"
    assert read(tmp_path)["nvswitch.count"] == 1
    vendor.unlink()
    vendor.mkdir()
    result = read(tmp_path)
    for name in ("nvswitch.count", "manager.missing"):
        observed = result[name]
        assert isinstance(observed, Absent)
        assert observed.status == "error"
