"""The NVML collector against a real library that answers from scenario files: what each fault changes, and nothing else."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pynvml
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
        "gpu.peer.link gpu=7,peer=0": "NV18",
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
        "gpu.peer.link gpu=0,peer=3": "NV18",
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
    "nvlink-down": {
        "gpu.nvlink.active gpu=5,link=11": False,
        "gpu.nvlink.active_links gpu=5": 17,
        **{f"gpu.peer.link gpu=5,peer={peer}": "NV17" for peer in (0, 1, 2, 3, 4, 6, 7)},
    },
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
        expected |= {key: None for key in healthy if of(key, [7]) or key.endswith("peer=7")}
    assert changes(healthy, readings(reader, name)) == expected


UNKNOWN = "error: NVML: Unknown Error"
NO_NVLINK = "unsupported: the part has no NVLink"
OTHERS = (0, 2, 3, 4, 5, 6, 7)
"""The peers of GPU 1."""

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
    "gpu.1.NvLinkState.4=!999": {
        "gpu.nvlink.active gpu=1,link=4": UNKNOWN,
        "gpu.nvlink.active_links gpu=1": UNKNOWN,
        **{f"gpu.peer.link gpu=1,peer={peer}": UNKNOWN for peer in OTHERS},
    },
    "gpu.1.NvLinkState.*=!3": {
        **{f"gpu.nvlink.active gpu=1,link={link}": None for link in range(18)},
        "gpu.nvlink.active_links gpu=1": NO_NVLINK,
        **{f"gpu.peer.link gpu=1,peer={peer}": NO_NVLINK for peer in OTHERS},
    },
    "gpu.1.P2PStatus.6.2=!999": {"gpu.peer.link gpu=1,peer=6": UNKNOWN},
    "gpu.1.NvLinkRemoteDeviceType.*=!3": {},
    "gpu.1.PciInfo=!999": {"gpu.pci_bus_id gpu=1": UNKNOWN},
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


# ---- what lies between two GPUs ----


def peers(seen: Readings) -> dict[tuple[int, int], object]:
    """GPU and peer -> what lies between."""
    found = ((re.fullmatch(r"gpu\.peer\.link gpu=(\d+),peer=(\d+)", key), value) for key, value in seen.items())
    return {(int(pair[1]), int(pair[2])): value for pair, value in found if pair}


@pytest.mark.parametrize(("name", "gpus"), [("healthy-h100x8", 8), ("healthy-h200x4", 4)])
def test_through_a_switch_every_pair_has_all_links(reader: nvml.Reader, name: str, gpus: int) -> None:
    every = {(gpu, peer): "NV18" for gpu in range(gpus) for peer in range(gpus) if gpu != peer}
    assert peers(readings(reader, name)) == every


def test_direct_links_count_for_the_peer_that_they_end_at(reader: nvml.Reader) -> None:
    seen = readings(reader, "direct-a100x4")
    assert seen["gpu.nvlink.active_links gpu=0"] == 12
    assert peers(seen) == {(gpu, peer): "NV4" for gpu in range(4) for peer in range(4) if gpu != peer}


def test_a_direct_link_that_is_down_costs_its_own_pair(reader: nvml.Reader) -> None:
    before, after = readings(reader, "direct-a100x4"), readings(reader, "direct-a100x4", "gpu.0.NvLinkState.5=0")
    assert changes(before, after) == {
        "gpu.nvlink.active gpu=0,link=5": False,
        "gpu.nvlink.active_links gpu=0": 11,
        "gpu.peer.link gpu=0,peer=2": "NV3",
    }


@pytest.mark.parametrize(
    ("line", "pairs"),
    [
        ("gpu.2.PciInfo=!999", [(0, 2), (1, 2), (3, 2)]),
        ("gpu.2.NvLinkRemotePciInfo.7=!999", [(2, 0), (2, 1), (2, 3)]),
    ],
)
def test_a_direct_link_with_an_unknown_end_is_not_counted_for_anybody(
    reader: nvml.Reader, line: str, pairs: list[tuple[int, int]]
) -> None:
    assert peers(readings(reader, "direct-a100x4", line)) == {
        (gpu, peer): UNKNOWN if (gpu, peer) in pairs else "NV4" for gpu in range(4) for peer in range(4) if gpu != peer
    }


def test_without_nvlink_the_path_over_pcie_is_told(reader: nvml.Reader) -> None:
    seen = readings(reader, "pcie-only")
    assert seen["gpu.nvlink.active_links gpu=0"] == NO_NVLINK
    assert peers(seen) == {
        (gpu, peer): "PIX" if gpu // 2 == peer // 2 else "NODE" if gpu // 4 == peer // 4 else "SYS"
        for gpu in range(8)
        for peer in range(8)
        if gpu != peer
    }


@pytest.mark.parametrize(
    ("answer", "path"), [("20", "PXB"), ("30", "PHB"), ("0", "X"), ("7", "unknown"), ("!3", NOT_SUPPORTED)]
)
def test_other_paths_over_pcie(reader: nvml.Reader, answer: str, path: str) -> None:
    seen = peers(readings(reader, "pcie-only", f"gpu.0.TopologyCommonAncestor.1={answer}"))
    assert (seen[0, 1], seen[1, 0]) == (path, "PIX")


def test_a_lost_gpu_is_in_no_pair(reader: nvml.Reader) -> None:
    rest = [gpu for gpu in range(8) if gpu != 3]
    assert peers(readings(reader, "gpu-lost")) == {(gpu, peer): "NV18" for gpu in rest for peer in rest if gpu != peer}


# ---- a GPU that is lost ----


def lost(healthy: Readings, gpu: int) -> Readings:
    """What changes when this GPU falls off the bus: all of its readings, its pairs, and the count."""
    own = {key: None if "link=" in key or "peer=" in key else LOST for key in healthy if of(key, [gpu])}
    return {**own, **{key: None for key in healthy if key.endswith(f"peer={gpu}")}, "gpu.count host": 7}


def of(key: str, gpus: Iterable[int]) -> bool:
    """Is this a reading of one of these GPUs?"""
    return key.split()[1].split(",")[0] in {f"gpu={gpu}" for gpu in gpus}


def test_a_lost_gpu_costs_its_own_readings_only(reader: nvml.Reader, healthy: Readings) -> None:
    taken = reader.take("gpu-lost")
    assert changes(healthy, flat(taken["snapshot"])) == lost(healthy, 3)
    assert [gpu["index"] for gpu in taken["gpus"]] == [0, 1, 2, 4, 5, 6, 7]


def test_a_lost_gpu_that_still_has_a_handle_gives_no_value(reader: nvml.Reader, healthy: Readings) -> None:
    seen = changes(healthy, readings(reader, "gpu-lost", "gpu.3.HandleByIndex=0"))
    own = {key for key in healthy if of(key, [3]) or key.endswith("peer=3")}
    assert own <= set(seen)
    assert {key for key in set(seen) - own if not of(key, [3])} == set()
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
    assert set(of_gpus.values()) == {NOT_SUPPORTED, NO_NVLINK}
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
    left_out = tuple(f"peer={index}" for index in range(8) if index not in found)
    expected = {
        key: value
        for key, value in healthy.items()
        if key.endswith(" host") or (of(key, found) and not key.endswith(left_out))
    }
    assert flat(taken["snapshot"]) == {**expected, "gpu.count host": len(found)}
    assert [gpu["index"] for gpu in taken["gpus"]] == found


# ---- many times a second ----

PULSE = """
import json, sys
from collectors.nvml import Pulse
try:
    pulse = Pulse(json.loads(sys.argv[1]))
    if len(sys.argv) > 3:  # what happens between start and reading
        with open(sys.argv[2], "a") as scenario:
            scenario.write(sys.argv[3])
    print(json.dumps(list(pulse.read().items()), default=lambda absent: absent.reason))
