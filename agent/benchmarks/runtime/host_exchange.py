"""Values that the hosts of a launch exchange through its store, without the process group.

The first host collects the values of all hosts and publishes them together. So the traffic grows with the number of hosts, not
with its square. Local rank 0 of each host exchanges the values. If local rank 0 of the first host has left the benchmark, for
example because its GPU is broken, the next host collects the values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent.benchmarks.runtime.host_rank import REPORTING_RANK

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

POLL_S = 0.02
MARGIN_S = 10.0
"""The other hosts wait this many seconds longer than the collecting host, because the collecting host may begin to wait later."""


class ExchangeError(Exception):
    """The host that collects the values did not publish them."""


class HostExchange:
    """Exchanges values between this host and the other `members`. All of them must make the same calls in the same order.

    Args:
        context: the context of local rank 0; its `node` is the position of its host in `members`.
        members: names of the hosts of the launch.
        name: prefix of the keys in the store.
    """

    def __init__(self, context: RankContext, members: Sequence[str], name: str) -> None:
        self._context, self._members, self._name = context, list(members), name
        self.host = self._members[context.node]

    def gather(self, step: str, value: Any, limit_s: float, hosts: Sequence[str] = ()) -> dict[str, Any]:
        """Return {host: value} with the values that arrived within `limit_s`. Every host gets the same result.

        Args:
            step: name of the step, different for each call.
            value: the value of this host, serializable as JSON.
            limit_s: how many seconds the collecting host waits for the values of the others.
            hosts: the hosts that take part; if empty, all hosts of the launch.

        Raises:
            ExchangeError: the collecting host does not answer.
        """
        taking_part = [name for name in self._members if not hosts or name in hosts]
        store, prefix = self._context.store, f"{self._name}/{step}"
        store.set(f"{prefix}/of/{self.host}", json.dumps(value))
        deadline, leaders, collecting = time.monotonic() + limit_s + MARGIN_S, list(taking_part), ""
        while not store.check([f"{prefix}/all"]):
            while len(leaders) > 1 and self._has_left(leaders[0]):
                leaders.pop(0)
            if leaders[0] == self.host:
                store.set(f"{prefix}/all", json.dumps(self._collect(prefix, taking_part, limit_s)))
            elif leaders[0] != collecting and store.check([f"{prefix}/of/{leaders[0]}"]):
                deadline, collecting = time.monotonic() + limit_s + MARGIN_S, leaders[0]
            elif time.monotonic() > deadline:
                raise ExchangeError(f"{leaders[0]}, which collects the results of the hosts, did not answer")
            else:
                self._pause()
        return dict(json.loads(store.get(f"{prefix}/all").decode()))

    def _collect(self, prefix: str, hosts: Sequence[str], limit_s: float) -> dict[str, Any]:
        deadline, values = time.monotonic() + limit_s, {}
        for host in hosts:
            key = f"{prefix}/of/{host}"
            while not (has_value := self._context.store.check([key])) and time.monotonic() < deadline:
                if self._has_left(host):
                    break
                self._pause()
            if has_value:
                values[host] = json.loads(self._context.store.get(key).decode())
        return values

    def _has_left(self, host: str) -> bool:
        """Return whether local rank 0 of the host has left the benchmark."""
        node = self._members.index(host)
        return bool(self._context.store.check([f"left/{node}/{self._context.benchmark}/{REPORTING_RANK}"]))

    def _pause(self) -> None:
        self._context.heartbeat.record_progress()
        time.sleep(POLL_S)
