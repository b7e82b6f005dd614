"""Copy records from logs or volumes into the run directory, for runs without a playbook that fetches them.

A damaged record is rejected. A host that began the run more than once has records of several attempts. If the records of one
host (collected, or already in the run directory) are of different attempts or machines, the collected ones are rejected, unless
the operator chooses the first or the last attempt. All records of the host are then taken from that attempt, and a record of
another attempt in the run directory is moved to `quarantine/`.

A record is written to `quarantine/` if its run id or nonce is not that of this run, if the plan lacks its host or has the host in
another gang (the hosts of one multi-node launch), or if it is of an attempt that the operator did not choose.

Any other record is written into the run directory. If there is already a record at its path, the collected record replaces it in
three cases: the existing record is invalid or of another run; the collected record extends the existing one (has all of its data,
and more); or the two are of different attempts, and the operator chooses the attempt of the collected record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fleet import progress
from fleet.judge.duplicates import are_of_two_machines
from schemas import documents
from schemas.decode import record_from_json
from schemas.frames import FramedRecord
from schemas.plans import Plan
from schemas.records import Record
from schemas.run_directory import GANGS, record_name
from schemas.stages import GANG

QUARANTINE, COLLECTED = "quarantine", "collected.jsonl"
FIRST, LAST = "first", "last"
Pair = tuple[Record, FramedRecord]
Attempt = dict[str, list[list[Pair]]]
"""The records of one host from one execution of the run. The key is the gang, or empty for the host's own record.

If records contradict each other, a key has several lists. In each list, each record extends the one before it.
"""


@dataclass(kw_only=True)
class CollectionResult:
    """The result of a collection. Records are listed by their path in the run directory."""

    added: list[str] = field(default_factory=list)
    """Records that are new, or that replaced the record in the run directory."""
    unchanged: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Why records were rejected, or do not belong to this run."""
    missing: list[str] = field(default_factory=list)
    """Records that the plan expects and the run directory lacks."""


