"""Aggregate the rounds of a soak, which repeat the same benchmarks.

The result has one observation per figure (a quantity that is measured on one part), a few launches and a few snapshots. A fault
in one round (wrong memory words, a loss that is not finite, a figure that could not be measured) stays in the record even if all
later rounds are good. The value of a rate in the record is its median over the rounds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from agent.sampling.snapshot_sampler import SnapshotSelector
from agent.sampling.timeline import Recorder
from fleet.judge.evidence import identifying_params
from fleet.judge.reading_consistency import UPTIME
from fleet.judge.reboots import BOOT_ID, reboots
from schemas.catalogue import counts_wrong_results
from schemas.readings import READINGS
from schemas.records import MEASURED, Launch, Metric, Observation, Samples, Snapshot, Value, is_number

WORST = {"temperature": max, "throttled_share": max, "loss_ratio": max, "tested_share": min, "accuracy": min}
"""Last part of a figure's name -> function that selects the value for the record from the old value and that of a new round."""
DIGEST, MISMATCHES = "digest.value", "digest.mismatches"
MEMORY_ERROR = "integrity.error"
"""Name of an observation of one wrong memory word. The wrong words of a round are numbered (parameter `number`). For each number,
the observation of the earliest round is kept."""
THEN = ", then "
"""Separator between the different values of a text that should be the same in all rounds."""
ROUNDING = 1e-4
"""The recorder rounds the values of a series. The rounding changes a value by less than this share of it."""
FIRST_LAUNCHES, LAST_LAUNCHES, FAILED_LAUNCHES = 1, 3, 16
CHANGED_SNAPSHOTS = 8
REBOOT_PAIRS = 8
"""Maximum number of reboots for which the record keeps the snapshots just before and just after the reboot."""
CHANGES_WITH_LOAD = ("gpu.throttle.active", "gpu.tenant", "host.cpu.governor", "gpu.performance_state")
"""First part of the names of readings that change with the load. Their changes are no reason to keep a snapshot."""

FigureKey = tuple[str, str, tuple[tuple[str, Value], ...]]
"""Name, scope and identifying parameters of a figure (`identifying_params`)."""


def figure_key(observation: Observation) -> FigureKey:
    """Return the key of the observation's figure: what was measured, and on which part."""
    return observation.name, observation.scope, tuple(sorted(identifying_params(observation).items()))


def aggregate_rounds(
    before: Sequence[Observation], new: Sequence[Observation], recorder: Recorder, *, at_s: float, number: int
) -> list[Observation]:
    """Return the observations of all rounds: combine `before`, from the earlier rounds, with `new`, from round `number`."""
    by_key = {figure_key(observation): observation for observation in before}
    for observation in new:
        key = figure_key(observation)
        old = by_key.get(key)
        value = observation.value
        if observation.status == MEASURED and is_number(value):
            params = identifying_params(observation)
            recorder.add_value(at_s, observation.name, observation.scope, observation.unit, float(value), params)
            has_series = recorder.series(observation.name, observation.scope, params) is not None
            if old is None and not has_series and not counts_wrong_results(observation.name):
                # The recorder has no room for this series, so `_samples_with_one_more` will compute the statistics. They must
                # count this round as one value. Until now, `samples` describes the repetitions within this round.
                observation = replace(observation, samples=_one_round(float(value)))
        if counts_wrong_results(observation.name) and old is not None and MEASURED in (old.status, observation.status):
            # A count that is not 0 is a fault. It is kept even if the count could not be measured in another round.
            if old.status != MEASURED and value:
                by_key[key] = observation
                continue
            if observation.status != MEASURED and old.value:
                continue
        if old is not None and old.status != MEASURED:
            continue
        if observation.status != MEASURED:
            reason = f"in round {number}: {observation.reason}"[:4096]
            observation = replace(observation, reason=reason, samples=None)
        elif old is not None:
            observation = _combine(old, observation, recorder)
            if observation.name == DIGEST and observation.value != old.value:  # the digests of two rounds differ
                _add_mismatch(by_key, (MISMATCHES, *key[1:]))
        by_key[key] = observation
    return list(by_key.values())


def _add_mismatch(by_key: dict[FigureKey, Observation], key: FigureKey) -> None:
    count = by_key.get(key)
    if count and isinstance(count.value, int):
        by_key[key] = replace(count, value=count.value + 1)


def _combine(old: Observation, new: Observation, recorder: Recorder) -> Observation:
    """Return the figure over all rounds. `old` is the figure over the earlier rounds, and `new` is that of the new round."""
    if old.name == MEMORY_ERROR:
        return old
    old_value, new_value = old.value, new.value
    if isinstance(new_value, bool):
        return replace(new, value=bool(old_value) and new_value)
    if isinstance(old_value, str) or isinstance(new_value, str) or old_value is None or new_value is None:
        texts = str(old_value).split(THEN)
        more = [] if str(new_value) in texts else [str(new_value)]
        return replace(new, value=THEN.join([*texts, *more])[:1024])
    if counts_wrong_results(new.name):
        # The parameters, such as a position, are those of the first round whose count is not 0.
        return replace(old if old_value else new, value=old_value + new_value)
    last = new.name.rpartition(".")[2]
    samples = _samples(new, recorder, old)
    if last in WORST:
        return replace(new, value=WORST[last](old_value, new_value), samples=samples)
    return replace(new, value=samples.p50, samples=samples)


