"""The callback plugin ends a run for which Ansible has no host left, and records failures and progress."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.locks import process_start_time
from tests.unit.playbooks.test_progress import play, playbook_of_tasks, run_dir

__all__ = ["run_dir"]
FAIL: dict[str, Any] = {"ansible.builtin.command": {"argv": ["false"]}}


def playbook_of_plays(directory: Path, run_dir: Path, *plays: dict[str, Any]) -> list[str]:
    """Return the command of a playbook that sets the facts of its run, and then has these plays."""
    command = playbook_of_tasks(directory, run_dir)
    (begin, _) = yaml.safe_load((directory / "play.yml").read_text())
    targets = directory / f"{run_dir.name}.json"
    targets.write_text("[]")
    begin["tasks"].append({"ansible.builtin.set_fact": {"_rackproof_targets_file": str(targets)}, "run_once": True})
    (directory / "play.yml").write_text(yaml.safe_dump([begin, *plays]))
    return command


def measuring_play(task: dict[str, Any], name: str = "Measure") -> dict[str, Any]:
    """Return a play with this task, which has the tag of the plays that measure."""
    return {"name": name, "hosts": "gpu_hosts", "gather_facts": False, "tags": ["run"], "tasks": [task]}


def report_play(command: str = "report") -> dict[str, Any]:
    """Return the last play of a run, which here only prints a message.

    `command`: the command of `rackproof` that the plugin runs if every host has failed before this play.
    """
    task = {"ansible.builtin.debug": {"msg": "reported by the play"}}
    variables = {"_rackproof_last_command": command}
    return {"name": "Last", "hosts": "gpu_hosts", "gather_facts": False, "vars": variables, "tasks": [task]}


@contextlib.contextmanager
def prometheus(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in place of the Prometheus of the run."""
    (run_dir / "metrics").mkdir()
    with subprocess.Popen(["sleep", "60"]) as server:
        (run_dir / "metrics" / "prometheus.pid").write_text(f"{server.pid} {process_start_time(server.pid)}\n")
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.parametrize("plays", [("h1 or h2",), ("h1", "h2")], ids=["in one play", "one after the other"])
def test_report_is_written_if_every_host_failed(tmp_path: Path, run_dir: Path, plays: tuple[str, ...]) -> None:
    """The monitoring of the run is stopped, too."""
    failing = [
        measuring_play({**FAIL, "when": f"inventory_hostname in '{hosts}'"}, f"Measure {hosts}") for hosts in plays
    ]
    with prometheus(run_dir) as server:
        done = play(playbook_of_plays(tmp_path, run_dir, *failing, report_play()), tmp_path)
        assert server.poll() is not None
    assert not (tmp_path / f"{run_dir.name}.json").exists()
    assert "reported by the play" not in done.stdout
    assert json.loads((run_dir / "report.json").read_text())["decision"] == "incomplete", done.stdout


def test_plugin_writes_no_report_if_the_last_play_of_the_run_took_place(tmp_path: Path, run_dir: Path) -> None:
    """The last play of this test only prints a message, so only the plugin could write a report.json."""
    done = play(
        playbook_of_plays(
            tmp_path, run_dir, measuring_play({"ansible.builtin.debug": {"msg": "measured"}}), report_play()
        ),
        tmp_path,
    )
    assert "reported by the play" in done.stdout
    assert not (run_dir / "report.json").exists()


@pytest.mark.parametrize("has_last_play", [True, False])
def test_monitoring_is_stopped_only_by_a_playbook_that_ends_the_run(
    tmp_path: Path, run_dir: Path, has_last_play: bool
) -> None:
    """deploy.yml starts a Prometheus and does not end the run, so this Prometheus must keep running."""
    with prometheus(run_dir) as server:
        play(
            playbook_of_plays(tmp_path, run_dir, measuring_play(FAIL), *[report_play("scaling")] * has_last_play),
            tmp_path,
        )
        is_running = server.poll() is None
    assert is_running is not has_last_play
    assert (tmp_path / f"{run_dir.name}.json").exists() is not has_last_play


def test_failures_of_every_playbook_of_a_command_are_recorded(tmp_path: Path, run_dir: Path) -> None:
    command = playbook_of_plays(tmp_path, run_dir)
    (tmp_path / "next.yml").write_text(yaml.safe_dump([measuring_play({**FAIL, "name": "Fail"})]))
    play([*command, str(tmp_path / "next.yml")], tmp_path)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert {event["host"] for event in events if event["what"] == "failed"} == {"h1", "h2"}
    progress = [json.loads(line) for line in (run_dir / "progress.jsonl").read_text().splitlines()]
    assert [event["what"] for event in progress].count("start") == 2
    assert progress[-1]["what"] == "end"


def test_failure_has_the_name_of_the_task_without_its_role(tmp_path: Path, run_dir: Path) -> None:
    """The event also names the play, which says where the host failed."""
    tasks = tmp_path / "roles" / "preflight" / "tasks"
    tasks.mkdir(parents=True)
    (tasks / "main.yml").write_text(yaml.safe_dump([{**FAIL, "name": "Check the host"}]))
    roles = {"name": "Preflight", "hosts": "gpu_hosts", "gather_facts": False, "roles": ["preflight"]}
    play(playbook_of_plays(tmp_path, run_dir, roles), tmp_path)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert {event["task"] for event in events if event["what"] == "failed"} == {"Check the host"}


def test_host_that_is_leased_to_another_run_is_marked_as_in_use(tmp_path: Path, run_dir: Path) -> None:
    refused = {"ansible.builtin.command": {"argv": ["sh", "-c", "exit 75", "rackproof"]}}
    play(playbook_of_plays(tmp_path, run_dir, measuring_play(refused)), tmp_path)
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert {event["host"]: event["in_use"] for event in events if event["what"] == "failed"} == {"h1": True, "h2": True}


def test_check_mode_stops_nothing(tmp_path: Path, run_dir: Path) -> None:
    with prometheus(run_dir) as server:
        play([*playbook_of_plays(tmp_path, run_dir, measuring_play(FAIL), report_play()), "--check"], tmp_path)
        is_running = server.poll() is None
    assert is_running
    assert not (run_dir / "report.json").exists()


def test_playbook_that_is_limited_to_some_tags_stops_nothing(tmp_path: Path, run_dir: Path) -> None:
    with prometheus(run_dir) as server:
        play(
            [*playbook_of_plays(tmp_path, run_dir, measuring_play(FAIL), report_play()), "--tags=untagged,run"],
            tmp_path,
        )
        is_running = server.poll() is None
    assert is_running
    assert not (run_dir / "report.json").exists()
