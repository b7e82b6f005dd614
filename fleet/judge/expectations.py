"""What should be there and is not, and what cannot be true of one host: the verdicts that need no criterion."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fleet.judge.absence import with_absence
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.localization.launches import gang_attempts
from schemas.catalogue import Expectation, possible
from schemas.plans import Plan
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Gpu, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from schemas.scopes import Scope
from schemas.stages import GANG

GpuLocation = tuple[str, int]
"""Host and index of a GPU."""


def gpu_models(view: HostView) -> Iterator[Verdict]:
    """Whether a pack is for the host's GPUs, and whether they are what the inventory says."""
    if view.no_pack:
        reason = f"{view.no_pack}: name one by rackproof_gpu_model, or write one (CONTRIBUTING.md)"
        yield view.inconclusive("gpu.name", "host", reason, kind=VerdictKind.IDENTITY)
    expected = next((pack for pack in view.packs if pack.name == view.host.gpu_model), None)
    for scope in view.host.scopes if view.host.device == "gpu" else ():
        if scope not in view.names and view.measured_at(scope):
            yield view.inconclusive("gpu.name", scope, "the GPU does not tell its name")
        elif scope in view.names and expected:
            name = view.names[scope]
            reason = f"found {name}, the inventory says {view.host.gpu_model}"
            right = name in expected.gpu_names
            yield _fact(view, "gpu.name", scope, "gpu-model", name, reason, right, "inventory: rackproof_gpu_model")


def identity_changes(view: HostView) -> Iterator[Verdict]:
    """A part that was swapped, or a host that rebooted, in mid-run leaves figures that are not one part's."""
    for name in ("gpu.serial", "gpu.uuid", "gpu.name"):
        for scope in view.host.scopes:
            observation = [
                item.value for item in view.observations[name] if item.scope == scope and item.status == MEASURED
            ]
            # What a host measured alone and what it measured in its gang are records apart: each names its GPUs.
            named = [
                vars(gpu)[name.removeprefix("gpu.")]
                for record in view.evidence.records
                for gpu in record.gpus
                if f"gpu={gpu.index}" == scope
            ]
            for text in (observation, filter(None, named)):
                values = list(dict.fromkeys(text))
                if len(values) > 1:
                    reason = f"changed during the run: {', then '.join(map(str, values))}"
                    source = "a serial names one part"
                    yield _fact(view, name, scope, "identity-constant", values[-1], reason, False, source)
    uptimes = [_number(item.value) for item in view.observations["host.uptime"] if item.status == MEASURED]
    if any(later < earlier for earlier, later in itertools.pairwise(uptimes)):
        reason = "the host rebooted during the run: its counters were reset"
        yield view.inconclusive("host.uptime", "host", reason, kind=VerdictKind.CONTRADICTORY)


def _number(value: Value) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _fact(
    view: HostView, name: str, scope: str, criterion: str, value: Value, reason: str, right: bool, source: str
) -> Verdict:
    return Verdict(
        host=view.host.name,
        scope=scope,
        serial=view.serials.get(scope, ""),
        name=name,
        verdict=PASS if right else FAIL,
        criterion=criterion,
        kind=VerdictKind.IDENTITY,
        value=value,
        unit="1",
        reason=reason,
        action="none" if right else "inspect_hardware",
        source=source,
        basis="policy",
    )


def collector_failures(view: HostView) -> Iterator[Verdict]:
    """A collector that failed in any snapshot took with it what would have been seen then."""
    for name in view.observations:
        for item in view.observations[name] if name.startswith("collector.") else ():
            if item.status != MEASURED:
                when = f"{item.params['phase']} {item.stage}"
                reason = f"{item.status} {when}: {item.reason}"
                yield with_absence(view.inconclusive(name, item.scope, reason, item.stage), item)


