"""Read the new entries of an event log, newest first.

A log may have 100 000 entries. Old entries are read only as far as needed to find the new ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from fleet.bmc.client import MAX_PAGES, RedfishSession, Resource, members_of
from fleet.bmc.health import OK, standard
from fleet.bmc.own_load import is_own_load
from fleet.bmc.target import BmcError, clean_text

EMPTY = "none"
"""Value of `LogReading.newest` if the log has no entries."""
MAX_NEW = 200
"""Maximum number of new entries that a reading keeps. If there are more, it keeps the newest. Entries whose severity is OK are
neither kept nor counted: some BMCs log every login, and monitoring logs in often."""
MAX_READ = 20_000
"""Maximum number of entries that are read to find the new ones."""
_TOO_FAR = (
    f"the log has more than {MAX_PAGES} pages or {MAX_READ} entries since the previous reading: save and clear it"
)
_EVENT_TYPES = ("sel", "event")
"""Values of the property LogEntryType of a log with hardware events, in lower case."""
_EVENT_LOGS = frozenset({"sel", "eventlog", "event", "iml", "platformlog", "standardlog"})
"""Ids, in lower case, of logs that have hardware events whatever their LogEntryType is."""
_FIRST_LOG = "log1"
"""Id, in lower case, of the first log of a manager or system on Supermicro. It has hardware events if its LogEntryType is in
_EVENT_TYPES, or if it has no LogEntryType. The log of logins has the same Id, with the LogEntryType `OEM`."""
_OTHER_LOGS = ("dump", "journal", "audit", "security", "lclog", "postcode", "hostlogger", "debug", "crash", "faultlog")
"""A log whose ID contains one of these texts has no hardware events."""


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One entry.

    Its severity is None if the service reports no severity, or an unknown one. The severity is OK if the entry reports the end of
    a condition, or a load of the BMC itself (`own_load.py`).
    """

    id: str
    created: str
    severity: str | None
    message: str

    @property
    def mark(self) -> str:
        """Return ID and time of the entry. The ID is not enough: a log that wraps around or is cleared uses its ids again."""
        return f"{self.id} {self.created}".strip()


@dataclass(frozen=True, kw_only=True)
class LogReading:
    """What one reading of a BMC keeps of an event log."""

    entries: int
    """Number of entries in the log."""
    newest: str
    """Mark of the newest entry; EMPTY if the log has no entries."""
    new: tuple[LogEntry, ...] = ()
    """The entries whose severity is not OK and that were added since the previous reading, newest first, at most MAX_NEW."""
    new_entries: int = 0
    """Number of these entries; MAX_NEW + 1 if there are more than MAX_NEW."""


def is_event_log(service: Resource) -> bool:
    """Return whether the log of a log service has hardware events, rather than logins, dumps or console output."""
    name = str(service.get("Id", "")).lower()
    if any(text in name for text in _OTHER_LOGS):
        return False
    kind = str(service.get("LogEntryType") or "").lower()
    return kind in _EVENT_TYPES or name in _EVENT_LOGS or (name == _FIRST_LOG and not kind)


def read_log(session: RedfishSession, service: Resource, mark: str | None) -> LogReading | None:
    """Return the reading of a log; None if the service has no resource `Entries`.

    Args:
        session: the session.
        service: the log service.
        mark: `LogReading.newest` of the previous reading; None for the first reading, in which no entry counts as new.

    Raises:
        BmcError: the log cannot be read, or it is unknown which entries are new.
    """
    first = session.linked(service, "Entries")
    if first is None:
        return None
    count = first.get("Members@odata.count")
    total = count if type(count) is int and count >= 0 else len(first.get("Members") or ())
    newest, new, not_ok, older = "", list[LogEntry](), 0, 0
    for entry in _newest_first(session, first, total):
        newest = newest or entry.mark
        if mark is None or entry.mark == mark:
            break
        new.append(entry)
        not_ok += entry.severity != OK
        older += _is_older(entry.created, mark)
        if max(not_ok, older) > MAX_NEW:
            new = _not_older(new, mark)
            break
        if len(new) > MAX_READ:
            raise BmcError(_TOO_FAR)
    else:
        new = _not_older(new, mark) if mark else new
    kept = [entry for entry in new if entry.severity != OK]
    return LogReading(entries=total, newest=newest or EMPTY, new=tuple(kept[:MAX_NEW]), new_entries=len(kept))


def _not_older(entries: list[LogEntry], mark: str) -> list[LogEntry]:
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
    number_of_mark = _number(mark.rpartition(" ")[0])
    for entry in entries[count:]:
        number = _number(entry.id)
        has_higher_number = number_of_mark is not None and number is not None and number > number_of_mark
        if has_higher_number or (_time(entry.created) and not _was_read(entry, mark)):
            raise BmcError(
                "the newest entry of the previous reading was not found, and the entries are not in the order of their "
                "times or IDs: the clock of the BMC was set back"
            )
    return entries[:count]


