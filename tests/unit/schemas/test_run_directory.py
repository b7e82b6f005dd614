"""Test `schemas.run_directory`: paths of records, and the search for runs. No other module builds paths of a run directory."""

from __future__ import annotations

import re
from pathlib import Path

from schemas.run_directory import RunDirectory, is_run, record_name, record_names, runs_in
from tests import ROOT, builders


def test_records_of_host_and_gang_have_separate_paths() -> None:
    """A host has a second record for the launches with its gang (the hosts of one multi-node launch)."""
    assert record_name("h1") == "hosts/h1.json"
    assert record_name("h1", "rack12") == "gangs/rack12/h1.json"
    assert RunDirectory(Path("r1")).record("h1", "rack12") == Path("r1/gangs/rack12/h1.json")


def test_plan_lists_the_expected_records() -> None:
    plan = builders.plan("h1", "h2")
    gang = plan.hosts[0].gang
    assert record_names(plan) == {
        "hosts/h1.json": ("h1", ""),
        "hosts/h2.json": ("h2", ""),
        f"gangs/{gang}/h1.json": ("h1", gang),
        f"gangs/{gang}/h2.json": ("h2", gang),
    }
    assert record_names(builders.plan("h1", "h2", rackproof_gang="none")).keys() == {"hosts/h1.json", "hosts/h2.json"}


def test_records_of_the_plan_are_found(tmp_path: Path) -> None:
    plan, paths = builders.plan("h1", "h2"), RunDirectory(tmp_path)
    paths.make(plan)
    for name in record_names(plan):
        (tmp_path / name).touch()
    assert sorted(map(paths.relative, paths.records())) == sorted(record_names(plan))


def test_directory_with_a_plan_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    assert not is_run(tmp_path / "r1")
    assert runs_in(tmp_path) == []
    RunDirectory(tmp_path / "r1").plan.touch()
    assert is_run(tmp_path / "r1")
    assert runs_in(tmp_path) == [tmp_path / "r1"]


def test_only_the_module_run_directory_builds_paths_of_a_run_directory() -> None:
    joined = re.compile(
        r'f?"(?:hosts|gangs)/|/ "(?:plan|report|hosts|gangs|events|progress|journal|lock)[".]|/ "verdicts\.prom"'
    )
    matches = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("agent", "fleet", "schemas", "rackproof")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if joined.search(line) and path.name != "run_directory.py"
    ]
    assert matches == []
