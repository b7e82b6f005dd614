"""The messages of a rank to its supervisor: their content, when they are sent, and what happens without a supervisor."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gang import heartbeat
from agent.gang.heartbeat import (
    HEARTBEAT_DIRECTORY,
    DatagramSender,
    RankHeartbeat,
    describe_error,
    rank_heartbeat,
    short_path,
)
from tests.gangs import FakeClock


class Receiver:
    """The socket `heartbeats` of a supervisor, in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with short_path(directory) as path:
            self.socket.bind(f"{path}/heartbeats")

    def read(self) -> list[dict[str, Any]]:
        """Return the pending messages."""
        messages = []
        self.socket.setblocking(False)
        try:
            while True:
                messages.append(json.loads(self.socket.recv(1 << 16)))
        except BlockingIOError:
            return messages

    def wait(self) -> dict[str, Any]:
        """Return the next message."""
        self.socket.settimeout(10)
        message: dict[str, Any] = json.loads(self.socket.recv(1 << 16))
        return message


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    receiver = Receiver(tmp_path)
    yield receiver
    receiver.socket.close()


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the clock of the module `heartbeat`; other modules keep the real clock."""
    clock = FakeClock()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    return clock


def test_first_heartbeat_is_sent_at_once_and_has_every_field(
    tmp_path: Path, receiver: Receiver, fake_time: FakeClock
) -> None:
    rank = RankHeartbeat(5, tmp_path)
    assert receiver.read() == [
        {
            "kind": "heartbeat",
            "rank": 5,
            "at": 1000.0,
            "pid": os.getpid(),
            "phase": "start",
            "sequence": 0,
            "grouped": False,
            "waiting_since": None,
            "progress_at": 1000.0,
            "failure": "",
            "failed_at": None,
            "joined": False,
            "exception": "",
        }
    ]
    assert not rank.joined


def test_heartbeats_come_from_a_daemon_thread_until_the_supervisor_is_gone(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    before = set(threading.enumerate())
    rank = RankHeartbeat(0, tmp_path)
    (thread,) = set(threading.enumerate()) - before
    assert (thread.name, thread.daemon) == ("heartbeat", True), "the thread must not delay the end of its rank"
    for _ in range(3):
        assert receiver.wait()["phase"] == "start"
    receiver.socket.close()
    thread.join(10)
    assert not thread.is_alive()
    assert (rank._sender.connected, rank._sender._socket.fileno()) == (False, -1)


def test_rank_without_a_supervisor_sends_nothing(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for directory in (None, tmp_path, tmp_path / "missing"):
        rank = RankHeartbeat(0, directory)
        assert not rank._sender.connected
        rank.record_failure("timed out")
        rank.record_exception(ValueError("bad"))
        assert directory is None or rank._sender._socket.fileno() == -1
    assert set(threading.enumerate()) <= before


def test_progress_and_collectives_update_the_time_of_progress(
    tmp_path: Path, receiver: Receiver, fake_time: FakeClock
) -> None:
    rank = RankHeartbeat(0, tmp_path)

    def sent() -> tuple[int, float | None, float]:
        rank.send()
        message = receiver.read()[-1]
        return message["sequence"], message["waiting_since"], message["progress_at"]

    fake_time.now = 1001.0
    assert sent() == (0, None, 1000.0)
    rank.record_progress()
    assert sent() == (0, None, 1001.0)
    fake_time.now = 1002.0
    with rank.in_collective():
        fake_time.now = 1003.0
        assert sent() == (1, 1002.0, 1002.0)
    assert sent() == (1, None, 1003.0)
    with pytest.raises(RuntimeError), rank.in_collective():
        raise RuntimeError
    fake_time.now = 1004.0
    assert sent() == (2, 1003.0, 1003.0)
    rank.record_progress()
    fake_time.now = 1003.5  # as if another thread recorded the progress after `send` had read the clock
    assert sent() == (2, 1003.0, 1003.5), "the time of progress must not be in the future"


def test_phase_and_exception_are_truncated(tmp_path: Path, receiver: Receiver) -> None:
    rank = RankHeartbeat(0, tmp_path)
    rank.phase = "p" * 301
    rank.record_exception(ValueError("x" * 600))
    message = receiver.read()[-1]
    assert (message["phase"], message["exception"]) == ("p" * 300, "ValueError: " + "x" * 488)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        *((text, "timeout") for text in ("time out", "time-out", "TIME_OUT", "Timing out", "timed out")),
        *((text, "error") for text in ("time  out", "timer out", "the time is out", "")),
    ],
)  # fmt: skip
def test_kind_of_the_first_failure_is_sent_and_later_failures_are_ignored(
    tmp_path: Path, receiver: Receiver, fake_time: FakeClock, problem: str, kind: str
) -> None:
    rank = RankHeartbeat(0, tmp_path)
    receiver.read()
    fake_time.now = 1001.0
    rank.record_failure(f"error {problem} 9")
    fake_time.now = 1002.0
    for later in ("timed out", "error"):
        rank.record_failure(later)
    assert [(message["failure"], message["failed_at"]) for message in receiver.read()] == [(kind, 1001.0)]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("error", "is_software"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (ModuleNotFoundError("no numpy"), True),
        (ImportError("no symbol"), True),
        (OSError(errno.EIO, "broken"), False),
        (ValueError("bad"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_the_first_exception_that_a_device_cannot_cause_is_sent(
    tmp_path: Path, receiver: Receiver, error: BaseException, is_software: bool, joined: bool
) -> None:
    """`joined`: the ranks have exchanged data. Before that, a device cannot be the cause of an exception."""
    rank = RankHeartbeat(0, tmp_path)
    rank.joined = joined
    receiver.read()
    rank.record_exception(error)
    is_sent = is_software or not joined
    assert [message["exception"] for message in receiver.read()] == [describe_error(error)] * is_sent
    rank.record_exception(ImportError("a consequence"))
    expected = [] if is_sent else ["ImportError: a consequence"]
    assert [message["exception"] for message in receiver.read()] == expected


def test_exception_is_described_in_one_line() -> None:
    assert describe_error(ValueError(" a\n\tb  c\n")) == "ValueError: a b c"
    assert describe_error(KeyError()) == "KeyError: "
    assert describe_error(ValueError("x" * 1001)) == "ValueError: " + "x" * 1000


@pytest.mark.parametrize("rank", [None, "12"])
@pytest.mark.parametrize("directory", [None, "", "/work"])
def test_rank_and_directory_of_the_heartbeat_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, directory: str | None
) -> None:
    for name, value in (("RANK", rank), (HEARTBEAT_DIRECTORY, directory)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(heartbeat, "RankHeartbeat", lambda *arguments: arguments)
    rank_heartbeat.cache_clear()
    try:
        assert rank_heartbeat() == (int(rank or 0), Path(directory) if directory else None)
        assert rank_heartbeat() is rank_heartbeat()
    finally:
        rank_heartbeat.cache_clear()


class FakeSocket:
    """A socket that records its calls in `calls`. Its `send` raises `error`, unless `error` is None."""

    def __init__(self, error: OSError | None) -> None:
        self.calls: list[Any] = []
        self._error = error

    def settimeout(self, seconds: float) -> None:
        self.calls.append(seconds)

    def send(self, data: bytes) -> None:
        self.calls.append(json.loads(data))
        if self._error:
            raise self._error

    def close(self) -> None:
        self.calls.append("closed")


@pytest.mark.parametrize(
    ("error", "is_connected"),
    [(None, True), (BlockingIOError(), True), (TimeoutError(), True), (ConnectionRefusedError(), False)],
)
def test_sender_waits_only_for_its_timeout_and_closes_after_a_refused_connection(
    receiver: Receiver, tmp_path: Path, fake_time: FakeClock, error: OSError | None, is_connected: bool
) -> None:
    sender = DatagramSender(3, tmp_path)
    assert sender.connected
    sender._socket.close()
    fake = FakeSocket(error)
    sender._socket = fake  # type: ignore[assignment]
    sender.send("end", 2.0, code=7)
    assert sender.connected is is_connected
    sent = [2.0, {"kind": "end", "rank": 3, "at": 1000.0, "code": 7}]
    assert fake.calls == sent + ["closed"] * (not is_connected)
    fake.calls.clear()
    sender.send("guard")
    assert fake.calls == ([0.0, {"kind": "guard", "rank": 3, "at": 1000.0}] if is_connected else [])


def test_short_path_refers_to_the_directory_only_within_the_context(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with short_path(tmp_path) as path:
        assert Path(path).samefile(tmp_path)
        number = int(path.rpartition("/")[2])
        assert path == f"/proc/self/fd/{number}"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    with pytest.raises(NotADirectoryError), short_path(tmp_path / "file"):
        pass
