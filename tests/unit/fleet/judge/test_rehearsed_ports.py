"""A rehearsal (a run on CPUs) judges RDMA ports and cables only if it measures ports with the benchmark `verbs`.

Even then it judges only the hosts for which the inventory sets `rackproof_verbs_required`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.consistency import contradictions
from fleet.judge.criteria import read_packs
from fleet.judge.host_view import HostView
from fleet.judge.localization import judge_gangs
from fleet.judge.pack_selection import OF_PORTS, select_packs
from fleet.judge.wiring import Wiring, judge_links
from schemas.plans import Plan
from tests import builders
from tests.unit.fleet.judge.localization import test_port_pairs as ports
from tests.unit.fleet.judge.localization.test_localization import Fleet
from tests.unit.fleet.judge.test_wiring import HEALTHY, hosts_of, lines_of, links, not_passing, plan_of, swap

PACKS = read_packs([])


def rehearsal(plan: Plan, *required: str, benchmark: str = "verbs") -> Plan:
    """Return `plan` as a rehearsal with only this benchmark. The ports of the hosts `required` must be measured."""
    hosts = tuple(replace(host, device="cpu", verbs_required=host.name in required) for host in plan.hosts)
    stages = tuple(replace(stage, benchmarks={benchmark: {}}) for stage in plan.stages)
    return replace(plan, rehearsal=True, hosts=hosts, stages=stages)


@pytest.mark.parametrize(
    ("benchmark", "required", "names"),
    [
        ("verbs", ("h1",), ["rehearsal", "common"]),
        ("verbs", ("h2",), ["rehearsal"]),
        ("gemm", ("h1",), ["rehearsal"]),
    ],
)
def test_criteria_on_ports_judge_only_hosts_whose_ports_are_required(
    benchmark: str, required: tuple[str, ...], names: list[str]
) -> None:
    plan = rehearsal(builders.plan("h1", "h2"), *required, benchmark=benchmark)
    packs, reason = select_packs(plan, plan.host("h1"), [], PACKS)
    assert ([pack.name for pack in packs], reason) == (names, "")
    of_ports = {item.id for pack in packs[1:] for item in pack.criteria}
    (common,) = (pack for pack in PACKS if pack.name == "common")
    assert of_ports == ({item.id for item in common.criteria if item.name.startswith(OF_PORTS)} if packs[1:] else set())
    assert bool(packs[1:]) == ({"verbs-port-mtu", "uniform-nic-mtu", "fabric-ports-up"} <= of_ports)
    again, _ = select_packs(plan, plan.host("h1"), [], PACKS)
    assert [*map(id, again)] == [*map(id, packs)], "the cache must return the same packs again"


def test_cables_of_required_ports_are_judged() -> None:
    cables = swap(HEALTHY["rails"], ("h04", 1), ("h04", 6))
    all_hosts = hosts_of(16)
    for lines in ([], lines_of(HEALTHY["rails"])):
        plan = plan_of(*lines, hosts=len(all_hosts))
        expected = not_passing(judge_links(plan, links(cables)))
        assert {host for host, *_ in expected} == {"h04"}
        assert not_passing(judge_links(rehearsal(plan, *all_hosts), links(cables))) == expected
        assert not_passing(judge_links(rehearsal(plan, *{*all_hosts} - {"h04"}), links(cables))) == set()
        assert judge_links(rehearsal(plan), links(cables)) == Wiring()
        assert judge_links(rehearsal(plan, *all_hosts, benchmark="gemm"), links(cables)) == Wiring()


@pytest.mark.parametrize(("required", "named"), [(True, {("h2", "hca=mlx5_1,port=1")}), (False, set())])
def test_port_at_half_its_rate_fails_if_ports_are_required(required: bool, named: set[tuple[str, str]]) -> None:
    fleet = Fleet(4, 2, nics={("h2", 1): 0.5})
    plan = rehearsal(ports.plan_of(fleet), *(fleet.names if required else ()))
    verdicts = judge_gangs(ports.with_ports(plan, fleet, fleet.pairs()), [])
    assert {(item.host, item.scope) for item in ports.of_layer(verdicts, "verbs") if item.verdict == "fail"} == named


@pytest.mark.parametrize(("benchmark", "is_missing"), [("gemm", True), ("verbs", False)])
def test_version_of_torch_is_required_only_if_a_benchmark_uses_torch(benchmark: str, is_missing: bool) -> None:
    plan = builders.with_benchmarks(builders.plan("h1", rackproof_gang="none"), benchmark={benchmark: {}})
    evidence = builders.evidence(plan)["h1"]
    evidence = replace(evidence, records=tuple(replace(record, software={}) for record in evidence.records))
    result = {item.name for item in contradictions(HostView(plan, plan.host("h1"), evidence, []))}
    assert ("launch.torch" in result) is is_missing
