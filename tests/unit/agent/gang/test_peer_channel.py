"""How the members of a gang (the hosts of one launch) handle each message, and which member decides the verdict.

The verdict names the host or rank that blocks the gang. The watchers are the first two members, h1 and h2. Every member sends
them its statuses, which report the states of its ranks.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from agent.gang import peer_channel, transport
from agent.gang.culprit import HOST_SILENT_S, PeerStatus
from agent.gang.peer_channel import PeerChannel
from agent.gang.protocol import Gang
from agent.gang.transport import listen
from schemas.records import Culprit, to_json
from tests.gangs import MEMBERS, is_closed, loopback_address, make_gang, poll_until, rank_state, status_line

VERDICT = Culprit(kind="rank_silent", hosts=("h3",), text="host h3 …", scope="gpu=0", rank=4, phase="training")


def loopback_gang(me: str, port: int) -> Gang:
    """Return a gang as its member `me` sees it. All its hosts have the same random loopback address."""
    return make_gang(me, port, addresses=dict.fromkeys(MEMBERS, loopback_address(port)))


class RawMember:
    """A connection from h3 to h1 (`head`), on which a test sends and receives single messages.

    If no status was sent on it, tests call it a stranger.
    """

    def __init__(self, head: PeerChannel, port: int) -> None:
        self._head, self._port = head, port
        self.channel = socket.create_connection((loopback_address(port), port))
        self.channel.setblocking(False)
        self._received = b""
        self.greeting = str(self.receive_answer()["greeting"])

    def receive_answer(self) -> dict[str, Any]:
        """Return the next message from h1."""
        end = time.monotonic() + 5
        while b"\n" not in self._received:
            assert time.monotonic() < end, "no answer after 5 s"
            self._head.poll(0.005)
            try:
                self._received += self.channel.recv(1 << 16)
            except BlockingIOError:
                continue
        line, _, self._received = self._received.partition(b"\n")
        message = make_gang("h3", self._port).verify(line)
        assert message is not None
        return message

    def send_status(self, **fields: Any) -> dict[str, Any]:
        """Send a status of h3 with these fields (`status_line`), and return the answer."""
        self.channel.send(status_line(self._port, self.greeting, **fields))
        return self.receive_answer()

    def wait_until_closed(self) -> bool:
        """Return whether h1 closes the connection within 5 s."""
        end = time.monotonic() + 5
        while not is_closed(self.channel, self._head):
            if time.monotonic() > end:
                return False
        return True


@pytest.fixture
def head(port: int) -> Iterator[PeerChannel]:
    """Yield the channel of h1, the first watcher."""
    channel = PeerChannel(loopback_gang("h1", port))
    yield channel
    channel.close()


def test_status_is_stored_and_answered_with_its_number(head: PeerChannel, port: int) -> None:
    caller = RawMember(head, port)
    answer = caller.send_status(ranks=[asdict(rank_state(4))], token="mine")
    assert answer == {"host": "h1", "token": "mine", "number": 1, "finished": False, "aborted": False, "verdict": None}
    assert head.statuses["h3"].ranks == (rank_state(4),)
    assert not head.statuses["h3"].finished
    assert time.monotonic() - head.statuses["h3"].at < 5
    assert caller.send_status(number=2, token="mine")["number"] == 2
    caller.channel.close()


def test_finished_status_is_final(head: PeerChannel, port: int) -> None:
    caller = RawMember(head, port)
    caller.send_status(finished=True)
    assert head.statuses["h3"].finished
    caller.send_status(number=2, finished=False)
    assert head.statuses["h3"].finished
    caller.channel.close()


@pytest.mark.parametrize("number", [1, 2, 0, -1])
def test_repeated_or_older_status_is_refused(head: PeerChannel, port: int, number: int) -> None:
    caller = RawMember(head, port)
    caller.send_status(number=2)
    caller.channel.send(status_line(port, caller.greeting, number=number))
    assert caller.wait_until_closed()
    caller.channel.close()


def test_numbers_of_statuses_start_again_if_the_supervisor_of_a_member_is_replaced(
    head: PeerChannel, port: int
) -> None:
    first = RawMember(head, port)
    first.send_status(number=7)
    second = RawMember(head, port)
    assert second.send_status(number=1, token="other")["number"] == 1
    assert first.wait_until_closed(), "the second connection of a host must replace the first"
    for caller in (first, second):
        caller.channel.close()


def test_only_identified_members_receive_the_verdict(head: PeerChannel, port: int) -> None:
    member, stranger = RawMember(head, port), RawMember(head, port)
    member.send_status(number=4)
    head.announce_verdict(VERDICT)
    answer = member.receive_answer()
    assert (answer["number"], answer["verdict"]["text"]) == (4, VERDICT.text)
    assert not is_closed(stranger.channel, head)
    assert stranger._received == b""
    for caller in (member, stranger):
        caller.channel.close()


def test_closing_a_channel_reports_that_its_host_has_finished(head: PeerChannel, port: int) -> None:
    caller = RawMember(head, port)
    caller.send_status()
    head.finished = True
    head.close()
    assert json.loads(caller.channel.recv(1 << 16).partition(b" ")[2])["finished"] is True
    assert caller.channel.recv(1) == b""
    caller.channel.close()


def test_number_of_unauthenticated_connections_is_limited(head: PeerChannel, port: int) -> None:
    max_connections = transport.MAX_UNPROVEN + len(MEMBERS)
    callers = [RawMember(head, port) for _ in range(max_connections)]
    assert not any(is_closed(caller.channel, head) for caller in callers)
    callers.append(RawMember(head, port))
    assert callers[0].wait_until_closed(), "the oldest connection must be closed"
    assert not any(is_closed(caller.channel, head) for caller in callers[1:])
    assert callers[-1].send_status()["number"] == 1, "the new connection must be accepted"
    for caller in callers:
        caller.channel.close()


def test_identified_member_may_be_silent_longer_than_a_stranger(
    head: PeerChannel, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, stranger = RawMember(head, port), RawMember(head, port)
    member.send_status()
    real_clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + transport.PROOF_S + 1)
    head.poll(0.0)
    assert (is_closed(member.channel, head), is_closed(stranger.channel, head)) == (False, True)
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + 2 * HOST_SILENT_S + 1)
    head.poll(0.0)
    assert is_closed(member.channel, head)
    for caller in (member, stranger):
        caller.channel.close()


# ---- a member and its two watchers ----


@pytest.fixture
def channels(port: int) -> Iterator[list[PeerChannel]]:
    """Yield the channels of h1, h2 and h3, each of which has received a status of both other hosts."""
    channels = [PeerChannel(loopback_gang(host, port)) for host in MEMBERS]
    poll_until(lambda: all(set(MEMBERS) <= set(channel.statuses) for channel in channels), *channels)
    yield channels
    for channel in channels:
        channel.close()


def test_both_watchers_learn_that_a_member_finished(channels: list[PeerChannel]) -> None:
    first, second, third = channels
    third.finished = True
    third.publish_status([rank_state(4), rank_state(5)], at_once=True)
    poll_until(lambda: first.statuses["h3"].finished and second.statuses["h3"].finished, first, second)
    assert (first.statuses["h3"].ranks, third.statuses["h3"].finished) == ((rank_state(4), rank_state(5)), True)
    assert not first.statuses["h2"].finished


def test_status_is_sent_every_second_and_at_once_on_request(
    channels: list[PeerChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    third = channels[2]
    third.publish_status([], at_once=True)
    before, now = third._number, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    third.publish_status([rank_state(4)])
    assert third._number == before
    assert third.statuses["h3"].ranks == (rank_state(4),), "the channel of h3 must always have the current status of h3"
    third.publish_status([], at_once=True)
    assert third._number == before + 1
    monkeypatch.setattr(time, "monotonic", lambda: now + peer_channel.STATUS_INTERVAL_S + 0.1)
    third.publish_status([])
    assert third._number == before + 2


def test_last_status_counts_as_delivered_when_every_watcher_has_answered(channels: list[PeerChannel]) -> None:
    first, second, third = channels
    third.publish_status([], at_once=True)
    assert not third.is_delivered()
    poll_until_answered(third, first)
    assert not third.is_delivered(), "the second watcher has not answered, so the status must not count as delivered"
    poll_until_answered(third, second)
    assert third.is_delivered()


def poll_until_answered(member: PeerChannel, watcher: PeerChannel) -> None:
    """Poll both channels until the watcher has answered the member's last status."""
    end = time.monotonic() + 5
    while member._answered[watcher.gang.me] < member._number:
        assert time.monotonic() < end, "the watcher has not answered after 5 s"
        watcher.poll(0.005)
        member.poll(0.005)


