"""The hosts of a large fleet that are judged in full, since something is to be told of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.judge.criteria import Criterion, Pack
from fleet.judge.digests import NAME as DIGEST
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from fleet.judge.pack_selection import criteria_of, packs_for
from fleet.judge.paths import is_bandwidth
from fleet.judge.survey import Survey, kinds_of
from fleet.judge.tally import Tally
from fleet.records.load import Records
from fleet.report.merge import host_report
from fleet.report.scale_look import Figure, Job
from fleet.report.scale_shares import Share, Unit, shares, spread
from fleet.report.unjudged import is_busbw
from schemas.plans import Plan, PlannedHost
from schemas.records import MEASURED, Observation
from schemas.reports import ACCEPTED, FAIL, PASS, HostReport, Verdict

WHOLE_HOSTS = 64
"""Hosts that are not accepted and of which the report holds every measurement."""


@dataclass(kw_only=True)
class Full:
    """What a process found of the hosts that are judged in full."""

    tally: Tally
    hosts: dict[str, HostReport] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    """Those that do not pass."""
    normal: set[Any] = field(default_factory=set)
    seen: dict[str, tuple[Observation, ...]] = field(default_factory=dict)
    bandwidths: dict[str, frozenset[Figure]] = field(default_factory=dict)
    lonely: dict[str, list[Observation]] = field(default_factory=dict)
    """Host -> digests that were compared with no other."""


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What every process knows: after the first look, what came of that too."""

    job: Job
    survey: Survey


def judged_in_full(job: Job, survey: Survey, units: list[Unit], count: int) -> Full:
    """The hosts of the units, in `count` processes at most.

    Again where it turns out that a path is normal on other hosts: then it explains no slowness on these.
    """
    known = _Known(job=job, survey=survey)
    while True:
        parts = spread(_in_full, known, shares(units, count if len(units) > count else 1), count) if units else []
        full = Full(tally=Tally(job.planned, job.places))
        for part in parts:
            full.tally.update(part.tally)
            full.hosts |= part.hosts
            full.verdicts += part.verdicts
            full.normal |= part.normal
            full.seen |= part.seen
            full.bandwidths |= part.bandwidths
            full.lonely |= part.lonely
        slow = any(verdict.verdict == FAIL and is_bandwidth(verdict) for verdict in full.verdicts)
        if not slow or full.normal <= survey.known.normal:
            return full
        survey.known.normal |= full.normal


def _in_full(known: _Known, share: Share) -> Full:
    job, survey = known.job, known.survey
    run, packs = job.run, job.packs
    records = Records(run.directory, run.plan, run.events, run.journal, run.users)
    found = Full(tally=Tally(job.planned, job.places))
    kept: Counter[str] = Counter()
    normal = survey.known.normal
    for unit in share:
        part = run.plan.only(unit)
        evidence = {host.name: records[host.name] for host in part.hosts}
        survey.known.normal = normal
        well = evidence.keys() - survey.flagged
        verdicts = judge(part, evidence, packs, survey.known, well)
        found.normal |= survey.known.normal
        own: dict[str, list[Verdict]] = {host.name: [] for host in part.hosts}
        criteria = {host.name: _criteria(part, host, evidence[host.name], packs) for host in part.hosts}
        for verdict in verdicts:
            if not survey.counted(verdict, criteria[verdict.host]):
                found.tally.add(verdict)
            own[verdict.host].append(verdict)
        for host in part.hosts:
            mine = own[host.name]
            if host.name in well and all(verdict.verdict == PASS for verdict in mine):
                continue
            report = host_report(run.plan, host, evidence[host.name], mine, packs, tuple(run.events.get(host.name, ())))
            kept[report.decision] += 1
            whole = report.decision != ACCEPTED and kept[report.decision] <= WHOLE_HOSTS
            found.hosts[host.name] = report if whole else reduced(report)
            found.verdicts += [verdict for verdict in mine if verdict.verdict != PASS]
            if host.name not in well:
                _facts(host.name, evidence[host.name], mine, found)
    survey.known.normal = normal
    return found


def _criteria(plan: Plan, host: PlannedHost, left: Evidence, packs: Sequence[Pack]) -> Mapping[str, Criterion]:
    return criteria_of(packs_for(plan, host, left.gpus(), packs)[0])


def _facts(name: str, left: Evidence, verdicts: Iterable[Verdict], found: Full) -> None:
    """What the summary needs of a host."""
    found.seen[name] = kinds_of(left)
    judged = [item for item in verdicts if item.limit is not None and is_busbw(item.name)]
    found.bandwidths[name] = frozenset((item.stage, item.name) for item in judged)
    compared = {(item.stage, item.scope) for item in verdicts if item.name == DIGEST and item.criterion != "plan"}
    digests = [seen for seen in left.benchmarks() if seen.name == DIGEST and seen.status == MEASURED]
    found.lonely[name] = [seen for seen in digests if (seen.stage, seen.scope) not in compared]


def reduced(report: HostReport) -> HostReport:
    """Without what fills a page: measurements, links, and what the ranks wrote."""
    launches = tuple(
        replace(launch, ranks=(), log_tail="", observations=(), timeline=None)
        for launch in report.launches
        if report.decision != ACCEPTED
    )
    soak = replace(report.soak, timeline=replace(report.soak.timeline, series=(), events=())) if report.soak else None
    return replace(report, launches=launches, measurements=(), links={}, soak=soak)
