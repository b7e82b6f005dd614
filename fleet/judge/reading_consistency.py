"""Check that snapshots have the same readings, and that constant readings do not change.

Readings that count seconds must neither fall nor grow faster than time passes.

Equal readings of two snapshots are usually the same Python object (`schemas.quick`), so only few values must be compared.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from schemas.readings import READINGS
from schemas.records import Metric, Record, Snapshot, Value
from schemas.scopes import Scope
from schemas.semantic_validation import COLLECTOR
from schemas.times import epoch_seconds

Problem = tuple[str, str, str, str]
"""Name and scope of a reading, what is wrong with it, and the stage of the snapshot (empty: no particular snapshot)."""

FULL_PHASES = ("before", "after")
"""Phases of full snapshots, which have every reading. A snapshot during a launch has only readings that take little time."""
IDENTITY_READINGS = {"gpu.serial": "serial", "gpu.uuid": "uuid", "gpu.name": "name", "gpu.pci_bus_id": "pci_bus_id"}
"""Reading -> field of the record that states the same value."""
REPORTED_AS_IDENTITY = ("gpu.serial", "gpu.uuid", "gpu.name")
"""Readings whose change is reported as a change of identity (`expectations.identity_changes`)."""
LASTING_LABELS = ("host", "gpu", "cpu", "numa", "runtime")
"""Kinds of devices that cannot disappear while the host runs, so that every snapshot must have their scopes."""
REPLACEABLE_LABELS = ("disk", "mount", "nic", "hca", "array", "pool", "mc")
"""Kinds of devices that may be replaced by another device of the same name while the host runs."""
OF_MODULES = ("optics.", "port.")
"""Prefixes of the readings of modules in ports. A module may be replaced, or lose its link, while the host runs."""
EVENT_LABELS = ("xid", "sxid", "event")
"""Labels of scopes that exist only after their event has occurred."""
LOG_READ = "xid.last_seen"
"""Reading that has a value if the kernel log could be read, and otherwise the reason why it could not."""
ALL_EVENTS = "kernel.event.last_seen"
"""Reading that has a value for each kind of event, even if the event has not occurred."""
CONSTANT_OF_OTHERS = (
    "version", "kernel_version", "driver_version", "vbios_version", "serial", "model", "part_number", "checksum", "architecture",
    "compute_capability", "brand", "id",
)  # fmt: skip
"""Last components of names. An unlisted reading (not in READINGS of this version of Rackproof) with one of them is constant."""
RESIZED = ("host.memory.total", "host.numa.memory_total")
"""Sizes that a hypervisor may change while the host runs."""
RESIZED_BY = 20.0
"""Factor by which a size in RESIZED may change. A larger change means that one of the values has a wrong unit."""
COUNTING_DELAY_S = 120.0
"""Seconds by which a counted time may grow more than the uptime does between two snapshots. Drivers update the counter of
throttled time late: on H100 and H200 it grows by up to 38 s at once."""
CLOCK_TOLERANCE_S = 300.0
"""Seconds by which a counted time may grow more than the system clock advances between two snapshots. It applies to the uptime
itself, and to other times if the uptime is not available. The clock may be corrected during a run."""
UPTIME = "host.uptime"


@cache
def is_constant(name: str) -> bool:
    """Return whether a reading must have the same value in every snapshot of a record."""
    reading = READINGS.get(name)
    if reading is None:
        return not name.startswith(COLLECTOR) and name.rpartition(".")[2] in CONSTANT_OF_OTHERS
    return not reading.counter and not reading.varies


@cache
def _is_time(name: str) -> bool:
    """Return whether a reading counts seconds, and so grows at most as fast as time passes.

    Times of disks are left out: a drive counts whole hours, so its time may grow by an hour at once.
    """
    reading = READINGS.get(name)
    is_of_disk = "disk" in reading.labels if reading else False
    return name == UPTIME or (reading is not None and reading.counter and reading.unit == "s" and not is_of_disk)


@cache
def _is_in_every_snapshot(name: str) -> bool:
    """Return whether snapshots during a launch have the reading too; False if this version of Rackproof does not know it."""
    reading = READINGS.get(name)
    return name.startswith(COLLECTOR) or (reading is not None and not reading.full_only)


def reading_problems(record: Record) -> Iterator[Problem]:
    """Yield each reading that a snapshot lacks, that changed although it must not, or that contradicts the GPUs of the record."""
    # If a collector failed, its readings are missing. Another verdict reports that and names the collector.
    snapshots = [snapshot for snapshot in record.snapshots if not _has_failed_collector(snapshot)]
    full = [snapshot for snapshot in snapshots if snapshot.phase in FULL_PHASES]
    if not full:
        return
    changed, irregular = _differences(full[0], snapshots)
    if irregular:
        yield from _missing_readings(full, irregular)
        changed = {metric.name: None for snapshot in snapshots for metric in snapshot.metrics}
    for metric in full[0].metrics:
        if metric.name in IDENTITY_READINGS and metric.name not in changed:
            yield from _misstated_identities(record, metric.name, metric.values)
    series: dict[str, list[tuple[Snapshot, Metric]]] = defaultdict(list)
    checked = {name for name in changed if is_constant(name) or _is_time(name) or name in RESIZED}
    for snapshot in snapshots if checked else ():
        for metric in snapshot.metrics:
            if metric.name in checked:
                series[metric.name].append((snapshot, metric))
    for name, readings in series.items():
        if _is_time(name):
            yield from _wrong_times(name, readings, series.get(UPTIME, ()))
        elif name not in REPORTED_AS_IDENTITY:
            yield from _changed_readings(name, readings)
        if name in IDENTITY_READINGS:
            yield from _misstated_identities(record, name, _agreed([metric.values for _, metric in readings]))


def _differences(first: Snapshot, snapshots: Sequence[Snapshot]) -> tuple[dict[str, None], list[Snapshot]]:
    """Return the readings whose values may differ from those in `first`, and the snapshots whose readings or scopes differ."""
    changed: dict[str, None] = {}
    irregular = []
    fast: list[Metric] | None = None
    for snapshot in snapshots:
        expected: Sequence[Metric] = first.metrics
        if snapshot.phase not in FULL_PHASES:
            fast = fast or [metric for metric in first.metrics if _is_in_every_snapshot(metric.name)]
            expected = first.metrics if len(snapshot.metrics) == len(first.metrics) else fast
        if len(expected) != len(snapshot.metrics):
            irregular.append(snapshot)
            continue
        for one, other in zip(expected, snapshot.metrics, strict=True):
            if one is other:
                continue
            if (
                one.name != other.name
                or one.values.keys() != other.values.keys()
                or one.absent.keys() != other.absent.keys()
            ):
                irregular.append(snapshot)
                break
            changed[one.name] = None
    return changed, irregular


def _has_failed_collector(snapshot: Snapshot) -> bool:
    return any(metric.absent and metric.name.startswith(COLLECTOR) for metric in snapshot.metrics)


def _missing_readings(full: Sequence[Snapshot], irregular: Sequence[Snapshot]) -> Iterator[Problem]:
    """Yield each reading that a snapshot lacks although a full snapshot has it.

    Also yield up to three readings that only snapshots during a launch have. `irregular` has the snapshots that differ from the
    first full snapshot. The first full snapshot is checked too, because it may itself lack a reading.
    """
    known: dict[str, dict[int, Metric]] = defaultdict(dict)
    for metric in (metric for snapshot in full for metric in snapshot.metrics):
        known[metric.name][id(metric)] = metric
    during = {metric.name for snapshot in irregular if snapshot.phase not in FULL_PHASES for metric in snapshot.metrics}
    for name in sorted(during - known.keys())[:3]:
        yield name, "host", "only snapshots during a launch have this reading", ""
    for snapshot in (full[0], *irregular):
        is_full = snapshot.phase in FULL_PHASES
        when = f"missing in the snapshot {snapshot.phase} {snapshot.stage}, but other snapshots of the record have it"
        here = {metric.name: metric for metric in snapshot.metrics}
        is_log_read = LOG_READ in here and bool(here[LOG_READ].values)
        present: set[str] = set()
        for name, metrics in known.items():
            if name not in here:
                if is_full or _is_in_every_snapshot(name):
                    yield name, "host", when, snapshot.stage
                continue
            metric = here[name]
            if len(metrics) == 1 and id(metric) in metrics:
                continue
            scopes = {scope for each in metrics.values() for scope in (*each.values, *each.absent)}
            missing = scopes - metric.values.keys() - metric.absent.keys()
            if missing and not present:
                present = {scope for each in snapshot.metrics for scope in (*each.values, *each.absent)}
            for scope in sorted(missing):
                if _is_required(name, scope, present, is_log_read=is_log_read) and not _has_port(metric, scope):
                    yield name, scope, when, snapshot.stage


def _is_required(name: str, scope: str, present: set[str], *, is_log_read: bool) -> bool:
    """Return whether a snapshot must have the reading for this scope, because the host had the part at that time.

    A remote volume or a virtual interface may disappear and return, with all its readings. A scope of an event, such as an error
    code, appears when the event first occurs. ALL_EVENTS is an exception: if the kernel log could be read, it has a scope for
    each kind of event.

    `present`: all scopes of the snapshot. `is_log_read`: whether the snapshot has LOG_READ with a value.
    """
    parsed = Scope.parse(scope)
    if parsed.kind in EVENT_LABELS:
        return is_log_read and name == ALL_EVENTS
    return scope in present or parsed.device_kind in LASTING_LABELS


def _has_port(metric: Metric, scope: str) -> bool:
    """Return whether the metric is a reading of modules, and has another scope of the same port.

    Then a missing lane is accepted: lanes may appear and disappear when a module is replaced or loses its link.
    """
    port = Scope.parse(scope).without("lane")
    is_of_module = metric.name.startswith(OF_MODULES)
    return is_of_module and any(Scope.parse(port).contains(other) for other in (*metric.values, *metric.absent))


def _agreed(readings: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return scope -> value, for the scopes whose values are all equal."""
    values: dict[str, set[Value]] = defaultdict(set)
    for scope, value in (item for reading in readings for item in reading.items()):
        values[scope].add(value)
    return {scope: next(iter(of_scope)) for scope, of_scope in values.items() if len(of_scope) == 1}


