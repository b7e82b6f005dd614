"""The index of a history: the list of its runs, of its Parquet files, and of the imported files of other tools.

A file that the index does not list does not belong to the history. A writer (`commit.py`) adds files under new names, then adds
the next version of the index atomically, then removes the files that this version no longer lists. So the newest version of the
index lists only complete files.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas import documents
from schemas.baselines import REAL, REHEARSAL, SIMULATED
from schemas.errors import RunError

VERSION = 1
SCHEMA = f"rackproof.history/{VERSION}"
"""Increase VERSION for a change that older versions of Rackproof would misread, but not for a new table or key: older versions
refuse an index with an unknown table or key (`_newer_names`)."""
INDEX = "index.json"
"""File name of the index. Version N is in the directory `index-N`; the highest N is the current version. Beside these directories
is a copy of the current version."""
INDEX_BYTES = 256_000_000
VANISHED = 20
"""Maximum number of attempts to read the newest version: a writer may replace it before it is read."""
KINDS = (REAL, REHEARSAL, SIMULATED)
DEFAULT = Path("history")
_VERSION = re.compile(r"rackproof\.history/(\d{1,9})")
_MAGIC = b"PAR1"
VERSION_PREFIX = "index-"
_VERSION_DIRECTORY = re.compile(rf"{VERSION_PREFIX}([1-9]\d{{0,15}})")


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A Parquet file of the history."""

    table: str
    path: str
    """Relative to the directory that `home` returns."""
    bytes: int
    sha256: str
    runs: tuple[str, ...] = ()
    """Nonces of the runs in the file. In the table `imported`: the first 32 digits of the SHA-256 of the imported file."""
    month: str = ""
    """`2026-05` for a file with the runs of that month; empty for a file of one run or of one imported file."""


@dataclass(kw_only=True)
class Index:
    """The runs, Parquet files and imported files of the history of one kind."""

    kind: str
    """One of KINDS."""
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Nonce of a run -> its entry (history_index.schema.json)."""
    files: list[StoredFile] = field(default_factory=list)
    imports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """SHA-256 of an imported file -> description of the file."""
    generation: int = 0
    """Number of this version of the index. Each change of the history adds 1."""
    published: set[str] = field(default_factory=set)
    """Paths of the Parquet files that were added since this object was read. This set is not stored."""


def home(directory: Path, kind: str) -> Path:
    """Return the directory of one kind. Figures of rehearsals and simulated runs are never mixed with those of real runs."""
    return directory / kind


def read_index(directory: Path, kind: str) -> Index | None:
    """Return the newest index; None if there is no history of this kind.

    Raises:
        RunError: the index is damaged, another version of Rackproof wrote it, or other processes keep changing it.
    """
    place = home(directory, kind)
    has_copy = (place / INDEX).exists() or (place / INDEX).is_symlink()
    copy = read_version(directory, kind, place / INDEX) if has_copy else None
    for _ in range(VANISHED):
        newest = max(versions(place), default=0)
        if newest <= (copy.generation if copy else 0):
            return copy
        path = version_directory(place, newest) / INDEX
        try:
            return read_version(directory, kind, path)
        except RunError:
            if path.exists():  # else a writer has replaced this version meanwhile: try again
                raise
    raise RunError(f"{place}: other processes keep changing the history: try again later")


def versions(place: Path) -> list[int]:
    """Return the numbers of the versions of the index that exist in `place`, the directory that `home` returns."""
    return [
        int(found[1]) for path in place.glob(f"{VERSION_PREFIX}*") if (found := _VERSION_DIRECTORY.fullmatch(path.name))
    ]


def version_directory(place: Path, number: int) -> Path:
    """Return the directory with a version of the index."""
    return place / f"{VERSION_PREFIX}{number}"


def read_version(directory: Path, kind: str, path: Path) -> Index:
    """Return the version of the index that is in the file `path`. Raises RunError, as `read_index` does."""
    try:
        document = documents.parse(
            documents.read_bytes(path, max_bytes=INDEX_BYTES), source=str(path), max_bytes=INDEX_BYTES
        )
        _refuse_other_version(path, document)
        _validate(path, document)
        if document["kind"] != kind:
            raise documents.DocumentError(f"{path}: kind {document['kind']}, expected {kind}")
    except documents.DocumentError as error:
        raise RunError(
            f"{error}: restore {path} from a backup, or move {directory} away and import the runs again: "
            "rackproof history import runs/*"
        ) from None
    files = [StoredFile(**{**item, "runs": tuple(item["runs"])}) for item in document["files"]]
    return Index(
        kind=kind,
        runs=document["runs"],
        files=files,
        imports=document["imports"],
        generation=document.get("generation", 0),
    )


def _validate(path: Path, document: Any) -> None:
    try:
        documents.validate(document, "history_index", source=str(path))
    except documents.DocumentError:
        if newer := _newer_names(document):
            raise RunError(_written_by_newer(path, newer)) from None
        raise


def _refuse_other_version(path: Path, document: Any) -> None:
    schema = document.get("schema", "") if isinstance(document, dict) else ""
    version = _VERSION.fullmatch(schema) if isinstance(schema, str) else None
    if version and int(version[1]) > VERSION:
        raise RunError(_written_by_newer(path, f"{schema}, this version reads {SCHEMA}"))
    if version and schema != SCHEMA:
        raise RunError(
            f"{path}: written by another version of Rackproof ({schema}, this version reads {SCHEMA}): use that version, "
            "or give another directory with --history"
        )


def _written_by_newer(path: Path, why: str) -> str:
    return (
        f"{path}: written by a newer version of Rackproof ({why}): update Rackproof. The history is not damaged; to use this "
        "version, give another directory with --history"
    )


def _newer_names(document: Any) -> str:
    """Return a message about the first unknown key or table in the index; empty if there is none.

    Only a newer version of Rackproof writes unknown keys or tables. A damaged file is not valid JSON, or lacks keys.
    """
    for fault in documents.faults(document, "history_index"):
        is_table = fault.validator == "enum" and list(fault.absolute_path)[-1:] == ["table"]
        if is_table or fault.validator == "additionalProperties":
            return documents.explain(fault)
    return ""


def index_text(index: Index, generation: int) -> str:
    """Return the content of the index file of version `generation`."""
    files = []
    for item in index.files:
        entry: dict[str, Any] = {**vars(item), "runs": list(item.runs)}
        files.append(entry if item.month else {key: value for key, value in entry.items() if key != "month"})
    document = {
        "schema": SCHEMA,
        "kind": index.kind,
        "generation": generation,
        "runs": index.runs,
        "files": files,
        "imports": index.imports,
    }
    documents.validate(document, "history_index", source="the index of the history")
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")) + "\n"


def stored(place: Path, path: Path, table: str, runs: tuple[str, ...], month: str = "") -> StoredFile:
    """Return the index entry of the Parquet file `path`, which was just written to a directory below `place`."""
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
    """Return what is wrong with a file, or an empty text. `complete`: also read the whole file, and compare its checksum."""
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
