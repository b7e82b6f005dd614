"""Count the passes of hosts (verdicts `pass`) without building a `Verdict` for each.

Most verdicts of a fleet are passes, and many of them are alike. This module counts the passes that it recognises without a full
evaluation; `judge` evaluates everything else. Readings that are equal on several hosts are evaluated once. Hosts whose benchmark
observations differ only in their values share a layout (fleet/judge/layout.py). Limits are computed once for each layout, and
the numbers of its hosts are compared with them.

A figure is a result of a benchmark, a reading a value that a collector reads on a host. The position of a value is its index in
`HostValues.values`, the position of a host its index in the plan.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fleet.judge import expectations, outliers
from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.counter_rate import deciding_readings
from fleet.judge.criteria import Criterion
from fleet.judge.drift import is_drift
from fleet.judge.evaluate import COMPARE, holds, is_applicable, is_unlinked, limit_of, series
from fleet.judge.evidence import LAUNCH, from_benchmark
from fleet.judge.figure_consistency import Figures, FigureStructure, PartnerStructures, figure_structure
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.host_view import HostView
from fleet.judge.layout import GANG_SCOPE, HostValues, LayoutCache, are_numbers, is_regular, values_at
from fleet.judge.partner_checks import PartnerCheck, are_alike
from fleet.judge.paths import is_bandwidth_name, judges_bandwidth
from fleet.judge.reading_checks import ReadingCheck, reading_check
from fleet.judge.row import MAX_FARTHEST, TallyRow
from fleet.judge.shared_readings import SharedReadings
from fleet.judge.tally import Tally
from fleet.judge.uniformity import GroupKey, group_keys, group_name, part_readings
from schemas.records import MEASURED, Observation, Value, is_number
from schemas.reports import PASS, Verdict
from schemas.scopes import Scope

MAX_READINGS = 50_000
"""Maximum number of cached results. Each is the result of one criterion for hosts whose readings are equal."""
MAX_PENDING = 256
"""If this many hosts of a layout have passes that are not counted yet, these passes are counted."""

Evaluate = Callable[[HostView, Criterion], list[Verdict]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Check:
    """One figure that all hosts of a layout have, and its limit."""

    positions: tuple[int, ...]
    """Positions of all repeated values of the figure; each value must pass."""
    chosen: int
    """Position of the value that the verdict reports."""
    scope: str
    limit: Value
    operator: str
    row: TallyRow
    is_number: bool
    """Whether the limit is a number, so that `TallyRow.add_pass` can count the passes (`_counts_numbers`)."""


@dataclass(kw_only=True, eq=False)
class _Step:
    """How one criterion is applied to the hosts of a layout: by `checks`, by `partners`, or by the readings in `names`.

    If all three are None, the criterion is evaluated in full.
    """

    criterion: Criterion
    number: int = 0
    """Position of the step among all steps of the layout."""
    checks: Sequence[_Check] | None = None
    partners: PartnerCheck | None = None
    """The check of a figure that is measured between pairs of hosts."""
    names: tuple[str, ...] | None = None
    """Names of the readings that decide the verdict. Empty for a criterion on software versions (`launch.*`), which are the same
    on all hosts of the layout."""
    readings: ReadingCheck | None = None
    """The check of the readings of further hosts, built from the first host that passes; None if there is no such check."""
    passes: list[Verdict] = field(default_factory=list)
    """The verdicts of a shared step (`Layout.shared`): all of them are passes."""
    group_keys: tuple[GroupKey, ...] = ()
    """For a shared step with a criterion that compares hosts: the groups that are compared (`uniformity.group_keys`)."""
    majority: Hashable = None
    """What these groups require (`ValueGroups.majority`). The step is shared only as long as this is the same for every host."""

    @cached_property
    def compares_numbers(self) -> bool:
        """Return whether the step has checks and all of them compare numbers."""
        return bool(self.checks) and all(check.is_number for check in self.checks or ())


class _NumberChecks:
    """The checks of a layout that compare numbers. Most hosts pass all of them; their passes are counted together."""

    def __init__(self, checks: Sequence[_Check]) -> None:
        self._checks = checks
        self._chosen = values_at([check.chosen for check in checks])
        by_operator: dict[str, list[tuple[int, float]]] = {}
        for check in checks:
            by_operator.setdefault(check.operator, []).extend((position, check.limit) for position in check.positions)  # type: ignore[misc]
        self._comparisons = [
            (COMPARE[name], values_at([position for position, _ in items]), [limit for _, limit in items])
            for name, items in by_operator.items()
        ]
        self._pending: list[tuple[tuple[Value, ...], int, str, str]] = []
        """For each host whose passes are not counted yet: the values, and the position, name and gang scope of the host."""

    def count_passes(self, values: HostValues, position: int) -> int | None:
        """Count the passes of a host and return their number. If the host fails a check, count nothing and return None."""
        for compare, chosen, limits in self._comparisons:
            numbers = chosen(values.values)
            if not are_numbers(numbers) or not all(map(compare, numbers, limits)):  # type: ignore[arg-type]
                return None
        self._pending.append((self._chosen(values.values), position, values.view.host.name, values.gang_scope))
        if len(self._pending) >= MAX_PENDING:
            self.finish()
        return len(self._checks)

    def finish(self) -> None:
        """Count the passes of the pending hosts."""
        if not self._pending:
            return
        columns, positions, names, gang_scopes = zip(*self._pending, strict=True)
        for check, column in zip(self._checks, zip(*columns, strict=True), strict=True):
            scopes = gang_scopes if check.scope == GANG_SCOPE else itertools.repeat(check.scope)
            check.row.add_passes(column, positions, names, scopes)
        self._pending.clear()


@dataclass(kw_only=True)
class Layout:
    """What hosts have in common if their benchmark observations differ only in their values."""

    number: int
    steps: list[_Step]
    """The steps that are applied to each host: all except the shared ones, in the order of the criteria."""
    numbers: _NumberChecks
    """The checks of the steps that only compare numbers."""
    shared: SharedReadings[_Step]
    """Steps whose readings, and therefore passes, are the same on all hosts so far. They are not applied to each host."""
    shared_group: tuple[str, str, str] | None = None
    """Gang, rack and NVLink domain of the host that was counted last."""
    alike: _Repeated
    """The passes of the shared steps, and the hosts that have them so far."""
    is_complete: bool
    """Whether everything that the plan expects was measured, and no benchmark reported an error. Figures of pairs of hosts are
    ignored."""
    statuses: Counter[str]
    """Status (empty: missing) -> number of expected observations with this status, except figures of pairs of hosts."""
    measured: tuple[tuple[str, str, str], ...]
    """Stage, name and unit of each measured figure, except figures of pairs of hosts."""
    judged_bandwidths: frozenset[tuple[str, str]]
    """Stage and name of each collective bandwidth that has a limit."""
    figures: FigureStructure
    """For the check `figure_consistency`: what is the same for the figures of all hosts, except figures of pairs of hosts."""
    partner_figures: PartnerStructures = field(default_factory=PartnerStructures)
    """The same for the figures of pairs of hosts."""


@dataclass(kw_only=True)
class _Repeated:
    """Passes that several hosts have in common, because their readings are equal."""

    passes: list[Verdict]
    count: int = 0
    hosts: list[tuple[int, str]] = field(default_factory=list)
    """Position in the plan and name of these hosts, in the order of the plan. Hosts after the first MAX_FARTHEST are left out,
    because the report lists no more."""

    def add(self, position: int, host: str) -> None:
        """Count one more host; `position` is its position in the plan."""
        self.count += 1
        if len(self.hosts) < MAX_FARTHEST:
            bisect.insort(self.hosts, (position, host))
        elif position < self.hosts[-1][0]:
            self.hosts.pop()
            bisect.insort(self.hosts, (position, host))


@dataclass(kw_only=True)
class Remaining:
    """What is left to evaluate on a host after its passes were counted."""

    criteria: list[Criterion]
    verdicts: dict[str, list[Verdict]] = field(default_factory=dict)
    """Verdicts of criteria that are already evaluated, by id."""
    plan_is_met: bool = False
    """Whether everything that the plan expects was measured, and no benchmark reported an error."""
    values: HostValues | None = None
    """The values of the host, if it has a layout."""
    layout: Layout | None = None
    passes: int = 0
    """Number of passes that were counted."""

    def figures(self) -> list[Figures] | None:
        """Return the figures of the host alone, and those of its pairs of hosts if it has any. None for a host without layout."""
        if self.layout is None or self.values is None:
            return None
        partners = self.values.pair_observations
        figures: list[Figures] = [(self.values.observations, self.layout.figures)]
        if partners:
            figures.append((partners, self.layout.partner_figures.of_host(self.values.view, partners)))
        return figures

    @property
    def layout_number(self) -> int:
        """Return the number of the layout; 0 without one."""
        return self.layout.number if self.layout else 0


class PassCounter:
    """Counts the passes of hosts in a tally; hosts are judged with the statistics of the whole fleet."""

    def __init__(self, stats: FleetStats, tally: Tally, positions: Mapping[str, int], evaluate: Evaluate) -> None:
        """`positions` maps hosts to their positions in the plan; `evaluate` returns the verdicts of a criterion on a host."""
        self._stats, self._tally, self._positions, self._evaluate = stats, tally, positions, evaluate
        self._layouts = LayoutCache(self._compile, self._count_layout)
        self._readings: BoundedCache[Any, _Repeated | None] = BoundedCache(MAX_READINGS, self._count_repeated)

    def finish(self) -> None:
        """Count the passes that are not counted yet. Call it after the last host."""
        self._readings.clear()
        self._layouts.clear()

    def count(self, view: HostView) -> Remaining:
        """Count the passes of the host that need no full evaluation, and return what is left to evaluate."""
        criteria = list(view.criteria().values())
        if not is_regular(view):
            return Remaining(criteria=criteria)
        values = HostValues(view)
        layout = self._layouts.of_host(values)
        remaining = Remaining(criteria=[], values=values, layout=layout)
        remaining.plan_is_met = layout.is_complete and values.has_all_pairs()
        name, position = view.host.name, self._positions[view.host.name]
        self._unshare(layout, values)
        layout.alike.add(position, name)
        remaining.passes += len(layout.alike.passes)
        number_passes = layout.numbers.count_passes(values, position)
        remaining.passes += number_passes or 0
        for step in layout.steps:
            if step.compares_numbers and number_passes is not None:
                continue
            if step.checks is not None:
                passed = _all_pass(step.checks, values.values)
                if passed:
                    _count_passes(step.checks, values, position, name)
                    remaining.passes += len(step.checks)
            elif step.partners is not None:
                passes = step.partners.count_passes(values, position)
                remaining.passes += passes or 0
                passed = passes is not None
            else:
                passed = step.names is not None and self._count_readings(values, step, remaining)
            if not passed:
                remaining.criteria.append(step.criterion)
        return remaining

    def _count_readings(self, values: HostValues, step: _Step, remaining: Remaining) -> bool:
        """Count the passes of a criterion on the readings of this host. Return whether all verdicts of the criterion are passes.

        If one is not, count nothing, and keep the verdicts in `remaining`. If an earlier host with equal readings did not pass,
        do not evaluate the criterion here, and keep no verdicts.
        """
        view, criterion = values.view, step.criterion
        names = deciding_readings(view, criterion, step.names or ())
        if step.readings:
            passes = step.readings.count_passes(view, self._positions[view.host.name])
            if passes is not None:
                remaining.passes += passes
                return True
        tokens = values.readings_key(names)
        key = (
            remaining.layout_number,
            criterion.id,
            group_name(view, criterion) if criterion.same_as_fleet else "",
            tokens,
        )
        if tokens is not None and key in self._readings:
            repeated = self._readings[key]
            if repeated is None:
                return False
            repeated.add(self._positions[view.host.name], view.host.name)
            remaining.passes += len(repeated.passes)
            return True
        verdicts = self._evaluate(view, criterion)
        if any(verdict.verdict != PASS for verdict in verdicts):
            remaining.verdicts[criterion.id] = verdicts
            if tokens is not None:
                self._readings[key] = None
            return False
        for verdict in verdicts:
            self._tally.add(verdict)
        if step.readings is None:
            step.readings = reading_check(view, criterion, names, verdicts, list(map(self._tally.row, verdicts)))
        remaining.passes += len(verdicts)
        if tokens is not None:
            self._readings[key] = _Repeated(passes=verdicts)
        return True

    def _count_layout(self, layout: Layout) -> None:
        """Count the passes of a layout that are not counted yet."""
        layout.numbers.finish()
        self._count_repeated(layout.alike)

    def _count_repeated(self, repeated: _Repeated | None) -> None:
        if repeated and repeated.count:
            self._tally.add_repeated(repeated.passes, repeated.hosts, repeated.count)

    def _unshare(self, layout: Layout, values: HostValues) -> None:
        """Stop sharing each step whose readings or `majority` on this host differ from those on the earlier hosts.

        From this host on, such a step is applied to each host separately.
        """
        view = values.view
        changed = layout.shared.remove_changed(values)
        group = (view.host.gang, view.host.rack, view.nvlink_domain)
        if layout.shared_group != group:
            layout.shared_group = group
            changed += layout.shared.remove(
                [step for step in layout.shared.steps if self._majority(view, step) != step.majority]
            )
        if changed:
            alike = layout.alike
            self._count_repeated(replace(alike, passes=[verdict for step in changed for verdict in step.passes]))
            alike.passes = [verdict for step in layout.shared.steps for verdict in step.passes]
            layout.steps = sorted([*layout.steps, *changed], key=lambda step: step.number)

    def _majority(self, view: HostView, step: _Step) -> Hashable:
        return (
            self._stats.groups.majority(view, step.criterion, step.group_keys) if step.criterion.same_as_fleet else None
        )

    def _shared(self, values: HostValues, steps: Iterable[_Step]) -> SharedReadings[_Step]:
        """Return the steps to share: those that judge readings, and have only passes on the first host of the layout."""
        view, names = values.view, {}
        for step in steps:
            if step.names is None or values.readings_key(step.names) is None:
                continue
            if deciding_readings(view, step.criterion, step.names) != step.names:
                continue  # the rate of a counter also depends on the uptime, which differs from host to host
            step.passes = self._evaluate(view, step.criterion)
            if all(verdict.verdict == PASS for verdict in step.passes):
                names[step] = step.names
                if step.criterion.same_as_fleet:
                    step.group_keys = group_keys(view, step.criterion)
                step.majority = self._majority(view, step)
        return SharedReadings(values, names)

    def _compile(self, values: HostValues, number: int) -> Layout:
        """Return the layout of this host, which is the first host of the layout."""
        view, positions = values.view, values.positions()
        incomplete = [
            verdict
            for verdict in (*expectations.missing_observations(view), *expectations.unplanned_errors(view))
            if "partner=" not in verdict.scope
        ]
        all_steps = (self._step(values, criterion, positions) for criterion in view.criteria().values())
        steps = [step for step in all_steps if step]
        for index, step in enumerate(steps):
            step.number = index
        shared = self._shared(values, steps)
        return Layout(
            number=number,
            steps=[step for step in steps if step not in shared.steps],
            numbers=_NumberChecks([check for step in steps if step.compares_numbers for check in step.checks or ()]),
            shared=shared,
            alike=_Repeated(passes=[verdict for step in shared.steps for verdict in step.passes]),
            is_complete=not incomplete,
            statuses=Counter(
                item.status if (item := view.lookup.find(expectation, scope)) else ""
                for expectation in view.expected
                if expectation.scope != "peers"
                for scope in view.plan.scopes_of(view.host, expectation)
            ),
            measured=measured_figures(values.observations),
            judged_bandwidths=frozenset(
                (check.row.stage, check.row.name)
                for step in steps
                for check in step.checks or ()
                if judges_bandwidth(check.row.criterion, check.row.name)
            ),
            figures=figure_structure(view, values.observations),
        )

    def _step(self, values: HostValues, criterion: Criterion, positions: Mapping[int, int]) -> _Step | None:
        """Return how the criterion is applied; None if it has no verdict on hosts of this layout."""
        view, in_full = values.view, _Step(criterion=criterion)
        if criterion.same_as_fleet is False:
            return None
        if not is_applicable(view, criterion):
            return in_full if view.must_match(criterion) else None
        readings = tuple(criterion.matched(view.observations.metrics))
        if readings:
            readings += tuple(name for name in outliers.model_readings(criterion) if name in view.observations.metrics)
            readings += part_readings(view, criterion)
        results = criterion.matched(view.observations.benchmark_names())
        if from_benchmark(criterion.name):
            return in_full if readings else self._benchmark_step(values, criterion, positions)
        if criterion.name.startswith(f"{LAUNCH}."):
            return in_full if readings else _Step(criterion=criterion, names=())
        return in_full if results else _Step(criterion=criterion, names=readings)

    def _benchmark_step(self, values: HostValues, criterion: Criterion, positions: Mapping[int, int]) -> _Step | None:
        """Return how a criterion on benchmark results is applied; None if it has no verdict on hosts of this layout."""
        view, in_full = values.view, _Step(criterion=criterion)
        if criterion.same_as_fleet or criterion.baseline is not None or criterion.delta:
            return in_full
        checks, groups = [], series(view, criterion)
        if groups and are_alike(values, groups):
            return self._partner_step(values, criterion, groups[0][-1])
        for group in groups:
            measured = [item for item in group if item.status == MEASURED]
            if not measured:
                continue
            if any(id(item) not in positions for item in measured):
                return in_full
            limit = self._limit(values, criterion, measured[-1])
            if limit is None:
                if is_unlinked(view, criterion, measured[-1]) or (criterion.vs_fleet and criterion.optional):
                    continue
                return in_full
            checks.append(self._check(values, criterion, measured, limit, positions))
        if not checks:
            of_some_partners = criterion.where and any(
                criterion.matches_name(item.name) for item in values.pair_observations
            )
            return in_full if of_some_partners or view.must_match(criterion) else None
        return _Step(criterion=criterion, checks=checks)

    def _partner_step(self, values: HostValues, criterion: Criterion, item: Observation) -> _Step:
        """Return how a criterion is applied to figures of pairs of hosts. These figures differ only in scope and value."""
        step = _Step(criterion=criterion)
        depends_on_pair = criterion.vs_fleet or criterion.links or criterion.where or criterion.best_of_run
        if item.status != MEASURED or depends_on_pair or is_bandwidth_name(item.name):
            return step
        limit = limit_of(values.view, criterion, item)
        row = self._row(values, criterion, item, limit)
        if type(limit) in (float, int) and _counts_numbers(row, criterion, limit):
            step.partners = PartnerCheck(name=item.name, operator=criterion.operator, limit=limit, row=row)  # type: ignore[arg-type]
        return step

    def _limit(self, values: HostValues, criterion: Criterion, last: Observation) -> Value:
        """Return the limit of a figure; None if there is none, or if it is not the same for all hosts of the layout."""
        if not criterion.vs_fleet:
            return limit_of(values.view, criterion, last)
        peers = self._stats.figures.peers(values.view, last, criterion)
        if not outliers.has_enough_peers(criterion, peers) or (
            criterion.by_position and Scope.parse(last.scope).is_gang
        ):
            return None
        return outliers.limit(criterion, peers)

    def _row(self, values: HostValues, criterion: Criterion, item: Observation, limit: Value) -> TallyRow:
        """Return the tally row of a figure, after adding the limit to it."""
        template = Verdict(
            host=values.view.host.name,
            scope=item.scope,
            name=item.name,
            stage=item.stage,
            params=item.params,
            verdict=PASS,
            criterion=criterion.id,
            limit=limit,
            operator=criterion.operator,
            unit=criterion.unit,
            reason="",
            source=criterion.source,
            basis=criterion.basis,
        )
        row = self._tally.row(template)
        row.add_limit(limit)
        return row

    def _check(
        self,
        values: HostValues,
        criterion: Criterion,
        measured: Sequence[Observation],
        limit: Value,
        positions: Mapping[int, int],
    ) -> _Check:
        """Return the check of one figure; `measured` are its repeated observations, the newest last."""
        last = measured[-1]
        row = self._row(values, criterion, last, limit)
        value_positions = tuple(positions[id(item)] for item in measured)
        return _Check(
            positions=value_positions,
            chosen=value_positions[0] if criterion.best_of_run else value_positions[-1],
            scope=values.layout_scope(last.scope),
            limit=limit,
            operator=criterion.operator,
            row=row,
            is_number=_counts_numbers(row, criterion, limit),
        )


def _counts_numbers(row: TallyRow, criterion: Criterion, limit: Value) -> bool:
    """Return whether `TallyRow.add_pass` can count the passes.

    The limit must be a number, and the operator must be that of the row, but not `eq`.
    """
    return is_number(limit) and criterion.operator != "eq" and row.operator == criterion.operator


def measured_figures(observations: Iterable[Observation]) -> tuple[tuple[str, str, str], ...]:
    """Return stage, name and unit of each measured figure, without the drift that the judge computes from several figures."""
    measured = (item for item in observations if item.status == MEASURED and not is_drift(item.name))
    return tuple(dict.fromkeys((item.stage, item.name, item.unit) for item in measured))


def _all_pass(checks: Sequence[_Check], values: Sequence[Value]) -> bool:
    """Return whether all values at the positions of the checks meet the limits of the checks."""
    for check in checks:
        limit, operator = check.limit, check.operator
        for position in check.positions:
            value = values[position]
            if type(value) is float and check.is_number:
                if not COMPARE[operator](value, limit):  # type: ignore[arg-type]
                    return False
            elif not holds(operator, value, limit):
                return False
    return True


def _count_passes(checks: Sequence[_Check], values: HostValues, position: int, host: str) -> None:
    """Count one pass on a host for each check. Call it only if `_all_pass` is true."""
    for check in checks:
        value = values.values[check.chosen]
        scope = values.gang_scope if check.scope == GANG_SCOPE else check.scope
        if check.is_number:
            check.row.add_pass(value, position, host, scope)  # type: ignore[arg-type]
        else:
            check.row.add(PASS, value, check.limit, position, host, scope, "")
