"""What a host's evidence must contain, and where its parts contradict each other. A contradiction is inconclusive, never a pass.

Nothing here is compared with a limit. Each check names the elements that disagree, so that the cause can be found: a record that
was edited, an agent that lost a part of it, or a host whose clock or parts changed during the run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fleet.judge.credibility import incredible
from fleet.judge.direction import RATE_UNITS
from fleet.judge.evidence import Planned
from fleet.judge.host_view import HostView
from schemas.catalogue import DURATION
from schemas.records import MEASURED, Launch, Observation, Record, Samples, Snapshot, Value
from schemas.reports import Verdict, VerdictKind
from schemas.scopes import Scope
from schemas.semantic_validation import COLLECTOR
from schemas.stages import BENCHMARK, GANG, PREFLIGHT, SOAK
from schemas.times import epoch_seconds

DEADLINE_GRACE_S = 120.0
"""A supervisor that ends its ranks at the deadline needs at most this long."""
CLOCK_TOLERANCE_S = 300.0
"""The system clock may be corrected during a run. The clock itself is judged by criteria."""
FULL_PHASES = ("before", "after")
"""Phases of the snapshots that have every reading; one taken during a launch has only the fast ones."""
IDENTITY_READINGS = {"gpu.serial": "serial", "gpu.uuid": "uuid", "gpu.name": "name", "gpu.pci_bus_id": "pci_bus_id"}
"""Reading -> field of the record that states the same."""
EQUAL_PARAMS = ("size", "size_bytes", "batch_size", "dtype", "data", "backend", "world_size", "workload", "network")
"""Parameters that are the same for a figure on all devices of a host: what was measured, not how it went."""
OPTIONAL_PARAMS = frozenset({"algorithm", "protocol", "places", "moved_bytes", "transport"})
"""Parameters that only some measurements of a figure have."""
CREDIBLE_RATIO = 20.0
"""A rate is less than this many times that of like devices of the host; more is a wrong unit or a wrong counter. Times are not
compared: of two healthy GPUs, the faster one waits for the other, which itself hardly waits."""
RELATIVE = 1e-3
LEAST_FOR_PRECISION = 6
"""Samples that the 95 % interval of a median takes."""
LASTING_DEVICES = ("host", "gpu", "cpu")
"""Device kinds whose readings are in every snapshot."""

EVENT_LABELS = ("xid", "sxid", "event")
"""Labels of scopes that exist once the event has occurred."""
CONSTANT_READINGS = (
    "version", "kernel_version", "driver_version", "vbios_version", "serial", "model", "part_number", "checksum", "architecture",
    "compute_capability", "brand", "id",
)  # fmt: skip
"""Last parts of the names of readings of the host and its GPUs that are the same in every snapshot: text that names a part or its
software. A volume or an interface may be replaced by another of the same name."""

Problem = tuple[str, str, str, str]
"""Name, scope, reason, stage."""


def contradictions(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for every element of evidence that is missing or contradicts another."""
    for name, scope, reason, stage in _problems(view):
        yield view.inconclusive(name, scope, reason, stage, kind=VerdictKind.CONTRADICTORY)


def _problems(view: HostView) -> Iterator[Problem]:
    evidence = view.evidence
    for record in evidence.records:
        yield from incredible(view, record)
        yield from _launch_problems(view, record)
        yield from _time_problems(record)
        yield from _identity_problems(record)
        yield from _reading_problems(record)
        yield from _changed_readings(record)
        if record.soak is None:  # the figures of a soak are aggregates of its rounds
            yield from _figure_problems(view, record)
        yield from _software_problems(record)
    yield from _snapshot_problems(view)
    yield from _record_problems(evidence.records)


def _launch_problems(view: HostView, record: Record) -> Iterator[Problem]:
    # Times have a resolution of a second: two launches that differ may have begun in the same second.
    began = Counter(
        (launch.stage, launch.began, launch.number, launch.outcome, launch.members)
        for launch in record.launches
        if launch.ranks
    )
    for (stage, moment, *_), count in began.items():
        if count > 1:
            yield f"stage.{stage}", "host", f"{count} launches began at {moment}: the record has a launch twice", stage
    for launch in record.launches:
        for reason in _contradictions_of_launch(view, launch):
            yield f"stage.{launch.stage}", "host", reason, launch.stage


