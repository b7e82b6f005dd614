"""Who is it that the others wait for? A pure function of what every supervisor said and when.

torch itself does not say: where a peer is stopped, or its link is cut, every rank fails at the process group's time-out and
names nobody. So each rank tells its supervisor how far it is, outside the process group, and each supervisor the head.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schemas.records import Culprit

RANK_SILENT_S = 8.0
"""Without a beat for so long, a rank is stopped, frozen, or gets no processor."""
HOST_SILENT_S = 10.0
UNSURE_S = 1.6
"""Two beats or words missed: nobody else is blamed until it is settled whether this one is silent."""
SETTLE_S = 2.0
"""One rank's end takes others with it; by then all of them have told when they ended, and the first is known."""
START_S = 60.0
"""A rank may go without a beat for so long while it starts: importing torch and waking a driver stops every thread of it."""
BY_REQUEST = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""A launcher ends the siblings of a failed rank so: no fault of theirs."""
SAME_MOMENT_S = 0.5
NO_LIVES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that another rank's end does not bring about, as it may an abort."""


@dataclass(frozen=True, kw_only=True)
class RankState:
    """A rank as its supervisor sees it. Times are ages, in seconds, so that no clock is compared between hosts."""

    rank: int
    scope: str
    """Its device: `gpu=3`, or `cpu=0` in a rehearsal; empty where its launcher's end took it along."""
    phase: str = ""
    sequence: int = 0
    """How many operations of all ranks it has begun; every rank counts the same ones."""
    grouped: bool = False
    """It has come to where the ranks depend on one another."""
    waiting_s: float | None = None
    """For how long it has been inside such an operation."""
    progress_s: float = 0.0
    """Since it did anything."""
    alive_s: float | None = None
    """Since its first beat; None: there was none."""
    silent_s: float = 0.0
    """Since its last beat."""
    stopped: bool = False
    """Its process is stopped, as by SIGSTOP."""
    busy: bool = False
    """It uses a processor although it does not beat: one that holds Python's lock is no silent one."""
    broken: str = ""
    """`timeout` or `error`: how a benchmark of all ranks failed on it."""
    broken_s: float | None = None
    ended_s: float | None = None
    """Since its process is gone."""
    exit_code: int | None = None
    """Negative for a signal; None where it is not known, or the rank has not ended."""
    told: bool = False
    """Its end was asked for."""
    why: str = ""
    """How it ended, where its supervisor knows more than the exit code."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What one supervisor said last."""

    at: float
    """When it was heard, by the hearer's monotonic clock."""
    ranks: tuple[RankState, ...] = ()
    finished: bool = False
    """This host has come to its end, and says nothing more."""
    left: bool = False
    """It ended its ranks itself: its deadline had passed, or it was interrupted."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What one supervisor knows."""

    me: str
    members: tuple[str, ...]
    words: Mapping[str, Word]
    """Of every host that has said anything; my own too."""
    awaited: tuple[str, ...]
    """The other hosts whose words should come here: all of them, where I watch; else the watchers."""
    began: float
    now: float
    patience_s: float
    """The process group's time-out."""


def decide(view: View) -> Culprit | None:
    """Names who stopped the gang, or nobody yet.

    A lost host comes first, since ranks elsewhere die or time out because of it; then a rank that is gone, a silent one,
    and last the one that the others waited for in vain. Slowness alone is no fault before the time-out: compiling takes long.
    Where a host has ended its ranks itself, whoever fails has lost a peer, and nobody is named any more.
    """
    if _unsettled(view) or any(word.left for word in view.words.values()):
        return None
    return _lost_host(view) or _rank_at_fault(view)


def _awaited(view: View) -> list[str]:
    return [host for host in view.awaited if host not in view.words or not view.words[host].finished]


def _unsettled(view: View) -> bool:
    """Whether a host is late, and not yet silent: who it is shows when that is settled."""
    ages = [view.now - view.words[host].at for host in _awaited(view) if host in view.words]
    return any(UNSURE_S < age <= HOST_SILENT_S for age in ages)


