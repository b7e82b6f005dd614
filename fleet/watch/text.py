"""Format times and shares for a terminal."""

from __future__ import annotations

from datetime import UTC, datetime


def clock(at: float) -> str:
    """Return the time of day in UTC, such as `04:07:31`. `at` is in seconds since 1970."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """Return a duration in at most two units, such as `45 s`, `2 min 10 s`, `3 h 5 min` or `2 d 4 h`."""
    whole = max(0, round(seconds))
    for unit_s, unit, subunit_s, subunit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            rest = whole % unit_s // subunit_s
            return f"{whole // unit_s} {unit} {rest} {subunit}" if rest else f"{whole // unit_s} {unit}"
    return f"{whole} s"


def percent(share: float) -> str:
    """Return a share as a percentage such as `43 %`. It is rounded down, so `100 %` always means all."""
    return f"{int(round(share * 100, 9))} %"