class RecordCollector:
    """Write collected records into one run directory.

    Args:
        directory, plan: run directory and its plan.
        attempt: the attempt to use if a host began the run more than once (FIRST or LAST); None: reject its collected records.
    """

    def __init__(self, directory: Path, plan: Plan, attempt: str | None = None) -> None:
        self._directory, self._plan, self._attempt = directory, plan, attempt
        self._result = CollectionResult()

    def add(self, frames: Iterable[FramedRecord]) -> CollectionResult:
        """Write each accepted record to its path. If several records of a path are of one attempt, only the latest is written."""
        accepted: dict[str, list[Pair]] = {}
        items = list(dict.fromkeys(frames))
        progress.begin("checking records", len(items))
        for item in items:
            progress.advance()
            try:
                record = self._checked(item)
            except documents.DocumentError as error:
                self._report_problem("rejected", item, str(error))
                continue
            if reason := self._foreign_reason(record, item):
                self._quarantine(item, reason)
                continue
            accepted.setdefault(record.host, []).append((record, item))
        for host, records in accepted.items():
            self._write_records(host, records)
        self._result.missing = [path for path in self._expected_paths() if not (self._directory / path).exists()]
        return self._result

    def _checked(self, item: FramedRecord) -> Record:
        """Return the record. Raise DocumentError if it is invalid, or not of the run, host and gang that its log lines name."""
        document = documents.parse(item.text, source=item.source)
        documents.validate(document, "record", source=item.source)
        record = record_from_json(document, source=item.source)
        for key, actual, framed in (
            ("run", record.run_id, item.run_id),
            ("host", record.host, item.host),
            ("gang", record.gang, item.gang),
        ):
            if actual != framed:
                raise documents.DocumentError(
                    f"{item.source}: the record is of {key} {actual or 'none'}, but its log lines name {framed or 'none'}"
                )
        return record

    def _foreign_reason(self, record: Record, item: FramedRecord) -> str:
        """Return why a record does not belong to this run, or an empty string."""
        plan = self._plan
        if record.run_id != plan.run_id:
            return f"{item.source}: a record of run {record.run_id} (host {record.host}), not of run {plan.run_id}"
        if record.nonce != plan.nonce:
            return (
                f"{item.source}: the record of {record.host} was made with another plan for run {plan.run_id}: "
                "give the hosts the plan.json of this directory"
            )
        names = [host.name for host in plan.hosts]
        if record.host not in names:
            return f"{item.source}: host {record.host} is not in the plan{documents.nearest(record.host, names)}"
        gang = plan.host(record.host).gang
        if record.gang not in ("", gang):
            return f"{item.source}: the plan has host {record.host} in gang {gang or 'none'}, not {record.gang}"
        return ""

    def _write_records(self, host: str, records: list[Pair]) -> None:
        """Choose one attempt among the records collected for a host and those that are already there, and write its records."""
        gangs = dict.fromkeys(("", self._plan.host(host).gang))
        existing = {gang: pair for gang in gangs if (pair := self._existing_record(record_name(host, gang)))}
        attempts = _group_by_attempt([*existing.values(), *records])
        is_ambiguous = len(attempts) > 1 or any(len(versions) > 1 for versions in attempts[0].values())
        if is_ambiguous and not self._attempt:
            self._reject(records, attempts)
            return
        index = 0 if self._attempt == FIRST else -1
        chosen = {gang: versions[index] for gang, versions in attempts[index].items()}
        for version in (version for attempt in attempts for versions in attempt.values() for version in versions):
            record, item = version[-1]
            if version is not chosen.get(record.gang) and version[-1] is not existing.get(record.gang):
                self._keep_other_attempt(item)
        collected = {record.gang for record, _ in records}
        for gang in gangs:
            path, before = record_name(host, gang), existing.get(gang)
            if gang in chosen:
                is_kept = any(pair is before for pair in chosen[gang])
                self._write_record(path, chosen[gang][-1][1], before, is_kept=is_kept, is_collected=gang in collected)
            elif before:  # a record of another attempt than the chosen one
                self._quarantine_existing(path)
                (self._directory / path).unlink()

    def _write_record(
        self, path: str, item: FramedRecord, before: Pair | None, *, is_kept: bool, is_collected: bool
    ) -> None:
        """Write a chosen record, unless the record that is already at its path is the same.

        Args:
            before: the record at the path, if it is valid and of this run.
            is_kept: whether the chosen record has all data of `before`.
            is_collected: whether any record for the path was collected.
        """
        if before and item.text == before[1].text:
            self._result.unchanged += [path] if is_collected else []
            return
        if not is_kept:
            self._quarantine_existing(path)
        documents.write_text(self._directory / path, item.text.decode())
        self._result.added.append(path)
        self._journal("added", item, "")

    def _reject(self, records: list[Pair], attempts: Sequence[Attempt]) -> None:
        """Report, for each path, that the collected records of a host are of several attempts and none was chosen."""
        first, *others = (
            version[0][0] for attempt in attempts for versions in attempt.values() for version in versions
        )
        two_machines = any(are_of_two_machines(first, other) for other in others)
        for gang in dict.fromkeys(record.gang for record, _ in records):
            record, item = next(pair for pair in records if pair[0].gang == gang)
            path = record_name(record.host, gang)
            if two_machines:
                reason = "two machines wrote records of this host, for example because its pod was replaced"
            else:
                reason = _describe_attempts([version for attempt in attempts for version in attempt.get(gang, [])])
            choice = "choose one attempt with --attempt first or --attempt last"
            self._report_problem("rejected", item, f"{item.source}: {path}: {reason}: {choice}")

    def _keep_other_attempt(self, item: FramedRecord) -> None:
        """Write the record of an attempt that the operator did not choose into quarantine, unless it is already there."""
        if not self._quarantine_path(item).exists():
            why = f"--attempt {self._attempt} chose another record; kept as {self._write_quarantine(item)}"
            self._journal("quarantined", item, why)

    def _quarantine_existing(self, path: str) -> None:
        """Copy the existing file to quarantine before it is replaced."""
        try:
            text = documents.read_bytes(self._directory / path)
        except documents.DocumentError:
            return  # there is no file, or it cannot be copied (for example, a symbolic link)
        gang, host = Path(path).parent.name if path.startswith(f"{GANGS}/") else "", Path(path).stem
        item = FramedRecord(run_id=self._plan.run_id, host=host, gang=gang, node="", text=text, source=path)
        self._journal("replaced", item, f"kept as {self._write_quarantine(item)}")

    def _existing_record(self, path: str) -> Pair | None:
        """Return the record in the run directory; None if there is none, or if it is invalid or of another run."""
        if not (self._directory / path).exists():
            return None
        try:
            record = record_from_json(documents.read(self._directory / path, "record"))
        except documents.DocumentError:
            return None
        text = (self._directory / path).read_bytes()
        if (record.run_id, record.nonce) != (self._plan.run_id, self._plan.nonce):
            return None
        return record, FramedRecord(
            run_id=record.run_id, host=record.host, gang=record.gang, node="", text=text, source=str(path)
        )

    def _quarantine(self, item: FramedRecord, reason: str) -> None:
        self._report_problem("quarantined", item, f"{reason}; written to {self._write_quarantine(item)}")

    def _write_quarantine(self, item: FramedRecord) -> str:
        """Write a record into quarantine; return its path in the run directory."""
        path = self._quarantine_path(item)
        if not path.exists():
            documents.write_text(path, item.text.decode(errors="replace"))
        return f"{QUARANTINE}/{path.name}"

    def _quarantine_path(self, item: FramedRecord) -> Path:
        return self._directory / QUARANTINE / f"{item.sha256[:16]}.json"

    def _report_problem(self, what: str, item: FramedRecord, why: str) -> None:
        self._result.problems.append(why)
        self._journal(what, item, why)

    def _journal(self, what: str, item: FramedRecord, why: str) -> None:
        """Append to collected.jsonl what was done with a record."""
        event = {
            "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "what": what,
            "host": item.host,
            "gang": item.gang,
            "node": item.node,
            "source": item.source,
            "sha256": item.sha256,
            **({"reason": why} if why else {}),
        }
        with (self._directory / COLLECTED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def _expected_paths(self) -> Iterator[str]:
        has_gang_stage = any(stage.name == GANG for stage in self._plan.stages)
        for host in self._plan.hosts:
            yield record_name(host.name)
            if host.gang and has_gang_stage:
                yield record_name(host.name, host.gang)


def _group_by_attempt(records: Iterable[Pair]) -> list[Attempt]:
    """Group the records of a host by attempt, oldest first."""
    attempts: list[Attempt] = []
    for pair in sorted(records, key=lambda pair: (pair[0].gang != "", pair[0].began, pair[0].ended)):
        attempt = next((attempt for attempt in reversed(attempts) if _is_of(pair[0], attempt)), None)
        if attempt is None:
            attempt = {}
            attempts.append(attempt)
        versions = attempt.setdefault(pair[0].gang, [])
        if versions and _extends(versions[-1][-1][0], pair[0]):
            versions[-1].append(pair)
        else:
            versions.append([pair])
    return sorted(attempts, key=lambda attempt: min(versions[0][0][0].began for versions in attempt.values()))


def _is_of(record: Record, attempt: Attempt) -> bool:
    """Return whether a record may be of an attempt.

    All records of an attempt are of one machine. A host begins its gang record after its own record. So a gang record is of the
    last attempt that had begun when it began.
    """
    known = [version[0][0] for versions in attempt.values() for version in versions]
    if any(are_of_two_machines(other, record) for other in known):
        return False
    own = [other.began for other in known if not other.gang]
    return own[0] <= record.began if record.gang and own else known[0].began == record.began


def _extends(old: Record, new: Record) -> bool:
    """Return whether `new` is of the same attempt as `old` and has all data of `old`, unchanged."""
    return (
        (old.began, old.rackproof, old.simulated) == (new.began, new.rackproof, new.simulated)
        and new.snapshots[: len(old.snapshots)] == old.snapshots
        and new.launches[: len(old.launches)] == old.launches
        and new.observations[: len(old.observations)] == old.observations
        and old.soak in (None, new.soak)
        and all(gpu in new.gpus for gpu in old.gpus)
        and old.software.items() <= new.software.items()
    )


def _describe_attempts(versions: Sequence[Sequence[Pair]]) -> str:
    """Return, in words, why the records for a path were not accepted. If these agree, the host's other records do not."""
    if len(versions) == 1:
        return "the records of this host are of several attempts"
    start_times = sorted({version[0][0].began for version in versions})
    if len(start_times) > 1:
        times = ", ".join(start_times)
        return f"the host began the run {len(start_times)} times ({times}), for example because its pod was replaced"
    return (
        f"{len(versions)} records have the start time {start_times[0]}, but one lacks or changes data of an earlier one: "
        "a host never removes or changes data in its record, so another process may have written one of them"
    )
