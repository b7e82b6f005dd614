"""Collective operations between all ranks: bandwidth, latency, correctness of every element, and NCCL's transport.

The size of an operation is that of the larger of a rank's two buffers (send and receive). algbw = size / time. busbw = algbw × a
factor that makes the product comparable with the rate of a link. These are the definitions of nccl-tests (doc/PERFORMANCE.md),
except for the algbw of hypercube, which nccl-tests computes differently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from agent.benchmarks.collectives.operations import CollectiveBuffers
from agent.benchmarks.runtime import nccl_log
from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.runtime.nccl import Communicator, NcclError
from agent.benchmarks.runtime.rank_context import Value
from agent.benchmarks.runtime.timing import Work
from agent.gang.heartbeat import describe_error
from agent.run.preflight import distorts
from agent.sampling.statistics import SampleSeries, summarize
from schemas.benchmarks.communication import bus_factor
from schemas.catalogue import supports_placement
from schemas.records import ERROR, SKIPPED

UNITS = {"algbw": "B/s", "busbw": "B/s", "latency": "s", "wrong_elements": "1"}
SPAN_S = 0.02
"""Seconds in a timed span on GPUs. A span covers several operations, because the CUDA events at its ends cost about 40 µs
(measured, 4 H200)."""
CPU_SPAN_S = 1e-4
"""Seconds in a timed span on CPUs. A short span is precise enough, because reading the clock costs only 0.1 µs. If ranks
share CPUs, an operation may have to wait until every rank has had a CPU. A span of many operations could then take seconds."""
GRAPH_CALLS = 100
"""Operations in one CUDA graph."""
BUFFER_PAIRS = 12
"""Maximum number of pairs of buffers of a large operation. The operation is timed with each pair in turn, and the median of all
these times is reported, because the time depends on the addresses of the buffers. The times of two pairs differ by up to 5 %; the
times of one pair differ by only 0.3 % (measured, 4 H200, all_to_all of 128 MiB)."""
LARGE_BYTES = 1 << 20
"""Smallest size of a large operation."""
MEMORY_SHARE = 0.75
"""Share of the free device memory that the additional pairs of buffers may take."""

SEPARATOR, LONGEST_SETTING, LONGEST_PARAMETER = "; ", 100, 512
"""Text between two settings in the parameters `nccl_settings` and `nccl_other_settings`, maximum length of a value, and maximum
length of a parameter (`schemas/observation.schema.json`)."""
_SELECTING = re.compile(r"NCCL_(DEBUG|CONF_FILE|COMM_ID|HOSTID|SOCKET_(IFNAME|FAMILY)|IB_(HCA|GID|ADDR|ROCE|PKEY))")
"""Beginnings of names of settings that do not change the speed of NCCL."""


class Case(NamedTuple):
    """One operation to measure, with its placement and size."""

    op: str
    placement: str
    """`in_place` or `out_of_place`."""
    size: int
    """Bytes."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report algbw and busbw in B/s, latency in s and the number of wrong elements of each operation, size and placement.

    With NCCL, also report `collective.transport`, `.nvls` and `.channels`, and the latency of small messages in a CUDA graph.
    """
    cases = [
        Case(op, placement, size)
        for op in settings["ops"]
        for placement in settings["placements"]
        if supports_placement(op, placement, context.kind)
        for size in settings["sizes_bytes"]
    ]
    if context.world_size == 1:
        for case in cases:
            _report_absent(context, case, SKIPPED, "a collective needs two ranks")
        return
    if context.kind == "cpu":
        _measure_all(context, cases, settings, None)
        return
    communicator = Communicator.connect(context, "collective")
    try:
        _measure_all(context, cases, settings, communicator)
        for op in settings["graph_ops"]:
            for size in settings["graph_sizes_bytes"]:
                _measure_in_graph(context, op, size, settings, communicator)
    except Exception as error:  # after any error, operations with the other ranks may hang: abort them
        if nccl_error := communicator.abort():
            raise NcclError(f"{error}; {nccl_error}") from error
        raise
    communicator.close()


def _measure_all(
    context: Context, cases: Sequence[Case], settings: Mapping[str, Any], communicator: Communicator | None
) -> None:
    choices = _find_nccl_choices(context, cases, communicator) if communicator else {}
    for case in cases:
        context.set_phase(f"collective {case.op} {case.placement} {case.size} B")
        _measure(context, case, settings, communicator, choices.get(case, {}))
        if case.size == max(settings["sizes_bytes"]):
            context.save()


def _measure(
    context: Context,
    case: Case,
    settings: Mapping[str, Any],
    communicator: Communicator | None,
    choice: Mapping[str, Any],
) -> None:
    buffers, reason = _allocate(context, case, communicator)
    if buffers is None:
        _report_absent(context, case, ERROR, reason)
        return
    wrong_before = buffers.run_and_check()
    context.synchronize()  # raises TimeoutError if the operation hangs; reading the count would wait without end
    wrong = context.sum_over_ranks(float(wrong_before))
    params = _params(context, case.size) | {"placement": case.placement, **choice}
    try:
        buffer_pairs = [buffers, *_allocate_more(context, case, communicator)]
        series = _sample(context, [pair.run for pair in buffer_pairs], settings)
        wrong_after = buffers.run_and_check()
        context.synchronize()
        wrong += context.sum_over_ranks(float(wrong_after))
    except Exception:  # report the wrong elements of the first run even if a later operation hangs
        if wrong and context.is_reporting_rank:
            name = f"collective.{case.op}.wrong_elements"
            context.report(name, int(wrong), unit=UNITS["wrong_elements"], scope=context.world_scope, **params)
        raise
    times = summarize(series.seconds, series.stopped)
    algbw = buffers.moved / times.p50
    if buffers.moved != case.size:  # the size was rounded, so that every rank has the same whole number of elements
        params["moved_bytes"] = buffers.moved
    if len(buffer_pairs) > 1:
        params["places"] = len(buffer_pairs)
    values: dict[str, Value] = {
        "algbw": algbw,
        "busbw": algbw * bus_factor(case.op, context.world_size),
        "latency": times,
        "wrong_elements": int(wrong),
    }
    context.report_world(
        {f"collective.{case.op}.{kind}": (value, UNITS[kind]) for kind, value in values.items()}, **params
    )


def _sample(context: Context, work: Work | Sequence[Work], settings: Mapping[str, Any]) -> SampleSeries:
    return context.sample(
        work,
        precision=settings["precision"],
        seconds=settings["seconds"],
        span_s=SPAN_S if context.device.type == "cuda" else CPU_SPAN_S,
        together=True,
    )


def _allocate(context: Context, case: Case, communicator: Communicator | None) -> tuple[CollectiveBuffers | None, str]:
    """Return the buffers, or None and a reason. If any rank cannot allocate them, all ranks return None."""
    buffers, error = None, None
    try:
        if case.op == "hypercube" and context.world_size & (context.world_size - 1):
            raise ValueError(f"the number of ranks in a hypercube must be a power of two, not {context.world_size}")
        buffers = CollectiveBuffers(*case, context.rank, context.world_size, context.device, communicator)
    except (RuntimeError, ValueError) as caught:  # usually out of memory
        error = caught
    if context.min_max_over_ranks(0 if error else 1)[0]:
        return buffers, ""
    return None, describe_error(error) if error else "another rank could not allocate its buffers"


def _allocate_more(context: Context, case: Case, communicator: Communicator | None) -> list[CollectiveBuffers]:
    """Return more pairs of buffers for a large operation on GPUs, at most BUFFER_PAIRS - 1; none for any other operation.

    All ranks get the same number of pairs. They must fit into MEMORY_SHARE of the free memory of every GPU.
    """
    if context.device.type != "cuda" or case.size < LARGE_BYTES:
        return []
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(context.device)
    count = context.min_max_over_ranks(min(BUFFER_PAIRS - 1, int(free * MEMORY_SHARE / (2 * case.size))))[0]
    return [
        CollectiveBuffers(*case, context.rank, context.world_size, context.device, communicator) for _ in range(count)
    ]


def _params(context: Context, size: int) -> dict[str, Any]:
    return {
        "size_bytes": size,
        "world_size": context.world_size,
        "dtype": "fp32",
        "backend": dist.get_backend(),
    }


def _report_absent(context: Context, case: Case, status: str, reason: str) -> None:
    for kind, unit in UNITS.items() if context.is_reporting_rank else ():
        context.report_absent(
            f"collective.{case.op}.{kind}",
            unit=unit,
            scope=context.world_scope,
            status=status,
            reason=reason,
            size_bytes=case.size,
            placement=case.placement,
        )


def _find_nccl_choices(
    context: Context, cases: Sequence[Case], communicator: Communicator
) -> dict[Case, dict[str, Any]]:
    """Run every case once, untimed, with NCCL's log enabled. Report transport, channels and use of NVLS (NVLink SHARP).

    Return case -> parameters of its figures: transport, use of NVLS, settings that may slow NCCL and, if NCCL logs them,
    algorithm and protocol.
    """
    context.set_phase("collective: find what NCCL chooses")
    log = nccl_log.NcclLog(context.work / f"nccl.rank{context.rank}.log")
    text, choices = "", {}
    for case in cases:
        buffers, _ = _allocate(context, case, communicator)
        text += log.read_new()
        if buffers:
            buffers.run()
            context.synchronize()
            lines = log.read_new()
            text += lines
            choices[case] = nccl_log.parse_choice(lines)
    disabled = nccl_log.disable()
    transport, channels = (
        all_transports(context, nccl_log.parse_transport(text), "transport"),
        nccl_log.parse_channels(text),
    )
    facts = {"transport": transport or None, "channels": channels and channels[0], "nvls": channels and channels[1] > 0}
    for name, value in facts.items():
        if value is not None:
            context.report_world({f"collective.{name}": (value, "1")}, world_size=context.world_size)
        elif context.is_reporting_rank:
            context.report_absent(
                f"collective.{name}",
                unit="1",
                scope=context.world_scope,
                status=ERROR,
                reason="NCCL's log does not state it",
                world_size=context.world_size,
            )
    known = {key: value for key, value in facts.items() if value is not None and key != "channels"}
    known |= _nccl_settings(context, text)
    if not disabled:
        known["nccl_log"] = "open"  # the log is still enabled, so each latency includes the time to write to it
    return {case: {**known, **choice} for case, choice in choices.items()}


def all_transports(context: Context, transport: str, key: str) -> str:
    """Return the transports of all ranks, joined with `+`. Each rank knows only its own `transport`, from its log.

    The ranks exchange their transports in the store of the launch under `key`. If only the logs of some ranks state a
    transport, the transport of the other ranks is `unknown`. If no log states one, the result is empty.
    """
    texts = _of_all_ranks(context, transport, key)
    if texts == {""}:
        return ""
    return "+".join(sorted({name or "unknown" for text in texts for name in text.split("+")}))


def _nccl_settings(context: Context, text: str) -> dict[str, str]:
    """Return the parameters `nccl_settings` and `nccl_other_settings`, each only if any rank has such settings.

    The first has the settings that may slow NCCL on a healthy host, and the second the other settings that NCCL has read, except
    those of its log and those that select ports and addresses (_SELECTING), and the one that the ranks set themselves.

    `text` is the log of this rank. It also has the settings in NCCL's configuration files.
    """
    logged = nccl_log.parse_settings(text)
    slowing = {
        key: value
        for key, value in {**os.environ, **logged}.items()
        if key.startswith(("NCCL_", "CUDA_")) and distorts(key, value)
    }
    other = {
        key: value
        for key, value in logged.items()
        if key not in slowing and not _SELECTING.match(key) and (key, value) != nccl_log.NO_GRAPH_MIXING
    }
    params: dict[str, str] = {}
    for name, settings in (("nccl_settings", slowing), ("nccl_other_settings", other)):
        own = SEPARATOR.join(f"{key}={value[:LONGEST_SETTING]}" for key, value in settings.items())
        of_all = {each for texts in _of_all_ranks(context, own, name) for each in texts.split(SEPARATOR) if each}
        params |= {name: _joined(sorted(of_all))} if of_all else {}
    return params


def _joined(settings: Sequence[str]) -> str:
    """Return the settings as one text, which says how many are left out because a parameter may not be longer."""
    for count in range(len(settings), 0, -1):
        more = [f"and {len(settings) - count} more"] if count < len(settings) else []
        text = SEPARATOR.join([*settings[:count], *more])
        if len(text) <= LONGEST_PARAMETER:
            break
    return text


def _of_all_ranks(context: Context, text: str, key: str) -> set[str]:
    """Return the texts of all ranks. The ranks exchange them in the store of the launch under `key`."""
    context.store.set(f"{key}/{context.rank}", text)
    context.min_max_over_ranks(1)  # serves as a barrier: afterwards every rank has set its key
    return {context.store.get(f"{key}/{rank}").decode() for rank in range(context.world_size)}


def _measure_in_graph(
    context: Context, op: str, size: int, settings: Mapping[str, Any], communicator: Communicator
) -> None:
    """Report the latency without the host's launch overhead: many operations in one CUDA graph."""
    context.set_phase(f"collective {op} {size} B in a graph")
    name, params = f"collective.{op}.graph_latency", _params(context, size)
    stream = cuda_stream(context.device)
    with torch.cuda.stream(stream):
        buffers, reason = _allocate(context, Case(op, "out_of_place", size), communicator)
    if buffers is None:
        if context.is_reporting_rank:
            context.report_absent(name, unit="s", scope=context.world_scope, status=ERROR, reason=reason, **params)
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
    context.report_world({name: (times, "s")}, placement="out_of_place", **params)
