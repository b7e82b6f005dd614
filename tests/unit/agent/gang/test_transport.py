"""Connections between the hosts of one multi-node launch (a gang): buffers, limits, authentication, addresses of a host."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gang import transport
from agent.gang.protocol import MAX_BYTES, Gang, GangError
from agent.gang.transport import (
    MAX_UNPROVEN,
    PROOF_S,
    BufferedConnection,
    GangListener,
    check_addresses,
    interface_of,
    listen,
    own_address,
    resolve,
)
from tests.gangs import MEMBERS, FakeClock, make_gang


@pytest.fixture
def ends() -> Iterator[tuple[BufferedConnection, socket.socket]]:
    """Yield a connection, and the socket at its other end."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    connection = BufferedConnection(near, 0.0)
    yield connection, far
    connection.close()
    far.close()


def test_new_connection_has_no_host_no_token_and_no_buffered_data(
    ends: tuple[BufferedConnection, socket.socket],
) -> None:
    connection, _ = ends
    fields = (
        connection.host,
        connection.greeting,
        connection.token,
        connection.number,
        connection.pending,
        connection.heard_at,
    )
    assert fields == ("", "", "", 0, b"", 0.0)
    assert connection.send(b"all of it")
    assert connection.pending == b""


def test_lines_are_received_when_they_are_complete(ends: tuple[BufferedConnection, socket.socket]) -> None:
    connection, far = ends
    assert connection.receive() == []
    far.send(b"one\ntw")
    assert connection.receive() == [b"one"]
    far.send(b"o\nthree\n")
    assert connection.receive() == [b"two", b"three"]
    far.close()
    assert connection.receive() is None


def test_line_may_be_as_long_as_the_maximum_but_no_longer(ends: tuple[BufferedConnection, socket.socket]) -> None:
    connection, far = ends
    for expected in ([], None):  # send MAX_BYTES without a line end (no line yet), then one more byte (too long)
        received = 0
        result: list[bytes] | None = []
        while received < MAX_BYTES if expected == [] else received < 1:
            received += far.send(b"x" * min(1 << 15, MAX_BYTES - received if expected == [] else 1))
            result = connection.receive()
        assert result == expected


def test_unsent_data_is_kept_up_to_the_maximum_size(ends: tuple[BufferedConnection, socket.socket]) -> None:
    connection, far = ends
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # type: ignore[union-attr]
    assert connection.send(b"a" * MAX_BYTES)
    assert 0 < len(connection.pending) < MAX_BYTES
    assert connection.send(b"b" * (MAX_BYTES - len(connection.pending)))
    assert len(connection.pending) == MAX_BYTES
    assert not connection.send(b"c")
    far.setblocking(True)
    while connection.pending:
        assert far.recv(1 << 16)
        connection.send(b"")


def test_failed_connection_drops_its_data(ends: tuple[BufferedConnection, socket.socket]) -> None:
    connection, far = ends
    far.close()
    assert not connection.send(b"x" * 10)
    assert connection.pending == b""


def test_unopened_connection_discards_sent_data_and_receives_nothing() -> None:
    connection = BufferedConnection()
    assert connection.send(b"x")
    assert connection.pending == b""
    assert connection.receive() is None
    connection.close()


def test_at_most_64_kib_are_received_at_once() -> None:
    sizes: list[int] = []
    channel: Any = SimpleNamespace(recv=lambda size: sizes.append(size) or b"a\nb")
    assert BufferedConnection(channel, 0.0).receive() == [b"a"]
    assert sizes == [65536]


class Listening:
    """The listener of h1, the messages that it has received, and the far ends of connections to it.

    `accepts`: whether h1 accepts the signed messages; if not, the listener drops their connections.
    """

    def __init__(self, *, greeting: Mapping[str, Any] | None = None, accepts: bool = True) -> None:
        self.gang = make_gang("h1", 0)
        self.received: list[Mapping[str, Any]] = []
        self.selector = selectors.DefaultSelector()
        self.socket = listen("127.0.0.1", 0)
        self.listener = GangListener(self.gang, self.socket, self.selector, self._receive, greeting)
        self.accepts = accepts
        self.far: list[socket.socket] = []

    def _receive(self, connection: BufferedConnection, message: Mapping[str, Any]) -> bool:
        self.received.append(message)
        if "host" in message:
            self.listener.identify(connection, str(message["host"]))
        return self.accepts

    def connect(self) -> socket.socket:
        channel = socket.create_connection(self.socket.getsockname())
        channel.setblocking(False)
        self.far.append(channel)
        self.poll()
        return channel

    def poll(self) -> None:
        """Call the function of each event until no event is left."""
        while events := self.selector.select(0.05):
            for key, _ in events:
                key.data()

    def close(self) -> None:
        self.listener.close()
        self.selector.close()
        for channel in self.far:
            channel.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    """Yield a listener of h1 that accepts every signed message."""
    listening = Listening()
    yield listening
    listening.close()


