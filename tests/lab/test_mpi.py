"""Test mpirun (Open MPI) on two hosts, as an unprivileged user and over SSH on port 2222.

A launch with mpirun must give the same `comparable_results` as the same launch with torchrun.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.judge import Evidence, judge
from schemas import documents, frames
from schemas.decode import record_from_json
from schemas.plans import Plan
from schemas.records import to_json
from tests import builders
from tests.lab.hosts import CHECKOUT
from tests.lab.lab import Lab

HOSTS = ("node1", "node2")
DEVICES = {"node1": (0, 1), "node2": (0,)}
USER, UID, HOME = "mpiuser", "10001", "/home/mpiuser"
COLLECTIVE = {"ops": ["all_reduce"], "placements": ["in_place"], "sizes_bytes": [8, 65536], "seconds": 0.05}
SSH = f"""Host *
  Port 2222
  User {USER}
  IdentityFile {HOME}/.ssh/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
RACKPROOF = [sys.executable, "-m", "rackproof"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if shutil.which("mpirun") is None:
        pytest.fail("mpirun is not installed: apt-get install openmpi-bin")
    with Lab(tmp_path_factory.mktemp("mpi") / "lab", hosts=len(HOSTS)) as new_lab:
        for host in HOSTS:
            _create_user(new_lab, host)
        yield new_lab


def _create_user(lab: Lab, host: str) -> None:
    """Create an unprivileged user with an SSH key for all hosts, and give the user access to the checkout and this Python."""
    lab.on(
        host,
        "sh",
        "-c",
        f"echo {USER}:*:{UID}:{UID}::{HOME}:/bin/sh >>/etc/passwd && echo {USER}:*:::::: >>/etc/shadow",
    )
    lab.put(host, f"{HOME}/.ssh/key", lab.key.read_text(), 0o600)
    lab.put(host, f"{HOME}/.ssh/authorized_keys", lab.key.with_suffix(".pub").read_text(), 0o600)
    lab.put(host, f"{HOME}/.ssh/config", SSH, 0o600)
    lab.on(host, "chown", "-R", f"{UID}:{UID}", HOME)
    above = {*CHECKOUT.parents, *Path(sys.prefix).parents, *Path(sys.base_prefix).parents}
    lab.on(host, "chmod", "a+x", *sorted(above))


def plan_of(lab: Lab, run_id: str) -> Plan:
    """Return a plan for one gang (the hosts of one multi-node launch) of both hosts. Its three ranks measure only all_reduce."""
    plan = builders.plan(*HOSTS, profile="rehearsal")
    stage = replace(
        plan.stage("gang"), benchmarks={"collective": COLLECTIVE}, deadline_s=90.0, collective_timeout_s=60.0
    )
    hosts = tuple(
        replace(host, address=lab.host(host.name).address, gang="rack1", devices=DEVICES[host.name])
        for host in plan.hosts
    )
    expected = tuple(
        item for item in plan.expected if item.stage == "gang" and item.name.startswith("collective.all_reduce")
    )
    expected = tuple(item for item in expected if item.params.get("size_bytes", 8) in COLLECTIVE["sizes_bytes"])
    return replace(plan, run_id=run_id, stages=(stage,), hosts=hosts, expected=expected)


def as_user(lab: Lab, host: str, *command: str, check: bool = True) -> Any:
    """Run a command on a host as the unprivileged user, in the checkout."""
    who = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "env", f"HOME={HOME}", f"USER={USER}"]
    return lab.on(host, *who, *command, cwd=CHECKOUT, check=check, timeout=150)


def mpirun(lab: Lab, *arguments: str, check: bool = True) -> Any:
    """Run mpirun on node1 for both hosts, with two slots each."""
    network = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
    hosts = ",".join(f"{host}:2" for host in HOSTS)
    return as_user(lab, "node1", "mpirun", "--host", hosts, *network, *arguments, check=check)


def evidence(lab: Lab, run_id: str) -> dict[str, Evidence]:
    by_host = {}
    for host in HOSTS:
        texts = [
            lab.on(host, "cat", f"{HOME}/runs/{run_id}/{path}").stdout for path in ("record.json", "gangs/rack1.json")
        ]
        by_host[host] = Evidence(records=tuple(record_from_json(documents.parse(text, source=host)) for text in texts))
    return by_host


def comparable_results(lab: Lab, plan: Plan) -> Any:
    """Return what must not depend on the launcher: parts of the verdicts, observations, launches and snapshots.

    Measured values and reasons are not included.
    """
    by_host = evidence(lab, plan.run_id)
    gang = {host: item.records[1] for host, item in by_host.items()}
    return {
        "observations": {
            (
                host,
                observation.name,
                observation.scope,
                observation.stage,
                observation.status,
                observation.unit,
                json.dumps(dict(observation.params), sort_keys=True),
            )
            for host, record in gang.items()
            for observation in record.observations
        },
        "launches": {
            host: [(launch.outcome, launch.members, len(launch.ranks)) for launch in record.launches]
            for host, record in gang.items()
        },
        "snapshots": {
            host: {
                (snapshot.stage, snapshot.phase)
                for record in by_host[host].records
                for snapshot in record.snapshots
                if snapshot.phase != "during"  # the first one is taken after 2 s, and the launch may end before
            }
            for host in HOSTS
        },
        "verdicts": {
            (
                item.host,
                item.scope,
                item.name,
                item.criterion,
                item.verdict,
                json.dumps(dict(item.params), sort_keys=True),
            )
            for item in judge(plan, by_host, read_packs(()))
            if item.stage == "gang" or item.name.startswith("collective")
        },
    }


