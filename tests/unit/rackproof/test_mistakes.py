"""Test common mistakes of an operator: the error message is one line with the wrong value and the remedy."""

from __future__ import annotations

import email
import email.policy
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from fleet.records import run_lock
from fleet.report.stream import is_temporary
from rackproof.main import build_parser, main
from schemas import locks, run_directory
from tests import builders
from tests.unit.fleet.planning.test_plan import ROOT
from tests.unit.fleet.report.test_report import write_run

PLAN = builders.plan("h1", "h2", profile="smoke", rackproof_gang="none")
NO_RUN = "plan.json: No such file or directory: give the directory of a run, which has a plan.json"
NO_FILE = "No such file or directory: give the path of an existing file"

CallVerb = Callable[..., tuple[int, str]]


@pytest.fixture
def call_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CallVerb:
    """Return a function that runs `rackproof` and returns its exit code and its error line.

    The function checks that `rackproof` prints nothing else.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.json").touch()

    def call(*arguments: str | Path) -> tuple[int, str]:
        capsys.readouterr()
        try:
            code = main([str(word) for word in arguments])
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
def reported_run(run: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["report", str(run)]) == 0
    capsys.readouterr()
    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("report runs/a --jsno", "rackproof report: unknown option --jsno (did you mean --json?)"),
        ("report --jsno", "rackproof report: unknown option --jsno (did you mean --json?)"),
        ("sign runs/a --kye k", "rackproof sign: unknown option --kye (did you mean --key?)"),
        ("sign runs/a --kye=k", "rackproof sign: unknown option --kye (did you mean --key?)"),
        ("doctor --gpu 8", "rackproof doctor: unknown option --gpu (did you mean --gpus?)"),
        ("plan -x", "rackproof plan: unknown option -x: see rackproof plan --help"),
        ("--verison", "rackproof: unknown option --verison (did you mean --version?)"),
        ("judge", "rackproof judge: the following arguments are required: run_dir: see rackproof judge --help"),
        ("report a b", "rackproof report: unexpected argument 'b': see rackproof report --help"),
        ("simulate --hosts 0", "rackproof simulate: argument --hosts: 0 is not a whole number from 1 to 1000000: see "),
        ("simulate x --seed -1 --seeds 2", "rackproof simulate: unknown option --seeds (did you mean --seed?)"),
        ("repotr runs/a", "rackproof: unknown verb 'repotr' (did you mean report?)"),
    ],
)
def test_wrong_usage_is_reported_in_one_line(call_verb: CallVerb, arguments: str, line: str) -> None:
    code, output = call_verb(*arguments.split())
    assert (code, output[: len(line)]) == (64, line)


@pytest.mark.parametrize(
    ("option", "others"),
    [
        ("--history h", "history import a b"),
        ("--settings dtype=bf16", "history figure gemm.throughput"),
        ("--baseline h", "baseline accept a b"),
        ("--json", "criteria list h100-sxm"),
    ],
)
def test_option_may_be_anywhere_on_the_command_line(option: str, others: str) -> None:
    verb, *words = others.split()
    orders = [[verb, *words[:at], *option.split(), *words[at:]] for at in range(len(words) + 1)]
    first, *rest = [{**vars(build_parser(verb).parse_args(order)), "call": None} for order in orders]
    assert rest == [first] * len(words)


def test_process_prints_only_the_error_line() -> None:
    command = [sys.executable, ROOT / "rackproof", "gangs", "--hots", "h1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == "rackproof gangs: unknown option --hots (did you mean --hosts?)\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_without_utf_8_gets_escaped_characters(encoding: str) -> None:
    command = [sys.executable, ROOT / "rackproof", "criteria", "list", "h100-sxm"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u2265" in done.stdout


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with a report, for tests that only write the same report again."""
    run = tmp_path_factory.mktemp("shared") / "r1"
    write_run(run, PLAN)
    assert main(["report", str(run)]) == 0
    return run


