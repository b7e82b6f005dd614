"""The SMART / Health Information log of an NVMe disk: how it is fetched, and what it says.

Fields by the NVM Express Base Specification, Get Log Page, log identifier 02h.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from collectors.base import HOST, Absent, Family, Value

LOG_BYTES = 512
DEADLINE_S = 5.0
"""A disk that is about to fail may keep a command for a minute; the others are told without it."""
_IOCTL_ADMIN = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD of linux/nvme_ioctl.h
_GET_LOG_PAGE, _HEALTH_LOG, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_NO_SUCH_LOG = frozenset({0x001, 0x002, 0x109})  # invalid opcode, field, log page: virtual disks have none
_ZERO_CELSIUS_K = 273
_DATA_UNIT_BYTES = 512 * 1000

READINGS: Mapping[str, tuple[str, str, bool]] = {
    "critical_warning": ("1", "Critical warnings of the disk, a bit each; 0: none", False),
    "spare": ("ratio", "Spare capacity left", False),
    "spare_threshold": ("ratio", "Spare capacity under which the disk warns", False),
    "endurance_used": ("ratio", "Share of the rated endurance that is used; may exceed 1", False),
    "temperature": ("Cel", "Composite temperature", False),
    "media_errors": ("1", "Times that data could not be recovered", True),
    "unsafe_shutdowns": ("1", "Times that power went without notice", True),
    "power_on_time": ("s", "Time under power", True),
    "data_written": ("B", "Data that the host wrote", True),
}
"""Name -> unit, help, whether it only grows."""


class UnsupportedLogError(OSError):
    """The controller has no such log."""


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


def smart_log(device: Path) -> bytes:
    """The log of a disk.

    Raises:
        UnsupportedLogError: the controller has none.
        OSError: it was not given: no permission, no such device, or the controller's status.
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


def health(log: bytes) -> dict[str, Value]:
    """What the log says, by the names of READINGS. Raises ValueError where it is cut, or filled with nothing."""
    if len(log) < LOG_BYTES or not any(log):
        raise ValueError(f"no health log in {len(log)} bytes")

    def number(first: int, count: int = 16) -> int:
        return int.from_bytes(log[first : first + count], "little")

    return {
        "critical_warning": log[0],
        "temperature": number(1, 2) - _ZERO_CELSIUS_K,
        "spare": log[3] / 100,
        "spare_threshold": log[4] / 100,
        "endurance_used": log[5] / 100,
        "data_written": number(48) * _DATA_UNIT_BYTES,
        "power_on_time": number(128) * 3600,
        "unsafe_shutdowns": number(144),
        "media_errors": number(160),
    }


def families(
    root: Path, disks: Sequence[str], read_log: Callable[[Path], bytes], deadline_s: float = DEADLINE_S
) -> Iterable[Family]:
    """The health of every disk, asked all at once."""
    told = {
        name: Family(name=f"storage.nvme.{name}", unit=unit, help=text, counter=counter)
        for name, (unit, text, counter) in READINGS.items()
    }
    found: dict[str, Mapping[str, Value] | Absent] = {}

    def ask(disk: str) -> None:
        found[disk] = _health_of(root / "dev" / disk, read_log)

    asking = [threading.Thread(target=ask, args=(disk,), daemon=True) for disk in disks]
    for thread in asking:
        thread.start()
    ends = time.monotonic() + deadline_s
    for thread in asking:
        thread.join(max(0.0, ends - time.monotonic()))
    late = Absent(status="error", reason=f"no answer within {deadline_s:g} s")
    for name, family in told.items():
        for disk in disks:
            log = found.get(disk, late)
            family.add({"disk": disk}, log if isinstance(log, Absent) else log[name])
        if not disks:
            family.add(HOST, Absent(status="unsupported", reason="no NVMe disk"))
    return told.values()


def _health_of(device: Path, read_log: Callable[[Path], bytes]) -> Mapping[str, Value] | Absent:
    try:
        return health(read_log(device))
    except UnsupportedLogError as error:
        return Absent(status="unsupported", reason=f"{device.name}: {error.strerror}")
    except FileNotFoundError:
        # /sys shows the disks of the whole machine, /dev only what this container was given.
        return Absent(status="unsupported", reason=f"no /dev/{device.name} here")
    except OSError as error:
        return Absent(status="error", reason=f"/dev/{device.name}: {error.strerror}")
    except ValueError as error:
        return Absent(status="error", reason=f"/dev/{device.name}: {error}")
