"""Test the playbooks on a host without the agent: the stages name the remedy, and a playbook that stops a run stops nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
        ("acceptance", {}),
        ("burnin", {"rackproof_soak_profile": "soak-rehearsal"}),
        ("revalidate", {"rackproof_revalidate_profile": "revalidate-rehearsal"}),
        ("scaling", {"rackproof_study": "scaling-rehearsal"}),
    ],
)
def test_stage_on_a_host_without_the_agent_names_the_playbook_that_installs_it(
    tmp_path: Path, playbook: str, variables: dict[str, str]
) -> None:
    skipped = () if playbook == "revalidate" else ("--skip-tags", "configure")  # the preflight may fail on this machine
    code, text = shown(tmp_path, playbook, "--tags", "run", *skipped, "-e", json.dumps(variables))
    assert code != 0
    assert f"the agent is not installed in {tmp_path}/agent: run playbooks/deploy.yml" in text
    assert "Errno 2" not in text


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
