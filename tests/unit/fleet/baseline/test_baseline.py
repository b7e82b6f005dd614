"""Test baselines: the figures of accepted runs, with which later runs of the same hosts and GPUs are compared.

The level of a figure is a robust median over the accepted runs of one part (a host or a GPU). The noise of the figure is the
standard deviation of a new measurement around the level. The limit for later runs follows from level and noise.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.inventory.ansible import Variables
from fleet.judge.baseline import robust_level
from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from fleet.records import baseline_store
from fleet.records.load import load
from schemas import documents
from schemas.records import Record, Samples
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import ROOT, builders
from tests.accepted import Change, call, report_of, run_directory, slowed, small_plan, swapped

COPY = {"op": "copy"}
PACKS = read_packs(())


# The level of a figure over several runs


@pytest.mark.parametrize("wrong", [10_000.0, 0.0, 300.0, 440.0, -1e9])
@pytest.mark.parametrize("count", [5, 10, 20])
def test_level_is_correct_although_two_fifths_of_the_values_are_wrong(wrong: float, count: int) -> None:
    source = random.Random(count)  # noqa: S311
    correct = [source.gauss(401.0, 0.8) for _ in range(count * 3 // 5)]
    mixed = correct + [wrong] * (count * 2 // 5)
    source.shuffle(mixed)
    result = robust_level(mixed)
    assert result.value == pytest.approx(statistics.median(correct), abs=0.8)
    assert result.left_out == count * 2 // 5
    assert result.sigma < 3 * 0.8


@settings(max_examples=60, deadline=None)
@given(
    right=st.lists(st.floats(400.0, 402.0), min_size=12, max_size=12),
    wrong=st.lists(st.floats(-1e6, 1e6), min_size=8, max_size=8),
)
def test_level_stays_near_the_correct_values_despite_wrong_values(right: list[float], wrong: list[float]) -> None:
    assert 396.0 <= robust_level(right + wrong).value <= 406.0


# Accepting a run, which adds it to the baseline


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the healthy run `good` of h1 and h2, which have two GPUs each, with its report. Tests must not change it."""
    run = run_directory(tmp_path_factory.mktemp("runs") / "good")
    assert call("report", run) == 0
    return run


