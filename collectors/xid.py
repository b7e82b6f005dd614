"""Errors of GPUs (XID) and NVSwitches (SXid) that the NVIDIA driver has written to the kernel log since boot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collectors import kernel_log
from collectors.base import HOST, Absent, Family
from collectors.kernel_log import RingBuffer

# `PCI:0000:5d:00`; old drivers leave out `PCI:`, and a GPU under MIG adds `GPU-I:05 GPU-CI:00`. Anchored, because a process name
# may look like an XID.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+(?::[0-9a-fA-F]+){2}(?:\.[0-7])?)(?: GPU-[^)]*)?\): (\d+)(?!\d)")
_NVLINK5_FATAL = re.compile(r"\): (?:14[4-9]|150), .*?\S+ Fatal ")
_SXID = re.compile(r"nvidia-nvswitch\d+: SXid \(PCI:([0-9a-fA-F:]+\.[0-7])\): (\d+), (.*)")
_SXID_DETAIL = re.compile(r"Severity \d|Data \{")
_SEVERITY = {"Fatal": "yes", "Non-fatal": "no", "Correctable": "no"}
_MESSAGE = re.compile(r"NVRM: GPU ([0-9a-fA-F:]+\.[0-7]): (GPU has fallen off the bus|RmInitAdapter failed)")
_MESSAGES = {"GPU has fallen off the bus": "fallen_off_the_bus", "RmInitAdapter failed": "init_failed"}


@dataclass
class ErrorCounts:
    """The errors in the part of the log that was read."""

    xid: Counter[tuple[str, str]] = field(default_factory=Counter)
    fatal: Counter[tuple[str, str]] = field(default_factory=Counter)
    sxid: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    last_xid: float = 0.0
    last_sxid: float = 0.0
    complete: bool = True
    """The log reaches back to the boot."""

    def add(self, lines: Iterable[str]) -> None:
        """Count the errors in these lines."""
        for line in lines:
            if "NVRM: " not in line and "nvidia-nvswitch" not in line:
                continue
            message = kernel_log.message(line)
            if gpu_error := parse_xid(message):
                self.xid[gpu_error] += 1
                self.fatal[gpu_error] += bool(_NVLINK5_FATAL.search(message))
                self.last_xid = max(self.last_xid, kernel_log.uptime(line))
            elif switch_error := parse_sxid(message):
                self.sxid[switch_error] += 1
                self.last_sxid = max(self.last_sxid, kernel_log.uptime(line))
            elif match := _MESSAGE.match(message):
                self.messages[sysfs_address(match.group(1)), _MESSAGES[match.group(2)]] += 1


class XidCollector:
    """Reads the kernel's ring buffer. A scrape reads only new records and adds them to its counts.

    A full snapshot reads the whole buffer, and the journal for records that the buffer has lost or does not permit to read.
    """

    name = "xid"

    def __init__(
        self,
        log: Path = kernel_log.KMSG,
        full_snapshot: bool = False,
        commands: Sequence[Sequence[str]] = kernel_log.COMMANDS,
    ) -> None:
        self._log = log
        self._full_snapshot = full_snapshot
        self._commands = commands
        self._ring: RingBuffer | None = None
        self._counts = ErrorCounts()

    def collect(self) -> Iterable[Family]:
        try:
            return _families(self._read_all() if self._full_snapshot else self._read_new())
        except OSError as error:
            return _families(Absent.error(f"{self._log}: {error.strerror}"))

    def _read_all(self) -> ErrorCounts:
        log = kernel_log.read_log(self._log, self._commands)
        counts = ErrorCounts(complete=log.complete)
        counts.add(log.lines)
        return counts

    def _read_new(self) -> ErrorCounts:
        if self._ring is None:
            self._ring, self._counts = RingBuffer(self._log), ErrorCounts()
        try:
            self._counts.add(self._ring.new_lines())
        except OSError:
            self._ring.close()
            self._ring = None
            raise
        self._counts.complete = self._ring.complete
        return self._counts


def _families(result: ErrorCounts | Absent) -> list[Family]:
    counts = ErrorCounts() if isinstance(result, Absent) else result
    # A count falls when the buffer overwrites old records, which can hide a new error. The newest time does not fall.
    newest = Family(name="xid.last_seen", unit="s", help="Uptime at the newest XID in the kernel log; 0: none")
    count = Family(name="xid.count", unit="1", help="XIDs in the kernel log")
    fatal = Family(name="xid.fatal", unit="1", help="NVLink 5 XIDs marked fatal in the kernel log")
    messages = Family(name="xid.message", unit="1", help="Kernel messages about a lost GPU that are not XIDs")
    complete = Family(name="xid.log_complete", unit="1", help="The kernel log reaches back to the boot")
    sxid_count = Family(name="sxid.count", unit="1", help="SXids of NVSwitches in the kernel log")
    newest_sxid = Family(name="sxid.last_seen", unit="s", help="Uptime at the newest SXid in the kernel log; 0: none")
    newest.add(HOST, result if isinstance(result, Absent) else counts.last_xid)
    complete.add(HOST, result if isinstance(result, Absent) else counts.complete)
    newest_sxid.add(HOST, result if isinstance(result, Absent) else counts.last_sxid)
    for family, by_code in ((count, counts.xid), (fatal, +counts.fatal)):
        for (pci, code), times in sorted(by_code.items()):
            family.add({"pci": pci, "xid": code}, times)
    for (pci, message), times in sorted(counts.messages.items()):
        messages.add({"pci": pci, "message": message}, times)
    for (pci, is_fatal, code), times in sorted(counts.sxid.items()):
        sxid_count.add({"pci": pci, "fatal": is_fatal, "sxid": code}, times)
    return [newest, count, fatal, messages, complete, newest_sxid, sxid_count]


def parse_xid(message: str) -> tuple[str, str] | None:
    """Return PCI address and code of the XID in a kernel message, or None."""
    match = _XID.match(message)
    return (sysfs_address(match.group(1)), match.group(2)) if match else None


def parse_sxid(message: str) -> tuple[str, str, str] | None:
    """Return PCI address, whether fatal (`yes`, `no`, `unsaid`) and code of an SXid; None also for its detail lines."""
    match = _SXID.match(message)
    if not match or _SXID_DETAIL.match(match.group(3)):
        return None
    severity = _SEVERITY.get(match.group(3).split(",")[0], "unsaid")
    return sysfs_address(match.group(1)), severity, str(int(match.group(2)))


def sysfs_address(printed: str) -> str:
    """Return a PCI address as sysfs spells it. The driver leaves out the function of a GPU, which is 0."""
    return printed.lower() if "." in printed else f"{printed.lower()}.0"