def _contradictions_of_launch(view: HostView, launch: Launch) -> Iterator[str]:
    stage = next((item for item in view.plan.stages if item.name == launch.stage), None)
    deadline_s = min(launch.deadline_s, stage.deadline_s) if stage else launch.deadline_s
    if launch.duration_s > deadline_s + DEADLINE_GRACE_S:
        yield f"the launch took {launch.duration_s:.0f} s, and its deadline was {deadline_s:.0f} s"
    if view.host.name not in launch.members:
        yield f"the launch was of {', '.join(launch.members)}, not of this host"
    if launch.stage in (BENCHMARK, SOAK) and launch.members != (view.host.name,):
        yield f"a launch of one host had the members {', '.join(launch.members)}"
    if launch.outcome != "finished" or launch.stage not in (BENCHMARK, SOAK, GANG):
        return
    planned = len(view.host.devices)
    if len(launch.ranks) != planned:
        yield f"the launch finished with {len(launch.ranks)} ranks, and the plan has {planned} devices"
    failed = [rank for rank in launch.ranks if rank.exit_code != 0]
    if failed:
        codes = ", ".join(f"rank {rank.rank} with {_code(rank.exit_code)}" for rank in failed[:3])
        yield f"the launch finished, and {len(failed)} of its ranks failed: {codes}"
    if sorted(rank.local_rank for rank in launch.ranks) != list(range(len(launch.ranks))):
        yield "the local ranks of the launch are not numbered from 0"
    ranks = sorted(rank.rank for rank in launch.ranks)
    if ranks and ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        yield "the ranks of the launch are not numbered in order"


def _code(exit_code: int | None) -> str:
    return "an unknown exit code" if exit_code is None else f"exit code {exit_code}"


def _time_problems(record: Record) -> Iterator[Problem]:
    moments = [("its beginning", record.began), ("its end", record.ended)]
    moments += [(f"the snapshot {item.phase} {item.stage}", item.at) for item in record.snapshots]
    moments += [(f"the launch of {item.stage}", item.began) for item in record.launches]
    times: dict[str, float] = {}
    for what, text in moments:
        try:
            times[what] = epoch_seconds(text)
        except ValueError:
            yield "record", "host", f"{what} has the time {text!r}, which is no time", ""
            return
    first, last = times["its beginning"] - CLOCK_TOLERANCE_S, times["its end"] + CLOCK_TOLERANCE_S
    outside = [what for what, moment in times.items() if not first <= moment <= last]
    if times["its end"] < times["its beginning"]:
        yield "record", "host", "the record ends before it begins: the clock of the host was set back", ""
    elif outside:
        yield "record", "host", f"the record covers {record.began} to {record.ended}, and {outside[0]} is outside", ""
    for launch in record.launches:
        if epoch_seconds(launch.began) + launch.duration_s > last:
            yield f"stage.{launch.stage}", "host", "the launch ends after the record", launch.stage


def _identity_problems(record: Record) -> Iterator[Problem]:
    for field in ("index", "pci_bus_id"):  # a serial or UUID that two GPUs share fails as a duplicate
        values = Counter(getattr(gpu, field) for gpu in record.gpus)
        for value, count in values.items():
            if count > 1 and value != "":
                yield f"gpu.{field}", "host", f"{count} GPUs of this host have {field} {value}", ""
    for name, field in IDENTITY_READINGS.items():
        read: dict[str, set[Value]] = defaultdict(set)
        for metric in (metric for snapshot in record.snapshots for metric in snapshot.metrics if metric.name == name):
            for scope, value in metric.values.items():
                read[scope].add(value)
        for gpu in record.gpus:
            scope, stated = f"gpu={gpu.index}", getattr(gpu, field)
            # A reading that changes is reported as a change of identity.
            if stated and len(read[scope]) == 1 and stated not in read[scope]:
                yield name, scope, f"every snapshot has {next(iter(read[scope]))}, and the record states {stated}", ""


def _reading_problems(record: Record) -> Iterator[Problem]:
    """Every full snapshot of a record has the same readings, each in the same scopes."""
    # A collector that failed takes its readings with it. That has a verdict of its own, which names the collector.
    snapshots = [snapshot for snapshot in record.snapshots if not _has_failed_collector(snapshot)]
    full = [snapshot for snapshot in snapshots if snapshot.phase in FULL_PHASES]
    if not full:
        return
    scopes: dict[str, set[str]] = {}
    for snapshot in full:
        for metric in snapshot.metrics:
            known = scopes.setdefault(metric.name, set())
            known.update(metric.values)
            known.update(metric.absent)
    for snapshot in full:
        yield from _missing_readings(snapshot, scopes)
    during = [snapshot for snapshot in snapshots if snapshot.phase not in FULL_PHASES]
    fast = {metric.name for snapshot in during for metric in snapshot.metrics}
    for snapshot in during:
        for name in sorted(fast - {metric.name for metric in snapshot.metrics})[:3]:
            yield name, "host", f"not read {snapshot.phase} {snapshot.stage}, and in other snapshots", snapshot.stage
    for name in sorted(fast - scopes.keys())[:3]:
        yield name, "host", "read only during a launch", ""


