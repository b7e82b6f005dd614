"""`rackproof collect`: records that hosts left in logs or on volumes, where no playbook fetches them, into the run's directory.

A record is believed where it comes to its own checksum and is of this run, by its id and its nonce, and of a host of its plan.
One takes the place of another only where it holds all of it and more, or where the operator says which attempt counts.
Of anything else nothing gets where records lie: what is broken is refused, what is of another run is set aside in `quarantine/`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fleet.records import run_lock
from fleet.records.collect_sources import read_source
from fleet.records.load import PLAN_BYTES
from schemas import documents
from schemas.errors import RunError
from schemas.frames import Told
from schemas.plans import Plan, plan_from_json
from schemas.probes import GANG
from schemas.records import Record, record_from_json
from schemas.run_directory import GANGS, RunDirectory, record_name

TROUBLE = 2
QUARANTINE, COLLECTED = "quarantine", "collected.jsonl"
FIRST, LAST = "first", "last"


@dataclass(kw_only=True)
class Outcome:
    """What became of what was found."""

    taken: list[str] = field(default_factory=list)
    """Records that are new in the run's directory, or have grown, by their path in it."""
    known: list[str] = field(default_factory=list)
    """Records that were there."""
    problems: list[str] = field(default_factory=list)
    """What was refused or set aside, and why."""
    missing: list[str] = field(default_factory=list)
    """Records that the plan expects and that are not there yet."""


def add_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add collect to the command."""
    collect = verbs.add_parser(
        "collect",
        help="take records out of logs and volumes into a run's directory, for `rackproof report`",
        description="Takes the records that `rackproof run-host` or `emit-record` wrote into a log, or left on a volume.",
        epilog="examples: kubectl logs -l app.kubernetes.io/component=host --tail=-1 | rackproof collect runs/r1 -; "
        "rackproof collect runs/r1 logs/*.log /mnt/results. "
        "Exit codes: 0 everything that was found was taken, or was there; 2 nothing was found, or something was refused or set "
        "aside; 64 wrong usage; 75 somebody else has the run. What is still missing is named: the report calls it inconclusive.",
    )
    collect.add_argument(
        "run_dir", type=Path, help="directory of the run, with the plan.json that the hosts were given"
    )
    collect.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="a log, a directory of logs or records, or - for standard input"
    )
    collect.add_argument(
        "--attempt",
        choices=[FIRST, LAST],
        help="where a host told two records of which neither is the other grown, as when its pod was replaced: which counts "
        "(default: what is there stays, else neither)",
    )
    collect.add_argument("--json", action="store_true", help="print what became of it as JSON")
    return collect


def call(options: argparse.Namespace) -> int:
    """Run the verb."""
    plan = _plan(options.run_dir)
    told, problems = [], []
    for source in options.sources:
        found, wrong = read_source(source)
        told += found
        problems += wrong
    if not told and not problems:
        problems.append(
            f"{', '.join(options.sources)}: no record was found: collect the whole log (kubectl logs --tail=-1), "
            "of a pod whose `rackproof run-host` has ended"
        )
    run_lock.acquire(options.run_dir)
    outcome = Collection(options.run_dir, plan, options.attempt).take(told)
    outcome.problems[:0] = problems
    _show(outcome, options.json)
    return TROUBLE if outcome.problems else 0


def _plan(directory: Path) -> Plan:
    try:
        return plan_from_json(documents.read(RunDirectory(directory).plan, "plan", max_bytes=PLAN_BYTES))
    except documents.DocumentError as error:
        raise RunError(f"{error}: give the directory that `rackproof plan --run-dir` has made") from None


class Collection:
    """Records on their way into one run's directory.

    Args:
        attempt: which of a host's records counts where it began twice: FIRST, LAST, or neither.
    """

    def __init__(self, directory: Path, plan: Plan, attempt: str | None = None) -> None:
        self._directory, self._plan, self._attempt = directory, plan, attempt
        self._outcome = Outcome()

    def take(self, told: Iterable[Told]) -> Outcome:
        """Puts each record where it belongs, the one that ended last of those that grew out of each other."""
        chosen: dict[str, list[tuple[Record, Told]]] = {}
        for item in dict.fromkeys(told):
            try:
                record = self._believed(item)
            except documents.DocumentError as error:
                self._note("refused", item, str(error))
                continue
            if why := self._foreign(record, item):
                self._set_aside(item, why)
                continue
            chosen.setdefault(record_name(record.host, record.gang), []).append((record, item))
        for path, records in chosen.items():
            self._put(path, records)
        self._outcome.missing = [path for path in self._expected() if not (self._directory / path).exists()]
        return self._outcome

    def _believed(self, item: Told) -> Record:
        """The record. Raises DocumentError where it is none, or another's than its frame says."""
        document = documents.parse(item.text, source=item.source)
        documents.validate(document, "record", source=item.source)
        record = record_from_json(document, source=item.source)
        for what, found, said in (
            ("run", record.run_id, item.run_id),
            ("host", record.host, item.host),
            ("gang", record.gang, item.gang),
        ):
            if found != said:
                raise documents.DocumentError(
                    f"{item.source}: a record of {what} {found or 'none'}, where {said or 'none'} was told"
                )
        return record

    def _foreign(self, record: Record, item: Told) -> str:
        """Why a record is none of this run; empty where it is."""
        plan = self._plan
        if record.run_id != plan.run_id:
            return f"{item.source}: a record of run {record.run_id} (host {record.host}), not of {plan.run_id}"
        if record.nonce != plan.nonce:
            return (
                f"{item.source}: the record of {record.host} was made by another plan of the name {plan.run_id}: "
                "give the hosts the plan.json of this directory"
            )
        names = [host.name for host in plan.hosts]
        if record.host not in names:
            return f"{item.source}: host {record.host} is not in the plan{documents.nearest(record.host, names)}"
        gang = plan.host(record.host).gang
        if record.gang not in ("", gang):
            return (
                f"{item.source}: host {record.host} is not of gang {record.gang} in the plan, but of {gang or 'none'}"
            )
        return ""

    def _put(self, path: str, records: list[tuple[Record, Told]]) -> None:
        """The record that counts, of those found now and the one that is there."""
        there = self._there(path)
        found = [*([there] if there else []), *records]
        attempts = _attempts(found)
        if len(attempts) > 1 and not self._attempt:
            source = records[0][1].source
            self._note(
                "refused",
                records[0][1],
                f"{source}: {path}: {_why_several(attempts)}: --attempt first or last says which counts",
            )
            return
        chosen = attempts[0 if self._attempt == FIRST else -1]
        _, item = chosen[-1]
        if there and item.text == there[1].text:
            self._outcome.known.append(path)
            return
        if not any(pair is there for pair in chosen):
            self._keep(path)
        documents.write_text(self._directory / path, item.text.decode())
        self._outcome.taken.append(path)
        self._journal("taken", item, "")

    def _keep(self, path: str) -> None:
        """Sets aside what lies there, whatever it is, before something else takes its place."""
        try:
            text = documents.read_bytes(self._directory / path)
        except documents.DocumentError:
            return  # nothing, or a link: what that leads to stays
        gang, host = Path(path).parent.name if path.startswith(f"{GANGS}/") else "", Path(path).stem
        item = Told(run_id=self._plan.run_id, host=host, gang=gang, node="", text=text, source=path)
        self._journal("replaced", item, f"kept as {self._kept(item)}")

    def _there(self, path: str) -> tuple[Record, Told] | None:
        """The record that lies there; None where none does, or one that the report would not believe."""
        if not (self._directory / path).exists():
            return None
        try:
            record = record_from_json(documents.read(self._directory / path, "record"))
        except documents.DocumentError:
            return None
        text = (self._directory / path).read_bytes()
        if (record.run_id, record.nonce) != (self._plan.run_id, self._plan.nonce):
            return None
        return record, Told(
            run_id=record.run_id, host=record.host, gang=record.gang, node="", text=text, source=str(path)
        )

    def _set_aside(self, item: Told, why: str) -> None:
        self._note("set aside", item, f"{why}; set aside as {self._kept(item)}")

    def _kept(self, item: Told) -> str:
        """Writes it into quarantine; where it is there."""
        place = self._directory / QUARANTINE / f"{item.sha256[:16]}.json"
        if not place.exists():
            documents.write_text(place, item.text.decode(errors="replace"))
        return f"{QUARANTINE}/{place.name}"

    def _note(self, what: str, item: Told, why: str) -> None:
        self._outcome.problems.append(why)
        self._journal(what, item, why)

    def _journal(self, what: str, item: Told, why: str) -> None:
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

    def _expected(self) -> Iterator[str]:
        together = any(stage.name == GANG for stage in self._plan.stages)
        for host in self._plan.hosts:
            yield record_name(host.name)
            if host.gang and together:
                yield record_name(host.name, host.gang)


