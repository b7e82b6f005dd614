"""Bandwidth and latency between every two hosts of a gang, in one launch: who is slow when all together are.

The hosts play a tournament (schemas/tournament.py): in each round every host meets one other, and GPU i of one exchanges with
GPU i of the other, on all rails and both ways at once. All ranks begin a round together, so that a pair which hangs is the only
one that failed: the others wait for the next round, and say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from agent.benchmarks.runtime.context import Context, failed
from agent.benchmarks.runtime.nccl import Buffer, Call, Communicator, NcclError, library
from agent.sampling.statistics import Series, summarize
from schemas.records import ERROR, SKIPPED
from schemas.tournament import chosen, partner, partners

NAMES = {"pairs.bandwidth": "B/s", "pairs.latency": "s"}
WORD = 2
"""Elements (fp32) of the exchange whose latency is told: 8 B."""
REPETITIONS = 7
"""Timed spans; the median is told."""
MOST_CALLS = 20
"""Exchanges in one span."""
TRIAL = 32
"""The first exchanges, which tell how much the pair can take, are of so small a part of the whole."""
TRIALS = 3
"""Before a figure; the best of them counts."""


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `pairs.bandwidth` in B/s each way and `pairs.latency` in s of an exchange of 8 B, of this GPU with each partner."""
    seats = Seats(context)
    if seats.hosts < 2:
        for scope in scopes(context, settings) or [context.device_scope]:
            _absent(context, scope, SKIPPED, "one host has no other to exchange with")
        return
    told = len(context.observations)
    line: Line = NcclLine(context) if context.kind == "gpu" else GlooLine(context)
    try:
        _play(context, settings, seats, line)
    except Exception as error:
        said = line.abort()
        _rest(context, settings, told, f"the rounds ended early: {said or failed(error)[1]}")
        if said:
            raise NcclError(f"{error}; {said}") from error
        raise
    line.close()
    _rest(context, settings, told, "the host was not in this launch, or has fewer ranks")


def scopes(context: Context, settings: Mapping[str, Any]) -> list[str]:
    """What the plan expects of this rank: one a host that its own meets. A host with fewer ranks has fewer of them."""
    gang, members = _names(context)
    if len(members) < 2:
        return []
    return [_scope(context, name) for name in partners(gang, members[context.node], int(settings["rounds"]))]


class Seats:
    """Which rank sits where: (number of the host, local rank) -> rank."""

    def __init__(self, context: Context) -> None:
        table = torch.zeros(context.world_size, 2, dtype=torch.int64, device=context.device)
        table[context.rank] = torch.tensor([context.node, context.local_rank], device=context.device)
        dist.all_reduce(table)
        self._rank = {(int(node), int(local)): rank for rank, (node, local) in enumerate(table.tolist())}
        nodes = [node for node, _ in self._rank]
        self.hosts = max(nodes) + 1
        self.rails = min(nodes.count(node) for node in set(nodes))
        """GPUs that every host has."""

    def rank(self, node: int, local_rank: int) -> int:
        """The rank in that place. Raises KeyError."""
        return self._rank[(node, local_rank)]


def _names(context: Context) -> tuple[list[str], list[str]]:
    """Hosts of the gang as planned, and those of this launch in rank order; none where it was started by hand."""
    try:
        request = json.loads((context.work / "request.json").read_text(encoding="utf-8"))
    except OSError:
        return [], []
    members = list(request.get("members", []))
    return list(request.get("gang") or members), members


def _play(context: Context, settings: Mapping[str, Any], seats: Seats, line: Line) -> None:
    gang, members = _names(context)
    if len(members) != seats.hosts:
        gang = members = [f"host{node}" for node in range(seats.hosts)]
    numbers = chosen(len(gang), int(settings["rounds"]))
    pair = Exchange(context, line, int(settings["size_bytes"]), float(settings["seconds"]))
    for played, number in enumerate(numbers, 1):
        place = partner(len(gang), number, gang.index(members[context.node]))
        other = gang[place] if place is not None else ""
        context.phase(f"pairs round {played} of {len(numbers)}: {f'with {other}' if other else 'rests'}")
        line.together()
        with context.heart.together():  # those who rest count with the others
            if other in members and context.local_rank < seats.rails:
                _pair(context, pair, other, seats.rank(members.index(other), context.local_rank), played)
    context.phase("pairs: the last round's others")
    line.together()


def _pair(context: Context, pair: Exchange, other: str, rank: int, played: int) -> None:
    scope = _scope(context, other)
    try:
        figures = pair.measure(rank)
    except Exception as error:
        _absent(
            context, scope, ERROR, f"in round {played}, between {context.device_scope} and {other}: {failed(error)[1]}"
        )
        context.save()
        raise
    if not figures.right:
        _absent(context, scope, ERROR, f"what arrived from {other} is not what it sent")
        return
    common: dict[str, Any] = {
        "scope": scope,
        "rail": context.local_rank,
        "round": played,
        "world_size": context.world_size,
    }
    rates = summarize([figures.size_bytes / seconds for seconds in figures.large.seconds])
    word = summarize(figures.small.seconds)
    context.measured("pairs.bandwidth", rates.p50, unit="B/s", samples=rates, size_bytes=figures.size_bytes, **common)
    context.measured("pairs.latency", word.p50, unit="s", samples=word, size_bytes=4 * WORD, **common)


def _scope(context: Context, other: str) -> str:
    return f"{context.device_scope},partner={other}"


def _absent(context: Context, scope: str, status: str, reason: str) -> None:
    for name, unit in NAMES.items():
        context.absent(name, unit=unit, scope=scope, status=status, reason=reason, rail=context.local_rank)


