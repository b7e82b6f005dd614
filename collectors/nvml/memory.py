"""The GPU's memory: size, ECC errors, rows remapped, pages retired, repairs."""

from __future__ import annotations

import ctypes

import pynvml as nvml

from collectors.nvml.calls import binding
from collectors.nvml.gpu import MEMORY_TEMPERATURE, Gpu, value
from collectors.nvml.rows import ALWAYS, ONCE, SLOW, THOROUGH, Getter, Row, count, flag, part, place

CORRECTED, UNCORRECTED = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
VOLATILE, AGGREGATE = nvml.NVML_VOLATILE_ECC, nvml.NVML_AGGREGATE_ECC
_TWO_WORDS = 8 | 1 << 24
"""What a driver expects in the first word if the structure has a version."""
_SINGLE_BIT, _DOUBLE_BIT = 0, 1
"""Why a page was retired: several corrected errors, or one that could not be."""


def _unrepairable(gpu: Gpu) -> bool:
    """NVML's structure is one word; nvidia-ml-py reads the second of two, where no driver may ever write."""
    words = (ctypes.c_uint * 2)(_TWO_WORDS, 0)
    gpu.fill_by("nvmlDeviceGetUnrepairableMemoryFlag_v1", words)
    return bool(words[1] if words[0] == _TWO_WORDS else words[0])


def _sram_threshold(gpu: Gpu) -> bool:
    status = binding("c_nvmlEccSramErrorStatus_v1_t")()
    gpu.fill("SramEccErrorStatus", status)
    return bool(status.bThresholdExceeded)


def differs(getter: str) -> Getter:
    """Whether what is set will be another from the next reset on."""

    def get(gpu: Gpu) -> bool:
        now, pending = gpu.ask(getter)
        return bool(now != pending)

    return get


def _pages(gpu: Gpu) -> int:
    return sum(len(gpu.ask("RetiredPages", cause)) for cause in (_SINGLE_BIT, _DOUBLE_BIT))


_SRAM, _DRAM = nvml.NVML_MEMORY_LOCATION_SRAM, nvml.NVML_MEMORY_LOCATION_DEVICE_MEMORY


def _errors(name: str, kind: int, counter: int, location: int, pace: str = ALWAYS) -> Row:
    where = "SRAM" if location == _SRAM else "DRAM"
    what = "Corrected" if kind == CORRECTED else "Uncorrectable"
    when = "over the part's life" if counter == AGGREGATE else "since driver load"
    get = count("MemoryErrorCounter", kind, counter, location)
    return Row(name, "1", True, f"{what} {where} errors {when}", get, pace)


_BANKS = {"max": "all", "high": "most", "partial": "some", "low": "few", "none": "none"}

MEMORY_ROWS = (
    Row("gpu.memory.total", "B", False, "Device memory", part("MemoryInfo", "total")),
    Row("gpu.memory.used", "B", False, "Device memory in use", part("MemoryInfo", "used")),
    Row("gpu.memory.temperature", "Cel", False, "Memory temperature", lambda gpu: value(gpu.field(MEMORY_TEMPERATURE))),
    Row("gpu.memory.bus_width", "1", False, "Width of the memory bus in bits", count("MemoryBusWidth"), ONCE),
    Row("gpu.bar1.total", "B", False, "BAR1, the window through which others reach device memory",
        part("BAR1MemoryInfo", "bar1Total"), ONCE),
    Row("gpu.bar1.used", "B", False, "BAR1 in use", part("BAR1MemoryInfo", "bar1Used"), SLOW),
    Row("gpu.ecc.enabled", "1", False, "ECC in force", place("EccMode", 0, bool), SLOW),
    Row("gpu.ecc.change_pending", "1", False, "ECC will be another from the next reset on", differs("EccMode"), SLOW),
    Row("gpu.ecc.corrected_volatile", "1", True, "Corrected errors since driver load",
        count("TotalEccErrors", CORRECTED, VOLATILE)),
    Row("gpu.ecc.uncorrectable_volatile", "1", True, "Uncorrectable errors since driver load",
        count("TotalEccErrors", UNCORRECTED, VOLATILE)),
    Row("gpu.ecc.corrected_aggregate", "1", True, "Corrected errors over the part's life",
        count("TotalEccErrors", CORRECTED, AGGREGATE)),
    Row("gpu.ecc.uncorrectable_aggregate", "1", True, "Uncorrectable errors over the part's life",
        count("TotalEccErrors", UNCORRECTED, AGGREGATE)),
    _errors("gpu.ecc.uncorrectable_sram_aggregate", UNCORRECTED, AGGREGATE, _SRAM),
    _errors("gpu.ecc.uncorrectable_sram_volatile", UNCORRECTED, VOLATILE, _SRAM, THOROUGH),
    _errors("gpu.ecc.uncorrectable_dram_aggregate", UNCORRECTED, AGGREGATE, _DRAM, THOROUGH),
    _errors("gpu.ecc.uncorrectable_dram_volatile", UNCORRECTED, VOLATILE, _DRAM, THOROUGH),
    _errors("gpu.ecc.corrected_sram_aggregate", CORRECTED, AGGREGATE, _SRAM, THOROUGH),
    _errors("gpu.ecc.corrected_sram_volatile", CORRECTED, VOLATILE, _SRAM, THOROUGH),
    _errors("gpu.ecc.corrected_dram_aggregate", CORRECTED, AGGREGATE, _DRAM, THOROUGH),
    _errors("gpu.ecc.corrected_dram_volatile", CORRECTED, VOLATILE, _DRAM, THOROUGH),
    Row("gpu.ecc.sram_threshold_exceeded", "1", False, "More SRAM errors than the maker's field diagnostics accept",
        _sram_threshold, THOROUGH),
    Row("gpu.remapped_rows.correctable", "1", True, "Rows remapped for correctable errors", place("RemappedRows", 0, int)),
    Row("gpu.remapped_rows.uncorrectable", "1", True, "Rows remapped for uncorrectable errors", place("RemappedRows", 1, int)),
    Row("gpu.remapped_rows.pending", "1", False, "A remapping waits for a reset", place("RemappedRows", 2, bool)),
    Row("gpu.remapped_rows.failed", "1", False, "A remapping has failed", place("RemappedRows", 3, bool)),
    *(Row(f"gpu.remapped_rows.banks_{left}", "1", False, f"Memory banks with {how} of their spare rows left",
          part("RowRemapperHistogram", left), THOROUGH) for left, how in _BANKS.items()),
    Row("gpu.retired_pages.count", "1", True, "Memory pages retired (parts before Ampere)", _pages, THOROUGH),
    Row("gpu.retired_pages.pending", "1", False, "A page is retired at the next reset",
        flag("RetiredPagesPendingStatus"), THOROUGH),
    Row("gpu.memory.unrepairable", "1", False, "Memory has faults that cannot be repaired",
        _unrepairable, THOROUGH),
    Row("gpu.repair.channel_pending", "1", False, "A memory channel is repaired at the next reset",
        place("RepairStatus", 0, bool), THOROUGH),
    Row("gpu.repair.tpc_pending", "1", False, "A processing cluster is repaired at the next reset",
        place("RepairStatus", 1, bool), THOROUGH),
)  # fmt: skip
