"""Heartbeats of a rank: each rank reports its progress to its supervisor, even while its main thread waits in a collective.

Heartbeats are datagrams outside the process group, and not files: a full or slow disk must not make a rank look dead. NCCL and
gloo release Python's lock while they wait. Therefore a missing heartbeat means that the process is stopped, gone, or gets no CPU
time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

INTERVAL_S = 0.5
SOCKET_NAME = "heartbeats"
MAX_PHASE = 300
HEARTBEAT_DIRECTORY, SUPERVISOR = "RACKPROOF_HEARTBEAT_DIRECTORY", "RACKPROOF_SUPERVISOR"
"""Environment of a rank: the directory of the socket, and the process that must live for the rank to continue."""
LAUNCHED = "RACKPROOF_LAUNCHED"
"""Environment of a rank: `time.monotonic()` at the start of the launcher."""


class RankHeartbeat:
    """The rank's side. Without a directory it counts and sends nothing, as in ranks that were started by hand."""

    def __init__(self, rank: int = 0, directory: Path | None = None) -> None:
        self._sender = DatagramSender(rank, directory)
        self.phase = "start"
        self.grouped = False
        """The ranks depend on one another from here on."""
        self._sequence = 0
        self._waiting_since: float | None = None
        self._progress_at = time.monotonic()
        self._failure: tuple[str, float] | None = None
        self._send_lock = threading.Lock()
        """Heartbeats are sent in the order in which they were read: an older one must not revoke a failure."""
        if self._sender.connected:
            self.send()
            threading.Thread(target=self._send_periodically, name="heartbeat", daemon=True).start()

    def _send_periodically(self) -> None:
        while self._sender.connected:
            time.sleep(INTERVAL_S)
            self.send()

    def send(self) -> None:
        """Send the progress of this rank."""
        with self._send_lock:
            now, waiting_since, failure = time.monotonic(), self._waiting_since, self._failure
            self._sender.send(
                "heartbeat",
                pid=os.getpid(),
                phase=self.phase[:MAX_PHASE],
                sequence=self._sequence,
                grouped=self.grouped,
                waiting_since=waiting_since,
                progress_at=min(self._progress_at, now),
                failure=failure[0] if failure else "",
                failed_at=failure[1] if failure else None,
            )

    def record_progress(self) -> None:
        """Note that the rank has done something."""
        self._progress_at = time.monotonic()

    @contextlib.contextmanager
    def in_collective(self) -> Iterator[None]:
        """Mark an operation of all ranks. The others wait for the rank that has started the fewest of them."""
        self._sequence += 1
        self._waiting_since = self._progress_at = time.monotonic()
        yield  # after an error the rank still counts as waiting
        self._waiting_since = None
        self._progress_at = time.monotonic()

    def record_failure(self, problem: str) -> None:
        """Note that a benchmark of all ranks failed here: by a time-out, or by an error of this rank."""
        if self._failure is None:
            kind = "timeout" if re.search(r"tim(ed?|ing)[ _-]?out", problem, re.IGNORECASE) else "error"
            self._failure = (kind, time.monotonic())
            self.send()


@cache
def rank_heartbeat() -> RankHeartbeat:
    """Return the heartbeat of this process, which starts at the first call."""
    directory = os.environ.get(HEARTBEAT_DIRECTORY, "")
    return RankHeartbeat(int(os.environ.get("RANK", "0")), Path(directory) if directory else None)


class DatagramSender:
    """Sends small datagrams to the supervisor, without waiting for long."""

    def __init__(self, rank: int, directory: Path | None) -> None:
        self._rank = rank
        self.connected = False
        if directory is None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), short_path(directory) as path:
            self._socket.connect(f"{path}/{SOCKET_NAME}")
            self.connected = True
        if not self.connected:
            self._socket.close()

    def send(self, kind: str, timeout_s: float = 0.0, **content: Any) -> None:
        """Send a message. If the queue is full, it is lost; the next one contains the same and more."""
        if self.connected:
            message = json.dumps({"kind": kind, "rank": self._rank, "at": time.monotonic(), **content})
            self._socket.settimeout(timeout_s)
            with contextlib.suppress(OSError):
                try:
                    self._socket.send(message.encode())
                except ConnectionRefusedError:
                    self.connected = False
                    self._socket.close()


@contextlib.contextmanager
def short_path(directory: Path) -> Iterator[str]:
    """Return a short path of the directory: the path of a Unix socket is limited to 107 bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
