"""Count faults of adapters, GPUs, disks, file systems, memory, processors and PCIe links in the messages of the kernel log.

Each of these counts as one event: a firmware record (CPER), which has many messages; the two messages about a fatal PCIe error,
a transmit queue that timed out, or firmware of an adapter that did not start; all messages about one bad page of memory. A
message of EDAC counts as one event for each error that it reports. Every other matching message counts as one event, so a fault
with several messages counts several times. If the firmware, EDAC and the kernel report the same error, the error counts once for
each of them.

The texts are mainly from the sources of Linux: drivers/net/ethernet (mlx5/core/health.c and events.c, bnxt, ice, i40e, ixgbe,
be2net, ena), net/sched/sch_generic.c, drivers/pci/pcie (aer.c, dpc.c), drivers/firmware/efi/cper.c, arch/x86/kernel/cpu/mce,
drivers/edac/mce_amd.c, mm/memory-failure.c, kernel (watchdog.c, hung_task.c, rcu), drivers/iommu, drivers/nvme/host (core.c,
pci.c), block/blk-core.c, drivers/scsi (sd.c, scsi_logging.c, megaraid, mpt3sas, mpi3mr, hpsa.c, smartpqi, aacraid), drivers/md,
fs (ext4, jbd2, xfs, btrfs), drivers/thermal/intel/therm_throt.c. The texts with `NVRM` are from NVIDIA's driver.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

Part = tuple[str, str]
"""Label and name of the part, such as `pci` and `0000:0d:00.0`; both empty for the host."""
HOST_PART: Part = ("", "")
PARTS = ("pci", "nic", "disk", "dimm", "processor")

_PCI = r"(?P<pci>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"
_MLX5 = rf"mlx5_core {_PCI}(?: [^:]{{1,60}})?: (?:\w+:\d+:\(pid \d+\): )?"
"""mlx5 puts function, line and process before some messages, depending on the kernel and the log level."""
_VIRTUAL_DRIVES = "loop|ram|zram|sr|fd|nbd|rbd"
_BLOCK = rf"(?P<disk>(?!{_VIRTUAL_DRIVES})[\w-]+)"
_BLOCK_LAYER = "(?:(?:blk_update_request|print_req_error): )?"
"""Function before a message of the block layer: `print_req_error` in Linux 4.13 to 5.2, and in RHEL 8.0 and 8.1;
`blk_update_request` before and after; none since 5.16."""
_WITHOUT_DATA = "(?:DISCARD|SECURE_ERASE|WRITE_SAME|WRITE_ZEROES)"
"""Operations of the kernel without data to read or write. A disk that does not support such an operation rejects it with a target
error. No data is lost."""
_JOURNAL = rf"(?P<disk>dm-\d+|(?!{_VIRTUAL_DRIVES})[\w-]+?)(?:-\d+)?\."
"""The device of a journal. If the journal is in the file system itself, jbd2 adds the journal's inode number, as in `sda1-8`."""
_BTRFS_DAMAGE = (
    r"(?:bdev \S+ errs: |(?!unrecognized mount option).*(?:[Cc]orrupt|(?:checksum|csum) (?:verify failed|failed|error|mismatch)"
    r"|transid verify failed|level verify failed|(?:level|first key) mismatch|bad (?:tree block|fsid|extent|key)"
    r"|unable to (?:fixup|find (?:ref|logical))|fixed up error|error writing|(?:I/O|i/o|IO) (?:error|failure)"
    r"|[Ff]ailed to (?:read|load|recover|verify) (?!the system array|.*: -(?:2|22)$)|: -(?:5|117)$))"
)
"""Texts of btrfs about damage, or about data that it could not read or write. btrfs reports mistakes of users, such as a mount
option that does not exist, at the same level. -5 is EIO, -117 EUCLEAN. With -2 or -22, or if the system array cannot be read, a
device of the file system is missing, for example because it was mounted before the kernel knew all of its devices."""
_XFS_DAMAGE = (
    r"(?!User initiated|unknown mount option)"
    r".*(?:[Cc]orruption|Internal error|xfs_do_force_shutdown|I/O [Ee]rror|Shutting down)"
)
_NVME = r"nvme (?P<disk>nvme\d+): "
_NAMESPACE = r"(?P<disk>nvme\d+(?:c\d+)?n\d+)"
_LOCKED = (
    rf"{_NAMESPACE}: .* \(sct 0x2 / sc 0x86\)",
    r"sd [\d:]+: \[(?P<disk>sd\w+)\] .*Add\. Sense: Logical unit access not authorized",
)
"""Messages that a disk denies access: a self-encrypting disk (TCG Opal) that is locked. For each such command, the block layer
then writes a medium error (NVMe) or a target error (SCSI). A write-protected SCSI disk, such as an SSD at the end of its life,
sends the same sense key (Data Protect), but another additional sense (Write protected)."""
_OF_BLOCK_LAYER = re.compile(f"{_BLOCK_LAYER}critical ")
LOCKED_S = 60.0
"""Time in seconds after a message _LOCKED in which the errors of this disk are those of commands that it denied. Both messages
are rate-limited separately, so they do not follow each other one to one."""
_FATAL_RECEIVED = (
    rf"[\w-]+ \S+: AER: (?:Multiple )?Uncorrect(?:ed|able) \(Fatal\) error (?:message )?received(?: from|:) {_PCI}"
)
"""Message that a root port was notified of a fatal error of a device. The kernel then writes a message about the error itself."""


