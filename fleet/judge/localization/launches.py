"""The outcome of every launch of a gang, combined from the records of all its hosts, and the hosts that caused a failure.

If a launch fails, either the heartbeats name the culprit, or short launches of parts of the gang find which hosts do not work
together (`bisection`). Both answer the same question: which hosts to exclude, so that the rest can be measured. The planner of
the next launch (`fleet.planning.next_launch`) and the judge share the answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.evidence import Evidence
from fleet.judge.localization.bisection import Bisection, Conclusion, Outcome
from fleet.judge.localization.matrix import HOST, LINK
from schemas.catalogue import BENCHMARKS, DURATION
from schemas.plans import Plan
from schemas.probes import TOGETHER
from schemas.records import MEASURED, Culprit, Launch, Observation, Record
from schemas.stages import GANG, PROBE

FINISHED = "finished"
UNABLE = "rank_unable"
EITHER = 0.5
"""Confidence of what is no better than its opposite."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One group of hosts that launched together."""

    gang: str
    number: int
    stage: str
    members: tuple[str, ...]
    told: Mapping[str, Launch]
    """Host -> its own account of it; a host whose record was not fetched has none."""
    seen: Mapping[str, tuple[Observation, ...]]
    """Host -> what it measured then."""
    wanted: frozenset[str]
    """The benchmarks that all hosts do together."""

    @property
    def finished(self) -> bool:
        """Every host of which there is an account came to its end."""
        return bool(self.told) and all(launch.outcome == FINISHED for launch in self.told.values())

    @property
    def complete(self) -> bool:
        """It finished, and every host came to the end of all that they were to do together."""
        done = [
            {str(item.params.get("benchmark")) for item in self._measured(host) if item.name == DURATION.name}
            for host in self.told
        ]
        return self.finished and all(self.wanted <= names for names in done)

    @property
    def worked(self) -> bool:
        """Whether the hosts work together: it finished and measured something; a probe measured everything."""
        if self.stage == PROBE or not self.wanted:
            return self.complete
        return self.finished and any(
            item.name.split(".")[0] in self.wanted for host in self.told for item in self._measured(host)
        )

    def _measured(self, host: str) -> list[Observation]:
        return [item for item in self.seen.get(host, ()) if item.status == MEASURED]

    @property
    def not_started(self) -> dict[str, str]:
        """Hosts that could start no rank, and why, by their own account."""
        return {host: launch.reason for host, launch in self.told.items() if not launch.ranks and launch.reason}

    @property
    def unable(self) -> dict[str, Culprit]:
        """Hosts with a rank that could not take part, by their own account."""
        accounts = ((host, launch.culprit) for host, launch in self.told.items())
        return {host: culprit for host, culprit in accounts if culprit and culprit.kind == UNABLE}

    @property
    def culprit(self) -> Culprit | None:
        """Whom the heartbeats named: as most of the hosts have it, where they do not agree."""
        accounts = (self.told[host].culprit for host in self.members if host in self.told)
        text = [culprit for culprit in accounts if culprit and culprit.kind != UNABLE]
        if not text:
            return None
        hosts = Counter(culprit.hosts for culprit in text).most_common(1)[0][0]
        return Counter(culprit for culprit in text if culprit.hosts == hosts).most_common(1)[0][0]

    def culprits(self) -> dict[str, str]:
        """Return the hosts that stopped the launch, each with the reason; empty if they are unknown."""
        own = self.not_started | {host: culprit.text for host, culprit in self.unable.items()}
        culprit = self.culprit
        if not culprit or set(culprit.hosts) >= set(self.members):
            return own
        # A host that started no rank makes others fail. A host that is unable exits cleanly and stops no other rank.
        if self.not_started or (own and not culprit.kind.startswith("rank_")):
            return own
        return own | dict.fromkeys(culprit.hosts, culprit.text)

    def is_certain(self, host: str) -> bool:
        """Return whether the fault is certainly on that host: one of its ranks ended, or it is in the minority of a split."""
        culprit = self.culprit
        if not culprit or host in self.not_started or host in self.unable:
            return False
        if culprit.kind == "host_absent" and host not in self.told:
            return False  # it may never have been started
        return culprit.kind.startswith("rank_") or 2 * len(culprit.hosts) < len(self.members)

    def never_started(self, present: Collection[str]) -> bool:
        """Return whether the only cause is hosts that are present but were never started (control node cut off)."""
        culprit = self.culprit
        if not culprit or culprit.kind != "host_absent" or self.not_started or self.unable:
            return False
        return all(host in present and host not in self.told for host in culprit.hosts)


def attempts(plan: Plan, evidence: Mapping[str, Evidence], gang: str) -> list[Attempt]:
    """Return every launch and probe of a gang, the earliest first."""
    accounts: dict[tuple[int, str, tuple[str, ...]], dict[str, Launch]] = defaultdict(dict)
    observation: dict[tuple[int, str, tuple[str, ...]], dict[str, tuple[Observation, ...]]] = defaultdict(dict)
    for host in plan.gangs()[gang]:
        for record in evidence[host].records if host in evidence else ():
            for launch in record.launches if record.gang == gang else ():
                if launch.stage in (GANG, PROBE):
                    key = (launch.number, launch.stage, launch.members)
                    accounts[key][host] = launch
                    observation[key][host] = measured_by(record, launch)
    together = frozenset(name for name in plan.stage(GANG).benchmarks if BENCHMARKS[name].needs_group)
    return [
        Attempt(
            gang=gang,
            number=key[0],
            stage=key[1],
            members=key[2],
            told=accounts[key],
            seen=observation[key],
            wanted=together if key[1] == GANG else frozenset({TOGETHER}),
        )
        for key in sorted(accounts, key=lambda key: key[0])
    ]


def measured_by(record: Record, launch: Launch) -> tuple[Observation, ...]:
    """What a launch of that record measured: what its record has of the stage, or what it keeps itself."""
    last = [other for other in record.launches if other.stage == launch.stage and (other.ranks or other is launch)][-1]
    current = (
        tuple(observation for observation in record.observations if observation.stage == launch.stage)
        if last is launch
        else ()
    )
    return (*launch.observations, *current)


def conclusion(among: Sequence[Attempt], stuck: Attempt) -> list[list[str]] | Conclusion:
    """Return the conclusion of the probes after a launch without a culprit, or the groups to probe next.

    There are none to probe if a host reports itself as unable, since no probe works with it.

    Args:
        among: every launch and probe of the gang.
        stuck: the launch that failed.
    """
    later = [other.number for other in among if other.stage == GANG and other.number > stuck.number]
    probes: dict[int, list[Outcome]] = defaultdict(list)
    for probe in among:
        if probe.stage == PROBE and stuck.number < probe.number < min(later, default=probe.number + 1):
            if probe.unable:
                return []
            probes[probe.number].append(Outcome(hosts=probe.members, worked=probe.worked))
    return Bisection(stuck.members).next_launches([probes[number] for number in sorted(probes)])


def is_stuck(attempt: Attempt) -> bool:
    """Whether it failed without a culprit."""
    return attempt.stage == GANG and not attempt.worked and not attempt.culprits()


def hosts_to_exclude(result: Conclusion) -> dict[str, str]:
    """Return the hosts to exclude so that the rest works: each bad host, and the second host of each bad link."""
    hosts = {item.where: item.evidence for item in result.suspects if item.kind == HOST}
    for item in result.suspects:
        if item.kind == LINK and item.confidence > EITHER and not hosts.keys() & set(item.hosts):
            hosts[item.hosts[-1]] = item.evidence
    return hosts
