"""A first look at every host of a large fleet: of which of them nothing needs to be told but that all of it passes?

The rules are those of the judge, and it is the judge's own functions that are asked. What makes it fast is that hosts of a
fleet are alike: what thousands of them say in the same words is judged once (`Reader` gives equal metrics as one object), and
which observation is held against which limit is found out once for hosts that made the same observations; then only the
numbers are compared. What needs the whole fleet, medians and majorities, is put aside as claims and settled at the end.

Nothing is decided here against a host: whoever does not plainly pass is flagged, and judged in full.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.judge import expected, outliers
from fleet.judge.baseline import judge_presence
from fleet.judge.bounded import Bounded
from fleet.judge.criteria import Criterion
from fleet.judge.digests import CRITERION as DIGEST
from fleet.judge.digests import NAME as DIGEST_NAME
from fleet.judge.digests import Told, agrees, digest_verdict, told_digests
from fleet.judge.drift import soaked
from fleet.judge.evidence import LAUNCH, Evidence, HostView, Planned, from_benchmark
from fleet.judge.held import held, holds, limit_of, series, unobserved
from fleet.judge.known import Known
from fleet.judge.localise.faults import CRITERION as LOCALISE
from fleet.judge.outliers import Fleet
from fleet.judge.paths import Path, is_bandwidth, path_of
from fleet.judge.stragglers import ranks_of
from fleet.judge.tally import MOST_FAR, Row, Tally
from fleet.judge.uniform import group_key, kin, same_series
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value
from schemas.reports import PASS, Verdict

MOST_KEPT = 50_000
"""Outcomes that are remembered; then it begins anew."""

Key = tuple[Any, ...]


@dataclass(kw_only=True)
class Claim:
    """Figures, one a part, of which the fleet says whether they pass: all of one criterion, settings and group."""

    criterion: Criterion
    template: Verdict
    key: Any
    values: array[float] = field(default_factory=lambda: array("d"))
    hosts: array[int] = field(default_factory=lambda: array("L"))
    """Where the host stands in the plan."""
    scopes: array[int] = field(default_factory=lambda: array("L"))
    names: list[str] = field(default_factory=list)
    """Of the scopes."""

    places: dict[str, int] = field(default_factory=dict)
    ways: dict[Path, array[int]] = field(default_factory=dict)
    """Which parts talked that way, where it is about a collective."""

    def add(self, value: float, host: int, scope: str, way: Path | None = None) -> None:
        """One more part."""
        if way is not None:
            self.ways.setdefault(way, array("L")).append(len(self.values))
        at = self.places.get(scope)
        if at is None:
            at = self.places[scope] = len(self.names)
            self.names.append(scope)
        self.values.append(value)
        self.hosts.append(host)
        self.scopes.append(at)

    def update(self, other: Claim) -> None:
        """The parts of other hosts."""
        for way, parts in other.ways.items():
            self.ways.setdefault(way, array("L")).extend(part + len(self.values) for part in parts)
        for value, host, scope in zip(other.values, other.hosts, other.scopes, strict=True):
            self.add(value, host, other.names[scope])

    def parts(self) -> Iterator[tuple[Value, int, str]]:
        """Value, place of the host, and scope of each."""
        whole = isinstance(self.template.value, int)
        for value, host, scope in zip(self.values, self.hosts, self.scopes, strict=True):
            yield int(value) if whole and value.is_integer() else value, host, self.names[scope]


@dataclass(kw_only=True)
class Same:
    """Parts that show one value, of which the fleet says whether it is the usual one."""

    criterion: str
    value: Value
    template: Verdict
    key: Any
    parts: list[tuple[int, str]] = field(default_factory=list)
    """Place of the host, and scope."""


@dataclass(kw_only=True, slots=True)
class _Check:
    """One series of a benchmark's observations against a limit."""

    criterion: Criterion
    limit: Value
    places: tuple[int, ...]
    chosen: int
    template: Verdict
    row: Row
    fast: bool
    """Whether the row takes numbers that pass as they are."""


