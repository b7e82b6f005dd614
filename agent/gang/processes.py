"""Read processes from /proc, and identify them by process id and start time, because the kernel reuses process ids."""

from __future__ import annotations

import os
from pathlib import Path


class Process:
    """One process in /proc."""

    def __init__(self, fields: list[str]) -> None:
        self.state, self.parent, self.start_time = fields[0], int(fields[1]), fields[19]
        self.cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        """CPU time used, in seconds."""


def read_process(pid: int) -> Process | None:
    """Return the process; None if there is none, or if it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else Process(fields)


def process_identity(pid: int) -> str:
    """Return process id and start time, which together identify a process; empty if it does not run."""
    process = read_process(pid)
    return f"{pid} {process.start_time}" if process else ""


def is_alive(identity: str) -> bool:
    """Return whether the process with this identity still runs; True for an empty identity."""
    return not identity or process_identity(int(identity.split()[0])) == identity
