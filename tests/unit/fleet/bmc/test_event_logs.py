"""Test event logs whose entries change, disappear or are no longer written, and lists of the faults that exist now."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from fleet.bmc.event_log import MAX_REPEATED
from fleet.bmc.log_entries import Mark
from schemas.records import Metric
from tests.fakes import bmc
from tests.fakes.bmc import SEL, V1, Resources
from tests.unit.fleet.bmc.test_redfish import LOG, certificate, log_of, read, service, values  # noqa: F401 - a fixture

_LOST = "error: the log has no entry from before the previous reading"
_FULL = "error: the log is full, so that the BMC drops new entries"


def hpe_entry(
    number: int, *, count: int = 1, updated: str = "", repaired: bool | None = None, **more: Any
) -> dict[str, Any]:
    """Return an entry of HPE's Integrated Management Log (example in the documentation of iLO 6).

    `repaired`: whether its condition has ended; None for an entry that reports no condition.
    """
    entry = bmc.entry(number, **{"message": f"event {number}", **more})
    repair = {} if repaired is None else {"Repaired": repaired}
    hpe = {"Count": count, "EventNumber": 1000 + number, "Updated": updated or entry["Created"], **repair}
    return {**entry, "EntryType": "Oem", "OemRecordFormat": "Hpe-IML", "Oem": {"Hpe": hpe}}


def read_twice(certificate: Path, first: Resources, second: Resources) -> dict[str, Metric]:  # noqa: F811
    """Return the metrics of the second of two readings of a BMC. The resources of the BMC change between them."""
    with service(certificate, first) as served:
        mark = values(read(served.target(certificate)), "log.newest")
    with service(certificate, second) as served:
        return read(served.target(certificate), mark)


def events(metrics: dict[str, Metric]) -> dict[str, str]:
    """Return ID of each new entry whose severity is not OK -> its severity."""
    return {scope.rpartition("=")[2]: severity for scope, severity in values(metrics, "event.severity").items()}


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("page_size", [0, 2])
@pytest.mark.parametrize("position", range(1, 5))
@pytest.mark.parametrize("has_new", [False, True])
def test_event_that_repeats_in_an_earlier_entry_is_new(
    certificate: Path,  # noqa: F811
    newest_first: bool,
    page_size: int,
    position: int,
    has_new: bool,
) -> None:
    """HPE raises the count of the entry of an event that occurs again, and adds no entry."""
    before = [hpe_entry(number, count=number) for number in range(1, 5)]
    after = [*before, *([hpe_entry(5)] if has_new else [])]
    after[position - 1] = hpe_entry(position, count=position + 1, updated="2026-11-03T09:00:00Z")
    logs = ([*reversed(log)] if newest_first else log for log in (before, after))
    metrics = read_twice(certificate, *(log_of(log, page_size=page_size) for log in logs))
    assert events(metrics) == {str(position): "Warning", **({"5": "Warning"} if has_new else {})}
    text = values(metrics, "event.message")[f"{LOG},entry={position}"]
    assert text.endswith(f"event {position} (occurred {position + 1} times, last at 2026-11-03T09:00:00Z)")


def test_entries_whose_count_has_not_risen_are_not_new(certificate: Path) -> None:  # noqa: F811
    """An operator may mark an earlier entry as repaired. A full log renumbers all entries when one is added."""
    before = [hpe_entry(number, count=2) for number in range(1, 5)]
    repaired = hpe_entry(1, count=2, repaired=True, severity="OK", updated="2026-11-03T09:00:00Z")
    moved = [{**entry, "Id": str(number)} for number, entry in enumerate([*before[1:], hpe_entry(5, severity="OK")], 1)]
    for after in (before, [repaired, *before[1:]], moved):
        metrics = read_twice(certificate, log_of(before), log_of(after))
        assert (events(metrics), metrics["bmc.log.new_entries"].values) == ({}, {LOG: 0})


def test_entry_whose_condition_began_and_ended_since_the_previous_reading_is_a_warning(certificate: Path) -> None:  # noqa: F811
    """HPE sets the severity of such an entry to OK. An entry that only reports the end of a condition is created as repaired.

    The last entry is of the second kind: `Connectivity status changed to OK` (mock-up in github.com/NVIDIA/libredfish).
    """
    later = "2026-11-03T00:00:09Z"
    entries = [
        hpe_entry(1),
        hpe_entry(2, severity="OK", repaired=True, updated=later),
        hpe_entry(3, severity="OK", updated=later),
    ]
    entries.append(hpe_entry(4, severity="OK", repaired=True))
    assert events(read_twice(certificate, log_of(entries[:1]), log_of(entries))) == {"2": "Warning"}


@pytest.mark.parametrize("first", [1, 2])
def test_repeated_events_are_not_new_if_the_mark_has_no_counts(certificate: Path, first: int) -> None:  # noqa: F811
    """Earlier versions made marks without counts. A mark of a log in which no event had occurred twice has an empty list.

    `first`: how often the event of the first entry had occurred at the previous reading.
    """
    before = log_of([hpe_entry(1, count=first), hpe_entry(2)])
    after = log_of([hpe_entry(1, count=2), hpe_entry(2)])
    with service(certificate, before) as served:
        (mark,) = values(read(served.target(certificate)), "log.newest").values()
    with service(certificate, after) as served:
        for text, expected in ((mark, {"1": "Warning"} if first == 1 else {}), (mark.partition(" repeats")[0], {})):
            assert events(read(served.target(certificate), {LOG: text})) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("IML", "Event"), {"IML"}),
        (("Event",), {"Event"}),
        (("SEL", "PlatformLog", "ActiveLog"), {"PlatformLog"}),
        (("SEL", "EventLog"), {"SEL", "EventLog"}),
        (("SEL", "IML"), {"SEL", "IML"}),
    ],
)
def test_log_of_alerts_and_copy_of_a_log_are_not_read_if_the_other_log_exists(
    certificate: Path,  # noqa: F811
    names: tuple[str, ...],
    expected: set[str],
) -> None:
    """HPE's `Event` has warnings about security settings. Lenovo's `SEL` is a copy of `PlatformLog` (mock-ups of libredfish)."""
    path = f"{V1}/Systems/1/LogServices"
    resources = bmc.old_schema()
    resources[path] = {"@odata.id": path, "Members": [{"@odata.id": f"{path}/{name}"} for name in names]}
    for name in names:
        entries = {"@odata.id": f"{path}/{name}/Entries"}
        resources[f"{path}/{name}"] = {"@odata.id": f"{path}/{name}", "Id": name, "Entries": entries}
        resources[entries["@odata.id"]] = entries | {"Members": [bmc.entry(1)]}
    with service(certificate, resources) as served:
        newest = values(read(served.target(certificate)), "log.newest")
    assert set(newest) == {f"log=1.{name}" for name in expected}


@pytest.mark.parametrize("expands", [True, False])
def test_linked_entries_of_repeated_events_are_read_in_one_request(certificate: Path, expands: bool) -> None:  # noqa: F811
    entries = {f"{SEL}/{number}": hpe_entry(number, count=2) for number in range(1, 31)}
    log = log_of([{"@odata.id": path} for path in entries]) | entries

    def answer(request: BaseHTTPRequestHandler) -> bool:
        if request.path != f"{SEL}?$expand=." or not expands:
            return False
        members = [{"@odata.id": path, **entry} for path, entry in entries.items()]
        request.reply(200, {"@odata.id": SEL, "Members": members})  # type: ignore[attr-defined]
        return True

    marks = {LOG: str(Mark(entry="30 2026-11-03T00:00:30Z", counts={str(1000 + number): 2 for number in range(2, 31)}))}
    with service(certificate, log, answer) as served:
        assert events(read(served.target(certificate), marks)) == {"1": "Warning"}
        assert (len([request for request in served.requests if "Entries" in request]) < 6) is expands


def test_too_many_entries_of_repeated_events_are_an_error(certificate: Path) -> None:  # noqa: F811
    entries = [hpe_entry(number, count=2) for number in range(1, MAX_REPEATED + 2)]
    for number, expected in ((MAX_REPEATED, set()), (MAX_REPEATED + 1, {LOG})):
        with service(certificate, log_of(entries[:number])) as served:
            metrics = read(served.target(certificate))
        assert {*metrics["bmc.log.new_entries"].absent} == expected
        assert all(
            len(text) < 4096 for text in values(metrics, "log.newest").values()
        )  # the limit of a text in a record


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("last", [0, 4, 9])
def test_log_without_an_entry_from_before_the_previous_reading_is_an_error_unless_it_reports_a_fault(
    certificate: Path,  # noqa: F811
    first: int,
    last: int,
) -> None:
    """The log had the entries 1 to 3. Since then it has grown (`first` is 1), was cleared, or has overwritten old entries."""
    before = [bmc.entry(number, severity="OK") for number in range(1, 4)]
    after = [bmc.entry(number, severity="OK") for number in range(first, last + 1)]
    new = read_twice(certificate, log_of(before), log_of(after))["bmc.log.new_entries"]
    if first == 1 and last:
        assert new.values == {LOG: 0}
    else:
        assert new.absent[LOG].startswith(_LOST)
    if after:
        after[-1]["Severity"] = "Critical"
        assert events(read_twice(certificate, log_of(before), log_of(after))) == {str(last): "Critical"}


@pytest.mark.parametrize(
    ("kind", "other", "is_error"),
    [("Event", "SEL", False), ("Event", None, True), (None, "SEL", True), (None, None, True), ("Event", "Event", True)],
)
def test_log_of_logins_may_lose_entries_if_hardware_events_are_in_another_log(
    certificate: Path,  # noqa: F811
    kind: str | None,
    other: str | None,
    is_error: bool,
) -> None:
    """The `EventLog` of BMCs with AMI's firmware holds 150 entries and logs each login and logout. Faults are in the `SEL`."""
    path = f"{V1}/Systems/1/LogServices"
    resources = log_of([bmc.entry(1, severity="OK")])
    resources[f"{path}/SEL"]["LogEntryType"] = other
    resources[path]["Members"].append({"@odata.id": f"{path}/EventLog"})
    entries = {"@odata.id": f"{path}/EventLog/Entries"}
    resources[f"{path}/EventLog"] = {
        "@odata.id": f"{path}/EventLog",
        "Id": "EventLog",
        "LogEntryType": kind,
        "Entries": entries,
    }
    resources[entries["@odata.id"]] = entries | {
        "Members": [bmc.entry(number, severity="OK") for number in range(5, 9)]
    }
    marks = {LOG: "1 2026-11-03T00:00:01Z", "log=1.EventLog": "3 2026-11-03T00:00:03Z"}
    with service(certificate, resources) as served:
        new = read(served.target(certificate), marks)["bmc.log.new_entries"]
    assert set(new.absent) == ({"log=1.EventLog"} if is_error else set())


