"""Test edge cases of the judge, mostly with plans that expect one figure of each GPU.

`make mutate` changes one expression of the judge at a time. Most tests here detect a change that no other test detected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet.diagnosis.diagnose import diagnose
from fleet.judge import outliers
from fleet.judge.change import change, net_change
from fleet.judge.criteria import Criterion, VsBaseline
from fleet.judge.duplicates import DuplicateSerials, duplicate_identities
from fleet.judge.evaluate import describe_comparison, evaluate, holds, matches, series
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.gather import Gatherer, gather
from fleet.judge.host_view import HostView
from fleet.judge.judge import judge
from fleet.judge.outliers import FleetFigures
from fleet.quantities import format_pair
from fleet.report import summary as report_summary
from fleet.report.hosts import decide, worst_decision
from fleet.report.merge import merge
from fleet.report.summary import pci_slots
from schemas.baselines import Accepted, HostBaseline, Level, PartBaseline, PlannedBaseline
from schemas.plans import Plan
from schemas.records import MEASURED, Gpu, Launch, Metric, Observation, Record, Value
from schemas.reports import ACCEPTED, FAIL, INCOMPLETE, INCONCLUSIVE, PASS, REJECTED, Coverage, HostReport, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import (
    FAILED,
    benchmark_launch,
    criterion,
    host_evidence,
    one_figure_plan,
    pack,
    reading,
    waiver,
)


def judge_criteria(plan: Plan, evidence: Evidence | dict[str, Evidence], *criteria: Criterion) -> list[Verdict]:
    """Return the verdicts with a pack of only these criteria. `evidence`: host -> its evidence, or the Evidence of h1 alone."""
    reported = evidence if isinstance(evidence, dict) else {"h1": evidence}
    return judge(plan, reported, [pack(*criteria)])


def summarize(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    """Return scope, criterion and verdict of each verdict."""
    return [(item.scope, item.criterion, item.verdict) for item in verdicts]


def of_criterion(verdicts: list[Verdict]) -> list[Verdict]:
    """Return only the verdicts of criterion `c`. Other verdicts report, for example, that a snapshot is missing."""
    return [item for item in verdicts if item.criterion == "c"]


def with_last_metrics(evidence: Evidence, *metrics: Metric) -> Evidence:
    """Return the evidence with these metrics as the only metrics of the last snapshot."""
    record = evidence.records[0]
    last = replace(record.snapshots[-1], metrics=metrics)
    return replace(evidence, records=(replace(record, snapshots=(*record.snapshots[:-1], last)),))


# Evaluation of one criterion


@pytest.mark.parametrize(
    ("operator", "value", "limit", "expected"),
    [
        ("eq", "a", "a", True), ("eq", "a", "b", False), ("ge", "a", "a", False), ("eq", None, None, False),
        ("ge", "2", 1, False), ("ge", 2, "1", False), ("le", "a", 1, False), ("eq", True, True, True), ("eq", True, 1, False),
        ("ge", 0.5, 1.0, False), ("le", 2, 1.0, False), ("gt", 2, 1.0, True), ("gt", 0.5, 1.0, False), ("lt", 0.5, 1.0, True),
        ("lt", 2, 1.0, False), ("eq", 0, False, False), ("eq", 1, True, False),
        ("ge", 1, 1.0, True), ("gt", 1, 1.0, False), ("lt", 1, 1.0, False), ("le", 1, 1.0, True), ("eq", "1", 1, False),
        ("ge", float("nan"), 0, False), ("le", float("nan"), 0, False), ("eq", float("nan"), float("nan"), False),
    ],
)  # fmt: skip
def test_operator_compares_value_with_limit(operator: str, value: Any, limit: Any, expected: bool) -> None:
    assert holds(operator, value, limit) is expected


def test_text_equals_only_the_same_text() -> None:
    plan = one_figure_plan()
    for value, verdict in (("on", PASS), ("off", FAIL), (1, FAIL)):
        assert summarize(judge_criteria(plan, host_evidence(plan, "h1", reading(value)), criterion(value="on"))) == [
            ("gpu=0", "c", verdict)
        ]


def test_verdict_carries_the_criterion_and_the_part() -> None:
    plan = one_figure_plan()
    (bad,) = judge_criteria(
        plan, host_evidence(plan, "h1", reading(2.5)), criterion(unit="W", severity="warning", basis="measured")
    )
    assert (bad.value, bad.limit, bad.operator, bad.unit) == (2.5, 1, "eq", "W")
    assert (bad.action, bad.severity, bad.basis, bad.source) == ("reseat", "warning", "measured", "a test's own")
    assert (bad.reason, bad.detail, bad.serial, bad.stage) == ("found 2.5 W, wanted = 1 W", "", "h1-0", "benchmark")
    (good,) = judge_criteria(plan, host_evidence(plan, "h1", reading(1)), criterion())
    assert (good.action, good.severity, good.reason) == ("none", "", "found 1, wanted = 1")
    assert describe_comparison(criterion(delta=True, operator="le"), 3, 0) == "changed by 3, wanted ≤ 0"


@pytest.mark.parametrize(
    ("value", "limit", "unit", "expected"),
    [
        (4.0434e12, 4.192e12, "B/s", "found 4043 GB/s, wanted = 4192 GB/s"),
        (9e7, 1.1e8, "B/s", "found 0.09 GB/s, wanted = 0.11 GB/s"),
        (0, 3e11, "B/s", "found 0 GB/s, wanted = 300 GB/s"),
        (0.9, 2e-5, "s", "found 900 ms, wanted = 20 µs"),
        (4.19199e12, 4.192e12, "B/s", "found 4191.99 GB/s, wanted = 4192 GB/s"),
        (0, 0, "s", "found 0 s, wanted = 0 s"),
        (True, False, "1", "found yes, wanted = no"),
        (9999.6, 10_000, "W", "found 9\u202f999.6 W, wanted = 10\u202f000 W"),
        (1500, 9000, "B", "found 1500 B, wanted = 9000 B"),
        (-3e-7, 1, "1", "found −3e-07, wanted = 1"),
        (-0.0, 1, "s", "found 0 s, wanted = 1 s"),
        (float("nan"), 1, "W", "found not a finite number, wanted = 1 W"),
    ],
)
def test_value_and_limit_are_shown_in_readable_units(value: Value, limit: Value, unit: str, expected: str) -> None:
    assert describe_comparison(criterion(unit=unit), value, limit) == expected


@pytest.mark.parametrize(
    ("scope", "count"), [("gpu", 2), ("reason", 2), ("link", 2), ("host", 1), ("", 1), ("disk", 0)]
)
def test_reading_that_is_missing_everywhere_is_inconclusive(scope: str, count: int) -> None:
    """There is a verdict on each GPU or on the host. Other parts, such as disks, get none."""
    plan = one_figure_plan(gpu_count=2)
    verdicts = judge_criteria(plan, host_evidence(plan), criterion(scope=scope))
    assert [(item.verdict, item.reason, item.criterion) for item in verdicts] == [
        (INCONCLUSIVE, "not observed", "c")
    ] * count
    wanted = ["gpu=0", "gpu=1"] if count == 2 else ["host"] * count
    assert [item.scope for item in verdicts] == wanted


def test_gpu_without_a_reading_is_inconclusive_if_another_gpu_passes() -> None:
    plan = one_figure_plan(gpu_count=2)
    verdicts = judge_criteria(
        plan, host_evidence(plan, "h1", reading(1, scope="gpu=1,link=3")), criterion(scope="link")
    )
    assert summarize(verdicts) == [("gpu=1,link=3", "c", PASS), ("gpu=0", "c", INCONCLUSIVE)]


def test_gpu_criterion_is_not_evaluated_on_a_cpu_host() -> None:
    plan = one_figure_plan()
    plan = replace(plan, hosts=(replace(plan.hosts[0], device="cpu"),), expected=())
    assert summarize(judge_criteria(plan, host_evidence(plan), criterion())) == []


def test_gpu_without_any_observation_is_not_reported_again_by_a_criterion() -> None:
    plan = one_figure_plan(gpu_count=2)
    evidence = host_evidence(plan, observations=tuple(builders.results(plan, "h1", "benchmark")[:1]))
    assert summarize(judge_criteria(plan, evidence, criterion())) == [
        ("gpu=1", "plan", INCONCLUSIVE),  # the planned figure is missing
        ("gpu=1", "plan", INCONCLUSIVE),  # no observation at all
        ("gpu=0", "c", INCONCLUSIVE),
    ]


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [({}, INCONCLUSIVE), ({"best_of_run": True}, PASS), ({"optional": True}, INCONCLUSIVE)],
)
def test_reading_with_an_error_in_the_last_snapshot_passes_only_if_the_criterion_has_best_of_run(
    fields: Any, verdict: str
) -> None:
    plan = one_figure_plan()
    evidence = with_last_metrics(host_evidence(plan, "h1", reading(1)), reading(absent="error: gone"))
    (actual,) = judge_criteria(plan, evidence, criterion(**fields))
    assert actual.verdict == verdict
    assert (actual.reason == "error after benchmark: gone") == (verdict == INCONCLUSIVE)
    assert actual.stage == ("benchmark" if verdict == INCONCLUSIVE else "preflight")


def test_reading_that_failed_once_fails_even_if_it_has_an_error_in_the_last_snapshot() -> None:
    plan = one_figure_plan()
    evidence = with_last_metrics(host_evidence(plan, "h1", reading(2)), reading(absent="error: gone"))
    assert summarize(judge_criteria(plan, evidence, criterion())) == [("gpu=0", "c", FAIL)]


@pytest.mark.parametrize(
    ("first", "last", "optional", "verdicts"),
    [
        ("unsupported: no", "unsupported: no", True, []),
        ("unsupported: no", "unsupported: no", False, [INCONCLUSIVE]),
        ("error: no", "unsupported: no", True, []),
        ("unsupported: no", "error: no", True, [INCONCLUSIVE]),
        ("error: no", "error: no", True, [INCONCLUSIVE]),
    ],
)
def test_verdict_on_a_reading_without_any_value(first: str, last: str, optional: bool, verdicts: list[str]) -> None:
    """The verdict is inconclusive. An optional reading gets no verdict if it is unsupported in the last snapshot."""
    plan = one_figure_plan()
    evidence = with_last_metrics(host_evidence(plan, "h1", reading(absent=first)), reading(absent=last))
    actual = judge_criteria(plan, evidence, criterion(optional=optional))
    assert [item.verdict for item in actual] == verdicts
    assert [item.reason for item in actual] == [last] * len(verdicts)


def test_series_does_not_depend_on_the_order_of_parameters() -> None:
    plan = one_figure_plan()
    params = [{"a": 1, "b": 2, "phase": "x"}, {"b": 2, "a": 1, "phase": "y"}, {"a": 1, "b": 3}]
    observed = [replace(builders.observation("peer_copy.thing", 1.0, scope="gpu=0"), params=each) for each in params]
    view = HostView(plan, plan.hosts[0], host_evidence(plan, observations=tuple(observed)), [pack()])
    assert [len(group) for group in series(view, criterion("peer_copy.thing"))] == [2, 1]


@pytest.mark.parametrize(
    ("fields", "scope", "params", "expected"),
    [
        ({}, "gpu=0", {}, True),
        ({}, "host", {}, False),
        ({"scope": ""}, "host", {}, True),
        ({"scope": "link"}, "gpu=0,link=1", {}, True),
        ({}, "gpu=0,link=1", {}, False),
        ({"stage": "gang"}, "gpu=0", {}, False),
        ({"stage": "preflight"}, "gpu=0", {}, True),
        ({"where": {"op": "copy"}}, "gpu=0", {"op": "copy"}, True),
        ({"where": {"op": "copy"}}, "gpu=0", {"op": "read"}, False),
        ({"where": {"op": "copy"}}, "gpu=0", {}, False),
        ({"where": {"gpu": "0"}}, "gpu=0", {}, True),
        ({"where": {"gpu": "0"}}, "gpu=0", {"gpu": "1"}, False),
        ({"scope": "mount", "where": {"mount": "/a=b"}}, "mount=/a=b", {}, True),
        ({"scope": "mount", "where": {"a": 1, "b": 2}}, "mount=/", {"a": 1}, False),
    ],
)
def test_criterion_matches_name_scope_stage_and_parameters(
    fields: Any, scope: str, params: Any, expected: bool
) -> None:
    observed = Observation(
        name="x.y", scope=scope, stage="preflight", unit="1", status=MEASURED, value=1, params=params
    )
    assert matches(criterion("x.y", **fields), observed) is expected


def test_verdict_shows_the_deciding_reading() -> None:
    """It is the last bad reading, or the last reading if all are good.

    With `best_of_run`, it is the first good reading, or the first reading if all are bad.
    """
    plan = one_figure_plan()
    snapshots = [reading(value) for value in (3, 1, 2, 1)]
    record = host_evidence(plan).records[0]
    taken = tuple(
        replace(record.snapshots[0], at=f"2026-11-21T04:00:0{at}Z", stage=f"s{at}", metrics=(metric,))
        for at, metric in enumerate(snapshots)
    )
    evidence = Evidence(records=(replace(record, snapshots=taken),))
    (worst,), (best,) = (
        of_criterion(judge_criteria(plan, evidence, criterion(best_of_run=flag))) for flag in (False, True)
    )
    assert (worst.verdict, worst.value, worst.stage) == (FAIL, 2, "s2")
    assert (best.verdict, best.value, best.stage) == (PASS, 1, "s1")
    (none_passes,) = of_criterion(judge_criteria(plan, evidence, criterion(best_of_run=True, value=9)))
    assert (none_passes.verdict, none_passes.value) == (FAIL, 3)
    (last,) = of_criterion(judge_criteria(plan, evidence, criterion(operator="ge")))
    assert (last.verdict, last.stage) == (PASS, "s3")


def test_limit_is_an_inventory_variable_or_a_fraction_of_the_expected_value() -> None:
    plan = one_figure_plan(gpu_count=2)
    (verdict,) = judge_criteria(
        plan, host_evidence(plan, "h1", reading(2, scope="host")), criterion(scope="host", variable="gpu_count")
    )
    assert (verdict.verdict, verdict.limit) == (PASS, 2)
    evidence = host_evidence(plan, "h1", *(Metric(name="gpu.thing", unit="1", values={"gpu=0": 90.0, "gpu=1": 89.9}),))
    verdicts = judge_criteria(plan, evidence, criterion(expected=100.0, fraction=0.9, operator="ge"))
    assert [(item.verdict, item.limit) for item in verdicts] == [(PASS, 90.0), (FAIL, 90.0)]


@pytest.mark.parametrize(("gbps", "verdicts"), [(0, []), (8, [PASS]), (16, [FAIL])])
def test_fabric_limit_follows_the_rate_in_the_inventory(gbps: float, verdicts: list[str]) -> None:
    plan = one_figure_plan(gpu_count=2, rackproof_fabric_gbps=gbps) if gbps else one_figure_plan(gpu_count=2)
    rule = criterion(scope="host", variable="fabric_bytes_per_second", fraction=0.5, operator="ge")
    actual = judge_criteria(plan, host_evidence(plan, "h1", reading(1e9, scope="host")), rule)
    assert [item.verdict for item in actual] == verdicts
    assert [item.limit for item in actual] == [gbps * 1e9 / 8 * 2 * 0.5] * len(verdicts)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [((4, 4), PASS), ((4, 5), FAIL), ((5, 1), FAIL), ((5, 0), INCONCLUSIVE)],
    ids=["same", "rose", "rose after a reset", "reset to 0"],
)
def test_counter_is_judged_by_its_increase(values: tuple[int, int], verdict: str) -> None:
    plan = one_figure_plan()
    evidence = with_last_metrics(host_evidence(plan, "h1", reading(values[0])), reading(values[1]))
    assert summarize(judge_criteria(plan, evidence, criterion(delta=True, operator="le", value=0))) == [
        ("gpu=0", "c", verdict)
    ]


def test_counter_read_once_is_inconclusive() -> None:
    plan = one_figure_plan()
    for evidence in (
        with_last_metrics(host_evidence(plan, "h1", reading(0))),
        with_last_metrics(host_evidence(plan), reading(0)),
    ):
        verdicts = of_criterion(judge_criteria(plan, evidence, criterion(delta=True, operator="le", value=0)))
        assert summarize(verdicts) == [("gpu=0", "c", INCONCLUSIVE)]


def test_required_increase_is_judged_by_the_net_change() -> None:
    plan = one_figure_plan()
    for values, verdict in (((4, 9), PASS), ((4, 8), FAIL), ((9, 4), FAIL)):
        evidence = with_last_metrics(host_evidence(plan, "h1", reading(values[0])), reading(values[1]))
        (actual,) = judge_criteria(plan, evidence, criterion(delta=True, operator="ge", value=5))
        assert (actual.verdict, actual.value) == (verdict, values[1] - values[0])


@pytest.mark.parametrize(
    ("count", "optional", "verdict"), [(4, False, PASS), (1, False, INCONCLUSIVE), (1, True, None)]
)
@pytest.mark.parametrize("name", ["gpu.thing", "memory.thing"])
def test_fleet_comparison_needs_enough_peers(count: int, optional: bool, verdict: str | None, name: str) -> None:
    """With too few peers, the verdict is inconclusive. If the criterion is optional, there is no verdict instead."""
    hosts = [f"h{number}" for number in range(1, count + 1)]
    plan = one_figure_plan(*hosts)

    def evidence_of(host: str) -> Evidence:
        if name == "gpu.thing":
            return host_evidence(plan, host, reading(10.0))
        figure = builders.observation(name, 10.0, scope="gpu=0")
        return host_evidence(plan, host, observations=(*builders.results(plan, host, "benchmark"), figure))

    rule = criterion(name, fleet_fraction=0.9, operator="ge", optional=optional)
    verdicts = judge_criteria(plan, {host: evidence_of(host) for host in hosts}, rule)
    assert [item.verdict for item in verdicts] == ([verdict] * count if verdict else [])
    assert all(item.value == 10.0 for item in verdicts)


def test_no_baseline_verdict_without_a_baseline() -> None:
    plan = one_figure_plan()
    rule = criterion(value=None, baseline=VsBaseline(fraction=0.9), operator="ge")
    assert judge_criteria(plan, host_evidence(plan, "h1", reading(1.0)), rule) == []
    view = HostView(plan, plan.hosts[0], host_evidence(plan), [pack(rule)])
    assert [*evaluate(view, rule, FleetFigures(Planned(plan)))] == []


STEPS = (
    ("preflight", "before"),
    ("benchmark", "before"),
    ("benchmark", "during"),
    ("benchmark", "after"),
    ("gang", "before"),
)
"""Stage and phase of snapshots, in the order of a run."""


def counter_readings(*values: Any, name: str = "gpu.thing") -> list[Observation]:
    """Return the readings of a counter. The first value is read at the first of STEPS, the second at the second, and so on."""
    return [
        Observation(
            name=name, scope="gpu=0", stage=stage, unit="1", status=MEASURED, value=value, params={"phase": phase}
        )
        for (stage, phase), value in zip(STEPS, values, strict=False)
    ]


WITHIN = "in stage benchmark between its snapshots"


@pytest.mark.parametrize(
    ("values", "total", "index", "stage", "where", "drop"),
    [
        ((1, 1), 0, 1, "", "0 before stage benchmark", ""),
        ((1, 3), 2, 1, "", "2 before stage benchmark", ""),
        ((1, 1, 4), 3, 2, "benchmark", f"3 {WITHIN} before and during", ""),
        ((1, 2, 2, 5), 4, 3, "benchmark", f"3 {WITHIN} during and after, 1 before stage benchmark", ""),
        ((1, 1, 2, 5, 5), 4, 3, "benchmark", f"4 {WITHIN} during and after", ""),
        ((1, 1, 2, 2, 9), 8, 4, "", "7 before stage gang, 1 in stage benchmark", ""),
        ((1, 9, 9, 9, 9), 8, 1, "", "8 before stage benchmark, 0 in stage benchmark", ""),
        # The stage with the largest sum decides: 2 + 3 in `benchmark` are more than 4 before `gang`.
        ((1, 1, 3, 6, 10), 9, 3, "benchmark", f"5 {WITHIN} during and after, 4 before stage gang", ""),
        ((5, 5, 2, 2), 2, 2, "benchmark", f"2 {WITHIN} before and during",
         "fell from 5 to 2 in stage benchmark"),
        ((5, 0), 0, 1, "", "0 before stage benchmark", "fell from 5 to 0 before stage benchmark"),
        ((5, -1), 0, 1, "", "0 before stage benchmark", "fell from 5 to -1 before stage benchmark"),
        ((True, 2.5), 1.5, 1, "", "1.5 before stage benchmark", ""),
    ],
)  # fmt: skip
def test_counter_increase_is_attributed_to_a_stage(
    values: tuple[Any, ...], total: float, index: int, stage: str, where: str, drop: str
) -> None:
    observed = counter_readings(*values)
    observed_change = change(observed)
    assert (observed_change.total, observed_change.stage, observed_change.where, observed_change.drop) == (
        total,
        stage,
        where,
        drop,
    )
    assert observed_change.reading == observed[index]


@pytest.mark.parametrize(
    ("phases", "expected_text"),
    [
        (("before", "after"), ""), (("after", "before"), ""), (("before", "during"), " between its snapshots before and during"),
        (("during", "after"), " between its snapshots during and after"),
        (("after", "after"), " between its snapshots after and after"),
    ],
)  # fmt: skip
def test_change_within_a_stage_names_its_snapshots_except_before_and_after(
    phases: tuple[str, str], expected_text: str
) -> None:
    one, two = counter_readings(1, 4)
    observed = [
        replace(item, stage="gang", params={"phase": phase}) for item, phase in zip((one, two), phases, strict=True)
    ]
    when = "before" if phases[1] == "before" else "in"
    assert change(observed).where == f"3 {when} stage gang{expected_text}"


def test_change_over_a_whole_stage_names_no_snapshots() -> None:
    observed = [item for item in counter_readings(1, 1, 9, 3) if item.params["phase"] != "during"]
    assert change(observed).where == "2 in stage benchmark"


def test_net_change_is_the_last_reading_minus_the_first() -> None:
    assert [net_change(counter_readings(*values)) for values in ((1, 5, 9), (9, 0, 4), (7, 7))] == [8, -5, 0]


def test_non_numeric_counter_fails() -> None:
    for values in ((1, "x"), ("x", 1), ("x", "y")):
        assert isinstance(change(counter_readings(*values)).total, str)
        assert isinstance(net_change(counter_readings(*values)), str)
        plan = one_figure_plan()
        evidence = with_last_metrics(host_evidence(plan, "h1", reading(values[0])), reading(values[1]))
        assert summarize(judge_criteria(plan, evidence, criterion(delta=True, operator="le", value=0))) == [
            ("gpu=0", "c", FAIL)
        ]
    assert change(counter_readings(0, "x", 9, name="xid.last_seen")).total == "x"


@pytest.mark.parametrize(("values", "total"), [((9, 0, 9), 0), ((0, 9, 0), 9), ((9, 0, 12), 3)])
def test_falling_time_of_the_newest_event_is_not_a_reset(values: tuple[int, ...], total: int) -> None:
    """`xid.last_seen` is the uptime at the newest XID; 0: none. It falls if the log was truncated.

    `total`: by how much the highest time so far rose.
    """
    observed_change = change(counter_readings(*values, name="xid.last_seen"))
    assert observed_change.total == total
    assert observed_change.drop == ""


@pytest.mark.parametrize(
    ("values", "at", "stage", "when"),
    [
        ((0, 5, 5), 1, "", "before stage benchmark"), ((0, 0.5, 0.5), 1, "", "before stage benchmark"),
        ((0, 9, 10, 10), 2, "benchmark", "in stage benchmark"), ((0, 9, 0, 10, 0), 3, "benchmark", "in stage benchmark"),
    ],
)  # fmt: skip
def test_stage_of_the_newest_event_is_that_of_the_first_reading_with_the_highest_time(
    values: tuple[float, ...], at: int, stage: str, when: str
) -> None:
    observed = counter_readings(*values, name="xid.last_seen")
    observed_change = change(observed)
    assert (observed_change.reading, observed_change.stage) == (observed[at], stage)
    assert observed_change.where.startswith("the newest at an uptime of ")
    assert f", {when}" in observed_change.where


def test_counter_needs_readings_in_the_first_and_in_the_last_snapshot() -> None:
    plan = one_figure_plan()
    record = host_evidence(plan).records[0]
    three = [replace(record.snapshots[0], at=f"2026-11-21T04:00:0{at}Z", stage=f"s{at}") for at in range(3)]
    rule = criterion(delta=True, operator="le", value=0)
    for positions, verdict in (((0, 1, 2), PASS), ((0, 2), PASS), ((0, 1), INCONCLUSIVE), ((1, 2), INCONCLUSIVE)):
        taken = tuple(replace(item, metrics=(reading(1),) if at in positions else ()) for at, item in enumerate(three))
        (actual,) = of_criterion(judge_criteria(plan, Evidence(records=(replace(record, snapshots=taken),)), rule))
        assert actual.verdict == verdict
        assert actual.detail == ""
    (rose,) = judge_criteria(plan, with_last_metrics(host_evidence(plan, "h1", reading(5)), reading(2)), rule)
    assert rose.detail == "2 in stage benchmark; fell from 5 to 2 in stage benchmark"
    (up,) = judge_criteria(plan, with_last_metrics(host_evidence(plan, "h1", reading(5)), reading(6)), rule)
    assert up.detail == "1 in stage benchmark"


def test_wildcard_stands_for_exactly_one_component_of_a_name() -> None:
    plan = one_figure_plan()
    metrics = (reading(1, name="gpu.one.x"), reading(2, name="gpu.two.x"), reading(3, name="gpu.x"))
    verdicts = judge_criteria(plan, host_evidence(plan, "h1", *metrics), criterion("gpu.*.x"))
    assert [(item.name, item.verdict) for item in verdicts] == [("gpu.one.x", PASS), ("gpu.two.x", FAIL)]


# Comparison with a baseline


NAME = "gpu.pcie.width"


def with_baseline(plan: Plan, evidence: Evidence, *figures: Level) -> tuple[Plan, Evidence]:
    """Return plan and evidence with a baseline: accepted records of h1 and its GPU. `figures` are added to the GPU's record."""
    run = Accepted(run_id="r0", nonce="f" * 32, report="0" * 64, status="PASS", at=builders.WHEN, by="me")
    bandwidth = Level(
        name="memory.bandwidth", stage="benchmark", unit="B/s", value=4.2e12, params=dict(plan.expected[0].params)
    )
    part = PartBaseline(kind="gpu", part="gpu", id="h1-0", host="h1", runs=(run,), figures=(*figures, bandwidth))
    host = PartBaseline(kind="host", part="host", id="h1", host="h1", runs=(run,), figures=(bandwidth,))
    known = HostBaseline(host=host, gpus={"h1-0": part})
    planned = PlannedBaseline(directory="b", digest="0" * 64)
    return replace(plan, baseline=planned), replace(evidence, baseline=known)


