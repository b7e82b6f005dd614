"""Figures of an RDMA port must agree with the rate of the port and with each other. The link of the port must not change.

The share of a test (`verbs.rate_ratio`) is its bandwidth divided by the rate of the port, or by twice the rate if the test sends
both ways. If PCIe is slower than the port, its rate (parameter `pcie_rate`) replaces the rate of the port.

The best share (`verbs.best_ratio`) is the greatest over all partners (the other hosts with which the port was tested).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.port_consistency import port_problems
from schemas.records import SKIPPED, Metric, Observation, Snapshot
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1")
PORT = "hca=mlx5_0,port=1"
SETTINGS = {"op": "write", "direction": "one_way", "memory": "host"}


def figure(name: str, value: Any, *, partner: str = "h2", **params: Any) -> Observation:
    scope = f"{PORT},partner={partner}" if partner else PORT
    return builders.observation(
        f"verbs.{name}", value, scope=scope, stage="gang", **{**SETTINGS, "sharing": "together", **params}
    )


def problems(
    *figures: Observation, rates: Sequence[float] = (5e10,), readings: Sequence[Mapping[str, Mapping[str, Any]]] = ()
) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of each problem.

    Args:
        figures: the figures of the host.
        rates: the rate of PORT (B/s) in each snapshot. The snapshots have no other readings.
        readings: all readings of each snapshot: name -> scope -> value. If given, `rates` is not used.
    """
    given = readings or [{"infiniband.rate": {PORT: rate}} for rate in rates]
    shots = tuple(
        Snapshot(
            stage="gang", phase=("before", "during", "after")[at], at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1,
            metrics=tuple(Metric(name=name, unit="1", values=values) for name, values in each.items()),
        )
        for at, each in enumerate(given)
    )  # fmt: skip
    return [
        (name, scope, reason)
        for name, scope, reason, _ in port_problems(host_view(PLAN, snapshots=shots, observations=figures))
    ]


def bandwidth_and_share(bandwidth: float, share: float, **params: Any) -> list[Observation]:
    return [figure("bandwidth", bandwidth, **params), figure("rate_ratio", share, **params)]


@pytest.mark.parametrize(
    ("bandwidth", "share", "params", "is_wrong"),
    [
        (4.5e10, 0.9, {}, False),
        (4.54e10, 0.9, {}, False),
        (4.56e10, 0.9, {}, True),
        (4.4e10, 0.9, {}, True),
        (9e10, 0.9, {"direction": "both_ways"}, False),
        (4.5e10, 0.9, {"direction": "both_ways"}, True),
        (4.5e10, 0.0, {}, False),
    ],
)
def test_bandwidth_in_each_direction_is_roughly_its_share_of_the_rate_of_the_port(
    bandwidth: float, share: float, params: dict[str, str], is_wrong: bool
) -> None:
    way = {**SETTINGS, **params}
    result = [item for item in problems(*bandwidth_and_share(bandwidth, share, **way)) if item[0] == "verbs.bandwidth"]
    rate = bandwidth / share / (2 if params else 1) if share else 0
    reason = f"the bandwidth and its verbs.rate_ratio imply a port rate of {rate:g} B/s instead of 5e+10 B/s"
    assert result == ([("verbs.bandwidth", f"{PORT},partner=h2", reason)] if is_wrong else [])


@pytest.mark.parametrize("readings", [None, [{}]], ids=["rate read", "rate not read"])
@pytest.mark.parametrize(
    ("bandwidth", "share", "pcie_rate", "is_wrong"),
    [
        (2.5e10, 1.0, 2.5e10, False),
        (2.25e10, 0.9, 2.5e10, False),
        (4.5e10, 0.9, 2.5e10, True),  # the share was computed from the rate of the port
        (2.25e10, 0.9, 2.0e10, True),
    ],
)
def test_bandwidth_divided_by_the_share_must_be_the_pcie_rate_if_pcie_is_slower(
    bandwidth: float, share: float, pcie_rate: float, is_wrong: bool, readings: Any
) -> None:
    tests = [
        figure("bandwidth", bandwidth),
        figure("rate_ratio", share, pcie_rate=pcie_rate),
        *bandwidth_and_share(4.5e10, 0.9, partner="h3"),
    ]
    result = problems(*tests) if readings is None else problems(*tests, readings=readings)
    assert [scope for name, scope, _ in result if name == "verbs.bandwidth"] == [f"{PORT},partner=h2"] * is_wrong


def test_pcie_rate_above_the_rate_of_the_port_is_ignored() -> None:
    result = problems(figure("bandwidth", 5.4e10), figure("rate_ratio", 0.9, pcie_rate=6e10))
    assert [name for name, *_ in result if name == "verbs.bandwidth"]


def test_figures_of_a_port_are_compared_with_each_other_if_its_rate_was_not_read() -> None:
    tests = [
        *bandwidth_and_share(4.5e10, 0.9),
        *bandwidth_and_share(4.0e10, 0.8, partner="h3"),
        *bandwidth_and_share(9e10, 0.9, partner="h4"),
    ]
    named = [scope for name, scope, _ in problems(*tests, readings=[{}]) if name == "verbs.bandwidth"]
    assert named == [f"{PORT},partner=h4"]