def _misstated_identities(record: Record, name: str, values: Mapping[str, Value]) -> Iterator[Problem]:
    field = IDENTITY_READINGS[name]
    for gpu in record.gpus:
        scope, stated = f"gpu={gpu.index}", getattr(gpu, field)
        if stated and scope in values and values[scope] != stated:
            yield name, scope, f"every snapshot has {values[scope]}, but the record states {stated}", ""


def _changed_readings(name: str, readings: Sequence[tuple[Snapshot, Metric]]) -> Iterator[Problem]:
    """Yield each value that differs from the first value of its scope, unless such a change is allowed."""
    first: dict[str, Value] = {}
    for snapshot, metric in readings:
        for scope, value in metric.values.items():
            known = first.setdefault(scope, value)
            if metric.unit == "B/s" and 0 in (known, value):
                continue  # a link that is down has the speed 0
            if name in RESIZED and _is_resized(known, value):
                continue
            if known != value and Scope.parse(scope).device_kind not in REPLACEABLE_LABELS:
                yield name, scope, f"changed during the run: {known}, then {value}", snapshot.stage


def _is_resized(known: Value, value: Value) -> bool:
    numbers = [float(item) for item in (known, value) if isinstance(item, int | float)]
    return len(numbers) == 2 and max(numbers) < RESIZED_BY * min(numbers)


