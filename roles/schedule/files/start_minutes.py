"""Print the start of each schedule, in minutes after midnight, as a JSON object: name of the schedule -> start.

start_minutes.py FIRST WINDOW NAME ...

A schedule starts at most WINDOW minutes after FIRST, at a time that depends on its name.

When the clock is set forward at the beginning of daylight saving time, that day lacks some minutes, and systemd does not start a
timer on a day that lacks its time. So a start within these minutes is moved by their number, on all days. It may then be on the
next day (1440 minutes or more).
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Collection, Iterator

DAYS = 731
"""The clock is examined on this number of days from now on. Each rule of the time zone then applies at least once."""
HOUR_S = 3600


def skipped_minutes(now: float) -> Iterator[tuple[int, int]]:
    """Yield the first skipped minute of the day, and the number of skipped minutes, each time that the clock is set forward."""
    first = int(now) // HOUR_S * HOUR_S
    for begin in range(first, first + DAYS * 24 * HOUR_S, HOUR_S):
        before, after = time.localtime(begin).tm_gmtoff, time.localtime(begin + HOUR_S).tm_gmtoff
        if after > before:
            moment = next(at for at in range(begin, begin + HOUR_S + 1, 60) if time.localtime(at).tm_gmtoff == after)
            yield (moment + before) // 60 % 1440, (after - before) // 60


def start_minute(name: str, first: int, window: int, skipped: Collection[tuple[int, int]]) -> int:
    """Return the start of a schedule. `skipped`: pairs of `skipped_minutes`."""
    digest = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
    minute = (first + digest % (window + 1)) % 1440
    for first_skipped, count in sorted(skipped):
        if 0 <= minute - first_skipped < count:
            minute += count
    return minute


if __name__ == "__main__":
    gaps = set(skipped_minutes(time.time()))
    starts = {name: start_minute(name, int(sys.argv[1]), int(sys.argv[2]), gaps) for name in sys.argv[3:]}
    print(json.dumps(starts))
