"""Inference of a decoder with a full KV cache: rates of prefill and greedy decoding, percentiles of the latencies, wrong tokens.

The decoder has the blocks of `transformer`, in bf16, with one KV head per query head. Each sequence has `prompt` tokens and room
for `steps` more. The cache takes the fraction `share` of the free memory, but at most `most_bytes`. All sequences in the cache
are decoded together; a step decodes one token of each sequence. A step reads the whole cache and masks the part that is not yet
written, so that all steps take the same time.

After each step the host waits for the device, as a server does before it sends a token. Times are those of the host's clock, so
they include kernel launches and delays by other processes of the host.

The weights and prompts are seeded, and every round decodes the same prompts greedily. Each token must equal the token at the same
position of the same sequence in the first round. The operations have no atomic additions and are launched in the same way each
time, so any other token is a wrong result.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from agent.benchmarks.memory.integrity import free_bytes
from agent.benchmarks.runtime.agreement import log
from agent.benchmarks.runtime.context import Context, cuda_stream
from agent.benchmarks.training.transformer import VOCABULARY, Block
from agent.gang.heartbeat import describe_error
from agent.sampling.statistics import summarize
from schemas.records import ERROR

SEED = 20261128
MULTIPLE = 8
"""If at least MULTIPLE sequences fit, their number is rounded down to a multiple of MULTIPLE. So GPUs of one model usually decode
equally many sequences, although their free memory differs slightly."""
WARM_UP = 3
PERCENTILES = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999}


class Decoder(nn.Module):
    """A network of the blocks of `transformer`. The keys and values of earlier tokens are in a `Cache`."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    @property
    def _layers(self) -> Iterator[Block]:
        return (block for block in self.blocks if isinstance(block, Block))

    def prefill(self, tokens: torch.Tensor, cache: Cache, sequence: int) -> torch.Tensor:
        """Write the keys and values of the prompt `tokens` (1, length) to row `sequence` of the cache.

        Return the scores (1, VOCABULARY) of the next token.
        """
        length = tokens.shape[1]
        states = self.embedding(tokens)
        for layer, block in enumerate(self._layers):
            queries, keys, values = block.project(states)
            cache.keys[layer][sequence, :, :length] = keys[0]
            cache.values[layer][sequence, :, :length] = values[0]
            attended = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            states = block.finish(states, attended)
        return self._scores(states[:, -1])

    def decode(self, tokens: torch.Tensor, cache: Cache, position: torch.Tensor) -> torch.Tensor:
        """Write the keys and values of `tokens` (N,), one per sequence, to the cache at `position` (1,).

        Return the scores (N, VOCABULARY) of the tokens that follow.
        """
        states = self.embedding(tokens)[:, None]
        unwritten = torch.arange(cache.length, device=tokens.device) > position
        for layer, block in enumerate(self._layers):
            queries, new_keys, new_values = block.project(states)
            keys, values = cache.keys[layer], cache.values[layer]
            keys.index_copy_(2, position, new_keys)
            values.index_copy_(2, position, new_values)
            # Not scaled_dot_product_attention, because its fallback may copy keys and values to fp32.
            scores = (queries @ keys.transpose(2, 3)).float() / math.sqrt(queries.shape[-1])
            shares = scores.masked_fill(unwritten, -math.inf).softmax(dim=-1)
            states = block.finish(states, shares.to(values.dtype) @ values)
        return self._scores(states[:, 0])

    def _scores(self, states: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.norm(states)).float()
        return scores


