"""`SHA256SUMS`: what every file of a run holds, as `sha256sum --check` reads it; and which files are left out, and why."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from schemas.errors import RunError

SUMS, SIGNATURE, STATEMENT = "SHA256SUMS", "SHA256SUMS.sig", "signed.json"
LEFT_OUT: Mapping[str, str] = {
    SUMS: "the sums themselves; the signature covers them",
    SIGNATURE: "the signature",
    "lock.json": "who carries out the run at this moment",
    "journal.jsonl": "who began, resumed and reported the run; it grows with each report",
    "metrics": "data of the run's Prometheus, which goes on compacting it",
    "agent": "the wheel that was installed on the hosts; every record names its version",
    "rma": "made from the records by rackproof rma, at any time",
    "pages": "made from the records by rackproof report --host, at any time",
}
"""Name of a file or directory in the run directory -> why no sum is taken of it."""
MOST_BYTES = 100_000_000
_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}")
"""A file that was being written, as we name such files."""
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def sums(directory: Path) -> dict[str, str]:
    """Path within the run -> its SHA-256, sorted; without LEFT_OUT.

    Raises:
        RunError: something in the run is a link, no regular file, was left half written, or has a name that no line can hold.
    """
    found = {}
    for path in sorted(files(directory)):
        if not path.isprintable() or "\\" in path:
            raise RunError(f"{path!r}: a name that cannot be signed: rename or remove the file")
        if _TEMPORARY.fullmatch(Path(path).name):
            raise RunError(
                f"{directory / path}: left by somebody who was cut off while writing a file: remove or rename it"
            )
        found[path] = digest(directory / path)
    return found


def files(directory: Path) -> Iterator[str]:
    """Path within the run of everything in it that is no directory; without LEFT_OUT."""
    for top in directory.iterdir():
        if top.name not in LEFT_OUT:
            yield from _below(top, directory)


def _below(path: Path, directory: Path) -> Iterator[str]:
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            yield from _below(entry, directory)
    else:
        yield str(path.relative_to(directory))


def digest(path: Path) -> str:
    """SHA-256 of a regular file. Raises RunError where it is a link, a FIFO or cannot be read."""
    found = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RunError(f"{path}: not a regular file, which cannot be signed: remove it")
            while block := file.read(1 << 20):
                found.update(block)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}: no sum can be taken of it") from None
    return found.hexdigest()


def as_text(found: Mapping[str, str]) -> str:
    """The sums as `sha256sum` writes them."""
    return "".join(f"{hashed}  {path}\n" for path, hashed in found.items())


def from_text(text: str) -> dict[str, str]:
    """Path -> sum. Raises RunError where a line is none, or a path stands twice."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if not match or match[2] in found:
            raise RunError(f"{SUMS} line {number}: {'the path stands twice' if match else 'not a sum and a path'}")
        found[match[2]] = match[1]
    return found


def read(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file of at most that size. Raises RunError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = file.read(most + 1)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    if len(found) > most:
        raise RunError(f"{path}: more than {most} bytes")
    return found
