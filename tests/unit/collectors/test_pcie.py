"""The PCIe collector reads the simulated /sys of an HGX host. A simulated fault changes only the readings that show it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.base import Absent, Value, scope
from collectors.files import Files
from collectors.pcie import PcieCollector
from collectors.pcie.acs import acs_families
from collectors.pcie.affinity import nearest_adapters
from collectors.pcie.config import largest_bar
from collectors.pcie.device import Device
from collectors.pcie.links import parse_generation, parse_total
from collectors.sysfs import pci_addresses
from tests.fakes import links

Readings = dict[tuple[str, str], Value | Absent]
GPU, HCA, DRIVE, NVSWITCH = links.GPUS[1], links.HCAS[1], links.DRIVES[1], links.NVSWITCHES[0]
PORT = links.GPU_PORTS[1]


def readings(root: Path, *, full_snapshot: bool = True) -> Readings:
    """Return (name, scope) -> the reading."""
    collector = PcieCollector(root, full_snapshot=full_snapshot)
    return {(family.name, scope(labels)): value for family in collector.collect() for labels, value in family.readings}


@pytest.fixture
def root() -> Iterator[Path]:
    with links.temporary_tree(gpus=2) as root:
        yield root


def changed(root: Path, fault: Callable[[Path], None]) -> Readings:
    """Call `fault`, which changes files under `root`. Return the readings that differ afterwards, with their new values."""
    before = readings(root)
    fault(root)
    after = readings(root)
    assert before.keys() == after.keys()
    return {key: value for key, value in after.items() if value != before[key]}


def device_readings(address: str, **values: Value) -> Readings:
    """Return the expected readings of one device. In the names of the arguments, `__` stands for `.`."""
    return {(f"pcie.{name.replace('__', '.')}", f"pci={address}"): value for name, value in values.items()}


def test_healthy_gpu_reports_all_readings(root: Path) -> None:
    observed = {key: value for key, value in readings(root).items() if key[1] == f"pci={GPU}"}
    no_group = Absent(status="unsupported", reason="the device is in no IOMMU group")
    assert observed == device_readings(
        GPU,
        generation=5,
        width=16,
        generation_max=5,
        width_max=16,
        port__generation_max=5,
        port__width_max=16,
        slowed=False,
        narrowed=False,
        aer__correctable=0,
        aer__nonfatal=0,
        aer__fatal=0,
        port__aer__correctable=0,
        port__aer__nonfatal=0,
        port__aer__fatal=0,
        kind="gpu",
        port__address=PORT,
        power_state="D0",
        numa_node=0,
        max_payload=256,
        max_payload_supported=256,
        max_read_request=4096,
        relaxed_ordering__enabled=True,
        bar1__size=128 * links.GIB,
        acs__redirected=False,
        nic_path="PIX",
        nearest_nics=links.HCAS[1],
        driver="none",
        permitted=True,
    ) | {("pcie.iommu.group", f"pci={GPU}"): no_group, ("pcie.iommu.type", f"pci={GPU}"): no_group}


def test_gpus_adapters_drives_and_nvswitches_are_identified() -> None:
    with links.temporary_tree() as root:
        observed = readings(root)
    kinds = {
        location.removeprefix("pci="): value for (name, location), value in observed.items() if name == "pcie.kind"
    }
    assert kinds == {
        **dict.fromkeys(links.GPUS, "gpu"),
        **dict.fromkeys((*links.HCAS, links.ROCE_NIC, links.PLAIN_NIC), "network"),
        **dict.fromkeys(links.DRIVES, "nvme"),
        **dict.fromkeys(links.NVSWITCHES, "nvswitch"),
    }
    assert observed["pcie.device_count", "host"] == len(kinds)
    assert [key for key, value in observed.items() if isinstance(value, Absent) and ".iommu." not in key[0]] == []


@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", "nouveau", ""])
def test_driver_of_a_gpu_is_read(tmp_path: Path, driver: str) -> None:
    links.as_virtual_machine(tmp_path)
    gpu = next(location for name, location in readings(tmp_path) if name == "pcie.driver")
    link = links.pci(tmp_path, gpu.removeprefix("pci=")) / "driver"
    link.unlink(missing_ok=True)
    if driver:
        folder = tmp_path / "sys/bus/pci/drivers" / driver
        folder.mkdir(parents=True)
        link.symlink_to(folder)
    assert readings(tmp_path)["pcie.driver", gpu] == (driver or "none")


@pytest.mark.parametrize(
    ("information", "node", "allowed", "permitted"),
    [
        ("Model: \t\t NVIDIA H200\nDevice Minor: \t 5\nGPU Excluded:\t No\n", True, True, True),
        ("Model: \t\t NVIDIA H200\nDevice Minor: \t 5\nGPU Excluded:\t No\n", True, False, False),
        ("Device Minor: \t 5\n", False, False, Absent.unsupported("no /dev/nvidia5")),
        ("", True, False, Absent.unsupported("the driver of NVIDIA does not list the GPU")),
        ("Model: ?\n", True, False, Absent.error("/proc/driver/nvidia/gpus/{}/information: no line Device Minor")),
    ],
)
def test_permission_to_use_a_gpu_is_read_without_opening_its_device_file(
    information: str,
    node: bool,
    allowed: bool,
    permitted: bool | Absent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links.as_virtual_machine(tmp_path)
    gpu = next(location for name, location in readings(tmp_path) if name == "pcie.driver")
    address = gpu.removeprefix("pci=")
    if information:
        links.write(tmp_path, f"proc/driver/nvidia/gpus/{address}/information", information)
    path = tmp_path / "dev/nvidia5"
    path.parent.mkdir(exist_ok=True)
    if node:
        os.mkfifo(path)  # opening it for reading would wait without end
    access = os.access
    denied = [] if allowed else [str(path)]
    monkeypatch.setattr(os, "access", lambda name, mode: access(name, mode) and (not mode or str(name) not in denied))
    expected = (
        replace(permitted, reason=permitted.reason.format(address)) if isinstance(permitted, Absent) else permitted
    )
    assert readings(tmp_path)["pcie.permitted", gpu] == expected


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/devices", os.W_OK), reason="needs the devices controller of cgroup v1"
)
def test_device_cgroup_denies_the_access_that_the_collector_asks_for() -> None:
    """Slurm and systemd deny GPUs in this way. The device is /dev/zero."""
    group = Path("/sys/fs/cgroup/devices") / f"rackproof-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "devices.deny").write_text("c 1:5 rwm")
        code = "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        code += "print([os.access(f'/dev/{name}', os.R_OK | os.W_OK) for name in ('zero', 'null')])"
        command = [sys.executable, "-c", code, str(group / "cgroup.procs")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[False, True]\n"
    finally:
        group.rmdir()


def test_scrape_omits_the_readings_that_only_full_snapshots_have(root: Path) -> None:
    scrape, snapshot = readings(root, full_snapshot=False), readings(root)
    assert scrape.items() <= snapshot.items()
    assert {name for name, _ in snapshot.keys() - scrape.keys()} == {
        "pcie.acs.enabled", "pcie.acs.redirected", "pcie.bar1.size", "pcie.driver", "pcie.iommu.enabled", "pcie.iommu.group",
        "pcie.iommu.type", "pcie.kind", "pcie.max_payload", "pcie.max_payload_supported", "pcie.max_read_request",
        "pcie.nearest_nics", "pcie.nic_path", "pcie.numa_node", "pcie.permitted", "pcie.port.address",
        "pcie.power_state", "pcie.relaxed_ordering.enabled",
    }  # fmt: skip


# ---- links ----


def test_link_with_fewer_lanes_is_narrowed(root: Path) -> None:
    changes = changed(root, lambda root: links.set_link(root, GPU, "current", width=8))
    assert changes == device_readings(GPU, width=8, narrowed=True)


def test_link_at_lower_speed_is_slowed(root: Path) -> None:
    changes = changed(root, lambda root: links.set_link(root, HCA, "current", speed="16.0"))
    assert changes == device_readings(HCA, generation=4, slowed=True)


def test_link_at_the_limit_of_its_port_is_neither_slowed_nor_narrowed(root: Path) -> None:
    def riser(root: Path) -> None:
        links.set_link(root, PORT, "max", speed="16.0", width=8)
        links.set_link(root, GPU, "current", speed="16.0", width=8)

    assert changed(root, riser) == device_readings(
        GPU, generation=4, width=8, port__generation_max=4, port__width_max=8
    )


def test_slow_and_narrow_link_of_a_drive_changes_only_its_generation_and_width(root: Path) -> None:
    changes = changed(root, lambda root: links.set_link(root, DRIVE, "current", speed="8.0", width=2))
    assert changes == device_readings(DRIVE, generation=3, width=2)


def test_slowed_and_narrowed_are_unsupported_for_a_gpu_on_a_grace_cpu(root: Path) -> None:
    def grace(root: Path) -> None:
        (links.pci(root, PORT) / "vendor").write_text("0x10de\n")
        links.set_link(root, GPU, "current", width=1)

    changes = changed(root, grace)
    assert {(name, getattr(value, "status", value)) for (name, _), value in changes.items()} == {
        ("pcie.width", 1), ("pcie.slowed", "unsupported"), ("pcie.narrowed", "unsupported"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda root: links.set_link(root, links.SWITCH_UP, "current", width=8), {"width": 8, "narrowed": True}),
        (lambda root: links.set_link(root, links.SWITCH_UP, "current", speed="8.0"), {"generation": 3, "slowed": True}),
        (lambda root: links.set_link(root, links.SWITCH_ROOT, "max", speed="16.0"), {"port__generation_max": 4}),
        (lambda root: links.set_aer(root, links.SWITCH_UP, "correctable", 40), {"aer__correctable": 40}),
        (lambda root: links.set_aer(root, links.SWITCH_HCA, "fatal", 1), {"aer__fatal": 1}),
        (lambda root: links.set_aer(root, links.SWITCH_ROOT, "fatal", 2), {"port__aer__fatal": 2}),
        (lambda root: (links.pci(root, links.SWITCH_UP) / "aer_dev_fatal").unlink(), {}),
        (lambda root: links.set_link(root, links.SWITCH_HCA, "current", speed="2.5", width=1), {}),
        (lambda root: links.set_link(root, links.SWITCH_DOWN, "max", speed="2.5", width=1), {}),
    ],
)
def test_link_of_an_adapter_with_a_pcie_switch_is_the_link_above_the_switch(
    tmp_path: Path, fault: Callable[[Path], None], expected: dict[str, Value]
) -> None:
    links.add_adapter_with_switch(tmp_path)
    links.write(tmp_path, "proc/cpuinfo", "flags\t\t: fpu\n")
    healthy = readings(tmp_path)
    assert healthy["pcie.port.address", f"pci={links.SWITCH_HCA}"] == links.SWITCH_ROOT
    assert healthy["pcie.nic_path", f"pci={links.SWITCH_GPU}"] == "PXB"
    assert changed(tmp_path, fault) == device_readings(links.SWITCH_HCA, **expected)


@pytest.mark.parametrize("end", [links.SWITCH_HCA, links.SWITCH_UP])
def test_errors_of_an_adapter_with_a_pcie_switch_are_unknown_if_one_end_cannot_be_read(
    tmp_path: Path, end: str
) -> None:
    links.add_adapter_with_switch(tmp_path)
    (links.pci(tmp_path, end) / "aer_dev_fatal").write_text("broken\n")
    value = readings(tmp_path)["pcie.aer.fatal", f"pci={links.SWITCH_HCA}"]
    assert isinstance(value, Absent)
    assert value.status == "error"


def test_link_and_setting_readings_of_an_unresponsive_device_are_errors(root: Path) -> None:
    def lost(root: Path) -> None:
        (links.pci(root, GPU) / "current_link_speed").write_text("Unknown\n")
        links.set_link(root, GPU, "current", width=63)
        (links.pci(root, GPU) / "config").write_bytes(b"\xff" * 4096)

    changes = changed(root, lost)
    assert {name for name, _ in changes} == {
        "pcie.generation", "pcie.width", "pcie.slowed", "pcie.narrowed", "pcie.max_payload", "pcie.max_payload_supported",
        "pcie.max_read_request", "pcie.relaxed_ordering.enabled",
    }  # fmt: skip
    assert {value.status for value in changes.values() if isinstance(value, Absent)} == {"error"}
    assert all("does not answer" in str(value) for value in changes.values())


@pytest.mark.parametrize(
    ("speed", "number"), [("2.5 GT/s", 1), ("5 GT/s", 2), ("32.0 GT/s PCIe", 5), ("64.0 GT/s PCIe", 6)]
)
def test_generation_is_derived_from_the_speed_texts_of_old_and_new_kernels(speed: str, number: int) -> None:
    assert parse_generation(speed) == number


@pytest.mark.parametrize(("speed", "status"), [("Unknown", "unsupported"), ("", "unsupported"), ("3.0 GT/s", "error")])
def test_unknown_speed_has_no_generation(speed: str, status: str) -> None:
    value = parse_generation(speed)
    assert isinstance(value, Absent)
    assert value.status == status


def test_maximum_width_that_could_not_be_read_is_read_again_at_the_next_scrape(root: Path) -> None:
    collector = PcieCollector(root)
    links.set_link(root, GPU, "max", width=63)
    [*collector.collect()]
    links.set_link(root, GPU, "max", width=16)
    width = next(family for family in collector.collect() if family.name == "pcie.width_max")
    assert ({"pci": GPU}, 16) in width.readings


def test_removed_device_is_no_longer_reported(root: Path) -> None:
    collector = PcieCollector(root)
    [*collector.collect()]
    (root / "sys/bus/pci/devices" / GPU).unlink()
    observed = {
        (family.name, scope(labels)): value for family in collector.collect() for labels, value in family.readings
    }
    assert observed["pcie.device_count", "host"] == 8
    assert [key for key in observed if key[1] == f"pci={GPU}"] == []


@pytest.mark.parametrize("lanes", ["1", "4", "8", "255", "0", "?", ""])
def test_adapter_of_another_vendor_with_fewer_lanes_than_a_fabric_adapter_is_not_read(root: Path, lanes: str) -> None:
    (links.pci(root, links.PLAIN_NIC) / "max_link_width").write_text(f"{lanes}\n")
    assert [key for key in readings(root) if key[1] == f"pci={links.PLAIN_NIC}"] == []


@pytest.mark.parametrize("vendor", ["0x14e4", "0x8086", "0x1dd8"])
def test_narrowed_link_of_an_adapter_of_another_vendor_is_found(root: Path, vendor: str) -> None:
    (links.pci(root, links.PLAIN_NIC) / "vendor").write_text(f"{vendor}\n")
    assert readings(root)["pcie.narrowed", f"pci={links.PLAIN_NIC}"] is False
    links.set_link(root, links.PLAIN_NIC, "current", width=8)
    assert readings(root)["pcie.narrowed", f"pci={links.PLAIN_NIC}"] is True


def test_link_of_an_adapter_of_another_vendor_with_a_pcie_switch_is_the_link_above_the_switch(tmp_path: Path) -> None:
    """Adapters of AMD Pensando contain a switch: pci.ids lists `DSC Capri Upstream Port` and `DSC Virtual Downstream Port`."""
    links.add_adapter_with_switch(tmp_path)
    links.write(tmp_path, "proc/cpuinfo", "flags\t\t: fpu\n")
    for address in (links.SWITCH_UP, links.SWITCH_DOWN, links.SWITCH_HCA):
        (links.pci(tmp_path, address) / "vendor").write_text("0x1dd8\n")
    for address in (links.SWITCH_DOWN, links.SWITCH_HCA):
        links.set_link(tmp_path, address, "max", width=8)  # the links within the switch have no lanes
    assert readings(tmp_path)["pcie.port.address", f"pci={links.SWITCH_HCA}"] == links.SWITCH_ROOT
    links.set_link(tmp_path, links.SWITCH_UP, "current", width=8)
    assert readings(tmp_path)["pcie.narrowed", f"pci={links.SWITCH_HCA}"] is True


def test_root_port_of_the_vendor_of_the_adapter_is_not_inside_the_adapter(root: Path) -> None:
    (bridge,) = pci_addresses(str(links.pci(root, links.PLAIN_NIC).resolve()))[:-1]
    for address in (bridge, links.PLAIN_NIC):
        (links.pci(root, address) / "vendor").write_text("0x8086\n")
    links.set_link(root, links.PLAIN_NIC, "current", width=8)
    expected = {"pcie.port.address": bridge, "pcie.narrowed": True}
    assert {name: readings(root)[name, f"pci={links.PLAIN_NIC}"] for name in expected} == expected


def test_adapter_of_another_vendor_is_nearest_only_if_there_is_none_of_nvidia(root: Path) -> None:
    for name in ("vendor", "class"):
        (links.pci(root, links.HCAS[0]) / name).write_text({"vendor": "0x14e4\n", "class": "0x020000\n"}[name])
    paths = {f"pci={links.GPUS[0]}": "NODE", f"pci={links.GPUS[1]}": "PIX"}
    assert nic_paths(root) == paths, "only the adapters of NVIDIA count"
    for address in (links.HCAS[1], links.ROCE_NIC):
        without(root, address)
    assert nic_paths(root) == {f"pci={links.GPUS[0]}": "PIX", f"pci={links.GPUS[1]}": "NODE"}


# ---- errors ----


@pytest.mark.parametrize("severity", ["correctable", "nonfatal", "fatal"])
def test_errors_of_device_and_port_are_counted_separately(root: Path, severity: str) -> None:
    device = changed(root, lambda root: links.set_aer(root, GPU, severity, 3))
    assert device == {(f"pcie.aer.{severity}", f"pci={GPU}"): 3}
    port = changed(root, lambda root: links.set_aer(root, PORT, severity, 7))
    assert port == {(f"pcie.port.aer.{severity}", f"pci={GPU}"): 7}


def test_aer_errors_are_counters(root: Path) -> None:
    names = {family.name for family in PcieCollector(root, full_snapshot=True).collect() if family.counter}
    assert names == {f"pcie.{end}aer.{kind}" for end in ("", "port.") for kind in ("correctable", "nonfatal", "fatal")}


def test_missing_aer_counter_is_unsupported(root: Path) -> None:
    changes = changed(root, lambda root: (links.pci(root, NVSWITCH) / "aer_dev_fatal").unlink())
    assert {key: getattr(value, "status", "") for key, value in changes.items()} == {
        ("pcie.aer.fatal", f"pci={NVSWITCH}"): "unsupported"
    }


@pytest.mark.parametrize("text", ["", "RxErr 4\n", "TOTAL_ERR_COR many\n"])
def test_missing_or_invalid_aer_total_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_total(text)


# ---- settings ----


@pytest.mark.parametrize(
    "address", [GPU, PORT, links.HCA_PORTS[1]], ids=["GPU", "port above the GPU", "port above the adapter"]
)
def test_only_acs_of_the_switch_port_above_gpu_or_adapter_redirects_traffic(root: Path, address: str) -> None:
    changes = changed(root, lambda root: links.set_acs(root, address, links.ACS_KERNEL))
    expected = (
        {}
        if address == GPU
        else device_readings(address, acs__enabled=True) | device_readings(GPU, acs__redirected=True)
    )
    assert changes == expected


def test_acs_of_a_root_port_does_not_affect_traffic_within_the_switch(root: Path) -> None:
    changes = changed(root, lambda root: links.set_acs(root, links.ROOT_PORTS[1], links.ACS_KERNEL))
    assert changes == device_readings(links.ROOT_PORTS[1], acs__enabled=True)


@pytest.mark.parametrize(
    "control",
    [0x01, 0x11, 0x5D],
    ids=["source validation", "source validation and upstream forwarding", "redirection with direct translated P2P"],
)
def test_harmless_acs_control_changes_no_reading(root: Path, control: int) -> None:
    assert changed(root, lambda root: links.set_acs(root, PORT, control)) == {}


def test_payload_and_read_request_sizes_are_read_from_the_configuration_space(root: Path) -> None:
    def reduce_sizes(root: Path) -> None:
        (links.pci(root, HCA) / "config").write_bytes(links.config_space(payload=0, read=2))

    assert changed(root, reduce_sizes) == device_readings(HCA, max_payload=128, max_read_request=512)


def test_iommu_group_and_type_are_reported(root: Path) -> None:
    def isolate(root: Path) -> None:
        links.write(root, "sys/class/iommu/dmar0/name", "dmar0\n")
        links.write(root, "sys/kernel/iommu_groups/47/type", "identity\n")
        (links.pci(root, GPU) / "iommu_group").symlink_to("../../../kernel/iommu_groups/47")

    observed = changed(root, isolate)
    assert observed == device_readings(GPU, iommu__group=47, iommu__type="identity") | {
        ("pcie.iommu.enabled", "host"): True
    }


def test_settings_are_unsupported_without_root(root: Path) -> None:
    hidden = {(name, getattr(value, "status", "")) for (name, _), value in changed(root, links.as_unprivileged).items()}
    assert hidden == {
        (f"pcie.{name}", "unsupported")
        for name in (
            "max_payload", "max_payload_supported", "max_read_request", "relaxed_ordering.enabled", "acs.enabled",
            "acs.redirected",
        )
    }  # fmt: skip


def test_largest_memory_bar_is_selected() -> None:
    resource = "0xc5000000 0xc5ffffff 0x40200\n0x52000000000 0x52fffffffff 0x14220c\n0x0 0x0 0x0\n"
    assert largest_bar(resource) == 64 * links.GIB


@pytest.mark.parametrize("text", ["", "0x0 0x0 0x0\n", "0x0000 0xffff 0x20140204\n", "0xe000 0xe07f 0x40101\n"])
def test_missing_memory_bar_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="no memory BAR"):
        largest_bar(text)


# ---- other machines ----


def test_readings_that_a_virtual_machine_lacks_are_unsupported(tmp_path: Path) -> None:
    links.as_virtual_machine(tmp_path)
    observed = readings(tmp_path)
    assert observed["pcie.device_count", "host"] == 3
    absent = {name: value.status for (name, _), value in observed.items() if isinstance(value, Absent)}
    assert set(absent.values()) == {"unsupported"}
    assert {"pcie.width", "pcie.narrowed", "pcie.slowed", "pcie.aer.fatal", "pcie.acs.redirected"} <= absent.keys()
    assert {name for name, _ in observed} - absent.keys() == {
        "pcie.device_count", "pcie.driver", "pcie.kind", "pcie.power_state", "pcie.bar1.size", "pcie.iommu.enabled",
        "pcie.max_payload", "pcie.max_payload_supported", "pcie.max_read_request", "pcie.relaxed_ordering.enabled",
    }  # fmt: skip


@pytest.mark.parametrize(
    "files",
    [
        {"proc/cpuinfo": "flags\t\t: fpu hypervisor\n"},
        {"proc/cpuinfo": "Features\t: fp asimd\n", "sys/class/dmi/id/product_name": "KVM Virtual Machine\n"},  # on Arm
    ],
    ids=["hypervisor flag of the CPU", "product name"],
)
def test_degraded_links_and_redirection_in_a_virtual_machine_are_unsupported(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        links.write(root, path, text)
    links.set_link(root, GPU, "current", width=8)
    links.set_acs(root, PORT, links.ACS_KERNEL)
    observed = readings(root)
    for name in ("pcie.narrowed", "pcie.slowed", "pcie.acs.redirected"):
        assert getattr(observed[name, f"pci={GPU}"], "status", "") == "unsupported"
    assert observed["pcie.width", f"pci={GPU}"] == 8


def test_virtual_function_is_excluded(root: Path) -> None:
    (links.pci(root, links.ROCE_NIC) / "physfn").symlink_to("..")
    assert [key for key in readings(root) if key[1] == f"pci={links.ROCE_NIC}"] == []


def test_host_without_a_pci_bus_reports_only_that_the_bus_is_missing(tmp_path: Path) -> None:
    observed = readings(tmp_path)
    assert list(observed) == [("pcie.device_count", "host")]
    assert re.search("no PCI bus", str(observed["pcie.device_count", "host"]))


# ---- affinity ----


def nic_paths(root: Path) -> dict[str, Value | Absent]:
    """Return the scope of each GPU -> path to its nearest network adapter."""
    return {scope: value for (name, scope), value in readings(root).items() if name == "pcie.nic_path"}


def test_gpu_and_adapter_on_one_switch_have_the_path_pix(root: Path) -> None:
    assert nic_paths(root) == {f"pci={gpu}": "PIX" for gpu in links.GPUS[:2]}


def without(root: Path, *addresses: str) -> None:
    """Remove devices from the PCI bus of the simulated host."""
    for address in addresses:
        (root / "sys/bus/pci/devices" / address).unlink()


def test_nearest_adapters_are_those_at_the_end_of_the_shortest_path(root: Path) -> None:
    def nearest() -> dict[str, Value | Absent]:
        return {scope: value for (name, scope), value in readings(root).items() if name == "pcie.nearest_nics"}

    gpus = [f"pci={gpu}" for gpu in links.GPUS[:2]]
    assert nearest() == dict(zip(gpus, links.HCAS[:2], strict=True))
    (links.pci(root, links.ROCE_NIC) / "numa_node").write_text("0\n")
    without(root, links.HCAS[1])
    assert nearest() == {gpus[0]: links.HCAS[0], gpus[1]: f"{links.HCAS[0]} {links.ROCE_NIC}"}


def test_gpu_without_an_adapter_on_its_switch_has_the_path_node_or_sys_or_no_path(root: Path) -> None:
    """The test removes all three adapters one after another.

    The first is on the switch of the second GPU, the second on the switch of the first GPU. The third is the RoCE adapter.
    """
    without(root, links.HCAS[1])
    assert nic_paths(root) == {f"pci={links.GPUS[0]}": "PIX", f"pci={links.GPUS[1]}": "NODE"}
    without(root, links.HCAS[0])
    assert set(nic_paths(root).values()) == {"SYS"}, "the RoCE adapter is on the other NUMA node"
    (links.pci(root, links.ROCE_NIC) / "numa_node").write_text("0\n")
    assert set(nic_paths(root).values()) == {"NODE"}
    without(root, links.ROCE_NIC)
    without(root, links.PLAIN_NIC)
    assert nic_paths(root) == dict.fromkeys(
        [f"pci={gpu}" for gpu in links.GPUS[:2]],
        Absent.unsupported("no network adapter of the fabric is on the PCI bus"),
    )


def test_switch_below_a_switch_makes_the_path_pxb() -> None:
    gpu = Device(address="gpu", kind="gpu", bridges=("down", "up", "down0", "up0", "root"))
    near = Device(address="nic", kind="network", bridges=("down2", "up2", "down1", "up0", "root"))
    assert nearest_adapters(Files(Path("/none")), gpu, [near]) == ("PXB", near.address)
    same_port = Device(address="nic2", kind="network", bridges=("down", "up", "down0", "up0", "root"))
    assert nearest_adapters(Files(Path("/none")), gpu, [near, same_port]) == ("PIX", same_port.address)


def test_gpu_and_adapter_directly_below_the_same_bridge_have_no_acs_between_them(root: Path) -> None:
    devices = [Device(address=kind, kind=kind, bridges=("0000:00:1e.0",)) for kind in ("gpu", "network")]
    families = {family.name: family for family in acs_families(Files(root), devices, is_virtual=False)}
    absent = Absent.unsupported("the GPU and the network adapter are directly below the same bridge")
    assert families["pcie.acs.redirected"].readings == [({"pci": "gpu"}, absent)]


def test_path_in_a_virtual_machine_is_unsupported(tmp_path: Path) -> None:
    links.as_virtual_machine(tmp_path)
    assert {str(value) for value in nic_paths(tmp_path).values()} == {
        str(Absent.unsupported("in a virtual machine, the ports are not those of the host"))
    }