def width_level(value: float, unit: str = "1", **over: Any) -> Level:
    return Level(name=NAME, unit=unit, value=value, values={"r0": value}, **over)


def baseline_outcomes(plan: Plan, evidence: Evidence, *figures: Level, **over: Any) -> list[tuple[str, Any, Any, str]]:
    """Return verdict, value, limit and reason of each comparison of a PCIe width with the baseline."""
    rule = criterion(NAME, value=None, **{"operator": "ge", "baseline": VsBaseline(fraction=0.9), **over})
    plan, evidence = with_baseline(plan, evidence, *figures)
    verdicts = [item for item in judge_criteria(plan, evidence, rule) if item.criterion == "c"]
    return [(item.verdict, item.value, item.limit, item.reason) for item in verdicts]


def test_part_is_compared_with_its_baseline() -> None:
    plan = one_figure_plan()
    evidence = host_evidence(plan, "h1", reading(16, name=NAME))
    assert baseline_outcomes(plan, evidence, width_level(16))[0][:3] == (PASS, 16, 14.4)
    assert baseline_outcomes(plan, evidence, width_level(20))[0][:3] == (FAIL, 16, 18.0)
    assert (
        "90 % of the accepted level; this level is 20 (one accepted run)"
        in baseline_outcomes(plan, evidence, width_level(20))[0][3]
    )
    changed = with_last_metrics(evidence, reading(8, name=NAME))
    assert baseline_outcomes(plan, changed, width_level(16))[0][:3] == (FAIL, 8, 14.4)
    assert baseline_outcomes(plan, changed, width_level(16), best_of_run=True)[0][:3] == (PASS, 16, 14.4)


