"""The steps of a `PeerChannel`, a host's connections to the other hosts of its gang, with fake connections and at exact times.

A gang is the hosts of one multi-node launch. Its first two members are the watchers: they receive the statuses of all members,
and answer each. A host that is not a watcher connects to both watchers, and a watcher connects to the other one.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gang import peer_channel
from agent.gang.culprit import HOST_SILENT_S, PeerStatus
from agent.gang.peer_channel import PeerChannel
from schemas.records import Culprit, to_json
from tests.gangs import FakeClock, make_gang, rank_state

VERDICT = Culprit(kind="cut_off", hosts=("h2",), text="host h2 …")
GANG = make_gang("h3", 29400)


class FakeConnection:
    """A connection that stores the messages sent on it.

    `accepts`: the result of `send`; False: the connection has failed, or its buffer is full.
    """

    def __init__(self, host: str = "", *, greeting: str = "g", heard_at: float = 0.0, accepts: bool = True) -> None:
        self.socket: Any = object()
        self.host, self.greeting, self.heard_at, self.accepts = host, greeting, heard_at, accepts
        self.token, self.number, self.pending = "t", 7, b""
        self.sent: list[Any] = []
        self.received: list[bytes] | None = []

    def send(self, line: bytes) -> bool:
        self.sent.append(GANG.verify(line.rstrip(b"\n")) if line else line)
        return self.accepts

    def receive(self) -> list[bytes] | None:
        return self.received

    def close(self) -> None:
        self.socket = None


class FakeSelector:
    """A selector that reports no events. `calls` lists the calls of its methods; a call of `select` adds only its time-out."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def select(self, seconds: float) -> list[Any]:
        self.calls.append(seconds)
        return []

    def register(self, *arguments: Any) -> None:
        self.calls.append(("register", *arguments))

    def unregister(self, channel: Any) -> None:
        self.calls.append(("unregister", channel))

    def close(self) -> None:
        self.calls.append("close")


