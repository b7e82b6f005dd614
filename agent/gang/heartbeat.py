"""Beats: each rank tells its supervisor how far it is, outside the process group, and while its main thread waits in it.

By datagrams and not through files: a disk that is full or slow must not make a rank look dead. NCCL and gloo release
Python's lock while they wait, so that no beat means: the process is stopped, gone, or gets no processor.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from agent.gang.culprit import UNSURE_S, RankState

BEAT_S = 0.5
BUSY_SHARE = 0.05
"""Of one processor."""
MOST_BYTES = 4096
SOCKET = "beats"
ADDRESS, SUPERVISOR = "RACKPROOF_BEATS", "RACKPROOF_SUPERVISOR"
"""In the environment of a rank: the directory of the socket, and the process that must live for the rank to go on."""
LAUNCHED = "RACKPROOF_LAUNCHED"
"""The same: `time.monotonic()` when the supervisor started the launcher."""


class Heart:
    """A rank's side. Without an address it counts and says nothing, as in ranks that were started by hand."""

    def __init__(self, rank: int = 0, directory: Path | None = None) -> None:
        self._voice = Voice(rank, directory)
        self.phase = "start"
        self.grouped = False
        """From here on the ranks depend on one another."""
        self._sequence = 0
        self._waiting: float | None = None
        self._progress = time.monotonic()
        self._broken: tuple[str, float] | None = None
        self._speaks = threading.Lock()
        """What was looked at first is said first: a beat from before a failure must not take it back."""
        if self._voice.heard:
            self.beat()
            threading.Thread(target=self._go_on, name="heart", daemon=True).start()

    def _go_on(self) -> None:
        while self._voice.heard:
            time.sleep(BEAT_S)
            self.beat()

    def beat(self) -> None:
        """Says how far this rank is."""
        with self._speaks:
            now, waiting, broken = time.monotonic(), self._waiting, self._broken
            self._voice.say(
                "beat",
                pid=os.getpid(),
                phase=self.phase[:300],
                sequence=self._sequence,
                grouped=self.grouped,
                waiting_since=waiting,
                progress_at=min(self._progress, now),
                broken=broken[0] if broken else "",
                broken_at=broken[1] if broken else None,
            )

    def step(self) -> None:
        """Something was done."""
        self._progress = time.monotonic()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around an operation that every rank takes part in: whoever has begun fewer of them is the one waited for."""
        self._sequence += 1
        self._waiting = self._progress = time.monotonic()
        yield  # after an error the rank still counts as one that waited
        self._waiting = None
        self._progress = time.monotonic()

    def fail(self, problem: str) -> None:
        """A benchmark of all ranks failed here: because the others did not come in time, or by itself."""
        if self._broken is None:
            kind = "timeout" if re.search(r"tim(ed?|ing)[ _-]?out", problem, re.IGNORECASE) else "error"
            self._broken = (kind, time.monotonic())
            self.beat()


@cache
def heart() -> Heart:
    """This process's own, begun at the first call."""
    directory = os.environ.get(ADDRESS, "")
    return Heart(int(os.environ.get("RANK", "0")), Path(directory) if directory else None)


class Voice:
    """One end of the socket: small datagrams, never waited for for long."""

    def __init__(self, rank: int, directory: Path | None) -> None:
        self._rank = rank
        self.heard = False
        if directory is None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError), _short(directory) as short:
            self._socket.connect(f"{short}/{SOCKET}")
            self.heard = True
        if not self.heard:
            self._socket.close()

    def say(self, kind: str, patience_s: float = 0.0, **what: Any) -> None:
        """Sends it; where too much is queued it is lost, and the next one says more. Nothing is said to a closed socket."""
        if self.heard:
            message = json.dumps({"kind": kind, "rank": self._rank, "at": time.monotonic(), **what})
            self._socket.settimeout(patience_s)
            with contextlib.suppress(OSError):
                try:
                    self._socket.send(message.encode())
                except ConnectionRefusedError:
                    self.heard = False
                    self._socket.close()


