"""How much a gate can find: from several runs of the same hosts, the noise of each figure, and what its floor makes of it.

A floor is a trade: high, and healthy parts fail; low, and slow parts pass. Both follow from how the figure of a healthy part
scatters, from run to run and from part to part. A normal model is assumed for it: with a handful of runs the tails cannot be
seen, so the probabilities beyond them are the model's.
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
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.records import MEASURED, Observation, Value
from schemas.reports import FAIL, PASS, Verdict
from schemas.scopes import Scope

MIN_RUNS = 3
DETECTION_PROBABILITY = 0.99
"""Probability with which a slowdown counts as found."""
MAX_FALSE_ALARM = 0.001
"""False alarms that the best possible gate may give."""
_DETECTION_SIGMAS = NormalDist().inv_cdf(DETECTION_PROBABILITY)
_FALSE_ALARM_SIGMAS = NormalDist().inv_cdf(1 - MAX_FALSE_ALARM)
_MAD_BIAS = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}
"""By what the median absolute deviation of so few values falls short: Croux & Rousseeuw, COMPSTAT 1992."""
MIN_VALUES_FOR_OUTLIERS = 6
"""Values of which fewer are too few to call any an outlier."""
LARGE_MESSAGE = 64 << 20
GROUPS = ("sustained GEMM", "copies", "HBM", "collectives of 64 MiB and more")

Run = tuple[Plan, Mapping[str, Evidence]]
Figure = tuple[str, str, tuple[tuple[str, Value], ...]]
"""Name, stage and settings."""
Part = tuple[str, str]
"""Host and scope; the host is empty for what a gang did together."""


@dataclass(frozen=True, kw_only=True)
class Repeatability:
    """How far the same figure of the same part lies apart from run to run."""

    name: str
    stage: str
    params: Mapping[str, Value]
    group: str
    """One of GROUPS, or empty."""
    parts: int
    worst: float
    """(largest - smallest) / median over the runs, of the part where it is largest."""
    where: str


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A criterion with a floor, and what it can find."""

    criterion: str
    name: str
    stage: str
    params: Mapping[str, Value]
    unit: str
    n: int
    """Values: parts times runs."""
    parts: int
    mean: float
    """Mean of the parts' medians."""
    run_sigma: float
    """From run to run, as `mad_sigma` has it, in the unit."""
    part_sigma: float
    """From part to part, likewise; 0 for one part, of which nothing can be said."""
    sigma: float
    """Both together."""
    limit: float
    false_alarm: float
    """Probability that a healthy part fails."""
    finds: float | None
    """Smallest slowdown (0.05: 5 % slower) that the floor finds with DETECTION_PROBABILITY; None if it finds none."""
    could_find: float
    """Smallest slowdown that a floor could find, were MAX_FALSE_ALARM false alarms allowed."""


@dataclass(frozen=True, kw_only=True)
class Power:
    """What several runs say of the gates."""

    runs: tuple[str, ...]
    gates: tuple[Gate, ...]
    repeats: tuple[Repeatability, ...]
    worst: Mapping[str, Repeatability]
    """Group -> its figure that repeats worst."""
    left_out: tuple[str, ...]
    """Gated figures that fewer than MIN_RUNS runs have of any part."""


def power(runs: Sequence[Run], packs: Sequence[Pack]) -> Power:
    """The detection power of every numeric floor on what a benchmark measures.

    Raises:
        UsageError: fewer than three runs, the same run twice, or runs of different hosts.
    """
    _check([plan for plan, _ in runs])
    series: dict[Figure, dict[Part, list[float]]] = defaultdict(lambda: defaultdict(list))
    floors: dict[tuple[str, str, Figure], list[float]] = defaultdict(list)
    for plan, evidence in runs:
        planned = Planned(plan)
        for host, left in evidence.items():
            for key, value in _figures(host, left, planned).items():
                series[key[0]][key[1]].append(value)
        for verdict in judge(plan, evidence, packs):
            if _is_floor(verdict):
                figure = (verdict.name, verdict.stage, tuple(planned.params(verdict).items()))
                floors[(verdict.criterion, verdict.unit, figure)].append(float(verdict.limit or 0))
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
            group: max(result, key=lambda item: item.worst)
            for group in GROUPS
            if (result := [item for item in repeats if item.group == group])
        },
        left_out=tuple(dict.fromkeys(f"{key[2][0]} ({key[0]})" for key in floors if not repeated.get(key[2]))),
    )


def _check(plans: Sequence[Plan]) -> None:
    if len(plans) < MIN_RUNS:
        raise UsageError(
            f"{len(plans)} {'run' if len(plans) == 1 else 'runs'}: noise cannot be told from fewer than {MIN_RUNS} runs "
            "of the same hosts"
        )
    observation: dict[str, None] = {}
    for plan in plans:
        if plan.nonce in observation:
            raise UsageError(f"run {plan.run_id} is given twice: it would seem to repeat itself perfectly")
        observation[plan.nonce] = None
        hosts = [{(host.name, host.devices) for host in other.hosts} for other in (plan, plans[0])]
        if hosts[0] != hosts[1]:
            raise UsageError(f"runs {plans[0].run_id} and {plan.run_id} are not of the same hosts and GPUs")


def _figures(host: str, left: Evidence, planned: Planned) -> dict[tuple[Figure, Part], float]:
    """The positive figures of one host in one run; the last where a stage was run again."""
    names = {f"gpu={gpu.index}": gpu.serial for gpu in left.gpus()}
    result = {}
    for observation in left.benchmarks():
        value = _number(observation)
        if value is not None and value > 0:
            figure = (observation.name, observation.stage, tuple(planned.params(observation).items()))
            # A part that was replaced between two runs is another part, wherever it sits.
            serial = names.get(Scope.parse(observation.scope).device, "")
            scope_key = f"{observation.scope} {serial}".strip()
            result[(figure, ("" if Scope.parse(observation.scope).is_gang else host, scope_key))] = value
    return result


def _number(observation: Observation) -> float | None:
    """The value, which is what is judged: a median of the samples, or, for the power, their mean."""
    value = observation.value
    if observation.status != MEASURED or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _is_floor(verdict: Verdict) -> bool:
    numeric = isinstance(verdict.limit, int | float) and not isinstance(verdict.limit, bool)
    judged = verdict.verdict in (PASS, FAIL) and verdict.operator in ("ge", "gt")
    return judged and numeric and from_benchmark(verdict.name)


def _gate(
    criterion: str, unit: str, figure: Figure, limits: Sequence[float], parts: Mapping[Part, Sequence[float]]
) -> Gate:
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
    """`robust_sigma`; of fewer than MIN_VALUES_FOR_OUTLIERS values the larger of that and the standard deviation.

    A median absolute deviation does not see the one of three runs that was 20 % slower, which with so few is no outlier but
    a third of all that is known. The larger of two estimates is on the average too large: it errs towards noise.
    """
    robust = robust_sigma(values)
    if not 2 <= len(values) < MIN_VALUES_FOR_OUTLIERS:
        return robust
    return max(robust, statistics.stdev(values) / STDEV_BIAS[len(values)])


def robust_sigma(values: Sequence[float]) -> float:
    """The standard deviation of a normal distribution with this median absolute deviation; 0 for one value.

    1.4826 = 1 / 0.6745 makes the MAD of a normal distribution its sigma; the second factor is for few values.
    """
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    small = _MAD_BIAS.get(len(values), len(values) / (len(values) - 0.8))
    return 1.4826 * small * statistics.median(abs(value - middle) for value in values)


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
