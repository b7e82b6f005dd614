"""Figures of a host must fit each other, the plan and their samples: test each rule just inside and just outside its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from agent.benchmarks.memory.host_memory import HostMemory
from agent.benchmarks.runtime.numa import Node
from agent.benchmarks.storage import target
from fleet.judge.figure_consistency import PartnerStructures, figure_problems, figure_structure
from fleet.judge.host_view import HostView
from schemas.plans import Plan
from schemas.records import SKIPPED, Metric, Observation, Samples
from tests import builders
from tests.unit.fleet.judge.small_fleet import criterion, host_evidence, host_view, one_figure_plan, pack

PLAN = one_figure_plan("h1", gpu_count=2)
REHEARSAL = replace(PLAN, rehearsal=True)
GANG = builders.plan("h1", "h2", profile="smoke", gpu_count=2)
VIEW = host_view(PLAN)
Problem = tuple[str, str, str]


def figure(name: str, value: Any, scope: str = "gpu=0", **params: Any) -> Observation:
    return builders.observation(name, value, scope=scope, **params)


def absent(item: Observation) -> Observation:
    return replace(item, status=SKIPPED, value=None, reason="no")


def problems(*items: Observation, view: HostView = VIEW, is_soak: bool = False) -> list[Problem]:
    """Return name, scope and reason of each problem of the figures."""
    result = list(figure_problems(view, items, figure_structure(view, items, is_soak=is_soak)))
    assert {stage for *_, stage in result} <= {item.stage for item in items}
    return [(name, scope, reason) for name, scope, reason, _ in result]


def reasons(*items: Observation, view: HostView = VIEW, is_soak: bool = False) -> list[str]:
    return [reason for *_, reason in problems(*items, view=view, is_soak=is_soak)]


GEMM = figure("gemm.throughput", 5e14, dtype="bf16", size=8192, world_size=2)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, [("gemm.throughput", "gpu=0", "the record has this figure 2 times")]),
        ({"scope": "gpu=1"}, []),
        ({"params": {**GEMM.params, "dtype": "fp8"}}, []),
        ({"stage": "soak"}, []),
    ],
    ids=["same figure twice", "other device", "other parameters", "other stage"],
)
def test_figure_may_be_in_the_record_only_once_for_each_launch(other: dict[str, Any], expected: list[Problem]) -> None:
    assert problems(GEMM, replace(GEMM, **other)) == expected


def test_repeated_launch_may_repeat_figures() -> None:
    launches = (builders.launch("benchmark", ("h1",), devices=2),) * 2
    view = host_view(PLAN, launches=launches)
    assert problems(GEMM, GEMM, view=view) == []
    assert reasons(GEMM, GEMM, GEMM, view=view) == ["the record has this figure 3 times"]
    # The second launch has its own list of figures (`Launch.observations`). So the list of the record has only those of the first
    # launch, and may have each figure only once.
    one_with_own_figures = (launches[0], replace(launches[0], observations=(GEMM,)))
    assert reasons(GEMM, GEMM, view=host_view(PLAN, launches=one_with_own_figures)) == [
        "the record has this figure 2 times"
    ]


def test_figures_that_were_not_measured_are_not_checked() -> None:
    assert problems(absent(GEMM), absent(GEMM)) == []
    assert problems(replace(absent(GEMM), unit="W", params={"size": -1})) == []


def test_figures_of_one_name_must_state_the_same_parameters_except_optional_ones() -> None:
    less = replace(GEMM, scope="gpu=1", params={key: value for key, value in GEMM.params.items() if key != "size"})
    assert ("gemm.throughput", "gpu=1", "only some figures of this name have the parameter size") in problems(
        GEMM, less
    )
    more = replace(GEMM, scope="gpu=1", params={**GEMM.params, "algorithm": "ring"})
    assert problems(GEMM, more) == []


SAMPLES = Samples(n=10, min=4.9e14, p50=5e14, max=5.1e14, cv=0.01)


def test_either_all_figures_of_one_name_have_samples_or_none() -> None:
    other = replace(GEMM, scope="gpu=1")
    assert problems(replace(GEMM, samples=SAMPLES), replace(other, samples=SAMPLES)) == []
    reason = "only some figures of this name have samples"
    assert problems(replace(GEMM, samples=SAMPLES), other) == [("gemm.throughput", "gpu=1", reason)]
    assert problems(replace(GEMM, samples=SAMPLES), other, is_soak=True) == []


@pytest.mark.parametrize(
    ("value", "samples", "reason"),
    [
        (5.0, {}, ""),
        (4.0, {}, ""),
        (6.0, {}, ""),
        (6.006, {}, ""),
        (6.007, {}, "the value 6.007 is not between the lowest sample, 4, and the highest, 6"),
        (3.994, {}, ""),
        (3.993, {}, "the value 3.993 is not between the lowest sample, 4, and the highest, 6"),
        (5.0, {"p50": 6.006}, ""),
        (5.0, {"p50": 6.007}, "the median 6.007 of the samples is not between the lowest, 4, and the highest, 6"),
        (5.0, {"p50": 3.993}, "the median 3.993 of the samples is not between the lowest, 4, and the highest, 6"),
        (5.0, {"n": 1, "min": 5.0, "max": 5.0, "cv": 0.0}, ""),
        (5.0, {"n": 0, "min": 5.0, "max": 5.0, "cv": 0.0}, "it has 0 samples, but needs at least 1"),
        (5.0, {"n": 6, "precision": 0.01}, ""),
        (5.0, {"n": 5, "precision": 0.01}, "it has 5 samples, but needs at least 6 for its `precision`"),
        (5.0, {"min": -0.5}, "a sample is negative: -0.5"),
        (5.0, {"min": 0.0, "p50": -0.001, "cv": 9.0}, "a sample is negative: -0.001"),
        (5.0, {"min": 0.0, "cv": 9.0}, ""),
        (5.0, {"cv": 0.5}, ""),
        (
            5.0,
            {"cv": 0.502},
            "the coefficient of variation 0.502 is too high: 10 samples between 4 and 6 have at most 0.501",
        ),
        (5.0, {"cv": 0.074}, ""),
        (
            5.0,
            {"cv": 0.073},
            "the coefficient of variation 0.073 is too low: 10 samples between 4 and 6 have at least 0.0734611",
        ),
    ],
)
def test_value_must_fit_its_samples(value: float, samples: dict[str, Any], reason: str) -> None:
    taken = Samples(**{"n": 10, "min": 4.0, "p50": 5.0, "max": 6.0, "cv": 0.2, **samples})
    assert reasons(replace(figure("gemm.throughput", value), samples=taken)) == ([reason] if reason else [])


def test_samples_of_a_soak_may_vary_less_because_they_are_means_of_rounds() -> None:
    item = replace(figure("gemm.throughput", 5.0), samples=Samples(n=10, min=4.0, p50=5.0, max=6.0, cv=0.016))
    assert len(reasons(item)) == 1
    assert reasons(item, is_soak=True) == []
    item = replace(item, samples=Samples(n=10, min=4.0, p50=5.0, max=6.0, cv=0.015))
    assert len(reasons(item, is_soak=True)) == 1


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"size": 0}, ""),
        ({"size": -1}, "its parameter size is -1, but must not be negative"),
        ({"size": -0.5}, "its parameter size is -0.5, but must not be negative"),
        ({"placement": "-1"}, ""),
        ({"size_bytes": 8, "moved_bytes": 8, "world_size": 2}, ""),
        ({"size_bytes": 8, "moved_bytes": 15, "world_size": 2}, ""),
        ({"size_bytes": 8, "moved_bytes": 16, "world_size": 2},
         "moved_bytes is 16, but it must differ from size_bytes, 8, by less than 8 (4 for each rank)"),
        ({"size_bytes": 8, "moved_bytes": 8.0, "world_size": 2},
         "moved_bytes is 8.0, which is not an integer"),
        ({"size_bytes": "8", "moved_bytes": 99, "world_size": 2}, ""),
        ({"size_bytes": 8, "moved_bytes": 99}, ""),
        ({"replicas": 1, "left_out": 0, "world_size": 2}, ""),
        ({"replicas": 0, "left_out": 1, "world_size": 1}, ""),
        ({"replicas": 0, "left_out": 2, "world_size": 2},
         "world_size is 2, replicas is 0, left_out is 2: world_size must be 2 * replicas + left_out, and left_out "
         "at most the number of hosts"),
        ({"replicas": 2, "left_out": 0, "world_size": 2},
         "world_size is 2, replicas is 2, left_out is 0: world_size must be 2 * replicas + left_out, and left_out "
         "at most the number of hosts"),
        ({"replicas": 1, "left_out": 0.0, "world_size": 2}, "world_size 2, replicas 1 and left_out 0.0 must all be integers"),
        ({"replicas": 1, "world_size": 2}, "world_size 2, replicas 1 and left_out None must all be integers"),
        ({"left_out": 1, "world_size": 2}, "world_size 2, replicas None and left_out 1 must all be integers"),
    ],
)  # fmt: skip
def test_impossible_parameters_of_a_figure_are_reported(params: dict[str, Any], reason: str) -> None:
    view = host_view(PLAN, launches=())
    item = figure("site.figure", 1.0, **params)
    assert reasons(item, view=view) == ([reason] if reason else [])


@pytest.mark.parametrize(("left_out", "is_possible"), [(2, True), (3, False)])
def test_at_most_one_rank_of_each_host_has_no_replica(left_out: int, is_possible: bool) -> None:
    """A replica is two neighbouring ranks of one host. `left_out`: ranks without a replica, of two hosts together."""
    ranks = 2 + left_out
    item = replace(figure("site.figure", 1.0, replicas=1, left_out=left_out, world_size=ranks), stage="gang")
    view = HostView(GANG, GANG.hosts[0], replace(host_evidence(PLAN), records=()), ())
    assert (reasons(item, view=view) == []) is is_possible


def with_settings(**settings: Any) -> Plan:
    return builders.with_benchmarks(PLAN, benchmark={"training": settings})


@pytest.mark.parametrize(
    ("stated", "planned", "reason"),
    [
        (20, {}, ""),
        (20, {"epochs": 20}, ""),
        (19, {"epochs": 20}, "epochs is 19, but the plan has 20"),
        (19, {"epochs": 20, "max_steps": 0}, "epochs is 19, but the plan has 20"),
        (19, {"epochs": 20, "max_steps": 5}, ""),
        (21, {"epochs": 20, "max_steps": 5}, "epochs is 21, but the plan has 20"),
        (0, {"epochs": 20, "max_steps": 5}, "epochs is 0, but the plan has 20"),
        ("19", {"epochs": 20, "max_steps": 5}, "epochs is 19, but the plan has 20"),
    ],
)
def test_epochs_are_those_of_the_plan_or_fewer_if_the_steps_are_limited(
    stated: Any, planned: dict[str, Any], reason: str
) -> None:
    view = host_view(with_settings(**planned) if planned else PLAN)
    assert reasons(figure("training.accuracy", 0.9, epochs=stated), view=view) == ([reason] if reason else [])


def test_parameter_may_have_any_of_the_values_that_the_plan_lists() -> None:
    view = host_view(builders.with_benchmarks(PLAN, benchmark={"dataloader": {"workers": [2, 4]}}))
    assert reasons(figure("dataloader.throughput", 1e4, workers=4), view=view) == []
    assert reasons(figure("dataloader.throughput", 1e4, workers=8), view=view) == [
        "workers is 8, but the plan has [2, 4]"
    ]


def on_two_gpus(name: str, first: Any, second: Any, **params: Any) -> list[Observation]:
    return [figure(name, first, **params), figure(name, second, "gpu=1", **params)]


@pytest.mark.parametrize("key", ["backend", "data", "workload", "network", "batch_size"])
def test_devices_of_a_host_must_be_measured_in_the_same_way(key: str) -> None:
    same = on_two_gpus("memory.bandwidth", 4e12, 4e12, op="copy", **{key: 4})
    other = replace(same[1], params={"op": "copy", key: 5})
    assert problems(*same) == []
    assert problems(same[0], other) == [("memory.bandwidth", "gpu=1", f"{key} is 5, but it is 4 on gpu=0")]
    assert problems(same[0], replace(other, params={"op": "read", key: 5})) == []
    lacks = f"only some figures of this name have the parameter {key}"
    assert reasons(same[0], replace(other, params={"op": "copy"})) == [lacks]


def test_numa_nodes_with_unequal_numbers_of_processors_may_have_unequal_sizes_and_rates() -> None:
    nodes = [
        Node(number=0, cpus=tuple(range(32)), free=1 << 30, cache=1, farthest=1),
        Node(number=1, cpus=(32,), free=1 << 30, cache=1, farthest=0),
    ]
    test = HostMemory(nodes, dict.fromkeys(range(33), torch.zeros(3, 8)), seconds=1.0, timeout_s=1.0)
    items = [
        figure("host_memory.bandwidth", 1.2e10 * len(node.cpus), f"numa={node.number}", placement="local",
               memory_node=node.number, **test.params("copy", node.cpus, [node]))
        for node in nodes
    ]  # fmt: skip
    assert len({item.params["size_bytes"] for item in items}) == 2
    assert problems(*items, view=host_view(builders.plan("h1", profile="standard", rackproof_gang="none"))) == []


def test_directories_may_differ_in_whether_their_disks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        path: {"work": path, "free": 1 << 40, "direct": True, "disks": disks, "pool": path, "filesystem": "xfs"}
        for path, disks in (("/scratch", ["nvme0n1"]), ("/home", []))
    }
    monkeypatch.setattr(target, "run_directory_program", lambda context, commands: answers)
    targets = target.prepare_targets(Mock(), [*answers])
    targets[1].about["first_wrong"] = "block 3"
    items = [
        figure("local_storage.wrong_blocks", number, each.scope, sharing="together", **each.about)
        for number, each in enumerate(targets)
    ]
    assert items[0].params.keys() != items[1].params.keys()
    assert problems(*items) == []


BOTH = "1e+13 and 2.1e+14 FLOP/s of two devices cannot both be right: one is more than 20 times the other"
TOO_HIGH = (
    "2.1e+14 FLOP/s is not credible: it is more than 20 times the lower median of the host's devices, 1e+13 FLOP/s"
)


def on_gpus(*values: Any, name: str = "gemm.throughput") -> list[Observation]:
    return [figure(name, value, f"gpu={at}") for at, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1e13, 2e14), []),
        ((1e13, 2.1e14), [("host", BOTH)]),
        ((2.1e14, 1e13), [("host", BOTH)]),
        ((1e13, 1e13, 2e14), []),
        ((1e13, 1e13, 2.1e14), [("gpu=2", TOO_HIGH)]),
        ((1e13, 2.1e14, 2.1e14), []),
        ((1e13, 1e13, 2.1e14, 2.1e14),
         [("gpu=2", TOO_HIGH),
          ("gpu=3", TOO_HIGH)]),
        ((0.0, 2.1e14), []),
        ((0.0, 1e13, 1e13), []),
        ((2.1e14,), []),
    ],
)  # fmt: skip
def test_rate_of_a_device_is_at_most_twenty_times_the_lower_median_of_the_devices_of_the_host(
    values: Sequence[float], expected: list[tuple[str, str]]
) -> None:
    assert [(scope, reason) for _, scope, reason in problems(*on_gpus(*values))] == expected
    assert problems(*on_gpus(*values), view=host_view(REHEARSAL)) == []


BRIDGED = {
    f"gpu={gpu},peer={peer}": "NV12" if {gpu, peer} == {0, 1} else "SYS" for gpu, peer in permutations(range(3), 2)
}
"""Scope of a pair of GPUs -> the path between them. There are three GPUs, and an NVLink bridge joins GPU 0 and GPU 1."""


def test_pairs_of_gpus_are_compared_only_with_pairs_on_paths_of_the_same_kind() -> None:
    plan = builders.plan("h1", profile="extended", gpu_count=3, rackproof_gang="none")
    view = host_view(plan, "h1", Metric(name="gpu.peer.link", unit="1", values=BRIDGED))
    rates = {scope: 5.2e11 if path == "NV12" else 1.5e10 for scope, path in BRIDGED.items()}

    def copies(rates: Mapping[str, float]) -> list[Observation]:
        common = {"direction": "both_ways", "size_bytes": 1 << 30}
        return [figure("peer_copy.bandwidth", rate, scope, **common) for scope, rate in rates.items()]

    assert problems(*copies(rates), view=view) == []
    assert [scope for _, scope, _ in problems(*copies({**rates, "gpu=0,peer=2": 3.1e11}), view=view)] == [
        "gpu=0,peer=2"
    ]
    by_kernel = [
        figure("group_copy.bandwidth", rate, f"gpu={at}", pattern="by_kernel", access=access, size_bytes=1 << 28)
        for at, (rate, access) in enumerate([(2.6e11, True), (9e9, False), (9e9, False)])
    ]
    assert problems(*by_kernel, view=view) == []
    assert len(problems(*by_kernel, view=host_view(plan))) == 1


def test_launch_with_nvlink_between_hosts_is_not_compared_with_the_launch_without_it() -> None:
    common = {"scope": "gang=r1", "stage": "gang", "op": "all_reduce", "size_bytes": 1 << 30, "world_size": 4}
    items = [figure("mnnvl.busbw", rate, mnnvl=mnnvl, **common) for rate, mnnvl in ((9.4e11, True), (4.6e10, False))]
    assert problems(*items, view=host_view(GANG)) == []


def test_pairs_of_hosts_in_one_nvlink_domain_are_not_compared_with_pairs_across_domains() -> None:
    plan = builders.plan("h1", "h2", "h3", "h4", gpu_count=1, rackproof_gang="all")
    domains = {"h1": "a", "h2": "a", "h3": "b", "h4": "b"}
    plan = replace(plan, hosts=tuple(replace(host, nvlink_domain=domains[host.name]) for host in plan.hosts))

    def pairs(**rates: float) -> list[Observation]:
        return [
            figure("pairs.bandwidth", rate, f"gpu=0,partner={name}", stage="gang", size_bytes=1 << 30)
            for name, rate in rates.items()
        ]

    assert problems(*pairs(h2=7e11, h3=2.4e10, h4=2.3e10), view=host_view(plan)) == []
    assert len(problems(*pairs(h2=7e11, h3=7e11, h4=2.3e10), view=host_view(plan))) == 1


def test_directories_are_not_compared_with_each_other() -> None:
    plan = builders.plan("h1", profile="standard", rackproof_local_storage=["/scratch", "/home"], rackproof_gang="none")
    rates = {"directory=scratch": 9e5, "directory=home": 180.0}
    items = [figure("local_storage.iops", rate, at, op="read", sharing="together") for at, rate in rates.items()]
    assert problems(*items, view=host_view(plan)) == []


@pytest.mark.parametrize(
    ("values", "count"),
    [((1e-5, 2e-4, 2e-4), 0), ((1e-5, 2.1e-4, 2.1e-4), 1), ((1e-5, 1e-5, 2.1e-4), 0), ((1e-5, 2.1e-4), 1)],
)
def test_computation_time_of_a_device_is_at_least_a_twentieth_of_the_lower_median_of_the_devices_of_the_host(
    values: Sequence[float], count: int
) -> None:
    assert len(problems(*on_gpus(*values, name="straggler.compute"))) == count


def test_other_times_and_amounts_may_differ() -> None:
    assert problems(*on_gpus(1e-3, 1.0, 1.0, name="straggler.wait")) == []
    assert problems(*on_gpus(1.0, 1000.0, 1000.0, name="stress.power")) == []


@pytest.mark.parametrize(
    ("name", "lowest", "too_low"),
    [("overlap.slowdown", 0.5, 0.49), ("pairs.latency", 1e-7, 0.9e-7), ("peer_copy.latency", 1e-7, 0.9e-7),
     ("verbs.latency", 1e-7, 0.9e-7), ("straggler.compute", 1e-6, 0.9e-6)],
)  # fmt: skip
def test_figure_below_its_lowest_credible_value_is_reported(name: str, lowest: float, too_low: float) -> None:
    assert problems(figure(name, lowest)) == []
    (result,) = problems(figure(name, too_low))
    assert result[:2] == (name, "gpu=0")
    assert f"{too_low:g}" in result[2]
    is_time = name != "overlap.slowdown"
    assert len(problems(figure(name, too_low), view=host_view(REHEARSAL))) == int(is_time)


def launched(*ranks: int) -> HostView:
    """Return the view of a host in a gang of eight hosts. `ranks`: for each gang launch in its record, the number of ranks."""
    names = tuple(f"h{number}" for number in range(1, 9))
    plan = replace(builders.plan(*names, profile="smoke", gpu_count=1), rehearsal=False)
    launches = tuple(builders.launch("gang", names[:count]) for count in ranks)
    return HostView(plan, plan.hosts[0], host_evidence(PLAN, launches=launches), ())


@pytest.mark.parametrize(
    ("launches", "stated", "expected"),
    [
        ((4,), (4, 4), []),
        ((4,), (2, 2, 4), ["measured by 2 ranks, but the launch had 4"]),
        (
            (8, 4),
            (2, 3),
            ["measured by 2 ranks, but the launch had 4 or 8", "measured by 3 ranks, but the launch had 4 or 8"],
        ),
        ((), (2,), []),
    ],
)
def test_number_of_ranks_must_be_that_of_a_launch_of_the_gang(
    launches: Sequence[int], stated: Sequence[int], expected: list[str]
) -> None:
    items = [
        replace(figure("site.figure", 1.0, f"gpu={at}", world_size=ranks), stage="gang")
        for at, ranks in enumerate(stated)
    ]
    result = reasons(*items, view=launched(*launches))
    assert [reason for reason in result if reason.startswith("measured")] == expected


def collective(kind: str, value: Any, op: str = "all_reduce", **params: Any) -> Observation:
    shared = {"size_bytes": 1000, "placement": "all", "world_size": 2}
    return figure(f"collective.{op}.{kind}", value, "host", **{**shared, **params})


@pytest.mark.parametrize(
    ("rate", "latency", "params", "count"),
    [
        (1e6, 1e-3, {}, 0),
        (2e7, 1e-3, {}, 0),
        (2.1e7, 1e-3, {}, 1),
        (5e4, 1e-3, {}, 0),
        (4.9e4, 1e-3, {}, 1),
        (1e5, 1e-3, {"moved_bytes": 1004}, 0),
        (1e6, 1e-3, {"placement": "pair"}, 0),
    ],
)
def test_bandwidth_times_latency_is_roughly_the_size_of_the_message(
    rate: float, latency: float, params: dict[str, Any], count: int
) -> None:
    items = [collective("algbw", rate, **params), collective("latency", latency, **params)]
    result = reasons(*items)
    assert len([reason for reason in result if "but the settings give" in reason]) == count


@pytest.mark.parametrize("other", [{"size_bytes": 1}, {"placement": "pair"}, {"world_size": 3}])
def test_figures_of_different_measurements_are_not_compared(other: dict[str, Any]) -> None:
    items = [collective("algbw", 1e12), collective("latency", 1e-3, **other), collective("busbw", 1.0, **other)]
    assert [
        reason for reason in reasons(*items, view=host_view(PLAN, launches=())) if "give" in reason or "times" in reason
    ] == []


@pytest.mark.parametrize(
    ("algbw", "busbw", "op", "ranks", "count"),
    [
        (1e9, 1e9, "all_reduce", 2, 0),
        (1e9, 2e10, "all_reduce", 2, 0),
        (1e9, 2.1e10, "all_reduce", 2, 1),
        (1e9, 5e7, "all_reduce", 2, 0),
        (1e9, 4.9e7, "all_reduce", 2, 1),
        (1e9, 9e6, "all_reduce", 1, 0),
        (0, 9e6, "all_reduce", 2, 0),
        (1e9, 2.9e10, "all_reduce", 4, 0),
    ],
)
def test_bus_bandwidth_is_roughly_the_bandwidth_times_the_factor_of_the_collective(
    algbw: float, busbw: float, op: str, ranks: int, count: int
) -> None:
    items = [collective("algbw", algbw, op, world_size=ranks), collective("busbw", busbw, op, world_size=ranks)]
    result = [reason for reason in reasons(*items, view=host_view(PLAN, launches=())) if "times the" in reason]
    assert len(result) == count


def test_throughput_under_stress_is_roughly_the_product_of_its_factors() -> None:
    def stress(clock: float, power: float = 700.0, **params: Any) -> list[Observation]:
        figures = (
            ("throughput", 7e14),
            ("flop_per_cycle", 4.67e5),
            ("clock", clock),
            ("efficiency", 1e12),
            ("power", power),
        )
        return [figure(f"stress.{name}", value, dtype="bf16", **params) for name, value in figures]

    assert reasons(*stress(1.5e9)) == []
    assert reasons(*stress(2.9e10)) == []
    assert reasons(*stress(3.1e10)) == [
        "467000 FLOP/cycle times 3.1e+10 Hz is not the 7e+14 FLOP/s of stress.throughput"
    ]
    assert reasons(*stress(7e7)) == ["467000 FLOP/cycle times 7e+07 Hz is not the 7e+14 FLOP/s of stress.throughput"]
    assert len(reasons(*stress(1.5e9, 15_000.0))) == 1
    assert reasons(*stress(0.0)) == []
    throughput, *others = stress(3.1e10)
    assert reasons(throughput, *[replace(item, scope="gpu=1") for item in others]) == []
    assert reasons(throughput, *[replace(item, params={"dtype": "fp8"}) for item in others]) == []


@pytest.mark.parametrize(
    ("step_s", "params", "count"),
    [
        (0.05, {}, 0),
        (0.99, {}, 0),
        (1.1, {}, 1),
        (0.0026, {}, 0),
        (0.0024, {}, 1),
        (1.1, {"sequence": 10}, 0),
        (1.1, {"batch_size": "64"}, 0),
        (1.1, {"network": "other"}, 0),
    ],
)
def test_step_time_times_throughput_is_roughly_the_batch_of_all_ranks(
    step_s: float, params: dict[str, Any], count: int
) -> None:
    shared = {"batch_size": 50, "world_size": 2, "network": "resnet", "data": "random"}
    items = [
        figure("training.throughput", 2000.0, "host", **shared),
        figure("training.step_time", step_s, "host", **{**shared, **params}),
    ]
    assert len([reason for reason in reasons(*items) if "but the settings give" in reason]) == count


def loading(
    stated: float,
    *,
    loaded: Any = 1000.0,
    trained: Any = 2000.0,
    loader_batch: Any = 64,
    training_batch: Any = 64,
    network: str = "resnet",
) -> list[Observation]:
    """Return the figures of a data loader and of a training on two ranks.

    The sufficiency of a loader is the images per second that it loads for a rank, divided by the images per second that the rank
    trains on. By default it is 1000 / (2000 / 2) = 1. A value more than 20 times as high is reported. If the batch sizes differ,
    this limit is multiplied by the larger batch size divided by the smaller one.

    Args:
        stated: value of `dataloader.sufficiency`.
        loaded: throughput of the loader for one rank.
        trained: throughput of the training on both ranks together.
        loader_batch: batch size of the loader.
        training_batch: batch size of the training.
        network: network of the training.
    """
    return [
        figure("dataloader.throughput", loaded, network="resnet"),
        figure("training.throughput", trained, "host", world_size=2, network=network, batch_size=training_batch),
        figure("dataloader.sufficiency", stated, network="resnet", batch_size=loader_batch),
    ]


@pytest.mark.parametrize(
    ("items", "count"),
    [
        (loading(1.0), 0),
        (loading(20.0), 0),
        (loading(20.5), 1),
        (loading(20.5, loader_batch=128), 0),
        (loading(20.5, training_batch=128), 0),
        (loading(41.0, loader_batch=128), 1),
        (loading(20.5, loader_batch=0), 1),
        (loading(20.5, training_batch="64"), 1),
        (loading(20.5, network="other"), 0),
        (loading(20.5, trained=0.0), 0),
        (loading(20.5, loaded=2000.0), 0),
    ],
)
def test_sufficiency_of_the_loader_must_fit_the_measured_loading_and_training_rates(
    items: list[Observation], count: int
) -> None:
    view = host_view(PLAN, launches=())
    assert len([reason for reason in reasons(*items, view=view) if "the measured rates give about" in reason]) == count
    rehearsal = host_view(REHEARSAL, launches=())
    assert [reason for reason in reasons(*items, view=rehearsal) if "measured rates" in reason] == []


@pytest.mark.parametrize(
    ("value", "stated", "reason"),
    [
        ("NET/IB", "NET/IB", ""),
        ("NET/IB+P2P", "NET/IB", ""),
        ("P2P", "NET/IB", "it is P2P, but other figures of the benchmark state NET/IB"),
    ],
)
def test_transport_must_agree_with_what_other_figures_of_the_benchmark_state(
    value: str, stated: str, reason: str
) -> None:
    items = [
        figure("collective.transport", value, "host", world_size=2),
        collective("algbw", 1e9, transport=stated),
    ]
    assert reasons(*items) == ([reason] if reason else [])
    assert reasons(items[0], absent(items[1])) == []
    assert reasons(items[0], replace(items[1], scope="gpu=0")) == []


@pytest.mark.parametrize(("times", "count"), [((0.5, 1.5), 0), ((0.5, 1.6), 1), ((), 0)])
def test_benchmarks_take_no_longer_than_their_launches(times: Sequence[float], count: int) -> None:
    # The launch takes 1 s, and the sum of the times may exceed this by `DURATION_TOLERANCE_S`, 1 s.
    items = [figure("benchmark.duration", value, "host", benchmark=f"b{at}") for at, value in enumerate(times)]
    result = problems(*items)
    assert len(result) == count
    if count:
        assert result == [("benchmark.duration", "host", "the benchmarks took 2 s, but their launches took only 1 s")]
    assert problems(*items, is_soak=True) == []
    assert problems(*items, view=host_view(PLAN, launches=())) == []
    assert problems(*[replace(item, status=SKIPPED, value=None, reason="no") for item in items]) == []


def test_every_figure_of_a_benchmark_must_state_the_number_of_ranks_if_any_figure_does() -> None:
    bare = replace(GEMM, scope="gpu=1", params={"dtype": "bf16", "size": 8192})
    assert "it does not state how many ranks measured it" not in reasons(bare)
    items = [
        collective("algbw", 1e9),
        replace(collective("busbw", 1e9), params={"size_bytes": 1000, "placement": "all"}),
    ]
    named = [
        (name, scope)
        for name, scope, reason in problems(*items)
        if reason == "it does not state how many ranks measured it"
    ]
    assert named == [("collective.all_reduce.busbw", "host")]
    assert reasons(items[0], absent(items[1])) == []


def test_hosts_with_different_partners_share_a_structure() -> None:
    """A structure (`FigureStructure`) is the result of all checks that need no values. It is made once for many hosts."""
    structures = PartnerStructures()

    def pairs(partner: str, value: float = 5e10, *, token: int = 5) -> list[Observation]:
        """Return figures of pairs with the host `partner`. All have the same `Observation.token`.

        The quick reader of records (`schemas.quick`) sets this number: figures that differ only in scope, value and samples have
        equal tokens. Figures without a token (0) share no structure.
        """
        items = [figure("pairs.bandwidth", value, f"gpu={at},partner={partner}") for at in range(2)]
        for item in items:
            vars(item)["token"] = token
        return items

    first = structures.of_host(VIEW, pairs("h2"))
    assert structures.of_host(VIEW, pairs("h3", 1.0)) is first
    assert structures.of_host(VIEW, pairs("h2")[:1]) is not first
    assert structures.of_host(VIEW, pairs("h2", token=6)) is not first
    assert structures.of_host(VIEW, pairs("h2", token=0)) is not structures.of_host(VIEW, pairs("h2", token=0))


FLOOR = criterion(
    "gemm.throughput", id="floor", operator="ge", unit="FLOP/s", expected=1e15, fraction=0.5, datasheet="flops",
    where={"dtype": "bf16"},
)  # fmt: skip


def test_impossible_value_is_reported_with_the_value_of_the_datasheet() -> None:
    view = host_view(PLAN, packs=[pack(FLOOR, datasheet={"flops": {"bf16": 1e15}})])
    shared = {"dtype": "bf16", "size": 8192}
    assert reasons(figure("gemm.throughput", 5e14, **shared), view=view) == []
    assert reasons(figure("gemm.throughput", 0.0, **shared), view=view) == []
    assert reasons(figure("gemm.throughput", -1.0, **shared), view=view) == [
        "-1 FLOP/s is not credible: it cannot be negative"
    ]
    assert reasons(figure("gemm.throughput", 4e15, **shared), view=view) == [
        "4e+15 FLOP/s is not credible: it is more than 3 times the rate in the datasheet of the part (1e+15 FLOP/s)"
    ]
    wrong_unit = replace(figure("gemm.throughput", 4e15, **shared), unit="W")
    assert reasons(wrong_unit, view=view) == ["has the unit W, but this figure is in FLOP/s"]


def test_figure_must_state_the_parameter_by_which_a_criterion_selects_figures() -> None:
    view = host_view(PLAN, packs=[pack(FLOOR, criterion("gpu.thing"))])
    bare = figure("gemm.throughput", 5e14, size=8192)
    assert reasons(bare, view=view) == ["it does not state `dtype`, by which the criterion `floor` selects figures"]
    assert reasons(figure("gemm.throughput", 5e14, size=8192, dtype="fp8"), view=view) == []
    assert reasons(absent(bare), view=view) == []
    assert reasons(figure("memory.bandwidth", 5e12), view=view) == []
    by_gpu = pack(criterion("gemm.throughput", id="c", operator="ge", where={"gpu": "0"}))
    assert reasons(bare, view=host_view(PLAN, packs=[by_gpu])) == []


def test_figure_need_not_state_the_transport_if_collective_transport_was_not_measured() -> None:
    rule = criterion(
        "collective.all_reduce.busbw", id="b", operator="ge", scope="host", where={"transport": "P2P", "op": "x"}
    )
    view = host_view(PLAN, packs=[pack(rule)])
    busbw, transport = (
        collective("busbw", 1e9, op="all_reduce"),
        figure("collective.transport", "P2P", "host", world_size=2),
    )
    busbw = replace(busbw, params={**busbw.params, "op": "x"})
    assert reasons(busbw, transport, view=view) == [
        "it does not state `transport`, by which the criterion `b` selects figures"
    ]
    assert reasons(busbw, absent(transport), view=view) == []
    assert reasons(busbw, view=view) == []
    elsewhere = replace(transport, scope="gpu=0")
    assert reasons(busbw, elsewhere, view=view) == []


def test_times_of_benchmarks_are_compared_with_the_launches_of_their_stage() -> None:
    launches = (builders.launch("benchmark", ("h1",), devices=2), builders.launch("gang", ("h1",), devices=2))
    view = host_view(PLAN, launches=launches)
    assert len(reasons(figure("benchmark.duration", 2.5, "host"), view=view)) == 1


def test_parameters_are_compared_with_the_settings_of_their_own_stage() -> None:
    plan = builders.with_benchmarks(GANG, benchmark={"training": {"epochs": 20}}, gang={"training": {"epochs": 30}})
    view = host_view(plan)
    items = [figure("training.accuracy", 0.9, "host", epochs=30)]
    assert reasons(*items, view=view) == ["epochs is 30, but the plan has 20"]
    assert reasons(replace(items[0], stage="gang"), view=view) == []
