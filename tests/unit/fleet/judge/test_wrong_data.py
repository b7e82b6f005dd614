"""Test that a count of wrong data rejects the host, even if the benchmark reports no rate. The cause names the part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.report.merge import merge
from schemas.records import ERROR, Observation
from schemas.reports import FAIL, REJECTED
from tests import builders

PACKS = read_packs([])
COPY = {"direction": "both_ways", "sharing": "alone", "numa": "local"}
WRONG, GANG = "GPU 2 of h1 gives wrong results", "gang all of h1 gives wrong results"
COUNTS: list[tuple[str, str, str, dict[str, Any], str, str]] = [
    ("gemm.wrong_products", "gemm.throughput", "gpu=2", {"dtype": "bf16"}, "gemm-wrong-products", WRONG),
    ("memory.wrong_elements", "memory.bandwidth", "gpu=2", {"op": "copy"}, "memory-wrong-elements", WRONG),
    ("host_copy.wrong_bytes", "host_copy.bandwidth", "gpu=2", COPY, "host-copy-wrong-bytes",
     "GPU 2 of h1 and the host copy wrong data between them"),
    ("peer_copy.wrong_bytes", "peer_copy.bandwidth", "gpu=2,peer=1", {}, "peer-copy-wrong-bytes",
     "GPU 2 of h1 and GPU 1 copy wrong data between them"),
]  # fmt: skip
"""Name of the count of wrong data, name of the rate that is not measured because of it, scope and parameters of both,
criterion that fails, and start of the title of the cause."""


@pytest.mark.parametrize(
    ("name", "rate", "scope", "params", "criterion", "title"), COUNTS, ids=[count[0] for count in COUNTS]
)
def test_wrong_data_rejects_the_host_and_names_the_part(
    name: str, rate: str, scope: str, params: dict[str, Any], criterion: str, title: str
) -> None:
    plan = builders.plan(gpu_count=4)
    evidence = builders.evidence(plan)

    def change(item: Observation) -> Observation:
        hit = item.name == rate and item.scope == scope and params.items() <= item.params.items()
        return replace(item, status=ERROR, value=None, samples=None, reason="wrong data") if hit else item

    changed = builders.with_observations(evidence["h1"], change)
    first, *others = changed.records
    count = builders.observation(name, 3, scope=scope, **params)
    records = (replace(first, observations=(*first.observations, count)), *others)
    report = merge(plan, {**evidence, "h1": replace(changed, records=records)}, PACKS)
    assert report.decision == REJECTED
    failed = [(item.host, item.scope, item.criterion) for item in report.verdicts if item.verdict == FAIL]
    assert failed == [("h1", scope, criterion)]
    assert any(cause.title.startswith(title) for cause in report.causes)


@pytest.mark.parametrize(("workload", "action"), [("gemm", "rma"), ("copy", "inspect_hardware")])
def test_action_is_rma_for_wrong_computations_but_not_for_wrong_copies(workload: str, action: str) -> None:
    plan = builders.plan("h1", gpu_count=4, profile="extended", rackproof_gang="none")
    evidence = builders.evidence(plan)

    def change(item: Observation) -> Observation:
        if item.scope != "gpu=2" or item.params.get("workload") != workload:
            return item
        return replace(item, value={"digest.mismatches": 3, "digest.value": "bad"}[item.name])

    report = merge(plan, {**evidence, "h1": builders.with_observations(evidence["h1"], change)}, PACKS)
    actions = {item.name: item.action for item in report.verdicts if item.verdict == FAIL}
    assert actions == {"digest.mismatches": action, "digest.value": action}
    assert [(cause.part, cause.action) for cause in report.causes] == [("gpu=2", action)]


GANG_COUNTS: list[tuple[str, str, str, str, str]] = [
    ("pairs.wrong_elements", "pairs.bandwidth", "gpu=1,partner=h3", "pairs-wrong-elements",
     "GPU 1 of h1 receives wrong data from h3"),
    ("mnnvl.wrong_elements", "", "gang=all", "mnnvl-wrong-elements", GANG),
    ("transformer.wrong_losses", "transformer.loss_ratio", "gang=all", "transformer-wrong-losses", GANG),
    ("model_parallel.wrong_losses", "model_parallel.loss_ratio", "gang=all", "model-parallel-wrong-losses", GANG),
    ("fashion_mnist.wrong_parameters", "fashion_mnist.accuracy", "gang=all", "fashion-mnist-wrong-parameters", GANG),
]  # fmt: skip
"""Name of the count of wrong data, name of the figure that is not measured because of it (empty: none), scope of both,
criterion that fails, and start of the title of the cause."""


@pytest.mark.parametrize(
    ("name", "rate", "scope", "criterion", "title"), GANG_COUNTS, ids=[count[0] for count in GANG_COUNTS]
)
def test_wrong_data_between_hosts_rejects_the_host_that_counted_it(
    name: str, rate: str, scope: str, criterion: str, title: str
) -> None:
    plan = builders.plan("h1", "h2", "h3", "h4", gpu_count=2, rackproof_gang="all")
    evidence = builders.evidence(plan)

    def change(item: Observation) -> Observation:
        hit = item.name == rate and item.scope == scope
        return replace(item, status=ERROR, value=None, samples=None, reason="wrong data") if hit else item

    host_record, gang_record = builders.with_observations(evidence["h1"], change).records
    count = builders.observation(name, 3, scope=scope, stage="gang", world_size=8)
    changed = replace(
        evidence["h1"], records=(host_record, replace(gang_record, observations=(*gang_record.observations, count)))
    )
    report = merge(plan, {**evidence, "h1": changed}, PACKS)
    assert report.decision == REJECTED
    failed = [(item.host, item.scope, item.criterion) for item in report.verdicts if item.verdict == FAIL]
    assert failed == [("h1", scope, criterion)]
    assert any(cause.title.startswith(title) for cause in report.causes), [cause.title for cause in report.causes]


@pytest.mark.parametrize(
    ("name", "missing"), [("integrity.wrong_words", "integrity.tested_share"), ("digest.mismatches", "digest.value")]
)
def test_errors_counted_before_the_gpu_failed_reject_the_host(name: str, missing: str) -> None:
    plan = builders.plan(gpu_count=4)
    evidence = builders.evidence(plan)

    def change(item: Observation) -> Observation:
        if item.scope == "gpu=2" and item.name == missing:
            return replace(
                item, status=ERROR, value=None, samples=None, reason="CUDA error: unspecified launch failure"
            )
        if item.scope == "gpu=2" and item.name == name:
            extent = {"passes": 0, "elapsed_s": 0.5} if name == "integrity.wrong_words" else {"repetitions": 8}
            return replace(item, value=2, params={**item.params, **extent})
        return item

    report = merge(plan, {**evidence, "h1": builders.with_observations(evidence["h1"], change)}, PACKS)
    assert report.decision == REJECTED
    failed = {(item.host, item.scope, item.name) for item in report.verdicts if item.verdict == FAIL}
    assert failed == {("h1", "gpu=2", name)}
    assert any(cause.title.startswith("GPU 2 of h1") for cause in report.causes)