def test_figure_missing_in_the_baseline_is_inconclusive_unless_optional() -> None:
    plan = one_figure_plan()
    evidence = with_last_metrics(host_evidence(plan, "h1", reading(16, name=NAME)), reading(8, name=NAME))
    assert baseline_outcomes(plan, evidence) == [
        (INCONCLUSIVE, 8, None, "the accepted record of the part does not have this figure")
    ]
    assert baseline_outcomes(plan, evidence, optional=True) == []


def test_baseline_with_too_much_noise_or_with_unknown_noise_is_inconclusive() -> None:
    plan = one_figure_plan()
    evidence = host_evidence(plan, "h1", reading(16, name=NAME))
    for level, fraction, why in (
        (width_level(16, sigma=0.2), 0.9, "a noise (sigma) of"),
        (width_level(16, unit="B/s"), 1.0, "the limit needs the noise of the accepted figure, which is unknown"),
    ):
        rule = {"baseline": VsBaseline(fraction=fraction)}
        ((verdict, value, limit, reason),) = baseline_outcomes(plan, evidence, level, **rule)
        assert (verdict, value, limit) == (INCONCLUSIVE, 16, None)
        assert why in reason


def test_part_without_a_baseline_is_reported_once() -> None:
    plan = one_figure_plan()
    evidence = host_evidence(plan, "h1", reading(16, name=NAME), gpus=(replace(builders.gpu("h1", 0), serial="new"),))
    assert baseline_outcomes(plan, evidence, width_level(16)) == []
    plan_with_baseline, reported = with_baseline(plan, evidence, width_level(16))
    rule = criterion(NAME, value=None, operator="ge", baseline=VsBaseline(fraction=0.9))
    assert [
        (item.scope, item.criterion, item.verdict) for item in judge_criteria(plan_with_baseline, reported, rule)
    ] == [("gpu=0", "baseline", INCONCLUSIVE)]


