"""Concurrent writers lose no run even without working locks. Temporary directories of killed writers are removed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from fleet.history import commit
from fleet.history.commit import change, writer
from fleet.history.index import Index, read_index
from schemas import documents
from schemas.baselines import REAL
from schemas.errors import RunError


def entry(number: int) -> dict[str, Any]:
    text = dict.fromkeys(("profile", "rackproof"), "")
    time = f"2026-01-{number + 1:02} 00:00:00"
    return {
        **text,
        "run": f"r{number}",
        "began": time,
        "ended": time,
        "decision": "accepted",
        "hosts": 1,
        "gpus": 8,
        "notes": [],
    }


def add(directory: Path, number: int) -> None:
    """Add a run with the name `r<number>` to the index of a history."""

    def apply(index: Index) -> None:
        index.runs[f"{number:032x}"] = entry(number)

    change(directory, REAL, apply)


def names(directory: Path) -> set[str]:
    """Return the names of the runs in the index of a history."""
    index = read_index(directory, REAL)
    return {run["run"] for run in index.runs.values()} if index else set()


def without_lock(*_: object) -> None:
    """Replace `flock`: every writer gets the lock immediately, even if another writer holds it."""


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_lock)


@pytest.mark.usefixtures("unlocked")
def test_writer_that_was_overtaken_by_another_loses_no_run(tmp_path: Path) -> None:
    add(tmp_path, 0)
    attempts = []

    def slow(index: Index) -> None:
        index.runs[f"{1:032x}"] = entry(1)
        if not attempts:  # during the first attempt, two other writers commit
            attempts.append(1)
            add(tmp_path, 2)
            add(tmp_path, 3)

    change(tmp_path, REAL, slow)
    assert names(tmp_path) == {"r0", "r1", "r2", "r3"}


@pytest.mark.usefixtures("unlocked")
def test_many_writers_without_locks_lose_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "RETRY_S", 0.02)
    threads = [threading.Thread(target=add, args=(tmp_path, number)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path) == {f"r{number}" for number in range(12)}
    (newest,) = (tmp_path / REAL).glob("index-*")  # older versions of the index are removed
    # Each of the 12 changes made a version of its own. A writer that was overtaken made its change again in a later version.
    assert int(newest.name.removeprefix("index-")) >= 12


@pytest.mark.parametrize("name", ["index-1", ".index-0a", ".new-0a", ".merge-0a"])
def test_directory_that_another_writer_removes_during_a_change_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / REAL / name).mkdir(parents=True)
    listed = Path.iterdir

    def then_removed(path: Path) -> list[Path]:
        result = [*listed(path)]
        shutil.rmtree(tmp_path / REAL / name, ignore_errors=True)
        return result

    monkeypatch.setattr(Path, "iterdir", then_removed)
    add(tmp_path, 0)
    assert names(tmp_path) == {"r0"}


@pytest.mark.usefixtures("unlocked")
def test_first_index_of_another_writer_is_not_reported_as_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer of r1 finds no index. Then the writer of r0 commits the first index and adds files.

    The writer of r1 finds these files, but must not report that their index is lost.
    """
    table = tmp_path / REAL / "figures"
    result = commit.read_index

    def then_committed(directory: Path, kind: str) -> Index | None:
        index = result(directory, kind)
        if index is None:
            monkeypatch.setattr(commit, "read_index", result)
            add(tmp_path, 0)
            table.mkdir()
            for number in (1, 2):
                (table / f"{number:012x}-{number:012x}.parquet").touch()
        return index

    monkeypatch.setattr(commit, "read_index", then_committed)
    add(tmp_path, 1)
    assert names(tmp_path) == {"r0", "r1"}


def test_index_committed_by_a_killed_writer_is_read(tmp_path: Path) -> None:
    add(tmp_path, 0)
    copy = tmp_path / REAL / "index.json"
    older = copy.read_bytes()
    add(tmp_path, 1)
    copy.write_bytes(older)  # as if the second writer was killed before it wrote this copy of the index
    assert names(tmp_path) == {"r0", "r1"}
    add(tmp_path, 2)
    assert names(tmp_path) == {"r0", "r1", "r2"}


def test_writer_with_an_outdated_index_does_not_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_lock)
    for number in range(3):
        add(tmp_path, number)
    with pytest.raises(commit.IndexChangedError), writer(tmp_path, REAL) as index:
        index.generation = 0  # as if this writer had read an index from before the three runs were added
    assert names(tmp_path) == {"r0", "r1", "r2"}
    assert not (tmp_path / REAL / "index-1").exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_history_on_a_file_system_without_locks_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    add(tmp_path, 0)
    assert names(tmp_path) == {"r0"}


def test_writer_that_fails_removes_the_files_that_it_added(tmp_path: Path) -> None:
    file = tmp_path / REAL / "figures" / "0-0.parquet"

    def fails(index: Index) -> None:
        file.parent.mkdir()
        file.write_bytes(b"PAR1")
        index.published.add("figures/0-0.parquet")
        raise RunError("the disk is full")

    with pytest.raises(RunError, match="the disk is full"):
        change(tmp_path, REAL, fails)
    assert not file.exists()


def test_directories_of_killed_writers_are_removed_after_a_day(tmp_path: Path) -> None:
    place = tmp_path / REAL
    add(tmp_path, 0)
    for name, age in (
        (".new-old", 2 * commit.STALE_S),
        (".merge-old", 2 * commit.STALE_S),
        (".new-now", 0),
        ("old", 1e9),  # its name is not that of a temporary directory, so it may belong to another program
    ):
        (place / name / "figures").mkdir(parents=True)
        time = (place / "lock").stat().st_mtime - age
        os.utime(place / name, (time, time))
    add(tmp_path, 1)
    assert {path.name for path in place.iterdir() if path.is_dir()} == {".new-now", "old", "index-2"}


def test_full_disk_after_the_commit_loses_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path, 0)
    write = documents.write_text

    def full(path: Path, text: str, **options: Any) -> None:
        if path == tmp_path / REAL / "index.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text, **options)

    monkeypatch.setattr(documents, "write_text", full)
    add(tmp_path, 1)
    assert names(tmp_path) == {"r0", "r1"}
    assert (tmp_path / REAL / "index-2").exists(), "the second index must be committed"
