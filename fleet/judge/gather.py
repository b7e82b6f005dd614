"""Gather the statistics of a fleet host by host.

Hosts whose benchmarks made the same observations, whatever their values, share a layout (`layout`). Readings that are equal on
several of these hosts are evaluated once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import holds, is_applicable, limit_of, series
from fleet.judge.evidence import LAUNCH, Planned, from_benchmark
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.host_view import HostView
from fleet.judge.layout import GANG_SCOPE, HostValues, LayoutCache, are_numbers, is_regular, values_at
from fleet.judge.outliers import FigureKey, compared_names, model_readings
from fleet.judge.paths import is_bandwidth_name, slow_transport
from fleet.judge.shared_readings import SharedReadings
from fleet.judge.stragglers import Kind, ranks_of
from fleet.judge.uniformity import WITHIN_HOST, PartValue, group_name, name_of_group, part_readings, part_values
from schemas.records import MEASURED, Observation, Value, is_number
from schemas.scopes import Scope

MAX_READINGS = 50_000
"""Maximum number of different sets of readings that are kept. Hosts with a kept set are not evaluated again."""
MAX_PENDING = 256
"""Maximum number of hosts of a layout whose values are kept until they are added together."""


@dataclass(kw_only=True)
class _Readings:
    """What one set of readings adds to the statistics, and the number of hosts that have these readings."""

    parts: list[tuple[PartValue, int]]
    """Parts of a host with the same key and value are one entry: one of these parts, and their number."""
    figures: list[tuple[FigureKey, str, float]]
    hosts: int = 0


@dataclass(frozen=True, kw_only=True)
class _Bandwidth:
    """A bandwidth that the hosts of a layout measure. If it reaches its limit, its transport counts as normal (`NormalPaths`)."""

    criterion: Criterion
    key: FigureKey
    scope: str
    positions: tuple[int, ...]
    """Positions in `HostValues.values` of the measured values of the bandwidth."""
    name: str
    stage: str
    size: Value
    transport: Value
    """The transport that the figure itself reports."""
    transport_position: int | None
    """Position in `HostValues.values` of the launch's `collective.transport`; None if it was not measured. Its value replaces
    `transport`."""
    limit: Value
    """The limit, if the criterion does not compare with the fleet."""


@dataclass(kw_only=True, eq=False)
class _Step:
    """A criterion with `same_as_fleet` and its readings. If `criterion` is None: the readings of all criteria with `vs_fleet`."""

    criterion: Criterion | None
    names: tuple[str, ...]
    readings: _Readings
    """The readings of the first host of the layout."""


@dataclass(kw_only=True)
class _Layout:
    """What the hosts of one layout add to the statistics. A position is an index in `HostValues.values`."""

    number: int
    is_plain: bool = True
    """Whether the layout is used. If not, its hosts are added one by one.

    It is not used in two cases:
    - A value that is added to the statistics has no fixed position. The values of `pair_figures` are exceptions.
    - A criterion on a bandwidth compares with a baseline or judges a change.
    """
    figures: list[tuple[FigureKey, str, int]] = field(default_factory=list)
    gang_figures: list[tuple[FigureKey, str, int]] = field(default_factory=list)
    pair_figures: set[str] = field(default_factory=set)
    """Names of figures of pairs of hosts. They have no position, because the partners differ from host to host."""
    figure_criteria: list[Criterion]
    """The criteria that require the same value of a benchmark figure on all hosts."""
    ranks: list[tuple[Kind, str, int]] = field(default_factory=list)
    bandwidths: list[_Bandwidth] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)
    """The steps that are applied to each host separately: all steps except those of `shared`."""
    shared: SharedReadings[_Step]
    """The steps whose readings are equal on all hosts of the layout so far."""
    hosts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Gang, rack and NVLink domain -> number of hosts so far. All these hosts have the readings of `shared`."""
    pending: list[list[Value]] = field(default_factory=list)
    """The values of each host whose `figures` and `ranks` are not added to the statistics yet."""

    @cached_property
    def numbers(self) -> Callable[[Sequence[Value]], tuple[Value, ...]]:
        """Return a function that selects from `HostValues.values` the values that must be numbers."""
        figures = [*self.figures, *self.gang_figures]
        return values_at([position for _, _, position in figures] + [position for _, _, position in self.ranks])


