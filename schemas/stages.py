"""Names of the stages of a run."""

from __future__ import annotations

PREFLIGHT = "preflight"
"""The snapshot before anything is measured."""
BENCHMARK = "benchmark"
"""The benchmarks that each host runs alone."""
GANG = "gang"
"""The benchmarks that the hosts of a gang (one multi-node launch) run together."""
PROBE = "probe"
"""A short launch of part of a gang, which tests whether these hosts work together."""
SOAK = "soak"
"""Benchmarks that are repeated in rounds, for hours or days."""
CELL = "cell"
"""One cell of a scaling study. The number of its launch is the number of the cell, from 1."""
GANG_STAGES = (GANG, PROBE, CELL)
"""Launches of these stages are in the gang record of a host. Launches of all other stages are in its host record."""
STATES = ("planned", "running", "finished", "failed", "deadline", "silent")
"""States of a stage on a host, as the exporter reports them."""
