"""Memory test: write several patterns to the device's free memory and read them back.

The patterns are the ones of classic memory tests: constants and their inverses (find stuck bits), walking bits (coupled
bits), each word's own address (decoder faults), random words and their inverses (everything else).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context

CHUNK = 1 << 27
"""Words (8 bytes) in one allocation: fragmented memory has room for many small allocations, but not for one large one."""
PART = 1 << 25
"""Words that are checked at once. The expected words need as much memory again, so the number is smaller on small devices."""
WALK = 64
CONSTANTS = {"zeros": 0, "ones": -1, "checkerboard": 0x5555555555555555}
"""Patterns of one word, as int64."""
UNSIGNED = (1 << 64) - 1


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `integrity.wrong_words` of each pattern, `.tested_share` of the free memory, and `.first_error` if there is one.

    `first_error` has a virtual address of this process; NVIDIA offers no way to find the memory bank from it. It also has
    the expected word and the word that was read, so that a stuck bit can be distinguished from a lost row.
    """
    context.host_barrier("start")  # the other ranks have then freed their memory on this device
    free = _free_bytes(context.device)
    words = min(PART, free // 2000)  # with the temporary memory of a comparison, half a percent of the free memory
    wanted = int(free * settings["share"]) - 9 * words
    wanted = min(wanted, settings["most_bytes"] or wanted)
    chunks = list(_allocate(wanted, context.device))
    tested = sum(chunk.numel() for chunk in chunks) * 8
    part = torch.empty(min(words, max(chunk.numel() for chunk in chunks)), dtype=torch.int64, device=context.device)
    common: dict[str, Any] = {"unit": "1", "scope": context.device_scope}
    for pattern in settings["patterns"]:
        context.set_phase(f"integrity {pattern}")
        for chunk in chunks:
            _write(chunk, part.numel(), pattern)
        wrong = torch.zeros((), dtype=torch.int64, device=context.device)
        for chunk in chunks:
            wrong += _count_wrong_words(chunk, part, pattern)
        context.report("integrity.wrong_words", int(wrong), pattern=pattern, bytes=tested, **common)
        if int(wrong):
            errors = (error for chunk in chunks if (error := _first_error(chunk, part, pattern)))
            first_error = next(errors, "none of the words is wrong when read again")
            context.report("integrity.first_error", first_error, pattern=pattern, **common)
    context.report("integrity.tested_share", tested / free, bytes=tested, free_bytes=free, **common)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - not a path of ours
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def _allocate(wanted: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield chunks of `wanted` bytes in total, or as much as can be allocated. Raises RuntimeError if nothing can."""
    count, words, allocated = CHUNK, max(1, wanted // 8), 0
    while words > 0 and count >= 1 << 16:
        try:
            chunk = torch.empty(min(count, words), dtype=torch.int64, device=device)
        except torch.OutOfMemoryError:
            count //= 2
            continue
        words -= chunk.numel()
        allocated += chunk.numel()
        yield chunk
    if not allocated:
        raise RuntimeError(f"could not allocate device memory, although {wanted} bytes are free")


def _parts(chunk: torch.Tensor, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the chunk in parts of `count` words, each with the address of its first word divided by 8."""
    for start in range(0, chunk.numel(), count):
        yield chunk.data_ptr() // 8 + start, chunk[start : start + count]


def _write(chunk: torch.Tensor, count: int, pattern: str) -> None:
    for address, words in _parts(chunk, count):
        fill(words, pattern, address)


def _count_wrong_words(chunk: torch.Tensor, part: torch.Tensor, pattern: str) -> torch.Tensor:
    """Return the number of words that differ from the pattern. `part` is overwritten with the expected words."""
    wrong = torch.zeros((), dtype=torch.int64, device=chunk.device)
    for address, words in _parts(chunk, part.numel()):
        expected = part[: words.numel()]
        fill(expected, pattern, address)
        wrong += (words != expected).sum()
    return wrong


def _first_error(chunk: torch.Tensor, part: torch.Tensor, pattern: str) -> str:
    """Describe the first wrong word of the chunk; empty if all words are correct."""
    for address, words in _parts(chunk, part.numel()):
        expected = part[: words.numel()]
        fill(expected, pattern, address)
        positions = (words != expected).nonzero()
        if len(positions):
            first = int(positions[0])
            wanted, read = (int(values[first]) & UNSIGNED for values in (expected, words))
            return f"address {(address + first) * 8:#x}: expected {wanted:#018x}, read {read:#018x}"
    return ""


def fill(words: torch.Tensor, pattern: str, address: int) -> None:
    """Write the pattern into `words` (int64). `address`: of the first word, divided by 8."""
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
