"""Test that a host that is lost during a gang launch is reported and excluded, and that one launch identifies slow hosts.

SSH, torchrun and gloo are real.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence, judge
from schemas import documents
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import to_json
from schemas.reports import FAIL
from tests import builders
from tests.lab import links, processes
from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
HOSTS = tuple(f"node{number}" for number in range(1, 8))
STATE = "/var/lib/rackproof/runs"
PAIRS = {"pairs": {"size_bytes": 1 << 20, "seconds": 0.2}}
healthy, slow = partial(links.limited, rate="200mbit"), partial(links.limited, rate="10mbit", burst="4kb")
"""Healthy and slow links are limited: on busy processors the rates of unlimited transfers vary tenfold, those of limited ones
little. The burst of the slow link is small, because a burst could otherwise contain a whole exchange."""
lossy = partial(links.lossy, lost=0.15)
"""With a lost share of 0.05, 2 of 30 exchanges of 32 KiB were fast (1.7 and 9.9 MB/s) because TCP recovered quickly; the others
were below 0.1 MB/s. If one of the four pairs of a host is fast, there is too little evidence against the host. With 0.15, none
of 30 exchanges was above 0.14 MB/s."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("gangs") / "lab", hosts=len(HOSTS)) as new_lab:
        yield new_lab


# --- a link that is cut during a gang: the playbooks

LOST = "node1"
"""The head of the gang, on whose messages the others depend."""
PROFILE = {
    "schema": "rackproof.profile/1",
    "summary": "the smallest profile",
    "device": "cpu",
    "processes_per_host": 1,
    "stages": {
        "gang": {
            "deadline_s": 120,
            "collective_timeout_s": 60,
            "benchmarks": {
                "collective": {
                    "ops": ["all_reduce"],
                    "placements": ["in_place"],
                    "sizes_bytes": [8, 65536],
                    "seconds": 1.0,
                },
                **PAIRS,
            },
        },
    },
}


def has_launch(lab: Lab, host: str, run_id: str) -> bool:
    """Return whether the gang record on the host contains a launch."""
    record_path = lab.host_path(host, f"{STATE}/{run_id}/gangs/rack1.json")
    return record_path.exists() and bool(json.loads(record_path.read_text()).get("launches"))


def wait(condition: Callable[[], Any], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)


def play(lab: Lab, directory: Path, run_id: str) -> subprocess.Popen[str]:
    """Start the playbooks of a run on three hosts, with the agent of this environment; the profile has only a gang stage."""
    (directory / "runs").mkdir()
    (directory / "tiny.yml").write_text(yaml.safe_dump(PROFILE))
    group = {
        "rackproof_profile": str(directory / "tiny.yml"),
        "rackproof_rack": "rack1",
        "rackproof_fabric_interface": "eth0",
        "rackproof_prefix": sys.prefix,
        "rackproof_runs_directory": str(directory / "runs"),
        "rackproof_take_over": True,  # the tests share the hosts of the lab
    }
    inventory = yaml.safe_load(lab.inventory(groupvars=group).read_text())
    hosts = inventory["all"]["children"]["gpu_hosts"]["hosts"]
    for name in HOSTS[3:]:
        del hosts[name]
    (directory / "inventory.yml").write_text(yaml.safe_dump(inventory))
    playbooks = [ROOT / "playbooks" / f"{stage}.yml" for stage in ("inspect", "benchmark", "gang")]
    options = ["-i", directory / "inventory.yml", "-e", f"rackproof_run_id={run_id}"]
    with (directory / "playbook.log").open("w") as log:
        command = [Path(sys.executable).parent / "ansible-playbook", *options, *playbooks]
        return lab.popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def test_host_whose_link_is_cut_is_excluded_and_the_others_are_measured(lab: Lab, tmp_path: Path) -> None:
    run_id = "lost"
    playbook, others = play(lab, tmp_path, run_id), [host for host in HOSTS[:3] if host != LOST]

    def measuring() -> bool:
        assert playbook.poll() is None, (tmp_path / "playbook.log").read_text()
        states = lab.host_path(LOST, f"{STATE}/{run_id}/work/gang").glob("rank*.state.json")
        return any('"collective all_reduce' in state.read_text() for state in states)

    wait(measuring, 120)
    time.sleep(1.0)  # by then the heartbeats have reported the collectives as the current phase
    since = time.monotonic()
    lab.cut(LOST)
    try:
        wait(lambda: all(has_launch(lab, host, run_id) for host in others), 120)
        recorded_s = time.monotonic() - since
        playbook.wait(timeout=120)
        lab.run([sys.executable, ROOT / "rackproof", "report", tmp_path / "runs" / run_id], check=False)
        reported_s = time.monotonic() - since
        remaining = {host: agent_processes(lab, host) for host in HOSTS[:3]}
        lost_launches = json.loads(lab.host_path(LOST, f"{STATE}/{run_id}/gangs/rack1.json").read_text())["launches"]
    finally:
        lab.reconnect(LOST)
        print((tmp_path / "playbook.log").read_text()[-4000:])
    print(f"{run_id}: reported in records {recorded_s:.1f} s after the loss, in the report {reported_s:.1f} s after it")
    report = documents.read(tmp_path / "runs" / run_id / "report.json", "report", max_bytes=50_000_000)
    assert {host["name"]: host["decision"] for host in report["hosts"]} == {
        **dict.fromkeys(others, "accepted"),
        LOST: "rejected",
    }
    (fault,) = (item for item in report["verdicts"] if item["verdict"] == "fail")
    assert (fault["host"], fault["name"]) == (LOST, "gang.fault")
    assert fault["reason"].startswith(f"host {LOST}: no messages for 10 s; check its link, host and supervisor")
    relaunched = [("failed", 3), ("finished", 2)]
    assert {host["name"]: launches(host) for host in report["hosts"]} == {**dict.fromkeys(others, relaunched), LOST: []}
    lost = next(host for host in report["hosts"] if host["name"] == LOST)
    assert any(event.startswith("unreachable at Gang: Run the launch") for event in lost["events"])
    assert f"Gang rack1: 2 of 3 hosts were measured together ({', '.join(others)}), without {LOST}" in str(report)
    assert remaining == dict.fromkeys(HOSTS[:3], "")
    (lost_launch,) = lost_launches
    assert lost_launch["reason"].startswith(
        f"host {LOST}: no messages from any other host for 10 s; either its own link"
    )
    next_launch = lab.run([sys.executable, ROOT / "rackproof", "gangs", "--run-dir", tmp_path / "runs" / run_id]).stdout
    assert next_launch.startswith("nothing left to launch"), "a resumed run must not repeat a launch"


