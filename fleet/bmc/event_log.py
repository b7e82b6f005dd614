"""Read the new entries of an event log, newest first.

A log may have 100 000 entries. Old entries are read only as far as needed to find the new ones. A log that counts repeated events
in the first entry about them, as that of HPE does, is read in full: the count of any entry may have risen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, pairwise

from fleet.bmc.client import MAX_PAGES, RedfishSession, Resource, members_of
from fleet.bmc.health import CRITICAL, OK, WARNING, standard
from fleet.bmc.log_entries import (
    EMPTY,
    FULL,
    MAX_NEW,
    MAX_READ,
    TOO_FAR,
    LogEntry,
    Mark,
    entries_since,
    number_of,
    time_of,
)
from fleet.bmc.own_load import is_own_load
from fleet.bmc.target import BmcError, clean_text

MAX_REPEATED = 200
"""Maximum number of entries with repeated events in a log."""
_EVENT_TYPES = ("sel", "event")
"""Values of the property LogEntryType of a log with hardware events, in lower case."""
_EVENT_LOGS = frozenset({"sel", "eventlog", "event", "iml", "platformlog", "standardlog"})
"""Ids, in lower case, of logs that have hardware events whatever their LogEntryType is."""
_FIRST_LOG = "log1"
"""Id, in lower case, of the first log of a manager or system on Supermicro. It has hardware events if its LogEntryType is in
_EVENT_TYPES, or if it has no LogEntryType. The log of logins has the same Id, with the LogEntryType `OEM`."""
_FAULT_LISTS = frozenset({"faultlist", "activelog"})
"""Ids, in lower case, of the lists of faults that exist now, of Dell and Lenovo. An entry is removed when its fault ends."""
_SUPERSEDED = {"event": "iml", "sel": "platformlog"}
"""Id, in lower case, of a log that is not read if its owner also has the second one. HPE's `Event` has the alerts that iLO sent:
those about entries of the IML, and others about logins or security settings. Lenovo's `SEL` is a shorter copy of the PlatformLog,
to which nothing is added once it is full."""
_OTHER_LOGS = ("dump", "journal", "audit", "security", "lclog", "postcode", "hostlogger", "debug", "crash", "faultlog")
"""A log whose ID contains one of these texts has no hardware events."""


@dataclass(frozen=True, kw_only=True)
class LogReading:
    """What one reading of a BMC keeps of an event log."""

    entries: int
    """Number of entries in the log."""
    newest: str
    """Text of the `Mark` of the log."""
    new: tuple[LogEntry, ...] = ()
    """The entries whose severity is not OK and that were added since the previous reading, newest first, at most MAX_NEW."""
    new_entries: int = 0
    """Number of these entries; MAX_NEW + 1 if there are more than MAX_NEW."""


def is_event_log(service: Resource) -> bool:
    """Return whether the log of a log service has hardware events, rather than logins, dumps or console output."""
    name = str(service.get("Id", "")).lower()
    if is_fault_list(service) or any(text in name for text in _OTHER_LOGS):
        return False
    kind = str(service.get("LogEntryType") or "").lower()
    return kind in _EVENT_TYPES or name in _EVENT_LOGS or (name == _FIRST_LOG and not kind)


def hardware_logs(services: Iterable[Resource]) -> list[Resource]:
    """Return the log services of one owner whose logs have hardware events, or list the faults that exist now."""
    logs = [service for service in services if is_event_log(service) or is_fault_list(service)]
    names = {str(service.get("Id", "")).lower() for service in logs}
    return [service for service in logs if _SUPERSEDED.get(str(service.get("Id", "")).lower()) not in names]


def is_fault_list(service: Resource) -> bool:
    """Return whether the log of a log service lists the faults that exist now, and not all that have occurred."""
    return str(service.get("Id", "")).lower() in _FAULT_LISTS


def read_fault_list(session: RedfishSession, service: Resource) -> str | None:
    """Return `OK`, or the worst severity and the texts of the faults that exist now.

    Return None if the service has no resource `Entries`. Raises BmcError if the list cannot be read, or if no fault in it has a
    severity.
    """
    first = session.linked(service, "Entries")
    if first is None:
        return None
    entries = [entry for item in session.members(first) if (entry := _entry(session, item)) and entry.severity != OK]
    severities = {entry.severity for entry in entries}
    if severities == {None}:
        raise BmcError("no fault in the list has a severity")
    worst = CRITICAL if CRITICAL in severities else WARNING
    return f"{worst}: {'; '.join(dict.fromkeys(entry.message for entry in entries))}"[:400] if entries else OK


def may_lose_entries(service: Resource, logs: Iterable[Resource]) -> bool:
    """Return whether lost entries of a log are no error: hardware events are in another log of its owner, of the type SEL.

    Managers with AMI's firmware, such as that of DGX H100, have an `EventLog` of 150 entries, in which each logout is an entry.
    """
    kinds = {str(item.get("LogEntryType")).lower() for item in logs if not is_fault_list(item)}
    return "sel" in kinds and str(service.get("LogEntryType")).lower() == "event"


def read_log(
    session: RedfishSession, service: Resource, mark: str | None, *, may_lose: bool = False
) -> LogReading | None:
    """Return the reading of a log; None if the service has no resource `Entries`.

    Args:
        session: the session.
        service: the log service.
        mark: `LogReading.newest` of the previous reading; None for the first reading, in which no entry counts as new.
        may_lose: whether lost entries are no error.

    Raises:
        BmcError: the log cannot be read, it is unknown which entries are new, or entries may be lost and none of those that are
            left reports a fault.
    """
    first = session.linked(service, "Entries")
    if first is None:
        return None
    count = first.get("Members@odata.count")
    total = count if type(count) is int and count >= 0 else len(first.get("Members") or ())
    former = None if mark is None else Mark.parse(mark)
    entries = _newest_first(session, first, total)
    newest = next(entries, None)
    if newest is not None:
        entries = chain([newest], entries)
    counts: Mapping[str, int] | None = None
    repeated: list[LogEntry] = []
    if newest and newest.count is not None:
        every = _every_entry(session, first, total)
        counts = _repeats(every)
        if former and former.counts is not None:
            repeated = [entry for entry in every if counts.get(entry.number, 1) > former.counts.get(entry.number, 1)]
        entries = iter(every)
    new = entries_since(entries, former.entry, may_lose=may_lose) if former else []
    known = {*new}
    kept = [entry for entry in (*new, *(item for item in repeated if item not in known)) if entry.severity != OK]
    if not kept and _drops_entries(service, total):
        raise BmcError(FULL)
    newest_mark = Mark(entry=newest.mark if newest else EMPTY, counts=counts)
    return LogReading(
        entries=total, newest=str(newest_mark), new=tuple(kept[:MAX_NEW]), new_entries=min(len(kept), MAX_NEW + 1)
    )


def _drops_entries(service: Resource, total: int) -> bool:
    """Return whether a log is full and its service adds no further entries."""
    maximum = service.get("MaxNumberOfRecords")
    return service.get("OverWritePolicy") == "NeverOverWrites" and type(maximum) is int and 0 < maximum <= total


def _every_entry(session: RedfishSession, first: Resource, total: int) -> list[LogEntry]:
    """Return all entries of a log, newest first. `first`: first page of the log."""
    members = members_of(first)
    if all(isinstance(item, dict) and len(item) == 1 for item in members):  # links
        first = session.expanded(first) or first
    entries = list(islice(_newest_first(session, first, total), MAX_READ + 1))
    if len(entries) > MAX_READ:
        raise BmcError(TOO_FAR)
    return entries


def _repeats(entries: Iterable[LogEntry]) -> dict[str, int]:
    """Return number of each event that has occurred more than once -> how often. Raises BmcError for more than MAX_REPEATED."""
    counts = {entry.number: entry.count for entry in entries if entry.number and entry.count and entry.count > 1}
    if len(counts) > MAX_REPEATED:
        raise BmcError(
            f"more than {MAX_REPEATED} entries of the log have repeated events: save and clear it, and start a new run"
        )
    return counts


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
        raise BmcError(TOO_FAR)
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
            raise BmcError(TOO_FAR)
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
    raise BmcError(
        f"the event log has {total} entries and cannot be read from its end: save and clear it, and start a new run"
    )


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
    known = [moment for text in texts if (moment := time_of(text))]
    rising = sum(first < second for first, second in pairwise(known))
    falling = sum(first > second for first, second in pairwise(known))
    if rising != falling:
        return rising > falling
    first, last = _entry(session, members[0]), _entry(session, members[-1])
    if first is None or last is None:
        return True
    times = time_of(first.created), time_of(last.created)
    if times[0] and times[1] and times[0] != times[1]:
        return times[0] < times[1]
    numbers = number_of(first.id), number_of(last.id)
    return numbers[0] is None or numbers[1] is None or numbers[0] <= numbers[1]


def _entry(session: RedfishSession, item: object) -> LogEntry | None:
    if not isinstance(item, dict):
        return None
    whole = item if len(item) > 1 else session.get(item.get("@odata.id"))
    if whole is None:
        return None
    severity = standard(whole.get("Severity"))
    is_deassertion = str(whole.get("EntryCode", "")).lower().startswith("deassert")
    oem = whole.get("Oem")
    hpe = oem.get("Hpe") if isinstance(oem, dict) else None
    hpe = hpe if isinstance(hpe, dict) else {}
    if severity == OK and hpe.get("Repaired") is True and _is_later(hpe.get("Updated"), whole.get("Created")):
        severity = WARNING
    return LogEntry(
        id=clean_text(whole.get("Id", ""), 60),
        created=clean_text(whole.get("Created", ""), 40),
        severity=OK if is_deassertion or is_own_load(whole, severity) else severity,
        message=f"{clean_text(whole.get('Message') or whole.get('MessageId') or 'no text')} {clean_text(_last(hpe), 80)}".strip(),
        number=str(hpe.get("EventNumber")) if type(hpe.get("EventNumber")) is int else "",
        count=hpe["Count"] if type(hpe.get("Count")) is int else None,
    )


def _is_later(updated: object, created: object) -> bool:
    """Return whether an entry was changed after it was created. HPE creates entries about the end of a condition as repaired."""
    times = time_of(clean_text(updated, 40)), time_of(clean_text(created, 40))
    return times[0] is not None and times[1] is not None and times[0] > times[1]


def _last(hpe: Resource) -> str:
    """Return how often and when the event of an entry in HPE's log has occurred, if more than once."""
    count = hpe.get("Count")
    return f"(occurred {count} times, last at {hpe.get('Updated')})" if type(count) is int and count > 1 else ""
