"""Every verb with the mistakes that people make: one line that names the value and what to do, and never success."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from fleet.records import run_lock
from rackproof.main import main
from schemas import locks, run_directory
from tests import builders
from tests.unit.fleet.planning.test_plan import ROOT
from tests.unit.fleet.report.test_report import write_run

PLAN = builders.plan("h1", "h2", profile="smoke", rackproof_gang="none")
NO_RUN = "plan.json: No such file or directory: give the directory of a run, which has a plan.json"
NO_FILE = "No such file or directory: give the path of an existing file"

Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Said:
    """The command: its exit code and the line that it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.json").touch()

    def call(*words: str | Path) -> tuple[int, str]:
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = int(str(ended.code))
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == 1, output.err
        return code, output.err

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "r1", PLAN)
    return tmp_path / "r1"


@pytest.fixture
def reported(run: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["report", str(run)]) == 0
    capsys.readouterr()
    return run


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("report runs/a --jsno", "rackproof report: unknown option --jsno (did you mean --json?)"),
        ("report --jsno", "rackproof report: unknown option --jsno (did you mean --json?)"),
        ("sign runs/a --kye k", "rackproof sign: unknown option --kye (did you mean --key?)"),
        ("sign runs/a --kye=k", "rackproof sign: unknown option --kye (did you mean --key?)"),
        ("doctor --gpu 8", "rackproof doctor: unknown option --gpu (did you mean --gpus?)"),
        ("plan -x", "rackproof plan: unknown option -x: see rackproof plan --help"),
        ("--verison", "rackproof: unknown option --verison (did you mean --version?)"),
        ("report", "rackproof report: the following arguments are required: run_dir: see rackproof report --help"),
        ("report a b", "rackproof report: unexpected argument 'b': see rackproof report --help"),
        ("simulate --hosts 0", "rackproof simulate: argument --hosts: 0 is not a whole number from 1 to 1000000: see "),
        ("simulate x --seed -1 --seeds 2", "rackproof simulate: unknown option --seeds (did you mean --seed?)"),
        ("repotr runs/a", "rackproof: unknown verb 'repotr' (did you mean report?)"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_one_line_that_names_it(said: Said, words: str, line: str) -> None:
    code, output = said(*words.split())
    assert (code, output[: len(line)]) == (64, line)


def test_the_command_itself_says_no_more_than_that_line() -> None:
    command = [sys.executable, ROOT / "rackproof", "gangs", "--hots", "h1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "rackproof gangs: unknown option --hots (did you mean --hosts?)\n"


def test_what_only_looks_like_an_option_is_a_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "r1", "--gang=none", "--hosts", "1", "--gpus", "1", "--seed", "-1"]) == 0
    assert "SIMULATED run r1" in capsys.readouterr().out
    assert main(["revalidate", "-ix,", "--date", "/", "--", "--limit", "h1"]) == 64
    assert "only letters, digits" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["report", "judge", "rma", "notice", "watch", "scaling", "sign --key k",
                                  "verify --allowed-signers s"])  # fmt: skip
@pytest.mark.parametrize("directory", ["nosuch", "empty"])
def test_a_directory_that_is_no_runs_is_the_same_to_every_verb(said: Said, verb: str, directory: str) -> None:
    name, *options = verb.split()
    assert said(name, directory, *options) == (2, f"rackproof: {directory}/{NO_RUN}\n")


def test_runs_that_are_near_are_named(said: Said, run: str) -> None:
    assert said("report", f"{run}x")[1].endswith(f"which has a plan.json (did you mean {run.name}?)\n")
    forged = run.with_name("x\x1b[31m\nFAKE: accepted")
    forged.mkdir()
    (forged / "plan.json").touch()
    assert said("report", ".")[1].endswith(f"give one of the runs in it: {run.name}\n")


@pytest.mark.parametrize("verb", ["bench", "launch", "soak", "wait --host h1 --stage gang", "emit-record"])
def test_host_results_are_equal(said: Said, verb: str) -> None:
    name, *options = verb.split()
    code, output = said(name, "--run-dir", "empty", *options)
    assert (code, NO_RUN in output) == (2, True)


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        ("run-host --plan nosuch", 2, f"nosuch: {NO_FILE}"),
        ("run-host --plan empty.json", 2, "--plan empty.json: empty, which is not JSON"),
        ("busy --plan nosuch --run-dir x --host h1", 2, f"nosuch: {NO_FILE}"),
        ("busy --plan empty --run-dir x --host h1", 2, "empty: Is a directory: give a file, not a directory"),
        ("inspect --run-dir x --host h1 --plan nosuch", 2, f"nosuch: {NO_FILE}"),
        ("inspect --plan nosuch", 64, "--plan nosuch without --run-dir: add --run-dir, or omit --plan"),
        ("inspect --host h1", 64, "--host h1 without --run-dir: add "),
        ("inspect --take-over", 64, "--take-over without --run-dir: add "),
        ("criteria lint nosuch.yml", 64, f"nosuch.yml: {NO_FILE}"),
        ("doctor --criteria nosuch.yml", 64, f"nosuch.yml: {NO_FILE}"),
        ("scheduler resume --run-dir empty", 2, "empty: no plan.json in it: give the directory of a run"),
        ("scheduler resume --run-dir nosuch", 2, "nosuch: no such directory: give the directory of a run"),
        ("scheduler ask --kind slurm --run-dir nosuch", 2, "nosuch: no such directory: give the directory of a run"),
        ("revalidate -i nosuch/hosts", 64, "-i nosuch/hosts: no such file or directory: give a path relative to "),
    ],
)
def test_missing_file_is_named_with_the_remedy(said: Said, words: str, code: int, line: str) -> None:
    result, output = said(*words.split())
    assert result == code
    assert output.startswith(f"rackproof: {line}")


