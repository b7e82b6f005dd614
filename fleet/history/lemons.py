"""Find lemons: racks, hosts, slots and parts that fail again and again. Racks are searched first, then hosts, slots and parts.

An episode is a failure that lasts until the part passes (`episodes`). An episode of a whole rack or a whole host counts only for
that rack or host. All other episodes are of a single part. They are counted as follows:

- host: the number of its slots with such episodes, or of its parts with such episodes, whichever is smaller;
- slot: the number of different serials that failed in it, plus the episodes of parts without a serial;
- part: the number of its episodes that are not explained by a host or slot that is a lemon (`_unexplained`). A part is identified
  by its serial, wherever it was installed. Episodes of a part without a serial count only for its host and its slot.

So if one GPU after another fails in a host or in a slot, the finding names the host or the slot, not the GPUs.

`by_chance` is the expected number of racks (or hosts, slots, parts) of the same kind that have at least as many episodes as this
one, if failures are random. It is computed under two assumptions: the expected number of episodes is the same for all of them,
or it is proportional to the number of their runs. With the first assumption alone, many runs would make a healthy rack a lemon.
With the second alone, few runs would do so. Therefore the larger of the two results is used.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.history.database import History
from fleet.history.episodes import Episode, Episodes, Measured, group_episodes, run_of, split
from schemas.scopes import Scope

HARDWARE = ("rma", "inspect_hardware", "reseat", "recable", "recover_imex_domain", "drain_p2p", "reset_gpu", "reboot")
"""Only causes with one of these actions count. A wrong setting (action `configure`) is not a fault of a part."""
COUNTED = f"not waived and action in ({', '.join(map(repr, HARDWARE))})"
"""SQL condition that selects the causes that count."""
MIN_EPISODES = 2
MAX_CHANCE = 0.05
"""A finding is a lemon if `by_chance`, an expected number of parts, is less than this."""
_DATED = "nonce not in (select nonce from runs where clock <> '')"
"""SQL condition that leaves out runs with a wrong date, because their order is unknown."""
MeasuredRuns = Mapping[tuple[str, str], Sequence[Measured]]
"""`("serial", serial)`, `("host", name)` or `("rack", name)` -> its runs."""
Exposures = Mapping[tuple[str, str], Mapping[int, int]]
"""Kind of finding (`part`, `slot`, `host` or `rack`) and kind of part -> number of runs -> number of such parts (or slots, hosts,
racks) that have that many runs."""


@dataclass(frozen=True, kw_only=True)
class Lemon:
    """A part, slot, host or rack with several episodes. It is a lemon only if `is_lemon`."""

    kind: str
    """`part`, `slot`, `host` or `rack`."""
    id: str
    """Serial (for a part), host and slot (for a slot), or name (for a host or rack)."""
    host: str
    """Host of the newest cause; empty for a rack."""
    slot: str
    episodes: int
    runs: int
    """Number of runs in which the part, the host, or the host of the slot was measured or failed. For a rack: runs in which it
    failed or any of its hosts was measured."""
    problems: tuple[str, ...]
    serials: tuple[str, ...]
    """Serials that failed in the slot, host or rack; empty for a part."""
    first: str
    last: str
    """Days on which the runs of the first and of the last cause began: `2026-02-01`."""
    by_chance: float
    """Expected number of parts (or slots, hosts, racks) of the fleet with at least as many episodes, if failures are random."""
    is_lemon: bool
    """Whether `by_chance` is less than MAX_CHANCE."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """The episodes that count for one rack, host, slot or part."""

    kind: str
    id: str
    part_kind: str
    """Kind of the slot or part, such as `gpu`; empty for a host or rack."""
    count: int
    """Number of episodes that is compared with chance. Several of `episodes` may count as one (`_hosts`, `_slots`)."""
    episodes: tuple[Episode, ...]


def lemons(history: History) -> list[Lemon]:
    """Return the racks, hosts, slots and parts with several episodes: lemons first, then by increasing `by_chance`."""
    causes = history.records(
        f"select distinct began, nonce, host, rack, slot, serial, problem from causes where {COUNTED} and {_DATED} "
        "order by began"
    )
    if not causes:
        return []
    measured = _measured(history, *(_repeated(causes, key) for key in ("serial", "host", "rack")))
    episodes = group_episodes(causes, measured, _rack_hosts(history))
    exposures = _exposures(history)
    found: list[Lemon] = []
    alone = list(episodes.alone)
    for groups in (_racks(episodes), _hosts(episodes, measured)):
        found += _tested(groups, exposures, measured)
        alone = _unexplained(alone, groups, found)
    slots = _slots(alone)
    found += _tested(slots, exposures, measured)
    alone = _unexplained(alone, slots, found)
    found += _tested(_parts(alone), exposures, measured)
    return sorted(found, key=lambda item: (not item.is_lemon, item.by_chance, item.kind, item.id))


def _repeated(causes: Iterable[Mapping[str, Any]], key: str) -> set[str]:
    """Return the serials, hosts or racks with failures in several runs. Only their runs need to be known."""
    failing: dict[str, set[str]] = defaultdict(set)
    for item in causes:
        failing[item[key]].add(item["nonce"])
    return {name for name, nonces in failing.items() if name and len(nonces) >= MIN_EPISODES}


def _measured(history: History, serials: Iterable[str], hosts: Iterable[str], racks: Iterable[str]) -> MeasuredRuns:
    """Return the runs of each serial and host, with the benchmarks that a run measured on the host and those that failed.

    For each rack, also return the runs that measured any of its hosts. In these, `benchmarks` is always 1.
    """
    rows = history.rows(
        f"""with wanted as (
          select 'serial' as kind, serial as name, began, nonce, host from parts
          where list_contains($serials, serial) and {_DATED} group by all
          union all select 'host', host, began, nonce, host from parts
          where part = 'host' and list_contains($hosts, host) and {_DATED}
        ), bits as (
          select benchmark, 1::hugeint << (row_number() over (order by benchmark) - 1)::int as bit
          from (select distinct benchmark from tests)
        ), done as (
          select nonce, host, coalesce(bit_or(bit) filter (measured), 0) as benchmarks,
            coalesce(bit_or(bit) filter (failed), 0) as failed
          from tests join bits using (benchmark) where host in (select host from wanted) group by nonce, host
        )
        select kind, name, began, nonce, benchmarks, failed from wanted join done using (nonce, host)
        union all select distinct 'rack', rack, began, nonce, 1, 0
        from parts semi join (select nonce, host from tests where measured) using (nonce, host)
        where part = 'host' and list_contains($racks, rack) and {_DATED}""",
        {"serials": sorted(serials), "hosts": sorted(hosts), "racks": sorted(racks)},
    )
    result: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for kind, name, began, nonce, benchmarks, failed in rows:
        result[(kind, name)].append(Measured((began, nonce), benchmarks, failed))
    return result


def _rack_hosts(history: History) -> dict[tuple[str, str], int]:
    """Return rack and nonce -> number of hosts of the rack in that run, for the runs in which a host of the rack failed."""
    rows = history.rows(
        f"select rack, nonce, count(*) from parts where part = 'host' and (rack, nonce) in (select rack, nonce from causes "
        f"where {COUNTED}) group by all"
    )
    return {(rack, nonce): count for rack, nonce, count in rows}


def _exposures(history: History) -> Exposures:
    """Return how many parts, slots, hosts and racks there are, by the number of their runs with a correct date."""
    kind = "split_part(slot, '=', 1)"
    rows = history.rows(
        f"""with counted as (
          select 'part' as level, {kind} as kind, count(*) as runs from parts where slot <> '' and serial <> '' and {_DATED}
          group by kind, serial
          union all select 'slot', {kind} as kind, count(*) from parts where slot <> '' and {_DATED} group by kind, host, slot
          union all select 'host', '', count(*) from parts where part = 'host' and {_DATED} group by host
          union all select 'rack', '', count(distinct nonce) from parts where part = 'host' and {_DATED} group by rack
        ) select level, kind, runs, count(*) from counted group by all"""
    )
    result: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for level, kind, runs, count in rows:
        result[(level, kind)][runs] = count
    return result


def _racks(episodes: Episodes) -> list[_Group]:
    by_rack = _by(episodes.racks, lambda item: item.rack)
    return [
        _Group(kind="rack", id=rack, part_kind="", count=len({item.began for item in items}), episodes=tuple(items))
        for rack, items in by_rack.items()
    ]


def _hosts(episodes: Episodes, measured: MeasuredRuns) -> list[_Group]:
    """Return a group for each host with episodes.

    Its count is the sum of two numbers: the episodes of the whole host, and the slots with an episode of a single part. If fewer
    parts than slots had such an episode, the parts are counted instead of the slots.
    """
    common, alone = (_by(items, lambda item: item.host) for items in (episodes.hosts, episodes.alone))
    result = []
    for host in dict.fromkeys([*common, *alone]):
        host_episodes = common.get(host, [])
        parts = alone.get(host, [])
        causes = [cause for item in host_episodes for cause in item.causes]
        count = len(split(causes, measured.get(("host", host), ())))
        count += min(len({item.slot for item in parts}), len({item.part for item in parts}))
        result.append(_Group(kind="host", id=host, part_kind="", count=count, episodes=(*host_episodes, *parts)))
    return result


def _slots(alone: Iterable[Episode]) -> list[_Group]:
    """Return a group for each slot with episodes. In its count, each serial counts once, however often it failed in the slot.

    The episodes of a part without a serial count too, except those that began in a run in which a serial failed in the slot.
    """
    result = []
    for slot, items in _by(alone, lambda item: f"{item.host} {item.slot}").items():
        serials = {item.serial for item in items if item.serial}
        known = {run_of(cause) for item in items if item.serial for cause in item.causes}
        count = len(serials) + len({item.began for item in items if not item.serial} - known)
        result.append(_Group(kind="slot", id=slot, part_kind=_kind(items), count=count, episodes=tuple(items)))
    return result


def _parts(alone: Iterable[Episode]) -> list[_Group]:
    by_serial = _by((item for item in alone if item.serial), lambda item: item.serial)
    return [
        _Group(kind="part", id=serial, part_kind=_kind(items), count=len(items), episodes=tuple(items))
        for serial, items in by_serial.items()
    ]


def _kind(items: Sequence[Episode]) -> str:
    return Scope.parse(items[0].slot).device_kind


def _by(items: Iterable[Episode], key: Callable[[Episode], str]) -> dict[str, list[Episode]]:
    result: dict[str, list[Episode]] = defaultdict(list)
    for item in items:
        result[key(item)].append(item)
    return result


def _unexplained(alone: Iterable[Episode], groups: Iterable[_Group], found: Iterable[Lemon]) -> list[Episode]:
    """Return the episodes of single parts without those of a group that is a lemon.

    For a host that is a lemon, only episodes of slots with one episode are removed: a slot with several, or a part in it, may
    be a lemon itself.
    """
    certain = {(item.kind, item.id) for item in found if item.is_lemon}
    explained = [item for group in groups if (group.kind, group.id) in certain for item in group.episodes]
    times = Counter((item.host, item.slot) for item in explained)
    ids = {
        id(item)
        for group in groups
        if (group.kind, group.id) in certain
        for item in group.episodes
        if group.kind != "host" or times[(item.host, item.slot)] == 1
    }
    return [item for item in alone if id(item) not in ids]


def _tested(groups: Sequence[_Group], exposures: Exposures, measured: MeasuredRuns) -> list[Lemon]:
    """Return a Lemon for each group with several episodes, even if they are likely to be chance."""
    totals = Counter[tuple[str, str]]()
    members = Counter[tuple[str, str]]()
    for group in groups:
        totals[(group.kind, group.part_kind)] += group.count
        members[(group.kind, group.part_kind)] += 1
    result = []
    for group in groups:
        if group.count < MIN_EPISODES:
            continue
        key = (group.kind, group.part_kind)
        known = exposures.get(key) or exposures.get(
            ("host", ""), {}
        )  # the table `parts` does not list mounts and DIMMs: assume that each host has one
        result.append(_lemon(group, expected(group.count, totals[key], known, members[key]), measured))
    return result


def expected(count: int, total: int, exposures: Mapping[int, int], failing: int) -> float:
    """Return the expected number of parts with `count` or more episodes, if failures are random.

    Here, `part` also stands for a slot, host or rack.

    Args:
        count: number of episodes of one part.
        total: number of episodes of all parts of the kind.
        exposures: number of runs -> number of parts that have that many runs.
        failing: number of parts with an episode. It may exceed the number of parts in `exposures`.
    """
    parts = max(1, failing, sum(exposures.values()))
    by_part = parts * poisson_tail(count, total / parts)
    runs = max(1, sum(number * size for number, size in exposures.items()))
    by_run = sum(size * poisson_tail(count, total * number / runs) for number, size in exposures.items())
    return max(by_part, by_run)


def _lemon(group: _Group, by_chance: float, measured: MeasuredRuns) -> Lemon:
    causes = sorted((cause for item in group.episodes for cause in item.causes), key=run_of)
    last = causes[-1]
    keys = {"part": ("serial", group.id), "rack": ("rack", group.id)}
    runs = measured.get(keys.get(group.kind, ("host", last["host"])), ())
    return Lemon(
        kind=group.kind,
        id=group.id,
        host=last["host"] if group.kind != "rack" else "",
        slot=last["slot"] if group.kind in ("part", "slot") else "",
        episodes=group.count,
        runs=len({*(item.run for item in runs if item.benchmarks), *map(run_of, causes)}),
        problems=tuple(dict.fromkeys(cause["problem"] for cause in causes)),
        serials=tuple(dict.fromkeys(cause["serial"] for cause in causes if cause["serial"]))
        if group.kind != "part"
        else (),
        first=f"{causes[0]['began']:%Y-%m-%d}",
        last=f"{last['began']:%Y-%m-%d}",
        by_chance=by_chance,
        is_lemon=by_chance < MAX_CHANCE,
    )


def poisson_tail(count: int, mean: float) -> float:
    """Return the probability of `count` (at least 1) or more events in a Poisson distribution with this mean."""
    term = total = math.exp(-mean)
    for number in range(1, count):
        term *= mean / number
        total += term
    return max(0.0, 1.0 - total)
