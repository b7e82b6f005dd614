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
    """Reads the kernel's ring buffer. What has been pushed out of it is not seen: the exporter watches between snapshots."""

    name = "xid"

    def __init__(self, log: Path = Path("/dev/kmsg")) -> None:
        self._log = log

    def collect(self) -> Iterable[Family]:
        total = Family(name="xid.count", unit="1", help="XID errors in the kernel log", counter=True)
        try:
            seen = Counter(match for line in self._lines() for match in xids(line))
        except OSError as error:
            total.add(HOST, Absent(status="error", reason=f"{self._log}: {error.strerror}"))
            yield total
            return
        total.add(HOST, sum(seen.values()))
        for (address, code), count in sorted(seen.items()):
            total.add({"pci": address, "xid": code}, count)
        yield total

    def _lines(self) -> list[str]:
        """Every record of /dev/kmsg (one a read, EAGAIN at the end), or the lines of a plain file."""
        descriptor = os.open(self._log, os.O_RDONLY | os.O_NONBLOCK)
        lines: list[str] = []
        try:
            while chunk := self._read(descriptor):
                lines += chunk.decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)
        return lines

    @staticmethod
    def _read(descriptor: int) -> bytes:
        while True:
            try:
                return os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return b""
            except BrokenPipeError:
                continue  # the record was overwritten before it was read; the next read goes on behind it


def xids(line: str) -> list[tuple[str, str]]:
    """The (PCI address, code) of each XID in one line of a kernel log."""
    return [(address.lower(), code) for address, code in _XID.findall(line)]
