"""The progress events that the callback plugin records in a real ansible-playbook, on two hosts that are this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents, locks, run_directory
from schemas.records import to_json
from tests import ROOT, builders
from tests.lab.lab import CONTROL_PYTHON

PLUGINS = ROOT / "playbooks" / "callback_plugins"
WAIT = {"ansible.builtin.command": {"argv": ["sleep", "0.2"]}, "vars": {"_rackproof_waits_for": "benchmark"}}


def playbook_of_tasks(directory: Path, run_dir: Path, *tasks: dict[str, Any]) -> list[str]:
    """Return the command of a playbook that sets the fact with its run directory, and runs these tasks on two local hosts."""
    set_facts = {"ansible.builtin.set_fact": {"_rackproof_run_dir": str(run_dir)}, "run_once": True}
    plays = [
        {"name": "Preflight", "hosts": "gpu_hosts", "gather_facts": False, "tasks": [set_facts]},
        {"name": "Benchmark", "hosts": "gpu_hosts", "gather_facts": False, "tasks": list(tasks)},
    ]
    hosts = {name: {"ansible_connection": "local"} for name in ("h1", "h2")}
    (directory / "play.yml").write_text(yaml.safe_dump(plays))
    (directory / "ansible.cfg").write_text("[defaults]\n")
    (directory / "hosts.yml").write_text(yaml.safe_dump({"gpu_hosts": {"hosts": hosts}}))
    playbook = str(Path(sys.executable).parent / "ansible-playbook")
    return [playbook, "-i", str(directory / "hosts.yml"), str(directory / "play.yml")]


def play(command: list[str], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    config = {"ANSIBLE_CALLBACK_PLUGINS": str(PLUGINS), "ANSIBLE_NOCOLOR": "1"}
    config |= {"ANSIBLE_PYTHON_INTERPRETER": str(CONTROL_PYTHON), "ANSIBLE_LOCALHOST_WARNING": "false"}
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **config, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory with a plan of two hosts."""
    path = tmp_path / "runs" / "r1"
    documents.write(path / "plan.json", json.loads(json.dumps(to_json(builders.plan("h1", "h2")))))
    return path


def events(run_dir: Path) -> list[dict[str, Any]]:
    document = [json.loads(line) for line in (run_dir / "progress.jsonl").read_text().splitlines()]
    for event in document:
        documents.validate(event, "progress", source="progress.jsonl")
    return document


