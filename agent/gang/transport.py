"""Non-blocking TCP connections between the hosts of a gang (the hosts of one multi-node launch).

Buffers are bounded. A connection counts as that of a member only after an authenticated message (`Gang.verify`).
"""

from __future__ import annotations

import contextlib
import fcntl
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any

from agent.gang.allow_list import admit_only
from agent.gang.open_files import raise_soft_limit
from agent.gang.protocol import MAX_BYTES, Gang, GangError
from schemas.host_names import check_host_name

BACKLOG = 128
PROOF_S = 5.0
"""A new connection must send a valid message within this time."""
MAX_UNPROVEN = 16
"""This number plus the number of members is the limit for connections without a valid message."""
REDIAL_S = 1.0
"""Time between two attempts to connect to a member, or to listen."""
SIOCGIFADDR = 0x8915
"""Linux ioctl: get the IPv4 address of an interface."""


class BufferedConnection:
    """A connection with bounded buffers in both directions."""

    def __init__(self, channel: socket.socket | None = None, now: float = 0.0) -> None:
        """`channel`: None while there is no connection."""
        self.socket, self.heard_at = channel, now
        self.host = ""
        """The member at the other end; empty until its first valid message."""
        self.greeting = ""
        """Token of the supervisor at the other end, from the greeting that it sent; empty before the greeting."""
        self.token, self.number = "", 0
        """Token and number of the newest status from the other end."""
        self.pending = b""
        self._incoming = b""

    def send(self, line: bytes) -> bool:
        """Send as much as possible now and buffer the rest; return False if the connection failed or the buffer is too long."""
        if not self.socket:
            return True
        self.pending += line
        try:
            while self.pending:
                self.pending = self.pending[self.socket.send(self.pending) :]
        except BlockingIOError:
            return len(self.pending) <= MAX_BYTES
        except OSError:
            self.pending = b""
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """Return the lines that have arrived; None if the connection has ended, or if a line is too long."""
        try:
            data = self.socket.recv(1 << 16) if self.socket else b""
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        return lines if len(self._incoming) <= MAX_BYTES else None

    def close(self) -> None:
        """Close the connection."""
        if self.socket:
            self.socket.close()
            self.socket = None


class GangListener:
    """Accepts connections from members, and drops those that send no valid message."""

    def __init__(
        self,
        gang: Gang,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        receive: Callable[[BufferedConnection, Mapping[str, Any]], bool],
        greeting: Mapping[str, Any] | None = None,
    ) -> None:
        """Register `listener` with the selector. The `data` of a selector key is the function that handles its events.

        Args:
            receive: takes a message with a valid signature; returns False to drop the connection.
            greeting: message that is sent on each new connection; None: no greeting.
        """
        self.connections: list[BufferedConnection] = []
        self._gang, self._listener, self._selector = gang, listener, selector
        self._receive, self._greeting = receive, greeting
        raise_soft_limit(MAX_UNPROVEN + len(gang.members))
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            channel, _ = self._listener.accept()
            channel.setblocking(False)
            connection = BufferedConnection(channel, time.monotonic())
            self.connections.append(connection)
            self._selector.register(channel, selectors.EVENT_READ, partial(self._read, connection))
            if self._greeting:
                connection.send(self._gang.sign(self._greeting))
        unproven = [connection for connection in self.connections if not connection.host]
        for connection in unproven[: -(MAX_UNPROVEN + len(self._gang.members))]:
            self.drop(connection)

    def _read(self, connection: BufferedConnection) -> None:
        lines = connection.receive()
        for line in lines or ():
            message = self._gang.verify(line)
            if not message or not self._receive(connection, message):
                lines = None
                break
        if lines is None:
            self.drop(connection)

    def identify(self, connection: BufferedConnection, host: str) -> None:
        """Assign a connection to a member; drop an older connection from the same member."""
        connection.host, connection.heard_at = host, time.monotonic()
        for older in [other for other in self.connections if other.host == host and other is not connection]:
            self.drop(older)

    def drop(self, connection: BufferedConnection) -> None:
        """Close a connection."""
        if connection in self.connections and connection.socket:
            self._selector.unregister(connection.socket)
            connection.close()
            self.connections.remove(connection)

    def drop_silent(self, member_timeout_s: float) -> None:
        """Close connections that are silent for too long: those of members after `member_timeout_s`, others after PROOF_S."""
        now = time.monotonic()
        for connection in list(self.connections):
            if now - connection.heard_at > (member_timeout_s if connection.host else PROOF_S):
                self.drop(connection)

    def flush(self) -> None:
        """Send pending data."""
        for connection in self.connections:
            connection.send(b"")

    def close(self) -> None:
        """Close all connections and the listener."""
        for connection in self.connections:
            connection.close()
        self._listener.close()


