"""Test values of the inventory that no host has: the inventory is named, and no healthy part is blamed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest

from fleet.diagnosis.handling import handling
from fleet.inventory.ansible import check_variables
from fleet.judge.criteria import read_packs
from fleet.judge.evidence import Evidence
from fleet.report.merge import merge
from fleet.rma.parts import failed_parts
from schemas.errors import UsageError
from schemas.readings import READINGS
from schemas.records import Metric, Observation, Record, Value
from schemas.reports import FAIL, REJECTED, Cause, FleetReport, LineKind
from tests import builders

PACKS = read_packs([])
HOSTS = ("h1", "h2", "h3", "h4")
GPUS = 2
GBPS = 1e9 / 8
Readings = Mapping[str, Mapping[str, Value]]
"""Name of a reading -> scope -> value."""


def report(
    readings: Callable[[str], Readings],
    change: Callable[[Observation], Observation] = lambda item: item,
    hosts: tuple[str, ...] = HOSTS,
    profile: str = "smoke",
    **variables: Any,
) -> FleetReport:
    """Return the report on healthy hosts with these additional readings.

    Args:
        readings: host -> readings of every snapshot.
        change: applied to each figure.
        hosts: names of the hosts, which form a gang.
        profile: name of the profile.
        variables: variables of the inventory.
    """
    plan = builders.plan(*hosts, profile=profile, gpu_count=GPUS, rackproof_gang="all", **variables)
    evidence = {}
    for host, of_host in builders.evidence(plan).items():
        records = tuple(_with_readings(record, readings(host)) for record in of_host.records)
        evidence[host] = builders.with_observations(Evidence(records=records), change, gang=True)
    return merge(plan, evidence, PACKS)


def _with_readings(record: Record, readings: Readings) -> Record:
    metrics = [Metric(name=name, unit=READINGS[name].unit, values=values) for name, values in readings.items()]
    return replace(
        record,
        snapshots=tuple(
            replace(item, metrics=(*(old for old in item.metrics if old.name not in readings), *metrics))
            for item in record.snapshots
        ),
    )


def failed(found: FleetReport) -> list[Cause]:
    """Return the causes of failures that healthy hosts of `builders` do not have."""
    usual = usual_problems()
    return [cause for cause in found.causes if cause.verdict == FAIL and cause.problem not in usual]


@cache
def usual_problems() -> frozenset[str]:
    """Return the problems of the causes that healthy hosts of `builders` have."""
    return frozenset(cause.problem for cause in report(lambda host: ports(400)).causes)


def returned(found: FleetReport) -> list[tuple[str, str]]:
    """Return host and scope of each part for which `rackproof rma` writes a package because of causes that `failed` returns."""
    parts = failed_parts(failed(found), found.verdicts)
    return [(part.host, part.scope) for part in parts if part.needs_part_work]


def caveats(found: FleetReport) -> list[str]:
    lines = found.acceptance.lines
    return [line.text for line in lines if line.kind == LineKind.CAVEAT and line.title == "Inventory"]


# The rate of the fabric ports


def ports(gbps: float, *, count: int = GPUS, down: int = 0, slow: int = 0, layer: str = "InfiniBand") -> Readings:
    """Return the readings of `count` ports of this rate. The first `down` have no link; the next `slow` have half the rate."""
    scopes = [f"hca=mlx5_{index},port=1" for index in range(count)]
    up = {scope: number >= down for number, scope in enumerate(scopes)}
    rates = {scope: gbps * GBPS / (2 if number < down + slow else 1) for number, scope in enumerate(scopes)}
    return {
        "infiniband.link_layer": dict.fromkeys(scopes, layer),
        "infiniband.state": {scope: "ACTIVE" if up[scope] else "DOWN" for scope in scopes},
        "infiniband.phys_state": {scope: "LinkUp" if up[scope] else "Polling" for scope in scopes},
        "infiniband.active": up,
        "infiniband.rate": {scope: rate for scope, rate in rates.items() if up[scope]},
    }


def slower_gang(factor: float) -> Callable[[Observation], Observation]:
    """Return a change of figures: collectives between hosts have their rate divided by `factor`."""

    def change(item: Observation) -> Observation:
        is_rate = (
            item.stage == "gang" and item.name.startswith("collective.") and item.name.endswith(("busbw", "algbw"))
        )
        return replace(item, value=item.value / factor) if is_rate and isinstance(item.value, float) else item

    return change


@pytest.mark.parametrize(
    ("stated", "actual", "layer"), [(400, 200, "InfiniBand"), (1600, 100, "Ethernet"), (400, 50, "InfiniBand")]
)
def test_rate_that_no_port_has_is_one_cause_and_blames_no_part(stated: int, actual: int, layer: str) -> None:
    result = report(lambda host: ports(actual, layer=layer), rackproof_fabric_gbps=stated)
    (cause,) = failed(result)
    assert result.decision == REJECTED
    assert (cause.problem, cause.action, cause.hosts) == ("inventory-fabric", "configure", HOSTS)
    rates = (
        f"has 2 fabric ports of {actual} Gb/s, but the inventory states {stated} Gb/s for the port of each of 2 GPUs"
    )
    assert rates in cause.title
    assert "rackproof_fabric_gbps" in cause.title
    assert result.causes[0] is cause
    assert returned(result) == []
    how = handling(cause)
    assert "not in Mb/s or GB/s" in how.now
    assert "new run" in how.now
    assert "check the rate of the switch ports, and the kind of all cables" in how.if_it_returns


def of_gang(found: FleetReport) -> list[str]:
    """Return the problems of the causes that contain the failed collectives between hosts."""
    names = [{found.verdicts[index].name for index in cause.verdicts} for cause in failed(found)]
    slow = zip(failed(found), names, strict=True)
    return [cause.problem for cause, of_cause in slow if any(name.startswith("collective.") for name in of_cause)]


def test_slow_collectives_belong_to_the_inventory_cause_only_if_the_rate_of_the_ports_explains_them() -> None:
    def judged(factor: float, gbps: float) -> FleetReport:
        return report(lambda host: ports(400), slower_gang(factor), profile="standard", rackproof_fabric_gbps=gbps)

    as_fast_as_ports = judged(factor=3, gbps=1600)
    assert of_gang(as_fast_as_ports) == ["inventory-fabric"]
    assert of_gang(judged(factor=3, gbps=400)) == []
    slower = judged(factor=30, gbps=1600)
    assert "slow-network" in of_gang(slower)


@pytest.mark.parametrize("fault", [{"down": 1}, {"slow": 1}], ids=["port without a link", "port of half the rate"])
def test_port_at_fault_on_one_host_is_still_named(fault: dict[str, int]) -> None:
    def of_host(host: str) -> Readings:
        return ports(400, **fault) if host == "h2" else ports(400)

    result = report(of_host, rackproof_fabric_gbps=400)
    assert "inventory-fabric" not in {cause.problem for cause in failed(result)}
    assert {host for host, _ in returned(result)} == {"h2"}
    wrong = report(of_host, rackproof_fabric_gbps=800)
    (of_inventory,) = (cause for cause in failed(wrong) if cause.problem == "inventory-fabric")
    assert of_inventory.hosts == ("h1", "h3", "h4")
    assert {host for host, _ in returned(wrong)} == {"h2"}


def test_ports_that_are_down_on_every_host_are_not_explained_by_the_inventory() -> None:
    result = report(lambda host: ports(400, down=1), rackproof_fabric_gbps=400)
    assert "inventory-fabric" not in {cause.problem for cause in failed(result)}
    assert {host for host, _ in returned(result)} == {*HOSTS}


def test_unused_ports_do_not_hide_that_the_stated_rate_is_wrong() -> None:
    result = report(lambda host: ports(200, count=2 * GPUS, down=GPUS), rackproof_fabric_gbps=400)
    assert [cause.problem for cause in failed(result)] == ["inventory-fabric"]


def test_fewer_ports_than_gpus_are_stated_with_their_number() -> None:
    result = report(lambda host: ports(400, count=1), rackproof_fabric_gbps=400)
    (cause,) = failed(result)
    assert (
        "has 1 fabric port of 400 Gb/s, but the inventory states 400 Gb/s for the port of each of 2 GPUs" in cause.title
    )


@pytest.mark.parametrize(("stated", "has_caveat"), [(50, True), (200, True), (399, False), (400, False)])
def test_ports_that_are_all_faster_than_stated_have_a_caveat(stated: int, has_caveat: bool) -> None:
    result = report(lambda host: ports(400), rackproof_fabric_gbps=stated)
    assert failed(result) == []
    texts = caveats(result)
    assert bool(texts) is has_caveat
    for text in texts:
        assert f"rackproof_fabric_gbps states {stated} Gb/s per port for 4 hosts" in text
        assert "at least 400 Gb/s" in text


def test_port_that_several_gpus_share_is_no_caveat() -> None:
    assert caveats(report(lambda host: ports(400, count=1), rackproof_fabric_gbps=200)) == []


# Other values of the inventory


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A variable of the inventory, and what hosts have instead of its value."""

    variable: str
    value: Any
    right: Any
    readings: Readings
    """The readings of a host that does not have the stated value."""
    other: Readings
    """The readings of a host that is worse than the others."""
    title: str


