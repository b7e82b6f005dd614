"""Device memory that a test has allocated: write it, and compare it with what was written.

One comparison can check only a limited number of words. So the memory is written and compared part by part. A part is one
allocation, or a piece of a large allocation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from agent.benchmarks.memory.wrong_words import Fill, WrongWords


class MemoryUnderTest:
    """The allocated chunks of a device's memory, as int64 words."""

    def __init__(self, chunks: Sequence[torch.Tensor], part_words: int) -> None:
        """Allocate memory for the expected words of one part. A part has at most `part_words` words."""
        self.chunks = chunks
        self.bytes = sum(chunk.numel() for chunk in chunks) * 8
        largest = max(chunk.numel() for chunk in chunks)
        self._expected = torch.empty(min(part_words, largest), dtype=torch.int64, device=chunks[0].device)

    def parts(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield for each part its words, and the address of its first word divided by 8."""
        count = self._expected.numel()
        for chunk in self.chunks:
            for start in range(0, chunk.numel(), count):
                yield chunk[start : start + count], chunk.data_ptr() // 8 + start

    def write(self, fill: Fill) -> None:
        """Let `fill` write its words to the whole memory."""
        for words, address in self.parts():
            fill(words, address)

    def check(self, fill: Fill, errors: WrongWords) -> None:
        """Compare the whole memory with the words that `fill` writes, and add wrong words to `errors`."""
        for words, address in self.parts():
            self.check_part(words, address, fill, errors)

    def check_part(self, words: torch.Tensor, address: int, fill: Fill, errors: WrongWords) -> None:
        """Compare one part with the words that `fill` writes, and add wrong words to `errors`."""
        errors.compare(words, self._expected[: words.numel()], fill, address)
