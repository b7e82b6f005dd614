"""Estimate which faults each criterion detects, and how often it fails a healthy part, from runs of healthy parts.

For a figure that varies, the estimate follows from its spread: from part to part, and from run to run of the same part. With few
parts the spread itself is uncertain, so quantiles are those of Student's t distribution for a further part (a prediction
interval), with the degrees of freedom of Satterthwaite (Biometrics 2, 1946). For fewer than MIN_PARTS parts there is no
estimate.

Some criteria need no spread, because they find any value beyond the limit (LOGIC). They compare for equality or with peers, or
judge counts, increases over the run, or values that are not numbers. A figure with the same value on all parts needs no spread
either, if there are at least MIN_PARTS parts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence, Planned, from_benchmark
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.power import DETECTION_PROBABILITY, MAX_FALSE_ALARM
from fleet.judge.student import t_cdf, t_quantile
from fleet.quantities import finite
from schemas.catalogue import BENCHMARKS, settings
from schemas.plans import Plan
from schemas.records import Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind
from schemas.scopes import Scope

MIN_PARTS = 3
"""With two parts, the 99.9 % quantile of Student's t is 318 standard deviations above the mean: too far to be useful."""

RELATIVE, ABSOLUTE, LOGIC = "relative", "absolute", "logic"
"""How a fault is stated. RELATIVE: as a share of the healthy value. ABSOLUTE: in the unit of the figure. LOGIC: as any value
beyond the limit."""