class Gatherer:
    """Collects the statistics of hosts; `finish` returns them."""

    def __init__(self, planned: Planned) -> None:
        self._stats = FleetStats(planned)
        self._layouts = LayoutCache(self._compile, self._count_layout)
        self._readings: BoundedCache[Any, _Readings] = BoundedCache(MAX_READINGS, self._count)

    def add(self, view: HostView) -> None:
        self._stats.add_identities(view)
        if not is_regular(view):
            self._stats.add_values(view)
            return
        host = HostValues(view)
        layout = self._layouts.of_host(host)
        values = host.values
        numbers = layout.numbers(values)
        if not layout.is_plain or not are_numbers(numbers) or not all(map(math.isfinite, numbers)):  # type: ignore[arg-type]
            self._stats.add_values(view)
            return
        layout.pending.append(values)
        if len(layout.pending) >= MAX_PENDING:
            self._add_pending(layout)
        for key, scope, position in layout.gang_figures:
            self._stats.figures.add_figures(key, host.host_scope(scope), [values[position]])  # type: ignore[list-item]
        self._add_bandwidths(layout, host)
        if changed := layout.shared.remove_changed(host):
            self._count_shared(layout, changed)
            layout.steps += changed
        for criterion in layout.figure_criteria:
            for part in part_values(view, criterion):
                self._stats.groups.add_part(part)
        figures = self._stats.figures
        of_pairs = [item for item in host.pair_observations if item.name in layout.pair_figures]
        for (figure, scope), item in figures.latest(view, of_pairs).items():
            figures.add_figures(figure, scope, [float(item.value or 0)])
        layout.hosts[(view.host.gang, view.host.rack, view.nvlink_domain)] += 1
        for step in layout.steps:
            self._add_readings(layout, host, step)

    def finish(self) -> FleetStats:
        """Return the statistics of all hosts that were added; `FleetStats.complete` has not been called yet."""
        self._readings.clear()
        self._layouts.clear()
        self._stats.support.finish()
        self._stats.groups.share_equal_groups()
        return self._stats

    def _count(self, readings: _Readings) -> None:
        for part, parts in readings.parts:
            self._stats.groups.add_part(part, parts * readings.hosts)
        for key, scope, number in readings.figures:
            self._stats.figures.add_figures(key, scope, [number] * readings.hosts)

    def _count_layout(self, layout: _Layout) -> None:
        self._add_pending(layout)
        self._count_shared(layout, layout.shared.steps)

    def _add_pending(self, layout: _Layout) -> None:
        """Add the figures and ranks of the pending hosts to the statistics."""
        pending = layout.pending
        for key, scope, position in layout.figures if pending else ():
            self._stats.figures.add_figures(key, scope, [values[position] for values in pending])  # type: ignore[misc]
        for kind, figure, position in layout.ranks if pending else ():
            self._stats.ranks.add_figures(kind, figure, [values[position] for values in pending])  # type: ignore[misc]
        pending.clear()

    def _count_shared(self, layout: _Layout, steps: Iterable[_Step]) -> None:
        """Add the readings of these steps to the statistics, once for each host of the layout so far."""
        hosts = layout.hosts.total()
        for step in steps if hosts else ():
            for key, scope, number in step.readings.figures:
                self._stats.figures.add_figures(key, scope, [number] * hosts)
            if step.criterion is None:
                continue
            for (gang, rack, domain), count in layout.hosts.items():
                group = name_of_group(step.criterion, gang, rack, domain)
                for part, parts in step.readings.parts:
                    self._stats.groups.add_part(part.in_group(group), parts * count)

    def _add_readings(self, layout: _Layout, host: HostValues, step: _Step) -> None:
        view, criterion = host.view, step.criterion
        tokens = host.readings_key(step.names)
        key = (
            layout.number,
            criterion.id if criterion else "",
            group_name(view, criterion) if criterion else "",
            tokens,
        )
        readings = self._readings.get(key) if tokens is not None else None
        if readings is None:
            readings = self._readings_of(view, criterion, step.names)
            if tokens is None:
                readings.hosts = 1
                self._count(readings)
                return
            self._readings[key] = readings
        readings.hosts += 1

    def _readings_of(self, view: HostView, criterion: Criterion | None, names: tuple[str, ...]) -> _Readings:
        if criterion is None:
            return _Readings(
                parts=[], figures=[item for name in names for item in self._stats.figures.figures(view, name)]
            )
        parts: dict[Hashable, list[PartValue]] = defaultdict(list)
        for part in part_values(view, criterion):
            parts[(part.key, type(part.value), part.value)].append(part)
        return _Readings(parts=[(equal[0], len(equal)) for equal in parts.values()], figures=[])

    def _add_bandwidths(self, layout: _Layout, host: HostValues) -> None:
        for item in layout.bandwidths:
            position = item.transport_position
            transport = item.transport if position is None else host.values[position]
            if not slow_transport(transport, within=item.scope != GANG_SCOPE):
                continue  # a fast transport never explains a failure
            values = [host.values[position] for position in item.positions]
            path = (item.criterion.id, item.name, item.stage, item.size, transport)
            if not item.criterion.vs_fleet:
                passing = any if item.criterion.best_of_run else all
                if passing(holds(item.criterion.operator, value, item.limit) for value in values):
                    self._stats.paths.add_passing(path)
            elif all(map(is_number, values)):
                scope = host.host_scope(item.scope)
                self._stats.paths.add_figure(path, item.key, scope, item.criterion, values)  # type: ignore[arg-type]

    def _compile(self, host: HostValues, number: int) -> _Layout:
        steps, figure_criteria = self._reading_steps(host.view)
        shared = SharedReadings(host, {step: step.names for step in steps})
        layout = _Layout(
            number=number,
            figure_criteria=figure_criteria,
            shared=shared,
            steps=[step for step in steps if step not in shared.steps],
        )
        try:
            self._compile_figures(host, layout)
        except KeyError:  # an observation without a fixed position
            layout.is_plain = False
        return layout

    def _compile_figures(self, host: HostValues, layout: _Layout) -> None:
        """Add the positions of figures, ranks and bandwidths to the layout.

        Raises:
            KeyError: an observation has no fixed position.
        """
        view, positions = host.view, host.positions()
        compared = compared_names(view, view.observations.benchmark_names())
        layout.pair_figures = {item.name for item in host.pair_observations} & {*compared}
        for name in compared:
            for (key, scope), item in self._stats.figures.latest(view, view.observations[name]).items():
                if Scope.parse(scope).get("partner"):
                    continue
                figures = layout.gang_figures if Scope.parse(scope).is_gang else layout.figures
                figures.append((key, host.layout_scope(scope), positions[id(item)]))
        for kind, figure, item in ranks_of(view):
            layout.ranks.append((kind, figure, positions[id(item)]))
        names = {name for name in view.observations.benchmark_names() if is_bandwidth_name(name)}
        for criterion in view.criteria().values():
            if criterion.same_as_fleet is not None or not criterion.matched(names):
                continue
            if not is_applicable(view, criterion):
                continue
            if criterion.baseline is not None or criterion.delta:
                layout.is_plain = False
            for group in series(view, criterion):
                measured = [item for item in group if item.status == MEASURED]
                if measured:
                    layout.bandwidths.append(self._bandwidth(host, criterion, measured, positions))

    def _reading_steps(self, view: HostView) -> tuple[list[_Step], list[Criterion]]:
        """Return the steps that compare readings of hosts, and the criteria that require equal benchmark figures on all hosts."""
        metrics = view.observations.metrics
        benchmarks = {name for name in view.observations.benchmark_names() if from_benchmark(name)}
        chosen: list[tuple[Criterion | None, tuple[str, ...]]] = []
        compared: list[str] = []
        figure_criteria: list[Criterion] = []
        for criterion in view.criteria().values():
            names = tuple(criterion.matched(metrics))
            if criterion.same_as_fleet and criterion.among in WITHIN_HOST:
                continue  # compared within each host
            if criterion.same_as_fleet and criterion.matched(benchmarks):
                figure_criteria.append(criterion)
            elif criterion.same_as_fleet:
                if criterion.name.startswith(f"{LAUNCH}."):
                    chosen.append((criterion, ()))
                elif names:
                    chosen.append((criterion, (*names, *part_readings(view, criterion))))
            elif criterion.vs_fleet:
                compared += [*names, *(name for name in model_readings(criterion) if names and name in metrics)]
        if compared:
            chosen.append((None, tuple(dict.fromkeys(compared))))
        steps = [
            _Step(criterion=criterion, names=names, readings=self._readings_of(view, criterion, names))
            for criterion, names in chosen
        ]
        return steps, figure_criteria

    def _bandwidth(
        self, host: HostValues, criterion: Criterion, measured: list[Observation], positions: dict[int, int]
    ) -> _Bandwidth:
        last = measured[-1]
        transports = [
            item
            for item in host.view.observations["collective.transport"]
            if (item.stage, item.scope, item.status) == (last.stage, last.scope, MEASURED)
        ]
        return _Bandwidth(
            criterion=criterion,
            key=self._stats.figures.key(host.view, last),
            scope=host.layout_scope(last.scope),
            positions=tuple(positions[id(item)] for item in measured),
            name=last.name,
            stage=last.stage,
            size=last.params.get("size_bytes"),
            transport=last.params.get("transport"),
            transport_position=positions[id(transports[-1])] if transports else None,
            limit=limit_of(host.view, criterion, last),
        )


def gather(planned: Planned, views: Iterable[HostView]) -> FleetStats:
    """Return the completed statistics of these hosts."""
    gatherer = Gatherer(planned)
    for view in views:
        gatherer.add(view)
    stats = gatherer.finish()
    stats.complete()
    return stats
