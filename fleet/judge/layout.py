"""Separate the values that a host's benchmarks measured from everything else, which thousands of hosts have in common.

Hosts whose benchmarks made the same observations share a layout and differ only in values. For each layout, the values and limits
of a criterion are found once. After that only numbers are compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import chain

from fleet.judge.evidence import LAUNCH, from_benchmark
from fleet.judge.host_view import HostView
from schemas.records import ERROR, MEASURED, Observation, Value
from schemas.scopes import Scope
from schemas.stages import GANG

GANG_SCOPE = "gang="
"""Scope of a gang in a layout, whatever its name."""


class HostValues:
    """The benchmark observations of one host, as a layout and its values.

    Of observations that hosts make in pairs (`partner=`) it has the kinds only: their scopes differ from host to host.
    """

    def __init__(self, view: HostView) -> None:
        self.view = view
        self.gang_scope = f"gang={view.host.gang}" if view.host.gang else ""
        self.observations, self.with_partners = without_partners(view.evidence.benchmarks())
        self.values: list[Value] = [item.value for item in self.observations]
        self.versions = tuple(view.evidence.software().items())
        self.tokens = {
            name: tuple([metric.token for _, metric in readings])
            for name, readings in view.observations.metrics.items()
        }
        """Name -> a key of the readings of that name. Equal keys mean equal readings; a 0 means that a reading has no key."""
        layout_scope = {self.gang_scope: GANG_SCOPE}
        launches = tuple((launch.stage, view.plan.ranks(launch.members)) for launch in view.evidence.launches())
        self.key: Hashable = (
            *(view.kind, id(view.expected), tuple(self.tokens), launches, self.versions, len(view.evidence.records)),
            tuple(
                [
                    (
                        item.name,
                        layout_scope.get(item.scope, item.scope),
                        item.stage,
                        item.status,
                        item.unit,
                        item.samples is None,
                        item.value.__class__ is str,
                        *item.params.items(),
                    )
                    for item in self.observations
                ]
            ),
            frozenset(
                [
                    (item.name, Scope.parse(item.scope).kind, item.stage, item.status, item.unit, *item.params.items())
                    for item in self.with_partners
                ]
            ),
        )

    def readings_key(self, names: Sequence[str]) -> tuple[int, ...] | None:
        """Return a key of the readings of these names: equal keys mean equal readings. None if a reading has no key."""
        tokens = (
            self.tokens[names[0]]
            if len(names) == 1
            else tuple(chain.from_iterable(map(self.tokens.__getitem__, names)))
        )
        return None if 0 in tokens else tokens

    def positions(self) -> dict[int, int]:
        """Return id of each observation -> its position in `values`."""
        return {id(item): position for position, item in enumerate(self.observations)}

    def own_scope(self, scope: str) -> str:
        """Return the scope on this host of a scope of the layout."""
        return self.gang_scope if scope == GANG_SCOPE else scope

    def layout_scope(self, scope: str) -> str:
        """Return the scope in the layout of a scope on this host."""
        return GANG_SCOPE if scope == self.gang_scope else scope

    def has_all_partners(self) -> bool:
        """Return whether everything that the plan expects of pairs of hosts was measured."""
        measured = {(item.name, item.stage, item.scope) for item in self.with_partners if item.status == MEASURED}
        return not any(item.status == ERROR for item in self.with_partners) and measured.issuperset(
            self._expected_pairs
        )

    @property
    def partners(self) -> int:
        """Return how many observations the plan expects of pairs of hosts."""
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


def without_partners(items: list[Observation]) -> tuple[list[Observation], list[Observation]]:
    """Return the observations without those that hosts make in pairs (`partner=`), and these."""
    alone = [item for item in items if "partner=" not in item.scope]
    return alone, [item for item in items if "partner=" in item.scope] if len(alone) < len(items) else []


def is_regular(view: HostView) -> bool:
    """Return whether the host may share a layout: it has a record, its GPUs, and good launches with its whole gang.

    Benchmark results in a snapshot, or readings among the results of benchmarks, belong to no layout either.
    """
    if not view.has_record or view.unmeasured_gpus:
        return False
    if any(from_benchmark(name) or name.startswith(f"{LAUNCH}.") for name in view.observations.metrics):
        return False
    if not all(from_benchmark(name) or name.startswith(f"{LAUNCH}.") for name in view.observations.benchmark_names()):
        return False
    launches = view.evidence.launches()
    gang = set(view.plan.gangs().get(view.host.gang, ()))
    return all(
        launch.outcome == "finished" and not launch.reason and (launch.stage != GANG or set(launch.members) == gang)
        for launch in launches
    )
