"""Time to launch a small kernel: without waiting for its end, with a wait for its end, and as part of a CUDA graph.

A slow CPU, a power-saving CPU governor, a hypervisor, a debugger or a tracer makes launches slow, and with them every workload of
small kernels. The time of a launch is measured with the host's clock, the time of a kernel in a graph with CUDA events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from agent.sampling.statistics import summarize
from schemas.benchmarks.hardware import GRAPH_NODES
from schemas.records import ERROR

QUEUE = 256
"""Number of launches after which the host waits until the GPU has run them. The queue of a GPU holds about a thousand kernels; a
launch into a full queue would wait for a free place."""
WARM_UP = 100
"""Untimed launches before the timed ones."""
REPLAYS = 12
"""Number of timed replays of the graph."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `kernel_launch.latency` in seconds for each way to launch and each percentile.

    On GPUs also report `kernel_launch.graph_latency`, in seconds per kernel.
    """
    number = torch.zeros(1, device=context.device)
    for way in settings["ways"]:
        context.set_phase(f"kernel_launch {way}")
        context.host_barrier(way)  # all ranks of the host launch at the same time, as in training
        seconds = sorted(_time_launches(lambda: number.add_(1), way, settings["launches"], context.device))
        for percentile in settings["percentiles"]:
            index = min(len(seconds) - 1, int(len(seconds) * float(percentile[1:].replace("_", ".")) / 100))
            context.report(
                "kernel_launch.latency", seconds[index], unit="s", scope=context.device_scope, way=way,
                percentile=percentile, launches=len(seconds),
            )  # fmt: skip
    if context.kind == "gpu":
        common: dict[str, Any] = {"unit": "s", "scope": context.device_scope, "nodes": GRAPH_NODES}
        try:
            seconds = _time_graph(context, number)
        except RuntimeError as error:
            context.report_absent("kernel_launch.graph_latency", status=ERROR, reason=describe_error(error), **common)
        else:
            context.report("kernel_launch.graph_latency", summarize(seconds), **common)


def _time_launches(launch: Callable[[], object], way: str, count: int, device: torch.device) -> list[float]:
    """Return the seconds of each launch: until the launch returns (`queued`), or until the kernel has ended (`synchronous`)."""
    wait = torch.cuda.current_stream(device).synchronize if device.type == "cuda" else lambda: None
    for _ in range(WARM_UP):
        launch()
    wait()
    seconds = []
    for number in range(count):
        begin = time.perf_counter()
        launch()
        if way == "synchronous":
            wait()
        seconds.append(time.perf_counter() - begin)
        if number % QUEUE == QUEUE - 1:
            wait()
    wait()
    return seconds


def _time_graph(context: Context, number: torch.Tensor) -> list[float]:
    """Replay a graph of GRAPH_NODES kernels REPLAYS times; return the mean seconds per kernel of each replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_NODES):
            number.add_(1)
    return [seconds / GRAPH_NODES for seconds in context.replay_times(graph, REPLAYS)]
