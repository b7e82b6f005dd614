"""Checks that a JSON schema cannot express, for example that figures are plausible and that no scope has a duplicate label."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from schemas.records import Metric, Observation, Record, Value
from schemas.scopes import Scope
from schemas.timeline import Series, Soak

COLLECTOR = "collector."
"""Prefix of the metrics that report whether a collector worked; only snapshots have them."""
LEAST, MOST = 1e-60, 1e60
"""A measured value is 0, or its absolute value is between these. Calculations with other values could give infinity."""
MOST_IN_BUCKET, LONGEST_BUCKET_S = 1e9, 1e9


def record_problem(record: Record, *, checks_figures_only: bool = False) -> str:
    """Return the place and reason of the first problem in a record that matches its schema; empty if it is valid.

    Metrics of snapshots are not checked: `metric_problem` does that. With `checks_figures_only`, names, scopes and parameters of
    `record.observations` are not checked: the caller has checked them with `observation_problem` and `scope_problem`.
    """
    of_launches = [item for launch in record.launches for item in launch.observations]
    if checks_figures_only:
        problem = next(_wrong_figures(record.observations, with_params=False), "")
        problem = problem or next(_observation_problems(of_launches), "")
    else:
        problem = next(_observation_problems([*record.observations, *of_launches]), "")
    return problem or next(soak_problems(record.soak), "")


def observation_problem(name: str, params: Mapping[str, Value]) -> str:
    """Return the first problem in the name and the parameters of an observation of a benchmark; empty if they are valid."""
    return next(_problems_of_names({name}), "") or _figure_problem(params.values())


def scope_problem(scope: str) -> str:
    """Return the problem of a scope; empty if it is valid."""
    return next(_scope_problems("observations", {scope}), "")


def metric_problem(metric: Metric) -> str:
    """Return the first problem in a metric of a snapshot; empty if it is valid."""
    if problem := _figure_problem(metric.values.values()):
        return f"{metric.name}: {problem}"
    return next(_scope_problems(metric.name, (*metric.values, *metric.absent)), "")


def _observation_problems(observations: Sequence[Observation]) -> Iterator[str]:
    # A host has thousands of observations and few different names and scopes.
    yield from _problems_of_names({item.name for item in observations})
    yield from _scope_problems("observations", {item.scope for item in observations})
    yield from _wrong_figures(observations, with_params=True)


def _problems_of_names(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name.startswith(COLLECTOR):
            yield f"observations: {name}: only snapshots report collectors"


def _wrong_figures(observations: Sequence[Observation], *, with_params: bool) -> Iterator[str]:
    params = [value for item in observations for value in item.params.values()] if with_params else []
    samples = [item.samples for item in observations if item.samples]
    repeated = [value for each in samples for value in (each.min, each.p50, each.max, each.cv, each.precision)]
    values = [item.value for item in observations]
    for where, figures in ("value", values), ("params", params), ("samples", repeated):
        if problem := _figure_problem(figures):
            yield f"observations: {where}: {problem}"


def _figure_problem(figures: Iterable[Value]) -> str:
    floats = [abs(figure) for figure in figures if type(figure) is float and figure]  # an int has 64 bits at most
    if (least := min(floats, default=LEAST)) < LEAST:
        return f"{least} is nearer to 0 than any measurement"
    if (most := max(floats, default=MOST)) > MOST:
        return f"{most} is farther from 0 than any measurement"
    return ""


def _scope_problems(where: str, scopes: Iterable[str]) -> Iterator[str]:
    for scope in scopes:
        if "," in scope and Scope.parse(scope).has_repeated_kind:
            yield _twice(where, scope)


def _twice(where: str, scope: str) -> str:
    return f"{where}: scope {scope} has the same label twice"


def soak_problems(soak: Soak | None) -> Iterator[str]:
    """Yield the problems of a soak that matches its schema."""
    if not soak:
        return
    if soak.timeline.bucket_s > LONGEST_BUCKET_S:
        yield f"soak.timeline.bucket_s: {soak.timeline.bucket_s:g} s, more than the allowed {LONGEST_BUCKET_S:g} s"
    for event in soak.timeline.events:
        yield from _scope_problems(f"soak.timeline.events: {event.name}", (event.scope,))
    for series in soak.timeline.series:
        where = f"soak.timeline.series: {series.name}"
        yield from _scope_problems(where, (series.scope,))
        if problem := _column_problem(series):
            yield f"{where} {series.scope}: {problem}"


def _column_problem(series: Series) -> str:
    lengths = [len(column) for column in (series.at, series.n, series.low, series.mean, series.high)]
    if len(set(lengths)) > 1:
        return f"at, n, low, mean and high have {', '.join(map(str, lengths))} entries; all must have the same number"
    if any(later <= earlier for earlier, later in itertools.pairwise(series.at)):
        return "its buckets (at) are not in order"
    if max(series.n, default=0) > MOST_IN_BUCKET:
        return f"n: {max(series.n)} figures in one bucket, more than the allowed {MOST_IN_BUCKET:g}"
    return _figure_problem((*series.low, *series.mean, *series.high))
