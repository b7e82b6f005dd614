"""Test the playbooks on a host without the agent: the stages name the remedy, and a playbook that stops a run stops nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.run.lease import load_claim
from fleet.planning.playbook_profiles import PLAYBOOKS
from fleet.records import run_lock
from tests.unit.fleet.planning.test_playbook_profiles import roles_of
from tests.unit.playbooks.test_nothing_done import play


def shown(tmp_path: Path, playbook: str, *options: str) -> tuple[int, str]:
    """Run a playbook on a host without the agent. Return the exit code, and the output in one line."""
    done = play(tmp_path, playbook, *options, "-e", "rackproof_run_id=r")
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("playbook", "variables"),
    [
        ("inspect", {}),
        ("benchmark", {}),
        ("gang", {}),
        ("revalidate", {"rackproof_revalidate_profile": "revalidate-rehearsal"}),
    ],
)
def test_stage_on_a_host_without_the_agent_names_the_playbook_that_installs_it(
    tmp_path: Path, playbook: str, variables: dict[str, str]
) -> None:
    """The playbooks that are not tested here begin with the same roles (the next test)."""
    skipped = () if playbook == "revalidate" else ("--skip-tags", "configure")  # the preflight may fail on this machine
    code, text = shown(tmp_path, playbook, "--tags", "run", *skipped, "-e", json.dumps(variables))
    assert code != 0
    assert f"the agent is not installed in {tmp_path}/agent: run playbooks/deploy.yml" in text
    assert "Errno 2" not in text


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_first_stage_checks_that_the_agent_is_installed(playbook: str) -> None:
    """`preflight`, whose plays have the tag `run` only together with others, runs nothing of the agent."""
    stages = [role for role in roles_of(f"{playbook}.yml", tag="run") if role != "preflight"]
    assert stages[0] in ("inspect", "revalidate")


@pytest.mark.parametrize("run", [("rackproof_run_id=r",), ("rackproof_take_over=true",)])
def test_stop_on_a_host_without_the_agent_has_nothing_to_stop(tmp_path: Path, run: tuple[str]) -> None:
    done = play(tmp_path, "stop", "-e", *run)
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, text
    assert f"the agent is not installed in {tmp_path}/agent: there is nothing to stop" in text
    assert "failed=0" in text


def test_report_on_a_host_without_the_agent_releases_nothing_and_is_written(tmp_path: Path) -> None:
    shown(tmp_path, "inspect")
    code, text = shown(tmp_path, "report")
    assert code != 0
    assert "Errno 2" not in text
    assert (tmp_path / "runs" / "r" / "report.json").is_file()


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, ()),
        ({"rackproof_profile": "standard", "rackproof_gang": "rack", "rackproof_gpu_count": 8}, ("--check",)),
    ],
)
def test_teardown_makes_no_plan_and_leaves_no_run_directory(
    tmp_path: Path, options: tuple[str, ...], variables: dict[str, object]
) -> None:
    """In the second case, the only host would be a gang of one host, for which there is no plan."""
    done = play(tmp_path, "teardown", *options, "-e", json.dumps(variables))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ({"rackproof_gpu_cont": 8}, "unknown variable rackproof_gpu_cont"),
        ({"rackproof_gpu_count": "eight"}, "rackproof_gpu_count"),
    ],
)
def test_teardown_checks_the_variables_of_the_inventory(
    tmp_path: Path, variable: dict[str, object], message: str
) -> None:
    done = play(tmp_path, "teardown", "-e", json.dumps(variable))
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).split())
    assert "Remove the agent" not in done.stdout


def test_teardown_is_refused_while_another_playbook_executes_the_run(tmp_path: Path) -> None:
    run_lock.acquire(tmp_path / "runs" / "r")  # by this process
    code, text = shown(tmp_path, "teardown")
    assert code != 0
    assert "run r is locked by" in text


def test_teardown_identifies_itself_to_the_agent_and_names_the_run(tmp_path: Path) -> None:
    """The agent refuses another operator's run, and releases the host if the run of an earlier playbook has ended."""
    agent = tmp_path / "agent" / "bin" / "rackproof"
    agent.parent.mkdir(parents=True)
    agent.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/arguments\n")
    agent.chmod(0o755)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    run_lock.acquire(tmp_path / "runs" / "other")
    code, text = shown(tmp_path, "teardown")
    assert code == 0, text
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert f"--run-dir={tmp_path}/state/runs/r" in arguments
    (claim,) = [word.removeprefix("--claim=") for word in arguments if word.startswith("--claim=")]
    parsed = load_claim(claim, "r", tmp_path)
    assert (parsed.run_id, parsed.runs, parsed.running) == ("r", str(tmp_path / "runs"), ("other",))
