"""What is judged without a criterion: GPU models, identities, collectors, planned observations, and the launches of gangs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.evidence import Evidence
from fleet.judge.expectations import (
    collector_failures,
    contradictory_members,
    gpu_models,
    identity_changes,
    missing_observations,
    partitioned_gangs,
    unmeasured_gpus,
    unplanned_errors,
)
from fleet.judge.host_view import HostView
from schemas.catalogue import Expectation
from schemas.plans import Plan
from schemas.records import ERROR, SKIPPED, UNSUPPORTED, Launch, Observation, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, host_view, one_figure_plan, pack, reading

ONE = one_figure_plan("h1")
TWO = one_figure_plan("h1", gpu_count=2)
NAME = "memory.bandwidth"


def on_host(plan: Plan, **fields: Any) -> Plan:
    """Return the plan with fields of its only host replaced."""
    return replace(plan, hosts=(replace(plan.hosts[0], **fields),))


def figure(scope: str = "gpu=0", **over: Any) -> Observation:
    """Return the figure that the plan expects of a GPU; `over` replaces fields."""
    return replace(builders.observation(NAME, 4.27e12, scope=scope, **ONE.expected[0].params), **over)


def absent(status: str, reason: str = "why", **over: Any) -> Observation:
    """Return the figure with a status and a reason instead of a value."""
    return figure(**{"value": None, "status": status, "reason": reason, **over})


# GPU models


def test_host_without_a_pack_for_its_gpu_model_is_inconclusive() -> None:
    (verdict,) = [item for item in gpu_models(host_view(ONE, packs=[])) if item.scope == "host"]
    assert (verdict.name, verdict.verdict, verdict.kind) == ("gpu.name", INCONCLUSIVE, VerdictKind.IDENTITY)
    assert "set rackproof_gpu_model to the name of a pack" in verdict.reason
    assert [*gpu_models(host_view(ONE, packs=[pack()]))] == [], "the inventory names no model, so no GPU is compared"


@pytest.mark.parametrize(
    ("names", "verdict", "reason", "action"),
    [
        (("NVIDIA H200",), PASS, "found NVIDIA H200", "none"),
        (("NVIDIA X", "NVIDIA Y"), FAIL, "found NVIDIA H200, but the inventory has h200-sxm", "configure"),
    ],
)
def test_model_of_each_gpu_is_compared_with_the_inventory(
    names: tuple[str, ...], verdict: str, reason: str, action: str
) -> None:
    plan = on_host(TWO, gpu_model="h200-sxm")
    result = [
        *gpu_models(host_view(plan, packs=[pack(gpu_names=names), pack(name="other", gpu_names=("NVIDIA H200",))]))
    ]
    assert [(item.scope, item.serial) for item in result] == [("gpu=0", "h1-0"), ("gpu=1", "h1-1")]
    for item in result:
        assert (item.host, item.name, item.verdict, item.reason, item.action) == (
            "h1",
            "gpu.name",
            verdict,
            reason,
            action,
        )
        assert (item.criterion, item.kind, item.value, item.unit) == (
            "gpu-model", VerdictKind.IDENTITY if verdict == PASS else VerdictKind.MODEL, "NVIDIA H200", "1",
        )  # fmt: skip
        assert (item.source, item.basis) == ("inventory: rackproof_gpu_model", "policy")


def test_model_of_a_measured_gpu_is_unknown_if_the_record_does_not_list_the_gpu() -> None:
    for model in ("h200-sxm", ""):
        plan = on_host(TWO, gpu_model=model)
        view = host_view(plan, packs=[pack()], gpus=(builders.gpu("h1", 0),))
        result = [(item.scope, item.verdict, item.reason) for item in gpu_models(view) if item.scope != "gpu=0"]
        assert result == [("gpu=1", INCONCLUSIVE, "the GPU does not report its name")]


def test_gpu_model_is_not_judged_on_cpu_hosts_or_unmeasured_gpus() -> None:
    cpus = on_host(ONE, gpu_model="h200-sxm", device="cpu")
    assert [*gpu_models(host_view(cpus, packs=[pack()]))] == []
    unmeasured = host_view(on_host(ONE, gpu_model="h200-sxm"), packs=[pack()], gpus=(), observations=())
    assert [item for item in gpu_models(unmeasured) if item.scope == "gpu=0"] == []


# Identities


def with_readings(name: str, *values: Any, scope: str = "gpu=0", plan: Plan = ONE, **fields: Any) -> HostView:
    """Return the view of a host with one snapshot for each value of the reading `name`. None: the reading has an error."""
    snapshots = tuple(
        Snapshot(stage="benchmark", phase="before", at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=(
            reading(value, name=name, scope=scope) if value is not None else reading(name=name, scope=scope, absent="error: x"),
        ))
        for at, value in enumerate(values)
    )  # fmt: skip
    return host_view(plan, snapshots=snapshots, **fields)


@pytest.mark.parametrize("name", ["gpu.serial", "gpu.uuid", "gpu.name"])
def test_identity_that_changes_between_snapshots_fails(name: str) -> None:
    (verdict,) = identity_changes(with_readings(name, "a", "b", "b"))
    assert (verdict.name, verdict.scope, verdict.verdict, verdict.value) == (name, "gpu=0", FAIL, "b")
    assert verdict.reason == "changed during the run: a, then b"
    assert (verdict.criterion, verdict.source) == ("identity-constant", "the identity of a part does not change")
    assert verdict.action == "inspect_hardware"
    assert [*identity_changes(with_readings(name, "a", None, "a"))] == []
    assert [*identity_changes(with_readings(name, "a", "b", scope="gpu=1"))] == [], "the plan has only GPU 0"
    assert [*identity_changes(with_readings(f"{name}x", "a", "b"))] == []


@pytest.mark.parametrize("name", ["serial", "uuid", "name"])
def test_identity_that_differs_between_two_records_fails(name: str) -> None:
    first = host_evidence(TWO).records[0]

    def changes(*gpus: Any) -> list[tuple[str, str, str]]:
        records = (first, replace(first, gpus=gpus))
        view = HostView(TWO, TWO.hosts[0], Evidence(records=records), ())
        return [(item.name, item.scope, item.reason) for item in identity_changes(view)]

    one, two = first.gpus
    old = getattr(two, name)
    other: dict[str, Any] = {name: "other"}
    unknown: dict[str, Any] = {name: ""}
    assert changes(one, replace(two, **other)) == [
        (f"gpu.{name}", "gpu=1", f"changed during the run: {old}, then other")
    ]
    assert changes(one, two) == []
    assert changes(one, replace(two, **unknown)) == [], "an identity that is no longer reported has not changed"


@pytest.mark.parametrize(
    ("uptimes", "is_rebooted"),
    [((10.0, 20.0, 30.0), False), ((10.0, 10.0), False), ((10, 20, 5), True), ((20.0, "5"), False), ((20.0, None, 5.0), True)],
)  # fmt: skip
def test_uptime_that_falls_shows_a_reboot(uptimes: Sequence[Any], is_rebooted: bool) -> None:
    result = [
        (item.name, item.scope, item.reason, item.verdict, item.kind)
        for item in identity_changes(with_readings("host.uptime", *uptimes, scope="host"))
    ]
    reason = "the host rebooted during the run: its counters were reset"
    expected = [("host.uptime", "host", reason, INCONCLUSIVE, VerdictKind.CONTRADICTORY)]
    assert result == (expected if is_rebooted else [])


def test_each_snapshot_with_a_failed_collector_is_inconclusive() -> None:
    view = with_readings("collector.ok", 1.0, None, None, scope="collector=nvml")
    result = [(item.name, item.scope, item.stage, item.reason, item.kind) for item in collector_failures(view)]
    reason = "error before benchmark: x"
    assert result == [("collector.ok", "collector=nvml", "benchmark", reason, VerdictKind.ERROR)] * 2
    assert [*collector_failures(with_readings("gpu.thing", None))] == []


# Planned observations


def absences(plan: Plan, *metrics: Any, packs: Sequence[Any] = (), **fields: Any) -> list[tuple[str, str, str]]:
    """Return name, scope and reason of each verdict of `missing_observations` on h1, whose readings are `metrics`."""
    view = host_view(plan, "h1", *metrics, packs=packs, **fields)
    verdicts = [*missing_observations(view)]
    assert {(item.verdict, item.criterion) for item in verdicts} <= {(INCONCLUSIVE, "plan")}
    return [(item.name, item.scope, item.reason) for item in verdicts]


def test_planned_observation_that_was_not_measured_is_inconclusive() -> None:
    assert absences(TWO) == []
    finished = "not observed; the launch finished, so the reason is not known"
    assert absences(TWO, observations=(figure(),)) == [(NAME, "gpu=1", finished)]
    two = (figure(), absent(ERROR, "no memory", scope="gpu=1"))
    assert absences(TWO, observations=two) == [(NAME, "gpu=1", "error: no memory")]
    (verdict,) = missing_observations(host_view(TWO, observations=two))
    assert (verdict.kind, verdict.stage, verdict.serial) == (VerdictKind.ERROR, "benchmark", "h1-1")
    assert dict(verdict.params) == dict(TWO.expected[0].params)


def test_unsupported_observation_is_not_missing_if_the_pack_says_that_the_gpu_model_lacks_it() -> None:
    lacking = pack(lacks={NAME: {"op": ("copy",)}})
    for status, packs, expected in (
        (UNSUPPORTED, [lacking], []),
        (UNSUPPORTED, [pack()], [(NAME, "gpu=0", "unsupported: why")]),
        (SKIPPED, [lacking], [(NAME, "gpu=0", "skipped: why")]),
    ):
        assert absences(ONE, packs=packs, observations=(absent(status),)) == expected


STAGE = "stage.benchmark"


def launches(*outcomes: str, stage: str = "benchmark") -> tuple[Launch, ...]:
    """Return launches with these outcomes; the reason of a failure is its outcome and the number of the launch, from 0."""
    return tuple(
        builders.launch(stage, ("h1",), outcome, "" if outcome == "finished" else f"{outcome} {number}")
        for number, outcome in enumerate(outcomes)
    )


NOT_STARTED = "the stage did not start on this host, or its record was not collected after the start"
NO_LAUNCH = "figures were measured, but the record has no launch: whether the stage finished is unknown"


@pytest.mark.parametrize(
    ("outcomes", "is_measured", "expected"),
    [
        (("finished",), True, []),
        (("failed", "finished"), True, []),
        (("finished", "failed"), True, [(STAGE, "host", "failed: failed 1")]),
        ((), True, [(STAGE, "host", NO_LAUNCH)]),
        (("failed", "timed_out"), False, [(STAGE, "host", "nothing was observed; timed_out 1")]),
        # The reason of a missing figure is that of the last failed launch, even if a later launch finished.
        (("failed", "finished"), False, [(NAME, "gpu=0", "not observed; failed 0")]),
        (("finished",), False, [(NAME, "gpu=0", "not observed; the launch finished, so the reason is not known")]),
        ((), False, [(NAME, "gpu=0", f"not observed; {NOT_STARTED}")]),
    ],
)
def test_launches_of_a_stage_and_its_missing_figures_are_judged(
    outcomes: Sequence[str], is_measured: bool, expected: list[tuple[str, str, str]]
) -> None:
    observations = (figure(),) if is_measured else ()
    assert absences(ONE, reading(1), observations=observations, launches=launches(*outcomes)) == expected


def test_stage_without_any_observation_has_one_verdict() -> None:
    nothing: dict[str, Any] = {"observations": (), "launches": ()}
    assert absences(TWO, **nothing) == [(STAGE, "host", f"nothing was observed; {NOT_STARTED}")]
    assert absences(replace(ONE, expected=()), **nothing) == []
    (verdict,) = missing_observations(host_view(TWO, **nothing))
    assert (verdict.stage, verdict.kind) == ("benchmark", VerdictKind.MISSING)


def test_each_missing_figure_has_a_verdict_if_any_figure_was_observed() -> None:
    view = host_view(TWO, observations=(figure(),), launches=launches("failed"))
    result = [(item.name, item.scope, item.reason, item.kind) for item in missing_observations(view)]
    assert result == [
        (NAME, "gpu=1", "not observed; failed 0", VerdictKind.MISSING),
        (STAGE, "host", "failed: failed 0", VerdictKind.UNFINISHED),
    ]
    # A figure with an error counts as observed.
    assert absences(TWO, observations=(absent(ERROR),), launches=launches("failed")) == [
        (NAME, "gpu=0", "error: why"), (NAME, "gpu=1", "not observed; failed 0"), (STAGE, "host", "failed: failed 0"),
    ]  # fmt: skip
    # Without a launch, the verdict NO_LAUNCH is added only if a figure was measured and none is missing.
    assert absences(TWO, observations=(absent(ERROR), absent(ERROR, scope="gpu=1")), launches=()) == [
        (NAME, "gpu=0", "error: why"), (NAME, "gpu=1", "error: why"),
    ]  # fmt: skip
    assert (STAGE, "host", NO_LAUNCH) not in absences(TWO, observations=(figure(),), launches=())
    assert absences(replace(ONE, expected=()), observations=(), launches=launches("failed")) == []


NO_SNAPSHOT = "the record has no snapshot after the launch, although one is taken after every finished launch"


@pytest.mark.parametrize(
    ("phases", "outcome", "duration_s", "expected"),
    [
        ((("benchmark", "before"), ("benchmark", "after")), "finished", 0.0, []),
        ((("benchmark", "before"),), "finished", 0.0, [(STAGE, "host", NO_SNAPSHOT)]),
        ((("benchmark", "before"), ("gang", "after")), "finished", 0.0, [(STAGE, "host", NO_SNAPSHOT)]),
        ((("benchmark", "before"),), "failed", 0.0, []),
        ((("benchmark", "before"),), "finished", 60.0, []),
    ],
)
def test_snapshot_after_the_last_finished_launch_is_required_unless_the_stage_is_a_soak(
    phases: Sequence[tuple[str, str]], outcome: str, duration_s: float, expected: list[tuple[str, str, str]]
) -> None:
    stages = tuple(replace(stage, duration_s=duration_s) for stage in ONE.stages)
    plan = replace(ONE, stages=stages, expected=())
    shots = tuple(
        Snapshot(stage=stage, phase=phase, at=builders.WHEN, duration_s=0.1, metrics=()) for stage, phase in phases
    )
    assert absences(plan, snapshots=shots, launches=launches(outcome)) == expected


# Gangs


GANGS = builders.plan("h1", "h2", "h3", profile="smoke", gpu_count=1)
GANG = GANGS.hosts[0].gang
PAIR, ALL = "pairs.bandwidth", ("h1", "h2", "h3")


def expecting(*names: str, plan: Plan = GANGS) -> Plan:
    """Return the plan with only one expectation for each of these names, of the stage `gang`."""
    items = {item.name: item for item in plan.expected if item.stage == "gang" and item.name in names}
    return replace(plan, expected=tuple(items.values()))


def test_pairs_with_a_host_that_did_not_take_part_are_not_missing() -> None:
    plan = expecting(PAIR)
    (expected,) = plan.expected
    assert expected.scope == "peers"
    for members, partners in ((ALL, ["h2", "h3"]), (("h1", "h2"), ["h2"]), ((), ["h2", "h3"])):
        other = builders.observation(PAIR, 1.0, scope="gpu=0", stage="gang")
        of_gang = (builders.launch("gang", members),) if members else ()
        result = absences(plan, observations=(other,), launches=of_gang, snapshots=(
            Snapshot(stage="gang", phase="after", at=builders.WHEN, duration_s=0.1, metrics=()),))  # fmt: skip
        assert sorted({scope.partition("partner=")[2] for name, scope, _ in result if name == PAIR}) == partners


@pytest.mark.parametrize(("members", "is_expected"), [(ALL, False), (("h1", "h2"), True), ((), True)])
def test_hypercube_is_not_missing_if_the_number_of_ranks_is_no_power_of_two(
    members: tuple[str, ...], is_expected: bool
) -> None:
    four = builders.plan("h1", "h2", "h3", "h4", profile="smoke", gpu_count=1)
    name = "collective.hypercube.busbw"
    item = Expectation(stage="gang", name=name, scope="gang", params={})
    read = {
        stage: Snapshot(stage=stage, phase="after", at=builders.WHEN, duration_s=0.1, metrics=(reading(1),))
        for stage in ("gang", "benchmark")
    }
    plan = replace(four, expected=(item,))
    of_gang = (builders.launch("gang", members),) if members else ()
    result = absences(plan, observations=(), launches=of_gang, snapshots=(read["gang"],))
    assert [name for name, *_ in result] == ([name] if is_expected else [])
    # A hypercube within one host does not depend on the number of hosts in the launch.
    alone = replace(four, expected=(replace(item, stage="benchmark", scope="host"),))
    result = absences(alone, observations=(), launches=(builders.launch("benchmark", ALL),), snapshots=(
        read["benchmark"],))  # fmt: skip
    assert [name for name, *_ in result] == [name]


def test_reason_of_an_unobserved_gang_stage_states_whether_the_host_has_a_record_of_the_gang() -> None:
    plan = expecting("collective.all_reduce.busbw")
    no_record = "there is no record of the stage from this host"
    for gang, why in (("", no_record), (GANG, NOT_STARTED)):
        result = absences(plan, observations=(), launches=(), snapshots=(), gang=gang)
        assert result == [("stage.gang", "host", f"nothing was observed; {why}")]


# Errors of figures that the plan does not expect


def errors(*observations: Observation, plan: Plan = ONE) -> list[tuple[str, str, str]]:
    return [
        (item.name, item.scope, item.reason) for item in unplanned_errors(host_view(plan, observations=observations))
    ]


EXTRA = builders.observation("gemm.throughput", 1.0, scope="gpu=0", unit="FLOP/s", dtype="bf16")
FAILED = replace(EXTRA, status=ERROR, value=None, reason="no")
FOUND = [("gemm.throughput", "gpu=0", "error: no")]


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        ((FAILED,), FOUND),
        # The same error twice: the order of the parameters makes no difference.
        ((replace(FAILED, params={"dtype": "bf16", "n": 1}), replace(FAILED, params={"n": 1, "dtype": "bf16"})), FOUND),
        ((replace(FAILED, params={"n": 1}), replace(FAILED, params={"n": 2})), FOUND * 2),
        ((EXTRA,), []),
        ((replace(FAILED, status=SKIPPED),), []),
        ((FAILED, EXTRA), []),
        ((EXTRA, FAILED), FOUND),
        ((FAILED, replace(EXTRA, params={"dtype": "bf16", "n": 8})), []),
        ((replace(FAILED, params={}), EXTRA), []),
        ((FAILED, replace(EXTRA, params={"dtype": "fp16"})), FOUND),
        ((FAILED, replace(EXTRA, scope="gpu=1")), FOUND),
        ((FAILED, replace(EXTRA, stage="gang")), FOUND),
        ((FAILED, replace(EXTRA, name="gemm.thing")), FOUND),
        ((FAILED, replace(FAILED, status=SKIPPED)), FOUND),
        ((FAILED, replace(FAILED, reason="later")), [("gemm.throughput", "gpu=0", "error: later")]),
        ((FAILED, replace(FAILED, params={"dtype": "fp16"})), FOUND * 2),
    ],
)  # fmt: skip
def test_error_of_an_unplanned_figure_is_reported_unless_the_figure_was_measured_later(
    observations: Sequence[Observation], expected: list[tuple[str, str, str]]
) -> None:
    assert errors(*observations) == expected


def test_error_of_a_planned_observation_is_not_reported_twice() -> None:
    """`missing_observations` reports it, so `unplanned_errors` does not."""
    more = {**figure().params, "n": 8}
    for item, is_planned in (
        (absent(ERROR), True),
        (absent(ERROR, params=more), True),
        (absent(ERROR, params={}), False),
        (absent(ERROR, scope="gpu=1"), False),
        (absent(ERROR, stage="gang"), False),
    ):
        assert bool(errors(item)) is not is_planned
    (verdict,) = unplanned_errors(host_view(ONE, observations=(FAILED,)))
    assert (verdict.kind, verdict.stage, verdict.params) == (VerdictKind.ERROR, "benchmark", {"dtype": "bf16"})


def test_gpu_without_a_measurement_is_inconclusive() -> None:
    listed = "nothing was measured on this GPU"
    unmeasured = host_view(TWO, observations=(figure(),))
    assert [(item.name, item.scope, item.reason) for item in unmeasured_gpus(unmeasured)] == [("gpu", "gpu=1", listed)]
    beyond = host_view(TWO, observations=(figure(),), gpus=(builders.gpu("h1", 0),))
    (verdict,) = unmeasured_gpus(beyond)
    assert verdict.reason == (
        f"{listed}: the driver lists 1 GPU and numbers them from 0, so any GPU of the host may be the missing one"
    )
    assert [*unmeasured_gpus(host_view(TWO))] == []


# Members of a launch


JOINT = builders.observation("collective.all_reduce.busbw", 1e11, scope=f"gang={GANG}", stage="gang")


def gang_record(
    host: str,
    *attempts: tuple[int, tuple[str, ...], str],
    observations: tuple[Observation, ...] = (JOINT,),
    stage: str = "gang",
    gang: str = GANG,
) -> Evidence:
    """Return the evidence of a host: its gang record, with a launch for each of `attempts` (number, members, outcome)."""
    of_gang = tuple(
        replace(
            builders.launch(stage, members, outcome),
            number=number,
            observations=observations if number < attempts[-1][0] else (),
        )
        for number, members, outcome in attempts
    )
    record = host_evidence(GANGS, host, gang=gang, launches=of_gang, observations=observations).records[0]
    return Evidence(records=(record,))


def split(*members: Mapping[int, tuple[str, ...]], plan: Plan = GANGS, **fields: Any) -> list[Verdict]:
    """Return the verdicts of `partitioned_gangs`.

    Args:
        members: for each of the hosts h1, h2 and h3, the launches in its gang record: number of the launch -> its members.
            A host without launches has no record.
        plan: the plan of the run.
        fields: arguments of `gang_record`.
    """
    evidence = {
        host: gang_record(host, *((number, of_launch, "finished") for number, of_launch in of_host.items()), **fields)
        for host, of_host in zip(ALL, members, strict=False)
        if of_host
    }
    return partitioned_gangs(plan, evidence)


def test_hosts_of_a_gang_that_never_launched_together_are_inconclusive() -> None:
    result = split({1: ("h1", "h2")}, {1: ("h1", "h2")}, {2: ("h3",)})
    assert [(item.host, item.reason) for item in result] == [
        ("h1", "launched with h1, h2, but never with h3"),
        ("h2", "launched with h1, h2, but never with h3"),
        ("h3", "launched with h3, but never with h1, h2"),
    ]
    for item in result:
        assert (item.scope, item.name, item.stage, item.verdict) == (f"gang={GANG}", "stage.gang", "gang", INCONCLUSIVE)
        assert (item.criterion, item.source, item.kind) == ("plan", "plan", VerdictKind.UNFINISHED)


@pytest.mark.parametrize(
    "members",
    [
        [{1: ALL}, {1: ALL}, {1: ALL}],
        [{1: ALL, 2: ("h1", "h2")}, {1: ALL, 2: ("h1", "h2")}, {1: ALL}],
        [{1: ("h1", "h2")}, {1: ("h1", "h2")}, {}],
    ],
    ids=["all together", "an earlier launch of all hosts", "a host without a launch"],
)
def test_gang_is_not_partitioned_if_each_pair_of_its_measured_hosts_launched_together(
    members: list[Mapping[int, tuple[str, ...]]],
) -> None:
    assert split(*members) == []


def test_launches_that_measured_nothing_and_probes_do_not_partition_a_gang() -> None:
    apart: list[Mapping[int, tuple[str, ...]]] = [{1: ("h1",)}, {2: ("h2",)}, {3: ("h3",)}]
    assert len(split(*apart)) == 3
    assert split(*apart, observations=()) == []
    assert split(*apart, stage="probe", observations=(replace(JOINT, stage="probe"),)) == []
    without = replace(GANGS, stages=tuple(stage for stage in GANGS.stages if stage.name != "gang"))
    assert split(*apart, plan=without) == []


def contradictions(
    first: tuple[int, tuple[str, ...]], second: tuple[int, tuple[str, ...]], plan: Plan = GANGS
) -> list[Verdict]:
    evidence = {
        host: gang_record(host, (*of_host, "finished")) for host, of_host in zip(ALL, (first, second), strict=False)
    }
    return [*contradictory_members(plan, evidence)]


def test_records_that_list_different_members_of_one_launch_are_inconclusive() -> None:
    result = contradictions((2, ALL), (2, ("h2", "h3")))
    reason = "the records of the gang's hosts list different members of launch 2: (h1, h2, h3) and (h2, h3)"
    assert [(item.host, item.reason) for item in result] == [("h1", reason), ("h2", reason)]
    for item in result:
        assert (item.scope, item.name, item.stage, item.verdict) == (f"gang={GANG}", "stage.gang", "gang", INCONCLUSIVE)
        assert (item.criterion, item.source, item.kind) == ("plan", "plan", VerdictKind.CONTRADICTORY)


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, ALL), (1, ALL)), ((1, ALL), (2, ("h2", "h3"))), ((1, ("h1",)), (1, ("h2",))), ((0, ALL), (0, ("h2", "h3")))],
    ids=["the same members", "another launch", "launches without a common member", "launches without a number"],
)
def test_records_of_different_launches_or_with_equal_members_do_not_contradict(
    first: tuple[int, tuple[str, ...]], second: tuple[int, tuple[str, ...]]
) -> None:
    assert contradictions(first, second) == []


def test_plan_without_a_gang_stage_has_no_contradictory_members() -> None:
    without = replace(GANGS, stages=tuple(stage for stage in GANGS.stages if stage.name != "gang"))
    assert contradictions((2, ALL), (2, ("h2", "h3")), without) == []
