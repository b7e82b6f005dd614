"""The GPU's memory: size, ECC errors, remapped rows, retired pages, repairs."""

from __future__ import annotations

import ctypes

import pynvml as nvml

from collectors.nvml.calls import binding
from collectors.nvml.gpu import MEMORY_TEMPERATURE, NvmlGpu, field_value
from collectors.nvml.rows import (
    ALWAYS,
    CONSTANT,
    COUNTER,
    ONCE,
    SLOW,
    SNAPSHOT_ONLY,
    VARIES,
    Getter,
    Row,
    attribute,
    count,
    flag,
    item,
)

CORRECTED, UNCORRECTED = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
VOLATILE, AGGREGATE = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC
_TWO_WORDS = 8 | 1 << 24
"""NVML's version number (1, with the size of 8 bytes) for a structure of two 4-byte words."""
_SINGLE_BIT, _DOUBLE_BIT = 0, 1
"""NVML's causes of a page retirement: several corrected (single-bit) errors, or one uncorrectable (double-bit) error."""


def _unrepairable(gpu: NvmlGpu) -> bool:
    """Return whether the memory has faults that cannot be repaired.

    nvidia-ml-py declares a structure of two words: version and flag. nvml.h declares only the flag. A driver that follows nvml.h
    overwrites the first word with the flag and does not set the second.
    """
    words = (ctypes.c_uint * 2)(_TWO_WORDS, 0)
    gpu.query_into_with("nvmlDeviceGetUnrepairableMemoryFlag_v1", words)
    return bool(words[1] if words[0] == _TWO_WORDS else words[0])


def _sram_threshold(gpu: NvmlGpu) -> bool:
    status = binding("c_nvmlEccSramErrorStatus_v1_t")()
    gpu.query_into("SramEccErrorStatus", status)
    return bool(status.bThresholdExceeded)


def change_pending(getter: str) -> Getter:
    """Return a getter that returns whether the next reset changes the setting."""

    def get(gpu: NvmlGpu) -> bool:
        current, pending = gpu.query(getter)
        return bool(current != pending)

    return get


def _pages(gpu: NvmlGpu) -> int:
    return sum(len(gpu.query("RetiredPages", cause)) for cause in (_SINGLE_BIT, _DOUBLE_BIT))


_SRAM, _DRAM = nvml.NVML_MEMORY_LOCATION_SRAM, nvml.NVML_MEMORY_LOCATION_DEVICE_MEMORY


def _errors(name: str, kind: int, counter: int, location: int, pace: str = ALWAYS) -> Row:
    memory = "SRAM" if location == _SRAM else "DRAM"
    severity = "Corrected" if kind == CORRECTED else "Uncorrectable"
    period = "over the part's life" if counter == AGGREGATE else "since driver load"
    get = count("MemoryErrorCounter", kind, counter, location)
    return Row(name, "1", COUNTER, f"{severity} {memory} errors {period}", get, pace)


_BANKS = {"max": "all", "high": "most", "partial": "some", "low": "few", "none": "none"}

