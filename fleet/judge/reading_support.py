"""Check that GPUs and hosts have the optional readings that at least half of their kind have.

An optional criterion skips a part that does not support its reading. Whether a reading is supported depends on the hardware, the
driver, the kernel and the hypervisor. A part that lacks such a reading is faulty, or its host hides the value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

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
"""Names of GPU models, driver version, whether the host is a virtual machine, number of GPUs, and the gang (of hosts only)."""
Key = tuple[Kind, str, str]
"""Kind of a part, reading, and the part: the scope below the GPU, such as `link=3`, or the scope on the host."""
GPU = "gpu."
NVLINK, ACTIVE_LINKS = "gpu.nvlink.", "gpu.nvlink.active_links"
"""Readings that a GPU without an NVLink bridge may lack, and the number of links by which such a GPU is known."""
OF_SOME_HOSTS = (
    "container.", "network.bond.", "optics.", "pcie.acs.", "software.", "storage.array.", "storage.path.", "storage.pool.",
)  # fmt: skip
"""Readings of software, arrays, bonds and modules, which an operator may install on, or connect to, only some hosts of a kind."""
ON_EVERY_HOST = ("storage.state.read_only",)
"""Readings that Linux has on every host: the options of a mounted file system."""
CLOCK = "clock.synchronized"
"""Reading that every host has, except a virtual machine whose hypervisor may set the clock."""
SLOTS = "host.dimm.populated"
"""Reading that lists the memory slots. An empty slot has no module, and so no readings of one."""
NOT_READ = "missing"
_NAMES: BoundedCache[int, tuple[Mapping[str, Criterion], tuple[str, ...]]] = BoundedCache(100)
"""Identity of the criteria of a host -> these criteria, and the readings that `_optional_of_hosts` returns for them."""


class ReadingSupport:
    """The number of parts that have, and that lack, each optional reading. Numbers of different hosts can be merged."""

    def __init__(self) -> None:
        self._supported: Counter[Key] = Counter()
        self._unsupported: Counter[Key] = Counter()

    def add(self, view: HostView) -> None:
        """Count the readings of a host."""
        for key, _, reason in _last_readings(view):
            (self._unsupported if reason else self._supported)[key] += 1

    def update(self, other: ReadingSupport) -> None:
        """Add the counts of other hosts."""
        self._supported.update(other._supported)
        self._unsupported.update(other._unsupported)

    def judge(self, view: HostView) -> Iterator[Verdict]:
        """Yield an inconclusive verdict for each reading that a part does not support and at least half of its kind do.

        Also yield one for each reading that every host has, if this host lacks it.
        """
        for key, scope, reason in _last_readings(view):
            if not reason:
                continue
            supported, total = self._supported[key], self._supported[key] + self._unsupported[key]
            _, name, part = key
            if supported and 2 * supported >= total:
                what = "GPUs of this model with the same driver" if name.startswith(GPU) else "hosts of this kind"
                text = f"{reason}; {supported} of {total} {what} have this reading"
            elif part == HOST and _is_on_every_host(view, name):
                text = f"{reason}; every host has this reading"
            else:
                continue
            yield view.inconclusive(name, scope, text, kind=UNSUPPORTED)


def _is_on_every_host(view: HostView, name: str) -> bool:
    return name in ON_EVERY_HOST or (name == CLOCK and not _is_virtual(view))


def _is_virtual(view: HostView) -> bool:
    return view.observations.last_values("host.virtual_machine").get(HOST) is True


def _last_readings(view: HostView) -> Iterator[tuple[Key, str, str]]:
    """Yield each optional reading in the last snapshot that has it: key, scope, and why it is unsupported or missing.

    The reason is empty if there is a value. Readings that failed with an error are left out.
    """
    planned = {*view.host.scopes} if view.host.device == "gpu" else set()
    driver = str(view.observations.last_values("driver.version").get(HOST, ""))
    common = driver, _is_virtual(view), len(view.host.scopes)
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
    linked = {scope for scope, links in view.observations.last_values(ACTIVE_LINKS).items() if links}
    for name in _optional_of_gpus(view):
        gpus = planned & linked if name.startswith(NVLINK) else planned
        metric = view.observations.metrics[name][-1][1]
        for scope, reason in (*dict.fromkeys(metric.values, "").items(), *_unsupported(metric).items()):
            parsed = Scope.parse(scope)
            if parsed.device in gpus:
                kind = view.names.get(parsed.device, ""), *common, ""
                yield (kind, name, parsed.below), scope, reason


def _readings_of_host(view: HostView, name: str) -> Iterator[tuple[str, str]]:
    """Yield the host, or each part that the host lists, and why it does not have the reading; an empty reason if it has."""
    metrics = view.observations.metrics
    metric = metrics[name][-1][1] if name in metrics else None
    values: dict[str, Value] = dict(metric.values) if metric else {}
    absent = dict(metric.absent) if metric else {}
    listing = list_of(name) if READINGS[name].labels else ""
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


def _unsupported(metric: Metric) -> dict[str, str]:
    return {scope: reason for scope, reason in metric.absent.items() if _is_unsupported(reason)}


def _is_unsupported(reason: str) -> bool:
    return reason == NOT_READ or reason.partition(":")[0] == UNSUPPORTED


def _has_failed_collector(view: HostView) -> bool:
    """Return whether a collector failed, so that its readings are missing. Another verdict reports that."""
    metrics = view.observations.metrics
    return any(metrics[name][-1][1].absent for name in metrics if name.startswith(COLLECTOR))


def _optional_of_gpus(view: HostView) -> set[str]:
    """Return the readings of GPUs that optional criteria compare with a limit or with the median of the fleet."""
    criteria = [
        item
        for item in view.criteria().values()
        if item.same_as_fleet is None and item.baseline is None and item.optional and item.name.startswith(GPU)
    ]
    return {name for item in criteria for name in item.matched(view.observations.metrics)}


def _optional_of_hosts(view: HostView) -> tuple[str, ...]:
    """Return the readings of hosts that optional criteria compare with a limit or with other hosts."""
    criteria = view.criteria()
    known = _NAMES.get(id(criteria))
    if known is None or known[0] is not criteria:
        optional = [item for item in criteria.values() if item.optional and item.baseline is None]
        names = dict.fromkeys(
            name for item in optional if item.same_as_fleet is not False for name in item.matched(READINGS)
        )
        known = criteria, tuple(name for name in names if not name.startswith((GPU, BMC, *OF_SOME_HOSTS)))
        _NAMES[id(criteria)] = known
    return known[1]
