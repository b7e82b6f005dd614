"""Memory tests report every injected fault with its address and bits, and no fault in healthy memory of any size."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.benchmarks.memory import integrity, over_time, patterns
from agent.benchmarks.memory.memory_under_test import MemoryUnderTest
from agent.benchmarks.memory.wrong_words import MOST_RECORDED, WrongWords, list_bits
from agent.benchmarks.runtime.context import Context
from schemas.benchmarks.hardware import PATTERNS, TESTS_OVER_TIME
from schemas.catalogue import settings
from schemas.records import Observation
from tests.unit.agent.benchmarks.test_measuring import context

ALL = (*PATTERNS, *TESTS_OVER_TIME)
SEEDS = range(6)


def run(folder: Path, **chosen: Any) -> Context:
    rank = context(folder)
    integrity.run(rank, settings("integrity", {"most_bytes": 1 << 18, "seconds": 0.05, **chosen}))
    return rank


def figures_of(rank: Context, name: str) -> list[Observation]:
    """Return the observations of the figure `integrity.NAME`."""
    return [item for item in rank.observations if item.name == f"integrity.{name}"]


def memory_of(*chunks: int, part: int) -> MemoryUnderTest:
    """Return a memory with one chunk for each number of words in `chunks`, tested in parts of at most `part` words."""
    return MemoryUnderTest([torch.zeros(words, dtype=torch.int64) for words in chunks], part)


def reference(words: int, address: int, value_of: Callable[[int], int]) -> list[int]:
    """Return the values of `words` words from `address` on; `value_of` computes a word's value from its address."""
    return [value_of(address + index) for index in range(words)]


# ---- patterns ----


def test_memory_patterns_differ() -> None:
    written = set()
    for pattern in PATTERNS:
        words = torch.empty(1000, dtype=torch.int64)
        patterns.fill(words, 12345, pattern=pattern)
        written.add(tuple(words.tolist()))
    assert len(written) == len(PATTERNS) >= 10


def test_patterns_continue_across_parts() -> None:
    for pattern in ("walking_ones", "inverse_address"):
        whole, half = torch.empty(300, dtype=torch.int64), torch.empty(150, dtype=torch.int64)
        patterns.fill(whole, 7, pattern=pattern)
        patterns.fill(half, 7 + 150, pattern=pattern)
        assert torch.equal(whole[150:], half)
    words = torch.empty(64, dtype=torch.int64)
    patterns.fill(words, 0, pattern="walking_ones")
    assert sorted(bin(int(word) & (1 << 64) - 1).count("1") for word in words) == [1] * 64


