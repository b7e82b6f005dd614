"""Figures that no record contains: published ones, or else our assumptions. Each names its source.

They are no limits: the packs judge them like those of a real host.
"""

from __future__ import annotations

from typing import Any

_OURS = "ours: no record of an H200 holds it"
_STEP = "ours, for a step of the benchmark's default network; healthy H200 lie within 2 % of their median (packs/common.yml)"
_FABRIC = "ours: an NDR port of 400 Gb/s at 97 % of its line rate; the spread is ours"


def _figure(name: str, unit: str, median: float, share: float, source: str, **params: Any) -> dict[str, Any]:
    """A figure with `share` of its median to either side, and a third of that as its standard deviation."""
    result = [median, median * (1 - share), median * (1 + share), median * share / 3]
    return {
        "name": name,
        "unit": unit,
        **({"params": params} if params else {}),
        "spread": [float(f"{value:.6g}") for value in result],
        "source": source,
    }


def _constant(name: str, unit: str, value: Any, source: str, **params: Any) -> dict[str, Any]:
    return {"name": name, "unit": unit, **({"params": params} if params else {}), "value": value, "source": source}


ASSUMED: list[dict[str, Any]] = [
    _figure("straggler.compute", "s", 0.0142, 0.02, _STEP),
    _figure("straggler.wait", "s", 0.0002, 0.5, _OURS),
    _figure("straggler.launch", "s", 0.0061, 0.05, _OURS),
    _figure("straggler.cpu_time", "s", 0.0069, 0.05, _OURS),
    _figure("straggler.last_share", "1", 0.1, 0.5, _OURS),
    _constant("straggler.preemptions", "1", 0, _OURS),
    _figure("straggler.step_time", "s", 0.0159, 0.02, _STEP),
    _figure("straggler.communication", "s", 0.0013, 0.05, _OURS),
    _figure("straggler.power", "W", 640.0, 0.03, _OURS),
    _figure("straggler.clock", "Hz", 1.71e9, 0.015, _OURS),
    _figure("straggler.temperature", "Cel", 58.0, 0.06, _OURS),
    *(
        _constant("straggler.throttled_share", "1", 0.0, _OURS, reason=reason)
        for reason in ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
    ),
    _constant("benchmark.duration", "s", 5.0, _OURS, benchmark="straggler"),
    _constant("benchmark.duration", "s", 8.0, _OURS, benchmark="pairs"),
    _figure("pairs.bandwidth", "B/s", 4.85e10, 0.012, _FABRIC),
    _figure("pairs.latency", "s", 1.15e-5, 0.06, _OURS),
]

WITH_NVLS = {"all_reduce": 473 / 365, "all_gather": 361 / 345, "reduce_scatter": 363 / 349}
"""Bus bandwidth of eight GPUs with NVLink SHARP over that of our four without: stas00/ml-engineering, 8 GiB, H200."""
GANG_SHARE = 0.9125
"""Share of the fabric's rate that large collectives between hosts reach: stas00/ml-engineering, 365 of 400 GB/s on H200."""
GANG_LATENCY_S = 60e-6
GANG_SPREAD = 0.006
SCALING = 0.95
"""Of twice the throughput, what twice the ranks reach."""
RUN_NOISE = 0.15
"""Standard deviation of one part from run to run, over that from part to part: the five runs in docs/measurements/README.md."""
