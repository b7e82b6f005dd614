"""The protocol of a gang (the hosts of one multi-node launch): its members, and authenticated messages between them."""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.gang.culprit import WATCHERS
from schemas import documents
from schemas.errors import RackproofError
from schemas.host_names import check_host_name
from schemas.plans import Plan, PlannedHost

MAX_BYTES = 1 << 17
"""Maximum size of a message, and of the data that waits to be sent on a connection."""


class GangError(RackproofError):
    """The gang cannot communicate; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The hosts of one launch, and their addresses and ports. A launch on one host has a single member."""

    me: str
    members: tuple[str, ...]
    addresses: Mapping[str, str]
    """Member -> its address in the plan."""
    port: int
    """Port on which the first member receives statuses. The second member uses the next port (`port_of`)."""
    nonce: str
    """Random text from the plan; key of the authentication codes."""
    context: str
    """Run, stage, number of the launch, and gang. Messages of another context are not valid."""
    members_only: bool = False
    """Accept only connections from the members' addresses."""

    @classmethod
    def from_plan(
        cls, plan: Plan, host: PlannedHost, stage: str, members: Sequence[str], port: int, *, members_only: bool = False
    ) -> Gang:
        """Return the gang of these members.

        Args:
            plan, host: the run's plan and this host in it.
            stage: stage and number of the launch, such as `gang 0`; `meeting` for the discovery of members before a launch.
            members: the hosts of the launch, in rank order.
            port: port of torch's rendezvous. The statuses use the two ports after it, so the field `Gang.port` is `port` + 1.
            members_only: as in the field.
        """
        return cls(
            me=host.name,
            members=tuple(members),
            addresses={name: plan.host(name).address for name in members},
            port=port + 1,
            nonce=plan.nonce,
            context=f"{plan.run_id} {stage} {host.gang}",
            members_only=members_only,
        )

    @property
    def store_prefix(self) -> str:
        """Prefix of the keys of this launch's ranks in the rendezvous store. It cannot be guessed without the nonce."""
        return self._code(b"rendezvous").decode()[:32]

    @property
    def allowed_addresses(self) -> frozenset[str]:
        """Numeric addresses that may connect; empty: all.

        Raises:
            GangError: the name of a member cannot be resolved.
        """
        if not self.members_only:
            return frozenset()
        return frozenset(address for name in self.addresses.values() for address in _resolve_all(name))

    @property
    def watchers(self) -> tuple[str, ...]:
        """The members that receive all statuses. The first watcher that is alive decides which host caused a failure."""
        return self.members[:WATCHERS]

    @property
    def awaited(self) -> tuple[str, ...]:
        """The members whose statuses this host receives: for a watcher all others, for any other host the watchers."""
        senders = self.members if self.me in self.watchers else self.watchers
        return tuple(host for host in senders if host != self.me)

    def port_of(self, watcher: str) -> int:
        """Return the port of a watcher. Each watcher has its own port, because both may run on one machine in a test."""
        return self.port + self.watchers.index(watcher)

    def sign(self, message: Mapping[str, Any]) -> bytes:
        """Return the message as a line: authentication code, space, JSON."""
        body = json.dumps(message).encode()
        return self._code(body) + b" " + body + b"\n"

    def verify(self, line: bytes) -> dict[str, Any] | None:
        """Return the message of a line, or None if it is not valid."""
        code, _, body = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(body)):
            return None
        try:
            message = documents.parse(body, source="a message", max_bytes=MAX_BYTES)
        except documents.DocumentError:
            return None
        return message if isinstance(message, dict) else None

    def _code(self, body: bytes) -> bytes:
        context = "\n".join([self.context, *self.members, ""]).encode()
        return hmac.new(self.nonce.encode(), context + body, "sha256").hexdigest().encode()


def _resolve_all(name: str) -> set[str]:
    """Return every address of a name. Raises GangError."""
    try:
        check_host_name(name)
        return {str(address[0]) for *_, address in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise GangError(
            f"cannot restrict the rendezvous to its members: {name} has no address here ({error.strerror or error}); "
            "set rackproof_fabric_address to a numeric address, or rackproof_rendezvous_admit to 'anyone'"
        ) from None
