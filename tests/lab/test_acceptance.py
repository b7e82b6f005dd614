"""Test the acceptance playbook over real SSH, with torchrun across hosts, a real Prometheus and `rackproof watch`."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml

from agent.exporter.defaults import FRESH_S
from fleet.planning.plan import PROFILES
from schemas import documents
from schemas.catalogue import BENCHMARKS
from tests import alterations
from tests.lab import processes
from tests.lab.agent_install import install_agent
from tests.lab.fault_injection import IDLE_STRESS, inject_fault
from tests.lab.kill_points import ROOT, STATE, Attempt, Site
from tests.lab.lab import Lab
from tests.lab.prometheus import Prometheus

HOSTS = ("node1", "node2")
UNREACHABLE = "node3"
"""A host that only the faulty run has in its inventory; its link is cut."""
MEMORY = ("copy", "triad")
PAIR_OBSERVATIONS = ("pairs.bandwidth", "pairs.latency")
SMALL: dict[str, Any] = {
    "schema": "rackproof.profile/1",
    "summary": "the smallest profile that shows the effect of a fault",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "benchmark": {
            "deadline_s": 90,
            "collective_timeout_s": 30,
            "benchmarks": {
                "memory": {"ops": list(MEMORY), "size_bytes": 1048576, "seconds": 0.1},
            },
        },
        "gang": {
            "deadline_s": 90,
            "collective_timeout_s": 30,
            "benchmarks": {"pairs": {"size_bytes": 65536, "seconds": 0.1}},
        },
    },
}


@dataclass(frozen=True)
class Run:
    """A finished acceptance run."""

    directory: Path
    code: int
    output: str

    @property
    def report(self) -> dict[str, Any]:
        """Return report.json, checked against its schema."""
        document: dict[str, Any] = documents.read(self.directory / "report.json", "report", max_bytes=50_000_000)
        return document

    def findings(self) -> set[tuple[str, str, str]]:
        """Return (host, observation, verdict) of each verdict that is not a pass."""
        verdicts = self.report["verdicts"]
        return {(item["host"], item["name"], item["verdict"]) for item in verdicts if item["verdict"] != "pass"}

    def measured(self, host: str) -> int:
        """Return the number of measured observations of a host."""
        return int(self._coverage(host)["measured"])

    def missing(self, host: str) -> int:
        """Return the number of missing observations of a host."""
        return int(self._coverage(host)["expected"]) - self.measured(host)

    def _coverage(self, host: str) -> dict[str, Any]:
        coverage: dict[str, Any] = next(item for item in self.report["hosts"] if item["name"] == host)["coverage"]
        return coverage


def rehearsal_profile() -> dict[str, Any]:
    """Return the rehearsal with one rank per host. Its stress test takes as long as the exporter caches a page."""
    profile: dict[str, Any] = yaml.safe_load((PROFILES / "rehearsal.yml").read_text())
    profile["processes_per_host"] = 1
    profile["stages"]["benchmark"]["benchmarks"]["stress"]["seconds"] = FRESH_S
    return profile


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, agent_archive: Path) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "runs").mkdir()
    (directory / "small.yml").write_text(yaml.safe_dump(SMALL))
    (directory / "rehearsal.yml").write_text(yaml.safe_dump(rehearsal_profile()))
    with Lab(directory / "lab", hosts=len((*HOSTS, UNREACHABLE))) as lab:
        install_agent(lab, agent_archive)
        yield Site(lab=lab, runs=directory / "runs")


@pytest.fixture(scope="module")
def prometheus(site: Site) -> Prometheus:
    return site.lab.prometheus(site.runs / "prometheus" / "*.json", scrape_interval="5s")


@dataclass(frozen=True)
class Watched(Run):
    """A run that `rackproof watch` followed from the preflight on."""

    views: list[dict[str, Any]]
    lines: list[str]


@pytest.fixture(scope="module")
def accepted(site: Site, prometheus: Prometheus) -> Watched:
    """Run the complete rehearsal while two `rackproof watch` processes follow it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACKPROOF_HEARTBEAT", "2")
        attempt = site.start(
            "first",
            only=HOSTS,
            rackproof_profile=str(site.runs.parent / "rehearsal.yml"),
            rackproof_local_storage=None,
            nvidia_driver_state=None,
        )
    watchers = watch(attempt, site.lab, site.runs / "first")
    assert attempt.reached("inspect : Take a snapshot and start the record"), attempt.lines[-20:]
    for host in HOSTS:
        inject_fault(site.lab, host, IDLE_STRESS)
    output = attempt.end()
    for watcher in watchers:
        assert watcher.wait(20) == 0
    views, lines = ((site.lab.directory / name).read_text().splitlines() for name in ("views", "lines"))
    print(output[-6000:], *lines, sep="\n")
    documents_ = [json.loads(view) for view in views]
    return Watched(site.runs / "first", attempt.process.returncode, output, documents_, lines)


