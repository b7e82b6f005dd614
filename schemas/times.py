"""Times of records."""

from __future__ import annotations

import math
from datetime import datetime, timezone


def utc_now() -> str:
    """Return the current time in UTC, in the format that records use."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def epoch_seconds(text: str) -> float:
    """Return the seconds since 1970-01-01 of an ISO 8601 time in UTC. Raises ValueError if the text is not a time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def seconds_or_nan(text: str) -> float:
    """Return the result of `epoch_seconds`, or NaN if the text is not a time."""
    try:
        return epoch_seconds(text)
    except ValueError:
        return math.nan


def format_span(seconds: float) -> str:
    """Return a duration in words: `23 h 12 min`, `45 min 10 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
