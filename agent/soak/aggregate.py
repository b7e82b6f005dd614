"""Many rounds of the same benchmarks -> one observation of each figure, a few launches and a few snapshots.

What must never be (wrong words, a loss that is no number, a round in which a figure could not be had) stays, however many
good rounds come after it; of what is a rate the median over the soak is told.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace

from agent.sampling.snapshot_sampler import Watch
from agent.sampling.timeline import Recorder
from schemas.catalogue import BENCHMARKS
from schemas.readings import READINGS
from schemas.records import MEASURED, Launch, Metric, Observation, Samples, Snapshot, Value

APART = ("numa", "world_size")
"""Parameters that the catalogue does not list, and that make another figure all the same."""
ADDED = ("wrong_words", "wrong_products", "wrong_elements", "mismatches")
WORST = {"temperature": max, "throttled_share": max, "loss_ratio": max, "tested_share": min, "accuracy": min}
"""Last parts of names -> which of many rounds' values is told."""
DIGEST, MISMATCHES = "digest.value", "digest.mismatches"
THEN = ", then "
"""Between texts that should have been one and the same in all rounds."""
FIRST_LAUNCHES, LAST_LAUNCHES, FAILED_LAUNCHES = 1, 3, 16
CHANGED_SNAPSHOTS = 8
FALLEN_PAIRS = 8
"""Two snapshots between which the host was started anew, that are kept besides."""
UPTIME = "host.uptime"
RESTLESS = ("gpu.throttle.active", "gpu.tenant", "host.cpu.governor", "gpu.performance_state")
"""Flags that come and go as work does: that they changed is no reason to keep a snapshot."""
_OVER = [(output, frozenset(output.over)) for entry in BENCHMARKS.values() for output in entry.outputs]

Place = tuple[str, str, tuple[tuple[str, Value], ...]]


def settings_of(seen: Observation) -> dict[str, Value]:
    """The parameters by which two rounds' figures are the same figure."""
    over = next((keys for output, keys in _OVER if output.makes(seen.name)), None)
    if over is None:
        return dict(seen.params)
    return {key: value for key, value in seen.params.items() if key in over or key in APART}


def place_of(seen: Observation) -> Place:
    """Which figure of which part it is."""
    return seen.name, seen.scope, tuple(sorted(settings_of(seen).items()))


def folded(
    before: Sequence[Observation], seen: Sequence[Observation], recorder: Recorder, *, at_s: float, number: int
) -> list[Observation]:
    """The observations of all rounds, from those of the rounds before and those of this one."""
    found = {place_of(item): item for item in before}
    for item in seen:
        place = place_of(item)
        old = found.get(place)
        value = item.value
        if item.status == MEASURED and isinstance(value, int | float) and not isinstance(value, bool):
            recorder.add(at_s, item.name, item.scope, item.unit, float(value), settings_of(item))
        if old is not None and old.status != MEASURED:
            continue
        if item.status != MEASURED:
            item = replace(item, reason=f"in round {number}: {item.reason}"[:4096], samples=None)
        elif old is not None:
            item = _joined(old, item, recorder)
            if item.name == DIGEST and item.value != old.value:  # it did not repeat itself, if not within a round
                _add_mismatch(found, (MISMATCHES, *place[1:]))
        found[place] = item
    return list(found.values())


def _add_mismatch(found: dict[Place, Observation], place: Place) -> None:
    counted = found.get(place)
    if counted and isinstance(counted.value, int):
        found[place] = replace(counted, value=counted.value + 1)


def _joined(old: Observation, new: Observation, recorder: Recorder) -> Observation:
    """Two rounds' measurements of one figure, `old` being that of all rounds before."""
    one, other = old.value, new.value
    if isinstance(other, bool):
        return replace(new, value=bool(one) and other)
    if isinstance(one, str) or isinstance(other, str) or one is None or other is None:
        seen = str(one).split(THEN)
        return replace(new, value=THEN.join([*seen, *([] if str(other) in seen else [str(other)])])[:1024])
    last = new.name.rpartition(".")[2]
    if last in ADDED:
        return replace(new, value=one + other)
    samples = _samples(new, recorder)
    if last in WORST:
        return replace(new, value=WORST[last](one, other), samples=samples)
    return replace(new, value=samples.p50, samples=samples)


