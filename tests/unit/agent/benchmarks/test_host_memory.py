"""The benchmarks `host_memory` and `host_compute`: NUMA nodes and array sizes are chosen, wrong values are counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.compute import host_compute
from agent.benchmarks.memory import host_memory
from agent.benchmarks.memory.host_memory import HostMemory, allocate, array_bytes
from agent.benchmarks.runtime import host_rank, numa
from agent.benchmarks.runtime.agreement import CannotMeasureError
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.numa import Node, memory_limit, run_on_cpus, usable_nodes
from schemas.catalogue import settings
from schemas.records import Observation

CPUS = sorted(os.sched_getaffinity(0))
MIB, GIB = 1 << 20, 1 << 30


def node(
    number: int = 0, *, cpus: tuple[int, ...] = (CPUS[0], CPUS[-1]), free: int = GIB, cache: int = 0, **over: Any
) -> Node:
    return Node(number=number, cpus=cpus, free=free, cache=cache, farthest=over.get("farthest", number))


def write(root: Path, files: Mapping[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def context(work: Path) -> Context:
    return Context(
        rank=0, world_size=1, local_rank=0, local_world_size=1, device=torch.device("cpu"), stage="benchmark", kind="cpu",
        devices=(0,), world_scope="host", work=work,
    )  # fmt: skip


def figures(work: Path, monkeypatch: pytest.MonkeyPatch, *nodes: Node, **chosen: Any) -> list[Observation]:
    """Return what `host_memory` reports on a host with the NUMA nodes `nodes`."""
    monkeypatch.setattr(host_memory, "usable_nodes", lambda: list(nodes))
    measuring = context(work)
    quick = {"size_bytes": 1 << 16, "seconds": 0.001, **chosen}
    host_memory.run(measuring, settings("host_memory", quick))
    return measuring.observations


NODES = "sys/devices/system/node"
TWO_SOCKETS = {
    f"{NODES}/node0/cpulist": f"{CPUS[0]}\n",
    f"{NODES}/node1/cpulist": f"{CPUS[-1]}\n",
    f"{NODES}/node2/cpulist": "\n",  # a node without processors: the memory of a GPU
    f"{NODES}/node0/distance": "10 21 80\n",
    f"{NODES}/node1/distance": "21 10 80\n",
    **{f"{NODES}/node{number}/meminfo": f"Node {number} MemFree:  {100 + number} kB\n" for number in range(3)},
    "proc/meminfo": "MemAvailable:   4096 kB\n",
    f"sys/devices/system/cpu/cpu{CPUS[0]}/cache/index3/size": "32768K\n",
    f"sys/devices/system/cpu/cpu{CPUS[0]}/cache/index3/shared_cpu_list": "0\n",
}


@pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")
def test_nodes_with_processors_and_memory_are_measured(tmp_path: Path) -> None:
    first, second = usable_nodes(write(tmp_path, TWO_SOCKETS))
    assert first == Node(number=0, cpus=(CPUS[0],), free=100 * 1024, cache=32 * MIB, farthest=1)
    assert second == Node(number=1, cpus=(CPUS[-1],), free=101 * 1024, cache=0, farthest=0)


@pytest.mark.parametrize(("number", "farthest"), [(0, 17), (8, 0), (17, 8)])
def test_farthest_node_is_found_if_node_numbers_have_gaps(tmp_path: Path, number: int, farthest: int) -> None:
    distances = {0: "10 20 30", 8: "40 10 20", 17: "20 30 10"}
    root = write(tmp_path, {f"{NODES}/node{node}/distance": f"{text}\n" for node, text in distances.items()})
    assert numa._farthest(number, [0, 8, 17], root) == farthest


def test_host_whose_kernel_has_no_numa_has_one_node(tmp_path: Path) -> None:
    (only,) = usable_nodes(write(tmp_path, {"proc/meminfo": "MemAvailable:   4096 kB\n"}))
    assert (only.number, set(only.cpus), only.free, only.farthest) == (0, set(CPUS), 4096 * 1024, 0)


def test_one_thread_of_each_core_is_used(tmp_path: Path) -> None:
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{CPUS[0]},{CPUS[-1]}\n" for cpu in CPUS
    }
    (only,) = usable_nodes(write(tmp_path, {**siblings, "proc/meminfo": ""}))
    assert only.cpus == (CPUS[0],)


def limited(group: str, limit: int | str, *, used: int = 0, cache: int = 0, version: int = 2) -> dict[str, str]:
    """Return the files of a control group with a memory limit, for version 1 or 2 of control groups.

    The group uses `used` bytes. Of these, `cache` bytes are inactive file caches, which the kernel can free.
    """
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    inactive = "inactive_file" if version == 2 else "total_inactive_file"
    files = dict(zip(names, (limit, used), strict=True)) | {"stat": f"anon 1\n{inactive} {cache}"}
    return {f"sys/fs/cgroup/{group}/memory.{name}": f"{value}\n" for name, value in files.items()}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 4096 * 1024),
        (limited("", "max"), 4096 * 1024),
        (limited("", MIB), MIB),
        (limited("", MIB, used=MIB // 4), MIB * 3 // 4),
        (limited("", MIB, used=2 * MIB), 0),
        (limited("", MIB, used=MIB // 2, cache=MIB // 4), MIB * 3 // 4),
        (limited("system.slice/slurmd/job_7", MIB), MIB),
        (limited("system.slice/slurmd/job_7", 3 * MIB) | limited("system.slice", 2 * MIB), 2 * MIB),
        (limited("user.slice", MIB), 4096 * 1024),
        (limited("memory", 9223372036854771712, version=1), 4096 * 1024),
        (limited("memory", MIB, version=1), MIB),
        (limited("memory/slurm/job_7", MIB, used=MIB // 2, cache=MIB // 4, version=1), MIB * 3 // 4),
    ],
)
def test_memory_limit_is_that_of_the_host_or_of_a_group_of_the_process(
    tmp_path: Path, files: Mapping[str, str], limit: int
) -> None:
    """The process is in the control group of a Slurm job. Only the limits of this group and of its parent groups apply."""
    host = {"proc/meminfo": "MemAvailable: 4096 kB\n"}
    group = {"proc/self/cgroup": "4:memory:/slurm/job_7\n0::/system.slice/slurmd/job_7\n"}
    assert memory_limit(write(tmp_path, host | group | dict(files))) == limit


@pytest.mark.parametrize(
    ("cache", "free", "limit", "expected"),
    [
        (0, 64 * GIB, 64 * GIB, 32 * MIB),  # the setting `size_bytes`
        (24 * MIB, 64 * GIB, 64 * GIB, 48 * MIB),  # four times the cache of a node, divided among its two threads
        (10 * GIB, 64 * GIB, 64 * GIB, 128 * MIB),  # at most four times `size_bytes`
        (0, 240 * MIB, 64 * GIB, 10 * MIB),  # a quarter of `free`, divided by 3 arrays x 2 threads of a node
        (0, 64 * GIB, 240 * MIB, 5 * MIB),  # a quarter of `limit`, divided by 3 arrays x 4 threads of the host
    ],
)
def test_size_of_arrays_follows_the_caches_and_the_free_memory(
    cache: int, free: int, limit: int, expected: int
) -> None:
    nodes = [node(0, free=free, cache=cache), node(1, free=free, cache=cache)]
    assert array_bytes(nodes, 32 * MIB, limit) == pytest.approx(expected, abs=64)


def test_too_little_memory_is_an_error_with_the_remedy() -> None:
    with pytest.raises(CannotMeasureError, match=r"too little free memory.*drop_caches"):
        array_bytes([node(free=MIB // 8)], 32 * MIB, GIB)


def test_two_nodes_have_local_and_remote_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = (node(0, cpus=(CPUS[0],), farthest=1), node(1, cpus=(CPUS[-1],), farthest=0))
    measured = figures(tmp_path, monkeypatch, *nodes)
    assert all(item.status == "measured" for item in measured if item.name != "host_memory.latency")
    bandwidths = [item for item in measured if item.name == "host_memory.bandwidth"]
    assert sorted(
        (item.scope, item.params["placement"], item.params["memory_node"], item.params["op"]) for item in bandwidths
    ) == [
        (f"numa={number}", placement, home, op)
        for number in (0, 1)
        for placement, home in (("local", number), ("remote", 1 - number))
        for op in ("copy", "triad")
    ]
    assert len([item for item in measured if item.name == "host_memory.latency"]) == 4
    assert [item.value for item in measured if item.name == "host_memory.wrong_elements"] == [0, 0]
    assert [item.value for item in measured if item.name == "host_memory.nodes"] == [2]


def test_wrong_elements_are_counted_for_the_node_whose_memory_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One source element in the memory of the second node has a flipped bit."""
    nodes = [node(0, cpus=(CPUS[0],), farthest=1), node(1, cpus=(CPUS[-1],), farthest=0)]
    if len(CPUS) < 2:
        pytest.skip("needs two processors")
    test = HostMemory(nodes, allocate(nodes, 1 << 16, 30), 0.001, 30)
    test.arrays[CPUS[-1]][1, 17] = float(host_memory.SOURCE ^ 0x100)
    test.stream("copy", nodes[0].cpus, nodes[1].cpus, 0.001)
    assert test.wrong == {0: 0, 1: 2}, "the wrong element of the source and its copy must both count"
    test.stream("triad", nodes[0].cpus, nodes[0].cpus, 0.001)
    assert test.wrong == {0: 0, 1: 2}


