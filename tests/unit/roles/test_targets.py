"""Test the program that writes and removes the scrape targets of Prometheus on the control node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

SCRIPT = ROOT / "roles" / "common" / "files" / "targets.py"


def groups_of(run: str, *hosts: str) -> list[dict[str, Any]]:
    return [{"targets": [f"{host}:9836"], "labels": {"host": host, "run_id": run}} for host in hosts]


def call(directory: Path, groups: Iterable[dict[str, Any]], *run: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), *run],
        input=json.dumps(list(groups)),
        capture_output=True,
        text=True,
        check=True,
    )
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def targets(directory: Path) -> dict[str, list[str]]:
    """Return the name of each file -> the hosts whose exporters are its targets."""
    return {
        path.name: [group["labels"]["host"] for group in json.loads(path.read_text())]
        for path in directory.glob("*.json")
    }


def test_host_is_the_target_of_its_newest_run_only(tmp_path: Path) -> None:
    call(tmp_path, groups_of("a", "h1", "h2"), "a")
    call(tmp_path, groups_of("b", "h2", "h3"), "b")
    assert targets(tmp_path) == {"a.json": ["h1"], "b.json": ["h2", "h3"]}
    call(tmp_path, groups_of("c", "h1", "h2", "h3"), "c")
    assert targets(tmp_path) == {"c.json": ["h1", "h2", "h3"]}


def test_targets_of_stopped_hosts_are_removed_from_the_files_of_all_runs(tmp_path: Path) -> None:
    call(tmp_path, groups_of("a", "h1", "h2"), "a")
    call(tmp_path, groups_of("b", "h3"), "b")
    assert call(tmp_path, groups_of("", "h2", "h3"))["changed"]
    assert targets(tmp_path) == {"a.json": ["h1"]}
    assert not call(tmp_path, groups_of("", "h2", "h3"))["changed"]


def test_run_does_not_take_over_a_host_that_failed_in_it(tmp_path: Path) -> None:
    call(tmp_path, groups_of("a", "h1", "h2"), "a")
    failed = [{**group, "failed": True} for group in groups_of("b", "h1", "h4")]
    call(tmp_path, [*failed, *groups_of("b", "h2")], "b")
    assert targets(tmp_path) == {"a.json": ["h1"], "b.json": ["h4", "h2"]}
    call(tmp_path, failed[:1], "c")
    assert targets(tmp_path) == {"a.json": ["h1"], "b.json": ["h4", "h2"]}


def test_run_that_is_resumed_changes_no_file(tmp_path: Path) -> None:
    groups = groups_of("a", "h1")
    assert call(tmp_path, groups, "a") == {"changed": True, "problems": []}
    assert call(tmp_path, groups, "a") == {"changed": False, "problems": []}


def test_other_programs_files_are_kept(tmp_path: Path) -> None:
    other = [{"targets": ["h1:9836"], "labels": {"host": "h1"}}]
    (tmp_path / "mine.json").write_text(json.dumps(other))
    call(tmp_path, groups_of("a", "h1"), "a")
    assert json.loads((tmp_path / "mine.json").read_text()) == other


@pytest.mark.parametrize("text", ["", "{", "3", '{"a": 1}', "[3]", '[{"labels": {"run_id": "x"}}]'])
def test_file_that_is_no_list_of_targets_is_kept_and_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    outcome = call(tmp_path, groups_of("a", "h1"), "a")
    assert [problem.partition(":")[0] for problem in outcome["problems"]] == [str(tmp_path / "broken.json")]
    assert (tmp_path / "broken.json").read_text() == text
    assert json.loads((tmp_path / "a.json").read_text()) == groups_of("a", "h1")


def test_directory_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "none"), "a"],
        input=json.dumps(groups_of("a", "h1")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("cannot write the targets: ")


def test_wrong_usage_prints_the_usage() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")
