"""Group hosts whose benchmark observations differ only in their values, so that a large fleet is judged quickly.

Such hosts share a layout: their observations without the values. For each layout, the judge determines once which values a
criterion judges and which limit applies. For every other host of the layout it only compares numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Generic, TypeVar

from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.evidence import LAUNCH, from_benchmark
from fleet.judge.host_view import HostView
from schemas.records import ERROR, MEASURED, Observation, Value
from schemas.scopes import Scope
from schemas.stages import GANG

MAX_LAYOUTS = 500
GANG_SCOPE = "gang="
"""Scope of a gang (the hosts of one multi-node launch) in a layout. It lacks the gang's name, because gangs share layouts."""
_NUMBERS = frozenset({float, int})
L = TypeVar("L")


class HostValues:
    """The benchmark observations of one host, split into a layout and values.

    The scopes of observations on pairs of hosts (`partner=`) differ from host to host. So the layout has only the kinds of these
    observations (`kind_of`), not their scopes and values.
    """

    def __init__(self, view: HostView) -> None:
        self.view = view
        self.gang_scope = f"gang={view.host.gang}" if view.host.gang else ""
        self.observations, self.pair_observations = split_pairs(view.evidence.benchmarks())
        self.values: list[Value] = [item.value for item in self.observations]
        self.versions = tuple(view.evidence.software().items())
        self._readings = view.observations.metrics
        self.tokens = self._readings.tokens()
        """A key for each of `ReadingIndex.readings`. Equal keys mean equal readings; 0 means that the reading has no key."""
        scopes = {self.gang_scope: GANG_SCOPE}
        launches = tuple((launch.stage, view.plan.ranks(launch.members)) for launch in view.evidence.launches())
        self._facts: tuple[Hashable, ...] = (
            *(view.kind, id(view.expected), self._readings.names, launches, self.versions, len(view.evidence.records)),
            frozenset([(kind_of(item), Scope.parse(item.scope).kind) for item in self.pair_observations]),
        )
        self._lists: tuple[list[Hashable], ...] = (
            [scopes.get(item.scope, item.scope) for item in self.observations],
            [kind_of(item) for item in self.observations],
            [item.samples is None for item in self.observations],
            [item.value.__class__ is str for item in self.observations],
        )
        self.structure = self._facts, *self._lists
        """What the hosts of a layout have in common. Comparing it is faster than hashing `key`, its hashable form."""

    @property
    def key(self) -> Hashable:
        return self._facts, *map(tuple, self._lists)

    @property
    def places(self) -> Mapping[str, tuple[int, ...]]:
        """Return name -> positions of its readings in `tokens`."""
        return self._readings.places

    def readings_key(self, names: Sequence[str]) -> tuple[int, ...] | None:
        """Return a key of the readings of these names: equal keys mean equal readings. None if a reading has no key."""
        tokens = tuple(map(self.tokens.__getitem__, chain.from_iterable(map(self.places.__getitem__, names))))
        return None if 0 in tokens else tokens

    def positions(self) -> dict[int, int]:
        """Return the position in `values` of each observation, by the `id()` of the observation."""
        return {id(item): position for position, item in enumerate(self.observations)}

    def host_scope(self, scope: str) -> str:
        """Convert a scope of the layout to the scope on this host."""
        return self.gang_scope if scope == GANG_SCOPE else scope

    def layout_scope(self, scope: str) -> str:
        """Convert a scope on this host to the scope in the layout."""
        return GANG_SCOPE if scope == self.gang_scope else scope

    def has_all_pairs(self) -> bool:
        """Return whether all observations that the plan expects on pairs of hosts were measured, and none has an error."""
        measured = {(item.name, item.stage, item.scope) for item in self.pair_observations if item.status == MEASURED}
        return not any(item.status == ERROR for item in self.pair_observations) and measured.issuperset(
            self._expected_pairs
        )

    @property
    def expected_pair_count(self) -> int:
        """Return how many observations the plan expects on pairs of hosts."""
        return len(self._expected_pairs)

    @cached_property
    def _expected_pairs(self) -> list[tuple[str, str, str]]:
        view = self.view
        return [
            (item.name, item.stage, scope)
            for item in view.expected
            if item.scope == "peers"
            for scope in view.plan.scopes_of(view.host, item)
        ]


class LayoutCache(Generic[L]):
    """The layouts of hosts. Each is computed for the first host that has it.

    The layout of the previous host is compared first, because most hosts have the same one.
    """

    def __init__(
        self, compile_layout: Callable[[HostValues, int], L], on_removal: Callable[[L], None] | None = None
    ) -> None:
        """Create an empty cache.

        Args:
            compile_layout: returns the layout for a host and a number that is different for each layout.
            on_removal: called with each layout that is removed, by `clear` or because the cache is full.
        """
        self._compile = compile_layout
        self._layouts: BoundedCache[Hashable, L] = BoundedCache(MAX_LAYOUTS, on_removal)
        self._compiled = 0
        self._last: tuple[object, L] | None = None

    def of_host(self, host: HostValues) -> L:
        if self._last and self._last[0] == host.structure:
            return self._last[1]
        key = host.key
        layout = self._layouts.get(key)
        if layout is None:
            self._compiled += 1
            layout = self._layouts[key] = self._compile(host, self._compiled)
        self._last = host.structure, layout
        return layout

    def clear(self) -> None:
        self._last = None
        self._layouts.clear()


def values_at(positions: Sequence[int]) -> Callable[[Sequence[Value]], tuple[Value, ...]]:
    """Return a function that returns the values at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda values: tuple(values[position] for position in positions)


def are_numbers(values: Sequence[Value]) -> bool:
    return _NUMBERS.issuperset(map(type, values))


def kind_of(item: Observation) -> Hashable:
    """Return a key of the name, stage, status, unit and parameters. Equal keys mean that these are equal."""
    return item.token or (item.name, item.stage, item.status, item.unit, *item.params.items())


def split_pairs(items: list[Observation]) -> tuple[list[Observation], list[Observation]]:
    """Return the observations of the host alone, and those on pairs of hosts (`partner=`)."""
    alone = [item for item in items if "partner=" not in item.scope]
    return alone, [item for item in items if "partner=" in item.scope] if len(alone) < len(items) else []


def is_regular(view: HostView) -> bool:
    """Return whether the host may share a layout.

    It must have a host record, and all of its planned GPUs must have been measured. It shares no layout if one of its launches
    failed or lacked hosts of the gang, if a snapshot contains benchmark results, or if the benchmark results contain readings.
    """
    if not view.has_record or view.unmeasured_gpus:
        return False
    observations = view.observations
    if not _are_separate(observations.metrics.names, tuple(observations.benchmark_names())):
        return False
    launches = view.evidence.launches()
    gang = set(view.plan.gangs().get(view.host.gang, ()))
    return all(
        launch.outcome == "finished" and not launch.reason and (launch.stage != GANG or set(launch.members) == gang)
        for launch in launches
    )


@lru_cache(maxsize=MAX_LAYOUTS)
def _are_separate(readings: tuple[str, ...], results: tuple[str, ...]) -> bool:
    """Return whether all results have names of benchmark results or of versions (`launch.`), and no reading has such a name."""
    return all(map(_is_result, results)) and not any(map(_is_result, readings))


def _is_result(name: str) -> bool:
    return from_benchmark(name) or name.startswith(f"{LAUNCH}.")
