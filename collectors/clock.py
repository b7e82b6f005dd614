"""The system clock: whether something keeps it right, how far off it may be, and what it counts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from collectors.base import Absent, Family
from collectors.host import processor
from collectors.host.files import Files, one, text

NEVER_SET_S = 16.0
"""The kernel lets the greatest possible error grow to this and no further: then nothing keeps the clock."""
_STATUS_NANO = 0x2000
_SOURCE = "sys/devices/system/clocksource/clocksource0/current_clocksource"


@dataclass(frozen=True, kw_only=True)
class Discipline:
    """What the kernel knows of its own clock (adjtimex(2)); seconds."""

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


def discipline() -> Discipline:
    """Asks the kernel, which anybody may. Raises OSError."""
    timex = _Timex(modes=0)
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    offset_unit = 1e-9 if timex.status & _STATUS_NANO else 1e-6
    return Discipline(
        offset=timex.offset * offset_unit, error_max=timex.maxerror / 1e6, error_estimated=timex.esterror / 1e6
    )


class ClockCollector:
    """Reads the kernel's clock; files under `root`, `/` but in tests."""

    name = "clock"

    def __init__(self, root: Path = Path("/"), ask: Callable[[], Discipline] = discipline) -> None:
        self._root = root
        self._ask = ask
        self._virtual: bool | None = None

    def collect(self) -> Iterable[Family]:
        files = Files(self._root)
        try:
            told: Discipline | Absent = self._ask()
        except (OSError, AttributeError) as error:
            told = Absent(status="error", reason=f"adjtimex: {error}")
        lost = told if isinstance(told, Absent) else None
        yield one("clock.synchronized", "1", "Something keeps the clock right", self._synchronized(files, told))
        for name, help_text in (
            ("offset", "What the kernel still has to correct; chrony corrects in other ways and leaves 0"),
            ("error_max", "How far off the clock may be at most; 16: nothing keeps it"),
            ("error_estimated", "How far off the clock probably is"),
        ):
            yield one(f"clock.{name}", "s", help_text, lost or float(getattr(told, name)))
        yield one("clock.source", "1", "What the kernel counts", files.read(_SOURCE, text))

    def _synchronized(self, files: Files, told: Discipline | Absent) -> bool | Absent:
        """By the greatest error, as systemd does, and not by STA_UNSYNC: chrony leaves that set where it spares the RTC."""
        if isinstance(told, Absent) or told.error_max < NEVER_SET_S:
            return told if isinstance(told, Absent) else True
        if self._virtual is None:
            self._virtual = processor.virtual(files) is True
        if self._virtual:
            return Absent(status="unsupported", reason="nothing in this virtual machine keeps the clock: its host may")
        return False
