"""Find figures whose level changed with the driver.

All hosts of a run share what else was different: the season, the version of a benchmark, the power limit of the rack. So a run is
one value, however many hosts it has, and runs of the same week count as one. The scatter between these values decides whether a
change is clear, and a line through time is fitted together with the step at the driver, so that a slow drift is no effect of the
driver:

    y = a + b week + c [new driver]

y is the median, over the hosts of a week and driver, of the logarithm without the level of its host, which is the mean of its
levels under both drivers. With fewer than three weeks for one of the drivers there is no scatter to compare with.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from fleet.history.database import History
from fleet.history.regression import normal_deviate, t_quantile
from fleet.history.trends import FALSE_FINDINGS, meaning
from fleet.judge.power import robust_sigma

MIN_EFFECT = 0.005
"""Change as a share, below which it is not listed."""
MIN_HOSTS = 5
"""Hosts with runs under both drivers, below which nothing is estimated."""
MIN_WEEKS = 3
"""Weeks with runs under each driver."""
CLEAR, CONFOUNDED = "changed with the driver", "confounded with the date"
_FIGURE = "name, settings, stage, within, model, unit"
Value = tuple[float, bool, float]
"""Week, whether the driver is new, and y."""


@dataclass(frozen=True, kw_only=True)
class DriverEffect:
    """A figure whose level differs between two drivers."""

    name: str
    settings: str
    stage: str
    within: str
    model: str
    unit: str
    old: str
    new: str
    change: float
    """(new - old) / old."""
    error: float | None
    """Half of the 95 % confidence interval of `change`; None if it is confounded with the date."""
    hosts: int
    weeks_old: int
    """Weeks with runs under the old driver, on hosts with both."""
    weeks_new: int
    meaning: str
    finding: str
    """CLEAR or CONFOUNDED."""


def driver_effects(history: History) -> list[DriverEffect]:
    """Return the figures whose level differs between one driver and the next, clear ones first, then the largest change."""
    records = history.records(f"""
    with means as (
      select id, {_FIGURE}, driver, sum(log_sum) / sum(n) as mean, min(first) as first
      from series where level = 'host' and driver <> '' group by id, {_FIGURE}, driver
    ), ordered as (
      select *, lag(driver) over (partition by id, {_FIGURE} order by first) as old,
        lag(mean) over (partition by id, {_FIGURE} order by first) as old_mean
      from means
    )
    select {_FIGURE}, old, driver as new, list(mean - old_mean) as changes
    from ordered where old is not null group by all having count(*) >= {MIN_HOSTS}""")
    limit = NormalDist().inv_cdf(1 - FALSE_FINDINGS / 2 / max(1, len(records)))
    chosen = [item for item in records if abs(math.expm1(statistics.median(item["changes"]))) >= MIN_EFFECT]
    values = _values(history, chosen)
    found = (effect for number, item in enumerate(chosen) if (effect := _effect(item, values[number], limit)))
    return sorted(found, key=lambda item: (item.finding != CLEAR, -abs(item.change), item.name, item.settings))


def _values(history: History, pairs: Sequence[Mapping[str, Any]]) -> Mapping[int, list[Value]]:
    """Return for each figure and pair of drivers its values by week and driver, over the hosts with both."""
    result: dict[int, list[Value]] = defaultdict(list)
    if not pairs:
        return result
    names = (*_FIGURE.split(", "), "old", "new")
    asked = ", ".join(f'unnest(${name}::varchar[]) as "{name}"' for name in names)
    rows = history.rows(
        f"""
        with asked as (select {asked}, unnest(range(len($name))) as number), means as (
          select id, {_FIGURE}, driver, sum(log_sum) / sum(n) as mean from series semi join asked using ({_FIGURE})
          where level = 'host' group by id, {_FIGURE}, driver
        ), centres as (
          select number, a.id, (a.mean + b.mean) / 2 as centre
          from asked join means a using ({_FIGURE}) join means b using ({_FIGURE})
          where a.driver = old and b.driver = new and a.id = b.id
        )
        select number, epoch(date_trunc('week', "began")) / 604800 as week, driver = new, median(ln(value) - centre)
        from levels join asked using ({_FIGURE}) join centres using (number, id)
        where level = 'host' and driver in (old, new) and relative is not null and value > 0 group by all order by all""",
        {name: [item[name] for item in pairs] for name in names},
    )
    for number, week, is_new, value in rows:
        result[number].append((week, is_new, value))
    return result


def _effect(item: Mapping[str, Any], values: Sequence[Value], limit: float) -> DriverEffect | None:
    """Return the effect of a driver on one figure; None if it is small or within the noise."""
    old, new = (len({week for week, is_new, _ in values if is_new == wanted}) for wanted in (False, True))
    shared: dict[str, Any] = {
        **{key: item[key] for key in (*_FIGURE.split(", "), "old", "new")},
        "hosts": len(item["changes"]), "weeks_old": old, "weeks_new": new,
    }  # fmt: skip
    step = fit_step(values) if min(old, new) >= MIN_WEEKS else None
    if step is None:
        change = statistics.median(item["changes"])
        error = 1.2533 * robust_sigma(item["changes"]) / math.sqrt(len(item["changes"]))  # of a median, between hosts
        if abs(change) < limit * error:
            return None
        sign = meaning(item["name"], item["unit"], change)
        return DriverEffect(**shared, change=math.expm1(change), error=None, meaning=sign, finding=CONFOUNDED)
    change, error, freedom = step
    if abs(math.expm1(change)) < MIN_EFFECT or normal_deviate(change / error, freedom) < limit:
        return None
    interval = t_quantile(1.96, freedom) * error
    sign = meaning(item["name"], item["unit"], change)
    return DriverEffect(**shared, change=math.expm1(change), error=interval, meaning=sign, finding=CLEAR)


def fit_step(values: Sequence[Value]) -> tuple[float, float, float] | None:
    """Return the step c of the model above, its standard error and its degrees of freedom; None if it cannot be estimated."""
    freedom = len(values) - 3
    weeks = [week for week, _, _ in values]
    if freedom < 1 or len(set(weeks)) < 2:
        return None
    steps = _without_line(weeks, [float(is_new) for _, is_new, _ in values])
    rest = _without_line(weeks, [value for _, _, value in values])
    squares = sum(step * step for step in steps)
    if squares < 1e-9:
        return None
    change = sum(step * value for step, value in zip(steps, rest, strict=True)) / squares
    residual = sum((value - change * step) ** 2 for step, value in zip(steps, rest, strict=True))
    return change, math.sqrt(max(residual, 1e-14 * len(values)) / freedom / squares), freedom


def _without_line(times: Sequence[float], values: Iterable[float]) -> list[float]:
    """Return the values without the least squares line through time."""
    values = list(values)
    slope, intercept = statistics.linear_regression(times, values)
    return [value - intercept - slope * time for time, value in zip(times, values, strict=True)]
