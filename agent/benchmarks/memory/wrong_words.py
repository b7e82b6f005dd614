"""Compare device memory with what was written to it. Count all wrong words; keep address and wrong bits of the first ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agent.benchmarks.runtime.context import Context

Fill = Callable[[torch.Tensor, int], None]
"""Writes the expected words into a tensor (int64). The second argument is the address of the first word, divided by 8."""

SLICE = 1 << 20
"""Number of words that are searched for errors at once. This limits the memory for the list of wrong words: 8 bytes for each."""
MOST_EXAMINED = 1 << 16
"""Maximum number of wrong words of one pattern whose addresses and bits are examined. Further wrong words are only counted."""
MOST_RECORDED = 16
"""Maximum number of wrong words of one pattern that get an observation of their own."""
WORD_BITS = 64
UNSIGNED = (1 << WORD_BITS) - 1


class WrongWords:
    """The wrong words that the test with one pattern finds: their number, addresses and wrong bits.

    Addresses and bits are kept only for the first MOST_EXAMINED wrong words.
    """

    def __init__(self) -> None:
        self.count = 0
        self._examined = 0
        self._addresses: set[int] = set()
        self._bits = 0
        """The bits that were wrong in any examined word."""
        self._recorded: dict[tuple[int, int], tuple[int, int]] = {}
        """Address and wrong bits of a word -> the expected word, and the word as it was read the second time."""

    def compare(self, words: torch.Tensor, expected: torch.Tensor, fill: Fill, address: int) -> None:
        """Count the words that differ from what `fill` writes.

        `expected` is a buffer with as many words as `words`; `fill` overwrites it. Each examined wrong word is read a second
        time. If the second value is right, the transfer was faulty, not the memory.
        """
        fill(expected, address)
        wrong = words != expected
        count = int(wrong.sum())
        self.count += count
        if not count:
            return
        for start in range(0, words.numel(), SLICE):
            most = MOST_EXAMINED - self._examined
            positions = wrong[start : start + SLICE].nonzero().view(-1)[:most] + start
            columns = ((positions + address).tolist(), expected[positions].tolist(), words[positions].tolist())
            for word_address, wanted, read in zip(*columns, strict=True):
                self._add(word_address * 8, wanted & UNSIGNED, read & UNSIGNED)

    def _add(self, address: int, expected: int, read: int) -> None:
        self._examined += 1
        self._addresses.add(address)
        self._bits |= expected ^ read
        if len(self._recorded) < MOST_RECORDED:
            self._recorded.setdefault((address, expected ^ read), (expected, read))

    def report(self, context: Context, pattern: str, **params: Any) -> None:
        """Report `integrity.wrong_words`, and an `integrity.error` for each of the first wrong words (at most MOST_RECORDED).

        Each pair of address and wrong bits is reported once. The value of an error is the word as it was read the second time.
        The words and the virtual address are hexadecimal strings, because JSON numbers are exact only up to 2⁵³.
        """
        common: dict[str, Any] = {"unit": "1", "scope": context.device_scope, "pattern": pattern}
        summary: dict[str, Any] = {"wrong_addresses": len(self._addresses), "wrong_bits": list_bits(self._bits)}
        context.report("integrity.wrong_words", self.count, **common, **summary, **params)
        for number, ((address, flipped), (expected, read)) in enumerate(self._recorded.items(), 1):
            common |= {"address": f"{address:#x}", "expected": f"{expected:#018x}", "bits": list_bits(flipped)}
            context.report("integrity.error", f"{read:#018x}", number=number, **common)


def list_bits(word: int) -> str:
    """Return the positions of the bits that are set, the lowest first: `3, 17`."""
    return ", ".join(str(bit) for bit in range(WORD_BITS) if word >> bit & 1)
