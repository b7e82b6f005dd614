"""Collective operations between all ranks: bandwidth, latency, whether every element arrived right, and NCCL's path.

Sizes, algbw and busbw are those of nccl-tests (doc/PERFORMANCE.md): the size is the larger of the send and the receive
buffer of a rank, algbw = size / time, busbw = algbw × a factor that makes it comparable with a link's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from agent.benchmarks.collectives.operations import OPERATIONS, Buffers
from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.context import Context, cuda_stream, failed
from agent.benchmarks.runtime.nccl import Communicator, NcclError, library
from agent.sampling.statistics import Series, summarize
from schemas.catalogue import offers
from schemas.records import ERROR, SKIPPED

Path = Mapping[str, Any]
"""What NCCL chose for an operation: algorithm, protocol, transport, nvls."""
KINDS = (("algbw", "B/s"), ("busbw", "B/s"), ("latency", "s"), ("wrong_elements", "1"))
SPAN_S = 0.02
"""An event between two operations costs some 40 µs (measured, 4 H200): nccl-tests too looks at the clock after 20 only."""
CPU_SPAN_S = 1e-4
"""A CPU's clock costs a tenth of a microsecond; of many operations in a row, ranks that share processors make seconds."""
GRAPH_CALLS = 100
PLACES = 12
"""Where in memory the buffers lie moves a figure by up to 5 % (measured, 4 H200, all_to_all of 128 MiB; the same buffers again:
0.3 %). So each large one is timed in several places, and its median is the median over them."""
LARGE_BYTES = 1 << 20
MEMORY_SHARE = 0.75
"""Of the free memory that these may take."""


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports algbw and busbw in B/s, latency in s, and the number of wrong elements, for each operation, size and placement.

    Also `collective.transport`, `.nvls` and `.channels`, and the latency of small messages in a CUDA graph, where NCCL is.
    """
    cases = [
        (op, placement, int(size))
        for op in settings["ops"]
        for placement in settings["placements"]
        if offers(op, placement, context.kind)
        for size in settings["sizes_bytes"]
    ]
    if context.world_size == 1:
        for op, placement, size in cases:
            _absent(context, op, placement, size, SKIPPED, "one rank has nobody to talk to")
        return
    if context.kind == "cpu":
        _run(context, cases, settings, None)
        return
    communicator = _communicator(context)
    try:
        _run(context, cases, settings, communicator)
        for op in settings["graph_ops"]:
            for size in settings["graph_sizes_bytes"]:
                _graph(context, op, int(size), settings, communicator)
    except Exception as error:  # whatever it was, the others may hang in an operation
        if said := communicator.abort():
            raise NcclError(f"{error}; {said}") from error
        raise
    communicator.close()


def _communicator(context: Context) -> Communicator:
    """NCCL over all ranks; raises on every rank where one of them cannot call it, for the others would wait for it."""
    nccl, problem = None, "another rank has no libnccl.so.2"
    try:
        nccl = library()
    except OSError as error:
        problem = f"{error}: torch holds NCCL within itself; install nvidia-nccl"
    if not context.agree(int(nccl is not None))[0] or nccl is None:
        raise NcclError(problem)
    return Communicator(nccl, context.store, context.rank, context.world_size, context.timeout_s)


Case = tuple[str, str, int]
"""Operation, placement, size in bytes."""


def _run(context: Context, cases: list[Case], settings: dict[str, Any], communicator: Communicator | None) -> None:
    paths = _paths(context, cases, communicator) if communicator else {}
    for case in cases:
        context.phase("collective {} {} {} B".format(*case))
        _measure(context, case, settings, communicator, paths.get(case, {}))
        if case[2] == max(settings["sizes_bytes"]):
            context.save()


def _measure(
    context: Context, case: Case, settings: dict[str, Any], communicator: Communicator | None, path: Path
) -> None:
    op, placement, size = case
    buffers, why = _buffers(context, case, communicator)
    if buffers is None:
        _absent(context, op, placement, size, ERROR, why)
        return
    before = buffers.check()
    context.synchronize()  # waits only so long, which reading the count does not
    places = [buffers, *_elsewhere(context, case, communicator)]
    series = _sample(context, [place.run for place in places], settings)
    after = buffers.check()
    context.synchronize()
    wrong = context.total(float(before + after))
    if not context.speaks_for_world:
        return
    times = summarize(series.seconds, series.stopped)
    algbw = buffers.moved / times.p50
    # Chunks hold one element at least: 8 B over more than two ranks are more than that.
    more = {} if buffers.moved == size else {"moved_bytes": buffers.moved}
    if len(places) > 1:
        more["places"] = len(places)
    common = _common(context, size) | {"placement": placement, **path, **more}
    context.measured(f"collective.{op}.algbw", algbw, unit="B/s", **common)
    context.measured(f"collective.{op}.busbw", algbw * OPERATIONS[op].factor(context.world_size), unit="B/s", **common)
    context.measured(f"collective.{op}.latency", times.p50, unit="s", samples=times, **common)
    context.measured(f"collective.{op}.wrong_elements", int(wrong), unit="1", **common)


def _sample(
    context: Context, work: Callable[[], object] | Sequence[Callable[[], object]], settings: dict[str, Any]
) -> Series:
    return context.sample(
        work,
        precision=float(settings["precision"]),
        seconds=float(settings["seconds"]),
        span_s=SPAN_S if context.device.type == "cuda" else CPU_SPAN_S,
        together=True,
    )


def _buffers(context: Context, case: Case, communicator: Communicator | None) -> tuple[Buffers | None, str]:
    """The operation's buffers on every rank, or on none: a rank that went on alone would wait for the others for ever."""
    buffers, error = None, None
    try:
        if case[0] == "hypercube" and context.world_size & (context.world_size - 1):
            raise ValueError(f"a hypercube of {context.world_size} ranks: they are no power of two")
        buffers = Buffers(*case, context.rank, context.world_size, context.device, communicator)
    except (RuntimeError, ValueError) as caught:  # out of memory, most of the time
        error = caught
    if context.agree(0 if error else 1)[0]:
        return buffers, ""
    return None, failed(error)[1] if error else "another rank could not make its buffers"