@pytest.mark.parametrize(
    ("arguments", "redirection", "code"),
    [
        *(("report {run}", closed, 0) for closed in (">&-", "2>&-", "<&-", "<&- >&- 2>&-")),
        *(("--help", closed, 0) for closed in (">&-", "2>&-")),
        ("report nosuch", "2>&-", 2),
        ("nosuch", "2>&-", 64),
        ("report --jsno", "2>&- >&-", 64),
        ("report {run} --json", "2>&- | cat >/dev/null; exit ${PIPESTATUS[0]}", 0),
    ],
)
def test_closed_standard_streams_give_no_traceback_and_no_verdict(
    shared_run: Path, arguments: str, redirection: str, code: int
) -> None:
    check_exit_code(f"{arguments.format(run=shared_run)} {redirection}", code)


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "redirection", "code"),
    [
        *((words, ">/dev/full", 2) for words in ("--help", "version", "report {run} --json")),
        ("report {run}", "2>/dev/full", 0),
        ("report nosuch", "2>/dev/full", 2),
        ("report {run} --json", "| true; exit ${PIPESTATUS[0]}", 2),
    ],
)
def test_full_and_broken_standard_streams_give_no_traceback_and_no_verdict(
    shared_run: Path, arguments: str, redirection: str, code: int, buffering: str
) -> None:
    check_exit_code(f"{arguments.format(run=shared_run)} {redirection}", code, PYTHONUNBUFFERED=buffering)


def check_exit_code(words: str, code: int, **environment: str) -> None:
    """Check the exit code of `rackproof` with these arguments and redirections, and that it prints no traceback.

    Exit code 1 would mean that the run is rejected. Python's own exit code for output that it cannot write is 120.
    """
    command = ["bash", "-c", f"{sys.executable} {ROOT / 'rackproof'} {words}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(("minor", "code"), [(10, 2), (11, 0)])
def test_make_creates_a_virtual_environment_only_with_python_3_11_or_newer(
    tmp_path: Path, minor: int, code: int
) -> None:
    python = tmp_path / "python"
    version = f"import sys; sys.version_info = (3, {minor}, 2)"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] && exec install -D /bin/true "$3/bin/pip"\nexec {sys.executable} -c "{version}\n$2"\n'
    )
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), f"{tmp_path}/venv/bin/pip", f"VENV={tmp_path}/venv", f"PYTHON={python}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert (f"{python} is Python 3.{minor}, and Rackproof needs 3.11 or newer" in done.stderr) == bool(code)
    assert (tmp_path / "venv").exists() == (not code)


def test_values_that_look_like_options_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", "r1", "--gang=none", "--hosts", "1", "--gpus", "1", "--seed", "-1"]) == 0
    assert "SIMULATED run r1" in capsys.readouterr().out
    # The only error is the value of --date. The options after `--` are for ansible-playbook.
    assert main(["revalidate", "-ix,", "--date", "/", "--", "--limit", "h1"]) == 64
    assert "only letters, digits" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["report", "judge", "rma", "notice", "watch", "scaling", "sign --key k",
                                  "verify --allowed-signers s"])  # fmt: skip
@pytest.mark.parametrize("directory", ["nosuch", "empty"])
def test_verbs_report_a_directory_without_a_plan_with_the_same_error(
    call_verb: CallVerb, verb: str, directory: str
) -> None:
    name, *options = verb.split()
    assert call_verb(name, directory, *options) == (2, f"rackproof: {directory}/{NO_RUN}\n")


def test_similar_run_directories_are_suggested(call_verb: CallVerb, run: Path) -> None:
    """A run whose name contains control characters for the terminal is not suggested."""
    assert call_verb("report", f"{run}x")[1].endswith(f"which has a plan.json (did you mean {run.name}?)\n")
    forged = run.with_name("x\x1b[31m\nFAKE: accepted")
    forged.mkdir()
    (forged / "plan.json").touch()
    assert call_verb("report", ".")[1].endswith(f"give one of the runs in this directory: {run.name}\n")


