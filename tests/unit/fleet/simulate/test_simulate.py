"""Simulated fleets: one in order has nothing wrong, faults are named and nothing else is, and nobody takes one for real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import judge
from fleet.records.load import Run, load
from fleet.report.merge import merge
from fleet.simulate import distil
from fleet.simulate.faults import FAULTS
from fleet.simulate.fleet import Fleet, placed, simulate
from fleet.simulate.measured import levels
from fleet.simulate.records import JUDGED
from rackproof.main import main
from schemas import documents
from schemas.errors import UsageError
from schemas.reports import FAIL, INCONCLUSIVE, PASS, FleetReport, Verdict
from tests import ROOT

REPOSITORY = ROOT
CREATED = "2026-11-21T04:00:00Z"
GPU = 1
"""Of the host that has a fault of a GPU."""


def run_of(directory: Path, *faults: str, jobs: int = 1, **fleet: Any) -> Path:
    """A simulated run."""
    chosen = Fleet(**{"profile": "smoke", "readings": JUDGED, "gpus": 2, **fleet})
    plan = chosen.plan(directory.name, CREATED)
    simulate(directory, chosen, placed(faults, plan, chosen.seed), plan, jobs=jobs)
    return directory


def verdicts_of(run: Run) -> list[Verdict]:
    return judge(run.plan, run.evidence, read_packs([]))


def report_of(directory: Path) -> FleetReport:
    run = load(directory)
    return merge(run.plan, run.evidence, read_packs([]), events=run.events, quarantined=run.quarantined)


# --- what it is drawn from


def test_the_data_file_is_what_the_records_say_and_small() -> None:
    path = REPOSITORY / "fleet/simulate/h200-sxm.json"
    made = distil.text_of(distil.distil(REPOSITORY / "docs/measurements"))
    assert path.read_text(encoding="utf-8") == made, "python -m fleet.simulate.distil docs/measurements makes it anew"
    assert len(made) < 200_000
    assert "docs/measurements" in json.loads(made)["source"]


def test_what_no_record_holds_says_where_it_comes_from() -> None:
    data = json.loads((REPOSITORY / "fleet/simulate/h200-sxm.json").read_text(encoding="utf-8"))
    measured = {figure["name"] for figure in data["figures"] if "source" not in figure}
    assumed = {figure["name"] for figure in data["figures"] if "source" in figure}
    assert {"gemm.throughput", "memory.bandwidth", "stress.throughput", "peer_copy.bandwidth"} <= measured
    assert assumed - measured == {name for name in assumed if name.startswith(("straggler.", "pairs."))}


def test_a_part_in_order_is_never_out_of_what_parts_measured() -> None:
    result = levels([100.0, 97.0, 101.0, 2.0])
    assert (min(result), max(result)) == (97.0, 101.0)
    assert 98.5 < sum(result) / len(result) < 100.0  # the tail is on the low side


# --- a fleet in order


@pytest.mark.parametrize(("hosts", "gpus", "racks"), [(64, 2, 8), (3, 8, 1)])
def test_a_fleet_in_order_has_nothing_wrong(tmp_path: Path, hosts: int, gpus: int, racks: int) -> None:
    report = report_of(run_of(tmp_path / "run", hosts=hosts, gpus=gpus, racks=racks))
    assert {verdict.verdict for verdict in report.verdicts} <= {PASS}
    assert not any(row.failed or row.inconclusive for row in report.judged)
    assert report.coverage.expected == report.coverage.measured > 0
    assert not report.quarantined
    assert report.acceptance.status == "SIMULATED PASS"


def test_the_acceptance_profile_with_all_readings(tmp_path: Path) -> None:
    report = report_of(run_of(tmp_path / "run", profile="standard", hosts=2, gpus=8, readings="all"))
    assert [verdict.reason for verdict in report.verdicts if verdict.verdict != PASS] == []
    assert report.acceptance.status == "SIMULATED PASS"


# --- faults

FOUND_BY: dict[str, str] = {
    "xid79": "xid-79 xid-during-run localise plan",
    "missing_gpu": "gpu-count gpu-pci-count localise plan",
    "ecc": "ecc-uncorrectable-volatile",
    "row_remap_pending": "row-remap-pending",
    "row_remap_failed": "row-remap-failed",
    "pcie_narrow": "pcie-width host-to-device device-to-host",
    "pcie_replays": "pcie-replay",
    "nvlink_down": "nvlink-active nvlink-missing peer-copy",
    "thermal": "hw-thermal-time stress-hw-thermal stress-bf16 stress-power gemm-bf16 straggler-compute",
    "slow_gpu": "work-per-cycle-vs-fleet stress-bf16 gemm-bf16 straggler-compute",
    "slow_hbm": "hbm-copy memory-vs-fleet",
    "power_limit": "power-limit-lowered stress-bf16 stress-power",
    "bad_memory_word": "integrity-wrong-words",
    "silent_corruption": "digest-majority",
    "duplicate_serial": "identity-unique",
    "wrong_vbios": "uniform-vbios",
    "missing_observations": "plan",
    "slow_nic": "localise",
    "slow_host": "localise",
    "wrong_driver": "uniform-driver",
    "hung": "localise plan",
    "unreachable": "plan",
    "no_record": "plan",
    "truncated_record": "plan",
    "stale_record": "plan",
}
WHOLE_HOST = {"xid79", "missing_gpu", "hung"}
"""Faults of a GPU with which its host can do nothing together any more."""
SAYS = {
    "unreachable": "unreachable at Prepare the hosts",
    "no_record": "is missing",
    "truncated_record": "not JSON at offset",
    "stale_record": "nonce",
    "missing_observations": "not observed; the launch finished without it",
    "hung": "not finished after 180 s",
    "slow_nic": "suspect nic",
    "slow_host": "suspect host",
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, list[Verdict]], FleetReport]:
    """Each fault on a host of its own; the first host of each rack has none."""
    racks = -(-len(FAULTS) // 7)
    chosen = Fleet(profile="smoke", readings=JUDGED, gpus=2, hosts=8 * racks, racks=racks)
    plan = chosen.plan("wrong", CREATED)
    free = [host.name for host in plan.hosts if not host.name.endswith("h01")]
    where = dict(zip(FAULTS, free, strict=False))
    directory = tmp_path_factory.mktemp("runs") / "wrong"
    faults = placed(
        [f"{kind}:{host}:{GPU}" if FAULTS[kind].of_gpu else f"{kind}:{host}" for kind, host in where.items()], plan, 0
    )
    simulate(directory, chosen, faults, plan)
    report = report_of(directory)
    all_verdicts: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        if verdict.verdict != PASS:
            all_verdicts[verdict.host].append(verdict)
    return where, all_verdicts, report


def test_every_fault_has_an_expectation_and_documentation() -> None:
    assert set(FOUND_BY) == set(FAULTS)
    text = (REPOSITORY / "docs/simulate.md").read_text(encoding="utf-8")
    assert [kind for kind in FAULTS if f"`{kind}`" not in text] == []


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_named(kind: str, wrong: tuple[dict[str, str], dict[str, list[Verdict]], FleetReport]) -> None:
    where, result, report = wrong
    mine = [
        item for item in result[where[kind]] if not (item.criterion == "identity-unique" and kind != "duplicate_serial")
    ]
    criteria = {item.criterion for item in mine}
    assert set(FOUND_BY[kind].split()) <= criteria
    if "plan" not in criteria:
        assert criteria == set(FOUND_BY[kind].split()), "nothing else is said of the host"
    assert not any("go on with the run" in item.reason for item in mine), "of hosts that do not exist"
    assert all(SAYS[kind] in item.reason for item in mine[:1] if kind in SAYS and kind not in WHOLE_HOST)
    assert any(SAYS.get(kind, "") in item.reason for item in mine)
    if FAULTS[kind].of_gpu and kind not in WHOLE_HOST:
        positions = [item.scope.split(",") for item in mine]
        assert all(f"gpu={GPU}" in parts or f"peer={GPU}" in parts for parts in positions), positions
    expected = FAIL if any(name != "plan" for name in FOUND_BY[kind].split()) else INCONCLUSIVE
    decision = next(host.decision for host in report.hosts if host.name == where[kind])
    assert decision == {FAIL: "rejected", INCONCLUSIVE: "incomplete"}[expected]


def test_no_other_host_is_named(wrong: tuple[dict[str, str], dict[str, list[Verdict]], FleetReport]) -> None:
    where, result, report = wrong
    names = [host.name for host in report.hosts]
    twin = names[names.index(where["duplicate_serial"]) + 1]
    assert set(result) == set(where.values()) | {twin}
    assert {item.host for items in result.values() for item in items if item.criterion == "identity-unique"} == {
        where["duplicate_serial"],
        twin,
    }
    assert report.acceptance.status == "SIMULATED FAIL"


@pytest.mark.parametrize("readings", ["judged", "all"])
def test_a_slow_host_leaves_its_gang_and_the_others_are_measured_again(tmp_path: Path, readings: str) -> None:
    run = load(run_of(tmp_path / "run", "slow_host:r01-h03", profile="standard", hosts=5, readings=readings))
    failed = [item for item in verdicts_of(run) if item.verdict != PASS]
    assert {item.host for item in failed} == {"r01-h03"}
    assert {"localise", "fabric-all-reduce"} <= {item.criterion for item in failed}
    launches = {host: [launch.number for launch in left.launches() if launch.stage == "gang"]
                for host, left in run.evidence.items()}  # fmt: skip
    assert launches == {f"r01-h{number:02}": [1] if number == 3 else [1, 2] for number in range(1, 6)}


# --- nobody takes it for a real fleet


def test_every_view_says_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_of(tmp_path / "run", hosts=2)
    before = {path.name for path in directory.iterdir()}
    assert main(["report", str(directory)]) == 0
    assert "FINAL ACCEPTANCE: SIMULATED PASS" in capsys.readouterr().out
    assert main(["report", str(directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulated"] is True
    views = [path for path in directory.iterdir() if path.is_file() and path.name not in before]
    assert {"report.json", "report.md", "report.html", "verdicts.prom"} <= {path.name for path in views}
    for view in views:
        assert "SIMULATED" in view.read_text(encoding="utf-8"), view.name
    document = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    assert (document["simulated"], document["acceptance"]["status"]) == (True, "SIMULATED PASS")
    prom = (directory / "verdicts.prom").read_text(encoding="utf-8")
    assert 'decision="SIMULATED accepted"' in prom
    assert 'decision="accepted"' not in prom
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "<title>SIMULATED PASS" in page
    assert "accepts no hardware" in page
    assert main(["watch", str(directory), "--once"]) == 0
    assert "SIMULATED" in capsys.readouterr().out


def test_simulated_records_are_not_believed_in_a_real_run(tmp_path: Path) -> None:
    directory = run_of(tmp_path / "run", hosts=2)
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    del plan["simulated"]
    documents.write(directory / "plan.json", plan)
    report = report_of(directory)
    assert report.acceptance.status == "INCOMPLETE"
    assert {item.path for item in report.quarantined} >= {"hosts/r01-h01.json", "hosts/r01-h02.json"}
    assert all("simulated yes, expected none" in item.reason for item in report.quarantined)
    assert report.coverage.measured == 0


def test_a_record_without_the_mark_is_not_believed_in_a_simulated_run(tmp_path: Path) -> None:
    directory = run_of(tmp_path / "run", hosts=2)
    path = directory / "hosts/r01-h02.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["simulated"]
    documents.write(path, record)
    report = report_of(directory)
    assert [item.path for item in report.quarantined] == ["hosts/r01-h02.json"]
    assert report.acceptance.status == "SIMULATED INCOMPLETE"


def test_its_gpus_have_serials_that_no_real_one_has(tmp_path: Path) -> None:
    run = load(run_of(tmp_path / "run", hosts=2))
    serials = [gpu.serial for left in run.evidence.values() for gpu in left.gpus()]
    assert serials == ["SIM00000000", "SIM00000001", "SIM00000100", "SIM00000101"]


# --- the same again


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_the_same_seed_makes_the_same_run_by_however_many_processes(tmp_path: Path) -> None:
    faults = ("ecc", "slow_nic", "unreachable")
    one, two = (
        files(run_of(tmp_path / name / "run", *faults, hosts=6, racks=2, jobs=jobs))
        for name, jobs in (("a", 1), ("b", 2))
    )
    assert one == two
    assert "events.jsonl" in one


def test_another_seed_is_another_run_of_the_same_parts(tmp_path: Path) -> None:
    first, second = (load(run_of(tmp_path / f"run{seed}", hosts=2, seed=seed)) for seed in (1, 2))
    gpus = [[gpu for left in run.evidence.values() for gpu in left.gpus()] for run in (first, second)]
    assert gpus[0] == gpus[1]
    copies = [
        [
            observed.value
            for left in run.evidence.values()
            for observed in left.benchmarks()
            if observed.name == "memory.bandwidth"
        ]
        for run in (first, second)
    ]
    assert copies[0] != copies[1]
    assert all(isinstance(one, float) and isinstance(two, float) and abs(one / two - 1) < 0.01
               for one, two in zip(*copies, strict=True))  # fmt: skip


# --- the command


def test_the_command_says_what_it_did_and_where_the_faults_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "run"
    command = [
        "simulate",
        str(directory),
        "--hosts",
        "4",
        "--gpus",
        "2",
        "--racks",
        "2",
        "--profile",
        "smoke",
        "--json",
    ]
    assert main([*command, "--fault", "ecc:r02-h01:1", "--fault", "unreachable"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["simulated"], document["hosts"], document["gpus"]) == (True, 4, 8)
    assert document["faults"][0] == {"kind": "ecc", "host": "r02-h01", "gpu": 1}
    assert document["faults"][1]["host"] != "r02-h01"
    assert main(command) == 64  # what is there is never written into
    assert "already exists" in capsys.readouterr().err


def test_the_kinds_of_faults_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list-faults"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FAULTS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--fault", "eccc"], "no fault is called eccc (did you mean ecc?)"),
        (["--fault", "ecc:r01-h99"], "no host is called r01-h99"),
        (["--fault", "ecc:r01-h01:8"], "give one of 0 to 7"),
        (["--fault", "wrong_driver:r01-h01:2"], "wrong_driver is a fault of a whole host: leave out :2"),
        (["--hosts", "1", "--gang", "none", *["--fault", "ecc"] * 2], "every host has a fault already"),
        (["--profile", "rehearsal"], "is not simulated"),
        (["--profile", "soak"], "is not simulated"),
        (["--profile", "scaling"], "is not simulated"),
        (["--racks", "9"], "more than there are hosts"),
        (["--hosts", "3", "--racks", "3"], "has 1 host, but a launch needs at least 2: give more hosts"),
        (["--hosts", "1", "--gang", "all"], "--gang all: a gang has 1 host"),
        (["--model", "h100-sxm"], "no data of h100-sxm"),
        (["--gpus", "17"], "at most 16"),
    ],
)
def test_unsupported_simulation_is_one_error_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(tmp_path / "run"), *arguments]) == 64
    output = capsys.readouterr().err
    assert says in output
    assert output.count("\n") == 1
    assert not (tmp_path / "run" / "plan.json").exists()


def test_hosts_without_a_gang_and_what_is_not_measured_of_one_gpu(tmp_path: Path) -> None:
    report = report_of(run_of(tmp_path / "run", hosts=3, gpus=1, gang="none"))
    assert report.acceptance.status == "SIMULATED PASS"
    with pytest.raises(UsageError, match="no data of b200"):
        Fleet(model="b200").plan("run", CREATED)


def test_ctrl_c_leaves_no_traceback_and_no_file_that_is_half_written(tmp_path: Path) -> None:
    run = tmp_path / "large"
    command = [sys.executable, REPOSITORY / "rackproof", "simulate", run, "--hosts", "3000", "--readings", JUDGED]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not [*run.glob("hosts/*.json")] and started.poll() is None:
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert said.splitlines()[-1].startswith("rackproof: interrupted; ")
    assert "Traceback" not in said
    for path in run.glob("hosts/*.json"):
        json.loads(path.read_bytes())