def listen(
    address: str, port: int, allowed: Collection[str] = (), *, purpose: str = "the gang's statuses"
) -> socket.socket:
    """Return a listening socket. If `allowed` is given, only those addresses and the socket's own address can connect.

    `purpose` says in the error message what the socket is for.

    Raises:
        GangError: the address or the port is not available, or the kernel refuses the restriction.
    """
    try:
        family, target = resolve(address, port)
        channel = socket.socket(family, socket.SOCK_STREAM)
        try:
            channel.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            channel.bind(target)
            if allowed:
                _restrict(channel, allowed)
            channel.listen(BACKLOG)
            channel.setblocking(False)
        except BaseException:
            channel.close()
            raise
    except OSError as error:
        raise GangError(
            f"cannot listen for {purpose} on {address} port {port}: {error.strerror or error}; "
            "set rackproof_rendezvous_port to a free port for all hosts of the gang; up to three ports after it are used as well"
        ) from None
    return channel


def _restrict(channel: socket.socket, allowed: Collection[str]) -> None:
    try:
        admit_only(channel, {str(channel.getsockname()[0]), *allowed})
    except OSError as error:
        raise GangError(
            f"cannot restrict the rendezvous to the members: {error.strerror or error}; "
            "raise net.core.optmem_max, or set rackproof_rendezvous_admit to 'anyone'"
        ) from None


@cache
def resolve(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return family and address to bind or connect to. Results are cached: the name server may become slow or unreachable.

    Raises OSError if the address cannot be resolved.
    """
    check_host_name(address)
    family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return family, target


def own_address(gang: Gang) -> str:
    """Return this host's planned address, or the local address from which it reaches a peer.

    The local address is returned if the planned address does not belong to this machine or is a loopback address. There are two
    exceptions, in which the planned address is returned:

    - The planned addresses of all hosts are loopback addresses. The hosts are then on one machine.
    - The peer cannot be resolved or has no route. The local address is then not known.
    """
    planned = gang.addresses[gang.me]
    with contextlib.suppress(OSError):
        family, target = resolve(planned, 0)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(target)
        if not _is_loopback(planned) or all(_is_loopback(address) for address in gang.addresses.values()):
            return planned
    peer = next(gang.addresses[host] for host in gang.members if host != gang.me)
    with contextlib.suppress(OSError):
        family, target = resolve(peer, gang.port)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return planned


def check_addresses(gang: Gang) -> None:
    """Check how this host resolves the addresses of the hosts that it connects to.

    Raises:
        GangError: one of them is a loopback address, but this host's own address is not. This host would then connect to
            itself, and the other hosts would report it as lost.
    """
    for host in gang.watchers:
        address, own = gang.addresses[host], gang.addresses[gang.me]
        with contextlib.suppress(OSError):  # the later connection attempt reports a name that cannot be resolved
            if host != gang.me and _is_loopback(address) and not _is_loopback(own):
                raise GangError(
                    f"host {host}: its address {address} is the loopback address {resolve(address, 0)[1][0]} on this host: "
                    "correct /etc/hosts here, or set rackproof_fabric_address to a numeric address"
                )


def interface_of(address: str) -> str:
    """Return the network interface that has this IPv4 address; empty if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(channel, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _is_loopback(address: str) -> bool:
    """Return whether the address is a loopback address. A host's own name often resolves to 127.0.1.1 on that host."""
    return str(resolve(address, 0)[1][0]).startswith(("127.", "::1"))
