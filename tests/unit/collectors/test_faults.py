"""Every fault fails exactly its own criteria, on a complete eight-GPU host, through the real collectors.

NVML answers through nvidia-ml-py from a stub library; /proc, /sys and /dev are a tree of files. Two snapshots are judged as those
of a run are. The last test says that no criterion on what collectors read is left without its fault.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent.diagnose.doctor import build_plan, judge_snapshots
from fleet.judge.criteria import Pack, read_pack, read_packs
from schemas.records import Gpu, Metric, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests.fakes import host, links, nvml, whole

Change = Callable[[Path], object]
THIRD = links.GPUS[3].removesuffix(".0")
"""GPU 3 as the kernel log spells it."""


def nothing(root: Path) -> None:
    """Change no file."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, and which criteria must fail."""

    name: str
    found_by: frozenset[str]
    nvml: tuple[str, ...] = ()
    """Lines over the healthy scenario, from the start."""
    nvml_later: tuple[str, ...] = ()
    """Lines that come between the two snapshots."""
    before: Change = nothing
    later: Change = nothing
    inconclusive: frozenset[str] = frozenset()
    """Criteria that become inconclusive, because the fault removes their readings."""
    scope: str = ""
    """Where every finding must be."""
    scopes: Mapping[str, str] = field(default_factory=dict)
    """Criterion -> where its one finding must be."""


def fault(name: str, found_by: str, **more: Any) -> Any:
    more["inconclusive"] = frozenset(more.get("inconclusive", "").split())
    return pytest.param(Fault(name=name, found_by=frozenset(found_by.split()), **more), id=name.replace(" ", "-"))


def text(path: str, content: str) -> Change:
    return lambda root: links.write(root, path, content)


@dataclass(frozen=True)
class Logged:
    """The kernel logs these messages."""

    messages: tuple[str, ...]

    def __call__(self, root: Path) -> None:
        whole.log(root, *self.messages)


def every(name: str, cases: dict[str, tuple[Logged, str]]) -> Any:
    """Return one fault from criterion -> logged messages, and the scope in which only that criterion fails."""
    messages = tuple(message for logged, _ in cases.values() for message in logged.messages)
    scopes = {criterion: scope for criterion, (_, scope) in cases.items()}
    return fault(name, " ".join(cases), before=Logged(messages), scopes=scopes)


def xid(code: int, more: str = "pid='<unknown>', name=<unknown>, something happened") -> Logged:
    return Logged((f"NVRM: Xid (PCI:{THIRD}): {code}, {more}",))


def sxid(code: int, severity: str) -> Logged:
    return Logged((f"nvidia-nvswitch1: SXid (PCI:{links.NVSWITCHES[1]}): {code}, {severity}",))


def smart(offset: int, value: int) -> Change:
    def change(root: Path) -> None:
        log = bytearray(whole.HEALTHY_LOG)
        log[offset] = value
        (root / whole.SMART).write_bytes(bytes(log))

    return change


def replaced(path: str, old: str, new: str) -> Change:
    def change(root: Path) -> None:
        content = (root / path).read_text()
        assert old in content, f"{path} has no {old}"
        links.write(root, path, content.replace(old, new))

    return change


def many(*changes: Change) -> Change:
    return lambda root: [change(root) for change in changes]


def narrow(root: Path) -> None:
    links.set_link(root, links.GPUS[3], "current", width=8)


def slow(root: Path) -> None:
    links.set_link(root, links.GPUS[3], "current", speed="8.0")


def acs(root: Path) -> None:
    links.set_acs(root, links.GPU_PORTS[3], links.ACS_KERNEL)


def aer(address: str, severity: str, total: int) -> Change:
    return lambda root: links.set_aer(root, address, severity, total)


def counted(counter: str, value: int) -> Change:
    return lambda root: links.set_counter(root, links.IB[2], counter, value)


def nic(path: str, content: str) -> Change:
    return lambda root: (links.interface(root, links.PLAIN_INTERFACE) / path).write_text(content)


def port(path: str, content: str) -> Change:
    return lambda root: (links.port(root, links.IB[2]) / path).write_text(content)


def gone(path: str) -> Change:
    return lambda root: shutil.rmtree(root / path)


def off_the_bus(root: Path) -> None:
    device = links.pci(root, links.GPUS[7])
    shutil.rmtree(device.resolve())
    device.unlink(missing_ok=True)


