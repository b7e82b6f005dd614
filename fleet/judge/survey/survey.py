"""What a first look makes of the whole fleet: the passes counted, and the hosts that must be judged in full."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fleet.judge import outliers
from fleet.judge.criteria import Criterion
from fleet.judge.digests import CRITERION as DIGEST
from fleet.judge.digests import agrees
from fleet.judge.evaluate import holds
from fleet.judge.evidence import HostView, Planned
from fleet.judge.fleet_stats import Known
from fleet.judge.localization.faults import CRITERION as LOCALISE
from fleet.judge.paths import is_bandwidth, path_of
from fleet.judge.row import MOST_FAR
from fleet.judge.survey.claims import Claim, Many, Same
from fleet.judge.survey.found import Key, Looked, own_scope
from fleet.judge.survey.look import Look
from fleet.judge.tally import Tally
from schemas.records import Value
from schemas.reports import PASS, Verdict


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
        self._many: dict[int, Many] = {}
        self._look = Look(planned, self.known, self.tally)

    def look(self, view: HostView) -> Looked | None:
        """What the host brings, where nothing speaks against it so far; None where it must be judged in full."""
        return self._look.at(view)

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
                    check.row.put(value, place, name, own_scope(one.view, check.template))  # type: ignore[arg-type]
                else:
                    check.row.add(PASS, value, check.limit, place, name, own_scope(one.view, check.template), "")
                if is_bandwidth(check.template):
                    self.known.normal.add(
                        path_of(one.view, replace(check.template, host=name, scope=own_scope(one.view, check.template)))
                    )
            for outcome in one.outcomes:
                many = self._many.get(id(outcome))
                if many is None:
                    many = self._many[id(outcome)] = Many(outcome=outcome)
                many.count += 1
                if len(many.hosts) < MOST_FAR:
                    many.hosts.append((place, name))
            for criterion, key, number, scope, template in one.claims:
                full: Key = (criterion.id, key)
                claim = self.claims.get(full)
                if claim is None:
                    claim = self.claims[full] = Claim(criterion=criterion, template=template, key=key)
                way = path_of(one.view, replace(template, host=name, scope=scope)) if is_bandwidth(template) else None
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
        self._look.forget()
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
