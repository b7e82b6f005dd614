"""Figures of RDMA ports: criteria, and ports that the inventory requires to be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import read_pack
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from schemas.records import Metric, Observation
from schemas.reports import INCONCLUSIVE, PASS
from tests import builders

HOSTS = ("h1", "h2", "h3")
RATE = 5e10
SETTINGS = {"op": "write", "direction": "one_way", "memory": "host", "sharing": "alone"}


def figure(name: str, value: float, port: int, stage: str = "benchmark", **settings: Any) -> Observation:
    units = {
        "bandwidth": "B/s",
        "rate_ratio": "1",
        "mtu": "B",
        "latency": "s",
        "message_rate": "1/s",
        "best_ratio": "1",
    }
    params = {**(SETTINGS if name in ("bandwidth", "rate_ratio", "mtu") else {}), **settings, "rail": port}
    return builders.observation(
        f"verbs.{name}", value, scope=f"hca=mlx5_{port},port=1", unit=units[name], stage=stage, **params
    )


def healthy_port(port: int) -> list[Observation]:
    return [
        figure("bandwidth", 0.98 * RATE, port), figure("rate_ratio", 0.98, port), figure("mtu", 4096.0, port),
        figure("latency", 2e-6, port), figure("message_rate", 4e6, port), figure("best_ratio", 0.97, port, "gang", partners=2),
    ]  # fmt: skip


def absent(status: str, reason: str, scope: str = "host") -> Observation:
    return Observation(name="verbs.bandwidth", scope=scope, stage="benchmark", unit="B/s", status=status, reason=reason)


def findings(
    figures: Mapping[str, Sequence[Observation]], readings: Sequence[Metric] = (), **variables: Any
) -> set[tuple[str, str, str, str]]:
    """Return host, scope, criterion and verdict of what does not pass on RDMA ports. Every snapshot gets the `readings`."""
    plan = builders.plan(*HOSTS, gpu_count=2, rackproof_gang="all", **variables)
    evidence = {}
    for host, of_host in builders.evidence(plan).items():
        records = [
            replace(
                record,
                snapshots=tuple(replace(item, metrics=(*item.metrics, *readings)) for item in record.snapshots),
                observations=(*record.observations, *(
                    item for item in figures.get(host, ()) if (item.stage == "gang") == bool(record.gang)
                )),
            )
            for record in of_host.records
        ]  # fmt: skip
        evidence[host] = Evidence(records=tuple(records))
    verdicts = judge(plan, evidence, (read_pack("h200-sxm"),))
    return {
        (item.host, item.scope, item.criterion, item.verdict)
        for item in verdicts
        if item.name.startswith("verbs.") and item.verdict != PASS
    }


def fleet(**changed: Observation) -> dict[str, Sequence[Observation]]:
    """Return the figures of hosts with two ports; `changed`: host -> a figure that differs."""
    healthy = {host: [*healthy_port(0), *healthy_port(1)] for host in HOSTS}
    for host, bad in changed.items():
        key = (bad.name, bad.scope, bad.stage)
        healthy[host] = [bad if (item.name, item.scope, item.stage) == key else item for item in healthy[host]]
    return {host: tuple(items) for host, items in healthy.items()}


def test_healthy_ports_pass() -> None:
    assert findings(fleet()) == set()


@pytest.mark.parametrize(
    ("bad", "criteria"),
    [
        (figure("rate_ratio", 0.85, 1), {"verbs-port-rate"}),
        (figure("rate_ratio", 0.49, 1), {"verbs-port-rate", "verbs-port-rate-any"}),
        (figure("rate_ratio", 0.49, 1, op="read"), {"verbs-port-rate-any"}),
        (figure("bandwidth", 0.80 * RATE, 1), {"verbs-port-fleet"}),
        (figure("mtu", 1024.0, 1), {"verbs-port-mtu"}),
        (figure("latency", 9e-6, 1), {"verbs-port-latency"}),
        (figure("message_rate", 1e6, 1), {"verbs-port-messages"}),
        (figure("best_ratio", 0.49, 1, "gang", partners=2), {"verbs-best-partner"}),
        (figure("best_ratio", 0.49, 1, "gang", partners=1), set()),
    ],
)
def test_bad_port_is_named_by_the_criteria_of_its_figure_only(bad: Observation, criteria: set[str]) -> None:
    assert findings(fleet(h2=bad)) == {("h2", "hca=mlx5_1,port=1", criterion, "fail") for criterion in criteria}


def test_host_without_ports_or_perftest_is_accepted() -> None:
    assert findings({}) == set()
    skipped = absent("skipped", "ib_write_bw not found")
    unsupported = absent("unsupported", "the port has no link", "hca=mlx5_0,port=1")
    assert findings({"h1": [skipped, unsupported]}) == set()


def test_failed_test_of_a_port_is_inconclusive() -> None:
    error = absent("error", "no result within 21 s", "hca=mlx5_0,port=1")
    assert {item[:2] for item in findings({"h1": [error]})} == {("h1", "hca=mlx5_0,port=1")}


@pytest.mark.parametrize(("ports", "variables", "missing"), [
    (2, {}, 0), (2, {"rackproof_infiniband_ports": 2}, 0), (2, {"rackproof_infiniband_ports": 3}, 1), (0, {}, 1),
])  # fmt: skip
def test_ports_that_must_be_measured_are_counted(ports: int, variables: dict[str, Any], missing: int) -> None:
    figures = {
        host: [item for port in range(ports) for item in (*healthy_port(port), between(host, port))] for host in HOSTS
    }
    found = findings(figures, rackproof_verbs_required=True, **variables)
    assert found == ({(host, "host", "plan", INCONCLUSIVE) for host in HOSTS} if missing else set())
    assert findings(figures, **variables) == set(), "without the variable nothing is required"


def between(host: str, port: int) -> Observation:
    """Return what a port sent to another host."""
    other = next(name for name in HOSTS if name != host)
    sent = figure("bandwidth", 0.97 * RATE, port, "gang", sharing="together")
    return replace(sent, scope=f"{sent.scope},partner={other}")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {("h1", "hca=mlx5_1,port=1", "plan", INCONCLUSIVE)}),
        ({"layer": "Ethernet"}, set()),
        ({"is_active": False}, set()),
        ({"instead": absent("skipped", "ib_write_bw not found")}, set()),
        ({"instead": absent("unsupported", "not a port of the fabric", "hca=mlx5_1,port=1")}, set()),
    ],
    ids=["silent", "RoCE", "no link", "perftest is missing", "with a reason"],
)
def test_active_infiniband_port_without_figure_and_reason_is_inconclusive(
    change: dict[str, Any], expected: set[tuple[str, str, str, str]]
) -> None:
    ports = [f"hca=mlx5_{number},port=1" for number in range(2)]
    readings = [
        Metric(name="infiniband.link_layer", unit="1", values=dict.fromkeys(ports, change.get("layer", "InfiniBand"))),
        Metric(name="infiniband.active", unit="1", values=dict.fromkeys(ports, change.get("is_active", True))),
    ]
    figures = fleet()
    of_h1 = [item for item in figures["h1"] if "mlx5_0" in item.scope or item.stage == "gang"]
    assert findings(figures | {"h1": [*of_h1, *filter(None, [change.get("instead")])]}, readings) == expected