def is_open(channel: socket.socket) -> bool:
    """Return whether the connection is open; discard the data that has arrived."""
    try:
        return bool(channel.recv(1 << 16))
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_signed_messages_are_received_and_an_unsigned_one_drops_its_connection(listening: Listening) -> None:
    good, bad = listening.connect(), listening.connect()
    good.send(listening.gang.sign({"number": 1}) + listening.gang.sign({"number": 2}))
    bad.send(b"no signature\n" + listening.gang.sign({"number": 3}))
    listening.poll()
    assert listening.received == [{"number": 1}, {"number": 2}]
    assert (is_open(good), is_open(bad)) == (True, False)
    assert len(listening.listener.connections) == 1


def test_message_that_is_refused_drops_the_connection(listening: Listening) -> None:
    listening.accepts = False
    channel = listening.connect()
    channel.send(listening.gang.sign({"number": 1}) + listening.gang.sign({"number": 2}))
    listening.poll()
    assert (listening.received, listening.listener.connections, is_open(channel)) == ([{"number": 1}], [], False)


def test_connection_that_ends_is_removed(listening: Listening) -> None:
    listening.connect().close()
    listening.poll()
    assert listening.listener.connections == []


def test_each_connection_is_greeted() -> None:
    listening = Listening(greeting={"greeting": "g"})
    channel = listening.connect()
    assert listening.gang.verify(channel.recv(1 << 16).rstrip(b"\n")) == {"greeting": "g"}
    listening.close()


def test_connections_do_not_block(listening: Listening) -> None:
    listening.connect()
    assert listening.socket.getblocking() is False
    assert [connection.socket.getblocking() for connection in listening.listener.connections if connection.socket] == [
        False
    ]


def test_newer_connection_of_a_member_replaces_the_older_one(listening: Listening) -> None:
    first, other, second = listening.connect(), listening.connect(), listening.connect()
    for channel, host in ((first, "h2"), (other, "h3"), (second, "h2")):
        channel.send(listening.gang.sign({"host": host}))
        listening.poll()
    assert [connection.host for connection in listening.listener.connections] == ["h3", "h2"]
    assert (is_open(first), is_open(other), is_open(second)) == (False, True, True)


def test_oldest_connections_without_a_message_are_dropped_if_there_are_too_many(listening: Listening) -> None:
    proven = listening.connect()
    proven.send(listening.gang.sign({"host": "h2"}))
    listening.poll()
    channels = [listening.connect() for _ in range(MAX_UNPROVEN + len(MEMBERS) + 2)]
    assert [is_open(channel) for channel in channels[:3]] == [False, False, True]
    assert is_open(proven)
    assert len(listening.listener.connections) == 1 + MAX_UNPROVEN + len(MEMBERS)


@pytest.mark.parametrize(
    ("age_s", "host", "is_kept"),
    [
        (PROOF_S - 1, "", True),
        (PROOF_S + 1, "", False),
        (PROOF_S + 1, "h2", True),
        (21.0, "h2", False),
        (19.0, "h2", True),
    ],
)
def test_silent_connections_are_dropped_after_their_time_limit(
    listening: Listening, age_s: float, host: str, is_kept: bool
) -> None:
    """`host`: member at the other end, whose time limit is 20 s; empty: no valid message yet, so the limit is PROOF_S."""
    channel = listening.connect()
    (connection,) = listening.listener.connections
    connection.host, connection.heard_at = host, time.monotonic() - age_s
    listening.listener.drop_silent(20.0)
    assert is_open(channel) is is_kept
    assert (connection in listening.listener.connections) is is_kept


@pytest.mark.parametrize(("host", "limit_s"), [("", PROOF_S), ("h2", 20.0)])
def test_connection_is_kept_until_its_time_limit_is_exceeded(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, host: str, limit_s: float
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=clock))
    listening.connect()
    (connection,) = listening.listener.connections
    connection.host = host
    for age_s, kept in ((limit_s, [connection]), (limit_s + 0.25, [])):
        clock.now = 1000.0 + age_s
        listening.listener.drop_silent(20.0)
        assert listening.listener.connections == kept


def test_time_limit_of_a_connection_begins_when_it_is_accepted_and_again_with_each_message(
    listening: Listening,
) -> None:
    before = time.monotonic()
    channel = listening.connect()
    (connection,) = listening.listener.connections
    assert before <= connection.heard_at <= time.monotonic()
    connection.heard_at = 0.0
    channel.send(listening.gang.sign({"host": "h2"}))
    listening.poll()
    assert connection.heard_at >= before


