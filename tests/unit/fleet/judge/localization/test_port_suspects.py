"""The verdict on a suspected RDMA port depends also on its switch, its data rate, and its bandwidth in loopback (to itself)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Pack
from fleet.judge.host_view import HostView
from fleet.judge.localization import Pair, judge_gangs
from fleet.judge.localization.port_pairs import least_share
from schemas.records import SKIPPED, Metric, Observation, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.localization.test_localization import Fleet, plan_of
from tests.unit.fleet.judge.localization.test_port_pairs import RATE, of_layer, with_ports
from tests.unit.fleet.judge.small_fleet import criterion, pack

SLOW = 0.5
"""Bandwidth of a slow pair of ports, as a share of the normal bandwidth."""


def port(rail: int) -> str:
    return f"hca=mlx5_{rail},port=1"


def floors(best: Any = 0.8, alone: Any = 0.9) -> Pack:
    """Return two criteria on the bandwidth of a port, as a share of the port's rate.

    `best` is the floor with the best partner, `alone` the floor in loopback.
    """
    rules = (("best", "verbs.best_ratio", best), ("alone", "verbs.rate_ratio", alone))
    return pack(
        *[criterion(name, id=id, operator="ge", value=value, scope="") for id, name, value in rules], chosen=True
    )


def alone(share: Any, rail: int = 1, *, stage: str = "benchmark", **params: Any) -> Observation:
    """Return the bandwidth of a port in loopback, as a share of its rate."""
    default = {"op": "write", "direction": "one_way", "memory": "host", "sharing": "alone"}
    return builders.observation("verbs.rate_ratio", share, scope=port(rail), stage=stage, **{**default, **params})


def judged(
    slow: Callable[[Pair], bool],
    *,
    size: int = 4,
    rails: int = 2,
    of_h2: Sequence[Observation] = (),
    rates: Mapping[int, float] | None = None,
    pcie_rate: float | None = None,
    switches: Callable[[int, int], tuple[str, str]] | None = None,
    is_roce: bool = False,
    verdicts: Sequence[Verdict] = (),
    packs: Sequence[Pack] = (floors(),),
) -> list[Verdict]:
    """Return the failed and inconclusive verdicts on ports.

    Args:
        slow: returns whether a pair of ports is slow (`SLOW`).
        size: number of hosts.
        rails: number of ports of each host.
        of_h2: further figures of the host h2.
        rates: rail -> rate of its ports in B/s, which all hosts report.
        pcie_rate: rate in B/s that PCIe allows to each port, if the figures between hosts state one.
        switches: returns ID and name of the switch of a port, given the number of the host and the rail.
        is_roce: whether ID and name of the switch are readings of the port's network interface instead of the port.
        verdicts: verdicts of criteria, which the localization takes into account.
        packs: the packs with the criteria.
    """
    fleet = Fleet(size, rails, noise=0.001)
    pairs = [replace(pair, bandwidth=(pair.bandwidth or 0) * (SLOW if slow(pair) else 1)) for pair in fleet.pairs()]
    views = []
    for number, view in enumerate(with_ports(plan_of(fleet), fleet, pairs)):
        metrics = [
            Metric(
                name="infiniband.rate", unit="B/s", values={port(rail): rate for rail, rate in (rates or {}).items()}
            )
        ]
        if switches:
            known = {rail: switches(number, rail) for rail in range(rails)}
            for at, name in enumerate(("switch_id", "switch")):
                values = {
                    f"nic=eth{rail}" if is_roce else port(rail): named[at] for rail, named in known.items() if named[at]
                }
                metrics.append(Metric(name=f"{'network' if is_roce else 'infiniband'}.{name}", unit="1", values=values))
            interfaces = {port(rail): f"eth{rail}" for rail in known} if is_roce else {}
            metrics.append(Metric(name="infiniband.interface", unit="1", values=interfaces))
        shot = Snapshot(stage="preflight", phase="before", at=builders.WHEN, duration_s=0.1, metrics=tuple(metrics))
        host_record, gang_record = view.evidence.records
        own = of_h2 if view.host.name == "h2" else ()
        gang_record = replace(gang_record, observations=with_shares(gang_record.observations, pcie_rate))
        host_record = replace(host_record, snapshots=(shot,), observations=tuple(own))
        evidence = replace(view.evidence, records=(host_record, gang_record))
        views.append(HostView(view.plan, view.host, evidence, packs))
    return [item for item in of_layer(judge_gangs(views, verdicts), "verbs") if item.verdict != PASS]


def with_shares(figures: Sequence[Observation], pcie_rate: float | None) -> tuple[Observation, ...]:
    """Return the figures. If `pcie_rate` is given, add a `verbs.rate_ratio` with this parameter for each bandwidth of a port.

    The judge uses only the parameter of these added figures, so their values are not computed.
    """
    shares = [
        replace(item, name="verbs.rate_ratio", unit="1", params={**item.params, "pcie_rate": pcie_rate})
        for item in figures
        if item.name == "verbs.bandwidth" and pcie_rate
    ]
    return (*figures, *shares)


def at_h2(pair: Pair) -> bool:
    """Return whether an end of the pair is the port of h2 on rail 1."""
    return "h2" in (pair.a, pair.b) and pair.rail == 1


CABLE = "the cause is its cable, a module or the switch port"
PORT = "the cause is the port, its PCIe slot or its settings, not the cable"


@pytest.mark.parametrize(
    ("figures", "note", "kind"),
    [
        ([alone(0.95)], f"in loopback the port reaches 95 % of its rate: {CABLE}", "cable"),
        ([alone(0.9)], f"in loopback the port reaches 90 % of its rate: {CABLE}", "cable"),
        ([alone(0.89)], f"in loopback the port reaches 89 % of its rate: {PORT}", "NIC"),
        ([alone(0.95), alone(0.5)], f"in loopback the port reaches 50 % of its rate: {PORT}", "NIC"),
        ([alone(0.95), alone(0.5, 0)], f"in loopback the port reaches 95 % of its rate: {CABLE}", "cable"),
        ([alone(0.95), alone(0.5, op="read")], f"in loopback the port reaches 95 % of its rate: {CABLE}", "cable"),
        ([alone(0.95), alone(0.5, stage="gang")], f"in loopback the port reaches 95 % of its rate: {CABLE}", "cable"),
        ([alone(0.95), replace(alone(0.5), status=SKIPPED, value=None, reason="no")],
         f"in loopback the port reaches 95 % of its rate: {CABLE}", "cable"),
        ([alone(0.95), alone("fast")], f"in loopback the port reaches 95 % of its rate: {CABLE}", "cable"),
        ([], "", "NIC"),
    ],
)  # fmt: skip
def test_loopback_separates_a_slow_cable_from_a_slow_port(figures: list[Observation], note: str, kind: str) -> None:
    (verdict,) = judged(at_h2, of_h2=figures)
    assert (verdict.host, verdict.scope, verdict.verdict) == ("h2", port(1), FAIL)
    assert verdict.reason.startswith(f"suspect {kind} h2 rail 1")
    if note:
        assert note in verdict.reason
        assert note in verdict.detail
    else:
        assert "in loopback" not in verdict.reason


@pytest.mark.parametrize("packs", [[], [floors(alone=None)], [floors(alone=0.0)]])
def test_bandwidth_in_loopback_without_a_limit_above_0_is_not_mentioned(packs: list[Pack]) -> None:
    (verdict,) = judged(at_h2, of_h2=[alone(0.95)], packs=packs)
    assert "in loopback" not in verdict.reason
    assert verdict.reason.startswith("suspect NIC h2 rail 1")


def leaf(number: int, rail: int) -> tuple[str, str]:
    """Return ID and name of the leaf switch of a host on a rail. Four hosts share a leaf switch."""
    return f"00{number // 4}{rail}", f"leaf{number // 4}-{rail}"


def at_leaf(pair: Pair) -> bool:
    """Return whether an end of the pair is at leaf 1 of rail 1."""
    return pair.rail == 1 and any(int(host[1:]) // 4 == 1 for host in (pair.a, pair.b))


def best(host: str, rail: int, verdict: str = FAIL) -> Verdict:
    """Return a verdict on `verbs.best_ratio`: bandwidth of a port with its best partner, as a share of the port's rate."""
    return Verdict(
        host=host,
        scope=port(rail),
        name="verbs.best_ratio",
        stage="gang",
        verdict=verdict,
        criterion="best",
        reason="slow",
    )


