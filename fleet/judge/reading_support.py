"""Check that GPUs and hosts have the optional readings that at least half of their kind have.

An optional criterion skips a part that does not support its reading. Whether a reading is supported depends on the hardware, the
driver, the kernel and the hypervisor. If at least half of the parts of a kind (`Kind`) have a reading, a part of this kind
without it is faulty, or its host hides the value.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.criteria import Criterion
from fleet.judge.host_view import HostView
from fleet.judge.reading_relations import LISTS, list_of
from schemas.readings import BMC, READINGS
from schemas.records import UNSUPPORTED, Metric, Value
from schemas.reports import Verdict
from schemas.scopes import HOST, Scope
from schemas.semantic_validation import COLLECTOR

Kind = tuple[str, str, bool, int, str]
"""GPU model, driver version, whether the host is virtual, number of tested GPUs, and (for readings of hosts) the gang."""
Key = tuple[Kind, str, str]
"""Kind of a part, name of the reading, and the part. For a reading of a GPU, the part is the scope below the GPU, such as
`link=3`. For a reading of the host, it is the whole scope."""
GPU = "gpu."
NVLINK, ACTIVE_LINKS = "gpu.nvlink.", "gpu.nvlink.active_links"
"""Prefix of readings that a GPU without an NVLink bridge may lack, and the reading by which such a GPU is recognized."""
PATHS = "gpu.peer.link"
"""Reading of the path between two GPUs. It decides which hosts are compared (`HostView.wiring`)."""
OF_SOME_HOSTS = (
    "container.", "network.bond.", "optics.", "pcie.acs.", "software.", "storage.array.", "storage.path.", "storage.pool.",
)  # fmt: skip
"""Prefixes of readings of software, arrays, bonds, bridges and modules, which only some hosts of a kind may have by design."""
ON_EVERY_HOST = ("storage.state.read_only",)
"""Readings that every Linux host has. This one states whether the file system of `/var` is mounted read-only."""
CLOCK = "clock.synchronized"
"""Reading that every host must have, except a virtual machine, because its hypervisor may set the clock."""
SLOTS = "host.dimm.populated"
"""Reading that lists the memory slots. It is false for an empty slot, which has no readings of a module."""
NOT_READ = "missing"
"""Reason for a reading that the host did not report at all."""
MAX_KINDS = 256
"""Maximum number of cached sets of readings. Hosts with the same set (`_key_of`) are counted and judged together."""
_NAMES: BoundedCache[tuple[int, tuple[str, ...]], tuple[Mapping[str, Criterion], tuple[str, ...], tuple[str, ...]]] = (
    BoundedCache(MAX_KINDS)
)
"""`id` of the criteria of a host, and the names of its readings -> the criteria, and the results of `_optional_of_gpus` and
`_optional_of_hosts`. The criteria are kept so that no other object gets the same `id`."""


@dataclass(kw_only=True)
class _Readings:
    """A set of optional readings, and the number of hosts with this set that are not counted yet."""

    readings: tuple[tuple[Key, str, str], ...]
    """The readings as `_last_readings` yields them."""
    hosts: int = 0


class ReadingSupport:
    """The numbers of parts that have, and that lack, each optional reading. Numbers of different hosts can be merged.

    Most hosts of a fleet have and lack the same readings. Hosts with equal keys (`_key_of`) are counted together.
    """

    def __init__(self) -> None:
        self._supported: Counter[Key] = Counter()
        self._unsupported: Counter[Key] = Counter()
        self._pending: BoundedCache[Hashable, _Readings] = BoundedCache(MAX_KINDS, self._count)
        self._problems: BoundedCache[Hashable, list[tuple[str, str, str]]] = BoundedCache(MAX_KINDS)
        """Key of a host -> name, scope and reason of each verdict on hosts with that key."""

    def add(self, view: HostView) -> None:
        """Count the readings of a host. `finish` must follow the last host."""
        key = _key_of(view)
        readings = self._pending.get(key)
        if readings is None:
            readings = self._pending[key] = _Readings(readings=tuple(_last_readings(view)))
        readings.hosts += 1

    def finish(self) -> None:
        """Count the hosts that are not counted yet."""
        self._pending.clear()

    def _count(self, readings: _Readings) -> None:
        for key, _, reason in readings.readings:
            (self._unsupported if reason else self._supported)[key] += readings.hosts

    def update(self, other: ReadingSupport) -> None:
        """Add the counts of other hosts."""
        self._supported.update(other._supported)
        self._unsupported.update(other._unsupported)

    def judge(self, view: HostView) -> Iterator[Verdict]:
        """Yield an inconclusive verdict for each reading that a part lacks, but at least half of the parts of its kind have.

        Also yield one for each reading that every host must have, if this host lacks it.
        """
        key = _key_of(view)
        problems = self._problems.get(key)
        if problems is None:
            problems = self._problems[key] = list(self._problems_of(view))
        for name, scope, reason in problems:
            yield view.inconclusive(name, scope, reason, kind=UNSUPPORTED)

    def _problems_of(self, view: HostView) -> Iterator[tuple[str, str, str]]:
        """Yield name, scope and reason of each verdict on a host."""
        for key, scope, reason in _last_readings(view):
            if not reason:
                continue
            supported, total = self._supported[key], self._supported[key] + self._unsupported[key]
            _, name, part = key
            if supported and 2 * supported >= total:
                what = (
                    "GPUs of this model with the same driver"
                    if name.startswith(GPU)
                    else "hosts with the same GPUs, driver and gang"
                )
                yield name, scope, f"{reason}; {supported} of {total} {what} have this reading"
            elif part == HOST and _is_on_every_host(view, name):
                yield name, scope, f"{reason}; every host must have this reading"


def _key_of(view: HostView) -> Hashable:
    """Return a key of everything that `_last_readings` uses. For hosts with equal keys, `_last_readings` yields the same."""
    metrics = view.observations.metrics
    names = (*_optional_of_gpus(view), *_optional_of_hosts(view))
    lists = filter(None, map(_listing, names))
    slots = metrics.get(SLOTS)
    return (
        *(view.kind, view.host.gang, _driver(view), view.is_virtual, _has_failed_collector(view)),
        *(names, frozenset(_linked(view)), tuple(slots[-1][1].values.values()) if slots else ()),
        *(metrics[name][-1][1].form if name in metrics else None for name in (*names, *dict.fromkeys(lists), PATHS)),
    )


def _is_on_every_host(view: HostView, name: str) -> bool:
    return name in ON_EVERY_HOST or (name == CLOCK and not view.is_virtual)


def _driver(view: HostView) -> str:
    return str(view.observations.last_values("driver.version").get(HOST, ""))


def _linked(view: HostView) -> set[str]:
    """Return the GPUs with an NVLink that is up."""
    return {scope for scope, links in view.observations.last_values(ACTIVE_LINKS).items() if links}


def _last_readings(view: HostView) -> Iterator[tuple[Key, str, str]]:
    """Yield key, scope, and reason why there is no value (empty if there is one), for each optional reading.

    Only the last snapshot with the reading is used. Readings that failed with an error are left out.
    """
    planned = {*view.host.scopes} if view.host.device == "gpu" else set()
    common = _driver(view), view.is_virtual, len(view.host.scopes)
    if planned:
        yield from _readings_of_gpus(view, planned, common)
    if view.snapshot_phases and not _has_failed_collector(view):
        kind = view.peer_key[0], *common, view.host.gang
        for name in _optional_of_hosts(view):
            for part, reason in _readings_of_host(view, name):
                yield (kind, name, part), part, reason


def _readings_of_gpus(
    view: HostView, planned: set[str], common: tuple[str, bool, int]
) -> Iterator[tuple[Key, str, str]]:
    """Yield the readings of the GPUs under test, as `_last_readings` does."""
    linked = _linked(view)
    for pair, reason in () if _has_failed_collector(view) else _paths(view, planned):
        gpu = Scope.parse(pair)
        yield ((view.names[gpu.device], *common, ""), PATHS, gpu.below), pair, reason
    for name in _optional_of_gpus(view):
        gpus = planned & linked if name.startswith(NVLINK) else planned
        metric = view.observations.metrics[name][-1][1]
        for scope, reason in (*dict.fromkeys(metric.values, "").items(), *_unsupported(metric).items()):
            parsed = Scope.parse(scope)
            if parsed.device in gpus:
                kind = view.names.get(parsed.device, ""), *common, ""
                yield (kind, name, parsed.below), scope, reason


def _paths(view: HostView, planned: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each pair of GPUs under test, and why the path between them is not known (empty if it is known)."""
    metrics = view.observations.metrics.get(PATHS, ())
    absent = metrics[-1][1].absent if metrics else {}
    for gpu, other in itertools.permutations(sorted(planned & view.names.keys()), 2):
        pair = f"{gpu},peer={other.removeprefix('gpu=')}"
        reason = "" if pair in view.nvlinks else absent.get(pair, NOT_READ)
        if not reason or _is_unsupported(reason):
            yield pair, reason


