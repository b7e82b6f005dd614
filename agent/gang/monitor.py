"""A supervisor's watch over its ranks and its gang: who is heard of, and whether the gang is to end because of somebody."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agent.gang.culprit import (
    BY_REQUEST,
    HOST_SILENT_S,
    NO_LIVES,
    SETTLE_S,
    UNSURE_S,
    RankState,
    View,
    Word,
    decide,
    how_it_ended,
)
from agent.gang.heartbeat import Beats
from agent.gang.peer_channel import Exchange
from agent.sampling.oom import OomWatch
from schemas.records import Culprit

PAUSE_S = 2.0
"""A supervisor that did not run for so long was stopped itself, and cannot say who was silent meanwhile."""
THINK_S = 0.2
"""The head of a large gang hears hundreds of words a second, and need not think after each."""
PARTING_S = 3.0
"""For the last words to be heard."""
OWN_END_S = 300.0
"""Half of what a launcher waits for the others (`rendezvous.PATIENCE`), and more than importing torch takes."""
MOST_SAID = 300
"""Characters of a launcher's last line."""
FLIGHT = "flight.rank"
"""Begins the names of the flight recorder's files."""
DUMP_S = 2.0


class Vigil:
    """Watches from the start of the ranks to the end of the launch."""

    def __init__(self, me: str, beats: Beats, exchange: Exchange | None, patience_s: float) -> None:
        """`exchange`: None where this host is alone; `patience_s`: the process group's time-out."""
        self._me, self._beats, self._exchange, self._patience_s = me, beats, exchange, patience_s
        self._began = self._looked = time.monotonic()
        self._think_at = 0.0
        self._decided: Culprit | None = None
        self._memory, self._why = OomWatch(), dict[int, str]()
        self._launcher, self._said, self._launcher_at = "", "", 0.0
        """How it ended, with which last words, and when, where it ended by itself and not well."""
        self._launcher_code: int | None = None
        """None for a signal that no other host can bring about."""
        self.pids: Callable[[], Collection[int]] = tuple
        """Processes of this launch."""
        if exchange:
            exchange.also(beats.socket)

    def look(self, seconds: float) -> Culprit | None:
        """Waits up to `seconds` for news; returns for whom the gang is to end, once somebody is named."""
        if self._exchange:
            self._exchange.step(seconds)
        else:
            select.select([self._beats.socket], [], [], seconds)
        now = time.monotonic()
        if now - self._looked > PAUSE_S + seconds:
            self._forgive(now - self._looked)
        self._looked = now
        news = self._beats.read()
        if now < self._think_at and not news and not (self._exchange and self._exchange.verdict):
            return self._decided
        self._think_at = now + THINK_S
        states = self._states()
        if self._exchange:
            self._exchange.say(states, at_once=news)
        verdict = self._verdict(states, now)
        if verdict and not self._decided:
            self._decided = verdict
            if self._exchange:
                self._exchange.end(verdict)
        return self._decided

    def _verdict(self, states: Sequence[RankState], now: float) -> Culprit | None:
        exchange = self._exchange
        if exchange and (exchange.verdict or not exchange.decides(now)):
            return exchange.verdict
        words = dict(exchange.words) if exchange else {}
        words[self._me] = Word(at=now, ranks=tuple(states))
        return decide(
            View(
                me=self._me,
                members=exchange.gang.members if exchange else (self._me,),
                words=words,
                awaited=exchange.gang.awaited if exchange else (),
                began=self._began,
                now=now,
                patience_s=self._patience_s,
            )
        )

    def _forgive(self, seconds: float) -> None:
        self._beats.forgive(seconds)
        if self._exchange:
            self._exchange.forgive(seconds)

    def states(self) -> Mapping[int, RankState]:
        """How each rank is, or was."""
        self._beats.read()
        return {state.rank: state for state in self._states()}

    def _states(self) -> tuple[RankState, ...]:
        """Of a rank that was killed also why, if the kernel did it, or if it ended for nothing but its launcher's end.

        Whoever ends a rank asks its launcher: asked for by a launcher that nobody ended, it is no other rank's doing, and
        the ranks of other hosts, which lose a peer, must not be named for it.
        """
        states = self._beats.states()
        if self._launcher and self._exchange and not self.begun() and self._of_itself():
            states = (self._never_began(states[0]), *states[1:])
        elif self._launcher and all(
            state.told or state.exit_code == 0 for state in states if state.ended_s is not None
        ):
            states = tuple(self._left_alone(state) if state.told else state for state in states)
        return tuple(self._explained(state) for state in states)

    def begun(self) -> bool:
        """Whether any rank of this host was heard of."""
        return any(state.alive_s is not None or state.ended_s is not None for state in self._beats.states())

    def _of_itself(self) -> bool:
        """Whether the launcher's end was its own doing: one that ends late may have waited for the first host's store in vain."""
        return self._launcher_code is None or self._launcher_at - self._began < OWN_END_S

    def _never_began(self, state: RankState) -> RankState:
        """The others would wait for it until their deadline, or fail because its launcher kept the store."""
        return replace(
            state,
            scope="",
            ended_s=time.monotonic() - self._launcher_at,
            exit_code=self._launcher_code,
            why=f"{self._launcher} before any rank began{self._said}",
        )

    def _left_alone(self, state: RankState) -> RankState:
        """As one that ended by itself, for which no device is to blame."""
        return replace(state, scope="", told=False, exit_code=None, why=self._launcher)

    def _explained(self, state: RankState) -> RankState:
        if state.ended_s is None or state.told or state.exit_code not in (None, -signal.SIGKILL):
            return state
        if state.rank not in self._why:
            self._why[state.rank] = self.want_of_memory()
        return replace(state, why=self._why[state.rank] or state.why)

    def want_of_memory(self) -> str:
        """That the kernel killed a process of this launch for it, in words; empty where nothing says so."""
        return self._memory.describe_kill(self.pids())

    def settle(self, exit_code: int | None, said: str = "") -> Culprit | None:
        """After the launcher's own end: waits for the verdict where something went wrong, and takes leave of the others.

        Args:
            exit_code: of the launcher, negative for a signal.
            said: the last line that it wrote.
        """
        if exit_code:
            self._launcher = f"its launcher {'was ' if exit_code < 0 else ''}{how_it_ended(exit_code)}"
            self._launcher_at = time.monotonic()
            self._launcher_code = None if -exit_code in (*NO_LIVES, *BY_REQUEST) else exit_code
            self._said = f": {said[:MOST_SAID]}" if said and exit_code > 0 else ""
        wrong = exit_code != 0 or any(state.broken or state.exit_code for state in self.states().values())
        began = time.monotonic()
        while wrong and exit_code is not None and not self._decided and not self._settled(time.monotonic() - began):
            self.look(0.1)
        return self._decided

    def _settled(self, seconds: float) -> bool:
        """Whether nobody is going to be named any more: a host that is lost is known as such after a time only."""
        if seconds < 2 * SETTLE_S or not self._exchange:
            return seconds >= 2 * SETTLE_S
        now, words = time.monotonic(), self._exchange.words
        heard = [words.get(host) for host in self._exchange.gang.awaited]
        fresh = all(word is not None and (word.finished or now - word.at <= UNSURE_S) for word in heard)
        return (fresh and self._exchange.decides(now)) or seconds > HOST_SILENT_S + 2 * SETTLE_S

    def leave(self) -> None:
        """This host is about to end its ranks itself: the others, who lose them, are to be told by `part`."""
        if self._exchange:
            self._exchange.left = True

    def part(self) -> None:
        """Says that this host has come to its end, and hangs up once that was heard."""
        if self._exchange:
            self._exchange.finished = True
            self._exchange.say(self._states(), at_once=True)
            ends = time.monotonic() + PARTING_S
            while not self._exchange.heard_out() and time.monotonic() < ends:
                self._exchange.step(0.1)
            self._exchange.close()
        self._beats.close()


def flight_recorder(work: Path) -> dict[str, str]:
    """Has torch keep what each process group did last, for a dump into `work`. By the old names and by those since torch 2.9.

    The files are pickles: kept as data, and never read by us.
    """
    files, entries = str(work / FLIGHT), "1000"
    return {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": entries,
        "TORCH_FR_BUFFER_SIZE": entries,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": files,
        "TORCH_FR_DUMP_TEMP_FILE": files,
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": files,
    }


def dump_flights(work: Path, ranks: Sequence[int]) -> None:
    """Asks each rank's watchdog to write down what the process group did last, and waits a moment for it."""
    asked = [rank for rank in ranks if _ask(work / f"{FLIGHT}{rank}.pipe")]
    ends = time.monotonic() + DUMP_S
    while time.monotonic() < ends and not all((work / f"{FLIGHT}{rank}").exists() for rank in asked):
        time.sleep(0.05)


def _ask(pipe: Path) -> bool:
    """Whether somebody reads there."""
    with contextlib.suppress(OSError):
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            return os.write(descriptor, b"1") == 1
        finally:
            os.close(descriptor)
    return False
