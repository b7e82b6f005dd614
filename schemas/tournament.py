"""Round-robin schedule of pairs of hosts, by the circle method.

With an even number of hosts each has one partner in every round, and all others as partners in n - 1 rounds. An odd number needs
n rounds, in each of which one host rests. The plan computes from it which pairs must be measured, and the ranks compute their
partners, so no schedule is transferred. A schedule of part of the rounds is the same wherever it is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

Round = list[tuple[str, str]]


def tournament(hosts: Sequence[str], rounds: int = 0) -> list[Round]:
    """Return the rounds, each of disjoint pairs: every pair of hosts once, or the pairs of `rounds` rounds only."""
    return [pairs_of(hosts, number) for number in chosen(len(hosts), rounds)]


def pairs_of(hosts: Sequence[str], number: int) -> Round:
    """Return the pairs of that round."""
    met = ((index, partner(len(hosts), number, index)) for index in range(len(hosts)))
    return [(hosts[index], hosts[other]) for index, other in met if other is not None and index < other]


def partners(hosts: Sequence[str], host: str, rounds: int = 0) -> list[str]:
    """Return the partners of `host` in the order of the rounds, without those in which it rests. Raises ValueError."""
    position = hosts.index(host)
    met = (partner(len(hosts), number, position) for number in chosen(len(hosts), rounds))
    return [hosts[other] for other in met if other is not None]


@lru_cache(maxsize=64)
def chosen(count: int, rounds: int = 0) -> tuple[int, ...]:
    """Return the numbers of the rounds to run: all, or `rounds` of them, always the same ones in no pattern.

    Consecutive rounds would pair neighbours of neighbours, so a hash mixes the rounds. Unlike a random generator it gives the
    same result in every version of Python.
    """
    every = range(count - 1 + count % 2 if count > 1 else 0)
    if not 0 < rounds < len(every):
        return tuple(every)
    mixed = sorted(every, key=lambda number: hashlib.sha256(f"{count}/{number}".encode()).digest())
    return tuple(sorted(mixed[:rounds]))


def partner(count: int, number: int, index: int) -> int | None:
    """Return the partner of the host at `index` of `count` in round `number`; None if it rests."""
    fixed = (
        count + count % 2 - 1
    )  # keeps its position while the others rotate; with an odd number of hosts it is unoccupied
    if index == fixed:
        other = number * (fixed + 1) // 2 % fixed
    else:
        other = (number - index) % fixed
        other = fixed if other == index else other
    return other if other < count else None
