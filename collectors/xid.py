"""Errors in the kernel log since boot.

The NVIDIA driver logs errors of GPUs (XIDs) and of NVSwitches (SXids). The kernel logs errors of other parts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from collectors import kernel_log
from collectors.base import HOST_LABELS, Absent, Family, mark_varying
from collectors.files import Files
from collectors.host.memory import is_gpu_page
from collectors.kernel_events import EVENTS, FORMER, PARTS, VOLUME_EVENTS, EventCounts, Part
from collectors.kernel_log import RingBuffer
from collectors.storage.disks import CONTROLLERS, is_volume

# The text in parentheses is `PCI:0000:5d:00`. Old drivers leave out `PCI:`; with MIG the driver adds `GPU-I:05 GPU-CI:00`. The
# pattern must match at the beginning of the message, because a process name later in it may look like an XID.
_XID = re.compile(r"NVRM:\s+Xid\s+\(([^)]*)\)\s*:\s*(\d{1,4})(?!\d)(.*)", re.DOTALL)
_ADDRESS = r"(?:PCI:)?(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}(?:\.[0-7])?"
_LEADING_ADDRESS = re.compile(rf"{_ADDRESS}(?![0-9a-fA-F.:/])")
_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]+)+")
_GPU_AT = re.compile(rf"NVRM:\s+GPU at ({_ADDRESS}): ({_UUID.pattern})")
_PREEMPTED, _ACTION = 45, 154
"""XID 45 reports that the channels of a process were removed, XID 154 that the recovery action of a GPU changed."""
_NVLINK5 = range(144, 151)
"""XIDs of NVLink 5. Fatal and other errors have the same code; only the text after it shows the severity, as in
`NETIR_LINK_EVT  Fatal   XC0 i0 Link 01`."""
_NVLINK5_SEVERITY = re.compile(r"\s(Fatal|Non-?fatal)\s+(?:XC|i ?\d|Link)", re.IGNORECASE)
_SXID = re.compile(rf"nvidia-nvswitch\d+:\s+SXid\s+\(({_ADDRESS})\)\s*:\s*(\d+)\s*,\s*(.*)")
_SXID_DETAIL = re.compile(r"Severity \d|Data \{")
_SEVERITY = {"fatal": "yes", "non-fatal": "no", "nonfatal": "no", "correctable": "no"}
_LOST, _INIT_FAILED, _PROBE_FAILED = "fallen_off_the_bus", "init_failed", "probe_failed"
_NO_BAR, _OTHER_DRIVER = "no_address_space", "other_driver"
_GPU_SENTENCE = rf"NVRM:\s+The NVIDIA v?GPU ({_ADDRESS})\s"
_MESSAGES = (
    (_LOST, re.compile(rf"NVRM:\s+GPU (?:at )?({_ADDRESS}):\s+GPU has fallen off the bus")),
    (_LOST, re.compile(rf"{_GPU_SENTENCE}.*fallen off the bus")),
    ("open_modules_required", re.compile(rf"{_GPU_SENTENCE}.*requires use of the NVIDIA")),
    ("open_modules_unsupported", re.compile(rf"{_GPU_SENTENCE}.*is not supported by open")),
    ("unsupported_by_driver", re.compile(rf"{_GPU_SENTENCE}.*is not supported by the")),
    (
        "firmware_missing",
        re.compile(rf"nvidia ({_ADDRESS}): Direct firmware load for nvidia/\S+ failed with error -2\b"),
    ),
    (_NO_BAR, re.compile(rf"NVRM:\s+BAR\d is 0M @ 0x0+ \(({_ADDRESS})\)")),
    (_OTHER_DRIVER, re.compile(rf"NVRM:\s+GPU ({_ADDRESS}) is already bound to ")),
    (_INIT_FAILED, re.compile(rf"NVRM:\s+GPU (?:at )?({_ADDRESS}):\s+RmInitAdapter failed")),
    (_PROBE_FAILED, re.compile(rf"nvidia(?: ({_ADDRESS}): probe with driver nvidia|: probe of ({_ADDRESS})) failed")),
)
"""Messages of the driver, without an XID, about a GPU that is lost or cannot be used."""
_REASONS = (
    ("confidential_computing", re.compile(r"NVRM:\s+confComputeConstructEngine\w*: .*not enabled")),
    (_NO_BAR, re.compile(r"NVRM:\s+request_mem_region failed for 0M @ 0x0\b")),
    (_OTHER_DRIVER, re.compile(r"NVRM:\s+request_mem_region failed for ")),
)
"""Messages with the reason why a GPU failed to start, but without the address of the GPU.

