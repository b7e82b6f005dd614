"""Compute the probability that the benchmarks of a profile find a planted fault: a GPU returns wrong bits without an error.

The benchmarks repeat computations, and compare each result with the first result or with a known result.

A fault has a pattern (which bits of a result are wrong) and a rate (how often a result is wrong). A comparison
detects almost every pattern, so the probability depends mainly on the rate. Rates:

- *always*: every repetition has the same wrong bits. A comparison with the device's own first result cannot detect them.
- *per element*: each element of each result is wrong with probability p, independently of all others.
- *per repetition*: each result (a whole matrix product, a pass of a pattern over the memory) is wrong with probability p.

With R compared results of E elements, at least one is wrong with probability 1 - (1 - p)^(R·E) if p is per element, or with
probability 1 - (1 - p)^R if p is per repetition. For the benchmark `digest`, R comes from recorded runs: their repetitions per
second, times the time budget in the profile.

Patterns: "The Anatomy of Silent Data Corruption" (arXiv 2605.04213: gate-level faults of a data-center GPU, 63 CUDA programs)
reports in its abstract that less than 40 % of bit-flip events are single bits, that 1.01 % of corrupted results are NaN or
infinite, and that corrupted addresses are periodic, aligned with warps (32 threads). We assume that an event of several
bits flips 2 to 8 bits at any positions. The positions hardly matter, because results are compared bit by bit, NaN included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.judge.evidence import Evidence
from schemas.catalogue import settings
from schemas.plans import Plan
from schemas.records import MEASURED
from schemas.scopes import Scope

RATE = 1e-6
"""The table of `rackproof power --planted-faults` lists the probability that a fault with this rate p is found."""
FOUND = 0.99
"""The table also lists the smallest rate of a fault that is found with this probability."""
STRESS_BLOCK_S, STRESS_BLOCKS = 0.5, 10
"""The benchmark `stress` compares one matrix product every STRESS_BLOCK_S seconds, or every `seconds` / STRESS_BLOCKS if
that is shorter. `seconds` is a setting of the benchmark."""
COLLISION = 2.0**-32
"""Upper estimate of the probability that flips of several bits leave a digest unchanged, if the digest's factors are random.

A digest is the sum modulo 2⁶⁴ of words of at most 32 bits, each times its own odd factor. A flip of bit b adds ±2^b times a
factor. One flip alone always changes the sum. Flips of the highest bit, b = 31, are the most likely to cancel. Together they add
2³¹·s, where s is the sum of their factors, each with its sign. They cancel if s is 0 modulo 2³³. If the number of flips is odd,
s is odd, so they never cancel. If the number is even, s is even, and one in 2³² even numbers is 0 modulo 2³³.
"""
DIGEST_COUNTS = {"digest.mismatches": "workload", "digest.wrong_peer_copies": "copy"}
"""Figure with a parameter `repetitions` -> its parameter that names what was repeated: a workload, or a kind of copy."""
PATTERNS: Mapping[str, float] = {
    "one bit of one element": 0.0,
    "2 to 8 bits anywhere": COLLISION,
    "one lane: the same bit of every 32nd element": COLLISION,
    "published mix: 40 % one bit, else 2 to 8 bits": 0.6 * COLLISION,
}
"""Pattern -> upper limit of the probability that a digest stays the same although a result has these wrong bits."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One kind of result that a benchmark of a profile compares, and the probabilities that the comparisons find a fault."""

    model: str
    profile: str
    stage: str
    benchmark: str
    case: str
    """Workload or kind of copy (`digest`), data type (`stress`), or number of memory patterns (`integrity`)."""
    repetitions: float | None
    """Number of compared results; None if no run shows how often the benchmark repeats the computation."""
    elements: int
    """Number of elements of a result; for a memory test, number of words."""
    always_alone: float
    """Probability that a fault with the rate *always* is found on a GPU that cannot be compared with others."""
    always_compared: float
    """Probability that such a fault is found on a GPU that is compared with two others of its model and software."""

    def found(self, rate: float, per_element: bool) -> float | None:
        """Return the probability that a fault with this rate is found; None if the number of repetitions is not known.

        `per_element`: whether the rate is per element; otherwise it is per repetition.
        """
        if self.repetitions is None:
            return None
        return -math.expm1(self._trials(per_element) * math.log1p(-rate))

    def smallest_rate(self, per_element: bool) -> float | None:
        """Return the rate of a fault that is found with probability FOUND; None if the number of repetitions is not known.

        `per_element`: whether to return a rate per element; otherwise it is per repetition.
        """
        if self.repetitions is None:
            return None
        return -math.expm1(math.log(1 - FOUND) / self._trials(per_element))

    def _trials(self, per_element: bool) -> float:
        return (self.repetitions or 0.0) * (self.elements if per_element else 1)