@pytest.mark.parametrize("seed", SEEDS)
def test_modulo_pattern_equals_a_reference(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(50):
        count, address, offset = rng.randrange(1, 200), rng.randrange(10**6), rng.randrange(20)
        words = torch.zeros(count, dtype=torch.int64)
        patterns.fill_modulo(words, address, offset=offset, value=77)
        expected = reference(count, address, lambda word: 77 if word % 20 == offset else ~77)  # noqa: B023
        assert words.tolist() == expected
        patterns.rewrite_others(words, address, offset=offset, value=77)
        assert words.tolist() == expected


def test_complete_groups_are_rewritten_except_their_first_words() -> None:
    words = torch.zeros(65, dtype=torch.int64)
    patterns.rewrite_others(words, 3, offset=5, value=77)  # groups of 20 words begin at 2, 22 and 42
    assert [index for index, word in enumerate(words.tolist()) if word] == [
        index for index in range(2, 62) if index not in (2, 22, 42)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_stripes_equal_a_reference(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(50):
        count, address = rng.randrange(1, 300), rng.randrange(10**6)
        width, phase = rng.choice((1, 4, 32, 128)), rng.randrange(2)
        words = torch.zeros(count, dtype=torch.int64)
        patterns.fill_stripes(words, address, width=width, phase=phase, value=5)
        stripe = [(address + index) // width % 2 == phase for index in range(count)]
        assert words.tolist() == [~5 if inverse else 5 for inverse in stripe]
        patterns.invert_stripes(words, address, width=width, phase=phase)
        assert words.tolist() == [5] * count


# ---- healthy memory ----


@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_memory_of_any_size_has_no_wrong_words(seed: int, tmp_path: Path) -> None:
    rank = context(tmp_path)
    rng = random.Random(seed)  # noqa: S311 - no secret
    sizes = [rng.choice((1, 2, 19, 20, 21, 63, 65, rng.randrange(1, 30_000))) for _ in range(4)]
    memory = memory_of(*sizes, part=rng.choice((1 << 20, 20_000, 4099, 997)))
    for pattern in PATTERNS:
        errors = WrongWords()
        memory.write(partial(patterns.fill, pattern=pattern))
        memory.check(partial(patterns.fill, pattern=pattern), errors)
        assert errors.count == 0, pattern
    for name, test in over_time.TESTS.items():
        errors = WrongWords()
        assert test(rank, memory, errors, 0.0) == 1
        assert errors.count == 0, name


def test_every_pattern_reports_its_passes_and_time(tmp_path: Path) -> None:
    rank = run(tmp_path, patterns=[*ALL], seconds=0.5)
    counts = figures_of(rank, "wrong_words")
    assert [item.params["pattern"] for item in counts] == [*ALL]
    for item in counts:
        assert (item.value, item.params["wrong_addresses"], item.params["wrong_bits"]) == (0, 0, "")
        assert item.params["bytes"] == 1 << 18
    times = {str(item.params["pattern"]): float(str(item.params["elapsed_s"])) for item in counts}
    assert all(times[name] >= 0.1 for name in TESTS_OVER_TIME), times
    assert next(item for item in counts if item.params["pattern"] == "moving_inversions").params["passes"] > 1  # type: ignore[operator]
    assert not figures_of(rank, "error")
    assert len(figures_of(rank, "tested_share")) == 1


# ---- faulty memory ----


def flip_after_write(monkeypatch: pytest.MonkeyPatch, flip: Callable[[MemoryUnderTest], None]) -> None:
    """Call `flip` with the memory each time a memory test has written all of it."""
    write = MemoryUnderTest.write

    def write_and_flip(memory: MemoryUnderTest, fill: Any) -> None:
        write(memory, fill)
        flip(memory)

    monkeypatch.setattr(MemoryUnderTest, "write", write_and_flip)


@pytest.mark.parametrize("pattern", [name for name in ALL if name != "modulo_20"])
def test_flipped_bits_are_reported_with_address_and_words(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped: list[int] = []

    def flip(memory: MemoryUnderTest) -> None:
        memory.chunks[0][333] ^= 1 << 17 | 1 << 3
        flipped.append(memory.chunks[0].data_ptr() + 333 * 8)

    flip_after_write(monkeypatch, flip)
    rank = run(tmp_path, patterns=[pattern], seconds=0.0)
    (count,) = figures_of(rank, "wrong_words")
    assert count.value == len(flipped)
    assert (count.params["wrong_addresses"], count.params["wrong_bits"]) == (1, "3, 17")
    (error,) = figures_of(rank, "error")
    assert (error.params["address"], error.params["bits"], error.params["number"]) == (hex(flipped[0]), "3, 17", 1)
    assert int(str(error.params["expected"]), 16) ^ int(str(error.value), 16) == 1 << 17 | 1 << 3


def test_modulo_20_finds_a_word_that_changes_when_its_neighbours_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = over_time.rewrite_others

    def disturb(words: torch.Tensor, address: int, *, offset: int, value: int) -> None:
        rewrite(words, address, offset=offset, value=value)
        if words.numel() > 4321 and (address + 4321) % 20 == offset:
            words[4321] |= 1 << 40

    monkeypatch.setattr(over_time, "rewrite_others", disturb)
    rank = run(tmp_path, patterns=["modulo_20"], seconds=0.3)
    (count,) = figures_of(rank, "wrong_words")
    assert int(str(count.value)) >= 1
    assert (count.params["wrong_addresses"], count.params["wrong_bits"]) == (1, "40")


def test_neighbours_finds_a_word_that_changes_when_its_neighbours_are_inverted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    invert = over_time.invert_stripes

    def disturb(words: torch.Tensor, address: int, *, width: int, phase: int) -> None:
        invert(words, address, width=width, phase=phase)
        if (address + 1000) // width % 2 != phase:  # not itself one of the inverted words
            words[1000] |= 1

    monkeypatch.setattr(over_time, "invert_stripes", disturb)
    monkeypatch.setattr(over_time, "_random_word", lambda seed: 0)
    rank = run(tmp_path, patterns=["neighbours"], seconds=0.0)
    (count,) = figures_of(rank, "wrong_words")
    assert (count.value, count.params["wrong_bits"]) == (len(over_time.STRIPE_BYTES), "0")


class Fading:
    """Memory that loses bit 63 of one word when `fade` is called: while the memory test sleeps or multiplies matrices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory: list[MemoryUnderTest] = []
        self.fades = 0
        flip_after_write(monkeypatch, self.memory.append)

    def fade(self) -> None:
        self.fades += 1
        self.memory[-1].chunks[0][5] &= ~(1 << 63) & (1 << 64) - 1

    def check(self, rank: Context) -> None:
        """Check that the loss of bit 63 was found once: of the pattern and its inverse, only one has this bit set."""
        (count,) = figures_of(rank, "wrong_words")
        (error,) = figures_of(rank, "error")
        assert self.fades
        assert (count.value, count.params["wrong_addresses"], count.params["wrong_bits"]) == (1, 1, "63")
        assert error.params["address"] == hex(self.memory[-1].chunks[0].data_ptr() + 40)
        assert int(str(error.params["expected"]), 16) - int(str(error.value), 16) == 1 << 63


def test_bit_that_fades_while_the_memory_rests_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fading, sleep = Fading(monkeypatch), over_time.time.sleep

    def sleep_and_fade(seconds: float) -> None:
        sleep(seconds)
        fading.fade()

    monkeypatch.setattr(over_time.time, "sleep", sleep_and_fade)
    fading.check(run(tmp_path, patterns=["fade"], seconds=0.05))


def test_bit_that_fades_only_in_heat_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fading, build = Fading(monkeypatch), over_time.build_product

    def hot_product(*arguments: Any, **options: Any) -> Any:
        multiply, check = build(*arguments, **options)

        def multiply_and_fade() -> torch.Tensor:
            if fading.memory:
                fading.fade()
            return multiply()

        return multiply_and_fade, check

    monkeypatch.setattr(over_time, "build_product", hot_product)
    fading.check(run(tmp_path, patterns=["hot_fade"], seconds=0.05))
    assert figures_of(run(tmp_path, patterns=["fade"], seconds=0.05), "wrong_words")[0].value == 0


@pytest.mark.parametrize("pattern", ["random", "moving_inversions", "fade"])
def test_stuck_column_is_reported_with_its_bit(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit 9 of every 64th word is always 1. The test `random` finds about half of these words, the other tests find all."""
    compare = WrongWords.compare

    def compare_stuck(errors: WrongWords, words: torch.Tensor, expected: torch.Tensor, fill: Any, address: int) -> None:
        words[::64] |= 1 << 9
        compare(errors, words, expected, fill, address)

    monkeypatch.setattr(WrongWords, "compare", compare_stuck)
    rank = run(tmp_path, patterns=[pattern], most_bytes=1 << 16, seconds=0.0)
    (count,) = figures_of(rank, "wrong_words")
    words = (1 << 13) // 64
    assert count.params["wrong_bits"] == "9"
    assert words // 4 <= int(str(count.params["wrong_addresses"])) <= words
    assert int(str(count.value)) >= int(str(count.params["wrong_addresses"]))
    errors = figures_of(rank, "error")
    assert [item.params["number"] for item in errors] == [*range(1, MOST_RECORDED + 1)]
    assert len({item.params["address"] for item in errors}) == MOST_RECORDED
    assert all(
        int(str(item.params["address"]), 16) % 512 == int(str(errors[0].params["address"]), 16) % 512 for item in errors
    )


def test_every_word_of_a_dead_memory_counts_although_few_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.benchmarks.memory.wrong_words.MOST_EXAMINED", 1000)
    monkeypatch.setattr("agent.benchmarks.memory.wrong_words.SLICE", 300)
    memory, errors = memory_of(5000, 70, part=2048), WrongWords()
    memory.write(partial(patterns.fill, pattern="zeros"))
    memory.check(partial(patterns.fill, pattern="ones"), errors)
    assert errors.count == 5070
    assert len(errors._addresses) == 1000


def test_word_that_is_right_when_read_again_is_recorded_without_bits(tmp_path: Path) -> None:
    """The comparison of all words finds a difference, but the word is right when it is read again."""

    class Transient(torch.Tensor):
        """A tensor of correct words whose comparison with the expected words reports that word 7 differs."""

        def __ne__(self, other: object) -> Any:
            result = torch.Tensor.__ne__(self, other)  # type: ignore[arg-type]
            result[7] = True
            return result

    words = torch.zeros(100, dtype=torch.int64).as_subclass(Transient)
    errors, rank = WrongWords(), context(tmp_path)
    errors.compare(words, torch.empty(100, dtype=torch.int64), partial(patterns.fill, pattern="zeros"), 50)
    errors.report(rank, "zeros", bytes=800, passes=1, elapsed_s=0.1)
    (count,), (error,) = figures_of(rank, "wrong_words"), figures_of(rank, "error")
    assert (count.value, count.params["wrong_addresses"], count.params["wrong_bits"]) == (1, 1, "")
    assert (error.params["address"], error.params["expected"], error.value) == (hex(57 * 8), f"{0:#018x}", f"{0:#018x}")


def test_only_hot_fade_fails_without_memory_for_matrix_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(over_time, "build_product", fail)
    rank = run(tmp_path, patterns=["zeros", "hot_fade", "fade"], seconds=0.0)
    assert [(item.params["pattern"], item.status) for item in figures_of(rank, "wrong_words")] == [
        ("zeros", "measured"),
        ("hot_fade", "error"),
        ("fade", "measured"),
    ]


def test_bits_are_listed_from_the_lowest() -> None:
    assert list_bits(1 << 63 | 1 << 4 | 1) == "0, 4, 63"
    assert list_bits(0) == ""