def _samples(observation: Observation, recorder: Recorder, old: Observation) -> Samples:
    """Return count, extremes and median of the rounds so far, at the resolution of the recorder's buckets.

    `old` is the figure of the earlier rounds. If the supervisor was killed, the recorder continues from the last checkpoint,
    which may lack a round that `old` includes. So `old.value` is added if it is below the minimum or above the maximum of the
    recorded values.
    """
    series = recorder.series(observation.name, observation.scope, identifying_params(observation))
    before = float(old.value or 0)
    if series is None:  # the recorder has no room for more series
        return _samples_with_one_more(old, float(observation.value or 0))
    low, high, means, number = min(series.low), max(series.high), list(series.mean), sum(series.n)
    if before < low - ROUNDING * abs(low) or before > high + ROUNDING * abs(high):
        low, high, number = min(low, before), max(high, before), number + 1
        means.append(before)
    mean = statistics.fmean(means)
    # The bucket means may scatter less than the rounds. Whatever the rounds are, with these extremes their standard deviation is
    # at least (high - low) / sqrt(2 * number).
    deviation = max(statistics.pstdev(means), (high - low) / math.sqrt(2 * number))
    return Samples(
        n=number,
        min=low,
        p50=statistics.median(means),
        max=high,
        cv=deviation / abs(mean) if mean else 0.0,
    )


def _samples_with_one_more(old: Observation, new: float) -> Samples:
    """Return the samples of `old` with one more value. `p50` is then the mean, because the median would need all values.

    Mean and variance are updated with Welford's method (1962).
    """
    samples = old.samples or _one_round(float(old.value or 0))
    n = samples.n + 1
    mean = samples.p50 + (new - samples.p50) / n
    variance = (samples.n * (samples.cv * samples.p50) ** 2 + (new - samples.p50) * (new - mean)) / n
    cv = math.sqrt(max(variance, 0.0)) / abs(mean) if mean else 0.0
    return Samples(n=n, min=min(samples.min, new), p50=mean, max=max(samples.max, new), cv=cv)


def _one_round(value: float) -> Samples:
    return Samples(n=1, min=value, p50=value, max=value, cv=0.0)


def select_launches(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """Return the first launch, the last LAST_LAUNCHES, the first FAILED_LAUNCHES failed launches, and some with other processes.

    For each GPU that another process used, the first such launch is kept. The logs of successful launches are removed.
    """
    used = {gpu: index for index in reversed(range(len(launches))) for gpu in launches[index].other_processes}
    failed = [index for index, launch in enumerate(launches) if not launch.succeeded]
    chosen = {
        *range(FIRST_LAUNCHES),
        *failed[:FAILED_LAUNCHES],
        *used.values(),
        *range(max(0, len(launches) - LAST_LAUNCHES), len(launches)),
    }
    return tuple(_without_logs(launch) for index, launch in enumerate(launches) if index in chosen)


def _without_logs(launch: Launch) -> Launch:
    if not launch.succeeded:
        return launch
    return replace(launch, log_tail="", ranks=tuple(replace(rank, log_tail="") for rank in launch.ranks))


def select_snapshots(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """Return the snapshots that the record keeps.

    - Of the snapshots before and after rounds: the first and the last, the first CHANGED_SNAPSHOTS in which a state changed or a
      counter fell since the previous one (`_changed`), and the two around each of the first REBOOT_PAIRS reboots.
    - Of the snapshots during rounds: the one under the highest load, and those that show alarms (`SnapshotSelector`).
    """
    selector = SnapshotSelector()
    for snapshot in snapshots:
        if snapshot.phase == "during":
            selector.add(snapshot)
    edges = [snapshot for snapshot in snapshots if snapshot.phase != "during"]
    kept = edges[:1] + edges[-1:] if len(edges) > 1 else edges
    changed = [later for earlier, later in itertools.pairwise(edges) if _differs(earlier, later)]
    pairs = reboots(_readings(edges, UPTIME), _readings(edges, BOOT_ID))[:REBOOT_PAIRS]
    for snapshot in (*changed[:CHANGED_SNAPSHOTS], *itertools.chain.from_iterable(pairs)):
        kept += [snapshot] if snapshot not in kept else []
    return tuple(sorted([*kept, *selector.selected()], key=lambda snapshot: snapshot.at))


def _readings(snapshots: Sequence[Snapshot], name: str) -> list[tuple[Snapshot, Metric]]:
    return [(snapshot, metric) for snapshot in snapshots for metric in snapshot.metrics if metric.name == name]


def _fell(old: Value, new: Value) -> bool:
    return isinstance(old, int | float) and isinstance(new, int | float) and new < old


def _differs(earlier: Snapshot, later: Snapshot) -> bool:
    before = {metric.name: metric for metric in earlier.metrics}
    return any(
        _changed(before[metric.name], metric)
        for metric in later.metrics
        if metric.name in before and not metric.name.startswith(CHANGES_WITH_LOAD)
    )


def _changed(before: Metric, after: Metric) -> bool:
    """Return whether the metric changed between two snapshots.

    A flag or a text changed if it is different. A counter changed only if it fell. Changes of other numbers are ignored. Any
    metric changed if the parts without a value are not the same as before.
    """
    if before.absent.keys() != after.absent.keys():
        return True
    pairs = [(before.values[scope], value) for scope, value in after.values.items() if scope in before.values]
    if after.name in READINGS and READINGS[after.name].counter:
        return any(_fell(old, new) for old, new in pairs)
    return any(old != new for old, new in pairs if isinstance(new, bool | str))
