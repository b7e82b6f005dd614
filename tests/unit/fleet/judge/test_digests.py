"""Test silent-corruption detection through the judge and the report: a GPU whose digest differs from the majority fails.

A digest is one number, computed from all bits of the result of a computation.

`test_digest_edges.py` tests the boundary conditions of the comparison itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import read_pack, read_packs
from fleet.judge.judge import Evidence, judge
from fleet.report.merge import merge
from schemas.benchmarks import DIGEST_WORKLOADS
from schemas.plans import Plan
from schemas.records import ERROR, UNSUPPORTED, Metric, Observation
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict
from tests import builders

PACKS = read_packs([])
GOOD, BAD, WORSE = "00c0ffee00c0ffee", "00c0ffee00c0ffef", "1111111111111111"
WORKLOADS = ("gemm", "reduction", "training_step")


def gangless_plan(*hosts: str, gpu_count: int) -> Plan:
    """Return a plan without gangs, so that it may have a single host. It has only the benchmarks of `with_comparisons`."""
    return with_comparisons(builders.plan(*hosts, gpu_count=gpu_count, rackproof_gang="none"))


def with_comparisons(plan: Plan) -> Plan:
    """Return the plan with only the benchmarks that compare results or copies bit by bit."""
    planned = plan.stage("benchmark").benchmarks
    kept = {name: planned[name] for name in ("digest", "group_copy") if name in planned}
    return builders.with_benchmarks(plan, benchmark=kept)


def evidence_of(plan: Plan, digests: Mapping[tuple[str, str], str]) -> dict[str, Evidence]:
    """Return evidence of a healthy fleet with these digests of the workload `gemm`: (host, scope) -> digest."""
    return with_digests(plan, {(host, scope, "gemm"): value for (host, scope), value in digests.items()})


def with_digests(plan: Plan, digests: Mapping[tuple[str, str, str], str]) -> dict[str, Evidence]:
    """Return evidence of a healthy fleet with these digests: (host, scope, workload) -> digest."""
    evidence = builders.evidence(plan)
    for host in evidence:

        def change(observation: Observation, host: str = host) -> Observation:
            if observation.name != "digest.value":
                return observation
            key = (host, observation.scope, str(observation.params["workload"]))
            return replace(observation, value=digests.get(key, observation.value))

        evidence[host] = builders.with_observations(evidence[host], change)
    return evidence


def digest_verdicts(plan: Plan, evidence: dict[str, Evidence]) -> list[Verdict]:
    return [item for item in judge(plan, evidence, PACKS) if item.criterion == "digest-majority"]


def findings(plan: Plan, evidence: dict[str, Evidence]) -> list[Verdict]:
    return [item for item in digest_verdicts(plan, evidence) if item.verdict != PASS]


def test_equal_digests_pass_for_each_gpu_and_workload() -> None:
    plan = gangless_plan("h1", gpu_count=4)
    actual = digest_verdicts(plan, builders.evidence(plan))
    assert Counter(item.verdict for item in actual) == {PASS: 4 * len(WORKLOADS)}
    assert {item.reason for item in actual} == {f"found {GOOD}, as on all 4 comparable GPUs"}


def test_only_the_differing_gpu_fails() -> None:
    plan = gangless_plan("h1", gpu_count=4)
    [verdict] = findings(plan, evidence_of(plan, {("h1", "gpu=2"): BAD}))
    assert (verdict.host, verdict.scope, verdict.serial, verdict.verdict, verdict.action) == (
        "h1",
        "gpu=2",
        "h1-2",
        FAIL,
        "rma",
    )
    assert (verdict.value, verdict.limit, verdict.params["workload"]) == (BAD, GOOD, "gemm")
    assert f"3 of 4 GPUs of its model and software agree on {GOOD}" in verdict.reason
    assert "the GPU with serial h1-2 does not" in verdict.reason
    assert "the 3 other comparable GPUs of its host agree with the majority" in verdict.reason
    assert "Silent Data Corruptions" in verdict.source


def test_single_gpu_hosts_are_compared_with_each_other() -> None:
    plan = gangless_plan("h1", "h2", "h3", gpu_count=1)
    [verdict] = findings(plan, evidence_of(plan, {("h2", "gpu=0"): BAD}))
    assert (verdict.host, verdict.serial, verdict.verdict) == ("h2", "h2-0", FAIL)
    assert "its host has no other comparable GPU" in verdict.reason


def test_reason_states_that_the_other_gpu_of_the_host_differs_too() -> None:
    plan = gangless_plan("h1", "h2", "h3", gpu_count=2)
    verdicts = findings(plan, evidence_of(plan, {("h3", "gpu=0"): BAD, ("h3", "gpu=1"): WORSE}))
    assert [(item.host, item.scope, item.verdict) for item in verdicts] == [
        ("h3", "gpu=0", FAIL),
        ("h3", "gpu=1", FAIL),
    ]
    assert all(
        "the only other comparable GPU of its host differs from the majority too" in item.reason for item in verdicts
    )


@pytest.mark.parametrize(
    ("gpu_count", "digests"),
    [
        (2, {("h1", "gpu=1"): BAD}),
        (4, {("h1", "gpu=2"): BAD, ("h1", "gpu=3"): BAD}),
        (3, {("h1", "gpu=1"): BAD, ("h1", "gpu=2"): WORSE}),
        (4, {("h1", "gpu=2"): BAD, ("h1", "gpu=3"): WORSE}),
    ],
    ids=["two GPUs that differ", "two against two", "three different digests", "half is no majority"],
)
def test_every_gpu_is_inconclusive_without_a_majority(gpu_count: int, digests: dict[Any, str]) -> None:
    plan = gangless_plan("h1", gpu_count=gpu_count)
    verdicts = findings(plan, evidence_of(plan, digests))
    assert [item.verdict for item in verdicts] == [INCONCLUSIVE] * gpu_count
    assert all("digests differ and no majority shows which is right" in item.reason for item in verdicts)
    assert {item.action for item in verdicts} == {"none"}


def with_software(evidence: Evidence, **software: str) -> Evidence:
    return replace(
        evidence, records=tuple(replace(item, software={**item.software, **software}) for item in evidence.records)
    )


def with_driver(evidence: Evidence, version: str) -> Evidence:
    """Return the evidence with this driver version in the snapshot after the benchmarks."""
    taken = builders.snapshot(range(1), stage="benchmark", phase="after")
    driver = Metric(name="driver.version", unit="1", values={"host": version})
    return builders.with_snapshot(evidence, replace(taken, metrics=(*taken.metrics, driver)))


@pytest.mark.parametrize("what", ["", "torch", "cuda", "cublas", "cudnn", "nccl", "driver"])
def test_gpus_with_different_software_are_not_compared(what: str) -> None:
    """Two groups of three hosts with different digests pass only if their software differs, too."""
    plan = gangless_plan(*"abcdef", gpu_count=1)
    evidence = evidence_of(plan, {(host, "gpu=0"): BAD for host in "def"})
    for host in "def" if what else "":
        other = (
            with_driver(evidence[host], "600.1") if what == "driver" else with_software(evidence[host], **{what: "9"})
        )
        evidence[host] = other
    verdicts = digest_verdicts(plan, evidence)
    assert {item.host for item in verdicts if item.verdict != PASS} == (set() if what else set("abcdef"))
    assert len(verdicts) == 6 * len(WORKLOADS)


def test_gpus_of_different_models_are_not_compared() -> None:
    plan = gangless_plan("h1", "h2", gpu_count=3)
    evidence = evidence_of(plan, {("h2", f"gpu={index}"): BAD for index in range(3)})
    other = (
        replace(record, gpus=tuple(replace(gpu, name="NVIDIA H100 80GB HBM3") for gpu in record.gpus))
        for record in evidence["h2"].records
    )
    evidence["h2"] = Evidence(records=tuple(other))
    assert findings(plan, evidence) == []


def test_missing_digest_has_no_vote() -> None:
    plan = gangless_plan("h1", gpu_count=4)
    evidence = evidence_of(plan, {("h1", "gpu=3"): BAD})

    def change(observation: Observation) -> Observation:
        hit = (
            observation.name == "digest.value"
            and observation.scope == "gpu=0"
            and observation.params["workload"] == "gemm"
        )
        return replace(observation, status=ERROR, value=None, reason="CUDA error") if hit else observation

    evidence["h1"] = builders.with_observations(evidence["h1"], change)
    assert [(item.scope, item.verdict) for item in findings(plan, evidence)] == [("gpu=3", FAIL)]
    assert "2 of 3 GPUs" in findings(plan, evidence)[0].reason


def test_single_gpu_is_not_judged() -> None:
    plan = gangless_plan("h1", gpu_count=1)
    evidence = builders.evidence(plan)
    assert digest_verdicts(plan, evidence) == []
    report = merge(plan, evidence, PACKS)
    assert "digest.value in stage benchmark" in report.unjudged
    assert any(line.startswith("Digests of 1 of 1 GPUs: NOT JUDGED") for line in report.acceptance.summary)


def test_unjudged_gpu_is_named() -> None:
    plan = gangless_plan("h1", "h2", "h3", gpu_count=1)
    evidence = builders.evidence(plan)
    evidence["h3"] = with_software(evidence["h3"], torch="9")
    report = merge(plan, evidence, PACKS)
    assert "digest.value of h3 gpu=0 in stage benchmark" in report.unjudged
    assert not any(item.startswith("digest.value of h1") for item in report.unjudged)
    assert any(line.startswith("Digests of 1 of 3 GPUs: NOT JUDGED") for line in report.acceptance.summary)


def test_report_omits_digest_coverage_if_all_digests_are_compared() -> None:
    plan = gangless_plan("h1", gpu_count=4)
    report = merge(plan, builders.evidence(plan), PACKS)
    assert not any("digest" in item for item in report.unjudged)
    assert not any("Digests of" in line for line in report.acceptance.summary)
    assert "Silent corruption: PASS" in report.acceptance.summary


def extended_plan(*hosts: str, gpu_count: int) -> Plan:
    """Return a plan of the profile `extended`, which computes the digests of all workloads (DIGEST_WORKLOADS)."""
    return with_comparisons(builders.plan(*hosts, gpu_count=gpu_count, profile="extended", rackproof_gang="none"))


def test_each_workload_is_compared_only_between_equal_gpus() -> None:
    """One GPU of six with another digest fails; here, it is not the same GPU for every workload.

    If three of six have another digest, there is no majority: all are inconclusive. If these three hosts also have another
    version of cuBLAS, they are compared only with each other, and pass.
    """
    plan = extended_plan(*"abcdef", gpu_count=1)
    right = {workload: f"{number:016x}" for number, workload in enumerate(DIGEST_WORKLOADS)}
    healthy = {(host, "gpu=0", workload): digest for host in "abcdef" for workload, digest in right.items()}
    host_of = {workload: "abcdef"[number % 6] for number, workload in enumerate(DIGEST_WORKLOADS)}
    one = with_digests(plan, healthy | {(host, "gpu=0", workload): BAD for workload, host in host_of.items()})
    failed = [(str(item.params["workload"]), item.host, item.verdict) for item in findings(plan, one)]
    assert sorted(failed) == sorted((workload, host, FAIL) for workload, host in host_of.items())
    several = with_digests(plan, healthy | {(host, "gpu=0", workload): BAD for host in "def" for workload in right})
    unknown = [(str(item.params["workload"]), item.host, item.verdict) for item in findings(plan, several)]
    assert sorted(unknown) == sorted((workload, host, INCONCLUSIVE) for host in "abcdef" for workload in right)
    several |= {host: with_software(several[host], cublas="12.9.1") for host in "def"}
    assert findings(plan, several) == []


@pytest.mark.parametrize(
    ("gpu_name", "workload", "judged"),
    [
        ("NVIDIA H200", "gemm_fp4", []),
        ("NVIDIA H200", "gemm_fp8_e4m3", ["digest.value", "digest.mismatches"]),
        ("NVIDIA A100-SXM4-80GB", "gemm_fp8_e4m3", []),
        ("NVIDIA A100-SXM4-80GB", "gemm_fp8_e5m2", []),
        ("NVIDIA A100-SXM4-80GB", "gemm_fp4", []),
        ("NVIDIA A100-SXM4-80GB", "gemm_int8", ["digest.value", "digest.mismatches"]),
        ("Tesla T4", "gemm_tf32", []),
        ("NVIDIA B200", "gemm_fp4", []),  # older versions of torch lack fp4
        ("NVIDIA B200", "gemm_fp8_e4m3", ["digest.value", "digest.mismatches"]),
    ],
)
def test_unsupported_number_format_is_inconclusive_unless_the_gpu_or_an_older_torch_lacks_it(
    gpu_name: str, workload: str, judged: list[str]
) -> None:
    plan = extended_plan("h1", gpu_count=1)

    def change(observation: Observation) -> Observation:
        hit = observation.name.startswith("digest.") and observation.params.get("workload") == workload
        return replace(observation, status=UNSUPPORTED, value=None, reason="no such type") if hit else observation

    evidence = builders.with_observations(builders.evidence(plan)["h1"], change)
    gpus = [tuple(replace(gpu, name=gpu_name) for gpu in record.gpus) for record in evidence.records]
    records = [replace(record, gpus=named) for record, named in zip(evidence.records, gpus, strict=True)]
    verdicts = judge(plan, {"h1": Evidence(records=tuple(records))}, PACKS)
    of_type = [item for item in verdicts if item.params.get("workload") == workload]
    assert [(item.name, item.verdict) for item in of_type] == [(name, INCONCLUSIVE) for name in judged]


@pytest.mark.parametrize("status", [UNSUPPORTED, ERROR])
@pytest.mark.parametrize("model", ["b200", "b300", "gb200", "gb300", "rtx-pro-6000-server"])
def test_fp4_on_blackwell_is_judged_if_torch_supports_it(model: str, status: str) -> None:
    """A workload that torch does not support (UNSUPPORTED) has no verdict. One that failed (ERROR) is inconclusive."""
    plan = extended_plan("h1", gpu_count=1)
    pack = read_pack(model)
    gpu_name = sorted(pack.gpu_names)[0]

    def judged(change: Callable[[Observation], Observation]) -> list[tuple[str, str]]:
        evidence = builders.with_observations(builders.evidence(plan)["h1"], change)
        records = [
            replace(record, gpus=tuple(replace(gpu, name=gpu_name) for gpu in record.gpus))
            for record in evidence.records
        ]
        verdicts = judge(plan, {"h1": Evidence(records=tuple(records))}, PACKS)
        return [(item.name, item.verdict) for item in verdicts if item.params.get("workload") == "gemm_fp4"]

    def without(item: Observation) -> Observation:
        hit = item.params.get("workload") == "gemm_fp4"
        return replace(item, status=status, value=None, reason="torch 2.7.0 has no fp4") if hit else item

    def wrong(item: Observation) -> Observation:
        hit = item.name == "digest.mismatches" and item.params.get("workload") == "gemm_fp4"
        return replace(item, value=1) if hit else item

    missing = [("digest.value", INCONCLUSIVE), ("digest.mismatches", INCONCLUSIVE)]
    assert judged(without) == ([] if status == UNSUPPORTED else missing)
    assert ("digest.mismatches", FAIL) in judged(wrong)


@pytest.mark.parametrize(
    ("name", "criterion"),
    [("digest.wrong_peer_copies", "digest-peer-copies"), ("group_copy.wrong_bytes", "group-copy-wrong-bytes")],
)
def test_wrong_copy_fails_the_pair_and_both_gpus_are_named(name: str, criterion: str) -> None:
    plan = extended_plan("h1", gpu_count=3)

    def change(observation: Observation) -> Observation:
        hit = (observation.name, observation.scope) == (name, "gpu=1,peer=2")
        return replace(observation, value=2) if hit else observation

    evidence = {"h1": builders.with_observations(builders.evidence(plan)["h1"], change)}
    verdicts = [item for item in judge(plan, evidence, PACKS) if item.name == name]
    assert {item.scope for item in verdicts} >= {"gpu=0,peer=1", "gpu=1,peer=2", "gpu=2,peer=1"}
    (failed,) = (item for item in verdicts if item.verdict == FAIL)
    assert (failed.scope, failed.criterion) == ("gpu=1,peer=2", criterion)
    titles = [item.title for item in merge(plan, evidence, PACKS).causes]
    assert any(title.startswith("GPU 1 of h1 and GPU 2 copy wrong data between them") for title in titles)