NEXT = "gpu.3."
FATAL = "RLW_SRC_TRACK Fatal XC0 i0 Link 03 (0x1 0x2 0x3 0x4 0x5 0x6)"
CODES: dict[str, list[int]] = {
    kind: [int(result[1]) for item in read_pack("xid").criteria if (result := re.fullmatch(pattern, item.id))]
    for kind, pattern in (("xid", r"xid-(\d+)"), ("fatal", r"xid-(\d+)-fatal"), ("sxid", r"sxid-(\d+)"))
}
"""Codes with criteria."""
MC = "sys/devices/system/edac/mc/mc0"
FAULTS = [
    # NVML
    fault("fell off the bus before the run", "gpu-count", nvml=("gpu.3.*=!15", "P2PStatus.3.*=!15"), inconclusive="*"),
    fault("missing in the driver", "gpu-count", nvml=("Count=7",), inconclusive="*"),
    fault("ecc switched off", "ecc-enabled", nvml=(f"{NEXT}EccMode=0 0",), scope="gpu=3"),
    fault("ecc about to change", "ecc-pending", nvml=(f"{NEXT}EccMode=1 0",), scope="gpu=3"),
    fault("uncorrectable error", "ecc-uncorrectable-volatile", nvml=(f"{NEXT}TotalEccErrors.1.0=1",), scope="gpu=3"),
    fault(
        "many uncorrectable errors in sram",
        "ecc-sram-uncorrectable-aggregate",
        nvml=(f"{NEXT}MemoryErrorCounter.1.1.7=5",),
        scope="gpu=3",
    ),
    fault("sram over its threshold", "ecc-sram-threshold", nvml=(f"{NEXT}SramEccErrorStatus=1",), scope="gpu=3"),
    fault("row remapping waits", "row-remap-pending", nvml=(f"{NEXT}RemappedRows=0 1 1 0",), scope="gpu=3"),
    fault("row remapping failed", "row-remap-failed", nvml=(f"{NEXT}RemappedRows=0 1 0 1",), scope="gpu=3"),
    fault("512 rows remapped", "row-remap-uncorrectable", nvml=(f"{NEXT}RemappedRows=0 512 0 0",), scope="gpu=3"),
    fault("bank without spare rows", "row-remap-spare", nvml=(f"{NEXT}RowRemapperHistogram=2559 0 0 0 1",), scope="gpu=3"),
    fault("memory beyond repair", "memory-unrepairable", nvml=(f"{NEXT}UnrepairableMemoryFlag_v1=1",), scope="gpu=3"),
    fault("channel repair waits", "channel-repair-pending", nvml=(f"{NEXT}RepairStatus=1 0",), scope="gpu=3"),
    fault("cluster repair waits", "tpc-repair-pending", nvml=(f"{NEXT}RepairStatus=0 1",), scope="gpu=3"),
    fault(
        "inforom corrupt",
        "inforom-valid",
        nvml=(f"{NEXT}ValidateInforom=!14", f"{NEXT}InforomConfigurationChecksum=!14"),
        scope="gpu=3",
    ),
    fault("driver asks for a reset", "recovery-action", nvml=(f"{NEXT}FieldValues.230=1",), scope="gpu=3"),
    fault(
        "thermal slowdown by hardware",
        "thermal-slowdown",
        nvml=(f"{NEXT}CurrentClocksEventReasons=0x48", f"{NEXT}CurrentClocksThrottleReasons=0x48"),
        scope="gpu=3,reason=hw_thermal",
    ),
    fault(
        "thermal slowdown by software",
        "software-thermal-slowdown",
        nvml=(f"{NEXT}CurrentClocksEventReasons=0x20", f"{NEXT}CurrentClocksThrottleReasons=0x20"),
        scope="gpu=3,reason=sw_thermal",
    ),
    fault(
        "power brake",
        "power-brake",
        nvml=(f"{NEXT}CurrentClocksEventReasons=0x88", f"{NEXT}CurrentClocksThrottleReasons=0x88"),
        scope="gpu=3,reason=hw_power_brake",
    ),
    fault("hot between two looks", "hw-thermal-time", nvml_later=(f"{NEXT}FieldValues.270=2000000000 3",)),
    fault("warm between two looks", "sw-thermal-time", nvml_later=(f"{NEXT}FieldValues.269=2000000000 3",)),
    fault("braked between two looks", "power-brake-time", nvml_later=(f"{NEXT}FieldValues.271=2000000000 3",)),
    fault(
        "power limit lowered",
        "power-limit-lowered",
        nvml=(f"{NEXT}PowerManagementLimit=500000", f"{NEXT}EnforcedPowerLimit=500000"),
        scope="gpu=3",
    ),
    fault("mig on", "mig-off", nvml=(f"{NEXT}MigMode=1 1",), scope="gpu=3"),
    fault("mig about to change", "mig-pending", nvml=(f"{NEXT}MigMode=0 1",), scope="gpu=3"),
    fault("gpu for one process alone", "compute-mode", nvml=(f"{NEXT}ComputeMode=3",), scope="gpu=3"),
    fault("pcie replays", "pcie-replay", nvml_later=(f"{NEXT}PcieReplayCounter=32",), scope="gpu=3"),
    fault("nvlink down", "nvlink-active nvlink-missing nvlink-vs-fleet", nvml=(f"{NEXT}NvLinkState.11=0",), scope="gpu=3"),
    fault("nvlink replays", "nvlink-replays", nvml_later=(f"{NEXT}NvLinkErrorCounter.*.0=1",)),
    fault("nvlink recoveries", "nvlink-recoveries", nvml_later=(f"{NEXT}NvLinkErrorCounter.*.1=1",)),
    fault("nvlink crc errors", "nvlink-crc", nvml_later=(f"{NEXT}NvLinkErrorCounter.*.2=7000",)),
    fault("fabric not ready", "fabric-state", nvml=(f"{NEXT}GpuFabricInfoV=2 0 0 0x11aa",), scope="gpu=3"),
    fault("fabric degraded", "fabric-bandwidth", nvml=(f"{NEXT}GpuFabricInfoV=3 0 0 0x11a9",), scope="gpu=3"),
    fault("fabric recovers a route", "fabric-route-recovery", nvml=(f"{NEXT}GpuFabricInfoV=3 0 0 0x11a6",), scope="gpu=3"),
    fault("fabric route unhealthy", "fabric-route", nvml=(f"{NEXT}GpuFabricInfoV=3 0 0 0x119a",), scope="gpu=3"),
    fault("fabric access timed out", "fabric-access-timeout", nvml=(f"{NEXT}GpuFabricInfoV=3 0 0 0x116a",), scope="gpu=3"),
    fault("fabric configured wrongly", "fabric-configuration", nvml=(f"{NEXT}GpuFabricInfoV=3 0 0 0x12aa",), scope="gpu=3"),
    fault("sram corrects all the time", "ecc-sram-corrected", nvml=(f"{NEXT}MemoryErrorCounter.0.1.7=10001",), scope="gpu=3"),
    fault("dram corrects all the time", "ecc-dram-corrected", nvml=(f"{NEXT}MemoryErrorCounter.0.1.2=20000001",), scope="gpu=3"),
    fault("clocks lowered", "clocks-lowered", nvml=(f"{NEXT}ApplicationsClock.0=1200",), scope="gpu=3"),
    fault("page retires at the next reset", "retired-pages-pending", nvml=(f"{NEXT}RetiredPagesPendingStatus=1",), scope="gpu=3"),
    fault(
        "hot between two looks, older driver",
        "thermal-time",
        nvml=("FieldValues.269=!3", "FieldValues.27[01]=!3"),
        nvml_later=(f"{NEXT}FieldValues.75=2000000000 3",),
    ),
    fault(
        "nvlink 5 does not recover",
        "nvlink-failed-recoveries",
        nvml=("FieldValues.214=0 3",),
        nvml_later=(f"{NEXT}FieldValues.214=1 3",),
    ),
    # the kernel log
    every("each xid", {f"xid-{code}": (xid(code), f"gpu=3,xid={code}") for code in CODES["xid"]}),
    every("each fatal xid", {f"xid-{code}-fatal": (xid(code, FATAL), f"gpu=3,xid={code}") for code in CODES["fatal"]}),
    every(
        "each sxid",
        {
            f"sxid-{code}": (
                sxid(code, "Thermal alert"),
                f"pci={links.NVSWITCHES[1]},fatal=unsaid,sxid={code}",
            )
            for code in CODES["sxid"]
        },
    ),
    fault("xid during the run", "xid-during-run", later=xid(31), scope="host"),
    fault("xid 94 during the run", "xid-during-run", later=xid(94), scope="host"),
    fault("fatal sxid", "sxid-fatal", before=sxid(20034, "Fatal, Link 30 LTSSM Fault Up")),
    # the host
    fault("gone from the pci bus", "gpu-pci-count", before=off_the_bus, inconclusive="*"),
    fault("no fabric manager", "fabric-manager-missing", before=lambda root: shutil.rmtree(root / "proc/900")),
    fault(
        "fabric manager of another version",
        "fabric-manager-matches",
        before=lambda root: host.program(root / "usr/bin/nv-fabricmanager", "printf 'Fabric Manager version is : 570.10\\n'"),
    ),
    fault("uncorrected memory error", "host-memory-uncorrected", before=text(f"{MC}/ue_count", "1\n")),
    fault("corrected memory errors", "host-memory-corrected", later=text(f"{MC}/dimm1/dimm_ce_count", "11\n")),
    fault("poisoned memory", "host-memory-poisoned", before=replaced("proc/meminfo", "Corrupted:     0", "Corrupted:     4")),
    fault("machine check", "host-machine-check", before=text("proc/sys/kernel/tainted", f"{12289 | 1 << 4}\n")),
    fault("bad page", "host-bad-page", before=text("proc/sys/kernel/tainted", f"{12289 | 1 << 5}\n")),
    fault("kernel oops", "host-kernel-oops", before=text("proc/sys/kernel/tainted", f"{12289 | 1 << 7}\n")),
    fault("nouveau loaded", "nouveau-absent", before=text("sys/module/nouveau/refcnt", "0\n")),
    fault(
        "driver updated without a reboot",
        "driver-library-matches fabric-manager-matches container-cdi-current",
        before=many(
            text("sys/module/nvidia/version", "570.10\n"), replaced("proc/driver/nvidia/version", host.DRIVER, "570.10")
        ),
    ),
    fault("stale cdi", "container-cdi-current", before=replaced("var/run/cdi/nvidia.yaml", host.DRIVER, "570.10")),
    fault("file system errors", "file-system-errors", before=text("sys/fs/ext4/md0/errors_count", "3\n")),
    fault("array degraded", "disk-array-complete", before=text("sys/block/md0/md/degraded", "1\n")),
    fault("disk lost", "disk-lost", later=gone("sys/block/nvme1n1"), inconclusive="*"),
    fault("root read-only", "state-writable", before=replaced("proc/self/mountinfo", "/ / rw,relatime", "/ / ro,relatime")),
    fault("disk offline", "disk-online", before=text("sys/block/nvme1n1/device/state", "dead\n")),
    fault("disk warns", "nvme-critical-warning", before=smart(0, 4)),
    fault("disk worn", "nvme-endurance", before=smart(5, 101)),
    fault("disk loses data", "nvme-media-errors", later=smart(160, 1)),
    fault("clock kept by nobody", "clock-synchronized", before=text(whole.CLOCK, "16.0")),
    # its links
    fault("pcie narrowed", "pcie-link-narrowed pcie-width", nvml=(f"{NEXT}CurrPcieLinkWidth=8",), before=narrow),
    fault("pcie slowed", "pcie-link-slowed pcie-generation", nvml=(f"{NEXT}CurrPcieLinkGeneration=3",), before=slow),
    fault("aer fatal", "pcie-aer-fatal", later=aer(links.GPUS[3], "fatal", 1), scope="gpu=3"),
    fault("aer nonfatal", "pcie-aer-nonfatal", later=aer(links.GPUS[3], "nonfatal", 1), scope="gpu=3"),
    fault("aer correctable", "pcie-aer-correctable", later=aer(links.GPUS[3], "correctable", 32), scope="gpu=3"),
    fault("port aer fatal", "pcie-port-aer-fatal", later=aer(links.GPU_PORTS[3], "fatal", 1), scope="gpu=3"),
    fault("port aer nonfatal", "pcie-port-aer-nonfatal", later=aer(links.GPU_PORTS[3], "nonfatal", 1), scope="gpu=3"),
    fault("port aer correctable", "pcie-port-aer-correctable", later=aer(links.GPU_PORTS[3], "correctable", 32), scope="gpu=3"),
    fault("acs redirects", "pcie-acs-redirected", before=acs, scope="gpu=3"),
    fault("infiniband link went down", "infiniband-link-downed", later=counted("link_downed", 1)),
    fault("infiniband link recovered", "infiniband-link-recovery", later=counted("link_error_recovery", 6)),
    fault("infiniband symbol errors", "infiniband-symbol-error", later=counted("symbol_error", 121)),
    fault("infiniband receive errors", "infiniband-receive-errors", later=counted("port_rcv_errors", 11)),
    fault("infiniband link integrity", "infiniband-link-integrity", later=counted("local_link_integrity_errors", 1)),
    fault("infiniband buffer overrun", "infiniband-buffer-overrun", later=counted("excessive_buffer_overrun_errors", 1)),
    fault("infiniband without subnet manager", "infiniband-unmanaged", before=port("state", "2: INIT\n")),
    fault("infiniband narrowed", "infiniband-narrowed", before=port("rate", "100 Gb/sec (1X NDR)\n")),
    fault("carrier lost for a moment", "network-carrier-changes", later=nic("carrier_changes", "4\n")),
    fault("ethernet crc errors", "network-crc-errors", later=nic("statistics/rx_crc_errors", "1\n")),
    fault("ethernet receive errors", "network-receive-errors", later=nic("statistics/rx_errors", "101\n")),
    fault("half duplex", "network-half-duplex", before=nic("duplex", "half\n")),
]  # fmt: skip