def _was_read(entry: LogEntry, mark: str) -> bool:
    """Return whether an entry is older than the entry that `mark` names, or of the same second and without a higher number.

    On HPE, the ID of an entry is its position. If the log is full, each new entry lowers the IDs of all earlier ones by 1, so
    that the named entry has a lower ID than before.
    """
    if _is_older(entry.created, mark):
        return True
    number, number_of_mark = _number(entry.id), _number(mark.rpartition(" ")[0])
    is_same_second = entry.created == mark.rpartition(" ")[2] and _time(entry.created) is not None
    return is_same_second and number is not None and number_of_mark is not None and number <= number_of_mark


def _number(entry_id: str) -> int | None:
    """Return the ID of an entry as a number; None if the ID is not a number."""
    return int(entry_id) if entry_id.isascii() and entry_id.isdigit() and len(entry_id) < 19 else None


def _newest_first(session: RedfishSession, first: Resource, total: int) -> Iterator[LogEntry]:
    """Yield the entries of a log, the newest first. Services list entries in either order, and some ignore `$skip`."""
    members = members_of(first)
    if not members:
        return
    oldest_first = _is_oldest_first(session, members)
    following = first.get("Members@odata.nextLink")
    if not oldest_first:
        page: Resource | None = first
        for _ in range(MAX_PAGES):
            yield from (entry for item in members_of(page) if (entry := _entry(session, item)))
            page = session.get((page or {}).get("Members@odata.nextLink"))
            if page is None:
                return
        raise BmcError(_TOO_FAR)
    if not following or len(members) >= total:
        yield from _reversed(session, members)
    else:
        yield from _from_the_end(session, first, members, total)


def _from_the_end(session: RedfishSession, first: Resource, members: list[object], total: int) -> Iterator[LogEntry]:
    """Yield the entries, newest first, of a log that lists its oldest entry first.

    The last page is read first, with `$skip`. If the service ignores `$skip`, all pages are read, from the first to the last.
    """
    size, skip, pages = len(members), total, 0
    while skip > 0:
        pages += 1
        if pages > MAX_PAGES:
            raise BmcError(_TOO_FAR)
        step = min(size, skip)
        skip -= step
        page = session.get(f"{first.get('@odata.id')}?$skip={skip}&$top={step}") if skip else first
        items = members_of(page)[:step]
        if skip and (not items or items[0] == members[0]):
            break  # the service ignores $skip
        yield from _reversed(session, items)
    else:
        return
    last, link = members, first.get("Members@odata.nextLink")
    for _ in range(MAX_PAGES):
        page = session.get(link)
        if page is None:
            yield from _reversed(session, last)
            return
        last = [*last, *members_of(page)][-(MAX_READ + 1) :]  # `read_log` reads no more entries than these
        link = page.get("Members@odata.nextLink")
    raise BmcError(f"the event log has {total} entries and cannot be read from its end: save and clear it")


def _reversed(session: RedfishSession, items: list[object]) -> Iterator[LogEntry]:
    yield from (entry for item in reversed(items) if (entry := _entry(session, item)))


def _is_oldest_first(session: RedfishSession, members: list[object]) -> bool:
    """Return whether a log lists its oldest entry first.

    The first of these that gives an answer decides:
    1. Whether the times rise more often than they fall from one entry to the next. Entries without a known time are skipped.
    2. The times of the first and the last entry.
    3. The ids of the first and the last entry, compared as numbers.

    The result is true if none gives an answer. Step 1 comes first, because the clock of the BMC may have been wrong at one of the
    two entries of step 2.
    """
    texts = [clean_text(item.get("Created", ""), 40) for item in members if isinstance(item, dict)]
    known = [moment for text in texts if (moment := _time(text))]
    rising = sum(first < second for first, second in pairwise(known))
    falling = sum(first > second for first, second in pairwise(known))
    if rising != falling:
        return rising > falling
    first, last = _entry(session, members[0]), _entry(session, members[-1])
    if first is None or last is None:
        return True
    times = _time(first.created), _time(last.created)
    if times[0] and times[1] and times[0] != times[1]:
        return times[0] < times[1]
    numbers = _number(first.id), _number(last.id)
    return numbers[0] is None or numbers[1] is None or numbers[0] <= numbers[1]


def _entry(session: RedfishSession, item: object) -> LogEntry | None:
    if not isinstance(item, dict):
        return None
    whole = item if len(item) > 1 else session.get(item.get("@odata.id"))
    if whole is None:
        return None
    severity = standard(whole.get("Severity"))
    is_deassertion = str(whole.get("EntryCode", "")).lower().startswith("deassert")
    return LogEntry(
        id=clean_text(whole.get("Id", ""), 60),
        created=clean_text(whole.get("Created", ""), 40),
        severity=OK if is_deassertion or is_own_load(whole, severity) else severity,
        message=clean_text(whole.get("Message") or whole.get("MessageId") or "no text"),
    )


def _is_older(created: str, mark: str) -> bool:
    time, time_of_mark = _time(created), _time(mark.rpartition(" ")[2])
    return bool(time and time_of_mark and time < time_of_mark)


def _time(text: str) -> datetime | None:
    """Return a time; None if `text` is not a time, or comes from a clock that was not set (years 1970, 2000, 9999)."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment if moment.year not in (1970, 2000, 9999) else None
