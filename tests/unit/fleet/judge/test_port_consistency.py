"""Figures of RDMA ports that contradict each other or the readings of the ports are inconclusive.

The figures come from the benchmark `verbs`. The share of a test (`verbs.rate_ratio`) is its bandwidth divided by the rate of the
port, or by twice the rate if the test sends both ways. The best share of a port (`verbs.best_ratio`) is its greatest share over
all partners (the other hosts with which it was tested).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent.benchmarks.links.rdma_ports import RdmaPort
from agent.benchmarks.links.verbs_report import PortReport, planned_tests
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.port_consistency import port_problems
from schemas.catalogue import settings
from schemas.records import Metric, Observation
from schemas.reports import INCONCLUSIVE
from tests import builders
from tests.rank_context import Recorder
from tests.unit.agent.benchmarks.test_perftest import CAPTURES
from tests.unit.fleet.judge.test_port_figures import PORT, RATE, findings, fleet, readings

Change = Callable[[Observation], Observation]
BANDWIDTH = (CAPTURES / "v6-write-bw-ndr-4qp-client.stdout.txt").read_text()
LATENCY = (CAPTURES / "v45-write-lat-client.stdout.txt").read_text().replace("1024[B]", "4096[B]")
GUIDS = {f"hca=mlx5_{number}": f"b8ce:f603:0000:000{number}" for number in range(2)}


def link_readings(rate: float = RATE, guids: Any = GUIDS, width: int = 4) -> list[Metric]:
    """Return the readings of two ports and their adapters. Only the first port has this rate (B/s) and width (lanes)."""
    rates, widths = {"hca=mlx5_0,port=1": rate, PORT: RATE}, {"hca=mlx5_0,port=1": width, PORT: 4}
    return [
        *readings(), Metric(name="infiniband.rate", unit="B/s", values=rates),
        Metric(name="infiniband.width", unit="1", values=widths),
        Metric(name="infiniband.hca.node_guid", unit="1", values=guids),
    ]  # fmt: skip


def changed(name: str, change: Change, *, partner: str = "", **params: Any) -> dict[str, Sequence[Observation]]:
    """Return the figures of a healthy fleet, with `change` applied to one figure of PORT on h1.

    Args:
        name: name of the figure without `verbs.`.
        change: the change.
        partner: the other host of the test; empty: the figure is of PORT without a partner.
        params: parameters that the figure must have.
    """
    figures = fleet()
    scope = f"{PORT},partner={partner}" if partner else PORT
    wanted = next(item for item in figures["h1"] if item.name == f"verbs.{name}" and item.scope == scope
                  and params.items() <= item.params.items())  # fmt: skip
    return figures | {"h1": [change(item) if item is wanted else item for item in figures["h1"]]}


def scaled(factor: float) -> Change:
    return lambda item: replace(item, value=float(item.value or 0) * factor)


def with_param(key: str, value: Any) -> Change:
    return lambda item: replace(item, params={**item.params, key: value})


@pytest.mark.parametrize(
    ("figures", "scope"),
    [
        (changed("bandwidth", scaled(1.1), partner="h2"), f"{PORT},partner=h2"),
        (changed("bandwidth", scaled(1000), partner="h2", direction="both_ways"), f"{PORT},partner=h2"),
        (changed("rate_ratio", scaled(1.05), memory="gpu"), PORT),
        (changed("mtu", scaled(2)), PORT),
        (changed("latency", with_param("mtu", 1024)), PORT),
        (changed("best_ratio", scaled(1.02)), PORT),
        (changed("best_ratio", with_param("partners", 3)), PORT),
    ],
    ids=[
        "bandwidth",
        "bandwidth both ways",
        "rate ratio",
        "mtu",
        "MTU of the latency test",
        "best ratio",
        "number of partners",
    ],
)
@pytest.mark.parametrize("metrics", [link_readings(), []], ids=["with readings", "without readings"])
def test_figure_that_contradicts_another_is_inconclusive(
    figures: dict[str, Sequence[Observation]], scope: str, metrics: list[Metric]
) -> None:
    assert ("h1", scope, "plan", INCONCLUSIVE) in findings(figures, metrics)


def test_healthy_figures_agree() -> None:
    assert findings(fleet(), link_readings()) == set()
    assert findings(fleet()) == set()


def test_best_share_is_the_higher_of_the_share_alone_and_the_share_with_all_ports_together() -> None:
    """The profile `extended` tests each pair of ports alone, and then all pairs of ports of two hosts together."""
    both = [
        replace(item, value=value, params={**item.params, "sharing": sharing})
        for item in fleet()["h1"]
        if item.name == "verbs.rate_ratio"
        and item.scope == f"{PORT},partner=h2"
        and item.params["direction"] == "one_way"
        for sharing, value in (("alone", 0.97), ("together", 0.6))
    ]
    best = replace(both[0], name="verbs.best_ratio", scope=PORT, value=0.97, params={"rail": 1, "partners": 1})
    assert len(both) == 2
    for items in (both, both[::-1]):
        assert problems_of([*items, best]) == []
        assert problems_of([*items, replace(best, value=0.6)]) == [
            "it is 0.6, but the greatest verbs.rate_ratio is 0.97"
        ]


@pytest.mark.parametrize("seed", range(8))
def test_figures_that_the_benchmark_reports_do_not_contradict_each_other(seed: int) -> None:
    """The settings of `verbs`, the bandwidth of each test and the PCIe link that both ports share are random."""
    draw = random.Random(seed)  # noqa: S311 - each seed is a repeatable case
    chosen = settings("verbs", {
        "ops": draw.sample(["write", "read", "send"], k=draw.randint(1, 3)), "memories": draw.choice([["host"], ["host", "gpu"]]),
        "directions": draw.choice([["one_way"], ["one_way", "both_ways"]]), "figures": ["bandwidth", "message_rate", "latency"],
        "sharings": draw.sample(["alone", "together"], k=draw.randint(1, 2)),
    })  # fmt: skip
    context = Recorder(observations=[], kind="cpu")
    report = PortReport(context, chosen)  # type: ignore[arg-type]
    links = draw.choice([(), (("0000:15:01.0", draw.uniform(0.4, 2.2) * RATE),)])
    ports = [
        RdmaPort(
            hca=f"mlx5_{rail}", number=1, slot=f"{rail}", rail=rail, link_layer="InfiniBand", rate=RATE, gid_index=0,
            gid_type="IB", numa_node="0", pci_path="", cpus=(), links=links,
        )
        for rail in range(2)
    ]  # fmt: skip
    for partner, sharing, port in itertools.product(("h2", "h3"), chosen["sharings"], ports):
        at_once = ports if sharing == "together" else [port]
        for planned in planned_tests(chosen):
            bits = draw.uniform(0.5, 0.99) * RATE * 8e-9 * (2 if planned.direction == "both_ways" else 1)
            stdout = LATENCY if planned.figure == "latency" else BANDWIDTH.replace("394.41", f"{bits:.2f}")
            assert report.figure(planned, port, stdout, at_once, sharing=sharing, partner=partner) == ""
    report.best_partners()
    names = {item["name"] for item in context.observations}
    assert {"verbs.bandwidth", "verbs.rate_ratio"} <= names
    assert ("verbs.best_ratio" in names) == ("write" in chosen["ops"])
    assert problems_of([Observation(**item, stage="gang") for item in context.observations]) == []


def problems_of(observations: Sequence[Observation]) -> list[str]:
    plan = builders.plan("h1", "h2")
    (record,) = builders.evidence(plan)["h1"].records[:1]
    evidence = Evidence(records=(replace(record, observations=tuple(observations)),))
    return [reason for _, _, reason, _ in port_problems(HostView(plan, plan.host("h1"), evidence, []))]


def test_figures_that_do_not_fit_the_rate_of_the_port_are_inconclusive() -> None:
    result = findings(fleet(), link_readings(rate=RATE / 2))
    assert {item[1].partition(",partner")[0] for item in result} == {"hca=mlx5_0,port=1"}


@pytest.mark.parametrize(("name", "after"), [("rate", link_readings(rate=RATE / 2)), ("width", link_readings(width=2))])
def test_link_that_changes_during_the_run_is_inconclusive(name: str, after: list[Metric]) -> None:
    """The hosts have no figures in this test, because figures would contradict one of the two rates."""
    changed_link = ("h1", "hca=mlx5_0,port=1", "plan", INCONCLUSIVE)
    assert changed_link in findings({}, link_readings(), of=f"infiniband.{name}", last=after)
    assert changed_link not in findings({}, link_readings(), of=f"infiniband.{name}")


def test_adapter_without_a_guid_is_inconclusive_if_its_port_was_read() -> None:
    without_guid = link_readings(guids={"hca=mlx5_0": GUIDS["hca=mlx5_0"]})
    result = findings(fleet(), without_guid, of="infiniband.hca.node_guid")
    assert {(host, "hca=mlx5_1", "plan", INCONCLUSIVE) for host in ("h1", "h2", "h3")} <= result
