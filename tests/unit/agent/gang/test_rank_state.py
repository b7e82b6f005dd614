"""The heartbeats of a rank, and the state that its supervisor derives from heartbeats, messages of the guard and /proc.

The supervisor is the process that runs a launch on a host. The guard is the parent process of a rank.
"""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.gang import processes
from agent.gang.culprit import UNSURE_S
from agent.gang.heartbeat import (
    HEARTBEAT_DIRECTORY,
    MAX_EXCEPTION_LENGTH,
    MAX_PHASE_LENGTH,
    DatagramSender,
    RankHeartbeat,
    rank_heartbeat,
)
from agent.gang.heartbeat_receiver import HeartbeatReceiver, recorded_exit_code
from agent.gang.processes import is_alive, process_identity, read_process
from agent.gang.rank_state import parse_rank_state
from tests.gangs import FakeClock, FakeProc, send_to_receiver


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[HeartbeatReceiver]:
    receiver = HeartbeatReceiver(tmp_path, {1: "gpu=1", 0: "gpu=0"})
    yield receiver
    receiver.close()


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProc:
    fake = FakeProc(tmp_path / "proc")
    monkeypatch.setattr(processes, "Path", fake.path)
    return fake


def start_heartbeat(directory: Path, receiver: HeartbeatReceiver) -> RankHeartbeat:
    """Start the heartbeat of rank 0. Return it as soon as its first message has arrived, without reading that message."""
    heartbeat = RankHeartbeat(0, directory)
    assert select.select([receiver.socket], [], [], 5)[0]
    return heartbeat


@pytest.mark.parametrize("document", [[], "x", None, {}, {"rank": "0", "scope": "gpu=0"}])
def test_document_that_is_no_rank_state_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="not a rank state"):
        parse_rank_state(document)


# ---- what a rank sends ----


