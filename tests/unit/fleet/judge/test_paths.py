"""A slow NCCL transport explains a slow collective, unless a bandwidth that was measured over the same path passes.

A path is a tuple: criterion, figure, stage, message size and transport.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.gather import Gatherer, gather
from fleet.judge.host_view import HostView
from fleet.judge.paths import CHECK_NVLS, is_bandwidth, path_of, with_nccl_settings, with_slow_path
from schemas.records import ERROR, MEASURED, Observation
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack

PLAN = one_figure_plan(gpu_count=2)
ACCESS = criterion("peer_copy.access", id="access", scope="peer", value=True)


def path_over(transport: Any, *, stage: str = "benchmark", scope: str = "host", status: str = MEASURED) -> Observation:
    return Observation(
        name="collective.transport", scope=scope, stage=stage, unit="1", status=status, value=transport, reason="lost"
    )


def host_view(*observations: Observation, rules: tuple[Criterion, ...] = (ACCESS,)) -> HostView:
    """Return the view of a host with these observations. By default, its criteria require peer access between its GPUs."""
    return HostView(PLAN, PLAN.hosts[0], host_evidence(PLAN, observations=observations), [pack(*rules)])


def slow_collective(**over: Any) -> Verdict:
    fields = {
        "host": "h1", "scope": "host", "name": "collective.all_reduce.busbw", "stage": "benchmark", "verdict": FAIL,
        "criterion": "c", "reason": "found 1, wanted 2", "action": "reseat", "params": {"size_bytes": 8},
    }  # fmt: skip
    return Verdict(**{**fields, **over})


def explain(verdict: Verdict, *observations: Observation, others: tuple[Verdict, ...] = (), **over: Any) -> Verdict:
    return with_slow_path(host_view(*observations, **over), verdict, [verdict, *others], set())


@pytest.mark.parametrize(
    ("transport", "named"),
    [
        ("SHM/direct/direct", "SHM/direct/direct"), ("net/socket", "net/socket"), ("P2P/CUMEM,SHM/x", "SHM/x"),
        ("P2P/CUMEM;NET/IB", "NET/IB"), ("P2P|SHM", "SHM"), ("P2P + SHM", "SHM"), ("SHM,NET", "SHM"),
        ("P2P/CUMEM", ""), ("", ""), (7, ""),
    ],
)  # fmt: skip
def test_shared_memory_and_net_are_slow_paths_within_a_host(transport: Any, named: str) -> None:
    verdict = explain(slow_collective(), path_over(transport))
    if not named:
        assert verdict == slow_collective()
        return
    assert verdict.reason.startswith(f"NCCL uses {named} instead of P2P; check NCCL_P2P_*")
    assert verdict.reason.endswith("; found 1, wanted 2")
    assert verdict.action == "configure"


@pytest.mark.parametrize(
    ("transport", "expected_text"),
    [
        ("NET/Socket/0", "NCCL uses NET/Socket/0 instead of InfiniBand"),
        ("net/socket", "NCCL uses net/socket instead of InfiniBand"),
        ("NET/IB/0", "NCCL uses NET/IB/0 without GPUDirect RDMA"),
        ("NET/IB/0/GDRDMA,NET/IB/1", "NCCL uses NET/IB/1 without GPUDirect RDMA"),
        ("net/ib/0/gdrdma", ""),
        ("NET/IB/0/GDRDMA", ""),
        ("NET/AWS_Libfabric", "NCCL uses NET/AWS_Libfabric without GPUDirect RDMA"),
        ("NET/UCX+P2P/CUMEM", "NCCL uses NET/UCX without GPUDirect RDMA"),
        ("NET/AWS_Libfabric/GDRDMA", ""),
        ("NET/AWS+P2P/CUMEM", ""),  # a name that older agents truncated
        ("SHM", ""),
        ("P2P/CUMEM", ""),
    ],
)
def test_net_without_gpudirect_rdma_is_a_slow_path_between_hosts(transport: str, expected_text: str) -> None:
    gang = slow_collective(scope="gang=r1", stage="gang")
    verdict = explain(gang, path_over(transport, scope="gang=r1", stage="gang"))
    assert (expected_text in verdict.reason) if expected_text else verdict == gang
    assert ("check NCCL_* in the environment" in verdict.reason) == bool(expected_text)


def test_slow_path_is_added_before_the_detail_of_the_verdict() -> None:
    assert explain(slow_collective(detail="5 %"), path_over("SHM")).detail.endswith("; 5 %")
    assert not explain(slow_collective(), path_over("SHM")).detail.endswith("; ")


@pytest.mark.parametrize(
    ("over", "explained"),
    [
        ({}, True), ({"verdict": PASS}, False), ({"verdict": INCONCLUSIVE}, False),
        ({"name": "collective.all_reduce.latency"}, False), ({"name": "memory.busbw"}, False),
    ],
)  # fmt: skip
def test_only_a_failed_bandwidth_is_explained(over: Any, explained: bool) -> None:
    verdict = slow_collective(**over)
    assert (explain(verdict, path_over("SHM")) != verdict) is explained
    assert is_bandwidth(slow_collective())
    assert not is_bandwidth(slow_collective(name="collective.all_reduce.latency"))
    assert not is_bandwidth(slow_collective(name="memory.busbw"))


@pytest.mark.parametrize(
    ("other", "action"),
    [
        (slow_collective(name="peer_copy.bandwidth"), "reseat"),
        (slow_collective(name="gpu.nvlink.active_links"), "reseat"),
        (slow_collective(name="peer_copy.bandwidth", verdict=PASS), "configure"),
        (slow_collective(name="memory.bandwidth"), "configure"),
    ],
)
def test_slow_path_changes_the_action_unless_a_link_or_a_copy_between_gpus_fails_too(
    other: Verdict, action: str
) -> None:
    assert explain(slow_collective(), path_over("SHM"), others=(other,)).action == action


BANDWIDTH = criterion("collective.all_reduce.busbw", id="c", scope="host", operator="ge", value=2.0)


def bus_bandwidth(value: Any, **params: Any) -> Observation:
    return builders.observation("collective.all_reduce.busbw", value, scope="host", **{"size_bytes": 8, **params})


@pytest.mark.parametrize(
    ("rule", "observations", "explained"),
    [
        (BANDWIDTH, [], True), (BANDWIDTH, [bus_bandwidth(3.0)], False), (BANDWIDTH, [bus_bandwidth(1.0)], True),
        (BANDWIDTH, [bus_bandwidth(3.0), bus_bandwidth(1.0)], True), (BANDWIDTH, [bus_bandwidth(3.0, size_bytes=16)], True),
        (replace(BANDWIDTH, id="d"), [bus_bandwidth(3.0)], True), (BANDWIDTH, [replace(bus_bandwidth(3.0), stage="gang")], True),
        (replace(BANDWIDTH, best_of_run=True), [bus_bandwidth(3.0), bus_bandwidth(1.0)], False),
        (BANDWIDTH, [bus_bandwidth("fast")], True),
    ],
)  # fmt: skip
def test_path_explains_a_failure_unless_another_figure_that_was_measured_over_it_passes(
    rule: Criterion, observations: list[Observation], explained: bool
) -> None:
    here = host_view(path_over("SHM"), *observations, rules=(ACCESS, rule))
    stats = gather(Planned(PLAN), [here])
    assert (with_slow_path(here, slow_collective(), [], stats.paths.paths) != slow_collective()) is explained


@pytest.mark.parametrize("best_of_run", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_path_is_normal_if_a_figure_that_was_measured_over_it_passes(parts: int, best_of_run: bool) -> None:
    hosts = ("h1", "h2", "h3", "h4")
    plan = one_figure_plan(*hosts)
    rule = replace(BANDWIDTH, value=None, fleet_fraction=0.9, best_of_run=best_of_run)
    view_of_host = {
        host: HostView(
            plan,
            plan.host(host),
            host_evidence(plan, host, observations=(path_over(way), bus_bandwidth(value))),
            [pack(rule)],
        )
        for host, way, value in zip(hosts, ("P2P", "SHM", "SHM/x", "SHM"), (10.0, 10.0, 8.0, 7.0), strict=True)
    }
    gatherers = [Gatherer(Planned(plan)) for _ in range(parts)]
    for number, host in enumerate(hosts):
        gatherers[number % parts].add(view_of_host[host])
    first, *others = [gatherer.finish() for gatherer in gatherers]
    for other in others:
        first.update(other)
    first.complete()
    assert {path[-1] for path in first.paths.paths} - {"P2P"} == {"SHM"}


@pytest.mark.parametrize(("operator", "fraction", "worse"), [("ge", 0.9, 5.0), ("le", 1.1, 20.0)])
@pytest.mark.parametrize("best_of_run", [False, True])
def test_worst_repetition_of_a_figure_decides_unless_the_criterion_takes_the_best(
    operator: str, fraction: float, worse: float, best_of_run: bool
) -> None:
    hosts = ("h1", "h2", "h3", "h4")
    plan = one_figure_plan(*hosts)
    rule = replace(BANDWIDTH, operator=operator, value=None, fleet_fraction=fraction, best_of_run=best_of_run)
    views = []
    for host in hosts:
        figures = (10.0, worse) if host == "h4" else (10.0,)
        observed = (path_over("SHM" if host == "h4" else "P2P"), *map(bus_bandwidth, figures))
        views.append(HostView(plan, plan.host(host), host_evidence(plan, host, observations=observed), [pack(rule)]))
    normal = gather(Planned(plan), views).paths.paths
    assert {path[-1] for path in normal} == ({"P2P", "SHM"} if best_of_run else {"P2P"})


def test_path_has_the_last_measured_transport_of_the_same_stage_and_scope() -> None:
    for observations, transport in (
        ([path_over("P2P"), path_over("SHM")], "SHM"), ([path_over("SHM"), path_over("P2P")], "P2P"),
        ([path_over("SHM"), path_over(None, status=ERROR)], "SHM"), ([path_over("SHM", stage="gang")], None),
        ([path_over("SHM", scope="gang=r1")], None),
    ):  # fmt: skip
        assert path_of(host_view(*observations), slow_collective()) == (
            "c",
            "collective.all_reduce.busbw",
            "benchmark",
            8,
            transport,
        )
    # The figure may state the transport as a parameter.
    assert path_of(host_view(), slow_collective(params={"transport": "NET"}))[4] == "NET"


@pytest.mark.parametrize(
    ("rules", "explained"),
    [
        ((ACCESS,), True), ((), False), ((replace(ACCESS, value=False),), False), ((replace(ACCESS, value=1),), False),
        ((replace(ACCESS, name="peer_copy.*"),), True), ((criterion("memory.bandwidth", value=True),), False),
    ],
)  # fmt: skip
def test_path_through_host_memory_is_slow_only_if_a_criterion_requires_peer_access(rules: Any, explained: bool) -> None:
    assert (explain(slow_collective(), path_over("SHM"), rules=rules) != slow_collective()) is explained
    between_hosts = slow_collective(scope="gang=r1", stage="gang")
    assert explain(between_hosts, path_over("NET/Socket", scope="gang=r1", stage="gang"), rules=rules) != between_hosts


def test_missing_nvls_is_reported_with_what_to_check() -> None:
    nvls = slow_collective(name="collective.nvls", value=False, reason="found False")
    assert explain(nvls) == replace(nvls, reason=f"found False; {CHECK_NVLS}", detail=CHECK_NVLS)
    for other in (replace(nvls, value=0), replace(nvls, value=None), replace(nvls, name="collective.channels")):
        assert explain(other) == other


def test_verdict_on_a_host_without_a_record_is_unchanged() -> None:
    no_host = HostView(PLAN, PLAN.hosts[0], Evidence(), [pack(ACCESS)])
    assert with_slow_path(no_host, slow_collective(), [], set()) == slow_collective()


def limited_collective(stage: str = "benchmark", **params: Any) -> Observation:
    """Return a bandwidth that was measured while settings limited NCCL."""
    params = {"nccl_settings": "NCCL_MAX_NCHANNELS=2; NCCL_PROTO=LL", **params}
    return builders.observation("collective.all_reduce.busbw", 1.0, stage=stage, size_bytes=8, **params)


@pytest.mark.parametrize(
    ("name", "operator", "unit"),
    [
        ("collective.all_reduce.busbw", "ge", "B/s"),
        ("collective.all_reduce.latency", "le", "s"),
        ("collective.all_reduce.graph_latency", "le", "s"),
        ("model_parallel.throughput", "ge", "tokens/s"),
        ("pairs.bandwidth", "ge", "B/s"),
    ],
)
def test_slow_communication_with_settings_that_limit_nccl_names_them(name: str, operator: str, unit: str) -> None:
    verdict = slow_collective(name=name, operator=operator, unit=unit)
    explained = with_nccl_settings(host_view(limited_collective()), verdict, [verdict])
    assert explained.action == "configure"
    assert explained.reason.startswith("NCCL is limited by NCCL_MAX_NCHANNELS=2; NCCL_PROTO=LL: remove the setting")


@pytest.mark.parametrize(
    ("observed", "changes"),
    [
        (limited_collective(), {"name": "collective.all_reduce.wrong_elements", "operator": "eq", "unit": "1"}),
        (limited_collective(), {"name": "gemm.throughput", "operator": "ge", "unit": "FLOP/s"}),
        (limited_collective(), {"verdict": PASS}),
        (limited_collective(), {"verdict": INCONCLUSIVE}),
        (limited_collective("gang"), {}),
        (builders.observation("collective.all_reduce.busbw", 1.0, size_bytes=8), {}),
    ],
)
def test_other_verdicts_are_not_explained_by_settings_of_nccl(observed: Observation, changes: dict[str, Any]) -> None:
    verdict = slow_collective(**{"operator": "ge", "unit": "B/s", **changes})
    assert with_nccl_settings(host_view(observed), verdict, [verdict]) == verdict


def test_slow_communication_names_other_settings_of_nccl_and_keeps_its_action() -> None:
    names = "NCCL_CGA_CLUSTER_SIZE=0; NCCL_PXN_DISABLE=1"
    observed = builders.observation("collective.all_reduce.busbw", 1.0, size_bytes=8, nccl_other_settings=names)
    verdict = slow_collective(operator="ge", unit="B/s")
    explained = with_nccl_settings(host_view(observed), verdict, [verdict])
    assert explained.action == verdict.action
    assert explained.reason.startswith(verdict.reason)
    assert f"NCCL has the settings {names}: if they are not needed, measure again without them" in explained.reason
    limited = limited_collective(nccl_other_settings=names)
    assert names not in with_nccl_settings(host_view(limited), verdict, [verdict]).reason


def test_bad_link_keeps_the_action_in_spite_of_settings_of_nccl() -> None:
    verdict = slow_collective(operator="ge", unit="B/s")
    link = slow_collective(name="gpu.nvlink.active_links")
    explained = with_nccl_settings(host_view(limited_collective()), verdict, [verdict, link])
    assert explained.action == "reseat"
    assert "NCCL_PROTO=LL" in explained.reason