def _adapter(drivers: str) -> str:
    """Return a pattern for the beginning of a message of these drivers, with or without the name of the interface."""
    return rf"(?:{drivers}) {_PCI}(?: [^:]{{1,60}})?: "


_WATCHDOG = _adapter(r"[\w-]+") + r"NETDEV WATCHDOG: CPU: \d+: transmit queue \d+ timed out"
"""Message that a transmit queue made no progress, as Linux 6.8 and later write it. Some drivers write a second one."""
_NO_FIRMWARE = rf"{_MLX5}Firmware over \d+ MS in (?:pre-)?initializing state, aborting"
"""Message that the firmware of the adapter did not start. Some kernels then write a second one: that the probe failed."""
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("nic_temperature", rf"{_MLX5}(?:High temperature on sensors|Health issue observed, High temp|synd 0x10: High temp)"),
    ("nic_firmware", rf"{_MLX5}(?:device's health compromised|Fatal error \d+ detected|health recovery failed)"),
    ("nic_firmware", rf"{_MLX5}(?:Health issue observed, .*severity\([0-3]\)|.*Will cause a leak of a command resource)"),
    ("nic_firmware", _NO_FIRMWARE),
    # Only EIO, ETIME, ETIMEDOUT: other errors may mean that the driver does not fit the kernel, or that a virtual function lacks
    # resources.
    ("nic_firmware", rf"mlx5_core: probe of {_PCI} failed with error -(?:5|62|110)\b"),
    ("nic_firmware", rf"mlx5_core {_PCI}: probe with driver mlx5_core failed with error -(?:5|62|110)\b"),
    ("nic_firmware", _adapter("mlx4_core") + "(?:Internal error detected|device is going to be reset)"),
    ("nic_firmware", _adapter("bnxt_en") + r"(?:.*[Ff]irmware (?:heartbeat|fatal|not respond)|.*missed firmware heartbeat)"),
    ("nic_firmware", _adapter("bnxt_en") + r"(?:Error \(timeout: \d+\) msg|Firmware reset aborted)"),
    ("nic_firmware", _adapter("ice|i40e|ixgbe|igb") + r"(?:Warning )?[Ff]irmware (?:recovery mode|error) detected"),
    ("nic_firmware", _adapter("ice") + r"(?:Rebuild failed|PF VSI rebuild failed|PF reset failed)"),
    ("nic_firmware", _adapter("be2net") + r"(?:Unrecoverable )?[Ee]rror (?:detected )?in the (?:adapter|card)"),
    ("nic_module", rf"{_MLX5}Port module event\[error\]"),
    ("nic_power", rf"{_MLX5}Detected insufficient power on the PCIe slot"),
    ("nic_reset", _adapter("ena|bnxt_en|mlx5_core|ice|i40e") + r"(?:TX timeout detected|Reset reason: .*timeout)"),
    ("nic_reset", r"NETDEV WATCHDOG: (?:CPU: \d+: )?(?P<nic>\S+) \(.*\): transmit queue \d+ timed out"),
    ("nic_reset", _WATCHDOG),
    ("pcie_fatal", rf"[\w-]+ {_PCI}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)"),
    ("pcie_nonfatal", rf"[\w-]+ {_PCI}: (?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)"),
    ("pcie_fatal", _FATAL_RECEIVED),
    ("pcie_lost", rf"[\w-]+ {_PCI}: (?:Unable to change|can't change|Refused to change) power state.*inaccessible"),
    ("pcie_contained", rf"(?:pcieport|pci) {_PCI}: DPC: containment event"),
    ("gpu_reset_required", r"NVRM: .*(?:\[NV_ERR_RESET_REQUIRED\]|GPU marked for reset)"),
    ("gpu_lost", r"NVRM: .*\[NV_ERR_GPU_IS_LOST\]"),
    ("memory_uncorrected", r"(?:mce: )?Uncorrected hardware memory error|Memory failure: 0x[0-9a-f]+: "),
    ("hardware_error", r"NMI: (?:PCI system error|IOCK error)"),
    ("soft_lockup", r"(?:NMI )?(?:watchdog: )?BUG: soft lockup - CPU#(?P<processor>\d+) stuck"),
    ("soft_lockup", r"BUG: workqueue lockup - pool"),
    ("hard_lockup", r"(?:NMI )?(?:watchdog: )?(?:CPU\d+: )?Watchdog detected hard LOCKUP on cpu (?P<processor>\d+)"),
    ("rcu_stall", r"(?:rcu: )?INFO: rcu\w* (?:self-)?detected (?:expedited )?stalls?"),
    ("hung_task", r"INFO: task .*:\d+ blocked (?:in I/O wait )?for more than \d+ seconds"),
    ("iommu_fault", r"DMAR: \[[^\]]*\] Request device \[(?P<pci>[0-9a-fx:.]+)\]"),
    ("iommu_fault", rf"[\w-]+ {_PCI}: AMD-Vi: Event logged \["),
    ("iommu_fault", r"AMD-Vi: Event logged \[\w+ (?:device=(?P<pci>[0-9a-f:.]+))?"),
    ("iommu_fault", r"arm-smmu-v3 \S+: \s*event 0x[0-9a-f]+ received"),
    # Only the driver of PCIe drives writes its next action after the word `timeout`. Time-outs of drives over a network do not
    # match and are not counted: connections to such drives may end in normal operation.
    ("nvme_timeout", rf"{_NVME}I/O (?:tag )?\d+ .*timeout, (?:aborting|completion polled|reset controller|disable controller)"),
    ("nvme_lost", rf"{_NVME}(?:Disabling device after reset failure|Removing after probe failure|Device not ready; aborting)"),
    ("nvme_lost", rf"{_NVME}controller is down; will reset: CSTS[=:]0xffffffff"),
    ("nvme_reset", rf"{_NVME}(?:controller is down; will reset|frozen state error detected|resetting controller due to)"),
    ("disk_error", rf"{_BLOCK_LAYER}(?:critical medium|protection) error, dev {_BLOCK}"),
    ("disk_error", rf"{_BLOCK_LAYER}critical target error, dev {_BLOCK},(?!.* op 0x[0-9a-f]+:\({_WITHOUT_DATA}\))"),
    # 0x85: a comparison that the host asked for failed. 0x86: _LOCKED. 0x87: the block was never written, or was deallocated.
    ("disk_error", rf"{_NAMESPACE}: .* \(sct 0x2 / sc 0x(?!8[567]\))"),
    *(("disk_locked", pattern) for pattern in _LOCKED),
    ("storage_controller", _adapter("megaraid_sas") + "(?:(?:Found )?FW in FAULT state|resetting fusion adapter|Reset failed)"),
    ("storage_controller", r"(?:mpt[23]sas_cm|mpi3mr)\d+: (?:fault_state|coredump_state|fault code)\(0x"),
    ("storage_controller", _adapter("hpsa") + "Controller lockup detected"),
    ("storage_controller", _adapter("smartpqi") + "(?:no heartbeat detected|controller (?:is )?offline)"),
    ("storage_controller", r"aacraid: Host adapter reset request|AAC: Host adapter (?:BLINK LED|(?:is )?dead)"),
    ("storage_controller", rf"(?:AAC\d*|aacraid {_PCI}): adapter kernel panic"),
    # A volume of a RAID controller. The driver writes the events of the controller that are at least critical.
    ("array_member_failed", _adapter("megaraid_sas") + r"\d+ \([^)]*\) - VD \S+ is now (?:PARTIALLY )?(?:DEGRADED|OFFLINE)"),
    ("array_member_failed", rf"md/\w+:md\w+: Disk failure on {_BLOCK}, disabling device"),
    ("array_member_failed", rf"md: kicking (?:non-fresh|faulty) {_BLOCK} from array"),
    ("array_member_failed", r"device-mapper: raid: Failed to read superblock of device"),
    ("file_system", rf"EXT[234]-fs (?:error|critical) \(device {_BLOCK}\)"),
    ("file_system", rf"EXT[234]-fs \({_BLOCK}\): Remounting filesystem read-only"),
    ("file_system", rf"Aborting journal on device {_JOURNAL}"),
    ("file_system", rf"XFS \({_BLOCK}\): {_XFS_DAMAGE}"),
    ("file_system", rf"BTRFS(?: critical|: error) \(device {_BLOCK}"),
    ("file_system", rf"BTRFS error \(device {_BLOCK}[^)]*\): {_BTRFS_DAMAGE}"),
    ("cpu_temperature", r"(?:mce: )?CPU(?P<processor>\d+): (?:Core |Package )?[Tt]emperature (?:is )?above threshold"),
    ("cpu_temperature", r"(?:thermal thermal_zone\d+|ACPI: thermal): .*[Cc]ritical temperature reached"),
)  # fmt: skip
"""Name of the event, and pattern of its message. A pattern must match at the beginning of the message, because the rest may
contain the name of a process, which may be any text."""
_PREVIOUS_BOOT = re.compile(r"BERT: Error records from previous boot:")
"""Message before the firmware records that the kernel found in the Boot Error Record Table (BERT). These records have no number.

The end of these records is not marked on all kernels, and messages of other drivers can come between them. Every later record
without a number counts as one of them: the kernel numbers the records of all other sources (drivers/acpi/apei/ghes.c, bert.c).
"""
_SKIPPED = re.compile(r"BERT: \[Hardware Error\]: Skipped (\d{1,6}) error records")
"""Message about records in the BERT that are too long for the log."""
_RECORD_LINE = re.compile(r"(?:\{(\d+)\})?\[Hardware Error\]: *(.*)")
_MCE = re.compile(
    r"(?:mce: )?\[Hardware Error\]: CPU (\d+): Machine Check(?: Exception)?: [0-9a-f]+ Bank \d+: ([0-9a-f]{16})"
)
_UNCORRECTED_BIT = 61
"""Number of the bit that marks an error as uncorrected in the status of a machine check bank (Intel SDM, IA32_MCi_STATUS, UC)."""
_FIRST_MESSAGES = tuple(re.compile(pattern) for pattern in (_FATAL_RECEIVED, _WATCHDOG, _NO_FIRMWARE))
"""Patterns of messages after which a second message about the same fault may follow."""
_BAD_PAGE = re.compile(
    r"(?:mce: )?Uncorrected hardware memory error in user-access at (?P<address>[0-9a-f]+)"
    r"|Memory failure: 0x(?P<page>[0-9a-f]+): "
)
_PAGE_BITS = 12
"""Number of low bits of an address that select the byte in its page, on x86. Only x86 writes the message with an address."""
_EDAC = re.compile(r"EDAC \w+: (\d+) (CE|UE) (?:.*? )?on (?:(?:any|unknown) memory|(.+?))(?: \(|$)")
"""Some drivers, such as that of AMD processors, write no text between `CE` or `UE` and `on`. The name after `on` can name two
memory modules, as in `A or B`."""
_AMD = re.compile(r"\[Hardware Error\]: (?:Uncorrected, software|(System Fatal error)|Deferred error)")
"""The text in parentheses: the processor had to stop. A kernel that finds such an error panics, unless the error is from before
the boot (arch/x86/kernel/cpu/mce)."""
_CHECK_TIME = re.compile(r"(?:mce: )?\[Hardware Error\]: TSC ([0-9a-f]+)\b")
"""Second line about a machine check, with its time. The time is 0 if the kernel found the error when it read the banks of a
processor: at its start, or later in its timer (arch/x86/kernel/cpu/mce/core.c, machine_check_poll)."""
_FIRST_POLL_S = 300.0
"""Uptime in seconds at which the timer reads the banks for the first time (INITIAL_CHECK_INTERVAL). An error without a time that
the kernel reports earlier is from before the boot."""
_ATTACHED = re.compile(r"(?:nvme (nvme\d+): pci function |sd [\d:]+: \[(sd\w+)\] \d+ \d+-byte logical blocks)")
"""Message that the kernel has found a disk, and has given it a name, which another disk may have had before."""
EVENTS = tuple(
    sorted(
        {event for event, _ in _PATTERNS}
        | {
            "volume_timeout",
            "volume_lost",
            "volume_reset",
            "machine_check",
            "machine_check_corrected",
            "memory_uncorrected",
            "memory_corrected",
            "hardware_error",
            "hardware_corrected",
            "previous_boot",
            "gpu_page_offlined",
        }
    )
)
_ANY = re.compile(
    "|".join(
        re.sub(r"\(\?P<\w+>", "(?:", pattern)
        for pattern in (
            *(text for _, text in _PATTERNS),
            _PREVIOUS_BOOT.pattern,
            _SKIPPED.pattern,
            _RECORD_LINE.pattern,
            _MCE.pattern,
            _EDAC.pattern,
            _AMD.pattern,
            _CHECK_TIME.pattern,
            _ATTACHED.pattern,
        )
    )
)
"""All patterns in one pattern, which quickly rejects the many lines without an event."""
_CORRECTED = ("corrected", "info", "informational")
VOLUME_EVENTS = {"nvme_timeout": "volume_timeout", "nvme_lost": "volume_lost", "nvme_reset": "volume_reset"}
"""Event of an NVMe controller -> its name if the controller is a volume of a cloud, DPU or hypervisor. Such an event shows no
faulty part of the host: the volume may be in the network, and it may be detached at any time."""
FORMER = ".former"
"""Text after the name of a disk that lost this name before the newest message: the name may now be that of another disk."""
_MAX_PARTS = 256
"""Once this many pairs of event and part are counted, events of new pairs count for the host, which limits the memory."""
_MAX_OPEN = 16
"""Maximum number of firmware records, and of faults with two messages, that wait for their further messages."""
_MAX_PAGES = 4096
"""Maximum number of bad pages that are remembered. Every message about any other page counts as an event."""


