"""Test the acceptance playbook over real SSH, with torchrun across hosts, a real Prometheus and `rackproof watch`."""

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
        """Return (host, name of the observation, verdict) for each verdict that is not a pass."""
        verdicts = self.report["verdicts"]
        return {(item["host"], item["name"], item["verdict"]) for item in verdicts if item["verdict"] != "pass"}

    def measured(self, host: str) -> int:
        """Return the number of measured observations of a host."""
        (summary,) = (item for item in self.report["hosts"] if item["name"] == host)
        return int(summary["coverage"]["measured"])


def rehearsal_profile() -> dict[str, Any]:
    """Return the rehearsal profile with one rank per host.

    `rackproof watch` reads the progress of a stage from a page that the exporter caches for FRESH_S. The stress test lasts as
    long, so even a page that was cached just before the benchmark stage is replaced during the stage. The training uses synthetic
    images even if this machine has Fashion-MNIST, because evaluation on Fashion-MNIST takes five times as long.
    """
    profile: dict[str, Any] = yaml.safe_load((PROFILES / "rehearsal.yml").read_text())
    profile["processes_per_host"] = 1
    profile["stages"]["benchmark"]["benchmarks"]["stress"]["seconds"] = FRESH_S
    for training in ("training", "fashion_mnist"):
        profile["stages"]["gang"]["benchmarks"][training]["data_directories"] = []
    return profile


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, agent_archive: Path) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    (directory / "runs").mkdir()
    (directory / "rehearsal.yml").write_text(yaml.safe_dump(rehearsal_profile()))
    with Lab(directory / "lab", hosts=len(HOSTS)) as lab:
        install_agent(lab, agent_archive)
        yield Site(lab=lab, runs=directory / "runs")


@pytest.fixture(scope="module")
def prometheus(site: Site) -> Prometheus:
    return site.lab.prometheus(site.runs / "prometheus" / "*.json", scrape_interval="5s")


@dataclass(frozen=True)
class Watched(Run):
    """A run that `rackproof watch` followed from the preflight on."""

    views: list[dict[str, Any]]
    """Output of `rackproof watch --json`."""
    lines: list[str]
    """Output of `rackproof watch` without `--json`."""
    arguments: set[str]
    """Command lines of all processes during the run."""


@pytest.fixture(scope="module")
def accepted(site: Site, prometheus: Prometheus) -> Watched:
    """Run the complete rehearsal while two `rackproof watch` processes follow it."""
    with processes.sample_command_lines() as arguments, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACKPROOF_HEARTBEAT", "2")
        attempt = site.start(
            "first",
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
    return Watched(site.runs / "first", attempt.process.returncode, output, documents_, lines, arguments)


def watch(attempt: Attempt, lab: Lab, run: Path) -> list[subprocess.Popen[str]]:
    """Start two `rackproof watch` processes, one that prints JSON and one that prints lines of text.

    They write to files, because a full pipe would block them.
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


def test_collectives_span_the_ranks_of_all_hosts(accepted: Run) -> None:
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
    pgrep = ("pgrep", "-af", processes.AGENT)
    assert {host: site.lab.on(host, *pgrep, check=False).stdout for host in HOSTS} == dict.fromkeys(HOSTS, "")


def test_run_does_not_leak_its_nonce(site: Site, accepted: Watched) -> None:
    nonce = json.loads((accepted.directory / "plan.json").read_text())["nonce"]
    assert any("agent.benchmarks.rendezvous" in line for line in accepted.arguments)
    assert nonce not in "\n".join([accepted.output, *accepted.arguments])
    run = f"{STATE}/runs/first"
    for host in HOSTS:
        logs = ("grep", "-rlaF", nonce, f"{run}/logs", f"{run}/work", f"{STATE}/exporter")
        assert site.lab.on(host, *logs, check=False).stdout == ""


def test_altered_rehearsal_is_accepted_only_if_the_change_is_allowed(accepted: Run) -> None:
    """Like tests/unit/fleet/judge/test_alterations.py, but with records of a real run."""
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


def test_every_progress_event_conforms_to_the_schema(accepted: Watched) -> None:
    events = [json.loads(line) for line in (accepted.directory / "progress.jsonl").read_text().splitlines()]
    for event in events:
        documents.validate(event, "progress", source="progress.jsonl")
    assert (events[0]["what"], events[-1]["what"]) == ("start", "end")
    waits = [event["stage"] for event in events if event["what"] == "task" and "stage" in event]
    assert list(dict.fromkeys(waits)) == ["benchmark", "gang"]
    assert [event for event in events if event["what"] == "targets"]
