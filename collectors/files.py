"""Read small files of /proc, /sys and /etc under a root directory. If a file cannot be read, the result is the reason."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from collectors.base import Absent

T = TypeVar("T")
_BLOCK_BYTES = 65536
_MOUNT_MARKERS = {"proc": "proc/sys", "sys": "sys/devices"}
"""First part of a path -> a path that exists if the file system (/proc or /sys) is mounted. If it is not mounted, a missing file
does not mean that the kernel lacks the feature."""
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO)


class MissingError(LookupError):
    """Raised by a parser: this kernel, driver or firmware does not have the value."""


class Files:
    """The files under `root`. Paths in arguments and results are relative to `root`; reasons show a path with a leading slash.

    With `cached`, the content of each file is kept, so that a file with several readings is read only once. Create a new object
    for each collection, because an object with `cached` never reads a file again.
    """

    def __init__(self, root: Path, *, cached: bool = False) -> None:
        # Paths are strings here: a scrape reads hundreds of files, and joining Path objects takes as long as reading the file.
        self._prefix = f"{root}".rstrip("/") + "/"
        self._cache: dict[tuple[str, int], str] | None = {} if cached else None

    def path(self, path: str) -> Path:
        """Return `root` joined with the path."""
        return Path(self._prefix + path)

    def text(self, path: str, *, max_bytes: int = -1) -> str:
        """Return the content of a file, or its first `max_bytes`, without surrounding white space. Raises OSError."""
        if self._cache is None:
            return self._content(path, max_bytes)
        if (path, max_bytes) not in self._cache:
            self._cache[path, max_bytes] = self._content(path, max_bytes)
        return self._cache[path, max_bytes]

    def _content(self, path: str, max_bytes: int) -> str:
        descriptor = self.open(path)
        content = b""
        try:
            while block := os.read(descriptor, max_bytes if max_bytes > 0 else _BLOCK_BYTES):
                content += block
                # One read returns a whole file of /sys, but only a piece of a long file of /proc.
                if max_bytes > 0 or (path.startswith("sys/") and len(block) < _BLOCK_BYTES):
                    break
        finally:
            os.close(descriptor)
        return content.decode(errors="replace").strip()

    def read(
        self, path: str, parse: Callable[[str], T], *, missing: str = "", refused: str = "", max_bytes: int = -1
    ) -> T | Absent:
        """Return the result of `parse` for the content of a file, or why there is none.

        The reading is `unsupported` in these cases:

        * `parse` raises MissingError.
        * The file is missing. (In a /proc or /sys that is not mounted, this is an `error` unless `missing` is given.)
        * The kernel refuses to read the file (EINVAL, EOPNOTSUPP), and `refused` is given.
        * The device lacks the feature (EOPNOTSUPP, ENODEV, ENXIO), and neither `missing` nor `refused` is given.

        Every other failure is an `error`.

        Args:
            parse: may raise ValueError or LookupError.
            missing: why this hardware or kernel may lack the file.
            refused: why reading the file may fail with EINVAL or EOPNOTSUPP.
        """
        try:
            return parse(self.text(path, max_bytes=max_bytes))
        except OSError as error:
            return self._unread(path, error, missing, refused)
        except MissingError as error:
            return Absent.unsupported(f"/{path}: {error}")
        except (ValueError, LookupError) as error:
            return Absent.error(f"/{path}: {error}")

    def required(self, path: str, parse: Callable[[str], T], *, refused: str = "", max_bytes: int = -1) -> T | Absent:
        """Do the same as `read`, but for a file that must exist. The reading is `unsupported` only in these cases:

        * `parse` raises MissingError.
        * The kernel refuses to read the file (EINVAL, EOPNOTSUPP), and `refused` is given.
        """
        value = self.read(path, parse, missing="missing", refused=refused, max_bytes=max_bytes)
        if value == Absent.unsupported("missing"):
            return Absent.error(f"/{path}: {os.strerror(errno.ENOENT)}")
        return value

    def _unread(self, path: str, error: OSError, missing: str, refused: str) -> Absent:
        if error.errno in _MISSING:
            return Absent.unsupported(missing) if missing else self._missing(path)
        if refused and error.errno in _REFUSED:
            return Absent.unsupported(refused)
        supported = missing or refused or error.errno not in _NOT_SUPPORTED
        return Absent(status="error" if supported else "unsupported", reason=f"/{path}: {error.strerror}")

    def _missing(self, path: str) -> Absent:
        top = path.split("/")[0]
        if top in _MOUNT_MARKERS and not self.exists(_MOUNT_MARKERS[top]):
            return Absent.error(f"/{path}: /{top} is not mounted")
        return Absent.unsupported(f"no /{path}")

    def names(self, path: str) -> list[str]:
        """Return the sorted entries of a directory. Raises OSError."""
        with os.scandir(self._prefix + path) as entries:
            return sorted(entry.name for entry in entries)

    def matching(self, path: str, pattern: str, none: str) -> list[str] | Absent:
        """Return the entries of a directory, sorted with `cpu2` before `cpu10`. The pattern must match the whole name.

        If no entry matches, or the directory is missing, return `unsupported` with `none` as the reason. If the directory cannot
        be read, or is in a /proc or /sys that is not mounted, return an `error`.
        """
        try:
            names = [name for name in self.names(path) if re.fullmatch(pattern, name)]
        except (FileNotFoundError, NotADirectoryError):
            absent = self._missing(path)
            return Absent.unsupported(none) if absent.status == "unsupported" else absent
        except OSError as error:
            return Absent.error(f"/{path}: {error.strerror}")
        return sorted(names, key=lambda name: (len(name), name)) or Absent.unsupported(none)

    def glob(self, pattern: str) -> list[str]:
        """Return the sorted paths under `root` that match a pattern."""
        root = Path(self._prefix)
        return sorted(str(path.relative_to(root)) for path in root.glob(pattern))

    def exists(self, path: str) -> bool:
        """Return whether the path exists and this process may see it."""
        return os.access(self._prefix + path, os.F_OK)

    def target(self, path: str) -> str:
        """Return the target of a symbolic link as written. Raises OSError."""
        return str(Path(self._prefix + path).readlink())

    def target_name(self, path: str) -> str | Absent:
        """Return the last part of a symbolic link's target, e.g. a PCI address or a driver's name; an `error` if unreadable."""
        try:
            return self.target(path).rpartition("/")[2]
        except OSError as error:
            return Absent.error(f"/{path}: {error.strerror}")

    def open(self, path: str) -> int:
        """Return a descriptor for reading, which the caller closes. Raises OSError."""
        return os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC)


def nonempty(text: str) -> str:
    """Return the text. Raises MissingError if it is empty."""
    if not text:
        raise MissingError("empty")
    return text
