"""Inference: decoding with a KV cache gives the right scores, wrong tokens are counted, and percentiles need enough samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.training import inference
from agent.benchmarks.training.inference import Decoder, Engine, percentile
from schemas.benchmarks.training import TRAINING
from schemas.catalogue import settings
from schemas.records import Observation
from tests.unit.agent.benchmarks.test_measuring import context

QUICK = {**(TRAINING["inference"].cpu_settings or {}), "steps": 6, "seconds": 0.01}


def measure(work: Path, **chosen: Any) -> list[Observation]:
    measuring = context(work)
    inference.run(measuring, settings("inference", {**QUICK, **chosen}))
    return measuring.observations


def value(observations: list[Observation], name: str) -> Any:
    return next(item.value for item in observations if item.name == f"inference.{name}")


@torch.inference_mode()
def test_cached_decoding_gives_the_scores_of_the_whole_sequence(tmp_path: Path) -> None:
    """Scores that are computed token by token with the cache are compared with those of a prefill of the same tokens."""
    engine = Engine(context(tmp_path), settings("inference", QUICK))
    model, cache = engine._model.float(), engine._cache
    cache.keys, cache.values = ([part.float() for part in parts] for parts in (cache.keys, cache.values))
    tokens = torch.randint(inference.VOCABULARY, (engine.sequences, 20))
    prompts = tokens[:, :16]
    for sequence in range(engine.sequences):
        model.prefill(prompts[sequence : sequence + 1], cache, sequence)
    cached = [model.decode(tokens[:, at], cache, torch.tensor([at])) for at in range(16, 20)]
    for count, scores in zip(range(17, 21), cached, strict=True):
        whole = model.prefill(tokens[:1, :count], cache, 0)
        torch.testing.assert_close(scores[:1], whole, rtol=1e-4, atol=1e-4)


def test_healthy_device_has_no_wrong_token_and_fills_the_allowed_memory(tmp_path: Path) -> None:
    # A sequence takes 4 B (a key and a value in bf16) x 2 layers x width 64 x 22 positions (prompt and steps). There is room for
    # 20 sequences, and this number is rounded down to a multiple of 8: 16.
    observations = measure(tmp_path, most_bytes=20 * 4 * 2 * 64 * 22)
    assert value(observations, "wrong_tokens") == 0
    free = inference.free_bytes(torch.device("cpu"))
    assert value(observations, "cache_share") * free == pytest.approx(16 * 4 * 2 * 64 * 22, rel=0.2)


@pytest.mark.parametrize("scores", ["negated", "not finite"])
def test_wrong_scores_are_counted(tmp_path: Path, scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of one sequence are wrong from the 21st call of the decoder on."""
    right, calls = Decoder.decode, []

    def decode(self: Decoder, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        result = right(self, *arguments)
        if len(calls) > 20:
            result[3] = math.nan if scores == "not finite" else -result[3]
        return result

    monkeypatch.setattr(Decoder, "decode", decode)
    assert value(measure(tmp_path, steps=30), "wrong_tokens") > 0


def test_percentile_without_enough_samples_is_an_error_with_its_reason(tmp_path: Path) -> None:
    observations = measure(tmp_path, percentiles=["p50", "p99_9"])
    median, tail = (item for item in observations if item.name == "inference.token_interval")
    assert isinstance(median.value, float)
    assert tail.status == "error"
    assert "percentile p99_9 needs 1000; increase `seconds` or `steps`" in tail.reason


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(number) for number in range(1, 1001)]
    assert [percentile(values, share) for share in (0.5, 0.99, 0.999)] == [500, 990, 999]


def test_cache_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the cache of one sequence needs"):
        measure(tmp_path, most_bytes=100)
