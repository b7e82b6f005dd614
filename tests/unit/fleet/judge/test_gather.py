"""Gather the statistics of hosts that share a layout. The result must equal that of adding the hosts one by one.

Hosts share a layout if their benchmarks made the same observations, whatever the values. Hosts for which `is_regular` is false
share no layout: they are always added one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fleet.judge import gather
from fleet.judge import paths as nccl_paths
from fleet.judge.criteria import Criterion, Pack, VsBaseline, read_packs
from fleet.judge.evidence import Evidence, Planned
from fleet.judge.fleet_stats import FleetStats
from fleet.judge.gather import Gatherer
from fleet.judge.host_view import HostView
from fleet.judge.judge import host_views
from fleet.judge.paths import slow_transport
from fleet.judge.uniformity import DEVICE, HOST
from fleet.records.load import load
from fleet.simulate.fleet import Fleet, write_run
from fleet.simulate.records import JUDGED
from schemas.plans import Plan
from schemas.records import ERROR, Metric, Observation, Record
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, one_figure_plan, pack, reading
from tests.unit.fleet.judge.test_pass_layouts import count as count_passes
from tests.unit.fleet.judge.test_passes import (
    BUSBW,
    BUSBW_FLOOR,
    CLOCK,
    FLOOR,
    FRACTION,
    LINKS,
    NCCL,
    PAIRS,
    SPEED,
    VERSION,
    fleet,
    gang_figure,
    gang_fleet,
    gang_plan,
    healthy_record,
    sorted_statistics,
    with_constant_readings,
    with_figure,
    with_first_pair,
    with_first_pair_twice,
    with_launch,
    with_more,
    without,
)

PLAN = one_figure_plan("h1", "h2", "h3")
GANGS = gang_plan(4, 2)
ALL = [host.name for host in PLAN.hosts]
Change = Callable[[Record], Record]


@cache
def gangs() -> dict[str, Evidence]:
    return gang_fleet(GANGS)


def slow_paths(stats: FleetStats) -> tuple[Any, ...]:
    """Return the paths that reach their limit, and the best value of each path whose limit depends on the fleet.

    A path (`fleet.judge.paths.Path`) is a bandwidth with the transport over which it was measured. Fast transports are left out:
    they are not gathered, because a fast transport never explains a failure.
    """
    passing = {path for path in stats.paths._passing if has_slow_transport(path)}
    best = {key: value for key, (_, value) in stats.paths._best.items() if has_slow_transport(key[0])}
    return passing, best


def has_slow_transport(path: nccl_paths.Path) -> bool:
    return bool(slow_transport(path[-1], within=path[2] != "gang"))


def gathered(
    *rules: Criterion,
    plan: Plan = PLAN,
    packs: list[Pack] | None = None,
    evidence: Mapping[str, Evidence] | None = None,
) -> list[str]:
    """Add a fleet to a Gatherer. Return the hosts that it added one by one, instead of together with hosts of the same layout.

    Check that the statistics are the same if all hosts are added one by one.
    """
    views = host_views(plan, dict(evidence or fleet(plan)), packs or [pack(*rules)])
    plain = FleetStats(Planned(plan))
    for view in views:
        plain.add_identities(view)
        plain.add_values(view)
    gatherer, alone = Gatherer(Planned(plan)), []

    def add_values(view: HostView, add: Callable[[HostView], None] = gatherer._stats.add_values) -> None:
        alone.append(view.host.name)
        add(view)

    gatherer._stats.add_values = add_values  # type: ignore[method-assign]
    for view in views:
        gatherer.add(view)
    stats = gatherer.finish()
    assert sorted_statistics(stats) == sorted_statistics(plain)
    assert len(stats.links) == len(views)
    if not alone:
        paths = [*stats.paths._passing, *(path for path, *_ in stats.paths._best)]
        assert all(map(has_slow_transport, paths)), "a path over a fast transport was gathered"
    assert slow_paths(stats) == slow_paths(plain)
    return alone


def on_hosts(*changes: Change) -> dict[str, Evidence]:
    """Return evidence of the hosts of PLAN. The first of `changes` is applied to h1, the second to h2, the third to h3."""
    return fleet(PLAN, **dict(zip(ALL, changes, strict=True)))


RANK = builders.observation("straggler.compute", 0.5, scope="gpu=0", unit="s")
INFINITE = float("inf")


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ([with_figure(SPEED), with_figure(SPEED + 1), with_figure(SPEED + 2)], []),
        ([with_figure(SPEED), with_figure("fast"), with_figure(SPEED)], []),
        ([with_figure("fast"), with_figure(SPEED), with_figure(SPEED)], []),
        ([with_figure(True), with_figure(SPEED), with_figure(SPEED)], ["h1"]),
        ([with_figure(SPEED), with_figure(True), with_figure(7)], ["h2"]),
        ([with_figure(SPEED), with_figure(None, status=ERROR, reason="no"), with_figure(SPEED)], []),
        ([with_launch(), with_launch(outcome="failed", reason="why"), with_launch()], ["h2"]),
        ([with_more(RANK), with_more(replace(RANK, value=0.7)), with_more(replace(RANK, value=1))], []),
        ([with_more(RANK), with_more(replace(RANK, value="slow")), with_more(replace(RANK, value=True))], ["h3"]),
        ([with_more(RANK, replace(RANK, value=0.2))] * 3, []),
        ([with_constant_readings(clock=1.5e9), with_constant_readings(clock=1.4e9), with_constant_readings(clock=1.3e9)], []),
        ([with_constant_readings(clock=1.5e9), with_constant_readings(clock="low"), with_constant_readings(clock=1.5e9)], []),
        ([with_constant_readings(version="570"), with_constant_readings(version="550"), with_constant_readings()], []),
        ([with_constant_readings(links=18), with_constant_readings(links=True), with_constant_readings(links=18.0)], []),
        ([with_constant_readings(version=None), with_constant_readings(), with_constant_readings()], []),
    ],
)  # fmt: skip
def test_host_is_added_by_itself_if_a_figure_is_a_boolean_or_a_launch_failed(
    changes: list[Change], alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = (FLOOR, FRACTION, CLOCK, VERSION, LINKS, NCCL)
    assert gathered(*rules, evidence=on_hosts(*changes)) == alone
    monkeypatch.setattr(gather, "MAX_PENDING", 2)
    assert gathered(*rules, evidence=on_hosts(*changes)) == alone


def test_values_of_max_pending_hosts_are_added_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "MAX_PENDING", 2)
    gatherer, counts = Gatherer(Planned(PLAN)), []
    for view in host_views(PLAN, fleet(PLAN), [pack(FRACTION)]):
        gatherer.add(view)
        counts.append(
            sum(len(values) for of_key in gatherer._stats.figures._values.values() for values in of_key.values())
        )
    assert counts == [0, 2, 2]


def test_finish_also_finishes_two_parts_of_the_statistics() -> None:
    """`support` counts the hosts that it has not counted yet. `groups` lets equal groups share one object, to save memory."""
    plan = replace(PLAN, hosts=tuple(replace(host, rack=f"r-{host.name}") for host in PLAN.hosts))
    gatherer, calls = Gatherer(Planned(plan)), []
    gatherer._stats.support.finish = lambda: calls.append("support")  # type: ignore[method-assign]
    gatherer._stats.groups.share_equal_groups = lambda: calls.append("groups")  # type: ignore[method-assign]
    assert gatherer.finish() is gatherer._stats
    assert calls == ["support", "groups"]


def test_readings_of_records_that_the_quick_reader_did_not_read_are_counted() -> None:
    """The quick reader (`schemas.quick`) reads equal readings of several records as one object. These records share no object."""

    def record(name: str, **changes: Any) -> Evidence:
        return Evidence(records=(with_constant_readings(**changes)(healthy_record(name, PLAN)),))

    evidence = {"h1": record("h1"), "h2": record("h2", version="550", clock=1.4e9), "h3": record("h3", version="550")}
    assert gathered(VERSION, CLOCK, LINKS, NCCL, evidence=evidence) == []


def test_host_with_an_infinite_or_nan_figure_is_added_by_itself() -> None:
    """The test does not use the quick reader, so that all hosts share a layout.

    The quick reader refuses infinite numbers. A host that it refuses shares no layout with a host that it reads.
    """
    for odd in (INFINITE, float("nan")):
        changes = {name: with_figure(odd if name == "h2" else SPEED) for name in ALL}
        evidence = {name: Evidence(records=(change(healthy_record(name, PLAN)),)) for name, change in changes.items()}
        assert gathered(FLOOR, FRACTION, evidence=evidence) == ["h2"]


@pytest.mark.parametrize(
    "rule",
    [
        FLOOR,
        FRACTION,
        replace(FLOOR, value=None, same_as_fleet=True),
        replace(FLOOR, value=None, same_as_fleet=True, among="rack"),
        replace(FLOOR, value=None, same_as_fleet=True, among=DEVICE),
        replace(FLOOR, value=None, same_as_fleet=True, among=HOST),
        replace(FLOOR, value=None, same_as_fleet=False),
        replace(LINKS, among=HOST),
        replace(LINKS, among="rack"),
        replace(VERSION, same_as_fleet=False),
        criterion("gpu.*", id="any", operator="ge", fleet_fraction=0.5),
        criterion("gpu.nothing", id="none", value=None, same_as_fleet=True),
    ],
    ids=range(12),
)
def test_figures_and_readings_are_counted_for_each_kind_of_criterion(rule: Criterion) -> None:
    changes = {"h2": with_figure(SPEED + 1), "h3": with_figure(None, status=ERROR, reason="no")}
    racks = replace(PLAN, hosts=tuple(replace(host, rack=f"r-{host.name}") for host in PLAN.hosts))
    for plan in (PLAN, racks):
        assert gathered(rule, plan=plan) == []
        assert gathered(rule, plan=plan, evidence=fleet(plan, **changes)) == []


def test_readings_that_differ_are_counted_for_the_hosts_that_have_them() -> None:
    plan = one_figure_plan(*[f"h{at}" for at in range(1, 7)])
    racks = replace(plan, hosts=tuple(replace(host, rack="r1" if host.name < "h4" else "r2") for host in plan.hosts))
    other = with_constant_readings(version="550", clock=1.4e9)
    changed = fleet(racks, h3=other, h4=other, h6=other)
    for among in ("", "rack", "gang"):
        rule = replace(VERSION, among=among) if among else VERSION
        assert gathered(rule, CLOCK, replace(LINKS, among=among or "fleet"), plan=racks, evidence=changed) == []


def test_equal_readings_of_several_parts_of_a_host_are_all_counted() -> None:
    plan = one_figure_plan("h1", "h2", "h3", gpu_count=2)
    links = Metric(name="gpu.links", unit="1", values={"gpu=0": 18, "gpu=1": 18})
    odd = Metric(name="gpu.links", unit="1", values={"gpu=0": 18, "gpu=1": True})
    clocks = Metric(name="gpu.clock", unit="1", values={"gpu=0": 1.5, "gpu=1": 1.5})
    evidence = fleet(
        plan,
        h1=with_constant_readings(links=links, clock=clocks),
        h2=with_constant_readings(links=odd, clock=clocks),
        h3=with_constant_readings(links=links, clock=replace(clocks, values={"gpu=0": 1.5, "gpu=1": 1.25})),
    )
    assert gathered(LINKS, CLOCK, plan=plan, evidence=evidence) == []


def test_optical_modules_are_compared_with_those_of_their_model() -> None:
    rule = criterion("optics.rx_power", id="rx", scope="", operator="ge", fleet_fraction=0.5)

    def module(model: str, power: float) -> Change:
        more = {
            "model": reading(model, name="optics.module.part_number", scope="port=0"),
            "power": reading(power, name="optics.rx_power", scope="port=0,lane=1"),
        }
        return with_constant_readings(**more)

    assert gathered(rule, evidence=on_hosts(module("A", 1.0), module("B", 1.0), module("A", 1.0))) == []
    assert gathered(rule, evidence=on_hosts(module("A", 1.0), module("A", 2.0), module("B", 2.0))) == []


def test_firmware_of_adapters_is_compared_within_the_kind_of_their_boards() -> None:
    """Two hosts have equal readings of the firmware, but different boards."""
    name, scope = "infiniband.hca.firmware_version", "hca=mlx5_0"
    rule = criterion(name, id="firmware", scope="hca", value=None, same_as_fleet=True)

    def adapter(model: str, version: str) -> Change:
        more = {
            "model": reading(model, name="infiniband.hca.board_id", scope=scope),
            "version": reading(version, name=name, scope=scope),
        }
        return with_constant_readings(**more)

    assert gathered(rule, evidence=on_hosts(adapter("A", "1"), adapter("B", "1"), adapter("A", "1"))) == []
    assert gathered(rule, evidence=on_hosts(adapter("A", "1"), adapter("A", "2"), adapter("B", "2"))) == []
    equal = count_passes(rule, evidence=on_hosts(adapter("A", "1"), adapter("A", "1"), adapter("B", "1")))
    assert equal.left() == {}
    differing = count_passes(rule, evidence=on_hosts(adapter("A", "1"), adapter("B", "2"), adapter("A", "2")))
    assert differing.left() == {"h1": ["firmware"], "h3": ["firmware"]}, "h2 is the only host with its kind of board"


def test_sizes_of_nodes_are_counted_only_on_hosts_whose_nodes_have_the_whole_memory() -> None:
    """Hosts have equal nodes, but the nodes of some have only a part of the memory."""
    name = "host.numa.memory_total"
    rule = criterion(name, id="nodes", scope="numa", value=None, operator="ge", same_as_fleet=True, optional=True)

    def memory(total: int, size: int) -> Change:
        more = {
            "total": reading(total, name="host.memory.total", scope="host"),
            "size": reading(size, name=name, scope="numa=0"),
        }
        return with_constant_readings(**more)

    for hosts in (
        ((8, 8), (16, 8), (8, 8)),
        ((16, 8), (8, 8), (8, 8)),
        ((8, 8), (16, 4), (8, 2)),
        ((16, 2), (16, 4), (16, 4)),
    ):
        assert gathered(rule, evidence=on_hosts(*(memory(*values) for values in hosts))) == []
    counted = count_passes(rule, evidence=on_hosts(memory(8, 8), memory(16, 4), memory(8, 8)))
    assert counted.left() == {}
    assert counted.remaining["h1"].passes == counted.remaining["h3"].passes == counted.remaining["h2"].passes + 1


# Bandwidths and transports


def bandwidth(*values: Any, transport: str = "SHM/direct", of_launch: str = "", size: int = 8, **over: Any) -> Change:
    """Return a change that adds a bandwidth over a transport to the record of a host.

    Args:
        values: one value for each repetition of the measurement.
        transport: parameter `transport` of the bandwidth; empty: the bandwidth has no such parameter.
        of_launch: value of the figure `collective.transport`; empty: there is no such figure.
        size: size of the message in bytes.
        over: fields of the observation.
    """
    name = "collective.all_reduce.busbw"
    params: dict[str, Any] = {"size_bytes": size, "transport": transport} if transport else {"size_bytes": size}
    items = [
        replace(builders.observation(name, value, scope="host", unit="B/s"), params=params, **over) for value in values
    ]
    way = builders.observation("collective.transport", of_launch, scope="host")
    return with_more(*items, *([way] if of_launch else []))


HOST_FLOOR = replace(BUSBW_FLOOR, scope="host", value=1e10)
HOST_FRACTION = replace(BUSBW, scope="host")


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ([bandwidth(3e10), bandwidth(2e10), bandwidth(3e9)], []),
        ([bandwidth(3e9), bandwidth(3e9), bandwidth(3e9)], []),
        ([bandwidth(3e10, 3e9), bandwidth(3e9, 2e9), bandwidth(3e9, 4e9)], []),
        ([bandwidth(3e10, 3e9), bandwidth(3e10, 2e10), bandwidth(3e9, 2e9)], []),
        ([bandwidth(3e10, of_launch="NET/Socket"), bandwidth(3e10, of_launch="P2P/IPC"), bandwidth(3e10)], []),
        ([bandwidth(3e10, transport="P2P/IPC")] * 3, []),
        ([bandwidth(3e10, transport="")] * 3, []),
        ([bandwidth(3e10, transport="", of_launch="SHM")] * 3, []),
        ([bandwidth(3e10, size=16), bandwidth(3e10), bandwidth(3e9)], []),
        ([bandwidth(3e10), bandwidth("fast"), bandwidth(True)], ["h3"]),
        ([bandwidth(3e9, 3e9), bandwidth(True, 3e10), bandwidth(3e9, 3e9)], []),
        ([bandwidth(3e10), bandwidth(INFINITE, 3e10), bandwidth(3e10, INFINITE)], ["h3"]),
    ],
    ids=range(12),
)
def test_paths_over_slow_transports_are_gathered(changes: list[Change], alone: list[str]) -> None:
    evidence = on_hosts(*changes)
    assert gathered(HOST_FRACTION, evidence=evidence) == alone
    for rule in (
        HOST_FLOOR, replace(HOST_FLOOR, best_of_run=True), replace(HOST_FRACTION, best_of_run=True),
        replace(HOST_FRACTION, by_position=True), replace(HOST_FLOOR, operator="le"), replace(HOST_FRACTION, operator="le"),
        replace(HOST_FLOOR, value=None, variable="fabric_bytes_per_second"),
    ):  # fmt: skip
        gathered(rule, evidence=evidence)


@pytest.mark.parametrize(
    ("rule", "is_alone"),
    [
        (HOST_FLOOR, False),
        (replace(HOST_FLOOR, delta=True), True),
        (replace(HOST_FLOOR, value=None, baseline=VsBaseline(fraction=0.9)), False),
        (replace(HOST_FLOOR, name="memory.bandwidth", delta=True), False),
        (replace(HOST_FLOOR, value=None, same_as_fleet=False), False),
    ],
    ids=range(5),
)
def test_hosts_are_added_one_by_one_if_a_criterion_judges_the_change_of_a_collective_bandwidth(
    rule: Criterion, is_alone: bool
) -> None:
    assert gathered(rule, evidence=on_hosts(*[bandwidth(3e10)] * 3)) == (ALL if is_alone else [])


def test_bandwidth_with_an_error_has_no_path() -> None:
    lost = with_more(
        Observation(
            name="collective.all_reduce.busbw", scope="host", stage="benchmark", unit="B/s", status=ERROR, reason="no"
        )
    )
    assert gathered(HOST_FLOOR, HOST_FRACTION, evidence=on_hosts(lost, lost, bandwidth(3e10))) == []
    params: dict[str, Any] = {"size_bytes": 8, "transport": "SHM/direct"}

    def repeated(record: Record) -> Record:
        changed = bandwidth(3e10)(lost(record))
        items = [replace(item, params=params) if item.status == ERROR else item for item in changed.observations]
        return replace(record, observations=tuple(items))

    assert gathered(HOST_FLOOR, HOST_FRACTION, evidence=on_hosts(repeated, repeated, repeated)) == []


def test_transport_is_ignored_if_it_has_no_value_or_another_scope_or_stage() -> None:
    way = builders.observation("collective.transport", "SHM/direct", scope="host")
    for other in (
        replace(way, scope="gpu=0"),
        replace(way, stage="gang"),
        replace(way, status=ERROR, value=None, reason="no"),
    ):
        for of_launch in ("P2P/IPC", ""):
            change, more = bandwidth(3e10, transport="P2P", of_launch=of_launch), with_more(other)
            evidence = {name: Evidence(records=(more(change(healthy_record(name, PLAN))),)) for name in ALL}
            assert gathered(HOST_FLOOR, HOST_FRACTION, evidence=evidence) == []


def test_gathered_statistics_include_paths_and_links() -> None:
    views = host_views(PLAN, on_hosts(*[bandwidth(3e10)] * 3), [pack(HOST_FRACTION, FRACTION)])
    stats = gather.gather(Planned(PLAN), views)
    assert {path[-1] for path in stats.paths.paths} == {"SHM/direct"}
    assert len(stats.links) == 3


# Gangs


def test_figures_of_gangs_are_counted_once_for_each_gang() -> None:
    assert gathered(BUSBW, BUSBW_FLOOR, FRACTION, plan=GANGS, evidence=gangs()) == []
    host_record, gang_record = gangs()["h1"].records
    slower = gang_figure("collective.all_reduce.busbw", 3e11)(gang_record)
    assert gathered(BUSBW, plan=GANGS, evidence={**gangs(), "h1": Evidence(records=(host_record, slower))}) == []
    assert gathered(PAIRS, plan=GANGS, evidence=gangs()) == []


@pytest.mark.parametrize(
    "change",
    [
        with_first_pair(value=3e10),
        with_first_pair(value=None, status=ERROR, reason="no"),
        with_first_pair(value=True),
        with_first_pair(value=INFINITE),
        with_first_pair_twice,
        without(PAIRS.name),
    ],
)
def test_figures_of_pairs_are_counted_although_each_host_has_different_partners(change: Change) -> None:
    rule = replace(PAIRS, value=None, fleet_fraction=0.5)
    assert gathered(rule, plan=GANGS, evidence=gangs()) == []
    host_record, gang_record = gangs()["h2"].records
    changed = {**gangs(), "h2": Evidence(records=(host_record, change(gang_record)))}
    assert gathered(rule, FLOOR, plan=GANGS, evidence=changed) == []


def test_figures_of_pairs_are_counted_if_the_first_host_has_infinite_ones() -> None:
    """The test does not use the quick reader, so that all hosts share a layout.

    The quick reader refuses infinite numbers. A host that it refuses shares no layout with a host that it reads.
    """

    def copied(name: str, record: Record) -> Record:
        items = [
            replace(item, value=INFINITE if (name, item.name) == ("h1", PAIRS.name) else item.value)
            for item in record.observations
        ]
        return replace(record, observations=tuple(items))

    evidence = {
        name: Evidence(records=tuple(copied(name, record) for record in of_host.records))
        for name, of_host in gangs().items()
    }
    assert gathered(replace(PAIRS, value=None, fleet_fraction=0.5), plan=GANGS, evidence=evidence) == []


@pytest.mark.parametrize("profile", ["smoke", "standard", "extended"])
def test_healthy_hosts_share_a_layout_with_the_shipped_criteria(profile: str, tmp_path: Path) -> None:
    simulated = Fleet(profile=profile, readings=JUDGED, gpus=2, hosts=2)
    plan = simulated.plan("run", "2026-11-21T04:00:00Z")
    write_run(tmp_path / "run", simulated, (), plan, jobs=1)
    run = load(tmp_path / "run")
    assert gathered(plan=run.plan, packs=list(read_packs([])), evidence=run.evidence) == []
