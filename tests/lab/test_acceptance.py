"""The acceptance playbook over real SSH, with real torchrun across hosts and a real Prometheus, on three lab hosts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents
from tests.lab.kill_points import tiny
from tests.lab.lab import Lab
from tests.lab.prometheus import Prometheus

ROOT = Path(__file__).parents[2]
HOSTS = ("node1", "node2", "node3")
DEADLINE_S = 300


@dataclass(frozen=True)
class Run:
    """One finished acceptance run."""

    directory: Path
    playbook: subprocess.CompletedProcess[str]

    @property
    def report(self) -> dict[str, Any]:
        """report.json, checked against its schema."""
        found: dict[str, Any] = documents.read(self.directory / "report.json", "report", max_bytes=50_000_000)
        return found

    def findings(self) -> set[tuple[str, str, str]]:
        """(host, observation, verdict) of everything that did not pass."""
        verdicts = self.report["verdicts"]
        return {(item["host"], item["name"], item["verdict"]) for item in verdicts if item["verdict"] != "pass"}

    def measured(self, host: str) -> int:
        """How many observations of the plan the report has of a host."""
        return int(next(item for item in self.report["hosts"] if item["name"] == host)["coverage"]["measured"])


@dataclass(frozen=True)
class Site:
    """A control node with three hosts."""

    lab: Lab
    runs: Path
    prometheus: Prometheus

    def accept(self, run_id: str, **variables: Any) -> Run:
        """Runs playbooks/acceptance.yml."""
        group = {
            "rackproof_profile": "rehearsal",
            "rackproof_rack": "rack1",
            "rackproof_fabric_interface": "eth0",
            "rackproof_python": sys.executable,
            "rackproof_system_torch": True,
            "rackproof_wheelhouse": str(ROOT / "build" / "wheelhouse"),
            "rackproof_minimum_free_bytes": 100_000_000,  # a lab host's disk is a small tmpfs
            "rackproof_runs_directory": str(self.runs),
            **variables,
        }
        inventory = self.lab.inventory(groupvars=group, name=run_id)
        playbook = self.lab.run(
            [
                *(Path(sys.executable).parent / "ansible-playbook", "-i", inventory),
                *(ROOT / "playbooks" / "acceptance.yml", "-e", f"rackproof_run_id={run_id}"),
            ],
            cwd=ROOT,
            check=False,
            timeout=DEADLINE_S,
        )
        print(playbook.stdout[-6000:], playbook.stderr[-2000:])
        return Run(directory=self.runs / run_id, playbook=playbook)

    def processes(self, host: str) -> str:
        """Command lines of ours that run on a host."""
        return self.lab.on(host, "pgrep", "-af", "rackproof|torch.distributed|agent.benchmarks", check=False).stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "runs").mkdir()
    with Lab(directory / "lab") as lab:
        prometheus = lab.prometheus(directory / "runs" / "prometheus" / "*.json")
        yield Site(lab=lab, runs=directory / "runs", prometheus=prometheus)


@pytest.fixture(scope="module")
def accepted(site: Site) -> Run:
    return site.accept("first")


def test_rack_is_accepted_as_a_rehearsal(accepted: Run) -> None:
    assert accepted.playbook.returncode == 0
    report = accepted.report
    assert (report["decision"], report["rehearsal"], report["acceptance"]["status"]) == (
        "accepted",
        True,
        "REHEARSAL PASS",
    )
    assert {host["name"]: host["decision"] for host in report["hosts"]} == dict.fromkeys(HOSTS, "accepted")
    assert report["coverage"]["measured"] == report["coverage"]["expected"] > 300
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in accepted.playbook.stdout
    for view in ("report.html", "report.md"):
        assert "REHEARSAL" in (accepted.directory / view).read_text()


def test_ranks_of_all_hosts_worked_together(accepted: Run) -> None:
    for host in HOSTS:
        record = documents.read(accepted.directory / "gangs" / "rack1" / f"{host}.json", "record")
        busbw = [seen for seen in record["observations"] if seen["name"] == "collective.all_reduce.busbw"]
        assert {seen["params"]["world_size"] for seen in busbw} == {6}
        assert record["launches"][0]["members"] == list(HOSTS)
        assert [rank["exit_code"] for rank in record["launches"][0]["ranks"]] == [0, 0]


def test_prometheus_has_every_host_under_this_run(site: Site, accepted: Run) -> None:
    series = 'count_over_time(rackproof_host_memory_total_bytes{run_id="first"}[1h])'
    found = {item["metric"]["host"]: item["metric"]["rack"] for item in site.prometheus.wait_for(series, at_least=3)}
    assert found == dict.fromkeys(HOSTS, "rack1")


def test_nothing_runs_on_after_the_run(site: Site, accepted: Run) -> None:
    assert {host: site.processes(host) for host in HOSTS} == dict.fromkeys(HOSTS, "")


def test_deleted_record_is_named_and_the_rest_is_kept(accepted: Run, tmp_path: Path) -> None:
    directory = tmp_path / "first"
    shutil.copytree(accepted.directory, directory)
    (directory / "hosts" / "node2.json").unlink()
    done = subprocess.run(
        [sys.executable, ROOT / "rackproof.py", "report", directory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    run = Run(directory=directory, playbook=done)
    assert run.findings() == {("node2", "record", "inconclusive")}
    assert run.measured("node1") == accepted.measured("node1")
    assert run.measured("node3") == accepted.measured("node3")


def changed_tasks(output: str) -> set[str]:
    """The tasks that changed anything on any host."""
    found, task = set(), ""
    for line in output.splitlines():
        if line.startswith("TASK ["):
            task = line.split("[", 1)[1].split("]")[0]
        elif line.startswith("changed: "):
            found.add(task)
    return found


def test_settled_hosts_are_left_as_they_are(site: Site, accepted: Run) -> None:
    short = site.runs.parent / "tiny.yml"
    short.write_text(yaml.safe_dump(tiny(0.3)))
    again = site.accept("again", rackproof_profile=str(short), nvidia_driver_state="ignored")
    assert again.playbook.returncode == 0
    assert changed_tasks(again.playbook.stdout) == {
        "monitoring : Write the targets",
        "monitoring : Run the exporter for this run",
        "inspect : Begin the record with a snapshot",
        "inspect : Fetch the record",
        "benchmark : Start the benchmarks",
        "benchmark : Fetch the record",
        "gang : Start this host's part of the gang",
        "gang : Fetch the gang record",
        "report : Judge the run",
    }
    counted = again.playbook.stdout.rsplit("PLAY RECAP", 1)[1]
    print(counted)
    tasks = {line.split()[0]: int(line.split("ok=")[1].split()[0]) for line in counted.splitlines() if "ok=" in line}
    assert max(tasks[host] for host in ("node2", "node3")) <= 25


def test_unreachable_host_is_named_and_the_others_finish(site: Site, accepted: Run) -> None:
    site.lab.cut("node3")
    try:
        run = site.accept("cut")
    finally:
        site.lab.mend("node3")
    assert run.playbook.returncode != 0
    assert run.report["decision"] == "incomplete"
    assert run.findings() == {("node3", "record", "inconclusive")}
    lost = next(host for host in run.report["hosts"] if host["name"] == "node3")
    assert any("unreachable at Preflight" in event for event in lost["events"])
    with_node3 = 2 * 2  # bandwidth and latency of two ranks with their partners there
    for host in ("node1", "node2"):
        assert run.measured(host) == accepted.measured(host) - with_node3
    record = json.loads((run.directory / "gangs" / "rack1" / "node1.json").read_text())
    assert record["launches"][0]["members"] == ["node1", "node2"]


FAULT = """
import agent.benchmarks.memory as benchmark

def broken(*arguments):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

benchmark.OPERATIONS = dict.fromkeys(benchmark.OPERATIONS, broken)
"""


def test_failing_benchmark_is_named_with_its_host_and_reason(site: Site, accepted: Run) -> None:
    """The fault is put beneath the agent, into the Python environment of one host."""
    places = site.lab.on(
        "node2", "/opt/rackproof/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
    )
    packages = places.stdout.strip()
    site.lab.put("node2", f"{packages}/fault.py", FAULT)
    site.lab.put("node2", f"{packages}/fault.pth", "import os; 'LOCAL_RANK' in os.environ and __import__('fault')\n")
    try:
        run = site.accept("fault")
    finally:
        site.lab.on("node2", "rm", f"{packages}/fault.pth", f"{packages}/fault.py")
    assert run.report["decision"] == "incomplete"
    assert run.findings() == {("node2", "memory.bandwidth", "inconclusive")}
    reasons = [item["reason"] for item in run.report["verdicts"] if item["verdict"] != "pass"]
    four_operations_on_two_devices = 8
    why = "error: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    assert reasons == [why] * four_operations_on_two_devices
    assert run.measured("node1") == accepted.measured("node1")
    assert run.measured("node2") == accepted.measured("node2") - four_operations_on_two_devices
