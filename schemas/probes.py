"""A probe: a short launch that only finds out whether some hosts work together. Nothing that it measures is judged."""

from __future__ import annotations

from schemas.plans import Stage
from schemas.stages import PROBE

TIMEOUT_S = 60.0
START_S = 120.0
"""Importing torch, waking a driver and meeting the others may take so long."""
TOGETHER = "collective"
"""The benchmark that a probe runs: where it is measured, the hosts work together."""


def probe(gang: Stage) -> Stage:
    """The stage of a probe of hosts whose gang's stage this is: one all_reduce, of a word and of 1 MiB."""
    timeout_s = min(gang.collective_timeout_s, TIMEOUT_S)
    return Stage(
        name=PROBE,
        deadline_s=min(gang.deadline_s, 2 * timeout_s + START_S),
        collective_timeout_s=timeout_s,
        benchmarks={
            TOGETHER: {
                "ops": ["all_reduce"],
                "placements": ["in_place"],
                "sizes_bytes": [8, 1 << 20],
                "graph_ops": [],
                "seconds": 0.02,
            }
        },
    )
