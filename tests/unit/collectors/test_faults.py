"""Inject faults into a simulated eight-GPU host and check that exactly the expected criteria fail.

The real collectors read the host. NVML is a stub library behind nvidia-ml-py; /proc, /sys and /dev are a tree of files.
In each run, two snapshots of the host are taken and judged. To save time, faults of different parts share a run.
The last test requires a fault for every criterion of the packs for GPUs, hosts, links, optics and XIDs, unless this host cannot
have the criterion's reading.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agent.diagnose.doctor import build_plan, judge_snapshots
from fleet.judge.criteria import Pack, read_pack, read_packs
from schemas.records import Gpu, Metric, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from schemas.times import utc_now
from tests.fakes import dmi, host, links, nvml, optics, whole

Change = Callable[[Path], object]
"""Function that changes the files of the host under the given root.

The docstring of a function that returns a Change describes what the Change does.
"""
GpuChange = Callable[[Path, int], object]
"""Function that changes the files of one GPU. Arguments: root of the host, number of the GPU."""
PortChange = Callable[[Path, str], object]
"""Function that changes the files of one InfiniBand port. Arguments: root of the host, name of the adapter."""
SLOTS = dmi.slots()
"""Slots for memory modules of the healthy host."""
GPU_3_LOG_ADDRESS = links.GPUS[3].removesuffix(".0")
"""PCI address of GPU 3 as in an XID message, without the function number."""


def no_change(root: Path, part: int | str = "") -> None:
    """Change no file."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A change of the host, and the criteria that must fail."""

    name: str
    failing: frozenset[str] = frozenset()
    """IDs of the criteria that must fail."""
    nvml: tuple[str, ...] = ()
    """Lines added to the healthy NVML scenario before the first snapshot."""
    nvml_later: tuple[str, ...] = ()
    """Lines added to the scenario between the two snapshots."""
    before: Change = no_change
    """Change of the files before the first snapshot."""
    later: Change = no_change
    """Change of the files between the two snapshots."""
    inconclusive: frozenset[str] = frozenset()
    """IDs of the criteria that may become inconclusive because the fault removes readings; `*`: any criterion."""
    part: str = ""
    """The part that the fault changes. Faults of different parts share a run; a fault without a part has a run of its own."""
    within: str = ""
    """Labels that the scope of every failed verdict begins with; empty: any scope.

    Ignored for a criterion whose exact scope is given by `scope` or `scopes`.
    """
    scope: str = ""
    """Expected scope of every failed verdict; empty: not given."""
    scopes: Mapping[str, str] = field(default_factory=dict)
    """Criterion -> expected scope of its only failed verdict, instead of `scope`."""

    def explains(self, failed: Verdict) -> bool:
        """Return whether this fault is expected to cause the failed verdict."""
        if failed.criterion not in self.failing:
            return False
        if scope := self.scopes.get(failed.criterion, self.scope):
            return failed.scope == scope
        return not self.within or f"{failed.scope},".startswith(f"{self.within},")

    def allows(self, inconclusive: Verdict) -> bool:
        """Return whether this fault may cause the inconclusive verdict."""
        return bool(self.inconclusive & {"*", inconclusive.criterion})


def fault(name: str, failing: str, **options: Any) -> Any:
    """Return a fault as a test parameter. The criterion IDs in `failing` and `inconclusive` are separated by spaces."""
    options["inconclusive"] = frozenset(options.get("inconclusive", "").split())
    return pytest.param(Fault(name=name, failing=frozenset(failing.split()), **options), id=name.replace(" ", "-"))


GPU_NUMBERS, PORT_NUMBERS = itertools.cycle(range(8)), itertools.cycle(range(8))
"""Endless iterators over the numbers of GPUs and InfiniBand ports. `gpu_fault` and `port_fault` take the next number."""


def gpu_fault(
    name: str,
    failing: str,
    *answers: str,
    later: tuple[str, ...] = (),
    everywhere: tuple[str, ...] = (),
    before: GpuChange = no_change,
    after: GpuChange = no_change,
    labels: str | None = "",
    **options: Any,
) -> Any:
    """Return a fault of the GPU with the next number, as a test parameter.

    Args:
        name: name of the fault.
        failing: IDs of the criteria that must fail.
        answers: what NVML returns for this GPU from the first snapshot on.
        later: what NVML returns for this GPU in the second snapshot only.
        everywhere: what NVML returns for all GPUs from the first snapshot on.
        before: change of the GPU's files before the first snapshot.
        after: change of the GPU's files between the snapshots.
        labels: labels that follow `gpu=NUMBER` in the scope of every failed verdict; None: any.
        options: other fields of Fault. In `scopes`, each value is only the labels that follow `gpu=NUMBER`.
    """
    number = next(GPU_NUMBERS)
    gpu = f"gpu={number}"
    options = {"scope": "" if labels is None else f"{gpu}{labels}", **options}
    options["scopes"] = {criterion: f"{gpu}{more}" for criterion, more in options.get("scopes", {}).items()}
    return fault(
        name, failing, part=gpu, within=gpu,
        nvml=(*everywhere, *(f"gpu.{number}.{answer}" for answer in answers)),
        nvml_later=tuple(f"gpu.{number}.{answer}" for answer in later),
        before=lambda root: before(root, number), later=lambda root: after(root, number), **options,
    )  # fmt: skip


def port_fault(
    name: str, failing: str, *, before: PortChange = no_change, later: PortChange = no_change, labels: str = ""
) -> Any:
    """Return a fault of the InfiniBand port with the next number, as a test parameter.

    In the expected scope of every failed verdict, `labels` follow the labels of the port.
    """
    hca = links.IB[next(PORT_NUMBERS)]
    port = f"hca={hca},port=1"
    return fault(
        name, failing, part=port, scope=f"{port}{labels}",
        before=lambda root: before(root, hca), later=lambda root: later(root, hca),
    )  # fmt: skip


def write_file(path: str, content: str) -> Change:
    """Write a file with this content."""
    return lambda root: links.write(root, path, content)


@dataclass(frozen=True)
class KernelMessages:
    """A Change that appends these messages to the kernel log."""

    messages: tuple[str, ...]

    def __call__(self, root: Path) -> None:
        whole.append_kernel_log(root, *self.messages)


def combined_fault(name: str, cases: dict[str, tuple[KernelMessages, str]]) -> Any:
    """Return one fault that logs the messages of all cases. `cases`: criterion -> (messages, scope of its failed verdict)."""
    messages = tuple(message for logged, _ in cases.values() for message in logged.messages)
    scopes = {criterion: scope for criterion, (_, scope) in cases.items()}
    return fault(name, " ".join(cases), part="kernel log", before=KernelMessages(messages), scopes=scopes)


