"""NVIDIA GPUs through NVML: identity, health and state. The only package that imports pynvml.

If the driver is missing, a GPU fell off the bus or does not answer, or a model does not support a query, the readings are absent,
with the reason, and nothing is raised. Only `FastReader` raises OSError if NVML cannot be opened.
"""

from collectors.nvml.calls import NotOpened
from collectors.nvml.clocks import THROTTLE_REASONS
from collectors.nvml.collector import NvmlCollector
from collectors.nvml.conflicts import MAX_CONFLICTS, compute_processes, gpu_conflicts, shortened
from collectors.nvml.fast_reader import FastReader, GpuLimits, GpuSample, PowerSample, gpu_indices
from collectors.nvml.gpm import GPM_KINDS
from collectors.nvml.links import LINK_KINDS
from collectors.nvml.readings import GPU_READINGS, absent_samples, reading_kinds

__all__ = [
    "GPM_KINDS",
    "GPU_READINGS",
    "LINK_KINDS",
    "MAX_CONFLICTS",
    "THROTTLE_REASONS",
    "FastReader",
    "GpuLimits",
    "GpuSample",
    "NotOpened",
    "NvmlCollector",
    "PowerSample",
    "absent_samples",
    "compute_processes",
    "gpu_conflicts",
    "gpu_indices",
    "reading_kinds",
    "shortened",
]