def digest_elements(workload: str, size: int) -> int:
    """Return the number of elements in a result of a workload of `digest`."""
    if workload == "reduction":
        return 3 * size
    if workload == "training_step":
        return 2 * max(16, size // 4) ** 2
    if workload == "attention":
        head = min(128, size)
        return size * (size // head) * head
    if workload == "convolution":
        channels, side = max(4, size // 16), max(4, size // 128)
        return size * size // (channels * side * side) * channels * side * side + 9 * channels**2
    return (2 if workload in ("sort", "rng", "copy") else 1) * size * size


def comparisons(runs: Iterable[tuple[Plan, Mapping[str, Evidence]]], profiles: Iterable[Any]) -> list[Comparison]:
    """Return what the profiles compare, for each GPU model with a measured `digest` in the runs.

    Args:
        runs: runs with GPUs, from which the repetitions per second and the tested memory are taken. Of several GPUs of a model,
            the smallest value counts.
        profiles: profiles as `read_profile` returns them. Their time budgets are used as they are, not scaled to the duration of
            a run.
    """
    rates: dict[str, dict[str, float]] = {}
    memory: dict[str, tuple[int, float]] = {}
    for plan, evidence in runs:
        for host in plan.hosts:
            _add_measured(plan, evidence.get(host.name, Evidence()), rates, memory)
    return [
        comparison
        for profile in profiles
        for model in sorted(rates)
        for stage, content in profile["stages"].items()
        for comparison in _of_stage(
            content["benchmarks"],
            rates[model],
            memory.get(model),
            {"model": model, "profile": profile["name"], "stage": stage},
        )
    ]


def _add_measured(
    plan: Plan, evidence: Evidence, rates: dict[str, dict[str, float]], memory: dict[str, tuple[int, float]]
) -> None:
    """Update the smallest values of each GPU model: repetitions per second of each case, and tested bytes with their share."""
    models = {f"gpu={gpu.index}": gpu.name for gpu in evidence.gpus()}
    stages = {stage.name: stage.benchmarks for stage in plan.stages}
    for item in evidence.benchmarks():
        model = models.get(Scope.parse(item.scope).device)
        if model is None or item.status != MEASURED:
            continue
        if "repetitions" in item.params and "digest" in stages.get(item.stage, {}) and item.name in DIGEST_COUNTS:
            chosen = settings("digest", stages[item.stage]["digest"])
            # Workloads and kinds of copy share the time budget equally.
            cases = len(chosen["workloads"]) + len(chosen["peer_copies"])
            of_model, case = rates.setdefault(model, {}), str(item.params[DIGEST_COUNTS[item.name]])
            rate = float(str(item.params["repetitions"])) * cases / chosen["seconds"]
            of_model[case] = min(rate, of_model.get(case, math.inf))
        if item.name == "integrity.tested_share":
            tested = (int(str(item.params["bytes"])), float(str(item.value)))
            memory[model] = min(tested, memory.get(model, tested))


def _of_stage(
    benchmarks: Mapping[str, Any],
    rates: Mapping[str, float],
    memory: tuple[int, float] | None,
    common: Mapping[str, str],
) -> Iterator[Comparison]:
    """Yield the comparisons that the benchmarks of one stage make.

    Args:
        benchmarks: benchmark -> its settings in the profile.
        rates: case of `digest` (workload or kind of copy) -> measured repetitions per second.
        memory: tested bytes of GPU memory, and their share of this memory; None if no run measured them.
        common: the fields `model`, `profile` and `stage` of each `Comparison`.
    """
    if "digest" in benchmarks:
        chosen = settings("digest", benchmarks["digest"])
        case_s = chosen["seconds"] / (len(chosen["workloads"]) + len(chosen["peer_copies"]))
        for workload in chosen["workloads"]:
            is_known = workload == "copy"
            # If the right result is not known, the first result is the reference, and the measured rate does not count it. A
            # wrong reference is found too, because later results differ from it. So one result is added.
            yield Comparison(
                **common,
                benchmark="digest",
                case=workload,
                repetitions=rates[workload] * case_s + (not is_known) if workload in rates else None,
                elements=digest_elements(workload, chosen["size"]),
                always_alone=float(is_known),
                always_compared=1.0 if is_known else 1 - COLLISION,
            )
        for copy in chosen["peer_copies"]:
            yield Comparison(
                **common,
                benchmark="digest",
                case=f"{copy} to each of the other GPUs",
                repetitions=rates[copy] * case_s if copy in rates else None,
                elements=digest_elements("copy", chosen["size"]),
                always_alone=1.0,
                always_compared=1.0,
            )
    if "stress" in benchmarks:
        chosen = settings("stress", benchmarks["stress"])
        block_s = min(STRESS_BLOCK_S, chosen["seconds"] / STRESS_BLOCKS)
        for dtype in chosen["dtypes"]:
            yield Comparison(
                **common,
                benchmark="stress",
                case=dtype,
                repetitions=(chosen["seconds"] + chosen["settle_seconds"]) // block_s,
                elements=chosen["size"] ** 2,
                always_alone=0.0,
                always_compared=0.0,
            )
    if "integrity" in benchmarks and memory is not None:
        chosen = settings("integrity", benchmarks["integrity"])
        yield Comparison(
            **common,
            benchmark="integrity",
            case=f"{len(chosen['patterns'])} patterns",
            # A lower bound: a pattern that has its own time budget may make several passes over the memory.
            repetitions=float(len(chosen["patterns"])),
            elements=memory[0] // 8,
            always_alone=memory[1],
            always_compared=memory[1],
        )
