"""Read the data file of a GPU model, and draw figures from it.

A part is anything that has figures of its own: a GPU, a link, a host or a gang (the hosts of one multi-node launch). A figure is
drawn from a normal distribution with the median and the standard deviation of the measured parts. The distribution is cut off at
the lowest and the highest measured value, so that no healthy simulated part is outside the measured range.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

from fleet.simulate.assumptions import RUN_NOISE
from schemas import documents
from schemas.catalogue import Expectation
from schemas.errors import UsageError

PARTS, RUNS = 64, 4
LEVELS = PARTS * RUNS
"""A level is one byte, which selects the value of a figure.

The upper six bits select the quantile of the part, the same in every run. The lower two bits select the noise of the run.
"""
_RUN_NOISE_SIGMAS = (-1.15, -0.32, 0.32, 1.15)
"""Median of each quarter of a normal distribution, in standard deviations."""
_NORMAL = NormalDist()
_DATA_DIRECTORY = Path(__file__).parent

Spread = Sequence[float]
"""Median, minimum, maximum and standard deviation of the measured parts."""


@dataclass(frozen=True, kw_only=True)
class GpuData:
    """The data file of one GPU model."""

    model: str
    gpu: str
    """Name of the GPU, as NVML reports it."""
    measured_ranks: int
    """Number of GPUs of the host on which the figures of a whole host were measured."""
    software: Mapping[str, str]
    figures: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Name -> the figures with this name, one for each measured combination of parameters."""
    curves: Mapping[tuple[str, str, str], Mapping[str, Any]]
    """(Collective, placement, `latency` or `graph_latency`) -> the curve of the duration in seconds over the size in bytes."""
    readings: tuple[Mapping[str, Any], ...]

    def figures_of(self, expectation: Expectation) -> list[Mapping[str, Any]]:
        """Return the figures that have the name of an expectation and do not contradict its parameters.

        Raises:
            UsageError: there is no such figure in the data file.
        """
        matching = [
            figure
            for figure in self.figures.get(expectation.name, ())
            if _has_params(figure.get("params", {}), expectation.params)
        ]
        if not matching:
            raise UsageError(
                f"no record of a {self.gpu} has {expectation.name} {dict(expectation.params) or ''}, "
                "so this figure cannot be simulated; choose another profile"
            )
        return matching


def _has_params(params: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(params.get(key, value) == value for key, value in expected.items())


def model_names() -> list[str]:
    """Return the GPU models that have a data file."""
    return sorted(path.stem for path in _DATA_DIRECTORY.glob("*.json"))


@cache
def read_gpu_data(model: str) -> GpuData:
    """Read the data file of a model.

    Raises:
        UsageError: the model has no data file.
    """
    if model not in model_names():
        raise UsageError(
            f"no data of {model}{documents.nearest(model, model_names())}: "
            f"hosts of {', '.join(model_names())} can be simulated"
        )
    data = json.loads((_DATA_DIRECTORY / f"{model}.json").read_text(encoding="utf-8"))
    figures: dict[str, list[Any]] = {}
    for figure in data["figures"]:
        figures.setdefault(figure["name"], []).append(figure)
    return GpuData(
        model=data["model"],
        gpu=data["gpu"],
        measured_ranks=data["measured_ranks"],
        software=data["software"],
        figures={name: tuple(settings) for name, settings in figures.items()},
        curves={(curve["op"], curve["placement"], curve["kind"]): curve for curve in data["curves"]},
        readings=tuple(data["readings"]),
    )


def values_by_level(spread: Spread, shuffle: int = 0) -> list[float]:
    """Return the value of a figure at each level: the value at the quantile of the part, plus the noise of the run.

    Args:
        spread: distribution of the measured values.
        shuffle: seed of a random order of the quantiles, so that the best part in one figure is not the best in all others. If
            it is 0, the quantiles increase with the level.
    """
    median, minimum, maximum, sigma = spread
    order = list(range(PARTS))
    if shuffle:
        random.Random(shuffle).shuffle(order)  # noqa: S311 - no secret
    if not sigma:
        return [median] * LEVELS
    low, high = (_NORMAL.cdf((end - median) / sigma) for end in (minimum, maximum))
    parts = [median + sigma * _NORMAL.inv_cdf(low + (index + 0.5) / PARTS * (high - low)) for index in order]
    return [
        min(max(value + sigma * RUN_NOISE * noise, minimum), maximum) for value in parts for noise in _RUN_NOISE_SIGMAS
    ]


def draw_levels(part_generator: random.Random, run_generator: random.Random, count: int) -> bytes:
    """Return `count` levels. `part_generator` draws the quantiles of the parts, `run_generator` the noise of the run."""
    mask = int.from_bytes(b"\xfc" * count, "big")
    quantiles = int.from_bytes(part_generator.randbytes(count), "big") & mask
    noise = int.from_bytes(run_generator.randbytes(count), "big") & ~mask
    return (quantiles | noise).to_bytes(count, "big")


def interpolate(points: Sequence[Sequence[float]], size: int) -> list[float]:
    """Return the spread of a curve at `size` bytes.

    A point is a size in bytes and the spread at this size. Between two points, the spread follows a power law. Below the first
    point, the power law between the first two points continues. Above the last point, the spread is proportional to the size. If
    there is only one point, its spread applies to all sizes.
    """
    if len(points) == 1:
        return list(points[0][1:])
    index = next((index for index, point in enumerate(points) if point[0] >= size), len(points) - 1)
    if points[index][0] == size:
        return list(points[index][1:])
    lower, upper = points[max(index - 1, 0)], points[max(index, 1)]
    share = math.log(size / lower[0]) / math.log(upper[0] / lower[0])
    if size > points[-1][0]:  # limited by bandwidth
        return [value * size / points[-1][0] for value in points[-1][1:]]
    return [
        low * (high / low) ** share if low > 0 < high else low for low, high in zip(lower[1:], upper[1:], strict=True)
    ]


def json_numbers(values: Iterable[float]) -> list[str]:
    """Return each number as JSON text with seven significant digits."""
    return [f"{value:.7g}" for value in values]
