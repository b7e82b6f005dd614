"""Check that the snapshots, launches and ranks of a record are complete and in the order in which the agent makes them.

These checks detect edited records: each part may still be valid by itself, although parts were moved, duplicated or removed.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator

from fleet.judge.host_view import HostView
from schemas.records import Launch, Record, Snapshot
from schemas.stages import BENCHMARK, GANG, PREFLIGHT, SOAK
from schemas.times import epoch_seconds, seconds_or_nan

Problem = tuple[str, str, str, str]
"""Name and scope of the inconclusive verdict that reports the problem, its reason, and the stage (empty: no stage)."""

OVERLAP_TOLERANCE_S = 60.0
"""Longest overlap of two launches, in seconds, that is not a problem: a correction of the system clock between two launches can
make them seem to overlap."""
UNREAD_S = 60.0
"""If a launch with a timeline, or a soak with power readings, takes longer than this, its stage must have a snapshot of the phase
`during`. The agent takes one every 2 s, or up to 20 s late if the driver is blocked."""
POWER = "gpu.power"
"""A reading that is in the timeline of every soak in which the agent polls the GPUs."""


def sequence_problems(view: HostView, record: Record) -> Iterator[Problem]:
    """Yield a problem for each part of a record that is out of order, duplicated or missing."""
    yield from _snapshot_order_problems(record)
    yield from _launch_order_problems(record)
    yield from _misplaced_launches(record)
    yield from _missing_snapshots_during(record)
    yield from _missing_snapshot_after_soak(record)
    for launch in record.launches:
        for reason in _launch_problems(view, launch):
            yield f"stage.{launch.stage}", "host", reason, launch.stage
    listed = {gpu.index for gpu in record.gpus}
    if any(launch.outcome == "finished" and launch.ranks for launch in record.launches) and not view.renumbered:
        for index in sorted({gpu.index for gpu in view.gpus} & {*view.host.devices} - listed):
            yield (
                "gpu.serial",
                f"gpu={index}",
                "another record of the host lists this GPU, but this record does not",
                "",
            )


def _snapshot_order_problems(record: Record) -> Iterator[Problem]:
    """Check the times and phases of the snapshots.

    Each snapshot must be later than the previous one. If the stage `preflight` has snapshots, the first snapshot of the record
    must be one of them. All snapshots of `preflight` have the phase `before`. In other stages the first phase is `before`, and
    `after` is followed by the `before` of the next launch. In a soak, only the first phase is checked.
    """
    snapshots = record.snapshots
    for earlier, later in itertools.pairwise(snapshots):
        if _is_earlier(later.at, earlier.at):
            name = f"the snapshot {later.phase} {later.stage}"
            reason = f"{name} was taken at {later.at}, earlier than the previous one at {earlier.at}"
            yield f"stage.{later.stage}", "host", reason, later.stage
        elif later.at == earlier.at and "." in later.at:  # in older records, times have no fractions
            reason = f"the snapshots {earlier.phase} {earlier.stage} and {later.phase} {later.stage} have the same time"
            yield f"stage.{later.stage}", "host", reason, later.stage
    if snapshots and snapshots[0].stage != PREFLIGHT and any(item.stage == PREFLIGHT for item in snapshots):
        reason = f"the first snapshot is of the stage {snapshots[0].stage}, expected {PREFLIGHT}"
        yield f"stage.{PREFLIGHT}", "host", reason, PREFLIGHT
    by_stage: dict[str, list[Snapshot]] = defaultdict(list)
    for snapshot in snapshots:
        by_stage[snapshot.stage].append(snapshot)
    for stage, of_stage in by_stage.items():
        phases = [snapshot.phase for snapshot in of_stage]
        if stage == PREFLIGHT:
            is_right = set(phases) == {"before"}
        elif stage == SOAK:  # the record keeps only some snapshots of a soak
            is_right = phases[0] == "before"
        else:
            pairs = itertools.pairwise(phases)
            is_right = phases[0] == "before" and not any(
                first == "after" and second != "before" for first, second in pairs
            )
        if not is_right:
            yield f"stage.{stage}", "host", f"the snapshots of the stage are not in order: {', '.join(phases)}", stage


def _is_earlier(moment: str, other: str) -> bool:
    """Return whether `moment` is earlier than `other`; False if either text is not a time, which another check reports."""
    # Comparing texts is enough for most pairs, and avoids parsing. But `12:00:05Z` sorts after `12:00:05.3Z`, because `Z` sorts
    # after `.`. So a time without fractions is not found to be earlier than another time in the same second.
    if moment >= other:
        return False
    with contextlib.suppress(ValueError):
        return epoch_seconds(moment) < epoch_seconds(other)
    return False


def _launch_order_problems(record: Record) -> Iterator[Problem]:
    """Check that no launch began before the previous one, or more than OVERLAP_TOLERANCE_S before the previous one ended."""
    for earlier, later in itertools.pairwise(record.launches):
        if seconds_or_nan(later.began) < seconds_or_nan(earlier.began) + earlier.duration_s - OVERLAP_TOLERANCE_S:
            first = f"began at {earlier.began} and took {earlier.duration_s:.0f} s"
            reason = f"a launch {first}, but the next one began at {later.began}"
            yield f"stage.{later.stage}", "host", reason, later.stage
            continue
        if _is_earlier(later.began, earlier.began):
            reason = f"the launches are not in order: one began at {earlier.began}, and the next one at {later.began}"
            yield f"stage.{later.stage}", "host", reason, later.stage


def _misplaced_launches(record: Record) -> Iterator[Problem]:
    """Check that a host's own record has no successful launch of stage `gang`, and its gang record none of `benchmark`."""
    misplaced = BENCHMARK if record.gang else GANG
    for launch in record.launches:
        if launch.succeeded and launch.stage == misplaced:
            kind = "the host's gang record" if record.gang else "the host's own record"
            yield f"stage.{misplaced}", "host", f"a launch of stage {misplaced} is in {kind}", misplaced


