"""Find failures whose cause is a wrong value in the inventory, or a delivery that differs from the order on every host.

The inventory states what was ordered, such as the rate of a port. If no host has what it states, and most hosts agree on another
value, no single part is at fault. The verdicts remain failures, with the kind `inventory` and the action `configure`.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fleet.judge.criteria import Criterion
from fleet.judge.evaluate import evaluate
from fleet.judge.evidence import from_benchmark
from fleet.judge.fabric_ports import ACTIVE, RATE, fabric_ports
from fleet.judge.host_view import HostView
from fleet.judge.missing import BUS, DRIVER
from fleet.judge.outliers import FleetFigures
from fleet.quantities import counted, finite, number
from schemas.records import Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind

FABRIC, FABRIC_PORT = "fabric_bytes_per_second", "fabric_port_bytes_per_second"
"""Variables of criteria (`vs_inventory`) whose value is computed from rackproof_fabric_gbps."""
VARIABLES = {
    FABRIC: "rackproof_fabric_gbps",
    "gpu_count": "rackproof_gpu_count",
    "infiniband_ports": "rackproof_infiniband_ports",
    "dimm_count": "rackproof_dimm_count",
    "memory_transfers_per_second": "rackproof_memory_mts",
    "host_memory_bytes_per_second": "rackproof_host_memory_gbyteps",
    "storage_local_read": "rackproof_storage_floors",
    "storage_local_write": "rackproof_storage_floors",
    "driver_version": "nvidia_driver_version",
    "vbios_version": "rackproof_vbios_version",
}
"""Variable of a criterion -> the variable of the inventory from which its value comes. The bandwidth of a shared file system is
missing, because it is a figure of all hosts together, on which they always agree."""
MIN_PARTS = 3
"""Least number of hosts that must agree on a value. For the rate of fabric ports, the ports are counted instead of the hosts."""
SAME_FIGURE = 0.1
"""Figures of benchmarks agree if they differ from their median by at most this share. Readings must be equal."""
MORE_THAN_STATED = 1.01
"""A value above this multiple of the stated one is more than was ordered."""
_GBPS = 1e9 / 8
"""1 Gb/s in B/s."""

_Key = tuple[str, Value, Value, float]
"""Id of the criterion, limit, parameter `op` of a figure, and the share by which equal values may differ."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A value of the inventory that is too low: every host for which it is stated has more. Limits based on it are too low."""

    variable: str
    stated: str
    found: str
    """The lowest value of these hosts."""
    hosts: int


class StatedValues:
    """For each value that the inventory states: whether a host has it, and how many parts have which other value.

    The objects of several hosts can be merged (`update`) in any order. Call `complete` after the last merge.
    """

    def __init__(self) -> None:
        self._passed: set[_Key] = set()
        self._failed: dict[_Key, Counter[Value]] = defaultdict(Counter)
        """Values of hosts that fail. None stands for hosts whose parts differ, or may be missing or at fault."""
        self._agreed: dict[_Key, Value] = {}
        self._exceeded: dict[tuple[str, float], list[float]] = defaultdict(list)
        """Variable of the criterion and stated value -> the value of each host, in the same unit."""

    def add(self, view: HostView, figures: FleetFigures) -> None:
        """Add a host. `figures` is only passed on: no criterion on a value of the inventory compares with the fleet."""
        for criterion in filter(_states_value, view.criteria().values()) if view.has_record else ():
            values: dict[_Key, list[Value]] = defaultdict(list)
            for verdict in evaluate(view, criterion, figures):
                if verdict.verdict == PASS:
                    self._passed.add(_key(verdict))
                elif verdict.verdict == FAIL:
                    values[_key(verdict)].append(verdict.value if _has_all_parts(view, verdict) else None)
                for stated, found in _excess(view, criterion, verdict):
                    self._exceeded[criterion.variable, stated].append(found)
            for key, of_parts in values.items():
                value = of_parts[0] if all(_are_alike(key, of_parts[0], other) for other in of_parts) else None
                self._failed[key][value] += _weight(view, criterion)

    def update(self, other: StatedValues) -> None:
        """Add the hosts of another object."""
        self._passed |= other._passed
        for key, counts in other._failed.items():
            self._failed[key].update(counts)
        for stated, values in other._exceeded.items():
            self._exceeded[stated] += values

    def complete(self) -> None:
        """Find the values on which hosts agree: none passes, and at least MIN_PARTS and more than half have this value."""
        for key, counts in self._failed.items():
            numbers = [value for value in map(finite, counts.elements()) if value is not None]
            value = statistics.median_low(numbers) if key[3] and numbers else counts.most_common(1)[0][0]
            alike = sum(count for other, count in counts.items() if _are_alike(key, value, other))
            if value and alike >= MIN_PARTS and 2 * alike > counts.total() and key not in self._passed:
                self._agreed[key] = value

    def agree(self, verdict: Verdict) -> bool:
        """Return whether most hosts have the value with which this verdict failed, and no host has the stated value."""
        return _are_alike(_key(verdict), self._agreed.get(_key(verdict)), verdict.value)

    def has_agreed(self, verdict: Verdict) -> bool:
        """Return whether most hosts agree on one value, and no host has the stated value.

        The value of this verdict may differ from both.
        """
        return _key(verdict) in self._agreed

    def excesses(self) -> Iterator[Excess]:
        """Yield each value of the inventory that is too low."""
        for (variable, stated), values in sorted(self._exceeded.items()):
            if min(values) > MORE_THAN_STATED * stated:
                unit = _EXCEEDED[variable]
                texts = (f"{number(value, 4)} {unit}" for value in (stated, min(values)))
                yield Excess(variable=VARIABLES[variable], stated=next(texts), found=next(texts), hosts=len(values))


