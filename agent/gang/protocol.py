"""Lines between the supervisors of a gang: sealed with the run's nonce, bounded, never waited for."""

from __future__ import annotations

import contextlib
import hmac
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from agent.gang.allow_list import admit_only
from schemas import documents
from schemas.errors import RackproofError
from schemas.plans import Plan, PlannedHost

MOST_BYTES = 1 << 17
"""Of a line, and of what waits to be sent."""
BACKLOG = 128


class ExchangeError(RackproofError):
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
    closed: bool = False
    """Only from the members' addresses can anybody connect."""

    @classmethod
    def of(
        cls, plan: Plan, host: PlannedHost, stage: str, members: Sequence[str], port: int, *, closed: bool = False
    ) -> Gang:
        """These members of a plan, which meet at `port`: heartbeats go beside, on the next two."""
        return cls(
            me=host.name,
            members=tuple(members),
            addresses={name: plan.host(name).address for name in members},
            port=port + 1,
            nonce=plan.nonce,
            about=f"{plan.run_id} {stage} {host.gang}",
            closed=closed,
        )

    @property
    def secret_name(self) -> str:
        """By which the members' ranks find each other in the store: nobody who lacks the nonce can guess it."""
        return self._code(b"rendezvous").decode()[:32]

    @property
    def admitted(self) -> frozenset[str]:
        """Numeric addresses from which somebody may connect; empty: from everywhere.

        Raises:
            ExchangeError: a member's name cannot be resolved here.
        """
        if not self.closed:
            return frozenset()
        return frozenset(number for name in self.addresses.values() for number in _numbers(name))

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


def listen(
    address: str, port: int, admitted: Collection[str] = (), *, what: str = "the gang's heartbeats"
) -> socket.socket:
    """A listener on this address alone, for connections from it and from the `admitted` alone where any are given.

    Raises:
        ExchangeError: it cannot be had.
    """
    try:
        family, where = resolve(address, port)
        channel = socket.socket(family, socket.SOCK_STREAM)
        try:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            channel.bind(where)
            if admitted:
                _admit(channel, admitted)
            channel.listen(BACKLOG)
            channel.setblocking(False)
        except BaseException:
            channel.close()
            raise
    except OSError as error:
        raise ExchangeError(
            f"cannot listen for {what} on {address} port {port}: {error.strerror or error}; "
            "set rackproof_rendezvous_port, after which the heartbeats' ports come"
        ) from None
    return channel


def _admit(channel: socket.socket, admitted: Collection[str]) -> None:
    try:
        admit_only(channel, {str(channel.getsockname()[0]), *admitted})
    except OSError as error:
        raise ExchangeError(
            f"the kernel does not close the rendezvous to others than the members: {error.strerror or error}; "
            "raise net.core.optmem_max, or set rackproof_rendezvous_admit to anyone"
        ) from None


def _numbers(name: str) -> set[str]:
    """Every address that a name stands for."""
    try:
        return {str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ExchangeError(
            f"cannot tell whom to admit: {name} has no address here ({error.strerror or error}); "
            "give numbers as rackproof_fabric_address, or set rackproof_rendezvous_admit to anyone"
        ) from None


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
