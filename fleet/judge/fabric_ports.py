"""Compute two totals of a host: how many InfiniBand and RoCE ports are up, and the rate of all ports of one kind together.

The kind is InfiniBand, RoCE or Ethernet, whichever has the highest rate. The totals are added to each snapshot as readings
of the host. Criteria compare them with the inventory. Other criteria compare each port with the same port of other hosts.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fleet.judge.bounded_cache import BoundedCache
from fleet.judge.evidence import Evidence
from fleet.judge.observation_index import ObservationIndex
from fleet.quantities import number_or_zero
from schemas.records import ERROR, Metric, Snapshot, Value

TOTALS = "fabric_ports."
"""Prefix of the names of the totals. A host without InfiniBand and RoCE ports has no totals."""
ACTIVE, RATE = f"{TOTALS}active", f"{TOTALS}rate"
_UP: Mapping[str, Value] = {"infiniband.state": "ACTIVE", "infiniband.phys_state": "LinkUp", "infiniband.active": True}
INFINIBAND = "InfiniBand"
_READINGS = frozenset({*_UP, "infiniband.link_layer", "infiniband.rate", "network.speed"})


_TOTALS: BoundedCache[tuple[int, ...], tuple[tuple[Metric, ...], tuple[Metric, ...]]] = BoundedCache(256)
"""The `id()` of each port reading of a snapshot -> these readings and their totals. The readings are kept so that Python does not
reuse their `id()`."""


def with_port_totals(evidence: Evidence) -> Evidence:
    """Return the evidence, with the totals added to each snapshot that has InfiniBand or RoCE ports."""
    records = tuple(
        replace(record, snapshots=snapshots)
        if any(map(operator.is_not, snapshots := tuple(map(_with_totals, record.snapshots)), record.snapshots))
        else record
        for record in evidence.records
    )
    return evidence if all(map(operator.is_, records, evidence.records)) else replace(evidence, records=records)


def _with_totals(snapshot: Snapshot) -> Snapshot:
    metrics = tuple([metric for metric in snapshot.metrics if metric.name in _READINGS])
    known = _TOTALS.get(key := tuple(map(id, metrics)))
    if known is None:
        known = _TOTALS[key] = metrics, _totals({metric.name: metric.values for metric in metrics})
    return replace(snapshot, metrics=(*snapshot.metrics, *known[1])) if known[1] else snapshot


def _totals(readings: Mapping[str, Mapping[str, Value]]) -> tuple[Metric, ...]:
    """Return the totals; none if there is no InfiniBand or RoCE port.

    If the state of such a port was not read, only ACTIVE is returned, with the reason instead of a value. If the rate of a port
    that is up is unknown, only ACTIVE is returned, with its value.
    """
    if not readings.get("infiniband.link_layer"):
        return ()
    up = [scope for scope in readings["infiniband.link_layer"] if _is_up(readings, scope)]
    if unread := [scope for scope in readings["infiniband.link_layer"] if not _is_read(readings, scope)]:
        reason = f"{ERROR}: the state of {', '.join(unread)} was not read"
        return (Metric(name=ACTIVE, unit="1", absent={"host": reason}),)
    active = Metric(name=ACTIVE, unit="1", values={"host": len(up)})
    rates = readings.get("infiniband.rate", {})
    if not all(scope in rates for scope in up):
        return (active,)
    return active, Metric(name=RATE, unit="B/s", values={"host": _total_rate(readings, up)})


def _is_read(readings: Mapping[str, Mapping[str, Value]], scope: str) -> bool:
    return any(scope in readings.get(name, ()) for name in _UP)


def _is_up(readings: Mapping[str, Mapping[str, Value]], scope: str) -> bool:
    """Return whether the port is up according to every reading of its state."""
    return all(readings[name][scope] == wanted for name, wanted in _UP.items() if scope in readings.get(name, ()))


def _total_rate(readings: Mapping[str, Mapping[str, Value]], up: Iterable[str]) -> float:
    """Return the highest of three total rates in B/s: InfiniBand ports that are up, RoCE ports that are up, Ethernet interfaces.

    A fabric has ports of one kind only, so the three rates are not added. In a sum, an Ethernet port for storage could hide a
    slow InfiniBand port, and a RoCE port would count twice, because it is an Ethernet interface too.
    """
    by_layer: dict[bool, float] = defaultdict(float)
    for scope in up:
        by_layer[readings["infiniband.link_layer"][scope] == INFINIBAND] += number_or_zero(
            readings["infiniband.rate"][scope]
        )
    ethernet = sum(map(number_or_zero, readings.get("network.speed", {}).values()))
    return max(by_layer[True], by_layer[False], ethernet)


@dataclass(frozen=True, kw_only=True)
class FabricPorts:
    """The fabric ports of a host: its InfiniBand ports or its RoCE ports, whichever have the higher total rate."""

    rates: Mapping[float, int]
    """Rate of a port that is up in B/s -> number of such ports; the most frequent rate first."""
    down: int
    """Number of ports that are not up."""

    @property
    def rate(self) -> float:
        """Return the most frequent rate in B/s; 0 if no port is up."""
        return next(iter(self.rates), 0.0)

    def are_alike(self, gpus: int) -> bool:
        """Return whether all ports are up and have one rate, or at least `gpus` ports have the most frequent rate."""
        count = self.rates.get(self.rate, 0)
        return count >= gpus or (len(self.rates) == 1 and not self.down)


def fabric_ports(observations: ObservationIndex) -> FabricPorts:
    """Return the fabric ports of a host, as the last snapshot shows them."""
    readings = {name: observations.last_values(name) for name in _READINGS}
    by_layer: dict[bool, list[str]] = defaultdict(list)
    for scope, layer in readings["infiniband.link_layer"].items():
        by_layer[layer == INFINIBAND].append(scope)

    def rates(scopes: Iterable[str]) -> list[float]:
        known = readings["infiniband.rate"]
        return [number_or_zero(known[scope]) for scope in scopes if scope in known and _is_up(readings, scope)]

    ports = max(by_layer.values(), key=lambda scopes: sum(rates(scopes)), default=[])
    of_ports = rates(ports)
    return FabricPorts(rates=dict(Counter(of_ports).most_common()), down=len(ports) - len(of_ports))
