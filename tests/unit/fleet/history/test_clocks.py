"""A run with an implausible date gets a note and is marked in the history, whether a clock was ahead or behind."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fleet.history.clocks import clock_fault, clock_notes
from fleet.history.database import History
from fleet.history.index import Index, read_index
from fleet.history.rows import RunRows
from fleet.history.store import add_run
from schemas.baselines import REAL

NOW = "2026-06-01 12:00:00"


def entry(began: str, ended: str = "", **more: str) -> dict[str, Any]:
    """Return a run's entry in the index of the history; without `ended`, the run ended when it began."""
    texts = {"run": began[:10], "profile": "", "rackproof": "", "decision": "accepted", **more}
    return {**texts, "began": began, "ended": ended or began, "hosts": 1, "gpus": 8, "notes": []}


def index_of(*entries: dict[str, Any]) -> Index:
    return Index(kind=REAL, runs={f"{number:032x}": item for number, item in enumerate(entries)})


ADDED = [entry(f"2026-0{month}-01 00:00:00", added=f"2026-0{month}-02 00:00:00") for month in range(1, 6)]
"""Five runs, one a month, each of which was added to the history one day after it began."""


@pytest.mark.parametrize(
    ("began", "ended", "now", "reason"),
    [
        ("2026-05-30 00:00:00", "", NOW, ""),
        ("2024-02-01 00:00:00", "", NOW, ""),  # an old run that is imported late
        ("2026-06-02 00:00:00", "", NOW, ""),  # another time zone, or a clock that is hours ahead
        ("1970-01-01 00:10:00", "", NOW, "before there was Rackproof"),
        ("2000-01-01 00:00:00", "2026-05-30 00:00:00", NOW, "before there was Rackproof"),
        ("2099-01-01 00:00:00", "", NOW, "after the present time"),
        ("2025-01-01 00:00:00", "2026-05-30 00:00:00", NOW, "by the clock of the control node, and ended at"),
        ("2026-05-30 00:00:00", "2026-05-01 00:00:00", NOW, "by the clock of the control node, and ended at"),
        ("2025-01-01 00:00:00", "", "2025-01-01 01:00:00", "most days on which runs were added are later"),
        # An old run: its date is credible even if this machine's clock is behind.
        ("2024-03-01 00:00:00", "", "2025-01-01 01:00:00", ""),
    ],
)
def test_implausible_date_is_detected(began: str, ended: str, now: str, reason: str) -> None:
    fault = clock_fault("f" * 32, entry(began, ended), (), index_of(*ADDED), now)
    assert bool(fault) == bool(reason)
    assert reason in fault


def test_wrong_clock_of_one_host_does_not_make_the_date_implausible() -> None:
    run = entry("2026-05-30 00:00:00", "2099-01-01 00:00:00")
    right, wrong = "2026-05-30 01:00:00", "2099-01-01 00:00:00"
    assert clock_fault("f" * 32, run, (wrong, right, right), None, NOW) == ""
    assert "ended at 2099" in clock_fault("f" * 32, run, (wrong, wrong, right), None, NOW)


def test_run_that_was_added_while_the_clock_was_ahead_does_not_affect_other_runs() -> None:
    ahead = entry("2099-01-01 00:00:00", added="2099-01-01 01:00:00")
    index = index_of(*ADDED, ahead)
    assert clock_fault("f" * 32, entry("2026-06-01 00:00:00"), (), index, NOW) == ""
    assert clock_notes(index, NOW) == ["1 run began after the present time: a clock was or is wrong: 2099-01-01"]


def test_runs_that_were_imported_while_the_clock_was_ahead_do_not_affect_other_runs() -> None:
    imported = [entry(f"2026-0{month}-01 00:00:00", added="2030-01-01 00:00:00") for month in range(1, 6)]
    assert clock_fault("f" * 32, entry("2026-05-30 00:00:00"), (), index_of(*imported), NOW) == ""


def test_wrong_clock_of_this_machine_is_noted() -> None:
    (note,) = clock_notes(index_of(*ADDED), "2020-01-01 00:00:00")
    assert "the clock of this machine shows 2020-01-01 00:00:00 UTC" in note


def test_run_long_before_all_others_is_noted() -> None:
    notes = clock_notes(index_of(entry("2024-06-01 00:00:00"), *ADDED), NOW)
    assert notes == [
        "2024-06-01 began more than a year before every other run with a credible date: is its date right?"
    ]


def test_date_remains_implausible_if_the_run_is_added_again_with_a_correct_clock(tmp_path: Path) -> None:
    def add(number: int, began: str, now: datetime) -> list[str]:
        rows = RunRows(kind=REAL, nonce=f"{number:032x}", entry=entry(began), causes=(), hosts=())
        return add_run(tmp_path, rows, now)[0]

    for month in (1, 2, 3):
        assert add(month, f"2026-0{month}-01 00:00:00", datetime(2026, month, 2, tzinfo=UTC)) == []
    set_back = "2025-03-01 00:00:00"
    for now in (datetime(2025, 3, 1, 1, tzinfo=UTC), datetime(2026, 6, 1, tzinfo=UTC)):
        assert "a clock is wrong" in add(9, set_back, now)[0]
    index = read_index(tmp_path, REAL)
    assert index
    assert [run["added"] for run in index.runs.values() if run.get("clock")] == ["2025-03-01 01:00:00"]
    assert len(History(tmp_path).rows("from runs where clock <> ''")) == 1
