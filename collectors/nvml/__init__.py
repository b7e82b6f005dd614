"""NVIDIA GPUs through NVML: identity, health and state. The only package that touches pynvml.

A host without a driver, a GPU that has fallen off the bus and a getter that a model lacks are readings like any other.
"""

from collectors.nvml.calls import translate
from collectors.nvml.clocks import THROTTLE_REASONS
from collectors.nvml.collector import NvmlCollector
from collectors.nvml.pulse import Beat, Pulse
from collectors.nvml.readings import GPU_READINGS
from collectors.nvml.tenants import obstacles

__all__ = ["GPU_READINGS", "THROTTLE_REASONS", "Beat", "NvmlCollector", "Pulse", "obstacles", "translate"]