@dataclass(kw_only=True)
class Machine:
    """The host, and the program that takes its snapshots."""

    root: Path
    scenario: Path
    program: subprocess.Popen[str]
    spoiled: bool = True
    """More than the kernel log has changed."""
    well: tuple[Snapshot, list[Gpu]] | None = None
    """Snapshot of the healthy host, shared by all faults that come later."""

    def judged(self, of: Fault, packs: tuple[Pack, ...]) -> list[Verdict]:
        """Build the host with the fault, take two snapshots if anything changes in between, and judge them."""
        if self.spoiled:
            shutil.rmtree(self.root, ignore_errors=True)
            self.root.mkdir()
            whole.tree(self.root)
        links.write(self.root, "dev/kmsg", whole.BOOTED)
        self.spoiled = not all(change is nothing or isinstance(change, Logged) for change in (of.before, of.later))
        nvml.write(self.scenario, "healthy-h100x8", *whole.NVML, *of.nvml)
        of.before(self.root)
        well = of.before is nothing and not of.nvml
        first, gpus = self._well() if well else self._snapshot("before")
        if well or of.later is not nothing or of.nvml_later:
            nvml.write(self.scenario, "healthy-h100x8", *whole.NVML, *of.nvml, *of.nvml_later)
            of.later(self.root)
            second, gpus = self._snapshot("after")
        else:
            second = replace(first, phase="after")
        return judge_snapshots(build_plan("h1", 8, first.at), (first, second), gpus, packs)

    def _well(self) -> tuple[Snapshot, list[Gpu]]:
        if self.well is None:
            self.well = self._snapshot("before")
        return self.well

    def _snapshot(self, phase: str) -> tuple[Snapshot, list[Gpu]]:
        assert self.program.stdin
        assert self.program.stdout
        self.program.stdin.write(f"{phase}\n")
        self.program.stdin.flush()
        result = json.loads(self.program.stdout.readline())
        metrics = tuple(Metric(**metric) for metric in result["snapshot"]["metrics"])
        return Snapshot(**{**result["snapshot"], "metrics": metrics}), [Gpu(**gpu) for gpu in result["gpus"]]


