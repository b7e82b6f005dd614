"""A soak against itself: did it last, and did any rate fall under what it was at the beginning, and from when on?

Of every rate that the rounds brought, the lowest level that it fell to, as a share of its own first hour (the first tenth of a
short soak), is one more observation, `drift.stress.throughput` and so on: criteria hold it against a value, or against the
fleet's, as they do any other.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from schemas.catalogue import BENCHMARKS
from schemas.records import MEASURED, Observation, Record
from schemas.reports import FAIL, Verdict, VerdictKind
from schemas.stages import SOAK
from schemas.timeline import RATES, Series, Soak

DRIFT = "drift"
"""First component of the names of these observations."""
REFERENCE_S, REFERENCE_SHARE = 3600.0, 0.1
WINDOW = 3
"""Buckets: a level is the median of so many, so that one slow round is no drift."""
MIN_BUCKETS = 2 * WINDOW
"""Buckets with a figure that a drift needs."""
MOST_CUT = 3
"""Rounds cut off with their supervisor: more of them are no accident, and what cut them off is not known."""
LEAST_SHARE, SPARE = 0.9, 1
"""Share of the rounds in which a rate must be present, and a number of rounds that may be missing besides."""
LATE_ROUNDS = 2.0
"""By so many rounds a figure may end before the longest of its name."""
ROUNDING_S = 0.1
"""Rounding of the soaked time in the record."""


@dataclass(frozen=True, kw_only=True)
class RateCourse:
    """How a figure went."""

    start: float
    """Its level in the first hour."""
    shares: tuple[tuple[float, float, float], ...]
    """Of each bucket after that: when it begins and ends, and its mean as a share of the start."""

    @property
    def levels(self) -> list[float]:
        """The median of every WINDOW buckets that follow each other."""
        return [
            statistics.median(share for _, _, share in self.shares[scope_key : scope_key + WINDOW])
            for scope_key in range(len(self.shares) - WINDOW + 1)
        ]

    @property
    def lowest(self) -> float:
        """The lowest level."""
        return min(self.levels)

    def fell(self, limit: float) -> tuple[float, float | None]:
        """From when to when it was first under the limit, which it was; None: until the end."""
        under = [level < limit for level in self.levels]
        first = under.index(True)
        after = next((scope_key for scope_key in range(first, len(under)) if not under[scope_key]), len(under))
        bad = [one for one in self.shares[first : after - 1 + WINDOW] if one[2] < limit]
        return bad[0][0], None if after == len(under) else bad[-1][1]


def with_drift_observations(left: Evidence) -> Evidence:
    """The evidence with how far each rate fell under its own start."""
    records = tuple(
        replace(record, observations=(*record.observations, *_drifts(record))) if record.soak else record
        for record in left.records
    )
    return replace(left, records=records)


def _drifts(record: Record) -> Iterator[Observation]:
    for series in record.soak.timeline.series if record.soak else ():
        if record.soak and is_rate(series) and (result := rate_course(series, record.soak)):
            yield Observation(
                name=f"{DRIFT}.{series.name}",
                scope=series.scope,
                stage=SOAK,
                unit="1",
                status=MEASURED,
                value=round(result.lowest, 5),
                params=series.params,
            )


def is_drift(name: str) -> bool:
    """Return whether observations of that name are drifts, which the judge adds to what a host measured."""
    return name.startswith(f"{DRIFT}.")


def is_rate(series: Series) -> bool:
    """Return whether the series is a rate."""
    return series.unit in RATES and series.name.split(".")[0] in BENCHMARKS


def rate_course(series: Series, soak: Soak) -> RateCourse | None:
    """Return the course of a figure over the soak; None if there are too few values."""
    width = soak.timeline.bucket_s
    ends = max(min(REFERENCE_S, REFERENCE_SHARE * soak.planned_s), width)
    rows = list(zip(series.at, series.n, series.mean, strict=True))
    first = [row for row in rows if row[0] * width < ends] or rows[:1]
    rest = rows[len(first) :]
    if len(rows) < MIN_BUCKETS or len(rest) < WINDOW:
        return None
    start = sum(n * mean for _, n, mean in first) / sum(n for _, n, _ in first)
    if not start > 0:
        return None
    return RateCourse(start=start, shares=tuple((at * width, (at + 1) * width, mean / start) for at, _, mean in rest))


def with_drift_time(view: HostView, verdict: Verdict) -> Verdict:
    """A drift that fails, with when it came: `from 04:12 on, 3.1 % under its first hour`."""
    if verdict.verdict != FAIL or not verdict.name.startswith(f"{DRIFT}.") or not isinstance(verdict.limit, float):
        return verdict
    name = verdict.name.removeprefix(f"{DRIFT}.")
    for soak in _soaks(view):
        for series in soak.timeline.series:
            same = (series.name, series.scope, dict(series.params)) == (name, verdict.scope, dict(verdict.params))
            result = rate_course(series, soak) if same else None
            if result and result.lowest < verdict.limit:
                text = _sentence(result, soak, verdict.limit)
                detail = "; ".join(part for part in (text, verdict.detail) if part)
                return replace(verdict, reason=f"{verdict.reason}; {text}", detail=detail)
    return verdict


def _sentence(result: RateCourse, soak: Soak, limit: float) -> str:
    since, until = result.fell(limit)
    under = f"{(1 - result.lowest) * 100:.1f} % under its {reference_name(soak)}"
    return (
        f"from {format_clock(since)} on, {under}"
        if until is None
        else f"from {format_clock(since)} to {format_clock(until)}, {under}"
    )


def reference_name(soak: Soak) -> str:
    """Return what the figures of a soak are compared with, in words."""
    return "first hour" if REFERENCE_SHARE * soak.planned_s >= REFERENCE_S else "first tenth"


def format_clock(seconds: float) -> str:
    """`04:12` hours and minutes of the soak; `0:45` minutes and seconds, with the words, of one that is young."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}" if minutes >= 60 else f"{minutes} min {rest:02d} s"


