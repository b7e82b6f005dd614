"""Compute, write and read `SHA256SUMS`, the checksums of the files of a run in the format of `sha256sum`."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleet import progress
from fleet.report.stream import is_temporary
from schemas.errors import RunError

SUMS, SIGNATURE, STATEMENT = "SHA256SUMS", "SHA256SUMS.sig", "signed.json"
UNSIGNED_FILES: Mapping[str, str] = {
    SUMS: "the checksums themselves; the signature covers them",
    SIGNATURE: "the signature of the checksums",
    "lock.json": "which process has locked the run; the file changes while the run is in progress",
    "journal.jsonl": "starts, resumptions and reports of the run; every later report adds a line",
    "metrics": "data of the run's Prometheus server, which keeps rewriting it",
    "agent": "the wheel that was installed on the hosts; every record states the version of the wheel",
    "rma": "documents that `rackproof rma` writes from the records, also after signing",
    "pages": "pages that `rackproof report --host` writes from the records, also after signing",
}
"""Files and directories of a run that have no checksum: name -> what it is, and why it has no checksum."""
MAX_SUMS_BYTES = 100_000_000
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def hash_files(directory: Path) -> dict[str, str]:
    """Return path within the run directory -> SHA-256 of the file, sorted by path; without UNSIGNED_FILES.

    Raises:
        RunError: a file is a link or not regular, cannot be read, is left over from an interrupted write, or has a name with a
            backslash or a character that is not printable.
    """
    by_path = {}
    paths = sorted(files(directory))
    progress.begin("hashing files", len(paths))
    for path in paths:
        progress.advance()
        if not path.isprintable() or "\\" in path:
            raise RunError(f"{path!r}: a file with this name cannot be signed: rename or remove it")
        if is_temporary(Path(path).name):
            raise RunError(f"{directory / path}: temporary file of an interrupted write: remove or rename it")
        by_path[path] = digest(directory / path)
    return by_path


def files(directory: Path) -> Iterator[str]:
    """Yield the path of every file in the run directory, relative to it; without UNSIGNED_FILES."""
    for entry in directory.iterdir():
        if entry.name not in UNSIGNED_FILES:
            yield from _files_in(entry, directory)


def _files_in(path: Path, directory: Path) -> Iterator[str]:
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            yield from _files_in(entry, directory)
    else:
        yield str(path.relative_to(directory))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raise RunError if it is not a regular file (a link, a FIFO) or cannot be read."""
    checksum = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RunError(f"{path}: not a regular file, so it cannot be signed: remove it")
            while block := file.read(1 << 20):
                checksum.update(block)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}: its checksum cannot be computed") from None
    return checksum.hexdigest()


def format_sums(checksums: Mapping[str, str]) -> str:
    """Return the checksums in the format of `sha256sum`."""
    return "".join(f"{checksum}  {path}\n" for path, checksum in checksums.items())


def parse_sums(text: str) -> dict[str, str]:
    """Return path -> checksum. Raise RunError if a line is invalid or a path is listed twice."""
    checksums: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if not match or match[2] in checksums:
            raise RunError(f"{SUMS} line {number}: {'duplicate path' if match else 'not a checksum and a path'}")
        checksums[match[2]] = match[1]
    return checksums


def read(path: Path) -> bytes:
    """Return the content of a file. Raise RunError if it is larger than MAX_SUMS_BYTES, is a link or cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(MAX_SUMS_BYTES + 1)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_SUMS_BYTES:
        raise RunError(f"{path}: more than {MAX_SUMS_BYTES} bytes")
    return content
