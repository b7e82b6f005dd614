"""Test a burn-in of three lab hosts over real SSH: kill the playbook, then the supervisor of a host, then resume the run.

A burn-in soaks every host: it repeats benchmarks in rounds for the planned time. The supervisor is the process `rackproof soak`
on the host, which starts the rounds. The disk of node3 returns wrong data, so node3 ends its soak early; the other two hosts
continue. The rounds do not import torch, because each import takes a second of CPU time.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas import documents
from tests.lab.agent_install import install_agent
from tests.lab.fault_injection import IDLE_WITHOUT_TORCH, inject_fault
from tests.lab.kill_points import DIRECTORY, STATE, Site
from tests.lab.lab import Lab

HOSTS = ("node1", "node2", "node3")
KILLED, FAULTY = "node2", "node3"
SOAK_S = 20
"""Duration of the soak in seconds. It must be long enough for a second round, even on two busy processors: the fixture `burnin`
kills a supervisor in a round after the first one."""
PROFILE = {
    "schema": "rackproof.profile/1",
    "summary": "a soak of short rounds",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "soak": {
            "duration_s": 600,
            "deadline_s": 90,
            "collective_timeout_s": 30,
            "benchmarks": {
                "local_storage": {"ops": ["read"], "seconds": 4.0, "size_bytes": 1048576, "jobs": 1},
            },
        }
    },
}
RESULT = {
    "total_ios": 8,
    "bw_bytes": 1e9,
    "iops": 1e3,
    "io_bytes": 1 << 20,
    "clat_ns": {"percentile": {"50.000000": 1e5, "99.000000": 2e5, "99.900000": 3e5}},
}
WRONG_BLOCK = "verify: bad magic header 0, wanted acca at file data offset 4096, length 4096"
FIO = """#!/bin/sh
case $* in
*--rw=*) ;;
*) echo libaio; exit ;;
esac
case $* in
*--verify_fatal=1*) {compare} ;;
esac
echo '{figures}'
"""
"""A fake fio, which prints invented figures. It runs `compare` when it compares what it reads with what was written."""


def fio(compare: str) -> str:
    """Return the fake fio as a shell script."""
    return FIO.format(compare=compare, figures=json.dumps({"jobs": [{"error": 0, "read": RESULT, "write": RESULT}]}))


@dataclass(frozen=True)
class Burnin:
    """A burn-in that was resumed after its playbook and the supervisor of one host were killed."""

    site: Site
    code: int
    output: str
    before: dict[str, Any]
    """The record of host KILLED, read after its first round and before its supervisor was killed."""

    def soak(self, host: str) -> dict[str, Any]:
        """Return the progress of the soak of a host, from its record on the control node."""
        return dict(self.record(host)["soak"])

    def record(self, host: str) -> dict[str, Any]:
        """Return the record of a host from the control node, checked against its schema."""
        return dict(documents.read(self.site.runs / "burn" / "hosts" / f"{host}.json", "record"))


def record_of(site: Site, host: str) -> dict[str, Any]:
    """Return the record of a host from the host itself."""
    return dict(json.loads(site.lab.host_path(host, f"{STATE}/runs/burn/record.json").read_text()))


def wait_for_round(site: Site, host: str, count: int) -> dict[str, Any]:
    """Wait until the record on the host has at least `count` finished rounds, and return the record."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        record = record_of(site, host)
        if record.get("soak", {}).get("finished", 0) >= count:
            return record
        time.sleep(0.2)
    raise AssertionError(f"{host} did not finish {count} rounds")