def test_message_with_the_longest_phase_and_exception_is_received(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    heartbeat = start_heartbeat(tmp_path, receiver)
    heartbeat.phase = "\U0001f600" * MAX_PHASE_LENGTH
    heartbeat.record_exception(OSError("\U0001f600" * MAX_EXCEPTION_LENGTH))
    assert receiver.read()
    state = receiver.states()[0]
    assert (len(state.phase), len(state.exception)) == (MAX_PHASE_LENGTH, MAX_EXCEPTION_LENGTH)


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
    message = json.loads(receiver.socket.recv(4096))
    assert (message["kind"], message["rank"], message["pid"], message["phase"]) == (
        "heartbeat",
        1,
        os.getpid(),
        "start",
    )
    assert (message["grouped"], message["sequence"], message["waiting_since"], message["failure"]) == (
        False,
        0,
        None,
        "",
    )


def test_manually_started_process_sends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (HEARTBEAT_DIRECTORY, "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    rank_heartbeat.cache_clear()
    try:
        heartbeat = rank_heartbeat()
    finally:
        rank_heartbeat.cache_clear()
    with heartbeat.in_collective():
        heartbeat.record_progress()
    heartbeat.record_failure("an error")
    sender = DatagramSender(0, tmp_path)
    assert not sender.connected, "a sender without a receiver must not be connected"
    sender._socket.close()


def test_heartbeat_thread_ends_with_its_receiver(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    start_heartbeat(tmp_path, receiver)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "heartbeat" and thread not in before)
    receiver.close()
    thread.join(10)
    assert not thread.is_alive()


def test_rank_number_defaults_to_zero(
    receiver: HeartbeatReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HEARTBEAT_DIRECTORY, str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    rank_heartbeat.cache_clear()
    try:
        rank_heartbeat().send()
    finally:
        rank_heartbeat.cache_clear()
    receiver.read()
    assert [state.alive_s is not None for state in receiver.states()] == [True, False]


def test_ages_of_progress_and_waiting_follow_the_clock(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock
) -> None:
    rank = start_heartbeat(tmp_path, receiver)

    def state_after(after_s: float) -> tuple[float, float | None, int]:
        clock.now += after_s
        rank.send()
        receiver.read()
        state = receiver.states()[0]
        return state.progress_s, state.waiting_s, state.sequence

    assert state_after(5.0) == (5.0, None, 0)
    rank.record_progress()
    assert state_after(3.0) == (3.0, None, 0)
    with rank.in_collective():
        assert state_after(2.0) == (2.0, 2.0, 1)
    assert state_after(4.0) == (4.0, None, 1), "the end of a collective must count as progress"
    with rank.in_collective():
        pass
    assert state_after(1.0) == (1.0, None, 2)


def test_first_failure_of_a_rank_is_kept(receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock) -> None:
    rank = start_heartbeat(tmp_path, receiver)
    rank.send()
    assert receiver.read()
    rank.record_failure("watchdog: timed-out")
    assert receiver.read(), "a failure must be sent at once, not with the next heartbeat"
    clock.now += 6.0
    rank.record_failure("OutOfMemoryError")
    rank.send()
    assert not receiver.read()
    assert (receiver.states()[0].failure, receiver.states()[0].failure_age_s) == ("timeout", 6.0)


def test_long_phase_is_shortened(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    rank = start_heartbeat(tmp_path, receiver)
    rank.phase = "x" * 10_000
    rank.send()
    receiver.read()
    assert len(receiver.states()[0].phase) == 300


def test_rank_continues_with_a_full_queue_and_without_a_receiver(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    rank = start_heartbeat(tmp_path, receiver)
    for _ in range(2000):  # more than the socket's queue holds
        rank.send()
    assert receiver.read()
    receiver.close()
    rank.send()


# ---- what the supervisor derives from the messages ----


def test_new_receiver_replaces_the_old_one_and_leaks_no_file_descriptor(
    receiver: HeartbeatReceiver, tmp_path: Path
) -> None:
    def count_open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count_open_files()
    second = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    send_to_receiver(tmp_path)
    assert (second.read(), receiver.read()) == (True, False)
    second.close()
    assert count_open_files() == before


def test_states_are_in_rank_order_with_defaults_before_the_first_heartbeat(
    receiver: HeartbeatReceiver,
) -> None:
    first, second = receiver.states()
    assert [(state.rank, state.scope) for state in (first, second)] == [(0, "gpu=0"), (1, "gpu=1")]
    assert (first.phase, first.sequence, first.grouped, first.waiting_s, first.progress_s) == ("", 0, False, None, 0.0)
    assert (first.alive_s, first.silent_s, first.stopped, first.busy) == (None, 0.0, False, False)
    assert (first.failure, first.failure_age_s) == ("", None)
    assert (first.ended_s, first.exit_code, first.terminated_by_launcher) == (None, None, False)


def test_heartbeat_content_is_in_the_state(receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock) -> None:
    send_to_receiver(
        tmp_path, grouped=True, waiting_since=990.0, progress_at=980.1234, failure="error", failed_at=970.0
    )
    assert receiver.read()
    clock.now += 1.0
    state = receiver.states()[0]
    assert (state.phase, state.sequence, state.grouped, state.failure) == ("gemm", 3, True, "error")
    assert (state.waiting_s, state.progress_s, state.failure_age_s) == (11.0, 20.877, 31.0)
    assert (state.alive_s, state.silent_s) == (1.0, 1.0)


def test_rank_is_alive_since_its_first_heartbeat_and_silent_since_its_last(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock
) -> None:
    for after_s in (0.0, 4.0):
        clock.now += after_s
        send_to_receiver(tmp_path)
        receiver.read()
    clock.now += 1.0
    state = receiver.states()[0]
    assert (state.alive_s, state.silent_s) == (5.0, 1.0)
    receiver.compensate_pause(0.5)
    assert receiver.states()[0].silent_s == 0.5


def test_ages_are_never_negative(receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock) -> None:
    send_to_receiver(tmp_path, progress_at=clock.now + 1.0)
    receiver.read()
    assert receiver.states()[0].progress_s == 0.0


def test_read_reports_once_that_a_rank_has_started_or_failed_or_ended(
    receiver: HeartbeatReceiver, tmp_path: Path
) -> None:
    def is_news(*arguments: Any, **fields: Any) -> bool:
        send_to_receiver(tmp_path, *arguments, **fields)
        return receiver.read()

    assert not receiver.read()
    assert not is_news("guard", pid=os.getpid())
    assert is_news()
    assert not is_news(sequence=4)
    assert is_news(failure="error")
    assert not is_news(failure="error")
    assert is_news(rank=1, failure="")
    assert not is_news("something else")
    assert is_news("end", code=1, terminated_by_launcher=False)
    assert not is_news("end", code=7, terminated_by_launcher=True), 'a second "end" message must be ignored'
    assert (receiver.states()[0].exit_code, receiver.states()[0].terminated_by_launcher) == (1, False)
    assert receiver.states()[1].ended_s is None


def test_read_reports_news_if_the_first_heartbeat_has_a_failure(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    send_to_receiver(tmp_path, "guard", pid=os.getpid())
    send_to_receiver(tmp_path, failure="error")
    send_to_receiver(tmp_path, failure="error")
    assert receiver.read()


def test_time_of_the_end_comes_from_the_guards_message_and_is_never_in_the_future(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock
) -> None:
    clock.now = 997.0
    send_to_receiver(tmp_path, "end", code=-9, terminated_by_launcher=False)
    clock.now = 1010.0
    send_to_receiver(tmp_path, "end", rank=1, code=0, terminated_by_launcher=True)
    clock.now = 1000.0
    receiver.read()
    first, second = receiver.states()
    assert (first.ended_s, first.exit_code, first.terminated_by_launcher) == (3.0, -9, False)
    assert (second.ended_s, second.exit_code, second.terminated_by_launcher) == (0.0, 0, True)


def test_rank_counts_as_ended_if_its_guard_has_ended(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, proc: FakeProc
) -> None:
    """If the guard's message arrives after all, the time and the exit code in the message are used instead."""
    proc.put(50)
    send_to_receiver(tmp_path, "guard", pid=50)
    send_to_receiver(tmp_path)
    receiver.read()
    assert receiver.states()[0].ended_s is None
    proc.put(50, "Z")
    (tmp_path / "rank0.state.json").write_text('{"phase": "end", "exit_code": 3}')
    assert (receiver.states()[0].ended_s, receiver.states()[0].exit_code) == (0.0, 3)
    clock.now += 2.0
    assert receiver.states()[0].ended_s == 2.0, (
        "`ended_s` must count from the moment when the end of the guard was noticed"
    )
    send_to_receiver(tmp_path, "end", code=-9, terminated_by_launcher=True)
    assert receiver.read()
    assert (
        receiver.states()[0].ended_s,
        receiver.states()[0].exit_code,
        receiver.states()[0].terminated_by_launcher,
    ) == (0.0, -9, True)
    send_to_receiver(tmp_path, "end", code=0, terminated_by_launcher=False)
    assert not receiver.read()
    assert receiver.states()[0].exit_code == -9


# ---- silent ranks ----


def make_silent(receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, after_s: float = UNSURE_S + 0.1) -> None:
    """Send a heartbeat of rank 0, and then advance the clock by `after_s` seconds."""
    send_to_receiver(tmp_path)
    receiver.read()
    clock.now += after_s


@pytest.mark.parametrize(
    ("state", "stopped", "busy"), [("T", True, False), ("t", True, False), ("D", False, True), ("Z", False, False)]
)
def test_process_state_shows_whether_a_silent_rank_is_stopped_or_busy(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, proc: FakeProc, state: str, stopped: bool, busy: bool
) -> None:
    proc.put(4711, state)
    make_silent(receiver, tmp_path, clock)
    for _ in range(2):
        observed = receiver.states()[0]
        assert (observed.stopped, observed.busy) == (stopped, busy)
        clock.now += 1.0


def test_process_is_checked_only_while_its_rank_is_silent_and_has_not_ended(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, proc: FakeProc
) -> None:
    proc.put(4711, "T")
    make_silent(receiver, tmp_path, clock, UNSURE_S - 0.1)
    assert not receiver.states()[0].stopped
    clock.now += 1.0
    assert receiver.states()[0].stopped
    send_to_receiver(tmp_path, "end", code=0, terminated_by_launcher=False)
    receiver.read()
    assert not receiver.states()[0].stopped


@pytest.mark.parametrize(("share", "busy"), [(1.0, True), (0.06, True), (0.04, False), (0.0, False)])
def test_silent_rank_is_busy_if_it_uses_more_than_5_percent_of_a_cpu(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, proc: FakeProc, share: float, busy: bool
) -> None:
    """`share`: share of one CPU that the process of the rank uses from the first check on."""
    proc.put(4711, "R", cpu_s=1000.0)
    make_silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy, (
        "a rank must count as busy at the first check, which has no earlier CPU time to compare with"
    )
    assert receiver.states()[0].busy, "a rank must count as busy while no time has passed since the first check"
    for seconds in (0.5, 10.0, 50.0):
        clock.now += seconds
        proc.put(4711, "R", cpu_s=1000.0 + share * (clock.now - 1000.0 - UNSURE_S - 0.1))
        assert (receiver.states()[0].busy, receiver.states()[0].stopped) == (busy, False)


def test_cpu_time_before_the_last_heartbeat_does_not_count(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: FakeClock, proc: FakeProc
) -> None:
    proc.put(4711, "R", cpu_s=1.0)
    make_silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy
    proc.put(4711, "R", cpu_s=9.0)
    make_silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy
    clock.now += 5.0
    assert not receiver.states()[0].busy, "CPU time before the last heartbeat must not count"


# ---- processes ----


def test_process_with_any_name_is_read_unless_it_has_ended(proc: FakeProc) -> None:
    proc.put(12, "R", cpu_s=2.5, parent=5, start_time=99)
    process = read_process(12)
    assert process is not None
    assert (process.state, process.parent, process.start_time, process.cpu_s) == ("R", 5, "99", 2.5)
    for state in ("Z", "X"):
        proc.put(12, state)
        assert read_process(12) is None
    assert read_process(13) is None
    (proc.path("/proc/12/stat")).write_bytes(b"12 (\xff) R " + b"5 " * 30)
    assert read_process(12), "a process whose name is not UTF-8 must be read"


def test_process_identity_is_pid_and_start_time(proc: FakeProc) -> None:
    proc.put(12, start_time=99)
    identity = process_identity(12)
    assert (identity, process_identity(13)) == ("12 99", "")
    assert is_alive(identity)
    proc.put(12, start_time=100)
    assert not is_alive(identity), "a process with the same pid but another start time must not count as alive"
    assert not is_alive("13 99")
    assert is_alive(""), "an empty identity (no process is given) must count as alive"


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
def test_recorded_exit_code_is_a_whole_number_or_none(tmp_path: Path, text: str | None, code: int | None) -> None:
    if text is not None:
        (tmp_path / "rank7.state.json").write_text(text)
    assert recorded_exit_code(tmp_path, 7) == code
