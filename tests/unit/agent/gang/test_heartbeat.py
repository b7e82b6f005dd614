"""Ranks send heartbeats. No rank outlives its guard or its supervisor, and no launcher outlives its supervisor.

The guard of a rank is its parent process, which reports how the rank ended. The launcher (torchrun) starts the guards. The
supervisor starts the launcher and receives the messages of ranks and guards.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, SUPERVISOR, RankHeartbeat
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.monitor import GangMonitor
from agent.gang.processes import process_identity, read_process
from agent.gang.rank_state import RankState


def test_rank_reports_its_progress(tmp_path: Path) -> None:
    work = tmp_path / ("d" * 120)  # longer than the maximum length of the path of a Unix socket
    work.mkdir()
    receiver = HeartbeatReceiver(work, {0: "gpu=0", 1: "gpu=1"})
    heartbeat = RankHeartbeat(1, work)
    heartbeat.phase, heartbeat.grouped = "training", True
    with contextlib.suppress(RuntimeError), heartbeat.in_collective():
        heartbeat.send()
        receiver.read()
        inside = receiver.states()[1]
        raise RuntimeError
    heartbeat.record_failure("RuntimeError: Timed out waiting 1000ms for recv operation to complete")
    receiver.read()
    rank_0, rank_1 = receiver.states()
    receiver.close()
    assert rank_0.alive_s is None
    assert (inside.phase, inside.sequence, inside.grouped, inside.failure) == ("training", 1, True, "")
    assert inside.waiting_s is not None
    assert inside.waiting_s < 30
    assert rank_1.failure == "timeout"
    assert rank_1.waiting_s is not None, "a rank that failed in a collective must still count as waiting"


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        ("TimeoutError: the device did not end within 60 s", "timeout"),
        ("DistBackendError: wait timeout after 600000ms", "timeout"),
        ("RuntimeError: [gloo/pair.cc] Connection closed by peer [10.0.0.1]:2", "error"),
        ("OutOfMemoryError: CUDA out of memory", "error"),
    ],
)
def test_kind_of_failure_is_derived_from_its_text(tmp_path: Path, problem: str, kind: str) -> None:
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    RankHeartbeat(0, tmp_path).record_failure(problem)
    receiver.read()
    assert receiver.states()[0].failure == kind
    receiver.close()


@pytest.mark.parametrize(
    ("error", "joined", "recorded"),
    [
        (RuntimeError("Unable to find interface bond0"), False, "RuntimeError: Unable to find interface bond0"),
        (ImportError("libnccl.so.2"), False, "ImportError: libnccl.so.2"),
        (OSError(98, "Address already in use"), False, "OSError: [Errno 98] Address already in use"),
        (RuntimeError("CUDA error: an illegal memory access"), True, ""),
        (OSError(28, "No space left on device"), True, "OSError: [Errno 28] No space left on device"),
        (PermissionError(13, "Permission denied"), True, "PermissionError: [Errno 13] Permission denied"),
        (OSError(5, "Input/output error"), True, ""),
    ],
)
def test_exception_is_recorded_if_a_device_cannot_be_its_cause(
    tmp_path: Path, error: Exception, joined: bool, recorded: str
) -> None:
    """`joined`: the ranks have exchanged data, so a device or a link may be the cause.

    A later exception does not replace a recorded one.
    """
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    heartbeat = RankHeartbeat(0, tmp_path)
    receiver.read()
    heartbeat.joined = joined
    heartbeat.record_exception(error)
    assert receiver.read() is (recorded != "")
    heartbeat.record_exception(RuntimeError("a consequence"))
    receiver.read()
    assert receiver.states()[0].exception == (recorded or ("" if joined else "RuntimeError: a consequence"))
    receiver.close()


def test_closed_receiver_leaves_no_file_and_its_rank_continues(tmp_path: Path) -> None:
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    heartbeat = RankHeartbeat(0, tmp_path)
    receiver.close()
    assert list(tmp_path.iterdir()) == []
    heartbeat.send()
    receiver.close()


def test_invalid_messages_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        monkeypatch.chdir(tmp_path)
        channel.connect("heartbeats")
        for line in (b"", b"\xff", b"[]", b"3", b'{"kind":"heartbeat","rank":7}', b'{"kind":"heartbeat","rank":[]}'):
            channel.send(line)
    assert receiver.read() is False
    assert receiver.states()[0].alive_s is None
    receiver.close()


PROGRAM = """
import os, pathlib, signal, sys, time
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
{statements}
"""


class Guarded:
    """A guard and its rank, started as by a launcher.

    `statements`: Python code that the rank runs. `supervisor`: identity of the supervisor (`process_identity`); empty: the guard
    does not check whether its supervisor runs.
    """

    def __init__(self, tmp_path: Path, statements: str, supervisor: str = "") -> None:
        (tmp_path / "program.py").write_text(PROGRAM.format(statements=statements))
        self.receiver = HeartbeatReceiver(tmp_path, {0: "cpu=0"})
        self._pid_path = tmp_path / "pid"
        self.guard = subprocess.Popen(
            [sys.executable, "-m", "agent.launch.guard", "program", str(self._pid_path)],
            env={
                **os.environ,
                "PYTHONPATH": str(tmp_path),
                "RANK": "0",
                HEARTBEAT_DIRECTORY: str(tmp_path),
                SUPERVISOR: supervisor,
            },
            start_new_session=True,
        )
        self.wait_until(lambda: self._pid_path.exists() and bool(self._pid_path.read_text()))
        self.wait_until(lambda: self.state.alive_s is not None)

    @property
    def pid(self) -> int:
        return int(self._pid_path.read_text())

    @property
    def state(self) -> RankState:
        self.receiver.read()
        return self.receiver.states()[0]

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
        end = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < end, f"the condition is not true after {timeout_s:g} s"
            time.sleep(0.01)

    def end(self) -> None:
        self.guard.kill()
        self.guard.wait()
        self.receiver.close()


def test_termination_by_the_launcher_is_marked(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "time.sleep(60)")
    os.killpg(guarded.guard.pid, signal.SIGTERM)  # as a launcher does when another rank has failed
    assert guarded.guard.wait(timeout=10) == -15
    state = guarded.state
    guarded.end()
    assert (state.exit_code, state.terminated_by_launcher) == (-15, True)


def test_stopped_rank_can_be_terminated(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "time.sleep(60)")
    os.kill(guarded.pid, signal.SIGSTOP)
    guarded.wait_until(lambda: guarded.state.stopped)
    assert not guarded.state.busy
    guarded.guard.terminate()
    assert guarded.guard.wait(timeout=10) == -15
    guarded.end()


def test_rank_that_holds_the_gil_is_busy_and_not_stopped(tmp_path: Path) -> None:
    guarded = Guarded(tmp_path, "sys.setswitchinterval(1000); time.sleep(0.6)\nwhile True: pass")
    guarded.wait_until(lambda: guarded.state.silent_s > 2.5)
    state = guarded.state
    guarded.end()
    assert (state.busy, state.stopped) == (True, False)


@pytest.mark.parametrize("ended_first", ["guard", "supervisor", "supervisor of the launcher"])
def test_rank_and_launcher_do_not_outlive_their_supervisor(tmp_path: Path, ended_first: str) -> None:
    """A rank does not outlive its guard either.

    `ended_first`: the process that the test kills. In the first two cases the test itself starts the guard, without a launcher.
    In the last case a supervisor starts a launcher, and the launcher starts the guard.
    """
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as supervisor:
        if ended_first == "supervisor of the launcher":
            pids = kill_supervisor_of_launcher(tmp_path)
        else:
            guarded = Guarded(tmp_path, "time.sleep(60)", process_identity(supervisor.pid))
            pids = [guarded.pid]
            (guarded.guard if ended_first == "guard" else supervisor).kill()
        end = time.monotonic() + 5
        while remaining := [pid for pid in pids if read_process(pid)]:
            assert time.monotonic() < end, f"still running after 5 s: {remaining}"
            time.sleep(0.02)
        if ended_first != "supervisor of the launcher":
            guarded.wait_until(lambda: guarded.state.ended_s is not None)
            guarded.end()
        supervisor.kill()


def kill_supervisor_of_launcher(tmp_path: Path) -> list[int]:
    """Start a supervisor, which starts a launcher, which starts a guard with its rank. Kill the supervisor.

    Return the PIDs of the launcher and the rank.
    """
    (tmp_path / "program.py").write_text(PROGRAM.format(statements="time.sleep(60)"))
    launcher = (
        "import os, pathlib, subprocess, sys\n"
        f"pathlib.Path({str(tmp_path / 'launcher')!r}).write_text(str(os.getpid()))\n"
        f"subprocess.run([sys.executable, '-m', 'agent.launch.guard', 'program', {str(tmp_path / 'pid')!r}])"
    )
    supervisor = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'agent.launch.guard', '--supervisor', str(os.getpid()),"
        f" sys.executable, '-c', {launcher!r}])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", supervisor], env={**os.environ, "PYTHONPATH": str(tmp_path)}
    ) as process:
        end = time.monotonic() + 10
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < end, "the rank has not started after 10 s"
            time.sleep(0.02)
        process.kill()
    return [int((tmp_path / name).read_text()) for name in ("launcher", "pid")]


def test_pause_of_the_supervisor_does_not_count_as_silence_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded(tmp_path, "time.sleep(60)")
    monitor = GangMonitor("h1", guarded.receiver, None, 60.0)
    assert monitor.poll(0.1) is None
    os.kill(guarded.pid, signal.SIGSTOP)
    time.sleep(0.5)
    real_clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + 60)  # as if the monitor had been stopped for 60 s
    assert monitor.poll(0.1) is None
    assert guarded.state.silent_s < 5
    monkeypatch.setattr(time, "monotonic", real_clock)
    guarded.end()