def xid(code: int, details: str = "pid='<unknown>', name=<unknown>, something happened") -> KernelMessages:
    """Log an XID of GPU 3."""
    return KernelMessages((f"NVRM: Xid (PCI:{GPU_3_LOG_ADDRESS}): {code}, {details}",))


def sxid(code: int, details: str) -> KernelMessages:
    """Log an SXid of the second NVSwitch."""
    return KernelMessages((f"nvidia-nvswitch1: SXid (PCI:{links.NVSWITCHES[1]}): {code}, {details}",))


def memory_modules(*slots: dmi.Slot) -> Change:
    """Replace the SMBIOS table with one that lists these slots."""
    return lambda root: (root / dmi.TABLE).write_bytes(dmi.table(slots))


def smart_log_byte(offset: int, value: int) -> Change:
    """Set one byte of the SMART log, which is the same for all NVMe disks."""

    def change(root: Path) -> None:
        log = bytearray(whole.HEALTHY_LOG)
        log[offset] = value
        (root / whole.SMART).write_bytes(bytes(log))

    return change


def replace_text(path: str, old: str, new: str) -> Change:
    """Replace `old` with `new` in a file. The file must contain `old`."""

    def change(root: Path) -> None:
        content = (root / path).read_text()
        assert old in content, f"{path} has no {old}"
        links.write(root, path, content.replace(old, new))

    return change


def combine(*changes: Change) -> Change:
    """Return a change that makes all of these changes."""
    return lambda root: [change(root) for change in changes]


def narrow_link(root: Path, gpu: int) -> None:
    """Set the PCIe link of a GPU to 8 lanes."""
    links.set_link(root, links.GPUS[gpu], "current", width=8)


def slow_link(root: Path, gpu: int) -> None:
    """Set the PCIe link of a GPU to 8 GT/s."""
    links.set_link(root, links.GPUS[gpu], "current", speed="8.0")


def redirect_acs(root: Path, gpu: int) -> None:
    """Set the ACS register of the PCIe port above a GPU to the value that Linux sets to isolate devices."""
    links.set_acs(root, links.GPU_PORTS[gpu], links.ACS_KERNEL)


def gpu_errors(severity: str, total: int) -> GpuChange:
    """Set how many AER errors of this severity a GPU has."""
    return lambda root, gpu: links.set_aer(root, links.GPUS[gpu], severity, total)


def port_errors(severity: str, total: int) -> GpuChange:
    """Set how many AER errors of this severity the PCIe port above a GPU has."""
    return lambda root, gpu: links.set_aer(root, links.GPU_PORTS[gpu], severity, total)


def ib_counter(counter: str, value: int) -> PortChange:
    """Set a counter of an InfiniBand port."""
    return lambda root, hca: links.set_counter(root, hca, counter, value)


def nic_file(path: str, content: str) -> Change:
    """Write a file of the Ethernet interface that has no RoCE."""
    return lambda root: (links.interface(root, links.PLAIN_INTERFACE) / path).write_text(content)


ROCE_PORT = f"hca={links.ROCE},port=1"


def module(capture: str) -> Change:
    """Let ethtool print this file of tests/data/optics/ethtool for the optical module of the RoCE port."""
    return lambda root: optics.set_output(root, links.ROCE_INTERFACE, "module", optics.ethtool(capture))


def replaced(text: str, old: str, new: str) -> str:
    """Return the text with `old` replaced by `new`. The text must contain `old`."""
    assert old in text, old
    return text.replace(old, new)


def module_value(old: str, new: str) -> Change:
    """Change one value that ethtool prints for the optical module of the RoCE port."""
    text = replaced(optics.ethtool(optics.MODULES[links.ROCE_INTERFACE]), old, new)
    return lambda root: optics.set_output(root, links.ROCE_INTERFACE, "module", text)


def mlxlink_value(old: str, new: str) -> PortChange:
    """Change one value that mlxlink prints for an InfiniBand port."""
    text = replaced(optics.mlxlink(optics.HEALTHY_LINK), old, new)
    return lambda root, hca: optics.set_link(root, hca, text)


def statistic(old: str, new: str) -> Change:
    """Change one counter in the ethtool statistics of the RoCE interface."""
    text = replaced(optics.ethtool(optics.STATISTICS[links.ROCE_INTERFACE]), old, new)
    return lambda root: optics.set_output(root, links.ROCE_INTERFACE, "statistics", text)


def port_file(path: str, content: str) -> PortChange:
    """Write a file of an InfiniBand port."""
    return lambda root, hca: (links.port(root, hca) / path).write_text(content)


def remove_directory(path: str) -> Change:
    return lambda root: shutil.rmtree(root / path)


def remove_gpu_7_from_bus(root: Path) -> None:
    device = links.pci(root, links.GPUS[7])
    shutil.rmtree(device.resolve())
    device.unlink(missing_ok=True)


def add_machine_check(root: Path) -> None:
    """Set the count of machine checks of the first processor to 1."""
    path = root / "proc/interrupts"
    path.write_text(re.sub(r"(MCE: +)\d+", r"\g<1>1", path.read_text()))


