"""The first look at every host of a large fleet: what it is measured by, and a report on each that plainly passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.judge import expectations
from fleet.judge.criteria import Pack
from fleet.judge.evidence import HostView, Planned
from fleet.judge.localization import judge_pairs
from fleet.judge.manifest import Stock, stock
from fleet.judge.survey import Looked, Survey
from fleet.records.load import Records, Run
from fleet.records.versions import may_be_version, versions
from fleet.report.scale_shares import Share, shares, spread, units
from fleet.report.unjudged import is_busbw
from schemas.plans import Plan
from schemas.records import ERROR, MEASURED, SKIPPED, UNSUPPORTED, Launch, Observation
from schemas.reports import ACCEPTED, PASS, Coverage, HostReport, Quarantined, Verdict
from schemas.run_directory import record_name
from schemas.stages import GANG

Figure = tuple[str, str]
"""Stage and name."""


@dataclass(kw_only=True)
class Job:
    """What every process knows."""

    run: Run
    packs: Sequence[Pack]
    planned: Planned
    places: Mapping[str, int]


@dataclass(kw_only=True)
class First:
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


def job_of(run: Run, packs: Sequence[Pack]) -> Job:
    """What every process is to know of a run."""
    places = {host.name: at for at, host in enumerate(run.plan.hosts)}
    return Job(run=run, packs=packs, planned=Planned(run.plan), places=places)


def first_look(job: Job, count: int) -> First:
    """What is found of all hosts, in `count` processes; then medians and majorities are known."""
    plan, names = job.run.plan, list(job.places)
    first = _joined(spread(_look, job, shares(units(plan, names), count), count))
    first.survey.settle(names)
    first.survey.commit(names, {host: gang for gang in plan.gangs().values() for host in gang})
    return first


def _look(job: Job, share: Share) -> First:
    run, packs = job.run, job.packs
    records = Records(run.directory, run.plan, run.events, run.journal, run.users)
    found = First(survey=Survey(job.planned, job.places))
    interned: dict[Any, Any] = {}
    for unit in share:
        part = run.plan.only(unit)
        views = []
        for host in part.hosts:
            left, refused = records.read(host)
            found.quarantined += refused
            views.append(HostView(part, host, left, packs))
        _look_at_unit(run, part, views, found, interned)
    found.survey.forget()
    return found


def _look_at_unit(run: Run, part: Plan, views: Sequence[HostView], found: First, interned: dict[Any, Any]) -> None:
    survey = found.survey
    looked = [survey.look(view) for view in views]
    well = [one for one in looked if one is not None]
    more: list[Verdict] = []
    if len(well) == len(views) and part.hosts[0].gang:
        more = [*judge_pairs(views, ()), *expectations.divided(part, {view.host.name: view.evidence for view in views})]
    survey.flagged |= {view.host.name for view, one in zip(views, looked, strict=True) if one is None}
    if len(well) < len(views) or any(verdict.verdict != PASS for verdict in more):
        survey.uneasy |= {view.host.name for view in views}
        more = []
    survey.take(well, more)
    for view, one in zip(views, looked, strict=True):
        name, left = view.host.name, view.evidence
        if one is not None:
            found.hosts[name] = _plain_report(view, one, run.events.get(name, ()), interned)
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


def _plain_report(view: HostView, looked: Looked, events: Sequence[str], interned: dict[Any, Any]) -> HostReport:
    """The report on a host of which nothing is told but that it passes."""
    packs = interned.setdefault(("packs", *map(id, view.packs)), tuple(pack.name for pack in view.packs))
    return HostReport(
        name=view.host.name,
        rack=view.host.rack,
        decision=ACCEPTED,
        record=record_name(view.host.name),
        coverage=interned.setdefault(coverage := _coverage(looked), coverage),
        gpus=view.evidence.gpus(),
        software=_software(view, interned),
        packs=packs,
        events=tuple(events),
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


def _joined(parts: Sequence[First]) -> First:
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
