"""Test reading packs (lists of criteria) from YAML: each kind of limit, included packs and pack names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.judge.criteria import Criterion, VsBaseline, read_pack, read_packs, shipped_packs, with_datasheet
from fleet.judge.matching import matches
from fleet.judge.pack_selection import criteria_by_id
from schemas.errors import UsageError
from tests import builders


def write_pack(path: Path, *criteria: dict[str, Any], **overrides: Any) -> str:
    defaults = {
        "name": "memory.bandwidth", "operator": "ge", "unit": "B/s", "action": "none", "source": "ours alone",
    }  # fmt: skip
    pack = {
        "schema": "rackproof.criteria/1",
        "summary": "a test",
        "criteria": [{"id": f"c{number}", **defaults, **fields} for number, fields in enumerate(criteria)],
        **overrides,
    }
    path.write_text(yaml.safe_dump(pack))
    return str(path)


def read_criterion(path: Path, **fields: Any) -> Criterion:
    (criterion,) = read_pack(write_pack(path / "mine.yml", fields)).criteria
    return criterion


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"value": 3.0}, {"value": 3.0, "fraction": 1.0}),
        ({"vs_sku": {"expected": 5.0, "fraction": 0.9}}, {"expected": 5.0, "fraction": 0.9, "value": None}),
        ({"vs_sku": {"expected": 5.0, "fraction": 0.9, "links": 18}}, {"expected": 5.0, "links": 18}),
        ({"vs_datasheet": {"figure": "memory_bandwidth", "fraction": 0.6}},
         {"datasheet": "memory_bandwidth", "fraction": 0.6, "expected": None}),
        ({"value": 1.0, "where": {"size_bytes": {"ge": 64}}}, {"where": {"size_bytes": {"ge": 64}}}),
        ({"vs_inventory": {"variable": "gpu_count"}}, {"variable": "gpu_count", "fraction": 1.0}),
        ({"vs_inventory": {"variable": "fabric_bytes_per_second", "fraction": 0.8}},
         {"variable": "fabric_bytes_per_second", "fraction": 0.8}),
        ({"vs_fleet": {"fraction": 0.9}}, {"fleet_fraction": 0.9, "fleet_deviations": None, "by_position": False}),
        ({"vs_fleet": {"deviations": 5.0, "by": "position"}},
         {"fleet_fraction": None, "fleet_deviations": 5.0, "by_position": True}),
        ({"vs_baseline": {"fraction": 0.9, "sigmas": 3.0}}, {"baseline": VsBaseline(fraction=0.9, sigmas=3.0)}),
        ({"value": 1.0, "severity": "warning", "stage": "gang", "scope": "gpu", "where": {"op": "copy"}},
         {"severity": "warning", "stage": "gang", "scope": "gpu", "where": {"op": "copy"}}),
    ],
)  # fmt: skip
def test_fields_of_a_criterion_are_read_from_the_pack(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    criterion = read_criterion(tmp_path, **fields)
    assert {key: getattr(criterion, key) for key in expected} == expected
    assert (criterion.id, criterion.origin, criterion.vs_fleet) == ("c0", "mine", "vs_fleet" in fields)


def test_pack_includes_another_pack(tmp_path: Path) -> None:
    shipped = {item.id: item for item in read_pack("common").criteria}
    pack = read_pack(write_pack(tmp_path / "mine.yml", {"value": 1.0}, include=["common"], gpu_names=["NVIDIA X"]))
    assert {item.id for item in pack.criteria} == {*shipped, "c0"}
    assert (pack.name, pack.gpu_names, pack.chosen) == ("mine", ("NVIDIA X",), False)
    assert {item.origin for item in pack.criteria} >= {"mine"}
    assert read_pack("common") is read_pack("common")


def test_duplicate_criterion_id_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="duplicate criterion c0"):
        read_pack(write_pack(tmp_path / "mine.yml", {"value": 1.0}, {"value": 2.0, "id": "c0"}))


def test_pack_is_read_by_its_name_or_from_its_file(tmp_path: Path) -> None:
    names = shipped_packs()
    assert list(names) == sorted(names)
    assert "h200-sxm" in names
    with pytest.raises(UsageError, match=r"unknown criteria pack h200-sxn \(did you mean h200-sxm\?\): choose one of"):
        read_pack("h200-sxn")
    (tmp_path / "mine.yaml").write_text(Path(write_pack(tmp_path / "mine.yml", {"value": 1.0})).read_text())
    assert read_pack(str(tmp_path / "mine.yaml")).name == "mine"
    every = read_packs([str(tmp_path / "mine.yml"), "common"])
    assert [pack.name for pack in every] == [*names, "mine", "common"]
    assert [pack.chosen for pack in every] == [False] * len(names) + [True, True]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("a.b", "a.b", True), ("a.b", "a.c", False), ("a.*.c", "a.b.c", True), ("a.*.c", "a.b.d.c", False),
        ("a.*", "a.b.c", False), ("a.*.c", "a.B.c", True), ("a.*.c", "x.b.c", False),
    ],
)  # fmt: skip
def test_wildcard_in_a_criterion_name_matches_one_component(pattern: str, name: str, expected: bool) -> None:
    criterion = Criterion(id="c", name=pattern, operator="ge", unit="1", action="rma", source="x", value=1)
    assert criterion.matches_name(name) is expected


def test_criterion_may_override_the_severity_of_its_action() -> None:
    def severity(action: str, override: str = "") -> str:
        return Criterion(
            id="c", name="a.b", operator="ge", unit="1", action=action, source="x", value=1, severity=override
        ).severity

    assert severity("rma") == "critical"
    assert severity("monitor") == "warning"
    assert severity("rma", "warning") == "warning"


DATASHEET: dict[str, dict[str, Any]] = {
    "flops": {"bf16": 9.0e14, "source": "ours"},
    "memory_bandwidth": {"value": 3.0e12},
    "pcie": {"bandwidth": 6.4e10},
    "nvlink": {"links": 18, "bandwidth": 9.0e11},  # of both directions together
}


@pytest.mark.parametrize(
    ("figure", "where", "sheet", "expected", "links"),
    [
        ("flops", {"dtype": "bf16"}, DATASHEET, 9.0e14, 0),
        ("flops", {"dtype": "fp8"}, DATASHEET, None, 0),
        ("flops", {"dtype": "bf16"}, {}, None, 0),
        ("memory_bandwidth", {}, DATASHEET, 3.0e12, 0),
        ("power", {}, DATASHEET, None, 0),
        ("pcie", {}, DATASHEET, 6.4e10, 0),
        ("host_link", {}, DATASHEET, 6.4e10, 0),
        ("host_link", {}, {**DATASHEET, "host_link": {"bandwidth": 4.5e11}}, 4.5e11, 0),
        ("pcie", {}, {**DATASHEET, "host_link": {"bandwidth": 4.5e11}}, 6.4e10, 0),
        ("host_link", {}, {}, None, 0),
        ("nvlink", {}, DATASHEET, 4.5e11, 18),  # of one direction
        ("nvlink", {}, {}, None, 0),
        ("all_nvlinks", {}, DATASHEET, 4.5e11, 0),
    ],
)
def test_limit_vs_datasheet_takes_its_expected_value_from_the_datasheet(
    figure: str, where: dict[str, Any], sheet: dict[str, Any], expected: float | None, links: int
) -> None:
    criterion = Criterion(
        id="c",
        name="a.b",
        operator="ge",
        unit="1",
        action="rma",
        source="x",
        where=where,
        datasheet=figure,
        fraction=0.5,
    )
    resolved = with_datasheet(criterion, sheet)
    assert (resolved.expected, resolved.links, resolved.fraction) == (expected, links, 0.5)
    assert with_datasheet(replace(criterion, datasheet="", value=1), sheet).expected is None


def test_pack_without_a_datasheet_uses_the_datasheet_of_the_gpu_model(tmp_path: Path) -> None:
    fields = {"vs_datasheet": {"figure": "memory_bandwidth", "fraction": 0.9}}
    mine = read_pack(write_pack(tmp_path / "mine.yml", fields))
    for model in ("h100-sxm", "t4"):
        sheet = read_pack(model)
        assert criteria_by_id([sheet, mine])["c0"].expected == sheet.datasheet["memory_bandwidth"]["value"]
    assert criteria_by_id([mine])["c0"].expected is None


@pytest.mark.parametrize(
    ("bounds", "value", "expected"),
    [
        ({"ge": 3}, 3, True), ({"ge": 3}, 2, False), ({"le": 3}, 3, True), ({"le": 3}, 4, False),
        ({"ge": 2, "le": 4}, 3, True), ({"ge": 2, "le": 4}, 5, False), ({"ge": 0}, True, False), ({"ge": 0}, "3", False),
        ({"ge": 0}, None, False),
    ],
)  # fmt: skip
def test_bounds_in_where_match_only_numbers(bounds: dict[str, float], value: Any, expected: bool) -> None:
    criterion = Criterion(
        id="c", name="a.b", operator="ge", unit="1", action="rma", source="x", where={"count": bounds}, value=1
    )
    params = {} if value is None else {"count": value}
    assert matches(criterion, builders.observation("a.b", 1.0, **params)) is expected
