"""Run a Prometheus on the control node during a run.

prometheus.py start DIRECTORY COMMAND...   start it unless it is running; write its process id and log to DIRECTORY
prometheus.py stop DIRECTORY               stop it, so that it writes its data to disk
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

READY = "Server is ready to receive web requests"
READY_S, STOP_S = 30.0, 30.0
MESSAGE_CHARACTERS = 1500


def start_time(pid: int) -> str:
    """Return the start time of a process; empty if it does not exist. Process id and start time together identify a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def running(directory: Path) -> int:
    """Return the process id of the Prometheus that was started in the directory, or 0."""
    try:
        pid, started = (directory / "prometheus.pid").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(pid) if start_time(int(pid)) == started else 0


def start(directory: Path, command: list[str]) -> str:
    """Start Prometheus and wait until it is ready. Raise OSError with the end of its log if it does not start."""
    if pid := running(directory):
        return f"already running as process {pid}"
    log = directory / "prometheus.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    (directory / "prometheus.pid").write_text(f"{server.pid} {start_time(server.pid)}\n")
    ends = time.monotonic() + READY_S
    while READY not in log.read_text(errors="replace"):
        if server.poll() is not None or time.monotonic() > ends:
            stop(directory)
            raise OSError(log.read_text(errors="replace").strip()[-MESSAGE_CHARACTERS:])
        time.sleep(0.1)
    return f"started as process {server.pid}"


def stop(directory: Path) -> str:
    """Stop Prometheus, if it is running."""
    pid = running(directory)
    if not pid:
        return "not running"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        ends = time.monotonic() + STOP_S
        while running(directory) and time.monotonic() < ends:
            time.sleep(0.1)
        if not running(directory):
            break
    return "stopped"


def main(verb: str, directory: str, *command: str) -> int:
    """Run the command and print its outcome."""
    try:
        print(start(Path(directory), list(command)) if verb == "start" else stop(Path(directory)))
    except OSError as error:
        print(f"Prometheus does not start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
