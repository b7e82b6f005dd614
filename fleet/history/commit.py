"""Change the index of a history, so that no writer overwrites what another writer added.

Writers wait for each other with a file lock. That lock is not enough: on a network file system it may be local to each machine
(NFS with `nolock`), or missing. So a writer commits version N + 1 of the index by renaming a temporary directory to
`index-<N + 1>`. On every file system this fails if another writer has created that version. A writer whose rename fails reads
that version and makes its change again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from fleet.history.index import (
    INDEX,
    VERSION_PREFIX,
    Index,
    home,
    index_text,
    read_index,
    read_version,
    version_directory,
    versions,
)
from schemas import documents
from schemas.errors import RunError

LOCK = "lock"
LOCK_WAIT_S, LOCK_POLL_S = 120.0, 0.05
ATTEMPTS = 30
RETRY_S = 0.05
"""The longest wait after attempt number n is n times this number of seconds."""
STALE_S = 86400.0
"""A temporary directory older than this, in seconds, was left behind by a writer that was killed."""
TEMPORARY = (".new-", ".merge-", ".index-")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_OWN = re.compile(r"([0-9a-f]{12}|\d{4}-\d{2})-[0-9a-f]{12}\.parquet")
"""Name of a Parquet file of the history, which has the rows of one run, of one imported file or of one month."""
Result = TypeVar("Result")


class IndexChangedError(RunError):
    """Another writer committed the next version of the index first."""


def change(directory: Path, kind: str, apply: Callable[[Index], Result]) -> Result:
    """Apply a change to the index and return its result. If another writer was faster, apply it again to the new index.

    Raises:
        as `apply`, and as `writer` except IndexChangedError; RunError if other writers were faster ATTEMPTS times.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with writer(directory, kind) as index:
                result = apply(index)
        except IndexChangedError:
            time.sleep(random.uniform(0, RETRY_S * attempt))  # noqa: S311 - not for secrets
        else:
            return result
    raise RunError(f"{home(directory, kind)}: other processes changed the history {ATTEMPTS} times: try again later")


@contextlib.contextmanager
def writer(directory: Path, kind: str) -> Iterator[Index]:
    """Yield the index, which the caller may change, and commit it. A second writer waits at most LOCK_WAIT_S seconds.

    The index is written when the block ends without an exception; then the files that are no longer in the index are removed. If
    the block fails, the files that it added are removed. Besides these, only older versions of the index, and temporary files
    older than STALE_S, are removed: other files may belong to another program, or to an index that was lost.

    Raises:
        IndexChangedError: another writer was faster; nothing was changed.
        RunError: as in `read_index`, or the index is lost, or another process does not release the lock.
        OSError: the directory cannot be written.
    """
    place = home(directory, kind)
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place / LOCK):
        _remove_stale(place)
        index = read_index(directory, kind)
        if index is None and _has_lost_its_index(place):
            # Without a lock, another writer may have committed the first index meanwhile.
            index = read_index(directory, kind)
            if index is None:
                raise RunError(
                    f"{place}: index.json is missing, but files of the history are there: restore it from a backup, or move "
                    "the directory away and import the runs again"
                )
        index = index or Index(kind=kind)
        before = {item.path for item in index.files}
        try:
            yield index
            _commit(place, index)
        except Exception as error:
            newest = read_index(directory, kind) or Index(kind=kind)
            _remove(place, index.published - {item.path for item in newest.files})
            if newest.generation > index.generation:  # the other writer may have removed a file that the block needed
                raise IndexChangedError(f"{place}: {error}") from error
            raise
        _remove(place, (before | index.published) - {item.path for item in index.files})


def _remove(place: Path, paths: set[str]) -> None:
    for path in paths:
        (place / path).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, and leave the file in place. If this process ends, the kernel releases the lock.

    If the file system has no locks, the block runs without one. That is safe, because only one writer can commit a version even
    without a lock.
    """
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
                        f"{path}: another process has been changing the history for {LOCK_WAIT_S:g} s: try again when it ends"
                    ) from None
                time.sleep(LOCK_POLL_S)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield
    finally:
        os.close(descriptor)


def _commit(place: Path, index: Index) -> None:
    """Write the next version of the index.

    Raises:
        IndexChangedError: another writer has committed this version or a newer one.
    """
    number, copy = index.generation + 1, place / INDEX
    temporary, claim = place / f".index-{uuid.uuid4().hex}", version_directory(place, number)
    text = index_text(index, number)
    try:
        temporary.mkdir()
        documents.write_text(temporary / INDEX, text)
        temporary.rename(claim)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        raise IndexChangedError(f"{claim} exists") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if max(versions(place)) > number or (
        copy.exists() and read_version(place.parent, index.kind, copy).generation >= number
    ):
        # Other writers may have committed this version and a newer one, and removed this version, before this rename.
        shutil.rmtree(claim, ignore_errors=True)
        raise IndexChangedError(f"{place}: a newer index exists")
    index.generation = number
    with contextlib.suppress(OSError):  # a full disk, for example: readers find the version in `claim`
        documents.write_text(copy, text)
    for older in versions(place):
        if older < number:
            shutil.rmtree(version_directory(place, older), ignore_errors=True)


def _has_lost_its_index(place: Path) -> bool:
    """Return whether `place`, which has no index, had one: it has a file of a month, or files of several runs or imports.

    Files of one run are no sign of a lost index: a writer that was killed while it added the first run may have left them.
    """
    found = set[str]()
    for folder in place.iterdir():
        if not folder.name.startswith((*TEMPORARY, VERSION_PREFIX)):  # other writers may remove those at any time
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found |= {match[1] for path in folder.iterdir() if (match := _OWN.fullmatch(path.name))}
    return len(found) > 1 or any("-" in name for name in found)


def _remove_stale(place: Path) -> None:
    """Remove temporary files and directories that are older than STALE_S."""
    os.utime(place / LOCK)  # the present time by the clock of the file system, which also dates the directories
    now = (place / LOCK).stat().st_mtime
    for path in place.iterdir():
        if not path.name.startswith(TEMPORARY) or path.is_symlink():
            continue
        with contextlib.suppress(OSError):
            if now - path.stat().st_mtime > STALE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
