"""Read a run directory on the control node: the plan, the records of each host (its evidence), and the events of the playbooks.

Invalid records and events are listed as rejected, and otherwise ignored. A run with an invalid plan is refused.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fleet.judge.evidence import Evidence
from fleet.judge.reading_consistency import CLOCK_TOLERANCE_S
from fleet.records.baseline_store import BaselineSnapshot
from fleet.records.remedies import with_remedy
from schemas import documents, quick
from schemas.catalogue import BENCHMARKS, Expectation, settings, value_problem
from schemas.decode import record_from_json
from schemas.errors import RunError
from schemas.plans import Plan, Stage, expectations
from schemas.records import Record
from schemas.reports import Quarantined
from schemas.run_directory import (
    EVENTS,
    PLAN_BYTES,
    RunDirectory,
    bmc_record_names,
    is_run,
    record_name,
    record_names,
    runs_in,
)
from schemas.stages import GANG
from schemas.times import epoch_seconds

JOURNAL_BYTES = 64_000_000
REPORT_BYTES = 4_000_000_000
"""Maximum size of a report.json. The report of a large fleet has up to 20 000 verdicts, and a few kB for each host."""
MAX_CLOCK_LAG_S = 3600.0
"""The clock of a file server is behind that of the control node by at most this time. A plan file that is older than the plan by
more than this has a wrong time."""
MAX_CACHED_HOSTS = 16
"""The evidence of a run with more hosts is not kept in memory, except if only gang records are read."""
FETCH_AGAIN = "resume the run, or collect the record again"
"""Advice for a missing or rejected record that no event explains."""


class RecordReader:
    """Read the records of a run directory."""

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        events: Mapping[str, list[str]],
        journal_problems: Sequence[str] = (),
        users: Mapping[str, str] | None = None,
        *,
        only_gangs: bool = False,
    ) -> None:
        """Create a reader.

        Args:
            directory: the run directory.
            plan: the plan of the run.
            events: host -> failures that the playbooks recorded for it.
            journal_problems: why lines of events.jsonl were rejected. These lines may be about any host.
            users: host -> the user or job that occupies its GPUs.
            only_gangs: read only the gang records.
        """
        self._directory, self.plan, self._events = directory, plan, events
        self._journal_problems, self.only_gangs = journal_problems, only_gangs
        self._users = users or {}
        self._baseline = BaselineSnapshot(directory, plan) if plan.baseline else None
        self._reader = quick.Reader()
        self.checked: dict[str, bytes] = {}
        """Path of a valid record -> digest of its bytes. Unchanged bytes are not validated again."""

    def read(self, name: str) -> tuple[Evidence, list[Quarantined]]:
        """Return the evidence of a host, and its rejected files."""
        host = self.plan.host(name)
        records, problems, quarantined = [], [], []
        received: dict[str, float] = {}
        for gang in (*([] if self.only_gangs else [""]), *([host.gang] if host.gang else [])):
            path = record_name(host.name, gang)
            try:
                records.append(self._record(path, host.name, gang))
                if (moment := self._received_at(path)) is not None:
                    received[gang] = moment
            except FileNotFoundError:
                if not gang:
                    problems.append(f"no record: {path} is missing")
            except documents.DocumentError as error:
                quarantined.append(Quarantined(path=path, reason=str(error)))
                problems.append(f"rejected: {error}")
        if problems and host.name not in self._events and not self.plan.simulated:
            problems[-1] += f"; {FETCH_AGAIN}"
        problems += self._events.get(host.name, [])
        problems += [f"rejected: {problem}" for problem in self._journal_problems]
        user = self._users.get(host.name, "")
        evidence = Evidence(records=tuple(records), received=received, problem="; ".join(problems), user=user)
        if host.bmc and not self.only_gangs:
            evidence = self._with_bmc(evidence, host.name, quarantined)
        # The baseline belongs to the evidence, because the judge reads no files.
        baseline = self._baseline.of_host(host.name, evidence.gpus()) if self._baseline else None
        return replace(evidence, baseline=baseline) if baseline else evidence, quarantined

    def _received_at(self, path: str) -> float | None:
        """Return when the control node received the record at `path`, in seconds since 1970; None if it is not known."""
        if self.plan.simulated:  # a simulation invents the times in its records
            return None
        try:
            planned = epoch_seconds(self.plan.created)
        except ValueError:
            return None
        plan_file = RunDirectory(self._directory).plan
        # No program can set `st_ctime`, so the files of a copied run have the time of the copy. Archives set `st_mtime`.
        return received_at(planned, plan_file.stat().st_ctime, (self._directory / path).stat().st_ctime)

    def _with_bmc(self, evidence: Evidence, host: str, quarantined: list[Quarantined]) -> Evidence:
        """Return the evidence with the record of the BMC, or with the reason why there is none."""
        paths = RunDirectory(self._directory)
        name = paths.relative(paths.bmc_record(host))
        try:
            return replace(evidence, bmc=self._record(name, host, ""))
        except FileNotFoundError:
            return replace(evidence, bmc_problem=f"the BMC was not read: {name} is missing")
        except documents.DocumentError as error:
            quarantined.append(Quarantined(path=name, reason=str(error)))
            return replace(evidence, bmc_problem=f"rejected: {error}")

    def _record(self, path: str, host: str, gang: str) -> Record:
        """Return the record at `path`.

        Raises:
            FileNotFoundError: there is no record.
            DocumentError: the record is invalid, or of another host, gang or run.
        """
        file, plan = self._directory / path, self.plan
        if not file.exists() and not file.is_symlink():
            raise FileNotFoundError(path)
        try:
            if file.parent.is_symlink():
                raise documents.DocumentError(f"{file}: its directory is a symbolic link")
            record = self._parse(path, documents.read_bytes(file))
        except documents.DocumentError as error:
            raise documents.DocumentError(str(error).replace(f"{self._directory}/", "")) from None
        for key, actual, expected in (
            ("run", record.run_id, plan.run_id),
            ("nonce", record.nonce, plan.nonce),
            ("host", record.host, host),
            ("gang", record.gang, gang),
            ("simulated", "yes" if record.simulated else "no", "yes" if plan.simulated else "no"),
        ):
            if actual != expected:
                note = ": the record is from another run" if key in ("run", "nonce") else ""
                raise documents.DocumentError(f"{path}: {key} {actual or 'none'}, expected {expected or 'none'}{note}")
        return record

    def _parse(self, path: str, text: bytes) -> Record:
        """Return the record in `text`. Raise DocumentError if it is invalid."""
        # Processors have instructions for SHA-256, so it is faster than BLAKE2.
        digest = hashlib.sha256(text).digest()
        record = self._reader.record(text, is_checked=self.checked.get(path) == digest)
        if record is None:
            source = str(self._directory / path)
            return record_from_json(documents.checked(text, "record", source=source), source=source)
        self.checked[path] = digest
        return record


def received_at(planned: float, plan_written: float, record_written: float) -> float | None:
    """Return when the control node received a record, by its own clock; None if the file times do not show it.

    A file server sets the times of files by its own clock. That clock is behind the clock of the control node by the time at
    which the control node made the plan, minus the time of the file of the plan. If the run was copied, the files have other
    times, such as the time of the copy or 1970. Then it is not known when the record was received.

    Args:
        planned: when the control node made the plan. All times are in seconds since 1970.
        plan_written: time of the file of the plan.
        record_written: time of the file of the record.
    """
    lag_s = planned - plan_written
    if not -CLOCK_TOLERANCE_S <= lag_s <= MAX_CLOCK_LAG_S or record_written <= plan_written:
        return None
    return record_written + lag_s


class RunEvidence(Mapping[str, Evidence]):
    """The evidence of each host of a run, read on access: the evidence of a large fleet does not fit into memory."""

    def __init__(self, reader: RecordReader) -> None:
        self.reader = reader
        is_cached = reader.only_gangs or len(reader.plan.hosts) <= MAX_CACHED_HOSTS
        self._cache: dict[str, tuple[Evidence, list[Quarantined]]] | None = {} if is_cached else None

    def __getitem__(self, host: str) -> Evidence:
        return self.read(host)[0]

    def __iter__(self) -> Iterator[str]:
        return (host.name for host in self.reader.plan.hosts)

    def __len__(self) -> int:
        return len(self.reader.plan.hosts)

    def read(self, name: str) -> tuple[Evidence, list[Quarantined]]:
        """Return the evidence of a host, and its rejected files."""
        if self._cache is None:
            return self.reader.read(name)
        if name not in self._cache:
            self._cache[name] = self.reader.read(name)
        return self._cache[name]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The content of a run directory."""

    directory: Path
    plan: Plan
    evidence: RunEvidence
    events: dict[str, list[str]]
    rejected: tuple[Quarantined, ...]
    """Rejected files other than expected records: events.jsonl or lines of it, and records that the plan does not expect."""

    @cached_property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """Return all rejected files. This reads every record."""
        return (*self.rejected, *(item for host in self.evidence for item in self.evidence.read(host)[1]))


