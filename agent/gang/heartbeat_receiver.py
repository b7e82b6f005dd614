"""Receive the heartbeats of a supervisor's ranks, and derive the state of each rank."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.gang.culprit import UNSURE_S
from agent.gang.heartbeat import SOCKET_NAME, short_path
from agent.gang.processes import read_process
from agent.gang.rank_state import RankState

MAX_BYTES = 1 << 14
"""Maximum size of a message. Its phase and exception together have up to 800 characters, of up to twelve bytes each in JSON."""
BUSY_SHARE = 0.05
"""Share of one CPU above which a process counts as busy."""


class HeartbeatReceiver:
    """Receives the messages of the ranks. The socket is in `directory`, which other users cannot access."""

    def __init__(self, directory: Path, ranks: Mapping[int, str]) -> None:
        """`ranks`: rank -> its device, such as `gpu=3`."""
        self._ranks = {rank: _MonitoredRank(rank, scope, directory) for rank, scope in ranks.items()}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._path = directory / SOCKET_NAME
        self._path.unlink(missing_ok=True)
        with short_path(directory) as path:
            self.socket.bind(f"{path}/{SOCKET_NAME}")

    def read(self) -> bool:
        """Read the pending messages; return whether a rank started, failed or ended."""
        has_news = False
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self.socket.recv(MAX_BYTES)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    message = json.loads(data)
                    has_news |= self._ranks[message["rank"]].update(message)
        return has_news

    def states(self) -> tuple[RankState, ...]:
        """Return the state of every rank now."""
        return tuple(self._ranks[rank].state() for rank in sorted(self._ranks))

    def compensate_pause(self, seconds: float) -> None:
        """Do not count a pause of the supervisor itself, of this many seconds, as silence of the ranks."""
        for rank in self._ranks.values():
            rank.heard_at += seconds

    def close(self) -> None:
        """Close the socket, and remove its file: programs that copy a run directory may fail on it."""
        self.socket.close()
        self._path.unlink(missing_ok=True)


class _MonitoredRank:
    """The state of one rank, from its heartbeats and the messages of its guard (the parent process, agent/launch/guard.py)."""

    def __init__(self, rank: int, scope: str, directory: Path) -> None:
        self._rank, self._scope, self._directory = rank, scope, directory
        self.heard_at = 0.0
        self._first_at: float | None = None
        self._heartbeat: dict[str, Any] = {}
        self._guard_pid = 0
        self._cpu_reference: tuple[float, float] | None = None
        """At the first check of a silence: how long the rank had been silent, and the CPU time that its process had used."""
        self._ended_at: float | None = None
        self._end: dict[str, Any] = {}
        self._is_inferred = False
        """Whether the end of the rank was concluded from the end of its guard."""

    def update(self, message: Mapping[str, Any]) -> bool:
        """Process one message; return whether the rank started, failed or ended."""
        now, kind = time.monotonic(), message["kind"]
        if kind == "heartbeat":
            is_news = self._first_at is None or any(
                message.get(name, "") != self._heartbeat.get(name, "") for name in ("failure", "exception")
            )
            self._heartbeat, self.heard_at, self._cpu_reference = dict(message), now, None
            self._first_at = self._first_at or now
            return is_news
        if kind == "guard":
            self._guard_pid = int(message["pid"])
        elif kind == "end" and (not self._end or self._is_inferred):
            self._end, self._ended_at, self._is_inferred = dict(message), min(now, float(message["at"])), False
            return True
        return False

    def state(self) -> RankState:
        """Return the current state, with times as ages."""
        now, heartbeat = time.monotonic(), self._heartbeat
        if self._ended_at is None and self._guard_pid and read_process(self._guard_pid) is None:
            # The kernel kills the rank when its guard ends. If the guard's last message still arrives, it replaces this result.
            self._ended_at, self._is_inferred = now, True
            self._end = {"code": recorded_exit_code(self._directory, self._rank)}
        silent_s = 0.0 if self._first_at is None else now - self.heard_at
        stopped, busy = (
            self._check_process(silent_s) if silent_s > UNSURE_S and self._ended_at is None else (False, False)
        )
        return RankState(
            rank=self._rank,
            scope=self._scope,
            phase=str(heartbeat.get("phase", "")),
            sequence=int(heartbeat.get("sequence", 0)),
            grouped=bool(heartbeat.get("grouped", False)),
            waiting_s=_age(heartbeat.get("waiting_since"), now),
            progress_s=_age(heartbeat.get("progress_at"), now) or 0.0,
            alive_s=_age(self._first_at, now),
            silent_s=silent_s,
            stopped=stopped,
            busy=busy,
            failure=str(heartbeat.get("failure", "")),
            failure_age_s=_age(heartbeat.get("failed_at"), now),
            joined=bool(heartbeat.get("joined", False)),
            exception=str(heartbeat.get("exception", "")),
            ended_s=_age(self._ended_at, now),
            exit_code=self._end.get("code"),
            terminated_by_launcher=bool(self._end.get("terminated_by_launcher", False)),
        )

    def _check_process(self, silent_s: float) -> tuple[bool, bool]:
        """Return whether the silent process is stopped, and whether it is busy."""
        process = read_process(int(self._heartbeat.get("pid", 0)))
        if process is None or process.state in ("T", "t"):
            return process is not None, False
        if process.state == "D":
            # The process waits in the kernel for a disk or a device. It is slow, not lost, and the time-out of the process group
            # limits the wait.
            return False, True
        if self._cpu_reference is None:
            self._cpu_reference = (silent_s, process.cpu_s)
        elapsed_s = silent_s - self._cpu_reference[0]
        return False, elapsed_s <= 0 or process.cpu_s - self._cpu_reference[1] > BUSY_SHARE * elapsed_s


def recorded_exit_code(directory: Path, rank: int) -> int | None:
    """Return the exit code that a rank wrote to its state file; None if it wrote none."""
    try:
        code = json.loads((directory / f"rank{rank}.state.json").read_bytes())["exit_code"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, int) else None


def _age(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(max(0.0, now - moment), 3)
