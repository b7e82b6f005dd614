"""A record is inconclusive if its snapshots, launches or ranks are out of order, duplicated or missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import read_packs
from fleet.judge.expectations import contradictory_members
from fleet.judge.judge import Evidence, host_views, judge
from fleet.judge.sequence import sequence_problems
from schemas.records import Culprit, Launch, Record, Snapshot
from schemas.reports import VerdictKind
from schemas.timeline import Series
from schemas.trace import Trace
from tests import builders
from tests.unit.fleet.judge.soak_records import soak_record

PACKS = read_packs([])
PLAN = builders.plan("h1", "h2", profile="smoke", gpu_count=2)
LATER, LAST = "2026-11-21T04:00:10Z", "2026-11-21T04:00:20Z"
Change = Callable[[Record], Record]


def changed(change: Change, *, gang: bool = False) -> dict[str, Evidence]:
    """Return healthy evidence with a change of the host record of h2 or, if `gang` is true, of its gang record."""
    evidence = builders.evidence(PLAN)
    records = tuple(change(item) if bool(item.gang) == gang else item for item in evidence["h2"].records)
    return {**evidence, "h2": Evidence(records=records)}


def reasons(evidence: dict[str, Evidence]) -> list[str]:
    """Return what `sequence_problems` finds in the records of h2."""
    view = next(item for item in host_views(PLAN, evidence, PACKS) if item.host.name == "h2")
    problems = [problem for record in evidence["h2"].records for problem in sequence_problems(view, record)]
    for name, scope, _, stage in problems:
        expected = (f"stage.{stage}", "host") if stage else ("gpu.serial", "gpu=1")
        assert (name, scope) == expected
    return [reason for _, _, reason, _ in problems]


def snapshots(change: Callable[[tuple[Snapshot, ...]], tuple[Snapshot, ...]]) -> Change:
    """Return a change of the snapshots of a record."""
    return lambda record: replace(record, snapshots=change(record.snapshots))


def launches(change: Callable[[Launch], Launch]) -> Change:
    """Return a change of each launch of a record."""
    return lambda record: replace(record, launches=tuple(change(item) for item in record.launches))


def timed(items: tuple[Any, ...], *moments: str) -> tuple[Any, ...]:
    """Return the items with these times, in the same order."""
    return tuple(replace(item, at=moment) for item, moment in zip(items, moments, strict=True))


PROBLEMS: dict[str, tuple[bool, Change, str]] = {
    "snapshot earlier than the previous one": (
        False,
        snapshots(lambda items: timed(items, builders.WHEN, LAST, LATER)),
        f"the snapshot after benchmark was taken at {LATER}, earlier than the previous one at {LAST}",
    ),
    "first snapshot last": (
        False,
        snapshots(lambda items: (*items[1:], items[0])),
        "the first snapshot is of the stage benchmark, expected preflight",
    ),
    "wrong phase in the preflight": (
        False,
        snapshots(lambda items: (items[0], replace(items[0], phase="after"), *items[1:])),
        "the snapshots of the stage are not in order: before, after",
    ),
    "two snapshots after the stage, but one before it": (
        True,
        snapshots(lambda items: (*items, items[1])),
        "the snapshots of the stage are not in order: before, after, after",
    ),
    "snapshots before and after exchanged": (
        True,
        snapshots(lambda items: (items[1], items[0])),
        "the snapshots of the stage are not in order: after, before",
    ),
    "launch earlier than the previous one": (
        True,
        lambda record: replace(
            record,
            launches=(replace(record.launches[0], began=LATER), replace(record.launches[0], number=2)),
        ),
        f"the launches are not in order: one began at {LATER}, and the next one at {builders.WHEN}",
    ),
    "same member twice in a launch": (
        True,
        launches(lambda item: replace(item, members=("h1", "h2", "h2"))),
        "the launch has a duplicate member",
    ),
    "launch that began before the previous one ended": (
        True,
        lambda record: replace(
            record,
            launches=(
                replace(record.launches[0], duration_s=100.0),
                replace(record.launches[0], began=LATER, number=2),
            ),
        ),
        f"a launch began at {builders.WHEN} and took 100 s, but the next one began at {LATER}",
    ),
    "two snapshots with the same time": (
        False,
        snapshots(lambda items: timed(items, f"{LATER[:-1]}.1Z", f"{LATER[:-1]}.2Z", f"{LATER[:-1]}.2Z")),
        "the snapshots before benchmark and after benchmark have the same time",
    ),
    "no snapshot during a long launch": (
        False,
        launches(lambda item: replace(item, duration_s=100.0, timeline=Trace(bucket_s=2.0))),
        "the launch took 100 s, but the record has no snapshot during it",
    ),
    "gang launch in the host record": (
        False,
        launches(lambda item: replace(item, stage="gang")),
        "a launch of stage gang is in the host's own record",
    ),
    "culprit of a finished launch": (
        True,
        launches(lambda item: replace(item, culprit=Culprit(kind="rank_ended", hosts=("h1",), text="rank 1 ended"))),
        "the launch has the outcome `finished`, but the record names hosts that stopped it: h1",
    ),
    "same rank twice in a failed launch": (
        True,
        launches(lambda item: replace(item, outcome="failed", reason="no", ranks=(item.ranks[0], item.ranks[0]))),
        "the launch has a duplicate rank",
    ),
    "members in another order": (
        True,
        launches(lambda item: replace(item, members=("h2", "h1"))),
        "local rank 0 has rank 2, expected 0",
    ),
    "ranks of two devices exchanged": (
        True,
        launches(
            lambda item: replace(
                item, ranks=tuple(replace(rank, local_rank=1 - rank.local_rank) for rank in item.ranks)
            )
        ),
        "local rank 1 has rank 2, expected 3",
    ),
    "GPU that only the other record lists": (
        True,
        lambda record: replace(record, gpus=record.gpus[:1]),
        "another record of the host lists this GPU, but this record does not",
    ),
}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_record_that_the_agent_cannot_write_is_a_contradiction(kind: str) -> None:
    gang, change, reason = PROBLEMS[kind]
    evidence = changed(change, gang=gang)
    assert reason in reasons(evidence)
    verdicts = judge(PLAN, evidence, PACKS)
    assert any(item.kind == VerdictKind.CONTRADICTORY and item.reason == reason for item in verdicts)


HARMLESS: dict[str, tuple[bool, Change]] = {
    "nothing changed": (False, lambda record: record),
    "a launch repeated after a failure": (
        True,
        lambda record: replace(
            record,
            snapshots=(*record.snapshots, *timed(record.snapshots, LATER, LAST)),
            launches=(
                replace(record.launches[0], outcome="failed", reason="rank 1 ended", number=1),
                replace(record.launches[0], began=LATER, number=2),
            ),
        ),
    ),
    "a stage that was cut off and began again": (
        False,
        snapshots(
            lambda items: (
                *items[:2],
                replace(items[1], phase="during"),
                *timed((items[1], replace(items[1], phase="during"), items[2]), LATER, LATER, LAST),
            )
        ),
    ),
    "fractions of a second": (
        False,
        snapshots(lambda items: timed(items, *[f"2026-11-21T04:00:00{part}Z" for part in ("", ".2", ".25")])),
    ),
    "a short launch without a snapshot during it": (
        False,
        launches(lambda item: replace(item, timeline=Trace(bucket_s=2.0))),
    ),
    "a launch that ended without ranks": (True, launches(lambda item: replace(item, outcome="failed", ranks=()))),
    "a failed launch with a culprit": (
        True,
        launches(
            lambda item: replace(
                item,
                outcome="failed",
                reason="rank 1 ended",
                culprit=Culprit(kind="rank_ended", hosts=("h1",), text="rank 1 ended"),
            )
        ),
    ),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_record_that_the_agent_can_write_has_no_problem(kind: str) -> None:
    gang, change = HARMLESS[kind]
    assert reasons(changed(change, gang=gang)) == []


def test_invalid_time_is_not_a_wrong_order() -> None:
    evidence = changed(snapshots(lambda items: timed(items, "today", LATER, "0000")))
    assert reasons(evidence) == []


def test_members_that_differ_between_the_records_of_two_hosts_are_named() -> None:
    """Launches of several groups of hosts may have the same number, but no host may be in two of these groups."""
    numbered = {
        host: Evidence(records=tuple(launches(lambda item: replace(item, number=1))(record) for record in item.records))
        for host, item in builders.evidence(PLAN).items()
    }

    def contradictions(first: tuple[str, ...], second: tuple[str, ...]) -> list[tuple[str, str]]:
        members = {"h1": first, "h2": second}
        evidence = {
            host: Evidence(
                records=tuple(
                    launches(lambda item: replace(item, members=members[host]))(record) if record.gang else record  # noqa: B023
                    for record in item.records
                )
            )
            for host, item in numbered.items()
        }
        return [(verdict.host, verdict.reason) for verdict in contradictory_members(PLAN, evidence)]

    reason = "the records of the gang's hosts list different members of launch 1: (h1, h2) and (h2)"
    assert contradictions(("h1", "h2"), ("h1", "h2")) == []
    assert contradictions(("h1",), ("h2",)) == []
    assert contradictions(("h1", "h2"), ("h2",)) == [("h1", reason), ("h2", reason)]


def two_launches(seconds: float, *, later: str = LATER) -> Change:
    """Return a change that gives a record two launches.

    Args:
        seconds: duration of the first launch.
        later: when the second launch begins. LATER is 10 s after the beginning of the first.
    """
    return lambda record: replace(
        record,
        launches=(
            replace(record.launches[0], duration_s=seconds),
            replace(record.launches[0], began=later, number=2),
        ),
    )


@pytest.mark.parametrize(
    ("seconds", "later", "count"), [(70.0, LATER, 0), (70.1, LATER, 1), (1.0, "soon", 0), (1.0, builders.WHEN, 0)]
)
def test_launches_may_overlap_by_the_tolerance_of_the_clock(seconds: float, later: str, count: int) -> None:
    """The tolerance is 60 s."""
    assert len(reasons(changed(two_launches(seconds, later=later), gang=True))) == count


@pytest.mark.parametrize(("seconds", "count"), [(60.0, 0), (60.1, 1)])
def test_launch_of_more_than_a_minute_must_have_a_snapshot_during_it(seconds: float, count: int) -> None:
    long = launches(lambda item: replace(item, duration_s=seconds, timeline=Trace(bucket_s=2.0)))
    assert len(reasons(changed(long))) == count


ONE = Series(name="gemm.throughput", scope="gpu=0", unit="FLOP/s", params={"dtype": "bf16"})
POLLED = Series(name="gpu.power", scope="gpu=0", unit="W", params={})
NOT_DURING = "the soak took {} s, but the record has no snapshot during it"


@pytest.mark.parametrize(
    ("series", "soaked_s", "expected"),
    [
        ((ONE, POLLED), 61.0, [NOT_DURING.format("61")]),
        ((POLLED,), 60.0, []),
        ((ONE,), 100.0, []),
        ((), 100.0, []),
    ],
)
def test_long_soak_with_power_readings_must_have_a_snapshot_during_it(
    series: tuple[Series, ...], soaked_s: float, expected: list[str]
) -> None:
    def change(record: Record) -> Record:
        record = soak_record((1,), 1, series)(record)
        assert record.soak
        return replace(record, soak=replace(record.soak, soaked_s=soaked_s))

    assert reasons(changed(change)) == expected


AFTER = "the record has no snapshot after the last round of the soak"


@pytest.mark.parametrize(
    ("taken", "outcome", "expected"),
    [
        ([("before", builders.WHEN), ("after", LATER)], "finished", []),
        ([("before", builders.WHEN), ("during", LATER)], "finished", [AFTER]),
        ([("before", builders.WHEN), ("after", LATER), ("during", LAST)], "finished", [AFTER]),
        ([("before", "2026-11-21T03:00:00Z"), ("after", "2026-11-21T03:00:01Z")], "finished", [AFTER]),
        ([("before", builders.WHEN)], "failed", []),
    ],
    ids=[
        "snapshot after",
        "only a snapshot during",
        "last snapshot during",
        "snapshots before the round",
        "failed round",
    ],
)
def test_successful_last_round_of_a_soak_must_have_a_snapshot_after_it(
    taken: list[tuple[str, str]], outcome: str, expected: list[str]
) -> None:
    def change(record: Record) -> Record:
        record = soak_record((1,), 1, ended=LAST, ended_by="time")(record)
        ended = tuple(replace(item, outcome=outcome) if item.stage == "soak" else item for item in record.launches)
        shots = tuple(replace(record.snapshots[0], stage="soak", phase=phase, at=at) for phase, at in taken)
        return replace(
            record, launches=ended, snapshots=tuple(sorted((*record.snapshots, *shots), key=lambda shot: shot.at))
        )

    result = reasons(changed(change))
    assert [reason for reason in result if reason == AFTER] == expected


def test_gpus_of_two_records_are_compared_only_if_a_launch_with_ranks_finished() -> None:
    def one_gpu(outcome: str, ranks: bool) -> Change:
        return lambda record: replace(
            record,
            gpus=record.gpus[:1],
            launches=tuple(
                replace(
                    item,
                    outcome=outcome,
                    reason="" if outcome == "finished" else "no",
                    ranks=item.ranks if ranks else (),
                )
                for item in record.launches
            ),
        )

    lacks = "another record of the host lists this GPU, but this record does not"
    assert lacks in reasons(changed(one_gpu("finished", True), gang=True))
    assert lacks not in reasons(changed(one_gpu("failed", True), gang=True))
    assert lacks not in reasons(changed(one_gpu("finished", False), gang=True))


def test_missing_gpus_are_reported_in_the_order_of_their_indexes() -> None:
    plan = builders.plan("h1", profile="smoke", gpu_count=9, rackproof_gang="none")
    evidence = builders.evidence(plan)
    host, *others = evidence["h1"].records
    without = replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu.index not in (1, 8)))
    (view,) = host_views(plan, {"h1": Evidence(records=(host, without, *others))}, PACKS)
    assert [scope for _, scope, *_ in sequence_problems(view, without)] == ["gpu=1", "gpu=8"]


def test_gpus_are_not_compared_if_the_records_have_different_gpus_at_an_index() -> None:
    def other_gpu(record: Record) -> Record:
        return replace(record, gpus=(replace(record.gpus[0], serial="other"),))

    assert reasons(changed(other_gpu, gang=True)) == []


@pytest.mark.parametrize(("phases", "count"), [(("before", "after"), 0), (("during", "before"), 1), (("after",), 1)])
def test_first_snapshot_of_a_soak_must_have_the_phase_before(phases: tuple[str, ...], count: int) -> None:
    def change(record: Record) -> Record:
        shots = tuple(replace(record.snapshots[0], stage="soak", phase=phase, at=LATER) for phase in phases)
        return replace(record, snapshots=(*record.snapshots, *shots))

    assert len(reasons(changed(change))) == count
