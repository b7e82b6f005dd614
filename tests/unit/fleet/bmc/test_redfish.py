"""Test reading BMCs by Redfish: resources in the forms of several vendors, and services that fail or answer wrongly.

In the old schema, a chassis has the resources `Power` and `Thermal`; in the new schema, it has `PowerSubsystem`,
`ThermalSubsystem` and `Sensors`. The mark of an event log is ID and time of its newest entry at the previous reading.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from fleet.bmc import client
from fleet.bmc.client import certificate_remedy
from fleet.bmc.event_log import is_event_log
from fleet.bmc.read_fleet import read_all
from fleet.bmc.readings import NAMES, Readings
from fleet.bmc.redfish_reading import Marks, _read_sensor
from fleet.bmc.target import BmcTarget, clean_text, label
from schemas.records import Metric
from tests.fakes import bmc
from tests.fakes.bmc import SEL, V1, Resources, Service

LOG = "log=1.SEL"
"""Scope of the event log `SEL` of system `1`."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bmc.make_certificate(tmp_path_factory.mktemp("tls"))


@contextmanager
def service(
    certificate: Path, resources: Resources | None = None, answer: bmc.Answer | None = None
) -> Iterator[Service]:
    """Run the Redfish service of a BMC with these resources; for each request, `answer` is called first."""
    with bmc.serve(Service(resources or bmc.old_schema(), answer), certificate) as served:
        yield served


def read(target: BmcTarget, marks: Marks | None = None, deadline_s: float = 20.0) -> dict[str, Metric]:
    """Read one BMC; return name -> metric. `marks`: scope of an event log -> its mark; None for the first reading of the BMC."""
    ((_, metrics, _),) = read_all([(target, marks)], deadline_s=deadline_s)
    return {metric.name: metric for metric in metrics}


def values(metrics: dict[str, Metric], name: str) -> dict[str, Any]:
    """Return scope -> value of the metric `bmc.NAME`."""
    return dict(metrics[f"bmc.{name}"].values)


def reason(metrics: dict[str, Metric]) -> str:
    """Return why the BMC could not be read. `bmc.readable` must then be the only metric."""
    assert [*metrics] == ["bmc.readable"]
    (text,) = metrics["bmc.readable"].absent.values()
    return text


def test_old_schema_is_read_in_full(certificate: Path) -> None:
    with service(certificate) as served:
        metrics = read(served.target(certificate))
        assert served.sessions == set(), "the session must be closed, because a BMC allows only a few sessions"
    assert set(metrics) == set(NAMES)
    assert values(metrics, "readable") == {"host": True}
    assert values(metrics, "power_supply.health") == {f"psu=Power_Supply_Bay_{number}": "OK" for number in (1, 2, 3)}
    assert values(metrics, "power_supply.fitted") == {"host": 3}
    assert values(metrics, "power_redundancy.health") == {"redundancy=PS_Redundancy": "OK"}
    assert values(metrics, "fan.health") == {"fan=FAN9": "OK", "fan=FAN10": "OK"}
    assert values(metrics, "sensor.alarm") == {f"sensor={name}": "none" for name in ("CPU1_Temp", "System_Temp", "12V")}
    assert values(metrics, "inlet.temperature") == {"sensor=System_Temp": 24.0}
    assert values(metrics, "system.serial") == {"system=1": "S123456X"}
    assert values(metrics, "gpu.serial") == dict(
        zip(("processor=GPU1", "processor=GPU2"), bmc.GPU_SERIALS, strict=True)
    )
    assert values(metrics, "firmware.version") == {"component=BMC": "01.03.17"}
    assert values(metrics, "log.entries") == {LOG: 1}
    assert values(metrics, "log.new_entries") == {LOG: 0}
    assert metrics["bmc.leak_detector.health"].absent == {"host": "unsupported: the BMC reports none"}


def test_new_schema_is_read_in_full(certificate: Path) -> None:
    """These are the resources of a tray without power supplies. Its `HealthRollup` is `Critical`, but its `Health` is OK."""
    with service(certificate, bmc.new_schema()) as served:
        metrics = read(served.target(certificate))
    assert values(metrics, "power_supply.fitted") == {"host": 0}
    assert values(metrics, "leak_detector.health") == {"detector=ColdPlate": "OK"}
    assert values(metrics, "sensor.alarm") == {"sensor=TEMP_0": "none"}
    assert values(metrics, "part.health") == {
        "part=system.System_0": "OK", "part=chassis.Chassis_0": "OK", "part=chassis.HGX_GPU_0": "OK",
    }  # fmt: skip
    assert values(metrics, "gpu.serial") == {"processor=HGX_GPU_0": bmc.GPU_SERIALS[0]}


Change = Callable[[Resources], object]
POWER, THERMAL = f"{V1}/Chassis/1/Power", f"{V1}/Chassis/1/Thermal"
DETECTOR = f"{V1}/Chassis/Chassis_0/ThermalSubsystem/LeakDetection/LeakDetectors/ColdPlate"
CONDITION = {"Conditions": [{"Message": "CPU_0 Firmware: EC_STRAP_MISMATCH"}, "garbage", {"Message": None}]}


def supply(number: int, **changed: Any) -> Change:
    """Return a change of properties of the power supply at position `number`, counted from 0."""
    return lambda resources: resources[POWER]["PowerSupplies"][number].update(changed)


def fan(**changed: Any) -> Change:
    """Return a change of properties of the first fan, FAN9."""
    return lambda resources: resources[THERMAL]["Fans"][0].update(changed)


PSU, SYSTEM = "psu=Power_Supply_Bay_2", "part=system.1"
LOSS, NO_LINE = "has the status LossOfInput", {"LineInputStatus": "LossOfInput"}
NO_INPUT = {"Status": bmc.CRITICAL, "LineInputVoltage": 0, "PowerOutputWatts": 0}
OFFLINE, UNUSABLE = {"State": "UnavailableOffline"}, "it is present, but cannot be used (UnavailableOffline)"
"""OFFLINE: state of a power supply whose cord is unplugged (mrlhansen/idrac_exporter issue 105, ibm-openbmc/bmcweb pull request
262). UNUSABLE: how the reading describes this state."""
WARNING = {"State": "Enabled", "Health": "Non-Critical"}
HOSTILE_NAME = "\x1b[31mFan/../9\n"


def hot(resources: Resources) -> None:
    resources[THERMAL]["Temperatures"][0]["ReadingCelsius"] = 101


def low_voltage(resources: Resources) -> None:
    resources[POWER]["Voltages"][0]["ReadingVolts"] = 9.5


def strap_mismatch(resources: Resources) -> None:
    resources[f"{V1}/Systems/1"]["Status"] = bmc.CRITICAL | CONDITION


