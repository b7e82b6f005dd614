"""Group failures into episodes, and find those that begin together on parts of a host or on hosts of a rack.

An episode lasts from a failure until the next run in which the part passes: a part that waits for its replacement and is
measured ten times has one episode. The passing run must have measured every benchmark that failed on the host in the last failing
run. So a short run between two complete runs does not end the episode.

If episodes of several parts of a host begin in the same run, that is one event of the host, not of its parts: eight GPUs that
fall off the bus together are one fault. If at least half of the hosts of a rack, and at least three, begin to fail in the same
run, that is one event of the rack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.scopes import Scope

MIN_PARTS, MIN_RACK_HOSTS = 2, 3
"""Minimum number of slots of a host, and of hosts of a rack, that must begin to fail in one run to count as one event.

At least half of the hosts of a rack must begin to fail, even if that is more than MIN_RACK_HOSTS."""
Cause = Mapping[str, Any]
Run = tuple[Any, str]
"""When the run began, and its nonce."""


class Measured(NamedTuple):
    """The benchmarks that a run measured on a host, and those that failed on the host, as bit masks.

    Each bit stands for one benchmark. Masks save memory, because a history has a hundred thousand of these tuples."""

    run: Run
    benchmarks: int
    failed: int


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A failure of one part, up to the next run in which the part passes."""

    part: str
    """Serial of the part, or host and slot if it has none, or the name of the host if the host itself failed."""
    host: str
    rack: str
    slot: str
    """Empty for the host itself."""
    serial: str
    began: Run
    causes: tuple[Cause, ...]


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """All episodes. Each episode is in exactly one of the tuples."""

    racks: tuple[Episode, ...]
    """Episodes that began in a run in which at least half of the hosts of the rack, and at least MIN_RACK_HOSTS, began to fail,
    whatever the cause."""
    hosts: tuple[Episode, ...]
    """Episodes that began in a run in which the host itself, or several of its parts, began to fail, whatever the cause."""
    alone: tuple[Episode, ...]
    """All other episodes: in the run in which such an episode began, only one slot of the host began to fail."""


def run_of(cause: Cause) -> Run:
    """Return the run of a cause."""
    return cause["began"], cause["nonce"]


def place_of(cause: Cause) -> str:
    """Return the slot of the part that can be replaced: `gpu=0` for `gpu=0,link=3`; empty for the host itself."""
    return Scope.parse(cause["slot"]).part if cause["slot"] else ""


def group_episodes(
    causes: Iterable[Cause],
    measured: Mapping[tuple[str, str], Sequence[Measured]],
    rack_hosts: Mapping[tuple[str, str], int],
) -> Episodes:
    """Return the episodes of all causes.

    Args:
        causes: rows of the table `causes`.
        measured: `("serial", serial)` or `("host", name)` -> what each run measured. Not needed for parts that failed in
            only one run.
        rack_hosts: rack and nonce of a run -> number of hosts of the rack in that run.
    """
    by_part: dict[tuple[str, str], list[Cause]] = defaultdict(list)
    for cause in causes:
        key = ("serial", cause["serial"]) if cause["serial"] else ("host", f"{cause['host']} {place_of(cause)}".strip())
        by_part[key].append(cause)
    episodes = []
    for (kind, name), items in by_part.items():
        runs = measured.get((kind, name if kind == "serial" else items[0]["host"]), ())
        episodes += [_episode(name, failing) for failing in split(items, runs)]
    return _assign(episodes, rack_hosts)


def split(causes: Iterable[Cause], measured: Iterable[Measured]) -> list[list[Cause]]:
    """Return the causes of each episode of one part.

    An episode ends at the next run in which the part has no cause, and which measured every benchmark that failed on the host in
    the last run with a cause.
    """
    by_run: dict[Run, list[Cause]] = defaultdict(list)
    for cause in causes:
        by_run[run_of(cause)].append(cause)
    known = {item.run: item for item in measured}
    result: list[list[Cause]] = []
    failed: int | None = None  # None: no episode is open
    for run in sorted({*by_run, *known}):
        if run in by_run:
            if failed is None:
                result.append([])
            result[-1] += by_run[run]
            failed = known[run].failed if run in known else 0
        elif known[run].benchmarks and failed is not None and not failed & ~known[run].benchmarks:
            failed = None
    return result


def _episode(name: str, causes: Sequence[Cause]) -> Episode:
    first = causes[0]
    return Episode(
        part=name,
        host=first["host"],
        rack=first["rack"],
        slot=place_of(first),
        serial=first["serial"],
        began=run_of(first),
        causes=tuple(causes),
    )


def _assign(episodes: Iterable[Episode], rack_hosts: Mapping[tuple[str, str], int]) -> Episodes:
    by_rack: dict[tuple[str, Run], list[Episode]] = defaultdict(list)
    for item in episodes:
        by_rack[(item.rack, item.began)].append(item)
    racks: list[Episode] = []
    by_host: dict[tuple[str, Run], list[Episode]] = defaultdict(list)
    for (rack, run), items in by_rack.items():
        failing = len({item.host for item in items})
        if rack and failing >= max(MIN_RACK_HOSTS, rack_hosts.get((rack, run[1]), 0) / 2):
            racks += items
            continue
        for item in items:
            by_host[(item.host, run)].append(item)
    hosts: list[Episode] = []
    alone: list[Episode] = []
    for items in by_host.values():
        slots = {item.slot for item in items}
        (hosts if "" in slots or len(slots) >= MIN_PARTS else alone).extend(items)
    return Episodes(racks=tuple(racks), hosts=tuple(hosts), alone=tuple(alone))
