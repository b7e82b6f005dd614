"""Test values of the inventory that no host has: the inventory is named, and no healthy part is blamed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
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
GPUS = 4
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
    """Return the causes of failures, without those that healthy hosts of `builders` have, too."""
    usual = {cause.problem for cause in report(lambda host: ports(400)).causes}
    return [cause for cause in found.causes if cause.verdict == FAIL and cause.problem not in usual]


def returned(found: FleetReport) -> list[tuple[str, str]]:
    """Return host and scope of each part for which `rackproof rma` writes a package, and which is not usual in `builders`."""
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


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
@pytest.mark.parametrize(("stated", "actual"), [(400, 200), (800, 400), (1600, 100), (400, 50)])
def test_rate_that_no_port_has_is_one_cause_and_blames_no_part(stated: int, actual: int, layer: str) -> None:
    found = report(lambda host: ports(actual, layer=layer), rackproof_fabric_gbps=stated)
    (cause,) = failed(found)
    assert found.decision == REJECTED
    assert (cause.problem, cause.action, cause.hosts) == ("inventory-fabric", "configure", HOSTS)
    rates = (
        f"has 4 fabric ports of {actual} Gb/s, but the inventory states {stated} Gb/s for the port of each of 4 GPUs"
    )
    assert rates in cause.title
    assert "rackproof_fabric_gbps" in cause.title
    assert found.causes[0] is cause
    assert returned(found) == []
    how = handling(cause)
    assert "not in Mb/s or GB/s" in how.now
    assert "new run" in how.now
    assert "check the rate of the switch ports, and the kind of all cables" in how.if_it_returns


def of_gang(found: FleetReport) -> list[str]:
    """Return the problems of the causes that contain the failed collectives between hosts."""
    names = [{found.verdicts[index].name for index in cause.verdicts} for cause in failed(found)]
    slow = zip(failed(found), names, strict=True)
    return [cause.problem for cause, of_cause in slow if any(name.startswith("collective.") for name in of_cause)]


def test_slow_gang_belongs_to_the_wrong_rate_only_if_its_ports_explain_it() -> None:
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

    found = report(of_host, rackproof_fabric_gbps=400)
    assert "inventory-fabric" not in {cause.problem for cause in failed(found)}
    assert {host for host, _ in returned(found)} == {"h2"}
    wrong = report(of_host, rackproof_fabric_gbps=800)
    (of_inventory,) = (cause for cause in failed(wrong) if cause.problem == "inventory-fabric")
    assert of_inventory.hosts == ("h1", "h3", "h4")
    assert {host for host, _ in returned(wrong)} == {"h2"}


def test_ports_that_are_down_on_every_host_are_not_explained_by_the_inventory() -> None:
    found = report(lambda host: ports(400, down=2), rackproof_fabric_gbps=400)
    assert "inventory-fabric" not in {cause.problem for cause in failed(found)}
    assert {host for host, _ in returned(found)} == {*HOSTS}


def test_unused_ports_do_not_hide_that_the_stated_rate_is_wrong() -> None:
    found = report(lambda host: ports(200, count=2 * GPUS, down=GPUS), rackproof_fabric_gbps=400)
    assert [cause.problem for cause in failed(found)] == ["inventory-fabric"]


def test_fewer_ports_than_gpus_are_stated_with_their_number() -> None:
    found = report(lambda host: ports(400, count=2), rackproof_fabric_gbps=400)
    (cause,) = failed(found)
    assert (
        "has 2 fabric ports of 400 Gb/s, but the inventory states 400 Gb/s for the port of each of 4 GPUs"
        in cause.title
    )


@pytest.mark.parametrize(("stated", "has_caveat"), [(50, True), (200, True), (399, False), (400, False)])
def test_ports_that_are_all_faster_than_stated_have_a_caveat(stated: int, has_caveat: bool) -> None:
    found = report(lambda host: ports(400), rackproof_fabric_gbps=stated)
    assert failed(found) == []
    texts = caveats(found)
    assert bool(texts) is has_caveat
    for text in texts:
        assert f"rackproof_fabric_gbps states {stated} Gb/s per port for 4 hosts" in text
        assert "at least 400 Gb/s" in text


def test_port_that_several_gpus_share_is_no_caveat() -> None:
    assert caveats(report(lambda host: ports(400, count=2), rackproof_fabric_gbps=200)) == []


# Units


@pytest.mark.parametrize(
    ("variable", "values", "right", "unit"),
    [("rackproof_fabric_gbps", (400_000, 3200), 400, "Line rate of one GPU's fabric port in Gb/s")],
)
def test_values_in_another_unit_are_refused(variable: str, values: tuple[float, ...], right: float, unit: str) -> None:
    check_variables({"h1": {variable: right}})
    for value in values:
        with pytest.raises(UsageError, match=f"host h1: {variable}.*{unit}"):
            check_variables({"h1": {variable: value}})
