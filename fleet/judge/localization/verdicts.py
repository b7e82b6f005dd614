"""Judge the hosts of each gang (the hosts of one multi-node launch): slow pairs, and which host stopped a launch.

The pair matrix gives `pairs.bandwidth` and `pairs.latency`. A part that is slow with every partner fails its host. A slow link
between hosts is inconclusive on both ends, because two paths that a switch routes over one wire look the same.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fleet.judge.evidence import from_benchmark
from fleet.judge.host_view import HostView
from fleet.judge.localization.faults import CRITERION, STAGE, judge_faults, last_of
from fleet.judge.localization.launches import Attempt, attempts
from fleet.judge.localization.matrix import (
    BANDWIDTH,
    FABRIC,
    HOST,
    LATENCY,
    LINK,
    NIC,
    RAIL,
    End,
    Kind,
    Pair,
    Suspect,
    Tolerance,
)
from fleet.judge.localization.slow import LEAST_HOSTS
from fleet.judge.localization.suspects import comparable, find_suspects
from fleet.quantities import quantity as shown
from schemas.records import ERROR, MEASURED, Observation
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

UNITS = {BANDWIDTH: "B/s", LATENCY: "s"}
EQUAL = "ours: equal hosts on one fabric are equally fast with each other (docs/localisation.md)"
REHEARSAL_TOLERANCE = Tolerance(bandwidth=0.75, latency=0.9, sigmas=2)
"""A rehearsal reports only gross faults: a quarter of the bandwidth, ten times the latency. These exceed most noise. With the six
standard deviations of GPU hosts, five processes on a busy machine hid a host that was a hundred times too slow."""
CERTAIN_ON_CPUS = 0.8
"""Least confidence in a rehearsal: at least three comparisons, as one pair is slow whenever another process uses the CPU."""
SLOW_RAIL = 0.75
"""Rails may differ by design, all hosts alike: what is left of the speed must be less than this."""


def judge_pairs(views: Iterable[HostView], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts on each host of each gang: which host stopped a launch, and which pairs are slow.

    A host is judged by the last launch that it took part in. Those who left before are judged by that one, and the others by
    what they did without them.

    Args:
        views: the hosts whose records are believed.
        verdicts: those reached so far: which GPUs fail by themselves, and whether a gang's collectives are too slow.
    """
    gangs: dict[str, dict[str, HostView]] = defaultdict(dict)
    for view in views:
        if view.host.gang:
            gangs[view.host.gang][view.host.name] = view
    result: list[Verdict] = []
    for gang, members in gangs.items():
        plan = next(iter(members.values())).plan
        launched = attempts(plan, {host: view.evidence for host, view in members.items()}, gang)
        result += judge_faults(launched, members)
        for attempt, last in last_of(launched):
            slow = is_slow(attempt, last, verdicts)
            result += [item for item in _Gang(attempt, members, verdicts, slow).verdicts() if item.host in last]
    return result


@dataclass
class _Told:
    """What the two ends say of one pair on one rail."""

    values: dict[str, list[float]] = field(default_factory=lambda: {BANDWIDTH: [], LATENCY: []})
    failed: str = ""

    def value(self, quantity: str, rehearsal: bool) -> float | None:
        """The mean; in a rehearsal the slower end's: what the other sent may have gone into a socket's buffer alone."""
        values = self.values[quantity]
        if not values or self.failed:
            return None
        slower = min if quantity == BANDWIDTH else max
        return slower(values) if rehearsal else statistics.fmean(values)