except OSError as error:
    print(json.dumps(str(error)))
"""


def pulse(library: Path, scenario: Path, devices: list[int], *later: str) -> object:
    """What Pulse reads, or the message of its OSError, in a process of its own."""
    return json.loads(nvml.python(["-c", PULSE, json.dumps(devices), scenario, *later], library, scenario))


@pytest.mark.parametrize(
    ("line", "power"),
    [
        ("gpu.1.FieldValues.186=401250", 401.25),
        ("gpu.1.FieldValues.186=!3", 69.877),
        ("gpu.1.FieldValues.186=0", 69.877),
        ("gpu.1.FieldValues=!13", 69.877),
    ],
    ids=["now", "not supported", "without a value", "no such function"],
)
def test_power_is_that_of_the_moment_where_the_part_tells_it(
    library: Path, tmp_path: Path, line: str, power: float
) -> None:
    hot = ("gpu.1.ClockInfo.1=1980", "gpu.1.CurrentClocksEventReasons=0x4", "gpu.1.Temperature.0=66")
    scenario = nvml.write(tmp_path / "now", "healthy-h100x8", line, *hot)
    assert pulse(library, scenario, [1]) == [[1, [power, 1980e6, 66.0, 4]]]


def test_the_pulse_is_of_the_chosen_gpus(library: Path) -> None:
    read = pulse(library, nvml.scenario("healthy-h200x4"), [3, 0])
    assert read == [[3, [76.291, 345e6, 28.0, 1]], [0, [79.064, 345e6, 29.0, 1]]]


def test_a_pulse_names_a_lost_gpu_and_its_siblings_beat_on(library: Path, tmp_path: Path) -> None:
    scenario = nvml.write(tmp_path / "now", "healthy-h100x8")
    for lost in (pulse(library, scenario, [2, 3], "gpu.3.*=!15\n"), pulse(library, nvml.scenario("gpu-lost"), [2, 3])):
        (first, beat), (second, reason) = lost  # type: ignore[misc, attr-defined]
        assert (first, len(beat)) == (2, 4)
        assert (second, reason) == (3, "NVML: GPU is lost")
    assert pulse(library, nvml.scenario("driver-not-loaded"), [0]) == "NVML: Driver Not Loaded"


# ---- what spoils figures ----

OBSTACLES = """
import json, sys
from collectors.nvml import obstacles
print(json.dumps(obstacles(json.loads(sys.argv[1]), share=bool(sys.argv[2]))))
"""


def obstacles(library: Path, scenario: Path, devices: Iterable[int] = range(8), *, share: bool = False) -> list[str]:
    """What `obstacles` finds, in a process of its own."""
    arguments = ["-c", OBSTACLES, json.dumps(list(devices)), "share" if share else ""]
    found: list[str] = json.loads(nvml.python(arguments, library, scenario))
    return found


MIG = "gpu=2 is divided by MIG: `nvidia-smi -i 2 -mig 0` makes it whole"


def test_an_idle_whole_gpu_is_no_obstacle(library: Path) -> None:
    assert obstacles(library, nvml.scenario("healthy-h100x8")) == []


@pytest.mark.parametrize("share", [False, True])
def test_mig_is_an_obstacle_even_where_gpus_are_shared(library: Path, share: bool) -> None:
    assert obstacles(library, nvml.scenario("mig-on"), share=share) == [MIG]
    assert obstacles(library, nvml.scenario("mig-on"), [0, 1, 3], share=share) == []


def test_a_busy_gpu_names_its_processes(library: Path, tmp_path: Path) -> None:
    lines = ("gpu.5.ComputeRunningProcesses=4711 4712 4713", "ProcessName.4711=/usr/bin/python3", "ProcessName.4712=!6")
    scenario = nvml.write(tmp_path / "now", "mig-on", *lines, "ProcessName.4713=" + "x" * 300)
    assert obstacles(library, scenario) == [
        MIG,
        "gpu=5 is in use by process 4711 (/usr/bin/python3)",
        "gpu=5 is in use by process 4712",
        f"gpu=5 is in use by process 4713 ({'x' * 64})",
    ]
    assert obstacles(library, scenario, share=True) == [MIG]
    assert obstacles(library, scenario, [0, 1]) == []


def test_a_gpu_full_of_processes_leaves_a_reason_that_a_record_takes(library: Path, tmp_path: Path) -> None:
    crowd = ("ComputeRunningProcesses=1 2 3 4 5 6 7 8", "ProcessName.?=" + "x" * 300)
    found = obstacles(library, nvml.write(tmp_path / "now", "healthy-h100x8", *crowd))
    assert (len(found), found[-1]) == (17, "48 more")
    assert len("; ".join(found)) < 2000


def test_a_lost_gpu_hides_no_obstacle_on_the_next(library: Path, tmp_path: Path) -> None:
    scenario = nvml.write(tmp_path / "now", "gpu-lost", "gpu.4.ComputeRunningProcesses=4711")
    assert obstacles(library, scenario) == ["gpu=4 is in use by process 4711"]
    assert obstacles(library, scenario, [3]) == []


@pytest.mark.parametrize("name", ["driver-not-loaded", "version-mismatch", "not-supported"])
def test_where_nvml_does_not_answer_there_is_no_obstacle(library: Path, name: str) -> None:
    assert obstacles(library, nvml.scenario(name)) == []


def test_without_a_library_there_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / nvml.LIBRARY).write_text("")
    assert obstacles(tmp_path, nvml.scenario("healthy-h100x8")) == []


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
    assert collector.translate(pynvml.NVMLError(code)) == expected