def missing_observations(view: HostView) -> Iterator[Verdict]:
    """Inconclusive for every observation that the plan expects and that was not measured."""
    for stage in view.plan.stages:
        wanted = [item for item in view.expected if item.stage == stage.name]
        why = _stage_problem(view, stage.name)
        missing, measured, members = [], False, view.members(stage.name)
        ranks = view.plan.ranks(members)
        for item in wanted:
            if stage.name == GANG and members and not possible(item.name, ranks):
                continue  # a gang that was formed again has another number of ranks
            for scope in view.plan.scopes_of(view.host, item):
                partner = Scope.parse(scope).get("partner")
                if partner and members and partner not in members:
                    continue  # reported on the host that did not take part, not on each of its partners
                result = view.lookup.find(item, scope)
                if result is None:
                    missing.append(view.inconclusive(item.name, scope, f"not observed; {why}", stage.name, item.params))
                elif result.status == MEASURED:
                    measured = True
                elif not (result.status == UNSUPPORTED and view.lacks(item)):
                    reason = f"{result.status}: {result.reason}"
                    yield with_absence(view.inconclusive(item.name, scope, reason, stage.name, item.params), result)
        if missing and stage.name not in view.stages_seen:
            yield view.inconclusive(f"stage.{stage.name}", "host", f"nothing was observed; {why}", stage.name)
            continue
        yield from missing
        last = [launch for launch in view.evidence.launches() if launch.stage == stage.name][-1:]
        if wanted and last and last[0].outcome != "finished":
            yield _unfinished(view, stage.name, f"{last[0].outcome}: {last[0].reason}")
        if measured and not last and not missing:
            yield _unfinished(
                view, stage.name, "figures were measured and the record has no launch: its outcome is unknown"
            )
    yield from _missing_last_snapshot(view)


def _missing_last_snapshot(view: HostView) -> Iterator[Verdict]:
    """Report a missing snapshot after the last launch: the effect of the launch is unknown. A soak is read while it runs."""
    planned = [stage.name for stage in view.plan.stages if not stage.duration_s]
    finished = {launch.stage for launch in view.evidence.launches() if launch.outcome == "finished"}
    last = next((stage for stage in reversed(planned) if stage in finished), "")
    if last and not any((taken.stage, taken.phase) == (last, "after") for taken in view.evidence.snapshots()):
        reason = "the record has no snapshot after the launch, which every finished launch takes"
        yield view.inconclusive(f"stage.{last}", "host", reason, last)


def _unfinished(view: HostView, stage: str, reason: str) -> Verdict:
    return view.inconclusive(f"stage.{stage}", "host", reason, stage, kind=VerdictKind.UNFINISHED)


def unplanned_errors(view: HostView) -> Iterator[Verdict]:
    """Return an inconclusive verdict for every error of a benchmark that no planned observation covers."""
    asked: dict[tuple[str, str], list[Expectation]] = defaultdict(list)
    for item in view.plan.expected:
        asked[(item.stage, item.name)].append(item)
    lost: dict[tuple[object, ...], Observation] = {}
    for observations in view.evidence.benchmarks():
        scope_key = (observations.stage, observations.name, observations.scope)
        if observations.status == ERROR:
            lost[(*scope_key, *sorted(observations.params.items()))] = observations
        elif observations.status == MEASURED:  # the stage ran again and succeeded
            for key in [
                key for key in lost if key[:3] == scope_key and lost[key].params.items() <= observations.params.items()
            ]:
                del lost[key]
    for observations in lost.values():
        if not any(_is_planned(view, item, observations) for item in asked[(observations.stage, observations.name)]):
            reason = f"error: {observations.reason}"
            yield with_absence(
                view.inconclusive(
                    observations.name, observations.scope, reason, observations.stage, observations.params
                ),
                observations,
            )


def _is_planned(view: HostView, item: Expectation, observation: Observation) -> bool:
    """Whether the plan asks for it: then `planned` judges it, or leaves it out because so many ranks cannot make it."""
    return item.params.items() <= observation.params.items() and observation.scope in view.plan.scopes_of(
        view.host, item
    )


def _stage_problem(view: HostView, stage: str) -> str:
    launches = [launch for launch in view.evidence.launches() if launch.stage == stage]
    if not launches and stage == GANG and not any(record.gang for record in view.evidence.records):
        return "there is no record of the stage from this host"
    if not launches:
        return "the stage did not start on this host"
    reasons = [launch.reason for launch in launches if launch.outcome != "finished"]
    return reasons[-1] if reasons else "the launch finished without it"


def unmeasured_gpus(view: HostView) -> Iterator[Verdict]:
    """Every planned GPU of which nothing was measured."""
    for scope in view.unmeasured_gpus:
        reason = "nothing was observed of this GPU"
        if view.is_beyond_driver(scope):
            count = len(view.serials)
            reason += f": the driver has {count}, and numbers them from 0, so that this number tells no slot"
        yield view.inconclusive("gpu", scope, reason)


