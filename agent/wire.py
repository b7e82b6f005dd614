"""Lines between the supervisors of a gang: sealed with the run's nonce, bounded, never waited for."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from schemas import documents

MOST_BYTES = 1 << 17
"""Of a line, and of what waits to be sent."""
BACKLOG = 128


class ExchangeError(Exception):
    """This host cannot listen; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Gang:
    """Who talks with whom."""

    me: str
    members: tuple[str, ...]
    addresses: Mapping[str, str]
    """Member -> address, of the first two at least."""
    port: int
    nonce: str
    about: str
    """Run, stage and gang: lines about another one are not heard."""

    @property
    def watchers(self) -> tuple[str, ...]:
        """The members that listen, and of which the first that is there decides."""
        return self.members[:2]

    @property
    def awaited(self) -> tuple[str, ...]:
        """Those from whom this member should hear."""
        heard = self.members if self.me in self.watchers else self.watchers
        return tuple(host for host in heard if host != self.me)

    def port_of(self, watcher: str) -> int:
        """Where that watcher listens: each on a port of its own, since hosts of a trial may be one machine."""
        return self.port + self.watchers.index(watcher)

    def seal(self, body: bytes) -> bytes:
        """A line: the code, a space, the text."""
        return self._code(body) + b" " + body + b"\n"

    def open(self, line: bytes) -> dict[str, Any] | None:
        """What a line says; None where it is not one of ours."""
        code, _, body = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(body)):
            return None
        try:
            found = documents.parse(body, source="a line", max_bytes=MOST_BYTES)
        except documents.DocumentError:
            return None
        return found if isinstance(found, dict) else None

    def _code(self, body: bytes) -> bytes:
        about = "\n".join([self.about, *self.members, ""]).encode()
        return hmac.new(self.nonce.encode(), about + body, "sha256").hexdigest().encode()


class Line:
    """A socket that neither side may fill without end."""

    def __init__(self, channel: socket.socket | None, now: float) -> None:
        self.socket, self.heard_at = channel, now
        self.greeting = ""
        """What the other side's launch is known by."""
        self.pending = b""
        self._incoming = b""

    def send(self, line: bytes) -> bool:
        """Sends what can be sent now, the rest later; False where the other side does not take it."""
        if not self.socket:
            return True
        self.pending += line
        try:
            while self.pending:
                self.pending = self.pending[self.socket.send(self.pending) :]
        except BlockingIOError:
            return len(self.pending) <= MOST_BYTES
        except OSError:
            self.pending = b""
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """The lines that have come; None where the connection has ended, or a line does not."""
        try:
            data = self.socket.recv(1 << 16) if self.socket else b""
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        return lines if len(self._incoming) <= MOST_BYTES else None

    def close(self) -> None:
        """Ends it."""
        if self.socket:
            self.socket.close()
            self.socket = None


def listen(address: str, port: int) -> socket.socket:
    """A listener on this address alone.

    Raises:
        ExchangeError: it cannot be had.
    """
    channel = None
    try:
        family, where = resolve(address, port)
        channel = socket.socket(family, socket.SOCK_STREAM)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        channel.bind(where)
        channel.listen(BACKLOG)
        channel.setblocking(False)
    except OSError as error:
        if channel:
            channel.close()
        raise ExchangeError(
            f"cannot listen for the gang's heartbeats on {address} port {port}: {error.strerror or error}; "
            "set rackproof_rendezvous_port, after which this port comes"
        ) from None
    return channel


@cache
def resolve(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Family and address to bind or to connect to. Asked once: a name server may take its time, or be cut off later."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return family, where


def own_address(gang: Gang) -> str:
    """My address as the plan has it; where that is not this host's, or its loopback, the one from which it reaches the gang."""
    mine = gang.addresses[gang.me]
    with contextlib.suppress(OSError):
        family, where = resolve(mine, 0)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(where)
        if not _loopback(mine) or all(_loopback(address) for address in gang.addresses.values()):
            return mine
    other = next(gang.addresses[host] for host in gang.members if host != gang.me)
    with contextlib.suppress(OSError):
        family, where = resolve(other, gang.port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return mine


def _loopback(address: str) -> bool:
    """A host's own name often stands for 127.0.1.1 on that host."""
    return str(resolve(address, 0)[1][0]).startswith(("127.", "::1"))