# Gangs


def gang_plan(*hosts: str) -> Plan:
    """Return a plan with one gang (the hosts of one multi-node launch). The plan expects one all-reduce figure."""
    plan = builders.plan(*hosts, profile="smoke", gpu_count=1)
    kept = [item for item in plan.expected if item.stage == "gang" and item.name == "collective.all_reduce.busbw"]
    return replace(plan, expected=tuple(kept[:1]))


def gang_evidence(
    plan: Plan, host: str, launches: tuple[Launch, ...], observed: tuple[Observation, ...] | None = None
) -> Evidence:
    """Return the evidence of a gang member: its host record and its gang record."""
    host_record = host_evidence(plan, host, reading(1), observations=(), launches=()).records[0]
    ranks = plan.ranks(launches[-1].members) if launches else 0
    result = observed
    if result is None:
        figures = builders.results(plan, host, "gang")
        result = tuple(replace(figure, params={**figure.params, "world_size": ranks}) for figure in figures)
    taken = tuple(
        replace(host_record.snapshots[-1], stage="gang", phase=phase, metrics=()) for phase in ("before", "after")
    )
    launches = tuple(
        replace(item, ranks=builders.ranks(len(item.ranks), plan.ranks(item.members[: item.members.index(host)])))
        if host in item.members
        else item
        for item in launches
    )
    gang_record = replace(
        host_record, gang=plan.host(host).gang, observations=result, launches=launches, snapshots=taken
    )
    return Evidence(records=(host_record, gang_record))


def gang_launch(*members: str, outcome: str = "finished", number: int = 1) -> Launch:
    return replace(builders.launch("gang", members, outcome, "" if outcome == "finished" else "why"), number=number)


def test_gang_launched_together_has_no_finding() -> None:
    plan = gang_plan("h1", "h2")
    assert plan.expected
    evidence = {host: gang_evidence(plan, host, (gang_launch("h1", "h2"),)) for host in ("h1", "h2")}
    assert judge_criteria(plan, evidence) == []


def test_hosts_never_launched_together_are_reported_as_partitioned() -> None:
    plan = gang_plan("h1", "h2", "h3", "h4")
    pairs = {"h1": ("h1", "h2"), "h2": ("h1", "h2"), "h3": ("h3", "h4"), "h4": ("h3", "h4")}
    evidence = {host: gang_evidence(plan, host, (gang_launch(*members),)) for host, members in pairs.items()}
    verdicts = [item for item in judge_criteria(plan, evidence) if item.name == "stage.gang"]
    assert [(item.host, item.scope, item.stage, item.verdict, item.criterion, item.source) for item in verdicts] == [
        (host, "gang=r1", "gang", INCONCLUSIVE, "plan", "plan") for host in pairs
    ]
    assert verdicts[0].reason == "launched with h1, h2, but never with h3, h4"


def test_absence_of_a_gang_member_is_reported_only_for_this_member() -> None:
    plan = gang_plan("h1", "h2", "h3")
    evidence = {host: gang_evidence(plan, host, (gang_launch("h1", "h2"),)) for host in ("h1", "h2")}
    evidence["h3"] = Evidence(records=evidence["h1"].records[:1])
    evidence["h3"] = Evidence(records=(replace(evidence["h3"].records[0], host="h3", gpus=(builders.gpu("h3", 0),)),))
    verdicts = judge_criteria(plan, evidence)
    assert [(item.host, item.name, item.reason) for item in verdicts] == [
        ("h3", "stage.gang", "nothing was observed; there is no record of the stage from this host")
    ]


def test_gang_stage_without_a_launch_reports_that_it_did_not_start() -> None:
    plan = gang_plan("h1", "h2")
    evidence = {host: gang_evidence(plan, host, (), ()) for host in ("h1", "h2")}
    assert {item.reason for item in judge_criteria(plan, evidence) if item.name == "stage.gang"} == {
        "nothing was observed; the stage did not start on this host, or its record was not collected after the start"
    }
    evidence = {
        host: gang_evidence(plan, host, (gang_launch("h1", "h2", outcome="deadline"),), ()) for host in ("h1", "h2")
    }
    assert {item.reason for item in judge_criteria(plan, evidence) if item.name == "stage.gang"} == {
        "nothing was observed; why"
    }


def test_changed_or_duplicate_uuid_fails() -> None:
    plan = one_figure_plan("h1", "h2")
    first, second = (Metric(name="gpu.uuid", unit="1", values={"gpu=0": each}) for each in ("GPU-h1-0", "b"))
    lost = Metric(name="gpu.uuid", unit="1", values={}, absent={"gpu=0": "error: x"})
    good = {host: host_evidence(plan, host, reading(1)) for host in ("h1", "h2")}
    (verdict,) = judge_criteria(plan, good | {"h1": with_last_metrics(host_evidence(plan, "h1", first), second)})
    assert (verdict.name, verdict.source, verdict.basis, verdict.unit) == (
        "gpu.uuid",
        "the identity of a part does not change",
        "policy",
        "1",
    )
    assert (verdict.value, verdict.serial, verdict.scope, verdict.action) == (
        "b",
        "h1-0",
        "gpu=0",
        "inspect_hardware",
    )
    assert judge_criteria(plan, good | {"h1": with_last_metrics(host_evidence(plan, "h1", first), lost)}) == []
    assert judge_criteria(plan, good | {"h1": with_last_metrics(host_evidence(plan, "h1", first), first)}) == []
    two = Metric(name="gpu.uuid", unit="1", values={"gpu=0": "GPU-h1-0", "gpu=1": "b"})
    (unlisted,) = judge_criteria(plan, good | {"h1": host_evidence(plan, "h1", two)})
    assert (unlisted.scope, unlisted.reason) == ("gpu=1", "has readings, but the record does not list this GPU")
    same_uuid = replace(builders.gpu("h2", 0), uuid="GPU-h1-0")
    verdicts = judge_criteria(plan, good | {"h2": host_evidence(plan, "h2", reading(1), gpus=(same_uuid,))})
    assert [(item.host, item.name, item.criterion, item.verdict, item.action, item.basis) for item in verdicts] == [
        (host, "gpu.uuid", "identity-unique", FAIL, "inspect_hardware", "policy") for host in ("h1", "h2")
    ]
    assert {item.source for item in verdicts} == {"a serial, UUID, GUID or MAC address identifies one part"}


# Hosts without valid evidence


def test_host_without_a_record_has_one_inconclusive_verdict() -> None:
    plan = one_figure_plan("h1", "h2")
    verdicts = judge_criteria(plan, {"h1": host_evidence(plan, "h1", reading(1))}, criterion())
    assert [(item.host, *summarize([item])[0], item.name, item.reason) for item in verdicts] == [
        ("h1", "gpu=0", "c", PASS, "gpu.thing", "found 1, wanted = 1"),
        ("h2", "host", "plan", INCONCLUSIVE, "record", "the host left no record"),
    ]
    (other,) = judge_criteria(one_figure_plan(), {"h1": Evidence(problem="quarantined: x")}, criterion())
    assert (other.name, other.scope, other.reason) == ("record", "host", "quarantined: x")


def test_host_problem_is_reported_in_addition_to_the_verdicts_on_its_record() -> None:
    plan = one_figure_plan()
    verdicts = judge_criteria(
        plan, replace(host_evidence(plan, "h1", reading(1)), problem="unreachable at Gang"), criterion()
    )
    assert [(item.name, item.scope, item.verdict, item.reason) for item in verdicts] == [
        ("host.events", "host", INCONCLUSIVE, "unreachable at Gang"),
        ("gpu.thing", "gpu=0", PASS, "found 1, wanted = 1"),
    ]


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({}, 1),
        ({"optional": True}, 0),
        ({"same_as_fleet": True, "value": None}, 1),
        ({"same_as_fleet": False, "value": None}, 0),
    ],
)
def test_criterion_of_an_operator_pack_must_match_an_observation(fields: Any, lines: int) -> None:
    """Exceptions: an optional criterion, and one that accepts any value (`same_as_fleet` False)."""
    plan = one_figure_plan()
    rule = criterion("disk.thing", scope="disk", origin="ours", **fields)
    verdicts = judge(plan, {"h1": host_evidence(plan)}, [pack(), pack(rule, name="ours", gpu_names=(), chosen=True)])
    assert [item.reason for item in verdicts] == ["no observation matches this criterion"] * lines
    assert [(item.scope, item.name, item.criterion) for item in verdicts] == [("host", "disk.thing", "c")] * lines
    shipped = judge(plan, {"h1": host_evidence(plan)}, [pack(replace(rule, origin="h200-sxm"))])
    assert shipped == []


