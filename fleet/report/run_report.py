"""Judge a run of any size and return its report.

The records are read in two passes: the first gathers the statistics of the fleet, the second judges each host with these
statistics. For a large fleet, each pass uses one process per processor. The report does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fleet import progress
from fleet.diagnosis.diagnose import diagnose
from fleet.diff.against_baseline import BaselineDiff, diff_against_baseline
from fleet.diff.against_baseline import summary as changes_summary
from fleet.judge.advisories import shipped_advisories
from fleet.judge.criteria import Pack
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.gather import Gatherer
from fleet.judge.judge import host_view
from fleet.judge.wiring.cables import Cables, cable_ends
from fleet.planning.test_selection import selection_summary
from fleet.records.load import Run
from fleet.report.formatting import decision_name
from fleet.report.hosts import HostJudge, JudgedHosts, RunContext, context_of, units
from fleet.report.merge import fleet_report
from fleet.report.replaced import replaced_lines
from fleet.report.summary import allowances, cause_lines, pci_slots, status_of
from fleet.report.vulnerabilities import compare_versions, vulnerabilities, vulnerability_lines
from fleet.report.workers import Share, map_shares, process_count, shares
from schemas.plans import Plan
from schemas.reports import Acceptance, FleetReport, HostReport, LineKind, Quarantined, SummaryLine
from schemas.run_directory import record_name


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The input of a pass, which is the same for all processes."""

    run: Run
    context: RunContext
    stats: FleetStats | None = None
    """Statistics of the whole fleet; None in the first pass."""


@dataclass(kw_only=True)
class _Judged:
    """The results of one process in the second pass."""

    hosts: JudgedHosts
    quarantined: list[Quarantined] = field(default_factory=list)


def report_of(run: Run, packs: Sequence[Pack], *, jobs: int | None = None) -> FleetReport:
    """Return the report on a run.

    Args:
        run: the run, from `fleet.records.load.load`.
        packs: every pack that may apply.
        jobs: number of processes; None: one for few hosts, else one per processor.
    """
    job = _Job(run=run, context=context_of(run.plan, packs, run.events, advisories=shipped_advisories()))
    all_shares = shares(units(run.plan), process_count(len(run.plan.hosts), jobs))
    stats = _statistics(job, all_shares)
    progress.begin("judging hosts", len(run.plan.hosts))
    first, *others = map_shares(_judge, replace(job, stats=stats), all_shares)
    for other in others:
        first.hosts.update(other.hosts)
        first.quarantined += other.quarantined
    return fleet_report(
        job.context,
        stats,
        first.hosts,
        quarantined=[*run.rejected, *first.quarantined],
        diff=diff_against_baseline(run.plan, run.evidence, packs),
    )


def report_on_host(run: Run, packs: Sequence[Pack], host: str, *, jobs: int | None = None) -> FleetReport:
    """Return the full report on one host, judged with the statistics of the whole fleet.

    Raises:
        KeyError: the plan has no such host.
    """
    plan, planned = run.plan, run.plan.host(host)
    job = _Job(run=run, context=context_of(plan, packs, run.events, in_full=True))
    stats = _statistics(job, shares(units(plan), process_count(len(plan.hosts), jobs)))
    judged = _judge(replace(job, stats=stats), units(plan, [host]))
    part = replace(plan.only(plan.gangs().get(planned.gang) or (host,)), manifest=plan.manifest)
    context = replace(job.context, plan=part)
    records = (record_name(host), record_name(host, planned.gang))
    rejected = [item for item in judged.quarantined if item.path in records]
    diff = diff_against_baseline(plan.only((host,)), run.evidence, packs)
    gang_report = fleet_report(context, stats, judged.hosts, quarantined=rejected, diff=diff)
    report = next(report for report in gang_report.hosts if report.name == host)
    return _only_host(plan, gang_report, report, diff, cable_ends(plan.manifest, stats.links))


def _statistics(job: _Job, all_shares: Sequence[Share]) -> FleetStats:
    """Return the statistics of all hosts. Records that pass validation here are not validated again in the second pass."""
    progress.begin("reading records", len(job.run.plan.hosts))
    (stats, _), *others = gathered = map_shares(_gather, job, all_shares)
    for other, _ in others:
        stats.update(other)
    for _, checked in gathered:
        job.run.evidence.reader.checked |= checked
    stats.complete()
    return stats


def _gather(job: _Job, share: Share) -> tuple[FleetStats, dict[str, bytes]]:
    """Return the statistics of a share of the hosts, and path -> digest of each record file that passed validation."""
    context = job.context
    gatherer = Gatherer(context.planned)
    for unit in share:
        part = context.plan.only(unit)
        for name in unit:
            gatherer.add(host_view(part, name, job.run.evidence[name], context.packs))
            progress.advance()
    return gatherer.finish(), job.run.evidence.reader.checked


def _judge(job: _Job, share: Share) -> _Judged:
    """Return the results on a share of the hosts."""
    if job.stats is None:
        raise ValueError("the statistics of the fleet are missing: gather them before judging hosts")
    judge = HostJudge(job.context, job.stats)
    quarantined: list[Quarantined] = []
    for unit in share:
        evidence = {}
        for name in unit:
            evidence[name], rejected = job.run.evidence.read(name)
            quarantined += rejected
        judge.add(unit, evidence)
        progress.advance(len(unit))
    return _Judged(hosts=judge.finish(), quarantined=quarantined)


def _only_host(
    plan: Plan, gang_report: FleetReport, report: HostReport, diff: BaselineDiff, cables: Cables
) -> FleetReport:
    """Return `gang_report` reduced to one host (`report`).

    `gang_report` covers the host, and the other hosts of its gang if it has one. A gang is the hosts of one multi-node launch.
    """
    verdicts = tuple(verdict for verdict in gang_report.verdicts if verdict.host == report.name)
    causes = diagnose(verdicts, plan.gangs(), cables)
    versions = compare_versions(plan, [report], shipped_advisories())
    vulnerable = vulnerabilities(versions)
    return replace(
        gang_report,
        hosts=(report,),
        verdicts=verdicts,
        causes=causes,
        decision=report.decision,
        acceptance=Acceptance(
            status=status_of(plan, report.decision, verdicts),
            lines=(
                SummaryLine(
                    kind=LineKind.COUNT,
                    title=f"Host {report.name} alone",
                    text=decision_name(gang_report, report.decision),
                ),
                *selection_summary(plan),
                *allowances([plan.host(report.name)]),
                *vulnerability_lines(plan, versions, vulnerable, shipped_advisories()),
                *replaced_lines(gang_report.replaced),
                *changes_summary(plan, diff),
                *cause_lines(causes, verdicts, pci_slots((report.name, gpu) for gpu in report.gpus)),
            ),
        ),
        coverage=report.coverage,
        vulnerabilities=vulnerable,
        judged=(),
    )
