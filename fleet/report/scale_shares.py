"""The hosts of a fleet in shares, and what is made of each, in as many processes as there are processors."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from schemas.plans import Plan

ALONE = 256
"""Hosts up to which one process is faster than several."""

Unit = tuple[str, ...]
"""Hosts that are looked at together."""
Share = list[Unit]
_Known = TypeVar("_Known")
_Part = TypeVar("_Part")

_known: Any = None


def processes(plan: Plan, workers: int | None) -> int:
    """As many as are asked for; else one where hosts are few, and one a processor where they are many."""
    return workers or (len(os.sched_getaffinity(0)) if len(plan.hosts) > ALONE else 1)


def units(plan: Plan, names: Iterable[str]) -> list[Unit]:
    """Hosts that must be looked at together: those of a gang."""
    gangs, found = plan.gangs(), {}
    for name in names:
        gang = plan.host(name).gang
        found[gang or f" {name}"] = gangs[gang] if gang else (name,)
    return list(found.values())


def shares(units: Sequence[Unit], count: int) -> list[Share]:
    """As many shares, each of units that stand together in the plan, and of about as many hosts."""
    total, shares = sum(map(len, units)), [Share() for _ in range(count)]
    before = 0
    for unit in units:
        shares[min(before * count // max(total, 1), count - 1)].append(unit)
        before += len(unit)
    return [share for share in shares if share]


def spread(call: Callable[[_Known, Share], _Part], known: _Known, shares: list[Share], count: int) -> list[_Part]:
    """What the call makes of each share, by what all of them know."""
    global _known  # the processes inherit it: nothing of a run is sent to them
    _known = known
    if count == 1 or len(shares) <= 1:
        return [_quietly(call, share) for share in shares]
    with multiprocessing.get_context("fork").Pool(min(count, len(shares))) as pool:
        return pool.starmap(_quietly, [(call, share) for share in shares], chunksize=1)


def _quietly(call: Callable[[Any, Share], _Part], share: Share) -> _Part:
    """The call without the collector of cycles, of which records have none, and which would read all of them again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        return call(_known, share)
    finally:
        if on:
            gc.enable()