@contextlib.contextmanager
def _short(directory: Path) -> Iterator[str]:
    """Another path of the directory: that of a socket may have 107 bytes only."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class Beats:
    """The supervisor's side: what its ranks said last.

    The socket lies in `directory`, which is the supervisor's own and private: nobody else can speak there.
    """

    def __init__(self, directory: Path, ranks: Mapping[int, str]) -> None:
        """`ranks`: rank -> its device, as `gpu=3`."""
        self._ranks = {rank: _Seen(rank, scope, directory) for rank, scope in ranks.items()}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        (directory / SOCKET).unlink(missing_ok=True)
        with _short(directory) as short:
            self.socket.bind(f"{short}/{SOCKET}")

    def read(self) -> bool:
        """Takes in what was said; True where a rank began, broke or ended."""
        news = False
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self.socket.recv(MOST_BYTES)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    message = json.loads(data)
                    news |= self._ranks[message["rank"]].take(message)
        return news

    def states(self) -> tuple[RankState, ...]:
        """Every rank as it is now."""
        return tuple(self._ranks[rank].state() for rank in sorted(self._ranks))

    def forgive(self, seconds: float) -> None:
        """While the supervisor itself did not run, nobody was silent."""
        for seen in self._ranks.values():
            seen.heard_at += seconds

    def close(self) -> None:
        """No more."""
        self.socket.close()


class _Seen:
    """One rank, as its own and its guard's messages tell it."""

    def __init__(self, rank: int, scope: str, directory: Path) -> None:
        self._rank, self._scope, self._directory = rank, scope, directory
        self.heard_at = 0.0
        self._first_at: float | None = None
        self._beat: dict[str, Any] = {}
        self._guard = 0
        self._used: tuple[float, float] | None = None
        self._ended_at: float | None = None
        self._end: dict[str, Any] = {}
        self._inferred = False

    def take(self, message: Mapping[str, Any]) -> bool:
        """One message; True where it is news."""
        now, kind = time.monotonic(), message["kind"]
        if kind == "beat":
            news = message["broken"] != self._beat.get("broken", "") or self._first_at is None
            self._beat, self.heard_at, self._used = dict(message), now, None
            self._first_at = self._first_at or now
            return news
        if kind == "guard":
            self._guard = int(message["pid"])
        elif kind == "end" and (not self._end or self._inferred):
            self._end, self._ended_at, self._inferred = dict(message), min(now, float(message["at"])), False
            return True
        return False

    def state(self) -> RankState:
        """What is known, as ages."""
        now, beat = time.monotonic(), self._beat
        if self._ended_at is None and self._guard and process(self._guard) is None:
            self._ended_at, self._inferred = (
                now,
                True,
            )  # until its own word comes; and whoever ended the guard has ended the rank with it
            self._end = {"code": exit_code_left(self._directory, self._rank)}
        silent = 0.0 if self._first_at is None else now - self.heard_at
        stopped, busy = self._look(silent) if silent > UNSURE_S and self._ended_at is None else (False, False)
        return RankState(
            rank=self._rank,
            scope=self._scope,
            phase=str(beat.get("phase", "")),
            sequence=int(beat.get("sequence", 0)),
            grouped=bool(beat.get("grouped", False)),
            waiting_s=_age(beat.get("waiting_since"), now),
            progress_s=_age(beat.get("progress_at"), now) or 0.0,
            alive_s=_age(self._first_at, now),
            silent_s=silent,
            stopped=stopped,
            busy=busy,
            broken=str(beat.get("broken", "")),
            broken_s=_age(beat.get("broken_at"), now),
            ended_s=_age(self._ended_at, now),
            exit_code=self._end.get("code"),
            told=bool(self._end.get("told", False)),
        )

    def _look(self, silent: float) -> tuple[bool, bool]:
        """Whether its process is stopped, and whether it is at work all the same."""
        found = process(int(self._beat.get("pid", 0)))
        if found is None or found.state in ("T", "t"):
            return found is not None, False
        if (
            found.state == "D"
        ):  # in the kernel, for a disk or a device: slow and not lost; the time-out of the group ends it
            return False, True
        if self._used is None:
            self._used = (silent, found.seconds)
        since = silent - self._used[0]
        return False, since <= 0 or found.seconds - self._used[1] > BUSY_SHARE * since


def exit_code_left(directory: Path, rank: int) -> int | None:
    """The exit code that a rank wrote down itself, if it came so far."""
    try:
        code = json.loads((directory / f"rank{rank}.state.json").read_bytes())["exit_code"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, int) else None


def _age(moment: float | None, now: float) -> float | None:
    return None if moment is None else round(max(0.0, now - moment), 3)


class Process:
    """What /proc tells of one process."""

    def __init__(self, fields: list[str]) -> None:
        self.state, self.parent, self.born = fields[0], int(fields[1]), fields[19]
        self.seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        """Of processor time."""


def process(pid: int) -> Process | None:
    """The process; None where there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else Process(fields)


def identity(pid: int) -> str:
    """A process id and when it began, which together name one process."""
    found = process(pid)
    return f"{pid} {found.born}" if found else ""


def lives(identity_: str) -> bool:
    """Whether the process of that identity still runs; True where none is given."""
    return not identity_ or identity(int(identity_.split()[0])) == identity_
