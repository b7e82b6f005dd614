"""Read SuperBench's results-summary.jsonl: one object for each host, with its metrics by name."""

from __future__ import annotations

import json
import re

from fleet.history.imports.common import Imported, NotThisTool, as_dict, number, row
from fleet.history.rows import Row

SOURCE = "SuperBench"
_METRIC = re.compile(r"([a-z][a-z0-9-]*)(?::[^/]*)?/(.+?)(?::(\d+))?")
"""Groups of `nccl-bw:default/allreduce_8_busbw:0`: `nccl-bw`, `allreduce_8_busbw` and the optional rank `0`. `default`, the name
of a configuration of the benchmark, is optional and in no group."""
_COLLECTIVE = re.compile(r"([a-z]+)_(\d+)_busbw")
_GEMM = re.compile(r"(bf16|fp16|tf32|fp64|fp8)_tc_flops|(fp32)_flops")
_OPERATIONS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter", "broadcast": "broadcast",
    "reduce": "reduce", "alltoall": "all_to_all",
}  # fmt: skip
_COPIES = {"h2d_bw": "host_to_device", "d2h_bw": "device_to_host"}


def read_superbench(text: str, file: str) -> Imported:
    """Return the figures of all hosts; raise NotThisTool if a line is not a JSON object with a `node`, or there is no figure."""
    rows: list[Row] = []
    for line in filter(str.strip, text.splitlines()):
        try:
            metrics = as_dict(json.loads(line))
        except (ValueError, RecursionError):
            raise NotThisTool from None
        if not isinstance(metrics.get("node"), str):
            raise NotThisTool
        for key, value in metrics.items():
            match, figure = _METRIC.fullmatch(key), number(value)
            if match and figure is not None:
                rows.append(_row(match[1], match[2], match[3] or "", figure, metrics["node"]))
    if not rows:
        raise NotThisTool
    return Imported(source=SOURCE, version="unknown", rows=tuple(rows))


def _row(benchmark: str, metric: str, rank: str, value: float, host: str) -> Row:
    """Return a row with Rackproof's name and SI units. An unknown metric is named `superbench.…` and keeps its value."""
    source = {"tool_name": f"{benchmark}/{metric}", "host": host, "slot": f"gpu={rank}" if rank else ""}
    if benchmark == "nccl-bw" and (match := _COLLECTIVE.fullmatch(metric)) and match[1] in _OPERATIONS:
        settings = {"backend": "nccl", "size_bytes": int(match[2])}
        return row(f"collective.{_OPERATIONS[match[1]]}.busbw", value * 1e9, "B/s", settings, **source)
    if benchmark == "gemm-flops" and (match := _GEMM.fullmatch(metric)):
        return row("gemm.throughput", value * 1e9, "FLOP/s", {"dtype": match[1] or match[2]}, **source)
    if benchmark == "mem-bw" and metric in _COPIES:
        settings = {"direction": _COPIES[metric], "sharing": "alone"}
        return row("host_copy.bandwidth", value * 1e9, "B/s", settings, **source)
    return row(f"superbench.{benchmark}/{metric}", value, "1", {}, **source)
