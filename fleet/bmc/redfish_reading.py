"""Read one BMC by Redfish, in the old chassis schema (Power, Thermal) or the new one (PowerSubsystem, ThermalSubsystem)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from fleet.bmc.client import ROOT, RedfishSession, Resource, open_session
from fleet.bmc.event_log import hardware_logs, is_fault_list, may_lose_entries, read_fault_list, read_log
from fleet.bmc.firmware import read_firmware
from fleet.bmc.health import CRITICAL, OK, has_health, health, is_offline, is_there, leak_health, power_supply_health
from fleet.bmc.parts import Parts
from fleet.bmc.readings import READABLE, Readings
from fleet.bmc.target import BmcError, BmcTarget, clean_text, label
from schemas.records import is_number
from schemas.scopes import Scope

Marks = Mapping[str, str]
"""Scope of an event log -> mark (ID and time) of its newest entry at the previous reading; `none` if the log was empty."""
NO_VALUE = "the BMC currently reports no value for this sensor"
_NO_STATUS = "the BMC reports no health status for this part"
_NEVER_STATUS = "this BMC reports no health for any power supply; its event log reports faults of power supplies"
_OF_A_PART = re.compile(
    r"psu|(?<![a-z])ps\d|power|liquid|coolant|water|cpu|gpu|dimm|nic|pci|ocp|ssd|nvme|hdd|disk|drive|(?<![a-z])vrm?(?![a-z])|riser"
    r"|(?<![a-z])(?:mb|gb|pdb)\d*(?![a-z])"  # motherboard, GPU board and power distribution board of NVIDIA's servers
)
"""Words in the name or place of a sensor that belongs to a component. Such a sensor does not measure the air at the inlet or
outlet of the chassis: a power supply, for example, draws air that other parts have heated."""
_PLACES = {"intake": "inlet", "inlet": "inlet", "ambient": "inlet", "exhaust": "outlet", "outlet": "outlet"}
"""Word in the name or place of a temperature sensor -> the side of the chassis."""


_UPPER_LIMITS = ("Critical", "NonCritical", "Caution", "Fatal")
"""Kinds of upper limits, in the old schema or the new one."""
MAX_ROOM_LIMIT = 55.0
"""A sensor of the air of the room has no limit above this, in °C. On servers of Dell, HPE, Lenovo, NVIDIA and Supermicro, the
limits of such sensors are 37 to 50. Limits of sensors on boards are at least 56 (mock-ups of github.com/NVIDIA/libredfish)."""


def read_redfish(target: BmcTarget, marks: Marks | None, deadline: float) -> Readings:
    """Return the readings of a BMC.

    Args:
        target: the BMC.
        marks: the marks of the previous reading of this BMC; None for the first reading.
        deadline: value of time.monotonic() after which nothing more is read.

    Raises:
        BmcError: the BMC could not be read. The text names the cause.
    """
    readings = Readings()
    with open_session(target, deadline) as session:
        root = session.get(ROOT)
        if root is None:
            raise BmcError("there is no Redfish service at the address")
        systems = list(session.members(session.linked(root, "Systems")))
        chassis = list(session.members(session.linked(root, "Chassis")))
        managers = list(session.members(session.linked(root, "Managers")))
        if not systems and not chassis:
            raise BmcError("the Redfish service lists neither systems nor chassis")
        parts = Parts(session)
        for system in systems:
            _read_system(session, readings, system, parts)
        supplies = [count for item in chassis if (count := _read_chassis(session, readings, item, parts)) is not None]
        if supplies:
            readings.add("bmc.power_supply.fitted", (), sum(supplies))
        read_firmware(session, readings, root, parts)
        _read_logs(session, readings, (*systems, *managers, *chassis), marks)
    readings.add(READABLE, (), True)
    return readings


def _read_system(session: RedfishSession, readings: Readings, system: Resource, parts: Parts) -> None:
    name = label(system.get("Id", "system"))
    _add_text(readings, "bmc.system.serial", (name,), system.get("SerialNumber"))
    if is_there(system) and (state := health(system)):
        readings.add("bmc.part.health", (f"system.{name}",), state)
    for processor in session.members(session.linked(system, "Processors")):
        parts.add(processor)
        if str(processor.get("ProcessorType", "")).upper() == "GPU" and is_there(processor):
            processor_name = label(processor.get("Id", "gpu"))
            _add_text(readings, "bmc.gpu.serial", (processor_name,), processor.get("SerialNumber"))
            if state := health(processor):
                readings.add("bmc.part.health", (f"processor.{processor_name}",), state)


def _read_chassis(session: RedfishSession, readings: Readings, chassis: Resource, parts: Parts) -> int | None:
    """Add the readings of one chassis. Return its number of installed power supplies; None if the chassis does not list them."""
    name = label(chassis.get("Id", "chassis"))
    if not is_there(chassis):
        return None
    parts.add(chassis)
    # A chassis with ROT in its name is the root of trust of a GPU. Its serial is not that of the GPU.
    is_gpu = "GPU" in name.upper() and "ROT" not in name.upper()
    _add_text(readings, "bmc.gpu.serial" if is_gpu else "bmc.chassis.serial", (name,), chassis.get("SerialNumber"))
    if state := health(chassis):
        readings.add("bmc.part.health", (f"chassis.{name}",), state)
    power, thermal = session.linked(chassis, "Power"), session.linked(chassis, "Thermal")
    subsystem = session.linked(chassis, "PowerSubsystem") if not _list(power, "PowerSupplies") else None
    supplies = _list(power, "PowerSupplies") or list(session.members(session.linked(subsystem, "PowerSupplies")))
    fitted = list(filter(is_there, supplies))
    parts.add_power_supplies(fitted)
    _read_power_supplies(readings, fitted)
    cooling = session.linked(chassis, "ThermalSubsystem")
    for kind, key, source in (
        ("power", "Redundancy", power),
        ("power", "PowerSupplyRedundancy", subsystem),
        ("fan", "Redundancy", thermal),
        ("fan", "FanRedundancy", cooling),
    ):
        _read_redundancy(readings, f"bmc.{kind}_redundancy.health", _list(source, key))
    fans = _list(thermal, "Fans") or session.members(session.linked(cooling, "Fans"))
    for fan in filter(is_there, fans):
        if state := _fan_health(fan):
            readings.add("bmc.fan.health", (_name(fan),), state)
    for detector in session.members(session.linked(session.linked(cooling, "LeakDetection"), "LeakDetectors")):
        if is_there(detector):
            readings.add("bmc.leak_detector.health", (_name(detector),), leak_health(detector), _NO_STATUS)
    sensors = [*_list(thermal, "Temperatures"), *_list(power, "Voltages")]
    for sensor in sensors or session.members(session.linked(chassis, "Sensors")):
        _read_sensor(readings, sensor)
    return len(fitted) if power or subsystem else None


def _fan_health(fan: Resource) -> str | None:
    """Return the health of a fan. A fan whose `Health` is OK or missing is critical if it is slower than its critical limit."""
    value, speed, low = health(fan), _number(fan.get("Reading")), _limit(fan, "Lower")
    if value in (None, OK) and speed is not None and low is not None and speed < low:
        return f"{CRITICAL}: its speed {speed:g} is below its critical limit {low:g}"
    return value


def _read_power_supplies(readings: Readings, fitted: list[Resource]) -> None:
    states = [power_supply_health(supply) for supply in fitted]
    is_silent = not any(states) and not any(map(has_health, fitted))
    for supply, state in zip(fitted, states, strict=True):
        if is_silent:
            readings.lack("bmc.power_supply.health", (_name(supply),), _NEVER_STATUS)
        else:
            readings.add("bmc.power_supply.health", (_name(supply),), state, _NO_STATUS)


def _read_redundancy(readings: Readings, name: str, groups: Iterable[Resource]) -> None:
    for group in filter(is_there, groups):
        if state := health(group):
            readings.add(name, (_name(group),), state)


def _read_sensor(readings: Readings, sensor: Resource) -> None:
    """Add the alarm of a sensor (`none` within its critical limits), and its temperature if it is at the inlet or outlet."""
    value = _number(next((sensor[key] for key in ("Reading", "ReadingCelsius", "ReadingVolts") if key in sensor), None))
    if not is_there(sensor):
        if not is_offline(sensor):
            return
        value = None
    name = _name(sensor)
    low, high = _limits(sensor)
    if value is None:
        if (low, high) != (None, None):
            readings.lack("bmc.sensor.alarm", (name,), NO_VALUE)
    elif low is not None and value < low:
        readings.add("bmc.sensor.alarm", (name,), f"{value:g}, below its critical limit {low:g}")
    elif high is not None and value > high:
        readings.add("bmc.sensor.alarm", (name,), f"{value:g}, above its critical limit {high:g}")
    elif low is not None or high is not None:
        readings.add("bmc.sensor.alarm", (name,), "none")
    if "ReadingCelsius" in sensor or sensor.get("ReadingUnits") == "Cel":
        side = _side(sensor, name)
        if side and value is None:
            readings.lack(f"bmc.{side}.temperature", (name,), NO_VALUE)
        elif side:
            readings.add(f"bmc.{side}.temperature", (name,), value)


def _side(sensor: Resource, name: str) -> str:
    """Return `inlet` or `outlet` if a temperature sensor measures the air there; empty for any other sensor.

    A sensor with an upper limit above MAX_ROOM_LIMIT is on a board, not at the inlet. Some BMCs report the place `Intake` for all
    sensors. So a sensor that has no upper limit counts as `inlet` only if its name says so.
    """
    by_place = side_of(f"{sensor.get('PhysicalContext', '')} {name}")
    by_name = side_of(name) if by_place else ""
    limits = [limit for kind in _UPPER_LIMITS if (limit := _limit(sensor, "Upper", kind))]
    if "outlet" in (by_name, by_place):
        return by_name or by_place
    return by_place if all(limit <= MAX_ROOM_LIMIT for limit in limits) and (by_name or limits) else ""


def side_of(place: str) -> str:
    """Return `inlet` or `outlet` if a sensor measures the air there; empty for any other sensor.

    `place` is the text of the sensor's place and name, or of its name alone.
    """
    place = place.lower()
    return "" if _OF_A_PART.search(place) else next((side for word, side in _PLACES.items() if word in place), "")


def _limits(sensor: Resource) -> tuple[float | None, float | None]:
    """Return the lower and upper critical limit; None for a limit that is not set or not used.

    Some services report 0 for a limit that is not set. So if the upper limit is 0, each limit that is 0 is ignored. If the upper
    limit is not 0, but is not above the lower limit, both are ignored.
    """
    low, high = _limit(sensor, "Lower"), _limit(sensor, "Upper")
    if high == 0:
        return low or None, None
    return (None, None) if low is not None and high is not None and high <= low else (low, high)


def _limit(sensor: Resource, side: str, kind: str = "Critical") -> float | None:
    """Return a lower or upper limit of a sensor, in the old schema or the new one; None if it has no such limit.

    `kind`: `Critical`, or another of _UPPER_LIMITS.
    """
    value = sensor.get(f"{side}Threshold{kind}")
    thresholds = sensor.get("Thresholds")
    if isinstance(thresholds, dict) and isinstance(threshold := thresholds.get(f"{side}{kind}"), dict):
        value = threshold.get("Reading")
    return _number(value)


def _number(value: object) -> float | None:
    return float(value) if is_number(value) and abs(value) < 1e9 else None


def _read_logs(session: RedfishSession, readings: Readings, owners: Iterable[Resource], marks: Marks | None) -> None:
    read: set[object] = set()
    for owner in owners:
        services = hardware_logs(session.members(session.linked(owner, "LogServices")))
        for service in services:
            if service.get("@odata.id") in read:
                continue
            read.add(service.get("@odata.id"))
            name = label(f"{owner.get('Id', '')}.{service.get('Id', '')}")
            if is_fault_list(service):
                _read_fault_list(session, readings, f"faults.{name}", service)
            else:
                _read_one_log(session, readings, name, service, marks, may_lose=may_lose_entries(service, services))


def _read_fault_list(session: RedfishSession, readings: Readings, part: str, service: Resource) -> None:
    try:
        readings.add("bmc.part.health", (part,), read_fault_list(session, service))
    except BmcError as error:
        readings.add("bmc.part.health", (part,), None, str(error))


def _read_one_log(
    session: RedfishSession,
    readings: Readings,
    name: str,
    service: Resource,
    marks: Marks | None,
    *,
    may_lose: bool,
) -> None:
    scope = readings.scope("bmc.log.entries", name)
    log = Scope.parse(scope).get("log")
    try:
        reading = read_log(session, service, None if marks is None else marks.get(scope), may_lose=may_lose)
    except BmcError as error:
        readings.add("bmc.log.new_entries", (log,), None, str(error))
        return
    if reading is None:
        return
    readings.add("bmc.log.entries", (log,), reading.entries)
    readings.add("bmc.log.newest", (log,), reading.newest)
    readings.add("bmc.log.new_entries", (log,), reading.new_entries)
    for entry in reading.new:
        labels = (log, label(entry.id))
        readings.add("bmc.event.severity", labels, entry.severity, "the BMC reports no severity of the entry")
        readings.add("bmc.event.message", labels, f"{entry.created} {entry.message}".strip())


def _add_text(readings: Readings, name: str, labels: tuple[str, ...], value: object) -> None:
    if isinstance(value, str) and (text := clean_text(value, 100)):
        readings.add(name, labels, text)


def _name(part: Resource) -> str:
    return label(part.get("Name") or part.get("Id") or part.get("MemberId") or "unnamed")


def _list(resource: Resource | None, key: str) -> list[Resource]:
    return list(_dicts((resource or {}).get(key)))


def _dicts(value: object) -> Iterator[Resource]:
    yield from (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))
