"""Generate the timeline of a launch: power, temperature and clock of each GPU over time, with values typical of an H200."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from schemas.trace import MOST_BUCKETS

LOADS: Mapping[str, tuple[float, float]] = {
    "gemm": (672.0, 1560.0),
    "memory": (430.0, 1980.0),
    "integrity": (410.0, 1980.0),
    "host_copy": (135.0, 1980.0),
    "peer_copy": (225.0, 1980.0),
    "stress": (697.0, 1425.0),
    "digest": (560.0, 1755.0),
    "collective": (305.0, 1980.0),
    "pairs": (190.0, 1980.0),
    "dataloader": (120.0, 1980.0),
}
"""Benchmark -> power in W and clock in MHz of a GPU that runs it."""
DEFAULT_LOAD, IDLE_LOAD = (380.0, 1950.0), (118.0, 1980.0)
"""Power and clock for benchmarks that are not in LOADS, and for an idle GPU."""
IDLE_TEMPERATURE_CEL, KELVIN_PER_W, APPROACH_PER_S = 27.0, 0.053, 0.07
"""Temperature of a GPU at 0 W in °C; its rise in K per watt; share of the difference to the final temperature that disappears
in a second."""
SPREADS = {"power_w": 0.02, "temperature_cel": 0.012, "clock_mhz": 0.01}
"""Series -> typical difference between the mean of a time bucket and its minimum or maximum, as a share of the mean."""
MAXIMA = {"power_w": 700, "clock_mhz": 1980}
"""Series -> its highest possible value."""


def make_timeline(stage: str, devices: int, durations: Mapping[str, float], start_s: float) -> dict[str, Any]:
    """Return the timeline of a launch, as a record contains it.

    Args:
        stage: name of the stage, used only as a seed of the random numbers.
        devices: number of GPUs.
        durations: benchmark -> its duration in seconds, in the order in which the benchmarks run.
        start_s: seconds from the start of the launch to the first benchmark.
    """
    began_s, at = {}, start_s
    for name, seconds in durations.items():
        began_s[name] = round(at, 1)
        at += seconds
    bucket_s = float(int(at / MOST_BUCKETS) + 1)
    gpus = {}
    for index in range(devices):
        generator = random.Random(f"{stage} {index}")  # noqa: S311 - no secret
        gpus[str(index)] = _gpu_series(generator, began_s, at, bucket_s)
    return {"bucket_s": bucket_s, "gpus": gpus, "began_s": began_s}


def _gpu_series(
    generator: random.Random, began_s: Mapping[str, float], end_s: float, bucket_s: float
) -> dict[str, str]:
    """Return name -> series of one GPU.

    A series has a word for each time bucket: `693-4+8` is mean 693, minimum 689, maximum 701.
    """
    series: dict[str, list[str]] = {name: [] for name in SPREADS}
    power_factor, temperature = generator.gauss(1.0, 0.008), IDLE_TEMPERATURE_CEL + IDLE_LOAD[0] * KELVIN_PER_W
    for index in range(max(1, int(end_s / bucket_s))):
        at = (index + 0.5) * bucket_s
        begun = [name for name, began in began_s.items() if began <= at]
        power, clock = LOADS.get(begun[-1], DEFAULT_LOAD) if begun else IDLE_LOAD
        power *= power_factor
        final_temperature = IDLE_TEMPERATURE_CEL + power * KELVIN_PER_W
        temperature += (final_temperature - temperature) * (1 - (1 - APPROACH_PER_S) ** bucket_s)
        for name, value in (("power_w", power), ("temperature_cel", temperature), ("clock_mhz", clock)):
            series[name].append(_bucket(generator, value, SPREADS[name], MAXIMA.get(name)))
    return {name: " ".join(buckets) for name, buckets in series.items()}


def _bucket(generator: random.Random, value: float, spread: float, maximum: int | None) -> str:
    below, above = (round(value * spread * generator.uniform(0.2, 1.8)) for _ in range(2))
    mean = min(round(value), maximum or round(value))
    above = min(above, (maximum or mean + above) - mean)
    return f"{mean}-{below}+{above}" if below or above else f"{mean}"


def throttle(series: dict[str, str], *, watts: int, mhz: int, hot_cel: int = 0) -> None:
    """Change the series of a GPU as if it was throttled: by heat if `hot_cel` is given, otherwise by a power limit.

    Power, clock and temperature change only in time buckets with a mean power above `watts`.
    """
    is_limited = [int(bucket.split("-")[0]) > watts for bucket in series["power_w"].split()]
    limited = {"power_w": f"{watts - 2}-9+2", "clock_mhz": f"{mhz}-45+60"}
    if hot_cel:
        limited["temperature_cel"] = f"{hot_cel}-1+1"
    for name, value in limited.items():
        buckets = zip(is_limited, series[name].split(), strict=True)
        series[name] = " ".join(value if limit else bucket for limit, bucket in buckets)
    if hot_cel:
        series["held_percent"] = " ".join("63" if limit else "0" for limit in is_limited)


def lose_gpu(timeline: dict[str, Any], gpu: str, reason: str, *, after_share: float = 0.0) -> None:
    """End the series of a GPU after `after_share` of the launch (0: remove the series), and record the reason."""
    series = timeline["gpus"].pop(gpu)
    if after_share:
        timeline["gpus"][gpu] = {
            name: " ".join(buckets.split()[: int(after_share * len(buckets.split())) + 1])
            for name, buckets in series.items()
        }
    timeline["lost"] = {**timeline.get("lost", {}), gpu: reason}


def end_early(timeline: dict[str, Any], seconds: float) -> None:
    """Shorten a timeline to a launch that ended after `seconds`."""
    buckets = int(seconds / timeline["bucket_s"]) + 1
    timeline["began_s"] = {name: at for name, at in timeline["began_s"].items() if at < seconds}
    for series in timeline["gpus"].values():
        series |= {name: " ".join(words.split()[:buckets]) for name, words in series.items()}
