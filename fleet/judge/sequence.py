"""Whether the snapshots, launches and ranks of a record follow each other as the agent makes them.

A record whose parts were exchanged, repeated or left out has the right parts at the wrong place or time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from fleet.judge.host_view import HostView
from schemas.records import Launch, Record, Snapshot
from schemas.stages import BENCHMARK, GANG, PREFLIGHT, SOAK
from schemas.timeline import Soak
from schemas.times import epoch_seconds

Problem = tuple[str, str, str, str]
"""Name, scope, reason, stage."""

OVERLAP_TOLERANCE_S = 60.0
"""The system clock may be corrected between two launches."""
UNREAD_S = 60.0
"""A launch that takes longer has a snapshot: they are taken every 2 s, and a driver that blocks delays one by 20 s."""
POWER = "gpu.power"
"""Reading that the timeline of a soak has, if its GPUs are watched."""
KEPT_ROUNDS = 4
"""A soak keeps the launches of its first round and of its last three."""


def sequence_problems(view: HostView, record: Record) -> Iterator[Problem]:
    """Yield every part of a record that is not at its place."""
    yield from _order_of_snapshots(record)
    yield from _order_of_launches(record)
    yield from _unread_launches(record)
    yield from _end_of_soak(record)
    for launch in record.launches:
        for reason in _places_of_ranks(view, launch):
            yield f"stage.{launch.stage}", "host", reason, launch.stage
    if record.soak:
        for reason in _rounds(record.soak, [launch for launch in record.launches if launch.stage == SOAK]):
            yield f"stage.{SOAK}", "host", reason, SOAK
    listed = {gpu.index for gpu in record.gpus}
    if any(launch.outcome == "finished" and launch.ranks for launch in record.launches) and not view.renumbered:
        for index in sorted({gpu.index for gpu in view.gpus} & {*view.host.devices} - listed):
            yield "gpu.serial", f"gpu={index}", "another record of the host lists this GPU, and this one does not", ""


def _order_of_snapshots(record: Record) -> Iterator[Problem]:
    """Snapshots are in order of time: the first of the run, then those before, during and after each launch."""
    snapshots = record.snapshots
    for earlier, later in itertools.pairwise(snapshots):
        if _is_earlier(later.at, earlier.at):
            reason = f"the snapshot {later.phase} {later.stage} is of {later.at}, and the one before it of {earlier.at}"
            yield f"stage.{later.stage}", "host", reason, later.stage
        elif later.at == earlier.at and "." in later.at:  # older records have no fractions of a second
            reason = f"the snapshots {earlier.phase} {earlier.stage} and {later.phase} {later.stage} are of one moment"
            yield f"stage.{later.stage}", "host", reason, later.stage
    if snapshots and snapshots[0].stage != PREFLIGHT and any(item.stage == PREFLIGHT for item in snapshots):
        yield f"stage.{PREFLIGHT}", "host", f"the first snapshot is of {snapshots[0].stage}", PREFLIGHT
    by_stage: dict[str, list[Snapshot]] = defaultdict(list)
    for snapshot in snapshots:
        by_stage[snapshot.stage].append(snapshot)
    for stage, of_stage in by_stage.items():
        phases = [snapshot.phase for snapshot in of_stage]
        if stage == PREFLIGHT:
            is_right = set(phases) == {"before"}
        elif stage == SOAK:  # it keeps some of many snapshots
            is_right = phases[0] == "before"
        else:
            pairs = itertools.pairwise(phases)
            is_right = phases[0] == "before" and not any(first == "after" and then != "before" for first, then in pairs)
        if not is_right:
            yield f"stage.{stage}", "host", f"its snapshots are not in order: {', '.join(phases)}", stage


def _seconds(moment: str) -> float:
    """Return the seconds since 1970; a text that is no time, which is reported elsewhere, gives no number."""
    with contextlib.suppress(ValueError):
        return epoch_seconds(moment)
    return math.nan


def _is_earlier(moment: str, other: str) -> bool:
    """Return whether a moment is earlier than another. A text that is no time is reported elsewhere."""
    if moment >= other:  # the usual case: both have the same precision
        return False
    with contextlib.suppress(ValueError):
        return epoch_seconds(moment) < epoch_seconds(other)
    return False


def _order_of_launches(record: Record) -> Iterator[Problem]:
    for earlier, later in itertools.pairwise(record.launches):
        if _seconds(later.began) < _seconds(earlier.began) + earlier.duration_s - OVERLAP_TOLERANCE_S:
            reason = f"a launch began at {later.began}, and the one before it at {earlier.began} took {earlier.duration_s:.0f} s"
            yield f"stage.{later.stage}", "host", reason, later.stage
            continue
        if _is_earlier(later.began, earlier.began):
            reason = f"a launch began at {later.began}, and the one before it at {earlier.began}"
            yield f"stage.{later.stage}", "host", reason, later.stage


def _unread_launches(record: Record) -> Iterator[Problem]:
    """The agent takes a snapshot during every launch whose GPUs it watches, unless the launch ends at once."""
    read = {snapshot.stage for snapshot in record.snapshots if snapshot.phase == "during"}
    for launch in record.launches:
        is_watched = launch.timeline is not None and launch.duration_s > UNREAD_S
        if launch.succeeded and is_watched and launch.stage not in read:
            reason = f"the launch took {launch.duration_s:.0f} s, and the record has no snapshot during it"
            yield f"stage.{launch.stage}", "host", reason, launch.stage
    is_watched = record.soak is not None and any(series.name == POWER for series in record.soak.timeline.series)
    if record.soak and is_watched and record.soak.soaked_s > UNREAD_S and SOAK not in read:
        reason = f"the soak took {record.soak.soaked_s:.0f} s, and the record has no snapshot during it"
        yield f"stage.{SOAK}", "host", reason, SOAK


def _end_of_soak(record: Record) -> Iterator[Problem]:
    """The last snapshot of a soak that ended after a round is the one after that round."""
    of_soak = [launch for launch in record.launches if launch.stage == SOAK]
    if record.soak and record.soak.ended and of_soak and of_soak[-1].succeeded:
        last = [snapshot for snapshot in record.snapshots if snapshot.stage == SOAK][-1:]
        if not last or last[0].phase != "after" or _is_earlier(last[0].at, of_soak[-1].began):
            yield f"stage.{SOAK}", "host", "the record has no snapshot after the last round of the soak", SOAK


def _places_of_ranks(view: HostView, launch: Launch) -> Iterator[str]:
    """The members of a launch are in rank order, and each has as many ranks as devices."""
    if launch.culprit and launch.outcome != "failed":
        yield f"the launch has the outcome {launch.outcome}, and was ended because of {', '.join(launch.culprit.hosts)}"
    if len({rank.local_rank for rank in launch.ranks}) < len(launch.ranks):
        yield "the launch has a rank twice"
    if len(set(launch.members)) < len(launch.members):
        yield "the launch has a member twice"
    elif launch.ranks and launch.stage in (BENCHMARK, SOAK, GANG) and view.host.name in launch.members:
        first = view.plan.ranks(launch.members[: launch.members.index(view.host.name)])
        for rank in launch.ranks:
            if rank.rank != first + rank.local_rank:
                yield f"local rank {rank.local_rank} has rank {rank.rank}, expected {first + rank.local_rank}"


def _rounds(soak: Soak, launches: Sequence[Launch]) -> Iterator[str]:
    """A soak keeps its first and last launches, each with the number of its round."""
    finished = sum(launch.succeeded for launch in launches)
    if finished > soak.finished:
        yield f"{finished} rounds finished by their launches, {soak.finished} by the soak"
    if len(launches) < min(soak.finished, KEPT_ROUNDS):
        yield f"{soak.finished} rounds finished, and the record has {len(launches)} launches"
    numbers = [launch.number for launch in launches]
    if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
        yield f"the rounds are not in order: {', '.join(map(str, numbers))}"
    series = [(item.name, item.scope, *sorted(item.params.items())) for item in soak.timeline.series]
    if len(set(series)) < len(series):
        yield "the timeline has a series twice"
    if len(set(soak.timeline.events)) < len(soak.timeline.events):
        yield "the timeline has an event twice"
    if max(numbers, default=0) > soak.rounds:
        yield f"the record has a launch of round {max(numbers)}, and {soak.rounds} rounds began"
    if bool(soak.ended) != bool(soak.ended_by):
        yield f"the soak ended at {soak.ended or 'no time'}, by {soak.ended_by or 'nothing'}"
