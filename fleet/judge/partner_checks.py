"""Compare a figure that is measured between pairs of hosts (scopes with `partner=`) with one limit.

The checks of a layout compare values at fixed positions. Figures of pairs have no fixed positions, because hosts differ in their
number of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.judge.evaluate import COMPARE
from fleet.judge.layout import HostValues
from fleet.judge.row import TallyRow
from schemas.records import Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class PartnerCheck:
    """A figure that must meet a limit in every pair. On all hosts of the layout it is the same except for scopes and values."""

    name: str
    operator: str
    limit: float
    row: TallyRow

    def count_passes(self, values: HostValues, position: int) -> int | None:
        """Count the passes of a host and return their number. If a value may not pass, count nothing and return None."""
        items = [item for item in values.pair_observations if item.name == self.name]
        holds, limit = COMPARE[self.operator], self.limit
        for item in items:
            if type(item.value) not in (float, int) or not holds(item.value, limit):  # type: ignore[arg-type]
                return None
        if len({item.scope for item in items}) < len(items):
            return None
        for item in items:
            self.row.add_pass(item.value, position, values.view.host.name, item.scope)  # type: ignore[arg-type]
        return len(items)


def are_alike(values: HostValues, series: Sequence[Sequence[Observation]]) -> bool:
    """Return whether the series hold all figures of one name on pairs of hosts, and these differ only in scope and value."""
    items = [item for group in series for item in group]
    kinds = {(item.name, item.stage, item.status, item.unit, *sorted(item.params.items())) for item in items}
    of_name = [item for item in values.pair_observations if item.name == items[0].name]
    return len(kinds) == 1 and {*map(id, items)} == {*map(id, of_name)}