def _readings_of_host(view: HostView, name: str) -> Iterator[tuple[str, str]]:
    """Yield the scope of each part that should have the reading, and why it has no value (empty if it has one).

    A part whose reading failed with an error is left out. If no reading lists the parts, the scope `host` stands for all of them.
    For a reading in LISTS, both `host` and the parts that it lists are yielded.
    """
    metrics = view.observations.metrics
    metric = metrics[name][-1][1] if name in metrics else None
    values: dict[str, Value] = dict(metric.values) if metric else {}
    absent = dict(metric.absent) if metric else {}
    listing = _listing(name)
    if name in LISTS or not listing:
        if values:
            yield HOST, ""
        elif not absent or all(_is_unsupported(reason) for reason in absent.values()):
            yield HOST, next(iter(absent.values()), NOT_READ)
    listed = metrics[listing][-1][1] if listing in metrics else None
    for part in dict.fromkeys((*listed.values, *listed.absent)) if listed else ():
        if part == HOST or (listing == SLOTS and listed and listed.values.get(part) is False):
            continue
        if part in values:
            yield part, ""
        elif _is_unsupported(reason := absent.get(part, absent.get(HOST, NOT_READ))):
            yield part, reason


@cache
def _listing(name: str) -> str:
    """Return the reading that lists the parts of the reading `name`; an empty string if there is none."""
    return list_of(name) if name in READINGS and READINGS[name].labels else ""