STATED = (
    Stated(
        variable="rackproof_dimm_count",
        value=32,
        right=24,
        readings={"host.dimm.count": {"host": 24}},
        other={"host.dimm.count": {"host": 23}},
        title="has the number of memory modules 24, but the inventory states 32",
    ),
    Stated(
        variable="rackproof_memory_mts",
        value=5600,
        right=4800,
        readings={"host.memory.speed": {"host": 4.8e9}},
        other={"host.memory.speed": {"host": 4.4e9}},
        title="has the memory speed 4800 MT/s, but the inventory states 5600 MT/s",
    ),
    Stated(
        variable="rackproof_infiniband_ports",
        value=4,
        right=2,
        readings=ports(400),
        other=ports(400, down=1),
        title="has the number of RDMA ports that are up 2, but the inventory states 4",
    ),
    Stated(
        variable="rackproof_vbios_version",
        value="97",
        right="96",
        readings={"gpu.vbios_version": {f"gpu={index}": "96.1" for index in range(GPUS)}},
        other={"gpu.vbios_version": {f"gpu={index}": "95.1" for index in range(GPUS)}},
        title="has the VBIOS version 96.1, but the inventory states 97",
    ),
    Stated(
        variable="nvidia_driver_version",
        value="580",
        right="570",
        readings={"driver.version": {"host": "570.1"}},
        other={"driver.version": {"host": "565.1"}},
        title="has the driver version 570.1, but the inventory states 580",
    ),
)
each_value = pytest.mark.parametrize("stated", STATED, ids=lambda stated: stated.variable)