def watch(attempt: Attempt, lab: Lab, run: Path) -> list[subprocess.Popen[str]]:
    """Start two `rackproof watch` processes, one with JSON and one with lines.

    They write to files, because they would wait if a pipe were full.
    """
    assert attempt.reached("preflight : Check that the host can be measured", 1.0), attempt.lines[-20:]
    command = [sys.executable, str(ROOT / "rackproof"), "watch", str(run)]
    watchers = []
    for name, *options in (("views", "--json", "--every=0.5"), ("lines", "--every=1", "--no-judge", "--no-ask")):
        with (lab.directory / name).open("w") as file:
            watchers.append(lab.popen([*command, *options], stdout=file))
    return watchers


def test_rack_is_accepted_as_a_rehearsal(accepted: Run) -> None:
    assert accepted.code == 0
    report = accepted.report
    assert (report["decision"], report["rehearsal"], report["acceptance"]["status"]) == (
        "accepted",
        True,
        "REHEARSAL PASS",
    )
    assert {host["name"]: host["decision"] for host in report["hosts"]} == dict.fromkeys(HOSTS, "accepted")
    assert report["coverage"]["measured"] == report["coverage"]["expected"] > 200
    assert "FINAL ACCEPTANCE: REHEARSAL PASS" in accepted.output
    for view in ("report.html", "report.md"):
        assert "REHEARSAL" in (accepted.directory / view).read_text()


def test_ranks_of_all_hosts_worked_together(accepted: Run) -> None:
    for host in HOSTS:
        record = documents.read(accepted.directory / "gangs" / "rack1" / f"{host}.json", "record")
        busbw = [
            observation
            for observation in record["observations"]
            if observation["name"] == "collective.all_reduce.busbw"
        ]
        assert {observation["params"]["world_size"] for observation in busbw} == {2}
        assert record["launches"][0]["members"] == list(HOSTS)
        assert [rank["exit_code"] for rank in record["launches"][0]["ranks"]] == [0]


def test_series_of_every_host_in_prometheus_have_the_run_id(prometheus: Prometheus, accepted: Run) -> None:
    series = 'count_over_time(rackproof_host_memory_total_bytes{run_id="first"}[1h])'
    racks = {item["metric"]["host"]: item["metric"]["rack"] for item in prometheus.wait_for(series, at_least=2)}
    assert racks == dict.fromkeys(HOSTS, "rack1")


def test_no_process_remains_after_the_run(site: Site, accepted: Run) -> None:
    ours = ("pgrep", "-af", processes.AGENT)
    assert {host: site.lab.on(host, *ours, check=False).stdout for host in HOSTS} == dict.fromkeys(HOSTS, "")


def test_altered_rehearsal_is_accepted_only_if_the_change_is_allowed(accepted: Run) -> None:
    """Like tests/unit/fleet/judge/test_alterations.py, but the altered records were written by agents."""
    counts, failures = alterations.alter(accepted.directory, 100, seed=1)
    assert not failures, "\n".join(failures[:20])
    assert counts.total() == 100


