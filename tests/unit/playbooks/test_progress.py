"""Test what the callback plugin records about progress and failures while a real ansible-playbook runs.

All hosts of the playbook are this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents, locks, run_directory
from schemas.locks import process_start_time
from schemas.records import to_json
from tests import ROOT, builders
from tests.ansible_commands import run_ansible
from tests.lab.lab import CONTROL_PYTHON

PLUGINS = ROOT / "playbooks" / "callback_plugins"
WAIT = {"ansible.builtin.command": {"argv": ["sleep", "0.2"]}, "vars": {"_rackproof_waits_for": "benchmark"}}
"""A task that sleeps. Its variable marks it, for the plugin, as a task that waits for the end of the stage `benchmark`."""


def playbook_of_tasks(
    directory: Path, run_dir: Path, *tasks: dict[str, Any], hosts: Sequence[str] = ("h1", "h2")
) -> list[str]:
    """Write a playbook that sets the run directory as a fact and runs these tasks. Return the arguments of ansible-playbook."""
    set_facts = {"ansible.builtin.set_fact": {"_rackproof_run_dir": str(run_dir)}, "run_once": True}
    plays = [
        {"name": "Preflight", "hosts": "gpu_hosts", "gather_facts": False, "tasks": [set_facts]},
        {"name": "Benchmark", "hosts": "gpu_hosts", "gather_facts": False, "tasks": list(tasks)},
    ]
    inventory = {"gpu_hosts": {"hosts": {name: {"ansible_connection": "local"} for name in hosts}}}
    (directory / "play.yml").write_text(yaml.safe_dump(plays))
    (directory / "hosts.yml").write_text(yaml.safe_dump(inventory))
    return ["-i", str(directory / "hosts.yml"), str(directory / "play.yml")]


def play(words: list[str], directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ansible-playbook with these arguments in `directory`, with the callback plugin."""
    config = {"ANSIBLE_CALLBACK_PLUGINS": str(PLUGINS), "ANSIBLE_NOCOLOR": "1"}
    config |= {"ANSIBLE_PYTHON_INTERPRETER": str(CONTROL_PYTHON), "ANSIBLE_LOCALHOST_WARNING": "false"}
    return run_ansible("ansible-playbook", *words, directory=directory, environment=config | environment)


def create_run_directory(directory: Path) -> Path:
    """Create and return the directory of a run whose plan has two hosts."""
    path = directory / "runs" / "r1"
    documents.write(path / "plan.json", json.loads(json.dumps(to_json(builders.plan("h1", "h2")))))
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return create_run_directory(tmp_path)


