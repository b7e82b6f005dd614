"""Compare the numbers of one reading with a limit, without building observations and verdicts.

The hosts of a layout are those whose benchmark observations differ only in their values (`fleet.judge.layout`). A check is built
from a host that passes a criterion. It is used for later hosts of the same layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import COMPARE
from fleet.judge.finding import FLOORS
from fleet.judge.host_view import HostView
from fleet.judge.row import TallyRow
from schemas.reports import Verdict
from schemas.scopes import Scope


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingCheck:
    """A limit for each number of a reading. With `is_increase`, it limits the increase of each scope's value in the run."""

    name: str
    snapshots: list[tuple[str, str]]
    """Stage and phase of the snapshots that have the reading."""
    scopes: tuple[str, ...]
    """All scopes with a value, in the order in which the record has them."""
    absent: Mapping[str, str]
    """All scopes without a value -> the reason."""
    judged: tuple[str, ...]
    """The scopes that get a verdict."""
    is_increase: bool
    operator: str
    limit: float
    row: TallyRow | None
    """The row that counts the passes; None if no scope gets a verdict."""

    def count_passes(self, view: HostView, position: int) -> int | None:
        """Count the passes of a host and return their number.

        If the check cannot show that all verdicts are passes, count nothing and return None. `position`: the position of the host
        in the plan.
        """
        readings = view.observations.metrics[self.name]
        if [(snapshot.stage, snapshot.phase) for snapshot, _ in readings] != self.snapshots:
            return None
        metrics = [metric for _, metric in readings]
        if any(tuple(metric.values) != self.scopes or metric.absent != self.absent for metric in metrics):
            return None
        holds, limit, values = COMPARE[self.operator], self.limit, []
        for scope in self.judged:
            numbers = [metric.values[scope] for metric in metrics]
            if not all(type(number) is float or type(number) is int for number in numbers):
                return None
            if self.is_increase:
                steps = [float(later) - float(earlier) for earlier, later in itertools.pairwise(numbers)]  # type: ignore[arg-type]
                if min(steps) < 0:
                    return None  # the counter was reset
                numbers = [sum(steps)]
            if not all(holds(number, limit) for number in numbers):  # type: ignore[arg-type]
                return None
            values.append(numbers[-1])
        if self.row is not None:
            for scope, value in zip(self.judged, values, strict=True):
                self.row.add_pass(value, position, view.host.name, scope)  # type: ignore[arg-type]
        return len(values)


def reading_check(
    view: HostView, criterion: Criterion, names: Sequence[str], passes: Sequence[Verdict], rows: Sequence[TallyRow]
) -> ReadingCheck | None:
    """Return the check of a criterion whose verdicts on this host are all passes.

    Returns None if comparing the numbers of one reading with one limit is not enough to judge the criterion.

    Args:
        view: the host.
        criterion: a criterion on readings.
        names: the readings that decide the verdicts (`deciding_readings`).
        passes: the verdicts of the criterion on this host.
        rows: for each of these verdicts, the row in which it is counted.
    """
    is_simple = not (
        criterion.stage or "phase" in criterion.where or criterion.best_of_run or criterion.operator == "eq"
        or criterion.per_hour or criterion.same_as_fleet is not None or criterion.baseline is not None
        or criterion.unless is not None or (criterion.delta and criterion.operator in FLOORS)
        or criterion.name not in names or len(names) > 1
    )  # fmt: skip
    if not is_simple:
        return None
    readings = view.observations.metrics[criterion.name]
    scopes, absent = tuple(readings[0][1].values), readings[0][1].absent
    judged = tuple(verdict.scope for verdict in passes)
    row, limit = (rows[0], passes[0].limit) if passes else (None, 0.0)
    if any(tuple(metric.values) != scopes or metric.absent != absent for _, metric in readings):
        return None
    if not absent.keys().isdisjoint(judged) or any(
        Scope.parse(scope).device_kind == "pci" for scope in (*scopes, *absent)
    ):
        return None  # the verdict on a GPU has the scope `gpu=`, even if the reading has a PCI address as its scope
    if type(limit) not in (float, int) or (row and row.operator != criterion.operator):
        return None
    if any(verdict.limit != limit for verdict in passes) or any(other is not row for other in rows):
        return None
    return ReadingCheck(
        name=criterion.name,
        snapshots=[(snapshot.stage, snapshot.phase) for snapshot, _ in readings],
        scopes=scopes,
        absent=absent,
        judged=judged,
        is_increase=criterion.delta,
        operator=criterion.operator,
        limit=limit,  # type: ignore[arg-type]
        row=row,
    )
