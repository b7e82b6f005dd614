"""Copies between one GPU and all others of the host at the same time, and copies by a kernel instead of a copy engine.

`peer_copy` measures one pair of GPUs at a time, so it can miss a fault that shows only if several copies pass a link or a switch
at once. Here a GPU copies to or from all others at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from agent.benchmarks.compute.digest import compute_digest, digest_factors
from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.timing import cuda_event
from agent.gang.heartbeat import describe_error
from agent.sampling.statistics import SampleSeries
from schemas.records import ERROR, SKIPPED

COPIES, SPANS = 4, 12
"""Number of copies to or from each of the other GPUs in a timed span, and number of timed spans."""
LARGEST = 1 << 24
"""Integers below this are exact in fp32, so the copy that converts int32 to fp32 (`by_kernel`) loses nothing."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `group_copy.bandwidth` (B/s, the sum over all copies) for each pattern, and `group_copy.wrong_bytes` for each pair.

    - `one_to_all`: this GPU writes to all others; `all_to_one`: all others write to this GPU.
    - `by_kernel`: a kernel on this GPU writes to the memory of the next GPU. The copy converts int32 to fp32: if source and
      target had the same type, torch would use a copy engine. Without peer access, torch converts into a buffer on this GPU
      instead, and then copies the buffer.
    """
    if context.local_world_size == 1:  # there is no other GPU on this host
        return
    for turn in range(context.local_world_size):
        context.host_barrier("turn")
        if turn == context.local_rank:
            _measure(context, settings)
    torch.cuda.empty_cache()  # this process also holds memory on the other GPUs, whose ranks measure their free memory next
    context.host_barrier("done")


def _measure(context: Context, settings: Mapping[str, Any]) -> None:
    others = [peer for peer in range(context.local_world_size) if peer != context.local_rank]
    wrong = dict.fromkeys(others, 0)
    size = settings["size_bytes"]
    why_skipped = next(filter(None, map(context.why_absent, others)), "")
    failed, copied = False, set()
    for pattern in settings["patterns"]:
        context.set_phase(f"group_copy {pattern}")
        common: dict[str, Any] = {"unit": "B/s", "scope": context.device_scope, "pattern": pattern, "size_bytes": size}
        if why_skipped:  # an access to a lost GPU could break this process's CUDA context
            context.report_absent("group_copy.bandwidth", status=SKIPPED, reason=why_skipped, **common)
            continue
        try:
            peers = others if pattern != "by_kernel" else [(context.local_rank + 1) % context.local_world_size]
            copies = [_copy(context, torch.device("cuda", peer), pattern, size) for peer in peers]
            devices = [context.device, *(torch.device("cuda", peer) for peer in peers)]
            seconds = _time_together(context, [start for start, _ in copies], devices)
            for peer, (_, count_wrong) in zip(peers, copies, strict=True):
                wrong[peer] += count_wrong()
                copied.add(peer)
        except RuntimeError as error:
            failed = True
            context.report_absent("group_copy.bandwidth", status=ERROR, reason=describe_error(error), **common)
            continue
        except TimeoutError:  # wrong bytes count even if a GPU hangs later
            for peer, count in wrong.items():
                if count:
                    context.report("group_copy.wrong_bytes", count, unit="1", scope=context.pair_scope(peer))
            raise
        access = all(torch.cuda.can_device_access_peer(context.device, torch.device("cuda", peer)) for peer in peers)
        series = SampleSeries(seconds=seconds)
        context.report_rate("group_copy.bandwidth", size * len(peers), series, access=access, **common)
    for peer, count in wrong.items():
        of_pair: dict[str, Any] = {"unit": "1", "scope": context.pair_scope(peer)}
        if not count and (why_skipped or failed or peer not in copied):
            status, reason = (SKIPPED, why_skipped) if why_skipped else (ERROR, "not all copies were made")
            context.report_absent("group_copy.wrong_bytes", status=status, reason=reason, **of_pair)
        else:
            context.report("group_copy.wrong_bytes", count, **of_pair)


def _copy(
    context: Context, other: torch.device, pattern: str, size: int
) -> tuple[Callable[[], torch.cuda.Event], Callable[[], int]]:
    """Return two functions: one starts COPIES copies, the other counts the wrong bytes of the last copy.

    The first function returns an event that the GPU records at the end of the copies.
    """
    own = context.device
    source_device, target_device = (other, own) if pattern == "all_to_one" else (own, other)
    # Each pair has different data, so that data of another pair count as wrong.
    generator = torch.Generator(source_device).manual_seed(1000 * source_device.index + target_device.index)
    source = torch.randint(0, LARGEST, (size // 4,), dtype=torch.int32, device=source_device, generator=generator)
    target = torch.empty(
        size // 4, dtype=torch.float32 if pattern == "by_kernel" else torch.int32, device=target_device
    )
    streams = cuda_stream(source_device), cuda_stream(target_device)

    def start() -> torch.cuda.Event:
        with torch.cuda.stream(streams[1]), torch.cuda.stream(streams[0]):
            for _ in range(COPIES):
                target.copy_(source, non_blocking=True)
            done = cuda_event()
            done.record(streams[0])
        return done

    def count_wrong() -> int:
        expected = source.to(target.dtype)
        factors = digest_factors(expected)
        digests = compute_digest(expected, factors), compute_digest(target, factors.to(target_device))
        context.synchronize_devices((source_device, target_device))  # has a time-out, unlike reading the digests
        if digests[0].item() == digests[1].item():
            return 0
        # Compare in host memory: a comparison over the path between the GPUs could fail because of this path.
        return max(1, int((target.cpu().view(torch.uint8) != expected.cpu().view(torch.uint8)).sum()))

    return start, count_wrong


def _time_together(
    context: Context, starts: Sequence[Callable[[], torch.cuda.Event]], devices: Sequence[torch.device]
) -> list[float]:
    """Time SPANS spans with the host's clock; return the seconds of each span, divided by COPIES.

    In a span, COPIES copies are made to or from each peer, all peers at once.
    """
    seconds = []
    for _ in range(1 + SPANS):
        context.synchronize_devices(devices)
        begin = time.perf_counter()
        for done in [start() for start in starts]:
            context.wait_for(done, pause_s=0.0)  # a pause would lengthen the measured time
        seconds.append((time.perf_counter() - begin) / COPIES)
    return seconds[1:]  # in the first span CUDA enables the access between the GPUs, which takes time
