"""Test the host collector on trees of /proc and /sys, and its parsers on the texts of single files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from collectors.base import Absent, Value, scope
from collectors.files import Files, MissingError
from collectors.host import HostCollector
from collectors.host.parsing import (
    bracketed_choice,
    cpu_model,
    firmware_text,
    interrupts,
    iommu_options,
    length_of_cpu_list,
    load_average,
    meminfo,
    optional_meminfo,
    process_state,
    shared_options,
    soft_limit,
    stalled_share,
)  # fmt: skip
from collectors.host.processor import usable_processors
from collectors.virtual import has_hypervisor_flag
from tests.fakes import host

GIB = 1 << 30
TICKS = os.sysconf("SC_CLK_TCK")
Readings = dict[str, Value | Absent]
MC0, DIMM0 = "sys/devices/system/edac/mc/mc0", "sys/devices/system/edac/mc/mc0/dimm0"


def readings(root: Path, *, full_snapshot: bool = False) -> Readings:
    """Return `NAME SCOPE` -> reading; the key of a reading of the whole host is only `NAME`."""
    return {
        family.name + (f" {scope(labels)}" if labels else ""): value
        for family in HostCollector(root, full_snapshot).collect()
        for labels, value in family.readings
    }


def changed(before: Readings, after: Readings) -> Readings:
    """Return the readings that are new or different in `after`."""
    return {name: value for name, value in after.items() if before.get(name) != value}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Readings:
    return readings(host.build_tree(tmp_path_factory.mktemp("host")), full_snapshot=True)


def test_healthy_host_reports_all_fast_readings(tmp_path: Path) -> None:
    assert readings(host.build_tree(tmp_path)) == {
        "host.kernel_version": "6.8.0-45-generic",
        "host.cpu.model": "Intel(R) Xeon(R) Platinum 8480C",
        "host.cpu.count": len(os.sched_getaffinity(0)),
        "host.virtual_machine": False,
        "host.load": 1.52,
        "host.uptime": 864213.57,
        "host.memory.total": 2113404636 * 1024,
        "host.memory.available": 2128002056192,
        "host.memory.poisoned": 0,
        "host.memory.transparent_hugepages": "madvise",
        "host.memory.ecc_corrected mc=mc0": 0,
        "host.memory.ecc_corrected mc=mc1": 0,
        "host.memory.ecc_uncorrected mc=mc0": 0,
        "host.memory.ecc_uncorrected mc=mc1": 0,
        "host.swap.total": 8388604 * 1024,
        "host.swap.used": 4096,
        "host.hugepages.count": 1024,
        "host.hugepages.free": 1000,
        "host.numa.count": 2,
        "host.numa.memory_total numa=0": 1056702318 * 1024,
        "host.numa.memory_total numa=1": 1056702318 * 1024,
        "host.numa.memory_free numa=0": 1025931202 * 1024,
        "host.numa.memory_free numa=1": 1025931202 * 1024,
        "host.numa.processors numa=0": 112,
        "host.numa.processors numa=1": 112,
        "host.numa.balancing": 0,
        "host.numa.zone_reclaim": 0,
        "host.kernel.tainted": 12289,
        "host.kernel.machine_check": False,
        "host.kernel.bad_page": False,
        "host.kernel.oops": False,
        "host.kernel.soft_lockup": False,
        "host.kernel.command_line": "ro intel_iommu=on iommu=pt pci=realloc=off",
        "host.iommu.options": "intel_iommu=on iommu=pt",
        "host.oom_kills": 3,
        "host.cpu.busy": 550 / TICKS / 4,
        "host.cpu.stolen": 8 / TICKS / 4,
        "host.pressure.cpu": 0.015,
        "host.pressure.memory": 0.0,
        "host.pressure.io": 0.0025,
        "host.module.nouveau": False,
        "host.module.nvidia": True,
        "host.module.peermem": True,
        "host.module.gdrdrv": True,
        "host.cpu.smt": True,
        "host.ulimit.memlock_unlimited": True,
        "host.ulimit.memlock": Absent(status="unsupported", reason="unlimited"),
        "host.ulimit.nofile_unlimited": False,
        "host.ulimit.nofile": 1048576,
        "gpu.pci_count": 8,
    }


def test_full_snapshot_adds_slow_readings(tmp_path: Path, healthy: Readings) -> None:
    values = changed(readings(host.build_tree(tmp_path)), healthy)
    assert {name: value for name, value in values.items() if "dimm" not in name} == {
        "host.memory.speed": 4_800_000_000,
        "host.memory.usable_share": 0.9841,
        "host.boot_id": "0d8f3e52-6b1c-4c57-9a3e-2f40c1d7b6a9",
        "host.cpu.sockets": 2,
        "host.cpu.cores": 2,
        "host.cpu.threads": 4,
        "host.cpu.usable": len(os.sched_getaffinity(0)),
        "host.cpu.governor": "performance",
        "host.cpu.clock_allowed": 3800000000,
        "host.cpu.clock_max": 3800000000,
        "host.cpu.clock_now_min": 800000000,
        "host.cpu.clock_now_median": 2900000000,
        "host.system.vendor": "Supermicro",
        "host.system.product": "SYS-821GE-TNHR",
        "host.system.serial": "S411795X4A12345",
        "host.bios.version": "2.3",
        "host.machine_checks": 0,
        "host.process.count": 4,
        "host.process.zombie": 1,
        "host.process.uninterruptible": 1,
        "host.persistence_daemon": True,
    }
    assert values["host.dimm.label mc=mc1,dimm=dimm0"] == "CPU_SrcID#1_MC#0_Chan#0_DIMM#0"
    # 3 readings of each of 4 DIMMs from EDAC, 8 of each of 16 slots from SMBIOS, and 2 of the whole host
    assert len([name for name in values if name.startswith("host.dimm.")]) == 3 * 4 + 8 * 16 + 2


@pytest.mark.parametrize(
    ("files", "change"),
    [
        ({f"{MC0}/ce_count": "7\n", f"{DIMM0}/dimm_ce_count": "7\n"},
         {"host.memory.ecc_corrected mc=mc0": 7, "host.dimm.corrected mc=mc0,dimm=dimm0": 7}),
        ({f"{MC0}/ue_count": "1\n"}, {"host.memory.ecc_uncorrected mc=mc0": 1}),
        ({"proc/sys/kernel/tainted": str(12289 | 1 << 4)},
         {"host.kernel.tainted": 12305, "host.kernel.machine_check": True}),
        ({"proc/sys/kernel/tainted": str(1 << 5)}, {"host.kernel.tainted": 32, "host.kernel.bad_page": True}),
        ({"proc/sys/kernel/tainted": str(1 << 7)}, {"host.kernel.tainted": 128, "host.kernel.oops": True}),
        ({"proc/sys/kernel/tainted": str(1 << 14)}, {"host.kernel.tainted": 16384, "host.kernel.soft_lockup": True}),
        ({"sys/module/nouveau/refcnt": "1\n"}, {"host.module.nouveau": True}),
        ({"sys/module/nvidia_peermem/refcnt": None}, {"host.module.peermem": False}),
        ({"sys/module/nvidia_peermem/refcnt": None, "sys/module/nv_peer_mem/refcnt": "0"}, {}),
        ({"proc/vmstat": "oom_kill 9\n"}, {"host.oom_kills": 9}),
        ({"proc/801/stat": None}, {"host.process.count": 3, "host.persistence_daemon": False}),
        ({"sys/devices/system/cpu/cpufreq/policy3/scaling_governor": "powersave\n"},
         {"host.cpu.governor": "performance,powersave"}),
        ({"sys/devices/system/cpu/cpufreq/policy1/scaling_max_freq": "1200000\n"}, {"host.cpu.clock_allowed": 1200000000}),
        ({"sys/devices/system/cpu/cpu3/topology/thread_siblings_list": None,
          "sys/devices/system/cpu/cpu3/topology/physical_package_id": None}, {"host.cpu.threads": 3}),
        ({"proc/interrupts": " MCE:   1   1  1 1  Machine check exceptions\n"}, {"host.machine_checks": 4}),
        ({"proc/sys/kernel/random/boot_id": None}, {"host.boot_id": Absent(
            status="unsupported", reason="no /proc/sys/kernel/random/boot_id")}),
        ({"sys/class/dmi/id/product_serial": "To Be Filled By O.E.M.\n"},
         {"host.system.serial": Absent(
             status="unsupported",
             reason="/sys/class/dmi/id/product_serial: placeholder in the firmware: 'To Be Filled By O.E.M.'")}),
    ],
)  # fmt: skip
def test_changed_file_affects_only_its_readings(
    tmp_path: Path, healthy: Readings, files: Mapping[str, str | None], change: Readings
) -> None:
    assert changed(healthy, readings(host.build_tree(tmp_path, files=files), full_snapshot=True)) == change


@pytest.mark.parametrize(
    ("file", "text", "reasons"),
    [
        (
            "meminfo",
            "MemTotal:  lots\n",
            {
                "host.memory.total": "/proc/meminfo: no MemTotal",
                "host.memory.available": "/proc/meminfo: no MemAvailable",
            },
        ),
        ("cpuinfo", "processor\t: 0\n", {"host.cpu.model": "/proc/cpuinfo: no processor model"}),
        ("loadavg", "", {"host.load": "/proc/loadavg: list index out of range"}),
        ("loadavg", "busy\n", {"host.load": "/proc/loadavg: could not convert string to float: 'busy'"}),
        ("uptime", "\n", {"host.uptime": "/proc/uptime: list index out of range"}),
        ("osrelease", None, {"host.kernel_version": "/proc/sys/kernel/osrelease: No such file or directory"}),
    ],
)
def test_invalid_or_missing_file_affects_only_its_readings(
    tmp_path: Path, file: str, text: str | None, reasons: dict[str, str]
) -> None:
    values = readings(host.build_tree(tmp_path, **{file: text}))
    wrong = {
        name: value.reason for name, value in values.items() if isinstance(value, Absent) and value.status == "error"
    }
    assert wrong == reasons


@pytest.mark.parametrize("text", ["", "many\n"])
def test_invalid_count_is_an_error(tmp_path: Path, healthy: Readings, text: str) -> None:
    values = changed(healthy, readings(host.build_tree(tmp_path, files={f"{MC0}/ue_count": text}), full_snapshot=True))
    assert list(values) == ["host.memory.ecc_uncorrected mc=mc0"]
    absent = values["host.memory.ecc_uncorrected mc=mc0"]
    assert isinstance(absent, Absent)
    assert absent.status == "error"


OF_MEMORY = ("host.memory.total", "host.memory.available", "host.memory.usable_share", "host.numa.")


def memory_readings(root: Path, files: Mapping[str, str | None]) -> Readings:
    values = readings(host.build_tree(root, files=files), full_snapshot=True)
    return {name: value for name, value in values.items() if name.startswith(OF_MEMORY)}


def test_memory_of_a_grace_host_is_the_same_in_both_modes_of_the_driver(tmp_path: Path) -> None:
    observed = {mode: memory_readings(tmp_path / mode, host.grace_files(mode)) for mode in ("numa", "driver")}
    assert observed["numa"] == observed["driver"]
    node, free = host.GRACE_NODE_KB * 1024, (host.GRACE_NODE_KB - 4_000_000) * 1024
    assert observed["numa"] == observed["numa"] | {
        "host.memory.total": 2 * node,
        "host.memory.available": 2 * free,
        "host.numa.count": 2,
        **{f"host.numa.memory_total numa={number}": node for number in (0, 1)},
        **{f"host.numa.memory_free numa={number}": free for number in (0, 1)},
        **{f"host.numa.processors numa={number}": 72 for number in (0, 1)},
    }


@pytest.mark.parametrize(
    ("files", "nodes"),
    [
        ({}, {0, 1}),
        # Before the driver adds the memory of a GPU to a NUMA node, the driver reports -1, and the node is empty.
        ({f"proc/driver/nvidia/gpus/{address}/numa_status": "Node:      -1\nStatus:    offline\n" for address in host.GPU_NODES}
         | {f"sys/devices/system/node/node{number}/meminfo": f"Node {number} MemTotal:       0 kB\n"
            for number in host.GPU_NODES.values()}, {0, 1}),
        # A GPU that uses the memory of its processor, as in DGX Spark: this memory belongs to the host too.
        ({"proc/driver/nvidia/gpus/0008:01:00.0/numa_status": "Node:      1\nStatus:    online\n"}, {0, 1, 2}),
        # A node counts as memory of the host unless it is known to be GPU memory. It may be a CXL memory module.
        ({"proc/driver/nvidia/gpus/0009:01:00.0/numa_status": None}, {0, 1, 10}),
        ({"proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "?\n"}, {0, 1, 10}),
        ({"sys/devices/system/node/node10/cpulist": None}, {0, 1, 10}),
        # A processor without memory: its modules have failed.
        ({"sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       0 kB\n"}, {0, 1}),
    ],
)  # fmt: skip
def test_only_gpu_memory_and_empty_nodes_without_processors_are_left_out(
    tmp_path: Path, files: Mapping[str, str | None], nodes: set[int]
) -> None:
    values = memory_readings(tmp_path, {**host.grace_files("numa"), **files})
    assert values["host.numa.count"] == len(nodes)
    listed = {int(name.partition("=")[2]) for name in values if name.startswith("host.numa.memory_total ")}
    assert listed == nodes


def test_memory_of_the_host_is_unknown_if_that_of_a_gpu_cannot_be_read(tmp_path: Path) -> None:
    values = memory_readings(tmp_path, host.grace_files("numa") | {"sys/devices/system/node/node2/meminfo": "?\n"})
    for name in ("host.memory.total", "host.memory.available", "host.memory.usable_share"):
        assert isinstance(values[name], Absent), name


@pytest.mark.parametrize(
    ("failures", "is_of_gpus"),
    [
        ({0: 0, 1: 0, 2: 3}, True),
        ({0: 0, 1: 0, 2: 1, 10: 2}, True),
        ({0: 0, 1: 0, 2: 2}, False),  # the counts of the nodes lack pages with corrected errors
        ({0: 0, 1: 1, 2: 2}, False),
        ({0: 3, 1: 0, 2: 0}, False),
        ({0: 0, 2: 3}, False),  # node 1 does not report it
        ({}, False),  # before Linux 6.3
    ],
)
def test_poisoned_memory_of_a_gpu_is_not_memory_of_the_host(
    tmp_path: Path, failures: Mapping[int, int], is_of_gpus: bool
) -> None:
    """`failures`: NUMA node -> number of its pages that the kernel took out of use. Nodes 2 and 10 are memory of GPUs."""
    files = host.grace_files("numa")
    poisoned = 3 * resource.getpagesize()
    meminfo = str(files["proc/meminfo"]) + f"HardwareCorrupted: {poisoned // 1024} kB\n"
    nodes = {
        f"sys/devices/system/node/node{node}/memory_failure/total": f"{number}\n" for node, number in failures.items()
    }
    tree = host.build_tree(tmp_path, files=files | nodes | {"proc/meminfo": meminfo})
    assert readings(tree)["host.memory.poisoned"] == (0 if is_of_gpus else poisoned)


def test_missing_hardware_of_a_minimal_host_is_not_an_error(tmp_path: Path) -> None:
    values = readings(host.build_minimal_tree(tmp_path), full_snapshot=True)
    assert [name for name, value in values.items() if isinstance(value, Absent) and value.status == "error"] == []
    for name in (
        "host.memory.ecc_uncorrected", "host.dimm.corrected", "host.numa.count", "host.cpu.governor", "host.cpu.sockets",
        "host.system.serial", "host.oom_kills", "host.kernel.machine_check", "host.persistence_daemon", "host.cpu.smt",
    ):  # fmt: skip
        value = values[name]
        assert isinstance(value, Absent), name
        assert value.reason, name


POLICY = "sys/devices/system/cpu/cpufreq/policy"
CLOCKS = ("host.cpu.governor", "host.cpu.clock_allowed", "host.cpu.clock_max")


def refuse(monkeypatch: pytest.MonkeyPatch, root: Path, policies: Iterable[int], number: int) -> None:
    """Let every attempt to open a file of these cpufreq policies fail with an error number."""
    refused = tuple(f"{root}/{POLICY}{policy}/" for policy in policies)
    open_file = os.open

    def opened(path: str, *arguments: Any, **options: Any) -> int:
        if str(path).startswith(refused):
            raise OSError(number, os.strerror(number))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", opened)


@pytest.mark.parametrize("offline", [{3}, {0}, {1, 2, 3}], ids=str)
def test_cpufreq_policies_without_an_online_processor_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healthy: Readings, offline: set[int]
) -> None:
    root = host.build_tree(tmp_path)
    refuse(monkeypatch, root, offline, errno.EBUSY)
    observed = readings(root, full_snapshot=True)
    assert {name: observed[name] for name in CLOCKS} == {name: healthy[name] for name in CLOCKS}


@pytest.mark.parametrize("offline", [{3}, {0}, {1, 2, 3}], ids=str)
def test_cpufreq_policies_without_an_online_processor_are_left_out_with_older_kernels(
    tmp_path: Path, healthy: Readings, offline: set[int]
) -> None:
    """Their file `affected_cpus` is empty, and the kernel refuses to read the governor, here by a missing file."""
    files = {f"{POLICY}{policy}/affected_cpus": "\n" for policy in offline}
    files |= {f"{POLICY}{policy}/scaling_max_freq": "800000\n" for policy in offline}
    without = {f"{POLICY}{policy}/scaling_governor": None for policy in offline}
    observed = readings(host.build_tree(tmp_path, files=files | without), full_snapshot=True)
    assert {name: observed[name] for name in CLOCKS} == {name: healthy[name] for name in CLOCKS}


@pytest.mark.parametrize(
    ("policies", "number", "reason"),
    [
        ({0, 1, 2, 3}, errno.EBUSY, "no policy has an online processor"),
        ({2}, errno.EIO, "Input/output error"),
        ({2}, errno.EACCES, "Permission denied"),
    ],
    ids=["all are offline", "input/output error", "no permission"],
)
def test_clocks_are_an_error_if_a_policy_of_an_online_processor_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policies: set[int], number: int, reason: str
) -> None:
    root = host.build_tree(tmp_path)
    refuse(monkeypatch, root, policies, number)
    observed = readings(root, full_snapshot=True)
    for name in CLOCKS:
        value = observed[name]
        assert isinstance(value, Absent), name
        assert (value.status, reason in value.reason) == ("error", True)


def test_invalid_utf8_is_replaced(tmp_path: Path) -> None:
    host.build_tree(tmp_path)
    (tmp_path / "proc/cpuinfo").write_bytes(b"model name\t: \xff\xfe CPU\n")
    assert readings(tmp_path)["host.cpu.model"] == "\ufffd\ufffd CPU"


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_only_nvidia_gpus_are_counted(tmp_path: Path, gpus: int) -> None:
    assert readings(host.build_tree(tmp_path, gpus=gpus))["gpu.pci_count"] == gpus


def test_host_without_sys_and_proc_reports_errors(tmp_path: Path) -> None:
    values = readings(tmp_path, full_snapshot=True)
    assert [name for name, value in values.items() if not isinstance(value, Absent)] == [
        "host.cpu.count",
        "host.cpu.usable",
    ]
    unsupported = {
        name for name, value in values.items() if isinstance(value, Absent) and value.status == "unsupported"
    }
    assert unsupported == {"host.persistence_daemon"}  # because the NVIDIA driver is not loaded


def test_cpu_model_is_read_once(tmp_path: Path) -> None:
    collector = HostCollector(host.build_tree(tmp_path))
    first = list(collector.collect())
    (tmp_path / "proc/cpuinfo").unlink()
    assert list(collector.collect()) == first


def test_local_machine_has_no_errors() -> None:
    values = readings(Path("/"), full_snapshot=True)
    wrong = {name: value for name, value in values.items() if isinstance(value, Absent) and value.status == "error"}
    wrong.pop("gpu.pci_count", None)  # a container may have no PCI bus
    if os.geteuid():
        wrong.pop("host.system.serial", None)  # only root may read the serial number
    assert wrong == {}


X86, X86_GUEST, ARM = "flags\t: fpu mce", "flags\t: fpu hypervisor mce", "Features\t: fp asimd"


@pytest.mark.parametrize(
    ("flags", "product", "vendor", "virtual"),
    [
        (X86_GUEST, "Standard PC", "QEMU", True),
        (X86_GUEST, "p5.48xlarge", "Amazon EC2", True),
        (X86, "KVM Virtual Machine", "QEMU", False),
        (X86, "p5.metal", "Amazon EC2", False),
        (ARM, "KVM Virtual Machine", "QEMU", True),
        (ARM, "virt-9.2", "QEMU", True),
        (ARM, "p6e-gb200.36xlarge", "Amazon EC2", True),
        (ARM, "c7g.metal", "Amazon EC2", None),
        (ARM, "m8g.metal-24xl", "Amazon EC2", None),
        (ARM, "", "Amazon EC2", None),
        (ARM, "OpenStack Nova", "OpenStack Foundation", True),
        (ARM, "OpenStack Compute", "Red Hat", True),
        (ARM, "Server", "RDO OpenStack Foundation", True),
        (ARM, "Google Compute Engine", "Google", True),
        (ARM, "Virtual Machine", "Microsoft Corporation", True),
        (ARM, "VMware20,1", "VMware, Inc.", True),
        (ARM, "HVM domU", "Xen", True),
        (ARM, "None", "KubeVirt", True),
        (ARM, "cloud-hypervisor", "Cloud Hypervisor", True),
        (ARM, "GB200 NVL", "NVIDIA", None),
        (ARM, "DEVCUBE", "XENON Systems Pty Ltd", None),
        (ARM, "ARS-111GL-NHR", "Supermicro", None),
    ],
)
def test_virtual_machine_is_detected_by_cpu_flag_or_else_by_product_and_vendor(
    tmp_path: Path, flags: str, product: str, vendor: str, virtual: bool | None
) -> None:
    """Product and vendor are used only on ARM, whose processors have no such flag. `virtual`: None if it is unsupported."""
    files = {
        "proc/cpuinfo": f"model name\t: A CPU\n{flags}\n",
        "sys/class/dmi/id/product_name": f"{product}\n",
        "sys/class/dmi/id/sys_vendor": f"{vendor}\n",
    }
    value = readings(host.build_tree(tmp_path, files=files))["host.virtual_machine"]
    assert value == virtual if virtual is not None else isinstance(value, Absent) and value.status == "unsupported"


# ---- parsers ----


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("model name\t: AMD EPYC 9654 96-Core Processor\nmodel name\t: other\n", "AMD EPYC 9654 96-Core Processor"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "0x41"),
        ("Processor\t: ARMv8\n", "ARMv8"),
    ],
)
def test_cpu_model_is_read_for_x86_and_arm(text: str, model: str) -> None:
    assert cpu_model(text) == model


@pytest.mark.parametrize("text", ["", "model name\n", "my model name: x\n"])
def test_missing_cpu_model_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="no processor model"):
        cpu_model(text)


def test_load_average_is_that_of_one_minute() -> None:
    assert load_average("0.05 0.10 0.20 1/200 4711\n") == 0.05


@pytest.mark.parametrize(("key", "value"), [("MemTotal", 64 * GIB), ("MemAvailable", 32 * GIB)])
def test_meminfo_is_in_bytes(key: str, value: int) -> None:
    assert meminfo("MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n", key) == value


@pytest.mark.parametrize("text", ["", "MemTotal: 1 MB\n", "MemTotal: -1 kB\n", "MemTotals: 1 kB\n"])
def test_invalid_meminfo_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="no MemTotal"):
        meminfo(text, "MemTotal")


def test_unit_and_numa_node_are_optional_in_meminfo() -> None:
    assert optional_meminfo("HugePages_Total:    12\n", "HugePages_Total") == 12
    assert optional_meminfo("Node 3 MemFree:  2 kB\n", "MemFree") == 2048


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("BOOT_IMAGE=/vmlinuz root=UUID=1 ro quiet", "ro quiet"),
        ("rd.luks.uuid=5 rd.lvm.lv=vg/root resume=/dev/sda2 ip=10.0.0.7::::host7 nomodeset", "nomodeset"),
        ("ro systemd.machine_id=77 my.password=hunter2 API_TOKEN=x pci=nocrs", "ro pci=nocrs"),
        ("quiet -- --listen 10.0.0.1", "quiet"),
    ],
)
def test_host_specific_options_and_secrets_are_removed(text: str, shared: str) -> None:
    assert shared_options(text) == shared


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("ro amd_iommu=off quiet", "amd_iommu=off"),
        ("iommu.passthrough=1 arm-smmu-v3.disable_bypass=0", "iommu.passthrough=1 arm-smmu-v3.disable_bypass=0"),
        ("ro iommufoo quiet", "default"),
    ],
)
def test_iommu_options_are_taken_from_the_command_line(text: str, options: str) -> None:
    assert iommu_options(text) == options


def test_soft_limit_is_a_number_or_none_if_unlimited() -> None:
    text = "Max locked memory  8388608  unlimited  bytes\nMax open files   unlimited  unlimited files\n"
    assert soft_limit(text, "Max locked memory") == 8388608
    assert soft_limit(text, "Max open files") is None
    with pytest.raises(MissingError):
        soft_limit(text, "Max stack size")


def test_interrupts_are_summed_over_cpus() -> None:
    text = "   CPU0 CPU1\n MCE:    2    1   Machine check exceptions\nXMCE:  5 5\n"
    assert interrupts(text, "MCE") == 3


def test_stalled_share_is_a_ratio() -> None:
    assert (
        stalled_share("some avg10=12.50 avg60=0 avg300=0 total=1\nfull avg10=99.00 avg60=0 avg300=0 total=1\n") == 0.125
    )


def test_choice_in_brackets_is_read() -> None:
    assert bracketed_choice("always madvise [never]\n") == "never"


@pytest.mark.parametrize(
    ("text", "values"),
    [("1 (systemd) S 0 1", ("systemd", "S")), ("7 (a) b (c)) D 1 7", ("a) b (c)", "D"))],
)
def test_process_name_may_contain_parentheses(text: str, values: tuple[str, str]) -> None:
    assert process_state(text) == values


@pytest.mark.parametrize(
    "text", ["Default string", "Not Specified", "None", "0000000", "System Serial Number", " ", "N/A"]
)
def test_placeholder_firmware_text_is_missing(text: str) -> None:
    with pytest.raises(MissingError):
        firmware_text(f"{text}\n")


def test_hypervisor_flag_is_read_and_cpu_without_flags_raises_an_error() -> None:
    assert has_hypervisor_flag("flags\t: vme hypervisor lm\n")
    assert not has_hypervisor_flag("flags\t: vme no_hypervisor_guard lm\n")
    with pytest.raises(MissingError):
        has_hypervisor_flag("Features\t: has_hypervisor_flag\n")


CONTAINER, JOB = "0::/\n", "0::/system.slice/job.scope\n"
VERSION_1 = "9:cpuset:/\n4:cpu,cpuacct:/slurm/job\n0::/init.scope\n"


@pytest.mark.parametrize(
    ("files", "usable"),
    [
        ({}, 8),
        ({"sys/devices/system/cpu/isolated": "\n"}, 8),
        ({"sys/devices/system/cpu/isolated": "2-5,7,64-127\n"}, 3),
        ({"sys/devices/system/cpu/isolated": "0-7\n"}, 1),
        ({"proc/self/cgroup": CONTAINER, "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": CONTAINER, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": CONTAINER, "sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 8),
        ({"proc/self/cgroup": CONTAINER, "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": JOB, "sys/fs/cgroup/system.slice/job.scope/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": JOB, "sys/fs/cgroup/system.slice/cpu.max": "400000 100000\n",
          "sys/fs/cgroup/system.slice/job.scope/cpu.max": "max 100000\n"}, 4),
        ({"proc/self/cgroup": JOB, "sys/fs/cgroup/user.slice/cpu.max": "100000 100000\n"}, 8),
        ({"proc/self/cgroup": VERSION_1, "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_quota_us": "500000\n",
          "sys/fs/cgroup/cpu,cpuacct/slurm/job/cpu.cfs_period_us": "100000\n"}, 5),
        ({"proc/self/cgroup": VERSION_1, "sys/fs/cgroup/cpu/slurm/job/cpu.cfs_quota_us": "-1\n",
          "sys/fs/cgroup/cpu/slurm/job/cpu.cfs_period_us": "100000\n"}, 8),
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": CONTAINER, "sys/fs/cgroup/cpu.max": "broken"}, 8),
    ],
)  # fmt: skip
def test_isolated_processors_and_cpu_quotas_limit_the_usable_processors(
    files: dict[str, str], usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert usable_processors(Files(tmp_path)) == usable


@pytest.mark.parametrize(
    ("text", "count"), [("0", 1), ("0-71", 72), ("0-55,112-167", 112), ("0-2,64", 4), ("3,5,7", 3), ("", 0)]
)
def test_processors_of_a_node_are_counted(text: str, count: int) -> None:
    assert length_of_cpu_list(text) == count


def test_node_whose_processors_cannot_be_read_has_the_reason(tmp_path: Path) -> None:
    files = {"sys/devices/system/node/node1/cpulist": "?\n"}
    values = readings(host.build_tree(tmp_path, files=files))
    assert values["host.numa.processors numa=0"] == 112
    assert isinstance(values["host.numa.processors numa=1"], Absent)
