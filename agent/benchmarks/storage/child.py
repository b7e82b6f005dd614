"""Run programs that access a file system, each in a child process that can be abandoned.

An access to a hung file system cannot be interrupted, and a process that waits for it (state D in `ps`) cannot be killed. So a
rank accesses a measured directory only through a child process, and stops waiting for the child at a deadline.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

POLL_S = 0.02
END_S = 1.0
"""Seconds to wait for the end of a child that was killed."""
MAX_OUTPUT = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a child ended."""

    code: int | None
    """Exit code; None if the child was still running at its deadline."""
    stdout: str
    stderr: str
    at: float = 0.0
    """`time.monotonic()` when this process stopped waiting for the child."""


def run_children(
    commands: Mapping[str, Sequence[str]], limit_s: float, progress: Callable[[], None]
) -> dict[str, Ended | OSError]:
    """Run the commands at the same time; return how each ended, or why it did not start.

    Args:
        commands: key -> program and arguments.
        limit_s: seconds after which a child is killed. If it does not end within END_S after that, it is abandoned.
        progress: called every POLL_S seconds while children run.
    """
    children: dict[str, _Child] = {}
    ended: dict[str, Ended | OSError] = {}
    for key, command in commands.items():
        try:
            children[key] = _Child(command)
        except OSError as error:
            ended[key] = error
    deadline = time.monotonic() + limit_s
    while children:
        expired = time.monotonic() > deadline
        for key, child in list(children.items()):
            if child.has_ended() or expired:
                ended[key] = child.end()
                del children[key]
        progress()
        time.sleep(POLL_S if children else 0)
    return ended


class _Child:
    def __init__(self, command: Sequence[str]) -> None:
        """Start the command. Raises OSError."""
        with contextlib.ExitStack() as files:
            self._stdout, self._stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._stdout, stderr=self._stderr, cwd="/"
            )
            self._files = files.pop_all()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> Ended:
        """Return how the child ended. If it still runs, kill it; if it does not end within END_S, abandon it."""
        code = self._process.poll()
        if code is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        result = Ended(code=code, stdout=_read(self._stdout), stderr=_read(self._stderr), at=time.monotonic())
        self._files.close()
        return result


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode(errors="replace")
