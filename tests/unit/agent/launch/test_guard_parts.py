"""The functions of the guard in forked processes: what a rank inherits, how its program ends, and how the guard ends.

The guard is the parent process of a rank, and reports to the supervisor how the rank ended.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.gang.heartbeat import HEARTBEAT_DIRECTORY
from agent.launch import guard
from tests.unit.agent.launch.test_guard import fork, wait_for_exit, wait_until


def exit_code(function: Callable[[], int | None]) -> int:
    """Call the function in a fork; return the exit code of the fork, negative for a signal."""
    return wait_for_exit(fork(function))


@pytest.mark.parametrize("code", [0, 1, 77])
def test_guard_exits_with_the_exit_code_of_the_rank(code: int) -> None:
    assert guard._end_like(code) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_guard_ends_by_the_signal_that_ended_the_rank_even_if_the_guard_ignores_it(number: signal.Signals) -> None:
    def end() -> int:
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_IGN)
        return guard._end_like(-number)

    assert exit_code(end) == -number


def test_guard_returns_128_plus_the_signal_number_if_the_signal_does_not_end_it() -> None:
    assert exit_code(lambda: guard._end_like(-signal.SIGCHLD)) == 128 + signal.SIGCHLD


def test_guard_dumps_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[object] = []
    monkeypatch.setattr(guard.resource, "setrlimit", lambda *limit: limits.append(limit))
    monkeypatch.setattr(guard.os, "kill", lambda *_: None)
    previous = signal.getsignal(signal.SIGUSR2)
    try:
        assert guard._end_like(-signal.SIGUSR2) == 128 + signal.SIGUSR2
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert limits == [(resource.RLIMIT_CORE, (0, 0))]


def is_open(number: int) -> bool:
    """Return whether this file descriptor is open in the calling process."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("everything", [False, True], ids=["sockets selected", "everything selected"])
def test_selected_descriptors_are_closed_except_standard_input_output_and_error(everything: bool) -> None:
    def close() -> int:
        first, second = socket.socketpair()
        read, write = os.pipe()
        guard._close_fds((lambda mode: True) if everything else stat.S_ISSOCK)
        are_open = [is_open(number) for number in (0, 1, 2, first.fileno(), second.fileno(), read, write)]
        return int(are_open != [True, True, True, False, False, not everything, not everything])

    assert exit_code(close) == 0


def test_rank_is_killed_with_or_without_a_process_group_of_its_own() -> None:
    def in_its_own_group() -> int:
        signal.pause()
        return 0

    child = fork(in_its_own_group)
    wait_until(lambda: os.getpgid(child) == child)
    guard._kill(child, group_only=True)
    assert wait_for_exit(child) == -signal.SIGKILL
    guard._kill(child)  # no error, although the process has ended

    def in_the_group_of_its_parent() -> int:
        child = os.fork()
        if not child:
            signal.pause()
        guard._kill(child)
        return int(os.waitpid(child, 0)[1] != signal.SIGKILL)

    assert exit_code(in_the_group_of_its_parent) == 0


PROGRAM = """
    import os, sys, signal
    fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    leads_group = os.getpgid(0) == os.getpid()
    name = open("/proc/self/comm").read().strip()
    with open({path!r}, "w") as file:
        print(__name__, sys.argv[1:], len(fds) <= 5, signal.SIGTERM in blocked, leads_group, name, file=file)
    {statements}
"""
"""Program of a rank. It writes to a file: its module name, its arguments, whether at most five file descriptors are open, whether
SIGTERM is blocked, whether it leads its process group, and its process name. Then it runs the statements.

More than five would be open if the rank kept the four sockets that `run_as_rank` opens."""


def run_as_rank(tmp_path: Path, statements: str) -> tuple[int, str, str]:
    """Run PROGRAM as a rank in a fork; return its exit code modulo 256, what it wrote to its file, and its standard error."""
    (tmp_path / "ranked.py").write_text(
        textwrap.dedent(PROGRAM).format(path=str(tmp_path / "description"), statements=statements)
    )
    error = tmp_path / "stderr"

    def start() -> int:
        child = os.fork()  # `start` runs in a session leader, in which the rank's call of setpgid would fail
        if not child:
            become()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256

    def become() -> None:
        inherited = [socket.socket() for _ in range(4)]
        os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT), 2)
        signal.pthread_sigmask(signal.SIG_BLOCK, guard.WATCHED)
        sys.path.insert(0, str(tmp_path))
        sys.argv = ["guard.py", "ranked", "--one", "2"]
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 the rank must not close its standard error
        os.environ.pop(HEARTBEAT_DIRECTORY, None)
        os.environ["RANK"] = "3"
        assert inherited
        guard._become_rank(os.getppid())

    code = exit_code(start)
    description = tmp_path / "description"
    return code, description.read_text().strip() if description.exists() else "", error.read_text()


def test_program_of_a_rank_is_the_main_module_with_its_arguments_and_without_inherited_state(tmp_path: Path) -> None:
    code, description, _ = run_as_rank(tmp_path, "pass")
    assert (code, description) == (0, "__main__ ['--one', '2'] True False True rank 3")


@pytest.mark.parametrize(
    ("statements", "code", "text"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(5)", 5, ""),
        ("sys.exit('no device')", 1, "no device\n"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_rank_exits_with_the_code_of_its_program_and_prints_the_message_of_its_exception(
    tmp_path: Path, statements: str, code: int, text: str
) -> None:
    ended, _, error = run_as_rank(tmp_path, statements)
    assert ended == code % 256
    assert text in error
    if not text:
        assert "Traceback" not in error


def test_rank_whose_guard_has_ended_does_not_start() -> None:
    assert exit_code(lambda: guard._die_with_parent(os.getppid() + 1)) == guard.ORPHANED
    assert exit_code(lambda: guard._die_with_parent(os.getppid())) == 0


@pytest.mark.parametrize(("rank", "name"), [("7", "rank 7"), (None, "rank 0")])
def test_name_of_a_rank_has_its_number_which_defaults_to_zero(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, name: str
) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    assert guard._rank_name() == name