FATAL = "RLW_SRC_TRACK Fatal XC0 i0 Link 03 (0x1 0x2 0x3 0x4 0x5 0x6)"
"""Details of an NVLink 5 XID that the driver marks as `Fatal`."""
CODES: dict[str, list[int]] = {
    kind: [int(match[1]) for criterion in read_pack("xid").criteria if (match := re.fullmatch(pattern, criterion.id))]
    for kind, pattern in (("xid", r"xid-(\d+)"), ("fatal", r"xid-(\d+)-fatal"), ("sxid", r"sxid-(\d+)"))
}
"""Kind of criterion -> the codes (XIDs or SXids) with a criterion of this kind."""
HUNG_TASK = "INFO: task python3:4242 blocked for more than 122 seconds."
MEMORY_ERROR = (
    "{3}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 1",
    "{3}[Hardware Error]: event severity: corrected",
    "{3}[Hardware Error]:   section_type: memory error",
    "{3}[Hardware Error]:   DIMM location: P1-DIMMC1",
)
EVENTS = {
    "nic_firmware": (f"pci={links.HCAS[2]},event=nic_firmware",
                     f"mlx5_core {links.HCAS[2]}: poll_health:801:(pid 0): device's health compromised - reached miss count"),
    "nic_module": (f"pci={links.HCAS[3]},event=nic_module",
                   f"mlx5_core {links.HCAS[3]}: Port module event[error]: module 0, Cable error, High Temperature"),
    "nic_temperature": (f"pci={links.HCAS[4]},event=nic_temperature",
                        f"mlx5_core {links.HCAS[4]}: temp_warn:171:(pid 0): High temperature on sensors with bit set 0 1"),
    "nic_reset": ("nic=eth0,event=nic_reset", "NETDEV WATCHDOG: eth0 (mlx5_core): transmit queue 0 timed out 5200 ms"),
    "pcie_fatal": ("gpu=3,event=pcie_fatal", f"nvidia {links.GPUS[3]}: PCIe Bus Error: severity=Uncorrected (Fatal), type=x"),
    "pcie_contained": (f"pci={links.GPU_PORTS[3]},event=pcie_contained",
                       f"pcieport {links.GPU_PORTS[3]}: DPC: containment event, status:0x1f01 source:0x0000"),
    "pcie_lost": (f"pci={links.HCAS[5]},event=pcie_lost",
                  f"mlx5_core {links.HCAS[5]}: Unable to change power state from D3cold to D0, device inaccessible"),
    "gpu_reset_required": ("event=gpu_reset_required",
                           "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)"),
    "gpu_lost": ("event=gpu_lost",
                 "NVRM: nvAssertOkFailedNoLog: Assertion failed: GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)"),
    "memory_uncorrected": ("dimm=P1-DIMMC1,event=memory_uncorrected",
                           *(line.replace("corrected", "recoverable").replace("{3}", "{9}") for line in MEMORY_ERROR)),
    "hardware_error": ("event=hardware_error", "{5}[Hardware Error]: event severity: recoverable",
                       "{5}[Hardware Error]:   section_type: ARM processor error"),
    "machine_check": ("processor=3,event=machine_check",
                      "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400"),
    "soft_lockup": ("processor=12,event=soft_lockup", "watchdog: BUG: soft lockup - CPU#12 stuck for 26s! [kworker/12:1:4242]"),
    "hard_lockup": ("processor=28,event=hard_lockup", "watchdog: CPU28: Watchdog detected hard LOCKUP on cpu 28"),
    "rcu_stall": ("event=rcu_stall", "rcu: INFO: rcu_preempt self-detected stall on CPU"),
    "iommu_fault": ("gpu=3,event=iommu_fault", f"nvidia {links.GPUS[3]}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x7]"),
    "nvme_timeout": ("disk=nvme1,event=nvme_timeout", "nvme nvme1: I/O 512 QID 5 timeout, aborting"),
    "nvme_reset": ("disk=nvme1,event=nvme_reset", "nvme nvme1: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10"),
    "nvme_lost": ("disk=nvme1,event=nvme_lost", "nvme nvme1: Disabling device after reset failure: -19"),
    "disk_error": ("disk=nvme1n1,event=disk_error", "critical medium error, dev nvme1n1, sector 987648 op 0x0:(READ) flags 0x0"),
    "disk_locked": ("disk=nvme1n1,event=disk_locked",
                    "nvme1n1: Read(0x2) @ LBA 0, 8 blocks, Access Denied (sct 0x2 / sc 0x86) DNR",
                    "critical medium error, dev nvme1n1, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2"),
    "storage_controller": ("pci=0000:01:00.0,event=storage_controller",
                           "megaraid_sas 0000:01:00.0: resetting fusion adapter scsi0."),
    "array_member_failed": ("disk=nvme1n1p2,event=array_member_failed",
                            "md/raid1:md0: Disk failure on nvme1n1p2, disabling device."),
    "file_system": ("disk=md0,event=file_system", "EXT4-fs error (device md0): ext4_find_entry:1463: inode #2: lblock 0"),
    "cpu_temperature": ("processor=3,event=cpu_temperature",
                        "CPU3: Core temperature is above threshold, cpu clock is throttled (total events = 12)"),
    "memory_corrected": ("dimm=P1-DIMMC1,event=memory_corrected", *MEMORY_ERROR * 11),
}  # fmt: skip
"""Event in the kernel log -> scope of its failed verdict, then the kernel messages of the event."""
EDAC = "sys/devices/system/edac/mc/mc0"
RETRANSMISSIONS = ("local_ack_timeout_err", "packet_seq_err", "roce_adp_retrans")
"""Counters of an InfiniBand port that rise when it retransmits packets."""
FAULTS = [
    # NVML
    fault("gpu lost before the run", "gpu-count", nvml=("gpu.3.*=!15", "P2PStatus.3.*=!15"), inconclusive="*"),
    fault("gpu missing in the driver", "gpu-count", nvml=("Count=7",), inconclusive="*"),
    gpu_fault("ecc switched off", "ecc-enabled", "EccMode=0 0"),
    gpu_fault("ecc change pending", "ecc-pending", "EccMode=1 0"),
    gpu_fault("uncorrectable error", "ecc-uncorrectable-volatile", "TotalEccErrors.1.0=1"),
    gpu_fault("many uncorrectable errors in sram", "ecc-sram-uncorrectable-aggregate", "MemoryErrorCounter.1.1.7=5"),
    gpu_fault("sram over its threshold", "ecc-sram-threshold", "SramEccErrorStatus=1"),
    gpu_fault("row remapping pending", "row-remap-pending", "RemappedRows=0 1 1 0"),
    gpu_fault("row remapping failed", "row-remap-failed", "RemappedRows=0 1 0 1"),
    gpu_fault("512 memory rows remapped", "row-remap-uncorrectable", "RemappedRows=0 512 0 0"),
    gpu_fault("memory bank without spare rows", "row-remap-spare", "RowRemapperHistogram=2559 0 0 0 1"),
    gpu_fault("memory unrepairable", "memory-unrepairable", "UnrepairableMemoryFlag_v1=1"),
    gpu_fault("memory channel repair pending", "channel-repair-pending", "RepairStatus=1 0"),
    gpu_fault("tpc repair pending", "tpc-repair-pending", "RepairStatus=0 1"),
    gpu_fault("inforom corrupt", "inforom-valid", "ValidateInforom=!14", "InforomConfigurationChecksum=!14"),
    # Before R570, the recovery action (field 230) is not supported (!3). Error !16 means that the GPU requires a reset.
    fault("driver before R570 refuses a reading until a reset", "recovery-action",
          nvml=("FieldValues.230=!3", "gpu.3.Temperature.0=!16"), scope="gpu=3", inconclusive="*"),
    fault("driver before R570 refuses everything until a reset", "recovery-action",
          nvml=("FieldValues.230=!3", "gpu.3.*=!16", "P2PStatus.3.*=!16"), scope="gpu=3", inconclusive="*"),
    gpu_fault("driver recommends a reset", "recovery-action", "FieldValues.230=1"),
    gpu_fault("thermal slowdown by hardware", "thermal-slowdown", "CurrentClocksEventReasons=0x48",
        "CurrentClocksThrottleReasons=0x48", labels=",reason=hw_thermal"),
    gpu_fault("thermal slowdown by software", "software-thermal-slowdown", "CurrentClocksEventReasons=0x20",
        "CurrentClocksThrottleReasons=0x20", labels=",reason=sw_thermal"),
    gpu_fault("power brake", "power-brake", "CurrentClocksEventReasons=0x88",
        "CurrentClocksThrottleReasons=0x88", labels=",reason=hw_power_brake"),
    gpu_fault("thermal throttling by hardware between snapshots", "hw-thermal-time", later=("FieldValues.270=2000000000 3",),
        labels=",reason=hw_thermal"),
    gpu_fault("thermal throttling by software between snapshots", "sw-thermal-time", later=("FieldValues.269=2000000000 3",),
        labels=",reason=sw_thermal"),
    gpu_fault("throttling by power brake between snapshots", "power-brake-time", later=("FieldValues.271=2000000000 3",),
        labels=",reason=hw_power_brake"),
    gpu_fault("power limit lowered", "power-limit-lowered uniform-gpu-power-in-force", "PowerManagementLimit=500000",
        "EnforcedPowerLimit=500000"),
    gpu_fault("mig switched on", "mig-off", "MigMode=1 1"),
    gpu_fault("mig change pending", "mig-pending", "MigMode=0 1"),
    gpu_fault("exclusive compute mode", "compute-mode", "ComputeMode=3"),
    gpu_fault("pcie replays", "pcie-replay", later=("PcieReplayCounter=32",)),
    gpu_fault("nvlink down", "nvlink-active nvlink-missing uniform-nvlink-up", "NvLinkState.11=0",
        scopes={"nvlink-active": "", "nvlink-missing": "", "uniform-nvlink-up": ",link=11"}),
    gpu_fault("nvlink replays", "nvlink-replays", later=("NvLinkErrorCounter.*.0=1",), labels=None),
    gpu_fault("nvlink recoveries", "nvlink-recoveries", later=("NvLinkErrorCounter.*.1=1",), labels=None),
    gpu_fault("nvlink crc errors", "nvlink-crc", later=("NvLinkErrorCounter.*.2=7000",), labels=None),
    gpu_fault("fabric not ready", "fabric-state", "GpuFabricInfoV=2 0 0 0x11aa",
        inconclusive="uniform-nvlink-domain uniform-nvlink-partition"),
    gpu_fault("fabric lacks resources", "fabric-state", "GpuFabricInfoV=3 23 0 0",
        inconclusive="uniform-nvlink-domain uniform-nvlink-partition plan"),
    gpu_fault("fabric unhealthy", "fabric-state", "GpuFabricInfoV=3 0 0 0x11aa 2"),
    gpu_fault("fabric with limited capacity", "fabric-state", "GpuFabricInfoV=3 0 0 0x11aa 3"),
    gpu_fault("fabric degraded", "fabric-bandwidth", "GpuFabricInfoV=3 0 0 0x11a9"),
    gpu_fault("fabric recovers a route", "fabric-route-recovery", "GpuFabricInfoV=3 0 0 0x11a6"),
    gpu_fault("fabric route unhealthy", "fabric-route", "GpuFabricInfoV=3 0 0 0x119a"),
    gpu_fault("fabric access timed out", "fabric-access-timeout", "GpuFabricInfoV=3 0 0 0x116a"),
    gpu_fault("fabric configured wrongly", "fabric-configuration", "GpuFabricInfoV=3 0 0 0x12aa"),
    gpu_fault("many corrected sram errors", "ecc-sram-corrected", "MemoryErrorCounter.0.1.7=10001"),
    gpu_fault("many corrected dram errors", "ecc-dram-corrected", "MemoryErrorCounter.0.1.2=20000001"),
    gpu_fault("clocks lowered", "clocks-lowered", "ApplicationsClock.0=1200"),
    gpu_fault("page retirement pending", "retired-pages-pending", "RetiredPagesPendingStatus=1"),
    fault(
        "thermal throttling between snapshots, older driver",
        "thermal-time",
        nvml=("FieldValues.269=!3", "FieldValues.27[01]=!3"),
        nvml_later=("gpu.3.FieldValues.75=2000000000 3",),
    ),
    gpu_fault("nvlink 5 failed recovery", "nvlink-failed-recoveries", everywhere=("FieldValues.214=0 3",),
        later=("FieldValues.214=1 3",), labels=None),
    gpu_fault("gpu with half of its memory", "model-memory uniform-gpu-memory", "MemoryInfo=42760404992 545259520"),
    gpu_fault("gpu with half of its cores", "model-cores uniform-gpu-cores", "NumGpuCores=8448"),
    gpu_fault("narrow memory bus", "model-memory-bus uniform-gpu-memory-bus", "MemoryBusWidth=4096"),
    gpu_fault("low maximum sm clock", "model-sm-clock uniform-gpu-sm-clock", "MaxClockInfo.1=1200"),
    gpu_fault("low maximum memory clock", "model-memory-clock uniform-gpu-memory-clock", "MaxClockInfo.2=1600"),
    gpu_fault("gpu too hot", "gpu-temperature", "Temperature.0=95"),
    gpu_fault("gpu near its slowdown temperature", "temperature-margin", "MarginTemperature=1"),
    gpu_fault("memory near its slowdown temperature", "memory-temperature", "FieldValues.82=94"),
    gpu_fault("many corrected errors", "ecc-corrected-volatile", "TotalEccErrors.0.0=50000001"),
    gpu_fault("nvlink 5 errors after correction", "nvlink-effective-errors", everywhere=("FieldValues.219=0 3",),
        later=("FieldValues.219=101 3",), labels=None),
    gpu_fault("nvlink 5 bit errors after correction", "nvlink-effective-error-ratio", "FieldValues.220=1289 3",
        everywhere=("FieldValues.220=0 3",), labels=None),
    gpu_fault("nvlink 5 receive errors", "nvlink-receive-errors", everywhere=("FieldValues.208=0 3",),
        later=("FieldValues.208=101 3",), labels=None),
    # the kernel log
    combined_fault("each xid", {f"xid-{code}": (xid(code), f"gpu=3,xid={code}") for code in CODES["xid"]}),
    combined_fault("each fatal xid", {f"xid-{code}-fatal": (xid(code, FATAL), f"gpu=3,xid={code}") for code in CODES["fatal"]}),
    combined_fault(
        "each sxid",
        {
            f"sxid-{code}": (
                sxid(code, "Thermal alert"),
                f"pci={links.NVSWITCHES[1]},fatal=unknown,sxid={code}",
            )
            for code in CODES["sxid"]
        },
    ),
    fault(
        "gpu fell off the bus without an xid",
        "gpu-fallen-off", part="kernel log",
        before=KernelMessages(
            (
                f"NVRM: The NVIDIA GPU {links.GPUS[3]}",
                "NVRM: (PCI ID: 10de:2330) installed in this system has",
                "NVRM: fallen off the bus and is not responding to commands.",
            )
        ),
        scope="gpu=3,message=fallen_off_the_bus",
    ),
    combined_fault("each event in the kernel log", {
        f"kernel-{event.replace('_', '-')}": (KernelMessages(tuple(messages)), scope)
        for event, (scope, *messages) in EVENTS.items()
    }),
    fault("hung task during the run", "kernel-hung-task", part="kernel log",
        later=KernelMessages((HUNG_TASK,)), scope="event=hung_task"),
    fault("tolerated kernel messages before the run", "", part="kernel log", before=KernelMessages((
        HUNG_TASK,
        *MEMORY_ERROR * 10,  # kernel-memory-corrected allows 10
        f"mlx5_core {links.HCAS[2]}: mlx5_pcie_event:299:(pid 7): Detected insufficient power on the PCIe slot (27W).",
        f"pcieport {links.GPU_PORTS[3]}: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Receiver ID)",
        "mce: [Hardware Error]: CPU 4: Machine Check: 0 Bank 7: 8c00004000010091",
    ))),
    fault("xid during the run", "xid-during-run", part="kernel log", later=xid(31), scope="host"),
    fault("xid 94 during the run", "xid-during-run", part="kernel log", later=xid(94), scope="host"),
    fault("fatal sxid before the run", "sxid-fatal", part="kernel log", before=sxid(20034, "Fatal, Link 30 LTSSM Fault Up")),
    # the host
    fault("gpu missing on the pci bus", "gpu-pci-count", before=remove_gpu_7_from_bus, inconclusive="*"),
    fault("fabric manager not running", "fabric-manager-missing", part="driver",
        before=lambda root: shutil.rmtree(root / "proc/900")),
    fault(
        "fabric manager version mismatch",
        "fabric-manager-matches", part="driver",
        before=lambda root: host.write_program(root / "usr/bin/nv-fabricmanager", "echo 'Fabric Manager version is : 570.10'"),
    ),
    fault("uncorrected memory error", "host-memory-uncorrected", part="memory errors",
        before=write_file(f"{EDAC}/ue_count", "1\n")),
    fault("corrected memory errors", "host-memory-corrected", part="memory errors",
        later=write_file(f"{EDAC}/dimm1/dimm_ce_count", "11\n")),
    fault(
        "memory module for a lower speed",
        "uniform-dimm-rated", part="memory modules",
        before=memory_modules(replace(SLOTS[2], rated=4400), *SLOTS[:2], *SLOTS[3:]),
        scope="dimm=P1-DIMMC1",
    ),
    fault(
        "memory module of another size",
        "uniform-dimm-size", part="memory modules",
        before=memory_modules(replace(SLOTS[2], size=64 * dmi.GIB), *SLOTS[:2], *SLOTS[3:]),
        scope="dimm=P1-DIMMC1",
    ),
    fault("poisoned page of the host's memory", "host-memory-poisoned", part="poisoned pages",
        before=replace_text("proc/meminfo", "Corrupted:     0", "Corrupted:     4")),
    fault("machine check before the run", "host-machine-check", part="taint flags",
        before=write_file("proc/sys/kernel/tainted", f"{12289 | 1 << 4}\n")),
    fault("bad page reported by the kernel", "host-bad-page", part="taint flags",
        before=write_file("proc/sys/kernel/tainted", f"{12289 | 1 << 5}\n")),
    fault("kernel oops", "host-kernel-oops", part="taint flags",
        before=write_file("proc/sys/kernel/tainted", f"{12289 | 1 << 7}\n")),
    fault("nouveau loaded", "nouveau-absent", part="nouveau", before=write_file("sys/module/nouveau/refcnt", "0\n")),
    fault(
        "driver updated without a reboot",
        "driver-library-matches fabric-manager-matches container-cdi-current", part="driver",
        before=combine(
            write_file("sys/module/nvidia/version", "570.10\n"), replace_text("proc/driver/nvidia/version", host.DRIVER, "570.10")
        ),
    ),
    fault("outdated cdi file", "container-cdi-current", part="driver",
        before=replace_text("var/run/cdi/nvidia.yaml", host.DRIVER, "570.10")),
    fault("file system errors", "file-system-errors", part="file systems",
        before=write_file("sys/fs/ext4/md0/errors_count", "3\n")),
    fault("array degraded", "disk-array-complete", part="array", before=write_file("sys/block/md0/md/degraded", "1\n")),
    fault("array stopped", "disk-array-works", part="array", before=write_file("sys/block/md0/md/array_state", "inactive\n")),
    fault(
        "array member failed",
        "disk-array-complete disk-array-member", part="array",
        before=combine(
            write_file("sys/block/md0/md/degraded", "1\n"), write_file("sys/block/md0/md/dev-nvme1n1p2/state", "faulty\n")
        ),
        scopes={"disk-array-complete": "array=md0", "disk-array-member": "array=md0,member=nvme1n1p2"},
    ),
    fault("pool degraded", "storage-pool-online", part="pool", before=write_file("proc/spl/kstat/zfs/tank/state", "DEGRADED\n")),
    fault(
        "path to a volume lost",
        "disk-path-live", part="volume",
        before=combine(
            *(write_file(f"sys/class/nvme/nvme{number}/state", state) for number, state in ((3, "live"), (4, "connecting"))),
            *(write_file(f"sys/block/nvme3c{number}n1/ana_state", "optimized\n") for number in (3, 4)),
        ),
        scope="disk=nvme-subsys3,path=nvme4",
    ),
    fault("disk lost", "disk-lost", later=remove_directory("sys/block/nvme1n1"), inconclusive="*"),
    fault("root file system read-only", "state-writable", part="file systems",
        before=replace_text("proc/self/mountinfo", " ext4 /dev/md0 rw", " ext4 /dev/md0 ro")),
    fault("nvme controller without a disk", "nvme-has-disk", part="disks",
        before=remove_directory("sys/class/nvme/nvme1/nvme1n1"), scope="disk=nvme1"),
    fault("disk offline", "disk-online", part="disks", before=write_file("sys/block/nvme1n1/device/state", "dead\n")),
    fault("disk reports a critical warning", "nvme-critical-warning", part="disks", before=smart_log_byte(0, 4)),
    fault("disk worn", "nvme-endurance", part="disks", before=smart_log_byte(5, 101)),
    fault("disk media error", "nvme-media-errors", part="disks", later=smart_log_byte(160, 1)),
    fault("clock not synchronized", "clock-synchronized", part="clock", before=write_file(whole.CLOCK, "16.0")),
    fault("disk too hot", "nvme-temperature", part="disks", before=smart_log_byte(1, 0x6B)),
    fault("machine checks during the run", "host-machine-checks", part="interrupts", later=add_machine_check),
    # PCIe, InfiniBand and Ethernet links
    gpu_fault("pcie link narrowed", "pcie-link-narrowed pcie-width", "CurrPcieLinkWidth=8", before=narrow_link),
    fault("pcie link of an adapter of another vendor narrowed", "pcie-link-narrowed", part="PCIe", scope=f"pci={links.PLAIN_NIC}",
        before=lambda root: links.set_link(root, links.PLAIN_NIC, "current", width=8)),
    gpu_fault("pcie link slowed", "pcie-link-slowed pcie-generation", "CurrPcieLinkGeneration=3", before=slow_link),
    gpu_fault("fatal pcie errors of the gpu", "pcie-aer-fatal", after=gpu_errors("fatal", 1)),
    gpu_fault("nonfatal pcie errors of the gpu", "pcie-aer-nonfatal", after=gpu_errors("nonfatal", 1)),
    gpu_fault("corrected pcie errors of the gpu", "pcie-aer-correctable", after=gpu_errors("correctable", 32)),
    gpu_fault("fatal pcie errors of the port above the gpu", "pcie-port-aer-fatal", after=port_errors("fatal", 1)),
    gpu_fault("nonfatal pcie errors of the port above the gpu", "pcie-port-aer-nonfatal", after=port_errors("nonfatal", 1)),
    gpu_fault("corrected pcie errors of the port above the gpu", "pcie-port-aer-correctable",
        after=port_errors("correctable", 32)),
    gpu_fault("acs redirects transfers between gpus", "pcie-acs-redirected", before=redirect_acs),
    port_fault("infiniband link went down", "infiniband-link-downed", later=ib_counter("link_downed", 1)),
    port_fault("infiniband link recovered", "infiniband-link-recovery", later=ib_counter("link_error_recovery", 6)),
    port_fault("infiniband symbol errors", "infiniband-symbol-error", later=ib_counter("symbol_error", 121)),
    port_fault("infiniband receive errors", "infiniband-receive-errors", later=ib_counter("port_rcv_errors", 11)),
    port_fault("infiniband link integrity errors", "infiniband-link-integrity",
        later=ib_counter("local_link_integrity_errors", 1)),
    port_fault("infiniband buffer overruns", "infiniband-buffer-overrun", later=ib_counter("excessive_buffer_overrun_errors", 1)),
    port_fault("infiniband errors of the peer", "infiniband-remote-errors",
        later=ib_counter("port_rcv_remote_physical_errors", 101)),
    port_fault("infiniband packets discarded", "infiniband-discards", later=ib_counter("port_xmit_discards", 101)),
    port_fault("infiniband management packets dropped", "infiniband-management-dropped", later=ib_counter("VL15_dropped", 101)),
    port_fault("infiniband without subnet manager", "infiniband-unmanaged uniform-port-state uniform-port-active",
        before=port_file("state", "2: INIT\n")),
    port_fault("infiniband link narrowed", "infiniband-narrowed uniform-port-rate uniform-port-width",
        before=port_file("rate", "100 Gb/sec (1X NDR)\n")),
    fault("carrier lost briefly", "network-carrier-changes", part="Ethernet", later=nic_file("carrier_changes", "4\n")),
    fault("ethernet crc errors", "network-crc-errors", part="Ethernet", later=nic_file("statistics/rx_crc_errors", "1\n")),
    fault("ethernet receive errors", "network-receive-errors", part="Ethernet", later=nic_file("statistics/rx_errors", "101\n")),
    fault(
        "bond member without a link",
        "network-bond-member", part="Ethernet",
        before=lambda root: links.add_bond(root, "bond0", {links.PLAIN_INTERFACE: "down", links.ROCE_INTERFACE: "up"}),
        scope=f"nic=bond0,member={links.PLAIN_INTERFACE}",
    ),
    fault(
        "interface left its bond",
        "network-bond-complete", part="Ethernet",
        before=lambda root: links.add_bond(root, "bond0", {links.PLAIN_INTERFACE: "up", links.ROCE_INTERFACE: "up"}),
        later=write_file("sys/class/net/bond0/bonding/slaves", links.ROCE_INTERFACE),
        scope="nic=bond0",
    ),
    fault("ethernet transmit errors", "network-transmit-errors", part="Ethernet",
        later=nic_file("statistics/tx_errors", "101\n")),
    fault("ethernet half duplex", "network-half-duplex", part="Ethernet", before=nic_file("duplex", "half\n")),
    # optical modules and the physical layer
    fault("optical module in fault", "optics-module-fault optics-temperature-alarm optics-temperature-warning", part="module",
        before=module("qsfpdd-400g-module-fault-tec.v6.15.txt"), scope=ROCE_PORT),
    fault("dark lane of an optical module",
        "optics-rx-power-alarm optics-rx-power-warning optics-rx-los optics-rx-power-vs-fleet", part="module",
        before=module("qsfp28-sr4-lane3-dark.v6.15.json"), scope=f"{ROCE_PORT},lane=3"),
    fault("hot optical module", "optics-temperature-warning", part="module",
        before=module("qsfp28-hot-warning.v6.15.txt"), scope=ROCE_PORT),
    *(
        fault(f"optical module beyond its limits: {quantity}", f"optics-{quantity}-alarm optics-{quantity}-warning",
            part="module", before=module_value(old, new), within=ROCE_PORT)
        for quantity, old, new in (
            ("temperature", '"module_temperature": 41.5', '"module_temperature": 81'),
            ("voltage", '"module_voltage": 3.28', '"module_voltage": 2.5'),
            ("tx-power", "[ 0.871,", "[ 4.5,"),
            ("bias", "[ 7.2,", "[ 1.5,"),
        )
    ),
    fault("transmitter fault of a lane", "optics-tx-fault", part="module",
        before=module_value('"tx_fault": [ false', '"tx_fault": [ true')),
    port_fault("lane that receives little light", "optics-rx-power-vs-fleet",
        before=mlxlink_value("1.886,1.989", "1.886,-9.12"), labels=",lane=2"),
    port_fault("optical module hotter than the others", "optics-temperature-vs-fleet", before=mlxlink_value("52 [", "70 [")),
    port_fault("blocks that fec could not correct during the run", "port-fec-uncorrectable",
        later=mlxlink_value('Effective Physical Errors" : "0"', 'Effective Physical Errors" : "1"')),
    port_fault("blocks that fec could not correct before the run", "port-fec-uncorrectable-rate",
        before=mlxlink_value('Effective Physical Errors" : "0"', 'Effective Physical Errors" : "30"')),
    port_fault("symbol errors during the run", "port-symbol-errors",
        later=mlxlink_value('Symbol Errors" : "0"', 'Symbol Errors" : "121"')),
    fault("symbol errors of the pcs during the run", "port-symbol-errors", part="statistics",
        later=statistic("rx_pcs_symbol_err_phy: 0", "rx_pcs_symbol_err_phy: 121"), scope=ROCE_PORT),
    port_fault("symbol errors before the run", "port-symbol-error-rate",
        before=mlxlink_value('Symbol Errors" : "0"', 'Symbol Errors" : "3000"')),
    port_fault("few symbol errors before the run", "",
        before=mlxlink_value('Symbol Errors" : "0"', 'Symbol Errors" : "2800"')),
    port_fault("port link went down", "port-link-downs",
        later=mlxlink_value('Link Down Counter" : "0"', 'Link Down Counter" : "1"')),
    port_fault("port link recovered from errors", "port-link-recoveries",
        later=mlxlink_value('Link Error Recovery Counter" : "0"', 'Link Error Recovery Counter" : "6"')),
    fault("shorted cable", "port-module-errors", part="statistics",
        later=statistic("module_bad_shorted: 0", "module_bad_shorted: 1"), scope=ROCE_PORT),
    fault("pause storm", "port-pause-storms", part="statistics",
        later=statistic("tx_pause_storm_error_events: 0", "tx_pause_storm_error_events: 1"), scope=ROCE_PORT),
    port_fault("high ratio of bit errors before fec", "port-raw-ber", before=mlxlink_value("2E-10", "3E-4")),
    port_fault("high ratio of bit errors after fec", "port-effective-ber",
        before=mlxlink_value('Effective Physical BER" : "15E-255"', 'Effective Physical BER" : "3E-13"')),
    port_fault("high ratio of symbol errors after fec", "port-symbol-ber",
        before=mlxlink_value('Symbol BER" : "15E-255"', 'Symbol BER" : "7E-12"')),
    port_fault("bad signal integrity", "port-status",
        before=mlxlink_value('Status Opcode" : "0"', 'Status Opcode" : "15"')),
    port_fault("infiniband symbol errors before the run", "infiniband-symbol-error-rate",
        before=ib_counter("symbol_error", 60_000)),
    fault("ethernet crc errors before the run", "network-crc-error-rate", part="Ethernet",
        before=nic_file("statistics/rx_crc_errors", "20000\n")),
    *(
        port_fault(f"{counter} before the run", f"infiniband-{counter.replace('_', '-')}-rate",
            before=ib_counter(counter, 4_000_000))
        for counter in RETRANSMISSIONS
    ),
    *(
        port_fault(f"{counter} during the run", f"infiniband-{counter.replace('_', '-')}", later=ib_counter(counter, 360))
        for counter in RETRANSMISSIONS
    ),
]  # fmt: skip


