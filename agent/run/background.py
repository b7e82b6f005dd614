"""Processes that outlive the SSH connection that started them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.run.record import private_directory
from agent.sampling import oom
from schemas import documents
from schemas.locks import born, exclusive

LOG_BYTES = 2000
ROOM_BYTES = 65536
"""A file system with less has no room for a record."""
GRACE_S = 5.0


class BackgroundError(OSError):
    """A process could not be started, or was never started."""


def start(arguments: Sequence[str], directory: Path, name: str, until: str = "") -> str:
    """Runs a command of ours in a session of its own, unless the one started here before still runs.

    Args:
        arguments: the command line, without what asked for the background.
        directory: gets `NAME.pid` and `NAME.log`.
        until: return only once the log holds this.

    Returns:
        A line for people.

    Raises:
        BackgroundError: it ended before its log held `until`; the message is the log.
    """
    private_directory(directory)
    log_path = directory / f"{name}.log"
    # A playbook that was killed may have left such a command under way, which its successor now repeats.
    with exclusive(directory / f"{name}.starting"):
        running = _running(directory, name)
        if running:
            return f"{name} runs as process {running}"
        oom.remember(directory / f"{name}.memory")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        documents.write_text(directory / f"{name}.pid", f"{process.pid} {born(process.pid)}\n")
    while until and until not in _log(log_path):
        if process.poll() is not None:
            raise BackgroundError(None, _log(log_path).strip().removeprefix("rackproof: "))
        time.sleep(0.05)
    return f"{name} started as process {process.pid}"


@contextlib.contextmanager
def alone(directory: Path, name: str) -> Iterator[None]:
    """Waits until no other process does `name` there, and keeps others from it; however this process ends, the next may."""
    with exclusive(directory / f"{name}.lock"):
        yield


def notify_systemd() -> None:
    """Tells systemd, where it started this process with Type=notify, that it is ready (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect("\0" + address[1:] if address.startswith("@") else address)
            channel.send(b"READY=1")


def wait(directory: Path, name: str, deadline_s: float) -> str:
    """Waits until the process has ended, and returns the end of its log; ends it `deadline_s` after it was started.

    One that was killed for want of memory, or had no room to write, left no word of it: that is added.

    Raises:
        BackgroundError: none was started there under this name.
    """
    if not (directory / f"{name}.pid").exists():
        raise BackgroundError(None, f"{name} was not started in {directory}")
    ends = (directory / f"{name}.pid").stat().st_mtime + deadline_s
    while _running(directory, name):
        if time.time() > ends:
            stop(directory, name)
        time.sleep(0.2)
    killed, log = oom.told(directory / f"{name}.memory"), _log(directory / f"{name}.log")[-LOG_BYTES:]
    more = [f"a process of it was {killed}"] if killed and killed not in log else []
    return log + "".join(f"{line}\n" for line in [*more, *_no_room(directory)])


def _no_room(directory: Path) -> Iterator[str]:
    """Why nothing can be written there: neither what was measured, nor what became of it."""
    found = os.statvfs(directory)
    if found.f_flag & os.ST_RDONLY:
        yield f"{directory}: {os.strerror(errno.EROFS)}"
    elif (found.f_bavail * found.f_frsize < ROOM_BYTES and found.f_blocks) or found.f_favail == 0 < found.f_files:
        yield f"{directory}: {os.strerror(errno.ENOSPC)}"


def runs(directory: Path, name: str) -> bool:
    """Whether the process that was started there under this name still runs."""
    return bool(_running(directory, name))


def stop(directory: Path, name: str) -> str:
    """Ends the process, with SIGTERM and after GRACE_S with SIGKILL. One that does not run is no error."""
    pid = _running(directory, name)
    if not pid:
        return f"{name} does not run"
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.kill(pid, number)
        ends = time.monotonic() + GRACE_S
        while _running(directory, name) and time.monotonic() < ends:
            time.sleep(0.05)
        if not _running(directory, name):
            break
    return f"{name} ended"


def _running(directory: Path, name: str) -> int:
    """The process id, or 0 where it does not run."""
    try:
        pid, began = (directory / f"{name}.pid").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return 0
    return int(pid) if born(int(pid)) == began else 0


def _log(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
