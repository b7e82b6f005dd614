"""Judge what needs no criterion: missing observations, wrong or changed identities, and partitioned gangs.

A gang is the hosts of one multi-node launch. It is partitioned if some of its hosts launched successfully, but never together.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from fleet.judge.absence import with_absence
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from fleet.judge.localization.launches import Attempt, gang_attempts
from fleet.judge.reading_consistency import UPTIME
from fleet.judge.reboots import BOOT_ID, reboots
from fleet.quantities import counted
from schemas.catalogue import Expectation, can_observe
from schemas.plans import Plan
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from schemas.scopes import Scope
from schemas.stages import GANG


def gpu_models(view: HostView) -> Iterator[Verdict]:
    """Judge whether a criteria pack covers the host's GPUs, and whether they are of the model that the inventory names.

    If all GPUs of a host are of another model, no single GPU is at fault: the inventory is wrong, or another model was delivered.
    """
    if view.no_pack:
        reason = f"{view.no_pack}: set rackproof_gpu_model to the name of a pack, or write a pack (CONTRIBUTING.md)"
        yield view.inconclusive("gpu.name", "host", reason, kind=VerdictKind.IDENTITY)
    is_judged = any(pack.name == view.host.gpu_model for pack in view.packs)
    action = "configure" if view.has_only_other_models else "inspect_hardware"
    for scope in view.host.scopes if view.host.device == "gpu" else ():
        if scope not in view.names and view.measured_at(scope):
            yield view.inconclusive("gpu.name", scope, "the GPU does not report its name")
        elif scope in view.names and is_judged:
            name, wanted, source = view.names[scope], view.host.gpu_model, "inventory: rackproof_gpu_model"
            passed = scope not in view.other_models
            reason = f"found {name}" if passed else f"found {name}, but the inventory has {wanted}"
            verdict = _identity_verdict(view, "gpu.name", scope, "gpu-model", name, reason, passed, source)
            yield (
                verdict
                if passed
                else replace(verdict, kind=VerdictKind.MODEL, limit=wanted, action=action, severity="")
            )


def identity_changes(view: HostView) -> Iterator[Verdict]:
    """Judge whether a GPU was swapped, or the host rebooted, during the run.

    After a swap, the figures of one GPU index belong to different parts. A reboot resets the counters.
    """
    for name in ("gpu.serial", "gpu.uuid", "gpu.name"):
        by_scope: dict[str, list[Value]] = defaultdict(list)
        for item in view.observations[name]:
            if item.status == MEASURED:
                by_scope[item.scope].append(item.value)
        for scope in view.host.scopes:
            readings = by_scope[scope]
            # The host record and the gang record each list the GPUs.
            recorded = [
                vars(gpu)[name.removeprefix("gpu.")]
                for record in view.evidence.records
                for gpu in record.gpus
                if f"gpu={gpu.index}" == scope
            ]
            for sequence in (readings, filter(None, recorded)):
                values = list(dict.fromkeys(sequence))
                if len(values) > 1:
                    reason = f"changed during the run: {', then '.join(map(str, values))}"
                    source = "the identity of a part does not change"
                    yield _identity_verdict(view, name, scope, "identity-constant", values[-1], reason, False, source)
    metrics = view.observations.metrics
    if reboots(metrics.get(UPTIME, ()), metrics.get(BOOT_ID, ())):
        reason = "the host rebooted during the run: its counters were reset"
        yield view.inconclusive(UPTIME, "host", reason, kind=VerdictKind.CONTRADICTORY)


def _identity_verdict(
    view: HostView, name: str, scope: str, criterion: str, value: Value, reason: str, passed: bool, source: str
) -> Verdict:
    return Verdict(
        host=view.host.name,
        scope=scope,
        serial=view.serials.get(scope, ""),
        name=name,
        verdict=PASS if passed else FAIL,
        criterion=criterion,
        kind=VerdictKind.IDENTITY,
        value=value,
        unit="1",
        reason=reason,
        action="none" if passed else "inspect_hardware",
        source=source,
        basis="policy",
    )


def collector_failures(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for each collector that failed in a snapshot: its readings are missing."""
    for name in view.observations:
        for item in view.observations[name] if name.startswith("collector.") else ():
            if item.status != MEASURED:
                when = f"{item.params['phase']} {item.stage}"
                reason = f"{item.status} {when}: {item.reason}"
                yield with_absence(view.inconclusive(name, item.scope, reason, item.stage), item)


