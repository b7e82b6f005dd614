"""Judge the evidence of a run, and merge the results into the fleet report. This module reads and writes no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fleet.diagnosis.diagnose import diagnose
from fleet.diff.against_baseline import BaselineDiff, diff_against_baseline
from fleet.judge.advisories import NO_ADVISORIES, Advisories
from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.gather import gather
from fleet.judge.judge import host_views, with_waivers
from fleet.judge.manifest import judge_inventories
from fleet.judge.wiring import cable_ends, judge_links
from fleet.report.facts import HostFacts, fleet_figures
from fleet.report.hosts import (
    MEASURED_HOSTS,
    HostJudge,
    JudgedHosts,
    RunContext,
    context_of,
    decide,
    units,
    without_measurements,
    worst_decision,
)
from fleet.report.measure_again import measure_again
from fleet.report.replaced import replaced_criteria
from fleet.report.summary import SummaryInput, acceptance
from fleet.report.unjudged import not_judged
from fleet.report.vulnerabilities import compare_versions, vulnerabilities, vulnerability_lines
from schemas import VERSION
from schemas.plans import Plan
from schemas.reports import (
    ALL,
    EXCEPTIONS,
    FAIL,
    PASS,
    REJECTED,
    Coverage,
    FleetReport,
    HostReport,
    Quarantined,
    Verdict,
)

MAX_VERDICTS, MAX_VERDICTS_OF_HOST = 20_000, 200
"""Maximum number of verdicts in a report that leaves out passes, and maximum number of them on one host. The second maximum
applies only if more than MAX_VERDICTS verdicts do not pass."""


def merge(
    plan: Plan,
    evidence: Mapping[str, Evidence],
    packs: Sequence[Pack],
    *,
    events: Mapping[str, Sequence[str]] | None = None,
    quarantined: Iterable[Quarantined] = (),
    advisories: Advisories = NO_ADVISORIES,
) -> FleetReport:
    """Return the report on a run.

    Args:
        plan: the plan of the run: its hosts, and the observations that must exist.
        evidence: host -> its records.
        packs: every pack that may apply.
        events: host -> events that the control node recorded.
        quarantined: rejected files of the run directory.
        advisories: published vulnerabilities to list.
    """
    context = context_of(plan, packs, events or {}, advisories=advisories)
    stats = gather(context.planned, host_views(plan, evidence, packs))
    judge = HostJudge(context, stats)
    for unit in units(plan):
        judge.add(unit, evidence)
    return fleet_report(
        context, stats, judge.finish(), quarantined=quarantined, diff=diff_against_baseline(plan, evidence, packs)
    )


def fleet_report(
    context: RunContext,
    stats: FleetStats,
    judged: JudgedHosts,
    *,
    quarantined: Iterable[Quarantined],
    diff: BaselineDiff,
) -> FleetReport:
    """Return the report on a run from the results on all of its hosts."""
    plan, tally = context.plan, judged.tally
    wiring = judge_links(plan, stats.links)
    gpus = {name: host.gpus for name, host in judged.hosts.items()}
    manifest = with_waivers(plan, [*judge_inventories(plan, stats.inventories), *wiring.verdicts], gpus)
    for verdict in manifest:
        tally.add(verdict)
    verdicts = sorted([*judged.verdicts, *manifest], key=lambda verdict: context.positions[verdict.host])
    exceptions = [verdict for verdict in verdicts if verdict.verdict != PASS]
    hosts = _host_reports(context, judged.hosts, manifest)
    rows = tally.judged(_serials(hosts))
    decision = worst_decision(host.decision for host in hosts)
    replaced = replaced_criteria(context.packs, hosts)
    listed = verdicts if context.in_full else _limit_verdicts(exceptions)
    causes = diagnose(listed, plan.gangs(), cable_ends(plan.manifest, stats.links))
    versions = compare_versions(plan, hosts, context.advisories)
    vulnerable = vulnerabilities(versions)
    summary = SummaryInput(
        plan=plan,
        hosts=hosts,
        facts={host.name: judged.facts[host.name] for host in plan.hosts},
        judged=rows,
        exceptions=exceptions,
        listed=listed,
        causes=causes,
        manifest=manifest,
        wiring=wiring.summary,
        diff=diff,
        replaced=replaced,
        machines=stats.machines.shared(),
        excesses=tuple(stats.stated.excesses()),
        version_caveats=tuple(vulnerability_lines(plan, versions, vulnerable, context.advisories)),
        compared={
            item.name.split(".")[0]
            for pack in context.packs
            if any(pack.name in host.packs for host in hosts)
            for item in pack.criteria
            if item.vs_fleet
        },
    )
    total = sum(row.passed + row.failed + row.inconclusive for row in rows)
    return FleetReport(
        run_id=plan.run_id,
        profile=plan.profile,
        rehearsal=plan.rehearsal,
        simulated=plan.simulated,
        measure_again=measure_again(plan),
        site=plan.site,
        purchase_order=plan.purchase_order,
        operator=plan.operator,
        decision=decision,
        acceptance=acceptance(summary, decision),
        began=plan.created,
        ended=judged.ended or plan.created,
        rackproof=VERSION,
        coverage=_total(host.coverage for host in hosts),
        hosts=tuple(hosts),
        verdicts=tuple(listed),
        causes=causes,
        quarantined=tuple(sorted(quarantined, key=lambda item: item.path)),
        not_judged=not_judged(summary.facts, rows),
        unknown=_unknown(hosts, summary.facts, context.packs),
        waivers=plan.waivers,
        baseline=plan.baseline.digest if plan.baseline else "",
        changes=diff.changes,
        replaced=replaced,
        vulnerabilities=vulnerable,
        judged=rows,
        detail=ALL if context.in_full else EXCEPTIONS,
        left_out=total - len(listed),
    )


def _host_reports(
    context: RunContext, reports: Mapping[str, HostReport], manifest: Iterable[Verdict]
) -> list[HostReport]:
    """Return the reports on the hosts, in the order of the plan.

    `manifest` has the verdicts of `judge_inventories` and `judge_links`. Each decision is based on them too.

    In a large fleet at most MEASURED_HOSTS hosts keep their measurements. Rejected hosts come first, then the others, both in the
    order of the plan. Here a host counts as rejected if `reports` rejects it: failures in `manifest` are not considered.
    """
    hosts = [reports[host.name] for host in context.plan.hosts]
    if not context.in_full:
        with_measurements = [position for position, host in enumerate(hosts) if host != without_measurements(host)]
        with_measurements.sort(key=lambda position: (hosts[position].decision != REJECTED, position))
        for position in with_measurements[MEASURED_HOSTS:]:
            hosts[position] = without_measurements(hosts[position])
    manifest_of: dict[str, list[Verdict]] = {}
    for verdict in manifest:
        manifest_of.setdefault(verdict.host, []).append(verdict)
    for position, host in enumerate(hosts):
        if host.name in manifest_of and any(verdict.blocks_acceptance for verdict in manifest_of[host.name]):
            hosts[position] = replace(host, decision=worst_decision([host.decision, decide(manifest_of[host.name])]))
    return hosts


def _limit_verdicts(exceptions: Sequence[Verdict]) -> list[Verdict]:
    """Return at most MAX_VERDICTS of these verdicts, in their order.

    If there are more, keep at most MAX_VERDICTS_OF_HOST of each host. First of all, keep one failure and one inconclusive verdict
    of each host, because they say why it is rejected or incomplete. Then keep failures before inconclusive verdicts. In each
    case, verdicts with few others of the same check on the same part, of this host or of other hosts, are kept first; then those
    with few others of the same check on the host. So the many verdicts of one fault, such as a slow switch, do not displace the
    only verdict on another fault or on another part.
    """
    if len(exceptions) <= MAX_VERDICTS:
        return list(exceptions)
    earlier: Counter[tuple[str, ...]] = Counter()
    ranks: list[tuple[bool, int, int, int]] = []
    first: dict[tuple[str, bool], tuple[bool, int, int, int]] = {}
    for index, verdict in enumerate(exceptions):
        check = (verdict.verdict, verdict.criterion, verdict.name)
        of_part, of_host = (*check, "part", verdict.part_scope), (*check, "host", verdict.host)
        rank = (verdict.verdict != FAIL, earlier[of_part], earlier[of_host], index)
        ranks.append(rank)
        earlier.update((of_part, of_host))
        kind = verdict.host, verdict.verdict == FAIL
        first[kind] = min(rank, first.get(kind, rank))
    reasons = set(first.values())
    counts: Counter[str] = Counter()
    kept: set[int] = set()
    for *_, index in sorted(ranks, key=lambda rank: (rank not in reasons, rank)):
        host = exceptions[index].host
        if len(kept) < MAX_VERDICTS and counts[host] < MAX_VERDICTS_OF_HOST:
            counts[host] += 1
            kept.add(index)
    return [verdict for index, verdict in enumerate(exceptions) if index in kept]


def _serials(hosts: Iterable[HostReport]) -> dict[tuple[str, str], str]:
    return {(host.name, f"gpu={gpu.index}"): gpu.serial for host in hosts for gpu in host.gpus}


def _total(coverages: Iterable[Coverage]) -> Coverage:
    total: Counter[str] = Counter()
    for coverage in coverages:
        total.update(vars(coverage))
    return Coverage(
        **{key: total[key] for key in ("expected", "measured", "missing", "error", "skipped", "unsupported")}
    )


def _unknown(hosts: Sequence[HostReport], facts: Mapping[str, HostFacts], packs: Iterable[Pack]) -> dict[str, str]:
    """Return name of a measured figure -> why a pack of these hosts has no reference value for it."""
    applied = {name for host in hosts for name in host.packs}
    measured = {name for _, name, _ in fleet_figures(facts)}
    return {
        name: why for pack in packs if pack.name in applied for name, why in pack.unknown.items() if name in measured
    }
