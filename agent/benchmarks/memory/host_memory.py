"""Measure bandwidth and latency from the processors of each NUMA node to the memory of that node and of the farthest node.

The bandwidth of all nodes together is also measured. One rank of the host measures, with one thread on each core; the other ranks
wait. Bytes are counted as in STREAM: only the arrays that the operation reads and writes count (2 arrays for copy, 3 for triad),
not the cache lines that the processor reads before it overwrites them. After each measurement of a bandwidth, the contents of the
target and of the first source are checked.

Latency is measured with a chain of dependent reads, each from a different cache line: each read returns the position of the next.
The latency is the time of one read in this chain, minus the time of one read in a chain that stays in the cache. So the time that
Python's interpreter needs for each read cancels out.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from agent.benchmarks.runtime.agreement import CannotMeasureError
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.host_rank import wait_for_reporting_rank
from agent.benchmarks.runtime.numa import Node, memory_limit, run_on_cpus, usable_nodes
from schemas.records import ERROR

SOURCE, SCALED, FACTOR = 0x55555555, 0x2AAAAAAA, 3.0
"""SOURCE and SCALED are the values in the two source arrays. Triad computes SOURCE + FACTOR x SCALED, which is exact in fp64,
with or without fused multiply-add."""
MOVED = {"copy": 2, "triad": 3}
"""Operation -> number of arrays that it reads or writes."""
ARRAYS, ELEMENT_BYTES, LINE_BYTES = 3, 8, 64
CACHE_FACTOR, MOST_FACTOR = 4, 4
"""STREAM's rule: the target arrays of all threads of a node are together at least CACHE_FACTOR times as large as the node's
last-level caches. But no array is larger than MOST_FACTOR times the setting `size_bytes`. Otherwise the arrays would be huge in
a virtual machine that has few cores but sees the cache of the whole processor."""
MEMORY_SHARE = 0.25
"""Largest share of the free memory that all arrays together may take."""
LEAST_BYTES = 1 << 16
"""Minimum size of an array, unless the setting `size_bytes` is less."""
LEAST_PASSES = 3
STEPS, SEGMENTS, NEAR_LINES = 2048, 7, 32
"""STEPS: reads in each timed segment of a chain. SEGMENTS: number of segments. NEAR_LINES: cache lines of the short chain, which
stays in the nearest cache."""

Arrays = Mapping[int, torch.Tensor]
"""Processor -> its three arrays. A thread on this processor writes them first, so that the kernel places them on its node."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `host_memory.*` of each node, and `host_memory.total_bandwidth` of the host.

    Raises:
        CannotMeasureError: the host or a node has too little free memory.
    """
    if not context.is_reporting_rank:
        wait_for_reporting_rank(context)
        return
    context.set_phase("host_memory, allocation")
    nodes = usable_nodes()
    size = array_bytes(nodes, int(settings["size_bytes"]), memory_limit())
    test = HostMemory(nodes, allocate(nodes, size, context.timeout_s), float(settings["seconds"]), context.timeout_s)
    finished = False
    try:
        _measure(context, settings, nodes, test)
        finished = True
    finally:  # wrong elements count even if a later measurement fails
        for node in nodes:
            wrong = test.wrong[node.number]
            if wrong or finished:
                context.report("host_memory.wrong_elements", wrong, unit="1", scope=f"numa={node.number}")
    context.report("host_memory.nodes", len(nodes), unit="1", scope="host")


def _measure(context: Context, settings: Mapping[str, Any], nodes: Sequence[Node], test: HostMemory) -> None:
    for op in settings["ops"]:
        context.set_phase(f"host_memory {op}, all nodes")
        everywhere = [cpu for node in nodes for cpu in node.cpus]
        rate = test.stream(op, everywhere, everywhere, test.seconds)
        common = test.params(op, everywhere, nodes)
        context.report("host_memory.total_bandwidth", rate, unit="B/s", scope="host", **common)
    placements = _placements(nodes, settings["placements"])
    for node, home, placement in placements:
        for op in settings["ops"]:
            context.set_phase(f"host_memory {op}, node {node.number} {placement}")
            cpus = node.cpus[: len(home.cpus)]
            rate = test.stream(op, cpus, home.cpus[: len(cpus)], test.seconds / len(nodes))
            common = test.params(op, cpus, [node]) | _where(node, home, placement)
            context.report("host_memory.bandwidth", rate, unit="B/s", **common)
    for node, home, placement in placements:
        context.set_phase(f"host_memory latency, node {node.number} {placement}")
        _report_latency(context, test.latency(node, home), _where(node, home, placement))


def _where(node: Node, home: Node, placement: str) -> dict[str, Any]:
    return {"scope": f"numa={node.number}", "placement": placement, "memory_node": home.number}


def _report_latency(context: Context, seconds: float, where: Mapping[str, Any]) -> None:
    if seconds > 0:
        context.report("host_memory.latency", seconds, unit="s", **where)
    else:
        reason = (
            "reads from memory took no longer than reads from the cache: perhaps another process used the processor"
        )
        context.report_absent("host_memory.latency", unit="s", status=ERROR, reason=reason, **where)


def _placements(nodes: Sequence[Node], placements: Sequence[str]) -> list[tuple[Node, Node, str]]:
    """Return for each measurement the node of the processors, the node of the memory, and the placement (`local` or `remote`).

    A host with one node has no `remote` measurement.
    """
    by_number = {node.number: node for node in nodes}
    pairs = []
    for node in nodes:
        for placement in placements:
            home = by_number[node.farthest] if placement == "remote" else node
            if placement == "local" or home is not node:
                pairs.append((node, home, placement))
    return pairs


def array_bytes(nodes: Sequence[Node], wanted: int, limit: int) -> int:
    """Return the size of one array in bytes; each thread has three arrays.

    The size is `wanted` or, if more, the size by STREAM's rule (CACHE_FACTOR), but at most MOST_FACTOR times `wanted`. If too
    little memory is free, the size is smaller.

    Args:
        wanted: the setting `size_bytes`.
        limit: bytes that all threads of the host may use together, from `memory_limit`.

    Raises:
        CannotMeasureError: so little memory is free that an array would be smaller than `wanted` and smaller than LEAST_BYTES.
    """
    rule = max(CACHE_FACTOR * node.cache // len(node.cpus) for node in nodes)
    size = min(max(wanted, rule), MOST_FACTOR * wanted)
    free = min(limit // sum(len(node.cpus) for node in nodes), *(node.free // len(node.cpus) for node in nodes))
    size = int(min(size, free * MEMORY_SHARE / ARRAYS)) // LINE_BYTES * LINE_BYTES
    if size < min(wanted, LEAST_BYTES):
        least = min(node.free for node in nodes)
        raise CannotMeasureError(
            ERROR,
            f"too little free memory: {limit >> 20} MiB on the host, {least >> 20} MiB on one NUMA node; drop the page cache "
            "(/proc/sys/vm/drop_caches), or end the process that uses the memory",
        )
    return size


def allocate(nodes: Sequence[Node], size: int, timeout_s: float) -> Arrays:
    """Return three arrays of `size` bytes for each processor: the target, and the two sources with their contents."""

    def write_first(_number: int, _barrier: threading.Barrier) -> torch.Tensor:
        arrays = torch.empty((ARRAYS, size // ELEMENT_BYTES), dtype=torch.float64)
        for row, value in zip(arrays, (0, SOURCE, SCALED), strict=True):
            row.fill_(value)
        return arrays

    cpus = [cpu for node in nodes for cpu in node.cpus]
    return dict(zip(cpus, run_on_cpus(cpus, write_first, timeout_s), strict=True))


class HostMemory:
    """The arrays of all threads, and measurements with them."""

    def __init__(self, nodes: Sequence[Node], arrays: Arrays, seconds: float, timeout_s: float) -> None:
        self.nodes, self.arrays, self.seconds, self.timeout_s = nodes, arrays, seconds, timeout_s
        self.wrong = {node.number: 0 for node in nodes}
        """Number of the node -> how many wrong elements the checks counted in memory of this node."""
        self._node_of = {cpu: node.number for node in nodes for cpu in node.cpus}

    def params(self, op: str, cpus: Sequence[int], nodes: Sequence[Node]) -> dict[str, Any]:
        """Return the parameters of a bandwidth, measured with one thread on each of `cpus`.

        `size_bytes` is the size of the target arrays of all threads together. `cache_bytes` is the size of the last-level caches
        of `nodes`.
        """
        size = sum(self.arrays[cpu][0].nbytes for cpu in cpus)
        return {"op": op, "size_bytes": size, "cache_bytes": sum(node.cache for node in nodes), "threads": len(cpus)}

    def stream(self, op: str, cpus: Sequence[int], homes: Sequence[int], seconds: float) -> float:
        """Return the rate of all threads together in B/s, and count the wrong elements.

        Args:
            op: an operation of MOVED.
            cpus: processors of the threads.
            homes: for each thread, the processor whose arrays it uses.
            seconds: how long to measure. Each thread makes at least LEAST_PASSES passes over its arrays.
        """

        def work(number: int, barrier: threading.Barrier) -> tuple[float, int]:
            target, source, scaled = self.arrays[homes[number]]
            expected = SOURCE if op == "copy" else SOURCE + FACTOR * SCALED
            once = _operation(op, target, source, scaled)
            once()
            barrier.wait()
            began, passes = time.perf_counter(), 0
            while passes < LEAST_PASSES or time.perf_counter() - began < seconds:
                once()
                passes += 1
            rate = passes * MOVED[op] * target.nbytes / (time.perf_counter() - began)
            barrier.wait()  # no thread checks its arrays while another thread is timed
            wrong = int((target != expected).sum()) + int((source != SOURCE).sum())
            target.zero_()  # otherwise the next operation could write nothing and still pass its check
            return rate, wrong

        results = run_on_cpus(cpus, work, self.timeout_s)
        for home, (_, wrong) in zip(homes, results, strict=True):
            self.wrong[self._node_of[home]] += wrong
        return sum(rate for rate, _ in results)

    def latency(self, node: Node, home: Node) -> float:
        """Return the latency in seconds from a processor of `node` to the memory of `home` (see the docstring of the module).

        The chain visits random cache lines of one array, each line once. The positions in the chain overwrite the contents of
        this array. Before the chain is timed, other arrays in the memory of `home` are read, so that they displace the lines of
        the chain from the caches.
        """
        arrays = self.arrays[home.cpus[0]]
        table = arrays[0]
        others = [self.arrays[cpu] for cpu in home.cpus[1:]] or [arrays[1:]]
        ((far, near),) = run_on_cpus([node.cpus[0]], lambda *_: _chain_times(table, others), self.timeout_s)
        return far - near


def _chain_times(table: torch.Tensor, others: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return the seconds of one read in a chain of random lines of the whole table, and of one read in a chain of a few lines."""
    view = memoryview((ctypes.c_int64 * table.numel()).from_address(table.data_ptr())).cast("B").cast("q")
    words, stride = table.view(torch.int64), LINE_BYTES // ELEMENT_BYTES
    lines = torch.randperm(table.numel() // stride)[: STEPS * SEGMENTS + 1] * stride
    words[lines[:-1]] = lines[1:]
    for other in others:
        other.sum()
    steps, position = (len(lines) - 1) // SEGMENTS, int(lines[0])
    far = []
    for _ in range(SEGMENTS):
        seconds, position = _walk(view, position, steps)
        far.append(seconds)
    near_lines = torch.arange(NEAR_LINES) * stride
    words[near_lines] = near_lines.roll(-1)
    near = [_walk(view, 0, steps)[0] for _ in range(SEGMENTS)]
    return statistics.median(far), min(near)


def _walk(view: memoryview, position: int, steps: int) -> tuple[float, int]:
    """Read `steps` positions of a chain; return the mean seconds of one read, and the position after the last read."""
    began = time.perf_counter()
    for _ in range(steps):
        position = view[position]
    return (time.perf_counter() - began) / max(steps, 1), position


def _operation(op: str, target: torch.Tensor, source: torch.Tensor, scaled: torch.Tensor) -> Callable[[], torch.Tensor]:
    if op == "copy":
        return lambda: target.copy_(source)
    return lambda: torch.add(source, scaled, alpha=FACTOR, out=target)
