"""Run each child process in its own process group, so that a signal to the group also ends the descendants of the child."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

Command = Sequence[str | Path]
Stream = int | IO[Any] | None

SEARCH_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # `su` without `-` omits these directories
AGENT = r"(^|[ /])rackproof [a-z]|torch\.distributed|agent\.(benchmarks|launch)"
"""Pattern for `pgrep -f` that matches the processes of the agent. A subcommand must follow `rackproof`, because the path of any
program may contain a directory named rackproof."""
SHOWN = 4000
"""The exception of a failed command shows at most this many characters of the end of stdout, and of the end of stderr."""


def environment(additions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of this process, with the system programs on PATH, and `additions`."""
    return {**os.environ, "PATH": SEARCH_PATH, **(additions or {})}


def run(
    command: Command,
    *,
    check: bool = True,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    stdout: Stream = subprocess.PIPE,
    stderr: Stream = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """Run a command like `subprocess.run`; at the time limit, kill its process group. `env` defaults to `environment()`."""
    argv = [str(part) for part in command]
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        env=environment() if env is None else env,
        cwd=cwd,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired as error:
            kill_group(process, signal.SIGKILL)
            _show(error, error.output, error.stderr)
            raise
        except BaseException:
            kill_group(process, signal.SIGKILL)
            raise
    if check and process.returncode:
        failure = subprocess.CalledProcessError(process.returncode, argv, output, errors)
        _show(failure, output, errors)
        raise failure
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


def _show(error: Exception, *outputs: str | bytes | None) -> None:
    """Add the output of the command to the exception, so that a traceback shows it."""
    for output in outputs:
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        if text and text.strip():
            error.add_note(text.strip()[-SHOWN:])


def kill_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to the process group of a process that was started with `start_new_session`."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def end_all(processes: Iterable[subprocess.Popen[str]], grace: float = 2) -> None:
    """Send SIGTERM to each process group, and SIGKILL if its leader still runs after `grace` seconds. Wait for all leaders."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        kill_group(process, signal.SIGTERM)
    deadline = time.monotonic() + grace
    for process in running:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill_group(process, signal.SIGKILL)
            process.wait()


def close_pipes(process: subprocess.Popen[str]) -> None:
    """Close this process's ends of the pipes of a child process."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@contextlib.contextmanager
def sample_command_lines() -> Iterator[set[str]]:
    """Yield a set to which the command lines of all processes of this machine are added every 0.5 s until the block ends.

    The processes of the lab hosts are included.
    """
    ended, arguments = threading.Event(), set[str]()

    def watch() -> None:
        while not ended.wait(0.5):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    arguments.add(path.read_bytes().decode(errors="replace"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield arguments
    finally:
        ended.set()
        watcher.join()