@each_value
def test_value_that_no_host_has_is_one_cause_and_blames_no_part(stated: Stated) -> None:
    result = report(lambda host: stated.readings, **{stated.variable: stated.value})
    (cause,) = (cause for cause in failed(result) if cause.problem == "inventory")
    assert result.decision == REJECTED
    assert (cause.action, cause.hosts) == ("configure", HOSTS)
    assert stated.title in cause.title
    assert stated.variable in cause.why
    assert returned(result) == []
    how = handling(cause)
    assert "unit" in how.now
    assert "new run" in how.now
    assert "No single part is at fault" in how.if_it_returns
    right = report(lambda host: stated.readings, **{stated.variable: stated.right})
    assert [cause for cause in failed(right) if cause.problem == "inventory"] == []


@each_value
def test_host_that_differs_from_the_others_keeps_its_own_cause(stated: Stated) -> None:
    def of_host(host: str) -> Readings:
        return stated.other if host == "h2" else stated.readings

    expected: tuple[tuple[Any, set[tuple[str, ...]]], ...] = (
        (stated.value, {("h1", "h3", "h4")}),
        (stated.right, set()),
    )
    for value, hosts in expected:
        result = report(of_host, **{stated.variable: value})
        assert {cause.hosts for cause in failed(result) if cause.problem == "inventory"} == hosts
        others = [cause for cause in failed(result) if cause.problem != "inventory"]
        assert {cause.hosts for cause in others} == {("h2",)}


@each_value
def test_value_that_some_host_has_is_not_wrong(stated: Stated) -> None:
    factor = 1e6 if stated.variable == "rackproof_memory_mts" else 1
    best = {name: dict.fromkeys(values, stated.value * factor) for name, values in stated.readings.items()}
    best = dict(ports(400, count=4)) if stated.variable == "rackproof_infiniband_ports" else best
    result = report(lambda host: best if host == "h1" else stated.readings, **{stated.variable: stated.value})
    assert "inventory" not in {cause.problem for cause in failed(result)}
    assert {host for cause in failed(result) for host in cause.hosts} >= {"h2", "h3", "h4"}


@each_value
def test_two_hosts_are_too_few_to_call_the_inventory_wrong(stated: Stated) -> None:
    result = report(lambda host: stated.readings, hosts=("h1", "h2"), **{stated.variable: stated.value})
    assert failed(result) != []
    assert "inventory" not in {cause.problem for cause in failed(result)}


def test_hosts_with_another_stated_value_are_judged_on_their_own() -> None:
    hosts = ("h1", "h2", "h3", "h4", "h5", "h6")
    plan = builders.plan(*hosts, profile="smoke", gpu_count=GPUS, rackproof_gang="none")
    counts = {host: 32 if host in ("h1", "h2", "h3") else 24 for host in hosts}
    plan = replace(plan, hosts=tuple(replace(host, dimm_count=counts[host.name]) for host in plan.hosts))
    (cause,) = failed(merge(plan, _with_all(builders.evidence(plan), {"host.dimm.count": {"host": 24}}), PACKS))
    assert (cause.problem, cause.hosts) == ("inventory", ("h1", "h2", "h3"))


def _with_all(evidence: Mapping[str, Evidence], readings: Readings) -> dict[str, Evidence]:
    """Return the evidence with these readings in every snapshot of every host."""
    return {
        host: Evidence(records=tuple(_with_readings(record, readings) for record in of_host.records))
        for host, of_host in evidence.items()
    }


