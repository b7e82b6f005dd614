"""Start or stop the Prometheus of an acceptance run on the control node.

prometheus.py start DIRECTORY COMMAND...   start it unless it is running; write its process id and log to DIRECTORY
prometheus.py stop DIRECTORY               stop it: SIGTERM, on which it writes its data to disk; SIGKILL after 30 s
"""

from __future__ import annotations

import contextlib
import json
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
    """Return the start time of a process in clock ticks since boot; empty if it does not run.

    The process id alone does not identify a process, because the kernel uses it again after the process has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def running_pid(directory: Path) -> int:
    """Return the process id of the Prometheus that `start` started with this directory; 0 if it is not running."""
    try:
        pid, started = (directory / "prometheus.pid").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(pid) if start_time(int(pid)) == started else 0


def start(directory: Path, command: list[str]) -> dict[str, int | bool]:
    """Start Prometheus and wait until it is ready, unless it is already running.

    Return its process id, and whether this call started it. Raise OSError with the end of its log if it does not get ready.
    """
    if pid := running_pid(directory):
        return {"pid": pid, "started": False}
    log = directory / "prometheus.log"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    (directory / "prometheus.pid").write_text(f"{server.pid} {start_time(server.pid)}\n")
    deadline = time.monotonic() + READY_S
    while READY not in log.read_text(errors="replace"):
        has_exited = server.poll() is not None
        if has_exited or time.monotonic() > deadline:
            problem = f"exited with code {server.returncode}" if has_exited else f"not ready after {READY_S:g} s"
            with contextlib.suppress(TimeoutError):  # the error below is more important than a failure to stop
                stop(directory)
            end = log.read_text(errors="replace").strip()[-MESSAGE_CHARACTERS:]
            raise OSError(f"{problem}; its log {f'ends: {end}' if end else 'is empty'}")
        time.sleep(0.1)
    return {"pid": server.pid, "started": True}


def stop(directory: Path) -> dict[str, int | bool]:
    """Stop Prometheus, if it is running. Raise TimeoutError if it still runs after SIGKILL.

    Return its process id (0: it was not running), and whether this call stopped it.
    """
    pid = running_pid(directory)
    if not pid:
        return {"pid": 0, "stopped": False}
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + STOP_S
        while running_pid(directory) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not running_pid(directory):
            return {"pid": pid, "stopped": True}
    raise TimeoutError(f"process {pid} is still running {STOP_S:g} s after SIGKILL")


def main(verb: str = "", directory: str = "", *command: str) -> int:
    """Run `start` or `stop` and print its outcome as JSON."""
    if verb not in ("start", "stop") or not directory or (verb == "start") != bool(command):
        print(f"usage:{(__doc__ or '').partition(chr(10))[2]}", end="", file=sys.stderr)
        return 2
    try:
        outcome = start(Path(directory), list(command)) if verb == "start" else stop(Path(directory))
    except OSError as error:
        print(f"Prometheus does not {verb}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
