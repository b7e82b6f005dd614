"""What a part showed when it was accepted, as a limit for what it shows now: `vs_baseline`.

A baseline is settled over the runs in which the part was accepted, so that up to two in five of them may be wrong without
moving it; how far the others lie apart is its noise, and a limit is never set within it.

A record holds of repeated samples their number, extremes, median and coefficient of variation, and not the samples. A distance
between two distributions (Wasserstein, Kolmogorov-Smirnov, the area between them) cannot be had from that; what can be had, and
is used, is how far two medians lie apart in standard deviations of what is known of their noise (`noise`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.judge.criteria import Criterion
from fleet.judge.direction import HIGHER_IS_BETTER, LOWER_IS_BETTER, MUST_BE_ZERO, RATE_UNITS
from fleet.judge.finding import FLOORS
from fleet.quantities import quantity
from schemas.baselines import HostBaseline, Key, Level
from schemas.records import MEASURED, Gpu, Observation, Samples, Value
from schemas.scopes import HOST, Scope

CRITERION = "baseline"
SOURCE = "the record on which the part was accepted"
MIN_VALUES_FOR_OUTLIERS = 5
"""With fewer values no outlier can be identified; their median is used, which tolerates one wrong value in three."""
MIN_RUNS_FOR_NOISE = 3
"""Runs from which the noise from run to run is known."""
NEAR_FRACTION = 0.01
"""Share of the value: a run within it of the others is never left out, however close those lie together."""
OUTLIER_SIGMAS = 5.0
MAX_RELATIVE_SIGMA = 0.25
"""Fraction of the level: if the accepted runs scatter more than this, a loss cannot be detected."""
MIDDLE_HALF_SIGMAS = 1.349
"""The middle half of a normal distribution is so many sigmas wide."""
STDEV_BIAS = {2: 0.7979, 3: 0.8862, 4: 0.9213, 5: 0.9400}
"""Mean of the standard deviation of so many normal values over sigma (c4)."""
MEDIAN_ERROR_RATIO = 1.2533
"""Standard error of the median over that of the mean, of many normal values."""
CI95_SIGMAS = 1.96
OUTCOME_PARAMS = frozenset(
    {
        *("phase", "algorithm", "protocol", "transport", "nvls", "nccl_log", "moved_bytes", "places", "access", "peak"),
        *("bytes", "free_bytes", "samples_per_second", "cpus_per_rank", "left_out", "repetitions", "devices"),
    }
)
"""Parameters that say how a measurement went: no setting by which two figures would differ."""
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
"""Readings that a baseline keeps: 1 if more is better (the best of a run counts, since idle links save power), -1 for wear, which
only grows."""
BASELINE_UNITS = RATE_UNITS | {"W", "Hz", "Cel"}
BASELINE_NAMES = frozenset(
    {"latency", "graph_latency", "step_time", "save_time", "restore_time", "mfu", "hidden_share"}
)
EXCLUDED_NAMES = frozenset({"algbw"})


@dataclass(frozen=True, kw_only=True)
class RobustLevel:
    """Several measurements of the same thing, as one."""

    value: float
    sigma: float
    """Standard deviation of the values that count; 0 of one."""
    n: int
    """Values that count."""
    left_out: int


def robust_level(values: Sequence[float]) -> RobustLevel:
    """The value that most of `values` speak for; up to 40 % of five and more may be anything at all.

    The shortest interval with more than half of the values is where the sound ones are; what lies far from it is left out, and
    of the rest the median stands. Of fewer than five the median of all stands.

    Raises:
        ValueError: there are none, or one that is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"no level: the values are empty or not finite: {list(values)[:5]}")
    ordered = sorted(values)
    near = ordered
    if len(ordered) >= MIN_VALUES_FOR_OUTLIERS:
        size = len(ordered) // 2 + 1
        first = min(
            range(len(ordered) - size + 1), key=lambda scope_key: ordered[scope_key + size - 1] - ordered[scope_key]
        )
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
    """Standard deviation of values from which the outliers are gone; of few, made as much larger as few may fall short."""
    return statistics.stdev(values) / STDEV_BIAS.get(len(values), 1.0) if len(values) > 1 else 0.0


def precision(samples: Samples | None) -> float | None:
    """Standard error of a median over the median, from what a record holds of its samples; None of one sample."""
    if samples is None or samples.n < 2:
        return None
    if samples.precision is not None:
        return samples.precision / CI95_SIGMAS
    return MEDIAN_ERROR_RATIO * samples.cv / math.sqrt(samples.n)


def level_of(
    name: str, unit: str, stage: str, within: str, params: dict[str, Value], values: dict[str, float]
) -> Level:
    """The level of a figure over the runs that have it."""
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
    """Standard deviation, over the value, of one more measurement against the level, as far as it is known; else 0.

    It is that of the part when it was accepted: one that scatters more since is not excused by it.
    """
    sigma = (level.sigma or 0.0) * math.sqrt(1 + 1 / max(1, len(level.values) - level.left_out))
    return math.hypot(sigma, level.precision or 0.0)


