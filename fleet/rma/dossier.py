"""Build the document on one failed part (schemas/part.schema.json) from the records and the report of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.judge.evidence import Evidence, Planned
from fleet.quantities import finite
from fleet.report.formatting import clean, clean_log, is_change
from fleet.rma.parts import GPU, HOST, Part, identity, within
from fleet.rma.reproduce import reproduce_commands
from schemas.plans import Plan, PlannedHost
from schemas.readings import READINGS
from schemas.records import MEASURED, Launch, Observation, Value
from schemas.reports import Verdict
from schemas.scopes import Scope

PART_SCHEMA = "rackproof.part/1"
MOST_SIBLINGS, MOST_LOGS = 64, 20
_ERRORS = ("xid.", "sxid.")


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """The facts of the report that a package repeats."""

    decision: str
    mark: str
    ended: str
    rackproof: str
    racks: Mapping[str, str]
    software: Mapping[str, Mapping[str, str]]
    """Host -> component -> version."""
    events: Mapping[str, Sequence[str]]


def dossier(part: Part, plan: Plan, facts: ReportFacts, evidence: Evidence) -> dict[str, Any]:
    """Return the document on one part.

    Args:
        part: the part and its findings.
        plan: the run's plan.
        facts: from the report.
        evidence: evidence of the part's host.
    """
    observations = evidence.observations()
    own, unread = identity(part, observations)
    gpu = next((item for item in evidence.gpus() if f"gpu={item.index}" == part.place), None)
    if gpu:
        named = {"serial": gpu.serial, "uuid": gpu.uuid, "model": gpu.name, "pci_address": gpu.pci_bus_id}
        own = {key: text for key, text in named.items() if text} | own
        unread = {key: why for key, why in unread.items() if key not in own}
    planned = next((host for host in plan.hosts if host.name == part.host), None)
    siblings = _Siblings(part, Planned(plan), evidence)
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
        "part": {"kind": part.kind, **own, **({"not_read": unread} if unread else {})},
        "slot": _slot(part, facts, own, planned),
        "action": part.action,
        "findings": [_finding(item, siblings) for item in part.findings],
        "open": [_finding(item, siblings) for item in part.open],
        "counters": _counters(observations, part.place),
        "errors": _errors(observations, part),
        "logs": _logs(evidence.launches(), part, planned),
        "events": list(facts.events.get(part.host, ())),
        "versions": _versions(facts.software.get(part.host, {}), part.place),
        "again": reproduce_commands(part, own, planned, plan),
    }
    if why := _log_unread(observations):
        document["errors_not_read"] = why
    entries: dict[str, Any] = harmless(document)
    return entries


def harmless(value: Any) -> Any:
    """Return the document without control sequences; logs keep their lines."""
    if isinstance(value, Mapping):
        return {clean(key): harmless(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [harmless(item) for item in value]
    if isinstance(value, str):
        return clean_log(value) if "\n" in value else clean(value, 2000)
    return value


def _slot(part: Part, facts: ReportFacts, own: Mapping[str, str], planned: PlannedHost | None) -> dict[str, str]:
    document = {
        "host": part.host,
        "rack": facts.racks.get(part.host, ""),
        "address": planned.address if planned else "",
        "place": part.place,
        "pci_address": own.get("pci_address", ""),
        "nvml_index": Scope.parse(part.place).get(GPU),
        "module_id": own.get("module_id", ""),
    }
    return {key: text for key, text in document.items() if text}


def _finding(verdict: Verdict, siblings: _Siblings) -> dict[str, Any]:
    of_others = siblings.values(verdict)
    numbers = sorted(number for item in of_others if (number := finite(item["value"])) is not None)
    document: dict[str, Any] = {
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
        "siblings": of_others[:MOST_SIBLINGS],
    }
    if numbers:
        middle = len(numbers) // 2
        median = numbers[middle] if len(numbers) % 2 else (numbers[middle - 1] + numbers[middle]) / 2
        document["siblings_summary"] = {"n": len(numbers), "min": numbers[0], "median": median, "max": numbers[-1]}
    return {key: item for key, item in document.items() if item not in ("", {}, [])}


class _Siblings:
    """The same figure on the other parts of this kind in the host."""

    def __init__(self, part: Part, planned: Planned, evidence: Evidence) -> None:
        self._part, self._planned = part, planned
        self._serials = {f"gpu={gpu.index}": gpu.serial for gpu in evidence.gpus()}
        self._observations: dict[str, list[Observation]] = {}
        index = Scope.parse(part.place).index
        for item in evidence.observations():
            scope = Scope.parse(item.scope)
            alone = scope.part != part.place and scope.get("peer") != str(index)
            if item.status == MEASURED and alone and scope.device_kind == part.kind != HOST:
                self._observations.setdefault(item.name, []).append(item)

    def values(self, verdict: Verdict) -> list[dict[str, Value]]:
        """Return the value on each sibling; for a counter its increase."""
        judged = Scope.parse(verdict.scope)
        like = [
            item
            for item in self._observations.get(verdict.name, ())
            if Scope.parse(item.scope).below_part == judged.below_part or judged.kind == "peer"
        ]
        document: dict[str, Value]
        if is_change(verdict):
            rises = {scope: _rise(like, scope) for scope in dict.fromkeys(item.scope for item in like)}
            document = {scope: rise for scope, rise in rises.items() if rise is not None}
        else:
            wanted = self._planned.params(verdict)
            document = {
                item.scope: item.value
                for item in like
                if item.stage == verdict.stage and self._planned.params(item) == wanted
            }
        return [
            {"scope": scope, "serial": self._serials.get(Scope.parse(scope).part, ""), "value": value}
            for scope, value in document.items()
        ]


def _rise(observations: Iterable[Observation], scope: str) -> float | None:
    numbers = [finite(item.value) for item in observations if item.scope == scope]
    first, last = (numbers[0], numbers[-1]) if numbers else (None, None)
    return last - first if first is not None and last is not None else None


def _counters(observations: Iterable[Observation], slot_name: str) -> list[dict[str, Any]]:
    """Return the first and last reading and the increase of each counter, or why it could not be read."""
    series: dict[tuple[str, str], list[Observation]] = {}
    for item in observations:
        reading = READINGS.get(item.name)
        if reading and reading.counter and within(item.scope, slot_name):
            series.setdefault((item.name, item.scope), []).append(item)
    document = []
    for (name, scope), items in series.items():
        known = [item for item in items if item.status == MEASURED]
        facts: dict[str, Any] = {"name": name, "scope": scope, "unit": items[0].unit}
        if known:
            facts |= {"before": known[0].value, "after": known[-1].value, "rose_by": _rise(known, scope)}
        lost = [item for item in items if item.status != MEASURED]
        if lost:
            facts["not_read"] = f"{len(lost)} of {len(items)} times, {lost[-1].status}: {lost[-1].reason}"
        document.append(facts)
    return document


def _errors(observations: Iterable[Observation], part: Part) -> list[dict[str, Any]]:
    """Return XIDs and SXids of the part in the kernel log; for a host all of them."""
    document: dict[tuple[str, str], dict[str, Any]] = {}
    for item in observations:
        near = part.kind == HOST or within(item.scope, part.place)
        if near and item.status == MEASURED and item.name.startswith(_ERRORS) and item.scope != HOST:
            document[item.name, item.scope] = {"name": item.name, "scope": item.scope, "count": item.value}
    return list(document.values())


def _log_unread(observations: Iterable[Observation]) -> str:
    """Return why the kernel log was not read, so that the absence of errors proves nothing; empty if it was read."""
    looks = [item for item in observations if item.name == "xid.last_seen"]
    lost = next((item for item in looks if item.status != MEASURED), None)
    return "not observed" if not looks else f"{lost.status}: {lost.reason}" if lost else ""


def _logs(launches: Iterable[Launch], part: Part, planned: PlannedHost | None) -> list[dict[str, Any]]:
    """Return the log ends of the part's ranks, and of launches that failed."""
    ours = _local_ranks(part, planned)
    document = []
    for launch in launches:
        for rank in launch.ranks:
            if (rank.local_rank in ours or part.kind == HOST) and rank.log_tail.strip():
                who = f"stage {launch.stage}, rank {rank.rank} (exit {rank.exit_code}, at {rank.phase or 'its start'})"
                document.append({"what": who, "text": rank.log_tail})
        if not launch.good:
            named = f"; culprit: {launch.culprit.text}" if launch.culprit else ""
            facts = f"stage {launch.stage}: {launch.outcome}: {launch.reason}{named}"
            document.append({"what": facts, "text": launch.log_tail})
    return document[-MOST_LOGS:]


def _local_ranks(part: Part, planned: PlannedHost | None) -> list[int]:
    """Return the local ranks on the part: one rank per device, in the order of the plan."""
    return [number for number, scope in enumerate(planned.scopes) if scope == part.place] if planned else []


def _versions(software: Mapping[str, str], slot_name: str) -> dict[str, str]:
    """Return the versions of the host and of this part, without those of its siblings."""
    document = {}
    for key, text in software.items():
        name, bracket, scope = key.removesuffix("]").partition("[")
        if not bracket or Scope.parse(scope).part == slot_name or slot_name == HOST:
            document[name if bracket and scope == slot_name else key] = text
    return document
