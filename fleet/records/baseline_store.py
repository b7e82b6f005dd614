"""Baselines on disk: a directory with a file for each GPU, by its serial, and for each host; and its copy in a run directory.

The copy is made when the plan is, and its digest stands in the plan: whatever is accepted later, the run is judged again by what
it was compared with then.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from fleet.judge.baseline import identity
from schemas import documents
from schemas.baselines import GPU, HOST, REAL, REHEARSAL, SIMULATED, HostBaseline, Kept, PlannedBaseline, kept_from_json
from schemas.errors import RunError, UsageError
from schemas.plans import Plan
from schemas.records import Gpu, to_json
from schemas.run_directory import is_run

DEFAULT = Path("baselines")
HOSTS, GPUS = "hosts", "gpus"
COPY, INDEX = "baseline", "index.json"
INDEX_SCHEMA = "rackproof.baseline_index/1"
INDEX_BYTES = 64_000_000
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def kind_of(plan: Plan) -> str:
    """The kind of baseline that a run can be taken into, and compared with."""
    return SIMULATED if plan.simulated else REHEARSAL if plan.rehearsal else REAL


def room(directory: Path, kind: str) -> Path:
    """Where baselines of a kind are: what no GPU showed lies apart."""
    return directory if kind == REAL else directory / kind


def path_of(part: str, name: str) -> str:
    """The file of a part within its room; a serial that is no plain name goes by its digest."""
    plain = bool(_PLAIN.fullmatch(name))
    stem = name if plain else f"x-{hashlib.sha256(name.encode()).hexdigest()[:40]}"
    return f"{GPUS if part == GPU else HOSTS}/{stem}.json"


def write(directory: Path, kept: Kept) -> None:
    """Writes one part's baseline, in one step."""
    document = json.loads(json.dumps(to_json(kept)))
    documents.validate(document, "baseline", source=f"the baseline of {kept.id}")
    documents.write(room(directory, kept.kind) / path_of(kept.part, kept.id), document)


def read(directory: Path, kind: str, part: str, name: str) -> Kept | None:
    """A part's baseline, or None where there is none. Raises DocumentError where it cannot be believed."""
    path = room(directory, kind) / path_of(part, name)
    if not path.exists() and not path.is_symlink():
        return None
    return _believed(documents.read(path, "baseline"), path, kind, part, name)


def _believed(document: documents.Json, path: Path, kind: str, part: str, name: str) -> Kept:
    kept = kept_from_json(document)
    for what, found, wanted in (("kind", kept.kind, kind), ("part", kept.part, part), ("id", kept.id, name)):
        if found != wanted:
            raise documents.DocumentError(f"{path}: {what} {found}, expected {wanted}")
    return kept


def everything(directory: Path, kind: str) -> Iterator[Kept]:
    """Every baseline of a kind: hosts first, each by name. Raises RunError where one cannot be believed."""
    for folder, part in ((HOSTS, HOST), (GPUS, GPU)):
        for path in sorted((room(directory, kind) / folder).glob("*.json")):
            try:
                document = documents.read(path, "baseline")
                yield _believed(document, path, kind, part, str(document["id"]))
            except documents.DocumentError as error:
                raise RunError(f"{error}: remove it, or accept a run of that part again") from None


def of_host(directory: Path, kind: str, host: str, gpus: Iterable[Gpu] = ()) -> HostBaseline:
    """The accepted record of a host, of the GPUs that were in it, and of those that are in it now."""
    try:
        kept = read(directory, kind, HOST, host)
        names = dict.fromkeys(map(identity, (*(kept.gpus if kept else ()), *gpus)))
        parts = {name: read(directory, kind, GPU, name) for name in names if name}
    except documents.DocumentError as error:
        return HostBaseline(problem=str(error))
    return HostBaseline(host=kept, gpus={name: part for name, part in parts.items() if part})


# --- the copy in a run directory


