"""Show the figures of the larger workloads (`NAMES`) as a table with a row per figure.

There is a column per host and per gang (the hosts of one multi-node launch). If there are more than _MAX_COLUMNS, the columns are
instead the lowest, median and highest value, and how many hosts or gangs have a value.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence, Set

from fleet.quantities import finite, quantity
from fleet.report.formatting import params_text
from fleet.report.tables.figure import (
    EMPTY,
    FigureKey,
    RankGroup,
    Table,
    TableCell,
    TableRow,
    figure_key,
    precision_text,
    rank_group,
)
from fleet.report.titles import benchmark_title
from schemas.records import MEASURED, Observation
from schemas.reports import FAIL, FleetReport, Verdict
from schemas.scopes import Scope

NAMES = ("fashion_mnist", "variants", "checkpoint", "model_parallel", "transformer", "mixture_of_experts", "overlap")
_PREFIXES = tuple(f"{name}." for name in NAMES)
_SHARES = (".accuracy", ".mfu", ".hidden_share")
_MAX_COLUMNS = 4
"""Maximum number of hosts and gangs together that have their own columns."""


def workloads(report: FleetReport) -> Table | None:
    """Return the table; None if there are no figures for it.

    Figures of single GPUs are left out, and in a rehearsal those of single processes.
    """
    figures: dict[tuple[bool, FigureKey], dict[RankGroup, Observation]] = {}
    groups: dict[RankGroup, None] = {}
    for host in report.hosts:
        for item in host.measurements:
            if item.name.startswith(_PREFIXES) and Scope.parse(item.scope).device_kind not in ("gpu", "cpu"):
                group, key = _group_and_key(host.name, item)
                groups[group] = None
                figures.setdefault((group.kind == "gang", key), {})[group] = item
    if not figures:
        return None
    failed = {_group_and_key(verdict.host, verdict) for verdict in report.verdicts if verdict.verdict == FAIL}
    columns = list(groups) if len(groups) <= _MAX_COLUMNS else None
    order = sorted(figures, key=lambda item: (NAMES.index(item[1].benchmark), item[0]))
    return Table(
        caption="Workloads",
        groups=(),
        columns=tuple(group.label() for group in columns)
        if columns
        else ("lowest", "median", "highest", "reported by"),
        rows=tuple(_row(gang, key, figures[gang, key], columns, failed) for gang, key in order),
    )


def _group_and_key(host: str, item: Observation | Verdict) -> tuple[RankGroup, FigureKey]:
    """Return the keys of the column and of the row that the figure belongs to."""
    return rank_group(host, item)._replace(world_size=""), figure_key(item)._replace(stage="")


def _row(
    gang: bool,
    key: FigureKey,
    values: dict[RankGroup, Observation],
    columns: Sequence[RankGroup] | None,
    failed: Set[tuple[RankGroup, FigureKey]],
) -> TableRow:
    figure = key.name.partition(".")[2].replace("_", " ")
    note = ", ".join(text for text in (figure, params_text(key.params)) if text)
    if columns is None:
        note += " (between hosts)" if gang else ""
        failing = sum((group, key) in failed for group in values)
        return TableRow(head=benchmark_title(key.benchmark), note=note, cells=_range(list(values.values()), failing))
    cells = (_cell(values[group], (group, key) in failed) if group in values else EMPTY for group in columns)
    return TableRow(head=benchmark_title(key.benchmark), note=note, cells=tuple(cells))


def _cell(item: Observation, failed: bool) -> TableCell:
    if item.status != MEASURED:
        return TableCell(text=f"{item.status}: {item.reason}", css="inconclusive")
    return TableCell(
        text=_text(item, finite(item.value)), note=precision_text(item.samples), css=FAIL if failed else ""
    )


def _text(item: Observation, value: float | None) -> str:
    if value is not None and item.name.endswith(_SHARES):
        return f"{value * 100:.1f} %"
    return quantity(item.value if value is None else value, item.unit)


def _range(items: Sequence[Observation], failing: int) -> tuple[TableCell, ...]:
    """Return the cells of a row: lowest, median and highest value, and how many hosts or gangs have a value.

    The note of the last cell says on how many hosts or gangs the figure fails. If the values are texts, the first cell has the
    distinct values, and the next two are empty.
    """
    measured = [item for item in items if item.status == MEASURED]
    values = [value for item in measured if (value := finite(item.value)) is not None]
    css = FAIL if failing else "" if len(measured) == len(items) else "inconclusive"
    note = f"{failing} failing" if failing else ""
    reported = TableCell(text=f"{len(measured)} of {len(items)}", note=note, css=css)
    if not values:
        texts = sorted({quantity(item.value, item.unit) for item in measured})
        return (TableCell(text=" and ".join(texts)) if texts else EMPTY, EMPTY, EMPTY, reported)
    statistics_ = (min(values), statistics.median(values), max(values))
    return (*(TableCell(text=_text(measured[0], value)) for value in statistics_), reported)