def _elsewhere(context: Context, case: Case, communicator: Communicator | None) -> list[Buffers]:
    """More buffers for the same operation, on every rank as many as the fullest GPU has room for."""
    if context.device.type != "cuda" or case[2] < LARGE_BYTES:
        return []
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(context.device)
    room = context.agree(min(PLACES - 1, int(free * MEMORY_SHARE / (2 * case[2]))))[0]
    return [Buffers(*case, context.rank, context.world_size, context.device, communicator) for _ in range(room)]


def _common(context: Context, size: int) -> dict[str, Any]:
    return {
        "scope": context.world_scope,
        "size_bytes": size,
        "world_size": context.world_size,
        "dtype": "fp32",
        "backend": dist.get_backend(),
    }


def _absent(context: Context, op: str, placement: str, size: int, status: str, reason: str) -> None:
    for kind, unit in KINDS if context.speaks_for_world else ():
        context.absent(
            f"collective.{op}.{kind}",
            unit=unit,
            scope=context.world_scope,
            status=status,
            reason=reason,
            size_bytes=size,
            placement=placement,
        )


def _paths(context: Context, cases: list[Case], communicator: Communicator) -> dict[Case, Path]:
    """Runs every case once, untimed, while NCCL tells what it chooses, and reports the way that the ranks talk."""
    context.phase("collective paths")
    log = nccl_log.Log(context.work / f"nccl.rank{context.rank}.log")
    text, chosen = "", {}
    for case in cases:
        buffers, _ = _buffers(context, case, communicator)
        text += log.news()
        if buffers:
            buffers.run()
            context.synchronize()
            news = log.news()
            text += news
            chosen[case] = nccl_log.choice(news)
    hushed = nccl_log.hush()
    way, channels = _way(context, nccl_log.transport(text)), nccl_log.channels(text)
    common: dict[str, Any] = {"unit": "1", "scope": context.world_scope, "world_size": context.world_size}
    facts = {"transport": way or None, "channels": channels and channels[0], "nvls": channels and channels[1] > 0}
    for name, value in facts.items() if context.speaks_for_world else ():
        if value is None:
            context.absent(f"collective.{name}", status=ERROR, reason="NCCL's log does not tell", **common)
        else:
            context.measured(f"collective.{name}", value, **common)
    known = {key: value for key, value in facts.items() if value is not None and key != "channels"}
    logged = {} if hushed else {"nccl_log": "open"}  # a line an operation is then in each latency
    return {case: {**known, **choice, **logged} for case, choice in chosen.items()}


def _way(context: Context, mine: str) -> str:
    """The ways that all ranks talk: one GPU without its NVLinks, or one NIC without GPUDirect, shows in its own log only.

    `unknown` stands for a rank whose log tells none; empty where none of them tells.
    """
    context.store.set(f"transport/{context.rank}", mine)
    context.agree(1)  # everyone has said it
    said = {context.store.get(f"transport/{rank}").decode() for rank in range(context.world_size)}
    if said == {""}:
        return ""
    return "+".join(sorted({way or "unknown" for ways in said for way in ways.split("+")}))


def _graph(context: Context, op: str, size: int, settings: dict[str, Any], communicator: Communicator) -> None:
    """Latency where the host launches nothing: many operations in one CUDA graph."""
    context.phase(f"collective {op} {size} B in a graph")
    name, common = f"collective.{op}.graph_latency", _common(context, size)
    stream = cuda_stream(context.device)
    with torch.cuda.stream(stream):
        buffers, why = _buffers(context, (op, "out_of_place", size), communicator)
    if buffers is None:
        if context.speaks_for_world:
            context.absent(name, unit="s", status=ERROR, reason=why, **common)
        return
    with torch.cuda.stream(stream):
        buffers.run()
        context.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(GRAPH_CALLS):
            buffers.run()
    series = _sample(context, graph.replay, settings)
    times = summarize([seconds / GRAPH_CALLS for seconds in series.seconds], series.stopped)
    if context.speaks_for_world:
        context.measured(name, times.p50, unit="s", samples=times, placement="out_of_place", **common)
