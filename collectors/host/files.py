"""Small files under a root, read once, with a reason where one cannot be had."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from collectors.base import HOST, Absent, Family, Value

T = TypeVar("T")
_MOUNTED = {"proc": "proc/sys", "sys": "sys/devices"}
"""What is there wherever the file system is mounted: only then does a missing file mean that the kernel has none."""
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO)


class MissingError(LookupError):
    """A parser's word for: this kernel, driver or firmware has no such thing."""


class Files:
    """One look at the files under `root`: a file that several readings need is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._texts: dict[tuple[str, int], str] = {}

    def read(self, path: str, parse: Callable[[str], T], *, first_bytes: int = -1) -> T | Absent:
        """What `parse` makes of a file.

        A missing file is `unsupported`, and so is what `parse` raises MissingError for; every other failure is an `error`.
        """
        try:
            return parse(self._content(path, first_bytes))
        except (FileNotFoundError, NotADirectoryError):
            return self._missing(path)
        except MissingError as error:
            return Absent(status="unsupported", reason=f"/{path}: {error}")
        except OSError as error:
            status = "unsupported" if error.errno in _NOT_SUPPORTED else "error"
            return Absent(status=status, reason=f"/{path}: {error.strerror}")
        except (ValueError, LookupError) as error:
            return Absent(status="error", reason=f"/{path}: {error}")

    def text(self, path: str) -> str | Absent:
        """As `read`: the file's text without white space around it; an empty file is `unsupported`."""
        return self.read(path, text)

    def required(self, path: str, parse: Callable[[str], T], *, first_bytes: int = -1) -> T | Absent:
        """As `read`, of a file that every Linux has: where it is missing, that is an `error`."""
        value = self.read(path, parse, first_bytes=first_bytes)
        if isinstance(value, Absent) and not self.exists(path):
            return Absent(status="error", reason=f"/{path}: {os.strerror(errno.ENOENT)}")
        return value

    def names(self, path: str, pattern: str, none: str) -> list[str] | Absent:
        """Entries of a directory that match, 2 before 10; `unsupported` for the reason `none` where there are none."""
        try:
            found = [entry.name for entry in (self.root / path).iterdir() if re.fullmatch(pattern, entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            missing = self._missing(path)
            return Absent(status="unsupported", reason=none) if missing.status == "unsupported" else missing
        except OSError as error:
            return Absent(status="error", reason=f"/{path}: {error.strerror}")
        return sorted(found, key=lambda name: (len(name), name)) or Absent(status="unsupported", reason=none)

    def exists(self, path: str) -> bool:
        """Whether there is such a file or directory, as far as this process may see."""
        try:
            return (self.root / path).exists()
        except OSError:
            return False

    def _content(self, path: str, first_bytes: int) -> str:
        if (path, first_bytes) not in self._texts:
            with (self.root / path).open("rb") as file:
                self._texts[(path, first_bytes)] = file.read(first_bytes).decode(errors="replace")
        return self._texts[(path, first_bytes)]

    def _missing(self, path: str) -> Absent:
        top = path.split("/")[0]
        if top in _MOUNTED and not self.exists(_MOUNTED[top]):
            return Absent(status="error", reason=f"/{path}: /{top} is not mounted")
        return Absent(status="unsupported", reason=f"no /{path}")


def text(content: str) -> str:
    """The content without white space around it. Raises MissingError where nothing is left."""
    if not content.strip():
        raise MissingError("empty")
    return content.strip()


def one(name: str, unit: str, text: str, value: Value | Absent, *, counter: bool = False) -> Family:
    """A family with the one reading of the whole host."""
    return Family(name=name, unit=unit, help=text, counter=counter, readings=[(HOST, value)])


def over(family: Family, label: str, found: list[str] | Absent, reading: Callable[[str], Value | Absent]) -> Family:
    """Fills a family with a reading a part, or with why there are no parts."""
    if isinstance(found, Absent):
        family.add(HOST, found)
        return family
    for name in found:
        family.add({label: name}, reading(name))
    return family
