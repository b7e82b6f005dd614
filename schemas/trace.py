"""GPU telemetry of one launch. It is stored as text, one word for each time bucket, so that it is small enough for every record.

The word `693-4+8` means: mean 693, minimum 4 less, maximum 8 more. The word `61` means that all samples of the bucket were 61,
and `.` is a bucket with missing samples. In a record, the words remain text, because the judge reads thousands of records and
does not need the numbers; only charts parse them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from schemas.scopes import Scope
from schemas.timeline import Series, Timeline, downsample

MOST_BUCKETS = 48
UNREAD = "gpu.unread"
"""Name of the series of samples that could not be taken."""
GAP = "."
MOST = 999_999
"""Largest number in a word."""
FIGURES = {
    "power_w": ("gpu.power", "", "W", 1.0),
    "temperature_cel": ("gpu.temperature", "", "Cel", 1.0),
    "clock_mhz": ("gpu.clock.sm", "", "Hz", 1e6),
    "held_percent": ("gpu.throttle.active", "reason=other", "1", 0.01),
}
"""Name in the record -> name of the series, its scope below the GPU, its unit, and the amount that 1 in a word means."""
HELD = "held_percent"
"""Percentage of samples that show throttling for a reason other than the power limit. Omitted if no sample shows it."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Power, temperature, SM clock and throttling of each GPU over one launch, in the same time buckets for all GPUs."""

    bucket_s: float
    gpus: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """NVML index -> name in FIGURES -> words."""
    began_s: Mapping[str, float] = field(default_factory=dict)
    """Benchmark -> seconds from the start of the launch until the first of this host's ranks began the benchmark."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """NVML index -> why samples of the GPU could not be taken."""

    def timeline(self) -> Timeline:
        """Return the trace as series of numbers. The number of samples in a bucket is not stored, so it is always 1 here."""
        return Timeline(bucket_s=self.bucket_s, series=tuple(self._series()))

    def _series(self) -> Iterator[Series]:
        for index, figures in self.gpus.items():
            for column, (name, rest, unit, step) in FIGURES.items():
                rows = [(at, *_numbers(word)) for at, word in enumerate(figures.get(column, "").split()) if word != GAP]
                if rows:
                    at, mean, low, high = zip(*rows, strict=True)
                    yield Series(
                        name=name,
                        scope=f"gpu={index},{rest}" if rest else f"gpu={index}",
                        unit=unit,
                        at=at,
                        n=(1,) * len(at),
                        low=tuple(value * step for value in low),
                        mean=tuple(value * step for value in mean),
                        high=tuple(value * step for value in high),
                    )


def make_trace(timeline: Timeline, began_s: Mapping[str, float], lost: Mapping[str, str]) -> Trace | None:
    """Return the trace of a recording, with at most MOST_BUCKETS buckets; None if nothing was recorded and nothing failed.

    A bucket without a sample of a GPU, or with one that failed, is a gap (`.`) for that GPU. Gaps at the end are omitted.
    """
    timeline = downsample(timeline, MOST_BUCKETS)
    by_scope = {(series.name, series.scope): series for series in timeline.series}
    gpus: dict[str, dict[str, str]] = {}
    for column, (name, rest, _, step) in FIGURES.items():
        for scope in [scope for kind, text in by_scope if kind == name and (scope := Scope.parse(text)).below == rest]:
            series, unread = by_scope[name, scope.text], by_scope.get((UNREAD, scope.device))
            words = _words(series, set(unread.at if unread else ()), step)
            if words and (column != HELD or any(series.mean)):
                gpus.setdefault(scope.get("gpu"), {})[column] = words
    if not gpus and not lost:
        return None
    began_s = {name: round(seconds, 1) for name, seconds in began_s.items()}
    return Trace(bucket_s=timeline.bucket_s, gpus=gpus, began_s=began_s, lost=dict(lost))


def _words(series: Series, unread: set[int], step: float) -> str:
    result = {
        at: _word(*(min(max(0, round(value / step)), MOST) for value in row))
        for at, *row in zip(series.at, series.low, series.mean, series.high, strict=True)
        if at not in unread
    }
    return " ".join(result.get(at, GAP) for at in range(max(result, default=-1) + 1))


def _word(low: int, mean: int, high: int) -> str:
    return f"{mean}-{mean - low}+{high - mean}" if low < high else f"{mean}"


def _numbers(word: str) -> tuple[int, int, int]:
    """Return mean, lowest and highest value of a word that matches record.schema.json."""
    mean, _, spread = word.partition("-")
    less, _, more = spread.partition("+")
    return int(mean), max(0, int(mean) - int(less or 0)), int(mean) + int(more or 0)
