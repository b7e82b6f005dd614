"""The run directory on a host: the plan as it was given, and the record as it grows."""

from __future__ import annotations

import copy
import functools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec

from agent.sampling.snapshot import now
from schemas import VERSION, documents
from schemas.decode import record_from_json
from schemas.locks import exclusive
from schemas.plans import Plan, PlannedHost, plan_from_json
from schemas.records import Gpu, Launch, Observation, Record, Snapshot, to_json
from schemas.run_directory import RunDirectory, own_record

PLAN_BYTES = 64_000_000
_P = ParamSpec("_P")


def _one_at_a_time(change: Callable[Concatenate[HostRun, _P], Record]) -> Callable[Concatenate[HostRun, _P], Record]:
    """Two that change the record at once, such as a snapshot beside a stage, must not lose what the other wrote."""

    @functools.wraps(change)
    def alone(run: HostRun, /, *arguments: _P.args, **options: _P.kwargs) -> Record:
        with exclusive(run.directory / "record.lock"):
            return change(run, *arguments, **options)

    return alone


def run_directory(path: str) -> Path:
    """For a command line: as it lies now, since the ranks run elsewhere."""
    return Path(path).absolute()


class HostRun:
    """One host's part in one run, kept under `directory`.

    Raises:
        documents.DocumentError: the plan or a record there cannot be believed, or the host is not in the plan.
    """

    def __init__(self, directory: Path, host: str) -> None:
        self.directory = directory
        self.plan: Plan = plan_from_json(documents.read(RunDirectory(directory).plan, "plan", max_bytes=PLAN_BYTES))
        try:
            self.host: PlannedHost = self.plan.host(host)
        except KeyError:
            names = [planned.name for planned in self.plan.hosts]
            raise documents.DocumentError(
                f"host {host} is not in the plan of run {self.plan.run_id}{documents.nearest(host, names)}"
            ) from None

    @classmethod
    def begin(cls, directory: Path, host: str, plan: str) -> HostRun:
        """Takes up the plan (JSON text) in `directory`, which is made, private to its owner.

        Raises:
            documents.DocumentError: the plan is not one, another run's plan lies there, or the directory is not ours.
        """
        document = documents.parse(plan, source="the plan", max_bytes=PLAN_BYTES)
        documents.validate(document, "plan", source="the plan")
        private_directory(directory)
        path = RunDirectory(directory).plan
        if path.exists():
            there = documents.read(path, "plan", max_bytes=PLAN_BYTES)
            if (there["run_id"], there["nonce"]) != (document["run_id"], document["nonce"]):
                raise documents.DocumentError(
                    f"{directory} belongs to run {there['run_id']} of {there['created']}: give this run another run_id"
                )
        else:
            documents.write(path, document)
        return cls(directory, host)

    def of_cell(self, number: int) -> HostRun:
        """The same run and record, with the plan of one cell of its study. Raises KeyError where there is no such cell."""
        found = copy.copy(self)
        found.plan = self.plan.of_cell(number)
        found.host = found.plan.host(self.host.name)
        return found

    def path(self, gang: str = "") -> Path:
        """Where the host record, or the record of its part in `gang`, lies."""
        return own_record(self.directory, gang)

    def record(self, gang: str = "") -> Record:
        """The record as it stands; a new one where there is none yet."""
        path = self.path(gang)
        if not path.exists():
            began = now()
            return Record(
                run_id=self.plan.run_id,
                nonce=self.plan.nonce,
                host=self.host.name,
                began=began,
                ended=began,
                rackproof=VERSION,
                gang=gang,
            )
        record = record_from_json(documents.read(path, "record"), source=str(path))
        if (record.run_id, record.nonce) != (self.plan.run_id, self.plan.nonce):
            raise documents.DocumentError(f"{path}: a record of run {record.run_id}, not of {self.plan.run_id}")
        return record

    @_one_at_a_time
    def add(
        self,
        gang: str = "",
        *,
        snapshots: Iterable[Snapshot] = (),
        gpus: Iterable[Gpu] = (),
        observations: Iterable[Observation] = (),
        launches: Iterable[Launch] = (),
        software: dict[str, str] | None = None,
    ) -> Record:
        """Adds what was seen to the record and writes it in one step.

        What a launch measures takes the place of what an earlier launch of its stage did, which that one keeps.
        """
        record = self.record(gang)
        known = {gpu.index: gpu for gpu in record.gpus} | {gpu.index: gpu for gpu in gpus}
        record = replace(
            self.grown(record, tuple(snapshots), tuple(observations), tuple(launches)),
            ended=now(),
            gpus=tuple(known[index] for index in sorted(known)),
            software={**record.software, **(software or {})},
        )
        document = to_json(record)
        documents.validate(document, "record", source="our own record")
        documents.write(self.path(gang), document)
        return record

    def grown(
        self,
        record: Record,
        snapshots: tuple[Snapshot, ...],
        observations: tuple[Observation, ...],
        launches: tuple[Launch, ...],
    ) -> Record:
        """The record with what was seen."""
        again = {seen.stage for seen in observations} | {launch.stage for launch in launches if launch.ranks}
        before = tuple(seen for seen in record.observations if seen.stage not in again)
        return replace(
            record,
            snapshots=(*record.snapshots, *snapshots),
            observations=(*before, *observations),
            launches=(*_keeping(record, again), *launches),
        )


def _keeping(record: Record, again: set[str]) -> Iterator[Launch]:
    """The record's launches; the last one of each of these stages that had ranks with what the record had of it."""
    last = {launch.stage: place for place, launch in enumerate(record.launches) if launch.ranks}
    for place, launch in enumerate(record.launches):
        if launch.stage in again and last.get(launch.stage) == place:
            theirs = tuple(seen for seen in record.observations if seen.stage == launch.stage)
            launch = replace(launch, observations=(*launch.observations, *theirs))
        yield launch


def private_directory(path: Path) -> None:
    """Makes `path`, or accepts it where it is a real directory that only its owner, us, can write.

    Raises:
        documents.DocumentError: it is a link, somebody else's, or writable by others.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    path.mkdir(exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise documents.DocumentError(f"{path} is not a directory")
    if found.st_uid != os.geteuid():
        raise documents.DocumentError(
            f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()} who runs this"
        )
    if found.st_mode & 0o022:
        raise documents.DocumentError(f"{path} is writable by others: chmod go-w {path}")
