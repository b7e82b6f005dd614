"""Exchange statuses between the supervisors of a gang (the hosts of one multi-node launch) over TCP.

A supervisor sends its status once per second, and when a rank starts, fails or ends. The first two members are watchers, which
listen on their fabric addresses. Every member sends the state of its ranks to the watchers, and they answer. The first watcher
decides which host or rank is at fault. If it is silent, the second watcher decides; if both are silent, each host decides for
itself. So the loss of a watcher is detected too.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.gang.culprit import HOST_SILENT_S, PeerStatus
from agent.gang.protocol import Gang
from agent.gang.rank_state import RankState, parse_rank_state
from agent.gang.transport import REDIAL_S, BufferedConnection, GangListener, listen, own_address, resolve
from schemas.decode import culprit_from_json
from schemas.records import Culprit, to_json

STATUS_INTERVAL_S = 1.0
RECONNECT_S = 3.0
"""A connection that has brought no answer for this long is replaced, because its packets may be delayed or lost."""
LOST_S = 5.0
"""At its exit, a host does not wait for a peer that has been silent for this long."""
CLEANUP_INTERVAL_S = 0.1
_NO_STATUS = PeerStatus(at=float("-inf"))


class PeerChannel:
    """The connections of one supervisor to its peers. Only `poll` blocks.

    Raises:
        GangError: this host is a watcher and cannot listen on its address and port. Or, with `Gang.members_only`, this watcher
            cannot resolve the name of a member.
    """

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.statuses: dict[str, PeerStatus] = {}
        self.verdict: Culprit | None = None
        """The culprit, as this host decided it or received it from a watcher; None while there is none."""
        self.finished = self.aborted = False
        """Whether this host has finished, and whether it ended its ranks itself; part of its status."""
        self._token = secrets.token_hex(8)
        """Identifies this supervisor in this launch, so that replayed messages of another launch are not accepted."""
        self._number = 0
        """Number of the newest status that this host has sent."""
        self._answered: dict[str, int] = {}
        """Watcher -> number of the newest status of this host that the watcher has answered."""
        self._numbers: dict[tuple[str, str], int] = {}
        """Member and token of its supervisor -> number of the newest status received from that supervisor."""
        self._selector = selectors.DefaultSelector()
        self._listener: GangListener | None = None
        if gang.me in gang.watchers:
            channel = listen(own_address(gang), gang.port_of(gang.me), gang.allowed_addresses)
            greeting = {"host": gang.me, "greeting": self._token}
            self._listener = GangListener(gang, channel, self._selector, self._receive_status, greeting)
        self._watchers = {host: BufferedConnection() for host in gang.watchers if host != gang.me}
        self._dial_at = dict.fromkeys(self._watchers, 0.0)
        self._send_at = self._cleanup_at = 0.0

    def watch_socket(self, channel: socket.socket) -> None:
        """Let `poll` return as soon as `channel`, a socket of the caller, has data."""
        self._selector.register(channel, selectors.EVENT_READ, lambda: None)

    def poll(self, seconds: float) -> None:
        """Wait up to `seconds` for messages, and process them."""
        self._dial()
        for key, _ in self._selector.select(seconds):
            key.data()
        if time.monotonic() > self._cleanup_at:
            self._cleanup_at = time.monotonic() + CLEANUP_INTERVAL_S
            if self._listener:
                self._listener.flush()
                self._listener.drop_silent(2 * HOST_SILENT_S)
            for connection in self._watchers.values():
                connection.send(b"")

    def publish_status(self, ranks: Sequence[RankState], *, at_once: bool = False) -> None:
        """Send the state of this host's ranks to the watchers: only once per STATUS_INTERVAL_S, unless `at_once`."""
        now = time.monotonic()
        self.statuses[self.gang.me] = PeerStatus(
            at=now, ranks=tuple(ranks), finished=self.finished, aborted=self.aborted
        )
        if now < self._send_at and not at_once:
            return
        self._send_at, self._number = now + STATUS_INTERVAL_S, self._number + 1
        message = {
            **self._header(self._token, self._number),
            "ranks": [to_json(rank) for rank in ranks],
        }
        for host, connection in self._watchers.items():
            line = self.gang.sign({**message, "greeting": connection.greeting})
            if connection.greeting and not connection.send(line):
                self._disconnect(host)

    def _header(self, token: str, number: int) -> dict[str, Any]:
        return {
            "host": self.gang.me,
            "token": token,
            "number": number,
            "finished": self.finished,
            "aborted": self.aborted,
        }

    def announce_verdict(self, verdict: Culprit) -> None:
        """Announce to every connected member that the gang ends, and why."""
        self.verdict = verdict
        self._answer_all()

    def is_decider(self, now: float) -> bool:
        """Return whether this host names the culprit. It does if no watcher with precedence can do so.

        The first watcher has precedence over the second, and both over the other hosts. A watcher cannot name the culprit if it
        has finished, has been silent for more than HOST_SILENT_S, or never sent a status.
        """
        watchers = self.gang.watchers
        before = watchers[: watchers.index(self.gang.me)] if self.gang.me in watchers else watchers
        return not any(
            host in self.statuses and not self.statuses[host].finished and now - self.statuses[host].at <= HOST_SILENT_S
            for host in before
        )

    def is_delivered(self) -> bool:
        """Return whether every reachable watcher has answered this host's last status, and all answers to members are sent."""
        now = time.monotonic()
        reachable = (
            host for host in self._watchers if not self._status(host).finished and now - self._status(host).at < LOST_S
        )
        answered = all(self._answered.get(host, 0) >= self._number for host in reachable)
        pending = self._listener is not None and any(connection.pending for connection in self._listener.connections)
        return answered and not pending

    def compensate_pause(self, seconds: float) -> None:
        """Do not count a pause of this process, `seconds` long, towards the age of the statuses."""
        self.statuses = {host: replace(status, at=status.at + seconds) for host, status in self.statuses.items()}

    def close(self) -> None:
        """Send the last answers and close all connections."""
        self._answer_all()
        for host in self._watchers:
            self._disconnect(host)
        if self._listener:
            self._listener.close()
        self._selector.close()

    def _status(self, host: str) -> PeerStatus:
        return self.statuses.get(host, _NO_STATUS)

    def _update_status(self, host: str, message: Mapping[str, Any], ranks: tuple[RankState, ...]) -> None:
        """Store a status. `finished` and `aborted` stay true once they were true in any message of `host`.

        A watcher sends statuses and answers over different connections, so an older message may arrive after a newer one.
        """
        before = self._status(host)
        self.statuses[host] = PeerStatus(
            at=time.monotonic(),
            ranks=ranks,
            finished=before.finished or bool(message.get("finished")),
            aborted=before.aborted or bool(message.get("aborted")),
        )

    # --- connections to the watchers

    def _dial(self) -> None:
        now = time.monotonic()
        for host, connection in self._watchers.items():
            if connection.socket and now - connection.heard_at > RECONNECT_S:
                self._disconnect(host)
            elif not connection.socket and not self._status(host).finished and now >= self._dial_at[host]:
                self._dial_at[host] = now + REDIAL_S
                self._connect(host, now)

    def _connect(self, host: str, now: float) -> None:
        with contextlib.suppress(OSError):
            family, address = resolve(self.gang.addresses[host], self.gang.port_of(host))
            channel = socket.socket(family, socket.SOCK_STREAM)
            channel.setblocking(False)
            channel.connect_ex(address)
            self._watchers[host] = BufferedConnection(channel, now)
            self._selector.register(channel, selectors.EVENT_READ, lambda: self._read_watcher(host))

    def _disconnect(self, host: str) -> None:
        connection = self._watchers[host]
        if connection.socket:
            self._selector.unregister(connection.socket)
            connection.close()
            self._watchers[host] = BufferedConnection()

    def _read_watcher(self, host: str) -> None:
        connection = self._watchers[host]
        lines = connection.receive()
        for line in lines or ():
            message = self.gang.verify(line)
            if not message or message.get("host") != host:
                continue
            if "greeting" in message:
                connection.greeting, self._send_at = str(message["greeting"]), 0.0
            elif message.get("token") == self._token:
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    self._receive_answer(host, connection, message)
        if lines is None:
            self._disconnect(host)

    def _receive_answer(self, host: str, connection: BufferedConnection, message: Mapping[str, Any]) -> None:
        connection.heard_at = time.monotonic()
        self._answered[host] = max(self._answered.get(host, 0), int(message["number"]))
        self._update_status(host, message, self._status(host).ranks)
        if message["verdict"] and self.verdict is None:
            self.verdict = culprit_from_json(message["verdict"])

    # --- connections from the members

    def _receive_status(self, connection: BufferedConnection, message: Mapping[str, Any]) -> bool:
        """Store and answer the status of a member; return False if the message is not a valid status."""
        try:
            host, number, token = str(message["host"]), int(message["number"]), str(message["token"])
            ranks = tuple(parse_rank_state(document) for document in message["ranks"])
        except (KeyError, TypeError, ValueError):
            return False
        # Refuse replayed messages, which were sent to another launch or have already been received.
        if message.get("greeting") != self._token or host not in self.gang.members or host == self.gang.me:
            return False
        if number <= self._numbers.get((host, token), 0):
            return False
        self._numbers[host, token] = number
        connection.token, connection.number = token, number
        self._update_status(host, message, ranks)
        if self._listener:
            self._listener.identify(connection, host)
        self._answer(connection)
        return True

    def _answer(self, connection: BufferedConnection) -> None:
        verdict = to_json(self.verdict) if self.verdict else None
        message = {**self._header(connection.token, connection.number), "verdict": verdict}
        connection.send(self.gang.sign(message))

    def _answer_all(self) -> None:
        for connection in self._listener.connections if self._listener else ():
            if connection.host:
                self._answer(connection)