def test_baseline_criterion_of_an_operator_pack_need_not_match_in_a_run_without_a_baseline() -> None:
    plan = one_figure_plan()
    rule = criterion("disk.thing", scope="disk", origin="ours", value=None, baseline=VsBaseline())
    packs = [pack(), pack(rule, name="ours", gpu_names=(), chosen=True)]
    assert judge(plan, {"h1": host_evidence(plan)}, packs) == []


def test_waivers_are_applied_to_verdicts() -> None:
    plan = replace(one_figure_plan(), waivers=(waiver(),))
    (bad,) = judge_criteria(plan, host_evidence(plan, "h1", reading(2)), criterion())
    assert (bad.verdict, bad.waiver, bad.blocks_acceptance) == (FAIL, waiver(), False)


def test_failed_collector_and_swapped_part_are_reported_without_criteria() -> None:
    plan = one_figure_plan()
    first = Metric(name="gpu.serial", unit="1", values={"gpu=0": "a"})
    second = Metric(name="gpu.serial", unit="1", values={"gpu=0": "b"})
    (swapped,) = judge_criteria(plan, with_last_metrics(host_evidence(plan, "h1", first), second))
    assert (swapped.criterion, swapped.verdict, swapped.reason) == (
        "identity-constant", FAIL, "changed during the run: a, then b",
    )  # fmt: skip
    lost = Metric(name="collector.nvml", unit="1", values={}, absent={"host": "error: NVML"})
    assert {item.verdict for item in judge_criteria(plan, host_evidence(plan, "h1", lost))} == {INCONCLUSIVE}


@pytest.mark.parametrize(("uptimes", "lines"), [((10.0, 20.0), 0), ((20.0, 10.0), 1), ((10.0, 10.0), 0)])
def test_reboot_during_the_run_is_inconclusive(uptimes: tuple[float, float], lines: int) -> None:
    plan = one_figure_plan()
    metrics = [Metric(name="host.uptime", unit="s", values={"host": value}) for value in uptimes]
    verdicts = judge_criteria(plan, with_last_metrics(host_evidence(plan, "h1", metrics[0]), metrics[1]))
    assert [(item.name, item.scope, item.verdict) for item in verdicts] == [
        ("host.uptime", "host", INCONCLUSIVE)
    ] * lines


# Expected models, stages and figures


def test_gpu_model_must_match_the_inventory() -> None:
    plan = one_figure_plan(rackproof_gpu_model="h200-sxm")
    (good,) = judge_criteria(plan, host_evidence(plan))
    assert (good.criterion, good.verdict, good.value, good.action) == (
        "gpu-model",
        PASS,
        "NVIDIA H200",
        "none",
    )
    other = replace(builders.gpu("h1", 0), name="NVIDIA H100")
    (bad,) = judge_criteria(plan, host_evidence(plan, gpus=(other,)))
    assert (bad.verdict, bad.action, bad.limit) == (FAIL, "configure", "h200-sxm")
    assert bad.reason == "found NVIDIA H100, but the inventory has h200-sxm"
    (unnamed,) = judge_criteria(plan, host_evidence(plan, gpus=()))
    assert (unnamed.verdict, unnamed.reason) == (INCONCLUSIVE, "the GPU does not report its name")


def test_gpu_model_without_a_pack_is_inconclusive() -> None:
    plan = one_figure_plan()
    (verdict,) = judge_criteria(plan, host_evidence(plan, gpus=(replace(builders.gpu("h1", 0), name="NVIDIA X"),)))
    assert (verdict.name, verdict.scope, verdict.verdict) == ("gpu.name", "host", INCONCLUSIVE)
    assert verdict.reason.startswith("no criteria pack for NVIDIA X")


@pytest.mark.parametrize(
    ("launches", "reason"),
    [
        ((), "the stage did not start on this host, or its record was not collected after the start"),
        ((benchmark_launch("finished"),), "the launch finished, so the reason is not known"),
        ((benchmark_launch("failed", "why"),), "why"),
        ((benchmark_launch("failed", "first"), benchmark_launch("deadline", "second")), "second"),
    ],
)
def test_empty_stage_reports_the_reason_of_its_last_launch(launches: tuple[Launch, ...], reason: str) -> None:
    plan = one_figure_plan()
    record = replace(host_evidence(plan, "h1", reading(1)).records[0], observations=(), launches=launches)
    evidence = Evidence(records=(replace(record, snapshots=record.snapshots[:1]),))
    verdict, *more = judge_criteria(plan, evidence)
    assert (verdict.name, verdict.scope, verdict.reason) == (
        "stage.benchmark",
        "host",
        f"nothing was observed; {reason}",
    )
    # After a finished launch, another verdict reports that the record has no snapshot after the launch.
    finished = launches == (benchmark_launch("finished"),)
    assert {item.name for item in more} == ({"stage.benchmark"} if finished else set())


def test_stage_with_readings_but_without_its_figure_has_one_verdict_on_this_figure() -> None:
    plan = one_figure_plan()
    (verdict,) = judge_criteria(plan, host_evidence(plan, "h1", reading(1), observations=()))
    assert (verdict.name, verdict.scope, verdict.reason) == (
        "memory.bandwidth", "gpu=0", "not observed; the launch finished, so the reason is not known",
    )  # fmt: skip
    assert (verdict.stage, verdict.params) == ("benchmark", {"op": "copy"} | dict(plan.expected[0].params))


def test_last_launch_of_a_stage_decides() -> None:
    plan = one_figure_plan()
    ended = [benchmark_launch("failed", "why"), benchmark_launch("finished")]
    assert judge_criteria(plan, host_evidence(plan, launches=tuple(ended))) == []
    (verdict,) = judge_criteria(plan, host_evidence(plan, launches=tuple(reversed(ended))))
    assert (verdict.name, verdict.scope, verdict.reason) == ("stage.benchmark", "host", "failed: why")


def copy_figure(
    status: str = MEASURED, *, scope: str = "gpu=0", stage: str = "benchmark", **params: Any
) -> Observation:
    value, reason = (4.2e12, "") if status == MEASURED else (None, "why")
    return Observation(
        name="memory.bandwidth", scope=scope, stage=stage, unit="B/s", status=status, value=value, reason=reason,
        params={"op": "copy", **params},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("observed", "expected_reasons"),
    [
        ((copy_figure(),), []),
        ((copy_figure("error"),), ["error: why"]),
        ((copy_figure("skipped"),), ["skipped: why"]),
        ((copy_figure("unsupported"),), ["unsupported: why"]),
        ((copy_figure("error"), copy_figure()), []),
        ((copy_figure(), copy_figure("error")), ["error: why"]),
        ((copy_figure(numa="local"), copy_figure("error", numa="remote")), ["error: why"]),
        ((copy_figure("error", numa="local"), copy_figure(numa="remote")), ["error: why"]),
        ((copy_figure("error", numa="local"), copy_figure(numa="local")), []),
        ((copy_figure("error", numa="local"), copy_figure()), []),
        ((copy_figure("error"), copy_figure(numa="local")), []),
        ((copy_figure(), copy_figure("error", op="odd")), ["error: why"]),
        ((copy_figure(), copy_figure("error", op="odd"), copy_figure(op="odd")), []),
        ((copy_figure(), copy_figure("error", op="odd"), copy_figure(op="odd", stage="soak")), ["error: why"]),
        ((copy_figure(), copy_figure("skipped", op="odd")), []),
    ],
)
def test_later_observation_replaces_an_earlier_one_of_the_same_figure(
    observed: tuple[Observation, ...], expected_reasons: list[str]
) -> None:
    """Results with local and with remote memory (`numa`) do not replace each other.

    A result without `numa` replaces a result with any `numa`, and vice versa.

    The plan does not expect figures with `op` "odd". Only their errors are reported.
    """
    plan = one_figure_plan()
    plan = replace(plan, expected=tuple(replace(item, params={"op": "copy"}) for item in plan.expected))
    verdicts = judge_criteria(plan, host_evidence(plan, "h1", reading(1), observations=observed))
    assert [item.reason for item in verdicts] == expected_reasons
    assert {item.verdict for item in verdicts} <= {INCONCLUSIVE}


def test_unsupported_figure_gets_no_verdict_if_the_gpu_model_lacks_it() -> None:
    plan = one_figure_plan()
    plan = replace(plan, expected=tuple(replace(item, params={"op": "copy"}) for item in plan.expected))
    lacking = pack(lacks={"memory.bandwidth": {"op": ("copy",)}})
    for status, lines in (("unsupported", 0), ("error", 1), ("skipped", 1)):
        verdicts = judge(
            plan, {"h1": host_evidence(plan, "h1", reading(1), observations=(copy_figure(status),))}, [lacking]
        )
        assert len(verdicts) == lines


def test_duplicate_serials_are_found_whatever_the_order_of_merging() -> None:
    plan = one_figure_plan("h1", "h2", "h3", gpu_count=2)
    evidence = {host: host_evidence(plan, host) for host in ("h1", "h2", "h3")}
    same = replace(builders.gpu("h2", 1), serial="h1-0")
    evidence["h2"] = host_evidence(plan, "h2", gpus=(builders.gpu("h2", 0), same))
    verdicts = [
        (item.host, item.scope, item.name, item.reason)
        for item in judge_criteria(plan, evidence)
        if item.verdict == FAIL
    ]
    assert verdicts == [
        ("h1", "gpu=0", "gpu.serial", "also reported by GPU 1 of h2"),
        ("h2", "gpu=1", "gpu.serial", "also reported by GPU 0 of h1"),
    ]
    parts_of_fleet = [DuplicateSerials(), DuplicateSerials()]
    parts_of_fleet[0].add("h1", evidence["h1"])
    parts_of_fleet[1].add("h2", evidence["h2"])
    parts_of_fleet[1].add("h3", evidence["h3"])
    for first, second in (parts_of_fleet, parts_of_fleet[::-1]):
        whole = DuplicateSerials()
        whole.update(first)
        whole.update(second)
        assert whole.hosts() == {"h1", "h2"}
        assert whole.others(("gpu.serial", "h1-0"), ("h1", "gpu=0")) == [("h2", "gpu=1")]
    unnamed = {host: host_evidence(plan, host, gpus=()) for host in ("h1", "h2")}
    assert not [item for item in judge_criteria(plan, unnamed) if item.verdict == FAIL]


