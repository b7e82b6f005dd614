"""NVIDIA GPUs through NVML: identity, health and state. The only module that touches pynvml.

A host without a driver, a GPU that has fallen off the bus and a getter that a model lacks are readings like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pynvml as nvml

from collectors.base import HOST, Absent, Family, Labels, Value

Getter = Callable[[Any], Value]

MEMORY_ERROR = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
VOLATILE, AGGREGATE = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC

THROTTLE_REASONS = {
    "power_cap": nvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
    "sw_thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _ecc(kind: int, counter: int) -> Getter:
    return lambda gpu: int(nvml.nvmlDeviceGetTotalEccErrors(gpu, MEMORY_ERROR[kind], counter))


def _sram(gpu: Any) -> int:
    return int(nvml.nvmlDeviceGetMemoryErrorCounter(gpu, MEMORY_ERROR[1], AGGREGATE, nvml.NVML_MEMORY_LOCATION_SRAM))


def _clock(kind: int) -> Getter:
    return lambda gpu: nvml.nvmlDeviceGetClockInfo(gpu, kind) * 1_000_000


def _limit(get: Callable[[Any], int]) -> Getter:
    return lambda gpu: get(gpu) / 1000


def _remapped(place: int, kind: Callable[[int], Value]) -> Getter:
    return lambda gpu: kind(nvml.nvmlDeviceGetRemappedRows(gpu)[place])


def _share(what: str) -> Getter:
    return lambda gpu: getattr(nvml.nvmlDeviceGetUtilizationRates(gpu), what) / 100


# name, unit, is it a counter, help, how to read it from a device handle
GPU_READINGS: tuple[tuple[str, str, bool, str, Getter], ...] = (
    ("gpu.name", "1", False, "Product name", lambda gpu: _text(nvml.nvmlDeviceGetName(gpu))),
    ("gpu.serial", "1", False, "Serial of the board", lambda gpu: _text(nvml.nvmlDeviceGetSerial(gpu))),
    ("gpu.pci_bus_id", "1", False, "PCI address", lambda gpu: _text(nvml.nvmlDeviceGetPciInfo(gpu).busId)),
    ("gpu.vbios_version", "1", False, "VBIOS version", lambda gpu: _text(nvml.nvmlDeviceGetVbiosVersion(gpu))),
    ("gpu.part_number", "1", False, "Board part number", lambda gpu: _text(nvml.nvmlDeviceGetBoardPartNumber(gpu))),
    ("gpu.temperature", "Cel", False, "GPU temperature", lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, 0)),
    ("gpu.power", "W", False, "Power drawn", _limit(nvml.nvmlDeviceGetPowerUsage)),
    ("gpu.power_limit", "W", False, "Power limit in force", _limit(nvml.nvmlDeviceGetEnforcedPowerLimit)),
    ("gpu.power_limit_default", "W", False, "The part's power limit", _limit(nvml.nvmlDeviceGetPowerManagementDefaultLimit)),
    ("gpu.energy", "J", True, "Energy since driver load", _limit(nvml.nvmlDeviceGetTotalEnergyConsumption)),
    ("gpu.clock.sm", "Hz", False, "SM clock", _clock(nvml.NVML_CLOCK_SM)),
    ("gpu.clock.memory", "Hz", False, "Memory clock", _clock(nvml.NVML_CLOCK_MEM)),
    ("gpu.utilization", "ratio", False, "Share of time a kernel ran", _share("gpu")),
    ("gpu.memory.utilization", "ratio", False, "Share of time memory moved", _share("memory")),
    ("gpu.memory.total", "B", False, "Device memory", lambda gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)),
    ("gpu.memory.used", "B", False, "Device memory in use", lambda gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)),
    ("gpu.ecc.enabled", "1", False, "ECC in force", lambda gpu: bool(nvml.nvmlDeviceGetEccMode(gpu)[0])),
    ("gpu.ecc.corrected_volatile", "1", True, "Corrected errors since driver load", _ecc(0, VOLATILE)),
    ("gpu.ecc.uncorrectable_volatile", "1", True, "Uncorrectable errors since driver load", _ecc(1, VOLATILE)),
    ("gpu.ecc.corrected_aggregate", "1", True, "Corrected errors over the part's life", _ecc(0, AGGREGATE)),
    ("gpu.ecc.uncorrectable_aggregate", "1", True, "Uncorrectable errors over the part's life", _ecc(1, AGGREGATE)),
    ("gpu.ecc.uncorrectable_sram_aggregate", "1", True, "Uncorrectable SRAM errors over the part's life", _sram),
    ("gpu.remapped_rows.correctable", "1", True, "Rows remapped for correctable errors", _remapped(0, int)),
    ("gpu.remapped_rows.uncorrectable", "1", True, "Rows remapped for uncorrectable errors", _remapped(1, int)),
    ("gpu.remapped_rows.pending", "1", False, "A remapping waits for a reset", _remapped(2, bool)),
    ("gpu.remapped_rows.failed", "1", False, "A remapping has failed", _remapped(3, bool)),
    ("gpu.pcie.generation", "1", False, "PCIe generation in use", lambda gpu: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
    ("gpu.pcie.generation_max", "1", False, "PCIe generation of part and slot", nvml.nvmlDeviceGetMaxPcieLinkGeneration),
    ("gpu.pcie.width", "1", False, "PCIe lanes in use", lambda gpu: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
    ("gpu.pcie.width_max", "1", False, "PCIe lanes of part and slot", lambda gpu: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
    ("gpu.pcie.replays", "1", True, "PCIe replays", lambda gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu)),
    ("gpu.mig.enabled", "1", False, "MIG mode in force", lambda gpu: bool(nvml.nvmlDeviceGetMigMode(gpu)[0])),
    ("gpu.persistence.enabled", "1", False, "Persistence mode", lambda gpu: bool(nvml.nvmlDeviceGetPersistenceMode(gpu))),
    ("gpu.processes", "1", False, "Compute processes", lambda gpu: len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu))),
)  # fmt: skip


class NvmlCollector:
    """Reads every GPU, or those of the given NVML indices."""

    name = "nvml"

    def __init__(self, devices: Iterable[int] | None = None) -> None:
        self._chosen = None if devices is None else frozenset(devices)

    def collect(self) -> Iterable[Family]:
        count = Family(name="gpu.count", unit="1", help="GPUs that the driver answers for")
        driver = Family(name="driver.version", unit="1", help="NVIDIA driver version")
        cuda = Family(name="driver.cuda_version", unit="1", help="Newest CUDA that the driver can run")
        found = [count, driver, cuda]
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            why = translate(error)
            # Without a library or a loaded driver there is certainly no usable GPU; any other failure proves nothing.
            count.add(HOST, 0 if why.status == "unsupported" else why)
            driver.add(HOST, why)
            cuda.add(HOST, why)
            return found
        try:
            driver.add(HOST, _read(lambda: _text(nvml.nvmlSystemGetDriverVersion())))
            cuda.add(HOST, _read(_cuda_version))
            present = _read(nvml.nvmlDeviceGetCount)
            if isinstance(present, Absent):
                count.add(HOST, present)
                return found
            devices = dict(self._devices(present))
            count.add(HOST, sum(not isinstance(device, Absent) for device in devices.values()))
            found += self._families(devices)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        return found

    def _devices(self, present: int) -> Iterator[tuple[int, Any]]:
        for index in range(present):
            if self._chosen is None or index in self._chosen:
                yield index, _read(lambda index=index: nvml.nvmlDeviceGetHandleByIndex(index))  # type: ignore[misc]

    def _families(self, devices: dict[int, Any]) -> Iterator[Family]:
        uuid = Family(name="gpu.uuid", unit="1", help="UUID of the GPU")
        labels: dict[int, Labels] = {}
        for index, gpu in devices.items():
            known = gpu if isinstance(gpu, Absent) else _read(lambda gpu=gpu: _text(nvml.nvmlDeviceGetUUID(gpu)))  # type: ignore[misc]
            labels[index] = {"gpu": str(index)} | ({} if isinstance(known, Absent) else {"uuid": str(known)})
            uuid.add(labels[index], known)
        yield uuid
        for name, unit, counter, text, getter in GPU_READINGS:
            family = Family(name=name, unit=unit, help=text, counter=counter)
            for index, gpu in devices.items():
                family.add(labels[index], gpu if isinstance(gpu, Absent) else _read(lambda: getter(gpu)))  # noqa: B023
            yield family
        yield _throttling(devices, labels)
        yield from _nvlink(devices, labels)


class Pulse:
    """The few readings of chosen GPUs that are worth taking many times a second: under a millisecond a GPU."""

    def __init__(self, devices: Iterable[int]) -> None:
        nvml.nvmlInit()
        self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in devices}

    def read(self) -> dict[int, tuple[float, float, float, int]]:
        """NVML index -> power in W, SM clock in Hz, temperature in °C, mask of clock event reasons. Raises OSError."""
        try:
            return {
                index: (
                    _power_now(gpu),
                    nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6,
                    float(nvml.nvmlDeviceGetTemperature(gpu, 0)),
                    _clock_reasons(gpu),
                )
                for index, gpu in self._handles.items()
            }
        except nvml.NVMLError as error:
            raise OSError(translate(error).reason) from None


def _power_now(gpu: Any) -> float:
    """Power at this moment; what `nvmlDeviceGetPowerUsage` gives is from Ampere on a mean over the last second."""
    (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn == nvml.NVML_SUCCESS and field.value.uiVal:
        return float(field.value.uiVal) / 1000
    return float(nvml.nvmlDeviceGetPowerUsage(gpu)) / 1000


def obstacles(devices: Iterable[int], *, share: bool = False) -> list[str]:
    """What would spoil figures of these GPUs: MIG, which makes them slices, and, unless they may `share`, the processes of others."""
    found = []
    try:
        nvml.nvmlInit()
        for index in devices:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            if _read(lambda: nvml.nvmlDeviceGetMigMode(gpu)[0]) == nvml.NVML_DEVICE_MIG_ENABLE:  # noqa: B023
                found.append(f"gpu={index} is divided by MIG: `nvidia-smi -i {index} -mig 0` makes it whole")
            running = [] if share else _read(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))  # noqa: B023
            for process in [] if isinstance(running, Absent) else running:
                name = _read(lambda: _text(nvml.nvmlSystemGetProcessName(process.pid)))  # noqa: B023
                who = f" ({name})" if isinstance(name, str) else ""
                found.append(f"gpu={index} is in use by process {process.pid}{who}")
    except nvml.NVMLError:
        return found  # a GPU that does not answer is told by the collector
    return found


def _throttling(devices: dict[int, Any], labels: dict[int, Labels]) -> Family:
    family = Family(name="gpu.throttle.active", unit="1", help="Clocks are held down for this reason")
    for index, gpu in devices.items():
        bits = gpu if isinstance(gpu, Absent) else _read(lambda: _clock_reasons(gpu))  # noqa: B023
        for reason, mask in THROTTLE_REASONS.items():
            family.add(
                {**labels[index], "reason": reason}, bits if isinstance(bits, Absent) else bool(int(bits) & mask)
            )
    return family


def _clock_reasons(gpu: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    except nvml.NVMLError_FunctionNotFound:  # drivers before R535 have it under its old name only
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu))


def _nvlink(devices: dict[int, Any], labels: dict[int, Labels]) -> Iterator[Family]:
    state = Family(name="gpu.nvlink.active", unit="1", help="The NVLink is up")
    active = Family(name="gpu.nvlink.active_links", unit="1", help="NVLinks that are up")
    for index, gpu in devices.items():
        if isinstance(gpu, Absent):
            active.add(labels[index], gpu)
            continue
        links: dict[int, Value | Absent] = {}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            seen = _read(lambda: bool(nvml.nvmlDeviceGetNvLinkState(gpu, link)))  # noqa: B023
            if isinstance(seen, Absent) and seen.status == "unsupported":
                break  # links are numbered from 0; the first that the part does not have ends the list
            links[link] = seen
            state.add({**labels[index], "link": str(link)}, seen)
        broken = next((seen for seen in links.values() if isinstance(seen, Absent)), None)
        none = Absent(status="unsupported", reason="the part has no NVLink")
        active.add(labels[index], broken or (sum(seen is True for seen in links.values()) if links else none))
    yield from (state, active)


def _cuda_version() -> str:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except nvml.NVMLError as error:
        return translate(error)
    except UnicodeDecodeError as error:  # pynvml decodes; a part with a damaged InfoROM answers with any bytes
        return Absent(status="error", reason=f"NVML: {error}")


_UNSUPPORTED = (
    nvml.NVML_ERROR_NOT_SUPPORTED,
    nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    nvml.NVML_ERROR_DRIVER_NOT_LOADED,
    nvml.NVML_ERROR_INVALID_ARGUMENT,
)


def translate(error: nvml.NVMLError) -> Absent:
    """An NVML error as the reason why a reading is not there."""
    status = "unsupported" if error.value in _UNSUPPORTED else "error"
    return Absent(status=status, reason=f"NVML: {error}")
