"""Each benchmark figure of a NUMA node is judged. A missing figure is inconclusive. All bad figures of one node are one cause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge.criteria import read_pack
from fleet.judge.judge import judge
from fleet.judge.node_coverage import silent_nodes, unused_nodes
from schemas.plans import Plan
from schemas.records import ERROR, Metric, Observation
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Cause, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, host_view

BENCHMARKS = {"host_memory": {}, "host_compute": {}}
PREFIXES = ("host_memory.", "host_compute.")
WRONG = ("host_memory.wrong_elements", "numa=1")
Change = Callable[[Observation], Observation | None]


def plan_of(*hosts: str, **variables: Any) -> Plan:
    plan = builders.plan(*hosts, gpu_count=1, rackproof_gang="none", **variables)
    return builders.with_benchmarks(plan, benchmark=BENCHMARKS)


def verdicts(change: Change, *hosts: str, **variables: Any) -> list[Verdict]:
    """Judge the benchmarks that measure NUMA nodes. Return the verdicts that do not pass.

    `change` is applied to each observation of h1. It may return None, which removes the observation.
    """
    plan = plan_of(*(hosts or ("h1",)), **variables)
    pack = read_pack("h200-sxm")
    criteria = tuple(item for item in pack.criteria if item.name.startswith(PREFIXES))
    evidence = {host.name: host_evidence(plan, host.name) for host in plan.hosts}
    evidence["h1"] = builders.with_observations(evidence["h1"], change)
    judged = judge(plan, evidence, (replace(pack, criteria=criteria),))
    return [item for item in judged if item.verdict != PASS and item.name.startswith(PREFIXES)]


def scaled(factor: float, name: str, scope: str = "") -> Change:
    def change(item: Observation) -> Observation:
        if item.name == name and scope in ("", item.scope) and isinstance(item.value, int | float):
            return replace(item, value=item.value * factor)
        return item

    return change


def causes(found: Sequence[Verdict]) -> list[Cause]:
    return list(diagnose(found, {}))


def test_healthy_nodes_pass() -> None:
    assert verdicts(lambda item: item) == []


@pytest.mark.parametrize("name", ["wrong_elements", "latency", "bandwidth"])
def test_node_without_a_figure_is_inconclusive(name: str) -> None:
    result = verdicts(lambda item: None if (item.name, item.scope) == (f"host_memory.{name}", "numa=1") else item)
    assert {(item.name, item.scope, item.verdict) for item in result} == {(f"host_memory.{name}", "host", INCONCLUSIVE)}


def test_figure_with_an_error_gives_one_verdict() -> None:
    def absent(item: Observation) -> Observation:
        if item.name == "host_memory.latency" and item.scope == "numa=1" and item.params["placement"] == "local":
            return replace(item, status=ERROR, value=None, reason="no slower than the cache")
        return item

    (result,) = verdicts(absent)
    assert (result.scope, result.verdict) == ("numa=1", INCONCLUSIVE)


def test_host_of_one_node_needs_no_remote_figures() -> None:
    def one_node(item: Observation) -> Observation | None:
        if item.name == "host_memory.nodes":
            return replace(item, value=1)
        return None if item.scope == "numa=1" or item.params.get("placement") == "remote" else item

    assert verdicts(one_node) == []


def test_cause_of_wrong_elements_names_the_node() -> None:
    wrong = verdicts(lambda item: replace(item, value=3) if (item.name, item.scope) == WRONG else item)
    (cause,) = causes(wrong)
    assert (cause.part, cause.action, cause.verdict) == ("numa=1", "inspect_hardware", FAIL)


def test_slow_node_is_one_cause_on_the_node() -> None:
    result = verdicts(scaled(0.5, "host_memory.bandwidth", "numa=1"), "h1", "h2", "h3")
    (cause,) = causes(result)
    assert (cause.host, cause.part, cause.problem, len(cause.verdicts)) == ("h1", "numa=1", "slow-host-memory", 4)


def test_slow_processors_are_one_cause_on_the_host() -> None:
    result = verdicts(scaled(0.5, "host_compute.throughput"), "h1", "h2", "h3")
    (cause,) = causes(result)
    assert (cause.host, cause.part, cause.problem) == ("h1", "host", "slow-host-compute")


@pytest.mark.parametrize(("stated", "fails"), [(300, False), (400, True)])
def test_bandwidth_is_compared_with_the_bandwidth_in_the_inventory(stated: float, fails: bool) -> None:
    result = verdicts(lambda item: item, rackproof_host_memory_gbyteps=stated)
    assert {item.criterion for item in result} == ({"host-memory-stated"} if fails else set())


def silent(*observations: Observation, plan: Plan | None = None) -> list[tuple[str, dict[str, Any], str]]:
    """Return name, parameters and reason of each verdict on missing figures of a host that has only these observations."""
    view = host_view(plan or plan_of("h1"), observations=observations)
    return [(item.name, dict(item.params), item.reason) for item in silent_nodes(view)]


def nodes(count: int, stage: str = "benchmark") -> Observation:
    return builders.observation("host_memory.nodes", count, stage=stage)


@pytest.mark.parametrize(
    ("count", "placements"),
    [(1, {"local"}), (2, {"local", "remote"})],
)
def test_remote_figures_are_required_only_if_there_are_several_nodes(count: int, placements: set[str]) -> None:
    result = silent(nodes(count))
    assert {reason for *_, reason in result} == {
        f"only 0 of {count} NUMA nodes report this figure or a reason for its absence"
    }
    assert ("host_memory.wrong_elements", {}) in [(name, params) for name, params, _ in result]
    assert {params["placement"] for _, params, _ in result if params} == placements
    assert {params["op"] for name, params, _ in result if name == "host_memory.bandwidth"} >= {"copy", "triad"}


def test_no_figure_is_required_if_the_number_of_nodes_is_text() -> None:
    text = replace(nodes(1), value="two")
    assert silent(text) == []


def test_last_reported_number_of_nodes_decides_how_many_nodes_need_figures() -> None:
    node = builders.node_figures("numa=0")
    local = [item for item in node if item.params.get("placement") != "remote"]
    assert {name for name, *_ in silent(nodes(1), nodes(2), *local)} >= {"host_memory.wrong_elements"}
    assert silent(nodes(2), nodes(1), *local) == []


def test_figures_and_node_counts_of_another_stage_are_ignored() -> None:
    assert silent(nodes(1, stage="soak")) == []
    of_soak = builders.node_figures("numa=0", "soak")
    assert len(silent(nodes(1), *of_soak)) == len(silent(nodes(1)))


def test_figure_with_other_parameters_does_not_replace_a_missing_one() -> None:
    node = [item for item in builders.node_figures("numa=0") if item.params.get("placement") != "remote"]
    without_copy = [item for item in node if item.params.get("op") != "copy"]
    assert [(name, params) for name, params, _ in silent(nodes(1), *without_copy)] == [
        ("host_memory.bandwidth", {"op": "copy", "placement": "local"})
    ]


def metric(name: str, values: dict[str, Any], unit: str = "1") -> Metric:
    return Metric(name=name, unit=unit, values=values)


def numa_readings(*nodes: tuple[int, int]) -> list[Metric]:
    """Return the readings of NUMA nodes, each with a number of processors and a size of memory."""
    return [
        metric("host.numa.processors", {f"numa={number}": processors for number, (processors, _) in enumerate(nodes)}),
        metric("host.numa.memory_total", {f"numa={number}": memory for number, (_, memory) in enumerate(nodes)}, "B"),
    ]


def cpu_readings(usable: int, online: int) -> list[Metric]:
    return [metric("host.cpu.count", {"host": usable}), metric("host.cpu.threads", {"host": online})]


def unused(*metrics: Metric, measured: int = 1, plan: Plan | None = None) -> list[tuple[str, str]]:
    """Return name and reason of each verdict on a host with these readings. `measured`: number of NUMA nodes measured."""
    result = [*unused_nodes(host_view(plan or plan_of("h1"), "h1", *metrics, observations=(nodes(measured),)))]
    assert all((item.verdict, item.scope) == (INCONCLUSIVE, "host") for item in result)
    return [(item.name, item.reason) for item in result]


BOTH = ((56, 1 << 39), (56, 1 << 39))


@pytest.mark.parametrize("measured", [1, 2, 3])
def test_number_of_measured_nodes_must_be_that_of_the_host(measured: int) -> None:
    result = unused(*numa_readings(*BOTH), measured=measured)
    assert [name for name, _ in result] == ([] if measured == 2 else ["host_memory.nodes"])
    for _, reason in result:
        assert f"{measured} NUMA nodes were measured, but the host has 2 with processors and memory" in reason
        assert ("a cpuset" in reason) == (measured < 2)


@pytest.mark.parametrize(
    "numa",
    [
        [(56, 1 << 39)],
        [(56, 1 << 39), (0, 1 << 38)],
        [(56, 1 << 39), (56, 0)],
        [(56, 0)],
        [],
    ],
    ids=[
        "one-node",
        "memory-without-processors",
        "processors-without-memory",
        "only-node-without-memory",
        "no-nodes",
    ],
)
def test_only_nodes_with_processors_and_memory_must_be_measured(numa: list[tuple[int, int]]) -> None:
    assert unused(*numa_readings(*numa), measured=1) == []


def test_node_whose_memory_is_unknown_must_be_measured() -> None:
    processors, memory = numa_readings(*BOTH)
    memory = replace(memory, values={"numa=0": 1 << 39}, absent={"numa=1": "error: Permission denied"})
    assert [name for name, _ in unused(processors, memory, measured=1)] == ["host_memory.nodes"]


def test_run_that_could_not_use_all_processors_is_inconclusive() -> None:
    ((name, reason),) = unused(*cpu_readings(2, 112))
    assert name == "host.cpu.count"
    assert reason.startswith("the run could use only 2 of the 112 processors that are online: the launcher, a cpuset")
    assert unused(*cpu_readings(112, 112)) == []


def test_nothing_is_checked_if_readings_are_missing() -> None:
    """The record lacks `host.numa.processors` and `host.cpu.threads`."""
    _, memory = numa_readings(*BOTH)
    assert unused(memory, metric("host.cpu.count", {"host": 2})) == []


def test_processors_do_not_matter_if_no_benchmark_uses_them_or_in_a_rehearsal() -> None:
    bound = [*cpu_readings(2, 112), *numa_readings(*BOTH)]
    without = builders.with_benchmarks(plan_of("h1"), benchmark={"integrity": {}})
    assert unused(*bound, plan=without) == []
    assert unused(*bound, plan=replace(plan_of("h1"), rehearsal=True)) == []


def test_host_that_was_only_partly_measured_is_not_accepted() -> None:
    plan = plan_of("h1")
    evidence = host_evidence(plan, "h1", *cpu_readings(2, 112))
    result = judge(plan, {"h1": evidence}, ())
    assert [item.verdict for item in result if item.name == "host.cpu.count"] == [INCONCLUSIVE]