def test_events_record_the_state_of_each_host_and_the_end_of_a_wait(tmp_path: Path, run_dir: Path) -> None:
    wait = {"name": "Wait", **WAIT, "changed_when": False}
    skip = {"name": "Skip", "ansible.builtin.command": {"argv": ["false"]}, "when": "inventory_hostname == 'h3'"}
    fail = {"name": "Fail", "ansible.builtin.command": {"argv": ["false"]}, "when": "inventory_hostname == 'h2'"}
    excuse = {"name": "Excuse", "ansible.builtin.command": {"argv": ["false"]}, "ignore_errors": True}
    done = play(playbook_of_tasks(tmp_path, run_dir, wait, skip, excuse, fail), tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    recorded = events(run_dir)
    brief = [(event["what"], event.get("host", event.get("task", ""))) for event in recorded]
    assert [what for what, _ in brief[:2]] == ["start", "play"]
    assert brief[-1] == ("end", "")
    waits = brief.index(("task", "Wait"))
    assert recorded[waits]["stage"] == "benchmark"
    assert sorted(brief[waits + 1 : waits + 5]) == [("began", "h1"), ("began", "h2"), ("ok", "h1"), ("ok", "h2")]
    assert {event.get("rc") for event in recorded[waits : waits + 5] if event["what"] == "ok"} == {0}
    of_task = {task: set(brief[brief.index(("task", task)) + 3 :][:2]) for task in ("Skip", "Excuse", "Fail")}
    assert of_task["Skip"] == {("skipped", "h1"), ("skipped", "h2")}
    assert of_task["Excuse"] == {("ok", "h1"), ("ok", "h2")}
    assert of_task["Fail"] == {("skipped", "h1"), ("failed", "h2")}


@pytest.mark.parametrize(
    ("outputs", "rehearsal", "warned"),
    [
        (({"boot_id": "A"}, {"boot_id": "A"}), False, True),
        (({"boot_id": "A"}, {"boot_id": "B"}), False, False),
        (({"boot_id": 1}, {"boot_id": 1}), False, False),
        (({"boot_id": "A"}, {"boot_id": "A"}), True, False),
    ],
    ids=["same boot ID", "different boot IDs", "boot IDs that are not text", "same boot ID in a rehearsal"],
)
def test_warning_names_hosts_that_are_the_same_machine(
    tmp_path: Path, run_dir: Path, outputs: tuple[Any, Any], rehearsal: bool, warned: bool
) -> None:
    facts = {"ansible.builtin.set_fact": {"_rackproof_rehearsal": rehearsal}}
    for host, output in zip(("h1", "h2"), outputs, strict=True):
        (tmp_path / host).write_text(json.dumps(output))
    probe = {
        "name": "Probe",
        "ansible.builtin.command": {"argv": ["cat", f"{tmp_path}/{{{{ inventory_hostname }}}}"]},
        "register": "_rackproof_preflight",
    }
    done = play(playbook_of_tasks(tmp_path, run_dir, facts, probe), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join((done.stdout + done.stderr).split())
    assert ("h1, h2 are the same machine (they have the same boot ID)" in text) == warned


def test_error_after_many_warnings_of_pip_is_recorded(tmp_path: Path, run_dir: Path) -> None:
    warnings = f"WARNING: Retrying (Retry(total=4)) after connection broken by {'x' * 400}\n" * 5
    error = "ERROR: No matching distribution found for bcrypt<6,>=4.1"
    (tmp_path / "stderr").write_text(f"{warnings}{error}\n")
    script = f"cat {tmp_path / 'stderr'} >&2; exit 1"
    assert (
        play(
            playbook_of_tasks(tmp_path, run_dir, {"name": "pip", "ansible.builtin.shell": script}), tmp_path
        ).returncode
        == 2
    )
    messages = [json.loads(line).get("message") for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert messages[-2:] == [error, error]


def test_progress_is_printed_on_standard_error_only(tmp_path: Path, run_dir: Path) -> None:
    claim = locks.claim("r1", run_dir.parent, os.getpid(), "2026-11-21T04:00:00.000000Z")
    with locks.exclusive(run_dir / run_directory.LOCK) as file:  # as the role `plan` does
        locks.write_line(file, {**vars(claim), "running": []})
    slow = {"name": "Wait", **WAIT, "ansible.builtin.command": {"argv": ["sleep", "4"]}, "changed_when": False}
    done = play(playbook_of_tasks(tmp_path, run_dir, slow), tmp_path, RACKPROOF_HEARTBEAT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "benchmark: h1, h2 are measuring, for at most 15 min each" in done.stderr
    assert "benchmark: 0 of 2 hosts done, h1 unknown, h2 unknown, at most 14 min 5" in done.stderr
    assert "measure" not in done.stdout
    assert "progress is no longer recorded" not in done.stderr


def test_events_after_a_killed_attempt_start_on_a_new_line(tmp_path: Path, run_dir: Path) -> None:
    (run_dir / "progress.jsonl").write_text('{"at": "2026-11-21T04:00:00Z", "what": "end"}\n{"at": "20')
    assert play(playbook_of_tasks(tmp_path, run_dir), tmp_path).returncode == 0
    lines = (run_dir / "progress.jsonl").read_text().splitlines()
    assert lines[1] == '{"at": "20'
    assert json.loads(lines[2])["what"] == "start"


def test_check_mode_records_nothing(tmp_path: Path, run_dir: Path) -> None:
    done = play([*playbook_of_tasks(tmp_path, run_dir), "--check"], tmp_path, RACKPROOF_HEARTBEAT="1")
    assert done.returncode == 0
    assert not (run_dir / "progress.jsonl").exists()


@pytest.mark.parametrize("broken", ["no run directory", "link in place of the file", "no heartbeat program"])
def test_error_in_progress_reporting_does_not_fail_the_playbook(broken: str, tmp_path: Path, run_dir: Path) -> None:
    if broken == "link in place of the file":
        (tmp_path / "elsewhere").write_text("")
        (run_dir / "progress.jsonl").symlink_to(tmp_path / "elsewhere")
    where = tmp_path / "nowhere" / "r1" if broken == "no run directory" else run_dir
    environment = {"RACKPROOF_HEARTBEAT": "1"}
    if (
        broken == "no heartbeat program"
    ):  # a copy of the plugin outside the checkout does not find the program that it starts
        environment["ANSIBLE_CALLBACK_PLUGINS"] = str(tmp_path / "plugins")
        (tmp_path / "plugins").mkdir()
        (tmp_path / "plugins" / "rackproof_events.py").write_text((PLUGINS / "rackproof_events.py").read_text())
    done = play(playbook_of_tasks(tmp_path, where, {"name": "Continue", **WAIT}), tmp_path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=1" in done.stdout
    warnings = done.stderr.count("progress is no longer recorded")
    assert warnings == (0 if broken == "no heartbeat program" else 1)
    if broken == "link in place of the file":
        assert (tmp_path / "elsewhere").read_text() == ""
