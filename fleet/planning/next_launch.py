"""Who launches together next: plan + the gang records fetched so far -> the next launches, or none. A pure function.

First all hosts of a gang that are there. Where that fails, whoever stopped it leaves, and the rest launches again; where nobody
is named for it, probes of parts of the gang find out who does not work with whom. Where a slow host makes what all do together
fail its criterion, it leaves too, so that the others have figures of their own. Whoever asks again with the same records is
answered the same, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fleet.judge.criteria import Pack
from fleet.judge.evaluate import held
from fleet.judge.evidence import Evidence, HostView, Planned
from fleet.judge.localization.bisection import Conclusion
from fleet.judge.localization.faults import last_of
from fleet.judge.localization.launches import Attempt, attempts, conclusion, is_stuck, unfit
from fleet.judge.localization.verdicts import is_slow, judge_pairs
from fleet.judge.outliers import Fleet
from schemas.plans import Plan
from schemas.probes import GANG
from schemas.reports import FAIL, Verdict

FEWEST = 2
TRIES = 2
"""Launches of the very same hosts, where nobody is to blame for the first."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Hosts that are to launch together."""

    gang: str
    members: tuple[str, ...]
    """In rank order."""
    number: int
    probe: bool = False

    def __str__(self) -> str:
        return f"gang {self.gang}, {'probe' if self.probe else 'launch'} {self.number}: {', '.join(self.members)}"

    def arguments(self) -> list[str]:
        """What `rackproof launch` is told of it."""
        return [f"--members={','.join(self.members)}", f"--number={self.number}", *(["--probe"] if self.probe else [])]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to happen to the gangs of a run."""

    starts: tuple[Start, ...]
    """Disjoint, to be started at once; none where all is done that can be."""
    left: Mapping[str, str]
    """Hosts that are there and did not come well out of their last launch, and why."""
    awaited: tuple[str, ...] = ()
    """Hosts whose records are fetched again before anything is decided, once they have ended what they are at."""

    def document(self) -> dict[str, Any]:
        """As JSON: the arguments of each launch once, since a gang may have thousands of members."""
        return {
            "launches": [start.arguments() for start in self.starts],
            "hosts": {host: place for place, start in enumerate(self.starts) for host in start.members},
            "left": dict(self.left),
            "awaited": list(self.awaited),
        }


def untold(evidence: Mapping[str, Evidence], present: Collection[str]) -> tuple[str, ...]:
    """The hosts in reach that have no word of a launch of which another member has.

    Hosts end a launch one after the other: a control node that was cut off and comes back in between finds some records
    without it.
    """
    told: dict[tuple[str, int, tuple[str, ...]], set[str]] = defaultdict(set)
    for host, left in evidence.items():
        for launch in left.launches():
            told[launch.stage, launch.number, launch.members].add(host)
    return tuple(
        sorted({host for (*_, members), hosts in told.items() for host in members if host not in hosts} & {*present})
    )


def decide(
    plan: Plan,
    evidence: Mapping[str, Evidence],
    packs: Sequence[Pack],
    *,
    present: Collection[str],
    minimum: int = FEWEST,
) -> Decision:
    """The next launches of every gang of the plan.

    Args:
        plan, packs: as for the judge.
        evidence: the same; gang records are enough.
        present: the hosts that can be reached.
        minimum: fewest hosts that launch together.
    """

    starts: list[Start] = []
    left: dict[str, str] = {}
    judged = _Judged(plan, evidence, packs)
    for name, hosts in plan.gangs().items() if any(stage.name == GANG for stage in plan.stages) else ():
        gang = _Gang(name, [host for host in hosts if host in present], attempts(plan, evidence, name), judged)
        starts += gang.starts(max(minimum, FEWEST))
        left |= gang.failed()
    return Decision(starts=tuple(starts), left=left)


class _Judged:
    """What the judge has to say of the gang records, as far as somebody asks."""

    def __init__(self, plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack]) -> None:
        self._plan, self._evidence, self._packs = plan, evidence, packs

    @cached_property
    def _views(self) -> dict[str, HostView]:
        return {
            host.name: HostView(self._plan, host, self._evidence.get(host.name, Evidence()), self._packs)
            for host in self._plan.hosts
        }

    def pairs(self, hosts: Collection[str]) -> dict[str, str]:
        """The hosts that fail by their pairs, and why; by the last launch that each of them took part in."""
        verdicts = judge_pairs([view for host, view in self._views.items() if host in hosts], [])
        return {item.host: item.reason for item in verdicts if item.verdict == FAIL and item.name.startswith("pairs.")}

    @cached_property
    def collectives(self) -> list[Verdict]:
        """On what the hosts did together."""
        fleet = Fleet(Planned(self._plan), self._views.values())
        return [
            verdict
            for view in self._views.values()
            for criterion in view.criteria().values()
            if criterion.name.startswith("collective.") and criterion.same_as_fleet is None
            for verdict in held(view, criterion, fleet)
        ]


class _Gang:
    """One gang, as far as its hosts are there."""

    def __init__(self, name: str, here: Sequence[str], launched: Sequence[Attempt], judged: _Judged) -> None:
        self._name, self._here, self._launched, self._judged = name, here, launched, judged
        self._full = [attempt for attempt in launched if attempt.stage == GANG and set(attempt.members) & set(here)]
        self._spoilt = self._spoiling()
        self._out = self._leaving()

    def _leaving(self) -> dict[str, str]:
        """Hosts with which the rest cannot be measured, and why."""
        found: dict[str, str] = {}
        for attempt in self._full:
            if is_stuck(attempt) and isinstance(came := conclusion(self._launched, attempt), Conclusion):
                found |= unfit(came)
            elif not attempt.worked and not (attempt.late(self._here) and self._tries(attempt.members) < TRIES):
                found |= attempt.blamed()
        for attempt in self._launched:  # the probes too
            found |= {host: culprit.text for host, culprit in attempt.unable.items()}
        return found | {host: why for hosts in self._spoilt.values() for host, why in hosts.items()}

    def _spoiling(self) -> dict[int, dict[str, str]]:
        """Number of a launch that worked -> hosts for which what all did in it was too slow, or came to no end."""
        worked = [(attempt, last) for attempt, last in last_of(self._full) if attempt.worked]
        failing = self._judged.pairs({host for attempt in self._full for host in attempt.members}) if worked else {}
        found: dict[int, dict[str, str]] = {}
        for attempt, last in worked:
            theirs = {host: why for host, why in failing.items() if host in last}
            if theirs and (not attempt.complete or is_slow(attempt, last, self._judged.collectives)):
                found[attempt.number] = theirs
        return found

    def _tries(self, members: Collection[str]) -> int:
        return sum(set(attempt.members) == set(members) for attempt in self._full)

    def starts(self, minimum: int) -> list[Start]:
        """The next launch, or several probes; nothing where all is done that can be."""
        rest = [host for host in self._here if host not in self._out]
        if len(rest) < minimum:
            return []
        last = self._full[-1] if self._full else None
        if last is None or not set(rest) <= set(last.members):
            return [self._start(rest)]
        if last.worked:
            return [self._start(rest)] if self._spoilt.get(last.number) else []
        if set(rest) < set(last.members):
            return [self._start(rest)]
        return self._search(last, rest)

    def _search(self, last: Attempt, rest: Sequence[str]) -> list[Start]:
        """After a launch of these very hosts failed and nobody left for it."""
        found = conclusion(self._launched, last) if is_stuck(last) else None
        if isinstance(found, list):
            return [self._start(group, probe=True) for group in found]
        again = found is None or found.good or len(rest) == FEWEST  # of two, no part is left that could be probed
        return [self._start(rest)] if again and self._tries(rest) < TRIES else []

    def _start(self, members: Sequence[str], *, probe: bool = False) -> Start:
        number = 1 + max((attempt.number for attempt in self._launched), default=0)
        return Start(gang=self._name, members=tuple(members), number=number, probe=probe)

    def failed(self) -> dict[str, str]:
        """Hosts whose last launch did not come to a good end."""
        found = {}
        for attempt, last in last_of(self._launched):
            for host in self._here if not attempt.worked else ():
                if host in last:
                    found[host] = self._out.get(host) or attempt.told[host].reason or "nothing was measured together"
        return found
