"""Read a history: views over its Parquet files. Queries can read these files only, and write nothing.

A file that is missing, cut off or changed is named in `problems` and left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.history import tables
from fleet.history.clocks import wrong_dates
from fleet.history.engine import connect, error_type
from fleet.history.index import KINDS, Index, StoredFile, damage, home, read_index
from schemas.baselines import REAL
from schemas.errors import RunError, UsageError

Rows = list[tuple[Any, ...]]


def no_history(directory: Path, kind: str) -> RunError:
    """Return the error for a directory without a history of this kind, with the remedy."""
    others = [other for other in KINDS if other != kind and read_index(directory, other)]
    remedy = (
        f"to use another history of this directory, add {' or '.join(f'--kind {other}' for other in others)}"
        if others
        else f"add runs first: rackproof history import runs/* --history {directory}"
    )
    return RunError(f"no history of kind {kind} in {directory}: {remedy}")


class History:
    """The history of a fleet, opened for reading."""

    def __init__(self, directory: Path, kind: str = REAL) -> None:
        """Open the history in `directory`.

        Raises:
            RunError: there is no history of this kind, DuckDB is missing, or the index cannot be read.
        """
        self.directory, self.kind = directory, kind
        self.problems: list[str] = []
        """Files that were left out, and why."""
        try:
            self._open(complete=False)
        except RunError:
            raise
        except error_type():  # a file is damaged, although its size and first bytes are right
            self._open(complete=True)

    def _open(self, *, complete: bool) -> None:
        """Read the index and create the views. With `complete`, also read every file to the end and compare its checksum."""
        index = read_index(self.directory, self.kind)
        if index is None:
            raise no_history(self.directory, self.kind)
        self.index = index
        self._database = connect()
        place = home(self.directory, self.kind).absolute()
        files = self._undamaged(place, index, complete=complete)
        for table in tables.COLUMNS:
            self._create_view(table, [place / item.path for item in files if item.table == table])
        self._create_runs(index)
        self._create_trends(place, files)
        allowed = tables.paths(place / item.path for item in files)
        self._database.execute(f"set allowed_paths = {allowed}")
        self._database.execute("set enable_external_access = false")
        self._database.execute("set lock_configuration = true")

    def _undamaged(self, place: Path, index: Index, *, complete: bool) -> list[StoredFile]:
        files, self.problems = [], []
        for item in index.files:
            if reason := damage(place, item, complete=complete):
                runs = ", ".join(sorted(index.runs[nonce]["run"] for nonce in item.runs if nonce in index.runs)[:5])
                lost = f" (runs {runs}{' …' if len(item.runs) > 5 else ''}; import them again)" if runs else ""
                self.problems.append(f"{place / item.path}: {reason}: left out{lost}")
            else:
                files.append(item)
        return files

    def _create_view(self, table: str, files: Sequence[Path]) -> None:
        query = tables.table_rows(table, files) if files else tables.empty(table)
        self._database.execute(f"create view {table} as {query}")

    def _create_runs(self, index: Index) -> None:
        self._database.execute(
            'create table runs (run varchar, nonce varchar, "began" timestamp, ended timestamp, profile varchar, '
            "decision varchar, rackproof varchar, hosts bigint, gpus bigint, notes varchar[], clock varchar)"
        )
        names = ("run", "began", "ended", "profile", "decision", "rackproof", "hosts", "gpus", "notes")
        columns: dict[str, list[Any]] = {name: [run[name] for run in index.runs.values()] for name in names}
        self._database.execute(  # one statement for all runs: a thousand statements take seconds
            "insert into runs select unnest($run::varchar[]), unnest($nonce::varchar[]), unnest($began::timestamp[]), "
            "unnest($ended::timestamp[]), unnest($profile::varchar[]), unnest($decision::varchar[]), "
            "unnest($rackproof::varchar[]), unnest($hosts::bigint[]), unnest($gpus::bigint[]), unnest($notes::varchar[][]), "
            "unnest($clock::varchar[])",
            {**columns, "nonce": list(index.runs), "clock": wrong_dates(index)},
        )

    def _create_trends(self, place: Path, files: Sequence[StoredFile]) -> None:
        """Create the views `series` and `loose_figures`.

        `series` has the sums from which trends are computed (`tables.TREND`): those of the merged months, and those of the runs
        that are not merged yet. `loose_figures` has the figures of the runs that are not merged yet.
        """
        loose = {
            table: [place / item.path for item in files if item.table == table and not item.month]
            for table in ("figures", "levels")
        }
        sums = ""
        if loose["figures"] and loose["levels"]:
            relations = [tables.parquet(loose[table]) for table in ("figures", "levels")]
            sums = f" union all by name {tables.trend_sums(*relations)}"
        self._database.execute(f"create view series as select * from trends{sums}")
        loose_figures = f"select * from {tables.parquet(loose['figures'])}" if loose["figures"] else ""
        self._database.execute(f"create view loose_figures as {loose_figures or tables.empty('figures')}")

    def rows(self, query: str, values: Sequence[object] | Mapping[str, object] = ()) -> Rows:
        """Return the result of a query of Rackproof itself. If a file turns out to be damaged, the query is repeated without it.

        Raises:
            RunError: the query fails even without the damaged files.
        """
        try:
            return list(self._database.execute(query, values).fetchall())
        except error_type():
            self._open(complete=True)  # also reads the index again: another process may have replaced files
        try:
            return list(self._database.execute(query, values).fetchall())
        except error_type() as error:
            raise RunError(f"the history in {self.directory} cannot be read: {error}") from None

    def records(self, query: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[dict[str, Any]]:
        """Return the result of a query as one dictionary a row; raises like `rows`."""
        rows = self.rows(query, values)
        names = [column[0] for column in self._database.description or ()]
        return [dict(zip(names, row, strict=True)) for row in rows]

    def select(self, query: str) -> tuple[list[str], Rows]:
        """Return the columns and rows of the operator's query, which must be one SELECT.

        If a file turns out to be damaged, the query is repeated without it.

        Raises:
            UsageError: the query is not one SELECT, reads a file outside the history, or fails even without the damaged files.
        """
        duckdb = importlib.import_module("duckdb")
        try:
            statements = duckdb.extract_statements(query)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise UsageError("history sql: give one SELECT statement: the history cannot be changed with SQL")
            try:
                return self._selected(query)
            except (duckdb.BinderException, duckdb.CatalogException, duckdb.PermissionException):
                raise  # a mistake in the query
            except duckdb.Error:
                self._open(complete=True)  # a damaged file is named in `problems`
            return self._selected(query)
        except duckdb.Error as error:
            raise UsageError(f"history sql: {' '.join(str(error).split())}") from None

    def _selected(self, query: str) -> tuple[list[str], Rows]:
        result = self._database.execute(query)
        return [column[0] for column in result.description], list(result.fetchall())


def open_history(directory: Path, kind: str = REAL) -> History | None:
    """Return the history; None if there is none of this kind.

    Raises:
        RunError: DuckDB is missing, or the index cannot be read.
    """
    return History(directory, kind) if read_index(directory, kind) is not None else None