@pytest.mark.parametrize("verb", ["bench", "launch", "soak", "wait --host h1 --stage gang", "emit-record"])
def test_verbs_that_run_on_hosts_report_a_directory_without_a_plan(call_verb: CallVerb, verb: str) -> None:
    name, *options = verb.split()
    code, output = call_verb(name, "--run-dir", "empty", *options)
    assert (code, NO_RUN in output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
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
def test_wrong_file_or_missing_option_is_named_with_the_remedy(
    call_verb: CallVerb, arguments: str, code: int, line: str
) -> None:
    exit_code, output = call_verb(*arguments.split())
    assert exit_code == code
    assert output.startswith(f"rackproof: {line}")


def ignored_options() -> Iterator[str]:
    """Yield command lines with an option that has no effect in the chosen mode.

    The help of such an option begins with the modes in which it has an effect.
    """
    for verb in ("baseline", "history", "criteria", "scheduler"):
        actions = build_parser(verb).verbs.choices[verb]._actions
        modes = next(list(action.choices or ()) for action in actions if action.dest == "what")
        required = " ".join(
            f"{action.option_strings[-1]} x" for action in actions if action.required and action.option_strings
        )
        for action in actions:
            effective = re.match(r"((\w+, )*\w+): ", action.help or "")
            if action.option_strings and effective and set(effective[1].split(", ")) <= set(modes):
                value = {0: "", 2: " a b"}.get(action.nargs, " 0.5")  # type: ignore[call-overload]
                value = f" {list(action.choices)[-1]}" if action.choices else value
                for mode in modes:
                    if mode not in effective[1]:
                        yield f"{verb} {mode} {action.option_strings[-1]}{value} {required}".rstrip()


@pytest.mark.parametrize("arguments", list(ignored_options()))
def test_option_without_effect_in_the_mode_of_a_verb_is_refused(call_verb: CallVerb, arguments: str) -> None:
    verb, mode, option, *_ = arguments.split()
    code, output = call_verb(*arguments.split())
    assert (code, output.startswith(f"rackproof: {verb} {mode}: {option} has no effect: omit it")) == (64, True), output


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("plan -i x, --gpus 8", "--gpus goes only with --hosts: with -i, set rackproof_gpu_count in the inventory"),
        ("plan -i x, --gpus 0", "--gpus goes only with --hosts: with -i, set rackproof_gpu_count in the inventory"),
        (
            "plan -i x, --model h200-sxm",
            "--model goes only with --hosts: with -i, set rackproof_gpu_model in the inventory",
        ),
        (
            "plan -i x, --validation-only",
            "--validation-only goes only with --hosts: with -i, set rackproof_validation_only in the inventory",
        ),
        ("plan -i x, --epochs 2", "--epochs goes only with --hosts: with -i, set rackproof_epochs in the inventory"),
        ("plan -i x, --batch-size 2", "--batch-size goes only with --hosts: with -i, set rackproof_batch_size in the"),
        ("baseline list r1", "baseline list: argument 'r1' has no effect: omit it (it is for accept, show)"),
        (
            "criteria versions mine.yml",
            "criteria versions: argument 'mine.yml' has no effect: omit it (it is for lint, list,",
        ),
        ("history lemons r1", "history lemons: argument 'r1' has no effect: omit it"),
        ("history page --json", "history page: --json has no effect: omit it"),
        ("history import --csv r1", "history import: --csv has no effect: omit it"),
        ("power r1 --planted-faults --pool", "--pool has no effect on --planted-faults: leave out one of the two"),
        ("power r1 --planted-faults --criteria x", "--criteria has no effect on --planted-faults: leave out one of"),
        ("report r1 --host h1 --all-observations", "--all-observations has no effect with --host: leave out one of"),
        (
            "verify r1 --allowed-signers x --no-judge --criteria y",
            "--criteria has no effect with --no-judge: leave out",
        ),
        ("stop exporter --end", "--end without --run-dir: name the run whose stage is to end"),
    ],
)
def test_option_or_argument_without_effect_is_refused(call_verb: CallVerb, arguments: str, line: str) -> None:
    code, output = call_verb(*arguments.split())
    assert (code, output.startswith(f"rackproof: {line}")) == (64, True), output


