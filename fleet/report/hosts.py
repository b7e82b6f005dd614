"""Judge the hosts of a run unit by unit, and report on each. This module reads and writes no files.

A unit is a gang (the hosts of one multi-node launch), or one host without a gang. The results on different units can be merged in
any order, so several processes can judge the units of a run.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.judge.advisories import NO_ADVISORIES, Advisories
from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.host_view import HostView
from fleet.judge.judge import by_criterion, host_views, judge_hosts, with_waivers
from fleet.judge.passes import PassCounter, Remaining
from fleet.judge.tally import Tally
from fleet.records.versions import compared_criteria, version_names, versions
from fleet.report.adapters import host_adapters
from fleet.report.facts import FactCollector, HostFacts
from schemas.plans import Plan
from schemas.records import ERROR, MEASURED, SKIPPED, UNSUPPORTED
from schemas.reports import (
    ACCEPTED,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    Coverage,
    HostReport,
    Verdict,
)
from schemas.run_directory import record_name
from schemas.timeline import Soak, downsample

LINK = "gpu.peer.link"
MAX_BUCKETS = 40
"""Maximum number of buckets (time intervals) of a soak's timeline in the report."""
FULL_HOSTS = 16
"""By default, the report of at most this many hosts lists every verdict. The report of more hosts lists only the verdicts that do
not pass."""
MEASURED_HOSTS = 64
"""A report that lists every verdict, or that has at most this many hosts, contains the measurements of all hosts. Any other
report contains those of at most this many hosts that are not accepted, rejected ones first."""

Unit = tuple[str, ...]
"""Hosts that are judged together: a gang, or one host without a gang."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The data that is the same for all units of a run."""

    plan: Plan
    packs: Sequence[Pack]
    events: Mapping[str, Sequence[str]]
    """Host -> what the playbooks reported about it: that it was unreachable, or that a task failed."""
    in_full: bool
    """Whether the report lists every verdict, including those that pass."""
    planned: Planned
    positions: Mapping[str, int]
    """Host -> its position in the plan."""
    advisories: Advisories = NO_ADVISORIES
    """Published vulnerabilities to list."""


def context_of(
    plan: Plan,
    packs: Sequence[Pack],
    events: Mapping[str, Sequence[str]],
    *,
    in_full: bool | None = None,
    advisories: Advisories = NO_ADVISORIES,
) -> RunContext:
    """Return the context of a run. If `in_full` is None, every verdict is listed if the plan has at most FULL_HOSTS hosts."""
    return RunContext(
        plan=plan,
        packs=packs,
        events=events,
        in_full=len(plan.hosts) <= FULL_HOSTS if in_full is None else in_full,
        planned=Planned(plan),
        positions={host.name: position for position, host in enumerate(plan.hosts)},
        advisories=advisories,
    )


def units(plan: Plan, names: Iterable[str] | None = None) -> list[Unit]:
    """Return the units that contain the hosts `names`; all units of the plan if `names` is None."""
    gangs = plan.gangs()
    by_gang: dict[str, Unit] = {}
    for name in [host.name for host in plan.hosts] if names is None else names:
        gang = plan.host(name).gang
        # A host without a gang may have the name of a gang; the leading blank makes the two keys different.
        by_gang[gang or f" {name}"] = gangs[gang] if gang else (name,)
    return list(by_gang.values())


@dataclass(kw_only=True)
class JudgedHosts:
    """The results on some hosts of a run."""

    tally: Tally
    hosts: dict[str, HostReport] = field(default_factory=dict)
    facts: dict[str, HostFacts] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    """All verdicts if the report lists them; else those that do not pass."""
    ended: str = ""
    """Latest end of a record, as ISO time; empty without records."""

    def update(self, other: JudgedHosts) -> None:
        """Add the results on other hosts."""
        self.tally.update(other.tally)
        self.hosts |= other.hosts
        self.facts |= other.facts
        self.verdicts += other.verdicts
        self.ended = max(self.ended, other.ended)