MEMORY_ROWS = (
    Row("gpu.memory.total", "B", CONSTANT, "Device memory", attribute("MemoryInfo", "total")),
    Row("gpu.memory.used", "B", VARIES, "Device memory in use", attribute("MemoryInfo", "used")),
    Row("gpu.memory.temperature", "Cel", VARIES, "Memory temperature", lambda gpu: field_value(gpu.field(MEMORY_TEMPERATURE))),
    Row("gpu.memory.bus_width", "1", CONSTANT, "Width of the memory bus in bits", count("MemoryBusWidth"), ONCE),
    Row("gpu.bar1.total", "B", CONSTANT, "Size of BAR1, the window to device memory",
        attribute("BAR1MemoryInfo", "bar1Total"), ONCE),
    Row("gpu.bar1.used", "B", VARIES, "BAR1 in use", attribute("BAR1MemoryInfo", "bar1Used"), SLOW),
    Row("gpu.ecc.enabled", "1", VARIES, "ECC is active", item("EccMode", 0, bool), SLOW),
    Row("gpu.ecc.change_pending", "1", VARIES, "The next reset changes the ECC mode", change_pending("EccMode"), SLOW),
    Row("gpu.ecc.corrected_volatile", "1", COUNTER, "Corrected errors since driver load",
        count("TotalEccErrors", CORRECTED, VOLATILE)),
    Row("gpu.ecc.uncorrectable_volatile", "1", COUNTER, "Uncorrectable errors since driver load",
        count("TotalEccErrors", UNCORRECTED, VOLATILE)),
    Row("gpu.ecc.corrected_aggregate", "1", COUNTER, "Corrected errors over the part's life",
        count("TotalEccErrors", CORRECTED, AGGREGATE)),
    Row("gpu.ecc.uncorrectable_aggregate", "1", COUNTER, "Uncorrectable errors over the part's life",
        count("TotalEccErrors", UNCORRECTED, AGGREGATE)),
    _errors("gpu.ecc.uncorrectable_sram_aggregate", UNCORRECTED, AGGREGATE, _SRAM),
    _errors("gpu.ecc.uncorrectable_sram_volatile", UNCORRECTED, VOLATILE, _SRAM, SNAPSHOT_ONLY),
    _errors("gpu.ecc.uncorrectable_dram_aggregate", UNCORRECTED, AGGREGATE, _DRAM, SNAPSHOT_ONLY),
    _errors("gpu.ecc.uncorrectable_dram_volatile", UNCORRECTED, VOLATILE, _DRAM, SNAPSHOT_ONLY),
    _errors("gpu.ecc.corrected_sram_aggregate", CORRECTED, AGGREGATE, _SRAM, SNAPSHOT_ONLY),
    _errors("gpu.ecc.corrected_sram_volatile", CORRECTED, VOLATILE, _SRAM, SNAPSHOT_ONLY),
    _errors("gpu.ecc.corrected_dram_aggregate", CORRECTED, AGGREGATE, _DRAM, SNAPSHOT_ONLY),
    _errors("gpu.ecc.corrected_dram_volatile", CORRECTED, VOLATILE, _DRAM, SNAPSHOT_ONLY),
    Row("gpu.ecc.sram_threshold_exceeded", "1", VARIES, "SRAM errors exceed the threshold of NVIDIA's field diagnostics",
        _sram_threshold, SNAPSHOT_ONLY),
    Row("gpu.remapped_rows.correctable", "1", COUNTER, "Rows remapped for correctable errors", item("RemappedRows", 0, int)),
    Row("gpu.remapped_rows.uncorrectable", "1", COUNTER, "Rows remapped for uncorrectable errors", item("RemappedRows", 1, int)),
    Row("gpu.remapped_rows.pending", "1", VARIES, "A row remapping is pending a reset", item("RemappedRows", 2, bool)),
    Row("gpu.remapped_rows.failed", "1", VARIES, "A row remapping has failed", item("RemappedRows", 3, bool)),
    *(Row(f"gpu.remapped_rows.banks_{level}", "1", VARIES, f"Memory banks with {share} of their spare rows left",
          attribute("RowRemapperHistogram", level), SNAPSHOT_ONLY) for level, share in _BANKS.items()),
    Row("gpu.retired_pages.count", "1", COUNTER, "Retired memory pages (parts before Ampere)", _pages, SNAPSHOT_ONLY),
    Row("gpu.retired_pages.pending", "1", VARIES, "A page retirement is pending a reset",
        flag("RetiredPagesPendingStatus"), SNAPSHOT_ONLY),
    Row("gpu.memory.unrepairable", "1", VARIES, "Memory has faults that cannot be repaired",
        _unrepairable, SNAPSHOT_ONLY),
    Row("gpu.repair.channel_pending", "1", VARIES, "A memory channel repair is pending a reset",
        item("RepairStatus", 0, bool), SNAPSHOT_ONLY),
    Row("gpu.repair.tpc_pending", "1", VARIES, "A processing cluster (TPC) repair is pending a reset",
        item("RepairStatus", 1, bool), SNAPSHOT_ONLY),
)  # fmt: skip
