"""A run directory on the control node -> plan, evidence, events. What cannot be believed is quarantined, by name."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import RunError
from fleet.judge.verdict import Evidence
from schemas import documents
from schemas.plans import Plan, plan_from_json
from schemas.records import Record, record_from_json
from schemas.reports import Quarantined

PLAN_BYTES = 64_000_000
JOURNAL = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run left on the control node."""

    directory: Path
    plan: Plan
    evidence: dict[str, Evidence]
    events: dict[str, list[str]]
    quarantined: tuple[Quarantined, ...]


def load(directory: Path, *, alone: bool = True) -> Run:
    """Reads the run in `directory`; without `alone` the gang records only.

    Raises:
        RunError: there is no plan, so nothing can be said about what is missing.
    """
    try:
        plan = plan_from_json(documents.read(directory / "plan.json", "plan", max_bytes=PLAN_BYTES))
    except documents.DocumentError as error:
        raise RunError(f"{error}: give the directory of a run, which has a plan.json") from None
    quarantined: list[Quarantined] = []
    events = _events(directory, quarantined)
    evidence = {}
    for host in plan.hosts:
        records, problems = [], []
        for gang in (*([""] if alone else []), *([host.gang] if host.gang else [])):
            path = f"gangs/{gang}/{host.name}.json" if gang else f"hosts/{host.name}.json"
            try:
                records.append(_record(directory, path, plan, host.name, gang))
            except FileNotFoundError:
                if not gang:
                    problems.append(f"no record: {path} is missing")
            except documents.DocumentError as error:
                quarantined.append(Quarantined(path=path, reason=str(error)))
                problems.append(f"quarantined: {error}")
        problems += events.get(host.name, [])
        problems += [f"the journal cannot be believed: {item.reason}" for item in quarantined if item.path == JOURNAL]
        evidence[host.name] = Evidence(records=tuple(records), problem="; ".join(problems))
    quarantined += _strays(directory, plan)
    return Run(directory=directory, plan=plan, evidence=evidence, events=events, quarantined=tuple(quarantined))


def _record(directory: Path, path: str, plan: Plan, host: str, gang: str) -> Record:
    """The record at `path`. Raises FileNotFoundError; DocumentError where it is broken or not this host's or run's."""
    if not (directory / path).exists() and not (directory / path).is_symlink():
        raise FileNotFoundError(path)
    try:
        record = record_from_json(documents.read(directory / path, "record"))
    except documents.DocumentError as error:
        raise documents.DocumentError(str(error).replace(f"{directory}/", "")) from None
    for what, found, wanted in (
        ("run", record.run_id, plan.run_id),
        ("nonce", record.nonce, plan.nonce),
        ("host", record.host, host),
        ("gang", record.gang, gang),
    ):
        if found != wanted:
            raise documents.DocumentError(f"{path}: {what} {found or 'none'}, expected {wanted or 'none'}")
    return record


def _strays(directory: Path, plan: Plan) -> list[Quarantined]:
    """Files where records lie that the plan knows nothing of."""
    known = {f"hosts/{host.name}.json" for host in plan.hosts}
    known |= {f"gangs/{host.gang}/{host.name}.json" for host in plan.hosts if host.gang}
    there = [*directory.glob("hosts/*"), *directory.glob("gangs/*/*")]
    return [
        Quarantined(path=path, reason="the plan has no such host")
        for path in sorted(str(found.relative_to(directory)) for found in there)
        if path not in known
    ]


def _events(directory: Path, quarantined: list[Quarantined]) -> dict[str, list[str]]:
    """Host -> what befell it, as the playbooks' journal tells; void once the host came through the same play."""
    path = directory / JOURNAL
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    except OSError as error:
        quarantined.append(Quarantined(path=JOURNAL, reason=str(error)))
        return {}
    befell: dict[str, dict[str, list[str]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            event = documents.parse(line, source=f"events.jsonl line {number}")
            documents.validate(event, "event", source=f"events.jsonl line {number}")
        except documents.DocumentError as error:
            quarantined.append(Quarantined(path=JOURNAL, reason=str(error)))
            continue
        if event["what"] == "passed":
            for host in event["hosts"]:
                befell.get(event["play"], {}).pop(host, None)
        else:
            text = f"{event['what']} at {event['play']}: {event['task']}: {event['message']}"
            befell.setdefault(event["play"], {}).setdefault(event["host"], []).append(text)
    found: dict[str, list[str]] = defaultdict(list)
    for hosts in befell.values():
        for host, texts in hosts.items():
            found[host] += texts
    return dict(found)
