"""One row a reading of a GPU: what it is called, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml as nvml

from collectors.base import Value
from collectors.nvml.calls import text

Getter = Callable[[Any], Value]

MEMORY_ERROR = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
VOLATILE, AGGREGATE = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC


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
    ("gpu.name", "1", False, "Product name", lambda gpu: text(nvml.nvmlDeviceGetName(gpu))),
    ("gpu.serial", "1", False, "Serial of the board", lambda gpu: text(nvml.nvmlDeviceGetSerial(gpu))),
    ("gpu.pci_bus_id", "1", False, "PCI address", lambda gpu: text(nvml.nvmlDeviceGetPciInfo(gpu).busId)),
    ("gpu.vbios_version", "1", False, "VBIOS version", lambda gpu: text(nvml.nvmlDeviceGetVbiosVersion(gpu))),
    ("gpu.part_number", "1", False, "Board part number", lambda gpu: text(nvml.nvmlDeviceGetBoardPartNumber(gpu))),
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
