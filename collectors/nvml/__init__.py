"""NVIDIA GPUs through NVML: identity, health and state. The only package that touches pynvml.

A host without a driver, a GPU that has fallen off the bus, one that does not answer and a getter that a model lacks are readings
like any other.
"""

from collectors.nvml.calls import translate
from collectors.nvml.clocks import THROTTLE_REASONS
from collectors.nvml.collector import NvmlCollector
from collectors.nvml.gpm import GPM_KINDS
from collectors.nvml.links import LINK_KINDS
from collectors.nvml.pulse import Beat, Bounds, Pulse, present
from collectors.nvml.readings import GPU_READINGS, kinds, unanswered
from collectors.nvml.tenants import obstacles

__all__ = [
    "GPM_KINDS",
    "GPU_READINGS",
    "LINK_KINDS",
    "THROTTLE_REASONS",
    "Beat",
    "Bounds",
    "NvmlCollector",
    "Pulse",
    "kinds",
    "obstacles",
    "present",
    "translate",
    "unanswered",
]
