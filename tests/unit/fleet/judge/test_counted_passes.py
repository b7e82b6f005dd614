"""Passes (verdicts `pass`) of hosts that share a layout are counted without evaluating the criteria on each host.

Hosts share a layout if their benchmark observations differ only in their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fleet.judge.criteria import Criterion
from fleet.judge.evidence import Planned
from fleet.judge.gather import gather
from fleet.judge.host_view import HostView
from fleet.judge.judge import by_criterion, host_views
from fleet.judge.passes import PassCounter, Remaining
from fleet.judge.tally import Tally
from schemas.records import Record
from schemas.reports import PASS, Verdict
from tests.unit.fleet.judge.small_fleet import host_evidence, pack
from tests.unit.fleet.judge.test_passes import H5, NAMES, PLAN, RULES, fleet, healthy_readings


def counted(**changed: Callable[[Record], Record]) -> tuple[dict[str, Remaining], dict[str, int], dict[str, int]]:
    """Count the passes of every host with `PassCounter`. Return three mappings; the keys of each are the names of the hosts.

    The values of the mappings are:

    1. the result of `PassCounter`: the passes that it counted, and what it left to evaluate
    2. how many evaluations of a criterion on this host `PassCounter` needed
    3. the expected number of passes, found without `PassCounter` by evaluating every criterion on the host

    `changed`: host -> function that changes its record.
    """
    packs = [pack(*RULES)]
    views = host_views(PLAN, fleet(**changed), packs)
    stats = gather(Planned(PLAN), views)
    stats.complete()
    evaluations = dict.fromkeys(NAMES, 0)

    def evaluate(view: HostView, criterion: Criterion) -> list[Verdict]:
        evaluations[view.host.name] += 1
        return by_criterion(view, criterion, stats)

    positions = {name: at for at, name in enumerate(NAMES)}
    counter = PassCounter(stats, Tally(Planned(PLAN), positions), positions, evaluate)
    remaining = {view.host.name: counter.count(view) for view in views}
    counter.finish()
    passes = {
        view.host.name: sum(
            item.verdict == PASS for rule in view.criteria().values() for item in by_criterion(view, rule, stats)
        )
        for view in views
    }
    return remaining, evaluations, passes


def test_only_the_first_of_equal_hosts_is_evaluated() -> None:
    remaining, evaluations, passes = counted()
    assert evaluations[NAMES[0]] > 0
    assert {evaluations[name] for name in NAMES[1:]} == {0}
    for name in NAMES:
        assert (remaining[name].criteria, remaining[name].verdicts) == ([], {}), name
        assert remaining[name].passes == passes[name] > 0
        assert remaining[name].plan_is_met
        figures = remaining[name].figures()
        assert figures is not None
        assert [len(items) for items, _ in figures] == [2]
        assert figures[0][1] is (remaining[NAMES[0]].figures() or [])[0][1]


def test_layouts_are_numbered_from_one_and_0_means_no_layout() -> None:
    remaining, *_ = counted()
    assert {item.layout_number for item in remaining.values()} == {1}
    assert Remaining(criteria=[]).layout_number == 0
    assert Remaining(criteria=[]).figures() is None


def test_host_with_a_failed_launch_is_evaluated_in_full() -> None:
    def failed(record: Record) -> Record:
        return replace(record, launches=tuple(replace(item, outcome="failed", reason="no") for item in record.launches))

    remaining, *_ = counted(h5=failed)
    assert {item.id for item in remaining[H5].criteria} == {rule.id for rule in RULES}
    assert (remaining[H5].passes, remaining[H5].figures(), remaining[H5].plan_is_met) == (0, None, False)
    assert remaining["h6"].criteria == []


def test_host_with_a_bandwidth_below_the_floor_keeps_its_other_passes() -> None:
    def slow(record: Record) -> Record:
        (bandwidth, *rest) = record.observations
        # 1e12 B/s is too slow: the criterion `floor` requires 4e12 B/s.
        return replace(record, observations=(replace(bandwidth, value=1e12), *rest))

    remaining, _, passes = counted(h5=slow)
    assert {item.id for item in remaining[H5].criteria} >= {"floor"}
    assert 0 < remaining[H5].passes <= passes[H5]
    for name in NAMES:
        if name != H5:
            assert remaining[name].passes == passes[name], name


def test_host_with_another_value_of_one_reading_keeps_its_other_passes() -> None:
    def other(record: Record) -> Record:
        changed = host_evidence(PLAN, H5, *healthy_readings(thing=2)).records[0]
        return replace(record, snapshots=changed.snapshots)

    remaining, _, passes = counted(h5=other)
    left = {item.id for item in remaining[H5].criteria} | remaining[H5].verdicts.keys()
    assert left == {"thing"}
    assert remaining[H5].passes == passes[H5] > 0