The address is in a second message, which reports that the GPU failed to start. It follows within REASON_S seconds.
"""
REASON_S = 60.0
_RESOLVED = re.compile(r", GPU recovery action changed from .* to 0x0\b")
"""Text of an XID 154 that withdraws the action for an earlier XID: `changed from 0x1 (GPU Reset Required) to 0x0 (None)`."""
_SENTENCE = re.compile(r"NVRM:\s+The NVIDIA v?GPU ")
_SENTENCE_PART = re.compile(r"\s*NVRM:\s+((?:\(PCI ID|installed in|system has|fallen off).*)")
"""Matches a line that continues a sentence of the driver. A sentence has three lines (here ` / ` separates them):

`The NVIDIA GPU 0000:18:00.0 / (PCI ID: 10de:2330) installed in this system has / fallen off the bus and is not responding`.
"""


@dataclass
class ErrorCounts:
    """Counts of the errors in the lines of the kernel log that were read so far."""

    xid: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(PCI address of the GPU, code) -> number of XIDs. A GPU whose address is unknown has its UUID in place of the address."""
    fatal: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Like `xid`, but only the NVLink 5 XIDs that the driver marked as fatal."""
    sxid: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """(PCI address, whether fatal (`yes`, `no` or `unknown`), code) -> number of SXids."""
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(PCI address, kind of message) -> number of messages."""
    events: EventCounts = field(default_factory=EventCounts)
    last_xid: float = 0.0
    """Uptime at the newest XID that reports a fault, in s; 0: none."""
    last_sxid: float = 0.0
    """Uptime at the newest SXid, in s; 0: none."""
    complete: bool = True
    """Whether the lines reach back to the boot without a known gap."""
    addresses: dict[str, str] = field(default_factory=dict)
    """UUID -> PCI address, from the messages of the driver."""
    sentence: str = ""
    """The lines read so far of the newest `The NVIDIA GPU …` sentence, joined; the driver splits it into several lines."""
    reason: str = ""
    """Kind of the newest message that matches _REASONS; empty: none. It applies only to the next GPU that fails to start."""
    reason_at: float = 0.0
    """Uptime at which the reason was logged, in s."""

    def add(self, lines: Iterable[str]) -> None:
        """Count the errors in these lines."""
        for line in lines:
            is_of_driver = "NVRM: " in line or "nvidia" in line
            for message in kernel_log.messages(line):
                if is_of_driver:
                    self._add_message(message, kernel_log.uptime(line))
                self.events.add(message, kernel_log.uptime(line))

    def _add_message(self, message: str, uptime: float) -> None:
        if error := parse_xid(message):
            address = self.addresses.get(error.pci, error.pci)
            self.xid[address, error.code] += 1
            self.fatal[address, error.code] += error.is_fatal
            if error.is_fault:
                self.last_xid = max(self.last_xid, uptime)
        elif switch_error := parse_sxid(message):
            self.sxid[switch_error] += 1
            self.last_sxid = max(self.last_sxid, uptime)
        elif match := _GPU_AT.match(message):
            self.addresses[match[2]] = sysfs_address(match[1])
        elif reason := next((kind for kind, pattern in _REASONS if pattern.match(message)), ""):
            self.reason, self.reason_at = reason, uptime
        elif on_gpu := parse_message(self._whole_sentence(message)):
            self.sentence = ""
            self.messages[on_gpu] += 1
            address, kind = on_gpu
            if self.reason and kind in (_INIT_FAILED, _PROBE_FAILED):
                if uptime - self.reason_at <= REASON_S:  # a GPU that fails later has another reason
                    self.messages[address, self.reason] += 1
                self.reason = ""

    def _whole_sentence(self, message: str) -> str:
        """Return the message. If it continues a sentence about a GPU, put the earlier lines of the sentence before it."""
        if _SENTENCE.match(message):
            self.sentence = message
        elif self.sentence and (part := _SENTENCE_PART.match(message)):
            self.sentence = f"{self.sentence} {part[1]}"
            return self.sentence
        return message


