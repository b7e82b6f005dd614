"""How the first host of a gang handles each message, and when a supervisor may leave."""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import pytest

from agent.gang import peer_channel, transport
from agent.gang.culprit import HOST_SILENT_S, PeerStatus
from agent.gang.peer_channel import PeerChannel
from agent.gang.protocol import Gang
from agent.gang.transport import listen
from schemas.records import Culprit, to_json
from tests.unit.agent.gang.test_heartbeat import MEMBERS, gang, hung_up, port, rank, until, word

__all__ = ["port"]
VERDICT = Culprit(kind="rank_silent", hosts=("h3",), text="host h3 …", scope="gpu=0", rank=4, phase="training")


@cache
def address_of(port: int) -> str:
    """Return a loopback address of this test only, so that other processes use none of its ports."""
    return "127." + ".".join(str(1 + byte % 254) for byte in secrets.token_bytes(3))


def here(me: str, port: int) -> Gang:
    return gang(me, port, addresses=dict.fromkeys(MEMBERS, address_of(port)))


class Caller:
    """A member that sends line by line."""

    def __init__(self, head: PeerChannel, port: int) -> None:
        self._head, self._port = head, port
        self.channel = socket.create_connection((address_of(port), port))
        self.channel.setblocking(False)
        self._came = b""
        self.greeting = str(self.answer()["greeting"])

    def answer(self) -> dict[str, Any]:
        ends = time.monotonic() + 5
        while b"\n" not in self._came:
            assert time.monotonic() < ends, "no answer"
            self._head.poll(0.005)
            try:
                self._came += self.channel.recv(1 << 16)
            except BlockingIOError:
                continue
        line, _, self._came = self._came.partition(b"\n")
        said = gang("h3", self._port).verify(line)
        assert said is not None
        return said

    def say(self, **over: Any) -> dict[str, Any]:
        self.channel.send(word(self._port, self.greeting, **over))
        return self.answer()

    def gone(self) -> bool:
        ends = time.monotonic() + 5
        while not hung_up(self.channel, self._head):
            if time.monotonic() > ends:
                return False
        return True


@pytest.fixture
def head(port: int) -> Iterator[PeerChannel]:
    made = PeerChannel(here("h1", port))
    yield made
    made.close()


def test_status_is_stored_and_answered_with_its_number(head: PeerChannel, port: int) -> None:
    caller = Caller(head, port)
    answer = caller.say(ranks=[asdict(rank(4))], token="mine")
    assert answer == {"host": "h1", "token": "mine", "number": 1, "finished": False, "aborted": False, "verdict": None}
    assert head.statuses["h3"].ranks == (rank(4),)
    assert not head.statuses["h3"].finished
    assert time.monotonic() - head.statuses["h3"].at < 5
    assert caller.say(number=2, token="mine")["number"] == 2
    caller.channel.close()


def test_finished_is_final(head: PeerChannel, port: int) -> None:
    caller = Caller(head, port)
    caller.say(finished=True)
    assert head.statuses["h3"].finished
    caller.say(number=2, finished=False)
    assert head.statuses["h3"].finished
    caller.channel.close()


@pytest.mark.parametrize("number", [1, 2, 0, -1])
def test_repeated_status_is_refused(head: PeerChannel, port: int, number: int) -> None:
    caller = Caller(head, port)
    caller.say(number=2)
    caller.channel.send(word(port, caller.greeting, number=number))
    assert caller.gone()
    caller.channel.close()


def test_each_launch_numbers_its_own_statuses(head: PeerChannel, port: int) -> None:
    first = Caller(head, port)
    first.say(number=7)
    second = Caller(head, port)
    assert second.say(number=1, token="other")["number"] == 1
    assert first.gone(), "a host has one connection"
    for caller in (first, second):
        caller.channel.close()


def test_only_identified_members_receive_the_verdict(head: PeerChannel, port: int) -> None:
    known, stranger = Caller(head, port), Caller(head, port)
    known.say(number=4)
    head.announce_verdict(VERDICT)
    answer = known.answer()
    assert (answer["number"], answer["verdict"]["text"]) == (4, VERDICT.text)
    assert not hung_up(stranger.channel, head)
    assert stranger._came == b""
    for caller in (known, stranger):
        caller.channel.close()


