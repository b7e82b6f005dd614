"""Test `agent.launch.guard` in forks of this process: how ranks and launchers end, and what the supervisor receives.

The guard is the parent process of a rank, and reports to the supervisor how the rank ended. With the option `--supervisor`,
`agent.launch.guard` becomes a launcher instead, and the kernel kills this launcher when its supervisor ends.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, SUPERVISOR, rank_heartbeat
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.processes import process_identity, read_process
from agent.gang.rank_state import RankState
from agent.launch import guard

TIMEOUT_S = 60.0


def wait_until(is_true: Callable[[], Any]) -> None:
    """Wait until the condition is true; fail after TIMEOUT_S."""
    end = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < end, f"the condition is not true after {TIMEOUT_S:g} s"
        select.select([], [], [], 0.005)


def fork(function: Callable[[], int | None]) -> int:
    """Call the function in a child process, which exits with the returned code; return the process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn about a fork of a process with threads
        pid = os.fork()
    if not pid:
        code: Any = 99
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # an earlier test may have set a handler
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = function()
        except SystemExit as error:
            code = error.code
        finally:
            os._exit(code or 0)
    return pid


def wait_for_exit(pid: int) -> int:
    """Wait for a child; return its exit code, negative for a signal."""
    end = time.monotonic() + TIMEOUT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < end, "the child does not end"
        select.select([], [], [], 0.005)


class Rank:
    """A guard and its rank. The rank's program writes a description of its process and runs the code given to `start`."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self.receiver = HeartbeatReceiver(directory, {0: "cpu=0", 3: "cpu=3"})
        self.guard = 0
        """Process id of the guard; 0 while it does not run."""
        self.description_path = directory / "description"
        monkeypatch.setenv(HEARTBEAT_DIRECTORY, str(directory))
        monkeypatch.setenv("RANK", "3")
        monkeypatch.delenv(SUPERVISOR, raising=False)
        monkeypatch.setattr(guard, "POLL_S", 0.02)
        monkeypatch.syspath_prepend(str(directory))
        monkeypatch.setattr(sys, "argv", ["guard", f"program_{directory.name}", str(self.description_path), "--more"])

    def start(self, statements: str = "signal.pause()", launcher: Callable[[], int] = guard.main) -> Rank:
        """Fork a process that calls `launcher`. By default, the forked process becomes the guard.

        `statements`: code that the rank's program runs.
        """
        (self._directory / f"program_{self._directory.name}.py").write_text(
            "import json, os, signal, sys\n"
            "document = {'pid': os.getpid(), 'group': os.getpgrp(), 'name': __name__, 'arguments': sys.argv,\n"
            "            'blocked': list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))}\n"
            "open(sys.argv[1] + '.part', 'w').write(json.dumps(document))\n"
            f"os.rename(sys.argv[1] + '.part', sys.argv[1])\n{statements}\n"
        )
        rank_heartbeat.cache_clear()
        self.guard = fork(launcher)
        return self

    @property
    def description(self) -> Any:
        wait_until(self.description_path.exists)
        return json.loads(self.description_path.read_text())

    @property
    def pid(self) -> int:
        return int(self.description["pid"])

    @property
    def state(self) -> RankState:
        self.receiver.read()
        return self.receiver.states()[1]

    def wait(self) -> tuple[int, int | None, bool]:
        """Wait for the guard. Return its exit code, and what it reported: the rank's exit code and `terminated_by_launcher`."""
        code = wait_for_exit(self.guard)
        self.guard = 0
        state = self.state
        assert state.ended_s is not None
        return code, state.exit_code, state.terminated_by_launcher


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """Yield a rank that has not been started."""
    rank = Rank(tmp_path, monkeypatch)
    yield rank
    rank.receiver.close()
    if rank.guard:
        os.kill(rank.guard, signal.SIGKILL)
        os.waitpid(rank.guard, 0)


# ---- how a rank ends ----