# Decisions and lines on causes


def cause_texts(
    verdicts: list[Verdict], slots: dict[tuple[str, str], str], decisions: Mapping[str, str] | None = None
) -> list[str]:
    """Return the lines on causes in the summary of a report.

    `slots`: host and scope of a GPU -> its PCI address; `decisions`: host -> decision.
    """
    nothing = Coverage(expected=0, measured=0, missing=0, error=0, skipped=0, unsupported=0)
    hosts = [
        HostReport(name=name, rack="", decision=decision, record="", coverage=nothing)
        for name, decision in (decisions or {}).items()
    ]
    causes = diagnose(verdicts, {})
    return [str(line) for line in report_summary.cause_lines(causes, verdicts, slots, hosts)]


PASSED, UNKNOWN = replace(FAILED, verdict=PASS, severity=""), replace(FAILED, verdict=INCONCLUSIVE, severity="")


@pytest.mark.parametrize(
    ("verdicts", "decision"),
    [
        ([PASSED], ACCEPTED),
        ([], INCOMPLETE),
        ([PASSED, UNKNOWN], INCOMPLETE),
        ([PASSED, UNKNOWN, FAILED], REJECTED),
        ([FAILED], REJECTED),
        ([PASSED, replace(FAILED, waiver=waiver())], ACCEPTED),
        ([replace(FAILED, waiver=waiver())], ACCEPTED),
        ([replace(FAILED, waiver=waiver()), UNKNOWN], INCOMPLETE),
        ([replace(UNKNOWN, waiver=waiver(absent=True))], ACCEPTED),
    ],
)
def test_host_decision_follows_its_worst_verdict(verdicts: list[Verdict], decision: str) -> None:
    assert decide(verdicts) == decision
    assert decide(reversed(verdicts)) == decision


@pytest.mark.parametrize(
    ("hosts", "decision"),
    [
        ([ACCEPTED], ACCEPTED),
        ([], INCOMPLETE),
        ([ACCEPTED, INCOMPLETE], INCOMPLETE),
        ([ACCEPTED, INCOMPLETE, REJECTED], REJECTED),
    ],
)
def test_fleet_decision_follows_its_worst_host(hosts: list[str], decision: str) -> None:
    assert worst_decision(hosts) == decision
    assert worst_decision(reversed(hosts)) == decision


@pytest.mark.parametrize(("value", "limit"), [(0.3, 0.1 * 3), (216.49999e9, 216.5e9), (1.0 - 1e-16, 1.0)])
def test_value_below_its_limit_is_printed_with_enough_digits_to_differ_from_it(value: float, limit: float) -> None:
    result, wanted = format_pair(value, limit, "B/s")
    assert result != wanted


def test_causes_are_sorted_by_severity_without_duplicates() -> None:
    critical = replace(FAILED, host="h9", action="rma", severity="critical")
    warning = replace(FAILED, action="monitor", severity="warning", scope="host", serial="")
    verdicts = [UNKNOWN, warning, critical, replace(critical, criterion="c2"), replace(FAILED, waiver=waiver()), PASSED]
    assert cause_texts(verdicts, {}) == [
        "FAIL: GPU 1 of h9 fails a b (serial s1): bad; Return the part (RMA) [a.b and 1 more check]",
        "FAIL: h1 fails a b: bad; Monitor [a.b]",
        "INCOMPLETE: GPU 1 of h1 has no result for a b (serial s1): bad; Measure again [a.b]",
    ]


def test_limited_space_shows_a_cause_of_each_host_before_a_second_cause_of_any_host() -> None:
    many = [replace(FAILED, host=f"h{number}", action="none") for number in range(21)]
    assert cause_texts(many[:20], {})[-1] == "FAIL: GPU 1 of h19 fails a b (serial s1): bad [a.b]"
    assert cause_texts(many, {}, {"h20": REJECTED})[20:] == ["… and 1 more cause in the report", "Failed as well: h20"]
    of_one_host = [replace(FAILED, host="x", name=f"reading.{number}", action="rma") for number in range(30)]
    lines = cause_texts([*of_one_host, *many[:19]], {})
    assert all(f"of {verdict.host} " in " ".join(lines[:20]) for verdict in (of_one_host[0], *many[:19]))
    assert lines[20:] == ["… and 29 more causes in the report"]


def test_rejected_and_incomplete_hosts_without_a_shown_cause_are_listed() -> None:
    decisions = {f"h{number}": REJECTED for number in range(60)} | {"u1": INCOMPLETE, "good": ACCEPTED}
    lines = cause_texts([replace(FAILED, host=f"h{number}") for number in range(20)], {}, decisions)[20:]
    assert lines[0].startswith("Failed as well: h20, ")
    assert lines[0].endswith("h48, h49 and 10 more hosts")
    assert lines[1:] == ["Incomplete as well: u1"]


def test_gpu_is_named_with_its_pci_address_even_if_it_has_no_serial() -> None:
    gpus = [
        Gpu(index=number, serial="0", uuid="", name="", pci_bus_id=f"00000000:{number + 10:02X}:00.0")
        for number in range(2)
    ]
    slots = pci_slots(("h1", gpu) for gpu in gpus)
    two = [
        replace(FAILED, scope="gpu=0", serial="0", action="none"),
        replace(FAILED, scope="gpu=1,link=3", serial="", action="none", reason="worse"),
    ]
    assert cause_texts(two, slots) == [
        "FAIL: GPU 0 of h1 fails a b (serial 0, PCI 0000:0a:00.0): bad [a.b]",
        "FAIL: GPU 1 of h1 fails a b (PCI 0000:0b:00.0): worse [a.b]",
    ]


def test_replaceable_part_of_a_device_has_its_own_cause() -> None:
    ports = [
        replace(FAILED, scope=f"hca=mlx5_0,port={port}", serial="", reason=f"port {port}", action="none")
        for port in "12"
    ]
    dimms = [
        replace(FAILED, scope=f"mc=0,dimm={dimm}", serial="", reason=f"{dimm} errors", action="none") for dimm in "05"
    ]
    assert [cause.part for cause in diagnose([*ports, *dimms], {})] == ["hca=mlx5_0", "mc=0,dimm=0", "mc=0,dimm=5"]


def acceptance(plan: Plan, evidence: dict[str, Evidence], *criteria: Criterion) -> tuple[str, str, tuple[str, ...]]:
    """Return the decision of a report, and the status and the lines of its summary."""
    report = merge(plan, evidence, [pack(*criteria)])
    return report.decision, report.acceptance.status, report.acceptance.summary


def test_report_summary_distinguishes_pass_fail_incomplete_and_waived() -> None:
    plan = one_figure_plan("h1", "h2")
    good = {host: host_evidence(plan, host, reading(1)) for host in ("h1", "h2")}
    decision, status, lines = acceptance(plan, good, criterion())
    assert (decision, status, lines[0]) == (ACCEPTED, "PASS", "Hosts: 2 of 2 accepted (2 GPUs)")
    assert "Host and GPU health: PASS" in lines
    assert lines[-1] == "Criteria: h200-sxm"
    decision, status, lines = acceptance(plan, good | {"h2": host_evidence(plan, "h2", reading(2))}, criterion())
    assert (decision, status, lines[0]) == (REJECTED, "FAIL", "Hosts: 1 of 2 accepted, 1 failed (2 GPUs)")
    assert "Host and GPU health: FAIL" in lines
    decision, status, lines = acceptance(plan, {"h1": good["h1"]}, criterion())
    assert (decision, status, lines[0]) == (INCOMPLETE, "INCOMPLETE", "Hosts: 1 of 2 accepted, 1 incomplete (1 GPU)")
    assert "Host and GPU health: INCOMPLETE" in lines
    waived = replace(plan, waivers=(waiver(host="h2"),))
    decision, status, lines = acceptance(waived, good | {"h2": host_evidence(plan, "h2", reading(2))}, criterion())
    assert (decision, status, lines[0]) == (ACCEPTED, "PASS WITH WAIVERS", "Hosts: 2 of 2 accepted (2 GPUs)")
    assert "Host and GPU health: FAIL (waived)" in lines
    assert acceptance(waived, good, criterion())[1] == "PASS"


def test_coverage_counts_each_planned_figure_once() -> None:
    plan = one_figure_plan("h1", "h2", gpu_count=2)
    lost = copy_figure("error", **{key: value for key, value in plan.expected[0].params.items() if key != "op"})
    evidence = {"h1": host_evidence(plan, "h1"), "h2": host_evidence(plan, "h2", observations=(lost,))}
    coverage = merge(plan, evidence, [pack()]).coverage
    counts = (
        coverage.expected,
        coverage.measured,
        coverage.missing,
        coverage.error,
        coverage.skipped,
        coverage.unsupported,
    )
    assert counts == (4, 2, 1, 1, 0, 0)


def test_summary_of_an_accepted_simulated_run_states_that_no_gpu_was_tested() -> None:
    plan = replace(one_figure_plan(), simulated=True)
    decision, status, lines = acceptance(plan, {"h1": host_evidence(plan, "h1", reading(1))}, criterion())
    assert decision == ACCEPTED
    assert status == "SIMULATED PASS"
    assert lines[0].startswith("Hosts: 1 of 1 passed (no GPU was tested")


# Fleet figures


