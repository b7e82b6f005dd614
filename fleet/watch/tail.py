"""Follow JSON Lines files in the run directory while they grow. Each complete line is read once."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from schemas.times import epoch_seconds

MAX_READ_BYTES = 64_000_000
MAX_LINE_BYTES = 64_000


class Tail:
    """Reads the events that were added to a file since the last read.

    An event is a line with a JSON object that has a text `what` and a valid timestamp `at`. Other lines are skipped.
    """

    def __init__(self, path: Path) -> None:
        """Prepare to read from the beginning of the file, which need not exist yet."""
        self._path = path
        self._offset, self._incomplete_line = 0, b""
        self._file: tuple[int, int] | None = None
        self.problem = ""
        """Why the file cannot be read; empty if it can be read or does not exist."""

    def read(self) -> list[dict[str, Any]]:
        """Return the new events."""
        events = []
        while text := self._read_new():
            *lines, self._incomplete_line = (self._incomplete_line + text).split(b"\n")
            events += [event for line in lines if (event := _event(line)) is not None]
            self._incomplete_line = self._incomplete_line[: MAX_LINE_BYTES + 1]
        return events

    def _read_new(self) -> bytes:
        """Return the next bytes of the file; empty if there are no new bytes, or if the file cannot be read."""
        self.problem = ""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.problem = f"{self._path.name}: {error.strerror}"
            return b""
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self.problem = f"{self._path.name}: not a regular file"
                return b""
            if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:  # replaced or truncated
                self._file, self._offset, self._incomplete_line = (status.st_dev, status.st_ino), 0, b""
            text = os.pread(descriptor, MAX_READ_BYTES, self._offset)
        finally:
            os.close(descriptor)
        self._offset += len(text)
        return text


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line; None if the line is not an event."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("what"), str) and parse_time(event.get("at"))
    return event if is_event else None


def parse_time(at: object) -> float:
    """Return an ISO timestamp as seconds since 1970; 0 if it is invalid."""
    try:
        seconds = epoch_seconds(at) if isinstance(at, str) else 0.0
        datetime.fromtimestamp(seconds, UTC)  # raises if the year cannot be formatted
        return seconds
    except (ValueError, OverflowError, OSError):
        return 0.0
