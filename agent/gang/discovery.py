"""Who of a gang is there, where nobody goes from host to host and asks: its hosts meet at the first of them, or the second.

Pods start when their images are there, and one host measures longer than another: whoever comes first waits. When all are there,
or the time is over, the one that they met at tells those who came, in the plan's order. Each line is sealed with the run's nonce.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from agent.gang.protocol import ExchangeError, Gang, Line, listen, own_address, resolve

PORT_AFTER = 2
"""The meeting's port after the gang's own, which two hosts listen on for heartbeats."""
REDIAL_S = 1.0
PROOF_S = 5.0
ANSWER_S = 15.0
"""In which whoever was met at tells the others, after its own time is over."""
MOST_STRANGERS = 16


def meet(gang: Gang, within_s: float, say: Callable[[str], None] = lambda _: None) -> list[str]:
    """The members that are there, in the plan's order; empty where this host met nobody.

    Args:
        gang: all that are expected.
        within_s: how long to wait at the first host, and again at the second where the first does not come.
        say: takes a line for people.

    Raises:
        ExchangeError: this host is the one to meet at, and cannot listen.
    """
    for place in gang.watchers:
        say(f"waiting up to {within_s:g} s for {len(gang.members) - 1} others, at {place}")
        if place == gang.me:
            return _Host(gang).gather(within_s)
        if members := _called(gang, place, within_s):
            return members
        say(f"{place} was not there within {within_s:g} s")
    return []


def _port(gang: Gang) -> int:
    return gang.port + PORT_AFTER


class _Host:
    """The end that the others come to."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._selector = selectors.DefaultSelector()
        self._there: dict[str, Line] = {}
        self._strangers: dict[Line, float] = {}

    def gather(self, within_s: float) -> list[str]:
        """Waits until all are there or the time is over, and tells them. Raises ExchangeError."""
        ends = time.monotonic() + within_s
        listener = self._listener(ends)
        self._selector.register(listener, selectors.EVENT_READ, None)
        try:
            while len(self._there) < len(self._gang.members) - 1 and (left := ends - time.monotonic()) > 0:
                for key, _ in self._selector.select(min(left, REDIAL_S)):
                    if key.data is None:
                        self._accept(listener)
                    else:
                        self._hear(key.data)
                self._drop_silent()
            return self._answer()
        finally:
            for line in (*self._there.values(), *self._strangers):
                line.close()
            listener.close()
            self._selector.close()

    def _listener(self, ends: float) -> socket.socket:
        """A pod's own name may take a moment to stand for it."""
        while True:
            try:
                return listen(own_address(self._gang), _port(self._gang), what="the gang's hosts to come")
            except (ExchangeError, OSError) as error:
                if time.monotonic() + REDIAL_S > ends:
                    raise ExchangeError(str(error)) from None
                time.sleep(REDIAL_S)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            channel, _ = listener.accept()
            channel.setblocking(False)
            if len(self._strangers) >= MOST_STRANGERS:
                self._drop(next(iter(self._strangers)))
            line = Line(channel, time.monotonic())
            self._strangers[line] = time.monotonic()
            self._selector.register(channel, selectors.EVENT_READ, line)

    def _hear(self, line: Line) -> None:
        said = line.receive()
        if said is None:
            self._drop(line)
        for text in said or ():
            found = self._gang.open(text)
            host = str(found.get("host")) if found else ""
            if host in self._gang.members and host != self._gang.me and line in self._strangers:
                if old := self._there.pop(host, None):  # it came again: what it had was lost on the way
                    self._drop(old)
                del self._strangers[line]
                self._there[host] = line

    def _drop(self, line: Line) -> None:
        self._strangers.pop(line, None)
        self._there = {host: other for host, other in self._there.items() if other is not line}
        if line.socket:
            with suppress(KeyError, ValueError):
                self._selector.unregister(line.socket)
        line.close()

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for line in [line for line, since in self._strangers.items() if now - since > PROOF_S]:
            self._drop(line)

    def _answer(self) -> list[str]:
        members = [host for host in self._gang.members if host == self._gang.me or host in self._there]
        word = self._gang.seal(json.dumps({"members": members}).encode())
        for line in self._there.values():
            line.send(word)
        ends = time.monotonic() + ANSWER_S
        while any(line.pending for line in self._there.values()) and time.monotonic() < ends:
            time.sleep(0.05)
            for line in self._there.values():
                line.send(b"")
        return members


def _called(gang: Gang, place: str, within_s: float) -> list[str]:
    """Who is there, as the host at `place` tells; empty where it does not answer in time."""
    ends = time.monotonic() + within_s
    while (left := ends - time.monotonic()) > 0:
        try:
            _, where = resolve(gang.addresses[place], _port(gang))
            with socket.create_connection(where[:2], timeout=min(left, 10.0)) as channel:
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                channel.sendall(gang.seal(json.dumps({"host": gang.me}).encode()))
                # It has begun to wait later than this host perhaps, and waits its own time.
                if members := _answered(gang, channel, within_s + ANSWER_S):
                    return members
        except OSError:
            pass
        time.sleep(min(REDIAL_S, max(0.0, ends - time.monotonic())))
    return []


def _answered(gang: Gang, channel: socket.socket, within_s: float) -> list[str]:
    channel.settimeout(within_s)
    text = b""
    while not text.endswith(b"\n"):
        more = channel.recv(1 << 16)
        if not more:
            return []
        text += more
    found: dict[str, Any] = gang.open(text.rstrip(b"\n")) or {}
    named: Sequence[Any] = found.get("members", ())
    members = [host for host in gang.members if host in named]
    return members if gang.me in members else []
