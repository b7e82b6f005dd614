"""The host: processor, memory, kernel, GPUs on the PCI bus. Reads only /proc and /sys."""

from collectors.host.collector import HostCollector

__all__ = ["HostCollector"]
