"""Constants that the data file of a GPU model does not contain: figures with their sources, and our assumptions.

The data file also has assumed figures of single benchmarks, from docs/measurements/simulation_data.py. None of these constants is
a limit: the packs judge simulated figures like those of a real host.
"""

from __future__ import annotations

NVLS_SPEEDUP = {"all_reduce": 473 / 365, "all_gather": 361 / 345, "reduce_scatter": 363 / 349}
"""Collective -> bus bandwidth on eight H200 with NVLink SHARP enabled, divided by bus bandwidth on four H200 without it.

Sources: stas00/ml-engineering for eight H200, our measurements for four (fleet/judge/packs/h200-sxm.yml).
"""
DEFAULT_FABRIC_GBPS = 400.0
"""Assumed line rate of the fabric for each GPU, in Gb/s, if the inventory has none."""
PORT_SHARE, PAIR_SHARE = (0.975, 0.01), (0.965, 0.012)
"""(Median, maximum deviation) of bandwidth divided by line rate: PORT_SHARE if a port sends to itself, PAIR_SHARE between hosts.

The deviation is a share of the median, and assumed. Source of the medians: ib_write_bw reaches 380 to 392 Gb/s on healthy
400 Gb/s ports (Azure/azurehpc-health-checks; oracle oci-hpc).
"""
PORT_FIGURES = {"latency": (1.2e-6, 0.03), "message_rate": (5.2e6, 0.03)}
PAIR_FIGURES = {"latency": (2.1e-6, 0.04), "message_rate": (5.0e6, 0.03)}
"""Assumed (median, maximum deviation) of the latency in s and of the message rate in 1/s, for messages of 8 B.

PORT_FIGURES apply if a port sends to itself, PAIR_FIGURES between hosts. The deviation is a share of the median.
"""
PERFTEST_SETUP_S = 0.7
"""Assumed seconds that a perftest program runs in addition to its set duration. A latency test has no set duration."""
GANG_SHARE = 0.9125
"""Bus bandwidth of large collectives between hosts, divided by the line rate of the fabric.

Source: stas00/ml-engineering, 365 of 400 GB/s on H200.
"""
GANG_LATENCY_S = 60e-6
"""Assumed latency of a small collective between hosts, in s."""
GANG_SPREAD = 0.006
"""Assumed maximum deviation of the duration of a collective between hosts from its median, as a share of the median."""
SCALING_EFFICIENCY = 0.95
"""Assumed throughput of a training on 2 n ranks, divided by twice its throughput on n ranks."""
RUN_NOISE = 0.15
"""Standard deviation between the runs of one part (such as a GPU), divided by the standard deviation between parts.

Source: five runs in docs/measurements/README.md.
"""
