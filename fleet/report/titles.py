"""What people call each benchmark, in the order in which a report tells of them."""

from __future__ import annotations

from schemas.catalogue import BENCHMARKS

_TITLES = {
    "gemm": "GEMM",
    "memory": "Memory bandwidth",
    "host_copy": "Host copies",
    "peer_copy": "Peer copies",
    "integrity": "Memory integrity",
    "stress": "Stress",
    "digest": "Silent corruption",
    "collective": "Collectives",
    "pairs": "Pairs of hosts",
    "training": "Training",
    "fashion_mnist": "Fashion-MNIST",
    "variants": "Training variants",
    "checkpoint": "Checkpoint",
    "model_parallel": "Model parallel",
    "transformer": "Transformer",
    "overlap": "Overlap",
    "dataloader": "Data loading",
    "straggler": "Stragglers",
}

TITLES = _TITLES | {name: name.replace("_", " ").capitalize() for name in BENCHMARKS if name not in _TITLES}
"""Benchmark -> its title; one that has none yet is called by its name."""

VALUES_ONLY = "PASS (values; speed not judged)"
"""The state of a benchmark whose values are right and whose rates no criterion speaks of."""


def title(benchmark: str) -> str:
    """The benchmark's title, or its own name where it is none of ours."""
    return TITLES.get(benchmark, benchmark)
