"""Store baselines (figures from accepted runs) on disk, and copy them into run directories.

Each part, which is a host or a GPU, has one file, named by the host name or by the identity of the GPU: its serial, or its UUID
if it has no serial of its own.

The copy in a run directory is called the snapshot. It is made together with the plan, and the plan contains the digest of the
snapshot's index. So judging the run again later uses the same baselines, even if other runs were accepted since.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fleet.judge.gpu_identity import identities, identity, shared_serials
from schemas import documents
from schemas.baselines import (
    GPU,
    HOST,
    REAL,
    REHEARSAL,
    SIMULATED,
    HostBaseline,
    PartBaseline,
    PlannedBaseline,
    part_baseline_from_json,
)
from schemas.errors import RunError, UsageError
from schemas.plans import Plan
from schemas.records import Gpu, to_json
from schemas.run_directory import is_run

DEFAULT = Path("baselines")
HOSTS, GPUS = "hosts", "gpus"
SNAPSHOT, INDEX = "baseline", "index.json"
INDEX_SCHEMA = "rackproof.baseline_index/1"
INDEX_BYTES = 64_000_000
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def kind_of(plan: Plan) -> str:
    """Return the kind of baseline for a run. The run is compared only with baselines of this kind, and added only to them."""
    return SIMULATED if plan.simulated else REHEARSAL if plan.rehearsal else REAL


def kind_directory(directory: Path, kind: str) -> Path:
    """Return the directory for a kind of baseline: rehearsals and simulations have subdirectories of their own."""
    return directory if kind == REAL else directory / kind


def path_of(part: str, name: str) -> str:
    """Return the file of a part, relative to the directory of its kind. If `name` is not a safe file name, it is hashed."""
    stem = name if _SAFE_NAME.fullmatch(name) else f"x-{hashlib.sha256(name.encode()).hexdigest()[:40]}"
    return f"{GPUS if part == GPU else HOSTS}/{stem}.json"


def write(directory: Path, baseline: PartBaseline) -> None:
    """Write the baseline of one part, atomically."""
    document = json.loads(json.dumps(to_json(baseline)))
    documents.validate(document, "baseline", source=f"the baseline of {baseline.id}")
    documents.write(kind_directory(directory, baseline.kind) / path_of(baseline.part, baseline.id), document)


def read(directory: Path, kind: str, part: str, name: str) -> PartBaseline | None:
    """Return the baseline of a part; None if the part has no baseline. Raise DocumentError if the file is invalid."""
    path = kind_directory(directory, kind) / path_of(part, name)
    if not path.exists() and not path.is_symlink():
        return None
    return _verified_baseline(documents.read(path, "baseline"), path, kind, part, name)


def _verified_baseline(document: documents.Json, path: Path, kind: str, part: str, name: str) -> PartBaseline:
    """Return the baseline in a document. Raise DocumentError if its kind, part or id is not the one expected."""
    baseline = part_baseline_from_json(document)
    for key, actual, expected in (
        ("kind", baseline.kind, kind),
        ("part", baseline.part, part),
        ("id", baseline.id, name),
    ):
        if actual != expected:
            raise documents.DocumentError(f"{path}: {key} {actual}, expected {expected}")
    return baseline


def all_baselines(directory: Path, kind: str) -> Iterator[PartBaseline]:
    """Yield every baseline of a kind: those of hosts, then those of GPUs, each in the order of their file names.

    Raises:
        RunError: a file is invalid.
    """
    for folder, part in ((HOSTS, HOST), (GPUS, GPU)):
        for path in sorted((kind_directory(directory, kind) / folder).glob("*.json")):
            try:
                document = documents.read(path, "baseline")
                yield _verified_baseline(document, path, kind, part, str(document["id"]))
            except documents.DocumentError as error:
                raise RunError(f"{error}: remove the file, or accept a run of that host or GPU again") from None


def of_host(directory: Path, kind: str, host: str, gpus: Iterable[Gpu] = ()) -> HostBaseline:
    """Return the baselines of a host, of the GPUs in its baseline, and of the given GPUs.

    If a file is invalid, the result has no baseline, only the problem.
    """
    try:
        return _host_baseline(lambda part, name: read(directory, kind, part, name), host, gpus)
    except documents.DocumentError as error:
        return HostBaseline(problem=str(error))


def _host_baseline(
    read_part: Callable[[str, str], PartBaseline | None], host: str, gpus: Iterable[Gpu]
) -> HostBaseline:
    """Return the baselines of a host, of the GPUs in its baseline, and of the given GPUs, as `read_part` reads them."""
    baseline = read_part(HOST, host)
    accepted, present = baseline.gpus if baseline else (), tuple(gpus)
    shared = shared_serials(accepted) | shared_serials(present)
    names = dict.fromkeys(identity(gpu, shared) for gpu in (*accepted, *present))
    parts = {name: part for name in names if name and (part := read_part(GPU, name))}
    return HostBaseline(host=baseline, gpus=parts)


# The snapshot in a run directory


def snapshot_baseline(directory: Path, kind: str, hosts: Iterable[str], run_dir: Path | None) -> PlannedBaseline:
    """Make the snapshot: copy the baselines of `hosts`, and those of the GPUs listed in them, into the run directory.

    Return a reference to the snapshot, for the plan. If `run_dir` is None, nothing is copied.

    Raises:
        UsageError: the directory has no baseline of this kind, or a file in it is invalid.
    """
    home = kind_directory(directory, kind)
    if not home.is_dir():
        raise UsageError(
            f"rackproof_baseline {directory}: no baseline of kind {kind} (current directory: {Path.cwd()}): accept a run first "
            f"(rackproof baseline accept RUN --baseline {directory}), or give the absolute path of an existing baseline"
        )
    files: dict[str, bytes] = {}
    for host in hosts:
        content = _read_regular_file(home / path_of(HOST, host))
        if content is None:
            continue  # the judge reports hosts without a baseline
        files[path_of(HOST, host)] = content
        baseline = _parse_baseline(content, home / path_of(HOST, host))
        for name in filter(None, identities(baseline.gpus).values()):
            gpu_content = _read_regular_file(home / path_of(GPU, name))
            if gpu_content is not None:
                files[path_of(GPU, name)] = gpu_content
    index = {"schema": INDEX_SCHEMA, "kind": kind, "files": {name: _digest(files[name]) for name in sorted(files)}}
    text = json.dumps(index, indent=1) + "\n"
    if run_dir is not None:
        for name, content in files.items():
            documents.write_text(run_dir / SNAPSHOT / name, content.decode(), durable=False)
        documents.write_text(run_dir / SNAPSHOT / INDEX, text)
    return PlannedBaseline(directory=str(directory), digest=_digest(text.encode()))


def planned_baseline(
    name: object, rehearsal: bool, hosts: Iterable[str], run_dir: Path | None
) -> PlannedBaseline | None:
    """Make the snapshot from the directory `name` (rackproof_baseline). Return a reference to the snapshot, for the plan.

    A resumed run keeps its first snapshot. If `name` is empty, return None.

    Raises:
        UsageError: as for `snapshot_baseline`.
    """
    if not name:
        return None
    directory = Path(str(name))
    index = run_dir / SNAPSHOT / INDEX if run_dir else None
    if run_dir and index and index.exists() and is_run(run_dir):
        return PlannedBaseline(directory=str(directory), digest=_digest(_read_regular_file(index) or b""))
    return snapshot_baseline(directory, REHEARSAL if rehearsal else REAL, hosts, run_dir)


def _read_regular_file(path: Path) -> bytes | None:
    """Return the content of a file; None if it does not exist. Raise UsageError if it is unreadable or not a regular file."""
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


def _parse_baseline(content: bytes, path: Path) -> PartBaseline:
    try:
        document = documents.parse(content, source=str(path))
        documents.validate(document, "baseline", source=str(path))
    except documents.DocumentError as error:
        raise UsageError(f"{error}: remove the file, or accept a run of that host or GPU again") from None
    return part_baseline_from_json(document)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class BaselineSnapshot:
    """The snapshot of the baselines in a run directory. It is invalid if the digest of its index is not the one in the plan."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self._home = run_dir / SNAPSHOT
        self._kind = kind_of(plan)
        self._digests: dict[str, str] = {}
        """Path of a file within the snapshot -> its SHA-256."""
        self._problem = ""
        if plan.baseline is not None:
            self._read_index(plan.baseline)

    def _read_index(self, planned: PlannedBaseline) -> None:
        path = self._home / INDEX
        try:
            index = documents.read(path, "baseline_index", max_bytes=INDEX_BYTES)
            if _digest(path.read_bytes()) != planned.digest or index["kind"] != self._kind:
                raise documents.DocumentError("not the snapshot that the plan refers to")
            self._digests = index["files"]
        except (documents.DocumentError, OSError) as error:
            reason = str(error).replace(f"{path}: ", "")
            self._problem = f"the run's snapshot of the baseline is invalid: {SNAPSHOT}/{INDEX}: {reason}"

    def of_host(self, host: str, gpus: Iterable[Gpu]) -> HostBaseline:
        """Return the baselines of a host, of the GPUs in its baseline, and of the given GPUs.

        If the snapshot is invalid, the result has no baseline, only the problem.
        """
        if self._problem:
            return HostBaseline(problem=self._problem)
        try:
            return _host_baseline(self._read, host, gpus)
        except documents.DocumentError as error:
            return HostBaseline(problem=f"the run's snapshot of the baseline is invalid: {error}")

    def _read(self, part: str, name: str) -> PartBaseline | None:
        """Return the baseline of a part; None if the snapshot has none. Raise DocumentError if its file is missing or changed."""
        file = path_of(part, name)
        if file not in self._digests:
            return None
        path = self._home / file
        try:
            content = _read_regular_file(path)
        except UsageError as error:
            raise documents.DocumentError(str(error)) from None
        if content is None or _digest(content) != self._digests[file]:
            raise documents.DocumentError(
                f"{SNAPSHOT}/{file}: {'missing' if content is None else 'changed since the plan was made'}"
            )
        document = documents.parse(content, source=str(path))
        documents.validate(document, "baseline", source=str(path))
        return _verified_baseline(document, path, self._kind, part, name)
