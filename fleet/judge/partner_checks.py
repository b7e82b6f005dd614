"""Compare a figure (a benchmark result) of pairs of hosts with one limit.

The scope of such a figure names the other host (`partner=`).

Other figures are found by their position in the list of a host's figures (`fleet.judge.layout`). Figures of pairs have no fixed
positions, because their number differs from host to host.
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
    """A limit that a figure must meet in every pair of a host."""

    name: str
    operator: str
    limit: float
    row: TallyRow

    def count_passes(self, values: HostValues, position: int) -> int | None:
        """Count each value of the figure on this host as a pass, and return the number of values.

        If a value does not meet the limit or is not a number, or if two values have the same scope, count nothing and return
        None: the criterion is then evaluated in full on this host. `position`: the position of the host in the plan.
        """
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
    """Return whether a `PartnerCheck` can judge these observations of one host (`series`).

    Their names must be equal, and `series` must contain every figure of pairs with this name. Only scopes and values may differ.
    """
    items = [item for group in series for item in group]
    kinds = {(item.name, item.stage, item.status, item.unit, *sorted(item.params.items())) for item in items}
    of_name = [item for item in values.pair_observations if item.name == items[0].name]
    return len(kinds) == 1 and {*map(id, items)} == {*map(id, of_name)}