def _soaks(view: HostView) -> Iterator[Soak]:
    for record in view.evidence.records:
        if record.soak:
            yield record.soak


def judge_soak(view: HostView) -> Iterator[Verdict]:
    """Judge whether the host soaked as long as planned, every round finished, and drift could be evaluated."""
    if not any(stage.name == SOAK for stage in view.plan.stages):
        return
    result = list(_soaks(view))
    for why in () if result else ("the plan has a soak, and no record of the host has any",):
        yield view.inconclusive(f"stage.{SOAK}", "host", why, SOAK)
    for soak in result:
        for why in _shortcomings(view, soak):
            yield view.inconclusive(f"stage.{SOAK}", "host", why, SOAK, kind=VerdictKind.UNFINISHED)
        for scope, reasons in ended_early(soak).items():
            more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
            yield view.inconclusive(f"stage.{SOAK}", scope, reasons[0] + more, SOAK, kind=VerdictKind.UNFINISHED)


def _shortcomings(view: HostView, soak: Soak) -> Iterator[str]:
    planned_s = view.plan.stage(SOAK).duration_s  # the host's own word on it is not enough
    lasted = f"{format_span(soak.soaked_s)} of {format_span(planned_s)}"
    if soak.planned_s != planned_s:
        yield f"the host planned to soak {format_span(soak.planned_s)}, the plan says {format_span(planned_s)}"
    if not soak.ended:
        yield f"cut off after {lasted}: resume the run"
    elif soak.reason:
        yield f"ended after {lasted}: {soak.reason}"
    elif soak.soaked_s < planned_s - ROUNDING_S:
        yield f"ended after {lasted}, and does not say why"
    launches = [launch for launch in view.evidence.launches() if launch.stage == SOAK and not launch.good]
    if failed := max(soak.failed, len(launches)):
        first = f": round {launches[0].number}: {launches[0].reason or launches[0].outcome}" if launches else ""
        yield f"{failed} of {max(soak.rounds, failed)} rounds did not come to their end{first}"
    if soak.cut > MOST_CUT:
        yield f"{soak.cut} of {soak.rounds} rounds were cut off with their supervisor, and nothing says by what"
    long = planned_s >= REFERENCE_S and not view.plan.rehearsal
    if soak.ended and not soak.reason and long and (names := rates_without_drift(soak)):
        yield f"too few rounds to tell a drift of {', '.join(names)}: {soak.rounds} in {format_span(soak.soaked_s)}"


def ended_early(soak: Soak) -> Mapping[str, Sequence[str]]:
    """Scope -> its figures that ended well before the longest of their name, or came in far too few rounds."""
    width = soak.timeline.bucket_s
    longest: dict[str, float] = defaultdict(float)
    for one in soak.timeline.series:
        longest[one.name] = max(longest[one.name], _ends_s(one, width))
    late = max(LATE_ROUNDS * soak.soaked_s / max(1, soak.rounds), WINDOW * width)
    least = LEAST_SHARE * soak.finished - SPARE
    result: dict[str, list[str]] = defaultdict(list)
    for one in soak.timeline.series:
        ends, last = _ends_s(one, width), longest[one.name]
        if ends < last - late:
            result[one.scope].append(
                f"{_named(one)} was last seen at {format_clock(ends)}, others like it at {format_clock(last)}"
            )
        elif is_rate(one) and sum(one.n) < least:
            result[one.scope].append(f"{_named(one)} came in {sum(one.n)} of {soak.finished} rounds")
    return result


def _ends_s(series: Series, width: float) -> float:
    return (series.at[-1] + 1) * width if series.at else 0.0


def _named(series: Series) -> str:
    params = ",".join(f"{key}={value}" for key, value in sorted(series.params.items()))
    return f"{series.name}[{params}]" if params else series.name


def rates_without_drift(soak: Soak) -> list[str]:
    """Return the rates with too few values to evaluate drift. In a soak of less than an hour this is expected."""
    return sorted({series.name for series in soak.timeline.series if is_rate(series) and not rate_course(series, soak)})


def format_span(seconds: float) -> str:
    """`23 h 12 min`, `45 min 10 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