@pytest.mark.parametrize(
    ("change", "name", "scope", "expected"),
    [
        (supply(1, **NO_INPUT), "power_supply.health", PSU, "Critical: it has no input (0 V)"),
        (supply(1, **NO_LINE), "power_supply.health", PSU, f"Critical: its line input {LOSS}"),
        (supply(1, Status="Failed"), "power_supply.health", PSU, "Critical"),
        (supply(1, Status=True), "power_supply.health", PSU, "OK"),
        (supply(1, Status=False), "power_supply.health", PSU, "Critical"),
        (supply(1, Status=WARNING), "power_supply.health", PSU, "Warning"),
        (supply(1, Status=bmc.CRITICAL | {"State": "Disabled"}), "power_supply.fitted", "host", 2),
        (supply(1, Status=bmc.CRITICAL | bmc.ABSENT), "power_supply.fitted", "host", 2),
        (supply(1, Status=bmc.CRITICAL | OFFLINE), "power_supply.health", PSU, f"Critical: {UNUSABLE}"),
        (supply(1, Status=bmc.CRITICAL | OFFLINE), "power_supply.fitted", "host", 3),
        (supply(1, Status=OFFLINE, **NO_LINE), "power_supply.health", PSU, f"Critical: its line input {LOSS}"),
        # A spare is not counted. It has the state OFFLINE, but neither bad health nor a lost input.
        (supply(1, Status=OFFLINE), "power_supply.fitted", "host", 2),
        (fan(Status=bmc.CRITICAL | OFFLINE), "fan.health", "fan=FAN9", f"Critical: {UNUSABLE}"),
        (fan(Reading=0), "fan.health", "fan=FAN9", "Critical: its speed 0 is below its critical limit 420"),
        (fan(Status=bmc.CRITICAL, Name=HOSTILE_NAME), "fan.health", "fan=31mFan_.._9", "Critical"),
        (hot, "sensor.alarm", "sensor=CPU1_Temp", "101, above its critical limit 99"),
        (low_voltage, "sensor.alarm", "sensor=12V", "9.5, below its critical limit 10.8"),
        (strap_mismatch, "part.health", SYSTEM, "Critical: CPU_0 Firmware: EC_STRAP_MISMATCH"),
    ],
)  # fmt: skip
def test_change_of_a_part_gives_the_expected_reading(
    certificate: Path, change: Change, name: str, scope: str, expected: Any
) -> None:
    resources = bmc.old_schema()
    change(resources)
    with service(certificate, resources) as served:
        assert values(read(served.target(certificate)), name)[scope] == expected


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        ("HGX_FW_BMC_0", "component=HGX_FW_BMC_0"),
        ("Installed-159-2.10.2__BIOS.Setup.1-1", "component=Installed-159_BIOS.Setup.1-1"),
        *((spare, "") for spare in ("Previous-159-2.10.2__BIOS.Setup.1-1", "Available-159-2.10.2__BIOS.Setup.1-1",
                                    "Backup_BMC", "Staged_BIOS", "bmc_standby", "HGX_FW_ERoT_Rollback", "Golden_BIOS")),
    ],
)  # fmt: skip
def test_version_is_read_only_of_firmware_that_runs(certificate: Path, component: str, expected: str) -> None:
    """Images that are stored but do not run have no reading: earlier versions, updates not yet installed, backups.

    `expected`: scope of the reading, without the version that Dell includes in the ID; empty: no reading.
    """
    resources = bmc.old_schema()
    resources[f"{V1}/UpdateService/FirmwareInventory/BMC"] |= {"Id": component, "Version": "2.10.2"}
    with service(certificate, resources) as served:
        metrics = read(served.target(certificate))
    assert values(metrics, "firmware.version") == ({expected: "2.10.2"} if expected else {})


@pytest.mark.parametrize(
    ("item", "component"),
    [
        ({"Id": "Staging_BIOS"}, ""),
        ({"Id": "3", "Name": "Redundant System ROM", "Description": "SystemRomBackup"}, ""),
        ({"Id": "2", "Name": "System ROM", "Description": "SystemRomActive", "Oem": {"Hpe": {"DeviceContext": "System Board"}}},
         "System_ROM_System_Board"),
        ({"Id": "17", "Name": "ConnectX-6 100GE 1P NIC", "Oem": {"Hpe": {"DeviceContext": "PCI-E Slot 1"}}},
         "ConnectX-6_100GE_1P_NIC_PCI-E_Slot_1"),
        ({"Id": "18", "Name": "TPM Firmware", "Oem": None}, "TPM_Firmware"),
        ({"Id": "BIOS", "Version": None}, ""),
        ({"Id": "19"}, "19"),
        ({"Id": "12", "Name": "NVMe Drive", "Oem": {"Hpe": {"DeviceContext": "Box 2 Bay 1"}}}, ""),
        ({"Id": "NVMeSSDA11"}, ""),
        ({"Id": "Disk1"}, ""),
        ({"Id": "Installed-0-2.10.2__Disk.Bay.1:Enclosure.Internal.0-1"}, ""),
        ({"Id": "Installed-18981-2.10.2__DriverPack.Embedded.1"}, "Installed-18981_DriverPack.Embedded.1"),
    ],
)  # fmt: skip
def test_firmware_gets_a_component_name_unless_it_is_spare_or_of_a_drive(
    certificate: Path, item: dict[str, Any], component: str
) -> None:
    """`component`: name of the component in the reading; empty: no reading."""
    resources = bmc.old_schema()
    resources[f"{V1}/UpdateService/FirmwareInventory/BMC"] = {"Version": "2.10.2", "Status": bmc.OK, **item}
    with service(certificate, resources) as served:
        metrics = read(served.target(certificate))
    assert values(metrics, "firmware.version") == ({f"component={component}": "2.10.2"} if component else {})


SOURCE_A, SOURCE_B = {"Model": "PWS-3K06G-2R"}, {"Model": "PWS-DF009-2F", "PartNumber": "PWS-DF009-2F"}
NIC = {"Manufacturer": "MLNX", "Model": "BlueField-2 DPU", "PartNumber": "MBF2H536C-CECOT"}
GPU = {"Manufacturer": "NVIDIA", "Model": "H100 80GB HBM3", "PartNumber": "2330-885-A1", "SKU": "0x37040020"}
CPLD = {"Manufacturer": "Lattice", "Model": "BP", "PartNumber": "999-0099-000"}
BOARD = {"Manufacturer": "NVIDIA", "Model": "GB200 NVL", "PartNumber": "699-24764-0001-TS3"}
RETIMER = {"Model": None, "PartNumber": None, "SKU": "0x0001FA1D"}
DELL = {"Manufacturer": "Dell Inc.", "Model": "PowerEdge XE9680", "PartNumber": "0MV2N1A05", "SKU": "SERVICETAG"}


def related(path: str) -> dict[str, Any]:
    return {"RelatedItem": ["garbage", {"@odata.id": 7}, {"@odata.id": f"{V1}{path}"}]}


