"""The report on a fleet of any size: every host is looked at once, and judged in full only where something is to be told of it.

First look (`Survey`), in as many processes as there are processors: each reads, believes or quarantines the records of its part
of the hosts, and takes from them what the fleet is measured by. Then medians and majorities are known, and whoever is flagged
is judged in full, with its gang. What comes out does not depend on the number of processes, nor on which of them read what.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fleet.choice import told
from fleet.diff import Since, since_accepted
from fleet.judge import expected
from fleet.judge.criteria import Criterion, Pack
from fleet.judge.digests import NAME as DIGEST
from fleet.judge.evidence import Evidence, HostView, Planned, criteria_of, packs_for
from fleet.judge.localise import judge_pairs
from fleet.judge.manifest import CRITERION as ORDERED
from fleet.judge.manifest import Stock, judge_stocks, stock
from fleet.judge.paths import is_bandwidth
from fleet.judge.survey import Looked, Survey, kinds_of
from fleet.judge.tally import Tally
from fleet.judge.verdict import judge
from fleet.judge.waivers import Waived
from fleet.report.load import Records, Run
from fleet.report.merge import decide, host_report, merge, put_together
from fleet.report.summary import allowances, reasons, status_of
from fleet.report.unjudged import is_busbw
from fleet.report.versions import may_be_version, versions
from schemas.plans import Plan, PlannedHost
from schemas.records import ERROR, MEASURED, SKIPPED, UNSUPPORTED, Launch, Observation
from schemas.reports import (
    ACCEPTED,
    EXCEPTIONS,
    FAIL,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    Acceptance,
    Coverage,
    FleetReport,
    HostReport,
    Quarantined,
    Verdict,
)

GANG = "gang"
"""The stage in which hosts are started together."""
ALONE = 256
"""Hosts up to which one process is faster than several."""
WHOLE_HOSTS = 64
"""Hosts that are not accepted and of which the report holds every measurement."""
MOST_VERDICTS, MOST_OF_HOST = 20_000, 200
"""Verdicts that the report holds, of all hosts and of one."""

_Part = TypeVar("_Part")
Figure = tuple[str, str]
"""Stage and name."""


@dataclass(kw_only=True)
class _Job:
    """What every process knows."""

    run: Run
    packs: Sequence[Pack]
    planned: Planned
    places: Mapping[str, int]
    survey: Survey | None = None


@dataclass(kw_only=True)
class _First:
    """What a process found at first look."""

    survey: Survey
    hosts: dict[str, HostReport] = field(default_factory=dict)
    seen: dict[str, tuple[Observation, ...]] = field(default_factory=dict)
    """Host -> one observation of each kind that it made."""
    bandwidths: dict[str, frozenset[Figure]] = field(default_factory=dict)
    """Host -> the bandwidths of collectives that some criterion judged."""
    met: dict[str, tuple[Launch, ...]] = field(default_factory=dict)
    """Host -> with whom it was started, and how that ended, launch by launch of its gang."""
    quarantined: list[Quarantined] = field(default_factory=list)
    stocks: list[Stock] = field(default_factory=list)
    ended: str = ""


@dataclass(kw_only=True)
class _Full:
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


_job: _Job


def report_of(run: Run, packs: Sequence[Pack], *, workers: int | None = None) -> FleetReport:
    """The report on a run.

    Args:
        run: as `load` gives it.
        packs: every pack that may apply.
        workers: processes; as many as there are processors for us where it is not given.
    """
    if not run.large:
        return merge(run.plan, run.evidence, packs, events=run.events, quarantined=run.quarantined)
    first, count = _first_look(run, packs, workers), _processes(run.plan, workers)
    uneasy = [host.name for host in run.plan.hosts if host.name in first.survey.uneasy]
    full = _judged_in_full(_units(run.plan, uneasy), count, first.survey)
    return _report(run, packs, first, full)


def report_on_host(run: Run, packs: Sequence[Pack], host: str, *, workers: int | None = None) -> FleetReport:
    """Everything that is told of one host, as if the report were on it alone; compared with the whole fleet all the same.

    Raises KeyError where the plan has no such host.
    """
    plan = run.plan
    planned = plan.host(host)
    if not run.large:
        whole = merge(plan, run.evidence, packs, events=run.events, quarantined=run.quarantined)
        return _only(plan, whole, whole.verdicts, next(found for found in whole.hosts if found.name == host))
    first = _first_look(run, packs, workers)
    part = plan.only(plan.gangs().get(planned.gang) or (host,))
    evidence = {name: run.evidence[name] for name in (other.name for other in part.hosts)}
    verdicts = [
        verdict
        for verdict in (*judge(part, evidence, packs, first.survey.known), *_of_manifest(plan, first.stocks))
        if verdict.host == host
    ]
    report = host_report(plan, planned, evidence[host], verdicts, packs, tuple(run.events.get(host, ())))
    refused = [item for item in first.quarantined if item.path.endswith(f"/{host}.json")]
    whole = put_together(
        part, [report], verdicts, packs, quarantined=refused, ended=first.ended, since=Since(), judged=()
    )
    return _only(plan, whole, verdicts, report)


def _only(plan: Plan, whole: FleetReport, verdicts: Iterable[Verdict], report: HostReport) -> FleetReport:
    """The report with one host and what is told of it."""
    own = tuple(verdict for verdict in verdicts if verdict.host == report.name)
    return replace(
        whole,
        hosts=(report,),
        verdicts=own,
        decision=report.decision,
        acceptance=Acceptance(
            status=status_of(plan, report.decision, own),
            summary=(
                f"Host {report.name} alone: {report.decision}",
                *told(plan),
                *allowances([plan.host(report.name)]),
                *reasons(own),
            ),
        ),
        coverage=report.coverage,
        judged=(),
    )


def _first_look(run: Run, packs: Sequence[Pack], workers: int | None) -> _First:
    global _job  # the processes inherit it: nothing of a run is sent to them
    plan = run.plan
    names = [host.name for host in plan.hosts]
    _job = _Job(run=run, packs=packs, planned=Planned(plan), places={name: at for at, name in enumerate(names)})
    count = _processes(plan, workers)
    first = _joined(_spread(_look, _shares(_units(plan, names), count), count))
    first.survey.settle(names)
    first.survey.commit(names, {host: gang for gang in plan.gangs().values() for host in gang})
    _job.survey = first.survey
    return first


def _processes(plan: Plan, workers: int | None) -> int:
    return workers or (len(os.sched_getaffinity(0)) if len(plan.hosts) > ALONE else 1)


def _units(plan: Plan, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Hosts that must be looked at together: those of a gang."""
    gangs, found = plan.gangs(), {}
    for name in names:
        gang = plan.host(name).gang
        found[gang or f" {name}"] = gangs[gang] if gang else (name,)
    return list(found.values())