def group_into_runs(faults: Iterable[Fault]) -> list[list[Fault]]:
    """Distribute the faults over runs so that the faults of one run change different parts. Return the faults of each run."""
    runs: list[list[Fault]] = []
    for each in faults:
        fitting = (run for run in runs if each.part and not {other.part for other in run} & {each.part, ""})
        if run := next(fitting, None):
            run.append(each)
        else:
            runs.append([each])
    return runs


RUNS = group_into_runs(case.values[0] for case in FAULTS)


@dataclass(kw_only=True)
class Machine:
    """The simulated host, and the process that takes its snapshots (`program`)."""

    root: Path
    scenario: Path
    program: subprocess.Popen[str]
    packs: tuple[Pack, ...]

    def judge(self, *faults: Fault) -> list[Verdict]:
        """Build the host with these faults, and return the verdicts on two snapshots of it.

        If no fault changes anything between the snapshots, the second is a copy of the first.
        """
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir()
        whole.build_host(self.root)
        answers = [answer for fault in faults for answer in fault.nvml]
        later = [answer for fault in faults for answer in fault.nvml_later]
        nvml.write(self.scenario, "healthy-h100x8", *whole.NVML, *answers)
        for fault in faults:
            fault.before(self.root)
        first, gpus = self._take_snapshot("before")
        if later or any(fault.later is not no_change for fault in faults):
            nvml.write(self.scenario, "healthy-h100x8", *whole.NVML, *answers, *later)
            for fault in faults:
                fault.later(self.root)
            second, gpus = self._take_snapshot("after")
        else:
            second = replace(first, phase="after", at=utc_now())
        return judge_snapshots(build_plan("h1", 8, first.at), (first, second), gpus, self.packs)

    def _take_snapshot(self, phase: str) -> tuple[Snapshot, list[Gpu]]:
        assert self.program.stdin
        assert self.program.stdout
        self.program.stdin.write(f"{phase}\n")
        self.program.stdin.flush()
        result = json.loads(self.program.stdout.readline())
        metrics = tuple(Metric(**metric) for metric in result["snapshot"]["metrics"])
        return Snapshot(**{**result["snapshot"], "metrics": metrics}), [Gpu(**gpu) for gpu in result["gpus"]]


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
            yield Machine(root=Path(folder) / "root", scenario=scenario, program=program, packs=tuple(read_packs([])))
            program.communicate(timeout=30)


