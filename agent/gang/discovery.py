"""Discover the present members of a gang (the hosts of one multi-node launch) without a control node.

All members connect to the first member, or to the second if the first is absent. Hosts become ready at different times, because
image pulls and single-host stages do not end at the same time on all of them. So the member that they connect to waits until all
others have connected or the time-out has passed. Then it sends the list of present members, in the plan's order, to each of them.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from agent.gang.protocol import MAX_BYTES, Gang, GangError
from agent.gang.transport import REDIAL_S, BufferedConnection, GangListener, listen, own_address, resolve

PORT_OFFSET = 2
"""The discovery uses `Gang.port` plus this number. The status messages use `Gang.port` and the port after it."""
ANSWER_S = 15.0
"""Time in which a member must send the list after it has waited for the others."""
CONNECT_S = 10.0


def discover_members(gang: Gang, timeout_s: float, report: Callable[[str], None] = lambda _: None) -> list[str]:
    """Return the present members, in the plan's order; empty if neither of the first two members answered this host.

    Args:
        gang: all expected members.
        timeout_s: how long the first member waits for the others. Each other member tries for this long to connect to the first
            member. If this fails, the second member waits for the others for this long, and they try to connect to it. A member
            that has connected waits for the list for up to `timeout_s` plus ANSWER_S.
        report: called with each line of progress.

    Raises:
        GangError: this host is the one that the others connect to, and it cannot listen.
    """
    for host in gang.watchers:
        others = len(gang.members) - 1
        report(
            f"waiting up to {timeout_s:g} s for {others} other host{'' if others == 1 else 's'} to connect to {host}"
        )
        if host == gang.me:
            return _DiscoveryServer(gang).collect(timeout_s)
        if members := _request_members(gang, host, timeout_s):
            return members
        report(f"{host} did not answer within {timeout_s:g} s")
    return []


class _DiscoveryServer:
    """Collects the present members on the host that the others connect to."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._selector = selectors.DefaultSelector()

    def collect(self, timeout_s: float) -> list[str]:
        """Wait until all members have connected or the time has passed, and send them the list. Raises GangError."""
        end = time.monotonic() + timeout_s
        self._listener = GangListener(self._gang, self._listen(end), self._selector, self._receive)
        try:
            while len(self._connected()) < len(self._gang.members) - 1 and (remaining := end - time.monotonic()) > 0:
                for key, _ in self._selector.select(min(remaining, REDIAL_S)):
                    key.data()
                self._listener.drop_silent(float("inf"))
            return self._send_members()
        finally:
            self._listener.close()
            self._selector.close()

    def _listen(self, end: float) -> socket.socket:
        """Return a listening socket. Retry until `end`, because the name of a new pod may not resolve at once."""
        while True:
            try:
                return listen(own_address(self._gang), self._gang.port + PORT_OFFSET, purpose="the gang's members")
            except (GangError, OSError) as error:
                if time.monotonic() + REDIAL_S > end:
                    raise GangError(str(error)) from None
                time.sleep(REDIAL_S)

    def _receive(self, connection: BufferedConnection, message: Mapping[str, Any]) -> bool:
        host = str(message.get("host"))
        if host not in self._gang.members or host == self._gang.me:
            return False
        if not connection.host:
            self._listener.identify(connection, host)
        return True

    def _connected(self) -> list[BufferedConnection]:
        return [connection for connection in self._listener.connections if connection.host]

    def _send_members(self) -> list[str]:
        present = {self._gang.me, *(connection.host for connection in self._connected())}
        members = [host for host in self._gang.members if host in present]
        for connection in self._connected():
            connection.send(self._gang.sign({"members": members}))
        end = time.monotonic() + ANSWER_S
        while any(connection.pending for connection in self._connected()) and time.monotonic() < end:
            time.sleep(0.05)
            self._listener.flush()
        return members


def _request_members(gang: Gang, host: str, timeout_s: float) -> list[str]:
    """Return the present members, as `host` reports them; empty if `host` does not answer in time."""
    end = time.monotonic() + timeout_s
    while (remaining := end - time.monotonic()) > 0:
        try:
            _, address = resolve(gang.addresses[host], gang.port + PORT_OFFSET)
            with socket.create_connection(address[:2], timeout=min(remaining, CONNECT_S)) as channel:
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                channel.sendall(gang.sign({"host": gang.me}))
                # `host` waits for the full time-out, and may have started later than this host.
                if members := _receive_members(gang, channel, timeout_s + ANSWER_S):
                    return members
        except OSError:
            pass
        time.sleep(min(REDIAL_S, max(0.0, end - time.monotonic())))
    return []


def _receive_members(gang: Gang, channel: socket.socket, timeout_s: float) -> list[str]:
    """Return the members that the answer lists; empty if the answer is not valid or does not list this host.

    Raises OSError if the answer does not arrive in time.
    """
    line, end = b"", time.monotonic() + timeout_s
    while not line.endswith(b"\n"):
        channel.settimeout(max(0.001, end - time.monotonic()))  # a time-out of 0 would make recv non-blocking
        data = channel.recv(1 << 16)
        line += data
        if not data or len(line) > MAX_BYTES:
            return []
        if time.monotonic() > end:
            raise TimeoutError
    message = gang.verify(line.rstrip(b"\n")) or {}
    present = message.get("members", ())
    members = [host for host in gang.members if host in present]
    return members if gang.me in members else []
