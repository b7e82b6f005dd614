"""Each GPU of a board has its own comparison, waiver, baseline and history, although the GPUs report one serial.

In simulated runs with the change `on_boards`, GPUs 0 and 1 of each host have one serial, and GPUs 2 and 3 another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from fleet.records import baseline_store
from fleet.report.judge_run import judge_report
from schemas.baselines import SIMULATED
from schemas.reports import FAIL, REJECTED, Verdict
from tests.accepted import call, rackproof, report_of
from tests.simulated import Document, on_boards, own, simulate

Change = Callable[[Document], None]

UUID = "GPU-51400000-0000-4000-8000-00000001000{}"
"""UUID of a GPU of r01-h02."""


def lines(*arguments: object) -> tuple[int, list[str]]:
    """Return exit code and output lines of a call of `rackproof`."""
    done = rackproof(*arguments)
    return done.returncode, [" ".join(line.split()) for line in (done.stdout + done.stderr).splitlines()]


def changes(*directories: Path) -> set[tuple[str, str, str, str]]:
    """Return (kind, host, scope, what has changed) for each change because of which `rackproof diff` exits with 1."""
    document = json.loads(rackproof("diff", *directories, "--json").stdout)
    return {
        (item["kind"], item["host"], item["scope"], item["what"])
        for item in document["changes"]
        if item["kind"] in ("regressed", "replaced", "moved", "new", "gone")
    }


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Change], tuple[Path, Path, list[str]]]:
    """Return a function that returns a healthy run with a report, the baseline from this run, and the output of `accept`.

    The argument of the function changes the records of the run. Tests must not change the directories.
    """

    @cache
    def accepted_run(change: Change) -> tuple[Path, Path, list[str]]:
        directory = tmp_path_factory.mktemp("accepted")
        run, baselines = simulate(directory / "before", change=change), directory / "baselines"
        assert call("report", run) == 0
        code, shown = lines(
            "baseline", "accept", run, "--baseline", baselines, "--by", "Ada Example", "--why", "a test of boards"
        )
        assert code == 0, shown
        return run, baselines, shown

    return accepted_run


@pytest.mark.parametrize(
    ("host", "present"),
    [("r01-h02", []), ("r01-h02", [3]), ("r01-h99", [0, 1, 2, 3])],
    ids=["no GPU is left", "one GPU of a board is left", "the boards are in a host without a baseline"],
)
def test_baseline_of_each_gpu_of_a_board_is_found(
    accepted: Callable[[Change], tuple[Path, Path, list[str]]], host: str, present: list[int]
) -> None:
    _, baselines, _ = accepted(on_boards)
    accepted_host = baseline_store.of_host(baselines, SIMULATED, "r01-h02").host
    assert accepted_host
    gpus = {gpu.uuid: gpu for gpu in accepted_host.gpus if gpu.index < 4}
    assert len({gpu.serial for gpu in gpus.values()}) == 2
    result = baseline_store.of_host(baselines, SIMULATED, host, [gpu for gpu in gpus.values() if gpu.index in present])
    assert gpus.keys() <= result.gpus.keys()
    assert {name: result.gpus[name].id for name in gpus} == {name: name for name in gpus}


@pytest.mark.parametrize("faults", [("slow_gpu", "slow_hbm"), ("missing_gpu", "nvlink_down")], ids="-".join)
@pytest.mark.parametrize("gpu", [0, 1])
def test_shared_serials_change_nothing_in_what_diff_finds(
    tmp_path: Path, accepted: Callable[[Change], tuple[Path, Path, list[str]]], faults: tuple[str, str], gpu: int
) -> None:
    """Each of the two hosts has one of the faults."""
    requests = [f"{fault}:r01-h0{number}:{gpu}" for number, fault in enumerate(faults, 1)]
    result = []
    for name, change in (("own", own), ("shared", on_boards)):
        before, baselines, _ = accepted(change)
        after = simulate(tmp_path / name / "after", *requests, day=2, change=change)
        result.append((changes(before, after), changes(baselines, after)))
    assert result[0] == result[1]
    for found in result[0]:
        assert {host for _, host, _, _ in found} >= {"r01-h01", "r01-h02"}, "diff must find both faults"


def test_gpu_that_reappears_on_a_board_is_new_and_its_neighbour_is_unchanged(tmp_path: Path) -> None:
    before = simulate(tmp_path / "before", "missing_gpu:r01-h02:0", change=on_boards)
    after = simulate(tmp_path / "after", day=2, change=on_boards)
    assert {item for item in changes(before, after) if item[3] == "GPU"} == {("new", "r01-h02", "gpu=0", "GPU")}


def test_baseline_has_a_file_for_each_gpu_of_a_board(
    accepted: Callable[[Change], tuple[Path, Path, list[str]]],
) -> None:
    _, baselines, shown = accepted(on_boards)
    files = {path.stem for path in (baselines / "simulated/gpus").glob("*.json")}
    assert "2 hosts and 8 GPUs" in " ".join(shown)
    assert files == {f"GPU-51400000-0000-4000-8000-0000000{host}000{gpu}" for host in (0, 1) for gpu in range(4)}


def test_file_of_a_gpu_with_its_own_serial_is_still_named_by_the_serial(
    accepted: Callable[[Change], tuple[Path, Path, list[str]]],
) -> None:
    _, baselines, _ = accepted(own)
    files = {path.stem for path in (baselines / "simulated/gpus").glob("*.json")}
    assert files == {f"SIM00000{host}0{gpu}" for host in (0, 1) for gpu in range(4)}


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Verdict]]:
    """Return a run and its failed verdicts. GPUs 0 and 1 of r01-h02, which share a serial, fail in this run."""
    run = simulate(tmp_path_factory.mktemp("failed") / "r1", "ecc:r01-h02:0", "ecc:r01-h02:1", change=on_boards)
    failed = [item for item in judge_report(run, []).verdicts if item.verdict == FAIL]
    assert {item.scope for item in failed} >= {"gpu=0", "gpu=1"}
    return run, failed


@pytest.mark.parametrize(
    ("target", "waived"),
    [
        ({"serial": "SIM00000100"}, set()),
        ({"host": "r01-h02", "serial": "SIM00000100"}, set()),
        ({"serial": "SIM00000100", "scope": "gpu=0"}, {"gpu=0"}),
        ({"serial": UUID.format(0)}, {"gpu=0"}),
        ({"serial": UUID.format(1)}, {"gpu=1"}),
        ({"host": "r01-h02", "scope": "gpu=1"}, {"gpu=1"}),
    ],
)
def test_waiver_by_a_shared_serial_needs_a_scope_or_the_uuid(
    tmp_path: Path, failed_run: tuple[Path, list[Verdict]], target: dict[str, str], waived: set[str]
) -> None:
    run, failed = failed_run
    waivers = [
        {**target, "criterion": criterion, "who": "Ada Example", "why": "a test of boards", "until": "2999-12-31"}
        for criterion in sorted({item.criterion for item in failed})
    ]
    path = tmp_path / "waivers.yml"
    path.write_text(json.dumps({"schema": "rackproof.waivers/1", "waivers": waivers}))
    report = judge_report(run, [], [str(path)])
    assert report.decision == REJECTED
    verdicts = [item for item in report.verdicts if item.verdict == FAIL]
    assert {item.scope for item in verdicts if item.waiver} == waived
    notes = [item.reason for item in verdicts if "several GPUs of the host have the serial" in item.reason]
    assert bool(notes) is not bool(waived)


def test_history_tells_failures_of_gpus_on_one_board_apart(tmp_path: Path) -> None:
    seen = []
    for day, gpu in ((1, 0), (2, 1), (3, 0)):
        run = simulate(tmp_path / f"r{day}", f"ecc:r01-h02:{gpu}", day=day, change=on_boards)
        assert call("report", run, "--history", tmp_path / "history") == 1
        seen.append(report_of(run).get("history", {}).get("causes", []))
    assert [bool(causes) for causes in seen] == [False, False, True]


def test_history_marks_no_gpu_of_a_board_as_duplicate(tmp_path: Path) -> None:
    """The history stores the UUID of a GPU as its serial if several GPUs of the host report one serial."""
    assert call("report", simulate(tmp_path / "r1", change=on_boards), "--history", tmp_path / "history") == 0
    query = "select count(distinct serial) as gpus, bool_or(duplicate) as twice from figures where serial <> ''"
    done = rackproof("history", "sql", query, "--history", tmp_path / "history", "--kind", "simulated", "--csv")
    assert done.stdout.split() == ["gpus,twice", "8,false"]