@dataclass(kw_only=True)
class _HardwareRecord:
    """A record of the firmware (CPER), which the kernel writes in many lines."""

    is_of_previous_boot: bool = False
    severity: str = ""
    section: str = ""
    part: Part = HOST_PART

    @property
    def event(self) -> str:
        """Name of the event of the record. Without a severity, a PCIe record counts as fatal, any other record as uncorrected."""
        if self.is_of_previous_boot:
            return "previous_boot"
        if self.section.startswith("memory"):
            return "memory_corrected" if self.severity in _CORRECTED else "memory_uncorrected"
        if self.section.startswith("PCIe") and self.severity not in _CORRECTED:
            return "pcie_fatal" if self.severity in ("fatal", "") else "pcie_nonfatal"
        return "hardware_corrected" if self.severity in _CORRECTED else "hardware_error"

    def read(self, text: str) -> None:
        """Add one line of the record."""
        key, _, value = (word.strip() for word in text.partition(":"))
        if key == "event severity":
            self.severity = value
        elif key in ("section_type", "section type") and not self.section:
            self.section = value
        elif key == "device_id" and re.fullmatch(_PCI, value):
            self.part = ("pci", value)
        elif key == "DIMM location" and not value.startswith("not present"):
            self.part = ("dimm", value)
        elif re.match(r"node:\d+ ", text) and self.part == HOST_PART:
            location = re.findall(r"(?:node|card|module):\d+", text)
            self.part = ("dimm", ".".join(location).replace(":", ""))


