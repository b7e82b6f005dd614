"""Bandwidth and latency between the two hosts of each pair in a gang (the hosts of one multi-node launch).

The figures show which host makes a whole gang slow. One launch measures all pairs, in a round-robin tournament
(schemas/tournament.py); the setting `rounds` can limit the number of its rounds. In each round every host has a partner; if the
number of hosts is odd, one host has none. The GPUs with local rank i of the two hosts form rail i, and exchange data with each
other. All rails do so at once, and each in both directions at once.

All ranks start a round together. If a pair hangs, all other ranks finish their round and wait for the next round. So only the
figures of that pair are reported as errors. Then the benchmark ends, and all ranks report the pairs of later rounds as skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from agent.benchmarks.collectives.operations import pattern
from agent.benchmarks.links.pair_scopes import expected_scopes, host_names, pair_scope
from agent.benchmarks.runtime.context import Context
from agent.benchmarks.runtime.nccl import Communicator, NcclError
from agent.gang.heartbeat import describe_error
from agent.sampling.statistics import summarize
from schemas.benchmarks.communication import SMALL_MESSAGE_BYTES
from schemas.records import ERROR, SKIPPED
from schemas.tournament import partner, select_rounds

UNITS = {"pairs.bandwidth": "B/s", "pairs.latency": "s"}
WORD = SMALL_MESSAGE_BYTES // 4
"""Elements (fp32) of the message whose latency is measured."""
REPETITIONS = 7
"""Number of timed spans for each message size. The result of a span is the mean time of its exchanges, and the median of the
results is reported. If the setting `seconds` is too short for so many large exchanges, there are fewer spans."""
MAX_CALLS = 20
"""Maximum number of exchanges in one span."""
TRIAL_SHARE = 32
"""The exchanges that estimate the bandwidth of the pair send 1/TRIAL_SHARE of the buffer."""
TRIALS = 3
"""Number of exchanges that estimate the time of one exchange. A rank's estimate is the time of the fastest of them."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `pairs.bandwidth` (B/s in each direction) and `pairs.latency` (seconds for 8 B) of this GPU with each partner.

    If the last message from the partner has wrong elements, report their number as `pairs.wrong_elements`, and an error instead
    of the bandwidth and the latency.
    """
    layout = RankLayout(context)
    if layout.hosts < 2:
        for scope in expected_scopes(context, settings) or [context.device_scope]:
            _report_absent(context, scope, SKIPPED, "the pairs benchmark needs two hosts")
        return
    first = len(context.observations)
    transport: PairTransport = NcclTransport(context) if context.kind == "gpu" else GlooTransport(context)
    try:
        _play_rounds(context, settings, layout, transport)
    except Exception as error:
        nccl_error = transport.abort()
        reason = f"the tournament of host pairs ended early: {nccl_error or describe_error(error)}"
        _report_remaining(context, settings, first, reason)
        if nccl_error:
            raise NcclError(f"{error}; {nccl_error}") from error
        raise
    transport.close()
    reason = f"the partner was not in this launch, or a host of the launch has no local rank {context.local_rank}"
    _report_remaining(context, settings, first, reason)


class RankLayout:
    """Maps (number of the host, local rank) to the rank."""

    def __init__(self, context: Context) -> None:
        table = torch.zeros(context.world_size, 2, dtype=torch.int64, device=context.device)
        table[context.rank] = torch.tensor([context.node, context.local_rank], device=context.device)
        dist.all_reduce(table)
        self._ranks = {(int(node), int(local)): rank for rank, (node, local) in enumerate(table.tolist())}
        nodes = [node for node, _ in self._ranks]
        self.hosts = max(nodes) + 1
        self.rails = min(nodes.count(node) for node in set(nodes))
        """Number of ranks on the host with the fewest ranks. A rank takes part only if its local rank is below this number."""

    def rank(self, node: int, local_rank: int) -> int:
        """Return the rank with this host number and local rank. Raises KeyError if there is none."""
        return self._ranks[(node, local_rank)]


def _play_rounds(context: Context, settings: Mapping[str, Any], layout: RankLayout, transport: PairTransport) -> None:
    gang, members = host_names(context)
    if len(members) != layout.hosts:
        gang = members = [f"host{node}" for node in range(layout.hosts)]
    rounds = select_rounds(len(gang), settings["rounds"])
    exchange = PairExchange(context, transport, settings["size_bytes"], settings["seconds"])
    for count, number in enumerate(rounds, 1):
        index = partner(len(gang), number, gang.index(members[context.node]))
        other = gang[index] if index is not None else ""
        context.set_phase(f"pairs round {count} of {len(rounds)}: {f'with {other}' if other else 'without a partner'}")
        transport.barrier()
        # `in_collective` counts operations. The rank with the lowest count is reported as the rank for which the others wait. So
        # ranks without a partner enter this block too.
        with context.heartbeat.in_collective():
            if other in members and context.local_rank < layout.rails:
                peer = layout.rank(members.index(other), context.local_rank)
                _measure_pair(context, exchange, other, peer, count)
    context.set_phase("pairs: waiting for the last round")
    transport.barrier()


def _measure_pair(context: Context, exchange: PairExchange, other: str, peer: int, count: int) -> None:
    scope = pair_scope(context, other)
    try:
        result = exchange.measure(peer)
    except Exception as error:
        reason = f"in round {count}, between {context.device_scope} and {other}: {describe_error(error)}"
        _report_absent(context, scope, ERROR, reason)
        context.save()
        raise
    common: dict[str, Any] = {
        "scope": scope,
        "rail": context.local_rank,
        "round": count,
        "world_size": context.world_size,
    }
    if result.wrong:
        context.report_wrong_data("pairs.wrong_elements", result.wrong, invalid=UNITS, **common)
        return
    rates = summarize([result.size_bytes / seconds for seconds in result.large])
    latencies = summarize(result.small)
    context.report("pairs.bandwidth", rates, unit="B/s", size_bytes=result.size_bytes, **common)
    context.report("pairs.latency", latencies, unit="s", size_bytes=SMALL_MESSAGE_BYTES, **common)


def _report_absent(context: Context, scope: str, status: str, reason: str) -> None:
    for name, unit in UNITS.items():
        context.report_absent(name, unit=unit, scope=scope, status=status, reason=reason, rail=context.local_rank)


def _report_remaining(context: Context, settings: Mapping[str, Any], first: int, reason: str) -> None:
    """Report `reason` for each partner that has neither a figure nor an error in the observations from index `first` on."""
    reported = {item.scope for item in context.observations[first:] if item.name in UNITS}
    for scope in expected_scopes(context, settings):
        if scope not in reported:
            _report_absent(context, scope, SKIPPED, reason)


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """Measurements of one pair."""

    small: Sequence[float]
    """Seconds of one exchange of 8 B, for each timed span."""
    large: Sequence[float]
    """Seconds of one exchange of `size_bytes`, for each timed span."""
    size_bytes: int
    wrong: int
    """Number of elements received in the last exchange that differ from what the other rank sent."""


class PairExchange:
    """Exchanges data with one other rank at a time."""

    def __init__(self, context: Context, transport: PairTransport, size_bytes: int, seconds: float) -> None:
        self._context, self._transport, self._seconds = context, transport, seconds
        count = max(size_bytes // 4, TRIAL_SHARE * WORD)
        self._pattern = pattern(0, count, context.device)
        self._send = self._pattern + context.rank  # whole numbers below 2²⁴, which fp32 represents exactly
        self._receive = torch.empty_like(self._send)
        self._own_time, self._peer_time = (torch.zeros(WORD, device=context.device) for _ in range(2))

    def measure(self, peer: int) -> PairResult:
        """Measure bandwidth and latency with rank `peer`.

        Both ranks compute the same number of exchanges, because both use the estimate of the slower rank.
        """
        context = self._context
        self._receive.fill_(-1.0)
        small = self._exchange(WORD, peer)
        estimate = self._estimate(small, peer, 2)  # the warm-up opens the connections
        latencies = context.time(small, REPETITIONS, self._calls(estimate, self._seconds / 4), 0)
        size = self._send.numel() // TRIAL_SHARE
        estimate = self._estimate(self._exchange(size, peer), peer, 1)
        while size * 2 <= self._send.numel() and estimate * 2 * REPETITIONS <= self._seconds / 2:
            size, estimate = size * 2, estimate * 2
        repetitions = max(1, min(REPETITIONS, int(self._seconds / 2 / estimate)))
        times = context.time(self._exchange(size, peer), repetitions, self._calls(estimate, self._seconds / 2), 1)
        return PairResult(
            small=latencies,
            large=times,
            size_bytes=4 * size,
            wrong=int((self._receive[:size] != self._pattern[:size] + peer).sum()),
        )

    def _exchange(self, count: int, peer: int) -> Callable[[], None]:
        return self._transport.exchange(self._send[:count], self._receive[:count], peer)

    def _estimate(self, call: Callable[[], None], peer: int, warm_up: int) -> float:
        """Return the estimated seconds of one exchange: the fastest of TRIALS exchanges, on the slower of the two ranks.

        The fastest exchange is used, not the mean, because a single delayed exchange would make the estimate too long.
        """
        return self._longer_time(min(self._context.time(call, TRIALS, 1, warm_up)), peer)

    @staticmethod
    def _calls(seconds: float, budget: float) -> int:
        return max(1, min(MAX_CALLS, int(budget / REPETITIONS / seconds)))

    def _longer_time(self, seconds: float, peer: int) -> float:
        """Send `seconds` to rank `peer`, receive the seconds of that rank, and return the longer time."""
        self._own_time.fill_(seconds)
        self._transport.exchange(self._own_time, self._peer_time, peer)()
        self._context.synchronize()
        return max(float(self._own_time[0]), float(self._peer_time[0]))


class PairTransport(Protocol):
    """How two ranks exchange data, and how all ranks wait for each other."""

    def exchange(self, send: torch.Tensor, receive: torch.Tensor, peer: int) -> Callable[[], None]:
        """Return a function that sends the buffer `send` to rank `peer`, and fills `receive` with what that rank sends."""

    def barrier(self) -> None:
        """Wait for all ranks. Raises RuntimeError or TimeoutError if a rank does not arrive."""

    def abort(self) -> str:
        """Abort operations that hang; return the error that the transport reports, or an empty string."""

    def close(self) -> None:
        """Free the transport's resources."""