@pytest.mark.parametrize(
    ("item", "part"),
    [
        # Supermicro, Lenovo, Dell, HPE and DGX number the power supplies.
        ({"Id": "PowerSupply1", **related("/Chassis/1/Power")}, "PWS-3K06G-2R"),
        ({"Id": "PowerSupply2", **related("/Chassis/1/Power")}, "PWS-DF009-2F"),
        ({"Id": "PSU2", **related("/Chassis/1/Power#/PowerSupplies/1")}, "PWS-DF009-2F"),
        ({"Id": "Installed-108076-2.10.2__PSU.Slot.2"}, "PWS-DF009-2F"),
        ({"Id": "6", "Name": "Power Supply Firmware", "Oem": {"Hpe": {"DeviceContext": "Bay 2"}}}, "PWS-DF009-2F"),
        ({"Id": "PSU_9"}, ""),
        ({"Id": "Slot_15.1", **related("/Chassis/1/PCIeDevices/slot_15")}, "MLNX BlueField-2 DPU MBF2H536C-CECOT"),
        ({"Id": "GPU1", **related("/Systems/1/Processors/GPU1")}, "NVIDIA H100 80GB HBM3 2330-885-A1"),
        # The name of the firmware is that of a chassis or processor.
        ({"Id": "HGX_FW_GPU_SXM_1"}, "NVIDIA H100 80GB HBM3 2330-885-A1"),
        ({"Id": "HGX_InfoROM_GPU_SXM_1"}, "NVIDIA H100 80GB HBM3 2330-885-A1"),
        ({"Id": "HGX_FW_GPU1"}, "NVIDIA H100 80GB HBM3 2330-885-A1"),
        ({"Id": "FW_CPLD_0"}, "Lattice BP 999-0099-000"),
        ({"Id": "HGX_FW_PCIeRetimer_0"}, "0x0001FA1D"),
        # On Dell, the SKU of the chassis is its serial.
        ({"Id": "Installed-27763-2.10.2__CPLD.Embedded.1", **related("/Chassis/Dell")}, "Dell Inc. PowerEdge XE9680 0MV2N1A05"),
        # This firmware must be the same on all boards, so the model of the board is not read.
        ({"Id": "HGX_FW_BMC_0", **related("/Chassis/HGX_BMC_0")}, ""),
        ({"Id": "BIOS", **related("/Systems/1/Bios")}, ""),
        # The part cannot be read, or is not known.
        ({"Id": "Slot_16.1", **related("/Chassis/1/PCIeDevices/slot_16")}, ""),
        ({"Id": "Slot_17.1", **related("/Chassis/1/PCIeDevices/slot_17")}, ""),
        ({"Id": "CPLD_Motherboard"}, ""),
        ({"Id": "Switchboard_1_CPLD_1", **related("/UpdateService/FirmwareInventory/Switchboard_1_CPLD_1")}, ""),
        ({"Id": "NIC1", "RelatedItem": "garbage"}, ""),
    ],
)  # fmt: skip
def test_model_of_the_part_is_read_with_its_firmware(certificate: Path, item: dict[str, Any], part: str) -> None:
    """Names and models are those of real servers (mock-ups in github.com/NVIDIA/libredfish). `part`: empty if none is read."""
    resources = bmc.old_schema()
    for supply, model in zip(resources[POWER]["PowerSupplies"], (SOURCE_A, SOURCE_B, SOURCE_A, SOURCE_A), strict=True):
        supply |= model
    resources[f"{V1}/Systems/1/Processors/GPU1"] |= GPU
    resources[f"{V1}/Chassis/1/PCIeDevices/slot_15"] = {"Id": "slot_15", **NIC}
    chassis = {
        "HGX_GPU_SXM_1": GPU, "CPLD_0": CPLD, "HGX_BMC_0": BOARD, "HGX_PCIeRetimer_0": RETIMER, "Dell": DELL,
    }  # fmt: skip
    for name, model in chassis.items():
        path = f"{V1}/Chassis/{name}"
        resources[path] = {"@odata.id": path, "Id": name, "Status": bmc.OK, **model}
        resources[f"{V1}/Chassis"]["Members"].append({"@odata.id": path})
    resources[f"{V1}/UpdateService/FirmwareInventory/BMC"] = {"Version": "2.10.2", "Status": bmc.OK, **item}
    failing = only_at(f"{V1}/Chassis/1/PCIeDevices/slot_17", status(500))
    with service(certificate, resources, failing) as served:
        metrics = read(served.target(certificate))
    (component,) = values(metrics, "firmware.version")
    assert values(metrics, "firmware.part") == ({component: part} if part else {})
    assert [*metrics["bmc.firmware.part"].absent] == ([] if part else [component])


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"Storage": "Critical"}, "Critical: Storage"),
        ({"Storage": "Critical", "Memory": "Warning", "Network": "Unknown"}, "Critical: Memory, Storage"),
        ({"Storage": "Critical", "PowerSupplies": "Critical"}, "Critical"),  # the power supply has a reading of its own
        ({}, "Critical"),
        ("garbage", "Critical"),
    ],
)
def test_health_of_a_system_of_hpe_names_the_subsystem(certificate: Path, bad: Any, expected: str) -> None:
    """The form is that of an iLO 5 (mock-up in github.com/NVIDIA/libredfish), which reports no conditions."""
    aggregate = {name: {"Status": {"Health": value}} for name, value in bad.items()} if isinstance(bad, dict) else bad
    resources = bmc.old_schema()
    resources[f"{V1}/Systems/1"] |= {
        "Status": bmc.CRITICAL,
        "Oem": {"Hpe": {"AggregateHealthStatus": aggregate, "PostState": "FinishedPost"}},
    }
    with service(certificate, resources) as served:
        assert values(read(served.target(certificate)), "part.health")["part=system.1"] == expected


def test_leak_is_critical_although_the_detector_has_the_state_degraded(certificate: Path) -> None:
    resources = bmc.new_schema()
    resources[DETECTOR] |= {"DetectorState": "Critical", "Status": {"State": "Degraded", "Health": "Critical"}}
    with service(certificate, resources) as served:
        health = values(read(served.target(certificate)), "leak_detector.health")
    assert health == {"detector=ColdPlate": "Critical: it reports a leak"}


def test_power_supply_without_status_is_an_error_and_not_a_pass(certificate: Path) -> None:
    resources = bmc.old_schema()
    del resources[POWER]["PowerSupplies"][0]["Status"]
    with service(certificate, resources) as served:
        metric = read(served.target(certificate))["bmc.power_supply.health"]
    assert metric.absent == {"psu=Power_Supply_Bay_1": "error: the BMC reports no health status for this part"}


@pytest.mark.parametrize("status", ["Predictive failure", {"State": "Enabled", "Health": "Unknown to us"}])
def test_unknown_health_of_all_power_supplies_is_an_error(certificate: Path, status: object) -> None:
    resources = bmc.old_schema()
    for supply in resources[POWER]["PowerSupplies"]:
        supply["Status"] = status
    with service(certificate, resources) as served:
        metric = read(served.target(certificate))["bmc.power_supply.health"]
    assert not metric.values
    assert {*metric.absent.values()} == {"error: the BMC reports no health status for this part"}