def with_stated_values(view: HostView, verdicts: Sequence[Verdict], stated: StatedValues) -> list[Verdict]:
    """Return the verdicts on one host. Failures that follow from the inventory get the kind `inventory`.

    A bandwidth of the gang is such a failure if it reaches the limit that follows from the rate of the ports. Otherwise the
    network is slower than its ports, and the verdict keeps its kind.
    """
    share = _share_of_stated_rate(view, verdicts, stated)
    criteria = view.criteria()

    def follows(verdict: Verdict, criterion: Criterion) -> bool:
        if _states_value(criterion):
            return stated.agree(verdict)
        value, limit = finite(verdict.value), finite(verdict.limit)
        is_of_fabric = criterion.variable in (FABRIC, FABRIC_PORT) and value is not None and limit is not None
        return is_of_fabric and bool(share) and value >= share * limit  # type: ignore[operator]

    return [
        _of_inventory(view, criterion, verdict)
        if verdict.verdict == FAIL and (criterion := criteria.get(verdict.criterion)) and follows(verdict, criterion)
        else verdict
        for verdict in verdicts
    ]


def _states_value(criterion: Criterion) -> bool:
    """Return whether the criterion compares a value of the host itself, not a bandwidth of its gang, with the inventory."""
    if criterion.variable not in VARIABLES:
        return False
    return criterion.variable != FABRIC or not from_benchmark(criterion.name)


def _key(verdict: Verdict) -> _Key:
    tolerance = SAME_FIGURE if from_benchmark(verdict.name) else 0.0
    return verdict.criterion, verdict.limit, verdict.params.get("op"), tolerance


def _are_alike(key: _Key, value: Value, other: Value) -> bool:
    one, two = finite(value), finite(other)
    if key[3] and one is not None and two is not None:
        return abs(one - two) <= key[3] * abs(one)
    return value is not None and value == other


def _weight(view: HostView, criterion: Criterion) -> int:
    """Return how many parts the value of this host counts for: its number of ports for the rate of fabric ports, otherwise 1."""
    return sum(fabric_ports(view.observations).rates.values()) if criterion.name == RATE else 1


def _has_all_parts(view: HostView, verdict: Verdict) -> bool:
    """Return whether no part of the host is known to be missing, down or slower than others, which would explain the value."""
    last = view.observations.last_values
    if verdict.name == RATE:
        return fabric_ports(view.observations).are_alike(len(view.host.devices))
    if verdict.name == ACTIVE:
        return verdict.value == len(last("infiniband.link_layer"))
    if verdict.name in (DRIVER, BUS):
        # A GPU that is on the PCI bus, but not listed by the driver, is lost or has a problem with its driver.
        return len({*last(DRIVER).values(), *last(BUS).values()}) == 1
    return True


def _share_of_stated_rate(view: HostView, verdicts: Iterable[Verdict], stated: StatedValues) -> float:
    """Return the rate of all fabric ports of the host as a share of the stated rate; 0 if the stated rate is not wrong."""
    is_wrong = any(item.name == RATE and item.verdict == FAIL and stated.has_agreed(item) for item in verdicts)
    ports = fabric_ports(view.observations) if is_wrong else None
    return sum(rate * count for rate, count in ports.rates.items()) / view.fabric if ports and view.fabric else 0.0


def _of_inventory(view: HostView, criterion: Criterion, verdict: Verdict) -> Verdict:
    variable = VARIABLES[criterion.variable if criterion.variable in VARIABLES else FABRIC]
    detail = f"no host has what {variable} states, and most hosts have the same other value"
    if criterion.variable in (FABRIC, FABRIC_PORT):
        ports, stated = fabric_ports(view.observations), view.host.fabric_gbps
        alike = counted(ports.rates.get(ports.rate, 0), "fabric port")
        detail = (
            f"{alike} of {number(ports.rate / _GBPS)} Gb/s, but the inventory states "
            f"{number(stated)} Gb/s for the port of each of {len(view.host.devices)} GPUs ({variable})"
        )
    return replace(
        verdict,
        reason=f"{verdict.reason}; {detail}",
        detail=detail,
        kind=VerdictKind.INVENTORY,
        action="configure",
        severity="",
    )


_MTS = 1e6
_EXCEEDED = {
    FABRIC: "Gb/s per port",
    "memory_transfers_per_second": "MT/s",
    "dimm_count": "memory modules",
}
"""Variable of a criterion whose value must not be exceeded on all hosts -> unit of the value in the inventory."""


def _excess(view: HostView, criterion: Criterion, verdict: Verdict) -> Iterator[tuple[float, float]]:
    """Yield the stated value and that of the host, in the unit of the inventory, for a variable in _EXCEEDED."""
    value = finite(verdict.value)
    if criterion.variable not in _EXCEEDED or value is None:
        return
    if criterion.variable == FABRIC:
        ports, gpus = fabric_ports(view.observations), len(view.host.devices)
        total = sum(rate * count for rate, count in ports.rates.items())
        # Several GPUs may share a port, and a GPU may have several ports.
        yield view.host.fabric_gbps, min(min(ports.rates, default=0.0), total / gpus) / _GBPS
    elif criterion.variable == "dimm_count":
        yield view.host.dimm_count, value
    else:
        yield view.host.memory_mts, value / _MTS
