"""Packs (lists of criteria) are selected for a host. A criterion of one pack may replace a criterion of another pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Criterion, Pack
from fleet.judge.pack_selection import criteria_by_id, resolve, select_packs
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, one_figure_plan

PLAN = one_figure_plan("h1", gpu_count=2)
HOST = PLAN.hosts[0]
GPUS = [builders.gpu("h1", index) for index in range(2)]


def pack(
    name: str, *ids: str | Criterion, chosen: bool = False, gpu_names: tuple[str, ...] = (), **fields: Any
) -> Pack:
    criteria = tuple(item if isinstance(item, Criterion) else rule(item) for item in ids)
    return Pack(name=name, gpu_names=gpu_names, criteria=criteria, chosen=chosen, **fields)


def rule(id: str, value: int = 1, replaces: str = "", **fields: Any) -> Criterion:
    return criterion(id=id, value=value, replaces=replaces, **fields)


H200 = pack("h200-sxm", gpu_names=("NVIDIA H200", "NVIDIA H200 NVL"))
H100 = pack("h100-sxm", gpu_names=("NVIDIA H100",))
COMMON = pack("common", rule("rate", name="infiniband.rate"), rule("power", name="gpu.power"))
SITE = pack("site", chosen=True)
REHEARSAL = pack("rehearsal")
PACKS = (COMMON, H100, H200, REHEARSAL, SITE)


def selected(
    names: Sequence[str] = ("NVIDIA H200",), model: str = "", packs: Sequence[Pack] = PACKS
) -> tuple[list[str], str]:
    """Return the names of the packs that are selected for a host, and why none covers its GPU model (empty if one does).

    `names`: names of its GPUs; `model`: its GPU model in the inventory.
    """
    gpus = [replace(gpu, name=name) for gpu, name in zip(GPUS, [*names, *names], strict=False)] if names else []
    result, why = select_packs(PLAN, replace(HOST, gpu_model=model), gpus, packs)
    return [item.name for item in result], why


@pytest.mark.parametrize(
    ("names", "model", "expected", "why"),
    [
        (("NVIDIA H200",), "", ["h200-sxm", "site"], ""),
        (("NVIDIA H200", "NVIDIA H200 NVL"), "", ["h200-sxm", "site"], ""),
        (("NVIDIA H200", "NVIDIA H100"), "", ["common", "site"], "no criteria pack for NVIDIA H100, NVIDIA H200"),
        (("NVIDIA X",), "", ["common", "site"], "no criteria pack for NVIDIA X"),
        ((), "", ["common", "site"], "no criteria pack for an unknown GPU"),
        (("NVIDIA H200",), "h100-sxm", ["h100-sxm", "site"], ""),
        (("NVIDIA H200",), "x100", ["common", "site"], "no criteria pack for x100"),
        (("NVIDIA H200",), "site", ["common", "site"], "no criteria pack for site"),
    ],
)
def test_pack_is_selected_by_the_gpu_model_in_the_inventory_or_else_by_the_names_of_all_gpus(
    names: tuple[str, ...], model: str, expected: list[str], why: str
) -> None:
    assert selected(names, model) == (expected, why)


def test_no_pack_of_a_model_is_selected_if_two_packs_list_the_name_of_the_gpu() -> None:
    twice = replace(H200, name="other")
    assert selected(packs=(*PACKS, twice)) == (["common", "site"], "no criteria pack for NVIDIA H200")


@pytest.mark.parametrize("judges_ports", [False, True])
def test_rehearsal_gets_the_criteria_on_ports_only_if_ports_are_judged(judges_ports: bool) -> None:
    plan = replace(builders.with_benchmarks(PLAN, benchmark={"verbs": {}}), rehearsal=True)
    host = replace(HOST, verbs_required=judges_ports)
    result, why = select_packs(plan, host, GPUS, PACKS)
    assert why == ""
    assert [item.name for item in result] == ["rehearsal", *(["common"] if judges_ports else []), "site"]
    if judges_ports:
        assert [item.id for item in result[1].criteria] == ["rate"]
        again, _ = select_packs(plan, host, GPUS, PACKS)
        assert again[1] is result[1]


def values_by_id(*packs: Pack) -> dict[str, Any]:
    return {name: item.value for name, item in resolve(packs).criteria.items()}


def test_shipped_criterion_overrides_an_earlier_one_with_the_same_id() -> None:
    assert values_by_id(pack("a", rule("x", 1), rule("y", 1)), pack("b", rule("x", 2))) == {"x": 2, "y": 1}


def test_operator_replaces_a_shipped_criterion_only_by_naming_it_in_replaces() -> None:
    shipped = pack("a", rule("x", 1), rule("y", 1))
    assert values_by_id(shipped, pack("site", rule("x", 2), rule("z", 2), chosen=True)) == {"x": 1, "y": 1, "z": 2}
    assert values_by_id(shipped, pack("site", rule("mine", 2, "x"), chosen=True)) == {"y": 1, "mine": 2}
    assert values_by_id(shipped, pack("site", rule("x", 2, "x"), chosen=True)) == {"y": 1, "x": 2}
    assert values_by_id(shipped, pack("site", rule("mine", 2, "none"), chosen=True)) == {"x": 1, "y": 1, "mine": 2}


def test_pack_that_includes_a_criterion_may_replace_it() -> None:
    """`criteria` of a pack has its own criteria and those that it includes from other packs."""
    shipped, including = pack("a", rule("x", 1), rule("y", 1)), (rule("x", 1), rule("y", 1), rule("mine", 2, "x"))
    for order in (including, including[::-1]):
        site = pack("site", *order, chosen=True)
        assert values_by_id(site) == values_by_id(shipped, site) == {"y": 1, "mine": 2}
        assert replaced(site) == replaced(shipped, site) == {"mine": ["x"]}


def replaced(*packs: Pack) -> dict[str, list[str]]:
    return {name: [item.id for item in items] for name, items in resolve(packs).replaced.items()}


def test_replaced_criteria_are_shipped_criteria_even_if_a_second_pack_replaces_the_replacement() -> None:
    shipped = pack("a", rule("x", 1), rule("y", 1))
    first, second = pack("site", rule("mine", 2, "x"), chosen=True), pack("rack", rule("ours", 3, "mine"), chosen=True)
    assert replaced(shipped, first) == {"mine": ["x"]}
    assert replaced(shipped, first, second) == {"ours": ["x"]}
    new = pack("site", rule("mine", 2), chosen=True)
    assert replaced(shipped, new, second) == {}
    # The id `y` belongs to a shipped criterion, so the operator's criterion of this id does not apply.
    assert replaced(shipped, pack("site", rule("y", 2, "x"), chosen=True)) == {}


def test_limit_that_is_a_fraction_of_a_datasheet_value_uses_the_first_datasheet_of_the_packs() -> None:
    floor = rule("floor", operator="ge", expected=1.0, fraction=0.5, datasheet="memory_bandwidth")
    first = pack("a", datasheet={"memory_bandwidth": {"value": 4e12}})
    second = pack("b", floor, datasheet={"memory_bandwidth": {"value": 9e12}})
    packs = [pack("none"), first, second]
    assert criteria_by_id(packs)["floor"].expected == 4e12
    assert criteria_by_id(packs) is criteria_by_id(packs)
    assert criteria_by_id([second])["floor"].expected == 9e12
    assert criteria_by_id([pack("c", floor)])["floor"].expected is None
