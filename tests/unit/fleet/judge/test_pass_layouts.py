"""Passes (verdicts `pass`) are counted without evaluating each criterion on each host.

Hosts whose benchmark observations differ only in values share a layout. Their benchmark results are compared with common limits.
Hosts with equal readings share one evaluation. A criterion whose passes cannot be counted in these ways is left to `judge`. For
all other criteria, the counts must equal those of a full evaluation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from fleet.judge import passes
from fleet.judge.criteria import Criterion, Pack, VsBaseline
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.gather import gather
from fleet.judge.host_view import HostView
from fleet.judge.judge import by_criterion, host_views
from fleet.judge.passes import PassCounter, Remaining, _Check, _Repeated, _Step
from fleet.judge.row import MAX_FARTHEST, TallyRow
from fleet.judge.tally import Tally
from schemas.plans import Plan
from schemas.records import ERROR, SKIPPED, UNSUPPORTED, Metric, Observation, Record
from schemas.reports import PASS, Verdict
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading
from tests.unit.fleet.judge.test_passes import (
    BUSBW_FLOOR,
    FLOOR,
    FRACTION,
    HEAT,
    NCCL,
    PAIRS,
    REPLAYS,
    THING,
    VERSION,
    fleet,
    gang_figure,
    gang_fleet,
    gang_plan,
    healthy_readings,
    serials,
    with_constant_readings,
    with_figure,
    with_first_pair_twice,
    with_launch,
    with_more,
    without,
)

PLAN = one_figure_plan("h1", "h2", "h3")
GANGS = gang_plan(4, 2)
Change = Callable[[Record], Record]


@dataclass(kw_only=True)
class Counted:
    """What a `PassCounter` did with the hosts of a plan."""

    remaining: dict[str, Remaining]
    evaluated: Counter[tuple[str, str]]
    """Host and criterion -> how often the criterion was evaluated on the host."""
    tally: Tally

    def left(self) -> dict[str, list[str]]:
        """Return host -> ids of the criteria that are left to `judge`. Hosts without such criteria are omitted."""
        return {name: [rule.id for rule in item.criteria] for name, item in self.remaining.items() if item.criteria}


def count(
    *rules: Criterion, plan: Plan = PLAN, packs: Sequence[Pack] = (), evidence: Mapping[str, Evidence] | None = None
) -> Counted:
    """Return what was counted. Check that it equals a count of all verdicts, except those of criteria left to `judge`."""
    used, evidence = list(packs) or [pack(*rules)], dict(evidence or fleet(plan))
    views = host_views(plan, evidence, used)
    stats = gather(Planned(plan), views)
    evaluated: Counter[tuple[str, str]] = Counter()

    def evaluate(view: HostView, rule: Criterion) -> list[Verdict]:
        evaluated[(view.host.name, rule.id)] += 1
        return by_criterion(view, rule, stats)

    positions = {host.name: at for at, host in enumerate(plan.hosts)}
    tally, whole = Tally(Planned(plan), positions), Tally(Planned(plan), positions)
    counter = PassCounter(stats, tally, positions, evaluate)
    remaining = {view.host.name: counter.count(view) for view in views}
    counter.finish()
    for view in views:
        item = remaining[view.host.name]
        left = [rule.id for rule in item.criteria]
        verdicts = [
            verdict
            for rule in view.criteria().values()
            if rule.id not in left
            for verdict in by_criterion(view, rule, stats)
        ]
        assert {verdict.verdict for verdict in verdicts} <= {PASS}
        assert item.passes == len(verdicts)
        assert set(item.verdicts) <= set(left)
        for verdict in verdicts:
            whole.add(verdict)
    assert tally.judged(serials(evidence)) == whole.judged(serials(evidence))
    return Counted(remaining=remaining, evaluated=evaluated, tally=tally)


EVERYWHERE = [host.name for host in PLAN.hosts]


@cache
def gangs() -> dict[str, Evidence]:
    """Return the evidence of healthy gangs. It is cached because creating it takes most of the time of a test."""
    return gang_fleet(GANGS)


def with_gang_record(host: str, change: Change) -> dict[str, Evidence]:
    """Return the evidence of the gangs with the gang record of a host changed."""
    host_record, gang_record = gangs()[host].records
    return {**gangs(), host: Evidence(records=(host_record, change(gang_record)))}


def operator_packs(rule: Criterion) -> list[Pack]:
    """Return two packs: a shipped pack with another criterion, and a pack of the operator with this criterion."""
    return [pack(THING), pack(replace(rule, origin="mine"), name="mine", chosen=True)]


@pytest.mark.parametrize(
    ("rule", "evaluated", "left"),
    [
        (FLOOR, [], []),
        (FRACTION, [], []),
        (replace(FLOOR, best_of_run=True), [], []),
        (replace(FLOOR, operator="eq", value=4.27e12), [], []),
        (replace(FLOOR, operator="eq", value=4), [], EVERYWHERE),
        (replace(FLOOR, operator="gt", value=4.27e12), [], EVERYWHERE),
        (replace(FLOOR, operator="le", value=4.27e12), [], []),
        (replace(FLOOR, delta=True), [], EVERYWHERE),
        (replace(FLOOR, value=None, same_as_fleet=True), [], EVERYWHERE),
        (replace(FLOOR, value=None, baseline=VsBaseline(fraction=0.9)), [], []),
        (replace(FLOOR, value=None, variable="fabric_bytes_per_second"), [], []),
        (replace(FLOOR, name="memory.nothing"), [], []),
        (THING, ["h1"], []),
        (replace(THING, value=2), ["h1"], EVERYWHERE),
        (VERSION, ["h1"], []),
        (NCCL, ["h1"], []),
        (replace(VERSION, same_as_fleet=False), [], []),
        (criterion("gpu.clock", id="clock", operator="ge", fleet_fraction=0.9), ["h1"], []),
        (criterion("gpu.nothing", id="nothing"), ["h1"], EVERYWHERE),
        (criterion("gpu.nothing", id="nothing", scope="disk"), ["h1"], []),
    ],
    ids=lambda value: value.id if isinstance(value, Criterion) else None,
)
def test_criterion_is_evaluated_at_most_on_the_first_of_equal_hosts(
    rule: Criterion, evaluated: list[str], left: list[str]
) -> None:
    counted = count(rule)
    hosts = [host for host, _ in counted.evaluated]
    assert set(hosts) == set(evaluated)
    assert counted.left() == {name: [rule.id] for name in left}


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (FLOOR, []),
        (replace(FLOOR, name="memory.nothing"), EVERYWHERE),
        (replace(FLOOR, name="memory.nothing", optional=True), []),
        (replace(FLOOR, value=None, variable="fabric_bytes_per_second"), EVERYWHERE),
        (replace(FLOOR, value=None, variable="fabric_bytes_per_second", optional=True), []),
    ],
)
def test_only_an_optional_criterion_of_the_operator_may_judge_nothing(rule: Criterion, left: list[str]) -> None:
    """Any other criterion of the operator without anything to judge is left to `judge`."""
    assert count(packs=operator_packs(rule)).left() == {name: [rule.id] for name in left}


@pytest.mark.parametrize(("optional", "left"), [(False, ["h1", "h2"]), (True, [])])
def test_comparison_with_too_small_a_fleet_is_left_to_judge_unless_it_is_optional(
    optional: bool, left: list[str]
) -> None:
    two = one_figure_plan("h1", "h2")
    assert count(replace(FRACTION, optional=optional), plan=two).left() == {name: ["fraction"] for name in left}


def test_optional_comparison_with_too_small_a_fleet_does_not_hide_other_figures() -> None:
    """h1 has a second figure that no other host has, so this figure has too few peers."""
    more = builders.observation("memory.bandwidth", 4.27e12, scope="gpu=0", unit="B/s", op="copy", size_bytes=8)
    changed = fleet(PLAN, h1=with_more(more))
    for optional, left in ((True, {}), (False, {"h1": ["fraction"]})):
        assert count(replace(FRACTION, optional=optional), evidence=changed).left() == left


@pytest.mark.parametrize("value", ["fast", True, 7, 0.5])
def test_benchmark_result_that_must_equal_a_value_is_counted_without_an_evaluation(value: Any) -> None:
    rule = criterion("memory.mode", id="mode", value=value, stage="benchmark")
    mode = with_more(builders.observation("memory.mode", value, scope="gpu=0"))
    counted = count(rule, FLOOR, evidence=fleet(PLAN, h1=mode, h2=mode, h3=mode))
    assert (counted.evaluated, counted.left()) == ({}, {})
    (layout,) = {id(item.layout): item.layout for item in counted.remaining.values()}.values()
    assert layout is not None
    of_rule = {step.criterion.id: step.compares_numbers for step in layout.steps}
    assert of_rule == {"mode": False, "floor": True}


def test_slow_host_keeps_the_passes_of_its_other_criteria() -> None:
    second = criterion("memory.bandwidth", id="second", operator="ge", value=1.0, unit="B/s")
    counted = count(FLOOR, second, THING, evidence=fleet(PLAN, h2=with_figure(3e12)))
    assert counted.left() == {"h2": ["floor"]}
    assert {name: item.passes for name, item in counted.remaining.items()} == {"h1": 3, "h2": 2, "h3": 3}
    assert counted.remaining["h2"].verdicts == {}


@pytest.mark.parametrize("value", [3e12, "fast", True])
def test_each_value_of_a_repeated_figure_must_pass(value: Any) -> None:
    def repeat(first: Any, last: Any) -> Change:
        def change(record: Record) -> Record:
            one = next(item for item in record.observations if item.name == "memory.bandwidth")
            return replace(record, observations=(replace(one, value=first), replace(one, value=last)))

        return change

    healthy = repeat(4.2e12, 4.3e12)
    for faulty in (repeat(value, 4.3e12), repeat(4.2e12, value)):
        counted = count(FLOOR, evidence=fleet(PLAN, h1=healthy, h2=faulty, h3=healthy))
        assert counted.left() == {"h2": ["floor"]}
    # If all values pass, the last one is reported. With `best_of_run`, the first one is reported.
    for best_of_run, reported in ((False, 4.3e12), (True, 4.2e12)):
        rule = replace(FLOOR, best_of_run=best_of_run)
        (row,) = count(rule, evidence=fleet(PLAN, h1=healthy, h2=healthy, h3=healthy)).tally.judged()
        assert row.spread is not None
        assert (row.spread.min, row.spread.max, row.limit, row.passed) == (reported, reported, 4.0e12, 3)


def test_figure_that_was_not_measured_has_no_verdict_unless_the_criterion_is_of_the_operator() -> None:
    for status in (UNSUPPORTED, ERROR, SKIPPED):
        none = with_figure(None, status=status, reason="no")
        changed = fleet(PLAN, h1=none, h2=none, h3=none)
        assert count(FLOOR, FRACTION, evidence=changed).left() == {}
        assert count(packs=operator_packs(FLOOR), evidence=changed).left() == {name: ["floor"] for name in EVERYWHERE}
        some = count(FLOOR, evidence=fleet(PLAN, h2=none))
        assert (some.left(), some.remaining["h2"].passes, some.remaining["h3"].passes) == ({}, 0, 1)


# Readings


def differing(rule: Criterion, *values: Any) -> dict[str, Evidence]:
    """Return evidence of hosts, each with its own constant value of the reading that the criterion judges."""
    changes = {
        host: with_constant_readings(more=reading(value, name=rule.name))
        for host, value in zip(EVERYWHERE, values, strict=True)
    }
    return fleet(PLAN, **changes)


@pytest.mark.parametrize("rule", [HEAT, REPLAYS])
def test_readings_that_differ_on_every_host_are_evaluated_only_on_the_first_two(rule: Criterion) -> None:
    """h2 differs from h1, so it is evaluated too. From h3 on, values are only compared with the limit of the criterion."""
    counted = count(rule, evidence=differing(rule, 40, 41, 42))
    assert counted.left() == {}
    assert counted.evaluated == {("h1", rule.id): 1, ("h2", rule.id): 1}
    again = count(rule, evidence=differing(rule, 40, 41, 40))
    assert again.evaluated == {("h1", rule.id): 1, ("h2", rule.id): 1}


def test_verdicts_of_a_failed_reading_are_kept_for_the_first_host_that_has_it() -> None:
    counted = count(THING, evidence=fleet(PLAN, h2=with_constant_readings(thing=2), h3=with_constant_readings(thing=2)))
    assert counted.left() == {"h2": ["thing"], "h3": ["thing"]}
    assert counted.evaluated == {("h1", "thing"): 1, ("h2", "thing"): 1}
    (verdict,) = counted.remaining["h2"].verdicts["thing"]
    assert (verdict.host, verdict.value) == ("h2", 2)
    assert counted.remaining["h3"].verdicts == {}, "equal readings failed on h2, so h3 is left to `judge`"


def test_readings_equal_to_those_of_an_earlier_host_are_not_evaluated_again() -> None:
    plan = one_figure_plan("h1", "h2", "h3", "h4")
    other = with_constant_readings(version="550")
    changed = fleet(plan, h2=other, h4=other)
    rule = criterion("driver.version", id="version", scope="host", value=None, variable="driver_version")
    chosen = replace(plan, hosts=tuple(replace(host, driver_version="550") for host in plan.hosts))
    counted = count(rule, plan=chosen, evidence=changed)
    assert counted.left() == {"h1": ["version"], "h3": ["version"]}
    assert counted.evaluated[("h4", "version")] == 0
    assert counted.evaluated[("h2", "version")] == 1


def test_readings_without_a_key_are_evaluated_on_each_host() -> None:
    """Only `quick.Reader` gives readings the keys by which equal readings are recognised. It did not read these records."""
    records = {
        name: Evidence(records=(host_evidence(PLAN, name, *healthy_readings()).records[0],)) for name in EVERYWHERE
    }
    counted = count(THING, VERSION, evidence=records)
    assert counted.left() == {}
    assert {host for host, rule in counted.evaluated if rule == "version"} == set(EVERYWHERE)


def test_criterion_of_readings_with_equal_values_is_shared_by_the_layout() -> None:
    counted = count(THING, VERSION, HEAT, evidence=differing(HEAT, 40, 41, 42))
    layout = counted.remaining["h1"].layout
    assert layout is not None
    assert [step.criterion.id for step in layout.shared.steps] == ["thing", "version"]
    assert [step.criterion.id for step in layout.steps] == ["heat"]
    assert [verdict.criterion for verdict in layout.alike.passes] == ["thing", "version"]
    assert (layout.alike.count, layout.alike.hosts) == (3, [(0, "h1"), (1, "h2"), (2, "h3")])


def test_step_that_is_no_longer_shared_is_inserted_in_the_order_of_the_criteria() -> None:
    def other(record: Record) -> Record:
        # 1.0 passes like 1, but it is not an equal reading, so the criterion `thing` is no longer shared.
        return with_constant_readings(thing=1.0)(record)

    counted = count(THING, FLOOR, VERSION, evidence=fleet(PLAN, h2=other))
    layout = counted.remaining["h1"].layout
    assert layout is not None
    assert [step.criterion.id for step in layout.steps] == ["thing", "floor"]
    assert [step.number for step in layout.steps] == [0, 1]
    assert counted.left() == {}


# Groups of hosts that are compared with each other


def test_equal_versions_are_compared_again_for_hosts_of_another_group() -> None:
    racks = replace(PLAN, hosts=tuple(replace(host, rack=f"r-{host.name}") for host in PLAN.hosts))
    rule = replace(VERSION, among="rack")
    counted = count(rule, plan=racks, evidence=fleet(racks))
    assert counted.left() == {}
    # In rack r2, most hosts have another version, but h4 has the version of rack r1.
    names = [f"h{at}" for at in range(1, 7)]
    plan = one_figure_plan(*names)
    plan = replace(plan, hosts=tuple(replace(host, rack="r1" if host.name < "h4" else "r2") for host in plan.hosts))
    other = with_constant_readings(version="550")
    changed = fleet(plan, h5=other, h6=other)
    assert count(rule, plan=plan, evidence=changed).left() == {"h4": ["version"]}
    assert count(VERSION, plan=plan, evidence=changed).left() == {"h5": ["version"], "h6": ["version"]}


def test_version_that_fails_in_one_group_is_evaluated_again_in_another() -> None:
    plan = one_figure_plan(*[f"h{at}" for at in range(1, 7)])
    plan = replace(plan, hosts=tuple(replace(host, rack="r1" if host.name < "h4" else "r2") for host in plan.hosts))
    changed = fleet(plan, **dict.fromkeys(("h2", "h4", "h5", "h6"), with_constant_readings(version="550")))
    counted = count(replace(VERSION, among="rack"), plan=plan, evidence=changed)
    assert counted.left() == {"h2": ["version"]}


@pytest.mark.parametrize("host", ["h1", "h2", "h3"])
def test_criterion_is_left_to_judge_if_one_of_the_two_gpus_of_a_host_fails(host: str) -> None:
    plan = one_figure_plan("h1", "h2", "h3", gpu_count=2)
    good, bad = (Metric(name="gpu.thing", unit="1", values={"gpu=0": 1, "gpu=1": value}) for value in (1, 2))
    changes = {name: with_constant_readings(thing=bad if name == host else good) for name in EVERYWHERE}
    assert count(THING, plan=plan, evidence=fleet(plan, **changes)).left() == {host: ["thing"]}


def test_rate_of_a_counter_depends_on_the_uptime_of_each_host() -> None:
    """The counters of all hosts have the same value, but h2 reached it in a hundredth of the time."""
    rule = criterion("gpu.repeats", id="rate", operator="le", value=10, per_hour=True)
    changes = {
        name: with_constant_readings(
            more=reading(500, name="gpu.repeats"),
            uptime=reading(3.6e5 if name != "h2" else 3.6e3, name="host.uptime", scope="host"),
        )
        for name in EVERYWHERE
    }
    assert count(rule, evidence=fleet(PLAN, **changes)).left() == {"h2": ["rate"]}


def test_optical_power_is_compared_with_that_of_modules_of_the_same_model() -> None:
    rule = criterion("optics.rx_power", id="rx", scope="", operator="ge", fleet_fraction=0.5)
    plan = one_figure_plan(*[f"h{at}" for at in range(1, 7)])
    power = {"h5": 3.0, "h6": 3.0}

    def of_host(name: str, *, has_model: bool = True) -> Change:
        model = reading("A" if name < "h4" else "B", name="optics.module.part_number", scope="port=0")
        more = {"model": model} if has_model else {}
        lane = reading(power.get(name, 1.0), name="optics.rx_power", scope="port=0,lane=1")
        return with_constant_readings(**more, power=lane)

    changes = {host.name: of_host(host.name) for host in plan.hosts}
    assert count(rule, plan=plan, evidence=fleet(plan, **changes)).left() == {"h4": ["rx"]}
    unknown = {host.name: of_host(host.name, has_model=False) for host in plan.hosts}
    assert count(rule, plan=plan, evidence=fleet(plan, **unknown)).left() == {host.name: ["rx"] for host in plan.hosts}


# Layouts


def test_layout_states_what_its_hosts_measured() -> None:
    counted = count(FLOOR, THING)
    layout = counted.remaining["h1"].layout
    assert layout is not None
    assert (layout.number, layout.is_complete, dict(layout.statuses)) == (1, True, {"measured": 1})
    assert layout.measured == (("benchmark", "memory.bandwidth", "B/s"), ("benchmark", "digest.value", "1"))
    assert layout.judged_bandwidths == frozenset()
    assert all(item.layout is layout and item.plan_is_met for item in counted.remaining.values())


@pytest.mark.parametrize(
    ("change", "statuses", "measured", "is_complete"),
    [
        (without("memory.bandwidth"), {"": 1}, ["digest.value"], False),
        (with_figure(None, status=ERROR, reason="no"), {"error": 1}, ["digest.value"], False),
        (with_more(Observation(name="gemm.thing", scope="host", stage="benchmark", unit="1", status=ERROR, reason="no")),
         {"measured": 1}, ["memory.bandwidth", "digest.value"], False),
        (with_more(builders.observation("drift.memory.bandwidth", 1.0, scope="gpu=0")),
         {"measured": 1}, ["memory.bandwidth", "digest.value"], True),
    ],
    ids=["missing figure", "figure with an error", "unplanned error", "additional drift"],
)  # fmt: skip
def test_layout_is_incomplete_only_if_an_observation_is_missing_or_has_an_error(
    change: Change, statuses: dict[str, int], measured: list[str], is_complete: bool
) -> None:
    counted = count(FLOOR, evidence=fleet(PLAN, h2=change))
    layout = counted.remaining["h2"].layout
    assert layout is not None
    assert (layout.number, counted.remaining["h1"].layout_number, counted.remaining["h3"].layout_number) == (2, 1, 1)
    assert (layout.is_complete, counted.remaining["h2"].plan_is_met) == (is_complete, is_complete)
    assert dict(layout.statuses) == statuses
    assert [name for _, name, _ in layout.measured] == measured


def test_host_without_a_layout_has_no_figures() -> None:
    counted = count(FLOOR, THING, evidence=fleet(PLAN, h2=with_launch(reason="why")))
    item = counted.remaining["h2"]
    assert ([rule.id for rule in item.criteria], item.passes, item.layout_number) == (["floor", "thing"], 0, 0)
    assert (item.figures(), item.plan_is_met) == (None, False)
    assert Remaining(criteria=[], values=counted.remaining["h1"].values).figures() is None
    assert Remaining(criteria=[], layout=counted.remaining["h1"].layout).figures() is None


# Gangs and pairs of hosts


@pytest.mark.parametrize(
    ("rule", "is_counted"),
    [
        (PAIRS, True),
        (replace(PAIRS, operator="gt"), True),
        (replace(PAIRS, value=20_000_000_000), True),
        (replace(PAIRS, value=None, fleet_fraction=0.5), False),
        (replace(PAIRS, best_of_run=True), False),
        (replace(PAIRS, operator="eq", value=4.85e10), False),
        (replace(PAIRS, where={"partner": "h2"}), False),
        (replace(PAIRS, value=6e10), False),
    ],
    ids=lambda value: None,
)  # fmt: skip
def test_figures_of_pairs_are_counted_only_if_all_have_one_limit_and_all_pass(
    rule: Criterion, is_counted: bool
) -> None:
    counted = count(rule, FLOOR, plan=GANGS, evidence=gangs())
    names = [host.name for host in GANGS.hosts]
    assert counted.left() == ({} if is_counted else {name: ["pairs"] for name in names})
    assert counted.evaluated == {}
    for item in counted.remaining.values():
        figures = item.figures()
        assert figures is not None
        assert len(figures) == 2, "there must be two groups of figures: those of the host and those of its pairs"
        assert item.plan_is_met


def test_criterion_on_pairs_is_left_to_judge_on_a_host_with_slow_or_failed_pairs() -> None:
    slow = gang_figure(PAIRS.name, 1e9)
    counted = count(PAIRS, plan=GANGS, evidence=with_gang_record("h2", slow))
    assert counted.left() == {"h2": ["pairs"]}
    assert counted.remaining["h2"].plan_is_met
    failed = gang_figure(PAIRS.name, None, status=ERROR, reason="lost")
    counted = count(PAIRS, plan=GANGS, evidence=with_gang_record("h2", failed))
    assert [name for name, item in counted.remaining.items() if not item.plan_is_met] == ["h2"]


@pytest.mark.parametrize("change", [without(PAIRS.name), gang_figure(PAIRS.name, None, status=ERROR, reason="lost")])
def test_missing_pairs_of_a_host_do_not_make_its_layout_incomplete(change: Change) -> None:
    item = count(PAIRS, FLOOR, plan=GANGS, evidence=with_gang_record("h1", change)).remaining["h1"]
    assert item.layout is not None
    assert (item.layout.is_complete, item.plan_is_met) == (True, False)
    assert set(item.layout.statuses) == {"measured"}


def test_criterion_on_pairs_is_left_to_judge_on_a_host_with_a_pair_that_was_measured_twice() -> None:
    assert count(PAIRS, plan=GANGS, evidence=with_gang_record("h2", with_first_pair_twice)).left() == {"h2": ["pairs"]}


def test_criterion_on_hosts_judges_no_figure_of_pairs() -> None:
    assert count(replace(PAIRS, scope="host"), plan=GANGS, evidence=gangs()).left() == {}


def test_figures_of_gangs_are_counted_with_the_scope_of_each_gang() -> None:
    counted = count(
        BUSBW_FLOOR,
        FLOOR,
        plan=GANGS,
        evidence=with_gang_record("h1", gang_figure("collective.all_reduce.busbw", 3e11)),
    )
    assert (counted.left(), counted.evaluated) == ({}, {})
    for item in counted.remaining.values():
        assert item.layout is not None
        assert item.layout.judged_bandwidths == {("gang", "collective.all_reduce.busbw")}
    scopes = {part.scope for row in counted.tally.judged() for part in row.farthest if row.criterion == "busbw-floor"}
    assert scopes == {"gang=g0", "gang=g1"}


def test_figures_of_gangs_are_left_to_judge_if_they_are_compared_by_position() -> None:
    rule = replace(BUSBW_FLOOR, value=None, fleet_fraction=0.5, by_position=True)
    plan = gang_plan(3, 1)
    evidence = gang_fleet(plan)
    left = count(rule, plan=plan, evidence=evidence).left()
    assert left == {host.name: ["busbw-floor"] for host in plan.hosts}
    assert count(replace(rule, by_position=False), plan=plan, evidence=evidence).left() == {}
    assert count(replace(FRACTION, by_position=True)).left() == {}


# Parts of the counter


def row(**fields: Any) -> TallyRow:
    default = {"criterion": "c", "name": "n", "stage": "", "params": {}, "unit": "1", "operator": "ge"}
    return TallyRow(**{**default, "source": "", "basis": "", **fields})


def check(*, is_number: bool = True, **fields: Any) -> _Check:
    default = {"positions": (0,), "chosen": 0, "scope": "gpu=0", "limit": 1.0, "operator": "ge", "row": row()}
    return _Check(is_number=is_number, **{**default, **fields})


@pytest.mark.parametrize(
    ("checks", "compares_numbers"),
    [(None, False), ([], False), ([True], True), ([True, True], True), ([True, False], False), ([False], False)],
)
def test_step_compares_numbers_if_it_has_checks_and_all_compare_numbers(
    checks: list[bool] | None, compares_numbers: bool
) -> None:
    of_step = None if checks is None else [check(is_number=each) for each in checks]
    assert _Step(criterion=THING, checks=of_step).compares_numbers is compares_numbers


def test_passes_are_counted_when_the_maximum_number_of_hosts_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MAX_PENDING", 2)
    views = host_views(PLAN, fleet(PLAN), [pack(FLOOR)])
    stats = gather(Planned(PLAN), views)
    positions = {name: at for at, name in enumerate(EVERYWHERE)}
    tally = Tally(Planned(PLAN), positions)
    counter = PassCounter(stats, tally, positions, lambda view, rule: by_criterion(view, rule, stats))

    def total() -> int:
        return sum(item.total for item in tally.rows.values())

    totals = []
    for view in views:
        counter.count(view)
        totals.append(total())
    assert totals == [0, 2, 2]
    counter.finish()
    assert total() == 3


def test_all_hosts_are_counted_but_only_the_first_of_the_plan_are_listed() -> None:
    repeated = _Repeated(passes=[])
    first = range(20, 20 + 2 * MAX_FARTHEST, 2)
    # Position 60 is not listed. Each of the two positions that are added last replaces the highest listed position.
    for position in (*first, 60, 5, first[-2] - 1):
        repeated.add(position, f"h{position}")
    assert repeated.count == MAX_FARTHEST + 3
    kept = [5, *first[:-2], first[-2] - 1]
    assert repeated.hosts == [(position, f"h{position}") for position in kept]


@pytest.mark.parametrize(
    ("value", "fields", "is_passed"),
    [
        (1.0, {}, True), (0.5, {}, False), (2, {}, True), (0, {}, False), (True, {}, False), ("2", {}, False), (None, {}, False),
        (1.0, {"operator": "gt"}, False),
        ("a", {"is_number": False, "operator": "eq", "limit": "a"}, True),
        ("b", {"is_number": False, "operator": "eq", "limit": "a"}, False),
        (1.0, {"is_number": False, "operator": "eq", "limit": True}, False),
        (2.0, {"is_number": False, "operator": "ge", "limit": "1"}, False),
    ],
)  # fmt: skip
def test_values_pass_if_they_meet_every_check(value: Any, fields: dict[str, Any], is_passed: bool) -> None:
    assert passes._all_pass([check(**fields)], [value]) is is_passed
    assert passes._all_pass([check(), check(**{**fields, "positions": (0, 1)})], [5.0, value]) is (
        is_passed and passes._all_pass([check(**fields)], [5.0])
    )


@pytest.mark.parametrize(
    ("limit", "operator", "row_operator", "is_number"),
    [
        (1.0, "ge", "ge", True), (1, "lt", "lt", True), (True, "ge", "ge", False), ("a", "ge", "ge", False),
        (None, "ge", "ge", False), (1.0, "eq", "eq", False), (1.0, "ge", "le", False),
    ],
)  # fmt: skip
def test_condition_for_counting_passes_as_numbers(
    limit: Any, operator: str, row_operator: str, is_number: bool
) -> None:
    """The limit must be a number, and criterion and row must have the same operator, which must not be `eq`."""
    assert passes._counts_numbers(row(operator=row_operator), criterion(operator=operator), limit) is is_number
