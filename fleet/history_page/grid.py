"""Data for the history page: the table of racks by month, and the months in which drivers were new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.history.database import History
from fleet.quantities import counted

MAX_MONTHS = 36
"""Maximum number of months that the page shows. Earlier months are left out."""


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A cell of the table: the host results of one rack in one month."""

    css: str
    """CSS class: `fail` (a host result was rejected), `open` (incomplete), `pass` (all accepted) or `none` (no run)."""
    text: str
    """`3`: three host results were rejected. `3?`: none was rejected and three were incomplete. Empty: all were accepted.
    `–`: no run."""
    title: str
    """Tooltip."""
    has_new_driver: bool
    """Whether the driver differs from that of the rack's previous month with runs."""


@dataclass(frozen=True, kw_only=True)
class GridRow:
    """A row of the table: one rack."""

    rack: str
    cells: tuple[GridCell, ...]


def months_of(history: History) -> tuple[str, ...]:
    """Return the months from the first run to the last one, such as `2026-05`; at most the last MAX_MONTHS.

    All functions of this file ignore runs with a wrong date (`clocks.py`).
    """
    rows = history.rows(
        """select strftime(month, '%Y-%m') from (select unnest(generate_series(date_trunc('month', min("began")),
        date_trunc('month', max("began")), interval 1 month)) as month from runs where clock = '') order by 1"""
    )
    return tuple(row[0] for row in rows)[-MAX_MONTHS:]


def rack_rows(history: History, months: Sequence[str]) -> tuple[GridRow, ...]:
    """Return a row for each rack, with a cell for each month."""
    rows = history.rows(
        """select rack, strftime("began", '%Y-%m') as month, count(*), count(*) filter (decision = 'rejected'),
        count(*) filter (decision = 'incomplete'), arg_max(driver, "began") from parts where part = 'host'
        and nonce in (select nonce from runs where clock = '') group by 1, 2"""
    )
    found = {(rack, month): rest for rack, month, *rest in rows}
    result = []
    for rack in sorted({rack for rack, _ in found}):
        cells, driver = [], ""
        for month in months:
            values = found.get((rack, month))
            if values is None:
                cells.append(GridCell(css="none", text="–", title=f"{rack}, {month}: no run", has_new_driver=False))
                continue
            count, rejected, incomplete, new = values
            is_changed = bool(driver and new and new != driver)
            cells.append(
                _cell(f"{rack}, {month}", count, rejected, incomplete, f"{driver} → {new}" if is_changed else "")
            )
            driver = new or driver
        result.append(GridRow(rack=rack, cells=tuple(cells)))
    return tuple(result)


def _cell(place: str, count: int, rejected: int, incomplete: int, driver: str) -> GridCell:
    title = f"{place}: {counted(count, 'host result')}, {rejected} rejected, {incomplete} incomplete"
    return GridCell(
        css="fail" if rejected else "open" if incomplete else "pass",
        text=str(rejected) if rejected else f"{incomplete}?" if incomplete else "",
        title=f"{title}; driver {driver}" if driver else title,
        has_new_driver=bool(driver),
    )


def new_drivers(history: History, months: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return month -> drivers that were new in the fleet in that month.

    The first month is left out: in it every driver is new.
    """
    rows = history.rows(
        """select strftime(min("began"), '%Y-%m'), driver from parts where part = 'host' and driver <> ''
        and nonce in (select nonce from runs where clock = '') group by driver
        order by 1, 2"""
    )
    first = min((month for month, _ in rows), default="")
    result: dict[str, tuple[str, ...]] = {}
    for month, driver in rows:
        if month != first and month in months:
            result[month] = (*result.get(month, ()), driver)
    return result
