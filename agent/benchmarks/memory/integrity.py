"""Memory test: write several patterns to the device's free memory and read them back.

The patterns are the ones of classic memory tests: constants and their inverses (for stuck bits), walking bits (for coupled
bits), each word's own address (for decoder faults), random words and their inverses (for everything else). The module
`over_time` has the tests that repeat, or wait, until their share of the setting `seconds` is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from agent.benchmarks.memory import over_time
from agent.benchmarks.memory.memory_under_test import MemoryUnderTest
from agent.benchmarks.memory.patterns import fill
from agent.benchmarks.memory.wrong_words import WrongWords
from agent.benchmarks.runtime.context import Context
from agent.gang.heartbeat import describe_error
from schemas.records import ERROR

CHUNK = 1 << 27
"""Maximum number of words (8 bytes each) in one allocation. Fragmented memory has room for several allocations of this size, but
not for a single large one."""
PART = 1 << 25
"""Maximum number of words that are checked at once. A check needs 9 more bytes for each word (8 for the expected word, 1 for the
result of the comparison), so fewer words are checked at once on devices with little memory."""


def run(context: Context, settings: Mapping[str, Any]) -> None:
    """Report `integrity.wrong_words` of each pattern, and an `integrity.error` for each of the first wrong words.

    Report also `integrity.tested_share`: the tested bytes as a share of the free memory.

    The address of an error is a virtual address of this process; NVIDIA offers no way to find the memory bank from it. The error
    also has the expected word and the word that was read, so that a stuck bit can be distinguished from a lost row.
    """
    # In earlier benchmarks, other ranks may have used memory on this device. Wait until those ranks have freed it.
    context.host_barrier("start")
    free = free_bytes(context.device)
    words = min(PART, free // 2000)  # at 9 bytes a word, a check takes at most half a percent of the free memory
    wanted = int(free * settings["share"]) - 9 * words
    wanted = min(wanted, settings["most_bytes"] or wanted)
    memory = MemoryUnderTest(list(_allocate(wanted, context.device)), words)
    common: dict[str, Any] = {"unit": "1", "scope": context.device_scope}
    tests = [pattern for pattern in settings["patterns"] if pattern in over_time.TESTS]
    for pattern in settings["patterns"]:
        context.set_phase(f"integrity {pattern}")
        errors = WrongWords()
        began, passes = time.monotonic(), 0
        try:
            if pattern in tests:
                passes = over_time.TESTS[pattern](context, memory, errors, settings["seconds"] / len(tests))
            else:
                memory.write(partial(fill, pattern=pattern))
                memory.check(partial(fill, pattern=pattern), errors)
                passes = 1
        except torch.OutOfMemoryError as error:
            reason = describe_error(error)
            if not errors.count:
                context.report_absent("integrity.wrong_words", status=ERROR, reason=reason, pattern=pattern, **common)
        finally:  # wrong words count even if the device fails later; `passes` is then 0
            if passes or errors.count:
                elapsed_s = round(time.monotonic() - began, 3)
                errors.report(context, pattern, bytes=memory.bytes, passes=passes, elapsed_s=elapsed_s)
    context.report("integrity.tested_share", memory.bytes / free, bytes=memory.bytes, free_bytes=free, **common)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU after emptying this process's PyTorch cache; for a CPU the available memory of the host."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123 - not a path of ours
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def _allocate(wanted: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield chunks of `wanted` bytes in total, or of as many bytes as can be allocated.

    Raises RuntimeError if no chunk can be allocated.
    """
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
        raise RuntimeError(f"could not allocate any of the {wanted} bytes of free device memory that are to be tested")
