"""Test the probability with which the comparisons of a benchmark find a planted fault, and how many results they compare.

A planted fault is an assumption: a GPU returns wrong bits without reporting an error. A result, such as a matrix product, has
many elements.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.planted_faults import Comparison, comparisons, digest_elements
from schemas.plans import Plan
from schemas.records import SKIPPED, Observation
from schemas.stages import BENCHMARK
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan


@pytest.mark.parametrize(
    ("workload", "size", "elements"),
    [
        ("gemm", 1000, 1_000_000),
        ("sort", 1000, 2_000_000),
        ("rng", 1000, 2_000_000),
        ("copy", 1000, 2_000_000),
        ("reduction", 1000, 3000),
        ("training_step", 1000, 2 * 250**2),
        ("training_step", 64, 2 * 16**2),
        ("training_step", 68, 2 * 17**2),
        ("attention", 1000, 1000 * 7 * 128),
        ("attention", 64, 64 * 64),
        ("attention", 128, 128 * 128),
        ("convolution", 1024, 1024 * 1024 + 9 * 64**2),
        ("convolution", 640, 409_600 // 1000 * 1000 + 9 * 40**2),
        ("convolution", 32, 1024 + 9 * 4**2),
    ],
)
def test_number_of_compared_elements_follows_from_workload_and_size(workload: str, size: int, elements: int) -> None:
    assert digest_elements(workload, size) == elements


def comparison(repetitions: float | None, elements: int = 1) -> Comparison:
    return Comparison(
        model="m", profile="p", stage="benchmark", benchmark="digest", case="gemm", repetitions=repetitions, elements=elements,
        always_alone=0.0, always_compared=1.0,
    )  # fmt: skip


def test_found_is_the_probability_that_at_least_one_compared_result_or_element_is_wrong() -> None:
    assert comparison(2, 5).found(0.1, per_element=False) == pytest.approx(1 - 0.9**2)
    assert comparison(2, 5).found(0.1, per_element=True) == pytest.approx(1 - 0.9**10)
    assert comparison(None).found(0.1, per_element=True) is None


def test_fault_with_the_smallest_rate_is_found_with_a_probability_of_99_percent() -> None:
    compared = comparison(300, 7)
    for per_element, trials in ((False, 300), (True, 2100)):
        rate = compared.smallest_rate(per_element)
        assert rate is not None
        assert rate == pytest.approx(1 - math.exp(math.log(0.01) / trials))
        assert compared.found(rate, per_element) == pytest.approx(0.99)
    assert comparison(None).smallest_rate(per_element=True) is None


PLAN = builders.with_benchmarks(
    one_figure_plan("h1", gpu_count=2),
    benchmark={"digest": {"workloads": ["gemm", "sort"], "peer_copies": ["copy"], "seconds": 6}},
)


def figure(name: str, value: Any, scope: str = "gpu=0", **params: Any) -> Observation:
    return builders.observation(name, value, scope=scope, **params)


def profile(**benchmarks: Any) -> dict[str, Any]:
    return {"name": "own", "stages": {BENCHMARK: {"benchmarks": benchmarks}}}


DIGEST = {"digest": {"workloads": ["gemm", "copy"], "peer_copies": ["copy"], "seconds": 12, "size": 64}}


def of_run(*figures: Observation, plan: Plan = PLAN, chosen: Any = DIGEST) -> dict[str, Comparison]:
    """Return `Comparison.case` -> comparison, for a run with these figures and a profile with the benchmarks `chosen`."""
    evidence = {"h1": host_evidence(plan, "h1", observations=figures)}
    return {item.case: item for item in comparisons([(plan, evidence)], [profile(**chosen)])}


def test_repetitions_are_scaled_to_the_time_that_the_profile_gives_a_workload() -> None:
    counts = (figure("digest.mismatches", 0, workload="gemm", repetitions=100),
              figure("digest.mismatches", 0, "gpu=1", workload="gemm", repetitions=40),
              figure("digest.wrong_peer_copies", 0, "gpu=0,peer=1", copy="copy", repetitions=8))  # fmt: skip
    result = of_run(*counts)
    # The run divided its 6 s equally between `gemm`, `sort` and the copies between GPUs: 2 s each. In 2 s, gpu=1 (the slower GPU)
    # repeated `gemm` 40 times. The profile divides 12 s between `gemm`, `copy` and the copies between GPUs: 4 s each. In 4 s,
    # `gemm` is repeated 80 times. The 80 results are compared with one earlier result, so 81 results are checked. A copy is
    # compared with the right data, so no result is added. The run measured `copy` only between GPUs, 8 times in 2 s. This rate is
    # used for the workload `copy` too.
    assert result["gemm"].repetitions == pytest.approx(81)
    assert result["copy"].repetitions == pytest.approx(8 / 2 * 4)
    assert result["copy to each of the other GPUs"].repetitions == pytest.approx(16)
    assert (result["gemm"].elements, result["copy to each of the other GPUs"].elements) == (64 * 64, 2 * 64 * 64)
    assert {(item.model, item.profile, item.stage, item.benchmark) for item in result.values()} == {
        ("NVIDIA H200", "own", BENCHMARK, "digest")
    }


@pytest.mark.parametrize(
    "unusable",
    [
        replace(
            figure("digest.mismatches", 0, workload="sort", repetitions=9), status=SKIPPED, value=None, reason="no"
        ),
        figure("digest.mismatches", 0, "gpu=7", workload="sort", repetitions=9),
        figure("digest.value", "c0ffee", workload="sort", repetitions=9),
        replace(figure("digest.mismatches", 0, workload="sort", repetitions=9), stage="gang"),
        figure("digest.mismatches", 0, workload="sort"),
    ],
    ids=[
        "not measured",
        "GPU that the record does not list",
        "figure that does not count mismatches",
        "stage without digest",
        "no number of repetitions",
    ],
)
def test_unusable_figure_gives_no_repetitions(unusable: Observation) -> None:
    known = figure("digest.mismatches", 0, workload="gemm", repetitions=100)
    result = of_run(known, unusable, chosen={"digest": {"workloads": ["sort"], "peer_copies": [], "seconds": 1}})
    assert result["sort"].repetitions is None


def test_number_of_matrix_products_that_stress_compares_follows_from_its_time_in_the_profile() -> None:
    known = figure("digest.mismatches", 0, workload="gemm", repetitions=1)
    chosen = {"seconds": 2.5, "settle_seconds": 1.0, "dtypes": ["bf16"], "size": 10}
    short = of_run(known, chosen={"stress": chosen})["bf16"]
    long = of_run(known, chosen={"stress": {**chosen, "seconds": 20.0}})["bf16"]
    # The short test takes 2.5 s + 1 s, and compares a matrix product every 0.25 s (a tenth of `seconds`). The long test takes
    # 20 s + 1 s, and compares one every 0.5 s (the longest interval).
    assert (short.repetitions, long.repetitions) == (14, 42)
    assert (short.elements, short.always_alone, short.always_compared) == (100, 0.0, 0.0)


def test_amount_of_tested_memory_is_that_of_the_gpu_with_the_least_tested_memory() -> None:
    known = figure("digest.mismatches", 0, workload="gemm", repetitions=1)
    tested = (
        figure("integrity.tested_share", 0.9, bytes=8000),
        figure("integrity.tested_share", 0.8, "gpu=1", bytes=7000),
    )
    chosen = {"integrity": {"patterns": ["zeros", "ones"]}}
    memory = of_run(known, *tested, chosen=chosen)["2 patterns"]
    # An element is a word of 8 bytes.
    assert (memory.repetitions, memory.elements, memory.always_alone, memory.always_compared) == (
        2.0,
        7000 // 8,
        0.8,
        0.8,
    )
    assert of_run(known, chosen=chosen) == {}


def test_host_without_evidence_gives_no_comparison() -> None:
    assert comparisons([(PLAN, {})], [profile(**DIGEST)]) == []
    assert comparisons([(PLAN, {"h1": Evidence()})], [profile(**DIGEST)]) == []
