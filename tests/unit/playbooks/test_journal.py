"""Test that the callback plugin ends a run if every host failed before the last play, which Ansible then does not run.

The plugin then runs the verb of `rackproof` that the last play would have run, and stops the Prometheus of the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.playbooks.test_progress import play, playbook_of_tasks, prometheus, run_dir

__all__ = ["run_dir"]
FAIL: dict[str, Any] = {"ansible.builtin.command": {"argv": ["false"]}}


def playbook_of_plays(directory: Path, run_dir: Path, *plays: dict[str, Any]) -> list[str]:
    """Write a playbook that sets the facts of its run and then runs these plays. Return the arguments of ansible-playbook."""
    command = playbook_of_tasks(directory, run_dir)
    (begin, _) = yaml.safe_load((directory / "play.yml").read_text())
    targets = directory / f"{run_dir.name}.json"
    targets.write_text("[]")
    begin["tasks"].append({"ansible.builtin.set_fact": {"_rackproof_targets_file": str(targets)}, "run_once": True})
    (directory / "play.yml").write_text(yaml.safe_dump([begin, *plays]))
    return command


def measuring_play(task: dict[str, Any], name: str = "Measure") -> dict[str, Any]:
    """Return a play with this task. Like every measuring play of Rackproof, it has the tag `run`."""
    return {"name": name, "hosts": "gpu_hosts", "gather_facts": False, "tags": ["run"], "tasks": [task]}


def report_play(command: str = "report") -> dict[str, Any]:
    """Return a play that stands in for the last play of a run. It only prints a message.

    `command`: the verb of `rackproof` that the plugin runs if every host has failed before this play.
    """
    task = {"ansible.builtin.debug": {"msg": "reported by the play"}}
    variables = {"_rackproof_last_command": command}
    return {"name": "Last", "hosts": "gpu_hosts", "gather_facts": False, "vars": variables, "tasks": [task]}


@pytest.mark.parametrize(
    ("plays", "command", "evidence"),
    [(("h1 or h2",), "report", "INCOMPLETE"), (("h1", "h2"), "scaling", "is not a scaling study")],
    ids=["both hosts fail in one play", "each host fails in its own play"],
)
def test_plugin_ends_the_run_if_every_host_failed(
    tmp_path: Path, run_dir: Path, plays: tuple[str, ...], command: str, evidence: str
) -> None:
    """The plugin runs `rackproof report` or `rackproof scaling`, stops the run's Prometheus, and removes its targets file."""
    failing = [
        measuring_play({**FAIL, "when": f"inventory_hostname in '{hosts}'"}, f"Measure {hosts}") for hosts in plays
    ]
    with prometheus(run_dir) as server:
        done = play(playbook_of_plays(tmp_path, run_dir, *failing, report_play(command)), tmp_path)
        assert server.poll() is not None
    assert not (tmp_path / f"{run_dir.name}.json").exists()
    assert "reported by the play" not in done.stdout
    assert evidence in done.stdout
    if command == "report":
        assert json.loads((run_dir / "report.json").read_text())["decision"] == "incomplete", done.stdout


def test_plugin_writes_no_report_if_the_last_play_ran(tmp_path: Path, run_dir: Path) -> None:
    """The last play of this test only prints a message, so only the plugin could write a report.json."""
    done = play(
        playbook_of_plays(
            tmp_path, run_dir, measuring_play({"ansible.builtin.debug": {"msg": "measured"}}), report_play()
        ),
        tmp_path,
    )
    assert "reported by the play" in done.stdout
    assert not (run_dir / "report.json").exists()


def test_plugin_stops_no_prometheus_and_writes_no_report_and_no_progress_in_check_mode(
    tmp_path: Path, run_dir: Path
) -> None:
    command = [*playbook_of_plays(tmp_path, run_dir, measuring_play(FAIL), report_play()), "--check"]
    with prometheus(run_dir) as server:
        done = play(command, tmp_path, RACKPROOF_HEARTBEAT="1")
        is_running = server.poll() is None
    assert done.returncode == 0, done.stdout + done.stderr
    assert is_running
    assert not (run_dir / "report.json").exists()
    assert not (run_dir / "progress.jsonl").exists()


@pytest.mark.parametrize(
    ("task", "option"),
    [(FAIL, "--tags=untagged,run"), ({"ansible.builtin.debug": {"msg": "measured"}}, "--skip-tags=report")],
)
def test_plugin_stops_no_prometheus_and_writes_no_report_if_only_some_tags_are_run(
    tmp_path: Path, run_dir: Path, task: dict[str, Any], option: str
) -> None:
    last = report_play() | ({"tags": ["report"]} if "skip" in option else {})
    with prometheus(run_dir) as server:
        play([*playbook_of_plays(tmp_path, run_dir, measuring_play(task), last), option], tmp_path)
        is_running = server.poll() is None
    assert is_running
    assert not (run_dir / "report.json").exists()
