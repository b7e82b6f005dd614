"""Least-squares fit of a line, and the uncertainty of its slope."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

Point = tuple[str, float, float]
"""Group, time and value. In the fit of several groups, each group has its own intercept, and all groups share one slope."""


def fit_line(times: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Fit a line by least squares to three or more points.

    Return its slope, the standard error of the slope, and the normal deviate of slope / error (`normal_deviate`).
    """
    slope, intercept = statistics.linear_regression(times, values)
    freedom = len(times) - 2
    middle = statistics.fmean(times)
    spread = sum((time - middle) ** 2 for time in times)
    squares = sum((value - intercept - slope * time) ** 2 for time, value in zip(times, values, strict=True))
    error = math.sqrt(max(squares, 1e-14 * len(times)) / freedom / spread)
    return slope, error, normal_deviate(slope / error, freedom)


def normal_deviate(t: float, freedom: float) -> float:
    """Return the normal deviate, never negative, with the same two-sided probability as Student's t with `freedom` degrees of
    freedom. Approximation of Wallace, Ann. Math. Statist. 30 (1959) 1121."""
    return math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)


def weakest_z(points: Sequence[Point], slope: float) -> float:
    """Leave out each point in turn, fit a line to the others, and return the smallest normal deviate of these slopes.

    A deviate is negative if its slope has another sign than `slope`, the slope through all points. Return 0 with fewer than 4
    points.
    """
    if len(points) < 4:
        return 0.0
    start, base = statistics.fmean(time for _, time, _ in points), statistics.fmean(value for _, _, value in points)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 6)
    for group, time, value in points:
        _add(sums[group], time - start, value - base, 1.0)
    result = math.inf
    for group, time, value in points:
        _add(sums[group], time - start, value - base, -1.0)
        result = min(result, math.copysign(1.0, slope) * _pooled_z(sums.values()))
        _add(sums[group], time - start, value - base, 1.0)
    return result


def _add(sums: list[float], x: float, y: float, weight: float) -> None:
    for at, term in enumerate((1.0, x, y, x * x, x * y, y * y)):
        sums[at] += weight * term


def _pooled_z(groups: Iterable[Sequence[float]]) -> float:
    """Return the normal deviate of the slope that all groups share, with the sign of the slope. `groups`: the sums of `_add`."""
    count, xx, xy, yy, levels = 0.0, 0.0, 0.0, 0.0, 0
    for n, x, y, sxx, sxy, syy in groups:
        if n > 0.5:
            count, levels = count + n, levels + 1
            xx, xy, yy = xx + sxx - x * x / n, xy + sxy - x * y / n, yy + syy - y * y / n
    freedom = count - levels - 1
    if freedom < 0.5 or xx <= 0:
        return 0.0
    slope = xy / xx
    error = math.sqrt(max(yy - slope * xy, 1e-14 * count) / freedom / xx)
    return math.copysign(normal_deviate(slope / error, freedom), slope)
