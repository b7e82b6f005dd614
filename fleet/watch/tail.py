"""Follow growing files of JSON lines in the run directory, and return each complete line once."""

from __future__ import annotations

import json
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MOST_AT_ONCE = 64_000_000
LONGEST_LINE = 64_000


class Tail:
    """Return the lines that were added to a file since the last read. Lines that are not events are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._rest = 0, b""
        self._file: tuple[int, int] | None = None
        self.problem = ""
        """Why an existing file cannot be read."""

    def read(self) -> list[dict[str, Any]]:
        """Return the new events."""
        parsed = []
        while text := self._more():
            *lines, self._rest = (self._rest + text).split(b"\n")
            parsed += [event for line in lines if (event := _event(line)) is not None]
            self._rest = self._rest[: LONGEST_LINE + 1]
        return parsed

    def _more(self) -> bytes:
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
                self._file, self._offset, self._rest = (status.st_dev, status.st_ino), 0, b""
            text = os.pread(descriptor, MOST_AT_ONCE, self._offset)
        finally:
            os.close(descriptor)
        self._offset += len(text)
        return text


def _event(line: bytes) -> dict[str, Any] | None:
    if len(line) > LONGEST_LINE:
        return None
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return (
        parsed
        if isinstance(parsed, dict) and isinstance(parsed.get("what"), str) and moment(parsed.get("at"))
        else None
    )


def moment(at: object) -> float:
    """Return a timestamp of the files as seconds since 1970; 0 if it is invalid."""
    try:
        parsed = datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp() if isinstance(at, str) else 0.0
        datetime.fromtimestamp(parsed, UTC)  # reject what cannot be formatted again
        return parsed
    except (ValueError, OverflowError, OSError):
        return 0.0