def _samples(seen: Observation, recorder: Recorder) -> Samples:
    """Count, extremes and median of the rounds so far, as far as the buckets tell."""
    series = recorder.of(seen.name, seen.scope, settings_of(seen))
    assert series is not None  # noqa: S101 - the value was added just before
    spread = statistics.pstdev(series.mean)
    mean = statistics.fmean(series.mean)
    return Samples(
        n=sum(series.n),
        min=min(series.low),
        p50=statistics.median(series.mean),
        max=max(series.high),
        cv=abs(spread / mean) if mean else 0.0,
    )


def few_launches(launches: Sequence[Launch]) -> tuple[Launch, ...]:
    """The first, the last and those that failed; the logs of ranks that ended well are left out."""
    failed = [place for place, launch in enumerate(launches) if not launch.good]
    chosen = {
        *range(FIRST_LAUNCHES),
        *failed[:FAILED_LAUNCHES],
        *range(max(0, len(launches) - LAST_LAUNCHES), len(launches)),
    }
    return tuple(_brief(launch) for place, launch in enumerate(launches) if place in chosen)


def _brief(launch: Launch) -> Launch:
    if not launch.good:
        return launch
    return replace(launch, log_tail="", ranks=tuple(replace(rank, log_tail="") for rank in launch.ranks))


def few_snapshots(snapshots: Sequence[Snapshot]) -> tuple[Snapshot, ...]:
    """The first before, the last after, those in which a state was another or a counter had fallen, both sides of a reboot,
    and of the others what a stage keeps."""
    watch = Watch()
    for taken in snapshots:
        if taken.phase == "during":
            watch.see(taken)
    edges = [taken for taken in snapshots if taken.phase != "during"]
    kept = edges[:1] + edges[-1:] if len(edges) > 1 else edges
    changed = [later for earlier, later in itertools.pairwise(edges) if _differs(earlier, later)]
    reboots = [pair for pair in itertools.pairwise(edges) if _rebooted(*pair)][:FALLEN_PAIRS]
    for taken in (*changed[:CHANGED_SNAPSHOTS], *itertools.chain.from_iterable(reboots)):
        kept += [taken] if taken not in kept else []
    return tuple(sorted([*kept, *watch.kept()], key=lambda taken: taken.at))


def _rebooted(earlier: Snapshot, later: Snapshot) -> bool:
    """Whether the time since boot fell: the one side without the other would not show it, once it has grown again."""
    before, after = (
        [value for metric in taken.metrics if metric.name == UPTIME for value in metric.values.values()]
        for taken in (earlier, later)
    )
    return any(
        isinstance(one, int | float) and isinstance(other, int | float) and other < one
        for one, other in zip(before, after, strict=False)
    )


def _differs(earlier: Snapshot, later: Snapshot) -> bool:
    before = {metric.name: metric for metric in earlier.metrics}
    return any(
        _changed(before[metric.name], metric)
        for metric in later.metrics
        if metric.name in before and not metric.name.startswith(RESTLESS)
    )


def _changed(before: Metric, after: Metric) -> bool:
    """Whether a flag, a text or a reason is another, or a counter has fallen. A number that is no counter may go up and down."""
    counter = after.name in READINGS and READINGS[after.name].counter
    if before.absent.keys() != after.absent.keys():
        return True
    pairs = [(before.values[scope], value) for scope, value in after.values.items() if scope in before.values]
    if counter:
        return any(
            isinstance(one, int | float) and isinstance(other, int | float) and other < one for one, other in pairs
        )
    return any(one != other for one, other in pairs if isinstance(other, bool | str))
