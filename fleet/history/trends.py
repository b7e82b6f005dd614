"""Find figures of GPUs, hosts and racks that drift slowly, from the sums that the history has for each series (`trend_sums`).

`relative` is the logarithm of (figure / median of the peers with the same driver), see `tables.py`. A line is fitted to
`relative` over time by least squares. For a part without peers, the line has one intercept for each driver, so that a change of
the driver does not count as a drift. t is the slope divided by its standard error, which follows from the residuals. z is the
normal deviate with the same two-sided probability as t. A drift is listed only if the two-sided probability of its z is below
FALSE_FINDINGS divided by the number of tested series (Bonferroni).

The peers of a GPU are the GPUs of its host, those of a host the hosts of its rack, and those of a rack all racks of the run. So
if a whole rack becomes slower, the rack is listed, and not each of its GPUs. The median of a host changes when one of its GPUs is
replaced. Therefore a drift must be confirmed by a second fit, in which each peer has its own level (`peer_fit`). It must also
remain whichever single run is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from fleet.history.database import History
from fleet.history.peer_fit import alone_points, course
from fleet.history.regression import weakest_z
from fleet.history.tables import DAYS, MIN_PEERS
from fleet.judge.baseline import direction
from fleet.judge.student import t_quantile

FALSE_FINDINGS = 0.01
"""Expected number of drifts that `drifts` returns for a history without any drift, if the noise is normal and independent."""
MIN_POINTS = 8
"""Minimum number of values of a series."""
MIN_DAYS = 60.0
"""Minimum number of days between the first and the last value of a series."""
MIN_EFFECT = 0.01
"""A drift is listed only if the figure changed by at least this share between its first and its last value."""
MIN_Z_WITHOUT_ONE = 3.0
"""z must be at least this high whichever single run is left out. So one odd run, or one run with a wrong date, is not a drift."""
DAYS_PER_YEAR = 365.25
_LIMIT_OF_ONE_TEST = NormalDist().inv_cdf(1 - FALSE_FINDINGS / 2)
_FIGURE = "name, settings, stage, within, model, unit"

_ALONE = f"""
alone as (
  select level, id, rack, {_FIGURE}, driver, "began", date_trunc('month', "began") as month, ln(value) as log_value
  from levels where reference = '' and relative is not null
), middles as (
  select level, {_FIGURE}, driver, month, median(log_value) as middle from alone
  group by level, {_FIGURE}, driver, month having count(distinct id) >= {MIN_PEERS}
), by_month as (
  select level, id, rack, {_FIGURE}, driver, 'month' as reference, count(*) as n, sum({DAYS}) as sx,
    sum(log_value - middle) as sy, sum({DAYS} ** 2) as sxx, sum({DAYS} * (log_value - middle)) as sxy,
    sum((log_value - middle) ** 2) as syy, sum(log_value) as log_sum, min("began") as first, max("began") as last
  from alone join middles using (level, {_FIGURE}, driver, month) group by level, id, rack, {_FIGURE}, driver
)"""
"""SQL for hosts and racks with too few peers in their runs. Each is compared with the median of all such hosts or racks that were
measured in the same month under the same driver. `by_month` has the sums of `trend_sums`, computed from the differences from
this median."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """A GPU, host or rack with a figure that changed over time relative to its peers."""

    level: str
    """`gpu`, `host` or `rack`."""
    id: str
    """Serial of a GPU; name of a host or rack."""
    rack: str
    name: str
    settings: str
    stage: str
    within: str
    model: str
    unit: str
    per_year: float | None
    """Change in a year, as a share: -0.05 means 5 % less each year. None for a step, which has no slope."""
    error: float | None
    """Half the width of the 95 % confidence interval of `per_year`; None for a step."""
    change: float
    """Change between the first and the last value, by the fitted line, as a share. For a step, the size of the step."""
    points: int
    """Number of values."""
    first: str
    last: str
    """Dates of the first and the last value: `2026-02-01`."""
    z: float
    meaning: str
    """`worse`, `better`, or `unknown` if it is not known whether more or less of the figure is better."""
    shape: str
    """`drift`, or `step` if the figure changed at once, on the date `at`."""
    at: str = ""
    others: tuple[str, ...] = ()
    """Other figures of the same GPU, host or rack that drift too."""


def drifts(history: History) -> list[Drift]:
    """Return one Drift for each GPU, host and rack that drifts (`_drift`). Those that became worse come first."""
    candidates, count = _candidates(history)
    limit = NormalDist().inv_cdf(1 - FALSE_FINDINGS / 2 / max(1, count))
    clear = [item for item in candidates if item["z"] >= limit and abs(item["change"]) >= MIN_EFFECT]
    found = [item for item in clear if _is_confirmed(history, item, limit)]
    parents = {(item["level"], item["id"], *_figure(item)) for item in found}
    by_part: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for item in found:
        if not _is_of_parent(item, parents):
            by_part[(item["level"], item["id"])].append(item)
    result = [_drift(items) for items in by_part.values()]
    return sorted(result, key=lambda item: (item.meaning != "worse", -item.z, item.level, item.id))


def _is_confirmed(history: History, item: dict[str, Any], limit: float) -> bool:
    """Return whether a drift is confirmed.

    It must remain whichever single run is left out. If `peer_fit.course` returns a Course of the part, z and the change of the
    Course must also reach their limits. The values of the Course then replace those in `item`.
    """
    own = course(history, item) if item["reference"] not in ("", "month") else None
    item["at"] = own.step_at if own else ""
    if own is None:
        return weakest_z(alone_points(history, item), item["slope"]) >= MIN_Z_WITHOUT_ONE
    item |= {
        "slope": own.slope,
        "error": own.error,
        "z": own.z,
        "change": math.expm1(own.change),
        "freedom": own.freedom,
    }
    return own.z >= limit and abs(item["change"]) >= MIN_EFFECT and own.weakest_z >= MIN_Z_WITHOUT_ONE


def _figure(item: Mapping[str, Any]) -> tuple[str, ...]:
    return item["name"], item["settings"], item["stage"], item["model"]


def _is_of_parent(item: Mapping[str, Any], parents: set[tuple[str, ...]]) -> bool:
    """Return whether the drift of a GPU or host only repeats the drift of its rack.

    This is so if the same figure of the rack drifts, and the GPU or host was not compared with peers of its own host or rack.
    """
    return (
        item["level"] != "rack"
        and item["reference"] in ("run", "month", "")
        and ("rack", item["rack"], *_figure(item)) in parents
    )


def _candidates(history: History) -> tuple[list[dict[str, Any]], int]:
    """Return the series whose z is at least the limit of a single test, and the number of all series that were tested.

    One series is always returned, whatever its z, because the number of tests is a column of the rows.
    """
    # An empty `reference` means that the part was compared with no peers, neither of its runs nor of its months. Its slope then
    # contains the change that all such parts share. So the median slope of all such parts (with the same level, model and figure)
    # is subtracted, if there are at least three of them.
    query = f"""
    with {_ALONE}, all_series as (
      select * from series anti join (select * from by_month where n >= {MIN_POINTS}) m
        on series.reference = '' and m.level = series.level and m.id = series.id and m.name = series.name
        and m.settings = series.settings and m.stage = series.stage and m.within = series.within and m.model = series.model
      union all by name select * from by_month
    ), eras as (
      select level, id, max(rack) as rack, {_FIGURE}, reference, sum(n) as n, sum(sx) as sx, sum(sy) as sy,
        sum(sxx) as sxx, sum(sxy) as sxy, sum(syy) as syy, min(first) as first, max(last) as last
      from all_series group by level, id, {_FIGURE}, reference, case when reference = '' then driver end
    ), pooled as (
      select level, id, max(rack) as rack, {_FIGURE}, reference, sum(n) as n, count(*) as levels,
        sum(sxx - sx * sx / n) as sxx, sum(sxy - sx * sy / n) as sxy, sum(syy - sy * sy / n) as syy,
        min(first) as first, max(last) as last
      from eras group by level, id, {_FIGURE}, reference
    ), slopes as (
      select *, sxy / sxx as raw_slope, n - levels - 1 as freedom, date_diff('second', first, last) / 86400.0 as days
      from pooled where n >= {MIN_POINTS} and n - levels - 1 >= {MIN_POINTS - 3} and sxx > 0
        and date_diff('second', first, last) / 86400.0 >= {MIN_DAYS}
    ), corrected as (
      select *, raw_slope - case when reference = '' and count(*) over siblings >= 3
        then median(raw_slope) over siblings else 0 end as slope
      from slopes window siblings as (partition by level, {_FIGURE}, reference)
    ), tested as (
      select *, sqrt(greatest(syy - sxy * sxy / sxx, 1e-14 * n) / freedom / sxx) as error, count(*) over () as tests
      from corrected
    )
    select level, id, rack, {_FIGURE}, reference, n::bigint as points, first, last, days, slope, error, tests,
      slope * days as change, freedom, raw_slope - slope as shared_slope,
      sqrt(freedom * ln(1 + (slope / error) ** 2 / freedom)) * (8 * freedom + 1) / (8 * freedom + 3) as z
    from tested qualify z >= {_LIMIT_OF_ONE_TEST} or row_number() over () = 1"""
    records = history.records(query)
    for item in records:
        item["change"] = math.expm1(max(-50.0, min(50.0, item["change"])))
    return records, records[0]["tests"] if records else 0


def meaning(name: str, unit: str, change: float) -> str:
    """Return `worse` or `better` for a change of a figure, or `unknown` if it is not known whether more or less is
    better."""
    sign = direction(name, unit) * change
    return "worse" if sign < 0 else "better" if sign > 0 else "unknown"


def _drift(items: Sequence[Mapping[str, Any]]) -> Drift:
    """Return the Drift of one GPU, host or rack from its drifting figures.

    It describes the figure with the largest z among those that became worse or, if there are none, among all.
    """
    ordered = sorted(
        items, key=lambda item: (meaning(item["name"], item["unit"], item["change"]) != "worse", -item["z"])
    )
    lead = ordered[0]
    others = dict.fromkeys(f"{item['name']} {item['settings']}".strip() for item in ordered[1:])
    return Drift(
        **{key: lead[key] for key in ("level", "id", "rack", "name", "settings", "stage", "within", "model", "unit")},
        per_year=None if lead["at"] else math.expm1(lead["slope"] * DAYS_PER_YEAR),
        error=None if lead["at"] else t_quantile(0.975, lead["freedom"]) * lead["error"] * DAYS_PER_YEAR,
        change=lead["change"],
        points=lead["points"],
        first=f"{lead['first']:%Y-%m-%d}",
        last=f"{lead['last']:%Y-%m-%d}",
        z=lead["z"],
        meaning=meaning(lead["name"], lead["unit"], lead["change"]),
        shape="step" if lead["at"] else "drift",
        at=lead["at"],
        others=tuple(others),
    )