@pytest.mark.parametrize("option", ["--criteria", "--waivers"])
def test_missing_criteria_or_waiver_file_is_reported(call_verb: CallVerb, run: Path, option: str) -> None:
    assert call_verb("report", run, option, "nosuch.yml") == (64, f"rackproof: nosuch.yml: {NO_FILE}\n")
    assert not (run / "report.json").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("operator: gte", "'gte' is not one of eq, ge, le, gt, lt (did you mean ge?)"),
        ("operator: LTE", "(did you mean le?)"),
        ("source: ours", "'ours' is too short: give 8 characters or more"),
    ],
)
def test_error_in_a_criteria_pack_is_reported_with_the_remedy(
    call_verb: CallVerb, tmp_path: Path, line: str, message: str
) -> None:
    valid = {"id": "mine", "name": "gemm.throughput", "operator": "ge", "value": 1, "unit": "FLOP/s", "action": "rma",
             "source": "ours, for a test"}  # fmt: skip
    key, _, value = line.partition(": ")
    pack = {"schema": "rackproof.criteria/1", "summary": "mine", "criteria": [{**valid, key: value}]}
    (tmp_path / "mine.yml").write_text(json.dumps(pack))
    code, output = call_verb("criteria", "lint", "mine.yml")
    assert (code, message in output) == (64, True), output


def test_right_spelling_is_suggested_for_a_value_in_capitals(call_verb: CallVerb, tmp_path: Path) -> None:
    host = {"ansible_host": "10.0.0.1", "rackproof_gpu_count": 1, "rackproof_gpu_model": "H200-SXM"}
    listing = {"_meta": {"hostvars": {"h1": host}}, "gpu_hosts": {"hosts": ["h1"]}}
    (tmp_path / "hosts.json").write_text(json.dumps(listing))
    code, output = call_verb("plan", "-i", "hosts.json")
    assert (code, "unknown rackproof_gpu_model H200-SXM (did you mean h200-sxm?)" in output) == (64, True)


def test_gangs_rejects_a_host_outside_the_plan(call_verb: CallVerb, run: Path) -> None:
    assert call_verb("gangs", "--run-dir", run, "--hosts", "h1,h22") == (
        64,
        "rackproof: --hosts: h22 is not in the plan of run r1 (did you mean h2?): give names from the plan, comma-separated\n",
    )


@pytest.mark.parametrize("text", ["", "no key\n"])
def test_key_file_without_an_ssh_key_is_reported_with_the_remedy(
    call_verb: CallVerb, reported_run: Path, text: str
) -> None:
    (reported_run.parent / "key").write_text(text)
    (reported_run.parent / "key").chmod(0o600)
    code, output = call_verb("sign", reported_run, "--key", "key")
    assert (code, output.startswith("rackproof: key: not an SSH key: give one, such as ~/.ssh/id_ed25519")) == (2, True)


def test_full_disk_is_reported_with_the_file_and_the_remedy(
    call_verb: CallVerb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fill)
    code, output = call_verb("simulate", "r2", "--hosts", "1", "--gpus", "1", "--gang", "none")
    assert code == 2
    assert re.fullmatch(r"rackproof: r2/\S+: No space left on device: free up space on its file system\n", output)
    assert not [path for path in Path("r2").rglob("*") if path.is_file() and is_temporary(path.name)]


# --- while a run is in progress


