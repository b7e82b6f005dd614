"""Send heartbeats from a rank to its supervisor, the process that runs the launch on this host.

Heartbeats report the rank's progress even while its main thread waits in a collective operation.

Heartbeats are datagrams, independent of the process group. They are not files, because a full or slow disk must not make a
rank appear lost. NCCL and gloo release the GIL while they wait. So a missing heartbeat has one of these causes: the process has
ended, is stopped, gets no CPU time, or holds the GIL while it computes or waits for a device.
"""

from __future__ import annotations

import contextlib
import errno
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
MAX_PHASE_LENGTH, MAX_EXCEPTION_LENGTH = 300, 500
HEARTBEAT_DIRECTORY, SUPERVISOR = "RACKPROOF_HEARTBEAT_DIRECTORY", "RACKPROOF_SUPERVISOR"
"""Variables in the environment of a rank: the directory of the socket, and the identity of the supervisor (`process_identity`).
When the supervisor ends, the rank is killed."""
LAUNCHED = "RACKPROOF_LAUNCHED"
"""Variable in the environment of a rank: `time.monotonic()` at the start of the launcher."""


class RankHeartbeat:
    """Sends the progress of this rank to its supervisor. Without a supervisor, `directory` is None and nothing is sent."""

    def __init__(self, rank: int = 0, directory: Path | None = None) -> None:
        self._sender = DatagramSender(rank, directory)
        self.phase = "start"
        self.grouped = False
        """Whether the ranks depend on one another in this phase."""
        self._sequence = 0
        self._waiting_since: float | None = None
        self._progress_at = time.monotonic()
        self._failure: tuple[str, float] | None = None
        self.joined = False
        """Whether the ranks have exchanged data. From then on, a device or a link may be the cause of an error."""
        self._exception = ""
        self._send_lock = threading.Lock()
        """Keeps heartbeats in order, so that an older one does not overwrite a reported failure."""
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
                phase=self.phase[:MAX_PHASE_LENGTH],
                sequence=self._sequence,
                grouped=self.grouped,
                waiting_since=waiting_since,
                progress_at=min(self._progress_at, now),
                failure=failure[0] if failure else "",
                failed_at=failure[1] if failure else None,
                joined=self.joined,
                exception=self._exception,
            )

    def record_progress(self) -> None:
        """Record that the rank has made progress."""
        self._progress_at = time.monotonic()

    @contextlib.contextmanager
    def in_collective(self) -> Iterator[None]:
        """Count a collective operation, and mark the rank as waiting while the operation lasts.

        The rank with the lowest count is the rank for which the others wait.
        """
        self._sequence += 1
        self._waiting_since = self._progress_at = time.monotonic()
        yield  # after an error the rank still counts as waiting
        self._waiting_since = None
        self._progress_at = time.monotonic()

    def record_failure(self, problem: str) -> None:
        """Record the error of this rank, or of a benchmark that all ranks run together.

        Only the first failure counts.
        """
        if self._failure is None:
            kind = "timeout" if re.search(r"tim(ed?|ing)[ _-]?out", problem, re.IGNORECASE) else "error"
            self._failure = (kind, time.monotonic())
            self.send()

    def record_exception(self, error: BaseException) -> None:
        """Record the exception that ends this rank, if a device cannot be its cause.

        Before the ranks have exchanged data (`joined`), record any exception, for example about a network interface that does
        not exist. After that, record only a failed import or an error of the operating system, such as a full disk. EIO is then
        not recorded, because a broken disk causes it.
        """
        is_software = isinstance(error, OSError | ImportError) and getattr(error, "errno", None) != errno.EIO
        if not self._exception and (is_software or not self.joined):
            self._exception = describe_error(error)[:MAX_EXCEPTION_LENGTH]
            self.send()


def describe_error(error: BaseException) -> str:
    """Return type and text of an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"


@cache
def rank_heartbeat() -> RankHeartbeat:
    """Return the heartbeat of this process. The first call starts it."""
    directory = os.environ.get(HEARTBEAT_DIRECTORY, "")
    return RankHeartbeat(int(os.environ.get("RANK", "0")), Path(directory) if directory else None)


class DatagramSender:
    """Sends small datagrams to the supervisor."""

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
        """Send a message. If the socket's queue is still full after `timeout_s`, the message is lost.

        A lost heartbeat does no harm, because the next one contains the newer state.
        """
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
    """Yield a short path of the directory, valid within the context: the path of a Unix socket is limited to 107 bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