@pytest.fixture(scope="module")
def verdicts_of_run(machine: Machine) -> Callable[[int], list[Verdict]]:
    """Return a function: index of a run in RUNS -> verdicts on the host with the faults of this run. The verdicts are cached."""
    return cache(lambda number: machine.judge(*RUNS[number]))


def test_healthy_host_passes(machine: Machine) -> None:
    verdicts = machine.judge()
    assert [(item.criterion, item.scope, item.reason) for item in verdicts if item.verdict != PASS] == []
    assert len(verdicts) > 1000


@pytest.mark.parametrize("case", FAULTS)
def test_fault_fails_exactly_its_criteria(verdicts_of_run: Callable[[int], list[Verdict]], case: Fault) -> None:
    (number,) = (number for number, run in enumerate(RUNS) if case in run)
    verdicts = verdicts_of_run(number)
    failed = [item for item in verdicts if item.verdict == FAIL]
    expected = [item for item in failed if case.explains(item)]
    assert {item.criterion for item in expected} == case.failing
    assert all(item.action != "none" for item in expected)
    assert not case.scopes or len(expected) == len(case.scopes)
    unexplained = [item for item in failed if not any(fault.explains(item) for fault in RUNS[number])]
    assert [(item.criterion, item.scope, item.reason) for item in unexplained] == []
    inconclusive = [item for item in verdicts if item.verdict == INCONCLUSIVE]
    unexpected = [item for item in inconclusive if not any(fault.allows(item) for fault in RUNS[number])]
    assert [(item.criterion, item.scope, item.reason) for item in unexpected] == []


