"""Read outputs of nccl-tests: the text that it prints, and the JSON file that its option -J writes (version 2.17 and newer)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from fleet.history.imports.common import Imported, NotThisTool, as_dict, as_list, number, row
from fleet.history.rows import Row, clean_text

SOURCE = "nccl-tests"
OPERATIONS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "broadcast": "broadcast",
    "reduce": "reduce", "alltoall": "all_to_all", "sendrecv": "send_recv", "gather": "gather", "scatter": "scatter",
    "hypercube": "hypercube",
}  # fmt: skip
"""Name of the nccl-tests program without `_perf` -> Rackproof's name of the operation."""
TYPES = {"float": "fp32", "half": "fp16", "bfloat16": "bf16", "double": "fp64", "fp8_e4m3": "fp8", "f8e4m3": "fp8"}
_PROGRAM = re.compile(r"([a-z_]+?)_perf")
_VERSION = re.compile(r"# nccl-tests version (\S+)(?:.* nccl-library=(\d+))?")
_DEVICE = re.compile(r"#\s+Rank\s+\d+ .*? on\s+(\S+) device\s+\d+ \[[^\]]*\] (.+)")
_GRAPH = re.compile(r"# nThread .*\bgraph: (\d+)")
_ROW = re.compile(r"\s*[1-9]\d*\s+\d+\s+[a-z]")


def read_text(text: str, file: str) -> Imported:
    """Return the figures in the printed table; raise NotThisTool if the text is not from nccl-tests.

    Results with wrong values (column `#wrong`) are left out.
    """
    lines = text.splitlines()
    if not any(line.startswith("#") and "nThread" in line and "minBytes" in line for line in lines):
        raise NotThisTool
    starting = next((line for line in lines if line.startswith("# Collective test starting:")), "")
    operation = _operation(starting) or _operation(file)
    version = next((found for line in lines if (found := _VERSION.match(line))), None)
    devices = [found for line in lines if (found := _DEVICE.match(line))]
    is_graph = any(found[1] != "0" for line in lines if (found := _GRAPH.match(line)))
    place = {"model": devices[0][2] if devices else "", "host": devices[0][1] if devices else ""}
    rows: list[Row] = []
    for line in lines:
        cells = line.split()  # 13 cells, or 12 for hypercube, which has no column for the reduction
        if not _ROW.match(line) or len(cells) not in (12, 13):
            continue
        for placement, part in (("out_of_place", cells[-8:-4]), ("in_place", cells[-4:])):
            time, _, busbw, wrong = map(number, part)
            if not wrong:
                settings = _settings(cells[0], cells[2], placement, len(devices))
                rows += _rows(operation, settings, time, busbw, is_graph=is_graph, place=place)
    tool = f"{version[1]}, NCCL {version[2]}" if version and version[2] else version[1] if version else "unknown"
    return Imported(source=SOURCE, version=clean_text(tool), rows=tuple(rows))


def read_json(text: str, file: str) -> Imported:
    """Return the figures in a file that -J wrote; raise NotThisTool for other text.

    Results with wrong values are left out. Environment variables in the file are ignored.
    """
    try:
        document = as_dict(json.loads(text))
    except (ValueError, RecursionError):
        raise NotThisTool from None
    if "nccl_version" not in document or "results" not in document:
        raise NotThisTool
    config, arguments = as_dict(document.get("config")), as_list(document.get("args"))
    operation = _operation(str(arguments[0]) if arguments else "") or _operation(file)
    devices = [as_dict(item) for item in as_list(config.get("devices"))]
    first = devices[0] if devices else {}
    place = {"model": str(first.get("device_info", "")), "host": str(first.get("hostname", ""))}
    rows: list[Row] = []
    for result in map(as_dict, as_list(document["results"])):
        for placement in ("out_of_place", "in_place"):
            part = as_dict(result.get(placement))
            if not number(part.get("nwrong")):
                settings = _settings(result.get("size"), str(result.get("type")), placement, len(devices))
                time, busbw = number(part.get("time")), number(part.get("bus_bw"))
                rows += _rows(operation, settings, time, busbw, is_graph=bool(config.get("graph")), place=place)
    return Imported(source=SOURCE, version=f"NCCL {clean_text(str(document['nccl_version']))}", rows=tuple(rows))


def _operation(text: str) -> str:
    """Return Rackproof's name of the operation in a program name (`all_reduce_perf`) or file name (`all_reduce.txt`).

    The result is empty if the text contains no operation of OPERATIONS.
    """
    found = _PROGRAM.search(text.rpartition("/")[2].rpartition(": ")[2])
    name = found[1] if found else text.rpartition("/")[2].partition(".")[0]
    return OPERATIONS.get(name.removesuffix("_graph"), "")


def _settings(size: object, dtype: str, placement: str, ranks: int) -> dict[str, object]:
    settings = {
        "backend": "nccl",
        "dtype": TYPES.get(dtype, dtype),
        "placement": placement,
        "size_bytes": int(number(size) or 0),
    }
    return {**settings, **({"world_size": ranks} if ranks else {})}


def _rows(operation: str, settings: dict[str, object], time: float | None, busbw: float | None, *, is_graph: bool,
          place: dict[str, str]) -> Iterator[Row]:  # fmt: skip
    """Yield latency and bus bandwidth; `time` is in µs, `busbw` in GB/s. For a run with CUDA graphs, yield only graph_latency."""
    name = f"collective.{operation or 'unknown'}"
    if time:
        yield row(
            f"{name}.{'graph_latency' if is_graph else 'latency'}",
            time * 1e-6,
            "s",
            settings,
            tool_name="time",
            **place,
        )
    if busbw and not is_graph:
        yield row(f"{name}.busbw", busbw * 1e9, "B/s", settings, tool_name="busbw", **place)
