"""A copy is a measured transfer between a GPU and host memory. What the record states about it must be consistent.

This is checked for the NUMA node of the memory, and for the number of GPUs that copied at once.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.judge.memory_locality import locality_problems
from schemas.records import SKIPPED, Metric, Observation
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_view, one_figure_plan

PLAN = one_figure_plan("h1", gpu_count=2)


def copy(
    numa: str | None = "local", *, devices: int = 1, scope: str = "gpu=0", stage: str = "benchmark", **params: object
) -> Observation:
    shared = {"direction": "both_ways", "size_bytes": 1 << 20, "devices": devices}
    params = {**shared, **({"numa": numa} if numa else {}), **params}
    return builders.observation("host_copy.bandwidth", 5e10, scope=scope, stage=stage, **params)


def problems(*copies: Observation, node: int | None = None, nodes: int | None = None) -> list[str]:
    """Return the reason of each problem with these copies.

    `node`: the NUMA node of GPU 0; `nodes`: the number of NUMA nodes. None: not reported by the host.
    """
    metrics = [Metric(name="pcie.numa_node", unit="1", values={"gpu=0": node})] if node is not None else []
    metrics += [Metric(name="host.numa.count", unit="1", values={"host": nodes})] if nodes is not None else []
    result = list(locality_problems(host_view(PLAN, "h1", *metrics, observations=copies)))
    assert {(name, scope, stage) for name, scope, _, stage in result} <= {
        ("host_copy.bandwidth", item.scope, item.stage) for item in copies
    }
    return [reason for _, _, reason, _ in result]


NOT_LOCAL = (
    "the copy uses memory of another NUMA node, "
    "but the record has no copy of the same GPU, stage, direction and size that uses memory of the GPU's own node"
)


@pytest.mark.parametrize(
    ("copies", "reasons"),
    [
        ([copy()], []),
        ([copy(devices=2)], []),
        ([copy(devices=3)], ["copies of 3 GPUs at once, but only 2 GPUs of the host are under test"]),
        ([copy(None)], ["its parameter `numa` is None, expected `local`, `remote` or `unknown`"]),
        ([copy("near")], ["its parameter `numa` is near, expected `local`, `remote` or `unknown`"]),
        ([copy("unknown")], []),
        ([copy("remote"), copy()], []),
        ([copy("remote"), copy(devices=2)], []),
        ([copy("remote")], [NOT_LOCAL]),
        ([copy("remote"), copy("unknown")], [NOT_LOCAL]),
        ([copy("remote"), copy(scope="gpu=1")], [NOT_LOCAL]),
        ([copy("remote"), copy(stage="soak")], [NOT_LOCAL]),
        ([copy("remote"), copy(direction="host_to_device")], [NOT_LOCAL]),
        ([copy("remote"), copy(size_bytes=1)], [NOT_LOCAL]),
        ([copy("remote"), replace(copy(), status=SKIPPED, value=None, reason="no memory")], [NOT_LOCAL]),
        ([replace(copy(None), status=SKIPPED, value=None, reason="no memory")], []),
    ],
)  # fmt: skip
def test_copy_must_be_consistent_with_the_other_copies_and_with_the_number_of_gpus(
    copies: list[Observation], reasons: list[str]
) -> None:
    assert problems(*copies) == reasons


@pytest.mark.parametrize(
    ("numa", "node", "nodes", "reason"),
    [
        ("unknown", 0, 2, "the NUMA node of the memory is unknown, but the host reports node 0 for the GPU"),
        ("unknown", 1, 2, "the NUMA node of the memory is unknown, but the host reports node 1 for the GPU"),
        ("unknown", -1, 2, ""),
        ("unknown", None, 2, ""),
        ("unknown", None, 1, "the NUMA node of the memory is unknown, but the host has only one NUMA node"),
        ("unknown", -1, 1, "the NUMA node of the memory is unknown, but the host has only one NUMA node"),
        ("local", 0, 1, ""),
    ],
)
def test_unknown_memory_node_is_a_problem_if_the_gpu_node_is_known_or_the_host_has_one_node(
    numa: str, node: int | None, nodes: int, reason: str
) -> None:
    assert problems(copy(numa), node=node, nodes=nodes) == ([reason] if reason else [])
