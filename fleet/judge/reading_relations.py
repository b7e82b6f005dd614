"""Check that the readings of one snapshot agree with each other and with the parts of the host.

Each value must belong to a part of the kind that READINGS declares for the reading. The record must list each GPU that has
readings. A count must equal the number of parts that were read. A value that has a total or a maximum must not exceed it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cache

from fleet.judge.credibility import Problem
from fleet.judge.derived_readings import derived_problems
from fleet.judge.host_view import HostView
from fleet.quantities import counted
from schemas.readings import READINGS
from schemas.records import Metric, Record, Snapshot
from schemas.scopes import HOST, Scope
from schemas.semantic_validation import COLLECTOR

COUNTS = {
    "gpu.count": "gpu.uuid",
    "host.dimm.slot_count": "host.dimm.populated",
    "host.numa.count": "host.numa.memory_total",
    "infiniband.port_count": "infiniband.state",
    "network.nic_count": "network.operstate",
    "pcie.device_count": "pcie.kind",
    "storage.disk.count": "storage.disk.rotational",
}
"""Count of parts -> a reading that each of the counted parts has, with a value or with the reason why there is none."""
ATTACHABLE, MOST_ATTACHED = ("network.nic_count", "pcie.device_count", "storage.disk.count"), 20
"""Counts of parts that may be attached and detached between two full snapshots, such as drives and virtual functions. A snapshot
during a launch may have such a count, but no reading of the counted parts. In this case the count may be at most
MOST_ATTACHED times the largest number of parts in a full snapshot."""
WHOLES = {
    "gpu.bar1.used": "gpu.bar1.total",
    "gpu.memory.used": "gpu.memory.total",
    "gpu.nvlink.active_links": "gpu.nvlink.link_count",
    "gpu.pcie.generation": "gpu.pcie.generation_max",
    "gpu.pcie.width": "gpu.pcie.width_max",
    "gpu.power_limit": "gpu.power_limit_max",
    "host.cpu.cores": "host.cpu.threads",
    "host.dimm.count": "host.dimm.slot_count",
    "host.hugepages.free": "host.hugepages.count",
    "host.memory.available": "host.memory.total",
    "host.numa.memory_free": "host.numa.memory_total",
    "host.swap.used": "host.swap.total",
    "pcie.generation": "pcie.generation_max",
    "pcie.max_payload": "pcie.max_payload_supported",
    "pcie.width": "pcie.width_max",
    "storage.mount.available": "storage.mount.size",
}
"""Reading -> another reading of the same part. The first cannot be larger than the second."""
_OF_SLOTS = ("manufacturer", "part_number", "serial", "size", "speed", "type")
PARTS = {
    **{f"host.dimm.{name}": "host.dimm.populated" for name in _OF_SLOTS},
    "host.numa.": "host.numa.memory_total",
    "infiniband.": "infiniband.state",
    "network.": "network.operstate",
    "pcie.": "pcie.kind",
    "storage.disk.": "storage.disk.rotational",
    "storage.mount.": "storage.mount.size",
    "storage.nvme.": "storage.disk.rotational",
}
"""Prefix of the readings of one kind of part -> the reading that lists the parts, because every part of this kind has it."""
LINK_COUNT, LINKS = "gpu.nvlink.link_count", "gpu.nvlink.active"
PEER, NVLINK = "gpu.peer.link", "gpu.nvlink."
OTHER_PARTS = ("network.bond.", "pcie.acs.enabled")
"""Prefixes of readings to which PARTS does not apply. `network.operstate` does not list bonds, and `pcie.kind` does not list the
bridges of `pcie.acs.enabled`."""
OF_PORTS, PORT_DEVICES = ("optics.", "port."), ("hca", "nic")
"""Prefixes of the readings of ports and modules, and the labels of the device of a port: an adapter, or an Ethernet interface."""
GPUS_ON_BUS, KIND = "gpu.pci_count", "pcie.kind"
LISTS, COUNTED = frozenset(PARTS.values()), frozenset(COUNTS.values())
_RELATED = COUNTS.keys() | WHOLES.keys()
OCCURRENCES = frozenset({"xid", "sxid", "event", "message", "fatal"})
"""Labels of readings of events. The log does not name the part of every event, so a scope may lack any of the labels."""


def relation_problems(view: HostView, record: Record) -> Iterator[Problem]:
    """Yield each reading of a part that the host does not have, each wrong count, and each value above its total or maximum."""
    # A planned GPU that the record does not list is no problem here: another verdict reports it.
    known = {str(index) for index in view.host.devices} | {str(gpu.index) for gpu in record.gpus}
    unlisted: dict[str, str] = {}
    parts_read: dict[str, set[int]] = defaultdict(set)
    metrics = record.distinct_metrics
    for metric in metrics:
        if metric.name in COUNTED:
            parts_read[metric.name].add(_number_of_parts(metric))
    wrong = {id(metric) for metric in metrics if not metric.is_sound and has_wrong_scope(metric)}
    for snapshot in record.snapshots:
        yield from _problems_of_snapshot(snapshot, parts_read, wrong)
    yield from _unknown_parts(record)
    if not all(metric.gpus <= known for metric in metrics):
        for snapshot, metric in [(taken, metric) for taken in record.snapshots for metric in taken.metrics]:
            for index in metric.gpus - known:
                unlisted.setdefault(index, snapshot.stage)
    for index, stage in sorted(unlisted.items()):
        yield "gpu.serial", f"gpu={index}", "has readings, but the record does not list this GPU", stage


def _problems_of_snapshot(
    snapshot: Snapshot, parts_read: Mapping[str, set[int]], wrong: Collection[int]
) -> Iterator[Problem]:
    """Yield the problems of one snapshot.

    Args:
        snapshot: the snapshot.
        parts_read: reading in COUNTED -> for how many parts it was read. Snapshots of the record may have different numbers.
        wrong: `id` of each metric for which `has_wrong_scope` is true.
    """
    readings = {metric.name: metric for metric in snapshot.metrics}
    yield from derived_problems(snapshot, readings)
    for metric in snapshot.metrics:
        if id(metric) in wrong:
            for scope in _wrong_scopes(metric):
                reason = f"read in the scope {scope}, but this is a reading of {_part_of(metric.name)}"
                yield metric.name, scope, reason, snapshot.stage
        if metric.name in _RELATED:
            for scope, reason in _exceeding(metric, readings, parts_read):
                yield metric.name, scope, reason, snapshot.stage
    if PEER in readings and id(readings[PEER]) in wrong:
        for scope in filter(_is_own_peer, readings[PEER].values):
            yield PEER, scope, "read between a GPU and itself", snapshot.stage
    if LINK_COUNT in readings and LINKS in readings:
        numbers = readings[LINKS].values_per_device
        for scope, stated in readings[LINK_COUNT].values.items():
            if numbers.get(scope, 0) not in (0, stated):  # some drivers do not report the states of links
                reason = f"is {stated}, but {LINKS} was read for {counted(numbers[scope], 'link')}"
                yield LINK_COUNT, scope, reason, snapshot.stage


def has_wrong_scope(metric: Metric) -> bool:
    """Return whether the metric has a scope that this reading cannot have, or the path from a GPU to itself."""
    shapes = _shapes(metric.name)
    is_right = shapes is None or (metric.shapes <= shapes and metric.absent_shapes <= _wider(shapes))
    if not is_right or (metric.name == PEER and any(map(_is_own_peer, metric.values))):
        return True
    return metric.name.startswith(OF_PORTS) and any(map(_has_impossible_port, (*metric.values, *metric.absent)))


def _wrong_scopes(metric: Metric) -> list[str]:
    """Return the scopes with labels or a port that this reading cannot have."""
    shapes = _shapes(metric.name)
    if shapes is None:
        return []
    wrong = [scope for scope in metric.values if tuple(Scope.parse(scope).labels) not in shapes]
    wrong += [scope for scope in metric.absent if tuple(Scope.parse(scope).labels) not in _wider(shapes)]
    if metric.name.startswith(OF_PORTS):
        wrong += filter(_has_impossible_port, (*metric.values, *metric.absent))
    return [*dict.fromkeys(wrong)]


def _has_impossible_port(scope: str) -> bool:
    """Return whether the port number is impossible. An Ethernet interface has only port 1; an adapter has ports from 1 on."""
    labels = Scope.parse(scope).labels
    number = labels.get("port", "1")
    return number != "1" if "nic" in labels else not number.isdecimal() or int(number) < 1


def _is_own_peer(scope: str) -> bool:
    labels = Scope.parse(scope).labels
    return labels.get("gpu") == labels.get("peer")


def _unknown_parts(record: Record) -> Iterator[Problem]:
    """Yield each reading of a part that no snapshot lists, and each `gpu.pci_count` above the number of GPUs in `pcie.kind`."""
    listed: dict[str, set[str]] = defaultdict(set)
    gpus: set[str] = set()
    for metric in record.distinct_metrics:
        if metric.name in LISTS:
            listed[metric.name].update(metric.values, metric.absent, (HOST,))
        if metric.name == KIND:
            gpus.update(scope for scope, kind in metric.values.items() if kind == "gpu")
    unknown = {id(metric) for metric in record.distinct_metrics if _has_unknown_part(metric, listed)}
    for snapshot in record.snapshots:
        for metric in snapshot.metrics:
            if gpus and metric.name == GPUS_ON_BUS:
                for scope, stated in metric.values.items():
                    # A lower count means that a GPU fell off the bus. A criterion judges that.
                    if isinstance(stated, int) and stated > len(gpus):
                        yield (
                            GPUS_ON_BUS,
                            scope,
                            f"is {stated}, but {KIND} lists {counted(len(gpus), 'GPU')}",
                            snapshot.stage,
                        )
            if id(metric) in unknown:
                parts, scopes = listed[list_of(metric.name)], (*metric.values, *metric.absent)
                for scope in sorted({Scope.parse(scope).part for scope in scopes} - parts - {HOST}):
                    if not any(Scope.parse(each).part == scope for each in parts):
                        reason = f"was read for {scope}, but {list_of(metric.name)} was not read for it"
                        yield metric.name, scope, reason, snapshot.stage


def _has_unknown_part(metric: Metric, listed: Mapping[str, set[str]]) -> bool:
    """Return whether the metric has a scope that `listed` (reading that lists parts -> their scopes) does not have."""
    parts = listed.get(list_of(metric.name))
    return parts is not None and not (metric.values.keys() <= parts and metric.absent.keys() <= parts)


def _number_of_parts(metric: Metric) -> int:
    return len(metric.values.keys() | (metric.absent.keys() - {HOST}))


@cache
def list_of(name: str) -> str:
    """Return the reading in PARTS that lists the parts of the reading `name`; an empty string if there is none."""
    if name.startswith(OTHER_PARTS):
        return ""
    return next((reading for prefix, reading in PARTS.items() if name.startswith(prefix)), "")


def _part_of(name: str) -> str:
    if name.startswith(OF_PORTS):
        return "each port of an RDMA adapter (`hca=NAME,port=NUMBER`) or of an Ethernet interface (`nic=NAME,port=1`)"
    labels = READINGS[name].labels if name in READINGS else ()
    return f"each {' and '.join(labels)}" if labels else f"the {HOST}"


def _exceeding(
    metric: Metric, readings: Mapping[str, Metric], parts_read: Mapping[str, set[int]]
) -> Iterator[tuple[str, str]]:
    """Yield scope and reason of a count that is not the number of parts, or of a value above its total or maximum."""
    of_parts, whole = COUNTS.get(metric.name, ""), readings.get(WHOLES.get(metric.name, ""))
    if HOST in metric.values and of_parts in parts_read:
        # A snapshot during a launch has counts, but may lack the reading of the parts. Its counts are then compared with the
        # parts in the other snapshots.
        own, stated = readings.get(of_parts), metric.values[HOST]
        possible = {_number_of_parts(own)} if own else parts_read[of_parts]
        fewest, largest = min(possible), max(possible)
        if not own and metric.name in ATTACHABLE:
            largest *= MOST_ATTACHED
        if not isinstance(stated, int) or not fewest <= stated <= largest:
            parts = f"{' or '.join(map(str, sorted(possible)))} {'part' if possible == {1} else 'parts'}"
            yield HOST, f"is {stated}, but {of_parts} was read for {parts}"
    if whole and metric.greatest > whole.least:
        for scope, value in metric.values.items():
            most = whole.values.get(scope)
            if isinstance(value, int | float) and isinstance(most, int | float) and value > most:
                yield scope, f"is {value:g}, but {whole.name} is {most:g}"


@cache
def _wider(shapes: frozenset[tuple[str, ...]]) -> frozenset[tuple[str, ...]]:
    """Return the labels in `shapes` and those of all enclosing parts: `(gpu, link)` becomes `(gpu, link)`, `(gpu)` and `()`.

    The empty tuple is for a reading that the whole host lacks: its scope is `host`, without labels.
    """
    return frozenset(labels[:number] for labels in shapes for number in range(len(labels) + 1))


@cache
def _shapes(name: str) -> frozenset[tuple[str, ...]] | None:
    """Return each combination of labels that a scope of the reading may have, such as `(gpu, link)`.

    None if this version of Rackproof does not list the reading.
    """
    reading = READINGS.get(name)
    if reading is None:
        return frozenset({()}) if name.startswith(COLLECTOR) else None
    if name.startswith(NVLINK):  # some drivers report each link, others their sum
        return frozenset({("gpu",), ("gpu", "link")})
    if name.startswith(OF_PORTS):
        inner = tuple(label for label in reading.labels if label not in PORT_DEVICES)
        return frozenset((device, *inner) for device in PORT_DEVICES)
    if not OCCURRENCES & {*reading.labels}:
        return frozenset({reading.labels})
    named = range(len(reading.labels) + 1)
    return frozenset(labels for number in named for labels in itertools.combinations(reading.labels, number))
