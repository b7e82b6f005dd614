"""Acceptance runs of virtual machines with Soft-RoCE, perftest, lldpd and Linux bridges: a report names only the injected fault.

Each test is a complete run: a plan, `rackproof run-host` on every machine, and the report. The run is a rehearsal (a run without
GPUs). A rehearsal judges RDMA ports and cables only if the inventory sets `rackproof_verbs_required`, so the inventory of these
tests sets it. The stages have only the benchmark `verbs`, which does not import torch: the import takes a minute on an emulated
processor.

The shipped criteria apply, except those in REPLACED. The criterion `verbs-best-partner` limits a ratio: the highest bandwidth
that a port reaches with any other host, divided by the rate that the port reports. Soft-RoCE reports 2.5 Gb/s for every port,
whatever rate tc sets. So this criterion is replaced by one that requires 60 % of the rate that tc sets. tc does not limit a
transfer from a port to itself, so its bandwidth depends on the emulated processor only. The criteria for such transfers are
replaced by criteria with a lower limit of 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from .machines import LIMIT_RATE, PORT_KBITS, ROOT, Machines, machines

pytestmark = pytest.mark.rdma
HOSTS, RAILS = ("h1", "h2", "h3"), 2
BENCHMARK, GANG = "benchmark", "gang"
VERBS = {
    "figures": ["bandwidth"],
    "directions": ["one_way"],
    "sharings": ["together"],
    "size_bytes": 8448,
    "seconds": 8,
}
"""`size_bytes` is above 8 KiB, because perftest counts smaller messages only in steps of 100, too coarse for these slow ports."""
STAGE = {"deadline_s": 600, "collective_timeout_s": 120, "benchmarks": {"verbs": VERBS}}
LIMIT_S, LLDP_S, ATTEMPTS = 1500.0, 60, 3
"""LIMIT_S: seconds within which the machines must finish their commands. LLDP_S: seconds within which lldpd must show a new
neighbour. ATTEMPTS: maximum number of runs in one test (see NOT_CALIBRATED)."""
NOT_CALIBRATED = "verbs.bandwidth is 0"
"""If the reason of a verdict contains this text, the run is repeated. perftest reports a bandwidth of 0 if it could not calibrate
the cycle counter (see clock.c)."""
STATED_RATE, SET_RATE = 2.5e9, PORT_KBITS * 1e3
"""Rate of each port in bit/s: as Soft-RoCE reports it, and as tc sets it."""
REPLACED = (
    ("verbs-port-rate", "verbs.rate_ratio", BENCHMARK, "1", 0.0),
    ("verbs-port-rate-any", "verbs.rate_ratio", BENCHMARK, "1", 0.0),
    ("verbs-port-fleet", "verbs.bandwidth", BENCHMARK, "B/s", 0.0),
    ("verbs-best-partner", "verbs.best_ratio", GANG, "1", 0.6 * SET_RATE / STATED_RATE),
)
"""Id of a shipped criterion; then observation, stage, unit and lower limit of the criterion that replaces it."""
RACKPROOF = Path(sys.executable).parent / "rackproof"
RUN_HOST = (
    f"{RACKPROOF} run-host --plan {{run}}/plan.json --host $(hostname) --results {{run}} --quiet"
    " >{run}.$(hostname).log 2>&1"
)
LEAVES = ("leaf0", "leaf1")
Findings = set[tuple[str, str, str, str]]
"""Host, scope, problem and cable of each part in the causes of a report; the cable is empty if the report names none."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(HOSTS, RAILS, tmp_path_factory.mktemp("rdma")) as running:
        yield running


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    criteria = [
        {"id": f"{criterion}-lab", "replaces": criterion, "name": name, "scope": "port", "stage": stage, "unit": unit,
         "operator": "ge", "value": value, "action": "none", "optional": True, "basis": "policy", "source": "tests/rdma"}
        for criterion, name, stage, unit, value in REPLACED
    ]  # fmt: skip
    document = {"schema": "rackproof.criteria/1", "summary": "Limits for the rate that tc sets", "criteria": criteria}
    path = tmp_path_factory.mktemp("packs") / "soft-roce.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def accept(lab: Machines, pack: Path, directory: Path, *stages: str, manifest: Path | None = None) -> dict[str, Any]:
    """Run `stages` on the machines, and return the report of the last run.

    The run is repeated if perftest could not calibrate the cycle counter. There are at most ATTEMPTS runs.
    """
    inventory, profile = directory / "hosts.yml", directory / "verbs.yml"
    variables = {"rackproof_infiniband_ports": RAILS, "rackproof_verbs_required": True, "rackproof_gang": "all"}
    variables |= {"rackproof_manifest": str(manifest)} if manifest else {}
    hosts = {host: {"ansible_host": address, **variables} for host, address in lab.addresses.items()}
    inventory.write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": {"hosts": hosts}}}}))
    document = {"schema": "rackproof.profile/1", "summary": "RDMA ports", "device": "cpu", "processes_per_host": 1}
    profile.write_text(yaml.safe_dump({**document, "stages": dict.fromkeys(stages, STAGE)}))
    for number in range(ATTEMPTS):
        run = f"{directory.name}-{number}"
        call("plan", "-i", inventory, "--profile", profile, "--run-dir", lab.shared / run)
        lab.run(LIMIT_S, all=RUN_HOST.format(run=f"/mnt/{run}"))
        for log in sorted(lab.shared.glob(f"{run}.*.log")):
            print(log.read_text())
        print(call("report", lab.shared / run, "--criteria", pack))
        report: dict[str, Any] = json.loads((lab.shared / run / "report.json").read_text())
        if not any(NOT_CALIBRATED in verdict["reason"] for verdict in report["verdicts"]):
            break
    return report