def test_delivery_ignores_finished_and_lost_watchers(channels: list[PeerChannel]) -> None:
    first, second, third = channels
    third.publish_status([], at_once=True)
    poll_until_answered(third, first)
    status = third.statuses["h2"]
    third.statuses["h2"] = PeerStatus(at=status.at, finished=True)
    assert third.is_delivered()
    third.statuses["h2"] = PeerStatus(at=time.monotonic() - peer_channel.LOST_S - 1)
    assert third.is_delivered()
    third.statuses["h2"] = PeerStatus(at=time.monotonic())
    assert not third.is_delivered()
    assert second.gang.me == "h2"


def test_first_verdict_is_kept(channels: list[PeerChannel]) -> None:
    first, second, third = channels
    other = Culprit(kind="cut_off", hosts=("h2",), text="host h2 …")
    first.announce_verdict(VERDICT)
    poll_until(lambda: third.verdict == VERDICT, third)
    second.announce_verdict(other)
    poll_until_answered(third, second)
    third.publish_status([], at_once=True)
    poll_until_answered(third, second)
    assert third.verdict == VERDICT
    assert third.statuses["h1"].ranks == ()


def test_silent_watcher_is_reconnected(channels: list[PeerChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, third = channels
    connection = third._watchers["h1"]
    real_clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + peer_channel.RECONNECT_S - 0.5)
    third.poll(0.0)
    assert third._watchers["h1"] is connection, "the connection must be kept until RECONNECT_S has passed"
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + peer_channel.RECONNECT_S + 1)
    third.poll(0.0)
    assert third._watchers["h1"].socket is None
    before = first.statuses["h3"].at
    poll_until(lambda: first.statuses["h3"].at > before, first, third)


