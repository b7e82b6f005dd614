"""`rackproof bench`, `launch` and `soak` with --detach print what they started, or with --wait how it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.cli.wait import NOT_FINISHED, wait_for_stage
from agent.run import lease
from agent.run.record import HostRun
from schemas.records import to_json
from schemas.times import utc_now
from tests import ROOT, builders

PROGRAM = """
import sys
from rackproof import main as rackproof
arguments = sys.argv[1:]
sys.argv = ["-c", "print('the log')"]  # the command that --detach starts in the background
sys.exit(rackproof.main([*arguments, "--detach"]))
"""
"""Program that runs `rackproof` with --detach. In the background, nothing is measured: only "the log" is printed."""


def begin(directory: Path, profile: str = "rehearsal") -> HostRun:
    """Return host h1's run of a plan in which h1 and h2 form a gang (the hosts of one multi-node launch)."""
    plan = builders.plan("h1", "h2", profile=profile)
    return HostRun.begin(directory / "runs" / "r1", "h1", json.dumps(to_json(plan)))


def rackproof(run: HostRun, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments, f"--run-dir={run.directory}", "--host=h1"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("verb", "profile"), [("bench", "rehearsal"), ("launch", "rehearsal"), ("soak", "soak-rehearsal")]
)
def test_start_of_a_background_process_is_printed_as_json(verb: str, profile: str, tmp_path: Path) -> None:
    done = rackproof(begin(tmp_path, profile), verb, "--json")
    assert done.returncode == 0
    started = json.loads(done.stdout)
    assert (started.keys(), started["started"]) == ({"pid", "started"}, True)


def test_outcome_of_a_background_process_is_printed_as_json_and_its_log_on_standard_error(tmp_path: Path) -> None:
    done = rackproof(begin(tmp_path), "bench", "--wait", "--json")
    assert done.returncode == NOT_FINISHED
    assert json.loads(done.stdout) == {"host": "h1", "observations": 0, "launches": []}
    assert "benchmark started as process" in done.stderr
    assert "the log\n" in done.stderr


def test_earlier_probe_does_not_finish_the_gang_stage(tmp_path: Path) -> None:
    """A probe is a short test launch of the gang."""
    run = begin(tmp_path)
    probe = replace(builders.launch("probe", ("h1", "h2")), ranks=(), number=1)
    run.append(run.host.gang, launches=[probe])
    done = rackproof(run, "launch", "--number=2", "--wait")  # the background process ends before it records anything
    assert done.returncode == NOT_FINISHED
    run.append(run.host.gang, launches=[replace(probe, stage="gang", number=2, began=utc_now())])
    assert wait_for_stage(run, "gang") == 0


def test_launch_that_waits_for_another_launch_of_the_gang_is_started_after_it(tmp_path: Path) -> None:
    run = begin(tmp_path)
    other = replace(builders.launch("gang", ("h1", "h2")), ranks=(), number=1)
    slow = PROGRAM.replace("print('the log')", "import time; time.sleep(2)")
    command = [sys.executable, "-c", slow, "launch", "--number=1", f"--run-dir={run.directory}", "--host=h1"]
    assert subprocess.run(command, capture_output=True, check=False, cwd=ROOT).returncode == 0
    waiting = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "launch", "--number=2", "--wait", f"--run-dir={run.directory}", "--host=h1"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert waiting.stdout
    assert "gang already runs as process" in waiting.stdout.readline()
    run.append(run.host.gang, launches=[replace(other, began=utc_now())])  # launch 1 finishes
    rest, _ = waiting.communicate(timeout=60)
    assert "gang started as process" in rest
    assert "the log" in rest
    assert waiting.returncode == NOT_FINISHED, "launch 2 recorded nothing"


def test_launch_that_waits_for_another_launch_is_not_started_after_the_run_was_stopped(tmp_path: Path) -> None:
    run = begin(tmp_path)
    slow = PROGRAM.replace("print('the log')", "import time; time.sleep(60)")
    command = [sys.executable, "-c", slow, "launch", "--number=1", f"--run-dir={run.directory}", "--host=h1"]
    assert subprocess.run(command, capture_output=True, check=False, cwd=ROOT).returncode == 0
    waiting = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "launch", "--number=2", "--wait", f"--run-dir={run.directory}", "--host=h1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert waiting.stdout
    assert "gang already runs as process" in waiting.stdout.readline()
    stop = ["-m", "rackproof", "stop", str(tmp_path / "exporter"), f"--run-dir={run.directory}", "--end"]
    stopped = subprocess.run([sys.executable, *stop], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "gang ended" in stopped.stdout, stopped.stdout + stopped.stderr
    rest, error = waiting.communicate(timeout=60)
    assert "started" not in rest
    assert waiting.returncode == lease.HELD
    assert "run r1 was stopped on this host: resume it to continue" in error


def test_two_calls_with_the_same_launch_start_it_once(tmp_path: Path) -> None:
    run = begin(tmp_path)
    slow = PROGRAM.replace("print('the log')", "import time; time.sleep(2)")
    options = ["launch", "--number=1", f"--run-dir={run.directory}", "--host=h1"]
    assert (
        subprocess.run([sys.executable, "-c", slow, *options], capture_output=True, check=False, cwd=ROOT).returncode
        == 0
    )
    waiting = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *options, "--wait"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert waiting.stdout
    assert "gang already runs as process" in waiting.stdout.readline()
    launch = replace(builders.launch("gang", ("h1", "h2")), ranks=(), number=1, began=utc_now())
    run.append(run.host.gang, launches=[launch])
    rest, _ = waiting.communicate(timeout=60)
    assert "started" not in rest
    assert waiting.returncode == 0


def test_wait_ends_at_once_if_the_stage_was_measured_in_the_foreground(tmp_path: Path) -> None:
    run = begin(tmp_path)
    run.append(launches=[replace(builders.launch("benchmark", ("h1",)), ranks=())])
    done = rackproof(run, "bench", "--wait")
    assert (done.returncode, done.stderr) == (0, "")
    assert "it is not measured again" in done.stdout
