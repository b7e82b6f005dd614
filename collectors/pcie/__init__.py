"""The PCIe bus: links, errors and settings of GPUs, NVSwitches, network adapters and NVMe drives."""

from collectors.pcie.links import PcieCollector

__all__ = ["PcieCollector"]
