"""Evaluate the observations of a host against the criteria that match them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge import baseline, outliers
from fleet.judge.absence import with_absence
from fleet.judge.change import change, net_change, number
from fleet.judge.counter_rate import CONFIDENCE, describe_age, hours_before, hours_of_run, least_rate
from fleet.judge.credibility import problem_of
from fleet.judge.criteria import Criterion
from fleet.judge.evidence import from_benchmark
from fleet.judge.fabric_ports import TOTALS
from fleet.judge.finding import FLOORS
from fleet.judge.host_view import HostView
from fleet.judge.matching import matches
from fleet.judge.refusals import may_be_transient
from fleet.quantities import PER_HOUR, SIGNS, format_pair, quantity
from schemas.plans import Plan
from schemas.readings import BMC
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

REVALIDATE = "revalidate"
"""Prefix of the names of the profiles for parts in service."""
STORAGE = "storage_"
"""Prefix of `Criterion.variable`. The rest of `variable` is then a key of the inventory variable rackproof_storage_floors."""
FABRIC_RATES = ("fabric_bytes_per_second", "fabric_port_bytes_per_second")
"""Values of a criterion's `variable` that are rates of the fabric. Figures are limited by `HostView.most_between_hosts` too."""
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "eq": operator.eq,
    "ge": operator.ge,
    "le": operator.le,
    "gt": operator.gt,
    "lt": operator.lt,
}


def evaluate(view: HostView, criterion: Criterion, figures: outliers.FleetFigures) -> Iterator[Verdict]:
    """Yield every verdict of one criterion on one host. `figures` are those of all hosts, for criteria with `vs_fleet`."""
    if not is_applicable(view, criterion):
        return
    groups = series(view, criterion)
    for group in groups:
        verdict = _judge_series(view, criterion, group, figures)
        if verdict and verdict.verdict == FAIL:
            verdict = _without_impossible_values(view, criterion, group, figures, verdict)
        if verdict:
            yield verdict
    if not from_benchmark(criterion.name) and not criterion.name.startswith((TOTALS, BMC)):
        yield from judge_unobserved(view, criterion, groups)


def _without_impossible_values(
    view: HostView, criterion: Criterion, group: Sequence[Observation], figures: outliers.FleetFigures, failed: Verdict
) -> Verdict:
    """Judge a failed series once more, without its impossible values, and return the verdict.

    If the series does not fail without these values, the verdict is inconclusive: an impossible value does not show that the part
    is at fault.
    """
    problems = {
        id(item): problem
        for item in group
        if item.status == MEASURED and (problem := problem_of(view.criteria(), item))
    }
    if not problems:
        return failed
    possible = [item for item in group if id(item) not in problems]
    verdict = _judge_series(view, criterion, possible, figures) if possible else None
    if verdict and verdict.verdict == FAIL:
        return verdict
    reason = next(iter(problems.values()))
    return view.inconclusive(failed.name, failed.scope, reason, failed.stage, failed.params, criterion)


def is_applicable(view: HostView, criterion: Criterion) -> bool:
    """Return whether the criterion applies to the host. If not, the report lists it as not judged.

    It does not apply if the inventory, the plan or the datasheet lacks the value from which its limit follows. Criteria for
    NVLinks do not apply if a hypervisor gave the host one GPU without NVLinks. A criterion with `new_part` applies only if the
    run accepts new parts (`is_acceptance`).
    """
    if criterion.name.startswith("gpu.nvlink.") and view.has_lone_gpu:
        return False
    if criterion.variable and not inventory_value(view, criterion.variable):
        return False
    if criterion.datasheet and criterion.expected is None:
        return False
    if criterion.new_part and not is_acceptance(view.plan):
        return False
    return criterion.baseline is None or view.plan.baseline is not None


