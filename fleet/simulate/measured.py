"""The data file: what real parts measured, and how to draw from it.

A figure is drawn from a normal distribution with the median and the standard deviation that parts showed, cut off where the worst
and the best of them lay: no simulated part that is in order is out of what parts in order measured.
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

from fleet.simulate.assumed import RUN_NOISE
from schemas import documents
from schemas.catalogue import Expectation
from schemas.errors import UsageError

PARTS, RUNS = 64, 4
LEVELS = PARTS * RUNS
"""A part is one of so many quantiles for good; a run is one of so many noises on top of it: together a byte."""
_RUN = (-1.15, -0.32, 0.32, 1.15)
"""Quartiles' medians of a normal distribution, in standard deviations."""
_NORMAL = NormalDist()
_HERE = Path(__file__).parent

Spread = Sequence[float]
"""Median, least, greatest, standard deviation between parts."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The data file of one GPU model."""

    model: str
    gpu: str
    measured_ranks: int
    """On how many GPUs together the figures of a host were measured."""
    software: Mapping[str, str]
    figures: Mapping[str, tuple[Mapping[str, Any], ...]]
    """Name -> the settings it was measured with."""
    curves: Mapping[tuple[str, str, str], Mapping[str, Any]]
    """Operation, placement, `latency` or `graph_latency` -> points by size."""
    readings: tuple[Mapping[str, Any], ...]
    source: str

    def of(self, item: Expectation) -> list[Mapping[str, Any]]:
        """Return the figures of an expectation. Raise UsageError if it was never measured."""
        result = [figure for figure in self.figures.get(item.name, ()) if _fits(item.params, figure.get("params", {}))]
        if not result:
            raise UsageError(
                f"no record of a {self.gpu} has {item.name} {dict(item.params) or ''}: nothing to draw it from; "
                "choose another profile"
            )
        return result


def _fits(asked: Mapping[str, Any], params: Mapping[str, Any]) -> bool:
    return all(params.get(key, value) == value for key, value in asked.items())


def models() -> list[str]:
    """GPU models of which there is a data file."""
    return sorted(path.stem for path in _HERE.glob("*.json"))


@cache
def read(model: str) -> Measured:
    """The data file of a model. Raises UsageError where there is none."""
    if model not in models():
        raise UsageError(
            f"no data of {model}{documents.nearest(model, models())}: hosts of {', '.join(models())} can be simulated"
        )
    data = json.loads((_HERE / f"{model}.json").read_text(encoding="utf-8"))
    figures: dict[str, list[Any]] = {}
    for figure in data["figures"]:
        figures.setdefault(figure["name"], []).append(figure)
    return Measured(
        model=data["model"],
        gpu=data["gpu"],
        measured_ranks=data["measured_ranks"],
        software=data["software"],
        figures={name: tuple(items) for name, items in figures.items()},
        curves={(curve["op"], curve["placement"], curve["kind"]): curve for curve in data["curves"]},
        readings=tuple(data["readings"]),
        source=data["source"],
    )


def levels(spread: Spread, shuffle: int = 0) -> list[float]:
    """The value at each level: quantiles of the parts, each with the noise of its runs.

    Args:
        spread: what was measured.
        shuffle: 0: the higher the level, the greater the value; else in another order, so that two figures of one part are
            not both at their best.
    """
    median, least, greatest, sigma = spread
    order = list(range(PARTS))
    if shuffle:
        random.Random(shuffle).shuffle(order)  # noqa: S311 - no secret
    if not sigma:
        return [median] * LEVELS
    low, high = (_NORMAL.cdf((end - median) / sigma) for end in (least, greatest))
    parts = [median + sigma * _NORMAL.inv_cdf(low + (index + 0.5) / PARTS * (high - low)) for index in order]
    return [min(max(value + sigma * RUN_NOISE * noise, least), greatest) for value in parts for noise in _RUN]


def draw(part: random.Random, run: random.Random, count: int) -> bytes:
    """So many levels: which part it is comes from `part`, how its run went from `run`."""
    mask = int.from_bytes(b"\xfc" * count, "big")
    bits = int.from_bytes(part.randbytes(count), "big") & mask | int.from_bytes(run.randbytes(count), "big") & ~mask
    return bits.to_bytes(count, "big")


def between(points: Sequence[Sequence[float]], size: int) -> list[float]:
    """Median, least, greatest and sigma of a curve at `size`, which may lie between its points or beyond them."""
    if len(points) == 1:
        return list(points[0][1:])
    index = next((index for index, point in enumerate(points) if point[0] >= size), len(points) - 1)
    if points[index][0] == size:
        return list(points[index][1:])
    lower, upper = points[max(index - 1, 0)], points[max(index, 1)]
    share = math.log(size / lower[0]) / math.log(upper[0] / lower[0])
    if size > points[-1][0]:  # beyond the last one, bandwidth rules
        return [value * size / points[-1][0] for value in points[-1][1:]]
    return [
        one * (other / one) ** share if one > 0 < other else one
        for one, other in zip(lower[1:], upper[1:], strict=True)
    ]


def shortened(values: Iterable[float]) -> list[str]:
    """As JSON, to seven digits."""
    return [f"{value:.7g}" for value in values]
