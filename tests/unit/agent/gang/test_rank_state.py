"""The state of a rank from its heartbeats, its guard's messages and /proc, with a controlled clock."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.gang import processes
from agent.gang.culprit import UNSURE_S
from agent.gang.heartbeat import HEARTBEAT_DIRECTORY, DatagramSender, RankHeartbeat, rank_heartbeat
from agent.gang.heartbeat_receiver import HeartbeatReceiver, recorded_exit_code
from agent.gang.processes import is_alive, process_identity, read_process

TICKS = os.sysconf("SC_CLK_TCK")


class Clock:
    """A controlled `time.monotonic()`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[HeartbeatReceiver]:
    made = HeartbeatReceiver(tmp_path, {1: "gpu=1", 0: "gpu=0"})
    yield made
    made.close()


class Proc:
    """A fake /proc."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, pid: int, state: str = "S", *, seconds: float = 0.0, parent: int = 1, born: int = 7) -> None:
        used = int(seconds * TICKS)
        rest = f"{state} {parent} 0 0 0 0 0 0 0 0 0 {used - used // 2} {used // 2} 0 0 20 0 1 0 {born} 0"
        location = self._root / str(pid)
        location.mkdir(parents=True, exist_ok=True)
        (location / "stat").write_text(f"{pid} (a ) b (c) {rest}\n")

    def path(self, name: str) -> Path:
        return self._root / name.removeprefix("/proc/") if name.startswith("/proc/") else Path(name)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    made = Proc(tmp_path / "proc")
    monkeypatch.setattr(processes, "Path", made.path)
    return made


def say(directory: Path, kind: str = "heartbeat", *, rank: int = 0, **over: Any) -> None:
    """Send a message as a rank or its guard."""
    beat = (
        {"pid": 4711, "phase": "gemm", "sequence": 3, "progress_at": 0.0, "failure": ""} if kind == "heartbeat" else {}
    )
    location = os.open(directory, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(f"/proc/self/fd/{location}/heartbeats")
        channel.send(json.dumps({"kind": kind, "rank": rank, "at": time.monotonic(), **beat, **over}).encode())
    os.close(location)


def begun(directory: Path, receiver: HeartbeatReceiver) -> RankHeartbeat:
    """Return a rank that has sent its first heartbeat."""
    made = RankHeartbeat(0, directory)
    assert select.select([receiver.socket], [], [], 5)[0]
    return made


# ---- the rank's side ----


def test_process_sends_heartbeats_with_its_rank(
    receiver: HeartbeatReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_DIRECTORY, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    rank_heartbeat.cache_clear()
    try:
        assert rank_heartbeat() is rank_heartbeat()
    finally:
        rank_heartbeat.cache_clear()
    receiver.socket.setblocking(True)
    receiver.socket.settimeout(5)
    said = json.loads(receiver.socket.recv(4096))
    assert (said["kind"], said["rank"], said["pid"], said["phase"]) == ("heartbeat", 1, os.getpid(), "start")
    assert (said["grouped"], said["sequence"], said["waiting_since"], said["failure"]) == (False, 0, None, "")


def test_manually_started_process_sends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (HEARTBEAT_DIRECTORY, "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    rank_heartbeat.cache_clear()
    try:
        alone = rank_heartbeat()
    finally:
        rank_heartbeat.cache_clear()
    with alone.in_collective():
        alone.record_progress()
    alone.record_failure("an error")
    sender = DatagramSender(0, tmp_path)
    assert not sender.connected, "no receiver"
    sender._socket.close()


def test_heartbeat_thread_ends_with_its_receiver(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    begun(tmp_path, receiver)
    (thread,) = (each for each in threading.enumerate() if each.name == "heartbeat" and each not in before)
    receiver.close()
    thread.join(10)
    assert not thread.is_alive()


def test_rank_defaults_to_zero(receiver: HeartbeatReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEARTBEAT_DIRECTORY, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    rank_heartbeat.cache_clear()
    try:
        rank_heartbeat().send()
    finally:
        rank_heartbeat.cache_clear()
    receiver.read()
    assert [state.alive_s is not None for state in receiver.states()] == [True, False]


def test_ages_of_progress_and_waiting(receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock) -> None:
    rank = begun(tmp_path, receiver)

    def values(after_s: float) -> tuple[float, float | None, int]:
        clock.now += after_s
        rank.send()
        receiver.read()
        state = receiver.states()[0]
        return state.progress_s, state.waiting_s, state.sequence

    assert values(5.0) == (5.0, None, 0)
    rank.record_progress()
    assert values(3.0) == (3.0, None, 0)
    with rank.in_collective():
        assert values(2.0) == (2.0, 2.0, 1)
    assert values(4.0) == (4.0, None, 1), "the end of a collective is progress"
    with rank.in_collective():
        pass
    assert values(1.0) == (1.0, None, 2)


def test_first_failure_of_a_rank_is_kept(receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock) -> None:
    rank = begun(tmp_path, receiver)
    rank.send()
    assert receiver.read()
    rank.record_failure("watchdog: timed-out")
    assert receiver.read(), "at once, not with the next heartbeat"
    clock.now += 6.0
    rank.record_failure("OutOfMemoryError")
    rank.send()
    assert not receiver.read()
    assert (receiver.states()[0].failure, receiver.states()[0].failure_age_s) == ("timeout", 6.0)


def test_long_phase_is_shortened(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    rank = begun(tmp_path, receiver)
    rank.phase = "x" * 10_000
    rank.send()
    receiver.read()
    assert len(receiver.states()[0].phase) == 300


def test_rank_continues_without_a_receiver(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    rank = begun(tmp_path, receiver)
    for _ in range(2000):  # more than the kernel keeps
        rank.send()
    assert receiver.read()
    receiver.close()
    rank.send()


# ---- the supervisor's side ----


def test_new_receiver_takes_over_and_leaks_nothing(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    def kept_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = kept_open()
    again = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    say(tmp_path)
    assert (again.read(), receiver.read()) == (True, False)
    again.close()
    assert kept_open() == before


def test_states_are_in_rank_order_with_defaults_before_the_first_heartbeat(
    receiver: HeartbeatReceiver,
) -> None:
    first, second = receiver.states()
    assert [(state.rank, state.scope) for state in (first, second)] == [(0, "gpu=0"), (1, "gpu=1")]
    assert (first.phase, first.sequence, first.grouped, first.waiting_s, first.progress_s) == ("", 0, False, None, 0.0)
    assert (first.alive_s, first.silent_s, first.stopped, first.busy) == (None, 0.0, False, False)
    assert (first.failure, first.failure_age_s) == ("", None)
    assert (first.ended_s, first.exit_code, first.terminated_by_launcher) == (None, None, False)


def test_heartbeat_content_is_in_the_state(receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock) -> None:
    say(tmp_path, grouped=True, waiting_since=990.0, progress_at=980.1234, failure="error", failed_at=970.0)
    assert receiver.read()
    clock.now += 1.0
    state = receiver.states()[0]
    assert (state.phase, state.sequence, state.grouped, state.failure) == ("gemm", 3, True, "error")
    assert (state.waiting_s, state.progress_s, state.failure_age_s) == (11.0, 20.877, 31.0)
    assert (state.alive_s, state.silent_s) == (1.0, 1.0)


def test_age_counts_from_the_first_heartbeat_and_silence_from_the_last(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock
) -> None:
    for after_s in (0.0, 4.0):
        clock.now += after_s
        say(tmp_path)
        receiver.read()
    clock.now += 1.0
    state = receiver.states()[0]
    assert (state.alive_s, state.silent_s) == (5.0, 1.0)
    receiver.compensate_pause(0.5)
    assert receiver.states()[0].silent_s == 0.5


def test_ages_are_never_negative(receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock) -> None:
    say(tmp_path, progress_at=clock.now + 1.0)
    receiver.read()
    assert receiver.states()[0].progress_s == 0.0


def test_only_first_heartbeat_failure_and_end_are_news(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    def news(*arguments: Any, **over: Any) -> bool:
        say(tmp_path, *arguments, **over)
        return receiver.read()

    assert not receiver.read()
    assert not news("guard", pid=os.getpid())
    assert news()
    assert not news(sequence=4)
    assert news(failure="error")
    assert not news(failure="error")
    assert news(rank=1, failure="")
    assert not news("something else")
    assert news("end", code=1, terminated_by_launcher=False)
    assert not news("end", code=7, terminated_by_launcher=True), "a process ends once"
    assert (receiver.states()[0].exit_code, receiver.states()[0].terminated_by_launcher) == (1, False)
    assert receiver.states()[1].ended_s is None


def test_failure_in_the_first_heartbeat_is_news(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    say(tmp_path, "guard", pid=os.getpid())
    say(tmp_path, failure="error")
    say(tmp_path, failure="error")
    assert receiver.read()


def test_end_has_the_age_from_the_guard_and_is_never_in_the_future(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock
) -> None:
    clock.now = 997.0
    say(tmp_path, "end", code=-9, terminated_by_launcher=False)
    clock.now = 1010.0
    say(tmp_path, "end", rank=1, code=0, terminated_by_launcher=True)
    clock.now = 1000.0
    receiver.read()
    one, two = receiver.states()
    assert (one.ended_s, one.exit_code, one.terminated_by_launcher) == (3.0, -9, False)
    assert (two.ended_s, two.exit_code, two.terminated_by_launcher) == (0.0, 0, True)


def test_lost_guard_means_an_end_until_its_message_arrives(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc
) -> None:
    proc.put(50)
    say(tmp_path, "guard", pid=50)
    say(tmp_path)
    receiver.read()
    assert receiver.states()[0].ended_s is None
    proc.put(50, "Z")
    (tmp_path / "rank0.state.json").write_text('{"phase": "end", "exit_code": 3}')
    assert (receiver.states()[0].ended_s, receiver.states()[0].exit_code) == (0.0, 3)
    clock.now += 2.0
    assert receiver.states()[0].ended_s == 2.0, "noted once"
    say(tmp_path, "end", code=-9, terminated_by_launcher=True)
    assert receiver.read()
    assert (
        receiver.states()[0].ended_s,
        receiver.states()[0].exit_code,
        receiver.states()[0].terminated_by_launcher,
    ) == (0.0, -9, True)
    say(tmp_path, "end", code=0, terminated_by_launcher=False)
    assert not receiver.read()
    assert receiver.states()[0].exit_code == -9


# ---- silent ranks ----


def silent(receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, seconds: float = UNSURE_S + 0.1) -> None:
    say(tmp_path)
    receiver.read()
    clock.now += seconds


@pytest.mark.parametrize(
    ("state", "stopped", "busy"), [("T", True, False), ("t", True, False), ("D", False, True), ("Z", False, False)]
)
def test_silent_rank_is_stopped_busy_in_the_kernel_or_gone(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc, state: str, stopped: bool, busy: bool
) -> None:
    proc.put(4711, state)
    silent(receiver, tmp_path, clock)
    for _ in range(2):
        result = receiver.states()[0]
        assert (result.stopped, result.busy) == (stopped, busy)
        clock.now += 1.0


def test_process_is_checked_only_while_its_rank_is_silent(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc
) -> None:
    proc.put(4711, "T")
    silent(receiver, tmp_path, clock, UNSURE_S - 0.1)
    assert not receiver.states()[0].stopped
    clock.now += 1.0
    assert receiver.states()[0].stopped
    say(tmp_path, "end", code=0, terminated_by_launcher=False)
    receiver.read()
    assert not receiver.states()[0].stopped


@pytest.mark.parametrize(("share", "busy"), [(1.0, True), (0.06, True), (0.04, False), (0.0, False)])
def test_silent_rank_is_busy_if_it_uses_cpu_time(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc, share: float, busy: bool
) -> None:
    proc.put(4711, "R", seconds=1000.0)
    silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy, "no CPU time to compare with yet"
    assert receiver.states()[0].busy, "nor at the same moment"
    for seconds in (0.5, 10.0, 50.0):
        clock.now += seconds
        proc.put(4711, "R", seconds=1000.0 + share * (clock.now - 1000.0 - UNSURE_S - 0.1))
        assert (receiver.states()[0].busy, receiver.states()[0].stopped) == (busy, False)


def test_cpu_reference_is_reset_by_a_heartbeat(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc
) -> None:
    proc.put(4711, "R", seconds=1.0)
    silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy
    proc.put(4711, "R", seconds=9.0)
    silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy
    clock.now += 5.0
    assert not receiver.states()[0].busy, "CPU time before the last heartbeat does not count"


# ---- processes ----


def test_process_is_read_with_any_name(proc: Proc) -> None:
    proc.put(12, "R", seconds=2.5, parent=5, born=99)
    result = read_process(12)
    assert result is not None
    assert (result.state, result.parent, result.start_time, result.cpu_s) == ("R", 5, "99", 2.5)
    for state in ("Z", "X"):
        proc.put(12, state)
        assert read_process(12) is None
    assert read_process(13) is None
    (proc.path("/proc/12/stat")).write_bytes(b"12 (\xff) R " + b"5 " * 30)
    assert read_process(12), "a name may be any bytes"


def test_identity_is_number_and_start_time(proc: Proc) -> None:
    proc.put(12, born=99)
    named = process_identity(12)
    assert (named, process_identity(13)) == ("12 99", "")
    assert is_alive(named)
    proc.put(12, born=100)
    assert not is_alive(named), "another process has its number now"
    assert not is_alive("13 99")
    assert is_alive(""), "none was given"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"exit_code": 3}', 3),
        ('{"exit_code": null}', None),
        ('{"exit_code": "3"}', None),
        ("{}", None),
        ("[]", None),
        ('{"exit', None),
        (None, None),
    ],
)
def test_recorded_exit_code(tmp_path: Path, text: str | None, code: int | None) -> None:
    if text is not None:
        (tmp_path / "rank7.state.json").write_text(text)
    assert recorded_exit_code(tmp_path, 7) == code