@pytest.mark.parametrize(
    ("statements", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('a message')", 1),
        ("raise ValueError('a message')", 1),
        ("os._exit(3)", 3),
        ("sys.exit('')", 1),
        ("sys.stdout = open('/dev/full', 'w'); print('lost')", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("os.abort()", -6),
    ],
    ids=[
        "exit 0",
        "exit 7",
        "exit with a message",
        "exception",
        "os._exit",
        "exit with an empty message",
        "output to a full disk",
        "SIGKILL",
        "SIGSEGV",
        "SIGTERM",
        "SIGABRT",
    ],
)
def test_launcher_and_supervisor_get_the_exit_code_of_the_rank(rank: Rank, statements: str, code: int) -> None:
    assert rank.start(statements).wait() == (code, code, False)


def test_program_runs_as_main_with_its_arguments(rank: Rank) -> None:
    description = rank.start("").description
    assert (description["name"], description["arguments"][1:]) == ("__main__", [str(rank.description_path), "--more"])
    assert description["group"] == description["pid"], (
        "a signal to the launcher's process group must not reach the rank"
    )
    assert description["blocked"] == []
    rank.wait()


def test_process_names_contain_the_rank(rank: Rank) -> None:
    """Ranks and guards have the same command line as their launcher.

    So only the name distinguishes them in `top` and the kernel log.
    """
    pid = rank.start().pid
    for number, name in ((pid, "rank 3"), (rank.guard, "rank 3's guard")):
        wait_until(lambda number=number, name=name: Path(f"/proc/{number}/comm").read_text() == f"{name}\n")
    os.kill(rank.guard, signal.SIGTERM)
    rank.wait()


def test_rank_does_not_keep_a_port_of_its_launcher_open(rank: Rank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        rank.start()
        assert rank.description
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    os.kill(rank.guard, signal.SIGTERM)
    rank.wait()


def test_rank_does_not_inherit_the_launchers_signal_handlers(rank: Rank) -> None:
    def launcher() -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(77))
        return guard.main()

    rank.start(launcher=launcher)
    assert rank.description
    os.kill(rank.guard, signal.SIGTERM)
    assert rank.wait() == (-15, -15, True)


HIDE_GPUS = """
import os
from agent.benchmarks import rendezvous
NAMES = ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK")
def show():
    print([os.environ.get(name) for name in NAMES], flush=True)
def launch(variables):
    os.environ.pop(NAMES[0], None)
    os.environ.update(variables)
    rendezvous.hide_gpus_until_fork()
    show()
    os.fork() or (show(), os._exit(0))
    os.wait()
for variables in ({NAMES[0]: "4,5"}, {}):
    os.fork() or (launch(variables), os._exit(0))
    os.wait()
"""
"""Program that forks two launchers; the first may use only GPUs 4 and 5. Each launcher, and then its
fork, prints the values of the variables in NAMES."""


def test_gpus_hidden_from_the_launcher_are_visible_to_its_forks() -> None:
    """CUDA does not work in a fork of a process that has used CUDA.

    torchrun queries the GPUs before it forks the ranks, so it must see no GPU.
    """
    output = subprocess.run([sys.executable, "-c", HIDE_GPUS], capture_output=True, text=True, check=True).stdout
    hidden = "['', '1']"
    assert output.splitlines() == [hidden, "['4,5', None]", hidden, "[None, None]"]


def test_guard_killed_before_it_starts_its_rank_is_reported(rank: Rank) -> None:
    def launcher() -> int:
        os.fork = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        return guard.main()

    assert rank.start(launcher=launcher).wait() == (-9, None, False)


def test_rank_sends_heartbeats_although_its_program_does_not_start_them(rank: Rank) -> None:
    """Heartbeats start before the program: importing torch takes seconds, in which the rank must not appear lost."""
    rank.start("signal.pause()")
    wait_until(lambda: rank.state.alive_s is not None)
    assert rank.receiver.states()[0].alive_s is None, "the heartbeats must be those of rank 3, not of rank 0"
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: str(number.name))
def test_launchers_signal_reaches_the_rank_and_is_reported(rank: Rank, number: signal.Signals) -> None:
    statements = f"signal.signal({int(number)}, signal.SIG_DFL); open(sys.argv[1] + '.ready', 'w'); signal.pause()"
    rank.start(statements)
    wait_until(Path(f"{rank.description_path}.ready").exists)
    os.kill(rank.guard, number)
    assert rank.wait() == (-number, -number, True)


def test_sigterm_ends_a_stopped_rank(rank: Rank) -> None:
    os.kill(rank.start().pid, signal.SIGSTOP)
    os.kill(rank.guard, signal.SIGTERM)
    assert rank.wait() == (-15, -15, True)


def test_guard_waits_for_a_rank_that_handles_sigterm(rank: Rank) -> None:
    exit_on_sigterm = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    # The program does not call signal.pause(), because a signal that arrives just before this call would not end the pause.
    # The program closes the file `.ready`, because Python warns about a file that is not closed. If SIGTERM arrived during this
    # warning, Python would ignore the exit that the handler requests.
    rank.start(
        f"import time; {exit_on_sigterm}; open(sys.argv[1] + '.ready', 'w').close()\nwhile True: time.sleep(0.01)"
    )
    wait_until(Path(f"{rank.description_path}.ready").exists)
    os.kill(rank.guard, signal.SIGTERM)
    assert rank.wait() == (5, 5, True)


def with_child(statements: str) -> str:
    """Return a program that forks a child and then runs `statements`.

    The child ignores SIGTERM. It writes its process id to a file, and the program waits for that file.
    """
    return (
        "child = os.fork()\n"
        "if not child:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    open(sys.argv[1] + '.child', 'w').write(str(os.getpid()))\n    signal.pause()\n"
        "while not (os.path.exists(sys.argv[1] + '.child') and open(sys.argv[1] + '.child').read()): pass\n"
        + statements
    )


