"""Copies between each GPU and pinned host memory: in one direction and in both, one GPU at a time and all at once.

If all GPUs copy at once, they share the host's memory and PCIe bridges, so each GPU is slower than alone (measured on 4 H200:
39.6 GB/s per GPU instead of 55.4).

If the GPU's NUMA node is known, the host memory is on that node. If this process may not run on the CPUs of that node, the
benchmark reports an error. If the process may also run on the CPUs of another node, the copies are repeated, one GPU at a time,
with host memory on that other node.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.host_cpu import parse_cpu_list
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR

NODES = Path("/sys/devices/system/node")


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `host_copy.bandwidth` in B/s; for copies in both directions at once, the sum of the two bandwidths.

    If the last copy differs from its source, report the number of differing bytes as `host_copy.wrong_bytes`, and an error
    instead of the bandwidth.
    """
    size = settings["size_bytes"]
    near, far, label = numa_nodes(context.device)
    buffers = _allocate(size, context.device, near)
    for sharing in settings["sharings"]:
        for direction in settings["directions"]:
            context.set_phase(f"host_copy {direction} {sharing}")
            for turn in range(context.local_world_size if sharing == "alone" else 1):
                context.host_barrier(f"{direction} {sharing}")
                if sharing == "all_gpus" or turn == context.local_rank:
                    _measure(context, settings, buffers, direction, sharing, label)
    context.host_barrier("done")
    if far is not None:
        del buffers
        buffers = _allocate(size, context.device, far)
        for turn in range(context.local_world_size):
            context.host_barrier("remote")
            for direction in settings["directions"] if turn == context.local_rank else ():
                _measure(context, settings, buffers, direction, "alone", "remote")


