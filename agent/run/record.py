"""The run directory on a host. It has the plan, and the host's records, to which the steps of the run add their results."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec

from schemas import VERSION, documents
from schemas.decode import record_from_json
from schemas.locks import exclusive
from schemas.plans import Plan, PlannedHost
from schemas.records import Gpu, Launch, Observation, Record, Snapshot, to_json
from schemas.run_directory import PLAN_BYTES, RunDirectory, own_record
from schemas.times import utc_now

STANDARD_INPUT = "-"
OWNER_FILE = "host"
"""File with the host's name. Two hosts must not share a run directory, because each would overwrite the other's record."""
_P = ParamSpec("_P")


def _with_record_locked(
    change: Callable[Concatenate[HostRun, _P], Record],
) -> Callable[Concatenate[HostRun, _P], Record]:
    """Lock the record during a change, because two processes, such as a stage and a snapshot, may change it at the same time."""

    @functools.wraps(change)
    def locked(run: HostRun, /, *arguments: _P.args, **options: _P.kwargs) -> Record:
        with exclusive(run.directory / "record.lock"):
            return change(run, *arguments, **options)

    return locked


def read_plan_text(path: str) -> str:
    """Return the text of the file that `--plan` names; `-` means standard input.

    Raises:
        documents.DocumentError: the text is not UTF-8.
        OSError: the file cannot be read.
    """
    try:
        return sys.stdin.read() if path == STANDARD_INPUT else Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise documents.DocumentError(
            f"--plan {path}: not UTF-8 at offset {error.start}: give the plan.json that `rackproof plan` wrote"
        ) from None


def run_directory(path: str) -> Path:
    """Return the absolute form of a path from the command line. The ranks have another working directory."""
    return Path(path).absolute()


class HostRun:
    """One host's part in one run. `directory` is the run directory on this host.

    Raises:
        documents.DocumentError: the plan is invalid, or the host is not in the plan.
    """

    def __init__(self, directory: Path, host: str) -> None:
        self.directory = directory
        self.plan: Plan = RunDirectory(directory).read_plan()
        try:
            self.host: PlannedHost = self.plan.host(host)
        except KeyError:
            names = [planned.name for planned in self.plan.hosts]
            raise documents.DocumentError(
                f"host {host} is not in the plan of run {self.plan.run_id}{documents.nearest(host, names)}"
            ) from None

    @classmethod
    def begin(cls, directory: Path, host: str, plan: str) -> HostRun:
        """Create the run directory (mode 700) if it is missing, and write the plan (JSON text) unless it is already there.

        Raises:
            documents.DocumentError: the plan is invalid, or the directory is unsafe, has the plan of another run, or is used by
                another host.
        """
        document = documents.parse(plan, source="the plan", max_bytes=PLAN_BYTES)
        documents.validate(document, "plan", source="the plan")
        private_directory(directory)
        path = RunDirectory(directory).plan
        if path.exists():
            existing = _read_own(path, "plan", directory, max_bytes=PLAN_BYTES)
            if (existing["run_id"], existing["nonce"]) != (document["run_id"], document["nonce"]):
                raise documents.DocumentError(
                    f"{directory} belongs to run {existing['run_id']}, created {existing['created']}: "
                    "give this run another run_id"
                )
        else:
            documents.write(path, document, mode=documents.SECRET)
        run = cls(directory, host)
        _record_owner(directory, host)
        return run

    def for_cell(self, number: int) -> HostRun:
        """Return this run with the plan of one cell (launch) of its scaling study. Raises KeyError if there is no such cell."""
        run = copy.copy(self)
        run.plan = self.plan.of_cell(number)
        run.host = run.plan.host(self.host.name)
        return run

    def path(self, gang: str = "") -> Path:
        """Return the path of a record of this host.

        A gang is the group of hosts of one multi-node launch. The host has one record for the stages of each gang. If `gang` is
        empty, the record is that of the stages that the host runs alone.
        """
        return own_record(self.directory, gang)

    def record(self, gang: str = "") -> Record:
        """Return the record, which is empty if the file does not exist yet. Raises documents.DocumentError."""
        path = self.path(gang)
        if not path.exists():
            began = utc_now()
            return Record(
                run_id=self.plan.run_id,
                nonce=self.plan.nonce,
                host=self.host.name,
                began=began,
                ended=began,
                rackproof=VERSION,
                gang=gang,
            )
        record = record_from_json(_read_own(path, "record", self.directory), source=str(path))
        if (record.run_id, record.nonce) != (self.plan.run_id, self.plan.nonce):
            raise documents.DocumentError(f"{path}: a record of run {record.run_id}, not of {self.plan.run_id}")
        return record

    @_with_record_locked
    def append(
        self,
        gang: str = "",
        *,
        snapshots: Iterable[Snapshot] = (),
        gpus: Iterable[Gpu] = (),
        observations: Iterable[Observation] = (),
        launches: Iterable[Launch] = (),
        software: Mapping[str, str] | None = None,
        keep_end: bool = False,
    ) -> Record:
        """Add these parts to the record (`merge`), write it atomically, and return it.

        The end of the record becomes the present time. Set `keep_end` to leave it unchanged if nothing was read or measured.
        """
        record = self.record(gang)
        known_gpus = {gpu.index: gpu for gpu in record.gpus} | {gpu.index: gpu for gpu in gpus}
        record = replace(
            self.merge(record, tuple(snapshots), tuple(observations), tuple(launches)),
            ended=record.ended if keep_end else utc_now(),
            gpus=tuple(known_gpus[index] for index in sorted(known_gpus)),
            software={**record.software, **(software or {})},
        )
        document = to_json(record)
        documents.validate(document, "record", source="the new record")
        documents.write(self.path(gang), document)
        return record

    def merge(
        self,
        record: Record,
        snapshots: tuple[Snapshot, ...],
        observations: tuple[Observation, ...],
        launches: tuple[Launch, ...],
    ) -> Record:
        """Return the record with these parts added.

        If a stage is repeated, its new observations replace the old ones. The old ones move into a launch of the stage
        (`_move_observations_into_launches`).
        """
        repeated = {observation.stage for observation in observations}
        repeated |= {launch.stage for launch in launches if launch.ranks}
        kept = tuple(observation for observation in record.observations if observation.stage not in repeated)
        return replace(
            record,
            snapshots=(*record.snapshots, *snapshots),
            observations=(*kept, *observations),
            launches=(*_move_observations_into_launches(record, repeated), *launches),
        )


def _move_observations_into_launches(record: Record, repeated: set[str]) -> Iterator[Launch]:
    """Yield the launches. Add the observations of each repeated stage to the stage's last launch that started ranks."""
    last_index = {launch.stage: index for index, launch in enumerate(record.launches) if launch.ranks}
    for index, launch in enumerate(record.launches):
        if launch.stage in repeated and last_index.get(launch.stage) == index:
            moved = tuple(observation for observation in record.observations if observation.stage == launch.stage)
            launch = replace(launch, observations=(*launch.observations, *moved))
        yield launch