def direction(name: str, unit: str) -> int:
    """1 where more of it is better, -1 where less is, 0 where neither is said."""
    last = name.rpartition(".")[2]
    if name in READINGS:
        return READINGS[name]
    if unit in RATE_UNITS or last in HIGHER_IS_BETTER or last == "mfu":
        return 1
    return -1 if last in LOWER_IS_BETTER | MUST_BE_ZERO and unit != "Cel" else 0


def is_baseline_figure(observation: Observation) -> bool:
    """Whether a baseline keeps it: how fast a part is, what it draws, how its links stand."""
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


def part_of_scope(gpus: Mapping[str, Gpu], scope: str) -> tuple[str, str]:
    """The serial of the GPU that a scope begins with, empty where it is the host's, and the place within the part."""
    parsed = Scope.parse(scope)
    gpu = gpus.get(parsed.device)
    if gpu is None or not identity(gpu):
        return "", scope if scope != HOST else ""
    peer = gpus.get(f"gpu={parsed.get('peer')}")
    return identity(gpu), f"peer={identity(peer)}" if peer and parsed.kind == "peer" else parsed.below


def identity(gpu: Gpu) -> str:
    """Its serial; the UUID of a part that has none."""
    return gpu.serial.strip() or gpu.uuid.strip()


def comparison_key(observations: Observation, within: str) -> Key:
    """What an observation is compared by."""
    stage = "" if "phase" in observations.params else observations.stage
    return observations.name, stage, within, tuple(sorted(settings(observations).items()))


def settings(observation: Observation) -> dict[str, Value]:
    """The parameters that are settings: the message size of pairs is none, being smaller where a pair is too slow for it."""
    outcomes = OUTCOME_PARAMS | {"size_bytes"} if observation.name.startswith("pairs.") else OUTCOME_PARAMS
    return {key: value for key, value in observation.params.items() if key not in outcomes}


class AcceptedRecord:
    """The accepted record of one host, in the form in which the judge asks for it."""

    def __init__(self, left: HostBaseline | None, gpus: Sequence[Gpu]) -> None:
        self._gpus = {f"gpu={gpu.index}": gpu for gpu in gpus}
        self._levels: dict[str, dict[Key, Level]] = {}
        for serial, kept in (("", left.host if left else None), *(left.gpus.items() if left else ())):
            if kept:
                self._levels[serial] = {level.key: level for level in kept.figures}

    def level(self, observation: Observation) -> Level | None:
        """What the same part showed of the same figure; None where its accepted record does not say, or there is none."""
        serial, within = part_of_scope(self._gpus, observation.scope)
        return self._levels.get(serial, {}).get(comparison_key(observation, within))

    def part(self, scope: str) -> str:
        """The serial of the GPU that a scope begins with; empty for the host."""
        return part_of_scope(self._gpus, scope)[0]

    def has(self, scope: str) -> bool:
        """Whether the part that a scope begins with has an accepted record."""
        return part_of_scope(self._gpus, scope)[0] in self._levels


def limit(criterion: Criterion, level: Level) -> tuple[float, str] | None:
    """Return the limit by the accepted figure, and its source; None if its noise is too large to detect a loss.

    It is as far from the level as the criterion says, or farther if the figure's own noise is larger. A criterion with the
    fraction 1 uses the noise alone, and judges nothing if that is unknown.
    """
    asked = criterion.baseline
    if asked is None:
        raise ValueError(f"criterion {criterion.id} compares with no baseline")
    if asked.change is not None:
        return level.value + asked.change, _origin(level, f"changed by {asked.change:+g} at most")
    scatter = asked.sigmas * noise(level)
    if scatter > max(MAX_RELATIVE_SIGMA, abs(1 - asked.fraction)) or (
        asked.fraction == 1 and not scatter and level.unit != "1"
    ):
        return None
    lower = criterion.operator in FLOORS
    share = min(asked.fraction, 1 - scatter) if lower else max(asked.fraction, 1 + scatter)
    by = f"{share * 100:.4g} % of it"
    if share != asked.fraction:
        by += f", for its own noise ({asked.sigmas:g} sigma) is more than {abs(1 - asked.fraction) * 100:.3g} %"
    return share * level.value, _origin(level, by)


def _origin(level: Level, by: str) -> str:
    runs = f"{len(level.values)} accepted runs" if len(level.values) != 1 else "the accepted run"
    out = f", {level.left_out} of them left out" if level.left_out else ""
    return f"{by}; {quantity(level.value, level.unit)} in {runs}{out}"


def too_noisy_reason(level: Level) -> str:
    """Return why the baseline cannot judge."""
    if not noise(level):
        return "the noise of the accepted figure is not known (three accepted runs tell it), and the criterion goes by that alone"
    return f"the accepted runs scatter by {noise(level) * 100:.2g} % (sigma): no loss can be told from their noise"
