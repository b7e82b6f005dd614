"""Constants that no record contains: published figures or our assumptions, each with its source.

Assumed figures of single benchmarks are in docs/measurements/simulation_data.py. None of these constants is a limit: the packs
judge simulated figures like those of a real host.
"""

from __future__ import annotations

NVLS_SPEEDUP = {"all_reduce": 473 / 365, "all_gather": 361 / 345, "reduce_scatter": 363 / 349}
"""Bus bandwidth of eight GPUs with NVLink SHARP, relative to that of four GPUs without: stas00/ml-engineering, 8 GiB, H200."""
DEFAULT_FABRIC_GBPS = 400.0
"""Assumed line rate for each GPU if the inventory has none."""
PORT_SHARE, PAIR_SHARE = (0.975, 0.01), (0.965, 0.012)
"""Bandwidth of perftest as a share of the port's rate, of a port with itself and between two hosts, and its assumed maximum
deviation: ib_write_bw of healthy 400 Gb/s ports reaches 380 to 392 Gb/s (Azure/azurehpc-health-checks; oracle oci-hpc)."""
PORT_FIGURES = {"latency": (1.2e-6, 0.03), "message_rate": (5.2e6, 0.03)}
PAIR_FIGURES = {"latency": (2.1e-6, 0.04), "message_rate": (5.0e6, 0.03)}
"""Assumed latency (s) and messages per second of 8 B of a port with itself and of a pair, and their maximum deviation."""
PERFTEST_SETUP_S = 0.7
"""Assumed time of a test beyond its duration, and of a whole latency test."""
GANG_SHARE = 0.9125
"""Share of the fabric's line rate in large collectives between hosts: stas00/ml-engineering, 365 of 400 GB/s on H200."""
GANG_LATENCY_S = 60e-6
"""Assumed latency of a small collective between hosts."""
GANG_SPREAD = 0.006
"""Assumed maximum deviation from the median of a collective between hosts, as a share of it."""
SCALING_EFFICIENCY = 0.95
"""Assumed throughput on twice the ranks, relative to twice the throughput."""
RUN_NOISE = 0.15
"""Standard deviation of one part between runs, relative to that between parts: five runs in docs/measurements/README.md."""
