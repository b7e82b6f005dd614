"""Monitor the ranks of this host and the other hosts of its gang (the hosts of one multi-node launch).

Decide whether the gang must be ended, and which host or rank is the culprit.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from agent.gang.culprit import (
    FATAL_SIGNALS,
    HOST_SILENT_S,
    SETTLE_S,
    TERMINATION_SIGNALS,
    UNSURE_S,
    GangSnapshot,
    PeerStatus,
    describe_exit,
    find_culprit,
)
from agent.gang.heartbeat_receiver import HeartbeatReceiver
from agent.gang.peer_channel import PeerChannel
from agent.gang.rank_state import MAX_TEXT, RankState
from agent.sampling.oom import OomWatch
from agent.sampling.thread_limit import ThreadLimitWatch
from schemas.records import Culprit

PAUSE_S = 2.0
"""If a poll ends more than this much later than planned, the supervisor was suspended. The time since the previous poll then does
not count as silence of ranks or hosts."""
JUDGE_INTERVAL_S = 0.2
"""Minimum time between two searches for a culprit, because the first host of a large gang gets hundreds of statuses per second.
If a rank of this host starts, fails or ends, the search does not wait."""
EXIT_ANNOUNCEMENT_S = 3.0
"""Maximum time to deliver the end of this host's launch to the other hosts."""
OWN_FAILURE_S = 300.0
"""A launcher that fails within this time of its start failed by itself. A launcher that fails later may have waited for other
hosts until the time-out of the rendezvous, which is longer than this (TIMEOUT in agent/benchmarks/rendezvous.py)."""


