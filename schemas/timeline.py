"""What a soak has to tell: how long, how many rounds, and how its figures went, down-sampled so that days fit into a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

STOP_ON = ("fatal", "any", "never")
"""By which findings of its own a host ends its soak."""

RATES = frozenset({"B/s", "FLOP/s", "images/s", "tokens/s"})
"""Units of figures that show how fast a part is."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One figure of one part over the soak: what came in a bucket as its count, lowest, mean and highest."""

    name: str
    scope: str
    unit: str
    params: Mapping[str, Any] = field(default_factory=dict)
    at: tuple[int, ...] = ()
    """Numbers of the buckets in which anything came, from 0; the other four are as long."""
    n: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    mean: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened: a counter rose, a GPU was throttled, did not answer, a round did not finish."""

    at_s: float
    """Seconds since the soak began."""
    until_s: float
    """When the like of it was last seen, before nothing was for a while."""
    name: str
    scope: str
    count: float
    """What a counter rose by; how often anything else was seen."""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Everything that is told over time. All series have the same buckets."""

    bucket_s: float
    series: tuple[Series, ...] = ()
    events: tuple[Event, ...] = ()
    left_out: int = 0
    """Events and series beyond what is kept."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """How far a host's soak is."""

    began: str
    planned_s: float
    soaked_s: float
    """Without the time in which nobody carried it out."""
    finished: int = 0
    """Rounds that came to their end."""
    failed: int = 0
    cut: int = 0
    """Rounds that were cut off with their supervisor; what they had measured counts."""
    ended: str = ""
    """When it was over; empty where it goes on, or was cut off."""
    reason: str = ""
    """Why it ended before its time; empty where it did not."""
    ended_by: str = ""
    """`time`, `finding` of the host's own, or `failure`: no round came to its end any more."""
    timeline: Timeline = field(default_factory=lambda: Timeline(bucket_s=1.0))

    @property
    def rounds(self) -> int:
        """Those that were begun."""
        return self.finished + self.failed + self.cut


def soak_from_json(document: Mapping[str, Any]) -> Soak:
    """The soak in a document that soak.schema.json has passed."""
    found = document.get("timeline", {"bucket_s": 1.0})
    columns = ("at", "n", "low", "mean", "high")
    timeline = Timeline(
        **{
            **found,
            "series": tuple(
                Series(**{**item, **{key: tuple(item[key]) for key in columns}}) for item in found.get("series", ())
            ),
            "events": tuple(Event(**item) for item in found.get("events", ())),
        }
    )
    return Soak(**{**document, "timeline": timeline})


def thinned(timeline: Timeline, most: int) -> Timeline:
    """The same with no more than so many buckets."""
    last = max((one.at[-1] for one in timeline.series if one.at), default=0)
    factor = last // most + 1
    if factor == 1:
        return timeline
    series = tuple(_thinned(one, factor) for one in timeline.series)
    return replace(timeline, bucket_s=timeline.bucket_s * factor, series=series)


def _thinned(series: Series, factor: int) -> Series:
    rows: dict[int, tuple[int, float, float, float]] = {}
    for at, n, low, mean, high in zip(series.at, series.n, series.low, series.mean, series.high, strict=True):
        before = rows.get(at // factor, (0, low, 0.0, high))
        rows[at // factor] = (before[0] + n, min(before[1], low), before[2] + n * mean, max(before[3], high))
    found = rows.values()
    return replace(
        series,
        at=tuple(rows),
        n=tuple(n for n, *_ in found),
        low=tuple(low for _, low, _, _ in found),
        mean=tuple(float(f"{total / n:.5g}") for n, _, total, _ in found),
        high=tuple(high for *_, high in found),
    )
