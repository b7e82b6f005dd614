"""Copies between each GPU and its host's pinned memory: one way and both, one GPU at a time and all at once.

All GPUs at once share the host's memory and bridges (measured on 4 H200: 39.6 GB/s each instead of 55.4), so the two are
different figures. The memory is taken from the NUMA node that the GPU hangs on, and, where the host has more, from another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context, cuda_stream, failed

NODES = Path("/sys/devices/system/node")


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `host_copy.bandwidth` in B/s; both ways at once, the bytes of both count."""
    size = int(settings["size_bytes"])
    buffers = None
    error: Exception | None = None
    near, far, told = numa_nodes(context.device)
    try:
        with memory_of(near):
            buffers = Buffers(size, context.device)
    except RuntimeError as caught:
        error = caught
    for sharing in settings["sharings"]:
        for direction in settings["directions"]:
            context.phase(f"host_copy {direction} {sharing}")
            for turn in range(context.local_world_size if sharing == "alone" else 1):
                context.meet(f"{direction} {sharing}")
                if sharing == "all_gpus" or turn == context.local_rank:
                    _report(context, settings, buffers or error, direction, sharing, told)
    context.meet("done")
    if far is not None:
        remote: Buffers | Exception
        try:
            with memory_of(far):
                buffers, remote = None, Buffers(size, context.device)
        except RuntimeError as caught:
            remote = caught
        for turn in range(context.local_world_size):
            context.meet("remote")
            for direction in settings["directions"] if turn == context.local_rank else ():
                _report(context, settings, remote, direction, "alone", "remote")


class Buffers:
    """Pinned memory and device memory of `size` bytes, twice, and what copies between them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._device = [torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for _ in range(2)]
        self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=True).copy_(there) for there in self._device]
        self._device[0].zero_()  # what is to arrive must not be there already
        self._host[1].zero_()
        self._streams = [cuda_stream(device) for _ in range(2)]

    def copy(self, direction: str) -> Callable[[], None]:
        """What starts one copy, or both; it is done when the current stream is."""
        down, up = (self._device[0], self._host[0]), (self._host[1], self._device[1])
        if direction == "host_to_device":
            return lambda: _start(*down)
        if direction == "device_to_host":
            return lambda: _start(*up)

        def both() -> None:
            here = torch.cuda.current_stream()
            for stream, (target, source) in zip(self._streams, (down, up), strict=True):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    _start(target, source)
            for stream in self._streams:
                here.wait_stream(stream)

        return both

    def right(self, direction: str) -> bool:
        """Whether what was copied is what was there."""
        copied = {"host_to_device": [0], "device_to_host": [1], "both_ways": [0, 1]}[direction]
        return all(torch.equal(self._host[way].to(self._device[way].device), self._device[way]) for way in copied)

    def moved(self, direction: str) -> int:
        """Bytes of one copy, or of both."""
        return self.size * (2 if direction == "both_ways" else 1)


def _start(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _report(
    context: Context,
    settings: dict[str, Any],
    buffers: Buffers | Exception | None,
    direction: str,
    sharing: str,
    numa: str,
) -> None:
    common: dict[str, Any] = {
        "unit": "B/s",
        "scope": context.device_scope,
        "direction": direction,
        "sharing": sharing,
        "numa": numa,
        "devices": len(context.present()) if sharing == "all_gpus" else 1,
        "size_bytes": int(settings["size_bytes"]),
    }
    try:
        if not isinstance(buffers, Buffers):
            raise buffers or RuntimeError("no buffers")
        # With all GPUs at once nobody stops early: the others are to be measured beside this one.
        precision = 0.0 if sharing == "all_gpus" else float(settings["precision"])
        series = context.sample(buffers.copy(direction), precision=precision, seconds=float(settings["seconds"]))
        if not buffers.right(direction):
            raise ValueError("a copy differs from its source")
    except (RuntimeError, ValueError) as error:
        status, reason = failed(error)
        context.absent("host_copy.bandwidth", status=status, reason=reason, **common)
        return
    context.rate("host_copy.bandwidth", buffers.moved(direction), series, **common)


def numa_nodes(device: torch.device, nodes: Path = NODES) -> tuple[int | None, int | None, str]:
    """The NUMA node that the GPU hangs on; another one with CPUs, where there is a choice; what to call the first.

    `local`, or `unknown` where the host has several and does not say which one it is.
    """
    part = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(part, f"pci_{what}_id", 0) for what in ("domain", "bus", "device"))
    ours = [node for node, cpus in _cpus(nodes) if cpus & os.sched_getaffinity(0)]
    try:
        near = int(Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
    except (OSError, ValueError):
        near = -1
    if near < 0:  # a hypervisor that does not tell
        return None, None, "local" if len(ours) <= 1 else "unknown"
    return near, next((node for node in ours if node != near), None), "local"


def _cpus(nodes: Path) -> Iterator[tuple[int, set[int]]]:
    for path in sorted(nodes.glob("node[0-9]*")):
        found: set[int] = set()
        for part in (path / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1)) if first else set()
        yield int(path.name[4:]), found


@contextmanager
def memory_of(node: int | None) -> Iterator[None]:
    """Inside, new memory comes from that NUMA node, since the thread that first touches it runs there."""
    before = os.sched_getaffinity(0)
    there = dict(_cpus(NODES)).get(node, set()) & before if node is not None else set()
    try:
        if there:
            os.sched_setaffinity(0, there)
        yield
    finally:
        os.sched_setaffinity(0, before)
