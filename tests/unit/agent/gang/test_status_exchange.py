"""The supervisors of a gang exchange statuses over TCP, and close connections with invalid messages or without messages.

A gang is the hosts of one multi-node launch. A supervisor is the process that runs the launch on one of these hosts.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from agent.gang import transport
from agent.gang.culprit import HOST_SILENT_S
from agent.gang.peer_channel import PeerChannel
from agent.gang.protocol import GangError
from agent.gang.transport import listen
from schemas.records import Culprit
from tests.gangs import MEMBERS, is_closed, make_gang, poll_until, rank_state, status_line


@pytest.fixture
def channels(port: int) -> Iterator[dict[str, PeerChannel]]:
    """Yield host -> its channel. h1 and h2 are the watchers: they listen, and receive the statuses of all members."""
    channels = {host: PeerChannel(make_gang(host, port)) for host in MEMBERS}
    yield channels
    for channel in channels.values():
        channel.close()


def test_all_members_exchange_statuses_and_the_verdict(channels: dict[str, PeerChannel]) -> None:
    first, second, third = channels.values()
    poll_until(
        lambda: set(first.statuses) == set(second.statuses) == set(MEMBERS) and len(third.statuses) == 3,
        *channels.values(),
    )
    assert first.statuses["h3"].ranks == (rank_state(0),)
    now = time.monotonic()
    assert [channel.is_decider(now) for channel in (first, second, third)] == [True, False, False]
    verdict = Culprit(kind="rank_silent", hosts=("h3",), text="host h3 …", scope="gpu=0", rank=4, phase="training")
    first.announce_verdict(verdict)
    poll_until(lambda: second.verdict == third.verdict == verdict, second, third)


def test_second_watcher_decides_if_the_first_is_finished_or_silent(channels: dict[str, PeerChannel]) -> None:
    first, second, third = channels.values()
    poll_until(
        lambda: "h1" in second.statuses and "h2" in third.statuses and "h1" in third.statuses, *channels.values()
    )
    later = time.monotonic() + HOST_SILENT_S + 1
    assert second.is_decider(later)
    first.finished = True
    first.publish_status([], at_once=True)
    poll_until(lambda: second.statuses["h1"].finished and third.statuses["h1"].finished, *channels.values())
    assert [channel.is_decider(time.monotonic()) for channel in (second, third)] == [True, False]


def test_late_answer_does_not_revive_a_finished_host(channels: dict[str, PeerChannel]) -> None:
    first, second, _ = channels.values()
    poll_until(lambda: "h2" in first.statuses and "h1" in second.statuses, *channels.values())
    second.finished = True
    second.publish_status([], at_once=True)
    poll_until(lambda: first.statuses["h2"].finished, first, second)
    # h2 sends statuses and answers to h1 over different connections. An older answer may arrive after the last status.
    # `finished = False` makes h2 send such answers.
    second.finished = False
    for _ in range(20):
        first.publish_status([rank_state(0)], at_once=True)
        first.poll(0.01)
        second.poll(0.01)
    assert first.statuses["h2"].finished


INVALID_MESSAGES: dict[str, Callable[[int, str], bytes]] = {
    "another nonce": lambda port, greeting: status_line(port, greeting, nonce="f" * 32),
    "another run": lambda port, greeting: status_line(port, greeting, context="r2 gang rack1"),
    "another gang": lambda port, greeting: status_line(port, greeting, members=("h1", "h3")),
    "no authentication code": lambda port, greeting: status_line(port, greeting).partition(b" ")[2],
    "HTTP": lambda port, greeting: b"GET / HTTP/1.1\r\n\r\n",
    "binary data": lambda port, greeting: b"\x00\xff\n",
    "a line above the maximum length": lambda port, greeting: b"x" * (1 << 18),
    "a host outside the gang": lambda port, greeting: status_line(port, greeting, host="h9"),
    "the receiver as the sender": lambda port, greeting: status_line(port, greeting, host="h1"),
    "a message with the greeting of another launch": lambda port, greeting: status_line(port, "0" * 16),
    "a repeated message": lambda port, greeting: status_line(port, greeting) * 2,
    "an invalid rank state": lambda port, greeting: status_line(port, greeting, ranks=[{"rank": "3"}]),
    "a number instead of the list of ranks": lambda port, greeting: status_line(port, greeting, ranks=3),
}


@pytest.mark.parametrize("make_line", INVALID_MESSAGES.values(), ids=INVALID_MESSAGES.keys())
def test_invalid_message_closes_the_connection_and_the_gang_continues(
    channels: dict[str, PeerChannel], port: int, make_line: Callable[[int, str], bytes]
) -> None:
    first, second, _ = channels.values()
    with socket.create_connection(("127.0.0.1", port)) as channel:
        channel.settimeout(0.01)
        greeting = b""
        while not greeting:
            first.poll(0.01)
            try:
                greeting = channel.recv(4096)
            except TimeoutError:
                continue
        message = make_gang("h3", port).verify(greeting.strip())
        assert message is not None
        line = make_line(port, message["greeting"])
        channel.setblocking(False)
        sent = 0
        end = time.monotonic() + 5
        while sent < len(line) and time.monotonic() < end:
            try:
                sent += channel.send(line[sent:])
            except BlockingIOError:
                first.poll(0.01)
            except ConnectionError:
                break
        while not is_closed(channel, first):
            assert time.monotonic() < end, "the connection is still open 5 s after the start of sending"
    poll_until(lambda: "h2" in first.statuses and "h1" in second.statuses, first, second)
    assert "h9" not in first.statuses


def test_connections_without_a_message_are_limited_in_number_and_time(
    channels: dict[str, PeerChannel], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = channels.values()
    poll_until(lambda: "h2" in first.statuses, first, second)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(60)]
    for _ in range(100):
        first.poll(0.0)
    max_connections = transport.MAX_UNPROVEN + len(MEMBERS)
    assert sum(not is_closed(channel, first) for channel in silent) <= max_connections
    assert time.monotonic() - first.statuses["h2"].at < 5
    monkeypatch.setattr(transport, "PROOF_S", 0.1)
    time.sleep(0.3)
    first.poll(0.0)
    assert all(is_closed(channel, first) for channel in silent[-max_connections:])
    for channel in silent:
        channel.close()
    poll_until(lambda: "h3" in first.statuses, *channels.values())


def test_lost_connection_is_reestablished(port: int) -> None:
    watcher, member = PeerChannel(make_gang("h1", port)), PeerChannel(make_gang("h3", port))
    poll_until(lambda: "h3" in watcher.statuses and "h1" in member.statuses, watcher, member)
    watcher.close()
    watcher = PeerChannel(make_gang("h1", port))
    poll_until(lambda: "h3" in watcher.statuses, watcher, member)
    watcher.close()
    member.close()


def test_port_in_use_is_reported_with_the_remedy(port: int) -> None:
    with listen("127.0.0.1", port), pytest.raises(GangError, match=f"127.0.0.1 port {port}.*rendezvous_port"):
        PeerChannel(make_gang("h1", port))


def test_listener_is_not_open_on_other_addresses(channels: dict[str, PeerChannel], port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.9", port), timeout=1)
