"""How the supervisors of a gang hear of one another while torch still waits: a line a moment, over TCP, to two of them.

The first two members listen, each on its fabric address; every member tells both how its ranks are, and both answer. The
first one decides who is at fault; the second does where the first is silent, so that the loss of either is named too. Each
line carries a code made with the run's nonce: who does not have it is not heard.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from agent.gang.culprit import HOST_SILENT_S, RankState, Word, rank_from_json
from agent.gang.protocol import Gang, Line, listen, own_address, resolve
from schemas.records import Culprit, culprit_from_json, to_json

WORD_S = 1.0
PROOF_S = 5.0
"""Within which whoever connects must have said something with a right code."""
REDIAL_S = 1.0
DEAF_S = 3.0
"""Without an answer for so long, the connection is made anew: packets of the old one may come late or never."""
LOST_S = 5.0
"""Nobody who has been silent for so long is waited for in parting."""
TIDY_S = 0.1
MOST_STRANGERS = 16


class Exchange:
    """One supervisor's end. Nothing here waits: `step` does what can be done now.

    Raises:
        ExchangeError: it is to listen, and the address or the port cannot be had.
    """

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.words: dict[str, Word] = {}
        self.verdict: Culprit | None = None
        """Decided here or heard from a watcher."""
        self.finished = self.left = False
        """Of this host, as in its word."""
        self._token = secrets.token_hex(8)
        """Of this launch: what was recorded in another one is not heard again."""
        self._number = 0
        self._answered: dict[str, int] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        if gang.me in gang.watchers:
            self._listener = listener = listen(own_address(gang), gang.port_of(gang.me), gang.admitted)
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._callers: list[_Caller] = []
        self._dialled = {host: Line(None, 0.0) for host in gang.watchers if host != gang.me}
        self._dial_at = dict.fromkeys(self._dialled, 0.0)
        self._say_at = self._tidy_at = 0.0

    def also(self, channel: socket.socket) -> None:
        """Another socket for whose news `step` returns early."""
        self._selector.register(channel, selectors.EVENT_READ, lambda: None)

    def step(self, seconds: float) -> None:
        """Waits for news up to `seconds`, and takes in what was said."""
        self._dial()
        for key, _ in self._selector.select(seconds):
            key.data()
        if time.monotonic() > self._tidy_at:
            self._tidy_at = time.monotonic() + TIDY_S
            self._drop_silent()

    def say(self, ranks: Sequence[RankState], *, at_once: bool = False) -> None:
        """Tells the watchers how my ranks are, every WORD_S or at once."""
        now = time.monotonic()
        self.words[self.gang.me] = Word(at=now, ranks=tuple(ranks), finished=self.finished, left=self.left)
        if now < self._say_at and not at_once:
            return
        self._say_at, self._number = now + WORD_S, self._number + 1
        message = {
            "host": self.gang.me,
            "token": self._token,
            "number": self._number,
            "finished": self.finished,
            "left": self.left,
            "ranks": [to_json(rank) for rank in ranks],
        }
        for host, dialled in self._dialled.items():
            if dialled.greeting and not dialled.send(self._sealed({**message, "greeting": dialled.greeting})):
                self._hang_up(host)

    def end(self, verdict: Culprit) -> None:
        """Tells everyone who is connected that the gang is to end, and why."""
        self.verdict = verdict
        self._tell_callers()

    def decides(self, now: float) -> bool:
        """Whether it is for me to decide: every watcher before me is silent or finished."""
        watchers = self.gang.watchers
        before = watchers[: watchers.index(self.gang.me)] if self.gang.me in watchers else watchers
        return not any(
            host in self.words and not self.words[host].finished and now - self.words[host].at <= HOST_SILENT_S
            for host in before
        )

    def heard_out(self) -> bool:
        """Whether every watcher that is still there has answered my last word, and every caller knows the verdict."""
        now = time.monotonic()
        there = (
            host
            for host in self._dialled
            if not self.words.get(host, _NOTHING).finished and now - self.words.get(host, _NOTHING).at < LOST_S
        )
        told = all(self._answered.get(host, 0) >= self._number for host in there)
        return told and not any(caller.line.pending for caller in self._callers)

    def forgive(self, seconds: float) -> None:
        """While I did not run myself, nobody was silent."""
        self.words = {host: replace(word, at=word.at + seconds) for host, word in self.words.items()}

    def close(self) -> None:
        """Hangs up."""
        self._tell_callers()
        for host in self._dialled:
            self._hang_up(host)
        for caller in self._callers:
            caller.line.close()
        if self._listener:
            self._listener.close()
        self._selector.close()

    def _sealed(self, message: Mapping[str, Any]) -> bytes:
        return self.gang.seal(json.dumps(message).encode())

    # --- to the watchers

    def _dial(self) -> None:
        now = time.monotonic()
        for host, line in self._dialled.items():
            gone = self.words.get(host, _NOTHING).finished
            if line.socket and now - line.heard_at > DEAF_S:
                self._hang_up(host)
            elif not line.socket and not gone and now >= self._dial_at[host]:
                self._dial_at[host] = now + REDIAL_S
                self._call(host, now)

    def _call(self, host: str, now: float) -> None:
        with contextlib.suppress(OSError):
            family, address = resolve(self.gang.addresses[host], self.gang.port_of(host))
            channel = socket.socket(family, socket.SOCK_STREAM)
            channel.setblocking(False)
            channel.connect_ex(address)
            self._dialled[host] = Line(channel, now)
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._answer(host))

    def _hang_up(self, host: str) -> None:
        line = self._dialled[host]
        if line.socket:
            self._selector.unregister(line.socket)
            line.close()
            self._dialled[host] = Line(None, 0.0)

    def _answer(self, host: str) -> None:
        dialled = self._dialled[host]
        lines = dialled.receive()
        for line in lines or ():
            said = self.gang.open(line)
            if not said or said.get("host") != host:
                continue
            if "greeting" in said:
                dialled.greeting, self._say_at = str(said["greeting"]), 0.0
            elif said.get("token") == self._token:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    self._take_answer(host, dialled, said)
        if lines is None:
            self._hang_up(host)

    def _take_answer(self, host: str, dialled: Line, said: Mapping[str, Any]) -> None:
        dialled.heard_at = time.monotonic()
        self._answered[host] = max(self._answered.get(host, 0), int(said["number"]))
        self._hear_word(host, said, self.words.get(host, _NOTHING).ranks)
        if said["verdict"] and self.verdict is None:
            self.verdict = culprit_from_json(said["verdict"])

    def _hear_word(self, host: str, said: Mapping[str, Any], ranks: tuple[RankState, ...]) -> None:
        """Of a watcher two lines tell, its own word and its answers: who was said to have ended has, whichever comes first."""
        before = self.words.get(host, _NOTHING)
        self.words[host] = Word(
            at=time.monotonic(),
            ranks=ranks,
            finished=before.finished or bool(said.get("finished")),
            left=before.left or bool(said.get("left")),
        )

    # --- of those who call

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            channel, _ = listener.accept()
            channel.setblocking(False)
            caller = _Caller(Line(channel, time.monotonic()))
            self._callers.append(caller)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._hear, caller))
            caller.line.send(self._sealed({"host": self.gang.me, "greeting": self._token}))
        strangers = [other for other in self._callers if not other.host]
        for stranger in strangers[: -(MOST_STRANGERS + len(self.gang.members))]:
            self._turn_away(stranger)

    def _hear(self, caller: _Caller) -> None:
        lines = caller.line.receive()
        for line in lines or ():
            if not self._take(caller, line):
                lines = None
                break
        if lines is None:
            self._turn_away(caller)

    def _take(self, caller: _Caller, line: bytes) -> bool:
        """One line of a caller; False where it is none of ours."""
        said = self.gang.open(line)
        if not said:
            return False
        try:
            host, number, token = str(said["host"]), int(said["number"]), str(said["token"])
            ranks = tuple(rank_from_json(item) for item in said["ranks"])
        except (KeyError, TypeError, ValueError):
            return False
        # What was said before, or to another launch, proves nothing: somebody may have recorded it.
        if said.get("greeting") != self._token or host not in self.gang.members or host == self.gang.me:
            return False
        if number <= self._numbers.get((host, token), 0):
            return False
        self._numbers[host, token] = number
        caller.host, caller.token, caller.number = host, token, number
        caller.line.heard_at = time.monotonic()
        self._hear_word(host, said, ranks)
        for other in [other for other in self._callers if other.host == host and other is not caller]:
            self._turn_away(other)
        self._tell(caller)
        return True

    def _tell(self, caller: _Caller) -> None:
        message = {
            "host": self.gang.me,
            "token": caller.token,
            "number": caller.number,
            "finished": self.finished,
            "left": self.left,
            "verdict": to_json(self.verdict) if self.verdict else None,
        }
        caller.line.send(self._sealed(message))

    def _tell_callers(self) -> None:
        for caller in self._callers:
            if caller.host:
                self._tell(caller)

    def _turn_away(self, caller: _Caller) -> None:
        if caller in self._callers and caller.line.socket:
            self._selector.unregister(caller.line.socket)
            caller.line.close()
            self._callers.remove(caller)

    def _drop_silent(self) -> None:
        now = time.monotonic()
        for caller in list(self._callers):
            caller.line.send(b"")
            if now - caller.line.heard_at > (PROOF_S if not caller.host else 2 * HOST_SILENT_S):
                self._turn_away(caller)
        for line in self._dialled.values():
            line.send(b"")


_NOTHING = Word(at=float("-inf"))


class _Caller:
    """Somebody who connected; nobody, until a line proves who."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.host = self.token = ""
        self.number = 0
