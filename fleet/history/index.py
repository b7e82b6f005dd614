"""The index of a history: its runs, and the Parquet files that belong to it.

The index is the only list of files. A writer adds files under new names, then replaces the index atomically, then removes files
that it no longer lists. So a reader always has a complete history, and a writer that is killed leaves only a file without use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas import documents
from schemas.baselines import REAL, REHEARSAL, SIMULATED
from schemas.errors import RunError

SCHEMA = "rackproof.history/1"
INDEX, LOCK = "index.json", "lock"
INDEX_BYTES = 256_000_000
LOCK_WAIT_S, LOCK_POLL_S = 120.0, 0.05
KINDS = (REAL, REHEARSAL, SIMULATED)
DEFAULT = Path("history")
_VERSION = re.compile(r"rackproof\.history/(\d{1,9})")
_MAGIC = b"PAR1"
_OWN = re.compile(r"([0-9a-f]{12}|\d{4}-\d{2})-[0-9a-f]{12}\.parquet")
"""Name of a file of the history: of a run or import, or of a month."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A Parquet file of the history."""

    table: str
    path: str
    """Relative to the directory of the kind."""
    bytes: int
    sha256: str
    runs: tuple[str, ...] = ()
    month: str = ""
    """`2026-05` for a file with the runs of that month; empty for a file of one run."""


@dataclass(kw_only=True)
class Index:
    """The runs, files and imported files of one kind."""

    kind: str
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Nonce -> run."""
    files: list[StoredFile] = field(default_factory=list)
    imports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """SHA-256 of an imported file -> what it is."""
    own: set[str] = field(default_factory=set)
    """Paths of files that were listed, or published by this writer: they may be removed when they are listed no longer."""


def home(directory: Path, kind: str) -> Path:
    """Return the directory of a kind: figures of rehearsals and simulations are never mixed with real ones."""
    return directory / kind


def read_index(directory: Path, kind: str) -> Index | None:
    """Return the index; None if there is no history of this kind.

    Raises:
        RunError: the index is damaged, or a newer version of Rackproof wrote it.
    """
    path = home(directory, kind) / INDEX
    if not path.exists() and not path.is_symlink():
        return None
    try:
        document = documents.parse(
            documents.read_bytes(path, max_bytes=INDEX_BYTES), source=str(path), max_bytes=INDEX_BYTES
        )
        _refuse_other_version(path, document)
        documents.validate(document, "history_index", source=str(path))
        if document["kind"] != kind:
            raise documents.DocumentError(f"{path}: kind {document['kind']}, expected {kind}")
    except documents.DocumentError as error:
        raise RunError(
            f"{error}: restore {path} from a backup, or move {directory} away and import the runs again: "
            "rackproof history import runs/*"
        ) from None
    files = [StoredFile(**{**item, "runs": tuple(item["runs"])}) for item in document["files"]]
    return Index(kind=kind, runs=document["runs"], files=files, imports=document["imports"])


def _refuse_other_version(path: Path, document: Any) -> None:
    schema = document.get("schema", "") if isinstance(document, dict) else ""
    version = _VERSION.fullmatch(schema) if isinstance(schema, str) else None
    if version and schema != SCHEMA:
        raise RunError(
            f"{path}: written by another version of Rackproof ({schema}, this version reads {SCHEMA}): use that version, "
            "or give another directory with --history"
        )


def write_index(directory: Path, index: Index) -> None:
    """Replace the index atomically."""
    files = []
    for item in index.files:
        entry: dict[str, Any] = {**vars(item), "runs": list(item.runs)}
        files.append(entry if item.month else {key: value for key, value in entry.items() if key != "month"})
    document = {"schema": SCHEMA, "kind": index.kind, "runs": index.runs, "files": files, "imports": index.imports}
    documents.validate(document, "history_index", source="the index of the history")
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    documents.write_text(home(directory, index.kind) / INDEX, text + "\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which stays. The kernel releases it if this process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{path}: another process has changed the history for {LOCK_WAIT_S:g} s: try again when it ends"
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writer(directory: Path, kind: str) -> Iterator[Index]:
    """Hold the lock of the history while it changes: a second writer waits, at most LOCK_WAIT_S.

    Yield the index, which the caller may change.

    The index is written when the block ends without an exception; then the files that it listed before and lists no longer are
    removed. Other files are never touched: they may belong to somebody else, or to an index that was lost.

    Raises:
        RunError: as in `read_index`, or the index is lost, or another process does not release the lock.
        OSError: the directory cannot be written.
    """
    place = home(directory, kind)
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place / LOCK):
        index = read_index(directory, kind)
        if index is None and _has_lost_its_index(place):
            raise RunError(
                f"{place}: index.json is missing, but files of the history are there: restore it from a backup, or move the "
                "directory away and import the runs again"
            )
        index = index or Index(kind=kind)
        index.own |= {item.path for item in index.files}
        yield index
        write_index(directory, index)
        for path in index.own - {item.path for item in index.files}:
            (place / path).unlink(missing_ok=True)


def _has_lost_its_index(place: Path) -> bool:
    """Return whether there are files of a month or of several runs. Those of one run may be from a killed first writer."""
    found = {match[1] for path in place.glob("*/*.parquet") if (match := _OWN.fullmatch(path.name))}
    return len(found) > 1 or any("-" in name for name in found)


def stored(place: Path, path: Path, table: str, runs: tuple[str, ...], month: str = "") -> StoredFile:
    """Return the entry of a file that was just written."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return StoredFile(
        table=table,
        path=str(path.relative_to(place)),
        bytes=path.stat().st_size,
        sha256=digest,
        runs=runs,
        month=month,
    )


def damage(place: Path, item: StoredFile, *, complete: bool = False) -> str:
    """Return what is wrong with a file; empty if nothing is. `complete` compares its checksum too, which reads all of it."""
    path = place / item.path
    try:
        with path.open("rb") as file:
            if path.is_symlink() or file.read(4) != _MAGIC:
                return "not a Parquet file"
            size = file.seek(0, 2)
            if size != item.bytes:
                return f"{size} bytes, expected {item.bytes}: it was cut off or changed"
            if complete:
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return "" if digest == item.sha256 else "its content changed"
    except OSError as error:
        return error.strerror or str(error)
    return ""
