"""Test that a killed or interrupted playbook can be resumed, and that two operators cannot use the same run or host.

The tests run the real playbooks over SSH on two lab hosts. Only one test kills a playbook; `python -m tests.lab.kill_points 200`
kills playbooks at 200 points.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import locks
from tests.lab import processes
from tests.lab.agent_install import install_agent
from tests.lab.fault_injection import IDLE_WITHOUT_TORCH, inject_fault
from tests.lab.kill_points import STATE, Attempt, Site, differences_from_undisturbed, kill
from tests.lab.lab import Lab
from tests.lab.test_silence import wait

ROOT = Path(__file__).parents[2]
HOSTS = ("node1", "node2")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, agent_archive: Path) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("resume")
    (directory / "runs").mkdir()
    with Lab(directory / "lab", hosts=len(HOSTS)) as lab:
        install_agent(lab, agent_archive)
        for host in HOSTS:
            inject_fault(lab, host, IDLE_WITHOUT_TORCH)
        yield Site(lab=lab, runs=directory / "runs")


@dataclass(frozen=True)
class Run:
    """An uninterrupted run on hosts that were already set up."""

    report: dict[str, Any]
    output: str


@pytest.fixture(scope="module")
def undisturbed(site: Site) -> Run:
    code, output = site.run("undisturbed")
    assert code == 0, output[-4000:]
    return Run(site.report("undisturbed"), output)


def changed_tasks(output: str) -> set[str]:
    """Return the names of the tasks that reported a change on at least one host."""
    changed, task = set(), ""
    for line in output.splitlines():
        if line.startswith("TASK ["):
            task = line.split("[", 1)[1].split("]")[0]
        elif line.startswith("changed: "):
            changed.add(task)
    return changed


def test_run_on_hosts_that_are_set_up_changes_only_files_and_processes_of_the_run(undisturbed: Run) -> None:
    assert changed_tasks(undisturbed.output) == {
        "common : Write the targets",
        "monitoring : Run the exporter for this run",
        "inspect : Take a snapshot and start the record",
        "inspect : Fetch the record",
        "benchmark : Run the benchmarks",
        "benchmark : Fetch the record",
        "gang : Run the launch",
        "gang : Fetch the gang record",
        "report : Judge the run",
    }


def remote_tasks(run: Path, host: str) -> list[str]:
    """Return the tasks of a run that needed an SSH connection to the host."""
    modules = {name: module for path in (ROOT / "roles").glob("*/tasks/*.yml") for name, module in modules_of(path)}
    tasks, task = [], ""
    for line in (run / "progress.jsonl").read_text().splitlines():
        event = json.loads(line)
        task = event.get("task", task)
        if event["what"] == "ok" and event["host"] == host and modules.get(task, "") not in ON_CONTROL_NODE:
            tasks.append(task)
    return tasks


ON_CONTROL_NODE = ("", "set_fact", "debug", "assert", "include_tasks", "group_by", "read_bmcs")
"""Modules that run on the control node. "" stands for tasks that are in no task file, such as the checks of role arguments that
Ansible adds."""


OWN_MODULES = {path.stem for path in (ROOT / "playbooks" / "action_plugins").glob("*.py")}
"""Actions of Rackproof."""


def modules_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, module) for each task in a task file of a role. The name is the one in Ansible's output."""
    tasks = yaml.safe_load(path.read_text())
    for task in tasks:
        tasks += task.get("block", []) + task.get("rescue", [])
        for module in task:
            if module.startswith("ansible.builtin.") or module in OWN_MODULES:
                yield f"{path.parents[1].name} : {task['name']}", module.removeprefix("ansible.builtin.")


def test_host_that_is_set_up_needs_at_most_ten_ssh_tasks(site: Site, undisturbed: Run) -> None:
    """Hosts with GPUs and systemd, unlike lab hosts, need two more tasks: the driver check and the unit of the exporter."""
    tasks = remote_tasks(site.runs / "undisturbed", "node2")
    print(*tasks, sep="\n")
    assert len(tasks) <= 10


def test_killed_and_resumed_run_equals_an_uninterrupted_run(site: Site, undisturbed: Run) -> None:
    assert undisturbed.report["decision"] == "accepted"
    log: list[str] = []
    assert kill(site, "killed", "benchmark : Run the benchmarks", 1.0, log.append), log
    write_partial_files(site.runs / "killed")
    code, output = site.run("killed")
    assert code == 0, output[-4000:]
    assert differences_from_undisturbed(site, "killed", undisturbed.report) == [], log
    journal = [json.loads(line) for line in (site.runs / "killed" / "journal.jsonl").read_text().splitlines()]
    assert [event["what"] for event in journal][:-1] == ["begun", "resumed"]
    assert journal[-1]["what"] == "reported"
    assert all("has exited" in event["note"] for event in journal[1:-1])


