"""One criterion on one host: whether it applies, its limit, the series of observations, and values that are impossible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion, VsBaseline
from fleet.judge.evaluate import (
    describe_comparison,
    evaluate,
    inventory_value,
    is_acceptance,
    is_applicable,
    is_unlinked,
    judge_unobserved,
    limit_of,
    series,
)
from fleet.judge.evidence import Planned
from fleet.judge.host_view import HostView
from fleet.judge.outliers import FleetFigures
from schemas.baselines import PlannedBaseline
from schemas.plans import Plan
from schemas.records import ERROR, UNSUPPORTED, Metric, Observation, Snapshot
from schemas.reports import FAIL, INCONCLUSIVE, PASS, Verdict, VerdictKind
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_view, one_figure_plan, pack, reading

ONE = one_figure_plan("h1")
TWO = one_figure_plan("h1", gpu_count=2)
BASELINE = PlannedBaseline(directory="b", digest="0" * 64)


def with_host(plan: Plan, **fields: Any) -> Plan:
    """Return the plan with fields of its only host replaced."""
    return replace(plan, hosts=(replace(plan.hosts[0], **fields),))


def snapshots(*metrics: Sequence[Metric]) -> tuple[Snapshot, ...]:
    """Return snapshots with these metrics: before the run, then before and after the benchmarks."""
    phases = (("preflight", "before"), ("benchmark", "before"), ("benchmark", "after"))
    return tuple(
        Snapshot(stage=stage, phase=phase, at=f"2026-11-21T04:00:0{at}Z", duration_s=0.1, metrics=tuple(of_snapshot))
        for at, ((stage, phase), of_snapshot) in enumerate(zip(phases, metrics, strict=False))
    )


def verdicts(rule: Criterion, view: HostView) -> list[Verdict]:
    return [*evaluate(view, rule, FleetFigures(Planned(view.plan)))]


def outcomes(rule: Criterion, *metrics: Metric, plan: Plan = ONE, **fields: Any) -> list[tuple[str, str, str]]:
    """Return scope, verdict and reason of each verdict."""
    view = host_view(plan, "h1", *metrics, packs=[pack(rule)], **fields)
    return [(item.scope, item.verdict, item.reason) for item in verdicts(rule, view)]


# Whether a criterion applies


@pytest.mark.parametrize(
    ("rule", "plan", "expected"),
    [
        (criterion(), ONE, True),
        (criterion(variable="dimm_count"), ONE, False),
        (criterion(variable="dimm_count"), with_host(ONE, dimm_count=8), True),
        (criterion(datasheet="hbm", value=None), ONE, False),
        (criterion(datasheet="hbm", expected=1.0), ONE, True),
        (criterion(new_part=True), ONE, True),
        (criterion(new_part=True), replace(ONE, baseline=BASELINE), False),
        (criterion(new_part=True), replace(ONE, profile="revalidate-quick"), False),
        (criterion(new_part=True), replace(ONE, stages=()), False),
        (criterion(value=None, baseline=VsBaseline(fraction=0.9)), ONE, False),
        (criterion(value=None, baseline=VsBaseline(fraction=0.9)), replace(ONE, baseline=BASELINE), True),
        (criterion("gpu.nvlink.errors"), ONE, True),
    ],
)
def test_runs_to_which_a_criterion_applies(rule: Criterion, plan: Plan, expected: bool) -> None:
    """The limit must be known. A criterion with `new_part` needs a run that accepts new parts."""
    assert is_applicable(host_view(plan), rule) is expected
    if not expected:
        assert verdicts(rule, host_view(plan, "h1", reading(1), packs=[pack(rule)])) == []


@pytest.mark.parametrize(("name", "expected"), [("gpu.nvlink.active_links", False), ("gpu.thing", True)])
def test_lone_gpu_of_a_virtual_machine_is_judged_except_for_its_nvlinks(name: str, expected: bool) -> None:
    lone = host_view(
        ONE, "h1", reading(True, name="host.virtual_machine", scope="host"), reading(0, name="gpu.nvlink.active_links")
    )
    assert lone.has_lone_gpu
    assert is_applicable(lone, criterion(name)) is expected


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (ONE, True),
        (replace(ONE, stages=()), False),
        (replace(ONE, baseline=BASELINE), False),
        (replace(ONE, profile="revalidate"), False),
    ],
)
def test_run_accepts_new_parts_if_it_has_stages_and_no_baseline_and_does_not_revalidate(
    plan: Plan, expected: bool
) -> None:
    assert is_acceptance(plan) is expected


# Limits


FULL_HOST = {
    "fabric_gbps": 400.0, "storage_floors": {"read": 1e9}, "infiniband_ports": 4, "dimm_count": 16, "memory_mts": 6400.0,
    "host_memory_gbyteps": 300.0, "driver_version": "570", "vbios_version": "96.1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "value", "default"),
    [
        ("gpu_count", 2, 2),
        ("fabric_bytes_per_second", 1e11, 0.0),
        ("fabric_port_bytes_per_second", 5e10, 0.0),
        ("storage_read", 1e9, 0.0),
        ("storage_write", 0.0, 0.0),
        ("infiniband_ports", 4, 0),
        ("dimm_count", 16, 0),
        ("memory_transfers_per_second", 6.4e9, 0.0),
        ("host_memory_bytes_per_second", 3e11, 0.0),
        ("driver_version", "570", ""),
        ("vbios_version", "96.1", ""),
    ],
)
def test_variable_has_the_value_of_the_inventory_or_a_default(variable: str, value: Any, default: Any) -> None:
    assert inventory_value(host_view(with_host(TWO, **FULL_HOST)), variable) == value
    assert inventory_value(host_view(TWO), variable) == default


def test_limit_is_a_fraction_of_a_rate_but_not_of_a_count() -> None:
    view, item = host_view(with_host(TWO, **FULL_HOST)), builders.observation("gpu.thing", 1, scope="gpu=0")
    for fields, limit in (
        ({"value": 3}, 3),
        ({"expected": 10.0, "fraction": 0.5}, 5.0),
        ({"variable": "memory_transfers_per_second", "fraction": 0.5}, 3.2e9),
        ({"variable": "dimm_count", "fraction": 0.5}, 16),
        ({"variable": "driver_version", "fraction": 0.5}, "570"),
    ):
        assert limit_of(view, criterion(**fields), item) == limit


@pytest.mark.parametrize(
    ("link", "limit", "is_without_nvlinks"),
    [("NV18", 90.0, False), ("NV9", 45.0, False), ("SYS", None, True), (None, None, False)],
)
def test_limit_depends_on_the_number_of_nvlinks(
    link: str | None, limit: float | None, is_without_nvlinks: bool
) -> None:
    links = {f"gpu={one},peer={other}": link for one, other in ((0, 1), (1, 0))} if link else {}
    view = host_view(TWO, "h1", Metric(name="gpu.peer.link", unit="1", values=links))
    rule = criterion("peer_copy.thing", scope="peer", expected=100.0, fraction=0.9, links=18, operator="ge", unit="B/s")
    item = builders.observation("peer_copy.thing", 50.0, scope="gpu=0,peer=1", unit="B/s")
    assert limit_of(view, rule, item) == limit
    assert is_unlinked(view, rule, item) is is_without_nvlinks
    assert not is_unlinked(view, replace(rule, links=0), item)
    judged = verdicts(rule, host_view(
        TWO, "h1", Metric(name="gpu.peer.link", unit="1", values=links), observations=(item,), packs=[pack(rule)]))  # fmt: skip
    if is_without_nvlinks:
        assert judged == []
    elif limit is None:
        (verdict,) = judged
        assert (verdict.verdict, verdict.value, verdict.unit) == (INCONCLUSIVE, 50.0, "B/s")
        assert "did not report which NVLinks join its GPUs" in verdict.reason
    else:
        (verdict,) = judged
        assert (verdict.verdict, verdict.limit) == (PASS if limit <= 50 else FAIL, limit)


def test_required_version_may_have_fewer_components_than_the_measured_version() -> None:
    """If the measured version begins with the required components, the verdict has the measured version as limit."""
    rule = criterion("driver.version", scope="host", value=None, variable="driver_version")
    for measured, verdict, limit in (
        ("570", PASS, "570"),
        ("570.86", PASS, "570.86"),
        ("5701", FAIL, "570"),
        ("550", FAIL, "570"),
    ):
        plan = with_host(ONE, driver_version="570")
        (item,) = verdicts(rule, host_view(plan, "h1", reading(measured, name="driver.version", scope="host")))
        assert (item.verdict, item.limit) == (verdict, limit)


def test_description_of_a_rate_states_that_it_is_per_hour() -> None:
    assert describe_comparison(criterion(per_hour=True, operator="le"), 3.0, 1.0).startswith("found 3")
    assert "h" in describe_comparison(criterion(per_hour=True, operator="le"), 3.0, 1.0).removeprefix("found")


# Series


def test_readings_of_a_scope_are_one_series_whatever_their_phase() -> None:
    rule = criterion()
    view = host_view(TWO, "h1", Metric(name="gpu.thing", unit="1", values={"gpu=0": 1, "gpu=1": 2, "host": 3}))
    assert [[item.value for item in group] for group in series(view, rule)] == [[1, 1, 1], [2, 2, 2]]
    staged = [[item.stage for item in group] for group in series(view, replace(rule, stage="benchmark"))]
    assert staged == [["benchmark", "benchmark"]] * 2
    assert series(view, replace(rule, stage="gang")) == []
    before = [[item.stage for item in group] for group in series(view, replace(rule, where={"phase": "before"}))]
    assert before == [["preflight", "benchmark"]] * 2
    assert len(series(view, replace(rule, name="gpu.*"))) == 2
    assert series(view, replace(rule, name="gpu.other")) == []


def test_results_are_one_series_for_each_setting_and_stage() -> None:
    params: list[dict[str, Any]] = [{"op": "copy"}, {"op": "read"}, {"op": "copy", "phase": "x"}, {}, {"phase": "y"}]
    items = [
        replace(builders.observation("memory.thing", at, scope="gpu=0"), params=each) for at, each in enumerate(params)
    ]
    items.append(replace(items[0], value=9, stage="gang"))
    view = host_view(ONE, observations=tuple(items))
    groups = [[item.value for item in group] for group in series(view, criterion("memory.thing"))]
    assert groups == [[0, 2], [1], [3, 4], [9]]


# Absent and impossible values


def lost(status: str = ERROR) -> Metric:
    return reading(absent=f"{status}: gone")


@pytest.mark.parametrize(
    ("metrics", "fields", "expected"),
    [
        ([reading(1), lost(), reading(1)], {}, INCONCLUSIVE),
        ([reading(1), lost(), reading(1)], {"best_of_run": True}, PASS),
        ([reading(2), lost(), reading(1)], {}, FAIL),
        ([reading(1), reading(1), lost(UNSUPPORTED)], {}, INCONCLUSIVE),
        ([reading(1), reading(1), lost(UNSUPPORTED)], {"optional": True}, PASS),
        ([reading(1), lost(UNSUPPORTED), reading(1)], {}, PASS),
        ([lost(UNSUPPORTED)] * 3, {"optional": True}, None),
        ([lost(UNSUPPORTED)] * 3, {}, INCONCLUSIVE),
        ([lost()] * 3, {"optional": True}, INCONCLUSIVE),
    ],
)
def test_verdict_on_a_reading_that_some_or_all_snapshots_lack(
    metrics: list[Metric], fields: dict[str, Any], expected: str | None
) -> None:
    result = outcomes(criterion(**fields), snapshots=snapshots(*([item] for item in metrics)))
    assert [verdict for _, verdict, _ in result] == ([expected] if expected else [])


def test_error_of_a_power_reading_is_ignored_if_the_last_snapshot_has_a_value() -> None:
    """This applies to the readings for which `may_be_transient` (`fleet.judge.refusals`) is true."""
    rule = criterion("gpu.power", operator="le", value=700.0, unit="W")

    def power(value: Any = None) -> Metric:
        return replace(reading(value, name="gpu.power", absent="" if value else "error: busy"), unit="W")

    for readings, verdict in (
        ((power(500.0), power(), power(500.0)), PASS),
        ((power(500.0), power(500.0), power()), INCONCLUSIVE),
    ):
        result = outcomes(rule, snapshots=snapshots(*([item] for item in readings)))
        assert [item[1] for item in result] == [verdict]


def test_failure_by_impossible_values_alone_is_inconclusive() -> None:
    rule = criterion("gpu.temperature", operator="le", value=90, unit="Cel")

    def heat(value: Any) -> list[Metric]:
        return [replace(reading(value, name="gpu.temperature"), unit="Cel")]

    impossible = "9999 Cel is not credible: the highest possible value is 150"
    for values, verdict, reason in (
        ((40, 40, 40), PASS, "found 40 °C, wanted ≤ 90 °C"),
        ((40, 95, 40), FAIL, "found 95 °C, wanted ≤ 90 °C"),
        ((40, 9999, 40), INCONCLUSIVE, impossible),
        ((9999, 9999, 9999), INCONCLUSIVE, impossible),
        ((9999, 95, 40), FAIL, "found 95 °C, wanted ≤ 90 °C"),
    ):
        assert outcomes(rule, snapshots=snapshots(*map(heat, values))) == [("gpu=0", verdict, reason)]
    figure: Observation = builders.observation("stress.temperature", 9999.0, scope="gpu=0", unit="Cel")
    of_figure = replace(rule, name="stress.temperature")
    (result,) = verdicts(of_figure, host_view(ONE, observations=(figure,), packs=[pack(of_figure)]))
    assert (result.verdict, result.criterion, result.stage, result.name) == (
        INCONCLUSIVE,
        "c",
        "benchmark",
        "stress.temperature",
    )


@pytest.mark.parametrize(
    ("scope", "expected"),
    [("gpu", ["gpu=1"]), ("link", ["gpu=1"]), ("reason", ["gpu=1"]), ("host", []), ("", []), ("disk", [])],
)
def test_host_or_gpu_without_a_reading_is_reported_as_not_observed(scope: str, expected: list[str]) -> None:
    view = host_view(TWO, "h1", reading(1))
    groups = [[builders.observation("gpu.thing", 1, scope="gpu=0,link=1")]]
    result = [*judge_unobserved(view, criterion(scope=scope), groups)]
    assert [(item.scope, item.verdict, item.reason, item.name) for item in result] == [
        (part, INCONCLUSIVE, "not observed", "gpu.thing") for part in expected
    ]
    nothing = [item.scope for item in judge_unobserved(view, criterion(scope=scope), [])]
    assert nothing == {"disk": [], "host": ["host"], "": ["host"]}.get(scope, ["gpu=0", "gpu=1"])
    cpus = host_view(with_host(TWO, device="cpu"))
    if scope in ("gpu", "link", "reason"):
        assert [*judge_unobserved(cpus, criterion(scope=scope), [])] == []


@pytest.mark.parametrize(
    ("name", "must_be_observed"),
    [("gpu.nothing", True), ("memory.nothing", False), ("fabric_ports.nothing", False), ("bmc.nothing", False)],
)
def test_only_readings_of_the_host_itself_must_be_observed(name: str, must_be_observed: bool) -> None:
    assert bool(outcomes(criterion(name, scope="host"))) is must_be_observed


# Rates


def counted(rule: Criterion, *counts: Any, uptime: float | None = 3.6e5) -> Verdict:
    """Return the verdict on a counter that has these values in successive snapshots. The uptime rises by 5 h between snapshots.

    `uptime`: seconds since the boot at the first snapshot; None: the host does not report its uptime.
    """

    def of_snapshot(at: int, value: Any) -> list[Metric]:
        up = [] if uptime is None else [reading(uptime + at * 1.8e4, name="host.uptime", scope="host")]
        return [reading(value, name="gpu.repeats"), *up]

    shots = snapshots(*(of_snapshot(at, value) for at, value in enumerate(counts)))
    (verdict,) = verdicts(rule, host_view(ONE, snapshots=shots, packs=[pack(rule)]))
    return verdict


RATE = criterion("gpu.repeats", operator="le", value=10, per_hour=True)


@pytest.mark.parametrize(
    ("counts", "uptime", "verdict", "value"),
    [
        ((0, 0, 0), None, PASS, 0.0),
        ((500, 500, 500), 3.6e5, PASS, 5.0),
        ((5000, 5000, 5000), 3.6e5, FAIL, 50.0),
        ((1000, 1000, 1000), 3.6e5, PASS, 10.0),
        ((500, 500, 500), None, INCONCLUSIVE, None),
    ],
)
def test_rate_of_a_counter_before_the_run_is_judged(
    counts: tuple[int, ...], uptime: float | None, verdict: str, value: float | None
) -> None:
    result = counted(RATE, *counts, uptime=uptime)
    assert (result.verdict, result.value) == (verdict, value)
    assert ("before the run" in result.detail) is (verdict == FAIL)
    if verdict == INCONCLUSIVE:
        assert result.reason == "the uptime of the host is not known, so the rate of the counter cannot be computed"


@pytest.mark.parametrize(
    ("counts", "uptime", "verdict", "kind"),
    [
        ((0, 0, 0), 3.6e5, PASS, VerdictKind.CHANGE),
        ((0, 50, 100), 3.6e5, PASS, VerdictKind.CHANGE),
        ((0, 0, 1000), 3.6e5, FAIL, VerdictKind.CHANGE),
        ((0, 500, 1000), None, INCONCLUSIVE, VerdictKind.MISSING),
        ((100, 5, 6), 3.6e5, INCONCLUSIVE, VerdictKind.CONTRADICTORY),
    ],
)
def test_rate_of_a_counter_during_the_run_is_judged(
    counts: tuple[int, ...], uptime: float | None, verdict: str, kind: str
) -> None:
    result = counted(replace(RATE, delta=True), *counts, uptime=uptime)
    assert (result.verdict, result.kind) == (verdict, kind)
    if verdict == FAIL:
        assert "wanted ≤ 10" in result.reason
        assert result.stage == "benchmark"
