"""Write the patterns of memory tests.

In all functions, `words` are words of 8 bytes, and `address` is the address of the first of them, divided by 8. Each word depends
on its own address, so a pattern that is written in parts continues from part to part. Exception: for the pattern `random`,
`address` is the seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

WALK = 64
"""Number of words after which a walking bit is at its first position again: the number of bits in a word."""
CONSTANTS = {"zeros": 0, "ones": -1, "checkerboard": 0x5555555555555555}
"""Pattern -> the word, as int64, that the pattern repeats."""
MODULO = 20
"""`modulo_20` checks every 20th word. Unlike the sizes of memory lines, rows and banks, 20 is not a power of two."""


def fill(words: torch.Tensor, address: int, *, pattern: str) -> None:
    """Write the pattern into `words` (int64)."""
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


def fill_modulo(words: torch.Tensor, address: int, *, offset: int, value: int) -> None:
    """Write `value` to every word whose address, divided by 8, is `offset` modulo MODULO. Write its inverse to all others."""
    words.fill_(~value)
    words[(offset - address) % MODULO :: MODULO] = value


def rewrite_others(words: torch.Tensor, address: int, *, offset: int, value: int) -> None:
    """Write the inverse of `value` again to the words between those to which `fill_modulo` wrote `value`.

    At each end of `words`, up to MODULO - 1 words are not written.
    """
    first = (offset - address) % MODULO
    rows = max(0, words.numel() - first) // MODULO
    words[first : first + rows * MODULO].view(rows, MODULO)[:, 1:] = ~value


def fill_stripes(words: torch.Tensor, address: int, *, width: int, phase: int, value: int) -> None:
    """Write `value` and its inverse in alternating stripes of `width` words. Each stripe begins at a multiple of its size.

    In each pair of stripes, stripe `phase` (0: the first, 1: the second) has the inverse.
    """
    words.fill_(value)
    for stripe in _stripes(words, address, width, phase):
        stripe.bitwise_not_()


def invert_stripes(words: torch.Tensor, address: int, *, width: int, phase: int) -> None:
    """Invert each word in the stripes to which `fill_stripes` writes the inverse of its value."""
    for stripe in _stripes(words, address, width, phase):
        stripe.bitwise_not_()


def _stripes(words: torch.Tensor, address: int, width: int, phase: int) -> Iterator[torch.Tensor]:
    """Yield the words of every second stripe: the even stripes if `phase` is 0, the odd ones if it is 1.

    Stripe 0 begins at address 0, and every stripe has `width` words. First yield the words in whole pairs of
    stripes, then those before and those after the whole pairs.
    """
    pair = 2 * width
    head = min(words.numel(), -address % pair)
    body = (words.numel() - head) // pair * pair
    yield words[head : head + body].view(body // pair, 2, width)[:, phase]
    for begin, end in ((0, head), (head + body, words.numel())):
        # These words lie within one pair of stripes. `first` is the index in `words` at which the stripe to yield begins.
        first = (address + begin) // pair * pair + phase * width - address
        yield words[max(begin, first) : max(begin, min(end, first + width))]