def _lost_host(view: View) -> Culprit | None:
    awaited = _awaited(view)
    silent = [host for host in awaited if host in view.words and view.now - view.words[host].at > HOST_SILENT_S]
    if not silent:
        return _absent_host(view, awaited)
    if len(view.members) == 2:
        text = (
            f"hosts {' and '.join(view.members)}: no word between them for {HOST_SILENT_S:g} s: the link, either host"
        )
        return Culprit(kind="host_silent", hosts=view.members, text=f"{text}, or its supervisor")
    if len(silent) == len(awaited) > 1:
        text = f"host {view.me}: no word from any other host for {HOST_SILENT_S:g} s: its own link, or all of theirs"
        return Culprit(kind="cut_off", hosts=(view.me,), text=text)
    one = len(silent) == 1
    text = f"{_hosts(silent)}: no word for {HOST_SILENT_S:g} s: {'its' if one else 'their'} link, host or supervisor"
    at = "; ".join(_place(rank) for host in silent for rank in view.words[host].ranks if rank.ended_s is None)
    return Culprit(kind="host_silent", hosts=tuple(silent), text=_cut(f"{text}; last seen {at}" if at else text))


def _absent_host(view: View, awaited: Sequence[str]) -> Culprit | None:
    absent = [host for host in awaited if host not in view.words]
    patience = join_patience(view.patience_s)
    if not absent or view.now - view.began <= patience:
        return None
    there = [host for host in view.members if host not in absent]
    text = f"{_hosts(absent)}: did not join the gang within {patience:g} s; {_hosts(there)} did"
    return Culprit(kind="host_absent", hosts=tuple(absent), text=_cut(text))


def join_patience(patience_s: float) -> float:
    """Seconds within which every host of a gang must have joined it."""
    return min(120.0, max(20.0, 2 * patience_s))


def _rank_at_fault(view: View) -> Culprit | None:
    """Of the hosts whose word is fresh: what a host said before it fell silent or finished is no news."""
    ranks = [
        (host, rank, view.now - word.at)
        for host, word in view.words.items()
        if host == view.me or view.now - word.at <= HOST_SILENT_S or word.finished
        for rank in word.ranks
    ]
    return _gone(ranks, view.patience_s) or _silent(ranks) or _behind(ranks, view.patience_s)


Seen = tuple[str, RankState, float]
"""Host, rank, and how old that word is."""


def _gone(ranks: Iterable[Seen], patience_s: float) -> Culprit | None:
    """The rank that ended first by itself, or by a signal of somebody else's."""
    ranks = list(ranks)
    if any(rank.silent_s > UNSURE_S and _may_be_silent(rank) for _, rank, _ in ranks):
        return None
    ended = [
        (rank.ended_s + age, host, rank)
        for host, rank, age in ranks
        if rank.ended_s is not None and rank.exit_code != 0 and not rank.told and not _timed_out(rank, patience_s)
    ]
    asked = [item for item in ended if item[2].exit_code is not None and -item[2].exit_code in BY_REQUEST]
    ended = [item for item in ended if item not in asked] or asked
    if not ended:
        return None
    first = max(age for age, _, _ in ended)
    if first < SETTLE_S:
        return None
    moment = [item for item in ended if first - item[0] <= SAME_MOMENT_S]
    plain = [item for item in moment if item[2].exit_code is None or -item[2].exit_code in NO_LIVES]
    _, host, rank = max(plain or moment, key=lambda item: item[0])
    return _rank("rank_ended", host, rank, rank.why or how_it_ended(rank.exit_code))


def unable(host: str, rank: RankState, why: str, more: int) -> Culprit:
    """Of a host that has come to its end: its rank, and `more` others, could not take part, and so none of the gang could."""
    others = f"; and {more} more of its ranks" if more else ""
    return _rank("rank_unable", host, replace(rank, phase="readiness check"), f"cannot take part: {why}{others}")


