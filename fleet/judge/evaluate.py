"""What was seen, held against the criteria that speak of it."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from fleet.judge import baseline, outliers
from fleet.judge.absence import with_absence
from fleet.judge.change import change, net
from fleet.judge.criteria import Criterion
from fleet.judge.evidence import HostView, from_benchmark
from fleet.judge.finding import FLOORS
from fleet.judge.matching import concerns as concerns
from fleet.quantities import SIGNS, apart, quantity
from schemas.records import ERROR, MEASURED, UNSUPPORTED, Observation, Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

_HOLDS: Mapping[str, Callable[[float, float], bool]] = {
    "eq": operator.eq,
    "ge": operator.ge,
    "le": operator.le,
    "gt": operator.gt,
    "lt": operator.lt,
}


def held(view: HostView, criterion: Criterion, fleet: outliers.Fleet) -> Iterator[Verdict]:
    """Every verdict that one criterion gives on one host."""
    if criterion.variable == "fabric_bytes_per_second" and not view.host.fabric_gbps:
        return  # the inventory does not say what to expect; the report lists what went unjudged
    if criterion.baseline is not None and view.plan.baseline is None:
        return
    groups = series(view, criterion)
    for group in groups:
        verdict = _on_series(view, criterion, group, fleet)
        if verdict:
            yield verdict
    if not from_benchmark(criterion.name):
        yield from unobserved(view, criterion, groups)


def series(view: HostView, criterion: Criterion) -> list[list[Observation]]:
    """What a criterion is for, each figure of each part by itself, in the order in which it was observed."""
    benchmark = from_benchmark(criterion.name)
    groups: dict[tuple[str, ...], list[Observation]] = defaultdict(list)
    for seen in spoken_of(view, criterion):
        if concerns(criterion, seen):
            params = sorted(f"{key}={value}" for key, value in seen.params.items() if key != "phase")
            groups[(seen.name, seen.scope, *params, seen.stage if benchmark else "")].append(seen)
    return list(groups.values())


def spoken_of(view: HostView, criterion: Criterion) -> list[Observation]:
    """What the host observed under the names that a criterion is for, whatever its scope and parameters."""
    if "*" not in criterion.name:
        return view.observations[criterion.name]
    return [seen for name in view.observations if criterion.speaks_of(name) for seen in view.observations[name]]


def _on_series(
    view: HostView, criterion: Criterion, group: Sequence[Observation], fleet: outliers.Fleet
) -> Verdict | None:
    """The verdict on one series of observations; None where another step of the judgement tells what is missing."""
    benchmark = from_benchmark(criterion.name)
    measured = [seen for seen in group if seen.status == MEASURED]
    lost = [seen for seen in group if seen.status == ERROR]
    if measured and group[-1].status == UNSUPPORTED and not criterion.optional:
        lost.append(group[-1])  # the part told it before
    found = _on_measured(view, criterion, measured, fleet) if measured else None
    if found and lost and found.verdict == PASS and not benchmark and not criterion.best_of_run:
        reason = f"{lost[-1].status} {lost[-1].params.get('phase', '')} {lost[-1].stage}: {lost[-1].reason}"
        verdict = view.inconclusive(lost[-1].name, lost[-1].scope, reason, lost[-1].stage, criterion=criterion)
        return with_absence(verdict, lost[-1])
    # What was measured and has no verdict has nothing to be compared with.
    if found or benchmark or measured or (criterion.optional and group[-1].status == UNSUPPORTED):
        return found
    last = group[-1]
    reason = f"{last.status}: {last.reason}"
    return with_absence(view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion), last)


def unobserved(view: HostView, criterion: Criterion, groups: Sequence[Sequence[Observation]]) -> Iterator[Verdict]:
    """A criterion on what every host or GPU must show, where nothing was read at all; `groups` as `series` has them."""
    seen = {group[0].scope for group in groups} | set(view.unseen())
    if criterion.scope in ("host", "") and not seen:
        yield view.inconclusive(criterion.name, "host", "not observed", criterion=criterion)
    if criterion.scope in ("gpu", "reason", "link") and view.host.device == "gpu":
        below = {Scope.parse(scope).device for scope in seen}
        for scope in view.host.scopes:
            if scope not in below:
                yield view.inconclusive(criterion.name, scope, "not observed", criterion=criterion)


def _on_measured(
    view: HostView, criterion: Criterion, seen: Sequence[Observation], fleet: outliers.Fleet
) -> Verdict | None:
    """The verdict on what was measured: the worst of it, the best, or the change over the run.

    None where it is optional and the fleet too small to compare with; the report lists it as not judged.
    """
    limit, detail = limit_of(view, criterion), ""
    if criterion.baseline is not None:
        return _against_accepted(view, criterion, seen)
    if criterion.vs_fleet:
        crowd = fleet.crowd(view, seen[-1], criterion)
        enough = outliers.enough(criterion, crowd)
        if not enough and criterion.optional:
            return None
        if not enough:
            last, reason = seen[-1], outliers.too_few(crowd, criterion)
            verdict = view.inconclusive(last.name, last.scope, reason, last.stage, last.params, criterion)
            return replace(verdict, kind=VerdictKind.TOO_FEW_PEERS, value=last.value, unit=criterion.unit)
        limit = outliers.limit(criterion, crowd)
        detail = outliers.explained(criterion, crowd, quantity(crowd.median, criterion.unit))
    if criterion.delta:
        return _on_change(view, criterion, seen, limit)
    chosen = _chosen(criterion, seen, limit)
    return _verdict(view, criterion, chosen, chosen.value, limit, detail)


def _against_accepted(view: HostView, criterion: Criterion, seen: Sequence[Observation]) -> Verdict | None:
    """The verdict against what the same part showed when it was accepted.

    None where the part has no accepted record, which is told once for the part (`baseline.judge_presence`).
    """
    last = seen[-1]
    level = view.accepted.level(last)
    if level is None and (criterion.optional or not view.accepted.has(last.scope)):
        return None
    found = baseline.limit(criterion, level) if level else None
    if found is None:
        why = baseline.too_noisy(level) if level else "its accepted record does not have this figure"
        verdict = view.inconclusive(last.name, last.scope, why, last.stage, last.params, criterion)
        return replace(verdict, kind=VerdictKind.NO_BASELINE, value=last.value, unit=criterion.unit)
    chosen = _chosen(criterion, seen, found[0])
    return _verdict(view, criterion, chosen, chosen.value, *found)


def _on_change(view: HostView, criterion: Criterion, seen: Sequence[Observation], limit: Value) -> Verdict:
    """The verdict on what a counter rose by; a failure names the stage in which most of it came."""
    last = seen[-1]
    taken = [(item.stage, item.params.get("phase")) for item in (seen[0], last)]
    if len(seen) < 2 or taken != [view.first_snapshot, view.last_snapshot]:
        reason = "not read both before and after the run: no change can be told"
        return view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion)
    if criterion.operator in FLOORS:
        return _verdict(view, criterion, last, net(seen), limit, "")
    found = change(seen)
    chosen = replace(found.seen, stage=found.stage)
    if not holds(criterion.operator, found.total, limit):
        detail = "; ".join(text for text in (found.where, found.fell) if text)
        return _verdict(view, criterion, chosen, found.total, limit, detail)
    if found.fell:
        reason = f"{found.fell}: the counter was reset, and increments just before the reset are lost"
        verdict = view.inconclusive(last.name, last.scope, reason, last.stage, criterion=criterion)
        return replace(verdict, kind=VerdictKind.CONTRADICTORY)
    return _verdict(view, criterion, chosen, found.total, limit, "")


def _chosen(criterion: Criterion, seen: Sequence[Observation], limit: Value) -> Observation:
    failing = [item for item in seen if not holds(criterion.operator, item.value, limit)]
    holding = [item for item in seen if item not in failing]
    return (holding or failing)[0] if criterion.best_of_run else (failing or holding)[-1]


def _verdict(
    view: HostView, criterion: Criterion, chosen: Observation, value: Value, limit: Value, detail: str
) -> Verdict:
    passed = holds(criterion.operator, value, limit)
    told = sentence(criterion, value, limit)
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
        unit=criterion.unit,
        reason=f"{told} ({detail})" if detail else told,
        detail=detail,
        action="none" if passed else criterion.action,
        source=criterion.source,
        basis=criterion.basis,
        severity="" if passed else criterion.severity,
    )


def limit_of(view: HostView, criterion: Criterion) -> Value:
    """The limit, where it needs neither the fleet nor an accepted record."""
    if criterion.expected is not None:
        return criterion.expected * criterion.fraction
    if criterion.variable == "gpu_count":
        return len(view.host.devices)
    if criterion.variable == "fabric_bytes_per_second":
        return view.fabric * criterion.fraction
    return criterion.value


def sentence(criterion: Criterion, value: Value, limit: Value) -> str:
    """`found 5, wanted = 8`; `found 4043 GB/s, wanted ≥ 4192 GB/s`."""
    found, wanted = apart(value, limit, criterion.unit)
    return f"{'changed by' if criterion.delta else 'found'} {found}, wanted {SIGNS[criterion.operator]} {wanted}"


def holds(how: str, value: Value, limit: Value) -> bool:
    """Whether the comparison holds; a value of another kind than its limit never does."""
    if isinstance(value, int | float) and isinstance(limit, int | float):
        return isinstance(value, bool) == isinstance(limit, bool) and _HOLDS[how](value, limit)
    return how == "eq" and value is not None and type(value) is type(limit) and value == limit
