"""A probe: a short launch that tests whether some hosts work together. Its measurements are not judged."""

from __future__ import annotations

from schemas.plans import Stage
from schemas.stages import PROBE

TIMEOUT_S = 60.0
START_S = 120.0
"""Maximum time to import torch, start the driver and connect to the other ranks."""
TOGETHER = "collective"
"""The benchmark of a probe. If it can be measured, the hosts work together."""


def probe(gang: Stage) -> Stage:
    """Return the stage of a probe, derived from that of the gang. It runs an all_reduce of 8 bytes and one of 1 MiB."""
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
