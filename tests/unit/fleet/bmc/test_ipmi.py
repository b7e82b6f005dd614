"""Test reading BMCs by IPMI.

The data come from OpenIPMI's simulator, or are sensors, log entries and exceptions like those of the IPMI client pyghmi.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyghmi.exceptions import IpmiException

from fleet.bmc import ipmi_reading
from fleet.bmc.ipmi_reading import _entry
from fleet.bmc.readings import NAMES, Readings
from fleet.bmc.target import BmcError
from schemas.records import Metric
from tests import ROOT
from tests.fakes import ipmi
from tests.fakes.bmc import PASSWORD, USER
from tests.unit.fleet.bmc.test_bmc_verb import run  # noqa: F401 - a fixture


def read_bmc(directory: Path, port: int, stage: str, phase: str, password: str = PASSWORD[:16]) -> str:
    """Run `rackproof bmc` in a process of its own; return its standard output followed by its standard error.

    The simulator accepts the first 16 characters of PASSWORD.
    """
    account = {"address": f"127.0.0.1:{port}", "protocol": "ipmi", "user": USER, "password": password}
    text = json.dumps({"h1": {f"rackproof_bmc_{name}": value for name, value in account.items()}})
    command = [sys.executable, ROOT / "rackproof", "bmc", directory, "--stage", stage, "--phase", phase]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def metrics_of(directory: Path, number: int) -> dict[str, Any]:
    """Return the metrics of the BMC of h1, by name. `number` is the index of their snapshot in the record."""
    record = json.loads((directory / "bmcs" / "h1.json").read_text())
    return {metric["name"]: metric for metric in record["snapshots"][number]["metrics"]}


def test_sensors_and_new_events_are_read_by_ipmi(tmp_path: Path, run: Path) -> None:  # noqa: F811
    with ipmi.simulator(tmp_path) as simulator:
        output = read_bmc(run, simulator.port, "preflight", "before")
        simulator.command(ipmi.AC_LOST)
        output += read_bmc(run, simulator.port, "benchmark", "after")
    assert output == "1 of 1 BMCs read\n" * 2
    before, after = metrics_of(run, 0), metrics_of(run, 1)
    assert set(before) == set(NAMES)
    assert before["bmc.power_supply.health"]["values"] == {
        "psu=PS1_Status": "OK", "psu=PS2_Status": "Critical: Present, Power input lost",
    }  # fmt: skip
    assert before["bmc.power_supply.fitted"]["values"] == {"host": 2}
    assert before["bmc.inlet.temperature"]["values"] == {"sensor=Inlet_Temp": 24.0}
    assert before["bmc.sensor.alarm"]["values"] == {"sensor=Inlet_Temp": "none"}
    assert before["bmc.log.new_entries"]["values"] == {"log=SEL": 0}, (
        "entries from before the run must not count as new"
    )
    assert after["bmc.event.severity"]["values"] == {"log=SEL,entry=2": "Critical"}
    assert "PS2 Status Power input lost" in after["bmc.event.message"]["values"]["log=SEL,entry=2"]
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert USER.encode() not in written + output.encode()
    assert PASSWORD[:16].encode() not in written + output.encode()


def test_wrong_password_is_refused(tmp_path: Path, run: Path) -> None:  # noqa: F811
    with ipmi.simulator(tmp_path) as simulator:
        output = read_bmc(run, simulator.port, "preflight", "before", "wrong")
    assert "BMC of h1: credentials refused (Incorrect password provided)" in output
    assert list(metrics_of(run, 0)) == ["bmc.readable"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timeout", "no answer by IPMI"), (None, "no answer by IPMI"), ("Invalid data field", "no valid answer by IPMI"),
        ("Unable to transmit to specified address", "no answer by IPMI"),
    ],
)  # fmt: skip
def test_exception_of_pyghmi_becomes_an_error_that_names_the_cause(text: str | None, expected: str) -> None:
    with pytest.raises(BmcError, match=expected), ipmi_reading._named_errors():
        raise IpmiException(text)


def test_bmc_without_a_route_is_not_reachable() -> None:
    with pytest.raises(BmcError, match=r"not reachable \(No route to host\)"), ipmi_reading._named_errors():
        raise OSError(errno.EHOSTUNREACH, "No route to host")


@pytest.mark.parametrize(
    ("bits", "alarm"),
    [(0, "none"), (1, "none"), (2, "91 °C: hot"), (3, "91 °C: hot"), (7, "91 °C: hot"), (None, None), (8, None)],
)
def test_sensor_beyond_its_critical_limit_has_an_alarm_and_unknown_health_gives_no_value(
    bits: int | None, alarm: str | None
) -> None:
    """`bits` is the health of a sensor, as pyghmi returns it; None: not reported.

    For each exceeded limit, pyghmi sets a bit: 1 (warning), 2 (critical) or 4 (non-recoverable). It does not define 8.
    """
    readings = Readings()
    sensor = {"unavailable": False, "value": 91.0, "units": "°C", "states": ["hot"], "type": "Temperature"}
    ipmi_reading._read_sensors(readings, [SimpleNamespace(name="CPU1", health=bits, **sensor)], float("inf"))
    metric = next(item for item in readings.metrics() if item.name == "bmc.sensor.alarm")
    assert dict(metric.values) == ({"sensor=CPU1": alarm} if alarm else {})
    assert set(metric.absent) == (set() if alarm else {"sensor=CPU1"})


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("Temperature", "GPU3 Temp", {"bmc.sensor.alarm": "sensor=GPU3_Temp"}),
        ("Temperature", "Inlet", {"bmc.sensor.alarm": "sensor=Inlet", "bmc.inlet.temperature": "sensor=Inlet"}),
        ("Physical Security", "Intrusion", {"bmc.sensor.alarm": "sensor=Intrusion"}),
        ("Power Supply", "PSU3", {}),
        ("Fan", "FAN3", {}),
    ],
)
def test_unavailable_sensor_is_unsupported_unless_it_belongs_to_a_bay_which_is_then_empty(
    kind: str, name: str, expected: dict[str, str]
) -> None:
    """Otherwise a sensor that is available at only one of two moments makes the record contradict itself."""
    metrics = read_without_value(kind, name, unavailable=1)
    reason = "unsupported: the BMC currently reports no value for this sensor"
    absent = {item.name: dict(item.absent) for item in metrics if reason in item.absent.values()}
    assert absent == {name: {scope: reason} for name, scope in expected.items()}


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("Physical Security", "Intrusion", {"bmc.sensor.alarm": {"sensor=Intrusion": "none"}}),
        ("Critical Interrupt", "PCIe Errors", {"bmc.sensor.alarm": {"sensor=PCIe_Errors": "none"}}),
        ("Power Supply", "PSU3", {}),
        ("Fan", "FAN3", {}),
    ],
)
def test_available_sensor_without_states_has_no_alarm_unless_it_belongs_to_a_bay_which_is_then_empty(
    kind: str, name: str, expected: dict[str, dict[str, str]]
) -> None:
    metrics = read_without_value(kind, name, unavailable=0)
    assert {
        item.name: dict(item.values) for item in metrics if item.name != "bmc.power_supply.fitted" and item.values
    } == expected


def read_without_value(kind: str, name: str, *, unavailable: int) -> tuple[Metric, ...]:
    """Return the readings of a BMC that has one sensor, which reports neither a value nor a state."""
    readings = Readings()
    sensor = SimpleNamespace(name=name, type=kind, health=0, states=[], unavailable=unavailable, value=None, units="")
    ipmi_reading._read_sensors(readings, [sensor], float("inf"))
    return readings.metrics()


@pytest.mark.parametrize(
    ("kind", "name", "scope"),
    [
        ("Power Supply", "power_supply.health", "psu=X1"),
        ("Fan", "fan.health", "fan=X1"),
        ("Power Unit", "power_redundancy.health", "redundancy=X1"),
    ],
)
@pytest.mark.parametrize(("bits", "health"), [(0, "OK"), (2, "Critical: lost"), (8, None), (None, None)])
def test_unknown_health_of_a_part_gives_no_value(
    kind: str, name: str, scope: str, bits: int | None, health: str | None
) -> None:
    readings = Readings()
    sensor = SimpleNamespace(
        name="X1", type=kind, health=bits, states=["lost"], unavailable=False, value=None, units=""
    )
    ipmi_reading._read_sensors(readings, [sensor], float("inf"))
    metric = next(item for item in readings.metrics() if item.name == f"bmc.{name}")
    assert metric.values == ({scope: health} if health else {})
    assert set(metric.absent) == (set() if health else {scope})


def event(number: int, **changed: Any) -> dict[str, Any]:
    """Return entry `number` of an event log, as pyghmi returns it."""
    fields = {
        "record_id": number,
        "timestamp": "2026-11-03T04:05:06",
        "component": "CPU1",
        "event": "hot",
        "severity": 1,
    }
    return fields | {"component_type": "Temperature"} | changed


def read_log(events: list[dict[str, Any]], mark: str, space: int = 0xFFFF, overflow: bool | None = False) -> Readings:
    """Read a log with these events.

    `mark`: ID and time of the newest entry at the previous reading, or the text `none` if the log was empty then.
    `space`: the free space of the log in bytes. `overflow`: whether it has dropped events; None if it does not tell.
    """
    readings = Readings()
    flags = b"" if overflow is None else bytes([0x80 * overflow | 0x02])
    information = b"\x51\0\0" + space.to_bytes(2, "little") + 8 * b"\0" + flags
    command: Any = SimpleNamespace(
        get_event_log=lambda: iter(events), xraw_command=lambda netfn, command: {"data": bytearray(information)}
    )
    ipmi_reading._read_log(readings, command, {"log=SEL": mark}, float("inf"))
    return readings


def test_new_entries_of_a_long_log_and_of_a_cleared_log_are_counted() -> None:
    events = [event(number) for number in range(1, 1001)]
    metrics = {item.name: item for item in read_log(events, "none").metrics()}
    assert metrics["bmc.log.new_entries"].values == {"log=SEL": 201}  # 201 means: more than 200 (MAX_NEW)
    assert len(metrics["bmc.event.severity"].values) == 200
    # The log was cleared since the previous reading: it does not have the entry 977 any more.
    metrics = {item.name: item for item in read_log(events[:2], "977 2026-11-01T00:00:00").metrics()}
    assert metrics["bmc.log.new_entries"].values == {"log=SEL": 2}
    assert metrics["bmc.log.entries"].values == {"log=SEL": 2}


@pytest.mark.parametrize(
    ("numbers", "space", "overflow", "expected"),
    [
        (range(1, 5), 16, True, ""),
        (range(4, 6), 16, False, "the log has no entry from before"),
        ((), 16, False, "the log has no entry from before"),
        (range(1, 5), 15, True, "the log is full"),
        (range(1, 5), 0, True, "the log is full"),
        (range(1, 5), 0, None, "the log is full"),
        (
            range(1, 5),
            0,
            False,
            "",
        ),  # it has dropped nothing: it has just become full, or overwrites its oldest entries
    ],
)
def test_log_that_may_have_lost_entries_is_an_error(
    numbers: Iterable[int], space: int, overflow: bool | None, expected: str
) -> None:
    """The newest entry of the previous reading has the number 3."""
    events = [event(number, severity=0, timecode=1_780_000_000 + number) for number in numbers]
    mark = _entry(event(3, timecode=1_780_000_003)).mark
    metrics = {item.name: item for item in read_log(events, mark, space, overflow).metrics()}
    assert metrics["bmc.log.new_entries"].absent.get("log=SEL", "").startswith(f"error: {expected}" if expected else "")
    assert metrics["bmc.log.new_entries"].values == ({} if expected else {"log=SEL": 0})


def test_log_that_a_fault_has_filled_reports_the_fault() -> None:
    events = [event(1, severity=0), *(event(number, severity=2) for number in (2, 3))]
    readings = read_log(events, _entry(events[0]).mark, space=0, overflow=True)
    metrics = {item.name: item for item in readings.metrics()}
    assert metrics["bmc.log.new_entries"].values == {"log=SEL": 2}
    assert len(metrics["bmc.event.severity"].values) == 2


def test_events_of_severity_ok_neither_count_nor_hide_an_older_error() -> None:
    events = [event(1, severity=2), *(event(number, severity=0) for number in range(2, 1000))]
    metrics = {item.name: item for item in read_log(events, "none").metrics()}
    assert metrics["bmc.log.new_entries"].values == {"log=SEL": 1}
    assert metrics["bmc.event.severity"].values == {"log=SEL,entry=1": "Critical"}


def test_event_that_ends_a_condition_is_ok_and_an_unknown_severity_is_an_error() -> None:
    events = [event(1, deassertion=True, severity=2), event(2, severity=None, component="\x1b[2J", event=None)]
    metrics = {item.name: item for item in read_log(events, "none").metrics()}
    assert metrics["bmc.event.severity"].values == {}
    assert set(metrics["bmc.event.severity"].absent) == {"log=SEL,entry=2"}
    assert all(str(text).isprintable() for text in metrics["bmc.event.message"].values.values())


@pytest.mark.parametrize("timecode", [1_780_000_000, 75, 0xFFFFFFFF, None])
def test_event_has_the_same_mark_when_it_is_read_again(timecode: int | None) -> None:
    """The mark (ID and time) must not use `timestamp`, which can differ by a second between two readings of one event."""
    event = {"record_id": 7, "timecode": timecode, "component": "Fan 1", "event": "Low", "severity": 2}
    marks = {_entry({**event, "timestamp": f"2026-11-03T04:05:0{second}"}).mark for second in (6, 7)}
    assert len(marks) == 1
