"""A time budget leads to the same selection of benchmarks, whether earlier runs are read from the history or from directories.

The history is a database of the runs of a fleet.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2.nativetypes import NativeEnvironment

from fleet.history.former_tests import MAX_COSTS, former_tests, is_history
from fleet.history.rows import HostRows, Row, RunRows, run_rows
from fleet.history.store import add_run, merge_runs
from fleet.planning.history import MAX_RUNS, history
from fleet.planning.plan import expected_costs, read_profile
from fleet.planning.test_selection import PastRun, select_tests
from fleet.report.judge_run import judge_run
from schemas import documents
from schemas.baselines import REAL
from schemas.records import Observation, to_json
from schemas.run_directory import record_name
from schemas.stages import BENCHMARK
from tests import ROOT, builders
from tests.accepted import Done, nonce, rackproof

HOSTS = ("h1", "h2", "h3")
RUNS = MAX_RUNS + 2
"""Number of runs. Without a history, at most MAX_RUNS runs would be read."""
NOW = "2026-11-21T04:00:00Z"
FIGURES = ("gemm.throughput", "memory.bandwidth", "stress.throughput", "collective.all_reduce.busbw")


def generated_run(directory: Path, name: str, day: int, draw: random.Random) -> Path:
    """Write a run with random durations, in which figures of some hosts are bad or missing. Add it to the history.

    The history is the directory `h` beside `directory`.
    """
    plan = builders.plan(*HOSTS, profile=draw.choice(("revalidate", "smoke")))
    plan = replace(plan, run_id=name, nonce=nonce(name), created=f"2026-10-{day:02}T04:00:00Z")
    run = directory / name
    documents.write(run / "plan.json", to_json(plan))
    for host in plan.hosts:
        bad, missing = ({draw.choice(FIGURES)} if draw.random() < 0.5 else set() for _ in range(2))
        for record in builders.records(plan, host.name):
            changed = (altered(item, bad, missing, draw) for item in record.observations)
            whole = replace(record, observations=tuple(item for item in changed if item))
            path = record_name(host.name, host.gang if whole.observations[0].stage == "gang" else "")
            builders.write_record(run / path, whole)
    judged, report = judge_run(run, [])
    documents.write(run / "report.json", json.loads(json.dumps(to_json(report))))
    add_run(directory.parent / "h", run_rows(judged, report))
    return run


def altered(item: Observation, bad: set[str], missing: set[str], draw: random.Random) -> Observation | None:
    """Return None if the name of the observation is in `missing`; otherwise the observation.

    `benchmark.duration` gets a random value. An observation whose name is in `bad` gets the value 1.
    """
    if item.name in missing:
        return None
    if item.name == "benchmark.duration":
        return replace(item, value=draw.uniform(1, 60))
    return replace(item, value=1.0) if item.name in bad else item


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with `runs`, the directories of four runs, and `h`, their history."""
    directory, draw = tmp_path_factory.mktemp("former_tests"), random.Random(4)  # noqa: S311
    for number in range(4):
        generated_run(directory / "runs", f"r{number}", 3 * number + 1, draw)
    return directory


def comparable(runs: Sequence[PastRun]) -> list[PastRun]:
    """Return the runs, oldest first, without `settings` and `devices`, which the history does not store.

    The selection of tests does not use these fields.
    """
    plain = [replace(run, settings={}, devices=0) for run in runs]
    return sorted(plain, key=lambda run: run.began)


@pytest.mark.parametrize(
    ("hosts", "merged"),
    [(set(HOSTS), False), (set(HOSTS), True), ({"h2"}, True), ({"h1", "elsewhere"}, False), ({"elsewhere"}, False)],
    ids=["all hosts", "all hosts, merged", "one host, merged", "one known and one unknown host", "unknown host"],
)
def test_history_and_directories_give_the_same_runs_and_selection(
    fleet: Path, tmp_path: Path, hosts: set[str], merged: bool
) -> None:
    shutil.copytree(fleet / "h", tmp_path / "h")
    assert not merged or merge_runs(tmp_path / "h", REAL) == 4
    read = [*history(fleet / "runs", hosts, rehearsal=False)]
    stored, warning = former_tests(tmp_path / "h", hosts, rehearsal=False)
    assert warning == ""
    assert comparable(stored) == comparable(read)
    assert len(stored) == (0 if hosts == {"elsewhere"} else 4)
    estimates = expected_costs(read_profile("revalidate"), builders.inventory(*sorted(hosts), rackproof_gpu_count=2))
    for budget_s in (30, 60, 120, 300, 3000):
        selections = [
            select_tests(estimates, runs, budget_s=budget_s, profile="revalidate", now=NOW) for runs in (read, stored)
        ]
        assert selections[0] == selections[1]
    assert former_tests(tmp_path / "h", hosts, rehearsal=True) == ([], "")


def test_generated_runs_have_findings_gaps_and_gangs(fleet: Path) -> None:
    """The runs must have failed tests, tests that a host did not measure, and tests of the stage `gang`."""
    runs, _ = former_tests(fleet / "h", HOSTS, rehearsal=False)
    # Some tests were measured on all three hosts, others on only two.
    assert {count for run in runs for count in run.measured.values()} >= {2, 3}
    assert {key[0] for run in runs for key in run.findings} == {BENCHMARK, "gang"}
    assert {key[0] for run in runs for key in run.cost_s} == {BENCHMARK, "gang"}


