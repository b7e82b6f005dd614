"""The report on a fleet of any size: every host is looked at once, and judged in full only where something is to be told of it.

First look (`Survey`), in as many processes as there are processors: each reads, believes or quarantines the records of its part
of the hosts, and takes from them what the fleet is measured by. Then medians and majorities are known, and whoever is flagged
is judged in full, with its gang. What comes out does not depend on the number of processes, nor on which of them read what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.diff.against_baseline import BaselineDiff, diff_against_baseline
from fleet.judge.criteria import Pack
from fleet.judge.digests import NAME as DIGEST
from fleet.judge.judge import judge
from fleet.judge.manifest import CRITERION as ORDERED
from fleet.judge.manifest import Stock, judge_stocks
from fleet.judge.tally import Tally
from fleet.judge.waivers import Waived
from fleet.planning.test_selection import selection_summary
from fleet.records.load import Run
from fleet.report.merge import decide, host_report, merge, put_together
from fleet.report.scale_full import WHOLE_HOSTS, Full, judged_in_full, reduced
from fleet.report.scale_look import First, Job, first_look, job_of
from fleet.report.scale_shares import processes, units
from fleet.report.summary import allowances, reasons, slots, status_of
from schemas.plans import Plan
from schemas.records import MEASURED, Observation
from schemas.reports import (
    ACCEPTED,
    EXCEPTIONS,
    FAIL,
    INCONCLUSIVE,
    PASS,
    REJECTED,
    Acceptance,
    FleetReport,
    HostReport,
    LineKind,
    SummaryLine,
    Verdict,
)

MOST_VERDICTS, MOST_OF_HOST = 20_000, 200
"""Verdicts that the report holds, of all hosts and of one."""


def report_of(run: Run, packs: Sequence[Pack], *, workers: int | None = None) -> FleetReport:
    """The report on a run.

    Args:
        run: as `load` gives it.
        packs: every pack that may apply.
        workers: processes; as many as there are processors for us where it is not given.
    """
    if not run.large:
        return merge(run.plan, run.evidence, packs, events=run.events, quarantined=run.quarantined)
    job, count = job_of(run, packs), processes(run.plan, workers)
    first = first_look(job, count)
    uneasy = [host.name for host in run.plan.hosts if host.name in first.survey.uneasy]
    full = judged_in_full(job, first.survey, units(run.plan, uneasy), count)
    return _report(job, first, full)


def report_on_host(run: Run, packs: Sequence[Pack], host: str, *, workers: int | None = None) -> FleetReport:
    """Everything that is told of one host, as if the report were on it alone; compared with the whole fleet all the same.

    Raises KeyError where the plan has no such host.
    """
    plan = run.plan
    planned = plan.host(host)
    if not run.large:
        whole = merge(plan, run.evidence, packs, events=run.events, quarantined=run.quarantined)
        return _only(plan, whole, whole.verdicts, next(found for found in whole.hosts if found.name == host))
    first = first_look(job_of(run, packs), processes(plan, workers))
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
        part, [report], verdicts, packs, quarantined=refused, ended=first.ended, since=BaselineDiff(), judged=()
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
            lines=(
                SummaryLine(kind=LineKind.COUNT, title=f"Host {report.name} alone", text=report.decision),
                *selection_summary(plan),
                *allowances([plan.host(report.name)]),
                *reasons(own, slots((report.name, gpu) for gpu in report.gpus)),
            ),
        ),
        coverage=report.coverage,
        judged=(),
    )


def _report(job: Job, first: First, full: Full) -> FleetReport:
    run, packs, survey = job.run, job.packs, first.survey
    plan = run.plan
    manifest = _of_manifest(plan, first.stocks)
    tally = survey.tally
    tally.update(full.tally)
    for verdict in manifest:
        tally.add(verdict)
    exceptions = sorted(
        [*full.verdicts, *(verdict for verdict in manifest if verdict.verdict != PASS)],
        key=lambda verdict: job.places[verdict.host],
    )
    hosts = _decided(plan, {**first.hosts, **full.hosts}, manifest)
    kept = list(_bounded(exceptions))
    judged = tally.judged(_serials(hosts))
    report = put_together(
        plan,
        _with_facts(hosts, list(job.places), first, full),
        [*exceptions, *(item for item in manifest if item.verdict == PASS), *_stand_ins(tally), *_judged(first, full)],
        packs,
        quarantined=[*run.quarantined, *first.quarantined],
        ended=first.ended or plan.created,
        since=diff_against_baseline(plan, run.evidence, packs),
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
        found[at] = reduced(found[at])
    return found


def _with_facts(hosts: Iterable[HostReport], names: Sequence[str], first: First, full: Full) -> list[HostReport]:
    """The hosts with what the summary is told by: one measurement of each kind, and with whom they were started."""
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


def _judged(first: First, full: Full) -> Iterator[Verdict]:
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
