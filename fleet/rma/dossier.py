"""Everything that a run tells of one failed part, as a document: what schemas/part.schema.json says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.judge.evidence import Evidence, Planned
from fleet.quantities import finite
from fleet.report.format import clean, clean_log, is_change
from fleet.rma.parts import GPU, HOST, Part, identity, within
from fleet.rma.reproduce import again
from schemas.plans import Plan, PlannedHost
from schemas.readings import READINGS
from schemas.records import MEASURED, Launch, Observation, Value
from schemas.reports import Verdict
from schemas.scopes import Scope

PART_SCHEMA = "rackproof.part/1"
MOST_SIBLINGS, MOST_LOGS = 64, 20
_ERRORS = ("xid.", "sxid.")


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the report says that a package repeats."""

    decision: str
    mark: str
    ended: str
    rackproof: str
    racks: Mapping[str, str]
    software: Mapping[str, Mapping[str, str]]
    """Host -> component -> version."""
    events: Mapping[str, Sequence[str]]


def dossier(part: Part, plan: Plan, told: Told, left: Evidence) -> dict[str, Any]:
    """The document on one part.

    Args:
        part: which, and what was found of it.
        plan: what had to be observed, and of which device each rank was.
        told: what the report says of the run and of its hosts.
        left: what the part's host left behind.
    """
    seen = left.observations()
    own, unread = identity(part, seen)
    gpu = next((item for item in left.gpus() if f"gpu={item.index}" == part.place), None)
    if gpu:
        named = {"serial": gpu.serial, "uuid": gpu.uuid, "model": gpu.name, "pci_address": gpu.pci_bus_id}
        own = {key: text for key, text in named.items() if text} | own
        unread = {key: why for key, why in unread.items() if key not in own}
    planned = next((host for host in plan.hosts if host.name == part.host), None)
    siblings = _Siblings(part, Planned(plan), left)
    document: dict[str, Any] = {
        "schema": PART_SCHEMA,
        "mark": told.mark,
        "run": {
            "run_id": plan.run_id,
            "profile": plan.profile,
            "began": plan.created,
            "ended": told.ended,
            "decision": told.decision,
            "rackproof": told.rackproof,
        },
        "part": {"kind": part.kind, **own, **({"not_read": unread} if unread else {})},
        "slot": _slot(part, told, own, planned),
        "action": part.action,
        "findings": [_finding(item, siblings) for item in part.findings],
        "open": [_finding(item, siblings) for item in part.open],
        "counters": _counters(seen, part.place),
        "errors": _errors(seen, part),
        "logs": _logs(left.launches(), part, planned),
        "events": list(told.events.get(part.host, ())),
        "versions": _versions(told.software.get(part.host, {}), part.place),
        "again": again(part, own, planned, plan),
    }
    if why := _log_unread(seen):
        document["errors_not_read"] = why
    found: dict[str, Any] = harmless(document)
    return found