def is_acceptance(plan: Plan) -> bool:
    """Return whether the run accepts new parts: it has stages and no baseline, and its profile is not for parts in service."""
    return bool(plan.stages) and plan.baseline is None and not plan.profile.startswith(REVALIDATE)


def inventory_value(view: HostView, variable: str) -> Value:
    """Return the value of a variable of the inventory; empty or zero if the inventory does not set it.

    `infiniband_ports` is an exception. If the inventory does not set it, the value is 1 for a host that uses the fabric
    (`HostView.uses_fabric`), otherwise 0.
    """
    host = view.host
    if variable == "gpu_count":
        return len(host.devices)
    if variable == "fabric_bytes_per_second":
        return view.fabric if host.fabric_gbps else 0.0
    if variable == "fabric_port_bytes_per_second":
        return view.fabric_port if host.fabric_gbps else 0.0
    if variable.startswith(STORAGE):
        return host.storage_floors.get(variable.removeprefix(STORAGE), 0.0)
    if variable == "infiniband_ports":
        return host.infiniband_ports or int(view.uses_fabric)
    if variable == "dimm_count":
        return host.dimm_count
    if variable == "memory_transfers_per_second":
        return host.memory_mts * 1e6
    if variable == "host_memory_bytes_per_second":
        return host.host_memory_gbyteps * 1e9
    return host.driver_version if variable == "driver_version" else host.vbios_version


def series(view: HostView, criterion: Criterion) -> list[list[Observation]]:
    """Return the observations that match the criterion: a list in the order of time for each figure or reading of each part."""
    benchmark = from_benchmark(criterion.name)
    if not benchmark and "*" not in criterion.name and "phase" not in criterion.where:
        by_scope = view.observations.by_scope(criterion.name)
        if by_scope:
            return _series_of_readings(criterion, by_scope)
    groups: dict[tuple[object, ...], list[Observation]] = defaultdict(list)
    for observation in with_matching_name(view, criterion):
        if matches(criterion, observation):
            params = observation.params
            settings: Sequence[str] = ()
            if len(params) > 1 or "phase" not in params:
                settings = sorted(f"{key}={value}" for key, value in params.items() if key != "phase")
            stage = observation.stage if benchmark else ""
            groups[(observation.name, observation.scope, *settings, stage)].append(observation)
    return list(groups.values())


def _series_of_readings(criterion: Criterion, by_scope: Mapping[str, list[Observation]]) -> list[list[Observation]]:
    """Return what `series` returns, for the readings of one name (scope -> readings).

    Only scope and stage decide whether the criterion matches a reading of this name. So the scope is checked once, with the first
    reading, and the stage for each reading.
    """
    groups = [group for group in by_scope.values() if matches(criterion, group[0], any_stage=True)]
    if criterion.stage:
        groups = [[item for item in group if item.stage == criterion.stage] for group in groups]
    return [group for group in groups if group]


def with_matching_name(view: HostView, criterion: Criterion) -> list[Observation]:
    """Return the observations whose name the criterion matches, whatever their scope and parameters."""
    if "*" not in criterion.name:
        return view.observations[criterion.name]
    return [item for name in criterion.matched(view.observations) for item in view.observations[name]]


