"""Test `rackproof judge`: another pack changes only the verdicts of its criteria, and no file is written without --write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.report.judge_run import judge_report
from fleet.report.rejudge import VerdictChange, change_lines, changed_verdicts
from schemas.waivers import Waiver
from tests.accepted import call, report_of, run_directory

PACK = """\
schema: rackproof.criteria/1
summary: site
criteria:
  - {{id: {id},{replaces}
     name: memory.bandwidth, scope: gpu, where: {{op: copy}}, operator: ge, value: {value}, unit: B/s, action: rma,
     source: "the contract, annex 3"}}
"""


def pack(path: Path, criterion: str, value: str) -> Path:
    """Write a pack with one criterion. Unless its id is `site`, the criterion replaces the shipped one with the same id."""
    replaces = f" replaces: {criterion}," if criterion != "site" else ""
    path.write_text(PACK.format(id=criterion, value=value, replaces=replaces))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of an accepted run with its report."""
    directory = run_directory(tmp_path / "run1")
    assert call("report", directory) == 0
    return directory


def without_criterion(verdicts: list[dict[str, object]], criterion: str) -> list[dict[str, object]]:
    return [verdict for verdict in verdicts if verdict["criterion"] != criterion]


def test_tighter_criterion_changes_only_its_own_verdicts(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "report.json").read_bytes()
    tighter = pack(tmp_path / "tighter.yml", "hbm-copy", "4.5e+12")
    capsys.readouterr()
    assert call("judge", run, "--criteria", tighter, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["was"]["status"], document["status"]) == ("PASS", "FAIL")
    new = [(change["kind"], change["new"]) for change in document["changes"]]
    changed = {(kind, verdict["host"], verdict["scope"], verdict["criterion"]) for kind, verdict in new}
    assert changed == {("verdict", host, f"gpu={index}", "hbm-copy") for host in ("h1", "h2") for index in (0, 1)}
    assert {(item["old"]["verdict"], item["new"]["verdict"]) for item in document["changes"]} == {("pass", "fail")}
    assert (run / "report.json").read_bytes() == before
    old = report_of(run)["verdicts"]
    assert call("judge", run, "--criteria", tighter, "--write") == 1
    assert without_criterion(report_of(run)["verdicts"], "hbm-copy") == without_criterion(old, "hbm-copy")
    assert report_of(run)["decision"] == "rejected"


def test_same_criteria_change_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert call("judge", run) == 0
    assert "run1: PASS, unchanged\nno verdict changed; " in capsys.readouterr().out


def test_new_criterion_and_changed_limit_are_distinguished(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert call("judge", run, "--criteria", pack(tmp_path / "more.yml", "site", "1.0e+12")) == 0
    assert "PASS, unchanged\nverdicts: 4 new; " in capsys.readouterr().out
    assert call("judge", run, "--criteria", pack(tmp_path / "looser.yml", "hbm-copy", "3.0e+12")) == 0
    assert "PASS, unchanged\nverdicts: 4 with different details; " in capsys.readouterr().out


def test_removed_waiver_is_shown() -> None:
    verdict = {"host": "h1", "scope": "gpu=0", "name": "n", "criterion": "c", "verdict": "fail", "reason": "slow"}
    change = VerdictChange(kind="waiver", old={**verdict, "waiver": {"who": "alice"}}, new=verdict)
    assert str(change) == "h1 gpu=0: n: c: fail (waived) → fail: slow"


def test_new_waiver_is_listed_as_a_changed_waiver(run: Path) -> None:
    report = judge_report(run, [], [])
    first, *others = report.verdicts
    waiver = Waiver(criterion=first.criterion, who="alice", why="spare part ordered", until="2099-12-31")
    report = replace(report, verdicts=(replace(first, waiver=waiver), *others))
    old = report_of(run)
    changes = changed_verdicts(old, report)
    assert [change.kind for change in changes] == ["waiver"]
    assert "1 with a changed waiver; " in "\n".join(change_lines(old, report, changes))


@pytest.mark.parametrize(("left_out", "state"), [(0, "not judged"), (3, "not listed")])
def test_missing_verdict_is_shown_as_not_judged_or_not_listed(run: Path, left_out: int, state: str) -> None:
    """`left_out` is the number of verdicts that the report does not list. The missing verdict may be one of them."""
    old, report = report_of(run), replace(judge_report(run, [], []), left_out=left_out)
    (gone,) = changed_verdicts(old, replace(report, verdicts=report.verdicts[1:]))
    assert gone.kind == "gone"
    assert f": pass → {state}: " in str(gone)
    (new,) = changed_verdicts({**old, "verdicts": old["verdicts"][1:], "left_out": left_out}, report)
    assert new.kind == "new"
    assert f": {state} → pass: " in str(new)


def test_judge_without_a_report_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("judge", run_directory(tmp_path / "fresh")) == 2
    assert "there is nothing to compare with" in capsys.readouterr().err
