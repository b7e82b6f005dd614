"""Test the methods of a plan: rates of fabrics, and the figures that a host must have.

A figure is the result of a benchmark. Its scope is the part of a host, or the gang (the hosts of one multi-node launch), that was
measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from schemas.baselines import PlannedBaseline
from schemas.catalogue import Expectation, expand
from schemas.plans import BenchmarkChoice, BudgetSelection, Part, Plan, Stage, expectations, plan_from_json
from schemas.records import to_json
from schemas.studies import Cell, Study
from schemas.waivers import Waiver
from tests import builders

PLAN = builders.plan("h1", "h2", "h3", gpu_count=2)


def with_rates(*gbps: float, gpus: Sequence[int] = (2, 2, 2)) -> Plan:
    """Return PLAN with a port rate in Gb/s (0: unknown) and a number of GPUs for each host, in the order of the hosts."""
    hosts = tuple(
        replace(host, fabric_gbps=rate, devices=tuple(range(count)))
        for host, rate, count in zip(PLAN.hosts, gbps, gpus, strict=True)
    )
    return replace(PLAN, hosts=hosts)


@pytest.mark.parametrize(
    ("gbps", "members", "port", "fabric"),
    [
        ((400.0, 400.0, 400.0), ("h1", "h2"), 50e9, 100e9),
        ((400.0, 200.0, 100.0), ("h1", "h2"), 25e9, 50e9),
        ((400.0, 200.0, 100.0), ("h1", "h2", "h3"), 12.5e9, 25e9),
        ((400.0, 200.0, 100.0), ("h1",), 50e9, 100e9),
        ((400.0, 200.0, 100.0), (), 50e9, 100e9),
        ((400.0, 0.0, 100.0), ("h1", "h2"), 50e9, 100e9),
        ((0.0, 0.0, 0.0), ("h1", "h2"), 0.0, 0.0),
        ((0.0, 200.0, 0.0), ("h1", "h2"), 25e9, 50e9),
    ],
)
def test_lowest_known_rate_of_the_members_limits_all_members(
    gbps: Sequence[float], members: tuple[str, ...], port: float, fabric: float
) -> None:
    """The methods return B/s: 400 Gb/s are 50e9 B/s. The fabric of a host has one port for each of its two GPUs."""
    plan = with_rates(*gbps)
    assert plan.slowest_port(plan.hosts[0], members) == port
    assert plan.slowest_fabric(plan.hosts[0], members) == fabric


def test_host_without_a_gang_has_the_rate_of_its_own_ports() -> None:
    rates = (400.0, *[100.0] * (len(PLAN.hosts) - 1))
    hosts = (replace(host, gang="", fabric_gbps=gbps) for host, gbps in zip(PLAN.hosts, rates, strict=True))
    alone = replace(PLAN, hosts=tuple(hosts))
    assert alone.slowest_port(alone.hosts[0], ("h1", "h2")) == 50e9
    assert alone.slowest_fabric(alone.hosts[0], ("h1", "h2")) == 100e9


def test_host_with_fewer_gpus_slows_the_fabric_even_if_all_ports_are_equally_fast() -> None:
    plan = with_rates(400.0, 400.0, 400.0, gpus=(4, 2, 2))
    assert plan.slowest_fabric(plan.hosts[0], ("h1", "h2")) == 100e9
    assert plan.slowest_port(plan.hosts[0], ("h1", "h2")) == 50e9


def test_slowest_port_is_found_even_if_all_hosts_have_the_same_total_rate() -> None:
    plan = with_rates(400.0, 200.0, 200.0, gpus=(2, 4, 4))
    assert plan.slowest_fabric(plan.hosts[0], ("h1", "h2")) == 100e9
    assert plan.slowest_port(plan.hosts[0], ("h1", "h2")) == 25e9


def test_number_of_ranks_is_the_number_of_devices_of_the_given_hosts() -> None:
    """A host that is given twice counts once. A host that is not in the plan does not count."""
    plan = with_rates(0, 0, 0, gpus=(4, 2, 1))
    assert plan.ranks(("h1", "h3")) == 5
    assert plan.ranks(("h1", "h1", "unknown")) == 4
    assert plan.ranks(()) == 0


def expected(name: str, scope: str, stage: str = "benchmark", **fields: Any) -> Expectation:
    return Expectation(name=name, scope=scope, stage=stage, params={}, **fields)


@pytest.mark.parametrize(
    ("item", "scopes"),
    [
        (expected("memory.bandwidth", "device"), ("gpu=0", "gpu=1")),
        (expected("peer_copy.bandwidth", "pair"), ("gpu=0,peer=1", "gpu=1,peer=0")),
        (expected("host_memory.nodes", "host"), ("host",)),
        (expected("local_storage.bandwidth", "directory"), ("directory=data:local",)),
        (expected("shared_storage.bandwidth", "directory", "gang"), ("directory=data:shared",)),
        (expected("collective.all_reduce.busbw", "world"), ("host",)),
        (expected("collective.all_reduce.busbw", "world", "gang"), ("gang=r1",)),
        (expected("pairs.bandwidth", "peers"), ()),
        (expected("pairs.bandwidth", "peers", "gang"),
         ("gpu=0,partner=h2", "gpu=1,partner=h2", "gpu=0,partner=h3", "gpu=1,partner=h3")),
    ],
)  # fmt: skip
def test_scopes_of_a_figure_on_a_host(item: Expectation, scopes: tuple[str, ...]) -> None:
    host = replace(PLAN.hosts[0], local_storage=("/data/local",), shared_storage=("/data/shared",))
    result = PLAN.scopes_of(host, item)
    assert sorted(result) == sorted(scopes)
    assert len(result) == len(scopes)


def test_pairs_use_only_the_gpus_that_every_host_of_the_gang_has() -> None:
    """The two GPUs of a pair have the same index on their hosts. h3 has only GPU 0. A host without a gang has no partners."""
    plan = with_rates(0, 0, 0, gpus=(4, 2, 1))
    result = plan.scopes_of(plan.hosts[0], expected("pairs.bandwidth", "peers", "gang"))
    assert {scope.split(",")[0] for scope in result} == {"gpu=0"}
    alone = replace(plan.hosts[0], gang="")
    assert plan.scopes_of(alone, expected("pairs.bandwidth", "peers", "gang")) == ()


def test_host_has_one_partner_in_one_round_of_pairs() -> None:
    stages = tuple(
        replace(stage, benchmarks={**stage.benchmarks, "pairs": {"rounds": 1}}) if stage.name == "gang" else stage
        for stage in PLAN.stages
    )
    result = replace(PLAN, stages=stages).scopes_of(PLAN.hosts[0], expected("pairs.bandwidth", "peers", "gang"))
    assert len({scope.split(",")[1] for scope in result}) == 1


def test_fewer_figures_are_expected_of_a_host_without_a_gang_or_with_one_gpu() -> None:
    alone, single = replace(PLAN.hosts[0], gang=""), replace(PLAN.hosts[0], devices=(0,))
    everything = PLAN.expected_of(PLAN.hosts[0])
    assert {item.stage for item in everything} == {"benchmark", "gang"}
    assert {item.stage for item in PLAN.expected_of(alone)} == {"benchmark"}
    assert not any(item.peers for item in PLAN.expected_of(single) if item.stage != "gang")
    assert any(item.peers for item in everything if item.stage != "gang")
    assert PLAN.expected_of(PLAN.hosts[1]) is everything  # from a cache: both hosts have a gang and two GPUs


@pytest.mark.parametrize(
    ("rehearsal", "required", "measures", "judged"),
    [
        (False, False, False, True), (True, False, True, False), (True, True, False, False), (True, True, True, True),
    ],
)  # fmt: skip
def test_ports_of_a_rehearsal_are_judged_only_if_they_are_measured_and_required(
    rehearsal: bool, required: bool, measures: bool, judged: bool
) -> None:
    """The ports of a run that is not a rehearsal are always judged."""
    benchmarks = {"verbs": {}} if measures else {"training": {}}
    plan = replace(builders.with_benchmarks(PLAN, benchmark=benchmarks), rehearsal=rehearsal)
    assert plan.judges_ports(replace(plan.hosts[0], verbs_required=required)) is judged


def test_plan_of_some_hosts_has_these_hosts_in_the_given_order() -> None:
    part = PLAN.only(["h3", "h1"])
    assert [host.name for host in part.hosts] == ["h3", "h1"]
    assert FULL.manifest
    assert FULL.only(["h1"]).manifest == ()
    assert part.gangs() == {"r1": ("h3", "h1")}
    assert PLAN.gangs() == {"r1": ("h1", "h2", "h3")}


def test_host_and_stage_are_found_by_name_and_an_unknown_name_raises_key_error() -> None:
    twice = replace(PLAN, hosts=(*PLAN.hosts, replace(PLAN.hosts[0], rack="other")))
    assert twice.host("h1").rack == "r1"  # of two hosts with the same name, the first one is returned
    with pytest.raises(KeyError):
        PLAN.host("h9")
    assert PLAN.stage("gang").name == "gang"
    with pytest.raises(KeyError, match="soak"):
        PLAN.stage("soak")


def test_longest_time_of_a_soak_is_its_duration_plus_the_deadline_of_one_round() -> None:
    """A soak repeats its benchmarks in rounds. A round that began before the end of the duration still runs to its end."""
    stage = Stage(name="soak", deadline_s=60.0, collective_timeout_s=1.0, benchmarks={}, duration_s=600.0)
    assert stage.longest_s == 660.0
    assert replace(stage, duration_s=0.0).longest_s == 60.0


def test_host_has_separate_directories_of_local_and_shared_storage() -> None:
    host = replace(PLAN.hosts[0], local_storage=("/a",), shared_storage=("/b", "/c"))
    assert host.directories("local_storage") == ("/a",)
    assert host.directories("shared_storage") == ("/b", "/c")


FULL = replace(  # a plan with optional fields that are empty in PLAN
    builders.plan("h1", "h2", gpu_count=2, rackproof_local_storage=["/a"], rackproof_shared_storage=["/b", "/c"]),
    manifest=(Part(host="h1", kind="gpu", serial="s1"),),
    waivers=(Waiver(criterion="c", who="me", why="known", until="2026-12-01", host="h1"),),
    baseline=PlannedBaseline(directory="/b", digest="0" * 64),
    choice=BudgetSelection(
        budget_s=60.0,
        cost_s=50.0,
        runs=2,
        items=(BenchmarkChoice(stage="benchmark", benchmark="gemm", chosen=True, cost_s=5.0, why="cheap"),),
    ),
    study=Study(cells=(Cell(hosts=2, gpus=1, batch_size=64, epochs=1, cpus=3, precision="bf16"),)),
)


def test_plan_is_unchanged_after_it_was_written_and_read() -> None:
    assert plan_from_json(json.loads(json.dumps(to_json(FULL)))) == FULL
    assert plan_from_json(json.loads(json.dumps(to_json(PLAN)))) == PLAN


def test_cell_of_a_study_has_its_gpus_and_settings() -> None:
    """A cell is one combination of settings of a scaling study. Cells are numbered from 1."""
    cell = FULL.of_cell(1)
    assert [host.devices for host in cell.hosts] == [(0,), (0,)]
    assert [(stage.name, stage.cpus) for stage in cell.stages] == [("cell", 3)]
    assert all(chosen["epochs"] == 1 for chosen in cell.stages[0].benchmarks.values())
    for number in (0, 2):
        with pytest.raises(KeyError, match=f"cell {number}"):
            FULL.of_cell(number)
    with pytest.raises(KeyError):
        PLAN.of_cell(1)


@pytest.mark.parametrize(("rehearsal", "device"), [(True, "cpu"), (False, "gpu")])
def test_rehearsal_expects_figures_of_processes_instead_of_gpus(rehearsal: bool, device: str) -> None:
    assert expectations(PLAN.stages, rehearsal=rehearsal) == tuple(
        item
        for stage in PLAN.stages
        for benchmark, chosen in stage.benchmarks.items()
        for item in expand(stage.name, benchmark, chosen, device)
    )
