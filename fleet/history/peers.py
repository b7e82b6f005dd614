"""Compute the percentile of a figure among the same figures of parts of accepted hosts, with the same model, driver and stage.

Runs are merged into monthly files when there are many (`store`). Of a merged month, only quantiles of the figures are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.history.database import History
from fleet.history.tables import WEIGHT, WITHIN_KIND, within_kind

_GROUP = "name, settings, stage, model, driver, within, is_gpu"
MIN_PARTS = 3
"""A value that can be compared with fewer parts than this has no percentile."""


@dataclass(frozen=True, kw_only=True)
class PeerFigure:
    """A measured figure, and the properties that figures must share to be compared with it."""

    name: str
    settings: str
    """As `rows.settings_text` returns it."""
    stage: str
    model: str
    driver: str
    value: float
    within: str = ""
    """Scope below the part, such as `peer=3`; empty for the part as a whole. A link (or peer, or adapter) is
    compared with all links (or peers, or adapters), whatever its number."""
    is_gpu: bool = True
    """Whether the figure is of a GPU; otherwise it is of a host."""


@dataclass(frozen=True, kw_only=True)
class Percentile:
    """The percentile of a value among the values of accepted parts."""

    below: float
    """Share of the values that are smaller (equal values count half); 0.5 is the median."""
    values: int
    """Number of values compared: one for each part and run, even if the part has several links or peers."""
    parts: int
    """Number of parts that these values are from. If months are merged, only a lower bound is known: the largest of several
    counts, one for each merged month and one for all runs that are not merged."""
    median: float
    """Median of the values. If months are merged, it is a mean of medians: one for each merged month, and one for the runs that
    are not merged. Each median has the number of its values as weight."""


_LOOSE = f"""select nonce, name, settings, stage, model, driver, {WITHIN_KIND} as within, serial <> '' as is_gpu, value, host,
  serial from loose_figures where accepted and not duplicate and within"""
_QUERY = f"""
with asked as (
  select unnest($name) as name, unnest($settings) as settings, unnest($stage) as stage, unnest($model) as model,
    unnest($driver) as driver, unnest($within) as within, unnest($value::double[]) as value,
    unnest($is_gpu::boolean[]) as is_gpu, unnest(range(len($name))) as number
), kinds as (select distinct {_GROUP} from asked
), months as (
  select {_GROUP}, "values" / len(quantiles) as weight, parts,
    unnest(quantiles) as quantile, quantiles[len(quantiles) // 2 + 1] as middle
  from spreads semi join kinds using ({_GROUP})
), loose as (
  select *, 1.0 as weight from ({_LOOSE} = '') semi join kinds using ({_GROUP})
  union all by name
  select *, {WEIGHT} as weight from ({_LOOSE} <> '') semi join kinds using ({_GROUP})
), found as (
  select number, sum(weight * case when quantile < value then 1 when quantile = value then 0.5 else 0 end) as below,
    sum(weight) as count, max(parts) as parts, sum(weight * middle) as middles
  from asked join months using ({_GROUP}) group by number
  union all by name
  select number,
    sum(weight * case when loose.value < asked.value then 1 when loose.value = asked.value then 0.5 else 0 end) as below,
    sum(weight) as count, count(distinct host || ' ' || serial) as parts, sum(weight) * median(loose.value) as middles
  from asked join loose using ({_GROUP}) group by number
)
select number, least(1.0, sum(below) / sum(count)), round(sum(count))::bigint, max(parts), sum(middles) / sum(count)
from found group by number"""


def percentiles(history: History, figures: Sequence[PeerFigure]) -> list[Percentile | None]:
    """Return the percentile of each figure among the values of accepted hosts; None with fewer than MIN_PARTS parts.

    Of merged months only 200 quantiles are stored, so shares have errors of up to 0.25 %.

    Args:
        history: the history of the same kind (real, rehearsal or simulated) as the run with the figures.
        figures: the figures.
    """
    if not figures:
        return []
    columns = {
        name: [getattr(figure, name) for figure in figures]
        for name in ("name", "settings", "stage", "model", "driver", "value", "is_gpu")
    }
    columns["within"] = [within_kind(figure.within) for figure in figures]
    rows = history.rows(_QUERY, columns)
    by_number = {
        number: Percentile(below=below, values=count, parts=parts, median=median)
        for number, below, count, parts, median in rows
        if parts >= MIN_PARTS
    }
    return [by_number.get(number) for number in range(len(figures))]