def freeze(directory: Path, kind: str, hosts: Iterable[str], run_dir: Path | None) -> PlannedBaseline:
    """Copies what belongs to these hosts into the run directory, and returns what the plan says of it.

    Without a run directory nothing is copied.

    Raises:
        UsageError: there is no such directory, nothing of these hosts in it, or a file that cannot be believed.
    """
    home = room(directory, kind)
    if not home.is_dir():
        raise UsageError(
            f"rackproof_baseline {directory}: no baseline of this kind ({kind}) in {Path.cwd()}: accept a run first, "
            f"rackproof baseline accept RUN --baseline {directory}; or give the whole path of the one there is"
        )
    files: dict[str, bytes] = {}
    for host in hosts:
        content = _content(home / path_of(HOST, host))
        if content is None:
            continue  # the judge says so of each host
        files[path_of(HOST, host)] = content
        kept = _parsed(content, home / path_of(HOST, host))
        for name in map(identity, kept.gpus):
            gpu = _content(home / path_of(GPU, name)) if name else None
            if gpu is not None:
                files[path_of(GPU, name)] = gpu
    index = {"schema": INDEX_SCHEMA, "kind": kind, "files": {name: _digest(files[name]) for name in sorted(files)}}
    text = json.dumps(index, indent=1) + "\n"
    if run_dir is not None:
        for name, content in files.items():
            documents.write_text(run_dir / COPY / name, content.decode(), durable=False)
        documents.write_text(run_dir / COPY / INDEX, text)
    return PlannedBaseline(directory=str(directory), digest=_digest(text.encode()))


def planned(name: object, rehearsal: bool, hosts: Iterable[str], run_dir: Path | None) -> PlannedBaseline | None:
    """What the plan says of the baseline that the inventory names; a run that is resumed keeps the copy that it has.

    Raises UsageError as `freeze`.
    """
    if not name:
        return None
    directory = Path(str(name))
    copied = run_dir / COPY / INDEX if run_dir else None
    if run_dir and copied and copied.exists() and is_run(run_dir):
        return PlannedBaseline(directory=str(directory), digest=_digest(_content(copied) or b""))
    return freeze(directory, REHEARSAL if rehearsal else REAL, hosts, run_dir)


def _content(path: Path) -> bytes | None:
    """A regular file's content; None where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{path}: not a regular file")
        return file.read(documents.MAX_BYTES + 1)


def _parsed(content: bytes, path: Path) -> Kept:
    try:
        document = documents.parse(content, source=str(path))
        documents.validate(document, "baseline", source=str(path))
    except documents.DocumentError as error:
        raise UsageError(f"{error}: remove it, or accept a run of that part again") from None
    return kept_from_json(document)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Copy:
    """The baseline in a run directory, as the run's plan names it."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self._home = run_dir / COPY
        self._kind = kind_of(plan)
        self._files: dict[str, str] = {}
        self._problem = ""
        if plan.baseline is not None:
            self._open(plan.baseline)

    def _open(self, planned: PlannedBaseline) -> None:
        path = self._home / INDEX
        try:
            index = documents.read(path, "baseline_index", max_bytes=INDEX_BYTES)
            if _digest(path.read_bytes()) != planned.digest or index["kind"] != self._kind:
                raise documents.DocumentError("it is not the one that the plan names")
            self._files = index["files"]
        except (documents.DocumentError, OSError) as error:
            told = str(error).replace(f"{path}: ", "")
            self._problem = f"the run's copy of the baseline cannot be believed: {COPY}/{INDEX}: {told}"

    def of_host(self, host: str, gpus: Iterable[Gpu]) -> HostBaseline:
        """The accepted record of a host, of the GPUs that were in it, and of those that are in it now."""
        if self._problem:
            return HostBaseline(problem=self._problem)
        try:
            kept = self._read(HOST, host)
            names = dict.fromkeys(map(identity, (*(kept.gpus if kept else ()), *gpus)))
            parts = {name: self._read(GPU, name) for name in names if name}
        except documents.DocumentError as error:
            return HostBaseline(problem=f"the run's copy of the baseline cannot be believed: {error}")
        return HostBaseline(host=kept, gpus={name: part for name, part in parts.items() if part})

    def _read(self, part: str, name: str) -> Kept | None:
        file = path_of(part, name)
        if file not in self._files:
            return None
        path = self._home / file
        try:
            content = _content(path)
        except UsageError as error:
            raise documents.DocumentError(str(error)) from None
        if content is None or _digest(content) != self._files[file]:
            raise documents.DocumentError(
                f"{COPY}/{file}: {'missing' if content is None else 'changed since the plan'}"
            )
        document = documents.parse(content, source=str(path))
        documents.validate(document, "baseline", source=str(path))
        return _believed(document, path, self._kind, part, name)
