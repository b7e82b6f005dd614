"""Start processes that keep running when the SSH connection closes; wait for them, and end them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.run.record import private_directory
from agent.sampling import oom
from schemas import documents
from schemas.locks import exclusive, process_start_time

LOG_BYTES = 2000
MIN_FREE_BYTES = 65536
"""With less free space than this, a file system counts as full."""
GRACE_S = 5.0
NOTIFY_SOCKET, READY = "NOTIFY_SOCKET", b"READY=1"


class BackgroundError(OSError):
    """A process could not be started, or was never started."""


@dataclass(frozen=True, kw_only=True)
class Started:
    """A background process that is running. `str()` returns a message for the operator."""

    name: str
    pid: int
    is_new: bool
    """Whether it was started now; otherwise it was already running."""

    def __str__(self) -> str:
        return f"{self.name} {'started' if self.is_new else 'already runs'} as process {self.pid}"


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The outcome of `stop`. `str()` returns a message for the operator."""

    name: str
    pid: int
    """Process id; 0 if the process was not running."""
    has_ended: bool
    """Whether it was running and was ended now."""

    def __str__(self) -> str:
        if not self.pid:
            return f"{self.name} is not running"
        if self.has_ended:
            return f"{self.name} ended"
        return f"{self.name} still runs: process {self.pid} hangs in the kernel, and no signal ends it: reboot the host"


def start(arguments: Sequence[str], directory: Path, name: str, *, wait_until_ready: bool = False) -> Started:
    """Start a Rackproof command in a session of its own, unless an earlier process of this name and directory still runs.

    Args:
        arguments: the script and its arguments, without the option that requests the background, such as `--detach`.
        directory: directory for the files of the process, such as `NAME.pid` and `NAME.log`.
        name: name of the process, and the NAME in its file names.
        wait_until_ready: if the process is started now, wait until it calls `notify_ready`.

    Raises:
        BackgroundError: with `wait_until_ready`, the process ended before it was ready; the message is the text of its log.
        documents.DocumentError: the directory is not private to this user.
    """
    if not wait_until_ready:
        return _start(arguments, directory, name, dict(os.environ))[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind("")  # Linux chooses a free name in the abstract namespace
        address = "@" + channel.getsockname()[1:].decode()
        started, process = _start(arguments, directory, name, {**os.environ, NOTIFY_SOCKET: address})
        if process:
            _wait_until_ready(channel, process, directory / f"{name}.log")
    return started


def _start(
    arguments: Sequence[str], directory: Path, name: str, environment: Mapping[str, str]
) -> tuple[Started, subprocess.Popen[bytes] | None]:
    private_directory(directory)
    log_path = directory / f"{name}.log"
    # Two calls may run at the same time: if a playbook is killed and run again, the call for its first run may continue.
    with exclusive(directory / f"{name}.starting"):
        pid = _running_pid(directory, name)
        if pid:
            return Started(name=name, pid=pid, is_new=False), None
        oom.save_counters(directory / f"{name}.memory")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        documents.write_text(directory / f"{name}.pid", f"{process.pid} {process_start_time(process.pid)}\n")
    return Started(name=name, pid=process.pid, is_new=True), process


def _wait_until_ready(channel: socket.socket, process: subprocess.Popen[bytes], log_path: Path) -> None:
    channel.settimeout(0.05)
    while True:
        with contextlib.suppress(TimeoutError):
            if channel.recv(len(READY)) == READY:
                return
        if process.poll() is not None:
            raise BackgroundError(None, _read_log(log_path).strip().removeprefix("rackproof: "))


@contextlib.contextmanager
def exclusive_task(directory: Path, name: str) -> Iterator[None]:
    """Wait for the lock `NAME.lock`, and hold it during the context. If this process is killed, the kernel releases the lock."""
    with exclusive(directory / f"{name}.lock"):
        yield


def notify_ready() -> None:
    """Report readiness to `start`, or to systemd if it started this process with Type=notify (sd_notify(3))."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if address:
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel,
            contextlib.suppress(ConnectionRefusedError),  # the process that called `start` was killed
        ):
            channel.connect("\0" + address[1:] if address.startswith("@") else address)
            channel.send(READY)


def wait(directory: Path, name: str, deadline_s: float) -> str:
    """Wait until the process has ended, and return the last part of its log. At `deadline_s` seconds after its start, end it.

    Add a line to the text if the kernel killed a process of the command because memory ran out, if no file can be written in
    the directory, or if no signal ends the process.

    Raises:
        BackgroundError: no process of this name was started in the directory.
    """
    if not (directory / f"{name}.pid").exists():
        raise BackgroundError(
            None,
            f"{name} was not started in {directory}: start it with --detach, or give the --run-dir in which it was started",
        )
    deadline = time.monotonic() + deadline_s - _age_s(_running_pid(directory, name))
    reasons = []
    while _running_pid(directory, name):
        if time.monotonic() > deadline:
            stopped = stop(directory, name)
            reasons = [str(stopped)] if _running_pid(directory, name) else []
            break
        time.sleep(0.2)
    log = _read_log(directory / f"{name}.log")[-LOG_BYTES:]
    oom_kill = oom.describe_kill_since_save(directory / f"{name}.memory")
    reasons += [f"a process of this command was {oom_kill}"] if oom_kill and oom_kill not in log else []
    return log + "".join(f"{line}\n" for line in [*reasons, *_why_unwritable(directory)])


def _why_unwritable(directory: Path) -> Iterator[str]:
    """Yield why no file can be written in the directory: its file system is read-only or full. Yield nothing otherwise."""
    status = os.statvfs(directory)
    if status.f_flag & os.ST_RDONLY:
        yield f"{directory}: {os.strerror(errno.EROFS)}"
    elif (status.f_bavail * status.f_frsize < MIN_FREE_BYTES and status.f_blocks) or (
        status.f_favail == 0 < status.f_files
    ):
        yield f"{directory}: {os.strerror(errno.ENOSPC)}"


def started_at(directory: Path, name: str) -> float:
    """Return when the process of this name was started in the directory, in seconds since 1970-01-01."""
    return (directory / f"{name}.pid").stat().st_mtime


def is_running(directory: Path, name: str) -> bool:
    """Return whether the process of this name that was started in the directory still runs."""
    return bool(_running_pid(directory, name))


def stop(directory: Path, name: str) -> Stopped:
    """End the process, if it runs, with SIGTERM and after GRACE_S with SIGKILL."""
    pid = _running_pid(directory, name)
    if not pid:
        return Stopped(name=name, pid=0, has_ended=False)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)
        deadline = time.monotonic() + GRACE_S
        while _running_pid(directory, name) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not _running_pid(directory, name):
            return Stopped(name=name, pid=pid, has_ended=True)
    return Stopped(name=name, pid=pid, has_ended=False)


def _age_s(pid: int) -> float:
    """Return the seconds since a process started, even if the time of day was set since then; 0 if it does not run."""
    ticks = process_start_time(pid)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def _running_pid(directory: Path, name: str) -> int:
    """Return the process id; 0 if the process does not run."""
    try:
        number, start_time = (directory / f"{name}.pid").read_text(encoding="utf-8").split()
        pid = int(number)
    except (OSError, ValueError):  # not started, or the file is damaged
        return 0
    return pid if process_start_time(pid) == start_time else 0


def _read_log(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
