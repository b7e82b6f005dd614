"""Copies from each GPU to each other one of the host: peer access, bandwidth one way and both ways, latency."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context, cuda_stream, failed
from agent.benchmarks.runtime.timing import cuda_event, elapsed
from agent.sampling.statistics import Series, interval, summarize
from schemas.records import SKIPPED

COPIES = 3
"""Copies in one timed span, which begins when one before them has ended."""
LATENCY_COPIES = 100
"""Copies of one word, one after the other, in one CUDA graph, so that the host's launches are not in the figure."""


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports, for this GPU to each other, `peer_copy.access`, `.bandwidth` in B/s (both ways: of both) and `.latency` in s.

    The GPUs take turns: two copies at once may share a link or a bridge.
    """
    for turn in range(context.local_world_size):
        context.meet("turn")
        if turn == context.local_rank:
            for peer in range(context.local_world_size):
                if peer != context.local_rank and peer in context.present():
                    _pair(context, settings, peer)
                elif peer != context.local_rank:  # a fault of its GPU could become this process's own
                    _no_peer(context, settings, peer)
    torch.cuda.empty_cache()  # the peers' memory too, before they look how much of it is free
    context.meet("done")


def _no_peer(context: Context, settings: dict[str, Any], peer: int) -> None:
    common: dict[str, Any] = {"scope": context.pair_scope(peer), "status": SKIPPED, "reason": "the other GPU was lost"}
    context.absent("peer_copy.access", unit="1", **common)
    context.absent("peer_copy.latency", unit="s", **common)
    for direction in settings["directions"]:
        context.absent("peer_copy.bandwidth", unit="B/s", direction=direction, **common)


def _pair(context: Context, settings: dict[str, Any], peer: int) -> None:
    context.phase(f"peer_copy to local rank {peer}")
    other = torch.device("cuda", peer)
    scope = context.pair_scope(peer)
    access = torch.cuda.can_device_access_peer(context.device, other)
    context.measured("peer_copy.access", access, unit="1", scope=scope)
    size = int(settings["size_bytes"])
    for direction in settings["directions"]:
        common: dict[str, Any] = {
            "unit": "B/s",
            "scope": scope,
            "direction": direction,
            "size_bytes": size,
            "access": access,
        }
        try:
            pair = Pair(context.device, other, size)
            series = pair.sample(direction, float(settings["precision"]), float(settings["seconds"]))
            if not pair.right():
                raise ValueError("what arrived is not what was sent")
        except (RuntimeError, ValueError) as error:
            status, reason = failed(error)
            context.absent("peer_copy.bandwidth", status=status, reason=reason, **common)
            continue
        context.rate("peer_copy.bandwidth", size * (2 if direction == "both_ways" else 1), series, **common)
        del pair
    try:
        seconds = _latencies(context.device, other)
    except (RuntimeError, ValueError) as error:
        status, reason = failed(error)
        context.absent("peer_copy.latency", unit="s", scope=scope, status=status, reason=reason, access=access)
    else:
        context.measured(
            "peer_copy.latency",
            statistics.median(seconds),
            unit="s",
            scope=scope,
            samples=summarize(seconds),
            access=access,
        )


class Pair:
    """Buffers on two devices, with a pair of streams for each way, so that the ways do not wait for each other."""

    def __init__(self, here: torch.device, there: torch.device, size: int) -> None:
        self._devices = (here, there)
        self._ways = []
        for source, target in ((here, there), (there, here)):
            data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=source)
            self._ways.append((data, torch.empty_like(data, device=target), cuda_stream(source), cuda_stream(target)))
        self._used = self._ways[:1]

    def sample(self, direction: str, precision: float, seconds: float) -> Series:
        """Seconds of one copy, or of one each way at once, until the median is sure or the time spent."""
        self._used = self._ways if direction == "both_ways" else self._ways[:1]
        self._span()
        found: list[float] = []
        while True:
            found += [self._span() for _ in range(6)]
            sure = interval(found)
            if sure is not None and sure <= precision:
                return Series(seconds=found, stopped="precision")
            if sum(found) * (COPIES + 1) >= seconds:
                return Series(seconds=found, stopped="time")

    def _span(self) -> float:
        marks = []
        for data, arrived, out, into in self._used:
            with torch.cuda.stream(into), torch.cuda.stream(out):
                first, last = cuda_event(), cuda_event()
                arrived.copy_(data, non_blocking=True)  # busy until the host has told it all the rest
                first.record(out)
                for _ in range(COPIES):
                    arrived.copy_(data, non_blocking=True)
                last.record(out)
            marks.append((first, last))
        for device in self._devices:
            torch.cuda.synchronize(device)
        return max(elapsed(first, last) for first, last in marks) / COPIES

    def right(self) -> bool:
        """Whether what arrived is what was sent."""
        return all(torch.equal(data.to(arrived.device), arrived) for data, arrived, _, _ in self._used)


def _latencies(here: torch.device, there: torch.device) -> list[float]:
    """Seconds of one copy of one word, several times."""
    source, target = torch.ones(1, device=here), torch.zeros(1, device=there)
    out, into = cuda_stream(here), cuda_stream(there)
    for device in (here, there):
        torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=out):
        into.wait_stream(out)
        with torch.cuda.stream(into), torch.cuda.stream(out):
            for _ in range(LATENCY_COPIES):
                target.copy_(source, non_blocking=True)
        out.wait_stream(into)
    seconds = []
    for _ in range(7):
        first, last = cuda_event(), cuda_event()
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize(here)
        seconds.append(elapsed(first, last) / LATENCY_COPIES)
    if float(target) != 1.0:
        raise ValueError("what arrived is not what was sent")
    return seconds[1:]  # the first replay uploads the graph