@pytest.mark.parametrize("op", ["copy", "triad"])
def test_every_element_is_wrong_if_the_operation_writes_nothing(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(host_memory, "_operation", lambda *_: lambda: None)
    nodes = [node(cpus=(CPUS[0],))]
    test = HostMemory(nodes, allocate(nodes, 1 << 16, 30), 0.001, 30)
    test.stream(op, nodes[0].cpus, nodes[0].cpus, 0.001)
    assert test.wrong[0] == (1 << 16) // 8


def test_failure_of_one_thread_ends_the_other_threads() -> None:
    def work(number: int, barrier: threading.Barrier) -> None:
        if number:
            raise MemoryError("no memory")
        barrier.wait()

    before = torch.get_num_threads()
    with pytest.raises(MemoryError, match="no memory"):
        run_on_cpus([CPUS[0], CPUS[-1]], work, 30)
    assert torch.get_num_threads() == before
    assert os.sched_getaffinity(0) == set(CPUS), "the main thread must stay unbound"


def test_thread_that_hangs_is_a_timeout() -> None:
    released = threading.Event()
    with pytest.raises(TimeoutError, match=r"1 of 1 threads did not finish within 0.05 s"):
        run_on_cpus([CPUS[0]], lambda *_: released.wait(10), 0.05)
    released.set()


def test_rank_that_does_not_measure_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rank, "WAIT_S", 0.001)
    waiting = context(tmp_path)
    waiting.local_rank, waiting.rank, waiting.local_world_size, waiting.benchmark = 1, 1, 2, "host_memory"
    waiting.store.set("left/0/host_memory/0", "left")
    host_memory.run(waiting, settings("host_memory", {}))
    host_compute.run(waiting, settings("host_compute", {}))
    assert waiting.observations == []


def test_wrong_product_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.matmul

    def wrong(*arguments: Any, out: torch.Tensor) -> torch.Tensor:
        right(*arguments, out=out)
        out[3, 5] += 1
        return out

    monkeypatch.setattr(host_compute.torch, "matmul", wrong)
    measuring = context(tmp_path)
    host_compute.run(measuring, settings("host_compute", {"size": 64, "seconds": 0.01}))
    (item,) = (item for item in measuring.observations if item.name == "host_compute.wrong_elements")
    assert isinstance(item.value, int)
    assert item.value >= 1


def test_clock_is_that_of_the_processors_in_use(tmp_path: Path) -> None:
    path = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_cur_freq"
    write(tmp_path, {path.format(0): "3800000\n", path.format(1): "2000000\n", path.format(2): "<unknown>\n"})
    assert host_compute.read_clocks([0, 2, 7], tmp_path) == [3.8e9]
    assert host_compute.read_clocks([7], tmp_path) == []
