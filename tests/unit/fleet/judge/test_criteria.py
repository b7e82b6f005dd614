"""Test criteria packs, and the lint that compares them with datasheets and with the catalogue of observations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.criteria_lint.lint import COLLECTED, lint
from fleet.judge.criteria import Criterion, Pack, located_packs, read_pack, shipped_packs
from fleet.judge.pack_selection import criteria_by_id
from fleet.planning.plan import read_profile
from rackproof.main import main
from schemas.catalogue import settings
from schemas.errors import UsageError
from tests import ROOT

H200 = read_pack("h200-sxm")


def criterion(**changes: Any) -> Criterion:
    plain: dict[str, Any] = {
        "id": "c", "name": "memory.bandwidth", "operator": "ge", "unit": "B/s", "action": "none", "source": "a test's own",
        "scope": "gpu", "where": {"op": "copy"}, "value": 4.0e12, "origin": "my-pack",
    }  # fmt: skip
    return Criterion(**(plain | changes))


def lint_changed(**changes: Any) -> list[str]:
    """Return the lint findings on a pack that has the datasheet of the H200 and one criterion, with these changed fields."""
    pack = Pack(name="my-pack", gpu_names=(), criteria=(criterion(**changes),), datasheet=H200.datasheet)
    return [str(item) for item in lint(pack)]


@pytest.mark.parametrize("name", shipped_packs())
def test_shipped_pack_has_no_lint_finding(name: str) -> None:
    assert lint(read_pack(name)) == []


def test_each_gpu_name_belongs_to_one_pack() -> None:
    names = [name for pack in map(read_pack, shipped_packs()) for name in pack.gpu_names]
    assert len(names) == len(set(names))
    assert {"NVIDIA H200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC", "NVIDIA A100-SXM4-40GB", "Tesla T4"} <= set(names)


def test_plausible_limit_has_no_finding() -> None:
    assert lint_changed() == []
    assert lint_changed(value=None, expected=4.276e12, fraction=0.97) == []


def test_dcgm_floor_in_wrong_unit_is_reported() -> None:
    """nvvs/diag-skus.yaml.in of NVIDIA/DCGM has a floor of 2333 MB/s. Its comment gives 3110 GB/s x 0.75, which is 2333 GB/s."""
    (finding,) = lint_changed(value=2.333e9)
    assert (
        "my-pack: c: 2.333e+09: far too low, 0.000486 of the peak, which looks like a figure a thousand times too"
        in finding
    )
    assert "the datasheet of my-pack has 4.8e+12 B/s" in finding
    assert "not the unit of the observation; use B/s" in lint_changed(value=2333.0, unit="MB/s")[0]


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("gpu.pcie.generation", 3, "3: lower than the part's PCIe generation; the datasheet of my-pack has 5"),
        ("gpu.pcie.generation", 6, "higher than the part's PCIe generation"),
        ("gpu.pcie.width", 8, "lower than the part's PCIe width"),
        ("gpu.nvlink.active_links", 12, "lower than the part's number of NVLinks; the datasheet of my-pack has 18"),
    ],
)
@pytest.mark.parametrize("operator", ["eq", "ge"])
def test_link_limit_must_match_the_datasheet(name: str, value: int, why: str, operator: str) -> None:
    (finding,) = lint_changed(name=name, value=value, operator=operator, unit="1", where={})
    assert why in finding


def test_pcie_gen3_floor_on_a_gen5_part_is_reported() -> None:
    """In nvvs/diag-skus.yaml.in of NVIDIA/DCGM, 212 of the 226 entries accept PCIe Gen3."""
    shipped = {item.id: item for item in H200.criteria}["pcie-generation"]
    pack = replace(H200, criteria=(replace(shipped, value=3, operator="ge"),))
    assert any(item.criterion == "pcie-generation" and item.value == 3 for item in lint(pack))


@pytest.mark.parametrize(
    "limit",
    [
        {"value": None, "expected": 4.276e12, "fraction": 0.60},
        {"value": None, "fleet_fraction": 0.60},
        {"value": None, "variable": "fabric_bytes_per_second", "fraction": 0.60},
    ],
)
def test_floor_far_below_the_expected_value_is_reported(limit: dict[str, Any]) -> None:
    assert any(
        "0.6: floor 40 % below the expected value; keep within 25 % of the expected value" in finding
        for finding in lint_changed(**limit)
    )


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("memory.bandwidth", 0.75), ("transformer.throughput", 0.75), ("training.throughput", 0.5),
        ("variants.throughput", 0.5), ("local_storage.bandwidth", 0.2),
    ],
)  # fmt: skip
def test_floor_relative_to_the_fleet_may_be_lower_for_figures_that_vary(name: str, least: float) -> None:
    """The rates of trainings with small kernels and of file systems differ between healthy hosts."""

    def findings(fraction: float) -> list[str]:
        result = lint_changed(name=name, where={}, value=None, fleet_fraction=fraction)
        return [finding for finding in result if "below the expected value" in finding]

    assert findings(least) == []
    assert len(findings(least - 0.01)) == 1


def test_limits_that_are_too_loose_or_too_strict_are_reported() -> None:
    latency = {"name": "peer_copy.latency", "unit": "s", "scope": "peer", "where": {}, "value": None, "operator": "le"}
    assert "ceiling 40 % above the expected value" in lint_changed(**latency, fleet_fraction=1.4)[0]
    assert "half of the healthy parts would fail" in lint_changed(**latency, fleet_fraction=0.95)[0]
    assert "half of the healthy parts would fail" in lint_changed(value=None, fleet_fraction=1.05)[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"value": 5.0e12}, "above the peak: 1.0417 times as high"),
        (
            {"value": None, "expected": 5.0e12, "fraction": 0.9},
            "the expected value is above the peak; the floor is 0.938 of the peak",
        ),
        ({"value": 3.84e13}, "above the peak: 8 times as high, which looks like bits taken for bytes"),
        ({"value": 5.0e11}, "far too low, 0.104 of the peak, which looks like bytes divided by 8"),
        ({"value": 4276.0}, "far too low, 8.91e-10 of the peak, which looks like a figure in giga-units"),
        ({"value": 4.2e15}, "a thousand times too high"),
        ({"name": "gemm.throughput", "unit": "FLOP/s", "where": {"dtype": "bf16"}, "value": 1.979e15}, "with sparsity"),
        (
            {"name": "gemm.throughput", "unit": "FLOP/s", "where": {"dtype": "fp8"}, "value": 7.0e14},
            "0.354 of the peak",
        ),
        (
            {"name": "stress.throughput", "unit": "FLOP/s", "where": {"dtype": "bf16"}, "value": 1.0e15},
            "above the peak",
        ),
        ({"name": "stress.power", "unit": "W", "where": {}, "value": 710.0}, "above the peak"),
        ({"name": "stress.power", "unit": "W", "where": {}, "value": 300.0}, "far too low"),
        ({"name": "host_copy.bandwidth", "where": {"sharing": "alone"}, "value": 6.5e10}, "6.4e+10 B/s over PCIe"),
        ({"name": "host_copy.bandwidth", "where": {"sharing": "alone"}, "value": 3.0e10}, "far too low"),
        ({"name": "peer_copy.bandwidth", "scope": "peer", "where": {"direction": "one_way"}, "value": 4.6e11}, "above"),
        ({"name": "peer_copy.bandwidth", "scope": "peer", "where": {"direction": "both_ways"}, "value": 4.4e11}, "low"),
        ({"name": "collective.all_reduce.busbw", "scope": "", "where": {}, "value": 4.8e11}, "above the peak"),
        (
            {"name": "collective.all_reduce.busbw", "scope": "", "where": {}, "value": 3.67e8},
            "a thousand times too low",
        ),
    ],
)
def test_implausible_floor_is_reported(changes: dict[str, Any], why: str) -> None:
    (finding,) = lint_changed(**changes)
    assert why in finding


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "host_copy.bandwidth", "where": {"direction": "both_ways", "sharing": "alone"}, "value": 1.0e11},
        {"name": "host_copy.bandwidth", "where": {"sharing": "all_gpus"}, "value": 2.0e10},
        {"name": "peer_copy.bandwidth", "scope": "peer", "where": {"direction": "both_ways"}, "value": 7.84e11},
        {"name": "collective.all_reduce.busbw", "scope": "host", "where": {"nvls": True}, "value": 4.73e11},
        {"name": "gemm.throughput", "unit": "FLOP/s", "where": {}, "value": None, "fleet_fraction": 0.9},
    ],
)
def test_plausible_floor_is_accepted(changes: dict[str, Any]) -> None:
    assert lint_changed(**changes) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"name": "memory.bandwith"}, "no observation is called memory.bandwith (did you mean memory.bandwidth?)"),
        ({"name": "memory_copy.bandwidth"}, "no observation is called memory_copy.bandwidth"),
        ({"name": "collective.*.bandwidth"}, "no observation is called collective.*.bandwidth"),
        ({"where": {"opp": "copy"}}, "no such parameter (did you mean op?)"),
        ({"where": {"op": "cpoy"}}, "no such op (did you mean copy?)"),
        ({"scope": "gang"}, "not a scope of the observation; use cpu or gpu"),
        (
            {"name": "gpu.temperature", "unit": "Cel", "scope": "gpus", "where": {}, "operator": "le"},
            "unknown kind of scope",
        ),
        ({"name": "gpu.pcie.generatoin", "unit": "1", "where": {}, "value": 5}, "did you mean gpu.pcie.generation"),
        ({"name": "gpu.fan", "unit": "1", "where": {}}, "no collector reads gpu.fan"),
        ({"name": "xid.last", "unit": "s", "scope": "host", "where": {}}, "did you mean xid.last_seen?"),
        ({"stage": "benchmrk"}, "not observed in this stage (did you mean benchmark?); use benchmark or gang"),
        ({"stage": "preflight"}, "not observed in this stage; use benchmark or gang"),
        ({"name": "gpu.power", "unit": "W", "where": {}, "stage": "before"}, "not observed in this stage"),
        ({"unit": "GB/s"}, "not the unit of the observation; use B/s"),
        ({"value": "4e12"}, "4e12: YAML reads it as text; write 4.0e+12"),
        ({"value": "half"}, "text cannot be compared by `ge`"),
        ({"value": None, "fleet_fraction": 95.0}, "95: a fraction is 1 for the whole, not 100; write 0.95"),
        (
            {"name": "gpu.ecc.enabled", "unit": "1", "where": {}, "value": True},
            "true and false cannot be compared by `ge`",
        ),
        (
            {"name": "gpu.power", "unit": "W", "where": {}, "value": "high", "operator": "eq"},
            "a figure in W is a number",
        ),
        ({"value": True, "operator": "eq"}, "the observation is a number"),
        (
            {"name": "peer_copy.access", "unit": "1", "scope": "peer", "where": {}, "value": 1, "operator": "eq"},
            "true or",
        ),
        (
            {"name": "collective.transport", "unit": "1", "scope": "", "where": {}, "value": 1},
            "the observation is a text",
        ),
    ],
)
def test_criterion_that_does_not_fit_the_catalogue_is_reported(changes: dict[str, Any], why: str) -> None:
    (finding,) = lint_changed(**changes)
    assert why in finding


BUSBW = {"name": "collective.all_reduce.busbw", "scope": "host", "value": None, "fleet_fraction": 0.9}
COPY = {"name": "host_copy.bandwidth", "value": 4.8e10}


@pytest.mark.parametrize(
    ("changes", "where", "why"),
    [
        ({}, {"workers": 4}, "workers: no such parameter"),
        ({}, {"dtype": "bf16"}, "dtype: no such parameter"),
        (COPY, {"nvls": True}, "nvls: no such parameter"),
        (BUSBW, {"algoritm": "RING"}, "no such parameter (did you mean algorithm?)"),
        (BUSBW, {"network": "resnet18"}, "network: no such parameter"),
        ({**BUSBW, "name": "collective.channels", "unit": "1"}, {"size_bytes": 8}, "size_bytes: no such parameter"),
        (BUSBW, {"size_bytes": "8589934592"}, "'8589934592': size_bytes is a whole number, so this never matches"),
        (BUSBW, {"size_bytes": 8589934592.0}, "size_bytes is a whole number"),
        (BUSBW, {"size_bytes": 8000000000}, "no shipped profile has this size: the sizes in profiles are powers of two"),
        (BUSBW, {"size_bytes": 0}, "size_bytes is at least 1, so this never matches"),
        (BUSBW, {"nvls": "true"}, "'true': nvls is true or false"),
        (BUSBW, {"nvls": 1}, "nvls is true or false"),
        (BUSBW, {"world_size": "8"}, "'8': world_size is a whole number"),
        (BUSBW, {"world_size": True}, "world_size is a whole number"),
        (BUSBW, {"protocol": "Simple"}, "no such protocol"),
        (BUSBW, {"placement": "inplace"}, "no such placement (did you mean in_place?)"),
        (COPY, {"numa": "near"}, "near: no such numa; use local or remote or unknown"),
        (COPY, {"sharing": True}, "sharing is a text"),
        (COPY, {"gpu": 0}, "gpu is a text"),
        ({"name": "gpu.throttle.active", "scope": "reason", "unit": "1", "operator": "eq", "value": False},
         {"reason": "hw_termal"}, "no such reason (did you mean hw_thermal?)"),
        ({"name": "gpu.throttle.active", "scope": "reason", "unit": "1", "operator": "eq", "value": False},
         {"reson": "hw_thermal"}, "no such parameter (did you mean reason?)"),
        ({"name": "benchmark.duration", "scope": "host", "unit": "s", "operator": "le", "value": 60.0},
         {"benchmark": "gem"}, "no such benchmark (did you mean gemm or gemm_shapes?)"),
        ({"name": "overlap.hidden_share", "scope": "host", "unit": "1", "value": 0.5},
         {"dtype": "bf16"}, "no such dtype"),
    ],
)  # fmt: skip
def test_unknown_parameter_or_impossible_value_is_reported(
    changes: dict[str, Any], where: dict[str, Any], why: str
) -> None:
    (finding,) = lint_changed(**changes, where=where)
    assert why in finding


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (BUSBW, {"size_bytes": 1 << 28, "placement": "in_place", "nvls": False, "algorithm": "RING", "world_size": 72}),
        ({**BUSBW, "name": "collective.*.busbw"}, {"transport": "P2P/CUMEM", "backend": "nccl", "dtype": "fp32"}),
        (COPY, {"numa": "remote", "sharing": "alone", "direction": "host_to_device", "gpu": "0"}),
        ({"name": "fan.speed", "unit": "1"}, {"chip": "a"}),
    ],
)
def test_known_parameter_is_accepted(
    changes: dict[str, Any], where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.criteria_lint.lint.COLLECTED", COLLECTED | {"fan"})  # a collector that a site added
    assert lint_changed(**changes, where=where) == []


SHARE = {"name": "integrity.tested_share", "unit": "1", "where": {}}
LATENCY = {"name": "peer_copy.latency", "unit": "s", "scope": "peer", "where": {}}
WRONG = {"name": "collective.*.wrong_elements", "unit": "1", "scope": "", "where": {}}
HIGHER, LOWER = "higher is better", "lower is better"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"operator": "le"}, HIGHER),
        ({"operator": "lt", "value": None, "fleet_fraction": 1.1}, HIGHER),
        ({"operator": "eq"}, "no two measurements give the same rate"),
        ({"name": "stress.efficiency", "unit": "FLOP/J", "where": {}, "operator": "le"}, HIGHER),
        ({"name": "training.throughput", "unit": "images/s", "scope": "", "where": {}, "operator": "le"}, HIGHER),
        ({"name": "training.accuracy", "unit": "1", "scope": "", "where": {}, "value": 0.8, "operator": "le"}, HIGHER),
        ({"name": "transformer.mfu", "unit": "1", "scope": "", "where": {}, "value": 0.3, "operator": "lt"}, HIGHER),
        ({"name": "overlap.hidden_share", "unit": "1", "scope": "", "where": {}, "value": 0.3, "operator": "lt"}, HIGHER),
        ({"name": "dataloader.sufficiency", "unit": "1", "where": {}, "value": 0.5, "operator": "le"}, HIGHER),
        ({"name": "gpu.pcie.generation", "unit": "1", "where": {}, "value": 5, "operator": "le"}, HIGHER),
        ({"name": "gpu.pcie.width", "unit": "1", "where": {}, "value": 16, "operator": "lt"}, HIGHER),
        ({**SHARE, "value": 0.97, "operator": "le"}, HIGHER),
        ({**SHARE, "value": 0.5}, "0.5: memory that was not tested may be bad; require at least 0.9"),
        ({**SHARE, "value": None, "expected": 0.98, "fraction": 0.8}, "memory that was not tested may be bad"),
        ({**LATENCY, "value": 1e-5}, LOWER),
        ({**LATENCY, "value": 20.0, "operator": "le"}, "20: no healthy part has a latency of more than 1 s"),
        ({"name": "overlap.slowdown", "unit": "1", "scope": "", "where": {}, "value": 1.2}, LOWER),
        ({"name": "checkpoint.save_time", "unit": "s", "scope": "", "where": {}, "value": 9.0, "operator": "gt"}, LOWER),
        ({**WRONG, "value": 0}, LOWER),
        ({**WRONG, "value": 3, "operator": "le"}, "3: an error count must be 0; write `eq` and 0"),
        ({**WRONG, "value": 2, "operator": "lt"}, "an error count must be 0"),
        ({**WRONG, "value": 1, "operator": "eq"}, "an error count must be 0"),
        ({**WRONG, "value": None, "fleet_fraction": 1.0, "operator": "le"}, "must be 0, so it must not be compared"),
        ({"name": "digest.mismatches", "unit": "1", "where": {}, "value": 1, "operator": "le"}, "must be 0"),
        ({"name": "checkpoint.identical", "unit": "1", "scope": "", "where": {}, "value": False, "operator": "eq"},
         "only a faulty part meets this limit"),
        ({"value": math.inf, "operator": "ge"}, "inf: not a finite number"),
        ({"value": math.nan}, "not a finite number"),
        ({"value": None, "expected": math.inf, "fraction": 0.9}, "not a finite number"),
        ({"value": None, "fleet_fraction": math.nan}, "not a finite number"),
    ],
)  # fmt: skip
def test_limit_that_does_not_separate_faulty_from_healthy_parts_is_reported(changes: dict[str, Any], why: str) -> None:
    (finding,) = lint_changed(**changes)
    assert why in finding


@pytest.mark.parametrize(
    "changes",
    [
        {**LATENCY, "value": 1e-5, "operator": "le"},
        {**WRONG, "value": 0, "operator": "le"},
        {**WRONG, "value": 1, "operator": "lt"},
        {**SHARE, "value": 0.9},
    ],
)
def test_limit_that_separates_faulty_from_healthy_parts_is_accepted(changes: dict[str, Any]) -> None:
    assert lint_changed(**changes) == []


@pytest.mark.parametrize("name", [name for name in shipped_packs() if read_pack(name).gpu_names])
def test_each_dtype_of_the_standard_profile_is_in_the_datasheet_or_listed_as_lacking_or_unknown(name: str) -> None:
    """A dtype is in the datasheet of the pack or in `lacks`, not in both. It may be in neither if the figure is in `unknown`."""
    pack = read_pack(name)
    planned = {"gemm": set(), "stress": set()}
    for stage in read_profile("standard")["stages"].values():
        for benchmark in planned.keys() & stage["benchmarks"].keys():
            planned[benchmark] |= set(settings(benchmark, stage["benchmarks"][benchmark])["dtypes"])
    assert "fp8" in planned["gemm"]
    for benchmark, dtypes in planned.items():
        output = f"{benchmark}.throughput"
        lacks = set(pack.lacks.get(output, {}).get("dtype", ()))
        has = set(pack.datasheet["flops"])
        assert not lacks & has
        assert dtypes <= has | lacks or output in pack.unknown, (output, dtypes - has - lacks)
        if "fp8" in lacks or "fp8" not in has:
            judging = criteria_by_id([pack]).values()
            judged_dtypes = {
                item.where.get("dtype") for item in judging if item.name == output and item.expected is not None
            }
            assert "fp8" not in judged_dtypes


def test_packs_with_nvls_figures_require_nvls() -> None:
    packs = [read_pack(name) for name in shipped_packs()]
    with_figure = {pack.name for pack in packs if any(item.where.get("nvls") is True for item in pack.criteria)}
    by_pack = {pack.name: item for pack in packs for item in pack.criteria if item.name == "collective.nvls"}
    assert set(by_pack) == with_figure == {"h100-sxm", "h200-sxm", "b200"}
    for item in by_pack.values():
        assert (item.operator, item.value, item.where, item.stage) == ("eq", True, {"world_size": 8}, "benchmark")
        assert "NCCL_NVLS_ENABLE" in item.note
        assert "fabric manager" in item.note


def test_later_included_pack_overrides_an_earlier_included_pack(tmp_path: Path) -> None:
    for included, optional in ((["common"], True), (["common", "fleet-relative-hosts"], False)):
        path = write_pack(tmp_path / "mine.yml", pack_document() | {"include": included})
        (own,) = [item for item in read_pack(path).criteria if item.id == "busbw-vs-fleet"]
        assert own.optional == optional


@pytest.mark.parametrize("length", [1, 2])
def test_pack_that_includes_itself_is_refused(tmp_path: Path, length: int) -> None:
    paths = [tmp_path / f"mine{number}.yml" for number in range(length)]
    for number, path in enumerate(paths):
        write_pack(path, pack_document(id=f"c{number}") | {"include": [str(paths[(number + 1) % length])]})
    chain = " includes ".join(path.name for path in (*paths, paths[0]))
    with pytest.raises(UsageError, match=rf"the pack includes itself \({chain}\)"):
        read_pack(str(paths[0]))


def test_model_pack_without_datasheet_or_required_figures_is_reported() -> None:
    bare = Pack(name="e100", gpu_names=("NVIDIA E100",), criteria=(), unknown={"stress.powr": "not measured"})
    findings = [str(item) for item in lint(bare)]
    assert "e100: (pack): NVIDIA E100: a GPU model without a datasheet cannot be checked" in findings[1]
    assert "no observation is called stress.powr (did you mean stress.power?)" in findings[0]
    assert any("gemm.throughput: neither judged nor listed as unknown" in item for item in findings)


def test_figure_that_is_only_compared_with_the_fleet_does_not_count_as_judged() -> None:
    own = criterion(name="gpu.pcie.width", unit="1", operator="eq", where={}, value=None, same_as_fleet=True)
    findings = [str(item) for item in lint(replace(H200, unknown={}, criteria=(own,)))]
    assert any("gpu.pcie.width: neither judged nor listed as unknown" in item for item in findings)


def test_only_versions_may_be_required_to_be_equal_on_all_parts_of_the_fleet() -> None:
    same: dict[str, Any] = {"value": None, "same_as_fleet": True, "operator": "eq", "where": {}}
    assert lint_changed(**same, name="gpu.vbios_version", unit="1") == []
    assert lint_changed(**same, name="launch.nccl", scope="host", unit="1") == []
    assert "no two measurements give the same rate" in lint_changed(**same)[0]
    assert "did you mean gpu.vbios_version?" in lint_changed(**same, name="gpu.vbios_versions", unit="1")[0]


def test_packs_of_models_and_of_rehearsals_have_the_correctness_criteria() -> None:
    """A rehearsal does not judge speed: it requires each rate only to be above 0."""
    expected = {item.id for item in read_pack("correctness").criteria}
    for name in ("rehearsal", "common", "h200-sxm", "t4"):
        assert expected <= {item.id for item in read_pack(name).criteria}
    own = [item for item in read_pack("rehearsal").criteria if item.origin == "rehearsal"]
    rates = [item for item in own if item.unit not in ("1", "B", "s") and not item.baseline]
    assert rates
    assert all((item.operator, item.value) == ("gt", 0.0) for item in rates)


def test_throttling_by_the_power_cap_is_not_judged() -> None:
    judged = {item.where["reason"] for item in H200.criteria if item.name == "stress.throttled_share"}
    assert judged == {"hw_slowdown", "hw_thermal", "sw_thermal", "hw_power_brake"}


def test_h200_floors_follow_measurements_or_the_datasheet() -> None:
    """The floors are shares of rates that were measured on H200, except `stress-power`: 0.95 of the 700 W of the datasheet."""
    floors = {item.id: (item.expected or math.nan) * item.fraction for item in H200.criteria}
    assert floors["stress-bf16"] == pytest.approx(0.92 * 6.58e14)
    assert floors["stress-power"] == pytest.approx(665)
    assert floors["hbm-copy"] == pytest.approx(0.975 * 4.30e12)
    assert floors["peer-copy"] == pytest.approx(0.97 * 3.94e11)
    assert floors["send-recv-4-gpus"] == pytest.approx(0.95 * 3.66e11)


SHARE_OF_DATASHEET: dict[str, Any] = {"value": None, "datasheet": "memory_bandwidth", "fraction": 0.65}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"fraction": 1.01},
            "1.01: above the peak, 1.01 of the datasheet's memory_bandwidth; use a fraction from 0.05 to 1",
        ),
        ({"fraction": 0.04}, "far too low, 0.04 of the datasheet's memory_bandwidth"),
        ({"datasheet": "power"}, "power: the datasheet has this figure in W, not in B/s"),
        ({"operator": "le"}, "a datasheet states the most that a part can reach; use `ge`"),
        (
            {"name": "gemm.throughput", "unit": "FLOP/s", "where": {}, "datasheet": "flops"},
            "the datasheet has a figure for each precision; add `dtype` to `where`",
        ),
        (
            {"name": "host_copy.bandwidth", "where": {"direction": "both_ways"}, "datasheet": "pcie", "fraction": 2.1},
            "use a fraction from 0.05 to 2",
        ),
    ],
)
def test_implausible_limit_as_a_share_of_the_datasheet_is_reported(changes: dict[str, Any], why: str) -> None:
    assert any(why in text for text in lint_changed(**{**SHARE_OF_DATASHEET, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"name": "host_copy.bandwidth", "where": {"direction": "both_ways"}, "datasheet": "pcie", "fraction": 1.4},
        {"name": "gemm.throughput", "unit": "FLOP/s", "where": {"dtype": "bf16"}, "datasheet": "flops"},
        {"name": "collective.*.busbw", "scope": "host", "where": {"size_bytes": {"ge": 1000}}, "datasheet": "nvlink"},
    ],
)
def test_plausible_limit_as_a_share_of_the_datasheet_is_accepted(changes: dict[str, Any]) -> None:
    assert lint_changed(**{**SHARE_OF_DATASHEET, **changes}) == []


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (
            {"size_bytes": {"ge": 8, "le": 4}},
            "ge 8, le 4: no size_bytes is within these bounds; write a `ge` below `le`",
        ),
        ({"placement": {"ge": 1}}, "placement is not a number, so bounds never match"),
        ({"nvls": {"ge": 1}}, "nvls is not a number"),
        ({"opp": {"ge": 1}}, "no such parameter"),
    ],
)
def test_bounds_that_never_match_are_reported(where: dict[str, Any], why: str) -> None:
    (finding,) = lint_changed(**BUSBW, where=where)
    assert why in finding


def test_floor_with_the_basis_model_may_be_far_below_the_expected_value() -> None:
    """The basis `model`: the floor is an estimate from figures of other hardware."""
    floor: dict[str, Any] = {"value": None, "variable": "fabric_bytes_per_second", "fraction": 0.6}
    assert lint_changed(**BUSBW | floor | {"fleet_fraction": None, "basis": "model"}, where={}) == []
    assert (
        "floor 40 % below the expected value" in lint_changed(**BUSBW | floor | {"fleet_fraction": None}, where={})[0]
    )


def pack_document(**changes: Any) -> dict[str, Any]:
    item = {
        "id": "c",
        "name": "gemm.throughput",
        "operator": "ge",
        "unit": "FLOP/s",
        "action": "none",
        "source": "ours alone",
    }
    plain = {"schema": "rackproof.criteria/1", "summary": "a test", "criteria": [item | {"value": 1.0e14} | changes]}
    return {key: value for key, value in plain.items() if value is not None}


def write_pack(path: Path, content: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_pack_is_read_completely(tmp_path: Path) -> None:
    content = pack_document() | {
        "gpu_names": ["NVIDIA E100"],
        "datasheet": {"power": {"value": 700, "source": "its datasheet"}},
        "unknown": {"stress.throughput": "not measured"},
    }
    content["criteria"][0].pop("value")
    content["criteria"][0]["vs_fleet"] = {"fraction": 0.95}
    pack = read_pack(write_pack(tmp_path / "e100.yml", content))
    assert pack.datasheet["power"]["value"] == 700
    assert pack.unknown == {"stress.throughput": "not measured"}
    (only,) = pack.criteria
    assert (only.fleet_fraction, only.value, only.origin) == (0.95, None, "e100")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vs_flet": {"fraction": 1}}, "unknown vs_flet (did you mean vs_fleet?)"),
        ({"vs_fleet": {"fraction": 0.9}}, "criteria.0"),
        ({"source": "?"}, "criteria.0.source"),
        ({"name": "*.throughput"}, "criteria.0.name"),
    ],
)
def test_unknown_or_invalid_field_of_a_pack_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_pack(write_pack(tmp_path / "mine.yml", pack_document(**changes)))
    assert message in str(raised.value)


def test_datasheet_figure_needs_a_source(tmp_path: Path) -> None:
    content = pack_document() | {"datasheet": {"power": {"value": 700}}}
    with pytest.raises(UsageError, match=r"datasheet\.power: 'source' is a required property"):
        read_pack(write_pack(tmp_path / "mine.yml", content))


def test_criteria_lint_exits_1_for_a_finding_and_64_for_a_missing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["criteria", "lint"]) == 0
    assert f"{len(shipped_packs())} packs with " in capsys.readouterr().out
    assert main(["criteria", "lint", write_pack(tmp_path / "mine.yml", pack_document(name="gemm.thruput"))]) == 1
    assert "mine: c: gemm.thruput: no observation is called gemm.thruput" in capsys.readouterr().out
    assert main(["criteria", "lint", str(tmp_path / "none.yml")]) == 64


@pytest.mark.parametrize(
    ("page", "heading"), [("CONTRIBUTING.md", "## A GPU model"), ("docs/criteria.md", "## A pack")]
)
def test_example_packs_of_the_documentation_pass_the_lint(page: str, heading: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text()
    example = text.split(heading)[1].split("```yaml\n")[1].split("```")[0]
    (tmp_path / "e100.yml").write_text(example)
    assert main(["criteria", "lint", str(tmp_path / "e100.yml")]) == 0


def test_pack_in_a_directory_of_another_user_may_be_given_with_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of root, whose plan names /root/inventory/site.yml, is copied and judged by another user."""
    pack = tmp_path / "site.yml"

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for method in ("open", "stat"):
        monkeypatch.setattr(Path, method, refuse)
    assert located_packs([str(pack)], ["copy/site.yml"]) == {str(pack): "copy/site.yml"}
    with pytest.raises(UsageError, match=f"{pack}: the plan names this criteria pack, but .* DIRECTORY/site.yml"):
        located_packs([str(pack)], ["copy/other.yml"])
