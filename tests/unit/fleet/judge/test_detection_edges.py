"""Test gates: which values they count, and the faults they detect. A gate is one criterion on one figure of one GPU model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion
from fleet.judge.detection import ABSOLUTE, LOGIC, RELATIVE, Detection, Run, _fault, detection, settings_text
from schemas.records import SKIPPED, Observation
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, one_figure_plan, pack, reading


def run(
    *values: Any, name: str = "memory.bandwidth", unit: str = "B/s", change: Any = lambda item: item, **fields: Any
) -> Run:
    """Return a run with one host for each value: the figure of its GPU has this value."""
    names = [f"h{at}" for at in range(1, len(values) + 1)]
    plan = one_figure_plan(*names, **fields)
    evidence = {
        host: host_evidence(
            plan, host, observations=(change(builders.observation(name, value, scope="gpu=0", unit=unit, op="copy")),)
        )
        for host, value in zip(names, values, strict=True)
    }
    return plan, evidence


def rule(**fields: Any) -> Criterion:
    default = {"id": "floor", "operator": "ge", "value": 100.0, "unit": "B/s"}
    return criterion(**{"name": "memory.bandwidth", **default, **fields})


def of(runs: Sequence[Run], *rules: Criterion) -> Detection:
    """Return the detection of the only criterion with the ID `floor` or `c` in `rules` (default: `rule()`)."""
    found = [item for item in detection(runs, [pack(*(rules or (rule(),)))]) if item.key.criterion in ("floor", "c")]
    (result,) = found
    return result


@pytest.mark.parametrize(("values", "is_stated"), [((110.5, 111, 113), True), ((110.5, 111), False), ((110.5,), False)])
def test_fault_is_stated_only_for_three_parts_or_more(values: Sequence[float], is_stated: bool) -> None:
    result = of([run(*values)])
    assert result.is_stated is is_stated
    assert (result.fault is not None) is is_stated
    assert (result.limit, result.peers, result.change) == (100.0, False, False)
    assert (result.parts, result.values, result.failed, result.kind) == (len(values), len(values), 0, RELATIVE)


def test_gate_names_its_figure_settings_and_model() -> None:
    key = of([run(110.5, 111, 113)]).key
    assert (key.model, key.stage, key.name, key.criterion) == ("h200-sxm", "benchmark", "memory.bandwidth", "floor")
    assert (dict(key.params), '"size_bytes"' in key.settings) == ({"op": "copy"}, True)


def test_gate_on_a_reading_has_no_stage_or_parameters_or_settings() -> None:
    plan = one_figure_plan("h1")
    evidence = {"h1": host_evidence(plan, "h1", reading(1))}
    result = of([(plan, evidence)], criterion())
    assert (result.key.stage, result.key.params, result.key.settings, result.kind) == ("", (), "", LOGIC)
    assert result.is_stated


@pytest.mark.parametrize(
    ("values", "fields", "kind"),
    [
        ((110.5, 111, 113), {}, RELATIVE),
        ((110.5, 111, 113), {"operator": "eq", "value": 110.5}, LOGIC),
        ((110.5, 110.5, 110.5), {}, LOGIC),
        ((110.5, 110.5), {}, RELATIVE),
        ((0.0, 111, 113), {}, ABSOLUTE),
        ((110.5, 111, 113), {"value": 0.0}, ABSOLUTE),
        ((110.5, 111, 113), {"value": -5.0}, ABSOLUTE),
        ((110.5, 111, 113), {"value": 0.5}, RELATIVE),
        ((110.5, "fast", 113), {}, LOGIC),
        ((110.5, True, 113), {}, LOGIC),
    ],
)
def test_kind_of_a_fault_is_relative_or_absolute_or_logic(
    values: Sequence[float], fields: dict[str, Any], kind: str
) -> None:
    """LOGIC: the criterion finds any value beyond the limit, so the spread of the values does not matter.

    Three or more equal values count as a constant, which also has this kind.
    """
    assert of([run(*values)], rule(**fields)).kind == kind


def test_temperature_is_compared_in_degrees() -> None:
    chosen = rule(name="stress.temperature", unit="Cel", operator="le", value=90.0)
    result = of([run(60.5, 61, 63, name="stress.temperature", unit="Cel")], chosen)
    assert (result.kind, result.unit, result.operator) == (ABSOLUTE, "Cel", "le")
    # The three values have the mean 61.5 and the standard deviation 1.3229. A prediction for one more part multiplies this
    # deviation by sqrt(1 + 1/3).
    # 6.965 is the 0.99 quantile of Student's t distribution with 2 degrees of freedom.
    assert result.fault == pytest.approx(90 - 61.5 + 6.965 * 1.3229 * (4 / 3) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(("values", "kind"), [((3, 4, 6), LOGIC), ((3, 4, 6.5), RELATIVE)])
def test_whole_numbers_without_a_unit_are_counts(values: Sequence[float], kind: str) -> None:
    figures = run(*values, name="overlap.slowdown", unit="1")
    assert of([figures], rule(name="overlap.slowdown", unit="1", operator="le", value=100.0)).kind == kind


def test_failed_values_are_counted_and_make_false_alarms_more_likely() -> None:
    result = of([run(99.0, 111, 113, 115)])
    assert (result.failed, result.values) == (1, 4)
    assert not result.is_reliable
    far = of([run(1000.0, 1001, 1002, 1003)])
    assert far.is_reliable
    assert far.false_alarm is not None
    assert replace(far, false_alarm=0.001).is_reliable
    assert not replace(far, false_alarm=0.0011).is_reliable
    assert not replace(far, false_alarm=None).is_reliable


def test_one_gpu_in_two_runs_is_one_part_with_two_values() -> None:
    result = of([run(110.5, 111, 113), run(110.0, 112, 113)])
    assert (result.parts, result.values) == (3, 6)


def test_relative_fault_is_a_share_of_the_mean() -> None:
    """The values are 1.10, 1.11 and 1.12 times the floor.

    Their mean is 1.11 and their standard deviation is 0.01. A prediction for one more part multiplies this deviation by
    sqrt(1 + 1/3), which gives 0.011547. 6.965 is the 0.99 quantile of Student's t distribution with 2 degrees of freedom.
    """
    result = of([run(110.0, 111.0, 112.0)], rule(unit="B/s"))
    assert result.freedom == 2.0
    assert result.fault == pytest.approx((0.11 + 6.965 * 0.011547) / 1.11, rel=1e-3)


def test_spread_between_runs_adds_to_the_spread_between_parts() -> None:
    """The means of the parts are 110, 111 and 112: their variance is 1.

    The two runs of each part have the variance 2. A mean of two runs varies by half of it, so the variance of the means already
    contains that half. Only the other half is added.
    """
    result = of([run(109.0, 110.0, 111.0), run(111.0, 112.0, 113.0)])
    variance = 1 * (1 + 1 / 3) + 2 * (1 - 1 / 2)
    freedom = variance**2 / ((4 / 3) ** 2 / 2 + 1**2 / 3)
    assert result.freedom == pytest.approx(int(freedom * 10) / 10)
    assert result.false_alarm is not None
    assert result.false_alarm < 0.01


def test_figures_that_were_not_measured_are_not_counted() -> None:
    def absent(item: Observation) -> Observation:
        return replace(item, status=SKIPPED, value=None, reason="no") if item.value == 1.0 else item

    result = of([run(1.0, 110.5, 111, 113, change=absent)])
    assert (result.values, result.parts, result.failed) == (3, 3, 0)


def test_only_verdicts_that_compare_a_value_are_counted() -> None:
    plan, evidence = run(110.5, 111, 113)
    evidence = {**evidence, "h1": host_evidence(plan, "h1", observations=())}
    assert {item.key.criterion for item in detection([(plan, evidence)], [pack(rule(), criterion())])} == {"floor"}


def test_model_of_a_gate_is_the_pack_that_names_the_gpu_model() -> None:
    site = pack(rule(), name="site", gpu_names=(), chosen=True)
    models = {
        item.key.model
        for packs in ([pack(), site], [site, pack()])
        for item in detection([run(110.5, 111, 113)], packs)
        if item.key.criterion == "floor"
    }
    assert models == {"h200-sxm"}
    (alone,) = detection([run(110.5, 111, 113)], [site])
    assert alone.key.model == ""


def test_settings_are_sorted_by_name() -> None:
    names = list(json.loads(settings_text("memory", {})))
    assert names == sorted(names)
    assert len(names) > 1


def test_gpu_that_moves_to_another_slot_is_the_same_part() -> None:
    """Two GPUs exchange their slots after the first of three runs. Only the GPU in slot 0 has a figure.

    So one GPU is measured in the first run, and the other GPU in the next two runs.
    """
    plan = one_figure_plan("h1", gpu_count=2)
    first, second = (builders.gpu("h1", index) for index in range(2))
    swapped = (replace(second, index=0), replace(first, index=1))
    figure = builders.observation("memory.bandwidth", 110.5, scope="gpu=0", op="copy")
    runs = [
        (plan, {"h1": host_evidence(plan, "h1", observations=(figure,), gpus=gpus)})
        for gpus in ((first, second), swapped, swapped)
    ]
    assert (of(runs).parts, of(runs).values) == (2, 3)
    unknown = tuple(replace(gpu, serial="") for gpu in (first, second))
    without = [(plan, {"h1": host_evidence(plan, "h1", observations=(figure,), gpus=unknown)})] * 2
    assert of(without).parts == 1, "GPUs without serials must be identified by their slots"


@pytest.mark.parametrize(
    ("level", "operator", "fault", "alarm"),
    [
        (1.25, "ge", 0.2, 0.0), (1.25, "gt", 0.2, 0.0), (0.75, "ge", 0.0, 1.0), (1.0, "ge", 0.0, 0.0),
        (0.5, "le", 1.0, 0.0), (0.5, "lt", 1.0, 0.0), (1.25, "lt", 0.0, 1.0),
    ],
)  # fmt: skip
def test_fault_of_parts_without_a_spread_is_their_distance_from_the_limit(
    level: float, operator: str, fault: float, alarm: float
) -> None:
    """`level`: the value of each of three parts, divided by the limit.

    `fault`: the distance from the limit as a share of the value; 0 if the value fails.
    """
    assert _fault([[level]] * 3, operator, RELATIVE) == (fault, alarm, 2.0)


def test_two_gangs_are_two_parts() -> None:
    plan = builders.plan("h1", "h2", profile="smoke", gpu_count=1)
    plan = replace(plan, hosts=tuple(replace(host, gang=f"g-{host.name}") for host in plan.hosts))
    name = "collective.all_reduce.busbw"
    evidence = {
        host.name: host_evidence(plan, host.name, observations=(
            builders.observation(name, 5e11, scope=f"gang={host.gang}", stage="gang", size_bytes=8),))
        for host in plan.hosts
    }  # fmt: skip
    chosen = criterion(name, id="floor", operator="ge", value=1e11, unit="B/s", scope="gang")
    assert (of([(plan, evidence)] * 2, chosen).parts, of([(plan, evidence)] * 2, chosen).values) == (2, 4)


def test_value_of_a_gang_that_two_hosts_report_is_counted_once_in_each_run() -> None:
    plan = builders.plan("h1", "h2", profile="smoke", gpu_count=1)
    name = "collective.all_reduce.busbw"
    evidence = {}
    for host in ("h1", "h2"):
        item = builders.observation(name, 5e11, scope="gang=r1", stage="gang", size_bytes=8)
        evidence[host] = host_evidence(plan, host, observations=(item,))
    chosen = criterion(name, id="floor", operator="ge", value=1e11, unit="B/s", scope="gang")
    result = of([(plan, evidence), (plan, evidence)], chosen)
    assert (result.parts, result.values) == (1, 2)


def test_limit_that_differs_between_runs_is_not_stated() -> None:
    chosen = rule(value=None, fleet_fraction=0.5)
    assert of([run(110.5, 111, 113), run(110.5, 111, 113)], chosen).limit == 55.5
    assert of([run(110.5, 111, 113), run(110.5, 150, 160)], chosen).limit is None


@pytest.mark.parametrize(("operator", "limit", "failed"), [("ge", 100.0, 0), ("gt", 100.0, 0), ("le", 100.0, 4)])
def test_false_alarm_of_few_parts_without_a_spread_is_not_stated(operator: str, limit: float, failed: int) -> None:
    result = of([run(110.5, 110.5), run(110.5, 110.5)], rule(operator=operator, value=limit))
    assert (result.kind, result.is_stated, result.false_alarm) == (RELATIVE, False, None)
    assert result.failed == failed


def test_two_links_of_a_gpu_and_a_fan_of_the_host_are_three_parts() -> None:
    plan = one_figure_plan("h1")
    links = {"gpu=0,link=0": 1.5, "gpu=0,link=1": 1.6, "fan=0": 1.7}
    metric = replace(reading(1), values=links, unit="V")
    evidence = {"h1": host_evidence(plan, "h1", metric)}
    chosen = criterion(scope="", id="floor", operator="ge", value=1.0, unit="V")
    assert of([(plan, evidence), (plan, evidence)], chosen).parts == 3


def test_degrees_of_freedom_depend_on_how_often_each_part_was_measured() -> None:
    """Part 1 was measured three times, parts 2 and 3 twice.

    The variances within the parts are 1, 2 and 2, with 2, 1 and 1 degrees of freedom.
    """
    runs = [run(109.0, 110.0, 111.0), run(111.0, 112.0, 113.0), run(110.0)]
    result = of(runs)
    within = (1.0 * 2 + 2.0 + 2.0) / 4
    rest, of_means = within * (1 - (1 / 3 + 1 / 2 + 1 / 2) / 3), 1 * (1 + 1 / 3)
    freedom = (rest + of_means) ** 2 / (of_means**2 / 2 + rest**2 / 4)
    assert result.freedom == pytest.approx(int(freedom * 10) / 10)