def _rest(context: Context, settings: Mapping[str, Any], told: int, reason: str) -> None:
    """Says why, for every partner of whom nothing was told."""
    done = {seen.scope for seen in context.observations[told:] if seen.name in NAMES}
    for scope in scopes(context, settings):
        if scope not in done:
            _absent(context, scope, SKIPPED, reason)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one pair measured."""

    small: Series
    large: Series
    size_bytes: int
    right: bool
    """What arrived is what the other sent."""


class Exchange:
    """This rank's exchange with one other after the other."""

    def __init__(self, context: Context, line: Line, size_bytes: int, seconds: float) -> None:
        self._context, self._line, self._seconds = context, line, seconds
        count = max(size_bytes // 4, TRIAL * WORD)
        self._send = torch.full((count,), float(context.rank), device=context.device)
        self._receive = torch.empty_like(self._send)
        self._said, self._heard = (torch.zeros(WORD, device=context.device) for _ in range(2))

    def measure(self, other: int) -> Figures:
        """Both ends do the same, and agree on how often by the time of the slower one."""
        context = self._context
        self._receive.fill_(-1.0)
        small = self._call(WORD, other)
        first = self._trial(small, other, 2)  # the warm-up opens the connections
        calls = self._calls(first, self._seconds / 4)
        latencies = context.time(small, REPETITIONS, calls, 0)
        part = self._send.numel() // TRIAL
        trial = self._trial(self._call(part, other), other, 1)
        while part * 2 <= self._send.numel() and trial * 2 * REPETITIONS <= self._seconds / 2:
            part, trial = part * 2, trial * 2
        repetitions = max(1, min(REPETITIONS, int(self._seconds / 2 / trial)))
        times = context.time(self._call(part, other), repetitions, self._calls(trial, self._seconds / 2), 1)
        return Figures(
            small=Series(seconds=latencies),
            large=Series(seconds=times),
            size_bytes=4 * part,
            right=bool((self._receive[:part] == float(other)).all()),
        )

    def _call(self, count: int, other: int) -> Call:
        return self._line.swap(self._send[:count], self._receive[:count], other)

    def _trial(self, call: Call, other: int, warm_up: int) -> float:
        """Seconds of one exchange, at its best: one that was held up or lost would leave too few to meet another."""
        return self._slower(min(self._context.time(call, TRIALS, 1, warm_up)), other)

    @staticmethod
    def _calls(seconds: float, budget: float) -> int:
        return max(1, min(MOST_CALLS, int(budget / REPETITIONS / seconds)))

    def _slower(self, seconds: float, other: int) -> float:
        """The longer of the two ends' times, which both then know."""
        self._said.fill_(seconds)
        self._line.swap(self._said, self._heard, other)()
        self._context.synchronize()
        return max(float(self._said[0]), float(self._heard[0]))


class Line:
    """How two ranks exchange, and all of them wait for each other."""

    def swap(self, send: torch.Tensor, receive: torch.Tensor, other: int) -> Call:
        """What starts one exchange with that rank."""
        raise NotImplementedError

    def together(self) -> None:
        """Waits until every rank is here."""
        raise NotImplementedError

    def abort(self) -> str:
        """Ends what does not end by itself; returns what it says went wrong, or an empty string."""
        return ""

    def close(self) -> None:
        """Gives back what it holds."""


class GlooLine(Line):
    """Through torch.distributed, between the CPUs of a rehearsal."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def swap(self, send: torch.Tensor, receive: torch.Tensor, other: int) -> Call:
        """What makes one exchange, and returns when it is done."""

        def call() -> None:
            for work in (dist.isend(send, other), dist.irecv(receive, other)):
                if work is not None:
                    work.wait()

        return call

    def together(self) -> None:
        """Waits until every rank is here. Raises RuntimeError where one does not come."""
        self._context.agree(1)


class NcclLine(Line):
    """NCCL itself, over a communicator of its own, so that one which hangs can be ended."""

    def __init__(self, context: Context) -> None:
        self._context = context
        nccl, problem = None, "another rank has no libnccl.so.2"
        try:
            nccl = library()
        except OSError as error:
            problem = f"{error}: torch holds NCCL within itself; install nvidia-nccl"
        if not context.agree(int(nccl is not None))[0] or nccl is None:
            raise NcclError(problem)
        store = PrefixStore("pairs", context.store)  # beside that of another communicator of this launch
        self._communicator = _Pairwise(nccl, store, context.rank, context.world_size, context.timeout_s)
        self._flag = torch.ones(1, device=context.device)
        self._wait = self._communicator.operation("all_reduce", self._flag, self._flag)

    def swap(self, send: torch.Tensor, receive: torch.Tensor, other: int) -> Call:
        """What starts one exchange on the current stream."""
        return self._communicator.swap(send, receive, other)

    def together(self) -> None:
        """Waits until every rank is here. Raises TimeoutError where one does not come."""
        with self._context.heart.together():
            self._wait()
            self._context.synchronize()

    def abort(self) -> str:
        """Takes NCCL's kernels off the GPU."""
        return self._communicator.abort()

    def close(self) -> None:
        """Gives the communicator's memory back."""
        self._communicator.close()


class _Pairwise(Communicator):
    """A communicator whose ranks also exchange two by two."""

    def swap(self, send: torch.Tensor, receive: torch.Tensor, other: int) -> Callable[[], None]:
        """What sends to, and receives from, one other rank at once."""
        return self._swap(Buffer(send), Buffer(receive), send.numel(), other, other)
