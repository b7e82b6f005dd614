"""Judge a soak by itself: did it run as long as planned, did any rate fall below its own initial level, and when?

For each rate that a soak measured often enough, this module adds an observation such as `drift.stress.throughput`: the lowest
level of the rate as a share of its mean at the start of the soak, without what chance may explain. Criteria compare this
observation with a value or with the fleet, like any other.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.judge.evidence import Evidence, identifying_params
from fleet.judge.host_view import HostView
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation, Record
from schemas.reports import FAIL, Verdict, VerdictKind
from schemas.stages import SOAK
from schemas.timeline import RATES, Series, Soak, is_recorded
from schemas.times import format_span

DRIFT = "drift"
"""First component of the names of the added observations."""
REFERENCE_S, REFERENCE_SHARE = 3600.0, 0.1
"""The start of a soak is its first hour, or its first tenth if that is shorter. It is extended until it has MIN_REFERENCE
values. It consists of whole buckets, which are time intervals of `Timeline.bucket_s` seconds. The record has one mean for all
values of a figure in a bucket."""
MIN_REFERENCE = 3
WINDOW = 3
"""A level is the median of at least this many consecutive buckets, so that one slow round is no drift."""
MIN_BUCKETS, MIN_VALUES = 2 * WINDOW, 9
"""Drift is not evaluated if fewer buckets than this have a value, or if there are fewer values than this."""
DEVIATIONS = 4.0
"""A level below the start counts as a drift only as far as the difference exceeds this many standard deviations.