def wait_until_gone(pid: int) -> None:
    """Wait until the process has ended; a zombie counts as ended."""
    wait_until(lambda: read_process(pid) is None)


def test_children_of_a_rank_end_when_the_rank_ends(rank: Rank) -> None:
    assert rank.start(with_child("os._exit(4)")).wait() == (4, 4, False)
    wait_until_gone(int(Path(f"{rank.description_path}.child").read_text()))


def test_rank_ends_when_its_supervisor_ends(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = fork(lambda: signal.pause())
    monkeypatch.setenv(SUPERVISOR, process_identity(supervisor))
    rank.start(with_child("signal.pause()"))
    wait_until(
        lambda: Path(f"{rank.description_path}.child").exists() and Path(f"{rank.description_path}.child").read_text()
    )
    select.select([], [], [], 3 * guard.POLL_S)
    assert read_process(rank.pid), "the rank must run while the supervisor runs"
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    assert rank.wait() == (-9, -9, True)
    wait_until_gone(int(Path(f"{rank.description_path}.child").read_text()))


def test_rank_in_the_process_group_of_its_guard_ends_when_its_supervisor_ends(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank's program leaves the rank's process group, so the guard must kill the rank by its process id."""
    supervisor = fork(lambda: signal.pause())
    monkeypatch.setenv(SUPERVISOR, process_identity(supervisor))
    rank.start("os.setpgid(0, os.getppid()) if os.getpgid(os.getppid()) == os.getppid() else None; signal.pause()")
    wait_until(lambda: read_process(rank.pid))
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    assert rank.wait() == (-9, -9, True)


def test_rank_ends_at_once_when_its_launcher_ends(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here `rank.guard` is the process id of the launcher, which forks the guard.

    POLL_S is longer than the test, so the guard must notice the end of the launcher without a poll.
    """
    monkeypatch.setattr(guard, "POLL_S", 10 * TIMEOUT_S)

    def launcher() -> int:
        if os.fork():
            signal.pause()
        return guard.main()

    pid = rank.start(launcher=launcher).pid
    os.kill(rank.guard, signal.SIGKILL)
    wait_for_exit(rank.guard)
    rank.guard = 0
    wait_until_gone(pid)
    wait_until(lambda: rank.state.ended_s is not None)
    assert (rank.state.exit_code, rank.state.terminated_by_launcher) == (-9, True)


def test_rank_ends_when_its_guard_ends_and_is_reported_without_an_exit_code(rank: Rank) -> None:
    pid = rank.start().pid
    wait_until(lambda: rank.state.alive_s is not None)
    os.kill(rank.guard, signal.SIGKILL)
    os.waitpid(rank.guard, 0)
    rank.guard = 0
    wait_until_gone(pid)
    assert (rank.state.ended_s is not None, rank.state.exit_code) == (True, None)


def test_guard_works_without_a_heartbeat_directory(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_DIRECTORY)
    monkeypatch.delenv("RANK")
    rank.start("sys.exit(2)")
    assert wait_for_exit(rank.guard) == 2
    rank.guard = 0
    assert not rank.receiver.read()


def test_rank_number_is_zero_if_the_launcher_sets_none(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    rank.start("sys.exit(2)")
    assert wait_for_exit(rank.guard) == 2
    rank.guard = 0
    rank.receiver.read()
    assert rank.receiver.states()[0].exit_code == 2


# ---- a launcher, which is started with `--supervisor` ----


def test_launcher_ends_when_its_supervisor_ends(tmp_path: Path) -> None:
    def supervisor() -> int:
        supervisor_pid = os.getpid()
        launcher = os.fork()
        if not launcher:
            sys.argv = ["guard", "--supervisor", str(supervisor_pid), "sleep", "600"]
            return guard.main()
        (tmp_path / "part").write_text(str(launcher))
        (tmp_path / "part").rename(tmp_path / "launcher")
        signal.pause()
        return 0

    supervisor_pid = fork(supervisor)
    wait_until((tmp_path / "launcher").exists)
    launcher = int((tmp_path / "launcher").read_text())
    wait_until(lambda: Path(f"/proc/{launcher}/comm").read_text() == "sleep\n")
    os.kill(supervisor_pid, signal.SIGKILL)
    wait_for_exit(supervisor_pid)
    wait_until_gone(launcher)


def test_launcher_does_not_start_after_the_end_of_its_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process named by `--supervisor` is not the launcher's parent, the supervisor counts as ended."""
    monkeypatch.setattr(sys, "argv", ["guard", "--supervisor", "1", "true"])
    if os.getpid() == 1:
        pytest.skip("this process has the process id 1, so `--supervisor 1` names the launcher's parent")
    assert wait_for_exit(fork(guard.main)) == guard.ORPHANED
    monkeypatch.setattr(sys, "argv", ["guard", "--supervisor", str(os.getpid()), "sh", "-c", "exit 6"])
    assert wait_for_exit(fork(guard.main)) == 6