@pytest.mark.parametrize("other", [{"op": "read"}, {"direction": "both_ways"}, {"memory": "gpu"}, {"sharing": "alone"}])
def test_figures_of_two_tests_are_not_combined(other: dict[str, str]) -> None:
    result = problems(figure("bandwidth", 1e9), figure("rate_ratio", 0.9, **other))
    assert [item for item in result if item[0] == "verbs.bandwidth"] == []


def best(value: Any, partners: int) -> Observation:
    return replace(
        builders.observation("verbs.best_ratio", value, scope=PORT, stage="gang", partners=partners),
        params={"partners": partners},
    )


@pytest.mark.parametrize(
    ("stated", "partners", "reason"),
    [
        (0.9, 2, ""),
        (0.905, 2, ""),
        (0.92, 2, "it is 0.92, but the greatest verbs.rate_ratio is 0.9"),
        (0.8, 2, "it is 0.8, but the greatest verbs.rate_ratio is 0.9"),
        (0.9, 3, "it is the best of 3 partners, but verbs.rate_ratio was measured with 2 partners"),
    ],
)
def test_best_share_must_be_roughly_the_greatest_share_and_state_the_right_number_of_partners(
    stated: float, partners: int, reason: str
) -> None:
    tests = [*bandwidth_and_share(4.5e10, 0.9), *bandwidth_and_share(4.0e10, 0.8, partner="h3")]
    result = [item for item in problems(*tests, best(stated, partners)) if item[0] == "verbs.best_ratio"]
    assert result == ([("verbs.best_ratio", PORT, reason)] if reason else [])


def test_shares_of_other_tests_or_without_a_partner_do_not_change_the_best_share() -> None:
    tests = [
        figure("rate_ratio", 0.5),
        figure("rate_ratio", 0.9),
        figure("rate_ratio", 0.99, memory="gpu"),
        figure("rate_ratio", 0.99, partner=""),
    ]
    assert [item for item in problems(*tests, best(0.9, 1)) if item[0] == "verbs.best_ratio"] == []
    absent = replace(best(0.9, 1), status=SKIPPED, value=None, reason="no")
    assert [item for item in problems(*tests, absent) if item[0] == "verbs.best_ratio"] == []
    assert [item for item in problems(figure("bandwidth", 1e9), best(0.1, 9)) if item[0] == "verbs.best_ratio"] == []


def test_mtu_must_equal_the_parameter_mtu_and_be_the_same_in_all_tests_of_the_port() -> None:
    base = bandwidth_and_share(4.5e10, 0.9)
    assert problems(*base, figure("mtu", 4096, mtu=4096)) == []
    assert problems(*base, figure("mtu", 1024, mtu=4096)) == [
        ("verbs.mtu", f"{PORT},partner=h2", "the value is 1024, but the parameter `mtu` is 4096")
    ]
    mixed = problems(*base, figure("latency", 1e-6, mtu=1024), figure("mtu", 4096, mtu=4096))
    assert mixed == [("verbs.mtu", f"{PORT},partner=h2", "the tests of the port used different MTUs: 4096, 1024")]
    absent = replace(figure("latency", 1e-6, mtu=1024), status=SKIPPED, value=None, reason="no")
    assert problems(*base, absent, figure("mtu", 4096, mtu=4096)) == []
    skipped = replace(figure("mtu", 4096, mtu=1), status=SKIPPED, value=None, reason="no")
    assert problems(*base, skipped) == []


def test_mtu_is_not_checked_if_neither_a_bandwidth_nor_a_share_was_measured() -> None:
    """One test measures the bandwidth, the share and the MTU."""
    absent = [replace(item, status=SKIPPED, value=None, reason="no") for item in bandwidth_and_share(1e9, 0.9)]
    assert problems(*absent, figure("mtu", 1024, mtu=4096)) == []


@pytest.mark.parametrize("name", ["infiniband.rate", "infiniband.width"])
def test_rate_or_width_of_a_link_that_changed_during_the_run_is_named(name: str) -> None:
    values = [{name: {PORT: value, "hca=mlx5_1,port=1": 1}} for value in (4, 2, 4)]
    # The reason names each value once.
    assert problems(readings=values) == [(name, PORT, "changed during the run: 4, then 2")]


def adapter(guid: str | None, *, port: bool = True) -> dict[str, dict[str, Any]]:
    """Return the readings of an adapter. `guid`: its GUID; None: not read. `port`: whether readings of its port are included."""
    known = {"infiniband.hca.node_guid": {"hca=mlx5_0": guid}} if guid else {"infiniband.hca.node_guid": {}}
    return {**known, **({"infiniband.link_layer": {PORT: "InfiniBand"}} if port else {})}


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([adapter("a"), adapter("a")], []),
        ([adapter("a"), adapter("b")], ["changed during the run: a, then b"]),
        (
            [adapter("a"), adapter(None)],
            ["missing in the snapshot during gang, which has readings of the adapter's ports"],
        ),
        ([adapter("a"), adapter(None, port=False)], []),
        ([adapter(None), adapter(None)], []),
    ],
    ids=["same GUID", "other GUID", "GUID missing once", "neither GUID nor port read", "GUID never read"],
)
def test_known_guid_must_neither_change_nor_be_missing(readings: list[dict[str, Any]], expected: list[str]) -> None:
    """It may be missing in a snapshot that has no readings of the ports of the adapter."""
    assert problems(readings=readings) == [("infiniband.hca.node_guid", "hca=mlx5_0", reason) for reason in expected]
