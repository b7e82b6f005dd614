"""Build the data on one failed part from the records and the report of a run: part.json (schemas/part.schema.json)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.judge.change import change
from fleet.judge.evidence import Evidence, Planned
from fleet.quantities import finite
from fleet.report.formatting import clean, clean_log, is_change
from fleet.rma.parts import GPU, HOST, FailedPart, is_within, read_identifiers
from fleet.rma.reproduce import reproduce_commands
from schemas.plans import Plan, PlannedHost
from schemas.readings import READINGS
from schemas.records import MEASURED, Launch, Observation, Value
from schemas.reports import Cause, Verdict
from schemas.scopes import Scope, pci_address

PART_SCHEMA = "rackproof.part/1"
MAX_SIBLINGS, MAX_LOGS = 64, 20
"""Maximum number of values of siblings (other parts) in a finding, and maximum number of log excerpts. The last logs are kept."""
_ERROR_PREFIXES = ("xid.", "sxid.", "kernel.event.count")


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """The data of the report that part.json contains."""

    decision: str
    mark: str
    """`REHEARSAL`, `SIMULATED` or empty (`FleetReport.mark`)."""
    ended: str
    rackproof: str
    """Version of Rackproof."""
    racks: Mapping[str, str]
    """Host -> rack."""
    software: Mapping[str, Mapping[str, str]]
    """Host -> component -> version. A component that belongs to one part of the host has the key `NAME[SCOPE]`."""
    events: Mapping[str, Sequence[str]]
    """Host -> what the playbooks reported about it (`HostReport.events`)."""


def part_document(part: FailedPart, plan: Plan, facts: ReportFacts, evidence: Evidence) -> dict[str, Any]:
    """Return part.json of one part, as an object.

    Args:
        part: the part and its findings.
        plan: plan of the run.
        facts: data of the report.
        evidence: records of the host of the part.
    """
    observations = evidence.observations()
    identifiers, unread = read_identifiers(part, observations)
    gpu = next((item for item in evidence.gpus() if f"gpu={item.index}" == part.scope), None)
    if gpu:
        from_record = {"serial": gpu.serial, "uuid": gpu.uuid, "model": gpu.name, "pci_address": gpu.pci_bus_id}
        identifiers = {key: text for key, text in from_record.items() if text} | identifiers
        unread = {key: reason for key, reason in unread.items() if key not in identifiers}
    planned = next((host for host in plan.hosts if host.name == part.host), None)
    siblings = _SiblingFigures(part, Planned(plan), evidence)
    document: dict[str, Any] = {
        "schema": PART_SCHEMA,
        "mark": facts.mark,
        "run": {
            "run_id": plan.run_id,
            "profile": plan.profile,
            "began": plan.created,
            "ended": facts.ended,
            "decision": facts.decision,
            "rackproof": facts.rackproof,
        },
        "part": {"kind": part.kind, **identifiers, **({"not_read": unread} if unread else {})},
        "slot": _slot(part, facts, identifiers, planned),
        "action": part.action,
        "causes": [_cause(cause) for cause in part.causes],
        "findings": [_finding(item, siblings) for item in part.findings],
        "open": [_finding(item, siblings) for item in part.open],
        "counters": _counters(observations, part.scope),
        "errors": _errors(observations, part),
        "logs": _logs(evidence.launches(), part, planned),
        "events": list(facts.events.get(part.host, ())),
        "versions": _versions(facts.software.get(part.host, {}), part.scope),
        "again": reproduce_commands(part, identifiers, planned, plan),
    }
    if problem := _kernel_log_problem(observations):
        document["errors_not_read"] = problem
    sanitized: dict[str, Any] = sanitize(document)
    return sanitized


def sanitize(value: Any) -> Any:
    """Return a value with all its texts cleaned of control characters. Texts of several lines keep their line breaks."""
    if isinstance(value, Mapping):
        return {clean(key): sanitize(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [sanitize(item) for item in value]
    if isinstance(value, str):
        return clean_log(value) if "\n" in value else clean(value, 2000)
    return value


def _slot(
    part: FailedPart, facts: ReportFacts, identifiers: Mapping[str, str], planned: PlannedHost | None
) -> dict[str, str]:
    slot = {
        "host": part.host,
        "rack": facts.racks.get(part.host, ""),
        "address": planned.address if planned else "",
        "place": part.scope,
        "pci_address": pci_address(address) if (address := identifiers.get("pci_address")) else "",
        "nvml_index": Scope.parse(part.scope).get(GPU),
        "module_id": identifiers.get("module_id", ""),
    }
    return {key: text for key, text in slot.items() if text}


def _cause(cause: Cause) -> dict[str, str]:
    texts = {"title": cause.title, "why": cause.why, "action": cause.action, "confidence": cause.confidence}
    return {**texts, "waiver": str(cause.waiver)} if cause.waiver else texts


def _finding(verdict: Verdict, siblings: _SiblingFigures) -> dict[str, Any]:
    values_of_siblings = siblings.values(verdict)
    numbers = sorted(number for item in values_of_siblings if (number := finite(item["value"])) is not None)
    finding: dict[str, Any] = {
        "verdict": verdict.verdict,
        "severity": verdict.severity,
        "criterion": verdict.criterion,
        "name": verdict.name,
        "scope": verdict.scope,
        "stage": verdict.stage,
        "params": dict(verdict.params),
        "value": verdict.value,
        "limit": verdict.limit,
        "operator": verdict.operator,
        "unit": verdict.unit,
        "reason": verdict.reason,
        "detail": verdict.detail,
        "action": verdict.action,
        "source": verdict.source,
        "basis": verdict.basis,
        "waiver": str(verdict.waiver) if verdict.waiver else "",
        "siblings": values_of_siblings[:MAX_SIBLINGS],
    }
    if numbers:
        median = statistics.median(numbers)
        finding["siblings_summary"] = {"n": len(numbers), "min": numbers[0], "median": median, "max": numbers[-1]}
    return {key: value for key, value in finding.items() if value not in ("", {}, [])}


class _SiblingFigures:
    """The measured observations of the siblings of a part: the other parts of the same kind in its host."""

    def __init__(self, part: FailedPart, planned: Planned, evidence: Evidence) -> None:
        self._planned = planned
        self._serials = {f"gpu={gpu.index}": gpu.serial for gpu in evidence.gpus()}
        self._observations: dict[str, list[Observation]] = {}
        index = Scope.parse(part.scope).index
        for item in evidence.observations():
            scope = Scope.parse(item.scope)
            is_other_part = scope.part != part.scope and scope.get("peer") != str(index)
            if item.status == MEASURED and is_other_part and scope.device_kind == part.kind != HOST:
                self._observations.setdefault(item.name, []).append(item)

    def values(self, verdict: Verdict) -> list[dict[str, Value]]:
        """Return the values of the siblings for the figure that `verdict` judges.

        If `verdict` judges the increase of a counter, return increases.
        """
        judged_scope = Scope.parse(verdict.scope)
        matching = [
            item
            for item in self._observations.get(verdict.name, ())
            if Scope.parse(item.scope).below_part == judged_scope.below_part or judged_scope.kind == "peer"
        ]
        value_by_scope: dict[str, Value]
        if is_change(verdict):
            increases = {scope: _increase(matching, scope) for scope in dict.fromkeys(item.scope for item in matching)}
            value_by_scope = {scope: increase for scope, increase in increases.items() if increase is not None}
        else:
            params = self._planned.params(verdict)
            value_by_scope = {
                item.scope: item.value
                for item in matching
                if item.stage == verdict.stage and self._planned.params(item) == params
            }
        return [
            {"scope": scope, "serial": self._serials.get(Scope.parse(scope).part, ""), "value": value}
            for scope, value in value_by_scope.items()
        ]


def _increase(observations: Iterable[Observation], scope: str) -> float | None:
    """Return by how much a counter rose at `scope`. `observations` are the readings of the counter at several scopes.

    A reset of the counter is treated as in verdicts (`fleet/judge/change.py`). Return 0 for a single reading. Return None without
    a reading, or if a reading is not a number.
    """
    readings = [item for item in observations if item.scope == scope]
    if not readings or any(finite(item.value) is None for item in readings):
        return None
    return finite(change(readings).total) if len(readings) > 1 else 0.0


def _counters(observations: Iterable[Observation], part_scope: str) -> list[dict[str, Any]]:
    """Return first value, last value and increase of each counter of the part, and how often and why it was not read."""
    series: dict[tuple[str, str], list[Observation]] = {}
    for item in observations:
        reading = READINGS.get(item.name)
        if reading and reading.counter and is_within(item.scope, part_scope):
            series.setdefault((item.name, item.scope), []).append(item)
    counters = []
    for (name, scope), items in series.items():
        measured = [item for item in items if item.status == MEASURED]
        counter: dict[str, Any] = {"name": name, "scope": scope, "unit": items[0].unit}
        if measured:
            counter |= {"before": measured[0].value, "after": measured[-1].value, "rose_by": _increase(measured, scope)}
        unread = [item for item in items if item.status != MEASURED]
        if unread:
            counter["not_read"] = f"{len(unread)} of {len(items)} times, {unread[-1].status}: {unread[-1].reason}"
        counters.append(counter)
    return counters


def _errors(observations: Iterable[Observation], part: FailedPart) -> list[dict[str, Any]]:
    """Return the XIDs, SXids and counted events (`kernel.event.count`) in the kernel log that name the part.

    If the part is the host, return those of all parts of the host.
    """
    errors: dict[tuple[str, str], dict[str, Any]] = {}
    for item in observations:
        is_relevant = part.kind == HOST or is_within(item.scope, part.scope)
        if is_relevant and item.status == MEASURED and item.name.startswith(_ERROR_PREFIXES) and item.scope != HOST:
            errors[item.name, item.scope] = {"name": item.name, "scope": item.scope, "count": item.value}
    return list(errors.values())


def _kernel_log_problem(observations: Iterable[Observation]) -> str:
    """Return why a reading of the kernel log is missing; empty if every reading succeeded.

    If a reading is missing, there may be errors that the record does not have.
    """
    readings = [item for item in observations if item.name == "xid.last_seen"]
    if not readings:
        return "not observed"
    unread = next((item for item in readings if item.status != MEASURED), None)
    return f"{unread.status}: {unread.reason}" if unread else ""


def _logs(launches: Iterable[Launch], part: FailedPart, planned: PlannedHost | None) -> list[dict[str, Any]]:
    """Return the last lines of logs: those of each rank that used the part, and those of each failed launch.

    If the part is the host, every rank of the host used it.
    """
    local_ranks = _local_ranks(part, planned)
    logs = []
    for launch in launches:
        for rank in launch.ranks:
            if (rank.local_rank in local_ranks or part.kind == HOST) and rank.log_tail.strip():
                code = "no exit code" if rank.exit_code is None else f"exit code {rank.exit_code}"
                title = f"stage {launch.stage}, rank {rank.rank} ({code}, at {rank.phase or 'its start'})"
                logs.append({"what": title, "text": rank.log_tail})
        if not launch.succeeded:
            culprit = f"; culprit: {launch.culprit.text}" if launch.culprit else ""
            title = f"stage {launch.stage}: {launch.outcome}: {launch.reason}{culprit}"
            logs.append({"what": title, "text": launch.log_tail})
    return logs[-MAX_LOGS:]


def _local_ranks(part: FailedPart, planned: PlannedHost | None) -> list[int]:
    """Return the local ranks that use the part: local rank N uses the device at position N in the plan."""
    return [number for number, scope in enumerate(planned.scopes) if scope == part.scope] if planned else []


def _versions(software: Mapping[str, str], part_scope: str) -> dict[str, str]:
    """Return component -> version, for the components of the whole host and of this part.

    If the part is the host, also return the components of all its parts.
    """
    versions = {}
    for key, text in software.items():
        name, bracket, scope = key.removesuffix("]").partition("[")
        if not bracket or Scope.parse(scope).part == part_scope or part_scope == HOST:
            versions[name if bracket and scope == part_scope else key] = text
    return versions
