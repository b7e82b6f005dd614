"""Errors of GPUs (XID) and NVSwitches (SXid) that the NVIDIA driver wrote into the kernel's log since boot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collectors import kernel_log
from collectors.base import HOST, Absent, Family
from collectors.kernel_log import Ring

# `PCI:0000:5d:00`, without `PCI:` from old drivers, with `GPU-I:05 GPU-CI:00` on a GPU that MIG divides. Anchored: a process
# may have in its name what looks like an error of a GPU.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]+(?::[0-9a-fA-F]+){2}(?:\.[0-7])?)(?: GPU-[^)]*)?\): (\d+)(?!\d)")
_NVLINK5_FATAL = re.compile(r"\): (?:14[4-9]|150), .*?\S+ Fatal ")
_SXID = re.compile(r"nvidia-nvswitch\d+: SXid \(PCI:([0-9a-fA-F:]+\.[0-7])\): (\d+), (.*)")
_SXID_DETAIL = re.compile(r"Severity \d|Data \{")
_SEVERITY = {"Fatal": "yes", "Non-fatal": "no", "Correctable": "no"}
_MESSAGE = re.compile(r"NVRM: GPU ([0-9a-fA-F:]+\.[0-7]): (GPU has fallen off the bus|RmInitAdapter failed)")
_MESSAGES = {"GPU has fallen off the bus": "fallen_off_the_bus", "RmInitAdapter failed": "init_failed"}


@dataclass
class Tally:
    """What was found in the log so far, and how much of the log that is."""

    xid: Counter[tuple[str, str]] = field(default_factory=Counter)
    fatal: Counter[tuple[str, str]] = field(default_factory=Counter)
    sxid: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    last_xid: float = 0.0
    last_sxid: float = 0.0
    complete: bool = True

    def add(self, lines: Iterable[str]) -> None:
        """Counts what the lines tell."""
        for line in lines:
            if "NVRM: " not in line and "nvidia-nvswitch" not in line:
                continue
            said = kernel_log.message(line)
            if found := xid(said):
                self.xid[found] += 1
                self.fatal[found] += bool(_NVLINK5_FATAL.search(said))
                self.last_xid = max(self.last_xid, kernel_log.uptime(line))
            elif switch := sxid(said):
                self.sxid[switch] += 1
                self.last_sxid = max(self.last_sxid, kernel_log.uptime(line))
            elif other := _MESSAGE.match(said):
                self.messages[address(other.group(1)), _MESSAGES[other.group(2)]] += 1


class XidCollector:
    """Reads the kernel's ring buffer, for a scrape only what is new in it: what was counted once stays counted.

    A snapshot (`thorough`) reads all of it, and asks the journal for what it has lost or refuses.
    """

    name = "xid"

    def __init__(
        self,
        log: Path = kernel_log.KMSG,
        thorough: bool = False,
        commands: Sequence[Sequence[str]] = kernel_log.COMMANDS,
    ) -> None:
        self._log = log
        self._thorough = thorough
        self._commands = commands
        self._ring: Ring | None = None
        self._kept = Tally()

    def collect(self) -> Iterable[Family]:
        try:
            return _families(self._whole() if self._thorough else self._new())
        except OSError as error:
            return _families(Absent(status="error", reason=f"{self._log}: {error.strerror}"))

    def _whole(self) -> Tally:
        log = kernel_log.whole(self._log, self._commands)
        tally = Tally(complete=log.complete)
        tally.add(log.lines)
        return tally

    def _new(self) -> Tally:
        if self._ring is None:
            self._ring, self._kept = Ring(self._log), Tally()
        try:
            self._kept.add(self._ring.lines())
        except OSError:
            self._ring.close()
            self._ring = None
            raise
        self._kept.complete = self._ring.complete
        return self._kept


def _families(found: Tally | Absent) -> list[Family]:
    tally = Tally() if isinstance(found, Absent) else found
    # A count can fall as the buffer rolls over, and hide a new error; the time of the newest one cannot.
    newest = Family(name="xid.last_seen", unit="s", help="Uptime at the newest XID in the kernel log; 0: there is none")
    count = Family(name="xid.count", unit="1", help="XIDs in the kernel log")
    fatal = Family(name="xid.fatal", unit="1", help="XIDs of NVLink 5 that the driver calls fatal, in the kernel log")
    messages = Family(name="xid.message", unit="1", help="Other messages of a lost GPU in the kernel log")
    complete = Family(name="xid.log_complete", unit="1", help="The kernel log reaches back to the boot")
    switches = Family(name="sxid.count", unit="1", help="SXids of NVSwitches in the kernel log")
    switch = Family(
        name="sxid.last_seen", unit="s", help="Uptime at the newest SXid in the kernel log; 0: there is none"
    )
    newest.add(HOST, found if isinstance(found, Absent) else tally.last_xid)
    complete.add(HOST, found if isinstance(found, Absent) else tally.complete)
    switch.add(HOST, found if isinstance(found, Absent) else tally.last_sxid)
    for family, counted in ((count, tally.xid), (fatal, +tally.fatal)):
        for (pci, code), times in sorted(counted.items()):
            family.add({"pci": pci, "xid": code}, times)
    for (pci, message), times in sorted(tally.messages.items()):
        messages.add({"pci": pci, "message": message}, times)
    for (pci, is_fatal, code), times in sorted(tally.sxid.items()):
        switches.add({"pci": pci, "fatal": is_fatal, "sxid": code}, times)
    return [newest, count, fatal, messages, complete, switch, switches]


def xid(said: str) -> tuple[str, str] | None:
    """PCI address and code of the XID that a message of the kernel is; None where it is none."""
    found = _XID.match(said)
    return (address(found.group(1)), found.group(2)) if found else None


def sxid(said: str) -> tuple[str, str, str] | None:
    """PCI address, whether fatal (`yes`, `no`, `unsaid`) and code of an SXid; None also for the lines that detail one."""
    found = _SXID.match(said)
    if not found or _SXID_DETAIL.match(found.group(3)):
        return None
    severity = _SEVERITY.get(found.group(3).split(",")[0], "unsaid")
    return address(found.group(1)), severity, str(int(found.group(2)))


def address(printed: str) -> str:
    """A PCI address as sysfs spells it. The driver leaves out the function of a GPU, which is 0."""
    return printed.lower() if "." in printed else f"{printed.lower()}.0"
