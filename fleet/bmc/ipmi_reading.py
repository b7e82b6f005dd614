"""Read one BMC by IPMI 2.0, for BMCs without Redfish: sensors, the event log and the serial, with OpenStack's client."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from pyghmi.exceptions import IpmiException
from pyghmi.ipmi.command import Command

from fleet.bmc.health import CRITICAL, OK, WARNING
from fleet.bmc.log_entries import EMPTY, FULL, MAX_NEW, LogEntry, entries_since
from fleet.bmc.readings import READABLE, Readings
from fleet.bmc.redfish_reading import NO_VALUE, Marks, side_of
from fleet.bmc.target import BmcError, BmcTarget, clean_text, label

PORT = 623
PRIVILEGE_USER = 2
"""Privilege level `User` of the session, which is enough to read sensors and events."""
LOG = "SEL"
"""Name of the only event log that IPMI has (the System Event Log)."""
NO_TIME, UPTIME = 0xFFFFFFFF, 0x20000000
"""NO_TIME: the event has no time. A time below UPTIME counts the seconds since the BMC started (IPMI 2.0, section 37)."""
_ADDRESS = re.compile(r"\[?([^\[\]]+?)\]?(?::(\d{1,5}))?")
_CRITICAL_BITS, _WARNING_BIT = 0b110, 0b001
"""Bits of pyghmi's Health. _CRITICAL_BITS: critical and failed. A sensor beyond its critical limit also has the warning bit."""
_PARTS = {
    "Power Supply": "bmc.power_supply.health",
    "Fan": "bmc.fan.health",
    "Power Unit": "bmc.power_redundancy.health",
}
"""Type of a sensor -> the reading that contains the health of the sensor's part."""
_EMPTY_LOG = "record not present"
ENTRY_BYTES = 16
"""Size of an entry of the log (IPMI 2.0, section 32.1)."""
_SEL_INFO_BYTES = 14
"""Size of the answer to Get SEL Info. Its last byte has the bit _OVERFLOW: events have been dropped for lack of space."""
_OVERFLOW = 0x80


def read_ipmi(target: BmcTarget, marks: Marks | None, deadline: float) -> Readings:
    """Return the readings of a BMC. Arguments and errors are the same as for `read_redfish`.

    The client keeps the session of a BMC until the process ends, so one process can read each BMC only once.
    """
    readings = Readings()
    with _named_errors():
        command = _log_in(target)
        try:
            _read_sensors(readings, command.get_sensor_data(), deadline)
            _read_log(readings, command, marks, deadline)
            _read_serial(readings, command)
        finally:
            with contextlib.suppress(Exception):
                command.ipmi_session.logout()
    readings.add(READABLE, (), True)
    return readings


def _log_in(target: BmcTarget) -> Command:
    match = _ADDRESS.fullmatch(target.address)
    if match is None:
        raise BmcError("rackproof_bmc_address is not an address")
    return Command(
        bmc=match[1],
        port=int(match[2] or PORT),
        userid=target.user,
        password=target.password,
        keepalive=False,
        privlevel=PRIVILEGE_USER,
    )


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BmcError(
            f"not reachable ({error.strerror or error}): check rackproof_bmc_address and the management network"
        ) from None
    except IpmiException as error:
        text = clean_text(error, 120)
        if re.search(r"password|unauthori|username|privilege", text, re.IGNORECASE):
            raise BmcError(f"credentials refused ({text})") from None
        if re.search(r"timeout|timed out|unable to transmit|^None$", text, re.IGNORECASE):
            raise BmcError("no answer by IPMI: check rackproof_bmc_address and the management network") from None
        raise BmcError(f"no valid answer by IPMI ({text})") from None


def _read_sensors(readings: Readings, sensors: Iterable[Any], deadline: float) -> None:
    """Add the readings of all sensors. A sensor that is unavailable is `unsupported` in this reading.

    The sensor of a power supply, fan or power unit is left out if it is unavailable or reports no state: its bay is empty. If
    another sensor is available and reports neither value nor state, none of the conditions that it monitors exists.
    """
    supplies = 0
    for sensor in sensors:
        _check_time(deadline)
        name, health, part = label(sensor.name), _health(sensor.health), _PARTS.get(str(sensor.type))
        side = side_of(name) if sensor.type == "Temperature" else ""
        if part and (sensor.unavailable or (sensor.value is None and not sensor.states)):
            continue
        if sensor.unavailable:
            for reading in ("sensor.alarm", *([f"{side}.temperature"] if side else [])):
                readings.lack(f"bmc.{reading}", (name,), NO_VALUE)
            continue
        states = clean_text(", ".join(map(str, sensor.states)))
        text = f"{health}: {states}" if states and health not in (OK, None) else health
        if part:
            readings.add(part, (name,), text, "the BMC reports no health status for this part")
            supplies += part == "bmc.power_supply.health"
            continue
        value = f"{sensor.value:g} {sensor.units}: " if isinstance(sensor.value, int | float) else ""
        alarm = "none" if health in (OK, WARNING) else clean_text(f"{value}{states or health}")
        readings.add("bmc.sensor.alarm", (name,), alarm if health else None, "the BMC reports no health of this sensor")
        if side and isinstance(sensor.value, int | float):
            readings.add(f"bmc.{side}.temperature", (name,), float(sensor.value))
    readings.add("bmc.power_supply.fitted", (), supplies)