def _judge_series(
    view: HostView, criterion: Criterion, group: Sequence[Observation], figures: outliers.FleetFigures
) -> Verdict | None:
    """Return the verdict on one series of observations.

    The result is None in four cases:
    - There is nothing to compare the measured values with.
    - A benchmark has no measured value. Another check reports the missing value.
    - The criterion is optional, and the part does not support the reading.
    - All values are `Criterion.unless`.
    """
    benchmark = from_benchmark(criterion.name)
    measured = [item for item in group if item.status == MEASURED]
    absences = [item for item in group if item.status == ERROR]
    if measured and group[-1].status == MEASURED and may_be_transient(group[-1].name):
        absences = []
    if measured and group[-1].status == UNSUPPORTED and (not criterion.optional or criterion.name.startswith(BMC)):
        absences.append(group[-1])  # the part supported the reading earlier in the run
    is_judged = criterion.unless is None or any(item.value != criterion.unless for item in measured)
    verdict = _judge_measured(view, criterion, measured, figures) if measured and is_judged else None
    if verdict and absences and verdict.verdict == PASS and not benchmark and not criterion.best_of_run:
        absence = absences[-1]
        reason = f"{absence.status} {absence.params.get('phase', '')} {absence.stage}: {absence.reason}"
        absent = view.inconclusive(absence.name, absence.scope, reason, absence.stage, criterion=criterion)
        return with_absence(absent, absence)
    # A measured value without a verdict has nothing to be compared with.
    if verdict or benchmark or measured or (criterion.optional and group[-1].status == UNSUPPORTED):
        return verdict
    last = group[-1]
    reason = f"{last.status}: {last.reason}"
    return with_absence(view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion), last)


def judge_unobserved(
    view: HostView, criterion: Criterion, groups: Sequence[Sequence[Observation]]
) -> Iterator[Verdict]:
    """Yield the inconclusive verdicts on missing readings: one on the host, or one on each GPU without a reading in `groups`.

    `groups` is the result of `series`. GPUs on which nothing was measured are skipped.
    """
    observed = {group[0].scope for group in groups} | set(view.unmeasured_gpus)
    if criterion.scope in ("host", "") and not observed:
        yield view.inconclusive(criterion.name, "host", "not observed", criterion=criterion)
    if criterion.scope in ("gpu", "reason", "link") and view.host.device == "gpu":
        parts = {Scope.parse(scope).device for scope in observed}
        for scope in view.host.scopes:
            if scope not in parts:
                yield view.inconclusive(criterion.name, scope, "not observed", criterion=criterion)


def _judge_measured(
    view: HostView, criterion: Criterion, measured: Sequence[Observation], figures: outliers.FleetFigures
) -> Verdict | None:
    """Return the verdict on measured values: on one of them (`_deciding_observation`), on the change over the run, or on the rate
    at which a counter rose before the run.

    None in three cases: the criterion is optional and the fleet has too few comparable parts; its limit is for NVLinks and no
    NVLink joins the GPUs; `_judge_against_baseline` returns None. If no other criterion judges the values, the report lists
    them as not judged.
    """
    if criterion.baseline is not None:
        return _judge_against_baseline(view, criterion, measured)
    limit, detail = limit_of(view, criterion, measured[-1]), ""
    if limit is None and criterion.links:
        return _judge_without_links(view, criterion, measured[-1])
    if criterion.vs_fleet:
        peers = figures.peers(view, measured[-1], criterion)
        enough = outliers.has_enough_peers(criterion, peers)
        if not enough and criterion.optional:
            return None
        if not enough:
            last, reason = measured[-1], outliers.too_few_reason(peers, criterion)
            verdict = view.inconclusive(last.name, last.scope, reason, last.stage, last.params, criterion)
            return replace(verdict, kind=VerdictKind.TOO_FEW_PEERS, value=last.value, unit=criterion.unit)
        limit = outliers.limit(criterion, peers)
        detail = outliers.explanation(criterion, peers, quantity(peers.median, criterion.unit))
    if criterion.delta:
        return _judge_change(view, criterion, measured, limit)
    if criterion.per_hour:
        return _judge_rate(view, criterion, measured, limit)
    if criterion.variable.endswith("_version"):
        limit = _full_version(str(limit), measured)
    chosen = _deciding_observation(criterion, measured, limit)
    return _verdict(view, criterion, chosen, chosen.value, limit, detail)


def _judge_without_links(view: HostView, criterion: Criterion, last: Observation) -> Verdict | None:
    """Return None if no NVLink joins the GPUs; otherwise an inconclusive verdict, because the host did not report the links."""
    if is_unlinked(view, criterion, last):
        return None
    reason = (
        "the host did not report which NVLinks join its GPUs (gpu.peer.link), and the limit depends on their number"
    )
    verdict = view.inconclusive(last.name, last.scope, reason, last.stage, last.params, criterion)
    return replace(verdict, value=last.value, unit=criterion.unit, basis=criterion.basis)


