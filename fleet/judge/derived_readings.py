"""Check that a snapshot has the readings that follow from other readings in it.

The agent derives some readings from others, and reports some readings always together with others.

Criteria on such readings are optional, because not every host has the part that they describe. If another reading shows that
the host has the part, a missing reading is a contradiction. An alarm of an optical module is a contradiction if it does not
follow from the power of the lane and the limits of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from schemas.records import Metric, Snapshot
from schemas.scopes import HOST, Scope
from schemas.semantic_validation import COLLECTOR

Problem = tuple[str, str, str, str]
"""Name, scope, reason, stage."""

DERIVED = {
    "container.cdi.current": ("container.cdi.driver_version", "software.driver_module.version"),
    "software.driver_library.matches": ("software.driver_library.version", "software.driver_module.version"),
    "software.fabric_manager.matches": (
        "software.fabric_manager.version",
        "software.driver_module.version",
        "fabric.nvswitch.probed",
    ),
}
"""Reading of the host -> the readings from which the agent derives it. If each of these has a value, and none is 0 or false, the
derived reading must have a value too."""
TOGETHER = {
    "container.toolkit.present": "collector.container",
    "software.driver_module.version": "collector.software",
    "container.cdi.gpus": "container.toolkit.version",
    "container.cdi.current": "container.cdi.gpus",
    "software.driver_library.matches": "software.driver_library.version",
    "software.driver_module.open": "software.driver_module.version",
    "software.fabric_manager.matches": "software.fabric_manager.version",
}
"""Reading A of the host -> reading B. If a snapshot has B (a value, or a reason why there is none), it must have A too. If B is
the duration of a collector (`collector.…`), a reason is not enough: B has a value only if the collector did not fail."""
MEMBERS = {"network.bond.member_up": "network.bond.slave_count"}
"""Reading of the members of a part, such as the interfaces of a bond -> reading that is 0 if the part has no members."""
MODULE, OF_INTERFACES = "optics.module.type", ("collector.optics", "network.mtu")
"""Reading that the agent reports for each port of a host, and the two readings which show that it read the ports: the duration of
the collector, and `network.mtu`. A value of `network.mtu` shows that the host has an Ethernet interface, and that the
snapshot is a full one. Only full snapshots have readings of ports."""
QUANTITIES, LEVELS = ("temperature", "voltage", "rx_power", "tx_power", "bias"), ("alarm", "warning")
OF_MODULES = (
    "optics.module.fault",
    "optics.rx_los",
    "optics.tx_fault",
    *(f"optics.{quantity}" for quantity in QUANTITIES),
    *(f"optics.{quantity}.{level}" for quantity in QUANTITIES for level in LEVELS),
)
"""Readings that the agent reports for each port or its lanes, with a value or a reason."""
WITH_LIMITS = ("rx_power", "tx_power")
"""Quantities of a lane whose limits are readings too."""
ROUNDING = 1e-5
"""Largest relative difference between power and limit that rounding may have caused. The agent compares a power with the limits
before it rounds all of them to six digits for the record."""
NONE, LOW, HIGH = "none", "low", "high"


def derived_problems(snapshot: Snapshot, readings: Mapping[str, Metric]) -> Iterator[Problem]:
    """Yield each reading that a snapshot lacks although other readings of the snapshot imply it, and each wrong alarm.

    `readings` are the metrics of the snapshot by name.
    """
    for name, scope, reason in _problems(readings):
        yield name, scope, reason, snapshot.stage


def _problems(readings: Mapping[str, Metric]) -> Iterator[tuple[str, str, str]]:
    for name, other in TOGETHER.items():
        is_there = _value(readings, other, HOST) is not None if other.startswith(COLLECTOR) else _has(readings, other)
        if is_there and not _has(readings, name):
            yield name, HOST, f"not read, but the agent always reports it together with {other}, which the snapshot has"
    for name, sources in DERIVED.items():
        if (
            name in readings
            and HOST not in readings[name].values
            and all(_value(readings, each, HOST) for each in sources)
        ):
            reason = readings[name].absent.get(HOST, "not read")
            yield name, HOST, f"{reason}; but it follows from {' and '.join(sources)}, which were read"
    for name, other in MEMBERS.items():
        for part, value in readings[other].values.items() if other in readings else ():
            if value != 0 and not _has_part(readings.get(name), part):
                yield name, part, f"was read for no member of {part}, but {other} is {value}"
    ports = readings.get(MODULE)
    if ports is None and all(each in readings and readings[each].values for each in OF_INTERFACES):
        yield MODULE, HOST, "was read for no port, but the host has an Ethernet interface"
    for port in (*ports.values, *ports.absent) if ports else ():
        for name in OF_MODULES:
            if not _has_part(readings.get(name), port):
                yield (
                    name,
                    port,
                    f"not read, but the agent always reports it together with {MODULE}, which the snapshot has",
                )
    if ports:
        yield from _wrong_alarms(readings)


def _wrong_alarms(readings: Mapping[str, Metric]) -> Iterator[tuple[str, str, str]]:
    """Yield each alarm or warning of a lane that does not follow from the power of the lane and the limits of its module."""
    for quantity in WITH_LIMITS:
        for level in LEVELS:
            name = f"optics.{quantity}.{level}"
            powers = readings[f"optics.{quantity}"].values if f"optics.{quantity}" in readings else {}
            for lane, power in powers.items():
                port = str(Scope.parse(lane).without("lane"))
                low, high = (_value(readings, f"{name}_{side}", port) for side in (LOW, HIGH))
                if not all(isinstance(each, int | float) for each in (power, low, high)):
                    continue
                possible = _sides(float(power), float(low), float(high))  # type: ignore[arg-type]
                side = _value(readings, name, lane)
                if side not in possible:
                    stated = "not read" if side is None else f'is "{side}"'
                    yield (
                        name,
                        lane,
                        f"{stated}, but the power is {power:g} W and the limits are {low:g} W to {high:g} W, "
                        f'so it must be "{possible[0]}"',
                    )


def _sides(power: float, low: float, high: float) -> list[str]:
    """Return on which side of the limits the power is, then any other side on which it may have been before it was rounded."""
    side = LOW if power < low else HIGH if power > high else NONE
    near = [name for name, limit in ((LOW, low), (HIGH, high)) if abs(power - limit) <= ROUNDING * abs(limit)]
    return [side, *near, *([NONE] if near else [])]


def _value(readings: Mapping[str, Metric], name: str, scope: str) -> object:
    return readings[name].values.get(scope) if name in readings else None


def _has(readings: Mapping[str, Metric], name: str) -> bool:
    return name in readings and (HOST in readings[name].values or HOST in readings[name].absent)


def _has_part(metric: Metric | None, part: str) -> bool:
    """Return whether the reading has a value or a reason for the part or something in it."""
    if metric is None:
        return False
    if part in metric.values or part in metric.absent:
        return True
    scope = Scope.parse(part)
    return any(scope.contains(other) for other in (*metric.values, *metric.absent))
