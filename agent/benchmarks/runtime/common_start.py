"""Let the ranks of several hosts start at the same moment, although the clocks of the hosts differ.

All clocks are `time.monotonic()`. The common clock is that of the leading host: the first host, in the order of the launch, on
which local rank 0 has not left the benchmark. Each other host measures the offset of its clock as NTP does: it asks the leading
host for its time. The leading host then publishes the time of the start, and the names of the hosts that are not ready. If a host
hangs, the errors on all other hosts name that host.
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
"""How often each host asks the leading host for its time. The clock offset comes from the question that was answered fastest:
the shorter the round trip, the less the delays of its two directions can differ."""
LEAD_S, GANG_LEAD_S = 0.05, 0.5
"""Seconds from the decision to the start: `LEAD_S` for one host, `GANG_LEAD_S` for several hosts. In this time all ranks must
read the moment of the start from the store."""
POLL_S = 0.0002
"""Seconds between two checks for a question or an answer in the store. The pause is short, because it adds to the uncertainty of
the offset."""
WAIT_S = 0.002
"""Seconds between two checks whether the time of the start is in the store."""
TURN_S = 0.1
"""Seconds that the leading host waits for the next question of one host before it answers another host."""
LOCAL_WAITS = 3
"""How many time-outs a rank waits for local rank 0 of its host. Local rank 0 may itself wait for three time-outs: one at the
barrier of the host, one for the answers of the leading host, and one for the start."""


class NoStartError(RuntimeError):
    """The hosts did not agree on a start."""


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """The time of the common clock minus the time of this host's clock."""

    seconds: float = 0.0
    uncertainty_s: float = 0.0
    """Largest possible error of the offset: half the time from the question to the answer."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A moment at which all ranks start."""

    at: float
    """The moment in seconds by this host's clock."""
    uncertainty_s: float
    """How far the start of any host may be from the start of the leading host, because clock offsets are uncertain; 0 if only one
    host starts."""


class CommonStart:
    """Lets this rank agree with the other ranks on when to start. All ranks must make the same calls in the same order.

    Args:
        context: the context of this rank.
        members: names of the hosts, in the order of the launch. With fewer than two, only the ranks of this host start together.
        clock: clock of this host.
    """

    def __init__(self, context: RankContext, members: Sequence[str], clock: Clock = time.monotonic) -> None:
        self._context, self._members, self._clock = context, list(members), clock

    def agree(self, step: str) -> Start:
        """Return the moment at which all ranks of all hosts start.

        Args:
            step: name of this start, different for each call.

        Raises:
            NoStartError: a host did not reach the start, or local rank 0 of this host is lost or did not answer.
        """
        context = self._context
        context.host_barrier(step)
        key = f"{context.benchmark}/start/{context.node}/{step}"
        deadline = time.monotonic() + LOCAL_WAITS * (context.timeout_s + MARGIN_S)
        while not context.store.check([key]):
            if self._decides_for_host():
                context.store.set(key, json.dumps(self._decide(step)))
            elif len(self._members) > 1 and not context.is_present(REPORTING_RANK) and not context.store.check([key]):
                raise NoStartError("the first rank of this host, which determines when the host starts, is lost")
            elif time.monotonic() > deadline:
                raise NoStartError("the first rank of this host did not answer")
            else:
                self._wait(WAIT_S)
        decision = json.loads(context.store.get(key).decode())
        if "problem" in decision:
            raise NoStartError(decision["problem"])
        return Start(**decision)

    def _decides_for_host(self) -> bool:
        """Return whether this rank determines the start for all ranks of its host."""
        context = self._context
        if len(self._members) > 1:
            return context.local_rank == REPORTING_RANK
        return min(context.present_ranks(), default=context.local_rank) == context.local_rank

    def _decide(self, step: str) -> dict[str, Any]:
        """Return the fields of `Start` for all ranks of this host, or `{"problem": …}` if the hosts cannot start together."""
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
        """As the leading host, send the time to each host that is after it in the launch. Then publish and return the decision.

        The decision has the time of the start by this host's clock, and the names of the hosts that are not ready.
        """
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
        """Wait for the decision that the leading host publishes, and return it."""
        context = self._context
        # The leading host may itself wait for other hosts: up to `timeout_s` + MARGIN_S (see `answer_hosts`).
        deadline = time.monotonic() + context.timeout_s + 2 * MARGIN_S
        _wait_for(context, f"{name}/start", leader, self._members[leader], deadline, WAIT_S)
        return dict(json.loads(context.store.get(f"{name}/start").decode()))

    def _wait(self, seconds: float) -> None:
        self._context.heartbeat.record_progress()
        time.sleep(seconds)


class _HostLeftError(Exception):
    """Local rank 0 of the other host has left the benchmark."""


def measure_offset(context: RankContext, name: str, leader: int, leader_name: str, clock: Clock) -> ClockOffset:
    """Return the clock of the leading host minus that of this host, and report to the leading host that this host is ready.

    This host asks at the time `a` and receives the answer at `b`. The answer is the leading host's time `s`. The offset is then
    `s - (a + b) / 2` (RFC 5905, section 8, for a server that answers at once). Its error is at most `(b - a) / 2`.

    Args:
        context: the context of local rank 0 of this host.
        name: prefix of the keys in the store.
        leader: number of the leading host in the launch.
        leader_name: name of the leading host.
        clock: clock of this host.

    Raises:
        NoStartError: the leading host does not answer.
        _HostLeftError: local rank 0 of the leading host has left the benchmark.
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
    """Answer each of the `hosts` that asks for the time. Return {number of a ready host: uncertainty of its offset in s}.

    Returns when each host is ready or its local rank 0 has left the benchmark, and at the latest after the time-out.
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
    """Answer the next question of one host, if it has come, and each further one that comes within TURN_S of the last answer.

    Other hosts get no answer meanwhile, so that the answers are fast.

    Args:
        context: the context of this rank.
        key: prefix of the host's keys in the store.
        number: number of the host's next question.
        clock: clock of the leading host, which is this host.

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
    """Wait for a key that local rank 0 of another host sets.

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