def plan_advice(directory: Path, error: documents.DocumentError) -> str:
    """Return advice for the operator if the plan of a run directory is missing or cannot be read (`error`)."""
    if isinstance(error.__cause__, PermissionError):
        return "read the run as the user who made it, or have that user make it readable"
    if is_run(directory):
        return "it is damaged or was written by another version of Rackproof: use the version that wrote it"
    if runs := sorted(_printable_runs(directory)):
        return f"give one of the runs in this directory: {', '.join(runs[:5])}{' …' if len(runs) > 5 else ''}"
    near = documents.nearest(directory.name, _printable_runs(directory.parent))
    return f"give the directory of a run, which has a plan.json{near}"


def _printable_runs(directory: Path) -> list[str]:
    """Return the names of the runs in a directory. Names that are not printable are left out: they may control the terminal."""
    return [run.name for run in runs_in(directory) if run.name.isprintable()]


def require_run(directory: Path) -> None:
    """Raise RunError if the directory is missing or has no readable plan."""
    try:
        documents.read_bytes(RunDirectory(directory).plan, max_bytes=PLAN_BYTES)
    except documents.DocumentError as error:
        raise RunError(f"{error}: {plan_advice(directory, error)}") from None


def load(directory: Path, *, only_gangs: bool = False, study: bool = False) -> Run:
    """Return the run in `directory`. Its records are read on access.

    Args:
        directory: the run directory.
        only_gangs: read only the gang records, not the host records.
        study: accept a scaling study, which has no verdicts.

    Raises:
        RunError: the plan is missing or invalid, or the run is a study and `study` is false.
    """
    try:
        plan = RunDirectory(directory).read_plan()
    except documents.DocumentError as error:
        raise RunError(f"{error}: {plan_advice(directory, error)}") from None
    if reason := _invalid_reason(plan):
        raise RunError(
            f"{RunDirectory(directory).plan}: {reason}: the plan was changed, or written by another version of Rackproof: "
            "restore it, or use the version that wrote it"
        )
    if plan.study and not study:
        raise RunError(f"run {plan.run_id} is a scaling study, which is not judged: use rackproof scaling {directory}")
    journal: list[Quarantined] = []
    events, users = _read_events(directory, journal)
    problems = [item.reason for item in journal]
    return Run(
        directory=directory,
        plan=plan,
        evidence=RunEvidence(RecordReader(directory, plan, events, problems, users, only_gangs=only_gangs)),
        events=events,
        rejected=(*journal, *_unplanned_records(directory, plan)),
    )


