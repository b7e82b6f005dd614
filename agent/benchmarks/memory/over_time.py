"""Memory tests that need time: data stay in memory for minutes on an idle or hot device, or neighbouring words change often.

The tests are those of memtest86+ (moving inversions, modulo 20, bit fade; https://www.memtest86.com/tech_memtest-algoritm.html
explains the first two) and of cuda_memtest, which brought them to GPUs. The test `neighbours` inverts stripes of words often, to
disturb the words between them. It uses stripes of several widths, because the row and bank of an address are unknown, so single
rows cannot be selected. Tests control the order of accesses only between parts (the words that one call reads or writes): the
order in which a device accesses the words of one part is unknown.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from agent.benchmarks.compute.gemm import build_product, unsupported_reason
from agent.benchmarks.memory.memory_under_test import MemoryUnderTest
from agent.benchmarks.memory.patterns import MODULO, fill, fill_modulo, fill_stripes, invert_stripes, rewrite_others
from agent.benchmarks.memory.wrong_words import WrongWords
from agent.benchmarks.runtime.context import Context

FADE_PATTERNS = ("random", "inverse_random")
"""Patterns of `fade` and `hot_fade`. memtest86+ writes zeros to all cells, then ones. Random words, followed by their inverses,
also give each cell both values. Moreover they give many neighbouring cells different values, which makes a cell lose its
charge faster."""
WAIT_STEP_S = 5.0
"""Longest wait between two reports of progress to the supervisor, in seconds."""
HEATER_SIZE, CPU_HEATER_SIZE = 4096, 256
"""Rows and columns of the matrices whose products heat the device. The matrices and their creation take 170 MB, which must fit
into the 2 % of the free memory that the default `share` leaves untested: 480 MB on a GPU with 24 GB. (The benchmark `stress`
uses 8192 rows and columns.)"""
HEATER_CALLS = 500
"""Matrix products that are queued before the host waits for them. They take 0.1 s on an H100 at 700 TFLOP/s."""
BYTE_PATTERNS = [int.from_bytes(bytes([1 << bit]) * 8, "big", signed=True) for bit in range(8)]
"""Words whose bytes all have the same single bit set, one word for each of the eight bits: test 3 of cuda_memtest."""
REWRITES = 2
"""How many times `modulo_20` rewrites all words except every 20th; memtest86+ rewrites them "one or more times"."""
STRIPE_BYTES = (256, 1024, 4096, 16384, 65536)
"""Widths of the stripes of `neighbours`. The second width, 1 KiB, is the row size of a pseudo channel of HBM2 and HBM3 (JEDEC
JESD235 and JESD238)."""
INVERSIONS = 32
"""How many times `neighbours` inverts every second stripe before it reads all words. The number is even, so that the stripes end
as they began."""

Test = Callable[[Context, MemoryUnderTest, WrongWords, float], int]
"""A test runs for about as many seconds as its last argument, but makes at least one pass. It returns the number of passes."""


def _fade(context: Context, memory: MemoryUnderTest, errors: WrongWords, budget_s: float) -> int:
    """Write each pattern, wait without any access, then read it: only the refresh of the memory keeps the data."""
    for pattern in FADE_PATTERNS:
        memory.write(partial(fill, pattern=pattern))
        context.synchronize()
        deadline = time.monotonic() + budget_s / len(FADE_PATTERNS)
        while (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, WAIT_STEP_S))
            context.heartbeat.record_progress()
        memory.check(partial(fill, pattern=pattern), errors)
    return 1


def _hot_fade(context: Context, memory: MemoryUnderTest, errors: WrongWords, budget_s: float) -> int:
    """Write each pattern, heat the device with matrix products in the rest of its memory, then read the pattern.

    Wrong products are not counted here; `stress` counts them.
    """
    on_gpu = context.device.type == "cuda"
    dtype = "fp16" if unsupported_reason("bf16", context.device) else "bf16"
    multiply, _ = build_product(
        dtype if on_gpu else "fp32", HEATER_SIZE if on_gpu else CPU_HEATER_SIZE, context.device, seed=1
    )
    multiply()  # the library allocates its memory now, not while a pattern is in memory
    for pattern in FADE_PATTERNS:
        memory.write(partial(fill, pattern=pattern))
        context.synchronize()
        deadline = time.monotonic() + budget_s / len(FADE_PATTERNS)
        while time.monotonic() < deadline:
            for _ in range(HEATER_CALLS if on_gpu else 1):
                multiply()
            context.synchronize()
            context.heartbeat.record_progress()
        memory.check(partial(fill, pattern=pattern), errors)
    return 1


def _moving_inversions(context: Context, memory: MemoryUnderTest, errors: WrongWords, number: int) -> None:
    """Make pass `number`: check each part and then write its inverse, first from the first part to the last, then in reverse.

    So a write that also changes a word of another part is detected. Each pass has its own value: pass 0 has 0, the next passes
    have the values of BYTE_PATTERNS, and later passes have random values.
    """
    values = (0, *BYTE_PATTERNS)
    value = values[number] if number < len(values) else _random_word(number)
    write, write_inverse = partial(_write_word, value=value), partial(_write_word, value=~value)
    memory.write(write)
    parts = list(memory.parts())
    for words, address in parts:
        memory.check_part(words, address, write, errors)
        write_inverse(words, address)
    for words, address in reversed(parts):
        memory.check_part(words, address, write_inverse, errors)
        write(words, address)
    context.heartbeat.record_progress()


def _modulo_20(context: Context, memory: MemoryUnderTest, errors: WrongWords, number: int) -> None:
    """For each of 20 offsets, write every 20th word once and all other words several times, then read all words.

    A cache cannot hide an error, because nearly all other words are written between the write of a word and its check.
    """
    for offset in range(MODULO):
        value = _random_word(number * MODULO + offset)
        write = partial(fill_modulo, offset=offset, value=value)
        memory.write(write)
        for _ in range(REWRITES):
            memory.write(partial(rewrite_others, offset=offset, value=value))
        memory.check(write, errors)
        context.heartbeat.record_progress()


def _neighbours(context: Context, memory: MemoryUnderTest, errors: WrongWords, number: int) -> None:
    """Invert every second stripe INVERSIONS times, then check all words.

    This is done for each width of the stripes, first with the even stripes, then with the odd ones. All inversions of one chunk
    (one allocation) are done before those of the next chunk. A chunk of the maximum size, 1 GiB, is larger than any cache of a
    GPU, so each inversion of such a chunk reads and writes the memory itself, not only the cache.
    """
    value = _random_word(number)
    for width in (size // 8 for size in STRIPE_BYTES):
        for phase in (0, 1):
            write = partial(fill_stripes, width=width, phase=phase, value=value)
            memory.write(write)
            for chunk in memory.chunks:
                for _ in range(INVERSIONS):
                    invert_stripes(chunk, chunk.data_ptr() // 8, width=width, phase=phase)
            memory.check(write, errors)
            context.heartbeat.record_progress()


def _write_word(words: torch.Tensor, address: int, *, value: int) -> None:
    words.fill_(value)


def _random_word(seed: int) -> int:
    """Return a random word, as int64."""
    return random.Random(seed).getrandbits(64) - (1 << 63)  # noqa: S311 - no secret


def _repeated(one_pass: Callable[[Context, MemoryUnderTest, WrongWords, int], None]) -> Test:
    """Return a test that calls `one_pass` with the pass numbers 0, 1, 2, … until its time is used."""

    def run(context: Context, memory: MemoryUnderTest, errors: WrongWords, budget_s: float) -> int:
        deadline, number = time.monotonic() + budget_s, 0
        while number == 0 or time.monotonic() < deadline:
            one_pass(context, memory, errors, number)
            number += 1
        return number

    return run


TESTS: Mapping[str, Test] = {
    "fade": _fade,
    "hot_fade": _hot_fade,
    "moving_inversions": _repeated(_moving_inversions),
    "modulo_20": _repeated(_modulo_20),
    "neighbours": _repeated(_neighbours),
}