def test_health_of_power_supplies_is_unsupported_if_the_bmc_reports_it_for_none(certificate: Path) -> None:
    """BMCs of ASUS, Gigabyte and Cisco do not report this health (bb-Ricardo/check_redfish issues 154, 53, 12).

    If one supply reports the loss of its input, it is critical, and the missing health of the other supplies is an error.
    """
    resources = bmc.old_schema()
    supplies = resources[POWER]["PowerSupplies"]
    for supply in supplies:
        if supply["Status"] != bmc.ABSENT:
            del supply["Status"]
    with service(certificate, resources) as served:
        metrics = read(served.target(certificate))
        supplies[0]["LineInputStatus"] = "LossOfInput"
        one_lost = read(served.target(certificate))["bmc.power_supply.health"]
    health = metrics["bmc.power_supply.health"]
    assert not health.values
    assert len(health.absent) == values(metrics, "power_supply.fitted")["host"]
    assert all(
        reason.startswith("unsupported: this BMC reports no health for any power supply")
        for reason in health.absent.values()
    )
    assert [*one_lost.values.values()] == ["Critical: its line input has the status LossOfInput"]
    assert all(reason.startswith("error: ") for reason in one_lost.absent.values())


# ---- event logs ----


def log_of(entries: list[dict[str, Any]], *, page_size: int = 0) -> Resources:
    """Return the resources of a BMC with these log entries, listed in pages of `page_size` entries; 0: all on one page."""
    paged = {"page_size": page_size} if page_size else {}
    return bmc.old_schema() | {
        SEL: {"@odata.id": SEL, "Members@odata.count": len(entries), "Members": entries, **paged}
    }


