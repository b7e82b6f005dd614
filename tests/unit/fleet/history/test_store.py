"""A run counts once, however often it is added. Real runs, rehearsals and simulations are kept apart.

A fault of the history, such as a damaged index or a missing package, neither stops a report nor changes a decision.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from jinja2.nativetypes import NativeEnvironment

from fleet.cli.history import WHAT
from fleet.history import commit, tables
from fleet.history import store as store_module
from fleet.history.commit import writer
from fleet.history.database import History
from fleet.history.index import StoredFile, home, read_index, stored
from fleet.history.peers import PeerFigure, percentiles
from fleet.history.rows import clean_text, run_rows, settings_text
from fleet.history.store import add_imported, add_run, merge_runs
from fleet.records.load import Run
from fleet.report.judge_run import judge_run
from schemas import documents
from schemas.baselines import REAL, SIMULATED
from schemas.errors import RunError
from schemas.records import Record
from schemas.reports import FleetReport
from tests import ROOT
from tests.accepted import nonce, rackproof, run_directory, slowed, swapped

Judged = tuple[Run, FleetReport]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judged]:
    """Return the runs r1 and r2 with their reports, judged once for all tests to save time."""
    directory = tmp_path_factory.mktemp("runs")
    created = {"r1": "2026-10-01T00:00:00Z", "r2": "2026-11-01T00:00:00Z"}
    return {name: judge_run(run_directory(directory / name, created=time), []) for name, time in created.items()}


def add(history: Path, *runs: Judged) -> None:
    for run in runs:
        add_run(history, run_rows(*run))


StoredRuns = Callable[..., None]


@pytest.fixture(scope="module")
def stored_runs(judged: dict[str, Judged], tmp_path_factory: pytest.TempPathFactory) -> StoredRuns:
    """Return a function that writes a history of the runs with these names. Equal histories are created once, and then copied."""

    @cache
    def created(names: tuple[str, ...]) -> Path:
        directory = tmp_path_factory.mktemp("history")
        add(directory, *(judged[name] for name in names))
        return directory

    def write(directory: Path, *names: str) -> None:
        shutil.copytree(created(names), directory, dirs_exist_ok=True)

    return write


def import_runs(history: Path, *runs: Path) -> None:
    """Import run directories with the command, and check that it reports no problem."""
    done = rackproof("history", "import", *runs, "--history", history)
    assert (done.returncode, done.stderr) == (0, "")


def counts(history: Path, kind: str = REAL) -> dict[str, int]:
    """Return table -> number of rows, after a check that all files of the history can be read."""
    database = History(history, kind)
    assert database.problems == []
    tables = ("figures", "levels", "parts", "causes", "runs")
    return {table: len(database.rows(f"from {table}")) for table in tables}


def files(history: Path, kind: str = REAL) -> list[Path]:
    return sorted((history / kind).glob("*/*.parquet"))


def test_run_is_added_with_its_figures_parts_and_decision(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "r1", change=slowed("stress.throughput", 0.5))
    import_runs(tmp_path / "h", run)
    history = History(tmp_path / "h")
    assert history.rows("select host, slot, serial from parts where part = 'gpu' order by all") == [
        (host, f"gpu={index}", f"{host}-{index}") for host in ("h1", "h2") for index in (0, 1)
    ]
    assert history.rows("select run, decision, hosts, gpus from runs") == [("r1", "rejected", 2, 4)]
    assert history.rows("select accepted, count(*) > 10 from figures group by accepted order by 1") == [
        (False, True),
        (True, True),
    ]
    (cause,) = history.records("select host, serial, action from causes")
    assert (cause["host"], cause["serial"]) == ("h1", "h1-0")
    ((value,),) = history.rows("select value from figures where serial = 'h1-0' and name = 'stress.throughput'")
    assert value == pytest.approx(3.5e14)


def test_run_counts_once_if_it_is_imported_again_from_another_directory_or_after_merging(tmp_path: Path) -> None:
    store = tmp_path / "h"
    run = run_directory(tmp_path / "r1", change=slowed("stress.throughput", 0.5))
    import_runs(store, run)
    first, written = counts(store), files(store)
    moved = tmp_path / "moved"
    (tmp_path / "r1").rename(moved)
    import_runs(store, moved)
    assert counts(store) == first
    assert not set(written) & set(files(store)), "the files of the first import must be removed"
    assert merge_runs(store, REAL) == 1
    import_runs(store, moved)
    assert counts(store) == first


def test_merging_changes_no_result_of_a_query(tmp_path: Path, stored_runs: StoredRuns) -> None:
    store = tmp_path / "h"
    stored_runs(store, "r1", "r2")
    query = ("select level, id, name, settings, sum(n), round(sum(syy), 6) from series group by all order by all",
             "select * exclude (nonce) from figures order by all")  # fmt: skip
    before = [History(store).rows(text) for text in query]
    assert merge_runs(store, REAL) == 2
    assert [History(store).rows(text) for text in query] == before
    assert {path.parent.name for path in files(store)} == {*tables.PER_RUN, "trends", "spreads"}
    assert merge_runs(store, REAL) == 0


def test_many_runs_are_merged_automatically(
    tmp_path: Path, judged: dict[str, Judged], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_LOOSE_RUNS", 1)
    add(tmp_path / "h", *judged.values())
    assert {path.name[:7] for path in files(tmp_path / "h")} == {"2026-10", "2026-11"}
    assert counts(tmp_path / "h")["runs"] == 2


def test_rehearsals_and_simulations_are_kept_apart(tmp_path: Path) -> None:
    store = tmp_path / "h"

    def simulated(record: Record) -> Record:
        return replace(record, simulated=True)

    import_runs(
        store, run_directory(tmp_path / "real"), run_directory(tmp_path / "sim", simulated=True, change=simulated)
    )
    assert counts(store, REAL)["runs"] == counts(store, SIMULATED)["runs"] == 1
    done = rackproof("history", "racks", "--history", store, "--kind", SIMULATED)
    assert done.stdout.startswith("SIMULATED: not figures of GPUs\n")
    for what in set(WHAT) - {"import"}:
        other = rackproof("history", what, "--history", store, "--kind", "rehearsal")
        assert other.returncode == 2, what
        remedy = "to use another history of this directory, add --kind gpu or --kind simulated"
        assert f"no history of kind rehearsal in {store}: {remedy}" in other.stderr, what


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def overwrite(path: Path) -> None:
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:4] + bytes(middle) + content[4 + middle :])


@pytest.mark.parametrize(
    "damage",
    [cut_off, overwrite, Path.unlink, lambda path: path.write_bytes(b"text")],
    ids=["cut off", "overwritten", "removed", "replaced by a text"],
)
def test_damaged_file_is_named_and_left_out(
    tmp_path: Path, damage: Callable[[Path], Any], judged: dict[str, Judged], stored_runs: StoredRuns
) -> None:
    store = tmp_path / "h"
    stored_runs(store, "r1", "r2")
    first = read_index(store, REAL)
    assert first
    (file,) = (
        store / REAL / item.path for item in first.files if item.table == "figures" and item.runs == (nonce("r1"),)
    )
    damage(file)
    query = "select distinct run from figures where value > 0"
    # `rows` is for queries of Rackproof itself, `select` for those of the operator.
    for_product, for_operator = History(store), History(store)
    assert for_product.rows(query) == for_operator.select(query)[1] == [("r2",)]
    for history in (for_product, for_operator):
        assert [
            problem
            for problem in history.problems
            if str(file) in problem and "(runs r1; import them again)" in problem
        ]
    add(store, judged["r1"])
    assert {row[0] for row in History(store).rows("select distinct run from figures where value > 0")} == {"r1", "r2"}
    assert History(store).problems == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "rackproof.history/2"}', "newer version of Rackproof (rackproof.history/2, this version reads"),
        ('{"schema": "rackproof.history/0"}', "written by another version of Rackproof (rackproof.history/0"),
        ('{"schema": "rackproof.history/1"', "import the runs again"),
        ("[]", "import the runs again"),
    ],
)
def test_index_that_is_damaged_or_of_another_version_is_refused(
    tmp_path: Path, text: str, message: str, judged: dict[str, Judged], stored_runs: StoredRuns
) -> None:
    stored_runs(tmp_path / "h", "r1")
    path = tmp_path / "h" / REAL / "index.json"
    path.write_text(text)
    asked = rackproof("history", "racks", "--history", tmp_path / "h")
    assert asked.returncode == 2
    assert message in asked.stderr
    with pytest.raises(RunError, match=re.escape(message)):
        add(tmp_path / "h", judged["r2"])
    assert path.read_text() == text


NEWER: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown table": lambda index: index["files"][0].update(table="forecasts"),
    "unknown key of the index": lambda index: index.update(forecasts={}),
    "unknown key of a file": lambda index: index["files"][0].update(rows=3),
    "unknown key of a run": lambda index: index["runs"][nonce("r1")].update(site="x"),
}


@pytest.mark.parametrize("change", NEWER.values(), ids=NEWER)
def test_index_of_a_newer_version_is_not_called_damaged(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], judged: dict[str, Judged], stored_runs: StoredRuns
) -> None:
    """The error must not suggest a backup or a new import: both would lose the data that the newer version added."""
    stored_runs(tmp_path / "h", "r1")
    version = tmp_path / "h" / REAL / "index-1" / "index.json"
    for path in (version, tmp_path / "h" / REAL / "index.json"):
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
    for read in (lambda: read_index(tmp_path / "h", REAL), lambda: add(tmp_path / "h", judged["r2"])):
        with pytest.raises(
            RunError, match=r"written by a newer version of Rackproof \(.*: update Rackproof\."
        ) as raised:
            read()
        assert "backup" not in str(raised.value)
        assert "import the runs" not in str(raised.value)
    assert json.loads(version.read_text()) == document


def test_file_outside_the_history_is_not_read(tmp_path: Path, stored_runs: StoredRuns) -> None:
    stored_runs(tmp_path / "h", "r1")
    path = tmp_path / "h" / REAL / "index.json"
    document = json.loads(path.read_text())
    document["files"][0]["path"] = "figures/../../../secret.parquet"
    path.write_text(json.dumps(document))
    assert "import the runs again" in rackproof("history", "racks", "--history", tmp_path / "h").stderr


@pytest.mark.parametrize("has_locks", [True, False])
def test_two_writers_at_once_both_succeed(
    tmp_path: Path, judged: dict[str, Judged], monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    """Both succeed even without locks, as on NFS with `nolock`, where a lock is local to each machine."""
    monkeypatch.setattr(store_module, "MAX_LOOSE_RUNS", 1)  # the second writer merges the run of the first writer
    if not has_locks:
        monkeypatch.setattr(commit.fcntl, "flock", lambda *_: None)
    threads = [threading.Thread(target=add, args=(tmp_path / "h", run)) for run in judged.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(tmp_path / "h")["runs"] == 2
    listed = read_index(tmp_path / "h", REAL)
    assert listed
    assert {item.path for item in listed.files} == {
        str(path.relative_to(tmp_path / "h" / REAL)) for path in files(tmp_path / "h")
    }


def test_lock_that_is_never_released_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: dict[str, Judged]
) -> None:
    monkeypatch.setattr(commit, "LOCK_WAIT_S", 0.0)
    with writer(tmp_path / "h", REAL), pytest.raises(RunError, match="another process has been changing the history"):
        add(tmp_path / "h", judged["r1"])


def test_killed_writer_does_not_change_the_history(
    tmp_path: Path, judged: dict[str, Judged], stored_runs: StoredRuns
) -> None:
    stored_runs(tmp_path / "h", "r1")
    before = counts(tmp_path / "h")

    orphan = tmp_path / "h" / REAL / "figures" / "0.parquet"

    def killed() -> None:
        with writer(tmp_path / "h", REAL) as index:
            orphan.write_bytes(b"")
            index.files.append(StoredFile(table="figures", path="figures/0.parquet", bytes=0, sha256="0" * 64))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed()
    assert counts(tmp_path / "h") == before
    add(tmp_path / "h", judged["r1"])
    assert counts(tmp_path / "h") == before
    assert orphan.exists(), "no index has listed it, so it may belong to another program"


def test_serial_in_two_hosts_is_reported_and_left_out_of_trends(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "r1", change=swapped("h2", 1, "h1-0"))
    done = rackproof("history", "import", run, "--history", tmp_path / "h")
    assert "GPU serial h1-0 is in 2 places: h1 gpu=0, h2 gpu=1" in done.stderr
    assert "in several places" in rackproof("history", "part", "h1-0", "--history", tmp_path / "h").stdout
    assert History(tmp_path / "h").rows("select count(*) from series where id = 'h1-0'") == [(0,)]


def test_run_from_the_future_is_reported_and_left_out_of_trends(tmp_path: Path) -> None:
    ahead = run_directory(tmp_path / "r1", created="2099-01-01T00:00:00Z")
    done = rackproof("history", "import", ahead, "--history", tmp_path / "h")
    assert "a clock is wrong: the run began at 2099-01-01" in done.stderr
    assert History(tmp_path / "h").rows("select count(*) from series") == [(0,)]
    assert (
        "1 run with a wrong date, left out of all trends: r1"
        in rackproof("history", "racks", "--history", tmp_path / "h").stdout
    )


def test_part_found_in_two_hosts_at_the_same_time_is_reported(tmp_path: Path) -> None:
    def ended_late(record: Record) -> Record:
        return replace(record, ended="2026-11-21T05:00:00Z")

    first = run_directory(tmp_path / "r1", change=ended_late)
    second = run_directory(
        tmp_path / "r2", hosts=("h3", "h4"), change=swapped("h3", 0, "h1-0"), created="2026-11-21T04:30:00Z"
    )
    import_runs(tmp_path / "h", first, second)
    done = rackproof("history", "part", "h1-0", "--history", tmp_path / "h", "--json")
    assert [note for note in json.loads(done.stdout)["notes"] if "overlap" in note]


def test_text_of_a_host_is_sanitized_and_truncated(tmp_path: Path) -> None:
    hostile = "\x1b[31m'; drop table figures; --\n" + "x" * 400
    run = run_directory(tmp_path / "r1", change=swapped("h1", 0, hostile))
    import_runs(tmp_path / "h", run)
    ((serial,),) = History(tmp_path / "h").rows(
        "select serial from parts where part = 'gpu' and starts_with(serial, '[31m')"
    )
    assert serial.isprintable()
    assert len(serial) <= 300
    assert rackproof("history", "part", serial, "--history", tmp_path / "h").returncode == 0


def test_report_adds_the_run_to_the_history(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "r1")
    plain = rackproof("report", run)
    fed = rackproof("report", run, "--history", tmp_path / "h")
    assert (fed.returncode, fed.stdout) == (0, plain.stdout)
    assert fed.stderr.startswith("rackproof: note: no history in "), (
        "a path without a history may be a mistake, so the report must note it"
    )
    assert rackproof("report", run, "--history", tmp_path / "h").stderr == ""
    assert counts(tmp_path / "h")["runs"] == 1


@pytest.mark.parametrize("fault", ["no duckdb", "damaged index", "not a directory"])
def test_fault_of_the_history_gives_one_warning_and_changes_no_decision(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = run_directory(tmp_path / "r1"), tmp_path / "h"
    plain = rackproof("report", run)
    before = documents.read_bytes(run / "report.json", max_bytes=10_000_000)
    if fault == "no duckdb":
        monkeypatch.setitem(sys.modules, "duckdb", None)
    elif fault == "damaged index":
        (store / REAL).mkdir(parents=True)
        (store / REAL / "index.json").write_text("{")
    else:
        store.write_text("a file")
    done = rackproof("report", run, "--history", store)
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    (line,) = done.stderr.splitlines()
    assert line.startswith("rackproof: warning: the run was not added to the history: ")
    assert documents.read_bytes(run / "report.json", max_bytes=10_000_000) == before


def test_file_that_cannot_be_written_is_an_error_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: dict[str, Judged], stored_runs: StoredRuns
) -> None:
    stored_runs(tmp_path / "h", "r1")
    before = files(tmp_path / "h")
    copy = tables.copy
    monkeypatch.setattr(tables, "copy", lambda query, table, path: copy(query, table, path / "missing" / "file"))
    with pytest.raises(RunError, match="cannot be written, and is unchanged"):
        add(tmp_path / "h", judged["r2"])
    assert files(tmp_path / "h") == before
    assert counts(tmp_path / "h")["runs"] == 1
    assert not list((tmp_path / "h" / REAL).glob(".new-*"))


def test_missing_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored_runs: StoredRuns
) -> None:
    stored_runs(tmp_path / "h", "r1")
    monkeypatch.setitem(sys.modules, "duckdb", None)
    done = rackproof("history", "racks", "--history", tmp_path / "h")
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'rackproof[history]'" in done.stderr


def test_directory_without_a_run_is_reported_and_the_other_directories_are_added(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "r1")
    done = rackproof("history", "import", tmp_path / "missing", run, "--history", tmp_path / "h")
    assert done.returncode == 2
    assert "missing was not added" in done.stderr
    assert counts(tmp_path / "h")["runs"] == 1


def test_relative_figures_do_not_change_if_all_gpus_are_slower(tmp_path: Path) -> None:
    def slower(record: Record) -> Record:
        return replace(record, observations=tuple(
            replace(item, value=float(item.value or 0) * 0.9) if item.name == "memory.bandwidth" else item
            for item in record.observations))  # fmt: skip

    import_runs(tmp_path / "h", run_directory(tmp_path / "r1"), run_directory(tmp_path / "r2", change=slower))
    history = History(tmp_path / "h")
    query = "select relative, reference from figures where run = $run and name = 'memory.bandwidth' order by all"
    first, second = (history.rows(query, {"run": run}) for run in ("r1", "r2"))
    assert [value for value, _ in first] == pytest.approx([value for value, _ in second], abs=1e-6)
    assert {reference for _, reference in first} == {"run"}


@pytest.mark.parametrize(("directory", "options"), [("", []), ("/srv/history", ["--history", "/srv/history"])])
def test_playbook_passes_the_history_of_the_inventory(directory: str, options: list[str]) -> None:
    tasks = yaml.safe_load((ROOT / "roles" / "report" / "tasks" / "judge.yml").read_text())[0]["block"]
    command = next(task["ansible.builtin.command"]["argv"] for task in tasks if "ansible.builtin.command" in task)
    values = {"_rackproof_command": ["rackproof"], "_rackproof_run_dir": "runs/r1", "rackproof_history": directory}
    assert NativeEnvironment().from_string(command).render(values) == ["rackproof", "report", "runs/r1", *options]


def test_lost_index_stops_a_writer_and_no_file_is_removed(
    tmp_path: Path, judged: dict[str, Judged], stored_runs: StoredRuns
) -> None:
    stored_runs(tmp_path, "r1", "r2")
    shutil.rmtree(tmp_path / REAL / "index-2")
    (tmp_path / REAL / "index.json").unlink()
    files = set(tmp_path.rglob("*.parquet"))
    with pytest.raises(RunError, match=r"index\.json is missing"):
        add(tmp_path, judged["r1"])
    assert set(tmp_path.rglob("*.parquet")) == files


def test_only_files_listed_in_an_index_are_removed(tmp_path: Path, judged: dict[str, Judged]) -> None:
    foreign = tmp_path / REAL / "metrics" / "other.parquet"
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"PAR1")
    add(tmp_path, judged["r1"])
    before = set(tmp_path.rglob("*.parquet"))
    add(tmp_path, judged["r1"])
    after = set(tmp_path.rglob("*.parquet"))
    assert before & after == {foreign}
    assert len(before) == len(after)


def test_names_of_directories_do_not_become_columns(tmp_path: Path, stored_runs: StoredRuns) -> None:
    """By default, DuckDB reads a directory `rack=9` in the path of a file as a column `rack` (Hive partitioning)."""
    directory = tmp_path / "rack=9" / "name=x"
    stored_runs(directory, "r1", "r2")
    merge_runs(directory, REAL)
    (plain := tmp_path / "plain").mkdir()
    stored_runs(plain, "r1", "r2")
    query = "select distinct rack, name from figures order by all"
    assert History(directory, REAL).rows(query) == History(plain, REAL).rows(query)


def test_file_with_a_damaged_footer_is_named(tmp_path: Path, stored_runs: StoredRuns) -> None:
    stored_runs(tmp_path, "r1", "r2")
    path = next((tmp_path / REAL / "figures").glob("*.parquet"))
    data = bytearray(path.read_bytes())
    data[-12:-8] = bytes(byte ^ 0xFF for byte in data[-12:-8])
    path.write_bytes(data)
    history = History(tmp_path, REAL)
    history.rows("from figures")
    assert [problem for problem in history.problems if str(path) in problem]


def test_month_with_a_damaged_file_is_merged_without_it(
    tmp_path: Path, judged: dict[str, Judged], stored_runs: StoredRuns
) -> None:
    """If the damaged file were merged, the merged file would have a valid checksum, which would hide the damage."""
    stored_runs(tmp_path, "r1")
    index = read_index(tmp_path, REAL)
    assert index
    (file,) = (tmp_path / REAL / item.path for item in index.files if item.table == "parts")
    data = file.read_bytes()
    file.write_bytes(data[:40] + bytes(byte ^ 1 for byte in data[40:44]) + data[44:])
    merge_runs(tmp_path, REAL)
    assert list((tmp_path / REAL / "figures").glob("2026-*"))
    assert file.exists()
    add(tmp_path, judged["r1"])
    assert len(History(tmp_path).rows("from parts where part = 'gpu'")) == 4


def drop_column(history: Path, table: str, column: str, chosen: Sequence[int]) -> None:
    """Rewrite some files of a table without `column`, as older versions of Rackproof wrote them.

    `chosen`: positions of these files among the files of the table, in the order of the index.
    """
    place = home(history, REAL)
    with writer(history, REAL) as index:
        files = [item for item in index.files if item.table == table]
        for item in (files[number] for number in chosen):
            path = place / item.path.replace(".parquet", "0.parquet")
            duckdb.read_parquet(str(place / item.path)).project(f"* exclude ({column})").write_parquet(str(path))
            index.files[index.files.index(item)] = stored(place, path, table, item.runs, item.month)


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
def test_months_merged_by_an_older_version_give_the_same_percentiles(
    tmp_path: Path, stored_runs: StoredRuns, chosen: tuple[int, ...]
) -> None:
    stored_runs(tmp_path, "r1", "r2")
    merge_runs(tmp_path, REAL)
    figures = [
        PeerFigure(**row)
        for row in History(tmp_path).records(
            "select distinct name, settings, stage, model, driver, 1.0 as value from figures "
            "where within = '' and serial <> '' and accepted"
        )
    ]
    expected = percentiles(History(tmp_path), figures)
    drop_column(tmp_path, "spreads", "within", chosen)
    history = History(tmp_path)
    compared = [
        (item, other) for item, other in zip(percentiles(history, figures), expected, strict=True) if item or other
    ]
    assert compared
    for item, other in compared:
        assert item
        assert other
        assert vars(item) == pytest.approx(vars(other))
    assert history.problems == []


def test_imports_of_an_older_version_are_read(tmp_path: Path) -> None:
    place = {"source": "dcgm", "version": "4", "file": "a", "tool_name": "pcie", "host": "h1", "slot": "", "model": "B"}
    rows = [{**place, "sha256": digit * 64, "name": "x", "settings": "", "unit": "1", "value": 1.0} for digit in "ab"]
    for row in rows:
        entry = {
            "file": "a",
            "source": "dcgm",
            "version": "4",
            "model": "B",
            "count": 1,
            "imported": "2026-11-01 00:00:00",
        }
        add_imported(tmp_path, REAL, entry, row["sha256"], [row])
    drop_column(tmp_path, "imported", "sha256", (0,))
    imported = History(tmp_path).rows("select sha256, value from imported order by sha256")
    assert imported == [("", 1.0), ("b" * 64, 1.0)]


def test_truncated_settings_remain_distinct() -> None:
    long = {f"key{number:03}": "v" * 20 for number in range(40)}
    first, second = settings_text(long), settings_text({**long, "key039": "other"})
    assert first != second
    assert len(first) == len(second) == 300
    assert clean_text(first) == first
    assert first.isprintable()
