"""Plan, evidence and verdicts -> the fleet report. Pure: the same input in any order gives the same report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fleet.diff.against_baseline import BaselineDiff, diff_against_baseline
from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence, Index, Planned
from fleet.judge.judge import judge
from fleet.judge.pack_selection import packs_for
from fleet.judge.tally import Tally
from fleet.records.versions import versions
from fleet.report.summary import acceptance
from fleet.report.unjudged import not_judged
from schemas import VERSION
from schemas.plans import Plan, PlannedHost
from schemas.records import ERROR, MEASURED, SKIPPED, UNSUPPORTED
from schemas.reports import (
    ACCEPTED,
    FAIL,
    INCOMPLETE,
    INCONCLUSIVE,
    REJECTED,
    Coverage,
    FleetReport,
    HostReport,
    Judged,
    Quarantined,
    Verdict,
)
from schemas.run_directory import record_name
from schemas.timeline import Soak, thinned

LINK = "gpu.peer.link"
MOST_BUCKETS = 40
"""Of a soak's timeline."""


def merge(
    plan: Plan,
    evidence: Mapping[str, Evidence],
    packs: Sequence[Pack],
    *,
    events: Mapping[str, Sequence[str]] | None = None,
    quarantined: Iterable[Quarantined] = (),
) -> FleetReport:
    """The report on the run.

    Args:
        plan: what must exist.
        evidence: host -> what it left behind.
        packs: every pack that may apply.
        events: host -> what the control node saw happen to it.
        quarantined: files in the run directory that were not believed.
    """
    verdicts = judge(plan, evidence, packs)
    of_host: dict[str, list[Verdict]] = {host.name: [] for host in plan.hosts}
    for verdict in verdicts:
        of_host[verdict.host].append(verdict)
    hosts = tuple(
        host_report(
            plan,
            host,
            evidence.get(host.name, Evidence()),
            of_host[host.name],
            packs,
            tuple((events or {}).get(host.name, ())),
        )
        for host in plan.hosts
    )
    records = [record for left in evidence.values() for record in left.records]
    tally = Tally(Planned(plan), {host.name: place for place, host in enumerate(plan.hosts)})
    for verdict in verdicts:
        tally.add(verdict)
    return put_together(
        plan,
        hosts,
        verdicts,
        packs,
        quarantined=quarantined,
        ended=max((record.ended for record in records), default=plan.created),
        since=diff_against_baseline(plan, evidence, packs),
        judged=tally.judged(),
    )


def put_together(
    plan: Plan,
    hosts: Sequence[HostReport],
    verdicts: Sequence[Verdict],
    packs: Sequence[Pack],
    *,
    quarantined: Iterable[Quarantined],
    ended: str,
    since: BaselineDiff,
    judged: tuple[Judged, ...],
) -> FleetReport:
    """The report from what is told of each host; of verdicts that pass one of each kind is enough."""
    strays = tuple(sorted(quarantined, key=lambda item: item.path))
    decision = decide(verdicts, [host.decision for host in hosts])
    return FleetReport(
        run_id=plan.run_id,
        profile=plan.profile,
        rehearsal=plan.rehearsal,
        simulated=plan.simulated,
        decision=decision,
        acceptance=acceptance(plan, decision, verdicts, hosts, since),
        began=plan.created,
        ended=ended,
        rackproof=VERSION,
        coverage=_total(host.coverage for host in hosts),
        hosts=tuple(hosts),
        verdicts=tuple(verdicts),
        quarantined=strays,
        not_judged=not_judged(hosts, verdicts),
        unknown=_unknown(hosts, packs),
        waivers=plan.waivers,
        baseline=plan.baseline.digest if plan.baseline else "",
        changes=since.changes,
        judged=judged,
    )


def decide(verdicts: Iterable[Verdict], host_decisions: Iterable[str] = ()) -> str:
    """`rejected` where anything fails, else `incomplete` where anything is inconclusive, else `accepted`.

    What somebody answers for (a waiver) does not count.
    """
    judged = list(verdicts)
    found = {verdict.verdict for verdict in judged if verdict.stands}
    if FAIL in found or REJECTED in (decisions := set(host_decisions)):
        return REJECTED
    if INCONCLUSIVE in found or not judged or INCOMPLETE in decisions:
        return INCOMPLETE
    return ACCEPTED


def host_report(
    plan: Plan,
    host: PlannedHost,
    left: Evidence,
    verdicts: Sequence[Verdict],
    packs: Sequence[Pack],
    events: tuple[str, ...],
) -> HostReport:
    """What is told of one host."""
    applied = packs_for(plan, host, left.gpus(), packs)[0]
    return HostReport(
        name=host.name,
        rack=host.rack,
        decision=decide(verdicts),
        record=record_name(host.name),
        coverage=_coverage(plan, host, left),
        gpus=left.gpus(),
        software=versions(left, {item.id: item for pack in applied for item in pack.criteria}.values()),
        packs=tuple(pack.name for pack in applied),
        events=events,
        launches=left.launches(),
        measurements=tuple(left.benchmarks()),
        links=_links(left),
        soak=_soak(left),
    )


def _soak(left: Evidence) -> Soak | None:
    """The host's soak with as many buckets as a picture needs."""
    found = next((record.soak for record in left.records if record.soak), None)
    return replace(found, timeline=thinned(found.timeline, MOST_BUCKETS)) if found else None


def _coverage(plan: Plan, host: PlannedHost, left: Evidence) -> Coverage:
    seen = Index(left.benchmarks())
    statuses = Counter(
        found.status if (found := seen.find(item, scope)) else ""
        for item in plan.expected_of(host)
        for scope in plan.scopes_of(host, item)
    )
    return Coverage(
        expected=statuses.total(),
        measured=statuses[MEASURED],
        missing=statuses[""],
        error=statuses[ERROR],
        skipped=statuses[SKIPPED],
        unsupported=statuses[UNSUPPORTED],
    )


def _links(left: Evidence) -> dict[str, str]:
    """What links each pair of the host's GPUs, as the last snapshot that could read it says."""
    metrics = [metric for record in left.records for taken in record.snapshots for metric in taken.metrics]
    return {scope: str(value) for metric in metrics if metric.name == LINK for scope, value in metric.values.items()}


def _total(coverages: Iterable[Coverage]) -> Coverage:
    total: Counter[str] = Counter()
    for coverage in coverages:
        total.update(vars(coverage))
    return Coverage(
        **{key: total[key] for key in ("expected", "measured", "missing", "error", "skipped", "unsupported")}
    )


def _unknown(hosts: Sequence[HostReport], packs: Iterable[Pack]) -> dict[str, str]:
    applied = {name for host in hosts for name in host.packs}
    measured = {seen.name for host in hosts for seen in host.measurements if seen.status == MEASURED}
    return {
        name: why for pack in packs if pack.name in applied for name, why in pack.unknown.items() if name in measured
    }