@pytest.fixture(scope="module")
def burnin(tmp_path_factory: pytest.TempPathFactory, agent_archive: Path) -> Iterator[Burnin]:
    """Start the burn-in, kill the playbook during the first round, kill a supervisor during a later round, and resume the run."""
    directory = tmp_path_factory.mktemp("burnin")
    (directory / "runs").mkdir()
    profile = directory / "soak.yml"
    profile.write_text(yaml.safe_dump(PROFILE))
    variables: dict[str, Any] = {"rackproof_soak_profile": str(profile), "rackproof_soak_duration": f"{SOAK_S}s"}
    # The tag `install` is skipped: install_agent installs the agent. The tag `configure` is skipped: it would start the exporter.
    variables["tags"] = "run,report"
    with Lab(directory / "lab", hosts=len(HOSTS)) as lab:
        install_agent(lab, agent_archive)
        site = Site(lab=lab, runs=directory / "runs")
        attempt = site.start("burn", "burnin", **variables)
        assert attempt.reached("inspect : Take a snapshot and start the record"), attempt.lines[-30:]
        for host in HOSTS:
            inject_fault(site.lab, host, IDLE_WITHOUT_TORCH)
            compare = f"echo '{WRONG_BLOCK}' >&2; exit 84" if host == FAULTY else ":"
            site.lab.put(host, "/usr/local/bin/fio", fio(compare), 0o755)
        assert attempt.reached("soak : Soak until the next poll", random.uniform(1, 4)), attempt.lines[-30:]  # noqa: S311
        attempt.kill()
        before = wait_for_round(site, KILLED, 1)
        run = f"{STATE}/runs/burn"
        in_a_round = f"grep -qs local_storage {run}/work/soak/rank0.state.json && ! grep -qsx 1 {run}/work/soak.round"
        kill = f"kill -9 $(cut -d' ' -f1 {run}/soak.pid)"
        site.lab.on(KILLED, "sh", "-c", f"until {in_a_round}; do sleep 0.2; done; {kill}")
        code, output = site.run("burn", "burnin", **variables)
        print(output[-5000:])
        yield Burnin(site, code, output, before)


def test_killing_the_playbook_does_not_interrupt_the_soak(burnin: Burnin) -> None:
    soak = burnin.soak("node1")
    assert soak["soaked_s"] >= SOAK_S
    assert (soak["ended_by"], soak.get("cut", 0), soak.get("failed", 0)) == ("time", 0, 0)
    assert soak["finished"] >= 2


def test_killed_supervisor_loses_only_the_current_round(burnin: Burnin) -> None:
    soak, before = burnin.soak(KILLED), burnin.before["soak"]
    assert (soak["began"], soak["ended_by"]) == (before["began"], "time")
    assert soak["soaked_s"] >= SOAK_S
    assert soak["finished"] >= before["finished"]
    assert (soak["cut"], soak.get("failed", 0)) == (1, 0)
    first = burnin.before["launches"][0]
    assert burnin.record(KILLED)["launches"][0]["began"] == first["began"]
    samples = {series["name"]: sum(series["n"]) for series in soak["timeline"]["series"]}
    assert samples["local_storage.bandwidth"] >= soak["finished"]
    assert [event["name"] for event in soak["timeline"]["events"] if event["scope"] == "host"] == ["soak.cut"]


def test_host_with_a_finding_ends_its_soak_early_and_the_others_continue(burnin: Burnin) -> None:
    soak = burnin.soak(FAULTY)
    assert (soak["ended_by"], soak["finished"]) == ("finding", 1)
    assert (
        soak["reason"] == f"directory={DIRECTORY[1:]} local_storage.wrong_blocks: found 1, wanted = 0; inspect hardware"
    )
    report = burnin.site.report("burn")
    assert {host["name"]: host["decision"] for host in report["hosts"]} == {
        "node1": "accepted",
        "node2": "accepted",
        "node3": "rejected",
    }
    assert burnin.code == 2  # the report task fails because a host is rejected
    lines = report["acceptance"]["summary"]
    assert any(line.startswith(f"Soak: 2 of 3 hosts soaked {SOAK_S} s; the shortest soak was ") for line in lines), (
        lines
    )
    failures = [line for line in lines if line.startswith("FAIL: ") and "node3" in line]
    assert any("returns other data than were written: 1 wrong block" in line for line in failures), lines


def test_report_shows_the_soak(burnin: Burnin) -> None:
    page = (burnin.site.runs / "burn" / "report.html").read_text()
    assert 'id="soak"' in page
    assert "the supervisor ended during the round" in page
    assert "## Soak" in (burnin.site.runs / "burn" / "report.md").read_text()


def test_finished_soak_is_not_repeated_and_leaves_no_process(burnin: Burnin) -> None:
    run = f"{STATE}/runs/burn"
    again = burnin.site.lab.on("node1", "/opt/rackproof/bin/rackproof", "soak", f"--run-dir={run}", "--host=node1")
    assert again.stdout.startswith(f"soak: ended after {round(burnin.soak('node1')['soaked_s'])} s of {SOAK_S} s, ")
    assert again.stdout.strip().endswith("it is not measured again")
    for host in HOSTS:
        remaining = burnin.site.lab.on(host, "pgrep", "-af", "agent.benchmarks|rackproof soak", check=False).stdout
        assert remaining == "", host
    assert burnin.site.left_over("burn") == []
