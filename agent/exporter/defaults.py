"""Defaults and maxima of the exporter's settings. `rackproof export --detach` imports this module, but not the exporter."""

from __future__ import annotations

from contextvars import ContextVar

FRESH_S = 14.0
"""Seconds for which the page /metrics is cached, just below the usual scrape interval of 15 s. The cache limits the cost of
several scrapers (such as two redundant Prometheus servers) and of short scrape intervals. Reading the hardware takes 10 ms of CPU
time per GPU (measured, H200): without the cache, one scrape of eight GPUs every second would use 8 % of one CPU core."""
COLLECT_S: ContextVar[float] = ContextVar("COLLECT_S", default=8.0)
"""Time limit for all collectors of a scrape together. The default is below Prometheus' default scrape timeout of 10 s; the server
sets the limit for a scraper with a shorter timeout."""
SAMPLE_HZ, MAX_HZ = 10.0, 50.0
"""Default and largest number of samples of each GPU per second."""
WINDOW_S = 30.0
"""Default length in seconds of the time window over which minimum, mean and maximum of the samples are exported. It is longer
than a scrape interval (15 s) plus FRESH_S, so that each sample is in the window of at least one scrape."""
MAX_WINDOW_S = 600.0
COMPATIBLE = ("1.0", "dcgm")
"""Values of `--compat`. They are also the keys of `exporter.COMPATIBLE_NAMES`."""
