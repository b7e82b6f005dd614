"""Constants that no record contains: published figures or our assumptions, each with its source.

Assumed figures of single benchmarks are in docs/measurements/simulation_data.py. None of these constants is a limit: the packs
judge simulated figures like those of a real host.
"""

from __future__ import annotations

NVLS_SPEEDUP = {"all_reduce": 473 / 365, "all_gather": 361 / 345, "reduce_scatter": 363 / 349}
"""Bus bandwidth of eight H200 with NVLink SHARP divided by that of four without it, at 8 GiB: stas00/ml-engineering."""
DEFAULT_FABRIC_GBPS = 400.0
"""Assumed line rate of the fabric for each GPU, in Gb/s, if the inventory has none."""
PORT_SHARE, PAIR_SHARE = (0.975, 0.01), (0.965, 0.012)
"""(median, assumed maximum deviation) of the bandwidth as a share of the port's rate: of a port that sends to itself, and of a
pair of hosts.
ib_write_bw of healthy 400 Gb/s ports reaches 380 to 392 Gb/s (Azure/azurehpc-health-checks; oracle oci-hpc)."""
PORT_FIGURES = {"latency": (1.2e-6, 0.03), "message_rate": (5.2e6, 0.03)}
PAIR_FIGURES = {"latency": (2.1e-6, 0.04), "message_rate": (5.0e6, 0.03)}
"""Assumed (median, maximum deviation) of latency in s and messages per second, at 8 B: of a port that sends to itself, and of a
pair of hosts."""
PERFTEST_SETUP_S = 0.7
"""Assumed time that a test takes in addition to its set duration; a latency test, which has none, takes only this time."""
GANG_SHARE = 0.9125
"""Share of the fabric's line rate that large collectives between hosts reach: stas00/ml-engineering, 365 of 400 GB/s on H200."""
GANG_LATENCY_S = 60e-6
"""Assumed latency of a small collective between hosts."""
GANG_SPREAD = 0.006
"""Assumed maximum deviation of a collective between hosts from the median, as a share of the median."""
SCALING_EFFICIENCY = 0.95
"""Assumed throughput of a training on twice as many ranks, divided by twice the throughput on the original number of ranks."""
RUN_NOISE = 0.15
"""Standard deviation from run to run of one part, divided by that from part to part: five runs in docs/measurements/README.md."""
