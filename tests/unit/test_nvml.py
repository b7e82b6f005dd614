"""The NVML collector against a real library that answers from scenario files: what each fault changes, and nothing else."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from agent.exporter import SUFFIX
from collectors import nvml as collector
from collectors.base import Absent
from schemas import documents
from tests.fakes import nvml

Readings = dict[str, object]
"""`name scope` -> the value, or `status: reason`."""

LOST = "error: NVML: GPU is lost"
NOT_SUPPORTED = "unsupported: NVML: Not Supported"
NOT_FOUND = "unsupported: NVML: Function Not Found"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def reader(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[nvml.Reader]:
    with nvml.Reader(library, tmp_path_factory.mktemp("scenario") / "now") as started:
        yield started


@pytest.fixture(scope="module")
def healthy(reader: nvml.Reader) -> Readings:
    return readings(reader, "healthy-h100x8")


def readings(reader: nvml.Reader, base: str, *lines: str | bytes) -> Readings:
    return flat(reader.take(base, *lines)["snapshot"])


def flat(snapshot: dict[str, list[dict[str, object]]]) -> Readings:
    """The readings of a snapshot, without how long the collector took."""
    return {
        f"{metric['name']} {scope}": value
        for metric in snapshot["metrics"]
        for kind in ("values", "absent")
        for scope, value in dict(metric.get(kind, {})).items()  # type: ignore[call-overload]
        if metric["name"] != "collector.nvml" or kind == "absent"
    }


def changes(before: Readings, after: Readings) -> Readings:
    """What is new or other in `after`; None for what is no longer there."""
    names = [*before, *(name for name in after if name not in before)]
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


# ---- healthy machines ----

HEALTHY = {
    "healthy-h100x8": {
        "gpu.count host": 8,
        "driver.version host": "550.90.07",
        "driver.cuda_version host": "12.4",
        "gpu.name gpu=7": "NVIDIA H100 80GB HBM3",
        "gpu.serial gpu=7": "1654922006045",
        "gpu.uuid gpu=7": "GPU-c05a7e93-f8d2-4169-a604-b72d18e5390f",
        "gpu.pci_bus_id gpu=7": "00000000:db:00.0",
        "gpu.memory.total gpu=0": 85520809984,
        "gpu.clock.memory gpu=0": 2619e6,
        "gpu.nvlink.active_links gpu=0": 18,
    },
    "healthy-h200x4": {
        "gpu.count host": 4,
        "driver.version host": "580.159.04",
        "driver.cuda_version host": "13.0",
        "gpu.name gpu=0": "NVIDIA H200",
        "gpu.serial gpu=0": "1650000000000",
        "gpu.pci_bus_id gpu=0": "00000000:00:06.0",
        "gpu.vbios_version gpu=0": "96.00.A5.00.1A",
        "gpu.part_number gpu=0": "692-2G520-0282-001",
        "gpu.temperature gpu=0": 29,
        "gpu.power gpu=0": 78.964,
        "gpu.power_limit gpu=0": 700.0,
        "gpu.power_limit_default gpu=0": 700.0,
        "gpu.energy gpu=0": 26991.95,
        "gpu.clock.sm gpu=0": 345e6,
        "gpu.clock.memory gpu=0": 3201e6,
        "gpu.utilization gpu=0": 0.0,
        "gpu.memory.utilization gpu=0": 0.0,
        "gpu.memory.total gpu=0": 150754820096,
        "gpu.memory.used gpu=0": 644939776,
        "gpu.ecc.enabled gpu=0": True,
        "gpu.ecc.uncorrectable_volatile gpu=0": 0,
        "gpu.ecc.uncorrectable_sram_aggregate gpu=0": 0,
        "gpu.remapped_rows.pending gpu=0": False,
        "gpu.remapped_rows.failed gpu=0": False,
        "gpu.pcie.generation gpu=0": 5,
        "gpu.pcie.generation_max gpu=0": 5,
        "gpu.pcie.width gpu=0": 16,
        "gpu.pcie.width_max gpu=0": 16,
        "gpu.pcie.replays gpu=0": 0,
        "gpu.mig.enabled gpu=0": False,
        "gpu.persistence.enabled gpu=0": True,
        "gpu.processes gpu=0": 0,
        "gpu.throttle.active gpu=0,reason=hw_thermal": False,
        "gpu.nvlink.active gpu=0,link=17": True,
        "gpu.nvlink.active_links gpu=0": 18,
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_machine_reads_in_full(reader: nvml.Reader, name: str) -> None:
    seen = readings(reader, name)
    assert {key: seen[key] for key in HEALTHY[name]} == HEALTHY[name]
    assert "gpu.nvlink.active gpu=0,link=18" not in seen
    absent = {key: value for key, value in seen.items() if re.match(r"(error|unsupported): ", str(value))}
    assert absent == {}, "a getter that is missing here needs its line in nvml_stub.c and in the scenario"


def test_every_gpu_has_an_identity_of_its_own(reader: nvml.Reader) -> None:
    gpus = reader.take("healthy-h100x8")["gpus"]
    assert [gpu["index"] for gpu in gpus] == list(range(8))
    for part in ("serial", "uuid", "pci_bus_id"):
        assert len({gpu[part] for gpu in gpus}) == 8, part


# ---- faults: scenario -> all that it changes ----

FAULTS: dict[str, Readings] = {
    "gpu-missing": {"gpu.count host": 7},  # and nothing of gpu=7, below
    "ecc-uncorrectable": {
        "gpu.ecc.uncorrectable_volatile gpu=2": 2,
        "gpu.ecc.uncorrectable_aggregate gpu=2": 2,
        "gpu.ecc.uncorrectable_sram_aggregate gpu=2": 1,
    },
    "remap-pending": {
        "gpu.ecc.uncorrectable_aggregate gpu=1": 1,
        "gpu.remapped_rows.uncorrectable gpu=1": 1,
        "gpu.remapped_rows.pending gpu=1": True,
    },
    "remap-failed": {
        "gpu.remapped_rows.correctable gpu=6": 2,
        "gpu.remapped_rows.uncorrectable gpu=6": 8,
        "gpu.remapped_rows.failed gpu=6": True,
    },
    "pcie-narrow": {"gpu.pcie.width gpu=6": 8},
    "pcie-gen3": {"gpu.pcie.generation gpu=0": 3},
    "nvlink-down": {"gpu.nvlink.active gpu=5,link=11": False, "gpu.nvlink.active_links gpu=5": 17},
    "thermal-slowdown": {
        "gpu.temperature gpu=4": 91,
        "gpu.clock.sm gpu=4": 1155e6,
        "gpu.throttle.active gpu=4,reason=hw_slowdown": True,
        "gpu.throttle.active gpu=4,reason=hw_thermal": True,
    },
    "power-brake": {
        "gpu.clock.sm gpu=7": 990e6,
        "gpu.throttle.active gpu=7,reason=hw_slowdown": True,
        "gpu.throttle.active gpu=7,reason=hw_power_brake": True,
    },
    "ecc-off": {
        "gpu.ecc.enabled gpu=3": False,
        "gpu.ecc.corrected_volatile gpu=3": NOT_SUPPORTED,
        "gpu.ecc.uncorrectable_volatile gpu=3": NOT_SUPPORTED,
        "gpu.ecc.corrected_aggregate gpu=3": NOT_SUPPORTED,
        "gpu.ecc.uncorrectable_aggregate gpu=3": NOT_SUPPORTED,
        "gpu.ecc.uncorrectable_sram_aggregate gpu=3": NOT_SUPPORTED,
    },
    "mig-on": {
        "gpu.mig.enabled gpu=2": True,
        "gpu.utilization gpu=2": NOT_SUPPORTED,
        "gpu.memory.utilization gpu=2": NOT_SUPPORTED,
    },
    "older-driver": {
        "driver.version host": "525.147.05",
        "driver.cuda_version host": "12.0",
        # the throttle reasons are read under the name that they had then
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_its_own_readings_only(reader: nvml.Reader, healthy: Readings, name: str) -> None:
    expected = dict(FAULTS[name])
    if name == "gpu-missing":
        expected |= {key: None for key in healthy if "gpu=7" in key}
    assert changes(healthy, readings(reader, name)) == expected


UNKNOWN = "error: NVML: Unknown Error"

ANSWERS: dict[str, Readings] = {
    "gpu.1.ComputeRunningProcesses=4711 4712": {"gpu.processes gpu=1": 2},
    "gpu.1.PersistenceMode=0": {"gpu.persistence.enabled gpu=1": False},
    "gpu.1.PcieReplayCounter=3": {"gpu.pcie.replays gpu=1": 3},
    "gpu.1.MaxPcieLinkGeneration=4": {"gpu.pcie.generation_max gpu=1": 4},
    "gpu.1.MaxPcieLinkWidth=8": {"gpu.pcie.width_max gpu=1": 8},
    "gpu.1.EnforcedPowerLimit=500000": {"gpu.power_limit gpu=1": 500.0},
    "gpu.1.PowerManagementDefaultLimit=650000": {"gpu.power_limit_default gpu=1": 650.0},
    "gpu.1.UtilizationRates=97 41": {"gpu.utilization gpu=1": 0.97, "gpu.memory.utilization gpu=1": 0.41},
    "gpu.1.MemoryInfo=85520809984 80000000000": {"gpu.memory.used gpu=1": 80000000000},
    "gpu.1.TotalEccErrors.0.0=5": {"gpu.ecc.corrected_volatile gpu=1": 5},
    "gpu.1.TotalEccErrors.0.1=6": {"gpu.ecc.corrected_aggregate gpu=1": 6},
    "gpu.1.CurrentClocksEventReasons=0x4": {"gpu.throttle.active gpu=1,reason=power_cap": True},
    "gpu.1.CurrentClocksEventReasons=0x20": {"gpu.throttle.active gpu=1,reason=sw_thermal": True},
    "gpu.1.NvLinkState.4=!999": {"gpu.nvlink.active gpu=1,link=4": UNKNOWN, "gpu.nvlink.active_links gpu=1": UNKNOWN},
    "gpu.1.NvLinkState.*=!3": {
        **{f"gpu.nvlink.active gpu=1,link={link}": None for link in range(18)},
        "gpu.nvlink.active_links gpu=1": "unsupported: the part has no NVLink",
    },
    "gpu.1.Serial=!14": {"gpu.serial gpu=1": "error: NVML: Corrupted infoROM"},
    "gpu.1.PowerUsage=!98": {"gpu.power gpu=1": "error: NVML: An error that only the stub knows"},
    "DriverVersion=!999": {"driver.version host": UNKNOWN},
    "CudaDriverVersion=11080": {"driver.cuda_version host": "11.8"},
    "CudaDriverVersion=!999": {"driver.cuda_version host": UNKNOWN},
    "Shutdown=!999": {},
}


@pytest.mark.parametrize("line", ANSWERS)
def test_one_answer_changes_its_own_reading_only(reader: nvml.Reader, healthy: Readings, line: str) -> None:
    assert changes(healthy, readings(reader, "healthy-h100x8", line)) == ANSWERS[line]


def test_a_text_that_is_not_utf8_costs_its_own_reading(reader: nvml.Reader, healthy: Readings) -> None:
    seen = changes(healthy, readings(reader, "healthy-h100x8", b"gpu.5.BoardPartNumber=692-\xff\xfe"))
    assert list(seen) == ["gpu.part_number gpu=5"]
    assert str(seen["gpu.part_number gpu=5"]).startswith("error: NVML: 'utf-8' codec can't decode")


# ---- a GPU that is lost ----


def lost(healthy: Readings, gpu: int) -> Readings:
    """What changes when this GPU falls off the bus: all of its readings, and the count."""
    own = {key: None if "link=" in key else LOST for key in healthy if of(key, [gpu])}
    return {**own, "gpu.count host": 7}


def of(key: str, gpus: Iterable[int]) -> bool:
    """Is this a reading of one of these GPUs?"""
    return key.split()[1].split(",")[0] in {f"gpu={gpu}" for gpu in gpus}


def test_a_lost_gpu_costs_its_own_readings_only(reader: nvml.Reader, healthy: Readings) -> None:
    taken = reader.take("gpu-lost")
    assert changes(healthy, flat(taken["snapshot"])) == lost(healthy, 3)
    assert [gpu["index"] for gpu in taken["gpus"]] == [0, 1, 2, 4, 5, 6, 7]


def test_a_lost_gpu_that_still_has_a_handle_gives_no_value(reader: nvml.Reader, healthy: Readings) -> None:
    seen = changes(healthy, readings(reader, "gpu-lost", "gpu.3.HandleByIndex=0"))
    assert {key for key in healthy if of(key, [3])} <= set(seen)
    assert {key for key in seen if not of(key, [3])} == set()
    assert set(seen.values()) == {LOST}


def test_a_gpu_lost_and_back_while_the_collector_runs(reader: nvml.Reader, healthy: Readings) -> None:
    before, during, after = (readings(reader, name) for name in ("healthy-h100x8", "gpu-lost", "healthy-h100x8"))
    assert before == healthy
    assert changes(before, during) == lost(healthy, 3)
    assert after == healthy


# ---- what is not there ----


def test_what_is_not_supported_says_so(reader: nvml.Reader, healthy: Readings) -> None:
    taken = reader.take("not-supported")
    seen = flat(taken["snapshot"])
    assert seen.pop("gpu.count host") == 8
    of_gpus = {key: value for key, value in seen.items() if of(key, range(8))}
    assert set(of_gpus) == {key for key in healthy if of(key, range(8)) and "link=" not in key}
    assert set(of_gpus.values()) == {NOT_SUPPORTED, "unsupported: the part has no NVLink"}
    assert taken["gpus"] == []


def test_functions_that_an_older_library_does_not_have(healthy: Readings, tmp_path: Path) -> None:
    older = nvml.build(tmp_path, without=nvml.TOO_NEW_FOR_R525)
    with nvml.Reader(older, tmp_path / "now") as reader:
        seen = readings(reader, "healthy-h100x8", "DriverVersion=525.147.05", "CudaDriverVersion=12000")
    assert changes(healthy, seen) == FAULTS["older-driver"]


@pytest.mark.parametrize(
    ("base", "lines", "count", "why"),
    [
        ("driver-not-loaded", [], 0, "unsupported: NVML: Driver Not Loaded"),
        ("healthy-h100x8", ["Init=!12"], 0, "unsupported: NVML: NVML Shared Library Not Found"),
        ("version-mismatch", [], None, "error: NVML: RM has detected an NVML/RM version mismatch."),
        ("healthy-h100x8", ["Init=!4"], None, "error: NVML: Insufficient Permissions"),
        ("healthy-h100x8", ["Init=!999"], None, UNKNOWN),
    ],
)
def test_only_a_driver_that_is_not_there_proves_that_no_gpu_is(
    reader: nvml.Reader, base: str, lines: list[str], count: int | None, why: str
) -> None:
    taken = reader.take(base, *lines)
    assert flat(taken["snapshot"]) == {
        "gpu.count host": why if count is None else count,
        "driver.version host": why,
        "driver.cuda_version host": why,
    }
    assert taken["gpus"] == []


def test_a_count_that_fails_is_told_as_such(reader: nvml.Reader) -> None:
    assert readings(reader, "healthy-h100x8", "Count=!999") == {
        "gpu.count host": UNKNOWN,
        "driver.version host": "550.90.07",
        "driver.cuda_version host": "12.4",
    }


@pytest.mark.parametrize("there", ["no library", "not a library"])
def test_a_host_without_a_driver_has_no_gpu(tmp_path: Path, there: str) -> None:
    if there == "not a library":
        (tmp_path / nvml.LIBRARY).write_text("")
    elif has_driver():
        pytest.skip("this machine has an NVIDIA driver")
    with nvml.Reader(tmp_path, tmp_path / "now") as reader:
        seen = readings(reader, "healthy-h100x8")
    not_found = "unsupported: NVML: NVML Shared Library Not Found"
    assert seen == {"gpu.count host": 0, "driver.version host": not_found, "driver.cuda_version host": not_found}


def has_driver() -> bool:
    try:
        ctypes.CDLL(nvml.LIBRARY)
    except OSError:
        return False
    return True


# ---- which GPUs ----


@pytest.mark.parametrize(
    ("devices", "found"), [([], [0, 1, 2, 3, 4, 5, 6, 7]), ([2, 5], [2, 5]), ([7], [7]), ([6, 9], [6])]
)
def test_chosen_devices_are_the_only_ones_read(
    reader: nvml.Reader, healthy: Readings, devices: list[int], found: list[int]
) -> None:
    taken = reader.take("healthy-h100x8", devices=devices)
    expected = {key: value for key, value in healthy.items() if of(key, found) or key.endswith(" host")}
    assert flat(taken["snapshot"]) == {**expected, "gpu.count host": len(found)}
    assert [gpu["index"] for gpu in taken["gpus"]] == found


# ---- what holds of every reading ----


@pytest.mark.parametrize(("name", "unit", "help"), [(row[0], row[1], row[3]) for row in collector.GPU_READINGS])
def test_a_reading_has_a_valid_name_a_known_unit_and_a_help(name: str, unit: str, help: str) -> None:
    valid = documents.validator("observation").schema["$defs"]["name"]["pattern"]
    assert re.fullmatch(valid, name)
    assert name.startswith("gpu.")
    assert unit in SUFFIX
    assert help


def test_no_reading_stands_twice() -> None:
    names = [row[0] for row in collector.GPU_READINGS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (3, Absent(status="unsupported", reason="NVML: Not Supported")),
        (2, Absent(status="unsupported", reason="NVML: Invalid Argument")),
        (13, Absent(status="unsupported", reason="NVML: Function Not Found")),
        (15, Absent(status="error", reason="NVML: GPU is lost")),
        (16, Absent(status="error", reason="NVML: GPU requires restart")),
        (10, Absent(status="error", reason="NVML: Timeout")),
        (424242, Absent(status="error", reason="NVML: NVML Error with code 424242")),
    ],
)
def test_an_nvml_error_becomes_a_reason(code: int, expected: Absent) -> None:
    assert collector.translate(collector.nvml.NVMLError(code)) == expected