@pytest.fixture(scope="module")
def accepted_once(reported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Accept the run `good`; return the directory of the baseline, which tests must not change."""
    base = tmp_path_factory.mktemp("accepted") / "base"
    assert call("baseline", "accept", reported, "--baseline", base, "--by", "Ada", "--why", "hand-over") == 0
    return base


@pytest.fixture
def base(accepted_once: Path, tmp_path: Path) -> Path:
    """Return a copy of the baseline with the run `good`."""
    return shutil.copytree(accepted_once, tmp_path / "base")


@pytest.fixture
def good(reported: Path, tmp_path: Path) -> Path:
    """Return a copy of the run `good` with its report."""
    return shutil.copytree(reported, tmp_path / "good")


def test_accepted_run_is_stored_by_host_name_and_gpu_serial(base: Path) -> None:
    assert {str(path.relative_to(base)) for path in base.rglob("*.json")} == {
        *(f"hosts/{host}.json" for host in ("h1", "h2")),
        *(f"gpus/{host}-{index}.json" for host in ("h1", "h2") for index in (0, 1)),
    }
    document = documents.read(base / "gpus" / "h1-0.json", "baseline")
    (run,) = document["runs"]
    assert (run["run_id"], run["by"], run["why"], run["status"]) == ("good", "Ada", "hand-over", "PASS")
    copy = next(item for item in document["figures"] if item["name"] == "memory.bandwidth")
    assert (copy["value"], copy["values"]) == (4.27e12, {"good": 4.27e12})


def test_run_without_a_report_or_with_a_rejection_cannot_become_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path / "bad", change=slowed("memory.bandwidth", 0.5, **COPY))
    assert call("baseline", "accept", run, "--baseline", tmp_path / "base") == 2
    assert "run `rackproof report" in capsys.readouterr().err
    assert call("report", run) == 1
    assert call("baseline", "accept", run, "--baseline", tmp_path / "base") == 2
    assert "run bad is rejected: only an accepted run can be a baseline" in capsys.readouterr().err
    report = report_of(run)
    documents.write(run / "report.json", {**report, "decision": "accepted"})  # edited by hand
    assert call("baseline", "accept", run, "--baseline", tmp_path / "base") == 2
    assert (
        "is rejected when it is judged again, but the decision in its report is `accepted`" in capsys.readouterr().err
    )
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report: {**report, "verdicts": report["verdicts"][1:]}, "report.json does not match the records: "),
        (lambda report: {**report, "verdicts": "none"}, "report.json: verdicts: 'none' is not a list"),
        (lambda report: {**report, "colour": 1}, "report.json: the document: unknown colour"),
    ],
    ids=["lacks a verdict", "verdicts are a text", "unknown field"],
)
def test_changed_report_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]],
    message: str,
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    documents.write(good / "report.json", change(report_of(good)))
    assert call("baseline", "accept", good, "--baseline", tmp_path / "base") == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert f"`rackproof report {good}`" in errors
    assert not (tmp_path / "base").exists()


def test_symlinked_report_is_refused(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (good / "report.json").rename(tmp_path / "elsewhere.json")
    (good / "report.json").symlink_to(tmp_path / "elsewhere.json")
    assert call("baseline", "accept", good, "--baseline", tmp_path / "base") == 2
    assert "report.json: Too many levels of symbolic links" in capsys.readouterr().err


def test_run_with_waived_failures_can_be_added_only_with_its_waivers(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "r1", change=slowed("memory.bandwidth", 0.974, **COPY))
    waivers = tmp_path / "w.yml"
    waivers.write_text(
        "schema: rackproof.waivers/1\nwaivers:\n"
        + "".join(
            f"  - {{criterion: {name}, host: h1, who: Ada, why: agreed in annex 3, until: 2027-01-01}}\n"
            for name in ("hbm-copy", "memory-vs-fleet")
        )
    )
    assert call("report", run, "--waivers", waivers) == 0
    base = tmp_path / "base"
    assert call("baseline", "accept", run, "--baseline", base) == 2  # without the waivers the run is rejected
    assert call("baseline", "accept", run, "--baseline", base, "--waivers", waivers) == 0
    (entry,) = documents.read(base / "gpus" / "h1-0.json", "baseline")["runs"]
    assert entry["status"] == "PASS WITH WAIVERS"
    assert any("hbm-copy on h1" in text and "waived by Ada" in text for text in entry["waivers"])
    (other,) = documents.read(base / "gpus" / "h2-0.json", "baseline")["runs"]
    assert "waivers" not in other  # no waiver is for a GPU of h2


@pytest.mark.parametrize("kind", ["rehearsal", "simulated"])
def test_rehearsals_and_simulations_do_not_use_the_baseline_of_real_gpus(kind: str, base: Path, tmp_path: Path) -> None:
    reference = baseline_store.snapshot_baseline(base, "gpu", ["h1"], tmp_path / "after")
    plan = replace(small_plan("h1"), baseline=reference)
    other = replace(plan, rehearsal=kind == "rehearsal", simulated=kind == "simulated")
    assert baseline_store.kind_of(other) == kind
    assert baseline_store.kind_directory(tmp_path, kind) == tmp_path / kind
    assert baseline_store.BaselineSnapshot(tmp_path / "after", plan).of_host("h1", ()).problem == ""
    problem = baseline_store.BaselineSnapshot(tmp_path / "after", other).of_host("h1", ()).problem
    assert "baseline/index.json: not the snapshot that the plan refers to" in problem


def test_baseline_of_another_kind_is_refused(base: Path, tmp_path: Path) -> None:
    document = documents.read(base / "hosts" / "h1.json", "baseline")
    documents.write(base / "hosts" / "h1.json", {**document, "kind": "simulated"})
    assert "kind simulated, expected gpu" in baseline_store.of_host(base, "gpu", "h1").problem


def accept_runs(base: Path, runs: Path, shares: list[float]) -> None:
    """Accept one run for each share. In this run, the copy bandwidth of GPU 0 of h1 is the normal one times the share."""
    for number, share in enumerate(shares):
        run = run_directory(runs / f"run{number}", change=slowed("memory.bandwidth", share, **COPY))
        assert call("report", run) == 0
        assert call("baseline", "accept", run, "--baseline", base) == 0


def copy_level(base: Path) -> dict[str, object]:
    """Return the level of the copy bandwidth of GPU 0 of h1 in a baseline."""
    figures = documents.read(base / "gpus" / "h1-0.json", "baseline")["figures"]
    result: dict[str, object] = next(item for item in figures if item["name"] == "memory.bandwidth")
    return result


def test_level_and_noise_follow_from_all_accepted_runs(tmp_path: Path) -> None:
    accept_runs(tmp_path / "base", tmp_path / "runs", [1.0, 1.001, 0.999])
    stored_level = copy_level(tmp_path / "base")
    assert stored_level["value"] == pytest.approx(4.27e12)
    # 0.8862 corrects the bias of a standard deviation of three values.
    assert stored_level["sigma"] == pytest.approx(0.001 / 0.8862, rel=1e-3)
    again = tmp_path / "runs" / "run1"
    # A run that is accepted twice counts once.
    assert call("baseline", "accept", again, "--baseline", tmp_path / "base") == 0
    assert set(copy_level(tmp_path / "base")["values"]) == {"run0", "run1", "run2"}  # type: ignore[call-overload]
    # With `--replace`, only the newly accepted run counts.
    assert call("baseline", "accept", again, "--baseline", tmp_path / "base", "--replace") == 0
    assert set(copy_level(tmp_path / "base")["values"]) == {"run1"}  # type: ignore[call-overload]


def test_accepting_several_runs_with_replace_replaces_the_earlier_run_of_each_part(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baseline `base` has one run, of h1 and h2. The runs a and c of h1, and b of h2, replace it."""
    runs = [
        run_directory(tmp_path / name, hosts=hosts) for name, hosts in (("a", ["h1"]), ("b", ["h2"]), ("c", ["h1"]))
    ]
    assert [call("report", run) for run in runs] == [0, 0, 0]
    capsys.readouterr()
    assert call("baseline", "accept", *runs, "--baseline", base, "--replace", "--json") == 0
    listed = {item["id"]: item["runs"] for item in json.loads(capsys.readouterr().out)}
    assert listed == {name: ["a", "c"] for name in ("h1", "h1-0", "h1-1")} | {
        name: ["b"] for name in ("h2", "h2-0", "h2-1")
    }


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three accepted runs in the order in which they began. GPU 1 of h2 was replaced after the first and the second."""
    directory = tmp_path_factory.mktemp("repaired")
    runs = [
        run_directory(
            directory / f"r{number}", change=swapped("h2", 1, f"S-{number}"), created=f"2025-0{number}-01T04:00:00Z"
        )
        for number in (1, 2, 3)
    ]
    assert [call("report", run) for run in runs] == [0, 0, 0]
    return runs


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_baseline_does_not_depend_on_the_order_in_which_runs_are_accepted(
    repaired: list[Path], tmp_path: Path, order: tuple[int, ...]
) -> None:
    base = tmp_path / "base"
    assert call("baseline", "accept", *(repaired[number] for number in order), "--baseline", base) == 0
    host = documents.read(base / "hosts" / "h2.json", "baseline")
    assert [run["run_id"] for run in host["runs"]] == ["r1", "r2", "r3"]
    assert [gpu["serial"] for gpu in host["gpus"]] == ["h2-0", "S-3"]
    assert judge_with_baseline(base, tmp_path / "after", swapped("h2", 1, "S-3")) == []


def test_run_that_is_older_than_all_runs_that_a_baseline_keeps_is_refused(
    repaired: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    assert call("baseline", "accept", repaired[1], "--baseline", base) == 0
    for path in base.rglob("*.json"):
        document = documents.read(path, "baseline")
        (run,) = document["runs"]
        runs = [{**run, "run_id": f"kept{number}"} for number in range(20)]
        documents.write(path, {**document, "runs": runs, "figures": []})
    assert call("baseline", "accept", repaired[0], "--baseline", base) == 64
    assert "has 20 runs that began after r1, and keeps only the newest 20" in capsys.readouterr().err
    assert call("baseline", "accept", repaired[2], "--baseline", base) == 0
    assert [run["run_id"] for run in documents.read(base / "hosts" / "h1.json", "baseline")["runs"]][-2:] == [
        "kept19",
        "r3",
    ]


def test_wrong_future_date_of_a_run_does_not_make_it_the_newest_for_ever(repaired: list[Path], tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert call("baseline", "accept", repaired[0], "--baseline", base) == 0
    for path in base.rglob("*.json"):
        document = documents.read(path, "baseline")
        (run,) = document["runs"]
        documents.write(
            path, {**document, "runs": [{**run, "began": "2099-01-01T00:00:00Z", "at": "2025-01-02T00:00:00Z"}]}
        )
    assert call("baseline", "accept", repaired[1], "--baseline", base) == 0
    assert [gpu["serial"] for gpu in documents.read(base / "hosts" / "h2.json", "baseline")["gpus"]] == ["h2-0", "S-2"]


def test_another_run_of_the_same_name_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path / "again" / "good", nonce="f" * 32)
    assert call("report", run) == 0
    assert call("baseline", "accept", run, "--baseline", base) == 64
    assert "has another run named good" in capsys.readouterr().err


def test_baseline_list_and_show_print_the_parts(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert call("baseline", "list", "--baseline", base, "--json") == 0
    assert {item["id"] for item in json.loads(capsys.readouterr().out)} == {"h1", "h2", "h1-0", "h1-1", "h2-0", "h2-1"}
    assert call("baseline", "show", "h1-0", "--baseline", base) == 0
    shown = capsys.readouterr().out
    assert "gpu h1-0, last accepted in h1 gpu=0" in shown
    assert "run good (PASS)" in shown
    assert call("baseline", "show", "h1-9", "--baseline", base) == 64
    assert "did you mean h1-" in capsys.readouterr().err


def test_show_suggests_the_kind_for_which_the_host_has_a_baseline(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(
        tmp_path / "made-up", hosts=["s1", "s2"], simulated=True, change=lambda record: replace(record, simulated=True)
    )
    assert call("report", run) == 0
    assert call("baseline", "accept", run, "--baseline", base) == 0
    assert call("baseline", "show", "s1", "--baseline", base) == 64
    assert f"no baseline of s1 of kind gpu in {base}: there is a baseline of kind simulated: give --kind simulated" in (
        capsys.readouterr().err
    )
    assert call("baseline", "show", "s1", "--baseline", base, "--kind", "simulated") == 0
    assert call("baseline", "show", "h9", "--baseline", base) == 64
    assert f"rackproof baseline list --baseline {base} --kind gpu" in capsys.readouterr().err


@pytest.mark.parametrize("serial", ["../../etc/passwd", "", "a" * 300, "ümlaut", ".hidden"])
def test_serial_cannot_escape_the_baseline_directory(serial: str) -> None:
    path = baseline_store.path_of("gpu", serial)
    assert path.startswith("gpus/")
    assert path.count("/") == 1
    assert ".." not in path
    assert len(path) < 120


# Judging with a baseline


def judge_with_baseline(base: Path, directory: Path, change: Change = lambda record: record) -> list[Verdict]:
    """Write a run to `directory`, judge it with the baseline, and return the verdicts other than passes."""
    baseline = baseline_store.snapshot_baseline(base, "gpu", ["h1", "h2"], directory)
    run = load(run_directory(directory, change=change, baseline=baseline))
    return [item for item in judge(run.plan, run.evidence, PACKS) if item.verdict != PASS]


def test_unchanged_run_passes(base: Path, tmp_path: Path) -> None:
    assert judge_with_baseline(base, tmp_path / "after") == []


def test_loss_beyond_the_limit_fails_only_the_slow_part(base: Path, tmp_path: Path) -> None:
    # 0.95 of the level is below the limit, which is 0.96 of the level.
    verdicts = judge_with_baseline(base, tmp_path / "after", slowed("stress.throughput", 0.95))
    (verdict,) = [item for item in verdicts if item.criterion.startswith("baseline")]
    assert (verdict.host, verdict.scope, verdict.criterion, verdict.verdict) == ("h1", "gpu=0", "baseline-stress", FAIL)
    assert "96 % of the accepted level; this level is 700 TFLOP/s (one accepted run)" in verdict.detail


def test_slow_part_fails_even_if_its_samples_are_noisy(base: Path, tmp_path: Path) -> None:
    slow = slowed("stress.throughput", 0.95)

    def change(record: Record) -> Record:
        noisy = tuple(
            replace(observation, samples=Samples(n=6, min=0.9, p50=1.0, max=1.1, cv=0.5))
            if observation.name == "stress.throughput"
            else observation
            for observation in slow(record).observations
        )
        return replace(record, observations=noisy)

    verdicts = judge_with_baseline(base, tmp_path / "after", change)
    assert [item.criterion for item in verdicts if item.criterion.startswith("baseline")] == ["baseline-stress"]


def test_verdict_on_a_replaced_gpu_is_inconclusive_and_names_the_old_gpu(base: Path, tmp_path: Path) -> None:
    verdicts = judge_with_baseline(base, tmp_path / "after", swapped("h2", 1, "S-NEW"))
    assert [(item.host, item.scope, item.verdict, item.criterion) for item in verdicts] == [
        ("h2", "gpu=1", INCONCLUSIVE, "baseline")
    ]
    assert "no accepted record of serial S-NEW: this GPU replaces h2-1" in verdicts[0].reason


def test_verdict_on_a_host_without_baseline_is_inconclusive(base: Path, tmp_path: Path) -> None:
    (base / "hosts" / "h2.json").unlink()
    verdicts = judge_with_baseline(base, tmp_path / "after")
    assert {(item.host, item.verdict, item.criterion) for item in verdicts} == {("h2", INCONCLUSIVE, "baseline")}
    assert "no accepted record of host h2" in verdicts[0].reason


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("index.json", '"kind": "gpu"', '"kind":  "gpu"'),  # the checksum of the index also covers spaces
        ("gpus/h1-0.json", "4270000000000.0", "1.0"),
    ],
)
def test_run_is_inconclusive_if_its_baseline_snapshot_was_changed_later(
    name: str, old: str, new: str, base: Path, tmp_path: Path
) -> None:
    judge_with_baseline(base, tmp_path / "after")
    path = tmp_path / "after" / "baseline" / name
    path.write_text(path.read_text().replace(old, new))
    run = load(tmp_path / "after")
    verdicts = [item for item in judge(run.plan, run.evidence, PACKS) if item.verdict != PASS]
    assert verdicts
    assert all(item.verdict == INCONCLUSIVE and "is invalid" in item.reason for item in verdicts)


def test_later_changes_of_the_baseline_do_not_affect_a_planned_run(base: Path, tmp_path: Path) -> None:
    judge_with_baseline(base, tmp_path / "after")
    for path in base.rglob("*.json"):
        path.unlink()
    run = load(tmp_path / "after")
    assert [item for item in judge(run.plan, run.evidence, PACKS) if item.verdict != PASS] == []


def test_report_lists_regressions_and_replaced_parts(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slowed_and_swapped(record: Record) -> Record:
        return swapped("h2", 1, "S-NEW")(slowed("stress.throughput", 0.9)(record))

    judge_with_baseline(base, tmp_path / "after", slowed_and_swapped)
    capsys.readouterr()
    assert call("report", tmp_path / "after") == 1
    shown, report = " ".join(capsys.readouterr().out.split()), report_of(tmp_path / "after")
    assert "1 regressed, 1 part differs" in shown
    assert "REGRESSED h1 gpu=0: stress.throughput" in shown
    assert "REPLACED h2 gpu=1: GPU h2-1 was replaced by S-NEW" in shown
    assert [item["kind"] for item in report["changes"]] == ["regressed", "replaced"]
    assert report["baseline"] == json.loads((tmp_path / "after" / "plan.json").read_text())["baseline"]["digest"]
    assert "Changes since acceptance" in (tmp_path / "after" / "report.md").read_text()


def test_run_without_baseline_has_no_baseline_verdicts(tmp_path: Path) -> None:
    run = load(run_directory(tmp_path / "plain"))
    assert not [item for item in judge(run.plan, run.evidence, PACKS) if item.criterion.startswith("baseline")]


# The plan


def inventory(path: Path, **variables: object) -> Path:
    hosts: dict[str, Variables] = builders.inventory(
        "h1", "h2", rackproof_gpu_count=2, rackproof_gang="none", rackproof_profile="smoke", **variables
    )
    path.write_text(json.dumps({"gpu_hosts": {"hosts": list(hosts)}, "_meta": {"hostvars": hosts}}))
    return path


def test_plan_has_the_digest_of_the_baseline_and_a_resumed_run_keeps_this_digest(base: Path, tmp_path: Path) -> None:
    listing = inventory(tmp_path / "inventory.json", rackproof_baseline=str(base))
    run = tmp_path / "runs" / "after"
    assert call("plan", "-i", listing, "--run-dir", run) == 0
    plan = documents.read(run / "plan.json", "plan")
    assert plan["baseline"]["directory"] == str(base)
    document = documents.read(base / "gpus" / "h1-0.json", "baseline")
    documents.write(base / "gpus" / "h1-0.json", {**document, "slot": "gpu=1"})
    assert call("plan", "-i", listing, "--run-dir", run) == 0
    assert documents.read(run / "plan.json", "plan")["baseline"] == plan["baseline"]


def test_plan_with_a_missing_baseline_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = inventory(tmp_path / "inventory.json", rackproof_baseline=str(tmp_path / "nowhere"))
    assert call("plan", "-i", listing, "--run-dir", tmp_path / "runs" / "after") == 64
    assert "accept a run first" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "after" / "plan.json").exists()


HOSTILE = '"><script>\x1b[2J=cmd|x../../etc\u202e' + "z" * 400


def test_hostile_serial_is_stored_compared_and_shown_safely(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_directory(tmp_path / "runs" / "good", change=swapped("h1", 0, HOSTILE))
    base = tmp_path / "base"
    assert call("report", run) == 0
    assert call("baseline", "accept", run, "--baseline", base) == 0
    assert len(list(base.rglob("*.json"))) == 6
    after = run_directory(tmp_path / "runs" / "after")
    capsys.readouterr()
    assert call("baseline", "list", "--baseline", base) == 0
    listed = capsys.readouterr().out
    assert call("diff", base, after, "--markdown") == 1
    output = capsys.readouterr().out
    assert "<script>" not in output
    assert call("diff", base, after) == 1
    output += capsys.readouterr().out
    assert "was replaced by h1-0" in output
    assert not {"\x1b", "\u202e"} & set(listed + output)


# Records from real GPUs


MEASURED_RUNS = ROOT / "docs" / "measurements"


def test_real_gpu_slowed_by_another_process_is_a_regression(capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one machine with four H200. In the later run, another process used GPU 2 for 5 % of the time."""
    runs = (MEASURED_RUNS / "h200x4-compared", MEASURED_RUNS / "h200x4-slowed-0.05")
    assert call("diff", *runs, "--json") == 1
    document = [item for item in json.loads(capsys.readouterr().out)["changes"] if item["kind"] == "regressed"]
    assert {(item["scope"], item["what"]) for item in document} == {("gpu=2", "memory.bandwidth")}
