"""Summarize repeated measurements: count, median, extremes, coefficient of variation, and the precision of the median."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.records import Samples


@dataclass(frozen=True, kw_only=True)
class SampleSeries:
    """Duration of each repetition in seconds, and why the repetitions stopped.

    `stopped` is `precision` if the confidence interval of the median was narrow enough, or `time` if the time for the repetitions
    was spent. It is empty if the number of repetitions was fixed.
    """

    seconds: Sequence[float]
    stopped: str = ""


def interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95 % confidence interval of the median, divided by the median.

    Return None for fewer than six values, or if a value is not positive.

    The interval comes from the order statistics (Conover, Practical Nonparametric Statistics, 3.2) and assumes no distribution.
    Times on a GPU are skewed, so an interval that assumes a normal distribution would not be valid for them.
    """
    n, ordered = len(values), sorted(values)
    if n < 6 or not ordered[0] > 0:
        return None
    lower = math.floor((n + 1) / 2 - 1.96 / 2 * math.sqrt(n)) - 1
    return (ordered[n - 1 - lower] - ordered[lower]) / 2 / statistics.median(ordered)


def summarize(values: Sequence[float], stopped: str = "") -> Samples:
    """Return count, extremes, median, coefficient of variation and precision (`interval`) of at least one value."""
    mean = statistics.fmean(values)
    return Samples(
        n=len(values),
        min=min(values),
        p50=statistics.median(values),
        max=max(values),
        cv=statistics.pstdev(values) / mean if mean else 0.0,
        precision=interval(values),
        stopped=stopped,
    )