def missing_observations(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for every observation that the plan expects and that was not measured.

    A stage of which nothing was observed gets one verdict instead. A stage gets one more verdict if its last launch failed, or
    if its figures are complete but the record has no launch of it. The host gets one more verdict if no snapshot was taken after
    the last finished launch.
    """
    for stage in view.plan.stages:
        expectations = [item for item in view.expected if item.stage == stage.name]
        why = _stage_problem(view, stage.name)
        missing, observed, measured, members = [], False, False, view.members(stage.name)
        ranks = view.plan.ranks(members)
        for item in expectations:
            if stage.name == GANG and members and not can_observe(item.name, ranks):
                continue  # the gang launched without some hosts, and the remaining ranks cannot make this observation
            for scope in view.plan.scopes_of(view.host, item):
                partner = Scope.parse(scope).get("partner")
                if partner and members and partner not in members:
                    continue  # the partner did not launch, which gives one verdict on the partner
                observation = view.lookup.find(item, scope)
                observed |= observation is not None
                if observation is None:
                    missing.append(view.inconclusive(item.name, scope, f"not observed; {why}", stage.name, item.params))
                elif observation.status == MEASURED:
                    measured = True
                elif not (observation.status == UNSUPPORTED and view.lacks(item)):
                    reason = f"{observation.status}: {observation.reason}"
                    absent = view.inconclusive(item.name, scope, reason, stage.name, item.params)
                    yield with_absence(absent, observation)
        last = [launch for launch in view.evidence.launches() if launch.stage == stage.name][-1:]
        has_failed = bool(last) and last[0].outcome != "finished"
        if missing and not observed and (has_failed or stage.name not in view.observed_stages):
            yield view.inconclusive(f"stage.{stage.name}", "host", f"nothing was observed; {why}", stage.name)
            continue
        yield from missing
        if expectations and has_failed:
            yield _unfinished(view, stage.name, f"{last[0].outcome}: {last[0].reason}")
        if measured and not last and not missing:
            yield _unfinished(
                view,
                stage.name,
                "figures were measured, but the record has no launch: whether the stage finished is unknown",
            )
    yield from _missing_last_snapshot(view)


def _missing_last_snapshot(view: HostView) -> Iterator[Verdict]:
    """Yield a verdict if no snapshot was taken after the last finished launch, because the effect of the launch is then unknown.

    Launches of a soak do not count: a soak takes snapshots while it runs.
    """
    planned = [stage.name for stage in view.plan.stages if not stage.duration_s]
    finished = {launch.stage for launch in view.evidence.launches() if launch.outcome == "finished"}
    last = next((stage for stage in reversed(planned) if stage in finished), "")
    if last and not any((taken.stage, taken.phase) == (last, "after") for taken in view.evidence.snapshots()):
        reason = "the record has no snapshot after the launch, although one is taken after every finished launch"
        yield view.inconclusive(f"stage.{last}", "host", reason, last)


def _unfinished(view: HostView, stage: str, reason: str) -> Verdict:
    return view.inconclusive(f"stage.{stage}", "host", reason, stage, kind=VerdictKind.UNFINISHED)


def unplanned_errors(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for every unplanned benchmark result with the status `error`.

    No verdict is yielded if the same figure was measured later.
    """
    planned: dict[tuple[str, str], list[Expectation]] = defaultdict(list)
    for item in view.plan.expected:
        planned[(item.stage, item.name)].append(item)
    errors: dict[tuple[object, ...], Observation] = {}
    for observation in view.evidence.benchmarks():
        figure = (observation.stage, observation.name, observation.scope)
        if observation.status == ERROR:
            errors[(*figure, *sorted(observation.params.items()))] = observation
        elif observation.status == MEASURED:  # the stage ran again and succeeded
            repeated = [key for key, error in errors.items() if key[:3] == figure and _covers(observation, error)]
            for key in repeated:
                del errors[key]
    for error in errors.values():
        if not any(_is_planned(view, item, error) for item in planned[(error.stage, error.name)]):
            reason = f"error: {error.reason}"
            yield with_absence(view.inconclusive(error.name, error.scope, reason, error.stage, error.params), error)


def _covers(measured: Observation, error: Observation) -> bool:
    """Return whether the measured observation has all parameters of the error, so that both are of the same figure."""
    return error.params.items() <= measured.params.items()


def _is_planned(view: HostView, item: Expectation, observation: Observation) -> bool:
    """Return whether `item` is the plan's expectation of the observation. If so, `missing_observations` judges it."""
    return item.params.items() <= observation.params.items() and observation.scope in view.plan.scopes_of(
        view.host, item
    )


def _stage_problem(view: HostView, stage: str) -> str:
    """Return why observations of a stage may be missing: no launch of the stage in the records, or the reason of the last failed
    launch.
    """
    launches = [launch for launch in view.evidence.launches() if launch.stage == stage]
    if not launches and stage == GANG and not any(record.gang for record in view.evidence.records):
        return "there is no record of the stage from this host"
    if not launches:
        return "the stage did not start on this host, or its record was not collected after the start"
    reasons = [launch.reason for launch in launches if launch.outcome != "finished"]
    return reasons[-1] if reasons else "the launch finished, so the reason is not known"


def unmeasured_gpus(view: HostView) -> Iterator[Verdict]:
    """Yield an inconclusive verdict for every planned GPU without any measurement."""
    for scope in view.unmeasured_gpus:
        reason = "nothing was measured on this GPU"
        if view.is_beyond_driver(scope):
            count = len(view.serials)
            listed = counted(count, "GPU")
            reason += (
                f": the driver lists {listed} and numbers them from 0, so any GPU of the host may be the missing one"
            )
        yield view.inconclusive("gpu", scope, reason)


def partitioned_gangs(plan: Plan, evidence: Mapping[str, Evidence]) -> list[Verdict]:
    """Return verdicts on partitioned gangs. If two hosts never launched together successfully, each is inconclusive.

    Hosts without any successful launch are ignored. A gang that launches again without a host is not partitioned if an earlier
    successful launch included the host.
    """
    members, launched_with = _launched_together(plan, evidence)
    verdicts = []
    for gang, hosts in plan.gangs().items():
        for host in hosts:
            never_with = [
                other
                for other in hosts
                if other in launched_with and host in launched_with and other not in launched_with[host]
            ]
            if never_with:
                verdicts.append(
                    Verdict(
                        host=host,
                        scope=f"gang={gang}",
                        name="stage.gang",
                        stage=GANG,
                        verdict=INCONCLUSIVE,
                        criterion="plan",
                        kind=VerdictKind.UNFINISHED,
                        reason=f"launched with {', '.join(members[host])}, but never with {', '.join(never_with)}",
                        source="plan",
                    )
                )
    return verdicts


def contradictory_members(plan: Plan, evidence: Mapping[str, Evidence]) -> Iterator[Verdict]:
    """Yield verdicts on hosts whose records list different members of the same launch."""
    for gang in plan.gangs() if any(stage.name == GANG for stage in plan.stages) else ():
        launches: dict[tuple[int, str], list[Attempt]] = defaultdict(list)
        for attempt in gang_attempts(plan, evidence, gang):
            if attempt.number:  # 0: not numbered, so attempts cannot be matched
                launches[(attempt.number, attempt.stage)].append(attempt)
        for (numbered, stage), attempts in launches.items():
            for one, other in itertools.combinations(attempts, 2):
                if set(one.members) & set(other.members):
                    lists = f"({', '.join(one.members)}) and ({', '.join(other.members)})"
                    reason = f"the records of the gang's hosts list different members of launch {numbered}: {lists}"
                    for host in (*one.launches, *other.launches):
                        yield Verdict(
                            host=host,
                            scope=f"gang={gang}",
                            name=f"stage.{stage}",
                            stage=stage,
                            verdict=INCONCLUSIVE,
                            criterion="plan",
                            kind=VerdictKind.CONTRADICTORY,
                            reason=reason,
                            source="plan",
                        )


def _launched_together(
    plan: Plan, evidence: Mapping[str, Evidence]
) -> tuple[dict[str, tuple[str, ...]], dict[str, set[str]]]:
    """Return host -> members of its last successful gang launch, and host -> members of all its successful gang launches.

    A launch is successful if `Attempt.worked`.
    """
    members: dict[str, tuple[str, ...]] = {}
    launched_with: dict[str, set[str]] = defaultdict(set)
    for gang in plan.gangs():
        for attempt in gang_attempts(plan, evidence, gang) if any(stage.name == GANG for stage in plan.stages) else ():
            for host in attempt.launches if attempt.stage == GANG and attempt.worked else ():
                members[host] = attempt.members
                launched_with[host] |= set(attempt.members)
    return members, launched_with