def is_unlinked(view: HostView, criterion: Criterion, observation: Observation) -> bool:
    """Return whether the limit is for GPUs that NVLinks join, and no NVLink joins the GPUs of the observation."""
    return bool(criterion.links) and view.nvlinks_between(observation.scope) == 0


def _full_version(wanted: str, measured: Sequence[Observation]) -> str:
    """Return the first measured version that begins with the components of `wanted`; if there is none, `wanted` itself."""
    versions = (str(item.value) for item in measured)
    return next((text for text in versions if text == wanted or text.startswith(f"{wanted}.")), wanted)


def _judge_against_baseline(view: HostView, criterion: Criterion, measured: Sequence[Observation]) -> Verdict | None:
    """Return the verdict on a figure that is compared with the accepted record of the same part.

    None if the part has no accepted record (`presence.judge_presence` reports that once for the part), or if the criterion is
    optional and the accepted record does not have the figure.
    """
    last = measured[-1]
    level = view.accepted.level(last)
    if level is None and (criterion.optional or not view.accepted.has(last.scope)):
        return None
    limit = baseline.limit(criterion, level) if level else None
    if limit is None:
        why = baseline.too_noisy_reason(level) if level else "the accepted record of the part does not have this figure"
        kind = VerdictKind.NOISY_BASELINE if level else VerdictKind.NO_BASELINE
        verdict = view.inconclusive(last.name, last.scope, why, last.stage, last.params, criterion, kind)
        return replace(verdict, value=last.value, unit=criterion.unit)
    chosen = _deciding_observation(criterion, measured, limit[0])
    return _verdict(view, criterion, chosen, chosen.value, *limit)


def _judge_change(view: HostView, criterion: Criterion, measured: Sequence[Observation], limit: Value) -> Verdict:
    """Return the verdict on the increase of a counter over the run; if the limit is a floor, on the last value minus the first.

    The stage of a verdict on an increase is the one in which the counter rose most. If the reading is the timestamp of the newest
    event, the stage is that of this event.
    """
    last = measured[-1]
    phases = [(item.stage, item.params.get("phase")) for item in (measured[0], last)]
    if len(measured) < 2 or phases != [view.first_snapshot, view.last_snapshot]:
        reason = "not read both before and after the run: the change is unknown"
        return view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion)
    if criterion.operator in FLOORS:
        return _verdict(view, criterion, last, net_change(measured), limit, "")
    increase = change(measured)
    chosen = replace(increase.reading, stage=increase.stage)
    total = increase.total
    if criterion.per_hour and isinstance(total, int | float):
        hours = hours_of_run(view)
        if hours is None:
            return _without_uptime(view, criterion, last)
        total = least_rate(total, hours)
    if not holds(criterion.operator, total, limit):
        how = CONFIDENCE if criterion.per_hour else ""
        detail = "; ".join(text for text in (increase.where, how, increase.drop) if text)
        return _verdict(view, criterion, chosen, total, limit, detail)
    if increase.drop:
        reason = f"{increase.drop}: the counter was reset, and increments just before the reset are lost"
        verdict = view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion)
        return replace(verdict, kind=VerdictKind.CONTRADICTORY)
    return _verdict(view, criterion, chosen, total, limit, "")


def _judge_rate(view: HostView, criterion: Criterion, measured: Sequence[Observation], limit: Value) -> Verdict:
    """Return the verdict on the hourly rate of a counter before the run: its first reading divided by `hours_before`."""
    first, last = measured[0], measured[-1]
    count, hours = number(first.value), hours_before(view, first)
    if not count:
        return _verdict(view, criterion, first, 0.0, limit, "")
    if hours is None:
        return _without_uptime(view, criterion, last)
    increase = change(measured).total if len(measured) > 1 else 0
    detail = describe_age(hours, count, number(increase))
    rate = count / hours
    return _verdict(view, criterion, first, rate, limit, "" if holds(criterion.operator, rate, limit) else detail)


