"""A rank under its guard, and a launcher under its guard, as forks of this process: how each ends, and what is reported."""

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


def until(true: Callable[[], Any]) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < ends
        select.select([], [], [], 0.005)


def forked(work: Callable[[], int | None]) -> int:
    """A process that does it and ends with what it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork where there are threads
        pid = os.fork()
    if not pid:
        code: Any = 99
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a launch that was tested before leaves its own
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = work()
        except SystemExit as left:
            code = left.code
        finally:
            os._exit(code or 0)
    return pid


def code_of(pid: int) -> int:
    """How a child ended, as subprocess tells it."""
    ends = time.monotonic() + TIMEOUT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < ends, "it does not end"
        select.select([], [], [], 0.005)


class Rank:
    """A guard with its rank, whose program runs to `what`, has then written its process id, and goes on."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self.beats = HeartbeatReceiver(directory, {0: "cpu=0", 3: "cpu=3"})
        self.guard = 0
        self._told = directory / "told"
        monkeypatch.setenv(HEARTBEAT_DIRECTORY, str(directory))
        monkeypatch.setenv("RANK", "3")
        monkeypatch.delenv(SUPERVISOR, raising=False)
        monkeypatch.setattr(guard, "POLL_S", 0.02)
        monkeypatch.syspath_prepend(str(directory))
        monkeypatch.setattr(sys, "argv", ["guard", f"program_{directory.name}", str(self._told), "--more"])

    def start(self, what: str = "signal.pause()", instead: Callable[[], int] = guard.main) -> Rank:
        (self._directory / f"program_{self._directory.name}.py").write_text(
            "import json, os, signal, sys\n"
            "document = {'pid': os.getpid(), 'group': os.getpgrp(), 'name': __name__, 'arguments': sys.argv,\n"
            "            'blocked': list(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))}\n"
            "open(sys.argv[1] + '.part', 'w').write(json.dumps(document))\n"
            f"os.rename(sys.argv[1] + '.part', sys.argv[1])\n{what}\n"
        )
        rank_heartbeat.cache_clear()
        self.guard = forked(instead)
        return self

    @property
    def document(self) -> Any:
        until(self._told.exists)
        return json.loads(self._told.read_text())

    @property
    def pid(self) -> int:
        return int(self.document["pid"])

    @property
    def state(self) -> RankState:
        self.beats.read()
        return self.beats.states()[1]

    def ended(self) -> tuple[int, int | None, bool]:
        """The guard's exit code, and what was told of the rank's."""
        code = code_of(self.guard)
        self.guard = 0
        state = self.state
        assert state.ended_s is not None
        return code, state.exit_code, state.terminated_by_launcher


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(tmp_path, monkeypatch)
    yield made
    made.beats.close()
    if made.guard:
        os.kill(made.guard, signal.SIGKILL)
        os.waitpid(made.guard, 0)


# ---- how a rank ends ----


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('what is wrong')", 1),
        ("raise ValueError('what is wrong')", 1),
        ("os._exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("os.abort()", -6),
    ],
    ids=["well", "badly", "with a message", "by an error", "at once", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT"],
)
def test_launcher_sees_the_exit_of_the_rank_and_the_supervisor_gets_it(rank: Rank, what: str, code: int) -> None:
    assert rank.start(what).ended() == (code, code, False)


def test_the_program_runs_as_the_launcher_meant_it(rank: Rank) -> None:
    reported = rank.start("").document
    assert (reported["name"], reported["arguments"][1:]) == ("__main__", [str(rank._told), "--more"])
    assert reported["group"] == reported["pid"], "a launcher's signal goes to the guard alone"
    assert reported["blocked"] == []
    rank.ended()


def test_rank_and_guard_go_by_the_ranks_number(rank: Rank) -> None:
    """They have the launcher's arguments: `ps`, and the kernel's log of a process that it killed, would not tell them apart."""
    pid = rank.start().pid
    for number, name in ((pid, "rank 3"), (rank.guard, "rank 3's guard")):
        until(lambda number=number, name=name: Path(f"/proc/{number}/comm").read_text() == f"{name}\n")
    os.kill(rank.guard, signal.SIGTERM)
    rank.ended()


