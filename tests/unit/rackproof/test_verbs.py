"""Test the help, shell completions and default run (the newest) of `rackproof`, and the output of `criteria` and `diff`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.judge.criteria import shipped_packs
from fleet.records.newest import newest_first
from rackproof.main import GROUPS, VERBS, main
from tests import builders
from tests.unit.fleet.report.test_report import write_run


def test_help_lists_every_group_and_every_verb_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [f"{title}:" for title in GROUPS.values()]
    assert [line for line in lines if line in headings] == headings
    first_words = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert [word for word in first_words if word in VERBS] == list(VERBS)


def test_help_verb_and_help_option_of_a_verb_print_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for arguments in (["help", "diff"], ["diff", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("usage: rackproof diff ")


def test_version_verb_and_version_option_print_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    with pytest.raises(SystemExit):
        main(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


BASH = """
source /dev/stdin
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
function=$(complete -p rackproof | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function rackproof "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""Bash program that loads the completions from standard input, completes its last argument, and prints the possible words."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["re"], ["report", "revalidate"]),
        (["report", "--col"], ["--color"]),
        (["report", "--color", "a"], ["always", "auto"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
    ],
)
def test_bash_completion_offers_the_expected_words(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: list[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    command = ["bash", "--norc", "-c", BASH, "bash", "rackproof", *words]
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == expected


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_zsh_and_fish_accept_their_completions(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str, check: str
) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    assert "rackproof" in script.read_text()
    if shutil.which(shell):
        subprocess.run([shell, check, script], check=True)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory `runs` with three runs of one host each. Oldest first: `b` of h1, `c` of h2, `a` of h1.

    The times of their files are in the opposite order, as after a copy.
    """
    monkeypatch.chdir(tmp_path)
    for age, (name, host) in enumerate((("b", "h1"), ("c", "h2"), ("a", "h1"))):
        run = tmp_path / "runs" / name
        plan = builders.plan(host, profile="smoke", rackproof_gang="none")
        write_run(run, replace(plan, run_id=name, nonce=name * 32, created=f"2026-11-21T0{age}:00:00Z"))
        os.utime(run / "plan.json", (1_000_000 - age, 1_000_000 - age))
    return tmp_path / "runs"


def test_newest_run_is_the_default(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report"]) == 0
    assert (runs / "a" / "report.json").exists()
    assert capsys.readouterr().err == "rackproof: newest run: runs/a\n"
    assert main(["rma", "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
    assert main(["watch", "--once", "--no-ask"]) == 0
    assert "newest run: runs/a" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"created": 3}', '{"created": "today"}', '{"created": null}'])
def test_run_with_a_damaged_plan_is_sorted_by_its_file_and_named(
    runs: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (runs / "b" / "plan.json").write_text(text)
    assert [run.name for run in newest_first(runs)] == ["b", "a", "c"]
    assert main(["report"]) != 0
    assert "runs/b/plan.json" in capsys.readouterr().err
    os.utime(runs / "b" / "plan.json", (0, 0))
    assert [run.name for run in newest_first(runs)] == ["a", "c", "b"]


@given(st.permutations(range(5)), st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_order_of_runs_depends_on_plans_and_names_and_not_on_file_times(order: list[int], hours: list[int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for position, number in enumerate(order):
            path = Path(directory) / f"r{number}" / "plan.json"
            path.parent.mkdir()
            path.write_text(json.dumps({"created": f"2026-11-21T0{hours[number]}:00:00Z"}))
            os.utime(path, (position, position))
        expected = sorted(range(5), key=lambda number: (hours[number], number), reverse=True)
        assert [run.name for run in newest_first(Path(directory))] == [f"r{number}" for number in expected]


def test_diff_compares_the_newest_runs_of_the_same_hosts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff"]) == 0
    assert capsys.readouterr().err == "rackproof: newest runs of the same hosts: runs/b and runs/a\n"
    shutil.rmtree(runs / "b")
    assert main(["diff"]) == 64
    problem = "no earlier run has the same hosts and kind (real, rehearsal or simulation) as runs/a"
    assert f"{problem}: give an earlier run" in capsys.readouterr().err


def test_criteria_list_shows_packs_or_criteria(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["criteria", "list"]) == 0
    packs = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert packs == list(shipped_packs())
    assert main(["criteria", "list", "--json"]) == 0
    assert [pack["pack"] for pack in json.loads(capsys.readouterr().out)] == packs
    assert main(["criteria", "list", "xid"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert main(["criteria", "list", "xid", "--json"]) == 0
    assert [item["id"] for item in json.loads(capsys.readouterr().out)] == [row.split()[0] for row in rows]
    assert main(["criteria", "list", "--all", "--json"]) == 0
    assert {item["pack"] for item in json.loads(capsys.readouterr().out)} <= set(packs)


def test_criteria_versions_shows_the_minimum_versions_and_the_age_of_their_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["criteria", "versions", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert all(item["cves"] and item["date"] and item["url"] for item in shown["floors"])
    assert shown["stale"] == (shown["age_days"] > 90)
    assert main(["criteria", "versions"]) == 0
    text = capsys.readouterr().out
    assert f"The list of advisories dates from {shown['date']} and is {shown['age_days']} days old." in text
    assert ("older than 90 days" in text) == shown["stale"]
    for item in shown["floors"]:
        (row,) = (
            line
            for line in text.splitlines()
            if item["version"] in line and item["branch"] in line and item["product"] in line
        )
        assert item["advisory"] in row


def test_diff_shows_all_regressions_of_one_gpu_in_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A change between two GPUs is assigned to the GPU that has more changes."""
    monkeypatch.chdir(tmp_path)
    simulate = ["simulate", "--hosts", "2", "--racks", "1", "--profile", "smoke"]
    assert main([*simulate, "before"]) == 0
    assert main([*simulate, "after", "--seed", "2", "--fault", "nvlink_down:r01-h02:6"]) == 0
    capsys.readouterr()
    assert main(["diff", "before", "after"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("REGRESSED")]
    assert len(rows) == 1
    assert "GPU 6 of r01-h02" in rows[0]
    assert "14 more changes" in rows[0]
