"""Test that a schedule starts at a time that every day has: systemd does not start a timer on a day that lacks its time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date, timedelta

import pytest

from tests import ROOT

SCRIPT = ROOT / "roles" / "schedule" / "files" / "start_minutes.py"
ZONES = {  # as in POSIX, so that the tests need no database of time zones
    "UTC": "UTC0",
    "Berlin": "CET-1CEST,M3.5.0,M10.5.0/3",
    "Helsinki": "EET-2EEST,M3.5.0/3,M10.5.0/4",
    "Los Angeles": "PST8PDT,M3.2.0,M11.1.0",
    "Cairo": "EET-2EEST,M4.5.5/0,M10.5.4/24",
    "Nuuk": "<-02>2<-01>,M3.5.0/-1,M10.5.0/0",
    "Lord Howe": "<+1030>-10:30<+11>-11,M10.1.0,M4.1.0",
}
SKIPPED = {"UTC": 0, "Lord Howe": 30}
"""Zone -> minutes by which its clock is set forward; 60 in all other zones."""
EVERY = 10
"""A start is tried every EVERY minutes of a day."""

_spec = importlib.util.spec_from_file_location("start_minutes", SCRIPT)
assert _spec
assert _spec.loader
start_minutes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(start_minutes)


@pytest.fixture(params=ZONES)
def zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", ZONES[request.param])
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


def lacks(day: date, minute: int) -> bool:
    """Return whether the clock does not show this minute on a day."""
    hour, minute = divmod(minute % 1440, 60)
    clock = time.localtime(time.mktime((day.year, day.month, day.day, hour, minute, 0, 0, 0, -1)))
    return (clock.tm_hour, clock.tm_min) != (hour, minute)


def test_start_is_at_a_time_that_every_day_has_and_is_moved_only_if_necessary(zone: str) -> None:
    skipped = set(start_minutes.skipped_minutes(time.time()))
    today = date.today()  # a local day
    days = [today + timedelta(number) for number in range(700)]
    moved = 0
    for first in range(0, 1440, EVERY):
        start = start_minutes.start_minute("rack1", first, 0, skipped)
        assert not any(lacks(day, start) for day in days)
        assert start == first or any(lacks(day, first) for day in days)
        moved += start != first
    assert moved == SKIPPED.get(zone, 60) // EVERY


def test_schedules_do_not_start_together() -> None:
    names = [f"rack{number}" for number in range(40)]
    command = [sys.executable, str(SCRIPT), "120", "120", *names]
    environment = {"TZ": ZONES["Berlin"]}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    starts = json.loads(printed)
    assert list(starts) == names
    assert all(180 <= start <= 240 for start in starts.values())
    assert len(set(starts.values())) > 20
