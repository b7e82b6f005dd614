"""Divide the hosts of a large fleet among worker processes, by default one for each processor."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from fleet import progress
from fleet.report.hosts import Unit
from schemas.errors import RunError

ONE_PROCESS_HOSTS = 256
"""Largest number of hosts for which one process is faster than several."""

_DRAW_S = 0.2
"""Seconds between updates of the progress bar."""

Share = list[Unit]
"""The units that one process judges. A unit is a gang (the hosts of one multi-node launch), or a single host."""
_Context = TypeVar("_Context")
_Result = TypeVar("_Result")

_context: Any = None


def process_count(hosts: int, jobs: int | None = None) -> int:
    """Return `jobs` if it is given; else 1 for up to ONE_PROCESS_HOSTS hosts, and the number of processors for more."""
    return jobs or (len(os.sched_getaffinity(0)) if hosts > ONE_PROCESS_HOSTS else 1)


def shares(units: Sequence[Unit], count: int) -> list[Share]:
    """Divide the units, in their order, into at most `count` shares with about the same number of hosts each."""
    host_count, all_shares = sum(map(len, units)), [Share() for _ in range(count)]
    hosts_before = 0
    for unit in units:
        all_shares[min(hosts_before * count // max(host_count, 1), count - 1)].append(unit)
        hosts_before += len(unit)
    return [share for share in all_shares if share]


def map_shares(call: Callable[[_Context, Share], _Result], context: _Context, shares: Sequence[Share]) -> list[_Result]:
    """Return `call(context, share)` for each share. If there are several shares, each runs in its own process.

    Raises:
        RunError: the system killed one of the processes.
    """
    global _context  # forked processes inherit it, so it need not be sent to them
    _context = context
    try:
        if len(shares) <= 1:
            return [_without_gc(call, share) for share in shares]
        # A multiprocessing.Pool would wait forever for the result of a process that was killed.
        with ProcessPoolExecutor(len(shares), mp_context=multiprocessing.get_context("fork")) as pool:
            results = [pool.submit(_without_gc, call, share) for share in shares]
            while wait(results, _DRAW_S).not_done:
                progress.draw()
            return [result.result() for result in results]
    except BrokenProcessPool:
        raise RunError(
            f"one of the {len(shares)} processes that judge the hosts was killed, perhaps because memory ran out: free memory, "
            "or use one processor: taskset -c 0 rackproof report RUN_DIR"
        ) from None
    finally:
        _context = None


def _without_gc(call: Callable[[Any, Share], _Result], share: Share) -> _Result:
    with gc_off():
        return call(_context, share)


@contextmanager
def gc_off() -> Iterator[None]:
    """Turn off Python's garbage collection within the context, because each collection would traverse all records."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
