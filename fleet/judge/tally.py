"""Every verdict of a fleet summed up, a row for each criterion, observation and settings: the same at any size, in any order."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.judge.evidence import Planned, from_benchmark
from fleet.judge.row import Row, worst
from schemas.records import Value
from schemas.reports import FAIL, Judged, Verdict

_NUMBERED = ("partner", "phase")
"""Parameters and labels that only say whose or when."""

RowKey = tuple[object, ...]


class Tally:
    """All rows of a fleet; several, each of other hosts, can be put together in any order."""

    def __init__(self, planned: Planned, places: Mapping[str, int]) -> None:
        """`places`: where each host stands in the plan."""
        self._planned, self._places = planned, places
        self.rows: dict[RowKey, Row] = {}

    def add(self, verdict: Verdict) -> None:
        """Counts one verdict."""
        row = self.row(verdict)
        if verdict.verdict == FAIL:
            row.action = worst(row.action, verdict.action)
        self.count(row, verdict, verdict.host, "" if verdict.part else verdict.serial)

    def count(self, row: Row, verdict: Verdict, host: str, serial: str) -> None:
        """Counts a verdict of a row for a host, which need not be the one that it was made for."""
        row.add(verdict.verdict, verdict.value, verdict.limit, self._places.get(host, -1), host, verdict.scope, serial)

    def row(self, verdict: Verdict) -> Row:
        """The row that a verdict belongs to."""
        params = self._settings(verdict)
        stage = verdict.stage if from_benchmark(verdict.name) else ""
        key = (verdict.criterion, verdict.name, stage, *params.items())
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = Row(
                criterion=verdict.criterion,
                name=verdict.name,
                stage=stage,
                params=params,
                unit=verdict.unit,
                operator=verdict.operator,
                source=verdict.source,
                basis=verdict.basis,
            )
        elif row.source != verdict.source or row.operator != verdict.operator:
            row.describe(verdict.source, verdict.basis, verdict.unit, verdict.operator)
        return row

    def _settings(self, verdict: Verdict) -> dict[str, Value]:
        return {key: value for key, value in self._planned.params(verdict).items() if key not in _NUMBERED}

    def update(self, other: Tally) -> None:
        """Adds what another has counted."""
        for key, row in other.rows.items():
            mine = self.rows.get(key)
            if mine is None:
                self.rows[key] = row
            else:
                mine.update(row)

    def judged(self, serials: Mapping[tuple[str, str], str] | None = None) -> tuple[Judged, ...]:
        """The rows, by criterion, name and settings."""
        return tuple(
            self.rows[key].judged(serials or {})
            for key in sorted(self.rows, key=lambda key: [str(part) for part in key])
        )
