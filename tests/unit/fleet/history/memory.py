"""A history (a database of runs) in memory, for tests that fill its tables. It is faster than a history in files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, cast

import duckdb

from fleet.history import tables
from fleet.history.database import History

Level = tuple[str, str, float, str, float, str]
"""A row of the table `levels`: level (`host` or `rack`), id, days since 2024-01-01, driver, ln(figure / VALUE), reference.

The reference is `rack` or `run`: the peers of the host or rack are in the same rack or run. If the reference is "", there are too
few peers. `memory_history` assumes that the median of the peers is always VALUE.
"""
VALUE = 7e14
"""The figure, in FLOP/s, whose logarithm in a `Level` is 0."""


class MemoryHistory:
    """Answers SQL queries as a History does."""

    def __init__(self) -> None:
        self.database = duckdb.connect()
        self.database.execute("set timezone = 'UTC'")

    def rows(self, query: str, values: object = ()) -> list[tuple[Any, ...]]:
        """Return the result of a query."""
        return self.database.execute(query, values).fetchall()

    def records(self, query: str, values: object = ()) -> list[dict[str, Any]]:
        """Return the result of a query as dictionaries."""
        rows = self.rows(query, values)
        names = [column[0] for column in self.database.description or ()]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def insert(self, table: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Insert rows, all in one statement."""
        content = [list(column) for column in zip(*rows, strict=True)]
        if content:
            self.database.execute(
                f"insert into {table} ({columns}) select {', '.join('unnest(?)' for _ in content)}", content
            )


def memory_history(levels: Iterable[Level]) -> History:
    """Return a history of one figure (measured value), gemm.throughput, with `levels` as the rows of its table `levels`."""
    history = MemoryHistory()
    for table in ("figures", "levels"):
        columns = ", ".join(f'"{name}" {kind}' for name, kind in tables.COLUMNS[table].items())
        history.database.execute(f"create table {table} ({columns})")
    fixed = ("gemm.throughput", "", "benchmark", "", "NVIDIA H200", "FLOP/s")
    rows = [
        (level, name, name, datetime(2024, 1, 1) + timedelta(days=day), driver, VALUE * math.exp(log), reference,
         log + math.log(VALUE) * (reference == ""), f"{name} {day}", *fixed)
        for level, name, day, driver, log, reference in levels
    ]  # fmt: skip
    names = 'level, id, rack, "began", driver, value, reference, relative, nonce, name, settings, stage, within, model, unit'
    history.insert("levels", names, rows)
    history.database.execute(f"create view series as {tables.trend_sums('figures', 'levels')}")
    return cast("History", history)
