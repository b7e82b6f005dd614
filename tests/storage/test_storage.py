"""Acceptance runs that measure local and shared storage of lab hosts: healthy file systems are accepted; each fault is named.

The four faults are a slow client, a wrong byte on the server, a hanging mount and a full disk. The shared file system is sshfs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab import processes
from tests.lab.agent_install import install_agent
from tests.lab.kill_points import Site
from tests.lab.lab import Lab

from .file_systems import FLIP, LOCAL, SHARED, freeze, limit, make_disk, mount_shared, thaw

pytestmark = pytest.mark.storage
CLIENTS = ("node1", "node2", "node3", "node4", "node5")
SERVER = "node6"
SLOW, HANGING, FULL = "node2", "node4", "node3"
SHARD = 1 << 20
RATE, SLOW_RATE = "48mbit", "4mbit"
DEADLINE_S = 170.0
PROFILE: dict[str, Any] = {
    "schema": "rackproof.profile/1",
    "summary": "storage only",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "benchmark": {
            "deadline_s": DEADLINE_S, "collective_timeout_s": 30,
            "benchmarks": {"local_storage": {"size_bytes": 32 << 20, "jobs": 2}},
        },
        "gang": {
            "deadline_s": DEADLINE_S, "collective_timeout_s": 30,
            "benchmarks": {
                "shared_storage": {"size_bytes": 16 << 20, "shard_bytes": SHARD, "jobs": 1, "first_clients": 2}
            },
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("storage")
    (directory / "runs").mkdir()
    (directory / "profile.yml").write_text(yaml.safe_dump(PROFILE))
    disks: list[Path] = []
    try:
        with Lab(directory / "lab", hosts=len((*CLIENTS, SERVER))) as lab:
            install_agent(lab, directory / "agent.tar")
            for host in CLIENTS:
                disks.append(make_disk(lab, host, directory))
                mount_shared(lab, host, SERVER)
                limit(lab, host, RATE)
            yield Site(lab=lab, runs=directory / "runs")
    finally:
        for disk in disks:
            processes.run(["umount", "-l", disk], check=False)


def run(site: Site, name: str) -> dict[str, Any]:
    """Make an acceptance run called `name` that measures local and shared storage of the clients; return its report."""
    _, output = site.run(
        name,
        only=CLIENTS,
        rackproof_profile=str(site.runs.parent / "profile.yml"),
        rackproof_gang="all",
        rackproof_local_storage=[LOCAL],
        rackproof_shared_storage=[SHARED],
    )
    assert (site.runs / name / "report.json").exists(), output[-4000:]
    return site.report(name)


def causes(report: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Return host, part, problem and verdict of each cause."""
    return {(item["host"], item["part"], item["problem"], item["verdict"]) for item in report.get("causes", [])}


def test_healthy_file_systems_are_accepted(site: Site) -> None:
    report = run(site, "healthy")
    assert causes(report) == set(), json.dumps(report.get("causes"), indent=1)
    assert report["decision"] == "accepted"


def test_report_names_each_fault_and_nothing_else(site: Site) -> None:
    lab = site.lab
    limit(lab, SLOW, SLOW_RATE)
    lab.on(FULL, "sh", "-c", f"dd if=/dev/zero of={LOCAL}/filler bs=1M 2>/dev/null; test -s {LOCAL}/filler")
    freeze(lab, HANGING)
    lab.start(SERVER, "/usr/bin/python3", "-c", FLIP.format(size=SHARD))
    began = time.monotonic()
    try:
        report = run(site, "faulty")
    finally:
        thaw(lab, HANGING)
        limit(lab, SLOW, RATE)
    shared, local = "directory=mnt:shared", "directory=data"
    by_problem = {(item["problem"], item["part"]): item for item in report.get("causes", [])}
    assert set(by_problem) == {
        ("slow-storage", shared), ("wrong-results", shared), ("not-verified", shared), ("not-verified", local),
    }, json.dumps(report["causes"], indent=1)  # fmt: skip
    assert len(report["causes"]) == len(by_problem)
    assert by_problem["slow-storage", shared]["host"] == SLOW
    assert by_problem["slow-storage", shared]["action"] == "inspect_hardware"
    hanging, full = by_problem["not-verified", shared], by_problem["not-verified", local]
    assert (hanging["host"], full["host"]) == (HANGING, FULL)
    assert "the file system hangs" in hanging["why"]
    assert "space" in full["why"]
    wrong = by_problem["wrong-results", shared]
    assert wrong["host"] not in (SLOW, HANGING)
    assert "1 wrong byte" in wrong["title"]
    assert "shard 0 byte 4321" in wrong["title"]
    assert time.monotonic() - began < 2 * DEADLINE_S
