"""A common start for ranks of several hosts, whose clocks differ: the offset is measured as NTP does, and corrected.

The clocks are those of `time.monotonic()`. That of the first host of the launch is the common one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.benchmarks.runtime.host_exchange import HostExchange
from agent.benchmarks.runtime.host_rank import REPORTING_RANK

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

Clock = Callable[[], float]

EXCHANGES = 8
"""Messages to the first host and back. The fastest one decides, because its times there and back differ least."""
LEAD_S, GANG_LEAD_S = 0.05, 0.5
"""Time between the agreement and the start: all ranks must have read it from the store by then."""
POLL_S = 0.0002
WAIT_S = 0.002


class NoStartError(RuntimeError):
    """The hosts did not agree on a start."""


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """The common clock minus the clock of this host."""

    seconds: float = 0.0
    uncertainty_s: float = 0.0
    """Half the time of the fastest exchange: the offset is wrong by no more, however the time there and back differ."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A moment at which all ranks start."""

    at: float
    """By this host's clock."""
    uncertainty_s: float
    """How far the moments of two hosts may be apart because of their clocks; 0 on one host."""


class CommonStart:
    """The ranks of a launch that start together; all make the same calls in the same order.

    Args:
        context: the rank.
        members: the hosts of the launch; one or none: only the ranks of this host.
        clock: clock of this host.
    """

    def __init__(self, context: RankContext, members: Sequence[str], clock: Clock = time.monotonic) -> None:
        self._context, self._members, self._clock = context, list(members), clock

    def agree(self, step: str) -> Start:
        """Return when all ranks of all hosts start.

        Raises:
            NoStartError: the first rank of this host, or the first host, is lost.
        """
        context = self._context
        context.host_barrier(step)
        key = f"{context.benchmark}/start/{context.node}/{step}"
        while not context.store.check([key]):
            if self._is_leader():
                at, uncertainty_s = self._agree_between_hosts(step)
                context.store.set(key, f"{at!r} {uncertainty_s!r}")
            else:
                self._wait(WAIT_S)
        at_text, uncertainty_text = context.store.get(key).decode().split()
        return Start(at=float(at_text), uncertainty_s=float(uncertainty_text))

    def _is_leader(self) -> bool:
        context = self._context
        if len(self._members) < 2:
            return min(context.present_ranks(), default=context.local_rank) == context.local_rank
        if not context.is_present(REPORTING_RANK):
            raise NoStartError("the first rank of this host, which knows the common clock, is lost")
        return context.local_rank == REPORTING_RANK

    def _agree_between_hosts(self, step: str) -> tuple[float, float]:
        context = self._context
        if len(self._members) < 2:
            return self._clock() + LEAD_S, 0.0
        name = f"{context.benchmark}/{step}"
        offset = measure_offset(context, len(self._members), name, self._clock)
        ready = HostExchange(context, self._members, name).gather("ready", offset.uncertainty_s, context.timeout_s)
        first = next(name for name in self._members if name in ready)
        key = f"{name}/start"
        if first == self._members[context.node]:
            context.store.set(key, repr(self._clock() + offset.seconds + GANG_LEAD_S))
        deadline = time.monotonic() + context.timeout_s
        while not context.store.check([key]):
            if time.monotonic() > deadline:
                raise NoStartError(f"{first} did not publish the start")
            self._wait(WAIT_S)
        at = float(context.store.get(key).decode()) - offset.seconds
        return at, max(float(value) for value in ready.values())

    def _wait(self, seconds: float) -> None:
        self._context.heartbeat.record_progress()
        time.sleep(seconds)


def measure_offset(context: RankContext, hosts: int, name: str, clock: Clock) -> ClockOffset:
    """Return the offset of this host's clock. The first host answers the others one after the other.

    An answer with the time `s`, asked for at `a` and received at `b`, gives the offset `s - (a + b) / 2` (RFC 5905, section 8,
    for a server that answers at once), with an error of at most `(b - a) / 2`.

    Raises:
        NoStartError: the first host does not answer.
    """
    if context.node == 0:
        for host in range(1, hosts):
            _answer(context, f"{name}/clock/{host}", host, clock)
        return ClockOffset()
    best = ClockOffset(uncertainty_s=float("inf"))
    deadline = time.monotonic() + context.timeout_s
    for number in range(EXCHANGES):
        key = f"{name}/clock/{context.node}"
        asked = clock()
        context.store.set(f"{key}/ask/{number}", "now")
        while not context.store.check([f"{key}/answer/{number}"]):
            if time.monotonic() > deadline:
                raise NoStartError("the first host does not answer with its time")
            context.heartbeat.record_progress()
            time.sleep(POLL_S)
        received = clock()
        answer = float(context.store.get(f"{key}/answer/{number}").decode())
        offset = ClockOffset(seconds=answer - (asked + received) / 2, uncertainty_s=(received - asked) / 2)
        best = min(best, offset, key=lambda item: item.uncertainty_s)
    return best


def _answer(context: RankContext, key: str, host: int, clock: Clock) -> None:
    """Answer one host; give up if its first rank has left or does not ask."""
    deadline = time.monotonic() + context.timeout_s
    for number in range(EXCHANGES):
        while not context.store.check([f"{key}/ask/{number}"]):
            has_left = context.store.check([f"left/{host}/{context.benchmark}/{REPORTING_RANK}"])
            if has_left or time.monotonic() > deadline:
                return
            context.heartbeat.record_progress()
            time.sleep(POLL_S)
        context.store.set(f"{key}/answer/{number}", repr(clock()))