def test_a_port_of_the_launcher_is_free_when_the_launcher_has_ended(rank: Rank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        rank.start()
        assert rank.document
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    os.kill(rank.guard, signal.SIGTERM)
    rank.ended()


def test_what_the_launcher_does_when_asked_to_end_its_forks_do_not(rank: Rank) -> None:
    def launcher() -> int:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(77))
        return guard.main()

    rank.start(instead=launcher)
    assert rank.document
    os.kill(rank.guard, signal.SIGTERM)
    assert rank.ended() == (-15, -15, True)


def test_a_rank_that_is_a_fork_sees_the_gpus_that_its_launcher_was_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA works in no fork of a process that used it, and torchrun's own code asks for GPUs."""
    reported = (
        "import os\nfrom agent.benchmarks import rendezvous\nrendezvous.hide_gpus_until_fork()\n"
        "names = ('CUDA_VISIBLE_DEVICES', 'PYTORCH_NVML_BASED_CUDA_CHECK')\n"
        "print([os.environ.get(name) for name in names], flush=True)\n"
        "os.fork() or (print([os.environ.get(name) for name in names], flush=True), os._exit(0))\nos.wait()"
    )
    for shown in ("4,5", None):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown) if shown else monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        output = subprocess.run([sys.executable, "-c", reported], capture_output=True, text=True, check=True).stdout
        assert output.splitlines() == ["['', '1']", str([shown, None])]


def test_a_guard_that_is_killed_before_it_has_a_rank_is_missed_all_the_same(rank: Rank) -> None:
    def launcher() -> int:
        os.fork = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
        return guard.main()

    assert rank.start(instead=launcher).ended() == (-9, None, False)


def test_rank_sends_heartbeats_before_its_program_starts(rank: Rank) -> None:
    """Importing torch takes seconds, in which it must not look dead."""
    rank.start("signal.pause()")
    until(lambda: rank.state.alive_s is not None)
    assert rank.beats.states()[0].alive_s is None, "as the rank that it is"
    os.kill(rank.pid, signal.SIGKILL)
    rank.ended()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: str(number.name))
def test_launchers_signal_reaches_the_rank_and_is_reported(rank: Rank, number: signal.Signals) -> None:
    what = f"signal.signal({int(number)}, signal.SIG_DFL); open(sys.argv[1] + '.ready', 'w'); signal.pause()"
    rank.start(what)
    until(Path(f"{rank._told}.ready").exists)
    os.kill(rank.guard, number)
    assert rank.ended() == (-number, -number, True)


def test_a_stopped_rank_takes_the_request_too(rank: Rank) -> None:
    os.kill(rank.start().pid, signal.SIGSTOP)
    os.kill(rank.guard, signal.SIGTERM)
    assert rank.ended() == (-15, -15, True)


def test_a_rank_that_ends_in_its_own_way_after_the_request_is_waited_for(rank: Rank) -> None:
    leave = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    # In the kernel's own pause() it would stay for good if the signal came a moment before that began, and so it would if it came
    # while a file that nobody had closed warns of that.
    rank.start(f"import time; {leave}; open(sys.argv[1] + '.ready', 'w').close()\nwhile True: time.sleep(0.01)")
    until(Path(f"{rank._told}.ready").exists)
    os.kill(rank.guard, signal.SIGTERM)
    assert rank.ended() == (5, 5, True)


def child_of(what: str) -> str:
    """A program whose child ignores SIGTERM and tells its own process id, before it goes on with `what`."""
    return (
        "child = os.fork()\n"
        "if not child:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    open(sys.argv[1] + '.child', 'w').write(str(os.getpid()))\n    signal.pause()\n"
        "while not (os.path.exists(sys.argv[1] + '.child') and open(sys.argv[1] + '.child').read()): pass\n" + what
    )


def gone(pid: int) -> None:
    until(lambda: read_process(pid) is None)


