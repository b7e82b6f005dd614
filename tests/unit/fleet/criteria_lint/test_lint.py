"""Test the criteria lint, which finds wrong limits in criteria packs.

A floor is a lower limit. The catalogue is the list of the observations of all benchmarks (`schemas/catalogue.py`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleet.criteria_lint.lint import lint
from fleet.criteria_lint.parameters import check_parameters
from fleet.criteria_lint.physics import check_physics
from fleet.criteria_lint.plausibility import check_plausibility
from fleet.judge.criteria import Criterion, Pack, VsBaseline
from schemas.records import Value
from schemas.scopes import Scope
from tests import ROOT

SHEET = {
    "flops": {"bf16": 1000.0, "fp8": 2000.0, "source": "its datasheet"}, "memory_bandwidth": {"value": 1000.0, "source": "x"},
    "power": {"value": 700, "source": "x"}, "pcie": {"generation": 5, "width": 16, "bandwidth": 100.0, "source": "x"},
    "nvlink": {"links": 18, "bandwidth": 800.0, "source": "x"},
}  # fmt: skip
"""Datasheet of a GPU model, with round numbers. The bandwidth of `pcie` is for one direction, that of `nvlink` for both."""


def rule(name: str = "memory.bandwidth", **changes: Any) -> Criterion:
    """Return a criterion on the observation `name`, with `changes` to its fields."""
    fields = {
        "id": "c",
        "name": name,
        "operator": "ge",
        "unit": "B/s",
        "action": "rma",
        "source": "x",
        "origin": "mine",
    }
    return Criterion(**{**fields, **changes})


def datasheet_findings(criterion: Criterion, **sheet: Any) -> list[str]:
    """Return the findings of the comparison of a criterion with the datasheet SHEET; `sheet` replaces parts of SHEET."""
    pack = Pack(name="mine", gpu_names=("X",), criteria=(criterion,), datasheet={**SHEET, **sheet})
    return [item.why for item in check_physics(criterion, pack)]


@pytest.mark.parametrize(
    ("name", "where", "low", "high"),
    [
        ("memory.bandwidth", {}, 500, 1000), ("stress.power", {}, 350, 700), ("gemm.throughput", {"dtype": "bf16"}, 400, 1000),
        ("gemm.throughput", {"dtype": "fp8"}, 800, 2000), ("stress.throughput", {}, 400, 1000),
        ("host_copy.bandwidth", {"sharing": "alone"}, 50, 100), ("host_copy.bandwidth", {}, 0.001, 100),
        ("host_copy.bandwidth", {"sharing": "alone", "direction": "both_ways"}, 100, 200),
        ("peer_copy.bandwidth", {"direction": "one_way"}, 200, 400),
        ("peer_copy.bandwidth", {"direction": "both_ways"}, 400, 800),
        ("collective.all_reduce.busbw", {}, 8, 400), ("collective.all_reduce.busbw", {"nvls": True}, 16, 800),
    ],
)  # fmt: skip
def test_floor_must_be_between_a_minimum_share_of_the_peak_and_the_peak(
    name: str, where: Any, low: float, high: float
) -> None:
    """`low`: the lowest permitted floor. If the lint has no minimum for this figure, `low` is 0.001, a very low floor.

    `high`: the peak.
    """

    def findings(value: float) -> list[str]:
        return datasheet_findings(rule(name, where=where, value=value))

    assert findings(low) == findings(high) == []
    assert findings(high * 1.001)[0].startswith("above the peak: 1.001 times as high")
    assert not low > 1 or findings(low * 0.999)[0].startswith("far too low")
    assert datasheet_findings(rule(name, where=where, expected=high * 1.001, fraction=0.9))[0].startswith(
        "the expected value is above the peak"
    )
    # Only numeric floors are compared with the peak.
    assert datasheet_findings(rule(name, where=where, value=high * 9, operator="le")) == []
    assert (
        datasheet_findings(rule(name, where=where, value=True))
        == datasheet_findings(rule(name, where=where, value="x"))
        == []
    )
    assert datasheet_findings(rule(name, where=where)) == []


@pytest.mark.parametrize("part", ["flops", "memory_bandwidth", "power", "pcie", "nvlink"])
def test_figures_missing_in_the_datasheet_are_not_compared(part: str) -> None:
    # Part of the datasheet -> the figures that are compared with it.
    compared = {
        "flops": {"gemm.throughput"}, "memory_bandwidth": {"memory.bandwidth"}, "power": {"stress.power"},
        "pcie": {"host_copy.bandwidth"}, "nvlink": {"peer_copy.bandwidth", "collective.all_reduce.busbw"},
    }  # fmt: skip
    names = [name for figures in compared.values() for name in figures]
    findings = {name: datasheet_findings(rule(name, value=1e9), **{part: {}}) for name in names}
    assert {name for name, result in findings.items() if not result} == compared[part]


def test_figures_without_a_peak_in_the_datasheet_are_not_compared() -> None:
    """The datasheet has no peak for FP4, and none for the network.

    The network limits the figures of several hosts (stage `gang`).
    """
    assert datasheet_findings(rule("collective.all_reduce.busbw", value=1e9, stage="gang")) == []
    assert datasheet_findings(rule("gemm.throughput", value=1e9, where={"dtype": "fp4"})) == []
    assert datasheet_findings(rule("digest.value", value=1e9)) == []


@pytest.mark.parametrize(
    ("ratio", "mistake"),
    [
        (1.5, ""), (1.8, "sparsity"), (2.2, "sparsity"), (2.3, ""), (2.5, "bits taken for bytes"), (8.8, "bits taken"), (8.9, ""),
        (300, "a thousand times too high"), (1100, "a thousand times too high"), (1200, ""), (3e5, "a million times too high"),
        (0.1375, "bytes divided by 8"), (0.14, ""), (0.0375, "bytes divided by 8"), (0.037, ""),
        (1.1e-3, "a thousand times too low"), (3e-4, "a thousand times too low"), (1e-6, "mega-units"), (1e-9, "giga-units"),
        (1e-12, "tera-units"),
    ],
)  # fmt: skip
def test_probable_mistake_behind_a_wrong_floor_is_named(ratio: float, mistake: str) -> None:
    """`ratio`: the floor divided by the peak. `mistake`: a part of the finding; empty: the finding names no mistake."""
    (finding,) = datasheet_findings(rule(value=1000.0 * ratio))
    assert (mistake in finding) if mistake else ("looks like" not in finding)


@pytest.mark.parametrize(
    ("name", "number"), [("gpu.pcie.generation", 5), ("gpu.pcie.width", 16), ("gpu.nvlink.active_links", 18)]
)
def test_required_pcie_link_and_number_of_nvlinks_must_equal_the_datasheet(name: str, number: int) -> None:
    """Only limits with the operators `eq` and `ge` are compared with the datasheet."""
    for operator in ("eq", "ge"):
        assert datasheet_findings(rule(name, value=number, operator=operator)) == []
        assert datasheet_findings(rule(name, value=number - 1, operator=operator))[0].startswith(
            "lower than the part's"
        )
        assert datasheet_findings(rule(name, value=number + 1, operator=operator))[0].startswith(
            "higher than the part's"
        )
    assert datasheet_findings(rule(name, value=number - 1, operator="le")) == []
    assert datasheet_findings(rule(name, value="x", operator="eq")) == []
    assert datasheet_findings(rule(name, value=1), pcie={}, nvlink={}) == []
    assert len(datasheet_findings(rule(name.rpartition(".")[0] + ".*", value=number - 1))) > 0


def plausibility_findings(name: str, **changes: Any) -> list[str]:
    """Return the findings of the plausibility check on the criterion `rule(name)`, with `changes` to its fields."""
    return [item.why for item in check_plausibility(rule(name, **{"unit": "1", **changes}))]


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("x.rate", {"unit": "B/s", "operator": "le", "value": 1}, "higher is better"),
        ("x.rate", {"unit": "W", "operator": "le", "value": 1}, ""),
        ("x.accuracy", {"operator": "lt", "value": 1}, "higher is better"),
        ("x.rate", {"unit": "B/s", "operator": "eq", "value": 1}, "no two measurements"),
        ("x.rate", {"unit": "B/s", "operator": "eq", "value": True}, ""),
        ("x.rate", {"unit": "B/s", "value": 1}, ""),
        ("x.latency", {"value": 0.1}, "lower is better"),
        ("x.wrong_words", {"value": 0}, "lower is better"),
        ("x.latency", {"operator": "le", "value": 1.0}, ""),
        ("x.latency", {"operator": "le", "value": 1.1}, "latency of more than 1 s"),
        ("x.graph_latency", {"operator": "le", "value": 2}, "latency of more than 1 s"),
        ("x.latency", {"operator": "le"}, ""),
        ("x.wrong_words", {"operator": "eq", "value": 0}, ""),
        ("x.wrong_words", {"operator": "eq", "value": 1}, "must be 0"),
        ("x.wrong_words", {"operator": "lt", "value": 1}, ""),
        ("x.wrong_words", {"operator": "lt", "value": 2}, "must be 0"),
        ("x.wrong_words", {"operator": "le"}, "must be 0, so it must not be compared"),
        ("x.mismatches", {"operator": "eq", "value": False}, ""),
        ("x.tested_share", {"value": 0.9}, ""),
        ("x.tested_share", {"value": 0.89}, "not tested"),
        ("x.tested_share", {"value": 0.1, "origin": "rehearsal"}, ""),
        ("x.tested_share", {}, ""),
        ("x.access", {"operator": "eq", "value": False}, "only a faulty part meets this limit"),
        ("x.access", {"operator": "eq", "value": True}, ""),
        ("x.access", {"operator": "ge", "value": False}, ""),
        ("x.latency", {"value": "text"}, ""),
        ("x.tested_share", {"value": False, "operator": "eq"}, ""),
        ("x.latency", {"expected": 2.0, "fraction": 1.0, "operator": "le"}, "latency of more than 1 s"),
        ("x.latency", {"expected": 2.0, "fraction": 0.5, "operator": "le"}, ""),
    ],
)
def test_operator_or_limit_that_cannot_separate_healthy_from_faulty_parts_is_a_finding(
    name: str, changes: Any, why: str
) -> None:
    """`why`: a part of the first finding; empty: there is no finding."""
    result = plausibility_findings(name, **changes)
    assert bool(result) is bool(why)
    assert not why or why in result[0]


@pytest.mark.parametrize("dtype", [{"ge": 1}, 8, "int3", ""])
def test_floor_of_a_precision_that_the_datasheet_lacks_has_no_finding(dtype: Any) -> None:
    assert datasheet_findings(rule("gemm.throughput", where={"dtype": dtype}, value=1e9)) == []


def findings(*, criteria: Any = None, **changes: Any) -> list[str]:
    """Return the findings of the lint on `criteria`.

    Without `criteria`, the lint checks one criterion on memory.bandwidth. `changes` replace its fields, for example its `name`.
    """
    name = changes.pop("name", "memory.bandwidth")
    rules = criteria or (rule(name, **{"scope": "gpu", "value": 600.0, **changes}),)
    return [str(item) for item in lint(Pack(name="mine", gpu_names=(), criteria=tuple(rules)))]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"stage": "benchmark"}, ""),
        ({"stage": "preflight"}, "not observed in this stage"),
        ({"stage": "gang"}, ""),
        ({"scope": "host"}, "not a scope of the observation"),
        ({"scope": ""}, ""),
        ({"unit": "W"}, "not the unit of the observation"),
        ({"name": "memory.x"}, "no observation is called memory.x"),
        ({"name": "gpu.count", "unit": "1", "scope": "host", "value": 8, "stage": "preflight"}, ""),
        (
            {"name": "gpu.cuont", "unit": "1", "scope": "host", "value": 8},
            "no collector reads gpu.cuont (did you mean gpu.count?)",
        ),
        ({"name": "gpu.*replays", "unit": "1", "operator": "le", "value": 8}, "no collector reads gpu.*replays"),
        ({"name": "gpu.*.replays", "unit": "1", "operator": "le", "value": 8}, ""),
        ({"name": "gpu.count", "unit": "B", "scope": "host", "value": 8}, "not the unit of the reading"),
        ({"name": "gpu.count", "unit": "1", "scope": "gup", "value": 8}, "unknown kind of scope"),
        (
            {
                "name": "infiniband.state",
                "unit": "1",
                "operator": "eq",
                "same_as_fleet": True,
                "group_by": ["infiniband.hca.bord_id"],
            },
            "`group_by`: no collector reads infiniband.hca.bord_id (did you mean infiniband.hca.board_id?)",
        ),
        (
            {"name": "gpu.count", "unit": "1", "scope": "host", "value": 8, "stage": "later"},
            "not observed in this stage",
        ),
        ({"name": "launch.torch", "unit": "1", "scope": "host", "operator": "eq", "value": "2"}, ""),
        ({"name": "collective.*.busbw", "scope": "host"}, ""),
        ({"name": "collective.all_reduce.busbw", "scope": "gang"}, ""),
        ({"name": "benchmark.duration", "scope": "host", "unit": "s", "operator": "le"}, ""),
        ({"value": True, "operator": "ge"}, "true and false cannot be compared by `ge`"),
        ({"value": "x"}, "text cannot be compared by `ge`"),
        *(({"value": "4.0e12", "operator": operator}, "YAML reads it as text") for operator in ("ge", "le", "eq")),
        ({"value": None, "fleet_fraction": 95.0}, "a fraction is 1 for the whole, not 100"),
        ({"value": None, "expected": 900.0, "fraction": 95.0}, "a fraction is 1 for the whole, not 100"),
        ({"value": None, "datasheet": "memory_bandwidth", "fraction": 80.0}, "a fraction is 1 for the whole, not 100"),
        ({"value": None, "baseline": VsBaseline(fraction=98.0)}, "a fraction is 1 for the whole, not 100"),
        ({"value": "x", "operator": "eq"}, "the observation is a number"),
        ({"value": float("inf")}, "not a finite number"),
        (
            {"name": "peer_copy.access", "scope": "peer", "unit": "1", "operator": "eq", "value": 1},
            "the observation is true or false",
        ),
        ({"name": "peer_copy.access", "scope": "peer", "unit": "1", "operator": "eq", "value": True}, ""),
        ({"name": "digest.value", "unit": "1", "operator": "eq", "value": 1}, "the observation is a text"),
        ({"name": "digest.value", "unit": "1", "operator": "eq", "value": "x"}, ""),
        ({"name": "gpu.power", "unit": "W", "operator": "eq", "value": "x"}, "a figure in W is a number"),
        ({"value": None, "fleet_deviations": 5.0, "operator": "eq"}, "no two measurements give the same rate"),
        ({"value": None, "fleet_deviations": 5.0}, ""),
        ({"value": None, "baseline": VsBaseline(fraction=0.9)}, ""),
        ({"value": None, "baseline": VsBaseline(fraction=1.1)}, "half of the healthy parts would fail"),
        ({"value": None, "baseline": VsBaseline(fraction=1.0)}, ""),
        (
            {
                "name": "peer_copy.latency",
                "scope": "peer",
                "unit": "s",
                "operator": "le",
                "value": None,
                "baseline": VsBaseline(fraction=0.9),
            },
            "half of the healthy parts would fail",
        ),
        (
            {
                "name": "peer_copy.latency",
                "scope": "peer",
                "unit": "s",
                "operator": "le",
                "value": None,
                "baseline": VsBaseline(fraction=0.9, change=1.0),
            },
            "",
        ),
        ({"value": None, "fleet_fraction": 0.75}, ""),
        ({"value": None, "fleet_fraction": 0.74}, "floor 26 % below"),
        ({"value": None, "fleet_fraction": 1.0}, ""),
        ({"value": None, "fleet_fraction": 1.01}, "half of the healthy parts"),
        (
            {
                "name": "peer_copy.latency",
                "scope": "peer",
                "unit": "s",
                "operator": "le",
                "value": None,
                "fleet_fraction": 1.25,
            },
            "",
        ),
        (
            {
                "name": "peer_copy.latency",
                "scope": "peer",
                "unit": "s",
                "operator": "le",
                "value": None,
                "fleet_fraction": 1.26,
            },
            "ceiling 26 % above",
        ),
        (
            {
                "name": "peer_copy.latency",
                "scope": "peer",
                "unit": "s",
                "operator": "le",
                "value": None,
                "fleet_fraction": 0.99,
            },
            "half of the healthy parts",
        ),
        ({"value": None, "expected": 600.0, "fraction": 0.75}, ""),
        ({"value": None, "expected": 600.0, "fraction": 0.7}, "floor 30 %"),
        ({"value": None, "baseline": VsBaseline(fraction=float("inf"))}, "not a finite number"),
        ({"value": None, "fleet_fraction": float("nan")}, "not a finite number"),
        ({"value": 600.0, "fraction": 0.1}, ""),
    ],
)
def test_criterion_must_match_the_catalogue_and_have_a_plausible_limit(changes: Any, why: str) -> None:
    """`why`: a part of the first finding; empty: there is no finding."""
    result = findings(**changes)
    assert bool(result) is bool(why), result
    assert not why or why in result[0]


def test_model_pack_must_judge_each_important_figure_or_list_it_as_unknown() -> None:
    """A pack with `gpu_names` is the pack of a GPU model. The 9 important figures are those in `MUST_JUDGE`.

    A limit that depends on other parts or earlier runs is not enough. Neither is a limit in the stage `gang`.
    """

    def pack_findings(**changes: Any) -> list[str]:
        return [
            item.why
            for item in lint(
                Pack(**{"name": "mine", "gpu_names": ("X",), "criteria": (), "datasheet": SHEET, **changes})
            )
        ]

    assert len(pack_findings()) == 9
    assert set(pack_findings()) == {"neither judged nor listed as unknown"}
    assert pack_findings(gpu_names=()) == []
    assert pack_findings(datasheet={})[0] == "a GPU model without a datasheet cannot be checked"
    assert len(pack_findings(unknown={"memory.bandwidth": "why"})) == 8
    assert pack_findings(unknown={"memory.x": "why"})[0].startswith("`unknown`: no observation is called memory.x")
    assert pack_findings(lacks={"memory.x": {}})[0].startswith("`lacks`: no observation is called memory.x")
    assert len(pack_findings(criteria=(rule(value=600.0, scope="gpu"),))) == 8
    for changes in (
        {"fleet_fraction": 0.9},
        {"baseline": VsBaseline()},
        {"same_as_fleet": True},
        {"value": 600.0, "stage": "gang"},
    ):
        assert len([why for why in pack_findings(criteria=(rule(**changes),)) if "neither" in why]) == 9


def test_same_finding_is_listed_once() -> None:
    twice = rule(unit="W", value=1.0, scope="gpu")
    assert len(findings(criteria=(twice, twice))) == 1


def parameter_findings(name: str, **where: Any) -> list[str]:
    """Return the findings of the lint on a criterion with these parameters, without the names of the pack and the criterion."""
    return [
        text.split(": ", 2)[2] for text in findings(name=name, where=where, value=None, fleet_fraction=0.9, scope="")
    ]


@pytest.mark.parametrize(
    ("name", "where", "why"),
    [
        ("collective.all_reduce.busbw", {"nvls": True, "placement": "in_place", "transport": "x", "size_bytes": 8}, ""),
        ("collective.all_reduce.graph_latency", {"backend": "nccl", "size_bytes": 8, "nccl_log": "x"}, ""),
        ("collective.all_reduce.graph_latency", {"transport": "x"}, "no such parameter"),
        ("memory.bandwidth", {"op": "copy", "size_bytes": 8, "gpu": "0"}, ""),
        ("memory.bandwidth", {"phase": "x"}, "no such parameter"),
        ("memory.bandwidth", {"op": "cpoy"}, "no such op (did you mean copy?)"),
        ("memory.bandwidth", {"size_bytes": 4_000_000_000}, "powers of two"),
        ("memory.bandwidth", {"size_bytes": 3_000_000}, ""),
        ("memory.bandwidth", {"size_bytes": -8}, "never matches"),
        ("memory.bandwidth", {"size_bytes": 0}, "never matches"),
        ("memory.bandwidth", {"size_bytes": "8"}, "is a whole number"),
        ("memory.bandwidth", {"size_bytes": 8.5}, "is a whole number"),
        ("memory.bandwidth", {"op": True}, "is a text"),
        ("host_copy.bandwidth", {"numa": "local"}, ""),
        ("host_copy.bandwidth", {"numa": "lokal"}, "no such numa"),
        ("collective.all_reduce.busbw", {"nvls": "yes"}, "is true or false"),
        ("straggler.compute", {"dtype": "bf16"}, "no such dtype"),
        ("straggler.compute", {"dtype": "bfloat16"}, ""),
        ("gemm.throughput", {"dtype": "bf16"}, ""),
        ("fashion_mnist.throughput", {"learning_rate": 0.1}, ""),
        ("fashion_mnist.throughput", {"learning_rate": 1}, ""),
        ("fashion_mnist.throughput", {"learning_rate": True}, "is a number"),
        ("memory.bandwidth", {"gpu": 0}, "is a text"),
        ("benchmark.duration", {"benchmark": "gemm"}, ""),
        ("benchmark.duration", {"benchmark": "gem"}, "no such benchmark"),
        ("benchmark.duration", {"op": "copy"}, "no such parameter"),
        ("gpu.throttle.active", {"reason": "hw_thermal"}, ""),
        ("gpu.throttle.active", {"reason": "heat"}, "no such reason"),
        ("gpu.throttle.active", {"raeson": "x"}, "no such parameter"),
    ],
)
def test_unknown_parameters_and_values_of_an_observation_are_findings(name: str, where: Any, why: str) -> None:
    """`why`: a part of the first finding; empty: there is no finding.

    Findings on unit and operator are ignored, because all these criteria have the unit B/s and the operator `ge`.
    """
    result = [text for text in parameter_findings(name, **where) if "unit" not in text and "better" not in text]
    assert bool(result) is bool(why), result
    assert not why or why in result[0]


def test_unknown_parameter_of_a_launch_observation_has_no_finding() -> None:
    assert list(check_parameters(rule("launch.torch", where={"any": "x"}), [])) == []


def test_criterion_may_use_every_parameter_and_label_of_a_recorded_observation() -> None:
    """The observations are those of the runs in docs/measurements.

    Of each parameter, up to three values are tried, and in addition 0 and 1 if they occur.
    """
    where: dict[tuple[str, str], set[Value]] = {}
    for path in (ROOT / "docs" / "measurements").glob("*/hosts/*.json"):
        for item in json.loads(path.read_text(encoding="utf-8"))["observations"]:
            for key, value in {**item.get("params", {}), **Scope.parse(item["scope"]).labels}.items():
                values = where.setdefault((item["name"], key), set())
                if len(values) < 3 or value in (0, 1):
                    values.add(value)
    assert len(where) > 300
    wrong = {
        f"{name} {key}={value}: {text}"
        for (name, key), values in where.items()
        for value in values
        for text in parameter_findings(name, **{key: value})
        if key in text or "no such" in text or "powers of two" in text
    }
    assert not wrong