def _invalid_reason(plan: Plan) -> str:
    """Return why a plan is invalid although it matches the schema; empty if it is valid."""
    stages = {stage.name: stage for stage in plan.stages}
    if duplicates := [name for name, count in Counter(host.name for host in plan.hosts).items() if count > 1]:
        return f"duplicate host {duplicates[0]}"
    if unknown := sorted({item.stage for item in plan.expected} - stages.keys()):
        return f"it expects figures of an unknown stage {unknown[0]!a}"
    if any(host.gang for host in plan.hosts) and GANG not in stages:
        return f"it has gangs, but no stage {GANG}"
    if unknown := sorted({name for stage in plan.stages for name in stage.benchmarks} - BENCHMARKS.keys()):
        return f"unknown benchmark {unknown[0]!a}"
    for stage in plan.stages:
        for benchmark, chosen in stage.benchmarks.items():
            for key, default in BENCHMARKS[benchmark].settings.items():
                is_left_out = key not in chosen or (chosen[key] == [] and isinstance(default, list))
                if not is_left_out and (problem := value_problem(benchmark, key, chosen[key])):
                    return f"stage {stage.name}: {benchmark}.{key} {problem}"
    for item in plan.expected:
        benchmark = item.name.split(".")[0]
        if item.scope == "peers" and type(_rounds(benchmark, stages[item.stage])) is not int:
            return f"it expects {item.name!a} of pairs of hosts, but has no valid number of `rounds` for them"
    return "" if plan.study else _wrong_expectations(plan)


