"""Built-in checks of a BMC: was it read, are its readings complete, and are its serials those of the host?

The control node reads the BMC several times during a run. Each time it stores a snapshot: all readings with their values.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge.credibility import Problem, impossible_readings
from fleet.judge.host_view import HostView
from fleet.judge.reading_consistency import CLOCK_TOLERANCE_S
from schemas.readings import BMC, READINGS
from schemas.records import MEASURED, Metric, Record, Snapshot, Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.scopes import HOST, Scope
from schemas.stages import PREFLIGHT
from schemas.times import seconds_or_nan

READABLE, SEVERITY, MESSAGE, NEW = "bmc.readable", "bmc.event.severity", "bmc.event.message", "bmc.log.new_entries"
GPU_SERIAL, HOST_SERIAL = "bmc.gpu.serial", "host.system.serial"
FITTED, SUPPLIES = "bmc.power_supply.fitted", "bmc.power_supply.health"
CRITERION = "bmc-serial"
SOURCE = "a host and its BMC are one machine: the serials that both report are the same"
SERIALS = (GPU_SERIAL, "bmc.system.serial", "bmc.chassis.serial")
NAMES = frozenset(name for name in READINGS if name.startswith(BMC))
MAX_LISTED_EVENTS = 200
"""A snapshot lists at most this many new entries of an event log. Entries whose severity is OK are neither listed nor counted. If
there are more entries, the value of `bmc.log.new_entries` is this number plus one (`fleet/bmc/log_entries.py`)."""
_FOLLOWS = {
    "bmc.power_redundancy.health": ("bmc.power_supply.health",),
    "bmc.fan_redundancy.health": ("bmc.fan.health",),
    "bmc.part.health": ("bmc.power_supply.health", "bmc.fan.health", "bmc.leak_detector.health", "bmc.sensor.alarm"),
}
"""Reading on a group of parts -> readings on its parts. If one part is bad, the reading on the group may be bad too."""
FAULT_LIST = "faults."
"""Beginning of the part in the scope of `bmc.part.health` for a list of the faults that exist now (fleet/bmc/event_log.py)."""
_PLACEHOLDERS = ("o.e.m", "not specified", "default string", "system serial", "none", "n/a", "unknown", "empty")


def judge_bmc(view: HostView) -> Iterator[Verdict]:
    """Yield the verdicts of the built-in checks on a host's BMC; none if the inventory names no BMC."""
    if not view.host.bmc:
        return
    if view.evidence.bmc is None:
        yield view.inconclusive(READABLE, HOST, view.evidence.bmc_problem or "the BMC was not read")
        return
    snapshots = view.evidence.bmc_snapshots()
    taken = {(item.stage, item.phase) for item in snapshots}
    for stage, phase in ((PREFLIGHT, "before"), *((stage.name, "after") for stage in view.plan.stages)):
        if (stage, phase) not in taken:
            yield view.inconclusive(READABLE, HOST, f"the BMC was not read {phase} {stage}", stage)
    for name, scope, reason, stage in (*_wrong_times(view, view.evidence.bmc), *_problems(snapshots)):
        yield view.inconclusive(name, scope, reason, stage, kind=VerdictKind.CONTRADICTORY)
    yield from _compare_serials(view)