class DuplicateSerials:
    """Where each serial and each UUID was seen; several, each of other hosts, can be put together."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], GpuLocation] = {}
        self._more: dict[tuple[str, str], list[GpuLocation]] = {}

    def add(self, host: str, left: Evidence) -> None:
        """Takes the GPUs of a host."""
        for gpu in left.gpus():
            for key in _identities(gpu):
                self._add_location(key, (host, gpu.index))

    def _add_location(self, key: tuple[str, str], scope_key: GpuLocation) -> None:
        if self._first.setdefault(key, scope_key) != scope_key:
            self._more.setdefault(key, []).append(scope_key)

    def update(self, other: DuplicateSerials) -> None:
        """Takes the GPUs of other hosts."""
        for key, scope_key in other._first.items():
            self._add_location(key, scope_key)
        for key, rises in other._more.items():
            for scope_key in rises:
                self._add_location(key, scope_key)

    def others(self, key: tuple[str, str], own: GpuLocation) -> list[GpuLocation]:
        """Where else it was seen, by the names of the hosts."""
        return sorted({self._first.get(key, own), *self._more.get(key, ())} - {own})

    def hosts(self) -> set[str]:
        """Those with a part that was seen twice."""
        return {host for key, rises in self._more.items() for host, _ in (self._first[key], *rises)}


def _identities(gpu: Gpu) -> list[tuple[str, str]]:
    text = (("gpu.serial", gpu.serial), ("gpu.uuid", gpu.uuid))
    return [(kind, identity) for kind, identity in text if identity]


def duplicate_identities(evidence: Mapping[str, Evidence], known: DuplicateSerials) -> list[Verdict]:
    """The same serial or UUID seen twice: each place fails, and names the other."""
    return [
        _duplicate(host, gpu, *key, others)
        for host, left in evidence.items()
        for gpu in left.gpus()
        for key in _identities(gpu)
        if (others := known.others(key, (host, gpu.index)))
    ]


def _duplicate(host: str, gpu: Gpu, kind: str, identity: str, others: Sequence[GpuLocation]) -> Verdict:
    return Verdict(
        host=host,
        scope=f"gpu={gpu.index}",
        serial=gpu.serial,
        name=kind,
        verdict=FAIL,
        criterion="identity-unique",
        kind=VerdictKind.IDENTITY,
        value=identity,
        reason=f"{identity} is also {' and '.join(f'{other} gpu={index}' for other, index in others)}",
        action="inspect_hardware",
        source="a serial or UUID names one part",
        basis="policy",
    )


def partitioned_gangs(plan: Plan, evidence: Mapping[str, Evidence]) -> list[Verdict]:
    """Return hosts of one gang that were each measured, but never together. Hosts without any launch are reported elsewhere.

    A gang that was re-formed without a host is not partitioned from it: that host is judged by the launch it was in.
    """
    members, met = _launched_together(plan, evidence)
    result = []
    for gang, hosts in plan.gangs().items():
        for host in hosts:
            apart = [other for other in hosts if other in met and host in met and other not in met[host]]
            if apart:
                result.append(
                    Verdict(
                        host=host,
                        scope=f"gang={gang}",
                        name="stage.gang",
                        stage=GANG,
                        verdict=INCONCLUSIVE,
                        criterion="plan",
                        kind=VerdictKind.UNFINISHED,
                        reason=f"launched with {', '.join(members[host])}, and not with {', '.join(apart)}",
                        source="plan",
                    )
                )
    return result


def _launched_together(
    plan: Plan, evidence: Mapping[str, Evidence]
) -> tuple[dict[str, tuple[str, ...]], dict[str, set[str]]]:
    """Of each host that a launch of its gang worked on: with whom the last one was, and with whom any of them.

    A launch that came to its end and measured nothing has not brought anybody together.
    """
    members: dict[str, tuple[str, ...]] = {}
    met: dict[str, set[str]] = defaultdict(set)
    for gang in plan.gangs():
        for attempt in gang_attempts(plan, evidence, gang) if any(stage.name == GANG for stage in plan.stages) else ():
            for host in attempt.launches if attempt.stage == GANG and attempt.worked else ():
                members[host] = attempt.members
                met[host] |= set(attempt.members)
    return members, met
