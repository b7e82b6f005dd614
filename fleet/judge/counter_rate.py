"""Compute the hourly rate of a counter before the run (since the counter was cleared or the host started), or during the run.

A counter that is high but does not move shows what happened earlier. It can be judged only together with the time over which it
counted.
"""

from __future__ import annotations

import itertools
import math

from fleet.judge.criteria import Criterion
from fleet.judge.host_view import HostView
from fleet.judge.reading_consistency import UPTIME
from fleet.judge.reboots import BOOT_ID, reboots
from fleet.quantities import finite, number, quantity
from schemas.records import Observation
from schemas.times import seconds_or_nan

COUNTER_AGE = "port.counter_age"
BASES = (UPTIME, COUNTER_AGE)
"""Readings that show for how long a counter has counted."""
HOUR_S = 3600.0
LEAST_AGE_S, LEAST_RUN_S = 24 * HOUR_S, 300.0
"""A count before the run is divided by at least LEAST_AGE_S, and a count during the run by at least LEAST_RUN_S, so that a few
normal errors in a short time are not a high rate. Before the run, links count errors while they train, and a new rack is rebooted
and cabled on the day of its acceptance. During the run, connections that a launch cuts when it ends are counted as errors."""
CONFIDENCE = "the rate is at least this, with a confidence of 99.87 %"
SIGMAS = 3.0
"""A count fails if it is more than this many standard deviations above the count that the limit allows. Of 740 links whose true
rate is exactly the limit, about one fails by chance."""


def deciding_readings(view: HostView, criterion: Criterion, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the readings that decide a verdict: `names`, and BASES too if a rate is judged and its counter is above 0."""
    metrics = (metric for name in names for _, metric in view.observations.metrics[name])
    if not criterion.per_hour or not any(metric.values and metric.greatest for metric in metrics):
        return names
    return (*names, *(name for name in BASES if name in view.observations.metrics))


def hours_before(view: HostView, reading: Observation) -> float | None:
    """Return for how many hours the counter had counted at this reading, at least LEAST_AGE_S; None if it is not known.

    That is the time since the counters of the port were cleared, or else the uptime of the host.
    """
    seconds = _reading_at(view, COUNTER_AGE, reading.scope, reading) if reading.name.startswith("port.") else None
    seconds = _reading_at(view, UPTIME, "host", reading) if seconds is None else seconds
    return None if seconds is None else max(seconds, LEAST_AGE_S) / HOUR_S


def hours_of_run(view: HostView) -> float | None:
    """Return for how many hours the host was up between its first and its last snapshot, at least LEAST_RUN_S.

    If the host rebooted between two snapshots, only the time since the reboot is added, because the reboot also reset the
    counters. None if the first or the last snapshot lacks the uptime, or if the host rebooted and the time of a snapshot is
    not valid.
    """
    readings = view.observations.metrics.get(UPTIME, ())
    phases = [(snapshot.stage, snapshot.phase) for snapshot, _ in readings]
    if not phases or (phases[0], phases[-1]) != (view.first_snapshot, view.last_snapshot):
        return None
    uptimes = [finite(metric.values.get("host", "")) for _, metric in readings]
    if uptimes[0] is None or uptimes[-1] is None:
        return None
    known = [(snapshot, uptime) for (snapshot, _), uptime in zip(readings, uptimes, strict=True) if uptime is not None]
    after_reboot = {id(later) for _, later in reboots(readings, view.observations.metrics.get(BOOT_ID, ()))}
    seconds = 0.0
    for (before, earlier), (snapshot, later) in itertools.pairwise(known):
        if id(snapshot) not in after_reboot:
            seconds += later - earlier
            continue
        # `later` is the time since the reboot. A clock that was set back looks like a reboot. `later` may then be longer than the
        # time between the snapshots.
        seconds += min(seconds_or_nan(snapshot.at) - seconds_or_nan(before.at), later)
    if math.isnan(seconds):  # a date is not valid, which `consistency` reports
        return None
    return max(seconds, LEAST_RUN_S) / HOUR_S


def least_rate(count: float, hours: float) -> float:
    """Return the lower confidence limit (99.87 %) of the rate per hour of a counter whose events are independent.

    In a short run, a link within its limit may by chance count more events than on average: 15 errors in five minutes (180 an
    hour) do not show that the rate is above 120 an hour. The formula is the approximation of Wilson and Hilferty (1931)
    for the lower limit of a Poisson mean, with three standard deviations.
    """
    if count <= 0:
        return 0.0
    return count * max(1 - 1 / (9 * count) - SIGMAS / (3 * math.sqrt(count)), 0.0) ** 3 / hours


def _reading_at(view: HostView, name: str, scope: str, at: Observation) -> float | None:
    """Return the value of the reading `name` in the snapshot that has the reading `at`; None if it is missing or not a number."""
    for snapshot, metric in view.observations.metrics.get(name, ()):
        if (snapshot.stage, snapshot.phase) == (at.stage, at.params.get("phase")):
            return finite(metric.values.get(scope, ""))
    return None


def describe_age(hours: float, count: float, increase: float) -> str:
    """Return in words how much was counted before the run, over which time, and how much was added during the run."""
    time = f"{number(hours / 24, 3)} days" if hours >= 48 else f"{number(hours, 3)} h"
    if hours * HOUR_S <= LEAST_AGE_S:
        time = f"at most {time}"
    added = f"{quantity(increase, '1')} more during the run" if increase else "unchanged during the run"
    return f"{quantity(count, '1')} counted in {time} before the run, {added}"
