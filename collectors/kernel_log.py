"""The kernel's log: its ring buffer, and what journald or dmesg kept of it. No collector: those that look into it use this."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

KMSG = Path("/dev/kmsg")
JOURNAL = ("journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet", "--lines=100000")
COMMANDS: tuple[Sequence[str], ...] = (JOURNAL, ("dmesg",))
"""What is asked where the ring buffer cannot be read, or has lost its beginning; the first that tells anything is taken."""
COMMAND_DEADLINE_S = 8.0
BOOT_S = 5.0
"""A log without sequence numbers that begins within that time of the boot has its beginning."""
_RECORD_BYTES = 8192


def _handed_over() -> bool:
    """Whether standard input is /dev/kmsg: systemd opens it for a service that may not do so itself."""
    found = os.fstat(0)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == os.makedev(1, 11)


class Ring:
    """/dev/kmsg, kept open and read on from where it was left, so that a scrape costs what is new; or a plain file."""

    def __init__(self, path: Path = KMSG) -> None:
        """Raises OSError where it cannot be opened; a refusal says what would help."""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except PermissionError as error:
            if path != KMSG or not _handed_over():
                remedy = "run as root, or with CAP_SYSLOG where kernel.dmesg_restrict is 1"
                raise PermissionError(error.errno, f"{error.strerror}: {remedy}", str(path)) from error
            self._descriptor = os.dup(0)
            os.set_blocking(self._descriptor, False)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.first = ""
        self.missed = False

    @property
    def complete(self) -> bool:
        """Every record since boot was read: none was pushed out before it could be."""
        return not self.missed and reaches_boot(self.first)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self._descriptor)

    def lines(self) -> list[str]:
        """The lines since the last call. Raises OSError, also where there never was one: then it is not the kernel's log."""
        text = b"".join(iter(self._read, b"")).decode(errors="replace")
        # Not splitlines: it would also split at characters that a process may have in its name.
        found = [line for line in text.split("\n") if line]
        self.first = self.first or next(iter(found), "")
        if not self.first:
            raise OSError(errno.ENODATA, "it holds nothing, not even the boot: no log of the kernel")
        return found

    def _read(self) -> bytes:
        """One record of /dev/kmsg, a block of a plain file; empty at the end."""
        while True:
            try:
                return os.read(self._descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return b""
            except BrokenPipeError:
                self.missed = True  # records were overwritten before they were read; the next read goes on behind them


@dataclass(frozen=True, kw_only=True)
class Log:
    """Lines of the kernel's log."""

    lines: list[str]
    complete: bool
    """It reaches back to the boot without a gap that is known of."""


def whole(path: Path = KMSG, commands: Sequence[Sequence[str]] = COMMANDS) -> Log:
    """All that can be had: the ring buffer, before it what the journal kept. May start a process: not for a scrape.

    Raises:
        OSError: neither the ring buffer nor any command tells the log; of the ring buffer.
    """
    try:
        ring = Ring(path)
        try:
            lines = ring.lines()
        finally:
            ring.close()
    except OSError as error:
        kept = _kept(commands)
        if not kept:
            tried = " nor ".join(command[0] for command in commands)
            reason = f"{error.strerror}; neither {tried} told the kernel's log" if tried else error.strerror
            raise OSError(error.errno, reason, str(path)) from error
        return Log(lines=kept, complete=reaches_boot(kept[0]))
    if ring.complete:
        return Log(lines=lines, complete=True)
    oldest = uptime(ring.first)
    before = [line for line in _kept(commands) if uptime(line) < oldest]
    return Log(lines=before + lines, complete=bool(before) and reaches_boot(before[0]) and not ring.missed)


def _kept(commands: Sequence[Sequence[str]]) -> list[str]:
    """What the first of the commands that knows anything says; nothing where none does."""
    for command in commands:
        try:
            told = subprocess.run(
                command, capture_output=True, timeout=COMMAND_DEADLINE_S, check=False, env=os.environ | {"LC_ALL": "C"}
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = [line for line in told.stdout.decode(errors="replace").split("\n") if timed(line) is not None]
        if lines:
            return lines
    return []


def uptime(line: str) -> float:
    """Seconds since boot at which a line was logged; 1 where it does not say."""
    return 1.0 if (found := timed(line)) is None else found


def timed(line: str) -> float | None:
    """Seconds since boot that a line of /dev/kmsg, of dmesg or of the journal begins with; None where it has none."""
    if record := re.match(r"\d+,\d+,(\d+),", line):
        return int(record.group(1)) / 1e6
    printed = re.match(r"\[ *(\d+\.\d+)\]", line)
    return float(printed.group(1)) if printed else None


def reaches_boot(first: str) -> bool:
    """Whether a log that begins with this line has lost nothing: the kernel numbers its records from 0."""
    if record := re.match(r"\d+,(\d+),\d+,", first):
        return record.group(1) == "0"
    return uptime(first) <= BOOT_S


def message(line: str) -> str:
    """What was logged, without the time, the host and the name `kernel` in front of it."""
    return _HEAD.sub("", line, count=1)


_HEAD = re.compile(r"^(?:\d+,\d+,\d+,[^;]*;|\[[ \d.]+\](?:\[[ TC\d]+\])? ?(?:(?:\S+ )?kernel: )?)")