In simulated soaks with 9 to 240 rounds, a rate that varies by 5 % but does not fall had a drift below 1 in at most 1 of 100
soaks, and below 0.95 in none of 1800. A rate that also falls by 20 % in the middle of the soak had a drift below 0.9 in 4 of 10
soaks with 37 rounds, and in all with 150."""
MEDIAN_VARIANCE = math.pi / 2
"""Variance of the median of many normally distributed values, divided by the variance of their mean."""
QUANTILE, NORMAL_QUANTILE = 0.85, 1.4395
"""The variation of a rate follows from this quantile of the differences between its buckets, so a few steps do not change it.
NORMAL_QUANTILE is the same quantile of the absolute values of a normal distribution with a standard deviation of 1."""
FIRST_BUCKETS, MAX_INCREASE = 9, 3.0
"""The variation of a rate is limited to MAX_INCREASE times its variation in the first buckets. At least FIRST_BUCKETS buckets are
used for this. So a rate that begins to vary during the soak cannot hide its own fall."""
LAGS = 24
"""Differences between neighbors are small if a rate varies slowly. So the differences between buckets that are 1/LAGS of the soak
apart are used too."""
MAX_CUT_ROUNDS = 3
"""Highest number of interrupted rounds that gives no verdict. A round is interrupted if its supervisor, the process that runs the
rounds, ends."""
MIN_ROUND_SHARE, SPARE_ROUNDS = 0.9, 1
"""A rate must have at least MIN_ROUND_SHARE * (number of finished rounds) - SPARE_ROUNDS values."""
LATE_ROUNDS = 2.0
"""A series has ended early if its last value is more than this many rounds older than the newest value of any series of the same
name. This limit is at least the length of WINDOW buckets."""
ROUNDING_S = 0.1
"""The duration of a soak in a record may be too short by this much, because it is rounded."""


@dataclass(frozen=True, kw_only=True)
class RateCourse:
    """A rate over the soak, relative to its start."""

    start: float
    """Mean of the rate at the start."""
    shares: tuple[tuple[float, float, float], ...]
    """For each later bucket: its start and end in seconds since the soak began, and its mean divided by `start`."""
    deviation: float = 0.0
    """Standard deviation of the means of the buckets, divided by `start`; without steps and trends of the rate."""
    reference_buckets: int = 1
    """Number of buckets of the start."""

    def windows(self) -> Iterator[int]:
        """Yield the lengths of the windows for which levels are computed, in buckets: WINDOW, twice as many, and so on."""
        window = WINDOW
        while window <= len(self.shares):
            yield window
            window *= 2

    def levels(self, window: int, step: int = 1) -> list[float]:
        """Return the median of each window of `window` consecutive buckets. A window begins at every `step`-th bucket."""
        return [
            statistics.median(share for _, _, share in self.shares[start : start + window])
            for start in range(0, len(self.shares) - window + 1, step)
        ]

    def margin(self, window: int) -> float:
        """Return how far a level of `window` buckets may be below 1 by chance."""
        return DEVIATIONS * self.deviation * math.sqrt(1 / self.reference_buckets + MEDIAN_VARIANCE / window)

    @property
    def lowest(self) -> float:
        """The lowest level plus its margin: the rate fell at least to this share of its start.

        It exceeds 1 if the rate did not fall, or fell by less than the margin.
        """
        return min(self._bounds())[0]

    def _bounds(self) -> Iterator[tuple[float, int]]:
        """Yield the lowest level plus its margin for each window, and the window."""
        for window in self.windows():
            yield min(self.levels(window, window // WINDOW)) + self.margin(window), window

    def first_drop(self, limit: float) -> tuple[float, float | None] | None:
        """Return start and end, in seconds since the soak began, of the first period whose levels are below `limit`.

        A level counts only if it is below the limit by more than its margin. The end is None if the last level of the soak is in
        this period. The result is None if there is no such period. `limit` is a share, like the levels.
        """
        lowest, window = min(self._bounds())
        if lowest >= limit:
            return None
        levels = self.levels(window)
        is_low = [level + self.margin(window) < limit for level in levels]
        first = is_low.index(True)
        after = next((index for index in range(first, len(is_low)) if not is_low[index]), len(is_low))
        buckets = self.shares[first : after - 1 + window]
        middle = min(limit, (max(1.0, limit) + min(levels[first:after])) / 2)
        begin, end = _largest_sum([middle - share for _, _, share in buckets])
        return buckets[begin][0], None if after == len(is_low) else buckets[end - 1][1]


def _largest_sum(values: Sequence[float]) -> tuple[int, int]:
    """Return start and end (exclusive) of the consecutive values with the largest sum.

    The caller passes how far each bucket is below a level. The result is then the period in which the rate was low.
    """
    sums = [0.0, *itertools.accumulate(values)]
    pairs = itertools.combinations(range(len(sums)), 2)
    return max(pairs, key=lambda pair: sums[pair[1]] - sums[pair[0]])


def with_drift_observations(evidence: Evidence) -> Evidence:
    """Return the evidence, to which a drift observation is added for each rate with enough values."""
    records = tuple(
        replace(record, observations=(*record.observations, *_drifts(record))) if record.soak else record
        for record in evidence.records
    )
    return replace(evidence, records=records)


def _drifts(record: Record) -> Iterator[Observation]:
    for series in record.soak.timeline.series if record.soak else ():
        if record.soak and is_rate(series) and (course := rate_course(series, record.soak)):
            yield Observation(
                name=f"{DRIFT}.{series.name}",
                scope=series.scope,
                stage=SOAK,
                unit="1",
                status=MEASURED,
                value=round(course.lowest, 5),
                params=series.params,
            )


def is_drift(name: str) -> bool:
    """Return whether observations of that name are drifts, which the judge adds to the observations of a host."""
    return name.startswith(f"{DRIFT}.")


def is_rate(series: Series) -> bool:
    """Return whether a series is a rate that a benchmark measured: only rates can drift."""
    return series.unit in RATES and series.name.split(".")[0] in BENCHMARKS


def rate_course(series: Series, soak: Soak) -> RateCourse | None:
    """Return the course of a rate over the soak; None with too few values, or a mean of 0 or less at the start."""
    width = soak.timeline.bucket_s
    ends = max(min(REFERENCE_S, REFERENCE_SHARE * soak.planned_s), width)
    rows = list(zip(series.at, series.n, series.mean, strict=True))
    count = sum(at * width < ends for at, _, _ in rows)
    while count < len(rows) and sum(n for _, n, _ in rows[:count]) < MIN_REFERENCE:
        count += 1
    first, rest = rows[:count], rows[count:]
    if len(rows) < MIN_BUCKETS or sum(series.n) < MIN_VALUES or len(rest) < WINDOW:
        return None
    start = sum(n * mean for _, n, mean in first) / sum(n for _, n, _ in first)
    if not start > 0:
        return None
    means = [mean / start for _, _, mean in rows]
    at_first = _deviation(means[: max(count, FIRST_BUCKETS)])
    return RateCourse(
        start=start,
        shares=tuple((at * width, (at + 1) * width, mean / start) for at, _, mean in rest),
        deviation=min(_deviation(means), MAX_INCREASE * at_first),
        reference_buckets=count,
    )


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of values, estimated from the differences between them.

    The median difference is subtracted first, so a steady trend does not change the result. A single step hardly changes it.
    """
    return max(_deviation_at(values, lag) for lag in {1, max(1, len(values) // LAGS)})


def _deviation_at(values: Sequence[float], lag: int) -> float:
    differences = [later - earlier for earlier, later in zip(values, values[lag:], strict=False)]
    center = statistics.median(differences)
    distances = sorted(abs(each - center) for each in differences)
    position = QUANTILE * (len(distances) - 1)
    below, above = distances[math.floor(position)], distances[math.ceil(position)]
    quantile = below + (above - below) * (position - math.floor(position))
    return quantile / NORMAL_QUANTILE / math.sqrt(2)


def with_drift_time(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict. If a drift observation failed, add the time of the drift to the reason.

    Example: `from 04:12 on, at least 3.1 % below its level at the start of the soak`. The times, since the soak began, are those
    of the first drop below the limit; the percentage is that of the whole soak (`RateCourse.lowest`).
    """
    limit = verdict.limit
    if verdict.verdict != FAIL or not is_drift(verdict.name) or not isinstance(limit, int | float):
        return verdict
    name = verdict.name.removeprefix(f"{DRIFT}.")
    for soak in _soaks(view):
        for series in soak.timeline.series:
            same = (series.name, series.scope, dict(series.params)) == (name, verdict.scope, dict(verdict.params))
            course = rate_course(series, soak) if same else None
            if course and (drop := course.first_drop(limit)):
                text = _describe_drop(*drop, course.lowest)
                detail = "; ".join(part for part in (text, verdict.detail) if part)
                return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail)
    return verdict


def _describe_drop(start_s: float, end_s: float | None, lowest: float) -> str:
    period = f"from {format_clock(start_s)} " + ("on" if end_s is None else f"to {format_clock(end_s)}")
    if lowest >= 1:  # the criterion has a limit above 1
        return period
    return f"{period}, at least {(1 - lowest) * 100:.1f} % below its level at the start of the soak"


def format_clock(seconds: float) -> str:
    """Return a time since the soak began: `04:12` (hours and minutes), or `45 min 10 s` in the first hour."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _soaks(view: HostView) -> Iterator[Soak]:
    for record in view.evidence.records:
        if record.soak:
            yield record.soak


def judge_soak(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each way in which the soak of the host was not as planned.

    These are: no record of a soak, a wrong duration, failed or interrupted rounds, too few values to evaluate a drift,
    figures that were no longer measured at the end, and rates that too few rounds measured.
    """
    if not any(stage.name == SOAK for stage in view.plan.stages):
        return
    soaks = list(_soaks(view))
    if not soaks:
        yield view.inconclusive(f"stage.{SOAK}", "host", "the plan has a soak, but no record of the host has one", SOAK)
    for soak in soaks:
        for why in _shortcomings(view, soak):
            yield view.inconclusive(f"stage.{SOAK}", "host", why, SOAK, kind=VerdictKind.UNFINISHED)
        for scope, reasons in ended_early(soak).items():
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            yield view.inconclusive(f"stage.{SOAK}", scope, reasons[0] + more, SOAK, kind=VerdictKind.UNFINISHED)


def _shortcomings(view: HostView, soak: Soak) -> Iterator[str]:
    planned_s = view.plan.stage(SOAK).duration_s  # from the plan, because the host's own value may be wrong
    lasted = f"{format_span(soak.soaked_s)} of {format_span(planned_s)}"
    if soak.planned_s != planned_s:
        yield f"the host planned to soak {format_span(soak.planned_s)}, but the plan has {format_span(planned_s)}"
    if not soak.ended:
        yield f"cut off after {lasted}: resume the run"
    elif soak.reason:
        yield f"ended after {lasted}: {soak.reason}"
    elif soak.soaked_s < planned_s - ROUNDING_S:
        yield f"ended after {lasted}, without a reason"
    launches = [launch for launch in view.evidence.launches() if launch.stage == SOAK and not launch.succeeded]
    if failed := max(soak.failed, len(launches)):
        first = f": round {launches[0].number}: {launches[0].reason or launches[0].outcome}" if launches else ""
        yield f"{failed} of {max(soak.rounds, failed)} rounds did not finish{first}"
    if soak.cut > MAX_CUT_ROUNDS:
        yield f"{soak.cut} of {soak.rounds} rounds were interrupted because their supervisor process ended, for an unknown reason"
    needs_drift = planned_s >= REFERENCE_S and not view.plan.rehearsal
    if soak.ended and not soak.reason and needs_drift and (names := rates_without_drift(soak)):
        yield f"too few rounds to evaluate the drift of {', '.join(names)}: {soak.rounds} in {format_span(soak.soaked_s)}"
    needs_series = needs_drift or not soak.timeline.left_out
    if soak.ended and not soak.reason and needs_series and (names := _rates_without_series(view, soak)):
        yield f"the timeline has no series of {', '.join(names)}, so the drift is unknown"


def _rates_without_series(view: HostView, soak: Soak) -> list[str]:
    """Return the names of the rates that were measured in the soak and have a criterion for drift, but no series."""
    series = [(item.name, item.scope, dict(item.params)) for item in soak.timeline.series]
    drifts = [criterion for criterion in view.criteria().values() if is_drift(criterion.name)]
    return sorted(
        {
            item.name
            for record in view.evidence.records
            if record.soak
            for item in record.observations
            if (item.stage, item.status) == (SOAK, MEASURED)
            and is_recorded(item.name, item.unit)
            and any(criterion.matches_name(f"{DRIFT}.{item.name}") for criterion in drifts)
            and (item.name, item.scope, identifying_params(item)) not in series
        }
    )


def ended_early(soak: Soak) -> Mapping[str, Sequence[str]]:
    """Return scope -> messages on its series that ended early, and on its rates that were measured in too few rounds."""
    width = soak.timeline.bucket_s
    longest: dict[str, float] = defaultdict(float)
    for series in soak.timeline.series:
        longest[series.name] = max(longest[series.name], _end_s(series, width))
    tolerance_s = max(LATE_ROUNDS * soak.soaked_s / max(1, soak.rounds), WINDOW * width)
    min_rounds = MIN_ROUND_SHARE * soak.finished - SPARE_ROUNDS
    messages: dict[str, list[str]] = defaultdict(list)
    for series in soak.timeline.series:
        end_s, last_s = _end_s(series, width), longest[series.name]
        if end_s < last_s - tolerance_s:
            times = f"{format_clock(end_s)} of the soak, but this host measured another {series.name} at {format_clock(last_s)}"
            messages[series.scope].append(f"{_series_name(series)} was last measured at {times}")
        elif is_rate(series) and sum(series.n) < min_rounds:
            messages[series.scope].append(
                f"{_series_name(series)} was measured in {sum(series.n)} of {soak.finished} rounds"
            )
    return messages


def _end_s(series: Series, width: float) -> float:
    return (series.at[-1] + 1) * width if series.at else 0.0


def _series_name(series: Series) -> str:
    params = ",".join(f"{key}={value}" for key, value in sorted(series.params.items()))
    return f"{series.name}[{params}]" if params else series.name


def rates_without_drift(soak: Soak) -> list[str]:
    """Return the names of the rates with too few values to evaluate drift. This is normal in a soak of less than an hour."""
    return sorted({series.name for series in soak.timeline.series if is_rate(series) and not rate_course(series, soak)})
