"""Small files of /sys and /proc: read fast, and with a reason where they cannot be."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from collectors.base import Absent, Family, Value

_MOST_BYTES = 65536
_NO_SUCH = (errno.ENOENT, errno.ENOTDIR)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)

PCI_DEVICES = "sys/bus/pci/devices"
Kinds = Mapping[str, tuple[str, str]]
"""Name of a family -> its unit and its help."""


class Tree:
    """The files under `root`; paths are relative to it, and told with a leading slash."""

    def __init__(self, root: Path) -> None:
        # Strings, not Path objects: a scrape reads hundreds of files, and joining Paths costs as much as reading.
        self._root = f"{root}".rstrip("/") + "/"

    def text(self, path: str) -> str:
        """What stands in a file, without the line's end. Raises OSError."""
        descriptor = os.open(self._root + path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _MOST_BYTES).decode(errors="replace").strip()
        finally:
            os.close(descriptor)

    def reading(
        self, path: str, parse: Callable[[str], Value | Absent] = str, *, missing: str = "", refused: str = ""
    ) -> Value | Absent:
        """What `parse` makes of a file.

        Args:
            parse: may raise ValueError.
            missing: why this hardware or kernel may have no such file; where empty, a missing file is an error.
            refused: the same of a file that is there and answers with EINVAL or EOPNOTSUPP.
        """
        try:
            return parse(self.text(path))
        except OSError as error:
            for why, numbers in ((missing, _NO_SUCH), (refused, _REFUSED)):
                if why and error.errno in numbers:
                    return Absent(status="unsupported", reason=why)
            return Absent(status="error", reason=f"/{path}: {error.strerror}")
        except ValueError as error:
            return Absent(status="error", reason=f"/{path}: {error}")

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted. Raises OSError."""
        with os.scandir(self._root + path) as entries:
            return sorted(entry.name for entry in entries)

    def has(self, path: str) -> bool:
        """Whether the path is there."""
        return os.access(self._root + path, os.F_OK)

    def target(self, path: str) -> str:
        """Where a symbolic link points, as it is written. Raises OSError."""
        return str(Path(self._root + path).readlink())

    def base(self, path: str) -> Value | Absent:
        """The last part of where a symbolic link points: an address, a driver."""
        try:
            return self.target(path).rpartition("/")[2]
        except OSError as error:
            return Absent(status="error", reason=f"/{path}: {error.strerror}")

    def pci_address(self, path: str) -> Value | Absent:
        """Address of the PCI device that a link of /sys/class leads to or below (`…/0000:19:00.0/net/eth0`)."""
        try:
            found = pci_parts(self.target(path))
        except OSError as error:
            return Absent(status="error", reason=f"/{path}: {error.strerror}")
        return found[-1] if found else Absent(status="unsupported", reason="not on a PCI bus")

    def open(self, path: str) -> int:
        """A descriptor that the caller closes. Raises OSError."""
        return os.open(self._root + path, os.O_RDONLY | os.O_CLOEXEC)


def families(kinds: Kinds, counters: Iterable[str] = ()) -> dict[str, Family]:
    """A family of each kind, still without readings."""
    counting = frozenset(counters)
    return {
        name: Family(name=name, unit=unit, help=text, counter=name in counting) for name, (unit, text) in kinds.items()
    }


def pci_parts(target: str) -> list[str]:
    """The PCI addresses in a path of /sys/devices, from the root of the bus outwards."""
    return [part for part in target.split("/") if part.count(":") == 2 and "." in part]


def natural(text: str) -> int:
    """A whole number that is not negative. Raises ValueError."""
    number = int(text)
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number


def numa_node(text: str) -> Value | Absent:
    """The NUMA node of a device; the kernel writes -1 where the firmware tells none. Raises ValueError."""
    number = int(text)
    return number if number >= 0 else Absent(status="unsupported", reason="the firmware tells no NUMA node")