class CopyBuffers:
    """Buffers of `size` bytes: for each direction, one in pinned host memory and one on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for _ in range(2)]
        self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=True).copy_(data) for data in self._device]
        # Clear the two targets, so that they differ from their sources before the copy.
        self._device[0].zero_()
        self._host[1].zero_()
        self._streams = [cuda_stream(device) for _ in range(2)]

    def copy(self, direction: str) -> Callable[[], None]:
        """Return a function that starts the copy, or for `both_ways` one copy in each direction at once.

        The copies begin when the GPU has finished the work already queued on the current stream.
        """
        to_device, to_host = (self._device[0], self._host[0]), (self._host[1], self._device[1])
        if direction == "host_to_device":
            return lambda: _start_copy(*to_device)
        if direction == "device_to_host":
            return lambda: _start_copy(*to_host)

        def copy_both_ways() -> None:
            current = torch.cuda.current_stream()
            for stream, (target, source) in zip(self._streams, (to_device, to_host), strict=True):
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    _start_copy(target, source)
            for stream in self._streams:
                current.wait_stream(stream)

        return copy_both_ways

    def count_wrong(self, direction: str) -> int:
        """Return how many bytes of the last copy differ from its source; for `both_ways`, the sum over the two last copies."""
        copied = {"host_to_device": [0], "device_to_host": [1], "both_ways": [0, 1]}[direction]
        return sum(int((self._host[way].to(self._device[way].device) != self._device[way]).sum()) for way in copied)

    def moved(self, direction: str) -> int:
        """Return how many bytes one call of the function from `copy` transfers; for `both_ways`, both copies count."""
        return self.size * (2 if direction == "both_ways" else 1)


def _allocate(size: int, device: torch.device, node: int | None) -> CopyBuffers | RuntimeError:
    """Return buffers whose host memory is on NUMA node `node` (None: on any node), or the error that prevents this."""
    if excluded := _excluded_reason(node, NODES):
        return RuntimeError(excluded)
    try:
        with memory_from_node(node):
            return CopyBuffers(size, device)
    except RuntimeError as error:
        return error


def _start_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _measure(
    context: Context,
    settings: Mapping[str, Any],
    buffers: CopyBuffers | RuntimeError,
    direction: str,
    sharing: str,
    numa: str,
) -> None:
    common: dict[str, Any] = {
        "scope": context.device_scope,
        "direction": direction,
        "sharing": sharing,
        "numa": numa,
        "devices": len(context.present_ranks()) if sharing == "all_gpus" else 1,
        "size_bytes": settings["size_bytes"],
    }
    try:
        if isinstance(buffers, RuntimeError):
            raise buffers
        # If all GPUs copy at once, each rank copies for all of `seconds`. If one rank stopped early, the load on the others
        # would be lower.
        precision = 0.0 if sharing == "all_gpus" else settings["precision"]
        series = context.sample(buffers.copy(direction), precision=precision, seconds=settings["seconds"])
        wrong = buffers.count_wrong(direction)
    except (RuntimeError, ValueError) as error:
        context.report_absent("host_copy.bandwidth", unit="B/s", status=ERROR, reason=describe_error(error), **common)
        return
    if wrong:
        context.report_wrong_data("host_copy.wrong_bytes", wrong, invalid={"host_copy.bandwidth": "B/s"}, **common)
    else:
        context.report_rate("host_copy.bandwidth", buffers.moved(direction), series, unit="B/s", **common)


def numa_nodes(device: torch.device, nodes: Path = NODES) -> tuple[int | None, int | None, str]:
    """Return the GPU's NUMA node, another node on whose CPUs this process may run, and the `numa` label of the first copies.

    The first copies are those with memory on the GPU's node, or on any node if the GPU's node is unknown. Their label is
    `unknown` if the GPU's node is unknown and the process may run on the CPUs of several nodes; otherwise it is `local`.

    The GPU's node is None if the host does not report it. The other node is None in three cases:

    - The GPU's node is None.
    - The process may not run on the CPUs of any other node.
    - The process may not run on the CPUs of the GPU's node. Copies with memory on the GPU's node are then missing, and there is
      nothing to compare with.
    """
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    usable = [node for node, cpus in _cpus_by_node(nodes) if cpus & os.sched_getaffinity(0)]
    try:
        near = int(Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
    except (OSError, ValueError):
        near = -1
    if near < 0:  # the host has one node, or a hypervisor hides the GPU's node
        return None, None, "local" if len(usable) <= 1 else "unknown"
    far = None if _excluded_reason(near, nodes) else next((node for node in usable if node != near), None)
    return near, far, "local"


def _excluded_reason(node: int | None, nodes: Path) -> str:
    """Return why this process may not run on the processors of that NUMA node.

    Return an empty string if the process may run there, if the node is None, or if the node has no processors.
    """
    cpus = dict(_cpus_by_node(nodes))
    usable = [str(each) for each, cpus_of_node in cpus.items() if cpus_of_node & os.sched_getaffinity(0)]
    if node is None or not cpus.get(node) or str(node) in usable:
        return ""
    return (
        f"this process may not use the processors of NUMA node {node} (the GPU's node), only those of node "
        f"{', '.join(usable)}: allow processors of every NUMA node (cpuset of the container, Slurm step or pod)"
    )


def _cpus_by_node(nodes: Path) -> Iterator[tuple[int, set[int]]]:
    for path in sorted(nodes.glob("node[0-9]*")):
        yield int(path.name[4:]), parse_cpu_list((path / "cpulist").read_text())


@contextmanager
def memory_from_node(node: int | None) -> Iterator[None]:
    """Context manager in which this thread's new memory is on that NUMA node, if the thread may run on CPUs of the node.

    The kernel places memory on the node of the CPU that touches it first. So in this context the thread runs on CPUs of the node.
    If it may not run on any CPU of the node, or if the node is None, the context changes nothing.
    """
    before = os.sched_getaffinity(0)
    cpus = dict(_cpus_by_node(NODES)).get(node, set()) & before if node is not None else set()
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)
