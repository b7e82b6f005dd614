"""Is this number normal? The place of a figure among those of accepted parts of the same model, driver and stage.

Renderers use this module: `percentiles` answers for all figures of a report in one query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.history.database import History
from fleet.history.rows import clean_text, settings_text

MIN_PARTS = 3
"""With fewer other parts there is no percentile."""


@dataclass(frozen=True, kw_only=True)
class PeerFigure:
    """A measured figure, and whose."""

    name: str
    settings: str
    """As `rows.settings_text` returns it."""
    stage: str
    model: str
    driver: str
    value: float
    is_gpu: bool = True
    """Whether it is the figure of a GPU; otherwise of a host."""


@dataclass(frozen=True, kw_only=True)
class Percentile:
    """Where a value lies."""

    below: float
    """Share of the values below it, equal ones counted half; 0.5 is the median."""
    values: int
    """Values that it was compared with: one for each part and run."""
    parts: int
    """Parts that these values are from."""
    median: float


def percentiles(history: History, figures: Sequence[PeerFigure], *, without_run: str = "") -> list[Percentile | None]:
    """Return the place of each figure among the values of accepted hosts; None with fewer than MIN_PARTS parts.

    Args:
        history: the history of the kind of the run.
        figures: the figures; `settings_text` makes their settings comparable.
        without_run: nonce of a run that is left out: that of the figures.
    """
    if not figures:
        return []
    columns = {
        name: [getattr(figure, name) for figure in figures]
        for name in ("name", "settings", "stage", "model", "driver", "value", "is_gpu")
    }
    rows = history.rows(
        """
        with asked as (
          select unnest($name) as name, unnest($settings) as settings, unnest($stage) as stage, unnest($model) as model,
            unnest($driver) as driver, unnest($value::double[]) as value, unnest($is_gpu::boolean[]) as is_gpu,
            unnest(range(len($name))) as number
        )
        select number, (count(*) filter (figures.value < asked.value) + 0.5 * count(*) filter (figures.value = asked.value))
            / count(*), count(*), count(distinct figures.host || ' ' || figures.serial), median(figures.value)
        from asked join figures using (name, settings, stage, model, driver)
        where figures.accepted and not figures.duplicate and (figures.serial <> '') = asked.is_gpu and nonce <> $without
        group by number""",
        {**columns, "without": without_run},
    )
    by_number = {
        number: Percentile(below=below, values=count, parts=parts, median=median)
        for number, below, count, parts, median in rows
        if parts >= MIN_PARTS
    }
    return [by_number.get(number) for number in range(len(figures))]


__all__ = ["PeerFigure", "Percentile", "clean_text", "percentiles", "settings_text"]