@pytest.mark.parametrize("option", ["--criteria", "--waivers"])
def test_a_file_that_a_run_is_to_be_judged_by_is_named(said: Said, run: Path, option: str) -> None:
    assert said("report", run, option, "nosuch.yml") == (64, f"rackproof: nosuch.yml: {NO_FILE}\n")
    assert not (run / "report.json").exists()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("operator: gte", "'gte' is not one of eq, ge, le, gt, lt (did you mean ge?)"),
        ("operator: LTE", "(did you mean le?)"),
        ("source: ours", "'ours' is too short: give 8 characters or more"),
    ],
)
def test_pack_error_suggests_the_nearest_word(said: Said, tmp_path: Path, written: str, meant: str) -> None:
    right = {"id": "mine", "name": "gemm.throughput", "operator": "ge", "value": 1, "unit": "FLOP/s", "action": "rma",
             "source": "ours, for a test"}  # fmt: skip
    key, _, value = written.partition(": ")
    pack = {"schema": "rackproof.criteria/1", "summary": "mine", "criteria": [{**right, key: value}]}
    (tmp_path / "mine.yml").write_text(json.dumps(pack))
    code, output = said("criteria", "lint", "mine.yml")
    assert (code, meant in output) == (64, True), output


def test_a_slip_in_capitals_is_as_near_as_can_be(said: Said, tmp_path: Path) -> None:
    host = {"ansible_host": "10.0.0.1", "rackproof_gpu_count": 1, "rackproof_gpu_model": "H200-SXM"}
    listing = {"_meta": {"hostvars": {"h1": host}}, "gpu_hosts": {"hosts": ["h1"]}}
    (tmp_path / "hosts.json").write_text(json.dumps(listing))
    code, output = said("plan", "-i", "hosts.json")
    assert (code, "unknown rackproof_gpu_model H200-SXM (did you mean h200-sxm?)" in output) == (64, True)


def test_a_host_that_no_plan_has_is_not_taken_for_one_that_is_done(said: Said, run: Path) -> None:
    assert said("gangs", "--run-dir", run, "--hosts", "h1,h22") == (
        64,
        "rackproof: --hosts: h22 is not in the plan of run r1 (did you mean h2?): give names from the plan, comma-separated\n",
    )


@pytest.mark.parametrize("text", ["", "no key\n"])
def test_a_file_that_holds_no_key_is_not_said_to_be_missing(said: Said, reported: Path, text: str) -> None:
    (reported.parent / "key").write_text(text)
    (reported.parent / "key").chmod(0o600)
    code, output = said("sign", reported, "--key", "key")
    assert (code, output.startswith("rackproof: key: not an SSH key: give one, such as ~/.ssh/id_ed25519")) == (2, True)


# --- while a run goes on


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives on, as the ansible-playbook of somebody else."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def going_on(reported: Path, bystander: subprocess.Popen[bytes]) -> Path:
    by = locks.claim("r1", reported.parent, bystander.pid, "2026-11-21T04:00:00.000000Z")
    (reported / run_directory.LOCK).write_text(json.dumps({**asdict(by), "running": []}) + "\n")
    return reported


@pytest.mark.parametrize("words", [["report"], ["judge", "--write"]])
def test_a_report_on_a_run_that_goes_on_says_so(
    going_on: Path, bystander: subprocess.Popen[bytes], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], str(going_on), *words[1:]]) == 0
    output = capsys.readouterr().err
    assert output.startswith("rackproof: note: the run is still in progress, locked by ")
    assert f"(process {bystander.pid}) since 2026-11-21T04:00:00.000000Z" in output
    assert (going_on / run_directory.LOCK).exists()


def test_a_report_on_a_run_that_is_over_or_ones_own_says_nothing(
    reported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(reported)]) == 0
    run_lock.acquire(reported)
    assert main(["report", str(reported)]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_is_no_baseline(said: Said, going_on: Path, bystander: subprocess.Popen[bytes]) -> None:
    code, output = said("baseline", "accept", going_on, "--baseline", "base")
    assert (code, f"process {bystander.pid}) since " in output, "accept it after its report is written" in output) == (
        75,
        True,
        True,
    )
    assert not Path("base").exists()
    bystander.kill()
    bystander.wait()
    assert main(["baseline", "accept", str(going_on), "--baseline", "base"]) == 0
