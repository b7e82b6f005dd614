"""Times of records."""

from __future__ import annotations

from datetime import datetime


def epoch_seconds(text: str) -> float:
    """Return the seconds since 1970-01-01 of an ISO 8601 time in UTC. Raises ValueError if the text is no time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
