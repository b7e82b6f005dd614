"""Virtual machines with real Soft-RoCE, perftest, lldpd and switches are accepted; each fault is named, and nothing else.

The ports that the machines read and measure replace the ports in the records of accepted GPU hosts, and the shipped criteria
judge these. Soft-RoCE has no rate of its own (it states 2.5 Gb/s for every interface), and a port with itself measures the
emulated processor. The limits on these are replaced, and the rate is the one that tc sets; all others are the shipped ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import yaml

from fleet.judge.criteria import Pack, read_packs
from fleet.judge.evidence import Evidence
from fleet.report.merge import merge
from schemas.catalogue import settings
from schemas.plans import Plan
from schemas.records import MEASURED, Metric, Observation
from schemas.reports import FleetReport
from tests import builders

from .machines import LIMIT_RATE, PORT_KBITS, Machines, machines

pytestmark = pytest.mark.rdma
HOSTS, RAILS = ("h1", "h2", "h3"), 2
PORTS = tuple(f"hca=rxe{rail},port=1" for rail in range(1, RAILS + 1))
VERBS = {
    "figures": ["bandwidth"],
    "directions": ["one_way"],
    "sharings": ["together"],
    "size_bytes": 8448,
    "seconds": 8,
}
"""perftest counts messages of more than 8 KiB one by one, and smaller ones by the hundred."""
SETTINGS = {**settings("verbs", {}), **VERBS}
LIMIT_S, LLDP_S, ATTEMPTS = 300.0, 60.0, 4
SOFT_ROCE_RATE, PORT_RATE = 2.5e9 / 8, PORT_KBITS * 1e3 / 8
NOT_CALIBRATED = "verbs.bandwidth is 0"
OF_PORTS = ("infiniband.", "network.", "optics.", "port.")
REPLACED = (
    ("verbs-port-rate", "verbs.rate_ratio", "benchmark", "1"),
    ("verbs-port-rate-any", "verbs.rate_ratio", "benchmark", "1"),
    ("verbs-port-fleet", "verbs.bandwidth", "benchmark", "B/s"),
    ("verbs-best-partner", "verbs.best_ratio", "gang", "1"),
)
Findings = set[tuple[str, str, str]]
"""Host, part and problem of each cause."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(HOSTS, RAILS, tmp_path_factory.mktemp("rdma")) as running:
        yield running


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Pack]:
    criteria = [
        {"id": f"{criterion}-lab", "replaces": criterion, "name": name, "scope": "port", "stage": stage, "unit": unit,
         "operator": "ge", "value": 0.0, "action": "none", "optional": True, "basis": "policy", "source": "see the test"}
        for criterion, name, stage, unit in REPLACED
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("packs") / "soft-roce.yml"
    path.write_text(
        yaml.safe_dump(
            {
                "schema": "rackproof.criteria/1",
                "summary": "Soft-RoCE has no rate of its own",
                "criteria": criteria,
            }
        )
    )
    return read_packs([str(path)])


Readings = Mapping[str, Sequence[Metric]]
Figures = Mapping[str, Sequence[Observation]]


def judged(packs: Sequence[Pack], readings: Readings, figures: Figures) -> FleetReport:
    """Return the report on GPU hosts that are accepted, with these ports: readings and figures of each host."""
    plan = builders.plan(*HOSTS, rackproof_gang="all", rackproof_infiniband_ports=RAILS)
    measured_stages = {item.stage for items in figures.values() for item in items}
    stages = []
    for stage in plan.stages:
        others = {name: chosen for name, chosen in stage.benchmarks.items() if name != "verbs"}
        verbs = {"verbs": VERBS} if stage.name in measured_stages else {}
        stages.append(replace(stage, benchmarks=others | verbs))
    plan = replace(plan, stages=tuple(stages))
    evidence = {
        host: with_ports(plan, host, [*map(with_rate, readings[host])], figures.get(host, ())) for host in HOSTS
    }
    report = merge(plan, evidence, packs)
    for cause in report.causes:
        print(cause.verdict, cause.problem, cause.title, "|", cause.why)
        for position in cause.verdicts:
            verdict = report.verdicts[position]
            print("   ", verdict.host, verdict.scope, verdict.criterion, verdict.reason)
    return report


def with_ports(plan: Plan, host: str, metrics: Sequence[Metric], figures: Sequence[Observation]) -> Evidence:
    evidence = builders.evidence(plan)[host]
    records = []
    for record in evidence.records:
        snapshots = tuple(
            replace(taken, metrics=(*(item for item in taken.metrics if not item.name.startswith(OF_PORTS)), *metrics))
            for taken in record.snapshots
        )
        own = [item for item in figures if (item.stage == "gang") == bool(record.gang)]
        records.append(replace(record, snapshots=snapshots, observations=(*record.observations, *own)))
    return replace(evidence, records=tuple(records))


def findings(report: FleetReport) -> Findings:
    return {(part.host, part.scope, cause.problem) for cause in report.causes for part in cause.parts}


def measured(lab: Machines, stage: str) -> Figures:
    """Return the figures of each host.

    perftest reports 0 if it could not calibrate the cycle counter because the machine was interrupted. Only then, what has no
    figure is measured again.
    """
    figures: dict[str, dict[tuple[str, str], Observation]] = {host: {} for host in HOSTS}
    for _ in range(ATTEMPTS):
        for host, items in lab.measure(stage, SETTINGS, LIMIT_S).items():
            for item in items:
                key = (item["name"], item["scope"])
                if key not in figures[host] or figures[host][key].status != MEASURED:
                    figures[host][key] = Observation(stage=stage, **item)
        if not any(NOT_CALIBRATED in item.reason for of_host in figures.values() for item in of_host.values()):
            break
    return {host: [with_share_of_rate(item) for item in of_host.values()] for host, of_host in figures.items()}


def with_share_of_rate(item: Observation) -> Observation:
    """Return the figure. Shares are of the rate that tc sets, not of the rate that Soft-RoCE states."""
    if item.name not in ("verbs.rate_ratio", "verbs.best_ratio") or not isinstance(item.value, float):
        return item
    return replace(item, value=item.value * SOFT_ROCE_RATE / PORT_RATE)


def with_rate(metric: Metric) -> Metric:
    """Return the reading, with the rate which tc sets."""
    return (
        replace(metric, values=dict.fromkeys(metric.values, PORT_RATE)) if metric.name == "infiniband.rate" else metric
    )


def read_when_switches_are_known(lab: Machines, switches: Mapping[str, Sequence[str]]) -> Readings:
    """Return the readings as soon as each port names the switch that it is cabled to (host -> switches by rail)."""
    deadline = time.monotonic() + LLDP_S
    while True:
        readings = lab.read(LIMIT_S)
        found = {
            host: tuple(metric.values.get(f"nic=eth{rail}", "") for metric in readings[host] if metric.name == "network.switch"
                        for rail in range(1, RAILS + 1))
            for host in HOSTS
        }  # fmt: skip
        if found == {host: tuple(switches.get(host, ("leaf0", "leaf1"))) for host in HOSTS}:
            return readings
        assert time.monotonic() < deadline, f"switches: {found}"


def test_healthy_ports_are_accepted(lab: Machines, packs: Sequence[Pack]) -> None:
    report = judged(packs, read_when_switches_are_known(lab, {}), measured(lab, "benchmark"))
    assert findings(report) == set()
    assert report.decision == "accepted"


def test_port_at_half_rate_is_named(lab: Machines, packs: Sequence[Pack]) -> None:
    readings = read_when_switches_are_known(lab, {})
    change = f"tc qdisc change dev eth1 root {LIMIT_RATE}"
    lab.run(LIMIT_S, h2=change.format(kbits=PORT_KBITS // 2))
    figures = measured(lab, "gang")
    lab.run(LIMIT_S, h2=change.format(kbits=PORT_KBITS))
    report = judged(packs, readings, figures)
    assert findings(report) == {("h2", "hca=rxe1", "slow-network")}
    assert report.decision == "rejected"


def test_port_that_is_down_is_named(lab: Machines, packs: Sequence[Pack]) -> None:
    lab.run(LIMIT_S, h1="ip link set eth2 down")
    readings = read_when_switches_are_known(lab, {"h1": ("leaf0", "")})
    figures = measured(lab, "benchmark")
    lab.run(LIMIT_S, h1="ip link set eth2 up")
    assert {item.reason for item in figures["h1"] if item.scope == PORTS[1]} == {"the port has no link"}
    report = judged(packs, readings, figures)
    assert findings(report) == {("h1", "hca=rxe2", "port-down")}
    assert report.decision == "rejected"


def test_port_with_another_mtu_is_named(lab: Machines, packs: Sequence[Pack]) -> None:
    lab.run(LIMIT_S, h2="ip link set eth2 mtu 700")
    readings = read_when_switches_are_known(lab, {})
    figures = measured(lab, "benchmark")
    lab.run(LIMIT_S, h2="ip link set eth2 mtu 1500")
    report = judged(packs, readings, figures)
    assert findings(report) == {("h2", "hca=rxe2", "mtu")}
    assert {verdict.criterion for verdict in report.verdicts if verdict.verdict == "fail"} == {
        "uniform-nic-mtu",
        "verbs-port-mtu",
    }
    assert report.decision == "rejected"


def test_two_swapped_cables_are_named(lab: Machines, packs: Sequence[Pack]) -> None:
    replug = "ip link set eth1 down; ip link set eth2 down; sleep 0.2; ip link set eth1 up; ip link set eth2 up"
    lab.switches.swap(0, 1, host=3)
    lab.run(LIMIT_S, h3=replug)
    readings = read_when_switches_are_known(lab, {"h3": ("leaf1", "leaf0")})
    lab.switches.swap(0, 1, host=3)
    lab.run(LIMIT_S, h3=replug)
    report = judged(packs, readings, {})
    assert findings(report) == {("h3", "nic=eth1", "swapped-cables"), ("h3", "nic=eth2", "swapped-cables")}
    (cause,) = report.causes
    assert cause.title == "NIC eth1 of h3 and NIC eth2 of h3 have their cables swapped"
    assert report.decision == "rejected"
    read_when_switches_are_known(lab, {})