def _changed_readings(record: Record) -> Iterator[Problem]:
    """A text that names a part or its software is the same in every snapshot of a record."""
    first: dict[tuple[str, str], Value] = {}
    for snapshot in record.snapshots:
        for metric in snapshot.metrics:
            if metric.name in IDENTITY_READINGS or metric.name.rpartition(".")[2] not in CONSTANT_READINGS:
                continue
            for scope, value in metric.values.items():
                is_lasting = Scope.parse(scope).device_kind in LASTING_DEVICES
                if is_lasting and first.setdefault((metric.name, scope), value) != value:
                    reason = f"changed during the run: {first[metric.name, scope]}, then {value}"
                    yield metric.name, scope, reason, snapshot.stage


def _has_failed_collector(snapshot: Snapshot) -> bool:
    return any(metric.name.startswith(COLLECTOR) and metric.absent for metric in snapshot.metrics)


def _missing_readings(snapshot: Snapshot, scopes: Mapping[str, set[str]]) -> Iterator[Problem]:
    when = f"not read {snapshot.phase} {snapshot.stage}, and in other snapshots of the record"
    here = {metric.name: metric for metric in snapshot.metrics}
    present = {scope for metric in snapshot.metrics for scope in (*metric.values, *metric.absent)}
    for name, known in scopes.items():
        metric = here.get(name)
        read = {*metric.values, *metric.absent} if metric else set()
        missing = sorted(scope for scope in known - read if _is_there(name, scope, present))
        if missing and metric is None:
            yield name, "host", when, snapshot.stage
        else:
            for scope in missing:
                yield name, scope, when, snapshot.stage


def _is_there(name: str, scope: str, present: set[str]) -> bool:
    """Return whether the part of that scope was there when the snapshot was taken.

    A remote volume or a virtual interface may go and come by design, with all its readings; an error code appears with the error.
    """
    if Scope.parse(scope).kind in EVENT_LABELS:
        return False
    return scope in present or Scope.parse(scope).device_kind in LASTING_DEVICES


def _figure_problems(view: HostView, record: Record) -> Iterator[Problem]:
    launches = Counter(launch.stage for launch in record.launches)
    planned = Planned(view.plan)
    settings: dict[tuple[str, ...], tuple[str, ...]] = {}
    required: dict[tuple[str, str], frozenset[str]] = {}
    figures: dict[tuple[object, ...], list[Observation]] = {}
    seen: dict[tuple[object, ...], int] = {}
    sampled: dict[tuple[str, str], bool] = {}
    for item in record.observations:
        if item.status != MEASURED or item.name == DURATION.name:
            continue
        kind, params = (item.stage, item.name), item.params
        shared = settings.get((*kind, *params))
        if shared is None:  # the first figure with these parameters
            names = frozenset(params.keys() - OPTIONAL_PARAMS)
            shared = settings[(*kind, *params)] = tuple(planned.params(item))
            if required.setdefault(kind, names) != names:
                difference = ", ".join(sorted(required[kind] ^ names))
                yield item.name, item.scope, f"only some of these figures have the parameter {difference}", item.stage
        if sampled.setdefault(kind, item.samples is not None) != (item.samples is not None):
            yield item.name, item.scope, "only some of these figures have samples", item.stage
        key = (*kind, item.scope, *params.values())
        count = seen[key] = seen.get(key, 0) + 1
        if count > max(1, launches[item.stage]):
            yield item.name, item.scope, f"the record has this figure {count} times", item.stage
        if item.scope != "host":
            group = (*kind, Scope.parse(item.scope).device_kind, *[params[name] for name in shared])
            figures.setdefault(group, []).append(item)
        if item.samples is not None:
            yield from _sample_problems(item)
    for items in figures.values():
        if len(items) > 1:
            yield from _sibling_problems(items)
    yield from _participant_problems(view, record)


def _sample_problems(item: Observation) -> Iterator[Problem]:
    samples, value = item.samples, item.value
    if samples is None or type(value) not in (int, float):
        return
    margin = RELATIVE * max(abs(samples.min), abs(samples.max))
    reason = ""
    if not samples.min - margin <= samples.p50 <= samples.max + margin:
        reason = f"the median {samples.p50:g} is not between {samples.min:g} and {samples.max:g}"
    elif not samples.min - margin <= float(value) <= samples.max + margin:  # type: ignore[arg-type]
        reason = f"the value {value:g} is not between {samples.min:g} and {samples.max:g}"
    elif samples.n < 1 or (samples.precision is not None and samples.n < LEAST_FOR_PRECISION):
        reason = f"it has {samples.n} samples"
    elif samples.min < 0:
        reason = f"a sample is negative: {samples.min:g}"
    elif samples.min > 0 and not _possible_variation(samples):
        reason = f"{samples.n} samples cannot vary by {samples.cv:g} between {samples.min:g} and {samples.max:g}"
    if reason:
        yield item.name, item.scope, reason, item.stage


