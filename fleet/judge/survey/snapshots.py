"""A first look at a host's snapshots: what is said in the same words is judged once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.judge.bounded_cache import Bounded
from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import held, series, unobserved
from fleet.judge.evidence import LAUNCH, HostView, Planned, from_benchmark
from fleet.judge.fleet_stats import Known
from fleet.judge.outliers import Fleet
from fleet.judge.survey.found import MOST_KEPT, Key, Looked, template_of
from fleet.judge.uniformity import group_key, kin, same_series
from schemas.records import ERROR, MEASURED, UNSUPPORTED
from schemas.reports import PASS, Verdict


class Snapshots:
    """Reads the snapshots of one host after the other."""

    def __init__(self, planned: Planned, known: Known) -> None:
        self._known = known
        self._nobody = Fleet(planned)
        self._outcomes: Bounded[Key, list[Verdict] | None] = Bounded(MOST_KEPT)
        self._named: dict[Key, Mapping[str, list[str]]] = {}
        self._compared: Bounded[Key, list[tuple[Any, str, float]]] = Bounded(MOST_KEPT)

    def forget(self) -> None:
        """Lets go of what only helps to read more hosts."""
        for kept in (self._outcomes, self._named, self._compared):
            kept.clear()

    def read(self, view: HostView, kind: int, found: Looked) -> bool:
        """Whether nothing in them speaks against the host; what is for the fleet to decide is left in `found`."""
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

    def figures(self, view: HostView, kind: int) -> Iterable[tuple[Any, str, float]]:
        """What the fleet is measured by: once for those that say the same."""
        for name in self._compared_names(view):
            tokens = tuple(vars(metric).get("token", 0) for _, metric in view.observations.metrics[name])
            if 0 in tokens or (kind, name, tokens) not in self._compared:
                self._compared[(kind, name, tokens)] = list(self._known.fleet.figures(view, name))
            yield from self._compared[(kind, name, tokens)]

    def _compared_names(self, view: HostView) -> Sequence[str]:
        """Of the snapshots, what some criterion compares with the fleet."""
        key = ("compared", tuple(view.observations.metrics), *map(id, view.packs))
        if key not in self._named:
            wanted = [item for item in view.criteria().values() if item.vs_fleet]
            names = [name for name in view.observations.metrics if any(item.speaks_of(name) for item in wanted)]
            self._named[key] = {"": names}
        return self._named[key][""]

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
            found.append(template_of(view, criterion, group[-1]))
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
            found.append(template_of(view, criterion, measured[-1]))
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
                its_key = self._known.fleet.key(view, verdict)
                found.claims.append((criterion, its_key, value, verdict.scope, verdict))
        else:
            found.outcomes.append(outcome)
        return True
