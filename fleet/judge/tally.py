"""Count the verdicts of a fleet, in one row for each combination of criterion, name of the observation, stage and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleet.judge.evidence import Planned, from_benchmark
from fleet.judge.row import TallyRow, more_severe
from schemas.records import Value
from schemas.reports import FAIL, Judged, Verdict

_IDENTIFYING = ("partner", "phase")
"""Parameters that identify the other host of a pair, or the phase of a snapshot. They are not settings: verdicts that differ only
in them are counted in the same row."""

RowKey = tuple[object, ...]


class Tally:
    """The rows of a fleet. Tallies of different hosts can be merged in any order."""

    def __init__(self, planned: Planned, positions: Mapping[str, int]) -> None:
        """`positions` maps each host to its position in the plan."""
        self._planned, self._positions = planned, positions
        self.rows: dict[RowKey, TallyRow] = {}

    def add(self, verdict: Verdict) -> None:
        row = self.row(verdict)
        if verdict.verdict == FAIL:
            row.action = more_severe(row.action, verdict.action)
        serial = "" if verdict.part else verdict.serial
        position = self._positions.get(verdict.host, -1)
        row.add(verdict.verdict, verdict.value, verdict.limit, position, verdict.host, verdict.scope, serial)

    def add_repeated(self, passes: Sequence[Verdict], hosts: Sequence[tuple[int, str]], count: int) -> None:
        """Count each of `passes` for `count` hosts.

        Args:
            passes: verdicts that these hosts have in common.
            hosts: position in the plan and name of the first MAX_FARTHEST of these hosts.
            count: number of these hosts.
        """
        for verdict in passes:
            self.row(verdict).add_repeated(verdict.value, verdict.limit, hosts, count, verdict.scope)

    def row(self, verdict: Verdict) -> TallyRow:
        """Return the row of a verdict. The row is added if the tally does not have it yet."""
        params = self._settings(verdict)
        stage = verdict.stage if from_benchmark(verdict.name) else ""
        key = (verdict.criterion, verdict.name, stage, *params.items())
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = TallyRow(
                criterion=verdict.criterion,
                name=verdict.name,
                stage=stage,
                params=params,
                unit=verdict.unit,
                operator=verdict.operator,
                source=verdict.source,
                basis=verdict.basis,
                higher_is_better=verdict.operator in ("ge", "gt"),
            )
        elif row.source != verdict.source or row.operator != verdict.operator:
            row.describe(verdict.source, verdict.basis, verdict.unit, verdict.operator)
        return row

    def _settings(self, verdict: Verdict) -> dict[str, Value]:
        """Return the parameters that distinguish the rows of one criterion and observation name."""
        return {key: value for key, value in self._planned.params(verdict).items() if key not in _IDENTIFYING}

    def update(self, other: Tally) -> None:
        """Add the counts of other hosts."""
        for key, row in other.rows.items():
            if key in self.rows:
                self.rows[key].update(row)
            else:
                self.rows[key] = row

    def judged(self, serials: Mapping[tuple[str, str], str] | None = None) -> tuple[Judged, ...]:
        """Return the rows with verdicts, for the report. They are sorted by criterion, observation name, stage and settings.

        Args:
            serials: host and scope of a GPU -> its serial, for verdicts without one.
        """
        return tuple(
            self.rows[key].judged(serials or {})
            for key in sorted(self.rows, key=lambda key: [str(part) for part in key])
            if self.rows[key].total
        )