def fleet_verdicts(
    values: dict[str, Any], rule: Criterion, gatherer_count: int = 1, scope: str = "gpu=0"
) -> list[Verdict]:
    """Return the verdicts on hosts whose reading `gpu.thing` has these values (host -> value).

    The statistics of the fleet are merged from `gatherer_count` gatherers. The verdicts must be the same as with one gatherer.
    """
    plan = one_figure_plan(*values)
    evidence = {host: host_evidence(plan, host, reading(value, scope=scope)) for host, value in values.items()}
    packs = [pack(rule)]
    gatherers = [Gatherer(Planned(plan)) for _ in range(gatherer_count)]
    for at, host in enumerate(plan.hosts):
        gatherers[at % gatherer_count].add(HostView(plan, host, evidence[host.name], packs))
    first, *others = [gatherer.finish() for gatherer in gatherers]
    # Peers are cached. The merge must discard this cache.
    first.figures.peers(HostView(plan, plan.hosts[0], evidence["h1"], packs), evidence["h1"].observations()[0])
    for other in others:
        first.update(other)
    verdicts = [item for item in judge(plan, evidence, packs, first) if item.criterion == "c"]
    assert verdicts == [item for item in judge(plan, evidence, packs) if item.criterion == "c"]
    return verdicts


@pytest.mark.parametrize("gatherer_count", [1, 2, 3])
def test_fleet_median_does_not_depend_on_the_number_of_gatherers(gatherer_count: int) -> None:
    values = {"h1": 100.0, "h2": 90.0, "h3": 101.0, "h4": 99.0, "h5": 100.0}
    verdicts = fleet_verdicts(values, criterion(fleet_fraction=0.95, operator="ge"), gatherer_count)
    assert [(item.host, item.verdict, item.limit) for item in verdicts] == [
        (host, PASS if value >= 95 else FAIL, 95.0) for host, value in values.items()
    ]
    assert verdicts[0].detail == "the limit is 95 % of the fleet's median 100 over 5 GPUs"


@pytest.mark.parametrize("gatherer_count", [1, 2, 3])
def test_most_common_version_does_not_depend_on_the_number_of_gatherers(gatherer_count: int) -> None:
    values = {"h1": "a", "h2": "a", "h3": "b"}
    verdicts = fleet_verdicts(values, criterion(value=None, same_as_fleet=True, severity="warning"), gatherer_count)
    assert [(item.host, item.verdict, item.limit, item.action, item.severity) for item in verdicts] == [
        ("h1", PASS, "a", "none", ""), ("h2", PASS, "a", "none", ""), ("h3", FAIL, "a", "reseat", "warning"),
    ]  # fmt: skip
    assert [item.detail for item in verdicts] == ["as on 2 of 3 GPUs", "as on 2 of 3 GPUs", "2 of 3 GPUs have a"]


def test_equally_common_versions_fail_on_all_hosts_and_up_to_four_are_listed() -> None:
    rule = criterion(value=None, same_as_fleet=True)
    verdicts = fleet_verdicts({f"h{at}": f"v{at}" for at in range(1, 5)}, rule)
    assert {(item.verdict, item.limit, item.operator) for item in verdicts} == {(FAIL, None, "")}
    assert verdicts[0].detail == "1 of 4 GPUs has v1, 1 has v2, 1 has v3, 1 has v4"
    verdicts = fleet_verdicts({f"h{at}": f"v{at}" for at in range(1, 7)}, rule)
    assert verdicts[0].detail == "1 of 6 GPUs has v1, 1 has v2, 1 has v3, 1 has v4, 2 more values"


def test_limit_in_robust_deviations_works_above_and_below_the_median() -> None:
    values = {f"h{at}": 100.0 + at % 3 for at in range(1, 16)}
    assert len(values) >= outliers.MIN_PEERS_FOR_DEVIATION
    sigma = outliers.SIGMA_OF_MAD * 1.0
    for operator, limit in (("ge", 101 - 3 * sigma), ("le", 101 + 3 * sigma)):
        verdicts = fleet_verdicts(values, criterion(fleet_deviations=3.0, operator=operator))
        assert {item.verdict for item in verdicts} == {PASS}
        assert {item.limit for item in verdicts} == {limit}
        assert (
            verdicts[0].detail == "the limit is 3 robust deviations from the fleet's median 101 over 15 GPUs "
            f"(a deviation is {sigma / 101 * 100:.2g} % of the median)"
        )
    flat = fleet_verdicts(dict.fromkeys(values, 0.0), criterion(fleet_deviations=3.0, operator="le"))
    assert flat[0].detail == "the limit is 3 robust deviations from the fleet's median 0 over 15 GPUs"
    rule = criterion(fleet_deviations=3.0, fleet_fraction=1.5, operator="le")
    assert {item.limit for item in fleet_verdicts(values, rule)} == {1.5 * 101}
    few = fleet_verdicts(
        dict(list(values.items())[: outliers.MIN_PEERS_FOR_DEVIATION - 1]),
        criterion(fleet_deviations=3.0, operator="le"),
    )
    assert {item.verdict for item in few} == {INCONCLUSIVE}
    assert f"a deviation needs at least {outliers.MIN_PEERS_FOR_DEVIATION}" in few[0].reason
    enough = fleet_verdicts(
        dict(list(values.items())[: outliers.MIN_PEERS_FOR_DEVIATION]), criterion(fleet_deviations=3.0, operator="le")
    )
    assert INCONCLUSIVE not in {item.verdict for item in enough}


@pytest.mark.parametrize("count", [outliers.MIN_PEERS_FOR_MEDIAN - 1, outliers.MIN_PEERS_FOR_MEDIAN])
def test_median_needs_a_minimum_of_peers(count: int) -> None:
    verdicts = fleet_verdicts(
        {f"h{at}": 1.0 for at in range(1, count + 1)}, criterion(fleet_fraction=0.9, operator="ge")
    )
    assert {item.verdict for item in verdicts} == {PASS if count == outliers.MIN_PEERS_FOR_MEDIAN else INCONCLUSIVE}
    assert (f"a median needs at least {outliers.MIN_PEERS_FOR_MEDIAN}" in verdicts[0].reason) == (
        count < outliers.MIN_PEERS_FOR_MEDIAN
    )


def test_gang_figure_is_counted_once_and_peers_are_grouped_by_position() -> None:
    """The figures of the gangs r1, r2 and r3 are 7.0, 9.0 and 5.0. The position of a part is its GPU: `gpu=0` or `gpu=1`."""
    fleet = FleetFigures(Planned(one_figure_plan()))
    key = ("m", "n", "s", "gpu", (), "")
    for host in range(3):
        fleet.add_figures(key, "gpu=0,link=1", [1.0 + host])
        fleet.add_figures(key, "gang=r1", [7.0])
    fleet.add_figures(key, "gang=r2", [9.0])
    assert fleet.peers_at(key, "gpu=0").values == (1.0, 2.0, 3.0, 7.0, 9.0)
    other = FleetFigures(Planned(one_figure_plan()))
    for at in range(outliers.MIN_PEERS_FOR_DEVIATION):
        other.add_figures(key, "gpu=1,link=1", [20.0 - at])
    other.add_figures(key, "gang=r3", [5.0])
    fleet.update(other)
    whole = fleet.peers_at(key, "gpu=0")
    assert len(whole.values) == 3 + outliers.MIN_PEERS_FOR_DEVIATION + 3
    assert list(whole.values) == sorted(whole.values)
    placed = criterion(fleet_fraction=0.9, by_position=True)
    assert fleet.peers_at(key, "gpu=1,link=7", placed).values == tuple(
        sorted(20.0 - at for at in range(outliers.MIN_PEERS_FOR_DEVIATION))
    )
    assert fleet.peers_at(key, "gpu=0,link=7", placed) == whole  # too few peers at `gpu=0`: all positions count
    fleet.add_figures(key, "gpu=0", [0.5])
    assert fleet.peers_at(key, "gpu=0").values[0] == 0.5
    assert (whole.model, fleet.peers_at(("", "n", "s", "gpu", (), ""), "gpu=0").model) == ("m", "this kind")


def test_non_numeric_value_is_not_in_the_median() -> None:
    plan = one_figure_plan("h1", "h2", "h3")
    rule = criterion(fleet_fraction=0.9, operator="ge")
    fleet = FleetFigures(Planned(plan))
    for host, value in (("h1", "x"), ("h2", 5), ("h3", 6.0)):
        fleet.add(HostView(plan, plan.host(host), host_evidence(plan, host, reading(value)), [pack(rule)]))
    view = HostView(plan, plan.host("h2"), host_evidence(plan, "h2", reading(5)), [pack(rule)])
    assert fleet.peers(view, view.observations["gpu.thing"][0]).values == (5.0, 6.0)
    assert fleet.peers(view, view.observations["memory.bandwidth"][0]).values == ()


# Launches and digests


def test_launch_of_another_stage_is_ignored() -> None:
    plan = one_figure_plan()
    other = builders.launch("gang", ("h1",), "failed", "of another stage")
    finished, failed = (benchmark_launch("finished"), other), (benchmark_launch("failed", "of this stage"), other)
    assert judge_criteria(plan, host_evidence(plan, "h1", reading(1), launches=finished)) == []
    (missing,) = judge_criteria(plan, host_evidence(plan, "h1", reading(1), observations=(), launches=finished))
    assert missing.reason == "not observed; the launch finished, so the reason is not known"
    (nothing,) = judge_criteria(plan, host_evidence(plan, "h1", reading(1), observations=(), launches=failed))
    assert (nothing.name, nothing.reason) == ("stage.benchmark", "nothing was observed; of this stage"), (
        "a stage without any observation must have only one verdict"
    )


