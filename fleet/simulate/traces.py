"""What GPUs would have shown while the benchmarks of a launch ran: made up, of the size that an H200 shows."""

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
"""Benchmark -> W and MHz while it runs."""
USUAL, IDLE = (380.0, 1950.0), (118.0, 1980.0)
AMBIENT, PER_W, PER_S = 27.0, 0.053, 0.07
"""Temperature of a GPU that draws nothing, in °C; by how much a watt warms it; share of the way there in a second."""
SPREAD = {"power_w": 0.02, "temperature_cel": 0.012, "clock_mhz": 0.01}
LIMIT_W, MOST_MHZ = 700, 1980


def trace(stage: str, devices: int, took: Mapping[str, float], start_s: float) -> dict[str, Any]:
    """The timeline of a launch, as a record has it.

    Args:
        took: seconds of each benchmark, in their order.
        start_s: seconds before the first.
    """
    begun, at = {}, start_s
    for name, seconds in took.items():
        begun[name] = round(at, 1)
        at += seconds
    bucket_s = float(int(at / MOST_BUCKETS) + 1)
    gpus = {str(index): _gpu(random.Random(f"{stage} {index}"), begun, at, bucket_s) for index in range(devices)}  # noqa: S311 - no secret
    return {"bucket_s": bucket_s, "gpus": gpus, "began_s": begun}


def _gpu(dice: random.Random, begun: Mapping[str, float], ends_s: float, bucket_s: float) -> dict[str, str]:
    result: dict[str, list[str]] = {name: [] for name in SPREAD}
    own, hot = dice.gauss(1.0, 0.008), AMBIENT + IDLE[0] * PER_W
    for index in range(max(1, int(ends_s / bucket_s))):
        at = (index + 0.5) * bucket_s
        names = [name for name, began in begun.items() if began <= at]
        watts, clock = LOADS.get(names[-1], USUAL) if names else IDLE
        hot += (AMBIENT + watts * own * PER_W - hot) * (1 - (1 - PER_S) ** bucket_s)
        for name, value in (("power_w", watts * own), ("temperature_cel", hot), ("clock_mhz", clock)):
            result[name].append(_word(dice, value, SPREAD[name], {"power_w": LIMIT_W, "clock_mhz": MOST_MHZ}.get(name)))
    return {name: " ".join(words) for name, words in result.items()}


def _word(dice: random.Random, value: float, spread: float, most: int | None) -> str:
    less, more = (round(value * spread * dice.uniform(0.2, 1.8)) for _ in range(2))
    mean = min(round(value), most or round(value))
    more = min(more, (most or mean + more) - mean)
    return f"{mean}-{less}+{more}" if less or more else f"{mean}"


def held_back(figures: dict[str, str], *, watts: int, mhz: int, hot: int = 0) -> None:
    """The same GPU where it may not draw more, or run faster: by its power limit, or for heat (`hot`, in °C)."""
    hard = [int(word.split("-")[0]) > watts for word in figures["power_w"].split()]
    less = {"power_w": f"{watts - 2}-9+2", "clock_mhz": f"{mhz}-45+60"}
    for name, value in {**less, **({"temperature_cel": f"{hot}-1+1"} if hot else {})}.items():
        words = figures[name].split()
        figures[name] = " ".join(value if at else word for at, word in zip(hard, words, strict=True))
    if hot:
        figures["held_percent"] = " ".join("63" if at else "0" for at in hard)


def lose(timeline: dict[str, Any], gpu: str, why: str, *, until: float = 0.0) -> None:
    """The GPU answers no more after that share of the time."""
    figures = timeline["gpus"].pop(gpu)
    if until:
        cut_ = {name: words.split()[: int(until * len(words.split())) + 1] for name, words in figures.items()}
        timeline["gpus"][gpu] = {name: " ".join(words) for name, words in cut_.items()}
    timeline["lost"] = {**timeline.get("lost", {}), gpu: why}


def cut(timeline: dict[str, Any], seconds: float) -> None:
    """The launch was ended so early."""
    buckets = int(seconds / timeline["bucket_s"]) + 1
    timeline["began_s"] = {name: at for name, at in timeline["began_s"].items() if at < seconds}
    for figures in timeline["gpus"].values():
        figures |= {name: " ".join(words.split()[:buckets]) for name, words in figures.items()}
