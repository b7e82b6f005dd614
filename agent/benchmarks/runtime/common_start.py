"""A common start for ranks of several hosts, whose clocks differ: the offsets are measured as NTP does, and corrected.

All clocks are `time.monotonic()`. The common clock is that of the leading host: the first host of the launch whose first rank has
not left the benchmark. The other hosts ask the leading host for its time. The leading host then publishes the time of the start,
and the names of the hosts that are not ready. So a host that hangs delays the other hosts by one time-out only, and the reports
of those hosts name it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent.benchmarks.runtime.host_exchange import MARGIN_S
from agent.benchmarks.runtime.host_rank import REPORTING_RANK

if TYPE_CHECKING:
    from agent.benchmarks.runtime.rank_context import RankContext

Clock = Callable[[], float]

EXCHANGES = 8
"""Number of questions that each host asks the leading host. The offset is taken from the question that was answered fastest:
the shorter the round trip, the less the delays of its two directions can differ."""
LEAD_S, GANG_LEAD_S = 0.05, 0.5
"""Seconds from the agreement to the start, on one host and on several. Within this time all ranks must read the start from the
store."""
POLL_S = 0.0002
"""Interval at which a host looks for a question or an answer. It is short, because it adds to the uncertainty of the offset."""
WAIT_S = 0.002
"""Interval at which a rank looks for the start in the store."""
TURN_S = 0.1
"""How long the leading host waits for the next question of a host before it answers another host."""
LOCAL_WAITS = 3
"""For how many time-outs a rank waits for the first rank of its host. That first rank may itself wait for the answers of the
leading host, and then for the start, which the leading host publishes only after it has waited for the other hosts."""


class NoStartError(RuntimeError):
    """The hosts did not agree on a start."""


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """The common clock minus the clock of this host."""

    seconds: float = 0.0
    uncertainty_s: float = 0.0
    """Largest possible error of the offset: half the time from the question to the answer."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A moment at which all ranks start."""

    at: float
    """By this host's clock."""
    uncertainty_s: float
    """Largest possible difference between the starts of a host and of the leading host, from uncertain offsets; 0 on one host."""


class CommonStart:
    """The ranks of a launch that start together; all make the same calls in the same order.

    Args:
        context: the rank.
        members: the hosts of the launch. With fewer than two, only the ranks of this host agree.
        clock: clock of this host.
    """

    def __init__(self, context: RankContext, members: Sequence[str], clock: Clock = time.monotonic) -> None:
        self._context, self._members, self._clock = context, list(members), clock

    def agree(self, step: str) -> Start:
        """Return the moment at which all ranks of all hosts start.

        Raises:
            NoStartError: a host did not reach the start, or the first rank of this host is lost or did not answer.
        """
        context = self._context
        context.host_barrier(step)
        key = f"{context.benchmark}/start/{context.node}/{step}"
        deadline = time.monotonic() + LOCAL_WAITS * (context.timeout_s + MARGIN_S)
        while not context.store.check([key]):
            if self._decides_for_host():
                context.store.set(key, json.dumps(self._decide(step)))
            elif len(self._members) > 1 and not context.is_present(REPORTING_RANK) and not context.store.check([key]):
                raise NoStartError("the first rank of this host, which measures the common clock, is lost")
            elif time.monotonic() > deadline:
                raise NoStartError("the first rank of this host did not answer")
            else:
                self._wait(WAIT_S)
        decision = json.loads(context.store.get(key).decode())
        if "problem" in decision:
            raise NoStartError(decision["problem"])
        return Start(**decision)

    def _decides_for_host(self) -> bool:
        """Return whether this rank, and not another rank of its host, determines the start and stores it for the host."""
        context = self._context
        if len(self._members) > 1:
            return context.local_rank == REPORTING_RANK
        return min(context.present_ranks(), default=context.local_rank) == context.local_rank

    def _decide(self, step: str) -> dict[str, Any]:
        """Return, for all ranks of this host, the fields of the start, or the `problem` that prevents it."""
        if len(self._members) < 2:
            return {"at": self._clock() + LEAD_S, "uncertainty_s": 0.0}
        context, offset = self._context, ClockOffset()
        name = f"{context.benchmark}/{step}"
        try:
            for leader in range(context.node):
                try:
                    offset = measure_offset(context, f"{name}/{leader}", leader, self._members[leader], self._clock)
                    start = self._await_start(f"{name}/{leader}", leader)
                    break
                except _HostLeftError:
                    continue
            else:
                offset, start = ClockOffset(), self._lead(f"{name}/{context.node}")
        except NoStartError as error:
            return {"problem": str(error)}
        if start["missing"]:
            return {"problem": _describe_missing(start["missing"])}
        return {"at": start["at"] - offset.seconds, "uncertainty_s": start["uncertainty_s"]}

    def _lead(self, name: str) -> dict[str, Any]:
        """Answer the hosts after this host in the launch. Then publish the start, by this host's clock, and the missing hosts."""
        context = self._context
        others = range(context.node + 1, len(self._members))
        uncertainties = answer_hosts(context, name, others, self._clock)
        missing = [self._members[host] for host in others if host not in uncertainties and not _has_left(context, host)]
        start = {
            "at": self._clock() + GANG_LEAD_S,
            "uncertainty_s": max(uncertainties.values(), default=0.0),
            "missing": missing,
        }
        context.store.set(f"{name}/start", json.dumps(start))
        return start

    def _await_start(self, name: str, leader: int) -> dict[str, Any]:
        """Return what the leading host has published. That host waits for the other hosts until its own time-out."""
        context = self._context
        deadline = time.monotonic() + context.timeout_s + 2 * MARGIN_S
        _wait_for(context, f"{name}/start", leader, self._members[leader], deadline, WAIT_S)
        return dict(json.loads(context.store.get(f"{name}/start").decode()))

    def _wait(self, seconds: float) -> None:
        self._context.heartbeat.record_progress()
        time.sleep(seconds)


