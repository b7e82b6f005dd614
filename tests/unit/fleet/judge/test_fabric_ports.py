"""Totals of the ports of a host: the number of active InfiniBand and RoCE ports, and the total rate of the ports of one kind.

The kinds are InfiniBand ports, RoCE ports and Ethernet interfaces. The kind with the highest total rate is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.fabric_ports import with_port_totals
from schemas.records import Metric
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan

PLAN = one_figure_plan("h1")
IB, ETHERNET = "InfiniBand", "Ethernet"


def port(number: int) -> str:
    return f"hca=mlx5_{number},port=1"


def totals(
    layers: Mapping[int, str],
    rates: Mapping[int, Any],
    *,
    interfaces: Mapping[str, Any] | None = None,
    **states: Mapping[int, Any],
) -> dict[str, Any]:
    """Return name of a total -> its value, or why it has none. Check that every snapshot has the same totals.

    Args:
        layers: number of an adapter with one port -> the link layer of the port.
        rates: number of an adapter -> the rate of its port in B/s.
        interfaces: scope of a network interface -> its rate in B/s.
        states: `state`, `phys_state` or `active` -> number of an adapter -> value of this reading for its port. If none of the
            three is given, every port is active.
    """
    given = {"link_layer": layers, "rate": rates, **(states or {"active": dict.fromkeys(layers, True)})}
    metrics = [
        Metric(name=f"infiniband.{name}", unit="1", values={port(at): value for at, value in values.items()})
        for name, values in given.items()
    ]
    metrics.append(Metric(name="network.speed", unit="B/s", values=interfaces or {}))
    before = host_evidence(PLAN, "h1", *metrics)
    after = with_port_totals(before)
    result = [shot.metrics[len(metrics) :] for shot in after.snapshots()]
    assert result == [result[0]] * 3
    assert [(item.name, item.unit) for item in result[0]] == [
        ("fabric_ports.active", "1"), ("fabric_ports.rate", "B/s"),
    ][: len(result[0])]  # fmt: skip
    return {item.name.partition(".")[2]: item.values.get("host", item.absent.get("host")) for item in result[0]}


@pytest.mark.parametrize(
    ("states", "active"),
    [
        ({"active": {0: True, 1: True}}, 2),
        ({"active": {0: True, 1: False}}, 1),
        ({"state": {0: "ACTIVE", 1: "DOWN"}}, 1),
        ({"phys_state": {0: "LinkUp", 1: "Polling"}}, 1),
        ({"state": {0: "ACTIVE", 1: "ACTIVE"}, "phys_state": {0: "LinkUp", 1: "Disabled"}}, 1),
        ({"state": {0: "ACTIVE"}, "active": {1: True}}, 2),
    ],
)
def test_port_is_active_if_every_reading_of_its_state_is_active(
    states: Mapping[str, Mapping[int, Any]], active: int
) -> None:
    assert totals({0: IB, 1: IB}, {0: 5e10, 1: 5e10}, **states) == {"active": active, "rate": 5e10 * active}


def test_number_of_active_ports_is_unknown_if_the_state_of_a_port_was_not_read() -> None:
    reason = f"error: the state of {port(1)} was not read"
    assert totals({0: IB, 1: IB}, {0: 5e10, 1: 5e10}, active={0: True}) == {"active": reason}


def test_total_rate_is_unknown_if_the_rate_of_an_active_port_was_not_read() -> None:
    assert totals({0: IB, 1: IB}, {0: 5e10}) == {"active": 2}
    assert totals({0: IB, 1: IB}, {0: 5e10}, active={0: True, 1: False}) == {"active": 1, "rate": 5e10}


@pytest.mark.parametrize(
    ("layers", "rates", "interfaces", "rate"),
    [
        ({0: IB, 1: ETHERNET}, {0: 5e10, 1: 2e10}, {}, 5e10),
        ({0: IB, 1: ETHERNET}, {0: 1e10, 1: 2e10}, {}, 2e10),
        ({0: ETHERNET, 1: ETHERNET}, {0: 1e10, 1: 2e10}, {"nic=eth0": 1e10, "nic=eth1": 2e10}, 3e10),
        ({0: IB}, {0: 1e10}, {"nic=eth0": 1e10, "nic=eth1": 5e9}, 1.5e10),
        ({0: IB}, {0: 1e10}, {"nic=eth0": "unknown"}, 1e10),
        ({0: IB, 1: IB}, {0: 1e10, 1: "unknown"}, {}, 1e10),
    ],
)
def test_total_rate_is_that_of_the_fastest_kind_of_port(
    layers: Mapping[int, str], rates: Mapping[int, Any], interfaces: Mapping[str, Any], rate: float
) -> None:
    assert totals(layers, rates, interfaces=interfaces) == {"active": len(layers), "rate": rate}


def test_host_without_ports_has_no_totals() -> None:
    for metrics in ([], [Metric(name="infiniband.link_layer", unit="1", absent={"host": "unsupported: none"})]):
        evidence = host_evidence(
            PLAN, "h1", *metrics, Metric(name="network.speed", unit="B/s", values={"nic=eth0": 1e9})
        )
        assert with_port_totals(evidence) is evidence


def test_snapshot_without_ports_has_no_totals() -> None:
    layers = Metric(name="infiniband.link_layer", unit="1", values={port(0): IB})
    active = Metric(name="infiniband.active", unit="1", values={port(0): True})
    evidence = host_evidence(PLAN, "h1", layers, active)
    (record,) = evidence.records
    bare = type(record.snapshots[0])(
        stage="benchmark", phase="after", at="2026-11-21T04:00:09Z", duration_s=0.1, metrics=()
    )
    mixed = type(evidence)(records=(type(record)(**{**vars(record), "snapshots": (*record.snapshots, bare)}),))
    assert with_port_totals(mixed).snapshots()[-1].metrics == ()
    assert len(with_port_totals(mixed).snapshots()[0].metrics) == 3


def test_totals_are_added_to_each_record_that_has_ports() -> None:
    layers = Metric(name="infiniband.link_layer", unit="1", values={port(0): IB})
    active = Metric(name="infiniband.active", unit="1", values={port(0): True})
    with_ports, without = (host_evidence(PLAN, "h1", *metrics).records[0] for metrics in ((layers, active), ()))
    for records in ((with_ports, without), (without, with_ports)):
        changed = with_port_totals(Evidence(records=records)).records
        assert [len(record.snapshots[0].metrics) for record in changed] == [
            3 if record is with_ports else 0 for record in records
        ]
        assert changed[records.index(without)] is without


def test_snapshots_with_equal_readings_of_ports_share_one_metric_of_each_total() -> None:
    layers = Metric(name="infiniband.link_layer", unit="1", values={port(0): IB})
    active = Metric(name="infiniband.active", unit="1", values={port(0): True})
    one, other = (
        with_port_totals(
            host_evidence(PLAN, "h1", layers, active, Metric(name="host.load", unit="1", values={"host": load}))
        )
        for load in (0.5, 0.7)
    )
    first, second = one.records[0].snapshots[0].metrics[-1], other.records[0].snapshots[0].metrics[-1]
    assert first.name == "fabric_ports.active"
    assert first is second