class XidCollector:
    """Reads the kernel's ring buffer. A scrape reads only new records and adds their errors to the counts of earlier scrapes.

    A full snapshot reads the whole buffer. If the buffer has lost records or cannot be read, the snapshot also reads the output
    of journalctl or, if that prints no records, of dmesg.
    """

    name = "xid"

    def __init__(
        self,
        log: Path = kernel_log.KMSG,
        full_snapshot: bool = False,
        commands: Sequence[Sequence[str]] = kernel_log.COMMANDS,
        root: Path = Path("/"),
    ) -> None:
        self._log = log
        self._full_snapshot = full_snapshot
        self._commands = commands
        self._files = Files(root)
        self._ring: RingBuffer | None = None
        self._counts = ErrorCounts()

    def collect(self) -> Iterable[Family]:
        try:
            result: ErrorCounts | Absent = self._read_all() if self._full_snapshot else self._read_new()
        except OSError as error:
            result = Absent.error(f"{self._log}: {error.strerror}")
        return mark_varying(_families(result, self._files))

    def _read_all(self) -> ErrorCounts:
        log = kernel_log.read_log(self._log, self._commands)
        counts = ErrorCounts(complete=log.complete, events=self._event_counts())
        counts.add(log.lines)
        return counts

    def _event_counts(self) -> EventCounts:
        return EventCounts(is_gpu_page=partial(is_gpu_page, self._files))

    def _read_new(self) -> ErrorCounts:
        if self._ring is None:
            self._ring, self._counts = RingBuffer(self._log), ErrorCounts(events=self._event_counts())
        try:
            self._counts.add(self._ring.new_lines())
        except OSError:
            self._ring.close()
            self._ring = None
            raise
        self._counts.complete = self._ring.complete
        return self._counts


def _families(result: ErrorCounts | Absent, files: Files) -> list[Family]:
    counts = ErrorCounts() if isinstance(result, Absent) else result
    # When the buffer overwrites old records, a count may be lower than in an earlier full snapshot although there is a new error.
    # The time of the newest error still shows the new error.
    newest = Family(name="xid.last_seen", unit="s", help="Uptime at the newest XID that reports a fault; 0: none")
    count = Family(name="xid.count", unit="1", help="XIDs in the kernel log")
    fatal = Family(name="xid.fatal", unit="1", help="NVLink 5 XIDs marked fatal in the kernel log")
    messages = Family(
        name="xid.message", unit="1", help="Kernel messages about a GPU that is lost or does not start, other than XIDs"
    )
    complete = Family(name="xid.log_complete", unit="1", help="The kernel log reaches back to the boot")
    sxid_count = Family(name="sxid.count", unit="1", help="SXids of NVSwitches in the kernel log")
    newest_sxid = Family(name="sxid.last_seen", unit="s", help="Uptime at the newest SXid in the kernel log; 0: none")
    event_count = Family(
        name="kernel.event.count",
        unit="1",
        help="Messages in the kernel log about faults of parts of the host",
        labels=(*PARTS, "event"),
    )
    newest_event = Family(
        name="kernel.event.last_seen",
        unit="s",
        help="Uptime at the newest fault of this kind in the kernel log; 0: none. Event previous_boot: a fault that the firmware "
        "recorded before this boot; the part may have been repaired or replaced since",
    )
    for event, part, times in counts.events.by_part():
        event_count.add({**dict([part] if part[0] else []), "event": _event(files, event, part)}, times)
    last_seen = dict.fromkeys(EVENTS, 0.0)
    for (event, part), uptime in counts.events.newest.items():
        name = _event(files, event, part)
        last_seen[name] = max(last_seen[name], uptime)
    for event, uptime in () if isinstance(result, Absent) else last_seen.items():
        newest_event.add({"event": event}, uptime)
    newest.add(HOST_LABELS, result if isinstance(result, Absent) else counts.last_xid)
    complete.add(HOST_LABELS, result if isinstance(result, Absent) else counts.complete)
    newest_sxid.add(HOST_LABELS, result if isinstance(result, Absent) else counts.last_sxid)
    for family, by_code in ((count, counts.xid), (fatal, +counts.fatal)):
        for (pci, code), times in sorted(by_code.items()):
            family.add({"pci": pci, "xid": code}, times)
    for (pci, message), times in sorted(counts.messages.items()):
        messages.add({"pci": pci, "message": message}, times)
    for (pci, is_fatal, code), times in sorted(counts.sxid.items()):
        sxid_count.add({"pci": pci, "fatal": is_fatal, "sxid": code}, times)
    return [newest, count, fatal, messages, complete, newest_sxid, sxid_count, event_count, newest_event]


