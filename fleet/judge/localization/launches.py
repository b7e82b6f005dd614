"""Combine the records of a gang's hosts into the outcome of each launch, and find the hosts that caused a failure.

A gang is the hosts of one multi-node launch. If a launch fails, either the heartbeats identify the culprit, or probe launches of
parts of the gang find the hosts that do not work together (`bisection`). The planner of the next launch
(`fleet.planning.next_launch`) excludes these hosts so that the rest can be measured; the judge reports them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fleet.judge.evidence import Evidence
from fleet.judge.localization.bisection import Bisection, GroupOutcome, ProbeConclusion
from fleet.judge.localization.matrix import HOST, LINK
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.plans import Plan
from schemas.probes import TOGETHER
from schemas.records import CUT_OFF, MEASURED, RAISED, UNABLE, Culprit, Launch, Observation, Record
from schemas.stages import GANG, PROBE

FINISHED = "finished"
EVEN_ODDS = 0.5
"""Confidence at which another explanation is equally likely."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One launch or probe, combined from the records of its hosts."""

    gang: str
    number: int
    stage: str
    members: tuple[str, ...]
    launches: Mapping[str, Launch]
    """Host -> its record of the launch. A host is missing if the control node has no record of the launch from it."""
    observations: Mapping[str, tuple[Observation, ...]]
    """Host -> its measurements during the launch."""
    joint_benchmarks: frozenset[str]
    """The benchmarks that all hosts run together; for a probe, only TOGETHER."""

    @property
    def finished(self) -> bool:
        """Return whether the launch finished on every host that has a record of it."""
        return bool(self.launches) and all(launch.outcome == FINISHED for launch in self.launches.values())

    @property
    def complete(self) -> bool:
        """Return whether the launch finished, and every host with a record of it completed all joint benchmarks."""
        return self.finished and all(map(self._completed, self.launches))

    @property
    def worked(self) -> bool:
        """Return whether the hosts work together.

        A launch must finish and have a measurement of a joint benchmark. A probe, or a launch without joint benchmarks, must be
        `complete`.
        """
        if self.stage == PROBE or not self.joint_benchmarks:
            return self.complete
        return self.finished and any(
            item.name.split(".")[0] in self.joint_benchmarks for host in self.launches for item in self._measured(host)
        )

    def _completed(self, host: str) -> bool:
        """Return whether the launch finished on this host, and the host completed all joint benchmarks."""
        launch = self.launches.get(host)
        names = {str(item.params.get("benchmark")) for item in self._measured(host) if item.name == DURATION.name}
        return launch is not None and launch.outcome == FINISHED and self.joint_benchmarks <= names

    def named(self, host: str, name: str) -> Sequence[Observation]:
        """Return the observations of that name that the host made during the launch."""
        return self._by_name.get((host, name), ())

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, str], list[Observation]]:
        by_name: dict[tuple[str, str], list[Observation]] = {}
        for host, items in self.observations.items():
            for item in items:
                by_name.setdefault((host, item.name), []).append(item)
        return by_name

    def _measured(self, host: str) -> list[Observation]:
        return [item for item in self.observations.get(host, ()) if item.status == MEASURED]

    @property
    def start_failures(self) -> dict[str, str]:
        """Return host -> why the host could start no rank, according to its record."""
        return {host: launch.reason for host, launch in self.launches.items() if not launch.ranks and launch.reason}

    @property
    def unable_ranks(self) -> dict[str, Culprit]:
        """Return host -> the report on its rank that could not take part, according to its record."""
        culprits = ((host, launch.culprit) for host, launch in self.launches.items())
        return {host: culprit for host, culprit in culprits if culprit and culprit.kind == UNABLE}

    @property
    def culprit(self) -> Culprit | None:
        """Return the culprit according to the heartbeats; None if it is unknown.

        If the hosts disagree, the most frequent report counts. A report of the kind CUT_OFF is from a host that no longer
        receives statuses of other hosts. It does not show which side failed, so it gives no culprit if another such report names
        different hosts, or if a host that it names finished the launch.
        """
        culprits = self._reported_culprits
        if not culprits:
            return None
        hosts = Counter(culprit.hosts for culprit in culprits).most_common(1)[0][0]
        of_hosts = [culprit for culprit in culprits if culprit.hosts == hosts]
        first_hand = [culprit for culprit in of_hosts if culprit.kind != CUT_OFF]
        culprit = Counter(first_hand or of_hosts).most_common(1)[0][0]
        return None if culprit.kind == CUT_OFF and self._is_contradicted(culprit) else culprit

    @property
    def _reported_culprits(self) -> list[Culprit]:
        """Return the culprits in the records, in the order of the hosts, without the self-reports of `unable_ranks`.

        A report is left out if all hosts that it names completed the launch, because these hosts did not stop it.
        """
        recorded = (self.launches[host].culprit for host in self.members if host in self.launches)
        return [item for item in recorded if item and item.kind != UNABLE and not all(map(self._completed, item.hosts))]

    def _is_contradicted(self, culprit: Culprit) -> bool:
        """Return whether CUT_OFF reports disagree on the hosts, or a host that `culprit` names finished the launch."""
        others = {other.hosts for other in self._reported_culprits if other.kind == CUT_OFF}
        finished = {host for host, launch in self.launches.items() if launch.outcome == FINISHED}
        return len(others) > 1 or bool(finished & set(culprit.hosts))

    def culprits(self) -> dict[str, str]:
        """Return host -> reason, for the hosts that stopped the launch; empty if they are unknown."""
        self_reported = self.start_failures | {host: culprit.text for host, culprit in self.unable_ranks.items()}
        culprit = self.culprit
        # A report that names all members identifies no culprit. Only an exception is reported even if all members raised it.
        if not culprit or (set(culprit.hosts) >= set(self.members) and culprit.kind != RAISED):
            return self_reported
        # If a host started no rank, that is the cause of the reports about other hosts. A host with a rank that could not take
        # part leaves the launch. Others then report that host as lost, so such reports are ignored. But a report about a rank
        # (kind `rank_...`) has another cause, and counts.
        if self.start_failures or (self_reported and not culprit.kind.startswith("rank_")):
            return self_reported
        return self_reported | dict.fromkeys(culprit.hosts, culprit.text)

    def is_certain(self, host: str) -> bool:
        """Return whether the fault is certainly on that host.

        It is certain if one of the host's ranks ended, was silent, did not start, or stayed behind the others. It is also certain
        if the host was silent or did not join, unless this is true of half of the members or more.

        It is not certain if a rank ended with an exception that a device cannot cause: a setting or the software of any host
        may cause that. Nor is it certain if the host started no rank, reports that it cannot take part, or is absent without a
        record of the launch. Reports of the kind CUT_OFF are certain only if all reports agree and come from more than half of
        the members.
        """
        culprit = self.culprit
        if not culprit or culprit.kind == RAISED or host in self.start_failures or host in self.unable_ranks:
            return False
        if culprit.kind == "host_absent" and host not in self.launches:
            return False  # the launch may never have been started there
        if culprit.kind == CUT_OFF:
            agree = [other.hosts == culprit.hosts for other in self._reported_culprits]
            return all(agree) and 2 * len(agree) > len(self.members)
        return culprit.kind.startswith("rank_") or 2 * len(culprit.hosts) < len(self.members)

    def was_partly_started(self, present: Collection[str]) -> bool:
        """Return whether the launch failed only because it was never started on some hosts, all of them reachable (`present`).

        That happens if the control node is interrupted while it starts the launch.
        """
        culprit = self.culprit
        if not culprit or culprit.kind != "host_absent" or self.start_failures or self.unable_ranks:
            return False
        return all(host in present and host not in self.launches for host in culprit.hosts)


