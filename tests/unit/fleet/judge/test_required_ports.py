"""With `rackproof_verbs_required`, verdicts report that too few RDMA ports were measured. They name the ports or the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.required_ports import unmeasured_ports
from schemas.benchmarks.communication import NOT_USED_BY_NCCL
from schemas.records import ERROR, SKIPPED, Metric, Observation
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view

WHY = "and rackproof_verbs_required is set"
PORT = "the port was not measured, " + WHY
GANG_PLAN = builders.with_benchmarks(builders.plan("h1", "h2"), gang={"verbs": {}})


def port(number: int, absent: str = "", status: str = SKIPPED, partner: str = "", stage: str = "gang") -> Observation:
    """Return the bandwidth of port `number`, or the reason `absent` why it was not measured."""
    scope = f"hca=mlx5_{number},port=1" + (f",partner={partner}" if partner else "")
    figure = builders.observation("verbs.bandwidth", 4e10, scope=scope, stage=stage)
    return replace(figure, status=status, value=None, reason=absent) if absent else figure


def reasons(
    *figures: Observation,
    wanted: int = 2,
    required: bool = True,
    gang: bool = True,
    metrics: tuple[Metric, ...] = (),
    hca: str = "",
) -> dict[str, str]:
    """Return scope -> reason of the verdicts on h1.

    `wanted`: required number of ports in the inventory; 0: not stated. `hca`: its NCCL_IB_HCA.
    """
    hosts = tuple(
        replace(
            host,
            verbs_required=required,
            infiniband_ports=wanted,
            gang=host.gang if gang else "",
            environment={"NCCL_IB_HCA": hca} if hca else {},
        )
        for host in GANG_PLAN.hosts
    )
    verdicts = unmeasured_ports(host_view(replace(GANG_PLAN, hosts=hosts), "h1", *metrics, observations=figures))
    return {item.scope: item.reason for item in verdicts}


def scope_of(number: int) -> str:
    return f"hca=mlx5_{number},port=1"


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_enough_measured_ports_need_no_verdict(wanted: int) -> None:
    assert reasons(port(0), port(1), wanted=wanted) == {}


def test_nothing_is_required_without_rackproof_verbs_required_or_without_a_gang() -> None:
    assert reasons(required=False) == {}
    assert reasons(gang=False) == {}


def test_host_without_any_port_has_a_verdict_even_if_the_inventory_states_no_number() -> None:
    assert reasons(wanted=0) == {"host": f"0 of 1 required RDMA ports were measured, {WHY}: the host has no RDMA port"}


def test_host_with_too_few_ports_has_a_verdict() -> None:
    assert reasons(port(0)) == {
        "host": f"1 of 2 required RDMA ports were measured, {WHY}: the host has no other RDMA port"
    }


def test_each_port_with_a_reason_has_a_verdict_with_all_its_reasons() -> None:
    figures = [port(1, "no cable"), port(1, "no cable"), port(1, "no partner"), port(0)]
    assert reasons(*figures) == {scope_of(1): f"{PORT}: no cable; no partner"}
    assert list(reasons(port(1, "no cable"), port(0, "no cable"))) == [scope_of(0), scope_of(1)]


def test_port_that_was_measured_with_only_one_of_its_partners_counts_as_measured() -> None:
    assert reasons(port(0), port(1, partner="h2"), port(1, "skipped", partner="h3")) == {}


@pytest.mark.parametrize("wanted", [2, 3])
def test_port_that_the_inventory_excludes_from_nccl_is_not_required(wanted: int) -> None:
    """`wanted` may count the port, because it must be up."""
    excluded = port(8, NOT_USED_BY_NCCL.format("^mlx5_8"))
    assert reasons(port(0), port(1), excluded, wanted=wanted, hca="^mlx5_8") == {}
    too_few = reasons(port(0), port(1, "no cable"), excluded, wanted=wanted, hca="^mlx5_8")
    assert any("no cable" in reason for reason in too_few.values())
    assert reasons(port(0), excluded, wanted=3, hca="^mlx5_8") != {}


@pytest.mark.parametrize("hca", ["", "^mlx5_0"])
def test_port_that_a_file_of_the_host_excludes_from_nccl_is_required(hca: str) -> None:
    excluded = port(1, NOT_USED_BY_NCCL.format("^mlx5_1"))
    assert list(reasons(port(0), excluded, hca=hca)) == [scope_of(1)]


def test_port_with_an_error_has_no_further_verdict() -> None:
    assert reasons(port(0), port(1, "timed out", ERROR)) == {}
    assert reasons(port(0), port(1, "timed out", ERROR), port(1, "no cable")) == {}


def test_only_the_host_is_named_if_it_is_not_known_which_port_should_have_been_measured() -> None:
    figures = [port(0), port(1, "no cable"), port(2, "no partner")]
    reason = f"1 of 2 required RDMA ports were measured, {WHY}: no cable; no partner"
    assert reasons(*figures) == {"host": reason}


def test_host_is_named_too_if_more_ports_are_missing_than_have_a_reason() -> None:
    assert reasons(port(0, "no cable"), wanted=2) == {
        scope_of(0): f"{PORT}: no cable",
        "host": f"0 of 2 required RDMA ports were measured, {WHY}: the host has no other RDMA port",
    }


@pytest.mark.parametrize(
    ("partners", "params"),
    [(("h2",), {"only_partner": "h2"}), (("h2", "h3"), {}), (("h2", ""), {}), (("",), {})],
)
def test_verdict_names_the_partner_if_the_port_had_only_one_partner(
    partners: tuple[str, ...], params: dict[str, Any]
) -> None:
    hosts = tuple(replace(host, verbs_required=True, infiniband_ports=1) for host in GANG_PLAN.hosts)
    figures = [port(0, "no answer", partner=partner) for partner in partners]
    (verdict,) = unmeasured_ports(host_view(replace(GANG_PLAN, hosts=hosts), "h1", observations=figures))
    assert (verdict.stage, verdict.params) == ("gang", params)


def test_verdict_is_of_the_stage_that_measures_ports() -> None:
    plan = builders.with_benchmarks(builders.plan("h1", "h2"), benchmark={"verbs": {}})
    hosts = tuple(replace(host, verbs_required=True, gang="") for host in plan.hosts)
    view = host_view(replace(plan, hosts=hosts), "h1", observations=[port(0, "x", stage="gang")])
    assert [item.stage for item in unmeasured_ports(view)] == ["benchmark"]


def readings(layers: dict[int, str], rates: dict[int, float], active: dict[int, bool]) -> tuple[Metric, ...]:
    """Return the readings of ports: number of a port -> link layer, rate, whether it is active."""
    named = (("link_layer", layers), ("rate", rates), ("active", active))
    return tuple(
        Metric(
            name=f"infiniband.{name}", unit="1", values={scope_of(number): value for number, value in of_ports.items()}
        )
        for name, of_ports in named
    )


IB, ETHERNET = "InfiniBand", "Ethernet"


@pytest.mark.parametrize(
    ("layers", "rates", "active", "is_named"),
    [
        ({}, {}, {}, True),
        ({0: IB, 1: IB}, {0: 50.0, 1: 50.0}, {1: True}, True),
        ({0: IB, 1: ETHERNET}, {0: 50.0, 1: 50.0}, {1: True}, False),
        ({0: ETHERNET, 1: ETHERNET}, {0: 50.0, 1: 50.0}, {1: True}, True),
        ({0: ETHERNET, 1: IB}, {0: 50.0, 1: 50.0}, {1: True}, True),
        ({0: IB, 1: IB}, {0: 50.0, 1: 25.0}, {1: True}, True),
        ({0: IB, 1: IB}, {0: 50.0, 1: 24.0}, {1: True}, False),
        ({0: IB, 1: IB}, {0: 50.0, 1: 24.0}, {1: False}, True),
        ({0: IB, 1: IB}, {0: 50.0}, {1: True}, True),
        ({0: ETHERNET, 1: IB}, {0: 500.0, 1: 50.0}, {1: True}, True),
        ({1: IB}, {1: 0.25}, {1: True}, True),
    ],
)
def test_port_of_another_network_is_not_named(
    layers: dict[int, str], rates: dict[int, float], active: dict[int, bool], is_named: bool
) -> None:
    """Port 1 is of another network if it is an Ethernet port on a host with InfiniBand, or an active port that is slow.

    It is slow if its rate is less than half the rate of the fastest port with the same link layer.
    """
    result = reasons(port(0), port(1, "not in the fabric"), metrics=readings(layers, rates, active))
    host = {"host": f"1 of 2 required RDMA ports were measured, {WHY}: not in the fabric"}
    assert result == ({scope_of(1): f"{PORT}: not in the fabric"} if is_named else host)