@pytest.fixture(scope="module")
def by_torchrun(lab: Lab) -> Any:
    """Run the launch with torchrun, which `rackproof launch` starts on each host. Return the `comparable_results`."""
    plan = plan_of(lab, "torchrun")

    def launch(host: str) -> None:
        lab.put(host, f"{HOME}/torchrun.json", json.dumps(to_json(plan)))
        options = ["--plan", f"{HOME}/torchrun.json", "--run-dir", f"{HOME}/runs/torchrun", "--interface", "eth0"]
        as_user(lab, host, *RACKPROOF, "launch", *options)

    with ThreadPoolExecutor(len(HOSTS)) as pool:
        list(pool.map(launch, HOSTS))
    return comparable_results(lab, plan)


def test_mpirun_uses_ssh_port_2222_as_an_unprivileged_user(lab: Lab) -> None:
    done = mpirun(lab, "--map-by", "ppr:1:node", "sh", "-c", "echo $(hostname) $(id -u) ${SSH_CONNECTION##* }").stdout
    assert sorted(line.strip() for line in done.splitlines()) == ["node1 10001", "node2 10001 2222"]


@pytest.mark.parametrize(
    "processes", [["--map-by", "ppr:1:node"], ["-np", "3"]], ids=["process-per-host", "process-per-rank"]
)
def test_records_of_mpirun_equal_those_of_torchrun(lab: Lab, by_torchrun: Any, processes: list[str]) -> None:
    plan = plan_of(lab, "mpi" + processes[-1].replace(":", "-"))
    for host in HOSTS:
        lab.put(host, f"{HOME}/plan.json", json.dumps(to_json(plan)))
    options = [
        "--plan",
        f"{HOME}/plan.json",
        "--run-dir",
        f"{HOME}/runs/{plan.run_id}",
        "--interface",
        "eth0",
        "--ethernet",
    ]
    done = mpirun(lab, *processes, *RACKPROOF, "launch", "--launcher", "mpi", *options)
    print(done.stdout, done.stderr)
    results = comparable_results(lab, plan)
    assert results["launches"] == {host: [("finished", HOSTS, len(DEVICES[host]))] for host in HOSTS}
    assert results == by_torchrun
    assert len(results["observations"]) > 4
    assert results["verdicts"]


def test_mpirun_on_fewer_hosts_than_planned_is_rejected_before_a_stage_starts(lab: Lab) -> None:
    plan = plan_of(lab, "refused")
    lab.put("node1", f"{HOME}/plan.json", json.dumps(to_json(plan)))
    options = ["--plan", f"{HOME}/plan.json", "--run-dir", f"{HOME}/runs/refused"]
    done = as_user(lab, "node1", "mpirun", "-np", "1", *RACKPROOF, "launch", "--launcher", "mpi", *options, check=False)
    assert done.returncode == 64
    assert "mpirun started 1 processes, 1 on this host; the plan has 2 hosts with 3 cpu devices" in done.stderr
    assert lab.on("node1", "ls", f"{HOME}/runs/refused/work", check=False).returncode != 0


def test_launcher_of_an_mpijob_prints_the_records_of_all_hosts_unmixed(lab: Lab) -> None:
    """node1 is the launcher and also a host."""
    plan = plan_of(lab, "mpijob")
    script = f'#!/bin/sh\ncd {CHECKOUT} && exec {sys.executable} -m rackproof "$@"\n'
    for host in HOSTS:
        lab.put(host, "/usr/local/bin/rackproof", script, 0o755)
        lab.put(host, "/etc/rackproof/plan.json", json.dumps(to_json(plan)))
        lab.on(host, "install", "-d", "-o", UID, "/var/lib/rackproof")
    lab.put("node1", "/etc/mpi/hostfile", "# hosts\n" + "".join(f"{host} slots=1\n" for host in HOSTS))
    network = ["OMPI_MCA_btl=tcp,self", "OMPI_MCA_btl_tcp_if_include=eth0", "OMPI_MCA_oob_tcp_if_include=eth0"]
    hostfile = "OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile"
    launcher = [
        CHECKOUT / "deploy/container/run-hosts.sh",
        "/etc/rackproof/plan.json",
        "--interface=eth0",
        "--ethernet",
    ]
    done = as_user(lab, "node1", "env", hostfile, *network, *map(str, launcher), check=False)
    records, problems = frames.read(done.stdout.splitlines(), source="log")
    assert (done.returncode, problems) == (0, []), done.stderr
    assert [(item.host, item.gang) for item in records] == [(host, gang) for host in HOSTS for gang in ("", "rack1")]
    launches = [record_from_json(json.loads(item.text), source="log").launches for item in records if item.gang]
    assert [launch.outcome for (launch,) in launches] == ["finished", "finished"]


def test_ranks_started_by_mpirun_find_each_other(lab: Lab) -> None:
    """mpirun starts one process per rank, without a supervisor or a plan."""
    ranks = ["-x", "MASTER_ADDR=10.77.0.11", "-x", "GLOO_SOCKET_IFNAME=eth0", "-np", "3"]
    done = mpirun(lab, *ranks, sys.executable, "-m", "agent.benchmarks", "--only", "overlap")
    shares = [line for line in done.stdout.splitlines() if "overlap.hidden_share" in line]
    assert len(shares) == len(HOSTS), "each host must print overlap.hidden_share"
    assert all("world_size=3" in line for line in shares)