def write_partial_files(run: Path) -> None:
    """Write the partial files that a kill during a transfer or a write can leave."""
    complete = (run / "hosts" / "node1.json").read_bytes()
    (run / "hosts" / "node1.json").write_bytes(complete[: len(complete) // 2])
    (run / "hosts" / ".node1.json.abcdefgh").write_text("{")
    (run / ".report.json.abcdefgh").write_text("{")
    for name in ("events.jsonl", "journal.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"at": "20')


TRAINING = {"max_steps": 2, "batch_size": 8, "data_directories": []}
"""Settings of a short training. Without data directories it uses synthetic images, a sixth as many as Fashion-MNIST has."""
STUDY = {
    "schema": "rackproof.profile/1",
    "summary": "the smallest study with two launches",
    "device": "cpu",
    "processes_per_host": 1,
    "study": {"matrix": [{"hosts": [2], "gpus": [1], "cpus": [1]}, {"hosts": [1, 3], "gpus": [1]}]},
    "stages": {
        "gang": {"deadline_s": 90, "collective_timeout_s": 30, "benchmarks": {"scaling": TRAINING}},
    },
}
"""A scaling study, which measures each cell of its matrix in a launch of its own. The cells train on 2, 1 and 3 hosts. The
last one is skipped, because the lab has only two hosts."""


ENDS_LATER = """
import sys
from pathlib import Path
from agent.run import background
run = Path(sys.argv[1])
record, later = run / "gangs/all.json", run / "gangs/all.later"
print(background.wait(run, "gang", 60))
record.rename(later)
moved = f"import os, time\\nwhile not os.path.exists('/run/now'): time.sleep(0.1)\\nos.rename({str(later)!r}, {str(record)!r})"
print(background.start(["-c", moved], run, "gang"))
"""
"""Program that hides the finished gang record of a host until the file /run/now exists, as if the launch were still running."""


def test_resumed_study_measures_no_cell_twice(site: Site) -> None:
    path = site.lab.directory / "study.yml"
    path.write_text(yaml.safe_dump(STUDY))
    options: dict[str, Any] = {"playbook": "scaling", "tags": "run,report", "rackproof_study": str(path)}
    attempt = site.start("study", **options)
    assert attempt.reached("gang : Run the launch", 2.0), attempt.lines[-20:]
    attempt.process.send_signal(signal.SIGINT)  # Ctrl-C
    hint = " ".join(attempt.end().split()).partition("interrupted: ")[2]
    assert "stages that were started continue on the hosts. To resume the run, repeat the command with" in hint
    assert re.search(r"ansible-playbook -i \S+ playbooks/stop\.yml -e rackproof_run_id=study$", hint), hint
    study_directory = f"{STATE}/runs/study"
    site.lab.on(
        "node1", "/opt/rackproof/bin/rackproof", "wait", "--run-dir", study_directory, "--host=node1", "--stage=gang"
    )
    site.lab.on("node2", "/opt/rackproof/bin/python", "-c", ENDS_LATER, study_directory)
    attempt = site.start("study", **options)
    assert attempt.reached("gang : Plan the next launch"), (
        "the playbook must fetch the existing records and then plan the next launch"
    )
    site.lab.on("node2", "touch", "/run/now")
    output = attempt.end()
    assert attempt.process.returncode == 0, output[-4000:]
    study = json.loads((site.runs / "study" / "scaling.json").read_text())
    assert [cell["state"] for cell in study["cells"]] == ["measured", "measured", "skipped"]
    assert [cell.get("members") for cell in study["cells"]] == [list(HOSTS), [HOSTS[0]], None]
    assert all(cell["wall_s"] > cell["hookup_s"] > 0 for cell in study["cells"][:2])
    for host, numbers in zip(HOSTS, ([1, 2], [1]), strict=True):
        gang_record = json.loads(site.lab.on(host, "cat", f"{STATE}/runs/study/gangs/all.json").stdout)
        assert [launch["number"] for launch in gang_record["launches"]] == numbers, "each cell must be measured once"
        (throughput,) = (
            item for item in gang_record["launches"][0]["observations"] if item["name"] == "scaling.throughput"
        )
        assert (throughput["params"]["cpus"], throughput["params"]["world_size"]) == (1, 2)
    assert not [path for path in site.left_over("study") if "lease" in path], "the hosts must be released"
    assert "2 of 3 cells were measured, 1 skipped." in output


def test_second_operator_cannot_use_a_locked_run_or_a_held_host(site: Site) -> None:
    """While the run `first` measures, a second operator starts four playbooks:

    - inspect.yml for the run `first`: rejected, because the run is locked.
    - stop.yml for the run `other`: rejected, because the run `first` holds the host.
    - inspect.yml for the run `second`: gets only taken_host, for which rackproof_take_over is set.
    - stop.yml for the run `first`: ends the stage on kept_host.
    """
    (kept_host, taken_host), stopping = HOSTS, {"only": [HOSTS[0]], "rackproof_gang": "none"}
    attempt = start_measuring(site, "first")
    try:
        since = json.loads((site.runs / "first" / "lock.json").read_text())["since"]
        code, output = site.run("first", "inspect", seconds=60.0)
        assert code == 2
        assert f"(process {attempt.process.pid}) since {since}: wait until it finishes" in output

        code, output = site.run("other", "stop", **stopping)
        assert code == 2
        assert output.count("this host is held by run first of root on") == 1

        code, output = site.run("second", "inspect", of_hosts={taken_host: {"rackproof_take_over": True}})
        assert code == 2
        assert output.count("this host is held by run first of root on") == 1
        leases = [json.loads(site.lab.on(host, "cat", f"{STATE}/lease.json").stdout) for host in HOSTS]
        assert [lease["run_id"] for lease in leases] == ["first", "second"]
        assert [is_benchmarking(site, host) for host in HOSTS] == [True, False]
        assert targets_of(site, "first") == list(HOSTS)

        code, output = site.run("first", "stop", **stopping)
        assert code == 0, output[-4000:]
        assert targets_of(site, "first") == [taken_host]
        assert output.count("ended stage benchmark of run first") == 1
        attempt.end()
    finally:
        attempt.kill()
    wait(lambda: site.lab.on(kept_host, "pgrep", "-af", processes.AGENT, check=False).stdout == "", 30)
    files = site.lab.on(kept_host, "ls", STATE, f"{STATE}/runs/first").stdout
    assert "record.json" in files
    assert "lease.json" not in files
    report = site.report("first")
    assert report["decision"] == "incomplete"
    events = {host["name"]: " ".join(host["events"]) for host in report["hosts"]}
    assert "this host was taken by run second of root on" in events[taken_host]


def targets_of(site: Site, run_id: str) -> list[str]:
    """Return the hosts that Prometheus scrapes for a run."""
    path = site.runs / "prometheus" / f"{run_id}.json"
    return [group["labels"]["host"] for group in json.loads(path.read_text())] if path.exists() else []


def start_measuring(site: Site, run_id: str) -> Attempt:
    """Start a run, and return once the benchmark stage runs on all hosts."""
    attempt = site.start(run_id, seconds=60.0, rackproof_gang="none")
    assert attempt.reached("benchmark : Run the benchmarks"), attempt.lines[-20:]
    wait(lambda: all(is_benchmarking(site, host) for host in HOSTS), 60)
    return attempt


def is_benchmarking(site: Site, host: str) -> bool:
    """Return whether processes of the benchmark stage run on the host."""
    return site.lab.on(host, "pgrep", "-f", "agent.benchmarks", check=False).stdout != ""


def write_lease_of_other_control_node(site: Site, host: str) -> dict[str, Any]:
    """Write a lease to the host, as if a run of another control node held the host; return the lease."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    by = replace(locks.claim("theirs", Path("/srv/runs"), 1, at), user="bob", host="control2", machine="another")
    lease = {"run_id": "theirs", "nonce": "f" * 32, "by": {**vars(by), "running": []}, "since": at, "renewed": at}
    lease["lasts_s"] = 999
    site.lab.put(host, f"{STATE}/lease.json", json.dumps(lease) + "\n")
    return lease


def test_host_held_by_another_control_node_is_excluded_and_the_reason_is_reported(site: Site, undisturbed: Run) -> None:
    """The run continues on the other hosts and does not change the held host."""
    lease = write_lease_of_other_control_node(site, "node2")
    site.run("beside", "inspect")
    code, output = site.run("beside", "report")
    assert code == 2
    reasons = [item["reason"] for item in site.report("beside")["verdicts"] if item["host"] == "node2"]
    assert len(reasons) == 1
    assert f"this host is held by run theirs of bob on control2 since {lease['since']}" in reasons[0]
    assert "REHEARSAL INCOMPLETE" in output
    assert json.loads(site.lab.on("node2", "cat", f"{STATE}/lease.json").stdout) == lease
    assert site.lab.on("node1", "test", "-e", f"{STATE}/lease.json", check=False).returncode == 1


def test_teardown_changes_a_host_held_by_another_run_only_with_rackproof_take_over(
    site: Site, undisturbed: Run
) -> None:
    for host in HOSTS:
        write_lease_of_other_control_node(site, host)
    code, output = site.run("down", "teardown", of_hosts={"node1": {"rackproof_take_over": True}})
    assert code == 2
    assert output.count("this host is held by run theirs of bob on control2") == 1
    left = [
        site.lab.on(host, "sh", "-c", f"ls -d /opt/rackproof {STATE}", check=False).stdout.split() for host in HOSTS
    ]
    assert left == [[], ["/opt/rackproof", STATE]]
