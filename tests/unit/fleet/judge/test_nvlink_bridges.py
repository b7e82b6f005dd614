"""NVLink bridges of PCIe GPUs: a GPU has all links of its bridges or none, and hosts of one gang have the same bridges."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from fleet.judge.criteria import read_pack
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.outliers import WIRED_FIGURES, FleetFigures
from schemas.records import Metric, Snapshot
from schemas.reports import FAIL
from tests import builders
from tests.unit.fleet.judge.small_fleet import SNAPSHOTS, host_evidence, host_view, one_figure_plan
from tests.unit.fleet.judge.test_stated import pack_of

LINKS = {"a100-pcie-40": 12, "a100-pcie-80": 12, "h100-pcie": 12, "h100-nvl": 12, "h200-nvl": 18}
"""Model -> links of a GPU with all its bridges."""
LINKS_OF_A_BRIDGE = 4


def active(*counts: int) -> Metric:
    """Return the number of active links of each GPU, in the order of their indices."""
    return Metric(
        name="gpu.nvlink.active_links", unit="1", values={f"gpu={index}": count for index, count in enumerate(counts)}
    )


def failed(
    hosts: Mapping[str, Sequence[int]], criterion: str, model: str, later: Sequence[int] = ()
) -> dict[tuple[str, str], str]:
    """Return host and scope of each failed verdict of a criterion -> its action.

    Args:
        hosts: host -> active links of its GPUs in the first snapshot.
        criterion: the only criterion.
        model: name of the pack.
        later: active links of the GPUs of each host in the later snapshots; empty: as in the first one.
    """
    counts = next(iter(hosts.values()))
    plan = one_figure_plan(*hosts, gpu_count=len(counts), rackproof_gpu_model=model)
    evidence: dict[str, Evidence] = {}
    for host, first in hosts.items():
        snapshots = tuple(
            Snapshot(
                stage=stage,
                phase=phase,
                at=f"2026-11-21T04:00:0{at}Z",
                duration_s=0.1,
                metrics=(active(*(later if later and at else first)),),
            )
            for at, (stage, phase) in enumerate(SNAPSHOTS)
        )
        evidence[host] = host_evidence(plan, host, snapshots=snapshots)
    verdicts = judge(plan, evidence, (pack_of(model, criterion),))
    return {
        (item.host, item.scope): item.action
        for item in verdicts
        if item.verdict == FAIL and item.criterion == criterion
    }


def test_every_model_whose_links_depend_on_bridges_has_the_criterion() -> None:
    with_criterion = {name for name in LINKS if any(item.id == "nvlink-bridges" for item in read_pack(name).criteria)}
    assert with_criterion == LINKS.keys()


@pytest.mark.parametrize("model", LINKS)
def test_gpu_has_all_links_of_its_bridges_or_none(model: str) -> None:
    for count in range(LINKS[model] + 1):
        result = failed({"h1": (count, LINKS[model])}, "nvlink-bridges", model)
        expected = {} if count in (0, LINKS[model]) else {("h1", "gpu=0"): "reseat"}
        assert result == expected, count


@pytest.mark.parametrize("model", LINKS)
@pytest.mark.parametrize("lost", [1, LINKS_OF_A_BRIDGE, -1])
def test_links_that_are_lost_during_the_run_fail(model: str, lost: int) -> None:
    full = LINKS[model]
    left = 0 if lost < 0 else full - lost
    result = failed({"h1": (full, full)}, "nvlink-bridges", model, later=(left, left))
    assert result == {("h1", "gpu=0"): "reseat", ("h1", "gpu=1"): "reseat"}


@pytest.mark.parametrize("gang", ["pair and single", "all bridged", "none bridged"])
@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize("model", LINKS)
def test_hosts_with_the_same_bridges_pass(model: str, hosts: int, gang: str) -> None:
    full = LINKS[model]
    counts = {"pair and single": (full, full, 0), "all bridged": (full,) * 4, "none bridged": (0,) * 4}[gang]
    fleet = dict.fromkeys((f"h{at}" for at in range(hosts)), counts)
    for criterion in ("nvlink-bridges", "nvlink-vs-fleet"):
        assert failed(fleet, criterion, model) == {}


@pytest.mark.parametrize(("left", "action"), [(0, "configure"), (8, "inspect_hardware")])
@pytest.mark.parametrize("hosts", [2, 3, 5])
@pytest.mark.parametrize("model", LINKS)
def test_host_that_lost_a_bridge_fails_among_hosts_that_have_it(model: str, hosts: int, left: int, action: str) -> None:
    full = LINKS[model]
    fleet = {f"h{at}": (full, full, 0) for at in range(hosts)} | {"h0": (left, left, 0)}
    result = failed(fleet, "nvlink-vs-fleet", model)
    assert result == {("h0", "gpu=0"): action, ("h0", "gpu=1"): action}


def wired(host: str, paths: Mapping[tuple[int, int], str], product: str = "") -> HostView:
    """Return a host of three GPUs with these paths between them. `product`: name of the product, if the host reports it."""
    names = {
        f"gpu={one},peer={two}": paths.get((min(one, two), max(one, two)), "SYS")
        for one, two in itertools.permutations(range(3), 2)
    }
    plan = one_figure_plan("h1", "h2", gpu_count=3)
    of_host = [Metric(name="host.system.product", unit="1", values={"host": product})] if product else []
    return host_view(plan, host, Metric(name="gpu.peer.link", unit="1", values=names), *of_host)


@pytest.mark.parametrize("prefix", WIRED_FIGURES)
def test_figures_that_depend_on_the_paths_between_gpus_are_compared_between_hosts_with_the_same_paths(
    prefix: str,
) -> None:
    pair, other_pair = {(0, 1): "NV12"}, {(1, 2): "NV12"}
    bridged, also_bridged, lost = wired("h1", pair), wired("h2", other_pair), wired("h2", {})
    figures = FleetFigures(Planned(bridged.plan))
    item = builders.observation(f"{prefix}throughput", 1.0, unit="1")
    of_gpu = builders.observation("gemm.throughput", 1.0, scope="gpu=0")
    assert figures.key(bridged, item) == figures.key(also_bridged, item) != figures.key(lost, item)
    assert figures.key(bridged, of_gpu) == figures.key(lost, of_gpu)


PAIRS = ((0, 1), (0, 2), (1, 2))


@pytest.mark.parametrize("scope", ["host", "gpu=0", "gang=r1"])
@pytest.mark.parametrize("prefix", WIRED_FIGURES)
@pytest.mark.parametrize(
    ("paths", "is_within_product"),
    [
        ({}, True), (dict.fromkeys(PAIRS, "PIX"), True), (dict.fromkeys(PAIRS, "NODE"), True), ({(0, 1): "NV12"}, True),
        (dict.fromkeys(PAIRS, "NV18"), False), (dict.fromkeys(PAIRS, "NV4"), False),
    ],
)  # fmt: skip
def test_figures_are_compared_within_a_product_if_no_nvlink_joins_some_gpus_of_the_host(
    paths: Mapping[tuple[int, int], str], is_within_product: bool, prefix: str, scope: str
) -> None:
    one, other, unknown = (wired(host, paths, product) for host, product in (("h1", "X"), ("h2", "Y"), ("h1", "")))
    same = wired("h2", paths, "X")
    figures = FleetFigures(Planned(one.plan))
    item = builders.observation(f"{prefix}throughput", 1.0, scope=scope, unit="1")
    assert figures.key(one, item) == figures.key(same, item)
    assert (figures.key(one, item) != figures.key(other, item)) is is_within_product
    assert (figures.key(one, item) != figures.key(unknown, item)) is is_within_product
    of_gpu = builders.observation("gemm.throughput", 1.0, scope="gpu=0")
    assert figures.key(one, of_gpu) == figures.key(other, of_gpu)


@pytest.mark.parametrize("slow", [0.3, 0.55, 0.85])
@pytest.mark.parametrize("name", ["collective.all_reduce.busbw", "training.throughput"])
def test_hosts_of_a_slower_product_without_nvlink_pass_and_a_slow_host_of_a_product_fails(
    name: str, slow: float
) -> None:
    """Hosts b0 to b2 are of the slower product. Hosts a4 and b2 have half the rate of their product."""
    hosts = {**{f"a{at}": 1.0 for at in range(5)}, **{f"b{at}": slow for at in range(3)}}
    hosts["a4"], hosts["b2"] = 0.45, 0.45 * slow
    plan = one_figure_plan(*hosts, gpu_count=2, rackproof_gpu_model="l40s")
    path = Metric(name="gpu.peer.link", unit="1", values={"gpu=0,peer=1": "SYS", "gpu=1,peer=0": "SYS"})
    evidence = {}
    for host, rate in hosts.items():
        product = Metric(name="host.system.product", unit="1", values={"host": host[0]})
        figure = builders.observation(name, 2e10 * rate, scope="host", stage="benchmark", size_bytes=1 << 30)
        evidence[host] = host_evidence(plan, host, path, product, observations=(figure,))
    criterion = {"collective.all_reduce.busbw": "busbw-vs-fleet", "training.throughput": "training-vs-fleet"}[name]
    verdicts = judge(plan, evidence, (pack_of("l40s", criterion),))
    judged = {item.host: item.verdict for item in verdicts if item.criterion == criterion}
    assert {host for host, verdict in judged.items() if verdict == FAIL} == {"a4", "b2"}
    assert judged.keys() == hosts.keys()