def _missing_snapshots_during(record: Record) -> Iterator[Problem]:
    """Check that the record has a `during` snapshot of each stage in which the agent polled the GPUs for longer than UNREAD_S.

    It did so if a successful launch of the stage has a timeline and took longer than UNREAD_S, or if the stage is a soak that ran
    longer than UNREAD_S and has power readings in its timeline.
    """
    stages = {snapshot.stage for snapshot in record.snapshots if snapshot.phase == "during"}
    for launch in record.launches:
        is_watched = launch.timeline is not None and launch.duration_s > UNREAD_S
        if launch.succeeded and is_watched and launch.stage not in stages:
            reason = f"the launch took {launch.duration_s:.0f} s, but the record has no snapshot during it"
            yield f"stage.{launch.stage}", "host", reason, launch.stage
    is_watched = record.soak is not None and any(series.name == POWER for series in record.soak.timeline.series)
    if record.soak and is_watched and record.soak.soaked_s > UNREAD_S and SOAK not in stages:
        reason = f"the soak took {record.soak.soaked_s:.0f} s, but the record has no snapshot during it"
        yield f"stage.{SOAK}", "host", reason, SOAK


def _missing_snapshot_after_soak(record: Record) -> Iterator[Problem]:
    """Check that a soak that has ended, and whose last round succeeded, has a snapshot after that round."""
    of_soak = [launch for launch in record.launches if launch.stage == SOAK]
    if record.soak and record.soak.ended and of_soak and of_soak[-1].succeeded:
        last = [snapshot for snapshot in record.snapshots if snapshot.stage == SOAK][-1:]
        if not last or last[0].phase != "after" or _is_earlier(last[0].at, of_soak[-1].began):
            yield f"stage.{SOAK}", "host", "the record has no snapshot after the last round of the soak", SOAK


def _launch_problems(view: HostView, launch: Launch) -> Iterator[str]:
    """Check the culprit, members and ranks of one launch.

    Only a failed launch has a culprit (the hosts that stopped it), and no member or rank occurs twice. The number of a rank is
    its local number plus the number of ranks that the plan has on the members listed before this host.
    """
    if launch.culprit and launch.outcome != "failed":
        hosts = ", ".join(launch.culprit.hosts)
        yield f"the launch has the outcome `{launch.outcome}`, but the record names hosts that stopped it: {hosts}"
    if len({rank.local_rank for rank in launch.ranks}) < len(launch.ranks):
        yield "the launch has a duplicate rank"
    if len(set(launch.members)) < len(launch.members):
        yield "the launch has a duplicate member"
    elif launch.ranks and launch.stage in (BENCHMARK, SOAK, GANG) and view.host.name in launch.members:
        first = view.plan.ranks(launch.members[: launch.members.index(view.host.name)])
        for rank in launch.ranks:
            if rank.rank != first + rank.local_rank:
                yield f"local rank {rank.local_rank} has rank {rank.rank}, expected {first + rank.local_rank}"
