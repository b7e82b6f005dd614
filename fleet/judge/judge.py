"""judge(plan, evidence, packs) -> verdicts: a pure function.

An observation that the plan expects and that was not measured gets an inconclusive verdict (`expectations`). Every other
observation is evaluated against each criterion that matches it (`evaluate`). The limit is absolute, or comes from the inventory,
the datasheet, the accepted record (`baseline`), the fleet (`outliers`, `uniformity`, `digests`), the start of a soak (`drift`) or
the manifest (`manifest`). Failures are annotated with their explanation.

A fleet of any size is judged in two steps: `gather` collects the statistics of all hosts, then `judge_hosts` judges hosts
with these statistics. A gang is the hosts of one multi-node launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge import expectations
from fleet.judge.bmc import judge_bmc, with_bmc_event, with_bmc_part
from fleet.judge.bmc_owner import with_owner_of_bmc
from fleet.judge.changed_software import with_changed_software
from fleet.judge.confidential_compute import with_confidential_compute
from fleet.judge.consistency import contradictions
from fleet.judge.criteria import MODEL, Criterion, Pack
from fleet.judge.culprits import with_culprits
from fleet.judge.detached_volumes import without_detached_volume
from fleet.judge.digests import judge_digests
from fleet.judge.domain_checks import judge_domains
from fleet.judge.drift import judge_soak, with_drift_observations, with_drift_time
from fleet.judge.duplicates import duplicate_identities, with_foreign_records
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.fabric_ports import with_port_totals
from fleet.judge.finding import FLOORS
from fleet.judge.firmware_settings import with_firmware_settings
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.gather import gather
from fleet.judge.host_view import HostView
from fleet.judge.launch_times import separate_launches
from fleet.judge.link_faults import with_link_faults
from fleet.judge.localization import attribute_pair_failures, judge_gangs
from fleet.judge.manifest import judge_manifest
from fleet.judge.missing import with_missing_gpus
from fleet.judge.modules import with_module
from fleet.judge.node_coverage import silent_nodes, unused_nodes
from fleet.judge.one_machine import with_one_machine
from fleet.judge.other_model import with_other_model
from fleet.judge.passes import Remaining
from fleet.judge.paths import with_nccl_settings, with_slow_path
from fleet.judge.port_coverage import silent_pairs, silent_ports
from fleet.judge.presence import judge_presence
from fleet.judge.processors import with_processor_limit
from fleet.judge.refusals import refused_readings
from fleet.judge.required_ports import unmeasured_ports
from fleet.judge.shared_gpus import with_other_processes
from fleet.judge.slot_limits import with_slot_limit
from fleet.judge.stated_values import with_stated_values
from fleet.judge.storage_coverage import silent_totals
from fleet.judge.stragglers import with_straggler_causes
from fleet.judge.uniformity import has_observation, uniform
from fleet.judge.virtual_hardware import with_virtual_hardware
from fleet.judge.vulnerabilities import with_advisory, with_scores
from fleet.judge.waivers import WaiverMatcher
from fleet.judge.wiring import judge_wiring
from schemas.plans import Plan
from schemas.readings import BMC
from schemas.records import Gpu
from schemas.reports import CRITICAL, FAIL, INCONCLUSIVE, RECORD, Verdict, VerdictKind

__all__ = ["Evidence", "judge"]


KERNEL_LOG = ("xid.", "sxid.", "kernel.event.")
"""Prefixes of the names of readings that are taken from the kernel log since boot."""
LOG_LIFETIME = (
    "the kernel log keeps this message until the next boot: after a reset or a repair, only a reboot clears it"
)


def judge(
    plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack], stats: FleetStats | None = None
) -> list[Verdict]:
    """Return every verdict on every host of the plan.

    Args:
        plan: what must exist. A host of the plan without evidence gets an inconclusive verdict.
        evidence: host -> its records.
        packs: every pack that may apply; plan and GPU names decide which ones do.
        stats: statistics of the whole fleet. If None, the hosts of the plan are the fleet. A plan with only a part of the fleet
            needs statistics, and must have whole gangs.
    """
    views = host_views(plan, evidence, packs)
    if stats is None:
        stats = gather(Planned(plan), views)
    of_fleet = [*judge_manifest(plan, views), *judge_wiring(plan, views).verdicts]
    gpus = {view.host.name: view.gpus for view in views}
    return with_waivers(plan, [*judge_hosts(plan, views, stats), *of_fleet], gpus)


def host_views(plan: Plan, evidence: Mapping[str, Evidence], packs: Sequence[Pack]) -> list[HostView]:
    return [host_view(plan, host.name, evidence.get(host.name, Evidence()), packs) for host in plan.hosts]


def host_view(plan: Plan, name: str, evidence: Evidence, packs: Sequence[Pack]) -> HostView:
    """Return the view of one host, with the observations that the judge derives: drift, totals of ports, CVSS scores."""
    complete = with_scores(with_port_totals(with_drift_observations(with_foreign_records(evidence))), packs)
    return HostView(plan, plan.host(name), complete, packs)


def judge_hosts(
    plan: Plan, views: Sequence[HostView], stats: FleetStats, remaining: Mapping[str, Remaining] | None = None
) -> list[Verdict]:
    """Return the verdicts on the hosts of `views`. A gang must be in `views` as a whole or not at all.

    The caller adds the verdicts on manifest and cables, and applies waivers. `remaining` maps each host to what is left to
    evaluate. Verdicts `pass` that the module `passes` has already counted are not returned.
    """
    verdicts = []
    for view in views:
        of_host = evaluate_host(view, stats, remaining[view.host.name] if remaining else None)
        of_host = with_owner_of_bmc(view, of_host, stats.serials)
        verdicts += _annotate(view, of_host, stats) if any(item.verdict == FAIL for item in of_host) else of_host
    verdicts = with_link_faults(views, with_straggler_causes(views, verdicts, stats.ranks), stats.link_faults)
    with_record = [view for view in views if view.has_record]
    evidence = {view.host.name: view.evidence for view in views}
    pair_verdicts = judge_gangs(with_record, verdicts)
    of_gangs = [
        *attribute_pair_failures(verdicts, pair_verdicts, views),
        *judge_digests(with_record, stats.planned, stats.digests),
        *judge_domains(with_record, stats.domains),
        *pair_verdicts,
        *silent_pairs(with_record),
    ]
    return [
        *with_one_machine(views, with_other_processes(views, of_gangs), stats.machines),
        *duplicate_identities(evidence, stats.duplicates),
        *expectations.partitioned_gangs(plan, evidence),
        *expectations.contradictory_members(plan, evidence),
        *separate_launches(plan, evidence),
    ]


def with_waivers(plan: Plan, verdicts: Iterable[Verdict], gpus: Mapping[str, Sequence[Gpu]]) -> list[Verdict]:
    """Return the verdicts, each with the waiver of the plan that covers it, if there is one. `gpus`: host -> its GPUs."""
    matcher = WaiverMatcher(plan.waivers, plan.created, gpus)
    return [matcher.apply(verdict) for verdict in verdicts] if plan.waivers else list(verdicts)


def evaluate_host(view: HostView, stats: FleetStats, remaining: Remaining | None) -> list[Verdict]:
    """Return the verdicts that follow from the host's own observations, without the passes that `remaining` already counts."""
    if not view.has_record:
        reason = view.evidence.problem or "the host left no record"
        record = _with_user(view, view.inconclusive(RECORD, "host", reason))
        return [record, *_bmc_verdicts(view, stats)] if view.host.bmc else [record]
    verdicts = []
    if view.evidence.problem:
        problem = view.inconclusive("host.events", "host", view.evidence.problem, kind=VerdictKind.UNFINISHED)
        verdicts.append(_with_user(view, problem))
    verdicts += without_criteria(view, remaining)
    verdicts += stats.support.judge(view)
    for criterion in view.criteria().values() if remaining is None else remaining.criteria:
        evaluated = remaining.verdicts.get(criterion.id) if remaining else None
        verdicts += by_criterion(view, criterion, stats) if evaluated is None else evaluated
    return without_looser_floors(verdicts)