class HostJudge:
    """Judges hosts with the statistics of the whole fleet; `finish` returns the results."""

    def __init__(self, context: RunContext, stats: FleetStats) -> None:
        self._context, self._stats = context, stats
        self._results = JudgedHosts(tally=Tally(context.planned, context.positions))
        self._facts = FactCollector(stats)
        self._passes = PassCounter(
            stats, self._results.tally, context.positions, lambda view, criterion: by_criterion(view, criterion, stats)
        )
        self._shared: dict[Any, Any] = {}
        self._measured: dict[str, list[tuple[int, str]]] = {REJECTED: [], INCOMPLETE: []}
        """Decision -> position in the plan and name of the hosts whose measurements are kept."""

    def add(self, unit: Unit, evidence: Mapping[str, Evidence]) -> None:
        """Judge the hosts of a unit."""
        context, results = self._context, self._results
        plan_of_unit = context.plan.only(unit)
        views = host_views(plan_of_unit, evidence, context.packs)
        remaining = None if context.in_full else {view.host.name: self._passes.count(view) for view in views}
        gpus = {view.host.name: view.gpus for view in views}
        verdicts = with_waivers(plan_of_unit, judge_hosts(plan_of_unit, views, self._stats, remaining), gpus)
        of_host: dict[str, list[Verdict]] = {view.host.name: [] for view in views}
        for verdict in verdicts:
            results.tally.add(verdict)
            of_host[verdict.host].append(verdict)
        for view in views:
            name = view.host.name
            rest = remaining[name] if remaining else None
            host_evidence = evidence.get(name, Evidence())
            self._report(view, host_evidence, of_host[name], rest)
            results.facts[name] = self._facts.collect(view, of_host[name], rest)
            results.verdicts += [verdict for verdict in of_host[name] if context.in_full or verdict.verdict != PASS]
            results.ended = max([results.ended, *(record.ended for record in host_evidence.records)])

    def finish(self) -> JudgedHosts:
        """Return the results on all hosts that were added."""
        self._passes.finish()
        for row in self._results.tally.rows.values():
            row.flush()
        return self._results

    def _report(self, view: HostView, evidence: Evidence, verdicts: Sequence[Verdict], rest: Remaining | None) -> None:
        """Report on one host.

        MEASURED_HOSTS explains which hosts keep their measurements in the report.
        """
        name, events = view.host.name, tuple(self._context.events.get(view.host.name, ()))
        decision = decide(verdicts)
        # Without any verdict, `decide` returns INCOMPLETE. But the host may have passes that were only counted.
        if rest and rest.passes and not any(verdict.blocks_acceptance for verdict in verdicts):
            decision = ACCEPTED
        report = HostReport(
            name=name,
            rack=view.host.rack,
            decision=decision,
            record=record_name(name),
            coverage=self._share(_coverage(view, rest)),
            gpus=view.gpus,
            software=self._software(view),
            packs=self._share(tuple(pack.name for pack in view.packs)),
            events=events,
            soak=_soak(evidence),
            gang=view.host.gang,
        )
        if self._context.in_full or decision != ACCEPTED or len(self._context.positions) <= MEASURED_HOSTS:
            report = replace(
                report, launches=evidence.launches(), measurements=tuple(evidence.benchmarks()), links=_links(evidence)
            )
            is_kept = True
            if decision != ACCEPTED and not self._context.in_full:
                report, is_kept = self._limit_measurements(report)
            report = replace(report, adapters=host_adapters(view)) if is_kept else report
        else:
            report = without_measurements(report)
        self._results.hosts[name] = report

    def _limit_measurements(self, report: HostReport) -> tuple[HostReport, bool]:
        """Return the report on a host that is not accepted, and whether it keeps its measurements.

        Of the hosts that this object judged, the first MEASURED_HOSTS rejected ones in the order of the plan keep their
        measurements, and so do the first MEASURED_HOSTS incomplete ones. If this host displaces one that is later in the plan,
        the report on that host loses its measurements. `merge.py` then selects MEASURED_HOSTS of the hosts of all processes.
        """
        kept = self._measured[report.decision]
        bisect.insort(kept, (self._context.positions[report.name], report.name))
        if len(kept) > MEASURED_HOSTS:
            _, name = kept.pop()
            if name == report.name:
                return without_measurements(report), False
            self._results.hosts[name] = without_measurements(self._results.hosts[name])
        return report, True

    def _software(self, view: HostView) -> Mapping[str, str]:
        """Return the versions that the host reported. Hosts that report equal versions share one object."""
        criteria = view.criteria().values()
        key: Any = ("names", view.kind, tuple(view.observations))
        if key not in self._shared:
            compared = compared_criteria(criteria)
            self._shared[key] = version_names(view.observations, compared)
        names = self._shared[key]
        metrics = view.observations.metrics
        tokens = tuple(metric.token for name in names for _, metric in metrics.get(name, ()))
        # Metrics with the same token are equal. A token of 0 means that the metric has none: then the result cannot be shared.
        if 0 in tokens or any(name not in metrics for name in names):
            return versions(view.evidence, criteria, view.observations)
        key = ("versions", view.kind, tokens, *view.evidence.software().items())
        if key not in self._shared:
            self._shared[key] = versions(view.evidence, criteria, view.observations)
        shared: Mapping[str, str] = self._shared[key]
        return shared

    def _share(self, value: Any) -> Any:
        return self._shared.setdefault(value, value)