class Cache:
    """For each layer a tensor of keys and one of values, each (sequences, heads, length, width / heads), zero at first."""

    def __init__(self, settings: Mapping[str, Any], sequences: int, device: torch.device) -> None:
        self.length = settings["prompt"] + settings["steps"]
        shape = (sequences, settings["heads"], self.length, settings["width"] // settings["heads"])
        # Zeros, because a masked position has weight 0, and 0 times an infinite value that was left in the memory would be NaN.
        self.keys, self.values = (
            [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(settings["layers"])]
            for _ in range(2)
        )

    @staticmethod
    def bytes_per_sequence(settings: Mapping[str, Any]) -> int:
        """Return the bytes that the keys and values of one full sequence take in all layers."""
        return 2 * 2 * int(settings["layers"] * settings["width"] * (settings["prompt"] + settings["steps"]))


@dataclass
class Times:
    """Seconds of each prefill and of each decoding step, and the numbers of rounds and wrong tokens."""

    prefills: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    rounds: int = 0
    wrong_tokens: int = 0


class Engine:
    """Decodes the same prompts again and again, and compares the tokens with those of the first round."""

    def __init__(self, context: Context, settings: Mapping[str, Any]) -> None:
        self._context, self._settings, device = context, settings, context.device
        torch.manual_seed(SEED)
        with device:  # created on the device: creating it on one CPU core takes seconds
            model = Decoder(settings["layers"], settings["width"], settings["heads"])
        self._model = model.to(torch.bfloat16).eval()
        self.free_bytes = free_bytes(device)
        self.sequences = _count_sequences(settings, self.free_bytes)
        self._cache = Cache(settings, self.sequences, device)
        generator = torch.Generator().manual_seed(SEED)
        prompts = torch.randint(VOCABULARY, (self.sequences, settings["prompt"]), generator=generator)
        self._prompts = prompts.to(device)
        self._tokens = torch.zeros(self.sequences, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._expected = torch.zeros(settings["steps"] + 1, self.sequences, dtype=torch.int64, device=device)
        self.times = Times()
        self.graphed = False
        self._step: Callable[[], object] = self._decode
        self._warm_up()

    def _warm_up(self) -> None:
        for _ in range(WARM_UP):
            self._prefill(0)
        for _ in range(WARM_UP):
            self._position.fill_(self._settings["prompt"])
            self._decode()
        self._context.synchronize()
        if self._context.device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        """Capture a decoding step as a CUDA graph. If that fails, the steps run without one."""
        side, current = cuda_stream(self._context.device), torch.cuda.current_stream(self._context.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._position.fill_(self._settings["prompt"])
            self._decode()
        current.wait_stream(side)
        self._context.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._decode()
        except RuntimeError as error:
            self._context.synchronize()
            log(f"rank {self._context.rank}: no CUDA graph of a decoding step: {describe_error(error)}")
            return
        self._step, self.graphed = graph.replay, True

    def _prefill(self, sequence: int) -> None:
        scores = self._model.prefill(self._prompts[sequence : sequence + 1], self._cache, sequence)
        self._tokens[sequence : sequence + 1] = self._choose(scores)

    def _decode(self) -> None:
        # The index -1 (see `_choose`) in the embedding would end the process before the wrong token is counted. `_check` replaces
        # -1 after a measured step, but the warm-up does not call `_check`.
        known = self._tokens.clamp(min=0)
        self._tokens.copy_(self._choose(self._model.decode(known, self._cache, self._position)))
        self._position += 1

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the token with the highest score of each row; -1, which is no token, if a score of the row is not finite."""
        return torch.where(scores.isfinite().all(dim=-1), scores.argmax(dim=-1), -1)

    def run(self, seconds: float) -> None:
        """Decode for about `seconds`, in at least two rounds.

        The first round runs all steps. A later round ends when `seconds` have passed, but runs at least one step. After the
        rounds, prefill until there are enough samples for the percentiles of the time to the first token.
        """
        deadline = time.monotonic() + seconds
        while not self.times.rounds or time.monotonic() < deadline:
            self._round(deadline)
        if self.times.rounds == 1:
            self._round(deadline)
        needed = max(map(least_samples, self._settings["first_percentiles"]), default=0)
        while len(self.times.prefills) < needed:  # a round has only as many prefills as sequences
            self._prefill_all(is_first=False)

    def _round(self, deadline: float) -> None:
        is_first = self.times.rounds == 0
        self._prefill_all(is_first)
        self._position.fill_(self._settings["prompt"])
        for step in range(self._settings["steps"]):
            self.times.steps.append(self._timed(self._step))
            self._check(step + 1, is_first)
            if not is_first and time.monotonic() > deadline:
                break
        self.times.rounds += 1

    def _prefill_all(self, is_first: bool) -> None:
        for sequence in range(self.sequences):
            self.times.prefills.append(self._timed(lambda sequence=sequence: self._prefill(sequence)))  # type: ignore[misc]
        self._check(0, is_first)

    def _check(self, step: int, is_first: bool) -> None:
        if is_first:
            # Expect 0 in place of -1 (scores not finite), so that -1 counts as a wrong token in the first round too.
            self._expected[step] = self._tokens.clamp(min=0)
        self.times.wrong_tokens += int((self._tokens != self._expected[step]).sum())
        self._tokens.clamp_(min=0)

    def _timed(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        self._context.synchronize()
        return time.perf_counter() - began


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report tokens per second, times to the first token and between tokens, wrong tokens, the cache's share of free memory."""
    # In earlier benchmarks, other ranks may have used memory on this device. Wait until those ranks have freed it.
    context.host_barrier("start")
    with torch.inference_mode():
        engine = Engine(context, settings)
        context.host_barrier("decode")
        context.set_phase("inference")
        times = engine.times
        common: dict[str, Any] = {"scope": context.device_scope, "dtype": "bf16", "graphed": engine.graphed}
        try:
            engine.run(settings["seconds"])
        except BaseException:  # wrong tokens are reported even if the device fails later
            if times.wrong_tokens:
                context.report("inference.wrong_tokens", times.wrong_tokens, unit="1", **common)
            raise
    rates = {
        "prefill": [settings["prompt"] / seconds for seconds in times.prefills],
        "decode": [engine.sequences / seconds for seconds in times.steps],
    }
    for kind, values in rates.items():
        context.report(f"inference.{kind}_throughput", summarize(values), unit="tokens/s", **common)
    _report_percentiles(context, "inference.first_token", times.prefills, settings["first_percentiles"], common)
    _report_percentiles(context, "inference.token_interval", times.steps, settings["percentiles"], common)
    context.report("inference.wrong_tokens", times.wrong_tokens, unit="1", **common)
    cache_bytes = engine.sequences * Cache.bytes_per_sequence(settings)
    context.report("inference.cache_share", cache_bytes / engine.free_bytes, unit="1", **common)


def _report_percentiles(
    context: Context, name: str, seconds: Sequence[float], percentiles: Sequence[str], common: Mapping[str, Any]
) -> None:
    """Report each percentile, or report it as absent if there are fewer samples than `least_samples`."""
    for key in percentiles:
        share, least = PERCENTILES[key], least_samples(key)
        if len(seconds) < least:
            reason = f"too few samples: {len(seconds)}; percentile {key} needs {least}; increase `seconds` or `steps`"
            context.report_absent(name, unit="s", status=ERROR, reason=reason, percentile=key, **common)
            continue
        context.report(name, percentile(seconds, share), unit="s", percentile=key, **common)


def least_samples(key: str) -> int:
    """Return how many samples the percentile `key` needs. Of fewer samples, the percentile would be the largest."""
    return round(1 / (1 - PERCENTILES[key]))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value v such that at least this share of the values is <= v (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def _count_sequences(settings: Mapping[str, Any], free: int) -> int:
    """Return how many sequences fit both into the fraction `share` of the free memory and into `most_bytes` (0: no limit).

    The number is rounded as described at MULTIPLE.

    Raises:
        RuntimeError: not even one sequence fits.
    """
    wanted = min(settings["share"] * free, settings["most_bytes"] or math.inf)
    count = int(wanted // Cache.bytes_per_sequence(settings))
    if not count:
        needed = Cache.bytes_per_sequence(settings)
        raise RuntimeError(
            f"the cache of one sequence needs {needed / 1e9:.3g} GB; {wanted / 1e9:.3g} GB are allowed (`share` of the free "
            "memory, at most `most_bytes`)"
        )
    return count - count % MULTIPLE or count