RECOVERY_ACTIONS = [
    (1, "gpu_reset", "reset_gpu"),
    (2, "node_reboot", "reboot"),
    (3, "drain_p2p", "drain_p2p"),
    (4, "drain_and_reset", "reset_gpu"),
    (5, "recover_imex_domain", "recover_imex_domain"),
    (6, "bus_reset", "reset_gpu"),
    (7, "system_reboot", "reboot"),
    (99, "unknown (99)", "reset_gpu"),
]
"""Recovery action that the driver requires, in three forms: number in NVML, value of the reading, and action of the verdict."""


def test_verdict_has_the_recovery_action_of_the_driver(machine: Machine) -> None:
    """The driver requires a different recovery action for each GPU."""
    answers = tuple(f"gpu.{gpu}.FieldValues.230={number}" for gpu, (number, *_) in enumerate(RECOVERY_ACTIONS))
    failed = [item for item in machine.judge(Fault(name="recovery", nvml=answers)) if item.verdict == FAIL]
    assert [(item.criterion, item.scope, item.action, item.reason) for item in failed] == [
        ("recovery-action", f"gpu={gpu}", action, f"found {name}, wanted = none")
        for gpu, (_, name, action) in enumerate(RECOVERY_ACTIONS)
    ]


REFUSALS = {
    "Temperature.0": ({"gpu.temperature"}, "41"),
    "PowerUsage": ({"gpu.power"}, "70000"),
    "EnforcedPowerLimit": ({"gpu.power_limit"}, "700000"),
    "PowerManagementLimit": ({"gpu.power_limit_set", "gpu.power_limit_lowered"}, "700000"),
    "MaxClockInfo.1": ({"gpu.clock.sm_max"}, "1980"),
    "MaxClockInfo.2": ({"gpu.clock.memory_max"}, "2619"),
    "MemoryInfo": ({"gpu.memory.total", "gpu.memory.used"}, "85520809984 545259520"),
    "PowerManagementDefaultLimit": ({"gpu.power_limit_default", "gpu.power_limit_lowered"}, "700000"),
    "ClockInfo.1": ({"gpu.clock.sm"}, "345"),
    "ClockInfo.2": ({"gpu.clock.memory"}, "2619"),
    "ApplicationsClock.0": ({"gpu.clock.lowered"}, "1980"),
    "UtilizationRates": ({"gpu.utilization"}, "0 0"),
    "PerformanceState": ({"gpu.performance_state"}, "0"),
}
"""NVML function with its arguments -> the readings that need it, and what it returns for a healthy GPU."""