def decide(verdicts: Iterable[Verdict]) -> str:
    """Return `rejected` if a verdict fails, else `incomplete` if one is inconclusive, else `accepted`.

    A waived verdict does not count. Without any verdict the decision is `incomplete`.
    """
    judged = list(verdicts)
    blocking = {verdict.verdict for verdict in judged if verdict.blocks_acceptance}
    if FAIL in blocking:
        return REJECTED
    return INCOMPLETE if INCONCLUSIVE in blocking or not judged else ACCEPTED


def worst_decision(decisions: Iterable[str]) -> str:
    """Return the worst of the decisions on several hosts; `incomplete` if there are none."""
    present = set(decisions)
    return next((decision for decision in (REJECTED, INCOMPLETE, ACCEPTED) if decision in present), INCOMPLETE)


def without_measurements(report: HostReport) -> HostReport:
    """Return the report without measurements, links, adapters and timelines, and without ranks, logs and results of launches."""
    launches = tuple(
        replace(launch, ranks=(), log_tail="", observations=(), timeline=None) for launch in report.launches
    )
    soak = replace(report.soak, timeline=replace(report.soak.timeline, series=(), events=())) if report.soak else None
    return replace(report, launches=launches, measurements=(), links={}, adapters=(), soak=soak)


def _soak(evidence: Evidence) -> Soak | None:
    """Return the host's soak with its timeline reduced to MAX_BUCKETS buckets; None if the host has no soak."""
    soak = next((record.soak for record in evidence.records if record.soak), None)
    return replace(soak, timeline=downsample(soak.timeline, MAX_BUCKETS)) if soak else None


def _coverage(view: HostView, rest: Remaining | None) -> Coverage:
    """Return how many of the host's expected observations exist, by status."""
    if rest and rest.layout and rest.values and rest.plan_is_met:
        statuses = rest.layout.statuses + Counter({MEASURED: rest.values.expected_pair_count})
    else:
        statuses = Counter(
            item.status if (item := view.lookup.find(wanted, scope)) else ""
            for wanted in view.expected
            for scope in view.plan.scopes_of(view.host, wanted)
        )
    return Coverage(
        expected=statuses.total(),
        measured=statuses[MEASURED],
        missing=statuses[""],
        error=statuses[ERROR],
        skipped=statuses[SKIPPED],
        unsupported=statuses[UNSUPPORTED],
    )


def _links(evidence: Evidence) -> dict[str, str]:
    """Return scope of each pair of the host's GPUs -> the link between them, from the last snapshot that has it."""
    metrics = [metric for record in evidence.records for snapshot in record.snapshots for metric in snapshot.metrics]
    return {scope: str(value) for metric in metrics if metric.name == LINK for scope, value in metric.values.items()}
