"""What a schema cannot say of a record: its scopes name each part once, its figures are measurements', its columns fit."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from schemas.timeline import Series, Soak

if TYPE_CHECKING:
    from schemas.records import Metric, Observation, Record, Value

COLLECTOR = "collector."
"""Begins the names by which snapshots, and they alone, tell how their collectors fared."""
LEAST = 1e-60
"""No measurement is nearer to 0, and a share of it could be infinite; as observation.schema.json has 1e60 for the most."""
MOST_IN_BUCKET, LONGEST_BUCKET_S = 1e9, 1e9


def incredible(record: Record) -> str:
    """Where and why a record that its schema passed is none that we wrote; empty where nothing speaks against it.

    Of what it has in snapshots see `of_metric`.
    """
    told = [*record.observations, *(seen for launch in record.launches for seen in launch.observations)]
    return next(itertools.chain(_of_observations(told), _of_soak(record.soak)), "")


def of_metric(metric: Metric) -> str:
    """The same of one metric of a snapshot."""
    told = (f"{metric.name}: {scope}: {why}" for scope, value in metric.values.items() if (why := _near(value)))
    return next(itertools.chain(told, _of_scopes(metric.name, (*metric.values, *metric.absent))), "")


def _of_observations(told: Iterable[Observation]) -> Iterator[str]:
    for seen in told:  # thousands a host
        if seen.name.startswith(COLLECTOR):
            yield f"observations: {seen.name}: collectors are told of in snapshots, and no benchmark"
        if "," in seen.scope and _names_twice(seen.scope):
            yield _twice(f"observations: {seen.name}", seen.scope)
        if why := _near(seen.value):
            yield f"observations: {seen.name} {seen.scope}: {why}"


def _of_scopes(where: str, scopes: Iterable[str]) -> Iterator[str]:
    for scope in scopes:
        if "," in scope and _names_twice(scope):
            yield _twice(where, scope)


def _twice(where: str, scope: str) -> str:
    return f"{where}: scope {scope} says the same twice"


@lru_cache(100_000)
def _names_twice(scope: str) -> bool:
    kinds = [part.partition("=")[0] for part in scope.split(",")]
    return len(set(kinds)) < len(kinds)


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
    return next(filter(None, map(_near, (*series.low, *series.mean, *series.high))), "")


def _near(value: Value) -> str:
    near = type(value) is float and -LEAST < value < LEAST and value != 0
    return f"{value} is nearer to 0 than any measurement" if near else ""