class FakeListener:
    """A listener with two connections: one from member h2, and one from a client that has sent no valid message yet.

    `calls` lists the calls of its methods.
    """

    def __init__(self) -> None:
        self.connections = [FakeConnection("h2"), FakeConnection()]
        self.calls: list[Any] = []

    def flush(self) -> None:
        self.calls.append("flush")

    def drop_silent(self, seconds: float) -> None:
        self.calls.append(("drop", seconds))

    def identify(self, connection: FakeConnection, host: str) -> None:
        self.calls.append((connection, host))

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def early_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the clock of the channels by a fake that starts at 0.5 s, like the monotonic clock just after boot."""
    clock = FakeClock()
    clock.now = 0.5
    monkeypatch.setattr(peer_channel, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def member(early_clock: FakeClock) -> Any:
    """Return the channel of h3, which is not a watcher. It has fake connections to the watchers h1 and h2, but no listener."""
    channel: Any = PeerChannel(GANG)
    assert isinstance(channel._selector, selectors.BaseSelector)
    channel._selector.close()
    channel._selector = FakeSelector()
    channel._watchers = {host: FakeConnection(heard_at=0.5) for host in ("h1", "h2")}
    return channel


@pytest.fixture
def watcher(member: Any) -> Any:
    """Return the channel `member` with a fake listener, as if h3 were a watcher too."""
    member._listener = FakeListener()
    return member


# ---- statuses that a host sends ----


def test_first_status_has_number_one_and_is_sent_only_to_watchers_that_have_sent_a_greeting(
    member: Any, early_clock: FakeClock
) -> None:
    member._watchers["h2"].greeting = ""
    member.publish_status([rank_state(4)])
    token = member._token
    assert len(token) == 16
    message = {"host": "h3", "token": token, "number": 1, "finished": False, "aborted": False, "greeting": "g"}
    assert member._watchers["h1"].sent == [{**message, "ranks": [to_json(rank_state(4))]}]
    assert member._watchers["h2"].sent == [], "h2 has sent no greeting, so it would refuse a status"
    assert member.statuses["h3"] == PeerStatus(at=0.5, ranks=(rank_state(4),))


def test_status_is_sent_again_exactly_after_the_interval(member: Any, early_clock: FakeClock) -> None:
    member.publish_status([])
    early_clock.now = 0.5 + peer_channel.STATUS_INTERVAL_S - 0.25
    member.publish_status([])
    assert member._number == 1
    early_clock.now = 0.5 + peer_channel.STATUS_INTERVAL_S
    member.aborted = True
    member.publish_status([])
    assert [message["aborted"] for message in member._watchers["h1"].sent] == [False, True]
    assert member.statuses["h3"].aborted


def test_connection_on_which_a_status_cannot_be_sent_is_closed(member: Any) -> None:
    failing, good = member._watchers["h1"], member._watchers["h2"]
    failing.accepts, channel = False, failing.socket
    member.publish_status([])
    assert (failing.socket, member._watchers["h1"].socket, member._watchers["h2"]) == (None, None, good)
    assert member._selector.calls == [("unregister", channel)]


def test_status_is_sent_at_once_after_a_new_greeting(member: Any, early_clock: FakeClock) -> None:
    member.publish_status([])
    connection = member._watchers["h1"]
    connection.received = [make_gang("h1", 29400).sign({"host": "h1", "greeting": "new"}).rstrip(b"\n")]
    member._read_watcher("h1")
    member.publish_status([])
    assert [message["greeting"] for message in connection.sent] == ["g", "new"]


# ---- answers of the watchers ----


@pytest.mark.parametrize("field", ["finished", "aborted"])
def test_later_answer_does_not_revoke_finished_or_aborted(member: Any, early_clock: FakeClock, field: str) -> None:
    member.statuses["h1"] = PeerStatus(at=0.0, ranks=(rank_state(0),))
    connection = member._watchers["h1"]
    for number, value in enumerate([False, True, False], 3):
        early_clock.now = number
        answer = {"host": "h1", "token": member._token, "number": number, "verdict": None, field: value}
        connection.received = [make_gang("h1", 29400).sign(answer).rstrip(b"\n")]
        member._read_watcher("h1")
        expected = PeerStatus(at=number, ranks=(rank_state(0),), **{field: number > 3})
        assert (member.statuses["h1"], connection.heard_at) == (expected, number)
    assert member._answered == {"h1": 5}


def test_late_answer_to_an_older_status_does_not_lower_the_answered_number(member: Any) -> None:
    for number, newest in ((0, 0), (4, 4), (3, 4)):
        member._receive_answer("h1", member._watchers["h1"], {"number": number, "verdict": to_json(VERDICT)})
        assert (member._answered, member.verdict) == ({"h1": newest}, VERDICT)


def test_connection_that_the_watcher_has_closed_is_closed_here_too(member: Any) -> None:
    connection = member._watchers["h1"]
    channel, connection.received = connection.socket, None
    member._read_watcher("h1")
    assert (connection.socket, member._watchers["h1"].socket) == (None, None)
    assert member._selector.calls == [("unregister", channel)]


@pytest.mark.parametrize(
    ("statuses", "answered", "pending", "is_delivered"),
    [
        ({}, {}, (), True),
        ({"h1": 0.0}, {}, (), False),
        ({"h1": 0.0}, {"h1": 1}, (), True),
        ({"h1": peer_channel.LOST_S - 0.25}, {}, (), False),
        ({"h1": peer_channel.LOST_S}, {}, (), True),
        ({"h1": 0.0, "h2": 0.0}, {"h2": 9}, (), False),
        ({}, {}, (0,), False),
        ({}, {}, (1,), False),
        ({}, {}, (0, 1), False),
    ],
)
def test_status_is_delivered_when_all_reachable_watchers_have_answered_it(
    watcher: Any,
    early_clock: FakeClock,
    statuses: dict[str, float],
    answered: dict[str, int],
    pending: tuple[int, ...],
    is_delivered: bool,
) -> None:
    """The last status of h3 has number 1. h3 is a watcher too, so it must also have sent all its answers to members.

    `statuses`: watcher -> age of its last status, in seconds; a watcher that has sent none is not reachable.
    `answered`: watcher -> number of the newest status of h3 that it has answered.
    `pending`: indices of the listener's connections that still have unsent data.
    """
    early_clock.now = 100.0
    watcher._number, watcher._answered = 1, answered
    watcher.statuses = {host: PeerStatus(at=100.0 - age) for host, age in statuses.items()}
    for index in pending:
        watcher._listener.connections[index].pending = b"x"
    assert watcher.is_delivered() is is_delivered


@pytest.mark.parametrize(("age_s", "is_decider"), [(HOST_SILENT_S, False), (HOST_SILENT_S + 0.25, True)])
def test_host_decides_on_its_own_after_its_watchers_have_been_silent_for_too_long(
    member: Any, age_s: float, is_decider: bool
) -> None:
    member.statuses = {"h1": PeerStatus(at=100.0 - age_s)}
    assert member.is_decider(100.0) is is_decider


# ---- polls ----


def test_poll_sends_pending_data_and_drops_silent_connections_at_intervals(
    watcher: Any, early_clock: FakeClock
) -> None:
    for now in (0.5, 0.5 + peer_channel.CLEANUP_INTERVAL_S, 0.75):
        early_clock.now = now
        watcher.poll(0.01)
    assert watcher._selector.calls == [0.01, 0.01, 0.01]
    assert watcher._listener.calls == ["flush", ("drop", 2 * HOST_SILENT_S)] * 2
    assert [connection.sent for connection in watcher._watchers.values()] == [[b"", b""], [b"", b""]]


def test_poll_calls_the_function_of_each_event(member: Any) -> None:
    called: list[int] = []
    events = [(SimpleNamespace(data=partial(called.append, number)), 1) for number in (1, 2)]
    member._selector.select = lambda seconds: events
    member.poll(0.0)
    assert called == [1, 2]


@pytest.mark.parametrize(("silent_s", "is_kept"), [(peer_channel.RECONNECT_S, True), (3.25, False)])
def test_connection_without_an_answer_for_longer_than_the_limit_is_closed(
    member: Any, early_clock: FakeClock, silent_s: float, is_kept: bool
) -> None:
    early_clock.now += silent_s
    member._dial()
    assert [connection.socket is not None for connection in member._watchers.values()] == [is_kept, is_kept]


def test_watcher_is_dialled_at_intervals_until_it_has_finished(
    member: Any, early_clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[tuple[str, float]] = []
    monkeypatch.setattr(member, "_connect", lambda host, now: dialled.append((host, now)))
    for connection in member._watchers.values():
        connection.socket = None
    member.statuses["h2"] = PeerStatus(at=0.5, finished=True)
    times = [0.5, 0.75, 0.25 + peer_channel.REDIAL_S, 0.5 + peer_channel.REDIAL_S]
    for now in times:
        early_clock.now = now
        member._dial()
    assert dialled == [("h1", times[0]), ("h1", times[-1])]


class FakeSocket:
    """A socket that does nothing. `calls`: the arguments of its constructor, and then the calls of its methods."""

    def __init__(self, *arguments: Any) -> None:
        self.calls: list[Any] = [arguments]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, *arguments))


def test_connection_to_a_watcher_does_not_block(member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_channel.socket, "socket", FakeSocket)
    monkeypatch.setattr(peer_channel, "resolve", lambda address, port: (2, (address, port)))
    member._connect("h2", 7.0)
    connection, channel = member._watchers["h2"], member._watchers["h2"].socket
    assert channel.calls == [
        (2, socket.SOCK_STREAM),
        ("setblocking", False),
        ("connect_ex", (GANG.addresses["h2"], 29401)),
    ]
    assert (connection.heard_at, connection.greeting) == (7.0, "")
    ((name, registered, events, function),) = member._selector.calls
    assert (name, registered, events) == ("register", channel, selectors.EVENT_READ)
    read: list[str] = []
    monkeypatch.setattr(member, "_read_watcher", read.append)
    function()
    assert read == ["h2"]


def test_watcher_whose_address_cannot_be_resolved_keeps_its_old_connection(
    member: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("no such name")

    monkeypatch.setattr(peer_channel, "resolve", fail)
    before = member._watchers["h2"]
    member._connect("h2", 7.0)
    assert member._watchers["h2"] is before


# ---- close ----


def test_close_sends_the_verdict_to_members_and_closes_everything(watcher: Any) -> None:
    channels = [connection.socket for connection in watcher._watchers.values()]
    identified, unidentified = watcher._listener.connections
    watcher.verdict, watcher.finished = VERDICT, True
    watcher.close()
    assert identified.sent == [
        {"host": "h3", "token": "t", "number": 7, "finished": True, "aborted": False, "verdict": to_json(VERDICT)}
    ]
    assert unidentified.sent == []
    assert watcher._selector.calls == [*(("unregister", channel) for channel in channels), "close"]
    assert watcher._listener.calls == ["close"]


# ---- statuses that a watcher receives ----


@pytest.fixture
def status(watcher: Any) -> dict[str, Any]:
    """Return a valid status message of h2 for the channel `watcher`."""
    return {"host": "h2", "token": "u", "number": 1, "greeting": watcher._token, "ranks": [to_json(rank_state(2))]}


def test_each_status_of_a_member_is_stored_and_answered_only_once(watcher: Any, status: dict[str, Any]) -> None:
    connection = FakeConnection()
    assert watcher._receive_status(connection, {**status, "aborted": True}) is True
    assert watcher.statuses == {"h2": PeerStatus(at=0.5, ranks=(rank_state(2),), aborted=True)}
    assert watcher._listener.calls == [(connection, "h2")]
    answer = {"host": "h3", "token": "u", "number": 1, "finished": False, "aborted": False, "verdict": None}
    assert connection.sent == [answer]
    assert watcher._receive_status(connection, status) is False
    assert watcher._receive_status(connection, {**status, "number": 2}) is True
    assert watcher.statuses["h2"].aborted
    assert [sent["number"] for sent in connection.sent] == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"number": 0}, {"number": "one"}, {"greeting": "other"}, {"host": "h9"}, {"host": "h3"}, {"ranks": [3]},
        {"ranks": None},
    ],
)  # fmt: skip
def test_status_with_an_invalid_or_missing_field_changes_nothing(
    watcher: Any, status: dict[str, Any], fields: dict[str, Any]
) -> None:
    connection = FakeConnection()
    assert watcher._receive_status(connection, {**status, **fields}) is False
    assert watcher._receive_status(connection, {key: status[key] for key in status if key not in fields}) is False
    assert (watcher.statuses, watcher._numbers, connection.sent, watcher._listener.calls) == ({}, {}, [], [])
