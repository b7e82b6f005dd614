"""Decide the next launches of every gang (the hosts of one multi-node launch) from the plan and the gang records fetched so far.

The first launch has all reachable hosts of the gang. If it fails, the hosts at fault are excluded and the others launch again. If
no host is identified, probes (launches of parts of the gang) find the hosts that do not work together. A host is excluded too if
it makes a collective so slow that the collective fails its criterion; the other hosts are then measured without it.

The decision depends only on the plan and the records, so an interrupted run continues where it stopped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fleet.judge.criteria import Pack
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.host_view import HostView
from fleet.judge.localization.bisection import ProbeConclusion
from fleet.judge.localization.faults import with_last_hosts
from fleet.judge.localization.gang_pairs import LINK_PARAM
from fleet.judge.localization.launches import Attempt, gang_attempts, hosts_to_exclude, is_stuck, probe_result
from fleet.judge.localization.verdicts import has_slow_collective, judge_gangs
from fleet.judge.outliers import FleetFigures
from schemas.plans import Plan
from schemas.reports import FAIL, Verdict
from schemas.scopes import Scope
from schemas.stages import GANG

MIN_HOSTS = 2
"""Smallest number of hosts in a launch."""
MAX_TRIES = 2
"""Maximum number of launches of the same hosts if no host is found at fault. Probes do not count."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One launch to run."""

    gang: str
    members: tuple[str, ...]
    """The hosts, in rank order."""
    number: int
    """1 for the first launch or probe of the gang; probes that run in parallel have the same number."""
    probe: bool = False
    """Whether the launch only tests whether its hosts work together."""

    def __str__(self) -> str:
        return f"gang {self.gang}, {'probe' if self.probe else 'launch'} {self.number}: {', '.join(self.members)}"

    def arguments(self) -> list[str]:
        """Return the options of `rackproof launch` for this launch."""
        return [f"--members={','.join(self.members)}", f"--number={self.number}", *(["--probe"] if self.probe else [])]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The next step of the gangs of a run."""

    launches: tuple[LaunchPlan, ...]
    """Launches to start in parallel, no two of which share a host; empty if there is nothing left to launch."""
    excluded: Mapping[str, str]
    """Reachable host whose last launch failed -> why. Despite the name, such a host may be in `launches` again."""
    awaited: tuple[str, ...] = ()
    """Hosts from `hosts_missing_launch`: fetch their records again before deciding."""

    def document(self) -> dict[str, Any]:
        """Return the decision as JSON. `hosts` maps each host to the position of its launch in `launches`.

        So the options of a launch, which name all members, are not repeated for each of up to thousands of hosts.
        """
        return {
            "launches": [launch.arguments() for launch in self.launches],
            "hosts": {host: index for index, launch in enumerate(self.launches) for host in launch.members},
            "excluded": dict(self.excluded),
            "awaited": list(self.awaited),
        }


def hosts_missing_launch(evidence: Mapping[str, Evidence], present: Collection[str]) -> tuple[str, ...]:
    """Return the reachable hosts (`present`) whose record lacks a launch that another member of this launch has recorded.

    The hosts do not finish a launch at the same moment. If the control node is interrupted and continues before all hosts have
    finished, some records lack the launch.
    """
    recorded: dict[tuple[str, int, tuple[str, ...]], set[str]] = defaultdict(set)
    for host, host_evidence in evidence.items():
        for launch in host_evidence.launches():
            recorded[launch.stage, launch.number, launch.members].add(host)
    missing = {host for (*_, members), hosts in recorded.items() for host in members if host not in hosts}
    return tuple(sorted(missing & {*present}))


def decide(
    plan: Plan,
    evidence: Mapping[str, Evidence],
    packs: Sequence[Pack],
    *,
    present: Collection[str],
    minimum: int = MIN_HOSTS,
) -> Decision:
    """Return the next launches of every gang of the plan.

    Args:
        plan: the plan of the run.
        evidence: host -> its records. Gang records are enough.
        packs: the criteria packs of the run.
        present: the reachable hosts.
        minimum: smallest number of hosts in a launch, at least MIN_HOSTS. Probes may be smaller.
    """
    launches: list[LaunchPlan] = []
    excluded: dict[str, str] = {}
    verdicts = _LazyVerdicts(plan, evidence, packs)
    for name, hosts in plan.gangs().items() if any(stage.name == GANG for stage in plan.stages) else ():
        gang = _Gang(name, [host for host in hosts if host in present], gang_attempts(plan, evidence, name), verdicts)
        launches += gang.launches(max(minimum, MIN_HOSTS))
        excluded |= gang.failed_hosts()
    return Decision(launches=tuple(launches), excluded=excluded)


class _LazyVerdicts:
    """Verdicts on the gang records, computed when first needed."""

    def __init__(self, plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack]) -> None:
        self._plan, self._evidence, self._packs = plan, evidence, packs

    @cached_property
    def _views(self) -> dict[str, HostView]:
        return {
            host.name: HostView(self._plan, host, self._evidence.get(host.name, Evidence()), self._packs)
            for host in self._plan.hosts
        }

    def failing_pairs(self, hosts: Collection[str]) -> dict[str, str]:
        """Return host -> why its pair measurements fail, for `hosts`. The measurements are those of the last launch of each host.

        Only failures of one host, or of a link between two hosts, are included. If a failure of a rail, a switch or the whole
        fabric excluded hosts, few or none would be left.
        """
        verdicts = judge_gangs([view for host, view in self._views.items() if host in hosts], self.collectives)
        return {
            item.host: item.reason
            for item in verdicts
            if item.verdict == FAIL
            and item.name.startswith("pairs.")
            and (LINK_PARAM in item.params or not Scope.parse(item.scope).is_gang)
        }

    @cached_property
    def collectives(self) -> list[Verdict]:
        """Return the verdicts on the collectives of all hosts. Criteria with `same_as_fleet` are left out."""
        figures = FleetFigures(Planned(self._plan), self._views.values())
        return [
            verdict
            for view in self._views.values()
            for criterion in view.criteria().values()
            if criterion.name.startswith("collective.") and criterion.same_as_fleet is None
            for verdict in evaluate(view, criterion, figures)
        ]


class _Gang:
    """One gang, restricted to its reachable hosts."""

    def __init__(self, name: str, present: Sequence[str], attempts: Sequence[Attempt], verdicts: _LazyVerdicts) -> None:
        self._name, self._present, self._attempts, self._verdicts = name, present, attempts, verdicts
        self._gang_launches = [
            attempt for attempt in attempts if attempt.stage == GANG and set(attempt.members) & set(present)
        ]
        self._slowing = self._slowing_hosts()
        self._excluded = self._hosts_to_exclude()

    def _hosts_to_exclude(self) -> dict[str, str]:
        """Return the hosts to exclude so that the other hosts can be measured, each with the reason."""
        excluded: dict[str, str] = {}
        for attempt in self._gang_launches:
            if is_stuck(attempt) and isinstance(result := probe_result(self._attempts, attempt), ProbeConclusion):
                excluded |= hosts_to_exclude(result)
            elif not attempt.worked and not (
                attempt.was_partly_started(self._present) and self._count_tries(attempt.members) < MAX_TRIES
            ):
                excluded |= attempt.culprits()
        for attempt in self._attempts:  # all launches and probes
            excluded |= {host: culprit.text for host, culprit in attempt.unable_ranks.items()}
        return excluded | {host: why for hosts in self._slowing.values() for host, why in hosts.items()}

    def _slowing_hosts(self) -> dict[int, dict[str, str]]:
        """Return number of a launch that worked -> host -> why its pair measurements fail.

        A launch is included only if its collectives are too slow, or its joint benchmarks (those that need all hosts) are
        incomplete. Each host appears only under its last launch.
        """
        worked = [
            (attempt, last_hosts) for attempt, last_hosts in with_last_hosts(self._gang_launches) if attempt.worked
        ]
        failing = (
            self._verdicts.failing_pairs({host for attempt in self._gang_launches for host in attempt.members})
            if worked
            else {}
        )
        slowing: dict[int, dict[str, str]] = {}
        for attempt, last_hosts in worked:
            members = {host: why for host, why in failing.items() if host in last_hosts}
            if members and (
                not attempt.complete or has_slow_collective(attempt, last_hosts, self._verdicts.collectives)
            ):
                slowing[attempt.number] = members
        return slowing

    def _count_tries(self, members: Collection[str]) -> int:
        return sum(set(attempt.members) == set(members) for attempt in self._gang_launches)

    def launches(self, minimum: int) -> list[LaunchPlan]:
        """Return the next launch, or several probes; empty if there is nothing left to launch."""
        rest = [host for host in self._present if host not in self._excluded]
        if len(rest) < minimum:
            return []
        last = self._gang_launches[-1] if self._gang_launches else None
        if last is None or not set(rest) <= set(last.members):
            return [self._launch(rest)]
        if last.worked:
            return [self._launch(rest)] if self._slowing.get(last.number) else []
        if set(rest) < set(last.members):
            return [self._launch(rest)]
        return self._probes_or_retry(last, rest)

    def _probes_or_retry(self, last: Attempt, rest: Sequence[str]) -> list[LaunchPlan]:
        """Return what to launch after `last`, a failed launch whose hosts are exactly `rest`. None of these hosts is excluded."""
        result = probe_result(self._attempts, last) if is_stuck(last) else None
        if isinstance(result, list):
            return [self._launch(group, probe=True) for group in result]
        retry = result is None or result.good or len(rest) == MIN_HOSTS  # two hosts cannot be divided into probes
        return [self._launch(rest)] if retry and self._count_tries(rest) < MAX_TRIES else []

    def _launch(self, members: Sequence[str], *, probe: bool = False) -> LaunchPlan:
        number = 1 + max((attempt.number for attempt in self._attempts), default=0)
        return LaunchPlan(gang=self._name, members=tuple(members), number=number, probe=probe)

    def failed_hosts(self) -> dict[str, str]:
        """Return host -> why its last launch failed, for the reachable hosts whose last launch failed."""
        failed_hosts = {}
        for attempt, last_hosts in with_last_hosts(self._attempts):
            for host in self._present if not attempt.worked else ():
                if host in last_hosts:
                    reason = self._excluded.get(host) or attempt.launches[host].reason
                    failed_hosts[host] = reason or "no collective was measured"
        return failed_hosts