@dataclass(kw_only=True)
class EventCounts:
    """The events in the messages that were added so far."""

    counts: Counter[tuple[str, Part]] = field(default_factory=Counter)
    newest: dict[tuple[str, Part], float] = field(default_factory=dict)
    """Event and part -> seconds from boot to the newest message."""
    is_gpu_page: Callable[[int], bool] = lambda page: False
    """Returns whether the page with this page frame number is memory of a GPU."""
    _open: dict[str, _HardwareRecord] = field(default_factory=dict)
    """Number of a firmware record -> the record. It may get further lines."""
    _has_previous: bool = False
    """Whether the log has the line _PREVIOUS_BOOT."""
    _reported: dict[tuple[str, Part], None] = field(default_factory=dict)
    """Event and part of each fault whose newest message is one of _FIRST_MESSAGES. The next message about the same event of this
    part is about the same fault and is not counted, unless it is one of _FIRST_MESSAGES too."""
    _pages: set[int] = field(default_factory=set)
    """Page frame numbers of bad memory."""
    _locked: dict[str, float] = field(default_factory=dict)
    """Disk -> uptime at its newest message that it denies access."""
    _check: tuple[tuple[str, Part], float] | None = None
    """Event and part of the machine check whose second line is awaited, and their value in `newest` before it."""

    def add(self, message: str, uptime: float) -> None:
        """Count the event that a message reports, if any. `uptime` is the time of the message in seconds since boot."""
        if not _ANY.match(message):
            return
        if machine_check := _machine_check(message):
            self._check = machine_check, self.newest.get(machine_check, 0.0)
            self._count(*machine_check, uptime)
        elif time := _CHECK_TIME.match(message):
            if time[1] == "0" and uptime < _FIRST_POLL_S:
                self._move_check(uptime)
            self._check = None
        elif attached := _ATTACHED.match(message):
            self._rename_former_disk(attached[1] or attached[2], uptime)
        elif edac := _EDAC.match(message):
            event = "memory_corrected" if edac[2] == "CE" else "memory_uncorrected"
            self._count(event, ("dimm", edac[3]) if edac[3] else HOST_PART, uptime, int(edac[1]))
        elif _PREVIOUS_BOOT.match(message):
            self._has_previous = True
        elif skipped := _SKIPPED.match(message):
            self._count("previous_boot", HOST_PART, uptime, int(skipped[1]))
        elif line := _RECORD_LINE.match(message):
            self._read_record(line[1] or "", line[2], uptime)
        elif (parsed := parse_event(message)) and not self._is_denied(message, *parsed, uptime):
            event, part = parsed
            if (page := _page(message)) is not None and self.is_gpu_page(page):
                event = "gpu_page_offlined"
            self._count(event, part, uptime, 0 if self._continues(message, event, part) else 1)

    def by_part(self) -> Iterator[tuple[str, Part, int]]:
        """Yield every event with its part and count, sorted. Firmware records that may get further lines are included."""
        counts = self.counts + Counter((record.event, record.part) for record in self._open.values() if record.section)
        for (event, part), count in sorted(counts.items()):
            yield event, part, count

    def _continues(self, message: str, event: str, part: Part) -> bool:
        """Return whether an earlier message has reported the same fault, and remember the fault for later messages.

        Only bad pages and faults with two messages are remembered. The result is False for all other faults.
        """
        if (number := _page(message)) is not None:
            is_known = number in self._pages
            if len(self._pages) < _MAX_PAGES:
                self._pages.add(number)
            return is_known
        was_reported = (event, part) in self._reported
        self._reported.pop((event, part), None)
        if not any(pattern.match(message) for pattern in _FIRST_MESSAGES):
            return was_reported
        while len(self._reported) >= _MAX_OPEN:
            del self._reported[next(iter(self._reported))]
        self._reported[event, part] = None
        return False

    def _is_denied(self, message: str, event: str, part: Part, uptime: float) -> bool:
        """Return whether a message of the block layer is about a command that a locked disk denied. Remember locked disks."""
        disk = re.sub(r"c\d+(?=n\d+$)", "", part[1])
        if event == "disk_locked" and (disk in self._locked or len(self._locked) < _MAX_PARTS):
            self._locked[disk] = uptime
        is_recent = uptime - self._locked.get(disk, float("-inf")) <= LOCKED_S
        return event == "disk_error" and is_recent and bool(_OF_BLOCK_LAYER.match(message))

    def _move_check(self, uptime: float) -> None:
        """Count the newest machine check as an error of the previous boot."""
        if self._check is None:
            return
        (event, part), former = self._check
        if self.counts[event, part] > 0:  # 0 if it counts for the host, see _MAX_PARTS
            self.counts -= Counter({(event, part): 1})
            self.newest[event, part] = former
            if not former:
                del self.newest[event, part]
            self._count("previous_boot", part, uptime)

    def _rename_former_disk(self, name: str, uptime: float) -> None:
        """Attribute all events of the disk with this name, so far, to a former disk: the kernel has given the name again.

        Exception: a locked SCSI disk denies commands before the kernel writes the message _ATTACHED about it.
        """
        if name.startswith("sd") and uptime - self._locked.get(name, float("-inf")) <= LOCKED_S:
            return
        of_disk = re.compile(rf"{name}(?:(?:c\d+)?n\d+(?:p\d+)?)?" if name.startswith("nvme") else rf"{name}\d*")
        for event, part in [key for key in self.counts if key[1][0] == "disk" and of_disk.fullmatch(key[1][1])]:
            self.counts[event, ("disk", part[1] + FORMER)] += self.counts.pop((event, part))
            self._see(event, ("disk", part[1] + FORMER), self.newest.pop((event, part), 0.0))
        for disk in filter(of_disk.fullmatch, list(self._locked)):
            del self._locked[disk]

    def _count(self, event: str, part: Part, uptime: float, times: int = 1) -> None:
        keeps_part = (event, part) in self.counts or len(self.counts) < _MAX_PARTS
        self.counts[event, part if keeps_part else HOST_PART] += times
        self._see(event, part, uptime)

    def _see(self, event: str, part: Part, uptime: float) -> None:
        keeps_part = (event, part) in self.newest or len(self.newest) < _MAX_PARTS
        key = event, part if keeps_part else HOST_PART
        self.newest[key] = max(self.newest.get(key, 0.0), uptime)

    def _read_record(self, number: str, text: str, uptime: float) -> None:
        is_new = text.startswith(("Hardware error from APEI", "event severity")) and not (
            text.startswith("event severity") and number in self._open and not self._open[number].severity
        )
        if is_new:
            self._close(number)
            while len(self._open) >= _MAX_OPEN:
                self._close(next(iter(self._open)))
            self._open[number] = _HardwareRecord(is_of_previous_boot=self._has_previous and not number)
        if record := self._open.get(number):
            record.read(text)
            if record.section:
                self._see(record.event, record.part, uptime)

    def _close(self, number: str) -> None:
        record = self._open.pop(number, None)
        if record and record.section:
            keeps_part = (record.event, record.part) in self.counts or len(self.counts) < _MAX_PARTS
            self.counts[record.event, record.part if keeps_part else HOST_PART] += 1


