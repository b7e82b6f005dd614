"""The report on a run directory of any size.

Two passes over the records, each in as many processes as there are processors. The first gathers the statistics of the fleet,
the second judges each host with them. The report does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fleet.diff.against_baseline import BaselineDiff, diff_against_baseline
from fleet.judge.criteria import Pack
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.gather import Gatherer
from fleet.judge.judge import host_view
from fleet.planning.test_selection import selection_summary
from fleet.records.load import Run
from fleet.report.hosts import Context, HostJudge, JudgedHosts, context_of, units
from fleet.report.merge import fleet_report
from fleet.report.summary import allowances, reasons, slots, status_of
from fleet.report.workers import Share, map_shares, process_count, shares
from schemas.plans import Plan
from schemas.reports import Acceptance, FleetReport, HostReport, LineKind, Quarantined, SummaryLine, Verdict
from schemas.run_directory import record_name


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every process needs."""

    run: Run
    context: Context
    stats: FleetStats | None = None
    """Statistics of the whole fleet; in the second pass."""


@dataclass(kw_only=True)
class _Judged:
    """What one process found in the second pass."""

    hosts: JudgedHosts
    quarantined: list[Quarantined] = field(default_factory=list)


def report_of(run: Run, packs: Sequence[Pack], *, jobs: int | None = None) -> FleetReport:
    """Return the report on a run.

    Args:
        run: from `load`.
        packs: every pack that may apply.
        jobs: number of processes; by default as many as there are processors.
    """
    job = _Job(run=run, context=context_of(run.plan, packs, run.events))
    all_shares = shares(units(run.plan), process_count(len(run.plan.hosts), jobs))
    stats = _statistics(job, all_shares)
    first, *others = map_shares(_judge, replace(job, stats=stats), all_shares)
    for other in others:
        first.hosts.update(other.hosts)
        first.quarantined += other.quarantined
    return fleet_report(
        job.context,
        stats,
        first.hosts,
        quarantined=[*run.rejected, *first.quarantined],
        since=diff_against_baseline(run.plan, run.evidence, packs),
    )


def report_on_host(run: Run, packs: Sequence[Pack], host: str, *, jobs: int | None = None) -> FleetReport:
    """Return the report on one host in full, compared with the whole fleet. Raises KeyError if the plan has no such host."""
    plan, planned = run.plan, run.plan.host(host)
    job = _Job(run=run, context=context_of(plan, packs, run.events, in_full=True))
    stats = _statistics(job, shares(units(plan), process_count(len(plan.hosts), jobs)))
    judged = _judge(replace(job, stats=stats), units(plan, [host]))
    part = replace(plan.only(plan.gangs().get(planned.gang) or (host,)), manifest=plan.manifest)
    context = replace(job.context, plan=part)
    refused = [item for item in judged.quarantined if item.path in (record_name(host), record_name(host, planned.gang))]
    whole = fleet_report(context, stats, judged.hosts, quarantined=refused, since=BaselineDiff())
    return _only(plan, whole, whole.verdicts, next(report for report in whole.hosts if report.name == host))


def _statistics(job: _Job, all_shares: Sequence[Share]) -> FleetStats:
    """Return the statistics of all hosts; the records that were checked are not checked again in the second pass."""
    (stats, _), *others = gathered = map_shares(_gather, job, all_shares)
    for other, _ in others:
        stats.update(other)
    for _, checked in gathered:
        job.run.evidence.reader.checked |= checked
    stats.settle()
    return stats


def _gather(job: _Job, share: Share) -> tuple[FleetStats, dict[str, bytes]]:
    """Return the statistics of a share of the hosts, and the records that were checked."""
    context = job.context
    gatherer = Gatherer(context.planned)
    for unit in share:
        part = context.plan.only(unit)
        for name in unit:
            gatherer.add(host_view(part, name, job.run.evidence[name], context.packs))
    return gatherer.finish(), job.run.evidence.reader.checked


def _judge(job: _Job, share: Share) -> _Judged:
    """Return the results on a share of the hosts."""
    if job.stats is None:
        raise ValueError("hosts are judged with the statistics of the fleet")
    judge = HostJudge(job.context, job.stats)
    quarantined: list[Quarantined] = []
    for unit in share:
        evidence = {}
        for name in unit:
            evidence[name], refused = job.run.evidence.read(name)
            quarantined += refused
        judge.add(unit, evidence)
    return _Judged(hosts=judge.finish(), quarantined=quarantined)


def _only(plan: Plan, whole: FleetReport, verdicts: Iterable[Verdict], report: HostReport) -> FleetReport:
    """Return the report with one host alone."""
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
