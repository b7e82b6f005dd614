"""Parts are compared with the datasheet of their model and with the inventory. Their identities must differ between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet.judge.criteria import Pack, read_pack, shipped_packs
from fleet.judge.evidence import Evidence
from fleet.judge.judge import judge
from schemas.baselines import PlannedBaseline
from schemas.plans import Plan
from schemas.records import Metric
from schemas.reports import FAIL, INCONCLUSIVE, PASS
from tests import builders
from tests.unit.fleet.judge.small_fleet import host_evidence, one_figure_plan

MIB = 1 << 20
GB_PER_S = 1e9
PORT_RATE = 50 * GB_PER_S
"""Rate of a port of 400 Gb/s, in B/s."""
MODELS = [name for name in shipped_packs() if read_pack(name).gpu_names]
MEMORY_MIB = {
    "a10": 22731, "a100-pcie-40": 40536, "a100-pcie-80": 81251, "a100-sxm-40": 40536, "a100-sxm-80": 81251, "b200": 183359,
    "gb200": 189471, "h100-nvl": 95830, "h100-pcie": 81559, "h100-sxm": 81559, "h200-sxm": 143771, "l40s": 45634, "t4": 15109,
}  # fmt: skip
"""Model -> the least memory in MiB that nvidia-smi is known to report for a healthy part, with ECC on."""
CORES = {
    "a10": 72 * 128, "a100-pcie-40": 108 * 64, "a100-pcie-80": 108 * 64, "a100-sxm-40": 108 * 64, "a100-sxm-80": 108 * 64,
    "b200": 148 * 128, "b300": 148 * 128, "gb200": 152 * 128, "gb300": 152 * 128, "gh200": 132 * 128, "gh200-144": 132 * 128,
    "h100-nvl": 132 * 128, "h100-pcie": 114 * 128, "h100-sxm": 132 * 128, "h200-nvl": 132 * 128, "h200-sxm": 132 * 128,
    "l40s": 142 * 128, "rtx-pro-6000-server": 188 * 128, "t4": 40 * 64,
}  # fmt: skip
"""Model -> the number of cores of the part that is sold: SMs (multiProcessorCount, as users publish it) times cores per SM. A die
has more SMs than the part, because NVIDIA switches some off."""


def metric(name: str, values: Mapping[str, Any], unit: str = "1") -> Metric:
    return Metric(name=name, unit=unit, values=dict(values))


def failures(
    plan: Plan, pack: Pack, readings: Mapping[str, tuple[Metric, ...]], **over: Any
) -> list[tuple[str, str, str]]:
    """Return host, criterion and scope of each failed verdict on hosts with these readings."""
    evidence: dict[str, Evidence] = {}
    for host, metrics in readings.items():
        evidence[host] = host_evidence(plan, host, *metrics, **over)
    return [(item.host, item.criterion, item.scope) for item in judge(plan, evidence, (pack,)) if item.verdict == FAIL]


def pack_of(name: str, *ids: str) -> Pack:
    """Return the pack `name` with only the criteria `ids`. It applies to the GPU model that `builders` uses."""
    pack = read_pack(name)
    return replace(pack, gpu_names=("NVIDIA H200",), criteria=tuple(item for item in pack.criteria if item.id in ids))


SIZES = {
    "model-memory": ("gpu.memory.total", "memory_size", "B"),
    "model-cores": ("gpu.core_count", "cores", "1"),
    "model-memory-bus": ("gpu.memory.bus_width", "memory_bus", "1"),
    "model-sm-clock": ("gpu.clock.sm_max", "sm_clock", "Hz"),
    "model-memory-clock": ("gpu.clock.memory_max", "memory_clock", "Hz"),
}
"""Criterion -> the reading that it judges, the figure of the datasheet that is the reference, and the unit of both."""


@pytest.mark.parametrize("criterion", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_part_below_its_datasheet_fails_on_a_host_with_one_gpu(model: str, criterion: str) -> None:
    name, figure, unit = SIZES[criterion]
    plan = one_figure_plan(rackproof_gpu_model=model)
    pack = pack_of(model, criterion)

    def judged(value: float) -> bool:
        return bool(failures(plan, pack, {"h1": (metric(name, {"gpu=0": value}, unit),)}))

    if figure not in pack.datasheet:
        assert not judged(1), "a model without the figure must be compared with the fleet only"
        return
    nominal = pack.datasheet[figure]["value"]
    assert not judged(nominal)
    assert judged(nominal * 0.85), "a value that is 15 % below the datasheet must fail"


@pytest.mark.parametrize("model", MEMORY_MIB)
def test_least_memory_that_healthy_parts_report_passes(model: str) -> None:
    plan = one_figure_plan(rackproof_gpu_model=model)
    readings = {"h1": (metric("gpu.memory.total", {"gpu=0": MEMORY_MIB[model] * MIB}, "B"),)}
    assert failures(plan, pack_of(model, "model-memory"), readings) == []


@pytest.mark.parametrize("model", MODELS)
def test_number_of_cores_that_healthy_parts_report_passes(model: str) -> None:
    plan = one_figure_plan(rackproof_gpu_model=model)
    readings = {"h1": (metric("gpu.core_count", {"gpu=0": CORES[model]}),)}
    assert failures(plan, pack_of(model, "model-cores"), readings) == []


def ports(*, down: int = 0, rate: float = PORT_RATE, count: int = 8, **states: str) -> tuple[Metric, ...]:
    """Return the readings of `count` InfiniBand ports with this rate in B/s; the first `down` of them have no link."""
    scopes = [f"hca=mlx5_{index},port=1" for index in range(count)]
    up = scopes[down:]
    return (
        metric("infiniband.link_layer", dict.fromkeys(scopes, "InfiniBand")),
        metric("infiniband.state", {scope: "ACTIVE" if scope in up else "DOWN" for scope in scopes}),
        metric("infiniband.phys_state", {scope: "LinkUp" if scope in up else "Polling" for scope in scopes}),
        metric("infiniband.active", {scope: scope in up for scope in scopes}),
        metric("infiniband.rate", dict.fromkeys(up, rate), "B/s"),
    )


PORT_CRITERIA = ("fabric-ports-up", "fabric-ports-rate")


def port_failures(readings: tuple[Metric, ...], *hosts: str, **variables: Any) -> set[str]:
    """Return those of PORT_CRITERIA that fail if each host has these readings of ports. `hosts`: names; empty: h1 and h2."""
    names = hosts or ("h1", "h2")
    plan = one_figure_plan(*names, gpu_count=8, **{"rackproof_gang": "none", **variables})
    if variables.get("rackproof_gang"):
        plan = replace(plan, hosts=tuple(replace(host, gang="all") for host in plan.hosts))
    result = failures(plan, pack_of("h200-sxm", *PORT_CRITERIA), dict.fromkeys(names, readings))
    assert {scope for _, _, scope in result} <= {"host"}
    return {criterion for _, criterion, _ in result}


def test_ports_that_the_inventory_states_must_be_up() -> None:
    assert port_failures(ports(), rackproof_infiniband_ports=8) == set()
    assert port_failures(ports(down=1), rackproof_infiniband_ports=8) == {"fabric-ports-up"}
    assert port_failures(ports(down=1), rackproof_infiniband_ports=7) == set()
    assert port_failures(ports(down=8)) == set(), (
        "ports must not be required if the inventory states none and no gang uses them"
    )


def test_host_of_a_gang_on_the_fabric_fails_if_all_its_ports_are_down() -> None:
    on_fabric = {"rackproof_gang": "all", "rackproof_fabric_gbps": 400}
    assert port_failures(ports(), **on_fabric) == set()
    assert port_failures(ports(down=8), **on_fabric) == {*PORT_CRITERIA}
    assert port_failures((), **on_fabric) == set(), "InfiniBand ports must not be required of a host with Ethernet only"


def test_all_ports_together_must_have_the_rate_that_the_inventory_states() -> None:
    """`rackproof_fabric_gbps` is the rate for each GPU. The host has 8 GPUs and 8 ports."""
    assert port_failures(ports(), rackproof_fabric_gbps=400) == set()
    assert port_failures(ports(rate=PORT_RATE / 2), rackproof_fabric_gbps=400) == {"fabric-ports-rate"}
    assert port_failures(ports(rate=PORT_RATE / 2), rackproof_fabric_gbps=200) == set()
    storage = metric("network.speed", {"nic=eth0": 12.5 * GB_PER_S}, "B/s")
    assert port_failures((*ports(), storage), rackproof_fabric_gbps=400) == set()


@pytest.mark.parametrize("slow", [{"down": 1}, {"rate": PORT_RATE * 0.9}], ids=["one is down", "all are slow"])
def test_ethernet_ports_do_not_hide_slow_infiniband_ports(slow: dict[str, Any]) -> None:
    storage = metric("network.speed", {"nic=eth0": PORT_RATE, "nic=eth1": PORT_RATE}, "B/s")
    assert port_failures((*ports(**slow), storage), rackproof_fabric_gbps=400) == {"fabric-ports-rate"}


@pytest.mark.parametrize("bad_reading", ["infiniband.state", "infiniband.phys_state", "infiniband.active"])
def test_each_of_the_three_state_readings_can_show_that_ports_are_down(bad_reading: str) -> None:
    """The other two readings report that the ports are up, as in an edited record."""
    bad = {"infiniband.state": "DOWN", "infiniband.phys_state": "Polling", "infiniband.active": False}[bad_reading]
    readings = tuple(
        replace(item, values=dict.fromkeys(item.values, bad)) if item.name == bad_reading else item for item in ports()
    )
    assert port_failures(readings, rackproof_infiniband_ports=8) == {"fabric-ports-up"}


def test_port_whose_state_was_not_read_is_neither_up_nor_down() -> None:
    readings = {item.name: item for item in ports()}
    for name in ("infiniband.state", "infiniband.phys_state", "infiniband.active"):
        known = {scope: value for scope, value in readings[name].values.items() if scope != "hca=mlx5_3,port=1"}
        readings[name] = replace(readings[name], values=known, absent={"hca=mlx5_3,port=1": "error: no such file"})
    plan = one_figure_plan("h1", rackproof_infiniband_ports=8, rackproof_gang="none")
    evidence = {"h1": host_evidence(plan, "h1", *readings.values())}
    judged = judge(plan, evidence, [pack_of("h200-sxm", "fabric-ports-up")])
    (verdict,) = [item for item in judged if item.criterion == "fabric-ports-up"]
    assert (verdict.verdict, "the state of hca=mlx5_3,port=1 was not read" in verdict.reason) == (INCONCLUSIVE, True)


@pytest.mark.parametrize(
    ("stated", "actual", "passes"),
    [("580", "580.159.04", True), ("580.159.04", "580.159.04", True), ("58", "580.159.04", False), ("570", "580.159.04", False),
     ("", "580.159.04", True)],
)  # fmt: skip
def test_driver_must_be_the_one_that_the_inventory_states(stated: str, actual: str, passes: bool) -> None:
    variables = {"nvidia_driver_version": stated} if stated else {}
    plan = one_figure_plan(**variables)
    readings = {"h1": (metric("driver.version", {"host": actual}),)}
    assert (failures(plan, pack_of("h200-sxm", "driver-version"), readings) == []) is passes
    ignored = one_figure_plan(nvidia_driver_state="ignored", **variables)
    assert failures(ignored, pack_of("h200-sxm", "driver-version"), readings) == []


def test_vbios_must_be_the_one_that_the_inventory_states() -> None:
    plan = one_figure_plan(gpu_count=2, rackproof_vbios_version="96.00.BC")
    readings = {"h1": (metric("gpu.vbios_version", {"gpu=0": "96.00.BC.00.03", "gpu=1": "96.00.A5.00.01"}),)}
    pack = pack_of("h200-sxm", "vbios-version")
    assert failures(plan, pack, readings) == [("h1", "vbios-version", "gpu=1")]


@pytest.mark.parametrize(
    ("name", "value", "is_found"),
    [
        ("infiniband.hca.node_guid", "b8ce:f603:00aa:0001", True),
        ("infiniband.hca.node_guid", "0000:0000:0000:0000", False),
        ("network.address", "b8:ce:f6:aa:00:01", True),
        ("network.address", "02:42:ac:11:00:02", False),  # locally administered, as in a container or a virtual machine
    ],
)
def test_adapter_address_that_two_hosts_report_fails_on_both(name: str, value: str, is_found: bool) -> None:
    label = "hca" if "hca" in name else "nic"
    plan = one_figure_plan("h1", "h2", "h3")
    own = {host: f"b8:ce:f6:00:00:0{host[1]}" for host in ("h1", "h2", "h3")}
    readings = {
        host: (metric(name, {f"{label}=a": own[host], f"{label}=b": value if host != "h2" else own[host]}),)
        for host in own
    }
    expected = [("h1", "identity-unique", f"{label}=b"), ("h3", "identity-unique", f"{label}=b")]
    assert failures(plan, pack_of("h200-sxm"), readings) == (expected if is_found else [])
    rehearsal = replace(plan, rehearsal=True)
    pack = replace(pack_of("h200-sxm"), name="rehearsal")
    assert failures(rehearsal, pack, readings) == [], "the hosts of a rehearsal may be one machine"
    required = [replace(host, verbs_required=True) for host in plan.hosts]
    stages = [replace(stage, benchmarks={**stage.benchmarks, "verbs": {}}) for stage in plan.stages]
    with_ports = replace(rehearsal, hosts=tuple(required), stages=tuple(stages))
    assert failures(with_ports, pack, readings) == (expected if is_found else [])


def test_limits_of_lifetime_counts_are_stricter_for_new_parts() -> None:
    readings = {"h1": (metric("gpu.remapped_rows.uncorrectable", {"gpu=0": 300}),)}
    plan, pack = one_figure_plan(), pack_of("h200-sxm", "new-remapped-uncorrectable", "row-remap-uncorrectable")
    assert failures(plan, pack, readings) == [("h1", "new-remapped-uncorrectable", "gpu=0")]
    in_service = (
        replace(plan, profile="revalidate"),
        replace(plan, stages=()),
        replace(plan, baseline=PlannedBaseline(directory="accepted", digest="0")),
    )
    for other in in_service:
        assert failures(other, pack, readings) == []
    few = {"h1": (metric("gpu.remapped_rows.uncorrectable", {"gpu=0": 8}),)}
    assert {item.verdict for item in judge(plan, {"h1": host_evidence(plan, "h1", *few["h1"])}, (pack,))} == {PASS}
    assert builders.HEALTHY["gpu.remapped_rows.uncorrectable"] == ("1", 0)
