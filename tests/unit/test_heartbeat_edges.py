"""What a rank's receiver, its guard's words and /proc make of it, one at a time, by a clock that is set."""

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
    """`time.monotonic()`, as it is set."""

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
    """A /proc of our own."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, pid: int, state: str = "S", *, seconds: float = 0.0, parent: int = 1, born: int = 7) -> None:
        used = int(seconds * TICKS)
        rest = f"{state} {parent} 0 0 0 0 0 0 0 0 0 {used - used // 2} {used // 2} 0 0 20 0 1 0 {born} 0"
        place = self._root / str(pid)
        place.mkdir(parents=True, exist_ok=True)
        (place / "stat").write_text(f"{pid} (a ) b (c) {rest}\n")

    def path(self, name: str) -> Path:
        return self._root / name.removeprefix("/proc/") if name.startswith("/proc/") else Path(name)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    made = Proc(tmp_path / "proc")
    monkeypatch.setattr(processes, "Path", made.path)
    return made


def say(directory: Path, kind: str = "heartbeat", *, rank: int = 0, **over: Any) -> None:
    """As a rank, or its guard, would."""
    beat = (
        {"pid": 4711, "phase": "gemm", "sequence": 3, "progress_at": 0.0, "failure": ""} if kind == "heartbeat" else {}
    )
    place = os.open(directory, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.connect(f"/proc/self/fd/{place}/heartbeats")
        channel.send(json.dumps({"kind": kind, "rank": rank, "at": time.monotonic(), **beat, **over}).encode())
    os.close(place)


def begun(directory: Path, receiver: HeartbeatReceiver) -> RankHeartbeat:
    """A rank that has beaten once by itself, and does so again after the test."""
    made = RankHeartbeat(0, directory)
    assert select.select([receiver.socket], [], [], 5)[0]
    return made


# ---- the rank's side ----


def test_a_process_beats_by_itself_as_the_rank_that_it_is(
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


def test_a_process_that_was_started_by_hand_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert not sender.connected, "nobody listens there"
    sender._socket.close()


def test_a_heart_stops_when_nobody_listens_any_more(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    begun(tmp_path, receiver)
    (thread,) = (each for each in threading.enumerate() if each.name == "heartbeat" and each not in before)
    receiver.close()
    thread.join(10)
    assert not thread.is_alive()


def test_a_rank_without_its_number_is_the_first(
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


def test_how_long_a_rank_did_nothing_and_how_long_it_waits(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock
) -> None:
    rank = begun(tmp_path, receiver)

    def seen(after_s: float) -> tuple[float, float | None, int]:
        clock.now += after_s
        rank.send()
        receiver.read()
        state = receiver.states()[0]
        return state.progress_s, state.waiting_s, state.sequence

    assert seen(5.0) == (5.0, None, 0)
    rank.record_progress()
    assert seen(3.0) == (3.0, None, 0)
    with rank.in_collective():
        assert seen(2.0) == (2.0, 2.0, 1)
    assert seen(4.0) == (4.0, None, 1), "its progress is the end of what all did together"
    with rank.in_collective():
        pass
    assert seen(1.0) == (1.0, None, 2)


def test_the_first_failure_of_a_rank_is_the_one_that_is_told(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock
) -> None:
    rank = begun(tmp_path, receiver)
    rank.send()
    assert receiver.read()
    rank.record_failure("watchdog: timed-out")
    assert receiver.read(), "at once, and not with the next beat"
    clock.now += 6.0
    rank.record_failure("OutOfMemoryError")
    rank.send()
    assert not receiver.read()
    assert (receiver.states()[0].failure, receiver.states()[0].failure_age_s) == ("timeout", 6.0)


def test_a_phase_without_end_is_cut(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    rank = begun(tmp_path, receiver)
    rank.phase = "x" * 10_000
    rank.send()
    receiver.read()
    assert len(receiver.states()[0].phase) == 300


def test_a_rank_goes_on_where_its_supervisor_does_not_listen(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    rank = begun(tmp_path, receiver)
    for _ in range(2000):  # more than the kernel keeps
        rank.send()
    assert receiver.read()
    receiver.close()
    rank.send()


# ---- the supervisor's side ----


def test_a_supervisor_that_begins_again_is_heard_and_leaves_nothing_open(
    receiver: HeartbeatReceiver, tmp_path: Path
) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    again = HeartbeatReceiver(tmp_path, {0: "gpu=0"})
    say(tmp_path)
    assert (again.read(), receiver.read()) == (True, False)
    again.close()
    assert held() == before


def test_ranks_are_told_in_order_with_their_devices_and_as_they_were_before_their_first_beat(
    receiver: HeartbeatReceiver,
) -> None:
    first, second = receiver.states()
    assert [(state.rank, state.scope) for state in (first, second)] == [(0, "gpu=0"), (1, "gpu=1")]
    assert (first.phase, first.sequence, first.grouped, first.waiting_s, first.progress_s) == ("", 0, False, None, 0.0)
    assert (first.alive_s, first.silent_s, first.stopped, first.busy) == (None, 0.0, False, False)
    assert (first.failure, first.failure_age_s) == ("", None)
    assert (first.ended_s, first.exit_code, first.terminated_by_launcher) == (None, None, False)


def test_everything_in_a_beat_is_in_the_state(receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock) -> None:
    say(tmp_path, grouped=True, waiting_since=990.0, progress_at=980.1234, failure="error", failed_at=970.0)
    assert receiver.read()
    clock.now += 1.0
    state = receiver.states()[0]
    assert (state.phase, state.sequence, state.grouped, state.failure) == ("gemm", 3, True, "error")
    assert (state.waiting_s, state.progress_s, state.failure_age_s) == (11.0, 20.877, 31.0)
    assert (state.alive_s, state.silent_s) == (1.0, 1.0)


def test_age_counts_from_the_first_beat_and_silence_from_the_last(
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


def test_a_clock_that_was_read_a_moment_apart_makes_no_age_below_nothing(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock
) -> None:
    say(tmp_path, progress_at=clock.now + 1.0)
    receiver.read()
    assert receiver.states()[0].progress_s == 0.0


def test_news_is_a_first_beat_a_failure_or_an_end_and_nothing_else(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
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


def test_a_failure_with_the_first_word_is_news_among_others(receiver: HeartbeatReceiver, tmp_path: Path) -> None:
    say(tmp_path, "guard", pid=os.getpid())
    say(tmp_path, failure="error")
    say(tmp_path, failure="error")
    assert receiver.read()


def test_an_end_is_as_old_as_the_guard_says_and_never_of_tomorrow(
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


def test_a_rank_whose_guard_is_gone_has_ended_and_its_own_word_counts_for_more(
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
    assert receiver.states()[0].ended_s == 2.0, "seen once"
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


# ---- a rank that does not beat ----


def silent(receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, seconds: float = UNSURE_S + 0.1) -> None:
    say(tmp_path)
    receiver.read()
    clock.now += seconds


@pytest.mark.parametrize(
    ("state", "stopped", "busy"), [("T", True, False), ("t", True, False), ("D", False, True), ("Z", False, False)]
)
def test_a_silent_rank_is_stopped_or_in_the_kernel_or_gone(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc, state: str, stopped: bool, busy: bool
) -> None:
    proc.put(4711, state)
    silent(receiver, tmp_path, clock)
    for _ in range(2):
        found = receiver.states()[0]
        assert (found.stopped, found.busy) == (stopped, busy)
        clock.now += 1.0


def test_a_rank_that_beats_or_has_ended_is_not_looked_at(
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
def test_a_silent_rank_is_busy_where_it_uses_its_processor(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc, share: float, busy: bool
) -> None:
    proc.put(4711, "R", seconds=1000.0)
    silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy, "nothing is known yet"
    assert receiver.states()[0].busy, "in the same moment neither"
    for seconds in (0.5, 10.0, 50.0):
        clock.now += seconds
        proc.put(4711, "R", seconds=1000.0 + share * (clock.now - 1000.0 - UNSURE_S - 0.1))
        assert (receiver.states()[0].busy, receiver.states()[0].stopped) == (busy, False)


def test_use_of_the_processor_is_counted_anew_after_a_beat(
    receiver: HeartbeatReceiver, tmp_path: Path, clock: Clock, proc: Proc
) -> None:
    proc.put(4711, "R", seconds=1.0)
    silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy
    proc.put(4711, "R", seconds=9.0)
    silent(receiver, tmp_path, clock)
    assert receiver.states()[0].busy
    clock.now += 5.0
    assert not receiver.states()[0].busy, "what it used before it beat again is no sign of life"


# ---- processes ----


def test_a_process_is_read_whatever_its_name(proc: Proc) -> None:
    proc.put(12, "R", seconds=2.5, parent=5, born=99)
    found = read_process(12)
    assert found is not None
    assert (found.state, found.parent, found.start_time, found.cpu_s) == ("R", 5, "99", 2.5)
    for state in ("Z", "X"):
        proc.put(12, state)
        assert read_process(12) is None
    assert read_process(13) is None
    (proc.path("/proc/12/stat")).write_bytes(b"12 (\xff) R " + b"5 " * 30)
    assert read_process(12), "a name may be any bytes"


def test_a_process_is_named_by_its_number_and_its_birth(proc: Proc) -> None:
    proc.put(12, born=99)
    named = process_identity(12)
    assert (named, process_identity(13)) == ("12 99", "")
    assert is_alive(named)
    proc.put(12, born=100)
    assert not is_alive(named), "another one has its number now"
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
def test_the_exit_code_that_a_rank_wrote_down(tmp_path: Path, text: str | None, code: int | None) -> None:
    if text is not None:
        (tmp_path / "rank7.state.json").write_text(text)
    assert recorded_exit_code(tmp_path, 7) == code