def _without_uptime(view: HostView, criterion: Criterion, last: Observation) -> Verdict:
    reason = "the uptime of the host is not known, so the rate of the counter cannot be computed"
    return view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion)


def _deciding_observation(criterion: Criterion, measured: Sequence[Observation], limit: Value) -> Observation:
    """Return the last failing observation, or the last if all pass.

    With `best_of_run`, return the first passing observation, or the first if all fail.
    """
    passing: list[Observation] = []
    failing: list[Observation] = []
    for item in measured:
        (passing if holds(criterion.operator, item.value, limit) else failing).append(item)
    return (passing or failing)[0] if criterion.best_of_run else (failing or passing)[-1]


def _verdict(
    view: HostView, criterion: Criterion, chosen: Observation, value: Value, limit: Value, detail: str
) -> Verdict:
    passed = holds(criterion.operator, value, limit)
    comparison = describe_comparison(criterion, value, limit)
    return Verdict(
        host=view.host.name,
        scope=chosen.scope,
        serial=view.serial(chosen.scope),
        name=chosen.name,
        stage=chosen.stage,
        params=chosen.params,
        verdict=PASS if passed else FAIL,
        criterion=criterion.id,
        kind=VerdictKind.CHANGE if criterion.delta else VerdictKind.LIMIT,
        value=value,
        limit=limit,
        operator=criterion.operator,
        unit=_unit(criterion),
        reason=f"{comparison} ({detail})" if detail else comparison,
        detail=detail,
        action="none" if passed else criterion.action_for(chosen, value),
        source=criterion.source,
        basis=criterion.basis,
        severity="" if passed else criterion.severity,
    )


def limit_of(view: HostView, criterion: Criterion, observation: Observation) -> Value:
    """Return the limit that a criterion sets for an observation, if the limit needs neither the fleet nor an accepted record.

    None if the limit depends on the number of NVLinks between the GPUs, and that number is zero or was not reported.
    """
    if criterion.links:
        links = view.nvlinks_between(observation.scope)
        return (
            criterion.expected * criterion.fraction * links / criterion.links if links and criterion.expected else None
        )
    if criterion.expected is not None:
        return criterion.expected * criterion.fraction
    if criterion.variable:
        limit = inventory_value(view, criterion.variable)
        if isinstance(limit, float) and criterion.variable in FABRIC_RATES and from_benchmark(observation.name):
            limit = min(limit, view.most_between_hosts(observation.name))
        return limit * criterion.fraction if isinstance(limit, float) else limit
    return criterion.value


def describe_comparison(criterion: Criterion, value: Value, limit: Value) -> str:
    """Return the comparison in words, such as `found 5, wanted = 8` or `found 4043 GB/s, wanted ≥ 4192 GB/s`."""
    value_text, limit_text = format_pair(value, limit, _unit(criterion))
    verb = "changed by" if criterion.delta else "found"
    return f"{verb} {value_text}, wanted {SIGNS[criterion.operator]} {limit_text}"


def _unit(criterion: Criterion) -> str:
    return PER_HOUR if criterion.per_hour else criterion.unit


def holds(comparison: str, value: Value, limit: Value) -> bool:
    """Return whether the comparison is true.

    It is false if the values are of different kinds (number, boolean, text), or if they are texts and the operator is not `eq`.
    """
    if isinstance(value, int | float) and isinstance(limit, int | float):
        return isinstance(value, bool) == isinstance(limit, bool) and COMPARE[comparison](value, limit)
    return comparison == "eq" and value is not None and type(value) is type(limit) and value == limit