def how_it_ended(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is None:
        return "gone, with all that watched it"
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"ended with exit code {exit_code}"


def _timed_out(rank: RankState, patience_s: float) -> bool:
    """Whether it ended because others did not come: by its own error, or by NCCL's watchdog, which aborts the process."""
    aborted = rank.exit_code == -signal.SIGABRT and (rank.waiting_s or rank.progress_s) >= 0.8 * patience_s
    return rank.broken == "timeout" or aborted


def _may_be_silent(rank: RankState) -> bool:
    starts = rank.phase in ("", "start") and not rank.stopped
    return rank.ended_s is None and rank.alive_s is not None and not rank.busy and not starts


def _silent(ranks: Iterable[Seen]) -> Culprit | None:
    """The rank that stopped beating first."""
    living = [(host, rank) for host, rank, _ in ranks if rank.ended_s is None]
    silent = [item for item in living if _may_be_silent(item[1]) and item[1].silent_s > RANK_SILENT_S]
    late = [item for item in living if _late_start(item[1], living)]
    if not silent and late:
        host, rank = late[0]
        never = (
            f"did not start within {START_S:g} s" if rank.alive_s is None else f"silent for {START_S:g} s in its start"
        )
        return _rank("rank_absent", host, rank, never)
    working = [rank for host, rank in living if (host, rank) not in silent]
    # Ranks that do not depend on one another go on without the silent one, which costs its own figures only.
    if not silent or (working and not any(rank.grouped for rank in working)):
        return None
    host, rank = max(silent, key=lambda item: item[1].silent_s)
    why = "its process is stopped" if rank.stopped else "its process is frozen, or gets no processor"
    return _rank("rank_silent", host, rank, f"silent for {RANK_SILENT_S:g} s: {why}")


def _late_start(rank: RankState, living: Sequence[tuple[str, RankState]]) -> bool:
    if rank.alive_s is None:
        return any((other.alive_s or 0.0) > START_S for _, other in living)
    return rank.phase in ("", "start") and not rank.busy and rank.silent_s > START_S


def _behind(ranks: Iterable[Seen], patience_s: float) -> Culprit | None:
    """The rank for which the others waited until their time-out."""
    ranks = list(ranks)
    expired = [
        ((rank.ended_s or 0.0) if rank.broken_s is None else rank.broken_s) + age
        for _, rank, age in ranks
        if _timed_out(rank, patience_s)
    ]
    if not expired or max(expired) < SETTLE_S:
        return None
    waited = f"the others waited for it until their time-out of {patience_s:g} s"
    failed = [
        (rank.broken_s + age, host, rank)
        for host, rank, age in ranks
        if rank.broken == "error" and rank.broken_s is not None and rank.broken_s + age > max(expired) + SETTLE_S
    ]
    if failed:
        _, host, rank = max(failed, key=lambda item: item[0])
        return _rank("rank_behind", host, rank, f"failed by itself, and {waited}")
    reached = min((rank.sequence for _, rank, _ in ranks if _timed_out(rank, patience_s)), default=0)
    rest = [(host, rank) for host, rank, _ in ranks if not _timed_out(rank, patience_s) and rank.ended_s is None]
    lagging = [item for item in rest if item[1].waiting_s is None and item[1].sequence < reached]
    if not lagging and len(rest) == 1 and rest[0][1].waiting_s is None:
        lagging = rest
    if not lagging:
        return None
    host, rank = min(lagging, key=lambda item: (item[1].sequence, -item[1].progress_s))
    return _rank("rank_behind", host, rank, f"alive, but {waited}")


def _rank(kind: str, host: str, rank: RankState, why: str) -> Culprit:
    text = f"host {host} {_place(rank)}: {why}"
    return Culprit(
        kind=kind, hosts=(host,), text=_cut(text), scope=rank.scope, rank=rank.rank, phase=rank.phase or "start"
    )


def _place(rank: RankState) -> str:
    return f'{rank.scope} rank {rank.rank} in phase "{rank.phase or "start"}"'.lstrip()


def _hosts(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f"host{'s' if len(names) > 1 else ''} {shown}"


def _cut(text: str) -> str:
    return text if len(text) <= 2000 else f"{text[:1999]}…"


def rank_from_json(document: Mapping[str, Any]) -> RankState:
    """A rank's state as another supervisor sent it.

    Raises:
        ValueError: it is none.
    """
    wrong = [str(name) for name, value in document.items() if not _is(value, _TYPES.get(name, ()))]
    if wrong or not {"rank", "scope"} <= set(document):
        raise ValueError(f"no state of a rank: {', '.join(wrong) or 'rank or scope is missing'}")
    return RankState(**document)


_NUMBER = (int, float)
_TYPES: Mapping[str, tuple[type, ...]] = {
    "rank": (int,),
    "scope": (str,),
    "phase": (str,),
    "sequence": (int,),
    "grouped": (bool,),
    "waiting_s": (*_NUMBER, type(None)),
    "progress_s": _NUMBER,
    "alive_s": (*_NUMBER, type(None)),
    "silent_s": _NUMBER,
    "stopped": (bool,),
    "busy": (bool,),
    "broken": (str,),
    "broken_s": (*_NUMBER, type(None)),
    "ended_s": (*_NUMBER, type(None)),
    "exit_code": (int, type(None)),
    "told": (bool,),
    "why": (str,),
}


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool) and bool not in kinds:
        return False
    return isinstance(value, kinds) and len(value if isinstance(value, str) else "") <= 512
