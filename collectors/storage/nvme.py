"""Read the SMART / Health Information log of NVMe disks.

The fields are defined in the NVM Express Base Specification, Get Log Page, log identifier 02h.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from collectors.base import HOST_LABELS, Absent, Family, ReadingError, Value
from collectors.deadline import call_with_deadline

LOG_BYTES = 512
DEADLINE_S = 5.0
"""Time limit for all disks together, which are read in parallel. A failing disk may take a minute for a command."""
_IOCTL_ADMIN = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD of linux/nvme_ioctl.h
_GET_LOG_PAGE, _HEALTH_LOG, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_NO_SUCH_LOG = frozenset({0x001, 0x002, 0x109})  # virtual disks return: invalid opcode, field or log page
_ZERO_CELSIUS_K = 273
_NO_TEMPERATURE = Absent.unsupported("the disk reports no temperature")  # virtual disks report 0 K
_DATA_UNIT_BYTES = 512 * 1000

READINGS: Mapping[str, tuple[str, str, bool]] = {
    "critical_warning": ("1", "Critical warnings of the disk, one bit each; 0: none", False),
    "spare": ("ratio", "Spare capacity left", False),
    "spare_threshold": ("ratio", "Spare capacity below which the disk warns", False),
    "endurance_used": ("ratio", "Used share of the rated endurance; may exceed 1", False),
    "temperature": ("Cel", "Composite temperature", False),
    "media_errors": ("1", "Unrecovered data errors", True),
    "unsafe_shutdowns": ("1", "Power losses without shutdown", True),
    "power_on_time": ("s", "Time powered on", True),
    "data_written": ("B", "Data written by the host", True),
}
"""Name of the reading without `storage.nvme.` -> unit, help, whether it is a counter."""


class UnsupportedLogError(OSError):
    """The controller has no health log."""


class _Command(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint8) for name in ("opcode", "flags")),
        ("reserved", ctypes.c_uint16),
        *((name, ctypes.c_uint32) for name in ("nsid", "cdw2", "cdw3")),
        *((name, ctypes.c_uint64) for name in ("metadata", "address")),
        *((name, ctypes.c_uint32) for name in ("metadata_bytes", "data_bytes")),
        *((f"cdw{number}", ctypes.c_uint32) for number in range(10, 16)),
        *((name, ctypes.c_uint32) for name in ("timeout_ms", "result")),
    )


def read_smart_log(device: Path) -> bytes:
    """Return the health log of a disk.

    Raises:
        UnsupportedLogError: the controller has no health log.
        OSError: no permission, no such device, or an error status of the controller.
    """
    log = ctypes.create_string_buffer(LOG_BYTES)
    command = _Command(
        opcode=_GET_LOG_PAGE,
        nsid=_ALL_NAMESPACES,
        address=ctypes.addressof(log),
        data_bytes=LOG_BYTES,
        cdw10=(LOG_BYTES // 4 - 1) << 16 | _HEALTH_LOG,
    )
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(descriptor, _IOCTL_ADMIN, command)
    finally:
        os.close(descriptor)
    if status & 0x7FF in _NO_SUCH_LOG:
        raise UnsupportedLogError(0, f"the controller has no health log (NVMe status 0x{status:x})")
    if status:
        raise OSError(0, f"NVMe status 0x{status:x}")
    return log.raw


def parse_log(log: bytes) -> dict[str, Value | Absent]:
    """Return the values of READINGS. Raises ValueError for a log that is cut short or has only zeros."""
    if len(log) < LOG_BYTES or not any(log):
        raise ValueError(f"the health log is cut short or has only zeros ({len(log)} bytes)")

    def number(first: int, count: int = 16) -> int:
        return int.from_bytes(log[first : first + count], "little")

    return {
        "critical_warning": log[0],
        "temperature": number(1, 2) - _ZERO_CELSIUS_K if number(1, 2) else _NO_TEMPERATURE,
        "spare": log[3] / 100,
        "spare_threshold": log[4] / 100,
        "endurance_used": log[5] / 100,
        "data_written": number(48) * _DATA_UNIT_BYTES,
        "power_on_time": number(128) * 3600,
        "unsafe_shutdowns": number(144),
        "media_errors": number(160),
    }


def health_families(
    root: Path, disks: Sequence[str], read_log: Callable[[Path], bytes], deadline_s: float = DEADLINE_S
) -> Iterable[Family]:
    """Read the health of all disks in parallel, and return one family for each of READINGS."""
    families = {
        name: Family(name=f"storage.nvme.{name}", unit=unit, help=text, counter=counter)
        for name, (unit, text, counter) in READINGS.items()
    }
    readers = {disk: partial(_read_health, root / "dev" / disk, read_log) for disk in disks}
    health = call_with_deadline(readers, deadline_s)
    for name, family in families.items():
        for disk, values in health.items():
            family.add({"disk": disk}, values if isinstance(values, Absent) else values[name])
        if not disks:
            family.add(HOST_LABELS, Absent.unsupported("no NVMe disk"))
    return families.values()


def _read_health(device: Path, read_log: Callable[[Path], bytes]) -> Mapping[str, Value | Absent]:
    """Return the health of one disk. Raises ReadingError."""
    try:
        return parse_log(read_log(device))
    except UnsupportedLogError as error:
        raise ReadingError(Absent.unsupported(f"{device.name}: {error.strerror}")) from error
    except FileNotFoundError as error:
        # In a container, /sys has all disks of the machine, but /dev only those of the container.
        text = f"no /dev/{device.name}: the container does not have it, or the disk was removed"
        raise ReadingError(Absent.unsupported(text)) from error
    except OSError as error:
        raise ReadingError(Absent.error(f"/dev/{device.name}: {error.strerror}")) from error
    except ValueError as error:
        raise ReadingError(Absent.error(f"/dev/{device.name}: {error}")) from error
