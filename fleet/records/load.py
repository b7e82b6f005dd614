"""A run directory on the control node -> plan, evidence, events. What cannot be believed is quarantined, by name."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fleet.judge.judge import Evidence
from fleet.records.baseline_store import Snapshot
from fleet.records.remedies import with_remedy
from schemas import documents, quick
from schemas.catalogue import BENCHMARKS, settings
from schemas.decode import record_from_json
from schemas.errors import RunError
from schemas.plans import Plan, PlannedHost, Stage, plan_from_json
from schemas.records import Record
from schemas.reports import Quarantined
from schemas.run_directory import EVENTS, RunDirectory, is_run, record_name, record_names, runs_in
from schemas.stages import GANG

PLAN_BYTES = 64_000_000
JOURNAL_BYTES = 64_000_000
LARGE = 64
"""Hosts from which a fleet is looked at host by host, and the report holds the exceptions alone."""
AGAIN = "bring it anew: go on with the run, or collect it again"
"""What to do about a host's record where nothing else says why it is not there."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run left on the control node."""

    directory: Path
    plan: Plan
    evidence: Mapping[str, Evidence]
    events: dict[str, list[str]]
    quarantined: tuple[Quarantined, ...]
    large: bool = False
    """The evidence is read from disk whenever it is asked for, and `quarantined` lacks the records that are not believed."""
    journal: tuple[str, ...] = ()
    """Why the journal cannot be believed."""
    users: Mapping[str, str] = field(default_factory=dict)
    """Host -> who uses it, if a task failed because another run has it."""


class Records(Mapping[str, Evidence]):
    """The evidence of each host of a run, read when it is asked for and not kept: a large fleet's does not fit into memory."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        events: Mapping[str, list[str]],
        journal: Sequence[str] = (),
        users: Mapping[str, str] | None = None,
    ) -> None:
        """Open the records of a run; `events`, `journal` and `users` are those of `Run`."""
        self._directory, self._plan, self._events, self._journal = directory, plan, events, journal
        self._users = users or {}
        self._baseline = Snapshot(directory, plan) if plan.baseline else None
        self._reader = quick.Reader()

    def __getitem__(self, host: str) -> Evidence:
        return self.read(self._plan.host(host))[0]

    def __iter__(self) -> Iterator[str]:
        return (host.name for host in self._plan.hosts)

    def __len__(self) -> int:
        return len(self._plan.hosts)

    def read(self, host: PlannedHost, *, alone: bool = True) -> tuple[Evidence, list[Quarantined]]:
        """What the host left behind, without `alone` its gang record only; and the files that are not believed."""
        records, problems, quarantined = [], [], []
        for gang in (*([""] if alone else []), *([host.gang] if host.gang else [])):
            path = record_name(host.name, gang)
            try:
                records.append(_record(self._directory, path, self._plan, host.name, gang, self._reader))
            except FileNotFoundError:
                if not gang:
                    problems.append(f"no record: {path} is missing")
            except documents.DocumentError as error:
                quarantined.append(Quarantined(path=path, reason=str(error)))
                problems.append(f"quarantined: {error}")
        if problems and host.name not in self._events and not self._plan.simulated:
            problems[-1] += f"; {AGAIN}"
        problems += self._events.get(host.name, [])
        problems += [f"the journal cannot be believed: {why}" for why in self._journal]
        user = self._users.get(host.name, "")
        left = Evidence(records=tuple(records), problem="; ".join(problems), user=user)
        # What the host is compared with is a part of what the judge is told of it.
        known = self._baseline.of_host(host.name, left.gpus()) if self._baseline else None
        return replace(left, baseline=known) if known else left, quarantined


def without_plan(directory: Path, error: documents.DocumentError) -> str:
    """What to do where the plan of a run directory is not there, or cannot be read."""
    if isinstance(error.__cause__, PermissionError):
        return "look at the run as the user who made it, or have that user make it readable"
    if is_run(directory):
        return "it is damaged, or of another version of Rackproof: look at the run with the version that wrote it"
    if runs := sorted(_runs(directory)):
        return f"give one of the runs in it: {', '.join(runs[:5])}{' …' if len(runs) > 5 else ''}"
    near = documents.nearest(directory.name, _runs(directory.parent))
    return f"give the directory of a run, which has a plan.json{near}"


def _runs(directory: Path) -> list[str]:
    """Those whose name is nothing but text: what else lies there may be another user's, and steer a terminal."""
    return [run.name for run in runs_in(directory) if run.name.isprintable()]