@pytest.mark.parametrize(
    ("policy", "maximum", "is_full"),
    [("NeverOverWrites", 3, True), ("NeverOverWrites", 4, False), ("WrapsWhenFull", 3, False), (None, 3, False)]
    + [("NeverOverWrites", unknown, False) for unknown in (0, None, "3")],
)
def test_full_log_that_drops_new_entries_is_an_error(
    certificate: Path,  # noqa: F811
    policy: str | None,
    maximum: object,
    is_full: bool,
) -> None:
    resources = log_of([bmc.entry(number) for number in range(1, 4)])
    resources[f"{V1}/Systems/1/LogServices/SEL"] |= {"OverWritePolicy": policy, "MaxNumberOfRecords": maximum}
    with service(certificate, resources) as served:
        new = read(served.target(certificate))["bmc.log.new_entries"]
    assert new.absent.get(LOG, "").startswith(_FULL) is is_full
    assert new.values == ({} if is_full else {LOG: 0})


@pytest.mark.parametrize("severity", ["OK", "Critical"])
def test_log_that_gets_full_is_an_error_unless_it_reports_a_fault(certificate: Path, severity: str) -> None:  # noqa: F811
    """A fault that repeats, such as a memory error, often fills the log."""
    before = log_of([bmc.entry(1, severity="OK")])
    after = log_of([bmc.entry(number, severity=severity) for number in range(1, 4)])
    for resources in (before, after):
        resources[f"{V1}/Systems/1/LogServices/SEL"] |= {"OverWritePolicy": "NeverOverWrites", "MaxNumberOfRecords": 3}
    metrics = read_twice(certificate, before, after)
    if severity == "OK":
        assert metrics["bmc.log.new_entries"].absent[LOG].startswith(_FULL)
    else:
        assert events(metrics) == {"2": severity, "3": severity}