def _health(bits: object) -> str | None:
    """Return the health of a sensor or event, from pyghmi's bits; None if `bits` is not a number or has unknown bits."""
    if not isinstance(bits, int) or bits & ~(_CRITICAL_BITS | _WARNING_BIT):
        return None
    return CRITICAL if bits & _CRITICAL_BITS else WARNING if bits else OK


def _read_log(readings: Readings, command: Command, marks: Marks | None, deadline: float) -> None:
    """Add the number of entries in the log, and the new entries whose severity is not OK.

    IPMI lists the oldest entry first. `marks` identifies the last entry of the previous reading: the entries after it are new.
    Without a mark, as in the first reading, no entry is new.
    """
    entries: list[LogEntry] = []
    try:
        for event in command.get_event_log():
            _check_time(deadline)
            entries.append(_entry(event))
    except IpmiException as error:
        if _EMPTY_LOG not in str(error):
            raise
    mark = None if marks is None else marks.get(f"log={LOG}")
    try:
        new = entries_since(reversed(entries), mark) if mark is not None else []
        kept = [entry for entry in new if entry.severity != OK]
        if entries and not kept and _has_dropped_entries(command):
            raise BmcError(FULL)
    except BmcError as error:
        readings.add("bmc.log.new_entries", (LOG,), None, str(error))
        return
    readings.add("bmc.log.entries", (LOG,), len(entries))
    readings.add("bmc.log.newest", (LOG,), entries[-1].mark if entries else EMPTY)
    readings.add("bmc.log.new_entries", (LOG,), min(len(kept), MAX_NEW + 1))
    for entry in kept[:MAX_NEW]:
        labels = (LOG, label(entry.id))
        readings.add("bmc.event.severity", labels, entry.severity, "the BMC reports no severity of the entry")
        readings.add("bmc.event.message", labels, f"{entry.created} {entry.message}".strip())


def _has_dropped_entries(command: Command) -> bool:
    """Return whether the log is full and has dropped entries (IPMI 2.0, section 31.2, Get SEL Info).

    A full log that overwrites its oldest entries has no free space either, but has dropped none.
    """
    try:
        data = bytes(command.xraw_command(netfn=0x0A, command=0x40)["data"])
    except IpmiException:
        return False  # the BMC does not report the free space of its log
    is_full = len(data) >= 5 and int.from_bytes(data[3:5], "little") < ENTRY_BYTES
    return is_full and (len(data) < _SEL_INFO_BYTES or bool(data[_SEL_INFO_BYTES - 1] & _OVERFLOW))


def _entry(event: Mapping[str, Any]) -> LogEntry:
    texts = [str(event.get(key) or "") for key in ("component_type", "component", "event")]
    return LogEntry(
        id=clean_text(event.get("record_id", ""), 60),
        created=_time_of(event.get("timecode")),
        severity=OK if event.get("deassertion") else _health(event.get("severity")),
        message=clean_text(" ".join(filter(None, texts)) or "no text"),
    )


def _time_of(seconds: object) -> str:
    """Return the time of an event by the clock of the BMC; empty if the event has none.

    If the clock was not set, return the seconds since the BMC started. The `timestamp` that the client computes is not used: the
    client computes it from the current time, so it can differ by a second between two readings of one event.
    """
    if not isinstance(seconds, int) or not 0 <= seconds < NO_TIME:
        return ""
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}" if seconds >= UPTIME else f"uptime {seconds} s"


def _read_serial(readings: Readings, command: Command) -> None:
    try:
        system = next((fields for name, fields in command.get_inventory() if name == "System" and fields), None)
    except IpmiException:
        system = None  # the BMC has no FRU data; its serials are then not compared
    for name, key in (("system", "Serial Number"), ("chassis", "Chassis serial number")):
        value = (system or {}).get(key)
        if isinstance(value, str) and (text := clean_text(value, 100)):
            readings.add(f"bmc.{name}.serial", ("FRU",), text)


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise BmcError("not read in time")
