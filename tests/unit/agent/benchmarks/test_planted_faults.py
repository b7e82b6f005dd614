"""Test the formulas for the probability that a run finds a fault (`fleet/judge/planted_faults.py`).

The tests plant faults: they flip bits of results on a CPU. The share of runs that find the fault must agree with the formula.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.compute import digest, digest_workloads, stress
from agent.benchmarks.memory import integrity
from agent.benchmarks.memory.memory_under_test import MemoryUnderTest
from agent.benchmarks.runtime.context import Context
from fleet.judge import planted_faults
from fleet.judge.planted_faults import Comparison, digest_elements
from schemas.benchmarks import CPU_DIGEST_WORKLOADS
from tests.unit.agent.benchmarks.test_measuring import context, values

CPU = torch.device("cpu")
SIZE, TRIALS, REPETITIONS = 16, 400, 5
"""Number of rows of the matrices, number of runs of a test, and number of digests in a run.

With a time budget of 0 s, the benchmark `digest` computes REPETITIONS = 5 digests: the first, and four that are compared with it.
For the workload `copy`, all five are compared with the digest of the right result.
"""

Pattern = Callable[[torch.Tensor, random.Random], None]


def _rng(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - no secret


def flip(words: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of one signed word."""
    width = words.element_size() * 8
    words[index] ^= -(1 << bit) if bit == width - 1 else 1 << bit


def words_of(result: torch.Tensor) -> torch.Tensor:
    return result.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[result.element_size()])


def one_bit(result: torch.Tensor, rng: random.Random) -> None:
    words = words_of(result)
    flip(words, rng.randrange(words.numel()), rng.randrange(words.element_size() * 8))