def test_closing_channel_sends_finished(head: PeerChannel, port: int) -> None:
    caller = Caller(head, port)
    caller.say()
    head.finished = True
    head.close()
    assert json.loads(caller.channel.recv(1 << 16).partition(b" ")[2])["finished"] is True
    assert caller.channel.recv(1) == b""
    caller.channel.close()


def test_all_members_and_some_strangers_can_connect_at_once(head: PeerChannel, port: int) -> None:
    most = transport.MAX_UNPROVEN + len(MEMBERS)
    callers = [Caller(head, port) for _ in range(most)]
    assert not any(hung_up(caller.channel, head) for caller in callers)
    callers.append(Caller(head, port))
    assert callers[0].gone(), "the oldest makes room"
    assert not any(hung_up(caller.channel, head) for caller in callers[1:])
    assert callers[-1].say()["number"] == 1, "the new connection is accepted"
    for caller in callers:
        caller.channel.close()


def test_identified_member_may_be_silent_longer(head: PeerChannel, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known, stranger = Caller(head, port), Caller(head, port)
    known.say()
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + transport.PROOF_S + 1)
    head.poll(0.0)
    assert (hung_up(known.channel, head), hung_up(stranger.channel, head)) == (False, True)
    monkeypatch.setattr(time, "monotonic", lambda: real() + 2 * HOST_SILENT_S + 1)
    head.poll(0.0)
    assert hung_up(known.channel, head)
    for caller in (known, stranger):
        caller.channel.close()


# ---- a member, and its two watchers ----


@pytest.fixture
def three(port: int) -> Iterator[list[PeerChannel]]:
    result = [PeerChannel(here(host, port)) for host in MEMBERS]
    until(lambda: all(set(MEMBERS) <= set(each.statuses) for each in result), *result)
    yield result
    for each in result:
        each.close()


def test_both_watchers_learn_that_a_member_finished(three: list[PeerChannel]) -> None:
    one, two, last = three
    last.finished = True
    last.publish_status([rank(4), rank(5)], at_once=True)
    until(lambda: one.statuses["h3"].finished and two.statuses["h3"].finished, one, two)
    assert (one.statuses["h3"].ranks, last.statuses["h3"].finished) == ((rank(4), rank(5)), True)
    assert not one.statuses["h2"].finished


