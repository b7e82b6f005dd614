"""Check that the record of a soak does not contradict itself: its rounds, its times, and the series of its timeline.

A timeline that lost a part, or has wrong times or wrong units, could hide that a rate fell (`fleet/judge/drift.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from fleet.judge.credibility import series_problem
from fleet.judge.evidence import identifying_params
from fleet.judge.host_view import HostView
from fleet.judge.reading_consistency import CLOCK_TOLERANCE_S
from fleet.quantities import counted
from schemas.catalogue import output_of
from schemas.records import MEASURED, Launch, Observation, Record, Samples
from schemas.stages import SOAK
from schemas.timeline import Series, Soak
from schemas.times import seconds_or_nan

Problem = tuple[str, str, str, str]
"""Name and scope of the inconclusive verdict that reports the problem, its reason, and the stage."""

KEPT_ROUNDS = 4
"""Number of launches of a soak that a record always keeps: the first and the last three. It also keeps some failed launches."""
SPARE_VALUES = 3
"""A series may have this many more values than rounds. If a supervisor is killed while it adds a round to the record, the next
supervisor adds the values of this round to the timeline once more."""
ROUNDING = 1e-3
"""The values of a series are rounded to five digits, and rounded again each time that a supervisor continues the soak. All
roundings together change a value by less than this share of it."""


def soak_problems(view: HostView, record: Record) -> Iterator[Problem]:
    """Yield a problem for each contradiction in the soak of a record; none if the record has no soak."""
    soak = record.soak
    if not soak:
        return
    launches = [launch for launch in record.launches if launch.stage == SOAK]
    for reason in (*_round_problems(soak, launches), *_time_problems(record, soak, launches)):
        yield f"stage.{SOAK}", "host", reason, SOAK
    figures = [item for item in record.observations if item.stage == SOAK]
    for series in soak.timeline.series:
        same = [item for item in figures if (item.name, item.scope) == (series.name, series.scope)]
        figure = next((item for item in same if identifying_params(item) == dict(series.params)), None)
        problem = series_problem(view.credible_criteria, series, figure) or _order_problem(series)
        # If the figure could not be measured in a round, this is a verdict of its own, and the series is not compared.
        if not problem and output_of(series.name) and all(item.status == MEASURED for item in same):
            problem = _figure_problem(series, soak, figure)
        if problem:
            yield series.name, series.scope, f"the timeline of the soak: {problem}", SOAK


def _round_problems(soak: Soak, launches: Sequence[Launch]) -> Iterator[str]:
    """Check the number and the order of the rounds, and that the timeline has nothing twice.

    Args:
        soak: the soak of the record. Its counts include the rounds whose launches the record does not keep.
        launches: the launches of the soak that the record keeps. `Launch.number` is the number of the round.
    """
    finished = sum(launch.succeeded for launch in launches)
    if finished > soak.finished:
        stated = counted(soak.finished, "round")
        yield f"the record has launches of {counted(finished, 'finished round')}, but states that only {stated} finished"
    if len(launches) < (least := min(soak.finished, KEPT_ROUNDS)):
        kept = f"{len(launches)} launch{'' if len(launches) == 1 else 'es'}"
        yield f"{counted(soak.finished, 'round')} finished, but the record has only {kept}, expected at least {least}"
    numbers = [launch.number for launch in launches]
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        yield f"the rounds are not in order: {', '.join(map(str, numbers))}"
    if max(numbers, default=0) > soak.rounds:
        yield f"the record has a launch of round {max(numbers)}, but only {counted(soak.rounds, 'round')} ended or were cut off"
    series = [(item.name, item.scope, *sorted(item.params.items())) for item in soak.timeline.series]
    if len(set(series)) < len(series):
        yield "the timeline has a duplicate series"
    if len(set(soak.timeline.events)) < len(soak.timeline.events):
        yield "the timeline has a duplicate event"


def _time_problems(record: Record, soak: Soak, launches: Sequence[Launch]) -> Iterator[str]:
    """Check that the times of the soak fit those of the record, of its launches and of its timeline."""
    began, ended = seconds_or_nan(soak.began), seconds_or_nan(soak.ended)
    if not began >= seconds_or_nan(record.began) - CLOCK_TOLERANCE_S:  # also if a time is invalid (NaN)
        yield f"the soak began at {soak.began}, but the record begins at {record.began}"
    if bool(soak.ended) != bool(soak.ended_by):
        yield (
            f"the soak ended at {soak.ended}, but the record does not state what ended it"
            if soak.ended
            else f"the soak was ended by {soak.ended_by}, but the record does not state when"
        )
    if soak.ended and not ended - began >= soak.soaked_s - CLOCK_TOLERANCE_S:
        yield f"the soak began at {soak.began} and ended at {soak.ended}, but states that it ran for {soak.soaked_s:.0f} s"
    if soak.ended and ended > seconds_or_nan(record.ended) + CLOCK_TOLERANCE_S:
        yield f"the soak ended at {soak.ended}, but the record ends at {record.ended}"
    if (in_launches_s := sum(launch.duration_s for launch in launches)) > soak.soaked_s + CLOCK_TOLERANCE_S:
        yield f"the soak ran for {soak.soaked_s:.0f} s, but its launches took {in_launches_s:.0f} s"
    if launches and seconds_or_nan(launches[0].began) < began - CLOCK_TOLERANCE_S:
        yield f"the soak began at {soak.began}, but its round {launches[0].number} began at {launches[0].began}"
    rates = [series for series in soak.timeline.series if output_of(series.name) and series.at]
    if not (launches and launches[-1].succeeded and rates and launches[-1].number == soak.rounds and soak.ended):
        return
    # The soak ended with its last round. Interruptions do not count in `soaked_s`, but they do in the timelines of earlier
    # versions. So the timeline lasts at least as long as `soaked_s`, and at most from the beginning to the end.
    width, newest = soak.timeline.bucket_s, max(series.at[-1] for series in rates)
    if (newest + 1) * width < soak.soaked_s - CLOCK_TOLERANCE_S or newest * width > ended - began + CLOCK_TOLERANCE_S:
        recorded = f"the last figure of the timeline was recorded after {newest * width:.0f} s"
        yield f"the soak ran for {soak.soaked_s:.0f} s, but {recorded}"


def _order_problem(series: Series) -> str:
    """Return a problem if a lowest value is above the mean, or a highest value below it; empty otherwise."""
    for low, mean, high in zip(series.low, series.mean, series.high, strict=True):
        rounding = ROUNDING * max(abs(low), abs(high))
        if not low - rounding <= mean <= high + rounding:
            return f"the mean {mean:g} {series.unit} is not between the lowest value {low:g} and the highest value {high:g}"
    return ""


def _figure_problem(series: Series, soak: Soak, figure: Observation | None) -> str:
    """Return why a series does not fit the figure over all rounds, which the record must have; empty if it fits."""
    if figure is None:
        return "the record has no figure with the scope and the parameters of this series"
    number = sum(series.n)
    if number > soak.rounds + SPARE_VALUES:
        return f"it has {counted(number, 'value')}, but only {counted(soak.rounds, 'round')} ended or were cut off"
    return _samples_problem(series, figure.samples) if number > 1 and figure.samples else ""


def _samples_problem(series: Series, samples: Samples) -> str:
    """Return a problem if the series has more values than the samples of the figure, or values outside their range.

    The samples may have more values. If a supervisor is killed, the timeline can lack the values of a round.
    """
    if sum(series.n) > samples.n:
        return f"it has {counted(sum(series.n), 'value')}, but the figure has {counted(samples.n, 'sample')}"
    low, high = min(series.low), max(series.high)
    if low < samples.min - ROUNDING * abs(samples.min) or high > samples.max + ROUNDING * abs(samples.max):
        values, range_ = f"{low:g} to {high:g}", f"{samples.min:g} to {samples.max:g}"
        return f"it has values of {values} {series.unit}, but the samples of the figure are {range_} {series.unit}"
    return ""