def new_entries(certificate: Path, resources: Resources, mark: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the event log. `mark` is its newest entry at the previous reading.

    Return scope -> message of each newer entry, and the HTTP requests for entries of the log.
    """
    with service(certificate, resources) as served:
        metrics = read(served.target(certificate), {LOG: f"{mark['Id']} {mark['Created']}"})
        requests = [request for request in served.requests if "Entries" in request]
    assert values(metrics, "event.severity").keys() <= values(metrics, "event.message").keys()
    return values(metrics, "event.message"), requests


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("page_size", [0, 10, 1000])
def test_only_new_entries_of_a_log_are_read(certificate: Path, newest_first: bool, page_size: int) -> None:
    """The newest entries are read first, whether the service lists them first or last. Few requests are enough for a long log."""
    number = 100_000 if page_size == 1000 else 25
    # The times begin again after 80 000 entries; the IDs are unique.
    entries = [bmc.entry(item % 80_000, f"event {item}", Id=str(item)) for item in range(1, number + 1)]
    mark = entries[-4]
    listed = [*reversed(entries)] if newest_first else entries
    result, requests = new_entries(certificate, log_of(listed, page_size=page_size), mark)
    assert [text.partition(" ")[2] for text in result.values()] == [f"event {number - offset}" for offset in range(3)]
    assert len(requests) <= 3


def login(number: int) -> dict[str, Any]:
    """Return an entry that a DGX H100 logs when a Redfish session ends (mock-up in github.com/NVIDIA/libredfish)."""
    session = f"{V1}/SessionService/Sessions/{number}"
    text = f"The resource at {session} was successfully removed."
    return bmc.entry(number, text, "OK", MessageId="EventLog.1.0.ResourceRemoved", EntryCode="Informational")


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("page_size", [0, 50, 1000])
def test_entries_of_severity_ok_neither_count_nor_hide_an_older_error(
    certificate: Path, newest_first: bool, page_size: int
) -> None:
    entries = [bmc.entry(1), bmc.entry(2, "AC lost", "Critical"), *map(login, range(3, 2000))]
    listed = [*reversed(entries)] if newest_first else entries
    with service(certificate, log_of(listed, page_size=page_size)) as served:
        metrics = read(served.target(certificate), {LOG: f"1 {entries[0]['Created']}"})
    assert values(metrics, "log.newest") == {LOG: f"1999 {entries[-1]['Created']}"}
    assert values(metrics, "log.new_entries") == {LOG: 1}
    assert values(metrics, "event.severity") == {f"{LOG},entry=2": "Critical"}


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize(("page_size", "number"), [(10, 641), (1000, 20_001)])
def test_log_with_more_new_entries_than_can_be_read_is_an_error(
    certificate: Path, newest_first: bool, page_size: int, number: int
) -> None:
    """The entry of the mark is further back than 64 pages or 20 000 entries."""
    entries = [bmc.entry(0), *map(login, range(1, number + 1))]
    listed = [*reversed(entries)] if newest_first else entries
    with service(certificate, log_of(listed, page_size=page_size)) as served:
        metrics = read(served.target(certificate), {LOG: f"0 {entries[0]['Created']}"})
    expected = "error: the log has more than 64 pages or 20000 entries since the previous reading: save and clear it"
    assert metrics["bmc.log.new_entries"].absent == {LOG: f"{expected}, and start a new run"}
    assert values(metrics, "readable") == {"host": True}


def test_long_log_of_a_service_that_ignores_skip_is_an_error(certificate: Path) -> None:
    """The service returns its first page whatever `$skip` (the number of entries to skip) is."""
    first = {
        "@odata.id": SEL,
        "Members@odata.count": 100_000,
        "Members": [bmc.entry(item) for item in range(1, 11)],
        "Members@odata.nextLink": f"{SEL}?$skip=10",
    }
    with service(certificate, bmc.old_schema() | {SEL: first}) as served:
        metrics = read(served.target(certificate), {LOG: "5 2026"})
    assert values(metrics, "readable") == {"host": True}
    expected = "error: the event log has 100000 entries and cannot be read from its end: save and clear it, and start a new run"
    assert metrics["bmc.log.new_entries"].absent == {LOG: expected}


def test_new_entries_on_many_small_pages_are_read_without_skip(certificate: Path) -> None:
    """The service ignores `$skip` and lists ten entries on a page, the oldest first."""
    entries = [bmc.entry(number, f"event {number}") for number in range(1, 101)]
    pages = {
        f"{SEL}/{start}" if start else SEL: {
            "@odata.id": SEL,
            "Members@odata.count": len(entries),
            "Members": entries[start : start + 10],
            **({"Members@odata.nextLink": f"{SEL}/{start + 10}"} if start < 90 else {}),
        }
        for start in range(0, 100, 10)
    }
    result, _ = new_entries(certificate, bmc.old_schema() | pages, entries[14])
    assert [text.partition(" ")[2] for text in result.values()] == [f"event {number}" for number in range(100, 15, -1)]


@pytest.mark.parametrize("newest_first", [False, True])
def test_new_entries_are_read_although_the_clock_of_the_bmc_was_set_back(certificate: Path, newest_first: bool) -> None:
    entries = [bmc.entry(number, f"event {number}") for number in range(5, 12)]
    last = bmc.entry(12, "event 12", Created="2026-11-02T00:00:00Z")
    listed = [last, *reversed(entries)] if newest_first else [*entries, last]
    result, _ = new_entries(certificate, log_of(listed), entries[-2])
    assert [text.partition(" ")[2] for text in result.values()] == ["event 12", "event 11"]


def test_log_whose_entries_are_all_older_than_its_mark_is_an_error(certificate: Path) -> None:
    resources = log_of([bmc.entry(number) for number in range(1, 4)])
    with service(certificate, resources) as served:
        new = read(served.target(certificate), {LOG: "9 2026-11-04T00:00:00Z"})["bmc.log.new_entries"]
    assert new.values == {}
    assert "the newest entry of the log is older" in new.absent[LOG]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ("2 3 5 6", [8, 7]),
        ("2 5 3 6", None),  # not in order: the clock was set back, and corrected later
    ],
)
def test_log_that_has_dropped_the_entry_of_its_mark_is_read_by_time(
    certificate: Path, times: str, expected: list[int] | None
) -> None:
    """Entries are new if they were written after second 4, the time of the mark.

    If the times in the log are not in order, the reading is an error.

    `times`: the seconds in which the entries 5 to 8 were written. `expected`: numbers of the new entries; None: an error.
    """
    entries = [
        bmc.entry(number, f"event {number}", Created=f"2026-11-04T00:00:0{second}Z")
        for number, second in zip(range(5, 9), times.split(), strict=True)
    ]
    with service(certificate, log_of(entries)) as served:
        metrics = read(served.target(certificate), {LOG: "6.5 2026-11-04T00:00:04Z"})
    if expected is None:
        assert "the clock of the BMC was set back" in metrics["bmc.log.new_entries"].absent[LOG]
    else:
        messages = metrics["bmc.event.message"].values.values()
        assert sorted(str(text).rpartition(" ")[2] for text in messages) == sorted(map(str, expected))


@pytest.mark.parametrize(
    ("seconds", "mark", "expected"),
    [
        ("1 3 4 4 6", "5 2026-11-04T00:00:04Z", [6]),  # one new entry: that of the mark now has the ID 4
        ("4 4 5 6 6", "5 2026-11-04T00:00:04Z", [6, 6, 5]),
        ("1 3 3 4 6", "3 2026-11-04T00:00:04Z", [6, 4]),  # entry 4 was written in the second of the mark
    ],
)
def test_log_whose_ids_are_positions_gives_no_entry_twice(
    certificate: Path, seconds: str, mark: str, expected: list[int]
) -> None:
    """The IDs of HPE's logs are positions, so those of all entries fall by 1 if a full log gets a new entry.

    `seconds`: the seconds in which the entries 1 to 5 were written. `expected`: those of the new entries.
    """
    entries = [
        bmc.entry(number, f"second {second}", Created=f"2026-11-04T00:00:0{second}Z")
        for number, second in enumerate(seconds.split(), 1)
    ]
    with service(certificate, log_of(entries)) as served:
        metrics = read(served.target(certificate), {LOG: mark})
    texts = metrics["bmc.event.message"].values.values()
    assert [int(str(text).rpartition(" ")[2]) for text in texts] == expected


def test_entries_of_a_clock_that_was_not_set_are_new_if_the_log_lacks_the_mark(certificate: Path) -> None:
    """The clock begins at the same time after each start, so an equal time does not show that an entry was read before."""
    entries = [bmc.entry(number, f"event {number}", Created="1970-01-01T00:00:04Z") for number in (1, 2)]
    with service(certificate, log_of(entries)) as served:
        metrics = read(served.target(certificate), {LOG: "5 1970-01-01T00:00:04Z"})
    assert values(metrics, "log.new_entries") == {LOG: 2}


def test_entry_with_a_higher_number_but_an_earlier_time_than_the_mark_is_an_error(certificate: Path) -> None:
    entries = [
        bmc.entry(number, f"event {number}", Created=f"2026-11-04T00:00:0{second}Z")
        for number, second in ((5, 1), (8, 2), (9, 6))
    ]
    with service(certificate, log_of(entries)) as served:
        new = read(served.target(certificate), {LOG: "7 2026-11-04T00:00:04Z"})["bmc.log.new_entries"]
    assert "the clock of the BMC was set back" in new.absent[LOG]


@pytest.mark.parametrize("newest_first", [False, True])
def test_times_of_the_first_and_the_last_entry_decide_in_which_direction_a_log_of_links_is_read(
    certificate: Path, newest_first: bool
) -> None:
    """The log has no times, only links to its entries, and their IDs do not rise with time."""
    entries = {
        f"{SEL}/{10 - number}": bmc.entry(number, f"event {number}", Id=str(10 - number)) for number in (1, 2, 3)
    }
    paths = [*reversed(entries)] if newest_first else [*entries]
    resources = log_of([{"@odata.id": path} for path in paths]) | entries
    result, _ = new_entries(certificate, resources, entries[f"{SEL}/8"])
    assert [text.partition(" ")[2] for text in result.values()] == ["event 3"]


@pytest.mark.parametrize("newest_first", [False, True])
def test_one_wrong_time_does_not_change_the_direction_in_which_a_log_is_read(
    certificate: Path, newest_first: bool
) -> None:
    entries = [bmc.entry(number, f"event {number}") for number in range(1, 8)]
    entries[0] |= {"Created": "2036-01-01T00:00:00Z"}
    listed = [*reversed(entries)] if newest_first else entries
    result, _ = new_entries(certificate, log_of(listed), entries[-2])
    assert [text.partition(" ")[2] for text in result.values()] == ["event 7"]


def test_entries_of_a_cleared_log_are_new(certificate: Path) -> None:
    entries = [bmc.entry(100, "log cleared", Id="1"), bmc.entry(200, "AC lost", "Critical", Id="2")]
    result, _ = new_entries(certificate, log_of(entries), bmc.entry(50, Id="977"))
    assert [text.partition(" ")[2] for text in result.values()] == ["AC lost", "log cleared"]


def test_entry_that_ends_a_condition_is_ok_and_a_missing_severity_is_an_error(certificate: Path) -> None:
    """The entries for the start and the end of a condition (`EntryCode` is `Assert` or `Deassert`) have the same text."""
    entries = [
        bmc.entry(1),
        bmc.entry(2, "AC lost", "Critical", EntryCode="Assert"),
        bmc.entry(3, "AC lost", "Critical", EntryCode="Deassert"),
        bmc.entry(4, "what", None),
        bmc.entry(5, "text\x1b[2J\u202e" + 2000 * "x", "minor"),
        bmc.entry(6, "Fan inserted", "informational"),
    ]
    with service(certificate, log_of(entries)) as served:
        metrics = read(served.target(certificate), {LOG: f"1 {entries[0]['Created']}"})
    assert values(metrics, "event.severity") == {
        f"{LOG},entry=5": "Warning", f"{LOG},entry=2": "Critical",
    }  # fmt: skip
    assert metrics["bmc.event.severity"].absent == {f"{LOG},entry=4": "error: the BMC reports no severity of the entry"}
    text = str(values(metrics, "event.message")[f"{LOG},entry=5"])
    assert text.isprintable()
    assert len(text) < 400


HOST_LOG, MANAGER_LOG = f"{V1}/Systems/HGX_Baseboard_0", f"{V1}/Managers/HGX_BMC_0"
THRESHOLD, RESOURCES = "OpenBMC.0.4.SensorThreshold", "OpenBMC.0.4.BMCSystemResourceInfo"


@pytest.mark.parametrize(
    ("owner", "message_id", "argument", "severity", "expected"),
    [
        (MANAGER_LOG, f"{THRESHOLD}WarningHighGoingHigh", "CPU", "Warning", ""),
        (MANAGER_LOG, f"{THRESHOLD}WarningHighGoingHigh", "ProcessCPU_pldmd", "Warning", ""),
        (MANAGER_LOG, f"{THRESHOLD}CriticalHighGoingHigh", "ProcessCPU_bmcweb", "Critical", ""),
        (MANAGER_LOG, f"{THRESHOLD}WarningLowGoingLow", "Memory_Available", "Warning", ""),
        (MANAGER_LOG, f"{THRESHOLD}WarningLowGoingLow", "Storage_RW", "Warning", ""),
        (MANAGER_LOG, RESOURCES, "CPU", "Warning", ""),
        (MANAGER_LOG, RESOURCES, " Storage", "Warning", ""),
        (HOST_LOG, RESOURCES, "Storage", "Warning", ""),
        # A BMC without memory or storage can lose log entries.
        (MANAGER_LOG, f"{THRESHOLD}CriticalLowGoingLow", "Memory_Available", "Critical", "Critical"),
        (MANAGER_LOG, RESOURCES, "Storage_RW", "Critical", "Critical"),
        # A worn flash memory is a fault.
        (MANAGER_LOG, RESOURCES, "EMMC_Lifetime", "Warning", "Warning"),
        (MANAGER_LOG, f"{THRESHOLD}WarningHighGoingHigh", "EMMC_Lifetime", "Warning", "Warning"),
        # Sensors of the host
        (HOST_LOG, f"{THRESHOLD}WarningHighGoingHigh", "CPU", "Warning", "Warning"),
        (MANAGER_LOG, f"{THRESHOLD}WarningHighGoingHigh", "CPU_0_Temp", "Warning", "Warning"),
        (MANAGER_LOG, f"{THRESHOLD}WarningHighGoingHigh", "StorageBackplane_1_SSD_3_Temp_0", "Warning", "Warning"),
        (MANAGER_LOG, "ResourceEvent.1.0.ResourceErrorsDetected", "CPU", "Critical", "Critical"),
        (MANAGER_LOG, f"{THRESHOLD}WarningHighGoingHigh", None, "Warning", "Warning"),
    ],
)  # fmt: skip
def test_load_of_the_bmc_itself_is_no_fault_of_the_host(
    certificate: Path, owner: str, message_id: str, argument: str | None, severity: str, expected: str
) -> None:
    """The entries are those of a GB200 (mock-up in github.com/NVIDIA/libredfish). `expected`: empty if not judged."""
    more = {"@odata.id": f"{owner}/LogServices/EventLog/Entries/2", "MessageId": message_id}
    arguments = {"MessageArgs": [argument, "80.419451", "80.000000"]} if argument else {}
    entries = [bmc.entry(1), bmc.entry(2, "a threshold", severity, **more, **arguments)]
    with service(certificate, log_of(entries)) as served:
        metrics = read(served.target(certificate), {LOG: f"1 {entries[0]['Created']}"})
    assert values(metrics, "event.severity") == ({f"{LOG},entry=2": expected} if expected else {})


# ---- services that cannot be read ----


def status(code: int, document: Any = None, **headers: str) -> bmc.Answer:
    """Return a function that answers every request with this HTTP status code, document and headers."""

    def answer(request: BaseHTTPRequestHandler) -> bool:
        request.reply(code, document if document is not None else {}, **headers)  # type: ignore[attr-defined]
        return True

    return answer


def only_at(path: str, answer: bmc.Answer) -> bmc.Answer:
    """Return a function that answers requests for `path` with `answer`, and leaves other requests to the service."""
    return lambda request: request.path.rstrip("/") == path and answer(request)


def drip(request: BaseHTTPRequestHandler) -> bool:
    """Send one byte every 20 ms, without end."""
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b" ")
        request.wfile.flush()
        time.sleep(0.02)


def hang(request: BaseHTTPRequestHandler) -> bool:
    """Keep the connection open for 5 s without sending anything."""
    time.sleep(5)
    return True


SYSTEMS = f"{V1}/Systems"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (status(401), r"credentials refused \(HTTP 401\)"),
        (status(503), "the service answers with HTTP 503"),
        (status(301, None, Location="https://127.0.0.1/redfish/v1/"), "HTTP 301: redirects are not followed"),
        (status(200, b"<html>"), "no valid answer|answers with invalid JSON"),
        (only_at(SYSTEMS, status(200, b"[]")), "answers with invalid JSON at /redfish/v1/Systems"),
        (only_at(SYSTEMS, status(200, b"[" * 100_000)), "answers with invalid JSON at /redfish/v1/Systems"),
        (only_at(SYSTEMS, status(403)), r"access denied \(HTTP 403\) to /redfish/v1/Systems: the account needs"),
        (only_at(SYSTEMS, status(500)), "HTTP 500 at /redfish/v1/Systems"),
        (only_at(SYSTEMS, status(200, b" " * 8_100_000)), "an answer has more than 8000000 bytes"),
        (only_at(SYSTEMS, drip), "not read in time|no complete answer within"),
        (hang, "no answer in time|not read in time|no complete answer within"),
    ],
)
def test_reading_names_why_the_service_cannot_be_read(certificate: Path, answer: bmc.Answer, expected: str) -> None:
    with service(certificate, answer=answer) as served:
        metrics = read(served.target(certificate), deadline_s=1.0)
    assert re.match(f"error: ({expected})", reason(metrics)), reason(metrics)


def test_session_of_a_slow_bmc_is_closed_after_the_deadline(certificate: Path) -> None:
    with service(certificate, answer=only_at(SYSTEMS, drip)) as served:
        read(served.target(certificate), deadline_s=0.5)
        end = time.monotonic() + 10
        while served.sessions and time.monotonic() < end:
            time.sleep(0.02)
        assert served.sessions == set()


def test_wrong_password_is_tried_once(certificate: Path) -> None:
    """More attempts could lock the account."""
    with service(certificate) as served:
        metrics = read(served.target(certificate, password="wrong"))
        assert [request for request in served.requests if "Sessions" in request] == [
            f"POST {V1}/SessionService/Sessions"
        ]
    assert reason(metrics) == "error: credentials refused (HTTP 401)"


@pytest.mark.parametrize(
    ("name_in_certificate", "remedy"),
    [
        ("other.example", "set rackproof_bmc_address to a name that is in the certificate"),
        ("127.0.0.2", "set rackproof_bmc_address to a name that is in the certificate"),
        ("127.0.0.1", "set rackproof_bmc_ca"),  # the right name, but another authority
    ],
)
def test_certificate_of_another_name_or_authority_is_refused(
    certificate: Path, tmp_path: Path, name_in_certificate: str, remedy: str
) -> None:
    """Without this check, any server at this address would receive the password."""
    other = bmc.make_certificate(tmp_path, name_in_certificate)
    with service(other) as served:
        metrics = read(served.target(certificate if name_in_certificate == "127.0.0.1" else other))
        assert served.requests == []
    assert reason(metrics).startswith("error: certificate not accepted: ")
    assert reason(metrics).endswith(remedy)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (10, "renew the certificate"),  # X509_V_ERR_CERT_HAS_EXPIRED
        (9, "renew the certificate"),  # X509_V_ERR_CERT_NOT_YET_VALID
        (62, "rackproof_bmc_address"),  # X509_V_ERR_HOSTNAME_MISMATCH
        (64, "rackproof_bmc_address"),  # X509_V_ERR_IP_ADDRESS_MISMATCH
        (18, "rackproof_bmc_ca"),  # X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT
        (20, "rackproof_bmc_ca"),  # X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY
    ],
)
def test_remedy_follows_from_the_reason_why_a_certificate_is_not_accepted(code: int, remedy: str) -> None:
    assert remedy in certificate_remedy(code)


def test_certificate_is_not_checked_if_verification_is_off(tmp_path: Path) -> None:
    other = bmc.make_certificate(tmp_path, "other.example")
    with service(other) as served:
        assert values(read(served.target(other, ca="", verify=False)), "readable") == {"host": True}


@pytest.mark.parametrize(
    "path",
    [
        "@evil.example/x",
        "//evil.example/x",
        "https://evil.example/redfish/v1/x",
        "/etc/passwd",
        "/redfish/v1/../x",
        7,
        None,
    ],
)
def test_links_outside_the_service_are_not_followed(certificate: Path, path: Any) -> None:
    resources = bmc.old_schema()
    resources[f"{V1}/Systems"]["Members"] = [{"@odata.id": path}]
    with service(certificate, resources) as served:
        metrics = read(served.target(certificate))
        assert all(request.split()[1].startswith(V1) for request in served.requests)
    assert values(metrics, "system.serial") == {}


@pytest.mark.parametrize("garbage", [None, 7, "text", [], [[]], [None, "x", {}], {"a": {}}, True])
def test_unexpected_value_of_a_list_property_raises_no_error(certificate: Path, garbage: Any) -> None:
    for path, name in ((POWER, "PowerSupplies"), (THERMAL, "Fans"), (SEL, "Members"), (f"{V1}/Chassis", "Members")):
        resources = bmc.old_schema()
        resources[path][name] = garbage
        with service(certificate, resources) as served:
            assert "bmc.readable" in read(served.target(certificate))


@pytest.mark.parametrize("limit", ["members", "pages"])
def test_collection_with_too_many_members_or_pages_is_an_error(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Members beyond the limit are not read, so the BMC must not pass."""
    monkeypatch.setattr(client, f"MAX_{limit.upper()}", 3)
    resources = bmc.old_schema()
    system = {"@odata.id": f"{V1}/Systems/1"}
    resources[f"{V1}/Systems"] |= {"Members": [system] * 4, "page_size": 1 if limit == "pages" else 4}
    with service(certificate, resources) as served:
        assert f"/Systems has more than 3 {limit}" in reason(read(served.target(certificate)))


def test_service_without_systems_and_chassis_is_an_error(certificate: Path) -> None:
    resources = bmc.old_schema()
    del resources[V1]["Systems"], resources[V1]["Chassis"]
    with service(certificate, resources) as served:
        assert reason(read(served.target(certificate))).endswith("lists neither systems nor chassis")


@pytest.mark.parametrize("features", [{"NoLinks": True, "Levels": True}, {"NoLinks": True, "Levels": False}, "garbage"])
def test_members_are_read_in_one_request_if_the_service_can_return_them_with_their_collection(
    certificate: Path, features: Any
) -> None:
    """`features`: what the service says about the query option `$expand`."""
    resources = bmc.old_schema()
    resources[V1]["ProtocolFeaturesSupported"] = {"ExpandQuery": features}
    systems = {
        **resources[f"{V1}/Systems"],
        "Members": [{"@odata.id": f"{V1}/Systems/1", **resources[f"{V1}/Systems/1"]}],
    }

    def answer(request: BaseHTTPRequestHandler) -> bool:
        is_expanded = request.path == f"{SYSTEMS}?$expand=.($levels=1)"
        if is_expanded:
            request.reply(200, systems)  # type: ignore[attr-defined]
        return is_expanded

    with service(certificate, resources, answer) as served:
        assert values(read(served.target(certificate)), "system.serial") == {"system=1": "S123456X"}
        is_read_alone = f"GET {SYSTEMS}/1" in served.requests
    assert is_read_alone is (features != {"NoLinks": True, "Levels": True})


@pytest.mark.parametrize(
    "failure",
    [
        *(status(400), status(404), status(500), status(200, b"<html>"), status(200, b" " * 8_100_000)),
        status(200, {"error": {"code": "Base.1.18.GeneralError"}}),
        status(200, {"Members@odata.count": 1, "Members": []}),
        status(200, {"Members": [{"@odata.id": f"{SYSTEMS}/1"}]}),
        status(200, {"Members": [{"@odata.id": f"{SYSTEMS}/1", "error": {"code": "Base.1.18.InternalError"}}]}),
    ],
)
def test_members_are_read_one_by_one_if_the_service_fails_to_return_them_with_their_collection(
    certificate: Path, failure: bmc.Answer
) -> None:
    resources = bmc.old_schema()
    resources[V1]["ProtocolFeaturesSupported"] = {"ExpandQuery": {"NoLinks": True, "Levels": True}}
    with service(certificate, resources, lambda request: "$expand" in request.path and failure(request)) as served:
        metrics = read(served.target(certificate))
    assert values(metrics, "system.serial") == {"system=1": "S123456X"}
    assert values(metrics, "power_supply.fitted") == {"host": 3}


def test_a_service_that_refuses_members_with_their_collection_is_asked_for_them_only_once(certificate: Path) -> None:
    """Each further request might take as long as the time limit of a request."""
    resources = bmc.old_schema()
    resources[V1]["ProtocolFeaturesSupported"] = {"ExpandQuery": {"NoLinks": True, "Levels": True}}
    with service(certificate, resources, lambda request: "$expand" in request.path and status(500)(request)) as served:
        read(served.target(certificate))
        assert sum("$expand" in request for request in served.requests) == 1


def test_more_parts_than_can_be_read_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.bmc.readings.MAX_SCOPES", 2)
    readings = Readings()
    for number in range(3):
        readings.add("bmc.fan.health", (f"fan{number}",), "OK")
    assert metric(readings, "fan.health").values == {"fan=fan0": "OK", "fan=fan1": "OK"}
    assert metric(readings, "fan.health").absent == {
        "host": "error: more than 2 parts have this reading; the others were not read"
    }


def test_slow_bmc_does_not_affect_the_others(certificate: Path) -> None:
    with service(certificate) as good, service(certificate, answer=hang) as slow:
        jobs = [(slow.target(certificate, host="slow"), None), (good.target(certificate, host="good"), None)]
        results = {target.host: metrics for target, metrics, _ in read_all(jobs, deadline_s=1.5)}
    assert len(results["good"]) == len(NAMES)
    assert len(results["slow"]) == 1


def test_names_and_texts_of_a_bmc_are_sanitized() -> None:
    hostile = "\x00../../etc\x1b]0;title\x07\u202eevil\n" + 5000 * "é"
    assert re.fullmatch(r"[A-Za-z0-9_.:-]{1,60}", label(hostile))
    assert label("///") == label("") == "unnamed"
    assert clean_text(hostile).isprintable()
    assert len(clean_text(hostile)) <= 300


def test_repr_of_a_target_and_text_of_an_error_have_no_credentials() -> None:
    target = BmcTarget(host="h", address="a", user=bmc.USER, password=bmc.PASSWORD)
    assert "canary" not in repr(target)
    assert client._describe(ValueError(bmc.PASSWORD)) == "no valid answer (ValueError)"


def sensor(**properties: Any) -> Readings:
    """Return the readings of one sensor, by default of the temperature at the air inlet."""
    readings = Readings()
    _read_sensor(readings, {"Name": "Inlet Temp", "PhysicalContext": "Intake", "ReadingCelsius": 24, **properties})
    return readings


def metric(readings: Readings, name: str) -> Metric:
    return next(item for item in readings.metrics() if item.name == f"bmc.{name}")


@pytest.mark.parametrize(
    "limits",
    [(0, 0), (None, 0), (10, 10), (10, 5)],
    ids=["both 0", "lower missing, upper 0", "both equal", "lower above upper"],
)
def test_sensor_without_usable_limits_has_no_alarm_reading(limits: tuple[int | None, int]) -> None:
    readings = sensor(LowerThresholdCritical=limits[0], UpperThresholdCritical=limits[1])
    assert metric(readings, "sensor.alarm").values == {}


@pytest.mark.parametrize(
    ("number", "low", "high", "alarm"),
    [
        (10.2, 10.8, 0, "10.2, below its critical limit 10.8"), (12.1, 10.8, 0, "none"),
        (-14, -13.2, 0, "-14, below its critical limit -13.2"), (-12, -13.2, 0, "none"),
        (12.1, 0, 11, "12.1, above its critical limit 11"),
    ],
)  # fmt: skip
def test_sensor_alarm_follows_from_the_critical_limits(number: float, low: float, high: float, alarm: str) -> None:
    """An upper limit of 0 is not used, because some services report 0 for a limit that is not set."""
    readings = sensor(ReadingCelsius=number, LowerThresholdCritical=low, UpperThresholdCritical=high)
    (value,) = metric(readings, "sensor.alarm").values.values()
    assert value == alarm


@pytest.mark.parametrize(
    ("log", "is_hardware"),
    [
        ({"Id": "Log1", "LogEntryType": "SEL", "Name": "Health Event Log Service"}, True),
        ({"Id": "Log1", "LogEntryType": "OEM", "Name": "Maintenance Event Log Service"}, False),
        ({"Id": "Log1", "LogEntryType": None}, True),
        ({"Id": "Log1"}, True),
        ({"Id": "PlatformLog", "LogEntryType": "Multiple"}, True),
        ({"Id": "IML"}, True),
        ({"Id": "EventLog"}, True),
        ({"Id": "AuditLog", "LogEntryType": "Event"}, False),
        ({"Id": "Dreadnought"}, False),
    ],
)
def test_only_a_log_of_hardware_events_is_an_event_log(log: dict[str, Any], is_hardware: bool) -> None:
    assert is_event_log(log) is is_hardware


@pytest.mark.parametrize(
    ("name", "context", "is_inlet"),
    [
        ("Inlet Temp", "Intake", True), ("System Board Inlet Temp", "SystemBoard", True), ("01-Inlet Ambient", "Intake", True),
        ("Ambient Temp", None, True), ("Temps Inlet", "Chassis", True), ("PSU1 Inlet Temp", "Intake", False),
        ("PS2 Ambient", None, False), ("Inlet", "PowerSupply", False), ("Coolant Inlet", None, False),
        ("Inlet", "LiquidInlet", False), ("OCP_NIC_Ambient", None, False), ("VRM inlet", None, False),
    ],
)  # fmt: skip
def test_inlet_temperature_is_that_of_the_air_that_enters_the_chassis(
    name: str, context: str | None, is_inlet: bool
) -> None:
    readings = sensor(Name=name, PhysicalContext=context, ReadingCelsius=48)
    assert bool(metric(readings, "inlet.temperature").values) is is_inlet


@pytest.mark.parametrize(
    ("name", "context", "limits", "side"),
    [
        ("TEMP_AMBIENT", "Intake", {"UpperThresholdNonCritical": 37, "UpperThresholdCritical": 40}, "inlet"),
        ("TEMP_MB_INLET", "Intake", {"UpperThresholdNonCritical": 56, "UpperThresholdCritical": 59}, ""),
        ("TEMP_GB_RETIMER8", "Intake", {"UpperThresholdCritical": 113}, ""),
        ("TLIMIT_GB_SXM6", "Intake", {}, ""),
        ("TEMP_MB_OUTLET", "Intake", {"UpperThresholdCritical": 75}, ""),
        ("TEMP_GB1_INLET1", "Intake", {}, ""),
        ("15-Board Inlet", "SystemBoard", {"UpperThresholdCritical": 60}, ""),
        ("PDB 0 Inlet Temp 0", None, {"Thresholds": {"UpperCaution": {"Reading": 80.0}}}, ""),
        ("Inlet Temp", "SystemBoard", {"UpperThresholdCritical": 42, "UpperThresholdFatal": 45}, "inlet"),
        ("Temp 1", "Intake", {"UpperThresholdCritical": 42}, "inlet"),
        ("System Board Exhaust Temp", "SystemBoard", {"UpperThresholdCritical": 80}, "outlet"),
        ("Outlet Temp", None, {"UpperThresholdCritical": 80}, "outlet"),
    ],
)
def test_sensor_with_a_limit_too_high_for_room_air_is_no_inlet_sensor(
    name: str, context: str | None, limits: dict[str, Any], side: str
) -> None:
    """The sensors and limits are those of a DGX H100, whose BMC reports `Intake` for all sensors, and of HPE, Dell and GB200."""
    none = {"UpperThresholdCritical": None}
    metrics = sensor(Name=name, PhysicalContext=context, ReadingCelsius=30, **(none | limits))
    sides = [each for each in ("inlet", "outlet") if metric(metrics, f"{each}.temperature").values]
    assert sides == ([side] if side else [])


@pytest.mark.parametrize(
    "properties",
    [
        {"ReadingCelsius": None},
        {"ReadingCelsius": None, "Status": {"State": "UnavailableOffline", "Health": "OK"}},
        {"ReadingCelsius": 0, "Status": {"State": "UnavailableOffline"}},
    ],
)
def test_sensor_without_a_current_value_is_unsupported(properties: dict[str, Any]) -> None:
    readings = sensor(UpperThresholdCritical=45, **properties)
    for name in ("sensor.alarm", "inlet.temperature"):
        (reason,) = metric(readings, name).absent.values()
        assert reason == "unsupported: the BMC currently reports no value for this sensor"
