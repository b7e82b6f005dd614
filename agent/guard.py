"""Runs one rank, or a launcher, so that it never outlives who started it, and so that its end is told as it was.

    torchrun … -m agent.guard agent.benchmarks --request …      a rank: a small parent watches over it
    python -m agent.guard --leash 4711 torchrun …               a launcher: killed when its supervisor, process 4711, ends

A launcher tells nobody why a rank ended, and ends its siblings as soon as one is gone; killed itself, it leaves them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

from agent.culprit import BY_REQUEST
from agent.heartbeat import ADDRESS, SUPERVISOR, Voice, heart, lives

LOOK_S = 0.5
END_PATIENCE_S = 2.0
PR_SET_PDEATHSIG = 1
WATCHED = (signal.SIGCHLD, *BY_REQUEST)
ORPHANED = 143


def main() -> int:
    """Becomes the launcher, or the guard of a rank."""
    if sys.argv[1:2] == ["--leash"]:
        return _leash(int(sys.argv[2]), sys.argv[3:])
    parent, guard = os.getppid(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # nothing is missed between the fork and the watch
    child = os.fork()
    if child == 0:
        _become_rank(guard)
        return 0
    return _watch(child, parent)


def _leash(supervisor: int, command: list[str]) -> int:
    _die_with(supervisor)
    os.execvp(command[0], command)  # noqa: S606 - a list, no shell; the kernel keeps the leash


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(ORPHANED)


def _become_rank(guard: int) -> None:
    os.setpgid(0, 0)  # a launcher's signal goes to the guard, which passes it on and remembers it
    _die_with(guard)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    heart()  # before torch: importing it takes seconds
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch(child: int, parent: int) -> int:
    """Waits for the rank's end, tells it, and ends likewise."""
    directory, supervisor = os.environ.get(ADDRESS, ""), os.environ.get(SUPERVISOR, "")
    voice = Voice(int(os.environ.get("RANK", "0")), Path(directory) if directory else None)
    voice.say("guard", END_PATIENCE_S, pid=os.getpid())
    told = False
    while True:
        got = signal.sigtimedwait(WATCHED, LOOK_S)
        if got is not None and got.si_signo in BY_REQUEST:
            told = True
            for number in (got.si_signo, signal.SIGCONT):  # a stopped process takes no SIGTERM
                os.kill(child, number)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if os.getppid() != parent or not lives(supervisor):
            told = True
            _kill(child)
    code = os.waitstatus_to_exitcode(status)
    voice.say("end", END_PATIENCE_S, code=code, told=told)
    _kill(child, whole_group_only=True)
    return _end_likewise(code)


def _kill(child: int, *, whole_group_only: bool = False) -> None:
    """Ends the rank with what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not whole_group_only:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _end_likewise(code: int) -> int:
    """The launcher is to see the rank's own end."""
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL cannot be set, and need not be
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    sys.exit(main())
