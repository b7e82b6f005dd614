"""The host: processor, memory, kernel, GPUs on the PCI bus. Plain /proc and /sys."""

from collectors.host.collector import HostCollector
from collectors.host.parsing import cpu_model, load_average, memory

__all__ = ["HostCollector", "cpu_model", "load_average", "memory"]