class GlooTransport:
    """Exchanges data through torch.distributed with gloo, for rehearsals, which have no GPUs."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def exchange(self, send: torch.Tensor, receive: torch.Tensor, peer: int) -> Callable[[], None]:
        """Return a function that exchanges the buffers once and waits until the exchange is complete."""

        def call() -> None:
            for work in (dist.isend(send, peer), dist.irecv(receive, peer)):
                if work is not None:
                    work.wait()

        return call

    def barrier(self) -> None:
        """Wait for all ranks. Raises RuntimeError if a rank does not arrive."""
        self._context.min_max_over_ranks(1)

    def abort(self) -> str:
        """Do nothing: operations of gloo that hang end by their time-out."""
        return ""

    def close(self) -> None:
        """Do nothing."""


class NcclTransport:
    """Exchanges data through an NCCL communicator of its own, so that operations that hang can be aborted."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._communicator = Communicator.connect(context, "pairs")
        # The attribute keeps the tensor alive: the operation below stores only the address of its memory.
        self._flag = torch.ones(1, device=context.device)
        self._all_reduce = self._communicator.operation("all_reduce", self._flag, self._flag)

    def exchange(self, send: torch.Tensor, receive: torch.Tensor, peer: int) -> Callable[[], None]:
        """Return a function that starts one exchange on the CUDA stream that is current now."""
        return self._communicator.exchange(send, receive, peer)

    def barrier(self) -> None:
        """Wait for all ranks. Raises TimeoutError if a rank does not arrive."""
        with self._context.heartbeat.in_collective():
            self._all_reduce()
            self._context.synchronize()

    def abort(self) -> str:
        """Stop NCCL's kernels on the GPU; return the error that NCCL reports, or an empty string."""
        return self._communicator.abort()

    def close(self) -> None:
        """Free the communicator."""
        self._communicator.close()