def call(*arguments: str | Path) -> str:
    done = subprocess.run([RACKPROOF, *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode in (0, 1, 2), done.stderr
    return done.stdout + done.stderr


def findings(report: Mapping[str, Any]) -> Findings:
    for cause in report.get("causes", []):
        print(cause["verdict"], cause["problem"], cause["title"], "|", cause["why"])
        for position in cause["verdicts"]:
            verdict = report["verdicts"][position]
            print("   ", *(verdict[key] for key in ("host", "scope", "criterion", "reason")))
    return {
        (part["host"], part["scope"], cause["problem"], part.get("cable", ""))
        for cause in report.get("causes", [])
        for part in cause["parts"]
    }


def await_switches(lab: Machines, **leaves: Sequence[str]) -> None:
    """Wait until lldpd of every host shows the expected switch at each port.

    `leaves` maps a host to the switches at its ports eth1, eth2 …; "" means that lldpd must show no neighbour at the port. For a
    host that is not in `leaves`, the switches are LEAVES.
    """
    commands = {}
    for host in HOSTS:
        wanted = [
            f"lldp.eth{rail}.chassis.name={leaf}" for rail, leaf in enumerate(leaves.get(host, LEAVES), 1) if leaf
        ]
        read = "lldpcli -f keyvalue show neighbors | grep chassis.name= | sort | tr '\\n' ' '"
        commands[host] = (
            f"for second in $(seq {LLDP_S}); do test \"$({read})\" = '{' '.join(wanted)} ' && exit; sleep 1; done; exit 1"
        )
    assert lab.run(LIMIT_S, **commands) == dict.fromkeys(HOSTS, 0), (
        f"lldpd did not show the expected switches within {LLDP_S} s"
    )


def measured(lab: Machines, report: Mapping[str, Any], stage: str) -> set[tuple[str, str]]:
    """Return host and scope of each `verbs.bandwidth` that was measured in a stage of the run to which `report` belongs."""
    directory = "gangs/all" if stage == GANG else "hosts"
    records = {
        host: json.loads((lab.shared / report["run_id"] / directory / f"{host}.json").read_text()) for host in HOSTS
    }
    return {
        (host, item["scope"])
        for host, record in records.items()
        for item in record["observations"]
        if item["name"] == "verbs.bandwidth" and item["status"] == "measured"
    }


def test_healthy_machines_are_accepted(lab: Machines, pack: Path, tmp_path: Path) -> None:
    await_switches(lab)
    report = accept(lab, pack, tmp_path, BENCHMARK, GANG)
    assert findings(report) == set()
    assert (report["decision"], report["rehearsal"]) == ("accepted", True)
    ports = [f"hca=rxe{rail},port=1" for rail in range(1, RAILS + 1)]
    assert measured(lab, report, BENCHMARK) == {(host, port) for host in HOSTS for port in ports}
    assert measured(lab, report, GANG) == {
        (host, f"{port},partner={other}") for host in HOSTS for port in ports for other in HOSTS if other != host
    }


def test_port_at_half_rate_is_named(lab: Machines, pack: Path, tmp_path: Path) -> None:
    change = f"tc qdisc change dev eth1 root {LIMIT_RATE}"
    lab.run(LIMIT_S, h2=change.format(kbits=PORT_KBITS // 2))
    report = accept(lab, pack, tmp_path, GANG)
    lab.run(LIMIT_S, h2=change.format(kbits=PORT_KBITS))
    assert findings(report) == {("h2", "hca=rxe1", "slow-network", "leaf0 swp2")}
    assert report["decision"] == "rejected"


def test_port_that_is_down_is_named(lab: Machines, pack: Path, tmp_path: Path) -> None:
    lab.run(LIMIT_S, h1="ip link set eth2 down")
    await_switches(lab, h1=("leaf0", ""))
    manifest = tmp_path / "cables.csv"
    lines = [
        f"{host},link,eth{rail},leaf{rail - 1},swp{number}" for number, host in enumerate(HOSTS, 1) for rail in (1, 2)
    ]
    manifest.write_text("\n".join(["host,kind,port,switch,switch_port", *lines]))
    report = accept(lab, pack, tmp_path, BENCHMARK, manifest=manifest)
    lab.run(LIMIT_S, h1="ip link set eth2 up")
    assert findings(report) == {("h1", "hca=rxe2", "port-down", "leaf1 swp1 by the manifest")}
    assert report["decision"] == "rejected"


def test_port_with_another_mtu_is_named(lab: Machines, pack: Path, tmp_path: Path) -> None:
    lab.run(LIMIT_S, h2="ip link set eth2 mtu 700")
    await_switches(lab)
    report = accept(lab, pack, tmp_path, BENCHMARK)
    lab.run(LIMIT_S, h2="ip link set eth2 mtu 1500")
    assert findings(report) == {("h2", "hca=rxe2", "mtu", "leaf1 swp2")}
    failed = {verdict["criterion"] for verdict in report["verdicts"] if verdict["verdict"] == "fail"}
    assert failed == {"uniform-nic-mtu", "verbs-port-mtu"}
    assert report["decision"] == "rejected"


def test_two_swapped_cables_are_named(lab: Machines, pack: Path, tmp_path: Path) -> None:
    replug = "ip link set eth1 down; ip link set eth2 down; sleep 0.2; ip link set eth1 up; ip link set eth2 up"
    lab.switches.swap(0, 1, host=3)
    lab.run(LIMIT_S, h3=replug)
    await_switches(lab, h3=("leaf1", "leaf0"))
    report = accept(lab, pack, tmp_path, BENCHMARK)
    lab.switches.swap(0, 1, host=3)
    lab.run(LIMIT_S, h3=replug)
    assert findings(report) == {
        ("h3", "nic=eth1", "swapped-cables", ""),
        ("h3", "nic=eth2", "swapped-cables", ""),
    }
    (cause,) = report["causes"]
    assert cause["title"] == "NIC eth1 of h3 and NIC eth2 of h3 have their cables swapped"
    assert "leaf1 swp3" in cause["why"]
    assert "leaf0 swp3" in cause["why"]
    assert report["decision"] == "rejected"
    await_switches(lab)
