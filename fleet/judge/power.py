"""Estimate the detection power of floors from several runs of the same hosts.

A floor is a lower limit. If it is too high, healthy parts fail; if it is too low, slow parts pass. The probability of each of
these two errors is computed from the scatter of healthy parts, from run to run and from part to part. The scatter is assumed to
have a normal distribution. Small probabilities depend on this assumption, because a few runs do not show the tails.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from fleet.judge.baseline import STDEV_BIAS
from fleet.judge.criteria import Pack
from fleet.judge.evidence import Evidence, Planned, from_benchmark
from fleet.judge.judge import judge
from fleet.quantities import measured_number
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.records import Value, is_number
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import Scope

MIN_RUNS = 3
DETECTION_PROBABILITY = 0.99
"""A floor finds a slowdown if a part with this slowdown fails with at least this probability."""
MAX_FALSE_ALARM = 0.001
"""Highest acceptable probability that a healthy part fails."""
_DETECTION_SIGMAS = NormalDist().inv_cdf(DETECTION_PROBABILITY)
_FALSE_ALARM_SIGMAS = NormalDist().inv_cdf(1 - MAX_FALSE_ALARM)
_MAD_BIAS = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""Number of values -> correction factor of their median absolute deviation: Croux & Rousseeuw, COMPSTAT 1992."""
MIN_VALUES_FOR_OUTLIERS = 6
"""With fewer values no outlier can be identified."""
LARGE_MESSAGE = 64 << 20
"""Smallest message, in bytes, of the collectives in the last of GROUPS."""
GROUPS = ("sustained GEMM", "copies", "HBM", "collectives of 64 MiB and more")

Run = tuple[Plan, Mapping[str, Evidence]]
Figure = tuple[str, str, tuple[tuple[str, Value], ...]]
"""Name, stage and settings of a benchmark result."""
Part = tuple[str, str]
"""Host and scope. The host is empty for a figure of a whole gang (the hosts of one multi-node launch). If the scope begins with a
GPU, the serial of the GPU follows the scope, after a space."""


@dataclass(frozen=True, kw_only=True)
class Repeatability:
    """How much a figure of the same part differs from run to run."""

    name: str
    stage: str
    params: Mapping[str, Value]
    group: str
    """One of GROUPS, or empty."""
    parts: int
    worst: float
    """(largest - smallest) / median over the runs, for the part with the largest ratio."""
    where: str
    """Host and scope of this part."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A floor that a criterion sets for one figure, and its detection power."""

    criterion: str
    name: str
    stage: str
    params: Mapping[str, Value]
    unit: str
    n: int
    """Number of values, over all parts and runs."""
    parts: int
    mean: float
    """Mean, over the parts, of the median of each part's values."""
    run_sigma: float
    """Standard deviation from run to run, in `unit`: the mean, over the parts, of the `mad_sigma` of each part's values."""
    part_sigma: float
    """Standard deviation from part to part, in `unit`: the `mad_sigma` of the parts' medians; 0 for a single part."""
    sigma: float
    """Square root of the sum of the squares of `run_sigma` and `part_sigma`."""
    limit: float
    """The floor: the median of the limits in the verdicts of `criterion` on this figure."""
    false_alarm: float
    """Probability that a healthy part fails."""
    finds: float | None
    """Smallest slowdown (0.05: 5 % slower) that the floor finds with DETECTION_PROBABILITY; None if it finds no slowdown."""
    could_find: float
    """Smallest slowdown that the best possible floor finds with DETECTION_PROBABILITY.

    The best possible floor is the highest one at which a healthy part fails with a probability of at most MAX_FALSE_ALARM.
    """


