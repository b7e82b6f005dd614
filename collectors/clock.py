"""The system clock: whether it is synchronized, its maximum and estimated error, and the kernel's clock source."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from collectors.base import Absent, Family, host_family, mark_varying
from collectors.files import Files, nonempty
from collectors.virtual import is_virtual

UNSYNCHRONIZED_ERROR_S = 16.0
"""If nothing synchronizes the clock, the kernel increases its maximum error up to this value."""
_STATUS_NANO = 0x2000
_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"


@dataclass(frozen=True, kw_only=True)
class ClockState:
    """State of the kernel clock from adjtimex(2), in seconds."""

    offset: float
    error_max: float
    error_estimated: float


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "frequency", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "microseconds", "tick")),
        ("rest", ctypes.c_byte * 256),
    )


def read_clock() -> ClockState:
    """Return the state of the kernel clock. Reading it needs no privilege. Raises OSError."""
    timex = _Timex(modes=0)
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    offset_unit = 1e-9 if timex.status & _STATUS_NANO else 1e-6
    return ClockState(
        offset=timex.offset * offset_unit, error_max=timex.maxerror / 1e6, error_estimated=timex.esterror / 1e6
    )


class ClockCollector:
    """Reads the state of the kernel clock with `read`, and the clock source from a file under `root`."""

    name = "clock"

    def __init__(self, root: Path = Path("/"), read: Callable[[], ClockState] = read_clock) -> None:
        self._root = root
        self._read = read
        self._is_virtual: bool | None = None

    def collect(self) -> Iterable[Family]:
        return mark_varying(self._families())

    def _families(self) -> Iterable[Family]:
        files = Files(self._root, cached=True)
        try:
            state: ClockState | Absent = self._read()
        except (OSError, AttributeError) as error:
            state = Absent.error(f"adjtimex: {error}")
        absent = state if isinstance(state, Absent) else None
        yield host_family("clock.synchronized", "1", "The clock is synchronized", self._synchronized(files, state))
        for name, help_text in (
            ("offset", "Offset that the kernel still has to correct; 0 under chrony, which corrects differently"),
            ("error_max", "Maximum error of the clock; 16: not synchronized"),
            ("error_estimated", "Estimated error of the clock"),
        ):
            family = host_family(f"clock.{name}", "s", help_text, absent or float(getattr(state, name)))
            family.signed = name == "offset"
            yield family
        yield host_family("clock.source", "1", "Clock source of the kernel", files.read(_SOURCE, nonempty))

    def _synchronized(self, files: Files, state: ClockState | Absent) -> bool | Absent:
        """Return whether the clock is synchronized, judged by its maximum error, as systemd does.

        If a virtual machine's clock is not synchronized, the reading is `unsupported`, because the hypervisor may set the clock.
        The kernel's flag STA_UNSYNC is not used: under chrony without the option `rtcsync` it stays set on a synchronized clock.
        """
        if isinstance(state, Absent):
            return state
        if state.error_max < UNSYNCHRONIZED_ERROR_S:
            return True
        if self._is_virtual is None:
            self._is_virtual = is_virtual(files) is True
        if self._is_virtual:
            return Absent.unsupported("virtual machine without its own time service: the host may set the clock")
        return False
