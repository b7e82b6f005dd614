"""Read the output of `nvbandwidth --json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from fleet.history.imports.common import Imported, NotThisTool, as_dict, as_list, number, row
from fleet.history.rows import Row, clean_text

SOURCE = "nvbandwidth"
_HOST = {"numa": "local", "sharing": "alone"}
SAME: dict[str, tuple[str, dict[str, object], float]] = {
    "host_to_device_memcpy_ce": ("host_copy.bandwidth", {"direction": "host_to_device", **_HOST}, 1.0),
    "device_to_host_memcpy_ce": ("host_copy.bandwidth", {"direction": "device_to_host", **_HOST}, 1.0),
    "device_to_device_memcpy_write_ce": ("peer_copy.bandwidth", {"direction": "one_way"}, 1.0),
    "device_local_copy": ("memory.bandwidth", {"op": "copy"}, 2.0),
}
"""Test case -> Rackproof's figure, its settings, and the factor for the value: 2 for a local copy, which reads and writes each
byte."""
BOTH_WAYS = "device_to_device_bidirectional_memcpy_write_ce"
"""The matrix of this test case has three blocks of rows: one block for each direction, then a block with the sums of both."""
_GPU = re.compile(r"\d+: (.+?) \([0-9A-Fa-f:.]+\)(?:: \((.+)\))?")


def read_nvbandwidth(text: str, file: str) -> Imported:
    """Return the figures. Each cell of a matrix is a figure of one GPU: the column of the cell is the index of the GPU.

    Raises:
        NotThisTool: the text is not an output of nvbandwidth.
    """
    try:
        document = as_dict(as_dict(json.loads(text)).get("nvbandwidth"))
    except (ValueError, RecursionError):
        raise NotThisTool from None
    if not document:
        raise NotThisTool
    gpus = [found for item in as_list(document.get("GPU Device list")) if (found := _GPU.match(str(item)))]
    origin = {
        "model": gpus[0][1] if gpus else "",
        "host": gpus[0][2] or "" if gpus else "",
        "driver": str(document.get("Driver Version", "")),
    }
    rows = tuple(item for case in as_list(document.get("testcases")) for item in _case(as_dict(case), origin))
    version = str(document.get("git_version") or document.get("version") or "unknown")
    return Imported(source=SOURCE, version=clean_text(version), rows=rows)


def _case(case: dict[str, object], origin: dict[str, str]) -> Iterator[Row]:
    """Yield the figures of a test case that passed and whose unit is GB/s."""
    name, matrix = str(case.get("name", "")), [as_list(line) for line in as_list(case.get("bandwidth_matrix"))]
    if case.get("status") != "Passed" or not matrix or "GB/s" not in str(case.get("bandwidth_description")):
        return
    figure, settings, factor = SAME.get(name, (f"nvbandwidth.{name}", {}, 1.0))
    if name == BOTH_WAYS and len(matrix) == 3 * len(matrix[0]):
        figure, settings, matrix = "peer_copy.bandwidth", {"direction": "both_ways"}, matrix[2 * len(matrix[0]) :]
    for line in matrix:
        for column, cell in enumerate(line):
            if value := number(cell):
                yield row(figure, value * factor * 1e9, "B/s", settings, tool_name=name, slot=f"gpu={column}", **origin)
