"""What NCCL says of itself: which way the data went, and which algorithm and protocol it chose for an operation.

NCCL tells it in its log alone (NCCL_DEBUG=INFO). The log is read while every operation runs once, untimed, and then
closed, since a line an operation would be in the latencies.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

ENVIRONMENT = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""NCCL before 2.23 gives their numbers (nccl.h's order), later ones their names."""

_before: dict[str, str | None] = {}


def listen(log: Path) -> None:
    """Has NCCL, which must not have been called yet, write what it does into `log`."""
    _before.update({key: os.environ.get(key) for key in ENVIRONMENT})
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,TUNING,ENV", "NCCL_DEBUG_FILE": str(log)}


def hush() -> bool:
    """Ends the log; False where this NCCL cannot be told so after its start."""
    for key, value in _before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    try:
        ctypes.CDLL("libnccl.so.2").ncclResetDebugInit()
    except (OSError, AttributeError):  # linked into torch, or a version without it
        return False
    return True


class Log:
    """NCCL's log as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def news(self) -> str:
        """What was written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return ""
        self._read += len(text)
        return text.decode(errors="replace")


def choice(text: str) -> dict[str, str]:
    """Algorithm and protocol of the last operation that the log tells of; empty where it tells of none.

    NCCL tells none of send and receive, nor of what is made of them.
    """
    found = re.findall(r"-> Algo (\w+) proto (\w+)", text)
    if not found:
        return {}
    algorithm, protocol = found[-1]
    return {
        "algorithm": ALGORITHMS[int(algorithm)] if algorithm.isdigit() else algorithm,
        "protocol": PROTOCOLS[int(protocol)] if protocol.isdigit() else protocol,
    }


def transport(text: str) -> str:
    """The ways that the ranks talk: `P2P/CUMEM`, `SHM/direct/direct`, `NET/IB/GDRDMA`; empty where the log tells none."""
    ways = re.findall(r"Channel .+ via (\S+)", text)
    return "+".join(sorted({re.sub(r"/\d+(\(\d+\))?", "", way) for way in ways}))


def channels(text: str) -> tuple[int, int] | None:
    """Channels of the collectives, and of NVLS (0: NVLink SHARP is not used); None where the log does not tell."""
    found = re.findall(r"(\d+) coll channels, (?:\d+ collnet channels, )?(\d+) nvls channels", text)
    return (int(found[-1][0]), int(found[-1][1])) if found else None
