"""Test `rackproof run-host` as pods run it, one pod per host. In these tests a pod is a process on this machine.

`rackproof collect` reads the records from the logs of the pods, and `rackproof report` judges them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.run import lease
from rackproof import main as command

PROFILE = """\
schema: rackproof.profile/1
summary: the smallest profile with both stages
device: cpu
processes_per_host: 1
stages:
  benchmark:
    deadline_s: 120
    collective_timeout_s: 30
    benchmarks:
      verbs: {}
  gang:
    deadline_s: 120
    collective_timeout_s: 30
    benchmarks:
      collective: {ops: [all_reduce], sizes_bytes: [8], seconds: 0.02, placements: [in_place]}
"""
"""Only the ranks of the gang import torch, which takes more than a second of CPU time."""
LOCAL = {"ansible_connection": "local", "ansible_host": "127.0.0.1", "rackproof_gang": "all"}


def rackproof(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, command.__file__, *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Plan a run of two hosts and return the run directory."""
    (tmp_path / "tiny.yml").write_text(PROFILE, encoding="utf-8")
    listing = {"_meta": {"hostvars": dict.fromkeys(("a", "b"), LOCAL)}, "gpu_hosts": {"hosts": ["a", "b"]}}
    (tmp_path / "inventory.json").write_text(json.dumps(listing), encoding="utf-8")
    planned = rackproof(
        "plan", "-i", tmp_path / "inventory.json", "--profile", tmp_path / "tiny.yml", "--run-dir", tmp_path / "runs/r1"
    )
    assert planned.returncode == 0, planned.stderr
    return tmp_path / "runs" / "r1"


def pod(run: Path, host: str, port: int, discovery_s: float = 60.0) -> subprocess.Popen[bytes]:
    """Start `rackproof run-host` for a host as a pod does: both output streams go to one log, `HOST/pod.log`.

    Both pods get the same variables of Kubeflow's operator, which run-host must ignore.
    `discovery_s` is the number of seconds in which the pods must find each other.
    """
    directory = run.parents[1] / host
    directory.mkdir()
    kubeflow = {"RANK": "1", "WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "nowhere"}
    with (directory / "pod.log").open("wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, command.__file__, "run-host", f"--plan={run / 'plan.json'}", f"--port={port}"),
                *(f"--run-dir={directory / 'runs' / 'r1'}", f"--meet-within={discovery_s}"),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, **kubeflow, "RACKPROOF_HOST": host, "RACKPROOF_NODE": f"node-{host}"},
        )


def random_port() -> int:
    """Return a random port from 10000 to 29999, below the ports that the kernel assigns by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1]) % 20000 + 10000


def terminate_once_logged(process: subprocess.Popen[bytes], log: Path, text: bytes) -> Path:
    """Terminate the pod once `log` contains `text`; check that the pod exits with 143, and return `log`."""
    deadline = time.monotonic() + 180
    while text not in log.read_bytes() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    return log


def test_logs_of_two_pods_give_a_report(run: Path) -> None:
    port = random_port()
    pods = [pod(run, host, port) for host in ("a", "b")]
    assert [process.wait(240) for process in pods] == [0, 0]
    logs = [run.parents[1] / host / "pod.log" for host in ("a", "b")]
    collected = rackproof("collect", run, *logs)
    assert (collected.returncode, collected.stderr) == (0, ""), logs[0].read_text(encoding="utf-8")
    assert "4 records collected, 0 unchanged, none missing" in collected.stdout
    report = rackproof("report", run)
    assert report.returncode == 0, report.stdout
    assert "FINAL ACCEPTANCE: REHEARSAL PASS Hosts 2 of 2 passed" in " ".join(report.stdout.split())
    events = [json.loads(line) for line in (run / "collected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {(event["host"], event["node"]) for event in events} == {("a", "node-a"), ("b", "node-b")}


def test_pod_terminated_during_inspection_has_no_record_and_releases_its_host(run: Path) -> None:
    process = pod(run, "a", random_port())
    log = terminate_once_logged(process, run.parents[1] / "a" / "pod.log", b"inspect started")
    assert "there is no record" in log.read_text(encoding="utf-8")
    assert "Traceback" not in log.read_text(encoding="utf-8")
    assert not list(run.parents[1].rglob(lease.LEASE))


def test_pod_terminated_while_waiting_for_the_other_pod_emits_its_record(run: Path) -> None:
    process = pod(run, "a", random_port())
    log = terminate_once_logged(process, run.parents[1] / "a" / "pod.log", b"waiting up to")
    collected = rackproof("collect", run, log)
    assert collected.returncode == 0
    assert "collected hosts/a.json" in collected.stdout
    report = rackproof("report", run)
    assert report.returncode == 2
    assert "hosts/b.json is missing" in report.stdout
