"""Find figures whose level changed with the driver.

Other conditions, such as air temperature, benchmark version or power limit, are often the same for all hosts of a run. Therefore
all runs of a week under one driver count as one value, however many hosts they have. The scatter of these values decides
whether a change is significant. The model uses only the runs of a host at most WINDOW_DAYS before or after its first run under
the new driver: over that time, a season is nearly a straight line. A linear trend is fitted together with the step, so that
neither a season nor a slow drift is attributed to the driver:

    y = a + b * week + c * (1 under the new driver, else 0)

y is the median of all measurements of a week under one driver. Each measurement counts as its logarithm minus the level of its
host. This level is halfway between the host's mean logarithm under the old driver and its mean logarithm under the new driver.
The model requires three weeks under each driver. With fewer, the finding is `confounded with the date`.
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
from fleet.history.regression import normal_deviate
from fleet.history.trends import FALSE_FINDINGS, meaning
from fleet.judge.power import robust_sigma
from fleet.judge.student import t_quantile

MIN_EFFECT = 0.005
"""Smallest relative change that is listed: 0.5 %."""
MIN_HOSTS = 5
"""Smallest number of hosts with runs under both drivers."""
MIN_WEEKS = 3
"""The model above requires at least this many weeks with runs under each driver."""
WINDOW_DAYS = 98
"""14 weeks: long enough for MIN_WEEKS under each driver if a host is measured once a month. A season whose highest and lowest
value differ by 3 % can look like a step of 0.5 % (MIN_EFFECT) at most. With the runs of a whole year, it could look like a step
as large as the season."""
CLEAR, CONFOUNDED = "changed with the driver", "confounded with the date"
_FIGURE = "name, settings, stage, within, model, unit"
Value = tuple[float, bool, float]
"""Week (weeks since 1970), whether the driver is the new one, and y of the model above."""


@dataclass(frozen=True, kw_only=True)
class DriverEffect:
    """A figure whose level differs between two driver versions."""

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
    """Half the width of the 95 % confidence interval of `change`; None if `finding` is CONFOUNDED."""
    hosts: int
    weeks_old: int
    """Number of weeks that have runs under the old driver, of those that the model uses, on hosts that had both drivers."""
    weeks_new: int
    """The same number for the new driver."""
    meaning: str
    """`worse`, `better`, or `unknown` if the better direction is not known."""
    finding: str
    """CLEAR or CONFOUNDED."""


def driver_effects(history: History) -> list[DriverEffect]:
    """Return the figures whose level differs between a driver and the next one on the same hosts.

    CLEAR findings come first; within each kind, the largest change comes first.
    """
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
    large = [item for item in records if abs(math.expm1(statistics.median(item["changes"]))) >= MIN_EFFECT]
    values = _values(history, large)
    effects = (effect for number, item in enumerate(large) if (effect := _effect(item, values[number], limit)))
    return sorted(effects, key=lambda item: (item.finding != CLEAR, -abs(item.change), item.name, item.settings))


def _values(history: History, pairs: Sequence[Mapping[str, Any]]) -> Mapping[int, list[Value]]:
    """Return index in `pairs` -> values from the hosts with both drivers. An item of `pairs` is a figure and two drivers."""
    result: dict[int, list[Value]] = defaultdict(list)
    if not pairs:
        return result
    names = (*_FIGURE.split(", "), "old", "new")
    columns = ", ".join(f'unnest(${name}::varchar[]) as "{name}"' for name in names)
    rows = history.rows(
        f"""
        with pairs as (select {columns}, unnest(range(len($name))) as number), of_drivers as (
          select number, id, "began", driver = new as is_new, ln(value) as y from levels join pairs using ({_FIGURE})
          where level = 'host' and driver in (old, new) and relative is not null and value > 0
        ), changes as (
          select number, id, min("began") as changed from of_drivers where is_new group by number, id
        ), near as (
          select number, id, "began", is_new, y from of_drivers join changes using (number, id)
          where abs(epoch("began") - epoch(changed)) <= {WINDOW_DAYS * 86400}
        ), centres as (
          select number, id, (avg(y) filter (is_new) + avg(y) filter (not is_new)) / 2 as centre from near group by number, id
        )
        select number, epoch(date_trunc('week', "began")) / 604800 as week, is_new, median(y - centre)
        from near join centres using (number, id) where centre is not null group by all order by all""",
        {name: [item[name] for item in pairs] for name in names},
    )
    for number, week, is_new, value in rows:
        result[number].append((week, is_new, value))
    return result


def _effect(item: Mapping[str, Any], values: Sequence[Value], limit: float) -> DriverEffect | None:
    """Return the effect of a driver on one figure; None if the effect is below MIN_EFFECT or below `limit` standard errors."""
    old, new = (len({week for week, is_new, _ in values if is_new == under_new}) for under_new in (False, True))
    shared: dict[str, Any] = {
        **{key: item[key] for key in (*_FIGURE.split(", "), "old", "new")},
        "hosts": len(item["changes"]), "weeks_old": old, "weeks_new": new,
    }  # fmt: skip
    step = fit_step(values) if min(old, new) >= MIN_WEEKS else None
    if step is None:
        change = statistics.median(item["changes"])
        error = 1.2533 * robust_sigma(item["changes"]) / math.sqrt(len(item["changes"]))  # standard error of a median
        if abs(change) < limit * error:
            return None
        direction = meaning(item["name"], item["unit"], change)
        return DriverEffect(**shared, change=math.expm1(change), error=None, meaning=direction, finding=CONFOUNDED)
    change, error, freedom = step
    if abs(math.expm1(change)) < MIN_EFFECT or normal_deviate(change / error, freedom) < limit:
        return None
    interval = t_quantile(0.975, freedom) * error
    direction = meaning(item["name"], item["unit"], change)
    return DriverEffect(**shared, change=math.expm1(change), error=interval, meaning=direction, finding=CLEAR)


def fit_step(values: Sequence[Value]) -> tuple[float, float, float] | None:
    """Return the step c of the model above, its standard error and its degrees of freedom; None if it cannot be estimated."""
    freedom = len(values) - 3
    weeks = [week for week, _, _ in values]
    if freedom < 1 or len(set(weeks)) < 2:
        return None
    steps = _without_line(weeks, [float(is_new) for _, is_new, _ in values])
    residuals = _without_line(weeks, [value for _, _, value in values])
    squares = sum(step * step for step in steps)
    if squares < 1e-9:
        return None
    change = sum(step * value for step, value in zip(steps, residuals, strict=True)) / squares
    residual = sum((value - change * step) ** 2 for step, value in zip(steps, residuals, strict=True))
    return change, math.sqrt(max(residual, 1e-14 * len(values)) / freedom / squares), freedom


def _without_line(times: Sequence[float], values: Iterable[float]) -> list[float]:
    """Return the values minus their least-squares line through time."""
    values = list(values)
    slope, intercept = statistics.linear_regression(times, values)
    return [value - intercept - slope * time for time, value in zip(times, values, strict=True)]