class _HostLeftError(Exception):
    """The first rank of a host has left the benchmark."""


def measure_offset(context: RankContext, name: str, leader: int, leader_name: str, clock: Clock) -> ClockOffset:
    """Return the clock of the leading host minus that of this host, and report to the leading host that this host is ready.

    This host asks at the time `a` and receives the answer at `b`. The answer is the leading host's time `s`. The offset is then
    `s - (a + b) / 2` (RFC 5905, section 8, for a server that answers at once). Its error is at most `(b - a) / 2`.

    Args:
        context: the first rank of this host.
        name: prefix of the keys in the store.
        leader: number of the leading host.
        leader_name: name of the leading host.
        clock: clock of this host.

    Raises:
        NoStartError: the leading host does not answer.
        _HostLeftError: the first rank of the leading host has left the benchmark.
    """
    best = ClockOffset(uncertainty_s=float("inf"))
    deadline = time.monotonic() + context.timeout_s + MARGIN_S
    key = f"{name}/clock/{context.node}"
    for number in range(EXCHANGES):
        asked = clock()
        context.store.set(f"{key}/ask/{number}", "now")
        _wait_for(context, f"{key}/answer/{number}", leader, leader_name, deadline, POLL_S)
        received = clock()
        answer = float(context.store.get(f"{key}/answer/{number}").decode())
        offset = ClockOffset(seconds=answer - (asked + received) / 2, uncertainty_s=(received - asked) / 2)
        best = min(best, offset, key=lambda item: item.uncertainty_s)
    context.store.set(f"{key}/ready", repr(best.uncertainty_s))
    return best


def answer_hosts(context: RankContext, name: str, hosts: Iterable[int], clock: Clock) -> dict[int, float]:
    """Answer the questions of the hosts. Return host -> uncertainty of its offset in s, for the hosts that are ready.

    Returns when each of the hosts is ready, or its first rank has left the benchmark, and at the latest after the time-out.
    """
    answered, uncertainties = dict.fromkeys(hosts, 0), dict[int, float]()
    waiting, deadline = list(answered), time.monotonic() + context.timeout_s + MARGIN_S
    while waiting and time.monotonic() < deadline:
        for host in waiting:
            key = f"{name}/clock/{host}"
            answered[host] = _answer(context, key, answered[host], clock)
            if answered[host] == EXCHANGES and context.store.check([f"{key}/ready"]):
                uncertainties[host] = float(context.store.get(f"{key}/ready").decode())
        waiting = [host for host in waiting if host not in uncertainties and not _has_left(context, host)]
        context.heartbeat.record_progress()
        time.sleep(POLL_S)
    return uncertainties


def _answer(context: RankContext, key: str, number: int, clock: Clock) -> int:
    """Answer the host's waiting question, if any, and further ones as long as each comes within TURN_S of the last answer.

    No other host is answered meanwhile, so that these answers are fast.

    Args:
        number: number of the host's next question.

    Returns:
        The new number of the host's next question.
    """
    last = float("-inf")
    while number < EXCHANGES:
        if context.store.check([f"{key}/ask/{number}"]):
            context.store.set(f"{key}/answer/{number}", repr(clock()))
            number, last = number + 1, time.monotonic()
        elif time.monotonic() - last > TURN_S:
            break
        else:
            time.sleep(POLL_S)
    return number


def _wait_for(context: RankContext, key: str, host: int, host_name: str, deadline: float, poll_s: float) -> None:
    """Wait for a key that the first rank of a host sets.

    Raises:
        NoStartError: the key was not set before the deadline.
        _HostLeftError: that rank left the benchmark without setting the key.
    """
    while not context.store.check([key]):
        # Check the key again: the rank may have set it after the first check, just before it left.
        if _has_left(context, host) and not context.store.check([key]):
            raise _HostLeftError
        if time.monotonic() > deadline:
            raise NoStartError(_describe_missing([host_name]))
        context.heartbeat.record_progress()
        time.sleep(poll_s)


def _has_left(context: RankContext, host: int) -> bool:
    return context.store.check([f"left/{host}/{context.benchmark}/{REPORTING_RANK}"])


def _describe_missing(hosts: Sequence[str]) -> str:
    return f"{', '.join(hosts)} did not reach the common start"
