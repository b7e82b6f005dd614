"""The collectors' families under the names of NVIDIA's dcgm-exporter, so that dashboards made for it work unchanged.

Names, units and labels are those of dcgm-exporter's default-counters.csv. `DCGM_FI_*` counters have no `_total`, which the text
format would add to a counter, so all are untyped.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric, UnknownMetricFamily

from collectors.base import Absent, Family, Value

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
)
"""dcgm-exporter's name, our family, the factor from our SI unit to its own, its help text."""

Readings = Mapping[str, Mapping[str, Value]]
"""Family -> GPU index -> value."""


def renamed(families: Iterable[Family]) -> Iterator[Metric]:
    """The same readings as dcgm-exporter gives them; what was not read is left out."""
    readings = {
        family.name: {
            labels["gpu"]: value
            for labels, value in family.readings
            if set(labels) <= {"gpu", "uuid"} and "gpu" in labels and not isinstance(value, Absent)
        }
        for family in families
    }
    host = socket.gethostname()
    for name, ours, factor, about in FIELDS:
        values = {gpu: float(value) * factor for gpu, value in readings.get(ours, {}).items() if _number(value)}
        yield from _family(name, about, values, readings, host)
    total, used = readings.get("gpu.memory.total", {}), readings.get("gpu.memory.used", {})
    free = {gpu: (float(total[gpu]) - float(used[gpu])) / MIB for gpu in total if gpu in used}
    yield from _family("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).", free, readings, host)


def _number(value: Value) -> bool:
    return isinstance(value, int | float)


def _family(name: str, about: str, values: Mapping[str, float], readings: Readings, host: str) -> Iterator[Metric]:
    if not values:
        return
    metric = UnknownMetricFamily(name, about)
    for gpu, value in values.items():
        identity = {
            label: str(readings.get(family, {}).get(gpu, ""))
            for label, family in (("UUID", "gpu.uuid"), ("pci_bus_id", "gpu.pci_bus_id"), ("modelName", "gpu.name"))
        }
        metric.add_sample(name, {"gpu": gpu, "device": f"nvidia{gpu}", "Hostname": host, **identity}, value)
    yield metric