def _bmc_verdicts(view: HostView, stats: FleetStats) -> list[Verdict]:
    """Return the verdicts on the BMC of a host without a record: the BMC may report why the host is dead."""
    criteria = [item for item in view.criteria().values() if item.name.startswith(BMC) and not item.same_as_fleet]
    return [*judge_bmc(view), *(verdict for item in criteria for verdict in by_criterion(view, item, stats))]


def without_looser_floors(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Drop verdicts with a derived floor (a lower limit with the basis `model`) if another verdict on the figure replaces them.

    A failure is kept if its floor is the highest critical floor that the figure misses, or the highest of all if none is
    critical. Inconclusive verdicts have no limit to compare: the first one on the figure in `verdicts` is kept.
    """
    derived = [verdict for verdict in verdicts if verdict.basis == MODEL and _misses_floor(verdict)]
    closest: dict[tuple[object, ...], Verdict] = {}
    for verdict in filter(_misses_floor, verdicts if derived else ()):
        known = closest.setdefault(_figure(verdict), verdict)
        if _closeness(verdict) > _closeness(known):
            closest[_figure(verdict)] = verdict
    looser = {id(verdict) for verdict in derived if closest[_figure(verdict)] is not verdict}
    return [verdict for verdict in verdicts if id(verdict) not in looser]


def _misses_floor(verdict: Verdict) -> bool:
    return verdict.verdict == INCONCLUSIVE or (verdict.verdict == FAIL and verdict.operator in FLOORS)


def _closeness(verdict: Verdict) -> tuple[bool, float]:
    limit = float(verdict.limit) if isinstance(verdict.limit, int | float) else -math.inf
    return verdict.severity == CRITICAL, limit


def _figure(verdict: Verdict) -> tuple[object, ...]:
    return (verdict.verdict, verdict.name, verdict.scope, verdict.stage, *sorted(verdict.params.items()))


def _with_user(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict on missing evidence. If a user or job occupied the GPUs, it has the kind `in_use` and names the user."""
    user = view.evidence.user
    return replace(verdict, kind=VerdictKind.IN_USE, user=user) if user else verdict


def by_criterion(view: HostView, criterion: Criterion, stats: FleetStats) -> list[Verdict]:
    """Return every verdict of one criterion on one host."""
    if criterion.same_as_fleet is None:
        verdicts = list(evaluate(view, criterion, stats.figures))
        unmatched = not verdicts
    else:
        verdicts = list(uniform(view, criterion, stats.groups))
        unmatched = criterion.same_as_fleet and not verdicts and not has_observation(view, criterion)
    if unmatched and view.must_match(criterion):
        reason = "no observation matches this criterion"
        verdicts.append(view.inconclusive(criterion.name, "host", reason, criterion.stage, criterion=criterion))
    return verdicts


def without_criteria(view: HostView, remaining: Remaining | None) -> Iterator[Verdict]:
    """Yield the verdicts on a host that need no criterion, except those that `remaining` makes unnecessary."""
    yield from expectations.gpu_models(view)
    yield from expectations.identity_changes(view)
    yield from expectations.collector_failures(view)
    if not (remaining and remaining.plan_is_met):
        yield from expectations.missing_observations(view)
        yield from expectations.unplanned_errors(view)
    yield from expectations.unmeasured_gpus(view)
    yield from unmeasured_ports(view)
    yield from silent_ports(view)
    yield from silent_nodes(view)
    yield from unused_nodes(view)
    yield from silent_totals(view)
    yield from refused_readings(view)
    yield from judge_bmc(view)
    yield from judge_soak(view)
    yield from judge_presence(view)
    yield from contradictions(view, remaining.figures() if remaining else None)


def _with_log_lifetime(verdict: Verdict) -> Verdict:
    """Return the verdict. If a message in the kernel log since boot makes it fail, add that only a reboot clears the message."""
    is_since_boot = verdict.name.startswith(KERNEL_LOG) and verdict.kind != VerdictKind.CHANGE
    if verdict.verdict != FAIL or not is_since_boot:
        return verdict
    detail = "; ".join(filter(None, (verdict.detail, LOG_LIFETIME)))
    return replace(verdict, reason=f"{verdict.reason}; {LOG_LIFETIME}", detail=detail)


def _annotate(view: HostView, verdicts: Sequence[Verdict], stats: FleetStats) -> list[Verdict]:
    """Return the verdicts on one host; each failure with its explanation and the part that it is attributed to."""
    normal_paths = stats.paths.paths
    attributed = with_firmware_settings(view, with_culprits(view, verdicts), stats.groups)
    annotated = []
    explained = with_changed_software(view, with_other_model(view, attributed), stats.software)
    for verdict in with_stated_values(view, explained, stats.stated):
        verdict = with_nccl_settings(view, with_slow_path(view, verdict, verdicts, normal_paths), verdicts)
        verdict = without_detached_volume(view, verdict)
        verdict = _with_log_lifetime(with_missing_gpus(view, with_module(view, verdict), stats.slots))
        verdict = with_slot_limit(view, with_virtual_hardware(view, verdict), verdicts, stats.lanes)
        verdict = with_bmc_part(with_bmc_event(view, verdict), verdicts)
        verdict = with_processor_limit(view, with_drift_time(view, verdict))
        verdict = with_confidential_compute(view, verdict, verdicts)
        annotated.append(with_advisory(view, verdict))
    return annotated