def test_what_a_rank_started_ends_with_it(rank: Rank) -> None:
    assert rank.start(child_of("os._exit(4)")).ended() == (4, 4, False)
    gone(int(Path(f"{rank._told}.child").read_text()))


def test_a_rank_ends_with_its_supervisor(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = forked(lambda: signal.pause())
    monkeypatch.setenv(SUPERVISOR, process_identity(supervisor))
    rank.start(child_of("signal.pause()"))
    until(lambda: Path(f"{rank._told}.child").exists() and Path(f"{rank._told}.child").read_text())
    select.select([], [], [], 3 * guard.POLL_S)
    assert read_process(rank.pid), "it goes on as long as the supervisor does"
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    assert rank.ended() == (-9, -9, True)
    gone(int(Path(f"{rank._told}.child").read_text()))


def test_a_rank_in_a_group_of_its_own_ends_with_its_supervisor_too(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = forked(lambda: signal.pause())
    monkeypatch.setenv(SUPERVISOR, process_identity(supervisor))
    rank.start("os.setpgid(0, os.getppid()) if os.getpgid(os.getppid()) == os.getppid() else None; signal.pause()")
    until(lambda: read_process(rank.pid))
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    assert rank.ended() == (-9, -9, True)


def test_a_rank_ends_with_its_launcher_and_at_once(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher is a process between this one and the guard."""
    monkeypatch.setattr(guard, "POLL_S", 10 * TIMEOUT_S)

    def launcher() -> int:
        if os.fork():
            signal.pause()
        return guard.main()

    pid = rank.start(instead=launcher).pid
    os.kill(rank.guard, signal.SIGKILL)
    code_of(rank.guard)
    rank.guard = 0
    gone(pid)
    until(lambda: rank.state.ended_s is not None)
    assert (rank.state.exit_code, rank.state.terminated_by_launcher) == (-9, True)


def test_a_rank_ends_with_its_guard_and_its_end_is_inferred(rank: Rank) -> None:
    pid = rank.start().pid
    until(lambda: rank.state.alive_s is not None)
    os.kill(rank.guard, signal.SIGKILL)
    os.waitpid(rank.guard, 0)
    rank.guard = 0
    gone(pid)
    assert (rank.state.ended_s is not None, rank.state.exit_code) == (True, None)


def test_guard_works_without_a_supervisor(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT_DIRECTORY)
    monkeypatch.delenv("RANK")
    rank.start("sys.exit(2)")
    assert code_of(rank.guard) == 2
    rank.guard = 0
    assert not rank.beats.read()


def test_rank_without_a_number_is_reported_as_the_first(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    rank.start("sys.exit(2)")
    assert code_of(rank.guard) == 2
    rank.guard = 0
    rank.beats.read()
    assert rank.beats.states()[0].exit_code == 2


# ---- a launcher under its guard ----


def test_a_launcher_ends_with_its_supervisor(tmp_path: Path) -> None:
    def supervisor() -> int:
        mine = os.getpid()
        launcher = os.fork()
        if not launcher:
            sys.argv = ["guard", "--supervisor", str(mine), "sleep", "600"]
            return guard.main()
        (tmp_path / "part").write_text(str(launcher))
        (tmp_path / "part").rename(tmp_path / "launcher")
        signal.pause()
        return 0

    started = forked(supervisor)
    until((tmp_path / "launcher").exists)
    launcher = int((tmp_path / "launcher").read_text())
    until(lambda: Path(f"/proc/{launcher}/comm").read_text() == "sleep\n")
    os.kill(started, signal.SIGKILL)
    code_of(started)
    gone(launcher)


def test_a_launcher_whose_supervisor_had_ended_before_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["guard", "--supervisor", "1", "true"])
    if os.getpid() == 1:
        pytest.skip("this is process 1")
    assert code_of(forked(guard.main)) == guard.ORPHANED
    monkeypatch.setattr(sys, "argv", ["guard", "--supervisor", str(os.getpid()), "sh", "-c", "exit 6"])
    assert code_of(forked(guard.main)) == 6
