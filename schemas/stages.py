"""Names of the stages of a run."""

from __future__ import annotations

PREFLIGHT = "preflight"
"""The snapshot before anything is measured."""
BENCHMARK = "benchmark"
"""Each host alone."""
GANG = "gang"
"""The hosts of a gang together."""
PROBE = "probe"
"""A short launch of part of a gang that tests which hosts work together."""
SOAK = "soak"
"""Round after round, for hours or days."""
CELL = "cell"
"""One cell of a scaling study; the number of the launch is that of the cell, from 1."""
