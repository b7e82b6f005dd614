"""The titles of the benchmarks in reports."""

from __future__ import annotations

from schemas.catalogue import BENCHMARKS

TITLES = {name: benchmark.title for name, benchmark in BENCHMARKS.items()}
"""Benchmark -> its title, in the order of the report."""

VALUES_ONLY = "PASS (values; speed not judged)"
"""The state of a benchmark whose values are right and whose rates no criterion speaks of."""


def title(benchmark: str) -> str:
    """The benchmark's title, or its own name where it is none of ours."""
    return TITLES.get(benchmark, benchmark)
