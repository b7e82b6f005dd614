"""judge(plan, evidence, packs) -> verdicts. A pure function: the same input, the same verdicts, today or in a year.

What the plan expects and nobody saw is inconclusive (`expected`). What was seen is held against every criterion that speaks
of it (`held`), where need be against the fleet's other parts (`outliers`, `uniform`, `digests`), against its own beginning
(`drift`), and against what was ordered (`manifest`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge import expectations
from fleet.judge.baseline import judge_presence
from fleet.judge.criteria import Pack
from fleet.judge.culprits import with_culprits
from fleet.judge.digests import judge_digests
from fleet.judge.drift import soaked, with_course, with_drift
from fleet.judge.evaluate import held
from fleet.judge.evidence import Evidence, HostView, Planned
from fleet.judge.fleet_stats import Known
from fleet.judge.localization import judge_pairs
from fleet.judge.manifest import judge_manifest
from fleet.judge.missing import with_missing
from fleet.judge.outliers import Fleet
from fleet.judge.paths import normal_paths, with_lost_path
from fleet.judge.stragglers import with_causes
from fleet.judge.uniformity import Groups, observed, uniform
from fleet.judge.waivers import Waived
from schemas.plans import Plan
from schemas.reports import Verdict, VerdictKind

__all__ = ["Evidence", "judge"]


def judge(
    plan: Plan,
    evidence: Mapping[str, Evidence],
    packs: Sequence[Pack],
    known: Known | None = None,
    well: Collection[str] = (),
) -> list[Verdict]:
    """Every verdict on every host of the plan, in plan order.

    Args:
        plan: what must exist. A host of the plan that `evidence` lacks is inconclusive.
        evidence: host -> what it left behind.
        packs: every pack that may apply; which ones do is read from the plan and the GPUs' names.
        known: what is known of the whole fleet, where these hosts are a part of it; gangs are never divided. It learns which
            paths are normal for these hosts.
        well: hosts of which it is known that by themselves, and against the fleet, they pass: of these only what their gang
            makes of them is told.
    """
    left = {host.name: with_drift(evidence.get(host.name, Evidence())) for host in plan.hosts}
    views = [HostView(plan, host, left[host.name], packs) for host in plan.hosts]
    planned = Planned(plan)
    known = known or Known(planned, views)
    found = [
        (view, [] if view.host.name in well else list(_of_host(view, known.fleet, known.groups))) for view in views
    ]
    normal = known.normal = known.normal | normal_paths(found)
    verdicts = [
        with_course(view, with_missing(view, with_lost_path(view, verdict, of_host, normal), known.slots))
        for view, of_host in found
        for verdict in with_culprits(view, of_host)
    ]
    verdicts = with_causes(views, verdicts, known.ranks)
    believed = [view for view in views if view.has_record]
    everything = [
        *verdicts,
        *judge_digests([view for view in believed if view.host.name not in well], planned, known.digests),
        *judge_pairs(believed, verdicts),
        *expectations.duplicates(left, known.twins),
        *expectations.divided(plan, left),
        *judge_manifest(plan, views),
    ]
    waived = Waived(plan.waivers, plan.created)
    return [waived.verdict(verdict) for verdict in everything] if plan.waivers else everything


def _of_host(view: HostView, fleet: Fleet, groups: Groups) -> Iterator[Verdict]:
    """The verdicts on one host; `fleet` and `groups` are what its figures and its versions may be compared with."""
    if not view.has_record:
        reason = view.evidence.problem or "the host left no record"
        yield _with_user(view, view.inconclusive("record", "host", reason))
        return
    if view.evidence.problem:
        verdict = view.inconclusive("host.events", "host", view.evidence.problem, kind=VerdictKind.UNFINISHED)
        yield _with_user(view, verdict)
    yield from without_criteria(view)
    for criterion in view.criteria().values():
        if criterion.same_as_fleet is None:
            verdicts = [*held(view, criterion, fleet)]
            silent = not verdicts
        else:
            verdicts = [*uniform(view, criterion, groups)]
            silent = criterion.same_as_fleet and not verdicts and not observed(view, criterion)
        yield from verdicts
        if silent and view.must_speak(criterion):
            reason = "nothing was observed that this criterion speaks of"
            yield view.inconclusive(criterion.name, "host", reason, criterion.stage, criterion=criterion)


def _with_user(view: HostView, verdict: Verdict) -> Verdict:
    """Return the verdict on a host of which something is missing; if that is because others use it, with who does."""
    user = view.evidence.user
    return replace(verdict, kind=VerdictKind.IN_USE, user=user) if user else verdict


def without_criteria(view: HostView) -> Iterator[Verdict]:
    """What can be said of a host that left a record before any criterion is looked at."""
    yield from expectations.model(view)
    yield from expectations.constancy(view)
    yield from expectations.collectors(view)
    yield from expectations.planned(view)
    yield from expectations.reported(view)
    yield from expectations.unseen(view)
    yield from soaked(view)
    yield from judge_presence(view)