@pytest.mark.parametrize("is_roce", [False, True])
def test_slow_switch_has_a_verdict_in_the_scope_of_each_of_its_ports(is_roce: bool) -> None:
    result = judged(at_leaf, size=12, switches=leaf, is_roce=is_roce)
    assert {(item.host, item.scope, item.part) for item in result} == {
        (f"h{at}", port(1), "switch=0011") for at in range(4, 8)
    }
    assert {item.verdict for item in result} <= {FAIL, INCONCLUSIVE}
    for item in result:
        assert item.reason.endswith("; the switch is leaf1-1") or "; the switch is leaf1-1;" in item.reason
        assert "; the switch is leaf1-1" in item.detail


@pytest.mark.parametrize(
    ("given", "part", "names_switch"),
    [
        (("a b/1", ""), "switch=a_b_1", False),
        (("leaf", "leaf"), "switch=leaf", False),
        (("x" * 70, "leaf"), f"switch={'x' * 64}", True),
    ],
)
def test_id_of_a_switch_is_converted_to_a_valid_scope(given: tuple[str, str], part: str, names_switch: bool) -> None:
    """`given` is ID and name of the switch. The reason has the name, if there is one that differs from the ID."""

    def named(number: int, rail: int) -> tuple[str, str]:
        return given if (number // 4, rail) == (1, 1) else leaf(number, rail)

    result = judged(at_leaf, size=12, switches=named)
    assert {item.part for item in result} == {part}
    assert any("the switch is" in item.reason for item in result) is names_switch


def test_no_switch_is_suspected_if_the_switches_of_the_ports_are_unknown() -> None:
    result = judged(at_leaf, size=12)
    assert not any(item.part.startswith("switch") for item in result)


def test_port_does_not_get_the_switch_of_another_port() -> None:
    result = judged(at_leaf, size=12, switches=lambda number, rail: leaf(number, rail) if rail == 0 else ("", ""))
    assert not any(item.part.startswith("switch") for item in result)


def on_rail(pair: Pair) -> bool:
    return pair.rail == 1


@pytest.mark.parametrize(
    ("of_criteria", "verdict"),
    [
        ([], INCONCLUSIVE),
        ([best("h1", 1)], FAIL),
        ([best("h1", 1, PASS)], INCONCLUSIVE),
        ([best("h1", 0)], INCONCLUSIVE),
        ([replace(best("h1", 1), name="verbs.rate_ratio")], INCONCLUSIVE),
    ],
)
def test_slow_rail_fails_only_if_one_of_its_ports_fails_verbs_best_ratio(
    of_criteria: list[Verdict], verdict: str
) -> None:
    result = judged(on_rail, size=6, rails=4, verdicts=of_criteria)
    assert {(item.scope, item.part) for item in result} <= {(port(1), "rail=1")}
    assert {item.verdict for item in result} <= {verdict}
    if verdict == FAIL:
        assert {item.host for item in result} == {f"h{at}" for at in range(6)}


ALL = dict.fromkeys(range(4), RATE)


@pytest.mark.parametrize(
    ("rates", "packs", "is_found"),
    [
        (ALL, (floors(),), True),
        ({}, (floors(),), False),
        (ALL, (), False),
        (ALL, (floors(best=0.4),), False),
        (dict.fromkeys(range(4), RATE / 2), (floors(),), False),
    ],
    ids=["rate and limit", "no rate", "no limit", "low limit", "ports of half the rate"],
)
def test_slow_majority_of_rails_is_found_only_below_an_absolute_limit(
    rates: Mapping[int, float], packs: Sequence[Pack], is_found: bool
) -> None:
    """The absolute limit is the rate of the ports, multiplied by the value of the criterion `best`."""
    below = [best("h1", rail) for rail in range(3)]
    result = judged(lambda pair: pair.rail < 3, size=6, rails=4, rates=rates, packs=packs, verdicts=below)
    assert {item.part for item in result if item.part.startswith("rail")} == (
        {"rail=0", "rail=1", "rail=2"} if is_found else set()
    )


@pytest.mark.parametrize(
    ("pcie_rate", "is_found"), [(None, True), (SLOW * RATE, False), (0.9 * RATE, True), (2 * RATE, True)]
)
def test_majority_of_rails_that_reaches_what_pcie_allows_is_not_slow(pcie_rate: float | None, is_found: bool) -> None:
    rates, below = dict.fromkeys(range(4), RATE), [best("h1", rail) for rail in range(3)]
    result = judged(lambda pair: pair.rail < 3, size=6, rails=4, rates=rates, pcie_rate=pcie_rate, verdicts=below)
    assert {item.part for item in result if item.part.startswith("rail")} == (
        {"rail=0", "rail=1", "rail=2"} if is_found else set()
    )


def test_least_share_is_the_highest_floor_of_the_figure() -> None:
    rules = (
        criterion("verbs.best_ratio", id="a", operator="ge", value=0.7, scope=""),
        criterion("verbs.best_ratio", id="b", operator="ge", value=0.8, scope=""),
        criterion("verbs.best_ratio", id="c", operator="le", value=0.9, scope=""),
        criterion("verbs.rate_ratio", id="d", operator="ge", value=0.95, scope=""),
    )
    fleet = Fleet(2, 1)
    (view, *_) = with_ports(plan_of(fleet), fleet, [])
    assert (
        least_share(HostView(view.plan, view.host, view.evidence, [pack(*rules, chosen=True)]), "verbs.best_ratio")
        == 0.8
    )
    assert least_share(HostView(view.plan, view.host, view.evidence, []), "verbs.best_ratio") == 0.0