def _read_own(path: Path, schema: str, directory: Path, *, max_bytes: int = documents.MAX_BYTES) -> documents.Json:
    """Return a document that this host wrote to its run directory. Raises DocumentError, with the remedy for a damaged file."""
    try:
        return documents.read(path, schema, max_bytes=max_bytes)
    except documents.DocumentError as error:
        raise documents.DocumentError(
            f"{error}: to measure this host again, delete {directory} on it, and repeat the command"
        ) from None


def _record_owner(directory: Path, host: str) -> None:
    """Write the host's name to OWNER_FILE, if the file is missing.

    Raises:
        documents.DocumentError: the file has the name of another host.
    """
    owner = directory / OWNER_FILE
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=f".{OWNER_FILE}.", encoding="utf-8") as own:
        own.write(host)
        own.flush()
        os.fsync(own.fileno())  # after a power loss, an empty file would look like the name of another host
        with contextlib.suppress(FileExistsError):
            os.link(own.name, owner)  # atomic, also on a network file system
    if (other := owner.read_text(encoding="utf-8")) != host:
        raise documents.DocumentError(
            f"{directory} is in use by host {other} in the same run: each host needs its own state directory; set "
            f"rackproof_state_directory (or --run-dir) to a local directory. If {other} is another name of this machine, "
            "remove one of the two names from the inventory"
        )


def private_directory(path: Path) -> None:
    """Create the directory `path`. Accept an existing directory if it belongs to this user and no other user can write to it.

    Raises:
        documents.DocumentError: the path is a link or a file, belongs to another user, or is writable by other users.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    path.mkdir(exist_ok=True, mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise documents.DocumentError(f"{path} is not a directory: remove it, or give another directory")
    if status.st_uid != os.geteuid():
        raise documents.DocumentError(
            f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}, who runs this command: "
            f"run the command as user {status.st_uid}, or give another directory"
        )
    if status.st_mode & 0o022:
        raise documents.DocumentError(f"{path} is writable by others: chmod go-w {path}")
