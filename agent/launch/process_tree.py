"""A process and all that came of it, whatever session it is in: found, and ended."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""


class ProcessTree:
    """A process and all that came of it, found by parent and kept by identity, so that an orphan is not lost."""

    def __init__(self, root: int) -> None:
        self._seen: dict[int, str] = {}
        self._root = root
        self.look()

    def look(self) -> None:
        """Takes note of every living descendant."""
        table = {pid: (parent, born) for pid, parent, born in _processes()}
        family = {pid for pid, born in self._seen.items() if table.get(pid, (0, ""))[1] == born} | {self._root}
        grew = True
        while grew:
            more = {pid for pid, (parent, _) in table.items() if parent in family} - family
            family |= more
            grew = bool(more)
        self._seen |= {pid: table[pid][1] for pid in family if pid in table}

    def pids(self) -> list[int]:
        """Of all that ever were."""
        return list(self._seen)

    def alive(self) -> list[int]:
        """Those that still run (a zombie does not)."""
        table = {pid: born for pid, _, born in _processes()}
        return [pid for pid, born in self._seen.items() if table.get(pid) == born]

    def end(self, grace_s: float | None = None) -> None:
        """SIGTERM, then SIGKILL after `grace_s` (GRACE_S where not given), to whatever is left."""
        self.look()
        for number, patience in ((signal.SIGTERM, GRACE_S if grace_s is None else grace_s), (signal.SIGKILL, GRACE_S)):
            for pid in self.alive():
                try:
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)  # a stopped process takes no SIGTERM
                except ProcessLookupError:
                    continue
            ends = time.monotonic() + patience
            while self.alive() and time.monotonic() < ends:
                time.sleep(0.05)
                self.look()


def _processes() -> list[tuple[int, int, str]]:
    """(pid, parent, start time) of every process that is not a zombie."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in ("Z", "X"):
                found.append((int(entry.name), int(fields[1]), fields[19]))
    return found