def test_deleted_record_is_reported_and_the_rest_is_judged(accepted: Run, tmp_path: Path) -> None:
    directory = tmp_path / "first"
    shutil.copytree(accepted.directory, directory)
    (directory / "hosts" / "node2.json").unlink()
    done = subprocess.run(
        [sys.executable, ROOT / "rackproof", "report", directory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    run = Run(directory, done.returncode, done.stdout)
    assert run.findings() == {("node2", "record", "inconclusive")}
    assert run.measured("node1") == accepted.measured("node1")


WEB_CONFIG = "/etc/rackproof/web.config.yml"
PASSWORD = f"canary-{secrets.token_hex(4)}"


FAULT = """
import agent.benchmarks.memory.memory as benchmark

def broken(*arguments):
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

benchmark.OPERATIONS = dict.fromkeys(benchmark.OPERATIONS, broken)
"""
"""Fault: the memory benchmark of one host fails."""


@dataclass(frozen=True)
class FaultyRun(Run):
    """A run with an unreachable host, a failing benchmark, and secrets in the inventory and on the hosts.

    `arguments` are the command lines of the processes that `watch_arguments` saw meanwhile.
    """

    password_hash: str
    arguments: set[str]


@pytest.fixture(scope="module")
def faulty_run(site: Site, accepted: Watched) -> FaultyRun:
    """Play a run with all three hosts: the link of one is cut, and on another the memory benchmark fails."""
    hashed = bcrypt.hashpw(b"canary", bcrypt.gensalt(4)).decode()
    for host in (*HOSTS, UNREACHABLE):
        site.lab.put(host, WEB_CONFIG, f"basic_auth_users:\n  prometheus: {hashed}\n", mode=0o600)
    inject_fault(site.lab, "node2", FAULT)
    site.lab.cut(UNREACHABLE)
    ended, arguments = threading.Event(), set[str]()
    watcher = threading.Thread(target=watch_arguments, args=(ended, arguments))
    watcher.start()
    try:
        hidden = {"ansible_become_password": PASSWORD, "rackproof_exporter_web_config": WEB_CONFIG}
        code, output = site.run("faulty", rackproof_profile=str(site.runs.parent / "small.yml"), **hidden)
    finally:
        ended.set()
        watcher.join()
    print(output[-6000:])
    return FaultyRun(site.runs / "faulty", code, output, password_hash=hashed, arguments=arguments)


def watch_arguments(ended: threading.Event, arguments: set[str]) -> None:
    """Every 0.1 s add the command lines of all processes of this machine and the lab hosts to `arguments`."""
    while not ended.wait(0.1):
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                arguments.add(path.read_bytes().decode(errors="replace"))


def test_no_secret_is_in_a_command_line_log_or_result(site: Site, faulty_run: FaultyRun) -> None:
    """Secrets: password hash in web.config.yml, a password in the inventory, and the nonce that signs messages of the run."""
    assert any("--web-config" in line and WEB_CONFIG in line for line in faulty_run.arguments)
    assert any("agent.benchmarks" in line for line in faulty_run.arguments)
    nonce = json.loads((faulty_run.directory / "plan.json").read_text())["nonce"]
    visible = "\n".join([faulty_run.output, *faulty_run.arguments])
    for secret in (nonce, faulty_run.password_hash, PASSWORD):
        assert secret not in visible
    written = ["grep", "-rlaF", "-e", faulty_run.password_hash, "-e", PASSWORD]
    assert subprocess.run([*written, faulty_run.directory], capture_output=True, check=False).stdout == b""
    directories = ("/var", "/opt/rackproof", "/tmp", "/etc", "/root")
    since = ("-xdev", "-type", "f", "-cnewer", "/etc/hostname")  # since the host booted
    for host in HOSTS:
        matches = site.lab.on(host, "find", *directories, *since, "-exec", *written, "{}", "+", check=False).stdout
        assert matches.split() == [WEB_CONFIG]
        logs = (
            "grep",
            "-rlaF",
            nonce,
            f"{STATE}/runs/faulty/logs",
            f"{STATE}/runs/faulty/work",
            f"{STATE}/exporter",
        )
        assert site.lab.on(host, *logs, check=False).stdout == ""


def test_unreachable_host_is_reported_and_the_others_finish(faulty_run: FaultyRun) -> None:
    assert faulty_run.code != 0
    assert faulty_run.report["decision"] == "incomplete"
    assert {finding for finding in faulty_run.findings() if finding[0] != "node2"} == {
        (UNREACHABLE, "record", "inconclusive")
    }
    lost = next(host for host in faulty_run.report["hosts"] if host["name"] == UNREACHABLE)
    assert any("unreachable at Preflight" in event for event in lost["events"])
    assert [faulty_run.missing(host) for host in HOSTS] == [
        len(PAIR_OBSERVATIONS),
        len(PAIR_OBSERVATIONS) + len(MEMORY),
    ]
    record = json.loads((faulty_run.directory / "gangs" / "rack1" / "node1.json").read_text())
    assert record["launches"][0]["members"] == ["node1", "node2"]


def test_failing_benchmark_is_reported_with_its_host_and_reason(faulty_run: FaultyRun) -> None:
    assert {finding for finding in faulty_run.findings() if finding[0] != UNREACHABLE} == {
        ("node2", "memory.bandwidth", "inconclusive")
    }
    verdicts = faulty_run.report["verdicts"]
    reasons = [item["reason"] for item in verdicts if item["host"] == "node2" and item["verdict"] != "pass"]
    assert reasons == ["error: RuntimeError: CUDA error: uncorrectable ECC error encountered"] * len(MEMORY)


# --- `rackproof watch`, and the progress messages of the playbook


def cells(view: dict[str, Any], stage: str) -> dict[str, dict[str, Any]]:
    """Return host -> its cell of this stage in a view of `rackproof watch --json`."""
    return {host["name"]: host["cells"][stage] for host in view["hosts"]}


def test_watch_shows_running_stages_then_the_decision(accepted: Watched) -> None:
    for stage in ("prepare", "inspect", "benchmark", "gang"):
        states = [{cell["state"] for cell in cells(view, stage).values()} for view in accepted.views]
        assert {"running"} in states, stage
        assert states[-1] == {"done"}, stage
    assert [view["decision"] for view in accepted.views][-1] == "accepted"
    assert not any(view["decision"] for view in accepted.views if view["is_running"])


def test_watch_shows_progress_and_time_left_of_a_stage(accepted: Watched) -> None:
    measured = [
        host for view in accepted.views if view["task"] == "benchmark : Run the benchmarks" for host in view["hosts"]
    ]
    assert BENCHMARKS.keys() & {host["benchmark"] for host in measured}
    remaining = [host["remaining_s"] for host in measured if host["remaining_s"] is not None]
    assert remaining
    assert all(0 < seconds <= 180 for seconds in remaining)
    progress = [host["cells"]["benchmark"]["progress"] for host in measured]
    assert all(share is None or 0 <= share <= 1 for share in progress)
    assert any(share is not None for share in progress)


def test_watch_prints_a_line_for_each_change(accepted: Watched) -> None:
    messages = [line.split(" ", 1)[1] for line in accepted.lines]
    assert "run first: 2 hosts of rack1, profile rehearsal, REHEARSAL" in messages
    for host in HOSTS:  # hosts that change at the same time share a line
        running = [
            position for position, line in enumerate(messages) if host in line and line.endswith(" benchmark: running")
        ]
        assert len(running) == 1
        assert running[0] < messages.index("decision: accepted")
    assert not [line for line in accepted.lines if "\x1b" in line]


def test_playbook_prints_what_it_waits_for(accepted: Watched) -> None:
    assert "benchmark: node1, node2 are measuring, for at most 3 min each" in accepted.output
    assert "benchmark: 0 of 2 hosts done, node1 " in accepted.output
    assert "progress is no longer recorded" not in accepted.output


def test_every_progress_event_is_valid_by_the_schema(accepted: Watched) -> None:
    events = [json.loads(line) for line in (accepted.directory / "progress.jsonl").read_text().splitlines()]
    for event in events:
        documents.validate(event, "progress", source="progress.jsonl")
    assert (events[0]["what"], events[-1]["what"]) == ("start", "end")
    waits = [event["stage"] for event in events if event["what"] == "task" and "stage" in event]
    assert list(dict.fromkeys(waits)) == ["benchmark", "gang"]
    assert [event for event in events if event["what"] == "targets"]
