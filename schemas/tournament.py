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


def tournament(hosts: Sequence[str], rounds: int = 0) -> list[Round]:
    """Return at most `rounds` rounds of disjoint pairs; if `rounds` is 0, all rounds, which have every pair of hosts once."""
    return [pairs_of(hosts, number) for number in select_rounds(len(hosts), rounds)]


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
    """Return the numbers of the rounds to run: all, or a fixed but irregular selection of `rounds` of them.

    Consecutive rounds would pair each host only with hosts that are close to each other, so a hash selects the rounds. Unlike a
    random generator, a hash gives the same result in every version of Python.
    """
    every = range(count - 1 + count % 2 if count > 1 else 0)
    if not 0 < rounds < len(every):
        return tuple(every)
    mixed = sorted(every, key=lambda number: hashlib.sha256(f"{count}/{number}".encode()).digest())
    return tuple(sorted(mixed[:rounds]))


def partner(count: int, number: int, index: int) -> int | None:
    """Return the partner of the host at `index` of `count` in round `number`; None if that host has no partner."""
    # In the circle method this position is fixed, and the other positions rotate. With an odd number of hosts it is empty.
    fixed = count + count % 2 - 1
    if index == fixed:
        other = number * (fixed + 1) // 2 % fixed
    else:
        other = (number - index) % fixed
        other = fixed if other == index else other
    return other if other < count else None