@pytest.fixture
def playbook() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a running process that stands in for the ansible-playbook of a run."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.fixture
def run_in_progress(reported_run: Path, playbook: subprocess.Popen[bytes]) -> Path:
    """Return the directory of a run that has a report and is locked by the process `playbook`."""
    by = locks.claim("r1", reported_run.parent, playbook.pid, "2026-11-21T04:00:00.000000Z")
    (reported_run / run_directory.LOCK).write_text(json.dumps({**asdict(by), "running": []}) + "\n")
    return reported_run


@pytest.mark.parametrize("arguments", [["report"], ["judge", "--write"]])
def test_report_notes_that_the_run_is_in_progress(
    run_in_progress: Path, playbook: subprocess.Popen[bytes], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arguments[0], str(run_in_progress), *arguments[1:]]) == 0
    output = capsys.readouterr().err
    assert output.startswith("rackproof: note: the run is still in progress, locked by ")
    assert f"(process {playbook.pid}) since 2026-11-21T04:00:00.000000Z" in output
    assert (run_in_progress / run_directory.LOCK).exists()


def test_report_prints_no_note_on_a_finished_run_or_a_run_locked_by_this_process(
    reported_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(reported_run)]) == 0
    run_lock.acquire(reported_run)
    assert main(["report", str(reported_run)]) == 0
    assert capsys.readouterr().err == ""


def test_run_in_progress_cannot_be_a_baseline(
    call_verb: CallVerb, run_in_progress: Path, playbook: subprocess.Popen[bytes]
) -> None:
    code, output = call_verb("baseline", "accept", run_in_progress, "--baseline", "base")
    assert (code, f"process {playbook.pid}) since " in output, "accept it after its report is written" in output) == (
        75,
        True,
        True,
    )
    assert not Path("base").exists()
    playbook.kill()
    playbook.wait()
    assert main(["baseline", "accept", str(run_in_progress), "--baseline", "base"]) == 0


@pytest.mark.parametrize("verb", ["report", "rma", "watch", "diff"])
def test_error_names_the_searched_directory_if_it_contains_no_run(
    call_verb: CallVerb, tmp_path: Path, verb: str
) -> None:
    code, output = call_verb(verb)
    assert (code, f"no run in {tmp_path / 'runs'}: give " in output) == (64, True)


LATIN_1 = os.fsdecode("Übergabe".encode("latin-1"))
"""A text that the terminal sent in Latin-1, as Python reads it in a UTF-8 locale."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("baseline", "accept", "r1", "--why", LATIN_1),
        ("baseline", "accept", "r1", "--replace", "--by", LATIN_1),
        ("notice", "r1", "--link", f"https://{LATIN_1}"),
        ("notice", "r1", "--mail-to", "a@example.com", "--mail-to", LATIN_1),
        ("rma", "r1", "--serial", "1", "--reason", LATIN_1),
        ("report", "r1", "--criteria", LATIN_1),
        ("simulate", LATIN_1),
        ("revalidate", "-i", "x", "--date", LATIN_1),
    ],
)
def test_text_in_another_encoding_is_named(call_verb: CallVerb, reported_run: Path, arguments: tuple[str, ...]) -> None:
    code, output = call_verb(*arguments)
    wrong = "has the wrong form: write a name" if arguments[0] == "simulate" else "is not UTF-8 text"
    assert (code, f"{LATIN_1!r}"[1:-1] in output, wrong in output) == (64, True, True), output
    assert sorted(reported_run.parent.glob("base*")) == []


@pytest.mark.parametrize("arguments", [[], ["--mail-to", "a@example.com"], ["--failed", "x"]])
def test_notification_about_a_directory_whose_name_is_not_utf_8_is_text(
    reported_run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    run = reported_run.rename(reported_run.with_name(os.fsdecode(b"runs-\xff")))
    assert main(["notice", *arguments, str(run)]) == 0
    output = capsys.readouterr().out
    if "--mail-to" in arguments:  # long lines of a mail are folded
        content = email.message_from_string(output, policy=email.policy.default).get_content()
        assert r"runs-\udcff" in content
    else:
        assert r"runs-\\udcff" in output
