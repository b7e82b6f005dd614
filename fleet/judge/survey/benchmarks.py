"""A first look at what a host's benchmarks observed: who made the same observations is judged by the same comparisons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleet.judge import expectations, outliers
from fleet.judge.bounded_cache import Bounded
from fleet.judge.criteria import Criterion
from fleet.judge.digests import NAME as DIGEST_NAME
from fleet.judge.evaluate import holds, limit_of, series
from fleet.judge.evidence import Evidence, HostView, from_benchmark
from fleet.judge.fleet_stats import Known
from fleet.judge.stragglers import ranks_of
from fleet.judge.survey.found import MOST_KEPT, Check, Key, Looked, Program, own_scope, template_of
from fleet.judge.tally import Tally
from fleet.judge.uniformity import group_key, same_series
from schemas.records import ERROR, MEASURED, Observation, Value
from schemas.reports import Verdict


class Benchmarks:
    """Reads the observations of one host after the other."""

    def __init__(self, known: Known, tally: Tally) -> None:
        self._known, self._tally = known, tally
        self._programs: Bounded[Key, Program] = Bounded(MOST_KEPT // 100)

    def forget(self) -> None:
        """Lets go of what only helps to read more hosts."""
        self._programs.clear()

    def read(self, view: HostView, kind: int, found: Looked) -> bool:
        """Whether nothing in them speaks against the host; what is for the fleet to decide is left in `found`."""
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

    def _compiled(self, view: HostView, made: Sequence[Observation]) -> Program:
        program = Program()
        if any(
            verdict.name.split(".")[0] != "pairs"
            for verdict in (*expectations.planned(view), *expectations.reported(view))
        ):
            program.plain = False
            return program
        places = {id(seen): place for place, seen in enumerate(made)}
        program.kinds = kinds_of(view.evidence)
        program.figures = [
            (key, scope, places[id(seen)])
            for name in outliers.compared(view)
            for (key, scope), seen in self._known.fleet.latest(view, name).items()
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

    def _compile(self, view: HostView, criterion: Criterion, places: Mapping[int, int], program: Program) -> None:
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
                program.same.append((criterion, found, template_of(view, criterion, measured[-1])))
            elif criterion.vs_fleet:
                key = self._known.fleet.key(view, measured[-1])
                program.claims.append((criterion, key, found, template_of(view, criterion, measured[-1])))
            else:
                chosen = found[0] if criterion.best_of_run else found[-1]
                template = replace(template_of(view, criterion, measured[-1]), limit=limit_of(view, criterion))
                program.checks.append(self._check(criterion, found, chosen, template))

    def _check(self, criterion: Criterion, places: tuple[int, ...], chosen: int, template: Verdict) -> Check:
        row = self._tally.row(template)
        row.note(template.limit)
        fast = row.operator != "eq" and not isinstance(template.limit, bool)
        row.upward = row.operator in ("ge", "gt")
        return Check(
            criterion=criterion,
            limit=template.limit,
            places=places,
            chosen=chosen,
            template=template,
            row=row,
            fast=fast,
        )

    def _run(self, program: Program, view: HostView, values: Sequence[Value], found: Looked) -> bool:
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
            found.claims.append((criterion, key, value, own_scope(view, template), template))
        for criterion, places, template in program.same:
            value = values[places[-1]]
            if any((type(values[place]), values[place]) != (type(value), value) for place in places):
                return False
            scope = own_scope(view, template)
            own = template if scope == template.scope else replace(template, scope=scope)
            key, what = group_key(view, criterion, own)
            found.same.append((criterion.id, key, value, scope, own))
            found.alike.append((criterion.id, key, what, value))
        return True


def kinds_of(left: Evidence) -> tuple[Observation, ...]:
    """One observation of each name, stage, status and unit that benchmarks made, digests apart."""
    found = {
        (seen.name, seen.stage, seen.status, seen.unit): seen for seen in left.benchmarks() if seen.name != DIGEST_NAME
    }
    return tuple(found.values())