def report_on_memory(rates: Mapping[str, float], stated: float) -> FleetReport:
    """Return the report on hosts with these memory bandwidths.

    Args:
        rates: host -> measured bandwidth in GB/s.
        stated: bandwidth in GB/s that the inventory requires of each host.
    """
    plan = builders.plan(*rates, gpu_count=GPUS, rackproof_gang="none", rackproof_host_memory_gbyteps=stated)

    def with_rate(item: Observation, gbps: float) -> Observation:
        return replace(item, value=gbps * 1e9) if item.name == "host_memory.total_bandwidth" else item

    evidence = {
        host: builders.with_observations(of_host, partial(with_rate, gbps=rates[host]))
        for host, of_host in builders.evidence(plan).items()
    }
    return merge(plan, evidence, PACKS)


def test_bandwidth_of_memory_that_no_host_reaches_is_one_cause() -> None:
    rates = {"h1": 350.0, "h2": 360.0, "h3": 355.0, "h4": 345.0}
    result = report_on_memory(rates, stated=400)
    (cause,) = failed(result)
    assert (cause.problem, cause.action, {*cause.hosts}) == ("inventory", "configure", {*HOSTS})
    assert cause.hosts[0] == "h4", "the host that is farthest from the limit comes first"
    assert returned(result) == []
    slow = failed(report_on_memory({**rates, "h4": 250.0}, stated=400))
    assert {host for cause in slow if cause.problem == "inventory" for host in cause.hosts} == {"h1", "h2", "h3"}
    assert {cause.hosts for cause in slow if cause.problem != "inventory"} == {("h4",)}


@pytest.mark.parametrize("actual", [1, 4])
def test_number_of_gpus_that_no_host_has_is_one_cause(actual: int) -> None:
    plan = builders.plan(*HOSTS, profile="smoke", gpu_count=GPUS, rackproof_gang="none")
    evidence = builders.evidence(builders.plan(*HOSTS, profile="smoke", gpu_count=actual, rackproof_gang="none"))
    result = merge(plan, evidence, PACKS)
    (cause,) = failed(result)
    assert (cause.problem, cause.action, cause.hosts) == ("inventory-gpu-count", "configure", HOSTS)
    assert f"has the number of GPUs {actual}, but the inventory states 2" in cause.title
    assert "rackproof_gpu_count" in cause.why
    assert returned(result) == []


def test_gpus_that_the_driver_lost_on_every_host_are_missing() -> None:
    plan = builders.plan(*HOSTS, profile="smoke", gpu_count=GPUS, rackproof_gang="none")
    evidence = builders.evidence(builders.plan(*HOSTS, profile="smoke", gpu_count=GPUS - 1, rackproof_gang="none"))
    causes = failed(merge(plan, _with_all(evidence, {"gpu.pci_count": {"host": GPUS}}), PACKS))
    assert {cause.problem for cause in causes} == {"gpu-missing"}
    assert {host for cause in causes for host in cause.hosts} == {*HOSTS}


@pytest.mark.parametrize(
    ("variable", "value", "readings", "text"),
    [
        ("rackproof_memory_mts", 2400, {"host.memory.speed": {"host": 4.8e9}}, "at least 4800 MT/s"),
        ("rackproof_dimm_count", 16, {"host.dimm.count": {"host": 32}}, "at least 32 memory modules"),
    ],
)
def test_value_that_every_host_exceeds_has_a_caveat(variable: str, value: int, readings: Readings, text: str) -> None:
    (caveat,) = caveats(report(lambda host: readings, **{variable: value}))
    assert variable in caveat
    assert text in caveat
    factor = 1e6 if variable == "rackproof_memory_mts" else 1
    as_stated = {name: {"host": value * factor} for name in readings}
    assert caveats(report(lambda host: as_stated if host == "h3" else readings, **{variable: value})) == []


# Units


@pytest.mark.parametrize(
    ("variable", "values", "right", "unit"),
    [
        ("rackproof_fabric_gbps", (400_000, 3200), 400, "Line rate of one GPU's fabric port in Gb/s"),
        ("rackproof_memory_mts", (5.6, 5_600_000_000), 5600, "in MT/s"),
        ("rackproof_host_memory_gbyteps", (0.36, 360_000), 360, "in GB/s"),
        ("rackproof_dimm_count", (1024,), 32, "Number of memory modules"),
        ("rackproof_infiniband_ports", (400,), 8, "Number of InfiniBand and RoCE ports"),
        ("rackproof_storage_floors", ({"local_read": 7000},), {"local_read": 7}, "in GiB/s"),
    ],
)
def test_values_in_another_unit_are_refused(variable: str, values: tuple[Any, ...], right: Any, unit: str) -> None:
    check_variables({"h1": {variable: right}})
    for value in values:
        with pytest.raises(UsageError, match=f"host h1: {variable}.*{unit}"):
            check_variables({"h1": {variable: value}})