def refuse_no_run(directory: Path) -> None:
    """Raises RunError where the directory is not there, or is none of a run: before anybody asks for a report in it."""
    try:
        documents.read_bytes(RunDirectory(directory).plan, max_bytes=PLAN_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: {without_plan(directory, error)}") from None


def load(directory: Path, *, alone: bool = True, study: bool = False) -> Run:
    """Reads the run in `directory`; without `alone` the gang records only, with `study` also a study, of which nothing is judged.

    Of a large fleet the records are read when they are asked for, and what cannot be believed is found then.

    Raises:
        RunError: there is no plan, so nothing can be said about what is missing; or it is a study.
    """
    try:
        plan = plan_from_json(documents.read(RunDirectory(directory).plan, "plan", max_bytes=PLAN_BYTES))
    except documents.DocumentError as error:
        raise RunError(f"{error}: {without_plan(directory, error)}") from None
    if why := _unfit(plan):
        raise RunError(f"{RunDirectory(directory).plan}: {why}: make the plan anew")
    if plan.study and not study:
        raise RunError(
            f"run {plan.run_id} is a scaling study, of which nothing is judged: rackproof scaling {directory}"
        )
    quarantined: list[Quarantined] = []
    events, users = _events(directory, quarantined)
    journal = tuple(item.reason for item in quarantined)
    records = Records(directory, plan, events, journal, users)
    evidence: Mapping[str, Evidence] = records
    strays = _strays(directory, plan)
    if not (large := alone and len(plan.hosts) > LARGE):
        evidence = {}
        for host in plan.hosts:
            evidence[host.name], refused = records.read(host, alone=alone)
            quarantined += refused
    return Run(
        directory=directory,
        plan=plan,
        evidence=evidence,
        events=events,
        quarantined=(*quarantined, *strays),
        large=large,
        journal=journal,
        users=users,
    )


def _unfit(plan: Plan) -> str:
    """Why a plan cannot be one that was made from an inventory, though its schema is right; empty where it can."""
    stages = {stage.name: stage for stage in plan.stages}
    if twice := [name for name, count in Counter(host.name for host in plan.hosts).items() if count > 1]:
        return f"the host {twice[0]} stands twice in it"
    if unknown := sorted({item.stage for item in plan.expected} - stages.keys()):
        return f"it expects figures of a stage {unknown[0]!a} that it has not"
    if any(host.gang for host in plan.hosts) and GANG not in stages:
        return f"it has gangs, and no stage {GANG}"
    if GANG in stages and (strange := sorted(stages[GANG].benchmarks.keys() - BENCHMARKS.keys())):
        return f"no benchmark is called {strange[0]!a}"
    for item in plan.expected:
        benchmark = item.name.split(".")[0]
        if item.scope == "peers" and type(_rounds(benchmark, stages[item.stage])) is not int:
            return f"it expects {item.name!a} of hosts in pairs, and does not say in how many rounds they meet"
    return ""


def _rounds(benchmark: str, stage: Stage) -> object:
    return settings(benchmark, stage.benchmarks.get(benchmark, {})).get("rounds") if benchmark in BENCHMARKS else None


def _record(directory: Path, path: str, plan: Plan, host: str, gang: str, reader: quick.Reader) -> Record:
    """The record at `path`. Raises FileNotFoundError; DocumentError where it is broken or not this host's or run's."""
    if not (directory / path).exists() and not (directory / path).is_symlink():
        raise FileNotFoundError(path)
    try:
        if (directory / path).parent.is_symlink():
            raise documents.DocumentError(f"{directory / path}: its directory is a symbolic link")
        text = documents.read_bytes(directory / path)
        record = reader.record(text)
        if record is None:
            source = str(directory / path)
            record = record_from_json(documents.checked(text, "record", source=source), source=source)
    except documents.DocumentError as error:
        raise documents.DocumentError(str(error).replace(f"{directory}/", "")) from None
    for what, found, wanted in (
        ("run", record.run_id, plan.run_id),
        ("nonce", record.nonce, plan.nonce),
        ("host", record.host, host),
        ("gang", record.gang, gang),
        ("simulated", record.simulated and "yes", plan.simulated and "yes"),
    ):
        if found != wanted:
            other = ": it is of another run" if what in ("run", "nonce") else ""
            raise documents.DocumentError(f"{path}: {what} {found or 'none'}, expected {wanted or 'none'}{other}")
    return record


def _strays(directory: Path, plan: Plan) -> list[Quarantined]:
    """Files where records lie that the plan knows nothing of."""
    known, paths = record_names(plan), RunDirectory(directory)
    return [
        Quarantined(path=path, reason="the plan has no such host")
        for path in sorted(map(paths.relative, paths.records()))
        if path not in known
    ]


def _events(directory: Path, quarantined: list[Quarantined]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return what happened to each host according to the playbooks' journal, and who uses the hosts that are in use.

    An event is void once the host has completed the same play.
    """
    path = RunDirectory(directory).events
    try:
        there = os.path.lexists(path)
        whole = documents.read_bytes(path, max_bytes=JOURNAL_BYTES) if there else b""
    except documents.DocumentError as error:
        quarantined.append(Quarantined(path=EVENTS, reason=str(error).replace(f"{directory}/", "")))
        return {}, {}
    lines = whole.removesuffix(b"\n").split(b"\n") if whole else []
    befell: dict[str, dict[str, dict[str, str]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            event = documents.parse(line, source=f"events.jsonl line {number}")
            documents.validate(event, "event", source=f"events.jsonl line {number}")
        except documents.DocumentError as error:
            quarantined.append(Quarantined(path=EVENTS, reason=str(error)))
            continue
        if event["what"] == "passed":
            for host in event["hosts"]:
                befell.get(event["play"], {}).pop(host, None)
        else:
            text = f"{event['what']} at {event['play']}: {event['task']}: {with_remedy(event['message'])}"
            texts = befell.setdefault(event["play"], {}).setdefault(event["host"], {})
            texts[text] = (
                event["message"] if event.get("in_use") else ""
            )  # a resumed run may fail in the same way again
    found: dict[str, list[str]] = defaultdict(list)
    users: dict[str, str] = {}
    for hosts in befell.values():
        for host, texts in hosts.items():
            found[host] += texts
            if user := next(filter(None, texts.values()), ""):
                users[host] = user
    return dict(found), users
