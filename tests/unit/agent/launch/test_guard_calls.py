"""The calls of the guard to the operating system, in order, with fakes: nothing is forked, killed or closed.

The guard is the parent process of a rank, and reports to the supervisor how the rank ended.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import stat
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, SUPERVISOR
from agent.launch import guard


class ExitedError(BaseException):
    """Raised where the real process would exit."""


class Calls(list[Any]):
    """The calls of the replaced functions: name, positional arguments, and a dictionary of the keyword arguments, if any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch

    def replace(self, owner: Any, name: str, function: Callable[..., Any] = lambda *_, **__: None) -> None:
        """Replace the function `name` of `owner` by `function`, and record its calls."""

        def record(*arguments: Any, **fields: Any) -> Any:
            self.append((name, *arguments, *([fields] if fields else [])))
            return function(*arguments, **fields)

        self._monkeypatch.setattr(owner, name, record)

    def exit(self, code: int) -> None:
        raise ExitedError(code)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return the recorder of the calls of this test. `os._exit` is replaced: it raises ExitedError. RANK is 3."""
    calls = Calls(monkeypatch)
    calls.replace(os, "_exit", calls.exit)
    monkeypatch.setenv("RANK", "3")
    return calls


# ---- the rank ----


class FullStream(io.StringIO):
    """A stream whose disk is full."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (None, 0, ""),
        (SystemExit(), 0, ""),
        (SystemExit(0), 0, ""),
        (SystemExit(5), 5, ""),
        (SystemExit("no device"), 1, "no device\n"),
        (SystemExit(""), 1, "\n"),
        (ValueError("bad"), 1, "ValueError: bad\n"),
        (KeyboardInterrupt(), 1, "KeyboardInterrupt\n"),
    ],
)
def test_rank_runs_its_module_and_exits(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, end: BaseException | None, code: int, text: str
) -> None:
    """`end`: what the module raises; None: it returns. `text`: how the output on standard error ends."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["guard.py", "program", "--one"])
    monkeypatch.setattr(sys, "stdout", FullStream())
    monkeypatch.setattr(sys, "stderr", errors)
    calls.replace(errors, "flush")

    def run_module(*_: Any, **__: Any) -> None:
        assert sys.argv == ["program", "--one"]
        if end:
            raise end

    for owner, name in ((os, "setpgid"), (guard, "_die_with_parent"), (guard, "_set_process_name")):
        calls.replace(owner, name)
    calls.replace(guard, "_close_fds", lambda is_selected: calls.append(is_selected(0)))
    calls.replace(guard.signal, "pthread_sigmask")
    heartbeat = SimpleNamespace(record_exception=lambda error: calls.append(error))
    calls.replace(guard, "rank_heartbeat", lambda: heartbeat)
    calls.replace(guard.runpy, "run_module", run_module)
    with pytest.raises(ExitedError):
        guard._become_rank(77)
    assert calls[:2] == [("setpgid", 0, 0), ("_die_with_parent", 77)]
    assert calls[2][0] == "_close_fds"
    assert calls[3:8] == [
        True,
        ("_set_process_name", "rank 3"),
        ("pthread_sigmask", signal.SIG_UNBLOCK, guard.WATCHED),
        ("rank_heartbeat",),
        ("run_module", "program", {"run_name": "__main__", "alter_sys": True}),
    ]
    recorded = [("rank_heartbeat",), end] if end and not isinstance(end, SystemExit) else []
    assert calls[8:] == [*recorded, ("flush",), ("_exit", code)]
    assert errors.getvalue().endswith(text)
    if isinstance(end, SystemExit) or not end:
        assert errors.getvalue() == text


def test_rank_whose_guard_is_gone_does_not_run(calls: Calls) -> None:
    calls.replace(guard, "_prctl")
    calls.replace(os, "getppid", lambda: 1)
    with pytest.raises(ExitedError):
        guard._die_with_parent(77)
    request = ("_prctl", guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    assert calls == [request, ("getppid",), ("_exit", guard.ORPHANED)]
    calls.clear()
    guard._die_with_parent(1)
    assert calls == [request, ("getppid",)]


def test_process_name_is_set_through_the_c_library(calls: Calls) -> None:
    library = SimpleNamespace(prctl=lambda *arguments: calls.append(arguments))
    calls.replace(guard.ctypes, "CDLL", lambda *_, **__: library)
    guard._set_process_name("rank 3's guard")
    assert calls == [("CDLL", None, {"use_errno": True}), (15, b"rank 3's guard")]


def test_launcher_replaces_the_guard(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the option `--supervisor`, the guard becomes a launcher. The kernel kills this launcher when its supervisor ends."""
    monkeypatch.setattr(sys, "argv", ["guard.py", "--supervisor", "4711", "torchrun", "--one"])
    calls.replace(guard, "_die_with_parent")
    calls.replace(guard, "raise_soft_limit")
    calls.replace(os, "execvp", lambda *_: calls.exit(0))
    with pytest.raises(ExitedError):
        guard.main()
    assert calls == [
        ("_die_with_parent", 4711),
        ("raise_soft_limit",),
        ("execvp", "torchrun", ["torchrun", "--one"]),
    ]