@pytest.mark.parametrize("codes", [(999, 10), (10, 999)], ids=str)
def test_reading_that_the_driver_refuses_is_inconclusive_unless_the_second_snapshot_has_it(
    machine: Machine, codes: tuple[int, int]
) -> None:
    """Each NVML function in REFUSALS fails on one GPU. The first eight functions return `codes[0]`, the others `codes[1]`."""
    refusals = [(number % 8, getter, codes[number // 8]) for number, getter in enumerate(REFUSALS)]
    refused = tuple(f"gpu.{gpu}.{getter}=!{code}" for gpu, getter, code in refusals)
    answered = tuple(f"gpu.{gpu}.{getter}={REFUSALS[getter][1]}" for gpu, getter, _ in refusals)
    missing = {(name, f"gpu={gpu}") for gpu, getter, _ in refusals for name in REFUSALS[getter][0]}
    for first, later, expected in ((refused, (), missing), ((), refused, missing), (refused, answered, set())):
        verdicts = machine.judge(Fault(name="refused", nvml=first, nvml_later=later))
        # `uniform-power-limit` compares the default power limits of the GPUs, so it may be inconclusive too.
        not_passed = [item for item in verdicts if item.verdict != PASS and item.criterion != "uniform-power-limit"]
        assert {item.verdict for item in not_passed} <= {INCONCLUSIVE}
        assert {(item.name, item.scope) for item in not_passed} == expected
        assert all("NVML: " in item.reason for item in not_passed)


IMPOSSIBLE = {
    "Temperature.0=345": "gpu-temperature",
    "Temperature.0=644245923": "gpu-temperature",
    "Temperature.0=4294967295": "gpu-temperature",
    "FieldValues.82=82505": "memory-temperature",
    "MarginTemperature=-644245923": "temperature-margin",
    "RemappedRows=4294967295 4294967295 0 0": "row-remap-uncorrectable",
    "TotalEccErrors.1.0=18446744073709551615": "ecc-uncorrectable-volatile",
}
"""Impossible value from NVML -> a criterion that must be inconclusive.

NVIDIA/dcgm-exporter issue 312 reports the temperatures 345, 82505 and 644245923.
"""


def test_impossible_value_is_inconclusive_and_not_a_fault_of_the_gpu(machine: Machine) -> None:
    """NVML returns a different impossible value for each GPU except the last."""
    impossible = Fault(name="impossible", nvml=tuple(f"gpu.{gpu}.{answer}" for gpu, answer in enumerate(IMPOSSIBLE)))
    verdicts = [item for item in machine.judge(impossible) if item.verdict != PASS]
    assert {item.verdict for item in verdicts} == {INCONCLUSIVE}
    assert {item.scope for item in verdicts} == {f"gpu={gpu}" for gpu in range(len(IMPOSSIBLE))}
    wanted = {(criterion, f"gpu={gpu}") for gpu, criterion in enumerate(IMPOSSIBLE.values())}
    assert wanted <= {(item.criterion, item.scope) for item in verdicts}


def test_fault_in_the_second_snapshot_fails_after_an_impossible_value_in_the_first(machine: Machine) -> None:
    case = Fault(name="hot", nvml=("gpu.3.Temperature.0=345",), nvml_later=("gpu.3.Temperature.0=97",))
    failed = [item for item in machine.judge(case) if item.verdict == FAIL]
    assert [(item.criterion, item.scope, item.value) for item in failed] == [("gpu-temperature", "gpu=3", 97)]


OTHER_HARDWARE = {
    "retired-pages": "only GPUs before Ampere retire pages",
    "c2c-links": "only Grace systems have chip-to-chip links",
}
"""Criterion on a reading that this host cannot have -> the reason."""


def test_every_criterion_on_readings_has_a_fault() -> None:
    covered = {criterion for case in FAULTS for criterion in case.values[0].failing}
    packs_with_readings = ("gpu-health", "host-health", "link-health", "optics", "xid")
    required = {item.id for item in read_pack("h100-sxm").criteria if item.origin in packs_with_readings}
    assert required - covered == set(OTHER_HARDWARE)
    assert len(FAULTS) >= 40