def gang_attempts(plan: Plan, evidence: Mapping[str, Evidence], gang: str) -> list[Attempt]:
    """Return every launch and probe of a gang, oldest first."""
    launches: dict[tuple[int, str, tuple[str, ...]], dict[str, Launch]] = defaultdict(dict)
    observations: dict[tuple[int, str, tuple[str, ...]], dict[str, tuple[Observation, ...]]] = defaultdict(dict)
    for host in plan.gangs()[gang]:
        for record in evidence[host].records if host in evidence else ():
            for launch in record.launches if record.gang == gang else ():
                if launch.stage in (GANG, PROBE):
                    key = (launch.number, launch.stage, launch.members)
                    launches[key][host] = launch
                    observations[key][host] = measurements_of(record, launch)
    joint = frozenset(name for name in plan.stage(GANG).benchmarks if BENCHMARKS[name].needs_group)
    return [
        Attempt(
            gang=gang,
            number=key[0],
            stage=key[1],
            members=key[2],
            launches=launches[key],
            observations=observations[key],
            joint_benchmarks=joint if key[1] == GANG else frozenset({TOGETHER}),
        )
        for key in sorted(launches, key=lambda key: key[0])
    ]


def measurements_of(record: Record, launch: Launch) -> tuple[Observation, ...]:
    """Return the observations that the host made during one launch of a record.

    Those of the last launch of a stage are in the record itself, those of an earlier launch in `Launch.observations`.
    """
    last = [other for other in record.launches if other.stage == launch.stage and (other.ranks or other is launch)][-1]
    return (*launch.observations, *(record.by_stage.get(launch.stage, ()) if last is launch else ()))


def probe_result(attempts: Sequence[Attempt], stuck: Attempt) -> list[list[str]] | ProbeConclusion:
    """Return the conclusion of the probes after a launch that failed without a known culprit, or the groups to probe next.

    The list of groups is empty if a host reports that it cannot take part, because no probe with that host can work.

    Args:
        attempts: every launch and probe of the gang.
        stuck: the launch that failed.
    """
    later_numbers = [other.number for other in attempts if other.stage == GANG and other.number > stuck.number]
    probes: dict[int, list[GroupOutcome]] = defaultdict(list)
    for probe in attempts:
        if probe.stage == PROBE and stuck.number < probe.number < min(later_numbers, default=probe.number + 1):
            if probe.unable_ranks:
                return []
            probes[probe.number].append(GroupOutcome(hosts=probe.members, worked=probe.worked))
    return Bisection(stuck.members).next_launches([probes[number] for number in sorted(probes)])


def is_stuck(attempt: Attempt) -> bool:
    """Return whether a launch failed without a known culprit."""
    return attempt.stage == GANG and not attempt.worked and not attempt.culprits()


def hosts_to_exclude(result: ProbeConclusion) -> dict[str, str]:
    """Return host -> evidence, for each bad host and the second host of each confirmed bad link: without them the rest works.

    A link is skipped if one of its hosts is already excluded.
    """
    hosts = {item.where: item.evidence for item in result.suspects if item.kind == HOST}
    for item in result.suspects:
        if item.kind == LINK and item.confidence > EVEN_ODDS and not hosts.keys() & set(item.hosts):
            hosts[item.hosts[-1]] = item.evidence
    return hosts
