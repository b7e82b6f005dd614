"""Format text for terminals: without control sequences, and cut to the available width."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime

from fleet.report.formatting import clean

__all__ = ["clean", "clock", "duration", "fit", "names", "pad", "percent", "width"]


def width(text: str) -> int:
    """Return the width of the text in columns."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def fit(text: str, columns: int) -> str:
    """Return the text on one line of at most `columns` columns, sanitized; a cut text ends in `…`."""
    text = _single(clean(text, 4000))
    if width(text) <= columns:
        return text
    taken, room = "", columns - 1
    for character in text:
        room -= _columns(character)
        if room < 0:
            break
        taken += character
    return f"{taken}…" if columns > 0 else ""


def _single(text: str) -> str:
    """Remove combining marks."""
    if text.isascii():
        return text
    composed = unicodedata.normalize("NFC", text)
    return "".join(character for character in composed if unicodedata.category(character) not in ("Mn", "Me"))


def pad(text: str, columns: int) -> str:
    """Return the text padded or cut to exactly `columns` columns."""
    parsed = fit(text, columns)
    return parsed + " " * (columns - width(parsed))


def clock(at: float) -> str:
    """Return the time of day in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


def duration(seconds: float) -> str:
    """`45 s`, `2 min 10 s`, `3 h 5 min`, `2 d 4 h`."""
    whole = max(0, round(seconds))
    for above, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= above:
            rest = whole % above // below
            return f"{whole // above} {unit} {rest} {small}" if rest else f"{whole // above} {unit}"
    return f"{whole} s"


def percent(share: float) -> str:
    """`43 %`; 100 % only for all of it."""
    return f"{int(share * 100)} %"


def names(hosts: Sequence[str], most: int = 4) -> str:
    """Return the first few names, and the count of the others."""
    few = ", ".join(hosts[:most])
    return f"{few} and {len(hosts) - most} more" if len(hosts) > most else few
