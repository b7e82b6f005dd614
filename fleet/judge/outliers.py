"""One part against the fleet's others of its kind: the median that criteria with `vs_fleet` are measured by.

The median and not the mean, and the median absolute deviation and not the standard one: a part that is out of line, even
several of them, hardly moves what it is compared with. A fleet that is too small for either is judged by the floors of its packs.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import HostView, Planned
from fleet.judge.finding import FLOORS
from schemas.records import MEASURED, Observation, Value
from schemas.reports import Verdict
from schemas.scopes import Scope

LEAST = 3
"""With two values the median lies between them: neither can be told from the other."""
LEAST_SPREAD = 8
"""Values from which their spread is known well enough to count in (its own error is then a quarter of it)."""
SIGMA_OF_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
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
    place: str = ""
    """Where in their hosts they are, if they were taken from one place alone: `gpu=3`."""

    @property
    def count(self) -> str:
        """`16 GPUs`; `16 GPUs at gpu=3`."""
        at = f" at {self.place}" if self.place else ""
        return f"{len(self.values)} {KINDS.get(self.kind, ('place', 'places'))[len(self.values) != 1]}{at}"

    @property
    def enough(self) -> bool:
        """There are as many as a median needs to say which one is out of line."""
        return len(self.values) >= LEAST

    @cached_property
    def median(self) -> float:
        """Median of the values. Raises statistics.StatisticsError where there are none."""
        return statistics.median(self.values)

    @cached_property
    def deviation(self) -> float | None:
        """Robust standard deviation of the values; None where they are too few."""
        if len(self.values) < LEAST_SPREAD:
            return None
        middle = self.median
        return SIGMA_OF_MAD * statistics.median(abs(value - middle) for value in self.values)


class Fleet:
    """Every figure that some criterion compares with the fleet's, once a part.

    What is kept of a part is its number and its place in its host, so that a hundred thousand hosts fit; several of these,
    each of other hosts, can be put together in any order.
    """

    def __init__(self, planned: Planned, views: Iterable[HostView] = ()) -> None:
        self._planned = planned
        self._values: dict[Key, dict[str, array[float]]] = {}
        self._together: dict[Key, dict[str, float]] = {}
        self._crowds: dict[tuple[Key, str], Crowd] = {}
        for view in views:
            self.add(view)

    def add(self, view: HostView) -> None:
        """Takes what the host shows of it."""
        for name in compared(view):
            if name in view.observations:
                self._add(view, name)

    def _add(self, view: HostView, name: str) -> None:
        for key, scope, number in self.figures(view, name):
            self.feed(key, scope, number)

    def figures(self, view: HostView, name: str) -> Iterator[tuple[Key, str, float]]:
        """What a host shows under that name: key, scope and number."""
        for (key, scope), seen in self.latest(view, name).items():
            yield key, scope, float(seen.value or 0)

    def latest(self, view: HostView, name: str) -> dict[tuple[Key, str], Observation]:
        """The last number of each part."""
        found = {}
        for seen in view.observations[name]:
            value = seen.value
            if seen.status == MEASURED and isinstance(value, int | float) and math.isfinite(value):
                found[(self.key(view, seen), seen.scope)] = seen
        return found

    def feed(self, key: Key, scope: str, number: float) -> None:
        """Takes one number of one part."""
        # What a gang did together every member tells: it is one figure.
        if Scope.parse(scope).is_gang:
            self._together.setdefault(key, {})[scope] = number
            return
        places = self._values.get(key)
        if places is None:
            places = self._values[key] = {}
        place = Scope.parse(scope).device
        if place in places:
            places[place].append(number)
        else:
            places[place] = array("d", [number])
        if self._crowds:
            self._crowds.clear()

    def update(self, other: Fleet) -> None:
        """Takes what another has of other hosts."""
        for key, places in other._values.items():
            mine = self._values.setdefault(key, {})
            for place, values in places.items():
                mine.setdefault(place, array("d")).extend(values)
        for key, told in other._together.items():
            self._together.setdefault(key, {}).update(told)
        self._crowds.clear()

    def crowd(self, view: HostView, seen: Observation, criterion: Criterion | None = None) -> Crowd:
        """What a figure of this host is compared with: the same place of other hosts, where a criterion asks for it and they are
        enough, or else every part of its model."""
        return self.at(self.key(view, seen), seen.scope, criterion)

    def at(self, key: Key, scope: str, criterion: Criterion | None = None) -> Crowd:
        """The same by its key and scope."""
        if criterion and criterion.by_position:
            alike = self._crowd(key, Scope.parse(scope).device)
            if len(alike.values) >= LEAST_SPREAD:
                return alike
        return self._crowd(key, "")

    def _crowd(self, key: Key, place: str) -> Crowd:
        """The parts at one place of their hosts, or all of them."""
        if (key, place) not in self._crowds:
            found = self._values.get(key, {})
            places = [found[place]] if place in found else [] if place else [*found.values()]
            values = [value for there in places for value in there]
            values += [
                value
                for scope, value in self._together.get(key, {}).items()
                if not place or Scope.parse(scope).device == place
            ]
            self._crowds[(key, place)] = Crowd(
                model=key[0] or "this kind", kind=key[3], values=tuple(sorted(values)), place=place
            )
        return self._crowds[(key, place)]

    def key(self, view: HostView, seen: Observation | Verdict) -> Key:
        """What a figure of this host must share with those that it is compared with."""
        scope = Scope.parse(seen.scope)
        name = view.names.get(scope.device)
        model = name if name is not None else " and ".join(sorted(set(view.names.values())))
        return model, seen.name, seen.stage, scope.kind, tuple(self._planned.params(seen).items())


def compared(view: HostView) -> list[str]:
    """Names of what the host shows and some criterion compares with the fleet."""
    wanted = [item for item in view.criteria().values() if item.vs_fleet]
    return [name for name in view.observations if any(item.speaks_of(name) for item in wanted)]


def enough(criterion: Criterion, crowd: Crowd) -> bool:
    """Whether the fleet is large enough for what the criterion asks of it."""
    return crowd.enough if criterion.fleet_fraction is not None else crowd.deviation is not None


def limit(criterion: Criterion, crowd: Crowd) -> float:
    """What the fleet makes the limit: of a fraction and a number of deviations the one that lies farther from the median.

    Raises ValueError where the fleet is not `enough`.
    """
    return _limits(criterion, crowd)[0]


def _limits(criterion: Criterion, crowd: Crowd) -> tuple[float, bool]:
    """The limit, and whether it is the deviations that make it."""
    middle, deviation, asked = crowd.median, crowd.deviation, criterion.fleet_deviations
    found = [(criterion.fleet_fraction * middle, False)] if criterion.fleet_fraction is not None else []
    if asked is not None and deviation is not None:
        away = asked * deviation
        found.append((middle - away if criterion.operator in FLOORS else middle + away, True))
    if not found:
        raise ValueError(f"{crowd.count} are too few for criterion {criterion.id}")
    return min(found) if criterion.operator in FLOORS else max(found)


def explained(criterion: Criterion, crowd: Crowd, median: str) -> str:
    """`95 % of the fleet's median 4200 GB/s over 16 GPUs`; `5 deviations (0.2 %) from the fleet's median …`."""
    deviation = crowd.deviation or 0.0
    if _limits(criterion, crowd)[1]:
        share = f" ({deviation / abs(crowd.median) * 100:.2g} % each)" if crowd.median else ""
        return f"{criterion.fleet_deviations:g} robust deviations{share} from the fleet's median {median} over {crowd.count}"
    return f"{(criterion.fleet_fraction or 0) * 100:g} % of the fleet's median {median} over {crowd.count}"


def too_few(crowd: Crowd, criterion: Criterion | None = None) -> str:
    """Why the fleet's median says nothing."""
    spread = criterion is not None and criterion.fleet_fraction is None
    needs = f"a spread needs at least {LEAST_SPREAD}" if spread else f"a median needs at least {LEAST}"
    return f"the run has {crowd.count} of {crowd.model} with this figure, and {needs} to tell which is out of line"
