"""Read records from logs, from record files, and from directories of both."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from schemas import documents, frames
from schemas.errors import UsageError
from schemas.frames import FramedRecord
from schemas.run_directory import GANGS, HOSTS

STANDARD_INPUT = "-"
RECORDS = ("record.json", f"{HOSTS}/*.json", f"{GANGS}/*.json", f"{GANGS}/*/*.json")
"""Patterns of the paths of record files, on a host and in a run directory."""
MAX_FILES = 200_000
MAX_LINE_BYTES = 1 << 20
"""Lines of a log are read up to about this length; longer lines are split."""


def read_source(source: str) -> tuple[list[FramedRecord], list[str]]:
    """Return the records in a source, and a text for each problem. Raise UsageError if the source cannot be read.

    Args:
        source: path of a log, a record (`.json`) or a directory, or `-` for a log on standard input.
    """
    if source == STANDARD_INPUT:
        return frames.read(_lines(sys.stdin.buffer.fileno()), source="standard input")
    path = Path(source)
    if path.is_dir():
        return _directory(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UsageError(f"{path}: not a file: give a log, a directory, or - for standard input")
        if path.suffix != ".json":
            return frames.read(_lines(descriptor), source=str(path))
    finally:
        os.close(descriptor)
    return _record(path)


def _directory(directory: Path) -> tuple[list[FramedRecord], list[str]]:
    """Return the records in record files and logs anywhere below a directory, and the problems. Links are not followed."""
    framed: list[FramedRecord] = []
    problems: list[str] = []
    count = 0

    def add_problem(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    for parent, folders, names in os.walk(directory, onerror=add_problem):
        folders.sort()
        for name in sorted(names):
            path = Path(parent) / name
            count += 1
            if count > MAX_FILES:
                return framed, [
                    *problems,
                    f"{directory}: more than {MAX_FILES} files: give only the directory of the run",
                ]
            if path.is_symlink() or not path.is_file():
                continue
            if path.suffix == ".json" and any(path.match(pattern) for pattern in RECORDS):
                records, record_problems = _record(path)
            elif path.suffix == ".log":
                records, record_problems = _log(path)
            else:
                continue
            framed += records
            problems += record_problems
    return framed, problems


def _log(path: Path) -> tuple[list[FramedRecord], list[str]]:
    """Return the records of one log of a directory, and its problems. If the log is unreadable, return only this problem."""
    try:
        return read_source(str(path))
    except UsageError as error:
        return [], [str(error)]


def _record(path: Path) -> tuple[list[FramedRecord], list[str]]:
    """Return the record in a record file, or the problem with the file."""
    try:
        text = documents.read_bytes(path)
        document = documents.checked(text, "record", source=str(path))
    except documents.DocumentError as error:
        return [], [str(error)]
    names = {name: str(document.get(name, "")) for name in ("run_id", "host", "gang")}
    return [FramedRecord(**names, node="", text=text, source=str(path))], []


def _lines(descriptor: int) -> Iterator[str]:
    """Yield the lines of a log. Invalid UTF-8 is replaced, and overlong lines are split."""
    rest = b""
    while chunk := os.read(descriptor, 1 << 20):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", errors="replace")
        if len(rest) > MAX_LINE_BYTES:
            yield rest.decode("utf-8", errors="replace")
            rest = b""
    if rest:
        yield rest.decode("utf-8", errors="replace")
