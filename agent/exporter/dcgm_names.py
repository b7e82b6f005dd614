"""Export the collectors' families under the names of NVIDIA's dcgm-exporter, so that its dashboards work unchanged.

Names and units are those of the fields in dcgm-exporter's default-counters.csv, including fields that are commented out there.
Labels are those of dcgm-exporter. All metrics are untyped, because prometheus_client appends `_total` to the name of a counter,
and `DCGM_FI_*` names do not end with it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric, UnknownMetricFamily

from collectors.base import Absent, Family, Value
from schemas.scopes import pci_address

MIB = 1 << 20
FIELDS: tuple[tuple[str, str, float, str], ...] = (
    ("DCGM_FI_DEV_SM_CLOCK", "gpu.clock.sm", 1e-6, "SM clock frequency (in MHz)."),
    ("DCGM_FI_DEV_MEM_CLOCK", "gpu.clock.memory", 1e-6, "Memory clock frequency (in MHz)."),
    ("DCGM_FI_DEV_GPU_TEMP", "gpu.temperature", 1.0, "GPU temperature (in C)."),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gpu.memory.temperature", 1.0, "Memory temperature (in C)."),
    ("DCGM_FI_DEV_POWER_USAGE", "gpu.power", 1.0, "Power draw (in W)."),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "gpu.energy", 1e3, "Total energy consumption since boot (in mJ)."),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "gpu.pcie.replays", 1.0, "Total number of PCIe retries."),
    ("DCGM_FI_DEV_GPU_UTIL", "gpu.utilization", 1e2, "GPU utilization (in %)."),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gpu.memory.utilization", 1e2, "Memory utilization (in %)."),
    ("DCGM_FI_DEV_FB_USED", "gpu.memory.used", 1 / MIB, "Framebuffer memory used (in MiB)."),
    (
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "gpu.remapped_rows.uncorrectable",
        1.0,
        "Number of remapped rows for uncorrectable errors",
    ),
    (
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "gpu.remapped_rows.correctable",
        1.0,
        "Number of remapped rows for correctable errors",
    ),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gpu.remapped_rows.failed", 1.0, "Whether remapping of rows has failed"),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "gpu.ecc.corrected_volatile", 1.0, "Single-bit volatile ECC errors"),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "gpu.ecc.uncorrectable_volatile", 1.0, "Double-bit volatile ECC errors"),
    ("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "gpu.ecc.corrected_aggregate", 1.0, "Single-bit persistent ECC errors"),
    ("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", "gpu.ecc.uncorrectable_aggregate", 1.0, "Double-bit persistent ECC errors"),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gpu.gpm.graphics_active", 1.0, "Ratio of time the graphics engine is active."),
    ("DCGM_FI_PROF_SM_ACTIVE", "gpu.gpm.sm_active", 1.0, "Ratio of cycles an SM has at least one warp assigned."),
    ("DCGM_FI_PROF_SM_OCCUPANCY", "gpu.gpm.sm_occupancy", 1.0, "Ratio of warps resident on an SM."),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gpu.gpm.tensor_active", 1.0, "Ratio of cycles the tensor pipe is active."),
    ("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "gpu.gpm.fp64_active", 1.0, "Ratio of cycles the fp64 pipes are active."),
    ("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "gpu.gpm.fp32_active", 1.0, "Ratio of cycles the fp32 pipes are active."),
    ("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "gpu.gpm.fp16_active", 1.0, "Ratio of cycles the fp16 pipes are active."),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gpu.gpm.memory_active", 1.0, "Ratio of cycles the memory interface is active."),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "gpu.gpm.pcie_sent", 1.0, "Rate of data sent over PCIe, in bytes per second."),
    ("DCGM_FI_PROF_PCIE_RX_BYTES", "gpu.gpm.pcie_received", 1.0, "Rate of data received over PCIe, in bytes per second."),
    ("DCGM_FI_PROF_NVLINK_TX_BYTES", "gpu.gpm.nvlink_sent", 1.0, "Rate of data sent over NVLink, in bytes per second."),
    ("DCGM_FI_PROF_NVLINK_RX_BYTES", "gpu.gpm.nvlink_received", 1.0,
     "Rate of data received over NVLink, in bytes per second."),
)  # fmt: skip
"""Name in dcgm-exporter, name of the collectors' family, factor from the family's unit to dcgm-exporter's unit, help text."""
FREE, XID = "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_XID_ERRORS"
HELP: Mapping[str, str] = {
    **{name: text for name, _, _, text in FIELDS},
    FREE: "Framebuffer memory free (in MiB).",
    XID: "Value of the last XID error encountered.",
}

Readings = Mapping[str, Mapping[str, Value]]
"""Family -> GPU index -> value."""


class DcgmRenamer:
    """Converts readings to dcgm-exporter's metrics. Missing readings have no series."""

    def __init__(self) -> None:
        self._xid_counts: dict[tuple[str, str], float] = {}
        self._last_xids: dict[str, float] = {}

    def __call__(self, families: Iterable[Family]) -> Iterator[Metric]:
        by_name = {family.name: family for family in families}
        readings = {
            name: {
                labels["gpu"]: value
                for labels, value in family.readings
                if set(labels) <= {"gpu", "uuid"} and "gpu" in labels and not isinstance(value, Absent)
            }
            for name, family in by_name.items()
        }
        host = socket.gethostname()
        for name, source, factor, text in FIELDS:
            values = {
                gpu: float(value) * factor for gpu, value in readings.get(source, {}).items() if _is_number(value)
            }
            yield from _metric(name, text, values, readings, host)
        total, used = readings.get("gpu.memory.total", {}), readings.get("gpu.memory.used", {})
        free = {gpu: (float(total[gpu]) - float(used[gpu])) / MIB for gpu in total if gpu in used}
        yield from _metric(FREE, HELP[FREE], free, readings, host)
        yield from _metric(XID, HELP[XID], self._xids(by_name, readings), readings, host)

    def _xids(self, by_name: Mapping[str, Family], readings: Readings) -> dict[str, float]:
        """Return GPU index -> last XID of that GPU; 0 if it had none. The result is empty if the kernel log cannot be read.

        If a GPU had several XIDs since the previous call, the highest of them counts as the last.
        """
        log = by_name.get("xid.last_seen")
        if log is None or any(isinstance(value, Absent) for _, value in log.readings):
            return {}
        counts = by_name["xid.count"].readings if "xid.count" in by_name else []
        for labels, value in sorted(counts, key=lambda reading: int(reading[0]["xid"])):
            key, count = (labels["pci"], labels["xid"]), 0.0 if isinstance(value, Absent) else float(value)
            if count > self._xid_counts.get(key, 0.0):
                self._last_xids[labels["pci"]] = float(labels["xid"])
            self._xid_counts[key] = count
        addresses = readings.get("gpu.pci_bus_id", {})
        return {gpu: self._last_xids.get(pci_address(str(address)), 0.0) for gpu, address in addresses.items()}


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float)


def _metric(name: str, text: str, values: Mapping[str, float], readings: Readings, host: str) -> Iterator[Metric]:
    if not values:
        return
    metric = UnknownMetricFamily(name, text)
    for gpu, value in values.items():
        identity = {
            label: str(readings.get(family, {}).get(gpu, ""))
            for label, family in (("UUID", "gpu.uuid"), ("pci_bus_id", "gpu.pci_bus_id"), ("modelName", "gpu.name"))
        }
        metric.add_sample(name, {"gpu": gpu, "device": f"nvidia{gpu}", "Hostname": host, **identity}, value)
    yield metric