Run = tuple[Plan, Mapping[str, Evidence]]
Part = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GateKey:
    """A criterion applied to one figure, measured with the same settings, on GPUs of one model."""

    model: str
    """Name of the criteria pack of the GPU model; empty if there is none."""
    stage: str
    name: str
    criterion: str
    params: tuple[tuple[str, Value], ...]
    settings: str
    """Settings of the benchmark as JSON; empty for a reading."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """What a criterion detects."""

    key: GateKey
    operator: str
    unit: str
    limit: Value
    """None if parts or runs have different limits."""
    peers: bool
    """Whether the criterion compares the value with those of other parts in the same run."""
    change: bool
    """Whether the criterion judges the increase over the run."""
    kind: str
    """RELATIVE, ABSOLUTE or LOGIC."""
    values: int
    """Number of healthy values, over all parts and runs."""
    parts: int
    failed: int
    """Number of healthy values that failed."""
    fault: float | None = None
    """Smallest fault that the criterion detects with the probability DETECTION_PROBABILITY: as a share of the healthy value
    (RELATIVE) or in `unit` (ABSOLUTE). None if the kind is LOGIC, or if there are fewer than MIN_PARTS parts."""
    false_alarm: float | None = None
    """Probability that a further healthy part fails. None if `fault` is None."""
    freedom: float = 0.0
    """Degrees of freedom of the spread."""

    @property
    def is_stated(self) -> bool:
        """Return whether a fault can be stated: there are enough parts, or the kind is LOGIC."""
        return self.kind == LOGIC or self.parts >= MIN_PARTS

    @property
    def is_reliable(self) -> bool:
        """Return whether at most MAX_FALSE_ALARM of healthy parts fail."""
        return self.false_alarm is not None and self.false_alarm <= MAX_FALSE_ALARM


@dataclass
class _Series:
    """The verdicts with one GateKey."""

    verdicts: list[Verdict] = field(default_factory=list)
    parts: dict[Part, list[Verdict]] = field(default_factory=lambda: defaultdict(list))


def detection(runs: Sequence[Run], packs: Sequence[Pack]) -> list[Detection]:
    """Return what each criterion that judged these runs detects, one entry for each figure, in the order of the verdicts.

    All parts in the runs must be healthy. The runs may be of different hosts. A GPU is identified by its serial, so the same GPU
    in two runs is one part.
    """
    series: dict[GateKey, _Series] = defaultdict(_Series)
    for plan, evidence in runs:
        planned = Planned(plan)
        gang_values: set[tuple[GateKey, Part]] = set()
        views = {host.name: HostView(plan, host, evidence.get(host.name, Evidence()), packs) for host in plan.hosts}
        for verdict in judge(plan, evidence, packs):
            view = views.get(verdict.host)
            if not view or not verdict.operator or verdict.verdict not in (PASS, FAIL):
                continue
            key, part = _key(view, verdict, planned), _part(view, verdict)
            if Scope.parse(verdict.scope).is_gang:  # every host of the gang has a verdict on the same value
                if (key, part) in gang_values:
                    continue
                gang_values.add((key, part))
            series[key].verdicts.append(verdict)
            series[key].parts[part].append(verdict)
    return [_detection(key, group) for key, group in series.items()]


def settings_text(benchmark: str, chosen: Mapping[str, object]) -> str:
    """Return all settings of a benchmark, defaults included, as JSON. `GateKey.settings` has the same form."""
    return json.dumps(settings(benchmark, chosen), sort_keys=True)


def _key(view: HostView, verdict: Verdict, planned: Planned) -> GateKey:
    benchmark = verdict.name.split(".")[0]
    stages = {stage.name: stage.benchmarks for stage in view.plan.stages}
    chosen = stages.get(verdict.stage, {}).get(benchmark)
    is_measured = from_benchmark(verdict.name)
    model = next((pack.name for pack in view.packs if pack.gpu_names), "")
    return GateKey(
        model=model,
        stage=verdict.stage if is_measured else "",
        name=verdict.name,
        criterion=verdict.criterion,
        params=tuple(planned.params(verdict).items()) if is_measured else (),
        settings=settings_text(benchmark, chosen) if chosen is not None and benchmark in BENCHMARKS else "",
    )


def _part(view: HostView, verdict: Verdict) -> Part:
    """Return the identity of the part of a verdict. It is the same in every run, whichever slot the part is in.

    This is the serial of a GPU, the serials of all GPUs of a host, or the hosts of a gang, each with the rest of the scope.
    """
    scope = Scope.parse(verdict.scope)
    serials = tuple(sorted(view.serials.values()))
    if scope.is_gang:
        return (*view.plan.gangs().get(view.host.gang, ()), verdict.scope)
    serial = view.serials.get(scope.device)
    return (serial, scope.below) if serial else (*serials, verdict.scope)


def _detection(key: GateKey, group: _Series) -> Detection:
    first = group.verdicts[0]
    numbers = {part: list(_margins(verdicts)) for part, verdicts in group.parts.items()}
    flat = [margin for margins in numbers.values() for margin in margins]
    kind = _kind(group.verdicts, flat, len(group.parts))
    result = Detection(
        key=key,
        operator=first.operator,
        unit=first.unit,
        limit=first.limit if all(item.limit == first.limit for item in group.verdicts) else None,
        peers=first.kind == VerdictKind.PEERS,
        change=first.kind == VerdictKind.CHANGE,
        kind=kind,
        values=len(group.verdicts),
        parts=len(group.parts),
        failed=sum(item.verdict == FAIL for item in group.verdicts),
    )
    if kind == LOGIC or not result.is_stated:
        return result
    chosen = 0 if kind == RELATIVE else 1
    fault, alarm, freedom = _fault(
        [[pair[chosen] for pair in pairs] for pairs in numbers.values()], first.operator, kind
    )
    return Detection(**{**vars(result), "fault": fault, "false_alarm": alarm, "freedom": freedom})


def _margins(verdicts: Sequence[Verdict]) -> Iterator[tuple[float, float]]:
    """Yield value / limit and value - limit of each verdict with numbers. The ratio is NaN if the limit is not positive."""
    for verdict in verdicts:
        value, limit = finite(verdict.value), finite(verdict.limit)
        if value is not None and limit is not None:
            yield (value / limit if limit > 0 else math.nan), value - limit


def _kind(verdicts: Sequence[Verdict], margins: Sequence[tuple[float, float]], parts: int) -> str:
    first = verdicts[0]
    is_compared = first.operator == "eq" or first.kind in (VerdictKind.PEERS, VerdictKind.CHANGE)
    is_constant = parts >= MIN_PARTS and len({finite(item.value) for item in verdicts}) == 1
    if is_compared or is_constant or _is_count(verdicts) or len(margins) < len(verdicts):
        return LOGIC
    has_no_ratio = first.unit == "Cel" or any(math.isnan(ratio) or ratio <= 0 for ratio, _ in margins)
    return ABSOLUTE if has_no_ratio else RELATIVE


def _is_count(verdicts: Sequence[Verdict]) -> bool:
    """Return whether all values are whole numbers without a unit."""
    values = [finite(verdict.value) for verdict in verdicts]
    return verdicts[0].unit == "1" and all(value is None or value == int(value) for value in values)


def _fault(parts: Sequence[Sequence[float]], operator: str, kind: str) -> tuple[float, float, float]:
    """Return `fault`, `false_alarm` and `freedom` of a Detection.

    Args:
        parts: for each part, value / limit (RELATIVE) or value - limit (ABSOLUTE) in each run.
        operator: `ge`, `gt`: a fault lowers the value. `le`, `lt`: it raises the value.
        kind: RELATIVE or ABSOLUTE.
    """
    means = [statistics.fmean(values) for values in parts]
    mean, between = statistics.fmean(means), statistics.variance(means)
    repeats = sum(len(values) - 1 for values in parts)
    within = sum(statistics.variance(values) * (len(values) - 1) for values in parts if len(values) > 1) / (
        repeats or 1
    )
    # The mean of n runs varies by `within` / n. `between` already contains this share of `within`; `rest` is what remains.
    rest = within * (1 - statistics.fmean(1 / len(values) for values in parts))
    of_means = between * (1 + 1 / len(parts))
    terms = [(of_means, len(parts) - 1), (rest, repeats)]
    variance = of_means + rest
    freedom = variance**2 / sum(term**2 / count for term, count in terms if term) if variance else len(parts) - 1
    freedom = math.floor(freedom * 10) / 10  # rounded down, which gives larger faults
    sigma, limit = math.sqrt(variance), 1.0 if kind == RELATIVE else 0.0
    margin = mean - limit if operator in ("ge", "gt") else limit - mean
    alarm = 1 - t_cdf(margin / sigma, freedom) if sigma else float(margin < 0)
    fault = max(0.0, margin + t_quantile(DETECTION_PROBABILITY, freedom) * sigma)
    return (fault / mean if kind == RELATIVE else fault), alarm, freedom
