"""Runs one rank, or a launcher, so that it never outlives who started it, and so that its end is terminated as it was.

    torchrun --run-path --start-method=fork … agent/launch/guard.py agent.benchmarks --request …
                                                      a rank: a fork of its launcher that has torch already, and a small parent
    python -m agent.launch.guard --leash 4711 torchrun …     a launcher: killed when its supervisor, process 4711, ends

A launcher tells nobody why a rank ended, and ends its siblings as soon as one is gone; killed itself, it leaves them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from agent.gang.culprit import TERMINATION_SIGNALS
from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, SUPERVISOR, DatagramSender, rank_heartbeat
from agent.gang.processes import is_alive

LOOK_S = 0.5
END_PATIENCE_S = 2.0
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
WATCHED = (signal.SIGCHLD, *TERMINATION_SIGNALS)
ORPHANED = 143


def main() -> int:
    """Becomes the launcher, or the guard of a rank."""
    if sys.argv[1:2] == ["--leash"]:
        return _leash(int(sys.argv[2]), sys.argv[3:])
    parent, guard = os.getppid(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # nothing is missed between the fork and the watch
    for number in (*TERMINATION_SIGNALS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # what the launcher does when it is asked to end is not for its forks
    _let_go(stat.S_ISSOCK)
    directory = os.environ.get(HEARTBEAT_DIRECTORY, "")
    sender = DatagramSender(int(os.environ.get("RANK", "0")), Path(directory) if directory else None)
    sender.send("guard", END_PATIENCE_S, pid=guard)  # before there is a rank: killed at once, it is missed all the same
    child = os.fork()
    if child == 0:
        _become_rank(guard)
    _call_it(f"{_rank()}'s guard")
    # To look at once: with the launcher may go what ranks of other hosts fail without.
    _prctl(PR_SET_PDEATHSIG, signal.SIGCHLD)
    return _watch(child, parent, sender)


def _leash(supervisor: int, command: list[str]) -> int:
    _die_with(supervisor)
    os.execvp(command[0], command)  # noqa: S606 - a list, no shell; the kernel keeps the leash


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before
        os._exit(ORPHANED)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _become_rank(guard: int) -> NoReturn:
    code: object = 1
    try:
        os.setpgid(0, 0)  # a launcher's signal goes to the guard, which passes it on and remembers it
        _die_with(guard)
        _let_go(lambda mode: True)
        _call_it(_rank())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        rank_heartbeat()  # before whatever else is to be imported
        module, sys.argv = sys.argv[1], sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
        if code and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    except BaseException:  # noqa: BLE001 - this fork must not go on as its parent's program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(bool(code)))


def _rank() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


def _call_it(name: str) -> None:
    """What `top`, `pgrep -x` and the kernel's log call this process: a fork has its launcher's arguments."""
    _prctl(PR_SET_NAME, name.encode())


def _let_go(which: Callable[[int], bool]) -> None:
    """Closes what a fork has of its launcher: a port or a connection that it held on to would outlive the launcher."""
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the listing's own
            if number > 2 and which(os.fstat(number).st_mode):
                os.close(number)


def _watch(child: int, parent: int, sender: DatagramSender) -> int:
    """Waits for the rank's end, tells it, and ends likewise."""
    supervisor, terminated = os.environ.get(SUPERVISOR, ""), False
    while True:
        got = signal.sigtimedwait(WATCHED, LOOK_S)
        if got is not None and got.si_signo in TERMINATION_SIGNALS:
            terminated = True
            for number in (got.si_signo, signal.SIGCONT):  # a stopped process takes no SIGTERM
                os.kill(child, number)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if os.getppid() != parent or not is_alive(supervisor):
            terminated = True
            _kill(child)
    code = os.waitstatus_to_exitcode(status)
    sender.send("end", END_PATIENCE_S, code=code, terminated_by_launcher=terminated)
    _kill(child, whole_group_only=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)  # the launcher has its forks wait for each other
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
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    sys.exit(main())
