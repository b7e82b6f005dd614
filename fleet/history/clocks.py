"""Find runs whose date is wrong because a clock was wrong. Trends leave these runs out.

The date of a run is the time that the control node's clock showed when the run was planned. It is compared with the present
time, with the clocks of the hosts, with the date of the first version of Rackproof, and with the times at which the other runs
were added to the history.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fleet.history.index import Index
from fleet.history.rows import CLOCK_TOLERANCE_S
from fleet.quantities import counted
from schemas.times import epoch_seconds

EARLIEST = "2024-01-01 00:00:00"
"""No run can have begun earlier, because Rackproof did not exist."""
LONGEST_RUN_S = 90 * 86400.0
MIN_LATER_DAYS = 3
ALONE_S = 365 * 86400.0
"""If the first of three or more runs began more than this many seconds before the second one, a note asks whether the date of the
first is right. Runs with a wrong date are not counted."""


def clock_fault(nonce: str, entry: Mapping[str, Any], ends: Sequence[str], index: Index | None, now: str) -> str:
    """Return why the date of a run cannot be right; an empty text if the date can be right.

    Args:
        nonce: nonce of the run.
        entry: the run as in the index.
        ends: when the hosts finished, by their own clocks. The median is used, because the clock of one host may be wrong.
        index: the history before the run is added; None if there is no history yet.
        now: the present time of this machine, in the format of `entry["began"]`.
    """
    known = index.runs.get(nonce) if index else None
    if known and known.get("clock") and known["began"] == entry["began"]:
        return str(known["clock"])  # found when the run was added; the clock of this machine may have been set since
    began, end = seconds(entry["began"]), statistics.median_low([end for end in ends if end] or [entry["ended"]])
    if began > seconds(now) + CLOCK_TOLERANCE_S:
        return f"the run began at {entry['began']} UTC, after the present time"
    if began < seconds(EARLIEST):
        return f"the run began at {entry['began']} UTC, before there was Rackproof"
    if not began - CLOCK_TOLERANCE_S <= seconds(end) <= began + LONGEST_RUN_S:
        return (
            f"the run began at {entry['began']} UTC by the clock of the control node, and ended at {end} UTC by the clocks of "
            "its hosts"
        )
    if index and is_behind(index, now) and began > seconds(now) - LONGEST_RUN_S:
        return (
            f"the run began at {entry['began']} UTC, but this machine's clock ({now}) is behind: most days on which runs were "
            "added are later"
        )
    return ""


def is_behind(index: Index, now: str) -> bool:
    """Return whether the clock of this machine is behind: most days on which runs were added are after its present time.

    At least MIN_LATER_DAYS days must be later. Days are counted instead of runs, because a thousand runs may have been imported
    on one day on which the clock was ahead.
    """
    limit = seconds(now) + CLOCK_TOLERANCE_S
    added = {run["added"][:10]: seconds(run["added"]) for run in index.runs.values() if "added" in run}
    later = sum(time > limit for time in added.values())
    return later >= MIN_LATER_DAYS and 2 * later > len(added)


def wrong_dates(index: Index) -> list[str]:
    """Return for each run why its date cannot be right; an empty text if the date can be right."""
    limit = datetime.now(UTC).timestamp() + CLOCK_TOLERANCE_S
    future = "it began after the present time"
    return [run.get("clock", "") or future * (seconds(run["began"]) > limit) for run in index.runs.values()]


def clock_notes(index: Index, now: str) -> list[str]:
    """Return notes on clocks that are or were wrong, to be shown with every answer from the history."""
    began = {nonce: seconds(run["began"]) for nonce, run in index.runs.items()}
    wrong = {nonce for nonce, run in index.runs.items() if run.get("clock")}
    later = [nonce for nonce in began if nonce not in wrong and began[nonce] > seconds(now) + CLOCK_TOLERANCE_S]
    notes = []
    if is_behind(index, now):
        notes.append(
            f"the clock of this machine shows {now} UTC, but most days on which runs were added to the history are later"
        )
    elif later:
        notes.append(
            f"{counted(len(later), 'run')} began after the present time: a clock was or is wrong: {_names(index, later)}"
        )
    if wrong:
        notes.append(f"{counted(len(wrong), 'run')} with a wrong date, left out of all trends: {_names(index, wrong)}")
    times = sorted((time, nonce) for nonce, time in began.items() if nonce not in wrong)
    if len(times) > 2 and times[1][0] - times[0][0] > ALONE_S:
        notes.append(
            f"{index.runs[times[0][1]]['run']} began more than a year before every other run with a credible date: is its "
            "date right?"
        )
    return notes


def _names(index: Index, nonces: Iterable[str]) -> str:
    names = sorted(index.runs[nonce]["run"] for nonce in nonces)
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def seconds(text: str) -> float:
    """Return the time of a run in the index as seconds since 1970."""
    return epoch_seconds(text.replace(" ", "T") + "Z")