@dataclass(frozen=True, kw_only=True)
class Power:
    """The detection power of all floors, and the repeatability of all figures."""

    runs: tuple[str, ...]
    gates: tuple[Gate, ...]
    repeats: tuple[Repeatability, ...]
    worst: Mapping[str, Repeatability]
    """Group -> its figure with the worst repeatability."""
    left_out: tuple[str, ...]
    """`FIGURE (CRITERION)` for each figure that has a floor, but no part with values from at least MIN_RUNS runs."""


def power(runs: Sequence[Run], packs: Sequence[Pack]) -> Power:
    """Return the detection power of every numeric floor on benchmark results.

    Raises:
        UsageError: fewer than three runs, the same run twice, or runs of different hosts or GPUs.
    """
    _check([plan for plan, _ in runs])
    series: dict[Figure, dict[Part, list[float]]] = defaultdict(lambda: defaultdict(list))
    floors: dict[tuple[str, str, Figure], list[float]] = defaultdict(list)
    for plan, evidence in runs:
        planned = Planned(plan)
        figures: dict[tuple[Figure, Part], float] = {}
        # The record of every host of a gang has the figures of the whole gang. They count once.
        for host, of_host in evidence.items():
            figures |= _figures(host, of_host, planned)
        for (figure, part), value in figures.items():
            series[figure][part].append(value)
        for verdict in judge(plan, evidence, packs):
            if _is_floor(verdict):
                judged = (verdict.name, verdict.stage, tuple(planned.params(verdict).items()))
                floors[(verdict.criterion, verdict.unit, judged)].append(float(verdict.limit or 0))
    repeated = {
        figure: {part: values for part, values in parts.items() if len(values) >= MIN_RUNS}
        for figure, parts in series.items()
    }
    repeats = tuple(_repeat(figure, parts) for figure, parts in repeated.items() if parts)
    return Power(
        runs=tuple(plan.run_id for plan, _ in runs),
        gates=tuple(_gate(*key, limits, repeated[key[2]]) for key, limits in floors.items() if repeated.get(key[2])),
        repeats=repeats,
        worst={
            group: max(members, key=lambda item: item.worst)
            for group in GROUPS
            if (members := [item for item in repeats if item.group == group])
        },
        left_out=tuple(dict.fromkeys(f"{key[2][0]} ({key[0]})" for key in floors if not repeated.get(key[2]))),
    )


def _check(plans: Sequence[Plan]) -> None:
    """Raise UsageError if there are too few runs, if one is given twice, or if their hosts or GPUs differ."""
    if len(plans) < MIN_RUNS:
        raise UsageError(
            f"{len(plans)} {'run' if len(plans) == 1 else 'runs'}: noise cannot be estimated from fewer than {MIN_RUNS} runs "
            "of the same hosts"
        )
    nonces: set[str] = set()
    for plan in plans:
        if plan.nonce in nonces:
            raise UsageError(f"run {plan.run_id} is given twice: comparing it with itself would show no noise")
        nonces.add(plan.nonce)
        hosts = [{(host.name, host.devices) for host in other.hosts} for other in (plan, plans[0])]
        if hosts[0] != hosts[1]:
            raise UsageError(f"runs {plans[0].run_id} and {plan.run_id} have different hosts or GPUs")


def _figures(host: str, evidence: Evidence, planned: Planned) -> dict[tuple[Figure, Part], float]:
    """Return figure and part -> value, for positive values of one host and run. If a stage ran again, the last value counts."""
    serials = {f"gpu={gpu.index}": gpu.serial for gpu in evidence.gpus()}
    figures = {}
    for observation in evidence.benchmarks():
        value = measured_number(observation)
        if value is not None and value > 0:
            figure = (observation.name, observation.stage, tuple(planned.params(observation).items()))
            # A part that was replaced between two runs is another part, even in the same slot.
            serial = serials.get(Scope.parse(observation.scope).device, "")
            scope = f"{observation.scope} {serial}".strip()
            figures[(figure, ("" if Scope.parse(observation.scope).is_gang else host, scope))] = value
    return figures


