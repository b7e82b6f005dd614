"""Round-robin schedule of pairs of hosts, by the circle method.

With an even number n of hosts there are n - 1 rounds. Each host has one partner in every round, and every other host is its
partner once. With an odd number there are n rounds, and in each of them a different host has no partner. The plan and the ranks
compute the same schedule, so it need not be transferred. They also select the same rounds if only some are run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

Round = list[tuple[str, str]]


def pairs_of(hosts: Sequence[str], number: int) -> Round:
    """Return the pairs of round `number`."""
    pairs = ((index, partner(len(hosts), number, index)) for index in range(len(hosts)))
    return [(hosts[index], hosts[other]) for index, other in pairs if other is not None and index < other]


def partners(hosts: Sequence[str], host: str, rounds: int = 0) -> list[str]:
    """Return the partners of `host`, in the order of the rounds. Raises ValueError if `host` is not in `hosts`."""
    position = hosts.index(host)
    others = (partner(len(hosts), number, position) for number in select_rounds(len(hosts), rounds))
    return [hosts[other] for other in others if other is not None]


@lru_cache(maxsize=64)
def select_rounds(count: int, rounds: int = 0) -> tuple[int, ...]:
    """Return the numbers of the rounds to run: at most `rounds` of them, or all if `rounds` is 0.

    A hash selects the rounds, so that the partners of a host are spread over the list of hosts. In consecutive rounds they would
    be neighbours. Unlike a random generator, a hash gives the same result in every version of Python.
    """
    every = range(count - 1 + count % 2 if count > 1 else 0)
    if not 0 < rounds < len(every):
        return tuple(every)
    mixed = sorted(every, key=lambda number: hashlib.sha256(f"{count}/{number}".encode()).digest())
    return tuple(sorted(mixed[:rounds]))


def partner(count: int, number: int, index: int) -> int | None:
    """Return the partner of the host at `index` of `count` in round `number`; None if that host has no partner."""
    # The circle method fixes one position and rotates the others. With an odd number of hosts, the fixed position is empty.
    fixed = count + count % 2 - 1
    if index == fixed:
        other = number * (fixed + 1) // 2 % fixed
    else:
        other = (number - index) % fixed
        other = fixed if other == index else other
    return other if other < count else None