def few_bits(result: torch.Tensor, rng: random.Random) -> None:
    words = words_of(result)
    bits = words.element_size() * 8
    for position in rng.sample(range(words.numel() * bits), rng.randint(2, 8)):
        flip(words, position // bits, position % bits)


def one_lane(result: torch.Tensor, rng: random.Random) -> None:
    """Flip the same bit of every 32nd word."""
    words = words_of(result)
    bit = rng.randrange(words.element_size() * 8)
    for index in range(rng.randrange(32), words.numel(), 32):
        flip(words, index, bit)


def published_mix(result: torch.Tensor, rng: random.Random) -> None:
    """Flip one bit in 40 % of the cases, else 2 to 8 bits. `fleet/judge/planted_faults.py` names the source."""
    (one_bit if rng.random() < 0.4 else few_bits)(result, rng)


PATTERNS = [one_bit, few_bits, one_lane, published_mix]


def comparison(**over: Any) -> Comparison:
    names = {"model": "m", "profile": "p", "stage": "s", "benchmark": "digest", "case": "gemm"}
    return Comparison(
        **{**names, "repetitions": 5.0, "elements": 256, "always_alone": 0.0, "always_compared": 1.0, **over}
    )


def is_near(found: int, trials: int, probability: float | None) -> bool:
    """Return whether `found` is within four standard deviations of `trials` times `probability`, its expected value."""
    assert probability is not None
    return abs(found - trials * probability) <= 4 * math.sqrt(trials * probability * (1 - probability))


def found_by_digest(
    tmp_path: Path, workload: str, plant: Callable[[torch.Tensor, random.Random], object], seed: int
) -> int:
    """Return the number of runs, out of TRIALS, in which the benchmark counts a mismatch; `plant` is applied to every result."""
    rng, right = _rng(seed), digest_workloads.WORKLOADS[workload](SIZE, CPU)
    result = right.compute().clone()

    def compute() -> torch.Tensor:
        wrong = result.clone()
        plant(wrong, rng)
        return wrong

    rank = context(tmp_path)
    computation = digest.Computation(compute, right.expected)
    return sum(repeat(rank, computation).mismatches > 0 for _ in range(TRIALS))


def repeat(rank: Context, computation: digest.Computation) -> digest.Digests:
    """Compute REPETITIONS digests of the result; return the first of them, and the number of mismatches."""
    digests = digest.Digests()
    digest._repeat(rank, computation, 0.0, digests)
    return digests


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("workload", ["gemm", "gemm_fp64", "softmax", "copy"])
def test_fault_in_some_repetitions_is_found_as_often_as_the_formula_predicts(
    tmp_path: Path, workload: str, pattern: Pattern
) -> None:
    rate = 0.2

    def plant(result: torch.Tensor, rng: random.Random) -> None:
        if rng.random() < rate:
            pattern(result, rng)

    found = found_by_digest(tmp_path, workload, plant, seed=1)
    computed = comparison(repetitions=float(REPETITIONS)).found(rate, per_element=False)
    assert computed == pytest.approx(1 - 0.8**5)
    assert is_near(found, TRIALS, computed), (found, computed)


@pytest.mark.parametrize("workload", ["gemm", "gemm_fp64", "sort"])
def test_fault_in_some_elements_is_found_as_often_as_the_formula_predicts(tmp_path: Path, workload: str) -> None:
    elements = digest_elements(workload, SIZE)
    rate = 1.0 / (elements * REPETITIONS)

    def plant(result: torch.Tensor, rng: random.Random) -> None:
        words = words_of(result)
        wrong = torch.rand(words.numel(), generator=generator) < rate
        for index in wrong.nonzero().view(-1).tolist():
            flip(words, index, rng.randrange(words.element_size() * 8))

    generator = torch.Generator().manual_seed(5)
    found = found_by_digest(tmp_path, workload, plant, seed=2)
    computed = comparison(repetitions=float(REPETITIONS), elements=elements).found(rate, per_element=True)
    assert computed == pytest.approx(1 - math.exp(-1), abs=0.01)
    assert is_near(found, TRIALS, computed), (found, computed)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("workload", CPU_DIGEST_WORKLOADS)
def test_fault_in_every_repetition_changes_the_digest(tmp_path: Path, workload: str, pattern: Pattern) -> None:
    """All repetitions have the same wrong result, so their digests match each other.

    Only the workload `copy` knows the right result, so only its digests count as mismatches.
    """
    right = digest_workloads.WORKLOADS[workload](SIZE, CPU)
    healthy = right.compute().clone()
    rank, rng, unchanged_digests = context(tmp_path), _rng(3), 0
    right_digest = repeat(rank, digest.Computation(healthy.clone, right.expected)).first
    for _ in range(25):
        wrong = healthy.clone()
        pattern(wrong, rng)
        digests = repeat(rank, digest.Computation(lambda wrong=wrong: wrong, right.expected))
        unchanged_digests += digests.first == right_digest
        assert digests.mismatches == (digests.count if workload == "copy" else 0)
    assert unchanged_digests == 0


def test_memory_pass_with_wrong_bits_is_found_as_often_as_the_formula_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate, trials, patterns = 0.2, 100, ["zeros", "checkerboard", "random"]
    rng, write = _rng(4), MemoryUnderTest.write

    def write_and_flip(self: MemoryUnderTest, *arguments: Any) -> None:
        write(self, *arguments)
        if rng.random() < rate:
            few_bits(chunks[-1], rng)

    chunks: list[torch.Tensor] = []
    allocate = integrity._allocate

    def remember(wanted: int, device: torch.device) -> Any:
        chunks.extend(allocate(wanted, device))
        return iter(chunks[-1:])

    monkeypatch.setattr(integrity, "_allocate", remember)
    monkeypatch.setattr(MemoryUnderTest, "write", write_and_flip)
    result = 0
    for _ in range(trials):
        rank = context(tmp_path)
        integrity.run(rank, {"patterns": patterns, "share": 0.98, "most_bytes": 8192, "seconds": 0.0})
        result += any(values(rank, "integrity.wrong_words"))
    computed = comparison(repetitions=float(len(patterns))).found(rate, per_element=False)
    assert is_near(result, trials, computed), (result, computed)


@pytest.mark.parametrize("workload", CPU_DIGEST_WORKLOADS)
@pytest.mark.parametrize("size", [64, 256])
def test_formulas_use_the_number_of_elements_of_the_result(workload: str, size: int) -> None:
    assert digest_workloads.WORKLOADS[workload](size, CPU).compute().numel() == digest_elements(workload, size)


def test_formulas_use_the_block_duration_of_stress() -> None:
    assert stress.BLOCK_S == planted_faults.STRESS_BLOCK_S


def test_fault_at_the_smallest_rate_is_found_with_99_percent_probability() -> None:
    case = comparison(repetitions=1872.0, elements=1 << 24)
    for per_element in (True, False):
        rate = case.smallest_rate(per_element)
        assert rate is not None
        assert case.found(rate, per_element) == pytest.approx(0.99)
    # Without a known number of repetitions there is no probability.
    assert comparison(repetitions=None).found(1e-6, per_element=True) is None
    assert comparison(repetitions=None).smallest_rate(per_element=False) is None