def _is_floor(verdict: Verdict) -> bool:
    judged = verdict.verdict in (PASS, FAIL) and verdict.operator in ("ge", "gt")
    return judged and is_number(verdict.limit) and from_benchmark(verdict.name)


def _gate(
    criterion: str, unit: str, figure: Figure, limits: Sequence[float], parts: Mapping[Part, Sequence[float]]
) -> Gate:
    """Return the power of one floor. `limits`: the limits in its verdicts. `parts`: part -> its values in the runs."""
    medians = [statistics.median(values) for values in parts.values()]
    mean = statistics.fmean(medians)
    run_sigma = statistics.fmean(mad_sigma(values) for values in parts.values())
    part_sigma = mad_sigma(medians)
    sigma, limit = math.hypot(run_sigma, part_sigma), statistics.median(limits)
    finds = 1 - (limit - _DETECTION_SIGMAS * sigma) / mean
    return Gate(
        criterion=criterion,
        name=figure[0],
        stage=figure[1],
        params=dict(figure[2]),
        unit=unit,
        n=sum(map(len, parts.values())),
        parts=len(parts),
        mean=mean,
        run_sigma=run_sigma,
        part_sigma=part_sigma,
        sigma=sigma,
        limit=limit,
        false_alarm=NormalDist(mean, sigma).cdf(limit) if sigma else float(mean < limit),
        finds=max(0.0, finds) if finds < 1 else None,
        could_find=(_FALSE_ALARM_SIGMAS + _DETECTION_SIGMAS) * sigma / mean,
    )


def mad_sigma(values: Sequence[float]) -> float:
    """Return `robust_sigma`; for fewer than MIN_VALUES_FOR_OUTLIERS values, return the standard deviation if it is larger.

    A median absolute deviation ignores one slow run of three, but with so few values that run is not an outlier: it is a third
    of the data. The price is that the larger of two estimates is, on average, more than the true noise.
    """
    robust = robust_sigma(values)
    if not 2 <= len(values) < MIN_VALUES_FOR_OUTLIERS:
        return robust
    return max(robust, statistics.stdev(values) / STDEV_BIAS[len(values)])


def robust_sigma(values: Sequence[float]) -> float:
    """Estimate the standard deviation from the median absolute deviation of the values; return 0 for fewer than two values.

    The factor 1.4826 = 1 / 0.6745 converts the median absolute deviation (MAD) of a normal distribution to its standard
    deviation. A second factor corrects the bias of few values.
    """
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    correction = _MAD_BIAS.get(len(values), len(values) / (len(values) - 0.8))
    return 1.4826 * correction * statistics.median(abs(value - middle) for value in values)


def _repeat(figure: Figure, parts: Mapping[Part, Sequence[float]]) -> Repeatability:
    spreads = {part: (max(values) - min(values)) / statistics.median(values) for part, values in parts.items()}
    host, scope = max(spreads, key=lambda part: spreads[part])
    return Repeatability(
        name=figure[0],
        stage=figure[1],
        params=dict(figure[2]),
        group=_group(figure[0], dict(figure[2])),
        parts=len(parts),
        worst=spreads[(host, scope)],
        where=f"{host} {scope}".strip(),
    )


def _group(name: str, params: Mapping[str, Value]) -> str:
    """Return the group of GROUPS that a figure belongs to; empty if it belongs to none."""
    size = params.get("size_bytes")
    alone = params.get("sharing") == "alone" and params.get("numa", "local") == "local"
    large = isinstance(size, int | float) and size >= LARGE_MESSAGE
    members = {
        "sustained GEMM": name == "stress.throughput",
        "copies": (name == "host_copy.bandwidth" and alone) or name == "peer_copy.bandwidth",
        "HBM": name == "memory.bandwidth",
        "collectives of 64 MiB and more": name.startswith("collective.") and name.endswith(".busbw") and large,
    }
    return next((group for group in GROUPS if members[group]), "")
