"""Test that one launch of a gang (the hosts of one multi-host launch) identifies hosts with slow links.

SSH, torchrun and gloo are real.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence, judge
from schemas import documents
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import to_json
from schemas.reports import FAIL
from tests import builders
from tests.lab import links
from tests.lab.lab import Lab

ROOT = Path(__file__).parents[2]
HOSTS = tuple(f"node{number}" for number in range(1, 8))
STATE = "/var/lib/rackproof/runs"
PAIRS = {"pairs": {"size_bytes": 1 << 20, "seconds": 0.2}}
healthy, slow = partial(links.limited, rate="200mbit"), partial(links.limited, rate="10mbit", burst="4kb")
"""Healthy and slow links both have a rate limit. Without a limit, the rates of transfers vary tenfold on busy processors; with
a limit they vary little. The slow link has a small burst, because the rate limit does not apply to a burst. The benchmark `pairs`
measures the bandwidth with exchanges of at least 32 KiB. With a larger burst, a whole exchange could be fast."""
lossy = partial(links.lossy, lost=0.15)
"""The lossy link loses one frame per 10 kB. In a measurement, none of 30 exchanges of 32 KiB was faster than 0.14 MB/s. With
`lost=0.05` (one frame per 30 kB), two of 30 exchanges were fast (1.7 and 9.9 MB/s) because TCP recovered quickly; all others were
slower than 0.1 MB/s. Four of the seven hosts are healthy, so each faulty host has four pairs with a healthy host. If one of these
pairs is fast, there is too little evidence against the faulty host."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("gangs") / "lab", hosts=len(HOSTS)) as new_lab:
        yield new_lab


def plan_of(lab: Lab, run_id: str, hosts: Sequence[str]) -> Plan:
    """Return the plan of one gang of these hosts, with one rank each and only the benchmark `pairs`."""
    plan = builders.plan(*hosts, profile="rehearsal")
    stage = replace(plan.stage("gang"), benchmarks=PAIRS, deadline_s=120.0, collective_timeout_s=60.0)
    planned = tuple(
        replace(host, address=lab.host(host.name).address, gang="rack1", devices=(0,)) for host in plan.hosts
    )
    return replace(plan, run_id=run_id, stages=(stage,), hosts=planned)


def launch(lab: Lab, plan: Plan) -> dict[str, Evidence]:
    """Run one launch on all hosts over SSH. Return host -> its evidence (the records that the host wrote)."""
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
    # A healthy host may fail because of its latency, since its small messages can be late on busy processors. But only hosts in
    # FAULTS may fail because of their bandwidth.
    assert {host for host, reason in reasons.items() if ": bandwidth of" in reason} <= FAULTS.keys()