@dataclass(kw_only=True)
class _Program:
    """What is done with the observations of hosts that made the same ones."""

    plain: bool = True
    checks: list[_Check] = field(default_factory=list)
    claims: list[tuple[Criterion, Any, tuple[int, ...], Verdict]] = field(default_factory=list)
    same: list[tuple[Criterion, tuple[int, ...], Verdict]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    """Of what the plan expects, but for what hosts exchange with each other; empty for what is missing."""
    figures: list[tuple[Any, str, int]] = field(default_factory=list)
    """What the fleet is measured by: its key, scope, and which observation."""
    ranks: list[tuple[tuple[str, str], str, int]] = field(default_factory=list)
    kinds: tuple[Observation, ...] = ()
    """One observation of each name, stage and status, digests apart."""


@dataclass(kw_only=True)
class Looked:
    """What one host brought, as long as it is not known whether its gang is in order."""

    view: HostView
    program: _Program = field(default_factory=_Program)
    partners: int = 0
    """Observations that it made with other hosts, as the plan wants them."""
    passed: list[tuple[Verdict, Value]] = field(default_factory=list)
    checked: list[tuple[_Check, Value]] = field(default_factory=list)
    values: Sequence[Value] = ()
    """Of what its benchmarks observed, as the program numbers them."""
    figures: list[tuple[Any, str, float]] = field(default_factory=list)
    ranks: list[tuple[tuple[str, str], str, Value]] = field(default_factory=list)
    outcomes: list[list[Verdict]] = field(default_factory=list)
    claims: list[tuple[Criterion, Any, float, str, Verdict]] = field(default_factory=list)
    same: list[tuple[str, Any, Value, str, Verdict]] = field(default_factory=list)
    silent: list[Key] = field(default_factory=list)
    alike: list[tuple[str, Any, str, Value]] = field(default_factory=list)
    """Criterion, group, what a part of it is called, and value."""


@dataclass(kw_only=True)
class _Many:
    """Hosts that had the same outcome by one criterion, which is kept so that no other has its id."""

    outcome: list[Verdict]
    count: int = 0
    hosts: list[tuple[int, str]] = field(default_factory=list)
    """The first of them."""


class Survey:
    """Hosts as they are looked at; several, each of other hosts, can be put together in any order."""

    def __init__(self, planned: Planned, places: Mapping[str, int]) -> None:
        self.planned, self.places = planned, places
        self.known = Known(planned)
        self.tally = Tally(planned, places)
        self.flagged: set[str] = set()
        """Hosts that must be judged in full."""
        self.uneasy: set[str] = set()
        """Hosts of a gang of which something is to be told, by its pairs or by one of them: the gang is judged again."""
        self.claims: dict[Key, Claim] = {}
        self.same: dict[Key, Same] = {}
        self.silent: dict[Key, list[int]] = {}
        self.taken: set[str] = set()
        """Hosts of which `tally` has whatever passes without the fleet."""
        self.later: list[Verdict] = []
        """Passes that hold if nothing is found of the host or its gang by what is settled at the end."""
        self._kinds: dict[Key, int] = {}
        self._outcomes: Bounded[Key, list[Verdict] | None] = Bounded(MOST_KEPT)
        self._programs: Bounded[Key, _Program] = Bounded(MOST_KEPT // 100)
        self._named: dict[Key, Mapping[str, list[str]]] = {}
        self._nobody = Fleet(planned)
        self._many: dict[int, _Many] = {}
        self._compared: Bounded[Key, list[tuple[Any, str, float]]] = Bounded(MOST_KEPT)

    # What one host says

    def look(self, view: HostView) -> Looked | None:
        """What the host brings, where nothing speaks against it so far; None where it must be judged in full."""
        told = told_digests(view, self.planned)
        self.known.twins.add(view.host.name, view.evidence)
        if view.has_record:
            self.known.digests.count(told)
        found = self._looked(view, told)
        if found is None:
            self.known.compare(view)
        else:
            self._feed(view, found)
        return found

    def _looked(self, view: HostView, digests: Sequence[tuple[Key, Told]]) -> Looked | None:
        if not self._plain(view):
            return None
        first = (expected.model(view), expected.constancy(view), soaked(view), judge_presence(view))
        found = Looked(view=view)
        for verdicts in first:
            for verdict in verdicts:
                if verdict.verdict != PASS:
                    return None
                found.passed.append((verdict, verdict.value))
        for key, told in digests:
            verdict = digest_verdict(told, PASS, "", limit=told.digest)
            found.same.append((DIGEST, key, told.digest, told.seen.scope, verdict))
        kind = self._kind(view)
        well = self._collectors(view) and self._benchmarks(view, kind, found) and self._snapshots(view, kind, found)
        return found if well and self._figures(view, kind, found) else None

    def _figures(self, view: HostView, kind: int, found: Looked) -> bool:
        """What the fleet is measured by: of the benchmarks by the program, of snapshots once for those that say the same."""
        values = found.values
        for key, scope, place in found.program.figures:
            value = values[place]
            if not isinstance(value, float | int) or not math.isfinite(value):
                return False
            found.figures.append((key, f"gang={view.host.gang}" if scope.startswith("gang=") else scope, float(value)))
        for name in self._compared_names(view):
            tokens = tuple(vars(metric).get("token", 0) for _, metric in view.observations.metrics[name])
            if 0 in tokens or (kind, name, tokens) not in self._compared:
                self._compared[(kind, name, tokens)] = list(self.known.fleet.figures(view, name))
            found.figures += self._compared[(kind, name, tokens)]
        ranks = [(of, figure, values[place]) for of, figure, place in found.program.ranks]
        if not all(isinstance(value, float | int) for _, _, value in ranks):
            return False
        found.ranks = ranks
        return True

    def _compared_names(self, view: HostView) -> Sequence[str]:
        """Of the snapshots, what some criterion compares with the fleet."""
        key = ("compared", tuple(view.observations.metrics), *map(id, view.packs))
        if key not in self._named:
            wanted = [item for item in view.criteria().values() if item.vs_fleet]
            names = [name for name in view.observations.metrics if any(item.speaks_of(name) for item in wanted)]
            self._named[key] = {"": names}
        return self._named[key][""]

    def _feed(self, view: HostView, found: Looked) -> None:
        for key, scope, number in found.figures:
            self.known.fleet.feed(key, scope, number)
        for criterion, key, what, value in found.alike:
            self.known.groups.feed(key, what, value, (criterion, *kin(view)))
        for of, figure, value in found.ranks:
            self.known.ranks.feed(of, figure, float(value or 0))

    def _plain(self, view: HostView) -> bool:
        """Whether it is of the kind that can be judged by what others say: no soak, no accepted record to compare with."""
        if not view.has_record or view.evidence.problem or view.unseen() or view.plan.baseline is not None:
            return False
        # Who speaks of a benchmark in a snapshot, or of the host's health in a benchmark, is none of ours.
        mixed = any(map(_of_ranks, view.observations.metrics))
        mixed = mixed or any(not from_benchmark(name) for record in view.evidence.records
                             for name in {seen.name for seen in record.observations})  # fmt: skip
        return not mixed and not any(record.soak for record in view.evidence.records)

    def _kind(self, view: HostView) -> int:
        """Hosts of one kind are judged alike where they say the same."""
        taken = tuple((shot.stage, shot.phase) for shot in view.evidence.snapshots())
        places = tuple(view.evidence.places().items())
        key: Key = (
            taken,
            view.host.scopes,
            view.host.device,
            view.host.fabric_gbps,
            view.host.gpu_model,
            bool(view.host.gang),
        )
        key = (*key, places, tuple(view.names.items()), *map(id, view.packs))
        return self._kinds.setdefault(key, len(self._kinds))

    def _collectors(self, view: HostView) -> bool:
        """Whether every collector worked in every snapshot."""
        return not any(
            metric.absent
            for name, told in view.observations.metrics.items()
            if name.startswith("collector.")
            for _, metric in told
        )

    # Snapshots: what is said in the same words is judged once

    def _snapshots(self, view: HostView, kind: int, found: Looked) -> bool:
        metrics = view.observations.metrics
        versions = tuple(view.evidence.software().items())
        for criterion, names in self._criteria(view):
            if criterion.name.startswith(f"{LAUNCH}."):
                tokens: list[Any] = [versions]
            else:
                tokens = [vars(metric).get("token", 0) for name in names for _, metric in metrics[name]]
            key = (kind, criterion.id, *tokens)
            if key not in self._outcomes:
                outcome = self._outcome(view, criterion)
                if 0 not in tokens:
                    self._outcomes[key] = outcome
            else:
                outcome = self._outcomes[key]
            if outcome is None or not self._taken(view, criterion, outcome, found):
                return False
        return True

    def _criteria(self, view: HostView) -> Iterable[tuple[Criterion, Sequence[str]]]:
        """The criteria on snapshots and versions, each with the names of the snapshots that it speaks of."""
        key = (tuple(view.observations.metrics), *map(id, view.packs))
        if key not in self._named:
            self._named[key] = {
                item.id: [name for name in view.observations.metrics if item.speaks_of(name)]
                for item in view.criteria().values()
                if not from_benchmark(item.name)
            }
        named, criteria = self._named[key], view.criteria()
        return [(criteria[name], names) for name, names in named.items()]

    def _outcome(self, view: HostView, criterion: Criterion) -> list[Verdict] | None:
        """The verdicts by one criterion where all pass, or would if the fleet shows the same; else None."""
        if criterion.same_as_fleet is False:
            return []
        if criterion.same_as_fleet:
            return self._likely_same(view, criterion)
        if criterion.vs_fleet:
            return self._likely_claims(view, criterion)
        verdicts = list(held(view, criterion, self._nobody))
        if (not verdicts and view.must_speak(criterion)) or any(verdict.verdict != PASS for verdict in verdicts):
            return None
        return verdicts

    def _likely_claims(self, view: HostView, criterion: Criterion) -> list[Verdict] | None:
        found = []
        if criterion.delta or criterion.baseline:
            return None
        groups = series(view, criterion)
        if [*unobserved(view, criterion, groups)]:
            return None
        for group in groups:
            if any(seen.status != MEASURED for seen in group):
                if criterion.optional and all(seen.status == UNSUPPORTED for seen in group):
                    continue
                return None
            if len({(type(seen.value), seen.value) for seen in group}) > 1:
                return None
            found.append(_template(view, criterion, group[-1]))
        if not found and view.must_speak(criterion):
            return None
        return found

    def _likely_same(self, view: HostView, criterion: Criterion) -> list[Verdict] | None:
        found = []
        for group in same_series(view, criterion):
            measured = [seen for seen in group if seen.status == MEASURED]
            if not measured:
                if criterion.optional and group[-1].status == UNSUPPORTED:
                    continue
                return None
            if group[-1].status == ERROR or len({(type(seen.value), seen.value) for seen in measured}) > 1:
                return None
            found.append(_template(view, criterion, measured[-1]))
        if not found and view.must_speak(criterion):
            return None
        return found

    def _taken(self, view: HostView, criterion: Criterion, outcome: list[Verdict], found: Looked) -> bool:
        """Takes an outcome for this host."""
        if criterion.same_as_fleet:
            for verdict in outcome:
                key, what = group_key(view, criterion, verdict)
                found.same.append((criterion.id, key, verdict.value, verdict.scope, verdict))
                found.alike.append((criterion.id, key, what, verdict.value))
            if not outcome and not criterion.optional and not same_series(view, criterion):
                found.silent.append((criterion.id, *kin(view)))
        elif criterion.vs_fleet:
            for verdict in outcome:
                value = verdict.value
                if not isinstance(value, float | int) or not math.isfinite(value):
                    return False
                its_key = self.known.fleet.key(view, verdict)
                found.claims.append((criterion, its_key, value, verdict.scope, verdict))
        else:
            found.outcomes.append(outcome)
        return True

    # Benchmarks: who made the same observations is judged by the same comparisons

    def _benchmarks(self, view: HostView, kind: int, found: Looked) -> bool:
        made = view.evidence.benchmarks()
        own = {f"gang={view.host.gang}": "gang="} if view.host.gang else {}
        shape = tuple(
            [
                (
                    seen.name,
                    own.get(seen.scope, seen.scope),
                    seen.stage,
                    seen.status,
                    isinstance(seen.value, str),
                    *seen.params.items(),
                )
                for seen in made
                if "partner=" not in seen.scope
            ]
        )
        launches = view.evidence.launches()
        if any(launch.outcome != "finished" or launch.reason for launch in launches):
            return False
        gang = set(view.plan.gangs().get(view.host.gang, ()))
        if any(launch.stage == "gang" and set(launch.members) != gang for launch in launches):
            return False
        stages = tuple(launch.stage for launch in launches)
        key = (kind, shape, stages, len(view.evidence.records))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compiled(
                view, [seen for seen in made if "partner=" not in seen.scope]
            )
        partners = self._partners(view, made)
        if not program.plain or partners is None:
            return False
        found.program, found.partners = program, partners
        found.values = [seen.value for seen in made if "partner=" not in seen.scope]
        return self._run(program, view, found.values, found)

    def _partners(self, view: HostView, made: Sequence[Observation]) -> int | None:
        """How much was measured with partners; None where anything of it is missing."""
        met = [seen for seen in made if "partner=" in seen.scope]
        there = {(seen.name, seen.stage, seen.scope) for seen in met if seen.status == MEASURED}
        wanted = [
            (item.name, item.stage, scope)
            for item in view.expected
            if item.scope == "peers"
            for scope in view.plan.scopes_of(view.host, item)
        ]
        return None if any(seen.status == ERROR for seen in met) or not there.issuperset(wanted) else len(wanted)

    def _compiled(self, view: HostView, made: Sequence[Observation]) -> _Program:
        program = _Program()
        if any(
            verdict.name.split(".")[0] != "pairs" for verdict in (*expected.planned(view), *expected.reported(view))
        ):
            program.plain = False
            return program
        places = {id(seen): place for place, seen in enumerate(made)}
        program.kinds = kinds_of(view.evidence)
        program.figures = [
            (key, scope, places[id(seen)])
            for name in outliers.compared(view)
            for (key, scope), seen in self.known.fleet.latest(view, name).items()
            if id(seen) in places
        ]
        program.ranks = [(of, figure, places[id(seen)]) for of, figure, seen in ranks_of(view) if id(seen) in places]
        program.statuses = Counter(
            found.status if (found := view.index.find(item, scope)) else ""
            for item in view.expected
            if item.scope != "peers"
            for scope in view.plan.scopes_of(view.host, item)
        )
        for criterion in view.criteria().values():
            if not from_benchmark(criterion.name) or not program.plain:
                continue
            before = len(program.checks) + len(program.claims) + len(program.same)
            self._compile(view, criterion, places, program)
            silent = len(program.checks) + len(program.claims) + len(program.same) == before
            if silent and criterion.same_as_fleet is not False and view.must_speak(criterion):
                program.plain = False
        return program

    def _compile(self, view: HostView, criterion: Criterion, places: Mapping[int, int], program: _Program) -> None:
        if criterion.variable == "fabric_bytes_per_second" and not view.host.fabric_gbps:
            return
        if criterion.baseline is not None or criterion.delta:
            program.plain = view.plan.baseline is None and not criterion.delta
            return
        if criterion.same_as_fleet is False:
            return
        for group in same_series(view, criterion) if criterion.same_as_fleet else series(view, criterion):
            if any(id(seen) not in places for seen in group):
                program.plain = False  # a criterion on what hosts exchange with each other, or on both kinds
                return
            measured = [seen for seen in group if seen.status == MEASURED]
            if not measured and not criterion.same_as_fleet:
                continue
            if not measured or (criterion.same_as_fleet and len(measured) < len(group)):
                program.plain = False
                return
            found = tuple(places[id(seen)] for seen in measured)
            if criterion.same_as_fleet:
                program.same.append((criterion, found, _template(view, criterion, measured[-1])))
            elif criterion.vs_fleet:
                key = self.known.fleet.key(view, measured[-1])
                program.claims.append((criterion, key, found, _template(view, criterion, measured[-1])))
            else:
                chosen = found[0] if criterion.best_of_run else found[-1]
                template = replace(_template(view, criterion, measured[-1]), limit=limit_of(view, criterion))
                program.checks.append(self._check(criterion, found, chosen, template))

    def _check(self, criterion: Criterion, places: tuple[int, ...], chosen: int, template: Verdict) -> _Check:
        row = self.tally.row(template)
        row.note(template.limit)
        fast = row.operator != "eq" and not isinstance(template.limit, bool)
        row.upward = row.operator in ("ge", "gt")
        return _Check(
            criterion=criterion,
            limit=template.limit,
            places=places,
            chosen=chosen,
            template=template,
            row=row,
            fast=fast,
        )

    def _run(self, program: _Program, view: HostView, values: Sequence[Value], found: Looked) -> bool:
        for check in program.checks:
            how, limit = check.criterion.operator, check.limit
            for place in check.places:
                if not holds(how, values[place], limit):
                    return False
            found.checked.append((check, values[check.chosen]))
        for criterion, key, places, template in program.claims:
            value = values[places[-1]]
            if not isinstance(value, float | int) or not math.isfinite(value):
                return False
            if any(values[place] != value for place in places):
                return False
            found.claims.append((criterion, key, value, _own_scope(view, template), template))
        for criterion, places, template in program.same:
            value = values[places[-1]]
            if any((type(values[place]), values[place]) != (type(value), value) for place in places):
                return False
            scope = _own_scope(view, template)
            own = template if scope == template.scope else replace(template, scope=scope)
            key, what = group_key(view, criterion, own)
            found.same.append((criterion.id, key, value, scope, own))
            found.alike.append((criterion.id, key, what, value))
        return True

    # Whole gangs

    def take(self, looked: Iterable[Looked], more: Iterable[Verdict]) -> None:
        """Takes hosts of which nothing is to be told but passes, so far; `more` is what their gang makes of them."""
        for one in looked:
            place, name = self.places[one.view.host.name], one.view.host.name
            self.taken.add(name)
            for template, value in one.passed:
                row = self.tally.row(template)
                row.add(PASS, value, template.limit, place, name, template.scope, "")
            for check, value in one.checked:
                if check.fast:
                    check.row.put(value, place, name, _own_scope(one.view, check.template))  # type: ignore[arg-type]
                else:
                    check.row.add(PASS, value, check.limit, place, name, _own_scope(one.view, check.template), "")
                if is_bandwidth(check.template):
                    self.known.normal.add(path_of(one.view, replace(check.template, host=name)))
            for outcome in one.outcomes:
                many = self._many.get(id(outcome))
                if many is None:
                    many = self._many[id(outcome)] = _Many(outcome=outcome)
                many.count += 1
                if len(many.hosts) < MOST_FAR:
                    many.hosts.append((place, name))
            for criterion, key, number, scope, template in one.claims:
                full: Key = (criterion.id, key)
                claim = self.claims.get(full)
                if claim is None:
                    claim = self.claims[full] = Claim(criterion=criterion, template=template, key=key)
                way = path_of(one.view, replace(template, host=name)) if is_bandwidth(template) else None
                claim.add(number, place, scope, way)
            for criterion_id, key, value, scope, template in one.same:
                full = (criterion_id, key, type(value).__name__, value)
                if full not in self.same:
                    self.same[full] = Same(criterion=criterion_id, value=value, template=template, key=key)
                self.same[full].parts.append((place, scope))
            for key in one.silent:
                self.silent.setdefault(key, []).append(place)
        self.later += more

    # The whole fleet

    def settle(self, hosts: Sequence[str]) -> None:
        """Flags whoever the fleet speaks against; `hosts` as they stand in the plan."""
        for claim in self.claims.values():
            self._settle_claim(claim, hosts)
        for same in self.same.values():
            if not self._usual(same):
                self.flagged |= {hosts[place] for place, _ in same.parts}
        for key, places in self.silent.items():
            if self.known.groups.told(key):
                self.flagged |= {hosts[place] for place in places}
        self.flagged |= self.known.twins.hosts()

    def _settle_claim(self, claim: Claim, hosts: Sequence[str]) -> None:
        limits: dict[str, Value] = {}
        passed = bytearray()
        for value, place, scope in claim.parts():
            if scope not in limits:
                limits[scope] = self._limit(claim, scope)
            limit = limits[scope]
            passed.append(limit not in (None, "") and holds(claim.criterion.operator, value, limit))
            if limit != "" and not passed[-1]:
                self.flagged.add(hosts[place])
        self.known.normal |= {way for way, parts in claim.ways.items() if any(passed[part] for part in parts)}

    def _limit(self, claim: Claim, scope: str) -> Value:
        """What the fleet makes the limit; None where it is too small to tell; empty where nothing is then to be told."""
        crowd = self.known.fleet.at(claim.key, scope, claim.criterion)
        if not outliers.enough(claim.criterion, crowd):
            return "" if claim.criterion.optional else None
        return outliers.limit(claim.criterion, crowd)

    def _usual(self, same: Same) -> bool:
        """Whether the value is the usual one, or nobody else shows any."""
        if same.criterion == DIGEST:
            return agrees(same.value, self.known.digests.of(same.key))
        group = self.known.groups.at(same.key)
        told = group.told()
        if len(told) == 1:
            return True
        return told[0][1] > told[1][1] and (type(told[0][0]), told[0][0]) == (type(same.value), same.value)

    def commit(self, hosts: Sequence[str], units: Mapping[str, Iterable[str]]) -> None:
        """Counts what was put aside, but for those who are flagged; a host of `units` draws its own with it.

        After this `uneasy` is complete.
        """
        for host in self.flagged:
            self.uneasy |= {host, *units.get(host, ())}
        for claim in self.claims.values():
            limits = {scope: self._limit(claim, scope) for scope in claim.names}
            if all(limit in (None, "") for limit in limits.values()):
                continue  # a row of which nothing is counted is none
            row = self.tally.row(claim.template)
            for value, place, scope in claim.parts():
                if hosts[place] not in self.flagged and limits[scope] not in (None, ""):
                    row.add(PASS, value, limits[scope], place, hosts[place], scope, "")
        for same in self.same.values():
            well = [(place, scope) for place, scope in same.parts if hosts[place] not in self.flagged]
            if well and not self._alone(same):
                row = self.tally.row(same.template)
                for place, scope in well:
                    row.add(PASS, same.value, same.value, place, hosts[place], scope, "")
        for verdict in self.later:
            if verdict.host not in self.uneasy:
                self.tally.add(verdict)

    def _alone(self, same: Same) -> bool:
        """Whether there is nobody to compare with, and so no verdict."""
        if same.criterion == DIGEST:
            return self.known.digests.of(same.key).total() <= 1
        return self.known.groups.at(same.key).total <= 1

    def counted(self, verdict: Verdict, criteria: Mapping[str, Criterion]) -> bool:
        """Whether a verdict of the full judgement was counted at first look."""
        if verdict.verdict != PASS or verdict.host not in self.taken or verdict.criterion == LOCALISE:
            return False
        if verdict.host not in self.flagged:
            return True
        if verdict.criterion == DIGEST:
            return False
        item = criteria.get(verdict.criterion)
        return item is None or not (item.vs_fleet or item.same_as_fleet)

    def _pour(self) -> None:
        """Into the rows what many hosts had in common."""
        for many in self._many.values():
            for verdict in many.outcome:
                row = self.tally.row(verdict)
                row.many(verdict.value, verdict.limit, many.hosts, many.count, verdict.scope)
        self._many = {}

    def forget(self) -> None:
        """Lets go of what only helps to look at more hosts."""
        self._pour()
        for kept in (self._kinds, self._outcomes, self._programs, self._named, self._compared):
            kept.clear()
        for row in self.tally.rows.values():
            row.settle()

    def lonely(self, hosts: Sequence[str]) -> dict[str, list[Verdict]]:
        """Hosts with digests that are compared with no other, which are told by their verdicts' names and scopes."""
        found: dict[str, list[Verdict]] = {}
        for same in self.same.values():
            if same.criterion == DIGEST and self._alone(same):
                for place, scope in same.parts:
                    found.setdefault(hosts[place], []).append(replace(same.template, host=hosts[place], scope=scope))
        return found

    def unlimited(self) -> set[tuple[str, str]]:
        """Stage and name of figures for which the fleet is too small to have a limit."""
        return {
            (claim.template.stage, claim.template.name)
            for claim in self.claims.values()
            if any(self._limit(claim, scope) in (None, "") for scope in claim.names)
        }

    def update(self, other: Survey) -> None:
        """Takes what another has looked at."""
        self.known.update(other.known)
        self.tally.update(other.tally)
        self.flagged |= other.flagged
        self.uneasy |= other.uneasy
        self.taken |= other.taken
        for key, claim in other.claims.items():
            if key in self.claims:
                self.claims[key].update(claim)
            else:
                self.claims[key] = claim
        for key, same in other.same.items():
            if key in self.same:
                self.same[key].parts += same.parts
            else:
                self.same[key] = same
        for key, hosts in other.silent.items():
            self.silent.setdefault(key, []).extend(hosts)
        self.later += other.later


def kinds_of(left: Evidence) -> tuple[Observation, ...]:
    """One observation of each name, stage, status and unit that benchmarks made, digests apart."""
    found = {
        (seen.name, seen.stage, seen.status, seen.unit): seen for seen in left.benchmarks() if seen.name != DIGEST_NAME
    }
    return tuple(found.values())


def _own_scope(view: HostView, template: Verdict) -> str:
    """The scope of the verdict on this host: its own gang's."""
    return f"gang={view.host.gang}" if template.scope.startswith("gang=") else template.scope


def _of_ranks(name: str) -> bool:
    return from_benchmark(name) or name.startswith(f"{LAUNCH}.")


def _template(view: HostView, criterion: Criterion, seen: Observation) -> Verdict:
    """A pass of that criterion, for whichever host."""
    return Verdict(
        host=view.host.name,
        scope=seen.scope,
        name=seen.name,
        stage=seen.stage,
        params=seen.params,
        verdict=PASS,
        criterion=criterion.id,
        value=seen.value,
        operator=criterion.operator if not criterion.same_as_fleet else "eq",
        unit=criterion.unit,
        reason="",
        source=criterion.source,
        basis=criterion.basis,
    )
