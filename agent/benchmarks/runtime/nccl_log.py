"""NCCL's debug log: the transport between ranks, the algorithm and protocol chosen for an operation, and NCCL's settings.

NCCL reports these only in its log (NCCL_DEBUG=INFO). Every operation runs once, untimed, with the log enabled. Then the log
is disabled, because writing a line for each operation would add to the measured latencies.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path

VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
NO_GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT", "0"
"""A variable that every rank sets, and its value. Graph mixing lets a rank run NCCL operations outside a CUDA graph while a graph
runs. No rank does so. Support for it adds 12 µs to each operation in a graph, because NCCL then notifies the host (measured,
4 H200: 20 µs instead of 8)."""
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""The names of algorithms and of protocols by number: NCCL before 2.23 logs the numbers, later versions log the names."""

_environment_before: dict[str, str | None] = {}


def enable(log: Path) -> None:
    """Make NCCL write its debug log to `log`. NCCL must not have been called yet."""
    _environment_before.update({key: os.environ.get(key) for key in VARIABLES})
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,TUNING,ENV", "NCCL_DEBUG_FILE": str(log)}


def disable() -> bool:
    """Disable the log. Return False if it stays enabled, because this NCCL cannot disable it or is linked into torch."""
    for key, value in _environment_before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    try:
        ctypes.CDLL("libnccl.so.2").ncclResetDebugInit()
    except (OSError, AttributeError):  # NCCL is linked into torch, or this version has no such function
        return False
    return True


class NcclLog:
    """Reads NCCL's log as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read_new(self) -> str:
        """Return the text that was written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                text = file.read()
        except OSError:
            return ""
        self._position += len(text)
        return text.decode(errors="replace")


def parse_choice(text: str) -> dict[str, str]:
    """Return `algorithm` and `protocol` of the last operation in the log; empty if the log has none.

    For send and receive, and for operations that are built on them, NCCL logs no algorithm and no protocol.
    """
    choices = re.findall(r"-> Algo (\w+) proto (\w+)", text)
    if not choices:
        return {}
    names = {"algorithm": ALGORITHMS, "protocol": PROTOCOLS}
    choice = {key: _name(text, known) for (key, known), text in zip(names.items(), choices[-1], strict=True)}
    return {key: name for key, name in choice.items() if name}


def _name(text: str, known: Sequence[str]) -> str:
    """Return the name of an algorithm or protocol, which NCCL's log gives as a name or as an index of `known`.

    Return an empty string if `known` has no such index.
    """
    if not text.isdecimal():
        return text
    return known[int(text)] if int(text) < len(known) else ""


def parse_transport(text: str) -> str:
    """Return the transports in the log, for example `P2P/CUMEM` or `NET/IB/GDRDMA`, joined by `+`; empty if the log has none.

    Device numbers are omitted, and spaces in the name of a network plugin become `_`: `NET/AWS Libfabric/0/GDRDMA` becomes
    `NET/AWS_Libfabric/GDRDMA`.
    """
    transports = re.findall(r"Channel .+ via (NET/[^/\n]{1,40}/\S+|\S+)", text)
    names = {re.sub(r"/\d+(\(\d+\))?", "", transport) for transport in transports}
    return "+".join(sorted(re.sub(r"\s+", "_", name) for name in names))


def parse_settings(text: str) -> dict[str, str]:
    """Return the variables that NCCL read from its environment or its configuration files: name -> value."""
    return dict(re.findall(r"\b(NCCL_\w+) set by environment to (.+?)\.?\s*$", text, re.MULTILINE))


def parse_channels(text: str) -> tuple[int, int] | None:
    """Return two numbers of channels: for collectives, and for NVLS (NVLink SHARP; 0 if NCCL does not use it).

    Return None if the log does not have these numbers.
    """
    counts = re.findall(r"(\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels", text)
    return (int(counts[-1][0]), int(counts[-1][1])) if counts else None
