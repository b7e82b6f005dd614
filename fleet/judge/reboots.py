"""Find reboots of a host during a run. The judge and the agent's soak use the same rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from fleet.judge.reading_consistency import CLOCK_TOLERANCE_S
from fleet.quantities import finite
from schemas.records import Metric, Snapshot
from schemas.scopes import HOST
from schemas.times import seconds_or_nan

BOOT_ID = "host.boot_id"
Readings = Sequence[tuple[Snapshot, Metric]]
"""The snapshots that have a reading, each with the reading, in the order of time."""


def reboots(uptimes: Readings, boot_ids: Readings) -> list[tuple[Snapshot, Snapshot]]:
    """Return the pairs of successive snapshots between which the host rebooted.

    The host rebooted if its boot ID changed, if its uptime fell, or if its uptime shows that it started between the snapshots
    (`_started_between`). A clock that was set back can look like a reboot too: if the snapshots are then in the wrong order,
    the uptime seems to fall.

    Args:
        uptimes: the readings of `host.uptime`.
        boot_ids: the readings of `host.boot_id`. Snapshots during a launch have none.
    """
    ids = [(snapshot, value) for snapshot, metric in boot_ids if (value := metric.values.get(HOST))]
    found = [(one, other) for (one, first), (other, second) in itertools.pairwise(ids) if first != second]
    known = [
        (snapshot, uptime)
        for snapshot, metric in uptimes
        if (uptime := finite(metric.values.get(HOST, ""))) is not None
    ]
    for (earlier, before), (later, after) in itertools.pairwise(known):
        elapsed_s = seconds_or_nan(later.at) - seconds_or_nan(earlier.at)
        rebooted = after < before
        if not rebooted and _started_between(before, after, elapsed_s):
            last_id = [value for snapshot, value in ids if snapshot.at <= earlier.at][-1:]
            next_id = [value for snapshot, value in ids if snapshot.at >= later.at][:1]
            rebooted = not last_id or last_id != next_id
        if rebooted and (earlier, later) not in found:
            found.append((earlier, later))
    return sorted(found, key=lambda pair: pair[1].at)


def _started_between(before: float, after: float, elapsed_s: float) -> bool:
    """Return whether the uptimes of two snapshots show that the host started after the first of them.

    The uptime then grew by less than the time between the snapshots, and it is shorter than this time. A suspended host does not
    look like this, because the uptime includes the time in which it was suspended.

    A correction of the clock changes the time between the snapshots. CLOCK_TOLERANCE_S allows for corrections up to this size.
    Because of the tolerance, only the boot ID shows a quick reboot in the first minutes after a boot. A larger correction is no
    reboot if the boot ID is unchanged (`reboots`), or if the uptime is longer than the time between the snapshots.
    """
    return after - before < elapsed_s - CLOCK_TOLERANCE_S and after < elapsed_s + CLOCK_TOLERANCE_S