def test_finished_watcher_is_not_reconnected(channels: list[PeerChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, third = channels
    first.finished = True
    first.close()
    # A connection without answers is closed after RECONNECT_S in any case, so wait for less than that.
    before_reconnect_s = peer_channel.RECONNECT_S - 0.5
    poll_until(
        lambda: third.statuses["h1"].finished and third._watchers["h1"].socket is None,
        third,
        timeout_s=before_reconnect_s,
    )
    real_clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_clock() + 10.0)
    third.poll(0.0)
    assert third._watchers["h1"].socket is None


def test_messages_of_an_impostor_on_a_watchers_port_are_ignored(port: int) -> None:
    member = PeerChannel(loopback_gang("h3", port))
    with listen(loopback_address(port), port) as listener:
        poll_until(lambda: bool(select.select([listener], [], [], 0)[0]), member)
        channel, _ = listener.accept()
        verdict = {"host": "h1", "number": 1, "token": member._token, "finished": True, "verdict": to_json(VERDICT)}
        channel.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        channel.send(json.dumps(verdict).encode() + b"\n")
        for fields in ({"host": "h2"}, {"token": "of another launch"}, {"number": "one"}):
            channel.send(make_gang("h1", port).sign({**verdict, **fields}))
        for _ in range(5):
            member.poll(0.01)
        assert (member.verdict, member.statuses.keys() - {"h3"}) == (None, set())
        channel.send(make_gang("h1", port).sign(verdict))
        poll_until(lambda: member.verdict == VERDICT, member)
        channel.close()
    member.close()


def test_pause_of_the_supervisor_does_not_age_statuses(channels: list[PeerChannel]) -> None:
    first = channels[0]
    first.statuses["h2"] = PeerStatus(at=10.0, ranks=(rank_state(2),), finished=True)
    first.compensate_pause(5.0)
    assert first.statuses["h2"] == PeerStatus(at=15.0, ranks=(rank_state(2),), finished=True)


def test_host_decides_if_every_watcher_before_it_is_silent_or_finished(port: int) -> None:
    second = PeerChannel(loopback_gang("h2", port))
    third = PeerChannel(loopback_gang("h3", port))
    now = time.monotonic()
    assert second.is_decider(now), "the second watcher must decide if it has received no status"
    for channel, statuses, is_decider in (
        (second, {"h1": PeerStatus(at=now - HOST_SILENT_S + 1)}, False),
        (second, {"h1": PeerStatus(at=now - HOST_SILENT_S - 1)}, True),
        (second, {"h1": PeerStatus(at=now, finished=True)}, True),
        (third, {"h1": PeerStatus(at=now, finished=True), "h2": PeerStatus(at=now)}, False),
        (third, {"h1": PeerStatus(at=now, finished=True), "h2": PeerStatus(at=now - HOST_SILENT_S - 1)}, True),
    ):
        channel.statuses = dict(statuses)
        assert channel.is_decider(now) is is_decider, (channel.gang.me, statuses)
    second.close()
    third.close()


def test_poll_returns_when_a_watched_socket_has_data(head: PeerChannel) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other,
    ):
        channel.bind(("127.0.0.1", 0))
        head.watch_socket(channel)
        other.sendto(b"x", channel.getsockname())
        began = time.monotonic()
        head.poll(10.0)
        assert time.monotonic() - began < 5
        head._selector.unregister(channel)