def test_drop_ends_one_connection_and_close_ends_all(listening: Listening) -> None:
    """`drop` ignores a connection that the listener does not have."""
    channel = listening.connect()
    (connection,) = listening.listener.connections
    registered = len(listening.selector.get_map())
    listening.listener.drop(connection)
    listening.listener.drop(connection)
    listening.listener.drop(BufferedConnection(channel, 0.0))
    assert len(listening.selector.get_map()) == registered - 1
    assert not is_open(channel)
    other, address = listening.connect(), listening.socket.getsockname()
    listening.listener.close()
    assert not is_open(other)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=1)


def test_pending_data_is_sent_by_flush(listening: Listening) -> None:
    channel = listening.connect()
    (connection,) = listening.listener.connections
    connection.pending = b"late"
    listening.listener.flush()
    assert channel.recv(10) == b"late"
    assert connection.pending == b""


def test_port_can_be_used_again_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1


def test_error_of_listen_names_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(GangError) as error:
        listen("127.0.0.1", taken.getsockname()[1], purpose="the rendezvous")
    assert str(error.value).startswith("cannot listen for the rendezvous on 127.0.0.1 port ")
    assert "set rackproof_rendezvous_port to a free port for all hosts of the gang" in str(error.value)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(transport, "admit_only", refuse)
    with pytest.raises(GangError, match="cannot restrict the rendezvous to the members: Cannot allocate memory; raise"):
        listen("127.0.0.1", 0, ["127.0.0.5"])


def test_resolved_address_has_family_and_port() -> None:
    assert resolve("127.0.0.1", 80) == (socket.AF_INET, ("127.0.0.1", 80))
    assert resolve("::1", 80)[0] == socket.AF_INET6


OUTSIDE = "192.0.2.1"
"""An address for documentation (RFC 5737), which no machine has."""


def gang_at(**addresses: str) -> Gang:
    """Return the gang as h1 sees it, with these addresses; members without one have the address OUTSIDE."""
    return make_gang("h1", 29400, addresses={**dict.fromkeys(MEMBERS, OUTSIDE), **addresses})


def test_host_uses_its_planned_loopback_address_if_all_hosts_have_loopback_addresses() -> None:
    everywhere = dict.fromkeys(MEMBERS, "127.0.0.2")
    assert own_address(gang_at(**{**everywhere, "h1": "127.0.0.3"})) == "127.0.0.3"


def test_host_planned_with_a_loopback_address_uses_the_address_from_which_it_reaches_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def recorded(address: str, port: int) -> Any:
        asked.append((address, port))
        return resolve(address, port)

    monkeypatch.setattr(transport, "resolve", recorded)
    address = own_address(gang_at(h1="127.0.1.1", h2="127.0.0.9"))
    assert address.startswith("127.0.0.")
    assert address != "127.0.1.1"
    assert asked[0] == ("127.0.1.1", 0), (
        "the planned address must be tried with any free port (0), not with the gang's port"
    )
    assert asked[-1] == ("127.0.0.9", 29400)


def test_host_that_lacks_its_planned_address_uses_the_address_from_which_it_reaches_a_peer() -> None:
    assert own_address(gang_at(h1=OUTSIDE, h2="127.0.0.9")).startswith("127.")


def test_planned_address_is_kept_if_the_name_of_the_peer_cannot_be_resolved() -> None:
    assert own_address(gang_at(h1=OUTSIDE, h2="host.invalid", h3="host.invalid")) == OUTSIDE


@pytest.mark.parametrize(
    ("addresses", "is_refused"),
    [
        ({"h1": OUTSIDE, "h2": "127.0.1.1"}, True),
        ({"h1": OUTSIDE, "h2": "::1"}, True),
        ({"h1": "127.0.0.1", "h2": "127.0.1.1"}, False),
        ({"h1": "127.0.1.1"}, False),
        ({"h1": OUTSIDE, "h2": "127-0-0-1.invalid"}, False),
        ({"h1": OUTSIDE}, False),
    ],
)
def test_loopback_address_of_a_watcher_is_refused_unless_this_host_has_a_loopback_address(
    addresses: dict[str, str], is_refused: bool
) -> None:
    """This host is h1, and h2 is the other watcher. A name of h2 that cannot be resolved is not refused here."""
    gang = gang_at(**addresses)
    if not is_refused:
        check_addresses(gang)
        return
    with pytest.raises(
        GangError, match=f"host h2: its address {addresses['h2']} is the loopback address {addresses['h2']}"
    ):
        check_addresses(gang)


def test_interface_of_an_unknown_address_is_empty() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(OUTSIDE) == ""
