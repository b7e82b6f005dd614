"""Find parts and hosts that fail again and again.

An episode is a failure until the next run in which the part passes: a part that waits for its replacement and is measured ten
times has one episode. A serial that fails again after it passed has two, wherever it was installed. A slot or host counts too:
if its second GPU fails like the first, the GPU is not the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.history.database import History
from fleet.history.trends import poisson_tail

HARDWARE = ("rma", "inspect_hardware", "reseat", "recable", "recover_imex_domain", "drain_p2p", "reset_gpu", "reboot")
"""Actions of causes that count. A wrong setting (`configure`) is no property of a part."""
COUNTED = f"not waived and action in ({', '.join(map(repr, HARDWARE))})"
"""The condition of a cause that counts, in SQL."""
MIN_EPISODES = 2
MAX_CHANCE = 0.05
"""Expected number of parts with as many episodes by chance, above which repetition proves nothing."""


@dataclass(frozen=True, kw_only=True)
class Lemon:
    """A part, a slot or a host with several episodes."""

    kind: str
    """`part`, `slot` or `host`."""
    id: str
    """Serial, host and slot, or host."""
    host: str
    """Where it was last."""
    slot: str
    episodes: int
    runs: int
    """Runs in which it was measured."""
    problems: tuple[str, ...]
    serials: tuple[str, ...]
    """Serials that failed in the slot or host."""
    first: str
    last: str
    by_chance: float
    """Number of parts of the fleet that would have as many episodes, if all parts failed at the same rate."""
    is_lemon: bool
    """Whether `by_chance` is less than MAX_CHANCE."""


def lemons(history: History) -> list[Lemon]:
    """Return what failed repeatedly, the least likely by chance first."""
    causes = history.records(
        f"select distinct began, nonce, host, slot, serial, problem from causes where {COUNTED} order by began"
    )
    if not causes:
        return []
    runs = _measured(history, _repeated(causes, "serial"), _repeated(causes, "host"))
    counts = history.rows(
        "select count(distinct serial), count(distinct host) from parts where part in ('gpu', 'host')"
    )
    gpus, hosts = counts[0]
    found: list[Lemon] = []
    for kind, population in (("part", max(gpus, hosts)), ("slot", gpus), ("host", hosts)):
        explained = {
            item.id for item in found if item.is_lemon
        }  # the failures of a lemon do not count for its host too
        rest = [item for item in causes if not {item["serial"], f"{item['host']} {item['slot']}"} & explained]
        found += _group(kind, rest, runs, population)
    return sorted(found, key=lambda item: (not item.is_lemon, item.by_chance, item.kind, item.id))


def _repeated(causes: Iterable[Mapping[str, Any]], key: str) -> set[str]:
    """Return the serials or hosts with failures in several runs. Of the others, the runs need not be known."""
    failing: dict[str, set[str]] = defaultdict(set)
    for item in causes:
        failing[item[key]].add(item["nonce"])
    return {name for name, nonces in failing.items() if name and len(nonces) >= MIN_EPISODES}


def _measured(
    history: History, serials: Iterable[str], hosts: Iterable[str]
) -> dict[tuple[str, str], list[tuple[Any, str]]]:
    """Return the runs (time, nonce) that measured something on the host of each of these serials, and on each of these hosts.

    A host that was unreachable, or measured nothing, passes nothing: such a run ends no episode.
    """
    rows = history.rows(
        "with measured as (from parts semi join (from tests where measured) using (nonce, host)) "
        "select distinct 'part', serial, began, nonce from measured where list_contains($serials, serial) union all "
        "select distinct 'host', host, began, nonce from measured where list_contains($hosts, host) order by 3",
        {"serials": sorted(serials), "hosts": sorted(hosts)},
    )
    result: dict[tuple[str, str], list[tuple[Any, str]]] = defaultdict(list)
    for kind, name, began, nonce in rows:
        result[(kind, name)].append((began, nonce))
    return result


def _id(kind: str, item: Mapping[str, Any]) -> tuple[str, str]:
    """Return the identity of what a cause is about, and the key under which its runs are known; empty if it has none."""
    if kind == "part":
        return item["serial"], item["serial"]
    if kind == "slot":
        return (f"{item['host']} {item['slot']}" if item["slot"] else ""), item["host"]
    return item["host"], item["host"]


def _group(kind: str, causes: Iterable[Mapping[str, Any]], runs: Mapping[tuple[str, str], list[tuple[Any, str]]],
           population: int) -> Iterable[Lemon]:  # fmt: skip
    """Yield what of one kind has several episodes. A slot counts if several serials failed in it; a host, several slots."""
    by_id: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    keys: dict[str, str] = {}
    for item in causes:
        name, key = _id(kind, item)
        if name:
            by_id[name].append(item)
            keys[name] = key
    measured = "part" if kind == "part" else "host"
    episodes = {name: _episodes(items, runs[(measured, keys[name])]) for name, items in by_id.items()}
    rate = sum(episodes.values()) / max(1, population, len(by_id))
    for name, items in by_id.items():
        serials = tuple(dict.fromkeys(item["serial"] for item in items if item["serial"]))
        slots = {item["slot"] for item in items}
        is_own = (
            kind == "part" or (kind == "slot" and len(serials) > 1) or (kind == "host" and _is_host(slots, serials))
        )
        if episodes[name] < MIN_EPISODES or not is_own:
            continue
        by_chance = poisson_tail(episodes[name], rate) * max(population, len(by_id))
        yield Lemon(
            kind=kind,
            id=name,
            host=items[-1]["host"],
            slot=items[-1]["slot"] if kind != "host" else "",
            episodes=episodes[name],
            runs=len(runs[(measured, keys[name])]),
            problems=tuple(dict.fromkeys(item["problem"] for item in items)),
            serials=serials if kind != "part" else (),
            first=f"{items[0]['began']:%Y-%m-%d}",
            last=f"{items[-1]['began']:%Y-%m-%d}",
            by_chance=by_chance,
            is_lemon=by_chance < MAX_CHANCE,
        )


def _is_host(slots: set[str], serials: tuple[str, ...]) -> bool:
    """Return whether the failures are the host's: its own, or of GPUs in several slots."""
    return "" in slots or (len(slots) > 1 and len(serials) > 1)


def _episodes(items: Iterable[Mapping[str, Any]], runs: Iterable[tuple[Any, str]]) -> int:
    """Return how often a failure began: a failing run after a run that measured without this failure, or the first one."""
    failing = {(item["began"], item["nonce"]) for item in items}
    count, was_failing = 0, False
    for run in sorted(failing | set(runs)):
        count += run in failing and not was_failing
        was_failing = run in failing
    return count
