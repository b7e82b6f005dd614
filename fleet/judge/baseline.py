"""Compute limits from the accepted measurements of the same part, for criteria with `vs_baseline`.

The baseline level of a figure is a robust median over the accepted runs: up to two wrong runs in five hardly move it. The
figure's noise combines the scatter of the runs that are no outliers with the precision of a single run. The distance of a limit
from the level is at least a multiple of this noise; only a criterion that sets an absolute change ignores the noise.

A record has only a summary of repeated samples: number, extremes, median and coefficient of variation. Distances between
distributions (Wasserstein, Kolmogorov-Smirnov) would need the samples themselves. Instead, the judge compares medians in units of
their known noise (`noise`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.criteria import Criterion
from fleet.judge.direction import HIGHER_IS_BETTER, LOWER_IS_BETTER, MUST_BE_ZERO, RATE_UNITS
from fleet.judge.finding import FLOORS
from fleet.judge.gpu_identity import identities, shared_serials
from fleet.quantities import counted, quantity
from schemas.baselines import HostBaseline, Key, Level
from schemas.records import MEASURED, Gpu, Observation, Samples, Value
from schemas.scopes import HOST, Scope

CRITERION = "baseline"
SOURCE = "the record on which the part was accepted"
MIN_VALUES_FOR_OUTLIERS = 5
"""With fewer values no outlier can be identified. The median of three or four values tolerates one wrong value."""
MIN_RUNS_FOR_NOISE = 3
"""With fewer runs, the noise from run to run is unknown."""
NEAR_FRACTION = 0.01
"""A value that differs from the middle (`robust_level`) by at most this fraction of it is never an outlier, however little the
other values scatter."""
OUTLIER_SIGMAS = 5.0
"""Values more than this many standard deviations from the middle are outliers."""
MAX_NOISE_MARGIN = 0.25
"""Largest noise margin for which there is a limit. The noise margin is the criterion's `sigmas` times the noise, as a fraction
of the level. If abs(1 - the criterion's `fraction`) is larger, that value applies instead."""
MIDDLE_HALF_SIGMAS = 1.349
"""Width of the middle half of a normal distribution, in standard deviations."""
STDEV_BIAS = {2: 0.7979, 3: 0.8862, 4: 0.9213, 5: 0.9400}
"""Number of values -> mean of their standard deviation, divided by the true sigma of a normal distribution (c4)."""
MEDIAN_ERROR_RATIO = 1.2533
"""Standard error of the median, divided by that of the mean, for many values of a normal distribution."""
CI95_SIGMAS = 1.96
"""Half width of a 95 % confidence interval, in standard errors."""
OUTCOME_PARAMS = frozenset(
    {
        *("phase", "algorithm", "protocol", "transport", "nvls", "nccl_log", "moved_bytes", "places", "access", "peak"),
        *("bytes", "free_bytes", "samples_per_second", "cpus_per_rank", "left_out", "repetitions", "devices"),
        *("nccl_settings", "nccl_other_settings", "passes", "elapsed_s", "wrong_addresses", "wrong_bits", "pcie_rate"),
    }
)
"""Parameters that describe the outcome of a measurement, not its settings. Figures that differ only in these parameters are
compared with each other."""
READINGS = {
    "gpu.pcie.generation": 1,
    "gpu.pcie.width": 1,
    "gpu.nvlink.active_links": 1,
    "gpu.remapped_rows.uncorrectable": -1,
    "gpu.ecc.uncorrectable_aggregate": -1,
    "gpu.retired_pages.count": -1,
    "infiniband.rate": 1,
    "network.speed": 1,
}
"""Reading that a baseline includes -> 1 if more is better, -1 if less is better.

For links the best value in a run counts, because idle links lower their speed. The readings with -1 are counts of wear, which
only grow."""
BASELINE_UNITS = RATE_UNITS | {"W", "Hz", "Cel"}
BASELINE_NAMES = frozenset(
    {"latency", "graph_latency", "step_time", "save_time", "restore_time", "mfu", "hidden_share"}
)
EXCLUDED_NAMES = frozenset({"algbw"})


@dataclass(frozen=True, kw_only=True)
class RobustLevel:
    """The robust level of several measurements of the same figure."""

    value: float
    """Median of the values without outliers."""
    sigma: float
    """Standard deviation of the values without outliers; 0 for a single value."""
    n: int
    """Number of values without outliers."""
    left_out: int
    """Number of outliers."""


def robust_level(values: Sequence[float]) -> RobustLevel:
    """Return the median of `values` without outliers, and their scatter. With five or more values, up to 40 % may be wrong.

    Values far from the middle are outliers. The middle is the median of the shortest interval that contains more than half of the
    values, and "far" is measured by the width of this interval. With fewer than five values, none is an outlier.

    Raises:
        ValueError: `values` is empty, or a value is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"no level: the values are empty or not finite: {list(values)[:5]}")
    ordered = sorted(values)
    near = ordered
    if len(ordered) >= MIN_VALUES_FOR_OUTLIERS:
        size = len(ordered) // 2 + 1
        first = min(range(len(ordered) - size + 1), key=lambda start: ordered[start + size - 1] - ordered[start])
        half = ordered[first : first + size]
        middle = statistics.median(half)
        reach = max(OUTLIER_SIGMAS * (half[-1] - half[0]) / MIDDLE_HALF_SIGMAS, NEAR_FRACTION * abs(middle))
        near = [value for value in ordered if abs(value - middle) <= reach]
    return RobustLevel(
        value=statistics.median(near),
        sigma=small_sample_sigma(near),
        n=len(near),
        left_out=len(ordered) - len(near),
    )


def small_sample_sigma(values: Sequence[float]) -> float:
    """Return the standard deviation of values without outliers, corrected for the bias of few values; 0 for fewer than two."""
    return statistics.stdev(values) / STDEV_BIAS.get(len(values), 1.0) if len(values) > 1 else 0.0


def precision(samples: Samples | None) -> float | None:
    """Return the relative standard error of a median, from the summary of its samples; None for fewer than two samples."""
    if samples is None or samples.n < 2:
        return None
    if samples.precision is not None:
        return samples.precision / CI95_SIGMAS
    return MEDIAN_ERROR_RATIO * samples.cv / math.sqrt(samples.n)


def level_of(
    name: str, unit: str, stage: str, within: str, params: dict[str, Value], values: dict[str, float]
) -> Level:
    """Return the level of a figure.

    `values` maps each accepted run to its value. `within` is the rest of the scope below the part (`part_of_scope`).
    """
    result = robust_level(list(values.values()))
    known = result.n >= MIN_RUNS_FOR_NOISE and result.value
    return Level(
        name=name,
        unit=unit,
        stage=stage,
        within=within,
        params=params,
        value=result.value,
        sigma=result.sigma / abs(result.value) if known else None,
        left_out=result.left_out,
        values=values,
    )


def noise(level: Level) -> float:
    """Return the standard deviation of a new measurement around the level, as a fraction of the level; 0 if it is not known.

    Only the accepted runs count: a part whose values scatter more in later runs does not get a more lenient limit.
    """
    sigma = (level.sigma or 0.0) * math.sqrt(1 + 1 / max(1, len(level.values) - level.left_out))
    return math.hypot(sigma, level.precision or 0.0)


def direction(name: str, unit: str) -> int:
    """Return 1 if more is better, -1 if less is better, 0 if it is not known which is better."""
    last = name.rpartition(".")[2]
    if name in READINGS:
        return READINGS[name]
    if unit in RATE_UNITS or last in HIGHER_IS_BETTER:
        return 1
    return -1 if last in LOWER_IS_BETTER | MUST_BE_ZERO and unit != "Cel" else 0


def is_baseline_figure(observation: Observation) -> bool:
    """Return whether a baseline includes the observation."""
    if (
        observation.status != MEASURED
        or isinstance(observation.value, bool)
        or not isinstance(observation.value, int | float)
    ):
        return False
    if "phase" in observation.params:
        return observation.name in READINGS
    last = observation.name.rpartition(".")[2]
    return (
        math.isfinite(observation.value)
        and last not in EXCLUDED_NAMES
        and (observation.unit in BASELINE_UNITS or last in BASELINE_NAMES)
    )


def part_of_scope(gpus: Mapping[str, str], scope: str) -> tuple[str, str]:
    """Return the identity of the GPU that a scope begins with, and the rest of the scope. `gpus`: see `identities`.

    Without such a GPU, or if it has no identity, return an empty string and the whole scope. For the scope `host`, return two
    empty strings. A peer in the rest is replaced by its identity, so that the result does not depend on GPU indexes.
    """
    parsed = Scope.parse(scope)
    gpu = gpus.get(parsed.device)
    if not gpu:
        return "", scope if scope != HOST else ""
    peer = gpus.get(f"gpu={parsed.get('peer')}")
    return gpu, f"peer={peer}" if peer is not None and parsed.kind == "peer" else parsed.below


def comparison_key(observation: Observation, within: str) -> Key:
    """Return the key that two observations must share to be compared. The key of a reading does not contain its stage.

    `within` is the rest of the scope below the part (`part_of_scope`).
    """
    stage = "" if "phase" in observation.params else observation.stage
    return observation.name, stage, within, tuple(sorted(settings(observation).items()))


def settings(observation: Observation) -> dict[str, Value]:
    """Return the parameters of an observation that are not outcomes."""
    outcomes = outcome_params(observation.name)
    return {key: value for key, value in observation.params.items() if key not in outcomes}


def outcome_params(name: str) -> frozenset[str]:
    """Return the parameters of a figure that are outcomes.

    For pairs of hosts they include the message size, because slow pairs are measured with smaller messages.
    """
    return OUTCOME_PARAMS | {"size_bytes"} if name.startswith("pairs.") else OUTCOME_PARAMS


class AcceptedRecord:
    """The accepted levels of one host, looked up by observation."""

    def __init__(self, baseline: HostBaseline | None, gpus: Sequence[Gpu]) -> None:
        host = baseline.host if baseline else None
        self.shared = shared_serials(gpus) | shared_serials(host.gpus if host else ())
        """Serials that several GPUs of the host share, now or when it was accepted."""
        self._gpus = identities(gpus, self.shared)
        self._levels: dict[str, dict[Key, Level]] = {}
        for serial, part in (("", host), *(baseline.gpus.items() if baseline else ())):
            if part:
                self._levels[serial] = {level.key: level for level in part.figures}

    def level(self, observation: Observation) -> Level | None:
        """Return the accepted level of the same figure of the same part; None if there is none."""
        serial, within = part_of_scope(self._gpus, observation.scope)
        return self._levels.get(serial, {}).get(comparison_key(observation, within))

    def part(self, scope: str) -> str:
        """Return the identity of the GPU that a scope begins with; empty without such a GPU or identity."""
        return part_of_scope(self._gpus, scope)[0]

    def has(self, scope: str) -> bool:
        """Return whether the part that a scope begins with has an accepted record."""
        return part_of_scope(self._gpus, scope)[0] in self._levels


def limit(criterion: Criterion, level: Level) -> tuple[float, str] | None:
    """Return the limit that follows from the accepted level, and its explanation; None if there is no limit.

    The criterion's fraction sets the distance from the level, unless the criterion's multiple of the figure's noise is larger. If
    the noise is too large (MAX_NOISE_MARGIN), there is no limit.

    A criterion with fraction 1 uses the noise alone. If the noise of the figure is unknown or 0, the limit depends on the unit:
    with the unit 1 it is the level itself, otherwise there is none.

    A criterion with `change` ignores the noise.

    Raises:
        ValueError: the criterion compares with no baseline.
    """
    rule = criterion.baseline
    if rule is None:
        raise ValueError(f"criterion {criterion.id} compares with no baseline")
    if rule.change is not None:
        text = f"the accepted level {'minus' if rule.change < 0 else 'plus'} {quantity(abs(rule.change), level.unit)}"
        return level.value + rule.change, _explain_limit(level, text)
    margin = rule.sigmas * noise(level)
    is_noise_unknown = rule.fraction == 1 and not margin and level.unit != "1"
    if margin > max(MAX_NOISE_MARGIN, abs(1 - rule.fraction)) or is_noise_unknown:
        return None
    is_floor = criterion.operator in FLOORS
    share = min(rule.fraction, 1 - margin) if is_floor else max(rule.fraction, 1 + margin)
    text = f"{share * 100:.4g} % of the accepted level"
    if share != rule.fraction:
        text += f", because {rule.sigmas:g} sigma of its noise are {margin * 100:.3g} %"
    return share * level.value, _explain_limit(level, text)


def _explain_limit(level: Level, text: str) -> str:
    runs = f"median of {len(level.values)} accepted runs" if len(level.values) != 1 else "one accepted run"
    outliers = f" without {counted(level.left_out, 'outlier')}" if level.left_out else ""
    return f"{text}; this level is {quantity(level.value, level.unit)} ({runs}{outliers})"


def too_noisy_reason(level: Level) -> str:
    """Return why `limit` returns None for this level."""
    if not noise(level):
        return (
            "the limit needs the noise of the accepted figure, which is unknown: accept three or more runs with different "
            "values"
        )
    return f"the accepted figure has a noise (sigma) of {noise(level) * 100:.2g} %: a loss cannot be distinguished from noise"
