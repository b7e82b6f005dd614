"""Read the kernel log from its ring buffer, and older records with journalctl or dmesg."""

from __future__ import annotations

import errno
import os
import re
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

KMSG = Path("/dev/kmsg")
JOURNAL = ("journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet", "--lines=100000")
COMMANDS: tuple[Sequence[str], ...] = (JOURNAL, ("dmesg",))
"""Commands that print the log. If the ring buffer cannot be read or has lost its first records, the output of the first command
that prints log lines is used."""
COMMAND_DEADLINE_S = 8.0
BOOT_S = 5.0
"""A log without sequence numbers counts as complete if its first line was logged at most this many seconds after boot."""
_RECORD_BYTES = 8192


def _stdin_is_kmsg() -> bool:
    """Return whether standard input is /dev/kmsg. The exporter's systemd unit opens it (`StandardInput=file:/dev/kmsg`)."""
    status = os.fstat(0)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, 11)


class RingBuffer:
    """/dev/kmsg (or a plain file), kept open so that each call of `new_lines` reads only new records."""

    def __init__(self, path: Path = KMSG) -> None:
        """Open the log. Raises OSError. If the permission is missing, the message says how to get it."""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except PermissionError as error:
            if path != KMSG or not _stdin_is_kmsg():
                remedy = "run as root, or with CAP_SYSLOG if kernel.dmesg_restrict is 1"
                raise PermissionError(error.errno, f"{error.strerror}: {remedy}", str(path)) from error
            self._descriptor = os.dup(0)
            os.set_blocking(self._descriptor, False)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.first = ""
        """The first line that `new_lines` has ever returned; empty before."""
        self.missed = False
        """Whether records were overwritten before they were read."""

    @property
    def complete(self) -> bool:
        """Whether `new_lines` has returned every record since boot, that is, no record was overwritten before it was read."""
        return not self.missed and reaches_boot(self.first)

    def close(self) -> None:
        """Close the log."""
        os.close(self._descriptor)

    def new_lines(self) -> list[str]:
        """Return the lines since the last call. Raises OSError if reading fails, or if no call has read a line yet."""
        text = b"".join(iter(self._read, b"")).decode(errors="replace")
        # Not splitlines(): it also splits at characters that a process name may contain.
        lines = [line for line in text.split("\n") if line]
        self.first = self.first or next(iter(lines), "")
        if not self.first:
            raise OSError(errno.ENODATA, "empty, without even the boot messages: not a kernel log")
        return lines

    def _read(self) -> bytes:
        """Return one record of /dev/kmsg, or a block of a plain file; empty at the end."""
        while True:
            try:
                return os.read(self._descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return b""
            except BrokenPipeError:
                self.missed = True  # records were overwritten before they were read; the next read continues after them


@dataclass(frozen=True, kw_only=True)
class Log:
    """Lines of the kernel log."""

    lines: list[str]
    complete: bool
    """Whether the log reaches back to the boot without a known gap."""


def read_log(path: Path = KMSG, commands: Sequence[Sequence[str]] = COMMANDS) -> Log:
    """Return the records of the ring buffer. If it has lost older records, add those that one of `commands` prints.

    If the ring buffer cannot be read, return only what the command prints. A command may be too slow for a scrape.

    Raises:
        OSError: neither the ring buffer nor any command returns the log. The error number is that of reading the ring buffer.
    """
    try:
        ring = RingBuffer(path)
        try:
            lines = ring.new_lines()
        finally:
            ring.close()
    except OSError as error:
        lines = _command_lines(commands)
        if not lines:
            tried = " and ".join(command[0] for command in commands)
            reason = f"{error.strerror}; {tried} did not return the kernel log" if tried else error.strerror
            raise OSError(error.errno, reason, str(path)) from error
        return Log(lines=lines, complete=reaches_boot(lines[0]))
    oldest = timestamp(ring.first)
    if ring.complete or oldest is None:  # without a time, it is unknown which records are older
        return Log(lines=lines, complete=ring.complete)
    printed = _command_lines(commands)
    before = [line for line in printed if uptime(line) < oldest]
    # A journal that ends before the ring buffer begins, because journald was stopped or its disk was full, lacks records.
    is_joined = 0 < len(before) < len(printed)
    return Log(lines=before + lines, complete=is_joined and reaches_boot(before[0]) and not ring.missed)


def _command_lines(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return the output of the first command that prints log lines, or an empty list."""
    for command in commands:
        try:
            process = subprocess.run(
                command, capture_output=True, timeout=COMMAND_DEADLINE_S, check=False, env=os.environ | {"LC_ALL": "C"}
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        records: list[str] = []
        for line in process.stdout.decode(errors="replace").split("\n"):
            if timestamp(line) is not None:
                records.append(line)
            elif records and line.startswith(" "):  # journalctl indents the other lines of a message
                records[-1] += f"\n{line.strip()}"
        if records:
            return records
    return []


def uptime(line: str) -> float:
    """Return the seconds since boot at which a line was logged.

    Return 1 if the line has no such time, because callers use 0 for an event that has never occurred.
    """
    return 1.0 if (seconds := timestamp(line)) is None else seconds


def timestamp(line: str) -> float | None:
    """Return the seconds since boot that are printed before the message of a line; None if there are none, or only a date."""
    if record := _RECORD.match(line):
        return int(record[1]) / 1e6
    head = _printed_head(line)
    seconds = head["inner"] or head["outer"]
    return float(seconds) if seconds else None


def reaches_boot(first: str) -> bool:
    """Return whether a log with this first line reaches back to the boot.

    True if the line is record 0 or, in a log without record numbers, was logged at most BOOT_S after boot. False for a line
    without a time since boot.
    """
    if record := re.match(r"\d+,(\d+),\d+,", first):
        return record.group(1) == "0"
    return (seconds := timestamp(first)) is not None and seconds <= BOOT_S


def messages(line: str) -> list[str]:
    """Return the lines of a record's message, without the time, level, host name and `kernel:` before it.

    Accepts records of /dev/kmsg, and the output of dmesg, journalctl and syslog daemons in any of their time formats.
    """
    if record := _RECORD.match(line):
        # The kernel writes bytes that are not printable as \xNN, line ends included (Linux, ABI/testing/dev-kmsg).
        return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), line[record.end() :]).split("\n")
    return line[_printed_head(line).end() :].split("\n")


_RECORD = re.compile(r"\d+,\d+,(\d+),[^;]*;")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")
_LEVEL = (
    r"(?:<\d+>)?"  # dmesg --raw
    r"(?:(?:kern|user|mail|daemon|auth|syslog|lpr|news|uucp|cron|authpriv|ftp|local\d) *"  # dmesg --decode
    r":(?:emerg|alert|crit|err|warn|notice|info|debug) *: *)?"
)
_ZONE = r"(?: ?(?:Z|[+-]\d\d:?\d\d|[A-Z]{3,5})\b)?"
_DATE = (
    rf"(?:\w{{3}} )?\d{{4}}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?{_ZONE}"  # ISO, with or without a weekday
    r"|\w{3} +\d{1,2} \d\d:\d\d:\d\d(?:[.,]\d+)?"  # syslog
    r"|\d{9,}\.\d+"  # seconds since 1970
    r"|\[\w{3} \w{3} +\d+ [\d:]{8} \d{4}\]|\[\w{3} +\d+ [\d:]{5}\]|\[ *\+\d+\.\d+\]"  # dmesg: ctime, reltime, delta
)
_CALLER = r"(?:\[ *[TC]\d+\])?"  # CONFIG_PRINTK_CALLER
_PRINTED = re.compile(
    rf"\s*{_LEVEL}(?:(?:{_DATE}|\[ *(?P<outer>\d+\.\d+)\]){_CALLER}\s*(?:(?:\S+ )?kernel(?:\[\d+\])?: *)?)?"
    rf"{_LEVEL}(?:\[ *(?P<inner>\d+\.\d+)\]{_CALLER})?\s*"
)


def _printed_head(line: str) -> re.Match[str]:
    """Match what dmesg, journalctl or a syslog daemon prints before the message. This may be nothing, so it always matches."""
    return cast("re.Match[str]", _PRINTED.match(line))
