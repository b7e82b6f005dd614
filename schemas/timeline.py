"""The result of a soak: duration, rounds, and figures over time, which are downsampled so that days fit into a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STOP_ON = ("fatal", "any", "never")
"""Which findings (failed criteria) on a host end its soak early."""

RATES = frozenset({"B/s", "FLOP/s", "images/s", "tokens/s"})
"""Units of rates. The judge evaluates the drift of benchmark rates in these units."""


def is_recorded(name: str, unit: str) -> bool:
    """Return whether the record keeps the series of a figure: it keeps those of rates, except of `….algbw`."""
    return unit in RATES and not name.endswith(".algbw")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One figure of one part over the soak: count, lowest, mean and highest value of each bucket."""

    name: str
    scope: str
    unit: str
    params: Mapping[str, Any] = field(default_factory=dict)
    at: tuple[int, ...] = ()
    """Numbers of the buckets with values, from 0; the other four columns have the same length."""
    n: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event: a counter rose, a GPU was throttled or did not respond, a round did not finish."""

    at_s: float
    """Seconds from the beginning of the soak to the event. Interruptions of the soak do not count."""
    until_s: float
    """Seconds from the beginning of the soak to the last repetition of the event. After a long gap, a repetition is a separate
    event."""
    name: str
    scope: str
    count: float
    """Increment of a counter, or number of occurrences."""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """All series and events over time. The buckets of all series have the same length, `bucket_s`.

    Interruptions of the soak do not count, except in the timelines of earlier versions of Rackproof.
    """

    bucket_s: float
    series: tuple[Series, ...] = ()
    events: tuple[Event, ...] = ()
    left_out: int = 0
    """Number of dropped events and values. A full timeline gets no further events, and no values of further series."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Progress of the soak of a host."""

    began: str
    planned_s: float
    soaked_s: float
    """Seconds for which the soak ran; interruptions do not count."""
    finished: int = 0
    """Rounds that finished with valid results."""
    failed: int = 0
    cut: int = 0
    """Rounds that were interrupted because their supervisor process ended. Their valid observations are kept."""
    ended: str = ""
    """When it ended; empty if it is running or was killed."""
    reason: str = ""
    """Why it ended early; empty if it did not."""
    ended_by: str = ""
    """`time`, `finding` (on the host), or `failure` (several rounds in a row failed); empty if it has not ended."""
    timeline: Timeline = field(default_factory=lambda: Timeline(bucket_s=1.0))

    @property
    def rounds(self) -> int:
        """Number of rounds that ended or were interrupted, without the one that is running."""
        return self.finished + self.failed + self.cut


def soak_from_json(document: Mapping[str, Any]) -> Soak:
    """Return the soak in a document that matches soak.schema.json."""
    result = document.get("timeline", {"bucket_s": 1.0})
    columns = ("at", "n", "low", "mean", "high")
    timeline = Timeline(
        **{
            **result,
            "series": tuple(
                Series(**{**item, **{key: tuple(item[key]) for key in columns}}) for item in result.get("series", ())
            ),
            "events": tuple(Event(**item) for item in result.get("events", ())),
        }
    )
    return Soak(**{**document, "timeline": timeline})


def downsample(timeline: Timeline, most: int) -> Timeline:
    """Return the timeline with at most `most` buckets in each series."""
    last = max((item.at[-1] for item in timeline.series if item.at), default=0)
    factor = last // most + 1
    if factor == 1:
        return timeline
    series = tuple(_downsample(item, factor) for item in timeline.series)
    return replace(timeline, bucket_s=timeline.bucket_s * factor, series=series)


def _downsample(series: Series, factor: int) -> Series:
    rows: dict[int, tuple[int, float, float, float]] = {}
    for at, n, low, mean, high in zip(series.at, series.n, series.low, series.mean, series.high, strict=True):
        before = rows.get(at // factor, (0, low, 0.0, high))
        rows[at // factor] = (before[0] + n, min(before[1], low), before[2] + n * mean, max(before[3], high))
    result = rows.values()
    return replace(
        series,
        at=tuple(rows),
        n=tuple(n for n, *_ in result),
        low=tuple(low for _, low, _, _ in result),
        mean=tuple(float(f"{total / n:.5g}") for n, _, total, _ in result),
        high=tuple(high for *_, high in result),
    )
