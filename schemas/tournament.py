"""Who meets whom: a round-robin tournament of hosts, by the circle method.

With an even number of hosts each meets one other in every round, and all of them in one round fewer than there are hosts. An
odd number takes one round more, in each of which one host rests. The plan says from here which pairs must be measured, the
ranks whom they exchange with: neither holds a table, and a schedule of part of the rounds is the same wherever it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

Round = list[tuple[str, str]]


def tournament(hosts: Sequence[str], rounds: int = 0) -> list[Round]:
    """The rounds, each of disjoint pairs: every pair of hosts once, or with `rounds` only the pairs of so many rounds."""
    return [pairs_of(hosts, number) for number in chosen(len(hosts), rounds)]


def pairs_of(hosts: Sequence[str], number: int) -> Round:
    """Who meets whom in that round."""
    met = ((place, partner(len(hosts), number, place)) for place in range(len(hosts)))
    return [(hosts[place], hosts[other]) for place, other in met if other is not None and place < other]


def partners(hosts: Sequence[str], host: str, rounds: int = 0) -> list[str]:
    """Whom `host` meets, in the order of the rounds; fewer than there are rounds where it rests. Raises ValueError."""
    place = hosts.index(host)
    met = (partner(len(hosts), number, place) for number in chosen(len(hosts), rounds))
    return [hosts[other] for other in met if other is not None]


@lru_cache(maxsize=64)
def chosen(count: int, rounds: int = 0) -> tuple[int, ...]:
    """Numbers of the rounds to play: all of them, or `rounds` of them, always the same ones but in no pattern.

    Whatever is chosen, each host plays once a round. Neighbouring rounds would pair neighbours of neighbours: a hash mixes
    them, and unlike a random generator says the same in every version of Python.
    """
    every = range(count - 1 + count % 2 if count > 1 else 0)
    if not 0 < rounds < len(every):
        return tuple(every)
    mixed = sorted(every, key=lambda number: hashlib.sha256(f"{count}/{number}".encode()).digest())
    return tuple(sorted(mixed[:rounds]))


def partner(count: int, number: int, place: int) -> int | None:
    """Whom the host at `place` of `count` meets in round `number`; None where it rests."""
    fixed = count + count % 2 - 1  # stays where it is while the others turn; of an odd number of hosts it is nobody
    if place == fixed:
        other = number * (fixed + 1) // 2 % fixed
    else:
        other = (number - place) % fixed
        other = fixed if other == place else other
    return other if other < count else None
