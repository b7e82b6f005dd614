"""XID errors that the NVIDIA driver wrote into the kernel log since boot."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from collectors.base import HOST, Absent, Family

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_RECORD_BYTES = 8192


class XidCollector:
    """Reads the kernel's ring buffer. What has been pushed out of it since the last reading is not seen."""

    name = "xid"

    def __init__(self, log: Path = Path("/dev/kmsg")) -> None:
        self._log = log

    def collect(self) -> Iterable[Family]:
        # A count can fall as the buffer rolls over, and hide a new error; the time of the newest one cannot.
        newest = Family(
            name="xid.last_seen", unit="s", help="Uptime at the newest XID in the kernel log; 0: there is none"
        )
        count = Family(name="xid.count", unit="1", help="XIDs in the kernel log")
        try:
            found = [(uptime(line), seen) for line in self._lines() for seen in xids(line)]
        except OSError as error:
            newest.add(HOST, Absent(status="error", reason=f"{self._log}: {error.strerror}"))
            return [newest, count]
        newest.add(HOST, max((when for when, _ in found), default=0.0))
        for (address, code), times in sorted(Counter(seen for _, seen in found).items()):
            count.add({"pci": address, "xid": code}, times)
        return [newest, count]

    def _lines(self) -> list[str]:
        """Every record of /dev/kmsg (one a read, EAGAIN at the end), or the lines of a plain file."""
        descriptor = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            text = b"".join(iter(lambda: self._read(descriptor), b""))
        finally:
            os.close(descriptor)
        return text.decode(errors="replace").splitlines()

    @staticmethod
    def _read(descriptor: int) -> bytes:
        while True:
            try:
                return os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return b""
            except BrokenPipeError:
                continue  # the record was overwritten before it was read; the next read goes on behind it


def uptime(line: str) -> float:
    """Seconds since boot at which a line was logged, in the form of /dev/kmsg or of dmesg; 1 where it does not say."""
    if record := re.match(r"\d+,\d+,(\d+),", line):
        return int(record.group(1)) / 1e6
    printed = re.match(r"\[ *(\d+\.\d+)\]", line)
    return float(printed.group(1)) if printed else 1.0


def xids(line: str) -> list[tuple[str, str]]:
    """The (PCI address, code) of each XID in one line of a kernel log."""
    return [(address.lower(), code) for address, code in _XID.findall(line)]