class _Gang:
    """One launch of a gang, its pairs and its suspects."""

    def __init__(
        self, attempt: Attempt, views: Mapping[str, HostView], verdicts: Sequence[Verdict], slow: bool
    ) -> None:
        self._scope = f"gang={attempt.gang}"
        self._attempt = attempt
        members = {host: views[host] for host in attempt.told}
        self._members = members
        self._slow = slow
        self._rehearsal = next(iter(members.values())).plan.rehearsal
        self._tolerance = REHEARSAL_TOLERANCE if self._rehearsal else Tolerance()
        self._pairs = self._matrix()
        self._compared = {quantity: comparable(self._pairs, quantity) for quantity in UNITS}
        self._alone = set() if self._rehearsal else set(_failed_alone(members, verdicts))

    def _matrix(self) -> list[Pair]:
        accounts: dict[tuple[str, str, int], _Told] = defaultdict(_Told)
        blamed = self._attempt.culprits()
        for host, view in self._members.items():
            for quantity in UNITS:
                latest = {
                    observation.scope: observation
                    for observation in self._attempt.seen[host]
                    if observation.name == f"pairs.{quantity}"
                }
                for observation in latest.values():
                    index = self._place(view, observation)
                    # What failed with the host that stopped the launch says nothing against the other end.
                    if index and not (observation.status == ERROR and blamed.keys() & set(index)):
                        _add(accounts[index], quantity, observation)
        pairs = [
            Pair(
                a=a,
                b=b,
                rail=rail,
                bandwidth=both.value(BANDWIDTH, self._rehearsal),
                latency=both.value(LATENCY, self._rehearsal),
                failed=both.failed,
                kind=self._kind(a, b),
            )
            for (a, b, rail), both in sorted(accounts.items())
            if both.failed or any(both.values.values())
        ]
        return _of_one_rail(pairs) if self._rehearsal else pairs

    def _place(self, view: HostView, observation: Observation) -> tuple[str, str, int] | None:
        """The two hosts in alphabetical order and the rail; None for what the gang has not."""
        labels = Scope.parse(observation.scope).labels
        device, other = labels.get(view.host.device), labels.get("partner")
        rails = [str(index) for index in view.host.devices]
        if observation.stage != STAGE or device not in rails or other not in self._members or other == view.host.name:
            return None
        a, b = sorted((view.host.name, other))
        return a, b, rails.index(device)

    def _kind(self, a: str, b: str) -> Kind:
        """Pairs within a rack and pairs across, and those with a slower port by the inventory, are not alike."""
        first, second = (self._members[name].host for name in (a, b))
        return Kind(across=first.rack != second.rack, gbps=min(first.fabric_gbps, second.fabric_gbps))

    def verdicts(self) -> Iterator[Verdict]:
        """Yield verdicts on the suspects, then passes for the other hosts."""
        if not self._pairs:
            return
        suspects = find_suspects(
            self._pairs, failed_alone=self._alone, collective_slow=self._slow, tolerance=self._tolerance
        )
        if self._rehearsal:
            suspects = [suspect for suspect in suspects if _is_certain_on_cpus(suspect)]
        result = [verdict for suspect in suspects for verdict in self._against(suspect)]
        yield from result
        named = {verdict.host for verdict in result}
        hosts = dict.fromkeys(host for pair in self._pairs for host in (pair.a, pair.b))
        for host in hosts if len(hosts) >= LEAST_HOSTS else ():
            if host not in named:
                yield from self._well(host)

    def _against(self, suspect: Suspect) -> Iterator[Verdict]:
        if suspect.kind == RAIL and not self._slow and not _is_gross(suspect):
            return
        hosts = suspect.hosts or tuple(self._members)
        for host in hosts:
            yield self._verdict(host, suspect)

    def _verdict(self, host: str, suspect: Suspect) -> Verdict:
        view = self._members[host]
        scope = self._scope
        if suspect.kind == HOST:
            scope = "host"
        elif len(suspect.hosts) == 1:
            scope = view.host.scopes[suspect.rails[0]]
        fails = self._fails(suspect)
        more = "" if fails or suspect.kind != LINK else "; measure again: paths that share a wire look the same"
        part, serial = "", view.serial(scope)
        if suspect.kind == NIC:  # the NIC is unknown, and the GPU beside it must not be returned for it
            more = f"; it is the one that {scope}{f' (serial {serial})' if serial else ''} uses"
            part, serial = f"nic=rail{suspect.rails[0]}", ""
        sure = f"suspect {suspect.kind} {suspect.where}".strip()
        quantity = suspect.quantity
        return Verdict(
            host=host,
            scope=scope,
            part=part,
            serial=serial,
            name=f"pairs.{quantity}",
            stage=STAGE,
            verdict=FAIL if fails else INCONCLUSIVE,
            criterion=CRITERION,
            kind=VerdictKind.SUSPECT,
            value=suspect.found,
            limit=suspect.limit,
            operator=("ge" if quantity == BANDWIDTH else "le") if suspect.limit is not None else "",
            unit=UNITS[quantity],
            reason=f"{sure} (confidence {suspect.confidence:.2f}): {suspect.evidence}{more}",
            detail=f"{sure}: {suspect.evidence}{more}",
            action="inspect_hardware" if fails else "none",
            source=EQUAL,
            basis="policy",
        )

    def _fails(self, suspect: Suspect) -> bool:
        """Whether a part is known to be bad, and not only something somewhere."""
        if suspect.kind == LINK:
            return suspect.found is None and suspect.confidence > 0.5  # it failed, and both ends are well with others
        return suspect.kind not in (RAIL, FABRIC) or self._slow

    def _well(self, host: str) -> Iterator[Verdict]:
        for quantity, unit in UNITS.items():
            every = [
                (pair, value) for pair in self._compared[quantity] if (value := _value(pair, quantity)) is not None
            ]
            own = [value for pair, value in every if host in (pair.a, pair.b)]
            if not own:
                continue
            value, usual = statistics.median(own), statistics.median(value for _, value in every)
            limit = usual * (1 - self._tolerance.bandwidth)
            if quantity == LATENCY:
                limit = usual / (1 - self._tolerance.latency)
            within = value >= limit if quantity == BANDWIDTH else value <= limit
            yield Verdict(
                host=host,
                scope=self._scope,
                name=f"pairs.{quantity}",
                stage=STAGE,
                verdict=PASS,
                criterion=CRITERION,
                value=value,
                limit=limit if within else None,
                operator=("ge" if quantity == BANDWIDTH else "le") if within else "",
                unit=unit,
                reason=f"median of its {len(own)} pairs {shown(value, unit)}, of the gang's {shown(usual, unit)}: "
                "no part of it is out of line",
                source=EQUAL,
                basis="policy",
            )


