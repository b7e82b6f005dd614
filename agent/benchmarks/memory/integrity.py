"""Every word of the device's free memory, written and read back in several patterns: do all cells remember?

The patterns are those of the classic memory tests: constants and their inverses (stuck bits), walking bits (coupled bits),
every word's own address (decoder faults), random words and their inverses (everything else).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context

CHUNK = 1 << 27
"""Words of 8 bytes in one allocation: a free memory in pieces has room for many small ones where one large finds none."""
PART = 1 << 25
"""Words that are checked at once, against as many that are made anew; fewer where there is little memory."""
WALK = 64


def run(context: Context, settings: dict[str, Any]) -> None:
    """Reports `integrity.wrong_words` for each pattern, `.tested_share` of the free memory, and `.first_error` if there is one.

    An address is the virtual one in this process: NVIDIA gives no way from it to a bank. The word expected and the word
    read stand beside it, so that a stuck bit can be told from a lost row.
    """
    context.meet("the others' memory is given back")
    free = _free(context.device)
    words = min(PART, free // 2000)  # with what comparing them takes, half a percent of the memory
    wanted = int(free * float(settings["share"])) - 9 * words
    wanted = min(wanted, int(settings["most_bytes"]) or wanted)
    chunks = list(_allocate(wanted, context.device))
    tested = sum(chunk.numel() for chunk in chunks) * 8
    part = torch.empty(min(words, max(chunk.numel() for chunk in chunks)), dtype=torch.int64, device=context.device)
    common: dict[str, Any] = {"unit": "1", "scope": context.device_scope}
    for pattern in settings["patterns"]:
        context.phase(f"integrity {pattern}")
        for chunk in chunks:
            _each(chunk, part, pattern, write=True)
        wrong = torch.zeros((), dtype=torch.int64, device=context.device)
        for chunk in chunks:
            wrong += _each(chunk, part, pattern, write=False)
        context.measured("integrity.wrong_words", int(wrong), pattern=pattern, bytes=tested, **common)
        if int(wrong):
            where = next(found for chunk in chunks if (found := _first(chunk, part, pattern)))
            context.measured("integrity.first_error", where, pattern=pattern, **common)
    context.measured("integrity.tested_share", tested / free, bytes=tested, free_bytes=free, **common)


def _free(device: torch.device) -> int:
    """Bytes that nobody uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - not a path of ours
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def _allocate(wanted: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Chunks of memory of `wanted` bytes in all, or as much as there is; raises RuntimeError where there is none."""
    count, words, given = CHUNK, max(1, wanted // 8), 0
    while words > 0 and count >= 1 << 16:
        try:
            chunk = torch.empty(min(count, words), dtype=torch.int64, device=device)
        except torch.OutOfMemoryError:
            count //= 2
            continue
        words -= chunk.numel()
        given += chunk.numel()
        yield chunk
    if not given:
        raise RuntimeError(f"no memory could be had of the {wanted} bytes that are free")


def _each(chunk: torch.Tensor, part: torch.Tensor, pattern: str, *, write: bool) -> torch.Tensor | int:
    """Writes the pattern, or counts the words that differ from it."""
    wrong: torch.Tensor | int = 0
    for start in range(0, chunk.numel(), part.numel()):
        words = chunk[start : start + part.numel()]
        if write:
            fill(words, pattern, chunk.data_ptr() // 8 + start)
        else:
            right = part[: words.numel()]
            fill(right, pattern, chunk.data_ptr() // 8 + start)
            wrong = wrong + (words != right).sum()
    return wrong


def _first(chunk: torch.Tensor, part: torch.Tensor, pattern: str) -> str:
    """The first wrong word of the chunk: where, what should be there, what is; empty where all are right."""
    for start in range(0, chunk.numel(), part.numel()):
        words = chunk[start : start + part.numel()]
        right = part[: words.numel()]
        fill(right, pattern, chunk.data_ptr() // 8 + start)
        differ = (words != right).nonzero()
        if len(differ):
            at = int(differ[0])
            expected, found = (int(some[at]) & (1 << 64) - 1 for some in (right, words))
            address = chunk.data_ptr() + (start + at) * 8
            return f"address {address:#x}: expected {expected:#018x}, read {found:#018x}"
    return ""


def fill(words: torch.Tensor, pattern: str, address: int) -> None:
    """Writes the pattern into `words` (int64), the first of which has this address, in words."""
    kind = pattern.removeprefix("inverse_")
    if kind in CONSTANTS:
        words.fill_(CONSTANTS[kind])
    elif kind in ("walking_ones", "walking_zeros"):
        bits = torch.ones(WALK, dtype=torch.int64, device=words.device) << torch.arange(WALK, device=words.device)
        bits = bits.roll(-(address % WALK))
        whole = words.numel() // WALK * WALK
        words[:whole].view(-1, WALK).copy_(bits)
        words[whole:] = bits[: words.numel() - whole]
    elif kind == "address":
        torch.arange(address, address + words.numel(), out=words)
    elif kind == "random":
        words.random_(-(1 << 63), (1 << 63) - 1, generator=torch.Generator(words.device).manual_seed(address))
    else:
        raise ValueError(f"unknown pattern {pattern}")
    if pattern.startswith("inverse_") or kind == "walking_zeros":
        words.bitwise_not_()


CONSTANTS = {"zeros": 0, "ones": -1, "checkerboard": 0x5555555555555555}
"""Patterns of one word, as int64."""