def test_host_with_only_a_gang_record_is_not_compared_by_digest() -> None:
    plan = gang_plan("h1", "h2", "h3")
    expectation = replace(
        plan.expected[0], stage="gang", name="digest.value", scope="device", params={"workload": "gemm"}
    )
    plan = replace(plan, expected=(expectation,))

    def digest(value: str) -> tuple[Observation, ...]:
        reading = builders.observation("digest.value", value, scope="gpu=0", stage="gang", workload="gemm")
        return (reading,)

    members = gang_launch("h1", "h2", "h3")
    evidence = {host: gang_evidence(plan, host, (members,), digest("aa")) for host in ("h1", "h2", "h3")}
    h3 = gang_evidence(plan, "h3", (members,), digest("bb"))
    assert {item.verdict for item in judge_criteria(plan, evidence)} <= {PASS}
    assert {item.host for item in judge_criteria(plan, evidence | {"h3": h3}) if item.verdict == FAIL} == {"h3"}
    gang_record_only = Evidence(records=h3.records[1:])
    verdicts = [item for item in judge_criteria(plan, evidence | {"h3": gang_record_only}) if item.verdict != PASS]
    assert [(item.host, item.name) for item in verdicts] == [("h3", "record")]


# Identity of a GPU in two records


def identity_findings(*gpus: dict[str, str], serials: tuple[str, str] | None = None) -> list[tuple[str, str, str]]:
    """Return the verdicts of `identity-constant` on GPU 0, as name, verdict and reason.

    Args:
        gpus: for each record of the host, the fields of GPU 0 that are replaced.
        serials: the reading `gpu.serial` in the first two snapshots and in the last snapshot.
    """
    plan = one_figure_plan()
    metrics = [(reading(serial, name="gpu.serial"),) for serial in serials or ()]
    evidence = host_evidence(plan)
    record = evidence.records[0]
    if metrics:
        taken = tuple(
            replace(snapshot, metrics=readings)
            for snapshot, readings in zip(record.snapshots, (metrics[0], *metrics), strict=True)
        )
        record = replace(record, snapshots=taken)
    records = [replace(record, gpus=(replace(record.gpus[0], **gpu),)) for gpu in gpus]
    records = [
        replace(one, gang="r1" if at else "", snapshots=() if at else one.snapshots) for at, one in enumerate(records)
    ]
    verdicts = judge_criteria(plan, replace(evidence, records=tuple(records)))
    verdicts = [item for item in verdicts if item.criterion == "identity-constant"]
    assert all(item.action == "inspect_hardware" and item.scope == "gpu=0" for item in verdicts)
    return [(item.name, item.verdict, item.reason) for item in verdicts]


def test_gpu_identity_that_differs_between_records_fails() -> None:
    assert identity_findings({}, {}) == []
    assert identity_findings({}, {"serial": "new"}) == [("gpu.serial", FAIL, "changed during the run: h1-0, then new")]
    assert identity_findings({}, {"uuid": "GPU-new"}) == [
        ("gpu.uuid", FAIL, "changed during the run: GPU-h1-0, then GPU-new")
    ]
    assert identity_findings({}, {"name": "NVIDIA X"})[0][0] == "gpu.name"
    assert identity_findings({}, {"serial": "", "uuid": ""}) == []  # an empty field is not a difference
    assert identity_findings({}, {"serial": ""}, {"serial": "new"})[0][2] == "changed during the run: h1-0, then new"
    assert identity_findings({}, serials=("a", "a")) == []
    assert identity_findings({}, serials=("a", "b")) == [("gpu.serial", FAIL, "changed during the run: a, then b")]


def test_figures_without_a_launch_are_inconclusive() -> None:
    plan = one_figure_plan()
    (verdict,) = judge_criteria(plan, host_evidence(plan, launches=()))
    assert (verdict.name, verdict.verdict, verdict.stage) == (
        "stage.benchmark",
        INCONCLUSIVE,
        "benchmark",
    )
    assert verdict.reason.startswith("figures were measured, but the record has no launch")
    assert judge_criteria(replace(plan, expected=()), host_evidence(plan, launches=())) == []


# Fleet statistics


def test_fleet_statistics_of_groups_of_hosts_are_merged() -> None:
    plan = one_figure_plan("h1", "h2", "h3")
    figures = (
        builders.observation("straggler.compute", 0.02, scope="gpu=0"),
        builders.observation("digest.value", "x", scope="gpu=0"),
    )
    rules = [pack(criterion("memory.bandwidth", operator="ge", fleet_fraction=0.9))]
    evidence = [
        host_evidence(plan, host.name, observations=(*builders.results(plan, host.name, "benchmark"), *figures))
        for host in plan.hosts
    ]
    views = [HostView(plan, host, each, rules) for host, each in zip(plan.hosts, evidence, strict=True)]
    path = ("c", "x", "gang", 8, "P2P")
    whole, parts = gather(Planned(plan), views), [gather(Planned(plan), [view]) for view in views]
    parts[1].paths.add_passing(path)
    for part in parts[1:]:
        parts[0].update(part)
    parts[0].complete()
    assert parts[0].paths.paths == {path}
    kind = ("NVIDIA H200", "benchmark")
    for known in (whole, parts[0]):
        assert known.ranks.peer_medians(kind, {}) == {"compute": 0.02}
        assert len(known.figures.peers(views[0], views[0].observations["memory.bandwidth"][0]).values) == 3


def test_parts_are_compared_with_parts_of_the_same_gpu_model_and_kind_of_scope() -> None:
    plan = one_figure_plan("h1", "h2", gpu_count=2)
    rule = criterion("memory.bandwidth", operator="ge", fleet_fraction=0.9)
    two = tuple(replace(builders.gpu("h1", at), name=name) for at, name in enumerate(("NVIDIA X", "NVIDIA H200")))
    packs = [pack(rule, gpu_names=("NVIDIA H200", "NVIDIA X"))]
    views = [
        HostView(plan, plan.hosts[0], host_evidence(plan, "h1", gpus=two), packs),
        HostView(plan, plan.hosts[1], host_evidence(plan, "h2"), packs),
    ]
    fleet = FleetFigures(Planned(plan), views)
    observed = views[0].observations["memory.bandwidth"]
    assert [(fleet.peers(views[0], item).model, len(fleet.peers(views[0], item).values)) for item in observed] == [
        ("NVIDIA X", 1), ("NVIDIA H200", 3)
    ]  # fmt: skip
    keys = [
        fleet.key(views[0], replace(item, scope=scope)) for item in observed[:1] for scope in ("host", "gpu=1,link=3")
    ]
    assert [(key[0], key[3]) for key in keys] == [("NVIDIA H200 and NVIDIA X", "host"), ("NVIDIA H200", "link")]
    assert [group.count for group in (fleet.peers_at(keys[0], "host"), fleet.peers(views[1], observed[1]))] == [
        "0 hosts",
        "3 GPUs",
    ]


def test_gpus_without_serials_are_not_duplicates() -> None:
    plan = one_figure_plan("h1", "h2")
    gpus = tuple(replace(builders.gpu("h1", 0), serial="", uuid="") for _ in range(1))
    values = {name: host_evidence(plan, name, gpus=gpus) for name in ("h1", "h2")}
    assert summarize(judge_criteria(plan, values)) == []
    without_gpus = host_evidence(plan, "h1", gpus=())
    every = judge_criteria(plan, {"h1": without_gpus, "h2": host_evidence(plan, "h2")})
    verdict = next(item for item in every if (item.host, item.scope) == ("h1", "gpu=0"))
    assert (verdict.name, verdict.verdict, verdict.reason) == (
        "gpu.name",
        INCONCLUSIVE,
        "the GPU does not report its name",
    )


PLAN_OF_H1 = builders.plan("h1", profile="smoke", gpu_count=2, rackproof_gang="none")


def view_of(*records: Record) -> HostView:
    return HostView(PLAN_OF_H1, PLAN_OF_H1.hosts[0], Evidence(records=records), [])


def test_only_paths_between_two_gpus_count_as_nvlinks() -> None:
    """A reading counts for both directions of a pair. A scope or path of another form is ignored without an error."""
    paths = {"gpu=0,peer=1": "NV18", "host": "NV4", "gpu=0": "NV4", "gpu=1,peer=0": "NV" + "9" * 900, "peer=1": "NV2"}
    record = builders.records(PLAN_OF_H1, "h1")[0]
    taken = replace(record.snapshots[0], metrics=(Metric(name="gpu.peer.link", unit="1", values=paths),))
    assert view_of(replace(record, snapshots=(taken,))).nvlinks == {"gpu=0,peer=1": 18, "gpu=1,peer=0": 18}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (("S1", "GPU-1"), ("S1", "GPU-1"), False), (("S1", "GPU-1"), ("S2", "GPU-2"), True),
        (("", "GPU-1"), ("", "GPU-2"), True), (("", "GPU-1"), ("S1", "GPU-1"), False), (("", ""), ("S1", "GPU-1"), False),
    ],
)  # fmt: skip
def test_gpus_are_renumbered_if_an_index_has_another_serial_or_another_uuid(
    before: tuple[str, str], after: tuple[str, str], expected: bool
) -> None:
    """An empty serial or UUID is not compared."""
    record = builders.records(PLAN_OF_H1, "h1")[0]
    records = [
        replace(record, gpus=(replace(record.gpus[0], serial=serial, uuid=uuid),)) for serial, uuid in (before, after)
    ]
    assert view_of(*records).renumbered is expected


@pytest.mark.parametrize("address", ["zz:zz", "0.0.0.0", "", "\u0662\u0662", "0"])
def test_malformed_mac_address_does_not_identify_an_adapter(address: str) -> None:
    """Such an address raises no error, and two hosts with the same address do not fail as duplicates."""
    known = DuplicateSerials()
    evidence = {}
    for host in ("h1", "h2"):
        record = builders.records(PLAN_OF_H1, "h1")[0]
        metric = Metric(name="network.address", unit="1", values={"nic=eth0": address})
        taken = replace(record.snapshots[0], metrics=(metric,))
        gpus = tuple(replace(gpu, serial="0", uuid=f"GPU-{host}-{gpu.index}") for gpu in record.gpus)
        evidence[host] = Evidence(records=(replace(record, gpus=gpus, snapshots=(taken,)),))
        known.add(host, evidence[host])
    assert duplicate_identities(evidence, known) == []
