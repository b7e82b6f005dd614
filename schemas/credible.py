"""What a schema cannot say of a record: its scopes name each part once, its figures are measurements', its columns fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from schemas.scopes import Scope
from schemas.timeline import Series, Soak

if TYPE_CHECKING:
    from schemas.records import Metric, Observation, Record, Value

COLLECTOR = "collector."
"""Begins the names by which snapshots, and they alone, tell how their collectors fared."""
LEAST, MOST = 1e-60, 1e60
"""What is measured is 0 or between these, either way; sums and shares of what is not could be infinite."""
MOST_IN_BUCKET, LONGEST_BUCKET_S = 1e9, 1e9


def incredible(record: Record) -> str:
    """Where and why a record that its schema passed is none that we wrote; empty where nothing speaks against it.

    Of what it has in snapshots see `of_metric`.
    """
    told = [*record.observations, *(seen for launch in record.launches for seen in launch.observations)]
    return next(itertools.chain(_of_observations(told), _of_soak(record.soak)), "")


def of_metric(metric: Metric) -> str:
    """The same of one metric of a snapshot."""
    if why := _of_figures(metric.values.values()):
        return f"{metric.name}: {why}"
    return next(_of_scopes(metric.name, (*metric.values, *metric.absent)), "")


def _of_observations(told: Sequence[Observation]) -> Iterator[str]:
    """Of thousands a host few names and scopes differ."""
    for name in {seen.name for seen in told}:
        if name.startswith(COLLECTOR):
            yield f"observations: {name}: collectors are told of in snapshots, and no benchmark"
    yield from _of_scopes("observations", {seen.scope for seen in told})
    samples = [seen.samples for seen in told if seen.samples]
    values = [seen.value for seen in told]
    params = [value for seen in told for value in seen.params.values()]
    repeated = [value for each in samples for value in (each.min, each.p50, each.max, each.cv, each.precision)]
    for where, figures in ("value", values), ("params", params), ("samples", repeated):
        if why := _of_figures(figures):
            yield f"observations: {where}: {why}"


def _of_figures(figures: Iterable[Value]) -> str:
    floats = [abs(figure) for figure in figures if type(figure) is float and figure]  # an int has 64 bits at most
    if (least := min(floats, default=LEAST)) < LEAST:
        return f"{least} is nearer to 0 than any measurement"
    if (most := max(floats, default=MOST)) > MOST:
        return f"{most} is farther from 0 than any measurement"
    return ""


def _of_scopes(where: str, scopes: Iterable[str]) -> Iterator[str]:
    for scope in scopes:
        if "," in scope and Scope.parse(scope).is_repeated:
            yield _twice(where, scope)


def _twice(where: str, scope: str) -> str:
    return f"{where}: scope {scope} says the same twice"


def _of_soak(soak: Soak | None) -> Iterator[str]:
    if not soak:
        return
    if soak.timeline.bucket_s > LONGEST_BUCKET_S:
        yield f"soak.timeline.bucket_s: {soak.timeline.bucket_s:g} s, more than the {LONGEST_BUCKET_S:g} s that one may have"
    for event in soak.timeline.events:
        yield from _of_scopes(f"soak.timeline.events: {event.name}", (event.scope,))
    for series in soak.timeline.series:
        where = f"soak.timeline.series: {series.name}"
        yield from _of_scopes(where, (series.scope,))
        if why := _of_columns(series):
            yield f"{where} {series.scope}: {why}"


def _of_columns(series: Series) -> str:
    lengths = [len(column) for column in (series.at, series.n, series.low, series.mean, series.high)]
    if len(set(lengths)) > 1:
        return f"at, n, low, mean and high have {', '.join(map(str, lengths))} entries, and each needs as many"
    if any(later <= earlier for earlier, later in itertools.pairwise(series.at)):
        return "its buckets (at) are not in order"
    if max(series.n, default=0) > MOST_IN_BUCKET:
        return f"n: {max(series.n)} figures in one bucket, more than the {MOST_IN_BUCKET:g} that it may have"
    return _of_figures((*series.low, *series.mean, *series.high))