def _shares(units: Sequence[tuple[str, ...]], count: int) -> list[list[tuple[str, ...]]]:
    """As many shares, each of units that stand together in the plan, and of about as many hosts."""
    total, shares = sum(map(len, units)), [list[tuple[str, ...]]() for _ in range(count)]
    before = 0
    for unit in units:
        shares[min(before * count // max(total, 1), count - 1)].append(unit)
        before += len(unit)
    return [share for share in shares if share]


def _spread(
    call: Callable[[list[tuple[str, ...]]], _Part], shares: list[list[tuple[str, ...]]], count: int
) -> list[_Part]:
    if count == 1 or len(shares) <= 1:
        return [_quietly(call, share) for share in shares]
    with multiprocessing.get_context("fork").Pool(min(count, len(shares))) as pool:
        return pool.starmap(_quietly, [(call, share) for share in shares], chunksize=1)


def _quietly(call: Callable[[list[tuple[str, ...]]], _Part], share: list[tuple[str, ...]]) -> _Part:
    """The call without the collector of cycles, of which records have none, and which would read all of them again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        return call(share)
    finally:
        if on:
            gc.enable()


# First look


def _look(share: Iterable[tuple[str, ...]]) -> _First:
    run, packs = _job.run, _job.packs
    records = Records(run.directory, run.plan, run.events, run.journal)
    found = _First(survey=Survey(_job.planned, _job.places))
    interned: dict[Any, Any] = {}
    for unit in share:
        part = run.plan.only(unit)
        views = []
        for host in part.hosts:
            left, refused = records.read(host)
            found.quarantined += refused
            views.append(HostView(part, host, left, packs))
        _look_at_unit(part, views, found, interned)
    found.survey.forget()
    return found


def _look_at_unit(part: Plan, views: Sequence[HostView], found: _First, interned: dict[Any, Any]) -> None:
    survey, run = found.survey, _job.run
    looked = [survey.look(view) for view in views]
    well = [one for one in looked if one is not None]
    more: list[Verdict] = []
    if len(well) == len(views) and part.hosts[0].gang:
        more = [*judge_pairs(views, ()), *expected.divided(part, {view.host.name: view.evidence for view in views})]
    survey.flagged |= {view.host.name for view, one in zip(views, looked, strict=True) if one is None}
    if len(well) < len(views) or any(verdict.verdict != PASS for verdict in more):
        survey.uneasy |= {view.host.name for view in views}
        more = []
    survey.take(well, more)
    for view, one in zip(views, looked, strict=True):
        name, left = view.host.name, view.evidence
        if one is not None:
            found.hosts[name] = _plain_report(view, one, interned)
            found.seen[name] = one.program.kinds
            found.bandwidths[name] = _bandwidths(one, interned)
        if launches := tuple(_met(launch, interned) for launch in left.launches() if launch.stage == GANG):
            found.met[name] = launches
        found.ended = max([found.ended, *(record.ended for record in left.records)])
        if run.plan.manifest:
            found.stocks.append(stock(view))


def _met(launch: Launch, interned: dict[Any, Any]) -> Launch:
    """What the summary tells of a launch; the same object for all who were started together."""
    key = (GANG, launch.outcome, launch.members)
    if key not in interned:
        interned[key] = replace(launch, reason="", ranks=(), log_tail="", culprit=None, observations=())
    found: Launch = interned[key]
    return found


def _plain_report(view: HostView, looked: Looked, interned: dict[Any, Any]) -> HostReport:
    """The report on a host of which nothing is told but that it passes."""
    packs = interned.setdefault(("packs", *map(id, view.packs)), tuple(pack.name for pack in view.packs))
    return HostReport(
        name=view.host.name,
        rack=view.host.rack,
        decision=ACCEPTED,
        record=f"hosts/{view.host.name}.json",
        coverage=interned.setdefault(coverage := _coverage(looked), coverage),
        gpus=view.evidence.gpus(),
        software=_software(view, interned),
        packs=packs,
        events=tuple(_job.run.events.get(view.host.name, ())),
    )


def _software(view: HostView, interned: dict[Any, Any]) -> Mapping[str, str]:
    """The versions that it told; the same object for hosts that told the same."""
    metrics, packs = view.observations.metrics, tuple(map(id, view.packs))
    names = ("versions", packs, tuple(metrics))
    if names not in interned:
        compared = [item for item in view.criteria().values() if item.same_as_fleet is not None]
        interned[names] = [name for name in metrics if may_be_version(name, compared)]
    tokens = [vars(metric).get("token", 0) for name in interned[names] for _, metric in metrics[name]]
    key = ("software", packs, *tokens, *sorted(view.evidence.software().items()), *view.evidence.places().items())
    if 0 in tokens or key not in interned:
        interned[key] = versions(view.evidence, view.criteria().values(), interned[names])
    found: Mapping[str, str] = interned[key]
    return found


def _bandwidths(looked: Looked, interned: dict[Any, Any]) -> frozenset[Figure]:
    program = looked.program
    key = ("bandwidths", id(program))
    if key not in interned:
        told = [check.template for check in program.checks if check.limit is not None]
        told += [template for _, _, _, template in program.claims]
        # The program is kept too, so that its id stays its own.
        interned[key] = frozenset((item.stage, item.name) for item in told if is_busbw(item.name)), program
    found: frozenset[Figure] = interned[key][0]
    return found


def _coverage(looked: Looked) -> Coverage:
    statuses, met = looked.program.statuses, looked.partners
    return Coverage(
        expected=statuses.total() + met,
        measured=statuses[MEASURED] + met,
        missing=statuses[""],
        error=statuses[ERROR],
        skipped=statuses[SKIPPED],
        unsupported=statuses[UNSUPPORTED],
    )


def _joined(parts: Sequence[_First]) -> _First:
    first, *others = parts
    for other in others:
        first.survey.update(other.survey)
        first.hosts |= other.hosts
        first.seen |= other.seen
        first.bandwidths |= other.bandwidths
        first.met |= other.met
        first.quarantined += other.quarantined
        first.stocks += other.stocks
        first.ended = max(first.ended, other.ended)
    return first


# Whoever is judged in full


def _judged_in_full(units: list[tuple[str, ...]], count: int, survey: Survey) -> _Full:
    """Again where it turns out that a path is normal on other hosts: then it explains no slowness on these."""
    while True:
        parts = _spread(_in_full, _shares(units, count if len(units) > count else 1), count) if units else []
        full = _Full(tally=Tally(_job.planned, _job.places))
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


def _in_full(share: Iterable[tuple[str, ...]]) -> _Full:
    run, packs, survey = _job.run, _job.packs, _job.survey
    if survey is None:
        raise RuntimeError("the first look has not been had")
    records = Records(run.directory, run.plan, run.events, run.journal)
    found = _Full(tally=Tally(_job.planned, _job.places))
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
        criteria = {host.name: _criteria(part, host, evidence[host.name]) for host in part.hosts}
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
            found.hosts[host.name] = report if whole else _reduced(report)
            found.verdicts += [verdict for verdict in mine if verdict.verdict != PASS]
            if host.name not in well:
                _facts(host.name, evidence[host.name], mine, found)
    survey.known.normal = normal
    return found


def _criteria(plan: Plan, host: PlannedHost, left: Evidence) -> Mapping[str, Criterion]:
    return criteria_of(packs_for(plan, host, left.gpus(), _job.packs)[0])


def _facts(name: str, left: Evidence, verdicts: Iterable[Verdict], found: _Full) -> None:
    """What the summary needs of a host."""
    found.seen[name] = kinds_of(left)
    judged = [item for item in verdicts if item.limit is not None and is_busbw(item.name)]
    found.bandwidths[name] = frozenset((item.stage, item.name) for item in judged)
    compared = {(item.stage, item.scope) for item in verdicts if item.name == DIGEST and item.criterion != "plan"}
    digests = [seen for seen in left.benchmarks() if seen.name == DIGEST and seen.status == MEASURED]
    found.lonely[name] = [seen for seen in digests if (seen.stage, seen.scope) not in compared]


def _reduced(report: HostReport) -> HostReport:
    """Without what fills a page: measurements, links, and what the ranks wrote."""
    launches = tuple(
        replace(launch, ranks=(), log_tail="", observations=(), timeline=None)
        for launch in report.launches
        if report.decision != ACCEPTED
    )
    soak = replace(report.soak, timeline=replace(report.soak.timeline, series=(), events=())) if report.soak else None
    return replace(report, launches=launches, measurements=(), links={}, soak=soak)


# Put together


def _report(run: Run, packs: Sequence[Pack], first: _First, full: _Full) -> FleetReport:
    plan, survey = run.plan, first.survey
    manifest = _of_manifest(plan, first.stocks)
    tally = survey.tally
    tally.update(full.tally)
    for verdict in manifest:
        tally.add(verdict)
    exceptions = sorted(
        [*full.verdicts, *(verdict for verdict in manifest if verdict.verdict != PASS)],
        key=lambda verdict: _job.places[verdict.host],
    )
    hosts = _decided(plan, {**first.hosts, **full.hosts}, manifest)
    kept = list(_bounded(exceptions))
    judged = tally.judged(_serials(hosts))
    report = put_together(
        plan,
        _with_facts(hosts, first, full),
        [*exceptions, *(item for item in manifest if item.verdict == PASS), *_stand_ins(tally), *_judged(first, full)],
        packs,
        quarantined=[*run.quarantined, *first.quarantined],
        ended=first.ended or plan.created,
        since=since_accepted(plan, run.evidence, packs),
        judged=judged,
    )
    total = sum(row.passed + row.failed + row.inconclusive for row in judged)
    return replace(report, hosts=tuple(hosts), verdicts=tuple(kept), detail=EXCEPTIONS, left_out=total - len(kept))


def _of_manifest(plan: Plan, stocks: Iterable[Stock]) -> list[Verdict]:
    waived = Waived(plan.waivers, plan.created)
    return [waived.verdict(verdict) for verdict in judge_stocks(plan, stocks)]


def _decided(plan: Plan, hosts: Mapping[str, HostReport], manifest: Iterable[Verdict]) -> list[HostReport]:
    """The hosts in the order of the plan, with what was ordered taken into account, and whole reports of few."""
    ordered: dict[str, list[Verdict]] = {}
    for verdict in manifest:
        if verdict.stands:
            ordered.setdefault(verdict.host, []).append(verdict)
    found = [hosts[host.name] for host in plan.hosts]
    rank = {ACCEPTED: 2, REJECTED: 0}
    for at, host in enumerate(found):
        if host.name in ordered:
            worse = decide(ordered[host.name])
            found[at] = replace(host, decision=min(host.decision, worse, key=lambda told: rank.get(told, 1)))
    whole = sorted(
        (at for at, host in enumerate(found) if host.measurements), key=lambda at: (found[at].decision != REJECTED, at)
    )
    for at in whole[WHOLE_HOSTS:]:
        found[at] = _reduced(found[at])
    return found


def _with_facts(hosts: Iterable[HostReport], first: _First, full: _Full) -> list[HostReport]:
    """The hosts with what the summary is told by: one measurement of each kind, and with whom they were started."""
    names = [host.name for host in _job.run.plan.hosts]
    lonely: dict[str, list[Observation]] = {
        name: [
            Observation(name=DIGEST, scope=item.scope, stage=item.stage, unit="1", status=MEASURED, value=item.value)
            for item in items
        ]
        for name, items in first.survey.lonely(names).items()
    } | full.lonely
    seen = first.seen | full.seen
    return [
        replace(
            host,
            measurements=(*seen[host.name], *lonely.get(host.name, ())),
            launches=first.met.get(host.name, ()),
        )
        for host in hosts
    ]


def _stand_ins(tally: Tally) -> Iterator[Verdict]:
    """A pass of each row that has any: for what the summary says of kinds of measurements."""
    return (row.stand_in() for row in tally.rows.values() if row.counts[PASS] and row.criterion != ORDERED)


def _judged(first: _First, full: _Full) -> Iterator[Verdict]:
    """A pass for each bandwidth that was judged on a host."""
    unlimited = first.survey.unlimited()
    for name, figures in (first.bandwidths | full.bandwidths).items():
        for stage, figure in figures if name in full.bandwidths else figures - unlimited:
            yield Verdict(
                host=name, scope="", name=figure, stage=stage, verdict=PASS, criterion="", limit=0.0, reason=""
            )


def _bounded(exceptions: Sequence[Verdict]) -> Iterator[Verdict]:
    """Failures before what is inconclusive, and not more of a host than a page bears; in the order of the plan."""
    counts: Counter[str] = Counter()
    kept: set[int] = set()
    for kind in (FAIL, INCONCLUSIVE):
        for at, verdict in enumerate(exceptions):
            if verdict.verdict == kind and len(kept) < MOST_VERDICTS and counts[verdict.host] < MOST_OF_HOST:
                counts[verdict.host] += 1
                kept.add(at)
    return (verdict for at, verdict in enumerate(exceptions) if at in kept)


def _serials(hosts: Iterable[HostReport]) -> dict[tuple[str, str], str]:
    return {(host.name, f"gpu={gpu.index}"): gpu.serial for host in hosts for gpu in host.gpus}
