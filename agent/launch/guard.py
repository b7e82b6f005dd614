"""Run a rank or a launcher so that it never outlives the process that started it, and report how a rank really ended.

    torchrun --run-path --start-method=fork … agent/launch/guard.py agent.benchmarks --request …
                                      a rank: torchrun, which has imported torch, forks the guard, and the guard forks the rank
    python -m agent.launch.guard --supervisor 4711 torchrun …     a launcher: killed when its supervisor, process 4711, ends

The guard is needed because a launcher does not report why a rank ended, ends the other ranks as soon as one has failed, and
leaves its ranks running if it is killed.
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
from agent.gang.open_files import raise_soft_limit
from agent.gang.processes import is_alive

POLL_S = 0.5
SEND_TIMEOUT_S = 2.0
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
WATCHED = (signal.SIGCHLD, *TERMINATION_SIGNALS)
ORPHANED = 143
"""Exit code if the parent ended before this process had asked the kernel for the parent-death signal."""


def main() -> int:
    """Become the launcher, or the guard of a rank."""
    if sys.argv[1:2] == ["--supervisor"]:
        _exec_with_pdeathsig(int(sys.argv[2]), sys.argv[3:])
    parent, guard = os.getppid(), os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)  # so that no signal is lost between the fork and the wait
    for number in (*TERMINATION_SIGNALS, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # a fork inherits the launcher's handlers, which must not run here
    _close_fds(stat.S_ISSOCK)
    directory = os.environ.get(HEARTBEAT_DIRECTORY, "")
    sender = DatagramSender(int(os.environ.get("RANK", "0")), Path(directory) if directory else None)
    # Sent before the rank exists, so that a guard that is killed at once is noticed too.
    sender.send("guard", SEND_TIMEOUT_S, pid=guard)
    child = os.fork()
    if child == 0:
        _become_rank(guard)
    _set_process_name(f"{_rank_name()}'s guard")
    # When the launcher ends, this signal wakes `_wait_for_rank`, so that the guard kills its rank at once.
    # SIGCHLD is used, because `_wait_for_rank` waits for it anyway.
    _prctl(PR_SET_PDEATHSIG, signal.SIGCHLD)
    return _wait_for_rank(child, parent, sender)


def _exec_with_pdeathsig(supervisor: int, command: list[str]) -> NoReturn:
    _die_with_parent(supervisor)
    raise_soft_limit()  # for the launcher and its ranks, which inherit it
    os.execvp(command[0], command)  # noqa: S606 - a list, no shell; the parent-death signal survives the exec


def _die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(ORPHANED)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


def _become_rank(guard: int) -> NoReturn:
    """Run the module in `sys.argv[1]` as a program, then exit. Never return: the fork must not continue as the launcher."""
    code: object = 1
    try:
        os.setpgid(0, 0)  # so that the launcher's signals reach only the guard, which records and forwards them
        _die_with_parent(guard)
        _close_fds(lambda mode: True)
        _set_process_name(_rank_name())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        rank_heartbeat()  # starts the heartbeats before slow imports
        module, sys.argv = sys.argv[1], sys.argv[1:]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    except BaseException as error:  # noqa: BLE001 - this fork must not continue as its parent's program
        traceback.print_exc()
        rank_heartbeat().record_exception(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the disk of the log is full, or the program closed the stream
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def _rank_name() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


def _set_process_name(name: str) -> None:
    """Set the name that `top`, `pgrep -x` and the kernel log show. The command line is still that of the launcher."""
    _prctl(PR_SET_NAME, name.encode())


def _close_fds(is_selected: Callable[[int], bool]) -> None:
    """Close each inherited file descriptor for which `is_selected(st_mode)` is true, except standard input, output and error.

    If they stayed open, ports and connections of the launcher would outlive the launcher.
    """
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the listing contains its own descriptor, closed by now
            if number > 2 and is_selected(os.fstat(number).st_mode):
                os.close(number)


def _wait_for_rank(child: int, parent: int, sender: DatagramSender) -> int:
    """Wait until the rank ends, send its exit code to the supervisor and return the guard's own exit code (`_end_like`).

    `terminated_by_launcher` is sent as true if the guard received a termination signal, or if the launcher or the supervisor
    ended before the rank.
    """
    supervisor, terminated_by_launcher = os.environ.get(SUPERVISOR, ""), False
    while True:
        received = signal.sigtimedwait(WATCHED, POLL_S)
        if received is not None and received.si_signo in TERMINATION_SIGNALS:
            terminated_by_launcher = True
            for number in (received.si_signo, signal.SIGCONT):  # a stopped process does not handle SIGTERM
                os.kill(child, number)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if os.getppid() != parent or not is_alive(supervisor):
            terminated_by_launcher = True
            _kill(child)
    code = os.waitstatus_to_exitcode(status)
    sender.send("end", SEND_TIMEOUT_S, code=code, terminated_by_launcher=terminated_by_launcher)
    _kill(child, group_only=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)  # so that the launcher can still end this process
    return _end_like(code)


def _kill(child: int, *, group_only: bool = False) -> None:
    """Kill the process group of the rank. Unless `group_only`, also kill the rank itself, in case it has no group yet."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not group_only:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _end_like(code: int) -> int:
    """End by the signal that ended the rank, or return the rank's exit code, so that the launcher sees how the rank ended.

    Args:
        code: exit code of the rank. A negative code is minus the number of the signal that ended it.
    """
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


if __name__ == "__main__":
    sys.exit(main())
