"""Runs a Prometheus on the control node for the time of a run.

prometheus.py start DIRECTORY COMMAND...   starts it unless it runs; DIRECTORY gets its process id and log
prometheus.py stop DIRECTORY               ends it, so that what it has in memory is written
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
TOLD = 1500


def born(pid: int) -> str:
    """When the process began, which with the id names it; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def running(directory: Path) -> int:
    """The process id of the one started here, or 0."""
    try:
        pid, began = (directory / "prometheus.pid").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(pid) if born(int(pid)) == began else 0


def start(directory: Path, command: list[str]) -> str:
    """Starts it and waits until it answers. Raises OSError with the end of its log where it does not."""
    if pid := running(directory):
        return f"runs as process {pid}"
    log = directory / "prometheus.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    (directory / "prometheus.pid").write_text(f"{server.pid} {born(server.pid)}\n")
    ends = time.monotonic() + READY_S
    while READY not in log.read_text(errors="replace"):
        if server.poll() is not None or time.monotonic() > ends:
            stop(directory)
            raise OSError(log.read_text(errors="replace").strip()[-TOLD:])
        time.sleep(0.1)
    return f"started as process {server.pid}"


def stop(directory: Path) -> str:
    """Ends it. One that does not run is no error."""
    pid = running(directory)
    if not pid:
        return "does not run"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        ends = time.monotonic() + STOP_S
        while running(directory) and time.monotonic() < ends:
            time.sleep(0.1)
        if not running(directory):
            break
    return "ended"


def main(verb: str, directory: str, *command: str) -> int:
    """Does it, and tells it."""
    try:
        print(start(Path(directory), list(command)) if verb == "start" else stop(Path(directory)))
    except OSError as error:
        print(f"Prometheus does not start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
