"""Titles of benchmarks in reports."""

from __future__ import annotations

from schemas.catalogue import BENCHMARKS

TITLES = {name: benchmark.title for name, benchmark in BENCHMARKS.items()}
"""Benchmark -> its title, in the order of the report."""

VALUES_ONLY = "PASS (values; speed not judged)"
"""State of a benchmark in the summary if all its verdicts pass, but no criterion judges its rates."""


def benchmark_title(benchmark: str) -> str:
    """Return the benchmark's title, or the name itself if it is unknown."""
    return TITLES.get(benchmark, benchmark)