def _value(pair: Pair, quantity: str) -> float | None:
    return pair.bandwidth if quantity == BANDWIDTH else pair.latency


def _of_one_rail(pairs: Iterable[Pair]) -> list[Pair]:
    """The processes of a rehearsal share one link: the best of them stands for it, as others shared a processor besides."""
    of_link: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        of_link[(pair.a, pair.b)].append(pair)
    return [replace(_best(link), rail=0) for link in of_link.values()]


def _best(link: Sequence[Pair]) -> Pair:
    """One that failed; else the best of each quantity."""
    return next((pair for pair in link if pair.failed), None) or replace(
        link[0],
        bandwidth=max((pair.bandwidth for pair in link if pair.bandwidth is not None), default=None),
        latency=min((pair.latency for pair in link if pair.latency is not None), default=None),
    )


def _add(accounts: _Told, quantity: str, observation: Observation) -> None:
    value = observation.value
    if observation.status == MEASURED and isinstance(value, int | float) and math.isfinite(value) and value > 0:
        accounts.values[quantity].append(float(value))
    elif observation.status == MEASURED:
        accounts.failed = accounts.failed or f"{quantity} is told as {value!r:.40}, which is none"
    elif observation.status == ERROR:
        accounts.failed = accounts.failed or observation.reason


def _is_gross(suspect: Suspect) -> bool:
    if suspect.found is None or suspect.usual is None:
        return True
    left = suspect.found / suspect.usual if suspect.quantity == BANDWIDTH else suspect.usual / suspect.found
    return left < SLOW_RAIL


def _is_certain_on_cpus(suspect: Suspect) -> bool:
    """Return whether a rehearsal may report it: a failure, or a host that is slow with every partner."""
    return suspect.found is None or (suspect.kind == HOST and suspect.confidence >= CERTAIN_ON_CPUS)


def is_slow(attempt: Attempt, last: Collection[str], verdicts: Iterable[Verdict]) -> bool:
    """Whether what the hosts of a launch did together was too slow, by the verdicts on those whose last one it was."""
    scope = f"gang={attempt.gang}"
    return any(verdict.host in last and _is_slow_collective(verdict, scope) for verdict in verdicts)


def _is_slow_collective(verdict: Verdict, scope: str) -> bool:
    """Whether it fails the speed of what the gang did together."""
    timed = verdict.name.endswith((".busbw", ".algbw", ".latency"))
    return verdict.verdict == FAIL and verdict.scope == scope and verdict.name.startswith("collective.") and timed


def _failed_alone(members: Mapping[str, HostView], verdicts: Iterable[Verdict]) -> Iterator[End]:
    """The GPUs that fail anything that was not measured between hosts, and for which something is to be done to them."""
    for verdict in verdicts:
        view = members.get(verdict.host)
        scope = verdict.place
        between = verdict.stage == STAGE and from_benchmark(verdict.name)
        if view and verdict.verdict == FAIL and verdict.action != "none" and not between and scope in view.host.scopes:
            yield verdict.host, view.host.scopes.index(scope)