@pytest.fixture(scope="module")
def packs() -> tuple[Pack, ...]:
    return read_packs([])


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        library = nvml.build(tmp_path_factory.mktemp("nvml"))
        scenario = nvml.write(Path(folder) / "scenario", "healthy-h100x8", *whole.NVML)
        with subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.whole", f"{folder}/root"],
            env={**os.environ, **nvml.environment(library, scenario)},
            cwd=nvml.CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            yield Machine(root=Path(folder) / "root", scenario=scenario, program=program)
            program.communicate(timeout=30)


def test_healthy_host_passes(machine: Machine, packs: tuple[Pack, ...]) -> None:
    result = machine.judged(Fault(name="none", found_by=frozenset()), packs)
    assert [(one.criterion, one.scope, one.reason) for one in result if one.verdict != PASS] == []
    assert len(result) > 1000


@pytest.mark.parametrize("of", FAULTS)
def test_fault_fails_exactly_its_criteria(machine: Machine, packs: tuple[Pack, ...], of: Fault) -> None:
    result = machine.judged(of, packs)
    failed = [one for one in result if one.verdict == FAIL]
    assert {one.criterion for one in failed} == of.found_by, [(one.criterion, one.scope, one.reason) for one in failed]
    assert all(one.action != "none" for one in failed)
    if of.scope:
        assert {one.scope for one in failed} == {of.scope}
    if of.scopes:
        assert sorted((one.criterion, one.scope) for one in failed) == sorted(of.scopes.items())
    inconclusive = {(one.criterion, one.reason) for one in result if one.verdict == INCONCLUSIVE}
    assert not inconclusive or of.inconclusive, inconclusive


ELSEWHERE = {
    "retired-pages": "parts before Ampere alone have such pages",
    "c2c-links": "Grace alone has such links",
}
"""Criteria on readings that this host cannot have -> why."""


def test_every_criterion_on_readings_has_a_fault() -> None:
    shown = {criterion for of in FAULTS for criterion in of.values[0].found_by}
    common = ("gpu-health", "host-health", "link-health", "xid")
    asked = {item.id for item in read_pack("h100-sxm").criteria if item.origin in common}
    assert asked - shown == set(ELSEWHERE)
    assert len(FAULTS) >= 40
