"""One part against the fleet's others of its kind: the median that criteria with `vs_fleet` are measured by.

The median and not the mean: a part that is out of line, even several of them, hardly moves what it is compared with.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import HostView, Planned
from schemas.records import MEASURED, Observation, Value

LEAST = 3
"""With two values the median lies between them: neither can be told from the other."""
KINDS = {
    "gpu": ("GPU", "GPUs"),
    "cpu": ("process", "processes"),
    "host": ("host", "hosts"),
    "peer": ("pair of GPUs", "pairs of GPUs"),
    "gang": ("gang", "gangs"),
    "link": ("link", "links"),
}
"""Kind of scope -> one of them, several of them."""

Key = tuple[str, str, str, str, tuple[tuple[str, Value], ...]]
"""GPU model, name, stage, kind of scope, settings: what two figures must share to be compared."""


@dataclass(frozen=True, kw_only=True)
class Crowd:
    """The figures that one figure is compared with, itself among them."""

    model: str
    kind: str
    """Of scope: `gpu`, `host`."""
    values: tuple[float, ...]

    @property
    def count(self) -> str:
        """`16 GPUs`."""
        return f"{len(self.values)} {KINDS.get(self.kind, ('place', 'places'))[len(self.values) != 1]}"

    @property
    def enough(self) -> bool:
        """There are as many as a median needs to say which one is out of line."""
        return len(self.values) >= LEAST

    @property
    def median(self) -> float:
        """Median of the values. Raises statistics.StatisticsError where there are none."""
        return statistics.median(self.values)


class Fleet:
    """Every figure that some criterion compares with the fleet's, once a part."""

    def __init__(self, planned: Planned, views: Iterable[HostView]) -> None:
        self._planned = planned
        self._values: dict[Key, dict[tuple[str, str], float]] = defaultdict(dict)
        for view in views:
            wanted = {item.name: item for item in view.criteria().values() if item.fleet_fraction is not None}
            for name in view.observations if wanted else ():
                if any(item.speaks_of(name) for item in wanted.values()):
                    self._add(view, name)

    def _add(self, view: HostView, name: str) -> None:
        for seen in view.observations[name]:
            value = seen.value
            if seen.status == MEASURED and isinstance(value, int | float) and math.isfinite(value):
                # What a gang did together every member tells: it is one figure.
                host = "" if seen.scope.startswith("gang=") else view.host.name
                self._values[self._key(view, seen)][(host, seen.scope)] = float(value)

    def crowd(self, view: HostView, seen: Observation) -> Crowd:
        """What a figure of this host is compared with."""
        key = self._key(view, seen)
        return Crowd(
            model=key[0] or "this kind",
            kind=key[3],
            values=tuple(self._values.get(key, {}).values()),
        )

    def _key(self, view: HostView, seen: Observation) -> Key:
        kind = seen.scope.rsplit(",", 1)[-1].split("=")[0]
        name = view.names.get(seen.scope.split(",")[0])
        model = name if name is not None else " and ".join(sorted(set(view.names.values())))
        return model, seen.name, seen.stage, kind, tuple(self._planned.params(seen).items())


def explained(criterion: Criterion, crowd: Crowd, median: str) -> str:
    """`95 % of the fleet's median 4.2e+12 B/s over 16 GPUs`."""
    share = f"{(criterion.fleet_fraction or 0) * 100:g} %"
    return f"{share} of the fleet's median {median} over {crowd.count}"


def too_few(crowd: Crowd) -> str:
    """Why the fleet's median says nothing."""
    return (
        f"the run has {crowd.count} of {crowd.model} with this figure, "
        f"and a median needs at least {LEAST} to tell which is out of line"
    )