def parse_event(message: str) -> tuple[str, Part] | None:
    """Return the event and the part that one message reports; None if no pattern of _PATTERNS matches it."""
    for event, pattern in _compiled():
        if match := pattern.match(message):
            named = ((kind, name) for kind, name in match.groupdict().items() if name)
            return event, next(
                ((kind, _full_address(name) if kind == "pci" else name) for kind, name in named), HOST_PART
            )
    return None


@cache
def _compiled() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return _PATTERNS, compiled. Most kernel logs have no event, so that most commands need not compile the patterns."""
    return tuple((event, re.compile(pattern)) for event, pattern in _PATTERNS)


def _machine_check(message: str) -> tuple[str, Part] | None:
    if match := _MCE.match(message):
        is_uncorrected = int(match[2], 16) >> _UNCORRECTED_BIT & 1
        return "machine_check" if is_uncorrected else "machine_check_corrected", ("processor", match[1])
    match = _AMD.match(message)
    return ("previous_boot" if match[1] else "machine_check", HOST_PART) if match else None


def _page(message: str) -> int | None:
    """Return the page frame number in a message about a bad page of memory; None for any other message."""
    if match := _BAD_PAGE.match(message):
        return int(match["page"], 16) if match["page"] else int(match["address"], 16) >> _PAGE_BITS
    return None


def _full_address(printed: str) -> str:
    """Return a PCI address as in sysfs. IOMMU drivers may leave out the domain if it is 0, or write `0x` before numbers."""
    address = printed.replace("0x", "")
    return address if address.count(":") > 1 else f"0000:{address}"