@pytest.mark.parametrize("form", ["{}T{}Z", "{} {} ", "{} {}"])
def test_times_with_a_space_are_compared(certificate: Path, form: str) -> None:  # noqa: F811
    """The BMC of an Atos server writes the time `2022-06-13 12:19:21 `. The entry that was the newest before is missing."""
    entries = [bmc.entry(number, Created=form.format("2026-11-03", f"00:00:0{number}")) for number in range(1, 7)]
    metrics = read_twice(certificate, log_of(entries[:4]), log_of([*entries[:3], *entries[4:]]))
    assert events(metrics) == {"5": "Warning", "6": "Warning"}


@pytest.mark.parametrize("name", ["FaultList", "ActiveLog"])
@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ([], "OK"),
        (["OK"], "OK"),
        (["Warning"], "Warning: event 1"),
        (["Warning", "Critical"], "Critical: event 1; event 2"),
        (["Critical", None], "Critical: event 1; event 2"),
        (["OK", None], None),
    ],
)
def test_list_of_current_faults_is_read_as_health_and_not_as_an_event_log(
    certificate: Path,  # noqa: F811
    name: str,
    faults: list[str | None],
    expected: str | None,
) -> None:
    """Dell's FaultList and Lenovo's ActiveLog lose the entry of a fault when it ends."""
    path = f"{V1}/Systems/1/LogServices/{name}"
    resources = bmc.old_schema()
    resources[f"{V1}/Systems/1/LogServices"]["Members"].append({"@odata.id": path})
    resources[path] = {
        "@odata.id": path,
        "Id": name,
        "LogEntryType": "Event",
        "Entries": {"@odata.id": f"{path}/Entries"},
    }
    members = [bmc.entry(number, f"event {number}", severity) for number, severity in enumerate(faults, 1)]
    resources[f"{path}/Entries"] = {"@odata.id": f"{path}/Entries", "Members": members}
    with service(certificate, resources) as served:
        metrics = read(served.target(certificate))
    scope = f"part=faults.1.{name}"
    assert values(metrics, "part.health").get(scope) == expected
    assert (scope in metrics["bmc.part.health"].absent) is (expected is None)
    assert {*values(metrics, "log.newest")} == {LOG}


@pytest.mark.parametrize(("links", "status"), [(False, 200), (True, 404), (True, 500)])
def test_list_of_current_faults_that_cannot_be_read_is_not_ok(certificate: Path, links: bool, status: int) -> None:  # noqa: F811
    """All other readings of the BMC are kept. A list that does not exist gives no reading, like a log that does not exist."""
    path = f"{V1}/Systems/1/LogServices/FaultList"
    resources = bmc.old_schema()
    resources[f"{V1}/Systems/1/LogServices"]["Members"].append({"@odata.id": path})
    resources[path] = {"@odata.id": path, "Id": "FaultList"}
    if links:
        resources[path]["Entries"] = {"@odata.id": f"{path}/Entries"}

    def answer(request: BaseHTTPRequestHandler) -> bool:
        if request.path != f"{path}/Entries":
            return False
        request.reply(status, {})  # type: ignore[attr-defined]
        return True

    with service(certificate, resources, answer) as served:
        metrics = read(served.target(certificate))
    assert values(metrics, "readable") == {"host": True}
    assert "part=faults.1.FaultList" not in values(metrics, "part.health")
    assert ("part=faults.1.FaultList" in metrics["bmc.part.health"].absent) is (status == 500)
