"""The entries of an event log, and which of them are new since the previous reading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from fleet.bmc.client import MAX_PAGES
from fleet.bmc.health import OK
from fleet.bmc.target import BmcError

EMPTY = "none"
"""Value of `LogReading.newest` if the log has no entries."""
MAX_NEW = 200
"""Maximum number of new entries that a reading keeps. If there are more, it keeps the newest. Entries whose severity is OK are
neither kept nor counted: some BMCs log every login, and monitoring logs in often."""
MAX_READ = 20_000
"""Maximum number of entries that are read to find the new ones."""
TOO_FAR = (
    f"the log has more than {MAX_PAGES} pages or {MAX_READ} entries since the previous reading: save and clear it, and start a "
    "new run"
)
LOST = (
    "the log has no entry from before the previous reading: it was cleared, or has overwritten its entries, so that entries of "
    "this run may be lost. Start a new run"
)
FULL = "the log is full, so that the BMC drops new entries: save and clear it, and start a new run"
_COUNTS = " repeats="
"""Text in a mark before the entries with repeated events."""


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One entry.

    Its severity is None if the service reports no severity, or an unknown one. The severity is OK if the entry reports the end of
    a condition, or a load of the BMC itself (`own_load.py`). It is a warning if HPE's log has set the severity of the entry to OK
    later, because the condition has ended: that log may have no other entry about the beginning.
    """

    id: str
    created: str
    severity: str | None
    message: str
    number: str = ""
    """HPE: number of the event, which does not change. (The ID is the position in the log.)"""
    count: int | None = None
    """HPE: how often the event has occurred."""

    @property
    def mark(self) -> str:
        """Return ID and time of the entry, separated by the first space.

        The ID is not enough: a log that wraps around or is cleared uses its ids again.
        """
        return f"{self.id.replace(' ', '_')} {self.created}".strip()


@dataclass(frozen=True, kw_only=True)
class Mark:
    """What is remembered of a log to find its new entries in the next reading."""

    entry: str
    """ID and time of the newest entry (`LogEntry.mark`); EMPTY if the log has no entries."""
    counts: Mapping[str, int] | None = None
    """Number of each event that has occurred more than once -> how often; None if the log does not count repeated events, as that
    of HPE does, or if a version of Rackproof made the mark that did not read these counts."""

    @classmethod
    def parse(cls, text: str) -> Mark:
        """Return the mark with this text."""
        entry, has_counts, counts = text.partition(_COUNTS)
        of_events = {number: int(count) for number, count in re.findall(r"(\d+):(\d+)", counts)}
        return cls(entry=entry, counts=of_events if has_counts else None)

    def __str__(self) -> str:
        if self.counts is None:
            return self.entry
        return self.entry + _COUNTS + ",".join(f"{number}:{count}" for number, count in self.counts.items())


def entries_since(entries: Iterable[LogEntry], mark: str, *, may_lose: bool = False) -> list[LogEntry]:
    """Return the entries that were added after the entry that was the newest at the previous reading.

    Args:
        entries: the entries of the log, newest first.
        mark: mark of that entry, or EMPTY.
        may_lose: whether lost entries are no error.

    Raises:
        BmcError: it is unknown which entries are new, or entries may be lost and none of those that are left reports a fault.
    """
    new, not_ok, older = list[LogEntry](), 0, 0
    for entry in entries:
        if entry.mark == mark:
            return new
        new.append(entry)
        not_ok += entry.severity != OK
        older += _is_older(entry.created, mark)
        if max(not_ok, older) > MAX_NEW:
            return _not_older(new, mark)
        if len(new) > MAX_READ:
            raise BmcError(TOO_FAR)
    if mark == EMPTY:
        return new
    result = _not_older(new, mark)
    if len(result) == len(new) and not not_ok and not may_lose:
        raise BmcError(LOST)
    return result


def _not_older(entries: Sequence[LogEntry], mark: str) -> list[LogEntry]:
    """Return the newest entries, up to the first that was in the log at the previous reading (`_was_read`).

    Call this only if the entry that `mark` names was not found: the log was cleared, or it was full and has overwritten the
    entry or given it another ID, or reading stopped before it was found. If the entry was found, do not compare times, because
    the clock of a BMC may be set back.

    Args:
        entries: entries of the log, newest first.
        mark: mark of the newest entry at the previous reading.

    Raises:
        BmcError: the times of the entries are not plausible, so it is unknown which entries are new.
    """
    count = next((position for position, entry in enumerate(entries) if _was_read(entry, mark)), len(entries))
    if entries and not count:
        raise BmcError(
            "the newest entry of the log is older than the newest entry of the previous reading, which was not found"
        )
    number_of_mark = number_of(mark.partition(" ")[0])
    for entry in entries[count:]:
        number = number_of(entry.id)
        has_higher_number = number_of_mark is not None and number is not None and number > number_of_mark
        if has_higher_number or (time_of(entry.created) and not _was_read(entry, mark)):
            raise BmcError(
                "the newest entry of the previous reading was not found, and the entries are not in the order of their "
                "times or IDs: the clock of the BMC was set back"
            )
    return list(entries[:count])


def _was_read(entry: LogEntry, mark: str) -> bool:
    """Return whether an entry is older than the entry that `mark` names, or of the same second and without a higher number.

    On HPE, the ID of an entry is its position. If the log is full, each new entry lowers the IDs of all earlier ones by 1, so
    that the named entry has a lower ID than before.
    """
    if _is_older(entry.created, mark):
        return True
    number, number_of_mark = number_of(entry.id), number_of(mark.partition(" ")[0])
    time = time_of(entry.created)
    is_same_second = time is not None and time == time_of(mark.partition(" ")[2])
    return is_same_second and number is not None and number_of_mark is not None and number <= number_of_mark


def number_of(entry_id: str) -> int | None:
    """Return the ID of an entry as a number; None if the ID is not a number."""
    return int(entry_id) if entry_id.isascii() and entry_id.isdigit() and len(entry_id) < 19 else None


def _is_older(created: str, mark: str) -> bool:
    time, time_of_mark = time_of(created), time_of(mark.partition(" ")[2])
    return bool(time and time_of_mark and time < time_of_mark)


def time_of(text: str) -> datetime | None:
    """Return a time; None if `text` is not a time, or comes from a clock that was not set (years 1970, 2000, 9999)."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment if moment.year not in (1970, 2000, 9999) else None
