"""`rackproof history` queries: unknown names, read-only SQL, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest

from fleet.history.rows import run_rows
from fleet.history.store import add_run
from fleet.report.judge_run import judge_run
from tests.accepted import Done, rackproof, run_directory, slowed


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a history with a healthy run and one in which GPU 0 of h1 is slow."""
    directory = tmp_path_factory.mktemp("questions")
    healthy = run_directory(directory / "r1", created="2026-10-01T00:00:00Z")
    slow = run_directory(directory / "r2", created="2026-11-01T00:00:00Z", change=slowed("stress.throughput", 0.5))
    for run in (healthy, slow):
        add_run(directory / "h", run_rows(*judge_run(run, [])))
    return directory / "h"


def ask(store: Path, *arguments: str) -> Done:
    return rackproof("history", *arguments, "--history", store)


@pytest.mark.parametrize(
    "query",
    [
        "copy (select 1) to '{out}'",
        "copy (select 1) to '{store}/figures/new.parquet' (format parquet)",
        "explain analyze copy (select 1) to '{out}'",
        "create table t as select 1",
        "insert into runs select * from runs",
        "drop view figures",
        "attach '{out}'",
        "set enable_external_access = true",
        "install httpfs",
        "export database '{out}'",
        "select 1; select 2",
        "select * from read_text('/etc/hostname')",
        "select * from read_csv('/etc/hostname')",
        "select * from '{store}/index.json'",
        "select * from glob('/etc/*')",
        "",
        "nonsense",
    ],
)
def test_sql_other_than_one_query_of_the_history_is_refused(store: Path, tmp_path: Path, query: str) -> None:
    """Four kinds of SQL are refused: statements other than queries, queries that read a file by its path, several statements at
    once, and invalid SQL.
    """
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    done = ask(store, "sql", query.format(out=tmp_path / "out", store=store / "gpu"))
    assert (done.returncode, done.stdout) == (64, ""), query
    assert done.stderr.startswith("rackproof: history sql: ")
    assert not list(tmp_path.iterdir())
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_sql_answers_in_text_json_and_csv(store: Path) -> None:
    query = "select run, decision from runs order by run"
    assert ask(store, "sql", query).stdout == "run  decision\nr1   accepted\nr2   rejected\n"
    assert json.loads(ask(store, "sql", query, "--json").stdout)[1] == {"run": "r2", "decision": "rejected"}
    assert ask(store, "sql", query, "--csv").stdout == "run,decision\nr1,accepted\nr2,rejected\n"


def test_formula_in_a_csv_cell_is_escaped(store: Path) -> None:
    assert "'=1+1" in ask(store, "sql", "select '=1+1' as cell", "--csv").stdout


@pytest.mark.parametrize(
    "question", [["part", "h1-0"], ["figure", "stress.throughput"], ["lemons"], ["drivers"], ["racks"]]
)
def test_each_query_has_json_and_csv_output(store: Path, question: list[str]) -> None:
    document = json.loads(ask(store, *question, "--json").stdout)
    assert document["kind"] == "gpu"
    assert "notes" in document
    header, *rows = csv.reader(io.StringIO(ask(store, *question, "--csv").stdout))
    assert all(len(row) == len(header) for row in rows)
    assert ask(store, *question).returncode == 0


def test_option_values_prints_a_row_for_each_value_of_a_part(store: Path) -> None:
    """Without `--values`, the CSV of `rackproof history part` has a row for each place of the part."""
    header, *rows = ask(store, "part", "h1-0", "--csv", "--values").stdout.splitlines()
    assert header == "name,settings,stage,within,began,run,driver,value"
    assert len([row for row in rows if row.startswith("stress.throughput")]) == 2


def test_history_of_a_part_has_the_causes_of_its_failures_and_its_values(store: Path) -> None:
    document = json.loads(ask(store, "part", "h1-0", "--json", "--values").stdout)
    assert [cause["run"] for cause in document["causes"]] == ["r2"]
    assert [place["runs"] for place in document["places"]] == [2]
    stress = [row["value"] for row in document["values"] if row["name"] == "stress.throughput"]
    assert stress == pytest.approx([7.0e14, 3.5e14])
    (last,) = (row for row in document["figures"] if row["name"] == "stress.throughput")
    assert (last["percentile"], last["peers"]) == (0.0, 4)


def test_history_of_a_host_is_shown_like_the_history_of_a_part(store: Path) -> None:
    document = json.loads(ask(store, "part", "h1", "--json").stdout)
    assert document["places"][0]["part"] == "host"
    assert [cause["slot"] for cause in document["causes"]] == ["gpu=0"]


def test_figures_of_rejected_hosts_are_included_only_with_the_option_all(store: Path) -> None:
    def values(*options: str) -> int:
        return int(
            json.loads(ask(store, "figure", "stress.throughput", "--json", *options).stdout)["figures"][0]["values"]
        )

    assert (values(), values("--all")) == (6, 8)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (["part", "h1-00"], "is neither a serial nor a host in the history of kind gpu"),
        (["figure", "stress.thruput"], "did you mean stress.throughput?"),
        (
            ["figure", "stress.throughput", "--model", "NVIDIA B200"],
            "omit some of --settings, --stage and --model, or add --all",
        ),
        (["figure", "stress.throughput", "--settings", "dtype=fp4"], "omit some of --settings"),
        (["part"], "give one serial or host"),
        (["part", ""], "give one serial or host"),
        (["part", " "], "give one serial or host"),
        (["page", ""], "give one file"),
        (["figure", "stress.throughput", "--value", "nan"], "is not a finite number"),
        (["figure", "stress.throughput", "--value=-inf"], "is not a finite number"),
        (["lemons", "h1"], "argument 'h1' has no effect: omit it"),
        (["import"], "give run directories"),
    ],
)
def test_invalid_arguments_are_explained(store: Path, question: list[str], message: str) -> None:
    done = ask(store, *question)
    assert (done.returncode, done.stdout) == (64, "")
    assert message in done.stderr


def test_columns_with_the_same_name_keep_their_values(store: Path) -> None:
    query = "select 1 as a, 2 as a, 3 as a_2, 4 as a"
    assert ask(store, "sql", query).stdout.split() == ["a", "a", "a_2", "a", "1", "2", "3", "4"]
    assert ask(store, "sql", query, "--csv").stdout == "a,a,a_2,a\n1,2,3,4\n"
    assert list(json.loads(ask(store, "sql", query, "--json").stdout)[0].values()) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "question", [["part", "h1-0"], ["figure", "stress.throughput"], ["sql", "select 1"], ["page", "{out}"], ["metrics"]]
)
def test_each_answer_has_a_note_on_the_run_with_a_wrong_date(store: Path, tmp_path: Path, question: list[str]) -> None:
    copy = tmp_path / "h"
    shutil.copytree(store, copy)
    run = run_directory(tmp_path / "r0", created="1970-01-01T00:10:00Z")
    add_run(copy, run_rows(*judge_run(run, [])))
    done = ask(copy, *[word.format(out=tmp_path / "page.html") for word in question])
    assert done.returncode == 0
    assert "1 run with a wrong date, left out of all trends: r0" in done.stdout + done.stderr