def test_only_selected_descriptors_above_standard_error_are_closed(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = SimpleNamespace(iterdir=lambda: [SimpleNamespace(name=str(number)) for number in range(7)])
    monkeypatch.setattr(guard, "Path", lambda _: entries)

    def fstat(number: int) -> Any:
        if number == 5:  # the descriptor with which the directory was listed is closed by now
            raise OSError(errno.EBADF, "Bad file descriptor")
        return SimpleNamespace(st_mode=stat.S_IFIFO if number == 4 else stat.S_IFSOCK)

    closed: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fstat)
        patched.setattr(os, "close", closed.append)
        guard._close_fds(stat.S_ISSOCK)
    assert closed == [3, 6]


# ---- the guard ----


class FakeSender:
    """Sends nothing, but adds each message to `calls`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def send(self, *arguments: Any, **fields: Any) -> None:
        self._calls.append(("send", *arguments, fields))


@pytest.mark.parametrize("is_rank", [False, True])
@pytest.mark.parametrize("has_environment", [False, True])
def test_guard_prepares_its_process_and_then_forks_the_rank(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, is_rank: bool, has_environment: bool
) -> None:
    """`is_rank`: run the branch of the forked child, which becomes the rank, and not the branch of the guard.

    `has_environment`: RANK and HEARTBEAT_DIRECTORY are set.
    """
    monkeypatch.setattr(sys, "argv", ["guard.py", "program", "--supervisor"])
    monkeypatch.setenv(HEARTBEAT_DIRECTORY, "/work")
    if not has_environment:
        monkeypatch.delenv("RANK")
        monkeypatch.delenv(HEARTBEAT_DIRECTORY)
    sender = FakeSender(calls)
    calls.replace(guard.signal, "pthread_sigmask")
    with monkeypatch.context() as patched:
        patched.setattr(guard.signal, "signal", lambda *arguments: calls.append(("signal", *arguments)))
        calls.replace(guard, "_close_fds")
        calls.replace(guard, "DatagramSender", lambda rank, directory: sender)
        calls.replace(os, "fork", lambda: 0 if is_rank else 55)
        calls.replace(guard, "_become_rank", lambda _: calls.exit(0))
        calls.replace(guard, "_set_process_name")
        calls.replace(guard, "_prctl")
        calls.replace(guard, "_wait_for_rank", lambda *_: 42)
        if is_rank:
            with pytest.raises(ExitedError):
                guard.main()
        else:
            assert guard.main() == 42
    assert calls[0] == ("pthread_sigmask", signal.SIG_BLOCK, guard.WATCHED)
    assert {call[1:] for call in calls[1:5]} == {
        (number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    directory = guard.Path("/work") if has_environment else None
    assert calls[5:9] == [
        ("_close_fds", stat.S_ISSOCK),
        ("DatagramSender", 3 if has_environment else 0, directory),
        ("send", "guard", guard.SEND_TIMEOUT_S, {"pid": os.getpid()}),
        ("fork",),
    ]
    name = "rank 3's guard" if has_environment else "rank 0's guard"
    assert calls[9:] == (
        [("_become_rank", os.getpid())]
        if is_rank
        else [
            ("_set_process_name", name),
            ("_prctl", guard.PR_SET_PDEATHSIG, signal.SIGCHLD),
            ("_wait_for_rank", 55, os.getppid(), sender),
        ]
    )


TERM, CHILD, NOTHING = SimpleNamespace(si_signo=signal.SIGTERM), SimpleNamespace(si_signo=signal.SIGCHLD), None
"""Results of a wait for a signal: SIGTERM, SIGCHLD, or no signal within POLL_S."""
FORWARDED = [("kill", 55, signal.SIGTERM), ("kill", 55, signal.SIGCONT)]
"""Calls by which the guard forwards SIGTERM to the rank, process 55."""


@pytest.mark.parametrize(
    ("received", "parents", "alive", "expected", "by_launcher"),
    [
        ([CHILD], [], [], [], False),
        ([NOTHING, CHILD], [9], [True], [], False),
        ([TERM], [], [], FORWARDED, True),
        ([TERM, TERM, CHILD], [9, 9], [True, True], [*FORWARDED, *FORWARDED], True),
        ([CHILD, CHILD], [1], [], [("_kill", 55)], True),
        ([NOTHING, CHILD], [9], [False], [("_kill", 55)], True),
    ],
    ids=[
        "rank ends before a check",
        "rank ends after a check",
        "SIGTERM",
        "SIGTERM twice",
        "launcher ended",
        "supervisor ended",
    ],
)
@pytest.mark.parametrize("supervisor", [None, "4711 7"])
def test_guard_forwards_signals_and_kills_the_rank_if_launcher_or_supervisor_has_ended(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    received: list[Any],
    parents: list[int],
    alive: list[bool],
    expected: list[Any],
    by_launcher: bool,
    supervisor: str | None,
) -> None:
    """Process 9 is the launcher. The rank, process 55, ends with exit code 7 during the last wait for a signal.

    After each earlier wait, the guard checks its parent, and then the supervisor if the parent is still the launcher.

    `received`: result of each wait.
    `parents`: process id of the guard's parent, at each check of it.
    `alive`: whether the supervisor is alive, at each check of it.
    `expected`: calls before the guard reports the end of the rank.
    `by_launcher`: the reported `terminated_by_launcher`.
    """
    pending, supervisors = list(received), list[str]()

    def wait(watched: Any, seconds: float) -> Any:
        assert (watched, seconds) == (guard.WATCHED, guard.POLL_S)
        return pending.pop(0)

    def is_alive(identity: str) -> bool:
        supervisors.append(identity)
        return alive[len(supervisors) - 1]

    def wait_for_child(child: int, flags: int) -> tuple[int, int]:
        assert (child, flags) == (55, os.WNOHANG)
        return (0, 0) if pending else (55, 7 << 8)

    parents = list(parents)
    monkeypatch.setenv(SUPERVISOR, supervisor or "")
    if supervisor is None:
        monkeypatch.delenv(SUPERVISOR)
    monkeypatch.setattr(guard.signal, "sigtimedwait", wait)
    monkeypatch.setattr(guard, "is_alive", is_alive)
    monkeypatch.setattr(os, "waitpid", wait_for_child)
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    for owner, name in ((os, "kill"), (guard, "_kill"), (guard.signal, "pthread_sigmask")):
        calls.replace(owner, name)
    calls.replace(guard, "_end_like", lambda code: code + 1)
    assert guard._wait_for_rank(55, 9, FakeSender(calls)) == 8  # type: ignore[arg-type]
    assert calls == [
        *expected,
        ("send", "end", guard.SEND_TIMEOUT_S, {"code": 7, "terminated_by_launcher": by_launcher}),
        ("_kill", 55, {"group_only": True}),
        ("pthread_sigmask", signal.SIG_UNBLOCK, guard.WATCHED),
        ("_end_like", 7),
    ]
    assert supervisors == [supervisor or ""] * len(alive)


@pytest.mark.parametrize("is_gone", [False, True])
def test_process_group_of_the_rank_is_killed_and_by_default_the_rank_itself_too(calls: Calls, is_gone: bool) -> None:
    def kill(*_: int) -> None:
        if is_gone:
            raise ProcessLookupError

    calls.replace(os, "killpg", kill)
    calls.replace(os, "kill", kill)
    guard._kill(55, group_only=True)
    assert calls == [("killpg", 55, signal.SIGKILL)]
    guard._kill(55)
    assert calls[1:] == [("killpg", 55, signal.SIGKILL), ("kill", 55, signal.SIGKILL)]