def _possible_variation(samples: Samples) -> bool:
    """Return whether samples between the extremes can have this coefficient of variation.

    With the extremes among n samples, the standard deviation is at least range / sqrt(2 n), and never more than the range. The
    mean lies between the extremes.
    """
    spread = samples.max - samples.min
    least = spread / math.sqrt(2 * samples.n) / samples.max
    return least * (1 - RELATIVE) - RELATIVE <= samples.cv <= spread / samples.min + RELATIVE


def _sibling_problems(items: Sequence[Observation]) -> Iterator[Problem]:
    """The same figure of several devices of a host: the same settings, and values of one order of magnitude."""
    first = items[0]
    for item in items[1:]:
        different = [
            key
            for key in EQUAL_PARAMS
            if key in first.params and key in item.params and item.params[key] != first.params[key]
        ]
        if different:
            key = different[0]
            reason = f"{key} is {item.params[key]}, and {first.params[key]} at {first.scope}"
            yield item.name, item.scope, reason, item.stage
    values = sorted(float(item.value) for item in items if isinstance(item.value, int | float) and item.value)
    if first.unit in RATE_UNITS and len(values) > 1 and values[0] > 0:
        median = values[(len(values) - 1) // 2]
        for item in items:
            if isinstance(item.value, int | float) and item.value > CREDIBLE_RATIO * median:
                reason = f"{item.value:g} {item.unit} is not credible: the other devices have {median:g}"
                yield item.name, item.scope, reason, item.stage


def _participant_problems(view: HostView, record: Record) -> Iterator[Problem]:
    """A figure of several ranks was made by all ranks of a launch."""
    sizes: dict[str, set[int]] = defaultdict(set)
    for launch in record.launches:
        members = launch.members if launch.stage == GANG else (view.host.name,)
        sizes[launch.stage].add(view.plan.ranks(members))
    reported: set[tuple[str, Value]] = set()
    for item in record.observations:
        size = item.params.get("world_size")
        # Figures without a launch have a verdict of their own.
        if size is None or item.stage not in sizes or size in sizes[item.stage] or (item.stage, size) in reported:
            continue
        reported.add((item.stage, size))
        expected = " or ".join(map(str, sorted(sizes[item.stage]))) or "no"
        yield item.name, item.scope, f"measured by {size} ranks, and the launch had {expected}", item.stage


def _software_problems(record: Record) -> Iterator[Problem]:
    if any(launch.outcome == "finished" for launch in record.launches) and not record.software.get("torch"):
        yield "launch.torch", "host", "the launch finished, and the ranks reported no version of torch", ""


def _snapshot_problems(view: HostView) -> Iterator[Problem]:
    """The host was read at the beginning, and before and after each launch: a change without its first reading is unknown."""
    phases = Counter((item.stage, item.phase) for item in view.evidence.snapshots())
    alone = [record for record in view.evidence.records if not record.gang]
    if (PREFLIGHT, "before") not in phases and any(record.launches for record in alone):
        yield f"stage.{PREFLIGHT}", "host", "the record has no snapshot of the beginning of the run", PREFLIGHT
    finished = {launch.stage for launch in view.evidence.launches() if launch.outcome == "finished"}
    for stage in view.plan.stages:
        if stage.name not in finished or stage.name not in (BENCHMARK, GANG):
            continue
        for phase in FULL_PHASES:
            if (stage.name, phase) not in phases:
                reason = f"the record has no snapshot {phase} the launch"
                yield f"stage.{stage.name}", "host", reason, stage.name
    moments = Counter((item.stage, item.phase, item.at) for item in view.evidence.snapshots())
    for (name, phase, at), count in moments.items():
        if count > 1:
            yield f"stage.{name}", "host", f"the record has {count} snapshots {phase} the stage at {at}", name


def _record_problems(records: Sequence[Record]) -> Iterator[Problem]:
    """The records of one host were made by one agent, with the same software."""
    versions = {record.rackproof for record in records}
    if len(versions) > 1:
        yield "record", "host", f"its records are of Rackproof {' and '.join(sorted(versions))}", ""
    software: dict[str, str] = {}
    for record in records:
        for name, version in record.software.items():
            if software.setdefault(name, version) != version:
                reason = f"its records have the versions {software[name]} and {version}"
                yield f"launch.{name}", "host", reason, ""
