"""Find and end a process and all of its descendants, including those in other sessions."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

GRACE_S = 5.0
"""Longest wait for the processes to end, after SIGTERM and again after SIGKILL."""


class ProcessTree:
    """A process and its descendants. Their ids and start times are kept, so that orphans remain in the tree.

    psutil is not used: it finds children only while their parent lives, and would have to be installed on every host.
    """

    def __init__(self, root: int) -> None:
        self._start_times: dict[int, str] = {}
        self._root = root
        self.scan()

    def scan(self) -> None:
        """Add every running descendant."""
        table = {pid: (parent, start_time) for pid, parent, start_time in _processes()}
        members = {pid for pid, start_time in self._start_times.items() if pid in table and table[pid][1] == start_time}
        members.add(self._root)
        while children := {pid for pid, (parent, _) in table.items() if parent in members} - members:
            members |= children
        self._start_times |= {pid: table[pid][1] for pid in members if pid in table}

    def pids(self) -> list[int]:
        """Return the process ids of all members so far, including ended ones."""
        return list(self._start_times)

    def alive(self) -> list[int]:
        """Return the members that still run, without zombies."""
        table = {pid: start_time for pid, _, start_time in _processes()}
        return [pid for pid, start_time in self._start_times.items() if table.get(pid) == start_time]

    def end(self, grace_s: float | None = None) -> None:
        """Send SIGTERM to every member, and SIGKILL after `grace_s` (default: GRACE_S) to those that remain."""
        self.scan()
        for number, timeout_s in ((signal.SIGTERM, GRACE_S if grace_s is None else grace_s), (signal.SIGKILL, GRACE_S)):
            for pid in self.alive():
                with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
                    os.kill(pid, number)
                    os.kill(pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
            end = time.monotonic() + timeout_s
            while self.alive() and time.monotonic() < end:
                time.sleep(0.05)
                self.scan()


def _processes() -> list[tuple[int, int, str]]:
    """Return pid, parent and start time of every process that is not a zombie."""
    processes = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] not in ("Z", "X"):
                processes.append((int(entry.name), int(fields[1]), fields[19]))
    return processes
