"""NUMA nodes of the host, and threads that run on chosen processors.

The kernel places memory on the node of the processor that touches it first. So a thread that is bound to a processor of the
chosen node writes the arrays first. Then threads on any processor can use them. Neither numactl nor libnuma is needed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from agent.benchmarks.runtime.host_cpu import parse_cpu_list, select_cpus
from agent.sampling.cgroups import memory_left

T = TypeVar("T")
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A NUMA node with processors that this process may use, and with memory."""

    number: int
    cpus: tuple[int, ...]
    """One logical processor (hardware thread) of each core."""
    free: int
    """Bytes of free memory on the node. If the host counts as one node (see `usable_nodes`), this includes the page cache."""
    cache: int
    """Total size in bytes of the last-level caches of the node's processors; 0 if unknown."""
    farthest: int
    """Number of the node whose memory is farthest from these processors; the number of this node if there is no other."""


def usable_nodes(root: Path = Path("/")) -> list[Node]:
    """Return the nodes that have free memory, and processors that this process may use.

    Nodes of GPU memory, as on GH200, have no processors and are left out. If fewer than two nodes remain, for example because the
    kernel has no NUMA support, the host counts as one node.
    """
    allowed = os.sched_getaffinity(0)
    nodes: dict[int, tuple[set[int], int]] = {}
    for path in (root / _NODES).glob("node[0-9]*"):
        cpus = parse_cpu_list(_text(path / "cpulist")) & allowed
        free = _meminfo_bytes(path / "meminfo", "MemFree")
        if cpus and free:
            nodes[int(path.name.removeprefix("node"))] = cpus, free
    # With several nodes, the kernel takes memory of another node before it frees the page cache of a full node. With one node, it
    # frees the page cache, so the page cache counts as available memory.
    if len(nodes) < 2:
        nodes = {min(nodes, default=0): (set(allowed), _meminfo_bytes(root / "proc/meminfo", "MemAvailable"))}
    return [
        Node(
            number=number,
            cpus=tuple(sorted(_one_of_each_core(cpus, root))),
            free=free,
            cache=_cache(cpus, root),
            farthest=_farthest(number, sorted(nodes), root),
        )
        for number, (cpus, free) in sorted(nodes.items())
    ]


def memory_limit(root: Path = Path("/")) -> int:
    """Return how many bytes of memory this process can still use.

    This is the memory that is available on the host or, if less, what the cgroup limit of a container or job still permits.
    """
    available, left = _meminfo_bytes(root / "proc/meminfo", "MemAvailable"), memory_left(root)
    return available if left is None else min(available, left)


def run_on_cpus(cpus: Sequence[int], work: Callable[[int, threading.Barrier], T], timeout_s: float) -> list[T]:
    """Start one thread on each processor, and return the results of the threads in the order of `cpus`.

    Each thread runs its PyTorch operations alone, without PyTorch's pool of threads.

    Args:
        cpus: numbers of the processors.
        work: called in each thread with the number of the thread and a barrier of all threads.
        timeout_s: time limit of the threads, and of each wait at the barrier.

    Raises:
        Exception: a thread failed with this exception. The other threads stop when they next wait at the barrier.
        TimeoutError: threads did not finish within `timeout_s`.
    """
    results: dict[int, T] = {}
    errors: list[Exception] = []
    barrier = threading.Barrier(len(cpus), timeout=timeout_s)

    def call(number: int) -> None:
        try:
            os.sched_setaffinity(0, {cpus[number]})
            torch.set_num_threads(1)
            results[number] = work(number, barrier)
        except threading.BrokenBarrierError as error:
            errors.append(error)
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            errors.insert(0, error)
            barrier.abort()

    before = torch.get_num_threads()
    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(cpus))]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        torch.set_num_threads(before)
    if errors:
        raise errors[0]
    if len(results) < len(cpus):
        raise TimeoutError(f"{len(cpus) - len(results)} of {len(cpus)} threads did not finish within {timeout_s:g} s")
    return [results[number] for number in range(len(cpus))]


def _one_of_each_core(cpus: set[int], root: Path) -> list[int]:
    cores = {_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return select_cpus(sorted(cpus), len(cores), 0, root)


def _cache(cpus: set[int], root: Path) -> int:
    """Return the total size of the last-level caches in bytes. A cache that several processors share is counted once."""
    caches: dict[str, int] = {}
    for cpu in cpus:
        indexes = sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"))
        if indexes:
            size = _text(indexes[-1] / "size").removesuffix("K")
            caches[_text(indexes[-1] / "shared_cpu_list")] = int(size) * 1024 if size.isdecimal() else 0
    return sum(caches.values())


def _farthest(number: int, nodes: Sequence[int], root: Path) -> int:
    """Return the node that is farthest from node `number`.

    Of several equally far nodes, return the next one after `number`, so that different nodes get different results.
    """
    # The file `distance` has one distance for each online node, in the order of the node numbers, which may have gaps.
    online = sorted(int(path.name[len("node") :]) for path in (root / _NODES).glob("node[0-9]*"))
    distances = dict(zip(online, _text(root / f"{_NODES}/node{number}/distance").split(), strict=False))
    after = [*(node for node in nodes if node > number), *(node for node in nodes if node < number)]
    return max(after, key=lambda node: int(distances.get(node, "0")), default=number)


def _meminfo_bytes(path: Path, key: str) -> int:
    """Return the value, in bytes, of a key in a meminfo file; 0 if the key is missing."""
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if key in words:
            return int(words[words.index(key) + 1]) * 1024
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
