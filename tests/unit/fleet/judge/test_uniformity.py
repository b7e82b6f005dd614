"""Test the comparison of versions and settings within a group of hosts, and the matrix of versions in the report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.judge.criteria import Pack, read_pack
from fleet.judge.judge import Evidence, judge
from fleet.judge.uniformity import BY_PART_NUMBER, PartValue, ValueGroups
from fleet.report.html.page import render_html
from fleet.report.markdown import render_markdown
from fleet.report.merge import merge
from fleet.report.tables import versions
from fleet.report.unjudged import uncompared_hosts
from schemas.errors import UsageError
from schemas.plans import Plan
from schemas.records import Metric, Snapshot, Value
from schemas.reports import FAIL, INCONCLUSIVE, PASS, HostReport, Verdict
from tests import builders

PACK = replace(read_pack("uniformity"), name="h200-sxm", gpu_names=("NVIDIA H200",))
"""Pack with only the uniformity criteria."""
OF_EVERY_HOST = ("gpu.peer.link", *(f"launch.{name}" for name in builders.SOFTWARE))
"""Readings that every host of `builders` has. `uniformity_verdicts` omits the verdicts on them."""
REMEDY = "; set the value of the majority, and measure again"
OLD, NEW = "96.00.A5.00.01", "96.00.BC.00.03"
FOUR = ("h1", "h2", "h3", "h4")


def uniform_plan(*hosts: str, **variables: Any) -> Plan:
    gang = "all" if len(hosts) > 1 else "none"
    return builders.plan(*hosts, **{"profile": "smoke", "rackproof_gang": gang, **variables})


def with_readings(evidence: Evidence, readings: Mapping[str, Mapping[str, Any]], unit: str = "1") -> Evidence:
    """Return the evidence with one more snapshot; `readings`: name -> scope -> value, or (status, reason) in place of a value."""
    metrics = tuple(
        Metric(
            name=name,
            unit=unit,
            values={scope: value for scope, value in positions.items() if not isinstance(value, tuple)},
            absent={scope: ": ".join(value) for scope, value in positions.items() if isinstance(value, tuple)},
        )
        for name, positions in readings.items()
    )
    taken = Snapshot(stage="gang", phase="after", at=builders.WHEN, duration_s=0.1, metrics=metrics)
    return builders.with_snapshot(evidence, taken)


def evidence_with(plan: Plan, name: str, values: Mapping[str, Any], *, unit: str = "1") -> dict[str, Evidence]:
    """Return evidence with the reading `name`.

    Args:
        plan: the plan of the run.
        name: name of the reading.
        values: host -> {scope: value}, or host -> value for the scope `host`. (status, reason) may be in place of a value.
        unit: unit of the values.
    """
    evidence = builders.evidence(plan)
    for host, value in values.items():
        positions = value if isinstance(value, dict) else {"host": value}
        evidence[host] = with_readings(evidence[host], {name: positions}, unit)
    return evidence


def uniformity_verdicts(plan: Plan, evidence: Mapping[str, Evidence], *more: Pack) -> list[Verdict]:
    verdicts = judge(plan, evidence, (PACK, *more))
    return [item for item in verdicts if item.criterion.startswith("uniform") and item.name not in OF_EVERY_HOST]


def not_passing(verdicts: list[Verdict]) -> list[tuple[str, str, str, str]]:
    """Return host, scope, verdict and reason of each verdict that is not a pass."""
    return [(item.host, item.scope, item.verdict, item.reason) for item in verdicts if item.verdict != PASS]


def test_differing_host_fails_and_the_others_pass() -> None:
    plan = uniform_plan(*FOUR)
    verdicts = uniformity_verdicts(
        plan, evidence_with(plan, "driver.version", dict.fromkeys(FOUR, "580.159.04") | {"h3": "550.90.07"})
    )
    assert not_passing(verdicts) == [("h3", "host", FAIL, f"found 550.90.07, 3 of 4 hosts have 580.159.04{REMEDY}")]
    (bad,) = [item for item in verdicts if item.verdict == FAIL]
    assert (bad.value, bad.limit, bad.operator, bad.action) == ("550.90.07", "580.159.04", "eq", "configure")
    assert bad.detail.endswith(REMEDY), "the detail must have the remedy too"
    assert {item.reason for item in verdicts if item.verdict == PASS} == {"found 580.159.04, as on 3 of 4 hosts"}


@pytest.mark.parametrize("hosts", [("h1", "h2", "h3"), ("h1", "h3")])
def test_different_values_are_printed_differently(hosts: tuple[str, ...]) -> None:
    pack = replace(PACK, criteria=(replace(PACK.criteria[0], id="size", name="host.memory.total", unit="B"),))
    sizes = {"h1": 2164194971648, "h2": 2164194971648, "h3": 2164194967552}
    plan = uniform_plan(*hosts)
    verdicts = judge(
        plan, evidence_with(plan, "host.memory.total", {host: sizes[host] for host in hosts}, unit="B"), (pack,)
    )
    (reason,) = (item.reason for item in verdicts if item.criterion == "size" and item.host == "h3")
    assert {"1.96832386032 TiB", "1.96832385659 TiB"} == set(re.findall(r"1\.968\d+ TiB", reason))


def test_equal_hosts_pass() -> None:
    plan = uniform_plan(*FOUR)
    verdicts = uniformity_verdicts(plan, evidence_with(plan, "driver.version", dict.fromkeys(FOUR, "580.159.04")))
    assert [item.reason for item in verdicts] == ["found 580.159.04, as on all 4 hosts"] * 4
    assert {item.verdict for item in verdicts} == {PASS}


def test_differing_gpu_fails_with_its_serial() -> None:
    plan = uniform_plan(*FOUR)
    equal = {"gpu=0": NEW, "gpu=1": NEW}
    verdicts = uniformity_verdicts(
        plan, evidence_with(plan, "gpu.vbios_version", dict.fromkeys(FOUR, equal) | {"h2": equal | {"gpu=1": OLD}})
    )
    assert not_passing(verdicts) == [("h2", "gpu=1", FAIL, f"found {OLD}, 7 of 8 GPUs have {NEW}{REMEDY}")]
    assert [item.serial for item in verdicts if item.verdict == FAIL] == ["h2-1"]


@pytest.mark.parametrize("name", BY_PART_NUMBER)
@pytest.mark.parametrize(
    ("part_number", "fails"),
    [("692-2G506-0212-005", False), ("692-2G506-0210-003", True), ("692-2G506-0210-002", True), (None, False)],
)
def test_version_is_compared_only_between_gpus_of_one_part_number(
    name: str, part_number: str | None, fails: bool
) -> None:
    """GPU 1 of h2 was replaced by a GPU with another version. `part_number`: its part number; None: not read.

    The last group of digits of a part number is the revision, which is ignored.
    """
    plan = uniform_plan(*FOUR)
    evidence = {}
    for host, healthy in builders.evidence(plan).items():
        of_gpu_1 = part_number if host == "h2" else "692-2G506-0210-002"
        parts = {"gpu=0": "692-2G506-0210-002"} | ({"gpu=1": of_gpu_1} if of_gpu_1 else {})
        versions = {"gpu=0": NEW, "gpu=1": OLD if host == "h2" else NEW}
        evidence[host] = with_readings(healthy, {"gpu.part_number": parts, name: versions})
    failed = [
        (host, scope) for host, scope, verdict, _ in not_passing(uniformity_verdicts(plan, evidence)) if verdict == FAIL
    ]
    assert failed == ([("h2", "gpu=1")] if fails else [])


@pytest.mark.parametrize(
    ("models", "versions", "failing"),
    [
        ("AAAB", "1112", []),  # a board of another kind
        ("AABB", "1122", []),  # two kinds
        ("AABB", "1222", ["h1", "h2"]),
        ("AABBB", "11223", ["h5"]),
        ("AAAA", "1112", ["h4"]),
        ("-AAA", "2111", []),  # the kind of one board is not known
        ("----", "1112", ["h4"]),  # no kind is known
    ],
)
def test_firmware_of_an_adapter_is_compared_within_the_kind_of_its_board(
    models: str, versions: str, failing: list[str]
) -> None:
    hosts = tuple(f"h{number}" for number in range(1, len(models) + 1))
    plan, evidence, adapter = uniform_plan(*hosts), {}, "hca=mlx5_0"
    for host, model, version in zip(hosts, models, versions, strict=True):
        board = ("unsupported", "not reported") if model == "-" else model
        readings = {"infiniband.hca.board_id": {adapter: board}, "infiniband.hca.firmware_version": {adapter: version}}
        evidence[host] = with_readings(builders.evidence(plan)[host], readings)
    verdicts = [item for item in judge(plan, evidence, (PACK,)) if item.criterion == "uniform-nic-firmware"]
    assert [item.host for item in verdicts if item.verdict == FAIL] == failing


def test_both_sides_of_a_tie_fail() -> None:
    plan = uniform_plan("h1", "h2")
    verdicts = uniformity_verdicts(
        plan, evidence_with(plan, "host.kernel_version", {"h1": "6.8.0-1", "h2": "5.15.0-9"})
    )
    why = "1 of 2 hosts has 5.15.0-9, 1 has 6.8.0-1; set one value on all of them, and measure again"
    assert not_passing(verdicts) == [
        ("h1", "host", FAIL, f"found 6.8.0-1, {why}"),
        ("h2", "host", FAIL, f"found 5.15.0-9, {why}"),
    ]
    assert {item.limit for item in verdicts} == {None}


def test_most_common_value_is_the_reference_even_without_a_majority() -> None:
    plan = uniform_plan(*FOUR)
    verdicts = uniformity_verdicts(
        plan, evidence_with(plan, "driver.version", {"h1": "a", "h2": "a", "h3": "b", "h4": "c"})
    )
    assert [(host, verdict) for host, _, verdict, _ in not_passing(verdicts)] == [("h3", FAIL), ("h4", FAIL)]


def test_reading_of_a_single_host_is_not_compared() -> None:
    plan = uniform_plan("h1")
    assert uniformity_verdicts(plan, evidence_with(plan, "driver.version", {"h1": "580.159.04"})) == []


def test_gpus_of_one_host_are_compared_with_each_other() -> None:
    plan = uniform_plan("h1", gpu_count=4)
    values = {f"gpu={index}": 700.0 if index < 3 else 650.0 for index in range(4)}
    verdicts = uniformity_verdicts(plan, evidence_with(plan, "gpu.power_limit_default", {"h1": values}, unit="W"))
    assert not_passing(verdicts) == [("h1", "gpu=3", FAIL, "found 650 W, 3 of 4 GPUs have 700 W")]


def test_hosts_are_compared_only_within_their_gang() -> None:
    plan = builders.plan(*FOUR, profile="smoke")
    hosts = tuple(replace(host, gang="r1" if host.name in ("h1", "h2") else "r2") for host in plan.hosts)
    plan = replace(plan, hosts=hosts)
    values = {"h1": "a", "h2": "a", "h3": "b", "h4": "b"}
    assert not_passing(uniformity_verdicts(plan, evidence_with(plan, "driver.version", values))) == []
    assert len(not_passing(uniformity_verdicts(plan, evidence_with(plan, "driver.version", values | {"h2": "b"})))) == 2


def test_gpus_are_compared_only_with_gpus_of_their_model() -> None:
    plan = uniform_plan(*FOUR)
    values = {
        host: {"gpu=0": OLD if host in ("h1", "h2") else NEW, "gpu=1": OLD if host in ("h1", "h2") else NEW}
        for host in FOUR
    }
    evidence = evidence_with(plan, "gpu.vbios_version", values)
    for host in ("h1", "h2"):
        other = tuple(
            replace(record, gpus=tuple(replace(gpu, name="NVIDIA H100") for gpu in record.gpus))
            for record in evidence[host].records
        )
        evidence[host] = replace(evidence[host], records=other)
    plan = replace(plan, hosts=tuple(replace(host, gpu_model="h200-sxm") for host in plan.hosts))
    assert not_passing(uniformity_verdicts(plan, evidence)) == []


def test_adapters_are_compared_by_name() -> None:
    plan = uniform_plan("h1", "h2", "h3")
    equal = {"hca=mlx5_0": "28.39.1002", "hca=mlx5_1": "32.41.1000"}
    values = dict.fromkeys(("h1", "h2", "h3"), equal) | {"h3": equal | {"hca=mlx5_1": "32.38.0001"}}
    verdicts = uniformity_verdicts(plan, evidence_with(plan, "infiniband.hca.firmware_version", values))
    assert not_passing(verdicts) == [
        ("h3", "hca=mlx5_1", FAIL, f"found 32.38.0001, 2 of 3 hosts have 32.41.1000{REMEDY}")
    ]


@pytest.mark.parametrize("lost", [("error", "no answer"), ("unsupported", "this driver has none")])
def test_host_with_an_unreadable_version_is_inconclusive(lost: tuple[str, str]) -> None:
    plan = uniform_plan("h1", "h2")
    verdicts = uniformity_verdicts(plan, evidence_with(plan, "driver.version", {"h1": "580.159.04", "h2": lost}))
    assert not_passing(verdicts) == [("h2", "host", INCONCLUSIVE, ": ".join(lost))]


def test_host_without_a_version_that_others_have_is_inconclusive() -> None:
    plan = uniform_plan("h1", "h2")
    verdicts = uniformity_verdicts(plan, evidence_with(plan, "driver.version", {"h1": "580.159.04"}))
    assert not_passing(verdicts) == [("h2", "host", INCONCLUSIVE, "not observed, but other hosts report it")]


REQUIRED = [item.name for item in PACK.criteria if not item.optional]
"""Readings that every host must have."""


@pytest.mark.parametrize("hosts", [("h1",), ("h1", "h2")], ids=" ".join)
@pytest.mark.parametrize("name", REQUIRED)
def test_required_reading_that_is_an_error_on_every_host_is_inconclusive(name: str, hosts: tuple[str, ...]) -> None:
    plan = uniform_plan(*hosts)
    verdicts = uniformity_verdicts(plan, evidence_with(plan, name, dict.fromkeys(hosts, ("error", "no answer"))))
    assert not_passing(verdicts) == [(host, "host", INCONCLUSIVE, "error: no answer") for host in hosts]


@pytest.mark.parametrize("name", REQUIRED)
def test_reading_that_no_host_supports_is_not_compared(name: str) -> None:
    plan = uniform_plan("h1", "h2")
    values = dict.fromkeys(("h1", "h2"), ("unsupported", "not on this host"))
    assert not_passing(uniformity_verdicts(plan, evidence_with(plan, name, values))) == []


def test_optional_reading_is_ignored_if_it_is_unsupported_but_not_if_it_failed() -> None:
    plan = uniform_plan("h1", "h2")
    values = {"h1": {"gpu=0": NEW, "gpu=1": ("unsupported", "older driver")}, "h2": {"gpu=0": NEW, "gpu=1": NEW}}
    assert not_passing(uniformity_verdicts(plan, evidence_with(plan, "gpu.vbios_version", values))) == []
    values["h1"]["gpu=1"] = ("error", "the GPU is lost")
    verdicts = not_passing(uniformity_verdicts(plan, evidence_with(plan, "gpu.vbios_version", values)))
    assert verdicts == [("h1", "gpu=1", INCONCLUSIVE, "error: the GPU is lost")]


def test_reading_that_is_no_longer_supported_is_inconclusive_unless_it_is_optional() -> None:
    plan = uniform_plan("h1", "h2")
    for name, scope, expected in (
        ("driver.version", "host", [("h2", "host", INCONCLUSIVE, "unsupported: gone")]),
        ("gpu.vbios_version", "gpu=0", []),
    ):
        evidence = evidence_with(plan, name, {host: {scope: NEW} for host in ("h1", "h2")})
        evidence["h2"] = with_readings(evidence["h2"], {name: {scope: ("unsupported", "gone")}})
        assert not_passing(uniformity_verdicts(plan, evidence)) == expected


def test_last_value_of_a_number_is_compared() -> None:
    """h2 first reports 96 CPUs. At the end it reports 192, like h1. Only the last value is compared."""
    plan = uniform_plan("h1", "h2")
    evidence = evidence_with(plan, "host.cpu.count", {"h1": 192, "h2": 96})
    evidence = {
        host: with_readings(host_evidence, {"host.cpu.count": {"host": 192}})
        for host, host_evidence in evidence.items()
    }
    assert {item.verdict for item in uniformity_verdicts(plan, evidence)} == {PASS}


def test_version_that_changed_during_the_run_fails() -> None:
    plan = uniform_plan("h1", "h2", "h3")
    evidence = evidence_with(plan, "driver.version", dict.fromkeys(("h1", "h2", "h3"), "550.90.07"))
    for host in ("h1", "h2", "h3"):
        first, *rest = evidence[host].records
        early = Metric(name="driver.version", unit="1", values={"host": "550.90.07" if host == "h1" else "580.1"})
        taken = tuple(
            replace(item, metrics=(*item.metrics, early)) if item.stage == "preflight" else item
            for item in first.snapshots
        )
        evidence[host] = replace(evidence[host], records=(replace(first, snapshots=taken), *rest))
    reason = "found 580.1, 3 of 3 hosts have 550.90.07; the value changed during the run: measure again"
    assert [(host, why) for host, _, _, why in not_passing(uniformity_verdicts(plan, evidence))] == [
        ("h2", reason),
        ("h3", reason),
    ]


@pytest.mark.parametrize("component", ["torch", "cuda", "nccl", "cudnn"])
def test_library_versions_of_ranks_are_compared(component: str) -> None:
    plan = uniform_plan("h1", "h2", "h3")
    evidence = builders.evidence(plan)
    for host in evidence:
        version = "9" if host == "h2" else "2"
        changed = tuple(
            replace(item, software={**item.software, component: version}) for item in evidence[host].records
        )
        evidence[host] = replace(evidence[host], records=changed)
    verdicts = [item for item in judge(plan, evidence, (PACK,)) if item.name == f"launch.{component}"]
    assert [(item.host, item.verdict) for item in verdicts] == [("h1", PASS), ("h2", FAIL), ("h3", PASS)]
    assert verdicts[1].reason == f"found 9, 2 of 3 hosts have 2{REMEDY}"


def test_uniformity_pack_omits_readings_that_other_criteria_judge() -> None:
    names = {item.name for item in PACK.criteria}
    assert not names & {"gpu.ecc.enabled", "gpu.part_number", "driver.cuda_version"}


MEMORY = 2_164_126_347_264


@pytest.mark.parametrize(
    ("values", "failing"),
    [
        ({"h2": MEMORY // 2}, ["h2"]),  # half of the modules are missing
        ({"h2": MEMORY * 31 // 32}, ["h2"]),  # one of 32 modules is missing
        ({"h2": MEMORY - (1 << 30)}, []),  # the kernel of h2 reserves 1 GiB more
        ({"h2": MEMORY * 2}, []),  # more memory than the others is no fault
        (dict.fromkeys(("h2", "h3", "h4"), MEMORY // 2), []),  # one host with more memory is not the reference
        (
            dict.fromkeys(("h3", "h4"), MEMORY // 2),
            ["h3", "h4"],
        ),  # of two equally common sizes, the larger is the reference
    ],
)
def test_host_with_less_memory_than_other_hosts_fails(values: dict[str, int], failing: list[str]) -> None:
    plan = uniform_plan(*FOUR)
    evidence = evidence_with(plan, "host.memory.total", dict.fromkeys(FOUR, MEMORY) | values, unit="B")
    verdicts = not_passing(uniformity_verdicts(plan, evidence))
    assert [(host, verdict) for host, _, verdict, _ in verdicts] == [(host, FAIL) for host in failing]


def test_different_management_of_gpu_memory_is_a_difference_of_the_configuration() -> None:
    plan = uniform_plan("h1", "h2", "h3")
    values = {"h1": "driver", "h2": "numa", "h3": "driver"}
    (result,) = [
        item
        for item in uniformity_verdicts(plan, evidence_with(plan, "software.driver_module.gpu_memory", values))
        if item.verdict != PASS
    ]
    assert (result.host, result.criterion, result.action) == ("h2", "uniform-gpu-memory-mode", "configure")


def ports(**states: str) -> dict[str, str]:
    """Return the states of the ports of eight adapters: "ACTIVE" except for the adapters in `states` (adapter -> state)."""
    return {f"hca=mlx5_{index},port=1": states.get(f"mlx5_{index}", "ACTIVE") for index in range(8)}


def test_port_that_is_down_but_active_on_other_hosts_fails() -> None:
    plan = uniform_plan("h1", "h2", "h3")
    values = {"h1": ports(), "h2": ports(mlx5_3="DOWN"), "h3": ports()}
    verdicts = not_passing(uniformity_verdicts(plan, evidence_with(plan, "infiniband.state", values)))
    assert verdicts == [("h2", "hca=mlx5_3,port=1", FAIL, "found DOWN, 2 of 3 hosts have ACTIVE")]


@pytest.mark.parametrize(("state", "action"), [("Polling", "reseat"), ("Disabled", "configure")])
def test_action_for_a_port_without_a_link_depends_on_its_state(state: str, action: str) -> None:
    """A port is `Disabled` if software switched it off."""
    plan = uniform_plan("h1", "h2", "h3")
    up = dict.fromkeys(ports(), "LinkUp")
    values = {"h1": up, "h2": up | {"hca=mlx5_3,port=1": state}, "h3": up}
    verdicts = uniformity_verdicts(plan, evidence_with(plan, "infiniband.phys_state", values))
    (failed,) = [item for item in verdicts if item.verdict == FAIL]
    assert (failed.scope, failed.action) == ("hca=mlx5_3,port=1", action)


@pytest.mark.parametrize("hosts", [("h1", "h2"), ("h1", "h2", "h3")])
def test_port_that_is_unused_on_all_hosts_passes(hosts: tuple[str, ...]) -> None:
    plan = uniform_plan(*hosts)
    values = dict.fromkeys(hosts, ports(mlx5_7="DOWN"))
    assert not_passing(uniformity_verdicts(plan, evidence_with(plan, "infiniband.state", values))) == []


def test_port_that_is_active_on_only_one_host_passes() -> None:
    plan = uniform_plan("h1", "h2", "h3")
    values = dict.fromkeys(("h1", "h2", "h3"), ports(mlx5_7="DOWN")) | {"h2": ports()}
    assert not_passing(uniformity_verdicts(plan, evidence_with(plan, "infiniband.state", values))) == []


def single_host_findings(
    states: Mapping[str, str], boards: Mapping[str, str], **variables: Any
) -> list[tuple[str, str, str, str]]:
    """Return the verdicts on a host without peers, except passes. `states`: port -> state; `boards`: adapter -> board ID."""
    plan = uniform_plan("h1", **variables)
    evidence = builders.evidence(plan)
    layers = dict.fromkeys(states, "InfiniBand")
    readings = {"infiniband.hca.board_id": boards, "infiniband.link_layer": layers, "infiniband.state": states}
    evidence["h1"] = with_readings(evidence["h1"], readings)
    return not_passing(uniformity_verdicts(plan, evidence))


BOARDS = {f"hca=mlx5_{index}": "MT_0000000838" for index in range(8)}


def test_port_that_deviates_from_most_ports_of_a_single_host_fails() -> None:
    expected = [("h1", "hca=mlx5_3,port=1", FAIL, "found DOWN, 7 of 8 ports have ACTIVE")]
    assert single_host_findings(ports(mlx5_3="DOWN"), BOARDS) == expected


def test_down_port_of_a_single_host_passes_if_it_could_be_unused_by_design() -> None:
    three_down = dict.fromkeys(("mlx5_4", "mlx5_5", "mlx5_6"), "DOWN")
    assert single_host_findings(ports(**three_down), BOARDS) == [], (
        "only five of eight ports agree, less than three quarters"
    )
    other = BOARDS | dict.fromkeys(("hca=mlx5_6", "hca=mlx5_7"), "MT_0000000359")
    assert single_host_findings(ports(mlx5_6="DOWN", mlx5_7="DOWN"), other) == [], (
        "ports must be compared only with ports of the same board"
    )
    assert single_host_findings(ports(mlx5_7="DOWN"), BOARDS, rackproof_infiniband_ports=7) == [], (
        "seven ports are up, as the inventory states"
    )
    assert single_host_findings(ports(mlx5_7="DOWN"), {}) == [], "ports of unknown boards must not be compared"


def test_nvlinks_that_are_down_fail_if_at_least_three_quarters_of_the_links_are_up() -> None:
    plan = uniform_plan("h1", gpu_count=1)

    def links(down: int, count: int = 18) -> list[tuple[str, str, str, str]]:
        states = {f"gpu=0,link={index}": index >= down for index in range(count)}
        return not_passing(uniformity_verdicts(plan, evidence_with(plan, "gpu.nvlink.active", {"h1": states})))

    assert [scope for _, scope, *_ in links(1)] == ["gpu=0,link=0"]
    assert [scope for _, scope, *_ in links(4)] == [f"gpu=0,link={index}" for index in range(4)]
    assert links(6) == [], (
        "12 of 18 links are up, less than three quarters, as with an NVLink bridge: the 6 others must not fail"
    )
    assert links(18) == [], "no link is up, as in a virtual machine with one GPU: no link may fail"
    assert links(0) == []


@pytest.mark.parametrize(("name", "bad"), [("gpu.fabric.cluster_uuid", "b"), ("gpu.fabric.clique_id", 2)])
def test_gpus_of_a_rack_must_be_in_one_nvlink_domain(name: str, bad: Any) -> None:
    good = "a" if isinstance(bad, str) else 1
    plan = uniform_plan(*FOUR)
    plan = replace(
        plan,
        hosts=tuple(replace(host, rack="r1" if host.name < "h3" else "r2", gpu_model="gb200") for host in plan.hosts),
    )
    racks = {host.name: {f"gpu={index}": f"{good}{host.rack}" for index in (0, 1)} for host in plan.hosts}
    pack = replace(read_pack("gb200"), name="gb200", gpu_names=("NVIDIA H200",))
    pack = replace(pack, criteria=tuple(item for item in pack.criteria if item.id.startswith("rack-nvlink")))

    def judged(values: Mapping[str, Any]) -> list[tuple[str, str]]:
        verdicts = judge(plan, evidence_with(plan, name, values), (pack,))
        return [
            (item.host, item.scope) for item in verdicts if item.criterion.startswith("rack-") and item.verdict == FAIL
        ]

    assert judged(racks) == [], "racks may have different domains"
    differing = {"gpu=0": racks["h2"]["gpu=0"], "gpu=1": bad}
    assert judged(racks | {"h2": differing}) == [("h2", "gpu=1")]


def site_pack(path: Path, **over: Any) -> Pack:
    """Return a site pack with one criterion, which by default has the id of a shipped criterion."""
    item = {
        "id": "uniform-driver",
        "name": "driver.version",
        "scope": "host",
        "operator": "eq",
        "unit": "1",
        "action": "none",
    }
    item |= {"source": "this fleet is mixed on purpose", "same_as_fleet": False, **over}
    path.write_text(yaml.safe_dump({"schema": "rackproof.criteria/1", "summary": "mixed", "criteria": [item]}))
    return replace(read_pack(str(path)), chosen=True)


def test_site_pack_disables_a_comparison(tmp_path: Path) -> None:
    plan = uniform_plan("h1", "h2")
    evidence = evidence_with(plan, "driver.version", {"h1": "580.159.04", "h2": "550.90.07"})
    assert len(not_passing(uniformity_verdicts(plan, evidence))) == 2
    assert uniformity_verdicts(plan, evidence, site_pack(tmp_path / "mixed.yml", replaces="uniform-driver")) == []


def test_site_criterion_on_a_reading_that_no_host_has_does_not_pass(tmp_path: Path) -> None:
    plan = uniform_plan("h1", "h2")
    pack = site_pack(tmp_path / "mine.yml", id="uniform-mine", name="software.mine", same_as_fleet=True)
    verdicts = not_passing(uniformity_verdicts(plan, builders.evidence(plan), pack))
    assert [reason for *_, reason in verdicts] == ["no observation matches this criterion"] * 2


@pytest.mark.parametrize("over", [{"operator": "gt"}, {"delta": True}, {"best_of_run": True}, {"value": "580"}])
def test_same_as_fleet_refuses_unsuitable_keys_and_operators(tmp_path: Path, over: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"criteria\.0"):
        site_pack(tmp_path / "mine.yml", **over)


def host_report(host: HostReport, number: int, **software: str) -> HostReport:
    return replace(host, name=f"r12-h{number:02d}", software=software)


def render_matrix(*summarized: dict[str, str]) -> tuple[list[versions.Component], str, str]:
    """Return the matrix of versions as components, and the report in HTML and in Markdown.

    Args:
        summarized: for each host, component -> version.
    """
    plan = uniform_plan("h1", "h2")
    report = merge(plan, builders.evidence(plan), (PACK,))
    report = replace(
        report,
        hosts=tuple(host_report(report.hosts[0], number, **software) for number, software in enumerate(summarized)),
        verdicts=(),
    )
    return versions.components(report), render_html(report), render_markdown(report)


def test_matrix_names_differing_hosts_and_summarizes_the_rest() -> None:
    hosts = [{"driver.version": "580.159.04", "torch": "2.11.0"} for _ in range(28)]
    hosts += [{"driver.version": "550.90.07", "torch": "2.11.0"} for _ in range(2)]
    components, html, markdown = render_matrix(*hosts)
    assert [(version.name, version.differs) for version in components] == [("driver.version", True), ("torch", False)]
    assert [(value.text, value.hosts, value.names) for value in components[0].versions] == [
        ("580.159.04", 28, ""),
        ("550.90.07", 2, "r12-h28, r12-h29"),
    ]
    assert "| `driver.version` | `550.90.07` | 2 | `r12-h28, r12-h29` | 0 |" in markdown
    assert "The same on every host that reported it: `torch 2.11.0`." in markdown
    assert "<td><code>550.90.07</code></td><td>2</td><td>r12-h28, r12-h29</td>" in html
    assert '<span class="note">torch</span> <code>2.11.0</code>' in html


def test_matrix_names_parts_if_a_host_has_two_versions() -> None:
    odd = {"gpu.vbios_version[gpu=0]": NEW, "gpu.vbios_version[gpu=1]": NEW, "gpu.vbios_version[gpu=2]": OLD}
    components, _, _ = render_matrix({"gpu.vbios_version": NEW}, {"gpu.vbios_version": NEW}, odd)
    assert [(value.text, value.hosts, value.names) for value in components[0].versions] == [
        (NEW, 3, ""),
        (OLD, 1, "r12-h02 GPU 2"),
    ]


def test_matrix_is_shortened_if_all_hosts_differ() -> None:
    components, html, markdown = render_matrix(*({"driver.version": f"{number}"} for number in range(30)))
    assert (len(components[0].versions), components[0].left_out) == (10, 20)
    assert "and 20 more versions" in html
    assert "and 20 more versions" in markdown
    components, _, _ = render_matrix(*({"driver.version": "old" if number < 14 else "new"} for number in range(30)))
    assert components[0].versions[1].names.endswith("r12-h05 and 8 more")


def test_matrix_counts_hosts_without_a_version() -> None:
    components, html, markdown = render_matrix({"torch": "2.11.0"}, {}, {"torch": "2.11.0"})
    assert [(version.name, version.differs, version.unknown) for version in components] == [("torch", False, 1)]
    assert "missing on 1 host" in html
    assert "`torch 2.11.0` (missing on 1)" in markdown


def test_report_lists_the_versions_that_were_read_on_each_host() -> None:
    plan = uniform_plan("h1", "h2")
    evidence = builders.evidence(plan)
    readings = {
        "driver.version": {"host": "580.159.04"},
        "gpu.vbios_version": {"gpu=0": NEW, "gpu=1": OLD},
        "gpu.part_number": {"gpu=0": "692-2G520", "gpu=1": "692-2G520"},
        "gpu.power_limit_default": {"gpu=0": 700.0, "gpu=1": 700.0},
        "gpu.serial": {"gpu=0": "1", "gpu=1": "2"},
        "host.cpu.count": {"host": 192},
    }
    evidence["h1"] = with_readings(evidence["h1"], readings)
    first, second = merge(plan, evidence, (PACK,)).hosts
    assert first.software == {
        **builders.SOFTWARE,
        "driver.version": "580.159.04",
        "gpu.vbios_version[gpu=0]": NEW,
        "gpu.vbios_version[gpu=1]": OLD,
        "gpu.part_number": "692-2G520",
        "gpu.power_limit_default": "700",
        "host.cpu.count": "192",
    }
    assert second.software == builders.SOFTWARE


@pytest.mark.parametrize("hosts", [("h1", "h2", "h3"), FOUR])
def test_adapter_that_all_other_hosts_have_is_named_as_missing(hosts: tuple[str, ...]) -> None:
    plan = uniform_plan(*hosts)
    full = dict.fromkeys(BOARDS, "MT_0000000838")
    without = {scope: board for scope, board in full.items() if scope != "hca=mlx5_3"}
    evidence = evidence_with(plan, "infiniband.hca.board_id", dict.fromkeys(hosts, full) | {"h2": without})
    others = len(hosts) - 1
    expected = [("h2", "hca=mlx5_3", FAIL, f"not on this host; {others} other hosts have it")]
    assert not_passing(uniformity_verdicts(plan, evidence)) == expected
    more = evidence_with(plan, "infiniband.hca.board_id", dict.fromkeys(hosts, without) | {"h2": full})
    assert not_passing(uniformity_verdicts(plan, more)) == [], "an adapter that only one host has is no fault"


def test_pci_devices_except_drives_are_compared_by_slot() -> None:
    plan = uniform_plan("h1", "h2", "h3")
    evidence = builders.evidence(plan)
    kinds = {"pci=0000:19:00.0": "network", "pci=0000:1a:00.0": "nvme"}
    lanes = {"pci=0000:19:00.0": 16, "pci=0000:1a:00.0": 4}
    for host in evidence:
        width = dict.fromkeys(lanes, 2) if host == "h2" else lanes
        evidence[host] = with_readings(evidence[host], {"pcie.kind": kinds, "pcie.width": width})
    verdicts = not_passing(uniformity_verdicts(plan, evidence))
    assert [(host, scope) for host, scope, *_ in verdicts] == [("h2", "pci=0000:19:00.0")]


@pytest.mark.parametrize(
    ("gangs", "uncompared"),
    [({"h1": ""}, 1), ({"h1": "a", "h2": "a"}, 0), ({"h1": "a", "h2": "a", "h3": "b"}, 1), ({"h1": "a", "h2": "b"}, 2)],
)
def test_summary_counts_hosts_that_were_not_compared(gangs: dict[str, str], uncompared: int) -> None:
    plan = uniform_plan(*gangs)
    (report, *_) = merge(plan, builders.evidence(plan), (PACK,)).hosts
    reports = [replace(report, name=host) for host in gangs]
    plan = replace(plan, hosts=tuple(replace(host, gang=gangs[host.name]) for host in plan.hosts))
    lines = [f"{line.title}: {line.text}" for line in uncompared_hosts(plan, reports)]
    assert [line.partition(" (")[0] for line in lines] == (
        [
            f"Host comparison: NOT COMPARED{'' if uncompared == len(gangs) else f' on {uncompared} of {len(gangs)} hosts'}"
        ]
        if uncompared
        else []
    )
    assert uncompared_hosts(replace(plan, rehearsal=True), reports) == []


def test_equal_groups_that_share_one_object_in_memory_can_still_change_separately() -> None:
    def part(gang: str, value: Value) -> PartValue:
        return PartValue(key=("id", "a", "H200", gang, "gpu,"), what="GPU", value=value, kind=("id", "H200", gang))

    groups, other = ValueGroups(), ValueGroups()
    for gang, value in (("a", 1), ("b", 1), ("c", True), ("d", 1.0)):
        groups.add_part(part(gang, value))
    other.add_part(part("a", 2), parts=3)
    groups.share_equal_groups()
    groups.update(other)
    counts = {key[3]: repr(group.by_count()) for key, group in groups._groups.items()}
    assert counts == {"a": "((2, 3), (1, 1))", "b": "((1, 1),)", "c": "((True, 1),)", "d": "((1.0, 1),)"}


GIB = 1 << 30


def memory_failures(hosts: Mapping[str, tuple[int, Mapping[str, Any]]]) -> set[tuple[str, str, str]]:
    """Return host, scope and verdict of each size of a NUMA node that does not pass.

    `hosts`: host -> memory of the host, and numa=N -> memory of this node in GiB, or (status, reason).
    """
    plan = uniform_plan(*hosts)
    evidence = builders.evidence(plan)
    for host, (total, nodes) in hosts.items():
        sizes = {node: size if isinstance(size, tuple) else int(size * GIB) for node, size in nodes.items()}
        evidence[host] = with_readings(
            evidence[host], {"host.memory.total": {"host": total * GIB}, "host.numa.memory_total": sizes}, "B"
        )
    verdicts = uniformity_verdicts(plan, evidence)
    return {
        (item.host, item.scope, item.verdict)
        for item in verdicts
        if item.criterion == "uniform-numa-memory" and item.verdict != PASS
    }


@pytest.mark.parametrize(
    "sizes", [(14.09, 14.96, 11.09, 16.96), (4.71, 126.0, 126.0, 126.0), (123.0, 4.71, 14.71, 60.0), (10, 10, 10, 5)]
)
def test_sizes_of_nodes_that_have_only_a_part_of_the_memory_are_not_compared(sizes: tuple[float, ...]) -> None:
    """The machines are identical. The first sizes are those of real virtual machines with 126 GiB."""
    assert memory_failures({host: (126, {"numa=0": size}) for host, size in zip(FOUR, sizes, strict=True)}) == set()


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("lost", [0.05, 0.25, 1.0])
def test_node_that_lacks_memory_fails_although_all_nodes_together_have_the_memory_of_the_host(
    nodes: int, lost: float
) -> None:
    whole = dict.fromkeys([f"numa={node}" for node in range(nodes)], 512.0)
    fleet: dict[str, tuple[int, Mapping[str, Any]]] = dict.fromkeys(FOUR, (512 * nodes, whole))
    left = {**whole, f"numa={nodes - 1}": 512.0 * (1 - lost)}
    left = {node: size for node, size in left.items() if size} or {"numa=0": 256.0}
    fleet["h2"] = (int(sum(left.values())), left)
    assert memory_failures(fleet) == {("h2", f"numa={nodes - 1}", FAIL)}


@pytest.mark.parametrize("total", [64, 126])
def test_node_is_compared_if_the_host_reports_less_memory_than_its_nodes_have(total: int) -> None:
    """In a container, the memory of the host may be the limit of the container."""
    fleet = {host: (total, {"numa=0": 512.0, "numa=1": 512.0}) for host in FOUR}
    fleet["h3"] = (total, {"numa=0": 512.0, "numa=1": 448.0})
    assert memory_failures(fleet) == {("h3", "numa=1", FAIL)}


def test_node_whose_size_was_not_read_is_inconclusive_although_the_other_nodes_have_less_than_the_memory() -> None:
    fleet: dict[str, tuple[int, Mapping[str, Any]]] = {
        host: (1024, {"numa=0": 512.0, "numa=1": 512.0}) for host in FOUR
    }
    fleet["h4"] = (1024, {"numa=0": 512.0, "numa=1": ("error", "EIO")})
    assert memory_failures(fleet) == {("h4", "numa=1", INCONCLUSIVE)}