@contextlib.contextmanager
def prometheus(run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that stands in for the Prometheus of the run, and yield it."""
    (run_dir / "metrics").mkdir()
    with subprocess.Popen(["sleep", "60"]) as server:
        (run_dir / "metrics" / "prometheus.pid").write_text(f"{server.pid} {process_start_time(server.pid)}\n")
        try:
            yield server
        finally:
            server.kill()


def probe(directory: Path, boot_ids: Mapping[str, object]) -> dict[str, Any]:
    """Return a task that stands in for the probe of the role `preflight`. It prints the boot ID of its host, as JSON."""
    for host, boot_id in boot_ids.items():
        (directory / host).write_text(json.dumps({"boot_id": boot_id}))
    command = {"argv": ["cat", f"{directory}/{{{{ inventory_hostname }}}}"]}
    return {"name": "Probe", "ansible.builtin.command": command, "register": "_rackproof_preflight"}


SAME_MACHINE = "are the same machine"
CUT_OFF = '{"at": "20'
"""The incomplete line that a killed playbook left in progress.jsonl."""
ERROR_OF_PIP = "ERROR: No matching distribution found for bcrypt<6,>=4.1"


@dataclass(frozen=True)
class Recorded:
    """What the plugin recorded while one ansible-playbook command ran two playbooks.

    No host fails in the first playbook. Each host fails at a different task of the second.
    """

    done: subprocess.CompletedProcess[str]
    lines: list[str]
    """Lines of progress.jsonl. The first two are from an earlier command, which was killed while it wrote the second line."""
    failures: dict[str, dict[str, Any]]
    """Host -> its failure in events.jsonl."""
    is_monitored: bool
    """Whether, after the command, the Prometheus of the run still ran and the file with its targets still existed."""

    def progress(self) -> list[dict[str, Any]]:
        """Return the events of this command, from progress.jsonl."""
        document = [json.loads(line) for line in self.lines[2:]]
        for event in document:
            documents.validate(event, "progress", source="progress.jsonl")
        return document


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Run the two playbooks for a rehearsal (a run on CPUs). An earlier command for the same rehearsal was killed."""
    directory = tmp_path_factory.mktemp("recorded")
    run_dir, targets, hosts = create_run_directory(directory), directory / "targets.json", ("h1", "h2", "h3")
    (run_dir / "progress.jsonl").write_text(f'{{"at": "2026-11-21T04:00:00Z", "what": "end"}}\n{CUT_OFF}')
    targets.write_text("[]")
    facts = {"_rackproof_rehearsal": True, "_rackproof_targets_file": str(targets)}
    false: dict[str, Any] = {"ansible.builtin.command": {"argv": ["false"]}}
    command = playbook_of_tasks(
        directory,
        run_dir,
        {"ansible.builtin.set_fact": facts, "run_once": True},
        probe(directory, dict.fromkeys(hosts, "A")),
        {"name": "Wait", **WAIT, "changed_when": False},
        {"name": "Skip", **false, "when": "inventory_hostname == 'h4'"},
        {"name": "Fail and ignore it", **false, "ignore_errors": True},
        hosts=hosts,
    )
    warnings = f"WARNING: Retrying (Retry(total=4)) after connection broken by {'x' * 400}\n" * 5
    (directory / "stderr").write_text(f"{warnings}{ERROR_OF_PIP}\n")
    pip = {"ansible.builtin.shell": f"cat {directory / 'stderr'} >&2; exit 1"}
    # The agent exits with 75 if the host is leased to (reserved for) another run.
    leased = {"ansible.builtin.command": {"argv": ["sh", "-c", "exit 75", "rackproof"]}}
    failing = (("Take the lease", "h2", leased), ("pip", "h3", pip))
    tasks = [{"name": name, **task, "when": f"inventory_hostname == '{host}'"} for name, host, task in failing]
    role = directory / "roles" / "preflight" / "tasks"
    role.mkdir(parents=True)
    (role / "main.yml").write_text(yaml.safe_dump([{**false, "name": "Check the host"}]))
    plays = [
        {"name": "Measure", "hosts": "gpu_hosts", "gather_facts": False, "tags": ["run"], "tasks": tasks},
        {"name": "Preflight", "hosts": "gpu_hosts", "gather_facts": False, "roles": ["preflight"]},
    ]
    (directory / "next.yml").write_text(yaml.safe_dump(plays))
    with prometheus(run_dir) as server:
        done = play([*command, str(directory / "next.yml")], directory)
        is_monitored = server.poll() is None and targets.exists()
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return Recorded(
        done=done,
        lines=(run_dir / "progress.jsonl").read_text().splitlines(),
        failures={event["host"]: event for event in events if event["what"] == "failed"},
        is_monitored=is_monitored,
    )


def test_events_record_the_outcome_of_each_task_on_each_host(recorded: Recorded) -> None:
    assert recorded.done.returncode == 2, recorded.done.stdout + recorded.done.stderr
    document = recorded.progress()
    brief = [(event["what"], event.get("host", event.get("task", ""))) for event in document]
    assert [what for what, _ in brief[:2]] == ["start", "play"]
    assert brief[-1] == ("end", "")
    hosts = ("h1", "h2", "h3")
    waits = brief.index(("task", "Wait"))
    assert document[waits]["stage"] == "benchmark"
    assert sorted(brief[waits + 1 : waits + 7]) == [(what, host) for what in ("began", "ok") for host in hosts]
    assert {event.get("rc") for event in document[waits : waits + 7] if event["what"] == "ok"} == {0}
    of_task: dict[str, list[tuple[str, str]]] = {}
    for what, name in brief:
        if what in ("task", "play", "end"):
            results = of_task.setdefault(name, [])
        elif what not in ("start", "began"):
            results.append((what, name))
    assert sorted(of_task["Skip"]) == [("skipped", host) for host in hosts]
    assert sorted(of_task["Fail and ignore it"]) == [("ok", host) for host in hosts]
    assert sorted(of_task["Take the lease"]) == [("failed", "h2"), ("skipped", "h1"), ("skipped", "h3")]


def test_progress_and_failures_of_the_second_playbook_are_recorded(recorded: Recorded) -> None:
    assert recorded.failures.keys() == {"h1", "h2", "h3"}
    document = recorded.progress()
    assert [event["what"] for event in document].count("start") == 2
    assert document[-1]["what"] == "end"


def test_failure_has_the_names_of_the_play_and_of_the_task_without_its_role(recorded: Recorded) -> None:
    assert recorded.failures["h1"]["task"] == "Check the host"
    assert recorded.failures["h1"]["play"] == "Preflight"


def test_error_of_pip_is_recorded_without_the_warnings_before_it(recorded: Recorded) -> None:
    assert recorded.failures["h3"]["message"] == ERROR_OF_PIP


def test_failure_of_a_host_leased_to_another_run_is_marked_as_in_use(recorded: Recorded) -> None:
    assert {host: event.get("in_use") for host, event in recorded.failures.items() if "in_use" in event} == {"h2": True}


def test_events_after_an_incomplete_line_start_on_a_new_line(recorded: Recorded) -> None:
    assert recorded.lines[1] == CUT_OFF
    assert json.loads(recorded.lines[2])["what"] == "start"


def test_prometheus_keeps_running_if_no_play_of_the_playbook_ends_the_run(recorded: Recorded) -> None:
    """deploy.yml is such a playbook: it starts the Prometheus of a run, and a later playbook ends the run."""
    assert recorded.is_monitored


def test_warning_names_hosts_that_are_the_same_machine(tmp_path: Path, run_dir: Path) -> None:
    """Hosts with different boot IDs are different machines. A boot ID that is not text is ignored."""
    boot_ids = {"h1": "A", "h2": "A", "h3": "B", "h4": 1, "h5": 1}
    command = playbook_of_tasks(tmp_path, run_dir, probe(tmp_path, boot_ids), hosts=tuple(boot_ids))
    done = play(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join((done.stdout + done.stderr).split())
    assert f"h1, h2 {SAME_MACHINE} (they have the same boot ID)" in text
    assert text.count(SAME_MACHINE) == 1


def test_hosts_of_a_rehearsal_may_be_the_same_machine(recorded: Recorded) -> None:
    text = " ".join((recorded.done.stdout + recorded.done.stderr).split())
    assert "TASK [Probe]" in text
    assert SAME_MACHINE not in text


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


@pytest.mark.parametrize("broken", ["no run directory", "link in place of the file", "no heartbeat program"])
def test_error_in_progress_reporting_does_not_fail_the_playbook(broken: str, tmp_path: Path, run_dir: Path) -> None:
    if broken == "link in place of the file":
        (tmp_path / "elsewhere").write_text("")
        (run_dir / "progress.jsonl").symlink_to(tmp_path / "elsewhere")
    where = tmp_path / "nowhere" / "r1" if broken == "no run directory" else run_dir
    environment = {"RACKPROOF_HEARTBEAT": "1"}
    if broken == "no heartbeat program":  # a copy of the plugin outside the checkout does not find `rackproof`
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