class GangMonitor:
    """Monitors a launch from the start of its ranks to its end."""

    def __init__(self, me: str, receiver: HeartbeatReceiver, channel: PeerChannel | None, timeout_s: float) -> None:
        """`channel`: None if this host is alone; `timeout_s`: time-out of the process group."""
        self._me, self._receiver, self._channel, self._timeout_s = me, receiver, channel, timeout_s
        self._began = self._polled_at = self._judge_at = time.monotonic()
        self._joined, self._joined_at = 0, self._began
        """Number of hosts that have joined the gang, as this host knows, and when the last of them did."""
        self._verdict: Culprit | None = None
        self._memory, self._kill_reasons = OomWatch(), dict[int, str]()
        self._threads, self._limit_reasons = ThreadLimitWatch(), dict[int, str]()
        self._launcher_exit, self._last_line, self._launcher_ended_at = "", "", 0.0
        """How the launcher ended, the last line of its output, and when it ended. Not set if the launcher succeeded or the
        supervisor ended it."""
        self._launcher_code: int | None = None
        """Exit code of the failed launcher; None if a fatal or terminating signal ended it."""
        self.pids: Callable[[], Collection[int]] = tuple
        """Returns the process ids of this launch."""
        self.read_output: Callable[[int], str] = lambda rank: ""
        """Returns the last part of what a rank and its launcher printed."""
        if channel:
            channel.watch_socket(receiver.socket)

    def poll(self, seconds: float) -> Culprit | None:
        """Wait up to `seconds` for messages; return the culprit, or None while there is none."""
        if self._channel:
            self._channel.poll(seconds)
        else:
            select.select([self._receiver.socket], [], [], seconds)
        now = time.monotonic()
        if now - self._polled_at > PAUSE_S + seconds:
            self._compensate_pause(now - self._polled_at)
        self._polled_at = now
        has_news = self._receiver.read()
        if now < self._judge_at and not has_news and not (self._channel and self._channel.verdict):
            return self._verdict
        self._judge_at = now + JUDGE_INTERVAL_S
        states = self._states()
        if self._channel:
            self._channel.publish_status(states, at_once=has_news)
        verdict = self._judge(states, now)
        if verdict and not self._verdict:
            self._verdict = verdict
            if self._channel:
                self._channel.announce_verdict(verdict)
        return self._verdict

    def _judge(self, states: Sequence[RankState], now: float) -> Culprit | None:
        channel = self._channel
        if channel and len(channel.statuses) > self._joined:
            self._joined, self._joined_at = len(channel.statuses), now
        if channel and (channel.verdict or not channel.is_decider(now)):
            return channel.verdict
        statuses = dict(channel.statuses) if channel else {}
        statuses[self._me] = PeerStatus(at=now, ranks=tuple(states))
        return find_culprit(
            GangSnapshot(
                me=self._me,
                members=channel.gang.members if channel else (self._me,),
                statuses=statuses,
                awaited=channel.gang.awaited if channel else (),
                joined_at=self._joined_at,
                now=now,
                timeout_s=self._timeout_s,
            )
        )

    def _compensate_pause(self, seconds: float) -> None:
        self._receiver.compensate_pause(seconds)
        self._joined_at += seconds
        if self._channel:
            self._channel.compensate_pause(seconds)

    def states(self) -> Mapping[int, RankState]:
        """Return the current or last state of each rank."""
        self._receiver.read()
        return {state.rank: state for state in self._states()}

    def _states(self) -> tuple[RankState, ...]:
        """Return the ranks' states.

        If the launcher exited by itself before any rank of this host failed, the launcher is the cause. The ranks that it ended
        are then marked as failed. If no rank had started, the first rank is marked. Without this mark, a rank of another host,
        which only lost a peer, would be named as the culprit.
        """
        states = self._receiver.states()
        if self._launcher_exit and self._channel and not self.has_started() and self._failed_on_its_own():
            states = (self._never_started(states[0]), *states[1:])
        elif self._launcher_exit and all(
            state.terminated_by_launcher or state.exit_code == 0 for state in states if state.ended_s is not None
        ):
            states = tuple(
                self._ended_by_launcher(state) if state.terminated_by_launcher else state for state in states
            )
        return tuple(self._with_software_cause(self._with_kill_reason(state)) for state in states)

    def has_started(self) -> bool:
        """Return whether any rank of this host has sent a heartbeat or has ended."""
        return any(state.alive_s is not None or state.ended_s is not None for state in self._receiver.states())

    def _failed_on_its_own(self) -> bool:
        """Return whether the launcher failed by itself, and not because of another host.

        Another host cannot end the launcher by a signal. After OWN_FAILURE_S, a rendezvous may have timed out.
        """
        return self._launcher_code is None or self._launcher_ended_at - self._began < OWN_FAILURE_S

    def _never_started(self, state: RankState) -> RankState:
        """Return the state of a rank that never started, marked as failed.

        Without this mark, other hosts would wait until their deadline.
        """
        return replace(
            state,
            scope="",
            ended_s=time.monotonic() - self._launcher_ended_at,
            exit_code=self._launcher_code,
            why=f"{self._launcher_exit} before any rank started{self._last_line}",
        )

    def _ended_by_launcher(self, state: RankState) -> RankState:
        """Return the state of a rank that its launcher ended, marked as failed, without a scope: no device is at fault."""
        text = f"{self._launcher_exit}{self._last_line}"
        exception = text if (self._launcher_code or 0) > 0 else ""
        return replace(state, scope="", terminated_by_launcher=False, exit_code=None, why=text, exception=exception)

    def _with_kill_reason(self, state: RankState) -> RankState:
        may_be_killed = state.exit_code in (None, -signal.SIGKILL) and not state.terminated_by_launcher
        if state.ended_s is None or not may_be_killed:
            return state
        if state.rank not in self._kill_reasons:
            self._kill_reasons[state.rank] = self.out_of_memory_reason()
        return replace(state, why=self._kill_reasons[state.rank] or state.why)

    def _with_software_cause(self, state: RankState) -> RankState:
        """Return the state, with the cause of the failure if the cause cannot be a device.

        There are two such causes: a limit on processes and threads (even if the rank only hangs), and an abort before the ranks
        have exchanged data.
        """
        if state.terminated_by_launcher or state.exit_code == 0:
            return state
        if state.ended_s is None:
            return replace(state, exception=state.exception or self._threads.describe_hit())
        if state.rank not in self._limit_reasons:
            output = f"{state.exception}\n{self.read_output(state.rank)}"
            self._limit_reasons[state.rank] = self._threads.describe_hit(output)
        reason = self._limit_reasons[state.rank]
        if not reason and not state.exception and state.exit_code == -signal.SIGABRT and not state.joined:
            reason = "the ranks had not exchanged data yet; the log of the rank or of the launcher has the reason"
        how = state.exception or describe_exit(state.exit_code)
        return replace(state, why=reason, exception=f"{how}: {reason}"[:MAX_TEXT]) if reason else state

    def out_of_memory_reason(self) -> str:
        """Return how the kernel killed a process of this launch for lack of memory; empty if there is no sign of it."""
        return self._memory.describe_kill(self.pids())

    def thread_limit_reason(self) -> str:
        """Return which limit on processes and threads this launch reached; empty if there is no sign of it."""
        return self._threads.describe_hit("\n".join(self.read_output(rank) for rank in self.states()))

    def await_verdict(self, exit_code: int | None, last_line: str = "") -> Culprit | None:
        """After the end of the launcher, wait for the verdict if something failed. Return the culprit, or None if there is none.

        Args:
            exit_code: exit code of the launcher, negative for a signal; None: do not wait.
            last_line: last line of the launcher's output that names an error; if there is none, the last line of the output.
        """
        if exit_code:
            self._launcher_exit = f"its launcher {'was ' if exit_code < 0 else ''}{describe_exit(exit_code)}"
            self._launcher_ended_at = time.monotonic()
            was_killed = -exit_code in (*FATAL_SIGNALS, *TERMINATION_SIGNALS)
            self._launcher_code = None if was_killed else exit_code
            self._last_line = f": {last_line}" if last_line and exit_code > 0 else ""
        has_failed = exit_code != 0 or any(state.failure or state.exit_code for state in self.states().values())
        began = time.monotonic()
        while has_failed and exit_code is not None and not self._verdict:
            if self._is_settled(time.monotonic() - began):
                break
            self.poll(0.1)
        return self._verdict

    def _is_settled(self, elapsed_s: float) -> bool:
        """Return whether to stop waiting for a verdict, `elapsed_s` after the launcher ended.

        The wait lasts 2 * SETTLE_S. In a gang it can last HOST_SILENT_S longer, so that a lost host is recognized. This extension
        ends as soon as no status is overdue and this host is the one that names the culprit (`PeerChannel.is_decider`).
        """
        if elapsed_s < 2 * SETTLE_S or not self._channel:
            return elapsed_s >= 2 * SETTLE_S
        now, statuses = time.monotonic(), self._channel.statuses
        awaited = [statuses.get(host) for host in self._channel.gang.awaited]
        are_fresh = all(status is not None and (status.finished or now - status.at <= UNSURE_S) for status in awaited)
        return (are_fresh and self._channel.is_decider(now)) or elapsed_s > HOST_SILENT_S + 2 * SETTLE_S

    def announce_abort(self) -> None:
        """Record that this host ends its ranks itself. `announce_exit` reports this to the other hosts."""
        if self._channel:
            self._channel.aborted = True

    def announce_exit(self) -> None:
        """Report the end of this host's launch to the other hosts, for at most EXIT_ANNOUNCEMENT_S. Then close the channel."""
        if self._channel:
            self._channel.finished = True
            self._channel.publish_status(self._states(), at_once=True)
            end = time.monotonic() + EXIT_ANNOUNCEMENT_S
            while not self._channel.is_delivered() and time.monotonic() < end:
                self._channel.poll(0.1)
            self._channel.close()
        self._receiver.close()