def _wrong_expectations(plan: Plan) -> str:
    """Return how the figures that the plan expects differ from those that its stages measure; empty if they are the same."""
    listed = Counter(map(_expected_figure, plan.expected))
    measured = Counter(map(_expected_figure, expectations(plan.stages, rehearsal=plan.rehearsal)))
    for figures, text in (
        (measured - listed, "does not expect {name}, which its stage {stage} measures"),
        (listed - measured, "expects {name}, but its stage {stage} does not measure it"),
    ):
        if figures:
            stage, name = min(figures)[:2]
            others = figures.total() - 1
            return f"it {text.format(name=name, stage=stage)}{f' (and {others} more)' if others else ''}"
    return ""


def _expected_figure(item: Expectation) -> tuple[str, str, str, str, bool]:
    return item.stage, item.name, item.scope, repr(sorted(item.params.items())), item.peers


def _rounds(benchmark: str, stage: Stage) -> object:
    return settings(benchmark, stage.benchmarks.get(benchmark, {})).get("rounds") if benchmark in BENCHMARKS else None


def _unplanned_records(directory: Path, plan: Plan) -> list[Quarantined]:
    """Return the record files that the plan does not expect."""
    planned, paths = {*record_names(plan), *bmc_record_names(plan)}, RunDirectory(directory)
    return [
        # A file name may have bytes that are not UTF-8; the report shows them as \xff.
        Quarantined(path=os.fsencode(path).decode(errors="backslashreplace"), reason="the plan expects no such record")
        for path in sorted(map(paths.relative, paths.records()))
        if path not in planned
    ]


def _read_events(directory: Path, quarantined: list[Quarantined]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the failures of each host in events.jsonl, and the users of the hosts that are in use.

    A failure no longer counts once the host has completed the same play. Invalid lines are added to `quarantined`.
    """
    path = RunDirectory(directory).events
    try:
        text = documents.read_bytes(path, max_bytes=JOURNAL_BYTES) if os.path.lexists(path) else b""
    except documents.DocumentError as error:
        quarantined.append(Quarantined(path=EVENTS, reason=str(error).replace(f"{directory}/", "")))
        return {}, {}
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    by_play: dict[str, dict[str, dict[str, str]]] = {}
    for number, line in enumerate(lines, 1):
        try:
            event = documents.parse(line, source=f"events.jsonl line {number}")
            documents.validate(event, "event", source=f"events.jsonl line {number}")
        except documents.DocumentError as error:
            quarantined.append(Quarantined(path=EVENTS, reason=str(error)))
            continue
        if event["what"] == "passed":
            for host in event["hosts"]:
                by_play.get(event["play"], {}).pop(host, None)
        else:
            message = f"{event['what']} at {event['play']}: {event['task']}: {with_remedy(event['message'])}"
            messages = by_play.setdefault(event["play"], {}).setdefault(event["host"], {})
            # A dictionary, because a resumed run may fail again with the same message.
            messages[message] = event["message"] if event.get("in_use") else ""
    by_host: dict[str, list[str]] = defaultdict(list)
    users: dict[str, str] = {}
    for hosts in by_play.values():
        for host, messages in hosts.items():
            by_host[host] += messages
            if user := next(filter(None, messages.values()), ""):
                users[host] = user
    return dict(by_host), users