def _attempts(found: Iterable[tuple[Record, Told]]) -> list[list[tuple[Record, Told]]]:
    """The records in the order of time, those together of which each is the one before it, grown."""
    attempts: list[list[tuple[Record, Told]]] = []
    for pair in sorted(found, key=lambda pair: (pair[0].began, pair[0].ended)):
        if attempts and _grew(attempts[-1][-1][0], pair[0]):
            attempts[-1].append(pair)
        else:
            attempts.append([pair])
    return attempts


def _grew(old: Record, new: Record) -> bool:
    """Whether `new` is of the same attempt and holds everything that `old` does: nothing was taken back or said otherwise."""
    return (
        (old.began, old.rackproof, old.simulated) == (new.began, new.rackproof, new.simulated)
        and new.snapshots[: len(old.snapshots)] == old.snapshots
        and new.launches[: len(old.launches)] == old.launches
        and new.observations[: len(old.observations)] == old.observations
        and old.soak in (None, new.soak)
        and all(gpu in new.gpus for gpu in old.gpus)
        and old.software.items() <= new.software.items()
    )


def _why_several(attempts: Sequence[Sequence[tuple[Record, Told]]]) -> str:
    begun = sorted({attempt[0][0].began for attempt in attempts})
    if len(begun) > 1:
        return f"the host began {len(begun)} times ({', '.join(begun)}), as where its pod was replaced"
    return (
        f"{len(attempts)} records that began at {begun[0]}, and the later lacks or changes what the earlier holds: "
        "no host that goes on measuring tells that; another may have told it in its name"
    )


def _show(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        return
    sys.stderr.writelines(f"rackproof: {problem}\n" for problem in outcome.problems)
    sys.stdout.writelines(f"took {path}\n" for path in outcome.taken)
    some = ", ".join(outcome.missing[:8]) + (" …" if len(outcome.missing) > 8 else "")
    still = f"{len(outcome.missing)} are missing: {some}" if outcome.missing else "none is missing"
    sys.stdout.write(f"{len(outcome.taken)} records taken, {len(outcome.known)} were there, {still}\n")