def _wrong_times(
    name: str, readings: Sequence[tuple[Snapshot, Metric]], uptimes: Sequence[tuple[Snapshot, Metric]]
) -> Iterator[Problem]:
    """Yield each counted time that fell, or grew by more than the time between two snapshots plus a tolerance."""
    uptimes_s = {id(snapshot): metric.values.get("host") for snapshot, metric in uptimes}
    for (earlier, before), (later, after) in itertools.pairwise(readings):
        elapsed, tolerance = _seconds_between(earlier, later), CLOCK_TOLERANCE_S
        first, second = uptimes_s.get(id(earlier)), uptimes_s.get(id(later))
        if name != UPTIME and isinstance(first, int | float) and isinstance(second, int | float):
            # Unlike the clock, the uptime is never corrected.
            elapsed, tolerance = second - first, COUNTING_DELAY_S
        for scope, value in after.values.items():
            old = before.values.get(scope)
            if not isinstance(value, int | float) or not isinstance(old, int | float):
                continue
            if value - old > elapsed + later.duration_s + tolerance:
                yield name, scope, f"grew by {value - old:g} s within {max(elapsed, 0):g} s", later.stage
            elif value < old and name != UPTIME:  # another check reports a lower uptime as a reboot
                yield name, scope, f"fell from {old:g} s to {value:g} s during the run", later.stage


def _seconds_between(earlier: Snapshot, later: Snapshot) -> float:
    try:
        return epoch_seconds(later.at) - epoch_seconds(earlier.at)
    except ValueError:  # another check reports a time that cannot be read
        return float("inf")