def launches(host: dict[str, Any]) -> list[tuple[str, int]]:
    """Return outcome and number of hosts of each gang launch of a host."""
    return [(item["outcome"], len(item["members"])) for item in host.get("launches", ()) if item["stage"] == "gang"]


def agent_processes(lab: Lab, host: str) -> str:
    """Return the command lines of the processes of Rackproof on a host."""
    return lab.on(host, "pgrep", "-af", processes.AGENT, check=False).stdout


# --- slow links: one launch of the gang stage


def plan_of(lab: Lab, run_id: str, hosts: Sequence[str]) -> Plan:
    """Return the plan of one gang of these hosts, with one rank each and only the benchmark `pairs`."""
    plan = builders.plan(*hosts, profile="rehearsal")
    stage = replace(plan.stage("gang"), benchmarks=PAIRS, deadline_s=120.0, collective_timeout_s=60.0)
    planned = tuple(
        replace(host, address=lab.host(host.name).address, gang="rack1", devices=(0,)) for host in plan.hosts
    )
    return replace(plan, run_id=run_id, stages=(stage,), hosts=planned)


def launch(lab: Lab, plan: Plan) -> dict[str, Evidence]:
    """Run one launch on all hosts over SSH. Return host -> its evidence."""
    directory, members = f"{STATE}/{plan.run_id}", ",".join(host.name for host in plan.hosts)
    document = json.dumps(to_json(plan))

    def rackproof(host: str, verb: str, *arguments: str) -> None:
        command = f"{sys.executable} -m rackproof {verb} --run-dir {directory} --host {host} {' '.join(arguments)}"
        lab.ssh(host, "sh", "-c", f"cd {ROOT} && {command}", timeout=120)

    def take_part(host: str) -> None:
        lab.put(host, "/root/plan.json", document)
        rackproof(host, "inspect", "--plan", "/root/plan.json", "--take-over")
        rackproof(host, "launch", "--members", members, "--interface", "eth0")

    names = [host.name for host in plan.hosts]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(take_part, names))
    return {name: evidence(lab, directory, name) for name in names}


def evidence(lab: Lab, directory: str, host: str) -> Evidence:
    texts = [lab.on(host, "cat", f"{directory}/{path}").stdout for path in ("record.json", "gangs/rack1.json")]
    return Evidence(records=tuple(record_from_json(documents.parse(text, source=host)) for text in texts))


FAULTS: dict[str, links.Fault] = {"node1": links.delayed, "node2": slow, "node3": lossy}


def test_one_launch_identifies_the_slow_hosts(lab: Lab) -> None:
    plan = plan_of(lab, "slow", HOSTS)
    began = time.monotonic()
    with ExitStack() as stack:
        for host in HOSTS:
            stack.enter_context(FAULTS.get(host, healthy)(lab, host))
        by_host = launch(lab, plan)
    verdicts = [item for item in judge(plan, by_host, read_packs(())) if item.criterion == "localise"]
    print(f"{plan.run_id}: {time.monotonic() - began:.1f} s")
    for item in verdicts:
        print(f"  {item.host} {item.verdict}: {item.reason}")
    assert [launch.outcome for item in by_host.values() for launch in item.launches()] == ["finished"] * len(HOSTS)
    reasons = {item.host: item.reason for item in verdicts if item.verdict == FAIL}
    assert reasons.keys() >= FAULTS.keys()
    # A healthy host may be reported too, because on busy processors its small messages can be late. But its bandwidth does not
    # drop as far as that of a slow host.
    assert {host for host, reason in reasons.items() if ": bandwidth of" in reason} <= FAULTS.keys()