def _unsupported(metric: Metric) -> dict[str, str]:
    return {scope: reason for scope, reason in metric.absent.items() if _is_unsupported(reason)}


def _is_unsupported(reason: str) -> bool:
    return reason == NOT_READ or reason.partition(":")[0] == UNSUPPORTED


def _has_failed_collector(view: HostView) -> bool:
    """Return whether a collector failed, so that its readings are missing. Another verdict reports that."""
    metrics = view.observations.metrics
    return any(metrics[name][-1][1].absent for name in _collectors(tuple(metrics)))


@lru_cache(maxsize=MAX_KINDS)
def _collectors(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(COLLECTOR))


def _optional_of_gpus(view: HostView) -> tuple[str, ...]:
    """Return the readings of GPUs that optional criteria compare with a limit or with the median of the fleet."""
    return _names(view)[1]


def _optional_of_hosts(view: HostView) -> tuple[str, ...]:
    """Return the readings of hosts that optional criteria compare with a limit or with other hosts."""
    return _names(view)[2]


def _names(view: HostView) -> tuple[Mapping[str, Criterion], tuple[str, ...], tuple[str, ...]]:
    """Return the entry of `_NAMES` for a host."""
    criteria, metrics = view.criteria(), view.observations.metrics
    known = _NAMES.get(key := (id(criteria), tuple(metrics)))
    if known is None:
        optional = [item for item in criteria.values() if item.optional and item.baseline is None]
        of_gpus = dict.fromkeys(
            name
            for item in optional
            if item.same_as_fleet is None and item.name.startswith(GPU)
            for name in item.matched(metrics)
        )
        names = dict.fromkeys(
            name for item in optional if item.same_as_fleet is not False for name in item.matched(READINGS)
        )
        of_hosts = tuple(name for name in names if not name.startswith((GPU, BMC, *OF_SOME_HOSTS)))
        known = _NAMES[key] = criteria, tuple(of_gpus), of_hosts
    return known
