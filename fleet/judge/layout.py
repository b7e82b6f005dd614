"""Separate the values that a host's benchmarks measured from everything else, which thousands of hosts have in common.

Hosts whose benchmarks made the same observations differ only in values. What a criterion compares with which limit is found
once for such a layout; after that only numbers are compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

from fleet.judge.evidence import LAUNCH, from_benchmark
from fleet.judge.host_view import HostView
from schemas import quick
from schemas.probes import GANG
from schemas.records import ERROR, MEASURED, Observation, Value

GANG_SCOPE = "gang="
"""Scope of a gang in a layout, whatever its name."""


class HostValues:
    """The benchmark observations of one host, as a layout and its values.

    Observations that hosts make in pairs (`partner=`) are left out: their scopes differ from host to host.
    """

    def __init__(self, view: HostView) -> None:
        self.view = view
        self.gang_scope = f"gang={view.host.gang}" if view.host.gang else ""
        self.observations: list[Observation] = []
        self.values: list[Value] = []
        self.with_partners: list[Observation] = []
        layout: list[Hashable] = []
        for item in view.evidence.benchmarks():
            scope = item.scope
            if "partner=" in scope:
                self.with_partners.append(item)
                continue
            value = item.value
            self.observations.append(item)
            self.values.append(value)
            shown = GANG_SCOPE if scope == self.gang_scope else scope
            layout.append((item.name, shown, item.stage, item.status, isinstance(value, str), *item.params.items()))
        launches = tuple(launch.stage for launch in view.evidence.launches())
        self.versions = tuple(view.evidence.software().items())
        names = tuple(view.observations.metrics)
        self.key: Hashable = (
            *(view.kind, id(view.expected), names, launches, self.versions, len(view.evidence.records)),
            tuple(layout),
        )

    def positions(self) -> dict[int, int]:
        """Return the id of each observation -> its position in `values`."""
        return {id(item): position for position, item in enumerate(self.observations)}

    def own_scope(self, scope: str) -> str:
        """Return a scope of the layout as this host has it."""
        return self.gang_scope if scope == GANG_SCOPE else scope

    def layout_scope(self, scope: str) -> str:
        """Return a scope of this host as the layout has it."""
        return GANG_SCOPE if scope == self.gang_scope else scope

    def has_all_partners(self) -> bool:
        """Return whether everything that the plan expects of pairs of hosts was measured."""
        measured = {(item.name, item.stage, item.scope) for item in self.with_partners if item.status == MEASURED}
        return not any(item.status == ERROR for item in self.with_partners) and measured.issuperset(self._expected_pairs)

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


def is_regular(view: HostView) -> bool:
    """Return whether the host may share a layout: it has a record, its GPUs, and good launches with its whole gang.

    Benchmark results in a snapshot, or readings among the results of benchmarks, belong to no layout either.
    """
    if not view.has_record or view.unseen:
        return False
    if any(from_benchmark(name) or name.startswith(f"{LAUNCH}.") for name in view.observations.metrics):
        return False
    if not all(from_benchmark(name) or name.startswith(f"{LAUNCH}.") for name in view.observations.benchmark_names()):
        return False
    launches = view.evidence.launches()
    gang = set(view.plan.gangs().get(view.host.gang, ()))
    return all(
        launch.outcome == "finished"
        and not launch.reason
        and (launch.stage != GANG or set(launch.members) == gang)
        for launch in launches
    )


def reading_tokens(view: HostView, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return a key of the readings of these names: equal keys mean equal readings. None if a reading has no key."""
    metrics = view.observations.metrics
    tokens = tuple([quick.token(metric) for name in names for _, metric in metrics[name]])
    return None if 0 in tokens else tokens
