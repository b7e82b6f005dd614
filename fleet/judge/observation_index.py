"""Look up the observations of one host by name, or by an expectation (an observation that the plan requires)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property

from fleet.judge.evidence import Evidence, with_gpu_scope
from fleet.judge.reading_index import ReadingIndex
from schemas.catalogue import Expectation
from schemas.records import MEASURED, Observation, Value
from schemas.scopes import Scope


class ObservationIndex(Mapping[str, list[Observation]]):
    """Mapping of name -> observations of a host.

    Readings of snapshots come first, then benchmark results, then software versions of the ranks. Observations of a snapshot are
    built on the first lookup of their name, because most names are never judged. The value of an unknown name is an empty list.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._gpu_scopes = evidence.gpu_scopes()
        self.metrics = ReadingIndex(evidence.snapshots(), evidence.bmc_snapshots())
        """Name -> list of (snapshot, metric) for each snapshot with a metric of that name."""
        others: dict[str, list[Observation]] = defaultdict(list)
        self._versions = evidence.versions()
        for observation in (*evidence.benchmarks(), *self._versions):
            others[observation.name].append(observation)
        self._others = dict(others)
        self._built: dict[str, list[Observation]] = {}
        self._by_scope: dict[str, dict[str, list[Observation]]] = {}
        self._last_values: dict[str, Mapping[str, Value]] = {}

    def __getitem__(self, name: str) -> list[Observation]:
        observations = self._built.get(name)
        if observations is None:
            observations = self._built[name] = self._build(name)
        return observations

    def _build(self, name: str) -> list[Observation]:
        observations = list(self._others.get(name, ()))
        if name in self.metrics:
            readings = [item for snapshot, metric in self.metrics[name] for item in snapshot.observations_of(metric)]
            observations = [*readings, *observations]
        if self._gpu_scopes.keys().isdisjoint(Scope.parse(item.scope).device for item in observations):
            return observations
        return [with_gpu_scope(item, self._gpu_scopes) for item in observations]

    def by_scope(self, name: str) -> dict[str, list[Observation]]:
        """Return the readings of that name by scope; empty for names outside of snapshots (`benchmark_names`).

        Benchmark results are left out because several results in one scope may differ in their parameters.
        """
        if name in self._others:
            return {}
        by_scope = self._by_scope.get(name)
        if by_scope is None:
            by_scope = self._by_scope[name] = {}
            for observation in self[name]:
                by_scope.setdefault(observation.scope, []).append(observation)
        return by_scope

    def last_values(self, name: str) -> Mapping[str, Value]:
        """Return the last value of that name in each scope that has one."""
        values = self._last_values.get(name)
        if values is None:
            values = self._last_values[name] = self._values(name)
        return values

    def _values(self, name: str) -> Mapping[str, Value]:
        if name in self._others:
            return {item.scope: item.value for item in self[name] if item.status == MEASURED}
        metrics = self.metrics.get(name, ())
        values = {scope: value for _, metric in metrics for scope, value in metric.values.items()}
        if not any(Scope.parse(scope).device_kind == "pci" for scope in values):
            return values
        return {item.scope: item.value for item in self[name] if item.status == MEASURED}

    def __contains__(self, name: object) -> bool:
        return name in self.metrics or name in self._others

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.metrics, *self._others)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def benchmark_names(self) -> Set[str]:
        """Return the names of all observations outside of snapshots: benchmark results, and software versions of the ranks."""
        return self._others.keys()

    def measured_at(self, scope: str) -> bool:
        """Return whether the host measured anything in that scope."""
        return scope in self._measured_scopes

    @cached_property
    def _measured_scopes(self) -> set[str]:
        """The scopes in which the host measured anything."""
        of_readings = (metric.values for metrics in self.metrics.values() for _, metric in metrics)
        return {item.scope for name in self for item in self[name] if item.status == MEASURED}.union(*of_readings)

    def with_reading(self, scopes: Iterable[str]) -> set[str]:
        """Return those of the scopes that have a value of any metric in a snapshot."""
        without = scopes = {*scopes}
        last = None
        for metric in self.metrics.readings:
            if metric is not last and not without.isdisjoint(metric.values):
                without = without - metric.values.keys()
                if not without:
                    break
            last = metric
        return scopes - without

    def stages(self) -> set[str]:
        """Return the stages with any observation; software versions of the ranks do not count."""
        stages = {
            snapshot.stage
            for metrics in self.metrics.values()
            for snapshot, metric in metrics
            if metric.values or metric.absent
        }
        versions = set(map(id, self._versions))
        return stages | {item.stage for items in self._others.values() for item in items if id(item) not in versions}


class ObservationLookup:
    """An index that finds the observation of an expectation without searching all observations."""

    def __init__(self, observations: Iterable[Observation] | ObservationIndex) -> None:
        self._index = observations if isinstance(observations, ObservationIndex) else None
        self._by_scope_key: dict[tuple[str, str, str], list[Observation]] = defaultdict(list)
        """Observations by name, stage and scope."""
        self._indexed_names: set[str] = set()
        self._by_params: dict[tuple[str, ...], dict[tuple[Value, ...], list[Observation]]] = {}
        """Observations of one name, stage and scope, by the values of the expected parameters."""
        for observation in observations if not isinstance(observations, ObservationIndex) else ():
            self._add(observation)

    def _add(self, observation: Observation) -> None:
        self._by_scope_key[(observation.name, observation.stage, observation.scope)].append(observation)

    def find(self, expectation: Expectation, scope: str) -> Observation | None:
        """Return the observation of an expectation in `scope`; the last one if a stage was run again."""
        if self._index is not None and expectation.name not in self._indexed_names:
            self._indexed_names.add(expectation.name)
            for observation in self._index[expectation.name]:
                self._add(observation)
        key = (expectation.name, expectation.stage, scope)
        by_params = self._by_params.get((*key, *expectation.params))
        if by_params is None:
            by_params = self._by_params[(*key, *expectation.params)] = defaultdict(list)
            for observation in self._by_scope_key.get(key, ()):
                if expectation.params.keys() <= observation.params.keys():
                    by_params[tuple(observation.params[name] for name in expectation.params)].append(observation)
        return _latest(by_params.get(tuple(expectation.params.values()), ()))


def _latest(observations: Sequence[Observation]) -> Observation | None:
    """Return the last of the observations of one expectation; None without observations.

    For copies between GPU and host, one expectation may have results with local and with remote memory (parameter `numa`). Then
    only the last result with each memory counts. If one of these is not MEASURED, it is returned.
    """
    if len(observations) < 2:
        return observations[0] if observations else None
    latest: dict[Value, Observation] = {}
    for observation in observations:
        memory = observation.params.get("numa")
        for other in [other for other in latest if memory is None or other is None]:
            del latest[other]
        latest[memory] = observation
    failed = [observation for observation in latest.values() if observation.status != MEASURED]
    return next(iter(failed or reversed(list(latest.values()))), None)
