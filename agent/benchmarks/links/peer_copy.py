"""Copies from each GPU of the host to every other GPU: peer access, bandwidth in one and in both directions, latency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.timing import cuda_event, elapsed_s
from agent.gang.heartbeat import describe_error
from agent.sampling.statistics import SampleSeries, interval, summarize
from schemas.records import ERROR, SKIPPED

COPIES = 3
"""Copies in one timed span. An untimed copy precedes them; the span begins when that copy has finished."""
BLOCK = 6
"""Spans that are timed between two checks of the median's precision."""
LATENCY_COPIES = 100
"""Number of 4-byte copies in one CUDA graph, which runs them one after the other. The host launches the graph only once, so the
latency does not include a launch for each copy."""
LATENCY_SAMPLES = 6
"""Number of timed replays of that graph."""

WRONG_DATA = "a copy differs from its source: see peer_copy.wrong_bytes"


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `peer_copy.access`, `peer_copy.bandwidth` (B/s) and `peer_copy.latency` (s) from this GPU to every other GPU.

    `peer_copy.access` is whether the GPU can access the other GPU's memory directly. For copies in both directions at once, the
    bandwidth is the sum of the two. If a copy differs from its source, report `peer_copy.wrong_bytes` of the pair, and an error
    instead of the bandwidth or latency of this copy.

    Only one GPU starts copies at a time, because simultaneous copies may share a link or a bridge.
    """
    for turn in range(context.local_world_size):
        context.host_barrier("turn")
        if turn == context.local_rank:
            for peer in range(context.local_world_size):
                if peer == context.local_rank:
                    continue
                # An access to a lost GPU could break this process's CUDA context.
                if reason := context.why_absent(peer):
                    _report_skipped_pair(context, settings, peer, reason)
                else:
                    _measure_pair(context, settings, peer)
    # PyTorch's cache of this process holds memory on the other GPUs. It is freed, because later benchmarks measure free memory.
    torch.cuda.empty_cache()
    context.host_barrier("done")


def _report_skipped_pair(context: Context, settings: Mapping[str, Any], peer: int, reason: str) -> None:
    common: dict[str, Any] = {"scope": context.pair_scope(peer), "status": SKIPPED, "reason": reason}
    context.report_absent("peer_copy.access", unit="1", **common)
    context.report_absent("peer_copy.latency", unit="s", **common)
    for direction in settings["directions"]:
        context.report_absent("peer_copy.bandwidth", unit="B/s", direction=direction, **common)


def _measure_pair(context: Context, settings: Mapping[str, Any], peer: int) -> None:
    context.set_phase(f"peer_copy to local rank {peer}")
    other = torch.device("cuda", peer)
    scope = context.pair_scope(peer)
    access = torch.cuda.can_device_access_peer(context.device, other)
    context.report("peer_copy.access", access, unit="1", scope=scope)
    wrong = 0
    try:
        for direction in settings["directions"]:
            wrong += _measure_bandwidth(context, settings, other, direction, scope=scope, access=access)
        wrong += _measure_latency(context, other, scope=scope, access=access)
    finally:  # wrong bytes are reported even if a GPU fails later
        if wrong:
            context.report("peer_copy.wrong_bytes", wrong, unit="1", scope=scope, access=access)


def _measure_latency(context: Context, other: torch.device, **params: Any) -> int:
    """Report the latency; return the number of wrong bytes."""
    common: dict[str, Any] = {"unit": "s", **params}
    try:
        seconds, wrong = _time_small_copies(context, other)
    except RuntimeError as error:
        context.report_absent("peer_copy.latency", status=ERROR, reason=describe_error(error), **common)
        return 0
    if wrong:
        context.report_absent("peer_copy.latency", status=ERROR, reason=WRONG_DATA, **common)
    else:
        context.report("peer_copy.latency", summarize(seconds), **common)
    return wrong


def _measure_bandwidth(
    context: Context, settings: Mapping[str, Any], other: torch.device, direction: str, **params: Any
) -> int:
    """Report the bandwidth; return the number of wrong bytes."""
    size = settings["size_bytes"]
    common: dict[str, Any] = {"unit": "B/s", "direction": direction, "size_bytes": size, **params}
    try:
        pair = DevicePair(context, other, size)
        series = pair.sample(direction, settings["precision"], settings["seconds"])
        wrong = pair.count_wrong()
    except RuntimeError as error:
        context.report_absent("peer_copy.bandwidth", status=ERROR, reason=describe_error(error), **common)
        return 0
    if wrong:
        context.report_absent("peer_copy.bandwidth", status=ERROR, reason=WRONG_DATA, **common)
    else:
        context.report_rate("peer_copy.bandwidth", size * (2 if direction == "both_ways" else 1), series, **common)
    return wrong


class DevicePair:
    """Buffers on two devices, and streams for the copies between them.

    Each direction has its own stream on each device, so the directions do not wait for each other.
    """

    def __init__(self, context: Context, other: torch.device, size: int) -> None:
        self._context = context
        self._directions = []
        for from_device, to_device in ((context.device, other), (other, context.device)):
            source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=from_device)
            target = torch.empty_like(source, device=to_device)
            self._directions.append((source, target, cuda_stream(from_device), cuda_stream(to_device)))
        self._active_directions = self._directions[:1]

    def sample(self, direction: str, precision: float, seconds: float) -> SampleSeries:
        """Time one copy (or one in each direction) repeatedly, until the median is precise or `seconds` are spent."""
        self._active_directions = self._directions if direction == "both_ways" else self._directions[:1]
        self._time_span()
        times: list[float] = []
        while True:
            times += [self._time_span() for _ in range(BLOCK)]
            half_interval = interval(times)
            if half_interval is not None and half_interval <= precision:
                return SampleSeries(seconds=times, stopped="precision")
            if sum(times) * (COPIES + 1) >= seconds:
                return SampleSeries(seconds=times, stopped="time")

    def _time_span(self) -> float:
        events = []
        for source, target, source_stream, target_stream in self._active_directions:
            with torch.cuda.stream(target_stream), torch.cuda.stream(source_stream):
                first, last = cuda_event(), cuda_event()
                # An untimed copy, which keeps the GPU busy until the host has launched the timed copies.
                target.copy_(source, non_blocking=True)
                first.record(source_stream)
                for _ in range(COPIES):
                    target.copy_(source, non_blocking=True)
                last.record(source_stream)
            events.append((first, last))
        for _, last in events:
            self._context.wait_for(last)
        return max(elapsed_s(first, last) for first, last in events) / COPIES

    def count_wrong(self) -> int:
        """Return how many bytes of the last copy differ from its source; for `both_ways`, the sum over the two last copies."""
        return sum(_count_differing(self._context, source, target) for source, target, _, _ in self._active_directions)


def _count_differing(context: Context, source: torch.Tensor, target: torch.Tensor) -> int:
    """Return how many bytes of the target differ from the source.

    The target's device compares the target with a new copy of the source. If they differ, the host counts the differing bytes.
    The result is then at least 1, even if the host finds no difference.
    """
    differs = (source.to(target.device, non_blocking=True) != target).any()
    context.synchronize_devices((source.device, target.device))  # has a time-out, unlike reading the result
    if not differs:
        return 0
    return max(1, int((source.cpu().view(torch.uint8) != target.cpu().view(torch.uint8)).sum()))


def _time_small_copies(context: Context, target_device: torch.device) -> tuple[list[float], int]:
    """Return LATENCY_SAMPLES latencies of a 4-byte copy in seconds, and the number of wrong bytes of the last copy.

    Each latency is the mean of LATENCY_COPIES copies.
    """
    source_device = context.device
    source, target = torch.ones(1, device=source_device), torch.zeros(1, device=target_device)
    source_stream, target_stream = cuda_stream(source_device), cuda_stream(target_device)
    context.synchronize_devices((source_device, target_device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=source_stream):
        target_stream.wait_stream(source_stream)
        with torch.cuda.stream(target_stream), torch.cuda.stream(source_stream):
            for _ in range(LATENCY_COPIES):
                target.copy_(source, non_blocking=True)
        source_stream.wait_stream(target_stream)
    latencies = [seconds / LATENCY_COPIES for seconds in context.replay_times(graph, LATENCY_SAMPLES)]
    return latencies, _count_differing(context, source, target)