def _event(files: Files, event: str, part: Part) -> str:
    """Return the name of an event of a part. Events of NVMe controllers that are volumes have names of their own."""
    is_of_volume = event in VOLUME_EVENTS and is_volume(files, f"{CONTROLLERS}/{part[1].removesuffix(FORMER)}")
    return VOLUME_EVENTS[event] if is_of_volume else event


@dataclass(frozen=True, kw_only=True)
class Xid:
    """An XID in the kernel log."""

    pci: str
    """PCI address as in sysfs, or the UUID of the GPU if the message has only that."""
    code: str
    is_fatal: bool
    """Whether the driver marked an NVLink 5 error as fatal."""
    is_fault: bool = True
    """False for XID 45, which follows the end of a process, and for an XID 154 that withdraws a recovery action."""


def parse_xid(message: str) -> Xid | None:
    """Return the XID in a kernel message, or None."""
    match = _XID.match(message)
    if not match:
        return None
    location = match[1].strip()
    address, uuid = _LEADING_ADDRESS.match(location), _UUID.search(location)
    if not address and not uuid:
        return None
    # The name of a process may look like a severity and comes before the real severity, so use the last match.
    severities = _NVLINK5_SEVERITY.findall(match[3]) if int(match[2]) in _NVLINK5 else []
    return Xid(
        pci=sysfs_address(address[0]) if address else uuid[0],  # type: ignore[index]  # one of them exists
        code=str(int(match[2])),
        is_fatal=bool(severities) and severities[-1].lower() == "fatal",
        is_fault=not (int(match[2]) == _PREEMPTED or (int(match[2]) == _ACTION and _RESOLVED.match(match[3]))),
    )


def parse_sxid(message: str) -> tuple[str, str, str] | None:
    """Return PCI address, whether fatal (`yes`, `no`, `unknown`) and code of an SXid.

    Return None for other messages, including those that only add details to an earlier SXid message.
    """
    match = _SXID.match(message)
    if not match or _SXID_DETAIL.match(match[3]):
        return None
    severity = _SEVERITY.get(match[3].split(",")[0].strip().lower(), "unknown")
    return sysfs_address(match[1]), severity, str(int(match[2]))


def parse_message(message: str) -> tuple[str, str] | None:
    """Return PCI address and kind of a message about a GPU that the driver has lost or cannot use, or None."""
    for kind, pattern in _MESSAGES:
        if match := pattern.match(message):
            return sysfs_address(match[match.lastindex or 1]), kind
    return None


def sysfs_address(printed: str) -> str:
    """Return an address from the driver (`PCI:5d:00`) as in sysfs (`0000:5d:00.0`), with 0 for a missing domain or function."""
    address, _, function = printed.removeprefix("PCI:").partition(".")
    domain, bus, device = (int(number, 16) for number in f"0:{address}".split(":")[-3:])
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function or 0}"
