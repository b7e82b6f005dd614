"""The records of one host must not contradict each other or the plan: times, launches, snapshots, versions and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge import consistency
from fleet.judge.consistency import contradictions
from fleet.judge.evidence import Evidence
from fleet.judge.host_view import HostView
from schemas.records import SKIPPED, Rank, Record, Snapshot
from schemas.reports import INCONCLUSIVE, VerdictKind
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan, reading

PLAN = one_figure_plan("h1", gpu_count=2)
GANG_PLAN = builders.plan("h1", "h2", profile="smoke", gpu_count=2)
Change = Callable[[Record], Record]
Problem = tuple[str, str, str, str]


def found(*records: Record, plan: Any = PLAN) -> list[Problem]:
    """Return name, scope, reason and stage of each contradiction in the records of h1."""
    verdicts = list(contradictions(HostView(plan, plan.hosts[0], Evidence(records=records), ())))
    assert {(item.verdict, item.kind) for item in verdicts} <= {(INCONCLUSIVE, VerdictKind.CONTRADICTORY)}
    return [(item.name, item.scope, item.reason, item.stage) for item in verdicts]


[HEALTHY] = host_evidence(PLAN, "h1", reading(1, name="gpu.links")).records
LAUNCH = HEALTHY.launches[0]


def problems(change: Change, *, plan: Any = PLAN) -> list[Problem]:
    return found(change(HEALTHY), plan=plan)


def launches(*fields: dict[str, Any]) -> Change:
    """Return a change that replaces the launches of a record. Each of `fields` becomes one launch: LAUNCH with these fields."""
    return lambda record: replace(record, launches=tuple(replace(LAUNCH, **each) for each in fields))


def test_healthy_record_has_no_contradiction() -> None:
    assert found(HEALTHY) == []


def launch_problem(reason: str, stage: str = "benchmark") -> Problem:
    return f"stage.{stage}", "host", reason, stage


DEADLINE = PLAN.stage("benchmark").deadline_s


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"duration_s": 180.0}, []),  # the deadline is 60 s, and ending the ranks may take 120 s
        ({"duration_s": 181.0}, ["the launch took 181 s, but its deadline was 60 s"]),
        ({"deadline_s": DEADLINE}, []),
        ({"deadline_s": DEADLINE + 1, "duration_s": 10.0},
         [f"the launch had a deadline of {DEADLINE + 1:g} s, but the plan has {DEADLINE:g} s"]),
        ({"members": ("h9",)},
         ["the launch had the members h9, but not this host",
          "the launch of this stage must have this host as its only member, but had h9"]),
        ({"members": ("h1", "h9")},
         ["the launch of this stage must have this host as its only member, but had h1, h9"]),
    ],
)  # fmt: skip
def test_duration_deadline_and_members_of_a_launch_must_be_possible(
    fields: dict[str, Any], expected: list[str]
) -> None:
    ended = replace(HEALTHY, ended="2026-11-21T04:05:00Z")
    assert found(launches(fields)(ended)) == [launch_problem(reason) for reason in expected]


def ranks(*numbers: tuple[int, int], codes: Sequence[int | None] = (0, 0, 0, 0, 0)) -> tuple[Rank, ...]:
    """Return ranks; `numbers` are (rank, local rank), `codes` their exit codes in the same order."""
    return tuple(
        Rank(rank=rank, local_rank=local, phase="end", exit_code=code, log_tail="")
        for (rank, local), code in zip(numbers, codes, strict=False)
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ranks((0, 0), (1, 1)), []),
        (ranks((1, 1), (0, 0)), []),
        (ranks((0, 0)), ["the launch finished with 1 rank, but the plan has 2 devices"]),
        (ranks((0, 0), (1, 1), codes=(0, 3)), ["the launch finished, but 1 of its ranks failed: rank 1 with exit code 3"]),
        (ranks((0, 0), (1, 1), codes=(None, 0)),
         ["the launch finished, but 1 of its ranks failed: rank 0 with an unknown exit code"]),
        (ranks((0, 0), (1, 1), (2, 2), (3, 3), codes=(1, 1, 1, 1)),
         ["the launch finished with 4 ranks, but the plan has 2 devices",
          "the launch finished, but 4 of its ranks failed: "
          "rank 0 with exit code 1, rank 1 with exit code 1, rank 2 with exit code 1"]),
        (ranks((1, 1), (2, 2)), ["the local ranks of the launch are not consecutive numbers from 0"]),
        (ranks((0, 0), (2, 1)),
         ["the ranks of the launch are not consecutive numbers", "local rank 1 has rank 2, expected 1"]),
        ((), ["the launch finished with 0 ranks, but the plan has 2 devices"]),
    ],
)  # fmt: skip
def test_ranks_of_a_finished_launch_must_be_those_of_the_plan(given: tuple[Rank, ...], expected: list[str]) -> None:
    assert [reason for _, _, reason, _ in problems(launches({"ranks": given}))] == expected


@pytest.mark.parametrize("outcome", ["failed", "deadline"])
def test_launch_that_did_not_finish_may_have_fewer_ranks_than_the_plan(outcome: str) -> None:
    assert problems(launches({"ranks": ranks((0, 0)), "outcome": outcome, "reason": "rank 1 ended"})) == []


def test_probe_has_its_own_deadline_and_may_have_any_number_of_ranks() -> None:
    """A probe is a short launch on some hosts of a gang. A gang is the hosts of one multi-node launch.

    The plan has no stage for probes.
    """
    probe = {"stage": "probe", "ranks": (), "deadline_s": 1e6, "duration_s": 1.0, "members": ("h1", "h2")}
    assert problems(launches({}, probe)) == []
    late = replace(HEALTHY, ended="2026-11-21T04:05:00Z")
    assert found(launches({}, {**probe, "deadline_s": 10.0, "duration_s": 131.0})(late)) == [
        launch_problem("the launch took 131 s, but its deadline was 10 s", "probe")
    ]


@pytest.mark.parametrize(
    ("second", "is_twice"),
    [
        ({}, True),
        ({"number": 2}, False),
        ({"began": "2026-11-21T04:00:01Z"}, False),
        ({"members": ("h1", "h9")}, False),
        ({"outcome": "failed", "reason": "no"}, False),
        ({"ranks": (), "outcome": "failed", "reason": "no"}, False),
    ],
)
def test_launch_is_a_duplicate_if_another_launch_has_its_time_number_outcome_and_members(
    second: dict[str, Any], is_twice: bool
) -> None:
    reason = f"2 launches began at {builders.WHEN}: the record has a launch twice"
    assert (launch_problem(reason) in problems(launches({}, second))) is is_twice


def timed(
    began: str = "04:00:00", ended: str = "04:00:00", read: Sequence[str] = (), launched: str = "04:00:00"
) -> Record:
    """Return HEALTHY with these times of 2026-11-21. `read`: times of its snapshots (empty: unchanged)."""
    day = "2026-11-21T{}Z"
    shots = (
        HEALTHY.snapshots
        if not read
        else [replace(item, at=day.format(at)) for item, at in zip(HEALTHY.snapshots, read, strict=True)]
    )
    return replace(
        HEALTHY, began=day.format(began), ended=day.format(ended), snapshots=tuple(shots),
        launches=(replace(LAUNCH, began=day.format(launched)),),
    )  # fmt: skip


def record_problem(reason: str) -> Problem:
    return "record", "host", reason, ""


def foreign_problem(contents: str) -> Problem:
    return record_problem(f"the record of the launches of {contents}, which belong in another record")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (timed(began="03:55:00"), []),
        (timed(began="03:54:59"),
         [("record.clock", "host",
           "the record begins at 2026-11-21T03:54:59Z, 5 min before the run was planned at 2026-11-21T04:00:00Z: "
           "it is of an earlier run, or the clock of the host is behind that of the control node", "")]),
        (timed(began="04:00:02", ended="04:00:01"),
         [record_problem("the record ends before it begins: the clock of the host was set back")]),
        (timed(began="04:05:00", ended="04:05:00"), []),
        (timed(began="04:05:01", ended="04:05:01"),
         [record_problem("the record covers 2026-11-21T04:05:01Z to 2026-11-21T04:05:01Z, "
                    "but the snapshot before preflight is outside")]),
        (timed(ended="04:00:10", launched="04:05:09"), []),
        (timed(ended="04:00:10", launched="04:05:10"),
         [launch_problem("the launch ends after the record")]),
        (timed(ended="05:00:02"), []),
        (timed(ended="05:00:03"),
         [record_problem("the record ends at 2026-11-21T05:00:03Z, more than an hour after its last snapshot and launch")]),
        (timed(ended="05:30:00", launched="04:40:00"), []),
        (timed(ended="05:00:03", read=("05:00:00", "05:00:01", "05:00:02"), launched="05:00:01"), []),
        (timed(ended="05:00:03", read=("05:00:01", "05:00:02", "05:00:03"), launched="05:00:02"),
         [record_problem("the record begins at 2026-11-21T04:00:00Z, more than an hour before its first snapshot")]),
    ],
)  # fmt: skip
def test_times_of_a_record_must_fit_each_other_and_the_plan(record: Record, expected: list[Problem]) -> None:
    assert found(record) == expected


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda record: replace(record, began="now"), "its beginning"),
        (lambda record: replace(record, ended="now"), "its end"),
        (lambda record: replace(record, snapshots=(*record.snapshots[:2], replace(record.snapshots[2], at="now"))),
         "the snapshot after benchmark"),
        (lambda record: replace(record, launches=(replace(LAUNCH, began="now"),)), "the launch of benchmark"),
    ],
)  # fmt: skip
def test_item_whose_time_is_not_valid_is_named(change: Change, what: str) -> None:
    assert record_problem(f"{what} has the time 'now', which is not a valid time") in problems(change)


def test_record_without_snapshots_and_launches_may_cover_more_than_an_hour() -> None:
    quiet = replace(HEALTHY, snapshots=(), launches=(), observations=(), ended="2026-11-21T09:00:00Z")
    assert found(quiet) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"index": 0}, [("gpu.index", "host", "2 GPUs of this host have index 0", "")]),
        (
            {"pci_bus_id": "0000:00:00.0"},
            [("gpu.pci_bus_id", "host", "2 GPUs of this host have pci_bus_id 0000:00:00.0", "")],
        ),
    ],
)
def test_two_gpus_with_the_same_index_or_address_are_named(fields: dict[str, Any], expected: list[Problem]) -> None:
    def change(record: Record) -> Record:
        return replace(record, gpus=(record.gpus[0], replace(record.gpus[1], **fields)))

    assert [
        item for item in problems(change) if item[0].startswith("gpu.") and "GPUs of this host" in item[2]
    ] == expected


def test_gpus_without_an_address_do_not_count_as_gpus_with_the_same_address() -> None:
    assert (
        problems(lambda record: replace(record, gpus=tuple(replace(gpu, pci_bus_id="") for gpu in record.gpus))) == []
    )


def version_problem(name: str) -> Problem:
    return f"launch.{name}", "host", f"the launch finished, but the ranks reported no version of {name}", ""


@pytest.mark.parametrize("name", ["torch", "cuda", "nccl", "cudnn"])
def test_ranks_must_report_the_version_of_each_library(name: str) -> None:
    def without(record: Record) -> Record:
        return replace(record, software={key: value for key, value in record.software.items() if key != name})

    assert problems(without) == [version_problem(name)]
    rehearsal = replace(PLAN, rehearsal=True)
    assert problems(without, plan=rehearsal) == ([version_problem(name)] if name == "torch" else [])
    failed = launches({"outcome": "failed", "reason": "no", "ranks": ()})
    assert problems(lambda record: without(failed(record))) == []


def test_no_versions_are_required_of_a_stage_that_does_not_use_torch() -> None:
    without_torch = builders.with_benchmarks(PLAN, benchmark={"verbs": {}})
    bare = replace(HEALTHY, software={}, observations=())
    assert [item for item in found(bare, plan=without_torch) if item[0].startswith("launch.")] == []
    assert version_problem("torch") in found(bare)


def only_snapshots(*phases: tuple[str, str]) -> Change:
    """Return a change that removes all snapshots but those of these stages and phases."""
    return lambda record: replace(
        record, snapshots=tuple(item for item in record.snapshots if (item.stage, item.phase) in phases)
    )


BEGIN, BEFORE, AFTER = ("preflight", "before"), ("benchmark", "before"), ("benchmark", "after")


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ((BEFORE, AFTER), [launch_problem("the record has no snapshot of the beginning of the run", "preflight")]),
        ((BEGIN, AFTER), [launch_problem("the record has no snapshot before the launch")]),
        ((BEGIN, BEFORE), [launch_problem("the record has no snapshot after the launch")]),
    ],
)
def test_missing_snapshot_is_named(phases: tuple[tuple[str, str], ...], expected: list[Problem]) -> None:
    named = {f"stage.{stage}" for stage in ("preflight", "benchmark")}
    assert [
        item for item in problems(only_snapshots(*phases)) if item[0] in named and "no snapshot" in item[2]
    ] == expected


def test_launch_that_failed_needs_no_snapshots_around_it() -> None:
    failed = launches({"outcome": "failed", "reason": "no", "ranks": ()})
    assert problems(lambda record: only_snapshots(BEGIN)(failed(record))) == []


def test_record_without_launches_needs_no_snapshot_of_the_beginning() -> None:
    assert problems(lambda record: replace(record, launches=(), snapshots=())) == []


def test_two_snapshots_of_one_phase_and_time_are_named() -> None:
    def twice(record: Record) -> Record:
        return replace(record, snapshots=(*record.snapshots, record.snapshots[-1]))

    at = HEALTHY.snapshots[-1].at
    assert launch_problem(f"2 snapshots after the stage have the same time {at}") in problems(twice)


GANG = builders.records(GANG_PLAN, "h1")


def problems_of_changed(change: Change, *, gang: bool = True) -> list[Problem]:
    """Return contradictions in the records of h1 after a change of its gang record or, if `gang` is false, of its host record.

    Only contradictions named `record` or `launch.<library>` are returned. Those named `record` are left out if the unchanged
    records have them too.
    """
    healthy = found(*GANG, plan=GANG_PLAN)
    changed = found(*(change(item) if bool(item.gang) == gang else item for item in GANG), plan=GANG_PLAN)
    return [item for item in changed if (item not in healthy and item[0] == "record") or item[0].startswith("launch.")]


def moved_figures(source: Record) -> Change:
    """Return a change that gives the record only the first figure of `source`."""
    return lambda record: replace(record, observations=source.observations[:1])


def test_record_must_have_only_figures_of_its_own_launches() -> None:
    host, gang = GANG
    assert problems_of_changed(moved_figures(host)) == [foreign_problem("gang r1 has figures of the stage benchmark")]
    assert problems_of_changed(moved_figures(gang), gang=False) == [
        foreign_problem("this host alone has figures of the stage gang")
    ]
    added = problems_of_changed(
        lambda record: replace(record, observations=(*record.observations, host.observations[0]))
    )
    assert added == [foreign_problem("gang r1 has figures of the stage benchmark")]
    absent = replace(gang.observations[0], status=SKIPPED, value=None, reason="no")
    assert problems_of_changed(lambda record: replace(record, observations=(absent,)), gang=False) == []
    measured = gang.observations[1]
    assert problems_of_changed(lambda record: replace(record, observations=(absent, measured)), gang=False) == [
        foreign_problem("this host alone has figures of the stage gang")
    ]


def moved_snapshots(stage: str) -> Change:
    """Return a change that sets the stage of all snapshots of the record to `stage`."""

    def moved(item: Snapshot) -> Snapshot:
        return replace(item, stage=stage)

    return lambda record: replace(record, snapshots=tuple(map(moved, record.snapshots)))


def test_record_must_have_only_readings_of_its_own_launches() -> None:
    assert problems_of_changed(moved_snapshots("benchmark")) == [
        foreign_problem("gang r1 has readings of the stage benchmark")
    ]
    assert problems_of_changed(moved_snapshots("gang"), gang=False) == [
        foreign_problem("this host alone has readings of the stage gang")
    ]
    only_preflight = problems_of_changed(
        lambda record: replace(moved_snapshots("preflight")(record), observations=(), launches=())
    )
    assert only_preflight == [foreign_problem("gang r1 has readings of the stage preflight")]
    assert problems_of_changed(lambda record: replace(record, snapshots=())) == []


def test_records_of_a_host_must_be_written_by_one_version_of_rackproof() -> None:
    assert problems_of_changed(lambda record: replace(record, rackproof="1")) == [
        record_problem("the records of the host were written by Rackproof 0 and 1")
    ]


def test_records_of_a_host_must_have_the_same_versions_of_libraries() -> None:
    newer = {**builders.SOFTWARE, "nccl": "2.99"}
    reason = f"the records of the host have the versions {builders.SOFTWARE['nccl']} and 2.99"
    assert problems_of_changed(lambda record: replace(record, software=newer)) == [("launch.nccl", "host", reason, "")]


def test_checked_figures_are_those_of_the_record_or_of_a_given_list() -> None:
    wrong = replace(HEALTHY.observations[0], unit="GB/s")
    record = replace(HEALTHY, observations=(wrong, *HEALTHY.observations[1:]))
    view = HostView(PLAN, PLAN.hosts[0], Evidence(records=(record,)), ())
    expected = ["has the unit GB/s, but this figure is in B/s"]
    assert [item.reason for item in contradictions(view)] == expected
    assert [item.reason for item in contradictions(view, [(list(record.observations), None)])] == expected
    assert list(contradictions(view, [])) == []


def test_record_may_end_long_after_its_last_snapshot_if_a_launch_took_that_long() -> None:
    late = replace(HEALTHY, ended="2026-11-21T06:00:00Z")
    reason = "the record ends at 2026-11-21T06:00:00Z, more than an hour after its last snapshot and launch"
    assert record_problem(reason) in found(late)
    assert record_problem(reason) not in found(launches({"duration_s": 3700.0})(late))
    assert record_problem(reason) in found(launches({"duration_s": 3500.0})(late))


def test_only_a_metric_without_a_problem_is_marked_as_sound() -> None:
    name = "gpu.pcie.replays"
    sound, negative, of_host = reading(1, name=name), reading(-1, name=name), reading(1, name=name, scope="host")
    shots = [
        replace(item, metrics=(metric,))
        for item, metric in zip(HEALTHY.snapshots, (sound, negative, of_host), strict=True)
    ]
    problem = (name, "gpu=0", "-1 is not credible: it cannot be negative", HEALTHY.snapshots[1].stage)
    assert problem in found(replace(HEALTHY, snapshots=tuple(shots)))
    assert [metric.is_sound for metric in (sound, negative, of_host)] == [True, False, False]


@pytest.mark.parametrize(("planned", "amount"), [("04:59:00", "59 min"), ("05:00:00", "1.0 h"), ("06:30:00", "2.5 h")])
def test_difference_of_clocks_is_in_hours_from_one_hour_on(planned: str, amount: str) -> None:
    (problem,) = found(HEALTHY, plan=replace(PLAN, created=f"2026-11-21T{planned}Z"))
    assert problem[0] == "record.clock"
    assert f"begins at 2026-11-21T04:00:00Z, {amount} before the run was planned" in problem[2]


@pytest.mark.parametrize(
    "check",
    [
        "impossible_readings", "_launch_problems", "sequence_problems", "_clock_problems", "_time_problems", "_identity_problems",
        "reading_problems", "relation_problems", "_software_problems", "_figure_problems", "locality_problems", "port_problems",
        "_snapshot_problems", "_record_problems",
    ],
)  # fmt: skip
def test_problem_that_a_check_finds_becomes_a_contradiction(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ("a.b", "gpu=1", "why", "gang")
    monkeypatch.setattr(consistency, check, lambda *_, **__: iter([problem]))
    assert set(found(HEALTHY)) == {problem}