def harmless(value: Any) -> Any:
    """The document without anything that steers a terminal; logs keep their lines."""
    if isinstance(value, Mapping):
        return {clean(key): harmless(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [harmless(item) for item in value]
    if isinstance(value, str):
        return clean_log(value) if "\n" in value else clean(value, 2000)
    return value


def _slot(part: Part, told: Told, own: Mapping[str, str], planned: PlannedHost | None) -> dict[str, str]:
    found = {
        "host": part.host,
        "rack": told.racks.get(part.host, ""),
        "address": planned.address if planned else "",
        "place": part.place,
        "pci_address": own.get("pci_address", ""),
        "nvml_index": Scope.parse(part.place).get(GPU),
        "module_id": own.get("module_id", ""),
    }
    return {key: text for key, text in found.items() if text}


def _finding(verdict: Verdict, siblings: _Siblings) -> dict[str, Any]:
    of_others = siblings.values(verdict)
    numbers = sorted(number for item in of_others if (number := finite(item["value"])) is not None)
    found: dict[str, Any] = {
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
        found["siblings_summary"] = {"n": len(numbers), "min": numbers[0], "median": median, "max": numbers[-1]}
    return {key: item for key, item in found.items() if item not in ("", {}, [])}


class _Siblings:
    """The same figure of the host's other parts of the kind."""

    def __init__(self, part: Part, planned: Planned, left: Evidence) -> None:
        self._part, self._planned = part, planned
        self._serials = {f"gpu={gpu.index}": gpu.serial for gpu in left.gpus()}
        self._seen: dict[str, list[Observation]] = {}
        index = Scope.parse(part.place).index
        for item in left.observations():
            scope = Scope.parse(item.scope)
            alone = scope.part != part.place and scope.get("peer") != str(index)
            if item.status == MEASURED and alone and scope.device_kind == part.kind != HOST:
                self._seen.setdefault(item.name, []).append(item)

    def values(self, verdict: Verdict) -> list[dict[str, Value]]:
        """Of each sibling its value; of a counter what it rose by."""
        judged = Scope.parse(verdict.scope)
        like = [
            item
            for item in self._seen.get(verdict.name, ())
            if Scope.parse(item.scope).below_part == judged.below_part or judged.kind == "peer"
        ]
        found: dict[str, Value]
        if is_change(verdict):
            rises = {scope: _rise(like, scope) for scope in dict.fromkeys(item.scope for item in like)}
            found = {scope: rise for scope, rise in rises.items() if rise is not None}
        else:
            wanted = self._planned.params(verdict)
            found = {
                item.scope: item.value
                for item in like
                if item.stage == verdict.stage and self._planned.params(item) == wanted
            }
        return [
            {"scope": scope, "serial": self._serials.get(Scope.parse(scope).part, ""), "value": value}
            for scope, value in found.items()
        ]


def _rise(seen: Iterable[Observation], scope: str) -> float | None:
    numbers = [finite(item.value) for item in seen if item.scope == scope]
    first, last = (numbers[0], numbers[-1]) if numbers else (None, None)
    return last - first if first is not None and last is not None else None


def _counters(seen: Iterable[Observation], place: str) -> list[dict[str, Any]]:
    """Each counter of the part: its first reading, its last, and what it rose by; or why it could not be read."""
    series: dict[tuple[str, str], list[Observation]] = {}
    for item in seen:
        reading = READINGS.get(item.name)
        if reading and reading.counter and within(item.scope, place):
            series.setdefault((item.name, item.scope), []).append(item)
    found = []
    for (name, scope), items in series.items():
        known = [item for item in items if item.status == MEASURED]
        told: dict[str, Any] = {"name": name, "scope": scope, "unit": items[0].unit}
        if known:
            told |= {"before": known[0].value, "after": known[-1].value, "rose_by": _rise(known, scope)}
        lost = [item for item in items if item.status != MEASURED]
        if lost:
            told["not_read"] = f"{len(lost)} of {len(items)} times, {lost[-1].status}: {lost[-1].reason}"
        found.append(told)
    return found


def _errors(seen: Iterable[Observation], part: Part) -> list[dict[str, Any]]:
    """XIDs and SXids in the kernel's log, by the part; of a host all of them."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for item in seen:
        near = part.kind == HOST or within(item.scope, part.place)
        if near and item.status == MEASURED and item.name.startswith(_ERRORS) and item.scope != HOST:
            found[item.name, item.scope] = {"name": item.name, "scope": item.scope, "count": item.value}
    return list(found.values())


def _log_unread(seen: Iterable[Observation]) -> str:
    """Why the kernel's log tells nothing of GPU errors, so that none is no good news; empty where it was read."""
    looks = [item for item in seen if item.name == "xid.last_seen"]
    lost = next((item for item in looks if item.status != MEASURED), None)
    return "not observed" if not looks else f"{lost.status}: {lost.reason}" if lost else ""


def _logs(launches: Iterable[Launch], part: Part, planned: PlannedHost | None) -> list[dict[str, Any]]:
    """What the ranks of the part said last, of launches that failed also what the launch did."""
    ours = _local_ranks(part, planned)
    found = []
    for launch in launches:
        for rank in launch.ranks:
            if (rank.local_rank in ours or part.kind == HOST) and rank.log_tail.strip():
                who = f"stage {launch.stage}, rank {rank.rank} (exit {rank.exit_code}, at {rank.phase or 'its start'})"
                found.append({"what": who, "text": rank.log_tail})
        if not launch.good:
            named = f"; named: {launch.culprit.text}" if launch.culprit else ""
            told = f"stage {launch.stage}: {launch.outcome}: {launch.reason}{named}"
            found.append({"what": told, "text": launch.log_tail})
    return found[-MOST_LOGS:]


def _local_ranks(part: Part, planned: PlannedHost | None) -> list[int]:
    """Ranks start one a device, in the order of the plan."""
    return [number for number, scope in enumerate(planned.scopes) if scope == part.place] if planned else []


def _versions(software: Mapping[str, str], place: str) -> dict[str, str]:
    """Versions of the host and of this part, without those of its siblings."""
    found = {}
    for key, text in software.items():
        name, bracket, scope = key.removesuffix("]").partition("[")
        if not bracket or Scope.parse(scope).part == place or place == HOST:
            found[name if bracket and scope == place else key] = text
    return found
