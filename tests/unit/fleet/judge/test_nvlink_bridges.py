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
        found = failed({"h1": (count, LINKS[model])}, "nvlink-bridges", model)
        expected = {} if count in (0, LINKS[model]) else {("h1", "gpu=0"): "reseat"}
        assert found == expected, count


@pytest.mark.parametrize("model", LINKS)
@pytest.mark.parametrize("lost", [1, LINKS_OF_A_BRIDGE, -1])
def test_links_that_are_lost_during_the_run_fail(model: str, lost: int) -> None:
    full = LINKS[model]
    left = 0 if lost < 0 else full - lost
    found = failed({"h1": (full, full)}, "nvlink-bridges", model, later=(left, left))
    assert found == {("h1", "gpu=0"): "reseat", ("h1", "gpu=1"): "reseat"}


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
    found = failed(fleet, "nvlink-vs-fleet", model)
    assert found == {("h0", "gpu=0"): action, ("h0", "gpu=1"): action}


def wired(host: str, paths: Mapping[tuple[int, int], str]) -> HostView:
    """Return a host of three GPUs with these paths between them."""
    names = {
        f"gpu={one},peer={two}": paths.get((min(one, two), max(one, two)), "SYS")
        for one, two in itertools.permutations(range(3), 2)
    }
    plan = one_figure_plan("h1", "h2", gpu_count=3)
    return host_view(plan, host, Metric(name="gpu.peer.link", unit="1", values=names))


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
