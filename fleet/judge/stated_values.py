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
from fleet.judge.fabric_ports import RATE, fabric_ports
from fleet.judge.host_view import HostView
from fleet.judge.outliers import FleetFigures
from fleet.quantities import finite, number
from schemas.records import Value
from schemas.reports import FAIL, PASS, Verdict, VerdictKind

FABRIC, FABRIC_PORT = "fabric_bytes_per_second", "fabric_port_bytes_per_second"
"""Variables of criteria (`vs_inventory`) whose value is computed from rackproof_fabric_gbps."""
VARIABLES = {FABRIC: "rackproof_fabric_gbps"}
"""Variable of a criterion -> the variable of the inventory from which its value comes."""
MIN_PARTS = 3
"""Least number of hosts, or of other parts, that must agree on a value."""
SAME_FIGURE = 0.1
"""Figures of benchmarks agree if they differ from their median by at most this share. Readings must be equal."""
MORE_THAN_STATED = 1.01
"""A value above this multiple of the stated one is more than was ordered."""
_GBPS = 1e9 / 8
"""1 Gb/s in B/s."""

_Key = tuple[str, Value, Value]
"""Id of the criterion, limit, and parameter `op` of a figure."""


@dataclass(frozen=True, kw_only=True)
class Excess:
    """A value of the inventory that every host exceeds for which it is stated, so that limits that follow from it are too low."""

    variable: str
    stated: str
    found: str
    """The lowest value of these hosts."""
    hosts: int


class StatedValues:
    """How many parts have which of the values that the inventory states.

    The objects of several hosts can be merged (`update`) in any order. Call `complete` after the last merge.
    """

    def __init__(self) -> None:
        self._passed: set[_Key] = set()
        self._failed: dict[_Key, Counter[Value]] = defaultdict(Counter)
        """Values of failed parts. None stands for the value of a host on which parts may be missing or at fault."""
        self._agreed: dict[_Key, Value] = {}
        self._exceeded: dict[tuple[str, float], list[float]] = defaultdict(list)
        """Variable of the criterion and stated value -> the value of each host, in the same unit."""

    def add(self, view: HostView, figures: FleetFigures) -> None:
        """Add a host. `figures` is only passed on: no criterion on a value of the inventory compares with the fleet."""
        for criterion in view.criteria().values() if view.has_record else ():
            if not _states_value(criterion):
                continue
            for verdict in evaluate(view, criterion, figures):
                if verdict.verdict == PASS:
                    self._passed.add(_key(verdict))
                elif verdict.verdict == FAIL:
                    value, parts = _counted(view, verdict)
                    self._failed[_key(verdict)][value] += parts
                for stated, found in _excess(view, criterion, verdict):
                    self._exceeded[criterion.variable, stated].append(found)

    def update(self, other: StatedValues) -> None:
        """Add the hosts of another object."""
        self._passed |= other._passed
        for key, counts in other._failed.items():
            self._failed[key].update(counts)
        for stated, values in other._exceeded.items():
            self._exceeded[stated] += values

    def complete(self) -> None:
        """Find the values on which parts agree: no part passes, and at least MIN_PARTS and more than half have this value."""
        for key, counts in self._failed.items():
            value = counts.most_common(1)[0][0]
            numbers = [number for number in map(finite, counts.elements()) if number is not None]
            if isinstance(value, float) and numbers:
                value = statistics.median(numbers)
            alike = sum(count for other, count in counts.items() if _are_alike(value, other))
            if value and alike >= MIN_PARTS and 2 * alike > counts.total() and key not in self._passed:
                self._agreed[key] = value

    def agree(self, verdict: Verdict) -> bool:
        """Return whether most parts have the value with which this verdict failed, and no part has the stated value."""
        return _are_alike(self._agreed.get(_key(verdict)), verdict.value)

    def has_agreed(self, verdict: Verdict) -> bool:
        """Return whether most parts have one value, and no part the stated one. The value of this verdict may be another one."""
        return _key(verdict) in self._agreed

    def excesses(self) -> Iterator[Excess]:
        """Yield each stated value that every host exceeds for which it is stated."""
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
    """Return whether the criterion compares what the host has with the inventory. A bandwidth of the gang is not what it has."""
    is_of_gang = criterion.variable in (FABRIC, FABRIC_PORT) and from_benchmark(criterion.name)
    return criterion.variable in VARIABLES and not is_of_gang


def _key(verdict: Verdict) -> _Key:
    return verdict.criterion, verdict.limit, verdict.params.get("op")


def _counted(view: HostView, verdict: Verdict) -> tuple[Value, int]:
    """Return the value of a failed verdict, and the number of parts that have it; None as the value if parts may be at fault."""
    if verdict.name == RATE:
        ports = fabric_ports(view.observations)
        return verdict.value if ports.are_alike(len(view.host.devices)) else None, sum(ports.rates.values())
    return verdict.value, 1


def _are_alike(value: Value, other: Value) -> bool:
    one, two = finite(value), finite(other)
    if isinstance(value, float) and one is not None and two is not None:
        return abs(one - two) <= SAME_FIGURE * abs(one)
    return value is not None and value == other


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
        detail = (
            f"{ports.rates.get(ports.rate, 0)} fabric ports of {number(ports.rate / _GBPS)} Gb/s, but the inventory states "
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


_EXCEEDED = {FABRIC: "Gb/s per port"}
"""Variable of a criterion whose value must not be exceeded on all hosts -> unit of the value in the inventory."""


def _excess(view: HostView, criterion: Criterion, verdict: Verdict) -> Iterator[tuple[float, float]]:
    """Yield the stated value and that of the host, in the unit of the inventory, for a variable in _EXCEEDED."""
    if criterion.variable == FABRIC and verdict.name == RATE:
        ports, gpus = fabric_ports(view.observations), len(view.host.devices)
        total = sum(rate * count for rate, count in ports.rates.items())
        # Several GPUs may share a port, and a GPU may have several ports.
        yield view.host.fabric_gbps, min(min(ports.rates, default=0.0), total / gpus) / _GBPS