def with_bmc_event(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If an entry of an event log fails, add the reading of its text, which begins with its time."""
    if verdict.name != SEVERITY or verdict.verdict != FAIL:
        return verdict
    texts = [str(metric.values[verdict.scope]) for metric in _metrics(view, MESSAGE) if verdict.scope in metric.values]
    if not texts:
        return verdict
    detail = f"the BMC logged during the stage: {texts[-1]}"
    return replace(verdict, reason=f"{verdict.reason}; {detail}", detail=detail)


def with_bmc_part(verdict: Verdict, verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict. If it fails a group of parts, set `part` to the first part that fails.

    `part` is not set if the value itself names the part, as in `Critical: PSU1`. Exception: a list of the faults that exist now
    describes the same fault as the part that fails. If no such part fails, systems and chassis without a reason follow the first
    one with a reason, or such a list.
    """
    names = _FOLLOWS.get(verdict.name)
    if names is None or verdict.verdict != FAIL:
        return verdict
    has_reason = ":" in str(verdict.value)
    if has_reason and not Scope.parse(verdict.scope).get("part").startswith(FAULT_LIST):
        return verdict
    failed = [item for item in verdicts if item.verdict == FAIL]
    parts = [item.scope for name in names for item in failed if item.name == name]
    named = [item.scope for item in failed if item.name == verdict.name and ":" in str(item.value) and not has_reason]
    first = next(iter([*parts, *named]), None)
    return replace(verdict, part=first) if first else verdict


def _metrics(view: HostView, name: str) -> list[Metric]:
    return [metric for _, metric in view.observations.metrics.get(name, ())]


def _problems(snapshots: Sequence[Snapshot]) -> Iterator[Problem]:
    """Yield what is missing, impossible or changed in the readings of a BMC.

    A BMC that could not be read is not reported here: the criterion `bmc-readable` judges it.
    """
    serials: dict[tuple[str, str], Value] = {}
    known = _known_scopes(snapshots)
    for snapshot in snapshots:
        yield from impossible_readings(snapshot, is_bmc=True)
        readings = {metric.name: metric for metric in snapshot.metrics}
        if not _is_readable(readings):
            if READABLE not in readings or not readings[READABLE].absent:
                yield READABLE, HOST, "the snapshot does not state whether the BMC could be read", snapshot.stage
            continue
        yield from _incomplete(snapshot, readings, known)
        yield from _event_problems(readings, snapshot.stage)
        yield from _supply_problems(readings, snapshot.stage)
        for name in SERIALS:
            for scope, value in readings[name].values.items() if name in readings else ():
                if serials.setdefault((name, scope), value) != value:
                    reason = f"changed during the run: {serials[name, scope]}, then {value}"
                    yield name, scope, reason, snapshot.stage


def _wrong_times(view: HostView, record: Record) -> Iterator[Problem]:
    """Yield what is wrong with the times of the record. Like the time of the plan, they are from the control node's clock."""
    times = [view.plan.created, record.began, *(snapshot.at for snapshot in record.snapshots)]
    stages = [PREFLIGHT, *(snapshot.stage for snapshot in record.snapshots)]
    for (earlier, later), stage in zip(itertools.pairwise(times), stages, strict=True):
        if not seconds_or_nan(later) >= seconds_or_nan(earlier) - CLOCK_TOLERANCE_S:  # also if a time is invalid (NaN)
            yield READABLE, HOST, f"the record's times are not in order: {later} follows {earlier}", stage
    if len({*times[2:]}) < len(times[2:]):
        yield READABLE, HOST, "two snapshots of the BMC have the same time", ""
    read = [item.at for item in record.snapshots if _is_readable({metric.name: metric for metric in item.metrics})]
    began = [launch.began for launch in view.evidence.launches()]
    if read and any(seconds_or_nan(read[0]) > seconds_or_nan(at) + CLOCK_TOLERANCE_S for at in began):
        yield (
            READABLE,
            HOST,
            f"the BMC was first read at {read[0]}, after a launch began: which events it logged before is unknown",
            PREFLIGHT,
        )
    if record.snapshots and record.ended != record.snapshots[-1].at:
        yield (
            READABLE,
            HOST,
            f"the last snapshot of the BMC has the time {times[-1]}, but its record ends at {record.ended}",
            "",
        )


def _is_readable(readings: Mapping[str, Metric]) -> bool:
    return READABLE in readings and bool(readings[READABLE].values)


def _known_scopes(snapshots: Iterable[Snapshot]) -> Mapping[str, set[str]]:
    """Return name of a reading -> its scopes in all snapshots together."""
    known: dict[str, set[str]] = {}
    for snapshot in snapshots:
        readings = {metric.name: metric for metric in snapshot.metrics}
        for name, metric in readings.items() if _is_readable(readings) else ():
            known.setdefault(name, set()).update(metric.values, metric.absent)
    return known


def _incomplete(snapshot: Snapshot, readings: Mapping[str, Metric], known: Mapping[str, set[str]]) -> Iterator[Problem]:
    """Yield readings that a snapshot lacks or has in a scope of the wrong kind, and parts that only other snapshots have."""
    when = f"{snapshot.phase} {snapshot.stage}"
    for name in sorted(NAMES - readings.keys()):
        yield name, HOST, f"missing in the snapshot {when}", snapshot.stage
    for name in sorted(NAMES & readings.keys()):
        metric, labels = readings[name], READINGS[name].labels
        scopes = {*metric.values, *metric.absent}
        if not scopes:
            yield name, HOST, f"has neither a value nor a reason for its absence in the snapshot {when}", snapshot.stage
        for scope in metric.values:
            if tuple(Scope.parse(scope).labels) != labels:
                yield name, scope, f"read in the scope {scope}, which is not a scope of this reading", snapshot.stage
        if "entry" not in labels:
            for scope in sorted(known[name] - scopes):
                yield (
                    name,
                    scope,
                    f"missing in the snapshot {when}, but another snapshot of the BMC has it",
                    snapshot.stage,
                )


def _supply_problems(readings: Mapping[str, Metric], stage: str) -> Iterator[Problem]:
    """Yield a problem if the BMC states another number of power supplies than the number of supplies that were read."""
    fitted, supplies = readings.get(FITTED), readings.get(SUPPLIES)
    if fitted and supplies and fitted.values:
        number = len({*supplies.values, *supplies.absent} - {HOST})
        if fitted.values.get(HOST) != number:
            yield (
                FITTED,
                HOST,
                f"is {fitted.values.get(HOST)}, but {number} power {'supply was' if number == 1 else 'supplies were'} read",
                stage,
            )


def _event_problems(readings: Mapping[str, Metric], stage: str) -> Iterator[Problem]:
    """Yield contradictions in the event logs.

    These are new entries without severity or text, and logs whose value of `bmc.log.new_entries` does not fit the listed entries.
    """
    severity, message, new = (readings.get(name) for name in (SEVERITY, MESSAGE, NEW))
    if severity is None or message is None or new is None:
        return
    listed = {*severity.values, *severity.absent} - {HOST}
    if listed != {*message.values}:
        yield SEVERITY, HOST, "not every new entry of the event logs has both a severity and a text", stage
    if not {*message.absent} <= {HOST} or (listed and message.absent):
        yield MESSAGE, HOST, "an entry of an event log has no text", stage
    for scope, number in new.values.items():
        entries = sum(Scope.parse(entry).device == scope for entry in listed)
        if not isinstance(number, int) or entries != min(number, MAX_LISTED_EVENTS):
            yield (
                NEW,
                scope,
                f"is {number}, but {entries} new {'entry is' if entries == 1 else 'entries are'} listed",
                stage,
            )


def _compare_serials(view: HostView) -> Iterator[Verdict]:
    """Yield a verdict on each serial that the host reports for a GPU or for itself, if the BMC reports comparable serials.

    Serials are comparable if they have the same form (`_form`). The serials of a board and of a module have different forms. The
    BMC may number the GPUs in another order, so each serial of a GPU is compared with all GPU serials that the BMC reports.

    A serial fails if the host reports it and the BMC does not. There are two exceptions, which get no verdict. For a GPU: the BMC
    reports fewer serials of the same form than the host has. For the host: the BMC reports no system serial of the same form. (A
    chassis serial can make the host pass but not fail, because it can differ from the system serial.)
    """
    gpus = [(f"gpu={gpu.index}", gpu.serial) for gpu in view.gpus]
    reported = reported_serials(view, GPU_SERIAL)
    number, needed = (Counter(map(_form, serials)) for serials in (reported, [serial for _, serial in gpus]))
    yield from _compare(view, gpus, reported, {form for form in needed if number[form] >= needed[form]})
    own = [item for item in view.observations[HOST_SERIAL] if item.status == MEASURED]
    systems = reported_serials(view, "bmc.system.serial")
    machines = [*systems, *reported_serials(view, "bmc.chassis.serial")]
    yield from _compare(view, [(HOST, str(own[-1].value))] if own else [], machines, set(map(_form, systems)))


def serials_of_gpus(view: HostView) -> dict[str, bool]:
    """Return scope of a GPU -> whether the BMC of its host reports its serial, for the GPUs that can be compared."""
    verdicts = _compare_serials(view) if view.host.bmc else ()
    return {verdict.scope: verdict.verdict == PASS for verdict in verdicts if verdict.name == GPU_SERIAL}


def reported_serials(view: HostView, *names: str) -> list[str]:
    """Return the serials that the BMC of a host reports in these readings."""
    values = [
        str(value).strip() for name in names for metric in _metrics(view, name) for value in metric.values.values()
    ]
    return [value for value in dict.fromkeys(values) if is_serial(value)]


def _compare(
    view: HostView, own: list[tuple[str, str]], reported: list[str], forms: set[tuple[int, bool]]
) -> Iterator[Verdict]:
    """Yield a verdict on the serials that the host reports (`own`: scope and serial).

    A serial passes if it is in `reported`, the serials from the BMC. Otherwise it fails if its form is in `forms`, and gets no
    verdict if not. `_compare_serials` explains which forms these are.
    """
    folded = {serial.casefold() for serial in reported}
    matched = {serial.casefold() for _, serial in own}
    others = [serial for serial in reported if serial.casefold() not in matched] or reported
    for scope, serial in own:
        matches = serial.casefold() in folded
        if not is_serial(serial) or not (matches or _form(serial) in forms):
            continue
        listed = ", ".join(others[:8])
        reason = f"the host reports the serial {serial}, its BMC reports {'the same' if matches else listed}"
        yield Verdict(
            host=view.host.name,
            scope=scope,
            serial=view.serial(scope),
            name=GPU_SERIAL if scope != HOST else "bmc.system.serial",
            stage=PREFLIGHT,
            verdict=PASS if matches else FAIL,
            criterion=CRITERION,
            kind=VerdictKind.IDENTITY,
            value=serial,
            limit=serial if matches else listed,
            operator="eq",
            unit="1",
            reason=reason,
            detail="" if matches else reason,
            action="none" if matches else "inspect_hardware",
            source=SOURCE,
            basis="policy",
            severity="" if matches else "critical",
        )


def is_serial(text: str) -> bool:
    """Return whether a text that firmware reports is a serial number.

    Placeholders are no serials. Neither are texts that only repeat one character; zeros at both ends are ignored for this.
    """
    return len(set(text.strip("0"))) > 1 and not any(word in text.lower() for word in _PLACEHOLDERS)


def _form(serial: str) -> tuple[int, bool]:
    """Return the form of a serial: its length, and whether it has only digits. Serials of one kind have the same form."""
    return len(serial), serial.isdigit()