def test_findings_are_from_all_runs_and_durations_from_the_newest(tmp_path: Path) -> None:
    for number in range(RUNS):
        test: Row = {"host": "h1", "stage": BENCHMARK, "benchmark": "gemm", "measured": True}
        tests = (
            {**test, "failed": number == 0, "seconds": float(number)},
            {
                **test,
                "benchmark": "memory",
                "measured": number == 0,
                "failed": False,
                "seconds": 7.0 if number == 0 else None,
            },
        )
        entry = {
            "run": f"r{number}",
            "began": f"2026-09-{number + 1:02} 00:00:00",
            "ended": f"2026-09-{number + 1:02} 01:00:00",
            **dict.fromkeys(("hosts", "gpus"), 1),
            "profile": "revalidate",
            "decision": "accepted",
            "rackproof": "1",
            "notes": [],
        }
        rows = HostRows(parts=(), figures=(), tests=tests)
        add_run(tmp_path, RunRows(kind=REAL, nonce=nonce(f"r{number}"), entry=entry, causes=(), hosts=[rows]))
    runs, warning = former_tests(tmp_path, ["h1"], rehearsal=False)
    assert (len(runs), warning) == (RUNS, "")
    estimates = dict.fromkeys([(BENCHMARK, "gemm"), (BENCHMARK, "memory")], 1.0)
    choice = select_tests(estimates, runs, budget_s=999, profile="revalidate", now=NOW)
    gemm, memory = sorted(choice.items, key=lambda item: item.benchmark)
    assert gemm.why.startswith(f"1 finding in {RUNS} measurements")
    assert gemm.cost_s == RUNS - (MAX_COSTS + 1) / 2, (
        "the cost is the median of the newest MAX_COSTS durations; gemm took n seconds in run n"
    )
    assert (memory.cost_s, "1 measurement, last run 81 days ago" in memory.why) == (7.0, True)


# The command `rackproof plan`


@pytest.mark.parametrize(("stderr", "message"), [("", "run r1"), ("warning: history", "run r1\nwarning: history")])
def test_playbook_prints_the_warning_of_the_plan_command(stderr: str, message: str) -> None:
    tasks = yaml.safe_load((ROOT / "roles/plan/tasks/begin.yml").read_text())[1]["block"]
    (shown,) = (
        task["ansible.builtin.assert"]["success_msg"]
        for task in tasks
        if "success_msg" in task.get("ansible.builtin.assert", {})
    )
    assert (
        NativeEnvironment().from_string(shown).render(_rackproof_plan={"stdout": "run r1", "stderr": stderr}) == message
    )


def plan_of(*arguments: str | Path, **variables: Any) -> Done:
    hosts = builders.inventory(*HOSTS, rackproof_gpu_count=2, **variables)
    listing = {"gpu_hosts": {"hosts": list(hosts)}, "_meta": {"hostvars": hosts}}
    return rackproof(
        "plan", "-i", "-", "--profile", "revalidate", "--budget", "120", *arguments, stdin=json.dumps(listing)
    )


def selection_line(done: Done) -> str:
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("selected for"))


@pytest.fixture
def one_run(fleet: Path, tmp_path: Path) -> Path:
    """Return a directory `runs` that contains only the run r0."""
    shutil.copytree(fleet / "runs" / "r0", tmp_path / "runs" / "r0")
    return tmp_path / "runs"


def test_inventory_or_option_names_the_history(fleet: Path, one_run: Path) -> None:
    """The history that the inventory names is used instead of the earlier runs beside `--run-dir`.

    The value of `--history`, a history or a directory of runs, is used instead of both.
    """
    assert (is_history(fleet / "h"), is_history(one_run)) == (True, False)
    store, new = str(fleet / "h"), ("--run-dir", one_run / "new")
    assert "by the history of 4 earlier runs" in selection_line(plan_of(rackproof_history=store))
    assert "by the history of 4 earlier runs" in selection_line(plan_of("--history", store))
    assert "by the history of 1 earlier run " in selection_line(plan_of("--history", one_run, rackproof_history=store))
    assert "by the history of 4 earlier runs" in selection_line(plan_of(*new, rackproof_history=store))


@pytest.mark.parametrize("fault", ["no history yet", "no duckdb", "damaged index", "truncated files"])
def test_runs_are_read_from_their_directories_if_no_history_is_readable(
    fleet: Path, one_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    store = tmp_path / "h"
    if fault != "no history yet":
        shutil.copytree(fleet / "h", store)
    if fault == "no duckdb":
        monkeypatch.setitem(sys.modules, "duckdb", None)
    if fault == "damaged index":
        (store / REAL / "index.json").write_text("{")
    for path in (store / REAL / "tests").glob("*.parquet") if fault == "truncated files" else ():
        path.write_bytes(path.read_bytes()[:-20])
    done = plan_of("--run-dir", one_run / "new", rackproof_history=str(store))
    assert "by the history of 1 earlier run " in selection_line(done)
    assert done.stderr.count("\n") == (0 if fault == "no history yet" else 1)
    reason = {
        "no duckdb": "duckdb is not installed",
        "damaged index": "index.json",
        "truncated files": "it was cut off",
    }
    assert reason.get(fault, "") in done.stderr
    assert not done.stderr or done.stderr.startswith("warning: ")