def test_status_is_sent_once_a_second_or_at_once(three: list[PeerChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    last = three[2]
    last.publish_status([], at_once=True)
    before, now = last._number, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    last.publish_status([rank(4)])
    assert last._number == before
    assert last.statuses["h3"].ranks == (rank(4),), "its own status is always current"
    last.publish_status([], at_once=True)
    assert last._number == before + 1
    monkeypatch.setattr(time, "monotonic", lambda: now + peer_channel.STATUS_INTERVAL_S + 0.1)
    last.publish_status([])
    assert last._number == before + 2


def test_delivery_needs_an_answer_of_every_watcher(three: list[PeerChannel]) -> None:
    one, two, last = three
    last.publish_status([], at_once=True)
    assert not last.is_delivered()
    until_answered(last, one)
    assert not last.is_delivered(), "the other one has not answered"
    until_answered(last, two)
    assert last.is_delivered()


def until_answered(member: PeerChannel, watcher: PeerChannel) -> None:
    ends = time.monotonic() + 5
    while member._answered[watcher.gang.me] < member._number:
        assert time.monotonic() < ends
        watcher.poll(0.005)
        member.poll(0.005)


def test_delivery_does_not_wait_for_finished_or_lost_watchers(three: list[PeerChannel]) -> None:
    one, two, last = three
    last.publish_status([], at_once=True)
    until_answered(last, one)
    known = last.statuses["h2"]
    last.statuses["h2"] = PeerStatus(at=known.at, finished=True)
    assert last.is_delivered()
    last.statuses["h2"] = PeerStatus(at=time.monotonic() - peer_channel.LOST_S - 1)
    assert last.is_delivered()
    last.statuses["h2"] = PeerStatus(at=time.monotonic())
    assert not last.is_delivered()
    assert two.gang.me == "h2"


def test_first_verdict_is_kept(three: list[PeerChannel]) -> None:
    one, two, last = three
    other = Culprit(kind="cut_off", hosts=("h2",), text="host h2 …")
    one.announce_verdict(VERDICT)
    until(lambda: last.verdict == VERDICT, last)
    two.announce_verdict(other)
    until_answered(last, two)
    last.publish_status([], at_once=True)
    until_answered(last, two)
    assert last.verdict == VERDICT
    assert last.statuses["h1"].ranks == ()


def test_silent_watcher_is_reconnected(three: list[PeerChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, last = three
    line = last._watchers["h1"]
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + peer_channel.RECONNECT_S - 0.5)
    last.poll(0.0)
    assert last._watchers["h1"] is line, "not yet"
    monkeypatch.setattr(time, "monotonic", lambda: real() + peer_channel.RECONNECT_S + 1)
    last.poll(0.0)
    assert last._watchers["h1"].socket is None
    before = one.statuses["h3"].at
    until(lambda: one.statuses["h3"].at > before, one, last)


def test_finished_watcher_is_not_reconnected(three: list[PeerChannel], monkeypatch: pytest.MonkeyPatch) -> None:
    one, _, last = three
    one.finished = True
    one.close()
    gone = peer_channel.RECONNECT_S - 0.5  # at once, not because answers are missing
    until(lambda: last.statuses["h1"].finished and last._watchers["h1"].socket is None, last, patience_s=gone)
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 10.0)
    last.poll(0.0)
    assert last._watchers["h1"].socket is None


def test_impostor_on_a_watchers_port_is_ignored(port: int) -> None:
    member = PeerChannel(here("h3", port))
    with listen(address_of(port), port) as listener:
        until(lambda: bool(select.select([listener], [], [], 0)[0]), member)
        channel, _ = listener.accept()
        verdict = {"host": "h1", "number": 1, "token": member._token, "finished": True, "verdict": to_json(VERDICT)}
        channel.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        channel.send(json.dumps(verdict).encode() + b"\n")
        for over in ({"host": "h2"}, {"token": "of another launch"}, {"number": "one"}):
            channel.send(gang("h1", port).sign({**verdict, **over}))
        for _ in range(5):
            member.poll(0.01)
        assert (member.verdict, member.statuses.keys() - {"h3"}) == (None, set())
        channel.send(gang("h1", port).sign(verdict))
        until(lambda: member.verdict == VERDICT, member)
        channel.close()
    member.close()


def test_pause_is_compensated_in_the_statuses(three: list[PeerChannel]) -> None:
    one = three[0]
    one.statuses["h2"] = PeerStatus(at=10.0, ranks=(rank(2),), finished=True)
    one.compensate_pause(5.0)
    assert one.statuses["h2"] == PeerStatus(at=15.0, ranks=(rank(2),), finished=True)


def test_watcher_decides_if_all_before_it_are_silent_or_finished(port: int) -> None:
    members = ("h1", "h2", "h3")
    two = PeerChannel(here("h2", port))
    last = PeerChannel(here("h3", port))
    now = time.monotonic()
    assert two.is_decider(now), "no statuses yet"
    for each, statuses, so in (
        (two, {"h1": PeerStatus(at=now - HOST_SILENT_S + 1)}, False),
        (two, {"h1": PeerStatus(at=now - HOST_SILENT_S - 1)}, True),
        (two, {"h1": PeerStatus(at=now, finished=True)}, True),
        (last, {"h1": PeerStatus(at=now, finished=True), "h2": PeerStatus(at=now)}, False),
        (last, {"h1": PeerStatus(at=now, finished=True), "h2": PeerStatus(at=now - HOST_SILENT_S - 1)}, True),
    ):
        each.statuses = dict(statuses)
        assert each.is_decider(now) is so, (each.gang.me, statuses, members)
    two.close()
    last.close()


def test_poll_returns_for_data_on_another_socket(head: PeerChannel) -> None:
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
