"""Names of the programs of perftest (`ib_write_bw`, `ib_write_lat`, …), and parsers for their results and error messages.

Figures are read from stdout, not from the file that the option `--out_json` writes: this file states no units, and was not valid
JSON before 2024.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

PROGRAMS = {"write": "ib_write_bw", "read": "ib_read_bw", "send": "ib_send_bw"}
"""Operation -> program that measures its bandwidth."""
LATENCY_PROGRAM = "ib_write_lat"
BYTES_OF_UNIT = {"Gb/sec": 1e9 / 8, "MB/sec": float(1 << 20), "MiB/sec": float(1 << 20)}
"""Unit in a column title -> bytes per second. Versions of perftest up to 4.5 print `MB` for 2^20 bytes."""
MAX_OUTPUT = 1 << 20
"""Maximum number of characters of the output that are read."""
MAX_LINE, MAX_REASON = 160, 400
"""Longest line that is quoted, and longest reason, in characters."""
_COLUMN = re.compile(r"#\w+|[\w.%]+(?: [a-z]+)?\[[^\]\s]+\]")
_BANDWIDTH = re.compile(r"BW average\[([^\]\s]+)\]")
_FIELD = re.compile(r"^\s*(Mtu|GID index|Link type)\s*:\s*(\w+)", re.MULTILINE)
_HARMLESS = ("Device not recognized to implement inline feature", "scnt=", "Requested mtu", "Changing to active mtu")
"""Beginnings of lines that perftest also prints without an error."""
_CONSEQUENCES = (
    "Failed to complete", "Couldn't read remote", "Unable to read to socket", "Failed to exchange", "Unable to write to socket",
    "Parser function exited", "Couldn't create IB resources", "Completion with error", "Please check command line",
    "failed to create mr", "Failed to create MR", "Couldn't get context", "Couldn't set the link layer",
)  # fmt: skip
"""Beginnings of error lines that are only a consequence of an error in another line."""
_STATUS = {
    5: "the queue was flushed after an earlier error",
    9: "the other side refused the request: it runs a different test",
    10: "the other side refused access to its memory: it runs a different test, or uses a different message size",
    12: "the transport retried too often: packets or their acknowledgements are lost",
    13: "the other side was not ready to receive",
}
"""Status of a work completion (`enum ibv_wc_status` of rdma-core) -> its meaning in a test of perftest."""
_MEANINGS = (
    (r"MR with error=14", "the adapter cannot register this memory: for GPU memory, load nvidia_peermem"),
    (r"MR with error=12", "too little memory may be locked: raise the limit (ulimit -l)"),
    (r"Gid index should be", "the port has no such GID index"),
    (
        r"modify QP to INIT",
        "the adapter refuses the queue pair: NCCL_IB_PKEY, if set, must be the index of a partition key, not the key",
    ),
    (r"to RTR", "the queue pairs cannot be connected: no route, no LID, or a GID index of another network"),
    (r"Port number \d+ state is", "the port is down"),
    (r"IB device \S+ not found", "the adapter is gone"),
    (
        r"Unable to find the Infiniband/RoCE device|Did not detect devices",
        "no RDMA device may be used: if this is a container, pass /dev/infiniband to it; otherwise load the module ib_uverbs",
    ),
    (r"Unable to open the device", "the device file of the adapter in /dev/infiniband cannot be opened"),
    (r"Unable to query port", "the adapter has no such port"),
    (r"Couldn't connect to", "the other side does not listen"),
    (r"in name resolution|Name or service not known", "the address of the other host cannot be resolved"),
    (r"unrecognized option|invalid option", "this version of perftest lacks the option"),
    (r"not compatible with versions older", "the perftest of the other host is too old"),
    (r"Incompatibility issue with GID types", "the GIDs of the two ports have different types (RoCE v1 and v2)"),
)
"""Pattern in a line that perftest prints -> its meaning."""


class PerftestError(Exception):
    """The test cannot be started, or its output has no figure; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The settings with which the adapters transferred the messages, from the header of the output."""

    mtu: int
    """Path MTU in bytes, as InfiniBand defines it (the payload of a packet): 256 to 4096."""
    gid_index: int
    """Index of the GID in use; 0 on InfiniBand."""


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """One row of the table that a bandwidth test prints."""

    size_bytes: int
    bytes_per_second: float
    """Mean over the test; if both directions are used, their sum. The peak is not read: tests with a duration print 0 for it."""
    messages_per_second: float
    conditions: Conditions


@dataclass(frozen=True, kw_only=True)
class Latency:
    """One row of the table that a latency test prints."""

    size_bytes: int
    typical: float
    """Half of the typical round trip, in seconds."""
    conditions: Conditions


def parse_bandwidth(stdout: str) -> Bandwidth:
    """Return the last row of a bandwidth test. Raises PerftestError if the row, a known unit or the MTU is missing."""
    columns, row = _table(stdout)
    unit = next((match[1] for title in columns if (match := _BANDWIDTH.fullmatch(title))), "")
    if unit not in BYTES_OF_UNIT:
        raise PerftestError(f"the output has no bandwidth in a known unit: {_clean(' '.join(columns))}")
    values = dict(zip(columns, row, strict=True))
    return Bandwidth(
        size_bytes=int(values["#bytes"]),
        bytes_per_second=values[f"BW average[{unit}]"] * BYTES_OF_UNIT[unit],
        messages_per_second=values.get("MsgRate[Mpps]", 0.0) * 1e6,
        conditions=_conditions(stdout),
    )


def parse_latency(stdout: str) -> Latency:
    """Return the last row of a latency test with a fixed number of iterations.

    A test with a fixed duration prints other columns. Raises PerftestError if the row, the typical latency or the MTU is missing.
    """
    columns, row = _table(stdout)
    values = dict(zip(columns, row, strict=True))
    if "t_typical[usec]" not in values:
        raise PerftestError(f"the output has no typical latency: {_clean(' '.join(columns))}")
    return Latency(
        size_bytes=int(values["#bytes"]), typical=values["t_typical[usec]"] * 1e-6, conditions=_conditions(stdout)
    )


def _table(stdout: str) -> tuple[list[str], list[float]]:
    """Return the titles of the columns and the last row of the table. Raises PerftestError if there is no row."""
    titles: list[str] = []
    last: list[float] = []
    for line in stdout[:MAX_OUTPUT].splitlines():
        if line.lstrip().startswith("#bytes"):
            titles = _COLUMN.findall(line)
        elif titles and (numbers := _numbers(line)) and len(numbers) >= len(titles):
            last = numbers[: len(titles)]
    if not last:
        problem = "no result under the titles of its table" if titles else "no table of results"
        raise PerftestError(f"the output has {problem}")
    return titles, last


def _numbers(line: str) -> list[float]:
    """Return the numbers of a row; an empty list if the line contains anything other than finite numbers."""
    if not re.fullmatch(r"[\s\d.]+", line):
        return []
    try:
        numbers = [float(word) for word in line.split()]
    except ValueError:
        return []
    return numbers if all(map(math.isfinite, numbers)) else []


def _conditions(stdout: str) -> Conditions:
    fields: dict[str, str] = dict(_FIELD.findall(stdout[:MAX_OUTPUT]))
    mtu = fields.get("Mtu", "")
    if not mtu.isdecimal():
        raise PerftestError("the output states no MTU")
    index = fields.get("GID index", "0")
    return Conditions(mtu=int(mtu), gid_index=int(index) if index.isdecimal() else 0)


def failure_reason(exit_code: int, stdout: str, stderr: str) -> str:
    """Return in one line why a test failed.

    If the meaning of a message that perftest printed is known, the reason is this meaning, then the message in parentheses.
    Otherwise it is the exit code and up to three messages.
    """
    lines = [line for text in (stderr, stdout) for line in _complaints(text)]
    for line in lines:
        if meaning := _meaning(line):
            return f"{meaning} ({line})"[:MAX_REASON]
    words = [
        line for raw in stderr[:MAX_OUTPUT].splitlines() if (line := _clean(raw)) and not line.startswith(_HARMLESS)
    ]
    return f"exit code {exit_code}: {'; '.join((lines or words)[:3]) or 'no message'}"[:MAX_REASON]


def _complaints(text: str) -> Iterator[str]:
    """Yield the lines that may name a cause: not headers and tables, and not consequences of another error.

    Yield nothing if the text contains a usage message (`Usage:`).
    """
    if "Usage:" in text:
        return
    for raw in text[:MAX_OUTPUT].splitlines():
        line = _clean(raw)
        is_header = ":" in line.split("  ")[0] and "address" in line
        if line and not line.startswith((*_HARMLESS, *_CONSEQUENCES, "-", "#", "*")) and not is_header:
            yield line


def _meaning(line: str) -> str:
    if status := re.search(r"Failed status[- ][^:]*?\(?(\d+)\)?", line):
        return _STATUS.get(int(status[1]), f"the transfer failed with status {status[1]}")
    return next((meaning for pattern, meaning in _MEANINGS if re.search(pattern, line)), "")


def _clean(text: str) -> str:
    """Return the text in one line without control characters, cut to MAX_LINE characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:MAX_LINE]
